"""Tokens and locks: the whole table, and which requests it is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.core.authorisation import (
    Access,
    Repairable,
    have_term,
    judge_token,
    ledger_at_stake,
    lock_of,
)
from bookie_aio.wire import messages as wire
from metadata.model.paged_list import PageRef

TOKEN = bytes(range(32))
LOCK = lock_of(TOKEN)


@pytest.mark.parametrize(
    ("lock", "token", "access"),
    [
        (b"", None, Access.ALLOW),
        (b"", TOKEN, Access.LOCK),
        (b"", TOKEN[:31], Access.REFUSE),
        (b"", b"", Access.REFUSE),
        (LOCK, TOKEN, Access.ALLOW),
        (LOCK, None, Access.REFUSE),
        (LOCK, b"", Access.REFUSE),
        (LOCK, bytes(32), Access.REFUSE),
        (LOCK, LOCK, Access.REFUSE),
    ],
)
def test_a_token_opens_its_lock_and_no_other(lock: bytes, token: bytes | None, access: Access) -> None:
    assert judge_token(lock, token) is access


@pytest.mark.parametrize(
    ("request_", "ledger_id"),
    [
        (wire.Add(7, 0, 0), 7),
        (wire.Add(7, 1, int(wire.AddFlag.RECOVERY)), 7),
        (wire.Add(7, 0, int(wire.AddFlag.DEFERRED_SYNC)), 7),
        (wire.Add(7, 0, int(wire.AddFlag.REPAIR)), None),
        (wire.Read(7, 0, 0, 0, 1, 1, 1), 7),
        (wire.Read(7, wire.NO_TERM, 0, 0, 1, 1, 1), None),
        (wire.ReadLac(7, 2**63 - 1, -1, 0), 7),
        (wire.ReadLac(7, wire.NO_TERM, -1, 0), None),
        (wire.WriteLac(7, 0, None), 7),
        (wire.Force(7, 0), 7),
        (wire.Delete(7), 7),
        (wire.ListEntries(7, 0), None),
        (wire.ListLedgers(7), None),
        (wire.Ping(), None),
        (wire.Info(), None),
        (wire.Watch(0), None),
        (wire.IsFree(7), None),
        (wire.LiftMark(7, 1), None),
        # The requests in these are authorised one by one, as those above.
        (wire.Adds(2), None),
        (wire.WriteLacs(2), None),
    ],
)
def test_whatever_changes_something_of_a_ledger_needs_its_token(
    request_: wire.Message, ledger_id: int | None
) -> None:
    assert ledger_at_stake(request_, has_token=False) == ledger_id
    if isinstance(request_, wire.Add):
        assert ledger_at_stake(request_, has_token=True) == 7  # of a repair too: a wrong one is refused


def test_every_operation_was_thought_of() -> None:
    assert len(wire.Op) == 16, "say in ledger_at_stake, and above, whether the new operation needs a token"


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    st.integers(0, 3),
    st.integers(0, 40),
    st.integers(0, 5),
)
def test_entries_have_the_content_terms_of_the_fragments(
    starts: list[int], in_pages: int, first: int, count: int
) -> None:
    """Fragments stand in pages of two, and then in the head."""
    fragments = tuple((start, 10 + number) for number, start in enumerate(sorted(starts)))
    cut = min(2 * in_pages, (len(fragments) - 1) // 2 * 2)
    pages = {PageRef(f"p{at}", fragments[at][0], 2): fragments[at : at + 2] for at in range(0, cut, 2)}
    known = Repairable(99, fragments[cut:], tuple(pages))

    def term_of(entry_id: int) -> int | None:
        return max(((start, term) for start, term in fragments if start <= entry_id), default=(0, None))[1]

    parts = known.parts(first, first + count)
    assert [each for _, entries in parts for each in entries] == list(range(first, first + count + 1))
    terms = {term_of(entry_id) for entry_id in range(first, first + count + 1)}
    for term in range(9, 17):
        found = [
            have_term(known.fragments if ref is None else pages[ref], entries, term) for ref, entries in parts
        ]
        assert all(found) == (terms == {term})
