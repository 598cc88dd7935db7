"""ADDS and WRITE_LACS: what goes in comes out, and no row reaches into another's bytes."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser
from bookie_aio.wire.many import (
    encode_adds,
    encode_done,
    encode_write_lacs,
    frames_of_adds,
    parse_adds,
    parse_done,
    parse_write_lacs,
)
from bookie_aio.wire.messages import (
    ADD_FLAGS_MAX,
    ALIVE_ID,
    MANY_MAX,
    Add,
    Adds,
    Done,
    Message,
    Op,
    WriteLac,
    WriteLacs,
    decode_answer,
    decode_request,
)
from bookie_aio.wire.prepared import PreparedRequest
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, TERM_FINAL

ledgers, terms = st.integers(0, LEDGER_ID_MAX), st.integers(0, TERM_FINAL)
lacs = st.integers(-1, ENTRY_ID_MAX)
tokens = st.none() | st.binary(min_size=1, max_size=40)
adds = st.tuples(
    st.builds(Add, ledgers, terms, st.integers(0, ADD_FLAGS_MAX)), tokens, st.binary(max_size=60)
)
statements = st.builds(
    LacStatement,
    terms,
    lacs,
    lacs,
    st.integers(0, 2**32 - 1),
    st.just(b"") | st.binary(min_size=32, max_size=32),
)
write_lacs = st.tuples(st.builds(WriteLac, ledgers, terms, statements), tokens)
first_ids = st.integers(0, ALIVE_ID - 20)


def received(data: bytes) -> tuple[int, Message, memoryview]:
    """Return id, request and body of one frame."""
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(data)
    ((header, body),) = parser.frames()
    request_id, auth, request = decode_request(header)
    assert auth is None
    return request_id, request, body


def parse_both(count: int, body: memoryview) -> None:
    for parse in (parse_adds, parse_write_lacs):
        with contextlib.suppress(MalformedFrameError):
            assert len(parse(0, count, body)) == count


@given(first_ids, st.lists(adds, min_size=1, max_size=20))
def test_adds_round_trip(first: int, given_: list[tuple[Add, bytes | None, bytes]]) -> None:
    request_id, request, body = received(b"".join(encode_adds(first, given_)))
    assert (request_id, request) == (first, Adds(len(given_)))
    found = parse_adds(request_id, len(given_), body)
    assert [(one.request, one.auth, bytes(one.block)) for one in found] == given_
    assert [one.request_id for one in found] == [first + index for index in range(len(given_))]
    assert [body[one.start : one.start + len(one.block)] for one in found] == [one.block for one in found]


@given(
    st.lists(
        st.tuples(st.builds(Add, ledgers, terms, st.integers(0, 7)), tokens, st.integers(0, 300)), max_size=40
    ),
    st.sampled_from([0, 100, 500, 10_000]),
    st.sampled_from([0, ALIVE_ID - 5, ALIVE_ID - 1]),
)
def test_adds_that_leave_together_keep_order_ids_and_bounds(
    drawn: list[tuple[Add, bytes | None, int]], bytes_max: int, first: int
) -> None:
    held = [
        (PreparedRequest(request, auth), (first + index) % ALIVE_ID, bytes([index]) * size)
        for index, (request, auth, size) in enumerate(drawn)
    ]
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(b"".join(frames_of_adds(held, bytes_max)))
    found: list[tuple[int, bytes | None, Message, bytes]] = []
    for header, body in parser.frames():
        request_id, auth, request = decode_request(header)
        if isinstance(request, Adds):
            many = parse_adds(request_id, request.count, body)
            assert len(many) > 1
            assert sum(len(one.block) for one in many) <= bytes_max
            found += [(one.request_id, one.auth, one.request, bytes(one.block)) for one in many]
        else:
            found.append((request_id, auth, request, bytes(body)))
    assert found == [(request_id, one.auth, one.request, block) for one, request_id, block in held]


def test_a_frame_of_adds_has_no_more_than_its_limit() -> None:
    held = [(PreparedRequest(Add(n, 0, 0)), n, b"x") for n in range(2 * MANY_MAX + 1)]
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(b"".join(frames_of_adds(held, 10**6)))
    counts = [
        request.count
        for header, _ in parser.frames()
        if isinstance(request := decode_request(header)[2], Adds)
    ]
    assert counts == [MANY_MAX, MANY_MAX]


@given(first_ids, st.lists(write_lacs, min_size=1, max_size=20))
def test_write_lacs_round_trip(first: int, given_: list[tuple[WriteLac, bytes | None]]) -> None:
    request_id, request, body = received(encode_write_lacs(first, given_))
    assert (request_id, request) == (first, WriteLacs(len(given_)))
    found = parse_write_lacs(request_id, len(given_), body)
    assert [(one.request, one.auth) for one in found] == given_
    assert [one.request_id for one in found] == [first + index for index in range(len(given_))]


@given(
    st.lists(st.integers(0, ALIVE_ID), min_size=1, max_size=MANY_MAX),
    st.sampled_from([Op.ADDS, Op.WRITE_LACS]),
)
def test_the_ids_of_an_answer_round_trip(ids: list[int], op: Op) -> None:
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(encode_done(op, ids))
    ((header, body),) = parser.frames()
    assert decode_answer(header) == (op, ids[0], Done())
    assert parse_done(ids[0], body) == ids


@given(st.binary(max_size=300), st.integers(1, MANY_MAX))
def test_any_bytes_are_rows_or_malformed(data: bytes, count: int) -> None:
    parse_both(count, memoryview(data))
    with contextlib.suppress(MalformedFrameError):
        parse_done(0, memoryview(data))


@given(st.lists(adds, min_size=1, max_size=5), st.lists(write_lacs, min_size=1, max_size=5), st.data())
def test_any_flipped_bit_is_rows_or_malformed(
    some_adds: list[tuple[Add, bytes | None, bytes]],
    some_lacs: list[tuple[WriteLac, bytes | None]],
    data: st.DataObject,
) -> None:
    for frame in (b"".join(encode_adds(1, some_adds)), encode_write_lacs(1, some_lacs)):
        body = bytearray(received(frame)[2])
        at = data.draw(st.integers(0, 8 * len(body) - 1))
        body[at // 8] ^= 1 << at % 8
        parse_both(data.draw(st.integers(1, 6)), memoryview(body[: data.draw(st.integers(0, len(body)))]))


TWO = [(Add(7, 1, 0), b"t" * 32, b"first"), (Add(8, 2, 4), None, b"second")]
LACS = [
    (WriteLac(7, 0, LacStatement(0, 4, -1, 9, b"m" * 32)), b"t" * 32),
    (WriteLac(8, 0, LacStatement(0, 1, 1, 9)), None),
]


@pytest.mark.parametrize("count", [1, 3, MANY_MAX])
def test_a_count_that_lies_is_refused(count: int) -> None:
    for body in (received(b"".join(encode_adds(1, TWO)))[2], received(encode_write_lacs(1, LACS))[2]):
        with pytest.raises(MalformedFrameError):
            parse_adds(1, count, body)
        with pytest.raises(MalformedFrameError):
            parse_write_lacs(1, count, body)


def test_a_body_cut_short_or_with_bytes_left_over_is_refused() -> None:
    cases = ((parse_adds, b"".join(encode_adds(1, TWO))), (parse_write_lacs, encode_write_lacs(1, LACS)))
    for parse, frame in cases:
        body = bytes(received(frame)[2])
        assert len(parse(1, 2, memoryview(body))) == 2
        for wrong in (*(body[:size] for size in range(len(body))), body + b"\0"):
            with pytest.raises(MalformedFrameError):
                parse(1, 2, memoryview(wrong))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 2**63),  # a ledger
        (8, 2**63),  # a term
        (16, 2**32 - 1),  # a block that reaches beyond the frame
        (20, 8),  # flags
        (22, 2**16 - 1),  # a token of that size
    ],
)
def test_a_field_out_of_range_is_refused(at: int, value: int) -> None:
    body = bytearray(received(b"".join(encode_adds(1, TWO)))[2])
    form = {0: "<Q", 8: "<Q", 16: "<I", 20: "<H", 22: "<H"}[at]
    for row in range(2):
        wrong = bytearray(body)
        struct.pack_into(form, wrong, 24 * row + at, value)
        with pytest.raises(MalformedFrameError):
            parse_adds(1, 2, memoryview(wrong))


def test_a_statement_out_of_range_is_refused() -> None:
    body = bytearray(received(encode_write_lacs(1, LACS))[2])
    wrongs = {0: ("<Q", 2**63), 8: ("<Q", 2**63), 16: ("<Q", 2**63), 24: ("<q", -2), 32: ("<q", 2**62)}
    for at, (form, value) in wrongs.items():
        wrong = bytearray(body)
        struct.pack_into(form, wrong, at, value)
        with pytest.raises(MalformedFrameError):
            parse_write_lacs(1, 2, memoryview(wrong))


def test_ids_that_are_nobodys_are_refused() -> None:
    body = received(b"".join(encode_adds(1, TWO)))[2]
    assert [one.request_id for one in parse_adds(ALIVE_ID - 2, 2, body)] == [ALIVE_ID - 2, ALIVE_ID - 1]
    with pytest.raises(MalformedFrameError):
        parse_adds(ALIVE_ID - 1, 2, body)
    with pytest.raises(MalformedFrameError):
        parse_write_lacs(ALIVE_ID - 1, 2, received(encode_write_lacs(1, LACS))[2])


@pytest.mark.parametrize("count", [0, MANY_MAX + 1])
def test_a_frame_of_none_or_too_many_is_refused(count: int) -> None:
    for op in (Op.ADDS, Op.WRITE_LACS):
        with pytest.raises(MalformedFrameError):
            decode_request([int(op), 1, None, count])


def test_an_answer_names_requests_from_its_own_on() -> None:
    body = memoryview(struct.pack("<2I", 5, 6))
    assert parse_done(5, body) == [5, 6]
    for request_id, wrong in (
        (6, body),
        (5, body[:3]),
        (5, body[:0]),
        (0, memoryview(bytes(4 * MANY_MAX + 4))),
    ):
        with pytest.raises(MalformedFrameError):
            parse_done(request_id, wrong)
