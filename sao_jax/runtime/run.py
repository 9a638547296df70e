"""One run: a folder, and the objects that work on it, put together."""

import dataclasses
import functools
import json
import math
import pathlib
import random
import time
from collections.abc import Callable

import jax

from sao_jax.data.packing import SHORTEST, pieces_of
from sao_jax.data.protocols import TaskFamily, Tokenizer
from sao_jax.data.segments import read_trajectory
from sao_jax.data.storage import Location, TrajectoryStore
from sao_jax.data.trajectory import Trajectory
from sao_jax.data.windows import most_windows
from sao_jax.envs.registry import make_family
from sao_jax.learner.layout import Layout
from sao_jax.learner.learner import Learner
from sao_jax.learner.sharding import own_mesh
from sao_jax.models.compute import check_backend
from sao_jax.models.decoder import init_params
from sao_jax.rollout.agents import Agents
from sao_jax.rollout.clock import Clock
from sao_jax.rollout.engine import Engine
from sao_jax.runtime.checkpoints import Checkpoints, write_durably
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import CompileCounter, data_mesh, visible_gpus
from sao_jax.runtime.evaluation import FIRST_ID
from sao_jax.runtime.fingerprint import differences, fingerprint
from sao_jax.runtime.hosts import Leader
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.links import Backend, LocalBackend
from sao_jax.runtime.metrics import MetricsLog, StageTimer, require_tensorboard
from sao_jax.runtime.shared_learner import SharedLearner
from sao_jax.runtime.status import StatusFile
from sao_jax.runtime.trace import Trace
from sao_jax.runtime.warm_start import check_demonstrations
from sao_jax.runtime.workers import Workers

LOOKED_AT = 64  # train instances whose prompts and demonstrations are looked at before a run begins
NO_STEP = -(10**9)  # before every step: a resumed run without a checkpoint keeps none of its metrics


@dataclasses.dataclass
class Run:
    """What the stages of a run share. `context` is the token budget of a trajectory, and the length of a row unless
    the configuration bounds that.

    The mesh is the learner's, over the devices of all hosts; the sampler is on those of this host. `leader`: of the
    other hosts, if there are any.
    """

    config: RunConfig
    folder: pathlib.Path
    family: TaskFamily
    context: int
    mesh: jax.sharding.Mesh
    learner: Learner | SharedLearner
    agents: Agents | Workers
    store: TrajectoryStore
    ledger: Ledger
    checkpoints: Checkpoints
    log: MetricsLog
    compiles: CompileCounter
    clock: Clock
    timer: StageTimer = dataclasses.field(default_factory=StageTimer)
    trace: Trace | None = None
    leader: Leader | None = None
    started: float = dataclasses.field(default_factory=time.monotonic)
    status: StatusFile = dataclasses.field(init=False)

    def __post_init__(self):
        self.status = StatusFile(self.folder / "status.json")

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def save(self, **meta) -> None:
        """A checkpoint of the learner, which must be at a boundary."""
        with self.timer("checkpoint"):
            meta = {"version": self.learner.version, "time_s": self.seconds(), "clock_s": self.clock()} | meta
            self.checkpoints.save(self.checkpoints.next_step(), self.learner.whole_state(), meta)

    def trajectory(self, rollout: int) -> Trajectory:
        """A finished rollout's trajectory, from disk."""
        return read_trajectory(self.store, self.ledger.rollout(rollout).location)

    def close(self) -> None:
        for part in (self.checkpoints, self.log, self.store, self.ledger, self.trace):
            if part is not None:
                part.close()


def family_and_context(config: RunConfig) -> tuple[TaskFamily, int]:
    family = make_family(config.task)
    if config.max_tokens is not None and config.max_tokens > family.max_tokens:
        raise ValueError(f"--max-tokens is {config.max_tokens}; task {family.name!r} allows {family.max_tokens}")
    context = config.max_tokens or family.max_tokens
    for name in ("context_window", "row_tokens"):
        if (tokens := getattr(config, name)) is not None and tokens >= context:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {tokens} has no effect here; trajectories have at most {context} tokens")
    length = config.context_window or config.row_tokens or context
    if (shortest := length >> (config.row_buckets - 1)) < SHORTEST and config.row_buckets > 1:
        raise ValueError(
            f"--row-buckets {config.row_buckets} halves rows of {length} tokens to {shortest}; "
            f"the shortest must hold at least {SHORTEST}"
        )
    return family, context


def random_policy(config: RunConfig, family: TaskFamily) -> dict:
    model = config.model(family.tokenizer.vocab_size)
    return jax.jit(lambda key: init_params(model, key))(jax.random.key(config.seed))


def make_learner(config: RunConfig, family: TaskFamily, context: int, mesh: jax.sharding.Mesh) -> Learner:
    """A learner with random weights."""
    model = config.model(family.tokenizer.vocab_size)
    micro = 1 if config.critic_update == "arrival" else config.micro_rows
    length = config.context_window or config.row_tokens or context
    most = most_windows(context, length)
    pieces = pieces_of(length) if config.pack else 1
    layout = Layout.fit(
        config.batch_size, length, mesh.size, micro_rows=micro, most=most, pieces=pieces, buckets=config.row_buckets
    )
    policy = random_policy(config, family)
    how = {"shard_params": config.shard_params, "compute": config.compute()}
    return Learner(model, config.choices(), config.numbers(), layout, mesh, policy, **how)


def make_engine(config: RunConfig, family: TaskFamily, context: int, policy: dict, mesh: jax.sharding.Mesh) -> Engine:
    stop_ids = [family.tokenizer.encode(character)[0] for character in family.stop]
    return Engine(
        config.model(family.tokenizer.vocab_size),
        policy,
        mesh=mesh,
        slots=config.slots,
        context=config.context_window or context,
        stop_ids=stop_ids,
        seed=config.seed,
        burst=config.burst,
        kv_after_swap=config.kv_after_swap,
    )


def make_agents(
    config: RunConfig, family: TaskFamily, context: int, engine: Engine, clock: Clock | None = None
) -> Agents:
    simulated = None if config.env_seconds is None or clock is None else functools.partial(simulated_seconds, config)
    return Agents(
        engine,
        family,
        context=context,
        window=config.context_window,
        limit_bootstrap=config.limit_bootstrap,
        env_workers=config.env_workers,
        env_timeout=config.env_timeout,
        clock=clock,
        simulated_seconds=simulated,
        seam_turns=config.segment_steps,
    )


def make_backend(config: RunConfig, folder: pathlib.Path) -> Backend:
    if config.backend == "ray":
        from sao_jax.runtime.ray_links import RayBackend

        return RayBackend(config.workers, gpus=int(jax.default_backend() == "gpu"))
    return LocalBackend(folder / "workers", own_gpus=config.devices or len(visible_gpus()))


def make_clock(config: RunConfig, mesh: jax.sharding.Mesh) -> Clock:
    if config.clock == "wall":
        return Clock(sleeps=config.env_sleep)
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        raise ValueError("--clock cpu needs one CPU device (--devices 1): it counts what one core has to do")
    return Clock(time.process_time)


def simulated_seconds(config: RunConfig, rollout: int, task: str) -> float:
    """Time an environment takes over an action: lognormal, a function of run seed, task and the member of its group.

    Members of a group draw their own, or no group would ever wait for its slowest; the first one's is that of a method
    without groups. Evaluations are exempt.
    """
    if rollout >= FIRST_ID:
        return 0.0
    member = rollout % config.n_samples_per_prompt
    rng = random.Random(f"{config.seed}/{task}" + (f"/{member}" if member else ""))
    return config.env_seconds * math.exp(config.env_sigma * rng.gauss(0.0, 1.0))


def restored_state(folder: pathlib.Path, learner: Learner) -> tuple[dict, int]:
    """(state, version) of the newest complete checkpoint in a run folder; `learner` has the shapes."""
    with Checkpoints(folder / "checkpoints") as checkpoints:
        newest = checkpoints.newest()
        if newest is None:
            raise ValueError(f"{folder} has no complete checkpoint")
        state, meta = checkpoints.restore(newest, learner.programs.abstract_state())
    return state, meta["version"]


def on_task(config: RunConfig, task: str) -> RunConfig:
    """The configuration of a run for attempts at another task; one whose attempts fit the run's context is seen whole.

    Raises ValueError if it has another alphabet.
    """
    family = make_family(task)
    if not same_vocabulary(family.tokenizer, make_family(config.task).tokenizer):
        raise ValueError(f"task {task} has another alphabet or vocabulary than {config.task}")
    fits = {k: None for k in ("context_window", "row_tokens") if (getattr(config, k) or 0) >= family.max_tokens}
    return dataclasses.replace(config, task=task, max_tokens=None, **fits)


def restored_engine(config: RunConfig, folder: pathlib.Path) -> tuple[Engine, TaskFamily, int, dict, int]:
    """(engine with the newest policy of a run, its task, the task's context, the learner's state, its version)."""
    family, context = family_and_context(config)
    # The learner is there for the shapes of its state, and has no batch to hold.
    learner = make_learner(dataclasses.replace(config, batch_size=1), family, context, data_mesh(config.devices))
    state, version = restored_state(folder, learner)
    engine = make_engine(config, family, context, learner.published_policy(), learner.mesh)
    engine.publish(state["policy"], version)
    return engine, family, context, state, version


def restored_agents(config: RunConfig, folder: pathlib.Path) -> tuple[Agents, int]:
    """A sampler with the newest weights of a run, for evaluation; and their version."""
    engine, family, context, _, version = restored_engine(config, folder)
    return make_agents(config, family, context, engine), version


def open_run(
    config: RunConfig,
    folder: pathlib.Path,
    *,
    resume: bool,
    tensorboard: bool = False,
    trace: bool = False,
    readings: str | None = None,
    source: pathlib.Path | None = None,
    leader: Leader | None = None,
) -> Run:
    """Makes a new run folder, or continues one whose `config.json` says `config`.

    With `source` the ledger and the trajectories are those of another run, for reading only.

    Raises ValueError (also LedgerError) when the folder is in use, exists already, or holds another run, and when the
    configuration does not fit the task, the devices or the runs it is to start from; no folder is made then.
    """
    family, context = family_and_context(config)
    compiles = CompileCounter()
    mesh = data_mesh(config.devices)
    check_backend(config.compute())
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
    newest = checkpoints.newest() if resume else None
    if not resume and source is None:
        check_task(config, family, context)
        if config.shard_params and mesh.size == 1:
            raise ValueError("--shard-params has no effect here; it needs more than one device")
    if newest is None:
        check_sources(config, family, context)
    if tensorboard:
        require_tensorboard()
    if leader is not None:
        leader.tell("learner", config=config.to_json())
    learner = make_learner(config, family, context, mesh)
    if leader is not None:
        learner = SharedLearner(learner, leader)
    clock = make_clock(config, mesh)
    if config.workers and source is None:
        agents = Workers(config, family, context, folder, make_backend(config, folder), readings=readings)
    else:
        engine = make_engine(config, family, context, learner.published_policy(), own_mesh(mesh))
        agents = make_agents(config, family, context, engine, clock)
    ledger = Ledger(source / "ledger.sqlite", read_only=True) if source else None
    folder.mkdir(parents=True, exist_ok=True)
    if ledger is None:
        path = folder / "ledger.sqlite"
        if resume and not path.exists() and (folder / "checkpoints").exists():
            raise ValueError(f"{folder} has checkpoints but no ledger.sqlite; without it the run cannot be continued")
        # A run killed at its very beginning leaves an empty file.
        ledger = Ledger(path, create=not path.exists() or path.stat().st_size == 0)
        try:
            data = {"task": config.task, "n": config.n_samples_per_prompt, "max_tokens": context}
            if config.context_window is not None:
                data["context_window"] = config.context_window
            ledger.require_same_data(data)
        except LedgerError:
            ledger.close()  # or the refused folder would stay locked
            raise
    store = TrajectoryStore((source or folder) / "trajectories")
    if source is None:
        # What lies behind the last record the ledger knows was never acknowledged.
        location = ledger.last_location()
        store.truncate_after(Location(**location) if location else None)
        ledger.before_commit = store.flush
    write_durably(folder / "config.json", config.to_json())  # before the first metrics: without it nothing is resumed
    resume_step = None if not resume else NO_STEP if newest is None else checkpoints.read_meta(newest)["version"]
    log = MetricsLog(
        folder / "metrics.jsonl",
        resume_step=resume_step,
        durable_step=_durable_version(ledger) if resume and source is None else None,
        tensorboard=folder / "tensorboard" if tensorboard else None,
    )
    _check_fingerprint(folder)
    written = Trace(folder / "trace.json") if trace else None
    if config.workers:
        agents.trace = written
    return Run(
        config,
        folder,
        family,
        context,
        mesh,
        learner,
        agents,
        store,
        ledger,
        checkpoints,
        log,
        compiles,
        clock,
        timer=StageTimer(trace=written),
        trace=written,
        leader=leader,
    )


def _check_fingerprint(folder: pathlib.Path) -> None:
    present, path = fingerprint(), folder / "fingerprint.json"
    if path.exists():
        try:
            changed = differences(dict(json.loads(path.read_text())), present)
        except (ValueError, TypeError):
            print(f"note: {path} is damaged; what the run was computed with before is not known", flush=True)
        else:
            if changed:
                print(f"note: replay is not bitwise across a change of {'; '.join(changed)}", flush=True)
    write_durably(path, json.dumps(present, indent=1))


# -- checks before a run begins ----------------------------------------------------------------------------------------


def check_task(config: RunConfig, family: TaskFamily, context: int) -> None:
    """Raises ValueError for flags without effect on this task, and if prompts or demonstrations do not fit."""
    if not family.fast:
        if config.clock == "cpu":
            raise ValueError(f"--clock cpu does not count what the environments of task {family.name!r} take")
        return  # its environments may take long, or hang: prompts that do not fit are dropped when they come
    for name in ("env_workers", "env_timeout"):
        if getattr(config, name) != getattr(RunConfig, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} has no effect here; it needs a task that is not fast, and {family.name!r} is")
    longest = max(_prompt_length(family, index) for index in range(LOOKED_AT))
    if longest >= context:
        raise ValueError(
            f"prompts of task {family.name!r} have up to {longest} tokens, so {context} leave no room for an action; "
            + (
                f"--max-tokens must be at least {longest + 1}"
                if longest < family.max_tokens
                else f"the task's own max_tokens of {family.max_tokens} is too small"
            )
        )
    if config.warm_start_steps and not config.init_from:
        check_demonstrations(config, family, context, LOOKED_AT)


def _prompt_length(family: TaskFamily, index: int) -> int:
    try:
        return len(family.tokenizer.encode(family.environment().reset(family.instance("train", index))))
    except Exception:  # the user's code may raise anything; that is one failed attempt later, not a failed run
        return 0


def check_sources(config: RunConfig, family: TaskFamily, context: int) -> None:
    """Raises ValueError, naming the flag, if a run that this one is to start from is none or does not fit."""
    for name, check in (("init_from", _check_policy_source), ("preheat_from", _check_rollout_source)):
        if (folder := getattr(config, name)) is None:
            continue
        try:
            _check_source(config, family, context, pathlib.Path(folder), check)
        except ValueError as error:
            raise ValueError(f"--{name.replace('_', '-')} {folder}: {error}") from None


def _check_source(config: RunConfig, family: TaskFamily, context: int, folder: pathlib.Path, check: Callable) -> None:
    if not folder.is_dir():
        raise ValueError("no such folder")
    if not (folder / "config.json").exists():
        raise ValueError("not a run folder: it has no config.json")
    other = read_config(folder)
    its_family, its_context = family_and_context(other)
    if not same_vocabulary(its_family.tokenizer, family.tokenizer):
        raise ValueError(f"its task {other.task} has another alphabet or vocabulary than {config.task}")
    vocabulary = family.tokenizer.vocab_size
    check(folder, mine=config.model(vocabulary), its=other.model(vocabulary), context=context, its_context=its_context)


def _check_policy_source(folder: pathlib.Path, *, mine, its, **_) -> None:
    if mine != its:
        changed = [f.name for f in dataclasses.fields(mine) if getattr(mine, f.name) != getattr(its, f.name)]
        names = "; ".join(f"{name} {getattr(its, name)}, not {getattr(mine, name)}" for name in changed)
        raise ValueError(f"it has another model: {names}")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        if checkpoints.newest() is None:
            raise ValueError("it has no complete checkpoint")


def _check_rollout_source(folder: pathlib.Path, *, context: int, its_context: int, **_) -> None:
    if its_context > context:
        raise ValueError(f"its rows have up to {its_context} tokens, this run's {context} (--max-tokens)")
    if not (folder / "ledger.sqlite").exists():
        raise ValueError("not a run folder: it has no ledger.sqlite")
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        if not ledger.stored():
            raise ValueError("it holds no finished trajectory")


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether equal ids mean equal text."""
    if a is b:
        return True
    same = (a.vocab_size, a.pad_id) == (b.vocab_size, b.pad_id)
    return same and all(a.decode([i]) == b.decode([i]) for i in range(a.vocab_size))


def _durable_version(ledger: Ledger) -> int | None:
    """Version after the last update that the ledger knows; None before the first."""
    updates = [e.payload for e in ledger.events(kinds=("update",))]
    return updates[-1]["version"] + (not updates[-1]["critic_only"]) if updates else None


def read_config(folder: pathlib.Path) -> RunConfig:
    """The configuration of an existing run folder."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")
    return RunConfig.from_json(path.read_text())
