"""The rows of WATCH: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.watching import (
    ROWS_MAX,
    UNWATCH,
    Moved,
    encode_asked,
    encode_moved,
    parse_asked,
    parse_moved,
)
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, TERM_FINAL

ledgers, lacs = st.integers(0, LEDGER_ID_MAX), st.integers(-1, ENTRY_ID_MAX)
statements = st.builds(
    LacStatement,
    st.integers(0, TERM_FINAL),
    lacs,
    lacs,
    st.integers(0, 2**32 - 1),
    st.just(b"") | st.binary(min_size=32, max_size=32),
)


@given(st.lists(st.tuples(ledgers, st.integers(UNWATCH, ENTRY_ID_MAX)), max_size=20))
def test_what_is_asked_round_trips(rows: list[tuple[int, int]]) -> None:
    assert parse_asked(memoryview(encode_asked(rows))) == rows


@given(st.lists(st.builds(Moved, ledgers, st.none() | statements), max_size=20))
def test_what_has_moved_round_trips(rows: list[Moved]) -> None:
    assert parse_moved(memoryview(encode_moved(rows))) == rows


@given(st.binary(max_size=200))
def test_any_bytes_are_rows_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        assert encode_asked(parse_asked(memoryview(data))) == data
    with contextlib.suppress(MalformedFrameError):
        parse_moved(memoryview(data))


@given(st.lists(st.builds(Moved, ledgers, st.none() | statements), min_size=1, max_size=5), st.data())
def test_any_flipped_bit_is_rows_or_malformed(rows: list[Moved], data: st.DataObject) -> None:
    body = bytearray(encode_moved(rows))
    at = data.draw(st.integers(0, 8 * len(body) - 1))
    body[at // 8] ^= 1 << at % 8
    with contextlib.suppress(MalformedFrameError):
        parse_moved(memoryview(body[: data.draw(st.integers(0, len(body)))]))


def test_more_rows_than_allowed_are_malformed() -> None:
    rows = [(ledger_id, -1) for ledger_id in range(ROWS_MAX + 1)]
    assert len(parse_asked(memoryview(encode_asked(rows[1:])))) == ROWS_MAX
    with pytest.raises(MalformedFrameError):
        parse_asked(memoryview(encode_asked(rows)))


@pytest.mark.parametrize("row", [(2**63, 0), (7, -3), (7, ENTRY_ID_MAX + 1)])
def test_a_row_out_of_range_is_malformed(row: tuple[int, int]) -> None:
    with pytest.raises(MalformedFrameError):
        parse_asked(memoryview(encode_asked([row])))
