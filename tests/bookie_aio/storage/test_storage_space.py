"""Space that gets tight: a warning, then read-only with fences and recovery going on, and back."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFullError
from tests.support.storage import SMALL, FaultyDisk, Store, make_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024 * 1024
GUARDED = replace(
    SMALL, space=replace(SMALL.space, floor_free_bytes=10 * MIB, warn_free_bytes=20 * MIB, spare_bytes_max=0)
)


async def fill(store: Store, ledger_id: int, *, from_reserve: bool = False) -> None:
    """Add until there is no space."""
    for entry in range(1000):
        await store.add(make_block(ledger_id, entry, [os.urandom(5000)]), from_reserve=from_reserve)


class Gauge:
    """The disk's free space, as the test says, and who hears of it."""

    def __init__(self, disk: FaultyDisk) -> None:
        self.disk = disk
        disk.free = 1000 * MIB
        self.changed = asyncio.Event()

    def watch(self, store: Store) -> None:
        engine = store.engine
        engine._on_writable = lambda is_: (store.writable.append(is_), self.changed.set())
        engine._allocator._on_warning = lambda text: (store.warnings.append(text), self.changed.set())

    async def set(self, free: int) -> None:
        self.changed.clear()
        self.disk.free = free
        await asyncio.wait_for(self.changed.wait(), 10)


async def test_below_the_floor_adds_are_refused_and_recovery_goes_on(tmp_path: Path) -> None:
    disk = FaultyDisk()
    gauge = Gauge(disk)
    store = await Store.open(tmp_path / "b1", GUARDED, disk)
    gauge.watch(store)
    await store.add(make_block(1, 0, [b"x" * 5000]))
    await gauge.set(19 * MIB)
    assert (len(store.warnings), store.writable) == (1, [])
    await store.add(make_block(1, 1, [b"x" * 5000]))
    await gauge.set(9 * MIB)
    assert store.writable == [False]
    assert not store.engine.is_writable
    with pytest.raises(DiskFullError, match="ordinary adds"):
        await store.add(make_block(1, 2, [b"x" * 5000]))
    await store.fence(1, 7)
    for entry in range(2, 60):  # far more than the current segment and the reserve hold
        await store.add(make_block(1, entry, [b"x" * 5000]), from_reserve=True)
    assert (await store.read(1, 0, 59))[1] is Stop.END
    assert not store.failures
    await gauge.set(1000 * MIB)
    assert store.writable == [False, True]
    await store.add(make_block(1, 60, [b"x" * 5000]))
    await gauge.set(15 * MIB)
    assert len(store.warnings) == 2
    await store.close()


async def test_a_start_below_the_floor_is_read_only(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1", GUARDED)
    await store.add(make_block(1, 0, [b"x"]))
    await store.close()
    disk = FaultyDisk()
    disk.free = 1 * MIB
    again = await Store.open(tmp_path / "b1", GUARDED, disk)
    assert again.writable == [False]
    assert await again.read(1, 0, 0) == ({0: b"x"}, Stop.END, 1)
    await again.close()


async def test_what_is_deleted_below_the_floor_makes_the_bookie_writable_again(tmp_path: Path) -> None:
    config = replace(GUARDED, space=replace(GUARDED.space, spare_bytes_max=4 * 64 * 1024))
    disk = FaultyDisk()
    gauge = Gauge(disk)
    store = await Store.open(tmp_path / "b1", config, disk)
    gauge.watch(store)
    for entry in range(60):
        await store.add(make_block(1, entry, [b"x" * 5000]))
    await store.settled()
    await gauge.set(9 * MIB)
    gauge.changed.clear()
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await asyncio.wait_for(gauge.changed.wait(), 10)  # spare files take no more space
    await store.settled()  # adds that are quicker than the compaction find one spare file
    assert store.writable == [False, True]
    for entry in range(20):
        await store.add(make_block(2, entry, [b"x" * 5000]))
    await store.close()


@contextmanager
def small_file_systems(paths: list[Path]) -> Iterator[None]:
    """Mount one of 1 MiB on each path."""
    mounted: list[Path] = []
    try:
        for path in paths:
            path.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("mounting a file system is not allowed here")
            mounted.append(path)
        yield
    finally:
        for path in mounted:  # lazily: a test that failed may have files open
            subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 1 MiB."""
    with small_file_systems([tmp_path / "small"]):
        yield tmp_path / "small"


async def test_a_real_file_system_that_is_full(tmpfs: Path) -> None:
    store = await Store.open(tmpfs / "b1")
    with pytest.raises(DiskFullError):
        await fill(store, 1)
    acknowledged = store.engine.last_entry(1) + 1
    assert acknowledged > 50
    assert not store.engine.is_writable
    assert not store.failures
    await store.fence(1, 5)
    await store.add(make_block(1, acknowledged, [b"recovered"]), from_reserve=True)
    assert (await store.read(1, 0, acknowledged))[1] is Stop.END
    back = asyncio.Event()
    store.engine._on_writable = lambda is_: back.set()
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await asyncio.wait_for(back.wait(), 10)  # what was deleted has made room
    await store.add(make_block(2, 0, [b"goes on"]))
    await store.close()
    again = await Store.open(tmpfs / "b1")
    assert await again.read(2, 0, 0) == ({0: b"goes on"}, Stop.END, 1)
    assert again.engine.is_deleted(1)
    await again.close()


def free_in(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def use_up(path: Path) -> None:
    """Have others take what is left of the disk, but for a few pages."""
    (path / "foreign").write_bytes(bytes(max(0, free_in(path) - 28 * 1024)))


async def test_what_is_deleted_on_a_full_disk_makes_room_for_the_reserve_too(tmpfs: Path) -> None:
    config = replace(SMALL, space=replace(SMALL.space, spare_bytes_max=16 * MIB))
    store = await Store.open(tmpfs / "b1", config)
    with pytest.raises(DiskFullError):
        await fill(store, 1)
    with pytest.raises(DiskFullError):
        await fill(store, 2, from_reserve=True)
    assert not store.engine._allocator.has_reserve
    use_up(tmpfs)
    back = asyncio.Event()
    store.engine._on_writable = lambda is_: back.set()
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await asyncio.wait_for(back.wait(), 10)
    await store.add(make_block(3, 0, [b"goes on"]))
    assert store.engine._allocator.has_reserve
    await store.close()


async def test_a_reserve_of_another_size_is_used_as_it_is(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.close()
    disk = FaultyDisk()
    larger = replace(SMALL, space=replace(SMALL.space, reserve_bytes=256 * 1024))
    store = await Store.open(tmp_path / "b1", larger, disk)
    disk.is_full = True
    with pytest.raises(DiskFullError):
        await fill(store, 1)
    with pytest.raises(DiskFullError):
        await fill(store, 2, from_reserve=True)
    assert store.engine._journal.segment.header.capacity == SMALL.space.reserve_bytes
    assert not store.failures
    await store.close()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Return six file systems of 1 MiB each."""
    paths = [tmp_path / f"disk{number}" for number in range(6)]
    with small_file_systems(paths):
        yield paths


async def test_a_full_disk_takes_crash_after_crash(disks: list[Path]) -> None:
    """Each start writes what the last one left elsewhere, before anything gave space back."""
    for path in disks:
        (path / "others").write_bytes(bytes(300 * 1024))
    store = await Store.open(disks[0] / "b1")
    with pytest.raises(DiskFullError):
        await fill(store, 1)
    last = store.engine.last_entry(1)
    stores = [store]
    for number, path in enumerate(disks[1:], 1):
        await store.crash_into(path / "b1")
        use_up(path)
        store = await Store.open(path / "b1")
        stores.append(store)
        assert (list(store.engine.notes), store.engine.is_writable) == ([], False)
        assert (await store.read(1, 0, last))[1] is Stop.END
        for earlier in range(1, number):
            assert store.engine.term(earlier) == earlier
        await store.fence(number, number)
    (disks[-1] / "others").unlink()
    back = asyncio.Event()
    store.engine._on_writable = lambda is_: back.set()
    await asyncio.wait_for(back.wait(), 10)
    await store.add(make_block(9, 0, [b"goes on"]))
    for one in stores:
        await one.close()
