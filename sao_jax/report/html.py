"""One HTML file that shows a run and needs nothing else."""

import base64
import html
import json
from collections.abc import Mapping
from pathlib import Path

from sao_jax.report.curves import png, run_figure
from sao_jax.report.run_folder import read_run, write_whole
from sao_jax.report.summary import summarise, summary_rows
from sao_jax.report.text import duration, number, percent

# The policy forbids whatever an unescaped value could load.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ --ink: #1f2430; --muted: #6b7280; --line: #e5e7eb; --paper: #ffffff; --ground: #f6f7f9; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e8ee; --muted: #9aa1ad; --line: #303642; --paper: #1b2029; --ground: #12161d; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }}
h1 {{ font-size: 26px; margin: 0 0 18px; overflow-wrap: anywhere; }}
h2 {{ font-size: 13px; margin: 0 0 6px; color: var(--muted); text-transform: uppercase; letter-spacing: .06em; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin-bottom: 16px; }}
.card, section, figure {{ background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }}
.card {{ padding: 12px 16px; color: var(--muted); }}
.card b {{ display: block; font-size: 25px; line-height: 1.25; color: var(--ink); }}
figure {{ margin: 0 0 16px; padding: 12px; background: #ffffff; }}
img {{ width: 100%; height: auto; display: block; }}
.sections {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 16px; }}
section {{ padding: 14px 18px; }}
table {{ width: 100%; border-collapse: collapse; }}
td {{ padding: 4px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }}
td:last-child {{ text-align: right; padding-left: 16px; font-variant-numeric: tabular-nums; }}
tr:first-child td {{ border-top: 0; }}
details {{ margin-top: 16px; }}
summary {{ cursor: pointer; color: var(--muted); }}
@media (max-width: 520px) {{ .sections {{ grid-template-columns: 1fr; }} }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<div class="cards">{cards}</div>
<figure><img alt="Curves of the run" src="data:image/png;base64,{image}"></figure>
<div class="sections">{sections}</div>
{settings}
</main>
</body>
</html>
"""


def write_report(folder, curves: bytes | None = None) -> Path:
    """Writes `report.html` into the run folder: curves, summary, settings, with nothing loaded from elsewhere.

    `curves`: the picture as PNG, if it has been drawn already.
    """
    run = read_run(folder)
    summary = summarise(folder)
    image = base64.b64encode(curves or png(run_figure(run.metrics, run.config))).decode()
    sections = "".join(
        f"<section><h2>{html.escape(title)}</h2>{rows_table(rows)}</section>" for title, rows in summary_rows(summary)
    )
    settings = [(name, json.dumps(value)) for name, value in flat(run.config)]
    page = PAGE.format(
        title=html.escape(summary["run"]),
        cards="".join(f"<div class=card><b>{html.escape(v)}</b>{html.escape(k)}</div>" for k, v in cards(summary)),
        image=image,
        sections=sections,
        settings=f"<details><summary>Settings</summary><section>{rows_table(settings)}</section></details>"
        if settings
        else "",
    )
    return write_whole(run.folder / "report.html", page.encode())


def cards(summary: dict) -> list[tuple[str, str]]:
    """The headline: (label, value), without what is unknown."""
    moments = summary["held_out"]

    def success(*names: str) -> float | None:
        kinds = next((moments[n] for n in names if n in moments), {})
        return next((kinds[k]["success"] for k in ("sampled", "greedy") if k in kinds), None)

    found = [
        ("held-out success before RL", percent(success("before", "warm_start"))),
        ("held-out success after RL", percent(success("after"))),
        ("rollouts", number(summary["rollouts"]["total"] or None)),
        ("wall clock", duration(summary["wall_clock_s"]["total"] or None)),
        ("tokens/s", number(summary["tokens_per_s"])),
    ]
    return [(label, value) for label, value in found if value != "-"]


def rows_table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{html.escape(label)}</td><td>{html.escape(value)}</td></tr>" for label, value in rows)
    return f"<table>{''.join(cells)}</table>"


def flat(config: Mapping, prefix: str = "") -> list[tuple[str, object]]:
    """Settings of any depth as (dotted name, value)."""
    out: list[tuple[str, object]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            out += flat(value, f"{prefix}{name}.")
        else:
            out.append((f"{prefix}{name}", value))
    return out
