"""Whole RL runs on a tiny task, in this process."""

import collections
import re
import threading
import time

import numpy as np
import pytest
from helpers import MODEL_FLAGS, Record, SilentDisplay, Tiny, TinyEnvironment, quick_compile  # noqa: F401

from sao_jax.data.segments import load_segment
from sao_jax.data.storage import Location, TrajectoryStore
from sao_jax.report.live import read_status
from sao_jax.report.tokens import trajectory_html
from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.collector import DeadGroupsError
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.inspect import open_segments, read_trajectories
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.loop import Loop
from sao_jax.runtime.loop_metrics import spans
from sao_jax.runtime.metrics import read_metrics
from sao_jax.runtime.run import Run
from sao_jax.runtime.signals import Interrupted
from sao_jax.runtime.train import train

BASE = dict(
    **MODEL_FLAGS, task="tiny", rollouts=24, batch_size=4, slots=8, burst=4, warm_start_steps=0, eval_tasks=4,
    eval_every=0, checkpoint_every=3, devices=2, lr=1e-3,
)  # fmt: skip
CRITIC = dict(preheat_rollouts=0)
GROUPS = dict(preset="grpo", n_samples_per_prompt=2)


def run(folder, check=lambda: None, display=None, **flags):
    """Trains; returns (figures, record of the folder, notes)."""
    flags = BASE | (CRITIC if flags.get("preset") != "grpo" and "baseline" not in flags else {}) | flags
    display = display or SilentDisplay()
    figures = train(RunConfig(**flags).resolved(), folder, display, check=check)
    record = Record(folder)
    assert record.counts == figures["counts"]
    assert record.missing == []
    assert figures["recompilations"] == 0
    return figures, record, display.notes


def updates_of(record):
    return [line for line in record.lines if line.get("stage") == "rl"]


def test_every_rollout_is_trained_once_and_in_full_batches(tmp_path):
    figures, record, _ = run(tmp_path)
    assert record.counts == {"running": 0, "finished": 0, "trained": 24, "dropped": 0, "handed_out": 24}
    assert [len(batch) for batch in record.updates] == [4] * 6
    assert sorted(record.trained) == list(range(24))
    assert [p["version"] for p in record.of_kind("update")] == [1, 2, 3, 4, 5, 6]
    assert figures["version"] == 6
    status = read_status(tmp_path)
    assert (status["version"], status["waiting"], status["engines"][0]["running"]) == (6, 0, 0), (
        "not that of seconds ago"
    )
    # Versions are those of the weights that sampled: within a trajectory they never fall, and none is from the future.
    trained_at = dict(zip(record.trained, np.repeat(np.arange(6), 4), strict=True))
    for rollout, t in record.trajectories.items():
        versions = t.version[t.action_mask]
        assert np.all(np.diff(versions) >= 0)
        assert versions[-1] <= trained_at[rollout]


def test_a_run_says_what_it_is_doing_from_its_first_stage_on(tmp_path):
    told = []

    def look():
        status = read_status(tmp_path)
        if not told or told[-1]["stage"] != status["stage"]:
            told.append(status)

    flags = dict(warm_start_steps=2, demonstrations=4, warm_start_batch=4, preheat_rollouts=8, preheat_epochs=1)
    run(tmp_path, check=look, rollouts=8, **flags)
    assert [(status["stage"], status["total"]) for status in told] == [
        ("warm start", 2), ("compiling", 1), ("evaluation of version 0", None), ("preheating rollouts", 8),
        ("preheating the critic", 1), ("RL", 8), ("evaluation of version 2", None),
    ]  # fmt: skip
    assert all(status["engines"][0]["slots"] == 8 for status in told)
    assert [s["since"] for s in told] == sorted(s["since"] for s in told)
    status = read_status(tmp_path)
    assert (status["stage"], status["version"], status["engines"][0]["running"]) == ("done", 2, 0)


def test_nothing_of_a_run_that_is_interrupted_stays_in_a_device_call(tmp_path):
    """A thread that is in one when Python ends is unwound through C++, which aborts."""
    display = SilentDisplay()

    def check():
        if display.compiling:
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        run(tmp_path, check=check, display=display)
    assert "device watch" not in [thread.name for thread in threading.enumerate()]


def test_metrics_of_a_run_are_those_of_its_trajectories(tmp_path):
    _, record, _ = run(tmp_path, task="tiny:turns=2", max_staleness=0)
    lines = updates_of(record)
    assert len(lines) == 6
    assert [line["rollouts"] for line in lines] == [4, 8, 12, 16, 20, 24]
    for line, batch in zip(lines, record.updates, strict=True):
        members = [record.trajectories[r] for r in batch]
        assert line["reward/mean"] == pytest.approx(np.mean([t.total_reward for t in members]))
        assert line["response_length/mean"] == pytest.approx(np.mean([t.num_action_tokens for t in members]))
        # All is on-policy: the sampler's log-probs are the trainer's.
        assert line["rollout_corr/logp_abs_diff"] < 1e-5
        assert line["actor/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert line["perf/recompilations"] == 0
        assert line["actor/skipped_windows"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_admission_keeps_the_staleness_bound(tmp_path, bound):
    _, record, _ = run(tmp_path, max_staleness=bound, rollouts=40)
    assert max(record.staleness) <= bound
    logged = [line["async/staleness_max"] for line in updates_of(record)]
    assert max(logged) == max(record.staleness)
    outstanding, most = 0, 0
    for event in record.events:
        outstanding += event.kind == "admit"
        most = max(most, outstanding)
        outstanding -= event.payload["rollouts"] if event.kind == "update" else 0
    assert most <= (bound + 1) * 4


def test_a_slow_environment_is_waited_for(tmp_path):
    _, record, _ = run(tmp_path, task="tiny:wait=0.3", rollouts=4, batch_size=2, eval_tasks=1)
    assert record.counts["trained"] == 4


def test_when_the_data_run_out_the_last_batch_is_smaller(tmp_path):
    figures, record, _ = run(tmp_path, rollouts=10)
    assert [len(batch) for batch in record.updates] == [4, 4, 2]
    assert record.counts["trained"] == 10
    assert figures["version"] == 3


@pytest.mark.slow
def test_slow_and_fast_tasks_are_trained_in_equal_shares(tmp_path):
    _, record, _ = run(tmp_path, task="tiny:slow=0.1", rollouts=48, env_workers=8)
    trained = record.trained
    share = np.mean([rollout % 2 for rollout in trained])
    assert share == 0.5
    # also before the end has levelled it out
    assert np.mean([rollout % 2 for rollout in trained[:32]]) > 0.25


@pytest.mark.slow
def test_versions_are_stamped_when_a_token_is_sampled(tmp_path):
    """With one slot per burst of one token, updates fall into the middle of attempts of two turns."""
    _, record, _ = run(tmp_path, task="tiny:turns=2", burst=1, rollouts=40, batch_size=1, max_staleness=7)
    several = [t for t in record.trajectories.values() if len(set(t.version[t.action_mask])) > 1]
    assert several, "no attempt saw a new version"
    for t in several:
        assert t.oldest_version == t.version[t.action_mask][0]
    assert max(record.staleness) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1])
def test_over_stale_drop_never_trains_what_is_too_old(tmp_path, bound):
    flags = dict(max_staleness=bound, over_stale="drop", rollouts=32, batch_size=2)
    _, record, _ = run(tmp_path, task="tiny:slow=0.15", **flags)
    assert max(record.staleness) <= bound
    assert record.counts["trained"] + record.counts["dropped"] == 32
    assert {reason for reason, _ in record.dropped} <= {"stale"}
    if record.counts["dropped"]:
        assert updates_of(record)[-1]["async/dropped_stale"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1])
def test_over_stale_wait_trains_all_and_nothing_too_old(tmp_path, bound):
    flags = dict(max_staleness=bound, over_stale="wait", rollouts=24, batch_size=2)
    _, record, _ = run(tmp_path, task="tiny:slow=0.15", check=_limit(300), **flags)
    assert record.counts["trained"] == 24
    assert max(record.staleness) <= bound


def _limit(seconds):
    """A check that fails a run which makes no progress."""
    end = time.monotonic() + seconds

    def check():
        assert time.monotonic() < end, f"no end within {seconds} s"

    return check


@pytest.mark.slow
@pytest.mark.parametrize("age", [1, 3])
def test_forced_staleness_is_reached_once_the_pipeline_is_full(tmp_path, age):
    _, record, _ = run(tmp_path, forced_staleness=age, rollouts=48)
    settled = record.staleness[(age + 1) * 4 : -(age + 1) * 4]
    assert settled
    assert min(settled) >= age
    assert record.counts["trained"] == 48


@pytest.mark.slow
def test_forced_to_0_every_token_is_of_the_newest_weights(tmp_path):
    _, record, _ = run(tmp_path, forced_staleness=0, rollouts=24)
    assert record.counts["trained"] == len(record.staleness) == 24
    assert set(record.staleness) == {0}


@pytest.mark.slow
def test_turns_that_find_nothing_old_enough_write_nothing(tmp_path, monkeypatch):
    digest, written = Loop._digest, []

    def watched(loop, ended, *, idle):
        held, before = loop._collector.held + len(loop._ready), loop.run.ledger.last_position()
        todo = digest(loop, ended, idle=idle)
        if held and not ended and not todo and not loop.finishing:
            written.append(loop.run.ledger.last_position() - before)
        return todo

    monkeypatch.setattr(Loop, "_digest", watched)
    run(tmp_path, forced_staleness=3, rollouts=48, task="tiny:turns=4")
    assert written
    assert not any(written), "a commit waits for the disk"


@pytest.mark.slow
def test_weights_are_published_every_so_many_updates(tmp_path):
    _, record, _ = run(tmp_path, publish_every=3, rollouts=32)
    published = [p["version"] for p in record.of_kind("publish")]
    assert set(published) == {0, 3, 6}
    sampled = {int(v) for t in record.trajectories.values() for v in t.version[t.action_mask]}
    assert sampled <= {0, 3, 6}


def test_a_batch_may_be_a_single_trajectory(tmp_path):
    figures, record, _ = run(tmp_path, batch_size=1, rollouts=6)
    assert [len(batch) for batch in record.updates] == [1] * 6
    assert figures["version"] == 6


@pytest.mark.slow
def test_critic_only_updates_leave_policy_and_version(tmp_path):
    figures, record, _ = run(tmp_path, num_critic_only_steps=2)
    assert [p["critic_only"] for p in record.of_kind("update")] == [True, True, False, False, False, False]
    assert [p["version"] for p in record.of_kind("update")] == [0, 0, 1, 2, 3, 4]
    assert figures["version"] == 4
    assert [line["stage"] for line in record.lines if "stage" in line].count("critic_only") == 2


@pytest.mark.slow
def test_a_critic_may_step_on_every_arrival(tmp_path):
    figures, record, _ = run(tmp_path, critic_update="arrival", rollouts=8)
    assert figures["version"] == 2
    assert "accumulate" not in {event.kind for event in record.events}


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_are_trained_with_their_own_advantages(tmp_path):
    _, record, _ = run(tmp_path, **GROUPS, drop_dead_groups=False)
    assert record.counts["trained"] == 24
    for event in record.of_kind("arrive"):
        rollout = event["rollout"]
        pair = [record.trajectories[r].total_reward for r in (rollout // 2 * 2, rollout // 2 * 2 + 1)]
        expected = (pair[rollout % 2] - np.mean(pair)) / (np.std(pair) + 1e-6)
        assert event["advantage"] == pytest.approx(expected, abs=1e-5)
        assert record.trajectories[rollout].group == rollout // 2
        assert record.trajectories[rollout].task == f"tiny/train/{rollout // 2}"


def test_dead_groups_are_dropped_and_counted(tmp_path):
    _, record, notes = run(tmp_path, **GROUPS)
    rewards = collections.defaultdict(list)
    for r, t in record.trajectories.items():
        rewards[r // 2].append(t.total_reward)
    dead = sum(2 for pair in rewards.values() if pair[0] == pair[1])
    assert dead, "nothing to drop"
    assert record.counts["dropped"] == dead
    assert record.counts["trained"] == 24 - dead
    assert {reason for reason, _ in record.dropped} == {"dead group"}
    start = "dropped since the update before: "
    told = [re.fullmatch(r"(\d+) \(dead group: (.*)\)", n[len(start) :]) for n in notes if n.startswith(start)]
    assert sum(int(line[1]) for line in told) == dead
    ends = [span.split("-") for line in told for span in line[2].split(", ")]
    named = {rollout for span in ends for rollout in range(int(span[0]), int(span[-1]) + 1)}
    assert named == {r.id for r in record.rollouts if rewards[r.id // 2][0] == rewards[r.id // 2][1]}


def test_numbers_are_told_in_spans():
    assert spans([9, 3, 4, 5, 11, 10, 7]) == "3-5, 7, 9-11"
    assert spans([2]) == "2"


def test_a_task_without_any_difference_ends_with_a_message(tmp_path):
    with pytest.raises(DeadGroupsError, match="4 groups in a row had equal rewards"):
        run(tmp_path, **GROUPS, task="tiny:reward=0", max_dead_groups=3, rollouts=1000)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["batch_mean", "running_mean"])
def test_other_baselines_use_all(tmp_path, baseline):
    _, record, _ = run(tmp_path, baseline=baseline, rollouts=12)
    assert record.counts["trained"] == 12


# -- failing environments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(rollouts=400), "50 rollouts in a row failed in all of their attempts; the last: .*broken on purpose"),
        (dict(rollouts=12), "all 12 rollouts failed; the last: .*broken on purpose"),
        (dict(rollouts=12, preheat_rollouts=6), "no trajectory to preheat the critic on"),
    ],
)
def test_an_environment_that_always_fails_ends_the_run(tmp_path, flags, says):
    with pytest.raises(ValueError, match=says):
        run(tmp_path, task="tiny:bad=raise,every=1", max_attempts=2, **flags)


def test_an_evaluation_in_which_every_attempt_fails_is_an_error(tmp_path, monkeypatch):
    def broken(self, action):
        if self._instance.split == "test" and self._instance.index >= first:
            raise RuntimeError("no sandbox")
        return step(self, action)

    step, first = TinyEnvironment.step, 2
    monkeypatch.setattr(TinyEnvironment, "step", broken)
    figures, record, notes = run(tmp_path / "some", rollouts=4)
    assert (figures["n"], figures["failed"]) == (4, 2)
    assert {line["eval/failed"] for line in record.lines if line.get("stage") == "eval"} == {2}
    assert any("4 instances, 2 failed" in note for note in notes)
    first = 0
    with pytest.raises(ValueError, match=r"all 4 instances .* failed in 3 attempts each; the last: .*no sandbox"):
        run(tmp_path / "all", rollouts=4)


def test_an_instance_of_an_evaluation_whose_attempt_fails_is_tried_again(tmp_path, monkeypatch):
    def broken_once(self, action):
        if self._instance.split == "test" and self._instance.index not in seen:
            seen.add(self._instance.index)
            raise RuntimeError("no sandbox")
        return step(self, action)

    step, seen = TinyEnvironment.step, set()
    monkeypatch.setattr(TinyEnvironment, "step", broken_once)
    figures, _, _ = run(tmp_path, rollouts=4)
    assert seen == {0, 1, 2, 3}
    assert (figures["n"], figures["failed"]) == (4, 0)


def test_the_line_of_an_update_is_written_before_the_checkpoint_that_holds_it(tmp_path, monkeypatch):
    def look(self, **meta):
        if meta["stage"] == "rl":
            lines = read_metrics(tmp_path / "metrics.jsonl")
            seen.append((self.learner.version, lines[-1]["version"]))
        return save(self, **meta)

    save, seen = Run.save, []
    monkeypatch.setattr(Run, "save", look)
    run(tmp_path, rollouts=12, checkpoint_every=1)
    assert len(seen) > 1
    assert all(version == written for version, written in seen)


def test_a_prompt_that_leaves_no_room_is_dropped_with_its_reason(tmp_path, monkeypatch):
    """Such prompts may come after those that are looked at before the run."""
    monkeypatch.setattr("sao_jax.runtime.run.LOOKED_AT", 1)
    prompt, spared = Tiny.prompt, Tiny().instance("train", 0).problem % 3

    def long_or_short(self, problem):
        return prompt(self, problem) if problem % 3 == spared else "a" * 9 + "?"

    monkeypatch.setattr(Tiny, "prompt", long_or_short)
    _, record, notes = run(tmp_path, rollouts=16)
    assert {reason for reason, _ in record.dropped} == {"failed"}
    assert record.counts["trained"] + record.counts["dropped"] == 16
    assert any("prompt of 10 tokens in a budget of 10" in note for note in notes)


@pytest.mark.slow
def test_a_group_does_not_wait_for_a_member_that_failed(tmp_path):
    """Of group 2 every attempt fails, of the others none."""
    flags = GROUPS | dict(n_samples_per_prompt=4, drop_dead_groups=False, batch_size=8)
    _, record, _ = run(tmp_path, **flags, task="tiny:bad=raise,every=3", max_attempts=1, rollouts=24)
    assert record.dropped == {("failed", "tiny/train/2"): 4, ("failed", "tiny/train/5"): 4}
    assert record.counts["trained"] == 24 - 8


# -- stages before RL --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_preheating_rollouts_come_on_top_and_are_reported(tmp_path):
    figures, record, _ = run(tmp_path, preheat_rollouts=10, preheat_epochs=2, rollouts=8)
    assert record.counts["handed_out"] == 18
    assert sorted(record.of_kind("preheat")[0]["rollouts"]) == list(range(10))
    assert sorted(record.trained) == list(range(10, 18))
    assert {line["preheat/rollouts"] for line in record.lines if line.get("stage") == "preheat"} == {10}
    assert figures["version"] == 2


@pytest.mark.slow
def test_a_critic_may_be_preheated_on_another_run(tmp_path):
    run(tmp_path / "first", rollouts=12)
    _, record, _ = run(tmp_path / "second", preheat_rollouts=None, preheat_from=str(tmp_path / "first"), rollouts=4)
    assert record.counts["handed_out"] == 4
    assert record.of_kind("preheat") == [{"rollouts": [], "from": str(tmp_path / "first")}]
    assert {line["preheat/rollouts"] for line in record.lines if line.get("stage") == "preheat"} == {12}


@pytest.mark.slow
def test_a_run_may_start_from_the_policy_of_another(tmp_path):
    run(tmp_path / "first", rollouts=8)
    run(tmp_path / "second", init_from=str(tmp_path / "first"), rollouts=4, warm_start_steps=600, seed=1)
    with Checkpoints(tmp_path / "first/checkpoints") as first, Checkpoints(tmp_path / "second/checkpoints") as second:
        assert first.read_meta(first.newest())["version"] == 2
        assert second.read_meta(second.newest())["version"] == 1
    with pytest.raises(ValueError, match="another model: dim 16, not 32"):
        run(tmp_path / "third", init_from=str(tmp_path / "first"), warm_start_steps=600, dim=32)
    assert not (tmp_path / "third").exists()


def test_an_error_in_the_loop_ends_the_run(tmp_path):
    calls, display = [], SilentDisplay()

    def check():
        if not display.compiling:
            calls.append(0)
        if len(calls) == 12:
            raise ZeroDivisionError("injected")

    with pytest.raises(ZeroDivisionError, match="injected"):
        run(tmp_path, check=check, display=display, rollouts=400)
    # What it had recorded is consistent, and the folder is free for a resume.
    record = Record(tmp_path)
    assert record.counts["handed_out"] == sum(record.counts[k] for k in ("running", "finished", "trained", "dropped"))


# ---- other methods, other clocks


@pytest.mark.parametrize(
    "flags",
    [
        dict(baseline="spo", train_tasks=3),
        dict(preset="grpo", n_samples_per_prompt=2, drop_dead_groups=False, policy_loss="gspo", band="0.9,1.1"),
        dict(baseline="running_mean", policy_loss="a3po", band="0.8,1.2"),
        dict(baseline="batch_mean", outside="mask", sequence_kl=0.1),
        dict(gae_over="tokens", task="tiny:turns=2", critic_targets="dis"),
    ],
    ids=["spo", "gspo", "a3po", "sequence mask", "all tokens"],
)
def test_neighbours_train_on_everything_they_are_given(tmp_path, flags):
    _, record, _ = run(tmp_path, **flags)
    assert record.counts["trained"] == 24
    assert all(np.isfinite(line["actor/pg_loss"]) for line in updates_of(record))
    if "train_tasks" in flags:
        assert len({t.task for t in record.trajectories.values()}) == 3


def test_spo_knows_of_the_newest_update_also_after_a_stop(tmp_path):
    """Each batch's advantages are taken at the KL of all updates before it, summed; a resume goes on from there."""

    def check():
        with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
            if len(list(ledger.events(kinds=("update",)))) >= 3:
                raise Interrupted(15)

    flags = dict(baseline="spo", train_tasks=3, lr=3e-2, kl_target=10.0, max_staleness=0)
    config = RunConfig(**BASE | flags).resolved()
    with pytest.raises(Interrupted):
        train(config, tmp_path, SilentDisplay(), check=check)
    train(config, tmp_path, SilentDisplay(), resume=True)
    record = Record(tmp_path)
    lines = updates_of(record)
    moved = [line["actor/kl_after"] / (1 + line["async/staleness_mean"]) for line in lines]
    assert min(moved[:2]) > 1e-3, "or the test could not fail"
    known = [payload["drift"] for payload in record.of_kind("update")]
    assert known == pytest.approx([sum(moved[:k]) for k in range(len(moved))], rel=1e-4)


def test_simulated_environment_times_are_paid_on_the_clock_and_not_slept_through(tmp_path):
    figures, record, _ = run(tmp_path, env_seconds=20.0, env_sigma=0.0, max_staleness=0, rollouts=12)
    lines = updates_of(record)
    # With staleness 0 three batches follow one another, and each waits for its environments.
    assert 60.0 <= lines[-1]["clock_s"] < 60.0 + figures["seconds"]
    assert figures["seconds"] < 60.0
    # From its end a trajectory waits for compute alone.
    assert all(line["async/publish_latency_s"] < 20.0 for line in lines if "async/publish_latency_s" in line)
    assert all(line["async/queue_age_s"] < 20.0 for line in lines)


def test_an_evaluation_goes_on_when_all_slots_wait_for_simulated_environments(tmp_path):
    figures, record, _ = run(
        tmp_path, env_seconds=50.0, env_sigma=1.0, eval_every=1, task="tiny:turns=2", slots=2, batch_size=2, rollouts=8
    )
    assert record.counts["trained"] == 8
    assert figures["seconds"] < 200.0


def test_trajectories_are_read_back_as_the_newest_weights_see_them(tmp_path):
    _, record, _ = run(tmp_path, task="tiny:turns=2,reward=1", lr=0.0, critic_lr=1e-2, lambd=1.0)
    read = read_trajectories(tmp_path, count=3)
    assert len(read) == 3
    known = {(t.task, t.total_reward, t.length): t for t in record.trajectories.values()}
    for r in read:
        t, mask = known[r["task"], r["reward"], len(r["texts"])], r["action_mask"]
        np.testing.assert_array_equal(mask, t.action_mask)
        np.testing.assert_allclose(r["weight"][mask], 1.0, atol=1e-4)  # the policy has not moved
        # Without discount and with lambda 1 in one segment an advantage is the return less the value.
        np.testing.assert_allclose(r["advantage"][mask], r["reward"] - r["value"][mask], atol=1e-5)
        assert np.abs(r["value"][mask]).max() > 0
        page = trajectory_html(r)
        assert page.count("<span") == 3 * len(mask)
        assert page.count("title=") == 3 * mask.sum()
    without = run(tmp_path / "given", baseline="running_mean")
    assert np.isnan(read_trajectories(tmp_path / "given", count=1)[0]["value"]).all(), without


# -- seams -------------------------------------------------------------------------------------------------------------


SEGMENTS = dict(task="tiny:turns=4", segment_steps=1, rollouts=32)


def failing_once(monkeypatch, *, at_turn, restorable=True):
    """The first attempt at every third training instance fails at an action; restoring fails if so wished."""
    failed = set()
    step, restore = TinyEnvironment.step, TinyEnvironment.restore

    def failing_step(self, action):
        instance = self._instance
        if instance.split == "train" and instance.index % 3 == 2 and instance.index not in failed:
            self.turn = getattr(self, "turn", 0) + 1
            if self.turn == at_turn:
                failed.add(instance.index)
                raise RuntimeError("broken once")
        return step(self, action)

    def failing_restore(self, instance, actions):
        if actions and not restorable:
            raise RuntimeError("cannot be restored")
        restore(self, instance, actions)

    monkeypatch.setattr(TinyEnvironment, "step", failing_step)
    monkeypatch.setattr(TinyEnvironment, "restore", failing_restore)


def test_an_attempt_goes_on_from_its_last_stored_segment(tmp_path, monkeypatch):
    failing_once(monkeypatch, at_turn=2)
    _, record, _ = run(tmp_path, **SEGMENTS)
    assert record.counts["trained"] == 32
    resumed = 0
    with TrajectoryStore(tmp_path / "trajectories") as store:
        for event in record.of_kind("segment"):
            part = load_segment(store.read(Location(**event["location"])))
            whole = record.trajectories[event["rollout"]]
            if whole.attempt == 0 or event["attempt"] > 0:
                continue
            # What the failed attempt had stored is the beginning of what was trained, log-probs and versions included.
            resumed += 1
            for name in ("tokens", "rollout_logp", "version", "action_mask"):
                ours = getattr(whole, name)[part.first_token : part.end_token]
                np.testing.assert_array_equal(ours, getattr(part, name))
    assert resumed > 0
    # Each token is stored once: every step is a segment, whichever attempt it is of.
    for rollout, whole in record.trajectories.items():
        reader = open_segments(tmp_path, rollout)
        assert [s.index for s in reader] == list(range(whole.num_steps))
        np.testing.assert_array_equal(reader.columns(0, whole.length)["tokens"], whole.tokens)


def test_an_attempt_that_cannot_be_restored_starts_over(tmp_path, monkeypatch):
    failing_once(monkeypatch, at_turn=2, restorable=False)
    _, record, notes = run(tmp_path, **SEGMENTS)
    assert record.counts["trained"] == 32
    started_over = [t for t in record.trajectories.values() if t.attempt == 2]
    assert started_over
    assert any("cannot be restored" in line for line in notes)
