"""Evaluations on a sampler that is not the loop's own thread."""

from sao_jax.data.trajectory import TrajectoryBuilder
from sao_jax.runtime.evaluation import evaluate


class Processes:
    """Weights of version 1 arrive after a while; an attempt ends in the next turn."""

    last_schedule = None

    def __init__(self):
        self.version, self.turns, self.begun = 0, 0, []

    @property
    def free(self):
        return 2 - len(self.begun)

    def collect(self):
        self.turns += 1
        self.version = int(self.turns > 3)
        ended = []
        for rollout, version in self.begun:
            builder = TrajectoryBuilder([0], rollout=rollout, task="t")
            builder.add_action([1], [-0.5], [version])
            builder.add_reward(1.0)
            ended.append(builder.build("terminated", "answer"))
        self.begun = []
        return ended

    def start(self, split, index, *, rollout, **labels):
        self.begun.append((rollout, self.version))

    def dispatch(self):
        return False


def test_an_evaluation_waits_for_the_weights_it_is_of():
    result = evaluate(Processes(), 5, temperature=1.0, version=1)
    assert result.rewards == [1.0] * 5
    assert {int(t.version.max()) for t in result.trajectories} == {1}
