"""Steps that end in the middle: nobody waits for ever, no failure is missed, and no file is forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.files import give_up_segment
from metadata.errors import DiskFailedError, DiskFullError, StorageError
from tests.support.helddisk import HeldDisk
from tests.support.storage import SMALL, FaultyDisk, Store, make_block, unaccounted_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bookie_aio.storage.disk.disk import RealFile

LASTS_S = 10


def broken(*_: object) -> None:
    raise RuntimeError("the test says so")


async def closed(store: Store) -> None:
    async with asyncio.timeout(LASTS_S):
        await store.close()


@pytest.mark.parametrize("what", ["_ledgers.index", "_journal.launch"])
async def test_a_durable_group_that_is_not_indexed_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    disk = HeldDisk()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.add(make_block(1, 0, [b"good"]))
    await store.settled()
    disk.hold()
    engine, told, all_told = store.engine, list[StorageError | None](), asyncio.Event()

    def tell(error: StorageError | None) -> None:
        told.append(error)
        if len(told) == 3:
            all_told.set()

    engine.append_block(make_block(1, 1, [b"in flight"]), tell)
    await disk.arrived.wait()
    engine.barrier(tell)  # as compaction does before it gives a segment up
    engine.append_block(make_block(1, 2, [b"queued"]), tell)
    waiting = when_durable(engine.barrier)
    part, name = what.split(".")
    monkeypatch.setattr(getattr(engine, part), name, broken)
    disk.release()
    async with asyncio.timeout(LASTS_S):
        with pytest.raises(DiskFailedError):
            await waiting
        await all_told.wait()
    assert [type(error) for error in told] == [DiskFailedError] * 3
    assert len(store.failures) == 1
    assert engine.last_entry(1) == 0
    await closed(store)
    again = await Store.open(tmp_path / "b1")
    assert (await again.read(1, 0, 1))[0] == {0: b"good", 1: b"in flight"}
    await again.close()


class Creating(HeldDisk):
    """A disk that tells of the next file that is created."""

    def __init__(self) -> None:
        super().__init__()
        self.created = asyncio.Event()

    async def create(self, path: str) -> RealFile:
        file = await super().create(path)
        self.created.set()
        return file


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_preparation_that_somebody_cancels_leaves_nobody_waiting(
    tmp_path: Path, has_begun: bool
) -> None:
    disk = Creating()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.settled()
    disk.created.clear()
    allocator = store.engine._allocator
    assert allocator.take() is not None
    assert allocator._task is not None
    if has_begun:
        disk.hold()
        await asyncio.wait_for(disk.created.wait(), LASTS_S)
    allocator._task.cancel()
    disk.release()

    async def fill() -> None:
        for entry in range(100):
            await store.add(make_block(1, entry, [bytes(5000)]))

    with pytest.raises(DiskFailedError, match="cancelled"):
        await asyncio.wait_for(fill(), LASTS_S)
    assert len(store.failures) == 1
    await closed(store)


async def test_a_sync_of_the_witness_that_somebody_cancels_is_noticed(tmp_path: Path) -> None:
    """Its thread may have found a failure, and the next sync would report success."""
    store = await Store.open(tmp_path / "b1")
    await store.add(make_block(1, 0, [b"good"]))
    await store.settled()
    witness = store.engine._witness
    assert witness is not None
    while witness._task is not None:
        await asyncio.wait([witness._task])
    witness._sync_soon()
    assert witness._task is not None
    witness._task.cancel()
    await asyncio.wait([witness._task])
    assert [type(error) for error in store.failures] == [DiskFailedError]
    await closed(store)


class HeldSync(FaultyDisk):
    """A disk whose next sync of a directory waits for the test, and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome: asyncio.Future[None] | None = None
        self.is_under_way = asyncio.Event()

    async def sync_directory(self, path: str) -> None:
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            await super().sync_directory(path)
            return
        self.is_under_way.set()
        await asyncio.shield(outcome)  # a thread ends its call whoever waits for it


@pytest.mark.parametrize("are_all_cancelled", [False, True])
async def test_a_failed_sync_of_a_directory_counts_though_nobody_waits_for_it(
    tmp_path: Path, are_all_cancelled: bool
) -> None:
    disk = HeldSync()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await store.add(make_block(1, 0, [b"good"]))
    await store.settled()
    outcome = disk.outcome = asyncio.get_running_loop().create_future()
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(store.engine.disk.sync_directory(str(store.path)))
    await asyncio.wait_for(disk.is_under_way.wait(), LASTS_S)
    for task in asyncio.all_tasks() - before if are_all_cancelled else {waiting}:
        task.cancel()
    await asyncio.wait([waiting])
    if not are_all_cancelled:
        outcome.set_exception(DiskFailedError("the test says that the directory could not be synced"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(DiskFailedError, match="nothing is changed on this disk any more"):
        await store.engine._checkpointer.write()
    await closed(store)


class Scarce(FaultyDisk):
    """A disk that refuses some changes of names for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: Callable[[str, str], bool] = lambda what, path: False
        self.refused = 0
        self.renamed = ""  # the last file to be renamed
        self.removed: asyncio.Queue[str] = asyncio.Queue()

    def _check(self, what: str, path: str) -> None:
        if self.refuses(what, path):
            self.refused += 1
            error = DiskFullError("the test says that there is not enough")
            error.is_of_space = what != "sync_directory"
            raise error

    async def rename(self, old: str, new: str) -> None:
        self._check("rename", new)
        await super().rename(old, new)
        self.renamed = new

    async def unlink(self, path: str) -> None:
        self._check("unlink", path)
        await super().unlink(path)
        self.removed.put_nowait(path)

    async def sync_directory(self, path: str) -> None:
        self._check("sync_directory", self.renamed)
        await super().sync_directory(path)


async def store_with_spares(tmp_path: Path, disk: Scarce) -> Store:
    """Return a store with several spare files, whose looks at the space are the test's."""
    config = replace(SMALL, space=replace(SMALL.space, retry_s=3600.0))
    store = await Store.open(tmp_path / "b1", config, disk)
    for entry in range(80):
        await store.add(make_block(1, entry, [bytes(4000)]))
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await store.settled()
    return store


async def assert_goes_on(store: Store, disk: Scarce) -> None:
    """Add entries until a few segments were filled, and look for files that nobody knows of."""
    assert not store.failures
    disk.refuses = lambda what, path: False
    store.engine._allocator._look_again()
    await store.settled()
    for entry in range(60):
        await store.add(make_block(2, entry, [bytes(4000)]))
    await store.settled()
    assert not unaccounted_files(store)
    await closed(store)
    again = await Store.open(store.path)
    assert not again.engine.notes
    assert len((await again.read(2, 0, 59))[0]) == 60
    await again.settled()
    assert not unaccounted_files(again)
    await again.close()


@pytest.mark.parametrize("what", ["rename", "sync_directory"])
async def test_a_spare_file_that_cannot_be_used_now_is_not_forgotten(tmp_path: Path, what: str) -> None:
    disk = Scarce()
    store = await store_with_spares(tmp_path, disk)
    allocator = store.engine._allocator
    spares = len(allocator._spares)
    assert spares >= 2
    disk.refuses = lambda which, path: which == what and path.endswith(form.SEGMENT_SUFFIX)
    taken = allocator.take()
    assert taken is not None
    while allocator._task is not None:
        await asyncio.wait([allocator._task])
    assert disk.refused == 1
    assert allocator.is_full
    assert len(allocator._spares) == (spares if what == "rename" else spares - 1)
    await give_up_segment(disk, taken, keep_as_spare=False)
    await assert_goes_on(store, disk)


async def test_a_segment_is_given_up_though_its_directory_cannot_be_opened(tmp_path: Path) -> None:
    disk = Scarce()
    disk.refuses = lambda what, path: what == "sync_directory" and path.endswith(form.SPARE_SUFFIX)
    store = await store_with_spares(tmp_path, disk)
    assert disk.refused
    assert not unaccounted_files(store)
    assert store.engine._allocator._spares
    await assert_goes_on(store, disk)


async def test_useless_files_that_could_not_be_removed_are_removed_later(tmp_path: Path) -> None:
    first = await Store.open(tmp_path / "b1")
    await first.add(make_block(1, 0, [b"good"]))
    await first.close()
    useless = tmp_path / "b1" / "17.index.new"
    useless.write_bytes(b"of a crash")
    disk = Scarce()
    disk.refuses = lambda what, path: path == str(useless) and disk.refused < 2
    store = await Store.open(tmp_path / "b1", disk=disk)
    async with asyncio.timeout(LASTS_S):
        while await disk.removed.get() != str(useless):  # tried again when the space is looked at
            continue
    assert disk.refused == 2
    await store.settled()
    assert not unaccounted_files(store)
    await closed(store)
