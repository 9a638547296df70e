"""Joint training of compressors: reconstruction, balance of the experts, and the tasks that read what was decoded.

    loss = mean squared error / variance + balance + nats per action token + mean squared value error, weighted

The model that reads the decoded vectors stays as it is while compressors learn. Rows are split over the devices of a
mesh; each term is a sum over all devices divided by a count over all devices, so that the split changes nothing.

The three uses differ in what a batch holds and in what is read from it:

states  final hidden states -> log-probs of the tokens after them, values by a linear head
critic  states of segments read by themselves -> values of a critic that reads earlier segments from its memory
kv      tokens -> the model, whose earlier segments' keys and values are decoded
"""

import functools

import jax
import jax.numpy as jnp

from sao_jax.learner.programs import adam, global_norm
from sao_jax.models import compressor, memory
from sao_jax.models.compressor import CompressorConfig
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind
from sao_jax.models.logprobs import next_token_logprobs, token_logprobs

P = jax.P
USES = ("states", "critic", "kv")
WEIGHTS = {"reconstruction": 1.0, "balance": 0.01, "nll": 1.0, "value": 1.0}
Term = tuple[jax.Array, jax.Array]  # unreduced sum, count


def init(params) -> dict:
    return {"params": params, "opt": adam(0.9, 0.999, 1e-8).init(params)}


def value_head(head: dict, hidden) -> jax.Array:
    """float32, without the last axis."""
    return (hidden.astype(jnp.float32) @ head["w"])[..., 0] + head["b"][0]


def shift(outputs_BxT):
    """Entry t: what was known before token t."""
    return jnp.pad(outputs_BxT[:, :-1], ((0, 0), (1, 0)))


def _squared(values, targets, mask) -> Term:
    return jnp.where(mask, jnp.square(values - targets), 0.0).sum(), mask.sum()


def _negative(logp, mask) -> Term:
    return -jnp.where(mask, logp, 0.0).sum(), mask.sum()


def _codec_terms(x, decoded, probs, experts, live, variance, axis_name) -> dict[str, Term]:
    """The squared error in units of the variance: the share of it that is lost."""
    total, count = compressor.reconstruction_loss(x, decoded, live)
    balance = compressor.balance_loss(probs, experts, live, axis_name=axis_name)
    return {"reconstruction": (total / jnp.maximum(variance, 1e-12), count), "balance": balance}


def _compressed(codec, params, x, live, variance, axis_name) -> tuple[jax.Array, dict[str, Term]]:
    decoded, code, probs = compressor.bind(codec, params)(x)
    return decoded, _codec_terms(x, decoded, probs, code.experts, live, variance, axis_name)


def states_terms(model: ModelConfig, codec, segment, params, frozen, batch, axis_name=None) -> dict[str, Term]:
    """batch: states [N, D], next_token, return, action (the next token is one), live, each [N]. params: codec.

    frozen: head [D, V], value {w [D, 1], b [1]}, and the variance of the states. Without `codec` they are read as they
    are, as in the other two.
    """
    decoded, terms = batch["states"], {}
    if codec is not None:
        x, live = batch["states"], batch["live"]
        decoded, terms = _compressed(codec, params["codec"], x, live, frozen["variance"], axis_name)
    logp, _ = token_logprobs(decoded, frozen["head"], batch["next_token"], jnp.float32(1.0))
    terms["nll"] = _negative(logp, batch["action"])
    terms["value"] = _squared(value_head(frozen["value"], decoded), batch["return"], batch["action"])
    return terms


def critic_terms(model: ModelConfig, codec, segment, params, frozen, batch, axis_name=None) -> dict[str, Term]:
    """batch: states [B, T, D], kept, mask, live and return [B, T]. params: readout, and codec if any.

    frozen: the variance of the states.
    """
    states, terms, read = batch["states"], {}, batch["states"]
    if codec is not None:
        B, T, D = states.shape
        live = (batch["kept"] & batch["live"]).reshape(-1)
        decoded, terms = _compressed(codec, params["codec"], states.reshape(-1, D), live, frozen["variance"], axis_name)
        read = decoded.reshape(B, T, D)
    outputs = memory.memory_values(params["readout"], states, read, batch["kept"], segment)
    return terms | {"value": _squared(shift(outputs), batch["return"], batch["mask"])}


def kv_terms(model: ModelConfig, codec, segment, params, frozen, batch, axis_name=None) -> dict[str, Term]:
    """batch: tokens, mask, live and return [B, T]. params: codec, a list with one per layer.

    frozen: the model's parameters, value {w, b}, and the variance of keys and values in each layer. What lies in
    params instead is trained: model and value without a codec is how a model is made. Reconstruction and balance are
    sums over layers.
    """
    given = frozen | params
    network = bind(model, given["model"])
    layers = None if codec is None else params["codec"]
    hidden, seen = memory.forward(network, batch["tokens"], segment, codec, layers)
    logp, _ = next_token_logprobs(hidden, network.head(), batch["tokens"], jnp.ones(hidden.shape[0]))
    terms = {"nll": _negative(logp, batch["mask"])}
    outputs = shift(value_head(given["value"], hidden))
    terms["value"] = _squared(outputs, batch["return"], batch["mask"])
    live = batch["live"].reshape(-1)
    variances = frozen["variance"] if seen else ()
    for variance, (kv, decoded, probs, experts) in zip(variances, seen, strict=True):
        for name, (total, count) in _codec_terms(kv, decoded, probs, experts, live, variance, axis_name).items():
            terms[name] = (terms.get(name, (0.0, 0))[0] + total, count)
    return terms


TERMS = {"states": states_terms, "critic": critic_terms, "kv": kv_terms}


@functools.cache
def step_program(
    use: str,
    model: ModelConfig,
    codec: CompressorConfig | None,
    mesh: jax.sharding.Mesh,
    *,
    segment: int = 1,
    train_codec: bool = True,
):
    """(state, frozen, batch, weights, rates) -> (state, {term: mean before the step}); `state` is donated.

    The leading axis of every array in `batch` is split over the mesh's axis "data", and is a multiple of its size.
    `weights` and `rates`, a learning rate by the name of each part of the parameters, are traced. With `train_codec`
    False only the other parameters (the critic's readout) move.

    Raises ValueError for a use that is not in `USES`.
    """
    _known(use)

    def gradient(params, frozen, batch, weights):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)

        def loss(params):
            if not train_codec and "codec" in params:
                params = params | {"codec": jax.lax.stop_gradient(params["codec"])}
            terms = TERMS[use](model, codec, segment, params, frozen, batch, "data")
            counts = jax.lax.psum({name: count for name, (_, count) in terms.items()}, "data")
            means = {name: total / jnp.maximum(counts[name], 1) for name, (total, _) in terms.items()}
            return sum(weights[name] * mean for name, mean in means.items()), means

        (_, means), grads = jax.value_and_grad(loss, has_aux=True)(local)
        return jax.lax.psum((grads, means), "data")

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P(), P("data"), P()), out_specs=P())

    def call(state, frozen, batch, weights, rates):
        grads, means = mapped(state["params"], frozen, batch, weights)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / jnp.maximum(global_norm(grads), 1e-12)), grads)
        directions, opt = adam(0.9, 0.999, 1e-8).update(grads, state["opt"], state["params"])

        def move(path, p, d):
            fixed = not train_codec and path[0].key == "codec"
            return p if fixed else p - rates[path[0].key] * d

        params = jax.tree_util.tree_map_with_path(move, state["params"], directions)
        return {"params": params, "opt": opt}, means

    return jax.jit(call, donate_argnums=0)


@functools.cache
def score_program(
    use: str, model: ModelConfig, codec: CompressorConfig | None, mesh: jax.sharding.Mesh, *, segment: int = 1
):
    """(params, frozen, batch) -> {term: (sum, count)} over all devices."""
    _known(use)

    def score(params, frozen, batch):
        return jax.lax.psum(TERMS[use](model, codec, segment, params, frozen, batch, "data"), "data")

    return jax.jit(jax.shard_map(score, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))


def _known(use: str) -> None:
    if use not in USES:
        raise ValueError(f"unknown use {use!r}; allowed: {', '.join(USES)}")
