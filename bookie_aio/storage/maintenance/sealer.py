"""Sealing segments in the background, and rebuilding the indexes of sealed ones.

`SegmentSealer` owns the segments that wait to be sealed, and the tasks that seal them. `IndexRebuilder` owns
the decision whether a damaged index may be rebuilt, and the segment that it rebuilds waits to be sealed
again. Both keep the orders that `ledgers.checkpointer` lists, and work under its `list_lock`.

A lack of space is no failure here: the index stays in memory, and sealing is tried again when there is space.
One full directory holds up no other directory. The end of an unsealed segment is known from the segment
written after it, which may be sealed or given up first. So the checkpoint lists the end of each segment as
soon as nothing more is written to that segment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from bookie_aio.storage.disk.disk import remove_files
from bookie_aio.storage.ledgers.marks import NO_LEDGER
from bookie_aio.storage.segment.files import give_up_segment, settle_segment, write_index
from bookie_aio.storage.segment.format import DATA_OFFSET
from bookie_aio.storage.segment.replay import Replayed, replay_segment
from bookie_aio.storage.segment.segment import SegmentRow, UnreadIndexError
from metadata.errors import CorruptRecordError, DiskFailedError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.ledgers.checkpointer import Checkpointer
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates
    from bookie_aio.storage.segment.allocator import SegmentAllocator
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet
    from bookie_aio.wire.blocks import LacStatement

_UNREAD_PAUSE_S = 5.0
"""Between two tries to rebuild an index from a segment that the disk fails to read."""


class SegmentSealer:
    """Seals the segments of one engine that are no longer written to."""

    def __init__(
        self,
        disk: Disk,
        segments: SegmentSet,
        ledgers: LedgerStates,
        allocator: SegmentAllocator,
        checkpointer: Checkpointer,
        health: StorageHealth,
        *,
        page_cache_bytes: int,
        on_sealed: Callable[[], None],
    ) -> None:
        """Share the engine's parts.

        Args:
            page_cache_bytes: `StorageConfig.page_cache_bytes`.
            on_sealed: called after each run of `seal_all` that ended well, or that lacked space for some.
        """
        self._disk = disk
        self._segments = segments
        self._ledgers = ledgers
        self._allocator = allocator
        self._checkpointer = checkpointer
        self._health = health
        self._page_cache_bytes = page_cache_bytes
        self._on_sealed = on_sealed
        self._recent: deque[Segment] = deque()  # sealed last, and left in the page cache
        self._recent_bytes = 0
        self._unsealed: list[Segment] = []
        self._useless: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def retry(self) -> None:
        """Try again what failed for lack of space."""
        if (self._unsealed or self._useless) and not self._allocator.is_full and not self._tasks:
            self.start(self.seal_guarded())

    def seal(self, *segments: Segment) -> None:
        """Seal segments to which nothing more is written, in the background."""
        self.add_unsealed(*segments)
        self.start(self.seal_guarded())

    def add_unsealed(self, *segments: Segment) -> None:
        """Add segments that the next `seal_all` seals."""
        for segment in segments:
            segment.checkpoint_row = segment.checkpoint_row or SegmentRow(
                segment.segment_id, segment.header.generation, segment.end
            )
        self._unsealed += segments

    def clean_up(self, segments: list[Segment], useless: list[str]) -> None:
        """Seal the segments that crash recovery replayed, and remove files that are of no use any more."""
        self._useless = useless
        self.seal(*segments)

    def start(self, work: Coroutine[None, None, Any]) -> asyncio.Task[Any]:
        """Start a task that `close` waits for, and that `retry` does not interfere with."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def seal_guarded(self) -> None:
        """Call `seal_all`; a lack of space is left for later, and any other error stops the engine."""
        try:
            await self.seal_all()
        except DiskFullError:
            return
        except Exception as error:
            self._health.fail(error, "sealing segments")

    async def seal_all(self) -> None:
        """Seal every segment that waits for it, and write the checkpoint.

        Raises:
            DiskFullError: no space for the checkpoint, and nothing was done; or none for some of the
                indexes, and everything else was done.
        """
        full: dict[str, DiskFullError] = {}
        async with self._checkpointer.list_lock:
            if not self._unsealed:
                await self._checkpointer.write_locked()
            while segment := next((one for one in self._unsealed if one.directory not in full), None):
                error = await self._seal(segment)
                if error is not None:
                    full[segment.directory] = error
                    continue
                self._unsealed.remove(segment)
                await self._release_pages(segment)
            await remove_files(self._disk, self._useless)
            self._useless = []
        self._on_sealed()
        if full:
            raise next(iter(full.values()))

    async def _seal(self, segment: Segment) -> DiskFullError | None:
        # The segment is cut first, which frees space. The checkpoint is written before the index: with an
        # index the segment is not replayed, and its fences must be in the checkpoint by then.
        error = await self._settle(segment)
        await self._checkpointer.write_locked()
        if error is not None:
            return error
        assert segment.index is not None
        ledgers = segment.index.ledgers
        for ledger_id in [one for one in ledgers if not self._counts(one, segment.segment_id)]:
            del ledgers[ledger_id]
        write = partial(write_index, self._disk, segment, self._checkpointer.number, self._statement)
        try:
            row = await self._allocator.make_room(segment.directory, write)
        except DiskFullError as full:
            return full
        await self._segments.renew_index(segment)
        self._segments.seal(segment, row)
        return None

    async def _settle(self, segment: Segment) -> DiskFullError | None:
        if segment.file is not None:
            try:
                await settle_segment(segment)
            except DiskFullError as error:
                return error
        return None

    async def _release_pages(self, latest: Segment) -> None:
        """Leave the segments sealed last in the page cache, and have the system drop the pages of older ones.

        The system keeps all pages while there is memory, and takes another page for each page that is
        written. A page that was never used before costs more than the whole write beside it; a page that
        was just dropped costs little.
        """
        self._recent.append(latest)
        self._recent_bytes += latest.end
        while self._recent_bytes > self._page_cache_bytes:
            segment = self._recent.popleft()
            self._recent_bytes -= segment.end
            await segment.will_not_need()

    def _counts(self, ledger_id: int, segment_id: int) -> bool:
        state = self._ledgers.get(ledger_id)
        return state is not None and state.since <= segment_id

    def _statement(self, ledger_id: int) -> LacStatement | None:
        state = self._ledgers.get(ledger_id)
        return None if state is None else state.statement

    async def close(self) -> None:
        """Wait for the tasks under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, current: Segment) -> None:
        """Leave everything sealed, so that the next start has nothing to replay."""
        unused: list[Segment] = []
        if current.index is not None and current.end > DATA_OFFSET:
            self.add_unsealed(current)
        else:
            self._segments.remove(current)
            unused.append(current)
        if self._allocator.ready is not None:
            unused.append(self._allocator.ready)
            self._allocator.ready = None
        await self.seal_all()
        for segment in unused:
            keep = self._allocator.wants_spare(segment.file.size() if segment.file is not None else 0)
            await give_up_segment(self._disk, segment, keep_as_spare=keep and segment.is_reused)


class IndexRebuilder:
    """Rebuilds sealed indexes that fail their checksums, from their segments."""

    def __init__(
        self,
        segments: SegmentSet,
        ledgers: LedgerStates,
        checkpointer: Checkpointer,
        sealer: SegmentSealer,
        health: StorageHealth,
    ) -> None:
        """Share the engine's parts."""
        self._segments = segments
        self._ledgers = ledgers
        self._checkpointer = checkpointer
        self._sealer = sealer
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._unread_until: dict[int, float] = {}

    async def rebuild(self, segment: Segment) -> bool:
        """Rebuild the index of a sealed segment, and mark the ledgers that lost data.

        The rebuilding goes on to its end if the caller is cancelled: the caller may be a reader whose
        connection is lost.

        Returns:
            False if the disk fails to read all of the segment: nothing was changed then. An index of the
            readable part alone would hide the unread part for good, and the segment would be given up
            with it.
        """
        task = self._sealer.start(self._rebuild(segment))
        task.add_done_callback(lambda _: self._sealer.retry())  # `retry` does nothing while a task runs
        return bool(await asyncio.shield(task))

    async def _rebuild(self, segment: Segment) -> bool:
        async with self._checkpointer.list_lock:
            if segment.sealed is None or segment.is_gone:
                return True
            if self._unread_until.get(segment.segment_id, 0.0) > self._loop.time():
                return False
            found = await self._replay(segment)
            is_unread = found.unread is not None
            if found.has_damage:
                # An intact index lists blocks of groups whose heads are damaged, which the segment does not.
                # So an intact index is kept, and the disk's failing to read it for a while marks nothing.
                try:
                    await segment.sealed.check()
                except UnreadIndexError:
                    is_unread = True
                except CorruptRecordError:
                    pass
                else:
                    return True
            if is_unread:
                self._unread_until[segment.segment_id] = self._loop.time() + _UNREAD_PAUSE_S
                return False
            self._unread_until.pop(segment.segment_id, None)
            # The checkpoint that the sealing begins with makes these marks durable.
            marks = self._ledgers.marks
            if found.lost_data_of_any_ledger:
                marks.learn_mark(marks.draw(), NO_LEDGER)
                self._health.lose_data_of_any_ledger()
            for ledger_id in found.damage.ledgers:
                if self._ledgers.get(ledger_id) is not None:
                    state = self._ledgers.state(ledger_id)
                    is_in_doubt = found.damage.is_in_doubt(ledger_id, state.statement)
                    state.mark(marks.draw(), is_of_listed=not is_in_doubt)
            await self._segments.unseal(segment, found.index)
            self._sealer.add_unsealed(segment)
        await self._sealer.seal_guarded()
        return True

    async def _replay(self, segment: Segment) -> Replayed:
        try:
            file = await self._segments.file_cache.borrow(segment.path)
        except FileNotFoundError:
            try:
                if segment.sealed is not None:
                    await segment.sealed.check()
            except UnreadIndexError as error:
                return Replayed(unread=DiskFailedError(str(error)))
            except CorruptRecordError:
                return Replayed(lost_data_of_any_ledger=True)  # and its index cannot tell what it held
            return Replayed(unread=DiskFailedError(f"{segment.path} is missing, and its index is whole"))
        except DiskFailedError as error:
            return Replayed(unread=error)
        try:
            return await replay_segment(file, segment.header, proven_end=segment.end, is_last=False)
        finally:
            self._segments.file_cache.give_back(segment.path)
