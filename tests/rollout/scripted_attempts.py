"""A task of single letters, and an engine that writes what a script says."""

import numpy as np

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs.base import TaskFamily
from sao_jax.rollout.engine import Piece


class Letters(TaskFamily):
    """`?` asks for `turns` letters, each ended by `;` and answered by `-`. An `x` raises. `seen`: actions shown."""

    name, stop, max_tokens, fast = "letters", ";", 40, True
    tokenizer = CharTokenizer("abcdx?-;")

    def __init__(self, turns=2):
        self.max_turns = turns
        self.seen = []

    def sample(self, rng):
        return rng.getrandbits(40)

    def prompt(self, problem):
        return "?"

    def respond(self, problem, actions):
        self.seen.append("".join(actions))
        if "x" in actions[-1]:
            raise RuntimeError("no x")
        if len(actions) < self.max_turns:
            return Outcome(observation="-")
        return Outcome(end="terminated", reason="answer", reward=float(actions[-1] == "d;"))


class Writer:
    """An engine that writes what `text(lane, prefix as text)` says."""

    def __init__(self, family, text, slots=8):
        self.family, self.text, self.slots, self.rows, self.todo, self.pieces = family, text, slots, {}, [], []

    def _write(self, rollout):
        ids = self.family.tokenizer.encode(self.text(rollout, self.family.tokenizer.decode(self.rows[rollout])))
        self.rows[rollout] += ids
        n = len(ids)
        self.pieces.append(Piece(rollout, np.array(ids), np.full(n, -0.5), np.zeros(n, np.int32), "stop"))

    def submit(self, request):
        assert request.rollout not in self.rows
        self.rows[request.rollout] = list(request.tokens)
        self.todo.append(request.rollout)

    def truncate(self, rollout, length):
        assert length < len(self.rows[rollout])
        del self.rows[rollout][length:]

    def extend(self, rollout, tokens, max_new, attempt):
        self.rows[rollout] += list(tokens)
        self.todo.append(rollout)

    def release(self, rollout):
        del self.rows[rollout]

    def dispatch(self):
        todo, self.todo = self.todo, []
        for rollout in todo:
            self._write(rollout)
        return bool(todo)

    def collect(self):
        pieces, self.pieces = self.pieces, []
        return pieces
