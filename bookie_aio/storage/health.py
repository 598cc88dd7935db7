"""The health of a bookie's storage: whether it failed, and whether it has room.

Owns these two facts, and tells one listener when one of them changes. Every part of the storage that can fail
gets the same `StorageHealth` and reports to it. Does not own what follows from a fact: the engine drops
the accepted records, and the server deregisters or becomes read-only.

| fact | set by | ends |
|---|---|---|
| `error` | the first write, sync or background step that fails (rule 2, fail-stop) | never |
| `has_room` | the segment allocator, as free space falls and rises | as often as it does |

`FailStopDisk` is fail-stop for names (rule 2): once a change of a name could not be made durable, no other is
made. An engine works on it, in front of the disk that the engine was given. After a failed sync
of a directory the system may count the directory's changes as written. Another sync, under way or later, then
succeeds although it proves nothing. A checkpoint written after it could list a file that the next power cut
removes. The journal keeps the rule for writes to segments by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeVar

from metadata.errors import DiskFailedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.storage.disk.disk import DirectoryLock, Disk, File, Space

_T = TypeVar("_T")


class HealthListener(Protocol):
    """The engine, as `StorageHealth` sees it. Both methods are called on the event loop's thread."""

    def storage_failed(self, error: StorageError) -> None:
        """Drop the accepted records: none is written or acknowledged any more. Called at most once."""

    def writable_changed(self, is_writable: bool) -> None:
        """Tell the server whether ordinary adds are accepted from now on."""


class StorageHealth:
    """The health of one engine's storage."""

    def __init__(self, listener: HealthListener) -> None:
        """Start healthy; `listener` is told of each change."""
        self._listener = listener
        self.error: StorageError | None = None
        self.has_room = True

    def fail(self, error: BaseException | None, what: str) -> None:
        """Stop for good (rule 2). Only the first failure counts, and only that one is told.

        Args:
            error: anything that was raised. An error that is no `StorageError` stops the bookie as well:
                going on without the step that raised it would hide the failure.
            what: the step that failed, for the text of an error that is no `StorageError`.
        """
        if self.error is not None:
            return
        if not isinstance(error, StorageError):
            error = DiskFailedError(f"{what} failed: {error!r}")
        elif not isinstance(error, DiskFailedError):
            error = DiskFailedError(str(error))
        self.error = error
        self._listener.storage_failed(error)

    def watch(self, task: asyncio.Task[None], what: str) -> None:
        """Stop for good if somebody cancels a task of the storage, which its owner never does.

        A thread may still be at work on the task's last step. So nobody knows what the step has left, nor
        whether a sync in it has failed.
        """

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                self.fail(DiskFailedError(f"{what} was cancelled"), what)

        task.add_done_callback(ended)

    def lose_data_of_any_ledger(self) -> None:
        """Tell that data was lost that may concern any ledger, fences included (rule 4).

        `bookie_aio.storage.ledgers.marks` has the mark.
        """
        self._listener.writable_changed(False)

    def set_room(self, has_room: bool) -> None:
        """Note whether there is room for ordinary adds."""
        if self.has_room != has_room:
            self.has_room = has_room
            self._listener.writable_changed(has_room)


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
            self._note(error)
            raise

    def _note_sync(self, syncing: asyncio.Future[None]) -> None:
        if syncing.cancelled():  # its thread may find a failure, which nobody is told of
            self._note(DiskFailedError("a sync of a directory was cancelled"))
        else:
            self._note(syncing.exception())

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, DiskFailedError) and self._health.error is None:
            self._error = self._error or error

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
        self._check()
        # In a task of its own: a failure counts also where the one who waits for the sync is cancelled.
        syncing = asyncio.ensure_future(self._disk.sync_directory(path))
        syncing.add_done_callback(self._note_sync)
        await asyncio.shield(syncing)
        # Rule 2: if another sync failed meanwhile, this one proves nothing of the names that it was to sync.
        self._check()

    def parents(self, path: str) -> list[str]:
        """See `Disk`."""
        return self._disk.parents(path)

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
