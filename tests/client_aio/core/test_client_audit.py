"""Which ledgers lack copies, who is lost and when, and in which order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.audit import (
    BookieStates,
    Checks,
    Condition,
    Lacking,
    Layout,
    LedgerIndex,
    Pace,
    ReplicaState,
    Rotation,
    Seats,
    condition_of,
    copies_by_replicas,
    dealt,
    fewest_copies,
    good_copies,
    has_room,
    layout_of,
    least_bytes_owed,
    marks_stay,
    retry_after_s,
    seats_to_repair,
)
from client_aio.core.quorum import write_set
from client_aio.core.repair_plan import Part
from metadata.access.bookies import BookieRecord
from metadata.access.repair_tasks import WorkerRecord
from metadata.model.ledger import Absent, Fragment, LedgerMetadata, UnboundedRecord

NAMES = tuple(f"b{number}" for number in range(1, 7))


def ledger(*ensembles: str, write_quorum: int = 2, is_closed: bool = False) -> LedgerMetadata:
    """Return a ledger with a fragment of ten entries for each ensemble, such as "b1 b2 b3"."""
    first, *others = [tuple(each.split()) for each in ensembles]
    metadata = LedgerMetadata.new(
        7, ensemble_size=len(first), write_quorum=write_quorum, ack_quorum=1, bookies=first
    )
    for number, bookies in enumerate(others, 1):
        metadata = metadata.change_ensemble(number * 10, bookies)
    return metadata.close(len(ensembles) * 10, 0) if is_closed else metadata


def test_the_fragments_of_a_closed_ledger_are_complete_and_all_but_the_last_of_another_one() -> None:
    open_ledger = ledger("b1 b2 b3", "b1 b2 b4")
    assert layout_of(open_ledger) == Layout(2, (("b1", "b2", "b3"),), ("b1", "b2", "b4"))
    closed = layout_of(ledger("b1 b2 b3", "b1 b2 b4", is_closed=True))
    assert closed == Layout(2, (("b1", "b2", "b3"), ("b1", "b2", "b4")), ())
    paged = layout_of(open_ledger, [Fragment(0, ("b5", "b6", "b1")), Fragment(5, ("b1", "b2", "b3"))])
    assert paged.complete == (("b1", "b2", "b3"), ("b5", "b6", "b1"))
    assert layout_of(ledger("b1 b2 b3")).copies({"b1", "b2", "b3"}) == 2, "nothing is complete yet"


@pytest.mark.parametrize(("size", "write_quorum"), [(1, 1), (3, 2), (3, 3), (4, 3), (5, 2)])
def test_good_copies_are_those_of_the_scarcest_entry(size: int, write_quorum: int) -> None:
    ensemble = NAMES[:size]
    for count in range(size + 1):
        for bad in itertools.combinations(ensemble, count):
            of_entries = [
                sum(ensemble[seat] not in bad for seat in write_set(entry % size, size, write_quorum))
                for entry in range(2 * size)
            ]
            assert good_copies(ensemble, write_quorum, bad) == min(of_entries)


layouts = st.builds(
    lambda complete, growing: Layout(2, tuple(sorted(set(complete))), growing),
    st.lists(st.permutations(NAMES).map(lambda names: tuple(names[:3])), max_size=3),
    st.one_of(st.just(()), st.permutations(NAMES).map(lambda names: tuple(names[:3]))),
)


@given(
    steps=st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), layouts)), max_size=40),
    bad=st.sets(st.sampled_from(NAMES)),
)
def test_the_index_says_what_a_scan_of_all_ledgers_says(
    steps: list[tuple[int, Layout | None]], bad: set[str]
) -> None:
    index, model = LedgerIndex(), dict[int, Layout]()
    for ledger_id, layout in steps:
        if layout is None:
            index.drop(ledger_id)
            model.pop(ledger_id, None)
        else:
            assert index.note(ledger_id, layout) is (model.get(ledger_id) != layout)
            model[ledger_id] = layout
    assert index.ids() == sorted(model)
    assert len(index) == len(model)
    assert index.bookies() == sorted({name for layout in model.values() for name in layout.bookies})
    for name in NAMES:
        assert index.ledgers_of(name) == sorted(one for one in model if name in model[one].bookies)
    expected = []
    for ledger_id, layout in model.items():
        concerned = sorted({name for ensemble in layout.complete for name in ensemble} & bad)
        if concerned:
            copies = min(good_copies(ensemble, 2, bad) for ensemble in layout.complete)
            expected.append(Lacking(copies, ledger_id, tuple(concerned)))
    assert index.lacking(bad) == (sorted(expected), len(expected))
    some, total = index.lacking(bad, 2)
    assert total == len(expected)
    assert [one.copies for one in some] == [one.copies for one in sorted(expected)[:2]]
    assert set(some) <= set(expected)
    assert index.growing_on(bad) == sorted(one for one in model if bad & set(model[one].growing))
    assert sorted(index.growing) == sorted(one for one in model if model[one].growing)


def test_a_bookie_is_lost_when_it_was_seen_to_be_gone_for_longer_than_the_delay() -> None:
    states = BookieStates(10.0, 5.0)
    all_up = {"b1": "x", "b2": "y"}
    assert states.look(["b1", "b2"], all_up, 0.0) == []
    assert states.look(["b1", "b2"], {"b1": "x"}, 4.0) == []
    assert states.gone_s == {"b2": 0.0}, "when it went within the time before this look is not known"
    for _ in range(10):
        states.look(["b1", "b2"], {"b1": "x"}, 1.0)
    assert states.lost == []
    states.look(["b1", "b2"], {"b1": "x"}, 0.5)
    assert states.lost == ["b2"]
    states.look(["b1", "b2"], all_up, 0.5)
    assert states.lost == []
    assert states.gone_s == {}


def test_an_auditor_that_stood_still_holds_nobody_for_lost() -> None:
    states = BookieStates(600.0, 2.0)
    states.look(["b1"], {}, 0.0)
    states.look(["b1"], {}, 10_000.0)
    assert states.gone_s == {"b1": 2.0}


def test_the_next_auditor_goes_on_from_what_the_last_one_saw() -> None:
    states = BookieStates(10.0, 5.0, {"b1": 9.0, "b2": 9.0})
    states.look(["b1", "b2"], {"b2": "y"}, 0.0)
    states.look(["b1", "b2"], {"b2": "y"}, 1.5)
    assert states.lost == ["b1"]


def test_a_bookie_that_no_ledger_names_is_lost_to_nobody() -> None:
    states = BookieStates(1.0, 5.0)
    for _ in range(5):
        states.look([], {}, 1.0)
    assert states.lost == []


def test_the_ledgers_of_a_bookie_are_checked_once_it_has_been_back_for_the_delay() -> None:
    states = BookieStates(2.0, 5.0, settled={"b1": "x"})
    up, down = {"b1": "x"}, dict[str, str]()
    looks = [down, up, up, up, up, up]
    assert [states.look(["b1"], running, 1.0) for running in looks] == [[], [], [], ["b1"], [], []]
    # A restart between two looks shows by what the bookie draws at each start.
    restarted = {"b1": "z"}
    assert [states.look(["b1"], restarted, 1.0) for _ in range(4)] == [[], [], ["b1"], []]
    # In a rolling restart with a short absence nobody is lost.
    assert states.lost == []


def test_a_bookie_that_leaves_for_good_while_its_start_is_to_settle_is_forgotten() -> None:
    states = BookieStates(2.0, 5.0)
    looks = [{"b1": "x"}, {}, {}, {}, {}]
    # The cluster knows it no more: it was drained, and no ledger names it.
    assert [states.look(running, running, 1.0) for running in looks] == [[]] * 5
    assert states.lost == []


def test_the_next_auditor_takes_every_start_that_is_not_settled_for_one_that_came_back() -> None:
    states = BookieStates(1.0, 5.0, {}, {"b1": "x", "b2": "y"})
    running = {"b1": "x", "b2": "z", "b3": "w"}
    assert [states.look(running, running, 0.6) for _ in range(3)] == [[], ["b2", "b3"], []]


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 60), st.booleans())
def test_places_are_dealt_out_to_the_first_classes_and_half_of_them_to_all(
    sizes: list[int], places: int, is_even: bool
) -> None:
    counts = dealt(sizes, places, is_even)
    assert sum(counts) == min(places, sum(sizes))
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        share = places // (2 * len(sizes)) if is_even else 0
        assert min(size, share) <= count <= size
        is_cut = count < size
        assert not is_cut or all(after <= share for after in counts[number + 1 :])


def test_checks_are_taken_when_they_are_due_each_ledger_once() -> None:
    checks = Checks()
    for ledger_id, due in ((1, 5.0), (2, 1.0), (1, 3.0), (1, 9.0), (3, 2.0)):
        checks.add(ledger_id, due)
    assert len(checks) == 3
    assert list(checks.take(0.5, 10)) == []
    assert list(checks.take(2.5, 1)) == [2]
    assert list(checks.take(9.0, 10)) == [3, 1]
    assert list(checks.take(99.0, 10)) == []
    checks.add(1, 100.0)
    assert checks.take(100.0, 1) == {1: False}


def test_urgent_checks_come_first_and_leave_a_fifth_to_others() -> None:
    checks = Checks()
    for ledger_id in range(100):
        checks.add(ledger_id, 1.0)
    for ledger_id in (*range(90, 100), *range(200, 220)):
        checks.add(ledger_id, 5.0, is_urgent=True)
    assert checks.take(5.0, 10) == {**dict.fromkeys(range(90, 98), True), 0: False, 1: False}
    assert checks.first_due == 1.0
    for ledger_id in range(300):
        checks.add(ledger_id, 6.0)
    assert list(checks.take(5.0, 10)) == [98, 99, *range(200, 206), 2, 3]
    assert list(checks.take(5.0, 200)) == [*range(206, 220), *range(4, 90)]
    assert checks.first_due == 6.0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 12)
)
def test_every_check_is_taken_once_when_its_earliest_time_has_come(
    added: list[tuple[int, int, bool]], count: int
) -> None:
    checks, due, urgent = Checks(), dict[int, float](), dict[int, bool]()
    for ledger_id, at, is_urgent in added:
        checks.add(ledger_id, at, is_urgent=is_urgent)
        due[ledger_id] = min(at, due.get(ledger_id, at))
        urgent[ledger_id] = is_urgent or urgent.get(ledger_id, False)
    for now in range(11):
        while due and min(due.values()) <= now:
            assert checks.first_due == min(due.values())
            taken = checks.take(now, count)
            assert 0 < len(taken) <= count
            for ledger_id, is_urgent in taken.items():
                assert due.pop(ledger_id) <= now
                assert is_urgent is urgent[ledger_id]
        assert not checks.take(now, count)
    assert not len(checks)


@given(st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=50), st.floats(0.1, 3.0))
def test_a_rotation_takes_each_ledger_once_in_its_interval(ids: list[int], step_s: float) -> None:
    ids.sort()
    rotation = Rotation(100.0)
    taken: list[int] = []
    for _ in range(int(100.0 / step_s) + 2):
        taken += rotation.next(ids, step_s, 1000)
    assert set(taken) == set(ids)
    assert len(taken) <= len(ids) * (1 + 2 * step_s / 100.0) + 2


def test_a_rotation_goes_on_behind_ledgers_that_are_gone() -> None:
    rotation = Rotation(1.0)
    assert rotation.next([1, 2, 3, 4], 1.0, 2) == [1, 2]
    assert rotation.next([3, 4, 5], 1.0, 2) == [3, 4]
    assert rotation.next([1, 5], 1.0, 2) == [5, 1]
    assert rotation.next([], 1.0, 2) == []


def test_a_drain_is_idle_when_no_worker_gets_on_with_anything() -> None:
    pace, begun = Pace(0.0, 5), WorkerRecord("w", ledger_id=7)
    pace.note_workers(10.0, [begun])
    assert pace.idle_s(10.0) == 10.0
    for now, record in (
        (20.0, replace(begun, bytes_read=1)),
        (30.0, replace(begun, bytes_read=1, repaired=1)),
    ):
        pace.note_workers(now, [record])
        assert (pace.idle_s(now), pace.still_s(now)) == (0.0, now)
    # It has failed at one ledger, and has begun another one.
    failed = replace(begun, ledger_id=8, bytes_read=5, repaired=1, failed=1)
    pace.note_workers(40.0, [failed])
    assert pace.idle_s(40.0) == 10.0
    pace.note(50.0, 4)
    assert pace.idle_s(50.0) == 0.0
    pace.note_pause(60.0)
    assert (pace.idle_s(61.0), pace.still_s(61.0)) == (1.0, 1.0)


def replica(name: str, first: int = 0, *, state: str = "whole") -> ReplicaState:
    return ReplicaState(name, first, state != "missing", state == "marked", state == "silent")


def test_a_bookie_that_answers_is_repaired_in_its_place_and_a_lost_one_is_replaced() -> None:
    replicas = [replica("b1"), replica("b2", state="missing"), replica("b3", state="silent"),
                replica("b4", state="marked"), replica("b5", state="silent")]  # fmt: skip
    expected = Seats(in_place=("b2", "b4"), replaced=("b3",), unknown=("b5",), marked=("b4",))
    assert seats_to_repair(replicas, ["b1", "b2", "b3"], ["b1", "b2", "b4", "b5"], ()) == expected
    # A lost bookie that is registered again, and does not answer yet, keeps its seat.
    assert seats_to_repair(replicas[2:3], ["b3"], ["b3"], ()) == Seats((), (), ("b3",))
    also_lacking = [*replicas, replica("b4", 9, state="missing")]
    assert not seats_to_repair(also_lacking, [], [], ()).marked
    assert not seats_to_repair(replicas, [], [], (), (), ["b4"]).marked
    # A mark that cannot be lifted needs nothing; entries that are missing do.
    assert seats_to_repair(replicas[1:4], [], [], ["b2", "b4"]).in_place == ("b2",)


def test_marks_stay_where_entries_may_still_be_added() -> None:
    assert set(marks_stay(ledger("b1 b2 b3", "b1 b2 b4"))) == {"b1", "b2", "b3", "b4"}
    assert not marks_stay(ledger("b1 b2 b3", is_closed=True))
    unbounded = LedgerMetadata.new(
        7, ensemble_size=2, write_quorum=2, ack_quorum=1, bookies=["b1", "b2"],
        unbounded=UnboundedRecord("x"),
    )  # fmt: skip
    assert set(marks_stay(unbounded)) == {"b1", "b2"}


def test_bytes_are_owed_for_certain_where_a_bookie_has_all_of_a_closed_ledger() -> None:
    def of(*ensembles: str, **how: Any) -> LedgerMetadata:
        return replace(ledger(*ensembles, is_closed=True, **how), length=100)

    assert least_bytes_owed(of("b1 b2", "b1 b3"), "b1") == 100
    assert least_bytes_owed(of("b1 b2", "b1 b3"), "b2") == 0, "it has one of two fragments"
    assert least_bytes_owed(of("b1 b2 b3"), "b1") == 0, "the ledger is striped"
    assert least_bytes_owed(ledger("b1 b2"), "b1") == 0, "it is open"
    assert least_bytes_owed(replace(of("b1 b2"), absent=(Absent(0, 1, "b9", 1),)), "b1") == 0


def test_there_is_room_unless_all_bookies_say_that_there_is_none() -> None:
    def bookie(free_bytes: int | None, disk_bytes: int | None = 10_000) -> BookieRecord:
        return BookieRecord("b1", ["h:1"], "n", free_bytes=free_bytes, disk_bytes=disk_bytes)

    small = bookie(900)
    assert has_room(1000, [small]), "a change of a tenth is not announced"
    assert not has_room(1001, [small])
    assert not has_room(5101, [bookie(5000, 2000)]), "nor one of a twentieth of the disks"
    assert has_room(1001, [small, bookie(1)])
    assert has_room(10**15, [small, bookie(None, None)])
    assert not has_room(1, [])


def test_copies_by_replicas_count_what_was_listed() -> None:
    whole = [replica(name) for name in ("b1", "b2", "b3")]
    assert copies_by_replicas(2, whole, ()) == 2
    assert copies_by_replicas(2, [replica("b1", state="missing"), *whole[1:]], ()) == 1
    silent = [replica(name, 10, state="silent") for name in ("b1", "b4")]
    assert copies_by_replicas(2, [*whole, *silent, replica("b5", 10)], ()) == 0


def test_what_is_marked_or_doubted_is_no_good_copy() -> None:
    marked = [replica("b1", state="marked"), replica("b2"), replica("b3", state="marked")]
    assert copies_by_replicas(3, marked, ()) == 1
    assert copies_by_replicas(3, marked, ["b1", "b3"]) == 3, "they keep their marks whatever they hold"
    assert copies_by_replicas(3, marked, ["b1", "b3"], ["b2", "b3"]) == 1


def test_a_task_rests_twice_as_long_after_each_failure() -> None:
    assert [retry_after_s(attempts, 10.0, 60.0) for attempts in range(5)] == [0.0, 10.0, 20.0, 40.0, 60.0]
    assert retry_after_s(10_000, 10.0, 60.0) == 60.0


def test_ledgers_with_the_fewest_good_copies_come_first() -> None:
    index, rng = LedgerIndex(), random.Random(1)
    for ledger_id in range(200):
        index.note(ledger_id, Layout(3, (tuple(rng.sample(NAMES, 4)),), ()))
    found, _ = index.lacking({"b1", "b2"})
    assert [one.copies for one in found] == sorted(one.copies for one in found)
    assert {one.copies for one in found} == {1, 2}


@given(st.data())
def test_the_copies_of_what_was_verified_are_counted_entry_by_entry(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    quorum = data.draw(st.integers(1, size))
    first, count = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 12))
    part = Part(first, first + count - 1, 0, NAMES[:size])
    owed = {
        name: [
            entry for entry in range(first, first + count) if seat in write_set(entry % size, size, quorum)
        ]
        for seat, name in enumerate(part.bookies)
    }
    unread = data.draw(st.sets(st.sampled_from(part.bookies)))
    bad = {name: data.draw(st.sets(st.sampled_from(ids))) if ids else set() for name, ids in owed.items()}
    expected = min(
        (
            sum(entry in ids and name not in unread and entry not in bad[name] for name, ids in owed.items())
            for entry in range(first, first + count)
        ),
        default=quorum,
    )
    assert fewest_copies(part, quorum, unread, bad) == expected


def test_one_good_copy_is_a_risk_unless_there_never_are_more() -> None:
    found = [
        condition_of(copies, quorum) for copies, quorum in ((3, 3), (2, 3), (1, 3), (0, 3), (1, 1), (0, 1))
    ]
    assert found == [
        Condition.HEALTHY, Condition.DEGRADED, Condition.AT_RISK, Condition.AT_RISK, Condition.HEALTHY,
        Condition.AT_RISK,
    ]  # fmt: skip
