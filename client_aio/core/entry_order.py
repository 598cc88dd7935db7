"""Entry ids that the application assigns: what arrives out of order waits until it is contiguous.

Owns the entries behind a gap. An id may be given once: one that has been taken, or waits, is refused, since
two payloads under one id cannot both be what the reader gets.

Invariant: every id below `following` was taken; no id that waits is `following`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from metadata.errors import InvalidArgumentError
from metadata.ids import ENTRY_ID_MAX

Item = TypeVar("Item")


class EntryOrder(Generic[Item]):
    """Puts entries into the order of their ids, from 0 on without gaps."""

    def __init__(self) -> None:
        self.following = 0
        self._waiting: dict[int, Item] = {}

    def take(self, entry_id: int, item: Item) -> list[Item]:
        """Take an entry; returns those that are contiguous now, in order.

        Raises:
            InvalidArgumentError: not an entry id, or one that was given before. Nothing was taken.
        """
        if not isinstance(entry_id, int) or isinstance(entry_id, bool) or not 0 <= entry_id <= ENTRY_ID_MAX:
            raise InvalidArgumentError(f"entry id {entry_id!r} is not an integer from 0 to {ENTRY_ID_MAX}")
        if entry_id < self.following or entry_id in self._waiting:
            raise InvalidArgumentError(
                f"entry id {entry_id} was added before; every id of a ledger is given once", entry_id=entry_id
            )
        self._waiting[entry_id] = item
        ready: list[Item] = []
        while self.following in self._waiting:
            ready.append(self._waiting.pop(self.following))
            self.following += 1
        return ready

    @property
    def waiting(self) -> list[int]:
        """Give the ids that wait behind a gap, ascending."""
        return sorted(self._waiting)

    def give_up(self) -> list[Item]:
        """Take back everything that waits, by id."""
        items = [self._waiting[entry_id] for entry_id in sorted(self._waiting)]
        self._waiting.clear()
        return items
