"""A run from the first stage to the last: warm start, preheating, RL; and how it is taken up again."""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.data.rows import blank_row
from sao_jax.learner.sharding import own_mesh
from sao_jax.report.intervals import wilson
from sao_jax.runtime.checkpoints import write_durably
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.evaluation import evaluate
from sao_jax.runtime.hosts import HostLost, Leader
from sao_jax.runtime.loop import Loop
from sao_jax.runtime.loop_metrics import LoopMetrics
from sao_jax.runtime.preheat import fit_critic
from sao_jax.runtime.run import Run, make_learner, open_run, read_config, restored_state
from sao_jax.runtime.signals import Interrupted
from sao_jax.runtime.warm_start import warm_start


def train(
    config: RunConfig,
    folder: pathlib.Path,
    display,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    trace: bool = False,
    readings: str | None = None,
    check: Callable[[], None] = lambda: None,
    leader: Leader | None = None,
) -> dict[str, Any]:
    """Runs all stages in `folder`; returns the final figures, also written to `evaluation.json`.

    `check()` is called between compiled calls and may raise Interrupted: a checkpoint is then written, and the same
    folder can be resumed. `leader`: of the other hosts that have a part in the learner, if there are any.
    """
    run = open_run(
        config, folder, resume=resume, tensorboard=tensorboard, trace=trace, readings=readings, leader=leader
    )
    try:
        with contextlib.closing(Stages(run, display, check)) as stages:
            return stages.go(resume)
    finally:
        run.agents.close()
        run.close()


class Stages:
    """The stages of one run in order."""

    def __init__(self, run: Run, display, check: Callable[[], None]):
        self.run, self.config, self.display, self.check = run, run.config, display, check
        run.agents.note = display.note
        self.metrics = LoopMetrics(run, display)
        preheated = self.config.preheat_rollouts or 0 if self.config.has_critic else 0
        self.loop = Loop(run, first_rollout=preheated, check=check, metrics=self.metrics, between=self._evaluate_if_due)
        self._evaluated_at = -1

    def close(self) -> None:
        self.loop.close()

    def go(self, resume: bool) -> dict[str, Any]:
        run, config = self.run, self.config
        self._announce()
        newest = run.checkpoints.newest() if resume else None
        if newest is not None and (figures := self._final_figures(newest)) is not None:
            self.display.note("the run has ended; nothing is left to do (--rollouts takes a larger number)")
            return figures
        position, updates = self._restore_or_start(newest)
        self._compile()
        run.agents.publish(run.learner.published_policy(), run.learner.version)
        if not updates and not self._has_events("update"):
            for greedy in (False, True):
                self._evaluate("before RL", run.learner.version, greedy=greedy)
        if self._preheats:
            position = max(position, self._preheat(position))
        with_updates = f"RL, {config.rollouts} rollouts"
        self.display.stage(with_updates, config.rollouts, "rollouts")
        run.status.stage("RL", updates * config.batch_size, config.rollouts, "rollouts")
        self._interruptible(lambda: self.loop.restore(position, updates))
        self._interruptible(self.loop.go)
        end = run.ledger.last_position()
        run.save(position=end, updates=self.loop.updates, stage="done", drift=self.metrics.drift)
        run.checkpoints.wait()
        return self._final()

    def replay(self, target: int, observe: Callable) -> None:
        """Trains from the recorded events up to position `target`, without sampling (but see `observe`)."""
        run = self.run
        self._announce()
        position, updates = self._restore_or_start(run.checkpoints.newest())
        self._compile()
        run.agents.publish(run.learner.published_policy(), run.learner.version)
        if self._has_events("preheat"):
            position = max(position, self._preheat(position))
        self.display.stage("replaying", self.config.rollouts, "rollouts")
        self._interruptible(lambda: self.loop.reapply(position, updates, observe, until=target))
        self.metrics.flush()
        run.save(position=target, updates=self.loop.updates, stage="done")
        run.checkpoints.wait()

    def _announce(self) -> None:
        config = self.config
        low, high = config.band_ends()
        self.display.note(f"run folder: {self.run.folder}")
        self.display.note(
            f"task {config.task}; {config.policy_loss} with band ({low:g}, {high:g}) {config.outside or ''}"
        )

    def _final_figures(self, newest: int) -> dict[str, Any] | None:
        """What a run that ended wrote, unless more rollouts have been asked for since."""
        run, path = self.run, self.run.folder / "evaluation.json"
        if run.checkpoints.read_meta(newest)["stage"] != "done" or run.ledger.next_rollout() < self.loop.limit:
            return None
        figures = json.loads(path.read_text()) if path.exists() else {}
        # A run that was extended, and killed in its evaluation, has those of its former end.
        return figures if figures.get("rollouts") == run.ledger.next_rollout() else None

    def _restore_or_start(self, newest: int | None) -> tuple[int, int]:
        """(position in the log, updates) from which to go on."""
        run = self.run
        if newest is None:
            with run.clock.stopped():
                self._start()
            run.save(position=0, updates=0, stage="start")
            return 0, 0
        state, meta = run.checkpoints.restore(newest, run.learner.programs.abstract_state())
        run.learner.load(state, meta["version"])
        run.started -= meta["time_s"]
        run.clock.restore(meta["clock_s"])
        self.metrics.drift = meta.get("drift", 0.0)  # checkpoints of earlier versions have none
        self.display.note(f"resumed at version {meta['version']} from checkpoint {newest}")
        return meta["position"], meta["updates"]

    @property
    def _preheats(self) -> bool:
        return self.config.has_critic and bool(self.config.preheat_rollouts or self.config.preheat_from)

    # ---- stages

    def _start(self) -> None:
        """The starting policy: another run's, a warm start, or random weights."""
        run, config = self.run, self.config
        if config.init_from:
            run.learner.start(self._policy_of(pathlib.Path(config.init_from)))
        elif config.warm_start_steps:
            self._stage("warm start", config.warm_start_steps, "steps")

            def report(step, loss):
                line = {"stage": "warm_start", "time_s": run.seconds(), "warm_start/loss": loss}
                run.log.write(step - config.warm_start_steps, line)
                self._advance(step, loss=loss)

            if run.leader is not None:
                run.leader.tell("warm_start")
            policy = warm_start(
                config,
                run.learner.programs.config,
                run.family,
                run.learner.state["policy"],
                run.context,
                run.mesh,
                report=report,
                check=self.check,
            )
            run.learner.start(policy)

    def _policy_of(self, folder: pathlib.Path) -> dict:
        """The newest policy of another run, which has the same model: see `check_sources`."""
        other = read_config(folder)
        learner = make_learner(other, self.run.family, self.run.context, own_mesh(self.run.mesh))
        state, _ = restored_state(folder, learner)
        return state["policy"]

    def _preheat(self, position: int) -> int:
        """Collects, or reads, trajectories of the starting policy and fits the critic; returns the event's position."""
        run, config = self.run, self.config
        done = next(iter(run.ledger.events(kinds=("preheat",))), None)
        if done is not None and done.position <= position:
            return done.position
        for event in run.ledger.events(kinds=("clock",)):
            run.clock.restore(event.payload["clock_s"])  # what was collected before a kill has been paid for
        if config.preheat_from:
            rows, rollouts = self._rows_of(pathlib.Path(config.preheat_from)), []
        else:
            rollouts = done.payload["rollouts"] if done else self._collect(config.preheat_rollouts)
            rows = [self.loop.rows(run.trajectory(r)) for r in rollouts]
        if done is None:
            with run.ledger.transaction():
                if rollouts:
                    run.ledger.train(rollouts, 0)
                position = run.ledger.record("preheat", {"rollouts": rollouts, "from": config.preheat_from})
        else:
            position = done.position
        self._stage("preheating the critic", config.preheat_epochs, "passes")

        def report(epoch, variance, loss):
            line = {"stage": "preheat", "time_s": run.seconds(), "clock_s": run.clock()}
            line |= {"preheat/epoch": epoch, "preheat/rollouts": len(rows)}
            run.log.write(0, line | {"preheat/explained_var": variance, "critic/vf_loss": loss})
            self._advance(epoch, explained_var=variance)

        fit_critic(run.learner, rows, config.preheat_epochs, config.seed, report=report, check=self.check)
        run.save(position=position, updates=0, stage="preheated")
        return position

    def _collect(self, count: int) -> list[int]:
        """Rollouts 0..count-1 with the starting policy, in the order in which they finished."""
        self._stage("preheating rollouts", count, "rollouts")
        return self.loop.collect_only(count, self._advance)

    def _rows_of(self, folder: pathlib.Path) -> list[list[dict[str, np.ndarray]]]:
        """Training rows from the trajectories of another run."""
        from sao_jax.data.segments import read_trajectory
        from sao_jax.data.storage import TrajectoryStore
        from sao_jax.runtime.ledger import Ledger

        if not (folder / "ledger.sqlite").exists():
            raise ValueError(f"--preheat-from {folder} is not a run folder: it has no ledger.sqlite")
        with (
            Ledger(folder / "ledger.sqlite", read_only=True) as ledger,
            TrajectoryStore(folder / "trajectories") as store,
        ):
            done = ledger.stored()
            rows = [self.loop.rows(read_trajectory(store, r.location)) for r in done]
        if not rows:
            raise ValueError(f"--preheat-from {folder} holds no finished trajectory")
        return rows

    # ---- around the loop

    def _stage(self, name: str, total: int, unit: str) -> None:
        """A stage before or after the loop, which tells its own status."""
        self.display.stage(name, total, unit)
        self._progress = {"name": name, "total": total, "unit": unit}
        self._tell(done=0)

    def _advance(self, done: int, **figures: float) -> None:
        self.display.advance(done, **figures)
        if self.run.status.due:
            self._tell(done=done)

    def _tell(self, **progress: Any) -> None:
        run = self.run
        run.status.stage(**self._progress, **progress, version=run.learner.version, engines=run.agents.describe())

    def _compile(self) -> None:
        """Compiles every program of the stages to come and names them; nothing compiles later."""
        run = self.run
        start, before = time.monotonic(), run.compiles.count
        self._stage("compiling", 1, "")
        blank = blank_row(run.learner.layout.length)
        preheat = self._preheats or bool(self.config.num_critic_only_steps)
        with run.clock.stopped():
            sampler = run.agents.warm_up(self.check)
            learner = run.learner.warm_up(blank, preheat=preheat, check=self.check)
        self.metrics.mark_compiled()
        self.display.advance(1)
        line = {"stage": "compile", "time_s": run.seconds(), "programs": run.compiles.count - before}
        run.log.write(run.learner.version, line)
        self.display.note(
            f"compiled {run.compiles.count - before} programs in {time.monotonic() - start:.0f} s; "
            f"sampler: {', '.join(sampler)}; learner: {', '.join(learner)}"
        )

    def _evaluate_if_due(self, version: int) -> None:
        every = self.config.eval_every
        if every and version and version % every == 0 and version != self._evaluated_at and not self.loop.finishing:
            self._evaluate("held-out", version)

    def _evaluate(self, name: str, version: int, *, greedy: bool = False, count: int | None = None) -> dict[str, Any]:
        """One held-out evaluation; attempts of the loop that end meanwhile are digested by the loop's next turn."""
        run, config = self.run, self.config
        self._evaluated_at = version
        run.status.stage(f"evaluation of version {version}", version=run.learner.version, engines=run.agents.describe())
        with run.timer("eval"), run.clock.stopped():
            result = evaluate(
                run.agents,
                count or config.eval_tasks,
                temperature=0.0 if greedy else config.temperature,
                seed=config.seed,
                max_attempts=config.max_attempts,
                version=self.loop.published,
                check=self.check,
                other=self.loop.take,
                dispatched=self.loop.note_burst,
            )
        low, high = wilson(result.successes, len(result.rewards))
        figures = {
            "eval/success": result.successes / len(result.rewards),
            "eval/low": low,
            "eval/high": high,
            "eval/n": len(result.rewards),
            "eval/failed": result.failed,
            "eval/greedy": greedy,
            "eval/reward": float(np.mean(result.rewards)),
        }
        line = {"stage": "eval", "time_s": run.seconds(), "clock_s": run.clock(), "version": version}
        counts = run.ledger.counts()
        # What the result has cost: preheating and dropped rollouts included, those under way not.
        line |= {"rollouts": self.metrics.trained, "sampled": counts["handed_out"] - counts["running"]}
        run.log.write(version, line | figures)
        how = "greedy" if greedy else "sampled"
        self.display.note(
            f"{name}, version {version}: held-out success {figures['eval/success']:.3f} [{low:.3f}, {high:.3f}] "
            f"({how}, {len(result.rewards)} instances{f', {result.failed} failed' if result.failed else ''})"
        )
        return figures

    def _has_events(self, kind: str) -> bool:
        return next(iter(self.run.ledger.events(kinds=(kind,))), None) is not None

    def _interruptible(self, stage: Callable[[], None]) -> None:
        """On Interrupted, saves what the learner has at its last boundary; durable events take care of the rest."""
        try:
            stage()
        except Interrupted:
            self.metrics.flush()
            self.loop.save_at_boundary()
            self.run.checkpoints.wait()
            raise
        except HostLost:
            if not self.config.shard_params:  # what the others had a part of cannot be collected any more
                # Where calls under way have failed with the host, the state has failed with them.
                with contextlib.suppress(ValueError, RuntimeError):
                    self.loop.save_at_boundary()
                    self.run.checkpoints.wait()
            raise

    def _final(self) -> dict[str, Any]:
        run = self.run
        self.loop.publish()
        self.display.stage("evaluation", 1, "")
        sampled = self._evaluate("after RL", run.learner.version)
        greedy = self._evaluate("after RL", run.learner.version, greedy=True)
        self.display.advance(1)
        counts = run.ledger.check()
        figures = {
            "success": sampled["eval/success"],
            "low": sampled["eval/low"],
            "high": sampled["eval/high"],
            "n": sampled["eval/n"],
            "failed": sampled["eval/failed"],
            "greedy_success": greedy["eval/success"],
            "version": run.learner.version,
            "rollouts": counts["handed_out"],
            "counts": counts,
            "seconds": run.seconds(),
            "recompilations": run.compiles.count - self.metrics.compiled,
        }
        write_durably(run.folder / "evaluation.json", json.dumps(figures, indent=1))
        run.status.stage("done")
        return figures
