"""The trace file, and what is written into it."""

import json

import jax.numpy as jnp

from sao_jax.runtime.metrics import StageTimer
from sao_jax.runtime.trace import Trace
from sao_jax.runtime.utilization import DeviceWatch


def read(path):
    """As its readers do: the closing bracket may be missing."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_events_have_their_rows_and_microseconds(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace.add("burst", "device 0", 1.0, 1.5, live=0.25)
    trace.add("collect", "host loop", 1.25, 1.75)
    first, burst, second, collect = read(tmp_path / "trace.json")  # before it is closed
    trace.close()
    trace.add("late", "device 0", 2.0, 3.0)
    assert first == {"name": "thread_name", "ph": "M", "tid": 0, "args": {"name": "device 0"}, "pid": first["pid"]}
    assert (burst["ph"], burst["ts"], burst["dur"], burst["tid"], burst["args"]) == ("X", 1e6, 5e5, 0, {"live": 0.25})
    assert (second["args"], collect["tid"]) == ({"name": "host loop"}, 1)
    assert len(read(tmp_path / "trace.json")) == 4


def test_stages_of_the_host_add_up_in_the_trace(tmp_path):
    now = [0.0]
    trace = Trace(tmp_path / "trace.json")
    timer = StageTimer(lambda: now[0], trace)
    for stage, seconds in (("collect", 1.0), ("store", 2.0), ("learn", 0.5)):
        timer.switch(stage)
        now[0] += seconds
    timer.switch("other")
    trace.close()
    found = {e["name"]: e["dur"] / 1e6 for e in read(tmp_path / "trace.json") if e["ph"] == "X"}
    assert found == {"collect": 1.0, "store": 2.0, "learn": 0.5}
    assert timer.read() == {"timing_s/other": 0.0, **{f"timing_s/{k}": v for k, v in found.items()}}


def test_calls_of_devices_are_rows_without_overlap(tmp_path):
    now = [10.0]
    trace = Trace(tmp_path / "trace.json")
    watch = DeviceWatch(2, lambda: now[0], trace)
    watch.enqueued(4.0, jnp.zeros(1), [1.0, 0.5], "gradient")
    watch.enqueued(5.0, jnp.zeros(1), 1.0, "policy step")
    watch.close()
    trace.close()
    events = [e for e in read(tmp_path / "trace.json") if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["tid"] == 0] == [
        ("gradient", 4e6, 6e6), ("policy step", 10e6, 0.0),
    ]  # fmt: skip
    assert [e["args"]["live"] for e in events] == [1.0, 0.5, 1.0, 1.0]
