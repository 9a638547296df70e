"""Processes of a run that are killed at random moments; see `invariants` for the long form of these tests."""

import contextlib
import itertools
import os
import random
import signal
import time

import pytest
from helpers import SilentDisplay, quick_compile  # noqa: F401
from invariants import (
    FLAGS,
    KILLS,
    SEED,
    TASK,
    attempts_under_way,
    check_record,
    check_run,
    children,
    has_ended,
    last_position,
    output_of,
)

from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.loop import Loop
from sao_jax.runtime.train import train

LIFE_S = 240.0  # a run that is not killed ends before


def moments(rng, count):
    """(kind, how much of it, seconds after that). Every third lies in the start, the others after some events."""
    for number in range(count):
        if number % 3 == 2:
            yield "seconds", rng.uniform(0.3, 4.0), 0.0
        else:
            yield "events", rng.randint(1, 60), rng.uniform(0, 0.1)


def wait_for(process, folder, kind, amount, more):
    """Until the moment has come, after some events one at which attempts are under way, or the process has ended."""
    begun, before = time.monotonic(), last_position(folder)
    while process.poll() is None and time.monotonic() < begun + LIFE_S:
        passed = time.monotonic() - begun if kind == "seconds" else last_position(folder) - before
        if passed >= amount and (kind == "seconds" or attempts_under_way(folder)):
            break
        time.sleep(0.02)
    time.sleep(more)


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "count"),
    [(dict(workers=2), KILLS), (dict(devices=2), -(-KILLS // 2))],
    ids=["three-processes", "one-process"],
)
def test_a_run_that_is_killed_at_random_moments_loses_and_repeats_nothing(tmp_path, training, flags, count):
    """Every other time only the learner is killed, and its rollout processes end by themselves."""
    rng, folder = random.Random(f"{SEED}/{sorted(flags)}"), tmp_path / "run"
    flags, orphans = FLAGS | flags | dict(rollouts=32 * count, task=f"{TASK},wait=0.05"), 0
    for number, moment in enumerate(moments(rng, count)):
        process = training(folder, **flags)
        wait_for(process, folder, *moment)
        print(f"seed {SEED}: kill after {moment}, at position {last_position(folder)}")
        assert process.poll() is None, f"the run ended before it was killed\n{output_of(folder)[-3000:]}"
        pids = children(process.pid)
        dying = [process.pid] if number % 2 else [process.pid, *pids]
        orphans += 0 if len(dying) > 1 else len(pids)
        rng.shuffle(dying)
        kill(dying)
        assert process.wait() == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while not all(map(has_ended, pids)):
            assert time.monotonic() < deadline, "a rollout process lives on without its run"
            time.sleep(0.05)
        if (folder / "metrics.jsonl").exists():
            check_record(folder)
    process = training(folder, **flags)
    assert process.wait(LIFE_S) == 0, output_of(folder)[-3000:]
    record = check_run(folder, resample="workers" not in flags)
    assert record.counts["trained"] == record.counts["handed_out"] == 8 + 32 * count
    assert record.of_kind("restart"), "no attempt was under way at any kill"
    assert orphans > 0 or "workers" not in flags, "no learner was killed while its rollout processes lived"


@pytest.mark.slow
def test_killed_rollout_processes_cost_restarts_and_nothing_else(tmp_path, workers, monkeypatch):
    """Half of the kills come at any moment, half right before attempts are sent to the process that was killed."""
    rng, folder, display = random.Random(SEED), tmp_path / "run", SilentDisplay()
    rollouts, end = 24 * KILLS, time.monotonic() + LIFE_S * (1 + KILLS / 5)
    positions = sorted(rng.sample(range(60, 2 * rollouts), KILLS))  # the run is to go on long enough to see them
    print(f"seed {SEED}: kills at positions {positions}")
    killed = []

    def kill_if_due(at):
        alive = [p for p in workers[0]._processes if p not in killed]  # that one is dead may not have been seen yet
        if positions and len(positions) % 2 == at and last_position(folder) >= positions[0] and alive:
            victim = rng.choice(alive)
            kill([victim.link.pid])
            killed.append(victim)
            del positions[0]
            while not has_ended(victim.link.pid):
                time.sleep(0.01)

    def check():
        assert time.monotonic() < end, f"no end in sight; notes: {display.notes[-5:]}"
        kill_if_due(0)

    admit = Loop._admit

    def admit_after_kill(self, ended=0):
        if self.run.agents.free > 0:
            kill_if_due(1)
        admit(self, ended)

    monkeypatch.setattr(Loop, "_admit", admit_after_kill)
    # Batches so large that all slots are in use: what was to go to the process that was killed finds no other place.
    flags = FLAGS | dict(task=f"{TASK},wait=0.02", workers=2, batch_size=8, rollouts=rollouts, max_attempts=1 + KILLS)
    train(RunConfig(**flags).resolved(), folder, display, check=check)
    assert len(killed) == KILLS
    replaced = [note for note in display.notes if "is replaced: killed by signal 9" in note]
    assert len(replaced) == KILLS
    record = check_run(folder)
    assert record.counts["trained"] == rollouts + 8
    restarts = record.of_kind("restart")
    assert restarts, "no attempt was under way at any kill"
    assert all("killed by signal 9" in p["failure"] for p in restarts)
    names = {p["failure"].split()[1].rstrip(":") for p in restarts}
    assert names <= {process.name for process in itertools.chain(killed)}
