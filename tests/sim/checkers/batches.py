"""Batches, as the checkers of single adds see them, and what holds of batches alone.

In an acknowledged batch each entry is acknowledged. So `entries_of` makes a future of each entry, which is
done with that of the batch. The names:

- NoOutOfOrderEntries, EntryOrderMaintained: a batch that is acknowledged names places for as many entries as
  it has.
- NotDoneIsNotThere: no entry of a batch that failed as *not done* is ever read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from metadata.errors import BookKeeperError, Outcome
from metadata.model.log import Position

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable, Collection, Sequence

    from tests.sim.checkers.invariants import History

SHARE = 0.3
"""So many of the bursts of adds are batches."""


def is_batch(rng: random.Random, count: int) -> bool:
    """Return whether the next adds are made as one batch; `rng` is drawn from for nothing else."""
    return rng.random() < SHARE and count > 0


class _EntryOf:
    """The future of one entry of a batch."""

    def __init__(self, batch: asyncio.Future[Any], place_of: Callable[[Any, Any], Any]) -> None:
        self._batch = batch
        self._place_of = place_of

    def __repr__(self) -> str:
        return f"<an entry of {self._batch!r}>"

    def done(self) -> bool:
        """As of a future."""
        return self._batch.done()

    def cancelled(self) -> bool:
        """As of a future."""
        return self._batch.cancelled()

    def cancel(self) -> bool:
        """As of a future: cancels that of the batch."""
        return self._batch.cancel()

    def exception(self) -> BaseException | None:
        """As of a future."""
        return self._batch.exception()

    def result(self) -> Any:
        """Return the place of the entry; None where it cannot be told."""
        return self._place_of(*self._batch.result())

    def first(self) -> Any:
        """Return the place of the first entry of the batch."""
        return self._batch.result()[0]

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """As of a future."""
        self._batch.add_done_callback(lambda _: call(self))


def entries_of(batch: asyncio.Future[Any], count: int) -> list[asyncio.Future[Any]]:
    """Return a future for each entry of a batch of a ledger."""
    return [
        cast("asyncio.Future[Any]", _EntryOf(batch, lambda first, _, index=index: first + index))
        for index in range(count)
    ]


def records_of(
    batch: asyncio.Future[Any], count: int, rows: Callable[[], Collection[int]]
) -> list[asyncio.Future[Any]]:
    """Return a future for each record of a batch of a log.

    A batch that lies in two ledgers fills the last one from its entry 0 on. Where it may lie in more than
    two, only the first and the last record have a place here.

    Args:
        rows: returns the ids of the rows that are or were listed.
    """

    def place(index: int, first: Position, last: Position) -> Position | None:
        if first.ledger_id == last.ledger_id:
            return Position(first.ledger_id, first.entry_id + index)
        if any(first.ledger_id < row < last.ledger_id for row in rows()):
            return {0: first, count - 1: last}.get(index)
        before = count - last.entry_id - 1
        if index < before:
            return Position(first.ledger_id, first.entry_id + index)
        return Position(last.ledger_id, index - before)

    return [
        cast(
            "asyncio.Future[Any]", _EntryOf(batch, lambda first, last, index=index: place(index, first, last))
        )
        for index in range(count)
    ]


class NotDone:
    """The entries of batches that failed as *not done*, by their values; each value is used once."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._values: set[bytes] = set()

    def watch(
        self,
        who: str,
        batch: asyncio.Future[Any],
        values: Sequence[bytes],
        seen: Callable[[], Collection[bytes]],
    ) -> None:
        """Watch a batch of these values.

        Args:
            seen: returns the values that somebody has read, or had acknowledged.
        """

        def done(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._check_places(who, *future.result(), len(values))
                return
            if not isinstance(error, BookKeeperError) or error.acknowledged is None:
                self._history.fail("Unexpected", f"{who} failed a batch with {error!r}")
            elif error.outcome is Outcome.NOT_DONE:
                self._values.update(values)
                known = self._values.intersection(seen())
                text = f"{who}: {error!r}, of a batch of {values[0]!r}; {known} is there"
                self._history.require(not known, "NotDoneIsNotThere", lambda: text)

        batch.add_done_callback(done)

    def _check_places(self, who: str, first: Any, last: Any, count: int) -> None:
        if isinstance(first, Position):
            is_right = last.entry_id < count if first.ledger_id < last.ledger_id else (
                first.ledger_id == last.ledger_id and last.entry_id - first.entry_id + 1 == count
            )  # fmt: skip
            name = "EntryOrderMaintained"
        else:
            is_right, name = last - first + 1 == count, "NoOutOfOrderEntries"
        self._history.require(is_right, name, lambda: f"{who}: a batch of {count} is at {first} to {last}")

    def look(self, who: str, value: bytes) -> None:
        """Note that somebody has read a value, or had it acknowledged."""
        if value in self._values:
            self._history.fail("NotDoneIsNotThere", f"{who} met {value[:60]!r}, which was not done")
