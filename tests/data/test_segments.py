import dataclasses
import os
import subprocess
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from test_trajectory import trajectories, two_turns

from sao_jax.data.segments import (
    Segment,
    SegmentReader,
    cut_segment,
    join_segments,
    load_segment,
    locations_of,
    new_segment,
    read_trajectory,
    save_segment,
    split_trajectory,
)
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.trajectory import COLUMNS, TrajectoryBuilder, save_trajectory


def grow(builder, rng, steps, *, at_seam=None, every=3):
    """Adds steps of 1 to 4 action tokens and 0 to 2 observed ones; `at_seam` is called after every `every` of them."""
    for step in range(1, steps + 1):
        n = int(rng.integers(1, 5))
        builder.add_action(rng.integers(0, 50, n), -rng.random(n), [step // 4] * n)
        builder.end_action()
        builder.add_reward(float(rng.normal()), {"part": 0.1})
        builder.add_observation(rng.integers(0, 50, int(rng.integers(0, 3))))
        if at_seam is not None and step % every == 0:
            at_seam()


def long_one(seed=0, steps=11):
    builder = TrajectoryBuilder([1, 2, 3], rollout=5, task="t", group=2)
    grow(builder, np.random.default_rng(seed), steps)
    return builder.build("terminated", "answer", {"episode_s": 1.5})


def test_segments_of_two_turns():
    builder = two_turns()
    builder.add_reward(1.0, {"answer": 1.0})
    t = builder.build("terminated", "answer", {"environment_s": 0.5})
    first, second = split_trajectory(t, 1)
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 3, 4, 5], [6])
    assert (second.rewards.tolist(), second.version.tolist(), second.step_ids.tolist()) == ([1.0], [5], [1])
    place = lambda s: (s.index, s.first_token, s.end_token, s.first_step, s.actions_before, s.last)  # noqa: E731
    assert place(first) == (0, 0, 5, 0, 0, False)
    assert place(second) == (1, 5, 6, 1, 2, True)
    assert (first.end, first.reward_parts, second.end, second.reason) == ("", {}, "terminated", "answer")
    assert (second.reward_parts, second.timings) == ({"answer": 1.0}, {"environment_s": 0.5})
    assert (second.rollout, second.attempt, second.task, second.seed) == (7, 1, "toy/train/0", 11)


@hypothesis.settings(deadline=None)  # a busy machine is no failure
@hypothesis.given(trajectories(), st.integers(1, 4))
def test_split_stored_and_joined_is_the_same_to_the_bit(t, steps):
    parts = [load_segment(save_segment(s)) for s in split_trajectory(t, steps)]
    assert [s.index for s in parts] == sorted(set((t.step_ids // steps).tolist()))
    assert sum(s.num_action_tokens for s in parts) == t.num_action_tokens
    assert save_trajectory(join_segments(parts)) == save_trajectory(t)


@hypothesis.settings(deadline=None)  # a busy machine is no failure
@hypothesis.given(trajectories(), st.integers(1, 3))
def test_a_stored_segment_is_read_to_the_bit(t, steps):
    for s in split_trajectory(t, steps):
        again = load_segment(save_segment(dataclasses.replace(s, next_value=0.1)))
        assert again.next_value == 0.1
        assert save_segment(dataclasses.replace(again, next_value=None)) == save_segment(s)
        assert not again.tokens.flags.writeable


def test_segments_keep_all_that_a_record_says_of_its_trajectory():
    t = dataclasses.replace(long_one(), sampler="best of 4", top_k=3)
    parts = [load_segment(save_segment(s)) for s in split_trajectory(t, 4)]
    assert {s.sampler for s in parts} == {"best of 4"}
    assert save_trajectory(join_segments(parts)) == save_trajectory(t)


def test_segments_taken_while_it_grows_are_those_of_the_finished_trajectory():
    segments, snapshots = [], []
    builder = TrajectoryBuilder([1, 2, 3], rollout=5, task="t", group=2)

    def at_seam():
        segments.append(new_segment(builder, steps_per_segment=3))
        snapshots.append(builder.build("truncated", "snapshot"))

    grow(builder, np.random.default_rng(0), 11, at_seam=at_seam)
    t = builder.build("terminated", "answer", {"episode_s": 1.5})
    assert save_trajectory(t) == save_trajectory(long_one())
    rest = new_segment(builder, steps_per_segment=3, end="terminated", reason="answer", timings={"episode_s": 1.5})
    assert save_trajectory(join_segments([*segments, rest])) == save_trajectory(t)
    for s, expected in zip([*segments, rest], split_trajectory(t, 3), strict=True):
        known = dict(reward_parts=expected.reward_parts, timings=expected.timings)
        assert save_segment(dataclasses.replace(s, **known)) == save_segment(expected)
    for i, snapshot in enumerate(snapshots):
        assert save_trajectory(join_segments(segments[: i + 1])) == save_trajectory(snapshot)


def test_a_resumed_builder_goes_on_with_the_next_segment():
    builder = TrajectoryBuilder([1, 2, 3], rollout=5)
    grow(builder, np.random.default_rng(1), 6)
    first = new_segment(builder, steps_per_segment=6)
    resumed = TrajectoryBuilder.resume(join_segments([first]), attempt=1)
    for b in (builder, resumed):
        grow(b, np.random.default_rng(2), 2)
    second = new_segment(resumed, steps_per_segment=6, end="terminated")
    assert (second.first_token, second.index, second.attempt) == (first.end_token, 1, 1)
    whole = dataclasses.replace(builder.build("terminated"), attempt=1)
    assert save_trajectory(join_segments([first, second])) == save_trajectory(whole)


def test_a_builder_that_forgets_gives_the_same_segments_and_refuses_the_whole():
    kept, given = [], []
    for forget, out in ((False, kept), (True, given)):
        builder = TrajectoryBuilder([1, 2, 3])
        seam = lambda b=builder, f=forget, o=out: o.append(new_segment(b, steps_per_segment=3, forget=f))  # noqa: E731
        grow(builder, np.random.default_rng(3), 9, at_seam=seam)
    assert [save_segment(s) for s in kept] == [save_segment(s) for s in given]
    assert (builder.length, builder.num_action_tokens) == (given[-1].end_token, sum(s.num_action_tokens for s in given))
    for ask in (lambda: builder.tokens, lambda: builder.build("truncated")):
        with pytest.raises(ValueError, match=f"the first {builder.length} tokens were given away"):
            ask()
    with pytest.raises(ValueError, match="came after its segment was given away"):
        builder.add_reward(1.0)


def test_rewards_of_one_token_are_rounded_once():
    builder = TrajectoryBuilder([1])
    builder.add_action([2], [-0.5], [0])
    for _ in range(1000):
        builder.add_reward(0.1)
    assert builder.build("terminated").rewards[1] == np.float32(sum([0.1] * 1000))


@hypothesis.given(st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=20, deadline=None)
def test_a_long_trajectory_is_what_plain_lists_hold(seed):
    """Lengths from 1 to 300 cross the arrays it grows by; rewards fall on both sides of them."""
    rng, steps, at_seams, seams = np.random.default_rng(seed), -1, [], []
    builder = TrajectoryBuilder([7])
    tokens, mask, logp, rewards, step_ids, last = [7], [False], [0.0], [0.0], [0], -1
    for _ in range(12):
        n, m = (int(x) for x in rng.integers(1, 300, 2))
        steps += 1
        action, observed, p = rng.integers(0, 99, n), rng.integers(0, 99, m), -rng.random(n)
        builder.add_action(action, p, [0] * n)
        builder.end_action()
        tokens += [*action.tolist(), *observed.tolist()]
        mask += [True] * n + [False] * m
        logp += [*p.tolist(), *[0.0] * m]
        rewards += [0.0] * (n + m)
        step_ids += [steps] * (n + m)
        last = len(tokens) - m - 1
        builder.add_reward(0.1)
        builder.add_observation(observed)
        builder.add_reward(0.2)
        rewards[last] += 0.1
        rewards[last] += 0.2
        if rng.random() < 0.5:
            seams.append(new_segment(builder, steps_per_segment=1))
            at_seams.append(len(tokens))
    t = builder.build("terminated")
    for name, expected in dict(tokens=tokens, action_mask=mask, rewards=rewards, step_ids=step_ids).items():
        np.testing.assert_array_equal(getattr(t, name), np.array(expected, COLUMNS[name]))
    np.testing.assert_array_equal(t.rollout_logp, np.float32(logp))
    assert [s.end_token for s in seams] == at_seams
    assert builder.num_action_tokens == sum(mask)
    np.testing.assert_array_equal(builder.tokens, t.tokens)


def test_growing_moves_no_token_and_takes_what_the_columns_take():
    builder = TrajectoryBuilder(range(10))
    for _ in range(3000):
        builder.add_action([1] * 7, [-0.5] * 7, [0] * 7)
        builder.add_observation([2] * 3)
    first = builder._chunks[0]["tokens"]
    held = sum(column.nbytes for chunk in builder._chunks for column in chunk.values())
    assert builder.length == 30_010
    assert builder._chunks[0]["tokens"] is first
    assert held <= 21 * (builder.length + 4096)
    np.testing.assert_array_equal(builder.tokens[:20], [*range(10), *[1] * 7, *[2] * 3])


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda s: [], "no segment to join"),
        (lambda s: s[1:], "begins at token [0-9]+; the one before it ends at 0"),
        (lambda s: [s[0], s[2]], "the one before it ends at"),
        (lambda s: [*s, dataclasses.replace(s[-1], first_token=s[-1].end_token)], "follows the last one"),
        (lambda s: [s[0], dataclasses.replace(s[1], rollout=9)], "segments of two trajectories: rollout 5 and 9"),
    ],
)
def test_segments_that_do_not_join(choose, message):
    with pytest.raises(ValueError, match=message):
        join_segments(choose(split_trajectory(long_one(), 4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rewards=np.zeros(3)), "rewards is float64"),
        (dict(end="stopped"), "allowed: terminated, truncated, aborted"),
        (dict(first_step=7), "first_step is 7"),
        (dict(index=-1), "not negative"),
    ],
)
def test_a_malformed_segment(change, message):
    s = split_trajectory(long_one(), 4)[0]
    with pytest.raises(ValueError, match=message):
        save_segment(dataclasses.replace(s, **change))


@hypothesis.settings(deadline=None)
@hypothesis.given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(ValueError, match="not a stored segment"):
        load_segment(data)


def test_a_cut_record_is_refused():
    data = save_segment(split_trajectory(long_one(), 4)[1])
    for cut in range(0, len(data), 31):
        with pytest.raises(ValueError, match=f"^{cut} bytes are not a stored segment"):
            load_segment(data[:cut])


def test_an_attempt_ended_just_after_a_seam_has_an_empty_last_segment():
    t = long_one()
    body = dataclasses.replace(cut_segment(t, 0, t.length, steps_per_segment=99), end="", reason="", timings={})
    rest = load_segment(save_segment(cut_segment(t, t.length, t.length, steps_per_segment=99)))
    assert (rest.length, rest.last, rest.actions_before) == (0, True, t.num_action_tokens)
    assert save_trajectory(join_segments([body, rest])) == save_trajectory(t)


class TestReader:
    @pytest.fixture
    def stored(self, tmp_path):
        t = long_one(steps=20)
        store = TrajectoryStore(tmp_path, shard_bytes=4000)
        return t, store, [store.append(save_segment(s)) for s in split_trajectory(t, 3)]

    def test_arrays_are_views_of_the_file_that_cannot_be_written(self, stored, tmp_path):
        t, store, places = stored
        assert len({place.file for place in places}) > 1
        reader = SegmentReader(store, places)
        assert (len(reader), reader.length) == (7, t.length)
        for s, expected in zip(reader, split_trajectory(t, 3), strict=True):
            assert save_segment(s) == save_segment(expected)
            base = s.tokens
            while base.base is not None and not isinstance(base, np.memmap):
                base = base.base
            assert isinstance(base, np.memmap)
            with pytest.raises(ValueError, match="read-only"):
                s.tokens[0] = 1

    def test_any_tokens_are_read_from_the_segments_that_hold_them(self, stored, monkeypatch):
        t, store, places = stored
        reader, opened = SegmentReader(store, places), []
        monkeypatch.setattr(store, "map", lambda place: opened.append(place) or TrajectoryStore.map(store, place))
        for start in range(0, t.length, 5):
            for stop in range(start + 1, t.length + 1, 7):
                opened.clear()
                columns = reader.columns(start, stop)
                for name in COLUMNS:
                    assert columns[name].tobytes() == getattr(t, name)[start:stop].tobytes()
                first, last = (int(t.step_ids[i]) // 3 for i in (start, stop - 1))
                assert opened == places[first : last + 1]
        with pytest.raises(ValueError, match=f"no tokens 3 to {t.length + 1}"):
            reader.columns(3, t.length + 1)

    def test_damage_is_found_when_it_is_looked_for(self, stored, tmp_path):
        _, store, places = stored
        reader = SegmentReader(store, places)
        reader.check()
        path = tmp_path / places[3].file
        data = bytearray(path.read_bytes())
        data[places[3].offset + places[3].length - 1] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"{places[3].file} offset {places[3].offset}: checksum differs"):
            SegmentReader(store, places).check()
        with pytest.raises(ValueError, match="checksum differs"):
            read_trajectory(store, [vars(place) for place in places])

    def test_a_shard_that_was_cut_off(self, stored, tmp_path):
        _, store, places = stored
        os.truncate(tmp_path / places[-1].file, places[-1].offset + places[-1].length - 1)
        with pytest.raises(ValueError, match="ends before the record"):
            SegmentReader(store, places)

    def test_a_trajectory_is_read_from_its_segments_or_from_one_record(self, stored):
        t, store, places = stored
        whole = store.append(save_trajectory(t))
        for location in (vars(whole), [vars(place) for place in places]):
            assert save_trajectory(read_trajectory(store, location)) == save_trajectory(t)
            reader = SegmentReader(store, locations_of(location))
            assert reader.length == t.length
            assert reader.columns(7, 9)["tokens"].tolist() == t.tokens[7:9].tolist()
        (one,) = SegmentReader(store, [whole])
        assert (one.index, one.last, one.reason) == (0, True, "answer")

    def test_a_stored_snapshot_is_gone_on_from(self, stored):
        t, store, _ = stored
        at = split_trajectory(t, 3)[1].end_token
        snapshot = dataclasses.replace(
            t, **{name: getattr(t, name)[:at] for name in COLUMNS}, end="truncated", reason="snapshot"
        )
        rest = cut_segment(t, at, t.length, steps_per_segment=3)
        places = [vars(store.append(data)) for data in (save_trajectory(snapshot), save_segment(rest))]
        assert save_trajectory(read_trajectory(store, places)) == save_trajectory(t)


def test_segments_of_another_kind_of_record_are_views_too():
    s = load_segment(np.frombuffer(b"x" + save_segment(split_trajectory(long_one(), 4)[0]), np.uint8)[1:])
    assert isinstance(s, Segment)
    assert save_segment(s) == save_segment(split_trajectory(long_one(), 4)[0])


STREAM = """
    import resource, sys
    import numpy as np
    from sao_jax.data.segments import SegmentReader, new_segment, save_segment
    from sao_jax.data.storage import TrajectoryStore
    from sao_jax.data.trajectory import TrajectoryBuilder

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    steps, rng = int(sys.argv[2]), np.random.default_rng(0)
    store, builder, places, seen = TrajectoryStore(sys.argv[1]), TrajectoryBuilder(range(20)), [], []
    total = 0
    for step in range(1, steps + 1):
        tokens = rng.integers(0, 256, 10)
        total += int(tokens.sum())
        builder.add_action(tokens[:6], -rng.random(6), [step // 1000] * 6)
        builder.end_action()
        builder.add_observation(tokens[6:])
        if step % 100 == 0:
            end = "terminated" if step == steps else ""
            segment = new_segment(builder, steps_per_segment=100, end=end, forget=True)
            places.append(store.append(save_segment(segment)))
            seen.append(resident())
    reader, got = SegmentReader(store, places), -sum(range(20))
    for segment in reader:
        got += int(segment.tokens.sum()) + 0 * int(segment.rollout_logp.sum() + segment.version.sum())
        seen.append(resident())
    assert got == total and reader.length == 10 * steps + 20
    early = max(seen[:20])
    print(early, max(seen), reader.length)
"""


@pytest.mark.slow
def test_a_hundred_thousand_steps_stream_in_and_out_at_a_flat_resident_size(tmp_path):
    run = [sys.executable, "-c", textwrap.dedent(STREAM), str(tmp_path), "100000"]
    result = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    early, peak, length = map(int, result.stdout.split())
    assert length == 1_000_020
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 21 * length
    # The columns alone are 20 MiB; after the first 20 segments the size grows by the list of places and little else.
    assert peak - early < 4 << 20, f"{early / 2**20:.1f} MiB early, {peak / 2**20:.1f} MiB at the peak"
