"""The plan of a reader: its ranges, the bookies that it asks, and the meaning of a failed read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Stop
from client_aio.core.read_plan import ClassRange, RangeRead, ReadPlan, Scan, class_ranges, refusal
from metadata.errors import (
    BookieError,
    BookieUnavailableError,
    BookKeeperError,
    DigestMismatchError,
    EntryUnknownError,
    NoSuchEntryError,
    OperationTimeoutError,
    StaleMetadataError,
)
from metadata.model.ledger import Absent, Fragment, LedgerMetadata

if TYPE_CHECKING:
    from collections.abc import Collection

LEDGER = 7
BUDGET = 1000
MISS, DAMAGE, DOUBT = NoSuchEntryError("miss"), DigestMismatchError("damage"), EntryUnknownError("doubt")
STALE, SLOW = StaleMetadataError("later term"), OperationTimeoutError("too late")
ENTRIES_AT_FIRST = 256


def ledger_of(bookies: tuple[str, ...] = ("b0", "b1", "b2"), *, write_quorum: int = 3) -> LedgerMetadata:
    return LedgerMetadata.new(
        LEDGER, ensemble_size=len(bookies), write_quorum=write_quorum, ack_quorum=2, bookies=bookies
    )


def range_of(metadata: LedgerMetadata, first: int, last: int) -> ClassRange:
    return class_ranges(metadata, first, last)[0]


def read_of(
    metadata: LedgerMetadata | None = None,
    *,
    can_refresh: bool = True,
    absent_at: int | None = None,
    quarantined: Collection[str] = (),
) -> RangeRead:
    """Return a read of entry 0 whose first round has begun; of three bookies b0 is asked first."""
    metadata = metadata or ledger_of()
    plan = ReadPlan(BUDGET, can_refresh=can_refresh, turn=2, absent_at=absent_at)
    read = RangeRead(plan, metadata, range_of(metadata, 0, 0))
    read.begin_round(quarantined)
    return read


def end_of(read: RangeRead, *errors: BookKeeperError) -> BookKeeperError | None:
    """Fail one bookie after the other; return what the last failure ended the round with."""
    ending = None
    for error in errors:
        assert ending is None
        assert read.next_bookie() is not None
        ending = read.failed(error)
    return ending


# --- whom to ask ---


@pytest.mark.parametrize("error", [MISS, DAMAGE, DOUBT, SLOW, BookieUnavailableError("away")])
def test_after_a_failure_the_next_bookie_of_the_write_set_is_asked(error: BookKeeperError) -> None:
    read = read_of()
    asked = []
    for _ in range(3):
        asked.append(read.next_bookie())
        ending = read.failed(error)
    assert asked == ["b0", "b1", "b2"]
    assert ending is not None
    assert read.next_bookie() is None


def test_a_slow_answer_has_one_more_asked_and_never_a_third_beside_them() -> None:
    read = read_of()
    assert read.next_bookie() == "b0"
    assert read.has_unasked
    assert read.next_bookie() == "b1"
    assert read.next_bookie() is None
    assert read.has_unasked
    assert read.failed(MISS) is None
    assert read.next_bookie() == "b2"
    assert not read.has_unasked


def test_a_round_goes_on_while_an_answer_is_outstanding() -> None:
    read = read_of()
    for _ in range(2):
        read.next_bookie()
        assert read.failed(MISS) is None
        read.next_bookie()
    assert not read.has_unasked
    assert read.failed(MISS) is not None


def test_each_read_starts_one_bookie_further_on() -> None:
    metadata = ledger_of()
    plan = ReadPlan(BUDGET, can_refresh=True)
    starts = []
    for _ in range(4):
        read = RangeRead(plan, metadata, range_of(metadata, 0, 0))
        read.begin_round(())
        starts.append(read.next_bookie())
    assert starts == ["b1", "b2", "b0", "b1"]


def test_doubtful_bookies_are_asked_last_and_the_rotation_stays() -> None:
    read = read_of(ledger_of(("b0", "b1", "b2", "b3"), write_quorum=4), quarantined=["b0", "b3"])
    asked = []
    while read.has_unasked:
        asked.append(read.next_bookie())
        read.failed(MISS)
    assert asked == ["b1", "b2", "b3", "b0"]


def test_a_bookie_that_knows_a_later_term_ends_the_round_at_once() -> None:
    assert end_of(read_of(), MISS, STALE) is STALE


def test_a_reader_that_cannot_refresh_asks_past_a_later_term() -> None:
    read = read_of(can_refresh=False)
    assert end_of(read, STALE) is None
    assert read.next_bookie() == "b1"


# --- which error wins ---


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ((MISS, MISS, MISS), NoSuchEntryError),
        ((MISS, DAMAGE, MISS), DigestMismatchError),
        ((DOUBT, SLOW, DAMAGE), DigestMismatchError),
        ((MISS, MISS, DOUBT), EntryUnknownError),
        ((SLOW, MISS, DOUBT), EntryUnknownError),
        ((MISS, SLOW, MISS), BookieUnavailableError),
        ((SLOW, BookieError("inner"), SLOW), BookieUnavailableError),
    ],
)
def test_damage_wins_then_absence_that_all_confirm_then_doubt(
    errors: tuple[BookKeeperError, ...], kind: type[BookKeeperError]
) -> None:
    ending = end_of(read_of(), *errors)
    assert type(ending) is kind
    for said in (*map(str, errors), "b0, b1, b2", f"entry 0 of ledger {LEDGER}"):
        assert said in str(ending)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [((MISS, SLOW, MISS), NoSuchEntryError), ((MISS, SLOW, SLOW), BookieUnavailableError)],
)
def test_of_a_complete_ledger_fewer_bookies_prove_absence(
    errors: tuple[BookKeeperError, ...], kind: type[BookKeeperError]
) -> None:
    assert type(end_of(read_of(absent_at=2), *errors)) is kind


def test_a_later_term_wins_over_doubt_where_it_does_not_end_the_round() -> None:
    assert type(end_of(read_of(can_refresh=False), DOUBT, MISS, STALE)) is StaleMetadataError


@pytest.mark.parametrize(
    ("stop", "kind"),
    [
        (Stop.NO_SUCH_ENTRY, NoSuchEntryError),
        (Stop.UNKNOWN, EntryUnknownError),
        (Stop.STALE_METADATA, StaleMetadataError),
    ],
)
def test_an_answer_without_entries_says_why(stop: Stop, kind: type[BookKeeperError]) -> None:
    error = refusal(ReadAnswer(stop, 3, None), "b1", LEDGER)
    assert type(error) is kind
    assert (error.ledger_id, error.entry_id, error.bookie_id) == (LEDGER, 3, "b1")


# --- after a failed round ---


def test_another_round_follows_where_the_metadata_name_other_bookies() -> None:
    metadata = ledger_of()
    read = read_of(metadata)
    error = end_of(read, MISS, MISS, MISS)
    assert error is not None
    assert not read.look_again(error, metadata)
    repaired = replace(metadata, fragments=(metadata.fragments[0].replace_bookie("b1", "b9"),))
    assert read.look_again(error, repaired)
    assert read.wanted.bookies == ("b0", "b9", "b2")
    read.begin_round(())
    assert end_of(read, MISS, MISS) is None
    ending = end_of(read, MISS)
    assert type(ending) is NoSuchEntryError
    assert str(ending).count(str(MISS)) == 3


def test_a_later_term_that_the_store_knows_nothing_of_is_heeded_once() -> None:
    metadata = ledger_of()
    read = read_of(metadata)
    assert end_of(read, STALE) is STALE
    assert read.look_again(STALE, metadata)
    read.begin_round(())
    ending = end_of(read, STALE, STALE, STALE)
    assert type(ending) is StaleMetadataError
    assert not read.look_again(ending, metadata)


def test_a_range_that_was_cut_into_two_fragments_is_read_up_to_the_first_ones_end() -> None:
    metadata = ledger_of()
    read = RangeRead(ReadPlan(BUDGET, can_refresh=True), metadata, range_of(metadata, 2, 9))
    assert (read.wanted.first, read.wanted.last) == (2, 9)
    changed = metadata.change_ensemble(6, ["b0", "b1", "b9"])
    assert read.look_again(MISS, changed)
    assert (read.wanted.first, read.wanted.last, read.wanted.bookies) == (2, 5, ("b2", "b0", "b1"))


def test_a_ledger_that_was_closed_before_the_range_ends_the_read() -> None:
    metadata = ledger_of()
    read = RangeRead(ReadPlan(BUDGET, can_refresh=True), metadata, range_of(metadata, 5, 9))
    with pytest.raises(NoSuchEntryError, match=r"entry 5 .* closed at entry 4"):
        read.look_again(MISS, metadata.close(4, 10))


def test_damage_alone_is_certain_while_the_metadata_cannot_be_read() -> None:
    read = read_of()
    assert [read.is_certain(error) for error in (DAMAGE, MISS, DOUBT, STALE, SLOW)] == [True] + [False] * 4


# --- ranges and chunks ---


def scan_of(metadata: LedgerMetadata, first: int, last: int) -> Scan:
    return Scan(ReadPlan(BUDGET, can_refresh=True), metadata, first, last)


def bounds(ranges: list[ClassRange]) -> list[tuple[int, int]]:
    return [(each.first, each.last) for each in ranges]


def test_chunks_grow_to_the_answers_budget_by_what_batches_held() -> None:
    metadata = ledger_of()
    scan = scan_of(metadata, 0, 100_000)
    assert bounds(scan.next_chunk(metadata, is_first=True)) == [(0, ENTRIES_AT_FIRST - 1)]
    scan.learn(10, 10 * 84)  # 84 bytes and 16 of the head: ten of them fit
    assert bounds(scan.next_chunk(metadata, is_first=False)) == [(256, 265)]
    scan.learn(90, 100 * 34 - 10 * 84)  # a mean of 34 over all hundred: twenty of them fit
    assert bounds(scan.next_chunk(metadata, is_first=False)) == [(266, 285)]
    assert not scan.is_planned


def test_a_chunk_holds_an_entry_at_least_and_no_more_than_so_many() -> None:
    metadata = ledger_of()
    large = scan_of(metadata, 0, 9)
    large.learn(1, 10 * BUDGET)
    assert bounds(large.next_chunk(metadata, is_first=True)) == [(0, 0)]
    plan = ReadPlan(1 << 30, can_refresh=True)
    empty = Scan(plan, metadata, 0, 1_000_000)
    empty.learn(1, 0)
    assert bounds(empty.next_chunk(metadata, is_first=True)) == [(0, 65_535)]


def test_a_striped_chunk_has_a_range_for_each_write_set_and_a_budget_for_each() -> None:
    metadata = ledger_of(write_quorum=2)
    scan = scan_of(metadata, 0, 1000)
    scan.learn(10, 10 * 84)
    ranges = scan.next_chunk(metadata, is_first=True)
    assert bounds(ranges) == [(0, 27), (1, 28), (2, 29)]
    assert [each.bookies for each in ranges] == [("b0", "b1"), ("b1", "b2"), ("b2", "b0")]


def test_a_chunk_ends_where_its_fragment_ends() -> None:
    metadata = ledger_of().change_ensemble(10, ["b0", "b1", "b9"])
    scan = scan_of(metadata, 4, 20)
    assert bounds(scan.next_chunk(metadata, is_first=True)) == [(4, 9)]
    ranges = scan.next_chunk(metadata, is_first=False)
    assert (bounds(ranges), ranges[0].bookies) == ([(10, 20)], ("b1", "b9", "b0"))
    assert scan.is_planned


def test_a_scan_is_planned_when_its_last_entry_is() -> None:
    metadata = ledger_of()
    scan = scan_of(metadata, 0, ENTRIES_AT_FIRST)
    assert bounds(scan.next_chunk(metadata, is_first=True)) == [(0, ENTRIES_AT_FIRST - 1)]
    assert not scan.is_planned
    assert bounds(scan.next_chunk(metadata, is_first=False)) == [(ENTRIES_AT_FIRST, ENTRIES_AT_FIRST)]
    assert scan.is_planned
    empty = scan_of(metadata.close(4, 10), 5, 4)
    assert empty.is_planned
    assert empty.next_chunk(metadata.close(4, 10), is_first=True) == []


def test_what_was_asked_for_comes_before_the_error_of_what_was_trimmed() -> None:
    metadata = ledger_of()
    scan = scan_of(metadata, 0, 20)
    trimmed = replace(metadata, fragments=(Fragment(30, metadata.fragments[0].bookies),))
    assert scan.next_chunk(trimmed, is_first=False) == []
    with pytest.raises(NoSuchEntryError, match=r"entry 0 .* has been trimmed: .* at entry 30"):
        scan.next_chunk(trimmed, is_first=True)


def test_what_was_asked_for_comes_before_the_error_of_a_closed_ledger() -> None:
    metadata = ledger_of()
    scan = scan_of(metadata, 10, 20)
    closed = metadata.close(4, 10)
    assert scan.next_chunk(closed, is_first=False) == []
    with pytest.raises(NoSuchEntryError, match=r"entry 10 .* closed at entry 4"):
        scan.next_chunk(closed, is_first=True)


def test_a_read_fences_nothing() -> None:
    asked = range_of(ledger_of(), 3, 8)
    assert asked.request(BUDGET) == Read(LEDGER, NO_TERM, 0, 3, 8, 1, BUDGET)


# --- entries that a repair found nowhere ---


def test_a_former_bookie_is_asked_for_what_its_replacement_lacks() -> None:
    """The replacement and the other bookie deny the entry. Only the former bookie, which was away, has it."""
    metadata = ledger_of(("b0", "b9", "b2"), write_quorum=2).close(8, 100)
    metadata = replace(metadata, absent=(Absent(0, 1, "b1", 3),))
    asked = {each.first: each for each in class_ranges(metadata, 0, 8)}
    assert [asked[first].bookies for first in range(3)] == [
        ("b0", "b9", "b1"),
        ("b9", "b2", "b1"),
        ("b2", "b0"),
    ]
    read = RangeRead(ReadPlan(BUDGET, can_refresh=False, turn=2, absent_at=1), metadata, asked[1])
    read.begin_round(())
    assert read.next_bookie() is not None
    assert read.failed(MISS) is None
    assert read.next_bookie() is not None
    assert read.failed(MISS) is None
    assert read.next_bookie() is not None
    ending = read.failed(SLOW)
    assert isinstance(ending, EntryUnknownError), "one bookie that may hold the entry has not answered"


def test_absence_is_proven_by_as_many_as_ever_where_no_repair_left_a_gap() -> None:
    metadata = ledger_of(("b0", "b1", "b2"), write_quorum=2).close(8, 100)
    read = RangeRead(
        ReadPlan(BUDGET, can_refresh=False, turn=2, absent_at=1), metadata, range_of(metadata, 0, 8)
    )
    read.begin_round(())
    ending = end_of(read, MISS, SLOW)
    assert isinstance(ending, NoSuchEntryError)
