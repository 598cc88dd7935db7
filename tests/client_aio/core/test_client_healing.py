"""What becomes of a writer's adds when its ledger or its term has failed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.add_window import AddWindow
from client_aio.core.healing import AppendAges, Backlog, Intake, OwnTerms
from metadata.errors import OperationTimeoutError
from metadata.model.ledger import LedgerMetadata, UnboundedRecord
from metadata.model.log import Position
from metadata.store import Version


@given(
    first=st.integers(0, 5), cut=st.integers(0, 6), held=st.integers(0, 4), last=st.integers(-1, 14)
)  # fmt: skip
def test_the_end_of_a_failed_ledger_decides_which_records_are_in_it(
    first: int, cut: int, held: int, last: int
) -> None:
    backlog: Backlog[int] = Backlog()
    backlog.cut_off(7, first, [(b"%d" % n, n) for n in range(cut)])
    for n in range(cut, cut + held):
        backlog.hold(b"%d" % n, n)
    assert backlog.undecided == (7 if cut else None)
    known = backlog.ended(last)
    count = max(0, min(cut, last + 1 - first))
    assert known == [(Position(7, first + n), n) for n in range(count)]
    assert backlog.settled == first + count
    assert backlog.take() == [(b"%d" % n, n) for n in range(count, cut + held)]
    assert (len(backlog), backlog.bytes_held, backlog.undecided) == (0, 0, None)


def test_no_record_is_sent_while_the_end_of_its_former_ledger_is_open() -> None:
    backlog: Backlog[int] = Backlog()
    backlog.cut_off(7, 0, [(b"a", 1)])
    with pytest.raises(AssertionError, match="open"):
        backlog.take()
    backlog.hold(b"b", 2)
    assert backlog.give_up() == [1, 2]
    assert (backlog.take(), backlog.settled, backlog.bytes_held, backlog.undecided) == ([], 2, 0, None)


def test_appends_are_overdue_when_the_oldest_outstanding_one_is_too_old() -> None:
    ages = AppendAges(10.0)
    assert not ages.is_overdue(0.0, 0, 0)
    assert not ages.is_overdue(5.0, 2, 0)
    assert not ages.is_overdue(14.0, 3, 0)
    assert ages.is_overdue(15.0, 3, 1)  # the second append is as old as the first
    assert not ages.is_overdue(15.0, 3, 2)
    assert ages.is_overdue(24.0, 3, 2)
    assert not ages.is_overdue(99.0, 3, 3)
    assert not ages.is_overdue(99.0, 4, 3)


def window(next_entry: int, term: int = 1) -> AddWindow[int]:
    return AddWindow(
        ledger_id=7, content_term=term, ensemble_size=3, write_quorum=3, ack_quorum=2, next_entry=next_entry
    )


@given(sent=st.integers(0, 5), unsent=st.integers(0, 3), held=st.integers(0, 4), data=st.data())
def test_entries_keep_their_ids_when_their_term_fails(
    sent: int, unsent: int, held: int, data: st.DataObject
) -> None:
    former = window(10)
    intake = Intake(former)
    for number in range(10, 10 + sent):
        intake.put(b"%d" % number, number)
    former.flush()
    for number in range(10 + sent, 10 + sent + unsent):
        intake.put(b"%d" % number, number)
    assert (intake.last_settled, intake.last_taken) == (9, 9 + sent + unsent)
    intake.hold_back()
    for number in range(10 + sent + unsent, 10 + sent + unsent + held):
        intake.put(b"%d" % number, number)
    last = 9 + sent + unsent + held
    assert (intake.last_settled, intake.last_taken, intake.is_holding) == (9, last, True)
    end = data.draw(st.integers(9, 9 + sent))
    following = window(end + 1, 2)
    assert intake.go_on(following, end) == [(number, number) for number in range(10, end + 1)]
    assert following.abort().entries() == [(b"%d" % number, number) for number in range(end + 1, last + 1)]
    assert (intake.last_settled, intake.shift, intake.is_holding) == (end, 0, False)


@given(overdue=st.integers(1, 6), later=st.integers(0, 4), data=st.data())
def test_entries_behind_overdue_ones_get_the_ids_behind_the_recovered_end(
    overdue: int, later: int, data: st.DataObject
) -> None:
    former = window(0)
    intake = Intake(former)
    for number in range(overdue):
        intake.put(b"", number)
    intake.hold_back()
    losses = intake.losses
    assert intake.give_up(OperationTimeoutError("overdue")) == list(range(overdue))
    with pytest.raises(OperationTimeoutError):
        intake.check(losses)
    intake.check(intake.losses)
    assert intake.last_settled == intake.last_taken == overdue - 1
    for number in range(overdue, overdue + later):
        intake.put(b"", number)
    end = data.draw(st.integers(-1, overdue - 1))
    assert intake.go_on(window(end + 1, 2), end) == []
    assert intake.last_taken == overdue + later - 1
    assert intake.last_settled - intake.shift == end
    assert intake.last_taken - intake.shift == end + later


def test_the_ledger_is_still_that_of_a_writer_while_it_is_under_a_term_that_the_writer_took() -> None:
    metadata = LedgerMetadata.new(
        1, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=("b1",), unbounded=UnboundedRecord("a")
    )
    own = OwnTerms(metadata.term)
    assert own.hold(metadata, Version(0))
    taken = own.take_over(metadata)
    assert taken is not None
    assert taken.term == metadata.term + 1
    assert own.take_over(taken) is None  # another client may have written it
    own.took(taken.term)
    assert own.take_over(taken) is not None


def test_a_term_is_that_of_a_writer_which_did_not_hear_that_it_took_it() -> None:
    metadata = LedgerMetadata.new(
        1, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=("b1",), unbounded=UnboundedRecord("a")
    )
    own = OwnTerms(metadata.term)
    taken = own.take_over(metadata)
    assert taken is not None
    token = own.draw(lambda: "ours")
    assert not own.hold(taken, Version(1, 0, ("another's",)))
    assert own.hold(taken, Version(2, 0, (token, "another's, who changed no term")))
    later = own.take_over(taken)
    assert later is not None
    own.draw(lambda: "ours too")
    again = later.take_over()
    assert not own.hold(again, Version(4, 0, (token, "ours too", "another's")))
