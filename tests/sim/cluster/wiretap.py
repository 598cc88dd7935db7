"""The wire tap: reads the frames that clients and bookies send each other, and tells the history.

Owns the decoding of both directions of each connection, at the moment the sender hands the bytes over. Does
not own the network, nor the checks of answers (`tests.sim.checkers.bookie_promises`). It sees the wire only
and nothing of a bookie's inside. So it serves a rewritten storage engine as it served the first.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from bookie_aio.wire.blocks import Block
from bookie_aio.wire.frames import FRAME_BYTES_MAX, HEADER_BYTES_MAX, decode_header
from bookie_aio.wire.many import parse_adds, parse_done, parse_write_lacs
from bookie_aio.wire.messages import (
    ALIVE_ID,
    NO_TERM,
    Add,
    AddFlag,
    Adds,
    Delete,
    Failure,
    Force,
    LiftMark,
    Message,
    Op,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
    Watch,
    WriteLac,
    WriteLacs,
    decode_answer,
    decode_request,
)
from bookie_aio.wire.watching import parse_moved
from metadata.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.checkers.invariants import History
    from tests.sim.cluster.network import Endpoint

_LIMIT = 2 * FRAME_BYTES_MAX
_LENGTHS = struct.Struct(">II")


class _Block(NamedTuple):
    """What an add stores."""

    entries: range
    content_term: int


_NOTHING = _Block(range(0), 0)


class Frames:
    """Cuts what one side sends into frames; mostly whole ones are handed over, so hardly anything is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[tuple[list[Any], memoryview]]:
        """Yield header and body of each frame that is complete by now."""
        if self._rest:
            data = self._rest + data
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= _LENGTHS.size:
            length, header_bytes = _LENGTHS.unpack_from(data, at)
            if length > _LIMIT or not 0 < header_bytes <= min(length - 4, HEADER_BYTES_MAX):
                raise ProtocolError(f"a header of {header_bytes} bytes in a frame of {length}")
            if at + 4 + length > end:
                break
            body = at + 8 + header_bytes
            yield decode_header(view[at + 8 : body]), view[body : at + 4 + length]
            at += 4 + length
        self._rest = data[at:]


class Tap:
    """One connection between a client and a bookie."""

    def __init__(self, history: History, client: Endpoint, server: Endpoint) -> None:
        self._history = history
        self._client = client.host
        self._bookie = server.host.removesuffix("-copy")  # a copy is bound by what its original said
        self._there, self._back = f"→ {server.host}", f"→ {client.host}"
        self._words = history.words
        self._requests: dict[int, tuple[Any, _Block, int]] = {}
        self._in_company: set[int] = set()  # ids of ADDs that came in an ADDS
        self._deferred: list[tuple[int, _Block, int]] = []
        self._to_bookie = Frames()
        self._to_client = Frames()
        client.tap = self.from_client
        server.tap = self.from_bookie

    def from_client(self, data: bytes) -> None:
        """Read what the client sends."""
        history = self._history
        try:
            for header, body in self._to_bookie.cut(data):
                request_id, _, request = decode_request(header)
                if isinstance(request, Adds):
                    history.counts["adds_in_company"] += request.count
                    for one in parse_adds(request_id, request.count, body):
                        self._in_company.add(one.request_id)
                        self._asks(one.request_id, one.request, one.block)
                elif isinstance(request, WriteLacs):
                    for lac in parse_write_lacs(request_id, request.count, body):
                        self._asks(lac.request_id, lac.request, body)
                else:
                    self._asks(request_id, request, body)
        except ProtocolError as error:
            history.fail("TypeOK", f"{self._client} sent {self._bookie} a bad frame: {error}")

    def _asks(self, request_id: int, request: Message, body: memoryview) -> None:
        """Take note of a request, one of an ADDS or a WRITE_LACS perhaps."""
        history, added = self._history, _NOTHING
        if isinstance(request, Add):
            block = Block.parse(body)
            end = block.first_entry + block.count * block.stride
            added = _Block(range(block.first_entry, end, block.stride), block.content_term)
            if not request.flags & (AddFlag.RECOVERY | AddFlag.REPAIR):
                history.words.adds(self._client, request.ledger_id)
        self._requests[request_id] = (request, added, len(history.events))
        history.note(self._client, self._there, request_id, request, added.entries or "")

    def from_bookie(self, data: bytes) -> None:
        """Read what the bookie answers."""
        history = self._history
        try:
            for header, body in self._to_client.cut(data):
                op, request_id, answer = decode_answer(header)
                if op in (Op.ADDS, Op.WRITE_LACS):
                    kind = Add if op == Op.ADDS else WriteLac
                    for done_id in parse_done(request_id, body):
                        history.note(self._bookie, self._back, done_id, answer)
                        request, block, asked_at = self._ends(done_id)
                        if not isinstance(request, kind):
                            raise ProtocolError(f"an answer to {op} names request {done_id}: {request}")
                        self._answered(request, block, asked_at, answer)
                    continue
                history.note(self._bookie, self._back, request_id, answer)
                if request_id == ALIVE_ID:
                    continue
                request, block, asked_at = self._ends(request_id)
                if isinstance(answer, Failure):
                    self._refused(request, answer)
                    if request_id in self._in_company:
                        history.counts["add_refused_in_company"] += 1
                else:
                    self._answered(request, block, asked_at, answer)
                    if isinstance(request, Watch):
                        self._moved(body)
        except ProtocolError as error:
            history.fail("TypeOK", f"{self._bookie} sent {self._client} a bad frame: {error}")

    def _ends(self, request_id: int) -> tuple[Any, _Block, int]:
        found = self._requests.pop(request_id, None)
        if found is None:
            raise ProtocolError(f"an answer to request {request_id}, which is not outstanding")
        return found

    def _refused(self, request: Any, answer: Failure) -> None:
        ledger_id = getattr(request, "ledger_id", None)
        if ledger_id is not None and answer.status is Status.INVALID_TERM:
            self._words.refused_term(self._bookie, ledger_id)
        elif ledger_id is not None and answer.status is Status.NO_SUCH_LEDGER:
            self._words.deleted(self._bookie, ledger_id)

    def _answered(self, request: Any, block: _Block, asked_at: int, answer: Any) -> None:
        words, bookie = self._words, self._bookie
        if isinstance(request, Add):
            self._added(request, block, asked_at)
        elif isinstance(request, Delete):
            words.deleted(bookie, request.ledger_id)
        elif isinstance(request, WriteLac):
            words.answered(bookie, request.ledger_id, request.term, asked_at)
        elif isinstance(request, Force):
            words.answered(bookie, request.ledger_id, request.term, asked_at, raises=False)
            for ledger_id, held, at in self._deferred:
                if ledger_id == request.ledger_id and at < asked_at:
                    words.added(bookie, ledger_id, held.entries, content_term=held.content_term, term=None)
        elif isinstance(request, LiftMark):
            words.named_mark(bookie, request.ledger_id, request.mark, answer.mark)
        elif isinstance(request, (Read, ReadLac)):
            if isinstance(answer, ReadLacAnswer) and answer.is_damaged:
                words.is_in_doubt(bookie, request.ledger_id)
            if request.term != NO_TERM:
                words.answered(bookie, request.ledger_id, request.term, asked_at)
            if isinstance(answer, (ReadAnswer, ReadLacAnswer)) and answer.statement is not None:
                words.stated(bookie, request.ledger_id, answer.statement.lac)
            if isinstance(request, Read) and isinstance(answer, ReadAnswer):
                self._given(request, asked_at, answer)

    def _moved(self, body: memoryview) -> None:
        for ledger_id, statement in parse_moved(body):
            if statement is None:
                self._words.deleted(self._bookie, ledger_id)
            else:
                self._words.stated(self._bookie, ledger_id, statement.lac)

    def _added(self, request: Add, block: _Block, asked_at: int) -> None:
        if not request.flags & (AddFlag.RECOVERY | AddFlag.REPAIR):
            self._words.took_ordinary(self._bookie, request.ledger_id, block.entries, asked_at)
        if request.flags & AddFlag.DEFERRED_SYNC:
            self._deferred.append((request.ledger_id, block, asked_at))
            self._words.received(self._bookie, request.ledger_id, block.entries, request.term)
            return
        self._words.added(
            self._bookie, request.ledger_id, block.entries, content_term=block.content_term,
            term=None if request.flags & AddFlag.REPAIR else request.term,
        )  # fmt: skip

    def _given(self, request: Read, asked_at: int, answer: ReadAnswer) -> None:
        given = range(request.first, answer.stop_entry, request.stride)
        self._words.gave(self._bookie, request.ledger_id, given)
        if answer.stop == Stop.NO_SUCH_ENTRY:
            if request.term != NO_TERM:
                self._words.denies(self._bookie, request.ledger_id, answer.stop_entry)
            self._words.has_not(
                self._bookie, request.ledger_id, answer.stop_entry, request.content_term, asked_at
            )
