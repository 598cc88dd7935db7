"""The decisions of a log's writer and readers.

The theory. A log is a chain of ledgers. Its list is changed by compare-and-set only, and decides who may
write:

- *Opening* (`to_recover`, `Listing`). The last two ledgers listed are brought to CLOSED, then a new ledger is
  appended. If the list was changed meanwhile, both steps are repeated: another client may have appended an
  open ledger. No record is taken before the append has definitely happened.
- *Listed ahead.* The ledger to which the log will roll is listed while records still go to the ledger before
  it. So the roll itself needs no metadata store. The log rolls when everything added to the old ledger is
  acknowledged. Only then does the new ledger get its first record. Hence **a ledger that has an entry proves
  the ledger before it complete**. If an entry survives, every entry added before it survives too.
- *At most the last two listed ledgers are not CLOSED.* The next ledger is listed once the ledger before the
  current one has been closed. So a client that opens the log shuts out every earlier writer by recovering two
  ledgers.
- *A writer whose append conflicts* reads the list again. If its current ledger is still the last one listed,
  another client has truncated or swept the log, and the writer retries. Otherwise it has lost the log.
- *An append is made from a head that was read before the new ledger was made* (`Listing` appends from one
  version only). A sweep of unlisted ledgers changes the head's version first. So it deletes no ledger that
  will be listed.
- *Healing*. A ledger of a writer fails, for want of bookies and not by a fence. The writer then opens its log
  again, from a head whose last row is a ledger that it made itself (`is_still_own`). Any other last row means
  a takeover, and nothing may be fenced. `client_aio.core.healing` says what becomes of the records.

Owns these decisions. Does not own ledgers, the store, or the timing of the steps.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from metadata.errors import InvalidArgumentError, LogTruncatedError
from metadata.model.log import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead, LogRow

TAG = "bookie-aio.log"
"""The key of a ledger's custom metadata that names the log whose writer made it."""

ROLL_BYTES = 256 * 1024 * 1024
ROLL_AGE_S = 3600.0
NOT_CLOSED_MAX = 2
"""How many ledgers at the end of the list may be not CLOSED."""


def owner_of(metadata: LedgerMetadata) -> str | None:
    """Return the log that a ledger belongs to, from its making or since it was added; None for none.

    A log lists only ledgers that belong to it, and deletes no others.
    """
    if metadata.log:
        return metadata.log
    tag = metadata.custom.get(TAG)
    return None if tag is None else tag.decode(errors="replace")


def to_recover(head: LogHead) -> list[LogRow]:
    """Return the ledgers that must be CLOSED before a new one is appended."""
    return head.newest[-NOT_CLOSED_MAX:]


class Listing:
    """An append to the list, made from one state of it and no other.

    Args:
        row_id: the id of the last row appended; None if no row is.
    """

    def __init__(self, change: Callable[[LogHead], LogHead], row_id: int | None) -> None:
        self._change = change
        self.row_id = row_id
        self._is_first = True

    def apply(self, head: LogHead) -> LogHead | None:
        """Return the head to write; None if the head has been changed since the first call."""
        if not self._is_first:
            return None
        self._is_first = False
        return self._change(head)

    def is_met_by(self, head: LogHead) -> bool:
        """Return whether a head that others have changed since shows that the append has happened.

        False proves nothing: behind many later rows, the row stands in a page.
        """
        return self.row_id is not None and head.lists(self.row_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollLimits:
    """The limits at which a log rolls: the first that is reached counts. None: no such limit."""

    bytes: int | None = ROLL_BYTES
    """Payload bytes of one ledger."""
    entries: int | None = None
    age_s: float | None = ROLL_AGE_S
    """A ledger without a record does not age."""

    def __post_init__(self) -> None:
        for name, value in (
            ("roll_bytes", self.bytes),
            ("roll_entries", self.entries),
            ("roll_age_s", self.age_s),
        ):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and value > 0):  # nor NaN
                raise InvalidArgumentError(f"{name} {value!r} is not a positive number")

    def is_due(self, size: int, entries: int) -> bool:
        """Return whether the ledger is full."""
        return (self.bytes is not None and size >= self.bytes) or (
            self.entries is not None and entries >= self.entries
        )

    def is_next_due(self, size: int, entries: int) -> bool:
        """Return whether the next ledger should be listed: an eighth of this one is used."""
        return self.is_due(size * 8, entries * 8)


def is_still_own(head: LogHead, made: Collection[int]) -> bool:
    """Return whether a writer that made these ledgers still has the log.

    Every takeover, and every addition of ledgers, appends a row. No truncation drops the last row.
    """
    return head.rows.last_key is not None and head.rows.last_key in made


class Step(NamedTuple):
    """The row and the entry at which a reader continues."""

    row: LogRow
    first_entry: int
    is_last: bool
    """No row behind this one is known."""


class LogCursor:
    """The position of a log's reader, and the run of rows around it that the reader knows.

    Args:
        at: the position of the next record to return; the record itself need not exist yet.
    """

    def __init__(self, at: Position) -> None:
        self.at = at
        self._rows: Sequence[LogRow] = ()

    def learn(self, head: LogHead, rows: Sequence[LogRow]) -> None:
        """Replace the known rows by a run of the head's rows.

        Raises:
            LogTruncatedError: the log begins behind this reader's position.
        """
        check_begun(head, self.at)
        self._rows = rows

    def step(self) -> Step | None:
        """Return the row to read from; None if no known row lies at or behind the position."""
        index = bisect_left(self._rows, self.at.ledger_id, key=lambda row: row.id)
        if index == len(self._rows):
            return None
        row = self._rows[index]
        first_entry = self.at.entry_id if row.id == self.at.ledger_id else 0
        return Step(row, first_entry, index == len(self._rows) - 1)

    def after(self, row: LogRow) -> LogRow | None:
        """Return the row that follows a row; None if it is not known."""
        index = bisect_left(self._rows, row.id + 1, key=lambda each: each.id)
        return self._rows[index] if index < len(self._rows) else None

    def knows(self, row: LogRow) -> bool:
        """Return whether a row with this row's id is known."""
        return any(each.id == row.id for each in self._rows)

    def enter(self, step: Step) -> None:
        """Note that the row is read from now on."""
        self.at = Position(step.row.id, step.first_entry)

    def given(self, row: LogRow, last_entry: int) -> None:
        """Note that a row's records up to an entry have been returned."""
        self.at = Position(row.id, last_entry + 1)

    def finished(self, row: LogRow) -> None:
        """Note that all records of a row have been returned, and none will follow."""
        self.at = Position(row.id + 1, 0)


def check_begun(head: LogHead, position: Position) -> None:
    """Raise LogTruncatedError if the log begins behind the position."""
    if position < head.begins_at:
        raise LogTruncatedError(
            f"log {head.name!r} begins at {head.begins_at}: its records before that, such as {position}, "
            "have been truncated",
            ledger_id=position.ledger_id,
            entry_id=position.entry_id,
        )


def row_at_time(rows: Sequence[LogRow], time_ms: int) -> LogRow | None:
    """Return the row at which to begin reading in order to miss no record written at `time_ms` or later.

    It is the second to last row that was listed by then, since a log's next ledger is listed ahead. If only
    one row was listed by then, it is that row; None if no row was.
    """
    listed = [row for row in rows if row.created_ms <= time_ms]
    return listed[-2:][0] if listed else None
