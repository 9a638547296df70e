import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.data.trajectory import (
    NoActionError,
    Trajectory,
    TrajectoryBuilder,
    check_trajectory,
    load_trajectory,
    rewards_to_actions,
    save_trajectory,
)


def two_turns() -> TrajectoryBuilder:
    """Prompt 1 2, action 3 4 (in two pieces), observation 5, action 6."""
    builder = TrajectoryBuilder([1, 2], rollout=7, attempt=1, task="toy/train/0", group=3, sample=2, seed=11)
    builder.add_action([3], [-0.5], [4])
    builder.add_action([4], [-0.25], [5])
    builder.end_action()
    builder.add_observation([5])
    builder.add_action([6], [-1.0], [5])
    return builder


class TestBuilder:
    def test_columns_of_a_two_turn_trajectory(self):
        builder = two_turns()
        builder.add_reward(1.0, {"answer": 1.0})
        t = builder.build("terminated", "answer", {"environment_s": 0.5})
        np.testing.assert_array_equal(t.tokens, [1, 2, 3, 4, 5, 6])
        np.testing.assert_array_equal(t.action_mask, [0, 0, 1, 1, 0, 1])
        np.testing.assert_array_equal(t.rollout_logp, np.float32([0, 0, -0.5, -0.25, 0, -1]))
        np.testing.assert_array_equal(t.version, [-1, -1, 4, 5, -1, 5])
        np.testing.assert_array_equal(t.step_ids, [0, 0, 0, 0, 0, 1])
        np.testing.assert_array_equal(t.rewards, [0, 0, 0, 0, 0, 1])
        assert (t.length, t.num_action_tokens, t.total_reward, t.num_steps) == (6, 3, 1.0, 2)
        assert (t.rollout, t.attempt, t.task, t.group, t.sample, t.seed) == (7, 1, "toy/train/0", 3, 2, 11)
        assert [a.tolist() for a in t.actions()] == [[3, 4], [6]]

    def test_arrays_have_the_documented_types_and_cannot_be_written(self):
        t = two_turns().build("terminated")
        types = {n: getattr(t, n).dtype for n in ("tokens", "action_mask", "rollout_logp", "rewards", "version")}
        assert types == dict(tokens="i4", action_mask="?", rollout_logp="f4", rewards="f4", version="i4")
        with pytest.raises(ValueError, match="read-only"):
            t.tokens[0] = 9

    def test_the_oldest_version_counts_and_is_stamped_while_sampling(self):
        trainer_version = 3
        builder = TrajectoryBuilder([1])
        builder.add_action([2], [-0.1], [trainer_version])
        trainer_version = 4  # an update while the attempt runs
        builder.add_action([3], [-0.1], [trainer_version])
        trainer_version = 5  # when it is trained
        t = builder.build("terminated")
        assert t.version.tolist() == [-1, 3, 4]
        assert t.oldest_version == 3
        assert trainer_version - t.oldest_version == 2

    def test_a_reward_that_comes_with_an_observation_goes_to_the_action_before_it(self):
        builder = TrajectoryBuilder([1])
        builder.add_action([2, 3], [-0.1, -0.2], [0, 0])
        builder.add_observation([4, 5])
        builder.add_reward(0.5, {"test": 0.5})
        builder.add_reward(0.25, {"test": 0.25})
        t = builder.build("terminated")
        np.testing.assert_array_equal(t.rewards, [0, 0, 0.75, 0, 0])
        assert t.reward_parts == {"test": 0.75}

    def test_a_token_appended_by_hand_is_context_and_not_trained(self):
        builder = TrajectoryBuilder([1])
        builder.add_action([7, 8], [-0.5, -0.7], [0, 0])
        builder.end_action()
        builder.add_observation([2])  # EOS after a stop string
        t = builder.build("terminated")
        np.testing.assert_array_equal(t.tokens[1:], [7, 8, 2])
        np.testing.assert_array_equal(t.action_mask[1:], [1, 1, 0])
        np.testing.assert_array_equal(t.step_ids, [0, 0, 0, 0])

    def test_sampled_ids_stay_what_they_were_when_their_text_has_another_encoding(self):
        vocabulary = {"ab": 1, "c": 2, "abc": 3, "d": 4}
        text = {i: word for word, i in vocabulary.items()}
        builder = TrajectoryBuilder([4])
        builder.add_action([1, 2], [-0.1, -0.2], [0, 0])
        assert vocabulary["".join(text[i] for i in (1, 2))] == 3  # what encoding again would give
        builder.add_observation([4])
        t = builder.build("truncated")
        assert t.tokens.tolist() == [4, 1, 2, 4]
        assert t.length == len(t.rollout_logp) == len(t.action_mask)

    def test_one_growing_row_keeps_reasoning_that_a_template_would_drop(self):
        builder = TrajectoryBuilder([1, 2])
        builder.add_action([30, 31, 40], [-0.1] * 3, [0] * 3)
        builder.add_observation([5])
        assert builder.tokens.tolist() == [1, 2, 30, 31, 40, 5]

    def test_a_special_token_without_text_costs_no_observation_token(self):
        builder = TrajectoryBuilder([1, 2])
        builder.add_action([9, 50, 8], [-0.1] * 3, [0] * 3)  # 50 decodes to nothing
        builder.add_observation([60, 61])
        t = builder.build("truncated")
        assert t.tokens[~t.action_mask].tolist() == [1, 2, 60, 61]
        assert t.tokens[t.action_mask].tolist() == [9, 50, 8]

    def test_an_action_after_an_ended_action_is_a_new_step_without_an_observation_between(self):
        builder = TrajectoryBuilder([1])
        for token in (2, 3):
            builder.add_action([token], [-0.1], [0])
            builder.end_action()
        assert builder.build("truncated").step_ids.tolist() == [0, 0, 1]

    def test_building_does_not_consume_and_a_snapshot_resumes_to_the_same_trajectory(self):
        whole, builder = two_turns(), two_turns()
        resumed = TrajectoryBuilder.resume(builder.build("truncated", "seam"))
        for b in (whole, resumed):
            b.end_action()
            b.add_observation([8])
            b.add_action([9, 9], [-0.3, -0.4], [6, 6])
            b.add_reward(2.0, {"answer": 2.0})
        assert save_trajectory(whole.build("terminated")) == save_trajectory(resumed.build("terminated"))


class TestRefusals:
    def test_nothing_sampled(self):
        builder = TrajectoryBuilder([1, 2])
        builder.add_observation([3])
        with pytest.raises(NoActionError, match="no action token"):
            builder.build("terminated")

    def test_empty_prompt(self):
        with pytest.raises(ValueError, match="prompt is empty"):
            TrajectoryBuilder([])

    def test_a_reward_before_the_first_action(self):
        with pytest.raises(ValueError, match="before the first action"):
            TrajectoryBuilder([1]).add_reward(1.0)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
    def test_a_reward_that_is_not_finite(self, value):
        builder = two_turns()
        with pytest.raises(ValueError, match="not finite"):
            builder.add_reward(value)
        with pytest.raises(ValueError, match="not finite"):
            builder.add_reward(0.0, {"part": value})

    def test_a_stop_token_without_its_log_probability(self):
        with pytest.raises(ValueError, match="action of 3 tokens with 2 log-probs"):
            TrajectoryBuilder([1]).add_action([5, 6, 9], [-0.1, -0.2], [0, 0, 0])

    def test_a_probability_instead_of_its_logarithm(self):
        with pytest.raises(ValueError, match="above 0"):
            TrajectoryBuilder([1]).add_action([5], [0.9], [0])

    def test_a_version_below_zero(self):
        with pytest.raises(ValueError, match="negative"):
            TrajectoryBuilder([1]).add_action([5], [-0.9], [-1])

    @pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], [-1], [2**31], ["a"]])
    def test_tokens_that_are_no_ids(self, tokens):
        with pytest.raises(ValueError, match="token"):
            TrajectoryBuilder([1]).add_observation(tokens)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (dict(end="done"), "allowed: terminated, truncated, aborted"),
            (dict(action_mask=np.array([1, 0, 1, 1, 0, 1], bool)), "token 0 is marked"),
            (dict(rewards=np.float32([0, 0, 0, 0, 1, 0])), "reward at token 4"),
            (dict(rewards=np.float32([0, 0, np.nan, 0, 0, 0])), "reward at token 2 is not finite"),
            (dict(rollout_logp=np.float32([0, 0, 0, 0, -1, 0])), "rollout_logp at token 4"),
            (dict(rewards=np.zeros(6)), r"rewards is float64\[6\]; expected float32\[6\]"),
            (dict(version=np.int32([-1, -1, 0, 0, 0, 0])), "version must be"),
            (dict(step_ids=np.int32([0, 0, 0, 0, 0, 2])), "grow by at most 1"),
            (dict(step_ids=np.int32([0, 0, 0, 0])), r"step_ids is int32\[4\]"),
            (dict(timings={"s": float("nan")}), "timing 's' is nan"),
        ],
    )
    def test_a_malformed_record(self, change, message):
        t = two_turns().build("terminated")
        with pytest.raises(ValueError, match=message):
            check_trajectory(dataclasses.replace(t, **change))


def test_a_log_probability_that_is_not_finite_is_kept_for_the_losses_to_mask_and_count():
    builder = TrajectoryBuilder([1])
    builder.add_action([2, 3], [float("nan"), float("-inf")], [0, 0])
    t = load_trajectory(save_trajectory(builder.build("terminated")))
    np.testing.assert_array_equal(t.rollout_logp, np.float32([0, np.nan, -np.inf]))


def test_segments_are_whole_steps():
    builder = TrajectoryBuilder([1])
    for step in range(5):
        builder.add_action([2], [-0.1], [0])
        if step % 2 == 0:
            builder.add_observation([3, 3])
        builder.end_action()
    t = builder.build("terminated")
    assert t.segment_ids(2).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert t.segment_ids(100).tolist() == [0] * 12
    assert t.segment_ids(1).tolist() == t.step_ids.tolist()
    with pytest.raises(ValueError, match="at least 1"):
        t.segment_ids(0)


def test_rewards_move_to_the_action_before_them():
    moved = rewards_to_actions([0, 0, 1, 0, 2, 3, 4], [0, 1, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(moved, [0, 0, 3, 0, 0, 7, 0])
    with pytest.raises(ValueError, match="token 1 comes before the first action"):
        rewards_to_actions([0, 1, 0], [0, 0, 1])


@hypothesis.given(st.lists(st.tuples(st.booleans(), st.integers(-8, 8)), max_size=30))
def test_moving_rewards_keeps_their_total_and_leaves_none_on_an_observation(pairs):
    mask = np.array([False, True] + [m for m, _ in pairs])
    rewards = np.array([0, 1] + [r for _, r in pairs], np.float32)
    moved = rewards_to_actions(rewards, mask)
    assert moved.sum() == rewards.sum()
    assert not np.any(moved[~mask])
    loop, last = np.zeros_like(moved), 0
    for i in range(len(mask)):
        last = i if mask[i] else last
        loop[last] += rewards[i]
    np.testing.assert_array_equal(moved, loop)


@st.composite
def trajectories(draw) -> Trajectory:
    texts, numbers = st.text(max_size=8), st.floats(-1e6, 1e6)
    labels = {n: draw(st.integers(0, 2**40)) for n in ("rollout", "attempt", "group", "sample", "seed")}
    sampling = dict(temperature=draw(st.floats(0, 4)), top_p=draw(st.floats(0, 1)), top_k=draw(st.integers(0, 99)))
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
    builder = TrajectoryBuilder(draw(ids), task=draw(texts), **labels, **sampling)
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(ids)
        logp = draw(
            st.lists(
                st.floats(max_value=0, width=32) | st.just(float("nan")), min_size=len(tokens), max_size=len(tokens)
            )
        )
        builder.add_action(tokens, logp, [draw(st.integers(0, 2**31 - 1))] * len(tokens))
        if draw(st.booleans()):
            builder.end_action()
        if draw(st.booleans()):
            builder.add_observation(draw(ids))
        builder.add_reward(draw(numbers), draw(st.dictionaries(texts, numbers, max_size=2)))
    end = draw(st.sampled_from(["terminated", "truncated", "aborted"]))
    return builder.build(end, draw(texts), draw(st.dictionaries(texts, numbers, max_size=2)))


@hypothesis.given(trajectories())
def test_stored_and_loaded_is_the_same_to_the_bit(t):
    data = save_trajectory(t)
    again = load_trajectory(data)
    for field in dataclasses.fields(Trajectory):
        ours, theirs = getattr(t, field.name), getattr(again, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes(), field.name
        else:
            assert ours == theirs, field.name
    assert save_trajectory(again) == data


@hypothesis.given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(ValueError, match="not a stored trajectory"):
        load_trajectory(data)


def test_damaged_and_foreign_records_are_refused():
    data = save_trajectory(two_turns().build("terminated"))
    for cut in range(0, len(data), 37):
        with pytest.raises(ValueError, match=f"^{cut} bytes are not a stored trajectory"):
            load_trajectory(data[:cut])
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    text = json.dumps(header).encode().ljust(size)
    with pytest.raises(ValueError, match="not a stored trajectory"):
        load_trajectory(len(text).to_bytes(8, "little") + text + data[8 + size :])


def test_a_record_says_what_chose_its_actions_and_one_without_a_word_is_the_policys_own():
    t = two_turns().build("terminated")
    assert t.trainable
    assert b"sampler" not in save_trajectory(t)  # as records were written before anything else chose
    chosen = dataclasses.replace(t, sampler="value-guided best of 4")
    again = load_trajectory(save_trajectory(chosen))
    assert (again.sampler, again.trainable) == ("value-guided best of 4", False)
    assert not TrajectoryBuilder.resume(again).build("truncated").trainable
