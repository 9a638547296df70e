"""Training again from the stored trajectories of a run, in the recorded order; and, if asked, sampling them again.

On the same machine and device count the parameters and optimizer states come out bit by bit. A replay saves
checkpoints of its own and goes on from the newest when it is called again.
"""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sao_jax.data.trajectory import Trajectory
from sao_jax.data.windows import context_at
from sao_jax.rollout.engine import Request
from sao_jax.runtime.checkpoints import Checkpoints
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.evaluation import FIRST_ID
from sao_jax.runtime.hosts import Leader
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.run import Run, open_run, read_config
from sao_jax.runtime.train import Stages


def replay(
    source: pathlib.Path,
    folder: pathlib.Path,
    display,
    *,
    resample: bool = False,
    check: Callable[[], None] = lambda: None,
    leader: Leader | None = None,
) -> dict[str, Any]:
    """Replays the run in `source` into `folder`; returns figures, `identical` among them.

    `identical` compares with the newest checkpoint of the source, at the position in the log where it was saved; with
    `resample` it also says that every token and log-prob was found again.
    """
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is the run itself; a replay needs a folder of its own")
    config = read_config(source)
    if resample and config.workers:
        raise ValueError("--resample needs a run that sampled in one process; bursts of several have no common order")
    with Checkpoints(source / "checkpoints") as recorded:
        newest = recorded.newest()
        if newest is None:
            raise ValueError(f"{source} has no complete checkpoint to compare with")
        target = recorded.read_meta(newest)["position"]
        _check_preheated(config, source)
        run = open_run(config, folder, resume=(folder / "config.json").exists(), source=source, leader=leader)
        try:
            if resample and run.checkpoints.newest() is not None:
                raise ValueError(f"{folder} holds a replay already; sampling again starts from the beginning")
            sampler = Resampler(run) if resample else None
            with contextlib.closing(Stages(run, display, check)) as stages:
                stages.replay(target, sampler.observe if sampler else lambda event: None)
            state, meta = recorded.restore(newest, run.learner.programs.abstract_state())
            figures = {"version": run.learner.version, "position": target, **compare(state, run.learner.whole_state())}
            figures["identical"] &= meta["version"] == run.learner.version
            if sampler:
                figures |= sampler.figures()
                figures["identical"] &= figures["tokens_differing"] == 0 and figures["tokens_missing"] == 0
            return figures
        finally:
            run.close()


def _check_preheated(config: RunConfig, source: pathlib.Path) -> None:
    if config.has_critic and (config.preheat_rollouts or config.preheat_from):
        with Ledger(source / "ledger.sqlite", read_only=True) as ledger:
            if next(iter(ledger.events(kinds=("preheat",))), None) is None:
                raise ValueError("the recorded run ended before its critic was preheated; there is nothing to replay")


def compare(a: dict, b: dict) -> dict[str, Any]:
    """Whether two states are the same bits, and the largest difference of any number in them."""
    identical, largest = True, 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        identical &= x.tobytes() == y.tobytes()
        largest = max(largest, float(np.max(np.abs(x.astype(np.float64) - y.astype(np.float64)), initial=0.0)))
    return {"identical": identical, "largest_difference": largest}


class Resampler:
    """Drives the engine by the recorded schedule and compares what it samples with what was stored.

    Rows are independent of their mates, so attempts that left no trajectory are simply not sampled again.
    """

    def __init__(self, run: Run):
        self._run = run
        self._live: dict[int, Trajectory] = {}
        self._done: dict[int, int] = {}  # tokens of the trajectory that are known, from its beginning
        self.compared = self.differing = 0
        self.largest = 0.0

    def observe(self, event) -> None:
        if event.kind == "publish":
            self._run.agents.engine.publish(self._run.learner.published_policy(), self._run.learner.version)
        elif event.kind == "burst":
            self._burst(event.payload)

    def _burst(self, schedule: dict) -> None:
        engine = self._run.agents.engine
        if schedule["version"] != engine.version:
            raise ValueError(
                f"the log has a burst of version {schedule['version']}, the sampler is at {engine.version}"
            )
        for rollout, attempt, start, count, *more in schedule["joins"]:
            t = self._trajectory(rollout, attempt)
            if t is None:
                continue
            (offset,) = more or (0,)  # tokens of the attempt that the sampler did not hold
            end = offset + start + count
            room = min(engine.context - start - count, self._run.context - end)
            if start == 0:
                if rollout in self._live:
                    engine.release(rollout)
                # An attempt that went on from a seam was sampled from there.
                self._live[rollout] = t
                tokens = context_at(t.tokens, t.windows, end)
                if len(tokens) != count:
                    raise ValueError(f"rollout {rollout}: {len(tokens)} tokens before token {end}, {count} in the log")
                engine.submit(Request(rollout, attempt, tokens, room, t.temperature, offset))
            else:
                engine.extend(rollout, t.tokens[end - count : end], room)
            self._done[rollout] = end
        if engine.dispatch():
            for piece in engine.collect():
                self._compare(piece)

    def _trajectory(self, rollout: int, attempt: int) -> Trajectory | None:
        if rollout >= FIRST_ID:
            return None
        if rollout in self._live:
            return self._live[rollout]
        record = self._run.ledger.rollout(rollout)
        if record.location is None or record.attempt != attempt:
            return None
        return self._run.trajectory(rollout)

    def _compare(self, piece) -> None:
        t, at = self._live[piece.rollout], self._done[piece.rollout]
        end = at + len(piece.tokens)
        same = (t.tokens[at:end] == piece.tokens) & (t.rollout_logp[at:end] == piece.logp)
        self.compared += len(piece.tokens)
        self.differing += int(np.sum(~same))
        self.largest = max(self.largest, float(np.max(np.abs(t.rollout_logp[at:end] - piece.logp), initial=0.0)))
        self._done[piece.rollout] = end
        if not np.any(t.action_mask[end:]):
            del self._live[piece.rollout], self._done[piece.rollout]
            self._run.agents.engine.release(piece.rollout)

    def figures(self) -> dict[str, Any]:
        """Tokens sampled again, those that differ in id or log-prob, and those the schedule did not reach."""
        missing = sum(int(t.action_mask[self._done[r] :].sum()) for r, t in self._live.items())
        return {
            "tokens_compared": self.compared,
            "tokens_differing": self.differing,
            "tokens_missing": missing,
            "largest_logp_difference": self.largest,
        }
