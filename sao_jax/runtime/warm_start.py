"""The first stage: supervised steps on scripted demonstrations. A function of the configuration alone."""

import dataclasses
import random
from collections.abc import Callable

import jax
import numpy as np

from sao_jax.data.protocols import TaskFamily
from sao_jax.data.tokenizers import encode_turns
from sao_jax.data.windows import windows_of
from sao_jax.envs.base import demonstration
from sao_jax.learner import supervised
from sao_jax.learner.sharding import place
from sao_jax.models.config import ModelConfig
from sao_jax.runtime.config import RunConfig


def demonstrations(
    family: TaskFamily, count: int, length: int, seed: int, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and action masks [count, length] of attempts by the expert at training instances; with a `window` each is
    cut into rows of that length, as a sampler with that context would see it."""
    rows = []
    for number in range(count):
        turns = demonstration(family, "train", number, random.Random(f"{seed}/{number}"))
        ids, actions = encode_turns(family.tokenizer, turns)
        if len(ids) > length:
            raise ValueError(f"demonstration {number} of task {family.name!r} needs more than {length} tokens")
        begins = np.diff(actions, prepend=False) & actions
        steps = np.maximum(np.cumsum(begins) - 1, 0)
        for cut in windows_of(actions, steps, (), window or length):
            rows.append((ids[cut.index], actions[cut.index] & (cut.index >= cut.position)))
    tokens = np.full((len(rows), window or length), family.tokenizer.pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (ids, actions) in enumerate(rows):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, actions
    return tokens, mask


def warm_start(
    config: RunConfig,
    model: ModelConfig,
    family: TaskFamily,
    policy: dict,
    length: int,
    mesh: jax.sharding.Mesh,
    *,
    report: Callable[[int, float], None],
    check: Callable[[], None],
) -> dict:
    """Parameters after `warm_start_steps` steps. `report(step, loss)` is called every 10 steps, `check()` every step.

    Raises ValueError if the task has no expert.
    """
    tokens, mask = _play(family, config, length, check)
    length = tokens.shape[1]
    per_device = -(-config.warm_start_batch // mesh.size)
    micro = min(max(1, 512 // length), per_device)
    batch = -(-per_device // micro) * micro * mesh.size
    order = np.random.default_rng(config.seed)
    program = supervised.step_program(model, mesh, micro, config.compute())
    by_row, everywhere = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P())
    state = jax.jit(supervised.init, out_shardings=everywhere)(policy)
    for step in range(config.warm_start_steps):
        check()
        chosen = order.integers(0, len(tokens), config.warm_start_batch)
        rows = np.zeros((batch, length), np.int32)
        rows[: len(chosen)] = tokens[chosen]
        live = np.zeros((batch, length), bool)
        live[: len(chosen)] = mask[chosen]
        lr = np.float32(supervised.cosine(step, config.warm_start_steps, config.warm_start_lr))
        placed = place((rows, live), by_row)
        state, loss = program(state, *placed, place(lr, everywhere))
        if step % 10 == 9 or step + 1 == config.warm_start_steps:
            report(step + 1, float(loss))
    return state["params"]


def check_demonstrations(config: RunConfig, family: TaskFamily, length: int, count: int) -> None:
    """Raises ValueError if the task has no expert, or one of the first `count` demonstrations does not fit."""
    _play(family, dataclasses.replace(config, demonstrations=min(count, config.demonstrations)), length, lambda: None)


def _play(family, config, length, check):
    try:
        window = config.context_window or config.row_tokens
        return demonstrations(family, config.demonstrations, length, config.seed, window)
    except NotImplementedError as error:
        raise ValueError(f"{error}; use --warm-start-steps 0 or --init-from") from None
    finally:
        check()
