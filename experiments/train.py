"""Train an agent by SAO: warm start, preheated critic, reinforcement learning from single trajectories.

python -m experiments.train                            # the calculator task, a few minutes on two cores
python -m experiments.train --resume runs/NAME         # go on after Ctrl-C, SIGTERM or a kill
python -m experiments.train --replay runs/NAME         # train again from the stored trajectories, bit by bit
"""

import dataclasses
import pathlib
import sys
import time

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import _cli
from sao_jax.runtime.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Flags(RunConfig):
    run_dir: str | None = None
    """Folder of the run (default: runs/TASK-PRESET-sSEED-TIME)."""
    resume: str | None = None
    """Folder of a run to continue; only --rollouts may be given beside it."""
    replay: str | None = None
    """Folder of a run to train again from its stored trajectories, in the recorded order."""
    resample: bool = False
    """With --replay: also sample every token again and compare ids and log-probs."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the package tensorboardX)."""
    trace: bool = False
    """Also write trace.json, what the host and the devices did when, for ui.perfetto.dev."""
    device_readings: str | None = None
    """With --workers: temperatures and free memory of devices from a recording instead of NVIDIA's driver."""


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    config = RunConfig(**{f.name: getattr(flags, f.name) for f in dataclasses.fields(RunConfig)})
    given = _cli.given() & {f.name for f in dataclasses.fields(config)}
    for name in ("run_dir", "resume", "replay", "init_from", "preheat_from"):
        if getattr(flags, name) == "":
            raise ValueError(f"--{name.replace('_', '-')} is empty; it takes a folder")
    if flags.resample and not flags.replay:
        raise ValueError("--resample has no effect here; it needs --replay")
    if flags.resume and flags.replay:
        raise ValueError("--resume and --replay exclude each other; a stopped replay continues when it is called again")
    if (flags.resume or flags.replay) and (wrong := given - ({"rollouts"} if flags.resume else set())):
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(wrong))
        raise ValueError(f"{names}: a run is continued or replayed with the flags it was started with")
    if flags.resume and flags.run_dir:
        raise ValueError("--run-dir has no effect with --resume, which names the folder")
    for name in ("tensorboard", "trace", "device_readings"):
        if flags.replay and getattr(flags, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --replay")

    from sao_jax.runtime.devices import prepare_backend

    if flags.resume or flags.replay:
        from sao_jax.runtime.run import read_config

        source = pathlib.Path(flags.resume or flags.replay)
        config = read_config(source)
        if "rollouts" in given:
            if flags.rollouts < config.rollouts:
                raise ValueError(f"--rollouts is {flags.rollouts}; the run was started with {config.rollouts} already")
            config = dataclasses.replace(config, rollouts=flags.rollouts)
    else:
        config = config.resolved()
    if flags.device_readings is not None:
        from sao_jax.runtime.telemetry import recorded_source

        if not config.workers:
            raise ValueError("--device-readings has no effect here; it needs --workers")
        recorded_source(flags.device_readings)  # what is wrong with it is said before anything begins
    prepare_backend(config.devices)

    from sao_jax.report.progress import Display

    if flags.replay:
        folder = pathlib.Path(flags.run_dir or f"{source}-replay")
    elif flags.resume:
        folder = source
    else:
        task = config.task.split(":")[0].replace("/", "-")
        name = f"{task}-{config.preset}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = pathlib.Path(flags.run_dir or f"runs/{name}")
        if (folder / "config.json").exists():
            raise ValueError(
                f"{folder} holds a run already; continue it with --resume {folder}, or name another folder"
            )
    with Display() as display:
        if flags.replay:
            from sao_jax.runtime.replay import replay

            figures = replay(source, folder, display, resample=flags.resample, check=stop.check)
        else:
            from sao_jax.runtime.train import train

            figures = train(
                config,
                folder,
                display,
                resume=bool(flags.resume),
                tensorboard=flags.tensorboard,
                trace=flags.trace,
                readings=flags.device_readings,
                check=stop.check,
            )
    if flags.replay:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))
        if not figures["identical"]:
            raise _cli.UserError("the replay differs from the recorded run")
        return

    from rich.console import Console

    from sao_jax.report.curves import plot_run
    from sao_jax.report.html import write_report
    from sao_jax.report.summary import summary_table

    Console().print(summary_table(folder))
    (curves,) = plot_run(folder)
    print("curves:", curves)
    print("report:", write_report(folder, curves.read_bytes()))


if __name__ == "__main__":
    _cli.main(main)
