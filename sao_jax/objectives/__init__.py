"""Pure functions on arrays: weights, losses, advantages, divergences, statistics. No I/O, models or
configs."""

from sao_jax.objectives.advantages import corrected_returns, gae, length_adaptive_lambda, segmented_gae
from sao_jax.objectives.diagnostics import band_counts, drift_sums, largest_ratio, scored_tokens
from sao_jax.objectives.divergences import (
    categorical_kl,
    entropy,
    kl_divergence,
    masked_log_softmax,
    proportional_kl_coefficient,
    rollout_kl,
    update_kl_coefficient,
)
from sao_jax.objectives.groups import check_group_sizes, group_advantages, groups_with_signal
from sao_jax.objectives.neighbours import (
    beta_tracker,
    cispo_loss,
    decoupled_ppo_loss,
    gspo_loss,
    icepop_loss,
    interpolated_logp,
    sequence_mask,
)
from sao_jax.objectives.policy import clipped_ratio_loss, policy_loss
from sao_jax.objectives.rewards import soft_length_penalty
from sao_jax.objectives.smoothing import interpolate, smooth_update, smooth_update_with_kl
from sao_jax.objectives.statistics import (
    effective_sample_size,
    masked_mean,
    masked_moments,
    masked_sum,
    reduce_rows,
    whiten,
)
from sao_jax.objectives.value import explained_variance, value_clip_count, value_error, value_loss
from sao_jax.objectives.weights import (
    band_from_offsets,
    importance_weights,
    sequence_ratio,
    truncated_weights,
)

__all__ = [
    "band_counts",
    "band_from_offsets",
    "beta_tracker",
    "categorical_kl",
    "check_group_sizes",
    "cispo_loss",
    "clipped_ratio_loss",
    "corrected_returns",
    "decoupled_ppo_loss",
    "drift_sums",
    "effective_sample_size",
    "entropy",
    "explained_variance",
    "gae",
    "group_advantages",
    "groups_with_signal",
    "gspo_loss",
    "icepop_loss",
    "importance_weights",
    "interpolate",
    "interpolated_logp",
    "kl_divergence",
    "largest_ratio",
    "length_adaptive_lambda",
    "masked_log_softmax",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "policy_loss",
    "proportional_kl_coefficient",
    "reduce_rows",
    "rollout_kl",
    "scored_tokens",
    "segmented_gae",
    "sequence_mask",
    "sequence_ratio",
    "smooth_update",
    "smooth_update_with_kl",
    "soft_length_penalty",
    "truncated_weights",
    "update_kl_coefficient",
    "value_clip_count",
    "value_error",
    "value_loss",
    "whiten",
]
