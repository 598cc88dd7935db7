"""Terms: the two changes to the metadata that a takeover makes, and what refuses them."""

from __future__ import annotations

from dataclasses import replace

from client_aio.core.takeover import TermOpening, take_over
from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState, UnboundedRecord
from metadata.model.paged_list import PageRef

BOOKIES, OTHERS = ("b1", "b2", "b3"), ("b4", "b5", "b6")


def ledger() -> LedgerMetadata:
    """One whose first term left entries 0 to 4, and whose second one took over at 5."""
    new = LedgerMetadata.new(
        7, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=BOOKIES, unbounded=UnboundedRecord("x")
    )
    first = new.take_over().open_term(0, BOOKIES, length=0, fragments=new.fragments)
    return first.take_over().open_term(5, BOOKIES, length=50, fragments=first.fragments)


def test_a_takeover_counts_up_also_where_another_one_is_under_way() -> None:
    taken = take_over(ledger())
    assert taken is not None
    assert (taken.state, taken.term) == (LedgerState.IN_RECOVERY, 3)
    again = take_over(taken)
    assert again is not None
    assert again.term == 4


def test_nobody_takes_a_sealed_ledger_over() -> None:
    assert take_over(ledger().close(9, 100)) is None


def opening(known: LedgerMetadata, last_entry: int = 9) -> TermOpening:
    return TermOpening(known, known.fragments, last_entry, 100, OTHERS)


def test_a_term_opens_behind_the_end() -> None:
    known = ledger().take_over()
    opened = opening(known).apply(known)
    assert opened is not None
    assert opened.state is LedgerState.OPEN
    assert opened.last_fragment == Fragment(10, OTHERS, 3)
    assert opened.fragments[:-1] == known.fragments


def test_a_later_takeover_refuses_it_wherever_that_has_come_to() -> None:
    known = ledger().take_over()
    later = known.take_over()
    assert opening(known).apply(later) is None
    assert opening(known).apply(later.open_term(10, OTHERS, length=100, fragments=later.fragments)) is None
    sealed = later.open_term(10, OTHERS, length=100, fragments=later.fragments).close(9, 100)
    assert opening(known).apply(sealed) is None


def test_its_own_opening_is_not_made_twice() -> None:
    known = ledger().take_over()
    opened = opening(known).apply(known)
    assert opened is not None
    assert opening(known).apply(opened) is None
    # Nobody else opens it under that term: this is what a lost answer has left.
    assert opening(known).is_met_by(opened.replace_bookie(0, "b2", "b9"))
    assert not opening(known).is_met_by(known)
    assert not opening(known).is_met_by(opened.take_over())


def test_what_others_made_of_earlier_fragments_is_kept() -> None:
    known = ledger().take_over()
    repaired = known.replace_bookie(0, "b2", "b9")
    opened = opening(known).apply(repaired)
    assert opened is not None
    assert opened.fragments[0] == Fragment(0, ("b1", "b9", "b3"), 1)
    assert known.unbounded is not None
    paged = replace(
        known, fragments=known.fragments[1:], unbounded=replace(known.unbounded, pages=(PageRef("p", 0, 1),))
    )
    opened = opening(known).apply(paged)
    assert opened is not None
    assert opened.fragments == (known.last_fragment, Fragment(10, OTHERS, 3))
    assert opened.first_entry == 0


def test_ensemble_changes_of_the_takeover_are_written_with_it() -> None:
    known = ledger().take_over()
    changed = (*known.fragments, Fragment(7, OTHERS, 2))
    opened = TermOpening(known, changed, 9, 100, BOOKIES).apply(known)
    assert opened is not None
    assert opened.fragments[1:] == (Fragment(5, BOOKIES, 2), Fragment(7, OTHERS, 2), Fragment(10, BOOKIES, 3))
