"""A gridworld that is not text: what is seen and what is done are single symbols.

    en#..#.k..   s   es......##   e ...        find the key, then the goal
    observation  action

An observation is a compass of two symbols, `e`, `w` or `-` and `n`, `s` or `-`, towards the next aim (the nearest key
that is left, then the goal), and what surrounds the agent, row by row without its own cell: `#` a wall or the outside,
`.` free, `k` a key, `g` the goal. The actions `n`, `e`, `s`, `w` move by one cell. A wall, and the goal while a key is
left, stop the agent: the answer is `!` and a turn is lost. The reward is 1 for reaching the goal, in at most half as
many turns again, and three, as the shortest way takes. Distances and the map itself are never shown.
"""

import collections
import functools
import random

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs.base import SteppedFamily

MOVES = {"e": (0, 1), "w": (0, -1), "n": (-1, 0), "s": (1, 0)}
BLOCKED = "!"
SIZES = range(4, 17)
MIXED = range(4, 9)  # sizes of `size=0`

Cell = tuple[int, int]  # (row, column)
State = tuple[Cell, frozenset[Cell], int]  # where the agent is, keys that are left, turns used


class Grid(SteppedFamily):
    """Grids, and demonstrations by an expert that can be made unreliable. A problem is its map, rows split by `/`.

    Args:
      size: cells on a side, 4 to 16; 0 draws it from 4 to 8 for each instance, so that difficulty differs.
      keys: keys to be found before the goal opens, 0 to 3.
      walls: share of cells that are walls, at most .4.
      view: cells that are seen in each direction, 1 or 2.
      compass: without it aims are seen only from near by, and observations have two symbols less.
      noise: share of demonstrations by an expert that walks straight towards its aim, first east or west, and into
        every wall on this way until the turns are used up; without it experts take a shortest way.
      slip: share of steps in all demonstrations that are drawn at random.
    """

    name = "grid"
    stop = "nesw"
    tokenizer = CharTokenizer("nesw-#.kg!")

    def __init__(
        self,
        size: int = 5,
        keys: int = 1,
        walls: float = 0.25,
        view: int = 1,
        compass: bool = True,
        noise: float = 0.8,
        slip: float = 0.02,
    ):
        if size != 0 and size not in SIZES:
            raise ValueError(f"size is {size}; allowed: {SIZES[0]} to {SIZES[-1]}, or 0 for a mixture")
        if keys not in range(4):
            raise ValueError(f"keys is {keys}; allowed: 0 to 3")
        if not 0 <= walls <= 0.4:
            raise ValueError(f"walls is {walls}; it is a share, from 0 to 0.4")
        if view not in (1, 2):
            raise ValueError(f"view is {view}; allowed: 1, 2")
        for name, share in (("noise", noise), ("slip", slip)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.sizes = list(MIXED) if size == 0 else [size]
        self.keys, self.walls, self.view, self.compass = keys, walls, view, compass
        self.noise, self.slip = noise, slip
        self.max_turns = limit(self._farthest(self.sizes[-1]))
        seen = (2 * view + 1) ** 2 - 1 + 2 * compass
        self.max_tokens = seen + (1 + seen) * self.max_turns

    def sample(self, rng: random.Random) -> str:
        size = rng.choice(self.sizes)
        while True:
            free, *special = _places(size, self.keys, rng)
            cells = {cell: "#" for cell in free if rng.random() < self.walls}
            cells |= zip(special, "@g" + "k" * self.keys, strict=True)
            problem = "/".join("".join(cells.get((r, c), ".") for c in range(size)) for r in range(size))
            steps = len(shortest(problem) or "")
            if size / 2 <= steps <= self._farthest(size):
                return problem

    def prompt(self, problem: str) -> str:
        return self._seen(problem, self.begin(problem))

    def begin(self, problem: str) -> State:
        marks = _marks(problem)
        return (*marks["@"], frozenset(marks["k"]), 0)

    def advance(self, problem: str, state: State, action: str) -> tuple[State, Outcome]:
        (row, column), keys, turns = state
        turns += 1
        ended = dict(end="terminated", reason=TURN_LIMIT) if turns >= limit(len(shortest(problem))) else {}
        there = _step((row, column), action) if action in MOVES else None
        if there is None or not _is_open(problem, there, keys):
            return ((row, column), keys, turns), Outcome(BLOCKED, **ended)
        after = (there, keys - {there}, turns)
        parts = {"keys": (len(keys) - len(after[1])) / self.keys} if self.keys else {}
        if there in _marks(problem)["g"]:
            return after, Outcome("", 1.0, "terminated", "goal", parts)
        return after, Outcome(self._seen(problem, after), parts=parts, **ended)

    def advise(self, problem: str, state: State, turn: int, rng: random.Random) -> str:
        straight = rng.random() < self.noise
        own = random.Random(f"{rng.random()}/{turn}")
        if own.random() < self.slip:
            return own.choice(self.stop)
        if straight:
            return self._towards(problem, state).replace("-", "")[0]
        here, keys, _ = state
        return way(problem, here, _aim(problem, here, keys), keys)[0]

    def _seen(self, problem: str, state: State) -> str:
        (row, column), keys, _ = state
        near = range(-self.view, self.view + 1)
        around = [_shown(problem, (row + r, column + c), keys) for r in near for c in near if (r, c) != (0, 0)]
        return (self._towards(problem, state) if self.compass else "") + "".join(around)

    def _towards(self, problem: str, state: State) -> str:
        here, keys, _ = state
        aim = _aim(problem, here, keys)
        rows, columns = aim[0] - here[0], aim[1] - here[1]
        return "-ew"[(columns > 0) - (columns < 0)] + "-sn"[(rows > 0) - (rows < 0)]

    def _farthest(self, size: int) -> int:
        """Steps of the longest way that is drawn."""
        return size * (2 + self.keys) * 2 // 3


def limit(steps: int) -> int:
    """Turns of an attempt where the shortest way takes so many steps."""
    return steps + steps // 2 + 3


@functools.lru_cache(4096)
def shortest(problem: str) -> str | None:
    """The expert's moves from the start to the goal; None if there are none."""
    marks = _marks(problem)
    (here,), keys, moves = marks["@"], frozenset(marks["k"]), ""
    while here not in marks["g"]:
        aim = _aim(problem, here, keys)
        found = aim and way(problem, here, aim, keys)
        if not found:
            return None
        here, keys, moves = aim, keys - {aim}, moves + found
    return moves


def way(problem: str, here: Cell, aim: Cell, keys: frozenset[Cell]) -> str | None:
    """A shortest way, found breadth first; None if there is none."""
    return _ways(problem, here, keys).get(aim)


@functools.lru_cache(512)
def _ways(problem: str, here: Cell, keys: frozenset[Cell]) -> dict[Cell, str]:
    ways, queue = {here: ""}, collections.deque([here])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            there = _step(cell, move)
            if there not in ways and _is_open(problem, there, keys):
                ways[there] = ways[cell] + move
                queue.append(there)
    return ways


def _aim(problem: str, here: Cell, keys: frozenset[Cell]) -> Cell | None:
    """The nearest key that is left, else the goal; None if a key is out of reach."""
    ways = _ways(problem, here, keys)
    if keys:
        near = [(len(ways[key]), key) for key in keys if key in ways]
        return min(near)[1] if near else None
    return _marks(problem)["g"][0]


@functools.lru_cache(4096)
def _marks(problem: str) -> dict[str, list[Cell]]:
    """Cells of the start, the keys and the goal."""
    cells = [(symbol, (r, c)) for r, row in enumerate(problem.split("/")) for c, symbol in enumerate(row)]
    return {mark: [cell for symbol, cell in cells if symbol == mark] for mark in "@kg"}


def _step(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def _shown(problem: str, cell: Cell, keys: frozenset[Cell]) -> str:
    """What is in a cell: keys that were taken are gone."""
    rows = problem.split("/")
    if not (0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)):
        return "#"
    symbol = rows[cell[0]][cell[1]]
    return "." if symbol == "@" or (symbol == "k" and cell not in keys) else symbol


def _is_open(problem: str, cell: Cell, keys: frozenset[Cell]) -> bool:
    symbol = _shown(problem, cell, keys)
    return symbol != "#" and not (symbol == "g" and keys)


def _places(size: int, keys: int, rng: random.Random) -> tuple:
    """(the other cells, start, goal, keys ...), drawn."""
    cells = [(r, c) for r in range(size) for c in range(size)]
    rng.shuffle(cells)
    return (cells[2 + keys :], *cells[: 2 + keys])
