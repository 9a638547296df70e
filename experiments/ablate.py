"""Compares methods at equal rollouts and at equal wall clock, over paired seeds.

python -m experiments.ablate                              # SAO, GRPO, GRPO + DIS, REINFORCE; 10 seeds
python -m experiments.ablate --preset components --seeds 5
python -m experiments.ablate --list                       # presets, methods and their flags
python -m experiments.ablate --quick                      # a few minutes, to see that it works

One cell is one run of experiments.train; finished cells are kept, and called again the command goes on where it
stopped. Every seed has one warm start, which all its methods begin with. Wall clock is that of a machine of one core:
each run has a core to itself and is charged its CPU time and its environments' time as drawn, evaluations not counted.
So runs may go side by side. Where environments are real, runs that are compared by the wall's clock go one by one.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, Literal

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import _cli
from experiments._ablations import BASE, BUDGET, FIRST_SEED, METHODS, PRESETS, STARTS, Preset
from sao_jax.envs.registry import make_family
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.ledger_file import is_being_written

COMMAND = (sys.executable, "-m", "experiments.train")
QUICK_BUDGET = 768
STOPPING_S = 120.0
ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Flags:
    preset: str = "dis-vs-grpo"
    """Which comparison: see --list, or all."""
    seeds: int | None = None
    """Seeds per method (default: 10 for dis-vs-grpo, 5 for most others)."""
    budget: Literal["rollouts", "wallclock", "both"] = "both"
    """What is held equal in the tables."""
    rollouts: int | None = None
    """Rollouts per run, preheating included (default: the preset's)."""
    methods: str | None = None
    """Only these methods, by comma."""
    results: str = "results"
    """Folder for tables, curves and runs."""
    jobs: int | None = None
    """Runs at the same time (default: one per core; one, where environments are real and the wall's clock counts)."""
    quick: bool = False
    """Small budgets and two seeds."""
    list: bool = False
    """Print presets and methods and stop."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a method, the values of the grid, a seed."""

    method: str
    point: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def name(self) -> str:
        return ", ".join([self.method, *(f"{k}={v}" for k, v in self.point), f"seed {self.seed}"])


def cells(preset: Preset, methods: tuple[str, ...], seeds: int, first: int = 0) -> list[Cell]:
    """Seed by seed, so that a stopped comparison has whole pairs."""
    points = [tuple(zip(preset.grid, values, strict=True)) for values in product(*preset.grid.values())]
    return [Cell(m, p, first + s) for s in range(seeds) for p in points for m in methods]


def cell_flags(preset: Preset, cell: Cell, budget: int, quick: bool) -> dict[str, Any]:
    """Flags of experiments.train for a cell. `budget` counts preheating rollouts as well."""
    flags = BASE | METHODS[cell.method] | preset.flags | dict(cell.point) | {"seed": cell.seed}
    if quick:
        flags |= {"eval_tasks": 64, "eval_every": 4}
        if flags.get("preheat_rollouts"):
            flags["preheat_rollouts"] = 64
    flags |= {"rollouts": budget - (flags.get("preheat_rollouts") or 0)}
    return {name: value for name, value in flags.items() if value is not None}


def run_name(cell: Cell, flags: Mapping[str, Any]) -> str:
    """Folder of a run: its method, and what of its flags is not the method's own.

    So two presets that ask for the same run share it.
    """
    usual = BASE | METHODS[cell.method]
    usual |= {"rollouts": BUDGET - (usual.get("preheat_rollouts") or 0), "seed": cell.seed}
    other = {k: flags.get(k) for k in sorted({*flags, *usual}) if flags.get(k) != usual.get(k)}
    return plain_name("_".join([cell.method, *(f"{k}={v}" for k, v in other.items()), f"s{cell.seed}"]))


def plain_name(text: str) -> str:
    """As a folder's name on any system."""
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in text)


def warm_flags(task: str, seed: int, quick: bool) -> dict[str, Any]:
    """The run that only makes the starting policy of a task and seed."""
    flags = dict(task=task, seed=seed, baseline="batch_mean", rollouts=0, eval_tasks=64, devices=1, clock="cpu")
    if not make_family(task).fast:
        flags["clock"] = "wall"
    return flags | STARTS.get(task, {}) | (dict(warm_start_steps=300, demonstrations=4000) if quick else {})


def warm_folder(results: pathlib.Path, task: str, seed: int, quick: bool) -> pathlib.Path:
    return results / ("warm-quick" if quick else "warm") / f"{plain_name(task)}_s{seed}"


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """As on a command line; a flag that takes no value is there where it is true."""
    words = []
    for name, value in flags.items():
        if RunConfig.__annotations__[name] is not bool:
            words += [f"--{name.replace('_', '-')}", str(value)]
        elif value:
            words.append(f"--{name.replace('_', '-')}")
    return words


@contextlib.contextmanager
def on_core(core: int | None):
    """Processes that this thread starts meanwhile run on one core from their first moment on."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def finish_run(
    folder: pathlib.Path, flags: Mapping[str, Any], check: Callable[[], None], core: int | None = None
) -> str:
    """Runs, or continues, one training run in a process of its own, on `core`; returns "" or why it ended badly."""
    # What a killed comparison had started saves and stops by itself, but not at once.
    deadline = time.monotonic() + STOPPING_S
    while is_being_written(folder / "ledger.sqlite") and time.monotonic() < deadline:
        check()
        time.sleep(0.2)
    if (folder / "evaluation.json").exists():
        return ""
    begun = (folder / "config.json").exists()
    folder.mkdir(parents=True, exist_ok=True)
    command = [*COMMAND, *(["--resume", str(folder)] if begun else ["--run-dir", str(folder), *arguments(flags)])]
    variables = {_cli.PARENT: str(os.getpid())} | ({"JAX_PLATFORMS": "cpu"} if flags.get("clock") == "cpu" else {})
    with (folder / "output.txt").open("w") as output:
        # In a session of its own: a Ctrl-C in the terminal reaches it once, by us.
        with on_core(core):
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                                       start_new_session=True, env=os.environ | variables)  # fmt: skip
        try:
            while process.poll() is None:
                check()
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"killed by {signal.Signals(-process.returncode).name}"
    lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {process.returncode}, see {folder / 'output.txt'}"


def same_run(folder: pathlib.Path, flags: Mapping[str, Any]) -> bool:
    """Whether a run folder was made with these flags, wherever its starting policy lay."""
    from sao_jax.runtime.run import read_config

    wanted = RunConfig(**flags).resolved()
    return dataclasses.replace(read_config(folder), init_from=wanted.init_from) == wanted


def forget_bulk(folder: pathlib.Path) -> None:
    """Of a finished cell its settings and metrics are kept."""
    for name in ("checkpoints", "trajectories"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A comparison to be made: its cells, where each lies, with which flags it runs, and how many at once."""

    name: str
    flags: Flags
    budget: int
    todo: tuple[Cell, ...]
    jobs: int

    @property
    def results(self) -> pathlib.Path:
        return pathlib.Path(self.flags.results).resolve()

    def warm(self, of: tuple[str, int]) -> pathlib.Path:
        return warm_folder(self.results, *of, self.flags.quick)

    def own(self, cell: Cell) -> dict[str, Any]:
        """Flags of a cell, wherever it begins."""
        return cell_flags(PRESETS[self.name], cell, self.budget, self.flags.quick)

    def start_of(self, cell: Cell) -> tuple[str, int]:
        """Task and seed: which warm start a cell begins with."""
        return self.own(cell)["task"], cell.seed

    def wanted(self, cell: Cell) -> dict[str, Any]:
        return self.own(cell) | {"init_from": str(self.warm(self.start_of(cell)))}

    def folder(self, cell: Cell) -> pathlib.Path:
        return self.results / ("runs" + "-quick" * self.flags.quick) / run_name(cell, self.own(cell))

    def has(self, cell: Cell, file: str = "evaluation.json") -> bool:
        return (self.folder(cell) / file).exists()

    def there(self) -> list[Cell]:
        """The cells asked for, and finished ones of the preset beside them: other methods, the preset's seeds."""
        preset, asked = PRESETS[self.name], set(self.todo)
        methods = tuple(dict.fromkeys((*preset.methods, *(c.method for c in self.todo))))
        seeds = max(preset.seeds, len({c.seed for c in self.todo}))
        possible = cells(preset, methods, seeds, FIRST_SEED.get(self.name, 0))
        return [c for c in possible if c in asked or (self.has(c) and same_run(self.folder(c), self.wanted(c)))]


def usual_budget(preset: Preset, quick: bool) -> int:
    return QUICK_BUDGET if quick else preset.budget


def plan(name: str, flags: Flags) -> Plan:
    """Checks everything that can be wrong with a comparison before its first run begins."""
    preset = PRESETS[name]
    methods = tuple(dict.fromkeys(m.strip() for m in flags.methods.split(","))) if flags.methods else preset.methods
    if unknown := [m for m in methods if m not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; allowed: {', '.join(METHODS)}")
    budget = flags.rollouts or usual_budget(preset, flags.quick)
    seeds = flags.seeds or (2 if flags.quick else preset.seeds)
    todo = tuple(cells(preset, methods, seeds, FIRST_SEED.get(name, 0)))
    made = Plan(name, flags, budget, todo, 1)
    for cell in todo:
        wanted = made.wanted(cell)
        if wanted["rollouts"] < 1:
            raise ValueError(f"a budget of {budget} rollouts leaves none after preheating ({cell.name})")
        RunConfig(**wanted).resolved()
        if made.has(cell, "config.json") and not same_run(made.folder(cell), wanted):
            raise ValueError(f"{made.folder(cell)} was made with other flags; name another --results")
    alone = any(made.wanted(cell).get("clock") != "cpu" for cell in todo)
    if alone and flags.budget != "rollouts" and (flags.jobs or 1) > 1:
        raise ValueError(f"{name} is timed by the wall's clock, so its runs go one by one (or --budget rollouts)")
    return dataclasses.replace(made, jobs=flags.jobs or (1 if alone else len(cores())))


def compare(made: Plan, check: Callable[[], None], *, keep: bool = False) -> list:
    """Runs the missing cells of a plan and writes its tables; returns the cells that were asked for.

    Of finished runs only settings and metrics stay on disk, unless they are to be kept whole.

    The tables show every cell of the preset that is there, also of methods that were not asked for this time.
    """
    from sao_jax.report import comparison, comparison_tables

    preset, flags = PRESETS[made.name], made.flags
    with only_one(made.results):
        errors = _run_cells(made, check, keep)
        found = {
            c: comparison.read_cell(made.folder(c), c.method, dict(c.point), c.seed, errors.get(c, ""))
            for c in made.there()
        }
        usual = made.budget == usual_budget(preset, flags.quick)
        name = made.name + "-quick" * flags.quick + ("" if usual else f"-{made.budget}")
        if comparison.has_more(made.results / name / "runs.csv", list(found.values())):
            print(f"{made.results / name} holds runs that this call does not show: it stays")
            name += "-partial"
        where = made.results / name
        for path in comparison_tables.write(
            where, list(found.values()), reference=preset.reference, budget=flags.budget
        ):
            print(path)
    if errors:
        raise _cli.UserError(f"{len(errors)} of {len(made.todo)} runs did not finish; call the command again to go on")
    return [found[c] for c in made.todo]


@contextlib.contextmanager
def only_one(results: pathlib.Path):
    """Two comparisons in one folder would wait for each other's runs, or count them as failed."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another comparison is running in {results}; name another --results") from None
        yield


def _run_cells(made: Plan, check: Callable[[], None], keep: bool) -> dict[Cell, str]:
    """Runs what is missing; returns why cells failed."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    missing = [cell for cell in made.todo if not made.has(cell)]
    errors: dict[Cell, str] = {}
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in cores()[: made.jobs]:
        free.put(core)
    with Progress(*columns, TimeRemainingColumn(), TextColumn("left")) as progress:
        bar = progress.add_task(made.name, total=len(made.todo), completed=len(made.todo) - len(missing))

        def run(path: pathlib.Path, flags: Mapping[str, Any], what: str) -> str:
            check()
            core = free.get()
            try:
                progress.update(bar, description=f"{made.name}: {what}")
                error = finish_run(path, flags, check, core if flags.get("clock") == "cpu" else None)
            finally:
                free.put(core)
            if error:
                progress.console.print(f"{what}: {error}", markup=False)
            return error

        def start(of: tuple[str, int]) -> str:
            """Makes the starting policy of a task and seed if it is missing."""
            return run(made.warm(of), warm_flags(*of, made.flags.quick), f"warm start, seed {of[1]}")

        def work(cell: Cell) -> None:
            error = failed[made.start_of(cell)] or run(made.folder(cell), made.wanted(cell), cell.name)
            if error:
                errors[cell] = error
            elif not keep:
                forget_bulk(made.folder(cell))
            progress.update(bar, advance=1)

        with ThreadPoolExecutor(made.jobs) as pool:
            starts = list(dict.fromkeys(made.start_of(cell) for cell in missing))
            failed = dict(zip(starts, pool.map(start, starts), strict=True))
            list(pool.map(work, missing))
    return errors


def cores() -> list[int]:
    """Cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def print_list() -> None:
    for name, preset in PRESETS.items():
        grid = "; ".join(f"{k} {', '.join(map(str, v))}" for k, v in preset.grid.items())
        print(f"{name}: {preset.seeds} seeds, {preset.budget} rollouts{'; ' + grid if grid else ''}")
        print("    " + ", ".join(preset.methods))
    print()
    for name, flags in METHODS.items():
        print(f"{name:24}", " ".join(arguments(flags)))


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    if flags.list:
        print_list()
        return
    if flags.preset != "all" and flags.preset not in PRESETS:
        raise ValueError(f"unknown preset {flags.preset!r}; allowed: {', '.join(PRESETS)}, all")
    if flags.methods == "":
        raise ValueError("--methods is empty")
    _cli.results_folder(flags.results)
    for name in ("seeds", "rollouts", "jobs"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    if (flags.jobs or 1) > len(cores()):
        raise ValueError(f"--jobs is {flags.jobs}; each run has a core to itself, and there are {len(cores())}")
    plans = [plan(name, flags) for name in (PRESETS if flags.preset == "all" else (flags.preset,))]
    failed = []
    for made in plans:
        try:
            compare(made, stop.check)
        except _cli.UserError as error:
            failed.append(f"{made.name}: {error}")
    if failed:
        raise _cli.UserError("; ".join(failed))


if __name__ == "__main__":
    _cli.main(main)
