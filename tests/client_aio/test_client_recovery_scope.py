"""Which bookies a recovery asks, and which of the entries that they list are out of place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire.listing import Row, listed
from bookie_aio.wire.messages import Stop
from client_aio.core.quorum import write_set
from client_aio.ledger.recovery_scope import (
    FragmentLists,
    RecoveryScope,
    first_displaced,
    first_missing,
    recovery_scope,
)
from metadata.access.bookies import AgeRecord, SetBack, SetBacks, retire
from metadata.backends.memory import MemoryMetadataStore
from metadata.ids import age_key, available_key, cookie_key
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


ALL, NONE = range(20), range(0)
OTHERS = ("b5", "b6")


def lists(held: dict[int, range | list[int]], quorum: int = 2) -> FragmentLists:
    """Return what bookies list that hold these entries, as far as the metadata let them.

    Those of the seats 4 and 5 are not named.
    """
    found = FragmentLists(ledger(), RecoveryScope.of(ledger(), OTHERS), quorum)
    for seat, ids in held.items():
        own = [one for one in ids if seat >= 4 or seat in write_set(one % 4, 4, 3)]
        found.note(seat, [Row(one, 0, 1, 1) for one in own], is_damaged=False)
    return found


@pytest.mark.parametrize(
    ("held", "acknowledged", "before"),
    [
        ({0: ALL, 1: ALL, 2: ALL, 3: ALL, 4: NONE}, 3, 3),  # before the fragment
        ({0: ALL, 1: ALL, 2: ALL, 3: ALL, 4: NONE}, 19, 19),
        ({0: ALL, 1: ALL, 2: ALL, 3: ALL, 4: NONE}, 20, 19),  # seat 5 may have it
        ({0: ALL, 1: ALL, 2: ALL, 3: NONE, 4: NONE, 5: NONE}, 19, 19),
        # Seat 5 may have what the others lack.
        ({0: ALL, 1: ALL, 2: ALL, 3: NONE, 4: NONE}, 19, 19),  # each write set has two that list all
        ({0: ALL, 1: ALL, 2: NONE, 3: NONE, 4: NONE}, 19, 4),  # the entries 5, 9, … go to the seats 1, 2, 3
        ({0: ALL, 1: ALL, 2: [*range(9), *range(10, 20)], 3: NONE, 4: NONE}, 19, 8),
        ({0: ALL, 1: ALL, 2: [5, 9, *range(6, 20, 4), 7, 11, 15, 19], 3: NONE, 4: NONE}, 19, 12),
        # Every bookie has listed what it has: so those of the write set have it.
        ({0: ALL, 1: ALL, 2: NONE, 3: NONE, 4: NONE, 5: NONE}, 19, 19),
        # Seat 2 may have what goes to the seats 3, 0 and 1. Two of them have it.
        ({0: ALL, 1: ALL, 3: NONE, 4: NONE, 5: NONE}, 19, 19),
        ({0: ALL, 1: NONE, 3: NONE, 4: NONE, 5: NONE}, 19, 6),
        ({0: ALL, 1: ALL, 2: NONE, 3: NONE, 4: [11], 5: NONE}, 19, 10),  # it is not named
        ({0: ALL, 1: ALL, 2: ALL, 3: ALL, 4: [11]}, 19, 10),
        ({0: ALL, 1: ALL, 2: ALL, 3: ALL}, 19, 3),  # too few have listed theirs
        # Trimmed up to entry 9.
        ({0: ALL[10:], 1: ALL[10:], 2: ALL[10:], 3: ALL[10:], 4: NONE}, 19, 19),
        ({0: ALL[10:], 1: ALL[10:], 2: NONE, 3: NONE, 4: NONE}, 19, 9),
        ({0: NONE, 1: NONE, 2: NONE, 3: NONE, 4: NONE}, 19, 19),
    ],
)
def test_what_fewer_of_the_named_bookies_than_a_quorum_have_is_written_back(
    held: dict[int, range | list[int]], acknowledged: int, before: int
) -> None:
    assert lists(held).before(acknowledged) == before


def test_with_guaranteed_write_quorum_all_of_a_write_set_have_to_list_an_entry() -> None:
    held = {0: ALL, 1: ALL, 2: ALL, 3: NONE, 4: NONE}
    assert lists({**held, 5: NONE}, quorum=3).before(19) == 19  # nobody else can have it
    assert lists(held, quorum=3).before(19) == 4
    assert lists(held, quorum=2).before(19) == 19


def test_a_list_of_a_bookie_that_lost_data_proves_only_what_is_in_it() -> None:
    found = lists({0: ALL, 1: ALL, 2: NONE, 3: NONE, 4: NONE})
    found.note(5, [], is_damaged=True)
    assert found.before(19) == 4
    found.note(5, [Row(4, 0, 1, 1)], is_damaged=True)
    assert found.before(19) == 3


def test_the_fence_waits_only_for_lists_that_may_help() -> None:
    held = {0: ALL, 1: ALL, 2: NONE, 3: NONE, 4: NONE}
    assert lists(held).may_rise(19)
    assert not lists({**held, 5: NONE}).may_rise(19)
    assert not lists({**held, 4: [5]}).may_rise(19)  # displaced from 5 on
    assert lists({**held, 4: [6]}).may_rise(19)
    assert lists({0: ALL}).may_rise(19)
    assert not lists({0: ALL}).may_rise(3)


def test_the_length_is_read_behind_an_entry_that_is_trimmed() -> None:
    held = {0: ALL[10:], 1: ALL[11:], 2: NONE, 3: NONE, 4: [10]}
    assert lists(held).before(19) == 9
    assert lists(held).holders_behind(9) == ("b1", "b5")
    assert lists(held).holders_behind(10) == ()
    assert lists({4: [4]}).holders_behind(3) == ()  # the metadata have it


@given(
    st.lists(
        st.builds(
            Row, st.integers(0, 40), st.integers(0, 2), st.integers(1, 12), st.sampled_from([1, 2, 3, 5])
        ),
        max_size=6,
    ),
    st.integers(0, 40),
    st.integers(1, 12),
)
def test_the_first_entry_that_is_missing_is_found_by_rows(rows: list[Row], first: int, count: int) -> None:
    wanted = range(first, first + 5 * count, 5)
    marks = listed(wanted, rows, 1)
    exact = wanted.start + 5 * (marks.index(0) if 0 in marks else count)
    found = first_missing(wanted, sorted(rows), 1)
    assert found <= exact
    if all(5 % row.stride == 0 for row in rows):
        assert found == exact


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


@pytest.mark.parametrize(
    ("stored", "is_unjudged"),
    [
        (None, True),
        (AgeRecord(3, "start", []), True),
        (AgeRecord(4, "another start", []), True),
        (AgeRecord(4, "start", []), False),
        (AgeRecord(5, "another start", []), False),
    ],
)
@pytest.mark.parametrize("answered", [(), ("b3",)])
async def test_what_a_bookie_denies_before_it_has_judged_an_event_counts_for_nothing(
    stored: AgeRecord | None, is_unjudged: bool, answered: tuple[str, ...]
) -> None:
    """Its directory may have been set back with the store, which it can hear from others only."""
    store = MemoryMetadataStore()
    for name in NAMED:
        await store.create(cookie_key(name), b"{}")
        await store.create(available_key(name), b"{}")
    seen = replace(event(9, *answered), ages={"b3": ["start", 4]})
    await SetBacks().replace(store, [seen, event(2)])
    if stored is not None:
        await store.create(age_key("b3"), stored.to_json())
    context = cast("ClientContext", SimpleNamespace(ledgers=SimpleNamespace(store=store)))
    scope = await recovery_scope(context, ledger())
    assert scope.bookies == NAMED
    assert scope.unjudged == ({"b3"} if is_unjudged else set())
    for name in NAMED:
        denied = scope.believed(name, Stop.NO_SUCH_ENTRY)
        assert denied is (Stop.UNKNOWN if name in scope.unjudged else Stop.NO_SUCH_ENTRY)
        assert scope.believed(name, Stop.END) is Stop.END
    assert not (await recovery_scope(context, ledger(9))).unjudged, "made after the event"


async def test_a_bookie_that_is_gone_for_good_is_not_asked() -> None:
    """Other bookies had seen its age, so the event names it, with a cookie or without one."""
    store = MemoryMetadataStore()
    for name in ("b1", "b2", "b3", "b4", "b5"):
        await store.create(cookie_key(name), b"{}")
    await SetBacks().replace(store, [event(9)])
    context = cast("ClientContext", SimpleNamespace(ledgers=SimpleNamespace(store=store)))
    assert (await recovery_scope(context, ledger())).bookies == (*NAMED, "b5", "b7")
    await retire(store, "b7")
    assert (await recovery_scope(context, ledger())).bookies == (*NAMED, "b5")
    await retire(store, "b5")
    assert (await recovery_scope(context, ledger())).bookies == NAMED


def test_the_bookies_of_the_fragment_come_first() -> None:
    assert RecoveryScope.of(ledger(), ("b2", "b0")).bookies == (*NAMED, "b0")
