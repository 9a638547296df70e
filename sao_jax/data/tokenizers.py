"""A tokenizer of single characters, and the rules for special tokens and supervised targets."""

from collections.abc import Iterable, Sequence

import numpy as np

from sao_jax.data.protocols import Tokenizer


class CharTokenizer:
    """One id per character of `alphabet`, from 1 on; id 0 is padding and decodes to nothing."""

    pad_id = 0

    def __init__(self, alphabet: str):
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet {alphabet!r} must have at least one character and none twice")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 1
        self._id = {character: index for index, character in enumerate(alphabet, start=1)}

    def encode(self, text: str) -> list[int]:
        """Raises ValueError naming the first character outside the alphabet."""
        try:
            return [self._id[character] for character in text]
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} in {text[:40]!r} is not in the alphabet {self.alphabet!r}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Skips padding. Raises ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f"token ids {ids.min()} to {ids.max()} are not within [0, {self.vocab_size})")
        return "".join(self.alphabet[i - 1] for i in ids.tolist() if i != self.pad_id)


def ensure_bos(ids: Sequence[int], bos_id: int) -> list[int]:
    """Exactly one BOS at the start: added if missing, repeated ones reduced to one; nothing else changes.

    Templates, tokenizers and samplers each like to add their own.
    """
    start = 0
    while start < len(ids) and ids[start] == bos_id:
        start += 1
    return [bos_id, *(int(i) for i in ids[start:])]


def supervised_mask(prompt_len: int, total_len: int) -> np.ndarray:
    """bool [total_len]: the tokens to learn: all after the prompt, the first and the last (EOS) included.

    It marks targets, like `action_mask`: token t is predicted by the logits at t-1 (`logit_positions`).
    """
    if not 1 <= prompt_len <= total_len:
        raise ValueError(f"prompt of {prompt_len} in {total_len} tokens; it needs at least 1 and at most all of them")
    return np.arange(total_len) >= prompt_len


def logit_positions(target_mask: np.ndarray) -> np.ndarray:
    """Positions whose logits score the marked tokens: each one before its target, so never for token 0."""
    positions = np.flatnonzero(target_mask) - 1
    if positions.size and positions[0] < 0:
        raise ValueError("token 0 is marked as a target; no logits score it")
    return positions


def encode_turns(tokenizer: Tokenizer, turns: Iterable[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [T], action_mask bool [T]) of a demonstration given as (text, is_action) turns."""
    tokens, mask = [], []
    for text, is_action in turns:
        ids = tokenizer.encode(text)
        tokens += ids
        mask += [is_action] * len(ids)
    return np.array(tokens, np.int32), np.array(mask, bool)
