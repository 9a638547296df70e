"""What a run tells of itself while it works: `status.json` in its folder, for `experiments.status`."""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

EVERY_S = 2.0  # between two that only say how far a stage has come


class StatusFile:
    """Written anew whenever something is told; what was told before and not since stays in it.

    Losing it loses nothing, so a full disk is not an error here.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._told: dict[str, Any] = {}
        self._since: dict[str, float] = {}  # when stages began; the loop goes on after each evaluation
        self._written_at = -float("inf")

    def stage(self, name: str, done: int = 0, total: int | None = None, unit: str = "", **fields: Any) -> None:
        """A stage of the run begins, or has come further."""
        since = self._since.setdefault(name, time.time())
        self._tell(stage=name, since=since, done=done, total=total, unit=unit, **fields)

    @property
    def due(self) -> bool:
        """Whether the last one is old enough for another that says nothing new."""
        return time.monotonic() - self._written_at > EVERY_S

    def _tell(self, **fields: Any) -> None:
        self._told |= {"time": time.time(), "pid": os.getpid()} | fields
        self._written_at = time.monotonic()
        with contextlib.suppress(OSError):
            temporary = self._path.with_suffix(".json.tmp")
            temporary.write_text(json.dumps(self._told))
            temporary.replace(self._path)
