"""The ledger: which rollouts exist and what became of them, and every event of a run in order, in one SQLite file.

A rollout is running, finished, trained(version) or dropped(reason); it never goes back. Each transition and the event
that tells of it are one transaction, so that the tables can be rebuilt from the events and a kill or a power cut leaves
all of a turn or nothing of it. Rollout ids are the positions in the task stream, handed out without gaps: the next
position is derived from the rows, never stored beside them, and so it cannot run ahead of what was really handed out.
"""

import dataclasses
import json
import math
import operator
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sao_jax.runtime.ledger_file import SCHEMA_VERSION, SEGMENTS, LedgerError, LedgerFile, translated

STATES = ("running", "finished", "trained", "dropped")


@dataclasses.dataclass(frozen=True)
class Event:
    position: int
    kind: str
    payload: Any
    time: float


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One row. `version` is set when trained, `reason` when dropped, `location` and `reward` once finished."""

    id: int
    task: str
    group: int
    sample: int
    attempt: int
    state: str
    version: int | None
    reason: str | None
    location: Any
    reward: float | None
    started: float
    finished: float | None


_COLUMNS = "id, task, grp, sample, attempt, state, version, reason, location, reward, started, finished"


class Ledger(LedgerFile):
    """The rollouts and events in a `LedgerFile`.

    A write outside `with ledger.transaction():` is a transaction of its own; group the events of one turn, a commit
    waits for the disk.
    """

    def _add_segments(self) -> None:
        """Makes format 2 of format 1, in which each part of a rollout held all that came before it."""
        with self.transaction():
            self._run(SEGMENTS.strip().split(";\n"))
            for rollout in [*self.running(), *self.dropped("failed")]:
                if (location := self._newest_part(rollout.id)) is not None:
                    self._db.execute("INSERT INTO segments VALUES (?, 0, ?)", (rollout.id, _to_json(location)))
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    # Writing

    def record(self, kind: str, payload: Any) -> int:
        """Appends an event and returns its position. Numbers of numpy and JAX become plain ones, floats exactly."""
        with self.transaction():
            cursor = self._db.execute(
                "INSERT INTO events (kind, payload, time) VALUES (?, ?, ?)", (kind, _to_json(payload), time.time())
            )
            return cursor.lastrowid

    def admit(self, rollout: int, task: str, group: int, sample: int) -> None:
        """The rollout is handed out. Ids are stream positions: anything but `next_rollout()` would skip or repeat."""
        rollout, group, sample = map(operator.index, (rollout, group, sample))
        with self.transaction():
            expected = self.next_rollout()
            if rollout != expected:
                raise LedgerError(f"rollout {rollout} cannot be admitted: the next one of the stream is {expected}")
            self._db.execute(
                "INSERT INTO rollouts (id, task, grp, sample, started) VALUES (?, ?, ?, ?, ?)",
                (rollout, task, group, sample, time.time()),
            )
            self.record("admit", {"rollout": rollout, "task": task, "group": group, "sample": sample})

    def restart(self, rollout: int, failure: str | None = None) -> int:
        """A running rollout starts over, because its attempt failed or, without `failure`, because the run was resumed;
        returns the new attempt."""
        with self.transaction():
            row = self._require(rollout, "restarted", "running")
            attempt = row.attempt + 1
            self._db.execute("UPDATE rollouts SET attempt = ? WHERE id = ?", (attempt, row.id))
            because = {} if failure is None else {"failure": failure}
            self.record("restart", {"rollout": row.id, "attempt": attempt} | because)
        return attempt

    def segment(self, rollout: int, location: Any, start: int = 0) -> None:
        """A running rollout is stored durably up to a seam, from which it can go on after a failure: what begins at
        token `start` lies at `location`, and what is known to begin there or later is no longer part of it."""
        start = operator.index(start)
        with self.transaction():
            row = self._require(rollout, "stored in part", "running")
            self.record("segment", {"rollout": row.id, "attempt": row.attempt, "location": location, "start": start})
            self._db.execute("DELETE FROM segments WHERE rollout = ? AND start >= ?", (row.id, start))
            self._db.execute("INSERT INTO segments VALUES (?, ?, ?)", (row.id, start, _to_json(location)))

    def finish(self, rollout: int, location: Any, reward: float) -> None:
        """The trajectory is stored durably at `location` (JSON; a list of those of its segments); call this only after
        it is."""
        if location is None or not math.isfinite(reward):
            raise LedgerError(f"rollout {rollout} cannot be finished with location {location} and reward {reward}")
        with self.transaction():
            row = self._require(rollout, "finished", "running")
            payload = {"rollout": row.id, "attempt": row.attempt, "location": location, "reward": float(reward)}
            position = self.record("finish", payload)
            self._db.execute(
                "UPDATE rollouts SET state = 'finished', location = ?, reward = ?, arrival = ?, finished = ? "
                "WHERE id = ?",
                (_to_json(location), float(reward), position, time.time(), row.id),
            )
            self._db.execute("DELETE FROM segments WHERE rollout = ?", (row.id,))

    def train(self, rollouts: Iterable[int], version: int) -> None:
        """All of them entered the update that made `version`. Versions never decrease."""
        version = operator.index(version)
        with self.transaction():
            self.require_version(version)
            rows = [self._require(rollout, "trained", "finished") for rollout in rollouts]
            ids = [row.id for row in rows]
            if len(set(ids)) != len(ids):
                raise LedgerError(f"a rollout occurs twice in one update: {ids}")
            self._db.executemany(
                "UPDATE rollouts SET state = 'trained', version = ? WHERE id = ?", [(version, i) for i in ids]
            )
            self.record("train", {"rollouts": ids, "version": version})

    def drop(self, rollout: int, reason: str, failure: str | None = None) -> None:
        """A running or finished rollout will not be trained; `reason` is one of a few words, counted as such, and
        `failure` what its last attempt ended in, if that is why."""
        with self.transaction():
            row = self._require(rollout, "dropped", "running", "finished")
            self._db.execute("UPDATE rollouts SET state = 'dropped', reason = ? WHERE id = ?", (reason, row.id))
            because = {} if failure is None else {"failure": failure}
            self.record("drop", {"rollout": row.id, "reason": reason} | because)

    def set_meta(self, key: str, value: Any) -> None:
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _to_json(value)))

    def require_same_data(self, description: Mapping[str, Any]) -> None:
        """Stores what the rollout ids are positions of (task name, split, size, hash); refuses another at resume.

        A position in one data set means nothing in another: 500 would skip most of a set of 600 and all of one of 300.
        """
        present, stored = json.loads(_to_json(description)), self.meta("data")
        if stored is None and self.next_rollout() == 0:
            self.set_meta("data", present)
        elif stored != present:
            raise LedgerError(
                f"run {self.path.parent} was made with data {_describe(stored)}, the present data is "
                f"{_describe(present)}: resume with the data of the run, or start a new run folder"
            )

    # Reading

    def meta(self, key: str, default: Any = None) -> Any:
        value = self._one("SELECT value FROM meta WHERE key = ?", (key,))
        return default if value is None else json.loads(value)

    def rollout(self, rollout: int) -> Rollout:
        rows = self._rollouts("WHERE id = ?", (operator.index(rollout),))
        if not rows:
            raise LedgerError(f"rollout {rollout} was never admitted")
        return rows[0]

    def running(self) -> list[Rollout]:
        """Handed out and not finished, oldest first: what a resumed run starts again before it admits new ones."""
        return self._rollouts("WHERE state = 'running' ORDER BY id")

    def finished(self) -> list[Rollout]:
        """Finished and not yet trained, in the order in which they finished."""
        return self._rollouts("WHERE state = 'finished' ORDER BY arrival")

    def stored(self) -> list[Rollout]:
        """All that ever finished, whatever became of them, in the order in which they finished."""
        return self._rollouts("WHERE arrival IS NOT NULL ORDER BY arrival")

    def dropped(self, reason: str) -> list[Rollout]:
        return self._rollouts("WHERE state = 'dropped' AND reason = ? ORDER BY id", (reason,))

    def members(self, groups: Iterable[int]) -> list[Rollout]:
        """All rollouts of these groups: the finished ones in their order, then those that never finished, by id."""
        groups = [operator.index(group) for group in groups]
        condition = f"WHERE grp IN ({', '.join('?' * len(groups))}) ORDER BY arrival IS NULL, arrival, id"
        return self._rollouts(condition, tuple(groups))

    def next_rollout(self) -> int:
        """The first position of the stream that was not handed out."""
        return self._one("SELECT coalesce(max(id) + 1, 0) FROM rollouts")

    def last_location(self) -> Any:
        """Location of what was stored last, None before the first: what lies behind it is not in use."""
        stored = "kind IN ('finish', 'segment') ORDER BY position DESC LIMIT 1"
        value = self._one(f"SELECT payload FROM events WHERE {stored}")
        location = None if value is None else json.loads(value)["location"]
        return location[-1] if isinstance(location, list) else location

    def segments(self, rollout: int) -> list[Any]:
        """Locations of what is stored of a rollout that has not finished, in order: the segments that the newest one
        joins on, whichever attempts they are of."""
        rollout = operator.index(rollout)
        if self._one("PRAGMA user_version") == 1:  # an older ledger that is only read
            location = self._newest_part(rollout)
            return [] if location is None else [location]
        query = "SELECT location FROM segments WHERE rollout = ? ORDER BY start"
        return [json.loads(location) for (location,) in self._all(query, (rollout,))]

    def _newest_part(self, rollout: int) -> Any:
        query = "SELECT payload FROM events WHERE kind = 'segment' AND json_extract(payload, '$.rollout') = ? "
        value = self._one(query + "ORDER BY position DESC LIMIT 1", (rollout,))
        return None if value is None else json.loads(value)["location"]

    def failures(self, rollout: int) -> list[str]:
        """What the failed attempts of a rollout ended in, in order; attempts that ended with the run are none."""
        query = (
            "SELECT json_extract(payload, '$.failure') FROM events WHERE kind IN ('restart', 'drop') "
            "AND json_extract(payload, '$.rollout') = ? AND json_extract(payload, '$.failure') IS NOT NULL "
            "ORDER BY position"
        )
        return [failure for (failure,) in self._all(query, (operator.index(rollout),))]

    def last_version(self) -> int:
        """The highest version any rollout was trained into; 0 before the first."""
        return self._one("SELECT coalesce(max(version), 0) FROM rollouts")

    def require_version(self, version: int) -> None:
        """Refuses a version lower than one the run has had: after a rewind, old samples would look like future ones."""
        if version < (last := self.last_version()):
            raise LedgerError(f"version {version} is lower than version {last}, which this run has already reached")

    def last_position(self) -> int:
        """Position of the newest event, 0 before the first."""
        return self._one("SELECT coalesce(max(position), 0) FROM events")

    def events(self, after: int = 0, kinds: Iterable[str] | None = None) -> Iterator[Event]:
        """Events behind position `after`, in order; those written during the iteration are included."""
        condition, names = "", []
        if kinds is not None:
            names = list(kinds)
            condition = f" AND kind IN ({', '.join('?' * len(names))})"
        query = f"SELECT position, kind, payload, time FROM events WHERE position > ?{condition} ORDER BY position"
        # In pages: a cursor that stays open would see an undefined mixture while rows are added.
        while page := self._all(query + " LIMIT 500", (after, *names)):
            for position, kind, payload, seconds in page:
                yield Event(position, kind, json.loads(payload), seconds)
            after = page[-1][0]

    def counts(self) -> dict[str, int]:
        """Rollouts by state, and "handed_out" = running + finished + trained + dropped."""
        by_state = dict(self._all("SELECT state, count(*) FROM rollouts GROUP BY state"))
        result = {state: by_state.get(state, 0) for state in STATES}
        return result | {"handed_out": sum(result.values())}

    def dropped_by(self) -> dict[tuple[str, str], int]:
        """Number of dropped rollouts by (reason, task)."""
        query = "SELECT reason, task, count(*) FROM rollouts WHERE state = 'dropped' GROUP BY 1, 2 ORDER BY 1, 2"
        return {(reason, task): count for reason, task, count in self._all(query)}

    def check(self) -> dict[str, int]:
        """Verifies handed out = pending + trained + dropped by ids, rows and events; returns `counts()`."""
        with translated(self.path), self._snapshot():
            counts = self.counts()
            told = dict(self._all("SELECT kind, count(*) FROM events GROUP BY kind"))
            trained = self._one(
                "SELECT coalesce(sum(json_array_length(payload, '$.rollouts')), 0) FROM events WHERE kind = 'train'"
            )
            arrived = self._one("SELECT count(*) FROM rollouts WHERE arrival IS NOT NULL")
            sides = [
                ("handed out", counts["handed_out"], "positions used", self.next_rollout()),
                ("handed out", counts["handed_out"], "admit events", told.get("admit", 0)),
                ("ever finished", arrived, "finish events", told.get("finish", 0)),
                ("trained", counts["trained"], "in train events", trained),
                ("dropped", counts["dropped"], "drop events", told.get("drop", 0)),
            ]
        for name, left, other, right in sides:
            if left != right:
                raise LedgerError(f"{self.path} contradicts itself: {left} rollouts {name}, {right} {other}")
        return counts

    def _require(self, rollout: int, wish: str, *allowed: str) -> Rollout:
        row = self.rollout(rollout)
        if row.state not in allowed:
            detail = f" (version {row.version})" if row.state == "trained" else ""
            raise LedgerError(
                f"rollout {row.id} cannot be {wish}: it is {row.state}{detail}, not {' or '.join(allowed)}"
            )
        return row

    def _rollouts(self, condition: str, values: tuple = ()) -> list[Rollout]:
        rows = self._all(f"SELECT {_COLUMNS} FROM rollouts {condition}", values)
        decode = lambda text: None if text is None else json.loads(text)  # noqa: E731
        return [Rollout(*row[:8], decode(row[8]), *row[9:]) for row in rows]


def staleness(version: int, oldest: int, newest: int | None = None) -> int:
    """Staleness of a trajectory trained at `version` whose sampled tokens have versions `oldest` to `newest`.

    A sample from the future is refused: its negative staleness would pass every upper limit.
    """
    if (newest := oldest if newest is None else newest) > version:
        raise LedgerError(f"the trajectory has tokens of version {newest}, but the trainer is at {version}: refused")
    return version - oldest


def _to_json(value: Any) -> str:
    return json.dumps(value, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if not hasattr(value, "tolist"):  # arrays and scalars of numpy and JAX
        raise TypeError(f"{type(value).__name__} cannot be written to the ledger")
    return value.tolist()


def _describe(data: Any) -> str:
    return "unknown" if data is None else ", ".join(f"{k}={v}" for k, v in data.items())
