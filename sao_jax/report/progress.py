"""What a run shows while it works: stages with bars and live figures, or plain lines where there is no terminal."""

import collections
import dataclasses
import sys
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sao_jax.report.text import duration, figure, number, printable

REFRESH_HZ = 5
MIN_BAR, MAX_BAR = 8, 40


class Pace:
    """Units per second over the last minute, so that a compilation or a resumed count does not spoil the forecast."""

    def __init__(self, window_s: float = 60.0):
        self.window_s = window_s
        self.seen: collections.deque = collections.deque()

    def observe(self, done: float, now: float) -> None:
        """`done` units were complete at `now`."""
        if not self.seen or done != self.seen[-1][1]:
            self.seen.append((now, done))
        while len(self.seen) > 2 and self.seen[1][0] < now - self.window_s:
            self.seen.popleft()

    def rate(self, now: float) -> float | None:
        """Units per second up to `now`; None as long as nothing has moved."""
        if not self.seen:
            return None
        (start, first), (_, done) = self.seen[0], self.seen[-1]
        return (done - first) / (now - start) if done > first and now > start else None


@dataclasses.dataclass
class Stage:
    """A stage in progress. `done` and `figures` are replaced, never changed, so that the drawing thread may read."""

    name: str
    total: int | None
    unit: str
    start: float
    done: float = 0
    figures: dict = dataclasses.field(default_factory=dict)
    completed_at: float | None = None
    pace: Pace = dataclasses.field(default_factory=Pace)

    def count(self) -> str:
        of = f"/{number(self.total)}" if self.total else ""
        return f"{number(self.done)}{of} {self.unit}".rstrip()

    def time_left(self, now: float) -> float | None:
        if self.done:
            self.pace.observe(self.done, now)
        rate = self.pace.rate(now)
        return (self.total - self.done) / rate if self.total and rate and self.done < self.total else None

    def ended(self, complete: bool) -> str:
        """The line that stays."""
        spent = duration((monotonic() if self.completed_at is None else self.completed_at) - self.start)
        words = f"{self.name}: {self.count()} {'in' if complete else '- stopped after'} {spent}"
        return "  ".join([words, *self.shown()])

    def shown(self) -> list[str]:
        return [figure(k, v) for k, v in self.figures.items()]


class Display:
    """Progress on a terminal, or plain lines in a log; a context manager.

      with Display() as display:
          display.stage("RL", total=6400, unit="rollouts")
          for ...:
              display.advance(done, success=0.42, tokens_per_s=8123.0)

    On a terminal a thread draws REFRESH_HZ times a second from what `advance` left, so `advance` itself only stores.
    Elsewhere (a file, CI, a dumb terminal) it prints a line where a stage starts and ends, and one every 5 s
    between, rarer as the stage grows older, up to one a minute; never a control character.
    """

    def __init__(self, console: Console | None = None):
        # Rich takes FORCE_COLOR, which CI systems set, for a terminal, and would move the cursor in a log file.
        self.console = console or Console(force_terminal=sys.stdout.isatty())
        self._bars = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live: Live | None = None
        self._stage: Stage | None = None
        self._printed = 0.0

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._end_stage(complete=kind is None)
        self.close()

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Begins a stage and ends the one before, whose line stays. Without a total there is no bar."""
        self._end_stage(complete=True)
        now = monotonic()
        name, unit = self._clean(name), self._clean(unit)
        self._stage = Stage(name, total, unit, now)
        self._printed = now
        if not self._bars:
            self._line(f"{name}: started" + (f", {number(total)} {unit}".rstrip() if total else ""))
        elif self._live is None:
            self._live = Live(
                console=self.console, get_renderable=self._render, refresh_per_second=REFRESH_HZ, transient=True
            )
            self._live.start()
            # A run that is killed outright cannot bring a hidden cursor back.
            self.console.show_cursor(True)

    def advance(self, done: float, **figures) -> None:
        """Sets the number of units done so far, and figures to show; earlier figures stay until given again."""
        stage = self._stage
        if stage is None:
            raise ValueError("advance() outside a stage: call stage(name, total, unit) first")
        stage.done = done
        if done and not stage.pace.seen:
            stage.pace.observe(done, monotonic())
        if figures:
            stage.figures = stage.figures | figures
        if stage.completed_at is None and stage.total and done >= stage.total:
            stage.completed_at = monotonic()
        if not self._bars:
            self._print_sometimes(stage)

    def note(self, line: str) -> None:
        """A line that stays, above the bars."""
        for part in line.splitlines() or [""]:
            self._line(part)

    def close(self) -> None:
        """Ends the running stage and gives the terminal back. May be called twice."""
        self._end_stage(complete=True)
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _end_stage(self, complete: bool) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            self._line(stage.ended(complete))

    def _line(self, text: str) -> None:
        self.console.print(Text(self._clean(text)), soft_wrap=True)

    def _clean(self, text: str) -> str:
        """Without what would steer the terminal, or what its encoding lacks: a display must not end a run."""
        encoding = self.console.encoding
        return printable(text).encode(encoding, "replace").decode(encoding)

    def _print_sometimes(self, stage: Stage) -> None:
        now = monotonic()
        if now - self._printed < max(5.0, min(60.0, (now - stage.start) / 60)):
            return
        self._printed = now
        self._line("  ".join([f"{stage.name}: {stage.count()}", *left(stage, now), *stage.shown()]))

    def _render(self) -> Group:
        stage = self._stage
        return draw(stage, monotonic(), self.console.width) if stage else Group()


def left(stage: Stage, now: float) -> list[str]:
    seconds = stage.time_left(now)
    return [] if seconds is None else [f"{duration(seconds)} left"]


def draw(stage: Stage, now: float, width: int) -> Group:
    """A line with name, bar, count and times; below it as many of the figures as fit."""
    words = "  ".join([stage.count(), duration(now - stage.start), *left(stage, now)])
    room = min(MAX_BAR, width - len(stage.name) - len(words) - 4)
    grid = Table.grid(padding=(0, 2, 0, 0))
    cells = [Text(stage.name, "bold", no_wrap=True, overflow="ellipsis")]
    if stage.total and room >= MIN_BAR:
        bar = ProgressBar(total=stage.total, completed=min(stage.done, stage.total), width=room)
        cells.append(bar)
    cells.append(Text(words, no_wrap=True, overflow="ellipsis"))
    grid.add_row(*cells)
    shown, used = [], 2
    for text in stage.shown():
        if used + len(text) > width:
            break
        shown.append(text)
        used += len(text) + 2
    return Group(grid, Text("  " + "  ".join(shown), "dim", no_wrap=True)) if shown else Group(grid)
