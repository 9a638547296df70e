"""Tokenizers of single characters and of words, and the rules for special tokens and supervised targets."""

import itertools
import re
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
        return "".join(self.alphabet[i - 1] for i in _without_padding(ids, self.vocab_size))


class WordTokenizer:
    """One id per word of two letters or more and per single character, from 1 on; id 0 is padding.

    Between a word and another word, a letter or a digit stands one space, and nowhere else: `ann has 12 nuts. why?`
    is `ann`, `has`, `1`, `2`, `nuts`, `.`, `why`, `?`. Text that is spaced otherwise is refused.
    """

    pad_id = 0

    def __init__(self, words: Sequence[str], characters: str):
        self.vocabulary = (*words, *characters)
        if not all(len(word) > 1 and word.isalpha() for word in words) or " " in characters:
            raise ValueError("words must be two letters or more, and a space is no character of its own")
        if not self.vocabulary or len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError(f"vocabulary {self.vocabulary} must have at least one entry and none twice")
        self.vocab_size = len(self.vocabulary) + 1
        self._id = {entry: index for index, entry in enumerate(self.vocabulary, start=1)}

    def encode(self, text: str) -> list[int]:
        """Raises ValueError naming the first word outside the vocabulary, or if the spacing is not the one above."""
        try:
            ids = [self._id[entry] for entry in re.findall(r"[^\W\d_]{2,}|\S", text)]
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} in {text[:40]!r} is not in the vocabulary") from None
        if self.decode(ids) != text:
            raise ValueError(f"{text[:40]!r} is not spaced like {self.decode(ids)[:40]!r}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Skips padding. Raises ValueError for an id outside the vocabulary."""
        entries = [self.vocabulary[i - 1] for i in _without_padding(ids, self.vocab_size)]
        spaced = (
            " " + right if right.isalnum() and (len(left) > 1 or len(right) > 1) else right
            for left, right in itertools.pairwise(entries)
        )
        return "".join(itertools.chain(entries[:1], spaced))


def _without_padding(ids: Sequence[int], vocab_size: int) -> list[int]:
    ids = np.asarray(ids, np.int64).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"token ids {ids.min()} to {ids.max()} are not within [0, {vocab_size})")
    return ids[ids != 0].tolist()


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
