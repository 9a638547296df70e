"""The display: live bars on a terminal, plain lines elsewhere."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sao_jax.report import progress
from sao_jax.report.progress import Display, Pace, Stage, draw

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(progress, "monotonic", fake)
    return fake


def plain(**options):
    return Console(file=io.StringIO(), force_terminal=False, **options)


def terminal(width=60, term="xterm"):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=20, _environ={"TERM": term})


def text_of(console):
    return console.file.getvalue()


def test_log_lines_of_two_stages(clock):
    console = plain()
    with Display(console) as display:
        display.stage("warm start", 500, "steps")
        clock.now += 72
        display.advance(500, loss=0.4321)
        display.note("held out: 0.28")
        display.stage("RL", 6400, "rollouts")
        clock.now += 100
        display.advance(6400, success=0.93, tokens_per_s=8123.4)
        clock.now += 50
    assert text_of(console).splitlines() == [
        "warm start: started, 500 steps",
        "warm start: 500/500 steps  loss 0.43",
        "held out: 0.28",
        "warm start: 500/500 steps in 1:12  loss 0.43",
        "RL: started, 6,400 rollouts",
        "RL: 6,400/6,400 rollouts  success 0.93  tokens/s 8,123",
        # The stage lasted until its count was full, not until someone ended it.
        "RL: 6,400/6,400 rollouts in 1:40  success 0.93  tokens/s 8,123",
    ]


def test_log_has_a_line_every_five_seconds_at_most(clock):
    console = plain()
    with Display(console) as display:
        display.stage("RL", 10_000, "rollouts")
        for done in range(1, 30 * 64 + 1):
            clock.now += 1 / 64
            display.advance(done)
    between = text_of(console).splitlines()[1:-1]
    assert len(between) == 6
    # 8,080 more at 64 a second.
    assert between[-1] == "RL: 1,920/10,000 rollouts  2:06 left"


def test_log_of_a_long_stage_gets_rarer_but_never_silent(clock):
    console = plain()
    with Display(console) as display:
        display.stage("RL", 10**6, "rollouts")
        for done in range(10 * 3600):
            clock.now += 1
            display.advance(done)
    lines = len(text_of(console).splitlines())
    assert 600 <= lines <= 1000


@pytest.mark.parametrize("console", [plain(), terminal(term="dumb")], ids=["file", "dumb terminal"])
def test_no_control_characters_without_a_terminal(console):
    with Display(console) as display:
        display.stage("RL\x1b[2J", 10, "rollouts\r")
        display.advance(10, **{"bad\x1b": "\x1b[31m"})
        display.note("one\ttwo\x1b[0m\nnext [bold]line[/bold]")
    assert not CONTROL.search(text_of(console))
    assert "next [bold]line[/bold]\n" in text_of(console)


def test_force_color_does_not_turn_a_log_into_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Display() as display:
        display.stage("RL", 3, "rollouts")
        display.advance(3)
    out = capsys.readouterr().out
    assert out.startswith("RL: started, 3 rollouts\n")
    assert not CONTROL.search(out)


def test_an_encoding_that_lacks_a_letter_does_not_end_the_run():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Display(Console(file=stream, force_terminal=False)) as display:
        display.note("r\u00e9sum\u00e9 \u2192")
    stream.flush()
    assert stream.buffer.getvalue() == b"r?sum? ?\n"


def test_long_lines_of_a_log_are_not_wrapped():
    console = plain(width=40)
    Display(console).note("x " * 100)
    assert text_of(console).count("\n") == 1


def test_terminal_shows_the_bar_and_keeps_the_finished_line(clock):
    console = terminal()
    with Display(console) as display:
        display.stage("RL", 6400, "rollouts")
        display.advance(1600, success=0.42)
        display._live.refresh()
        during = text_of(console)
        clock.now += 12
        display.advance(6400)
    assert "1,600/6,400 rollouts" in during
    assert "\u2501" in during
    assert "RL: 6,400/6,400 rollouts in 12 s  success 0.42" in text_of(console)


class Unplugged(Exception):
    pass


@pytest.mark.parametrize("error", [Unplugged, KeyboardInterrupt])
def test_terminal_is_given_back_after(error):
    console = terminal()
    display = Display(console)

    def run():
        with display:
            display.stage("RL", 6400, "rollouts")
            display.advance(100)
            raise error

    with pytest.raises(error):
        run()
    out = text_of(console)
    assert "RL: 100/6,400 rollouts - stopped after" in out
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")
    assert display._live is None
    assert console._live_stack == []


def test_close_twice_and_without_a_stage():
    console = plain()
    display = Display(console)
    display.close()
    display.stage("RL")
    display.close()
    display.close()
    assert text_of(console).count("RL:") == 2


def test_advance_only_stores(clock):
    console = terminal()
    with Display(console) as display:
        display.stage("RL", 10**6, "rollouts")
        display._live.auto_refresh = False
        display._live._refresh_thread.stop()
        display._live._refresh_thread.join()
        before = text_of(console)
        for done in range(10_000):
            display.advance(done, success=0.1, staleness=1.0)
        assert text_of(console) == before


def test_advance_outside_a_stage_is_refused():
    with pytest.raises(ValueError, match="stage"):
        Display(plain()).advance(1)


@given(
    width=st.integers(20, 200),
    name=st.text("ab ", min_size=1, max_size=20),
    total=st.one_of(st.none(), st.integers(0, 10**9)),
    done=st.integers(0, 10**9),
    figures=st.dictionaries(st.text("xyz_", min_size=1, max_size=30), st.floats(), max_size=8),
)
def test_drawing_fits_any_terminal(width, name, total, done, figures):
    console = terminal(width)
    console.print(draw(Stage(name, total, "rollouts", 0.0, done, figures), 100.0, width))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text_of(console)).splitlines()
    assert len(lines) <= 2
    assert all(len(line) <= width for line in lines)


def test_narrow_terminal_still_shows_a_bar():
    stage = Stage("RL", 6400, "rollouts", 0.0, 1600, {"success": 0.42, "staleness": 1.2, "tokens_per_s": 8123.0})
    stage.pace.observe(800, 10.0)
    console = terminal(60)
    console.print(draw(stage, 20.0, 60))
    first, second = re.sub(r"\x1b\[[0-9;]*m", "", text_of(console)).splitlines()
    # 800 more in 10 s leaves 4,800 for a minute.
    assert first.split() == ["RL", first.split()[1], "1,600/6,400", "rollouts", "20", "s", "1:00", "left"]
    assert len(first.split()[1]) >= progress.MIN_BAR
    assert second.strip() == "success 0.42  staleness 1.2  tokens/s 8,123"


def test_pace_forgets_the_compilation():
    pace = Pace(window_s=60)
    for second in range(0, 300):
        pace.observe(0 if second < 100 else 10 * (second - 99), float(second))
    assert pace.rate(299.0) == pytest.approx(10, rel=1e-6)


def test_pace_of_a_resumed_count_starts_there():
    pace = Pace()
    assert pace.rate(0.0) is None
    pace.observe(5000, 0.0)
    assert pace.rate(5.0) is None
    pace.observe(5020, 10.0)
    assert pace.rate(10.0) == pytest.approx(2)
    # Nothing more arrives: the forecast grows.
    assert pace.rate(40.0) == pytest.approx(0.5)
