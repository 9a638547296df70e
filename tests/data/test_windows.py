"""Windows of long trajectories, by hand and by property, and the rows made of them."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.data.rows import make_row, make_rows
from sao_jax.data.trajectory import TrajectoryBuilder, load_trajectory, save_trajectory
from sao_jax.data.windows import Window, carried, context_at, full, most_windows, planned, windows_of


def built(prompt=2, steps=((2, 1), (2, 1), (2, 0)), end="terminated"):
    """Tokens are 1, 2, 3, ..., so that a token says where it comes from; steps are (action, observation) lengths."""
    number = iter(range(1, 10_000))
    builder = TrajectoryBuilder([next(number) for _ in range(prompt)], temperature=0.7)
    for action, observation in steps:
        builder.add_action([next(number) for _ in range(action)], [-0.5] * action, [0] * action)
        builder.add_reward(1.0)
        builder.end_action()
        builder.add_observation([next(number) for _ in range(observation)])
    return builder.build(end)


def test_carried_context_is_the_prompt_and_the_whole_steps_that_fit():
    steps = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert carried(steps, prompt=2, size=16) == (2, 4)  # room for 6: steps 1 and 2 are 5 tokens
    assert carried(steps, prompt=2, size=12) == (2, 7)  # room for 4: step 2
    assert carried(steps, prompt=2, size=64) == (2, 2)  # everything
    assert carried([0] * 9, prompt=2, size=12) == (2, 5)  # one long step is cut anywhere
    assert carried([0] * 9, prompt=8, size=8) == (2, 7)  # of a long prompt a quarter of the window is kept


def test_a_window_is_full_when_no_action_fits_unless_the_budget_ends_first():
    assert not full(12, size=16, budget=100)
    assert full(13, size=16, budget=100)
    assert not full(14, size=16, budget=2)
    assert full(8, size=8, budget=1)


def test_planned_windows_open_at_actions_and_within_one_that_is_too_long():
    t = built(2, ((2, 1), (2, 1), (2, 1), (1, 0)))  # actions at 2, 5, 8, 11
    assert planned(t.action_mask, t.step_ids, 12) == ()
    assert planned(t.action_mask, t.step_ids, 10) == ((11, 2, 8),)
    # 8 tokens: the prompt, and room for 2: of step 1, which has 3, what fits. The last action fits then.
    assert planned(t.action_mask, t.step_ids, 8) == ((8, 2, 6),)
    t = built(2, ((12, 0),))
    assert planned(t.action_mask, t.step_ids, 8) == ((8, 2, 6), (12, 2, 10))


def test_rows_hold_context_and_own_tokens():
    t = dataclasses.replace(built(end="truncated"), windows=((5, 2, 3), (8, 1, 6)))
    rows = make_rows(t, length=6, steps_per_segment=2, lambda_=0.5, advantage=3.0, staleness=2.0)
    expected = [
        dict(tokens=[1, 2, 3, 4, 0, 0], action_mask=[0, 0, 1, 1, 0, 0], rewards=[0, 0, 0, 1, 0, 0], length=4,
             segment_ids=[0] * 6, followed=True, seam=False, truncated=False),
        dict(tokens=[1, 2, 4, 5, 6, 7], action_mask=[0, 0, 0, 0, 1, 1], rewards=[0, 0, 0, 0, 0, 1], length=6,
             segment_ids=[0] * 6, followed=True, seam=True, truncated=False),
        dict(tokens=[1, 7, 8, 9, 10, 0], action_mask=[0, 0, 0, 1, 1, 0], rewards=[0, 0, 0, 0, 1, 0], length=5,
             segment_ids=[0, 0, 0, 1, 1, 1], followed=False, seam=False, truncated=True),
    ]  # fmt: skip
    assert len(rows) == 3
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in wanted.items():
            np.testing.assert_array_equal(row[name], value, err_msg=name)
        assert (row["lambda_"], row["advantage"], row["staleness"]) == (0.5, 3.0, 2.0)


def test_a_trajectory_that_fits_is_one_row():
    (row,) = make_rows(built(), length=12, steps_per_segment=1, lambda_=0.5)
    whole = make_row(built(), length=12, steps_per_segment=1, lambda_=0.5)
    for name, value in whole.items():
        np.testing.assert_array_equal(row[name], value, err_msg=name)


def test_the_last_row_goes_on_to_the_end_as_far_as_there_is_room():
    t = built(2, ((2, 5),), end="truncated")
    assert windows_of(t.action_mask, t.step_ids, (), 12) == [Window(0, 0, 0, 9)]
    assert windows_of(t.action_mask, t.step_ids, (), 8) == [Window(0, 0, 0, 8)]


def test_recorded_windows_that_do_not_fit_are_planned_anew():
    t = built(2, ((2, 1),) * 8)
    (recorded,) = planned(t.action_mask, t.step_ids, 20)
    assert windows_of(t.action_mask, t.step_ids, (recorded,), 20)[1].position == recorded[0]
    assert max(w.length for w in windows_of(t.action_mask, t.step_ids, (recorded,), 12)) <= 12


@st.composite
def trajectories(draw):
    steps = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12))
    return built(draw(st.integers(1, 40)), tuple(steps))


@hypothesis.given(trajectories(), st.integers(8, 64))
def test_planned_rows_partition_the_actions_within_their_length(t, size):
    windows = windows_of(t.action_mask, t.step_ids, (), size)
    own = np.concatenate([w.index[t.action_mask[w.index] & (w.index >= w.position)] for w in windows])
    np.testing.assert_array_equal(own, np.flatnonzero(t.action_mask))
    assert max(w.length for w in windows) <= size
    assert len(windows) <= most_windows(t.length, size)
    for w in windows[1:]:
        assert np.all(np.diff(w.index) > 0)
        assert w.head + w.position - w.start <= size // 2
        before = w.index[w.index < w.position]
        assert before[-1] == w.position - 1, "the newest token is always carried"


def test_windows_are_stored_with_the_trajectory_and_older_records_have_one():
    t = dataclasses.replace(built(), windows=((5, 2, 3), (8, 1, 6)))
    assert load_trajectory(save_trajectory(t)).windows == t.windows
    field = b', \\"windows\\": []'
    old = save_trajectory(built()).replace(field, b" " * len(field))
    assert b"windows" not in old
    assert load_trajectory(old).windows == ()


@pytest.mark.parametrize("windows", [((5, 2, 3), (5, 2, 3)), ((12, 2, 3),), ((5, 3, 2),), ((5, 2, 5),), ((0, 0, 0),)])
def test_windows_that_cannot_be_are_refused(windows):
    with pytest.raises(ValueError, match=r"window \(\d+, \d, \d\) is not one of 10 tokens"):
        load_trajectory(save_trajectory(dataclasses.replace(built(), windows=windows)))


def test_a_builder_tells_what_a_sampler_holds():
    builder = TrajectoryBuilder([1, 2])
    builder.add_action([3, 4], [-1, -1], [0, 0])
    builder.add_observation([5])
    assert builder.context.tolist() == [1, 2, 3, 4, 5]
    builder.open_window(8)
    assert builder.context.tolist() == [1, 2, 4, 5]
    assert builder.context_length == 4
    builder.add_action([6, 7], [-1, -1], [0, 0])
    assert builder.context.tolist() == [1, 2, 4, 5, 6, 7]
    t = builder.build("truncated")
    assert t.windows == ((5, 2, 3),)
    again = TrajectoryBuilder.resume(t)
    assert again.context.tolist() == [1, 2, 4, 5, 6, 7]
    again.open_window(8)
    assert again.build("truncated").windows == ((5, 2, 3), (7, 2, 5))
    assert context_at(t.tokens, t.windows, 6).tolist() == [1, 2, 4, 5, 6]
    assert context_at(t.tokens, t.windows, 4).tolist() == [1, 2, 3, 4]
