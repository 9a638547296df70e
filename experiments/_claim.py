"""What a claim is, and what measuring one gives."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

Interval = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Request:
    """How a claim is to be measured: with which sizes, where its runs lie, and on how many seeds (None: its own)."""

    quick: bool
    results: pathlib.Path
    check: Callable[[], None]
    seeds: int | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """`effect`: (mean, low, high) of what `reported` speaks of, positive where it goes in the reported direction;
    `value`, `baseline`: the two sides; `sizes`: what the figures depend on."""

    effect: Interval
    value: float
    baseline: float
    seeds: list[int]
    sizes: dict[str, Any]
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    null: float = 0.0  # the effect that would mean nothing


@dataclasses.dataclass(frozen=True)
class Claim:
    """`reported` and `reported_baseline` are the two sides as reported, `effect` is what lies between them, in `unit`;
    None: no number was reported. `measured_in`: the unit of the two sides as measured."""

    text: str
    reported: float | None
    reported_baseline: float | None
    effect: float | None
    unit: str
    measure: Callable[..., Measured]
    measured_in: str = ""


def must(error: str) -> None:
    """Raises ValueError with `error` unless it is empty."""
    if error:
        raise ValueError(error)
