"""How memory decays: the share of what was needed and recalled, by how long ago it was said.

Tasks that measure it (`dialogue`) count both in reward parts `asked_kD` and `recalled_kD`, D being the upper end of a
bucket of distances; parts are totals, so counts add up over trajectories.
"""

import re
from collections.abc import Iterable, Mapping

from rich.table import Table

from sao_jax.report.intervals import wilson
from sao_jax.report.text import number, percent

_ASKED = re.compile(r"asked_k([1-9][0-9]*)")


def recall_by_distance(reward_parts: Iterable[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Upper end of a bucket of distances -> {asked, recalled, share, low, high}, nearest first.

    share = recalled / asked, with its 95 % interval. `reward_parts` are those of trajectories; empty if none of them
    was asked anything.
    """
    counts: dict[int, list[float]] = {}
    for parts in reward_parts:
        for name, asked in parts.items():
            if match := _ASKED.fullmatch(name):
                count = counts.setdefault(int(match[1]), [0.0, 0.0])
                count[0] += asked
                count[1] += parts.get(f"recalled_k{match[1]}", 0.0)
    found = {}
    for distance, (asked, recalled) in sorted(counts.items()):
        if asked >= 1:
            low, high = wilson(recalled, asked)
            found[distance] = dict(asked=asked, recalled=recalled, share=recalled / asked, low=low, high=high)
    return found


def recall_table(recall: Mapping[int, Mapping[str, float]], title: str | None = None) -> Table:
    """`recall_by_distance` for a terminal or a notebook."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for header in ("said k exchanges ago", "needed", "recalled", "95 % interval"):
        table.add_column(header, justify="right")
    below = 0
    for distance, row in recall.items():
        ends = f"{percent(row['low'])} to {percent(row['high'])}"
        table.add_row(f"{below + 1} to {distance}", number(row["asked"]), percent(row["share"]), ends)
        below = distance
    return table
