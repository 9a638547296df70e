"""Speed of the parts and of the whole, as JSON lines, each against what this machine can do.

    python -m experiments.bench                  # everything; several minutes
    python -m experiments.bench --only sampler   # one of update, packing, sampler, loop, gae
    python -m experiments.bench --quick          # small, to see that it works

The reference model has vocabulary 512, width 128, 4 layers, 4 heads with 2 key/value heads of 32, MLP 384 (0.85 M
parameters), in float32. Times are medians over repetitions.
"""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Literal

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from experiments import _cli

REFERENCE = dict(dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=384)
VOCABULARY = 512
TASK = f"sao_jax.envs.fixed_length:FixedLength:prompt=32,new=64,vocab_size={VOCABULARY}"


@dataclasses.dataclass(frozen=True)
class Flags:
    only: Literal["update", "packing", "sampler", "loop", "gae"] | None = None
    """Measure one part."""
    quick: bool = False
    """Few repetitions and small sizes."""
    devices: int | None = None
    """Devices (default: all; on CPU one virtual device per core)."""


def main(stop) -> None:
    flags = _cli.parse(Flags, __doc__.splitlines()[0])
    from sao_jax.runtime.devices import prepare_backend

    prepare_backend(flags.devices)
    for name, measure in (("update", update), ("packing", packing), ("sampler", sampler), ("loop", loop), ("gae", gae)):
        if flags.only in (None, name):
            for line in measure(flags.quick):
                stop.check()
                print(json.dumps({"bench": name, **line}), flush=True)


def median_seconds(call, repetitions: int) -> float:
    """Median time of `call()`, which must wait for its result."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_rate(repetitions: int, size: int = 2048) -> float:
    """FLOP/s of a float32 product of two size x size matrices, its rows split over all devices."""
    import jax
    import numpy as np

    from sao_jax.runtime.devices import data_mesh

    mesh = data_mesh()
    a = jax.device_put(np.ones((size, size), np.float32), jax.NamedSharding(mesh, jax.P("data")))
    b = jax.device_put(np.ones((size, size), np.float32), jax.NamedSharding(mesh, jax.P()))
    spec = dict(mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
    product = jax.jit(jax.shard_map(lambda a, b: a @ b, **spec))
    jax.block_until_ready(product(a, b))
    return 2 * size**3 / median_seconds(lambda: jax.block_until_ready(product(a, b)), max(5, repetitions))


def forward_flops(model, length: int, *, head: bool) -> float:
    """Matrix-multiply FLOPs per token of a forward pass; causal attention counted as the half that is needed."""
    m = model
    weights = m.dim * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim + m.num_heads * m.head_dim * m.dim
    weights += 3 * m.dim * m.mlp_dim
    attention = 2 * 2 * m.num_heads * m.head_dim * length / 2
    return m.num_layers * (2 * weights + attention) + (2 * m.dim * m.vocab_size if head else 0)


def update(quick: bool):
    """The learner's real update on 64 x 256 tokens: gradient calls per micro-batch, then the boundary.

    "policy" is an update without a critic and without smoothing; "sao" has the critic trained twice and the KL
    evaluated for smoothing. FLOPs: three forward passes for a gradient, one for each evaluation.
    """
    import numpy as np

    from sao_jax.data.rows import blank_row
    from sao_jax.runtime.config import RunConfig
    from sao_jax.runtime.devices import data_mesh

    batch, length, repetitions = (16, 256, 3) if quick else (64, 256, 9)
    mesh, rng = data_mesh(), np.random.default_rng(0)
    rows = []
    for _ in range(batch):
        row = blank_row(length)
        row["tokens"][:] = rng.integers(0, VOCABULARY, length)
        row["action_mask"][1:] = True
        row["rollout_logp"][1:] = -np.log(VOCABULARY)
        row["rewards"][-1] = rng.integers(0, 2)
        rows.append(row | {"length": np.int32(length), "lambda_": np.float32(0.99), "advantage": np.float32(0.5)})
    cases = {
        "policy": RunConfig(baseline="batch_mean", kl="off", **REFERENCE),
        "sao": RunConfig(freeze_critic="none", **REFERENCE),
        "sao, attention of the critic frozen": RunConfig(**REFERENCE),
    }
    for name, config in cases.items():
        config = config.resolved()
        model = config.model(VOCABULARY)
        learner = fresh_learner(config, VOCABULARY, batch, length, micro_rows=max(1, 1024 // length))

        one_update(learner, rows)
        one_update(learner, rows)
        rates, seconds = [], []
        for _ in range(3):  # the machine's own speed drifts: measure it beside
            rates.append(matmul_rate(repetitions))
            seconds.append(median_seconds(lambda: one_update(learner, rows), max(2, repetitions // 3)))  # noqa: B023
        inside, whole = compiled_seconds(learner, rows, max(2, repetitions // 3))
        policy_flops = forward_flops(model, length, head=True) * (3 + (config.kl == "smooth"))
        critic_flops = 3 * 2 * forward_flops(model, length, head=False) if config.has_critic else 0
        rate, tokens = statistics.median(rates), batch * length
        second = statistics.median(seconds)
        flops = tokens * (policy_flops + critic_flops)
        yield {
            "case": name,
            "shape": [batch, length],
            "devices": mesh.size,
            "seconds": round(second, 4),
            "tokens_per_s": round(tokens / second),
            "gflops": round(flops / second / 1e9, 1),
            "matmul_gflops": round(rate / 1e9, 1),
            "share_of_matmul": round(flops / second / rate, 3),
            "share_outside_compiled": round(1 - inside / whole, 3),
        }


def fresh_learner(config, vocabulary: int, batch: int, length: int, **layout):
    """A learner of a resolved configuration with new parameters, on all devices."""
    import jax

    from sao_jax.learner.layout import Layout
    from sao_jax.learner.learner import Learner
    from sao_jax.models.decoder import init_params
    from sao_jax.runtime.devices import data_mesh

    model, mesh = config.model(vocabulary), data_mesh()
    policy = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    fitted = Layout.fit(batch, length, mesh.size, **layout)
    return Learner(model, config.choices(), config.numbers(), fitted, mesh, policy)


def packing(quick: bool):
    """The same update on trajectories of mixed length, up to 256 tokens: a row for each, and rows shared by several.

    Lengths are lognormal with median 64, so that most are much shorter than the row; the update is the full one.
    """
    import numpy as np

    from sao_jax.data.packing import pieces_of
    from sao_jax.data.rows import blank_row
    from sao_jax.runtime.config import RunConfig
    from sao_jax.runtime.devices import data_mesh

    batch, length, repetitions = (16, 256, 1) if quick else (64, 256, 5)
    mesh, rng, rows = data_mesh(), np.random.default_rng(0), []
    for tokens in np.clip(rng.lognormal(np.log(64), 0.6, batch), 16, length).astype(int):
        row = blank_row(length)
        row["tokens"][:tokens] = rng.integers(0, VOCABULARY, tokens)
        row["action_mask"][1:tokens] = True
        row["rollout_logp"][1:tokens] = -np.log(VOCABULARY)
        row["rewards"][tokens - 1] = rng.integers(0, 2)
        rows.append(row | {"length": np.int32(tokens), "lambda_": np.float32(0.99)})
    config = RunConfig(**REFERENCE).resolved()
    learners = {}
    for pieces in (1, pieces_of(length)):
        learners[pieces] = fresh_learner(config, VOCABULARY, batch, length, micro_rows=2, pieces=pieces)
        one_update(learners[pieces], rows)
        one_update(learners[pieces], rows)
    seconds = {pieces: [] for pieces in learners}
    for _ in range(repetitions):  # in turn, because the machine's own speed drifts
        for pieces, learner in learners.items():
            seconds[pieces].append(median_seconds(lambda: one_update(learner, rows), 1))  # noqa: B023
    tokens, (alone, shared) = sum(int(row["length"]) for row in rows), (statistics.median(s) for s in seconds.values())
    yield {
        "shape": [batch, length],
        "devices": mesh.size,
        "tokens": tokens,
        "tokens_per_s": round(tokens / alone),
        "packed_tokens_per_s": round(tokens / shared),
        "ratio": round(alone / shared, 2),
    }


class TimedPrograms:
    """A learner's programs, each call waited for and timed."""

    CALLS, FACTORIES = ("put", "whiten", "policy_step", "clear"), ("window", "critic_step")

    def __init__(self, programs):
        self._programs, self.seconds = programs, 0.0

    def __getattr__(self, name):
        value = getattr(self._programs, name)
        if name in self.CALLS:
            return self._timed(value)
        if name in self.FACTORIES:
            return lambda *choices: self._timed(value(*choices))
        return value

    def _timed(self, program):
        import jax

        def call(*arguments):
            start = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            self.seconds += time.perf_counter() - start
            return result

        return call


def compiled_seconds(learner, rows, repetitions: int) -> tuple[float, float]:
    """(seconds in compiled programs, seconds in all) of an update, one program after the other; medians."""
    timed = learner.programs = TimedPrograms(learner.programs)
    inside, whole = [], []
    for _ in range(repetitions):
        timed.seconds, start = 0.0, time.perf_counter()
        one_update(learner, rows)
        inside.append(timed.seconds)
        whole.append(time.perf_counter() - start)
    learner.programs = timed._programs
    return statistics.median(inside), statistics.median(whole)


def one_update(learner, rows) -> None:
    import jax

    for row in rows:
        learner.put(row)
        if learner.window_ready and learner.choices.critic_update == "batch":
            learner.accumulate()
    jax.block_until_ready(learner.update())


def sampler(quick: bool):
    """The engine with requests that keep arriving: prompt 64, 192 new tokens."""
    import jax
    import numpy as np

    from sao_jax.models.decoder import init_params
    from sao_jax.rollout.engine import Engine, Request
    from sao_jax.runtime.config import RunConfig
    from sao_jax.runtime.devices import data_mesh

    model = RunConfig(**REFERENCE).model(VOCABULARY)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    rng = np.random.default_rng(0)
    for slots in (1, 8) if quick else (1, 8, 32, 64):
        mesh = data_mesh(1 if slots == 1 else None)
        engine = Engine(model, params, mesh=mesh, slots=slots, context=256, stop_ids=(), seed=0, burst=32)
        engine.warm_up()
        requests = iter(range(10**9))
        left = {}

        def fill(engine=engine, requests=requests, left=left):
            while engine.free:
                number = next(requests)
                # Different lengths, so that rows join and leave at different times.
                prompt, new = int(rng.integers(48, 81)), int(rng.integers(160, 176))
                engine.submit(Request(number, 0, rng.integers(1, VOCABULARY, prompt), new))
                left[number] = new

        def turns(seconds, engine=engine, fill=fill):
            tokens, start = 0, time.perf_counter()
            fill()
            engine.dispatch()
            while time.perf_counter() - start < seconds:
                for piece in engine.collect():
                    tokens += len(piece.tokens)
                    if piece.done:
                        engine.release(piece.rollout)
                fill()
                engine.dispatch()
            engine.collect()
            return tokens / (time.perf_counter() - start)

        turns(0.5)
        rates = [turns(1.0 if quick else 3.0) for _ in range(1 if quick else 5)]
        yield {
            "slots": slots,
            "devices": mesh.size,
            "burst": 32,
            "prompt": 64,
            "new": 168,
            "tokens_per_s": round(statistics.median(rates)),
            "min": round(min(rates)),
            "max": round(max(rates)),
        }


def loop(quick: bool):
    """The whole loop, ledger and storage included, at 64 rollouts a batch, prompt 32 and 64 new tokens.

    "grpo": 8 prompts x 8, clipped ratio. "sao": 64 tasks, critic trained twice, KL smoothing. "main job": the small
    model on the calculator task, where actions are short. `learner_idle_share` is the share of the wall clock in which
    the learner's programs (timed one by one afterwards) do not run: the sampler has the devices, or nothing has.
    """
    import jax

    from sao_jax.data.rows import blank_row
    from sao_jax.report.progress import Display
    from sao_jax.runtime.config import RunConfig
    from sao_jax.runtime.loop import Loop
    from sao_jax.runtime.loop_metrics import LoopMetrics
    from sao_jax.runtime.metrics import read_metrics
    from sao_jax.runtime.run import open_run

    updates = 6 if quick else 40
    base = dict(warm_start_steps=0, rollouts=64 * updates, eval_every=0)
    common = base | dict(task=TASK, burst=32) | REFERENCE
    cases = {
        "grpo": RunConfig(preset="grpo", drop_dead_groups=False, **common),
        "sao": RunConfig(preheat_rollouts=0, **common),
        "main job": RunConfig(preheat_rollouts=0, **base),
    }
    for name, config in cases.items():
        config = dataclasses.replace(config.resolved(), checkpoint_every=10**6)
        with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere:
            from rich.console import Console

            run = open_run(config, pathlib.Path(folder), resume=False)
            with contextlib.closing(run), Display(Console(file=nowhere)) as display:
                display.stage(name, config.rollouts, "rollouts")
                run.agents.warm_up()
                run.learner.warm_up(blank_row(run.learner.layout.length), preheat=False)
                metrics = LoopMetrics(run, display)
                host = Loop(run, first_rollout=0, check=lambda: None, metrics=metrics)
                host.go()
                jax.block_until_ready(run.learner.state["policy"])
                trained = [r.id for r in run.ledger.stored() if r.state == "trained"][:64]
                rows = [host.row(run.trajectory(rollout)) for rollout in trained]
                inside, _ = compiled_seconds(run.learner, rows, 3 if quick else 10)
                lines = [m for m in read_metrics(run.folder / "metrics.jsonl") if m["stage"] == "rl"]
        skip = max(1, len(lines) // 8)
        span = lines[-1]["time_s"] - lines[skip]["time_s"]
        tokens = sum(64 * m["response_length/mean"] for m in lines[skip + 1 :])
        timing = {k: sum(m.get(k, 0.0) for m in lines[skip + 1 :]) for k in lines[-1] if k.startswith("timing_s/")}
        yield {
            "case": name,
            "devices": run.mesh.size,
            "updates": len(lines) - skip - 1,
            "completion_tokens_per_s": round(tokens / span),
            "ms_per_update": round(1e3 * span / (len(lines) - skip - 1), 1),
            "learner_idle_share": round(1 - inside * (len(lines) - skip - 1) / span, 3),
            "publish_latency_s": round(statistics.median(m["async/publish_latency_s"] for m in lines[skip:]), 3),
            "recompilations": lines[-1]["perf/recompilations"],
            "staleness_mean": round(statistics.mean(m["async/staleness_mean"] for m in lines[skip:]), 2),
            **{k: round(v / span, 3) for k, v in timing.items()},
        }


def gae(quick: bool):
    """Skip-observation GAE of one trajectory, and of 64, half of the tokens observations."""
    import jax
    import numpy as np

    from sao_jax.objectives.advantages import gae

    rng = np.random.default_rng(0)
    for rows in (1, 64):
        for length in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
            rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32)
            mask = rng.random((rows, length)) < 0.5
            run = jax.jit(jax.vmap(lambda r, v, m: gae(r, v, m, discount=0.99, lambda_=0.95)))
            arrays = jax.device_put((rewards, values, mask), jax.devices()[0])
            jax.block_until_ready(run(*arrays))
            seconds = median_seconds(lambda: jax.block_until_ready(run(*arrays)), 5 if quick else 30)  # noqa: B023
            yield {"rows": rows, "length": length, "ms": round(1e3 * seconds, 3)}


if __name__ == "__main__":
    _cli.main(main)
