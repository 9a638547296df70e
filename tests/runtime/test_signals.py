import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from sao_jax.runtime.signals import GracefulStop, Interrupted

ROOT = pathlib.Path(__file__).parents[2]


def send(signum, stop):
    os.kill(os.getpid(), signum)
    deadline = time.monotonic() + 5
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_says_so_once(signum, capfd):
    with GracefulStop() as stop:
        stop.check()
        assert not stop.requested
        send(signum, stop)
        assert stop.requested
        with pytest.raises(Interrupted, match=signum.name) as caught:
            stop.check()
        assert caught.value.exit_code == 128 + signum
        os.kill(os.getpid(), signum)  # the same wish, delivered twice within milliseconds
        time.sleep(0.05)
    assert capfd.readouterr().err.count(f"{signum.name}: stopping at the next safe point") == 1


def test_previous_handlers_come_back_and_it_can_be_used_again():
    heard = []
    previous = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        for _ in range(2):
            with GracefulStop() as stop:
                send(signal.SIGTERM, stop)
                assert stop.requested
            assert not heard
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_do_not_ask():
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_it_works_when_other_code_takes_the_wakeup_descriptor():
    with GracefulStop() as stop:
        signal.set_wakeup_fd(-1)
        send(signal.SIGTERM, stop)
        assert stop.requested


# One call in C that runs no signal handlers and gives up the interpreter's lock meanwhile, as a compilation does.
_BUSY = """
import hashlib, sys
from sao_jax.runtime.signals import GracefulStop, Interrupted
with GracefulStop() as stop:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
    print("done", flush=True)
    try:
        stop.check()
    except Interrupted as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""


def busy_process(iterations):
    command = [sys.executable, "-c", _BUSY, str(iterations)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    return process


def test_one_signal_during_a_long_call_stops_after_it():
    process = busy_process(1_000_000)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert out == "done\nstopped by SIGTERM\n"
    assert err.count("\n") == 1
    assert process.returncode == 143


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_the_program_within_a_long_call(signum, code):
    process = busy_process(1_000_000_000)  # minutes
    process.send_signal(signum)
    time.sleep(0.35)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    assert out == ""
    assert process.returncode == code
