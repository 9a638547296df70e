"""How the claim about the compression engine is measured: memory of a long trajectory's history, and what it costs."""

import math
import statistics
from typing import Any

from experiments._claim import Claim, Measured, Request
from sao_jax.report.intervals import mean_interval

LENGTHS = (1024, 4096, 16_384, 65_536)  # tokens of a trajectory; the figure is that of the third
SEGMENT = 100
BOUND = 2.0  # per cent that compression may cost in value error and in log-likelihood
FULL = dict(task="dialogue:turns=16", attempts=512, codec_attempts=64, test_attempts=32)  # told early, needed late
FULL |= dict(model_steps=60, codec_steps=8, batch_tokens=512)
QUICK = dict(task="mathword:level=4", dim=64, heads=2, head_dim=32, mlp_dim=64, attempts=64, codec_attempts=64)
QUICK |= dict(test_attempts=16, model_steps=20, codec_steps=5)


def history_bytes(model, codec, tokens: int) -> int:
    """Bytes of the arrays that hold `tokens` finished tokens of one trajectory: keys and values of all layers, or
    (with a `CompressorConfig`) their codes, the compressors and a segment's own keys and values."""
    import jax

    from sao_jax.models.decoding import init_cache
    from sao_jax.models.memory import init_memory
    from sao_jax.runtime.compression import parameter_bytes

    def size(function, *args) -> int:
        shapes = jax.eval_shape(lambda: function(*args))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    if codec is None:
        return size(init_cache, model, 1, tokens)
    held = size(init_memory, model, codec, 1, tokens)
    return held + parameter_bytes(codec, model.num_layers) + size(init_cache, model, 1, SEGMENT)


def compression(asked: Request) -> Measured:
    """Memory of the history with latent keys and values, and the cost of all three uses by kind of compressor."""
    from sao_jax.models.compressor import KINDS
    from sao_jax.models.memory import kv_width
    from sao_jax.runtime.compression import CompressionConfig, compare

    seeds = list(range(asked.seeds or (1 if asked.quick else 3)))
    configs = [CompressionConfig(seed=seed, **(QUICK if asked.quick else FULL)) for seed in seeds]
    config, runs = configs[0], [compare(c, check=asked.check) for c in configs]
    model = config.model(1)
    codecs = {kind: config.codec(model, kv_width(model), kind) for kind in KINDS}
    whole = {tokens: history_bytes(model, None, tokens) for tokens in LENGTHS}
    part = {kind: {t: history_bytes(model, codec, t) / whole[t] for t in LENGTHS} for kind, codec in codecs.items()}
    less = 100 * (1 - part["moe"][LENGTHS[2]])
    notes: dict[str, Any] = {"memory at tokens, % of uncompressed": {k: _shares(v) for k, v in part.items()}}
    notes |= {f"{use}, {kind}": _cost(runs, use, kind) for use in config.named("compress") for kind in KINDS}
    notes["value error against that of a constant"] = _blind(runs)
    notes[f"within {BOUND:g} %"] = {
        kind: all(within(notes[f"{use}, {kind}"]) for use in config.named("compress")) for kind in KINDS
    }
    sizes = {"dim": config.dim, "layers": config.layers, "width": config.dim // 4, "experts": config.experts}
    sizes |= {"tokens": LENGTHS[2], "segment": SEGMENT, "task": config.task, "attempts": config.attempts}
    return Measured((less, math.nan, math.nan), 100 - less, 100.0, seeds, sizes, notes)


def _shares(by_length: dict[int, float]) -> dict[str, float]:
    return {f"{tokens:,}": round(100 * share, 1) for tokens, share in by_length.items()}


def _found(runs, use: str, kind: str, name: str) -> list[float]:
    return [r[name] for records in runs for r in records if (r["use"], r["kind"]) == (use, kind) and name in r]


def _cost(runs, use: str, kind: str) -> dict[str, Any]:
    cost: dict[str, Any] = {
        "variance lost, %": round(100 * statistics.fmean(_found(runs, use, kind, "reconstruction")), 3)
    }
    for name, heading in (("nll_change", "log-likelihood, %"), ("value_change", "value error, %")):
        if found := _found(runs, use, kind, name):
            cost[heading] = [round(x, 3) for x in mean_interval(found)]
    return cost


def _blind(runs) -> dict[str, list[float]]:
    """Value errors [uncompressed, of a constant]: where they are close there is little that could be lost."""
    uses = dict.fromkeys(r["use"] for r in runs[0])
    names = ("value", "value_of_a_constant")
    return {use: [round(statistics.fmean(_found(runs, use, "none", name)), 4) for name in names] for use in uses}


def within(cost: dict[str, Any]) -> bool:
    """Whether means and the upper ends of their intervals, where there are several seeds, keep the bound."""
    found = [cost[name] for name in ("log-likelihood, %", "value error, %") if name in cost]
    return all(mean <= BOUND and not high > BOUND for mean, _, high in found)


CLAIMS = {
    "compression": Claim(
        "memory of a long history, latent keys and values", 40.0, 100.0, 60.0, "% less memory", compression, "%"
    )
}
