"""Trains for a while with rollout processes and watches memory and open files of every process.

python -m experiments.soak                            # 30 minutes, two rollout processes, one killed now and then
python -m experiments.soak --minutes 5 --kill-every 0
"""

import csv
import dataclasses
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import _cli
from experiments._ablations import ENDLESS
from experiments.ablate import COMMAND, ROOT, arguments

SAMPLE_S = 5.0
SETTLING = 0.3  # share of a process's life in which caches still fill
GROWTH_MB, GROWTH_FILES = 20.0, 2.0  # between the means of the first and the last third after that


@dataclasses.dataclass(frozen=True)
class Flags:
    minutes: float = 30.0
    """How long."""
    workers: int = 2
    """Rollout processes."""
    kill_every: float = 300.0
    """Seconds between kills of a rollout process (0: none is killed)."""
    results: str = "results"
    """Folder for the table and the picture."""


@dataclasses.dataclass(frozen=True)
class Sample:
    seconds: float
    memory_mb: float  # resident
    files: int


def processes(run: int, psutil) -> dict[int, str]:
    """The run and its rollout processes: (pid, name)."""
    try:
        children = psutil.Process(run).children(recursive=True)
        workers = [p.pid for p in children if "sao_jax.runtime.worker" in p.cmdline()]
    except psutil.NoSuchProcess:
        return {}
    return {run: "run"} | {pid: "rollout process" for pid in workers}


def growth(samples: list[Sample]) -> tuple[float, float]:
    """(MB, files) by which the last third of a process's settled life lies above the first."""
    settled = samples[int(SETTLING * len(samples)) :]
    third = max(1, len(settled) // 3)
    first, last = settled[:third], settled[-third:]
    return tuple(
        statistics.fmean(getattr(s, name) for s in last) - statistics.fmean(getattr(s, name) for s in first)
        for name in ("memory_mb", "files")
    )


def watch(flags: Flags, folder: pathlib.Path, check, psutil) -> tuple[dict[tuple[int, str], list[Sample]], int]:
    """Samples by process, and how many rollout processes were killed."""
    from rich.progress import Progress

    found: dict[tuple[int, str], list[Sample]] = {}
    words = arguments(ENDLESS | dict(checkpoint_every=20, workers=flags.workers))
    command = [*COMMAND, *words, "--run-dir", str(folder)]
    begin, killed, kill_at = time.monotonic(), 0, flags.kill_every
    with (folder.parent / "output.txt").open("w") as output, Progress() as progress:
        bar = progress.add_task("soak", total=flags.minutes * 60)
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            while (now := time.monotonic() - begin) < flags.minutes * 60:
                check()
                if run.poll() is not None:
                    raise _cli.UserError(f"the run ended after {now:.0f} s: {_last_line(output.name)}")
                there = processes(run.pid, psutil)
                for pid, name in there.items():
                    try:
                        p = psutil.Process(pid)
                        sample = Sample(now, p.memory_info().rss / 2**20, p.num_fds())
                    except psutil.NoSuchProcess:
                        continue
                    found.setdefault((pid, name), []).append(sample)
                if flags.kill_every and now > kill_at:
                    victims = [pid for pid, name in there.items() if name != "run"]
                    if victims:
                        os.kill(victims[killed % len(victims)], signal.SIGKILL)
                        killed += 1
                    kill_at += flags.kill_every
                progress.update(bar, completed=now)
                wake = time.monotonic() + SAMPLE_S
                while time.monotonic() < wake:
                    check()
                    time.sleep(0.1)
        finally:
            run.terminate()
            try:
                run.wait(60)
            except subprocess.TimeoutExpired:
                run.kill()
    return found, killed


def _last_line(path: str) -> str:
    return (pathlib.Path(path).read_text(errors="replace").strip().splitlines() or [""])[-1]


def write(found: dict[tuple[int, str], list[Sample]], folder: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["process", "kind", "seconds", "memory_mb", "files"])
        for (pid, name), samples in found.items():
            for s in samples:
                writer.writerow([pid, name, round(s.seconds, 1), round(s.memory_mb, 1), s.files])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for (_, name), samples in found.items():
        colour = "C0" if name == "run" else "C1"
        minutes = [s.seconds / 60 for s in samples]
        axes[0].plot(minutes, [s.memory_mb for s in samples], color=colour)
        axes[1].plot(minutes, [s.files for s in samples], color=colour)
    for axis, label in zip(axes, ("resident memory [MB]", "open files"), strict=True):
        axis.set(xlabel="minutes", ylabel=label, ylim=(0, None))
    axes[0].plot([], [], color="C0", label="run")
    axes[0].plot([], [], color="C1", label="rollout process")
    axes[0].legend()
    figure.savefig(folder / "soak.png", dpi=100)
    print(folder / "soak.png")


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    for name, least in (("minutes", 0.5), ("workers", 1), ("kill_every", 0.0)):
        if not getattr(flags, name) >= least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(flags, name)}; it must be at least {least:g}")
    try:
        import psutil
    except ImportError:
        raise ValueError("this needs the package psutil: pip install 'sao_jax[telemetry]'") from None
    from sao_jax.runtime.ledger import Ledger

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "run"
        found, killed = watch(flags, folder, stop.check, psutil)
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            counts = ledger.check()
    write(found, pathlib.Path(flags.results) / "soak")
    whole = max(len(samples) for samples in found.values())
    grew = []
    for (pid, name), samples in found.items():
        if len(samples) < whole / 4:
            continue  # killed, or started, too late to say anything
        memory, files = growth(samples)
        grew.append(memory > GROWTH_MB or files > GROWTH_FILES)
        print(
            f"{name} {pid}: {samples[-1].memory_mb:.0f} MB ({memory:+.1f}), {samples[-1].files} files ({files:+.1f}), "
            f"over {samples[-1].seconds - samples[0].seconds:.0f} s"
        )
    print(f"{counts['trained']} trained, {counts['dropped']} dropped; {killed} rollout processes killed")
    if any(grew):
        raise _cli.UserError("memory or open files of a process have grown")


if __name__ == "__main__":
    _cli.main(main)
