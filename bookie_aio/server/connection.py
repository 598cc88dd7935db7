"""Connection: the bytes of one client in, its frames to the dispatcher, the answers out, within the limits.

Owns the handshake's deadline and all other deadlines, and backpressure both ways. Does not know the meaning
of any request.

Backpressure. While the connection is *blocked*, no frame is handled and no byte is read. Frames that have
arrived stay in the receive buffer, in order. A connection is blocked while one of these holds:

- its bytes on their way to the disk are at its limit;
- the number or the bytes of its reads are at its limit;
- the peer is slow to take its answers;
- a budget that all connections share is used up (`backpressure`);
- the frame that has begun needs a larger receive buffer than there is room for;
- a request waits for the metadata store before it is authorised;
- its next request waits in the slow lane, which gives adds of other connections their time;
- it has handled its frames of this event-loop iteration, and other connections come first.

Invariants
- A bad frame closes this connection, with a reason in the log, and affects no other connection. The log has
  one line for each reason and minute (`RepeatedWarnings`).
- A connection has at most one timer, for the earliest deadline. A deadline that becomes later leaves the
  timer as it is. The timer is set again when it fires.
- The answers of one event-loop iteration leave as one write.
- A connection that ends takes back all bytes and reads that it counted in the shared budgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from bookie_aio.server.backpressure import ReceiveRoom
from bookie_aio.server.responder import WAITING_BYTES
from bookie_aio.wire.frames import HANDSHAKE_FRAME_BYTES_MAX, FrameParser, encode_frame
from bookie_aio.wire.messages import ALIVE_ID, VERSION_ALIVE, VERSION_MIN, Done, Op, encode_answer
from metadata.errors import NotABookieError, ProtocolError
from metadata.transports import GatheringWrite, gathering_write

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from bookie_aio.config import Limits
    from bookie_aio.metrics import RequestMetrics
    from bookie_aio.server.backpressure import Backpressure
    from bookie_aio.server.dispatcher import Dispatcher
    from bookie_aio.structured_logging import RepeatedWarnings
    from bookie_aio.wire.blocks import Buffer

_ADD = int(Op.ADD)
_FAST_OF_WRITERS = frozenset(
    map(int, (Op.ADDS, Op.WRITE_LAC, Op.WRITE_LACS, Op.FORCE, Op.PING)),
)
"""Other requests of a writer that do not wait in the slow lane. The adds behind them would wait as well."""
_CHEAP = frozenset({int(Op.READ), int(Op.READ_LAC), int(Op.WATCH)})
"""The requests of readers. All others, and those of a peer that was refused, have the price `DEAR`."""
DEAR = 8.0
"""The rest of the slow lane after a request, in times of what the request took; 1 for requests of readers."""
_JOIN_BYTES_MAX = 64 * 1024
"""Frames of up to this size together are joined for one write; larger ones are not copied."""


_NO_FRAME = (memoryview(b""), memoryview(b""))
_ALIVE_INTERVAL_S = 0.5
_ALIVE = encode_frame(encode_answer(Op.PING, ALIVE_ID, Done()))


def _keep_alive(connected: socket.socket, stall_timeout_s: float) -> None:
    """Let the system end a connection whose peer's host went down. It would hold its connection for ever.

    TCP_USER_TIMEOUT is as long as a peer may take no answer: Linux ends a connection by it whose peer lives
    and only reads nothing. A client whose event loop is blocked for some seconds is such a peer.
    """
    options = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": math.ceil(stall_timeout_s * 1000),
    }
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one accepted connection."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        backpressure: Backpressure,
        dispatcher: Dispatcher,
        connections: set[Connection],
        warnings: RepeatedWarnings,
        metrics: RequestMetrics,
    ) -> None:
        self._metrics = metrics
        self._clock = metrics.clock
        self._loop = loop
        self._limits = limits
        self._backpressure = backpressure
        self._dispatcher = dispatcher
        self._connections = connections
        self._warnings = warnings
        self._parser = FrameParser(HANDSHAKE_FRAME_BYTES_MAX, reuses_buffer=True)
        self._transport: asyncio.Transport | None = None
        self._write_all: GatheringWrite  # of that transport
        self._out: list[Buffer] = []
        self._is_flush_due = False
        self._is_closing = False
        self._is_blocked = False
        self._alive_at = 0.0  # when it began not to read, or when the client was last told that it lives
        self._is_processing = False
        self._has_had_turn = False
        self._has_received = False  # since the timer last fired
        self._is_reading = True
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._opened_at = 0.0
        self._frame_since: float | None = None
        self._stalled_since: float | None = None
        self._stalled_bytes = 0
        self._bytes_pending = 0
        self.again: deque[Callable[[], None]] = deque()  # goes on with a request that had to wait
        self._awaited: asyncio.Future[Any] | None = None  # what that request waits for
        self._is_slow = False  # the request being handled, or that waits, is one of the slow lane
        self._price = DEAR  # of that request
        self._awaits_turn = False
        self._room = ReceiveRoom(self._parser, limits, backpressure)
        self.slow_frames = 0
        self._reads: set[asyncio.Task[int]] = set()
        self._deferred: deque[tuple[Callable[[], Coroutine[object, object, int]], int, float, int]] = deque()
        self._reads_bytes = 0
        self._unsent_reads_bytes = 0  # of computed answers that the peer has not taken yet
        self.is_greeted = self.is_writer = False
        self.received_at = self.arrived_at = 0.0
        self.lost: asyncio.Future[None] = loop.create_future()
        self.peer = "?"
        self.client = ""
        self.version = VERSION_MIN

    # --- the transport's calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write_all = gathering_write(transport)
        # uvloop's transports are of no class of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        if len(self._connections) >= self._limits.connections_max:
            self._is_closing = True
            self._warnings.warning("connection refused", peer=self.peer, reason="too many connections")
            transport.abort()
            return
        self._connections.add(self)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            _keep_alive(connected, self._limits.write_stall_timeout_s)
        self._opened_at = self._loop.time()
        self._arm(self._opened_at + self._limits.handshake_timeout_s)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.buffer_updated(nbytes)
        self._has_received = True
        self.received_at = self._loop.time()
        self.arrived_at = self._clock()
        if not self._is_blocked and not self._is_closing:
            self._process()
            self._room.count()
            if self.is_writer and not self._is_blocked:
                self._metrics.receive.add(self._clock() - self.arrived_at)
            if self._timer is None and self._parser.buffer_bytes:
                self._arm(self._loop.time() + self._limits.idle_buffer_s)

    def eof_received(self) -> None:
        if self._parser.is_mid_frame and not self._is_blocked and not self._is_closing:
            self._log_closed("the peer closed the connection within a frame")

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self.lost.set_result(None)
        self._connections.discard(self)
        self._backpressure.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._reads:
            task.cancel()
        while self._deferred:
            self.release(self._deferred.popleft()[-1])
        self._release_sent_reads()
        self._room.close()
        self._out.clear()
        self._dispatcher.connection_lost(self)

    def pause_writing(self) -> None:
        now = self._loop.time()
        self._stalled_since = now
        self._stalled_bytes = self._buffered_bytes()
        self._arm(now + min(self._stall_timeout_s, self._limits.contended_stall_timeout_s))

    def resume_writing(self) -> None:
        self._stalled_since = None
        self._release_sent_reads()
        self.room_again()

    # --- frames in -----------------------------------------------------------------------------

    def _process(self) -> None:
        """Handle the complete frames, until the connection is blocked."""
        if self.is_greeted and self._must_block():  # by a shared budget, for instance
            self._block()
            return
        self._is_processing = True
        frames_left = self._limits.connection_frames_per_turn
        try:
            while (frame := self._next_frame()) is not None:
                self._frame_since = None
                self._room.end_frame()
                requests = 1
                if self.again:
                    self.again.popleft()()
                elif self.is_greeted:
                    requests = self._dispatcher.handle(self, *frame)
                else:
                    self._greet(frame[0])
                if self._is_slow:
                    self._backpressure.slow_lane.end()
                    self.slow_frames = max(0, self.slow_frames - requests)
                if self._is_closing:
                    return
                if self._must_block():
                    self._block()
                    return
                frames_left -= requests
                if frames_left <= 0:  # the remaining frames after those of other connections
                    self._block()
                    self._has_had_turn = True
                    self._loop.call_soon(self._next_turn)
                    return
        except ProtocolError as error:
            self.fail(self._reason(error))
            return
        finally:
            self._is_processing = False
        if self._is_blocked:
            return
        if not self._room.reserve(self):
            self._block()
        elif self._frame_since is None and self._parser.is_mid_frame:
            self._frame_since = self._loop.time()
            soon = min(self._room.frame_timeout_s, self._limits.contended_stall_timeout_s)
            self._arm(self._frame_since + soon)

    def _next_frame(self) -> tuple[memoryview, memoryview] | None:
        """Return the next complete frame; None where there is none, or where it has to wait.

        A frame that has to wait blocks the connection. A request that waited comes before the next frame.
        """
        parser, lane = self._parser, self._backpressure.slow_lane
        if not self.again:
            op = parser.next_op
            if op < 0:
                self._is_slow = False
                return parser.next_packed()
            if not self.is_greeted:
                # At once: while it waited, nobody would see that its peer is gone. The server is paced.
                self._is_slow = True
                lane.begin_at_once(DEAR)
                return parser.next_packed()
            is_fast = self.is_writer and (op == _ADD or op in _FAST_OF_WRITERS)
            self._is_slow = not is_fast or self.slow_frames > 0
            if self._is_slow:
                self._price = 1.0 if op in _CHEAP and not self.slow_frames else DEAR
        if self._is_slow and not lane.begin(self, self._price, is_writer=self.is_writer):
            self._awaits_turn = True
            self._block()
            return None
        return _NO_FRAME if self.again else parser.next_packed()

    def _greet(self, packed: memoryview) -> None:
        if self._dispatcher.greet(self, packed):
            self.is_greeted = True
            self._parser.frame_bytes_max = self._limits.frame_bytes_max

    def _reason(self, error: ProtocolError) -> str:
        if self.is_greeted:
            return str(error)
        return str(NotABookieError(f"the peer does not speak this protocol: {error}"))

    def _must_block(self) -> bool:
        limits = self._limits
        if (
            self._stalled_since is not None
            or len(self._reads) >= limits.connection_reads_max
            or self._reads_bytes >= limits.connection_reads_bytes_max
        ):
            return True
        if self._deferred:  # before the bytes that are pending, which may be its own
            self._backpressure.wait_for_reads(self)
            return True
        if self._bytes_pending >= limits.connection_bytes_pending_max or self._awaited is not None:
            return True
        if self._backpressure.adds.is_exhausted:
            self._backpressure.adds.wait(self)
            return True
        return False

    def _block(self) -> None:
        self._is_blocked = True
        self._frame_since = None  # the peer is not late while its bytes are not read
        if self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()
            if self.version >= VERSION_ALIVE:
                self._alive_at = self._loop.time()
                self._arm(self._alive_at + _ALIVE_INTERVAL_S)

    def _next_turn(self) -> None:
        self._has_had_turn = False
        self.room_again()

    def room_again(self) -> None:
        """Handle the frames that wait, if nothing blocks the connection any more."""
        if not self._is_blocked or self._is_closing or self._is_processing or self._has_had_turn:
            return
        reads_max = self._limits.connection_reads_max
        while self._deferred and len(self._reads) < reads_max and self._backpressure.has_room_for_reads:
            read, bytes_max, price, held = self._deferred.popleft()
            self.release(held)
            self._start_read(read, bytes_max, price)
        if self._awaits_turn or self._must_block():
            return
        self._is_blocked = False
        self._process()
        self._room.count()
        if self.is_writer and not self._is_blocked:
            self._metrics.receive.add(self._clock() - self.arrived_at)
        if not self._is_blocked and not self._is_closing and not self._is_reading:
            assert self._transport is not None
            self._is_reading = True
            self._transport.resume_reading()

    def take_turn(self) -> None:
        """Handle frames that wait for their turn in the slow lane, and send the answers that there are."""
        self._awaits_turn = False
        if self._is_flush_due:
            self.room_again()
            return
        self._is_flush_due = True  # the answers of the turn leave with it, so the lane counts their time
        try:
            self.room_again()
        finally:
            self._flush()

    # --- bytes and reads under way -------------------------------------------------------------

    def hold(self, count: int) -> None:
        """Count the bytes of a request that waits for the disk, until `release`."""
        self._bytes_pending += count
        self._backpressure.adds.count(count)

    def release(self, count: int) -> None:
        """Take back the bytes that `hold` counted.

        A blocked connection reads on at the end of this event-loop iteration, with or without an answer.
        """
        self._bytes_pending -= count
        assert self._bytes_pending >= 0
        self._backpressure.adds.count(-count)
        if self._is_blocked:
            self._flush_soon()

    def go_on_after(self, future: asyncio.Future[Any], go_on: Callable[[], None]) -> None:
        """Go on with the present request once the future is done, and handle no other before that."""
        self._awaited = future
        self.again.appendleft(go_on)
        future.add_done_callback(self._awaited_done)

    def _awaited_done(self, future: asyncio.Future[Any]) -> None:
        self._awaited = None
        self.room_again()

    def added(self) -> None:
        """Note that an add of this connection is durable."""
        self.is_writer = self._room.is_writer = True
        self._backpressure.slow_lane.adds += 1

    @property
    def reads(self) -> Collection[asyncio.Task[int]]:
        """Return the reads that are being computed."""
        return self._reads

    def run_read(
        self, read: Callable[[], Coroutine[object, object, int]], bytes_max: int, request_bytes: int
    ) -> None:
        """Run a read in a task of its own. The read returns the size of the answer that it sent.

        While the read runs, `bytes_max` is counted for it. After that the size of the answer is counted,
        until the peer has taken the answer. Where the budget of all connections is used up, or as many reads
        of this connection run as may, the read starts later. This connection is blocked until then, and the
        request is held. The task is cancelled when the connection is lost.
        """
        price = self._price
        is_below = len(self._reads) < self._limits.connection_reads_max
        if is_below and not self._deferred and self._backpressure.may_read_at_once:
            self._start_read(read, bytes_max, price)
            return
        held = request_bytes + WAITING_BYTES
        self.hold(held)
        self._deferred.append((read, bytes_max, price, held))
        if not self._is_processing and not self._is_blocked and self._must_block():
            self._block()  # a request that waited aside: no frame is being handled

    def _start_read(
        self, read: Callable[[], Coroutine[object, object, int]], bytes_max: int, price: float
    ) -> None:
        self._count_reads(bytes_max)
        self._backpressure.running.count(1)
        task: asyncio.Task[int] = self._loop.create_task(self._backpressure.slow_lane.timed(read(), price))
        self._reads.add(task)
        task.add_done_callback(lambda task: self._read_done(task, bytes_max))

    def _read_done(self, task: asyncio.Task[int], bytes_max: int) -> None:
        self._reads.discard(task)
        self._backpressure.running.count(-1)
        size = 0
        if not task.cancelled():
            error = task.exception()
            if error is None:
                size = task.result()
            else:
                values = {"peer": self.peer, "reason": type(error).__name__}
                self._warnings.log(logging.ERROR, "read failed", exc_info=error, **values)
                self.fail("an internal error")
        # An answer holds at least one entry, so it may be larger than `bytes_max`.
        self._count_reads(size - bytes_max)
        self._unsent_reads_bytes += size
        # Not at once: the connections that wait for the room of this read are woken first.
        self._flush_soon()

    def _count_reads(self, change: int) -> None:
        self._reads_bytes += change
        assert self._reads_bytes >= 0
        self._backpressure.reads.count(change)

    def _release_sent_reads(self) -> None:
        count, self._unsent_reads_bytes = self._unsent_reads_bytes, 0
        if count:
            self._count_reads(-count)

    # --- answers out ---------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """Return the size of the receive buffer; 0 for an idle connection."""
        return self._parser.buffer_bytes

    @property
    def is_open(self) -> bool:
        """Return whether answers can still reach the peer."""
        return not self._is_closing

    def send(self, *buffers: Buffer) -> None:
        """Queue a frame for the one write at the end of this event-loop iteration."""
        if self._is_closing:
            return
        self._out += buffers
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        out, self._out = self._out, []
        transport = self._transport
        if out and transport is not None and not transport.is_closing():
            if len(out) == 1:
                transport.write(out[0])
            elif sum(map(len, out)) <= _JOIN_BYTES_MAX:
                transport.write(b"".join(out))
            else:
                self._write_all(out)
        if self._stalled_since is None or self._is_closing:
            self._release_sent_reads()
        if self._is_blocked:
            self.room_again()

    # --- the end -------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Close the connection because of the peer's fault, once the answers queued so far have left."""
        if not self._is_closing:
            self._log_closed(reason)
            self.close()

    def close(self) -> None:
        """Close the connection once the queued answers have left, or after `shutdown_timeout_s`."""
        if self._is_closing or self._transport is None:
            return
        self._is_closing = True  # before the flush, which would handle the frames that wait
        self._flush()
        self._transport.close()
        if self._buffered_bytes():
            self._loop.call_later(self._limits.shutdown_timeout_s, self._transport.abort)

    def abort(self) -> None:
        """Close the connection at once."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def _log_closed(self, reason: str) -> None:
        self._warnings.warning("connection closed", peer=self.peer, client=self.client, reason=reason)

    def _buffered_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # --- deadlines -----------------------------------------------------------------------------

    def _let_buffer_go(self, now: float) -> list[float]:
        """Drop the receive buffer of an idle connection. Return when to check again: one time, or none."""
        if not self._parser.buffer_bytes or self._parser.is_mid_frame:
            return []
        if not self._has_received:
            self._parser.rest()
            self._room.count()
            return []
        self._has_received = False
        return [now + self._limits.idle_buffer_s]

    @property
    def _stall_timeout_s(self) -> float:
        limits = self._limits
        if self._reads_bytes and self._backpressure.reads.waiting:
            return min(limits.contended_stall_timeout_s, limits.write_stall_timeout_s)
        return limits.write_stall_timeout_s

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            if self._timer_at <= at:
                return  # the earlier timer sets the next one
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._timer = None
        if self._is_closing:
            return
        limits, now = self._limits, self._loop.time()
        if self._stalled_since is not None and self._buffered_bytes() < self._stalled_bytes:
            self._stalled_since, self._stalled_bytes = now, self._buffered_bytes()
        deadlines = []
        if not self.is_greeted:
            deadlines.append((self._opened_at + limits.handshake_timeout_s, "no handshake in time"))
        if self._frame_since is not None:
            timeout_s = self._room.frame_timeout_s
            reason = f"a frame was not complete within {timeout_s:g} s"
            deadlines.append((self._frame_since + timeout_s, reason))
        if self._stalled_since is not None:
            timeout_s = self._stall_timeout_s
            reason = f"the peer took no answer for {timeout_s:g} s"
            deadlines.append((self._stalled_since + timeout_s, reason))
        looks = self._let_buffer_go(now)
        if not self._is_reading and self.version >= VERSION_ALIVE:
            if now >= self._alive_at + _ALIVE_INTERVAL_S:
                self._alive_at = now
                if self._stalled_since is None:  # A client that takes no answers learns nothing by another.
                    self.send(_ALIVE)
            looks.append(self._alive_at + _ALIVE_INTERVAL_S)
        if self._stalled_since is not None or self._frame_since is not None:
            # Checked again soon: another connection may begin to wait for room that this slow peer holds.
            looks.append(now + limits.contended_stall_timeout_s)
        at, reason = min(deadlines, default=(math.inf, ""))
        if at > now:
            looks.append(at)
            if min(looks) < math.inf:
                self._arm(min(looks))
            return
        self._log_closed(reason)
        self.abort()
