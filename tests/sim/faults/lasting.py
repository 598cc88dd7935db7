"""Lasting faults: they begin, stay for a while and end, though others of their kind may come meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class Lasting:
    """Keeps faults of one kind on one thing (their key) apart: none of them ends another one.

    Where several overlap, it is the last one to begin that one sees, and when it ends, the one before it that
    is still to last. Only when all have ended is the thing as it was.
    """

    def __init__(self, after: Callable[..., None]) -> None:
        """Take what has a function called later: `after(seconds, function, *arguments)`."""
        self._after = after
        self._under_way: dict[Hashable, list[Callable[[], object]]] = {}

    def begin(
        self, key: Hashable, seconds: float, begin: Callable[[], object], end: Callable[[], object]
    ) -> None:
        """Begin now and end later. `begin` is called again where a later one ends before this one does."""
        self._under_way.setdefault(key, []).append(begin)
        begin()
        self._after(seconds, self._over, key, begin, end)

    def _over(self, key: Hashable, begin: Callable[[], object], end: Callable[[], object]) -> None:
        under_way = self._under_way.get(key, [])
        if begin not in under_way:
            return  # all were forgotten since
        was_seen = under_way[-1] is begin
        under_way.remove(begin)
        if not under_way:
            del self._under_way[key]
            end()
        elif was_seen:
            under_way[-1]()

    def forget(self) -> None:
        """Have none of their ends do anything: everything has been healed."""
        self._under_way.clear()
