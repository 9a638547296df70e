"""What has to hold after any fault, and how runs are started and ended by force.

Random moments come from the seed SAO_CHAOS_SEED (0 unless set), and there are SAO_CHAOS_KILLS of them: 5 unless set, 20
and more for the long form, such as

    SAO_CHAOS_KILLS=25 SAO_CHAOS_SEED=7 python -m pytest tests/chaos/test_kills.py
"""

import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

from helpers import MODEL_FLAGS, Record, SilentDisplay, cache_folder, compilation_environment

from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.replay import replay

SEED = int(os.environ.get("SAO_CHAOS_SEED", "0"))
KILLS = int(os.environ.get("SAO_CHAOS_KILLS", "5"))
ROOT = pathlib.Path(__file__).parents[2]
# By its file, so that other processes find it. A part of each attempt is stored after its first action.
TASK = f"{ROOT}/tests/helpers.py:Tiny:turns=2"
FLAGS = dict(
    **MODEL_FLAGS, task=TASK, rollouts=48, batch_size=4, slots=8, burst=4, segment_steps=1, warm_start_steps=3,
    demonstrations=20, warm_start_batch=8, preheat_rollouts=8, preheat_epochs=2, eval_tasks=4, eval_every=0,
    checkpoint_every=2, devices=1, lr=1e-3,
)  # fmt: skip


def check_record(folder: pathlib.Path) -> Record:
    """What holds at every moment: the ledger's identity, whole trajectories, and nothing twice."""
    record = Record(folder)
    told = {kind: [p["rollout"] for p in record.of_kind(kind)] for kind in ("admit", "finish", "arrive", "drop")}
    told["train"] = [rollout for p in record.of_kind("train") for rollout in p["rollouts"]]
    for kind, rollouts in told.items():
        assert len(set(rollouts)) == len(rollouts), f"some rollouts have two {kind} events: {sorted(rollouts)}"
    assert told["admit"] == list(range(record.counts["handed_out"]))
    assert not set(told["train"]) & set(told["drop"])
    assert set(told["arrive"]) <= set(told["finish"])
    return record


def check_run(folder: pathlib.Path, *, resample: bool = False) -> Record:
    """What holds when a run has ended, whatever happened on the way: every rollout that was handed out has been trained
    or dropped, once; losses are finite; and the events, replayed, give the parameters of the last checkpoint."""
    record = check_record(folder)
    counts = record.counts
    assert counts["running"] == counts["finished"] == 0
    assert counts["trained"] + counts["dropped"] == counts["handed_out"]
    updates = [line for line in record.lines if line.get("stage") in ("rl", "critic_only")]
    versions = [payload["version"] for payload in record.of_kind("update")]
    assert [line["version"] for line in updates] == versions == list(range(1, len(versions) + 1))
    for line in updates:
        for name in ("actor/pg_loss", "actor/ppo_kl", "critic/vf_loss"):
            assert line[name] is not None, f"{name} of update {line['version']} is not finite"
            assert math.isfinite(line[name])
    failed = {p["rollout"] for p in record.of_kind("drop") if p["reason"] == "failed"}
    assert {int(path.stem) for path in (folder / "quarantine").glob("*.json")} == failed
    figures = replay(folder, folder.with_name(f"{folder.name}-replayed"), SilentDisplay(), resample=resample)
    assert figures["identical"], figures
    assert figures["version"] == versions[-1]
    if resample:
        assert figures["tokens_compared"] > 0
        assert figures["tokens_differing"] == figures["tokens_missing"] == 0
    return record


def last_position(folder: pathlib.Path) -> int:
    """Of a run that may be going on; 0 before it has a ledger."""
    return _ask(folder, Ledger.last_position)


def last_version(folder: pathlib.Path) -> int:
    """The same of the newest version that rollouts were trained into."""
    return _ask(folder, Ledger.last_version)


def attempts_under_way(folder: pathlib.Path) -> int:
    """The same of attempts that have begun and not ended."""
    return _ask(folder, lambda ledger: ledger.counts()["running"])


def _ask(folder: pathlib.Path, question: Callable[[Ledger], int]) -> int:
    try:
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            return question(ledger)
    except LedgerError:
        return 0


# -- processes ---------------------------------------------------------------------------------------------------------


def start_training(folder: pathlib.Path, request, **flags) -> subprocess.Popen:
    """Begins the run, or resumes it where it has begun; its output is added to `folder`.txt."""
    arguments = [item for name, value in flags.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    if (folder / "config.json").exists():
        arguments = ["--resume", str(folder)]
    else:
        arguments += ["--run-dir", str(folder)]
    environment = os.environ | compilation_environment(cache_folder(request.config)) | {"JAX_PLATFORMS": "cpu"}
    with folder.with_suffix(".txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.train", *arguments],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def output_of(folder: pathlib.Path) -> str:
    return folder.with_suffix(".txt").read_text()


def children(pid: int) -> list[int]:
    """Processes that a process has started and that have not ended."""
    found = {entry.name: _stat(int(entry.name)) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdecimal()}
    return [int(name) for name, (state, parent) in found.items() if parent == pid and state != "Z"]


def has_ended(pid: int) -> bool:
    return _stat(pid)[0] in ("", "Z", "X")  # a zombie has ended; whoever inherited it may never ask for its exit code


def _stat(pid: int) -> tuple[str, int]:
    """(state, parent), ("", 0) if there is no such process."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return fields[0], int(fields[1])
