"""Where a dead writer's ledger ends, by the answers of its bookies."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bookie_aio.wire.blocks import Block, encode_block
from bookie_aio.wire.messages import Stop
from client_aio.core.placement import seats_to_leave
from client_aio.core.quorum import write_set
from client_aio.core.recovery import Ask, End, EntrySearch, FenceTally, Found, Inconclusive

UNKNOWN = "unknown"


def block_of(entry_id: int, stride: int = 1) -> Block:
    data = f"entry {entry_id}".encode()
    encoded = encode_block(
        ledger_id=1, content_term=0, first_entry=entry_id, stride=stride, lac=-1, lafr=-1,
        payloads=[data], running=[len(data) * (entry_id + 1)],
    )  # fmt: skip
    return Block.parse(memoryview(encoded))


def answer_of(search: EntrySearch, ask: Ask, holds: dict[int, object]) -> None:
    """Answer as a bookie that holds these entries, up to 3 of them at a time."""
    entry_id, blocks = ask.first, []
    while holds.get(entry_id) is True and len(blocks) < 3:
        blocks.append(block_of(entry_id, ask.stride))
        entry_id += ask.stride
    if holds.get(entry_id) is True:
        stop = Stop.BUDGET
    elif holds.get(entry_id) == UNKNOWN:
        stop = Stop.UNKNOWN
    else:
        stop = Stop.NO_SUCH_ENTRY
    search.answer(ask, blocks, stop, entry_id)


def run(
    search: EntrySearch, bookies: list[dict[int, object] | None], rng: random.Random | None = None
) -> tuple[list[int], End | Inconclusive]:
    """Let the search ask until it is decided; a bookie given as None does not answer."""
    found, asks = [], []
    while True:
        step = search.step()
        match step:
            case Found(entry_id, payload):
                assert payload == f"entry {entry_id}".encode()
                found.append(entry_id)
            case End() | Inconclusive():
                return found, step
            case None:
                ask = asks.pop(rng.randrange(len(asks)) if rng else 0)
                holds = bookies[ask.seat]
                if holds is None:
                    search.error(ask)
                else:
                    answer_of(search, ask, holds)
            case new:
                asks += new


def holding(*entries: int) -> dict[int, object]:
    return dict.fromkeys(entries, True)


def test_an_entry_that_one_bookie_holds_is_recovered() -> None:
    search = EntrySearch(3, 3, 2, 0)
    assert run(search, [holding(0, 1, 2), holding(0, 1), holding(0)]) == ([0, 1, 2], End(2))


def test_a_single_negative_does_not_end_a_ledger_with_an_ack_quorum_of_two() -> None:
    search = EntrySearch(3, 3, 2, 0)
    assert run(search, [holding(), None, None]) == ([], Inconclusive(0, [1, 2]))


def test_enough_negatives_end_it_without_the_third_bookie() -> None:
    search = EntrySearch(3, 3, 2, 5)
    assert run(search, [holding(), None, holding()]) == ([], End(4))


def test_unknown_counts_on_neither_side() -> None:
    search = EntrySearch(3, 3, 2, 0)
    assert run(search, [holding(), {0: UNKNOWN}, None]) == ([], Inconclusive(0, [1, 2]))
    search = EntrySearch(3, 3, 2, 0)
    assert run(search, [holding(), {0: UNKNOWN}, holding()]) == ([], End(-1))
    search = EntrySearch(3, 3, 2, 0)
    assert run(search, [holding(), {0: UNKNOWN}, holding(0)]) == ([0], End(0))


def test_a_gap_ends_the_ledger_before_it() -> None:
    entries = [*range(10), 14]
    search = EntrySearch(3, 3, 2, 0)
    assert run(search, [holding(*entries)] * 3) == (list(range(10)), End(9))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 3, 3), (3, 2, 2), (4, 3, 2), (6, 3, 2)]),
)
def test_nothing_acknowledged_is_cut_off_and_nothing_beyond_a_proven_gap_is_kept(
    seed: int, shape: tuple[int, int, int]
) -> None:
    ensemble, write, ack = shape
    rng = random.Random(seed)
    bookies: list[dict[int, object] | None] = [{} for _ in range(ensemble)]
    acknowledged, contiguous = -1, True
    for entry_id in range(12):
        seats = write_set(entry_id % ensemble, ensemble, write)
        holders = rng.sample(seats, rng.randint(max(0, ack - 1), write))
        for seat in holders:
            bookies[seat][entry_id] = True
        contiguous = contiguous and len(holders) >= ack
        acknowledged = entry_id if contiguous else acknowledged
    for seat in range(ensemble):
        if rng.random() < 0.2:
            bookies[seat] = None
    start = rng.randint(0, acknowledged + 1)
    found, verdict = run(EntrySearch(ensemble, write, ack, start), bookies, rng)
    assert found == list(range(start, start + len(found)))
    if isinstance(verdict, End):
        assert verdict.last_entry == start + len(found) - 1
        assert verdict.last_entry >= acknowledged
    else:
        missing = {seat for seat in range(ensemble) if bookies[seat] is None}
        assert missing & set(verdict.seats)


def test_a_ledger_is_fenced_when_no_ack_quorum_is_left_without_an_answer() -> None:
    tally = FenceTally(3, 3, 2, 100)
    assert not tally.is_covered
    tally.answer(0, None)
    assert not tally.is_covered
    tally.answer(2, 150)
    assert tally.is_covered
    assert (tally.lac, tally.missing) == (150, [1])


def test_bookies_that_lost_data_cover_write_sets_and_prove_no_end() -> None:
    tally = FenceTally(3, 3, 2, 100)
    tally.answer(0, 150, is_damaged=True)
    tally.answer(1, 120)
    assert (tally.is_covered, tally.can_end, tally.lac) == (True, False, 150)
    tally.answer(2, None)
    assert tally.can_end


def test_an_end_may_lie_in_the_one_write_set_that_lost_nothing() -> None:
    tally = FenceTally(4, 2, 2, 0)
    for seat in range(4):
        assert not tally.can_end
        tally.answer(seat, None, is_damaged=seat != 3)
    assert tally.can_end


@pytest.mark.parametrize("stated", [None, -1, 1999])
def test_recovery_never_goes_back_behind_the_last_fragment(stated: int | None) -> None:
    """The writer changed ensembles at 2000 and died at once: its new bookies know of no LAC."""
    tally = FenceTally(3, 3, 2, 2000)
    for seat in range(3):
        tally.answer(seat, stated)
    assert tally.lac == 1999


@given(data=st.data())
def test_seats_that_were_down_from_the_start_hide_nothing_and_keep_nothing_open(data: st.DataObject) -> None:
    """A ledger began with some seats down. Its writer died; these bookies are back, and say no to everything.

    Others may be silent instead, as far as the fences cover. Every acknowledged entry is found.
    """
    size = data.draw(st.integers(1, 5), "E")
    write_quorum = data.draw(st.integers(1, size), "Qw")
    ack_quorum = data.draw(st.integers(1, write_quorum), "Qa")
    rng = random.Random(data.draw(st.integers(0, 999), "seed"))
    down_mask = seats_to_leave(
        range(size),
        data.draw(st.integers(0, size), "down"),
        ensemble_size=size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        rng=rng,
    )
    assume(down_mask is not None)
    down = {seat for seat in range(size) if (down_mask or 0) >> seat & 1}
    holds: list[dict[int, object]] = [{} for _ in range(size)]
    acknowledged = -1
    for entry_id in range(data.draw(st.integers(0, 8), "entries")):
        live = [seat for seat in write_set(entry_id % size, size, write_quorum) if seat not in down]
        holders = rng.sample(live, rng.randint(0, len(live)))
        for seat in holders:
            holds[seat][entry_id] = True
        if len(holders) >= ack_quorum and acknowledged == entry_id - 1:
            acknowledged = entry_id
    tally = FenceTally(size, write_quorum, ack_quorum, 0)
    bookies: list[dict[int, object] | None] = [None] * size
    for seat in rng.sample(range(size), size):
        if not tally.is_covered:
            tally.answer(seat, None)
            bookies[seat] = holds[seat]
    found, end = run(EntrySearch(size, write_quorum, ack_quorum, 0), bookies, rng)
    assert found[: acknowledged + 1] == list(range(acknowledged + 1))
    if isinstance(end, End):
        assert end.last_entry >= acknowledged
    _, end = run(EntrySearch(size, write_quorum, ack_quorum, 0), list(holds), rng)
    assert isinstance(end, End)  # With every bookie back, the newcomers too, it can always be closed.
