"""Where readings of devices come from."""

import math
import sys
import types

import pytest

from sao_jax.runtime import devices, telemetry
from sao_jax.runtime.router import Reading


def test_a_recording_is_played_by_its_times(tmp_path):
    path = tmp_path / "devices.jsonl"
    path.write_text('{"time": 1, "devices": [[60, 0.5], [61, 0.4]]}\n{"time": 3, "devices": [[70, 0.2], [71, 0.1]]}\n')
    read = telemetry.recorded_source(path)
    assert all(math.isnan(r.temperature_c) for r in read(0.5))
    assert len(read(0.5)) == 2
    assert read(1.0) == read(2.9) == [Reading(60.0, 0.5), Reading(61.0, 0.4)]
    assert read(100.0) == [Reading(70.0, 0.2), Reading(71.0, 0.1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [("nonsense", "line 1: needs time"), ('{"time": 1}', "line 1: needs time"), ("[]", "line 1: needs time"),
     ('{"time": 1, "devices": [[1]]}', "line 1: needs time"),
     ('{"time": 2, "devices": []}\n{"time": 1, "devices": []}', "line 2: time 1 lies before 2"),
     ('{"time": 2, "devices": []}\n{"time": 3, "devices": [[1, 1]]}', "different numbers of devices")],
)  # fmt: skip
def test_a_damaged_recording_is_refused(tmp_path, text, says):
    path = tmp_path / "devices.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        telemetry.recorded_source(path)


def test_a_recording_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"/nope cannot be read: No such file or directory$"):
        telemetry.recorded_source(tmp_path / "nope")
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory$"):
        telemetry.recorded_source(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"/binary is not text$"):
        telemetry.recorded_source(tmp_path / "binary")


def test_an_empty_recording_knows_no_device(tmp_path):
    path = tmp_path / "devices.jsonl"
    path.write_text("")
    assert telemetry.recorded_source(path)(5.0) == []


class Nvml(types.ModuleType):
    """Two GPUs, of which the second does not tell its temperature."""

    NVMLError, NVML_TEMPERATURE_GPU = RuntimeError, 0

    def nvmlInit(self):
        self.begun = True

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-2f": 1}[name]

    def nvmlDeviceGetTemperature(self, handle, kind):
        if handle == 1:
            raise self.NVMLError
        return 64

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(free=20, total=80)


def test_nvml_is_read_where_there_is_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "GPU_FILES", (tmp_path,))
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-2f")
    first, second = telemetry.nvml_source()(0.0)
    assert first == Reading(64.0, 0.25)
    assert math.isnan(second.temperature_c)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match="need the package nvidia-ml-py"):
        telemetry.nvml_source()


def test_there_may_be_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "GPU_FILES", (tmp_path / "nothing",))
    assert telemetry.nvml_source() is None
