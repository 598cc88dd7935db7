"""A connection to one bookie: frames out, answers in, each matched to its request.

Owns one socket and the requests outstanding on it. Does not own reconnecting (`client_aio.bookies.pool`),
nor the consequences of a failure for a ledger.

Every request is answered exactly once: by the bookie's answer, or by the error that ended the connection.
A connection that has ended is never used again. A new connection has new request ids, so that an answer is
never matched to a wrong request.

A connection with outstanding requests on which nothing comes sends a PING. It ends when nothing comes after
that either (`client_aio.core.liveness`). Deadlines do not count time in which our own event loop did not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from bookie_aio.wire.frames import (
    FRAME_BYTES_MAX,
    HANDSHAKE_FRAME_BYTES_MAX,
    FrameParser,
    decode_header,
    encode_frame,
)
from bookie_aio.wire.listing import Row, parse_rows
from bookie_aio.wire.many import encode_write_lacs, frames_of_adds, parse_done
from bookie_aio.wire.messages import (
    ADDED,
    ALIVE_ID,
    MANY_MAX,
    VERSION_ALIVE,
    VERSION_MANY,
    VERSION_MAX,
    Done,
    Failure,
    Hello,
    HelloAnswer,
    ListEntries,
    ListEntriesAnswer,
    ListLedgers,
    ListLedgersAnswer,
    Message,
    Op,
    Ping,
    Status,
    WriteLac,
    decode_answer,
    encode_request,
)
from client_aio.core.liveness import PING_TIMEOUT_S, Liveness, Verdict, shifted
from metadata.access.bookies import split_address
from metadata.awake import LOOK_INTERVAL_S, Reading, awake_timeout
from metadata.errors import (
    BookieError,
    BookieReadOnlyError,
    BookieUnavailableError,
    BookKeeperError,
    EntryUnknownError,
    FrameTooLargeError,
    LedgerFencedError,
    LedgerIdTakenError,
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
from metadata.transports import GatheringWrite, gathering_write

if TYPE_CHECKING:
    from bookie_aio.wire.blocks import Buffer
    from bookie_aio.wire.many import Held
    from bookie_aio.wire.prepared import PreparedRequest

logger = logging.getLogger(__name__)

Outcome = Message | Failure | BookKeeperError
OnAnswer = Callable[[Outcome, memoryview], None]
Answer = TypeVar("Answer", bound=Message)
Sent = TypeVar("Sent")

NO_ANSWER = (BookieUnavailableError, OperationTimeoutError)
"""The errors of `BookieConnection.call` that say nothing of what the bookie has: it did not answer."""
NO_BODY = memoryview(b"")
_JOINED_BYTES_MAX = 32 * 1024
_WRITE_BUFFER_HIGH_BYTES = 1024 * 1024
_HELD_BYTES_MAX = 32 * 1024
_SMALL_BLOCK_BYTES = 4 * 1024
"""Blocks of less than this on average are held for a fuller ADDS."""
_HELD_SMALL_BYTES_MAX = 256 * 1024
_HELD_S_MAX = 0.01
"""Adds are held for no longer, since the add that has no answer may wait for something else than the disk.

A bookie lets an add of a new ledger wait while it reads the id counter, and handles those of others."""
MANY_BYTES_MAX = 512 * 1024
"""The most bytes of blocks in an ADDS."""
_MANY_ROWS_BYTES = 32 * 1024
"""Room in a frame for the header, the rows and the tokens of an ADDS."""
_VERSION_MIN = VERSION_ALIVE
"""The oldest version that this client speaks: it follows ledgers by WATCH."""
_PING_ANSWER_S = 3600.0
"""A PING has no deadline of its own: `client_aio.core.liveness` judges the connection."""

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
    Status.ID_TAKEN: LedgerIdTakenError,
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


# The callback for the answer, the times at which the request was sent and its answer is due, the operation,
# and what the callback is given before the outcome; None for nothing.
_Request = tuple[Callable[..., None], float, float, int, object]


def _tell(request: _Request, outcome: Outcome, body: memoryview) -> None:
    if request[4] is None:
        request[0](outcome, body)
    else:
        request[0](request[4], outcome, body)


_ADD = int(Op.ADD)
_WRITE_LAC = int(Op.WRITE_LAC)
_ANSWERED_AS = {int(Op.ADDS): _ADD, int(Op.WRITE_LACS): _WRITE_LAC}
"""An answer to many names requests of these operations."""
_DONE = Done()


_TCP_OPTIONS = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
"""An idle connection shows within some 4 s that the other host is gone.

No TCP_USER_TIMEOUT here: Linux would cut a connection whose peer takes no bytes for that time, and a bookie
whose disk hangs takes none. The PING tells these two apart."""


def keep_alive(connected: socket.socket | None) -> None:
    """Let the system check an idle connection, where there is a socket and the system has the options."""
    if connected is None:
        return
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def unacknowledged_bytes(connected: socket.socket | None) -> int:
    """Return how many bytes the system holds that the peer's system has not taken; 0 if it cannot tell."""
    if connected is None or sys.platform != "linux":
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except (OSError, ValueError):
        return 0


class BookieConnection(asyncio.BufferedProtocol):
    """One live connection; made by `connect`."""

    def __init__(
        self, bookie_id: str, on_lost: Callable[[BookieConnection], None], ping_timeout_s: float
    ) -> None:
        self.bookie_id = bookie_id
        self.nonce = ""
        self.version = 0
        self.error: BookKeeperError | None = None
        self._on_lost = on_lost
        self._parser = FrameParser(HANDSHAKE_FRAME_BYTES_MAX, keeps_buffer=True)
        self._requests: dict[int, _Request] = {}
        self._overdue: set[int] = set()
        self._next_id = 0
        self._held: list[Held] = []  # adds that were not sent yet
        self._held_bytes = 0
        self._many_bytes_max = 0  # of the blocks in an ADDS; 0 where the bookie does not know ADDS
        self._held_lacs: list[
            tuple[WriteLac, bytes | None]
        ] = []  # not sent yet; their ids follow one another
        self._first_lac_id = 0
        self._adds_sent = 0  # that were not answered yet
        self._is_release_due = False
        self._hold_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._write_all: GatheringWrite  # of that transport
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._watch: asyncio.TimerHandle | Reading | None = None
        self._is_greeted = self._has_received = False  # the latter since something was over
        self.was_silent = False  # The connection ended since nothing came over it.
        self._liveness = Liveness(ping_timeout_s, self._time())
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Return whether requests can be sent."""
        return self.error is None

    @property
    def is_silent(self) -> bool:
        """Return whether the bookie owes the answer to a PING for so long that others are asked before it."""
        return self._liveness.is_silent(self._time())

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
        since the request was sent. Else it is closed, and every outstanding request gets the error. Time in
        which our own event loop did not run counts for no timeout. A bookie that does not answer a PING
        within `ping_timeout_s` ends the connection with BookieUnavailableError.
        """
        if self.error is not None:
            self._loop.call_soon(on_answer, self.error, NO_BODY)
            return
        assert self._transport is not None
        request_id = self._next_id
        self._next_id = (request_id + 1) % ALIVE_ID
        now = self._time()
        self._requests[request_id] = (on_answer, now, now + timeout_s, request.op, None)
        self._release()  # Requests stay in order.
        self._adds_sent += request.op == _ADD
        head = encode_frame(encode_request(request, request_id, auth), body_bytes)
        if body_bytes > _JOINED_BYTES_MAX:
            self._write_all([head, *body])
        else:  # one small buffer costs less than two
            self._transport.write(b"".join((head, *body)))
        if self._watch is None:
            self._begin_watch(now)

    def send_prepared(
        self,
        request: PreparedRequest,
        on_answer: Callable[[Sent, Outcome, memoryview], None],
        sent: Sent,
        body: bytes,
        body_bytes: int,
        timeout_s: float,
    ) -> None:
        """Do as `request` for an add, whose `auth` is prepared too. The add may be held back briefly.

        `on_answer` is also given `sent`, which is not None: one callback then serves all adds of a ledger.

        While adds of this connection are unanswered, the bookie's group commit is in progress, and further
        small adds would only wait there. They wait here instead, until an answer comes, they exceed a limit,
        or `_HELD_S_MAX` is over. Small blocks then leave in one frame, as an ADDS: both sides handle many at
        once. All adds of a connection leave in their order, whether alone or in company.
        """
        if self.error is not None:
            self._loop.call_soon(on_answer, sent, self.error, NO_BODY)
            return
        # Runs for every batch and bookie, so it calls none of our functions without need.
        request_id = self._next_id
        self._next_id = (request_id + 1) % ALIVE_ID
        now = self._time()
        self._requests[request_id] = (on_answer, now, now + timeout_s, _ADD, sent)
        if self._watch is None:
            self._begin_watch(now)
        self._held.append((request, request_id, body))
        self._held_bytes += body_bytes
        if self._held_bytes >= _HELD_BYTES_MAX and self._is_enough():
            self._release()
        elif not self._adds_sent:
            if not self._is_release_due:
                self._is_release_due = True
                self._loop.call_soon(self._release)
        elif self._hold_timer is None:
            self._hold_timer = self._loop.call_later(_HELD_S_MAX, self._held_for_long)

    def _held_for_long(self) -> None:
        # Not cancelled when an answer comes: a timer for each burst would cost more than a frame sent early.
        self._hold_timer = None
        if self._held:
            self._release()

    def tell_lac(self, message: WriteLac, on_answer: OnAnswer, timeout_s: float, auth: bytes | None) -> None:
        """Do as `request` for a WRITE_LAC. Those of an event-loop iteration leave in one frame."""
        if not self._many_bytes_max or self.error is not None:
            self.request(message, on_answer, timeout_s=timeout_s, auth=auth)
            return
        request_id = self._next_id
        held = self._held_lacs
        if held and (request_id != self._first_lac_id + len(held) or len(held) >= MANY_MAX):
            self._release()
        if not self._held_lacs:
            self._first_lac_id = request_id
        self._next_id = (request_id + 1) % ALIVE_ID
        now = self._time()
        self._requests[request_id] = (on_answer, now, now + timeout_s, _WRITE_LAC, None)
        if self._watch is None:
            self._begin_watch(now)
        self._held_lacs.append((message, auth))
        if not self._is_release_due:
            self._is_release_due = True
            self._loop.call_soon(self._release)

    def _release_lacs(self) -> None:
        held, self._held_lacs = self._held_lacs, []
        if self.error is not None:
            return
        assert self._transport is not None
        if len(held) > 1:
            self._transport.write(encode_write_lacs(self._first_lac_id, held))
        else:
            message, auth = held[0]
            self._transport.write(encode_frame(encode_request(message, self._first_lac_id, auth)))

    def _is_enough(self) -> bool:
        """Return whether the held adds leave now. Many small blocks of many ledgers fill a frame first."""
        if not self._many_bytes_max:
            return True
        count, size = len(self._held), self._held_bytes
        return size >= _SMALL_BLOCK_BYTES * count or count >= MANY_MAX or size >= _HELD_SMALL_BYTES_MAX

    def _release(self) -> None:
        """Send the adds that were held back, then the LACs."""
        self._is_release_due = False
        held, self._held = self._held, []
        if held and self.error is None:
            assert self._transport is not None
            self._adds_sent += len(held)
            size, self._held_bytes = self._held_bytes, 0
            if len(held) == 1:
                request, request_id, body = held[0]
                buffers: list[Buffer] = [request.frame_head(request_id, size), body]
            else:
                buffers = frames_of_adds(held, self._many_bytes_max)
            if size > _JOINED_BYTES_MAX * len(buffers):  # one small buffer costs less than two
                self._write_all(buffers)
            else:
                self._transport.write(b"".join(buffers))
        if self._held_lacs:
            self._release_lacs()

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

    async def finish_adds(self, quiet_s: float) -> None:
        """Send the adds that were held back, and wait for the answers to all adds.

        Ends as well when none is answered for `quiet_s`, and when the connection ends. A bookie that owes the
        answer to a PING is not waited for. Cancelling leaves the adds outstanding.
        """
        self._release()
        if self.is_silent:
            return
        adds = {key: request for key, request in self._requests.items() if request[3] == _ADD}
        answered = asyncio.Event()

        def tell(key: int, outcome: Outcome, body: memoryview) -> None:
            request = adds.pop(key)
            answered.set()
            _tell(request, outcome, body)

        for key, (_, sent_at, due_at, op, _) in list(adds.items()):
            self._requests[key] = partial(tell, key), sent_at, due_at, op, None
        with contextlib.suppress(TimeoutError):
            while adds:
                answered.clear()
                async with awake_timeout(quiet_s):
                    await answered.wait()

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
        self._write_all = gathering_write(transport)
        # A cast: uvloop's transports are not subclasses of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_HIGH_BYTES)
        self._socket = transport.get_extra_info("socket")
        keep_alive(self._socket)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.buffer_updated(nbytes)
        self._has_received = True
        self._liveness.alive_at = self._time()
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
                if op in _ANSWERED_AS and isinstance(outcome, Done):
                    for done_id in parse_done(request_id, frame[1]):
                        self._settle(_ANSWERED_AS[op], done_id, _DONE, NO_BODY)
                    continue
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
            _tell(waiting, outcome, body)
        elif request_id in self._overdue:
            self._overdue.remove(request_id)
        elif self.error is None and (request_id, op) != (ALIVE_ID, Op.PING):
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
        hello = Hello(_VERSION_MIN, VERSION_MAX, "bookie-aio", instance_id, self.bookie_id)
        answer, _ = await self.call(hello, HelloAnswer, timeout_s=timeout_s)
        if not _VERSION_MIN <= answer.version <= VERSION_MAX:
            raise UnsupportedVersionError(
                f"bookie {self.bookie_id} chose version {answer.version} of the protocol; "
                f"this client speaks {_VERSION_MIN} to {VERSION_MAX}",
                bookie_id=self.bookie_id,
            )
        if self.bookie_id and answer.bookie_id != self.bookie_id:
            raise NotABookieError(
                f"expected bookie {self.bookie_id}, found {answer.bookie_id}", bookie_id=self.bookie_id
            )
        self._is_greeted = True
        self.bookie_id = answer.bookie_id
        self.version = answer.version
        self.nonce = answer.nonce
        if self.version >= VERSION_MANY:
            self._many_bytes_max = max(0, min(MANY_BYTES_MAX, answer.frame_bytes_max - _MANY_ROWS_BYTES))
        self._parser.frame_bytes_max = (
            max(FRAME_BYTES_MAX, answer.frame_bytes_max) + HANDSHAKE_FRAME_BYTES_MAX
        )

    # --- deadlines ---

    def _begin_watch(self, now: float) -> None:
        """Look at the deadlines from now on; called with the first outstanding request."""
        self._look_later(now)
        if self._is_greeted and self._liveness.begun(now) is Verdict.PING:
            self._ping(now)

    @property
    def _is_watched(self) -> bool:
        return self._watch is not None  # Read anew: mypy holds it for None after `self._watch = None`.

    def _look_later(self, now: float) -> None:
        """Set the timer of the next look; there are outstanding requests."""
        waiting_since = next(iter(self._requests.values()))[1]
        at = self._liveness.look_at(now, waiting_since)
        self._watch = self._loop.call_at(at, self._check_deadlines)

    def _ping(self, now: float) -> None:
        self._liveness.pinged(now)
        self.request(Ping(), self._pinged, timeout_s=_PING_ANSWER_S)

    def _pinged(self, outcome: Outcome, body: memoryview) -> None:
        self._liveness.answered()

    def _unsent_bytes(self) -> int:
        """Return our bytes that the peer's system has not taken."""
        assert self._transport is not None
        return self._transport.get_write_buffer_size() + unacknowledged_bytes(self._socket)

    def _check_deadlines(self) -> None:
        """Look at the requests and at the peer."""
        self._watch = None
        if not self._requests or self.error is not None:
            return
        now = self._time()
        excused_s = self._liveness.excused_s(now)
        if excused_s:
            # Our own loop did not run, so nobody has read the answers that may have come. The requests get
            # that time again.
            for key, (on_answer, sent_at, due_at, op, sent) in self._requests.items():
                at = shifted(sent_at, excused_s, now)
                self._requests[key] = on_answer, at, due_at + at - sent_at, op, sent
            self._look_later(now)
            return
        self._release()
        self._judge(now + (LOOK_INTERVAL_S if self._liveness.was_late else 0.0), is_read=False)

    def _judge(self, until: float, *, is_read: bool) -> None:
        """Judge the requests and the peer. What is over is judged again, once the answers that came are read.

        Args:
            until: read on until then, as long as anything comes: the buffers may hold more than a few reads
                take.
        """
        self._watch = None
        if not self._requests or self.error is not None:
            return
        now, has_received, self._has_received = self._time(), self._has_received, False
        waiting_since = next(iter(self._requests.values()))[1]
        # Long polls and adds have other timeouts: the oldest request need not be the first that is due.
        overdue = [(key, request) for key, request in self._requests.items() if request[2] < now]
        verdict = self._liveness.judge(now, waiting_since, self._unsent_bytes()) if not overdue else None
        is_over = verdict is None or (verdict is Verdict.GONE and self._is_greeted)
        if is_over and (not is_read or (has_received and now < until)):
            self._watch = Reading(partial(self._judge, until, is_read=True))
            return
        error: BookKeeperError = OperationTimeoutError(
            f"bookie {self.bookie_id} did not answer in time", bookie_id=self.bookie_id
        )
        if any(request[1] > self._liveness.alive_at for _, request in overdue):
            self._end(error)
            return
        if verdict is None:
            verdict = self._liveness.judge(now, waiting_since, self._unsent_bytes())
        if verdict is Verdict.GONE and self._is_greeted:
            self.was_silent = True
            self._end(
                BookieUnavailableError(
                    f"bookie {self.bookie_id} has not answered a PING, and nothing else came from it",
                    bookie_id=self.bookie_id,
                )
            )
            return
        for key, request in overdue:
            if self._requests.pop(key, None) is None:
                continue  # A callback has ended the connection.
            self._overdue.add(key)
            self._adds_sent -= request[3] == _ADD
            _tell(request, error, NO_BODY)
        if self.is_open and self._requests:
            if verdict is Verdict.PING and self._is_greeted:
                self._ping(now)
            if not self._is_watched:
                self._look_later(now)

    def _end(self, error: BookKeeperError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        if self._transport is not None:
            # Not close(): it would wait for a peer that may never read the buffered bytes.
            self._transport.abort()
        requests, self._requests = self._requests, {}
        self._on_lost(self)
        for request in requests.values():
            _tell(request, error, NO_BODY)


async def connect(
    address: str,
    *,
    bookie_id: str,
    instance_id: str,
    timeout_s: float,
    ping_timeout_s: float = PING_TIMEOUT_S,
    on_lost: Callable[[BookieConnection], None] = lambda _: None,
) -> BookieConnection:
    """Open a connection and shake hands.

    Args:
        bookie_id: the bookie expected there; "" for any bookie.
        timeout_s: of the whole, without the time in which our own event loop did not run.

    Raises:
        BookieUnavailableError: nothing listens, or the time is over.
        NotABookieError: the peer does not speak the protocol, or is another bookie.
        UnsupportedVersionError: the peer speaks no version that this client speaks.
    """
    host, port = split_address(address)
    connection: BookieConnection | None = None
    try:
        async with awake_timeout(timeout_s):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: BookieConnection(bookie_id, on_lost, ping_timeout_s), host, port
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


async def list_ledgers(connection: BookieConnection, below: int, timeout_s: float) -> set[int]:
    """Return the ids below a limit of the ledgers that a bookie holds anything of.

    Raises:
        BookKeeperError: the bookie's failure. ProtocolError: its list does not advance.
    """
    held: set[int] = set()
    following = 0
    while 0 <= following < below:
        answer, body = await connection.call(ListLedgers(following), ListLedgersAnswer, timeout_s=timeout_s)
        held.update(ledger_id for (ledger_id,) in struct.iter_unpack("<Q", body) if ledger_id < below)
        if 0 <= answer.next_ledger <= following:
            raise ProtocolError(
                f"a list of ledgers from {following} on is said to go on at {answer.next_ledger}",
                bookie_id=connection.bookie_id,
            )
        following = answer.next_ledger
    return held
