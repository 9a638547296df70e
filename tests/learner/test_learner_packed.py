"""Trajectories that share rows are trained as if each had a row of its own."""

import functools

import jax
import numpy as np
import pytest
from helpers import (
    assert_close,
    gradients,
    host,
    make_learner,
    metric_sums,
    quick_compile,  # noqa: F401
    random_rows,
    restart,
)
from test_learner_rows import cut_rows, trajectories

from sao_jax.data.rows import blank_row
from sao_jax.learner.objective import Choices
from sao_jax.runtime.devices import CompileCounter

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTH, BATCH = 24, 9
NUMBERS = dict(gamma=0.9, critic_lambda=0.8, lr=0.1, critic_lr=0.1, adam_eps=1.0, kl_target=1e-3, sequence_kl=3.0)
CHOICES = {
    "smooth": dict(),
    "ppo": dict(policy_loss="ppo", dual_clip=True, kl="off", baseline="given"),
    "gspo": dict(policy_loss="gspo", kl="off", baseline="given"),
    "a3po": dict(policy_loss="a3po", kl="off", baseline="given"),
    "sequence mask": dict(sequence_mask=True, kl="off", baseline="given"),
    "corrected": dict(critic_targets="dis", segments="carried", value_clip=True),
    "whitened": dict(whiten="batch", gae_over="tokens"),
    "penalty": dict(kl="penalty", outside="mask", denominator="kept", whiten="running"),
}
FAST = ("smooth", "gspo")
NAMES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CHOICES]


@functools.cache
def learner_of(name, pieces=1, devices=1, **how):
    return make_learner(Choices(**CHOICES[name]), length=LENGTH, batch=BATCH, pieces=pieces, devices=devices, **how)


def batch_of(seed, count=BATCH):
    rng = np.random.default_rng(seed)
    rows = random_rows(seed, count, length=LENGTH)
    return [[row | {"staleness": np.float32(rng.integers(0, 4)), "temperature": np.float32(rng.uniform(0.5, 2.0))}]
            for row in rows]  # fmt: skip


ROWS = batch_of(3)


def restart_and_train(learner, batch, call_after=()):
    """Gradients and sums before the boundary, the boundary's figures, and the parameters after it."""
    return result(learner, batch, call_after)[0]


def result(learner, batch, call_after=()):
    """`restart_and_train`, and the number of windows that gradient calls worked on."""
    restart(learner, **NUMBERS)
    for n, rows in enumerate(batch):
        learner.put(*rows)
        if n in call_after:
            learner.accumulate()
    learner.accumulate()
    sums = metric_sums(learner)
    windows = sums.pop("windows")
    assert sums.pop("skipped") == 0
    names = ["policy"] + (["critic"] if learner.choices.has_critic else [])
    parts = [gradients(learner, name) for name in names]
    figures = {k: v for k, v in host(learner.update()).items() if k in ("kl_before", "kl_after", "smooth_fraction")}
    return (parts, sums, figures, host({name: learner.state[name] for name in names})), windows


@pytest.mark.parametrize("name", NAMES)
def test_packed_trajectories_add_up_to_what_they_are_alone(name):
    expected, windows = result(learner_of(name), ROWS)
    assert any(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(expected[0]))
    found, fewer = result(learner_of(name, pieces=4), ROWS)
    assert_close(found, expected)
    assert fewer < windows


@pytest.mark.parametrize(("devices", "shard"), [(2, False), pytest.param(8, True, marks=pytest.mark.slow)])
def test_on_several_devices_with_unequal_masks(devices, shard):
    expected, _ = result(learner_of("smooth"), ROWS)
    found, _ = result(learner_of("smooth", pieces=3, devices=devices, micro_rows=1, shard_params=shard), ROWS)
    assert_close(found, expected)


def test_when_gradient_calls_come_changes_no_place_and_no_result():
    learner = learner_of("smooth", pieces=4)
    (expected, _), (found, _) = result(learner, ROWS), result(learner, ROWS, call_after=(0, 1, 5))
    assert_close(found, expected)


def test_a_partial_batch_and_one_after_another():
    one, packed = learner_of("smooth"), learner_of("smooth", pieces=4)
    for rows in (ROWS[:1], batch_of(5)[:4], batch_of(6)):
        assert_close(result(packed, rows)[0], result(one, rows)[0])


def test_the_same_order_gives_the_same_bits():
    learner = learner_of("smooth", pieces=4)
    first, again = (jax.tree.leaves(result(learner, ROWS)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.slow
def test_rows_of_trajectories_that_have_several_are_packed_too():
    batch = cut_rows(enumerate(trajectories()))
    how = dict(length=LENGTH, batch=5, most=5)
    one, packed = (make_learner(Choices(segments="carried"), pieces=pieces, **how) for pieces in (1, 4))
    assert_close(result(packed, batch)[0], result(one, batch)[0])


@pytest.mark.slow
def test_scores_are_those_of_unpacked_rows():
    found, expected = (host(restart(learner_of("smooth", p), **NUMBERS).score(ROWS + batch_of(4))) for p in (4, 1))
    for name in ("value_count", "returns", "returns_sq", "error", "error_sq"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_nothing_is_compiled_after_the_warm_up():
    learner = make_learner(Choices(), length=LENGTH, batch=BATCH, pieces=4)
    learner.warm_up(blank_row(LENGTH), preheat=False)
    counter = CompileCounter()
    for rows in (ROWS, batch_of(5), batch_of(6)[:2]):
        for row in rows:
            learner.put(*row)
        learner.update()
    assert counter.count == 0
    restart(learner, **NUMBERS)
    jax.jit(lambda x: x + len(ROWS))(1)  # the counter counts
    assert counter.count > 0
