"""The controller of concurrency, on hand-made readings and on a simulated device with slow environments."""

import csv
import dataclasses
import heapq
import math
import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.runtime.concurrency import Control, Level, Reading, decide
from sao_jax.runtime.utilization import BusyTime, DeviceWatch

CONTROL = Control(highest=512)


class Plant:
    """A device that serves attempts one after the other, `compute_s` each, between waits for their environments."""

    def __init__(self, compute_s=0.01, wait_s=0.3, sigma=1.29, seed=0):
        self.compute_s, self.wait_s, self.sigma = compute_s, wait_s, sigma
        self.rng = np.random.default_rng(seed)
        self.returns: list[float] = []  # when attempts come back from their environments
        self.now, self.free_at, self.busy = 0.0, 0.0, BusyTime(0.0)

    def measure(self, level: int, seconds: float, room=10**6) -> Reading:
        """Runs with `level` attempts for a while."""
        end = self.now + seconds
        while len(self.returns) < min(level, room):
            heapq.heappush(self.returns, self.now)
        while self.returns and self.returns[0] < end:
            ready = heapq.heappop(self.returns)
            if len(self.returns) >= min(level, room):
                continue  # the level has fallen: this one ends
            start = max(ready, self.free_at)
            self.free_at = start + self.rng.exponential(self.compute_s)
            self.busy.add(start, self.free_at)
            wait = self.wait_s * math.exp(self.sigma * self.rng.standard_normal())
            heapq.heappush(self.returns, self.free_at + wait)
        self.now = end
        return Reading(min(self.busy.read(end)[0], 1.0), 0.0, room)


def drive(plant, level, decisions, control=CONTROL, seconds=20.0, room=10**6):
    levels, shares = [], []
    for _ in range(decisions):
        reading = plant.measure(int(level), seconds, room)
        level = decide(control, level, reading)
        levels.append(int(level))
        shares.append(reading.utilization)
    return level, np.array(levels), np.array(shares)


@pytest.mark.parametrize("start", [1, 8, 512])
@pytest.mark.parametrize("sigma", [0.0, 1.29])
def test_the_target_is_reached_from_below_and_above_and_held_without_oscillation(start, sigma):
    _, levels, shares = drive(Plant(sigma=sigma), Level(start), 120)
    late = slice(-40, None)
    assert abs(np.mean(shares[late]) - CONTROL.target) < 0.04
    assert levels[late].max() <= 1.35 * levels[late].min()
    turns = np.sign(np.diff(levels[late]))
    turns = turns[turns != 0]
    assert np.sum(turns[1:] != turns[:-1]) <= 12, "the level swings"


def test_a_load_step_is_recovered_from():
    plant = Plant()
    level, before, _ = drive(plant, Level(8), 60)
    plant.wait_s *= 4
    level, during, shares = drive(plant, level, 30)
    assert np.mean(shares[:2]) < 0.8, "the step is felt"
    assert abs(np.mean(shares[-15:]) - CONTROL.target) < 0.05
    assert 2.5 < np.mean(during[-10:]) / np.mean(before[-10:]) < 6
    plant.wait_s /= 4
    _, after, shares = drive(plant, level, 80)
    assert np.mean(after[-10:]) < 1.4 * np.mean(before[-10:])


def test_nothing_starves_and_the_level_does_not_run_away_under_the_staleness_bound():
    level, levels, _ = drive(Plant(), Level(8), 60, room=12)
    assert levels.min() >= CONTROL.lowest
    assert levels.max() <= 24, "the bound and not the level is what holds back"
    _, _, shares = drive(Plant(), level, 40)
    assert np.mean(shares[-10:]) > 0.86, "once the bound is lifted the level grows"


# Decisions of two real runs, each with what it was made from:
# crowded: `--concurrency auto --target-utilization 0.6 --slots 128 --batch-size 32 --max-staleness 4 --env-seconds 0.5
#          --env-sigma 1.29 --env-sleep`, a model of width 32, on a machine whose cores other jobs took most of the
#          time, so that the load changes all the time;
# quiet:   slots 256, batches of 64, median environment time 0.1 s, width 64, on a machine of its own, where the
#          target of 0.92 lies above what 256 attempts can do, until its last tasks were handed out. It recorded no
#          limit of the queue's age, which was never near one.
RECORDED = {"crowded_machine": (Control(highest=128, target=0.6), 120), "quiet_machine": (Control(highest=256), 10)}


def decide_again(name):
    """(rows of the recording, levels that the controller goes to on its readings)."""
    control, _ = RECORDED[name]
    with (pathlib.Path(__file__).parent / "recorded" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    levels, level = [], Level(control.highest // 4)
    for row in rows:
        limited = dataclasses.replace(control, max_queue_age_s=float(row["queue_limit_s"] or math.inf))
        reading = Reading(float(row["utilization"]), float(row["queue_age_s"]), int(row["room"]))
        level = decide(limited, level, reading)
        levels.append(level)
    return rows, levels


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_is_decided_again(name):
    rows, levels = decide_again(name)
    assert len(rows) >= RECORDED[name][1]
    assert [(int(level), level.reason) for level in levels] == [(int(r["concurrency"]), r["reason"]) for r in rows]


@pytest.mark.parametrize("name", RECORDED)
def test_on_readings_of_a_real_run_the_level_neither_swings_nor_starves(name):
    control, _ = RECORDED[name]
    rows, levels = decide_again(name)
    numbers = np.array([control.highest // 4, *map(int, levels)])
    steps, shares = np.sign(np.diff(numbers)), np.array([float(row["utilization"]) for row in rows])
    assert not np.any(steps[1:] & steps[:-1]), "a reading that covers two levels moves nothing"
    moves = steps[steps != 0]
    turns = np.sum(moves[1:] != moves[:-1])
    assert turns <= len(moves) / 3, "the level swings"
    assert numbers.min() >= control.lowest
    assert numbers.max() <= control.highest
    low, high = shares < control.target - control.tolerance, shares > control.target + control.tolerance
    assert not np.any((steps < 0) & ~high), "it falls only while devices are busier than wanted"
    assert not np.any((steps > 0) & ~low)
    idle = low[1:] & low[:-1]
    grown = (steps[1:] > 0) | (steps[:-1] > 0) | (numbers[2:] == control.highest)
    assert np.all(grown[idle]), "devices idle for two readings and the level stays"


def test_readings_and_what_becomes_of_them():
    level = Level(100.0)
    up = decide(CONTROL, level, Reading(0.46, 0.0, 1000))
    assert (up.value, up.settling, up.reason) == (200.0, True, "idle devices")
    assert decide(CONTROL, up, Reading(0.3, 0.0, 1000)) == Level(200.0, False, "settling")
    assert decide(CONTROL, level, Reading(0.91, 0.0, 1000)).reason == "on target"
    assert decide(CONTROL, level, Reading(0.99, 0.0, 1000)) == Level(93.0, True, "busy devices")
    assert decide(CONTROL, level, Reading(0.5, 0.0, 100)) == Level(100.0, False, "staleness bound")
    slow = dataclasses.replace(CONTROL, max_queue_age_s=5.0)
    assert decide(slow, level, Reading(0.5, 6.0, 1000)) == Level(75.0, True, "queue too old")
    for nothing in (Reading(math.nan, 0.0, 10), Reading(0.5, math.nan, 10)):
        assert decide(CONTROL, level, nothing) == Level(100.0, False, "no measurement")
    assert decide(CONTROL, Level(1.0), Reading(0.99, 0.0, 9)).value == 1.0
    assert decide(CONTROL, Level(500.0), Reading(0.5, 0.0, 10**6)).value == 512
    assert decide(CONTROL, Level(3.0), Reading(1.0, 0.0, 9)).value == 2.0, "a step is at least one attempt"
    assert decide(CONTROL, Level(4.0), Reading(0.0, 0.0, 9)).value == 8.0, "nothing measured is no infinity"


@pytest.mark.parametrize(
    ("flags", "says"),
    [(dict(highest=0), "lowest is 1, highest 0"), (dict(highest=8, target=0.0), "must lie in"),
     (dict(highest=8, target=1.5), "must lie in"), (dict(highest=8, tolerance=1.0), "tolerance is 1"),
     (dict(highest=8, max_queue_age_s=0.0), "must be above 0")],
)  # fmt: skip
def test_controls_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        Control(**flags)


def test_busy_time_is_a_union_without_calls_that_have_no_live_row():
    busy = BusyTime(10.0)
    busy.add(11.0, 13.0, live=0.5)
    busy.add(12.0, 15.0)  # enqueued during the first one: it began at 13
    busy.add(16.0, 18.0, live=0.0)
    busy.add(17.0, 19.0, live=0.25)
    utilization, weighted = busy.read(20.0)
    assert utilization == pytest.approx((2 + 2 + 1) / 10)
    assert weighted == pytest.approx((1 + 2 + 0.25) / 10)
    busy.add(19.0, 22.0)  # began before this window
    assert busy.read(24.0)[0] == pytest.approx(2 / 4)
    assert math.isnan(busy.read(24.0)[0])


def test_the_watch_sees_when_calls_end_and_takes_donated_results():
    watch = DeviceWatch(2)
    try:
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        x = jnp.zeros(1000)
        watch.read()
        for _ in range(5):
            start = time.monotonic()
            x = add(x)
            watch.enqueued(start, x, [1.0, 0.0])  # all but the last are donated
        jax.block_until_ready(x)
        deadline = time.monotonic() + 10
        while (shares := watch.read())[0] == 0.0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 0.0 < shares[0] < 0.5, "one of two devices had live rows"
        assert shares[1] == pytest.approx(shares[0])
    finally:
        watch.close()


def test_the_watch_counts_only_until_the_call_is_done():
    now, done = [0.0], threading.Event()

    class Slow:
        def block_until_ready(self):
            done.wait(10)
            return self

    watch = DeviceWatch(1, clock=lambda: now[0])
    try:
        watch.enqueued(0.0, Slow(), 0.5)
        now[0] = 3.0
        done.set()
        watch.close()  # all calls have been seen
        now[0] = 4.0
        assert watch.read() == pytest.approx((0.75, 0.375))
    finally:
        watch.close()
