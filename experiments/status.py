"""What a run is doing: engines, versions, utilisation, the oldest rollouts. Reads its folder and changes nothing.

python -m experiments.status runs/NAME
python -m experiments.status runs/NAME --watch 2      # again every two seconds, until Ctrl-C
"""

import dataclasses
import pathlib
import sys
import time

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tyro

from experiments import _cli

OLDEST = 5


@dataclasses.dataclass(frozen=True)
class Flags:
    run: tyro.conf.Positional[str]
    """Folder of the run."""
    watch: float | None = None
    """Show it again every so many seconds."""


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    if flags.watch is not None and not 0.1 <= flags.watch <= 3600:
        raise ValueError(f"--watch is {flags.watch}; it must lie between 0.1 and 3600 seconds")
    folder = pathlib.Path(flags.run)
    if not (folder / "ledger.sqlite").exists():
        raise ValueError(f"{folder} is not a run folder: it has no ledger.sqlite")

    from rich.console import Console

    from sao_jax.report.live import status_view
    from sao_jax.runtime.ledger import Ledger

    console = Console()
    while True:
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            oldest = [(r.id, r.task, r.attempt, r.started) for r in ledger.running()[:OLDEST]]
            view = status_view(folder, ledger.counts(), oldest)
        if flags.watch is not None and console.is_terminal:
            console.clear()
        console.print(view)
        if flags.watch is None:
            return
        wake = time.monotonic() + flags.watch
        while time.monotonic() < wake:
            stop.check()
            time.sleep(0.05)


if __name__ == "__main__":
    _cli.main(main)
