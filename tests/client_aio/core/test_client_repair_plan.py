"""What a repair copies and changes, by brute force over small shapes."""

from __future__ import annotations

import itertools
import random

import pytest

from bookie_aio.wire.blocks import Block, encode_block
from bookie_aio.wire.listing import Row
from bookie_aio.wire.messages import Stop
from client_aio.core.quorum import write_set
from client_aio.core.read_plan import ClassRange
from client_aio.core.recovery import End, EntrySearch, Found, LossyEnd
from client_aio.core.repair_plan import (
    EntryRun,
    LostRuns,
    Part,
    complete_parts,
    entries_of,
    first_held,
    owed,
    plan,
    replaced,
    replaced_in_page,
    split,
)
from metadata.errors import InvalidTransitionError
from metadata.model.given_up import GivenUp
from metadata.model.ledger import ABSENT_MAX, Absent, Fragment, LedgerMetadata
from metadata.store import VALUE_BYTES_MAX

ENTRY = encode_block(
    ledger_id=7, content_term=0, first_entry=0, stride=1, lac=-1, lafr=-1, payloads=[b"x"], running=[1]
)
SHAPES = [(e, qw) for e in range(1, 6) for qw in range(1, e + 1)]


def bookies(size: int, *, shift: int = 0) -> list[str]:
    return [f"b{(number + shift) % 7}" for number in range(size)]


def make(size: int, write_quorum: int, starts: list[int], last_entry: int | None) -> LedgerMetadata:
    """Return a ledger whose fragments start there; CLOSED when it has a last entry."""
    metadata = LedgerMetadata.new(
        7, ensemble_size=size, write_quorum=write_quorum, ack_quorum=1, bookies=bookies(size)
    )
    for number, start in enumerate(starts[1:], 1):
        metadata = metadata.change_ensemble(start, bookies(size, shift=number))
    if last_entry is not None:
        metadata = metadata.close(last_entry, 100)
    return metadata


def owed_by_definition(metadata: LedgerMetadata, bookie_id: str, first: int, last: int) -> list[int]:
    size = metadata.ensemble_size
    return [
        entry_id
        for entry_id in range(first, last + 1)
        if bookie_id
        in [
            metadata.fragment_of(entry_id).bookies[seat]
            for seat in write_set(entry_id % size, size, metadata.write_quorum)
        ]
    ]


@pytest.mark.parametrize(("size", "write_quorum"), SHAPES)
@pytest.mark.parametrize("starts", [[0], [0, 1], [0, 4], [0, 3, 11]])
@pytest.mark.parametrize("last_entry", [None, 10, 13, 20])
def test_what_is_owed_is_what_the_write_sets_say(
    size: int, write_quorum: int, starts: list[int], last_entry: int | None
) -> None:
    metadata = make(size, write_quorum, starts, last_entry)
    ends = [start - 1 for start in starts[1:]]
    ends += [] if last_entry is None else [last_entry]
    for bookie_id, entries_max in itertools.product([f"b{number}" for number in range(7)], [1, 3, 100]):
        found = plan(metadata, bookie_id)
        fixed = [
            (fragment.first_entry, end)
            for fragment, end in zip(metadata.fragments, ends, strict=False)
            if bookie_id in fragment.bookies
        ]
        assert [(part.first_entry, part.last_entry) for part in found.parts] == fixed
        assert found.is_last_left == (last_entry is None and bookie_id in metadata.last_fragment.bookies)
        for part in found.parts:
            pieces = list(owed(metadata, part, bookie_id, entries_max))
            ids = [range(piece.first, piece.last + 1, piece.stride) for piece in pieces]
            assert all(1 <= len(one) <= entries_max for one in ids)
            assert sorted(itertools.chain(*ids)) == owed_by_definition(
                metadata, bookie_id, part.first_entry, part.last_entry
            )
            for piece in pieces:
                for entry_id in range(piece.first, piece.last + 1, piece.stride):
                    seats = write_set(entry_id % size, size, write_quorum)
                    holders = {part.bookies[seat] for seat in seats}
                    assert holders - {bookie_id} == set(piece.bookies)


def test_the_sources_take_turns() -> None:
    metadata = make(3, 3, [0], 99)
    (part,) = plan(metadata, "b1").parts
    assert [piece.bookies[0] for piece in owed(metadata, part, "b1", 30)] == ["b0", "b2", "b0", "b2"]


def test_what_the_newcomer_lists_is_not_copied() -> None:
    metadata = make(3, 2, [0], 29)
    (part,) = plan(metadata, "b1").parts
    rows = [Row(0, 0, 4, 3), Row(4, 0, 2, 3), Row(18, 0, 1, 1)]
    lacking, there = [], []
    for piece in owed(metadata, part, "b1", 100):
        one, other = split(piece, rows)
        lacking += [entry_id for run in one for entry_id in range(run.first, run.last + 1, run.stride)]
        there += [entry_id for run in other for entry_id in range(run.first, run.last + 1, run.stride)]
    assert sorted(there) == [0, 3, 4, 6, 7, 9, 18]
    assert sorted(lacking + there) == owed_by_definition(metadata, "b1", 0, 29)


def test_repair_of_the_last_fragment_between_two_recoveries_would_make_false_negatives() -> None:
    """What rule 14 keeps from happening, played with the machine that recovers.

    Entry 0 is acknowledged by b0 and b1; b2 never got it. The first recovery dies in the middle of its work.
    Then somebody repairs the last fragment: b3, which holds nothing yet, takes the place of b0.
    """
    metadata = make(3, 3, [0], None).begin_recovery()
    holders = {"b0", "b1"}
    naive = metadata.replace_bookie(0, "b0", "b3")
    ends = {}
    for name, ensemble in (("as it was", metadata), ("repaired", naive)):
        search = EntrySearch(3, 3, 2, 0)
        asks = search.step()
        assert isinstance(asks, list)
        for ask in asks:  # b1 is slow
            bookie_id = ensemble.last_fragment.bookies[ask.seat]
            if bookie_id == "b1":
                search.error(ask)
            elif bookie_id in holders:
                search.answer(ask, [Block.parse(memoryview(ENTRY))], Stop.NO_SUCH_ENTRY, 1)
            else:
                search.answer(ask, [], Stop.NO_SUCH_ENTRY, 0)
        ends[name] = search.step()
    assert isinstance(ends["as it was"], Found)
    assert ends["repaired"] == End(-1)  # an acknowledged entry would be cut off
    (last,) = plan(make(3, 3, [0], 0), "b0").parts
    assert replaced(metadata, last, "b0", "b3") is None


class TestReplacing:
    """The change of the metadata, made anew after a conflict."""

    def test_it_changes_one_id_and_nothing_else(self) -> None:
        metadata = make(3, 3, [0, 5, 9], None)
        (part, *_) = plan(metadata, "b1").parts
        changed = replaced(metadata, part, "b1", "x")
        assert changed is not None
        assert changed.fragments[0].bookies == ("b0", "x", "b2")
        assert changed.fragments[1:] == metadata.fragments[1:]
        for name in ("state", "term", "last_entry", "length", "custom", "digest"):
            assert getattr(changed, name) == getattr(metadata, name)

    def test_it_stands_when_the_writer_changed_ensembles_or_was_recovered(self) -> None:
        metadata = make(3, 3, [0, 5], None)
        (part,) = plan(metadata, "b1").parts[:1]
        later = metadata.change_ensemble(8, ["b3", "b4", "b5"])
        for now in (later, later.begin_recovery(), later.begin_recovery().close(9, 100), later.close(9, 1)):
            changed = replaced(now, part, "b1", "x")
            assert changed is not None
            assert changed.fragments == (changed.fragments[0], *now.fragments[1:])
            assert "x" in changed.fragments[0].bookies

    def test_the_last_fragment_of_a_ledger_that_is_not_closed_is_never_touched(self) -> None:
        closed = make(3, 3, [0, 5], 9)
        part = plan(closed, "b1").parts[-1]
        assert part.first_entry == 5
        still_open = make(3, 3, [0, 5], None)
        for now in (still_open, still_open.begin_recovery()):
            assert plan(now, "b1").is_last_left
            assert [one.first_entry for one in plan(now, "b1").parts] == [0]
            assert replaced(now, part, "b1", "x") is None

    def test_the_plan_is_made_anew_when_somebody_else_repaired(self) -> None:
        metadata = make(3, 3, [0, 5], 9)
        part = plan(metadata, "b1").parts[0]
        assert replaced(metadata.replace_bookie(0, "b1", "y"), part, "b1", "x") is None
        assert replaced(metadata.replace_bookie(0, "b0", "x"), part, "b1", "x") is None
        assert replaced(metadata.replace_bookie(0, "b0", "y"), part, "b1", "x") is None  # other sources

    def test_a_last_fragment_that_holds_nothing_is_replaced_as_well(self) -> None:
        metadata = make(3, 3, [0, 5], 4)
        part = plan(metadata, "b1").parts[-1]
        assert (part.first_entry, part.last_entry) == (5, 4)
        assert list(owed(metadata, part, "b1", 10)) == []
        changed = replaced(metadata, part, "b1", "x")
        assert changed is not None
        assert "x" in changed.last_fragment.bookies

    def test_a_bookie_is_not_in_a_fragment_twice(self) -> None:
        metadata = make(3, 3, [0], 9)
        with pytest.raises(InvalidTransitionError):
            metadata.replace_bookie(0, "b1", "b2")


class TestReplacingInAPage:
    """The same, where fragments stand in a page: of that one they are all complete."""

    PAGE = (
        Fragment(10, ("b0", "b1", "b2"), 1),
        Fragment(20, ("b1", "b2", "b3"), 1),
        Fragment(25, ("b1", "b2", "b3"), 4),
    )
    PART = Part(20, 24, 1, ("b1", "b2", "b3"))

    def test_all_fragments_of_a_page_are_complete_and_the_last_of_a_growing_ledger_is_not(self) -> None:
        assert complete_parts(self.PAGE, 29) == (
            Part(10, 19, 1, ("b0", "b1", "b2")), self.PART, Part(25, 29, 4, ("b1", "b2", "b3")),
        )  # fmt: skip
        assert complete_parts(self.PAGE, None) == complete_parts(self.PAGE, 29)[:-1]
        assert complete_parts(self.PAGE[:1], None) == complete_parts((), 29) == ()

    def test_it_changes_one_id_of_one_fragment_and_nothing_else(self) -> None:
        first, _, last = self.PAGE
        changed = replaced_in_page(self.PAGE, 29, self.PART, "b2", "x")
        assert changed == (first, Fragment(20, ("b1", "x", "b3"), 1), last)
        changed = replaced_in_page(self.PAGE, 29, Part(25, 29, 4, last.bookies), "b1", "x")
        assert changed == (*self.PAGE[:2], Fragment(25, ("x", "b2", "b3"), 4))

    def test_it_stands_when_what_is_before_it_was_trimmed(self) -> None:
        changed = replaced_in_page(self.PAGE[1:], 29, self.PART, "b2", "x")
        assert changed == (Fragment(20, ("b1", "x", "b3"), 1), self.PAGE[2])

    def test_a_fragment_that_was_trimmed_is_not_brought_back(self) -> None:
        assert replaced_in_page(self.PAGE[2:], 29, self.PART, "b2", "x") is None

    @pytest.mark.parametrize(
        "bookies", [("b1", "x", "b3"), ("b1", "y", "b3"), ("x", "b2", "b3"), ("y", "b2", "b3")]
    )
    def test_the_plan_is_made_anew_when_somebody_else_repaired(self, bookies: tuple[str, ...]) -> None:
        first, _, last = self.PAGE
        now = (first, Fragment(20, bookies, 1), last)
        assert replaced_in_page(now, 29, self.PART, "b2", "x") is None

    @pytest.mark.parametrize(("old", "new"), [("b0", "x"), ("b2", "b3"), ("b2", "b2")])
    def test_a_bookie_takes_the_place_of_one_that_is_there_and_is_not_there_twice(
        self, old: str, new: str
    ) -> None:
        assert replaced_in_page(self.PAGE, 29, self.PART, old, new) is None


@pytest.mark.parametrize("stride", [1, 4])
def test_the_entries_that_nobody_has_are_noted_in_runs(stride: int) -> None:
    whole = ClassRange(7, 0, 2, 2 + 99 * stride, stride, ("b1",))
    ids = range(whole.first, whole.last + 1, stride)
    held = [Row(ids[10], 0, 5, stride), Row(ids[20], 0, 80, stride)]
    lost, rest = LostRuns(), whole
    assert not lost
    following = first_held(rest, [held])
    assert following == ids[10]
    lost.add(rest, following)
    # Entry 12 of the class is listed, and cannot be read: it is lost alone.
    rest = rest._replace(first=ids[12])
    assert first_held(rest, [[], held]) == ids[13]
    lost.add(rest, ids[13])
    rest = rest._replace(first=ids[15])
    assert first_held(rest, [held[:1]]) is None
    lost.add(rest, first_held(rest, [held]))
    assert [(run.first, run.last, run.step) for run in lost.runs()] == [
        (ids[0], ids[9], stride),
        (ids[12], ids[12], stride),
        (ids[15], ids[19], stride),
    ]
    assert lost.entries == 16
    assert lost.upto(whole) == ids[9]
    assert lost.upto(whole._replace(first=ids[10])) is None
    lost.add(whole._replace(first=ids[20]), None)  # Neighbours become one run.
    assert lost.runs()[-1].last == ids[99]
    lost.add(whole._replace(first=ids[30]), ids[31])  # Known already.
    assert lost.entries == 96


def test_a_record_of_absent_entries_keeps_a_bookie_until_the_seat_is_whole() -> None:
    metadata = make(3, 3, [0, 10], 19)
    first, second = Absent(0, 1, "b1", 5), Absent(10, 1, "b1", 2)
    noted = metadata.with_absent(first).with_absent(second).with_absent(first._replace(entries=4))
    assert noted.former_bookies(0) == noted.former_bookies(10) == ["b1"]
    assert [each.entries for each in noted.absent] == [2, 4]
    assert LedgerMetadata.from_json(noted.to_json()) == noted
    assert noted.without_absent(0, 0) is None
    left = noted.without_absent(0, 1)
    assert left is not None
    assert left.absent == (second,)
    full = metadata
    for number in range(ABSENT_MAX):
        full = full.with_absent(Absent(number, 0, "b1", 1))
    assert len(full.to_json()) < VALUE_BYTES_MAX // 4
    with pytest.raises(InvalidTransitionError, match="repair"):
        full.with_absent(Absent(ABSENT_MAX, 0, "b1", 1))


def test_a_ledger_is_closed_with_a_loss_once_and_says_so() -> None:
    metadata = make(3, 3, [0], None)
    given_up = GivenUp(12, ("b0", "b1"), 3)
    with pytest.raises(InvalidTransitionError, match="OPEN"):
        metadata.close_with_loss(9, 100, given_up)
    entered = metadata.begin_recovery()
    closed = LossyEnd(entered, 9, 100, given_up).apply(entered)
    assert closed is not None
    assert (closed.is_closed, closed.last_entry, closed.given_up) == (True, 9, given_up)
    assert LedgerMetadata.from_json(closed.to_json()) == closed
    assert LossyEnd(entered, 9, 100, given_up).apply(closed) is None
    cut = LossyEnd(entered, 4, 50, given_up, lost_from=7).apply(entered)
    assert cut is not None
    assert (cut.last_entry, cut.length_before) == (4, 50)
    assert [each.first_entry for each in cut.fragments] == [0, 5]
    owned = closed.owned_by("orders")
    assert LedgerMetadata.from_json(owned.to_json()).log == "orders"
    assert owned.owned_by("") == closed


@pytest.mark.parametrize("seed", range(40))
def test_entries_of_overlapping_runs_count_once(seed: int) -> None:
    rng = random.Random(seed)
    step = rng.choice((1, 3))
    runs = [EntryRun(first, first + step * rng.randrange(6), step) for first in rng.choices(range(40), k=8)]
    assert entries_of(runs) == len({each for run in runs for each in range(run.first, run.last + 1, step)})
