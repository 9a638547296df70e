import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import MODEL_FLAGS, SilentDisplay, quick_compile  # noqa: F401

from experiments._claims_compression import history_bytes, within
from sao_jax.envs.registry import make_family
from sao_jax.models import compressor
from sao_jax.models.compressor import CompressorConfig
from sao_jax.models.memory import kept_positions
from sao_jax.runtime import compression
from sao_jax.runtime.compression import CompressionConfig
from sao_jax.runtime.compression_data import play
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.train import train

SMALL = CompressionConfig(
    task="calculator:level=1",
    segment=16,
    experts=2,
    dim=16,
    layers=1,
    heads=2,
    head_dim=8,
    mlp_dim=16,
    attempts=16,
    codec_attempts=16,
    test_attempts=6,
    model_steps=2,
    codec_steps=2,
    batch_tokens=32,
    kinds="moe,truncation",
    devices=2,
)


def test_attempts_carry_what_is_still_to_be_earned():
    attempts = play(make_family("tiny:turns=2"), "train", 4, 4, 0, lambda: None)
    for tokens, mask, live, returns in zip(
        attempts.tokens, attempts.mask, attempts.live, attempts.returns, strict=True
    ):
        assert len(tokens) % 4 == 0
        assert not (mask & ~live).any()
        last = np.flatnonzero(mask)[-1]
        assert set(returns[: last + 1]) <= {0.0, 1.0}
        assert len(set(returns[: last + 1])) == 1
        assert not returns[last + 1 :].any()


def test_a_task_without_an_expert_is_the_users_error():
    class Mute(type(make_family("tiny"))):
        def expert(self, *_):
            raise NotImplementedError("no expert")

    with pytest.raises(ValueError, match="no expert; compression is measured"):
        play(Mute(), "train", 1, 4, 0, lambda: None)


def test_stored_columns_of_a_segment_give_its_states_back():
    config = CompressorConfig(6, 2, 3, 2)
    params = compressor.init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    states = rng.normal(size=(10, 6)).astype(np.float32)
    kept = rng.random(10) < 0.6
    pieces = compression.state_columns(config, params, states, kept, 4)
    assert len(pieces) == 3
    assert sum(x.nbytes for p in pieces for k, x in p.items() if k != "positions") == kept.sum() * config.code_bytes
    decoded = np.asarray(compressor.bind(config, params)(states)[0])
    for number, piece in enumerate(pieces):
        positions, found = compression.read_columns(config, params, piece)
        np.testing.assert_array_equal(positions, 4 * number + np.flatnonzero(kept[4 * number : 4 * number + 4]))
        np.testing.assert_allclose(found, decoded[positions], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_comparison_has_a_record_of_each_use_and_kind():
    records = compression.compare(SMALL)
    assert [(r["use"], r["kind"]) for r in records] == [
        (use, kind) for use in ("states", "critic", "kv") for kind in ("none", "moe", "truncation")
    ]
    for record in records:
        assert all(np.isfinite(v) for k, v in record.items() if k not in ("use", "kind"))
        if record["kind"] != "none":
            whole = next(r for r in records if (r["use"], r["kind"]) == (record["use"], "none"))
            assert record["bytes_per_token"] < 0.35 * whole["bytes_per_token"]
            assert record["value_change"] == pytest.approx(100 * (record["value"] / whole["value"] - 1))


@pytest.mark.slow
def test_the_policy_of_a_run_is_compressed_on_its_own_attempts(tmp_path):
    flags = dict(
        task="tiny:turns=2", warm_start_steps=0, preheat_rollouts=0, rollouts=4, batch_size=4, slots=4, devices=2
    )
    train(RunConfig(**MODEL_FLAGS, **flags, eval_every=0, eval_tasks=2).resolved(), tmp_path, SilentDisplay())
    config = dataclasses.replace(SMALL, run=str(tmp_path), segment=4, compress="kv", attempts=16, test_attempts=4)
    records = compression.compare(config)
    assert [r["kind"] for r in records] == ["none", "moe", "truncation"]
    # One key/value head of width 8: 16 numbers per token, a quarter of which is kept.
    assert [r["bytes_per_token"] for r in records] == [64, 17, 16]
    assert 0 < records[0]["nll"] < 20


def test_blank_rows_of_the_last_batch_count_nothing():
    bench = object.__new__(compression.Bench)
    bench.config = SMALL
    bench.test = play(make_family(SMALL.task), "test", 3, 16, 0, lambda: None)
    bench.states = {"test": np.ones((*bench.test.tokens.shape, 2), np.float32)}
    batch = bench.batch("states", "test", np.array([1, -1]))
    T = bench.test.tokens.shape[1]
    assert batch["action"][:T].sum() == bench.test.mask[1].sum()
    assert batch["live"][:T].sum() == (np.asarray(kept_positions(bench.test.mask, 16)) & bench.test.live)[1].sum()
    assert not batch["action"][T:].any()
    assert not batch["live"][T:].any()
    # A state is read for the token after it.
    np.testing.assert_array_equal(batch["next_token"][: T - 1], bench.test.tokens[1, 1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress": "states,states"}, "none twice"),
        ({"compress": ""}, "--compress"),
        ({"kinds": "svd"}, "allowed: moe"),
        ({"segment": 0}, "--segment is 0"),
        ({"kinds": "pca"}, "need moe"),
        ({"codec_attempts": 17}, "there are 16 attempts"),
        ({"compress": "kv", "critic_lr": 1.0}, "needs critic"),
        ({"kinds": "pca", "experts": 4, "codec_lr": 1.0}, "needs moe or linear"),
    ],
)
def test_wrong_choices_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change).check()


def test_memory_of_a_history_counts_codes_compressors_and_the_segment_itself():
    model = SMALL.model(7)
    codec = SMALL.codec(model, 32, "moe")
    assert history_bytes(model, None, 1024) == 1024 * 32 * 4
    expected = 1024 * codec.code_bytes + compression.parameter_bytes(codec) + 100 * 32 * 4
    assert history_bytes(model, codec, 1024) == expected


def test_the_bound_holds_for_the_upper_end_of_the_interval():
    fine, wide, unknown = (1.0, 0.5, 1.5), (1.0, -3.0, 5.0), (1.0, float("nan"), float("nan"))
    assert within({"log-likelihood, %": fine, "value error, %": unknown})
    assert not within({"log-likelihood, %": wide})
    assert not within({"value error, %": (2.5, float("nan"), float("nan"))})


@pytest.mark.slow
def test_a_wrong_flag_is_one_line():
    command = [sys.executable, "-m", "experiments.compress", "--compress", "cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --compress is 'cache'; allowed: states, critic, kv")
