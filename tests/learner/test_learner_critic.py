"""The critic's side of an update: what its targets are, when it steps, and what stays fixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    LENGTH,
    MODEL,
    assert_close,
    gradients,
    host,
    make_learner,
    metric_sums,
    policy_logp,
    put_all,
    quick_compile,  # noqa: F401
    random_rows,
    restart,
    values_of,
)

from sao_jax.data.rows import stack_rows
from sao_jax.learner.objective import Choices, Numbers
from sao_jax.learner.programs import Programs, adam, optimizer_step
from sao_jax.models.critic import critic_outputs, prefix_values

GAMMA = 0.9
# b1 = 0: the first moment of Adam is the clipped gradient of the last step
NUMBERS = dict(gamma=GAMMA, critic_lr=0.05, lr=0.05, adam_eps=1e-2, adam_b1=0.0, critic_grad_clip=0.5)


@pytest.fixture(scope="module")
def _batch():
    return make_learner(Choices(kl="off", critic_passes=2))


@pytest.fixture(scope="module")
def _arrival():
    return make_learner(Choices(kl="off", critic_update="arrival", critic_passes=1), micro_rows=1)


@pytest.fixture
def batch(_batch):
    return restart(_batch, **NUMBERS)


@pytest.fixture
def arrival(_arrival):
    return restart(_arrival, **NUMBERS)


def returns_of(row, values, bootstrap):
    """Monte-Carlo returns of one row, each segment closed by the value of the next one's first action token."""
    out = np.zeros_like(values)
    following, after = (bootstrap if row["truncated"] else 0.0), None
    for t in np.flatnonzero(row["action_mask"])[::-1]:
        if after is not None:
            same = row["segment_ids"][t] == row["segment_ids"][after]
            following = out[after] if same else values[after]
        out[t], after = row["rewards"][t] + GAMMA * following, t
    return out


def targets_of(critic, rows):
    values, batch = values_of(critic, rows), stack_rows(rows)
    ends = prefix_values(critic_outputs(MODEL, host(critic), batch["tokens"]), batch["length"])[1]
    return np.stack([returns_of(*item) for item in zip(rows, values, np.asarray(ends), strict=True)])


def critic_gradient(critic, rows, targets, frozen=None):
    """Of the mean of 1/2 (V - R)^2 over action tokens."""
    batch = stack_rows(rows)

    @jax.jit
    def loss(critic):
        if frozen is not None:
            critic = jax.tree.map(lambda p, f: jax.lax.stop_gradient(p) if f else p, critic, frozen)
        values, _ = prefix_values(critic_outputs(MODEL, critic, batch["tokens"]), batch["length"])
        return jnp.sum(jnp.where(batch["action_mask"], 0.5 * (values - targets) ** 2, 0.0)) / batch["action_mask"].sum()

    return host(jax.grad(loss)(host(critic)))


def clipped(gradient):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g * min(1.0, NUMBERS["critic_grad_clip"] / norm), gradient)


def count_of(learner):
    return int(learner.state["critic_opt"].count)


# -- a step per batch --------------------------------------------------------------------------------------------------


def test_gradient_of_a_batch_is_that_of_the_mean_squared_error(batch):
    rows = random_rows(0, 5)
    critic, frozen = host(batch.state["critic"]), batch.programs.frozen
    targets = targets_of(critic, rows)
    put_all(batch, rows).accumulate()
    count = metric_sums(batch)["value_count"]
    expected = critic_gradient(critic, rows, targets, frozen)
    assert_close(jax.tree.map(lambda g: g / count, gradients(batch, "critic")), expected)
    assert_close(host(batch._buffer["targets"])[0, :5], targets)
    assert_close(host(batch._buffer["values"])[0, :5] * stack_rows(rows)["action_mask"],
                 values_of(critic, rows) * stack_rows(rows)["action_mask"])  # fmt: skip


def test_advantages_are_those_of_the_critic_before_its_step(batch):
    rows = random_rows(1, 6)
    for row in rows:
        row["lambda_"] = np.float32(1.0)
    critic = host(batch.state["critic"])
    expected = targets_of(critic, rows) - values_of(critic, rows)
    put_all(batch, rows).update()
    mask = stack_rows(rows)["action_mask"]
    assert_close(host(batch._buffer["advantages"])[0, :6], np.where(mask, expected, 0.0))


def test_every_pass_of_the_critic_has_the_same_targets(batch):
    rows = random_rows(2, 8)
    critic, frozen = host(batch.state["critic"]), batch.programs.frozen
    targets = targets_of(critic, rows)
    put_all(batch, rows).update()
    assert count_of(batch) == 2
    first = critic_gradient(critic, rows, targets, frozen)
    moved, *_ = optimizer_step(
        critic, adam(0.0, 0.999, 1e-2).init(critic), first, Numbers(**NUMBERS).traced(), prefix="critic_", frozen=frozen
    )
    second = critic_gradient(moved, rows, targets, frozen)
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)) > 1e-3
    assert_close(host(batch.state["critic_opt"].mu), clipped(second), 1e-4)


def test_frozen_parameters_keep_their_bits_in_rl_while_the_rest_moves(batch):
    for seed in range(3):
        put_all(batch, random_rows(seed, 8)).update()
    frozen = jax.tree.leaves(batch.programs.frozen)
    before, after = jax.tree.leaves(host(batch.start["critic"])), jax.tree.leaves(host(batch.state["critic"]))
    same = [a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True)]
    assert same == frozen
    assert any(frozen)


def test_preheating_moves_all_of_the_critic_and_none_of_the_policy(batch):
    batch.critic_only = True
    for seed in range(3):
        put_all(batch, random_rows(seed, 8)).update()
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), host(batch.start["critic"]), host(batch.state["critic"]))
    assert all(jax.tree.leaves(moved)), moved
    jax.tree.map(np.testing.assert_array_equal, host(batch.state["policy"]), host(batch.start["policy"]))
    assert batch.version == 0
    assert count_of(batch) == 3, "K belongs to the policy's updates; alone the critic steps once a batch"


def test_a_freeze_pattern_that_matches_nothing_is_an_error(batch):
    with pytest.raises(ValueError, match="'trunk/atention/\\*' matches no parameter"):
        _ = Programs(MODEL, Choices(freeze=("trunk/atention/*",)), batch.layout, batch.mesh).frozen


def test_scoring_changes_nothing_and_reads_values_as_they_are(batch):
    rows = random_rows(3, 11)  # more than a batch
    before = host(batch.state)
    sums = host(batch.score([[row] for row in rows]))
    jax.tree.map(np.testing.assert_array_equal, host(batch.state), before)
    targets, values = targets_of(before["critic"], rows), values_of(before["critic"], rows)
    mask = stack_rows(rows)["action_mask"]
    assert sums["value_count"] == mask.sum()
    assert sums["returns"] == pytest.approx(targets[mask].sum(), rel=1e-4, abs=1e-4)
    assert sums["error_sq"] == pytest.approx(np.square(targets - values)[mask].sum(), rel=1e-4)
    assert batch.empty
    assert float(batch.score([rows[:1]])["value_count"]) == mask[0].sum(), "sums were not cleared"


# -- a step per arrival ------------------------------------------------------------------------------------------------


def test_a_value_is_read_before_the_critic_has_seen_its_return(arrival):
    rows = random_rows(4, 8)
    for n, row in enumerate(rows):
        before = values_of(arrival.state["critic"], [row])[0]
        arrival.put(row)
        after = values_of(arrival.state["critic"], [row])[0]
        stored = host(arrival._buffer["values"])[0, n]
        mask = row["action_mask"]
        assert_close(stored[mask], before[mask])
        assert np.abs(after - before)[mask].max() > 1e-3


def test_the_critic_steps_once_per_arrival_on_the_mean_over_that_trajectory(arrival):
    restart(arrival, **NUMBERS | {"critic_grad_clip": 1e9})
    for n, row in enumerate(random_rows(5, 6), start=1):
        critic = host(arrival.state["critic"])
        expected = critic_gradient(critic, [row], targets_of(critic, [row]), arrival.programs.frozen)
        arrival.put(row)
        assert count_of(arrival) == n
        assert_close(host(arrival.state["critic_opt"].mu), expected, 1e-4)
    arrival.update()
    assert count_of(arrival) == 6
    assert arrival.version == 1


def test_in_preheating_a_critic_of_arrivals_steps_per_batch(arrival):
    arrival.critic_only = True
    put_all(arrival, random_rows(6, 8))
    assert count_of(arrival) == 0
    arrival.update()
    assert count_of(arrival) == 1


# -- importance-corrected targets --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corrected_learner():
    return make_learner(Choices(kl="off", critic_targets="dis", outside="mask", critic_passes=1))


def test_on_policy_corrected_targets_are_the_returns(corrected_learner, batch):
    corrected, rows = restart(corrected_learner, **NUMBERS), random_rows(7, 8, steps_per_segment=100)
    logp = policy_logp(batch.state["policy"], rows)
    for row, now in zip(rows, logp, strict=True):
        row["rollout_logp"] = np.where(row["action_mask"], now, 0.0).astype(np.float32)
    put_all(corrected, rows).accumulate()
    assert_close(host(corrected._buffer["targets"])[0], targets_of(batch.state["critic"], rows))


def test_a_token_outside_the_band_cuts_the_trace_of_its_target(corrected_learner):
    """f = 0 at a token leaves its value as its target, and that of the token before sees no further."""
    corrected = restart(corrected_learner, **NUMBERS | {"band_low": 0.5, "band_high": 2.0})
    row = random_rows(8, 1, steps_per_segment=100)[0]
    at = np.flatnonzero(row["action_mask"])
    now = policy_logp(corrected.state["policy"], [row])[0]
    shift = np.zeros_like(now)
    shift[at[-1]] = -2.0
    row["rollout_logp"] = np.where(row["action_mask"], now + shift, 0.0).astype(np.float32)
    corrected.put(row)
    corrected.accumulate()
    targets, values = host(corrected._buffer["targets"])[0, 0], values_of(corrected.state["critic"], [row])[0]
    assert targets[at[-1]] == pytest.approx(values[at[-1]], abs=1e-5)
    if len(at) > 1:
        expected = row["rewards"][at[-2]] + GAMMA * values[at[-1]]
        assert targets[at[-2]] == pytest.approx(expected, abs=1e-5)


def test_over_all_tokens_the_recursion_and_the_fit_visit_observations_too():
    learner = restart(make_learner(Choices(kl="off", gae_over="tokens", freeze=())), **NUMBERS)
    rows = random_rows(3, learner.layout.batch)
    critic, values = host(learner.state["critic"]), values_of(learner.state["critic"], rows)
    visited = [
        row | {"action_mask": (np.cumsum(row["action_mask"]) > 0) & (np.arange(LENGTH) < row["length"])} for row in rows
    ]
    assert any(np.any(v["action_mask"] != r["action_mask"]) for v, r in zip(visited, rows, strict=True))
    batch = stack_rows(rows)
    ends = np.asarray(prefix_values(critic_outputs(MODEL, critic, batch["tokens"]), batch["length"])[1])
    targets = np.stack([returns_of(*item) for item in zip(visited, values, ends, strict=True)])
    expected = critic_gradient(critic, visited, targets)
    put_all(learner, rows).accumulate()
    count = metric_sums(learner)["critic_count"]
    assert count == sum(v["action_mask"].sum() for v in visited)
    assert_close(jax.tree.map(lambda g: g / count, gradients(learner, "critic")), expected)
