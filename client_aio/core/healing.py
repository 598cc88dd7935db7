"""Healing: what becomes of a writer's adds when the ledger, or the term, that it writes to has failed.

The theory is the same for a log, whose next ledger is another one, and for an unbounded ledger, whose next
term is. Only this writer gave values to the entries of the failed ledger or term. So an entry at or below the
recovered end has the bytes that were added.

- *The end decides* (`Backlog`). Outstanding adds that lie at or below the recovered end complete. The others
  lie nowhere and never will: the ledger is CLOSED, or the term is over. They go to the next ledger or term,
  in order, before any add made since. So each add takes effect once.
- *The timeout of adds* (`AppendAges`). When the oldest outstanding add is too old, all outstanding adds fail
  as *unknown*, and none is sent again. A younger add that went on alone would overtake those that failed.
  Adds made later go behind the recovered end.
- *An unbounded ledger is taken over by its own writer* (`OwnTerms`), and only while it is under a term that
  this writer took. Any other term means a takeover by another client, and nothing may be fenced. A term is
  known by the token of the write that raised it, where that write was cancelled. The adds behind the end keep
  their ids: the end is the last entry of an unbroken run. `Intake` moves them.

Owns these decisions. Does not own who opens the log or the ledger again, or when.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from client_aio.core.add_window import ENTRY_OVERHEAD_BYTES, AddWindow
from client_aio.core.takeover import take_over
from metadata.model.log import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from client_aio.core.add_window import Outstanding
    from metadata.errors import BookKeeperError
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

Token = TypeVar("Token")


class OwnTerms:
    """The terms of an unbounded ledger that one writer has taken.

    An attempt may be cancelled before it hears that its compare-and-set has raised the term. So the term is
    noted before, with the token of the write. By the number alone, another client's term would pass for it.
    """

    def __init__(self, term: int) -> None:
        self._terms = {term}
        self._wanted = term  # that of the last change which `take_over` returned
        self._unheard: dict[str, int] = {}  # terms that may have been taken, by the tokens of the writes

    def hold(self, metadata: LedgerMetadata, version: Version) -> bool:
        """Return whether the writer still has the ledger.

        Args:
            version: that of the metadata; it tells who has written them.
        """
        if any(term == metadata.term and version.written_by(each) for each, term in self._unheard.items()):
            self.took(metadata.term)
        return not metadata.is_closed and self.include(metadata.term)

    def include(self, term: int) -> bool:
        """Return whether the writer has this term, or had it."""
        return term in self._terms

    def take_over(self, metadata: LedgerMetadata, least: int = 0) -> LedgerMetadata | None:
        """Return the metadata under a new term, not below `least`; None if another client has the ledger."""
        if metadata.is_closed or not self.include(metadata.term):
            return None
        taken = take_over(metadata, least)
        self._wanted = metadata.term if taken is None else taken.term
        return taken

    def draw(self, draw_token: Callable[[], str]) -> str:
        """Draw the token of a write, and note it: the write may be that of the last `take_over`."""
        token = draw_token()
        self._unheard[token] = self._wanted
        return token

    def took(self, term: int) -> None:
        """Note that a compare-and-set of `take_over` has definitely happened."""
        self._terms.add(term)
        self._unheard.clear()


class Backlog(Generic[Token]):
    """The adds of a writer that nothing replicates, in their order.

    First come the adds that were *cut off* when their ledger or term failed: its end decides about them.
    Behind them come the adds that are *held* for the next one.

    Invariant: no add is taken for the next ledger or term while the end of the former is open.
    """

    def __init__(self) -> None:
        self.bytes_held = 0
        self.settled = 0  # records that were acknowledged in former ledgers, or failed
        self._ledger_id = -1
        self._first_entry = 0
        self._cut: list[tuple[bytes, Token]] = []
        self._held: deque[tuple[bytes, Token]] = deque()

    def __len__(self) -> int:
        return len(self._cut) + len(self._held)

    def hold(self, data: bytes, token: Token) -> None:
        """Keep a record for the next ledger."""
        self._held.append((data, token))
        self.bytes_held += _size(data)

    def cut_off(self, ledger_id: int, first_entry: int, records: Iterable[tuple[bytes, Token]]) -> None:
        """Note that a ledger has failed, with these records outstanding from `first_entry` on."""
        assert not self._cut, "the end of the ledger before is open"
        self._ledger_id, self._first_entry, self._cut = ledger_id, first_entry, list(records)
        self.bytes_held += sum(_size(data) for data, _ in self._cut)
        self.settled += first_entry

    @property
    def undecided(self) -> int | None:
        """Return the ledger whose end decides about records; None if no record waits for one."""
        return self._ledger_id if self._cut else None

    def ended(self, last_entry: int) -> list[tuple[Position, Token]]:
        """Note where the failed ledger ends for ever; returns the records that are in it, in order.

        The others become the first of those that are held.
        """
        count = min(max(0, last_entry + 1 - self._first_entry), len(self._cut))
        known, rest = self._cut[:count], self._cut[count:]
        self._cut = []
        self._held.extendleft(reversed(rest))
        self.bytes_held -= sum(_size(data) for data, _ in known)
        self.settled += count
        first = self._first_entry
        return [(Position(self._ledger_id, first + index), token) for index, (_, token) in enumerate(known)]

    def take(self) -> list[tuple[bytes, Token]]:
        """Remove and return the records to send to the next ledger, in order."""
        assert not self._cut, "the end of the failed ledger is open"
        taken, self._held, self.bytes_held = list(self._held), deque(), 0
        return taken

    def give_up(self) -> list[Token]:
        """Drop all records, none of which is sent again; returns their tokens, in order."""
        tokens = [token for _, token in (*self._cut, *self._held)]
        self._cut, self._held, self.bytes_held = [], deque(), 0
        self.settled += len(tokens)
        return tokens


def _size(data: bytes) -> int:
    return len(data) + ENTRY_OVERHEAD_BYTES


class Intake(Generic[Token]):
    """The adds of one ledger's writer: in its window, or held back while it heals.

    Numbers the adds as they are taken. An entry's number is its id plus `shift`. The shift changes only where
    adds were given up that are not in the ledger. Later adds then have lower ids than it had seemed.

    Invariant: while adds are held back, none is in the window.
    """

    def __init__(self, window: AddWindow[Token]) -> None:
        self._window = window
        self._backlog: Backlog[Token] = Backlog()
        self._number = 0  # of the last add, while adds are held back
        self.is_holding = False
        self.shift = 0
        self._losses = 0  # how often adds were given up
        self._loss: BookKeeperError | None = None

    def __len__(self) -> int:
        """Return how many adds are held back."""
        return len(self._backlog)

    @property
    def last_taken(self) -> int:
        """Return the number of the last add."""
        return self._number if self.is_holding else self._window.last_add_pushed + self.shift

    @property
    def last_settled(self) -> int:
        """Return the number of the last add that was acknowledged, or has failed."""
        if self.is_holding:
            return self._number - len(self._backlog)
        return self._window.last_entry_reported + self.shift

    @property
    def bytes_held(self) -> int:
        """Return the bytes of the outstanding adds, with the overhead of each."""
        return self._window.bytes_held + self._backlog.bytes_held

    def put(self, data: bytes, token: Token) -> None:
        """Take an add behind all others."""
        if self.is_holding:
            self._backlog.hold(data, token)
            self._number += 1
        else:
            self._window.add(data, token)

    def put_run(self, payloads: Sequence[bytes], token: Token) -> None:
        """Take adds that share a token behind all others."""
        if self.is_holding:
            for data in payloads:
                self._backlog.hold(data, token)
            self._number += len(payloads)
        else:
            self._window.add_run(payloads, token)

    def hold_back(self) -> Outstanding[Token]:
        """Take what is outstanding out of the window, whose ledger or term has failed, and return it."""
        window = self._window
        self._number, self.is_holding = self.last_taken, True
        dropped = window.abort()
        self._backlog.cut_off(window.ledger_id, window.lac + 1, dropped.entries())
        return dropped

    def go_on(self, window: AddWindow[Token], last_entry: int) -> list[tuple[int, Token]]:
        """Put the adds behind the recovered end into the next window, which begins there.

        Returns:
            The adds that are in the ledger, with their ids, in order.
        """
        known = self._backlog.ended(last_entry)
        self.shift = self._number - len(self._backlog) - last_entry
        self._window, self.is_holding = window, False
        for data, token in self._backlog.take():
            window.add_run((data,), token)
        return [(position.entry_id, token) for position, token in known]

    def give_up(self, loss: BookKeeperError | None = None) -> list[Token]:
        """Drop the adds that are held back; returns their tokens, in order.

        Args:
            loss: their error, if the writer goes on.
        """
        if loss is not None:
            self._losses, self._loss = self._losses + 1, loss
        return self._backlog.give_up()

    @property
    def losses(self) -> int:
        """Return how often adds were given up while the writer went on."""
        return self._losses

    def check(self, losses: int) -> None:
        """Raise the error of the adds that were given up since there were so many losses."""
        if self._losses != losses and self._loss is not None:
            raise self._loss.with_traceback(None)


class AppendAges:
    """The age of the oldest outstanding append, compared with the timeout.

    Counts appends instead of dating each: an append takes part in no work of this class. The answer is late
    by up to the time between two looks.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._marks: deque[tuple[float, int]] = deque()  # at that time so many appends had been made

    def is_overdue(self, now: float, appended: int, settled: int) -> bool:
        """Look: of `appended` appends so far, the first `settled` are acknowledged or have failed.

        Args:
            now: by a clock that stands still while our own event loop does.
        """
        marks = self._marks
        if not marks or marks[-1][1] < appended:
            marks.append((now, appended))
        while marks and marks[0][1] <= settled:
            marks.popleft()
        return bool(marks) and now - marks[0][0] >= self._timeout_s
