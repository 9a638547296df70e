"""Warm start and preheating by themselves."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from helpers import (
    LENGTH,
    MODEL,
    MODEL_FLAGS,
    Tiny,
    host,
    make_learner,
    policy_logp,
    quick_compile,  # noqa: F401
    random_rows,
)

from sao_jax.envs.base import TaskFamily, demonstration
from sao_jax.learner.objective import Choices
from sao_jax.learner.supervised import cosine
from sao_jax.models.decoder import init_params
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.preheat import HELD_OUT, fit_critic
from sao_jax.runtime.signals import Interrupted
from sao_jax.runtime.warm_start import demonstrations, warm_start

CONFIG = RunConfig(**MODEL_FLAGS, warm_start_steps=40, warm_start_batch=8, demonstrations=16, warm_start_lr=0.02)


def nothing(*_):
    pass


def warm(devices=2, check=nothing, report=nothing, **flags):
    policy = init_params(MODEL, jax.random.key(0))
    config = dataclasses.replace(CONFIG, **flags)
    return host(warm_start(config, MODEL, Tiny(), policy, LENGTH, data_mesh(devices), report=report, check=check))


# -- warm start --------------------------------------------------------------------------------------------------------


def test_demonstrations_mark_the_experts_tokens_as_actions():
    family = Tiny(turns=2)
    tokens, mask = demonstrations(family, 5, LENGTH, seed=3)
    assert tokens.shape == mask.shape == (5, LENGTH)
    for row in range(5):
        turns = demonstration(family, "train", row, random.Random(f"3/{row}"))
        text = "".join(part for part, _ in turns)
        assert family.tokenizer.decode(tokens[row]) == text
        expected = [action for part, action in turns for _ in part]
        assert mask[row].tolist() == expected + [False] * (LENGTH - len(text))
    with pytest.raises(ValueError, match="needs more than 4 tokens"):
        demonstrations(family, 1, 4, seed=3)


def test_warm_start_makes_demonstrations_likely_and_is_a_function_of_its_inputs():
    losses = []
    trained = warm(report=lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == [10, 20, 30, 40]
    assert losses[-1][1] < 0.8 * losses[0][1]
    tokens, mask = demonstrations(Tiny(), 16, LENGTH, CONFIG.seed)
    rows = [{"tokens": t, "temperature": np.float32(1)} for t in tokens]
    before, after = (_mean_logp(params, rows, mask) for params in (init_params(MODEL, jax.random.key(0)), trained))
    assert after > before + 0.5
    jax.tree.map(np.testing.assert_array_equal, warm(), trained)


def _mean_logp(params, rows, mask):
    rows = [random_rows(0, 1)[0] | row for row in rows]
    return policy_logp(params, rows)[mask].mean()


def test_warm_start_is_the_same_on_any_number_of_devices():
    one, eight = warm(devices=1, warm_start_steps=3), warm(devices=8, warm_start_steps=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), one, eight)


def test_warm_start_can_be_interrupted_at_every_step():
    calls = []

    def check():
        calls.append(0)
        if len(calls) == 5:
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        warm(check=check)


def test_a_task_without_an_expert_says_what_to_do():
    class NoExpert(Tiny):
        expert = TaskFamily.expert

    arguments = CONFIG, MODEL, NoExpert(), init_params(MODEL, jax.random.key(0)), LENGTH, data_mesh(1)
    with pytest.raises(ValueError, match=r"has no scripted expert; use --warm-start-steps 0 or --init-from"):
        warm_start(*arguments, report=nothing, check=nothing)


def test_learning_rate_rises_then_falls_to_a_tenth():
    rates = np.array([float(cosine(step, 100, 1.0)) for step in range(101)])
    assert rates[0] == pytest.approx(0.05, rel=1e-2)
    assert np.argmax(rates) == 19
    assert np.all(np.diff(rates[20:]) < 0)
    assert rates[100] == pytest.approx(0.1)


# -- preheating --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    return make_learner(Choices(kl="off", critic_passes=1), critic_lr=0.02)


def preheat(learner, rows, epochs=6, **options):
    learner.load(jax.tree.map(lambda x: x + 0, learner.start), 0)
    reports = []
    options = dict(report=lambda *figures: reports.append(figures), check=nothing) | options
    return fit_critic(learner, [[row] for row in rows], epochs, 0, **options), reports


def learnable_rows(count):
    """The reward says whether the first token is even."""
    rows = random_rows(1, count, steps_per_segment=100)
    for row in rows:
        row["rewards"] = np.where(row["rewards"] != 0, float(row["tokens"][0] % 2 == 0), 0.0).astype(np.float32)
        row["truncated"] = np.bool_(False)
    return rows


def test_preheating_explains_held_out_returns_better(learner):
    history, reports = preheat(learner, learnable_rows(64), epochs=10)
    assert len(history) == len(reports) + 1
    assert max(history) > history[0] + 0.3
    assert [figures[0] for figures in reports] == list(range(1, len(history)))
    assert not learner.critic_only, "left as it was found"
    assert learner.version == 0
    jax.tree.map(np.testing.assert_array_equal, host(learner.state["policy"]), host(learner.start["policy"]))


def test_preheating_ends_when_nothing_is_gained(learner):
    rows = learnable_rows(64)
    rng = np.random.default_rng(0)
    for row in rows:
        row["rewards"] = np.where(row["rewards"] != 0, 0, row["rewards"])
        row["rewards"][np.flatnonzero(row["action_mask"])[-1]] = rng.normal()  # noise has nothing to learn
    history, _ = preheat(learner, rows, epochs=200)
    assert 2 <= len(history) - 1 < 200


def test_preheating_is_a_function_of_its_rows(learner):
    rows = learnable_rows(24)
    first, _ = preheat(learner, rows, epochs=2)
    state = host(learner.state)
    second, _ = preheat(learner, rows, epochs=2)
    assert first == second
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), state, host(learner.state))
    assert all(jax.tree.leaves(same))


def test_a_handful_of_rows_is_used_whole(learner):
    history, reports = preheat(learner, learnable_rows(HELD_OUT - 1), epochs=3)
    assert len(reports) == 3
    assert np.isnan(history).all()


def test_preheating_on_nothing_is_refused(learner):
    with pytest.raises(ValueError, match="no trajectory to preheat the critic on"):
        preheat(learner, [])


def test_held_out_rows_are_not_trained_on(learner):
    rows = learnable_rows(16)
    seen = []
    put = learner.put
    learner.put = lambda row: (seen.append(id(row)), put(row))
    try:
        preheat(learner, rows, epochs=2)
    finally:
        del learner.put
    held_out = {id(row) for row in rows[::HELD_OUT]}
    assert not held_out & set(seen)
    assert len(set(seen)) == 14


def test_preheating_can_be_interrupted(learner):
    def check():
        raise Interrupted(15)

    with pytest.raises(Interrupted):
        preheat(learner, learnable_rows(16), check=check)
    learner.critic_only = False
