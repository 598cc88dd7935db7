"""A disk that fails is the end; a disk that is full is not."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.disk.disk import JournalThread, RealDisk, RealFile, remove_files
from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFailedError, DiskFullError, StorageError
from tests.support.storage import SMALL, FaultyDisk, Store, make_block

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bookie_aio.wire.blocks import Buffer


async def add_until_refused(store: Store, first: int, *, from_reserve: bool = False) -> None:
    """Add entries of 5,000 bytes one by one."""
    for entry in range(first, 100):
        await store.add(make_block(1, entry, [b"x" * 5000]), from_reserve=from_reserve)


@pytest.mark.parametrize("torn_bytes", [0, 100, 10**6])
async def test_after_a_failed_write_nothing_is_acknowledged(tmp_path: Path, torn_bytes: int) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.add(make_block(1, 0, [b"good"]))
    disk.fail_journal_write, disk.torn_bytes = disk.journal_writes + 1, torn_bytes
    told: list[StorageError | None] = []
    store.engine.append_block(make_block(1, 1, [b"bad"]), told.append)
    await asyncio.sleep(0)  # in flight
    store.engine.append_block(make_block(1, 2, [b"queued"]), told.append)
    store.engine.append_term(1, 5, told.append)
    with pytest.raises(DiskFailedError):
        await store.barrier()
    assert [type(error) for error in told] == [DiskFailedError] * 3
    assert len(store.failures) == 1
    assert not store.engine.is_writable
    with pytest.raises(DiskFailedError):
        await store.add(make_block(1, 3, [b"late"]))
    with pytest.raises(DiskFailedError):
        await store.fence(1, 6)
    assert await store.read(1, 0, 1) == ({0: b"good"}, Stop.NO_SUCH_ENTRY, 1)
    assert len(store.failures) == 1
    await store.close()
    # The bytes may all be there: then the next start finds them, and writes them elsewhere.
    again = await Store.open(tmp_path / "b1")
    found, stop, at = await again.read(1, 0, 9)
    assert stop == Stop.NO_SUCH_ENTRY
    assert found == ({0: b"good", 1: b"bad"} if torn_bytes == 10**6 else {0: b"good"})
    assert again.engine.term(1) in (0, 5)  # a fence that nobody was told of may hold or not
    if torn_bytes == 10**6:
        await again.settled()
        (source,) = await again.engine._lookup.sources(1, 1, 1)
        assert (await source.overlapping(1, 1, 9))[0].first == 1
        assert source.segment.segment_id > 2
    assert at == len(found)
    await again.close()


@pytest.mark.parametrize("name", [".index.new", "checkpoint.new", ".segment"])
async def test_a_failed_sync_in_the_background_is_the_end_too(tmp_path: Path, name: str) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.settled()
    disk.fail_sync_of = name
    with pytest.raises(DiskFailedError):
        await add_until_refused(store, 0)
    assert len(store.failures) == 1
    await store.close()
    again = await Store.open(tmp_path / "b1")
    assert again.engine.last_entry(1) >= 5
    assert not again.engine.is_damaged(1)
    await again.close()


async def test_a_full_disk_refuses_adds_and_still_takes_fences_and_recovery(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.settled()
    disk.is_full = True
    back = asyncio.Event()
    store.engine._on_writable = lambda is_: (store.writable.append(is_), is_ and back.set())
    with pytest.raises(DiskFullError):
        await add_until_refused(store, 0)
    acknowledged = store.engine.last_entry(1) + 1
    assert store.writable == [False]
    assert not store.engine.is_writable
    assert not store.failures
    assert acknowledged > 5
    await store.fence(1, 7)
    with pytest.raises(DiskFullError):
        await add_until_refused(store, acknowledged, from_reserve=True)
    recovered = store.engine.last_entry(1) + 1 - acknowledged
    assert recovered * 5000 > SMALL.space.reserve_bytes // 2
    await store.fence(2, 8)  # the last part of the reserve is for fences
    assert (await store.read(1, 0, 99))[1:] == (Stop.NO_SUCH_ENTRY, acknowledged + recovered)
    crashed = await store.crash_into(tmp_path / "crashed")
    disk.is_full = False
    await asyncio.wait_for(back.wait(), 10)
    assert store.writable == [False, True]
    await store.settled()
    await store.add(make_block(1, 1000, [b"after"]))
    assert (tmp_path / "b1" / "reserve").exists()
    await store.close()
    for path, last in ((crashed, acknowledged + recovered - 1), (tmp_path / "b1", 1000)):
        again = await Store.open(path)
        assert again.engine.last_entry(1) == last
        assert (await again.read(1, 0, 99))[1:] == (Stop.NO_SUCH_ENTRY, acknowledged + recovered)
        assert (again.engine.term(1), again.engine.term(2)) == (7, 8)
        assert not again.engine.is_damaged(1)
        await again.close()


async def test_a_start_on_a_full_disk_uses_the_reserve(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    await store.add(make_block(1, 0, [b"tail"]))
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    disk = FaultyDisk()
    disk.is_full = True
    full = await Store.open(crashed, disk=disk)
    assert not full.engine.is_writable
    assert await full.read(1, 0, 0) == ({0: b"tail"}, Stop.END, 1)
    await full.fence(1, 3)
    twice = await full.crash_into(tmp_path / "twice")
    await full.close()
    for path in (crashed, twice):
        again = await Store.open(path)
        assert await again.read(1, 0, 0) == ({0: b"tail"}, Stop.END, 1)
        assert again.engine.term(1) == 3
        assert not again.engine.notes
        assert not again.engine.is_damaged(1)
        await again.close()


async def test_a_start_without_room_for_anything_says_so(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.is_full = True
    with pytest.raises(DiskFullError):
        await Store.open(tmp_path / "b1", disk=disk)
    store = await Store.open(tmp_path / "b1")  # and leaves the directory free
    await store.close()


async def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, whole_v = os.pwrite, os.pwritev
    short: list[int] = []

    def pwritev(descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        short.append(len(data))
        return whole_v(descriptor, [data[: len(data) // 2]], offset)

    def pwrite(descriptor: int, data: Buffer, offset: int) -> int:
        short.append(len(data))
        return whole(descriptor, bytes(data)[:1000], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "pwrite", pwrite)
    store = await Store.open(tmp_path / "b1")
    for entry in range(5):
        await store.add(make_block(1, entry, [bytes([entry]) * 10_000]))
    assert len(short) > 10
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    assert (await again.read(1, 0, 4))[0] == {n: bytes([n]) * 10_000 for n in range(5)}
    await again.close()


async def test_a_group_of_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    file = await store.disk.create(str(tmp_path / "file"))
    buffers = [b"%4d" % number for number in range(3000)]
    await file.write_and_sync(buffers, 10)
    assert bytes(await file.read(10, 12_000)) == b"".join(buffers)
    assert bytes(await file.read(12_000, 100)) == b"".join(buffers)[-10:]
    file.close()
    await store.close()


async def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    disk = RealDisk()
    with pytest.raises(FileNotFoundError):
        await disk.open(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError):
        await disk.list_directory(str(tmp_path / "nothing"))
    await disk.unlink(str(tmp_path / "nothing"))
    disk.close()


async def test_a_file_that_is_opened_for_somebody_who_has_gone_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"x")
    loop, open_file, close_file = asyncio.get_running_loop(), os.open, os.close
    is_opening, is_closed, may_go_on = asyncio.Event(), asyncio.Event(), threading.Event()
    descriptors: list[int] = []

    def open_late(name: str, flags: int, mode: int = 0o777) -> int:
        loop.call_soon_threadsafe(is_opening.set)
        may_go_on.wait(10)
        descriptors.append(open_file(name, flags, mode))
        return descriptors[0]

    def close(descriptor: int) -> None:
        close_file(descriptor)
        if descriptor in descriptors:
            is_closed.set()

    disk = RealDisk()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_late)
        patched.setattr(os, "close", close)
        opening = asyncio.create_task(disk.open(path))
        await is_opening.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        may_go_on.set()
        await asyncio.wait_for(is_closed.wait(), 10)
    disk.close()


@pytest.mark.parametrize("filler_bytes", [0, 40])
async def test_what_is_dropped_for_want_of_space_is_neither_promised_nor_remembered(
    tmp_path: Path, filler_bytes: int
) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.settled()
    disk.is_full = True
    engine = store.engine
    # Far more than the current segment, the next one and the reserve hold, and accepted before that is known.
    for entry in range(60):
        engine.append_block(make_block(1, entry, [bytes(5000)]), lambda error: None)
    engine.append_block(make_block(2, 0, [bytes(filler_bytes)]), lambda error: None)
    for other in range(100, 400):  # what is left behind the blocks
        engine.append_term(other, 1, lambda error: None)
    waiting = [
        when_durable(partial(engine.append_lock, 1, bytes(32))),
        when_durable(partial(engine.append_term, 1, 5)),
        when_durable(partial(engine.append_term, 1, 7)),
        when_durable(engine.barrier),  # for an answer about the fence, which must not promise it
    ]
    assert (engine.term(1), engine.lock(1)) == (7, bytes(32))
    told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert list(map(type, told)) == [DiskFullError] * 4
    # Nor may the next request find it held, and be told so without anything being written.
    assert (engine.term(1), engine.lock(1)) == (0, b"")
    assert not store.failures
    back = asyncio.Event()
    engine._on_writable = lambda is_: back.set()
    disk.is_full = False
    await asyncio.wait_for(back.wait(), 10)
    await store.fence(1, 7)
    assert engine.term(1) == 7
    await store.close()


async def test_a_tombstone_that_is_dropped_for_want_of_space_deletes_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    engine = store.engine
    await store.add(make_block(7, 0, [b"kept"]))
    await store.settled()
    disk.is_full = True
    # Far more than the current segment, the next one and the reserve hold, and accepted before that is known.
    for entry in range(60):
        engine.append_block(make_block(1, entry, [bytes(5000)]), lambda error: None)
    for other in range(100, 400):  # what is left behind the blocks
        engine.append_term(other, 1, lambda error: None)
    deleting = when_durable(partial(engine.append_tombstone, 7))
    assert engine.is_deleted(7)
    with pytest.raises(DiskFullError):
        await asyncio.wait_for(deleting, 10)
    # Nor may the next who asks be told that it is deleted, and a crash bring it back.
    assert not engine.is_deleted(7)
    assert (await store.read(7, 0, 0))[0] == {0: b"kept"}
    back = asyncio.Event()
    engine._on_writable = lambda is_: back.set()
    disk.is_full = False
    await asyncio.wait_for(back.wait(), 10)
    await store.add(make_block(7, 1, [b"more"]))
    await store.wait(partial(engine.append_tombstone, 7))
    assert engine.is_deleted(7)
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    assert again.engine.is_deleted(7)
    await again.close()


class Overtaxed(FaultyDisk):
    """A disk whose calls fail with what is no error of a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.overtaxed = ""

    async def create(self, path: str) -> RealFile:
        if self.overtaxed and path.endswith(self.overtaxed):
            raise MemoryError("the test says there is no memory")
        return await super().create(path)

    @property
    def journal_thread(self) -> JournalThread:
        if self.overtaxed == "journal":
            raise RuntimeError("can't start new thread")
        return super().journal_thread


@pytest.mark.parametrize("what", [".segment", ".index.new", "journal"])
async def test_an_error_that_is_not_the_disks_ends_the_bookie_as_well(tmp_path: Path, what: str) -> None:
    """Nobody is left waiting."""
    disk = Overtaxed()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.add(make_block(1, 0, [b"good"]))
    await store.settled()
    disk.overtaxed = what
    with pytest.raises(DiskFailedError):
        await asyncio.wait_for(add_until_refused(store, 1), 10)
    assert len(store.failures) == 1
    assert not store.engine.is_writable
    assert await store.read(1, 0, 0) == ({0: b"good"}, Stop.END, 1)
    await store.close()


class TwoSyncs(FaultyDisk):
    """A disk on which of two syncs of a directory under way at once the second one ends well."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[asyncio.Future[None]] | None = None
        self.both_under_way = asyncio.Event()

    async def sync_directory(self, path: str) -> None:
        if self.under_way is None or len(self.under_way) == 2:
            await super().sync_directory(path)
            return
        self.under_way.append(asyncio.get_running_loop().create_future())
        if len(self.under_way) == 2:
            self.both_under_way.set()
        await self.under_way[-1]


async def test_a_sync_that_ends_well_beside_one_that_failed_is_not_believed(tmp_path: Path) -> None:
    """What the other one was to write may count as written: whoever lists it loses it at a power cut."""
    disk = TwoSyncs()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.add(make_block(1, 0, [b"good"]))
    await store.settled()
    disk.under_way = []
    checkpointer, allocator = store.engine._checkpointer, store.engine._allocator
    checkpoint = asyncio.create_task(checkpointer.write())
    allocator.ready = None
    allocator.begin()
    await asyncio.wait_for(disk.both_under_way.wait(), 10)
    before = (tmp_path / "b1" / "checkpoint").read_bytes()
    disk.under_way[0].set_exception(DiskFailedError("the test says that a directory could not be synced"))
    await asyncio.sleep(0)
    disk.under_way[1].set_result(None)
    with pytest.raises(DiskFailedError):
        await checkpoint
    await store.engine.close()
    assert len(store.failures) == 1
    assert (tmp_path / "b1" / "checkpoint").read_bytes() == before
    disk.close()


async def test_after_a_failure_no_name_is_changed(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.add(make_block(1, 0, [b"good"]))
    await store.settled()
    store.engine.health.fail(DiskFailedError("the test says that an index could not be written"), "a test")
    before = sorted((file.name, file.stat().st_ino) for file in (tmp_path / "b1").iterdir())
    for change in (
        store.engine._checkpointer.write(),
        remove_files(store.engine._disk, [str(tmp_path / "b1" / "x")]),
    ):
        with pytest.raises(DiskFailedError, match="nothing is changed on this disk any more: the test says"):
            await change
    assert await store.read(1, 0, 0) == ({0: b"good"}, Stop.END, 1)
    await store.close()
    assert sorted((file.name, file.stat().st_ino) for file in (tmp_path / "b1").iterdir()) == before
