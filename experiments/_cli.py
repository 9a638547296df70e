"""What every main shares: flags, the backend, and errors in one line."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def parse(flags: type[T], description: str) -> T:
    """Flags by name; unknown ones and wrong types end with a message and exit code 2."""
    return tyro.cli(flags, description=description, config=(tyro.conf.FlagCreatePairsOff,))


def main(body: Callable[[], Any]) -> None:
    """Runs `body`; a user's error is one line and exit code 2, a signal 128 + its number.

    Tracebacks are for our own faults; set SAO_TRACEBACK=1 to see one for a user's error as well.
    """
    from sao_jax.runtime.signals import GracefulStop, Interrupted

    try:
        with GracefulStop() as stop:
            body(stop)
    except Interrupted as interrupted:
        print(f"stopped: {interrupted}", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    except BrokenPipeError:
        sys.exit(141)
    except (ValueError, OSError, UserError) as error:
        if os.environ.get("SAO_TRACEBACK"):
            raise
        if isinstance(error, ValueError) and not _is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class UserError(RuntimeError):
    """A wish that cannot be met; the message says why."""


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised the error, as opposed to JAX or NumPy on our behalf."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return os.sep + "sao_jax" + os.sep in last.tb_frame.f_code.co_filename or "experiments" in (
        last.tb_frame.f_code.co_filename
    )
