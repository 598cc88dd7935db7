"""What reading a log gives: records, and batches of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, NamedTuple

from metadata.log import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from client_aio.entries import EntryBatch


class LogRecord(NamedTuple):
    """A record of a log."""

    position: Position
    data: bytes


class LogBatch:
    """A run of records that follow one another in one ledger, without an object per record.

    Record number i has the position (`ledger_id`, `first_entry_id + i`) and the bytes
    `buffer[offsets[i]:offsets[i + 1]]`. The buffer is read-only and stays valid for as long as it is held.
    """

    __slots__ = ("_entries", "ledger_id")

    def __init__(self, ledger_id: int, entries: EntryBatch) -> None:
        self.ledger_id = ledger_id
        self._entries = entries

    @property
    def first_entry_id(self) -> int:
        """Give the entry id of the first record."""
        return self._entries.first_entry_id

    @property
    def last_entry_id(self) -> int:
        """Give the entry id of the last record."""
        return self._entries.last_entry_id

    @property
    def first_position(self) -> Position:
        """Give the position of the first record."""
        return Position(self.ledger_id, self._entries.first_entry_id)

    @property
    def last_position(self) -> Position:
        """Give the position of the last record."""
        return Position(self.ledger_id, self._entries.last_entry_id)

    @property
    def offsets(self) -> Sequence[int]:
        """Give where records begin in the buffer, and at last where the last one ends."""
        return self._entries.offsets

    @property
    def buffer(self) -> memoryview:
        """Give the bytes of all records."""
        return self._entries.buffer

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LogRecord]:
        ledger_id = self.ledger_id
        for entry_id, data in self._entries:
            yield LogRecord(Position(ledger_id, entry_id), data)

    def __repr__(self) -> str:
        return f"LogBatch({self.first_position} to {self.last_position}, {len(self.buffer)} bytes)"


RecordStream = AsyncGenerator[LogRecord, None]
LogBatchStream = AsyncGenerator[LogBatch, None]
