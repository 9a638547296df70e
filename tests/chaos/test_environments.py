"""Environments that fail, and what is kept of rollouts that failed in all of their attempts."""

import errno
import json
import signal

import pytest
from helpers import SilentDisplay, quick_compile  # noqa: F401
from invariants import FLAGS, check_run

from sao_jax.data.trajectory import load_trajectory
from sao_jax.runtime import quarantine as module
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.signals import Interrupted
from sao_jax.runtime.train import train

# A warm start after which actions are short, so that most attempts come to their second one.
STEADY = FLAGS | dict(warm_start_steps=60, warm_start_lr=0.02)
BAD = {5, 11, 17}  # the first in preheating


def train_on(folder, task, *, resume=False, **flags):
    display = SilentDisplay()
    flags = STEADY | dict(task=f"tiny:turns=2,every=6,{task}", max_attempts=2, rollouts=12) | flags
    train(RunConfig(**flags).resolved(), folder, display, resume=resume)
    return display.notes


def quarantined(folder):
    return {int(path.stem): json.loads(path.read_text()) for path in (folder / "quarantine").glob("*.json")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "since", "says"),
    [
        ("raise", 2, "broken on purpose"),
        ("nan", 1, "ValueError: reward nan"),
        ("hang", 2, "environment gave no answer within 0.3 s"),
    ],
)
def test_a_rollout_that_fails_in_all_attempts_is_quarantined(tmp_path, bad, since, says):
    folder = tmp_path / "run"
    flags = {"env_timeout": 0.3} if bad == "hang" else {}
    notes = train_on(folder, f"bad={bad},since={since}", **flags)
    record = check_run(folder)
    files = quarantined(folder)
    assert set(files) == BAD
    assert record.counts["trained"] == 20 - len(BAD)
    assert sum(says in note for note in notes) == 2 * len(BAD), "each failed attempt has its line"
    drops = [event.position for event in record.events if event.kind == "drop"]
    updates = [event.position for event in record.events if event.kind == "update"]
    counted = [line.get("async/dropped_failed", 0) for line in record.lines if line.get("stage") == "rl"]
    assert counted == [sum(drop < update for drop in drops) for update in updates]
    for rollout, file in files.items():
        assert (file["rollout"], file["index"], file["task"]) == (rollout, rollout, f"tiny/train/{rollout}")
        assert file["attempts"] == len(file["failures"]) == 2
        assert all(says in failure for failure in file["failures"])
        if since == 1:
            assert file["trajectory"] is None
            continue
        part = load_trajectory((folder / "quarantine" / file["trajectory"]).read_bytes())
        assert (part.rollout, part.num_steps, part.reason) == (rollout, 1, "snapshot")
        assert part.num_action_tokens < part.length - 3, "it ends with the answer to the first action"
    restarts = {p["rollout"]: [p["failure"]] for p in record.of_kind("restart")}
    assert restarts == {rollout: file["failures"][:1] for rollout, file in files.items()}


@pytest.mark.slow
def test_a_full_disk_delays_a_quarantine_and_ends_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    folder, flags = tmp_path / "run", dict(task="bad=raise")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_durably", full)
        notes = train_on(folder, **flags)
    assert not quarantined(folder)
    lost = [note for note in notes if "the ledger has its failures" in note]
    assert {int(note.split()[1]) for note in lost} == BAD
    assert all("No space left on device" in note for note in lost)
    train_on(folder, **flags, rollouts=16, resume=True)
    assert set(quarantined(folder)) == BAD | {23}
    assert all(len(file["failures"]) == 2 for file in quarantined(folder).values())
    check_run(folder)


@pytest.mark.slow
def test_attempts_that_ended_with_the_run_are_no_failures(tmp_path):
    """Twice the run is stopped while all of its attempts are under way; then those of odd rollouts fail."""
    folder, stops = tmp_path / "run", 0
    flags = dict(task="tiny:wait=0.5,bad=raise,every=2", rollouts=4, preheat_rollouts=0, preheat_epochs=None)
    config = RunConfig(**FLAGS | flags | dict(max_attempts=2)).resolved()

    def check():
        if stops < 2 and (folder / "metrics.jsonl").exists():
            with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
                if [rollout.attempt for rollout in ledger.running()] == [stops] * 4:
                    raise Interrupted(signal.SIGTERM)

    while stops < 2:
        with pytest.raises(Interrupted):
            train(config, folder, SilentDisplay(), resume=stops > 0, check=check)
        stops += 1
    train(config, folder, SilentDisplay(), resume=True, check=check)
    assert check_run(folder).counts["trained"] == 2
    files = quarantined(folder)
    assert {rollout: (file["attempts"], len(file["failures"])) for rollout, file in files.items()} == {
        1: (4, 2),
        3: (4, 2),
    }
