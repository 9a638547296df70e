"""Curves of a run, on matplotlib's objects alone: no pyplot, no global state, so that any thread may draw them."""

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter, ScalarFormatter

from sao_jax.report.run_folder import evaluation, finite, of_stage, read_run, series, setting, write_whole

COLUMNS = 3
INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE = "#2563eb", "#ea7317", "#0f9d76", "#d1344b", "#7c4dcc"
AREA = ("#2563eb", "#60a5fa", "#0f9d76", "#86d8b8", "#f2b134", "#ea7317", "#7c4dcc", "#b9a3ea")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot: its title, what draws it, the columns it takes, whether grid lines help."""

    title: str
    draw: Callable[[Axes], None]
    columns: int = 1
    grid: bool = True


def plot_run(folder) -> list[Path]:
    """Writes `curves.png` into the run folder and returns the paths written."""
    run = read_run(folder)
    return [write_whole(run.folder / "curves.png", png(run_figure(run.metrics, run.config)))]


def png(figure: Figure, dpi: int = 130) -> bytes:
    buffer = io.BytesIO()
    # Without the version stamp equal data give equal bytes.
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def run_figure(metrics: Sequence[Mapping], config: Mapping | None = None) -> Figure:
    """All curves of a run in one figure; a panel without data is left out.

    Args:
      metrics: lines of `metrics.jsonl`; unknown, missing and null keys are ignored.
      config: settings of the run, read for the KL target and the heading.
    """
    config = config or {}
    panels = [p for p in (make(metrics, config) for make in PANELS) if p]
    rows = lay_out(panels)
    figure = Figure(figsize=(12, 0.6 + 2.6 * max(1, len(rows))), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.07, wspace=0.03, hspace=0.04)
    title = heading(metrics, config)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    if not panels:
        figure.text(0.5, 0.45, "no metrics yet", ha="center", color=MUTED)
        return figure
    grid = figure.add_gridspec(len(rows), COLUMNS)
    for r, row in enumerate(rows):
        for start, stop, panel in row:
            axes = figure.add_subplot(grid[r, start:stop])
            panel.draw(axes)
            finish(axes, panel)
    return figure


def lay_out(panels: Sequence[Panel]) -> list[list[tuple[int, int, Panel]]]:
    """Rows of (first column, end column, panel), filled in order."""
    rows: list[list[tuple[int, int, Panel]]] = []
    for panel in panels:
        start = rows[-1][-1][1] if rows else COLUMNS
        if start + panel.columns > COLUMNS:
            rows.append([])
            start = 0
        rows[-1].append((start, start + panel.columns, panel))
    return rows


def heading(metrics: Sequence[Mapping], config: Mapping) -> str:
    task, preset = setting(config, "task"), setting(config, "preset")
    parts = [task] if isinstance(task, str) else []
    if isinstance(preset, str):
        parts.append(f"{preset} preset")
    seed = setting(config, "seed")
    if isinstance(seed, int):
        parts.append(f"seed {seed}")
    rollouts, _ = series(of_stage(metrics, "rl"), "rollouts")
    if len(rollouts):
        parts.append(f"{int(rollouts.max()):,} rollouts")
    # A dollar sign would open mathematical text.
    return "   ·   ".join(parts).replace("$", r"\$")


# --- the panels: each returns None where its keys have no data ---------------------------------------------------


def success_panel(metrics, config) -> Panel | None:
    x, y = series(of_stage(metrics, "rl"), "reward/success")
    held_out = [e for e in map(evaluation, of_stage(metrics, "eval")) if e and e["rollouts"] is not None]
    if not len(x) and not held_out:
        return None

    def draw(axes: Axes) -> None:
        smooth_line(axes, x, y, "#94a3b8", "training")
        for greedy, color, label in ((True, GREEN, "held out, greedy"), (False, BLUE, "held out, sampled")):
            # The last of several at one place: those before RL share rollouts = 0.
            chosen = {e["rollouts"]: e for e in held_out if e["greedy"] is greedy}
            if chosen:
                evaluations(axes, [chosen[k] for k in sorted(chosen)], color, label, dashed=greedy)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    return Panel("Success rate", draw, columns=2)


def evaluations(axes: Axes, found: list[dict], color: str, label: str, *, dashed: bool) -> None:
    """Success rates with their intervals, as error bars."""
    at, mean = [e["rollouts"] for e in found], [e["success"] for e in found]
    low = [e["success"] - e["low"] if e["low"] is not None else 0.0 for e in found]
    high = [e["high"] - e["success"] if e["high"] is not None else 0.0 for e in found]
    axes.errorbar(
        at, mean, yerr=np.maximum([low, high], 0.0), color=color, label=label, zorder=4 - dashed, clip_on=False,
        linestyle="--" if dashed else "-", linewidth=1.2 if dashed else 1.8, alpha=0.85 if dashed else 1.0,
        marker="s" if dashed else "o", markersize=3.4 if dashed else 4.2, elinewidth=1.2, capsize=0,
        markerfacecolor="white" if dashed else color,
    )  # fmt: skip


def kl_panel(metrics, config) -> Panel | None:
    target = finite(setting(config, "kl_target"))
    lines = of_stage(metrics, "rl")
    curves = [
        (*series(lines, "actor/ppo_kl"), ORANGE, "before step"),
        (*series(lines, "actor/kl_after"), BLUE, "after"),
    ]
    curves = [c for c in curves if len(c[0])]
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        for x, y, color, label in curves:
            smooth_line(axes, x, y, color, label)
        shown = np.concatenate([y for _, y, _, _ in curves])
        if target:
            axes.axhline(target, color=RED, linewidth=1.2, linestyle=(0, (4, 2)), label="target")
            shown = np.append(shown, target)
        # One collapse would otherwise flatten everything before it.
        if shown.min() > 0 and shown.max() > 30 * np.median(shown):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=min(0.0, float(shown.min())))

    return Panel("KL [nats/token]", draw)


def explained_variance_panel(metrics, config) -> Panel | None:
    x, y = series(of_stage(metrics, "rl"), "critic/explained_var")

    def draw(axes: Axes) -> None:
        smooth_line(axes, x, y, PURPLE)
        if y.min() < 0:
            axes.axhline(0, color=MUTED, linewidth=0.8)
        # An untrained critic can be arbitrarily bad; the useful range is [-1, 1].
        axes.set_ylim(max(-1.0, min(0.0, 1.1 * float(y.min()))), min(1.02, max(0.5, float(y.max()) + 0.05)))

    return Panel("Explained variance of the critic", draw) if len(x) else None


def band_panel(metrics, config) -> Panel | None:
    keys = (("actor/mask_low_frac", BLUE, "below"), ("actor/mask_high_frac", RED, "above"))
    return lines_panel("Tokens outside the band", metrics, keys, percent=True)


def staleness_panel(metrics, config) -> Panel | None:
    keys = (("async/staleness_max", "#93b4f5", "max"), ("async/staleness_mean", BLUE, "mean"))
    limit = finite(setting(config, "max_staleness"))
    return lines_panel("Staleness [versions]", metrics, keys, limit=limit, integers=True)


def entropy_panel(metrics, config) -> Panel | None:
    return lines_panel("Entropy [nats/token]", metrics, (("actor/entropy", GREEN, None),))


def length_panel(metrics, config) -> Panel | None:
    keys = (("response_length/max", "#f6bd8b", "max"), ("response_length/mean", ORANGE, "mean"))
    return lines_panel("Response length [tokens]", metrics, keys)


def speed_panel(metrics, config) -> Panel | None:
    return lines_panel("Tokens/s", metrics, (("perf/tokens_per_s", BLUE, None),))


def time_panel(metrics, config) -> Panel | None:
    """Shares of the loop's stages, binned so that single slow lines do not dominate."""
    lines = [line for line in of_stage(metrics, "rl") if (finite(line.get("rollouts")) or 0) > 0]
    names = sorted({k for line in lines for k in line if k.startswith("timing_s/") and finite(line[k]) is not None})
    if not names:
        return None
    x = np.array([finite(line["rollouts"]) for line in lines])
    seconds = np.array([[finite(line.get(n)) or 0.0 for n in names] for line in lines]).clip(min=0)
    names, seconds = largest([n.removeprefix("timing_s/") for n in names], seconds, len(AREA))
    bins = np.array_split(np.arange(len(x)), min(len(x), 48))
    edges = np.concatenate([[0.0], [x[b[-1]] for b in bins]])
    totals = np.array([seconds[b].sum(0) for b in bins])
    shares = totals / np.maximum(totals.sum(1, keepdims=True), 1e-12)

    def draw(axes: Axes) -> None:
        base = np.zeros(len(bins))
        last_edge = edges[-1]
        for i, color in enumerate(AREA[: len(names)]):
            top = base + shares[:, i]
            axes.stairs(top, edges, baseline=base, fill=True, color=color, linewidth=0)
            base = top
        axes.set_ylim(0, 1)
        # Room on the right for the names, each beside its layer.
        axes.set_xlim(0, 1.5 * last_edge)
        axes.xaxis.set_major_locator(FixedLocator([0, last_edge]))
        axes.spines["bottom"].set_bounds(0, last_edge)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        middles = np.cumsum(shares[-1]) - shares[-1] / 2
        overall = totals.sum(0) / max(totals.sum(), 1e-12)
        for name, share, color, y in zip(names, overall, AREA, spread(middles, 0.095), strict=False):
            axes.text(1.53 / 1.5 * last_edge, y, f"{name} {share:.0%}", fontsize=8, va="center", color=dark(color))

    return Panel("Where the time goes", draw, grid=False)


def spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Ascending positions near `wanted`, at least `gap` apart and, where they fit, inside [gap/2, 1 - gap/2]."""
    offsets = gap * np.arange(len(wanted))
    # Without the offsets, "at least gap apart" reads "not descending": the running maximum, then capped.
    free = np.maximum.accumulate(np.maximum(wanted - offsets, gap / 2))
    return np.minimum(free, 1 - gap / 2 - offsets[-1]) + offsets


def dark(color: str) -> tuple[float, float, float]:
    """A shade of `color` that can be read as small text on white."""
    return tuple(0.72 * c for c in to_rgb(color))


def warm_start_panel(metrics, config) -> Panel | None:
    keys = (("warm_start/loss", GREEN, None),)
    lines = of_stage(metrics, "warm_start")
    steps, _ = series(lines, "warm_start/loss", "step")
    if len(steps) and steps.min() < 0:
        # Counted down to RL, from -total to 0.
        total = finite(setting(config, "warm_start_steps")) or 0.0
        lines = [line | {"step": line["step"] + total} for line in lines if finite(line.get("step")) is not None]
    return lines_panel("Warm start: loss", lines, keys, stage="warm_start", x="step", x_label="steps")


def preheat_panel(metrics, config) -> Panel | None:
    key, lines = "preheat/explained_var", of_stage(metrics, "preheat")
    # Collection shows in `rollouts`, fitting in `epoch`; one of them moves while the quantity exists.
    axis = max(("preheat/epoch", "preheat/rollouts"), key=lambda a: len(set(series(lines, key, a)[0])))
    label = axis.removeprefix("preheat/").replace("epoch", "epochs")
    return lines_panel(
        "Preheating: explained variance", metrics, ((key, PURPLE, None),), stage="preheat", x=axis, x_label=label
    )


PANELS = (
    success_panel, kl_panel, explained_variance_panel, band_panel, staleness_panel, entropy_panel, length_panel,
    speed_panel, time_panel, warm_start_panel, preheat_panel,
)  # fmt: skip


# --- drawing -----------------------------------------------------------------------------------------------------


def lines_panel(title, metrics, keys, *, stage="rl", x="rollouts", x_label="", percent=False, integers=False,
                limit=None) -> Panel | None:  # fmt: skip
    """A panel of plain curves, `keys` being (key, color, label)."""
    curves = [(*series(of_stage(metrics, stage), key, x), color, label) for key, color, label in keys]
    curves = [c for c in curves if len(c[0])]
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        for at, y, color, label in curves:
            smooth_line(axes, at, y, color, label)
        top = max(float(y.max()) for _, y, _, _ in curves)
        low = min(float(y.min()) for _, y, _, _ in curves)
        if limit:
            axes.axhline(limit, color=RED, linewidth=1.2, linestyle=(0, (4, 2)), label="limit")
            top = max(top, limit)
        if low >= 0:
            axes.set_ylim(0, 1.08 * top or 1)
        if percent:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))
        if integers:
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel(x_label)

    return Panel(title, draw)


def smooth_line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    """The values, faint, under their moving average; short series as they are, with markers."""
    if not len(x):
        return
    if len(x) < 20:
        axes.plot(x, y, color=color, linewidth=1.6, marker="o", markersize=3, label=label)
        return
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(x, moving_average(y, 2 * (len(y) // 40) + 1), color=color, linewidth=1.8, label=label)


def moving_average(y: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over an odd `width`, over fewer values at the ends."""
    sums = np.convolve(y, np.ones(width), mode="same")
    return sums / np.convolve(np.ones(len(y)), np.ones(width), mode="same")


def largest(names: list[str], columns: np.ndarray, room: int) -> tuple[list[str], np.ndarray]:
    """The columns in order of their sums, those beyond `room` added up as "other"."""
    order = np.argsort(-columns.sum(0), kind="stable")
    names, columns = [names[i] for i in order], columns[:, order]
    if len(names) <= room:
        return names, columns
    rest = columns[:, room - 1 :].sum(1, keepdims=True)
    return [*names[: room - 1], "other"], np.concatenate([columns[:, : room - 1], rest], axis=1)


def finish(axes: Axes, panel: Panel) -> None:
    """The common look: heading above, legend beside it, light grid, no box."""
    axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=7)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    if panel.grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.set_xlabel(axes.get_xlabel() or "RL rollouts", fontsize=8, color=MUTED, labelpad=2)
    if not isinstance(axes.xaxis.get_major_locator(), FixedLocator):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    if isinstance(axes.yaxis.get_major_formatter(), ScalarFormatter):
        axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    if axes.get_legend() is None and axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=4, frameon=False, fontsize=8, labelcolor=INK,
            handlelength=1.1, handletextpad=0.4, columnspacing=0.9, borderpad=0,
        )  # fmt: skip


def thousands(x: float, _position=None) -> str:
    """12000 -> 12k, 2500000 -> 2.5M, 0.25 as it is."""
    if not math.isfinite(x):
        return ""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:.4g}"
