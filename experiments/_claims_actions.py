"""What it saves to compute log-probs, loss and recursion for action tokens alone."""

import functools
import math
import statistics
from typing import Any

import numpy as np

from experiments._claim import Measured, Request
from experiments.bench import REFERENCE, fresh_learner, median_seconds, one_update
from sao_jax.report.intervals import mean_interval

SHARES = (0.2, 0.4, 0.6, 0.8)  # of observation tokens
VOCABULARIES = (512, 8192)  # the larger one is that of the figure: with a small one all tokens are scored at once


def action_only(asked: Request) -> Measured:
    """Time of head, log-prob, loss and recursion, forward and backward, where observation tokens are left out, against
    the same over all tokens; an average over 20 to 80 % observations.

    The functions are the learner's. In the notes: each share, a smaller vocabulary, the time of a whole update of the
    learner, and the compiler's count of FLOPs of the same computation on arrays of action tokens alone (of its own
    programs it cannot tell: how many chunks are skipped is data).
    """
    quick = asked.quick
    rows, length, repetitions = (4, 256, 2) if quick else (16, 256, 5)
    notes: dict[str, dict[str, float]] = {}
    for vocabulary in VOCABULARIES:
        saved = _tail(vocabulary, rows, length, repetitions, asked)
        for share, times in zip(SHARES, saved, strict=True):
            notes[_note(share, vocabulary)] = {"time of head, loss, recursion": round(statistics.median(times), 1)}
    for share, less in zip(SHARES, _updates(rows, length, repetitions, asked), strict=True):
        notes[_note(share, VOCABULARIES[-1])]["time of an update"] = round(less, 1)
    for share in SHARES:
        asked.check()
        whole, kept = (_flops(rows, n) for n in (length, round(length * (1 - share))))
        notes[_note(share, VOCABULARIES[-1])]["FLOPs of head, loss, recursion"] = round(100 * (1 - kept / whole), 1)
    effect = mean_interval(saved.mean(axis=0).tolist())
    sizes = {"rows": rows, "length": length, "vocabulary": VOCABULARIES[-1], "width": REFERENCE["dim"]}
    return Measured(effect, 100 - effect[0], 100.0, list(range(repetitions)), sizes, notes)


def _note(share: float, vocabulary: int) -> str:
    return f"{share:.0%} observations, vocabulary {vocabulary:,}: saved, %"


def _loss(head, hidden, tokens, mask, given: dict, *, live, chunk=None):
    """The learner's loss of rows of [R, L] tokens, from the hidden states on."""
    import jax
    import jax.numpy as jnp

    from sao_jax.models.logprobs import next_token_logprobs
    from sao_jax.objectives import gae, importance_weights, policy_loss

    temperature, asked = jnp.ones(tokens.shape[0]), mask if live else None
    logp, _ = next_token_logprobs(hidden, head, tokens, temperature, chunk=chunk, live_BxT=asked)

    def row(logp, mu, values, rewards, mask):
        advantages, _ = gae(rewards, values, mask, discount=1.0, lambda_=0.95)
        weights = importance_weights(logp, mu, low=0.1, high=10.0, outside="clip")
        return policy_loss(logp, weights, advantages, mask)[0]

    return jax.vmap(row)(logp, given["mu"], given["values"], given["rewards"], mask).sum()


def _given(rows: int, length: int, vocabulary: int, share: float) -> tuple:
    import jax.numpy as jnp

    rng, width = np.random.default_rng(0), REFERENCE["dim"]
    head = jnp.asarray(rng.normal(size=(width, vocabulary)) / math.sqrt(width), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(rows, length, width)), jnp.float32)
    mask = rng.random((rows, length)) >= share
    given = {name: jnp.asarray(rng.normal(size=(rows, length)), jnp.float32) for name in ("mu", "values", "rewards")}
    return head, hidden, jnp.asarray(rng.integers(0, vocabulary, (rows, length))), jnp.asarray(mask), given


def _gradient(**options):
    import jax

    return jax.jit(jax.grad(functools.partial(_loss, **options), (0, 1)))


def _tail(vocabulary: int, rows: int, length: int, repetitions: int, asked: Request) -> np.ndarray:
    """[shares, repetitions]: by how many per cent the time is shorter; the two sides take turns."""
    import jax

    def call(gradient, arguments):
        return lambda: jax.block_until_ready(gradient(*arguments))

    gradients = [_gradient(live=live) for live in (True, False)]
    saved = np.zeros((len(SHARES), repetitions))
    for index, share in enumerate(SHARES):
        calls = [call(gradient, _given(rows, length, vocabulary, share)) for gradient in gradients]
        for repetition in range(repetitions):
            asked.check()
            ours, theirs = (median_seconds(call, 3 + (repetition == 0)) for call in calls)  # the first one compiles
            saved[index, repetition] = 100 * (1 - ours / theirs)
    return saved


def _flops(rows: int, length: int) -> float:
    """Of the whole in one chunk: the compiler would count the body of a loop once."""
    arguments = _given(rows, length, VOCABULARIES[-1], 0.0)
    compiled = _gradient(live=False, chunk=rows * length).lower(*arguments).compile()
    return float(compiled.cost_analysis()["flops"])


def _updates(rows: int, length: int, repetitions: int, asked: Request) -> list[float]:
    """By how many per cent an update of the learner is shorter where that share of its tokens are observations."""
    from sao_jax.data.rows import blank_row
    from sao_jax.runtime.config import RunConfig

    vocabulary, rng = VOCABULARIES[-1], np.random.default_rng(0)
    config = RunConfig(baseline="batch_mean", kl="off", **REFERENCE).resolved()
    learner = fresh_learner(config, vocabulary, rows, length, micro_rows=max(1, 1024 // length))
    batches: list[list[dict[str, Any]]] = []
    for share in (0.0, *SHARES):
        batches.append([])
        for _ in range(rows):
            row = blank_row(length)
            row["tokens"][:] = rng.integers(0, vocabulary, length)
            row["action_mask"][1:] = rng.random(length - 1) >= share
            row["rollout_logp"][1:] = -math.log(vocabulary)
            batches[-1].append(row | {"length": np.int32(length), "advantage": np.float32(0.5)})
    one_update(learner, batches[0])
    one_update(learner, batches[0])
    seconds: list[list[float]] = [[] for _ in batches]
    for _ in range(repetitions):
        asked.check()
        for batch, found in zip(batches, seconds, strict=True):
            found.append(median_seconds(lambda: one_update(learner, batch), 1))  # noqa: B023
    whole, *shorter = (statistics.median(found) for found in seconds)
    return [100 * (1 - s / whole) for s in shorter]
