"""Disks that are full, and checkpoints that are damaged."""

import logging
import os
import resource
import shutil
import signal
import time

import pytest
from helpers import SilentDisplay, quick_compile  # noqa: F401
from invariants import FLAGS, TASK, check_record, check_run, last_version, output_of

from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.signals import Interrupted
from sao_jax.runtime.train import train

# A state much larger than the ledger is in the time of the test, so that the limit on file sizes meets checkpoints.
LARGE = dict(dim=160, heads=4, head_dim=32, mlp_dim=1024)
LIMIT = 2 << 20


@pytest.mark.slow
def test_a_checkpoint_that_finds_no_space_ends_the_run_and_a_resume_goes_on(tmp_path, training):
    folder = tmp_path / "run"
    flags = FLAGS | LARGE | dict(task=f"{TASK},wait=0.05", rollouts=60)
    process = training(folder, **flags)
    deadline = time.monotonic() + 240
    with Checkpoints(folder / "checkpoints") as checkpoints:
        while process.poll() is None and len(checkpoints.steps()) < 3:
            assert time.monotonic() < deadline, output_of(folder)[-3000:]
            time.sleep(0.02)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
        assert process.wait(120) == 2, output_of(folder)[-3000:]
        # The one that is ours among what the writer's threads print.
        (line,) = [line for line in output_of(folder).splitlines() if line.startswith("error: ")]
        assert "was not saved" in line
        assert "File too large" in line
        assert checkpoints.newest() is not None, "older checkpoints stay"
    check_record(folder)
    process = training(folder, **flags)
    assert process.wait(240) == 0, output_of(folder)[-3000:]
    assert check_run(folder).counts["trained"] == 68


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in RL, with several checkpoints."""
    folder = tmp_path_factory.mktemp("stopped") / "run"

    def check():
        if last_version(folder) >= 5:
            raise Interrupted(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(RunConfig(**FLAGS).resolved(), folder, SilentDisplay(), check=check)
    assert 5 <= len(check_record(folder).of_kind("update")) < 12
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "count"), [(cut, 1), (flip, 1), (flip, 99)], ids=["cut", "flipped", "all-flipped"])
def test_a_damaged_checkpoint_is_named_and_training_goes_on_from_an_older_one(tmp_path, stopped, caplog, damage, count):
    """Without any that is whole it starts from the beginning, and every durable event is applied again."""
    folder, display = tmp_path / "run", SilentDisplay()
    shutil.copytree(stopped, folder)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
    assert len(steps) == 3
    for step in steps[-count:]:
        damage(max((folder / "checkpoints" / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size))
    before = check_record(folder)
    with caplog.at_level(logging.WARNING):
        train(RunConfig(**FLAGS).resolved(), folder, display, resume=True)
    for step in steps[-count:]:
        skipped = [m for m in caplog.messages if f"checkpoint {step} in" in m and "is skipped: file " in m]
        assert skipped, caplog.messages
        assert skipped[0].endswith("is damaged")
    resumed = [note for note in display.notes if "resumed at version" in note]
    assert len(resumed) == (count < len(steps))
    record = check_run(folder)
    assert record.updates[: len(before.updates)] == before.updates
    assert record.counts["trained"] == 56
