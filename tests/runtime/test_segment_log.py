"""Segments of attempts that fail, go on and end: what is stored, and what is found again."""

import dataclasses
import sqlite3

import numpy as np
import pytest

from sao_jax.data.segments import SegmentReader, load_segment, locations_of, new_segment, read_trajectory
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.trajectory import COLUMNS, TrajectoryBuilder, save_trajectory
from sao_jax.runtime.inspect import open_segments
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.segment_log import SegmentLog


class Attempt:
    """An attempt at rollout 0 of two steps a segment; `log` stores its seams."""

    def __init__(self, log, attempt=0, seed=0, snapshot=None):
        self.log, self.rng = log, np.random.default_rng(seed)
        self.builder = TrajectoryBuilder([1, 2, 3], attempt=attempt, task="t")
        if snapshot is not None:
            self.builder = TrajectoryBuilder.resume(snapshot, attempt=attempt)

    def steps(self, count):
        for _ in range(count):
            self.builder.add_action(self.rng.integers(0, 9, 3), -self.rng.random(3), [4] * 3)
            self.builder.end_action()
            self.builder.add_reward(self.rng.normal(), {"part": 0.1})
            self.builder.add_observation([7])
        return self

    def seam(self):
        segment = new_segment(self.builder, steps_per_segment=2)
        assert self.log.add(segment)
        return self

    def snapshot(self):
        return self.builder.build("truncated", "snapshot")

    def end(self):
        return self.builder.build("terminated", "answer")


@pytest.fixture
def run(tmp_path):
    """(ledger with one running rollout, store, a new log as after a restart of the process)"""
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger, TrajectoryStore(tmp_path / "trajectories") as store:
        ledger.admit(0, "t", 0, 0)
        yield ledger, store, lambda: SegmentLog(store, ledger, steps_per_segment=2)


def finish(ledger, store, log, t):
    """Ends the rollout; returns its location, after it has been read again."""
    location = log.finish(t)
    ledger.finish(0, location, t.total_reward)
    assert ledger.rollout(0).location == location
    assert save_trajectory(read_trajectory(store, location)) == save_trajectory(t)
    return location


def test_each_token_is_stored_once(run, tmp_path):
    ledger, store, log = run
    log = log()
    assert log.begin(0, 0) is None
    attempt = Attempt(log)
    for _ in range(5):
        attempt.steps(2).seam()
    assert [s.index for s in open_segments(tmp_path, 0)] == [0, 1, 2, 3, 4]
    t = attempt.steps(1).end()
    location = finish(ledger, store, log, t)
    lengths = [load_segment(store.read(place)).length for place in locations_of(location)]
    assert lengths == [11, 8, 8, 8, 8, 4]
    assert sum(path.stat().st_size for path in (tmp_path / "trajectories").iterdir()) < 21 * t.length + 6 * 1200
    assert ledger.segments(0) == [], "they belong to a trajectory now"
    reader = open_segments(tmp_path, 0)
    assert (len(reader), reader.length, reader[5].reason) == (6, t.length, "answer")
    assert ledger.last_location() == location[-1]


def test_without_a_seam_the_trajectory_is_one_record(run):
    ledger, store, log = run
    log = log()
    log.begin(0, 0)
    location = finish(ledger, store, log, Attempt(log).steps(2).end())
    assert isinstance(location, dict)


@pytest.mark.parametrize("restarted", [False, True], ids=["same process", "new process"])
def test_a_new_attempt_goes_on_from_all_segments_and_adds_to_them(run, restarted):
    ledger, store, make = run
    log = make()
    log.begin(0, 0)
    first = Attempt(log).steps(2).seam().steps(2).seam()
    snapshot = first.snapshot()
    first.steps(1)  # lost
    log = make() if restarted else log
    taken = log.begin(0, ledger.restart(0, "broken"))
    assert save_trajectory(taken) == save_trajectory(snapshot)
    second = Attempt(log, 1, seed=9, snapshot=taken).steps(2).seam()
    location = finish(ledger, store, log, second.steps(1).end())
    parts = [load_segment(store.read(place)) for place in locations_of(location)]
    assert [(s.attempt, s.index, s.last) for s in parts] == [(0, 0, False), (0, 1, False), (1, 2, False), (1, 3, True)]


def test_an_attempt_that_starts_over_replaces_what_was_stored_from_its_own_first_seam_on(run):
    ledger, store, make = run
    log = make()
    log.begin(0, 0)
    old = Attempt(log).steps(2).seam().steps(2).seam().snapshot()
    assert log.begin(0, ledger.restart(0)) is not None
    assert log.begin(0, ledger.restart(0)) is None, "not from the same segment twice in a row"
    # It fails before its first seam: what is stored still is what the first attempt has left.
    assert save_trajectory(log.begin(0, ledger.restart(0))) == save_trajectory(old)
    assert log.begin(0, ledger.restart(0)) is None
    new = Attempt(log, 4, seed=5).steps(2).seam()
    assert len(ledger.segments(0)) == 1
    taken = log.begin(0, ledger.restart(0))
    assert save_trajectory(taken) == save_trajectory(new.snapshot())
    location = finish(ledger, store, log, Attempt(log, 5, seed=6, snapshot=taken).steps(1).end())
    assert len(location) == 2


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_segment_leaves_those_before_it(run, tmp_path, damaged):
    ledger, store, make = run
    log = make()
    log.begin(0, 0)
    attempt = Attempt(log)
    snapshots = [None]
    for _ in range(3):
        snapshots.append(attempt.steps(2).seam().snapshot())
    place = locations_of(ledger.segments(0))[damaged]
    path = tmp_path / "trajectories" / place.file
    data = bytearray(path.read_bytes())
    data[place.offset + place.length - 1] ^= 1
    path.write_bytes(data)
    notes = []
    log = SegmentLog(store, ledger, steps_per_segment=2, note=notes.append)
    taken = log.begin(0, ledger.restart(0, "broken"))
    assert f"goes on from {damaged} of 3 segments: " in notes[0]
    assert "checksum differs" in notes[0]
    if damaged == 0:
        assert taken is None
        return
    assert save_trajectory(taken) == save_trajectory(snapshots[damaged])
    again = Attempt(log, 1, seed=9, snapshot=taken).steps(2).seam()
    assert len(ledger.segments(0)) == damaged + 1, "what cannot be read is no longer part of it"
    finish(ledger, store, log, again.steps(1).end())


def test_segments_that_do_not_join_are_left_out(run):
    ledger, _, make = run
    log = make()
    log.begin(0, 0)
    good = Attempt(log).steps(2).seam()
    log.add(dataclasses.replace(new_segment(good.steps(2).builder, steps_per_segment=2), task="another"))
    assert len(ledger.segments(0)) == 2
    taken = log.begin(0, ledger.restart(0, "broken"))
    assert taken.num_steps == 2


def test_an_attempt_that_starts_over_and_has_no_seam_does_not_use_older_segments(run):
    ledger, store, make = run
    log = make()
    log.begin(0, 0)
    Attempt(log).steps(2).seam()
    log.begin(0, ledger.restart(0))
    assert log.begin(0, ledger.restart(0)) is None
    location = finish(ledger, store, log, Attempt(log, 2, seed=5).steps(3).end())
    assert isinstance(location, dict)


def test_a_segment_that_does_not_join_is_not_stored(run, tmp_path):
    ledger, store, make = run
    log = make()
    log.begin(0, 0)
    attempt = Attempt(log).steps(2)
    new_segment(attempt.builder, steps_per_segment=2)  # lost on the way
    later = new_segment(attempt.steps(2).builder, steps_per_segment=2)
    assert not log.add(later)
    assert ledger.segments(0) == []
    assert isinstance(finish(ledger, store, log, attempt.end()), dict)


def test_a_trajectory_that_its_segments_do_not_begin_is_stored_whole(run):
    """What is trained on is what is stored, whatever was said on the way."""
    ledger, store, make = run
    log = make()
    log.begin(0, 0)
    t = Attempt(log).steps(2).seam().steps(1).end()
    logp = t.rollout_logp.copy()
    logp[4] -= 1e-3
    assert isinstance(finish(ledger, store, log, dataclasses.replace(t, rollout_logp=logp)), dict)


def test_a_ledger_of_the_former_format_is_read_and_gone_on_with(tmp_path):
    """There each part of a rollout was a snapshot of all that came before."""
    path, store = tmp_path / "ledger.sqlite", TrajectoryStore(tmp_path / "trajectories")
    attempt = Attempt(None)
    snapshots = [attempt.steps(2).snapshot(), attempt.steps(2).snapshot()]
    places = [vars(store.append(save_trajectory(t))) for t in snapshots]
    with Ledger(path, create=True) as ledger:
        ledger.admit(0, "t", 0, 0)
        ledger.admit(1, "t", 1, 0)
        ledger.finish(1, vars(store.append(save_trajectory(attempt.end()))), 1.0)
        for place in places:
            ledger.record("segment", {"rollout": 0, "attempt": 0, "location": place})
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE segments")
        db.execute("PRAGMA user_version=1")
    with Ledger(path, read_only=True) as ledger:
        assert ledger.segments(0) == [places[1]]
        assert ledger.segments(1) == []
        assert ledger.rollout(1).location["file"] == "000000.bin"
    for _ in range(2):  # the second time it has the present format
        with Ledger(path) as ledger:
            assert ledger.segments(0) == [places[1]]
            ledger.check()
    with Ledger(path) as ledger:
        log = SegmentLog(store, ledger, steps_per_segment=2)
        taken = log.begin(0, ledger.restart(0))
        assert save_trajectory(taken) == save_trajectory(snapshots[1])
        resumed = Attempt(log, 1, seed=3, snapshot=taken).steps(2).seam()
        location = finish(ledger, store, log, resumed.steps(1).end())
        assert location[0] == places[1]
        reader = SegmentReader(store, locations_of(location))
        assert [s.first_token for s in reader] == [0, 19, 27]


def test_segments_are_found_without_a_look_at_all_events(run):
    ledger, _, make = run
    log = make()
    log.begin(0, 0)
    Attempt(log).steps(2).seam()
    plan = ledger._all("EXPLAIN QUERY PLAN SELECT location FROM segments WHERE rollout = 0 ORDER BY start")
    assert [row[-1] for row in plan] == ["SEARCH segments USING PRIMARY KEY (rollout=?)"]


def test_a_difference_in_any_column_is_seen(run):
    _, _, make = run
    for name in COLUMNS:
        log = make()
        log.begin(0, 0)
        t = Attempt(log).steps(2).seam().steps(1).end()
        column = getattr(t, name).copy()
        column[5] = ~column[5] if column.dtype == bool else column[5] + 1
        assert isinstance(log.finish(dataclasses.replace(t, **{name: column})), dict), name
