"""Value-guided generation: the critic ranks candidate actions, and the best go on.

    best   n candidates after the prefix, the one of the highest value is taken            (a beam of width 1)
    beam   n candidates after each of b prefixes, the b of the highest value are kept

A candidate is `granularity` actions long. All are drawn from the policy; what the environment would say to the last one
is asked for those that are kept alone, so a candidate is ranked by the critic's value of the prefix that ends with its
last action, and no reward is ever looked at. Attempts that have ended keep their place in a beam, at the value that
their last action had; a search ends when all of its b attempts have.

The critic learns the values of states in which a token is chosen, never of the state after an action's last token,
which the environment's answer follows. An action that a stop token ends is therefore valued where that token was
chosen, with all else written: see `valued_prefix`. With `after="observation"` every candidate is shown to (its own
branch of) the environment, and is valued where the next action begins, except one that ended the attempt: that one is
valued after its action, as its reward must not count.

What comes out is not a sample of the policy: `Trajectory.sampler` says what chose, and no learner takes it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from sao_jax.data.protocols import Instance, TaskFamily
from sao_jax.data.trajectory import NoActionError, Trajectory
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.episode import Episode
from sao_jax.rollout.lanes import Ask, Attempt, Draw, Drawn, Judge


@dataclasses.dataclass(frozen=True)
class Search:
    """candidates: of each prefix. beam: prefixes that are kept. granularity: actions of a candidate."""

    candidates: int
    beam: int = 1
    granularity: int = 1
    after: Literal["action", "observation"] = "action"

    def __post_init__(self):
        for name, low in (("candidates", 2), ("beam", 1), ("granularity", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")

    @property
    def width(self) -> int:
        """Candidates at one time."""
        return self.candidates * self.beam

    @property
    def name(self) -> str:
        kind = f"best of {self.candidates}" if self.beam == 1 else f"beam {self.beam} of {self.width}"
        return f"value-guided {kind}, granularity {self.granularity}, valued after the {self.after}"


@dataclasses.dataclass
class _Candidate:
    """A way on from a prefix.

    parent, start: what it branches from, an episode and its snapshot (None: the prompt). tokens: what it has read and
    written, an observation after its last action included unless that ended it. action: its last one. episode: its
    own branch, once it has been shown something; `shown`: its last action was.
    """

    parent: Episode
    start: Trajectory | None
    tokens: np.ndarray
    room: int
    action: Drawn | None = None
    episode: Episode | None = None
    shown: bool = False

    @property
    def end(self) -> str | None:
        return self.episode.end if self.episode is not None else None

    def valued(self) -> np.ndarray:
        """The prefix whose value ranks it."""
        answered = self.shown and self.end is None
        return self.tokens if answered else valued_prefix(self.tokens, self.action)


def valued_prefix(tokens: np.ndarray, action: Drawn) -> np.ndarray:
    """Where an action at the end of `tokens` is valued: where its stop token was chosen, if it ended with one; else
    after it. So is an action that is a stop token alone, as nothing of it would be seen before."""
    return tokens[:-1] if action.done == "stop" and len(action.tokens) > 1 else tokens


def guided_attempt(family: TaskFamily, instance: Instance, search: Search, **labels) -> Attempt:
    """One attempt at an instance, to be run by `lanes.play` with `search.width` lanes; returns a Trajectory or Failure.

    labels: those of Episode, with the attempt's context.
    """

    def new() -> Episode:
        return Episode(family, instance, **labels)

    root = new()
    (prompt,) = yield Ask([(root, root.begin)])
    if prompt is None:
        return Failure(root.rollout, root.attempt, root.reason)
    branching = search.beam > 1 or search.granularity > 1 or search.after == "observation"
    going: list[Episode] = [root]
    ended: list[tuple[float, Episode]] = []
    while going:
        candidates = []
        for episode in going:
            start = episode.snapshot() if branching and episode.turns else None
            candidates += [_Candidate(episode, start, episode.tokens, episode.max_new)] * search.candidates
        candidates = [dataclasses.replace(c) for c in candidates]
        taken: set[int] = set()  # episodes that a child goes on with
        for step in range(search.granularity):
            live = [(lane, c) for lane, c in enumerate(candidates) if c.end is None]
            if not live:
                break
            drawn = yield Draw([(lane, c.tokens, c.room) for lane, c in live])
            for (_, c), action in zip(live, drawn, strict=True):
                c.action, c.shown, c.tokens = action, False, np.concatenate([c.tokens, action.tokens])
            if step + 1 < search.granularity or search.after == "observation":
                yield from _show([c for _, c in live], taken, new)
        candidates = [c for c in _distinct(candidates) if c.end != "aborted"]
        values = yield Judge([c.valued() for c in candidates])
        ranked = sorted([*ended, *zip(values.tolist(), candidates, strict=True)], key=lambda pair: -pair[0])
        going, ended = [], []
        for value, item in ranked:
            if len(going) + len(ended) == search.beam:
                break
            if isinstance(item, _Candidate):
                if not item.shown:
                    yield from _show([item], taken, new)
                item = item.episode
            if item.end is None:
                going.append(item)
            elif item.end != "aborted":
                ended.append((value, item))
            elif not branching:
                break  # the others have nothing to branch from
        if not going and not ended:
            return Failure(root.rollout, root.attempt, "the environment failed on every candidate")
    _, best = max(ended, key=lambda pair: pair[0])
    try:
        return dataclasses.replace(best.finish(), sampler=search.name)
    except NoActionError as error:
        return Failure(root.rollout, root.attempt, str(error))


def _distinct(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The first of each that say the same: a beam of equal prefixes would be one of width 1."""
    return list({c.tokens.tobytes(): c for c in reversed(candidates)}.values())[::-1]


def _show(candidates: Sequence[_Candidate], taken: set[int], new: Callable[[], Episode]):
    """Gives the last action of each candidate to its own branch of the environment.

    The first child of an episode goes on with it; the others replay the actions up to where they branched off.
    """
    branches = []
    for c in candidates:
        if c.episode is None and id(c.parent) in taken:
            c.episode = new()
            branches.append((c.episode, _beginning(c.episode, c.start)))
        elif c.episode is None:
            taken.add(id(c.parent))
            c.episode = c.parent
    if branches:
        yield Ask(branches)
    for c in candidates:
        if c.end is None:  # else the replay failed
            c.episode.feed(c.action.tokens, c.action.logp, c.action.version, c.action.done)
    live = [c for c in candidates if c.end is None]
    if live:
        yield Ask([(c.episode, c.episode.advance) for c in live])
    for c in live:
        c.shown = True
        if c.end is None:
            c.tokens, c.room = c.episode.tokens, c.episode.max_new


def _beginning(episode: Episode, start: Trajectory | None) -> Callable:
    if start is None:
        return episode.begin

    def resume():
        return episode.resume(start)

    return resume
