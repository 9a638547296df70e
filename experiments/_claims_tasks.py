"""What the claims about long tasks measure: proofs by length, and dialogues with what was said long ago."""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from experiments._ablations import PRESETS
from experiments._claim import Claim, Measured, Request
from experiments.ablate import Flags as AblateFlags
from experiments.ablate import compare, plan
from sao_jax.envs.registry import make_family
from sao_jax.report.intervals import mean_interval, ratio_interval
from sao_jax.report.recall import recall_by_distance

# (task, held-out instances): lengths are tried from the shortest on, until one has no success.
PROOFS = [("proof:level=1", 128), ("proof:level=2", 128), ("proof:level=3", 64), ("proof:level=4", 64),
          ("proof:level=5", 32), ("proof:level=6", 16), ("proof:level=7", 8)]  # fmt: skip
DIALOGUES = [(f"dialogue:turns={turns}", 256) for turns in (8, 16, 32)]
METHODS = ("sao", "grpo")


def _runs(preset: str, asked: Request) -> dict[tuple[str, int], pathlib.Path]:
    """Folders of the runs of a preset by (method, seed), which are made where they are missing.

    They lie apart from those of experiments.ablate, which does not keep policies.
    """
    flags = AblateFlags(preset=preset, methods=",".join(METHODS), results=str(asked.results / "policies"),
                        quick=asked.quick, seeds=asked.seeds)  # fmt: skip
    made = plan(preset, flags)
    compare(made, asked.check, keep=True)
    return {(cell.method, cell.seed): made.folder(cell) for cell in made.todo}


def _tried(folder: pathlib.Path, task: str, count: int, check: Callable[[], None], **changes):
    """A run's newest policy on held-out instances of another form of its task: an `Evaluation`."""
    from sao_jax.runtime.evaluation import evaluate
    from sao_jax.runtime.run import on_task, read_config, restored_agents

    config = dataclasses.replace(on_task(read_config(folder), task), slots=min(count, 32), **changes)
    agents, _ = restored_agents(config, folder)
    return evaluate(agents, count, temperature=config.temperature, seed=config.seed, check=check)


def longest_proof(tried: Mapping[str, Any]) -> int:
    """Length of the longest theorem that was proved among held-out ones: the applications of axioms that its expert
    needs. Refused steps, detours and moves of the focus make no proof longer."""
    from sao_jax.envs.proof import measured

    longest = 0
    for task, found in tried.items():
        family = make_family(task)
        for t in found.trajectories:
            if t.total_reward >= 1.0:
                problem = family.instance("test", int(t.task.rsplit("/", 1)[1])).problem
                longest = max(longest, measured(family.kind, problem)[1])
    return longest


def proof_length(asked: Request) -> Measured:
    """The longest proof that the policy finds, SAO's over GRPO's, both trained on proofs of 4 to 16 steps."""
    longest: dict[str, list[float]] = {m: [] for m in METHODS}
    success: dict[str, list[float]] = {}
    seeds = []
    for (method, seed), folder in _runs("proof", asked).items():
        seeds.append(seed)
        found = {}
        for task, count in PROOFS[:2] if asked.quick else PROOFS:
            found[task] = _tried(folder, task, 16 if asked.quick else count, asked.check)
            rate = 100 * found[task].successes / len(found[task].rewards)
            success.setdefault(f"{method}, {task}: success, %", []).append(rate)
            if rate == 0:
                break
        longest[method].append(float(longest_proof(found)))
    # A seed on which one of the two proves nothing has no ratio.
    ratios = [a / b for a, b in zip(longest["sao"], longest["grpo"], strict=True) if a and b]
    if not ratios:
        raise ValueError("on no seed have both found a proof, so there is nothing to compare")
    count = len(longest["sao"])
    # A length that was not tried, since a shorter one had no success, counts as none.
    notes = {name: round(sum(rates) / count, 1) for name, rates in success.items()}
    notes |= {f"{m}: longest proof, steps": found for m, found in longest.items()}
    means = [statistics.fmean(longest[m]) for m in METHODS]
    sizes = {"trained_on": PRESETS["proof"].flags["task"], "rollouts": PRESETS["proof"].budget}
    return Measured(ratio_interval(ratios), *means, sorted(set(seeds)), sizes, notes, null=1.0)


def dialogue(asked: Request) -> Measured:
    """Satisfaction in the longest dialogues, SAO's over GRPO's in %; success and recall by distance are in the notes,
    with all that was said in view and with a context of 64 tokens."""
    notes: dict[str, list[float]] = {}
    satisfaction: dict[str, list[float]] = {m: [] for m in METHODS}
    seeds = []
    for (method, seed), folder in _runs("dialogue", asked).items():
        seeds.append(seed)
        for window in (None, 64):
            for task, count in DIALOGUES:
                found = _tried(folder, task, 16 if asked.quick else count, asked.check, context_window=window)
                what = f"{method}, {task}{', context of 64' if window else ''}: "
                notes.setdefault(what + "success, %", []).append(100 * found.successes / len(found.rewards))
                parts = [t.reward_parts for t in found.trajectories]
                for distance, row in recall_by_distance(parts).items():
                    notes.setdefault(f"{what}recalled up to {distance} exchanges later, %", []).append(
                        100 * row["share"]
                    )
                if window is None and task == DIALOGUES[-1][0]:
                    satisfaction[method].append(100 * statistics.fmean(found.rewards))
    gains = [100 * (a / b - 1) if b else 0.0 for a, b in zip(satisfaction["sao"], satisfaction["grpo"], strict=True)]
    means = [statistics.fmean(satisfaction[m]) for m in METHODS]
    sizes = {"trained_on": PRESETS["dialogue"].flags["task"], "rollouts": PRESETS["dialogue"].budget}
    rounded = {name: round(statistics.fmean(values), 1) for name, values in notes.items()}
    return Measured(mean_interval(gains), *means, sorted(set(seeds)), sizes, rounded)


CLAIMS = {
    "proof-length": Claim(
        "longest proof found, every step checked", None, None, 3.0, "times as long", proof_length, "steps"
    ),
    "dialogue": Claim("satisfaction of the user of a long dialogue", None, None, 22.0, "% more", dialogue),
}
