"""Which bookies a recovery asks, and which of the entries that they list are out of place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from bookie_aio.wire.listing import Row
from client_aio.ledger.recovery_scope import (
    RecoveryScope,
    first_displaced,
    first_short,
    recovery_scope,
)
from metadata.access.bookies import SetBack, SetBacks
from metadata.backends.memory import MemoryMetadataStore
from metadata.ids import available_key, cookie_key
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from client_aio.context import ClientContext

NAMED = ("b1", "b2", "b3", "b4")


def ledger(ledger_id: int = 7, *, write_quorum: int = 3) -> LedgerMetadata:
    """Return a ledger whose last fragment begins at entry 4."""
    first = LedgerMetadata.new(
        ledger_id, ensemble_size=4, write_quorum=write_quorum, ack_quorum=2, bookies=("b1", "b2", "b3", "b9")
    )
    return first.change_ensemble(4, NAMED, length=40)


def event(raised_to: int, *answered: str) -> SetBack:
    return SetBack(f"token-{raised_to}", "b1", 1, raised_to, sorted(answered), {"b7": ["start", 4]})


@pytest.mark.parametrize(
    ("seat", "rows", "first"),
    [
        (0, [], None),
        (0, [Row(4, 0, 1, 1), Row(6, 0, 2, 1), Row(8, 0, 1, 1)], None),
        (0, [Row(4, 0, 2, 1)], 5),  # entry 5 goes to the seats 1, 2 and 3
        (0, [Row(8, 0, 9, 4)], None),
        (0, [Row(9, 0, 9, 4), Row(4, 0, 1, 1)], 9),
        (0, [Row(1, 0, 1, 4)], None),  # before the fragment
        (4, [Row(8, 0, 9, 4)], 8),  # not named
        (4, [Row(8, 0, 9, 4), Row(6, 0, 1, 1)], 6),
        (4, [Row(0, 0, 3, 1)], None),
        (4, [Row(0, 0, 6, 1)], 4),
        (4, [Row(0, 0, 60, 1)], 4),
        (4, [Row(1, 0, 60, 4)], 5),
    ],
)
def test_an_entry_is_out_of_place_at_a_bookie_outside_of_its_write_set(
    seat: int, rows: list[Row], first: int | None
) -> None:
    assert first_displaced(ledger(), seat, rows) == first


ALL = [Row(0, 0, 20, 1)]


@pytest.mark.parametrize(
    ("rows", "last", "first"),
    [
        ({}, 3, None),  # before the fragment
        ({}, 9, 4),
        (dict.fromkeys(range(4), ALL), 19, None),
        (dict.fromkeys(range(4), ALL), 20, 20),
        ({0: ALL, 1: ALL, 2: ALL}, 19, None),  # each write set has two of them
        ({0: ALL, 1: ALL}, 19, 5),  # the entries 5, 9, … go to the seats 1, 2 and 3
        ({0: ALL, 1: ALL, 2: [Row(0, 0, 9, 1), Row(10, 0, 9, 1)]}, 19, 9),
        ({0: ALL, 1: ALL, 2: [Row(5, 0, 2, 4), Row(6, 0, 9, 4)]}, 19, 13),
        ({0: ALL, 1: ALL, 2: [Row(5, 1, 9, 4), Row(6, 0, 9, 4)]}, 19, None),
    ],
)
def test_an_entry_is_short_that_fewer_of_the_named_bookies_than_a_quorum_list(
    rows: dict[int, list[Row]], last: int, first: int | None
) -> None:
    assert first_short(ledger(), rows, last) == first


def test_with_guaranteed_write_quorum_all_of_a_write_set_have_to_list_an_entry() -> None:
    metadata = replace(ledger(), guaranteed_write_quorum=True)
    assert first_short(metadata, dict.fromkeys(range(4), ALL), 19) is None
    assert first_short(metadata, {0: ALL, 1: ALL, 2: ALL}, 19) == 5


@pytest.mark.parametrize(
    ("events", "asked"),
    [
        ([], NAMED),
        ([event(7)], NAMED),  # the ledger is newer than the copy
        ([event(8)], (*NAMED, "b5", "b6", "b7", "b8")),
        ([event(100), event(5)], (*NAMED, "b5", "b6", "b7", "b8")),
        ([event(8, "b5", "b6", "b7", "b8")], (*NAMED, "b5", "b8")),  # those that run
        ([event(8, "b5", "b6", "b8"), event(9, "b7", "b8")], (*NAMED, "b5", "b6", "b7", "b8")),
    ],
)
async def test_any_bookie_is_asked_where_the_metadata_may_be_older(
    events: list[SetBack], asked: tuple[str, ...]
) -> None:
    store = MemoryMetadataStore()
    for name in ("b1", "b2", "b3", "b4", "b5", "b6"):
        await store.create(cookie_key(name), b"{}")
    for name in ("b1", "b2", "b5", "b8"):  # the copy lacks the cookie of b8
        await store.create(available_key(name), b"{}")
    await SetBacks().replace(store, events)
    context = cast("ClientContext", SimpleNamespace(ledgers=SimpleNamespace(store=store)))
    scope = await recovery_scope(context, ledger())
    assert scope.bookies == asked
    wide = (len(asked), len(asked), 2)
    assert scope.sizes == (wide if len(asked) > 4 else (4, 3, 2))
    assert scope.is_wide == (len(asked) > 4)


def test_the_bookies_of_the_fragment_come_first() -> None:
    assert RecoveryScope.of(ledger(), ("b2", "b0")).bookies == (*NAMED, "b0")
