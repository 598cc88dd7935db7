"""What the add window acknowledges, and what an ensemble change does to it."""

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bookie_aio.wire.blocks import Block
from bookie_aio.wire.frames import FRAME_BYTES_MAX
from client_aio.core.add_window import BATCH_ENTRIES_MAX, AddWindow, Send


def new_window(ensemble: int = 3, write: int = 3, ack: int = 2, **options: Any) -> AddWindow[str]:
    return AddWindow(
        ledger_id=7,
        content_term=0,
        ensemble_size=ensemble,
        write_quorum=write,
        ack_quorum=ack,
        **options,
    )


def add(window: AddWindow[str], *names: str) -> list[Send]:
    for name in names:
        window.add(name.encode(), name)
    return window.flush()


def acknowledge(window: AddWindow[str], sends: list[Send], *seats: int) -> list[str]:
    """Answer the sends of these seats; returns the tokens acknowledged by it, in order."""
    done = []
    for seat in seats:
        for send in sends:
            if send.seat == seat:
                done += [token for turn in window.acknowledged(send) for token in turn.tokens]
    return done


def test_an_entry_is_acknowledged_by_the_ack_quorum_and_not_before() -> None:
    window = new_window()
    sends = add(window, "a")
    assert sorted(send.seat for send in sends) == [0, 1, 2]
    assert acknowledge(window, sends, 1) == []
    assert acknowledge(window, sends, 1) == []  # the same bookie again is no second one
    assert window.lac == -1
    assert acknowledge(window, sends, 2) == ["a"]
    assert window.lac == 0


def test_a_later_entry_waits_for_all_before_it() -> None:
    window = new_window()
    first, second = add(window, "a"), add(window, "b")
    assert acknowledge(window, second, 0, 1, 2) == []
    assert acknowledge(window, first, 2) == []
    assert acknowledge(window, first, 0) == ["a", "b"]


def test_entries_of_one_turn_travel_in_one_batch_and_state_the_lac() -> None:
    window = new_window()
    sends = add(window, "a", "bb", "")
    assert len(sends) == 3
    block = Block.parse(memoryview(sends[0].batch.block))
    assert (list(block.entry_ids), list(block.running), block.lac) == ([0, 1, 2], [1, 3, 3], -1)
    acknowledge(window, sends, 0, 1)
    assert Block.parse(memoryview(add(window, "c")[0].batch.block)).lac == 2
    assert (window.length_confirmed, window.length_pushed) == (3, 4)


def test_a_large_turn_is_cut_into_batches() -> None:
    window = new_window(1, 1, 1)
    for _ in range(BATCH_ENTRIES_MAX + 1):
        window.add(b"", "x")
    counts = [send.batch.count for send in window.flush()]
    assert counts == [BATCH_ENTRIES_MAX, 1]


def test_striping_sends_each_entry_to_its_write_set() -> None:
    window = new_window(5, 3, 2)
    sends = add(window, *"abcdefg")
    for entry_id in range(7):
        seats = {
            send.seat for send in sends if entry_id in Block.parse(memoryview(send.batch.block)).entry_ids
        }
        assert seats == {entry_id % 5, (entry_id + 1) % 5, (entry_id + 2) % 5}
    assert acknowledge(window, sends, 0, 1, 2) == []  # entry 3 is on 3, 4 and 0: one of its two
    assert acknowledge(window, sends, 3) == list("abcdefg")


def test_nothing_is_acknowledged_while_an_ensemble_change_is_in_flight() -> None:
    window = new_window()
    sends = add(window, "a")
    window.fail(0, window.epoch(0))
    assert window.begin_change() == 0
    assert acknowledge(window, sends, 1, 2) == []
    assert window.lac == -1
    window.commit_change(0b001)
    assert [turn.tokens for turn in window.advance()] == [["a"]]


def test_the_first_entry_of_a_change_is_captured_before_anything_else_moves() -> None:
    window = new_window()
    acknowledge(window, add(window, "a", "b"), 0, 1)
    sends = add(window, "c")
    window.fail(2, window.epoch(2))
    first_entry = window.begin_change()
    acknowledge(window, sends, 0, 1)
    assert (first_entry, window.lac) == (2, 1)


def test_acknowledgements_of_a_replaced_bookie_count_no_more_whenever_they_arrive() -> None:
    window = new_window()
    sends = add(window, "a")
    acknowledge(window, sends, 0)
    window.fail(0, window.epoch(0))
    window.begin_change()
    owed = window.commit_change(0b001)
    assert acknowledge(window, sends, 0) == []  # late, of the former occupant
    assert acknowledge(window, sends, 1) == []  # with the former occupant's this would be two
    assert acknowledge(window, owed, 0) == ["a"]


def test_a_new_bookie_is_sent_exactly_what_it_owes() -> None:
    window = new_window(5, 3, 2)
    acknowledge(window, add(window, *"abcde"), 0, 1, 2, 3, 4)
    add(window, *"fghij")
    window.fail(1, window.epoch(1))
    window.begin_change()
    owed = window.commit_change(0b00010)
    ids = sorted(
        entry_id for send in owed for entry_id in Block.parse(memoryview(send.batch.block)).entry_ids
    )
    assert {send.seat for send in owed} == {1}
    assert ids == [5, 6, 9]  # of 5 … 9 those whose write set holds seat 1: 5 on 0 1 2, 6 on 1 2 3, 9 on 4 0 1


def test_a_bookie_that_comes_back_counts_only_after_the_resend() -> None:
    window = new_window()
    sends = add(window, "a")
    acknowledge(window, sends, 0)
    window.fail(0, window.epoch(0))
    window.begin_change()
    owed = window.commit_change(0b001)  # the same bookie in the same seat
    assert acknowledge(window, sends, 1) == []
    assert acknowledge(window, owed, 0) == ["a"]


def test_a_failed_bookie_that_is_not_replaced_is_sent_nothing_and_its_acks_stay() -> None:
    window = new_window()
    sends = add(window, "a")
    acknowledge(window, sends, 0)
    assert window.fail(0, window.epoch(0))
    assert not window.fail(0, window.epoch(0))
    assert {send.seat for send in add(window, "b")} == {1, 2}
    assert acknowledge(window, sends, 1) == ["a"]
    assert window.can_acknowledge
    window.fail(1, window.epoch(1))
    assert not window.can_acknowledge


def test_a_recovery_states_the_lac_it_was_given_whatever_it_has_written_back() -> None:
    window = new_window(next_entry=10, length=100, stated_lac=9)
    acknowledge(window, add(window, "a"), 0, 1)
    block = Block.parse(memoryview(add(window, "b")[0].batch.block))
    assert (block.first_entry, block.lac, list(block.running)) == (11, 9, [102])


def test_abort_gives_back_everything_outstanding_in_order() -> None:
    window = new_window()
    acknowledge(window, add(window, "a"), 0, 1)
    add(window, "b", "c")
    window.add(b"d", "d")
    assert window.abort().tokens() == ["b", "c", "d"]
    assert window.is_idle
    assert window.bytes_held == 0


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(1, 1, 1), (3, 3, 2), (3, 2, 1), (5, 3, 2), (4, 2, 2)]),
)
def test_any_history_acknowledges_each_entry_once_in_order_on_an_ack_quorum(
    seed: int, shape: tuple[int, int, int]
) -> None:
    """A model of the bookies keeps what each seat's present occupant stores; acks need Qa of those."""
    ensemble, write, ack = shape
    rng, names = random.Random(seed), count()
    window: AddWindow[int] = AddWindow(
        ledger_id=1, content_term=0, ensemble_size=ensemble, write_quorum=write, ack_quorum=ack
    )
    outstanding: list[Send] = []
    stored: list[set[int]] = [set() for _ in range(ensemble)]
    occupant = [0] * ensemble
    expected = 0

    def check(turns: list) -> None:
        nonlocal expected
        for turn in turns:
            for token in turn.tokens:
                assert token == expected
                holders = sum(expected in stored[(expected + offset) % ensemble] for offset in range(write))
                assert holders >= ack
                expected += 1

    for _ in range(60):
        match rng.randrange(6):
            case 0 | 1:
                for _ in range(rng.randrange(1, 6)):
                    window.add(b"x", next(names))
                outstanding += window.flush()
            case 2 | 3 if outstanding:
                send = outstanding.pop(rng.randrange(len(outstanding)))
                if send.epoch == occupant[send.seat]:
                    stored[send.seat].update(Block.parse(memoryview(send.batch.block)).entry_ids)
                check(window.acknowledged(send))
            case 4:
                seat = rng.randrange(ensemble)
                window.fail(seat, window.epoch(seat))
            case 5:
                if window.is_frozen:
                    replaced = window.failed
                    for seat in range(ensemble):
                        if replaced >> seat & 1:
                            stored[seat] = set()
                            occupant[seat] += 1
                    outstanding += window.commit_change(replaced)
                    check(window.advance())
                elif window.failed:
                    assert window.begin_change() == expected
    assert window.lac == expected - 1


@pytest.mark.parametrize("frozen", [True, False])
def test_a_change_is_begun_once(frozen: bool) -> None:
    window = new_window()
    if frozen:
        window.begin_change()
        with pytest.raises(AssertionError):
            window.begin_change()
    else:
        with pytest.raises(AssertionError):
            window.commit_change(0)


# --- what is retained beyond its acknowledgement ---


def test_with_guaranteed_write_quorum_an_entry_is_kept_until_all_have_it() -> None:
    window = new_window(guaranteed_write_quorum=True)
    sends = add(window, "a")
    assert acknowledge(window, sends, 0, 1) == ["a"]
    assert (window.lac, window.lafr, window.is_idle) == (0, -1, False)
    assert window.bytes_held > 0
    assert acknowledge(window, sends, 2) == []
    assert (window.lac, window.lafr, window.is_idle, window.bytes_held) == (0, 0, True, 0)


def test_the_lafr_waits_for_every_entry_before_it_and_is_stated() -> None:
    window = new_window(guaranteed_write_quorum=True)
    first, second = add(window, "a"), add(window, "b")
    acknowledge(window, first, 0, 1)
    acknowledge(window, second, 0, 1, 2)
    assert (window.lac, window.lafr) == (1, -1)
    acknowledge(window, first, 2)
    assert window.lafr == 1
    block = Block.parse(memoryview(add(window, "c")[0].batch.block))
    assert (block.lac, block.lafr) == (1, 1)


def test_an_abandoned_change_leaves_the_seats_of_the_newcomers_empty() -> None:
    window = new_window(guaranteed_write_quorum=True)
    first = add(window, "a")
    acknowledge(window, first, 0, 1)
    window.fail(0, window.epoch(0))
    window.begin_change()
    copies = window.seat_replacements(0b001)
    acknowledge(window, copies, 0)
    second = add(window, "b")
    assert window.can_abandon
    window.abandon_change()
    assert (window.is_frozen, window.failed, window.replacements) == (False, 0b001, 0)
    assert window.advance() == []
    assert [send.seat for send in add(window, "c")] == [1, 2]
    # Neither the newcomer's acknowledgements count, nor those of whoever sat there before.
    assert acknowledge(window, [*first, *copies], 0, 2) == []
    assert (window.lac, window.lafr) == (0, -1)
    assert acknowledge(window, second, 0, 1) == []
    assert acknowledge(window, second, 2) == ["b"]
    # Who takes the seat owes all that is not on the whole write set, acknowledged or not.
    window.begin_change()
    copies = window.seat_replacements(0b001)
    assert [send.batch.first_entry for send in copies] == [0, 1]
    acknowledge(window, copies, 0)
    assert [send.batch.first_entry for send in window.commit_change(0b001)] == [2]
    assert window.advance() == []
    assert window.lafr == 1


def test_a_change_is_not_abandoned_where_too_few_are_left_without_the_newcomers() -> None:
    window = new_window(guaranteed_write_quorum=True)
    acknowledge(window, add(window, "a"), 0, 1)
    window.fail(0, window.epoch(0))
    window.begin_change()
    window.seat_replacements(0b001)
    window.fail(2, window.epoch(2))
    assert not window.can_abandon


def test_with_deferred_sync_receipt_is_reported_and_force_acknowledges() -> None:
    window = new_window(deferred_sync=True)
    sends = add(window, "a")
    assert acknowledge(window, sends, 0, 1) == ["a"]
    assert (window.last_entry_reported, window.lac, window.length_confirmed) == (0, -1, 0)
    assert window.forced(0, window.epoch(0), 0) == []
    assert window.lac == -1
    window.forced(1, window.epoch(1), 0)
    assert (window.lac, window.length_confirmed, window.is_idle) == (0, 1, True)


def test_a_force_covers_what_was_sent_before_it_and_received() -> None:
    window = new_window(deferred_sync=True)
    first = add(window, "a")
    sent = window.last_entry_sent
    second = add(window, "b")
    acknowledge(window, first, 0, 1)
    acknowledge(window, second, 0, 1)
    for seat in (0, 1, 2):  # the third has not received anything
        window.forced(seat, window.epoch(seat), sent)
    assert window.lac == 0


def test_what_a_replaced_bookie_forced_counts_no_more() -> None:
    window = new_window(deferred_sync=True)
    sends = add(window, "a")
    acknowledge(window, sends, 0, 1)
    former = window.epoch(0)
    window.forced(0, former, 0)
    window.fail(0, former)
    assert window.begin_change() == 0
    resent = window.commit_change(0b001)
    assert [(send.seat, send.batch.first_entry) for send in resent] == [(0, 0)]
    window.forced(1, window.epoch(1), 0)
    window.forced(0, former, 0)
    assert window.lac == -1
    acknowledge(window, resent, 0)
    window.forced(0, window.epoch(0), 0)
    assert window.lac == 0


def test_what_one_write_set_gets_of_a_turn_fits_into_a_frame() -> None:
    """A bookie closes the connection over a larger one, and its replacement does so too."""
    window = new_window(64, 1, 1)
    large = b"x" * (3 * 1024 * 1024)
    for number in range(65):  # the first and the last are of one write set
        window.add(large if number in (0, 64) else b"", str(number))
    sends = window.flush()
    assert sum(send.batch.count for send in sends) == 65
    assert max(len(send.batch.block) for send in sends) < FRAME_BYTES_MAX
