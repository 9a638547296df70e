import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.data.rows import ROW_FIELDS, blank_row, last_index, make_row, stack_rows
from sao_jax.data.trajectory import TrajectoryBuilder


def built(end="terminated", temperature=0.7):
    builder = TrajectoryBuilder([1, 2], temperature=temperature)
    builder.add_action([3, 4], [-0.5, -0.25], [0, 0])
    builder.add_observation([5])
    builder.add_action([6], [-1.0], [1])
    builder.add_reward(1.0)
    return builder.build(end, "worker died" if end == "aborted" else "")


def test_a_row_is_the_trajectory_padded_on_the_right():
    row = make_row(built(), length=8, steps_per_segment=1, lambda_=0.75, advantage=0.5)
    expected = dict(
        tokens=[1, 2, 3, 4, 5, 6, 0, 0],
        action_mask=[0, 0, 1, 1, 0, 1, 0, 0],
        rollout_logp=[0, 0, -0.5, -0.25, 0, -1, 0, 0],
        rewards=[0, 0, 0, 0, 0, 1, 0, 0],
        segment_ids=[0, 0, 0, 0, 0, 1, 1, 1],
        length=6,
        lambda_=0.75,
        truncated=False,
        advantage=0.5,
        temperature=np.float32(0.7),
    )
    assert set(row) == set(ROW_FIELDS)
    for name, value in expected.items():
        np.testing.assert_array_equal(row[name], value, err_msg=name)
        dtype, per_token = ROW_FIELDS[name]
        assert row[name].dtype == dtype
        assert row[name].shape == ((8,) if per_token else ())


def test_only_a_truncated_end_asks_for_a_bootstrap():
    row = make_row(built("truncated"), length=6, steps_per_segment=9, lambda_=1.0)
    assert bool(row["truncated"])
    assert row["advantage"] == 0


def test_rows_that_cannot_be_trained_are_refused():
    kwargs = dict(length=8, steps_per_segment=1, lambda_=1.0)
    with pytest.raises(ValueError, match="6 tokens does not fit a row of 5"):
        make_row(built(), **(kwargs | dict(length=5)))
    with pytest.raises(ValueError, match="worker died"):
        make_row(built("aborted"), **kwargs)
    with pytest.raises(ValueError, match="temperature 0"):
        make_row(built(temperature=0.0), **kwargs)
    chosen = dataclasses.replace(built(), sampler="value-guided best of 4")
    with pytest.raises(ValueError, match="chosen by 'value-guided best of 4', not by the policy, is not trained"):
        make_row(chosen, **kwargs)


def test_a_blank_row_has_the_types_of_a_real_one_and_nothing_to_train():
    real, blank = make_row(built(), length=8, steps_per_segment=1, lambda_=0.5), blank_row(8)
    assert {n: (v.dtype, v.shape) for n, v in real.items()} == {n: (v.dtype, v.shape) for n, v in blank.items()}
    assert not blank["action_mask"].any()
    batch = stack_rows([real, blank])
    assert batch["tokens"].shape == (2, 8)
    np.testing.assert_array_equal(batch["length"], [6, 1])
    np.testing.assert_array_equal(batch["temperature"], np.float32([0.7, 1]))


def test_last_index_of_left_padded_rows_and_rows_with_gaps():
    mask = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]
    np.testing.assert_array_equal(last_index(mask), [4, 4, 4])
    np.testing.assert_array_equal(last_index([[0, 0], [0, 1], [1, 0]]), [-1, 1, 0])
    assert last_index(np.zeros(0)) == -1


@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 5))
def test_last_index_does_not_depend_on_the_side_of_the_padding(mask, padding):
    mask = [True, *mask]
    right, left = mask + [False] * padding, [False] * padding + mask
    assert last_index(right) == last_index(left) - padding == max(i for i, m in enumerate(mask) if m)
