"""Attempts and their environments on a sampler that only keeps the books."""

import threading

import numpy as np
import pytest
from helpers import Tiny

from sao_jax.data.protocols import Outcome
from sao_jax.data.trajectory import Trajectory
from sao_jax.rollout.agents import Agents, Failure
from sao_jax.rollout.engine import Piece


class ScriptedEngine:
    """Writes `text` for every request, `burst` tokens a dispatch; slots are counted like the engine's."""

    def __init__(self, family, text="a;", slots=2, burst=8):
        self.ids, self.slots, self.burst, self.version = family.tokenizer.encode(text), slots, burst, 0
        self.rows, self.pieces, self.log = {}, [], []

    @property
    def free(self):
        return self.slots - len(self.rows)

    def submit(self, request):
        assert self.free > 0, "more attempts than slots"
        assert request.rollout not in self.rows
        self.log.append(("submit", request.rollout, request.attempt, request.temperature))
        self.rows[request.rollout] = list(self.ids)[: request.max_new]

    def extend(self, rollout, tokens, max_new):
        assert not self.rows[rollout]
        self.log.append(("extend", rollout, len(tokens)))
        self.rows[rollout] = list(self.ids)[:max_new]

    def release(self, rollout):
        del self.rows[rollout]

    def dispatch(self):
        live = [rollout for rollout, left in self.rows.items() if left]
        for rollout in live:
            now, self.rows[rollout] = self.rows[rollout][: self.burst], self.rows[rollout][self.burst :]
            done = "" if self.rows[rollout] else "stop" if now[-1] == self.ids[-1] else "length"
            n = len(now)
            self.pieces.append(Piece(rollout, np.array(now), np.full(n, -0.5), np.full(n, self.version), done))
        return bool(live)

    def collect(self):
        pieces, self.pieces = self.pieces, []
        return pieces


def run(agents, turns=400):
    ended = []
    for _ in range(turns):
        if not agents.running:
            return ended
        agents.dispatch()
        ended += agents.collect()
    raise AssertionError(f"{agents.running} attempts never ended")


def start(agents, family, rollout, **labels):
    agents.start("train", rollout, rollout=rollout, **labels)


@pytest.mark.parametrize("wait", [0.0, 0.01], ids=["same thread", "workers"])
def test_attempts_run_to_their_end_and_free_their_slots(wait):
    family = Tiny(turns=2, wait=wait)
    engine = ScriptedEngine(family)
    agents = Agents(engine, family, context=10)
    start(agents, family, 0, group=3, sample=1, seed=5, temperature=0.7)
    start(agents, family, 1, attempt=2)
    assert agents.running == 2
    assert agents.free == 0
    ended = sorted(run(agents), key=lambda t: t.rollout)
    assert (agents.running, agents.free, agents.oldest_versions()) == (0, 2, [])
    first, second = ended
    assert family.tokenizer.decode(first.tokens)[3:] == "a;-a;"
    assert first.total_reward == 1.0
    assert (first.group, first.sample, first.seed, first.temperature, first.task) == (3, 1, 5, 0.7, "tiny/train/0")
    assert second.attempt == 2
    assert {("submit", 0, 0, 0.7), ("submit", 1, 2, 1.0)} <= set(engine.log)


def test_an_attempt_that_waits_for_its_prompt_has_a_slot_promised():
    gate = threading.Event()
    family = Tiny(wait=0.001)

    class Slow(type(family.environment())):
        def reset(self, instance):
            gate.wait(10)
            return super().reset(instance)

    family.environment = lambda: Slow(family)
    agents = Agents(ScriptedEngine(family), family, context=10)
    start(agents, family, 0)
    start(agents, family, 1)
    assert agents.free == 0
    assert not agents.dispatch()
    gate.set()
    assert len(run(agents)) == 2
    assert agents.free == 2


@pytest.mark.parametrize(("bad", "says"), [("raise", "broken on purpose"), ("nan", "not finite")])
@pytest.mark.parametrize("wait", [0.0, 0.001], ids=["same thread", "workers"])
def test_a_failing_environment_is_a_failure_of_its_attempt_only(bad, says, wait):
    family = Tiny(bad=bad, every=2, wait=wait)  # instance 1 misbehaves
    agents = Agents(ScriptedEngine(family), family, context=10)
    start(agents, family, 0)
    start(agents, family, 1, attempt=1)
    ended = {item.rollout: item for item in run(agents)}
    assert isinstance(ended[0], Trajectory)
    assert isinstance(ended[1], Failure)
    assert says in ended[1].reason
    assert ended[1].attempt == 1
    assert agents.free == 2


def test_a_hung_environment_is_given_up_and_its_thread_replaced():
    """One worker: attempts after the hung one would otherwise never be answered."""
    now = [0.0]
    hung = threading.Event()
    family = Tiny(wait=0.001)

    class Hangs(type(family.environment())):
        def step(self, action):
            if self._instance.index == 0:
                hung.set()
                threading.Event().wait(20)
            return super().step(action)

    family.environment = lambda: Hangs(family)
    agents = Agents(ScriptedEngine(family), family, context=10, env_workers=1, env_timeout=5.0, clock=lambda: now[0])
    start(agents, family, 0)
    while not hung.is_set():
        agents.dispatch()
        assert agents.collect() == []
    start(agents, family, 1)
    assert agents.collect() == []
    now[0] = 6.0
    ended = run(agents)
    assert [(type(item), item.rollout) for item in ended] == [(Failure, 0), (Trajectory, 1)]
    assert "no answer within 5 s" in ended[0].reason
    assert agents.free == 2


def test_the_answer_of_an_attempt_that_was_given_up_is_ignored():
    """The same rollout is tried again while the thread of its first attempt still works."""
    now, gate, hung = [0.0], threading.Event(), threading.Event()
    family = Tiny(wait=0.001)
    lives = []

    class Late(type(family.environment())):
        def reset(self, instance):
            lives.append(self)
            return super().reset(instance)

        def step(self, action):
            if self is lives[0]:
                hung.set()
                gate.wait(20)
                return Outcome(end="terminated", reward=-99.0)
            return super().step(action)

    family.environment = lambda: Late(family)
    agents = Agents(ScriptedEngine(family), family, context=10, env_workers=1, env_timeout=5.0, clock=lambda: now[0])
    start(agents, family, 0)
    while not hung.is_set():
        agents.dispatch()
        agents.collect()
    now[0] = 6.0
    (failure,) = run(agents)
    assert failure.attempt == 0
    gate.set()
    start(agents, family, 0, attempt=1)
    (again,) = run(agents)
    assert (again.attempt, again.total_reward) == (1, 1.0)


def test_the_oldest_version_is_that_of_the_first_token():
    family = Tiny(turns=2)
    engine = ScriptedEngine(family, burst=1)
    agents = Agents(engine, family, context=10)
    start(agents, family, 0)
    engine.version = 3
    agents.dispatch()
    agents.collect()
    engine.version = 4
    agents.dispatch()
    agents.collect()
    assert agents.oldest_versions() == [3]
    engine.version = 5
    (t,) = run(agents)
    assert t.version[t.action_mask].tolist() == [3, 4, 5, 5]
    assert t.oldest_version == 3


def test_stop_forgets_all_attempts_and_frees_their_slots():
    family = Tiny(turns=2)
    engine = ScriptedEngine(family, burst=1)
    agents = Agents(engine, family, context=10)
    start(agents, family, 0)
    start(agents, family, 1)
    agents.dispatch()
    agents.stop()
    assert agents.collect() == [], "what was under way belongs to nobody"
    assert (agents.running, agents.free) == (0, 2)
    start(agents, family, 2)
    assert [t.rollout for t in run(agents)] == [2]


def test_the_token_budget_is_that_of_the_context():
    family = Tiny(turns=5)
    agents = Agents(ScriptedEngine(family, text="aaaa;"), family, context=6)
    start(agents, family, 0)
    (t,) = run(agents)
    assert t.length <= 6
    assert (t.end, t.reason) == ("terminated", "token budget")
    bootstrapped = Agents(ScriptedEngine(family, text="aaaa;"), family, context=6, limit_bootstrap=True)
    start(bootstrapped, family, 0)
    (t,) = run(bootstrapped)
    assert t.end == "truncated"
