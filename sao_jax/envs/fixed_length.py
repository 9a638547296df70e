"""A task for measuring speed: prompts and answers of fixed length over a vocabulary of any size.

There is nothing to learn that takes skill: the reward is the share of sampled tokens with an even id. No token ends an
action, so that every rollout has exactly `new` sampled tokens.
"""

import random
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.envs.base import TaskFamily


class IdTokenizer:
    """Text is one character per id, chr(id): a vocabulary of any size without a meaning."""

    pad_id = 0

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(int(i)) for i in ids)


class FixedLength(TaskFamily):
    name = "fixed_length"
    stop = ""
    max_turns = 1

    def __init__(self, prompt: int = 32, new: int = 64, vocab_size: int = 512):
        self.prompt_length, self.max_tokens = prompt, prompt + new
        self.tokenizer = IdTokenizer(vocab_size)

    def sample(self, rng: random.Random) -> list[int]:
        return [rng.randrange(1, self.tokenizer.vocab_size) for _ in range(self.prompt_length)]

    def prompt(self, problem: list[int]) -> str:
        return self.tokenizer.decode(problem)

    def respond(self, problem: list[int], actions: Sequence[str]) -> Outcome:
        even = sum(ord(character) % 2 == 0 for character in actions[-1])
        return Outcome(reward=even / max(1, len(actions[-1])), end="terminated", reason="answer")
