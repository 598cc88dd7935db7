"""Space: the next segment ahead of time, spare files, the reserve, and what happens without room (rule 2).

Owns the segment that is prepared and not yet written to, the spare files, the reserve, the ids of segments
to come, in which directory each segment goes, and whether the bookie takes ordinary adds. Does not own the
segments once they were taken, nor the checkpoint: it asks for one, since a segment must be listed there
before its first group.

Running out of space is not a failure. Below a *floor* of free space ordinary adds are refused, while
segments are still prepared for fences, recovery adds and compaction. Where even that finds no space, what
was accepted still fits into the current segment, and fences and recovery adds go on into the reserve. Every
few seconds it is looked at again. Any other error is passed on and is the end (fail-stop).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bookie_aio.storage.disk.disk import remove_files
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment import names
from bookie_aio.storage.segment.files import create_reserve, create_segment, give_up_segment, reuse_file
from metadata.errors import DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet

_T = TypeVar("_T")
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """How much is set aside, and when it gets tight.

    The free space below which the bookie warns, or is read-only, is that many bytes or that part of the
    file system, whichever is less: a small disk is not read-only from the start, nor a large one with much
    space left.
    """

    reserve_bytes: int = 32 * 1024 * 1024
    spare_bytes_max: int = 2 * _GIB
    warn_free_bytes: int = 8 * _GIB
    warn_free_share: float = 0.10
    floor_free_bytes: int = 2 * _GIB
    floor_free_share: float = 0.05
    retry_s: float = 5.0


class SegmentAllocator:
    """Prepares segments in the background, one at a time."""

    def __init__(
        self,
        disk: Disk,
        directories: Sequence[str],
        home: str,
        *,
        segments: SegmentSet,
        segment_bytes: int,
        limits: SpaceLimits,
        next_id: int,
        reserve_bytes: int,
        spares: list[tuple[str, str]],
        spare_bytes: int,
        draw_generation: Callable[[], int],
        list_segment: Callable[[Segment], Awaitable[None]],
        on_ready: Callable[[], None],
        on_warning: Callable[[str], None],
        health: StorageHealth,
    ) -> None:
        """Take what is known from the restart; nothing happens before `begin`.

        Args:
            home: the directory of the reserve.
            reserve_bytes: the size of the reserve that is there; 0 for none.
            spares: directory and name of the spare files, of `spare_bytes` each.
            list_segment: writes the checkpoint that lists a segment that is about to be used.
            on_ready: a segment is ready to be taken, or it is known now that there will be none.
            on_warning: is told when space gets tight, once each time.
        """
        self._disk = disk
        self._directories = directories
        self._home = home
        self._segments = segments
        self.segment_bytes = segment_bytes
        self._limits = limits
        self._spares = spares
        self._spare_bytes = spare_bytes
        self._draw_generation = draw_generation
        self._list_segment = list_segment
        self._on_ready = on_ready
        self._on_warning = on_warning
        self._health = health
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_warned = False
        self.next_id = next_id
        self._reserve_bytes = reserve_bytes
        self.is_full = False  # there is no space for another segment
        self.is_low = False  # there is, but it is not for ordinary adds
        self.ready: Segment | None = None

    @property
    def has_reserve(self) -> bool:
        """Return whether the reserve is there."""
        return self._reserve_bytes > 0

    @property
    def is_preparing(self) -> bool:
        """Return whether a segment may be ready soon."""
        return self._task is not None

    @property
    def aside_bytes(self) -> int:
        """Return the room for groups that is set aside already, beside the current segment's."""
        ready = self.ready.header.capacity if self.ready is not None else 0
        return max(0, ready - form.DATA_OFFSET) + max(0, self._reserve_bytes - form.DATA_OFFSET)

    def begin(self) -> None:
        """Prepare the next segment unless there is one, or one is under way; and look after the space."""
        if self._is_closed:
            return
        self._arm_timer()
        if self.ready is None:
            self._run(self._prepare)

    async def first_segment(
        self, bytes_min: int, used: Sequence[tuple[str, int]], unlisted: Sequence[str]
    ) -> Segment:
        """Return the segment to start with: an ordinary one, or the reserve where there is no space.

        Where there is no reserve either, since it was used and no space came back before the process ended,
        a spare file is taken. Or files that nobody needs are removed, those that were replayed are cut, and
        what that gives makes a segment, a small one perhaps.

        Args:
            bytes_min: the least capacity that it must have.
            used: files, and behind where there is nothing in them that counts or proves that something does.
            unlisted: files that are of no use, whatever happens.

        Raises:
            DiskFullError: there is no room for that much.
        """
        try:
            await self._prepare()
        except DiskFullError:
            self._set(is_full=True)
            if self.has_reserve:
                await self._prepare_reserve()
            elif self._spares and self._spare_bytes >= bytes_min:
                self._set_ready(await self._reuse_spare())  # not listed, like the reserve
            else:
                await remove_files(self._disk, unlisted)
                await self._cut(used)
                await self._prepare_small(bytes_min)
            self._arm_timer()
        segment, self.ready = self.ready, None
        assert segment is not None
        return segment

    async def _cut(self, used: Sequence[tuple[str, int]]) -> None:
        for path, end in used:
            file = await self._disk.open(path)
            try:
                if file.size() > end:
                    await file.truncate(end)
            finally:
                file.close()

    async def _prepare_small(self, bytes_min: int) -> None:
        # The larger it is, the more fences it has room for. Not listed, like the reserve.
        capacity = max(self._limits.reserve_bytes, bytes_min)
        while True:
            try:
                segment = await self._create(capacity)
            except DiskFullError:
                if capacity == bytes_min:
                    raise
                capacity = max(capacity // 2, bytes_min)
            else:
                self._set_ready(segment)
                return

    def begin_reserve(self) -> bool:
        """Make the reserve the next segment; False when there is none left."""
        if not self.has_reserve or self._is_closed:
            return False
        self._run(self._prepare_reserve)
        return True

    def take(self) -> Segment | None:
        """Take the segment that is ready, and begin to prepare another."""
        segment, self.ready = self.ready, None
        if segment is not None and not self.is_full:
            self.begin()
        return segment

    def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._guard(work))

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except DiskFullError:
            self._set(is_full=True)
        except Exception as error:
            self._task = None
            self._health.fail(error, "preparing a segment")
            return
        self._task = None
        self._on_ready()

    async def _named(
        self, capacity: int, make: Callable[[form.SegmentHeader], Awaitable[Segment]]
    ) -> Segment:
        """Make a segment under the next id, which no other one ever has.

        One that could not be made may have left a file of that name, or a power cut may bring it back; in
        another directory there would then be a second one.
        """
        try:
            return await make(form.SegmentHeader(self.next_id, self._draw_generation(), capacity))
        except DiskFullError:
            self.next_id += 1
            raise

    def _set_ready(self, segment: Segment) -> None:
        # In one step: a checkpoint that counted the id as used without listing it would drop the segment.
        self.ready = segment
        self.next_id = segment.segment_id + 1

    async def _prepare(self) -> None:
        if not self.has_reserve:
            await self._set_aside()
        segment = await self._make()
        try:
            await self._list_segment(segment)
        except DiskFullError:
            self.next_id += 1
            await give_up_segment(self._disk, segment, keep_as_spare=False)
            raise
        self._set_ready(segment)
        self._set(is_full=False)
        self.look()

    async def _make(self) -> Segment:
        if self._spares and self.segment_bytes == self._spare_bytes:
            return await self._reuse_spare()
        return await self._create(self.segment_bytes)

    async def _reuse_spare(self) -> Segment:
        disk, file_cache = self._disk, self._segments.file_cache
        spare = self._spares.pop(0)
        path = os.path.join(*spare)
        try:
            file = await disk.open(path)
        except DiskFullError:  # There are no descriptors, and it is still there.
            self._spares.insert(0, spare)
            raise
        return await self._named(
            self._spare_bytes, lambda header: reuse_file(disk, file, path, header, file_cache)
        )

    async def _create(self, capacity: int) -> Segment:
        error = DiskFullError("no data directory")
        for directory in self._by_preference():

            def create(header: form.SegmentHeader, directory: str = directory) -> Awaitable[Segment]:
                return create_segment(self._disk, directory, header, self._segments.file_cache)

            try:
                return await self._named(capacity, create)
            except DiskFullError as full:
                error = full
        raise error

    def _by_preference(self) -> list[str]:
        """Return the directories, first those with most space, and among equals those with fewest
        segments."""
        if len(self._directories) == 1:
            return list(self._directories)
        counts = dict.fromkeys(self._directories, 0)
        for segment in self._segments.by_id.values():
            counts[segment.directory] += 1
        space = {one: self._disk.space(one).free // _GIB for one in self._directories}
        return sorted(self._directories, key=lambda one: (-space[one], counts[one]))

    async def _prepare_reserve(self) -> None:
        # Not listed in the checkpoint, which might need space: a restart adopts a segment of a new id.
        disk, file_cache, path = (
            self._disk,
            self._segments.file_cache,
            os.path.join(self._home, names.RESERVE),
        )
        # Where there are no descriptors, what waits for it is refused, and it is set aside anew.
        capacity, self._reserve_bytes = self._reserve_bytes, 0
        file = await disk.open(path)
        segment = await self._named(capacity, lambda header: reuse_file(disk, file, path, header, file_cache))
        segment.is_reused = False
        self._set_ready(segment)

    async def _set_aside(self) -> None:
        size = self._limits.reserve_bytes
        await self.make_room(self._home, lambda: create_reserve(self._disk, self._home, size))
        self._reserve_bytes = size

    # --- spare files ---

    async def make_room(self, directory: str, write: Callable[[], Awaitable[_T]]) -> _T:
        """Have something written, at the cost of spare files where there is no space.

        Raises:
            DiskFullError: there is none, and no spare file in that directory.
        """
        while True:
            try:
                return await write()
            except DiskFullError as error:
                spare = next((one for one in self._spares if one[0] == directory), None)
                if spare is None or not error.is_of_space:
                    raise
                self._spares.remove(spare)
                await remove_files(self._disk, [os.path.join(*spare)])

    def wants_spare(self, size: int) -> bool:
        """Return whether a file of that size is to be kept: not while space for anything else is missing."""
        if self.is_full or not self.has_reserve:
            return False
        kept = len(self._spares) * self._spare_bytes
        return size == self._spare_bytes and kept + size <= self._limits.spare_bytes_max

    def add_spare(self, directory: str, name: str) -> None:
        """Keep a file that was a segment."""
        self._spares.append((directory, name))
        if self.is_low:
            self.look()

    # --- how much is left ---

    def look(self) -> None:
        """Look at the free space, and say what follows from it."""
        limits, is_low, is_tight, most = self._limits, True, True, 0
        for directory in self._directories:
            free, total = self._disk.space(directory)
            most = max(most, free)
            is_tight &= free < min(limits.warn_free_bytes, total * limits.warn_free_share)
            is_low &= free < min(limits.floor_free_bytes, total * limits.floor_free_share)
        if is_tight and not self._is_warned:
            self._on_warning(f"{most:,} bytes are free on the disk; the bookie will be read-only soon")
        self._is_warned = is_tight
        # A spare file takes no space: with one at hand, writing goes on.
        self._set(is_low=is_low and not self._spares)

    def _set(self, *, is_full: bool | None = None, is_low: bool | None = None) -> None:
        self.is_full = self.is_full if is_full is None else is_full
        self.is_low = self.is_low if is_low is None else is_low
        self._health.set_room(not self.is_full and not self.is_low)

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "has_reserve": self.has_reserve,
            "spare_files": len(self._spares),
            "is_full": self.is_full,
            "is_low": self.is_low,
            "is_tight": self._is_warned,
        }

    def _arm_timer(self) -> None:
        if not self._is_closed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.retry_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._arm_timer()
        try:
            self.look()
        except StorageError as error:
            self._health.fail(error, "looking at the space")
            return
        if self._task is None:
            if self.ready is None:
                self.begin()
            else:
                self._on_ready()  # one of several directories may have got space

    async def close(self) -> None:
        """Wait for what is under way, and stop."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.wait([self._task])
