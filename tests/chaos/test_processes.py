"""Rollout processes whose weights are late or damaged, that outrun the learner, or whose clock jumps."""

import errno
import os
import signal
import time

import pytest
from helpers import SilentDisplay, quick_compile  # noqa: F401
from invariants import FLAGS, TASK, check_run, last_position

from sao_jax.learner.learner import Learner
from sao_jax.rollout.clock import Clock
from sao_jax.runtime import run as run_module
from sao_jax.runtime import workers as module
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.train import train


def train_with(folder, check=lambda display: None, seconds=300.0, **flags):
    """Trains within `seconds`; returns the display's notes."""
    display, end = SilentDisplay(), time.monotonic() + seconds

    def within_time():
        assert time.monotonic() < end, f"no end within {seconds} s; notes: {display.notes[-8:]}"
        check(display)

    train(RunConfig(**FLAGS | flags).resolved(), folder, display, check=within_time, trace=True)
    return display.notes


@pytest.mark.slow
def test_a_failed_publication_is_repeated_and_nothing_is_sampled_with_damaged_weights(tmp_path, workers, monkeypatch):
    save, faults = module.save_weights, {1: "flip", 2: "full", 3: "cut"}

    def faulty(path, params):
        fault = faults.pop(int(path.stem), None)
        if fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        crc32 = save(path, params)
        data = bytearray(path.read_bytes())
        if fault == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if fault == "cut" else data)
        return crc32

    monkeypatch.setattr(module, "save_weights", faulty)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    notes = train_with(tmp_path / "run", workers=2, max_staleness=0, rollouts=28)
    failed = [note for note in notes if note.startswith("publication of version")]
    assert not faults, "not every fault has happened"
    said = {version: [note for note in failed if note.split()[3] == version] for version in "123"}
    assert "refused it: damaged weights" in said["1"][0]
    assert "No space left on device" in said["2"][0]
    assert "refused it: damaged weights" in said["3"][0]
    record = check_run(tmp_path / "run")
    sampled = {int(v) for t in record.trajectories.values() for v in t.version[t.action_mask]}
    assert max(sampled) == 6, "publications went on"
    assert max(record.staleness) == 0, "nothing begins with weights older than the bound allows"
    assert workers[0].version == 7
    assert record.counts["dropped"] == 0
    trace = (tmp_path / "run" / "trace.json").read_text()
    assert all(f'"worker {name}"' in trace for name in ("w0", "w1")), "who sampled what, and when"


@pytest.mark.slow
def test_a_slow_learner_bounds_what_is_under_way_and_loses_no_process(tmp_path, workers, monkeypatch):
    """Its longest pause is longer than processes may be silent."""
    update, pauses = Learner.update, iter([0.2, 4.0])

    def slow(self):
        time.sleep(next(pauses, 0.2))
        return update(self)

    monkeypatch.setattr(Learner, "update", slow)
    waiting = []

    def look(display):
        if workers and workers[0]._processes:
            waiting.append(workers[0].running)

    notes = train_with(tmp_path / "run", look, workers=1, worker_timeout=3.0, max_staleness=2)
    record = check_run(tmp_path / "run")
    assert next(pauses, None) is None, "the learner was not slow"
    assert not [note for note in notes if "is replaced" in note]
    outstanding, most = -FLAGS["preheat_rollouts"], 0
    for event in record.events:
        outstanding += event.kind == "admit"
        most = max(most, outstanding)
        outstanding -= event.payload["rollouts"] if event.kind == "update" else 0
    assert most == (2 + 1) * FLAGS["batch_size"], "processes ran ahead as far as the bound allows, and no further"
    assert max(waiting) <= most
    assert record.counts["dropped"] == 0


class JumpingClock:
    def __init__(self):
        self.jumped = 0.0

    def __call__(self):
        return time.monotonic() + self.jumped


@pytest.mark.slow
def test_a_clock_that_jumps_costs_restarts_of_processes_and_nothing_else(tmp_path, workers):
    """Hours forward, until a paused process seems to have been silent for as long; two back, when one is replaced."""
    clock, folder, done = JumpingClock(), tmp_path / "run", []
    workers.options["clock"] = clock

    def jump(display):
        position, processes = last_position(folder), workers[0]._processes if workers else []
        if not done and any("no sign of life" in note for note in display.notes):
            done.append("forward")
        elif not done and position > 100 and processes and workers[0].running:
            os.kill(processes[0].link.pid, signal.SIGSTOP)  # what it sends would refute the clock
            clock.jumped += 3600
        elif done == ["forward"] and position > 180 and processes:
            done.append("kill")
            os.kill(processes[0].link.pid, signal.SIGKILL)
        elif done == ["forward", "kill"] and not processes:
            done.append("back")
            clock.jumped -= 7200

    notes = train_with(folder, jump, workers=1, task=f"{TASK},wait=0.05", rollouts=64)
    assert done == ["forward", "kill", "back"]
    replaced = [note.partition(" is replaced: ")[2] for note in notes if "is replaced" in note]
    assert len(replaced) == 2
    assert replaced[0].startswith("no sign of life for 60 s")
    assert replaced[1].startswith("killed by signal 9")
    record = check_run(folder)
    assert record.counts["trained"] == 72
    assert record.of_kind("restart")


@pytest.mark.slow
@pytest.mark.parametrize("hours", [1, -1])
def test_simulated_environments_get_over_a_clock_that_jumps(tmp_path, monkeypatch, hours):
    clock, folder = JumpingClock(), tmp_path / "run"
    monkeypatch.setattr(run_module, "make_clock", lambda *_: Clock(clock))

    def jump(display):
        if not clock.jumped and last_position(folder) > 100:
            clock.jumped = hours * 3600.0

    train_with(folder, jump, task="tiny:turns=2", env_seconds=0.5)
    assert clock.jumped
    assert check_run(folder).counts["trained"] == 56
