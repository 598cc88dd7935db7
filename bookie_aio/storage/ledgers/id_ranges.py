"""Sets of ids as ranges: small where ids come in runs, as the ids of deleted ledgers do. Pure.
Invariant: the ranges ascend, and between two of them at least one id is missing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class IdRanges:
    """A set of ids from 0 to 2^63 − 1 that only grows."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Take (first, last) of ascending ranges, as `ranges` returns them."""
        self._firsts, self._lasts = array("q"), array("q")
        for first, last in ranges:
            if first > last or (self._lasts and first <= self._lasts[-1] + 1):
                raise ValueError(f"{first} to {last} is no range, or not in order")
            self._firsts.append(first)
            self._lasts.append(last)

    def add(self, one: int) -> None:
        """Put an id into the set."""
        at = bisect_right(self._firsts, one)  # the first range that starts behind it
        if at and one <= self._lasts[at - 1]:
            return
        joins_before = at > 0 and self._lasts[at - 1] + 1 == one
        joins_after = at < len(self._firsts) and self._firsts[at] - 1 == one
        if joins_before and joins_after:
            self._lasts[at - 1] = self._lasts[at]
            del self._firsts[at], self._lasts[at]
        elif joins_before:
            self._lasts[at - 1] = one
        elif joins_after:
            self._firsts[at] = one
        else:
            self._firsts.insert(at, one)
            self._lasts.insert(at, one)

    def __contains__(self, one: int) -> bool:
        firsts = self._firsts
        if not firsts:
            return False
        at = bisect_right(firsts, one)
        return at > 0 and one <= self._lasts[at - 1]

    def __len__(self) -> int:
        """Return the number of ranges, not of ids."""
        return len(self._firsts)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Return first and last id of each range, ascending."""
        return zip(self._firsts, self._lasts, strict=True)

    def packed(self) -> bytes:
        """Return first and last id of each range, ascending: 8 bytes each, little-endian.

        Fast for millions of ranges.
        """
        both = array("q", bytes(16 * len(self._firsts)))
        both[0::2], both[1::2] = self._firsts, self._lasts
        return both.tobytes()

    def ranges_from(self, one: int) -> Iterator[tuple[int, int]]:
        """Return first and last id of each range that does not end before an id, ascending."""
        for at in range(bisect_left(self._lasts, one), len(self._firsts)):
            yield self._firsts[at], self._lasts[at]
