"""From what happens in the loop to lines of metrics.jsonl and the progress display.

Device sums are fetched one update late, so that reading them never waits for the update in progress.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from sao_jax.data.trajectory import Trajectory
from sao_jax.runtime.evaluation import SUCCESS
from sao_jax.runtime.run import Run


def explained_variance(sums: dict[str, float]) -> float:
    """1 - Var(R - V) / Var(R) from sums over action tokens; NaN where Var(R) is 0 or nothing was counted."""
    n = sums["value_count"]
    if n < 1:
        return float("nan")
    variance = sums["returns_sq"] / n - (sums["returns"] / n) ** 2
    error = sums["error_sq"] / n - (sums["error"] / n) ** 2
    # Sums are float32: what is left of equal returns after the subtraction is rounding.
    return float("nan") if variance <= 1e-6 * sums["returns_sq"] / n else 1.0 - error / variance


@dataclasses.dataclass
class _Batch:
    """What the host knows of the trajectories of one update."""

    rewards: list[float] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    turns: list[int] = dataclasses.field(default_factory=list)
    windows: list[int] = dataclasses.field(default_factory=list)
    stale: list[int] = dataclasses.field(default_factory=list)
    ages: list[float] = dataclasses.field(default_factory=list)
    ended: list[float] = dataclasses.field(default_factory=list)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)


class LoopMetrics:
    """Collects for one loop. `display` takes `advance(done, **figures)` and `note(line)`."""

    def __init__(self, run: Run, display, *, window: int = 10):
        self._run, self._display = run, display
        self.dropped: collections.Counter[str] = collections.Counter()
        self._untold: dict[str, list[int]] = {}  # rollouts by reason that no note has told of
        self._finished_at: dict[int, float] = {}
        self._finished: list[bool] = []  # successes since the last update, of attempts that will be dropped as well
        self._batch = _Batch()
        self._batches: collections.deque[_Batch] = collections.deque()
        self._waiting: tuple | None = None  # an update whose sums have not been fetched
        self._unpublished: list[float] = []
        self._latency: list[float] = []
        self._value_sums: collections.deque[dict] = collections.deque(maxlen=window)
        self._successes: collections.deque[float] = collections.deque(maxlen=512)
        self._since = time.monotonic()
        self.trained = 0
        self.drift = 0.0  # nats per token that the policy has moved, summed over the updates fetched so far
        self.compiled = run.compiles.count
        self.devices: dict[str, Any] = {}  # the newest reading of how busy they are

    def note(self, line: str) -> None:
        self._display.note(line)

    def resume(self, updates: int) -> None:
        """Continues the counts of a run that has made `updates` updates."""
        self.trained = updates * self._run.config.batch_size
        self.dropped.clear()  # those of preheating have been counted as they came
        for (reason, _), count in self._run.ledger.dropped_by().items():
            self.dropped[reason] += count

    # ---- what happens to trajectories

    def drop(self, rollout: int, reason: str) -> None:
        self.dropped[reason] += 1
        self._untold.setdefault(reason, []).append(rollout)

    def finished(self, t: Trajectory) -> None:
        self._finished_at[t.rollout] = self._run.clock()
        self._finished.append(t.total_reward >= SUCCESS)

    def arrived(self, t: Trajectory, stale: int) -> None:
        now, b = self._run.clock(), self._batch
        ended = self._finished_at.pop(t.rollout, now)
        b.rewards.append(t.total_reward)
        b.lengths.append(t.num_action_tokens)
        b.turns.append(t.num_steps)
        b.windows.append(1 + len(t.windows))
        b.stale.append(stale)
        b.ages.append(now - ended)
        b.ended.append(ended)
        for name, value in t.reward_parts.items():
            b.parts[name] = b.parts.get(name, 0.0) + value
        if len(b.rewards) == self._run.config.batch_size:
            self._batches.append(b)
            self._batch = _Batch()

    def oldest_wait(self) -> float:
        """Age of the oldest finished trajectory that has not arrived, in seconds of the clock."""
        return self._run.clock() - min(self._finished_at.values()) if self._finished_at else 0.0

    # ---- what happens to weights

    def updated(self, sums: dict[str, Any], version: int, *, critic_only: bool) -> None:
        """An update was enqueued; logs the one before it."""
        self.flush()
        if self._batches:
            batch = self._batches.popleft()
        else:
            batch, self._batch = self._batch, _Batch()
        self._unpublished += [] if critic_only else batch.ended
        now = time.monotonic()
        self.trained += len(batch.rewards)
        self._successes.extend(float(reward >= SUCCESS) for reward in batch.rewards)
        timing, seconds = self._run.timer.read(), max(now - self._since, 1e-9)
        self._since = now
        host = {
            "stage": "critic_only" if critic_only else "rl",
            "time_s": self._run.seconds(),
            "clock_s": self._run.clock(),
            "version": version,
            "rollouts": self.trained,
            **_host_metrics(batch),
            **({"reward/success_finished": float(np.mean(self._finished))} if self._finished else {}),
            **{f"async/dropped_{reason.replace(' ', '_')}": count for reason, count in self.dropped.items()},
            **timing,
            "perf/tokens_per_s": sum(batch.lengths) / seconds,
            "perf/recompilations": self._run.compiles.count - self.compiled,
            **{f"perf/{k}": v for k, v in self.devices.items() if k.startswith("utilization") or k == "concurrency"},
        }
        self._waiting, self._finished = (version, sums, host), []

    def published(self) -> None:
        now = self._run.clock()
        self._latency += [now - ended for ended in self._unpublished]
        self._unpublished = []

    def begin(self) -> None:
        """Rates and stage times count from here."""
        self._run.timer.read()
        self._since = time.monotonic()

    def mark_compiled(self) -> None:
        """From here on every compilation counts as a recompilation."""
        self.compiled = self._run.compiles.count

    def flush(self) -> None:
        """Fetches and logs the update that waits, if any."""
        if self._untold:
            told = (f"{len(ids)} ({why}: {spans(ids)})" for why, ids in self._untold.items())
            self.note("dropped since the update before: " + ", ".join(told))
            self._untold = {}
        if self._waiting is None:
            return
        (version, sums, host), self._waiting = self._waiting, None
        device = device_metrics({k: float(v) for k, v in sums.items()}, self._value_sums, self._run.config)
        latency, self._latency = publish_latency(self._latency), []
        line = host | device | latency
        self._run.log.write(version, line)
        kl = line.get("actor/kl_after", line["actor/ppo_kl"])
        self.drift += max(kl, 0.0) / (1.0 + line.get("async/staleness_mean", 0.0))
        if line["actor/skipped_windows"]:
            self.note(f"update {version}: {line['actor/skipped_windows']:.0f} windows skipped, gradient not finite")
        self._display.advance(
            host["rollouts"],
            success=float(np.mean(self._successes)) if self._successes else float("nan"),
            staleness=host.get("async/staleness_mean", 0.0),
            kl=device["actor/ppo_kl"],
            tokens_per_s=host["perf/tokens_per_s"],
        )


def publish_latency(seconds: list[float]) -> dict[str, float]:
    """From the ends of trajectories to weights that contain them: median and 99 % quantile of what was published."""
    if not seconds:
        return {}
    middle, late = np.percentile(seconds, [50, 99])
    return {"async/publish_latency_s": float(middle), "async/publish_latency_p99_s": float(late)}


def _host_metrics(b: _Batch) -> dict[str, float]:
    if not b.rewards:
        return {}
    return {
        "reward/mean": float(np.mean(b.rewards)),
        "reward/success": float(np.mean(np.array(b.rewards) >= SUCCESS)),
        **{f"reward/{name}": total / len(b.rewards) for name, total in b.parts.items()},
        "async/staleness_mean": float(np.mean(b.stale)),
        "async/staleness_max": max(b.stale),
        "async/queue_age_s": float(np.mean(b.ages)),
        "response_length/mean": float(np.mean(b.lengths)),
        "response_length/max": max(b.lengths),
        "response_length/turns": float(np.mean(b.turns)),
        "response_length/windows": float(np.mean(b.windows)),
    }


def device_metrics(sums: dict[str, float], value_sums: collections.deque, config) -> dict[str, float]:
    """Named metrics from the sums of one update; explained variance over the updates in `value_sums`."""
    tokens = max(sums["tokens"], 1.0)
    used = max(sums["tokens"] - sums["nonfinite"], 1.0)
    out = {
        "actor/pg_loss": sums["pg_loss"] / max(sums["policy_count"], 1.0),
        "actor/ppo_kl": sums["kl"] / used,
        "actor/entropy": sums["entropy"] / tokens,
        "actor/mask_low_frac": sums["low"] / tokens,
        "actor/mask_high_frac": sums["high"] / tokens,
        **{f"actor/mask_{k}_frac_{s}": sums[f"{k}_{s}"] / tokens for k in ("low", "high") for s in ("pos", "neg")},
        "actor/ratio_mean": sums["ratio"] / used,
        "actor/ratio_max": sums["ratio_max"],
        "actor/skipped_windows": sums["skipped"],
        "actor/nonfinite_tokens": sums["nonfinite"],
        "rollout_corr/kl": sums["kl"] / used,
        "rollout_corr/ess": sums["ratio"] ** 2 / (used * sums["ratio_sq"]) if sums["ratio_sq"] else float("nan"),
        "rollout_corr/logp_abs_diff": sums["logp_abs_diff"] / used,
    }
    for source, name in (
        ("policy_grad_norm", "actor/grad_norm"),
        ("smooth_fraction", "actor/smooth_fraction"),
        ("kl_after", "actor/kl_after"),
        ("kl_coef", "actor/kl_coef"),
        ("critic_grad_norm", "critic/grad_norm"),
    ):
        if source in sums:
            out[name] = sums[source]
    if config.has_critic:
        names = ("value_count", "returns", "returns_sq", "error", "error_sq")
        value_sums.append({k: sums[k] for k in names})
        recent = {k: sum(s[k] for s in value_sums) for k in names}
        out["critic/vf_loss"] = sums["vf_loss"] / max(sums["value_count"], 1.0)
        out["critic/explained_var"] = explained_variance(recent)
    return out


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers in order, such as "3, 8-15"."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
