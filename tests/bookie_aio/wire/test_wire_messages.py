"""Requests and answers: what goes in comes out, and nothing outside the schema gets through."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire import messages as wire
from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.frames import HEADER_BYTES_MAX, decode_header
from bookie_aio.wire.prepared import PreparedRequest, RequestDecoder
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Callable

u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
text = st.text(st.characters(codec="utf-8"), max_size=50)
ledgers, entries, terms = (st.integers(0, top) for top in (LEDGER_ID_MAX, ENTRY_ID_MAX, TERM_FINAL))
lacs, terms_or_none = st.integers(-1, ENTRY_ID_MAX), st.integers(-1, TERM_FINAL)
statements = st.none() | st.builds(
    LacStatement, terms, lacs, lacs, u32, st.just(b"") | st.binary(min_size=32, max_size=32)
)

REQUESTS = {
    wire.Hello: (u16, u16, text, text, text),
    wire.Ping: (),
    wire.Add: (ledgers, terms, st.integers(0, 7)),
    wire.Read: (ledgers, terms_or_none, terms, entries, entries, st.integers(1, 64), u32),
    wire.ReadLac: (ledgers, terms_or_none, lacs, st.integers(0, wire.WAIT_MS_MAX)),
    wire.WriteLac: (ledgers, terms, statements),
    wire.Force: (ledgers, terms),
    wire.ListEntries: (ledgers, entries),
    wire.ListLedgers: (ledgers,),
    wire.Info: (),
    wire.Force: (ledgers, terms),
    wire.Delete: (ledgers,),
    wire.Watch: (st.integers(0, wire.WAIT_MS_MAX),),
    wire.IsFree: (ledgers,),
    wire.LiftMark: (ledgers, st.integers(0, 2**63 - 1)),
    wire.Adds: (st.integers(1, wire.MANY_MAX),),
    wire.WriteLacs: (st.integers(1, wire.MANY_MAX),),
}
ANSWERS = {
    wire.HelloAnswer: (u16, text, text, text, u32, u32),
    wire.ReadAnswer: (st.integers(0, 4), st.integers(0, ENTRY_ID_MAX + 1), statements),
    wire.ReadLacAnswer: (statements, lacs),
    wire.ListEntriesAnswer: (lacs, st.booleans()),
    wire.ListLedgersAnswer: (st.integers(-1, LEDGER_ID_MAX),),
    wire.LiftMarkAnswer: (st.integers(0, 2**63 - 1),),
}

requests = st.one_of([st.builds(cls, *kinds) for cls, kinds in REQUESTS.items()])
answers = st.one_of(
    [
        st.builds(lambda message: (message.op, message), st.builds(cls, *kinds))
        for cls, kinds in ANSWERS.items()
    ]
    + [st.sampled_from([(op, wire.Done()) for op, cls in wire.ANSWERS.items() if cls is wire.Done])]
)


def over_the_wire(header: list[object]) -> list[object]:
    packed = msgpack.packb(header)
    assert len(packed) <= HEADER_BYTES_MAX
    return decode_header(memoryview(packed))


def test_every_operation_has_a_request_an_answer_and_a_strategy_here() -> None:
    assert set(wire.REQUESTS) == set(wire.ANSWERS) == set(wire.Op)
    assert set(REQUESTS) == set(wire.REQUESTS.values())
    assert {*ANSWERS, wire.Done} == set(wire.ANSWERS.values())


@given(requests, u32, st.none() | st.binary(max_size=40))
def test_every_request_round_trips(request_: wire.Message, request_id: int, auth: bytes | None) -> None:
    header = over_the_wire(wire.encode_request(request_, request_id, auth))
    assert wire.decode_request(header) == (request_id, auth, request_)


@given(answers, u32)
def test_every_answer_round_trips(answer: tuple[int, wire.Message], request_id: int) -> None:
    op, message = answer
    header = over_the_wire(wire.encode_answer(op, request_id, message))
    assert wire.decode_answer(header) == (op, request_id, message)


@given(
    st.sampled_from(list(wire.Op)),
    u32,
    st.sampled_from([status for status in wire.Status if status is not wire.Status.OK]),
    st.text(max_size=1500),
    st.integers(0, 2**64 - 1),
)
def test_every_failure_round_trips_whatever_its_message(
    op: wire.Op, request_id: int, status: wire.Status, message: str, value: int
) -> None:
    header = over_the_wire(wire.encode_failure(op, request_id, wire.Failure(status, message, value)))
    answered, to, failure = wire.decode_answer(header)
    assert (answered, to) == (op, request_id)
    assert isinstance(failure, wire.Failure)
    assert (failure.status, failure.value) == (status, value)
    if message.isascii():
        assert failure.message == message[:1000]


EXAMPLES: list[tuple[Callable[[list[object]], object], list[object]]] = [
    (wire.decode_request, wire.encode_request(request, 7))
    for request in (
        wire.Hello(1, 1, "test", "instance", "b1"),
        wire.Ping(),
        wire.Add(5, 0, 0),
        wire.Read(5, wire.NO_TERM, 0, 3, 9, 1, 1000),
        wire.ReadLac(5, TERM_FINAL, -1, 0),
        wire.WriteLac(5, 0, LacStatement(0, 4, -1, 77)),
        wire.ListEntries(5, 0),
        wire.ListLedgers(0),
        wire.Info(),
        wire.Watch(10_000),
    )
] + [
    (wire.decode_answer, header)
    for header in (
        wire.encode_answer(wire.Op.HELLO, 7, wire.HelloAnswer(1, "b1", "instance", "nonce", 5, 4)),
        wire.encode_answer(wire.Op.READ, 7, wire.ReadAnswer(0, 3, LacStatement(0, 4, -1, 77, b"m" * 32))),
        wire.encode_answer(wire.Op.READ_LAC, 7, wire.ReadLacAnswer(None, -1, False)),
        wire.encode_answer(wire.Op.LIST_ENTRIES, 7, wire.ListEntriesAnswer(-1, False)),
        wire.encode_answer(wire.Op.LIST_LEDGERS, 7, wire.ListLedgersAnswer(-1)),
        wire.encode_answer(wire.Op.ADD, 7, wire.Done()),
        wire.encode_failure(wire.Op.ADD, 7, wire.Failure(wire.Status.INVALID_TERM, "fenced", TERM_FINAL)),
    )
]


@pytest.mark.parametrize(("decode", "header"), EXAMPLES)
def test_a_field_too_few_or_too_many_is_refused(decode: Callable[..., object], header: list[object]) -> None:
    decode(over_the_wire(header))
    for wrong in (*(header[:size] for size in range(len(header))), [*header, 0], [*header, None]):
        with pytest.raises(MalformedFrameError):
            decode(over_the_wire(wrong))


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


# Each of them is wrong wherever the examples have something that is not equal to it.
WRONG = [
    None,
    True,
    False,
    -2,
    2**64 - 1,
    1.0,
    float("nan"),
    "text",
    b"bytes",
    [],
    [1, 2, 3, 4, 5],
    {},
    nested(400),
]


@pytest.mark.parametrize(("decode", "header"), EXAMPLES)
def test_a_field_of_another_type_is_refused(decode: Callable[..., object], header: list[object]) -> None:
    for at, right in enumerate(header):
        legal = {type(right), bytes if at == 2 and decode is wire.decode_request else type(right)}
        if isinstance(right, LacStatement) or (type(right) is list and right):
            legal |= {type(None)}
        if right is None:
            legal |= {type(None)}
        for wrong in WRONG:
            if type(wrong) in legal or (type(wrong) is int and type(right) is int):
                continue
            with pytest.raises(MalformedFrameError):
                decode(over_the_wire([*header[:at], wrong, *header[at + 1 :]]))


@pytest.mark.parametrize(
    "request_",
    [
        wire.Add(LEDGER_ID_MAX + 1, 0, 0),
        wire.Add(-1, 0, 0),
        wire.Add(0, -1, 0),
        wire.Add(0, TERM_FINAL + 1, 0),
        wire.Add(0, 0, 8),  # an unknown flag
        wire.Add(0, 0, -1),
        wire.Read(0, -2, 0, 0, 0, 1, 0),
        wire.Read(0, -1, -1, 0, 0, 1, 0),
        wire.Read(0, -1, 0, -1, 0, 1, 0),
        wire.Read(0, -1, 0, 0, ENTRY_ID_MAX + 1, 1, 0),
        wire.Read(0, -1, 0, 0, 0, 0, 0),
        wire.Read(0, -1, 0, 0, 0, 65, 0),
        wire.Read(0, -1, 0, 0, 0, 1, 2**32),
        wire.ReadLac(0, -1, -2, 0),
        wire.ReadLac(0, -1, -1, wire.WAIT_MS_MAX + 1),
        wire.WriteLac(0, 0, LacStatement(0, -2, 0, 0)),
        wire.WriteLac(0, 0, LacStatement(0, 0, 0, 2**32)),
        wire.ListEntries(0, ENTRY_ID_MAX + 1),
        wire.ListLedgers(LEDGER_ID_MAX + 1),
        wire.Hello(-1, 1, "", "", ""),
        wire.Hello(1, 2**16, "", "", ""),
    ],
)
def test_a_request_out_of_range_is_refused_and_the_message_names_the_field(request_: wire.Message) -> None:
    with pytest.raises(MalformedFrameError, match=rf"{type(request_).__name__}\.\w+: "):
        wire.decode_request(over_the_wire(wire.encode_request(request_, 1)))


@pytest.mark.parametrize("request_id", [-1, 2**32])
def test_a_request_id_out_of_range_is_refused(request_id: int) -> None:
    with pytest.raises(MalformedFrameError):
        wire.decode_request(over_the_wire(wire.encode_request(wire.Ping(), request_id)))
    with pytest.raises(MalformedFrameError):
        wire.decode_answer(over_the_wire(wire.encode_answer(wire.Op.PING, request_id, wire.Done())))


@pytest.mark.parametrize(
    "header", [[0, 1, None], [99, 1, None], [0x82, 1, None], [True, 1, None], [[], 1, None]]
)
def test_an_unknown_operation_is_refused(header: list[object]) -> None:
    with pytest.raises(MalformedFrameError, match="no operation"):
        wire.decode_request(header)


@pytest.mark.parametrize("op", [0, 2, 0x80, 0xE3, 0x182, -1, -126, True, None, 2**63])
def test_an_answer_to_no_operation_is_refused(op: object) -> None:
    with pytest.raises(MalformedFrameError):
        wire.decode_answer([op, 1, 0])


@pytest.mark.parametrize("status", [14, -1, False, None, "0", 2**63, [], 0.0])
def test_an_unknown_status_is_refused(status: object) -> None:
    with pytest.raises(MalformedFrameError):
        wire.decode_answer([0x82, 1, status, "message", 0])


@pytest.mark.parametrize("stop", [-1, 5])
def test_an_unknown_reason_to_stop_is_refused(stop: int) -> None:
    with pytest.raises(MalformedFrameError):
        wire.decode_answer(wire.encode_answer(wire.Op.READ, 1, wire.ReadAnswer(stop, 0, None)))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)


@given(st.lists(json_like, max_size=12), st.sampled_from([*wire.Op]), st.booleans())
def test_any_header_decodes_or_raises_a_typed_error(
    header: list[object], op: int, is_plausible: bool
) -> None:
    for decode, mark in ((wire.decode_request, 0), (wire.decode_answer, wire.ANSWER)):
        with contextlib.suppress(MalformedFrameError):
            decode([op | mark, 1, None if mark == 0 else 0, *header] if is_plausible else header)


@pytest.mark.parametrize("depth", [10, 300, 1000])
def test_a_deep_header_is_refused_with_a_typed_error(depth: int) -> None:
    # An error message that quoted such a value would recurse past the interpreter's limit.
    (deep,) = decode_header(memoryview(b"\x91" * depth + b"\xc0"))
    for decode, header in EXAMPLES:
        for at in range(len(header)):
            with pytest.raises(MalformedFrameError, match=r"^.{1,200}$"):
                decode([*header[:at], deep, *header[at + 1 :]])


def test_a_failures_message_may_quote_what_is_no_text() -> None:
    failure = wire.Failure(wire.Status.INTERNAL_ERROR, "\udcff" * 1500)
    _, _, found = wire.decode_answer(over_the_wire(wire.encode_failure(wire.Op.ADD, 1, failure)))
    assert isinstance(found, wire.Failure)
    assert found.message.startswith("\\udcff")


def test_a_message_names_its_fields_in_the_order_of_its_schema() -> None:
    for cls in {*wire.REQUESTS.values(), *wire.ANSWERS.values()}:
        assert len(fields(cls)) == len(cls.schema)


@pytest.mark.parametrize("request_id", [-1, wire.ALIVE_ID, 2**32, True, 1.0])
def test_a_request_has_no_other_id(request_id: object) -> None:
    with pytest.raises(MalformedFrameError, match="is no request id"):
        wire.decode_request([int(wire.Op.PING), request_id, None])


@pytest.mark.parametrize("request_id", [0, 127, 128, 65_535, wire.REQUEST_ID_MAX])
@pytest.mark.parametrize("auth", [None, b"key"])
def test_a_prepared_request_is_the_request(request_id: int, auth: bytes | None) -> None:
    request = wire.Add(2**40, 3, 1)
    packed = PreparedRequest(request, auth).frame_head(request_id, 0)[8:]
    assert wire.decode_request(decode_header(memoryview(packed))) == (request_id, auth, request)


def test_a_decoder_keeps_in_mind_what_clients_send_and_no_more() -> None:
    decoder = RequestDecoder()
    for ledger_id in range(100):
        for auth, is_kept in ((None, True), (bytes(32), True), (bytes(4000), False)):
            header = msgpack.packb(wire.encode_request(wire.Add(2**62 + ledger_id, 2**62, 4), 2**31, auth))
            before = len(decoder._adds)
            assert decoder.decode(memoryview(header))[1] == auth
            assert (len(decoder._adds) > before) is is_kept
