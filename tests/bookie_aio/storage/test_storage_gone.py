"""Segments and indexes that go, or are made again, while somebody reads or a neighbour needs them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.storage.disk import disk as disk_module
from bookie_aio.storage.disk.disk import TEMPORARY_SUFFIX, RealDisk
from bookie_aio.storage.read.reader import gather, read_block
from bookie_aio.storage.segment.format import INDEX_SUFFIX, SEGMENT_SUFFIX, index_name, segment_name
from bookie_aio.storage.segment.index import IndexHead
from bookie_aio.storage.segment.segment_set import SegmentGoneError
from bookie_aio.wire.messages import Stop
from metadata.errors import DirectoryInUseError, DiskFailedError, DiskFullError
from tests.support.storage import SMALL, FaultyDisk, Store, make_block, unaccounted_files

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.storage.disk.disk import RealFile
    from bookie_aio.storage.segment.segment_set import Source
    from metadata.errors import StorageError


async def fill_segment(store: Store, ledger_id: int) -> int:
    """Fill what is left of the current segment with a ledger's entries; gives how many."""
    current = store.engine._journal.segment
    first = store.engine.last_entry(ledger_id) + 1
    entry = first
    while store.engine._journal.room > 2000:
        await store.add(make_block(ledger_id, entry, [bytes(1000)]))
        entry += 1
    assert store.engine._journal.segment is current
    return entry - first


async def fill_around_a_gap(store: Store) -> int:
    """Fill three segments, and have the second one given up; gives how many entries the first ledger has."""
    counts = {}
    for ledger_id in (1, 2, 3):
        counts[ledger_id] = await fill_segment(store, ledger_id)
        await store.add(make_block(ledger_id + 1, 0, [bytes(1500)]))  # this one takes the next segment
    await store.settled()
    await store.wait(lambda done: store.engine.append_tombstone(2, done))
    await store.settled()
    assert 2 not in store.engine._segments.by_id
    return counts[1]


async def test_an_index_is_rebuilt_although_the_segment_that_followed_was_given_up(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    count = await fill_around_a_gap(store)
    await store.close()
    assert (tmp_path / "b1" / segment_name(1)).stat().st_size == SMALL.segment_bytes
    (tmp_path / "b1" / index_name(1)).unlink()
    again = await Store.open(tmp_path / "b1")
    assert not again.engine.marking.concerns_all
    assert (await again.read(1, 0, count - 1))[1] is Stop.END
    await again.close()


class NoNewIndexes(FaultyDisk):
    """A disk without room for an index, when it is told to."""

    is_armed = False

    async def create(self, path: str) -> RealFile:
        if self.is_armed and path.endswith(INDEX_SUFFIX + TEMPORARY_SUFFIX):
            raise DiskFullError("no space for the index")
        return await super().create(path)


async def test_a_crash_before_an_index_is_made_again_is_no_damage(tmp_path: Path) -> None:
    """Where the segment that followed is gone, only the checkpoint says where this one ended."""
    disk = NoNewIndexes()
    store = await Store.open(tmp_path / "b1", disk=disk)
    count = await fill_around_a_gap(store)
    path = tmp_path / "b1" / index_name(1)
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    store.engine._segments._heads.clear()
    store.engine._segments._evict_locations()
    disk.is_armed = True
    assert (await store.read(1, 0, count - 1))[1] is Stop.END  # from the index in memory
    crashed = await store.crash_into(tmp_path / "crashed")
    for _ in range(2):
        again = await Store.open(crashed)
        assert again.engine.notes == []
        assert not again.engine.marking.concerns_all
        assert (await again.read(1, 0, count - 1))[1] is Stop.END
        await again.close()
    await store.close()


async def test_who_looked_into_an_index_before_it_was_made_again_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(tmp_path / "b1")
    engine = store.engine
    for entry in range(20):
        for ledger_id in (1, 2, 3):
            await store.add(make_block(ledger_id, entry, [bytes(500)]))
    await fill_segment(store, 4)
    await store.add(make_block(4, 1000, [bytes(1500)]))  # this one takes the next segment
    await store.settled()
    segment, find = engine._segments.by_id[1], engine._segments.find
    found_before = []

    async def find_then_rebuild(ledger_id: int, since: int, low: int, high: int) -> list[Source]:
        found = await find(ledger_id, since, low, high)
        if not found_before:
            found_before.append(found)
            # Without ledger 1 in the index, the numbers of the runs behind it are others.
            await store.wait(lambda done: engine.append_tombstone(1, done))
            assert await engine._index_rebuilder.rebuild(segment)
            assert segment.sealed is not None
        return found

    monkeypatch.setattr(engine._segments, "find", find_then_rebuild)
    entries, stop, _ = await store.read(2, 0, 19)
    assert (len(entries), stop) == (20, Stop.END)
    assert not engine.is_damaged(2)
    await store.close()


async def test_a_reader_that_comes_late_does_not_take_a_file_used_again_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    engine = store.engine
    for entry in range(5):
        await store.add(make_block(1, entry, [b"kept" * 100]))
    await fill_segment(store, 2)
    await store.add(make_block(3, 0, [bytes(1500)]))  # this one takes the next segment
    await store.settled()
    segment = engine._segments.by_id[1]
    (found, *_), _ = await gather(await engine._lookup.sources(1, 0, 4), 0, 4, 256)
    assert found.segment is segment
    late, unlink = [], disk.unlink

    async def unlink_and_read(path: str) -> None:
        await unlink(path)
        if path == segment.index_path:  # its file was closed, and is not renamed yet
            late.append(await read_block(found, 1))

    monkeypatch.setattr(disk, "unlink", unlink_and_read)
    await store.wait(lambda done: engine.append_tombstone(2, done))
    await store.settled()
    assert segment.is_gone
    assert len(late) == 1
    while engine._journal.segment.is_reused is False or engine._journal.room > 10_000:
        await store.add(make_block(3, engine.last_entry(3) + 1, [os.urandom(3000)]))
        await store.settled()
    with pytest.raises(SegmentGoneError):
        await read_block(found, 1)
    assert (await store.read(1, 0, 4))[1] is Stop.END
    assert not engine.is_damaged(1)
    await store.close()


async def store_with_a_damaged_index(path: Path, disk: FaultyDisk) -> Store:
    """Return a store of sealed segments 1 to 3, each of the ledger of that number, and also 2 of ledger 5.

    Segment 2's index fails its checksums.
    """
    store = await Store.open(path, disk=disk)
    await fill_segment(store, 1)
    await store.add(make_block(5, 0, [bytes(1500)]))  # this one takes the next segment
    for ledger_id in (2, 3):
        await fill_segment(store, ledger_id)
        await store.add(make_block(ledger_id + 1, 0, [bytes(1500)]))
    await store.settled()
    assert [segment.segment_id for segment in store.engine._segments.sealed()] == [1, 2, 3]
    index = path / index_name(2)
    data = bytearray(index.read_bytes())
    data[IndexHead(data).page_offset(0) + 9] ^= 1
    index.write_bytes(data)
    return store


class WithoutIndexes(FaultyDisk):
    """A disk that has no room for an index as long as the test says so."""

    is_refusing = False

    async def create(self, path: str) -> RealFile:
        if self.is_refusing and path.endswith(".index.new"):
            raise DiskFullError("the test says there is no space")
        return await super().create(path)


async def test_who_knew_of_a_later_segment_that_is_gone_finds_the_one_that_was_sealed_again(
    tmp_path: Path,
) -> None:
    disk = WithoutIndexes()
    store = await store_with_a_damaged_index(tmp_path / "b1", disk)
    segments = store.engine._segments
    disk.is_refusing = True  # so that the index which is made again stays in memory
    for _ in range(2):  # the second time it is known what segments 1 and 3 hold of ledger 5
        assert (await store.read(5, 0, 0))[1] is Stop.END
    assert [segment.segment_id for segment in segments.sealed()] == [1, 3]
    await store.wait(lambda done: store.engine.append_tombstone(3, done))
    await store.settled()
    assert [segment.segment_id for segment in segments.sealed()] == [1]
    disk.is_refusing = False
    await store.engine._sealer.seal_all()
    assert [segment.segment_id for segment in segments.sealed()] == [1, 2]
    assert (await store.read(5, 0, 0))[1] is Stop.END
    await store.close()


@pytest.mark.parametrize(
    "step",
    [
        ("create", "checkpoint.new"),
        ("rename", "checkpoint"),
        ("create", ".index.new"),
        ("write", ".index.new"),
        ("rename", ".index"),
    ],
    ids=" ".join,
)
async def test_an_index_is_made_again_to_the_end_although_its_reader_goes(
    tmp_path: Path, step: tuple[str, str]
) -> None:
    disk = FaultyDisk()
    store = await store_with_a_damaged_index(tmp_path / "b1", disk)
    reading = asyncio.create_task(store.read(2, 0, 0))

    def go(what: str, path: str) -> None:
        if what == step[0] and path.endswith(step[1]):
            reading.cancel()

    disk.on_step = go
    with pytest.raises(asyncio.CancelledError):
        await reading
    await store.settled()
    assert [segment.segment_id for segment in store.engine._segments.sealed()] == [1, 2, 3]
    assert not unaccounted_files(store)
    disk.on_step = lambda what, path: None
    assert (await store.read(2, 0, 0))[1] is Stop.END
    await store.close()


@pytest.mark.parametrize("suffix", [SEGMENT_SUFFIX, INDEX_SUFFIX])
async def test_a_lack_of_file_descriptors_is_no_damage_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    store = await Store.open(tmp_path / "b1", replace(SMALL, files_max=1))
    engine = store.engine
    for entry in range(200):
        await store.add(make_block(1, entry, [bytes(1000)]))
    await store.settled()
    open_file = os.open

    def fail(path: str, flags: int, mode: int = 0o777) -> int:
        if path.endswith(suffix):
            raise OSError(errno.EMFILE, "too many open files")
        return open_file(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        for first in range(0, 200, 40):
            with contextlib.suppress(DiskFullError):
                await store.read(1, first, first)
        assert not engine.is_damaged(1)
        await engine._scrubber.scrub()
    assert not engine.is_damaged(1)
    assert not store.failures
    entries, stop, _ = await store.read(1, 0, 199)
    assert (len(entries), stop) == (200, Stop.END)
    await store.close()


# --- descriptors ---


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have writes wait in their threads; gives what is set when one has begun, and what lets them go on."""
    has_begun, may_write = threading.Event(), threading.Event()
    write_all = disk_module._write_all

    def write_late(*arguments: Any) -> None:
        has_begun.set()
        may_write.wait()
        write_all(*arguments)

    monkeypatch.setattr(disk_module, "_write_all", write_late)
    return has_begun, may_write


@pytest.mark.parametrize("is_journal", [True, False], ids=["journal", "pool"])
async def test_a_file_that_is_closed_while_a_thread_writes_it_keeps_its_descriptor_until_then(
    is_journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file that is opened would get that number, and what is still to be written."""
    disk = RealDisk()
    has_begun, may_write = hold_writes(monkeypatch)
    file = await disk.create(str(tmp_path / "segment"))
    if is_journal:
        writing: asyncio.Future[None] = file.write_and_sync([b"a group"], 0)
    else:
        writing = asyncio.ensure_future(file.write([b"a group"], 0))
    await asyncio.to_thread(has_begun.wait)
    if not is_journal:
        writing.cancel()
    file.close()
    innocent = os.open(tmp_path / "innocent", os.O_RDWR | os.O_CREAT)
    may_write.set()
    with contextlib.suppress(asyncio.CancelledError):
        await writing
    disk.close()
    assert os.fstat(innocent).st_size == 0
    os.close(innocent)
    assert (tmp_path / "segment").read_bytes() == b"a group"
    assert file._descriptor == -1


async def test_the_lock_is_held_until_what_the_journal_writes_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it next would replay the segment while the rest of a group gets there."""
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    with monkeypatch.context() as patched:
        has_begun, may_write = hold_writes(patched)
        told: list[StorageError | None] = []
        store.engine.append_block(make_block(1, 0, [b"late"]), told.append)
        await asyncio.to_thread(has_begun.wait)
        store.engine.health.fail(DiskFailedError("the test says that an index failed"), "a test")
        assert [type(error) for error in told] == [DiskFailedError]
        await store.engine.close()
        with pytest.raises(DirectoryInUseError):
            store.disk.lock_directory(str(store.path))
        may_write.set()
        store.disk.close()
    again = await Store.open(tmp_path / "b1")
    assert (await again.read(1, 0, 0))[0] == {0: b"late"}  # it may be there, and is
    await again.close()
