"""Futures of a writer: waiting for acknowledgements, and how the writer's failure reaches every waiter.

Invariants: futures complete in the order of their entries (rule 1). A future that its application has
cancelled is passed over: its add goes on, and the entries behind it keep their order. A failure reaches every
future once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from metadata.errors import LedgerFencedError, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from metadata.errors import BookKeeperError
    from metadata.model.ledger import LedgerMetadata


def fail_all(futures: Iterable[asyncio.Future[Any] | None], error: BookKeeperError) -> None:
    """Fail every future that is not done, in order.

    The error has no traceback: each `raise` would extend it with the frames of another caller.
    """
    for future in futures:
        if future is not None and not future.done():
            future.set_exception(error.with_traceback(None))
            future.exception()  # retrieved: asyncio logs no error if nobody awaits it


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

    @property
    def is_known(self) -> bool:
        """Return whether a call or a future has raised the failure."""
        return self._is_known or self.error.__traceback__ is not None

    def to_raise(self) -> BookKeeperError:
        """Return the error for a call that raises it now."""
        return self.error.with_traceback(None)

    def fail(self, futures: Iterable[asyncio.Future[Any] | None]) -> None:
        """Fail futures of the application, in order."""
        self._is_known = self.is_known
        fail_all(futures, self.error)


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
