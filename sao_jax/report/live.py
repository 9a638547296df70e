"""What a run is doing now, from its folder: who does what, how old it is, what it samples with."""

import json
import math
import os
import time
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sao_jax.report.text import duration, number, percent, printable

SILENT_S = 15.0  # the loop writes its status every two seconds; checkpoints take longer


def read_status(folder: Path) -> dict | None:
    """The newest status of a run; None if it has written none, or a damaged one."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return status if isinstance(status, dict) else None


def is_alive(status: dict) -> bool:
    """Whether the process that wrote the status is still there (on this machine)."""
    try:
        os.kill(int(status["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def device(engine: dict) -> str:
    """Temperature and free memory, as far as they are known."""
    temperature, free = engine.get("temperature_c", math.nan), engine.get("free_memory", math.nan)
    parts = ["" if math.isnan(temperature) else f"{temperature:.0f} C", "" if math.isnan(free) else f"{free:.0%} free"]
    return ", ".join(filter(None, parts)) or "-"


def status_view(folder: Path, counts: dict, oldest: list, now: float | None = None):
    """Tables of the status, the ledger's `counts` and its `oldest` running rollouts (id, task, attempt, start)."""
    now = time.time() if now is None else now
    rollouts = ", ".join(f"{number(v)} {k.replace('_', ' ')}" for k, v in counts.items())
    if quarantined := len(list((folder / "quarantine").glob("*.json"))):
        rollouts += f" ({number(quarantined)} in quarantine/)"
    if not (folder / "status.json").exists():
        return Text(printable(f"{folder}: {rollouts}; no status yet: the loop has not begun"))
    try:
        return _tables(folder, read_status(folder) or {}, rollouts, oldest, now)
    except (KeyError, TypeError, ValueError, AttributeError):
        return Text(printable(f"{folder}: {rollouts}; its status.json is damaged"))


def _tables(folder: Path, status: dict, rollouts: str, oldest: list, now: float):
    age, stage = now - status["time"], status.get("stage", "RL")
    # Only the loop tells its status all the time: a warm start's first step and the compiler are silent for minutes.
    silent, ended = stage == "RL" and age > SILENT_S, not is_alive(status)
    state = "ended" if ended else f"silent for {duration(age)}" if silent else "running"
    waiting = f", {status['waiting']} finished trajectories wait" if "waiting" in status else ""
    rows = [("run", f"{folder} ({state})")]
    if "stage" in status:
        rows.append(("stage", _stage(status, status["time"] if ended else now)))
    rows += [("rollouts", rollouts), ("policy", f"version {status['version']}{waiting}")]
    if "utilization" in status:
        rows += [
            ("devices", f"busy {percent(status['utilization'])}, by slots {percent(status['utilization_slots'])}"),
            ("concurrency", f"{status['concurrency']} ({status['reason']}), room for {status['room']}"),
        ]
    head = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        head.add_row(name, printable(value))
    columns = "engine", "where", "running", "version", "busy", "device", "task takes", "heard of", "failures"
    engines = Table(*columns, box=None)
    for e in status["engines"]:
        engines.add_row(
            printable(e["name"]), printable(e.get("where", f"process {status['pid']}")),
            f"{e['running']} of {e['slots']}", "-" if e["version"] is None else str(e["version"]),
            percent(e["utilization"]) if "utilization" in e else "-", device(e), duration(e.get("latency_s")),
            duration(e["heard_s"] + age) + " ago" if "heard_s" in e else "-", str(e.get("failures", "-")),
        )  # fmt: skip
    ages = Table("oldest running rollout", "task", "attempt", "age", box=None)
    for rollout, task, attempt, start in oldest:
        ages.add_row(str(rollout), printable(task), str(attempt), duration(now - start))
    return Group(head, Text(), engines, Text(), ages)


def _stage(status: dict, until: float) -> str:
    """What the run does, how far it has come, and for how long."""
    count = f", {number(status['done'])} of {number(status['total'])} {status['unit']}" if status["unit"] else ""
    return f"{status['stage']}{count}, for {duration(until - status['since'])}"
