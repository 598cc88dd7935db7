"""ADDS and WRITE_LACS: many small requests of one connection in one frame.

    header   [op, request_id, nil, count]
    body     count rows, then the tokens of all of them, then the rest of all of them, without gaps

The request at index i has the id `request_id` + i. It is an ADD, or a WRITE_LAC, as if it had come in a frame
of its own. Each is judged by itself, and refused by itself, with the answer of that operation. Only the
acknowledgements share frames again: an answer to ADDS or WRITE_LACS lists, in its body, the ids of requests
that are done. One frame of requests may have several such answers.

A row of ADDS has 24 bytes, little-endian:

     0  u64  ledger
     8  u64  term
    16  u32  bytes of the block
    20  u16  flags, as those of ADD
    22  u16  bytes of the token; 0 for none

The blocks follow the tokens. A row of WRITE_LACS has 48 bytes, and codes follow the tokens:

     0  u64  ledger
     8  u64  term
    16  u64  content term       the statement
    24  i64  LAC
    32  i64  LAFR
    40  u32  checksum
    44  u16  bytes of the token; 0 for none
    46  u16  bytes of the statement's code

The body of an answer is an array of 1 to `MANY_MAX` ids, u32, little-endian. The header's id is the first.

Invariant: the parsers accept only bodies that their rows fill exactly. So no request of a frame can reach
into the bytes of another, and no length that lies is believed.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import (
    ADD_FLAGS_MAX,
    ALIVE_ID,
    MANY_MAX,
    Add,
    Adds,
    Done,
    Op,
    WriteLac,
    WriteLacs,
    encode_answer,
    encode_request,
)
from bookie_aio.wire.prepared import PreparedRequest
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.wire.blocks import Buffer

ADD_ROW = struct.Struct("<QQIHH")
_LAC_ROW = struct.Struct("<QQQqqIHH")
_ID_BYTES = 4


class ManyAdd:
    """One ADD of an ADDS: its id and token, the request, and its block with the block's place in the body."""

    __slots__ = ("auth", "block", "request", "request_id", "start")

    def __init__(
        self, request_id: int, auth: bytes | None, request: Add, block: memoryview, start: int
    ) -> None:
        self.request_id = request_id
        self.auth = auth
        self.request = request
        self.block = block
        self.start = start


class ManyLac(NamedTuple):
    """One WRITE_LAC of a WRITE_LACS."""

    request_id: int
    auth: bytes | None
    request: WriteLac


def encode_adds(request_id: int, adds: Sequence[tuple[Add, bytes | None, Buffer]]) -> list[Buffer]:
    """Return the buffers of an ADDS of 1 to `MANY_MAX` ADDs, each with its token and its block."""
    pack = ADD_ROW.pack
    parts: list[Buffer] = [
        pack(request.ledger_id, request.term, len(block), request.flags, len(auth) if auth else 0)
        for request, auth, block in adds
    ]
    parts += [auth for _, auth, _ in adds if auth]
    parts += [block for _, _, block in adds]
    return [encode_frame(encode_request(Adds(len(adds)), request_id), sum(map(len, parts))), *parts]


Held = tuple[PreparedRequest, int, bytes]
"""An ADD that is to be sent: the request, its id, and its block."""


def frames_of_adds(held: Sequence[Held], bytes_max: int) -> list[Buffer]:
    """Return the buffers of the frames that carry these ADDs, in their order.

    Neighbours share a frame, as long as their blocks have up to `bytes_max` bytes together. Others, and all
    of them if that is 0, get a frame of their own: an ADD.
    """
    buffers: list[Buffer] = []
    first = 0
    while first < len(held):
        request, request_id, block = held[first]
        size, end = len(block), first + 1
        room = bytes_max - size
        while end < len(held) and end - first < MANY_MAX:
            _, next_id, block = held[end]
            room -= len(block)
            if room < 0 or next_id != request_id + end - first:  # the ids begin again at 0
                break
            end += 1
        if end == first + 1:
            buffers += (request.frame_head(request_id, size), held[first][2])
        else:
            adds = [(prepared.request, prepared.auth, block) for prepared, _, block in held[first:end]]
            buffers += encode_adds(request_id, adds)
        first = end
    return buffers


def parse_adds(request_id: int, count: int, body: memoryview) -> list[ManyAdd]:
    """Parse the body of an ADDS of `count` rows. The blocks are views of the body, not checked here.

    Raises:
        MalformedFrameError: the rows do not fill the body, or a field is out of range.
    """
    _check_ids(request_id, count)
    at = count * ADD_ROW.size
    if at > len(body):
        raise MalformedFrameError(f"an ADDS of {len(body)} bytes has no room for {count} rows")
    ledgers, terms, sizes, flags, token_sizes = zip(*ADD_ROW.iter_unpack(body[:at]), strict=True)
    if max(ledgers) > LEDGER_ID_MAX or max(terms) > TERM_FINAL or max(flags) > ADD_FLAGS_MAX:
        raise MalformedFrameError("a row of an ADDS has a ledger, a term or flags out of range")
    blocks_at = at + sum(token_sizes)
    ends = list(accumulate(sizes, initial=blocks_at))
    if ends[-1] != len(body):
        raise MalformedFrameError(f"the rows of an ADDS describe {ends[-1]} bytes of its {len(body)}")
    tokens = _tokens(body, at, token_sizes)
    return [
        ManyAdd(request_id + index, token, Add(ledger_id, term, flag), body[start:end], start)
        for index, (token, ledger_id, term, flag, start, end) in enumerate(
            zip(tokens, ledgers, terms, flags, ends, ends[1:], strict=False)
        )
    ]


def encode_write_lacs(request_id: int, requests: Sequence[tuple[WriteLac, bytes | None]]) -> bytes:
    """Return the frame of a WRITE_LACS of 1 to `MANY_MAX` requests with their tokens."""
    rows: list[bytes] = []
    tokens: list[bytes] = []
    codes: list[bytes] = []
    for request, auth in requests:
        statement = request.statement
        assert statement is not None
        token = auth or b""
        term, lac, lafr, crc, code = statement
        rows.append(
            _LAC_ROW.pack(request.ledger_id, request.term, term, lac, lafr, crc, len(token), len(code))
        )
        tokens.append(token)
        codes.append(code)
    body = b"".join((*rows, *tokens, *codes))
    return encode_frame(encode_request(WriteLacs(len(rows)), request_id), len(body)) + body


def parse_write_lacs(request_id: int, count: int, body: memoryview) -> list[ManyLac]:
    """Parse the body of a WRITE_LACS of `count` rows. The statements are not checked here.

    Raises:
        MalformedFrameError: the rows do not fill the body, or a field is out of range.
    """
    _check_ids(request_id, count)
    at = count * _LAC_ROW.size
    if at > len(body):
        raise MalformedFrameError(f"a WRITE_LACS of {len(body)} bytes has no room for {count} rows")
    rows = list(_LAC_ROW.iter_unpack(body[:at]))
    code_at = at + sum(row[6] for row in rows)
    if code_at + sum(row[7] for row in rows) != len(body):
        raise MalformedFrameError(f"the rows of a WRITE_LACS do not fill its {len(body)} bytes")
    tokens = _tokens(body, at, [row[6] for row in rows])
    found: list[ManyLac] = []
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        ledger_id, term, content_term, lac, lafr, crc, _, code_bytes = row
        if (
            ledger_id > LEDGER_ID_MAX
            or max(term, content_term) > TERM_FINAL
            or not NO_ENTRY <= min(lac, lafr) <= max(lac, lafr) <= ENTRY_ID_MAX
        ):
            raise MalformedFrameError(
                f"a row of ledger {ledger_id} states LAC {lac}, LAFR {lafr}, term {content_term} under {term}"
            )
        code = bytes(body[code_at : code_at + code_bytes])
        code_at += code_bytes
        statement = LacStatement(content_term, lac, lafr, crc, code)
        found.append(ManyLac(request_id + index, token, WriteLac(ledger_id, term, statement)))
    return found


def encode_done(op: Op, request_ids: Sequence[int]) -> bytes:
    """Return the answer to ADDS or WRITE_LACS that names the requests that are done."""
    body = struct.pack(f"<{len(request_ids)}I", *request_ids)
    return encode_frame(encode_answer(op, request_ids[0], Done()), len(body)) + body


def parse_done(request_id: int, body: memoryview) -> list[int]:
    """Return the ids that an answer to ADDS or WRITE_LACS names.

    Raises:
        MalformedFrameError: the body is no array of ids that begins with the answer's own.
    """
    if len(body) % _ID_BYTES or not 0 < len(body) <= MANY_MAX * _ID_BYTES:
        raise MalformedFrameError(f"{len(body)} bytes are not 1 to {MANY_MAX} request ids")
    found = body.cast("I").tolist()
    if found[0] != request_id:
        raise MalformedFrameError(f"an answer to request {request_id} names request {found[0]} first")
    return found


def _check_ids(request_id: int, count: int) -> None:
    if request_id + count > ALIVE_ID:
        raise MalformedFrameError(f"{count} requests from id {request_id} on have no ids")


def _tokens(body: memoryview, at: int, sizes: Sequence[int]) -> list[bytes | None]:
    if not any(sizes):
        return [None] * len(sizes)
    ends = list(accumulate(sizes, initial=at))
    return [
        bytes(body[end - size : end]) if size else None for size, end in zip(sizes, ends[1:], strict=True)
    ]
