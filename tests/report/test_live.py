"""The view of a run that is going on."""

import io
import json
import os

import pytest
from rich.console import Console

from sao_jax.report.live import is_alive, read_status, status_view

STATUS = {
    "time": 1000.0, "pid": os.getpid(), "version": 7, "updates": 7, "waiting": 3, "restarts": 0, "utilization": 0.913,
    "utilization_slots": 0.5, "queue_age_s": 0.2, "room": 40, "concurrency": 32, "reason": "on target",
    "engines": [{"name": "w0", "pid": 41, "version": 6, "slots": 8, "running": 5, "heard_s": 0.5, "latency_s": 1.25,
                 "failures": 0}, {"name": "w1", "pid": 42, "version": None, "slots": 8, "running": 0, "heard_s": 2.0,
                                  "latency_s": None, "failures": 2}],
}  # fmt: skip
COUNTS = {"running": 5, "finished": 3, "trained": 120, "dropped": 1, "handed_out": 129}


def show(folder, now, status=None):
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    console = Console(file=io.StringIO(), width=120)
    console.print(status_view(folder, COUNTS, [(17, "task\x1b[2J/3", 1, 940.0)], now))
    return console.file.getvalue()


def test_it_shows_who_does_what_and_how_old_it_is(tmp_path):
    text = show(tmp_path, 1001.5, STATUS)
    for part in ("(running)", "129 handed out", "version 7, 3 finished trajectories wait", "busy 91.3%, by slots 50.0%",
                 "32 (on target), room for 40", "5 of 8", "1.2 s", "2.0 s ago", "1:02"):  # fmt: skip
        assert part in text, part
    assert "\x1b" not in text, "a task's name steers no terminal"


@pytest.mark.parametrize(
    ("told", "row"),
    [(dict(stage="warm start", since=880.0, done=9, total=600, unit="steps"), "warm start, 9 of 600 steps, for 2:00"),
     (dict(stage="compiling", since=940.0, done=0, total=1, unit=""), "compiling, for 1:00")],
)  # fmt: skip
def test_before_the_loop_it_shows_the_stage(tmp_path, told, row):
    early = {k: STATUS[k] for k in ("time", "pid", "version", "engines")}
    text = show(tmp_path, 1000.0, early | told)
    for part in ("(running)", row, "version 7", "5 of 8"):
        assert part in text, part
    for part in ("busy 91.3%", "finished trajectories wait", "silent"):
        assert part not in text, part
    assert "(running)" in show(tmp_path, 1060.0, early | told), "a compiler is silent for minutes"
    assert "silent for 1:00" in show(tmp_path, 1060.0, STATUS | told | {"stage": "RL"})
    gone = show(tmp_path, 2000.0, early | told | {"pid": 2**22 + 1})
    assert "(ended)" in gone
    assert row in gone, "it did so until it ended"


def test_rollouts_in_quarantine_are_counted(tmp_path):
    assert "in quarantine/" not in show(tmp_path, 1001.5, STATUS)
    (tmp_path / "quarantine").mkdir()
    for name in ("3.json", "3.safetensors", "17.json"):
        (tmp_path / "quarantine" / name).touch()
    assert "1 dropped, 129 handed out (2 in quarantine/)" in show(tmp_path, 1001.5, STATUS)


@pytest.mark.parametrize(
    ("change", "now", "state"),
    [({}, 1060.0, "silent for 1:00"), ({"pid": 2**22 + 1}, 1001.0, "(ended)")],
)
def test_a_run_that_is_silent_or_gone_is_called_so(tmp_path, change, now, state):
    assert state in show(tmp_path, now, STATUS | change)


def test_a_run_without_a_status_is_no_error(tmp_path):
    assert read_status(tmp_path) is None
    assert "no status yet" in show(tmp_path, 0.0)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"time": "x"}', json.dumps(STATUS | {"engines": 3})])
def test_a_damaged_status_is_called_so(tmp_path, content):
    (tmp_path / "status.json").write_text(content)
    assert "129 handed out; its status.json is damaged" in " ".join(show(tmp_path, 0.0).split())


def test_a_process_is_alive_or_not():
    assert is_alive({"pid": os.getpid()})
    assert is_alive({"pid": 1}), "another user's process"
    assert not is_alive({"pid": 2**22 + 1})
    assert not is_alive({})
