"""One attempt: joins an environment and a growing trajectory, on the host, without threads.

    prompt = episode.begin()                       # None: the environment failed, see episode.reason
    engine samples ...
    action = episode.feed(tokens, logp, version, done)      # None while the action goes on
    step = episode.advance()                       # asks the environment; may be slow, may run on another thread
    step.tokens, step.max_new                      # what the sampler reads next and how much it may write
    episode.tokens, episode.room                   # ... all of it, where its context is cut (step.moved)
    trajectory = episode.finish()                  # once episode.end is set

The caller makes sure that one thread at a time touches an episode. The text of an action is decoded for the
environment only; the trajectory keeps the sampled ids.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from sao_jax.data.protocols import LIMIT_REASONS, TOKEN_BUDGET, Instance, Outcome, TaskFamily
from sao_jax.data.segments import Segment, new_segment
from sao_jax.data.trajectory import NoActionError, Trajectory, TrajectoryBuilder
from sao_jax.data.windows import full

_DONE = ("", "stop", "length")
_NOTHING = np.zeros(0, np.int32)
_MAX_REWARD = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Action:
    """A complete action. `done` is "stop" or "length"."""

    text: str
    tokens: np.ndarray
    done: str


@dataclasses.dataclass(frozen=True)
class Next:
    """What follows an action: observation `tokens` (int32 [N], may be empty) and room for `max_new` sampled ones,
    or the `end` of the attempt. `moved`: the context is cut, so the sampler reads `Episode.tokens` instead."""

    tokens: np.ndarray
    max_new: int
    end: str | None = None
    moved: bool = False


class Episode:
    """One attempt at one instance.

    The token budget is that of the whole trajectory, prompt and observations included: the smaller of `context` and
    the family's `max_tokens`. It is counted from the trajectory's length, so neither a new action, a weight swap nor
    a resume refreshes it. An attempt that uses it up is terminated by the task's limit and keeps the reward that the
    verifier gave; with `limit_bootstrap` it counts as truncated instead, like one at the turn limit.

    With a `window` the sampler holds at most that many tokens at once: where they are used up, `tokens` is cut as
    `data.windows` says and the attempt goes on, within an action as well; the trajectory records where.

    A failing environment (any exception, a non-finite reward, text outside the vocabulary) aborts the attempt.
    """

    def __init__(
        self,
        family: TaskFamily,
        instance: Instance,
        *,
        rollout: int = 0,
        attempt: int = 0,
        group: int = 0,
        sample: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        context: int,
        window: int | None = None,
        limit_bootstrap: bool = False,
    ):
        self._family, self._instance = family, instance
        self._labels = dict(rollout=rollout, attempt=attempt, group=group, sample=sample, seed=seed)
        self._labels |= dict(task=instance.id, temperature=temperature)
        self.rollout, self.attempt, self.task = rollout, attempt, instance.id
        self.budget = min(context, family.max_tokens)
        self.end: str | None = None
        self.reason = ""
        self._limit_bootstrap, self._window = limit_bootstrap, window
        self._builder: TrajectoryBuilder | None = None
        self._environment = None
        self._pieces: list[np.ndarray] = []
        self._action: Action | None = None
        self._turns = 0
        self._started = time.perf_counter()
        self._environment_s = 0.0

    @property
    def max_new(self) -> int:
        """Tokens left in the budget."""
        return self.budget - (self._builder.length if self._builder else 0)

    @property
    def room(self) -> int:
        """Tokens that the sampler may write to what it holds."""
        return self.max_new if self._window is None else min(self.max_new, self._window - self._builder.context_length)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [N]: what a sampler reads to take over the attempt: everything so far, or the newest window of it."""
        return self._builder.context

    @property
    def offset(self) -> int:
        """Tokens of the attempt that are left out of `tokens`."""
        return self._builder.length - self._builder.context_length

    def move(self) -> bool:
        """Cuts what the sampler holds if there is no room for an action; whether it did."""
        if self._window is None or not full(self._builder.context_length, self._window, self.max_new):
            return False
        self._builder.open_window(self._window)
        return True

    @property
    def turns(self) -> int:
        return self._turns

    def begin(self) -> np.ndarray | None:
        """What the sampler reads first, int32 [N]: the prompt's tokens. None if the attempt is over before it began:
        see `end` and `reason`."""
        prompt = self._ask(self._reset)
        if prompt is None:
            return None
        if not 0 < len(prompt) < self.budget:
            self.abort(f"prompt of {len(prompt)} tokens in a budget of {self.budget}")
            return None
        self._builder = TrajectoryBuilder(prompt, **self._labels)
        self.move()
        return self.tokens

    def resume(self, snapshot: Trajectory) -> np.ndarray | None:
        """Continues a stored snapshot that ended after an answered action, instead of `begin`.

        The environment is restored by its actions. Returns what the sampler reads, or None if restoring failed.
        """
        self._builder = TrajectoryBuilder.resume(snapshot, **self._labels)
        actions = [self._family.tokenizer.decode(ids) for ids in snapshot.actions()]
        self._turns = len(actions)
        restored = self._ask(lambda: self._restore(actions))
        if not restored:
            return None
        self.move()
        return self.tokens

    def feed(
        self, tokens: Sequence[int], logp: Sequence[float], version: Sequence[int], done: str = ""
    ) -> Action | None:
        """Adds a piece of the current action; returns the action when `done` says that it is complete.

        A "length" that is the window's and not the budget's completes nothing: the action goes on in the next window.
        """
        if done not in _DONE:
            raise ValueError(f"done is {done!r}; allowed: {', '.join(map(repr, _DONE))}")
        if self._builder is None or self.end is not None or self._action is not None:
            raise RuntimeError("the episode expects no tokens now")
        if len(tokens) > self.max_new:
            raise ValueError(f"{len(tokens)} sampled tokens exceed the {self.max_new} left of {self.budget}")
        self._builder.add_action(tokens, logp, version)
        self._pieces.append(np.asarray(tokens, np.int32).reshape(-1))
        if not done or (done == "length" and self._window is not None and self.max_new > 0):
            return None
        self._builder.end_action()
        ids = np.concatenate(self._pieces)
        self._pieces = []
        self._action = Action(self._family.tokenizer.decode(ids), ids, done)
        return self._action

    def advance(self) -> Next:
        """Gives the complete action to the environment and takes its answer into the trajectory.

        An action that the budget cut off is shown too, so that the verifier judges what was written.
        """
        if self._action is None:
            raise RuntimeError("no complete action to answer; feed one first")
        action, self._action = self._action, None
        self._turns += 1
        answered = self._ask(lambda: self._step(action.text))
        if answered is None:
            return self._next(_NOTHING)
        outcome, observation = answered
        self._builder.add_reward(outcome.reward, outcome.parts)
        fits = len(observation) <= self.max_new
        if fits:
            self._builder.add_observation(observation)
        if outcome.end is not None:
            self._close(outcome.end, outcome.reason)
        elif action.done == "length" or not fits or self.max_new < 1:
            self._close("terminated", TOKEN_BUDGET)
        return self._next(observation if fits else _NOTHING)

    def cut(self, reason: str) -> None:
        """Ends the attempt for our own reasons; it is truncated, and trained with a bootstrap."""
        self._close("truncated", reason)

    def abort(self, reason: str) -> None:
        """Ends the attempt because something failed; it is not trained."""
        self._close("aborted", reason)

    def snapshot(self) -> Trajectory:
        """The trajectory so far, as it is given to `resume` after a failure.

        Taken between an answer and the next action, so that the environment can be restored to the same point.
        """
        if self._pieces or self._action is not None:
            raise RuntimeError("a snapshot is taken between actions, not within one")
        return self._builder.build("truncated", "snapshot", self._timings())

    def segment(self, steps_per_segment: int) -> Segment:
        """What came since the last segment, or since the snapshot that was resumed; asked when `snapshot` may be."""
        if self._pieces or self._action is not None:
            raise RuntimeError("a segment ends between actions, not within one")
        return new_segment(self._builder, steps_per_segment=steps_per_segment, timings=self._timings())

    def finish(self) -> Trajectory:
        """The finished trajectory. Raises NoActionError if nothing was sampled, also when there is no prompt."""
        if self.end is None:
            raise RuntimeError("the episode has not ended; cut or abort it first")
        if self._builder is None:
            raise NoActionError(f"task {self._labels['task']!r} ended before it began: {self.reason}")
        return self._builder.build(self.end, self.reason, self._timings())

    def _ask(self, call):
        """call(), timed; None and an aborted episode if the environment fails.

        An environment is the user's code and may raise anything; that is one failed attempt, not a failed run.
        """
        start = time.perf_counter()
        try:
            return call()
        except Exception as error:
            self.abort(f"environment: {type(error).__name__}: {error}"[:500])
            return None
        finally:
            self._environment_s += time.perf_counter() - start

    def _reset(self) -> np.ndarray:
        self._environment = self._family.environment()
        return self._encode(self._environment.reset(self._instance))

    def _restore(self, actions: list[str]) -> bool:
        self._environment = self._family.environment()
        self._environment.restore(self._instance, actions)
        return True

    def _step(self, text: str) -> tuple[Outcome, np.ndarray]:
        outcome = self._environment.step(text)
        if not all(abs(r) <= _MAX_REWARD for r in (outcome.reward, *outcome.parts.values())):  # also NaN
            raise ValueError(f"reward {outcome.reward} {dict(outcome.parts)} is not finite")
        if outcome.end not in (None, "terminated", "truncated", "aborted"):
            raise ValueError(f"end is {outcome.end!r}; allowed: None, terminated, truncated, aborted")
        return outcome, self._encode(outcome.observation)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._family.tokenizer.encode(text), np.int32)

    def _next(self, observation: np.ndarray) -> Next:
        if self.end:
            return Next(observation, 0, self.end)
        moved = self.move()
        return Next(observation, self.room, None, moved)

    def _close(self, end: str, reason: str) -> None:
        if self.end is not None:
            return
        if self._limit_bootstrap and end == "terminated" and reason in LIMIT_REASONS:
            end = "truncated"
        self.end, self.reason = end, reason

    def _timings(self) -> dict[str, float]:
        return {"episode_s": time.perf_counter() - self._started, "environment_s": self._environment_s}
