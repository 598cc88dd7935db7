"""Long polls: the register of waiters, by ledger and known LAC.

A waiter waits for the LAC of its ledger to rise above the LAC that it knows. It is any hashable value. Does
not own timers, connections or answers.

Invariant: a waiter leaves the register exactly once, by the `wake` for its LAC, by `drop` or by `drain`.
"""

from __future__ import annotations

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
