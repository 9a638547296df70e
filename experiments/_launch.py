"""Starts the processes of a run over several hosts on this machine, and starts all again when one of them is gone."""

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments import _cli
from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.hosts import EXIT_LOST, TOKEN, free_port
from sao_jax.runtime.ledger import Ledger, LedgerError

LIVES = 3  # in a row that may pass without an update, until the launcher gives up
LEAVE_S = 60.0  # for the other processes, once one has ended
POLL_S = 0.1


def launch(count: int, folder: pathlib.Path, stop, *, again: bool, kept: Sequence[str]) -> int:
    """Runs this command with `count` processes until the run has ended; returns its exit code.

    `again`: the command can be given once more as it stands, since it continues something; `kept`: flags that are
    given beside --resume as well.
    """
    arguments = sys.argv[1:]
    if not again and "run_dir" not in _cli.given():
        arguments = [*arguments, "--run-dir", str(folder)]
    without = 0
    while True:
        before = progress(folder)
        code = one_life(count, arguments, stop)
        if code != EXIT_LOST or stop.requested:
            return code
        without = 0 if progress(folder) > before else without + 1
        if without == LIVES:
            print(f"error: a host was lost {LIVES} times in a row and no update was made in between", file=sys.stderr)
            return EXIT_LOST
        if not again and (folder / "config.json").exists():
            arguments, again = ["--resume", str(folder), "--num-hosts", str(count), *kept], True
        print("a host is gone: all are started again", file=sys.stderr, flush=True)


def one_life(count: int, arguments: list[str], stop) -> int:
    """Starts all processes and waits for them; EXIT_LOST if any was killed."""
    environment = os.environ | {TOKEN: secrets.token_hex(16), _cli.PARENT: str(os.getpid())}
    coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [sys.executable, "-m", "experiments.train", *arguments, "--coordinator", coordinator]
    processes = [
        subprocess.Popen(
            [*command, "--host-index", str(index)],
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the launcher, which tells the leader
        )
        for index in range(count)
    ]
    try:
        told, deadline = False, float("inf")
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            if stop.requested and not told:
                processes[0].send_signal(stop.signum)
                told = True
            leader, *followers = (process.returncode for process in processes)
            if deadline == float("inf") and (leader is not None or any(followers)):
                deadline = time.monotonic() + LEAVE_S
    finally:
        for process in processes:
            process.kill()
            process.wait()
    code = processes[0].returncode
    return EXIT_LOST if code < 0 or code == 128 + signal.SIGABRT else code


def progress(folder: pathlib.Path) -> int:
    """Updates that a run has recorded, preheating of the critic counted as one; or those that a replay has saved."""
    if (folder / "ledger.sqlite").exists():
        with contextlib.suppress(LedgerError), Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            return sum(1 for _ in ledger.events(kinds=("update", "preheat")))
        return 0
    with Checkpoints(folder / "checkpoints") as checkpoints:
        newest = checkpoints.newest()
        return 0 if newest is None else checkpoints.read_meta(newest)["updates"]
