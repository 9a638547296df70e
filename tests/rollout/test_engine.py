"""Two compiled engines serve the whole file; each test hands back the slots that it took."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind, init_params
from sao_jax.rollout.engine import Engine, Request
from sao_jax.runtime.devices import data_mesh

CONFIG = ModelConfig(vocab_size=11, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24)
STOP = 6
ATOL = 1e-4


def make_engine(params, seed=0, context=60, **options):
    options = {"slots": 8, "stop_ids": [STOP], "burst": 4, "prefill_buckets": (4, 8), "prefill_rows": 2} | options
    return Engine(CONFIG, params, mesh=data_mesh(2), seed=seed, context=context, **options)


@pytest.fixture(scope="module")
def params():
    # Larger weights than at initialisation, so that distributions are far from uniform.
    return jax.tree.map(lambda x: 1.5 * x, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def other_params():
    return init_params(CONFIG, jax.random.key(1))


@pytest.fixture(scope="module")
def _keep(params):
    engine = make_engine(params)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def _recompute(params):
    return make_engine(params, context=32, kv_after_swap="recompute", seed=1)


def _reset(engine, params):
    engine.version = 0
    engine.publish(params, 0)
    yield engine
    while engine.collect():
        pass
    for rollout in list(engine._slot_of):
        engine.release(rollout)
    assert engine.free == engine.slots


@pytest.fixture
def engine(_keep, params):
    yield from _reset(_keep, params)


@pytest.fixture
def recompute_engine(_recompute, params):
    yield from _reset(_recompute, params)


class Sequence:
    """What the host knows of one rollout."""

    def __init__(self, prompt):
        self.tokens, self.logp, self.version, self.done = [int(t) for t in prompt], {}, {}, []

    def add(self, piece):
        assert len(piece.tokens) == len(piece.logp) == len(piece.version) > 0
        for token, logp, version in zip(piece.tokens, piece.logp, piece.version, strict=True):
            self.logp[len(self.tokens)], self.version[len(self.tokens)] = float(logp), int(version)
            self.tokens.append(int(token))
        if piece.done:
            self.done.append(piece.done)


def play(engine, requests, observations=(), max_new=9, before_dispatch=lambda: None):
    """Runs all requests to their end, each answered by the observations in turn. Returns {rollout: Sequence}."""
    sequences, turn = {}, {}
    for r in requests:
        engine.submit(r)
        sequences[r.rollout], turn[r.rollout] = Sequence(r.tokens), 0
    before_dispatch()
    while engine.dispatch():
        for piece in engine.collect():
            sequence = sequences[piece.rollout]
            sequence.add(piece)
            if piece.done and turn[piece.rollout] < len(observations):
                sequence.tokens += observations[turn[piece.rollout]]
                engine.extend(piece.rollout, observations[turn[piece.rollout]], max_new)
                turn[piece.rollout] += 1
            elif piece.done:
                engine.release(piece.rollout)
        before_dispatch()
    return sequences


_full = jax.jit(lambda params, tokens: bind(CONFIG, params)(tokens) @ bind(CONFIG, params).head())


def reference_logp(params, tokens, temperature):
    """Log-probs of tokens 1.. by one forward pass over the whole sequence; entry i is that of token i."""
    padded = np.zeros(64, np.int32)  # one compilation for all lengths; causal, so the padding is not seen
    padded[: len(tokens)] = tokens
    logits = _full(params, padded[None])[0] / (temperature or 1.0)
    logp = jax.nn.log_softmax(logits)[jnp.arange(63), padded[1:]]
    return np.concatenate([[np.nan], np.asarray(logp)])


def assert_matches_trainer(params, sequence, temperature):
    want = reference_logp(params, sequence.tokens, temperature)
    assert sequence.logp
    for i, logp in sequence.logp.items():
        np.testing.assert_allclose(logp, want[i], atol=ATOL)


def requests(lengths, temperatures=(1.0,), max_new=9, attempt=0):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 11, n) for n in lengths]
    return [Request(r, attempt, p, max_new, temperatures[r % len(temperatures)]) for r, p in enumerate(prompts)]


OBSERVATIONS = ([5, 1, 7], [2], [4, 4, 4, 4, 9])


def test_logp_equals_the_trainers_over_several_turns(engine, params):
    temperatures = (0.5, 1.0, 2.0, 0.0)
    batch = requests([1, 2, 9, 17, 5, 23, 12, 4], temperatures, max_new=6)
    for rollout, sequence in play(engine, batch, OBSERVATIONS, max_new=6).items():
        assert len(sequence.done) == 4
        assert_matches_trainer(params, sequence, temperatures[rollout % 4])


def test_greedy_rows_take_the_best_token(engine, params):
    (sequence,) = play(engine, requests([5], (0.0,), max_new=20)).values()
    best = np.argmax(_full(params, np.pad(sequence.tokens, (0, 64 - len(sequence.tokens)))[None])[0], axis=-1)
    for i in sequence.logp:
        assert sequence.tokens[i] == best[i - 1]


def test_a_row_is_the_same_bits_whatever_its_mates_slot_device_and_order(engine):
    batch = requests([6, 1, 15, 26, 3, 9, 20, 2], (1.0, 0.5, 2.0), max_new=8)
    together = play(engine, batch, OBSERVATIONS, max_new=5)
    backwards = play(engine, batch[::-1], OBSERVATIONS, max_new=5)
    for request in batch:
        alone = play(engine, [request], OBSERVATIONS, max_new=5)
        # Joining while others are half way, in whatever slot is left.
        engine.submit(Request(90, 0, [1, 2], 20))
        engine.dispatch()
        engine.collect()
        engine.submit(Request(91, 0, [7] * 11, 11))
        late = play_beside(engine, request)
        for other in (alone, backwards, late):
            assert other[request.rollout].tokens == together[request.rollout].tokens
            assert other[request.rollout].logp == together[request.rollout].logp
        for rollout in (90, 91):
            engine.release(rollout)


def play_beside(engine, request):
    """Like play, for one request among rows that nobody answers."""
    sequence, left = Sequence(request.tokens), list(OBSERVATIONS)
    engine.submit(request)
    while request.rollout in engine._slot_of:
        engine.dispatch()
        for piece in engine.collect():
            if piece.rollout != request.rollout:
                continue
            sequence.add(piece)
            if piece.done and left:
                sequence.tokens += left[0]
                engine.extend(request.rollout, left.pop(0), 5)
            elif piece.done:
                engine.release(request.rollout)
    return {request.rollout: sequence}


def test_two_outstanding_bursts_give_the_same_tokens(engine):
    batch = requests([6, 1, 15, 3], max_new=13)
    want = play(engine, batch)
    got = {r.rollout: Sequence(r.tokens) for r in batch}
    for r in batch:
        engine.submit(r)
    for _ in range(4):
        assert engine.dispatch()
    for _ in range(4):
        for piece in engine.collect():
            got[piece.rollout].add(piece)
    for rollout, sequence in want.items():
        assert got[rollout].tokens == sequence.tokens
        assert got[rollout].logp == sequence.logp
        assert got[rollout].done == sequence.done
    assert not engine.dispatch()


def test_samples_of_a_group_attempts_and_seeds_differ(engine, recompute_engine):
    def texts(engine, attempt=0):
        group = [Request(r, attempt, [1, 2], 12, 2.0) for r in range(4)]
        return [tuple(s.tokens) for s in play(engine, group).values()]

    first = texts(engine)
    assert len({*first, *texts(engine, attempt=1), *texts(recompute_engine)}) == 12
    assert first == texts(engine)


def test_stop_token_is_kept_and_limits_are_met(engine):
    for sequence in play(engine, requests([3] * 8, max_new=10)).values():
        sampled = sequence.tokens[3:]
        assert STOP not in sampled[:-1]
        assert sequence.done == ["stop" if sampled[-1] == STOP else "length"]
        assert len(sampled) == 10 or sampled[-1] == STOP
    ends = [s.done[0] for s in play(engine, requests([3] * 8, (2.0,), max_new=10)).values()]
    assert set(ends) == {"stop", "length"}
    for sequence in play(engine, requests([3] * 2, max_new=1)).values():
        assert len(sequence.logp) == 1


def test_nothing_compiles_after_warm_up(engine):
    compiled = []

    def listen(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 1)(jnp.ones(3))
    assert compiled, "the listener hears compilations"
    compiled.clear()
    before = engine.programs()
    checks = []
    assert before == len(engine.warm_up(lambda: checks.append(engine.programs()))) == 2
    assert len(checks) == 2, "a signal waits for one program at most"
    for length in (5, 9, 13, 6, 10, 12, 40):
        play(engine, [Request(length, 0, [1] * length, 7, 0.5)], OBSERVATIONS[:1], max_new=3)
    assert engine.programs() == before
    assert not compiled
    jax.monitoring.unregister_event_duration_listener(listen)


def test_long_prompts_are_split_and_may_need_several_calls(params, engine):
    # 40 tokens are five chunks of 8 a row; four rows a device in groups of 2 are more groups than one plan holds.
    batch = requests([40] * 8, max_new=8)
    for sequence in play(engine, batch).values():
        assert_matches_trainer(params, sequence, 1.0)
    assert engine.programs() == 2


def test_versions_are_recorded_per_token_and_kept_cache_is_mixed(engine, params, other_params):
    sequences = {r: Sequence([1, 2, 5]) for r in range(8)}
    for r in sequences:
        engine.submit(Request(r, 0, [1, 2, 5], 8))
    engine.dispatch()
    engine.publish(other_params, 7)  # takes effect at the next dispatch
    for _ in range(2):
        for piece in engine.collect():
            sequences[piece.rollout].add(piece)
        engine.dispatch()
    sequence = max(sequences.values(), key=lambda s: len(s.tokens))
    assert [sequence.version[i] for i in range(3, 11)] == [0] * 4 + [7] * 4
    want = reference_logp(params, sequence.tokens, 1.0)
    np.testing.assert_allclose([sequence.logp[i] for i in range(3, 7)], want[3:7], atol=ATOL)
    fresh = reference_logp(other_params, sequence.tokens, 1.0)
    assert max(abs(sequence.logp[i] - fresh[i]) for i in range(7, 11)) > 1e-3


def test_recomputed_cache_gives_the_new_weights_logp(recompute_engine, params, other_params):
    engine = recompute_engine
    prompts = {0: [1, 2, 5, 6], 1: [4], 2: [8, 9, 10] * 4}
    sequences = {r: Sequence(p) for r, p in prompts.items()}
    for r, p in prompts.items():
        engine.submit(Request(r, 0, p, 12))
    for swap in (True, False):
        engine.dispatch()
        for piece in engine.collect():
            sequences[piece.rollout].add(piece)
            if piece.done:
                sequences[piece.rollout].tokens += [6, 6]
                engine.extend(piece.rollout, [6, 6], 4)
        if swap:
            engine.publish(other_params, 1)
    for r, sequence in sequences.items():
        old = reference_logp(params, sequence.tokens, 1.0)
        new = reference_logp(other_params, sequence.tokens, 1.0)
        assert set(sequence.version.values()) == {0, 1}, r
        for i, version in sequence.version.items():
            np.testing.assert_allclose(sequence.logp[i], (old, new)[version][i], atol=ATOL)


def test_recompute_needs_collected_bursts(recompute_engine, other_params):
    recompute_engine.submit(Request(0, 0, [1], 12, 0.0))
    recompute_engine.dispatch()
    recompute_engine.publish(other_params, 1)
    with pytest.raises(ValueError, match="collected"):
        recompute_engine.dispatch()


def test_release_discards_what_is_under_way_and_frees_the_slot(engine):
    batch = requests([4] * 8, max_new=9)
    want = play(engine, batch)
    for r in range(8):
        engine.submit(Request(50 + r, 0, [1] * 9, 30))
    engine.dispatch()
    for r in range(8):
        engine.release(50 + r)
    assert engine.free == 8
    for r in batch:
        engine.submit(r)
    engine.dispatch()
    assert engine.collect() == []
    got = {r.rollout: Sequence(r.tokens) for r in batch}
    while True:
        for piece in engine.collect():
            got[piece.rollout].add(piece)
        if not engine.dispatch():
            break
    for rollout, sequence in want.items():
        assert got[rollout].tokens == sequence.tokens


def test_a_truncated_row_continues_from_the_kept_tokens(engine, params):
    engine.submit(Request(0, 0, [1, 2, 5], 20, 0.0))
    engine.dispatch()
    (piece,) = engine.collect()
    sequence = Sequence([1, 2, 5])
    sequence.add(piece)
    engine.truncate(0, 5)
    assert not engine.dispatch()
    engine.extend(0, [9], 4)
    kept = Sequence([*sequence.tokens[:5], 9])
    while engine.dispatch():
        for piece in engine.collect():
            kept.add(piece)
    assert_matches_trainer(params, kept, 0.0)


def test_a_recorded_schedule_can_be_driven_again(engine):
    batch = requests([6, 1, 15, 26], max_new=8)
    schedules = []
    want = play(engine, batch, OBSERVATIONS, 5, lambda: schedules.append(json.loads(json.dumps(engine.last_schedule))))
    schedules = schedules[1:]
    got = {}
    for schedule in schedules:
        for rollout, attempt, start, count in schedule["joins"]:
            tokens = want[rollout].tokens[start : start + count]
            if rollout not in got:
                engine.submit(Request(rollout, attempt, tokens, 8))
                got[rollout] = Sequence(tokens)
            else:
                engine.extend(rollout, tokens, 5)
                got[rollout].tokens += tokens
        assert schedule["version"] == 0
        assert schedule["steps"] == 4
        engine.dispatch()
        for piece in engine.collect():
            got[piece.rollout].add(piece)
    assert {r: (s.tokens, s.logp) for r, s in got.items()} == {r: (s.tokens, s.logp) for r, s in want.items()}


def test_bad_requests_are_refused_and_change_nothing(engine):
    for bad, message in [
        ({"tokens": []}, "empty prompt"),
        ({"tokens": [11]}, "token id 11 is outside the vocabulary of 11"),
        ({"tokens": [1, -1]}, "token id -1"),
        ({"max_new": 0}, "max_new is 0"),
        ({"max_new": 59}, "exceed the context of 60"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"attempt": -1}, "attempt is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(Request(**({"rollout": 0, "attempt": 0, "tokens": [1, 2], "max_new": 4} | bad)))
    assert engine.free == 8
    for r in range(8):
        engine.submit(Request(r, 0, [1], 4))
    with pytest.raises(ValueError, match="no free slot"):
        engine.submit(Request(8, 0, [1], 4))
    with pytest.raises(ValueError, match="has a slot already"):
        engine.submit(Request(0, 0, [1], 4))
    with pytest.raises(ValueError, match="still running"):
        engine.extend(0, [1], 4)
    for call in (lambda: engine.extend(8, [1], 4), lambda: engine.release(8), lambda: engine.truncate(8, 1)):
        with pytest.raises(KeyError, match="rollout 8 has no slot"):
            call()


def test_bad_set_ups_are_refused(params):
    for bad, message in [
        ({"slots": 7}, "use a multiple of 2"),
        ({"burst": 0}, "burst is 0"),
        ({"stop_ids": [11]}, "outside the vocabulary"),
        ({"seed": -1}, "seed is -1"),
        ({"kv_after_swap": "drop"}, "allowed: keep, recompute"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_engine(params, **bad)
