"""Numbers and times as people read them; ASCII only, so that any terminal and log can show them."""

import math


def number(x) -> str:
    """Three significant digits, thousands separated; "-" for what is missing or not finite."""
    if isinstance(x, (bool, str)):
        return str(x)
    x = math.nan if x is None else float(x)
    if not math.isfinite(x):
        return "-"
    if x == int(x) or abs(x) >= 1000:
        return f"{round(x):,}"
    if abs(x) >= 1:
        return f"{x:.3g}"
    return f"{x:.2f}" if abs(x) >= 0.1 else f"{x:.2g}"


def percent(x) -> str:
    return "-" if x is None else f"{100 * x:.1f}%"


def duration(seconds) -> str:
    """35 ms, 0.4 s, 12 s, 4:07, 1:02:33."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.1:
        return f"{1000 * max(seconds, 0.0):.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def figure(name: str, value) -> str:
    """A live figure: tokens_per_s=8123.0 -> "tokens/s 8,123"."""
    return printable(f"{name.replace('_per_', '/').replace('_', ' ')} {number(value)}")


def printable(line: str) -> str:
    """`line` without control characters: names and notes may come from data, and would steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in line)
