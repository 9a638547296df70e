"""The host loop: streams single trajectories into the learner while others are being sampled.

One thread enqueues all device work, in an order that is written down first. Each turn

    collect   what the last burst sampled; environments answer
    admit     new rollouts into free slots, as far as the staleness bound allows
    dispatch  the next burst
    digest    store finished trajectories, decide what the learner does with them, make both durable
    apply     do it: copy rows, gradient calls, the update at a full batch, publication

Digesting overlaps the burst that was just enqueued, and the environments' work overlaps the gradient calls. What the
learner does is a function of the recorded events (`arrive`, `accumulate`, `update`, `preheat`) and the stored
trajectories: `runtime.effects` is all there is to a resume or a replay.
"""

import collections
from collections.abc import Callable
from typing import Any

from sao_jax.data.segments import Segment
from sao_jax.data.trajectory import Trajectory
from sao_jax.data.windows import windows_of
from sao_jax.rollout.agents import Failure
from sao_jax.runtime.collector import Collector, Dropped, Ready
from sao_jax.runtime.effects import Effects
from sao_jax.runtime.evaluation import FIRST_ID
from sao_jax.runtime.ledger import staleness
from sao_jax.runtime.loop_metrics import LoopMetrics
from sao_jax.runtime.quarantine import not_quarantined, quarantine
from sao_jax.runtime.run import Run
from sao_jax.runtime.segment_log import SegmentLog

MAX_FAILED_IN_A_ROW = 50  # rollouts dropped because their environment failed, with none between that finished


class FailedEnvironmentsError(ValueError):
    """Every environment fails."""


class Loop(Effects):
    """RL on one run; see the module's text.

    `check()` is called once a turn and may raise to stop the run; `between(version)` is called once a turn as well, at
    a point where something else may drive the sampler for a while (see `take` and `note_burst`).
    """

    def __init__(
        self,
        run: Run,
        *,
        first_rollout: int,
        check: Callable[[], None],
        metrics: LoopMetrics,
        between: Callable[[int], None] = lambda version: None,
    ):
        super().__init__(run, metrics, check)
        self._between = between
        run.agents.seam = self.seam
        self.limit = first_rollout + self.config.rollouts  # rollouts to be handed out in all
        self._collecting = False  # preheating: trajectories are stored and go nowhere
        self._taken: list = []  # attempts that ended while others drove the engine
        self._collector = Collector(self.config)
        self._ready: collections.deque[Ready] = collections.deque()
        self._restarts: collections.deque[tuple[int, int]] = collections.deque()  # (rollout, attempt) to be started
        self._seams: list[Segment] = []  # of attempts under way, to be stored with the next transaction
        self._segments = SegmentLog(
            run.store, run.ledger, steps_per_segment=self.config.segment_steps, note=metrics.note
        )
        self._batch: list[int] = []  # rollouts that have arrived in the batch, as planned
        self._planned_updates = 0
        self._failed_in_a_row, self._failure = 0, ""
        self._given_up: list[int] = []  # failed in all of their attempts, to be quarantined
        self._next = run.ledger.next_rollout()

    # ---- the loop

    def go(self) -> None:
        """Runs until the budget is used up; the last batch may be smaller than the others."""
        self.run.learner.critic_only = self._critic_only(self.updates)
        timer = self.run.timer
        self.metrics.begin()
        try:
            while True:
                self._check()
                self._between(self.run.learner.version)
                timer.switch("collect")
                ended = self._taken + self.run.agents.collect()
                self._taken = []
                timer.switch("admit")
                self._admit(len(ended))
                timer.switch("dispatch")
                live = self.run.agents.dispatch()
                if live:
                    self.note_burst(self.run.agents.last_schedule)
                if decision := self._pilot.decide(self.room() + self.run.agents.running, self.metrics.oldest_wait()):
                    self._schedule.append(("concurrency", decision))
                    self.metrics.devices = decision
                    self._tell_status(decision)
                timer.switch("store")
                todo = self._digest(ended, idle=not live)
                timer.switch("learn")
                for position, kind, payload in todo:
                    self.apply(position, kind, payload)
                if self._over(live):
                    self._tell_status(self._pilot.decide(self.room(), self.metrics.oldest_wait(), at_once=True))
                    break
        finally:
            timer.switch("other")
            self.close()
        if not self.updates and set(self.metrics.dropped) == {"failed"}:
            raise FailedEnvironmentsError(
                f"all {self.metrics.dropped['failed']} rollouts failed; the last: {self._failure}"
            )
        self.metrics.flush()

    def _over(self, live: bool) -> bool:
        busy = live or self._taken or self._ready or self._collector.held or self._batch
        return not busy and self.finishing

    @property
    def finishing(self) -> bool:
        """Everything has been handed out and has ended."""
        return self._next >= self.limit and not self.run.agents.running and not self._restarts

    def collect_only(self, count: int, report: Callable[[int], None]) -> list[int]:
        """Stores rollouts 0..count-1 without training on them; returns those that finished, in that order."""
        ledger, limit = self.run.ledger, self.limit
        self._collecting, self.limit = True, count
        self._restart_running()
        while not self.finishing or self._taken:
            self._check()
            ended, self._taken = self._taken + self.run.agents.collect(), []
            self._admit()
            if self.run.agents.dispatch():
                self.note_burst(self.run.agents.last_schedule)
            if ended or self._seams:
                self._schedule.append(("clock", {"clock_s": self.run.clock()}))  # no checkpoint has it yet
                self._digest(ended, idle=False)
                report(len(ledger.finished()))
        self._collecting, self.limit = False, limit
        return [r.id for r in ledger.finished()]

    def take(self, ended: list) -> None:
        """Attempts that ended while something else drove the engine; the next turn digests them."""
        self._taken += ended

    def note_burst(self, schedule: dict | None) -> None:
        if schedule is not None:
            self._schedule.append(("burst", schedule))

    def _tell_status(self, decision: dict) -> None:
        """What `experiments.status` shows."""
        told = {"version": self.run.learner.version, "updates": self.updates, "restarts": len(self._restarts)}
        told |= {"waiting": self._collector.held + len(self._ready), "engines": self.run.agents.describe()}
        self.run.status.stage("RL", self.metrics.trained, self.config.rollouts, "rollouts", **told, **decision)

    # ---- admission

    def room(self) -> int:
        """Rollouts that may still be admitted under the staleness bound."""
        if self._collecting:
            return self.limit
        bound = self.config.max_staleness if self.config.forced_staleness is None else self.config.forced_staleness
        waiting = self._collector.held + len(self._ready) + len(self._restarts) + len(self._batch)
        # While weights are on their way to other processes, new attempts would begin with older ones.
        behind = max(0, self.published - self.run.agents.version)
        return (bound + 1 - behind) * self.config.batch_size - self.run.agents.running - waiting

    def _admit(self, ended: int = 0) -> None:
        """`ended` attempts have been collected and are still to be digested; they take up room."""
        ledger, n = self.run.ledger, self.config.n_samples_per_prompt
        self._start_waiting()
        room = self.room() - ended
        free = self._pilot.free
        if free <= 0 or self._next >= self.limit or (room <= 0 and self._next % n == 0):
            return
        admitted = 0
        with ledger.transaction():
            while free > admitted and self._next < self.limit:
                # A group that has begun is completed, or those that wait for it would wait for ever.
                if room - admitted <= 0 and self._next % n == 0:
                    break
                ledger.admit(self._next, self._task(self._next), self._next // n, self._next % n)
                self._restarts.append((self._next, 0))
                admitted += 1
                self._next += 1
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts what is to be started. A process found dead at a start takes its free slots with it: ask each time."""
        while self._restarts and self._pilot.free > 0:
            self._start(*self._restarts.popleft())

    def _index(self, rollout: int) -> int:
        """Which training instance a rollout attempts; members of a group share theirs."""
        index, distinct = rollout // self.config.n_samples_per_prompt, self.config.train_tasks
        return index % distinct if distinct else index

    def _task(self, rollout: int) -> str:
        return self.run.family.instance("train", self._index(rollout)).id

    def _start(self, rollout: int, attempt: int) -> None:
        n = self.config.n_samples_per_prompt
        snapshot = self._segments.begin(rollout, attempt)
        self.run.agents.start(
            "train",
            self._index(rollout),
            rollout=rollout,
            attempt=attempt,
            group=rollout // n,
            sample=rollout % n,
            seed=self.config.seed,
            temperature=self.config.temperature,
            snapshot=snapshot,
        )

    # ---- decisions, made durable before they take effect

    def _digest(self, ended: list, *, idle: bool) -> list[tuple[int, str, Any]]:
        """Stores what ended and records what the learner is to do; returns that, in order."""
        last = self.finishing
        if not ended and not self._ready and not idle and not last and not self._seams:
            return []
        restart = []
        self._settle_drift()
        self._collector.drift = self.metrics.drift
        with self.run.ledger.transaction():
            if ended or self._seams or last:
                self._write_schedule()
            self._store_seams()
            for item in ended:
                if isinstance(item, Failure):
                    restart += self._failed(item)
                else:
                    self._finished(item)
            if last and not restart:
                self._decided(self._collector.flush())
            todo = [] if self._collecting else self._plan(idle=idle, last=last and not restart)
        self._restarts.extend(restart)
        self._quarantine()  # after the commit: an attempt that a kill undoes has not failed
        return todo

    def _write_schedule(self) -> None:
        """Before whatever it came before.

        Alone it is not worth a commit, which waits for the disk: while trajectories are held for staleness, every turn
        looks for what may go, and most find nothing.
        """
        for kind, payload in self._schedule:
            self.run.ledger.record(kind, payload)
        self._schedule.clear()

    def seam(self, segment: Segment) -> None:
        """An attempt under way has come to the end of a segment; an evaluation's is not kept.

        It is durable before any token of the next one is collected; while an evaluation drives the engine, after that.
        """
        if segment.rollout < FIRST_ID:
            self._seams.append(segment)

    def _store_seams(self) -> None:
        for segment in self._seams:
            if not self._segments.add(segment):
                self.metrics.note(
                    f"rollout {segment.rollout}: a segment at token {segment.first_token} does not join on those "
                    "before it and is not kept"
                )
        self._seams.clear()

    def _finished(self, t: Trajectory) -> None:
        self.run.ledger.finish(t.rollout, self._segments.finish(t), t.total_reward)
        self._failed_in_a_row = 0
        if not self._collecting:
            self.metrics.finished(t)
            self._decided(self._collector.add(t))

    def _failed(self, failure: Failure) -> list[tuple[int, int]]:
        """Restarts an attempt that failed, or drops its rollout after `max_attempts` failures.

        Failures are counted, not attempts: those that ended with the run, at a stop or a kill, say nothing about it.
        """
        rollout, ledger = failure.rollout, self.run.ledger
        failures = len(ledger.failures(rollout)) + 1
        self.metrics.note(f"rollout {rollout}, attempt {failures} of {self.config.max_attempts}: {failure.reason}")
        if failures < self.config.max_attempts:
            return [(rollout, ledger.restart(rollout, failure.reason))]
        self._segments.forget(rollout)
        self._drop(rollout, "failed", failure.reason)
        self._given_up.append(rollout)
        self._failed_in_a_row, self._failure = self._failed_in_a_row + 1, failure.reason
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            raise FailedEnvironmentsError(
                f"{self._failed_in_a_row} rollouts in a row failed in all of their attempts; the last: {self._failure}"
            )
        self._decided(self._collector.lose(rollout // self.config.n_samples_per_prompt))
        return []

    def _quarantine(self) -> None:
        for rollout in self._given_up:
            try:
                path = quarantine(self.run.folder, self.run.ledger, self.run.store, rollout, self._index(rollout))
                self.metrics.note(f"rollout {rollout} is dropped, see {path}")
            except (OSError, ValueError) as error:  # a full disk, a damaged part: no reason to end the run
                self.metrics.note(
                    f"rollout {rollout} is dropped; the ledger has its failures, its file could not be written: {error}"
                )
        self._given_up.clear()

    def _drop(self, rollout: int, reason: str, failure: str | None = None) -> None:
        self.run.ledger.drop(rollout, reason, failure)
        self.metrics.drop(rollout, reason)

    def _decided(self, items: list[Ready | Dropped]) -> None:
        for item in items:
            if isinstance(item, Dropped):
                self._drop(item.trajectory.rollout, item.reason)
            else:
                self._ready.append(item)

    @property
    def _version(self) -> int:
        """The policy's version once everything planned is done."""
        return self._version_of(self._planned_updates)

    def _plan(self, *, idle: bool, last: bool) -> list[tuple[int, str, Any]]:
        """Arrivals, gradient calls and updates that the ready trajectories allow, recorded in the ledger."""
        todo: list[tuple[int, str, Any]] = []

        def record(kind, payload):
            self._write_schedule()
            todo.append((self.run.ledger.record(kind, payload), kind, payload))

        learner, arrival = self.run.learner, self.config.critic_update == "arrival"
        layout, rows = learner.layout, learner.filled  # all that was planned before has been applied
        accumulated = rows - (learner.pending if not arrival else 0)
        packing = learner.packing()
        while True:
            if len(self._batch) == layout.batch:
                self._record_update(record)
                accumulated = rows = 0
                if packing is not None:
                    packing.clear()
            item = self._next_ready()
            if item is None:
                break
            t = item.trajectory
            stale = staleness(self._version, t.oldest_version, int(t.version.max()))
            if stale > self.config.max_staleness and self.config.over_stale == "drop":
                self._write_schedule()
                self._drop(t.rollout, "stale")
                self._decided(self._collector.lose(t.group))
                continue
            self._rows[t.rollout] = t
            self._batch.append(t.rollout)
            self.metrics.arrived(t, stale)
            lengths = [w.length for w in windows_of(t.action_mask, t.step_ids, t.windows, layout.length)]
            if packing is not None:
                if rows > accumulated and packing.closes_window(lengths):
                    record("accumulate", {})  # before this one opens the next window
                    accumulated = rows
                for length in lengths:
                    packing.add(length)
            record("arrive", {"rollout": t.rollout, "advantage": item.advantage})
            before, rows = rows, rows + len(lengths)
            full = len(self._batch) == layout.batch
            if not arrival and (full or (packing is None and layout.completes_window(rows, before))):
                record("accumulate", {})
                accumulated = rows
        if last and self._batch and not self._ready:
            self._record_update(record)
        elif idle and not arrival and packing is None and rows > accumulated:
            record("accumulate", {})  # the learner would idle: use what is there
        return todo

    def _record_update(self, record: Callable) -> None:
        critic_only = self._critic_only(self._planned_updates)
        self._planned_updates += 1
        self.run.ledger.train(self._batch, self._version)
        payload = {"version": self._version, "critic_only": critic_only, "rollouts": len(self._batch)}
        record("update", payload | {"clock_s": self.run.clock(), "drift": self.metrics.drift})
        self._batch = []

    def _next_ready(self) -> Ready | None:
        """The oldest ready trajectory, unless the options for staleness ask for another one or for patience."""
        if not self._ready:
            return None
        if self.config.forced_staleness is not None:
            return self._next_aged(self.config.forced_staleness)
        if self.config.over_stale == "wait":
            return self._next_in_time(self._version - self.config.max_staleness)
        return self._ready.popleft()

    def _next_aged(self, age: int) -> Ready | None:
        """Under forced staleness: the oldest that is old enough."""
        if self.room() > 0 and self._next < self.limit:
            return None  # first come those that the present weights are to sample, for a later version
        for index, item in enumerate(self._ready):
            if self._version - item.trajectory.oldest_version >= age:
                del self._ready[index]
                return item
        # While the pipeline fills, nothing is old enough: the oldest go, or nothing would ever move.
        return None if self.run.agents.running else self._ready.popleft()

    def _next_in_time(self, limit: int) -> Ready | None:
        """Under --over-stale wait: what the next update would make too old (versions up to `limit`) goes first, and
        attempts under way that it would make too old have a place in this batch."""
        for index, item in enumerate(self._ready):
            if item.trajectory.oldest_version <= limit:
                del self._ready[index]
                return item
        reserved = sum(version <= limit for version in self.run.agents.oldest_versions())
        places = self.run.learner.layout.batch - len(self._batch)
        return self._ready.popleft() if places > reserved else None

    # ---- resume

    def restore(self, position: int, updates: int) -> None:
        """Continues from a checkpoint: applies the durable events after `position`, then takes up what is unfinished.

        Finished trajectories that have not arrived are decided again; running rollouts start a new attempt.
        """
        self.metrics.resume(updates)
        arrived = self.reapply(position, updates)
        self._batch, self._planned_updates = arrived, self.updates
        self._take_up(set(arrived))
        self._given_up = not_quarantined(self.run.folder, self.run.ledger)
        self._quarantine()
        self.publish()
        with self.run.ledger.transaction():
            self._restart_running()

    def _prime(self, wanted: set[int]) -> None:
        """Tells the collector of the rewards that came before, except those of `wanted`, in the order they came."""
        came: list[tuple[str, float]] = []

        def prime():
            for task, reward in came:
                self._collector.prime(task, reward)
            came.clear()

        for event in self.run.ledger.events(kinds=("finish", "update")):
            if event.kind == "update":
                self._collector.drift = event.payload["drift"]  # as it was when these rewards came
                prime()
            elif (rollout := event.payload["rollout"]) not in wanted:
                came.append((self._task(rollout), event.payload["reward"]))
        self._settle_drift()
        self._collector.drift = self.metrics.drift
        prime()

    def _restart_running(self) -> None:
        ledger, running = self.run.ledger, self.run.ledger.running()
        with ledger.transaction():
            for rollout in running:
                self._restarts.append((rollout.id, ledger.restart(rollout.id)))
        if running:
            self.metrics.note(f"{len(running)} rollouts that were under way start again")

    def _take_up(self, arrived: set[int]) -> None:
        """Feeds the collector what finished and has not arrived, with what it needs to decide as before."""
        ledger = self.run.ledger
        waiting = [r for r in ledger.finished() if r.id not in arrived]
        wanted = {r.id for r in waiting}
        if self.config.baseline in ("running_mean", "spo"):
            self._prime(wanted)
        groups = {r.group for r in waiting} if self.config.grouped else set()
        members = ledger.members(groups) if groups else waiting
        with ledger.transaction():
            for r in members:
                if r.state == "dropped" and r.reason != "dead group":
                    decided = self._collector.lose(r.group)
                elif r.state in ("finished", "trained"):
                    decided = self._collector.add(self.run.trajectory(r.id))
                else:
                    continue
                self._decided([d for d in decided if d.trajectory.rollout in wanted])
