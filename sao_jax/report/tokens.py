"""Trajectories token by token: a strip of coloured tokens as HTML, for notebooks and reports."""

import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

VISIBLE = str.maketrans({"\n": "⏎", " ": "·", "\t": "⇥"})


def token_strip(
    texts: Sequence[str], values: Sequence[float], action_mask: Sequence[bool], *, title: str = "", limit: float = 0.0
) -> str:
    """One line of tokens: actions coloured by value (blue positive, red negative), observations grey.

    Args:
      texts: the text of each token.
      values: a number per token, shown on hover; read at action tokens only. One that is not finite is left white.
      action_mask: True where the policy sampled the token.
      limit: the magnitude with full colour; 0: the largest at an action token.
    """
    values, mask = np.asarray(values, float), np.asarray(action_mask, bool)
    finite = values[mask & np.isfinite(values)]
    limit = limit or (float(np.abs(finite).max()) if len(finite) else 1.0) or 1.0
    spans = []
    for text, value, acts in zip(texts, values, mask, strict=True):
        shown = html.escape(text.translate(VISIBLE))
        if not acts:
            spans.append(f'<span style="color:#8b93a1;padding:2px 1px">{shown}</span>')
            continue
        strength = min(1.0, abs(value) / limit) if math.isfinite(value) else 0.0
        red, green, blue = (37, 99, 235) if value >= 0 else (209, 52, 75)
        style = f"background:rgba({red},{green},{blue},{0.75 * strength:.2f});padding:2px 1px;border-radius:3px"
        spans.append(f'<span title="{value:.4g}" style="{style}">{shown}</span>')
    head = f'<div style="color:#6b7280;font:12px sans-serif">{html.escape(title)}</div>' if title else ""
    body = "".join(spans)
    return f'{head}<div style="font:15px/1.9 monospace;overflow-wrap:anywhere">{body}</div>'


def trajectory_html(read: Mapping, *, show: Sequence[str] = ("advantage", "weight", "version")) -> str:
    """Strips of one trajectory as `sao_jax.runtime.inspect.read_trajectories` gives it, one for each name in `show`.

    Weights are coloured by log(weight): blue where the token has become likelier since it was sampled.
    """
    strips = []
    for name in show:
        values = np.asarray(read[name], float)
        if name == "weight":
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log(values)
        label = {"weight": "log importance weight"}.get(name, name)
        strips.append(token_strip(read["texts"], values, read["action_mask"], title=label))
    head = f"{read['task']} · reward {read['reward']:g} · {read['end']}"
    return f'<div style="margin:10px 0"><b>{html.escape(head)}</b>{"".join(strips)}</div>'
