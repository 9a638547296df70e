"""What the README shows is run, so that it stays true."""

import pathlib
import random
import re

import pytest

from sao_jax.envs.base import demonstration
from sao_jax.envs.registry import make_family

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The task of the README, from a file as a user would write it."""
    code = re.search(r"```python\n(\"\"\"Guess.*?)```", README.read_text(), re.DOTALL).group(1)
    path = tmp_path_factory.mktemp("task") / "guess.py"
    path.write_text(code)
    assert len(code.splitlines()) <= 36
    return make_family(f"{path}:Guess")


def test_the_example_task_answers_and_ends(task):
    environment, instance = task.environment(), task.instance("train", 0)
    hidden = instance.problem["hidden"]
    assert environment.reset(instance).endswith("?")
    assert environment.step("99;").observation == "<"
    assert environment.step(f"{hidden};").reward == 1.0


def test_the_example_task_fits_its_budget_whatever_is_guessed(task):
    for index in range(50):
        turns = demonstration(task, "train", index, random.Random(index))
        assert sum(len(task.tokenizer.encode(text)) for text, _ in turns) <= task.max_tokens


def test_every_flag_the_readme_names_exists():
    from experiments import ablate, bench, claims, compress, evaluate, recall, soak, status, train

    commands = re.findall(r"`(--[a-z-]+)", README.read_text()) + re.findall(r" (--[a-z][a-z-]+)", README.read_text())
    mains = (train, evaluate, bench, ablate, claims, recall, status, soak, compress)
    known = {"help"}.union(*(main.Flags.__dataclass_fields__ for main in mains))
    assert {c.lstrip("-").replace("-", "_") for c in commands} <= known
