"""Rollouts that failed in all of their attempts, each with what it ended in, in the run's folder `quarantine`.

ROLLOUT.json says which task it was and why its attempts failed; ROLLOUT.safetensors, where a segment had been stored,
is the trajectory up to its newest segment's end (`sao_jax.data.trajectory.load_trajectory`). All of it follows from the
ledger and the stored trajectories, so that what a full disk or a kill has left out is written at the next resume.
"""

import json
import pathlib
import time

from sao_jax.data.segments import read_trajectory
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.trajectory import save_trajectory
from sao_jax.runtime.checkpoints import write_durably
from sao_jax.runtime.ledger import Ledger

FOLDER = "quarantine"


def quarantine(folder: pathlib.Path, ledger: Ledger, store: TrajectoryStore, rollout: int, index: int) -> pathlib.Path:
    """Writes the files of a dropped rollout of training instance `index`; returns the path of ROLLOUT.json.

    Raises OSError if the disk does not take them, ValueError if the stored part is damaged.
    """
    path = folder / FOLDER / f"{rollout}.json"
    path.parent.mkdir(exist_ok=True)
    row, segments = ledger.rollout(rollout), ledger.segments(rollout)
    part = path.with_suffix(".safetensors") if segments else None
    if part is not None:
        write_durably(part, save_trajectory(read_trajectory(store, segments)))
    record = {
        "rollout": row.id,
        "task": row.task,
        "index": index,
        "group": row.group,
        "sample": row.sample,
        "attempts": row.attempt + 1,
        "failures": ledger.failures(rollout),
        "trajectory": None if part is None else part.name,
        "time": time.time(),
    }
    write_durably(path, json.dumps(record, indent=1))
    return path


def not_quarantined(folder: pathlib.Path, ledger: Ledger) -> list[int]:
    """Rollouts that failed in all of their attempts and have no file."""
    return [row.id for row in ledger.dropped("failed") if not (folder / FOLDER / f"{row.id}.json").exists()]
