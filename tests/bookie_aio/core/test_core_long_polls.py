"""The register of long polls, and the table of watched ledgers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.core.long_polls import PollRegister, WatchTable


def test_a_waiter_is_woken_by_the_first_lac_above_what_it_knows() -> None:
    register: PollRegister[str] = PollRegister()
    register.add(7, 4, "a")
    register.add(7, 5, "b")
    register.add(8, 0, "c")
    assert register.wake(7, 4) == []
    assert register.wake(7, 5) == ["a"]
    assert register.wake(7, 5) == []
    assert register.ledgers == {7, 8}
    assert register.wake(7, 9) == ["b"]
    assert register.ledgers == {8}
    assert len(register) == 1


def test_a_waiter_that_gave_up_is_not_woken() -> None:
    register: PollRegister[str] = PollRegister()
    register.add(7, -1, "a")
    assert register.drop(7, "a")
    assert not register.drop(7, "a")
    assert not register.drop(99, "a")
    assert register.wake(7, 100) == []
    assert len(register) == 0
    assert not register.ledgers


def test_the_end_takes_everybody_out() -> None:
    register: PollRegister[str] = PollRegister()
    register.add(7, -1, "a")
    register.add(8, 3, "b")
    assert register.drain() == ["a", "b"]
    assert len(register) == 0
    assert register.wake(7, 5) == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3), st.integers(-1, 9)),
            st.tuples(st.just("drop"), st.integers(0, 3), st.integers(0, 20)),
            st.tuples(st.just("wake"), st.integers(0, 3), st.integers(-1, 9)),
        )
    )
)
def test_each_waiter_comes_back_exactly_once(steps: list[tuple[str, int, int]]) -> None:
    register: PollRegister[int] = PollRegister()
    waiting: dict[int, tuple[int, int]] = {}
    for number, (what, ledger_id, value) in enumerate(steps):
        if what == "add":
            register.add(ledger_id, value, number)
            waiting[number] = (ledger_id, value)
        elif what == "drop":
            is_there = value in waiting and waiting[value][0] == ledger_id
            assert register.drop(ledger_id, value) is is_there
            if is_there:
                del waiting[value]
        else:
            due = [n for n, (ledger, known) in waiting.items() if ledger == ledger_id and known < value]
            assert register.wake(ledger_id, value) == due
            for n in due:
                del waiting[n]
        assert len(register) == len(waiting)
        assert register.ledgers == {ledger for ledger, _ in waiting.values()}


def test_a_ledger_that_has_moved_is_kept_until_it_is_taken_and_is_watched_no_more() -> None:
    table: WatchTable[str] = WatchTable()
    table.watch("a", 7, 4, 4)
    table.watch("a", 8, 4, 5)  # has moved already
    table.watch("b", 7, 9, 4)
    assert table.move(7, 5) == ["a"]
    assert table.move(7, 6) == []
    assert table.take("a", 1) == [8]
    assert table.take("a", 9) == [7]
    assert not table.has_moved("a")
    assert (table.count("a"), table.count("b"), len(table)) == (0, 1, 1)


def test_a_watcher_that_is_forgotten_leaves_nothing() -> None:
    table: WatchTable[str] = WatchTable()
    table.watch("a", 7, -1, -1)
    table.watch("a", 8, -1, 0)
    table.watch("b", 7, -1, -1)
    table.forget("a")
    assert (len(table), list(table.ledgers)) == (1, [7])
    assert table.move(7, 3) == ["b"]
    assert table.take("a", 9) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["watch", "unwatch", "move", "take", "forget"]),
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(-1, 6),
        ),
        max_size=60,
    )
)
def test_every_move_above_the_known_lac_is_told_once(steps: list[tuple[str, int, int, int]]) -> None:
    table: WatchTable[int] = WatchTable()
    lacs = dict.fromkeys(range(4), -1)
    watched: dict[tuple[int, int], int] = {}
    moved: set[tuple[int, int]] = set()
    for what, watcher, ledger_id, value in steps:
        key = (watcher, ledger_id)
        match what:
            case "watch":
                table.watch(watcher, ledger_id, value, lacs[ledger_id])
                watched.pop(key, None)
                moved.discard(key)
                if lacs[ledger_id] > value:
                    moved.add(key)
                else:
                    watched[key] = value
            case "unwatch":
                table.unwatch(watcher, ledger_id)
                watched.pop(key, None)
                moved.discard(key)
            case "move":
                lacs[ledger_id] = max(lacs[ledger_id], value)
                due = {w for (w, at), known in watched.items() if at == ledger_id and known < lacs[at]}
                assert set(table.move(ledger_id, lacs[ledger_id])) == due
                for each in due:
                    del watched[each, ledger_id]
                    moved.add((each, ledger_id))
            case "take":
                taken = table.take(watcher, 2)
                mine = {at for w, at in moved if w == watcher}
                assert set(taken) <= mine
                assert len(taken) == min(2, len(mine))
                moved -= {(watcher, at) for at in taken}
            case "forget":
                table.forget(watcher)
                watched = {at: known for at, known in watched.items() if at[0] != watcher}
                moved = {at for at in moved if at[0] != watcher}
        assert len(table) == len(watched) + len(moved)
        for each in range(3):
            count = sum(w == each for w, _ in watched) + sum(w == each for w, _ in moved)
            assert table.count(each) == count
            assert table.has_moved(each) is any(w == each for w, _ in moved)
        assert set(table.ledgers) == {at for _, at in watched}
