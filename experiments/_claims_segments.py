"""How memory and time of a trajectory grow with its length: whole, in a group of 8, and in segments.

Host memory is the growth of the peak resident size of a process that builds the trajectories, stores them and reads
them back, one process per figure. Training memory is the compiler's own count for one gradient step; nothing is
allocated for it, so that lengths which fit no machine are counted as well.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments._claim import Claim, Measured, Request, must
from sao_jax.data.segments import Segment, SegmentReader, new_segment, save_segment
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.trajectory import TrajectoryBuilder, load_trajectory, save_trajectory

GROUP, SEGMENT_STEPS = 8, 100
ACTION, OBSERVATION = 7, 3  # tokens of a step
STEP = ACTION + OBSERVATION
CONTEXT = 1024  # tokens before a segment that it is trained with
VOCABULARY = 512
TIMED = 16_384  # tokens of one gradient step up to which it is run; memory is counted for all
LAYOUTS = ("group", "whole", "segments")
ROOT = pathlib.Path(__file__).parents[1]


def steps_of(builders: list[TrajectoryBuilder], steps: int):
    """Grows all of them side by side; yields after each step."""
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        for builder in builders:
            tokens = rng.integers(0, VOCABULARY, STEP)
            builder.add_action(tokens[:ACTION], -rng.random(ACTION), [step // 1000] * ACTION)
            builder.end_action()
            builder.add_observation(tokens[ACTION:])
        yield step


def whole(store: TrajectoryStore, steps: int, count: int) -> int:
    """`count` trajectories, each stored when it has ended, and all read to be trained together; returns tokens read."""
    builders = [TrajectoryBuilder(range(STEP), rollout=i) for i in range(count)]
    for _ in steps_of(builders, steps):
        pass
    places = []
    while builders:
        places.append(store.append(save_trajectory(builders.pop(0).build("terminated"))))
    group = [load_trajectory(store.read(place)) for place in places]
    return sum(t.length for t in group)


def in_segments(store: TrajectoryStore, steps: int) -> int:
    """One trajectory of which neither the writer nor the reader holds more than a segment; returns tokens read."""
    builder, places = TrajectoryBuilder(range(STEP)), []
    for step in steps_of([builder], steps):
        if step % SEGMENT_STEPS == 0 or step == steps:
            end = "terminated" if step == steps else ""
            segment = new_segment(builder, steps_per_segment=SEGMENT_STEPS, end=end, forget=True)
            places.append(store.append(save_segment(segment)))
    return sum(_read(segment) for segment in SegmentReader(store, places))


def _read(segment: Segment) -> int:
    """Every column of it, as a training row would be made from them."""
    columns = (segment.tokens, segment.action_mask, segment.rollout_logp, segment.rewards, segment.version)
    must("" if all(np.isfinite(column.sum()) for column in columns) else "a stored segment is damaged")
    return segment.length


def in_this_process(layout: str, steps: int) -> dict[str, float]:
    """MiB by which the peak resident size grows, seconds of this process, and bytes on disk per token."""
    before, start = _resident("VmRSS"), time.process_time()
    with tempfile.TemporaryDirectory() as folder, TrajectoryStore(folder) as store:
        tokens = in_segments(store, steps) if layout == "segments" else whole(store, steps, _count(layout))
        stored = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
    must("" if tokens == _count(layout) * (steps + 1) * STEP else f"{tokens} tokens were read back")
    return {
        "mib": _resident("VmHWM") - before,
        "seconds": time.process_time() - start,
        "bytes_per_token": stored / tokens,
    }


def _resident(field: str) -> float:
    """MiB, now (VmRSS) or at most so far (VmHWM). `getrusage` would begin with the peak of the parent process."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}: resident sizes are measured on Linux")


def host(layout: str, steps: int) -> dict[str, float]:
    """`in_this_process`, in one of its own."""
    command = [sys.executable, "-m", "experiments._claims_segments", layout, str(steps)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    must(f"{layout} of {steps} steps: {result.stderr.strip()[-300:]}" if result.returncode else "")
    return json.loads(result.stdout)


def _count(layout: str) -> int:
    return GROUP if layout == "group" else 1


class Step:
    """One gradient of a policy loss, by a tiny decoder, on rows of `length` tokens whose last `trained` count."""

    def __init__(self, rows: int, length: int, trained: int):
        import jax
        import jax.numpy as jnp

        from sao_jax.models.config import ModelConfig
        from sao_jax.models.decoder import bind, init_params
        from sao_jax.models.logprobs import token_logprobs

        model = ModelConfig(vocab_size=VOCABULARY, dim=64, num_layers=2)

        def loss(params, tokens, weights):
            bound = bind(model, params)
            hidden = bound(tokens)[:, -trained - 1 : -1].reshape(rows * trained, -1)
            targets = tokens[:, -trained:].reshape(-1)
            logp, _ = token_logprobs(hidden, bound.head(), targets, jnp.ones(rows * trained))
            return -jnp.sum(logp * weights.reshape(-1))

        self._shape, self._trained = (rows, length), trained
        self._params = lambda: jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
        params = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
        like = jax.ShapeDtypeStruct
        self._compiled = (
            jax.jit(jax.grad(loss))
            .lower(params, like((rows, length), jnp.int32), like((rows, trained), jnp.float32))
            .compile()
        )

    def mib(self) -> float:
        """What the compiler sets aside for it: arguments, results and everything between."""
        m = self._compiled.memory_analysis()
        return (m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes) / 2**20

    def seconds(self, repetitions: int) -> float:
        import jax

        from experiments.bench import median_seconds

        rng, params = np.random.default_rng(0), self._params()
        tokens = rng.integers(0, VOCABULARY, self._shape).astype(np.int32)
        weights = rng.random((self._shape[0], self._trained)).astype(np.float32)
        call = lambda: jax.block_until_ready(self._compiled(params, tokens, weights))  # noqa: E731
        return median_seconds(call, repetitions)


def segments(asked: Request) -> Measured:
    """Training memory at the longest trajectory of the table: one segment with its context, and a group of 8 whole.

    The notes have host and training memory at every length, and time: that of one segment's step times their number,
    and of whole rows as far as they are run.
    """
    quick = asked.quick
    lengths = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    notes: dict[str, dict[str, float]] = {}
    for steps in lengths:
        for layout in LAYOUTS:
            asked.check()
            figures = host(layout, steps)
            notes[f"host, {steps} steps, {layout}"] = {k: round(v, 2) for k, v in figures.items()}
    size = SEGMENT_STEPS * STEP
    own = Step(1, CONTEXT + size, size)
    each = own.seconds(5)
    measured = {}
    for steps in lengths:
        parts = steps // SEGMENT_STEPS
        notes[f"training, {steps} steps, segments"] = {"mib": round(own.mib(), 1), "seconds": round(each * parts, 2)}
        for layout in ("whole", "group") if not quick or steps == lengths[0] else ("group",):
            asked.check()
            step = Step(_count(layout), steps * STEP, steps * STEP - 1)
            measured[layout, steps] = step.mib()
            figures = {"mib": round(step.mib(), 1)}
            if not quick and _count(layout) * steps * STEP <= TIMED:
                figures["seconds"] = round(step.seconds(1), 2)
            notes[f"training, {steps} steps, {layout}"] = figures
    value, baseline = own.mib(), measured["group", lengths[-1]]
    effect = 100 * (1 - value / baseline)
    sizes = {"steps": lengths[-1], "tokens per step": STEP, "group": GROUP, "steps per segment": SEGMENT_STEPS}
    sizes |= {"context": CONTEXT, "model": "64 wide, 2 layers", "unit": "MiB of one gradient step"}
    return Measured((effect, math.nan, math.nan), value, baseline, [0], sizes, notes)


CLAIMS = {
    "segments": Claim(
        "memory of training that grows with the length (> 40 TB for groups of 1,000 steps at 750B)",
        None, None, None, "% less", segments, "MiB",
    ),
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(in_this_process(sys.argv[1], int(sys.argv[2]))))
