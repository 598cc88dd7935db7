"""Long polls: the register of waiters, by ledger and known LAC, and the table of watched ledgers.

A waiter waits for the LAC of its ledger to rise above the LAC that it knows. It is any hashable value. Does
not own timers, connections or answers.

Invariant: a waiter leaves the register exactly once, by the `wake` for its LAC, by `drop` or by `drain`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, KeysView

Waiter = TypeVar("Waiter", bound="Hashable")


class PollRegister(Generic[Waiter]):
    """Waiters by ledger, in the order in which they came."""

    __slots__ = ("_count", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, dict[Waiter, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that have waiters, as a set-like view."""
        return self._waiting.keys()

    def add(self, ledger_id: int, known_lac: int, waiter: Waiter) -> None:
        """Register a waiter until the ledger's LAC is above `known_lac`."""
        waiters = self._waiting.setdefault(ledger_id, {})
        assert waiter not in waiters
        waiters[waiter] = known_lac
        self._count += 1

    def drop(self, ledger_id: int, waiter: Waiter) -> bool:
        """Take out a waiter. Return whether it was still registered."""
        waiters = self._waiting.get(ledger_id)
        if waiters is None or waiters.pop(waiter, None) is None:
            return False
        self._count -= 1
        if not waiters:
            del self._waiting[ledger_id]
        return True

    def wake(self, ledger_id: int, lac: int) -> list[Waiter]:
        """Take out and return the waiters of a ledger whose known LAC is below `lac`."""
        waiters = self._waiting.get(ledger_id)
        if waiters is None:
            return []
        woken = [waiter for waiter, known_lac in waiters.items() if known_lac < lac]
        for waiter in woken:
            del waiters[waiter]
        self._count -= len(woken)
        if not waiters:
            del self._waiting[ledger_id]
        return woken

    def drain(self) -> list[Waiter]:
        """Take out and return all waiters."""
        woken = [waiter for waiters in self._waiting.values() for waiter in waiters]
        self._waiting.clear()
        self._count = 0
        return woken


class WatchTable(Generic[Waiter]):
    """Which watcher watches which ledgers, for a LAC above which known one, and what has moved since.

    A watcher is a connection, which may watch thousands of ledgers. A ledger that has moved is not watched
    any more. It is kept for the watcher until `take`, so that no move is missed between two requests.

    Invariant: a watcher's ledger is watched, or has moved, or is neither; never both.
    """

    __slots__ = ("_count", "_ledgers", "_moved", "_watched")

    def __init__(self) -> None:
        self._ledgers: dict[int, dict[Waiter, int]] = {}  # known LACs
        self._watched: dict[Waiter, set[int]] = {}
        self._moved: dict[Waiter, dict[int, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many ledgers are watched or have moved, counted for each watcher."""
        return self._count

    @property
    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that are watched, as a set-like view."""
        return self._ledgers.keys()

    def count(self, watcher: Waiter) -> int:
        """Return how many ledgers a watcher watches, with those that have moved."""
        return len(self._watched.get(watcher, ())) + len(self._moved.get(watcher, ()))

    def holds(self, watcher: Waiter, ledger_id: int) -> bool:
        """Return whether the watcher watches the ledger, or it has moved and was not taken."""
        return ledger_id in self._watched.get(watcher, ()) or ledger_id in self._moved.get(watcher, ())

    def watch(self, watcher: Waiter, ledger_id: int, known_lac: int, lac: int) -> None:
        """Watch a ledger until its LAC, now `lac`, is above `known_lac`."""
        self.unwatch(watcher, ledger_id)
        self._count += 1
        if lac > known_lac:
            self._moved.setdefault(watcher, {})[ledger_id] = None
            return
        self._ledgers.setdefault(ledger_id, {})[watcher] = known_lac
        self._watched.setdefault(watcher, set()).add(ledger_id)

    def unwatch(self, watcher: Waiter, ledger_id: int) -> None:
        """Watch a ledger no more."""
        moved = self._moved.get(watcher)
        if moved is not None and ledger_id in moved:
            del moved[ledger_id]
            self._count -= 1
        elif ledger_id in self._watched.get(watcher, ()):
            self._leave(watcher, ledger_id)
            self._count -= 1

    def move(self, ledger_id: int, lac: int) -> list[Waiter]:
        """Note that a ledger's LAC is `lac` now. Return the watchers for which the ledger has moved."""
        watchers = self._ledgers.get(ledger_id, {})
        woken = [watcher for watcher, known_lac in watchers.items() if known_lac < lac]
        for watcher in woken:
            self._leave(watcher, ledger_id)
            self._moved.setdefault(watcher, {})[ledger_id] = None
        return woken

    def has_moved(self, watcher: Waiter) -> bool:
        """Return whether a ledger of the watcher has moved that was not taken."""
        return bool(self._moved.get(watcher))

    def take(self, watcher: Waiter, limit: int) -> list[int]:
        """Take out the ledgers of a watcher that have moved, at most `limit` of them, in order."""
        moved = self._moved.get(watcher, {})
        taken = list(islice(moved, limit))
        for ledger_id in taken:
            del moved[ledger_id]
        self._count -= len(taken)
        return taken

    def forget(self, watcher: Waiter) -> None:
        """Take out a watcher with all its ledgers."""
        self._count -= self.count(watcher)
        for ledger_id in self._watched.pop(watcher, ()):
            self._drop(watcher, ledger_id)
        self._moved.pop(watcher, None)

    def _leave(self, watcher: Waiter, ledger_id: int) -> None:
        self._watched[watcher].discard(ledger_id)
        self._drop(watcher, ledger_id)

    def _drop(self, watcher: Waiter, ledger_id: int) -> None:
        watchers = self._ledgers[ledger_id]
        del watchers[watcher]
        if not watchers:
            del self._ledgers[ledger_id]
