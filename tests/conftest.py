"""Tests run on eight virtual CPU devices, so that code for many devices is tested on any machine."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from sao_jax.runtime.devices import prepare_backend

prepare_backend(8)


def pytest_collection_modifyitems(items):
    """Quick tests first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
