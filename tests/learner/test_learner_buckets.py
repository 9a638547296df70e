"""Windows of short rows, computed at a shorter length, give what they give at the longest."""

import functools

import numpy as np
import pytest
from helpers import assert_close, host, make_learner, quick_compile, random_rows  # noqa: F401
from test_learner_packed import restart_and_train as result

from sao_jax.data.rows import blank_row
from sao_jax.learner.layout import Layout
from sao_jax.learner.objective import Choices
from sao_jax.runtime.devices import CompileCounter

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTH, BATCH = 48, 6
ROWS = [[row] for row in random_rows(7, BATCH, length=LENGTH)]
LENGTHS = [int(row["length"]) for (row,) in ROWS]
CHOICES = {
    "smooth": dict(),
    "whitened": dict(whiten="batch", gae_over="tokens"),
    "penalty": dict(kl="penalty", outside="mask", denominator="kept", value_clip=True),
}


@functools.cache
def learner_of(name, buckets=1, **how):
    return make_learner(Choices(**CHOICES[name]), length=LENGTH, batch=BATCH, buckets=buckets, **how)


def lengths_called(learner, batch):
    """What the batch gives, and the lengths of its gradient calls."""
    window, called = type(learner.programs).window, []

    class Seen:
        def __getattr__(self, name):
            return getattr(programs, name)

        def window(self, mode, frozen, length):
            called.append(length)
            return window(programs, mode, frozen, length)

    programs, learner.programs = learner.programs, Seen()
    try:
        return result(learner, batch), called
    finally:
        learner.programs = programs


@pytest.mark.parametrize(
    "name", ["smooth", *(pytest.param(n, marks=pytest.mark.slow) for n in ("whitened", "penalty"))]
)
def test_short_windows_add_up_to_what_they_are_at_full_length(name):
    expected, called = lengths_called(learner_of(name), ROWS)
    assert set(called) == {LENGTH}
    found, called = lengths_called(learner_of(name, buckets=3), ROWS)
    assert set(called) == {LENGTH // 4}  # all rows of this batch are short
    assert_close(found, expected)


def test_a_window_is_as_long_as_its_longest_row():
    wide = [[row] for row in random_rows(8, BATCH, length=LENGTH, observation=14)]
    mixed = [ROWS[0], ROWS[1], ROWS[2], max(wide, key=lambda rows: rows[0]["length"]), ROWS[4], ROWS[5]]
    longest = int(mixed[3][0]["length"])
    assert longest > LENGTH // 4
    expected, _ = lengths_called(learner_of("smooth"), mixed)
    found, called = lengths_called(learner_of("smooth", buckets=3), mixed)
    here = LENGTH // 2 if longest <= LENGTH // 2 else LENGTH
    assert called[:3] == [LENGTH // 4, here, LENGTH // 4]  # windows of two rows
    assert_close(found, expected)


@pytest.mark.slow
def test_on_two_devices_whose_windows_differ_in_length():
    expected, _ = lengths_called(learner_of("smooth"), ROWS)
    found, _ = lengths_called(learner_of("smooth", buckets=3, devices=2, micro_rows=1), ROWS)
    assert_close(found, expected)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up():
    learner = make_learner(Choices(), length=LENGTH, batch=BATCH, buckets=2)
    learner.warm_up(blank_row(LENGTH), preheat=True)
    programs, counter = learner.programs, CompileCounter()
    size = programs._window.cache_info().currsize
    assert size >= 6  # three modes at two lengths
    for seed, observation in ((1, 2), (2, 30), (3, 14)):
        for row in random_rows(seed, BATCH, length=LENGTH, observation=observation):
            learner.put(row)
        learner.update()
    assert counter.count == 0
    assert size == programs._window.cache_info().currsize


def test_lengths_are_halves_of_the_longest():
    layout = Layout.fit(4, 100, 1, buckets=3)
    assert layout.lengths == (100, 50, 25)
    assert [layout.bucket(tokens) for tokens in (1, 25, 26, 50, 51, 100)] == [25, 25, 50, 50, 100, 100]
    assert np.all(np.array(LENGTHS) <= 12)
