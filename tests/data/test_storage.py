import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import pytest

from sao_jax.data.storage import Location, TrajectoryStore


@pytest.fixture
def open_store():
    """Opens stores and closes them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(TrajectoryStore(*args, **kwargs))


def test_records_come_back_and_fill_shards_in_order(tmp_path):
    with TrajectoryStore(tmp_path / "new", shard_bytes=10) as store:
        places = [store.append(data) for data in (b"aaaa", b"bbbbbb", b"c", b"x" * 25, b"d")]
        assert [(p.file, p.offset, p.length) for p in places] == [
            ("000000.bin", 0, 4),
            ("000000.bin", 4, 6),
            ("000001.bin", 0, 1),
            ("000002.bin", 0, 25),  # larger than a shard: alone in its own
            ("000003.bin", 0, 1),
        ]
        assert [store.read(p) for p in places] == [b"aaaa", b"bbbbbb", b"c", b"x" * 25, b"d"]


def test_a_flush_waits_for_what_was_appended_and_a_full_shard_is_flushed(tmp_path, open_store, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: flushed.append(os.readlink(f"/proc/self/fd/{handle}")[-10:]))
    store = open_store(tmp_path, shard_bytes=10)
    store.flush()
    assert not flushed
    for data in (b"aaaa", b"bbbb"):
        store.append(data)
    store.flush()
    store.flush()
    assert flushed == ["000000.bin"]
    store.append(b"cc")
    store.append(b"dddd")  # begins another shard
    assert flushed == ["000000.bin"] * 2
    store.flush()
    assert flushed == ["000000.bin", "000000.bin", "000001.bin"]


def test_an_empty_record_is_refused(tmp_path, open_store):
    with pytest.raises(ValueError, match="at least one byte"):
        open_store(tmp_path).append(b"")


def test_another_process_reads_at_once_and_the_next_one_continues(tmp_path, open_store):
    writer = open_store(tmp_path)
    first = writer.append(b"first")
    assert open_store(tmp_path).read(first) == b"first"
    writer.close()
    second = open_store(tmp_path).append(b"second")
    assert second.offset == 5
    assert open_store(tmp_path).read(second) == b"second"


def test_damage_is_named_with_file_and_offset(tmp_path, open_store):
    store = open_store(tmp_path)
    store.append(b"ok")
    place = store.append(b"record")
    path = tmp_path / place.file
    path.write_bytes(b"okrecorX")
    with pytest.raises(ValueError, match=r"000000\.bin offset 2: checksum differs"):
        store.read(place)
    path.write_bytes(b"okrec")
    with pytest.raises(ValueError, match=r"000000\.bin offset 2: 3 of 6 bytes"):
        store.read(place)
    path.unlink()
    with pytest.raises(ValueError, match="is gone"):
        store.read(place)
    with pytest.raises(ValueError, match="not the name of a shard"):
        store.read(Location("../secret", 0, 1, 0))


@hypothesis.settings(max_examples=30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    records=st.lists(st.binary(min_size=1, max_size=12), max_size=8), keep=st.integers(0, 8), torn=st.binary(max_size=5)
)
def test_truncation_drops_what_follows_the_last_known_record(tmp_path_factory, records, keep, torn):
    folder = tmp_path_factory.mktemp("store")
    store = TrajectoryStore(folder, shard_bytes=16)
    places = [store.append(data) for data in records]
    store.close()
    if shards := sorted(folder.glob("*.bin")):
        with open(shards[-1], "ab") as file:  # a crash in the middle of a record
            file.write(torn)
    keep = min(keep, len(records))
    store = TrajectoryStore(folder, shard_bytes=16)
    dropped = store.truncate_after(places[keep - 1] if keep else None)
    assert dropped == sum(map(len, records[keep:])) + (len(torn) if shards else 0)
    assert [store.read(p) for p in places[:keep]] == records[:keep]
    again = [store.append(data) for data in records[keep:]]
    assert again == places[keep:]
    assert [store.read(p) for p in again] == records[keep:]
    store.close()


def test_truncation_refuses_a_last_record_that_is_not_whole(tmp_path, open_store):
    store = open_store(tmp_path)
    place = store.append(b"record")
    os.truncate(tmp_path / place.file, 3)
    with pytest.raises(ValueError, match="3 of 6 bytes"):
        store.truncate_after(place)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has: run the tests there")
def test_a_full_disk_is_an_error_with_context_and_leaves_the_store_usable(tmp_path, open_store):
    store = open_store(tmp_path)
    first = store.append(b"first")
    store.close()
    store._handle = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device while storing 6 bytes at offset 5") as caught:
        store.append(b"second")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "000000.bin")
    second = store.append(b"second")
    assert (store.read(first), store.read(second)) == (b"first", b"second")


def test_a_half_written_record_is_taken_back(tmp_path, open_store):
    store = open_store(tmp_path)
    store.append(b"first")

    class HalfFull:
        """Takes three bytes, then the disk is full."""

        def __init__(self, handle):
            self._handle, self._room = handle, 3

        def write(self, data):
            if not self._room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self._handle.write(data[: self._room])
            self._room = 0
            return written

        def close(self):
            self._handle.close()

    store._handle = HalfFull(store._handle)
    with pytest.raises(OSError, match="No space left"):
        store.append(b"second")
    assert (tmp_path / "000000.bin").read_bytes() == b"first"
    assert store.read(store.append(b"second")) == b"second"


def test_what_append_returned_survives_a_killed_process(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from sao_jax.data.storage import TrajectoryStore
        store = TrajectoryStore(sys.argv[1], shard_bytes=1000)
        while True:
            p = store.append(b"record" * 10)
            print(p.file, p.offset, p.length, p.crc32, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    whole = [line.split() for line in lines if line.count(" ") == 3 and line.endswith("\n")]
    places = [Location(file, int(offset), int(length), int(crc)) for file, offset, length, crc in whole]
    store = TrajectoryStore(tmp_path, shard_bytes=1000)
    store.truncate_after(places[-1])
    assert len(places) >= 50
    assert {store.read(p) for p in places} == {b"record" * 10}
