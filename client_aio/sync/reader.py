"""Reading without an event loop; see `client_aio.ledger.reader`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from client_aio.sync.loop_thread import Background, Handle
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    import client_aio
    from client_aio.ledger.entries import Entry, EntryBatch
    from metadata.model.ledger import LedgerMetadata


class LedgerReader(Handle):
    """Reads a ledger; see `client_aio.LedgerReader`."""

    def __init__(self, background: Background, reader: client_aio.LedgerReader) -> None:
        super().__init__(background)
        self._reader = reader

    @property
    def ledger_id(self) -> int:
        """Give the ledger's id."""
        return self._reader.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Give the metadata as last read."""
        return self._reader.metadata

    @property
    def last_add_confirmed(self) -> int:
        """Give the highest LAC that this handle has seen, −1 for none."""
        return self._reader.last_add_confirmed

    @property
    def is_closed(self) -> bool:
        """Tell whether the ledger is known to be closed."""
        return self._reader.is_closed

    def read_last_add_confirmed(self) -> int:
        """Ask the bookies for the LAC, and return the highest seen."""
        return self._run(self._reader.read_last_add_confirmed())

    def read(self, first: int, last: int) -> Generator[Entry, None, None]:
        """Read the entries first to last, inclusive, in order."""
        for batch in self.read_batches(first, last):
            yield from batch

    def read_batches(
        self, first: int, last: int, *, known_lac: int = NO_ENTRY
    ) -> Generator[EntryBatch, None, None]:
        """Read as `read` does, in batches."""
        return self._iterate(lambda: self._reader.read_batches(first, last, known_lac=known_lac))

    def read_unconfirmed(self, first: int, last: int) -> Generator[Entry, None, None]:
        """Read entries whether acknowledged or not; see `client_aio.LedgerReader.read_unconfirmed`."""
        return self._iterate(lambda: self._reader.read_unconfirmed(first, last))

    def tail(self, from_entry: int = 0) -> Generator[Entry, None, None]:
        """Read from an entry on and follow what is added, until the ledger is closed."""
        return self._iterate(lambda: self._reader.tail(from_entry))

    def close(self) -> None:
        """Free the handle. The ledger is not touched."""
        self._run(self._reader.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
