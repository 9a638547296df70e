import os
import pathlib
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.runtime.ledger import STATES, Ledger, LedgerError, staleness


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", create=True) as result:
        yield result


def admit(ledger, count, task="sum"):
    first = ledger.next_rollout()
    with ledger.transaction():
        for rollout in range(first, first + count):
            ledger.admit(rollout, task, rollout, 0)


def finish(ledger, rollouts):
    for rollout in rollouts:
        ledger.finish(rollout, {"offset": rollout}, 1.0)


def test_a_rollout_from_admission_to_training(ledger):
    ledger.admit(0, "sum", 4, 2)
    assert ledger.restart(0) == 1
    ledger.finish(0, {"file": "000000.bin", "offset": 12}, 0.5)
    ledger.train([0], 3)
    row = ledger.rollout(0)
    assert (row.task, row.group, row.sample, row.attempt) == ("sum", 4, 2, 1)
    assert (row.state, row.version, row.reason, row.reward) == ("trained", 3, None, 0.5)
    assert row.location == {"file": "000000.bin", "offset": 12}
    assert row.started <= row.finished
    assert [(e.position, e.kind, e.payload) for e in ledger.events()] == [
        (1, "admit", {"rollout": 0, "task": "sum", "group": 4, "sample": 2}),
        (2, "restart", {"rollout": 0, "attempt": 1}),
        (3, "finish", {"rollout": 0, "attempt": 1, "location": row.location, "reward": 0.5}),
        (4, "train", {"rollouts": [0], "version": 3}),
    ]


def test_transitions_that_are_not_allowed_name_the_state_and_change_nothing(ledger):
    admit(ledger, 4)
    finish(ledger, [1, 2])
    ledger.train([2], 1)
    ledger.drop(3, "stale")
    calls = [
        (lambda: ledger.train([0], 1), "rollout 0 cannot be trained: it is running"),
        (lambda: ledger.train([1, 2], 2), r"rollout 2 cannot be trained: it is trained \(version 1\)"),
        (lambda: ledger.train([1, 1], 2), "occurs twice"),
        (lambda: ledger.train([3], 1), "it is dropped"),
        (lambda: ledger.finish(1, {"offset": 1}, 0.0), "rollout 1 cannot be finished: it is finished"),
        (lambda: ledger.restart(1), "rollout 1 cannot be restarted"),
        (lambda: ledger.drop(2, "stale"), "rollout 2 cannot be dropped: it is trained"),
        (lambda: ledger.drop(9, "stale"), "rollout 9 was never admitted"),
        (lambda: ledger.finish(0, None, 1.0), "location None"),
        (lambda: ledger.finish(0, {}, float("nan")), "reward nan"),
    ]
    before = (ledger.last_position(), ledger.counts())
    for call, message in calls:
        with pytest.raises(LedgerError, match=message):
            call()
    assert (ledger.last_position(), ledger.check()) == before
    assert before[1] == {"running": 1, "finished": 1, "trained": 1, "dropped": 1, "handed_out": 4}


def test_ids_are_the_next_positions_of_the_stream(ledger):
    # A prompt batch of 4 of which 3, 3 and 2 are needed: the left-over ones are carried over, in order.
    taken = []
    for needed in (3, 3, 2):
        first = ledger.next_rollout()
        admit(ledger, needed)
        taken.append(list(range(first, ledger.next_rollout())))
    assert taken == [[0, 1, 2], [3, 4, 5], [6, 7]]
    for wrong in (9, 7, 0):
        with pytest.raises(LedgerError, match=f"rollout {wrong} cannot be admitted: the next one of the stream is 8"):
            ledger.admit(wrong, "sum", 0, 0)


def test_the_cursor_continues_behind_what_was_handed_out(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        admit(ledger, 6)
    with Ledger(tmp_path / "ledger.sqlite", create=False) as ledger:
        assert ledger.next_rollout() == 6


def test_unfinished_and_untrained_rollouts_come_first_after_a_resume(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        admit(ledger, 8)
        finish(ledger, [2, 0, 1, 3, 5, 4])  # in another order than handed out
        ledger.train([0, 1, 2, 3], 1)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        queued, running = [r.id for r in ledger.finished()], [r.id for r in ledger.running()]
        assert queued == [5, 4]
        assert running == [6, 7]
        assert sorted(queued + running) == [4, 5, 6, 7]
        assert ledger.next_rollout() == 8
        assert [ledger.restart(rollout) for rollout in running] == [1, 1]
        assert ledger.last_location() == {"offset": 4}


def test_parts_of_a_rollout_are_found_again_and_belong_to_what_is_stored(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        admit(ledger, 3)
        assert ledger.segments(0) == []
        ledger.segment(0, {"offset": 10})
        ledger.segment(1, {"offset": 20})
        ledger.segment(0, {"offset": 30}, 7)
        finish(ledger, [2])
        assert ledger.last_location() == {"offset": 2}
        ledger.segment(1, {"offset": 40})
        assert ledger.last_location() == {"offset": 40}, "parts lie in the same files and must not be cut off"
        assert (ledger.segments(0), ledger.segments(1)) == ([{"offset": 10}, {"offset": 30}], [{"offset": 40}])
        with pytest.raises(LedgerError, match="rollout 2 cannot be stored in part: it is finished"):
            ledger.segment(2, {"offset": 50})
        assert ledger.check()["running"] == 2


def test_another_data_set_is_refused_at_resume(tmp_path):
    path = tmp_path / "run" / "ledger.sqlite"
    path.parent.mkdir()
    with Ledger(path, create=True) as ledger:
        ledger.require_same_data({"task": "A", "size": 600, "sha256": "1f"})
        admit(ledger, 5)
    with Ledger(path) as ledger:
        ledger.require_same_data({"sha256": "1f", "task": "A", "size": np.int64(600)})
        with pytest.raises(LedgerError) as caught:
            ledger.require_same_data({"task": "B", "size": 300, "sha256": "2e"})
    assert "task=A, size=600, sha256=1f" in str(caught.value)
    assert "task=B, size=300, sha256=2e" in str(caught.value)


def test_data_cannot_be_named_after_rollouts_were_handed_out(ledger):
    admit(ledger, 1)
    with pytest.raises(LedgerError, match="unknown"):
        ledger.require_same_data({"task": "A"})


def test_what_a_transaction_tells_of_is_on_the_disk_before_it_is(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, create=True) as ledger, Ledger(path, read_only=True) as reader:
        seen = []
        ledger.before_commit = lambda: seen.append(len(reader.running()))
        with ledger.transaction():
            ledger.admit(0, "t", 0, 0)
            with ledger.transaction():
                ledger.admit(1, "t", 1, 0)
        assert seen == [0], "once, when nobody else sees any of it"
        assert len(reader.running()) == 2

        def full():
            raise OSError("no space")

        ledger.before_commit = full
        with pytest.raises(OSError, match="no space"), ledger.transaction():
            ledger.admit(2, "t", 2, 0)
        assert len(reader.running()) == 2


def test_versions_never_decrease(ledger):
    admit(ledger, 3)
    finish(ledger, [0, 1, 2])
    ledger.train([0], 40)
    ledger.train([1], 40)  # a critic-only update keeps the version
    for call in (lambda: ledger.train([2], 2), lambda: ledger.require_version(2)):
        with pytest.raises(LedgerError, match="version 2 is lower than version 40"):
            call()
    ledger.require_version(40)
    assert ledger.last_version() == 40


def test_samples_of_a_future_version_are_refused():
    with pytest.raises(LedgerError, match="tokens of version 40, but the trainer is at 2"):
        staleness(2, 40)
    with pytest.raises(LedgerError, match="version 6"):
        staleness(5, 3, 6)
    # Dispatched at 3, an update during the rollout, used at 5: the oldest token counts.
    assert staleness(5, 3, 4) == 2
    assert staleness(3, 3) == 0


def test_a_transaction_is_undone_as_a_whole(ledger):
    admit(ledger, 2)
    before = (ledger.last_position(), ledger.counts())

    def turn():
        with ledger.transaction():
            ledger.record("publish", {"version": 1})
            finish(ledger, [0, 1])
            raise KeyError

    with pytest.raises(KeyError):
        turn()
    assert (ledger.last_position(), ledger.counts()) == before


def test_an_error_caught_inside_a_transaction_undoes_only_its_own_call(ledger):
    def failing_turn():
        with ledger.transaction():
            ledger.record("publish", {"version": 2})
            ledger.restart(5)

    with ledger.transaction():
        ledger.record("publish", {"version": 1})
        with pytest.raises(LedgerError, match="never admitted"):
            failing_turn()
        ledger.record("publish", {"version": 3})
    assert [e.payload["version"] for e in ledger.events()] == [1, 3]


def test_events_by_kind_and_position_and_numbers_that_round_trip(ledger):
    reward = np.float32(0.1)
    positions = [ledger.record(kind, {"x": reward, "ids": np.arange(2)}) for kind in ("a", "b", "a", "c")]
    assert positions == [1, 2, 3, 4]
    assert [e.position for e in ledger.events(kinds=["a", "c"])] == [1, 3, 4]
    assert [e.position for e in ledger.events(after=2)] == [3, 4]
    event = next(ledger.events())
    assert event.payload == {"x": float(reward), "ids": [0, 1]}
    with pytest.raises(TypeError, match="object"):
        ledger.record("a", {"x": object()})


def test_events_can_be_written_while_they_are_read(ledger):
    with ledger.transaction():
        for i in range(700):
            ledger.record("old", i)
    seen = []
    for event in ledger.events():
        seen.append(event.payload)
        if event.payload < 100:
            ledger.record("new", 1000 + event.payload)
    assert seen == [*range(700), *range(1000, 1100)]


def test_ids_of_numpy_are_stored_as_integers(ledger):
    ledger.admit(np.int64(0), "sum", np.int32(0), np.int64(0))
    ledger.finish(np.int64(0), {}, np.float32(1))
    ledger.train(np.array([0]), np.int32(1))
    assert ledger.rollout(0).version == 1
    ledger.check()


def test_dropped_rollouts_are_counted_by_reason_and_task(ledger):
    admit(ledger, 3, "fast")
    admit(ledger, 2, "slow")
    for rollout, reason in ((0, "aborted"), (3, "stale"), (4, "stale")):
        ledger.drop(rollout, reason)
    assert ledger.dropped_by() == {("aborted", "fast"): 1, ("stale", "slow"): 2}


def test_failures_are_kept_and_told_apart_from_attempts_that_ended_with_the_run(ledger):
    admit(ledger, 3)
    ledger.restart(0, "no sandbox")
    ledger.restart(0)
    ledger.restart(1, "another rollout's")
    ledger.restart(0, 'no "sandbox"')
    assert ledger.rollout(0).attempt == 3
    assert ledger.failures(0) == ["no sandbox", 'no "sandbox"']
    ledger.drop(0, "failed", "hung")
    ledger.drop(2, "stale")
    assert ledger.failures(0) == ["no sandbox", 'no "sandbox"', "hung"]
    assert ledger.failures(2) == []
    assert [r.id for r in ledger.dropped("failed")] == [0]


def test_stored_ones_and_members_of_groups_come_in_the_order_of_finishing(ledger):
    for rollout in range(6):
        ledger.admit(rollout, "sum", rollout // 2, rollout % 2)
    finish(ledger, [5, 3, 0, 2])
    ledger.train([3], 1)
    ledger.drop(0, "stale")
    ledger.drop(1, "aborted")
    assert [r.id for r in ledger.stored()] == [5, 3, 0, 2]
    assert [(r.id, r.state) for r in ledger.members({0, 2})] == [
        (5, "finished"),
        (0, "dropped"),
        (1, "dropped"),
        (4, "running"),
    ]
    assert ledger.members([]) == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["admit", "restart", "finish", "train", "drop"]), st.integers(0, 5))))
def test_any_sequence_of_calls_keeps_the_books_balanced(tmp_path_factory, calls):
    states = {}  # the reference: a dict
    allowed = {"restart": "running", "finish": "running", "train": "finished"}
    with Ledger(tmp_path_factory.mktemp("run") / "ledger.sqlite", create=True) as ledger, ledger.transaction():
        for name, rollout in calls:
            possible = {
                "admit": rollout == len(states),
                "drop": states.get(rollout) in ("running", "finished"),
            }.get(name, rollout in states and states[rollout] == allowed.get(name))
            arguments = {"admit": ("t", 0, 0), "finish": ({}, 0.0), "drop": ("why",)}.get(name, ())
            try:
                if name == "train":
                    ledger.train([rollout], 1)
                else:
                    getattr(ledger, name)(rollout, *arguments)
            except LedgerError:
                assert not possible
            else:
                assert possible
                result = {"admit": "running", "finish": "finished", "train": "trained", "drop": "dropped"}
                states[rollout] = result.get(name, states.get(rollout))
        counts = ledger.check()
        assert counts == {s: list(states.values()).count(s) for s in STATES} | {"handed_out": len(states)}


def test_contradictions_are_found(ledger):
    admit(ledger, 3)
    finish(ledger, [0])
    ledger.train([0], 1)
    assert ledger.check()["handed_out"] == 3
    ledger._db.execute("DELETE FROM rollouts WHERE id = 1")
    with pytest.raises(LedgerError, match="2 rollouts handed out, 3 positions used"):
        ledger.check()


def test_a_second_writer_is_told_who_writes(tmp_path):
    path = tmp_path / "ledger.sqlite"
    writer = Ledger(path, create=True)
    with pytest.raises(LedgerError, match=f"run {tmp_path} is already being written by process {os.getpid()}"):
        Ledger(path)
    writer.close()
    Ledger(path).close()


def test_a_reader_sees_a_live_run_and_cannot_write(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, create=True) as writer, Ledger(path, read_only=True) as reader:
        admit(writer, 2)
        assert reader.check()["running"] == 2
        with writer.transaction():
            finish(writer, [0])
            assert reader.counts()["finished"] == 0
        assert reader.counts()["finished"] == 1
        with pytest.raises(LedgerError, match="readonly"):
            reader.drop(0, "why")
    with Ledger(path, read_only=True) as reader:
        assert reader.counts()["finished"] == 1


def test_opening_and_creating_do_not_stand_in_for_each_other(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(LedgerError, match=f"no ledger at {path}"):
        Ledger(path)
    path.touch()  # what a kill at the very start leaves
    with pytest.raises(LedgerError, match="creation was interrupted"):
        Ledger(path)
    Ledger(path, create=True).close()
    with pytest.raises(LedgerError, match="exists already"):
        Ledger(path, create=True)
    with pytest.raises(LedgerError, match="cannot be opened for writing"):
        Ledger(tmp_path / "nowhere" / "ledger.sqlite", create=True)


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, create=True).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=7")
    with pytest.raises(LedgerError, match="has ledger format 7, this program reads 1 to 2"):
        Ledger(path)


def test_a_damaged_file_gives_one_clear_error(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, create=True) as ledger:
        admit(ledger, 300)
    whole = path.read_bytes()
    damaged = {
        "no database": b"something else\n" * 100,
        "cut": whole[: len(whole) // 2],
        "overwritten": whole[:4096] + b"\xff" * 8192 + whole[12288:],
    }
    for content in damaged.values():
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=f"{path} is damaged") as caught:
            Ledger(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    Ledger(path).close()  # and the lock was given back each time


_WRITER = """
import sys
from sao_jax.runtime.ledger import Ledger
with Ledger(sys.argv[1], create=sys.argv[2] == "0") as ledger:
    with ledger.transaction():
        for row in ledger.running():
            ledger.restart(row.id)
    while True:
        if not ledger.running() and not ledger.finished():
            with ledger.transaction():
                first = ledger.next_rollout()
                for rollout in range(first, first + 4):
                    ledger.admit(rollout, "sum", rollout, 0)
                ledger.record("turn", {"first": first})
        with ledger.transaction():
            for row in ledger.running():
                ledger.finish(row.id, {"offset": row.id}, 1.0)
        with ledger.transaction():
            rollouts = [row.id for row in ledger.finished()]
            ledger.train(rollouts[:3], ledger.last_version() + 1)
            ledger.drop(rollouts[3], "stale")
            ledger.record("update", {})
        print("turn", flush=True)
"""


def test_kills_leave_whole_turns_and_no_lock(tmp_path):
    path = tmp_path / "ledger.sqlite"
    rng = np.random.default_rng(0)
    handed_out = 0
    for kill in range(4):
        command = [sys.executable, "-c", _WRITER, str(path), str(kill)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parents[2]) as process:
            for _ in range(rng.integers(2, 9)):
                assert process.stdout.readline() == b"turn\n"
            time.sleep(rng.uniform(0, 0.003))
            process.kill()
        with Ledger(path) as ledger:
            counts = ledger.check()
            assert counts["handed_out"] > handed_out
            handed_out = counts["handed_out"]
            assert handed_out == 4 * len(list(ledger.events(kinds=["turn"])))
            assert counts["running"] + counts["finished"] in (0, 4)
            assert counts["running"] in (0, 4)
            assert counts["trained"] == 3 * counts["dropped"] == 3 * ledger.last_version()
            assert ledger.last_version() == len(list(ledger.events(kinds=["update"])))
