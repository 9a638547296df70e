"""The record of one attempt at one task, and how it grows on the host.

A trajectory is an append-only list of token ids. Text is decoded from it to be shown to an environment, but
never encoded back: what was sampled is what is trained on. Token t is an action where `action_mask[t]`; all the
rest (prompt, observations, tokens forced or appended by hand) is context and is never trained.
"""

import bisect
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from sao_jax.data.windows import carried

ENDS = ("terminated", "truncated", "aborted")
UNSAMPLED = -1  # weights version of a token that no policy sampled

# name -> dtype of what a trajectory has for each token
COLUMNS = {
    "tokens": np.int32,
    "action_mask": np.bool_,
    "rollout_logp": np.float32,
    "rewards": np.float32,
    "version": np.int32,
    "step_ids": np.int32,
}
_METADATA_KEY = "trajectory"
_CHUNK = 4096  # tokens of the arrays that a long trajectory grows by
# A log-probability computed in float32 can exceed 0 by rounding; more than this is something else.
_LOGP_SLACK = 1e-3
_MAX_REWARD = float(np.finfo(np.float32).max)


class NoActionError(ValueError):
    """The trajectory has no action token, so there is nothing to train on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One attempt, T tokens. Two trajectories are the same when their `save_trajectory` bytes are.

    Attributes:
      tokens: int32 [T], prompt, actions and observations in order.
      action_mask: bool [T], True where the policy sampled the token; False at 0.
      rollout_logp: float32 [T], log-probability recorded by the sampler at action tokens, 0 elsewhere. May be
        non-finite: the losses give such tokens weight 0 and count them.
      rewards: float32 [T], finite, non-zero at action tokens only.
      version: int32 [T], weights version each action token was sampled with, -1 elsewhere.
      step_ids: int32 [T], 0-based step; the prompt and the first action are step 0, an observation belongs to
        the step of the action it answers.
      end: "terminated" (by the task), "truncated" (cut by us: bootstrap) or "aborted" (failure: not trained).
      reason: what ended it, for people.
      rollout, attempt, task, group, sample, seed: which attempt this is.
      temperature, top_p, top_k: how the actions were sampled; rollout_logp is at this temperature.
      sampler: what chose among actions that the policy drew; "" where the policy alone did. What was chosen is not
        distributed as rollout_logp says, so such a trajectory is not trained.
      reward_parts: totals by name. timings: seconds by name.
      windows: (position, head, start) of every time the sampler's context was cut: from token `position` on it was
        tokens[:head] + tokens[start:], see `windows`. Empty: the sampler saw everything.
    """

    tokens: np.ndarray
    action_mask: np.ndarray
    rollout_logp: np.ndarray
    rewards: np.ndarray
    version: np.ndarray
    step_ids: np.ndarray
    end: str
    reason: str = ""
    rollout: int = 0
    attempt: int = 0
    task: str = ""
    group: int = 0
    sample: int = 0
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    sampler: str = ""
    reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    windows: tuple[tuple[int, int, int], ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether its log-probabilities are those of the distribution that its actions came from."""
        return not self.sampler

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_action_tokens(self) -> int:
        return int(np.count_nonzero(self.action_mask))

    @property
    def num_steps(self) -> int:
        return int(self.step_ids[-1]) + 1

    @property
    def total_reward(self) -> float:
        return float(np.sum(self.rewards, dtype=np.float64))

    @property
    def oldest_version(self) -> int:
        """Smallest weights version among the action tokens; staleness is counted from it."""
        if not np.any(self.action_mask):
            raise NoActionError("a trajectory without an action token has no weights version")
        return int(np.min(self.version[self.action_mask]))

    def segment_ids(self, steps_per_segment: int) -> np.ndarray:
        """int32 [T]: step_ids // steps_per_segment."""
        if steps_per_segment < 1:
            raise ValueError(f"steps_per_segment is {steps_per_segment}; it must be at least 1")
        return (self.step_ids // steps_per_segment).astype(np.int32)

    def actions(self) -> Iterator[np.ndarray]:
        """The sampled tokens of each step, in order; steps without one are left out."""
        steps = self.step_ids[self.action_mask]
        boundaries = np.flatnonzero(np.diff(steps)) + 1
        return iter(np.split(self.tokens[self.action_mask], boundaries)) if len(steps) else iter(())


def check_trajectory(t: Trajectory) -> Trajectory:
    """Returns t if it is as `Trajectory` says; else ValueError (NoActionError: nothing was sampled)."""
    T = len(t.tokens)
    if T == 0:
        raise ValueError("a trajectory needs at least one token")
    for name, dtype in COLUMNS.items():
        array = getattr(t, name)
        if array.dtype != dtype or array.shape != (T,):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}[{T}]")
    if t.end not in ENDS:
        raise ValueError(f"end is {t.end!r}; allowed: {', '.join(ENDS)}")
    if t.action_mask[0]:
        raise ValueError("token 0 is marked as an action; it has no prefix it could have been sampled from")
    if not np.any(t.action_mask):
        raise NoActionError(f"no action token among the {T} tokens of task {t.task!r}")
    if t.step_ids[0] != 0:
        raise ValueError(f"step_ids must start at 0; they start at {t.step_ids[0]}")
    check_content(t)
    before = 0
    for position, head, start in t.windows:
        if not (before < position <= T and 0 <= head <= start < position):
            raise ValueError(f"window {(position, head, start)} is not one of {T} tokens, after token {before}")
        before = position
    return t


def check_content(t: Trajectory) -> None:
    """Raises ValueError for numbers that no tokens of a trajectory have, a part of one or all of it."""
    observed = ~t.action_mask
    if not np.all(np.isfinite(t.rewards)):
        raise ValueError(f"reward at token {_first(~np.isfinite(t.rewards))} is not finite")
    if np.any(t.rewards[observed]):
        at = _first(observed & (t.rewards != 0))
        raise ValueError(f"reward at token {at}, which is not an action; use rewards_to_actions")
    if np.any(t.rollout_logp[observed]):
        raise ValueError(f"rollout_logp at token {_first(observed & (t.rollout_logp != 0))}, which is not an action")
    if np.any(t.rollout_logp > _LOGP_SLACK):
        at = _first(t.rollout_logp > _LOGP_SLACK)
        raise ValueError(f"rollout_logp at token {at} is {t.rollout_logp[at]}, above 0: not a log-probability")
    if np.any(t.version[observed] != UNSAMPLED) or np.any(t.version[t.action_mask] < 0):
        raise ValueError("version must be >= 0 at action tokens and -1 elsewhere")
    if np.any(t.tokens < 0):
        raise ValueError(f"token {_first(t.tokens < 0)} is negative")
    if np.any((np.diff(t.step_ids) != 0) & (np.diff(t.step_ids) != 1)):
        raise ValueError("step_ids must grow by at most 1 from token to token")
    for what, numbers in (("reward part", t.reward_parts), ("timing", t.timings)):
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"{what} {name!r} is {value}; it must be finite")


def rewards_to_actions(rewards: np.ndarray, action_mask: np.ndarray) -> np.ndarray:
    """Moves a reward that sits on an observation to the last action token before it; float32 [T], same total.

    Example: mask 0 1 1 0 0 1, rewards 0 0 1 0 2 3 -> 0 0 3 0 0 3.
    Raises ValueError for a reward that no action precedes.
    """
    action_mask = np.asarray(action_mask, bool)
    rewards = np.asarray(rewards, np.float32)
    target = np.maximum.accumulate(np.where(action_mask, np.arange(len(action_mask)), -1))
    if np.any(rewards[target < 0]):
        at = _first((target < 0) & (rewards != 0))
        raise ValueError(f"reward at token {at} comes before the first action token")
    moved = np.zeros(len(rewards), np.float32)
    np.add.at(moved, target[target >= 0], rewards[target >= 0])
    return moved


class TrajectoryBuilder:
    """Grows one trajectory on the host: prompt, then actions and observations in any order.

    The weights version is stamped when a token is added, that is when it was sampled, not at the end.
    `build` does not consume the builder. What a long trajectory has gained since the last seam is taken by
    `take_segment`, at the cost of these tokens alone.

    Columns lie in arrays that are never moved or copied while the trajectory grows: a token costs 21 bytes, and room
    for at most as many tokens as there are, or 4096, is kept free.
    """

    def __init__(
        self,
        prompt_tokens: Sequence[int],
        *,
        rollout: int = 0,
        attempt: int = 0,
        task: str = "",
        group: int = 0,
        sample: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        sampler: str = "",
    ):
        prompt = _ids(prompt_tokens)
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; token 0 of a trajectory is never an action")
        labels = dict(rollout=rollout, attempt=attempt, task=task, group=group, sample=sample, seed=seed)
        self._begin(labels | dict(temperature=temperature, top_p=top_p, top_k=top_k, sampler=sampler))
        self._prompt = len(prompt)
        self._append(prompt)

    def _begin(self, labels: dict) -> None:
        self._labels = labels
        self._chunks: list[dict[str, np.ndarray]] = []
        self._starts: list[int] = []  # position of each chunk's first token
        self._length, self._actions = 0, 0
        self._taken = 0  # tokens that segments have taken
        self._kept = 0  # the first token that is still here
        self._parts: dict[str, float] = {}
        self._step = 0
        self._last_action = -1
        self._last_reward = 0.0  # of the last action token, in float64: rounded once, however it adds up
        self._open = False
        self._windows: list[tuple[int, int, int]] = []
        self._prompt = 0  # tokens before the first action

    @classmethod
    def resume(cls, t: Trajectory, **labels) -> "TrajectoryBuilder":
        """A builder that continues after the last token of a snapshot. The next action is a new step.

        `labels` replace those of the snapshot, such as the attempt. The next segment begins behind the snapshot.
        """
        names = ("rollout", "attempt", "task", "group", "sample", "seed", "temperature", "top_p", "top_k", "sampler")
        builder = cls.__new__(cls)
        builder._begin({name: getattr(t, name) for name in names} | labels)
        builder._chunks = [{name: np.array(getattr(t, name), dtype) for name, dtype in COLUMNS.items()}]
        builder._starts = [0]
        builder._length = builder._taken = t.length
        builder._actions = t.num_action_tokens
        builder._parts = dict(t.reward_parts)
        builder._windows = list(t.windows)
        builder._prompt = int(np.flatnonzero(t.action_mask)[0])
        builder._step = t.num_steps - 1
        builder._last_action = int(np.flatnonzero(t.action_mask)[-1])
        builder._last_reward = float(t.rewards[builder._last_action])
        return builder

    @property
    def length(self) -> int:
        return self._length

    @property
    def num_action_tokens(self) -> int:
        return self._actions

    @property
    def step(self) -> int:
        """Of the newest token."""
        return self._step

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: all tokens so far."""
        return self._since(0, "tokens")

    @property
    def context(self) -> np.ndarray:
        """int32 [N]: what a sampler must hold to go on: all tokens, or those of the newest window."""
        _, head, start = self._window
        tokens = self.tokens
        return np.concatenate([tokens[:head], tokens[start:]])

    @property
    def context_length(self) -> int:
        _, head, start = self._window
        return head + self.length - start

    @property
    def _window(self) -> tuple[int, int, int]:
        return self._windows[-1] if self._windows else (0, 0, 0)

    def open_window(self, size: int) -> None:
        """The sampler goes on from here with a cut context, see `windows.carried`; within an action as well."""
        self._windows.append((self.length, *carried(self._since(0, "step_ids"), self._prompt, size)))

    def add_action(self, tokens: Sequence[int], logp: Sequence[float], version: Sequence[int]) -> None:
        """A piece of an action as sampled; pieces join until `end_action` or an observation.

        The three have equal lengths: a stop token comes with its log-probability or not at all.
        """
        tokens, version = _ids(tokens), np.atleast_1d(np.asarray(version))
        logp = np.asarray(logp, np.float32)
        if not (tokens.shape == logp.shape == version.shape):
            raise ValueError(f"action of {tokens.size} tokens with {logp.size} log-probs and {version.size} versions")
        if np.any(logp > _LOGP_SLACK):
            raise ValueError(f"log-probability {logp.max()} of a sampled token is above 0")
        if np.any(version < 0):
            raise ValueError(f"weights version {version.min()} of a sampled token is negative")
        if np.any(version > np.iinfo(np.int32).max):
            raise ValueError(f"weights version {version.max()} of a sampled token is above 2^31 - 1")
        if tokens.size == 0:
            return
        if not self._open and self._last_action >= 0:
            self._step += 1
        self._open = True
        self._append(tokens, logp, version)
        self._actions += len(tokens)
        self._last_action, self._last_reward = self.length - 1, 0.0

    def end_action(self) -> None:
        """The action is complete: what is sampled next is another step."""
        self._open = False

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Tokens the policy did not draw: the environment's, or forced and appended ones (an EOS by hand)."""
        self._open = False
        self._append(_ids(tokens))

    def add_reward(self, value: float, parts: Mapping[str, float] | None = None) -> None:
        """Adds to the reward of the last action token so far, whatever has been observed since."""
        for number in (value, *(parts or {}).values()):
            if not abs(number) <= _MAX_REWARD:  # also NaN
                raise ValueError(f"reward {number} is not finite in float32")
        if self._last_action < 0:
            raise ValueError("a reward came before the first action token")
        if self._last_action < self._kept:
            raise ValueError(f"the reward of token {self._last_action} came after its segment was given away")
        self._last_reward += float(value)
        chunk = bisect.bisect_right(self._starts, self._last_action) - 1
        with np.errstate(over="ignore"):  # `build` refuses a sum that is not finite
            self._chunks[chunk]["rewards"][self._last_action - self._starts[chunk]] = self._last_reward
        for name, part in (parts or {}).items():
            self._parts[name] = self._parts.get(name, 0.0) + float(part)

    def build(self, end: str, reason: str = "", timings: Mapping[str, float] | None = None) -> Trajectory:
        """The trajectory so far. NoActionError if nothing was sampled, ValueError if it is malformed."""
        arrays = {name: self._since(0, name) for name in COLUMNS}
        for array in arrays.values():
            array.flags.writeable = False
        return check_trajectory(Trajectory(**arrays, **self.scalars(end, reason, timings)))

    def scalars(self, end: str, reason: str = "", timings: Mapping[str, float] | None = None) -> dict[str, Any]:
        """What a record says of the whole trajectory, as it is now: all fields of `Trajectory` but the columns."""
        extra = dict(end=end, reason=reason, reward_parts=dict(self._parts), timings=dict(timings or {}))
        return self._labels | extra | dict(windows=tuple(self._windows))

    def take_segment(self, *, forget: bool = False) -> tuple[int, dict[str, np.ndarray]]:
        """Ends a segment: the position of its first token and its columns, those since the last call.

        With `forget` they are not kept here, so that memory does not grow: nothing that needs the whole trajectory
        can be asked any more (`tokens`, `build`: ValueError).
        """
        start = self._taken
        columns = {name: self._since(start, name) for name in COLUMNS}
        for array in columns.values():
            array.flags.writeable = False
        self._taken = self._length
        if forget:
            self._chunks, self._starts, self._kept = [], [], self._length
        return start, columns

    def _since(self, start: int, name: str) -> np.ndarray:
        """A column from token `start` on, as an array of its own."""
        if start < self._kept:
            raise ValueError(f"the first {self._kept} tokens were given away with their segments")
        parts = []
        for i in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._chunks)):
            begin = self._starts[i]
            parts.append(self._chunks[i][name][max(0, start - begin) : self._length - begin])
        return np.concatenate(parts) if parts else np.zeros(0, COLUMNS[name])

    def _append(self, tokens: np.ndarray, logp: np.ndarray | None = None, version: np.ndarray | None = None) -> None:
        done = 0
        while done < len(tokens):
            at = self._length - self._starts[-1] if self._chunks else 0
            room = len(self._chunks[-1]["tokens"]) - at if self._chunks else 0
            if room == 0:
                size = max(len(tokens) - done, min(_CHUNK, max(64, self._length - self._kept)))
                self._chunks.append({name: np.empty(size, dtype) for name, dtype in COLUMNS.items()})
                self._starts.append(self._length)
                at, room = 0, size
            n = min(room, len(tokens) - done)
            chunk, to, of = self._chunks[-1], slice(at, at + n), slice(done, done + n)
            chunk["tokens"][to] = tokens[of]
            chunk["action_mask"][to] = logp is not None
            chunk["rollout_logp"][to] = 0.0 if logp is None else logp[of]
            chunk["version"][to] = UNSAMPLED if version is None else version[of]
            chunk["rewards"][to] = 0.0
            chunk["step_ids"][to] = self._step
            self._length += n
            done += n


def save_trajectory(t: Trajectory) -> bytes:
    """Safetensors bytes: arrays as tensors, the rest as JSON in the metadata. Equal input, equal bytes."""
    return save_record(t, _METADATA_KEY)


def save_record(record: Trajectory, key: str) -> bytes:
    """Safetensors bytes with what is no column as JSON under `key` of the metadata."""
    scalars = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in COLUMNS}
    scalars |= {name: dict(scalars[name]) for name in ("reward_parts", "timings")}
    for name in ("sampler", "windows"):
        if not scalars[name]:
            del scalars[name]  # as in records written before there was one
    text = json.dumps(scalars, sort_keys=True)
    arrays = {name: np.ascontiguousarray(getattr(record, name)) for name in COLUMNS}
    return safetensors.numpy.save(arrays, metadata={key: text})


def read_scalars(text: str) -> dict[str, Any]:
    """Inverse of the JSON of `save_record`. Raises JSONDecodeError or TypeError for anything else."""
    scalars = json.loads(text)
    if not isinstance(scalars, dict):
        raise TypeError("its metadata are no JSON object")
    scalars["windows"] = tuple(tuple(window) for window in scalars.get("windows", ()))
    return scalars


def load_trajectory(data: bytes) -> Trajectory:
    """Inverse of `save_trajectory`, exact to the bit. Raises ValueError for anything else."""
    try:
        arrays = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        scalars = read_scalars(header["__metadata__"][_METADATA_KEY])
        t = Trajectory(**arrays, **scalars)
    except (
        safetensors.SafetensorError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
    ) as error:
        raise ValueError(f"{len(data)} bytes are not a stored trajectory: {error}") from error
    return check_trajectory(t)


def _ids(tokens: Sequence[int]) -> np.ndarray:
    """int32 [N]; refuses anything that is not a flat list of token ids."""
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens are {ids.dtype}{list(ids.shape)}; expected a flat list of integers")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"token ids must be in [0, 2^31); got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def _first(mask: np.ndarray) -> int:
    return int(np.flatnonzero(mask)[0])
