"""A disk that changes nothing: for looking at the directories of a bookie that does not run.

Files are opened for reading only, and a pipe in the place of a file without a wait for its writer. The lock
of a directory is shared, and is taken only where its file is there: no file is created. It is refused while a
bookie runs, and no bookie starts while it is held.

A start makes the names that it finds durable, and renames files that it cannot use. Here the first does
nothing, and the second is noted in `renamed`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from bookie_aio.storage.disk.disk import RealDisk
from metadata.errors import DirectoryInUseError, DiskFailedError

if TYPE_CHECKING:
    from typing import NoReturn

    from bookie_aio.storage.disk.disk import DirectoryLock, RealFile


_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class SharedLock:
    """A shared flock on the file `lock` of a directory, if there is one."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        with suppress(FileNotFoundError):
            self._descriptor = os.open(os.path.join(path, "lock"), _FLAGS)
        if self._descriptor < 0:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise DirectoryInUseError(f"a bookie runs on {path}") from error
            raise

    def release(self) -> None:
        """See `DirectoryLock`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ReadOnlyDisk(RealDisk):
    """The operating system's files, for reading only."""

    def __init__(self) -> None:
        super().__init__()
        self.renamed: list[str] = []
        """Files that a start of the bookie would rename, since it cannot use them."""

    async def open(self, path: str) -> RealFile:
        """Open an existing file for reading."""
        return await self._open(path, _FLAGS)

    async def rename(self, old: str, new: str) -> None:
        """Note that a start would rename the file."""
        self.renamed.append(old)

    async def sync_directory(self, path: str) -> None:
        """Do nothing."""

    def lock_directory(self, path: str) -> DirectoryLock:
        """Take a shared lock, which a running bookie refuses."""
        try:
            return SharedLock(path)
        except OSError as error:
            raise DiskFailedError(f"locking {path}: {error.strerror or error}") from error

    async def create(self, path: str) -> NoReturn:
        """Refuse."""
        raise DiskFailedError(f"{path} is not created: the directory is only looked at")

    async def make_directory(self, path: str) -> NoReturn:
        """Refuse."""
        raise DiskFailedError(f"{path} is not created: the directory is only looked at")

    async def unlink(self, path: str) -> NoReturn:
        """Refuse."""
        raise DiskFailedError(f"{path} is not removed: the directory is only looked at")
