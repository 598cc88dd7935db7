"""One reading of a log, from its first record to its end or its failure, and what it must return.

Owns the checks of readers, for `tests.sim.checkers.log_lifecycle`. The names, beside those of `Chains`:

- LivesAreApart: one reading returns records of one life of the log.
- ReadingsReachTheEnd: a reading that does not follow ends behind everything in CLOSED ledgers at its start. A
  reading that follows never ends by itself.
- ErrorsAreTrue: "truncated" and "no such log" are raised only where that was so. No call raises an error that
  its docstring does not name: raw errors of the metadata store, damage where there is none, ledgers that the
  caller has not named.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from metadata.errors import (
    BookKeeperError,
    InvalidTransitionError,
    KeyExistsError,
    LedgerFencedError,
    LogTruncatedError,
    MetadataCorruptError,
    NoSuchEntryError,
    NoSuchKeyError,
    NoSuchLedgerError,
    NoSuchLogError,
    VersionConflictError,
)
from metadata.model.log import Position

if TYPE_CHECKING:
    from client_aio import LogRecord
    from tests.sim.checkers.log_lifecycle import Life, LogLives

_RAW = (
    NoSuchKeyError, KeyExistsError, VersionConflictError, MetadataCorruptError, InvalidTransitionError,
    LedgerFencedError, NoSuchEntryError, NoSuchLedgerError,
)  # fmt: skip


class Reading:
    """One iterator of `read_log` or `read_log_batches`.

    Args:
        start: the position given, None where another kind of start was.
        since: with a time as start: what was appended later is to be given. With "end" as start that is
            the end of all time until `has_begun` says better.
    """

    def __init__(
        self,
        lives: LogLives,
        who: str,
        *,
        start: Position | None = None,
        since: float | None = None,
        now: float = 0.0,
        follows: bool,
    ) -> None:
        self._lives = lives
        self.password = lives.password
        self._who = who
        self._start = start
        self._since = since
        self._began_at = now
        self._follows = follows
        self._first_life = lives.life
        self._number = len(lives.lives)
        self._owed = lives.in_closed_ledgers()
        self._life: Life | None = None
        self._floor = self._begun = Position(0, 0)
        self._seen: set[Position] = set()
        self.behind: Position | None = None

    def read(self, record: LogRecord) -> None:
        """Note a record given by it."""
        lives, (position, payload) = self._lives, record
        lives.seen(self._who, payload, position)
        life = lives.life_of.get(position.ledger_id)
        if life is None:
            lives.fail("AllNonEmptyLedgersInLedgerList", f"{self._who} read {position}: never listed")
            return
        if self._life is None:
            self._begin(life, position)
        elif life is not self._life:
            text = f"{self._who} went from life {self._life.number} to {position} of life {life.number}"
            lives.fail("LivesAreApart", text)
        if self.behind is not None and position <= self.behind:
            lives.fail("EntryOrderMaintained", f"{self._who} read {position} behind {self.behind}")
        self._check_missed(life, position)
        self._seen.add(position)
        self.behind = position

    def _begin(self, life: Life, position: Position) -> None:
        self._life = life
        life.readings.append(self)
        self._begun = life.begins_at
        if self._start is not None:
            self._floor = self._start
        else:
            # What is cut while it begins may be given or not.
            self._floor = position if self._since is not None else life.begins_at
        if position < (self._start or life.began_where(self._began_at)):
            self._lives.fail("EntryOrderMaintained", f"{self._who} read {position} before where it began")

    def _check_missed(self, life: Life, position: Position) -> None:
        order, lives = life.in_order, self._lives
        if self.behind is None and self._since is not None:
            missed = [
                each for each in order[: bisect_left(order, position)]
                if lives.issued_at.get(lives.values[each], 0.0) > self._since and each >= life.begins_at
            ]  # fmt: skip
        elif self.behind is None:
            missed = order[bisect_left(order, self._floor) : bisect_left(order, position)]
        else:
            missed = order[bisect_right(order, self.behind) : bisect_left(order, position)]
        if missed:
            text = f"{self._who} read {position} behind {self.behind or self._floor}, passing over {missed}"
            lives.fail("EntryOrderMaintained", text)

    def has_begun(self, now: float) -> None:
        """Note that it has found where it starts: with "end", all that is appended from now on is owed."""
        if self._since == math.inf:
            self._since = now

    def look_back_at(self, position: Position, issued_at: float) -> None:
        """Hear of an acknowledgement; what has been passed must have been given."""
        if self.behind is None or position > self.behind or position in self._seen:
            return
        is_since = self._since is not None and issued_at > self._since and position >= self._begun
        if position >= self._floor or is_since:
            text = f"{self._who} is behind {self.behind}, and {position} was not read"
            self._lives.fail("EntryOrderMaintained", text)

    def ended(self) -> None:
        """Note that the iterator has come to its end by itself."""
        lives = self._lives
        if self._follows:
            lives.fail("ReadingsReachTheEnd", f"{self._who} followed, and it ended behind {self.behind}")
        life = self._first_life
        if life is None or lives.life is not life or not life.is_there(self._began_at):
            return
        floor = max(self._start or Position(0, 0), life.begins_at)
        lacking = [each for each in self._owed if each >= floor and each not in self._seen]
        if self._since is not None:
            issued = lives.issued_at
            lacking = [each for each in lacking if issued.get(lives.values[each], 0.0) > self._since]
        if lacking:
            text = f"{self._who} read to the end, {self.behind}, without {lacking}"
            lives.fail("ReadingsReachTheEnd", text)

    def broke_off(self, error: BookKeeperError) -> None:
        """Note the error by which it ended."""
        lives, known = self._lives, self._lives.lives[max(0, self._number - 1) :]
        stands = self.behind or self._start or Position(0, 0)
        if isinstance(error, LogTruncatedError) and not any(life.begins_at > stands for life in known):
            lives.fail("ErrorsAreTrue", f"{self._who} stands at {stands} and is told {error!r}")
        if isinstance(error, NoSuchLogError) and len(known) == 1 and known[0].is_there(self._began_at):
            lives.fail("ErrorsAreTrue", f"{self._who} is told {error!r}; it has been there all the time")
        check_documented(lives, self._who, error)


def check_documented(
    lives: LogLives, who: str, error: BaseException, also: tuple[type[BookKeeperError], ...] = ()
) -> None:
    """Check that a call on a log has not raised what its docstring has no room for."""
    if isinstance(error, _RAW) and not isinstance(error, also):
        lives.fail("ErrorsAreTrue", f"{who}: a call on the log raised {error!r}")


def check_absence(lives: LogLives, who: str, since: float, error: BookKeeperError) -> None:
    """Check that "no such log" was so at some time since a call began."""
    life = lives.life
    if isinstance(error, NoSuchLogError) and life is not None and life.is_there(since):
        lives.fail("ErrorsAreTrue", f"{who} is told {error!r}; it has been there since {life.began_at:.4f} s")
