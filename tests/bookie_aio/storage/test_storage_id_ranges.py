"""Ranges of ids: a set, whatever the order in which its members came."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.storage.ledgers.checkpoint import IdRanges


@given(st.lists(st.integers(0, 40) | st.integers(2**63 - 3, 2**63 - 1)), st.sets(st.integers(0, 45)))
def test_is_the_set_of_what_was_added(added: list[int], others: set[int]) -> None:
    ranges = IdRanges()
    for one in added:
        ranges.add(one)
    assert all(one in ranges for one in added)
    assert not any(one in ranges for one in others - set(added))
    parts = list(ranges.ranges())
    assert [one for first, last in parts for one in range(first, last + 1)] == sorted(set(added))
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(parts))
    assert list(IdRanges(parts).ranges()) == parts
    assert list(struct.iter_unpack("<QQ", ranges.packed())) == parts


def test_ids_that_come_in_a_run_take_one_range() -> None:
    ranges = IdRanges()
    for one in (*range(0, 1000, 2), *range(1, 1000, 2)):
        ranges.add(one)
    assert (len(ranges), list(ranges.ranges())) == (1, [(0, 999)])


@pytest.mark.parametrize("parts", [[(2, 1)], [(1, 2), (3, 4)], [(5, 6), (1, 2)]])
def test_what_are_no_ascending_ranges_is_refused(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="no range"):
        IdRanges(parts)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12))
def test_a_range_is_added_like_its_ids(added: list[tuple[int, int]]) -> None:
    ranges, ids = IdRanges(), set[int]()
    for first, more in added:
        assert ranges.covers(first, first + more) == ids.issuperset(range(first, first + more + 1))
        ranges.add_range(first, first + more)
        ids.update(range(first, first + more + 1))
        assert ranges.covers(first, first + more)
    one_by_one = IdRanges()
    for one in ids:
        one_by_one.add(one)
    assert list(ranges.ranges()) == list(one_by_one.ranges())
