"""What it costs to compress the memory of finished segments: a mixture of experts against simpler projections.

python -m experiments.compress --compress kv --task mathword:level=4      # the last line is JSON
python -m experiments.compress --kinds moe,pca --width 64
python -m experiments.compress --run runs/NAME                            # of a run's policy
"""

import json
import pathlib
import sys

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import _cli
from sao_jax.runtime.compression import CompressionConfig as Flags
from sao_jax.runtime.compression import compare
from sao_jax.runtime.devices import prepare_backend

OF_A_MODEL = {"task", "dim", "layers", "heads", "head_dim", "mlp_dim"}


def main(stop) -> None:
    config = _cli.parse(Flags, __doc__.splitlines()[0])
    if config.run is not None and (wrong := sorted(_cli.given() & OF_A_MODEL)):
        names = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise ValueError(f"{names}: no effect with --run, whose task and model are given")
    config.check()
    prepare_backend(config.devices)
    records = compare(config, lambda line: print(line, file=sys.stderr, flush=True), stop.check)
    show(records)
    print(json.dumps(records))


def show(records: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = {
        "kind": "compressor",
        "bytes_per_token": "bytes per token",
        "reconstruction": "variance lost, %",
        "nll": "nats per action token",
        "nll_change": "change, %",
        "value": "value error",
        "value_change": "change, %",
    }
    for use in dict.fromkeys(r["use"] for r in records):
        table = Table(title=f"{use}, held-out attempts")
        for name, heading in columns.items():
            table.add_column(heading, justify="left" if name == "kind" else "right")
        for record in (r for r in records if r["use"] == use):
            table.add_row(*(_shown(name, record.get(name)) for name in columns))
        Console().print(table)


def _shown(name: str, value) -> str:
    if value is None:
        return ""
    if name == "kind":
        return {"none": "uncompressed"}.get(value, value)
    if name == "reconstruction":
        return f"{100 * value:.3f}"
    return (
        f"{value:+.2f}" if name.endswith("change") else f"{value:,.0f}" if name.startswith("bytes") else f"{value:.4f}"
    )


if __name__ == "__main__":
    _cli.main(main)
