import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.data.protocols import TOKEN_BUDGET, TURN_LIMIT, Outcome
from sao_jax.data.trajectory import NoActionError, save_trajectory
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.calculator import Calculator, Problem
from sao_jax.rollout.episode import Episode

TOKENIZER = Calculator.tokenizer


class Script(TaskFamily):
    """Answers turn i with script[i]: an Outcome to return or an exception to raise."""

    name, stop, max_tokens, max_turns = "script", ">]", 64, 100
    tokenizer = TOKENIZER

    def __init__(self, *script, prompt="1+1?"):
        self.script, self.text = script, prompt

    def sample(self, rng):
        return rng.random()

    def prompt(self, problem):
        if isinstance(self.text, Exception):
            raise self.text
        return self.text

    def respond(self, problem, actions):
        answer = self.script[len(actions) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def episode_of(family, context=64, **kwargs) -> Episode:
    return Episode(family, family.instance("train", 0), context=context, **kwargs)


def say(episode, text, done="stop", version=0):
    """One whole action, then the answer."""
    ids = episode._family.tokenizer.encode(text)
    assert episode.feed(ids, [-0.5] * len(ids), [version] * len(ids), done).text == text
    return episode.advance()


def text_of(ids) -> str:
    return TOKENIZER.decode(ids)


def calculator_episode(**kwargs) -> Episode:
    family = Calculator()
    instance = dataclasses.replace(family.instance("train", 0), problem=Problem("a*(b+c)-d", (7, 12, 5, 9)))
    return Episode(family, instance, **({"context": 64} | kwargs))


def test_an_attempt_from_prompt_to_reward():
    episode = calculator_episode(rollout=5, attempt=1, group=2, sample=3, seed=4, temperature=0.5)
    prompt = episode.begin()
    assert text_of(prompt) == "7*(12+5)-9?"
    assert episode.max_new == 64 - 11
    # An action in pieces, with a new version in the middle.
    call = TOKENIZER.encode("<12+5>")
    assert episode.feed(call[:2], [-0.1, -0.2], [7, 7]) is None
    action = episode.feed(call[2:], [-0.3] * 4, [8] * 4, "stop")
    assert (action.text, action.done, action.tokens.tolist()) == ("<12+5>", "stop", call)
    step = episode.advance()
    assert (text_of(step.tokens), step.max_new, step.end) == ("=17;", 64 - 11 - 6 - 4, None)
    say(episode, "<7*17>", version=8)
    say(episode, "<119-9>", version=9)
    step = say(episode, "[110]", version=9)
    assert (step.tokens.tolist(), step.max_new, step.end) == ([], 0, "terminated")
    t = episode.finish()
    assert text_of(t.tokens) == "7*(12+5)-9?<12+5>=17;<7*17>=119;<119-9>=110;[110]"
    assert text_of(t.tokens[t.action_mask]) == "<12+5><7*17><119-9>[110]"
    assert (t.total_reward, t.rewards[-1], t.end, t.reason) == (1.0, 1.0, "terminated", "answer")
    assert t.reward_parts == {"answer": 1.0}
    assert (t.oldest_version, t.version.max()) == (7, 9)
    assert t.step_ids.max() == 3
    assert (t.rollout, t.attempt, t.group, t.sample, t.seed, t.temperature) == (5, 1, 2, 3, 4, 0.5)
    assert t.task == "calculator/train/0"
    assert 0 <= t.timings["environment_s"] <= t.timings["episode_s"]


def test_a_reward_that_comes_with_an_observation_sits_on_the_action():
    episode = episode_of(Script(Outcome("=1;", reward=0.5, end="terminated")))
    episode.begin()
    say(episode, "<1>")
    t = episode.finish()
    assert text_of(t.tokens) == "1+1?<1>=1;"
    np.testing.assert_array_equal(np.flatnonzero(t.rewards), [6])


class TestBudget:
    def test_it_is_that_of_the_whole_trajectory_and_the_smaller_of_two(self):
        assert episode_of(Script(), context=20).budget == 20
        assert episode_of(Script(), context=500).budget == 64

    def test_using_it_up_terminates_with_the_reward_of_what_was_written(self):
        episode = episode_of(Script(Outcome("=1;", reward=0.25)), context=8)
        episode.begin()
        assert episode.max_new == 4
        step = say(episode, "<111", done="length")
        assert (step.max_new, step.end) == (0, "terminated")
        t = episode.finish()
        assert (t.reason, t.total_reward, t.length) == (TOKEN_BUDGET, 0.25, 8)

    def test_it_shrinks_from_action_to_action_and_is_not_refreshed(self):
        episode = episode_of(Script(*[Outcome("=1;")] * 9), context=4 + 3 * 6 + 2)
        episode.begin()
        room = [episode.max_new] + [say(episode, "<1>", version=v).max_new for v in range(3)]
        assert room == [20, 14, 8, 2]
        assert say(episode, "<1", done="length").end == "terminated"
        assert episode.finish().length == 24

    def test_sampling_beyond_it_is_an_error(self):
        episode = episode_of(Script(), context=6)
        episode.begin()
        with pytest.raises(ValueError, match="3 sampled tokens exceed the 2 left of 6"):
            episode.feed([1, 1, 1], [-1] * 3, [0] * 3)

    @pytest.mark.parametrize(("context", "stored"), [(12, False), (13, True)])
    def test_an_answer_that_leaves_no_room_ends_the_attempt(self, context, stored):
        """Prompt 4, action 3, answer 6: with 12 it does not fit, with 13 nothing could follow."""
        episode = episode_of(Script(Outcome("=1111;", reward=1.0)), context=context)
        episode.begin()
        step = say(episode, "<1>")
        assert step.end == "terminated"
        t = episode.finish()
        assert (t.reason, t.total_reward, t.length) == (TOKEN_BUDGET, 1.0, 13 if stored else 7)

    def test_the_end_of_the_task_counts_more_than_the_end_of_the_budget(self):
        episode = episode_of(Script(Outcome(reward=1.0, end="terminated", reason="answer")), context=7)
        episode.begin()
        say(episode, "[2]", done="stop")
        assert episode.finish().reason == "answer"

    def test_a_prompt_without_room_for_an_action_aborts(self):
        episode = episode_of(Script(), context=4)
        assert episode.begin() is None
        assert (episode.end, episode.reason) == ("aborted", "prompt of 4 tokens in a budget of 4")


@pytest.mark.parametrize(("bootstrap", "end"), [(False, "terminated"), (True, "truncated")])
def test_limits_of_the_task_terminate_or_bootstrap(bootstrap, end):
    by_budget = episode_of(Script(Outcome("=1;")), context=8, limit_bootstrap=bootstrap)
    by_budget.begin()
    say(by_budget, "<111", done="length")
    assert (by_budget.end, by_budget.reason) == (end, TOKEN_BUDGET)
    by_turns = calculator_episode(limit_bootstrap=bootstrap)
    by_turns.begin()
    while by_turns.end is None:
        say(by_turns, "<1+1>")
    assert (by_turns.end, by_turns.reason) == (end, TURN_LIMIT)
    by_answer = calculator_episode(limit_bootstrap=bootstrap)
    by_answer.begin()
    say(by_answer, "[1]")
    assert by_answer.end == "terminated"


def test_being_cut_by_us_truncates():
    episode = calculator_episode()
    episode.begin()
    say(episode, "<12+5>")
    episode.feed([1, 2], [-0.1, -0.1], [0, 0])
    episode.cut("pre-empted")
    t = episode.finish()
    assert (t.end, t.reason, text_of(t.tokens[-2:])) == ("truncated", "pre-empted", "01")


class TestFailures:
    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (RuntimeError("sandbox died"), "environment: RuntimeError: sandbox died"),
            (KeyError("x"), "environment: KeyError: 'x'"),
            (Outcome("=1;", reward=float("nan")), "reward nan"),
            (Outcome("=1;", reward=float("inf")), "reward inf"),
            (Outcome("=1;", reward=1e39), "reward 1e[+]39"),
            (Outcome("=1;", parts={"p": float("nan")}), "not finite"),
            (Outcome("=x;"), "'x' in '=x;' is not in the alphabet"),
            (Outcome(end="done"), "end is 'done'"),
        ],
    )
    def test_a_failing_environment_aborts_the_attempt_and_only_that(self, answer, reason):
        episode = episode_of(Script(Outcome("=1;", reward=1.0), answer))
        episode.begin()
        say(episode, "<1>")
        step = say(episode, "<2>")
        assert (step.end, step.max_new, step.tokens.tolist()) == ("aborted", 0, [])
        t = episode.finish()
        assert t.end == "aborted"
        assert re.search(reason, t.reason)
        assert text_of(t.tokens) == "1+1?<1>=1;<2>"

    def test_an_environment_that_cannot_start_has_no_trajectory(self):
        episode = episode_of(Script(prompt=OSError("no image")))
        assert episode.begin() is None
        assert (episode.end, episode.reason) == ("aborted", "environment: OSError: no image")
        with pytest.raises(NoActionError, match="no image"):
            episode.finish()

    def test_an_environment_may_abort_itself(self):
        episode = episode_of(Script(Outcome(end="aborted", reason="lost connection")))
        episode.begin()
        say(episode, "<1>")
        assert (episode.end, episode.reason) == ("aborted", "lost connection")

    def test_an_attempt_without_a_sampled_token_has_no_trajectory(self):
        episode = calculator_episode()
        episode.begin()
        episode.cut("pre-empted")
        with pytest.raises(NoActionError):
            episode.finish()

    def test_an_interrupt_is_not_taken_for_a_failed_environment(self):
        class Interrupted(Script):
            def respond(self, problem, actions):
                raise KeyboardInterrupt

        episode = episode_of(Interrupted())
        episode.begin()
        with pytest.raises(KeyboardInterrupt):
            say(episode, "<1>")

    def test_calls_out_of_order_are_refused(self):
        episode = calculator_episode()
        with pytest.raises(RuntimeError, match="expects no tokens"):
            episode.feed([1], [-1], [0])
        episode.begin()
        with pytest.raises(RuntimeError, match="feed one first"):
            episode.advance()
        with pytest.raises(RuntimeError, match="has not ended"):
            episode.finish()
        with pytest.raises(ValueError, match="allowed: '', 'stop', 'length'"):
            episode.feed([1], [-1], [0], "eos")
        episode.feed([1], [-1], [0], "stop")
        with pytest.raises(RuntimeError, match="expects no tokens"):
            episode.feed([1], [-1], [0])


def test_text_is_never_encoded_back():
    """Turn 1 is sampled as `ab` `c`; the same text would encode as `abc`. The ids stay."""

    class Merging:
        vocab_size, pad_id = 5, 0
        words = ("", "ab", "c", "abc", "d")

        def encode(self, text):
            return [3] if text == "abc" else [self.words.index(text)]

        def decode(self, ids):
            return "".join(self.words[i] for i in ids)

    class Words(Script):
        tokenizer = Merging()

    family = Words(Outcome("d"), Outcome(end="terminated"), prompt="d")
    episode = episode_of(family)
    episode.begin()
    action = episode.feed([1, 2], [-0.1, -0.2], [0, 0], "stop")
    assert action.text == "abc"
    assert family.tokenizer.encode(action.text) == [3]
    episode.advance()
    assert episode.tokens.tolist() == [4, 1, 2, 4]


def test_a_snapshot_resumes_where_it_was_taken_with_the_budget_that_was_left():
    whole = calculator_episode(rollout=1)
    whole.begin()
    say(whole, "<12+5>")
    snapshot = whole.snapshot()
    resumed = calculator_episode(rollout=1)
    np.testing.assert_array_equal(resumed.resume(snapshot), whole.tokens)
    assert (resumed.max_new, resumed.turns) == (whole.max_new, 1)
    for episode in (whole, resumed):
        say(episode, "<7*17>")
        say(episode, "<119-9>")
        say(episode, "[110]")
    first, second = (dataclasses.replace(e.finish(), timings={}) for e in (whole, resumed))
    assert first.total_reward == 1
    assert save_trajectory(first) == save_trajectory(second)


def test_no_snapshot_within_an_action():
    episode = calculator_episode()
    episode.begin()
    episode.feed([1], [-1], [0])
    with pytest.raises(RuntimeError, match="between actions"):
        episode.snapshot()


@hypothesis.given(st.data(), st.integers(12, 64))
def test_whatever_is_sampled_the_record_is_whole_and_within_the_budget(data, context):
    episode = calculator_episode(context=context)
    episode.begin()
    sampled, room = [], episode.max_new
    stops = set(TOKENIZER.encode(">]"))
    while episode.end is None:
        ids = []
        while len(ids) < room and not (ids and ids[-1] in stops):
            ids.append(data.draw(st.integers(0, TOKENIZER.vocab_size - 1)))
        episode.feed(ids, [-1.0] * len(ids), [0] * len(ids), "stop" if ids[-1] in stops else "length")
        sampled += ids
        room = episode.advance().max_new
    t = episode.finish()
    assert t.length <= context
    assert t.tokens[t.action_mask].tolist() == sampled
    assert t.end == "terminated"
    assert t.total_reward in (0, 1)
    assert not np.any(t.rewards[~t.action_mask])
