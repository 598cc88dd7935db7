"""Marks of lost data: what counts, whatever order a start learns it in, and what a restart keeps."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.ledgers.checkpoint import LedgerState, pack_state, unpack_state
from bookie_aio.storage.ledgers.marks import NO_LEDGER, Marks
from bookie_aio.wire.messages import Stop
from metadata.ids import LEDGER_ID_MAX, TERM_FINAL
from tests.support.storage import Store, make_block

if TYPE_CHECKING:
    from pathlib import Path

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("mark_all"), st.integers(-1, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("mark"), st.integers(0, 9)),
        st.tuples(st.just("mark_listed"), st.integers(0, 9)),
        st.tuples(st.just("lift"), st.integers(0, 9)),
    ),
    max_size=12,
)


class Model:
    """A bookie's marks and lifts, one step after another, and the rows that it wrote of them."""

    def __init__(self) -> None:
        self.marks = Marks()
        self.states: dict[int, LedgerState] = {}
        self.rows: list[tuple[str, int, int]] = []
        self.given_out = 0
        self.marked: dict[int, bool] = dict.fromkeys(range(10), False)
        self.in_doubt: dict[int, bool] = dict.fromkeys(range(10), False)

    def step(self, what: str, value: int) -> None:
        if what == "mark_all":
            if self.marks.is_unbounded:
                value = NO_LEDGER  # as `Marking.mark_all` does
            elif value != NO_LEDGER:
                value = self.given_out = max(self.given_out, value)  # ids are given out in order
            self.write("mark_all", self.marks.draw(), value)
            concerned = [one for one in range(10) if value == NO_LEDGER or one <= value]
            self.marked.update(dict.fromkeys(concerned, True))
            self.in_doubt.update(dict.fromkeys(concerned, True))
        elif what in ("mark", "mark_listed"):
            self.write(what, self.marks.draw(), value)
            self.marked[value] = True
            self.in_doubt[value] = self.in_doubt[value] or what == "mark"
        elif what == "lift":
            number = self.marks.of(value, self.states.get(value))
            assert bool(number) == self.marked[value]
            if number:
                self.write("lift", number, value)
                self.marked[value] = self.in_doubt[value] = False
        elif what == "end" and self.marks.number and not self.marks.is_unbounded:
            own = [one for one in range(10) if one in self.states and self.states[one].is_marked]
            self.write("end", self.marks.number, self.marks.bound)
            doubted = [one for one in own if self.states[one].is_in_doubt]
            self.marked = {one: one in own for one in range(10)}
            self.in_doubt = {one: one in doubted for one in range(10)}

    def write(self, what: str, number: int, value: int) -> None:
        self.rows.append((what, number, value))
        learn(self.marks, self.states, (what, number, value))


def learn(marks: Marks, states: dict[int, LedgerState], row: tuple[str, int, int]) -> None:
    what, number, value = row
    if what == "mark_all":
        marks.learn_mark(number, value)
        return
    if what == "end":
        marks.learn_end(number, value)
        return
    state = states.setdefault(value, LedgerState())
    marks.learn(number)
    if what in ("mark", "mark_listed"):
        state.mark(number, is_of_listed=what == "mark_listed")
    else:
        state.lifted = max(state.lifted, number)


@given(STEPS, st.randoms(use_true_random=False))
def test_what_counts_does_not_depend_on_the_order_in_which_a_start_learns_it(
    steps: list[tuple[str, int]], rng: object
) -> None:
    model = Model()
    for what, value in steps:
        model.step(what, value)
    rows = model.rows * 2  # a row may be in the checkpoint and in a segment
    rng.shuffle(rows)
    marks, states = Marks(), dict[int, LedgerState]()
    for row in rows:
        learn(marks, states, row)
    assert marks.packed() == model.marks.packed()
    for one in range(10):
        assert bool(marks.of(one, states.get(one))) == model.marked[one]
        assert marks.is_in_doubt(one, states.get(one)) == model.in_doubt[one]
        if one in states:
            kept = unpack_state(pack_state(one, states[one]))
            assert marks.of(one, kept) == marks.of(one, states[one])
            assert marks.is_in_doubt(one, kept) == model.in_doubt[one]
        again = Marks.parse(marks.packed())
        assert again.of(one, states.get(one)) == marks.of(one, states.get(one))


def test_a_mark_without_a_bound_concerns_ids_that_will_be_given_out_until_it_is_bounded() -> None:
    marks = Marks()
    marks.begin(3)
    first = marks.draw()
    marks.learn_mark(first, NO_LEDGER)
    assert (marks.is_unbounded, marks.bound, marks.of(LEDGER_ID_MAX, None)) == (True, LEDGER_ID_MAX, first)
    marks.learn_mark(first, 40)
    assert (marks.is_unbounded, marks.bound, marks.of(40, None), marks.of(41, None)) == (False, 40, first, 0)
    second = marks.draw()
    marks.learn_mark(second, NO_LEDGER)
    marks.learn_mark(first, 50)  # the bound was asked for before the second loss
    assert (marks.is_unbounded, marks.of(51, None)) == (True, second)
    marks.learn_mark(second, 60)
    assert (marks.bound, marks.of(60, None)) == (60, second)


def test_an_end_fences_what_no_lift_names() -> None:
    marks, lifted = Marks(), LedgerState()
    number = marks.draw()
    marks.learn_mark(number, 9)
    lifted.lifted = number
    assert not marks.is_fenced(5, None)
    marks.learn_end(number, marks.bound)
    assert (marks.number, marks.bound) == (0, NO_LEDGER)
    assert [marks.is_fenced(one, None) for one in (9, 10)] == [True, False]
    assert not marks.is_fenced(5, lifted)  # it has a term of its own


def test_numbers_rise_from_life_to_life_even_where_none_was_read() -> None:
    numbers = []
    for segment_id in (1, 2, 7):
        marks = Marks()
        marks.begin(segment_id)
        numbers += [marks.draw(), marks.draw()]
    assert all(one < other for one, other in pairwise(numbers))


# --- the engine --------------------------------------------------------------------------------


async def crashed(store: Store) -> Path:
    """Return the directory that a crash leaves."""
    path = await store.crash_into(store.path.with_name(f"{store.path.name}x"))
    await store.close()
    return path


async def lift(store: Store, ledger_id: int, term: int = TERM_FINAL) -> None:
    marking = store.engine.marking
    await when_durable(partial(marking.lift, ledger_id, marking.of(ledger_id), term))


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_lifted_mark_stays_lifted_and_leaves_the_fence(tmp_path: Path, is_clean: bool) -> None:
    path = tmp_path / "data"
    store = await Store.open(path)
    await store.add(make_block(7, 0, [b"kept"]))
    await when_durable(partial(store.engine.append_mark, 7))
    await when_durable(partial(store.engine.append_mark, 8))
    await lift(store, 7)
    for _ in range(3):
        assert (store.engine.is_damaged(7), store.engine.term(7)) == (False, TERM_FINAL)
        assert (store.engine.is_damaged(8), store.engine.term(8)) == (True, 0)
        assert (await store.read(7, 1, 1))[1] is Stop.NO_SUCH_ENTRY
        if is_clean:
            await store.close()
        else:
            path = await crashed(store)
        store = await Store.open(path)
    await when_durable(partial(store.engine.append_mark, 7))  # damage that was found later
    assert store.engine.is_damaged(7)
    await store.close()


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_mark_of_listed_entries_stays_one_and_ends_no_doubt(tmp_path: Path, is_clean: bool) -> None:
    path = tmp_path / "data"
    store = await Store.open(path)
    for ledger_id in (7, 8, 9):
        await store.add(make_block(ledger_id, 0, [b"kept"]))
    await when_durable(partial(store.engine.append_mark, 7, is_of_listed=True))
    await when_durable(partial(store.engine.append_mark, 8))
    await when_durable(partial(store.engine.append_mark, 8, is_of_listed=True))
    await when_durable(partial(store.engine.append_mark, 9))
    await lift(store, 9)
    await when_durable(partial(store.engine.append_mark, 9, is_of_listed=True))
    for _ in range(3):
        for ledger_id, is_in_doubt in ((7, False), (8, True), (9, False)):
            assert store.engine.is_damaged(ledger_id)
            assert store.engine.is_in_doubt(ledger_id) is is_in_doubt
            denied = Stop.UNKNOWN if is_in_doubt else Stop.NO_SUCH_ENTRY
            assert (await store.read(ledger_id, 1, 1))[1] is denied
        if is_clean:
            await store.close()
        else:
            path = await crashed(store)
        store = await Store.open(path)
    await when_durable(partial(store.engine.marking.mark_all, 7))
    assert store.engine.is_in_doubt(7)
    await store.close()


async def test_a_lift_counts_when_it_is_durable_and_its_fence_at_once(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "data")
    await when_durable(partial(store.engine.append_mark, 7))
    marking = store.engine.marking
    lifting = when_durable(partial(marking.lift, 7, marking.of(7), TERM_FINAL))
    assert (store.engine.is_damaged(7), store.engine.term(7)) == (True, TERM_FINAL)
    await lifting
    assert not store.engine.is_damaged(7)
    await store.close()


async def test_marks_of_all_ledgers_are_bounded_and_end(tmp_path: Path) -> None:
    path = tmp_path / "data"
    store = await Store.open(path)
    await store.add(make_block(7, 0, [b"kept"]))
    await when_durable(partial(store.engine.marking.mark_all, 20))
    for _ in range(2):
        engine = store.engine
        assert [engine.is_damaged(one) for one in (0, 7, 20, 21)] == [True, True, True, False]
        assert (engine.is_writable, engine.marking.bound) == (True, 20)
        path = await crashed(store)
        store = await Store.open(path)
    await lift(store, 7, 5)
    assert [store.engine.is_damaged(one) for one in (6, 7)] == [True, False]
    await when_durable(partial(store.engine.marking.end_all, store.engine.marking.number))
    for _ in range(2):
        engine = store.engine
        assert not any(engine.is_damaged(one) for one in (0, 7, 20, 21))
        assert [engine.term(one) for one in (0, 7, 20, 21)] == [TERM_FINAL, 5, TERM_FINAL, 0]
        await store.close()
        store = await Store.open(path)
    await store.close()


async def test_damage_that_is_found_after_a_client_asked_gets_a_mark_of_its_own(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "data")
    await store.add(make_block(7, 0, [b"kept"]))
    await when_durable(partial(store.engine.append_mark, 7))
    marking, lookup = store.engine.marking, store.engine._lookup
    told = marking.tell(7)
    await lookup.mark(7, ValueError("found by the scrubber"))
    assert marking.of(7) > told
    found = marking.of(7)
    await lookup.mark(7, ValueError("found again"))
    assert marking.of(7) == found  # no client knows it, so that it covers this as well
    await when_durable(partial(marking.lift, 7, told, TERM_FINAL))
    assert store.engine.is_damaged(7)
    await store.close()


async def test_a_loss_that_is_found_meanwhile_waits_for_a_bound_of_its_own(tmp_path: Path) -> None:
    """The bookie asks which ids were given out, and finds another loss before it has the answer."""
    store = await Store.open(tmp_path / "data")
    marks, marking = store.engine._ledgers.marks, store.engine.marking
    marks.learn_mark(marks.draw(), NO_LEDGER)  # as the rebuilding of an index does
    asked = marking.number
    marks.learn_mark(marks.draw(), NO_LEDGER)
    await when_durable(partial(marking.bound_to, asked, 20))
    assert marking.is_unbounded
    assert not store.engine.is_writable
    await when_durable(partial(marking.bound_to, marking.number, 25))
    assert (marking.is_unbounded, marking.bound, store.engine.is_writable) == (False, 25, True)
    await store.close()
