"""Lookup: in which segments a read looks, and what follows from the damage that it finds there.

Owns the choice of segments, and the mark of a ledger whose bytes fail (rule 4): it counts from the first
moment on, and is durable before the answer leaves. Does not own the reading itself (`reader`), nor the
rebuilding of an index (`tender`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from bookie_aio.storage.reader import DamagedBlockError, DamagedIndexError, Reader, list_runs
from metadata.errors import DiskFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.journal import Done
    from bookie_aio.storage.ledgers import Ledgers
    from bookie_aio.storage.reader import ListedRun, ReadResult
    from bookie_aio.storage.segment import Segment
    from bookie_aio.storage.tender import Tender
    from metadata.errors import StorageError


class Marking(Protocol):
    """What lookup needs of the engine."""

    @property
    def is_closed(self) -> bool:
        """Tell whether nothing can be marked any more."""

    def is_damaged(self, ledger_id: int) -> bool:
        """Tell whether data of the ledger was lost."""

    def append_mark(self, ledger_id: int, done: Done) -> None:
        """Accept a mark."""

    def barrier(self, done: Done) -> None:
        """Call back when everything accepted is durable."""

    def unsealed(self) -> Sequence[Segment]:
        """Give the segments whose entries are found through the index in memory only."""


class Lookup:
    """Reads of one engine."""

    def __init__(
        self, marking: Marking, ledgers: Ledgers, segments: dict[int, Segment], tender: Tender
    ) -> None:
        """Share the engine's ledgers and segments."""
        self._marking = marking
        self._ledgers = ledgers
        self._segments = segments
        self._tender = tender
        self._on_their_way: set[int] = set()  # ledgers whose mark is not durable yet
        self.damaged_blocks = 0

    def segments_of(self, ledger_id: int, low: int, high: int) -> list[Segment]:
        """Give the segments that may hold entries of the ledger from `low` to `high`."""
        state = self._ledgers.get(ledger_id)
        if state is None:  # never heard of, or deleted, whatever the indexes still say
            return []
        places = state.places
        found = [
            self._segments[places[at]]
            for at in range(0, len(places), 3)
            if places[at + 1] <= high and places[at + 2] >= low
        ]
        found += [
            segment
            for segment in self._marking.unsealed()
            if segment.index is not None and ledger_id in segment.index.ledgers
        ]
        return found

    async def read(self, ledger_id: int, content_term: int, entry_ids: range, bytes_max: int) -> ReadResult:
        """Read as `Engine.read` says."""
        while True:
            low, high = (entry_ids[0], entry_ids[-1]) if entry_ids else (0, -1)
            reader = Reader(ledger_id, self.segments_of(ledger_id, low, high), content_term, bytes_max)
            try:
                return await reader.read(entry_ids, self._marking.is_damaged(ledger_id))
            except DamagedIndexError as error:
                await self._tender.rebuild(error.segment)
            except DamagedBlockError as error:
                if self._marking.is_closed:
                    raise
                await self._mark(ledger_id, error)
                return reader.unknown()

    async def list_entries(
        self, ledger_id: int, from_entry: int, rows_max: int
    ) -> tuple[list[ListedRun], int]:
        """List as `Engine.list_entries` says."""
        while True:
            state = self._ledgers.get(ledger_id)
            last = state.last_entry if state is not None else -1
            segments = self.segments_of(ledger_id, from_entry, last)
            try:
                return await list_runs(ledger_id, segments, from_entry, rows_max)
            except DamagedIndexError as error:
                await self._tender.rebuild(error.segment)

    async def _mark(self, ledger_id: int, cause: Exception) -> None:
        """Mark a ledger damaged and wait until that is durable."""
        if self._ledgers.is_deleted(ledger_id):
            return
        state = self._ledgers.state(ledger_id)
        if state.is_damaged and ledger_id not in self._on_their_way:
            return
        self.damaged_blocks += 1
        self._on_their_way.add(ledger_id)
        durable: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()

        def done(error: StorageError | None) -> None:
            self._on_their_way.discard(ledger_id)
            if not durable.done():  # cancelled with the connection of whoever read
                durable.set_result(error)

        try:
            if state.is_damaged:
                self._marking.barrier(done)
            else:
                self._marking.append_mark(ledger_id, done)
        except DiskFullError:
            self._on_their_way.discard(ledger_id)
            state.is_damaged = True  # at least until the next start, which finds the damage again
            return
        error = await durable
        if error is not None:
            raise error from cause
