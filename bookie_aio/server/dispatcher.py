"""Dispatcher: takes the frames of all connections to the handlers of their requests.

Owns the handshake, the table from a request's type to its handler, and the checks that every request passes.
Only some requests have a body. The ledger's id has been given out (`given_ids`), and the ledger is not
deleted. The bookie is not draining, and the request is authorised. Each request in an ADDS or a WRITE_LACS
passes them by itself. Does not own the bytes and limits of a connection (`connection`), the operations
(`handlers`), nor the form of answers (`responder`).

Invariant (rule 7): all of it is synchronous, in the order in which the frames came. A handler's verdict on a
term, and the append that the verdict allows, are one step with the checks here.

`LedgerAuthoriser` judges tokens by the locks of ledgers, which it keeps in the bookie's storage. It judges a
first token by the ledger's metadata as well. The connection waits for the answer of the metadata store, so
its requests stay in order.

Invariant: the verdict on a token, the append of the lock and the append of the request itself are one step.
The lock is appended first, so it is durable no later than the first change made under it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bookie_aio.core.authorisation import Access, judge_token, ledger_at_stake, lock_of
from bookie_aio.server.handlers.add import AddHandler
from bookie_aio.server.handlers.admin import ClaimHandler, ConfirmedHandler, InspectHandler
from bookie_aio.server.handlers.fence import Fence
from bookie_aio.server.handlers.lac import LacHandler
from bookie_aio.server.handlers.read import ReadHandler
from bookie_aio.server.handlers.store_waits import StoreWaits
from bookie_aio.server.responder import WAITING_BYTES, Responder
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.many import parse_adds, parse_write_lacs
from bookie_aio.wire.messages import (
    NO_TERM,
    VERSION_MANY,
    VERSION_MAX,
    VERSION_MIN,
    Add,
    Adds,
    Delete,
    Force,
    Hello,
    HelloAnswer,
    Info,
    IsFree,
    LiftMark,
    ListEntries,
    ListLedgers,
    Message,
    Op,
    Ping,
    Read,
    ReadLac,
    Status,
    Watch,
    WriteLac,
    WriteLacs,
    encode_answer,
)
from bookie_aio.wire.prepared import RequestDecoder
from metadata.errors import (
    EntryTooLargeError,
    MalformedFrameError,
    MetadataError,
    MetadataUnavailableError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator

    from bookie_aio.config import Limits
    from bookie_aio.metrics import RequestMetrics
    from bookie_aio.server.given_ids import GivenIds
    from bookie_aio.server.password_ledgers import PasswordLedgers
    from bookie_aio.server.registration import StandingOrder
    from bookie_aio.server.responder import Peer
    from bookie_aio.storage.engine import Engine
    from bookie_aio.structured_logging import RepeatedWarnings
    from bookie_aio.wire.many import ManyAdd, ManyLac
    from bookie_aio.wire.messages import Message

_WITH_BODY = frozenset({Op.ADD, Op.WATCH})
_NO_BODY = memoryview(b"")
_OF_DELETED = (Op.DELETE, Op.IS_FREE)
"""The operations that make sense for a ledger that has been deleted."""


def _stores(request: Message) -> bool:
    """Return whether the bookie keeps anything for the ledger of this request."""
    if isinstance(request, Read | ReadLac):
        return request.term != NO_TERM
    return isinstance(request, Add | WriteLac | Force | Delete)


class Authoriser(Protocol):
    """Decides whether a request may be carried out."""

    def authorise(
        self, peer: Peer, request: Message, auth: bytes | None, answer: asyncio.Future[bool] | None
    ) -> str | asyncio.Future[bool] | None:
        """Return None to allow the request, or the reason for refusing it.

        A future stands for neither: the request is authorised again once the future is done. It is passed as
        `answer` then.
        """


class LedgerAuthoriser:
    """Decides by the locks of ledgers, as `bookie_aio.core.authorisation` explains."""

    def __init__(self, engine: Engine, passwords: PasswordLedgers) -> None:
        self._engine = engine
        self._passwords = passwords

    def authorise(
        self, peer: Peer, request: Message, auth: bytes | None, answer: asyncio.Future[bool] | None
    ) -> str | asyncio.Future[bool] | None:
        """Decide, as `Authoriser` says. Raises DiskFullError and MetadataError."""
        ledger_id = ledger_at_stake(request, has_token=auth is not None)
        if ledger_id is None:
            return None
        lock = self._engine.lock(ledger_id)
        if auth is None and not lock:
            return None  # nearly every add: the ledger has no password
        access = judge_token(lock, auth)
        if access is Access.REFUSE:
            what = f"ledger {ledger_id} has a password here, and " if lock else ""
            return f"{what}the request {_fault(auth)}"
        # A DELETE is believed of nobody, and the metadata that would permit a lock are gone.
        is_deletion = type(request) is Delete
        if access is Access.LOCK and not is_deletion and not self._engine.is_deleted(ledger_id):
            assert auth is not None
            if answer is not None and answer.cancelled():
                raise MetadataUnavailableError("the question was cancelled: try again")
            known = self._passwords.has_password(ledger_id) if answer is None else answer.result()
            if isinstance(known, asyncio.Future):
                return known
            if not known:
                return f"the metadata store has no ledger {ledger_id} with a password: send no token"
            # Counted on its own: the request itself may yet be refused, and would count nothing then.
            self._engine.append_lock(ledger_id, lock_of(auth), lambda error: peer.release(WAITING_BYTES))
            peer.hold(WAITING_BYTES)
        return None


def _fault(auth: bytes | None) -> str:
    return "carries no token" if auth is None else "carries a token that is not of this password"


class Dispatcher:
    """Carries out the requests of all connections.

    `metrics` counts the requests. The bookie's shutdown or fail-stop sets `is_draining`. Every request is
    refused from then on.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        limits: Limits,
        hello: HelloAnswer,
        loop: asyncio.AbstractEventLoop,
        info: Callable[[], dict[str, object]],
        authoriser: Authoriser,
        passwords: PasswordLedgers,
        drop_if_deleted: Callable[[int], Awaitable[bool]],
        given_ids: GivenIds,
        not_free_below: Callable[[], int],
        lift_mark: Callable[[int, int], Awaitable[int]],
        order: StandingOrder,
        warnings: RepeatedWarnings,
        metrics: RequestMetrics,
    ) -> None:
        """Make the handlers.

        Args:
            engine: the storage.
            limits: bounds on the memory that peers can make the bookie hold.
            hello: the answer to a handshake that succeeds.
            loop: runs the timers of long polls.
            info: returns the metrics that INFO answers with.
            authoriser: decides on every request before its handler runs.
            passwords: decides on repairs without a token.
            drop_if_deleted: `LedgerGarbageCollector.drop_if_deleted`, for DELETE.
            given_ids: the ledger ids that have been given out. Nothing is stored for others.
            not_free_below: returns the id below which no new ledger may be made (`BookieAge`).
            lift_mark: `Healing.lift`, for LIFT_MARK.
            order: the operator's order, which may forbid adds.
            metrics: counts the requests.
        """
        self.metrics = metrics
        self.is_draining = False
        self._engine = engine
        self._hello = hello
        self._authoriser = authoriser
        self._decoder = RequestDecoder()
        self._responder = responder = Responder(engine, metrics, warnings)
        fence = Fence(engine, responder, metrics)
        reads = ReadHandler(engine, limits, responder, fence, metrics)
        inspections = InspectHandler(engine, limits, responder, info)
        waits = StoreWaits(limits)
        confirmed = ConfirmedHandler(responder, waits, drop_if_deleted, lift_mark)
        self._given_ids = given_ids
        claims = ClaimHandler(engine, responder, waits, given_ids, not_free_below)
        may_repair = passwords.may_repair
        self._adds = AddHandler(engine, limits, responder, fence, metrics, may_repair, waits, order)
        self._lacs = LacHandler(engine, limits, responder, fence, loop)
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Add: self._adds.add,
            Force: self._adds.force,
            Read: reads.read,
            ReadLac: self._lacs.read_lac,
            WriteLac: self._lacs.write_lac,
            Watch: self._lacs.watch,
            ListEntries: inspections.list_entries,
            ListLedgers: inspections.list_ledgers,
            Info: inspections.info,
            Ping: inspections.ping,
            Delete: confirmed.delete,
            LiftMark: confirmed.lift_mark,
            IsFree: claims.is_free,
        }

    @property
    def polls_waiting(self) -> int:
        """Return the number of long polls that wait."""
        return self._lacs.polls_waiting

    @property
    def ledgers_watched(self) -> int:
        """Return the number of ledgers that connections watch."""
        return self._lacs.ledgers_watched

    def greet(self, peer: Peer, packed: memoryview) -> bool:
        """Answer the handshake, and return whether the connection may go on.

        Raises:
            ProtocolError: the frame is no HELLO.
        """
        request_id, _, hello = self._decoder.decode(packed)
        if not isinstance(hello, Hello):
            raise MalformedFrameError(f"{type(hello).__name__} before the handshake")
        self.metrics.requests[Op.HELLO] += 1
        peer.client = hello.client
        mine = self._hello
        if hello.version_min > VERSION_MAX or hello.version_max < VERSION_MIN:
            status = Status.UNSUPPORTED_VERSION
            reason = (
                f"this bookie speaks versions {VERSION_MIN} to {VERSION_MAX} of the protocol, the client "
                f"{hello.version_min} to {hello.version_max}"
            )
        elif hello.instance_id not in ("", mine.instance_id):
            status = Status.WRONG_BOOKIE
            reason = f"this bookie is of cluster {mine.instance_id}, not {hello.instance_id}"
        elif hello.bookie_id not in ("", mine.bookie_id):
            status = Status.WRONG_BOOKIE
            reason = f"this is bookie {mine.bookie_id}, not {hello.bookie_id}"
        elif self.is_draining:
            status, reason = Status.SHUTTING_DOWN, "this bookie is shutting down"
        else:
            peer.version = min(hello.version_max, VERSION_MAX)
            answer = replace(mine, version=peer.version)
            peer.send(encode_frame(encode_answer(Op.HELLO, request_id, answer)))
            return True
        self._responder.refuse(peer, Op.HELLO, request_id, status, reason, VERSION_MAX)
        peer.fail(reason)
        return False

    def handle(self, peer: Peer, packed: memoryview, body: memoryview) -> int:
        """Carry out the request, or the requests, of one frame of a connection that has been greeted.

        Return how many frames of one request it counts as. Errors of the storage become answers.

        Raises:
            ProtocolError: the header is not that of a request; the connection cannot go on.
        """
        request_id, auth, request = self._decoder.decode(packed)
        if type(request) not in self._handlers:
            if not isinstance(request, Adds | WriteLacs):
                raise MalformedFrameError(f"{type(request).__name__} after the handshake")
            if peer.version < VERSION_MANY or auth is not None:
                what = f"version {peer.version}" if auth is None else "a frame with a token beside its rows"
                raise MalformedFrameError(f"{type(request).__name__} in {what}")
            self._handle_many(peer, request_id, request, body)
            return 1 + request.count // 2  # each costs half of what it would cost alone
        op = request.op
        self.metrics.requests[op] += 1
        if body and op not in _WITH_BODY:
            reason = f"a {op.name} has no body, and came with one of {len(body):,} bytes"
            self._responder.refuse(peer, op, request_id, Status.BAD_REQUEST, reason)
            return 1
        self._take(peer, request_id, auth, request, body)
        return 1

    def _handle_many(self, peer: Peer, request_id: int, request: Adds | WriteLacs, body: memoryview) -> None:
        """Carry out the requests of an ADDS or a WRITE_LACS, each by itself."""
        self.metrics.requests[request.op] += 1
        if isinstance(request, Adds):
            self._take_adds(peer, body, iter(parse_adds(request_id, request.count, body)))
        else:
            self._take_lacs(peer, iter(parse_write_lacs(request_id, request.count, body)))

    def _take_adds(self, peer: Peer, frame: memoryview, adds: Iterator[ManyAdd]) -> None:
        """Carry out the ADDs of an ADDS that are left, up to one that has to wait."""
        try:
            for add in adds:
                self._take(peer, add.request_id, add.auth, add.request, add.block, (frame, add))
                if not peer.is_open:  # a block that is not intact: no more is believed
                    return
                if peer.again:
                    peer.again.append(partial(self._take_adds, peer, frame, adds))
                    return
        finally:
            self._adds.flush()

    def _take_lacs(self, peer: Peer, lacs: Iterator[ManyLac]) -> None:
        """Carry out the WRITE_LACs of a WRITE_LACS that are left, up to one that has to wait."""
        self._lacs.gather()
        try:
            for lac in lacs:
                self._take(peer, lac.request_id, lac.auth, lac.request, _NO_BODY)
                if not peer.is_open:
                    return
                if peer.again:
                    peer.again.append(partial(self._take_lacs, peer, lacs))
                    return
        finally:
            self._lacs.flush(peer)

    def _take(
        self,
        peer: Peer,
        request_id: int,
        auth: bytes | None,
        request: Message,
        body: memoryview,
        many: tuple[memoryview, ManyAdd] | None = None,
    ) -> None:
        """Carry out one request, or let it wait until its ledger's id is known to have been given out.

        `many`: it is this one of the ADDS whose body is given.
        """
        ledger_id = getattr(request, "ledger_id", None)
        if ledger_id is not None and ledger_id >= self._given_ids.below and _stores(request):
            if many is not None:
                body = memoryview(bytes(body))  # the frame it came in must not stay in memory for it
            go_on = partial(self._go_on, peer, request_id, auth, request, body)
            # A request without a token never waits a second time: `LedgerAuthoriser` asks for locks only.
            is_aside = auth is None and type(request) is Add and peer.is_writer
            self._given_ids.wait(peer, ledger_id, len(body), go_on, may_wait_aside=is_aside)
            return
        self._carry_out(peer, request_id, auth, request, body, None, many)

    def _go_on(
        self,
        peer: Peer,
        request_id: int,
        auth: bytes | None,
        request: Message,
        body: memoryview,
        refusal: str | None,
    ) -> None:
        """Carry out a request that waited for the id counter; `refusal` is None where the id is given out."""
        if refusal is None:
            self._carry_out(peer, request_id, auth, request, body)
            return
        is_deletion = type(request) is Delete
        if refusal:
            status = Status.INTERNAL_ERROR if is_deletion else Status.TOO_MANY_REQUESTS
            reason = f"the id counter is not known, try again: {refusal}"
        else:
            status = Status.BAD_REQUEST if is_deletion else Status.ID_TAKEN
            reason = f"no ledger has the id {getattr(request, 'ledger_id', None)}: it has not been given out"
        self._responder.refuse(peer, request.op, request_id, status, reason)

    def _carry_out(
        self,
        peer: Peer,
        request_id: int,
        auth: bytes | None,
        request: Message,
        body: memoryview,
        answer: asyncio.Future[bool] | None = None,
        many: tuple[memoryview, ManyAdd] | None = None,
    ) -> None:
        """Carry out a request, or let its connection wait until it is decided. `answer` is that decision."""
        op, responder = request.op, self._responder
        if self.is_draining:
            responder.refuse(peer, op, request_id, Status.SHUTTING_DOWN, "this bookie is shutting down")
            return
        try:
            ledger_id = getattr(request, "ledger_id", None)
            if ledger_id is not None and self._engine.is_deleted(ledger_id) and op not in _OF_DELETED:
                if many is not None:
                    self._adds.flush()  # what was accepted before is durable when the refusal leaves (rule 3)
                responder.refuse_deleted(peer, op, request_id, f"ledger {ledger_id} has been deleted")
                return
            refusal = self._authoriser.authorise(peer, request, auth, answer)
            if isinstance(refusal, asyncio.Future):
                if many is not None:
                    body = memoryview(bytes(body))  # it is not gathered, so it would keep the frame alive
                go_on = partial(self._carry_out, peer, request_id, auth, request, body, refusal)
                peer.go_on_after(refusal, go_on)
                return
            if refusal is not None:
                responder.refuse(peer, op, request_id, Status.UNAUTHORIZED, refusal)
                return
            if many is not None:
                self._adds.gather(peer, *many, has_token=auth is not None)
            elif auth is not None and type(request) is Add:
                self._adds.add(peer, request_id, request, body, has_token=True)
            else:
                self._handlers[type(request)](peer, request_id, request, body)
        except EntryTooLargeError as error:  # a block above the room of a segment
            responder.refuse(peer, op, request_id, Status.BAD_REQUEST, str(error))
        except StorageError as error:
            responder.answer_storage_error(peer, op, request_id, error)
        except MetadataError as error:
            reason = f"the metadata store was asked for ledger {ledger_id} and did not answer: {error}"
            responder.refuse(peer, op, request_id, Status.INTERNAL_ERROR, reason)

    def connection_lost(self, peer: Peer) -> None:
        """Drop the long polls of a closed connection."""
        self._lacs.connection_lost(peer)

    def ledgers_moved(self, ledger_ids: Collection[int]) -> None:
        """Answer the long polls of these ledgers whose LAC has come. The engine calls it after each group."""
        self._lacs.ledgers_moved(ledger_ids)

    def drain(self) -> None:
        """Refuse every request from now on, and the long polls that wait, with SHUTTING_DOWN."""
        self.is_draining = True
        self._lacs.drain()
