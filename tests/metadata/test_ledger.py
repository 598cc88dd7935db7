"""Ledger metadata: legal values, legal transitions, and a stored form that says no more and no less."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidArgumentError, InvalidTransitionError, MetadataCorruptError
from metadata.ids import ENTRY_ID_MAX, TERM_FINAL
from metadata.keys import check_value
from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState, check_custom
from metadata.store import VALUE_BYTES_MAX

BOOKIES = [f"b{number}" for number in range(8)]


def new(**changes: object) -> LedgerMetadata:
    arguments: dict[str, object] = {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "bookies": BOOKIES[:3],
        "custom": {"app": b"demo"},
    }
    return LedgerMetadata.new(7, **(arguments | changes))


@st.composite
def lives(draw: st.DrawFn) -> list[LedgerMetadata]:
    """A ledger's metadata through a random legal life."""
    size = draw(st.integers(1, 5))
    quorum = draw(st.integers(1, size))
    life = [
        new(
            ensemble_size=size,
            write_quorum=quorum,
            ack_quorum=draw(st.integers(1, quorum)),
            bookies=BOOKIES[:size],
        )
    ]
    for _ in range(draw(st.integers(0, 6))):
        last = life[-1].last_fragment
        ensemble = draw(st.permutations(BOOKIES))[:size]
        life.append(life[-1].change_ensemble(last.first_entry + draw(st.integers(0, 100)), ensemble))
    if draw(st.booleans()):
        life.append(life[-1].begin_recovery())
    if draw(st.booleans()):
        end = life[-1].last_fragment.first_entry - 1 + draw(st.integers(0, 100))
        life.append(life[-1].close(end, draw(st.integers(0, 10**9))))
    return life


@given(lives())
def test_every_state_of_a_legal_life_survives_being_stored(life: list[LedgerMetadata]) -> None:
    for metadata in life:
        assert LedgerMetadata.from_json(metadata.to_json()) == metadata


@given(lives(), st.integers(0, 1000))
def test_the_fragment_of_an_entry_is_the_last_that_starts_at_or_before_it(
    life: list[LedgerMetadata], entry: int
) -> None:
    metadata = life[-1]
    (expected,) = [each for each in metadata.fragments if each.first_entry <= entry][-1:]
    assert metadata.fragment_of(entry) == expected


@given(lives())
def test_a_closed_ledger_changes_no_more(life: list[LedgerMetadata]) -> None:
    metadata = life[-1]
    if metadata.is_closed:
        first = metadata.last_fragment.first_entry
        for change in (
            lambda: metadata.change_ensemble(first, metadata.last_fragment.bookies),
            metadata.begin_recovery,
            lambda: metadata.close(first, 0),
        ):
            with pytest.raises(InvalidTransitionError):
                change()


@given(lives(), st.data())
def test_damage_to_the_stored_form_is_found_or_harmless(
    life: list[LedgerMetadata], data: st.DataObject
) -> None:
    text = bytearray(life[-1].to_json())
    position = data.draw(st.integers(0, len(text) - 1))
    text[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MetadataCorruptError):
        LedgerMetadata.from_json(bytes(text))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ack_quorum": 0}, "ack_quorum 0"),
        ({"ack_quorum": 4}, "write_quorum 3 is below"),
        ({"write_quorum": 4}, "ensemble_size 3 is below"),
        ({"ensemble_size": 65}, "above 64"),
        ({"ensemble_size": True}, "not an integer"),
        ({"ensemble_size": 2.0}, "not an integer"),
        ({"bookies": BOOKIES[:2]}, "distinct bookies"),
        ({"bookies": ["b1", "b1", "b2"]}, "distinct bookies"),
        ({"digest": "md5"}, "md5"),
        ({"custom": {"a": "text"}}, "values are bytes"),
        ({"custom": {1: b"x"}}, "keys are str"),
        ({"custom": {"a": b"x" * 65536}}, "64 KiB"),
    ],
)
def test_a_ledger_that_could_not_work_is_not_made(changes: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        new(**changes)


def test_an_ensemble_change_at_the_same_entry_replaces_the_last_fragment() -> None:
    changed = new().change_ensemble(0, BOOKIES[3:6])
    assert changed.fragments == (Fragment(0, tuple(BOOKIES[3:6])),)
    again = changed.change_ensemble(5, BOOKIES[:3])
    assert [each.first_entry for each in again.fragments] == [0, 5]
    with pytest.raises(InvalidTransitionError, match="before"):
        again.change_ensemble(4, BOOKIES[:3])


@pytest.mark.parametrize("custom_bytes", range(0, 150, 12))  # so that the last one fits by little, or much
@pytest.mark.parametrize("ensemble_size", [1, 3, 64])
def test_after_as_many_changes_as_fit_the_ledger_can_still_be_closed(
    ensemble_size: int, custom_bytes: int
) -> None:
    longest = [f"{number:0>100}" for number in range(ensemble_size)]
    metadata = new(
        ensemble_size=ensemble_size,
        write_quorum=1,
        ack_quorum=1,
        bookies=longest,
        custom={"app": bytes(custom_bytes)},
    )
    assert metadata.changes_that_fit(7) == 7
    changes = metadata.changes_that_fit(10**6)
    more = [Fragment(ENTRY_ID_MAX - n, tuple(longest), TERM_FINAL) for n in reversed(range(changes))]
    full = replace(metadata, fragments=(*metadata.fragments, *more))
    assert full.changes_that_fit(10**6) == 0
    closed = full.begin_recovery().close(ENTRY_ID_MAX, 2**63 - 1).to_json()
    assert closed == check_value(closed)
    one_more = len(json.dumps({"first_entry": ENTRY_ID_MAX, "content_term": TERM_FINAL, "bookies": longest}))
    assert VALUE_BYTES_MAX - len(closed) < one_more + 256


def test_recovery_comes_once_and_only_it_closes_with_new_fragments() -> None:
    metadata = new()
    with pytest.raises(InvalidTransitionError):
        metadata.close(3, 10, fragments=metadata.fragments)
    recovering = metadata.begin_recovery()
    with pytest.raises(InvalidTransitionError):
        recovering.begin_recovery()
    with pytest.raises(InvalidTransitionError):
        recovering.change_ensemble(0, BOOKIES[3:6])
    fragments = (*metadata.fragments, Fragment(2, tuple(BOOKIES[3:6])))
    closed = recovering.close(3, 10, fragments=fragments)
    assert (closed.state, closed.last_entry, closed.fragments) == (LedgerState.CLOSED, 3, fragments)


def test_a_ledger_does_not_end_before_its_last_fragment() -> None:
    metadata = new().change_ensemble(5, BOOKIES[3:6])
    assert metadata.close(4, 0).last_entry == 4
    with pytest.raises(InvalidTransitionError):
        metadata.close(3, 0)
    assert new().close(-1, 0).last_entry == -1


def test_repair_replaces_one_bookie_in_any_state() -> None:
    closed = new().close(9, 10)
    repaired = closed.replace_bookie(0, "b1", "b7")
    assert repaired.fragments[0].bookies == ("b0", "b7", "b2")
    assert repaired.is_closed
    with pytest.raises(InvalidTransitionError):
        repaired.replace_bookie(0, "b1", "b6")
    with pytest.raises(InvalidTransitionError):
        repaired.replace_bookie(0, "b0", "b7")


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"ledger": -1},
        {"ledger": "7"},
        {"state": "ASLEEP"},
        {"ack_quorum": 0},
        {"digest": "md5"},
        {"fragments": []},
        {"fragments": [{"first_entry": 1, "content_term": 0, "bookies": ["b1", "b2", "b3"]}]},
        {"fragments": [{"first_entry": 0, "content_term": 0, "bookies": ["b1", "b2"]}]},
        {"fragments": [{"first_entry": 0, "content_term": 0, "bookies": ["b1", "b2", "a/b"]}]},
        {"last_entry": 5},
        {"state": "CLOSED"},
        {"custom": {"a": "not base64!"}},
        {"custom": ["a"]},
        {"term": True},
    ],
)
def test_a_wrong_stored_form_is_a_typed_error(changes: dict[str, object]) -> None:
    document = json.loads(new().to_json()) | changes
    with pytest.raises(MetadataCorruptError):
        LedgerMetadata.from_json(json.dumps(document).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff\xfe", b'"x"', b"{}", b"[" * 100_000])
def test_what_is_no_stored_form_is_a_typed_error(text: bytes) -> None:
    with pytest.raises(MetadataCorruptError):
        LedgerMetadata.from_json(text)


def test_a_missing_field_is_a_typed_error() -> None:
    document = json.loads(new().to_json())
    for name in document:
        with pytest.raises(MetadataCorruptError):
            LedgerMetadata.from_json(
                json.dumps({key: value for key, value in document.items() if key != name}).encode()
            )


def test_custom_metadata_is_copied_and_cannot_be_changed() -> None:
    custom = {"a": b"1"}
    metadata = new(custom=custom)
    custom["a"] = b"2"
    assert metadata.custom["a"] == b"1"
    assert check_custom({"a": memoryview(b"x")}) == {"a": b"x"}
    assert not hasattr(metadata.custom, "__setitem__")
    assert replace(metadata) == metadata


def test_a_close_at_the_ack_quorum_is_recorded_and_taken_out_by_a_repair() -> None:
    guaranteed = new(guaranteed_write_quorum=True)
    closed = guaranteed.close(9, 10, below_write_quorum_from=4)
    assert LedgerMetadata.from_json(closed.to_json()) == closed
    assert closed.below_write_quorum_from == 4
    assert closed.fully_replicated() == guaranteed.close(9, 10)
    assert "below_write_quorum_from" not in json.loads(guaranteed.close(9, 10).to_json())
    with pytest.raises(InvalidTransitionError):
        new().close(9, 10, below_write_quorum_from=4)


def test_each_change_keeps_the_length_below_the_last_fragment() -> None:
    changed = new().change_ensemble(5, ("b0", "b3", "b2"), length=70)
    assert changed.length_before == 70
    assert LedgerMetadata.from_json(changed.to_json()) == changed
    assert changed.begin_recovery().length_before == 70
