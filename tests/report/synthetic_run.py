"""A run folder as a trainer would write it, made up but plausible, for the tests of the report."""

import json
import math
from pathlib import Path

import numpy as np

from sao_jax.report.intervals import wilson

BATCH = 64


def write_run(folder: Path, *, updates: int = 160, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"task": "calculator", "preset": "seed", "seed": seed, "learner": {"kl_target": 0.05, "lr": 1e-3}}
    config |= {"batch_size": BATCH, "max_staleness": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in make_lines(updates, seed)))
    return folder


def evaluation_line(rng, time_s, version, rollouts, rate, greedy, n=512):
    k = int(rng.binomial(n, min(rate, 1.0)))
    low, high = wilson(k, n)
    line = {"stage": "eval", "time_s": time_s, "version": version, "rollouts": rollouts, "eval/success": k / n}
    return line | {"eval/low": low, "eval/high": high, "eval/n": n, "eval/greedy": greedy}


def make_lines(updates: int, seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    lines, t = [], 6.0
    for step in range(10, 601, 10):
        t += 1.2
        lines.append({"stage": "warm_start", "time_s": t, "step": step})
        lines[-1]["warm_start/loss"] = 0.35 + 2.4 * math.exp(-step / 90) + 0.03 * rng.normal()
    for greedy in (False, True):
        t += 2
        lines.append(evaluation_line(rng, t, 0, 0, 0.27 + 0.13 * greedy, greedy))
    for epoch in range(1, 9):
        t += 3
        lines.append({"stage": "preheat", "time_s": t, "preheat/epoch": epoch, "preheat/rollouts": 20 * BATCH})
        lines[-1]["preheat/explained_var"] = 0.27 * (1 - math.exp(-epoch / 2.5)) + 0.008 * rng.normal()
    for version in range(1, updates + 1):
        done = version / 160
        rate = 0.28 + 0.67 * (1 - math.exp(-3.2 * done))
        t += 0.62
        before = 0.018 + 0.02 * done + abs(0.012 * rng.normal())
        after = min(before + abs(0.02 * rng.normal()), max(0.05, before))
        line = {
            "stage": "rl",
            "time_s": t,
            "version": version,
            "rollouts": version * BATCH,
            "reward/success": rng.binomial(BATCH, rate) / BATCH,
            "reward/mean": rate,
            "actor/ppo_kl": before,
            "actor/kl_after": after,
            "actor/smooth_fraction": 1.0 if after < 0.049 else 0.5,
            "actor/entropy": 0.55 * math.exp(-2 * done) + 0.12 + 0.01 * rng.normal(),
            "actor/mask_low_frac": 0.002 + 0.003 * done + 0.0006 * abs(rng.normal()),
            "actor/mask_high_frac": 0.0008 + 0.0012 * done + 0.0003 * abs(rng.normal()),
            "critic/explained_var": None if version == 7 else 0.1 + 0.25 * done + 0.05 * rng.normal(),
            "rollout_corr/logp_abs_diff": 3e-6 if version == 1 else 0.05 + 0.01 * rng.normal(),
            "async/staleness_mean": 1.4 + 0.3 * rng.normal(),
            "async/staleness_max": int(rng.integers(2, 5)),
            "async/dropped_stale": version // 40,
            "async/dropped_aborted": version // 80,
            "async/publish_latency_s": 0.8 + 0.1 * rng.normal(),
            "response_length/mean": 24 - 4 * done + 0.6 * rng.normal(),
            "response_length/max": int(rng.integers(38, 48)),
            "perf/tokens_per_s": (6200 if version > 3 else 1500) + 260 * rng.normal(),
            "perf/recompilations": 0,
        }
        shares = {"sample": 0.24, "gradient": 0.21, "critic": 0.08, "update": 0.03, "environment": 0.015}
        line |= {f"timing_s/{k}": v * (1 + 0.2 * rng.random()) for k, v in shares.items()}
        lines.append(line)
        if version % 20 == 0:
            for greedy in (False, True):
                t += 2
                lines.append(evaluation_line(rng, t, version, version * BATCH, rate + 0.03 * greedy, greedy))
    return lines
