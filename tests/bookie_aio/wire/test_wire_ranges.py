"""Ranges of entries with strides meet where they have entries in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire.listing import mark, meeting

_RANGES = st.builds(
    lambda first, count, stride: range(first, first + count * stride, stride),
    st.integers(0, 60), st.integers(0, 30), st.integers(1, 12),
)  # fmt: skip


@given(_RANGES, _RANGES)
def test_what_is_in_both_is_found_by_its_index(wanted: range, other: range) -> None:
    assert list(meeting(wanted, other)) == [index for index, one in enumerate(wanted) if one in other]


@given(_RANGES, st.lists(_RANGES))
def test_marks_are_set_where_some_range_has_the_entry(wanted: range, others: list[range]) -> None:
    marks = bytearray(len(wanted))
    for other in others:
        mark(marks, meeting(wanted, other))
    assert list(marks) == [any(one in other for other in others) for one in wanted]


def test_ranges_as_long_as_a_ledger_cost_no_more_than_short_ones() -> None:
    far = 1 << 62
    found = meeting(range(far, far + 300, 3), range(0, 1 << 63, 7))
    assert [(far + 3 * index) % 7 for index in found] == [0] * len(found)
    assert len(found) in (14, 15)
