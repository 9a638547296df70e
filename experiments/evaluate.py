"""Held-out success of a run's newest weights, with a 95 % interval; the last line is JSON.

python -m experiments.evaluate runs/NAME
python -m experiments.evaluate runs/NAME --greedy --n 2048 --show 3
"""

import dataclasses
import json
import pathlib
import sys

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tyro

from experiments import _cli


@dataclasses.dataclass(frozen=True)
class Flags:
    run: tyro.conf.Positional[str]
    """Folder of the run."""
    n: int = 512
    """Held-out instances, the first n of the task's test split."""
    greedy: bool = False
    """Take the likeliest token instead of sampling at the run's temperature."""
    show: int = 0
    """Print this many of the attempts."""
    slots: int | None = None
    """Rows of the sampler (default: as in training)."""
    devices: int | None = None
    """Devices to use (default: as in training)."""


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    for name, low in (("n", 1), ("show", 0), ("slots", 1), ("devices", 1)):
        value = getattr(flags, name)
        if value is not None and value < low:
            raise ValueError(f"--{name} is {value}; it must be at least {low}")
    from sao_jax.runtime.devices import prepare_backend
    from sao_jax.runtime.run import read_config

    folder = pathlib.Path(flags.run)
    config = read_config(folder)
    config = dataclasses.replace(config, slots=flags.slots or config.slots, devices=flags.devices or config.devices)
    prepare_backend(config.devices)

    from sao_jax.report.intervals import wilson
    from sao_jax.report.progress import Display
    from sao_jax.report.recall import recall_by_distance
    from sao_jax.runtime.evaluation import evaluate
    from sao_jax.runtime.run import restored_agents

    agents, version = restored_agents(config, folder)
    with Display() as display:
        display.stage("evaluation", flags.n, "instances")
        temperature = 0.0 if flags.greedy else config.temperature
        result = evaluate(
            agents,
            flags.n,
            temperature=temperature,
            seed=config.seed,
            max_attempts=config.max_attempts,
            check=stop.check,
            report=display.advance,
        )
    for t in result.trajectories[: flags.show]:
        print(f"reward {t.total_reward:g}  {agents.family.tokenizer.decode(t.tokens)}")
    low, high = wilson(result.successes, flags.n)
    figures = {"success": result.successes / flags.n, "low": low, "high": high, "n": flags.n}
    if recall := recall_by_distance(t.reward_parts for t in result.trajectories):
        figures["recall"] = {distance: row["share"] for distance, row in recall.items()}
    print(json.dumps(figures | {"version": version, "greedy": flags.greedy, "failed": result.failed}))


if __name__ == "__main__":
    _cli.main(main)
