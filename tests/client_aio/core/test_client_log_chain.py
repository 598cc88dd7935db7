"""What writers and readers of logs decide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.add_window import AddWindow
from client_aio.core.log_chain import (
    Listing,
    LogCursor,
    RollLimits,
    check_begun,
    is_still_own,
    row_at_time,
    to_recover,
)
from metadata.errors import InvalidArgumentError, LogTruncatedError
from metadata.model.log import LogHead, LogRow, Position


def rows(*ids: int) -> list[LogRow]:
    return [LogRow(each, each, each * 1000) for each in ids]


def test_the_last_two_ledgers_are_recovered_or_as_many_as_there_are() -> None:
    assert to_recover(LogHead("a")) == []
    assert to_recover(LogHead("a").append(rows(3))) == rows(3)
    assert to_recover(LogHead("a").append(rows(3, 5, 9))) == rows(5, 9)


def test_an_append_is_made_from_one_state_of_the_list_only() -> None:
    listing = Listing(lambda head: head.append(rows(7)), 7)
    first = listing.apply(LogHead("a"))
    assert first is not None
    assert listing.apply(LogHead("a")) is None
    assert listing.is_met_by(first.append(rows(9)))
    assert not listing.is_met_by(LogHead("a").append(rows(9)))
    assert not Listing(lambda head: head, None).is_met_by(first)


@pytest.mark.parametrize(
    ("limits", "size", "entries", "due", "next_due"),
    [
        (RollLimits(bytes=800), 99, 10**9, False, False),
        (RollLimits(bytes=800), 100, 0, False, True),
        (RollLimits(bytes=800), 800, 0, True, True),
        (RollLimits(bytes=None, entries=8), 10**12, 0, False, False),
        (RollLimits(bytes=None, entries=8), 0, 1, False, True),
        (RollLimits(bytes=None, entries=8), 0, 8, True, True),
        (RollLimits(bytes=None, age_s=None), 10**12, 10**9, False, False),
    ],
)
def test_a_roll_is_due_at_the_first_limit_and_the_next_ledger_at_an_eighth_of_it(
    limits: RollLimits, size: int, entries: int, due: bool, next_due: bool
) -> None:
    assert (limits.is_due(size, entries), limits.is_next_due(size, entries)) == (due, next_due)


@pytest.mark.parametrize("wrong", [{"bytes": 0}, {"entries": -1}, {"age_s": 0.0}, {"bytes": "1"}])
def test_limits_are_positive(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="roll_"):
        RollLimits(**wrong)


def test_a_cursor_goes_from_row_to_row_and_over_gaps() -> None:
    head = LogHead("a").append(rows(3, 5, 9))
    cursor = LogCursor(Position(4, 7))
    assert cursor.step() is None
    cursor.learn(head, head.newest)
    step = cursor.step()
    assert step is not None
    assert (step.row.id, step.first_entry, step.is_last) == (5, 0, False)
    cursor.enter(step)
    assert cursor.at == Position(5, 0)
    cursor.given(step.row, 8)
    again = cursor.step()
    assert again is not None
    assert (again.row.id, again.first_entry) == (5, 9)
    assert cursor.after(again.row) == rows(9)[0]
    cursor.finished(again.row)
    last = cursor.step()
    assert last is not None
    assert (last.row.id, last.first_entry, last.is_last) == (9, 0, True)
    assert cursor.after(last.row) is None
    cursor.finished(last.row)
    assert cursor.step() is None


def test_a_reader_behind_the_beginning_is_told() -> None:
    head = LogHead("a").append(rows(3, 5, 9)).truncate(Position(5, 4), ())
    check_begun(head, Position(5, 4))
    with pytest.raises(LogTruncatedError, match="begins at 5:4") as truncated:
        check_begun(head, Position(5, 3))
    assert (truncated.value.ledger_id, truncated.value.entry_id) == (5, 3)
    with pytest.raises(LogTruncatedError):
        LogCursor(Position(3, 0)).learn(head, head.newest)


def test_a_time_is_the_row_before_the_last_that_was_listed_then() -> None:
    """The last one may have been listed ahead: what was written then went to the one before it."""
    assert row_at_time(rows(3, 5, 9), 2999) is None
    assert row_at_time(rows(3, 5, 9), 3000) == rows(3)[0]
    assert row_at_time(rows(3, 5, 9), 5000) == rows(3)[0]
    assert row_at_time(rows(3, 5, 9), 8999) == rows(3)[0]
    assert row_at_time(rows(3, 5, 9), 9000) == rows(5)[0]
    assert row_at_time([], 1) is None


def test_the_log_is_still_that_of_a_writer_while_the_last_row_is_a_ledger_that_it_made() -> None:
    head = LogHead("a").append(rows(3, 5))
    assert is_still_own(head, {5, 9})
    assert not is_still_own(head, {3})
    assert not is_still_own(head.append(rows(6)), {3, 5})
    assert not is_still_own(LogHead("a"), {3, 5})


@given(
    st.lists(st.lists(st.binary(max_size=5), max_size=9), max_size=5),
    st.sampled_from([(3, 3), (3, 2), (5, 2)]),
    st.integers(0, 3),
)
def test_a_window_returns_what_is_outstanding(
    groups: list[list[bytes]], sizes: tuple[int, int], acknowledged: int
) -> None:
    window: AddWindow[int] = AddWindow(
        ledger_id=1, content_term=1, ensemble_size=sizes[0], write_quorum=sizes[1], ack_quorum=1
    )
    payloads = [payload for group in groups for payload in group]
    number = 0
    sends = []
    for group in groups:
        for payload in group:
            window.add(payload, number)
            number += 1
        sends.append(window.flush())
    for sent in sends[:acknowledged]:
        for send in sent:
            window.acknowledged(send)
    window.add(b"not sent", number)
    first = window.lac + 1
    expected = [*payloads, b"not sent"][first:]
    dropped = window.abort()
    assert dropped.entries() == list(zip(expected, range(first, number + 1), strict=True))
    assert dropped.tokens() == list(range(first, number + 1))
