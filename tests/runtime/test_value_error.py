"""Value errors against a policy whose values are known."""

import numpy as np
import pytest
from helpers import Tiny, random_trajectory

from sao_jax.data.trajectory import TrajectoryBuilder
from sao_jax.rollout.agents import Agents
from sao_jax.rollout.engine import Piece
from sao_jax.runtime.value_error import Prefix, cut_before_action, prefixes, runner, value_errors


class Coin:
    """Writes `a;` or `b;` by a fair coin of the rollout; the reward of Tiny is that of its first action's `a`."""

    version, slots = 0, 4

    def __init__(self, family):
        self.family, self.rows = family, {}
        self.rng = np.random.default_rng(0)

    @property
    def free(self):
        return self.slots - len(self.rows)

    def submit(self, request):
        self.rows[request.rollout] = True

    def extend(self, rollout, tokens, max_new):
        self.rows[rollout] = True

    def release(self, rollout):
        del self.rows[rollout]

    def dispatch(self):
        return any(self.rows.values())

    def collect(self):
        pieces = []
        for rollout in [r for r, live in self.rows.items() if live]:
            ids = np.array(self.family.tokenizer.encode(self.rng.choice(["a;", "b;"])))
            pieces.append(Piece(rollout, ids, np.full(2, -0.7), np.zeros(2, int), "stop"))
            self.rows[rollout] = False
        return pieces


@pytest.fixture
def play():
    family = Tiny(turns=2)
    agents = Agents(Coin(family), family, context=10)
    return agents, runner(agents, seed=0)


def test_a_cut_keeps_what_was_read_before_the_action():
    t = random_trajectory(np.random.default_rng(0), actions=(2, 3, 1), observation=2)
    for action, length in ((1, 2 + 2 + 2), (2, 2 + 2 + 2 + 3 + 2)):
        cut = cut_before_action(t, action)
        np.testing.assert_array_equal(cut.tokens, t.tokens[:length])
        np.testing.assert_array_equal(cut.action_mask, t.action_mask[:length])
        np.testing.assert_array_equal(cut.rollout_logp[cut.action_mask], t.rollout_logp[:length][cut.action_mask])
        assert TrajectoryBuilder.resume(cut).length == length


def test_errors_are_those_of_estimates_that_are_known(play):
    agents, run = play
    prompts, inside = prefixes(agents, 6, seed=0, run=run)
    assert all(p.snapshot is None for p in prompts)
    # After the first action the reward is decided: 1 if it holds an `a`.
    decided = [float("a" in agents.family.tokenizer.decode(p.tokens).split("?")[1]) for p in inside]
    assert 0 < sum(decided) < 6

    def knows(chosen: list[Prefix]):
        return np.array([0.5 if p.snapshot is None else decided[inside.index(p)] for p in chosen])

    def half(chosen):
        return np.full(len(chosen), 0.5)

    errors = value_errors(
        run, {"prompts": prompts, "inside": inside}, {"knows": knows, "half": half}, continuations=64, reward_range=1.0
    )
    assert errors["inside"]["knows"] == 0.0
    assert errors["inside"]["half"] == 50.0
    assert errors["inside"]["noise floor"] == 0.0
    assert errors["prompts"]["noise floor"] == pytest.approx(100 * 0.7979 * 0.5 / 8, rel=0.1)
    assert errors["prompts"]["knows"] < 3 * errors["prompts"]["noise floor"]
    # The mean of 8 fair coins is off by .137 on average, and inside an attempt by about a half.
    assert 4 < errors["prompts"]["group mean"] < 30
    assert errors["inside"]["group mean"] > 30
