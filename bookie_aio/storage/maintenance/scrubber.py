"""Scrubbing: sealed segments are read again and again, so that damage is found before the data is needed.

Owns the order and the pace. A ledger with a damaged block that still counts is marked (rule 4), as if a read
had found the damage. A damaged index is rebuilt. Repair is the client's side's work, which sees the marks.

The groups are read in the order of the file. Where the head of a group fails, the blocks behind it are found
through the index, and checked by their own checksums. So a damaged head alone loses nothing once its segment
is sealed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie_aio.storage.background_task import BackgroundTask
from bookie_aio.storage.read.reader import (
    RUNS_AT_ONCE,
    DamagedBlockError,
    StoredCopy,
    UnreadBlockError,
    gather,
    newest_copies,
    read_block,
    read_part,
)
from bookie_aio.storage.segment.format import KIND_BLOCK
from bookie_aio.storage.segment.replay import Gap, walk_groups
from bookie_aio.storage.segment.segment import UnreadIndexError
from bookie_aio.storage.segment.segment_set import SegmentGoneError
from bookie_aio.wire.listing import index_from
from metadata.errors import CorruptRecordError, DiskFailedError, DiskFullError
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates
    from bookie_aio.storage.read.lookup import Lookup
    from bookie_aio.storage.segment.index import Run
    from bookie_aio.storage.segment.segment import SealedIndex, Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet

_STEP_BYTES = 256 * 1024
RUNS_MAX = 1 << 40
"""More than any ledger has."""


@dataclass(frozen=True, slots=True)
class ScrubConfig:
    """How fast segments are scrubbed, and how often; 0 bytes a second: never."""

    bytes_per_s: int = 8 * 1024 * 1024
    interval_s: float = 24 * 3600.0
    """From the end of one pass to the begin of the next, and before the first pass."""


class Scrubber:
    """Scrubs the segments of one engine."""

    def __init__(
        self,
        config: ScrubConfig,
        ledgers: LedgerStates,
        segments: SegmentSet,
        lookup: Lookup,
        rebuild_index: Callable[[Segment], Awaitable[bool]],
        health: StorageHealth,
    ) -> None:
        """Share the engine's parts."""
        self._config = config
        self._ledgers = ledgers
        self._segments = segments
        self._lookup = lookup
        self._rebuild_index = rebuild_index
        self._background = BackgroundTask(self._work, health)
        self._owed_bytes = 0
        self.passes = 0
        self.bytes_read = 0
        self.damaged = 0
        self.unread = 0  # blocks and files that the disk failed to read
        self.close = self._background.close

    def start(self) -> None:
        """Start the background task, which waits `interval_s` before the first pass."""
        if self._config.bytes_per_s > 0:
            self._background.start()

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "passes": self.passes,
            "bytes": self.bytes_read,
            "damaged": self.damaged,
            "unread": self.unread,
        }

    async def _work(self) -> None:
        while True:
            await self._background.pause(self._config.interval_s)
            await self.scrub()

    async def scrub(self) -> None:
        """Read all sealed segments once."""
        for segment in self._segments.sealed():
            try:
                await self._scrub_segment(segment)
            except (CorruptRecordError, DiskFullError):
                # The segment was given up, its index failed, or there was no room for the mark or the file's
                # descriptor: the next pass tries again.
                continue
        self.passes += 1

    async def _scrub_segment(self, segment: Segment) -> None:
        if segment.is_gone or segment.sealed is None:
            return
        try:
            await segment.sealed.check()
        except UnreadIndexError:
            self.unread += 1
            return
        except CorruptRecordError:
            if not segment.is_gone:
                self.damaged += 1
                await self._rebuild_index(segment)
            return  # rebuilding the index has read the whole segment
        gaps: list[Gap] = []  # where no group could be read, and where a block failed
        try:
            file = await segment.file_cache.borrow(segment.path)
        except FileNotFoundError:
            gaps.append(Gap(0, segment.end))
        except DiskFailedError:
            self.unread += 1
            return
        else:
            try:
                async for group in walk_groups(file, segment.header, segment.end):
                    if isinstance(group, Gap):
                        gaps.append(group)
                        continue
                    for number in sorted(group.damaged):
                        if group.rows[number].kind == KIND_BLOCK:
                            at = group.offsets[number]
                            gaps.append(Gap(at, at + 1))
                    await self._keep_pace(segment, group.header.total_bytes)
            finally:
                segment.file_cache.give_back(segment.path)
        # Not while the file is borrowed: that would be a deadlock. A mark may wait for the next segment, the
        # segment for the checkpoint, and the checkpoint for the giving up of this segment, which waits for
        # its readers.
        if gaps:
            await self._check_blocks(segment, gaps)

    async def _check_blocks(self, segment: Segment, gaps: list[Gap]) -> None:
        """Check the blocks in gaps one by one; the gaps come by offset."""
        if segment.sealed is None:
            return
        async with aclosing(blocks_in_gaps(segment, segment.sealed, gaps)) as blocks:
            async for ledger_id, run in blocks:
                found = StoredCopy(run.content_term, segment.segment_id, run.offset, run, segment)
                try:
                    await self._check(ledger_id, found)
                except DamagedBlockError:
                    await self._lose(segment, ledger_id, run.last)
                except UnreadBlockError:
                    self.unread += 1
                await self._keep_pace(segment, run.head_bytes + run.payload_bytes)

    async def _check(self, ledger_id: int, found: StoredCopy) -> None:
        """Check the entries of a block that still count: a repair has stored newer copies of others."""
        try:
            await read_block(found, ledger_id)
        except DamagedBlockError:
            state = self._ledgers.get(ledger_id)
            low, last = max(found.run.first, 0 if state is None else state.first), found.run.last
            while low <= last:
                sources = await self._lookup.sources(ledger_id, low, last)
                copies, horizon = await gather(sources, low, last, RUNS_AT_ONCE)
                for newest in newest_copies(found, copies, horizon):
                    if entry_ids := newest[index_from(newest, low) :]:
                        await read_part(found, ledger_id, entry_ids)
                low = horizon + 1

    async def _lose(self, segment: Segment, ledger_id: int, last: int) -> None:
        """Mark a ledger with a damaged block that ends at the entry `last`, if the block still counts."""
        state = self._ledgers.get(ledger_id)
        if state is None or state.since > segment.segment_id or last < state.first:
            return  # deleted, forgotten or trimmed
        if not self._ledgers.needs_mark(ledger_id):
            return
        self.damaged += 1
        error = DiskFailedError(f"the scrubber found damage in segment {segment.segment_id}")
        await self._lookup.mark(ledger_id, error)

    async def _keep_pace(self, segment: Segment, size: int) -> None:
        self.bytes_read += size
        self._owed_bytes += size
        if self._owed_bytes >= _STEP_BYTES:
            owed, self._owed_bytes = self._owed_bytes, 0
            await self._background.pause(owed / self._config.bytes_per_s)
        else:
            await asyncio.sleep(0)
        if segment.is_gone:
            raise SegmentGoneError(f"segment {segment.segment_id} was given up")


async def blocks_in_gaps(
    segment: Segment, sealed: SealedIndex, gaps: Sequence[Gap]
) -> AsyncGenerator[tuple[int, Run], None]:
    """Yield the ledgers and runs of the blocks that begin in a gap, as the segment's index lists them.

    Ends early if the index is rebuilt meanwhile: then the whole segment has been read.

    Args:
        gaps: ascending.

    Raises:
        CorruptRecordError: the index is damaged.
    """
    starts = [gap.start for gap in gaps]
    for row in await sealed.ledgers():
        where = (row.run_start, row.run_count, row.widest)
        runs = await sealed.overlapping(*where, 0, ENTRY_ID_MAX, RUNS_MAX)
        if segment.sealed is not sealed:
            return
        for run in runs:
            at = bisect_right(starts, run.offset) - 1
            if at >= 0 and run.offset < gaps[at].end:
                yield row.ledger_id, run
        await asyncio.sleep(0)
