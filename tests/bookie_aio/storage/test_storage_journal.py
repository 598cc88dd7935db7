"""Which thread writes a group: the event loop's for a small record alone, while the disk is quick."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.journal import (
    AT_ONCE_BYTES_MAX,
    SHORT_SYNCS,
    SHORT_SYNCS_MAX,
    STALL_S,
    SyncGuard,
)
from metadata.errors import DiskFailedError
from tests.support.storage import SMALL, FaultyDisk, FaultyFile, Store, make_block

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bookie_aio.storage.disk.disk import RealFile
    from bookie_aio.wire.blocks import Buffer
    from metadata.errors import StorageError

SHORT_S = 0.001


def after(guard: SyncGuard, *, until_at_most: int = 10 * SHORT_SYNCS_MAX) -> int:
    """Return how many short syncs it takes until the loop waits for one."""
    count = 0
    while not guard.may_wait:
        guard.note(SHORT_S, has_waited=False)
        count += 1
        assert count <= until_at_most
    return count


def test_the_loop_waits_after_some_short_syncs_in_a_row() -> None:
    guard = SyncGuard(SHORT_S)
    assert after(guard) == SHORT_SYNCS
    guard.note(SHORT_S, has_waited=True)
    assert guard.may_wait
    for _ in range(SHORT_SYNCS - 1):
        guard.note(2 * SHORT_S, has_waited=False)
        assert not guard.may_wait
        guard.note(SHORT_S, has_waited=False)
    assert after(guard) == SHORT_SYNCS - 1


def test_each_stall_of_the_loop_leaves_more_syncs_to_the_thread() -> None:
    guard, waits = SyncGuard(SHORT_S), []
    for _ in range(6):
        waits.append(after(guard))
        guard.note(2 * STALL_S, has_waited=True)
    assert waits == [SHORT_SYNCS * 8**n for n in range(4)] + [SHORT_SYNCS_MAX] * 2


def test_a_stall_of_the_thread_costs_no_more_than_the_row() -> None:
    guard = SyncGuard(SHORT_S)
    for _ in range(5):
        after(guard)
        guard.note(2 * STALL_S, has_waited=False)
    assert after(guard) == SHORT_SYNCS


def test_stalls_are_forgotten_after_many_short_syncs() -> None:
    guard = SyncGuard(SHORT_S)
    for _ in range(5):
        after(guard)
        guard.note(2 * STALL_S, has_waited=True)
    after(guard)
    for _ in range(SHORT_SYNCS_MAX):
        guard.note(SHORT_S, has_waited=True)
        assert guard.may_wait
    guard.note(2 * SHORT_S, has_waited=True)
    assert after(guard) == SHORT_SYNCS


def test_without_a_limit_the_loop_never_waits() -> None:
    guard = SyncGuard(0.0)
    for _ in range(3 * SHORT_SYNCS_MAX):
        guard.note(0.0, has_waited=False)
        assert not guard.may_wait


class Threads(FaultyDisk):
    """A disk that notes which of its groups the loop's thread wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.by_loop: list[bool] = []
        self._loop_thread = threading.get_ident()

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return NotedFile(self, file._descriptor, path)

    def note(self) -> None:
        self.by_loop.append(threading.get_ident() == self._loop_thread)


class NotedFile(FaultyFile):
    """A file of `Threads`."""

    def _write_and_sync(self, buffers: Sequence[Buffer], offset: int) -> None:
        disk = self._faulty
        assert isinstance(disk, Threads)
        disk.note()
        super()._write_and_sync(buffers, offset)


async def open_on(tmp_path: Path, disk: Threads, short_sync_s: float = 10.0) -> Store:
    """Return a store on whose disk syncs were short so far."""
    # The allocator's look at the free space would begin a group too, which is always the thread's.
    config = replace(SMALL, space=replace(SMALL.space, retry_s=60.0), short_sync_s=short_sync_s)
    store = await Store.open(tmp_path / "b1", config, disk)
    for entry in range(SHORT_SYNCS):
        await store.add(make_block(1, entry, [b"x"]))
    # A segment that becomes ready begins a group too. It would take an add of the test's to the thread.
    while (preparing := store.engine._allocator._task) is not None:
        await asyncio.wait([preparing])
    disk.by_loop.clear()
    return store


async def test_a_small_record_that_comes_alone_is_written_by_the_loop(tmp_path: Path) -> None:
    disk = Threads()
    store = await open_on(tmp_path, disk)
    await store.add(make_block(1, 100, [b"alone"]))
    assert disk.by_loop == [True]
    # Two at once, or a large one: the thread writes while the loop goes on.
    await asyncio.gather(store.add(make_block(1, 101, [b"a"])), store.add(make_block(1, 102, [b"b"])))
    await store.add(make_block(1, 103, [bytes(AT_ONCE_BYTES_MAX)]))
    assert disk.by_loop == [True, False, False]
    # What has come meanwhile is not waited for: the records before it have to be acknowledged first.
    first = asyncio.ensure_future(store.add(make_block(1, 104, [bytes(AT_ONCE_BYTES_MAX)])))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.gather(first, store.add(make_block(1, 105, [b"behind"])))
    assert disk.by_loop == [True, False, False, False, False]
    again = await Store.open(await store.crash_into(tmp_path / "crashed"))
    assert (await again.read(1, 100, 100))[0] == {100: b"alone"}
    await again.close()
    await store.close()


async def test_on_a_slow_disk_the_loop_waits_for_nothing(tmp_path: Path) -> None:
    disk = Threads()
    disk.journal_s = 0.005
    store = await open_on(tmp_path, disk, short_sync_s=0.004)
    for entry in range(100, 120):
        await store.add(make_block(1, entry, [b"x"]))
    assert not any(disk.by_loop)
    await store.close()


async def test_a_disk_that_becomes_slow_stops_the_loop_once(tmp_path: Path) -> None:
    disk = Threads()
    store = await open_on(tmp_path, disk, short_sync_s=10.0)
    store.engine._journal._guard = guard = SyncGuard(10.0)
    for _ in range(SHORT_SYNCS):
        guard.note(0.0, has_waited=False)
    guard._short_s = 0.02
    disk.journal_s = 0.05
    for entry in range(100, 110):
        await store.add(make_block(1, entry, [b"x"]))
    assert disk.by_loop == [True] + [False] * 9
    await store.close()


@pytest.mark.parametrize("torn_bytes", [0, 100])
async def test_a_write_of_the_loop_that_fails_ends_the_bookie(tmp_path: Path, torn_bytes: int) -> None:
    disk = Threads()
    store = await open_on(tmp_path, disk)
    disk.fail_journal_write, disk.torn_bytes = disk.journal_writes + 1, torn_bytes
    told: list[StorageError | None] = []
    store.engine.append_block(make_block(1, 100, [b"bad"]), told.append)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert disk.by_loop == [True]
    assert [type(error) for error in told] == [DiskFailedError]
    assert len(store.failures) == 1
    with pytest.raises(DiskFailedError):
        await store.add(make_block(1, 101, [b"late"]))
    await store.close()


async def test_a_callback_that_appends_again_waits_for_the_next_iteration(tmp_path: Path) -> None:
    """Otherwise a chain of appends would keep the loop for ever."""
    disk = Threads()
    store = await open_on(tmp_path, disk)
    done = asyncio.Event()
    order: list[str] = []

    def append(entry: int) -> None:
        def appended(error: StorageError | None) -> None:
            order.append(f"added {entry}")
            if entry == 103:
                done.set()
            else:
                append(entry + 1)

        store.engine.append_block(make_block(1, entry, [b"x"]), appended)
        asyncio.get_running_loop().call_soon(order.append, "loop")

    append(100)
    await asyncio.wait_for(done.wait(), 30)
    assert disk.by_loop == [True] * 4
    assert order.count("loop") >= 3
    await store.close()
