"""What is refused of a configuration: options without effect, contradictions, values out of range."""

import dataclasses
from typing import TYPE_CHECKING

from sao_jax.runtime.presets import CRITIC_ONLY, GROUP_BASELINES, PRESETS

if TYPE_CHECKING:
    from sao_jax.runtime.config import RunConfig


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_effects(config: "RunConfig") -> None:
    """Raises ValueError for an option that was given and would change nothing."""
    if config.band is not None and (config.eps_low is not None or config.eps_high is not None):
        raise ValueError("--band and --eps-low/--eps-high both set the band; give one of them")
    preset = PRESETS[config.preset]
    loss = config.policy_loss or preset["policy_loss"]
    if loss == "tis" and config.eps_low is not None:
        raise ValueError("--eps-low has no effect here; --policy-loss tis bounds weights from above only (--eps-high)")
    if loss != "tis" and (config.eps_low is None) != (config.eps_high is None):
        raise ValueError("--eps-low and --eps-high go together: one end of the band is missing")
    drops = loss == "dis" and (config.outside or preset.get("outside")) in ("mask", "mask_sign")
    baseline = config.baseline or preset["baseline"]
    kl = config.kl or preset["kl"]
    critic, grouped = baseline == "critic", baseline in GROUP_BASELINES
    arrival = config.critic_update == "arrival"
    preheat_rollouts = preset.get("preheat_rollouts") if config.preheat_rollouts is None else config.preheat_rollouts
    preheats = bool(config.preheat_from) or preheat_rollouts != 0
    warm_start = config.init_from is None and config.warm_start_steps > 0
    rules = [
        (name, critic, "--baseline critic") for name in (*CRITIC_ONLY, "gamma", "segment_steps", "limit_bootstrap")
    ]
    rules += [
        ("outside", loss == "dis", "--policy-loss dis"),
        # Clamped and truncated weights are never 0, so every token is kept.
        (
            "denominator",
            drops or (loss in ("dis", "tis") and config.denominator == "action"),
            "--outside mask or mask_sign",
        ),
        ("sequence_kl", loss == "dis", "--policy-loss dis"),
        ("env_sigma", config.env_seconds is not None, "--env-seconds"),
        ("env_sleep", config.env_seconds is not None and config.clock == "wall", "--env-seconds and --clock wall"),
        ("env_seconds", config.workers == 0, "environments beside the learner, not --workers"),
        ("clock", config.workers == 0, "a run in one process, not --workers"),
        ("target_utilization", config.concurrency == "auto", "--concurrency auto"),
        ("worker_timeout", config.workers > 0, "--workers"),
        ("backend", config.workers > 0, "--workers"),
        ("row_tokens", config.context_window is None, "whole contexts in the sampler, not --context-window"),
        ("max_staleness", config.forced_staleness is None, "a staleness that is not forced"),
        ("micro_rows", not arrival, "--critic-update batch"),
        ("row_buckets", not config.pack, "a row for each trajectory, not --pack"),
        ("pack", not arrival, "--critic-update batch: a critic that steps on every arrival has one at a time"),
        ("dual_clip", loss == "ppo", "--policy-loss ppo"),
        ("drop_dead_groups", grouped, "a group baseline (grpo, dr_grpo, rloo)"),
        (
            "max_dead_groups",
            grouped and config.drop_dead_groups is not False,
            "a group baseline that drops dead groups",
        ),
        # In the first pass the values still are the old ones.
        ("value_clip", not arrival and config.critic_steps_per_actor != 1, "--critic-steps-per-actor of at least 2"),
        ("kl_target", kl != "off", "--kl smooth or penalty"),
        ("kl_step", kl == "penalty", "--kl penalty"),
        ("lambda_alpha", config.lambd is None, "no fixed --lambd"),
        ("preheat_rollouts", config.preheat_from is None, "fresh rollouts, not --preheat-from"),
        ("preheat_epochs", preheats, "--preheat-rollouts or --preheat-from"),
        ("warm_start_steps", config.init_from is None, "a warm start, not --init-from"),
        *((name, warm_start, "a warm start") for name in ("warm_start_batch", "warm_start_lr", "demonstrations")),
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, holds, needs in rules:
        if getattr(config, name) != defaults[name] and not holds:
            raise ValueError(f"{_flag(name)} has no effect here; it needs {needs}")
    if arrival and config.critic_steps_per_actor not in (None, 1):
        raise ValueError("--critic-steps-per-actor has no effect with --critic-update arrival: one step per arrival")


def check_values(config: "RunConfig") -> None:
    """Raises ValueError naming the first flag of a resolved configuration that is out of range."""
    at_least = {
        "rollouts": 0, "batch_size": 1, "slots": 1, "burst": 1, "publish_every": 1, "env_workers": 1, "max_attempts": 1,
        "segment_steps": 1, "forced_staleness": 0, "max_staleness": 0, "warm_start_steps": 0, "warm_start_batch": 1,
        "demonstrations": 1, "preheat_rollouts": 0, "preheat_epochs": 1, "num_critic_only_steps": 0,
        "critic_steps_per_actor": 1, "n_samples_per_prompt": 1, "eval_every": 0, "eval_tasks": 1, "checkpoint_every": 1,
        "keep_checkpoints": 1, "lr_warmup": 0, "micro_rows": 1, "devices": 1, "max_dead_groups": 1, "max_tokens": 2,
        "train_tasks": 1, "context_window": 8, "row_tokens": 8, "env_sigma": 0.0, "workers": 0, "concurrency": 1,
        "lr": 0.0, "critic_lr": 0.0, "weight_decay": 0.0, "seed": 0, "row_buckets": 1,
    }  # fmt: skip
    above = {
        "temperature": 0.0, "grad_clip": 0.0, "critic_grad_clip": 0.0, "kl_target": 0.0, "warm_start_lr": 0.0,
        "adam_eps": 0.0, "env_timeout": 0.0, "value_clip": 0.0, "dual_clip": 1.0, "lambda_alpha": 0.0,
        "env_seconds": 0.0, "worker_timeout": 0.0, "target_utilization": 0.0, "sequence_kl": 0.0, "kl_step": 0.0,
    }  # fmt: skip
    unit = ("gamma", "lambd", "critic_lambda", "target_utilization")
    at_most = {"env_sigma": 10.0, "seed": 2**32 - 1}
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None or isinstance(value, str):
            continue
        if name in at_most and value > at_most[name]:
            raise ValueError(f"{_flag(name)} is {value}; it must be at most {at_most[name]}")
        if isinstance(value, float) and not -1e30 < value < 1e30:
            raise ValueError(f"{_flag(name)} is {value}; it must be finite")
        if name in at_least and value < at_least[name]:
            raise ValueError(f"{_flag(name)} is {value}; it must be at least {at_least[name]}")
        if name in above and not value > above[name]:
            raise ValueError(f"{_flag(name)} is {value}; it must be above {above[name]:g}")
        if name in unit and not 0.0 <= value <= 1.0:
            raise ValueError(f"{_flag(name)} is {value}; it must lie in [0, 1]")
        if name in ("adam_b1", "adam_b2") and not 0.0 <= value < 1.0:
            raise ValueError(f"{_flag(name)} is {value}; it must lie in [0, 1), 1 excluded")
    low, high = config.band_ends()
    if not 0.0 <= low < 1.0 < high:
        raise ValueError(
            f"the band is ({low:g}, {high:g}); it needs 0 <= lo < 1 < hi (--band takes ends, --eps offsets)"
        )
    n = config.n_samples_per_prompt
    if config.grouped and n < 2:
        raise ValueError(f"--n-samples-per-prompt is {n}; baseline {config.baseline} needs groups of at least 2")
    if config.grouped and config.batch_size % n:
        raise ValueError(f"--batch-size {config.batch_size} is not a multiple of --n-samples-per-prompt {n}")
    if config.baseline in ("batch_mean", "spo") and config.batch_size < 2:
        raise ValueError(f"baseline {config.baseline} needs --batch-size of at least 2")
    if isinstance(config.concurrency, int) and config.concurrency > config.slots:
        raise ValueError(f"--concurrency is {config.concurrency}; it must be at most --slots {config.slots}")
    if config.concurrency == "auto" and config.env_seconds is not None and not config.env_sleep:
        raise ValueError(
            "--concurrency auto needs --env-sleep here; devices do not idle through waits that are skipped"
        )
    for name in ("context_window", "row_tokens"):
        if getattr(config, name) is not None:
            _check_cut(config, _flag(name))
    if config.baseline == "spo" and config.train_tasks is None:
        raise ValueError("baseline spo keeps a count per task; it needs --train-tasks, so that tasks come back")
    if config.forced_staleness is not None and config.over_stale != "train":
        raise ValueError("--forced-staleness holds trajectories on purpose; --over-stale must be train")


def _check_cut(config: "RunConfig", flag: str) -> None:
    """Refuses what needs all of a trajectory in one row."""
    whole = [
        ("--policy-loss gspo", config.policy_loss == "gspo"),
        ("--sequence-kl", config.sequence_kl is not None),
        ("--gae-over tokens", config.gae_over == "tokens"),
        # Whether a weight is dropped hangs on the sign of an advantage that the rows after this one decide.
        ("--critic-targets dis --outside mask_sign", (config.critic_targets, config.outside) == ("dis", "mask_sign")),
    ]
    for name, given in whole:
        if given:
            raise ValueError(f"{name} needs whole trajectories in a row; {flag} cuts them")
