"""The numbers a run is judged by, as a dictionary and as a table."""

from collections.abc import Iterable

import numpy as np
from rich.table import Table
from rich.text import Text

from sao_jax.report.run_folder import (
    Run,
    evaluation,
    finite,
    last,
    of_stage,
    read_run,
    setting,
    stage_seconds,
    values,
)
from sao_jax.report.text import duration, number, percent

MOMENTS = {
    "untrained": "Untrained",
    "warm_start": "After the warm start",
    "before": "Before RL",
    "after": "After RL",
    "evaluation": "Evaluated afterwards",
}
STAGES = {
    "warm_start": "warm start",
    "preheat": "preheating",
    "critic_only": "critic-only steps",
    "rl": "RL",
    "eval": "evaluation",
}


def summarise(folder) -> dict:
    """The summary of a run folder: plain JSON values, None where the run recorded nothing.

    Keys: `run`, `held_out` (moment -> {"sampled" | "greedy": {success, low, high, n, version, rollouts}}), `rollouts`
    (preheat, rl, total), `updates`, `wall_clock_s` (by stage and total), `tokens_per_s` (median), `staleness` (mean,
    max), `kl` (target, share_within, share_over_before: of the updates, smooth_fraction: mean), `dropped` (by reason),
    `skipped_windows`, `first_logp_abs_diff`, `recompilations`, `explained_variance` (last), `publish_latency_s`
    (median, from a trajectory's end to the weights trained on it), `unreadable_lines`.
    """
    run = read_run(folder)
    rl = of_stage(run.metrics, "rl")
    seconds = stage_seconds(run.metrics)
    preheat, trained = newest(of_stage(run.metrics, "preheat"), "preheat/rollouts"), newest(rl, "rollouts")
    recompilations = values(rl, "perf/recompilations")
    return {
        "run": run.name,
        "held_out": held_out(run),
        "rollouts": {"preheat": preheat, "rl": trained, "total": (preheat or 0) + (trained or 0)},
        "updates": newest(rl, "version"),
        "wall_clock_s": {k: seconds[k] for k in sorted(seconds, key=stage_order)} | {"total": sum(seconds.values())},
        "tokens_per_s": middle(rl, "perf/tokens_per_s"),
        "staleness": {"mean": mean(values(rl, "async/staleness_mean")), "max": newest(rl, "async/staleness_max")},
        "kl": kl_bound(rl, finite(setting(run.config, "kl_target"))),
        "dropped": dropped(rl),
        "skipped_windows": skipped_windows(rl),
        "first_logp_abs_diff": finite(rl[0].get("rollout_corr/logp_abs_diff")) if rl else None,
        "recompilations": int(recompilations.max()) if len(recompilations) else None,
        "explained_variance": last(values(rl, "critic/explained_var")),
        "publish_latency_s": middle(rl, "async/publish_latency_s"),
        "unreadable_lines": run.unreadable,
    }


def stage_order(stage: str) -> int:
    names = list(STAGES)
    return names.index(stage) if stage in names else len(names)


def newest(lines: Iterable[dict], key: str) -> int | None:
    """The largest value of a count."""
    found = values(lines, key)
    return int(found.max()) if len(found) else None


def middle(lines: Iterable[dict], key: str) -> float | None:
    found = values(lines, key)
    return float(np.median(found)) if len(found) else None


def mean(found: np.ndarray) -> float | None:
    return float(found.mean()) if len(found) else None


def held_out(run: Run) -> dict[str, dict[str, dict]]:
    """Held-out success by moment, told by the place of an eval line among the others; the last of a kind counts."""
    found: dict[str, dict[str, dict]] = {}
    stages = [line.get("stage") for line in run.metrics]
    warm = stages.index("warm_start") if "warm_start" in stages else None
    cold_end = next((i for i, s in enumerate(stages) if s in ("preheat", "critic_only", "rl")), len(stages))
    first_rl = stages.index("rl") if "rl" in stages else len(stages)
    for i, line in enumerate(run.metrics):
        result = evaluation(line) if line.get("stage") == "eval" else None
        if result is None:
            continue
        if i > first_rl:
            moment = "after"
        elif warm is not None and i < warm:
            moment = "untrained"
        elif warm is not None and i < cold_end:
            moment = "warm_start"
        else:
            moment = "before"
        kind = "greedy" if result.pop("greedy") else "sampled"
        found.setdefault(moment, {})[kind] = result
    for record in run.evaluations:
        result = evaluation(record)
        if result is None:
            continue
        kind = "greedy" if result.pop("greedy") else "sampled"
        known = found.get("after", {}).get(kind, {})
        # A run that ended well repeats its last evaluation in evaluation.json.
        if any(known.get(k) != result[k] for k in ("success", "n", "version")):
            found.setdefault("evaluation", {})[kind] = result
    return {moment: found[moment] for moment in MOMENTS if moment in found}


def kl_bound(rl: list[dict], target: float | None) -> dict:
    """How the KL bound was kept: stale data alone can exceed it before any step is taken."""
    after, before = values(rl, "actor/kl_after"), values(rl, "actor/ppo_kl")
    known = target is not None
    return {
        "target": target,
        "share_within": mean(after <= target) if known else None,
        "share_over_before": mean(before > target) if known else None,
        "smooth_fraction": mean(values(rl, "actor/smooth_fraction")),
    }


def dropped(rl: list[dict]) -> dict[str, int]:
    """Rollouts dropped, by reason. The counts are cumulative."""
    prefix = "async/dropped_"
    keys = sorted({k for line in rl for k in line if k.startswith(prefix)})
    counts = {k.removeprefix(prefix): newest(rl, k) for k in keys}
    return {reason: count for reason, count in counts.items() if count is not None}


def skipped_windows(rl: list[dict]) -> int | None:
    """Windows left out for a gradient that was not finite: counted per update, whatever the key's first part."""
    keys = sorted({k for line in rl for k in line if k.split("/")[-1] in ("skipped", "skipped_windows")})
    return sum(int(values(rl, key).sum()) for key in keys) if keys else None


def summary_rows(summary: dict) -> list[tuple[str, list[tuple[str, str]]]]:
    """The summary as sections of (label, value); what is unknown is left out."""
    success = [
        (f"{MOMENTS[moment]}, {kind}", success_text(result))
        for moment, kinds in summary["held_out"].items()
        for kind, result in sorted(kinds.items(), reverse=True)
    ]
    rollouts, clock, staleness, kl = (summary[k] for k in ("rollouts", "wall_clock_s", "staleness", "kl"))
    budget = [
        ("Rollouts, preheating", number(rollouts["preheat"])),
        ("Rollouts, RL", number(rollouts["rl"])),
        ("Policy updates", number(summary["updates"])),
        *((f"Wall clock, {STAGES.get(k, k)}", duration(v)) for k, v in clock.items() if k != "total"),
        ("Wall clock, total", duration(clock["total"])),
        ("Tokens/s, median", number(summary["tokens_per_s"])),
    ]
    flow = [
        ("Staleness, mean / max [versions]", f"{number(staleness['mean'])} / {number(staleness['max'])}"),
        ("Trajectory end to published weights, median", duration(summary["publish_latency_s"])),
        ("Rollouts dropped", ", ".join(f"{number(n)} {reason}" for reason, n in summary["dropped"].items()) or "-"),
    ]
    health = [
        (f"Updates within KL {number(kl['target'])}", percent(kl["share_within"])),
        ("Updates over it before the step", percent(kl["share_over_before"])),
        ("Share of the step taken, mean", percent(kl["smooth_fraction"])),
        ("|log-prob difference| at the first update", number(summary["first_logp_abs_diff"])),
        ("Explained variance, last", number(summary["explained_variance"])),
        ("Windows skipped", number(summary["skipped_windows"])),
        ("Recompilations", number(summary["recompilations"])),
        ("Metric lines not readable", number(summary["unreadable_lines"] or None)),
    ]
    sections = [("Held-out success", success), ("Budget", budget), ("Flow", flow), ("Health", health)]
    shown = [(title, [(label, v) for label, v in rows if set(v) - set("-/ ")]) for title, rows in sections]
    return [(title, rows) for title, rows in shown if rows]


def success_text(result: dict) -> str:
    text = percent(result["success"])
    if result["low"] is not None and result["high"] is not None:
        text += f"  [{percent(result['low'])}, {percent(result['high'])}]"
    return text + (f"  n={result['n']:,}" if result["n"] else "")


def summary_table(folder) -> Table:
    """The summary for a terminal or a notebook."""
    summary = summarise(folder)
    table = Table(title=Text(summary["run"]), title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="default", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    # Text, not markup: intervals and names hold square brackets.
    for title, rows in summary_rows(summary):
        table.add_row(Text(title, "bold"), "")
        for label, value in rows:
            table.add_row(Text("  " + label), Text(value), end_section=(label, value) == rows[-1])
    return table
