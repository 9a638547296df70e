"""Attempts that look before they go on: generators that ask for actions, values and environments, served together.

An attempt is a generator. It yields what it needs next, is sent the answer, and returns its result:

    drawn = yield Draw([(lane, tokens, max_new), ...])     # one action after each prefix: [Drawn]
    values = yield Judge([tokens, ...])                    # the critic's value of each prefix: float32 [N]
    answers = yield Ask([(episode, method), ...])          # environments; one that fails or is late aborts its episode

Every attempt has a number of lanes, rows of the engine. A lane keeps what it has read: asked to draw after another
prefix, it forgets the tokens after the common beginning and reads the rest. So n candidates of one prefix cost one
observation each, not n whole prefixes.

Random numbers come from (rollout id of the lane, number of the draw, index of the token): not from what else runs.
"""

import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np

from sao_jax.rollout.calls import Calls
from sao_jax.rollout.engine import Engine, Request
from sao_jax.rollout.episode import Episode

Value = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Draw:
    """For each entry (lane, tokens int32 [T], max_new): an action after these tokens; a lane occurs once."""

    entries: Sequence[tuple[int, np.ndarray, int]]


@dataclasses.dataclass(frozen=True)
class Judge:
    """Prefixes, int32 [T] each, to be valued."""

    prefixes: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Ask:
    """Calls of episodes' methods that ask their environments."""

    calls: Sequence[tuple[Episode, Callable]]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A complete action; the arrays have one entry a token. `done` is "stop" or "length"."""

    tokens: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    done: str


Attempt = Generator[Draw | Judge | Ask, object, object]


@dataclasses.dataclass(frozen=True)
class Played:
    """What an attempt returned, and the tokens that were sampled for it, whether or not they were kept."""

    result: object
    sampled: int


class _Player:
    """An attempt under way: what it waits for."""

    def __init__(self, place: int, first: int, attempt: Attempt):
        self.place, self.first, self.attempt = place, first, attempt
        self.request = next(attempt)
        self.lanes: dict[int, np.ndarray] = {}  # lane -> the tokens of its row
        self.pieces: dict[int, list] = {}  # lane -> pieces of the action it is drawing
        self.drawn: dict[int, Drawn] = {}
        self.draws = self.sampled = 0


def slow_calls(workers: int, timeout: float) -> Calls:
    """Threads for environments that may take long, or hang: after `timeout` s an attempt is given up."""
    return Calls(workers, timeout, time.monotonic)


def play(
    engine: Engine,
    attempts: Iterable[tuple[int, Attempt]],
    *,
    width: int,
    temperature: float,
    value: Value | None = None,
    calls: Calls | None = None,
    check: Callable[[], None] = lambda: None,
    report: Callable[[int], None] = lambda done: None,
) -> list[Played]:
    """Runs attempts (first rollout id, generator) of up to `width` lanes each, as many at once as the engine has rows
    for; their results in order.

    The lanes of an attempt are rollouts first .. first + width - 1. calls: threads for environments that may take
    long, see `slow_calls`; others answer at once. Raises ValueError if not even one attempt fits.
    """
    if width > engine.slots:
        raise ValueError(f"an attempt needs {width} rows of the sampler; --slots is {engine.slots}")
    waiting = enumerate(attempts)
    results: dict[int, Played] = {}
    live: dict[int, _Player] = {}  # by first rollout id
    more = True

    def answer(player: _Player, what) -> None:
        """Sends an attempt what it asked for; one that returns leaves its rows."""
        try:
            player.request = player.attempt.send(what)
        except StopIteration as end:
            for lane in player.lanes:
                engine.release(player.first + lane)
            del live[player.first]
            results[player.place] = Played(end.value, player.sampled)
            return
        if isinstance(player.request, Draw):
            _begin(engine, player, temperature)

    while more or live:
        check()
        while more and len(live) < engine.slots // width:
            item = next(waiting, None)
            if item is None:
                more = False
                break
            place, (first, attempt) = item
            live[first] = player = _Player(place, first, attempt)
            if isinstance(player.request, Draw):
                _begin(engine, player, temperature)
        while any(isinstance(player.request, Ask | Judge) for player in live.values()):
            _serve_environments(calls, live, answer)
            _serve_values(value, live, answer)
        if engine.dispatch():
            _serve_draws(engine, live, answer)
        report(len(results))
    return [results[place] for place in sorted(results)]


def _begin(engine: Engine, player: _Player, temperature: float) -> None:
    """Puts the lanes of a Draw after their prefixes."""
    player.draws += 1
    player.pieces, player.drawn = {lane: [] for lane, *_ in player.request.entries}, {}
    for lane, tokens, max_new in player.request.entries:
        rollout, held = player.first + lane, player.lanes.get(lane)
        if held is None:
            engine.submit(Request(rollout, player.draws, tokens, max_new, temperature))
        else:
            common = common_length(held, tokens)
            if common < len(held):
                engine.truncate(rollout, common)
            engine.extend(rollout, tokens[common:], max_new, attempt=player.draws)
        player.lanes[lane] = np.asarray(tokens, np.int32)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens that two sequences begin with alike."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def _serve_draws(engine: Engine, live: dict[int, _Player], answer: Callable) -> None:
    owners = {player.first + lane: (player, lane) for player in live.values() for lane in player.lanes}
    for piece in engine.collect():
        player, lane = owners[piece.rollout]
        pieces = player.pieces[lane]
        pieces.append(piece)
        player.sampled += len(piece.tokens)
        if piece.done:
            parts = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("tokens", "logp", "version"))
            player.drawn[lane] = drawn = Drawn(*parts, piece.done)
            player.lanes[lane] = np.concatenate([player.lanes[lane], drawn.tokens]).astype(np.int32)
    for player in list(live.values()):
        request = player.request
        if isinstance(request, Draw) and len(player.drawn) == len(request.entries):
            answer(player, [player.drawn[lane] for lane, *_ in request.entries])


def _serve_values(value: Value | None, live: dict[int, _Player], answer: Callable) -> None:
    """One call of the critic for all who wait for one."""
    asking = [player for player in live.values() if isinstance(player.request, Judge)]
    if not asking:
        return
    if value is None:
        raise ValueError("an attempt asks for values, and there is no critic")
    prefixes = [prefix for player in asking for prefix in player.request.prefixes]
    values = np.asarray(value(prefixes), np.float32)
    for player in asking:
        mine, values = np.split(values, [len(player.request.prefixes)])
        answer(player, mine)


def _serve_environments(calls: Calls | None, live: dict[int, _Player], answer: Callable) -> None:
    """All calls that are wanted, side by side where environments are slow."""
    asking = [player for player in live.values() if isinstance(player.request, Ask)]
    wanted = [call for player in asking for call in player.request.calls]
    if calls is None:
        answers = [method() for _, method in wanted]
    else:
        answers = _on_threads(calls, wanted)
    for player in asking:
        count = len(player.request.calls)
        mine, answers = answers[:count], answers[count:]
        answer(player, mine)


def _on_threads(calls: Calls, wanted: Sequence[tuple[Episode, Callable]]) -> list:
    for episode, method in wanted:
        calls.submit(episode, method)
    found: dict[int, object] = {}
    while len(found) < len(wanted):
        for episode, _, result, error in calls.answers(0.05):
            if error:
                episode.abort(error)
            found[id(episode)] = result
    return [found[id(episode)] for episode, _ in wanted]
