"""The same batch on any number of devices and in any split gives the same gradients and parameters."""

import jax
import numpy as np
import pytest
from helpers import (
    MODEL,
    assert_close,
    gradients,
    host,
    make_learner,
    metric_sums,
    put_all,
    quick_compile,  # noqa: F401
    random_rows,
    restart,
)

from sao_jax.learner.layout import Layout
from sao_jax.learner.objective import Choices
from sao_jax.models import logprobs
from sao_jax.models.compute import Compute

CHOICES = Choices(kl="off", critic_passes=1)
NUMBERS = dict(lr=0.1, critic_lr=0.1, adam_eps=1.0, gamma=0.9)
ROWS = random_rows(0, 5)  # of a batch of 8: on 8 devices three shards are empty


def batch_result(learner):
    """(gradient sums of both models, metric sums, parameters after the update)."""
    restart(learner, **NUMBERS)
    put_all(learner, ROWS).accumulate()
    sums = gradients(learner), gradients(learner, "critic"), metric_sums(learner)
    learner.update()
    return *sums, host({name: learner.state[name] for name in ("policy", "critic")})


@pytest.fixture(scope="module")
def single():
    return batch_result(make_learner(CHOICES, devices=1))


@pytest.mark.parametrize(
    ("devices", "micro_rows", "shard"), [(2, 1, False), (8, 2, False), (8, 2, True)], ids=["2", "8", "8-sharded"]
)
def test_devices_agree_with_one(single, devices, micro_rows, shard):
    learner = make_learner(CHOICES, devices=devices, micro_rows=micro_rows, shard_params=shard)
    policy, critic, sums, params = batch_result(learner)
    if shard:
        embed = learner.state["policy"]["layers"]["0"]["mlp"]["gate"]
        assert embed.sharding.spec != jax.P(), "nothing was cut"
    assert any(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(single[1]["trunk"]))
    assert_close(policy, single[0])
    assert_close(critic, single[1])
    for name in ("windows", "skipped"):
        sums.pop(name)
    assert_close(sums, {k: single[2][k] for k in sums})
    assert_close(params, single[3])


def test_a_batch_computed_again_in_a_loop_over_layers_is_the_same_batch(single):
    learner = make_learner(CHOICES, devices=2, micro_rows=1, shard_params=True, compute=Compute("block", True))
    policy, critic, _, params = batch_result(learner)
    for got, want in zip((policy, critic, params), (single[0], single[1], single[3]), strict=True):
        assert_close(got, want)


@pytest.fixture(scope="module")
def reference():
    """Gradient sums of eight rows, one gradient call per row."""
    rows = random_rows(1, 8)
    learner = restart(make_learner(CHOICES, micro_rows=1), **NUMBERS)
    put_all(learner, rows).accumulate()
    return rows, gradients(learner), gradients(learner, "critic"), metric_sums(learner), learner


def same_gradients(learner, reference):
    _, policy, critic, sums, _ = reference
    assert_close(gradients(learner), policy)
    assert_close(gradients(learner, "critic"), critic)
    got = metric_sums(learner)
    for name in ("tokens", "policy_count", "value_count", "low", "high", "nonfinite"):
        assert got[name] == sums[name]
    assert got["pg_loss"] == pytest.approx(sums["pg_loss"], abs=1e-4)


def test_order_of_rows_does_not_matter(reference):
    rows, *_, learner = reference
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 7, 1, 6, 2, 5, 4]):
        restart(learner, **NUMBERS)
        put_all(learner, [rows[i] for i in order]).accumulate()
        same_gradients(learner, reference)


def test_gradient_calls_may_come_at_any_time(reference):
    rows, *_, learner = reference
    for pauses in ({1, 2, 3, 4, 5, 6, 7, 8}, {3, 8}, {1, 7}):
        restart(learner, **NUMBERS)
        for n, row in enumerate(rows, start=1):
            learner.put(row)
            if n in pauses:
                learner.accumulate()
                assert learner.pending == 0
        learner.accumulate()
        same_gradients(learner, reference)


@pytest.mark.parametrize("micro_rows", [3, 8])
def test_size_of_micro_batches_does_not_matter(reference, micro_rows):
    rows = reference[0]
    learner = restart(make_learner(CHOICES, micro_rows=micro_rows), **NUMBERS)
    for pauses in ((), (2, 5)):
        restart(learner, **NUMBERS)
        for n, row in enumerate(rows, start=1):
            learner.put(row)
            if n in pauses:
                learner.accumulate()
        learner.accumulate()
        same_gradients(learner, reference)


@pytest.mark.parametrize("batch", [1, 5, 8, 64])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("micro_rows", [None, 1, 3, 100])
def test_layout_gives_every_row_its_own_place(batch, devices, micro_rows):
    layout = Layout.fit(batch, 12, devices, micro_rows=micro_rows)
    places = [layout.place(n) for n in range(batch)]
    assert len(set(places)) == batch
    assert all(0 <= d < devices and 0 <= slot < layout.slots for d, slot in places)
    assert [layout.window(n) for n in range(batch)] == [slot // layout.rows for _, slot in places]
    complete = [n for n in range(1, batch + 1) if layout.completes_window(n)]
    assert complete[-1] == batch
    assert all(layout.window(n) > layout.window(n - 1) for n in complete[:-1])


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Layout.fit(0, 12, 1)


@pytest.mark.parametrize("devices", [1, 2])
def test_chunks_of_logits_are_skipped_without_changing_the_update(devices, monkeypatch):
    """Chunks of five tokens, some of which hold no action token."""
    usual = batch_result(make_learner(CHOICES, devices=devices))
    monkeypatch.setattr(logprobs, "MAX_LOGITS_CPU", 5 * MODEL.vocab_size)
    for found, expected in zip(batch_result(make_learner(CHOICES, devices=devices)), usual, strict=True):
        assert_close(found, expected)
