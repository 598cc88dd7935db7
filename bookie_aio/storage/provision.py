"""Space: the next segment ahead of time, the reserve, and what happens when there is no room (rule 2).

Owns the segment that is prepared and not yet written to, the reserve file, the ids of segments to come, and
whether the bookie is writable. Does not own the segments once they were taken, nor the checkpoint: it asks
for one, since a segment must be listed there before its first group.

Running out of space is not a failure: ordinary adds are refused, what was accepted still fits into the
current segment, fences and recovery adds go on into the reserve, and every few seconds it is tried again.
Any other error is passed on and is the end (fail-stop).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie_aio.storage import format as form
from bookie_aio.storage.segment import Segment, create_reserve, create_segment, remove_segment, take_reserve
from metadata.errors import DiskFailedError, DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.storage.disk import Disk


class Provision:
    """Prepares segments in the background, one at a time."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        segment_bytes: int,
        reserve_bytes: int,
        retry_s: float,
        next_id: int,
        has_reserve: bool,
        draw_generation: Callable[[], int],
        list_segment: Callable[[Segment], Awaitable[None]],
        on_ready: Callable[[], None],
        on_writable: Callable[[bool], None],
        on_failed: Callable[[StorageError], None],
    ) -> None:
        """Take what is known from the restart; nothing happens before `begin`.

        Args:
            list_segment: writes the checkpoint that lists a segment that is about to be used.
            on_ready: a segment is ready to be taken, or it is known now that there will be none.
        """
        self._disk = disk
        self._directory = directory
        self.segment_bytes = segment_bytes
        self._reserve_bytes = reserve_bytes
        self._retry_s = retry_s
        self._draw_generation = draw_generation
        self._list_segment = list_segment
        self._on_ready = on_ready
        self._on_writable = on_writable
        self._on_failed = on_failed
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.next_id = next_id
        self.has_reserve = has_reserve
        self.is_full = False
        self.ready: Segment | None = None

    @property
    def is_preparing(self) -> bool:
        """Tell whether a segment may be ready soon."""
        return self._task is not None

    @property
    def spare_bytes(self) -> int:
        """Give the room for groups that is set aside already, beside the current segment's."""
        ready = self.ready.header.capacity if self.ready is not None else 0
        reserve = self._reserve_bytes if self.has_reserve else 0
        return max(0, ready - form.DATA_OFFSET) + max(0, reserve - form.DATA_OFFSET)

    def begin(self) -> None:
        """Prepare the next segment unless there is one, or one is under way."""
        if self.ready is None and not self._is_closed:
            self._run(self._prepare)

    async def first_segment(self) -> Segment:
        """Give the segment to start with: an ordinary one, or the reserve where there is no space.

        Raises:
            DiskFullError: there is no reserve either.
        """
        try:
            await self._prepare()
        except DiskFullError:
            self._set_full(True)
            if not self.has_reserve:
                raise
            await self._prepare_reserve()
            self._arm_retry()
        segment, self.ready = self.ready, None
        assert segment is not None
        return segment

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
            self._set_full(True)
            self._arm_retry()
        except (StorageError, OSError) as error:
            self._task = None
            self._on_failed(error if isinstance(error, StorageError) else DiskFailedError(str(error)))
            return
        self._task = None
        self._on_ready()

    def _header(self, capacity: int) -> form.SegmentHeader:
        return form.SegmentHeader(self.next_id, self._draw_generation(), capacity)

    def _set_ready(self, segment: Segment) -> None:
        # In one step: a checkpoint that counted the id as used without listing it would drop the segment.
        self.ready = segment
        self.next_id = segment.segment_id + 1

    async def _prepare(self) -> None:
        if not self.has_reserve:
            await create_reserve(self._disk, self._directory, self._reserve_bytes)
            self.has_reserve = True
        segment = await create_segment(self._disk, self._directory, self._header(self.segment_bytes))
        try:
            await self._list_segment(segment)
        except DiskFullError:
            segment.close()
            await remove_segment(self._disk, self._directory, segment.segment_id)
            raise
        self._set_ready(segment)
        self._set_full(False)

    async def _prepare_reserve(self) -> None:
        # Not listed in the checkpoint, which might need space: a restart adopts a segment of a new id.
        self.has_reserve = False
        self._set_ready(await take_reserve(self._disk, self._directory, self._header(self._reserve_bytes)))

    def _set_full(self, is_full: bool) -> None:
        if is_full != self.is_full:
            self.is_full = is_full
            self._on_writable(not is_full)

    def _arm_retry(self) -> None:
        if not self._is_closed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._retry_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        if self._task is not None or self.ready is not None:
            self._arm_retry()
        else:
            self.begin()

    async def close(self) -> None:
        """Wait for what is under way, and stop."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.wait([self._task])
