"""The arithmetic of quorums equals its definition, for every ensemble of up to seven bookies.

The definitions are spelled out here with sets and combinations, sharing nothing with the code: an entry is
acknowledged when an ack quorum of its write set holds it, and a set of answers is enough when no ack quorum
is left without one. First the arithmetic itself, then the machines that use it, over all sets of answers.
"""

from itertools import combinations, product

import pytest

from bookie_aio.wire.blocks import Block, encode_block
from bookie_aio.wire.messages import Stop
from client_aio.core.add_window import AddWindow, Send
from client_aio.core.quorum import (
    can_acknowledge,
    carries_on,
    covers_all_write_sets,
    indexes_of,
    proves_absent,
    write_set,
    write_set_masks,
)
from client_aio.core.recovery import Ask, End, EntrySearch, FenceTally, Found, Inconclusive

SHAPES = [
    (ensemble, write, ack)
    for ensemble in range(1, 8)
    for write in range(1, ensemble + 1)
    for ack in range(1, write + 1)
]


def ack_quorums_of(entry: int, ensemble: int, write: int, ack: int) -> list[set[int]]:
    """All sets of bookies that can acknowledge an entry, by definition."""
    members = [(entry + offset) % ensemble for offset in range(write)]
    return [set(quorum) for quorum in combinations(members, ack)]


def ack_quorums(ensemble: int, write: int, ack: int) -> list[set[int]]:
    """All sets of bookies that can acknowledge some entry, by definition."""
    return [quorum for entry in range(ensemble) for quorum in ack_quorums_of(entry, ensemble, write, ack)]


def subsets(ensemble: int) -> list[set[int]]:
    """All sets of bookies."""
    return [{index for index in range(ensemble) if mask >> index & 1} for mask in range(1 << ensemble)]


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_a_ledger_carries_on_where_each_write_set_has_an_ack_quorum_and_each_ack_quorum_an_answer(
    ensemble: int, write: int, ack: int
) -> None:
    by_entry = [ack_quorums_of(entry, ensemble, write, ack) for entry in range(ensemble)]
    for members in subsets(ensemble):
        has_quorums = all(any(quorum <= members for quorum in quorums) for quorums in by_entry)
        covers = all(quorum & members for quorums in by_entry for quorum in quorums)
        answered = sum(1 << index for index in members)
        assert carries_on(answered, ensemble, write, ack) == (has_quorums and covers)


def test_a_write_set_starts_at_its_index_and_wraps_around() -> None:
    assert write_set(0, 5, 3) == (0, 1, 2)
    assert write_set(4, 5, 3) == (4, 0, 1)


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_coverage_means_that_no_ack_quorum_is_left_without_an_answer(
    ensemble: int, write: int, ack: int
) -> None:
    quorums = ack_quorums(ensemble, write, ack)
    for answered in range(1 << ensemble):
        silent = {index for index in range(ensemble) if not answered >> index & 1}
        expected = not any(quorum <= silent for quorum in quorums)
        assert covers_all_write_sets(answered, ensemble, write, ack) == expected


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_every_entry_can_be_acknowledged_while_each_write_set_has_an_ack_quorum(
    ensemble: int, write: int, ack: int
) -> None:
    for failed in range(1 << ensemble):
        alive = {index for index in range(ensemble) if not failed >> index & 1}
        expected = all(
            len(alive & {(entry + offset) % ensemble for offset in range(write)}) >= ack
            for entry in range(ensemble)
        )
        assert can_acknowledge(failed, ensemble, write, ack) == expected


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_negatives_prove_absence_when_every_ack_quorum_has_one_of_them(
    ensemble: int, write: int, ack: int
) -> None:
    members = range(write)
    for count in range(write + 1):
        expected = all(
            set(quorum) & set(negatives)
            for negatives in combinations(members, count)
            for quorum in combinations(members, ack)
        )
        assert proves_absent(count, write, ack) == expected


def test_masks_name_the_members_of_each_write_set() -> None:
    assert [list(indexes_of(mask)) for mask in write_set_masks(4, 2)] == [[0, 1], [1, 2], [2, 3], [0, 3]]


# --- the machines, over all sets of answers ---


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_fencing_ends_exactly_when_no_ack_quorum_is_left_without_an_answer(
    ensemble: int, write: int, ack: int
) -> None:
    quorums = ack_quorums(ensemble, write, ack)
    for answered in subsets(ensemble):
        tally = FenceTally(ensemble, write, ack, 0)
        for seat in answered:
            tally.answer(seat, None)
        silent = set(range(ensemble)) - answered
        assert tally.is_covered == (not any(quorum <= silent for quorum in quorums))
        assert tally.missing == sorted(silent)


def test_coverage_with_striping_over_six_bookies() -> None:
    """E=6, Qw=3, Qa=2: any five answers do, and four where the two silent bookies sit opposite each other.

    No count says so: four answers may leave an ack quorum silent (0 and 1 serve entries 0 and 5), and three
    always do. The rule for an ensemble without stripes, Qw − Qa + 1 = 2 answers, would be wrong by far.
    """
    enough = [answered for answered in subsets(6) if covers_all_write_sets(mask_of(answered), 6, 3, 2)]
    opposite = [set(range(6)) - {index, index + 3} for index in range(3)]
    assert [answered for answered in enough if len(answered) < 5] == sorted(opposite, key=mask_of)
    assert sum(len(answered) == 5 for answered in enough) == 6


def mask_of(members: set[int]) -> int:
    return sum(1 << index for index in members)


def new_window(ensemble: int, write: int, ack: int) -> tuple[AddWindow[int], list[Send]]:
    """A window with one entry for each write set, each sent on its own."""
    window: AddWindow[int] = AddWindow(
        ledger_id=1, content_term=0, ensemble_size=ensemble, write_quorum=write, ack_quorum=ack
    )
    sends = []
    for entry in range(ensemble):
        window.add(b"", entry)
        sends += window.flush()
    return window, sends


def last_acknowledged(holders: set[int], ensemble: int, write: int, ack: int) -> int:
    """The LAC by definition: up to it, an ack quorum of each entry's write set holds the entry."""
    last = -1
    for entry in range(ensemble):
        if not any(quorum <= holders for quorum in ack_quorums_of(entry, ensemble, write, ack)):
            break
        last = entry
    return last


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_entries_are_acknowledged_exactly_while_an_ack_quorum_of_each_holds_it(
    ensemble: int, write: int, ack: int
) -> None:
    for holders in subsets(ensemble):
        window, sends = new_window(ensemble, write, ack)
        acknowledged = [
            token
            for send in sends
            if send.seat in holders
            for turn in window.acknowledged(send)
            for token in turn.tokens
        ]
        assert window.lac == last_acknowledged(holders, ensemble, write, ack)
        assert acknowledged == list(range(window.lac + 1))


@pytest.mark.parametrize(("ensemble", "write", "ack"), [shape for shape in SHAPES if shape[0] <= 5])
def test_after_a_change_exactly_the_answers_of_bookies_that_stayed_or_came_count(
    ensemble: int, write: int, ack: int
) -> None:
    """All sets of answers before the change × all sets of replaced bookies."""
    for holders, replaced in product(subsets(ensemble), subsets(ensemble)):
        window, sends = new_window(ensemble, write, ack)
        window.begin_change()
        for send in sends:
            if send.seat in holders:
                assert window.acknowledged(send) == []
        owed = window.commit_change(mask_of(replaced))
        window.advance()
        assert window.lac == last_acknowledged(holders - replaced, ensemble, write, ack)
        for send in sends:  # late answers of the former occupants
            if send.seat in replaced:
                assert window.acknowledged(send) == []
        for send in owed:
            window.acknowledged(send)
        assert window.lac == last_acknowledged(holders | replaced, ensemble, write, ack)


YES, NO, UNKNOWN, SILENT = "yes", "no", "unknown", "silent"


def block_of(entry_id: int) -> Block:
    encoded = encode_block(
        ledger_id=1, content_term=0, first_entry=entry_id, stride=1, lac=-1, lafr=-1,
        payloads=[b""], running=[0],
    )  # fmt: skip
    return Block.parse(memoryview(encoded))


def decide(search: EntrySearch, entry_id: int, block: Block, answers: dict[int, str]) -> object:
    """Answer the reads for one entry until it is decided."""
    asks: list[Ask] = []
    while True:
        match search.step():
            case None:
                ask = asks.pop(0)
                match answers[ask.seat]:
                    case "yes":
                        search.answer(ask, [block], Stop.BUDGET, entry_id + 1)
                    case "no":
                        search.answer(ask, [], Stop.NO_SUCH_ENTRY, entry_id)
                    case "unknown":
                        search.answer(ask, [], Stop.UNKNOWN, entry_id)
                    case _:
                        search.error(ask)
            case list() as new:
                asks += new
            case decision:
                return decision


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_recovery_decides_exactly_what_the_answers_prove(ensemble: int, write: int, ack: int) -> None:
    """Every answer of every bookie of a write set, for one that lies straight and one that wraps around."""
    kinds = (YES, NO, UNKNOWN, SILENT) if write <= 4 else (YES, NO, UNKNOWN)
    for entry_id in {0, ensemble - 1}:
        seats = [(entry_id + offset) % ensemble for offset in range(write)]
        quorums = ack_quorums_of(entry_id, ensemble, write, ack)
        block = block_of(entry_id)
        for combination in product(kinds, repeat=write):
            answers = dict(zip(seats, combination, strict=True))
            said_no = {seat for seat in seats if answers[seat] == NO}
            is_absent = all(quorum & said_no for quorum in quorums)
            decision = decide(EntrySearch(ensemble, write, ack, entry_id), entry_id, block, answers)
            match decision:
                case Found():
                    assert YES in combination
                case End():
                    assert is_absent
                case Inconclusive():
                    assert YES not in combination
                    assert not is_absent
                    assert set(decision.seats) == set(seats) - said_no
