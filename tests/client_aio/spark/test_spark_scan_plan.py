"""Filters, partitions and micro-batches, checked against the plain meaning of each."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.spark.batch import partitions_of
from client_aio.spark.catalog import Found
from client_aio.spark.provenance import Written
from client_aio.spark.scan_plan import (
    Limit,
    Offset,
    Place,
    Stretch,
    advance,
    between,
    cut_into_partitions,
    partition_size,
    position_column,
)
from metadata.errors import InvalidArgumentError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX


@st.composite
def logs(draw: st.DrawFn) -> list[Stretch]:
    """Draw the readable part of a log: rows in order, small ledgers, several fragments."""
    stretches, row_id = [], 0
    for _ in range(draw(st.integers(0, 5))):
        row_id += draw(st.integers(1, 3))
        last = draw(st.integers(-1, 30))
        borders = draw(st.lists(st.integers(1, 31), unique=True, max_size=3))
        stretches.append(
            Stretch(
                draw(st.sampled_from(["a", "b"])),
                row_id,
                row_id + draw(st.integers(-1, 0)),
                0,
                last,
                draw(st.integers(0, 5)),
                float(draw(st.integers(0, 300_000))),
                tuple(sorted(borders)),
            )
        )
    return stretches


def rows_of(stretches: list[Stretch]) -> list[tuple[int, int]]:
    return [(one.row_id, entry) for one in stretches for entry in range(one.first, one.last + 1)]


def test_partitions_grow_with_what_is_read_within_bounds() -> None:
    def of(mib: int) -> int:
        return partition_size([Stretch("a", 1, 1, 0, mib * 1024 - 1, 0, entry_bytes=1024.0)]) >> 20

    assert [of(mib) for mib in (1, 256, 320, 1024, 4096)] == [8, 8, 10, 32, 64]
    assert partition_size([]) == 8 << 20


@given(logs(), st.integers(1, 5_000_000))
def test_partitions_hold_each_row_once_in_order_and_cross_no_fragment(
    stretches: list[Stretch], partition_bytes: int
) -> None:
    partitions = cut_into_partitions(stretches, partition_bytes)
    assert rows_of([piece for partition in partitions for piece in partition]) == rows_of(stretches)
    borders = {one.row_id: one.borders for one in stretches}
    for partition in partitions:
        assert partition
        for piece in partition:
            assert not any(piece.first < border <= piece.last for border in borders[piece.row_id])
        size = sum(piece.entries * piece.entry_bytes for piece in partition)
        assert len(partition) == 1 or size <= partition_bytes


def test_a_large_ledger_is_cut_into_even_parts() -> None:
    stretch = Stretch("a", 1, 1, 0, 999, 0, 1000.0)
    partitions = cut_into_partitions([stretch], 250_000)
    assert [(piece.first, piece.last) for (piece,) in partitions] == [
        (0, 249), (250, 499), (500, 749), (750, 999),
    ]  # fmt: skip


def test_many_small_ledgers_are_read_together() -> None:
    stretches = [Stretch("a", number, number, 0, 0, 0, 10.0) for number in range(64)]
    assert len(cut_into_partitions(stretches, 8 * 1024 * 1024)) == 2


@given(logs(), st.none() | st.integers(1, 40), st.none() | st.integers(1, 2_000_000))
def test_micro_batches_within_the_limits_cover_the_log_once_in_order(
    stretches: list[Stretch], entries: int | None, size: int | None
) -> None:
    start, seen = Place(0, 0), []
    for _ in range(1000):
        ahead = between(stretches, start)
        end = advance(start, ahead, Limit(entries, size))
        assert end >= start
        taken = between(stretches, start, end)
        seen += rows_of(taken)
        count = sum(one.entries for one in taken)
        assert entries is None or count <= entries
        assert size is None or count <= 1 or sum(one.entries * one.entry_bytes for one in taken) <= size
        assert count or not rows_of(ahead), "a batch makes progress while there is something to read"
        if end == start:
            break
        start = end
    assert seen == rows_of(stretches)


def test_a_ledger_that_may_grow_is_not_gone_past_and_one_that_is_complete_is() -> None:
    complete, growing = Stretch("a", 5, 5, 0, 9, 0), Stretch("a", 7, 7, 0, 3, 0, is_complete=False)
    assert advance(Place(5, 2), between([complete, growing], Place(5, 2)), Limit()) == Place(7, 4)
    assert advance(Place(7, 4), between([complete, growing], Place(7, 4)), Limit()) == Place(7, 4)
    assert advance(Place(5, 10), between([complete], Place(5, 10)), Limit()) == Place(6, 0)
    assert (complete.end, growing.end) == (Place(6, 0), Place(7, 4))


@given(st.integers(0, LEDGER_ID_MAX), st.lists(st.integers(0, ENTRY_ID_MAX), max_size=20))
def test_the_position_column_has_the_text_of_each_position(row_id: int, entry_ids: list[int]) -> None:
    column = position_column(row_id, numpy.array(entry_ids, dtype=numpy.int64))
    assert column.to_pylist() == [Place(row_id, entry_id).text for entry_id in entry_ids]


@given(st.lists(st.builds(Place, st.integers(0, LEDGER_ID_MAX), st.integers(0, ENTRY_ID_MAX)), max_size=9))
def test_positions_sort_as_text_as_they_do_as_numbers_and_parse_back(places: list[Place]) -> None:
    assert [Place.parse(text) for text in sorted(place.text for place in places)] == sorted(places)
    for place in places:
        assert Place.parse(f"{place.row_id}:{place.entry_id}") == place
        for made in (None, 0, 1_790_000_000_000):
            assert Offset.of_json(Offset(place, made).to_json()) == Offset(place, made)


@pytest.mark.parametrize(
    "text", ["", "7", "7:", ":7", "a:1", "-1:0", "1:2:3", "9999999999999999999:0", "1 :2"]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no position"):
        Place.parse(text)


def test_ledgers_of_two_logs_whose_rows_have_one_id_are_each_read_as_written() -> None:
    mine, other = Written("binary", "zstd"), Written("binary", "lz4")
    found = [Found(Stretch("a", 7, 7, 0, 9, 0), mine), Found(Stretch("b", 7, 3, 0, 9, 0), other)]
    pieces = [piece for part in partitions_of(found, None) for piece in part.value]
    assert [(piece.stretch.log, piece.written) for piece in pieces] == [("a", mine), ("b", other)]


def test_a_loss_is_a_piece_behind_the_entries_of_its_ledger() -> None:
    lost = Stretch("a", 7, 7, 0, 9, 0, 100.0, (5,), has_loss=True)
    pieces = [piece for part in cut_into_partitions([lost], 300) for piece in part]
    assert rows_of(pieces) == rows_of([lost])
    assert [(piece.first, piece.last) for piece in pieces if piece.has_loss] == [(10, 9)]
    assert pieces[-1].has_loss


@pytest.mark.parametrize(
    ("start", "end", "is_told"),
    [
        (Place(7, 0), None, True),
        (Place(7, 10), Place(8, 0), True),
        (Place(7, 15), Place(8, 0), True),  # What was read before is lost by now, and more may be.
        (Place(7, 0), Place(7, 15), True),
        (Place(7, 10), Place(7, 15), True),
        (Place(7, 0), Place(7, 10), False),
        (Place(7, 0), Place(7, 4), False),
        (Place(8, 0), None, False),
    ],
)
def test_a_loss_belongs_to_the_batch_that_passes_the_last_entry(
    start: Place, end: Place | None, is_told: bool
) -> None:
    lost = Stretch("a", 7, 7, 0, 9, 0, has_loss=True)
    found = between([lost], start, end)
    assert any(one.has_loss for one in found) == is_told
    assert any(piece.has_loss for part in cut_into_partitions(found, 1000) for piece in part) == is_told
