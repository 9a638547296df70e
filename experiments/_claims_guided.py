"""What the critic is worth while attempts are made: choosing actions, and deciding how long to go on."""

import pathlib
import statistics
from typing import Any

from experiments._ablations import BASE, SAO
from experiments._claim import Claim, Measured, Request, must
from experiments.ablate import finish_run, warm_flags, warm_folder
from sao_jax.report.intervals import mean_interval

TASK = "calculator:level=3"  # expressions of two, three or five calls
SIZES: dict[bool, dict[str, Any]] = {
    True: dict(preheat_rollouts=256, rollouts=64),
    False: dict(preheat_rollouts=2048, critic_lr=1e-3, rollouts=512),
}


def _trained(asked: Request, seed: int) -> pathlib.Path:
    """A run of SAO whose critic has seen much of the starting policy; both claims use it."""
    start = warm_folder(asked.results, TASK, seed, asked.quick)
    must(finish_run(start, warm_flags(TASK, seed, asked.quick), asked.check))
    folder = asked.results / ("guided-quick" if asked.quick else "guided") / f"s{seed}"
    must(finish_run(folder, run_flags(seed, asked.quick) | dict(init_from=str(start.resolve())), asked.check))
    return folder


def run_flags(seed: int, quick: bool) -> dict[str, Any]:
    """Flags of experiments.train for the run of a seed, wherever it begins."""
    flags = BASE | SAO | SIZES[quick] | dict(task=TASK, seed=seed, eval_every=0, eval_tasks=64)
    return {name: value for name, value in flags.items() if name not in ("env_seconds", "env_sigma")}


def _guides(asked: Request):
    """(seed, the run's sampler and critic) of every seed."""
    from sao_jax.runtime.guidance import restored_guide
    from sao_jax.runtime.run import read_config

    for seed in range(asked.seeds or (1 if asked.quick else 2)):
        folder = _trained(asked, seed)
        guide, _ = restored_guide(read_config(folder), folder)
        guide.check = asked.check
        yield seed, guide


def _measured(asked: Request, ours: list[float], plain: list[float], seeds: list[int], count: int, notes) -> Measured:
    """Success in %, paired by seed, and notes averaged over seeds."""
    effect = mean_interval([a - b for a, b in zip(ours, plain, strict=True)])
    means = {name: round(statistics.fmean(values), 3) for name, values in notes.items()}
    sizes = {"held_out": count, "task": TASK} | SIZES[asked.quick]
    return Measured(effect, statistics.fmean(ours), statistics.fmean(plain), seeds, sizes, means)


def value_guided(asked: Request) -> Measured:
    """Held-out success, in points, of the best of four actions by the critic's value after the environment's answer,
    against whole attempts of as many tokens in all, of which the critic picks one; both use critic and tokens alike."""
    from sao_jax.rollout.guided import Search
    from sao_jax.runtime.guidance import guided_evaluation

    searches = {
        "best of 4": Search(4, after="observation"),
        "best of 4, after the action": Search(4),
        "beam 2 of 8": Search(4, beam=2, after="observation"),
        "best of 4 pairs of actions": Search(4, granularity=2, after="observation"),
    }
    count = 64 if asked.quick else 512
    found: dict[str, list[float]] = {}
    seeds, ours, plain = [], [], []
    for seed, guide in _guides(asked):
        seeds.append(seed)
        for name, search in searches.items():
            figures = guided_evaluation(guide, count, search).figures
            if name == "best of 4":
                ours.append(100 * figures["success"])
                plain.append(100 * figures["plain_ranked"])
            for what, number in {
                "success, %": 100 * figures["success"],
                "plain attempts, %": 100 * figures["plain"]["success"],
                "plain attempts ranked by the critic, %": 100 * figures["plain_ranked"],
                "any of the plain attempts, %": 100 * figures["plain_any"],
                "tokens over plain tokens": figures["sampled_tokens"] / figures["plain"]["sampled_tokens"],
                "solved per 1k tokens": figures["solved_per_1k_tokens"],
                "plain solved per 1k tokens": figures["plain"]["solved_per_1k_tokens"],
            }.items():
                found.setdefault(f"{name}: {what}", []).append(number)
    return _measured(asked, ours, plain, seeds, count, found)


def dynamic_length(asked: Request) -> Measured:
    """Held-out success, in points, of attempts that the critic cuts, with the tokens saved given to restarts, against
    one whole attempt each; as many tokens in all. In one variant both have a limit, which the dynamic one lowers where
    the critic finds a task easy."""
    from sao_jax.rollout.budget import DynamicBudget, FixedBudget
    from sao_jax.runtime.guidance import budget_evaluation

    count = 64 if asked.quick else 512
    budgets = {
        "": DynamicBudget(),
        "patience 2: ": DynamicBudget(patience=2),
        "drop 0.7: ": DynamicBudget(drop=0.7),
        "6 actions, 3 of the easiest: ": DynamicBudget(steps=6, ease=0.5),
    }
    found: dict[str, list[float]] = {}
    seeds, ours, plain = [], [], []
    for seed, guide in _guides(asked):
        seeds.append(seed)
        for name, budget in budgets.items():
            figures = budget_evaluation(guide, count, budget, FixedBudget(steps=budget.steps)).figures
            if name == "":
                ours.append(100 * figures["success"])
                plain.append(100 * figures["fixed"]["success"])
            for what, number in {
                "success, %": 100 * figures["success"],
                "fixed, %": 100 * figures["fixed"]["success"],
                "tokens over fixed tokens": figures["sampled_tokens"] / figures["fixed"]["sampled_tokens"],
                "cut, % of attempts": 100 * figures["cut"] / (count + figures["restarts"]),
                "restarts": figures["restarts"],
                "without an answer, %": 100 * figures["unanswered"] / count,
            }.items():
                found.setdefault(name + what, []).append(number)
    return _measured(asked, ours, plain, seeds, count, found)


CLAIMS = {
    "value-guided": Claim("the critic picks each action by what follows it, at equal sampled tokens", None, None, None,
                          "points", value_guided, "%"),
    "dynamic-length": Claim("the critic decides how long to go on, at equal sampled tokens", None, None, None, "points",
                            dynamic_length, "%"),
}  # fmt: skip
