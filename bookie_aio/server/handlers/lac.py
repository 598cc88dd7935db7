"""LAC: READ_LAC with its long polls, and WRITE_LAC of an idle writer (rule 12b).

A READ_LAC is answered at once, or waits as a long poll until the LAC is above the one that the client knows.
A READ_LAC with a term fences, and its answer waits for the fence to be durable (rule 3).

Owns the long polls of all connections, and whether the bookie drains them. A poll that began after the drain
would have nobody to answer it until its timer.

`LongPolls` adds connections and timers to the register of `bookie_aio.core.long_polls`.

Invariant: each poll ends exactly once. Its LAC, its timer or the shutdown of the bookie ends it with an
answer; the loss of its connection ends it without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.core.long_polls import PollRegister
from bookie_aio.server.responder import WAITING_BYTES
from bookie_aio.wire.blocks import statement_is_intact
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import NO_TERM, Op, ReadLac, ReadLacAnswer, Status, WriteLac, encode_answer
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


class LacHandler:
    """Carries out READ_LAC and WRITE_LAC."""

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
        self._polls = LongPolls(loop, limits.connection_polls_max, limits.polls_max, self._answer_lac)

    @property
    def polls_waiting(self) -> int:
        """Return the number of long polls that wait."""
        return len(self._polls)

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
            reason = "the checksum over a LAC statement does not hold"
            self._responder.refuse(peer, Op.WRITE_LAC, request_id, Status.BAD_REQUEST, reason)
            peer.fail(reason)
            return
        if statement.content_term > request.term:
            reason = f"a LAC of content term {statement.content_term} under term {request.term}"
            self._responder.refuse(peer, Op.WRITE_LAC, request_id, Status.BAD_REQUEST, reason)
            return
        # Rule 7: no await from here to the append.
        if not self._fence.admit(peer, Op.WRITE_LAC, request_id, ledger_id, request.term):
            return
        size = WAITING_BYTES + len(statement.mac)

        def done(error: StorageError | None) -> None:
            peer.release(size)
            self._responder.acknowledge(peer, Op.WRITE_LAC, request_id, error)

        self._engine.append_statement(ledger_id, statement, done)
        peer.hold(size)

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
            engine.statement(ledger_id), engine.last_entry(ledger_id), engine.is_damaged(ledger_id)
        )
        peer.send(encode_frame(encode_answer(Op.READ_LAC, request_id, answer)))

    # --- long polls ----------------------------------------------------------------------------

    def ledgers_moved(self, ledger_ids: Collection[int]) -> None:
        """Answer the long polls that a new LAC, or the deletion, of one of these ledgers ends."""
        if not len(self._polls):
            return
        for ledger_id in self._polls.ledgers & set(ledger_ids):
            is_deleted = self._engine.is_deleted(ledger_id)
            self._polls.moved(ledger_id, ENTRY_ID_MAX if is_deleted else self._lac(ledger_id))

    def connection_lost(self, peer: Peer) -> None:
        """Drop the long polls of a closed connection."""
        self._polls.forget(peer)

    def drain(self) -> None:
        """Refuse all long polls with SHUTTING_DOWN, and let no request wait from now on."""
        self._is_draining = True
        for peer, request_id in self._polls.drain():
            reason = "this bookie is shutting down"
            self._responder.refuse(peer, Op.READ_LAC, request_id, Status.SHUTTING_DOWN, reason)
