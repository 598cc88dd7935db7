"""Futures of a writer: waiting for acknowledgements, and how the writer's failure reaches every waiter.

The futures of adds are the tokens of the add window. `BatchAdd` is the token of each entry of a batch.
It has one future for all of them, since a future for each entry costs more than all else that is done for it.

Invariants: futures complete in the order of their entries (rule 1). A future that its application has
cancelled is passed over: its add goes on, and the entries behind it keep their order. A failure reaches every
future once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from metadata.errors import LedgerFencedError, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from client_aio.core.add_window import AddGroup
    from metadata.errors import BookKeeperError
    from metadata.model.ledger import LedgerMetadata

Place = TypeVar("Place")


class BatchAdd(Generic[Place]):
    """The entries of one batch, and their one future of the first and the last place.

    The entries of a batch lie one behind the other, with no other entry between them. So a count tells which
    of them have been acknowledged. A place is an entry id, or a position in a log.

    Attributes:
        future: it is done when the last entry is acknowledged, and so are all before it (rule 1).
        is_sent: some entry may be at a bookie, now or later.
    """

    __slots__ = ("_first", "count", "future", "is_sent", "left")

    def __init__(self, future: asyncio.Future[tuple[Place, Place]], count: int) -> None:
        self.future = future
        self.count = count
        self.left = count  # entries that have not been acknowledged
        self.is_sent = False
        self._first: Place | None = None

    def done(self) -> bool:
        """Return whether the future is done: completed, failed, or cancelled by the application."""
        return self.future.done()

    def acknowledged(self, first: Place, last: Place, count: int) -> None:
        """Note that the next entries are acknowledged, `count` of them, from one place to another."""
        assert 0 < count <= self.left
        if self._first is None:
            self._first = first
        self.left -= count
        if not self.left and not self.future.done():
            self.future.set_result((self._first, last))

    def fail(self, error: BookKeeperError) -> BookKeeperError:
        """Fail the future, and return its own error, which says how many entries were acknowledged.

        *Not done* only where no entry was sent.
        """
        number = self.count - self.left
        text = f"{error} (of the {self.count} entries of this batch, {number} were acknowledged)"
        own = with_message(error, text, error.entry_id)
        own.acknowledged = number
        own.outcome = Outcome.UNKNOWN if number or self.is_sent else Outcome.NOT_DONE
        own.__cause__ = error.__cause__
        self.future.set_exception(own)
        self.future.exception()  # retrieved, as in `fail_all`
        return own


AnyAdd = asyncio.Future[Any] | BatchAdd[Any] | None
"""The token of an entry. None is that of an entry of `add_entries`, which has no future."""


def fail_all(adds: Iterable[AnyAdd], error: BookKeeperError) -> list[BookKeeperError]:
    """Fail every future that is not done, in order; returns the errors of the batches, one for each.

    The error has no traceback: each `raise` would extend it with the frames of another caller.
    """
    of_batches: list[BookKeeperError] = []
    last: AnyAdd = None
    for add in adds:
        if add is last or add is None or add.done():
            continue
        last = add
        if isinstance(add, BatchAdd):
            of_batches.append(add.fail(error))
        else:
            add.set_exception(error.with_traceback(None))
            add.exception()  # retrieved: asyncio logs no error if nobody awaits it
    return of_batches


def complete(add: AnyAdd, place: Any) -> None:
    """Complete one entry, which lies at this place."""
    if isinstance(add, BatchAdd):
        add.acknowledged(place, place, 1)
    elif add is not None and not add.done():
        add.set_result(place)


def complete_runs(adds: Sequence[AnyAdd], first_entry: int, place_of: Callable[[int], Any]) -> None:
    """Complete the entries of a group, some of which are of batches: a batch in one step."""
    index, count = 0, len(adds)
    while index < count:
        add, run = adds[index], 1
        if isinstance(add, BatchAdd):
            run = min(add.left, count - index)
            while adds[index + run - 1] is not add:  # entries of it that were dropped are in no group
                run -= 1
            first = first_entry + index
            add.acknowledged(place_of(first), place_of(first + run - 1), run)
        else:
            complete(add, place_of(first_entry + index))
        index += run


def note_sent(groups: Iterable[AddGroup[Any]]) -> None:
    """Note of each batch in these groups, which have been sent, that bookies may have entries of it."""
    for group in groups:
        if group.has_runs:
            for add in group.tokens:
                if isinstance(add, BatchAdd):
                    add.is_sent = True


class Failure:
    """The failure of a writer, and whether the application has been told of it.

    Every raise gives an exception a traceback, that of an awaited future too. So a failure that nobody raises
    but for the application has a traceback once the application knows of it.
    """

    def __init__(self, error: BookKeeperError) -> None:
        # An error of its own: tasks of ours raise the original among themselves.
        self.error = with_message(error, str(error), error.entry_id)
        self.error.__cause__ = error.__cause__
        self._is_known = False
        self._of_batches: list[BookKeeperError] = []

    @property
    def is_known(self) -> bool:
        """Return whether a call or a future has raised the failure."""
        return self._is_known or any(
            each.__traceback__ is not None for each in (self.error, *self._of_batches)
        )

    def to_raise(self) -> BookKeeperError:
        """Return the error for a call that raises it now."""
        return self.error.with_traceback(None)

    def fail(self, adds: Iterable[AnyAdd]) -> None:
        """Fail futures of the application, in order."""
        self._is_known = self.is_known
        self._of_batches += fail_all(adds, self.error)


class EntryWaiters:
    """Tasks that wait for entries beside the entries' own futures, in the order of the entries."""

    def __init__(self) -> None:
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def wait_for(self, entry_id: int) -> None:
        """Wait until `reached` is called with this entry or a later one; raises the error given to `fail`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((entry_id, waiter))
        await waiter

    def reached(self, entry_id: int) -> None:
        """Wake the waiters for this entry or an earlier one."""
        while self._waiters and self._waiters[0][0] <= entry_id:
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BookKeeperError) -> None:
        """Fail all waiters."""
        fail_all([waiter for _, waiter in self._waiters], error)
        self._waiters.clear()


def with_message(error: BookKeeperError, message: str, entry_id: int | None) -> BookKeeperError:
    """Build an error of the same class with another message."""
    copy = type(error)(message, ledger_id=error.ledger_id, bookie_id=error.bookie_id)
    copy.entry_id = entry_id
    copy.outcome = error.outcome
    return copy


def as_unknown(error: BookKeeperError) -> BookKeeperError:
    """Return the error with the outcome *unknown*: some bookies may have the entries that it fails (rule 8).

    An error that says *not done* may concern an ensemble change. The adds that waited for it had been sent.
    """
    if error.outcome is not Outcome.UNKNOWN:
        error.outcome = Outcome.UNKNOWN
    return error


def fenced_by_metadata(metadata: LedgerMetadata) -> LedgerFencedError:
    """Build the error of a writer that is fenced, as the metadata show."""
    end = f" at entry {metadata.last_entry}" if metadata.is_closed else ""
    term = f" under term {metadata.term}" if metadata.is_unbounded and not metadata.is_closed else ""
    return LedgerFencedError(
        f"ledger {metadata.ledger_id} has been taken over by another client: it is "
        f"{metadata.state.value}{end}{term}",
        ledger_id=metadata.ledger_id,
    )


def fenced_by_term(ledger_id: int, refusal: BookKeeperError) -> LedgerFencedError:
    """Build the error of a client whose term a bookie refuses."""
    return LedgerFencedError(
        f"ledger {ledger_id} has been taken over by another client ({refusal})",
        ledger_id=ledger_id,
        bookie_id=refusal.bookie_id,
    )
