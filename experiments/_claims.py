"""How each claim is measured. An entry is a function of a `Request` that returns a `Measured`."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments._ablations import BASE, METHODS, PRESETS
from experiments._claim import Claim, Interval, Measured, Request, must
from experiments._claims_actions import action_only
from experiments._claims_checkpointing import CLAIMS as CHECKPOINTING
from experiments._claims_compression import CLAIMS as COMPRESSION
from experiments._claims_guided import CLAIMS as GUIDED
from experiments._claims_overlap import throughput, utilization
from experiments._claims_runtime import hot_spots, recovery, scheduling_latency
from experiments._claims_segments import CLAIMS as SEGMENTS
from experiments._claims_tasks import CLAIMS as TASKS
from experiments.ablate import Flags as AblateFlags
from experiments.ablate import compare, finish_run, plan, warm_flags, warm_folder
from sao_jax.report import comparison
from sao_jax.report.intervals import mean_interval, ratio_interval


def _cells(preset: str, methods: tuple[str, ...], asked: Request) -> list[comparison.Cell]:
    """Cells of a preset, run where they are missing."""
    chosen = ",".join(methods) if set(methods) != set(PRESETS[preset].methods) else None
    flags = AblateFlags(preset=preset, methods=chosen, results=str(asked.results), quick=asked.quick, seeds=asked.seeds)
    return compare(plan(preset, flags), asked.check)


def _paired(
    cells, a: str, b: str, figure: Callable[[comparison.Cell], float]
) -> tuple[list[float], list[float], list[int]]:
    first, second = ({c.seed: figure(c) for c in cells if c.method == m} for m in (a, b))
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise ValueError(f"no seed has finished runs of both {a} and {b}")
    return [first[s] for s in seeds], [second[s] for s in seeds], seeds


def _sizes(cells) -> dict[str, Any]:
    return {"rollouts": int(max(c.rollouts[-1] for c in cells)), "held_out": cells[0].n, "runs": len(cells)}


def accuracy(preset: str) -> Callable[..., Measured]:
    """Final held-out success of SAO and GRPO at equal rollouts, in points."""

    def measure(asked) -> Measured:
        cells = _cells(preset, ("sao", "grpo"), asked)
        a, b, seeds = _paired(cells, "sao", "grpo", lambda c: 100 * c.final)
        effect = mean_interval([x - y for x, y in zip(a, b, strict=True)])
        return Measured(effect, statistics.fmean(a), statistics.fmean(b), seeds, _sizes(cells))

    return measure


def _rollouts_to(c: comparison.Cell, level: float) -> float:
    """Rollouts to a level; a run that does not get there counts as its whole budget."""
    reached = c.reaches(level)
    return float(c.rollouts[-1]) if reached is None else reached


def _saved(a: list[float], b: list[float]) -> list[float]:
    """By how many per cent each of `a` is below its partner; a partner of 0 leaves nothing to save."""
    return [100 * (1 - x / y) if y else 0.0 if x == 0 else -math.inf for x, y in zip(a, b, strict=True)]


def steps_to_accuracy(asked: Request) -> Measured:
    """Rollouts to 95 % of GRPO's mean final success; a run that does not get there counts as its whole budget."""
    cells = _cells("dis-vs-grpo", ("sao", "grpo"), asked)
    level = comparison.NEAR * statistics.fmean(c.final for c in cells if c.method == "grpo")
    a, b, seeds = _paired(cells, "sao", "grpo", lambda c: _rollouts_to(c, level))
    effect = mean_interval(_saved(a, b))
    censored = {m: sum(c.reaches(level) is None for c in cells if c.method == m) for m in ("sao", "grpo")}
    return Measured(
        effect,
        statistics.fmean(a),
        statistics.fmean(b),
        seeds,
        _sizes(cells),
        {"level": level, "not_reached": censored},
    )


def preheating(asked: Request) -> Measured:
    """Rollouts, preheating included, to 95 % of the final success of SAO without preheating."""
    methods = ("sao", "sao no preheating")
    cells = _cells("preheating", methods, asked)
    level = comparison.NEAR * statistics.fmean(c.final for c in cells if c.method == methods[1])
    a, b, seeds = _paired(cells, *methods, lambda c: _rollouts_to(c, level))
    effect = mean_interval(_saved(a, b))
    return Measured(effect, statistics.fmean(a), statistics.fmean(b), seeds, _sizes(cells), {"level": level})


def kl_bound(asked: Request) -> Measured:
    """Share of updates after which KL(rollout || new) is within .05, with smoothing and without any mechanism, where
    the data are oldest and the learning rate is highest; all points, and the penalty, are in the notes."""
    methods = ("sao", "sao kl measured", "sao kl penalty")
    cells = _cells("kl", methods, asked)
    hardest = {name: max(values) for name, values in PRESETS["kl"].grid.items()}
    a, b, seeds = _paired([c for c in cells if c.point == hardest], *methods[:2], lambda c: 100 * c.health["kl_within"])
    share: dict[str, list[float]] = {}
    for c in cells:
        share.setdefault(c.label, []).append(100 * c.health["kl_within"])
    notes = {label: round(statistics.fmean(v), 2) for label, v in share.items()}
    null = statistics.fmean(b)  # what no mechanism keeps within the bound
    # Of the share with smoothing, as far as it differs from that of the same seed without.
    effect = mean_interval([null + x - y for x, y in zip(a, b, strict=True)])
    return Measured(effect, statistics.fmean(a), null, seeds, _sizes(cells), notes, null=null)


def update_latency(asked: Request) -> Measured:
    """Seconds of the clock from a trajectory's end to weights that contain it, under slow environments: of each update
    the median over its trajectories, of a run the median over its updates; the 99 % quantile over them in the notes."""
    cells = _cells("dis-vs-grpo", ("sao", "grpo"), asked)
    a, b, seeds = _paired(cells, "sao", "grpo", lambda c: c.health["latency"])
    *late, _ = _paired(cells, "sao", "grpo", lambda c: c.health["latency_p99"])
    effect = ratio_interval([y / x for x, y in zip(a, b, strict=True)])
    notes = {
        f"{method}, updates of a run, p50 / p99 [s]": [
            round(statistics.fmean(middle), 2),
            round(statistics.fmean(p), 2),
        ]
        for method, middle, p in zip(("sao", "grpo"), (a, b), late, strict=True)
    }
    return Measured(effect, statistics.fmean(a), statistics.fmean(b), seeds, _sizes(cells), notes, null=1.0)


def value_error(asked: Request) -> Measured:
    """Value error of the critic (mc, dis) and of GRPO's group mean at prompts and inside attempts."""
    import jax
    import jax.numpy as jnp

    from sao_jax.models.critic import critic_outputs
    from sao_jax.runtime.run import make_agents, read_config, restored_engine
    from sao_jax.runtime.value_error import prefixes, runner, value_errors

    quick, check = asked.quick, asked.check
    seeds = list(range(asked.seeds or (1 if quick else 3)))
    count, continuations = (8, 64) if quick else (32, 256)
    rollouts = 512 if quick else 3584
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        start = warm_folder(asked.results, BASE["task"], seed, quick)
        must(finish_run(start, warm_flags(BASE["task"], seed, quick), check))
        for targets in ("mc", "dis"):
            folder = asked.results / ("value-error-quick" if quick else "value-error") / f"{targets}_s{seed}"
            flags = BASE | METHODS["sao"] | dict(critic_targets=targets, seed=seed, rollouts=rollouts, eval_every=0)
            flags |= dict(env_seconds=0.1, init_from=str(start.resolve()))
            must(finish_run(folder, flags, check))
            config = read_config(folder)
            engine, family, context, state, _ = restored_engine(config, folder)
            agents = make_agents(config, family, context, engine)
            outputs = jax.jit(lambda params, tokens, model=engine.config: critic_outputs(model, params, tokens))

            def critic(chosen, state=state, outputs=outputs, context=context):
                rows = np.zeros((len(chosen), context), np.int32)
                for row, p in zip(rows, chosen, strict=True):
                    row[: len(p.tokens)] = p.tokens
                values = np.asarray(outputs(state["critic"], jnp.asarray(rows)))
                return values[np.arange(len(chosen)), [len(p.tokens) - 1 for p in chosen]]

            play = runner(agents, seed + 1, check)
            prompts, inside = prefixes(agents, count, seed, run=play)
            errors = value_errors(
                play, {"prompts": prompts, "inside": inside}, {"critic": critic},
                continuations=continuations, reward_range=1.0,
            )  # fmt: skip
            for kind, row in errors.items():
                for name, error in row.items():
                    found.setdefault(kind, {}).setdefault(f"{name} {targets}", []).append(error)
    everywhere = {
        name: [statistics.fmean(pair) for pair in zip(*(found[k][name] for k in found), strict=True)]
        for name in found["prompts"]
    }
    ours, theirs = everywhere["critic dis"], everywhere["group mean dis"]
    effect = mean_interval([100 * (1 - a / b) for a, b in zip(ours, theirs, strict=True)])
    notes = {f"{k}: {n}": round(statistics.fmean(v), 2) for k, row in found.items() for n, v in row.items()}
    sizes = {"prefixes": 2 * count, "continuations": continuations, "rollouts": rollouts}
    return Measured(effect, statistics.fmean(ours), statistics.fmean(theirs), seeds, sizes, notes)


CLAIMS: dict[str, Claim] = {
    "value-error": Claim(
        "error of the value estimate", 6.3, 18.7, 100 * (1 - 6.3 / 18.7), "% less error", value_error, "points"
    ),
    "steps-to-accuracy": Claim(
        "rollouts to the same accuracy", None, None, 58.0, "% fewer", steps_to_accuracy, "rollouts"
    ),
    "accuracy-math": Claim("success on mathematics", 97.3, 84.2, 13.1, "points", accuracy("math"), "%"),
    "accuracy-contest": Claim("success on contest programs", 42.7, 35.1, 7.6, "points", accuracy("contest"), "%"),
    "accuracy-repair": Claim("success on software repair", 29.8, 21.5, 8.3, "points", accuracy("repair"), "%"),
    "preheating": Claim(
        "faster convergence with a preheated value model", None, None, None, "% fewer", preheating, "rollouts"
    ),
    "kl-bound": Claim("KL(rollout || new) at or under 0.05", 100.0, None, 100.0, "% of updates", kl_bound, "%"),
    "action-only": Claim("computation of head, loss and recursion", None, None, 40.0, "% less", action_only, "%"),
    "utilization": Claim("devices busy, % of the time", 92.0, 40.0, 52.0, "points", utilization, "%"),
    "throughput": Claim("samples per second", 74.0, 32.0, 2.3, "times as many", throughput, "samples/s"),
    "scheduling-latency": Claim(
        "p99 from task ready to started", 3.0, 12.0, 4.0, "times shorter", scheduling_latency, "ms"
    ),
    "hot-spots": Claim("fewer hot spots, simulated", None, None, None, "% less", hot_spots, "% of the time"),
    "recovery": Claim(
        "recovery in minutes instead of hours", None, None, None, "times shorter than a minute", recovery, "s"
    ),
    "update-latency": Claim(
        "publication in seconds instead of minutes", None, None, 60.0, "times shorter", update_latency, "s"
    ),
}
CLAIMS |= SEGMENTS | COMPRESSION | CHECKPOINTING | TASKS | GUIDED


def verdict(effect: Interval, reported: float | None, null: float = 0.0) -> str:
    """yes: the interval reaches the reported effect, if one was reported in numbers, and excludes the effect that means
    nothing; partly: it excludes that, in the right direction; no: else. Without an interval the figure stands for
    itself."""
    mean, low, high = effect
    if math.isnan(low):
        low = high = mean
    if (reported is None or high >= reported) and low > null:
        return "yes"
    return "partly" if low > null else "no"


def command(name: str, asked: Request) -> str:
    seeds = "" if asked.seeds is None else f" --seeds {asked.seeds}"
    return f"python -m experiments.claims {name}" + " --quick" * asked.quick + seeds
