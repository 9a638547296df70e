"""Tests run on eight virtual CPU devices, so that code for many devices is tested on any machine."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from sao_jax.runtime.devices import prepare_backend

prepare_backend(8)


def pytest_collection_modifyitems(items):
    """Quick tests first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Gives back the programs of a module: a process may map no more than 65,530 pieces of memory, and those of all
    tests together are more."""
    yield
    jax.clear_caches()
    gc.collect()
