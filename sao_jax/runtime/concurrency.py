"""How many attempts run at once: a controller of measured utilisation and of the age of the queue.

Devices idle while too few attempts run, and data goes stale while too many do. The controller is a function from a
reading to a level; nothing in it looks at a clock, so that a recorded run can be decided again.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was measured since the last decision.

    utilization: share of the time in which a device ran a compiled call with at least one live row, mean over devices.
    queue_age_s: age of the oldest finished trajectory that the learner has not taken.
    room: attempts that the staleness bound allows to run at once, those under way included.
    """

    utilization: float
    queue_age_s: float
    room: int


@dataclasses.dataclass(frozen=True)
class Control:
    """target: utilisation to hold; tolerance: distance from it that is left alone; lowest, highest: ends of the level.

    max_queue_age_s: an older queue means that the learner cannot keep up, and the level falls whatever the target says.
    """

    highest: int
    lowest: int = 1
    target: float = 0.92
    tolerance: float = 0.03
    max_queue_age_s: float = math.inf

    def __post_init__(self):
        if not 1 <= self.lowest <= self.highest:
            raise ValueError(f"lowest is {self.lowest}, highest {self.highest}; needed: 1 <= lowest <= highest")
        if not 0.0 < self.target <= 1.0:
            raise ValueError(f"target utilisation is {self.target}; it must lie in (0, 1]")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"tolerance is {self.tolerance}; it must lie in [0, 1)")
        if not self.max_queue_age_s > 0.0:
            raise ValueError(f"max_queue_age_s is {self.max_queue_age_s}; it must be above 0")


@dataclasses.dataclass(frozen=True)
class Level:
    """Attempts to run at once. `settling`: it has changed, and the next reading still shows the old one in part."""

    value: float
    settling: bool = False
    reason: str = "start"

    def __int__(self) -> int:
        return round(self.value)


GROWTH = 2.0  # at most per decision
QUEUE_FACTOR = 0.75  # per decision while the queue is too old
BUSY_FACTOR = 0.93  # per decision while utilisation is above the target


def decide(control: Control, level: Level, reading: Reading) -> Level:
    """The next level.

    Below saturation utilisation is proportional to the number of attempts, so a level that is too low is multiplied by
    target / utilisation. Saturated devices do not show by how much the level is too high, so it falls by small steps.
    After a change one reading is passed over: it covers both levels, and reacting to it would overshoot. Where the
    staleness bound and not the level is what holds attempts back, the level stays, or it would run away.
    """
    utilization, value = reading.utilization, level.value
    if not (math.isfinite(utilization) and math.isfinite(reading.queue_age_s)):
        return dataclasses.replace(level, reason="no measurement")
    if reading.queue_age_s > control.max_queue_age_s and not level.settling:
        return _moved(control, level, value * QUEUE_FACTOR, "queue too old")
    if level.settling:
        return dataclasses.replace(level, settling=False, reason="settling")
    if utilization < control.target - control.tolerance:
        if value >= reading.room:
            return dataclasses.replace(level, reason="staleness bound")
        return _moved(control, level, value * min(GROWTH, control.target / max(utilization, 1e-3)), "idle devices")
    if utilization > control.target + control.tolerance:
        return _moved(control, level, value * BUSY_FACTOR, "busy devices")
    return dataclasses.replace(level, reason="on target")


def _moved(control: Control, level: Level, value: float, reason: str) -> Level:
    value = min(max(value, control.lowest), control.highest)
    # A step of less than one attempt would never be seen.
    if round(value) == round(level.value) and control.lowest < level.value < control.highest:
        value = min(max(level.value + math.copysign(1.0, value - level.value), control.lowest), control.highest)
    return Level(value, settling=round(value) != round(level.value), reason=reason)
