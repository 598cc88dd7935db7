"""The reader's handle of an unbounded ledger: follows it over terms and fragments. Never fences.

A `LedgerReader` whose fragments may be in pages. Rule 13: it uses a LAC statement only when the last fragment
known here has at least the statement's content term. Else it reads the metadata again. It also reads them
again when a bookie knows a later content term of an entry, or when no bookie has the entry.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from client_aio.core.read_plan import trimmed
from client_aio.ledger.reader import LedgerReader
from client_aio.unbounded.paged_fragments import PagedEntries
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from client_aio.ledger.entry_reader import BatchStream, EntrySource


class UnboundedLedgerReader(LedgerReader):
    """Reads an unbounded ledger; made by `Client.open_ledger`. An async context manager.

    `tail` follows the ledger over terms and fragments, and ends when it is sealed.
    """

    def _make_entries(self) -> EntrySource:
        return PagedEntries(
            self._context,
            lambda: self._metadata,
            self._digest,
            on_statement=self._note,
            refresh=self.refresh,
        )

    @property
    def first_entry(self) -> int:
        """Return the first entry that has not been trimmed, by the metadata as last read."""
        return self._metadata.first_entry

    async def refresh(self, *, sync: bool = True) -> None:
        """Read the metadata again, as they are in the store now.

        Raises:
            NoSuchLedgerError: the ledger has been deleted.
            MetadataUnavailableError: the metadata store did not answer in time.
        """
        await super().refresh(sync=sync)

    def read_batches(self, first: int, last: int, *, known_lac: int = NO_ENTRY) -> BatchStream:
        """Read as `read` does, in batches; see `LedgerReader.read_batches`.

        Raises:
            MetadataUnavailableError, NoSuchLedgerError: while iterating, where `last` is above this handle's
                own LAC: the metadata, which hold each entry's content term, could not be read again.
        """
        batches = super().read_batches(first, last, known_lac=known_lac)
        return batches if last <= self._lac else self._after_refresh(batches)

    async def _after_refresh(self, batches: BatchStream) -> BatchStream:
        """Read the metadata again before the entries: a LAC that another handle verified may be newer."""
        async with aclosing(batches):
            await self.refresh()
            async for batch in batches:
                yield batch

    def tail_batches(self, from_entry: int = 0) -> BatchStream:
        """Read as `tail` does, in batches.

        Raises:
            NoSuchEntryError: `from_entry` has been trimmed. While iterating: a trim has overtaken the reader.
        """
        if from_entry < self.first_entry:
            raise trimmed(self._metadata, from_entry)
        return super().tail_batches(from_entry)
