"""An unbounded ledger's metadata: terms, fragments, and the changes that are legal."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidArgumentError, InvalidTransitionError, MetadataCorruptError
from metadata.ids import TERM_COUNTED_MAX
from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState, UnboundedRecord
from metadata.model.paged_list import PageRef

BOOKIES = tuple(f"b{number}" for number in range(8))
FIRST, SECOND = BOOKIES[:3], BOOKIES[3:6]


def new(name: str = "payments", **changes: object) -> LedgerMetadata:
    arguments: dict[str, object] = {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "bookies": FIRST,
        "unbounded": UnboundedRecord(name),
    }
    return LedgerMetadata.new(7, **(arguments | changes))


def opened(metadata: LedgerMetadata, first_entry: int, bookies: tuple[str, ...] = FIRST) -> LedgerMetadata:
    """Take over, find the end before `first_entry`, and open."""
    taken = metadata.take_over()
    return taken.open_term(first_entry, bookies, length=10 * first_entry, fragments=taken.fragments)


def paged(metadata: LedgerMetadata, first: int, rows: int) -> LedgerMetadata:
    """Pretend that older fragments are in a page."""
    assert metadata.unbounded is not None
    return replace(metadata, unbounded=replace(metadata.unbounded, pages=(PageRef("page", first, rows),)))


@st.composite
def lives(draw: st.DrawFn) -> list[LedgerMetadata]:
    life = [new()]
    for _ in range(draw(st.integers(1, 12))):
        now = life[-1]
        following = now.last_fragment.first_entry + draw(st.integers(0, 3))
        bookies = tuple(draw(st.permutations(BOOKIES))[:3])
        if now.state is LedgerState.IN_RECOVERY and draw(st.booleans()):
            life.append(now.open_term(following, bookies, length=10 * following, fragments=now.fragments))
        elif now.state is LedgerState.OPEN and draw(st.booleans()):
            life.append(now.change_ensemble(following, bookies, length=10 * following))
        else:
            life.append(now.take_over())
    if life[-1].state is LedgerState.OPEN and draw(st.booleans()):
        end = life[-1].last_fragment.first_entry + draw(st.integers(-1, 5))
        life.append(life[-1].close(end, 10 * (end + 1)))
    return life


@given(lives())
def test_every_state_of_a_legal_life_survives_being_stored(life: list[LedgerMetadata]) -> None:
    for metadata in life:
        assert LedgerMetadata.from_json(metadata.to_json()) == metadata


@given(lives())
def test_terms_grow_and_each_fragment_is_of_the_term_that_opened_it(life: list[LedgerMetadata]) -> None:
    for before, after in pairwise(life):
        assert after.term >= before.term
        if after.state is LedgerState.IN_RECOVERY:
            assert after.term == before.term + 1
        if after.state is LedgerState.OPEN:
            assert after.last_fragment.content_term == after.term
        firsts = [fragment.first_entry for fragment in after.fragments]
        assert firsts == sorted(set(firsts))


def test_a_new_ledger_belongs_to_nobody() -> None:
    metadata = new()
    assert (metadata.term, metadata.state, metadata.is_unbounded) == (0, LedgerState.OPEN, True)
    assert metadata.fragments == (Fragment(0, FIRST, 0),)


def test_a_takeover_of_a_takeover_counts_on() -> None:
    assert new().take_over().take_over().term == 2


def test_opening_a_term_adds_a_fragment_of_that_term_behind_the_end() -> None:
    metadata = opened(opened(new(), 0), 5, SECOND)
    assert metadata.fragments == (Fragment(0, FIRST, 1), Fragment(5, SECOND, 2))
    assert metadata.length_before == 50


def test_an_empty_last_fragment_is_replaced_and_not_followed() -> None:
    metadata = opened(opened(opened(new(), 0), 5), 5, SECOND)
    assert metadata.fragments == (Fragment(0, FIRST, 1), Fragment(5, SECOND, 3))


def test_what_a_takeover_changed_behind_the_end_that_it_found_is_replaced() -> None:
    taken = opened(new(), 0).take_over()
    changed = (*taken.fragments, Fragment(4, SECOND, 1))
    metadata = taken.open_term(4, FIRST, length=40, fragments=changed)
    assert metadata.fragments == (Fragment(0, FIRST, 1), Fragment(4, FIRST, 2))


def test_an_ensemble_change_keeps_the_content_term() -> None:
    metadata = opened(new(), 0).change_ensemble(3, SECOND, length=30)
    assert metadata.last_fragment == Fragment(3, SECOND, 1)
    assert metadata.length_before == 30


def test_sealing_is_for_good() -> None:
    sealed = opened(new(), 0).close(4, 50)
    assert sealed.is_closed
    with pytest.raises(InvalidTransitionError, match="CLOSED at entry 4"):
        sealed.take_over()


def test_a_takeover_under_way_can_seal_nothing() -> None:
    with pytest.raises(InvalidTransitionError, match="IN_RECOVERY, not OPEN"):
        new().take_over().close(-1, 0)


def test_bounded_and_unbounded_ledgers_do_not_take_each_others_changes() -> None:
    bounded = new(unbounded=None)
    assert not bounded.is_unbounded
    with pytest.raises(InvalidTransitionError, match="bounded"):
        bounded.take_over()
    with pytest.raises(InvalidTransitionError, match="bounded"):
        bounded.begin_recovery().open_term(0, FIRST, length=0, fragments=bounded.fragments)
    with pytest.raises(InvalidTransitionError, match="unbounded"):
        new().begin_recovery()


def test_the_last_term_is_left_to_bounded_ledgers() -> None:
    last = replace(new().take_over(), term=TERM_COUNTED_MAX)
    with pytest.raises(InvalidTransitionError, match="used up"):
        last.take_over()


def test_guaranteed_write_quorum_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="guaranteed write quorum"):
        new(guaranteed_write_quorum=True)


def test_the_first_entry_is_the_first_that_is_listed() -> None:
    metadata = opened(opened(new(), 0), 5)
    assert metadata.first_entry == 0
    assert metadata.with_rows(metadata.rows.drop_before(5)).first_entry == 5
    trimmed = replace(metadata, fragments=metadata.fragments[1:])
    assert paged(trimmed, 2, 1).first_entry == 2


def test_an_older_release_does_not_take_it_for_a_bounded_ledger() -> None:
    assert json.loads(new().to_json())["format"] == 4
    assert json.loads(new(unbounded=None).to_json())["format"] == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("term",), 3),
        (("term",), -1),
        (("fragments", "rows", 0, 1), 9),
        (("fragments", "rows", 0, 2), ["b0", "b0", "b1"]),
        (("fragments", "rows"), []),
        (("fragments", "rows", 0, 0), "0"),
        (("fragments", "pages"), [["page", 8, 1]]),
        (("fragments", "pages"), [["page", float("inf"), 1]]),
        (("unbounded", "name"), "7"),
        (("length_before",), -1),
        (("unbounded",), None),
        (("guaranteed_write_quorum",), True),
    ],
    ids=str,
)
def test_damaged_metadata_are_refused(path: tuple[str | int, ...], value: object) -> None:
    document = json.loads(opened(opened(new(), 0), 5).to_json())
    *steps, last = path
    place = document
    for step in steps:
        place = place[step]
    place[last] = value
    with pytest.raises(MetadataCorruptError):
        LedgerMetadata.from_json(json.dumps(document).encode())
