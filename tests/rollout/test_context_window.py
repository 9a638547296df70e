"""Attempts longer than what the sampler holds: books by hand, and the engine against the trainer."""

import jax
import numpy as np
import pytest
from helpers import (
    MODEL,
    Tiny,
    make_learner,
    metric_sums,
    policy_logp,
    quick_compile,  # noqa: F401
)
from test_agents import ScriptedEngine, run, start

from sao_jax.data.protocols import Outcome
from sao_jax.data.rows import make_rows
from sao_jax.data.segments import join_segments
from sao_jax.data.windows import most_windows, windows_of
from sao_jax.learner.objective import Choices
from sao_jax.models.decoder import init_params
from sao_jax.rollout.agents import Agents
from sao_jax.rollout.engine import Engine, Request
from sao_jax.rollout.episode import Episode
from sao_jax.runtime.devices import data_mesh


def long_family(turns, tokens):
    family = Tiny(turns=turns)
    family.max_tokens = tokens
    return family


class Kept(ScriptedEngine):
    """Also keeps what it was given to read, and checks that it fits."""

    def __init__(self, family, context, **options):
        super().__init__(family, **options)
        self.context, self.read, self.offsets = context, {}, []

    def submit(self, request):
        super().submit(request)
        self.read[request.rollout] = request.tokens.tolist()
        self.offsets.append(request.offset)
        assert len(request.tokens) + request.max_new <= self.context

    def extend(self, rollout, tokens, max_new):
        super().extend(rollout, tokens, max_new)
        self.read[rollout] += tokens.tolist()
        assert len(self.read[rollout]) + max_new <= self.context

    def collect(self):
        pieces = super().collect()
        for piece in pieces:
            self.read[piece.rollout] += piece.tokens.tolist()
        return pieces


def test_an_attempt_goes_on_with_its_prompt_and_its_newest_steps():
    family = long_family(turns=6, tokens=64)  # a prompt of 3, then "a;-" five times, "a;"
    engine = Kept(family, context=12)
    agents = Agents(engine, family, context=64, window=12)
    start(agents, family, 0)
    (t,) = run(agents)
    assert family.tokenizer.decode(t.tokens)[3:] == "a;-" * 5 + "a;"
    # Behind "ab?a;-a;-" 3 of 12 places are left, enough for an action; behind the next step none is: the prompt and
    # one step of 3 tokens are carried. Those 6 tokens take two steps more.
    assert t.windows == ((12, 3, 9), (18, 3, 15))
    assert engine.offsets == [0, 6, 12]
    assert t.end == "terminated"
    assert agents.free == 2


def test_an_action_longer_than_the_window_goes_on_in_the_next():
    family = long_family(turns=1, tokens=40)
    engine = Kept(family, context=12, text="a" * 20 + ";")
    engine.burst = 5
    agents = Agents(engine, family, context=40, window=12)
    start(agents, family, 0)

    def script(request):  # the scripted engine begins its text anew at each request: go on where the attempt is
        ScriptedEngine.submit(engine, request)
        done = request.offset + len(request.tokens) - 3
        engine.rows[request.rollout] = list(engine.ids)[done:][: request.max_new]
        engine.read[request.rollout] = request.tokens.tolist()

    engine.submit = script
    (t,) = run(agents)
    assert family.tokenizer.decode(t.tokens)[3:] == "a" * 20 + ";"
    assert t.num_steps == 1
    assert t.windows == ((12, 3, 9), (18, 3, 15))
    assert t.total_reward == 1.0


def test_the_budget_is_that_of_the_attempt_not_of_a_window():
    family = long_family(turns=50, tokens=30)
    agents = Agents(Kept(family, context=12), family, context=30, window=12)
    start(agents, family, 0)
    (t,) = run(agents)
    assert (t.length, t.end, t.reason) == (30, "terminated", "token budget")
    assert len(t.windows) > 1


def test_a_prompt_longer_than_the_window_is_read_in_part():
    family = long_family(turns=1, tokens=64)
    family.prompt = lambda problem: "ab" * 10 + "?"
    episode = Episode(family, family.instance("train", 0), context=64, window=12)
    prompt = family.tokenizer.encode("ab" * 10 + "?")
    assert episode.begin().tolist() == prompt[:3] + prompt[-3:]
    assert (episode.room, episode.offset, episode.max_new) == (6, 15, 43)


def test_a_resumed_attempt_holds_what_the_first_one_held():
    family = long_family(turns=8, tokens=64)
    engine = Kept(family, context=12)
    agents = Agents(engine, family, context=64, window=12, seam_turns=5)
    seams = []
    agents.seam = seams.append
    start(agents, family, 0)
    (whole,) = run(agents)
    start(agents, family, 0, attempt=1, snapshot=join_segments(seams))
    (t,) = run(agents)
    np.testing.assert_array_equal(t.tokens, whole.tokens)
    assert t.windows == whole.windows


# -- on the engine -----------------------------------------------------------------------------------------------------

WINDOW, BUDGET, SEED = 16, 60, 3


@pytest.fixture(scope="module")
def policy():
    return jax.tree.map(lambda x: 2 * x, init_params(MODEL, jax.random.key(0)))


@pytest.fixture(scope="module")
def engine(policy):
    stop = Tiny.tokenizer.encode(";")
    return Engine(MODEL, policy, mesh=data_mesh(1), slots=4, context=WINDOW, stop_ids=stop, seed=SEED, burst=4)


@pytest.fixture(scope="module")
def sampled(engine):
    family = long_family(turns=12, tokens=BUDGET)
    family.respond = lambda problem, actions: (
        Outcome(observation="-?") if len(actions) < 12 else Outcome(end="terminated", reward=1.0)
    )
    agents = Agents(engine, family, context=BUDGET, window=WINDOW)
    for rollout in range(4):
        agents.start("train", rollout, rollout=rollout, temperature=1.3)
    done = []
    while agents.running:
        agents.dispatch()
        done += agents.collect()
    assert len(done) == 4
    return sorted(done, key=lambda t: t.rollout)


def test_sampler_and_trainer_agree_in_every_window(sampled, policy):
    assert all(len(t.windows) >= 2 for t in sampled)
    acts = [t.action_mask[[position - 1, min(position, t.length - 1)]] for t in sampled for position, *_ in t.windows]
    assert any(a.all() for a in acts), "no window opened within an action"
    assert any(not a[0] and a[1] for a in acts), "no window opened at an action"
    most = most_windows(BUDGET, WINDOW)
    learner = make_learner(Choices(kl="off"), length=WINDOW, batch=4, most=most)
    for t in sampled:
        assert len(windows_of(t.action_mask, t.step_ids, t.windows, WINDOW)) <= most
        rows = make_rows(t, length=WINDOW, steps_per_segment=3, lambda_=1.0)
        logp = policy_logp(policy, rows)
        for row, now in zip(rows, logp, strict=True):
            mask = row["action_mask"]
            np.testing.assert_allclose(now[mask], row["rollout_logp"][mask], atol=1e-4)
        learner.put(*rows)
    learner.accumulate()
    sums = metric_sums(learner)
    assert sums["tokens"] == sum(t.num_action_tokens for t in sampled)
    assert sums["logp_abs_diff"] / sums["tokens"] < 1e-4


def test_random_numbers_belong_to_tokens_of_the_attempt(engine, sampled):
    """What a later window sampled is sampled again from its context alone, and otherwise with another offset."""
    t = sampled[0]
    position, head, start = t.windows[1]
    context = np.concatenate([t.tokens[:head], t.tokens[start:position]])
    offset = position - len(context)

    def again(offset):
        engine.submit(Request(t.rollout, 0, context, WINDOW - len(context), 1.3, offset))
        engine.dispatch()
        (piece,) = engine.collect()
        engine.release(t.rollout)
        return piece

    piece = again(offset)
    n = min(len(piece.tokens), int(np.argmin(np.append(t.action_mask[position:], False))))
    np.testing.assert_array_equal(piece.tokens[:n], t.tokens[position : position + n])
    np.testing.assert_array_equal(piece.logp[:n], t.rollout_logp[position : position + n])
    others = [again(other).tokens.tolist() for other in range(offset + 1, offset + 9)]
    assert any(tokens[:n] != piece.tokens[:n].tolist() for tokens in others)
