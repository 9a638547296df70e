"""How a pass is carried out changes its memory, never its result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_compile  # noqa: F401

from sao_jax.models.compute import REMAT, Compute, check_backend
from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs, init_critic
from sao_jax.models.decoder import bind, init_params

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig(
    vocab_size=17, dim=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=16, qk_norm=True
)
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 40)).astype(np.int32)
IDS = (np.arange(40) >= np.array([[9], [30]])).astype(np.int32)
WAYS = [Compute(r, s) for s in (False, True) for r in ("none", "block", "dots")]


@pytest.fixture(scope="module")
def params():
    policy = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    critic = init_critic(MODEL, policy)
    critic["head"]["w"] = jnp.linspace(-1.0, 1.0, MODEL.dim)[:, None]
    return {"policy": policy, "critic": critic}


@functools.partial(jax.jit, static_argnums=1)
def loss_and_gradient(params, compute):
    def loss(params):
        hidden = bind(MODEL, params["policy"])(TOKENS, pack_ids=IDS, compute=compute)
        outputs = critic_outputs(MODEL, params["critic"], TOKENS, pack_ids=IDS, compute=compute)
        return (hidden * jnp.sin(jnp.arange(hidden.size).reshape(hidden.shape))).sum() + jnp.square(outputs).sum()

    return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def plain(params):
    return loss_and_gradient(params, Compute())


@pytest.mark.parametrize("compute", WAYS[1:], ids=lambda c: f"{c.remat}{', scanned' * c.scan_layers}")
def test_loss_and_gradients_are_those_of_the_plain_pass(params, plain, compute):
    loss, gradient = loss_and_gradient(params, compute)
    np.testing.assert_allclose(loss, plain[0], rtol=1e-6)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6 * max(1.0, np.abs(want).max()))


def temp_bytes(compute, *, layers=8):
    config = ModelConfig(vocab_size=8, dim=16, num_layers=layers, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=64)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    gradient = jax.grad(lambda params, tokens: bind(config, params)(tokens, compute=compute).sum())
    return jax.jit(gradient).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("scanned", [False, True])
def test_blocks_computed_again_need_less_memory_at_depth_8_and_saved_products_lie_between(scanned):
    none, dots, block = (temp_bytes(Compute(remat, scanned)) for remat in ("none", "dots", "block"))
    assert block < 0.5 * none
    assert block < dots < none


def test_a_scan_has_one_copy_of_the_block_whatever_the_depth(params):
    def size(compute):
        def run(p):
            return bind(MODEL, p)(TOKENS, compute=compute)

        return jax.jit(run).lower(params["policy"]).as_text().count("dot_general")

    # Both hold the same products per block, and the loop holds one block of three.
    assert 0 < 3 * size(Compute(scan_layers=True)) == size(Compute())


def test_offload_puts_each_blocks_input_into_the_hosts_memory(params, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    compute = Compute(remat="offload")
    gradient = jax.grad(lambda p: bind(MODEL, p)(TOKENS, compute=compute).sum())
    text = str(jax.make_jaxpr(gradient)(params["policy"]))
    monkeypatch.undo()
    assert text.count("MemorySpace.Host") == MODEL.num_layers


def test_offload_is_refused_where_there_is_no_memory_apart(params):
    with pytest.raises(
        ValueError, match=r"remat offload .* backend cpu has no memory apart .* use none, block or dots"
    ):
        check_backend(Compute(remat="offload"))
    with pytest.raises(ValueError, match="remat offload"):
        jax.eval_shape(lambda p: bind(MODEL, p)(TOKENS, compute=Compute(remat="offload")), params["policy"])


def test_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="remat is 'blocks'; allowed: none, block, dots, offload"):
        Compute(remat="blocks")
    assert REMAT == ("none", "block", "dots", "offload")
