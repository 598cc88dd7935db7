"""The `Disk` seam: every touch of a file by the bookie goes through it.

Owns the protocols `File`, `Disk` and `DirectoryLock`, and `RealDisk`, their implementation on an operating
system. The same engine runs on a simulated disk that implements the protocols. So no other module of the
bookie opens files, starts threads or calls the operating system.

Threads: one thread writes and syncs the journal, so that a group costs one hop and never waits behind a read.
A small group is written by the event loop's thread where the journal says so (`at_once`).
A small pool does everything else: reads that would block, preallocation, index files. No thread touches the
engine's state.

Errors: no space (ENOSPC, EDQUOT) is `DiskFullError`. A lack of file descriptors or memory is `DiskFullError`,
too: it passes, and proves no fault of the disk. Any other failure is `DiskFailedError`, which is fail-stop
when a write or a sync raises it (rule 2). A missing file is `FileNotFoundError`. A short write is continued.
A write that makes no progress is an error.

Also here: `write_file` and `replacement`, which replace a file atomically. The new file is written beside the
old one, synced, and renamed over it.

Descriptors: some are kept in reserve, so that a process whose peers took all others can still open files.

Modes: files are 0600, and new directories 0700, under any umask. An existing directory keeps its mode.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from bookie_aio.metrics import DiskTimes
from metadata.errors import DirectoryInUseError, DiskFailedError, DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bookie_aio.wire.blocks import Buffer


_IOV_MAX = 1024
_POOL_THREADS = 4
_RESERVED_DESCRIPTORS = 16
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NOT_ENOUGH = (*_NO_DESCRIPTOR, errno.ENOMEM)
"""Of something else: likewise no failure of the disk."""
_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_FALLOCATE_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

_WriteAndSync = Callable[["Sequence[Buffer]", int], None]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Space(NamedTuple):
    """Free and total bytes of a file system."""

    free: int
    total: int


class File(Protocol):
    """An open file. Offsets and sizes are bytes."""

    def write_and_sync(
        self,
        buffers: Sequence[Buffer],
        offset: int,
        then: Sequence[tuple[File, Buffer]] = (),
        *,
        at_once: bool = False,
    ) -> asyncio.Future[None]:
        """Write the buffers one after another from `offset` on, and fdatasync: the journal's path.

        The buffers must not change before the future is done. Calls are executed in order.

        Args:
            then: once the sync has returned, these bytes are written at the beginning of these files, without
                a sync. They are files of the same disk.
            at_once: the event loop may wait for all of that within this call. The future may then be done
                already.
        """

    async def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write without a sync, off the journal's path."""

    def read_nowait(self, offset: int, size: int) -> Buffer | None:
        """Read bytes that are in memory; None where the read would block, or the system cannot tell."""

    async def read(self, offset: int, size: int) -> Buffer:
        """Read `size` bytes; fewer only where the file ends."""

    async def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read several ranges (offset, size) as `read` does, with one wait for all of them."""

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Hint that ranges will be read soon: the system may bring them into memory meanwhile."""

    async def will_not_need(self) -> None:
        """Hint that the file will not be read: the system may drop its pages from memory."""

    async def preallocate(self, size: int) -> None:
        """Reserve blocks for the first `size` bytes and make the file that long."""

    async def truncate(self, size: int) -> None:
        """Cut the file."""

    async def sync(self) -> None:
        """Make the file's data and size durable."""

    def size(self) -> int:
        """Return the file's length."""

    async def written(self) -> list[tuple[int, int]]:
        """Return the ranges (start, end) that may ever have been written to, ascending.

        Bytes outside them were reserved at most, and read as zeros. One range for the whole file is always
        right.
        """

    def close(self) -> None:
        """Close it. Reads under way may fail."""


class DirectoryLock(Protocol):
    """An exclusive lock of a directory, which ends with its process."""

    def release(self) -> None:
        """Release the lock."""


class Disk(Protocol):
    """The file system as the bookie uses it. Paths are as the operating system takes them."""

    async def create(self, path: str) -> File:
        """Create an empty file, in the place of an existing one of that name."""

    async def open(self, path: str) -> File:
        """Open an existing file for reading and writing; raises FileNotFoundError."""

    async def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; raises FileNotFoundError."""

    async def make_directory(self, path: str) -> None:
        """Create a directory and its parents where they are missing. Durable after `sync_path`."""

    def parents(self, path: str) -> list[str]:
        """Return the parents of a directory in its file system that can be read, the nearest first."""

    async def rename(self, old: str, new: str) -> None:
        """Rename a file over an existing one. Durable after `sync_directory`."""

    async def unlink(self, path: str) -> None:
        """Remove a file; a missing file is no error. Durable after `sync_directory`."""

    async def sync_directory(self, path: str) -> None:
        """Make the directory's entries durable."""

    def lock_directory(self, path: str) -> DirectoryLock:
        """Lock the directory exclusively.

        Raises:
            DirectoryInUseError: another process has it locked.
        """

    def space(self, path: str) -> Space:
        """Return the free and the total space of the file system of `path`."""


def _typed(error: OSError, what: str) -> StorageError:
    text = f"{what}: {error.strerror or error}"
    if error.errno not in _NO_SPACE + _NOT_ENOUGH:
        return DiskFailedError(text)
    full = DiskFullError(text)
    full.is_of_space = error.errno in _NO_SPACE
    return full


def _write_all(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all buffers, in as few calls as the system allows, and continue after a short write."""
    for start in range(0, len(buffers), _IOV_MAX):
        batch = buffers if len(buffers) <= _IOV_MAX else buffers[start : start + _IOV_MAX]
        size = sum(map(len, batch))
        written = os.pwritev(descriptor, batch, offset)
        offset += written
        while written < size:
            rest = memoryview(b"".join(batch))[written:]
            progress = os.pwrite(descriptor, rest, offset)
            if not progress:
                raise OSError(errno.EIO, "a write made no progress")
            written += progress
            offset += progress


class RealFile:
    """A file of the operating system. Made by `RealDisk`.

    Its descriptor outlives `close` for as long as a thread changes the file, even if nobody waits for that.
    Otherwise the next file opened would get the descriptor's number, and the thread would write into it.
    """

    def __init__(self, disk: RealDisk, descriptor: int, path: str) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._path = path
        self._lock = threading.Lock()
        self._changes = 0  # changes of the file that are queued or under way in threads
        self._is_closed = False

    def _begin_change(self) -> None:
        with self._lock:
            self._changes += 1

    def _end_change(self, _: object = None) -> None:
        with self._lock:
            self._changes -= 1
            is_last = self._is_closed and not self._changes
        if is_last:
            self._close()

    async def _change(
        self, what: str, function: Callable[_P, None], /, *args: _P.args, **more: _P.kwargs
    ) -> None:
        """Run a call that changes the file in the pool."""
        self._begin_change()
        await self._disk.call_until(self._end_change, what, function, *args, **more)

    def write_and_sync(
        self,
        buffers: Sequence[Buffer],
        offset: int,
        then: Sequence[tuple[File, Buffer]] = (),
        *,
        at_once: bool = False,
    ) -> asyncio.Future[None]:
        """See `File`."""
        thread = self._disk.journal_thread
        files = cast("Sequence[tuple[RealFile, Buffer]]", then)
        self._begin_change()
        for file, _ in files:
            file._begin_change()
        function = partial(self._write_sync_and_write, files) if files else self._write_and_sync
        if at_once and thread.is_idle:
            return _called(function, buffers, offset)
        return thread.call(function, buffers, offset)

    def _write_sync_and_write(
        self, then: Sequence[tuple[RealFile, Buffer]], buffers: Sequence[Buffer], offset: int
    ) -> None:
        try:
            self._write_and_sync(buffers, offset)
            for file, data in then:
                try:
                    _write_all(file._descriptor, [data], 0)
                except OSError as error:
                    raise _typed(error, f"writing {file._path}") from error
        finally:
            for file, _ in then:
                file._end_change()

    def _write_and_sync(self, buffers: Sequence[Buffer], offset: int) -> None:
        times = self._disk.times
        began = times.clock()
        try:
            _write_all(self._descriptor, buffers, offset)
            written = times.clock()
            os.fdatasync(self._descriptor)
            times.write.add(written - began)
            times.fsync.add(times.clock() - written)
        except OSError as error:
            raise _typed(error, f"writing {self._path} at {offset}") from error
        finally:
            self._end_change()

    async def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `File`."""
        await self._change(f"writing {self._path} at {offset}", _write_all, self._descriptor, buffers, offset)

    def read_nowait(self, offset: int, size: int) -> Buffer | None:
        """See `File`."""
        buffer = bytearray(size)
        try:
            # Cold pages answer EAGAIN, and tmpfs EOPNOTSUPP; a short count is a cold page further on.
            count = os.preadv(self._descriptor, [buffer], offset, _RWF_NOWAIT) if _RWF_NOWAIT else -1
        except OSError:
            return None
        return buffer if count == size else None

    async def read(self, offset: int, size: int) -> Buffer:
        """See `File`."""
        found = self.read_nowait(offset, size)
        if found is None:
            found = await self._disk.call(f"reading {self._path} at {offset}", self._read, offset, size)
        return found

    def _read(self, offset: int, size: int) -> Buffer:
        parts: list[bytes] = []
        while size:
            part = os.pread(self._descriptor, size, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `File`."""
        return await self._disk.call(f"reading {self._path}", self._read_many, ranges)

    def _read_many(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._will_need(ranges)  # so that the device works on all of them at once
        return [self._read(offset, size) for offset, size in ranges]

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `File`."""
        self._disk.call_later(self._will_need, ranges)

    def _will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        if hasattr(os, "posix_fadvise"):
            for offset, size in ranges:
                os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    async def will_not_need(self) -> None:
        """See `File`."""
        if hasattr(os, "posix_fadvise"):
            await self._disk.call(
                f"advising about {self._path}",
                os.posix_fadvise,
                self._descriptor,
                0,
                0,
                os.POSIX_FADV_DONTNEED,
            )

    async def preallocate(self, size: int) -> None:
        """See `File`."""
        await self._change(f"reserving {size} bytes for {self._path}", self._preallocate, size)

    def _preallocate(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as error:
                if error.errno not in _FALLOCATE_UNSUPPORTED:
                    raise
            else:
                return
        # No such call here: writing zeros reserves the blocks just as surely.
        step = bytes(1024 * 1024)
        for offset in range(0, size, len(step)):
            _write_all(self._descriptor, [step[: size - offset]], offset)

    async def truncate(self, size: int) -> None:
        """See `File`."""
        await self._change(f"cutting {self._path}", os.ftruncate, self._descriptor, size)

    async def sync(self) -> None:
        """See `File`."""
        await self._disk.call(f"syncing {self._path}", os.fsync, self._descriptor)

    def size(self) -> int:
        """See `File`."""
        return os.fstat(self._descriptor).st_size

    async def written(self) -> list[tuple[int, int]]:
        """See `File`."""
        return await self._disk.call(f"searching {self._path}", self._written)

    def _written(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        start = end = 0
        while True:
            try:
                start = os.lseek(self._descriptor, end, os.SEEK_DATA)
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing follows
                    return ranges
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # this file system cannot tell
                    return [(0, self.size())]
                raise
            ranges.append((start, end))

    def close(self) -> None:
        """See `File`."""
        with self._lock:
            is_last = not self._is_closed and not self._changes
            self._is_closed = True
        if is_last:
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


class RealLock:
    """A flock on the file `lock` in the directory; the system drops it with the process.

    It is held until the journal's write under way has ended, for which nobody waits after a failure
    elsewhere. Otherwise the next holder would read a segment that is still being written.
    """

    def __init__(self, disk: RealDisk, path: str) -> None:
        self._disk = disk
        self._descriptor = _open_file(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = -1
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise DirectoryInUseError(f"another process has {path} open") from error
            raise

    def release(self) -> None:
        """See `DirectoryLock`."""
        if self._descriptor >= 0:
            self._disk.behind_the_journal(partial(os.close, self._descriptor))
            self._descriptor = -1


class JournalThread:
    """Runs the journal's writes one after another, with one hop to the thread and one back for each.

    The futures of an executor would double the processor time of a group.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[_WriteAndSync, Sequence[Buffer], int, asyncio.Future[None]] | None]
        self._calls = SimpleQueue()
        self._last: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def call(self, function: _WriteAndSync, buffers: Sequence[Buffer], offset: int) -> asyncio.Future[None]:
        """Queue a call; returns a future of its outcome."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._last = future
        self._calls.put((function, buffers, offset, future))
        return future

    @property
    def is_idle(self) -> bool:
        """Return whether the calls queued so far are known to have ended."""
        return self._last is None or (self._last.done() and not self._last.cancelled())

    def behind(self, function: Callable[[], None]) -> None:
        """Call a function after the calls queued so far: now if they are known to have ended."""
        if self.is_idle:
            function()
        else:
            self.call(lambda _buffers, _offset: function(), (), 0)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, buffers, offset, future = call
            error: Exception | None = None
            try:
                function(buffers, offset)
            except Exception as raised:
                error = raised
            del call, function, buffers
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, future, error)

    def shutdown(self) -> None:
        """End the thread after the calls queued so far."""
        self._calls.put(None)
        self._thread.join()


class DescriptorReserve:
    """Descriptors that are open on nothing, closed where a call finds no other. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._fill()

    def call(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what opens a file; retry on EMFILE and ENFILE for as long as the reserve lasts."""
        try:
            while True:
                try:
                    return function(*args, **kwargs)
                except OSError as error:
                    if error.errno not in _NO_DESCRIPTOR or not self._spend():
                        raise
        finally:
            self._fill()

    def _spend(self) -> bool:
        with self._lock:
            if self._held:
                os.close(self._held.pop())
                return True
        return False

    def _fill(self) -> None:
        with self._lock, suppress(OSError):  # a later call tries again
            while len(self._held) < _RESERVED_DESCRIPTORS:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the descriptors."""
        while self._spend():
            pass


def _nothing(_: object) -> None:
    pass


def _called(function: _WriteAndSync, buffers: Sequence[Buffer], offset: int) -> asyncio.Future[None]:
    """Call on this thread; returns a future that is done."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        function(buffers, offset)
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class RealDisk:
    """The operating system's files. Close it when every file is closed.

    `times` counts how long the journal's writes and syncs take.
    """

    def __init__(self, times: DiskTimes | None = None) -> None:
        self.times = times or DiskTimes(lambda: 0.0)
        self._journal_thread: JournalThread | None = None
        self._pool = ThreadPoolExecutor(_POOL_THREADS, "disk")
        self._reserve = DescriptorReserve()

    @property
    def journal_thread(self) -> JournalThread:
        """Return the thread that writes the journal; it is started by the first use."""
        if self._journal_thread is None:
            self._journal_thread = JournalThread()
        return self._journal_thread

    def behind_the_journal(self, function: Callable[[], None]) -> None:
        """Call a function when the journal's writes that are queued or under way have ended."""
        if self._journal_thread is None:
            function()
        else:
            self._journal_thread.behind(function)

    async def call(self, what: str, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a blocking call in the pool; OSErrors are raised as this module's docstring says."""
        return await self.call_until(_nothing, what, function, *args, **kwargs)

    async def call_until(
        self,
        ended: Callable[[Future[_T]], None],
        what: str,
        function: Callable[_P, _T],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Run a blocking call in the pool, and call `ended` when it has ended, or will never begin.

        `ended` is called in any thread, perhaps long after the caller was cancelled.
        """
        try:
            running = self._pool.submit(function, *args, **kwargs)
        except BaseException:
            ended(Future())
            raise
        running.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(running)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _typed(error, what) from error

    def call_later(self, function: Callable[_P, None], /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Run a hint in the pool: nobody waits for it, and its errors are ignored."""

        def quietly() -> None:
            with suppress(OSError):
                function(*args, **kwargs)

        with suppress(RuntimeError):  # no thread can be started
            self._pool.submit(quietly)

    async def create(self, path: str) -> RealFile:
        """See `Disk`."""
        return await self._open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)

    async def open(self, path: str) -> RealFile:
        """See `Disk`."""
        return await self._open(path, os.O_RDWR | os.O_CLOEXEC)

    async def _open(self, path: str, flags: int) -> RealFile:
        opening = asyncio.ensure_future(
            self.call(f"opening {path}", self._reserve.call, _open_file, path, flags)
        )
        try:
            return RealFile(self, await asyncio.shield(opening), path)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    async def list_directory(self, path: str) -> list[str]:
        """See `Disk`."""
        return sorted(await self.call(f"listing {path}", self._reserve.call, os.listdir, path))

    async def make_directory(self, path: str) -> None:
        """See `Disk`."""
        await self.call(f"creating {path}", _make_directory, path)

    def parents(self, path: str) -> list[str]:
        """See `Disk`."""
        found = [os.path.abspath(path)]
        while not os.path.ismount(found[-1]) and os.access(parent := os.path.dirname(found[-1]), os.R_OK):
            found.append(parent)
        return found[1:]

    async def rename(self, old: str, new: str) -> None:
        """See `Disk`."""
        await self.call(f"renaming {old}", os.replace, old, new)

    async def unlink(self, path: str) -> None:
        """See `Disk`."""
        try:
            await self.call(f"removing {path}", os.unlink, path)
        except FileNotFoundError:
            return

    async def sync_directory(self, path: str) -> None:
        """See `Disk`."""
        await self.call(f"syncing {path}", self._reserve.call, _sync_directory, path)

    def lock_directory(self, path: str) -> DirectoryLock:
        """See `Disk`."""
        try:
            return RealLock(self, path)
        except OSError as error:
            raise _typed(error, f"locking {path}") from error

    def space(self, path: str) -> Space:
        """See `Disk`."""
        try:
            found = os.statvfs(path)
        except OSError as error:
            raise _typed(error, f"looking at the space of {path}") from error
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def close(self) -> None:
        """End the threads after the calls under way."""
        if self._journal_thread is not None:
            self._journal_thread.shutdown()
        self._pool.shutdown()
        self._reserve.close()


def _close_unwanted(opening: asyncio.Task[int]) -> None:
    """Close a file whose opener was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        os.close(opening.result())


def _open_file(path: str, flags: int) -> int:
    """Open a file; one that is created gets mode 0600: entries are for no other user of the machine."""
    descriptor = os.open(path, flags, _FILE_MODE)
    if flags & os.O_CREAT:
        with suppress(PermissionError):  # another user's file, or a file system without modes
            os.fchmod(descriptor, _FILE_MODE)  # `os.open` applies the umask, which may take more away
    return descriptor


def _make_directory(path: str) -> None:
    """Make a directory, and its parents where they are missing. `os.makedirs` leaves parents to the umask."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        _make_directory(parent)
    with suppress(FileExistsError):  # made meanwhile, by another process
        os.mkdir(path, _DIRECTORY_MODE)
        os.chmod(path, _DIRECTORY_MODE)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


TEMPORARY_SUFFIX = ".new"


@asynccontextmanager
async def replacement(disk: Disk, directory: str, name: str) -> AsyncIterator[File]:
    """Return an empty file, which is synced and then renamed to the name when the block ends.

    The caller has to sync the directory afterwards. Without space no file is left behind.
    """
    temporary = os.path.join(directory, name + TEMPORARY_SUFFIX)
    file = await disk.create(temporary)
    try:
        yield file
        await file.sync()
    except DiskFullError:
        await disk.unlink(temporary)
        raise
    finally:
        file.close()
    await disk.rename(temporary, os.path.join(directory, name))


async def write_file(disk: Disk, directory: str, name: str, buffers: Sequence[Buffer]) -> None:
    """Replace a file atomically: after a crash it holds the old bytes or the new ones.

    Raises:
        DiskFullError: the file holds the old bytes, and nothing is left behind that takes space.
        DiskFailedError: a write or a sync failed. After a crash the file holds the old bytes or the new ones.
    """
    async with replacement(disk, directory, name) as file:
        await file.write(buffers, 0)
    try:
        await disk.sync_directory(directory)
    except DiskFullError as error:
        # The file holds the new bytes, and after a crash perhaps the old ones: no caller may rely on either.
        raise DiskFailedError(str(error)) from error


async def remove_files(disk: Disk, paths: Sequence[str]) -> None:
    """Remove files; durable on return."""
    for path in paths:
        await disk.unlink(path)
    for directory in sorted({os.path.dirname(path) for path in paths}):
        await disk.sync_directory(directory)


async def sync_path(disk: Disk, directory: str) -> None:
    """Make the names in a directory durable, its own name, and those of its parents.

    A process that was killed may have made any of them, and synced none.
    """
    for path in (directory, *disk.parents(directory)):
        await disk.sync_directory(path)
