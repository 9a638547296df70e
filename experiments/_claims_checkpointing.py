"""Peak activation memory and time of a gradient step under each checkpointing policy."""

import itertools
import math
from typing import Any

import numpy as np

from experiments._claim import Claim, Measured
from experiments.bench import median_seconds

POLICIES = (("none", False), ("none", True), ("dots", True), ("block", True))
VOCABULARY = 256


def gradient_step(layers: int, length: int, remat: str, scan: bool, repetitions: int) -> tuple[float, float]:
    """(MiB of temporary arrays by the compiler's memory analysis, median seconds) of one gradient of one row.

    Parameters and their gradients are arguments and results of the program, so the temporary arrays are activations,
    what the step works on, and in a loop over layers the stacked copy of both.
    """
    import jax
    import jax.numpy as jnp

    from sao_jax.learner.window import policy_forward
    from sao_jax.models.compute import Compute
    from sao_jax.models.config import ModelConfig
    from sao_jax.models.decoder import init_params

    model = ModelConfig(VOCABULARY, dim=128, num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), shapes)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (1, length)))
    compute = Compute(remat, scan)
    row = {"temperature": jnp.ones(1), "action_mask": jnp.arange(length)[None] > 0}

    def loss(params, tokens):
        return policy_forward(model, params, row | {"tokens": tokens}, compute)[0].sum()

    compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    jax.block_until_ready(compiled(params, tokens))
    seconds = median_seconds(lambda: jax.block_until_ready(compiled(params, tokens)), repetitions)
    return compiled.memory_analysis().temp_size_in_bytes / 2**20, seconds


def checkpointing(asked) -> Measured:
    """The saving of `block` over no checkpointing, at the greatest depth and length; the table of all in the notes."""
    depths, lengths = ((2, 8), (256,)) if asked.quick else ((4, 8, 16), (512, 2048, 4096))
    repetitions = 3 if asked.quick else 5
    notes: dict[str, Any] = {}
    memory: dict[str, float] = {}
    for layers, length in itertools.product(depths, lengths):
        for remat, scan in POLICIES:
            asked.check()
            name = remat + ", scanned" * (scan and remat == "none")
            memory[name], seconds = gradient_step(layers, length, remat, scan, repetitions)
            less = 100 * (1 - memory[name] / memory["none"])
            notes[f"{layers} layers, {length} tokens, {name}"] = {
                "MiB": round(memory[name], 1), "% less": round(less, 1), "seconds": round(seconds, 3)
            }  # fmt: skip
    saved = 100 * (1 - memory["block"] / memory["none"])
    sizes = {"layers": depths[-1], "length": lengths[-1], "rows": 1, "width": 128, "repetitions": repetitions}
    return Measured((saved, math.nan, math.nan), memory["block"], memory["none"], [0], sizes, notes)


CLAIMS = {
    "checkpointing": Claim(
        "peak activation memory with checkpointing",
        800.0,
        1200.0,
        100 * (1 - 800 / 1200),
        "% less memory",
        checkpointing,
        "MiB",
    ),
}
