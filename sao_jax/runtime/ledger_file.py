"""The file that a ledger lies in: its tables, one writer at a time, transactions, and errors in one line."""

import contextlib
import fcntl
import os
import pathlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

SCHEMA_VERSION = 2  # 1: without the table of segments

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
SEGMENTS = """
CREATE TABLE segments (
  rollout INTEGER NOT NULL, start INTEGER NOT NULL, location TEXT NOT NULL, PRIMARY KEY (rollout, start)
) STRICT, WITHOUT ROWID;
"""


class LedgerError(ValueError):
    """The ledger cannot be opened, or a transition is not allowed; the message is one line."""


class LedgerFile:
    """One writer per file (a lock that dies with its process), any number of readers with `read_only=True`.

    `create=True` makes a new ledger and refuses an existing one; `create=False` opens an existing one. To be used from
    the thread that opened it. `before_commit()` is called before a transaction becomes durable: what it tells of is on
    the disk by then.
    """

    def __init__(self, path: str | os.PathLike, *, create: bool = False, read_only: bool = False):
        self.path = pathlib.Path(path)
        self.before_commit: Callable[[], None] = lambda: None
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
            with translated(self.path):
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
                self._run((_SCHEMA + SEGMENTS).strip().split(";\n"))
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
        """Makes format 2 of format 1."""
        raise NotImplementedError

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is durable when the block ends, or undone if it raises.

        A block inside a block is a savepoint: an error caught within the outer block undoes the inner one only.
        """
        begin, commit, undo = "BEGIN IMMEDIATE", ("COMMIT",), ("ROLLBACK",)
        outer = not self._db.in_transaction
        if not outer:
            begin, commit, undo = "SAVEPOINT inner", ("RELEASE inner",), ("ROLLBACK TO inner", "RELEASE inner")
        with translated(self.path):
            self._db.execute(begin)
            complete = False
            try:
                yield
                if outer:
                    self.before_commit()
                self._run(commit)
                complete = True
            finally:
                if not complete and self._db.in_transaction:
                    self._run(undo)

    def _run(self, statements: Iterable[str]) -> None:
        for statement in statements:
            self._db.execute(statement)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
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

    def _all(self, query: str, values: tuple = ()) -> list[tuple]:
        with translated(self.path):
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, values: tuple = ()) -> Any:
        rows = self._all(query, values)
        return rows[0][0] if rows else None


def _connect(path: pathlib.Path, read_only: bool) -> sqlite3.Connection:
    uri = path.resolve().as_uri()
    if read_only:
        uri += "?mode=ro"
        # Readers of a WAL file need its index beside it; in a folder they may not write to, a file that nobody
        # writes and that has no log left can be read as it is.
        if not os.access(path.parent, os.W_OK) and not pathlib.Path(f"{path}-wal").exists():
            uri += "&immutable=1"
    with translated(path):
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)


@contextlib.contextmanager
def translated(path: pathlib.Path) -> Iterator[None]:
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
