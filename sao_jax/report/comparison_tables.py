"""Tables of a comparison of methods over paired seeds, and the files that tell of it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sao_jax.report.comparison import COLLAPSE, LATEST, NEAR, OUTSIDE, Cell, curves_csv, rows, runs_csv
from sao_jax.report.comparison_figures import clock_ratios, curves, sweep
from sao_jax.report.curves import png
from sao_jax.report.run_folder import write_whole

Interval = tuple[float, float, float]


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


def summary(cells: Sequence[Cell], reference: str, budget: str = "both") -> str:
    """The comparison as Markdown."""
    table = rows(cells, reference)
    minutes = sum(c.wall_s for c in cells if not math.isnan(c.wall_s)) / 60
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
                _steps(r), _fallen(r), points(r.get("effect")),
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
        f"## Health over the last {LATEST} updates (up to the fall, where a run collapsed)",
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
        "",
        f"{len(cells)} runs, {minutes:,.0f} minutes of wall clock added up, evaluations included.",
    ]
    return "\n".join(out) + "\n"


def _share(x: float) -> str:
    return "-" if math.isnan(x) else f"{100 * x:.3f} %"


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


def _steps(row: Mapping[str, Any]) -> str:
    if math.isnan(row["steps"]):
        return "-"
    count = "not reached" if math.isinf(row["steps"]) else f"{row['steps']:,.0f}"
    return f"{count} ({row['reached']}/{row['seeds']})"


def _fallen(row: Mapping[str, Any]) -> str:
    return f"{row['collapsed']} (at {row['fell']:,.0f})" if row["collapsed"] else "0"


def _short(x: float, unit: str = "") -> str:
    if math.isnan(x):
        return "-"
    return f"{100 * x:.2f} %" if unit else f"{x:.3g}"


def _table(head: Sequence, body: Sequence[Sequence]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines)
