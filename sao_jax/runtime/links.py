"""The run's ends of its rollout processes, and how those are started: as processes of this machine.

`runtime.ray_links` starts the same workers as actors of a Ray cluster.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection as channels
from typing import Protocol

from sao_jax.runtime import wire
from sao_jax.runtime.devices import visible_gpus

COMMAND = (sys.executable, "-m", "sao_jax.runtime.worker")

Message = tuple[dict, bytes]  # kind and fields, payload


class Link(Protocol):
    """To one rollout process. `where`: for a person."""

    where: str

    def send(self, kind: str, payload: bytes = b"", **fields) -> None:
        """Raises OSError if the process is gone."""

    def announce(self, version: int, path: pathlib.Path, crc32: int) -> None:
        """Has the process load the weights in a file of this machine. Raises OSError if the process is gone."""

    def messages(self) -> Iterator[Message]:
        """What has arrived. Raises EOFError or OSError when the process is gone, ValueError for what is no message."""

    def end_of(self) -> str:
        """Why the process is gone."""

    def kill(self) -> None:
        """Ends the process at once."""

    def close(self, deadline: float) -> None:
        """Waits until the process, told to end, has ended, and kills it at the deadline (of `time.monotonic`)."""


class Backend(Protocol):
    def start(self, name: str) -> Link: ...

    def wait(self, links: Sequence[Link], seconds: float) -> list[Link]:
        """Those with messages, or which are gone; waits up to `seconds` for the first of them."""


def gpu_environment(number: int, own: int, gpus: Sequence[str]) -> dict[str, str]:
    """Where the process of this number computes: on a GPU behind the run's `own`, in turn, or on theirs if those are
    all; memory is then taken as it is needed."""
    if len(gpus) > own:
        return {"CUDA_VISIBLE_DEVICES": gpus[own + number % (len(gpus) - own)]}
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} | shared if gpus else {}


class LocalLink:
    def __init__(self, log: pathlib.Path, arguments: Sequence[str], environment: dict[str, str]):
        self._connection, theirs = wire.pair()
        self._log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is for the run, which tells its processes
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | environment,
            )
        theirs.close()
        self.pid = self._popen.pid
        self.where = f"process {self.pid}"

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: str, payload: bytes = b"", **fields) -> None:
        wire.send(self._connection, kind, payload, **fields)

    def announce(self, version: int, path: pathlib.Path, crc32: int) -> None:
        self.send("prepare", version=version, path=str(path), crc32=crc32)

    def messages(self) -> Iterator[Message]:
        while self._connection.poll(0):
            yield wire.receive(self._connection)

    def end_of(self) -> str:
        code = self._popen.poll()
        if code is None:
            try:
                code = self._popen.wait(0.5)
            except subprocess.TimeoutExpired:
                return "closed its connection"
        if code < 0:
            return f"killed by signal {-code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f": {lines[-1][:200]}" if code and lines else "")

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._connection.close()

    def close(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


class LocalBackend:
    """Processes of this machine. Their output goes to files in `logs`; the first `own_gpus` GPUs are the run's."""

    def __init__(self, logs: pathlib.Path, arguments: Sequence[str] = (), *, own_gpus: int = 0):
        self._logs, self._arguments, self._own = logs, arguments, own_gpus
        self._gpus, self._started = visible_gpus(), 0

    def start(self, name: str) -> LocalLink:
        self._logs.mkdir(exist_ok=True)
        environment = gpu_environment(self._started, self._own, self._gpus)
        self._started += 1
        return LocalLink(self._logs / f"{name}.log", self._arguments, environment)

    def wait(self, links: Sequence[LocalLink], seconds: float) -> list[LocalLink]:
        return channels.wait(links, seconds)
