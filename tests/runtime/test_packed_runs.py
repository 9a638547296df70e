"""Runs whose trajectories share rows: trained, stopped, resumed and replayed."""

import numpy as np
import pytest
from helpers import SilentDisplay, Tiny, quick_compile  # noqa: F401
from test_loop import run, updates_of
from test_replay import run_with_stops

from sao_jax.envs import registry
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.replay import replay
from sao_jax.runtime.run import family_and_context

ROOM = 64


class RoomyTiny(Tiny):
    """Attempts of some ten tokens in rows of more."""

    name, max_tokens = "roomy-tiny", ROOM


if "roomy-tiny" not in registry.names():
    registry.register("roomy-tiny", RoomyTiny)

FLAGS = dict(task="roomy-tiny:turns=2", pack=True, batch_size=8, rollouts=24, temperature=10.0)


def test_a_packed_run_makes_fewer_gradient_calls_on_the_same_tokens(tmp_path):
    _, record, _ = run(tmp_path, max_staleness=0, micro_rows=1, devices=1, **FLAGS)
    lines = updates_of(record)
    assert len(lines) == 3
    for line, batch in zip(lines, record.updates, strict=True):
        members = [record.trajectories[r] for r in batch]
        assert line["response_length/mean"] == pytest.approx(np.mean([t.num_action_tokens for t in members]))
        assert line["rollout_corr/logp_abs_diff"] < 1e-5  # all is on-policy: no trajectory sees another
        assert line["perf/recompilations"] == 0
    # A call comes before the trajectory that fits no row, or when the batch is complete.
    calls = 0
    for batch in record.updates:
        used = ROOM
        for length in (record.trajectories[r].length for r in batch):
            used, calls = (used + length, calls) if used + length <= ROOM else (length, calls + 1)
    assert len(record.of_kind("accumulate")) == calls < 20


@pytest.mark.slow
def test_a_stopped_packed_run_is_replayed_bit_by_bit(tmp_path):
    record, stopped = run_with_stops(tmp_path / "run", (25, 25), **FLAGS | dict(rollouts=48))
    assert stopped
    assert len(set(record.trained)) == len(record.trained) == 48
    figures = replay(tmp_path / "run", tmp_path / "replay", SilentDisplay(), resample=True)
    assert figures["identical"], figures


def test_a_critic_that_steps_on_arrivals_has_nothing_to_pack():
    with pytest.raises(ValueError, match="--pack has no effect here; it needs --critic-update batch"):
        RunConfig(pack=True, critic_update="arrival").resolved()
    assert not RunConfig().resolved().pack


@pytest.mark.parametrize(("flags", "says"), [
    (dict(pack=True, row_buckets=2), "--row-buckets has no effect here; it needs a row for each trajectory"),
    (dict(row_buckets=0), "--row-buckets is 0; it must be at least 1"),
    (dict(row_buckets=5), "--row-buckets 5 halves rows of 64 tokens to 4; the shortest must hold at least 8"),
])  # fmt: skip
def test_row_lengths_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        family_and_context(RunConfig(task="roomy-tiny", **flags).resolved())
