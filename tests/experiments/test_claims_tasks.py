"""The claims about long tasks, without their runs."""

from types import SimpleNamespace

from experiments._claims_tasks import longest_proof
from sao_jax.envs.proof import measured
from sao_jax.envs.registry import make_family


def test_a_proof_is_as_long_as_its_theorem_whatever_the_attempt_took():
    tasks = ("proof:level=1", "proof:level=2")
    first, second = (make_family(task).instance("test", 3).problem for task in tasks)

    def attempt(index, reward, steps):
        return SimpleNamespace(task=f"proof/test/{index}", total_reward=reward, num_steps=steps)

    tried = {
        tasks[0]: SimpleNamespace(trajectories=[attempt(3, 1.0, 900)]),
        tasks[1]: SimpleNamespace(trajectories=[attempt(3, 0.0, 20)]),
    }
    assert longest_proof(tried) == measured("rewrite", first)[1] < measured("rewrite", second)[1]
    tried[tasks[1]].trajectories.append(attempt(3, 1.0, 12))
    assert longest_proof(tried) == measured("rewrite", second)[1]
    assert longest_proof({}) == 0
