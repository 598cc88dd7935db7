"""The register of long polls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.core.long_polls import PollRegister


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
