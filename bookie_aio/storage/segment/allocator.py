"""Space: the next segment ahead of time, spare files, the reserve, and a full disk (rule 2).

Owns the prepared segment, the spare files, the reserve, the ids of segments to come, and the directory of
each new segment. Decides whether there is room for ordinary adds. Does not own a segment once it was taken.
Does not own the checkpoint, but asks for one: a segment must be listed there before its first group.

Running out of space is not a failure:

- Below a *floor* of free space ordinary adds are refused. Segments are still prepared, for fences, recovery
  adds and compaction.
- Without space for another segment, accepted records still fit into the current one. Fences and recovery adds
  go on into the reserve.

The free space is looked at again every few seconds. Any other error stops the engine (fail-stop).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bookie_aio.storage.disk.disk import remove_files
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.files import (
    create_reserve,
    create_segment,
    cut_file,
    give_up_segment,
    reuse_file,
    settle_name,
)
from metadata.errors import CorruptRecordError, DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet
    from bookie_aio.storage.segment.witness import WitnessFiles

_T = TypeVar("_T")
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """How much space is kept in reserve, and below which free space the bookie warns or is read-only.

    Each of the two limits is a number of bytes or a part of the file system, whichever is less. So a small
    disk is not read-only from the start, and a large disk with much space left is not read-only either.
    """

    reserve_bytes: int = 32 * 1024 * 1024
    spare_bytes_max: int = 2 * _GIB
    warn_free_bytes: int = 8 * _GIB
    warn_free_share: float = 0.10
    floor_free_bytes: int = 2 * _GIB
    floor_free_share: float = 0.05
    retry_s: float = 5.0


def space_of(disk: Disk, directories: Sequence[str], limits: SpaceLimits) -> tuple[int, int, bool]:
    """Return the free and the total bytes of all directories, and whether each of them is nearly full.

    Raises:
        StorageError: the file system does not say.
    """
    found = [disk.space(one) for one in directories]
    is_tight = all(
        free < min(limits.warn_free_bytes, total * limits.warn_free_share) for free, total in found
    )
    return sum(free for free, _ in found), sum(total for _, total in found), is_tight


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
        witness: WitnessFiles,
        health: StorageHealth,
    ) -> None:
        """Take the state that crash recovery found; nothing happens before `first_segment` or `begin`.

        Args:
            disk: where the directories are.
            directories: where segments may be created.
            home: the directory of the reserve.
            segments: the engine's segments, to spread new ones over the directories.
            segment_bytes: the capacity of new segments.
            limits: see `SpaceLimits`.
            next_id: the lowest id that no segment ever had.
            reserve_bytes: the size of the existing reserve; 0 for none.
            spares: directory and name of the spare files.
            spare_bytes: the size of each spare file.
            draw_generation: returns a random number of 64 bits.
            list_segment: writes the checkpoint that lists a segment that is about to be used.
            on_ready: called when a segment is ready to be taken, or when there will be none for now.
            on_warning: called with a text when space gets tight, once each time, or descriptors run out.
            witness: knows the bookie and the newest checkpoint, which each header names.
            health: is told of failures, and of the room for ordinary adds.
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
        self._witness = witness
        self._health = health
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_warned = False
        self.next_id = next_id
        self._reserve_bytes = reserve_bytes
        self.is_full = False  # there is no space for another segment, not even for fences
        self.is_low = False  # below the floor: no ordinary adds
        self.ready: Segment | None = None

    @property
    def has_reserve(self) -> bool:
        """Return whether there is a reserve."""
        return self._reserve_bytes > 0

    @property
    def is_preparing(self) -> bool:
        """Return whether the preparation of a segment is under way."""
        return self._task is not None

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes for groups in the prepared segment and the reserve."""
        ready = self.ready.header.capacity if self.ready is not None else 0
        return max(0, ready - form.DATA_OFFSET) + max(0, self._reserve_bytes - form.DATA_OFFSET)

    def begin(self) -> None:
        """Prepare the next segment unless one is ready or under way; look at the space every few seconds."""
        if self._is_closed:
            return
        self._arm_timer()
        if self.ready is None:
            self._run(self._prepare)

    async def first_segment(
        self, bytes_min: int, used: Sequence[tuple[str, int]], unlisted: Sequence[str]
    ) -> Segment:
        """Return the segment to start with.

        The first of these is taken that there is space for: an ordinary segment, the reserve, a spare file, a
        new and perhaps small segment. For the last, files of no use are removed, and replayed files are cut.
        There may be no reserve if the last run used it, and ended before any space was freed.

        Args:
            bytes_min: the least capacity of the segment.
            used: replayed files, and the offset behind which nothing counts, or proves that something does.
            unlisted: files that are of no use to any start.

        Raises:
            DiskFullError: there is no room for `bytes_min`.
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
                    header = form.parse_segment_header(await file.read(0, form.DATA_OFFSET))
                    await cut_file(file, header, end)
            except (CorruptRecordError, DiskFullError):
                continue  # a header that fails is not replaced, and one that has no room stays
            finally:
                file.close()

    async def _prepare_small(self, bytes_min: int) -> None:
        # A larger one has room for more fences. Not listed, like the reserve.
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
        """Make the reserve the next segment; False when there is no reserve left."""
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
            self._health.watch(self._task, "the preparation of a segment")

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except DiskFullError as error:
            if not error.is_of_space:  # else the operator looks for a full disk
                self._on_warning(f"no segment can be prepared: {error}")
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
        """Make a segment under the next id, which is never used again, not even after a failure.

        A segment that could not be made may have left a file of its name, or a power cut may bring that file
        back. The same id in another directory would then name two files.
        """
        witness = self._witness
        try:
            return await make(
                form.SegmentHeader(
                    self.next_id, self._draw_generation(), capacity, witness.owner, witness.checkpoint
                )
            )
        except DiskFullError:
            self.next_id += 1
            raise

    def _set_ready(self, segment: Segment) -> None:
        # In one step: by a checkpoint with the next id and without the segment, a start would drop it.
        self.ready = segment
        self.next_id = segment.segment_id + 1

    async def _prepare(self) -> None:
        if not self.has_reserve:
            await self._create_reserve()
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

        async def reuse(header: form.SegmentHeader) -> Segment:
            try:
                segment = await reuse_file(disk, file, path, header, file_cache)
            except DiskFullError:  # The spare file is still there.
                self._spares.insert(0, spare)
                raise
            return await settle_name(disk, segment)

        try:
            file = await disk.open(path)
        except DiskFullError:  # No file descriptors; the spare file is still there.
            self._spares.insert(0, spare)
            raise
        return await self._named(self._spare_bytes, reuse)

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
        """Return the directories, those with most free space first.

        Among equals (in GiB) those with fewest segments come first.
        """
        if len(self._directories) == 1:
            return list(self._directories)
        counts = dict.fromkeys(self._directories, 0)
        for segment in self._segments.by_id.values():
            counts[segment.directory] += 1
        space = {one: self._disk.space(one).free // _GIB for one in self._directories}
        return sorted(self._directories, key=lambda one: (-space[one], counts[one]))

    async def _prepare_reserve(self) -> None:
        # Not listed in the checkpoint, which might need space: a start adopts a segment of a new id.
        disk, file_cache, path = (
            self._disk,
            self._segments.file_cache,
            os.path.join(self._home, form.RESERVE),
        )
        # If `open` fails for lack of file descriptors, the waiting records are refused, and a new reserve is
        # made later.
        capacity, self._reserve_bytes = self._reserve_bytes, 0
        file = await disk.open(path)

        async def reuse(header: form.SegmentHeader) -> Segment:
            return await settle_name(disk, await reuse_file(disk, file, path, header, file_cache))

        segment = await self._named(capacity, reuse)
        segment.is_reused = False
        self._set_ready(segment)

    async def _create_reserve(self) -> None:
        size = self._limits.reserve_bytes
        await self.make_room(self._home, lambda: create_reserve(self._disk, self._home, size))
        self._reserve_bytes = size

    # --- spare files ---

    async def make_room(self, directory: str, write: Callable[[], Awaitable[_T]]) -> _T:
        """Call `write`; without space, remove spare files of that directory and call it again.

        Raises:
            DiskFullError: no space, and no spare file in that directory.
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
        """Return whether a file of that size is to be kept as a spare one. None is while space is missing."""
        if self.is_full or not self.has_reserve:
            return False
        kept = len(self._spares) * self._spare_bytes
        return size == self._spare_bytes and kept + size <= self._limits.spare_bytes_max

    def add_spare(self, directory: str, name: str) -> None:
        """Keep a file that was a segment, for a segment to come."""
        self._spares.append((directory, name))
        if self.is_low:
            self.look()

    # --- free space ---

    def look(self) -> None:
        """Look at the free space: warn if it is tight, and set whether there is room for ordinary adds."""
        limits, is_low, is_tight, most = self._limits, True, True, 0
        for directory in self._directories:
            free, total = self._disk.space(directory)
            most = max(most, free)
            is_tight &= free < min(limits.warn_free_bytes, total * limits.warn_free_share)
            is_low &= free < min(limits.floor_free_bytes, total * limits.floor_free_share)
        if is_tight and not self._is_warned:
            self._on_warning(f"{most:,} bytes are free on the disk; the bookie will be read-only soon")
        self._is_warned = is_tight
        # With a spare file adds go on: it takes no space to make it a segment.
        self._set(is_low=is_low and not self._spares)

    def _set(self, *, is_full: bool | None = None, is_low: bool | None = None) -> None:
        self.is_full = self.is_full if is_full is None else is_full
        self.is_low = self.is_low if is_low is None else is_low
        self._health.set_room(not self.is_full and not self.is_low)

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "has_reserve": self.has_reserve,
            "reserve_bytes": self._reserve_bytes,
            "spare_files": len(self._spares),
            "spare_bytes": len(self._spares) * self._spare_bytes,
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
                self._on_ready()  # retry the sealing: one of several directories may have got space

    async def close(self) -> None:
        """Wait for the preparation under way, and let no other begin."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.wait([self._task])
