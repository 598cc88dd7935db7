"""SimDisk: the `Disk` seam of `bookie_aio.storage.disk.disk`, in front of one host's `Hardware`.

Owns what each call of the seam does and how long it takes. The fault model is at the top of
`tests.sim.cluster.hardware`.
"""

from __future__ import annotations

import errno
import posixpath
from typing import TYPE_CHECKING, Any

from bookie_aio.storage.disk.disk import Space
from metadata.errors import DirectoryInUseError, DiskFailedError, DiskFullError
from tests.sim.cluster.hardware import PAGE, Directory, draw

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from tests.sim.cluster.hardware import Hardware, Inode
    from tests.sim.cluster.loop import Process

_AT_ONCE = 0.7
"""The share of the groups that are written at once, of those that may be."""
_EIO = OSError(errno.EIO, "Input/output error")


class SimFile:
    """An open file; see `bookie_aio.storage.disk.disk.File`."""

    def __init__(self, disk: SimDisk, inode: Inode, path: str) -> None:
        self._disk = disk
        self._hardware = disk.hardware
        self.inode = inode
        self._path = path

    def write_and_sync(
        self,
        buffers: Sequence[Any],
        offset: int,
        then: Sequence[tuple[Any, Any]] = (),
        *,
        at_once: bool = False,
    ) -> asyncio.Future[None]:
        """See `File`. A group that may be written at once is so most times, in no simulated time.

        The process does nothing between the steps in both cases. So a power cut between them leaves the same
        disk, and only groups that take time are cut.
        """
        disk, hardware, inode = self._disk, self._hardware, self.inode
        loop = disk.loop
        future = loop.create_future()
        write_time, sync_time = hardware.group_times()
        is_now = at_once and hardware.rng.random() < _AT_ONCE

        def write() -> None:
            content = b"".join(buffers)
            if hardware.next_write_fails():
                inode.write([content[: int(hardware.rng.random() * len(content))]], offset)
                _settle(future, DiskFailedError(f"writing {self._path} at {offset}: {_EIO}"))
                return
            before = bytes(inode.durable[offset : offset + len(content)])
            end = inode.write([content], offset)
            disk.note("write_and_sync", self._path, offset, content)
            if is_now:
                synced(inode.snapshot(), before, content, end)
            else:
                loop.post(disk.process, sync_time, synced, inode.snapshot(), before, content, end)

        def synced(snapshot: Any, before: bytes, content: bytes, end: int) -> None:
            if hardware.next_sync_fails():
                inode.forget_dirty()
                _settle(future, DiskFailedError(f"syncing {self._path}: {_EIO}"))
                return
            inode.make_durable(snapshot)
            hardware.group_durable(inode, offset, end)
            hardware.lie(inode, offset, before, content)
            for file, data in then:
                if hardware.next_write_fails():
                    _settle(future, DiskFailedError(f"writing {file._path}: {_EIO}"))
                    return
                file.inode.write([data], 0)
                disk.note("write", file._path, 0, data)
            _settle(future, None)

        if is_now:
            disk.hardware.stats["synced_at_once"] += 1
            write()
        else:
            hardware.occupy(write_time + sync_time)
            loop.post(disk.process, write_time, write)
        return future

    async def write(self, buffers: Sequence[Any], offset: int) -> None:
        """See `File`."""
        await self._disk.work()
        content = b"".join(buffers)
        is_growing = offset + len(content) > len(self.inode.data)
        if is_growing and self._hardware.is_full(posixpath.dirname(self._path)):
            self._hardware.stats["enospc"] += 1
            raise DiskFullError(f"writing {self._path}: no space left on device")
        if self._hardware.next_write_fails():
            self.inode.write([content[: len(content) // 2]], offset)
            raise DiskFailedError(f"writing {self._path} at {offset}: {_EIO}")
        self.inode.write([content], offset)
        self._disk.note("write", self._path, offset, content)

    def read_nowait(self, offset: int, size: int) -> bytes | None:
        """See `File`."""
        faults = self._hardware.faults
        if faults.failing_reads or self._hardware.rng.random() < faults.cold_reads:
            return None
        found = bytes(self.inode.data[offset : offset + size])
        return found if len(found) == size else None

    async def read(self, offset: int, size: int) -> bytes:
        """See `File`."""
        found = self.read_nowait(offset, size)
        if found is None:
            await self._disk.work(self._hardware.faults.read_time)
            self._disk.may_fail_to_read(f"reading {self._path} at {offset}")
            found = bytes(self.inode.data[offset : offset + size])
        return found

    async def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `File`."""
        await self._disk.work(self._hardware.faults.read_time)
        if ranges:
            self._disk.may_fail_to_read(f"reading {self._path} at {ranges[0][0]}")
        return [bytes(self.inode.data[offset : offset + size]) for offset, size in ranges]

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `File`: nothing is gained by it here."""

    async def will_not_need(self) -> None:
        """See `File`: nothing is gained by it here."""

    async def preallocate(self, size: int) -> None:
        """See `File`."""
        await self._disk.work()
        if self._hardware.is_full(posixpath.dirname(self._path)):
            self._hardware.stats["enospc"] += 1
            raise DiskFullError(f"reserving {size} bytes for {self._path}: no space left on device")
        self._disk.may_fail_to_change(f"reserving {size} bytes for {self._path}")
        if size > len(self.inode.data):
            self.inode.resize(size)
        self._disk.note("preallocate", self._path, size)

    async def truncate(self, size: int) -> None:
        """See `File`."""
        await self._disk.work()
        self._disk.may_fail_to_change(f"cutting {self._path}")
        self.inode.resize(size)
        self._disk.note("truncate", self._path, size)

    async def sync(self) -> None:
        """See `File`."""
        snapshot = self.inode.snapshot()
        await self._disk.work(draw(self._hardware.rng, self._hardware.faults.sync_time))
        if self._hardware.next_sync_fails():
            self.inode.forget_dirty()
            raise DiskFailedError(f"syncing {self._path}: {_EIO}")
        self.inode.make_durable(snapshot)
        self._disk.note("sync", self._path)

    def size(self) -> int:
        """See `File`."""
        return len(self.inode.data)

    async def written(self) -> list[tuple[int, int]]:
        """See `File`."""
        await self._disk.work()
        ranges: list[tuple[int, int]] = []
        size = len(self.inode.data)
        for page in sorted(self.inode.written):
            start, end = page * PAGE, min((page + 1) * PAGE, size)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], end)
            elif start < end:
                ranges.append((start, end))
        return ranges

    def close(self) -> None:
        """See `File`."""


class SimLock:
    """See `DirectoryLock`."""

    def __init__(self, hardware: Hardware, path: str) -> None:
        self._hardware = hardware
        self._path = path

    def release(self) -> None:
        """See `DirectoryLock`."""
        self._hardware.locks.pop(self._path, None)


class SimDisk:
    """The disk as one process has it; see `bookie_aio.storage.disk.disk.Disk`."""

    def __init__(self, hardware: Hardware, process: Process) -> None:
        self.hardware = hardware
        self.process = process
        self.loop = hardware.loop

    def note(self, *call: Any) -> None:
        """Tell whoever records the sequence of calls, just after one took effect: nothing has followed it."""
        if self.hardware.record is not None:
            self.hardware.record(*call)

    async def work(self, seconds: float = 0.0002) -> None:
        """Let the time of a call pass."""
        future = self.loop.create_future()
        delay = seconds * self.hardware.faults.slow_factor * (0.5 + self.hardware.rng.random())
        self.loop.post(self.process, delay, _settle, future, None)
        await future

    def may_fail_to_read(self, what: str) -> None:
        """Raise DiskFailedError if reads fail now."""
        hardware = self.hardware
        if hardware.faults.failing_reads and hardware.rng.random() < hardware.faults.failing_reads:
            hardware.stats["eio_read"] += 1
            hardware.noticed("disk_read_errors")
            raise DiskFailedError(f"{what}: {_EIO}")

    def may_fail_to_change(self, what: str) -> None:
        """Raise DiskFailedError if this change of a name or of a size is the one that is to fail."""
        if self.hardware.next_change_fails():
            raise DiskFailedError(f"{what}: {_EIO}")

    def _directory(self, path: str) -> Directory:
        found = self.hardware.directories.get(posixpath.normpath(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "No such directory", path)
        return found

    def _find(self, path: str) -> tuple[Directory, str]:
        return self._directory(posixpath.dirname(path)), posixpath.basename(path)

    async def create(self, path: str) -> SimFile:
        """See `Disk`."""
        await self.work()
        directory, name = self._find(path)
        self.may_fail_to_change(f"opening {path}")
        inode = self.hardware.new_inode()
        directory.change((name, inode))
        self.note("create", path)
        return SimFile(self, inode, path)

    async def open(self, path: str) -> SimFile:
        """See `Disk`."""
        await self.work()
        directory, name = self._find(path)
        if name not in directory.entries:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        self.may_fail_to_read(f"opening {path}")
        return SimFile(self, directory.entries[name], path)

    async def list_directory(self, path: str) -> list[str]:
        """See `Disk`."""
        await self.work()
        directory = self._directory(path)
        self.may_fail_to_read(f"listing {path}")
        return sorted(directory.entries)

    async def make_directory(self, path: str) -> None:
        """See `Disk`."""
        await self.work()
        path = posixpath.normpath(path)
        if path not in self.hardware.directories:
            self.hardware.directories[path] = Directory()
            self.note("make_directory", path)

    async def rename(self, old: str, new: str) -> None:
        """See `Disk`."""
        await self.work()
        directory, old_name = self._find(old)
        target, new_name = self._find(new)
        assert directory is target, "a renaming across directories"
        if old_name not in directory.entries:
            raise FileNotFoundError(errno.ENOENT, "No such file", old)
        self.may_fail_to_change(f"renaming {old}")
        directory.change((old_name, None), (new_name, directory.entries[old_name]))
        self.note("rename", old, new)

    async def unlink(self, path: str) -> None:
        """See `Disk`."""
        await self.work()
        directory, name = self._find(path)
        if name in directory.entries:
            self.may_fail_to_change(f"removing {path}")
            directory.change((name, None))
            self.note("unlink", path)

    def parents(self, path: str) -> list[str]:
        """See `Disk`."""
        return [posixpath.dirname(posixpath.normpath(path))]

    async def sync_directory(self, path: str) -> None:
        """See `Disk`."""
        path = posixpath.normpath(path)
        directories = self.hardware.directories
        inner = [directory for other, directory in directories.items() if posixpath.dirname(other) == path]
        found = directories.get(path)
        covered = len(found.changes) if found is not None else 0
        await self.work(draw(self.hardware.rng, self.hardware.faults.sync_time))
        has_failed = self.hardware.next_sync_of_names_fails()
        if found is not None:
            found.end_sync(covered, has_failed=has_failed)
        if has_failed:
            raise DiskFailedError(f"syncing {path}: {_EIO}")
        for directory in inner:
            directory.is_durable = True
        self.note("sync_directory", path)

    def lock_directory(self, path: str) -> SimLock:
        """See `Disk`."""
        path = posixpath.normpath(path)
        holder = self.hardware.locks.get(path)
        if holder is not None and holder.is_alive:
            raise DirectoryInUseError(f"another process has {path} open")
        self.hardware.locks[path] = self.process
        return SimLock(self.hardware, path)

    def space(self, path: str) -> Space:
        """See `Disk`."""
        return Space(0 if self.hardware.is_full(posixpath.normpath(path)) else 1 << 40, 1 << 40)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
