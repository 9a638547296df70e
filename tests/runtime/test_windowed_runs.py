"""Runs whose attempts are longer than a row: trained, stopped, resumed, replayed and sampled again."""

import numpy as np
import pytest
from helpers import SilentDisplay, Tiny, quick_compile  # noqa: F401
from test_loop import run, updates_of
from test_replay import FLAGS as REPLAY_FLAGS
from test_replay import NO_CRITIC, run_with_stops

from sao_jax.data.windows import most_windows, windows_of
from sao_jax.envs import registry
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.inspect import read_trajectories
from sao_jax.runtime.replay import replay
from sao_jax.runtime.run import family_and_context

WINDOW, BUDGET = 16, 64


class LongTiny(Tiny):
    """Up to twelve actions, the answers of two characters."""

    name, max_tokens = "long-tiny", BUDGET

    def __init__(self):
        super().__init__(turns=12)

    def respond(self, problem, actions):
        outcome = super().respond(problem, actions)
        return outcome if outcome.end else type(outcome)(observation="-?")


if "long-tiny" not in registry.names():
    registry.register("long-tiny", LongTiny)

FLAGS = dict(
    REPLAY_FLAGS, task="long-tiny", context_window=WINDOW, rollouts=24, batch_size=4, eval_tasks=2, eval_every=0,
    segment_steps=3, checkpoint_every=2, max_staleness=0,
)  # fmt: skip


@pytest.mark.slow
def test_attempts_longer_than_the_window_are_trained_once_with_the_sampler_s_context(tmp_path):
    flags = FLAGS | dict(preheat_rollouts=8, rollouts=8, seed=1)
    _, record, _ = run(tmp_path, **flags)
    lengths = {rollout: t.length for rollout, t in record.trajectories.items()}
    assert max(lengths.values()) > 2 * WINDOW
    for t in record.trajectories.values():
        windows = windows_of(t.action_mask, t.step_ids, t.windows, WINDOW)
        assert [w.position for w in windows[1:]] == [position for position, *_ in t.windows]
        assert len(windows) <= most_windows(BUDGET, WINDOW)
    lines = updates_of(record)
    assert len(lines) == 2
    assert max(line["response_length/windows"] for line in lines) > 2
    for line in lines:  # all is on-policy: the sampler's log-probs are the trainer's, in every window
        assert line["rollout_corr/logp_abs_diff"] < 1e-5
        assert line["perf/recompilations"] == 0
    shown = read_trajectories(tmp_path, 4)
    for entry, rollout in zip(shown, record.trained[-4:], strict=False):
        assert len(entry["value"]) == len(entry["weight"]) == len(entry["texts"])
        assert np.all(np.isfinite(entry["value"]))
        assert lengths[rollout] > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    dict(segments="carried", max_staleness=1),
    dict(critic_update="arrival"),
    dict(NO_CRITIC, baseline="running_mean", segment_steps=100),
], ids=lambda flags: next(iter(flags)))  # fmt: skip
def test_a_stopped_run_with_windows_is_replayed_and_sampled_again(tmp_path, flags):
    record, stopped = run_with_stops(tmp_path / "run", (25, 25), **(FLAGS | flags))
    assert stopped
    assert record.counts["running"] == record.counts["finished"] == 0
    assert len(set(record.trained)) == len(record.trained) == 24
    assert any(len(t.windows) > 1 for t in record.trajectories.values())
    figures = replay(tmp_path / "run", tmp_path / "replay", SilentDisplay(), resample=True)
    assert figures["identical"], figures
    assert figures["tokens_differing"] == figures["tokens_missing"] == 0
    assert figures["tokens_compared"] > 300


@pytest.mark.slow
def test_rows_shorter_than_what_the_sampler_saw_are_trained(tmp_path):
    flags = FLAGS | dict(context_window=None, row_tokens=WINDOW, preheat_rollouts=8, rollouts=8)
    _, record, _ = run(tmp_path, **flags)
    assert all(t.windows == () for t in record.trajectories.values())
    assert any(t.length > WINDOW for t in record.trajectories.values())
    # The policy sees less than the sampler did, which the importance ratios know of.
    assert max(line["rollout_corr/logp_abs_diff"] for line in updates_of(record)) > 1e-3


@pytest.mark.parametrize(("flags", "says"), [
    (dict(context_window=112), "--context-window 112 has no effect here; trajectories have at most 112 tokens"),
    (dict(row_tokens=200), "--row-tokens 200 has no effect here"),
    (dict(context_window=7), "--context-window is 7; it must be at least 8"),
    (dict(context_window=32, row_tokens=32), "--row-tokens has no effect here; it needs whole contexts"),
    (dict(context_window=32, policy_loss="gspo"), "--policy-loss gspo needs whole trajectories in a row"),
    (dict(row_tokens=32, sequence_kl=0.1), "--sequence-kl needs whole trajectories in a row; --row-tokens cuts them"),
    (dict(row_tokens=32, gae_over="tokens"), "--gae-over tokens needs whole trajectories"),
    (dict(row_tokens=32, critic_targets="dis", outside="mask_sign"), "--outside mask_sign needs whole trajectories"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        family_and_context(RunConfig(task="calculator:level=3", **flags).resolved())
