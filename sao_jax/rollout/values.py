"""The critic as a function of prefixes, for choosing while attempts are under way."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs
from sao_jax.rollout.engine import attended_lengths


class PrefixValues:
    """`values(prefixes)`: float32 [N], the value of each prefix (int32 [T], 1 <= T <= context).

    The whole prefix is read each time, `rows` prefixes a call, right-padded to one of a few lengths, so that nothing
    compiles after the first call of each length. Padding comes later than what is read and changes nothing.
    """

    def __init__(self, config: ModelConfig, critic: dict, *, context: int, rows: int = 16):
        self._critic, self._rows, self._lengths = critic, rows, attended_lengths(context)

        @jax.jit
        def last_output(critic, tokens, last):
            return jnp.take_along_axis(critic_outputs(config, critic, tokens), last[:, None], axis=1)[:, 0]

        self._last_output = last_output

    def __call__(self, prefixes: Sequence[np.ndarray]) -> np.ndarray:
        values = np.zeros(len(prefixes), np.float32)
        order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))  # of like lengths, to pad little
        for start in range(0, len(order), self._rows):
            chosen = order[start : start + self._rows]
            longest = len(prefixes[chosen[-1]])
            tokens = np.zeros((self._rows, next(n for n in self._lengths if n >= longest)), np.int32)
            last = np.zeros(self._rows, np.int32)
            for row, i in enumerate(chosen):
                tokens[row, : len(prefixes[i])] = prefixes[i]
                last[row] = len(prefixes[i]) - 1
            values[chosen] = np.asarray(self._last_output(self._critic, tokens, last))[: len(chosen)]
        return values
