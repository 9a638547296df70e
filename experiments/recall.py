"""What a run's policy remembered of what it was told, by how long ago that was; the last line is JSON.

python -m experiments.recall runs/NAME                 # the trajectories of training that were stored last
python -m experiments.recall runs/NAME --n 2048 --oldest
"""

import dataclasses
import json
import pathlib
import sys

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tyro

from experiments import _cli


@dataclasses.dataclass(frozen=True)
class Flags:
    run: tyro.conf.Positional[str]
    """Folder of the run."""
    n: int = 512
    """Trajectories to count over."""
    oldest: bool = False
    """The first ones that were stored instead of the last."""


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    if flags.n < 1:
        raise ValueError(f"--n is {flags.n}; it must be at least 1")
    folder = pathlib.Path(flags.run)
    if not (folder / "ledger.sqlite").exists():
        raise ValueError(f"{folder} is not a run folder: it has no ledger.sqlite")

    from rich.console import Console

    from sao_jax.data.segments import read_trajectory
    from sao_jax.data.storage import TrajectoryStore
    from sao_jax.report.recall import recall_by_distance, recall_table
    from sao_jax.runtime.ledger import Ledger

    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger, TrajectoryStore(folder / "trajectories") as store:
        stored = ledger.stored()
        parts = []
        for rollout in stored[: flags.n] if flags.oldest else stored[-flags.n :]:
            stop.check()
            parts.append(read_trajectory(store, rollout.location).reward_parts)
    recall = recall_by_distance(parts)
    if not recall:
        raise ValueError(f"none of {len(parts)} trajectories of {folder} was asked for what it had been told")
    Console().print(recall_table(recall, f"{folder.resolve().name}, {len(parts)} trajectories"))
    print(json.dumps({"trajectories": len(parts), "recall": recall}))


if __name__ == "__main__":
    _cli.main(main)
