"""How busy devices are and how many samples come, with single trajectories and with groups that are waited for."""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from experiments._ablations import GRPO, NO_CRITIC, SAO
from experiments._claim import Interval, Measured, Request, must
from experiments.ablate import finish_run, warm_flags, warm_folder
from sao_jax.report.intervals import mean_interval, ratio_interval
from sao_jax.runtime.ledger import Event, Ledger
from sao_jax.runtime.metrics import read_metrics

# The same engine and learner, and environments that sleep for times drawn from the same distribution. Neither of the
# sides that are compared has a critic, and no group is dropped, so that a sample costs both the same. More slots than a
# batch would be of no use to groups that are waited for.
OVERLAP = dict(
    task="calculator", batch_size=64, eval_every=0, eval_tasks=16, env_seconds=0.1, env_sleep=True,
    checkpoint_every=1_000_000, keep_checkpoints=1,
)  # fmt: skip
AHEAD = dict(concurrency="auto", slots=256, max_staleness=4)
SIDES = {
    "single": NO_CRITIC | dict(baseline="batch_mean", rollouts=2048) | AHEAD,
    "groups": GRPO | dict(max_staleness=0, drop_dead_groups=False, rollouts=512, slots=64),
    "sao": SAO | dict(preheat_rollouts=0, rollouts=1024) | AHEAD,
}
SIGMAS = (0.0, 0.65, 1.29)
SIGMA_REPORTED = 1.29


WINDOW = 4  # updates in a row over which a rate is taken


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Of one run: `figures` over all of its settled time, and `parts` of it: what they were from moment to moment."""

    figures: dict[str, float]
    parts: dict[str, list[float]]


def overlap(asked: Request) -> tuple[dict[tuple[str, float], list[Overlap]], list[int], dict]:
    """Runs by (side, sigma), one per seed, of asynchronous single trajectories and of synchronous groups."""
    seeds = list(range(asked.seeds or (1 if asked.quick else 3)))
    found: dict[tuple[str, float], list[Overlap]] = {}
    where = asked.results / ("overlap-quick" if asked.quick else "overlap")
    for seed in seeds:
        start = warm_folder(asked.results, OVERLAP["task"], seed, asked.quick)
        must(finish_run(start, warm_flags(OVERLAP["task"], seed, asked.quick), asked.check))
        for sigma in (SIGMA_REPORTED,) if asked.quick else SIGMAS:
            for side, flags in SIDES.items():
                folder = where / f"{side}_sigma={sigma}_s{seed}"
                flags = OVERLAP | flags | dict(env_sigma=sigma, seed=seed, init_from=str(start))
                flags |= dict(rollouts=512) if asked.quick else {}
                must(finish_run(folder, flags, asked.check))
                found.setdefault((side, sigma), []).append(read_overlap(folder))
    return found, seeds, {"batch": OVERLAP["batch_size"], "group": 8, "median_s": OVERLAP["env_seconds"]}


def read_overlap(folder: pathlib.Path) -> Overlap:
    """Share of the time that devices were busy, samples per second and time to publication, from the first update to
    the last that came before the last task was handed out: what follows is the wait for a run's last stragglers."""
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        events = list(ledger.events(kinds=("admit", "update", "concurrency")))
    end = max(e.position for e in events if e.kind == "admit")
    updates = [e for e in events if e.kind == "update" and e.position < end]
    if len(updates) < 2:
        raise ValueError(f"{folder} has {len(updates)} updates before its last task was handed out; 2 are needed")
    between = [
        e.payload for e in events
        if e.kind == "concurrency" and updates[0].position < e.position < updates[-1].position
    ]  # fmt: skip
    if not between:
        raise ValueError(f"{folder} has no reading of how busy devices were between its first and last update")
    versions = {e.payload["version"] for e in updates[1:]}
    lines = [u for u in read_metrics(folder / "metrics.jsonl") if u.get("stage") == "rl" and u["version"] in versions]
    figures = {
        "utilization": 100 * statistics.fmean(p["utilization"] for p in between),
        "by slots": 100 * statistics.fmean(p["utilization_slots"] for p in between),
        "samples/s": rate(updates),
    }
    width = min(WINDOW + 1, len(updates))
    parts = {
        "busy over 2 s [%]": [100 * p["utilization"] for p in between],
        f"samples/s over {WINDOW} updates": [rate(updates[i : i + width]) for i in range(len(updates) - width + 1)],
        "trajectory end to publication [s]": [
            u["async/publish_latency_s"] for u in lines if "async/publish_latency_s" in u
        ],
    }
    return Overlap(figures, parts)


def rate(updates: Sequence[Event]) -> float:
    """Samples per second from the first of some updates to the last."""
    return sum(e.payload["rollouts"] for e in updates[1:]) / max(updates[-1].time - updates[0].time, 1e-9)


def quantiles(runs: Sequence[Overlap]) -> dict[str, list[float]]:
    """[1 % quantile, median, 99 % quantile] of each of the `parts`, over all moments of all repetitions."""
    pooled = {name: [x for run in runs for x in run.parts[name]] for name in runs[0].parts}
    return {
        f"{name}: p1 / p50 / p99": [round(float(q), 2) for q in np.percentile(values, [1, 50, 99])]
        for name, values in pooled.items() if values
    }  # fmt: skip


def _sides(
    asked: Request, figure: str, effect: Callable[[list[float], list[float]], Interval], null: float
) -> Measured:
    found, seeds, sizes = overlap(asked)
    notes = {
        f"{side}, sigma {sigma:g}": {
            name: round(statistics.median(run.figures[name] for run in runs), 2) for name in runs[0].figures
        } | quantiles(runs)
        for (side, sigma), runs in found.items()
    }  # fmt: skip
    ours, theirs = ([run.figures[figure] for run in found[side, SIGMA_REPORTED]] for side in ("single", "groups"))
    return Measured(
        effect(ours, theirs),
        statistics.median(ours), statistics.median(theirs), seeds, sizes | {"sigma": SIGMA_REPORTED}, notes, null,
    )  # fmt: skip


def utilization(asked: Request) -> Measured:
    """Points by which devices are busier with single trajectories than with synchronous groups of 8."""
    return _sides(asked, "utilization", lambda a, b: mean_interval([x - y for x, y in zip(a, b, strict=True)]), 0.0)


def throughput(asked: Request) -> Measured:
    """Samples per second with single trajectories over those with synchronous groups of 8."""
    return _sides(asked, "samples/s", lambda a, b: ratio_interval([x / y for x, y in zip(a, b, strict=True)]), 1.0)
