"""The runs of a comparison of methods over paired seeds, as curves and figures.

A cell is one run. Its curve is held-out success over the rollouts it has cost (preheating and dropped ones included)
and over its clock (compute and simulated environments; evaluations not). Intervals are Student's t over seeds, and
effects are paired by seed.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.report.intervals import mean_interval, ratio_interval
from sao_jax.report.run_folder import finite, of_stage, read_json, read_run, series, values

NEAR = 0.95  # of the reference's final mean: the level that steps are counted to
COLLAPSE = 0.5  # final success under this share of the run's best
KL_TARGET = 0.05
LATEST = 10  # updates that the health figures are averaged over
HEALTH = {
    "ess": ("rollout_corr/ess",),
    "masked": ("actor/mask_low_frac", "actor/mask_high_frac"),
    "explained_var": ("critic/explained_var",),
    "kl": ("rollout_corr/kl",),
    "staleness": ("async/staleness_mean",),
}
# Over all updates of a run: share of the step that the KL bound left, share of updates that ended within the bound
# (before the step, where that is all that was measured), seconds to publication.
MORE = ("step_taken", "kl_within", "latency")

# Shares of tokens by side of the band and sign of their advantage: what a rule does to them depends on both.
OUTSIDE = {
    f"{side}_{sign}": f"actor/mask_{key}_frac_{sign}"
    for side, key in (("above", "high"), ("below", "low"))
    for sign in ("pos", "neg")
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a comparison. `rollouts`, `clock`, `success`: its held-out curve, of which `measured` points are
    evaluations; `health`: means over the last updates, of a run that collapsed over the last ones up to its fall;
    `outside`: means over all updates up to it."""

    method: str
    point: Mapping[str, Any]
    seed: int
    error: str = ""
    rollouts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    clock: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    success: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    n: int = 0
    measured: int = 0
    outside: Mapping[str, float] = dataclasses.field(default_factory=dict)
    training: float = math.nan
    wall_s: float = math.nan
    health: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join([self.method, *(f"{k} {v:g}" for k, v in self.point.items())])

    @property
    def final(self) -> float:
        return float(self.success[-1]) if len(self.success) else math.nan

    @property
    def has_curve(self) -> bool:
        """Whether more was measured than a start and an end."""
        return self.measured > 2

    @property
    def area(self) -> float:
        """Mean height of the curve over the rollouts."""
        if len(self.success) < 2:
            return math.nan
        return float(np.trapezoid(self.success, self.rollouts) / (self.rollouts[-1] - self.rollouts[0]))

    @property
    def fell_at(self) -> int | None:
        """Index of the evaluation at which the run had collapsed for good; None if it did not."""
        if not self.has_curve or self.final >= COLLAPSE * self.success.max():
            return None
        low = self.success < COLLAPSE * self.success.max()
        return int(np.argmax([low[i:].all() for i in range(len(low))]))

    def at(self, clock: float) -> float:
        """Held-out success at a time of the clock, between evaluations by a straight line."""
        return float(np.interp(clock, self.clock, self.success)) if len(self.success) else math.nan

    def reaches(self, level: float, axis: str = "rollouts") -> float | None:
        """Where on `axis` the curve crosses `level` and two evaluations in a row (or the last one) are at or above it;
        None: not in this run. Methods are evaluated at different spacings, so the place between two is interpolated."""
        x, y, above = getattr(self, axis), self.success, self.success >= level
        for i in range(len(above)):
            if above[i : i + 2].all():
                return float(x[i] if i == 0 else x[i - 1] + (level - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1]))
        return None


def read_cell(folder: Path, method: str, point: Mapping[str, Any], seed: int, error: str = "") -> Cell:
    """Reads a run folder; one that never started is a cell with an error and no curve."""
    if not (folder / "metrics.jsonl").exists():
        return Cell(method, point, seed, error or "not run")
    run = read_run(folder)
    sampled = [line for line in of_stage(run.metrics, "eval") if not line.get("eval/greedy")]
    # A run that was stopped and resumed may evaluate the same weights again: the first time counts.
    held_out = list({line.get("version", line["step"]): line for line in reversed(sampled)}.values())[::-1]
    x, y = series(held_out, "eval/success", "sampled")
    _, clock = series(held_out, "clock_s", "sampled")
    updates, measured = of_stage(run.metrics, "rl"), len(x)
    x, clock, y = _with_level(run, x, clock, y)
    clock = _without_stragglers(clock, values(updates, "clock_s"), start=clock[1] if len(x) > measured else 0.0)
    cell = Cell(method, point, seed, error, x, clock, y, int(held_out[-1]["eval/n"]) if held_out else 0, measured)
    if not error and not (folder / "evaluation.json").exists():
        cell = dataclasses.replace(cell, error="not finished")
    fell = cell.fell_at
    seen = [u for u in updates if fell is None or (finite(u.get("clock_s")) or 0.0) < clock[fell]]
    health = {}
    for name, keys in HEALTH.items():
        parts = [values(seen[-LATEST:], key) for key in keys]
        health[name] = float(sum(p.mean() for p in parts)) if all(len(p) for p in parts) else math.nan
    outside = {name: mean_of_known(values(seen, key).tolist()) for name, key in OUTSIDE.items()}
    health["step_taken"] = mean_of_known(values(updates, "actor/smooth_fraction").tolist())
    health["kl_within"] = float(np.mean([_kl(u) <= KL_TARGET for u in updates])) if updates else math.nan
    latency = values(updates, "async/publish_latency_s")
    for name, percent in (("latency", 50), ("latency_p99", 99)):
        health[name] = float(np.percentile(latency, percent)) if len(latency) else math.nan
    training = values(updates[-LATEST:], "reward/success_finished")
    seconds = finite(read_json(folder / "evaluation.json", {}).get("seconds"))
    return dataclasses.replace(
        cell,
        training=float(training.mean()) if len(training) else math.nan,
        wall_s=math.nan if seconds is None else seconds,
        health=health,
        outside=outside,
    )


def mean_of_known(x: Sequence[float]) -> float:
    """Of the numbers among them; NaN if there are none."""
    known = [v for v in x if not math.isnan(v)]
    return math.fsum(known) / len(known) if known else math.nan


def _with_level(run, x: np.ndarray, clock: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A point more where the critic alone is fitted first: until the first update the policy is the one it was."""
    alone = of_stage(run.metrics, "critic_only")
    paid = (run.config.get("preheat_rollouts") or 0) + (alone[-1]["rollouts"] if alone else 0)
    before = [line for stage in ("preheat", "critic_only") for line in of_stage(run.metrics, stage)]
    begun = values(before[-1:], "clock_s")
    begun = begun if len(begun) else values(of_stage(run.metrics, "rl")[:1], "clock_s")
    if not (paid and len(begun) and len(x) and x[0] == 0):
        return x, clock, y
    return np.insert(x, 1, paid), np.insert(clock, 1, begun[0]), np.insert(y, 1, y[0])


def _without_stragglers(clock: np.ndarray, updates: np.ndarray, *, start: float) -> np.ndarray:
    """Puts the end of a run where its pace over the first seven eighths of its updates would have brought it.

    A run of a fixed budget ends by waiting for its last slow environments with nothing else to do. How long that takes
    is the budget's doing and not the method's: a run that goes on fills the wait with other attempts.
    """
    n = len(updates)
    k = n * 7 // 8
    if k < 1 or len(clock) < 2:
        return clock
    end = start + (updates[k - 1] - start) * n / k
    return np.append(clock[:-1], min(max(end, clock[-2]), clock[-1]))


def _kl(line: Mapping) -> float:
    """KL(rollout || policy) after an update where it was measured, else before it; infinite where it is no number."""
    kl = finite(line["actor/kl_after"] if "actor/kl_after" in line else line.get("rollout_corr/kl"))
    return math.inf if kl is None else kl


# --- effects ----------------------------------------------------------------------------------------------------------


def rows(cells: Sequence[Cell], reference: str) -> list[dict[str, Any]]:
    """One row per label: means over seeds with their intervals, and the effect against the reference.

    The reference of a grid point is the reference method at that point.
    """
    by_label: dict[str, list[Cell]] = {}
    cells = [c for c in cells if len(c.success) and not c.error]  # half a run is no result
    for c in cells:
        by_label.setdefault(c.label, []).append(c)
    found = []
    for label, group in by_label.items():
        point = [other for other in by_label.values() if other[0].point == group[0].point]
        equal_clock = min(float(np.median([c.clock[-1] for c in other])) for other in point)
        against = {c.seed: c for c in cells if c.method == reference and c.point == group[0].point}
        pairs = [(c, against[c.seed]) for c in group if c.seed in against]
        level = NEAR * float(np.mean([c.final for c in against.values()])) if against else math.nan
        reached = [c.reaches(level) for c in group]
        # Where the reference itself ends no higher than runs begin, there is no way to go.
        begun = bool(np.mean([c.success[0] for c in group]) < level)
        fell = [float(c.rollouts[c.fell_at]) for c in group if c.fell_at is not None]
        row = {
            "method": label,
            "seeds": len(group),
            "final": mean_interval([c.final for c in group]),
            "area": mean_interval([c.area for c in group]),
            "level": level,
            # A run that never gets there counts as later than all that do: the median may be "not reached".
            "steps": float(np.median([math.inf if r is None else r for r in reached])) if begun else math.nan,
            "reached": sum(r is not None for r in reached),
            "collapsed": len(fell),
            "fell": float(np.median(fell)) if fell else math.nan,
            "at_clock": mean_interval([c.at(equal_clock) for c in group]),
            "equal_clock": equal_clock,
            "clock": mean_interval([c.clock[-1] for c in group]),
            "training": mean_interval([c.training for c in group]),
            "health": {k: mean_of_known([c.health[k] for c in group]) for k in HEALTH},
            "outside": {k: mean_of_known([c.outside.get(k, math.nan) for c in group]) for k in OUTSIDE},
        }  # fmt: skip
        if pairs and group[0].method != reference:
            row["effect"] = mean_interval([c.final - r.final for c, r in pairs])
            row["effect_at_clock"] = mean_interval([c.at(equal_clock) - r.at(equal_clock) for c, r in pairs])
            row["clock_ratio"] = ratio_interval([c.clock[-1] / r.clock[-1] for c, r in pairs])
        found.append(row)
    return found


# --- files ------------------------------------------------------------------------------------------------------------


def runs_csv(cells: Sequence[Cell]) -> str:
    """One line per run."""
    points = sorted({k for c in cells for k in c.point})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = (
        "final",
        "n",
        "area",
        "training",
        "rollouts",
        "clock_s",
        "wall_s",
        "collapsed_at",
        *MORE,
        *HEALTH,
        *OUTSIDE,
        "error",
    )
    writer.writerow(["method", *points, "seed", *names])
    for c in cells:
        fell = c.fell_at
        ends = [c.rollouts[-1], c.clock[-1]] if len(c.success) else [math.nan, math.nan]
        figures = [c.final, c.n, c.area, c.training, *ends, c.wall_s, "" if fell is None else c.rollouts[fell]]
        figures += [c.health.get(k, math.nan) for k in (*MORE, *HEALTH)] + [c.outside.get(k, math.nan) for k in OUTSIDE]
        plain = [f"{x:.6g}" if isinstance(x, float) else x for x in figures]
        writer.writerow([c.method, *(c.point.get(p, "") for p in points), c.seed, *plain, c.error])
    return out.getvalue()


def has_more(path: Path, cells: Sequence[Cell]) -> bool:
    """Whether a `runs.csv` tells of finished runs that are not among `cells`."""
    if not path.exists():
        return False
    with path.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if not line["error"]]
    names = list(lines[0]) if lines else []
    points = names[1 : names.index("seed")] if lines else []
    there = {(c.method, *(str(c.point.get(k, "")) for k in points), str(c.seed)) for c in cells if not c.error}
    return any((x["method"], *(x[k] for k in points), x["seed"]) not in there for x in lines)


def curves_csv(cells: Sequence[Cell]) -> str:
    """One line per held-out evaluation, so that the curves can be drawn again without the run folders."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "point", "seed", "rollouts", "clock_s", "success", "n"])
    for c in cells:
        for x, clock, y in zip(c.rollouts, c.clock, c.success, strict=True):
            writer.writerow([c.method, json.dumps(c.point), c.seed, f"{x:.0f}", f"{clock:.3f}", f"{y:.6g}", c.n])
    return out.getvalue()


def read_curves(path: Path) -> list[Cell]:
    """The cells of a `curves.csv`, with their curves alone."""
    groups: dict[tuple, list[dict]] = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            groups.setdefault((line["method"], line["point"], line["seed"]), []).append(line)
    nothing = dict.fromkeys(HEALTH, math.nan)
    return [
        Cell(
            method,
            json.loads(point),
            int(seed),
            rollouts=np.array([float(x["rollouts"]) for x in lines]),
            clock=np.array([float(x["clock_s"]) for x in lines]),
            success=np.array([float(x["success"]) for x in lines]),
            n=int(lines[0]["n"]),
            measured=len(lines),
            health=nothing,
        )
        for (method, point, seed), lines in groups.items()
    ]
