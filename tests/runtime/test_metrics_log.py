import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.runtime.loop_metrics import publish_latency
from sao_jax.runtime.metrics import MetricsLog, StageTimer, read_metrics


def without_time(lines):
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def test_every_value_becomes_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(
            np.int64(3),
            {
                "critic/explained_var": float("nan"),
                "actor/ratio_max": np.float32(np.inf),
                "actor/pg_loss": jnp.float32(0.5),
                "tokens": jnp.int32(7),
                "stale": np.array([1.0, -np.inf]),
                "by_task": {"sum": (1, np.nan)},
                "frozen": np.bool_(True),
                "note": "x",
            },
        )
        assert without_time(read_metrics(path)) == [  # already flushed
            {
                "step": 3,
                "critic/explained_var": None,
                "actor/ratio_max": None,
                "actor/pg_loss": 0.5,
                "tokens": 7,
                "stale": [1.0, None],
                "by_task": {"sum": [1, None]},
                "frozen": True,
                "note": "x",
            }
        ]
        with pytest.raises(ValueError, match="step"):
            log.write(4, {"step": 1})
    assert "NaN" not in path.read_text()


def test_lines_behind_the_restored_step_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.write(step, {"lr": 0.1 * step})
    with path.open("a") as file:
        file.write('{"step": 5, "lr": 0.')  # killed in the middle of a line
    first = read_metrics(path)
    assert [line["step"] for line in first] == [0, 1, 2, 3, 4]
    with MetricsLog(path, resume_step=2) as log:
        log.write(3, {"lr": -1.0})
    resumed = read_metrics(path)
    assert resumed[:3] == first[:3]
    assert without_time(resumed[3:]) == [{"step": 3, "lr": -1.0}]


def test_a_new_run_does_not_write_into_the_curves_of_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).close()
    with pytest.raises(ValueError, match="exists already"):
        MetricsLog(path)
    MetricsLog(tmp_path / "fresh.jsonl", resume_step=0).close()  # killed before its first line


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_metrics(path)


@given(st.lists(st.floats(width=32), min_size=1), st.integers(0, 100))
def test_a_file_cut_anywhere_gives_the_whole_lines_before(tmp_path_factory, values, percent):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step, value in enumerate(values):
            log.write(step, {"x": np.float32(value)})
    content = path.read_bytes()
    cut = len(content) * percent // 100
    whole = content[:cut].count(b"\n")
    path.write_bytes(content[:cut])
    expected = [None if not np.isfinite(v) else v for v in values[:whole]]
    assert [line["x"] for line in read_metrics(path)] == expected


def test_tensorboard_files_or_a_clear_message(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="needs pip install -e '.[tensorboard]'")
    with MetricsLog(tmp_path / "a.jsonl", tensorboard=tmp_path / "board") as log:
        log.write(0, {"loss": 1.0, "missing": float("nan"), "list": [1.0]})
    assert list((tmp_path / "board").glob("events.*"))
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'sao_jax\[tensorboard\]'"):
        MetricsLog(tmp_path / "b.jsonl", tensorboard=tmp_path / "board")
    assert not (tmp_path / "b.jsonl").exists()


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


def test_stages_by_hand():
    clock = Clock()
    timer = StageTimer(clock)
    clock.now += 1  # other
    with timer("rollout"):
        clock.now += 2
        with timer("env"):  # pauses the rollout
            clock.now += 4
        clock.now += 8
        timer.switch("wait")
        clock.now += 16
    clock.now += 32  # other
    assert timer.read() == {
        "timing_s/other": 33.0,
        "timing_s/rollout": 10.0,
        "timing_s/env": 4.0,
        "timing_s/wait": 16.0,
    }
    clock.now += 1
    assert timer.read() == {"timing_s/other": 1.0}


def test_a_stage_ends_with_an_error():
    clock = Clock()
    timer = StageTimer(clock)

    def fails():
        with timer("rollout"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    clock.now += 2
    assert timer.read() == {"timing_s/other": 2.0, "timing_s/rollout": 1.0}


@given(st.lists(st.tuples(st.sampled_from("abr"), st.integers(0, 9))))
def test_stages_add_up_to_the_time_passed(moves):
    clock = Clock()
    timer = StageTimer(clock)
    total = 0.0
    for name, seconds in moves:
        if name == "r":
            total += sum(timer.read().values())
        else:
            timer.switch(name)
        clock.now += seconds
    total += sum(timer.read().values())
    assert total == clock.now - 10.0


def test_lines_are_valid_for_strict_readers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"x": [float("inf")], "y": {"z": float("-inf")}})

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(path.read_text(), parse_constant=refuse)


def test_evaluations_of_updates_that_are_durable_outlive_a_rewind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step, stage in ((1, "rl"), (2, "rl"), (2, "eval"), (3, "rl"), (4, "rl"), (4, "eval"), (6, "eval")):
            log.write(step, {"stage": stage})
    MetricsLog(path, resume_step=1, durable_step=4).close()
    assert [(x["step"], x["stage"]) for x in read_metrics(path)] == [(1, "rl"), (2, "eval"), (4, "eval")]


def test_the_time_to_publication_is_told_with_its_late_end():
    assert publish_latency([float(x) for x in range(101)]) == {
        "async/publish_latency_s": 50.0,
        "async/publish_latency_p99_s": 99.0,
    }
    assert publish_latency([]) == {}, "nothing was published"
