"""Fail-stop for names (rule 2): once a change of a name could not be made durable, no other is made.
Owns the `Disk` that an engine works on, in front of the disk that the engine was given. After a failed sync
of a directory the system may count the directory's changes as written. Another sync, under way or later, then
succeeds although it proves nothing. A checkpoint written after it could list a file that the next power cut
removes. The journal keeps the rule for writes to segments by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from metadata.errors import DiskFailedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.storage.disk.disk import DirectoryLock, Disk, File, Space
    from bookie_aio.storage.health import StorageHealth

_T = TypeVar("_T")


class FailStopDisk:
    """A disk that changes no name once a change of a name has failed here, or the engine has failed."""

    def __init__(self, disk: Disk, health: StorageHealth) -> None:
        self._disk = disk
        self._health = health
        self._error: DiskFailedError | None = None  # of the first change that failed here

    def _check(self) -> None:
        error = self._error or self._health.error
        if error is not None:
            raise DiskFailedError(f"nothing is changed on this disk any more: {error}")

    async def _change(self, change: Callable[..., Awaitable[_T]], *paths: str) -> _T:
        self._check()
        try:
            return await change(*paths)
        except DiskFailedError as error:
            if self._health.error is None:
                self._error = self._error or error
            raise

    async def create(self, path: str) -> File:
        """See `Disk`."""
        return await self._change(self._disk.create, path)

    async def make_directory(self, path: str) -> None:
        """See `Disk`."""
        await self._change(self._disk.make_directory, path)

    async def rename(self, old: str, new: str) -> None:
        """See `Disk`."""
        await self._change(self._disk.rename, old, new)

    async def unlink(self, path: str) -> None:
        """See `Disk`."""
        await self._change(self._disk.unlink, path)

    async def sync_directory(self, path: str) -> None:
        """See `Disk`."""
        await self._change(self._disk.sync_directory, path)
        # Rule 2: if another sync failed meanwhile, this one proves nothing of the names that it was to sync.
        self._check()

    async def open(self, path: str) -> File:
        """See `Disk`."""
        return await self._disk.open(path)

    async def list_directory(self, path: str) -> list[str]:
        """See `Disk`."""
        return await self._disk.list_directory(path)

    def lock_directory(self, path: str) -> DirectoryLock:
        """See `Disk`."""
        return self._disk.lock_directory(path)

    def space(self, path: str) -> Space:
        """See `Disk`."""
        return self._disk.space(path)
