"""Ranges of entry ids with strides: the entries that two ranges share. Pure."""

from __future__ import annotations

from math import gcd


def meeting(wanted: range, other: range) -> range:
    """Return the indexes of the entries of `wanted` that are in `other`; both ascend.

    Arithmetic, at a cost that does not depend on the lengths. From their first common entry on, the ranges
    have one in common every lcm(strides) entries.
    """
    nowhere = range(0)
    if not wanted or not other:
        return nowhere
    gap, common = other.start - wanted.start, gcd(wanted.step, other.step)
    if gap % common:
        return nowhere
    period = other.step // common  # of indexes, from one meeting to the next
    meets = gap // common * pow(wanted.step // common, -1, period) % period
    lowest = max(0, -(-gap // wanted.step))  # the first index at or above the other's first entry
    first = meets + max(0, -((meets - lowest) // period)) * period
    end = min(len(wanted), (other[-1] - wanted.start) // wanted.step + 1)
    return range(first, end, period) if first < end else nowhere


def mark(marks: bytearray, indexes: range) -> None:
    """Set the marks at these indexes to 1, in one assignment."""
    marks[indexes.start : indexes.stop : indexes.step] = b"\1" * len(indexes)


def runs_of(wanted: range, marks: bytes | bytearray, value: int) -> list[range]:
    """Return the wanted entries whose mark has that value, as ranges of neighbours in `wanted`."""
    runs: list[range] = []
    start = marks.find(value)
    while start >= 0:
        stop = marks.find(1 - value, start)
        runs.append(wanted[start : stop if stop >= 0 else len(marks)])
        start = marks.find(value, stop) if stop >= 0 else -1
    return runs
