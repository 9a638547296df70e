"""Measures reported figures on this machine, one by one, and says which reproduce.

python -m experiments.claims --list
python -m experiments.claims action-only              # the last line is JSON
python -m experiments.claims --all                    # every claim, and results/claims.md
"""

import dataclasses
import json
import math
import pathlib
import sys
from typing import Annotated

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tyro

from experiments import _cli


@dataclasses.dataclass(frozen=True)
class Flags:
    claim: Annotated[str | None, tyro.conf.Positional] = None
    """Name of a claim, see --list."""
    list: bool = False
    """Print names and what is reported, and stop."""
    all: bool = False
    """Measure every claim and write a table of them."""
    quick: bool = False
    """Small sizes, to see that it works; the figures mean little."""
    seeds: int | None = None
    """Seeds per method (default: the claim's own number); finished runs are not run again."""
    results: str = "results"
    """Folder for runs and tables, shared with experiments.ablate."""


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    from experiments._claims import CLAIMS, Request

    if flags.list:
        for name, claim in CLAIMS.items():
            reported = "" if claim.reported is None else f" ({claim.reported:g}"
            reported += "" if claim.reported_baseline is None else f" against {claim.reported_baseline:g}"
            effect = "" if claim.effect is None else f": {claim.effect:.3g} {claim.unit}"
            print(f"{name:20}{claim.text}{effect}{reported}{')' if reported else ''}")
        return
    results = _cli.results_folder(flags.results)
    if flags.seeds is not None and flags.seeds < 1:
        raise ValueError(f"--seeds is {flags.seeds}; it must be at least 1")
    if flags.seeds is not None and flags.claim == "action-only":
        raise ValueError("--seeds: action-only has no seeds, it is a count of operations")
    if flags.all == (flags.claim is not None):
        raise ValueError("name one claim, or --all; --list shows them")
    if flags.claim is not None and flags.claim not in CLAIMS:
        raise ValueError(f"unknown claim {flags.claim!r}; allowed: {', '.join(CLAIMS)}")

    from sao_jax.runtime.devices import prepare_backend

    prepare_backend()
    asked = Request(flags.quick, results, stop.check, flags.seeds)
    if not flags.all:
        print(json.dumps(measure(flags.claim, asked)), flush=True)
        return
    failed = []
    for name in CLAIMS:
        try:
            print(json.dumps(measure(name, asked)), flush=True)
        except (ValueError, _cli.UserError) as error:  # the others are measured all the same
            failed.append(f"{name}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    path = asked.results / ("claims-quick.md" if flags.quick else "claims.md")
    asked.results.mkdir(parents=True, exist_ok=True)
    path.write_text(table(asked.results, flags.quick))
    print(path)
    if failed:
        raise _cli.UserError(f"{len(failed)} of {len(CLAIMS)} claims could not be measured: {'; '.join(failed)}")


def measure(name: str, asked) -> dict:
    """The record of one claim, for a `Request`; also kept in results/claims."""
    from experiments._claims import CLAIMS, command, verdict

    claim = CLAIMS[name]
    m = claim.measure(asked)
    line = {
        "claim": name,
        "reported": claim.effect if claim.reported is None else claim.reported,
        "reported_baseline": claim.reported_baseline,
        "reported_effect": None if claim.effect is None else round(claim.effect, 2),
        "measured": m.value,
        "measured_baseline": m.baseline,
        "measured_in": claim.measured_in,
        "effect": m.effect[0],
        "interval": m.effect[1:],
        "unit": claim.unit,
        "reproduced": verdict(m.effect, claim.effect, m.null),
        "command": command(name, asked),
        "sizes": m.sizes,
        "seeds": m.seeds,
        "notes": m.notes,
    }
    line = {k: plain(v) for k, v in line.items()}
    folder = asked.results / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}{'-quick' * asked.quick}.json").write_text(json.dumps(line, indent=1))
    return line


def plain(value):
    """Without NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(results: pathlib.Path, quick: bool) -> str:
    """One row per measured claim, as Markdown."""
    from experiments._claims import CLAIMS
    from sao_jax.report.text import number

    head = ("claim", "reported", "measured", "effect, 95 % interval", "reproduced", "seeds")
    lines = [head, ["---"] * len(head)]
    for name in CLAIMS:
        path = results / "claims" / f"{name}{'-quick' * quick}.json"
        if not path.exists():
            continue
        r = json.loads(path.read_text())
        claim = CLAIMS[name]
        reported = claim.text if claim.effect is None else f"{claim.effect:.3g} {r['unit']}"
        if claim.reported is not None and claim.reported_baseline is not None:
            reported = f"{claim.reported:g} vs {claim.reported_baseline:g} ({reported})"
        low, high = r["interval"]
        between = "" if low is None or high is None else f" [{low:.1f}, {high:.1f}]"
        measured = f"{number(r['measured'])} vs {number(r['measured_baseline'])} {claim.measured_in}".rstrip()
        effect = f"{r['effect']:.1f}{between} {r['unit']}"
        lines.append((f"`{name}`", reported, measured, effect, r["reproduced"], len(r["seeds"])))
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    _cli.main(main)
