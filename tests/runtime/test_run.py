"""What is checked before a run folder is made, and what is written into it."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import MODEL_FLAGS, SilentDisplay, Tiny, random_trajectory

from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.data.trajectory import save_trajectory
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.calculator import Calculator
from sao_jax.runtime import run as run_module
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.run import (
    check_sources,
    check_task,
    family_and_context,
    make_clock,
    on_task,
    open_run,
    read_config,
    same_vocabulary,
    simulated_seconds,
)
from sao_jax.runtime.train import train

FLAGS = dict(**MODEL_FLAGS, task="tiny", slots=8, devices=2)


def refused(folder, says, **flags):
    with pytest.raises(ValueError, match=says):
        train(RunConfig(**FLAGS | flags).resolved(), folder / "new" / "run", SilentDisplay())
    assert not (folder / "new").exists(), "a refused run left a folder"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(env_workers=2), "--env-workers has no effect here; it needs a task that is not fast, and 'tiny' is"),
        (dict(env_timeout=2.0), "--env-timeout has no effect here"),
        (dict(shard_params=True, devices=1), "--shard-params has no effect here; it needs more than one device"),
        (dict(remat="offload"), "remat offload .* backend cpu .* use none, block or dots"),
        (dict(max_tokens=3), "up to 3 tokens, so 3 leave no room for an action; --max-tokens must be at least 4"),
        (dict(max_tokens=4), "demonstration 0 of task 'tiny' needs more than 4 tokens|needs more than 4 tokens"),
        (dict(slots=7), "7 slots cannot be split"),
        (dict(clock="cpu"), "--clock cpu needs one CPU device"),
        (dict(freeze_critic="no/such"), "matches no parameter"),
        (dict(init_from="nowhere"), "--init-from nowhere: no such folder"),
        (dict(preheat_from="nowhere"), "--preheat-from nowhere: no such folder"),
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, flags, says):
    refused(tmp_path, says, **flags)


def test_a_clock_of_cpu_time_stands_still_while_other_work_has_the_core(monkeypatch):
    cpu = [5.0]
    monkeypatch.setattr("sao_jax.runtime.run.time.process_time", lambda: cpu[0])
    clock = make_clock(RunConfig(**FLAGS | dict(clock="cpu", devices=1)), data_mesh(1))
    assert clock() == 0
    cpu[0] += 0.25
    assert clock() == 0.25
    clock.skip_to(2.0)
    assert clock() == 2.0


def test_environment_times_are_drawn_by_seed_task_and_member_of_a_group():
    def seconds(rollout, task="t", **flags):
        flags = dict(baseline="grpo", n_samples_per_prompt=8, env_seconds=0.1) | flags
        return simulated_seconds(RunConfig(**flags).resolved(), rollout, task)

    group = [seconds(rollout) for rollout in range(8)]
    assert len(set(group)) == 8, "a group waits for its slowest member"
    assert seconds(8) == group[0] == seconds(5, baseline="batch_mean", n_samples_per_prompt=1)
    assert len({seconds(0), seconds(0, "u"), seconds(0, seed=1)}) == 3
    assert seconds(1 << 30) == 0.0, "evaluations cost nothing"
    times = np.array([seconds(i % 8, f"task {i // 8}") for i in range(4000)])
    assert np.median(times) == pytest.approx(0.1, rel=0.1)
    assert np.percentile(times, 99) / np.median(times) == pytest.approx(20, rel=0.25)
    assert {seconds(i, env_sigma=0.0) for i in range(8)} == {0.1}


def test_a_task_that_is_not_fast_has_workers():
    config = RunConfig(**FLAGS, env_workers=2, env_timeout=3.0).resolved()
    check_task(config, Tiny(wait=0.1), 10)


def test_the_least_number_of_tokens_is_named():
    longest = max(len(Calculator().instance("train", i).problem.template) for i in range(64)) + 1
    with pytest.raises(ValueError, match=f"--max-tokens must be at least {longest + 1}$"):
        check_task(RunConfig(), Calculator(), 5)
    family = Tiny()
    family.max_tokens = 3
    with pytest.raises(ValueError, match="the task's own max_tokens of 3 is too small"):
        check_task(RunConfig(), family, 3)


def test_a_task_without_an_expert_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(Tiny, "expert", TaskFamily.expert)
    with pytest.raises(ValueError, match=r"use --warm-start-steps 0 or --init-from"):
        check_task(RunConfig(), Tiny(), 10)
    check_task(RunConfig(warm_start_steps=0), Tiny(), 10)


# -- other runs to start from ------------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path):
    """A folder with the record of a run of one rollout, without a checkpoint."""
    folder = tmp_path / "other"
    folder.mkdir()
    write_config(folder)
    with Ledger(folder / "ledger.sqlite", create=True) as ledger, TrajectoryStore(folder / "trajectories") as store:
        import numpy as np

        ledger.admit(0, "tiny/train/0", 0, 0)
        ledger.finish(0, vars(store.append(save_trajectory(random_trajectory(np.random.default_rng(0))))), 1.0)
    return folder


def write_config(folder, **flags):
    (folder / "config.json").write_text(RunConfig(**FLAGS | flags).resolved().to_json())


def source_refused(says, context=10, **flags):
    with pytest.raises(ValueError, match=says):
        check_sources(RunConfig(**FLAGS | flags).resolved(), Tiny(), context)


def test_a_fitting_source_of_rollouts_is_accepted(other):
    check_sources(RunConfig(**FLAGS, preheat_from=str(other)).resolved(), Tiny(), 10)
    source_refused(r"--preheat-from .*: its rows have up to 10 tokens, this run's 8", 8, preheat_from=str(other))


@pytest.mark.parametrize("flag", ["init_from", "preheat_from"])
def test_a_source_that_does_not_fit_is_named(other, tmp_path, flag):
    name = "--" + flag.replace("_", "-")
    source_refused(f"{name} .*: not a run folder: it has no config.json", **{flag: str(tmp_path)})
    write_config(other, task="arithmetic")
    source_refused(f"{name} .*: its task arithmetic has another alphabet or vocabulary", **{flag: str(other)})
    (other / "config.json").write_text("{")
    source_refused(f"{name} .*: config.json is damaged", **{flag: str(other)})


def test_a_policy_must_have_the_same_model_and_a_checkpoint(other):
    source_refused("--init-from .*: it has no complete checkpoint", init_from=str(other))
    write_config(other, dim=32, layers=2)
    source_refused("it has another model: dim 32, not 16; num_layers 2, not 1", init_from=str(other))


def test_rollouts_must_be_there(other):
    (other / "ledger.sqlite").unlink()
    source_refused("not a run folder: it has no ledger.sqlite", preheat_from=str(other))
    Ledger(other / "ledger.sqlite", create=True).close()
    source_refused("it holds no finished trajectory", preheat_from=str(other))


def test_vocabularies_are_compared_by_what_ids_mean():
    assert same_vocabulary(CharTokenizer("abc"), CharTokenizer("abc"))
    assert not same_vocabulary(CharTokenizer("abc"), CharTokenizer("acb"))
    assert not same_vocabulary(CharTokenizer("abc"), CharTokenizer("abcd"))


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_are_written_whole_and_a_damaged_fingerprint_is_written_anew(tmp_path, monkeypatch, capsys):
    config = RunConfig(**FLAGS).resolved()
    open_run(config, tmp_path, resume=False).close()
    assert read_config(tmp_path) == config
    fingerprint = (tmp_path / "fingerprint.json").read_text()
    for damage in (fingerprint[:40], "[1]", "3", ""):
        (tmp_path / "fingerprint.json").write_text(damage)
        open_run(config, tmp_path, resume=True).close()
        said = capsys.readouterr().out
        assert "fingerprint.json is damaged" in said
        assert len(said.splitlines()) == 1
        assert json.loads((tmp_path / "fingerprint.json").read_text()) == json.loads(fingerprint)

    def full(path, text):
        raise OSError("disk full")

    monkeypatch.setattr(run_module, "write_durably", full)
    with pytest.raises(OSError, match="disk full"):
        open_run(dataclasses.replace(config, lr=1.0), tmp_path, resume=True)
    assert read_config(tmp_path) == config
    assert not list(tmp_path.glob("*.tmp"))


def test_a_task_whose_attempts_fit_the_context_is_evaluated_whole():
    config = RunConfig(task="proof:level=0,top=2", context_window=128).resolved()
    short, long = (on_task(config, f"proof:level={level}") for level in (1, 3))
    assert (short.context_window, long.context_window) == (None, 128)
    assert family_and_context(short)[1] <= 128 < family_and_context(long)[1]
    with pytest.raises(ValueError, match="calculator has another alphabet"):
        on_task(config, "calculator")
