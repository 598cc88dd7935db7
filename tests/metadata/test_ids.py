"""The form of ids and the layout of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidArgumentError, MetadataCorruptError
from metadata.ids import (
    LEDGER_ID_MAX,
    available_key,
    check_bookie_id,
    check_name,
    cookie_key,
    ledger_id_of,
    ledger_key,
)
from metadata.keys import check_key

LEDGER_IDS = st.integers(0, LEDGER_ID_MAX)


@given(LEDGER_IDS)
def test_a_ledger_key_gives_its_id_back(ledger_id: int) -> None:
    key = ledger_key(ledger_id)
    assert ledger_id_of(key) == ledger_id
    assert check_key(key) == key


@given(LEDGER_IDS, LEDGER_IDS)
def test_keys_sort_as_ids_do(one: int, two: int) -> None:
    assert (ledger_key(one) < ledger_key(two)) == (one < two)


@given(LEDGER_IDS)
def test_no_level_of_the_hierarchy_has_more_than_ten_thousand_names(ledger_id: int) -> None:
    assert [len(part) for part in ledger_key(ledger_id).split("/")[1:]] == [3, 4, 4, 4, 4]


@pytest.mark.parametrize("ledger_id", [-1, LEDGER_ID_MAX + 1, True, "7", 7.0, None])
def test_a_wrong_ledger_id_is_refused(ledger_id: int) -> None:
    with pytest.raises(InvalidArgumentError):
        ledger_key(ledger_id)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "ledgers",
        "other/000/0000/0000/0000/0007",
        "ledgers/000/0000/0000/0000",
        "ledgers/0000/000/0000/0000/0007",
        "ledgers/000/0000/0000/0000/000x",
        "ledgers/000/0000/0000/0000/000٣",
        "ledgers/999/9999/9999/9999/9999",
    ],
)
def test_what_is_no_ledgers_key_is_refused(key: str) -> None:
    with pytest.raises(MetadataCorruptError):
        ledger_id_of(key)


@pytest.mark.parametrize("bookie_id", ["b1", "10.0.0.1:3181", "A" * 100, "a_b-c.d"])
def test_a_bookie_id_names_its_keys(bookie_id: str) -> None:
    assert check_bookie_id(bookie_id) == bookie_id
    assert check_key(available_key(bookie_id)).endswith(f"/{bookie_id}")
    assert check_key(cookie_key(bookie_id)).endswith(f"/{bookie_id}")


@pytest.mark.parametrize("bookie_id", ["", ".", "-a", "a/b", "a b", "A" * 101, "é", "a\n", 7, None])
def test_a_wrong_bookie_id_is_refused(bookie_id: str) -> None:
    with pytest.raises(InvalidArgumentError):
        check_bookie_id(bookie_id)


@pytest.mark.parametrize("name", ["payments", "_", "a" * 100, "Orders.eu-1:x"])
def test_legal_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "7", "7a", "-a", "a/b", "a b", "ä", "a" * 101, None, 7, "."])
def test_a_name_is_no_number_and_can_be_the_name_of_a_node(name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        check_name(name)
