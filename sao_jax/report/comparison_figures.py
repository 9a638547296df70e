"""Pictures of a comparison of methods over paired seeds."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sao_jax.report.comparison import Cell, rows
from sao_jax.report.curves import INK
from sao_jax.report.intervals import mean_interval

COLORS = ("#2563eb", "#ea7317", "#0f9d76", "#d1344b", "#7c4dcc", "#64748b", "#b45309", "#0891b2", "#be185d", "#4d7c0f")


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
