"""One run: a folder, and the objects that work on it, put together."""

import dataclasses
import functools
import json
import math
import pathlib
import random
import time

import jax

from sao_jax.data.protocols import TaskFamily
from sao_jax.data.storage import Location, TrajectoryStore
from sao_jax.data.trajectory import Trajectory, load_trajectory
from sao_jax.envs.registry import make_family
from sao_jax.learner.layout import Layout
from sao_jax.learner.learner import Learner
from sao_jax.models.decoder import init_params
from sao_jax.rollout.agents import Agents
from sao_jax.rollout.clock import Clock
from sao_jax.rollout.engine import Engine
from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import CompileCounter, data_mesh
from sao_jax.runtime.evaluation import FIRST_ID
from sao_jax.runtime.fingerprint import differences, fingerprint
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.metrics import MetricsLog, StageTimer

NO_STEP = -(10**9)  # before every step: a resumed run without a checkpoint keeps none of its metrics


@dataclasses.dataclass
class Run:
    """What the stages of a run share. `context` is the token budget of a trajectory and the length of a row."""

    config: RunConfig
    folder: pathlib.Path
    family: TaskFamily
    context: int
    mesh: jax.sharding.Mesh
    learner: Learner
    engine: Engine
    agents: Agents
    store: TrajectoryStore
    ledger: Ledger
    checkpoints: Checkpoints
    log: MetricsLog
    compiles: CompileCounter
    clock: Clock
    timer: StageTimer = dataclasses.field(default_factory=StageTimer)
    started: float = dataclasses.field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def save(self, **meta) -> None:
        """A checkpoint of the learner, which must be at a boundary."""
        with self.timer("checkpoint"):
            meta = {"version": self.learner.version, "time_s": self.seconds(), "clock_s": self.clock()} | meta
            self.checkpoints.save(self.checkpoints.next_step(), self.learner.state, meta)

    def trajectory(self, rollout: int) -> Trajectory:
        """A finished rollout's trajectory, from disk."""
        return load_trajectory(self.store.read(Location(**self.ledger.rollout(rollout).location)))

    def close(self) -> None:
        for part in (self.checkpoints, self.log, self.store, self.ledger):
            part.close()


def family_and_context(config: RunConfig) -> tuple[TaskFamily, int]:
    family = make_family(config.task)
    if config.max_tokens is not None and config.max_tokens > family.max_tokens:
        raise ValueError(f"--max-tokens is {config.max_tokens}; task {family.name!r} allows {family.max_tokens}")
    return family, config.max_tokens or family.max_tokens


def make_learner(config: RunConfig, family: TaskFamily, context: int, mesh: jax.sharding.Mesh) -> Learner:
    """A learner with random weights."""
    model = config.model(family.tokenizer.vocab_size)
    micro = 1 if config.critic_update == "arrival" else config.micro_rows
    layout = Layout.fit(config.batch_size, context, mesh.size, micro_rows=micro)
    policy = jax.jit(lambda key: init_params(model, key))(jax.random.key(config.seed))
    return Learner(model, config.choices(), config.numbers(), layout, mesh, policy, shard_params=config.shard_params)


def make_engine(config: RunConfig, family: TaskFamily, context: int, learner: Learner) -> Engine:
    stop_ids = [family.tokenizer.encode(character)[0] for character in family.stop]
    return Engine(
        learner.programs.config,
        learner.published_policy(),
        mesh=learner.mesh,
        slots=config.slots,
        context=context,
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
        limit_bootstrap=config.limit_bootstrap,
        env_workers=config.env_workers,
        env_timeout=config.env_timeout,
        clock=clock,
        simulated_seconds=simulated,
    )


def simulated_seconds(config: RunConfig, rollout: int, task: str) -> float:
    """Time an environment takes over an action: lognormal, a function of run seed and task. Evaluations are exempt."""
    if rollout >= FIRST_ID:
        return 0.0
    return config.env_seconds * math.exp(config.env_sigma * random.Random(f"{config.seed}/{task}").gauss(0.0, 1.0))


def restored_policy(config: RunConfig, folder: pathlib.Path, learner: Learner) -> tuple[dict, int]:
    """(policy, version) of the newest complete checkpoint in a run folder; `learner` has the shapes."""
    with Checkpoints(folder / "checkpoints") as checkpoints:
        newest = checkpoints.newest()
        if newest is None:
            raise ValueError(f"{folder} has no complete checkpoint")
        state, meta = checkpoints.restore(newest, learner.programs.abstract_state())
    return state["policy"], meta["version"]


def restored_agents(config: RunConfig, folder: pathlib.Path) -> tuple[Agents, int]:
    """A sampler with the newest weights of a run, for evaluation; and their version."""
    family, context = family_and_context(config)
    learner = make_learner(config, family, context, data_mesh(config.devices))
    policy, version = restored_policy(config, folder, learner)
    engine = make_engine(config, family, context, learner)
    engine.publish(policy, version)
    return make_agents(config, family, context, engine), version


def open_run(
    config: RunConfig,
    folder: pathlib.Path,
    *,
    resume: bool,
    tensorboard: bool = False,
    source: pathlib.Path | None = None,
) -> Run:
    """Makes a new run folder, or continues one whose `config.json` says `config`.

    With `source` the ledger and the trajectories are those of another run, for reading only.

    Raises ValueError (also LedgerError) when the folder is in use, exists already, or holds another run.
    """
    family, context = family_and_context(config)
    compiles = CompileCounter()
    mesh = data_mesh(config.devices)
    learner = make_learner(config, family, context, mesh)
    engine = make_engine(config, family, context, learner)
    clock = Clock()
    agents = make_agents(config, family, context, engine, clock)
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        path = folder / "ledger.sqlite"
        if resume and not path.exists() and (folder / "checkpoints").exists():
            raise ValueError(f"{folder} has checkpoints but no ledger.sqlite; without it the run cannot be continued")
        # A run killed at its very beginning leaves an empty file.
        ledger = Ledger(path, create=not path.exists() or path.stat().st_size == 0)
        try:
            ledger.require_same_data({"task": config.task, "n": config.n_samples_per_prompt, "max_tokens": context})
        except LedgerError:
            ledger.close()  # or the refused folder would stay locked
            raise
    else:
        ledger = Ledger(source / "ledger.sqlite", read_only=True)
    store = TrajectoryStore((source or folder) / "trajectories")
    if source is None:
        # What lies behind the last record the ledger knows was never acknowledged.
        location = ledger.last_location()
        store.truncate_after(Location(**location) if location else None)
    (folder / "config.json").write_text(config.to_json())  # before the first metrics: without it nothing is resumed
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
    newest = checkpoints.newest() if resume else None
    resume_step = None if not resume else NO_STEP if newest is None else checkpoints.read_meta(newest)["version"]
    log = MetricsLog(
        folder / "metrics.jsonl", resume_step=resume_step, tensorboard=folder / "tensorboard" if tensorboard else None
    )
    _check_fingerprint(folder)
    return Run(
        config, folder, family, context, mesh, learner, engine, agents, store, ledger, checkpoints, log, compiles, clock
    )


def _check_fingerprint(folder: pathlib.Path) -> None:
    present, path = fingerprint(), folder / "fingerprint.json"
    if path.exists():
        changed = differences(json.loads(path.read_text()), present)
        if changed:
            print(f"note: replay is not bitwise across a change of {'; '.join(changed)}", flush=True)
    path.write_text(json.dumps(present, indent=1))


def read_config(folder: pathlib.Path) -> RunConfig:
    """The configuration of an existing run folder."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")
    return RunConfig.from_json(path.read_text())
