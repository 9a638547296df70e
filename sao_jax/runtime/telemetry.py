"""Temperature and free memory of devices, from NVIDIA's library, from a recording, or not at all."""

import json
import math
import pathlib
from collections.abc import Callable, Iterator

from sao_jax.runtime.devices import has_nvidia, visible_gpus
from sao_jax.runtime.router import Reading

# Given the time in seconds, the reading of every device.
Source = Callable[[float], list[Reading]]


def nvml_source() -> Source | None:
    """Reads the GPUs that this process may use; None where there are none. ValueError if the package is missing."""
    if not has_nvidia():
        return None
    try:
        import pynvml
    except ImportError:
        raise ValueError(
            "device temperatures need the package nvidia-ml-py: pip install 'sao_jax[telemetry]'"
        ) from None
    pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in visible_gpus()
    ]

    def read(now: float) -> list[Reading]:
        return [Reading(_temperature(pynvml, handle), _free_memory(pynvml, handle)) for handle in handles]

    return read


def _temperature(nvml, handle) -> float:
    try:
        return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    except nvml.NVMLError:  # a virtual or shared device may not tell
        return math.nan


def _free_memory(nvml, handle) -> float:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return math.nan
    return memory.free / memory.total if memory.total else math.nan


def recorded_source(path: str | pathlib.Path) -> Source:
    """Plays a recording: lines of JSON {"time": s, "devices": [[temperature, free share], ...]}, in order of time.

    A reading holds until the next one; before the first, nothing is known. ValueError if it cannot be read or parsed.
    """
    try:
        text = pathlib.Path(path).read_text()
    except OSError as error:
        raise ValueError(f"the recording {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the recording {path} is not text") from None
    lines = list(_recorded(path, text))
    widths = {len(readings) for _, readings in lines}
    if len(widths) > 1:
        raise ValueError(f"{path}: lines have different numbers of devices: {sorted(widths)}")

    def read(now: float) -> list[Reading]:
        past = [readings for time, readings in lines if time <= now]
        return past[-1] if past else [Reading()] * next(iter(widths), 0)

    return read


def _recorded(path: str | pathlib.Path, text: str) -> Iterator[tuple[float, list[Reading]]]:
    last = -math.inf
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            time, readings = float(record["time"]), [Reading(float(t), float(m)) for t, m in record["devices"]]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number}: needs time and devices as pairs of numbers") from None
        if time < last:
            raise ValueError(f"{path}, line {number}: time {time:g} lies before {last:g}")
        last = time
        yield time, readings
