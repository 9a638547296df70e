"""Attempts that ask for actions and values: rows that are rewound, random numbers, results in order."""

import numpy as np
import pytest
from helpers import MODEL, quick_compile  # noqa: F401

from sao_jax.models.critic import critic_outputs, init_critic
from sao_jax.models.decoder import init_params
from sao_jax.rollout.engine import Engine
from sao_jax.rollout.lanes import Draw, Judge, common_length, play
from sao_jax.rollout.values import PrefixValues
from sao_jax.runtime.devices import data_mesh

PROMPT = np.array([1, 2, 3], np.int32)


@pytest.fixture(scope="module")
def params():
    import jax

    return init_params(MODEL, jax.random.key(0))


def engine(params, slots=4, context=32):
    return Engine(MODEL, params, mesh=data_mesh(1), slots=slots, context=context, stop_ids=[5], seed=3, burst=4)


def draws(*requests):
    """An attempt that draws one action after each of these lists of (lane, tokens), and returns all it drew."""
    drawn = []
    for entries in requests:
        drawn.append((yield Draw([(lane, np.array(tokens, np.int32), 6) for lane, tokens in entries])))
    return drawn


def same(a, b):
    return a.tokens.tolist() == b.tokens.tolist() and np.allclose(a.logp, b.logp, atol=1e-5) and a.done == b.done


def test_a_rewound_row_samples_as_one_that_has_read_the_same_prefix_from_the_start(params):
    first, other = [1, 2, 3, 4, 0, 2, 1], [1, 2, 3, 0, 0]
    (rewound,) = play(engine(params), [(7, draws([(0, PROMPT)], [(0, first)], [(0, other)]))], width=1, temperature=1.0)
    fresh = []
    for skipped in (1, 2):  # the draws before use other lanes, so lane 0 begins with the prefix itself
        prefix = (first, other)[skipped - 1]
        requests = [[(n + 1, PROMPT)] for n in range(skipped)] + [[(0, prefix)]]
        fresh += play(engine(params), [(7, draws(*requests))], width=4, temperature=1.0)
    assert same(rewound.result[1][0], fresh[0].result[1][0])
    assert same(rewound.result[2][0], fresh[1].result[2][0])


def test_a_row_that_draws_again_from_the_same_prefix_gets_other_random_numbers(params):
    (played,) = play(engine(params), [(0, draws(*[[(0, PROMPT)]] * 6))], width=1, temperature=1.0)
    assert len({tuple(drawn.tokens) for (drawn,) in played.result}) > 1


def test_an_attempt_is_the_same_whatever_else_runs(params):
    def attempts():
        return [(10 * n, draws([(0, PROMPT), (1, PROMPT)], [(1, [1, 2, 3, 4])])) for n in range(5)]

    alone = [play(engine(params), [attempt], width=2, temperature=1.0)[0] for attempt in attempts()[:2]]
    together = play(engine(params), attempts(), width=2, temperature=1.0)
    assert len(together) == 5
    for one, many in zip(alone, together, strict=False):
        assert one.sampled == many.sampled
        for a, b in zip(one.result, many.result, strict=True):
            assert all(map(same, a, b))


def test_tokens_of_every_candidate_are_counted(params):
    (played,) = play(engine(params), [(0, draws([(0, PROMPT), (1, PROMPT), (2, PROMPT)]))], width=3, temperature=1.0)
    assert played.sampled == sum(len(drawn.tokens) for drawn in played.result[0]) > 0


def test_more_lanes_than_rows_are_refused(params):
    with pytest.raises(ValueError, match="an attempt needs 5 rows of the sampler; --slots is 4"):
        play(engine(params), [], width=5, temperature=1.0)


def test_values_without_a_critic_are_refused(params):
    def attempt():
        yield Judge([PROMPT])

    with pytest.raises(ValueError, match="there is no critic"):
        play(engine(params), [(0, attempt())], width=1, temperature=1.0)


@pytest.mark.parametrize(("a", "b", "n"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 4, 3], 1)])
def test_common_beginning(a, b, n):
    assert common_length(np.array(a), np.array(b)) == n


def test_values_of_prefixes_are_the_critics_outputs_at_their_ends(params):
    import jax

    critic = init_critic(MODEL, params)
    critic["head"]["w"] = jax.random.normal(jax.random.key(1), critic["head"]["w"].shape)
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 6, n).astype(np.int32) for n in (40, 7, 40)]
    values = PrefixValues(MODEL, critic, context=64, rows=2)(prefixes)
    alone = [float(critic_outputs(MODEL, critic, p[None])[0, -1]) for p in prefixes]
    np.testing.assert_allclose(values, alone, atol=1e-5)
    assert PrefixValues(MODEL, critic, context=64)([]).shape == (0,)
