"""What a run was computed with: the promise of bitwise equal replay holds only where none of it differs."""

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def fingerprint() -> dict[str, Any]:
    """Machine, versions, devices and settings as plain JSON values. Starts the JAX backend."""
    import jax

    device = jax.devices()[0]
    return {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: getattr(jax.config, name, None) for name in _JAX_SETTINGS},
    }


def differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """One line for each entry that differs, in the form "jax: 0.10.2 -> 0.12.0"; empty if the two agree."""
    names = dict.fromkeys([*stored, *present])
    return [
        f"{name}: {stored.get(name, 'unknown')} -> {present.get(name, 'unknown')}"
        for name in names
        if name not in stored or name not in present or stored[name] != present[name]
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "CPU part"):
                return value.strip()
    return platform.processor()
