"""Runs whose processes are ended in any case."""

import contextlib
import os
import signal

import invariants
import pytest
from helpers import cache_folder, compilation_environment

from sao_jax.runtime import run as run_module
from sao_jax.runtime.workers import Workers


@pytest.fixture
def training(tmp_path, request):
    """A function that begins or resumes the run in a folder as a process of its own."""
    started = []

    def start(folder, **flags):
        started.append(invariants.start_training(folder, request, **flags))
        return started[-1]

    yield start
    for process in started:
        for pid in (*invariants.children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def workers(monkeypatch, request):
    """The `Workers` that runs in this process have made, in order. `options` are passed on to those to come."""

    class Made(list):
        options: dict = {}  # noqa: RUF012

    made = Made()

    def make(*args, **options):
        made.append(Workers(*args, **options | made.options))
        return made[-1]

    monkeypatch.setattr(run_module, "Workers", make)
    for name, value in compilation_environment(cache_folder(request.config)).items():
        monkeypatch.setenv(name, value)
    yield made
    for item in made:
        item.close()
