"""A log's metadata: the ledgers that the log is a chain of, and the legal changes of that list. Pure.

A `LogHead` is frozen; each change returns a new one, which the caller writes by compare-and-set. The list is
a paged one (`metadata.model.paged_list`); a row is `[id, ledger, created_ms]`:

- `id` is the first part of the positions in that ledger, and increases along the list. It is the ledger's own
  id, except for a ledger that was added out of order. Such a row's id is drawn from the same sequence and
  names no ledger.
- `ledger` is the ledger that holds the records.

The legal changes:

    append          a ledger, when the log is opened or rolled; or several closed ones at once
    truncate        drop rows from the front, never the last one; the log then begins at a position
    replace         drop all rows and append others
    delete          drop all rows; then the head itself is deleted
    finish_dropping remove the record of dropped rows, once their ledgers are deleted

The head keeps dropped rows until their ledgers are deleted, so that a crash in between loses track of none.
The stored form is a JSON object:

    {"format": 1, "log": "orders", "created_ms": 1790000000000, "begins_at": [7, 0], "is_deleted": false,
     "custom": {"app": "ZGVtbw=="}, "transactions": [["query", 12, "4096:9f2c"]],
     "pages": [["0000000000000000007-5f2…", 7, 300]], "rows": [[901, 901, 1790000000000]],
     "dropped": {"pages": [], "rows": []}}
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from metadata.errors import InvalidArgumentError, MetadataCorruptError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, MALFORMED, check_ledger_id
from metadata.model.ledger import check_custom
from metadata.model.paged_list import PagedRows, PageRef, Row, parse_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FORMAT_VERSION = 2
TRANSACTIONS_MAX = 100
"""The number of queries whose last batch a log keeps; the query that recorded least recently is evicted."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+\-]{0,199}")
_POSITION = re.compile(r"(\d{1,19}):(\d{1,19})")


class Position(NamedTuple):
    """The place of a record in a log. Positions of one log order as its records do.

    `str(position)` is "7:12": entry 12 of ledger 7; `parse` inverts that.
    """

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form of a position.

        Raises:
            InvalidArgumentError: the text is no position.
        """
        match = _POSITION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidArgumentError(f"{text!r} is no position: one is LEDGER:ENTRY, such as 7:12")
        return cls.check(cls(int(match[1]), int(match[2])))

    @classmethod
    def check(cls, position: tuple[int, int]) -> Self:
        """Return the position, or raise InvalidArgumentError."""
        try:
            ledger_id, entry_id = position
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"{position!r} is no position") from None
        check_ledger_id(ledger_id)
        if not isinstance(entry_id, int) or isinstance(entry_id, bool) or not 0 <= entry_id <= ENTRY_ID_MAX:
            raise InvalidArgumentError(f"entry id {entry_id!r} is not an integer from 0 to 2**62 - 1")
        return cls(ledger_id, entry_id)


class LogRow(NamedTuple):
    """One ledger of a log."""

    id: int
    """The ledger id in the positions of its records."""
    ledger_id: int
    """The ledger that holds the records: the same id, unless the ledger was added out of order."""
    created_ms: int
    """The time of listing, in milliseconds since the epoch, by the clock of the client that listed the row.

    Never before the previous row's time: where a clock is behind or was set back, the previous time is kept.
    """


class Transaction(NamedTuple):
    """One batch of a query, as a log records it together with the batch's ledgers."""

    query_id: str
    batch_id: int
    content: str = ""
    """Identifies the batch's records; empty where the batch is known by its number alone."""


class Dropped(NamedTuple):
    """Rows that are no longer listed, whose ledgers have yet to be deleted."""

    pages: tuple[PageRef, ...] = ()
    rows: tuple[Row, ...] = ()


_BEGINNING = Position(0, 0)
_NOTHING = Dropped()


@dataclass(frozen=True, slots=True)
class LogHead:
    """The head of a log's list."""

    name: str
    created_ms: int = 0
    rows: PagedRows = field(default_factory=PagedRows)
    begins_at: Position = _BEGINNING
    custom: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    transactions: tuple[Transaction, ...] = ()
    dropped: Dropped = _NOTHING
    is_deleted: bool = False

    @property
    def id_min(self) -> int:
        """Return the lowest id that the next row may have."""
        last = self.rows.last_key
        return max(self.begins_at.ledger_id, 0 if last is None else last + 1)

    @property
    def newest(self) -> list[LogRow]:
        """Return the rows that are in the head, oldest first: the last ones of the list."""
        return [LogRow(*row) for row in self.rows.rows]

    def lists(self, row_id: int) -> bool:
        """Return whether a row in the head has this id; rows in pages are not looked at."""
        return any(row[0] == row_id for row in self.rows.rows)

    def append(self, rows: Iterable[LogRow]) -> LogHead:
        """Return the log with further ledgers listed; the rows' times never decrease."""
        rows = list(rows)
        assert all(row.id >= self.id_min for row in rows), "an id must lie above all that were ever listed"
        before_ms = max((row.created_ms for row in self.newest[-1:]), default=0)
        rising = accumulate((max(row.created_ms, before_ms) for row in rows), max)
        listed = [row._replace(created_ms=at_ms) for row, at_ms in zip(rows, rising, strict=True)]
        return replace(self, rows=self.rows.append(listed))

    def first_id_kept(self, before: Position) -> int:
        """Return the lowest row id that stays when the log is truncated before a position.

        The last row always stays.
        """
        last = self.rows.last_key
        return before.ledger_id if last is None else min(before.ledger_id, last)

    def truncate(
        self, before: Position, cut_rows: Sequence[Row], begins_at: Position | None = None
    ) -> LogHead:
        """Drop the ledgers that hold no record at or behind a position.

        The last row stays. Earlier drops must be finished first (`finish_dropping`).

        Args:
            begins_at: the new begin of the log, if it is known to lie before the position: right behind the
                last record before it.
            cut_rows: the rows of the page that `rows.page_cut_at(first_id_kept(before))` names, if it names
                one.
        """
        assert not self.has_dropped
        key = self.first_id_kept(before)
        left = self.rows.drop_before(key, cut_rows)
        kept = {page.name for page in left.pages}
        cut = self.rows.page_cut_at(key)
        dropped = Dropped(
            tuple(page for page in self.rows.pages if page.name not in kept),
            tuple(
                row
                for row in (*(cut_rows if cut is not None and cut.name in kept else ()), *self.rows.rows)
                if row[0] < key
            ),
        )
        return replace(self, rows=left, dropped=dropped, begins_at=max(self.begins_at, begins_at or before))

    def drop_all(self) -> LogHead:
        """Drop every row. Rows appended later have higher ids than any row ever listed."""
        assert not self.has_dropped
        return replace(
            self,
            rows=PagedRows(),
            dropped=Dropped(self.rows.pages, self.rows.rows),
            begins_at=Position(self.id_min, 0),
        )

    def delete(self) -> LogHead:
        """Drop every row and mark the log as deleted, for good."""
        return replace(self.drop_all(), is_deleted=True)

    @property
    def has_dropped(self) -> bool:
        """Return whether ledgers of dropped rows have yet to be deleted."""
        return self.dropped != _NOTHING

    def finish_dropping(self, dropped: Dropped) -> LogHead | None:
        """Remove the record of these dropped rows; None where the head has another record by now."""
        return replace(self, dropped=_NOTHING) if dropped == self.dropped and self.has_dropped else None

    def last_transaction(self, query_id: str) -> Transaction | None:
        """Return the last batch that a query has recorded; None for none."""
        return next((each for each in self.transactions if each.query_id == query_id), None)

    def record(self, transaction: Transaction) -> LogHead:
        """Record a query's batch; beyond `TRANSACTIONS_MAX` queries the least recent one is evicted."""
        others = [each for each in self.transactions if each.query_id != transaction.query_id]
        return replace(self, transactions=(*others, transaction)[-TRANSACTIONS_MAX:])

    def with_custom(self, custom: Mapping[str, bytes]) -> LogHead:
        """Set custom metadata; keys that are not given stay.

        Raises:
            InvalidArgumentError: all custom metadata together exceed 64 KiB; the node needs its room for
                rows.
        """
        if not custom:
            return self
        return replace(self, custom=MappingProxyType(check_custom({**self.custom, **custom})))

    # --- as the head of a paged list (`metadata.access.paged_list.Head`) ---

    def with_rows(self, rows: PagedRows) -> LogHead:
        """Return the same head with another list."""
        return replace(self, rows=rows)

    def pages_in_use(self) -> list[str]:
        """Return the names of the listed pages, and of dropped pages whose ledgers have yet to be deleted."""
        return [page.name for page in (*self.rows.pages, *self.dropped.pages)]

    def to_json(self) -> bytes:
        """Return the stored form."""
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "log": self.name,
                "created_ms": self.created_ms,
                "begins_at": self.begins_at,
                "is_deleted": self.is_deleted,
                "custom": {key: base64.b64encode(value).decode() for key, value in self.custom.items()},
                "transactions": self.transactions,
                **self.rows.to_document(),
                "dropped": self.dropped._asdict(),
            }
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> LogHead:
        """Parse the stored form; raises MetadataCorruptError."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT_VERSION:
                raise ValueError(f"format version is {document['format']!r}, not {FORMAT_VERSION}")
            head = _parse(document)
        except MALFORMED as error:
            raise MetadataCorruptError(f"a log's metadata is damaged: {error!r} in {text[:200]!r}") from error
        return head


def _parse(document: dict[str, Any]) -> LogHead:
    rows = PagedRows.from_document(document)
    for row in rows.rows:
        row_id, ledger_id, created_ms = row
        if not (0 <= row_id <= LEDGER_ID_MAX and 0 <= ledger_id <= LEDGER_ID_MAX and created_ms >= 0):
            raise ValueError(f"a row is {row!r}")
    dropped = document["dropped"]
    return LogHead(
        name=check_log_name(document["log"]),
        created_ms=int(document["created_ms"]),
        rows=rows,
        begins_at=Position.check(document["begins_at"]),
        custom=MappingProxyType(
            {str(key): base64.b64decode(value, validate=True) for key, value in document["custom"].items()}
        ),
        transactions=tuple(
            Transaction(str(query), int(batch), str(content))
            for query, batch, content in document["transactions"]
        ),
        dropped=Dropped(
            tuple(PageRef(str(name), int(first), int(rows)) for name, first, rows in dropped["pages"]),
            parse_rows(dropped["rows"]),
        ),
        is_deleted=bool(document["is_deleted"]),
    )


def check_log_name(name: str) -> str:
    """Return the name, or raise InvalidArgumentError where it could not name a node."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"log name {name!r} is not legal: 1 to 200 letters, digits, '_', '.', ':', '@', '+' or '-', "
            "starting with a letter, a digit or '_'"
        )
    return name
