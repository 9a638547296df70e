"""Many attempts at once: one engine, one environment per attempt.

    agents.start("train", 3, rollout=7, ...)   # needs agents.free > 0
    agents.dispatch()                          # one burst for every live row
    for trajectory in agents.collect(): ...    # attempts that ended

Fast environments answer on the calling thread, at once or, to study slow ones, after a simulated time. Others run on
daemon threads, and an answer that takes longer than `env_timeout` seconds aborts the attempt; its thread is given up
and replaced, so a hung environment costs nothing more.
"""

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable

from sao_jax.data.protocols import Split, TaskFamily
from sao_jax.data.segments import Segment
from sao_jax.data.trajectory import NoActionError, Trajectory
from sao_jax.rollout.calls import Calls
from sao_jax.rollout.clock import Clock
from sao_jax.rollout.engine import Engine, Request
from sao_jax.rollout.episode import Episode


@dataclasses.dataclass(frozen=True)
class Failure:
    """An attempt that left no trajectory: it ended before its first token, or its environment failed."""

    rollout: int
    attempt: int
    reason: str


class Agents:
    """Runs episodes of one task family on one engine.

    `context` is the token budget of an attempt, `window` how much of it the engine holds at once (all).
    `simulated_seconds(rollout, task)`, if given, is how long the environment of an attempt takes over each action; the
    time passes on `clock` alone. Environments must then be fast.

    Attributes:
      running: attempts under way.
      seam: called with the newest segment of an attempt under way whenever `seam_turns` further actions have been
        answered, before anything of the next segment is sampled.
    """

    def __init__(
        self,
        engine: Engine,
        family: TaskFamily,
        *,
        context: int,
        window: int | None = None,
        limit_bootstrap: bool = False,
        env_workers: int = 8,
        env_timeout: float = 60.0,
        clock: Clock | None = None,
        simulated_seconds: Callable[[int, str], float] | None = None,
        seam_turns: int = 100,
    ):
        clock = clock or Clock()
        self.engine, self.family = engine, family
        self._limits = dict(context=context, window=window, limit_bootstrap=limit_bootstrap)
        self.seam: Callable[[Segment], None] | None = None
        self._seam_turns = seam_turns
        self._episodes: dict[int, Episode] = {}
        self._seated: dict[int, None] = {}  # rollouts that have a slot
        self._temperature: dict[int, float] = {}
        self._oldest: dict[int, int] = {}  # weights version of the first sampled token
        self._outstanding = False
        self._ended: list[Episode] = []
        if simulated_seconds is not None:
            if not family.fast:
                raise ValueError(
                    f"simulated environment times need a task that answers at once; {family.name} does not"
                )
            self._calls = _Simulated(clock, simulated_seconds)
        else:
            self._calls = None if family.fast else Calls(env_workers, env_timeout, time.monotonic)
        self.environment_s = 0.0

    @property
    def last_schedule(self) -> dict | None:
        """What the last dispatch enqueued."""
        return self.engine.last_schedule

    @property
    def version(self) -> int:
        """Of the weights that the next burst samples with."""
        return self.engine.version

    def publish(self, params: dict, version: int) -> None:
        """New weights from the next burst on; they must not be donated by anyone."""
        self.engine.publish(params, version)

    def warm_up(self, check: Callable[[], None] = lambda: None) -> list[str]:
        """Compiles all programs; returns their names."""
        return list(self.engine.warm_up(check))

    def watched(self, watch: Callable) -> None:
        """`watch(start, result, live rows by device, name)` is told of every burst."""
        self.engine.watch = watch

    def utilization(self) -> list[tuple[float, float]]:
        """Of devices of other processes: there are none."""
        return []

    def describe(self) -> list[dict]:
        """For a person: one entry per engine."""
        return [{"name": "this process", "running": self.running, "slots": self.engine.slots, "version": self.version}]

    def close(self) -> None:
        self.stop()

    @property
    def running(self) -> int:
        return len(self._episodes) + len(self._ended)  # an attempt is over once it has been collected

    @property
    def free(self) -> int:
        """Attempts that can be started: free slots that no attempt still waiting for its prompt has been promised."""
        return self.engine.free - (len(self._episodes) - len(self._seated))

    def oldest_versions(self) -> list[int]:
        """Of each attempt under way that has sampled, the weights version of its first token."""
        return list(self._oldest.values())

    def start(
        self,
        split: Split,
        index: int,
        *,
        rollout: int,
        attempt: int = 0,
        temperature: float = 1.0,
        snapshot: Trajectory | None = None,
        **labels,
    ) -> None:
        """Begins an attempt at an instance of the family, or goes on from a snapshot of one; it joins the engine once
        its environment has answered."""
        episode = Episode(
            self.family,
            self.family.instance(split, index),
            rollout=rollout,
            attempt=attempt,
            temperature=temperature,
            **self._limits,
            **labels,
        )
        self._episodes[rollout], self._temperature[rollout] = episode, temperature
        if snapshot is None:
            self._ask(episode, episode.begin)
        else:

            def begin():
                return episode.resume(snapshot)

            self._ask(episode, begin)

    def dispatch(self) -> bool:
        """Enqueues one burst; False if no row is live (all wait for their environments, or none is running)."""
        self._outstanding = self.engine.dispatch()
        return self._outstanding

    def collect(self, *, wait: float = 0.05) -> list[Trajectory | Failure]:
        """What ended by the burst or by environments' answers; waits up to `wait` s if only environments are busy."""
        for piece in self.engine.collect():
            episode = self._episodes.get(piece.rollout)
            if episode is None:
                continue
            self._oldest.setdefault(piece.rollout, int(piece.version[0]))
            if episode.feed(piece.tokens, piece.logp, piece.version, piece.done) is not None:
                self._ask(episode, episode.advance)
            elif piece.done:  # its window is full, not its budget
                episode.move()
                self._seat(episode)
        if self._calls is not None:
            idle = not self._outstanding and not self._ended
            for episode, method, answer, error in self._calls.answers(wait if idle else 0.0):
                if error:
                    episode.abort(error)
                self._take(episode, method, answer)
        self._outstanding = False
        ended, self._ended = self._ended, []
        return [self._record(episode) for episode in ended]

    def stop(self) -> None:
        """Forgets all attempts under way and frees their slots."""
        for rollout in list(self._episodes):
            self._leave(self._episodes[rollout])
        self._ended = []
        if isinstance(self._calls, _Simulated):
            self._calls.forget()

    # ---- inner parts

    def _ask(self, episode: Episode, method: Callable) -> None:
        if self._calls is not None:
            self._calls.submit(episode, method)
            return
        start = time.perf_counter()
        answer = method()
        self.environment_s += time.perf_counter() - start
        self._take(episode, method.__name__, answer)

    def _take(self, episode: Episode, method: str, answer) -> None:
        """Continues, or ends, an attempt whose environment has answered."""
        if self._episodes.get(episode.rollout) is not episode:
            return
        if episode.end is not None:
            self._leave(episode)
            self._ended.append(episode)
        elif method == "begin":
            self._seat(episode)
        else:
            if self.seam is not None and episode.turns % self._seam_turns == 0:
                self.seam(episode.segment(self._seam_turns))
            if answer.moved:
                self._seat(episode)
            else:
                self.engine.extend(episode.rollout, answer.tokens, answer.max_new)

    def _seat(self, episode: Episode) -> None:
        """Gives the engine what it is to hold of an attempt, instead of what it held."""
        rollout = episode.rollout
        if rollout in self._seated:
            self.engine.release(rollout)
        self._seated[rollout] = None
        request = Request(
            rollout, episode.attempt, episode.tokens, episode.room, self._temperature[rollout], episode.offset
        )
        self.engine.submit(request)

    def _leave(self, episode: Episode) -> None:
        del self._episodes[episode.rollout], self._temperature[episode.rollout]
        self._oldest.pop(episode.rollout, None)
        if episode.rollout in self._seated:
            del self._seated[episode.rollout]
            self.engine.release(episode.rollout)

    def _record(self, episode: Episode) -> Trajectory | Failure:
        if episode.end == "aborted":  # nothing is made of it, also since a hung call may still be writing into it
            return Failure(episode.rollout, episode.attempt, episode.reason)
        try:
            return episode.finish()
        except NoActionError as error:
            return Failure(episode.rollout, episode.attempt, str(error))


class _Simulated:
    """Environment calls whose answers are held back until their drawn time has passed."""

    def __init__(self, clock: Clock, seconds: Callable[[int, str], float]):
        self._clock, self._seconds = clock, seconds
        self._waiting: list = []
        self._order = itertools.count()

    def submit(self, episode: Episode, method: Callable) -> None:
        seconds = self._seconds(episode.rollout, episode.task) if method.__name__ == "advance" else 0.0
        heapq.heappush(self._waiting, (self._clock() + seconds, next(self._order), episode, method))

    def forget(self) -> None:
        self._waiting.clear()

    def answers(self, wait: float) -> list[tuple]:
        """Answers that are due; with `wait` (nothing else is going on) time is passed until the first is."""
        if wait and self._waiting:
            self._clock.skip_to(self._waiting[0][0])
        now, out = self._clock(), []
        while self._waiting and self._waiting[0][0] <= now:
            _, _, episode, method = heapq.heappop(self._waiting)
            out.append((episode, method.__name__, method(), None))
        return out
