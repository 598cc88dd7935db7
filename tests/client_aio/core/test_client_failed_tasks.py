"""Tasks that never end: which of them give their places to others, and when they have a turn again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.audit import Layout, LedgerIndex
from client_aio.core.failed_tasks import FAILURES, FailedTasks
from metadata.access.repair_tasks import REASON_LOST, REASON_MISSING, RepairTask, TaskRef


def task(attempts: int, reason: str = REASON_LOST) -> RepairTask:
    return RepairTask({reason: ["b1"]}, 7, attempts)


def table(attempts: list[int]) -> dict[TaskRef, RepairTask]:
    """Return tasks of the ledgers from 0 on, with so many failures each."""
    return {TaskRef(1, ledger_id, "t"): task(count) for ledger_id, count in enumerate(attempts)}


def test_those_beyond_half_of_the_places_go_and_those_that_failed_most_go_first() -> None:
    failed = FailedTasks(8)
    assert failed.choose(table([3, 9, 3, 5, 3, 0, 2, 1]), 0) == ([TaskRef(1, 1, "t")], [])
    assert failed.choose(table([3, 9, 3, 5, 0, 0, 2, 1]), 0) == ([], []), "half of them may stay"


def test_where_entries_were_found_nowhere_there_is_no_good_copy() -> None:
    failed = FailedTasks(8)
    failed.set_aside(TaskRef(3, 1, "t"), task(4).failed("gone", 2, ["b1"]))
    failed.set_aside(TaskRef(3, 2, "t"), task(4))
    assert failed.by_copies == {0: 1, 3: 1}
    assert failed.aside[1].task.good_copies(3) == 0


def test_what_was_set_aside_comes_back_where_there_is_room_with_its_reasons() -> None:
    failed = FailedTasks(8)
    for ref, one in table([4, 5, 6]).items():
        failed.set_aside(ref, one)
    assert failed.by_copies == {1: 3}
    assert failed.choose({}, 8) == ([], [0, 1, 2])
    again = failed.aside[0].task
    assert (again.reasons, again.since_ms, again.attempts) == ({REASON_LOST: ["b1"]}, 7, FAILURES - 1)
    assert again.entries_lost == 0
    others = {TaskRef(1, 10 + number, "t"): task(3) for number in range(4)}
    going, back = failed.choose(others, 4)
    assert (len(going), back) == (1, [0]), "one of each changes places where their half is full"
    full = {TaskRef(1, 10 + number, "t"): task(0) for number in range(8)}
    assert failed.choose(full, 0) == ([], []), "nobody who has not failed makes room"


def test_ledgers_whose_lost_bookies_changed_are_judged_anew() -> None:
    failed, index = FailedTasks(8), LedgerIndex()
    for ledger_id in range(2):
        index.note(ledger_id, Layout(2, (("b1", f"b{2 + ledger_id}"),), ()))
        failed.set_aside(TaskRef(1, ledger_id, "t"), task(3))
    failed.set_aside(TaskRef(1, 2, "t"), task(3, REASON_MISSING))
    assert failed.bookies_checked == {"b1"}
    assert [one for one, _ in failed.changed(index, ["b1", "b3"])] == [1]
    assert sorted(failed.aside) == [0, 2]


@given(st.integers(1, 60), st.integers(0, 150))
def test_every_ledger_has_its_turn_and_the_table_is_never_too_full(places: int, hopeless: int) -> None:
    failed, waiting, here = FailedTasks(places), list(range(hopeless)), dict[TaskRef, RepairTask]()
    unseen: set[int] | None = None
    for _ in range(3 * hopeless + 3):
        new = waiting[: places - len(here)]
        del waiting[: len(new)]
        here = {ref: one.failed("again", 0, ()) for ref, one in here.items()}
        here.update((TaskRef(1, ledger_id, "t"), task(FAILURES)) for ledger_id in new)
        if not waiting:
            # From now on those that were set aside are the only ones that come.
            unseen = set(range(hopeless)) if unseen is None else unseen
            unseen.difference_update(ref.ledger_id for ref in here)
        going, back = failed.choose(here, places - len(here))
        coming = [(TaskRef(1, one, "t"), failed.aside[one].task) for one in back]
        for ref in going:
            failed.set_aside(ref, here.pop(ref))
        for ref, one in coming:
            here[ref] = one
            failed.brought_back(ref.ledger_id)
        assert len(here) <= places
        assert len(here) + len(failed.aside) + len(waiting) == hopeless
    assert not unseen
