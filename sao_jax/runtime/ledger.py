"""The ledger: which rollouts exist and what became of them, and every event of a run in order, in one SQLite file.

A rollout is running, finished, trained(version) or dropped(reason); it never goes back. Each transition and the event
that tells of it are one transaction, so that the tables can be rebuilt from the events and a kill or a power cut leaves
all of a turn or nothing of it. Rollout ids are the positions in the task stream, handed out without gaps: the next
position is derived from the rows, never stored beside them, and so it cannot run ahead of what was really handed out.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import operator
import os
import pathlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SCHEMA_VERSION = 2  # 1: without the table of segments
STATES = ("running", "finished", "trained", "dropped")

_SCHEMA = """
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY, task TEXT NOT NULL, grp INTEGER NOT NULL, sample INTEGER NOT NULL,
  attempt INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'running', version INTEGER, reason TEXT,
  location TEXT, reward REAL, arrival INTEGER, started REAL NOT NULL, finished REAL,
  CHECK (state IN ('running', 'finished', 'trained', 'dropped')),
  CHECK (state NOT IN ('finished', 'trained') OR (location IS NOT NULL AND reward IS NOT NULL)),
  CHECK ((state = 'trained') = (version IS NOT NULL)), CHECK ((state = 'dropped') = (reason IS NOT NULL))
) STRICT;
CREATE INDEX rollouts_by_state ON rollouts (state);
CREATE INDEX rollouts_by_arrival ON rollouts (arrival);
CREATE INDEX rollouts_by_group ON rollouts (grp);
CREATE INDEX rollouts_by_version ON rollouts (version);
CREATE TABLE events (
  position INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, payload TEXT NOT NULL, time REAL NOT NULL
) STRICT;
CREATE INDEX events_by_kind ON events (kind);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""
# What is stored of each running or dropped rollout: segments that join, by the position of their first token.
_SEGMENTS = """
CREATE TABLE segments (
  rollout INTEGER NOT NULL, start INTEGER NOT NULL, location TEXT NOT NULL, PRIMARY KEY (rollout, start)
) STRICT, WITHOUT ROWID;
"""


class LedgerError(ValueError):
    """The ledger cannot be opened, or a transition is not allowed; the message is one line."""


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


class Ledger:
    """One writer per file (a lock that dies with its process), any number of readers with `read_only=True`.

    `create=True` makes a new ledger and refuses an existing one; `create=False` opens an existing one. A write outside
    `with ledger.transaction():` is a transaction of its own; group the events of one turn, a commit waits for the disk.
    To be used from the thread that opened it.
    """

    def __init__(self, path: str | os.PathLike, *, create: bool = False, read_only: bool = False):
        self.path = pathlib.Path(path)
        self._lock: int | None = None
        self._db: sqlite3.Connection | None = None
        if create and read_only:
            raise LedgerError("create=True and read_only=True exclude each other")
        if not create and not self.path.exists():
            raise LedgerError(f"no ledger at {self.path}")
        if not read_only:
            self._lock = _lock(self.path)
        try:
            self._db = _connect(self.path, read_only)
            with _translated(self.path):
                if not read_only:
                    self._db.execute("PRAGMA journal_mode=WAL")
                    self._db.execute("PRAGMA synchronous=FULL")
                self._open(create, read_only)
        except LedgerError:
            self.close()
            raise

    def _open(self, create: bool, read_only: bool) -> None:
        version = self._one("PRAGMA user_version")
        if version == 0 and self._one("SELECT count(*) FROM sqlite_master") == 0:
            # Also what a kill during the creation leaves, hence not an error when creating.
            if not create:
                raise LedgerError(f"{self.path} holds no ledger: its creation was interrupted")
            with self.transaction():
                self._run((_SCHEMA + _SEGMENTS).strip().split(";\n"))
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            return
        if create:
            raise LedgerError(f"{self.path} exists already: resume this run or choose another run folder")
        if not 1 <= version <= SCHEMA_VERSION:
            raise LedgerError(f"{self.path} has ledger format {version}, this program reads 1 to {SCHEMA_VERSION}")
        # A reader may look at a large live run every few seconds; only who is going to write checks every page.
        problem = "ok" if read_only else self._one("PRAGMA quick_check(1)")
        if problem != "ok":
            raise LedgerError(f"{self.path} is damaged ({' '.join(problem.split())})")
        if version == 1 and not read_only:
            self._add_segments()

    def _add_segments(self) -> None:
        """Makes format 2 of format 1, in which each part of a rollout held all that came before it."""
        with self.transaction():
            self._run(_SEGMENTS.strip().split(";\n"))
            for rollout in [*self.running(), *self.dropped("failed")]:
                if (location := self._newest_part(rollout.id)) is not None:
                    self._db.execute("INSERT INTO segments VALUES (?, 0, ?)", (rollout.id, _to_json(location)))
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    # Writing

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is durable when the block ends, or undone if it raises.

        A block inside a block is a savepoint: an error caught within the outer block undoes the inner one only.
        """
        begin, commit, undo = "BEGIN IMMEDIATE", ("COMMIT",), ("ROLLBACK",)
        if self._db.in_transaction:
            begin, commit, undo = "SAVEPOINT inner", ("RELEASE inner",), ("ROLLBACK TO inner", "RELEASE inner")
        with _translated(self.path):
            self._db.execute(begin)
            complete = False
            try:
                yield
                self._run(commit)
                complete = True
            finally:
                if not complete and self._db.in_transaction:
                    self._run(undo)

    def _run(self, statements: Iterable[str]) -> None:
        for statement in statements:
            self._db.execute(statement)

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
        with _translated(self.path), self._snapshot():
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

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        """All reads inside see one state, also while another process writes."""
        own = not self._db.in_transaction
        if own:
            self._db.execute("BEGIN")
        try:
            yield
        finally:
            if own:
                self._db.execute("COMMIT")

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

    def _all(self, query: str, values: tuple = ()) -> list[tuple]:
        with _translated(self.path):
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, values: tuple = ()) -> Any:
        rows = self._all(query, values)
        return rows[0][0] if rows else None


def staleness(version: int, oldest: int, newest: int | None = None) -> int:
    """Staleness of a trajectory trained at `version` whose sampled tokens have versions `oldest` to `newest`.

    A sample from the future is refused: its negative staleness would pass every upper limit.
    """
    if (newest := oldest if newest is None else newest) > version:
        raise LedgerError(f"the trajectory has tokens of version {newest}, but the trainer is at {version}: refused")
    return version - oldest


def _connect(path: pathlib.Path, read_only: bool) -> sqlite3.Connection:
    uri = path.resolve().as_uri()
    if read_only:
        uri += "?mode=ro"
        # Readers of a WAL file need its index beside it; in a folder they may not write to, a file that nobody
        # writes and that has no log left can be read as it is.
        if not os.access(path.parent, os.W_OK) and not pathlib.Path(f"{path}-wal").exists():
            uri += "&immutable=1"
    with _translated(path):
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)


@contextlib.contextmanager
def _translated(path: pathlib.Path) -> Iterator[None]:
    """SQLite's errors as one line that names the file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise LedgerError(f"{path}: {error}") from error
    except sqlite3.IntegrityError as error:
        raise LedgerError(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} is damaged or no ledger ({error})") from error


def _lock(path: pathlib.Path) -> int:
    """An exclusive lock that the kernel releases with its process, however that ends."""
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LedgerError(f"{path} cannot be opened for writing: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise LedgerError(f"run {path.parent} is already being written by process {owner}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def is_being_written(path: str | os.PathLike) -> bool:
    """Whether a process has the ledger at `path` open for writing."""
    try:
        with open(f"{path}.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


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
