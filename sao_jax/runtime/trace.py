"""What happened when, as a file for chrome://tracing and ui.perfetto.dev (the Trace Event Format)."""

import json
import os
import pathlib
import threading
from typing import Any


class Trace:
    """Writes complete events to `path` as they end; readable at any moment, also after a kill.

    The format allows a list that is never closed, so that nothing has to be written at the end.
    """

    def __init__(self, path: pathlib.Path):
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}

    def add(self, name: str, track: str, start: float, end: float, **details: Any) -> None:
        """`name` took from `start` to `end`, in seconds of one clock, on the row called `track`."""
        with self._lock:
            if self._file.closed:
                return
            if track not in self._tracks:
                self._tracks[track] = len(self._tracks)
                self._write({"name": "thread_name", "ph": "M", "tid": self._tracks[track], "args": {"name": track}})
            event = {"name": name, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * (end - start), "tid": self._tracks[track]}
            self._write(event | ({"args": details} if details else {}))

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, event: dict) -> None:
        self._file.write(json.dumps(event | {"pid": os.getpid()}) + ",\n")
        self._file.flush()
