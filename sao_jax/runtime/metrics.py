"""metrics.jsonl: one JSON object a line. And a timer whose stages do not overlap and add up."""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sao_jax.runtime.trace import Trace


class MetricsLog:
    """Appends lines {"step": ..., "time": ..., name: value, ...} and flushes each.

    Args:
      path: the file. Without `resume_step` it must not exist.
      resume_step: step of the restored checkpoint. Lines of later steps are removed (they will be computed again, and a
        curve must not have two values at one step), and so is a last line torn by a kill.
      durable_step: evaluations up to this step stay: the updates before them will be applied again as they were.
      tensorboard: a folder for TensorBoard's event files as well; needs the package tensorboardX.

    NaN and infinity become null, scalars and arrays of numpy and JAX plain numbers and lists; converting a JAX array
    waits for its computation, so hand it over one step late.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        resume_step: int | None = None,
        durable_step: int | None = None,
        tensorboard: str | os.PathLike | None = None,
    ):
        self.path = pathlib.Path(path)
        if resume_step is None and self.path.exists():
            raise ValueError(f"{self.path} exists already: resume this run or choose another run folder")
        self._board = _tensorboard_writer(tensorboard, resume_step)
        if resume_step is not None and self.path.exists():
            _remove_after(self.path, resume_step, resume_step if durable_step is None else durable_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = {name: _plain(value) for name, value in metrics.items()}
        if clash := values.keys() & {"step", "time"}:
            raise ValueError(f"{sorted(clash)} cannot be names of metrics: every line has them")
        line = {"step": int(step), "time": time.time(), **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, int(step))
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """All lines of a metrics file; a last line that is still being written, or was torn by a kill, is left out.

    Raises ValueError for a damaged line elsewhere, with its number.
    """
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    result = []
    for number, line in enumerate(lines[:-1], 1):  # the last one has no line end
        try:
            result.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return result


class StageTimer:
    """Wall-clock time by stage. At every moment exactly one stage runs, so the times add up to the time passed.

    `with timer("rollout"):` pauses the stage around it and goes back to it; `timer.switch("env")` changes the stage in
    place. Outside of both runs "other".
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, trace: Trace | None = None):
        self._clock, self._trace = clock, trace
        self._stage = "other"
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def switch(self, stage: str) -> str:
        """Starts `stage`, returns the one that it ends."""
        now, previous = self._clock(), self._stage
        if self._trace is not None and now - self._since > 1e-5:
            self._trace.add(previous, "host loop", self._since, now)
        self._seconds[previous] = self._seconds.get(previous, 0.0) + now - self._since
        self._stage, self._since = stage, now
        return previous

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        previous = self.switch(stage)
        try:
            yield
        finally:
            self.switch(previous)

    def read(self) -> dict[str, float]:
        """{"timing_s/<stage>": seconds} since the last call; their sum is the time between the two calls."""
        self.switch(self._stage)
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{stage}": value for stage, value in seconds.items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and JAX
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _remove_after(path: pathlib.Path, step: int, evaluated: int) -> None:
    def stays(line: dict) -> bool:
        return line["step"] <= (evaluated if line.get("stage") == "eval" else step)

    kept = [line for line in read_metrics(path) if stays(line)]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def require_tensorboard() -> None:
    """Raises ValueError, which says what to install, where TensorBoard events cannot be written."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        raise ValueError("--tensorboard needs tensorboardX: pip install 'sao_jax[tensorboard]'") from None


def _tensorboard_writer(folder: str | os.PathLike | None, resume_step: int | None):
    if folder is None:
        return None
    require_tensorboard()
    from tensorboardX import SummaryWriter

    # TensorBoard hides what an earlier part of the run wrote from purge_step on.
    return SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)
