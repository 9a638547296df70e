"""Tables and curves of a comparison of methods over paired seeds.

A cell is one run. Its curve is held-out success over the rollouts it has cost (preheating and dropped ones included)
and over its clock (compute and simulated environments; evaluations not). Intervals are Student's t over seeds, and
effects are paired by seed.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sao_jax.report.curves import INK, png
from sao_jax.report.intervals import mean_interval
from sao_jax.report.run_folder import finite, of_stage, read_json, read_run, series, values, write_whole

COLORS = ("#2563eb", "#ea7317", "#0f9d76", "#d1344b", "#7c4dcc", "#64748b", "#b45309", "#0891b2", "#be185d", "#4d7c0f")
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

# Shares of tokens by side of the band and sign of their advantage: what a rule does to them depends on both.
OUTSIDE = {
    f"{side}_{sign}": f"actor/mask_{key}_frac_{sign}"
    for side, key in (("above", "high"), ("below", "low"))
    for sign in ("pos", "neg")
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a comparison. `rollouts`, `clock`, `success`: its held-out curve, of which `measured` points are
    evaluations; `health`: means over the last updates, of a run that collapsed over the last ones before its fall;
    `outside`: means over all updates before it."""

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
    seen = [u for u in updates if fell is None or (finite(u.get("clock_s")) or 0.0) < clock[max(fell - 1, 0)]]
    health = {}
    for name, keys in HEALTH.items():
        parts = [values(seen[-LATEST:], key) for key in keys]
        health[name] = float(sum(p.mean() for p in parts)) if all(len(p) for p in parts) else math.nan
    outside = {name: _mean(values(seen, key).tolist()) for name, key in OUTSIDE.items()}
    health["kl_within"] = float(np.mean([_kl(u) <= KL_TARGET for u in updates])) if updates else math.nan
    latency = values(updates, "async/publish_latency_s")
    health["latency"] = float(np.median(latency)) if len(latency) else math.nan
    training = values(updates[-LATEST:], "reward/success_finished")
    seconds = finite(read_json(folder / "evaluation.json", {}).get("seconds"))
    return dataclasses.replace(
        cell,
        training=float(training.mean()) if len(training) else math.nan,
        wall_s=math.nan if seconds is None else seconds,
        health=health,
        outside=outside,
    )


def _share(x: float) -> str:
    return "-" if math.isnan(x) else f"{100 * x:.3f} %"


def _mean(x: Sequence[float]) -> float:
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
    """KL(rollout || policy) after an update where it was measured, else before it."""
    after = finite(line.get("actor/kl_after"))
    return after if after is not None else finite(line.get("rollout_corr/kl")) or 0.0


# --- tables -----------------------------------------------------------------------------------------------------------


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
        fell = [float(c.rollouts[c.fell_at]) for c in group if c.fell_at is not None]
        row = {
            "method": label,
            "seeds": len(group),
            "final": mean_interval([c.final for c in group]),
            "area": mean_interval([c.area for c in group]),
            "level": level,
            # A run that never gets there counts as later than all that do: the median may be "not reached".
            "steps": float(np.median([math.inf if r is None else r for r in reached])),
            "reached": sum(r is not None for r in reached),
            "collapsed": len(fell),
            "fell": float(np.median(fell)) if fell else math.nan,
            "at_clock": mean_interval([c.at(equal_clock) for c in group]),
            "equal_clock": equal_clock,
            "clock": mean_interval([c.clock[-1] for c in group]),
            "training": mean_interval([c.training for c in group]),
            "health": {k: _mean([c.health[k] for c in group]) for k in HEALTH},
            "outside": {k: _mean([c.outside.get(k, math.nan) for c in group]) for k in OUTSIDE},
        }  # fmt: skip
        if pairs and group[0].method != reference:
            row["effect"] = mean_interval([c.final - r.final for c, r in pairs])
            row["effect_at_clock"] = mean_interval([c.at(equal_clock) - r.at(equal_clock) for c, r in pairs])
            # On the logarithm: half as long and twice as long lie equally far from the same.
            logs = mean_interval([math.log(c.clock[-1] / r.clock[-1]) for c, r in pairs])
            row["clock_ratio"] = tuple(math.exp(x) for x in logs)
        found.append(row)
    return found


def summary(cells: Sequence[Cell], reference: str, budget: str = "both") -> str:
    """The comparison as Markdown."""
    table = rows(cells, reference)
    out = []
    has_curves = any(c.has_curve for c in cells)
    if has_curves and budget in ("rollouts", "both"):
        head = (
            "method", "seeds", "held-out success", "area under curve", f"rollouts to {NEAR:.0%} of {reference}'s",
            "collapsed", f"effect against {reference}",
        )  # fmt: skip
        body = [
            (
                r["method"], r["seeds"], percent(r["final"]), percent(r["area"]),
                f"{_count(r['steps'])} ({r['reached']}/{r['seeds']})", _fallen(r), points(r.get("effect")),
            )
            for r in table
        ]  # fmt: skip
        out += ["## At equal rollouts", "", _table(head, body), ""]
    if budget in ("wallclock", "both") and table:
        clocks = {round(r["equal_clock"]) for r in table}
        after = f"success after {clocks.pop()} s" if len(clocks) == 1 else "success at the quickest method's end"
        head = ("method", after, f"effect against {reference}", "clock of a run [s]", f"clock / {reference}'s")
        body = [
            (
                r["method"],
                percent(r["at_clock"]) if has_curves else "",
                points(r.get("effect_at_clock")) if has_curves else "",
                number(r["clock"], 0), number(r.get("clock_ratio"), 2),
            )
            for r in table
        ]  # fmt: skip
        out += ["## At equal wall clock", "", _table(head, body), ""]
    head = ("method", "effective sample size", "outside the band", "KL [nats/token]", "explained variance", "staleness",
            "success in training")  # fmt: skip
    body = [
        (
            r["method"], _short(r["health"]["ess"]), _short(r["health"]["masked"], "%"), _short(r["health"]["kl"]),
            _short(r["health"]["explained_var"]), _short(r["health"]["staleness"]), percent(r["training"]),
        )
        for r in table
    ]  # fmt: skip
    out += [
        f"## Health over the last {LATEST} updates (before the fall, where a run collapsed)",
        "",
        _table(head, body),
    ]
    if any(r["outside"]["above_neg"] > 0 for r in table):
        head = ("method", "above, advantage > 0", "above, < 0", "below, > 0", "below, < 0")
        body = [(r["method"], *(_share(r["outside"][k]) for k in OUTSIDE)) for r in table]
        out += ["", "## Tokens outside the band, by the sign of their advantage", "", _table(head, body)]
    if failed := [c for c in cells if c.error]:
        out += ["", "## Not finished", "", *(f"- {c.label}, seed {c.seed}: {c.error}" for c in failed)]
    out += [
        "",
        "Means over seeds with 95 % intervals (Student's t); effects are differences paired by seed. Collapsed: final "
        f"success under {COLLAPSE:.0%} of the run's best (at: median rollouts). In brackets behind rollouts: runs that "
        "reached the level within the budget. The clock of a run leaves out the wait for its last stragglers.",
    ]
    return "\n".join(out) + "\n"


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
        *HEALTH,
        *OUTSIDE,
        "error",
    )
    writer.writerow(["method", *points, "seed", *names])
    for c in cells:
        fell = c.fell_at
        ends = [c.rollouts[-1], c.clock[-1]] if len(c.success) else [math.nan, math.nan]
        figures = [c.final, c.n, c.area, c.training, *ends, c.wall_s, "" if fell is None else c.rollouts[fell]]
        figures += [c.health.get(k, math.nan) for k in HEALTH] + [c.outside.get(k, math.nan) for k in OUTSIDE]
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


def write(folder: Path, cells: Sequence[Cell], *, reference: str, budget: str = "both") -> list[Path]:
    """Writes runs.csv, curves.csv, summary.md and pictures; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        write_whole(folder / "runs.csv", runs_csv(cells).encode()),
        write_whole(folder / "curves.csv", curves_csv(cells).encode()),
        write_whole(folder / "summary.md", summary(cells, reference, budget).encode()),
    ]
    if all("env_sigma" in c.point for c in cells):
        paths.append(write_whole(folder / "clock.png", png(clock_ratios(cells, reference))))
    elif all(c.point for c in cells):
        paths.append(write_whole(folder / "sweep.png", png(sweep(cells))))
    elif any(c.has_curve for c in cells):
        paths.append(write_whole(folder / "curves.png", png(curves(cells))))
    return paths


# --- pictures ---------------------------------------------------------------------------------------------------------


def curves(cells: Sequence[Cell]) -> Figure:
    """Held-out success over rollouts and over the clock: means over seeds, with 95 % bands."""
    figure = Figure(figsize=(11, 4.2), layout="constrained", facecolor="white")
    cells = [c for c in cells if len(c.success) > 1 and not c.error]
    labels = list(dict.fromkeys(c.label for c in cells))
    for axes, axis, name in zip(
        figure.subplots(1, 2, sharey=True), ("rollouts", "clock"), ("rollouts, all that were paid for", "clock [s]"),
        strict=True,
    ):  # fmt: skip
        for label, color in zip(labels, _colors(len(labels)), strict=True):
            group = [c for c in cells if c.label == label]
            end = min(getattr(c, axis)[-1] for c in group)
            x = np.linspace(0, end, 60)
            y = np.array([np.interp(x, getattr(c, axis), c.success) for c in group])
            axes.plot(x, y.mean(0), color=color, lw=1.8, label=label)
            if len(group) > 1:
                spread = np.array([mean_interval(column) for column in y.T])
                axes.fill_between(x, spread[:, 1], spread[:, 2], color=color, alpha=0.14, lw=0)
        axes.set_xlabel(name, color=INK)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("held-out success", color=INK)
    if len(labels) <= 12:
        figure.axes[1].legend(frameon=False, fontsize=9, loc="lower right")
    else:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, loc="outside right")
    return figure


def sweep(cells: Sequence[Cell]) -> Figure:
    """Final success and health of each method over the first value of the grid, a column for each of the others."""
    cells = [c for c in cells if len(c.success) and not c.error]
    axis, *others = list(cells[0].point) if cells else ["-"]
    places = sorted({c.point[axis] for c in cells})
    columns = sorted({tuple(c.point[o] for o in others) for c in cells}) or [()]
    methods = list(dict.fromkeys(c.method for c in cells))
    held_out = any(c.has_curve for c in cells)
    figures: dict[str, Callable[[Cell], float]] = {
        "held-out success" if held_out else "success in training": lambda c: c.final if held_out else c.training,
        "effective sample size": lambda c: c.health["ess"],
        "tokens outside the band": lambda c: c.health["masked"],
        "explained variance": lambda c: c.health["explained_var"],
    }
    size = (1.5 + 3.6 * len(columns), 1 + 2.2 * len(figures))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(len(figures), len(columns), squeeze=False, sharex=True, sharey="row")
    for row, (name, value) in zip(grid, figures.items(), strict=True):
        for axes, column in zip(row, columns, strict=True):
            for i, (method, color) in enumerate(zip(methods, _colors(len(methods)), strict=True)):
                mine = [c for c in cells if c.method == method and tuple(c.point[o] for o in others) == column]
                found = [
                    (x, mean_interval([value(c) for c in mine if c.point[axis] == p])) for x, p in enumerate(places)
                ]
                found = [(x, m, *(m if math.isnan(end) else end for end in (low, high)))
                         for x, (m, low, high) in found if not math.isnan(m)]  # fmt: skip
                if found:
                    x, mean, low, high = np.array(found).T
                    x = x + 0.06 * (i - (len(methods) - 1) / 2)  # or error bars would hide each other
                    axes.errorbar(x, mean, [mean - low, high - mean], color=color, marker="o", ms=4, capsize=2, lw=1.4,
                                  label=method)  # fmt: skip
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#e5e7eb")
        row[0].set_ylabel(name, color=INK)
    grid[0][0].set_ylim(0, 1)
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(", ".join(f"{o} {v:g}" for o, v in zip(others, column, strict=True)), color=INK, fontsize=10)
    for axes in grid[-1]:
        axes.set_xticks(range(len(places)), [f"{p:g}" for p in places])
        axes.set_xlabel(axis, color=INK)
    figure.legend(*grid[0][0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=4)
    return figure


def clock_ratios(cells: Sequence[Cell], reference: str) -> Figure:
    """The clock of each method over that of the reference, by the spread of environment times."""
    figure = Figure(figsize=(6, 4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    methods = [m for m in dict.fromkeys(c.method for c in cells) if m != reference]
    sigmas = sorted({c.point["env_sigma"] for c in cells})
    table = {r["method"]: r for r in rows(cells, reference)}
    for method, color in zip(methods, _colors(len(methods)), strict=True):
        found = [(s, table.get(f"{method}, env_sigma {s:g}", {}).get("clock_ratio")) for s in sigmas]
        found = [(s, *i) for s, i in found if i is not None]
        if found:
            x, mean, low, high = np.array(found).T
            axes.errorbar(x, mean, [mean - low, high - mean], color=color, marker="o", capsize=3, label=method)
    axes.axhline(1.0, color=INK, lw=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("sigma of environment times (log scale of the lognormal)")
    axes.set_ylabel(f"clock of a run / {reference}'s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


# --- text -------------------------------------------------------------------------------------------------------------

Interval = tuple[float, float, float]


def percent(interval: Interval) -> str:
    mean, low, high = interval
    if math.isnan(mean):
        return "-"
    return f"{100 * mean:.1f} %" + ("" if math.isnan(low) else f" [{100 * low:.1f}, {100 * high:.1f}]")


def points(interval: Interval | None) -> str:
    """A difference of two rates, in points."""
    if interval is None or math.isnan(interval[0]):
        return ""
    mean, low, high = interval
    return f"{100 * mean:+.1f}" + ("" if math.isnan(low) else f" [{100 * low:+.1f}, {100 * high:+.1f}]")


def number(interval: Interval | None, digits: int) -> str:
    if interval is None or math.isnan(interval[0]):
        return ""
    mean, low, high = interval
    return f"{mean:.{digits}f}" + ("" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def _count(x: float) -> str:
    return "not reached" if math.isinf(x) or math.isnan(x) else f"{x:,.0f}"


def _fallen(row: Mapping[str, Any]) -> str:
    return f"{row['collapsed']} (at {row['fell']:,.0f})" if row["collapsed"] else "0"


def _short(x: float, unit: str = "") -> str:
    if math.isnan(x):
        return "-"
    return f"{100 * x:.2f} %" if unit else f"{x:.3g}"


def _table(head: Sequence, body: Sequence[Sequence]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines)
