"""Train an agent by SAO: warm start, preheated critic, reinforcement learning from single trajectories.

python -m experiments.train                            # the calculator task, a few minutes on two cores
python -m experiments.train --resume runs/NAME         # go on after Ctrl-C, SIGTERM or a kill
python -m experiments.train --replay runs/NAME         # train again from the stored trajectories, bit by bit
python -m experiments.train --num-hosts 2 --coordinator HOST:PORT --host-index I      # the same on each host, I = 0, 1
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
    num_hosts: int = 1
    """Processes whose devices the learner spans; the first has the run folder and samples. Without --coordinator they
    are started on this machine, and started again when one of them is gone."""
    coordinator: str | None = None
    """HOST:PORT where process 0 of several hosts waits for the others; the same on each of them, as all flags are, and
    so is the secret in the environment variable SAO_TOKEN. Exit code 75: a host is gone, start all again with --resume.
    """
    host_index: int | None = None
    """Which of the hosts this one is, from 0."""


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
    check_hosts(flags)
    if flags.host_index:
        sys.exit(follow(flags, stop))

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
    if flags.num_hosts > 1 and config.clock == "cpu":
        raise ValueError("--clock cpu counts the work of one process; it does not go with --num-hosts")
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
    if flags.num_hosts > 1 and flags.coordinator is None:
        from experiments._launch import launch

        kept = [f"--{name}" for name in ("tensorboard", "trace") if getattr(flags, name)]
        if flags.device_readings is not None:
            kept += ["--device-readings", flags.device_readings]
        sys.exit(launch(flags.num_hosts, folder, stop, again=bool(flags.resume or flags.replay), kept=kept))
    if flags.num_hosts == 1:
        prepare_backend(config.devices)
        figures = work(flags, config, folder, stop.check)
    else:
        figures = lead(flags, config, folder, stop)
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


def work(flags: Flags, config: RunConfig, folder: pathlib.Path, check, leader=None) -> dict:
    from sao_jax.report.progress import Display

    with Display() as display:
        if flags.replay:
            from sao_jax.runtime.replay import replay

            source = pathlib.Path(flags.replay)
            return replay(source, folder, display, resample=flags.resample, check=check, leader=leader)
        from sao_jax.runtime.train import train

        return train(
            config,
            folder,
            display,
            resume=bool(flags.resume),
            tensorboard=flags.tensorboard,
            trace=flags.trace,
            readings=flags.device_readings,
            check=check,
            leader=leader,
        )


# -- several hosts -----------------------------------------------------------------------------------------------------


def check_hosts(flags: Flags) -> None:
    """Raises ValueError for flags of several hosts that do not fit together."""
    if flags.num_hosts < 1:
        raise ValueError(f"--num-hosts is {flags.num_hosts}; it must be at least 1")
    for name in ("coordinator", "host_index"):
        if getattr(flags, name) is not None and flags.num_hosts == 1:
            raise ValueError(f"--{name.replace('_', '-')} has no effect here; it needs --num-hosts of at least 2")
    if (flags.coordinator is None) != (flags.host_index is None):
        raise ValueError("--coordinator and --host-index go together; without both, the hosts are started here")
    if flags.host_index is not None and not 0 <= flags.host_index < flags.num_hosts:
        raise ValueError(f"--host-index is {flags.host_index}; it must lie in [0, {flags.num_hosts})")


def shared_flags() -> list[str]:
    """The command line without the flag that differs between hosts."""
    words, shared = iter(sys.argv[1:]), []
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if name != "--host-index":
            shared.append(word)
        elif not equals:
            next(words, None)
    return shared


def lead(flags: Flags, config: RunConfig, folder: pathlib.Path, stop) -> dict:
    """The work of process 0, with the others' help."""
    from sao_jax.runtime import hosts
    from sao_jax.runtime.devices import prepare_backend

    address = hosts.parse_address(flags.coordinator)
    jax_address = f"{flags.coordinator.rpartition(':')[0]}:{hosts.free_port(address[0])}"
    leader = hosts.lead(
        address, flags.num_hosts, shared_flags(), stop.check, devices=config.devices, coordinator=jax_address
    )

    def check():
        stop.check()
        leader.check()

    with leader:
        prepare_backend(config.devices, flags.num_hosts)
        hosts.join_jax(jax_address, flags.num_hosts, 0)
        return work(flags, config, folder, check, leader)


def follow(flags: Flags, stop) -> int:
    """The work of another process; returns the exit code of the run."""
    from sao_jax.runtime import hosts

    address = hosts.parse_address(flags.coordinator)
    follower, welcome = hosts.follow(address, flags.host_index, shared_flags(), stop.check)

    from sao_jax.runtime.devices import prepare_backend

    prepare_backend(welcome["devices"], flags.num_hosts)
    hosts.join_jax(welcome["coordinator"], flags.num_hosts, flags.host_index)

    from sao_jax.runtime.shared_learner import share

    return share(follower, lambda: stop.signum)


if __name__ == "__main__":
    _cli.main(main)
