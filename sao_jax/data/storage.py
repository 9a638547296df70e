"""An append-only store of records in large files.

Records lie back to back in shards `000000.bin`, `000001.bin`, ...; where each one lies is the caller's
knowledge (the run's ledger), which is also what tells a whole record from the torn tail of a crash. A shard of
trajectories can be read without it all the same: each record (safetensors) carries its own size.

One writer at a time; any number of readers, in any process.
"""

import dataclasses
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

_SHARD = re.compile(r"\d{6}\.bin")


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a record lies: `length` bytes from `offset` in shard `file`, with their CRC-32."""

    file: str
    offset: int
    length: int
    crc32: int


class TrajectoryStore:
    """Shards of about `shard_bytes` in `folder`, continued where the last process left off.

    Args:
      folder: made if absent.
      shard_bytes: a record that would grow the current shard beyond this starts the next one.
    """

    def __init__(self, folder: str | os.PathLike, *, shard_bytes: int = 64 << 20):
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._shard_bytes = shard_bytes
        self._handle = None
        self._on_disk = True
        shards = self._shards()
        self._index = int(shards[-1].stem) if shards else 0
        self._size = shards[-1].stat().st_size if shards else 0

    def append(self, data: bytes) -> Location:
        """Writes one record, returns once it is out of this process: a kill does not lose it, a power cut does before
        `flush`. An OSError leaves the store as before."""
        if not data:
            raise ValueError("a record has at least one byte")
        if self._size and self._size + len(data) > self._shard_bytes:
            self.flush()
            self.close()
            self._index, self._size = self._index + 1, 0
        path = self._path(self._index)
        try:
            if self._handle is None:
                self._handle = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open between records)
                self._sync_folder()
            self._on_disk = False
            left = memoryview(data)
            while left:
                left = left[self._handle.write(left) :]
        except OSError as error:
            self._drop_partial(path)
            what = f"{error.strerror or error} while storing {len(data)} bytes at offset {self._size}"
            raise OSError(error.errno, what, str(path)) from error
        location = Location(path.name, self._size, len(data), zlib.crc32(data))
        self._size += len(data)
        return location

    def flush(self) -> None:
        """Waits until the disk has what was appended."""
        if not self._on_disk:
            _wait_for(self._path(self._index), os.fdatasync)
            self._on_disk = True

    def read(self, location: Location) -> bytes:
        """The record's bytes. Raises ValueError naming file and offset if they are not what was stored."""
        path = self._existing(location)
        with open(path, "rb") as file:
            file.seek(location.offset)
            data = file.read(location.length)
        if len(data) != location.length:
            raise ValueError(f"{path} offset {location.offset}: {len(data)} of {location.length} bytes are there")
        if zlib.crc32(data) != location.crc32:
            raise ValueError(
                f"{path} offset {location.offset}: checksum differs, the {location.length} bytes are damaged"
            )
        return data

    def map(self, location: Location) -> np.ndarray:
        """The record as a read-only view of its file, uint8 [length]: nothing is read or copied before it is used.

        Its checksum is not looked at. Raises ValueError if the file ends before the record does.
        """
        path = self._existing(location)
        if path.stat().st_size < location.offset + location.length:
            raise ValueError(f"{path} ends before the record of {location.length} bytes at offset {location.offset}")
        return np.memmap(path, np.uint8, "r", location.offset, (location.length,))

    def truncate_after(self, location: Location | None) -> int:
        """Drops everything after a record (None: everything there is); returns the number of bytes dropped.

        Called after a crash with the last location that the ledger knows: what follows it is a torn tail, or
        records that were never acknowledged. Raises ValueError if the record itself is not whole.
        """
        if location is not None:
            self.read(location)
        self.close()
        last, size = (int(location.file[:6]), location.offset + location.length) if location else (0, 0)
        dropped = 0
        for path in reversed(self._shards()):
            if int(path.stem) < last:
                break
            keep = size if int(path.stem) == last else 0
            dropped += path.stat().st_size - keep
            if keep:
                os.truncate(path, keep)
            else:
                path.unlink()
        self._index, self._size = last, size
        self._sync_folder()
        return dropped

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def __enter__(self) -> "TrajectoryStore":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _existing(self, location: Location) -> Path:
        if not _SHARD.fullmatch(location.file):
            raise ValueError(f"{location.file!r} is not the name of a shard")
        path = self._folder / location.file
        if not path.exists():
            raise ValueError(f"{path} is gone; a record at offset {location.offset} was stored there")
        return path

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:06d}.bin"

    def _shards(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if _SHARD.fullmatch(path.name))

    def _drop_partial(self, path: Path) -> None:
        """Removes a half-written record, so that the next one lies where its location says."""
        self.close()
        if path.exists():
            os.truncate(path, self._size)

    def _sync_folder(self) -> None:
        """Makes the names in the folder durable: a synced file without its name is lost all the same."""
        _wait_for(self._folder, os.fsync)


def _wait_for(path: Path, sync: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
