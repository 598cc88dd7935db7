"""WATCH: the rows in the body of a request and of its answer.

A row of a request is 16 bytes, little-endian: u64 ledger, i64 known LAC. It watches the ledger until its LAC
is above the known one; −2 takes the ledger out.

A row of an answer names a ledger that is watched no more: its LAC is above the known one, or the bookie has
deleted it. It has 40 bytes, little-endian: u64 ledger, u64 content term, i64 LAC, i64 LAFR, u32 checksum of
the LAC statement, u16, u16. The first u16 is the size of the statement's code, which follows. The second one
is 0, or 1 where the bookie has deleted the ledger and the statement's fields are 0.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.blocks import LacStatement
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Iterable

ROWS_MAX = 1024
"""Rows of one request, and of one answer."""
UNWATCH = -2
_ASKED = struct.Struct("<Qq")
_MOVED = struct.Struct("<QQqqIHH")
_DELETED = 1


class Asked(NamedTuple):
    """A ledger to watch until its LAC is above the known one; `UNWATCH` to watch it no more."""

    ledger_id: int
    known_lac: int


class Moved(NamedTuple):
    """A ledger whose LAC has moved; no statement where the bookie has deleted it."""

    ledger_id: int
    statement: LacStatement | None


def encode_asked(rows: Iterable[tuple[int, int]]) -> bytes:
    """Return the body of a request."""
    return b"".join([_ASKED.pack(*row) for row in rows])


def parse_asked(body: memoryview) -> list[Asked]:
    """Parse the body of a request.

    Raises:
        MalformedFrameError: it is not of whole rows, has too many, or a row is out of range.
    """
    if len(body) % _ASKED.size or len(body) > ROWS_MAX * _ASKED.size:
        raise MalformedFrameError(f"{len(body)} bytes are not at most {ROWS_MAX} rows of ledgers to watch")
    rows = [Asked(*row) for row in _ASKED.iter_unpack(body)]
    for ledger_id, known_lac in rows:
        if ledger_id > LEDGER_ID_MAX or not UNWATCH <= known_lac <= ENTRY_ID_MAX:
            raise MalformedFrameError(f"no ledger {ledger_id} can be watched for a LAC above {known_lac}")
    return rows


def encode_moved(rows: Iterable[Moved]) -> bytes:
    """Return the body of an answer."""
    parts: list[bytes] = []
    for ledger_id, statement in rows:
        if statement is None:
            parts.append(_MOVED.pack(ledger_id, 0, 0, 0, 0, 0, _DELETED))
            continue
        term, lac, lafr, crc, mac = statement
        parts += (_MOVED.pack(ledger_id, term, lac, lafr, crc, len(mac), 0), mac)
    return b"".join(parts)


def parse_moved(body: memoryview) -> list[Moved]:
    """Parse the body of an answer.

    Raises:
        MalformedFrameError: it is not of whole rows, or a row is out of range.
    """
    rows: list[Moved] = []
    at = 0
    while at < len(body):
        if len(body) - at < _MOVED.size:
            raise MalformedFrameError(f"{len(body) - at} bytes behind the rows of ledgers that have moved")
        ledger_id, term, lac, lafr, crc, mac_bytes, flags = _MOVED.unpack_from(body, at)
        at += _MOVED.size
        if len(body) - at < mac_bytes or flags & ~_DELETED or ledger_id > LEDGER_ID_MAX:
            raise MalformedFrameError(
                f"a row of ledger {ledger_id} with {mac_bytes} more bytes, flags {flags}"
            )
        mac = bytes(body[at : at + mac_bytes])
        at += mac_bytes
        if flags:
            rows.append(Moved(ledger_id, None))
        elif not all(NO_ENTRY <= at <= ENTRY_ID_MAX for at in (lac, lafr)) or term > TERM_FINAL:
            raise MalformedFrameError(
                f"a row of ledger {ledger_id} states LAC {lac}, LAFR {lafr}, term {term}"
            )
        else:
            rows.append(Moved(ledger_id, LacStatement(term, lac, lafr, crc, mac)))
    return rows
