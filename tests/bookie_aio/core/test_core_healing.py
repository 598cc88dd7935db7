"""Healing: what a bookie owes, and which ledgers keep their marks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.core.healing import fence_of, is_settled, owed, why_marked
from client_aio.core.quorum import write_set
from metadata.ids import TERM_FINAL
from metadata.model.ledger import LedgerMetadata, UnboundedRecord

NAMES = [f"b{number}" for number in range(1, 8)]


def ledger(size: int = 1, write_quorum: int = 1, *, bookies: list[str], **more: Any) -> LedgerMetadata:
    return LedgerMetadata.new(
        7, ensemble_size=size, write_quorum=write_quorum, ack_quorum=1, bookies=bookies, **more
    )


@given(st.data())
def test_a_bookie_owes_the_entries_whose_write_sets_it_is_in(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    metadata = ledger(size, data.draw(st.integers(1, size)), bookies=data.draw(st.permutations(NAMES))[:size])
    last = data.draw(st.integers(-1, 20))
    for first in sorted(data.draw(st.sets(st.integers(1, 20), max_size=3))):
        metadata = metadata.change_ensemble(first, data.draw(st.permutations(NAMES))[:size])
    begun = [
        fragment
        for fragment in metadata.fragments
        if not fragment.first_entry or fragment.first_entry <= last
    ]
    mine = data.draw(st.sampled_from(NAMES))
    expected = set()
    for entry_id in range(last + 1):
        bookies = [each for each in begun if each.first_entry <= entry_id][-1].bookies
        seats = write_set(entry_id % size, size, metadata.write_quorum)
        if mine in [bookies[seat] for seat in seats]:
            expected.add(entry_id)
    found = [entry_id for one in owed(metadata, begun, last, mine) for entry_id in one.entry_ids]
    assert len(found) == len(set(found))
    assert set(found) == expected
    complete = [entry_id for one in owed(metadata, begun, None, mine) for entry_id in one.entry_ids]
    assert set(complete) == {one for one in expected if one < begun[-1].first_entry}


def test_only_a_ledger_that_is_over_loses_its_mark() -> None:
    open_ = ledger(bookies=["b1"])
    closed = open_.close(-1, 0)
    recovering = open_.begin_recovery()
    assert "OPEN" in why_marked(open_, "b1")
    assert "IN_RECOVERY" in why_marked(recovering, "b2")
    assert why_marked(closed, "b1") == ""
    assert fence_of(closed) == TERM_FINAL


def test_a_bookie_outside_of_the_last_fragment_of_an_unbounded_ledger_may_lose_its_mark() -> None:
    metadata = ledger(bookies=["b1"], unbounded=UnboundedRecord("mine")).take_over()
    assert "last fragment" in why_marked(metadata, "b1")
    assert (why_marked(metadata, "b2"), fence_of(metadata)) == ("", metadata.term)


@pytest.mark.parametrize(
    ("metadata", "settled"),
    [
        (ledger(bookies=["b1"]), False),
        (ledger(bookies=["b2"]), False),
        (ledger(bookies=["b1"]).close(-1, 0), False),
        (ledger(bookies=["b2"]).close(-1, 0), True),
        (ledger(bookies=["b2"], unbounded=UnboundedRecord("mine")), False),
    ],
)
def test_a_ledger_that_is_over_and_names_the_bookie_nowhere_needs_no_mark(
    metadata: LedgerMetadata, settled: bool
) -> None:
    assert is_settled(metadata, "b1") is settled
