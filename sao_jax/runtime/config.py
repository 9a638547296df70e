"""The flags of a run, their presets, and the checks that make an option without effect an error."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, Union

from sao_jax.learner.objective import Choices, Numbers
from sao_jax.models.compute import Compute
from sao_jax.models.config import ModelConfig
from sao_jax.runtime.config_checks import check_effects, check_values
from sao_jax.runtime.presets import CRITIC_ONLY, GROUP_BASELINES, PRESETS

# Flags that runs of earlier versions do not have. Their defaults do what those versions did.
ADDED = (
    "env_sleep", "workers", "backend", "worker_timeout", "concurrency", "target_utilization", "context_window",
    "row_tokens", "remat", "scan_layers", "pack", "row_buckets",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Flags of a training run. `None` means: decided by the preset, or not in use."""

    task: str = "calculator"
    """Task family: calculator, arithmetic, mathword, contest, repair, long-repair, dialogue, proof, coq, grid,
    package.module:Class or file.py:Class, with options as NAME:key=value,..."""
    preset: Literal["seed", "paper", "grpo"] = "seed"
    """seed: band (0.1, 10) by clipping and KL smoothing; paper: mask by offsets, no KL term; grpo: groups of 8."""
    seed: int = 0
    """Seed of everything drawn in the run."""
    rollouts: int = 12_000
    """RL rollouts to train on (0: stop before RL); preheating rollouts come on top and are reported."""
    batch_size: int = 64
    """Trajectories per update; 1 is allowed."""

    # -- sampling
    slots: int = 64
    """Rows of the sampler that decode at the same time."""
    burst: int = 8
    """Tokens per row and call of the sampler; weights are swapped between bursts."""
    temperature: float = 1.0
    """Sampling temperature; recorded with each trajectory and used by the trainer."""
    max_tokens: int | None = None
    """Token budget of a whole trajectory, prompt included; default and upper bound: the task's own."""
    context_window: int | None = None
    """Tokens that policy and critic see at once, below --max-tokens: a longer attempt goes on with its prompt and its
    most recent steps, and is trained in rows of this length (default: all of a trajectory)."""
    n_samples_per_prompt: int | None = None
    """Rollouts per task instance: 1, or the group size of a group baseline."""
    train_tasks: int | None = None
    """Distinct training instances, taken in turn (default: no instance is seen twice)."""
    forced_staleness: int | None = None
    """Stress test: finished trajectories are held until they are this many versions old, and S is that;
    0: every batch is sampled with the newest weights."""
    max_staleness: int | None = None
    """S: at most (S + 1) x batch rollouts are admitted and not yet trained (1)."""
    over_stale: Literal["train", "drop", "wait"] = "train"
    """A trajectory older than S all the same is trained under the band, dropped, or waited for."""
    kv_after_swap: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of unfinished rows when new weights arrive."""
    concurrency: int | Literal["auto"] | None = None
    """Attempts under way at once: a number, or auto to follow the devices' utilisation (default: all slots)."""
    target_utilization: float | None = None
    """Share of the time that devices should be busy under --concurrency auto (0.92)."""
    publish_every: int = 1
    """Updates between publications of the weights to the sampler."""
    env_seconds: float | None = None
    """Median of simulated environment times, drawn from a lognormal per task and member of its group; waits are counted
    on the run's clock (`clock_s` in the metrics) and not slept through."""
    env_sigma: float | None = None
    """Standard deviation of the logarithm of simulated environment times (1.29: p99 is 20 times the median)."""
    env_sleep: bool = False
    """Sleep through simulated environment times instead, to see what devices do meanwhile."""
    clock: Literal["wall", "cpu"] = "wall"
    """What the run's clock counts besides simulated waits: the wall's time, or this process's CPU time, which waiting
    for a core does not lengthen (for comparisons; one device, no GPU)."""
    env_workers: int = 8
    """Threads for environments that are not declared fast."""
    env_timeout: float = 60.0
    """Seconds before an environment step counts as hung and its attempt is aborted."""
    workers: int = 0
    """Rollout processes, each with an engine and environments of its own (0: the learner's process samples)."""
    backend: Literal["local", "ray"] = "local"
    """Where they run: on this machine, or as actors of a Ray cluster (that of RAY_ADDRESS, else one started here)."""
    worker_timeout: float = 60.0
    """Seconds without a sign of life after which a rollout process is replaced."""
    max_attempts: int = 3
    """Attempts at a rollout whose environment failed before it is dropped."""

    # -- objective
    policy_loss: Literal["dis", "ppo", "tis", "gspo", "a3po"] | None = None
    """Double-sided importance weights; PPO's clipped ratio, per token (ppo), per sequence (gspo) or against a proximal
    policy (a3po); or weights truncated from above (tis)."""
    outside: Literal["clip", "mask", "mask_sign"] | None = None
    """Weights outside the band: clamped to the edge, zero, or zero where they push further out (dis only)."""
    band: str | None = None
    """The band as two ends, lo,hi. Not together with --eps-low and --eps-high."""
    eps_low: float | None = None
    """The band as offsets: its lower end is 1 - eps_low (not tis, which bounds weights from above only)."""
    eps_high: float | None = None
    """The band as offsets: its upper end is 1 + eps_high."""
    denominator: Literal["action", "kept"] | None = None
    """What the policy loss is divided by: all action tokens, or those not masked (--outside mask, mask_sign)."""
    sequence_kl: float | None = None
    """Sequences whose mean KL(rollout || current) is above this weigh nothing (dis only)."""
    dual_clip: float | None = None
    """Bound on the loss of tokens with a negative advantage, above 1 (ppo only)."""
    baseline: Literal["critic", "grpo", "dr_grpo", "rloo", "batch_mean", "running_mean", "spo"] | None = None
    """Where advantages come from: a critic, the rollout's group, its batch, a running mean, or a count per task."""
    drop_dead_groups: bool | None = None
    """Groups with equal rewards are dropped and refilled (group baselines; default on)."""
    max_dead_groups: int = 200
    """Consecutive dead groups after which the run ends with an error."""
    gamma: float = 1.0
    """Discount per action token."""
    lambd: float | None = None
    """A fixed lambda for the policy's advantages; default: 1 - 1/(alpha l), l the trajectory's action tokens."""
    lambda_alpha: float | None = None
    """alpha of the length-adaptive lambda (1.5)."""
    critic_lambda: float | None = None
    """Lambda of the critic's targets (1)."""
    gae_over: Literal["actions", "tokens"] | None = None
    """Propagate advantages over action tokens only, or over observations too (an ablation; critic only)."""
    segment_steps: int = 100
    """Steps per segment."""
    segments: Literal["independent", "carried"] | None = None
    """Advantages end at a segment's seam, or are carried across it (critic only; default independent)."""
    limit_bootstrap: bool = False
    """Treat the task's own limits (turns, tokens) as truncation: bootstrap with the critic's value."""
    whiten: Literal["off", "batch", "running"] | None = None
    """Standardise advantages over the batch, or by running moments (critic only)."""
    kl: Literal["smooth", "penalty", "off"] | None = None
    """Keep KL(rollout || new) at the target by shortening the step, by an adaptive penalty, or not at all."""
    kl_target: float | None = None
    """Nats per token (0.05)."""
    kl_step: float | None = None
    """Step size of the penalty's coefficient (0.1)."""

    # -- critic
    critic_targets: Literal["mc", "dis"] | None = None
    """Monte-Carlo returns, or importance-corrected returns (these run through the seams of segments)."""
    critic_update: Literal["batch", "arrival"] | None = None
    """The critic steps per batch, or on each trajectory as it arrives."""
    critic_steps_per_actor: int | None = None
    """Critic steps per policy step (2)."""
    value_clip: float | None = None
    """Clip range of the value loss."""
    freeze_critic: str | None = None
    """Comma-separated path patterns of critic parameters fixed during RL, or "none" (attention)."""

    # -- optimizers
    lr: float = 5e-4
    """Policy learning rate."""
    critic_lr: float | None = None
    """Critic learning rate (1.5 x --lr; 5 x at the paper's scale)."""
    lr_warmup: int = 0
    """Optimizer steps of linear warm-up."""
    adam_b1: float = 0.9
    """Decay of Adam's mean of gradients, policy and critic."""
    adam_b2: float = 0.999
    """Decay of Adam's mean of squared gradients, policy and critic."""
    adam_eps: float = 1e-8
    """Added to the root in Adam's denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW), policy and critic."""
    grad_clip: float = 1.0
    """Global norm of the policy's gradient."""
    critic_grad_clip: float | None = None
    """Global norm of the critic's gradient (10)."""
    row_tokens: int | None = None
    """Longest row that is trained, below --max-tokens: a longer trajectory is trained as several, each with its prompt
    and most recent steps as context, though it was sampled with all of it (default: whole trajectories)."""
    micro_rows: int | None = None
    """Rows per device and gradient call; default: about 512 tokens."""
    row_buckets: int = 1
    """Row lengths that gradient calls are compiled at: n of the longest, its half, its quarter, ...; a call whose rows
    are all short takes a shorter one."""
    pack: bool = False
    """Several trajectories share a row where their tokens fit it, each seen by itself; a gradient call waits until its
    rows are full or the batch is complete."""

    # -- stages before RL
    warm_start_steps: int = 600
    """Supervised steps on scripted demonstrations; 0 starts from random weights."""
    warm_start_batch: int = 64
    """Demonstrations per supervised step."""
    warm_start_lr: float = 4e-3
    """Highest learning rate of the warm start; it rises over a fifth of the steps and falls to a tenth."""
    demonstrations: int = 20_000
    """Distinct demonstrations."""
    init_from: str | None = None
    """Folder of a run whose newest policy is the starting point, instead of a warm start."""
    preheat_rollouts: int | None = None
    """Rollouts of the starting policy the critic is preheated on (1024; 0: none)."""
    preheat_from: str | None = None
    """Folder of a run whose trajectories preheat the critic, instead of fresh ones."""
    preheat_epochs: int | None = None
    """Most passes over the preheating rollouts (8); ends earlier when held-out explained variance stops rising."""
    num_critic_only_steps: int | None = None
    """Batches on which only the critic learns before the policy moves (0)."""

    # -- model
    dim: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides --heads."""
    head_dim: int = 16
    """Width of one head; even."""
    mlp_dim: int = 192
    """Width of the gated MLP."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head."""
    untied: bool = False
    """An output head of its own, instead of the transposed embedding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; parameters, softmax and log-probs are float32 in both cases."""

    # -- devices
    devices: int | None = None
    """Devices of the mesh; on CPU, virtual devices (default: one per core)."""
    shard_params: bool = False
    """Cut parameters and optimizer states over the mesh."""
    remat: Literal["none", "block", "dots", "offload"] = "none"
    """What training computes again instead of keeping it: nothing, each block from its input, all but the weight
    products, or each block from an input that waits in the host's memory (GPU and TPU)."""
    scan_layers: bool = False
    """Train by one loop over the layers: compiled once whatever their number, for a copy of the parameters."""

    # -- book-keeping
    eval_every: int = 25
    """Updates between held-out evaluations during RL; 0: only before and after."""
    eval_tasks: int = 512
    """Held-out instances per evaluation."""
    checkpoint_every: int = 25
    """Updates between checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints that stay on disk."""

    # -- derived -------------------------------------------------------------------------------------------------

    def resolved(self) -> "RunConfig":
        """Every None that is in use gets its value; contradictions and options without effect raise ValueError."""
        check_effects(self)
        preset = PRESETS[self.preset]
        if (self.baseline or preset["baseline"]) != "critic":
            preset = {k: v for k, v in preset.items() if k not in CRITIC_ONLY}
        values = {k: v for k, v in preset.items() if getattr(self, k) is None}
        if self.forced_staleness is not None:
            values["max_staleness"] = self.forced_staleness
        if self.eps_high is not None or self.band is not None:
            for name in ("band", "eps_low", "eps_high"):
                values.pop(name, None)
        if self.policy_loss == "tis":
            values.pop("eps_low", None)
        if self.policy_loss not in (None, PRESETS[self.preset]["policy_loss"]):
            for name in ("outside", "denominator"):
                if self.policy_loss != "dis":
                    values.pop(name, None)
        config = dataclasses.replace(self, **values)
        grouped = config.baseline in GROUP_BASELINES
        critic = config.baseline == "critic"
        defaults = {
            "n_samples_per_prompt": 8 if grouped else 1,
            "max_staleness": 1,
            "drop_dead_groups": True if grouped else None,
            "outside": "clip" if config.policy_loss == "dis" else None,
            "denominator": "action" if config.policy_loss in ("dis", "tis") else None,
            "kl_target": 0.05 if config.kl != "off" else None,
            "kl_step": 0.1 if config.kl == "penalty" else None,
            "target_utilization": 0.92 if config.concurrency == "auto" else None,
            "env_sigma": 1.29 if config.env_seconds is not None else None,
            "lambda_alpha": 1.5 if critic and config.lambd is None else None,
        }
        if critic:
            defaults |= {
                "gae_over": "actions",
                "segments": "independent",
                "whiten": "off",
                "critic_targets": "mc",
                "critic_update": "batch",
                "critic_lambda": 1.0,
                "critic_steps_per_actor": 1 if config.critic_update == "arrival" else 2,
                "freeze_critic": "trunk/layers/*/attn/*",
                "critic_lr": 1.5 * config.lr,
                "critic_grad_clip": 10.0,
                "preheat_rollouts": None if config.preheat_from else 1024,
                "num_critic_only_steps": 0,
            }
        config = dataclasses.replace(config, **{k: v for k, v in defaults.items() if getattr(config, k) is None})
        if critic and config.preheat_epochs is None and (config.preheat_from or config.preheat_rollouts):
            config = dataclasses.replace(config, preheat_epochs=8)
        check_values(config)
        return config

    @property
    def has_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def grouped(self) -> bool:
        return self.baseline in GROUP_BASELINES

    def band_ends(self) -> tuple[float, float]:
        """(lo, hi) of a resolved configuration."""
        if self.band is not None:
            return parse_band(self.band)
        return 0.0 if self.eps_low is None else 1.0 - self.eps_low, 1.0 + self.eps_high

    def policy_lambda(self, num_action_tokens: int) -> float:
        """The fixed lambda, or `length_adaptive_lambda`: a device call for one number would cost more than its row."""
        if self.lambd is not None:
            return self.lambd
        return 1.0 - 1.0 / max((self.lambda_alpha or 1.5) * num_action_tokens, 1.0)

    def model(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=vocab_size,
            dim=self.dim,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            qk_norm=self.qk_norm,
            tied=not self.untied,
            dtype=self.dtype,
        )

    def compute(self) -> Compute:
        return Compute(remat=self.remat, scan_layers=self.scan_layers)

    def choices(self) -> Choices:
        critic = {}
        if self.has_critic:
            frozen = () if self.freeze_critic == "none" else tuple(self.freeze_critic.split(","))
            critic = dict(
                gae_over=self.gae_over,
                segments=self.segments,
                whiten=self.whiten,
                critic_targets=self.critic_targets,
                critic_update=self.critic_update,
                critic_passes=self.critic_steps_per_actor,
                value_clip=self.value_clip is not None,
                freeze=frozen,
            )
        return Choices(
            policy_loss=self.policy_loss,
            outside=self.outside or "clip",
            denominator=self.denominator or "action",
            sequence_mask=self.sequence_kl is not None,
            dual_clip=self.dual_clip is not None,
            baseline="critic" if self.has_critic else "given",
            kl=self.kl,
            **critic,
        )

    def numbers(self) -> Numbers:
        low, high = self.band_ends()
        return Numbers(
            band_low=low,
            band_high=high,
            sequence_kl=self.sequence_kl or 0.1,
            dual_clip=self.dual_clip or 3.0,
            gamma=self.gamma,
            critic_lambda=self.critic_lambda or 0.0,
            value_clip=self.value_clip or 0.2,
            kl_target=self.kl_target or 0.05,
            kl_step=0.1 if self.kl_step is None else self.kl_step,
            lr=self.lr,
            critic_lr=self.critic_lr or 0.0,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
            critic_grad_clip=self.critic_grad_clip or 10.0,
            adam_b1=self.adam_b1,
            adam_b2=self.adam_b2,
            adam_eps=self.adam_eps,
            lr_warmup=self.lr_warmup,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"config.json is damaged: {error}") from None
        if not isinstance(values, dict):
            raise ValueError("config.json is damaged: it holds no table of flags")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted(known - set(values) - set(ADDED))
        if unknown:
            raise ValueError(f"config.json has unknown keys: {', '.join(unknown)}")
        if missing:
            raise ValueError(
                f"config.json has no {', '.join(missing)}: it is damaged, or another version of sao_jax wrote it"
            )
        kinds = typing.get_type_hints(cls)
        for name, value in values.items():
            if not _fits(value, kinds[name]):
                raise ValueError(f"config.json is damaged: {name} is {value!r}; it must be {_allowed(kinds[name])}")
        return cls(**values)


def parse_band(text: str) -> tuple[float, float]:
    """ "lo,hi" as two numbers."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--band is {text!r}; it takes two numbers lo,hi, for example 0.1,10") from None
    return low, high


def _alternatives(kind: Any) -> tuple:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is Union else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is one of the type that a flag has."""
    for one in _alternatives(kind):
        if typing.get_origin(one) is Literal:
            if isinstance(value, str) and value in typing.get_args(one):
                return True
        elif type(value) is one or (one is float and type(value) is int):  # a bool is no int here
            return True
    return False


def _allowed(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return " or ".join(names.get(one) or ", ".join(typing.get_args(one)) for one in _alternatives(kind))
