"""What the run does about rollout processes that die, hang, lie, or miss new weights."""

import os
import pathlib
import signal
import sys
import time

import numpy as np
import pytest
from helpers import MODEL_FLAGS, Tiny

from sao_jax.data.trajectory import Trajectory, TrajectoryBuilder
from sao_jax.rollout.agents import Failure
from sao_jax.runtime import links, wire
from sao_jax.runtime import workers as module
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.router import owner
from sao_jax.runtime.workers import Workers

FAKE = pathlib.Path(__file__).with_name("fake_worker.py")
PARAMS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.float32([7])}}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that makes `Workers` of fake processes."""
    made = []
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(links, "COMMAND", (sys.executable, str(FAKE)))

    def new(count=2, slots=8, behaviour="", **flags):
        (tmp_path / "behaviour").write_text(behaviour)
        config = RunConfig(**MODEL_FLAGS, task="tiny", workers=count, slots=slots, **flags)
        notes = []
        backend = links.LocalBackend(tmp_path / "workers", [str(tmp_path)])
        made.append(Workers(config, Tiny(), 32, tmp_path, backend, note=notes.append))
        made[-1].notes = notes
        made[-1].publish(PARAMS, 0)
        return made[-1]

    yield new
    for workers in made:
        workers.close()


def until(workers, holds, seconds=20.0):
    """Collects until `holds()`; returns what ended."""
    ended, deadline = [], time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s; notes: {workers.notes}"
        ended += workers.collect(wait=0.02)
    return ended


def play(workers, count, *, attempts=4, seconds=30.0):
    """Runs rollouts 0..count-1, each again when it fails; returns ({rollout: trajectory}, failures)."""
    todo = [(i, 0) for i in range(count)]
    done, failures, deadline = {}, [], time.monotonic() + seconds
    while len(done) < count:
        assert time.monotonic() < deadline, f"{len(done)} of {count} done; notes: {workers.notes}"
        while todo and workers.free > 0:
            rollout, attempt = todo.pop(0)
            assert attempt < attempts
            workers.start("train", rollout, rollout=rollout, attempt=attempt, seed=1)
        for item in workers.collect(wait=0.02):
            if isinstance(item, Failure):
                failures.append(item)
                todo.append((item.rollout, item.attempt + 1))
            else:
                assert item.rollout not in done, "handed over twice"
                done[item.rollout] = item
    return done, failures


def test_every_rollout_comes_back_once_and_all_processes_work(make, tmp_path):
    workers = make(count=3, slots=6, behaviour="slow")
    done, failures = play(workers, 24)
    assert sorted(done) == list(range(24))
    assert not failures
    assert all(isinstance(t, Trajectory) and t.seed == 1 and t.total_reward == t.rollout % 2 for t in done.values())
    assert workers.running == 0
    assert workers.free == 6
    assert {w.latency_s is not None for w in workers._router.workers.values()} == {True}


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [("die", "killed by signal 9"), ("exit", "ended with exit code 3"), ("nonsense", "sent garbage"),
     ("hang", "no sign of life for 1 s"), ("nan", "returned garbage: a log-prob is not finite"),
     ("strange", "returned garbage: token 99 of a vocabulary"), ("senseless", "sent garbage: reward at token 3"),
     ("long", "1002 tokens in a context of 32"), ("future", "tokens of version 7, and the newest published one is 0")],
)  # fmt: skip
def test_a_process_that_misbehaves_costs_a_restart_and_nothing_else(make, tmp_path, behaviour, says):
    workers = make(behaviour=behaviour, worker_timeout=1.0)
    done, failures = play(workers, 30)
    assert (tmp_path / f"{behaviour}.done").exists(), "the fault did happen"
    assert sorted(done) == list(range(30))
    assert failures
    assert any(says in f.reason for f in failures), failures
    assert all(np.all(np.isfinite(t.rollout_logp)) for t in done.values())
    until(workers, lambda: workers.free == 8)
    assert len(workers._processes) == 2, "what was lost has been replaced"


def test_a_frozen_process_that_takes_no_message_does_not_hold_up_the_run(make, tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "SEND_S", 0.3)
    workers = make(behaviour="hang", worker_timeout=60.0)
    until(workers, lambda: workers.free == 8)
    workers.start("train", 0, rollout=0)
    until(workers, lambda: (tmp_path / "hang.done").exists())
    long = TrajectoryBuilder([0, 1], task="t")
    long.add_action([1] * 20_000, [-0.5] * 20_000, [0] * 20_000)
    begun = time.monotonic()
    for rollout in range(1, 8):
        if workers.free:  # fewer once it has been given up
            workers.start("train", rollout, rollout=rollout, attempt=1, snapshot=long.build("truncated", "snapshot"))
    assert time.monotonic() - begun < 10.0
    until(workers, lambda: any("took no message" in note for note in workers.notes))


def test_weights_that_a_process_has_loaded_twice_are_committed_once(make, tmp_path):
    """One refuses; the other, busy meanwhile, finds the first announcement and the second, and answers both."""
    workers = make()
    until(workers, lambda: workers.free == 8)
    (tmp_path / "behaviour").write_text("refuse")
    workers.publish(PARAMS, 1)
    until(workers, lambda: workers.version == 1 and all(p.version == 1 for p in workers._processes))
    assert (tmp_path / "late.done").exists()
    end = time.monotonic() + 0.5
    until(workers, lambda: time.monotonic() > end)
    assert [p.name for p in workers._processes] == ["w0", "w1"], workers.notes


def test_attempts_stay_with_their_process_and_those_of_a_lost_one_go_where_their_number_says(make):
    workers = make(count=4, slots=64, behaviour="slow")
    until(workers, lambda: workers.free == 64)
    places = lambda: {r: a.process.name for r, a in workers._attempts.items()}  # noqa: E731
    for rollout in range(24):
        workers.start("train", rollout, rollout=rollout)
    before = places()
    lost = before[0]
    os.kill(next(p for p in workers._processes if p.name == lost).link.pid, signal.SIGKILL)
    failed = [item for item in until(workers, lambda: workers.notes) if isinstance(item, Failure)]
    failed += [item for item in workers.collect() if isinstance(item, Failure)]
    assert failed
    assert all(before[f.rollout] == lost for f in failed), "only those of the lost process move"
    assert all(before[r] == place for r, place in places().items())
    left = list(workers._router.workers)
    assert len(left) == 3, "another process has taken the place already"
    for f in failed:
        workers.start("train", f.rollout, rollout=f.rollout, attempt=1)
    assert {f.rollout: places()[f.rollout] for f in failed} == {f.rollout: owner(f.rollout, left) for f in failed}
    assert not workers._moved


def test_what_a_process_says_of_rollouts_it_does_not_run_is_ignored(make, tmp_path):
    workers = make(count=1, behaviour="other", worker_timeout=60.0)
    until(workers, lambda: workers.free == 8)
    workers.start("train", 0, rollout=0)
    workers.start("train", 1, rollout=1)
    ended = until(workers, lambda: workers.running < 2)
    until(workers, lambda: (tmp_path / "other.done").exists())
    assert [t.rollout for t in ended if t.rollout > 5] == []


def test_segments_are_handed_on_before_a_process_dies(make):
    workers = make(behaviour="seam")
    parts = []
    workers.seam = parts.append
    done, failures = play(workers, 8)
    assert len(done) == 8
    assert [(p.attempt, p.first_token, p.length, p.last) for p in parts] == [(0, 0, 4, False)]
    assert parts[0].rollout in {f.rollout for f in failures}


def test_weights_are_used_by_all_or_by_none(make, tmp_path):
    workers = make(count=3)
    play(workers, 6)
    files = lambda: sorted(p.name for p in (tmp_path / "weights").iterdir())  # noqa: E731
    assert files() == ["0.safetensors"]
    for version in (1, 2, 3):
        workers.publish(PARAMS, version)
        until(workers, lambda version=version: workers.version == version)
        done, _ = play(workers, 12)
        until(workers, lambda version=version: {p.version for p in workers._processes} == {version})
        assert {int(v) for t in done.values() for v in t.version[t.action_mask]} <= {version - 1, version}
    assert files() == ["3.safetensors"], "weights that nobody uses are gone"
    workers.publish(PARAMS, 4)
    workers.publish(PARAMS, 5)  # while 4 has not even been written: it is never sent
    until(workers, lambda: workers.version == 5)
    assert not any("failed" in note for note in workers.notes)


def test_a_refused_publication_leaves_everyone_on_the_old_version_and_is_tried_again(make, tmp_path):
    workers = make(count=3)
    until(workers, lambda: [p.version for p in workers._processes] == [0, 0, 0])
    (tmp_path / "behaviour").write_text("refuse")
    workers.publish(PARAMS, 1)
    until(workers, lambda: any("publication of version 1 failed" in note for note in workers.notes))
    assert workers.version == 0
    assert {p.version for p in workers._processes} == {0}
    until(workers, lambda: {p.version for p in workers._processes} == {1})
    assert workers.version == 1


def test_a_full_disk_delays_a_publication(make, tmp_path, monkeypatch):
    workers = make()
    play(workers, 4)
    save, failures = module.save_weights, []

    def full(path, params):
        if len(failures) < 2:
            failures.append(path)
            raise OSError(28, "No space left on device")
        return save(path, params)

    monkeypatch.setattr(module, "save_weights", full)
    workers.publish(PARAMS, 1)
    until(workers, lambda: len(failures) == 2)
    assert workers.version == 0
    assert len(play(workers, 4)[0]) == 4, "sampling goes on with the old weights"
    until(workers, lambda: workers.version == 1)
    assert sum("No space left" in note for note in workers.notes) == 2


def test_a_process_that_dies_while_weights_are_on_their_way_does_not_hold_them_up(make):
    workers = make(count=2)
    until(workers, lambda: [p.version for p in workers._processes] == [0, 0])
    os.kill(workers._processes[0].link.pid, signal.SIGSTOP)
    workers.publish(PARAMS, 1)
    for _ in range(10):
        workers.collect(wait=0.02)
    assert workers.version == 0, "one has not loaded them"
    os.kill(workers._processes[0].link.pid, signal.SIGKILL)
    until(workers, lambda: workers.version == 1)
    until(workers, lambda: [p.version for p in workers._processes] == [1, 1])


def test_attempts_that_were_stopped_do_not_come_back(make):
    workers = make(behaviour="slow")
    until(workers, lambda: workers.free == 8)
    for i in range(6):
        workers.start("train", i, rollout=i)
    workers.stop()
    assert workers.running == 0
    assert workers.free == 8
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        assert workers.collect(wait=0.05) == []
    assert len(play(workers, 4)[0]) == 4


def test_closing_ends_all_processes(make):
    workers = make()
    until(workers, lambda: workers.free == 8)
    popens = [p.link._popen for p in workers._processes]
    os.kill(popens[0].pid, signal.SIGSTOP)  # by force, if it must be
    workers.close()
    assert all(p.returncode is not None for p in popens)
    workers.close()


def test_a_hot_process_gets_nothing(make):
    """What a process says of its device moves the router's weights, and is shown with its utilisation."""
    workers = make(count=2, slots=8, behaviour="hot")
    until(workers, lambda: len(workers._router.workers) == 2)
    assert workers.free == 4
    done, failures = play(workers, 12)
    assert len(done) == 12
    assert not failures
    hot = [e for e in workers.describe() if e["temperature_c"] > 80]
    assert [e["name"] for e in hot] == ["w1"]
    assert workers._router.workers["w1"].latency_s is None, "it never had a task"
    assert workers.utilization() == [(0.5, 0.25), (0.5, 0.25)]


def test_a_process_that_has_to_wait_before_it_starts_holds_up_no_other(make):
    workers = make(count=3)
    workers._starts = [workers._clock() + 3600.0, 0.0, 0.0]  # the first place failed a moment ago
    until(workers, lambda: len(workers._router.workers) == 2)
    assert [p.name for p in workers._processes] == ["w0", "w1"]
    assert len(workers._starts) == 1


def test_processes_that_never_start_end_the_run(make, monkeypatch):
    monkeypatch.setattr(links, "COMMAND", (sys.executable, "-c", "raise SystemExit('no module named torch')"))
    workers = make(count=2)
    with pytest.raises(module.FailedWorkersError, match=r"6 rollout .* exit code 1: no module named torch"):
        until(workers, lambda: False)


@pytest.mark.parametrize(
    ("own", "gpus", "expected"),
    [(1, "4567", ["5", "6", "7", "5"]), (3, "4567", ["7"] * 4), (0, "", [None] * 4), (2, "01", ["0", "1", "0", "1"])],
)
def test_processes_compute_on_gpus_that_the_run_does_not_use_if_there_are_any(own, gpus, expected):
    environments = [links.gpu_environment(number, own, gpus) for number in range(4)]
    assert [e.get("CUDA_VISIBLE_DEVICES") for e in environments] == expected
    assert all(("XLA_PYTHON_CLIENT_PREALLOCATE" in e) == (own == len(gpus) > 0) for e in environments)
