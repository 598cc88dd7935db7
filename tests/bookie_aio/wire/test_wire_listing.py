"""Listings of entries, against sets of numbers; and whole blocks cut out of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire.blocks import Block, encode_block
from bookie_aio.wire.listing import ROW, Row, index_from, listed, parse_rows, runs_of
from metadata.errors import MalformedFrameError

ROWS = st.builds(Row, st.integers(0, 40), st.integers(0, 2), st.integers(1, 12), st.integers(1, 4))
WANTED = st.builds(
    lambda first, count, step: range(first, first + count * step, step),
    st.integers(0, 40), st.integers(0, 12), st.integers(1, 4),
)  # fmt: skip


@given(WANTED, st.lists(ROWS, max_size=5), st.integers(0, 2))
def test_what_is_listed_is_what_the_rows_hold(wanted: range, rows: list[Row], term: int) -> None:
    held = {entry_id for row in rows if row.content_term >= term for entry_id in row.entry_ids}
    marks = listed(wanted, rows, term)
    assert [entry_id for entry_id, mark in zip(wanted, marks, strict=True) if mark] == [
        entry_id for entry_id in wanted if entry_id in held
    ]
    for value in (0, 1):
        runs = runs_of(wanted, marks, value)
        assert [entry_id for run in runs for entry_id in run] == [
            entry_id for entry_id, mark in zip(wanted, marks, strict=True) if mark == value
        ]
        assert all(len(run) and run.step == wanted.step for run in runs)


@given(WANTED, st.integers(-2, 99))
def test_entries_from_one_on_begin_at_its_index(ids: range, least: int) -> None:
    index = index_from(ids, least)
    assert (list(ids[:index]), list(ids[index:])) == (
        [entry_id for entry_id in ids if entry_id < least],
        [entry_id for entry_id in ids if entry_id >= least],
    )


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_a_row_as_long_as_it_can_be_is_looked_at_no_further_than_is_wanted(stride: int) -> None:
    """Of other write sets, or of a peer that says so: each of its entries was looked at."""
    wanted = range(9, 60, 3)
    rows = [Row(0, 0, 2**32 - 1, stride), Row(1, 0, 2**32 - 1, 3)]
    assert [*listed(wanted, rows, 0)] == [int(entry_id % stride == 0) for entry_id in wanted]


def test_rows_are_parsed_as_they_are_packed() -> None:
    rows = [Row(0, 0, 3, 1), Row(7, 2**63 - 1, 1, 64)]
    assert parse_rows(memoryview(b"".join(ROW.pack(*row) for row in rows))) == rows
    with pytest.raises(MalformedFrameError, match="25 bytes"):
        parse_rows(memoryview(ROW.pack(*rows[0]) + b"x"))
    with pytest.raises(MalformedFrameError, match="stride 0"):
        parse_rows(memoryview(ROW.pack(0, 0, 1, 0)))


@pytest.mark.parametrize("codes", [False, True])
def test_a_whole_block_keeps_all_that_is_said_of_its_entries(codes: bool) -> None:
    payloads = [b"a", b"", b"ccc", b"dd"]
    macs = [bytes([number]) * 32 for number in range(5)] if codes else []
    data = encode_block(
        ledger_id=7, content_term=3, first_entry=10, stride=2, lac=9, lafr=4,
        payloads=payloads, running=[101, 101, 104, 106], macs=macs,
    )  # fmt: skip
    block = Block.parse(memoryview(data))
    assert bytes(block.whole(0, 4)) == data
    partial = Block.parse(memoryview(block.cut_head(1, 3) + b"ccc"))
    for part in (Block.parse(block.whole(1, 3)), Block.parse(partial.whole(0, 2))):
        assert not part.is_partial
        assert part.payload_is_intact()
        assert part.damaged_entries() == []
        assert part.statement == block.statement
        assert list(part.entry_ids) == [12, 14]
        assert list(part.running) == [101, 104]
        assert list(part.checksums) == list(block.checksums[1:3])
        assert part.macs == macs[2:4]
        assert list(map(bytes, part.payloads())) == payloads[1:3]
