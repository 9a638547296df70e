"""Windows: how a model with a bounded context reads a trajectory of any length.

A trajectory is read in stretches. While a stretch is sampled, or trained, the model's context is

    tokens[:head] + tokens[start:]          head: of the prompt; start: where the carried context begins

and each new token joins it. When it is full, the next window opens: at an action's first token where that is possible,
within an action where the action alone is too long. Its context is the prompt (at most a quarter of the window) and
the most recent whole steps, together at most half of the window; what lies between is dropped. The first window is the
trajectory itself, from its first token on.

The sampler records `(position, head, start)` of every window after the first in `Trajectory.windows`, and the trainer's
row of a window holds exactly the same tokens at the same places, so both see the same distribution. Rows whose window
was not recorded (`--row-tokens`: the sampler saw everything) are cut by the same rule, and the policy is then trained
with less context than it sampled with: the difference enters the importance ratio.

Gradients flow within a row, its carried context included (keys and values of context tokens are computed with the
present weights and differentiated), and never into a token that the row does not hold. This is all that is truncated:
advantages, targets and counts are those of the whole trajectory, see `learner.links`.

What the dropped tokens `head .. start` have said is lost to the model. A compressed memory of them has its place
between `tokens[:head]` and `tokens[start:]`: vectors computed from the hidden states of finished windows, in front of
the first carried token, with `start` moved to make room for them. The sampler would have to put the same vectors there.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Window:
    """A stretch of a trajectory and its context: a row of `tokens[:head] + tokens[start:end]`.

    Tokens before `position` are context; action tokens from there on are sampled, or trained, in this window.
    """

    position: int
    head: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.head + self.end - self.start

    @property
    def index(self) -> np.ndarray:
        """int [length]: where each token of the row lies in the trajectory."""
        return np.concatenate([np.arange(self.head), np.arange(self.start, self.end)])


def carried(step_ids: Sequence[int] | np.ndarray, prompt: int, size: int) -> tuple[int, int]:
    """(head, start) of a window of `size` tokens that opens behind the last of `step_ids` [T].

    Example: a prompt of 2 and steps 0 0 0 0 | 1 1 1 | 2 2, a window of 16: 2 tokens of the prompt leave room for 6, so
    steps 1 and 2 are carried: (2, 4). A last step that does not fit is cut anywhere.
    """
    step_ids = np.asarray(step_ids)
    head = min(prompt, size // 4)
    earliest = max(head, len(step_ids) - (size // 2 - head))
    if earliest == head:
        return head, head
    (begins,) = np.nonzero(step_ids[earliest:] != step_ids[earliest - 1 : -1])
    return head, earliest + int(begins[0]) if len(begins) else earliest


def context_at(tokens: np.ndarray, recorded: Sequence[tuple[int, int, int]], end: int) -> np.ndarray:
    """What a sampler held when the first `end` tokens were known, a window that opens there included."""
    _, head, start = max((window for window in recorded if window[0] <= end), default=(0, 0, 0))
    return np.concatenate([tokens[:head], tokens[start:end]])


def full(length: int, size: int, budget: int) -> bool:
    """Whether a window that holds `length` of `size` tokens is too full for another action, of at most `budget`."""
    return size - length < min(max(1, size // 4), budget)


def most_windows(tokens: int, size: int) -> int:
    """Upper bound on the windows of `size` of a trajectory of `tokens`: two in a row take in half a window or more."""
    return 1 if tokens <= size else 2 + tokens // (size // 4)


def planned(action_mask: np.ndarray, step_ids: np.ndarray, size: int) -> tuple[tuple[int, int, int], ...]:
    """Windows of `size` tokens for a trajectory that was sampled without, as few as actions allow; () if it fits."""
    windows: list[tuple[int, int, int]] = []
    if len(action_mask) <= size:
        return ()
    (acts,) = np.nonzero(action_mask)
    (breaks,) = np.nonzero((np.diff(acts) > 1) | (np.diff(step_ids[acts]) > 0))
    begins, ends = acts[np.append(0, breaks + 1)], acts[np.append(breaks, len(acts) - 1)] + 1
    prompt = position = int(acts[0])
    head = start = 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        while head + end - start > size:
            position = begin if begin > position else max(position, start + size - head)
            head, start = carried(step_ids[:position], prompt, size)
            windows.append((position, head, start))
    return tuple(windows)


def windows_of(
    action_mask: np.ndarray, step_ids: np.ndarray, recorded: Sequence[tuple[int, int, int]], size: int
) -> list[Window]:
    """The windows that have an action, in order: the recorded ones, or planned ones where those exceed `size`.

    A window ends with its last action token; the last one goes on to the trajectory's end as far as there is room, for
    the value of what follows the last action.
    """
    found = _cut(action_mask, recorded, size)
    if any(w.length > size for w in found):
        found = _cut(action_mask, planned(action_mask, step_ids, size), size)
    return found


def _cut(action_mask: np.ndarray, opened: Sequence[tuple[int, int, int]], size: int) -> list[Window]:
    T, windows = len(action_mask), []
    limits = [(0, 0, 0), *opened, (T, 0, 0)]
    for (position, head, start), (until, *_) in itertools.pairwise(limits):
        acts = np.flatnonzero(action_mask[position:until])
        if len(acts):
            windows.append(Window(position, head, start, position + int(acts[-1]) + 1))
    if windows:
        last = windows[-1]
        end = max(last.end, min(T, last.start + size - last.head))
        windows[-1] = dataclasses.replace(last, end=end)
    return windows
