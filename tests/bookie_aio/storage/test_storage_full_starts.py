"""Starts on a full disk, one after another: nothing that counts is cut, and each finds room."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.disk.disk import RealDisk, RealFile
from bookie_aio.storage.segment.format import segment_name
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFullError
from tests.support.storage import FaultyDisk, Store, copy_as_a_crash_leaves_it, make_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bookie_aio.storage.disk.disk import File
    from bookie_aio.wire.blocks import Buffer


def bytes_in(path: Path | str) -> int:
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries)


class SizedFile(RealFile):
    """A file of a `SizedDisk`."""

    def __init__(self, disk: SizedDisk, descriptor: int, path: str) -> None:
        super().__init__(disk, descriptor, path)
        self._sized = disk

    def _grow(self, size: int) -> None:
        growth = size - self.size()
        if growth > 0 and bytes_in(self._sized.directory) + growth > self._sized.capacity:
            raise DiskFullError("the disk of the test is full")

    async def preallocate(self, size: int) -> None:
        self._grow(size)
        await super().preallocate(size)

    async def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._grow(offset + sum(map(len, buffers)))
        await super().write(buffers, offset)

    async def truncate(self, size: int) -> None:
        await super().truncate(size)
        self._sized.on_cut()

    def write_and_sync(
        self,
        buffers: Sequence[Buffer],
        offset: int,
        then: Sequence[tuple[File, Buffer]] = (),
        *,
        at_once: bool = False,
    ) -> asyncio.Future[None]:
        self._sized.on_cut = lambda: None
        return super().write_and_sync(buffers, offset, then, at_once=at_once)


class SizedDisk(RealDisk):
    """A disk with room for so many bytes in one directory."""

    def __init__(self, directory: Path, capacity: int) -> None:
        super().__init__()
        self.directory = directory
        self.capacity = capacity
        self.on_cut: Callable[[], object] = lambda: None  # called up to the first group

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return SizedFile(self, file._descriptor, path)


@pytest.mark.parametrize("is_clean", [False, True])
async def test_the_first_segments_of_earlier_starts_give_back_their_room(
    tmp_path: Path, is_clean: bool
) -> None:
    """None of them ever held a group, the reserve was the first, and the checkpoint never found room."""
    path = tmp_path / "0"
    store = await Store.open(path)
    for entry in range(20):
        await store.add(make_block(1, entry, [b"x" * 2000]))
    await store.settled()
    await store.close()
    capacity = bytes_in(path)
    for number in range(1, 6):
        store = await Store.open(path, disk=SizedDisk(path, capacity))
        assert not store.engine.is_writable
        assert (await store.read(1, 0, 19))[1] is Stop.END
        path = tmp_path / str(number)
        if is_clean:
            await store.close()
            store.path.rename(path)
        else:
            await store.crash_into(path)
            await store.close()
    store = await Store.open(path, disk=SizedDisk(path, capacity))
    await store.fence(1, 7)
    await store.close()


async def test_a_spare_file_in_another_directory_is_the_first_segment(tmp_path: Path) -> None:
    """The home is full, and without a reserve nothing else would be done."""
    disk = FaultyDisk()
    home, other = tmp_path / "a", tmp_path / "b"
    store = await Store.open([home, other], disk=disk)
    for entry in range(60):
        await store.add(make_block(1, entry, [os.urandom(5000)]))
    await store.settled()
    await store.wait(lambda done: store.engine.append_tombstone(1, done))
    await store.settled()
    assert any(name.endswith(".spare") for name in os.listdir(other))
    await store.close()
    (home / "reserve").unlink()
    for name in os.listdir(home):
        if name.endswith(".spare"):
            (home / name).unlink()
    disk = FaultyDisk()
    disk.is_full = True
    disk.is_full_for = lambda path: not path.endswith((".spare", ".segment"))
    store = await Store.open([home, other], disk=disk)
    assert store.engine._journal.segment.directory == str(other)
    await store.fence(2, 7)
    await store.close()


async def test_damage_is_still_known_after_a_start_that_cut_files_and_crashed(tmp_path: Path) -> None:
    """That the group was durable is proved by the head of a torn one behind it, and by nothing else."""
    store = await Store.open(tmp_path / "b1")
    segment = store.engine._journal.segment
    await store.add(make_block(1, 0, [b"x" * 2000]))
    await asyncio.gather(
        store.add(make_block(1, 1, [b"y" * 2000])), store.add(make_block(2, 0, [b"z" * 2000]))
    )
    proven_end = segment.end
    await store.add(make_block(3, 0, [b"w" * 2000]))
    last_end = segment.end
    path = await store.crash_into(tmp_path / "full")
    await store.close()
    file = path / segment_name(segment.segment_id)
    data = bytearray(file.read_bytes())
    data[proven_end - 1] ^= 1  # in what ledger 2 holds
    data[last_end - 1] ^= 1
    file.write_bytes(data)
    (path / "reserve").unlink()
    disk = SizedDisk(path, bytes_in(path))
    crashed = tmp_path / "crashed"

    def crash() -> None:
        shutil.rmtree(crashed, ignore_errors=True)
        copy_as_a_crash_leaves_it(path, crashed)

    disk.on_cut = crash
    await (await Store.open(path, disk=disk)).close()
    again = await Store.open(crashed)
    assert [note for note in again.engine.notes if "ledger 2" in note]
    assert again.engine.is_damaged(2)
    assert (await again.read(1, 0, 1))[1] is Stop.END
    assert (await again.read(2, 0, 0))[1] is Stop.UNKNOWN
    await again.close()


async def test_a_tail_is_written_elsewhere_once(tmp_path: Path) -> None:
    """Its segment waits to be sealed, and all that came after it is given up: the checkpoint says it ends."""

    async def begin(paths: list[Path]) -> Store:
        disk = FaultyDisk()
        disk.full_directory = str(paths[1])
        store = await Store.open(paths, disk=disk)
        await store.settled()
        return store

    def copied(paths: list[Path], name: str) -> list[Path]:
        return [copy_as_a_crash_leaves_it(one, tmp_path / name / one.name) for one in paths]

    paths = [tmp_path / "0" / one for one in ("d1", "d2")]
    store = await Store.open(paths)
    entries = 0
    while not store.engine._journal.segment.directory.endswith("d2"):
        await store.add(make_block(1, entries, [b"x" * 2000]))
        await store.settled()
        entries += 1
    segment = store.engine._journal.segment
    while store.engine._journal.room > 9000:  # so full that it is not cut
        await store.add(make_block(1, entries, [b"x" * 2000]))
        entries += 1
    await store.add(make_block(10, 0, [b"stays"]))
    await store.add(make_block(2, 0, [b"of two"]))
    assert store.engine._journal.segment is segment
    paths = copied(paths, "1")
    await store.close()

    store = await begin(paths)
    assert segment.segment_id in store.engine._segments.in_memory
    assert await store.read(2, 0, 0) == ({0: b"of two"}, Stop.END, 1)
    await store.wait(lambda done: store.engine.append_forget(2, done))
    await store.close()

    store = await begin(paths)
    await store.settled()
    assert (await store.read(2, 0, 0))[1] is Stop.NO_SUCH_ENTRY
    paths = copied(paths, "2")
    await store.close()

    store = await begin(paths)
    assert await store.read(2, 0, 0) == ({}, Stop.NO_SUCH_ENTRY, 0)
    assert await store.read(10, 0, 0) == ({0: b"stays"}, Stop.END, 1)
    await store.close()
