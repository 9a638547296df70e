"""Warm start: maximum likelihood on demonstrations, action tokens only."""

import functools
import math

import jax
import jax.numpy as jnp

from sao_jax.learner.programs import adam, divide, global_norm
from sao_jax.models.compute import PLAIN, Compute
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind
from sao_jax.models.logprobs import next_token_logprobs

P = jax.P


def init(params: dict) -> dict:
    return {"params": params, "opt": adam(0.9, 0.999, 1e-8).init(params)}


def cosine(step: int, total: int, peak: float, warmup: int = 20) -> float:
    """Learning rate at 0-based `step`: linear warm-up to `peak`, then half a cosine to a tenth of it."""
    ramp = min(1.0, (step + 1) / warmup)
    return peak * ramp * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(total, 1))))


@functools.cache
def step_program(config: ModelConfig, mesh: jax.sharding.Mesh, micro_rows: int, compute: Compute = PLAIN):
    """(state, tokens [B, L], mask [B, L], lr) -> (state, mean negative log-prob in nats per action token).

    Rows are split over devices, each device scans over micro-batches of `micro_rows`; B is a multiple of both. The
    mean is over all action tokens of the batch: sums are reduced before the division.
    """

    def gradient(params, tokens, mask):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)

        def loss(params, tokens, mask):
            model = bind(config, params)
            hidden = model(tokens, compute=compute)
            logp, _ = next_token_logprobs(hidden, model.head(), tokens, jnp.ones(tokens.shape[0]))
            return -jnp.where(mask, logp, 0.0).sum()

        def micro(carry, rows):
            value, grads = jax.value_and_grad(loss)(local, *rows)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zero = jax.tree.map(jnp.zeros_like, (jax.lax.pcast(jnp.zeros(()), "data", to="varying"), local))
        cut = functools.partial(jnp.reshape, shape=(-1, micro_rows, tokens.shape[1]))
        (total, grads), _ = jax.lax.scan(micro, zero, (cut(tokens), cut(mask)))
        return jax.lax.psum((total, grads, mask.sum()), "data")

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())

    def call(state, tokens, mask, lr):
        total, grads, count = mapped(state["params"], tokens, mask)
        grads = divide(grads, count)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / jnp.maximum(global_norm(grads), 1e-12)), grads)
        directions, opt = adam(0.9, 0.999, 1e-8).update(grads, state["opt"], state["params"])
        params = jax.tree.map(lambda p, d: p - lr * d, state["params"], directions)
        return {"params": params, "opt": opt}, total / jnp.maximum(count, 1)

    return jax.jit(call, donate_argnums=0)
