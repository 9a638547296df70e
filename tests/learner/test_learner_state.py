"""What lasts beyond one update: compiled programs, memory, published weights, checkpoints."""

import jax
import numpy as np
import pytest
from helpers import (
    LENGTH,
    MODEL,
    assert_close,
    host,
    make_learner,
    metric_sums,
    put_all,
    quick_compile,  # noqa: F401
    random_rows,
    restart,
)

from sao_jax.data.protocols import Outcome
from sao_jax.data.rows import blank_row, make_row
from sao_jax.learner.objective import Choices, Numbers
from sao_jax.rollout.agents import Agents
from sao_jax.rollout.engine import Engine
from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.devices import CompileCounter

CHOICES = Choices(kl="smooth", critic_passes=2)
NUMBERS = dict(gamma=0.9, lr=0.01, critic_lr=0.01, lr_warmup=4)


@pytest.fixture(scope="module")
def warm():
    """A learner after `warm_up`, on two devices."""
    learner = make_learner(CHOICES, devices=2, **NUMBERS)
    before = host(learner.state)
    names = learner.warm_up(blank_row(LENGTH), preheat=True)
    assert {"put", "policy step", "critic step", "gradient both", "gradient critic", "gradient again"} <= set(names)
    jax.tree.map(np.testing.assert_array_equal, host(learner.state), before)
    assert learner.version == 0
    return learner


@pytest.fixture
def learner(warm):
    return restart(warm, **NUMBERS)


def some_updates(learner, count=5, seed=0):
    """Full and partial batches, gradient calls at various times; metric sums that nobody keeps."""
    for n in range(count):
        for index, row in enumerate(random_rows(seed + n, (8, 3, 1, 5, 8)[n % 5])):
            learner.put(row)
            if index == n:
                learner.accumulate()
        metrics = learner.update()
    return metrics


def test_compiling_can_be_interrupted_between_any_two_programs():
    counter, at = CompileCounter(), []

    def check():
        at.append(counter.count)

    fresh = make_learner(CHOICES, devices=2, **NUMBERS)
    fresh.warm_up(blank_row(LENGTH), preheat=True, check=check)
    assert max(np.diff([*at, counter.count])) <= 2, "more than a program and a conversion of its arguments"
    calls = len(at)
    some_updates(fresh)
    assert len(at) == calls, "checked in training too"


def test_nothing_compiles_after_warm_up(learner):
    counter = CompileCounter()
    some_updates(learner)
    learner.critic_only = True
    some_updates(learner)
    learner.score([[row] for row in random_rows(9, 10)])
    learner.critic_only = False
    # Other numbers are other arguments of the same programs.
    values = Numbers(lr=0.5, kl_target=1e-4, band_low=0.5, gamma=0.5, critic_lr=0.2).traced()
    learner.numbers = jax.device_put(values, jax.NamedSharding(learner.mesh, jax.P()))
    before = counter.count
    some_updates(learner)
    host(learner.published_policy())
    assert counter.count == before, "other numbers"
    assert before <= 1, "numbers.traced() may compile a conversion; updates may not"


def test_an_update_makes_no_hidden_transfer(learner):
    rows = random_rows(10, 8)
    put_all(learner, rows).update()
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            for row in rows:
                learner.put(row)
            metrics = learner.update()
    assert np.isfinite(float(metrics["pg_loss"]))


def test_memory_does_not_grow(learner):
    some_updates(learner)
    jax.block_until_ready(learner.state)
    before = len(jax.live_arrays())
    for _ in range(4):
        some_updates(learner)
    assert len(jax.live_arrays()) == before


def test_published_weights_stay_readable(learner):
    published = learner.published_policy()
    before = host(jax.tree.map(np.array, published))
    some_updates(learner)
    jax.tree.map(np.testing.assert_array_equal, host(published), before)
    assert np.abs(host(learner.published_policy())["embed"] - before["embed"]).max() > 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def learning_rates(learner, seeds):
    """Step lengths of the first moment-free direction: the learning rate as it was in force."""
    rates = []
    for seed in seeds:
        before = host(learner.state["policy"])
        put_all(learner, random_rows(seed, 8)).update()
        opt, after = host(learner.state["policy_opt"]), host(learner.state["policy"])
        count = int(opt.count)
        m, v = opt.mu["embed"] / (1 - 0.9**count), opt.nu["embed"] / (1 - 0.999**count)
        direction = m / (np.sqrt(v) + 1e-8)
        at = np.unravel_index(np.argmax(np.abs(direction)), direction.shape)
        rates.append(float((before["embed"] - after["embed"])[at] / direction[at]))
    return rates


def test_training_continues_bit_by_bit_from_a_checkpoint(learner, tmp_path):
    numbers = NUMBERS | {"lr": 1e-3, "kl_target": 1e9}  # steps are not shortened
    restart(learner, **numbers)
    rates = learning_rates(learner, range(3))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, learner.state, {"version": learner.version})
        checkpoints.wait()
        rates += learning_rates(learner, range(3, 6))
        straight = host(learner.state)
        assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3], rel=1e-2)

        restart(learner, **numbers)
        state, meta = checkpoints.restore(0, learner.programs.abstract_state())
    learner.load(state, meta["version"])
    assert learner.version == 3
    counter = CompileCounter()
    assert learning_rates(learner, range(3, 6)) == rates[3:]
    assert counter.count == 0, "restored arrays lie elsewhere than the programs expect"
    assert learner.version == 6
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), straight, host(learner.state))
    assert all(jax.tree.leaves(same)), same


@pytest.mark.parametrize(("devices", "shard"), [(1, False), (8, True)])
def test_a_checkpoint_goes_on_on_another_number_of_devices(learner, tmp_path, devices, shard):
    some_updates(learner)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, learner.state, {"version": learner.version})
        checkpoints.wait()
        other = make_learner(CHOICES, devices=devices, shard_params=shard, seed=7, **NUMBERS)
        assert checkpoints.read_meta(0) == {"version": 5}
        state, meta = checkpoints.restore(0, other.programs.abstract_state())
    other.load(state, meta["version"])
    jax.tree.map(np.testing.assert_array_equal, host(other.state), host(learner.state))
    for leaf, wanted in zip(jax.tree.leaves(other.state), jax.tree.leaves(other.programs.shardings), strict=True):
        assert leaf.sharding == wanted
    rows = random_rows(11, 6)
    for both in (learner, other):
        put_all(both, rows).accumulate()
    sums, expected = metric_sums(other), metric_sums(learner)
    assert sums["pg_loss"] == pytest.approx(expected["pg_loss"], rel=1e-4)
    assert sums["vf_loss"] == pytest.approx(expected["vf_loss"], rel=1e-4)
    learner.update()
    other.update()
    assert_close(host(other.state["policy_opt"].mu), host(learner.state["policy_opt"].mu))


# -- sampler and trainer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampler_and_trainer_have_the_same_log_probs(learner, temperature):
    from helpers import Tiny

    family = Tiny(turns=3)
    family.max_tokens = LENGTH
    family.respond = lambda problem, actions: (
        Outcome(observation="-?") if len(actions) < 3 else Outcome(end="terminated", reward=1.0)
    )
    engine = Engine(
        MODEL,
        learner.published_policy(),
        mesh=learner.mesh,
        slots=8,
        context=LENGTH,
        stop_ids=family.tokenizer.encode(";"),
        seed=0,
    )
    agents = Agents(engine, family, context=LENGTH)
    for rollout in range(8):
        agents.start("train", rollout, rollout=rollout, temperature=temperature)
    done = []
    while agents.running:
        agents.dispatch()
        done += agents.collect()
    assert len(done) == 8
    assert max(t.num_steps for t in done) > 1, "no attempt read an observation"
    for t in done:
        learner.put(make_row(t, length=LENGTH, steps_per_segment=1, lambda_=1.0))
    learner.accumulate()
    sums = metric_sums(learner)
    assert sums["tokens"] == sum(t.num_action_tokens for t in done)
    assert sums["logp_abs_diff"] / sums["tokens"] < 1e-5
    assert sums["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert sums["low"] == sums["high"] == 0
