"""SIGINT and SIGTERM: the first asks the program to stop in an orderly way, the second ends it at once.

Python runs signal handlers between two bytecodes of the main thread, which may be minutes away while XLA compiles. A
thread therefore listens on the wakeup descriptor, which the C level handler writes at the moment of the signal.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout`, batch systems and a terminal's process group deliver one wish twice within milliseconds.
_SAME_WISH_S = 0.3


class Interrupted(Exception):
    """Raised by `GracefulStop.check`; `exit_code` is 128 + the number of the signal, as shells expect it."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class GracefulStop:
    """`with GracefulStop() as stop:` in the main thread; poll `stop.requested`, or call `stop.check()` in long phases.

    The previous handlers come back at the end of the block. A second signal, more than 0.3 s after the first, restores
    the terminal and exits with 130 (SIGINT) or 143 (SIGTERM) without any cleanup: what is durable stays, nothing else.
    """

    def __init__(self):
        self.signum = 0
        self._first_at: dict[str, float] = {}
        self._announced = threading.Lock()

    @property
    def requested(self) -> bool:
        return self.signum != 0

    def check(self) -> None:
        """Raises Interrupted if a signal has arrived; for use between the compiled calls of a long phase."""
        if self.signum:
            raise Interrupted(self.signum)

    def __enter__(self) -> "GracefulStop":
        self._terminal = _terminal_settings()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        self._previous_wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._sender.close()  # ends the listener
        self._listener.join()
        self._receiver.close()

    def _handle(self, signum: int, _) -> None:
        # Late, but still there if other code (an event loop) has taken the wakeup descriptor for itself.
        self._count("handler", signum)

    def _listen(self) -> None:
        while received := self._receiver.recv(1):
            if received[0] in _SIGNALS:
                self._count("listener", received[0])

    def _count(self, source: str, signum: int) -> None:
        """Each source counts for itself, because each is told of the same signals."""
        now = time.monotonic()
        if now - self._first_at.setdefault(source, now) > _SAME_WISH_S:
            _restore_terminal(self._terminal)
            os._exit(128 + signum)
        if self._announced.acquire(blocking=False):
            self.signum = signum
            name = signal.Signals(signum).name
            _say(f"{name}: stopping at the next safe point, a second signal stops at once\n")


def _say(text: str) -> None:
    # Straight to the descriptor: sys.stderr may be locked by the thread that is being interrupted.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _terminal_settings():
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    import termios

    return termios.tcgetattr(sys.stdin.fileno())


def _restore_terminal(settings) -> None:
    if settings is not None:
        import termios

        termios.tcsetattr(0, termios.TCSANOW, settings)
    if os.isatty(2):
        _say("\x1b[?25h\x1b[0m\n")  # cursor visible, no colour: a progress display may have changed both
