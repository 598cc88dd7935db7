"""Lookup: the segments that a read looks into, and the consequences of the damage that it finds there.

Owns the choice of segments, and the mark of a ledger whose bytes fail (rule 4). The mark counts from its
acceptance on, and is durable before the answer leaves. Does not own the reading itself (`reader`), nor the
rebuilding of an index (a callable that the engine hands over).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from bookie_aio.storage.read.reader import DamagedBlockError, Reader, ReadResult, UnreadBlockError, list_runs
from bookie_aio.storage.segment.segment_set import DamagedIndexError, SegmentGoneError
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFailedError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.storage.journal import Done
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates
    from bookie_aio.storage.read.reader import ListedRun
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet, Source
    from metadata.errors import StorageError


class DamageMarker(Protocol):
    """The engine, as `Lookup` sees it."""

    @property
    def is_closed(self) -> bool:
        """Return whether nothing can be marked any more."""

    def is_in_doubt(self, ledger_id: int) -> bool:
        """Return whether entries of the ledger may have been lost that nothing lists."""

    def append_mark(self, ledger_id: int, done: Done, *, is_of_listed: bool = False) -> None:
        """Accept a mark."""

    def barrier(self, done: Done) -> None:
        """Call `done` when everything accepted is durable."""


class Lookup:
    """The reads and listings of one engine."""

    def __init__(
        self,
        damage_marker: DamageMarker,
        ledgers: LedgerStates,
        segments: SegmentSet,
        rebuild_index: Callable[[Segment], Awaitable[bool]],
    ) -> None:
        """Share the engine's ledgers and segments.

        Args:
            rebuild_index: rebuilds the index of a sealed segment; False if the disk fails to read the
                segment, and nothing was changed.
        """
        self._damage_marker = damage_marker
        self._ledgers = ledgers
        self._segments = segments
        self._rebuild_index = rebuild_index
        self._on_their_way: set[int] = set()  # ledgers whose mark is not durable yet
        self.damaged_blocks = self.unread_blocks = 0

    async def sources(self, ledger_id: int, low: int, high: int) -> list[Source]:
        """Return where entries of the ledger from `low` to `high` may lie.

        Raises:
            DamagedIndexError: rebuild the index, and call again.
        """
        state = self._ledgers.get(ledger_id)
        if state is None:  # never heard of, or deleted: indexes may still list it
            return []
        return await self._segments.find(ledger_id, state.since, low, high)

    async def read(self, ledger_id: int, content_term: int, entry_ids: range, bytes_max: int) -> ReadResult:
        """Read as `Engine.read` says."""
        state = self._ledgers.get(ledger_id)
        if state is not None and entry_ids and entry_ids[0] < state.first:
            return ReadResult([], Stop.NO_SUCH_ENTRY, entry_ids[0])  # trimmed, damaged or not
        rebuilt: set[int] = set()
        while True:
            low, high = (entry_ids[0], entry_ids[-1]) if entry_ids else (0, -1)
            was_in_doubt = self._damage_marker.is_in_doubt(ledger_id)
            try:
                sources = await self.sources(ledger_id, low, high)
                reader = Reader(ledger_id, sources, content_term, bytes_max)
                found = await reader.read(entry_ids)
                if reader.is_cold and found.stop is Stop.BUDGET:
                    # A scan that reads from the device: the blocks of its next read are fetched ahead.
                    for segment, ranges in reader.ahead():
                        await segment.will_need(ranges)
                # A mark may be made, or lifted, while the disk is read. Neither then is an entry denied.
                is_doubted = was_in_doubt or self._damage_marker.is_in_doubt(ledger_id)
                if found.stop is Stop.NO_SUCH_ENTRY and is_doubted:
                    return found._replace(stop=Stop.UNKNOWN)
                return found
            except SegmentGoneError:
                continue
            except DamagedIndexError as error:
                if not await self._rebuild(error, rebuilt):
                    return ReadResult([], Stop.UNKNOWN, low)
            except DamagedBlockError as error:
                if self._damage_marker.is_closed:
                    raise
                await self.mark(ledger_id, error)
                return reader.unknown()
            except UnreadBlockError:
                self.unread_blocks += 1
                return reader.unknown()  # not lost: an entry that the index lists is never denied

    async def list_entries(
        self, ledger_id: int, from_entry: int, to_entry: int, rows_max: int
    ) -> tuple[list[ListedRun], int]:
        """List as `Engine.list_entries` says."""
        rebuilt: set[int] = set()
        while True:
            state = self._ledgers.get(ledger_id)
            last = state.last_entry if state is not None else -1
            from_entry = max(from_entry, state.first if state is not None else 0)
            try:
                sources = await self.sources(ledger_id, from_entry, min(last, to_entry))
                return await list_runs(sources, from_entry, to_entry, rows_max)
            except SegmentGoneError:
                continue
            except DamagedIndexError as error:
                if not await self._rebuild(error, rebuilt):
                    raise DiskFailedError(
                        f"what is stored of ledger {ledger_id} cannot be read: {error}"
                    ) from error

    async def _rebuild(self, error: DamagedIndexError, rebuilt: set[int]) -> bool:
        """Rebuild an index, once per read; False if it was, or if the disk fails to read its segment."""
        segment_id = error.segment.segment_id
        if segment_id in rebuilt:
            return False
        rebuilt.add(segment_id)
        return await self._rebuild_index(error.segment)

    async def mark(self, ledger_id: int, cause: Exception) -> None:
        """Mark a ledger of which a listed block is damaged, and wait until the mark is durable (rule 4).

        Without space for the mark the ledger counts as damaged until the next start, and in the next
        checkpoint as in doubt. Cancelled, the mark is still written.
        """
        if self._ledgers.is_deleted(ledger_id):
            return
        needs_mark = self._ledgers.needs_mark(ledger_id)
        if not needs_mark and ledger_id not in self._on_their_way:
            return
        self.damaged_blocks += 1
        self._on_their_way.add(ledger_id)
        durable: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()

        def done(error: StorageError | None) -> None:
            self._on_their_way.discard(ledger_id)
            if not durable.done():  # cancelled, with the connection of the reader
                durable.set_result(error)

        try:
            if needs_mark:
                self._damage_marker.append_mark(ledger_id, done, is_of_listed=True)
            else:
                self._damage_marker.barrier(done)
        except DiskFullError:
            self._on_their_way.discard(ledger_id)
            return
        error = await durable
        if error is not None:
            raise error from cause
