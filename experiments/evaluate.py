"""Held-out success of a run's newest weights, with a 95 % interval; the last line is JSON.

python -m experiments.evaluate runs/NAME
python -m experiments.evaluate runs/NAME --greedy --n 2048 --show 3
python -m experiments.evaluate runs/NAME --guided best --candidates 4              # the critic picks every action
python -m experiments.evaluate runs/NAME --guided beam --candidates 4 --beam 2
python -m experiments.evaluate runs/NAME --budget dynamic                          # the critic cuts attempts short
"""

import dataclasses
import json
import math
import pathlib
import sys
from typing import Literal

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tyro

from experiments import _cli


@dataclasses.dataclass(frozen=True)
class Flags:
    run: tyro.conf.Positional[str]
    """Folder of the run."""
    n: int = 512
    """Held-out instances, the first n of the task's test split."""
    greedy: bool = False
    """Take the likeliest token instead of sampling at the run's temperature."""
    show: int = 0
    """Print this many of the attempts."""
    slots: int | None = None
    """Rows of the sampler (default: as in training)."""
    devices: int | None = None
    """Devices to use (default: as in training)."""
    guided: Literal["best", "beam"] | None = None
    """The critic ranks candidate actions, and the best go on; compared with plain sampling at equal sampled tokens."""
    candidates: int | None = None
    """With --guided: candidates after each prefix (default 4)."""
    beam: int | None = None
    """With --guided beam: prefixes that are kept (default 2)."""
    granularity: int | None = None
    """With --guided: actions of a candidate (default 1)."""
    value_after: Literal["action", "observation"] | None = None
    """With --guided: value a candidate after its last action (default), or after what its environment answers."""
    budget: Literal["fixed", "dynamic"] | None = None
    """Length of attempts: the same for all, or by the critic, with the tokens saved given to restarts; the latter is
    compared with the former at equal sampled tokens."""
    budget_steps: int | None = None
    """With --budget: actions of an attempt (default: the task's limit)."""
    budget_tokens: int | None = None
    """With --budget: sampled tokens of an attempt (default: the task's limit)."""
    ease: float | None = None
    """With --budget dynamic: a task of value v is allowed the share 1 - ease * v of these two (default 0.25)."""
    drop: float | None = None
    """With --budget dynamic: cut an attempt whose value is under this share of its prompt's (default 0.5) ..."""
    floor: float | None = None
    """... or under this value (default 0.05) ..."""
    patience: int | None = None
    """... after this many actions in a row (default 1)."""
    max_restarts: int | None = None
    """With --budget dynamic: restarts of one task (default 2)."""


GUIDED = ("candidates", "beam", "granularity", "value_after")
DYNAMIC = ("ease", "drop", "floor", "patience", "max_restarts")
LIMITS = ("budget_steps", "budget_tokens")


def check(flags: Flags) -> None:
    """Raises ValueError for what cannot be, or would have no effect."""
    lows = dict(n=1, show=0, slots=1, devices=1, candidates=2, granularity=1, budget_steps=1, budget_tokens=1)
    for name, low in lows.items():
        value = getattr(flags, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {low}")
    for names, needed, there in (
        (GUIDED, "--guided", flags.guided),
        (("beam",), "--guided beam", flags.guided != "best"),
        (LIMITS, "--budget", flags.budget),
        (DYNAMIC, "--budget dynamic", flags.budget == "dynamic"),
    ):
        for name in names:
            if getattr(flags, name) is not None and not there:
                raise ValueError(f"--{name.replace('_', '-')} has no effect here; it needs {needed}")
    if flags.guided and flags.budget:
        raise ValueError("--guided and --budget exclude each other")
    if flags.greedy and (flags.guided or flags.budget):
        raise ValueError(f"--greedy and --{'guided' if flags.guided else 'budget'} exclude each other: they sample")


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    search, budgets = chosen(flags)
    from sao_jax.runtime.devices import prepare_backend
    from sao_jax.runtime.run import read_config

    folder = pathlib.Path(flags.run)
    config = read_config(folder)
    config = dataclasses.replace(config, slots=flags.slots or config.slots, devices=flags.devices or config.devices)
    prepare_backend(config.devices)
    if search or budgets:
        led_by_critic(flags, config, folder, search, budgets, stop)
        return

    from sao_jax.report.intervals import wilson
    from sao_jax.report.progress import Display
    from sao_jax.report.recall import recall_by_distance
    from sao_jax.runtime.evaluation import evaluate
    from sao_jax.runtime.run import restored_agents

    agents, version = restored_agents(config, folder)
    with Display() as display:
        display.stage("evaluation", flags.n, "instances")
        temperature = 0.0 if flags.greedy else config.temperature
        result = evaluate(
            agents,
            flags.n,
            temperature=temperature,
            seed=config.seed,
            max_attempts=config.max_attempts,
            check=stop.check,
            report=display.advance,
        )
    for t in result.trajectories[: flags.show]:
        print(f"reward {t.total_reward:g}  {agents.family.tokenizer.decode(t.tokens)}")
    low, high = wilson(result.successes, flags.n)
    figures = {"success": result.successes / flags.n, "low": low, "high": high, "n": flags.n}
    if recall := recall_by_distance(t.reward_parts for t in result.trajectories):
        figures["recall"] = {distance: row["share"] for distance, row in recall.items()}
    print(json.dumps(figures | {"version": version, "greedy": flags.greedy, "failed": result.failed}))


def chosen(flags: Flags):
    """(search, (budget, its fixed twin)), None where not asked for. Raises ValueError for flags that cannot be."""
    check(flags)
    from sao_jax.rollout.budget import DynamicBudget, FixedBudget
    from sao_jax.rollout.guided import Search

    given = {name: getattr(flags, name) for name in (*GUIDED, *DYNAMIC) if getattr(flags, name) is not None}
    search = budgets = None
    if flags.guided:
        own = {"candidates": 4} | ({"beam": 2} if flags.guided == "beam" else {}) | given
        own["after"] = own.pop("value_after", "action")
        if own.get("beam", 2) < 2:
            raise ValueError(f"--beam is {own['beam']}; it must be at least 2 (a beam of width 1 is --guided best)")
        search = Search(**own)
    if flags.budget:
        limits = {name: getattr(flags, f"budget_{name}") or math.inf for name in ("steps", "tokens")}
        fixed = FixedBudget(**limits)
        budgets = (DynamicBudget(**limits, **given) if flags.budget == "dynamic" else fixed), fixed
    return search, budgets


def led_by_critic(flags: Flags, config, folder: pathlib.Path, search, budgets, stop) -> None:
    from sao_jax.report.progress import Display
    from sao_jax.runtime.guidance import budget_evaluation, guided_evaluation, restored_guide

    guide, version = restored_guide(config, folder)
    with Display() as display:
        guide.check, guide.report = stop.check, display.advance
        guide.stage = lambda name, total: display.stage(name, total, "instances")
        result = guided_evaluation(guide, flags.n, search) if search else budget_evaluation(guide, flags.n, *budgets)
    for t in result.trajectories[: flags.show]:
        print(f"reward {t.total_reward:g}  {guide.family.tokenizer.decode(t.tokens)}")
    print(json.dumps(result.figures | {"version": version}))


if __name__ == "__main__":
    _cli.main(main)
