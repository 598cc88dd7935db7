"""A connection to one bookie: frames out, answers in, each matched to its request.

Owns one socket and the requests outstanding on it. Does not own reconnecting (`client_aio.bookies.pool`),
nor the consequences of a failure for a ledger.

Every request is answered exactly once: by the bookie's answer, or by the error that ended the connection.
A connection that has ended is never used again. A new connection has new request ids, so that an answer is
never matched to a wrong request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from bookie_aio.wire.frames import (
    FRAME_BYTES_MAX,
    HANDSHAKE_FRAME_BYTES_MAX,
    FrameParser,
    decode_header,
    encode_frame,
)
from bookie_aio.wire.listing import Row, parse_rows
from bookie_aio.wire.messages import (
    ADDED,
    REQUEST_ID_MAX,
    VERSION_MAX,
    VERSION_MIN,
    Done,
    Failure,
    Hello,
    HelloAnswer,
    ListEntries,
    ListEntriesAnswer,
    Message,
    Op,
    PreparedRequest,
    Status,
    decode_answer,
    encode_request,
)
from metadata.access.bookies import split_address
from metadata.errors import (
    BookieError,
    BookieReadOnlyError,
    BookieUnavailableError,
    BookKeeperError,
    EntryUnknownError,
    FrameTooLargeError,
    LedgerFencedError,
    MalformedFrameError,
    NoSuchLedgerError,
    NotABookieError,
    OperationTimeoutError,
    ProtocolError,
    StaleMetadataError,
    TooManyRequestsError,
    UnauthorizedAccessError,
    UnsupportedVersionError,
)
from metadata.ids import TERM_FINAL

if TYPE_CHECKING:
    from bookie_aio.wire.blocks import Buffer

logger = logging.getLogger(__name__)

Outcome = Message | Failure | BookKeeperError
OnAnswer = Callable[[Outcome, memoryview], None]
Answer = TypeVar("Answer", bound=Message)

NO_BODY = memoryview(b"")
_WATCH_INTERVAL_S = 0.25
_JOINED_BYTES_MAX = 32 * 1024
_WRITE_BUFFER_HIGH_BYTES = 1024 * 1024
_HELD_BYTES_MAX = 32 * 1024

_ERRORS: dict[Status, type[BookKeeperError]] = {
    Status.BAD_REQUEST: MalformedFrameError,
    Status.UNSUPPORTED_VERSION: UnsupportedVersionError,
    Status.UNAUTHORIZED: UnauthorizedAccessError,
    Status.INVALID_TERM: LedgerFencedError,
    Status.READ_ONLY: BookieReadOnlyError,
    Status.TOO_MANY_REQUESTS: TooManyRequestsError,
    Status.STALE_METADATA: StaleMetadataError,
    Status.NO_SUCH_LEDGER: NoSuchLedgerError,
    Status.DATA_LOST: EntryUnknownError,
    Status.WRONG_BOOKIE: NotABookieError,
    Status.SHUTTING_DOWN: BookieUnavailableError,
    Status.INTERNAL_ERROR: BookieError,
}


def error_of(failure: Failure, *, bookie_id: str, ledger_id: int | None = None) -> BookKeeperError:
    """Return the typed error for a bookie's failure."""
    if failure.status is Status.INVALID_TERM and failure.value == TERM_FINAL:
        answer = "refused: the ledger is closed or was recovered by another client"
    else:
        answer = f"answered {failure.status.name}: {failure.message}"
    return _ERRORS[failure.status](
        f"bookie {bookie_id} {answer}",
        bookie_id=bookie_id,
        ledger_id=ledger_id,
    )


# The callback for the answer, the times at which the request was sent and its answer is due, the operation.
_Request = tuple[OnAnswer, float, float, int]
_ADD = int(Op.ADD)
_DONE = Done()


class BookieConnection(asyncio.BufferedProtocol):
    """One live connection; made by `connect`."""

    def __init__(self, bookie_id: str, on_lost: Callable[[BookieConnection], None]) -> None:
        self.bookie_id = bookie_id
        self.nonce = ""
        self.error: BookKeeperError | None = None
        self._on_lost = on_lost
        self._parser = FrameParser(HANDSHAKE_FRAME_BYTES_MAX)
        self._requests: dict[int, _Request] = {}
        self._overdue: set[int] = set()
        self._received_at = 0.0
        self._next_id = 0
        self._held: list[bytes] = []  # adds that were not sent yet: heads and bodies alternately
        self._held_bytes = 0
        self._adds_sent = 0  # that were not answered yet
        self._is_release_due = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._watch: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Return whether requests can be sent."""
        return self.error is None

    def request(
        self,
        request: Message,
        on_answer: OnAnswer,
        *,
        body: Sequence[Buffer] = (),
        body_bytes: int = 0,
        timeout_s: float,
        auth: bytes | None = None,
    ) -> None:
        """Send a request; `on_answer` is called once, later, with the answer or the error.

        The error of a timeout is OperationTimeoutError. The connection stays open if anything was received
        since the request was sent. Else it is closed, and every outstanding request gets the error.
        """
        if self.error is not None:
            self._loop.call_soon(on_answer, self.error, NO_BODY)
            return
        assert self._transport is not None
        request_id = self._next_id
        self._next_id = (request_id + 1) & REQUEST_ID_MAX
        now = self._time()
        self._requests[request_id] = (on_answer, now, now + timeout_s, request.op)
        self._release()  # Requests stay in order.
        self._adds_sent += request.op == _ADD
        head = encode_frame(encode_request(request, request_id, auth), body_bytes)
        if body_bytes > _JOINED_BYTES_MAX:
            self._transport.writelines([head, *body])
        else:  # one small buffer costs less than two
            self._transport.write(b"".join((head, *body)))
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_INTERVAL_S, self._check_deadlines)

    def send_prepared(
        self, request: PreparedRequest, on_answer: OnAnswer, body: bytes, body_bytes: int, timeout_s: float
    ) -> None:
        """Do as `request` for an add, whose `auth` is prepared too. The add may be held back briefly.

        While adds of this connection are unanswered, the bookie's group commit is in progress, and further
        small adds would only wait there. They wait here instead, until an answer comes or they exceed a
        limit. Both sides then handle many frames at once.
        """
        if self.error is not None:
            self._loop.call_soon(on_answer, self.error, NO_BODY)
            return
        # Runs for every batch and bookie, so it calls none of our functions without need.
        request_id = self._next_id
        self._next_id = (request_id + 1) & REQUEST_ID_MAX
        now = self._time()
        self._requests[request_id] = (on_answer, now, now + timeout_s, _ADD)
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_INTERVAL_S, self._check_deadlines)
        self._held += (request.frame_head(request_id, body_bytes), body)
        self._held_bytes += body_bytes
        if self._held_bytes >= _HELD_BYTES_MAX:
            self._release()
        elif not self._adds_sent and not self._is_release_due:
            self._is_release_due = True
            self._loop.call_soon(self._release)

    def _release(self) -> None:
        """Send the adds that were held back."""
        self._is_release_due = False
        held, self._held = self._held, []
        if not held or self.error is not None:
            return
        assert self._transport is not None
        self._adds_sent += len(held) // 2
        if self._held_bytes > _JOINED_BYTES_MAX * len(held):  # one small buffer costs less than two
            self._transport.writelines(held)
        else:
            self._transport.write(b"".join(held))
        self._held_bytes = 0

    async def call(
        self,
        request: Message,
        expected: type[Answer],
        *,
        body: Buffer = b"",
        timeout_s: float,
        ledger_id: int | None = None,
        auth: bytes | None = None,
    ) -> tuple[Answer, memoryview]:
        """Send a request and wait for its answer.

        Cancelling leaves the request running at the bookie. Its answer is dropped.

        Raises:
            BookKeeperError: the bookie's failure as a typed error, or the error that ended the connection.
        """
        future: asyncio.Future[tuple[Outcome, memoryview]] = self._loop.create_future()

        def on_answer(outcome: Outcome, body: memoryview) -> None:
            if not future.done():
                future.set_result((outcome, body))

        self.request(request, on_answer, body=[body], body_bytes=len(body), timeout_s=timeout_s, auth=auth)
        outcome, answered = await future
        if isinstance(outcome, expected):
            return outcome, answered
        if isinstance(outcome, Failure):
            raise error_of(outcome, bookie_id=self.bookie_id, ledger_id=ledger_id)
        assert isinstance(outcome, BookKeeperError)
        raise outcome.__class__(str(outcome), bookie_id=self.bookie_id, ledger_id=ledger_id)

    def abandon(self) -> None:
        """Close the socket from outside the event loop, which does not run any more."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        with contextlib.suppress(RuntimeError, OSError, AttributeError):
            transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            transport.abort()

    def close(self, error: BookKeeperError | None = None) -> None:
        """End the connection; outstanding requests get the error, or BookieUnavailableError."""
        self._end(
            error
            or BookieUnavailableError("the connection was closed by this client", bookie_id=self.bookie_id)
        )

    # --- asyncio.BufferedProtocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are not subclasses of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_HIGH_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.buffer_updated(nbytes)
        self._received_at = self._time()
        parser = self._parser
        try:
            while True:
                # Nearly all answers say that an add is stored. Consecutive ones are parsed together.
                for request_id in parser.take_short(ADDED):
                    self._settle(_ADD, request_id, _DONE, NO_BODY)
                frame = parser.next_packed()
                if frame is None:
                    break
                op, request_id, outcome = decode_answer(decode_header(frame[0]))
                self._settle(op, request_id, outcome, frame[1])
            if self._held and not self._is_release_due:
                # Later in this iteration: the answers just handled probably lead to further adds.
                self._is_release_due = True
                self._loop.call_soon(self._release)
        except ProtocolError as error:
            error.bookie_id = self.bookie_id
            logger.warning("bookie=%s broke the protocol: %s", self.bookie_id or "?", error)
            self._end(error)

    def _settle(self, op: int, request_id: int, outcome: Outcome, body: memoryview) -> None:
        waiting = self._requests.get(request_id)
        if waiting is not None:
            if waiting[3] != op:  # the request stays outstanding, and fails with the connection
                raise MalformedFrameError(f"request {request_id} got the answer of operation {op}")
            del self._requests[request_id]
            self._adds_sent -= op == _ADD
            waiting[0](outcome, body)
        elif request_id in self._overdue:
            self._overdue.remove(request_id)
        elif self.error is None:
            raise MalformedFrameError(f"an answer to request {request_id}, which is not outstanding")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self._end(
            BookieUnavailableError(
                f"the connection to bookie {self.bookie_id} was lost{reason}", bookie_id=self.bookie_id
            )
        )

    # --- inside ---

    async def _handshake(self, instance_id: str, timeout_s: float) -> None:
        hello = Hello(VERSION_MIN, VERSION_MAX, "bookie-aio", instance_id, self.bookie_id)
        answer, _ = await self.call(hello, HelloAnswer, timeout_s=timeout_s)
        if not VERSION_MIN <= answer.version <= VERSION_MAX:
            raise UnsupportedVersionError(
                f"bookie {self.bookie_id} chose version {answer.version} of the protocol; "
                f"this client speaks {VERSION_MIN} to {VERSION_MAX}",
                bookie_id=self.bookie_id,
            )
        if self.bookie_id and answer.bookie_id != self.bookie_id:
            raise NotABookieError(
                f"expected bookie {self.bookie_id}, found {answer.bookie_id}", bookie_id=self.bookie_id
            )
        self.bookie_id = answer.bookie_id
        self.nonce = answer.nonce
        self._parser.frame_bytes_max = (
            max(FRAME_BYTES_MAX, answer.frame_bytes_max) + HANDSHAKE_FRAME_BYTES_MAX
        )

    def _check_deadlines(self) -> None:
        self._watch = None
        if not self._requests or self.error is not None:
            return
        now = self._loop.time()
        error = OperationTimeoutError(
            f"bookie {self.bookie_id} did not answer in time", bookie_id=self.bookie_id
        )
        # Long polls and adds have other timeouts: the oldest request need not be the first that is due.
        overdue = [(key, request) for key, request in self._requests.items() if request[2] < now]
        if any(sent_at > self._received_at for _, (_, sent_at, _, _) in overdue):
            self._end(error)
            return
        self._release()
        for key, (on_answer, _, _, op) in overdue:
            del self._requests[key]
            self._overdue.add(key)
            self._adds_sent -= op == _ADD
            on_answer(error, NO_BODY)
        self._watch = self._loop.call_later(_WATCH_INTERVAL_S, self._check_deadlines)

    def _end(self, error: BookKeeperError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            # Not close(): it would wait for a peer that may never read the buffered bytes.
            self._transport.abort()
        requests, self._requests = self._requests, {}
        self._on_lost(self)
        for on_answer, _, _, _ in requests.values():
            on_answer(error, NO_BODY)


async def connect(
    address: str,
    *,
    bookie_id: str,
    instance_id: str,
    timeout_s: float,
    on_lost: Callable[[BookieConnection], None] = lambda _: None,
) -> BookieConnection:
    """Open a connection and shake hands.

    Args:
        bookie_id: the bookie expected there; "" for any bookie.

    Raises:
        BookieUnavailableError: nothing listens, or the time is over.
        NotABookieError: the peer does not speak the protocol, or is another bookie.
        UnsupportedVersionError: the peer speaks no version that this client speaks.
    """
    host, port = split_address(address)
    connection: BookieConnection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: BookieConnection(bookie_id, on_lost), host, port
            )
            # The deadline above covers the handshake too: the timeout given here must only be later.
            await connection._handshake(instance_id, 2 * timeout_s)
    except TimeoutError:
        where = "shake hands" if connection else "connect"
        error: BookKeeperError = BookieUnavailableError(
            f"bookie {bookie_id} at {address} did not {where} within {timeout_s:g} s", bookie_id=bookie_id
        )
    except (OSError, UnicodeError) as failure:  # UnicodeError: an invalid host name
        error = BookieUnavailableError(
            f"bookie {bookie_id} at {address} cannot be reached: {failure}", bookie_id=bookie_id
        )
    except (MalformedFrameError, FrameTooLargeError, BookieUnavailableError) as failure:
        error = NotABookieError(f"what answers at {address} is not a bookie: {failure}", bookie_id=bookie_id)
    except BookKeeperError as failure:
        error = failure
    except BaseException:
        if connection is not None:
            connection.close()  # No caller has it.
        raise
    else:
        return connection
    if connection is not None:
        connection.close()
    raise error


async def list_entries(
    connection: BookieConnection, ledger_id: int, first: int, last: int, timeout_s: float
) -> tuple[list[Row], bool]:
    """Ask a bookie which entries from `first` to `last` it holds, and whether it lost data of the ledger.

    Raises:
        BookKeeperError: the bookie's failure. ProtocolError: its list does not advance.
    """
    rows: list[Row] = []
    following, is_damaged = first, False
    while 0 <= following <= last:
        answer, body = await connection.call(
            ListEntries(ledger_id, following), ListEntriesAnswer, timeout_s=timeout_s, ledger_id=ledger_id
        )
        rows += parse_rows(body)
        if 0 <= answer.next_entry <= following:
            raise ProtocolError(
                f"a list of entries from {following} on is said to go on at {answer.next_entry}",
                ledger_id=ledger_id,
            )
        following, is_damaged = answer.next_entry, answer.is_damaged
    return rows, is_damaged
