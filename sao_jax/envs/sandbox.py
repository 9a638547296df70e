"""Runs programs that nobody trusts, hundreds per second, and reports what they returned as plain data.

    sandbox = Sandbox()
    result = sandbox.run("def solve(x):\n    return 2 * x", calls=[[3], [5]])
    result.values    # (6, 10)

Each program runs in a process of its own, forked from a small helper (`zygote.py` says what confines it), with none of
our environment variables and an empty standard input. It reports what its calls returned; whether that is right is for
the caller to say, in this process, on plain data. So the right answers never reach the program, and nothing that it
prints, exits with or returns as an object can pass for one: `None`, `bool`, `int`, `float`, `str`, and lists, tuples
(as lists) and dicts of these, by exact type, are data; whatever else a call returns is an error of that call.
"""

import contextlib
import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ZYGOTE = Path(__file__).with_name("zygote.py")
_START_S = 60.0
_GRACE_S = 10.0  # for the helper to notice a program's time limit on a busy machine


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use. Fractions of a second count.

    Attributes:
      cpu_s: processor time. The limit that decides, so that a verdict does not depend on how busy the machine is.
      wall_s: time on the clock, for programs that wait.
      memory_mb: address space.
      output_bytes: each of standard output, standard error and the reported values; the rest is cut off.
    """

    cpu_s: float = 1.0
    wall_s: float = 5.0
    memory_mb: float = 512
    output_bytes: int = 65_536

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} is {value}; a limit is above 0")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a program ended.

    Attributes:
      status: "done"; "error" (it raised or exited before all calls had ended, or with a status other than 0); "time"
        or "output" (its limit); "crash" (a signal).
      exit: its exit status, negative for a signal.
      values: what each call returned; empty unless "done".
      errors: of each call, "" or "ValueError: ...", and then its value is None.
      stdout, stderr: as far as they were kept.
    """

    status: str
    exit: int
    values: tuple[Any, ...] = ()
    errors: tuple[str, ...] = ()
    stdout: str = ""
    stderr: str = ""

    @property
    def truncated(self) -> bool:
        return self.status == "output"


class Sandbox:
    """A pool of helper processes, started as they are needed; safe to use from any number of threads.

    Args:
      limits: of each program.
      workers: helpers, that is, programs that run at the same time.
      module: with it, `run(None, calls, entry)` calls that function of this trusted module, which may read files: it is
        the arguments that nobody trusts.
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None, module: str | None = None):
        self.limits = limits or Limits()
        self._module = module
        self._idle: queue.LifoQueue[_Helper | None] = queue.LifoQueue()
        for _ in range(workers or min(8, os.cpu_count() or 1)):
            self._idle.put(None)

    def run(self, source: str | None, calls: Sequence[Sequence[Any]] = (), entry: str = "solve") -> Result:
        """Runs a program, then `entry(*arguments)` for each of `calls`, in the same process.

        No source raises. Raises RuntimeError if the helper fails twice.
        """
        request = {"source": source, "calls": [list(c) for c in calls], "entry": entry}
        line = json.dumps(request | dataclasses.asdict(self.limits)).encode() + b"\n"
        helper = self._idle.get()
        try:
            for last in (False, True):
                try:
                    helper = helper or _Helper(self._module)
                    return _result(helper.ask(line, self.limits.wall_s + _GRACE_S), len(calls))
                except (OSError, EOFError, TimeoutError) as error:
                    if helper is not None:
                        helper.close()
                    helper = None
                    if last:
                        raise RuntimeError(f"the sandbox's helper process failed: {error}") from error
        finally:
            self._idle.put(helper)

    def close(self) -> None:
        """Ends the idle helpers; they start again if they are needed."""
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for helper in idle:
            if helper is not None:
                helper.close()
            self._idle.put(None)


class _Helper:
    """One helper process, used by one thread at a time."""

    def __init__(self, module: str | None):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = ["-sPS", str(_ZYGOTE)] if module is None else ["-sP", str(_ZYGOTE), module, str(_root())]
        # A session of its own, so that Ctrl-C reaches the run alone.
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=self._folder.name,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            if not json.loads(self._read(time.monotonic() + _START_S))["confined"]:
                _warn_unconfined()
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise

    def ask(self, line: bytes, timeout_s: float) -> dict:
        self._process.stdin.write(line)
        return json.loads(self._read(time.monotonic() + timeout_s))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._folder.cleanup()

    def _read(self, deadline: float) -> bytes:
        poll, pieces = select.poll(), []
        poll.register(self._process.stdout, select.POLLIN)
        while not pieces or not pieces[-1].endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("no answer")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError("it ended")
            pieces.append(piece)
        return b"".join(pieces)


def _result(reply: dict, calls: int) -> Result:
    values, errors = [], []
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):  # the program may write there as well
        for line in reply["values"].splitlines():
            report = json.loads(line)
            values.append(report["value"])
            errors.append(str(report["error"]))
    status = reply["ended"]
    if not status:
        complete = reply["exit"] == 0 and len(values) == len(errors) == calls
        status = "crash" if reply["exit"] < 0 else "done" if complete else "error"
    if status != "done":
        values, errors = [], []
    return Result(status, reply["exit"], tuple(values), tuple(errors), reply["stdout"], reply["stderr"])


def _root() -> Path:
    """The folder that this package is imported from."""
    return Path(__file__).resolve().parents[2]


_warned = threading.Lock()


def _warn_unconfined() -> None:
    if _warned.acquire(blocking=False):  # once
        warnings.warn(
            "no seccomp filter on this machine: judged programs have limits, but can read files and use the network",
            stacklevel=2,
        )
