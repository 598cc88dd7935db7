"""The reader's handle of an unbounded ledger: follows it over terms and fragments. Never fences.

A `LedgerReader` whose fragments may be in pages. What it rests on, beside that (rule 13): a LAC is used only
when the last fragment known here has at least the content term of the statement, else the metadata are read
again; and so they are when a bookie knows a later content term of an entry, or nobody has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_aio.reader import LedgerReader
from client_aio.unbounded.fragments import PagedEntries, trimmed

if TYPE_CHECKING:
    from client_aio.reading import BatchStream, EntrySource


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
        """Give the first entry that has not been trimmed, as last heard."""
        return self._metadata.first_entry

    async def refresh(self, *, sync: bool = True) -> None:
        """Read the metadata again, as they are in the store now.

        Raises:
            NoSuchLedgerError: it has been deleted. MetadataUnavailableError.
        """
        await super().refresh(sync=sync)

    def tail_batches(self, from_entry: int = 0) -> BatchStream:
        """Read as `tail` does, in batches.

        Raises:
            NoSuchEntryError: `from_entry` has been trimmed; also while iterating, when the reader is
                overtaken.
        """
        if from_entry < self.first_entry:
            raise trimmed(self._metadata, from_entry)
        return super().tail_batches(from_entry)
