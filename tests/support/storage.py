"""Engines for tests: small segments, seeded generations, blocks whose bytes say what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import time
from itertools import accumulate
from typing import TYPE_CHECKING

from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.data_directory import owner_of, read_cookie
from bookie_aio.storage.disk.disk import RealDisk, RealFile, Space
from bookie_aio.storage.engine import Engine
from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.allocator import SpaceLimits
from bookie_aio.storage.segment.witness import CHECKPOINTS_PAGE, PAGE_BYTES, encode_witness, parse_page
from bookie_aio.wire.blocks import Block, encode_block, parse_blocks
from metadata.errors import DiskFailedError, DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from bookie_aio.wire.blocks import Buffer
    from bookie_aio.wire.messages import Stop

SMALL = StorageConfig(
    segment_bytes=64 * 1024,
    group_bytes_max=32 * 1024,
    space=SpaceLimits(reserve_bytes=64 * 1024, retry_s=0.02, floor_free_bytes=0),
    compaction=CompactionConfig(pause_s=0.001, bytes_per_s=10**9, loop_share=1.0),
    live_ledgers_max=2,
)


def make_block(
    ledger_id: int,
    first: int,
    payloads: Sequence[bytes],
    *,
    stride: int = 1,
    content_term: int = 0,
    lac: int | None = None,
) -> Block:
    """Return a block as it arrives from the network."""
    ends = list(accumulate(map(len, payloads)))
    data = encode_block(
        ledger_id=ledger_id, content_term=content_term, first_entry=first, stride=stride,
        lac=first - 1 if lac is None else lac, lafr=-1, payloads=payloads, running=ends,
    )  # fmt: skip
    return Block.parse(memoryview(data))


class Store:
    """An engine, and what it called back."""

    def __init__(self, engine: Engine, disk: RealDisk, path: Path) -> None:
        self.engine = engine
        self.disk = disk
        self.path = path

    @classmethod
    async def open(
        cls, paths: Path | list[Path], config: StorageConfig = SMALL, disk: RealDisk | None = None
    ) -> Store:
        """Open the engine on a directory, or several, which are created. A cookie in it is heeded."""
        disk = disk or RealDisk()
        path, *more = paths if isinstance(paths, list) else [paths]
        for one in (path, *more):
            await disk.make_directory(str(one))
        generations = random.Random(str(path))
        indexed: list[Collection[int]] = []
        failures: list[StorageError] = []
        writable: list[bool] = []
        warnings: list[str] = []
        try:
            cookie = await read_cookie(disk, str(path))
            engine = await Engine.open(
                disk,
                [str(path), *map(str, more)],
                config,
                draw_generation=lambda: generations.getrandbits(64),
                on_indexed=indexed.append,
                on_failed=failures.append,
                on_writable=writable.append,
                on_warning=warnings.append,
                owner=owner_of(cookie) if cookie is not None else 0,
            )
        except BaseException:
            disk.close()
            raise
        store = cls(engine, disk, path)
        store.indexed, store.failures, store.writable = indexed, failures, writable
        store.warnings = warnings
        return store

    indexed: list[Collection[int]]
    failures: list[StorageError]
    writable: list[bool]
    warnings: list[str]

    async def wait(self, accept: Callable[[Callable[[StorageError | None], None]], None]) -> None:
        """Call `accept` with a `Done`, wait for it, and raise what it is given."""
        done: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        accept(done.set_result)
        error = await done
        if error is not None:
            raise error

    async def add(self, block: Block, *, from_reserve: bool = False) -> None:
        """Store a block durably."""
        await self.wait(lambda done: self.engine.append_block(block, done, from_reserve=from_reserve))

    async def fence(self, ledger_id: int, term: int) -> None:
        """Fence durably."""
        await self.wait(lambda done: self.engine.append_term(ledger_id, term, done))

    async def barrier(self) -> None:
        """Wait for all that was accepted."""
        await self.wait(self.engine.barrier)

    async def settled(self) -> None:
        """Wait until nothing goes on in the background."""
        while True:
            tasks = [*self.engine._sealer._tasks]
            tasks += [
                task
                for task in (self.engine._allocator._task, self.engine._compactor._background.task)
                if task is not None
            ]
            if not tasks:
                return
            await asyncio.wait(tasks)

    async def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        stride: int = 1,
        content_term: int = 0,
        budget: int = 10**9,
    ) -> tuple[dict[int, bytes], Stop, int]:
        """Read entries; every block given is checked as a client would."""
        found = await self.engine.read(ledger_id, content_term, range(first, last + 1, stride), budget)
        return entries_of(found.buffers), found.stop, found.stop_entry

    async def close(self) -> None:
        """Close cleanly."""
        await self.engine.close()
        self.disk.close()

    async def crash_into(self, path: Path) -> Path:
        """Copy the directory as it is this moment, as a crash would leave it."""
        return copy_as_a_crash_leaves_it(self.path, path)


def copy_as_a_crash_leaves_it(path: Path, to: Path) -> Path:
    """Copy a directory in use, or one of such. Again, if a thread of its engine changed names or times."""

    def state() -> set[tuple[str, int, int]]:
        files = {str(file): file.stat() for file in path.rglob("*")}
        return {(name, stat.st_ino, stat.st_mtime_ns) for name, stat in files.items()}

    while True:
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            before = state()
            shutil.copytree(path, to)
            if state() == before:
                return to
        shutil.rmtree(to, ignore_errors=True)


def lose_claims(path: Path) -> Path:
    """Take back what a directory's witness says of groups, as a power cut may; returns the directory.

    Else the last group of a killed process is proven.
    """
    file = path / form.WITNESS
    claim = parse_page(CHECKPOINTS_PAGE, file.read_bytes()[PAGE_BYTES:])
    file.write_bytes(b"".join(encode_witness(claim.owner, claim.checkpoint)))
    return path


def unaccounted_files(store: Store) -> set[str]:
    """Return the names of files in a settled store's directory that nothing refers to, or that are
    missing."""
    engine = store.engine
    expected = {form.CHECKPOINT, form.RESERVE, form.LOCK, form.WITNESS}
    for segment in engine._segments.by_id.values():
        expected.add(form.segment_name(segment.segment_id))
        if segment.sealed is not None:
            expected.add(form.index_name(segment.segment_id))
    if engine._allocator.ready is not None:
        expected.add(form.segment_name(engine._allocator.ready.segment_id))
    expected.update(name for _, name in engine._allocator._spares)
    if table := engine._ledgers.states.table_number:
        expected.add(form.table_name(table))
    return set(os.listdir(store.path)) ^ expected


def entries_of(buffers: Sequence[Buffer]) -> dict[int, bytes]:
    """Return the entries in a read's buffers, after checking them."""
    found: dict[int, bytes] = {}
    for block in parse_blocks(memoryview(b"".join(buffers))):
        assert block.payload_is_intact()
        assert not block.damaged_entries()
        found.update(zip(block.entry_ids, map(bytes, block.payloads()), strict=True))
    return found


class FaultyFile(RealFile):
    """A file of a `FaultyDisk`."""

    def __init__(self, disk: FaultyDisk, descriptor: int, path: str) -> None:
        super().__init__(disk, descriptor, path)
        self._faulty = disk

    def _write_and_sync(self, buffers: Sequence[Buffer], offset: int) -> None:
        disk = self._faulty
        disk.journal_writes += 1
        time.sleep(disk.journal_s)
        if disk.journal_writes == disk.fail_journal_write:
            # Part of it gets there, as with a real failure.
            data = b"".join(buffers)
            super()._write_and_sync([data[: disk.torn_bytes]], offset)
            raise DiskFailedError("the test makes this write fail")
        super()._write_and_sync(buffers, offset)

    async def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        is_in_place = offset + sum(map(len, buffers)) <= self.size()
        if self._is_refused() and not self._path.endswith("reserve") and not is_in_place:
            raise DiskFullError("the test says there is no space")
        await super().write(buffers, offset)
        self._faulty.on_step("write", self._path)

    def _is_refused(self) -> bool:
        disk = self._faulty
        if os.path.dirname(self._path) == disk.full_directory:
            return True
        return disk.is_full and disk.is_full_for(self._path)

    def read_nowait(self, offset: int, size: int) -> Buffer | None:
        return None if self._cannot_be_read(offset + size) else super().read_nowait(offset, size)

    def _read(self, offset: int, size: int) -> Buffer:
        if self._cannot_be_read(offset + size):
            raise DiskFailedError("the test makes this read fail")
        return super()._read(offset, size)

    def _cannot_be_read(self, end: int) -> bool:
        ending = self._faulty.fail_reads_of
        return ending is not None and self._path.endswith(ending) and end > self._faulty.fail_reads_behind

    async def read(self, offset: int, size: int) -> Buffer:
        self._faulty.bytes_read += size
        return await super().read(offset, size)

    async def sync(self) -> None:
        if self._faulty.fail_sync_of and self._path.endswith(self._faulty.fail_sync_of):
            raise DiskFailedError("the test makes this sync fail")
        await super().sync()

    async def truncate(self, size: int) -> None:
        await super().truncate(size)
        self._faulty.on_step("truncate", self._path)

    async def preallocate(self, size: int) -> None:
        if self._is_refused():
            raise DiskFullError("the test says there is no space")
        await super().preallocate(size)
        self._faulty.on_step("preallocate", self._path)


class FaultyDisk(RealDisk):
    """A real disk that fails, tears or runs full when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.journal_writes = 0
        self.bytes_read = 0
        self.fail_journal_write = 0  # the n-th of them fails, after so many bytes
        self.torn_bytes = 0
        self.journal_s = 0.0  # how long a write of the journal takes at least
        self.fail_sync_of = ""  # syncs of files whose path ends so fail
        self.fail_reads_of: str | None = None  # reads of them, too
        self.fail_reads_behind = 0  # so many bytes
        self.is_full = False
        self.is_full_for: Callable[[str], bool] = lambda path: True
        self.full_directory = ""  # the one that is full
        self.free: int | None = None  # bytes left, if it is the test that says so
        self.on_step: Callable[[str, str], None] = lambda what, path: None  # after anything that lasts

    def space(self, path: str) -> Space:
        return super().space(path) if self.free is None else Space(self.free, 1 << 40)

    async def create(self, path: str) -> RealFile:
        file = await super().create(path)
        self.on_step("create", path)
        return file

    async def rename(self, old: str, new: str) -> None:
        await super().rename(old, new)
        self.on_step("rename", new)

    async def unlink(self, path: str) -> None:
        await super().unlink(path)
        self.on_step("unlink", path)

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return FaultyFile(self, file._descriptor, path)
