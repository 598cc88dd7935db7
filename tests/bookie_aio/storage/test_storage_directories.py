"""Several data directories: segments are spread over them, and all of them are needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.disk.disk import RealDisk, write_file
from bookie_aio.storage.segment import format as form
from bookie_aio.wire.messages import Stop
from metadata.errors import CorruptRecordError, DirectoryInUseError, DiskFailedError, DiskFullError
from tests.support.storage import FaultyDisk, Store, copy_as_a_crash_leaves_it, make_block

if TYPE_CHECKING:
    from pathlib import Path


def of(tmp_path: Path, order: str) -> list[Path]:
    return [tmp_path / one for one in order]


async def fill(store: Store, entries: range) -> None:
    for first in entries[::10]:
        await store.add(make_block(1, first, [b"%d" % n * 200 for n in range(first, first + 10)]))
    await store.settled()


def segments_in(path: Path) -> int:
    return len([name for name in os.listdir(path) if name.endswith(".segment")])


async def test_segments_are_spread_and_found_in_any_order_of_the_directories(tmp_path: Path) -> None:
    upto = 0
    for order in ("abc", "cab", "bca"):
        store = await Store.open(of(tmp_path, order))
        await fill(store, range(upto, upto + 600))
        upto += 600
        found, stop, _ = await store.read(1, 0, upto - 1)
        assert stop is Stop.END
        assert found == {n: b"%d" % n * 200 for n in range(upto)}
        assert not store.engine.notes
        await store.close()
    counts = [segments_in(tmp_path / one) for one in "abc"]
    assert min(counts) > 3
    assert max(counts) <= min(counts) + 3
    assert [one for one in "abc" if (tmp_path / one / form.CHECKPOINT).exists()] == ["a"]


async def test_space_comes_back_in_each_directory(tmp_path: Path) -> None:
    store = await Store.open(of(tmp_path, "ab"))
    await fill(store, range(600))
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await store.settled()
    for one in "ab":
        names = os.listdir(tmp_path / one)
        assert not [name for name in names if name.endswith(".index")]
        assert [name for name in names if name.endswith(".spare")]
    await store.close()


async def test_segments_of_a_directory_that_is_gone_are_missed(tmp_path: Path) -> None:
    # Cookies keep a bookie from starting like this (rule 6); the checkpoint would know all the same.
    store = await Store.open(of(tmp_path, "ab"))
    await fill(store, range(600))
    await store.close()
    again = await Store.open(of(tmp_path, "a"))
    assert again.engine.marking.concerns_all
    await again.close()


async def test_each_directory_is_locked(tmp_path: Path) -> None:
    store = await Store.open(of(tmp_path, "ab"))
    for one in "ab":
        with pytest.raises(DirectoryInUseError):
            await Store.open(of(tmp_path, one))
    await store.close()


async def test_two_checkpoints_are_refused(tmp_path: Path) -> None:
    for one in "ab":
        store = await Store.open(tmp_path / one)
        await store.close()
    with pytest.raises(CorruptRecordError, match="both hold a checkpoint"):
        await Store.open(of(tmp_path, "ab"))


async def test_a_full_directory_is_passed_over(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.full_directory = str(tmp_path / "a")
    store = await Store.open(of(tmp_path, "ba"), disk=disk)
    await fill(store, range(600))
    assert segments_in(tmp_path / "a") == 0
    assert segments_in(tmp_path / "b") > 5
    assert store.writable == []
    await store.close()


async def crashed(tmp_path: Path, name: str) -> Store:
    """Open what a crash would leave this moment of both directories."""
    for one in "ab":
        copy_as_a_crash_leaves_it(tmp_path / one, tmp_path / name / one)
    return await Store.open(of(tmp_path / name, "ba"))


async def test_a_full_directory_holds_up_no_other(tmp_path: Path) -> None:
    """Segments of the other are sealed, and given up, before those in front of them."""
    disk = FaultyDisk()
    store = await Store.open(of(tmp_path, "ba"), disk=disk)
    await fill(store, range(60))
    await store.settled()
    disk.full_directory = str(tmp_path / "a")
    for entry in range(100):
        await store.add(make_block(2, entry, [os.urandom(5000)]))
    await store.settled()
    in_memory = [one for one in store.engine._segments.in_memory.values() if one.directory.endswith("a")]
    assert 0 < len(in_memory) <= 2
    assert len(store.engine._segments.in_memory) - len(in_memory) <= 1
    assert store.writable == []
    await store.wait(lambda done: store.engine.append_tombstone(2, done))
    await store.settled()
    assert store.engine._compactor.given_up > 0
    again = await crashed(tmp_path, "crashed")
    assert (list(again.engine.notes), again.engine.marking.concerns_all) == ([], False)
    assert (await again.read(1, 0, 59))[1] is Stop.END
    await again.close()
    sealed = asyncio.Event()
    in_all = store.engine._segments.in_memory
    store.engine._sealer._on_sealed = lambda: sealed.set() if len(in_all) == 1 else None
    disk.full_directory = ""
    await asyncio.wait_for(sealed.wait(), 10)  # it is looked at again now and then
    await store.close()


async def test_what_finds_no_room_takes_that_of_spare_files_beside_it(tmp_path: Path) -> None:
    store = await Store.open(of(tmp_path, "ba"))
    for entry in range(60):
        await store.add(make_block(1, entry, [os.urandom(5000)]))
    await store.settled()
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await store.settled()

    def spares(of_directory: str) -> list[str]:
        return [name for name in os.listdir(tmp_path / of_directory) if name.endswith(".spare")]

    before = len(spares("a")), len(spares("b"))
    assert min(before) > 1
    full = DiskFullError("no space")

    async def write() -> str:
        if len(spares("a")) == before[0]:
            raise full
        return "written"

    make_room = partial(store.engine._allocator.make_room, str(tmp_path / "a"))
    full.is_of_space = False
    with pytest.raises(DiskFullError):
        await make_room(write)
    assert (len(spares("a")), len(spares("b"))) == before
    full.is_of_space = True
    assert await make_room(write) == "written"
    assert (len(spares("a")), len(spares("b"))) == (before[0] - 1, before[1])
    await store.close()


async def test_a_file_that_may_or_may_not_be_replaced_ends_the_bookie(tmp_path: Path) -> None:
    """Going on would mean to remove what one of the two names."""

    class FullInTheEnd(RealDisk):
        async def sync_directory(self, path: str) -> None:
            raise DiskFullError("no space left")

    disk = FullInTheEnd()
    with pytest.raises(DiskFailedError):
        await write_file(disk, str(tmp_path), form.CHECKPOINT, [b"new"])
    disk.close()


class Unsynced(FaultyDisk):
    """A disk on which the directory of a spare file that gets its name is not synced, once."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = str(directory)
        self._is_due = False
        self.is_done = False

    async def rename(self, old: str, new: str) -> None:
        await super().rename(old, new)
        is_reuse = old.endswith(form.SPARE_SUFFIX) and new.startswith(self._directory)
        self._is_due = is_reuse and not self.is_done

    async def sync_directory(self, path: str) -> None:
        if self._is_due:
            self._is_due, self.is_done = False, True
            raise DiskFullError("too many open files")
        await super().sync_directory(path)


async def test_a_segment_that_could_not_be_made_leaves_its_id_to_nobody(tmp_path: Path) -> None:
    """Another one of that id, in another directory, would not be looked at by the next start."""
    disks = tmp_path / "disks"
    disk = Unsynced(disks / "a")
    store = await Store.open(of(disks, "ab"), disk=disk)
    for entry in range(150):
        await store.add(make_block(1, entry, [os.urandom(5000)]))
    await store.settled()
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await store.settled()
    assert len({directory for directory, _ in store.engine._allocator._spares}) == 2
    acknowledged = 0
    while not disk.is_done or acknowledged < 16:
        try:
            await store.add(make_block(2, acknowledged, [b"%d" % acknowledged * 1000]))
            acknowledged += 1
        except DiskFullError:
            await asyncio.sleep(0.01)  # as long as it is read-only
    crashed = copy_as_a_crash_leaves_it(disks, tmp_path / "crashed")
    again = await Store.open(of(crashed, "ab"))
    found, stop, _ = await again.read(2, 0, acknowledged - 1)
    assert (len(found), stop, again.engine.notes) == (acknowledged, Stop.END, [])
    await again.close()
    await store.close()


async def test_two_files_of_one_segment_are_refused(tmp_path: Path) -> None:
    store = await Store.open(of(tmp_path, "ab"))
    await fill(store, range(600))
    await store.close()
    name = next(name for name in os.listdir(tmp_path / "b") if name.endswith(form.SEGMENT_SUFFIX))
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(CorruptRecordError, match=f"both hold {name}"):
        await Store.open(of(tmp_path, "ab"))


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
async def test_directories_and_files_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    disk, path = RealDisk(), tmp_path / "of" / "bookies" / "b1"
    before = os.umask(umask)
    try:
        await disk.make_directory(str(path))
        lock = disk.lock_directory(str(path))
        await write_file(disk, str(path), "file", [b"x"])
    finally:
        os.umask(before)
    for made in (path, path.parent, path.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    assert {one.name: one.stat().st_mode & 0o777 for one in path.iterdir()} == {"lock": 0o600, "file": 0o600}
    path.chmod(0o750)  # the operator's choice
    await disk.make_directory(str(path))
    assert path.stat().st_mode & 0o777 == 0o750
    lock.release()
    disk.close()


async def test_a_process_without_descriptors_can_still_write_files(tmp_path: Path) -> None:
    disk = RealDisk()
    await write_file(disk, str(tmp_path), "before", [b"x"])  # starts a thread
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        for name in ("a", "b", "c"):
            await write_file(disk, str(tmp_path), name, [b"x"])
        files = [await disk.open(str(tmp_path / "a")) for _ in range(16)]
        with pytest.raises(DiskFullError, match="Too many open files") as raised:
            await disk.open(str(tmp_path / "a"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)
    assert not raised.value.is_of_space
    for file in files:
        file.close()
    disk.close()
