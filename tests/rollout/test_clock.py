import pytest
from helpers import Tiny
from test_agents import ScriptedEngine, run

from sao_jax.rollout.agents import Agents
from sao_jax.rollout.clock import Clock, never_backward


class Hand:
    """A real clock moved by hand."""

    now = 100.0

    def __call__(self):
        return self.now


def test_a_clock_without_its_jumps_backward_goes_on_from_where_it_was():
    hand = Hand()
    clock = never_backward(hand)
    for step, reads in ((0.0, 100.0), (2.0, 102.0), (-3600.0, 102.0), (1.5, 103.5), (-5.0, 103.5), (60.0, 163.5)):
        hand.now += step
        assert clock() == reads


def test_skipped_and_stopped_time():
    hand = Hand()
    clock = Clock(hand)
    hand.now += 2.0
    assert clock() == 2.0
    clock.skip_to(5.0)
    clock.skip_to(1.0)  # past: nothing to skip
    hand.now += 1.0
    assert clock() == 6.0
    with clock.stopped():
        hand.now += 50.0
        assert clock() == 6.0
        clock.skip_to(9.0)
        clock.skip_to(7.0)
        assert clock() == 9.0
    assert clock() == 9.0, "a wait that is skipped is paid, whenever"
    clock.restore(6.0)
    clock.restore(3.0)
    hand.now += 1.0
    assert clock() == 4.0


def test_waits_that_are_slept_pass_in_short_naps(monkeypatch):
    hand, naps = Hand(), []

    def sleep(seconds):
        naps.append(seconds)
        hand.now += seconds

    monkeypatch.setattr("time.sleep", sleep)
    clock = Clock(hand, sleeps=True)
    clock.skip_to(0.03)
    clock.skip_to(0.02)  # past
    clock.skip_to(7.0)
    assert naps == pytest.approx([0.03, 0.0, 0.05])
    assert clock() == pytest.approx(0.08)
    with clock.stopped():
        clock.skip_to(3.0)
        assert clock() == 3.0
    assert len(naps) == 3


def test_simulated_times_pass_on_the_clock_alone_and_order_the_answers():
    family, hand = Tiny(turns=2), Hand()
    clock = Clock(hand)
    seconds = {0: 30.0, 1: 10.0}
    agents = Agents(
        ScriptedEngine(family),
        family,
        context=10,
        clock=clock,
        simulated_seconds=lambda rollout, task: seconds[rollout],
    )
    for rollout in (0, 1):
        agents.start("train", rollout, rollout=rollout)
    ended = run(agents)
    assert [t.rollout for t in ended] == [1, 0]
    assert clock() == 60.0, "two actions of the slow attempt; the quick one's 20 s lie within"
    assert hand.now == 100.0


def test_slow_environments_have_times_of_their_own():
    family = Tiny(wait=0.1)
    with pytest.raises(ValueError, match="simulated environment times need a task that answers at once; tiny does not"):
        Agents(ScriptedEngine(family), family, context=10, simulated_seconds=lambda *_: 1.0)
