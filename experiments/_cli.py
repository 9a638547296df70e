"""What every main shares: flags, the backend, and errors in one line."""

import ctypes
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro

T = TypeVar("T")
PARENT = "SAO_PARENT"  # an environment variable: the process that a run was started by and ends with


def parse(flags: type[T], description: str) -> T:
    """Flags by name; unknown ones and wrong types end with a message and exit code 2."""
    return tyro.cli(flags, description=description, config=(tyro.conf.FlagCreatePairsOff,))


def given() -> set[str]:
    """Names of the fields whose flags stand on the command line, also those given at their defaults.

    Called after `parse`, so that every word that begins with -- is a flag: --a-b x, --a-b=x or --a_b x.
    """
    return {word[2:].partition("=")[0].replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}


def results_folder(text: str) -> pathlib.Path:
    """What --results names, which need not exist yet. Raises ValueError where it cannot be a folder."""
    if not text:
        raise ValueError("--results is empty")
    path = pathlib.Path(text).resolve()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"--results {text}: {there} is a file, not a folder")
    return path


def main(body: Callable[[], Any]) -> None:
    """Runs `body`; a user's error is one line and exit code 2, a signal 128 + its number.

    Tracebacks are for our own faults; set SAO_TRACEBACK=1 to see one for a user's error as well.
    """
    from sao_jax.runtime.checkpoints import CheckpointError
    from sao_jax.runtime.hosts import HostLost
    from sao_jax.runtime.signals import GracefulStop, Interrupted

    try:
        with GracefulStop() as stop:
            end_with_parent()
            body(stop)
    except Interrupted as interrupted:
        print(f"stopped: {interrupted}", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    except HostLost as lost:
        print(f"stopped: {lost}", file=sys.stderr)
        sys.exit(lost.exit_code)
    except BrokenPipeError:
        sys.exit(141)
    except (ValueError, OSError, UserError, CheckpointError) as error:
        if os.environ.get("SAO_TRACEBACK"):
            raise
        if isinstance(error, ValueError) and not _is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def end_with_parent() -> None:
    """On Linux: SIGTERM, on which a run saves and stops, when the process named by `PARENT` is gone, killed or not."""
    parent = os.environ.pop(PARENT, None)  # of this process alone, not of those that it starts
    if parent is not None and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            signal.raise_signal(signal.SIGTERM)  # it was gone before we asked


class UserError(RuntimeError):
    """A wish that cannot be met; the message says why."""


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised the error, as opposed to JAX or NumPy on our behalf."""
    import sao_jax

    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    file = pathlib.Path(last.tb_frame.f_code.co_filename).resolve()
    return any(file.is_relative_to(pathlib.Path(ours).resolve().parent) for ours in (sao_jax.__file__, __file__))
