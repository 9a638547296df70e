"""Runs that are stopped and resumed, and their replay from the record."""

import dataclasses
import random

import pytest
from helpers import (
    MODEL_FLAGS,
    Record,
    SilentDisplay,
    StopAt,
    quick_compile,  # noqa: F401
)

from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.replay import compare, replay
from sao_jax.runtime.run import read_config
from sao_jax.runtime.signals import Interrupted
from sao_jax.runtime.train import train

FLAGS = dict(
    **MODEL_FLAGS, task="tiny:turns=2", rollouts=48, batch_size=4, slots=8, burst=4, warm_start_steps=3,
    demonstrations=20, warm_start_batch=8, preheat_rollouts=10, preheat_epochs=2, eval_tasks=4, eval_every=4,
    checkpoint_every=3, devices=2, lr=1e-3,
)  # fmt: skip


NO_CRITIC = dict(preheat_rollouts=None, preheat_epochs=None)


def run_with_stops(folder, stops, **flags):
    """Trains, interrupted after each number of checks in `stops`; returns the record and how often it was."""
    config, stopped = RunConfig(**FLAGS | flags).resolved(), 0
    for n in (*stops, 10**9):
        resume, display = (folder / "config.json").exists(), SilentDisplay()
        try:
            train(config, folder, display, resume=resume, check=StopAt(n, display))
        except Interrupted:
            stopped += 1
        else:
            break
    return Record(folder), stopped


def newest_state(folder):
    """Arrays of the newest checkpoint, by path."""
    from orbax.checkpoint import v1 as ocp

    with Checkpoints(folder / "checkpoints") as checkpoints:
        newest = checkpoints.newest()
        return checkpoints.read_meta(newest), ocp.load(checkpoints.folder / str(newest))


def assert_whole(record, rollouts, preheat=10):
    """Every position of the stream was handed out once and trained once."""
    assert record.counts["running"] == record.counts["finished"] == 0
    assert record.counts["trained"] + record.counts["dropped"] == record.counts["handed_out"] == rollouts + preheat
    assert sorted(record.trained) == list(range(preheat, rollouts + preheat))
    assert record.of_kind("train")[0] == {"rollouts": record.of_kind("preheat")[0]["rollouts"], "version": 0}
    admitted = [payload["rollout"] for payload in record.of_kind("admit")]
    assert admitted == list(range(rollouts + preheat))


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run interrupted in preheating, and in RL right after it began, within a batch and in an evaluation."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    record, stopped = run_with_stops(folder, (12, 22, 30, 20, 20), rollouts=120)
    assert stopped >= 4
    return folder, record


@pytest.mark.slow
def test_a_run_that_was_stopped_loses_and_repeats_nothing(stopped_run):
    _, record = stopped_run
    assert_whole(record, rollouts=120)
    assert [payload["version"] for payload in record.of_kind("update")] == list(range(1, 31))
    assert record.of_kind("restart"), "no attempt was under way at a stop"


@pytest.mark.slow
def test_a_run_stopped_while_it_preheats_goes_on_with_the_clock_it_had(tmp_path):
    config, display = RunConfig(**FLAGS | dict(rollouts=4)).resolved(), SilentDisplay()
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", display, check=StopAt(12, display))
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert not list(ledger.events(kinds=("preheat",))), "it was stopped too late for this test"
        ledger.record("clock", {"clock_s": 1000.0})
    record, _ = run_with_stops(tmp_path / "run", (), rollouts=4)
    assert len(record.of_kind("clock")) > 1
    assert all(1000.0 < update["clock_s"] < 2000.0 for update in record.of_kind("update"))


@pytest.mark.slow
def test_replay_of_a_stopped_run_has_the_same_bits(stopped_run, tmp_path):
    folder, _ = stopped_run
    figures = replay(folder, tmp_path / "replay", SilentDisplay(), resample=True)
    assert figures["identical"], figures
    assert figures["largest_difference"] == 0
    assert figures["version"] == 30
    assert figures["tokens_differing"] == figures["tokens_missing"] == 0
    assert figures["tokens_compared"] > 100


@pytest.mark.slow
def test_a_replay_that_was_stopped_ends_like_one_that_was_not(stopped_run, tmp_path):
    folder, _ = stopped_run
    generator = random.Random(0)
    stops = 0
    while True:
        try:
            display = SilentDisplay()
            figures = replay(folder, tmp_path / "replay", display, check=StopAt(generator.randint(100, 300), display))
            break
        except Interrupted:
            stops += 1
            assert stops < 40
    assert stops >= 2
    assert figures["identical"], figures
    meta, state = newest_state(tmp_path / "replay")
    recorded_meta, recorded = newest_state(folder)
    assert compare(state, recorded)["identical"]
    assert meta["position"] == recorded_meta["position"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    dict(kv_after_swap="recompute", burst=1, batch_size=2, rollouts=24),
    dict(critic_update="arrival", max_staleness=4, rollouts=24),
    dict(NO_CRITIC, baseline="grpo", n_samples_per_prompt=2, kl="penalty", rollouts=24),
    dict(NO_CRITIC, baseline="running_mean", rollouts=24),
    dict(whiten="batch", over_stale="wait", rollouts=24),
    dict(num_critic_only_steps=2, publish_every=2, forced_staleness=1, rollouts=24),
    dict(segment_steps=1, rollouts=24),
], ids=lambda flags: next(iter(flags)))  # fmt: skip
def test_replay_finds_every_token_and_number_again(tmp_path, flags):
    record, _ = run_with_stops(tmp_path / "run", (30, 12), **flags)
    assert record.counts["running"] == record.counts["finished"] == 0
    assert len(set(record.trained)) == len(record.trained)
    in_segments = sum(isinstance(rollout.location, list) for rollout in record.rollouts)
    assert (in_segments > 0) == ("segment_steps" in flags)
    figures = replay(tmp_path / "run", tmp_path / "replay", SilentDisplay(), resample=True)
    assert figures["identical"], figures
    assert figures["tokens_compared"] > 0


@pytest.mark.slow
def test_what_there_is_of_an_unfinished_run_can_be_replayed(tmp_path):
    config, display = (
        RunConfig(**FLAGS | dict(rollouts=400, eval_every=1, checkpoint_every=1)).resolved(),
        SilentDisplay(),
    )
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", display, check=StopAt(70, display))
    assert len(Record(tmp_path / "run").of_kind("update")) >= 2
    figures = replay(tmp_path / "run", tmp_path / "replay", SilentDisplay(), resample=True)
    assert figures["identical"], figures
    assert figures["tokens_compared"] > 50


@pytest.mark.slow
def test_training_data_are_a_prefix_of_the_stream_whether_stopped_or_not(tmp_path):
    """One slot: attempts follow one another, so the order is that of the stream."""
    flags = dict(slots=2, max_staleness=0, batch_size=3, rollouts=12, preheat_rollouts=0, preheat_epochs=None)
    flags |= dict(task="tiny", devices=1)
    straight, _ = run_with_stops(tmp_path / "straight", (), **flags)
    stopped, count = run_with_stops(tmp_path / "stopped", (26,), **flags)
    assert count == 1
    for record in (straight, stopped):
        assert [sorted(batch) for batch in record.updates] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_data(stopped_run):
    folder, _ = stopped_run
    config = dataclasses.replace(read_config(folder), task="tiny:turns=1")
    train_other = dataclasses.replace(config, task="arithmetic")
    with pytest.raises(ValueError, match=r"was made with data task=tiny:turns=2.*the present data is task=arithmetic"):
        train(train_other, folder, SilentDisplay(), resume=True)
    with pytest.raises(ValueError, match="was made with data"):
        train(config, folder, SilentDisplay(), resume=True)
    assert read_config(folder).task == "tiny:turns=2", "the record was changed by an attempt that was refused"


def test_replay_needs_a_run_and_a_folder_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        replay(tmp_path, tmp_path / "replay", SilentDisplay())
    (tmp_path / "config.json").write_text(RunConfig(**FLAGS).resolved().to_json())
    with pytest.raises(ValueError, match="the run itself"):
        replay(tmp_path, tmp_path / ".", SilentDisplay())
    with pytest.raises(ValueError, match="no complete checkpoint"):
        replay(tmp_path, tmp_path / "replay", SilentDisplay())
    assert not (tmp_path / "replay").exists()
