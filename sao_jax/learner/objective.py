"""What is optimised: the static choices that select a program, and the numbers that programs take as arguments.

Choices change the compiled program; numbers are traced, so a sweep over them compiles nothing.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Choices:
    """Static structure of the update.

    Attributes:
      policy_loss: "dis" weights the policy gradient by detached importance weights; "ppo" is the clipped ratio;
        "tis" truncates the weights from above only; "gspo" clips the ratio of whole sequences; "a3po" is PPO against a
        proximal policy between the sampling and the current one.
      outside: rule of the weight band for "dis".
      denominator: token count the policy loss is divided by: all action tokens, or those inside the band.
      sequence_mask: sequences that are too far from the policy that sampled weigh nothing ("dis" only).
      dual_clip: "ppo" only: bounds the loss of tokens with a negative advantage.
      baseline: "critic" computes advantages from values; "given" reads one advantage per row, computed by the host.
      gae_over: the tokens that advantages are propagated over: actions, or all from the first action on (ablation).
      segments: how advantages cross a segment's seam.
      whiten: standardise advantages over the batch (moves the policy gradient to the boundary) or by running moments.
      kl: "smooth" shortens the step, "penalty" adds an adaptive penalty, "off" does neither.
      critic_targets: Monte-Carlo returns, or importance-corrected returns.
      critic_update: one step per batch (and repeated passes), or one per arriving trajectory.
      critic_passes: critic steps per policy step.
      value_clip: the clipped form of the value loss.
      freeze: path patterns of critic parameters that stay fixed while the policy learns.
    """

    policy_loss: Literal["dis", "ppo", "tis", "gspo", "a3po"] = "dis"
    outside: Literal["clip", "mask", "mask_sign"] = "clip"
    denominator: Literal["action", "kept"] = "action"
    sequence_mask: bool = False
    dual_clip: bool = False
    baseline: Literal["critic", "given"] = "critic"
    gae_over: Literal["actions", "tokens"] = "actions"
    segments: Literal["independent", "carried"] = "independent"
    whiten: Literal["off", "batch", "running"] = "off"
    kl: Literal["smooth", "penalty", "off"] = "smooth"
    critic_targets: Literal["mc", "dis"] = "mc"
    critic_update: Literal["batch", "arrival"] = "batch"
    critic_passes: int = 2
    value_clip: bool = False
    freeze: tuple[str, ...] = ("trunk/layers/*/attn/*",)

    @property
    def has_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def policy_at_boundary(self) -> bool:
        """Whether the policy gradient needs the whole batch."""
        return self.whiten == "batch"

    @property
    def separate_penalty(self) -> bool:
        """Whether the KL penalty, which is over all action tokens, is divided by another count than the policy loss."""
        return self.kl == "penalty" and self.denominator == "kept" and self.policy_loss != "ppo"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Traced numbers of the update. Learning rates are per optimizer step; divergences are in nats per token."""

    band_low: float = 0.1
    band_high: float = 10.0
    sequence_kl: float = 0.1
    dual_clip: float = 3.0
    gamma: float = 1.0
    critic_lambda: float = 1.0
    value_clip: float = 0.2
    kl_target: float = 0.05
    kl_step: float = 0.1
    lr: float = 1e-3
    critic_lr: float = 5e-3
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    critic_grad_clip: float = 10.0
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    lr_warmup: float = 0.0

    def traced(self) -> dict:
        return {k: jnp.float32(v) for k, v in dataclasses.asdict(self).items()}
