"""What the writer and the readers of a log decide.

The theory. A log is a chain of ledgers. Its list is changed by compare-and-set only, and says who may write:

- *Opening* (`to_recover`, `Listing`). The last two ledgers listed are brought to CLOSED, then a new ledger is
  appended. If the list was changed meanwhile, all of that is done again: somebody may have appended a ledger
  that is open. No record is taken before the append has definitely happened.
- *Listed ahead.* The ledger to which the log will be rolled is listed while records still go to the one
  before it. So the roll itself needs no metadata store. It happens when everything added to the old ledger
  is acknowledged; only then does the new one get its first record. Hence **a ledger that has an entry
  proves the one before it complete**, and an entry never survives one that was added before it.
- *At most the last two listed ledgers are not CLOSED*: the next one is listed only when the one before the
  current one has been closed. So recovering two is enough, for whoever opens the log, to shut out every
  earlier writer.
- *A writer whose append conflicts* looks again: if its current ledger is still the last one listed, somebody
  has truncated the log, swept, or the like, and it tries again. Otherwise it has lost the log.
- *What an append lists is made after the head was read that it is made from* (`Listing` appends from one
  version only). So somebody who sweeps up unlisted ledgers, and bumps the head's version first, deletes none
  that will be listed.

Owns these decisions. Does not own ledgers, the store, or when what is done.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from metadata.errors import InvalidArgumentError, LogTruncatedError
from metadata.model.log import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from metadata.model.log import LogHead, LogRow

ROLL_BYTES = 256 * 1024 * 1024
ROLL_AGE_S = 3600.0
NOT_CLOSED_MAX = 2
"""How many ledgers at the end of the list may be not CLOSED."""


def to_recover(head: LogHead) -> list[LogRow]:
    """Return the ledgers that must be CLOSED before a new one is appended."""
    return head.newest[-NOT_CLOSED_MAX:]


class Listing:
    """An append to the list, made from one state of it and no other.

    Args:
        row_id: of the last row appended; none for None.
    """

    def __init__(self, change: Callable[[LogHead], LogHead], row_id: int | None) -> None:
        self._change = change
        self.row_id = row_id
        self._is_first = True

    def apply(self, head: LogHead) -> LogHead | None:
        """Return what the head is to become; None where others have changed it since."""
        if not self._is_first:
            return None
        self._is_first = False
        return self._change(head)

    def is_met_by(self, head: LogHead) -> bool:
        """Return whether the append has happened after all, before what others made of the list.

        As far as the head tells: behind many others the row is in a page by then.
        """
        return self.row_id is not None and head.lists(self.row_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollLimits:
    """When a log goes on to the next ledger: the first that is reached counts. None: no such limit."""

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
            if value is not None and (not isinstance(value, (int, float)) or not value > 0):  # nor NaN
                raise InvalidArgumentError(f"{name} {value!r} is not a positive number")

    def is_due(self, size: int, entries: int) -> bool:
        """Return whether the ledger is full."""
        return (self.bytes is not None and size >= self.bytes) or (
            self.entries is not None and entries >= self.entries
        )

    def is_next_due(self, size: int, entries: int) -> bool:
        """Return whether the next ledger should be listed: an eighth of this one is used."""
        return self.is_due(size * 8, entries * 8)


class Step(NamedTuple):
    """Where a reader goes on."""

    row: LogRow
    first_entry: int
    is_last: bool
    """No row behind this one is known."""


class LogCursor:
    """Where a reader of a log stands, and the run of rows around it that it knows.

    Args:
        at: the position of the next record to be given; the record itself need not exist yet.
    """

    def __init__(self, at: Position) -> None:
        self.at = at
        self._rows: Sequence[LogRow] = ()

    def learn(self, head: LogHead, rows: Sequence[LogRow]) -> None:
        """Take in a run of the head's rows.

        Raises:
            LogTruncatedError: the log begins behind where this reader stands.
        """
        check_begun(head, self.at)
        self._rows = rows

    def step(self) -> Step | None:
        """Return the row to read from; None where no row known lies at or behind the reader."""
        index = bisect_left(self._rows, self.at.ledger_id, key=lambda row: row.id)
        if index == len(self._rows):
            return None
        row = self._rows[index]
        first_entry = self.at.entry_id if row.id == self.at.ledger_id else 0
        return Step(row, first_entry, index == len(self._rows) - 1)

    def after(self, row: LogRow) -> LogRow | None:
        """Return the row behind one, where it is known."""
        index = bisect_left(self._rows, row.id + 1, key=lambda each: each.id)
        return self._rows[index] if index < len(self._rows) else None

    def knows(self, row: LogRow) -> bool:
        """Return whether a row is one of those known, by its id."""
        return any(each.id == row.id for each in self._rows)

    def enter(self, step: Step) -> None:
        """Note that the row is read from now on."""
        self.at = Position(step.row.id, step.first_entry)

    def given(self, row: LogRow, last_entry: int) -> None:
        """Note that a row's records up to an entry have been given."""
        self.at = Position(row.id, last_entry + 1)

    def finished(self, row: LogRow) -> None:
        """Note that all records of a row have been given, and none will follow."""
        self.at = Position(row.id + 1, 0)


def check_begun(head: LogHead, position: Position) -> None:
    """Raise LogTruncatedError where the log begins behind the position."""
    if position < head.begins_at:
        raise LogTruncatedError(
            f"log {head.name!r} begins at {head.begins_at}: its records before that, such as {position}, "
            "have been truncated",
            ledger_id=position.ledger_id,
            entry_id=position.entry_id,
        )


def row_at_time(rows: Sequence[LogRow], time_ms: int) -> LogRow | None:
    """Return the row from which on nothing is missed that was written at that time or later; None for none.

    That is the one before the last that was listed by then: a log's next ledger is listed while records
    still go to the one before it. With only one listed by then, it is that.
    """
    listed = [row for row in rows if row.created_ms <= time_ms]
    return listed[-2:][0] if listed else None
