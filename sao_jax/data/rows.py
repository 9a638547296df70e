"""What the device sees of a trajectory: right-padded rows of fixed length, one unless its context is bounded."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from sao_jax.data.trajectory import NoActionError, Trajectory
from sao_jax.data.windows import windows_of

# name -> (dtype, whether it has one entry per token); L is the padded length
ROW_FIELDS: dict[str, tuple[type, bool]] = {
    "tokens": (np.int32, True),
    "action_mask": (np.bool_, True),
    "rollout_logp": (np.float32, True),
    "rewards": (np.float32, True),
    "segment_ids": (np.int32, True),
    "length": (np.int32, False),
    "lambda_": (np.float32, False),
    "truncated": (np.bool_, False),
    "advantage": (np.float32, False),
    "staleness": (np.float32, False),
    "temperature": (np.float32, False),
    "followed": (np.bool_, False),
    "seam": (np.bool_, False),
}


def make_row(t: Trajectory, *, length: int, **numbers) -> dict[str, np.ndarray]:
    """A trajectory as the one row that it fits into; `numbers` as in `make_rows`, and ValueError if it does not fit."""
    if t.length > length:
        raise ValueError(f"trajectory of {t.length} tokens does not fit a row of {length}")
    return make_rows(dataclasses.replace(t, windows=()), length=length, **numbers)[0]


def make_rows(
    t: Trajectory,
    *,
    length: int,
    steps_per_segment: int,
    lambda_: float,
    advantage: float = 0.0,
    staleness: float = 0.0,
) -> list[dict[str, np.ndarray]]:
    """A trajectory as arrays of the types in ROW_FIELDS, per-token ones right-padded to [length]: a row per window.

    A row holds its window's context, which is no action there, and its own tokens; every action token of the trajectory
    is one in exactly one row. Padding is token 0, not an action, and keeps the last segment's id, so that no seam
    appears at the end. `followed`: the next row's first action token comes next after this row's last; `seam`: it is in
    another segment. `lambda_` is the policy's lambda for this trajectory; `advantage` is one given from outside (0:
    unused), `staleness` the age of its oldest token in versions.

    Raises:
      NoActionError: no action token.
      ValueError: aborted (never trained), sampled greedily (no ratio exists), or chosen by something else than the
        policy.
    """
    if t.end == "aborted":
        raise ValueError(f"an aborted trajectory ({t.reason or 'no reason given'}) is not trained")
    if not t.trainable:
        raise ValueError(f"a trajectory whose actions were chosen by {t.sampler!r}, not by the policy, is not trained")
    if not t.temperature > 0:
        raise ValueError(f"temperature {t.temperature} leaves no log-probabilities to train on; it must be above 0")
    if not np.any(t.action_mask):
        raise NoActionError(f"no action token among the {t.length} tokens of task {t.task!r}")
    windows = windows_of(t.action_mask, t.step_ids, t.windows, length)
    segments = t.segment_ids(steps_per_segment)
    common = dict(lambda_=lambda_, advantage=advantage, temperature=t.temperature, staleness=staleness)
    rows = []
    for window, after in zip(windows, [*windows[1:], None], strict=True):
        row, n, index = blank_row(length), window.length, window.index
        own = index >= window.position
        row["tokens"][:n] = t.tokens[index]
        for name in ("action_mask", "rollout_logp", "rewards"):
            row[name][:n] = np.where(own, getattr(t, name)[index], 0)
        row["segment_ids"][:] = segments[index[-1]]
        row["segment_ids"][:n] = segments[index]
        ends = t.end == "truncated" and after is None
        scalars = common | dict(length=n, truncated=ends, followed=after is not None)
        if after is not None:
            first = after.position + int(np.argmax(t.action_mask[after.position :]))
            scalars["seam"] = segments[first] != segments[window.end - 1]
        rows.append(row | {name: np.asarray(value, ROW_FIELDS[name][0]) for name, value in scalars.items()})
    return rows


def blank_row(length: int) -> dict[str, np.ndarray]:
    """A row without any action token, to fill up a batch: it adds exactly nothing to any sum or count.

    Length and temperature are 1, so that indexing the last token and dividing by the temperature are safe.
    """
    row = {name: np.zeros((length,) if per_token else (), dtype) for name, (dtype, per_token) in ROW_FIELDS.items()}
    return row | {"length": np.asarray(1, np.int32), "temperature": np.asarray(1, np.float32)}


def stack_rows(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows of equal length as one batch: every field gains a leading axis."""
    return {name: np.stack([row[name] for row in rows]) for name in ROW_FIELDS}


def last_index(mask: np.ndarray) -> np.ndarray:
    """Largest index with mask 1 along the last axis, int32 [...]; -1 where there is none.

    Counting (sum - 1) would be right only for masks without gaps that start at 0.
    """
    mask = np.asarray(mask, bool)
    return np.max(np.where(mask, np.arange(mask.shape[-1]), -1), axis=-1, initial=-1).astype(np.int32)
