"""Trajectories in pieces: a segment is stored once, when it is complete, and holds its own tokens alone.

    start, columns = builder.take_segment()        # at a seam: what came since the last one
    segment = new_segment(builder, steps_per_segment=100)   # the same, as a record
    location = store.append(save_segment(segment))

    for segment in SegmentReader(store, locations): ...     # one at a time, its arrays views of the file
    SegmentReader(store, locations).columns(5_000, 6_000)   # tokens [5000, 6000) of the trajectory
    join_segments(segments)                                 # the whole `Trajectory`, exact to the bit

A trajectory of T tokens in segments costs O(T) bytes on disk, and memory for one segment at a time. A trajectory that
was stored as one record is read as one segment.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.data.storage import Location, TrajectoryStore
from sao_jax.data.trajectory import (
    COLUMNS,
    ENDS,
    Trajectory,
    TrajectoryBuilder,
    check_trajectory,
    load_trajectory,
    read_scalars,
    save_record,
)

_METADATA_KEY = "segment"
_WHOLE_KEY = "trajectory"  # of the records of `save_trajectory`
_DTYPES = {"I32": np.int32, "F32": np.float32, "BOOL": np.bool_}
_UNFINISHED = "truncated", "snapshot"  # end and reason of what is to be gone on from
# What all segments of a trajectory have in common; the attempt may change where one failed and another went on.
_LABELS = ("rollout", "task", "group", "sample", "seed", "temperature", "top_p", "top_k", "sampler")


@dataclasses.dataclass(frozen=True, eq=False)
class Segment(Trajectory):
    """Tokens [first_token, first_token + N) of a trajectory, with the fields of one.

    The columns are those of its own tokens, with absolute step ids; N is 0 only in a last segment, when an attempt was
    ended from outside just after a seam. `end` is "" unless it is the last one; what else is said of the trajectory
    (`reward_parts`, `timings`) is what was known at the end of the segment.

    Attributes:
      index: which segment it is: its first step // steps per segment.
      first_token, first_step: where it begins. actions_before: action tokens of the trajectory before it.
      next_value: value of the first action token behind the segment, which closes its returns; None until a critic
        has been asked.
    """

    index: int = 0
    first_token: int = 0
    first_step: int = 0
    actions_before: int = 0
    next_value: float | None = None

    @property
    def end_token(self) -> int:
        """Position behind its last token: its trajectory's length if it is the last one."""
        return self.first_token + self.length

    @property
    def last(self) -> bool:
        return self.end != ""


def check_segment(s: Segment) -> Segment:
    """Returns s if its columns fit each other and its place; what they hold is checked where segments are joined."""
    N = len(s.tokens)
    for name, dtype in COLUMNS.items():
        array = getattr(s, name)
        if array.dtype != dtype or array.shape != (N,):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}[{N}]")
    if s.end and s.end not in ENDS:
        raise ValueError(f"end is {s.end!r}; allowed: {', '.join(ENDS)}, or nothing where the trajectory goes on")
    if N == 0 and (not s.last or s.first_token == 0):
        raise ValueError("a segment without a token can only be a last one behind others")
    if min(s.index, s.first_token, s.first_step, s.actions_before) < 0:
        raise ValueError("index, first_token, first_step and actions_before of a segment are not negative")
    if N and s.step_ids[0] != s.first_step:
        raise ValueError(f"first_step is {s.first_step}, but the first token belongs to step {s.step_ids[0]}")
    return s


def new_segment(
    builder: TrajectoryBuilder,
    *,
    steps_per_segment: int,
    end: str = "",
    reason: str = "",
    timings: Mapping[str, float] | None = None,
    forget: bool = False,
) -> Segment:
    """What a growing trajectory has gained since its last segment; with `end` it is the last one.

    `forget`: the builder does not keep it, see `TrajectoryBuilder.take_segment`.
    """
    start, columns = builder.take_segment(forget=forget)
    before = builder.num_action_tokens - int(np.count_nonzero(columns["action_mask"]))
    scalars = builder.scalars(end, reason, timings)
    return _segment(columns, start, before, builder.step, steps_per_segment, scalars)


def cut_segment(t: Trajectory, first_token: int, end_token: int, *, steps_per_segment: int) -> Segment:
    """Tokens [first_token, end_token) of a trajectory; its last segment if they reach its end."""
    if not 0 <= first_token <= end_token <= t.length:
        raise ValueError(f"no tokens {first_token} to {end_token} in a trajectory of {t.length}")
    columns = {name: getattr(t, name)[first_token:end_token] for name in COLUMNS}
    scalars = _scalars(t)
    if end_token < t.length:
        scalars |= dict(end="", reason="", reward_parts={}, timings={})
        scalars |= dict(windows=tuple(w for w in t.windows if w[0] <= end_token))
    before = int(np.count_nonzero(t.action_mask[:first_token]))
    return _segment(columns, first_token, before, int(t.step_ids[-1]), steps_per_segment, scalars)


def split_trajectory(t: Trajectory, steps_per_segment: int) -> list[Segment]:
    """All segments of a trajectory, whole steps each. How its reward came about in parts is known in the last alone."""
    seams = np.flatnonzero(np.diff(t.segment_ids(steps_per_segment))) + 1
    places = zip([0, *seams.tolist()], [*seams.tolist(), t.length], strict=True)
    return [cut_segment(t, a, b, steps_per_segment=steps_per_segment) for a, b in places]


def join_segments(segments: Sequence[Segment]) -> Trajectory:
    """The trajectory that the segments are in order; exact to the bit.

    If the last one is missing, it is a snapshot at a seam: truncated, to be gone on from. Labels are those of the
    newest segment. Raises ValueError if the first is missing, one does not begin where the one before ends, or they
    belong to different trajectories.
    """
    if not segments:
        raise ValueError("no segment to join")
    for before, after in zip((None, *segments), segments, strict=False):
        _check_follows(before, after)
    newest = segments[-1]
    columns = {name: np.concatenate([getattr(s, name) for s in segments]) for name in COLUMNS}
    for array in columns.values():
        array.flags.writeable = False
    end, reason = (newest.end, newest.reason) if newest.last else _UNFINISHED
    return check_trajectory(Trajectory(**columns, **_scalars(newest) | dict(end=end, reason=reason)))


def save_segment(s: Segment) -> bytes:
    """Safetensors bytes: columns as tensors, the rest as JSON in the metadata. Equal input, equal bytes."""
    check_segment(s)
    return save_record(s, _METADATA_KEY)


def load_segment(data: bytes | np.ndarray) -> Segment:
    """Inverse of `save_segment`, exact to the bit. A stored trajectory is its own only segment.

    The columns are read-only views of `data`, so that a mapped record (`TrajectoryStore.map`) is not copied. A view
    may begin at any byte. Raises ValueError for anything else.
    """
    try:
        head = 8 + int.from_bytes(bytes(data[:8]), "little")
        if not 8 < head <= len(data):
            raise ValueError("no header")
        header = json.loads(bytes(data[8:head]))
        metadata = header["__metadata__"]
        scalars = read_scalars(metadata[_METADATA_KEY] if _METADATA_KEY in metadata else metadata[_WHOLE_KEY])
        columns = {name: _view(data, head, header[name]) for name in COLUMNS}
        if _METADATA_KEY in metadata:
            return check_segment(Segment(**columns, **scalars))
        t = Trajectory(**columns, **scalars)
        whole = cut_segment(t, 0, t.length, steps_per_segment=t.num_steps)
        return dataclasses.replace(whole, end="", reason="") if (t.end, t.reason) == _UNFINISHED else whole
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{len(data)} bytes are not a stored segment: {error}") from error


class SegmentReader:
    """A stored trajectory, read in place: memory is taken by what is looked at, and given back with it.

    `locations` are those of its segments in order, or the one of a whole record. Headers are read once, when the
    reader is made; the columns of `reader[i]` are read-only views of the file (`load_segment`).
    """

    def __init__(self, store: TrajectoryStore, locations: Sequence[Location]):
        if not locations:
            raise ValueError("no segment to read")
        self._store, self._locations = store, list(locations)
        starts, before = [0], None
        for i in range(len(self._locations)):
            segment = self[i]
            _check_follows(before, segment)
            starts.append(segment.end_token)
            before = segment
        self._starts = np.array(starts)

    @property
    def length(self) -> int:
        """Tokens of the trajectory, as far as it is stored."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> Segment:
        return load_segment(self._store.map(self._locations[index]))

    def __iter__(self) -> Iterator[Segment]:
        return (self[i] for i in range(len(self)))

    def check(self) -> None:
        """Reads every byte once; ValueError that names the file if one is not what was stored."""
        for location in self._locations:
            if zlib.crc32(self._store.map(location)) != location.crc32:
                raise ValueError(f"{location.file} offset {location.offset}: checksum differs, the record is damaged")

    def columns(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Tokens [start, stop) of the trajectory, all columns; from the segments that hold them and no other."""
        if not 0 <= start < stop <= self.length:
            raise ValueError(f"no tokens {start} to {stop} in a trajectory of {self.length}")
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        parts = []
        for i in range(first, last + 1):
            segment, at = self[i], int(self._starts[i])
            parts.append({name: getattr(segment, name)[max(0, start - at) : stop - at] for name in COLUMNS})
        return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def locations_of(location: Any) -> list[Location]:
    """What a ledger says of where a trajectory lies: one record (a mapping), or its segments in order (a list)."""
    return [Location(**one) for one in ([location] if isinstance(location, Mapping) else location)]


def read_trajectory(store: TrajectoryStore, location: Any) -> Trajectory:
    """A whole trajectory from where the ledger says that it lies; every byte is checked."""
    if isinstance(location, Mapping):
        return load_trajectory(store.read(Location(**location)))
    return join_segments([load_segment(store.read(one)) for one in locations_of(location)])


def _scalars(t: Trajectory) -> dict[str, Any]:
    """What a record says of the whole trajectory."""
    return {f.name: getattr(t, f.name) for f in dataclasses.fields(Trajectory) if f.name not in COLUMNS}


def _segment(columns: dict, start: int, before: int, step: int, steps_per_segment: int, scalars: dict) -> Segment:
    """`step` is the one that an empty segment belongs to."""
    if steps_per_segment < 1:
        raise ValueError(f"steps_per_segment is {steps_per_segment}; it must be at least 1")
    first_step = int(columns["step_ids"][0]) if len(columns["step_ids"]) else step
    place = dict(index=first_step // steps_per_segment, first_token=start, first_step=first_step)
    return check_segment(Segment(**columns, **place, actions_before=before, **scalars))


def _check_follows(before: Segment | None, s: Segment) -> None:
    end = 0 if before is None else before.end_token
    if s.first_token != end:
        raise ValueError(f"a segment begins at token {s.first_token}; the one before it ends at {end}")
    if before is None:
        return
    if before.last:
        raise ValueError(f"a segment at token {s.first_token} follows the last one of its trajectory")
    for name in _LABELS:
        if getattr(before, name) != getattr(s, name):
            raise ValueError(f"segments of two trajectories: {name} {getattr(before, name)} and {getattr(s, name)}")


def _view(data: bytes | np.ndarray, head: int, entry: dict) -> np.ndarray:
    """A tensor of a safetensors record as a read-only view of its bytes."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"a column of type {entry['dtype']}")
    (length,), (begin, end), dtype = entry["shape"], entry["data_offsets"], np.dtype(_DTYPES[entry["dtype"]])
    if not 0 <= begin <= end <= len(data) - head or end - begin != length * dtype.itemsize:
        raise ValueError(f"a tensor lies at {begin} to {end} of {len(data) - head} bytes")
    if isinstance(data, np.ndarray):
        view = data[head + begin : head + end].view(np.ndarray)
        array = np.ndarray((length,), dtype, buffer=view)
    else:
        array = np.frombuffer(data, dtype, length, head + begin) if length else np.zeros(0, dtype)
    array.flags.writeable = False
    return array
