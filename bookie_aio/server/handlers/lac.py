"""LAC: READ_LAC with its long polls, WATCH for many ledgers, and WRITE_LAC of an idle writer (rule 12b).

A READ_LAC is answered at once, or waits as a long poll until the LAC is above the one that the client knows.
A READ_LAC with a term fences, and its answer waits for the fence to be durable (rule 3).

Owns the long polls of all connections, and whether the bookie drains them. A poll that began after the drain
would have nobody to answer it until its timer.

`LongPolls` and `Watches` add connections and timers to the registers of `bookie_aio.core.long_polls`.

A connection watches many ledgers and has one WATCH outstanding, whose answer has all that have moved. So a
client with thousands of tails that wait costs one request each time that something moves.

Invariant: each poll ends exactly once. Its LAC, its timer or the shutdown of the bookie ends it with an
answer; the loss of its connection ends it without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.core.long_polls import PollRegister, WatchTable
from bookie_aio.server.responder import WAITING_BYTES
from bookie_aio.wire.blocks import MAC_BYTES, statement_is_intact
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.many import encode_done
from bookie_aio.wire.messages import (
    NO_TERM,
    Done,
    Op,
    ReadLac,
    ReadLacAnswer,
    Status,
    Watch,
    WriteLac,
    encode_answer,
)
from bookie_aio.wire.watching import ROWS_MAX, UNWATCH, Asked, Moved, encode_moved, parse_asked
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterator, KeysView

    from bookie_aio.config import Limits
    from bookie_aio.server.handlers.fence import Fence
    from bookie_aio.server.responder import Peer, Responder
    from bookie_aio.storage.engine import Engine
    from metadata.errors import StorageError


class _Poll:
    """A long poll that waits."""

    __slots__ = ("ledger_id", "peer", "request_id", "timer")

    def __init__(self, peer: Peer, request_id: int, ledger_id: int) -> None:
        self.peer = peer
        self.request_id = request_id
        self.ledger_id = ledger_id
        self.timer: asyncio.TimerHandle | None = None


class LongPolls:
    """All long polls that wait, over all connections."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection_polls_max: int,
        polls_max: int,
        answer: Callable[[Peer, int, int], None],
    ) -> None:
        """`answer` is called with peer, request id and ledger id, and answers with the present LAC."""
        self._loop = loop
        self._connection_polls_max = connection_polls_max
        self._polls_max = polls_max
        self._answer = answer
        self._register: PollRegister[_Poll] = PollRegister()
        self._polls_of: dict[Peer, set[_Poll]] = {}

    def __len__(self) -> int:
        return len(self._register)

    @property
    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that have polls."""
        return self._register.ledgers

    def add(self, peer: Peer, request_id: int, ledger_id: int, known_lac: int, wait_s: float) -> bool:
        """Let a request wait. Return False where too many wait, on its connection or on all of them."""
        polls = self._polls_of.get(peer, set())
        if len(polls) >= self._connection_polls_max or len(self) >= self._polls_max:
            return False
        self._polls_of[peer] = polls
        poll = _Poll(peer, request_id, ledger_id)
        poll.timer = self._loop.call_later(wait_s, self._timed_out, poll)
        polls.add(poll)
        self._register.add(ledger_id, known_lac, poll)
        return True

    def moved(self, ledger_id: int, lac: int) -> None:
        """Answer the polls of a ledger whose known LAC is below `lac`."""
        for poll in self._register.wake(ledger_id, lac):
            self._end(poll)
            self._answer(poll.peer, poll.request_id, ledger_id)

    def forget(self, peer: Peer) -> None:
        """Drop the polls of a lost connection, without answers."""
        for poll in self._polls_of.pop(peer, ()):
            assert poll.timer is not None
            poll.timer.cancel()
            self._register.drop(poll.ledger_id, poll)

    def drain(self) -> Iterator[tuple[Peer, int]]:
        """Take out all polls; yields peer and request id of each."""
        for poll in self._register.drain():
            self._end(poll)
            yield poll.peer, poll.request_id

    def _timed_out(self, poll: _Poll) -> None:
        if self._register.drop(poll.ledger_id, poll):
            self._end(poll)
            self._answer(poll.peer, poll.request_id, poll.ledger_id)

    def _end(self, poll: _Poll) -> None:
        assert poll.timer is not None
        poll.timer.cancel()
        polls = self._polls_of[poll.peer]
        polls.discard(poll)
        if not polls:
            del self._polls_of[poll.peer]


class Watches:
    """The WATCH that waits on each connection, and the ledgers that connections watch.

    Args:
        answer: called with peer, request id and ledgers, and answers with their LACs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection_watches_max: int,
        watches_max: int,
        answer: Callable[[Peer, int, list[int]], None],
    ) -> None:
        self._loop = loop
        self._connection_watches_max = connection_watches_max
        self._watches_max = watches_max
        self._answer = answer
        self._waiting: dict[Peer, tuple[int, asyncio.TimerHandle]] = {}
        self.table: WatchTable[Peer] = WatchTable()

    def change(self, peer: Peer, rows: list[Asked], lac: Callable[[int], int]) -> bool:
        """Watch ledgers and take some out. Return False, with nothing done, where there would be too many.

        The WATCH before this one is answered first: what these rows find moved is not for its answer, which
        the client may have given up.
        """
        table = self.table
        more = sum(row.known_lac != UNWATCH and not table.holds(peer, row.ledger_id) for row in rows)
        if table.count(peer) + more > self._connection_watches_max or len(table) + more > self._watches_max:
            return False
        self._end(peer)
        for ledger_id, known_lac in rows:
            if known_lac == UNWATCH:
                table.unwatch(peer, ledger_id)
            else:
                table.watch(peer, ledger_id, known_lac, lac(ledger_id))
        return True

    def wait(self, peer: Peer, request_id: int, wait_s: float) -> None:
        """Let a WATCH wait, or answer it at once. None waits on its connection: `change` has ended it."""
        timer = self._loop.call_later(wait_s, self._end, peer)
        self._waiting[peer] = request_id, timer
        if not wait_s or self.table.has_moved(peer):
            self._end(peer)

    def moved(self, ledger_id: int, lac: int) -> list[Peer]:
        """Note a ledger's LAC. Return the peers to call `tell` for, once the LACs of a group are noted."""
        return self.table.move(ledger_id, lac)

    def tell(self, peer: Peer) -> None:
        """Answer the WATCH of a peer for which something has moved."""
        self._end(peer)

    def forget(self, peer: Peer) -> None:
        """Drop the WATCH and the ledgers of a lost connection."""
        waiting = self._waiting.pop(peer, None)
        if waiting is not None:
            waiting[1].cancel()
        self.table.forget(peer)

    def drain(self) -> Iterator[tuple[Peer, int]]:
        """Take out all that wait; yields peer and request id of each."""
        waiting, self._waiting = self._waiting, {}
        for peer, (request_id, timer) in waiting.items():
            timer.cancel()
            yield peer, request_id

    def _end(self, peer: Peer) -> None:
        waiting = self._waiting.pop(peer, None)
        if waiting is not None:
            waiting[1].cancel()
            self._answer(peer, waiting[0], self.table.take(peer, ROWS_MAX))


class _Written:
    """The WRITE_LACs of one WRITE_LACS: those that are durable, and how many still wait for the disk."""

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.waiting = 0
        self.is_complete = False


class LacHandler:
    """Carries out READ_LAC, WATCH, WRITE_LAC, and the WRITE_LACs of a WRITE_LACS."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        responder: Responder,
        fence: Fence,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._engine = engine
        self._responder = responder
        self._fence = fence
        self._is_draining = False
        self._many: _Written | None = None  # only within one synchronous step
        self._polls = LongPolls(loop, limits.connection_polls_max, limits.polls_max, self._answer_lac)
        self._watches = Watches(loop, limits.connection_watches_max, limits.watches_max, self._answer_watch)

    @property
    def polls_waiting(self) -> int:
        """Return the number of long polls that wait."""
        return len(self._polls)

    @property
    def ledgers_watched(self) -> int:
        """Return the number of ledgers that connections watch."""
        return len(self._watches.table)

    # --- requests ------------------------------------------------------------------------------

    def read_lac(self, peer: Peer, request_id: int, request: ReadLac, body: memoryview) -> None:
        """Answer with the LAC, or let the request wait for a higher one; fences where it carries a term.

        Raises:
            DiskFullError: there is no room for the term.
        """
        if request.term == NO_TERM:
            self._answer_or_wait(peer, request_id, request)
            return
        if not self._fence.admit(peer, Op.READ_LAC, request_id, request.ledger_id, request.term):
            return

        def durable(error: StorageError | None) -> None:
            if error is None:
                self._answer_or_wait(peer, request_id, request)
            else:
                self._responder.answer_storage_error(peer, Op.READ_LAC, request_id, error)

        self._responder.after_barrier(peer, durable)

    def write_lac(self, peer: Peer, request_id: int, request: WriteLac, body: memoryview) -> None:
        """Append a LAC statement, and answer once it is durable.

        Raises:
            DiskFullError: there is no room for the term or the statement.
        """
        statement, ledger_id = request.statement, request.ledger_id
        if statement is None or not statement_is_intact(ledger_id, statement):
            self._refuse_broken(peer, request_id, "the checksum over a LAC statement does not hold")
            return
        if len(statement.mac) not in MAC_BYTES:
            # A longer one would make each answer that states this LAC a frame that no client accepts.
            self._refuse_broken(
                peer, request_id, f"a LAC statement with a code of {len(statement.mac)} bytes"
            )
            return
        if statement.content_term > request.term:
            reason = f"a LAC of content term {statement.content_term} under term {request.term}"
            self._responder.refuse(peer, Op.WRITE_LAC, request_id, Status.BAD_REQUEST, reason)
            return
        # Rule 7: no await from here to the append.
        if not self._fence.admit(peer, Op.WRITE_LAC, request_id, ledger_id, request.term):
            return
        size, many = WAITING_BYTES + len(statement.mac), self._many

        def done(error: StorageError | None) -> None:
            peer.release(size)
            if many is not None and error is None:
                many.request_ids.append(request_id)
            else:
                self._responder.acknowledge(peer, Op.WRITE_LAC, request_id, error)
            if many is not None:
                many.waiting -= 1
                self._tell_written(peer, many)

        self._engine.append_statement(ledger_id, statement, done)
        peer.hold(size)
        if many is not None:
            many.waiting += 1

    def _refuse_broken(self, peer: Peer, request_id: int, reason: str) -> None:
        self._responder.refuse(peer, Op.WRITE_LAC, request_id, Status.BAD_REQUEST, reason)
        peer.fail(reason)

    def gather(self) -> None:
        """Acknowledge the WRITE_LACs from now on together, until `flush`, which ends the present step."""
        self._many = _Written()

    def flush(self, peer: Peer) -> None:
        """End what `gather` began."""
        many, self._many = self._many, None
        assert many is not None
        many.is_complete = True
        self._tell_written(peer, many)

    def _tell_written(self, peer: Peer, many: _Written) -> None:
        # Their records follow one another, so hardly any of them waits for another here.
        if many.is_complete and not many.waiting and many.request_ids:
            peer.send(encode_done(Op.WRITE_LACS, many.request_ids))

    def watch(self, peer: Peer, request_id: int, request: Watch, body: memoryview) -> None:
        """Change the ledgers that the connection watches, and answer when one of them has moved.

        It fences nothing, and needs no token: a READ_LAC without a term states the same.

        Raises:
            MalformedFrameError: the rows in the body cannot be parsed.
        """
        if not self._watches.change(peer, parse_asked(body), self._lac_or_end):
            reason = "too many ledgers are watched, on this connection or on all of them"
            self._responder.refuse(peer, Op.WATCH, request_id, Status.TOO_MANY_REQUESTS, reason)
            return
        self._watches.wait(peer, request_id, request.wait_ms / 1000)

    def _lac_or_end(self, ledger_id: int) -> int:
        """Return the LAC of a ledger, or the highest id of an entry if the ledger has been deleted."""
        return ENTRY_ID_MAX if self._engine.is_deleted(ledger_id) else self._lac(ledger_id)

    def _answer_watch(self, peer: Peer, request_id: int, ledger_ids: list[int]) -> None:
        if not any(map(self._engine.is_deleted, ledger_ids)):
            self._tell_moved(peer, request_id, ledger_ids)
            return

        # Rule 3: "deleted" waits for the tombstone, and for the adds that were accepted before it.
        def durable(error: StorageError | None) -> None:
            if error is not None:
                self._responder.answer_storage_error(peer, Op.WATCH, request_id, error)
            elif peer.is_open:
                self._tell_moved(peer, request_id, ledger_ids)

        self._responder.after_barrier(peer, durable)

    def _tell_moved(self, peer: Peer, request_id: int, ledger_ids: list[int]) -> None:
        engine = self._engine
        rows = [
            Moved(ledger_id, None if engine.is_deleted(ledger_id) else engine.statement(ledger_id))
            for ledger_id in ledger_ids
        ]
        body = encode_moved(rows)
        header = encode_answer(Op.WATCH, request_id, Done())
        peer.send(encode_frame(header, len(body)), *([body] if body else []))

    def _answer_or_wait(self, peer: Peer, request_id: int, request: ReadLac) -> None:
        if not peer.is_open:  # the connection was lost before the fence was durable
            return
        ledger_id, known_lac = request.ledger_id, request.known_lac
        if request.wait_ms == 0 or self._lac(ledger_id) > known_lac or self._is_draining:
            self._answer_lac(peer, request_id, ledger_id)
        elif not self._polls.add(peer, request_id, ledger_id, known_lac, request.wait_ms / 1000):
            reason = "too many long polls wait, on this connection or on all of them"
            self._responder.refuse(peer, Op.READ_LAC, request_id, Status.TOO_MANY_REQUESTS, reason)

    def _lac(self, ledger_id: int) -> int:
        statement = self._engine.statement(ledger_id)
        return NO_ENTRY if statement is None else statement.lac

    def _answer_lac(self, peer: Peer, request_id: int, ledger_id: int) -> None:
        engine = self._engine
        if engine.is_deleted(ledger_id):
            reason = f"ledger {ledger_id} has been deleted"
            self._responder.refuse_deleted(peer, Op.READ_LAC, request_id, reason)
            return
        answer = ReadLacAnswer(
            engine.statement(ledger_id), engine.last_entry(ledger_id), engine.is_in_doubt(ledger_id)
        )
        peer.send(encode_frame(encode_answer(Op.READ_LAC, request_id, answer)))

    # --- long polls ----------------------------------------------------------------------------

    def ledgers_moved(self, ledger_ids: Collection[int]) -> None:
        """Answer the long polls that a new LAC, or the deletion, of one of these ledgers ends."""
        if len(self._polls):
            for ledger_id in self._polls.ledgers & set(ledger_ids):
                self._polls.moved(ledger_id, self._lac_or_end(ledger_id))
        if len(self._watches.table):
            told: dict[Peer, None] = {}
            for ledger_id in self._watches.table.ledgers & set(ledger_ids):
                told |= dict.fromkeys(self._watches.moved(ledger_id, self._lac_or_end(ledger_id)))
            for peer in told:
                self._watches.tell(peer)

    def connection_lost(self, peer: Peer) -> None:
        """Drop the long polls and watches of a closed connection."""
        self._polls.forget(peer)
        self._watches.forget(peer)

    def drain(self) -> None:
        """Refuse all that waits with SHUTTING_DOWN, and let no request wait from now on."""
        self._is_draining = True
        reason = "this bookie is shutting down"
        for peer, request_id in self._polls.drain():
            self._responder.refuse(peer, Op.READ_LAC, request_id, Status.SHUTTING_DOWN, reason)
        for peer, request_id in self._watches.drain():
            self._responder.refuse(peer, Op.WATCH, request_id, Status.SHUTTING_DOWN, reason)
