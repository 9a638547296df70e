"""Reads what a run wrote: its settings, its metric lines, its evaluation. Tolerant, since runs get killed mid-line."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from sao_jax.report.intervals import wilson

# Lines of updates of either kind; their `rollouts` only ever grow.
UPDATES = ("rl", "critic_only")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder's readable part.

    Attributes:
      folder: where it lies.
      config: `config.json`, empty if there is none.
      metrics: the lines of `metrics.jsonl` in order, without those that a resumed run wrote anew.
      evaluations: records of `evaluation.json`, keys as in an eval line without "eval/".
      unreadable: lines that were no JSON object, e.g. cut by a kill.
    """

    folder: Path
    config: Mapping
    metrics: list[dict]
    evaluations: list[dict]
    unreadable: int = 0

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def read_run(folder) -> Run:
    """Reads a run folder.

    Raises:
      ValueError: if it is no folder with a `metrics.jsonl`, or `config.json` or `evaluation.json` is not JSON.
    """
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no metrics.jsonl")
    metrics, unreadable = parse_lines(path.read_text(encoding="utf-8", errors="replace"))
    evaluation = read_json(folder / "evaluation.json", [])
    records = evaluation if isinstance(evaluation, list) else [evaluation]
    evaluations = [e for r in records if isinstance(r, dict) for e in with_greedy(r)]
    return Run(folder, read_json(folder / "config.json", {}), without_rewound(metrics), evaluations, unreadable)


def read_json(path: Path, default):
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def parse_lines(text: str) -> tuple[list[dict], int]:
    """(JSON objects, number of lines that are none)."""
    found, bad = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            bad += 1
    return found, bad


def without_rewound(metrics: Iterable[dict]) -> list[dict]:
    """Drops lines of updates that the run, resumed from a checkpoint, wrote a second time.

    Eval lines stay: who reads them takes the last one of a place.
    """
    kept: list[dict] = []
    newest = -math.inf
    for line in metrics:
        rollouts = finite(line.get("rollouts"))
        if line.get("stage") in UPDATES and rollouts is not None:
            if rollouts <= newest:
                kept = [x for x in kept if x.get("stage") not in UPDATES or (finite(x.get("rollouts")) or 0) < rollouts]
            newest = rollouts
        kept.append(line)
    return kept


def with_greedy(record: dict) -> list[dict]:
    """A record of `evaluation.json` as one record for each way of sampling."""
    record = {k.removeprefix("eval/"): v for k, v in record.items()}
    rate = record.pop("greedy_success", None)
    if rate is None:
        return [record]
    shared = {k: record[k] for k in ("n", "version", "rollouts") if k in record}
    return [record, {"success": rate, "greedy": True} | shared]


def finite(x) -> float | None:
    """`x` as a float, None where it is missing, no number, or not finite."""
    if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x):
        return float(x)
    return None


def of_stage(metrics: Iterable[dict], stage: str) -> list[dict]:
    return [line for line in metrics if line.get("stage") == stage]


def values(lines: Iterable[dict], key: str) -> np.ndarray:
    """The finite values of `key`, in order."""
    return np.array([v for v in (finite(line.get(key)) for line in lines) if v is not None])


def series(lines: Iterable[dict], key: str, x: str = "rollouts") -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of the lines where both are finite."""
    pairs = [(finite(line.get(x)), finite(line.get(key))) for line in lines]
    pairs = [p for p in pairs if None not in p]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


def last(found: np.ndarray) -> float | None:
    return float(found[-1]) if len(found) else None


def setting(config: Mapping, name: str):
    """The first value called `name` in a configuration of any depth; None if there is none."""
    if name in config:
        return config[name]
    nested = (setting(v, name) for v in config.values() if isinstance(v, Mapping))
    return next((v for v in nested if v is not None), None)


def evaluation(line: Mapping) -> dict | None:
    """success, low, high, n, greedy, version, rollouts of an eval line; None without a success rate.

    Without bounds in the line, Wilson's interval fills them in where n is known.
    """
    get = lambda key: finite(line.get(f"eval/{key}", line.get(key)))  # noqa: E731
    success, low, high, n = get("success"), get("low"), get("high"), get("n")
    if success is None:
        return None
    if (low is None or high is None) and n is not None and n >= 1 and 0 <= success <= 1:
        low, high = wilson(success * int(n), int(n))
    greedy = bool(line.get("eval/greedy", line.get("greedy", False)))
    found = {"success": success, "low": low, "high": high, "n": None if n is None else int(n), "greedy": greedy}
    return found | {"version": get("version"), "rollouts": get("rollouts")}


def stage_seconds(metrics: Iterable[dict]) -> dict[str, float]:
    """Wall clock by stage: the time between two lines belongs to the stage of the later one.

    A clock that steps back, as after a resume, adds nothing for that step.
    """
    seconds: dict[str, float] = {}
    earlier = 0.0
    for line in metrics:
        now = finite(line.get("time_s"))
        if now is None:
            continue
        stage = str(line.get("stage", "other"))
        seconds[stage] = seconds.get(stage, 0.0) + max(0.0, now - earlier)
        earlier = now
    return seconds


def write_whole(path: Path, data: bytes) -> Path:
    """Writes a file so that a reader sees the old or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    os.replace(partial, path)
    return path
