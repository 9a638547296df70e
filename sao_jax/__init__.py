"""Single-trajectory asynchronous optimisation of language-model agents, in JAX.

The pure functions and the few types by name. A name is imported when it is first used, so that `import
sao_jax` starts no backend and loads neither JAX nor Flax nor Orbax: entry points can still choose the
platform, and workers start fast.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sao_jax.data.protocols import Environment, Outcome, TaskFamily, Tokenizer
    from sao_jax.data.trajectory import Trajectory, TrajectoryBuilder, load_trajectory, save_trajectory
    from sao_jax.objectives import (
        clipped_ratio_loss,
        corrected_returns,
        effective_sample_size,
        explained_variance,
        gae,
        group_advantages,
        importance_weights,
        kl_divergence,
        length_adaptive_lambda,
        policy_loss,
        segmented_gae,
        smooth_update,
        truncated_weights,
        update_kl_coefficient,
        value_error,
        value_loss,
        whiten,
    )

__all__ = [
    "Environment",
    "Outcome",
    "TaskFamily",
    "Tokenizer",
    "Trajectory",
    "TrajectoryBuilder",
    "clipped_ratio_loss",
    "corrected_returns",
    "effective_sample_size",
    "explained_variance",
    "gae",
    "group_advantages",
    "importance_weights",
    "kl_divergence",
    "length_adaptive_lambda",
    "load_trajectory",
    "policy_loss",
    "save_trajectory",
    "segmented_gae",
    "smooth_update",
    "truncated_weights",
    "update_kl_coefficient",
    "value_error",
    "value_loss",
    "whiten",
]

_ELSEWHERE = {
    **dict.fromkeys(("Environment", "Outcome", "TaskFamily", "Tokenizer"), "sao_jax.data.protocols"),
    **dict.fromkeys(
        ("Trajectory", "TrajectoryBuilder", "load_trajectory", "save_trajectory"), "sao_jax.data.trajectory"
    ),
}


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'sao_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "sao_jax.objectives")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
