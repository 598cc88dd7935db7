"""Reads: READ, which fences where it carries a term.

Rule 3 decides when a read's answer may leave:

- A fencing read is answered when its fence, and every add accepted before it, are durable and indexed.
  Recovery concludes from "no such entry" that this bookie never acknowledges the entry. So it is not said of
  an entry that was trimmed.
- Any other read is answered at once, unless it misses an entry of a ledger that has adds under way. The
  entry may be among these adds, so the read waits for them and reads again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import NO_TERM, Op, Read, ReadAnswer, Status, Stop, encode_answer

if TYPE_CHECKING:
    from bookie_aio.config import Limits
    from bookie_aio.metrics import RequestMetrics
    from bookie_aio.server.handlers.fence import Fence
    from bookie_aio.server.responder import Peer, Responder
    from bookie_aio.storage.engine import Engine


class ReadHandler:
    """Carries out READ."""

    def __init__(
        self, engine: Engine, limits: Limits, responder: Responder, fence: Fence, metrics: RequestMetrics
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._responder = responder
        self._fence = fence
        self._metrics = metrics

    def read(self, peer: Peer, request_id: int, request: Read, body: memoryview) -> None:
        """Fence if the request asks for it, and answer with the blocks in a task.

        Raises:
            DiskFullError: there is no room for the term.
        """
        if request.last < request.first:
            reason = f"a read from {request.first} to {request.last}"
            self._responder.refuse(peer, Op.READ, request_id, Status.BAD_REQUEST, reason)
            return
        fences = request.term != NO_TERM
        if fences and not self._fence.admit(peer, Op.READ, request_id, request.ledger_id, request.term):
            return
        # Asked before the read: an add that is indexed while the read runs is not pending any more after it,
        # and the read may have missed it.
        was_pending = self._engine.is_pending(request.ledger_id)
        answering = partial(
            self._answer_read, peer, request_id, request, was_pending, fences, peer.arrived_at
        )
        bytes_max = min(request.bytes_max, self._limits.read_bytes_max)
        self._responder.run(peer, Op.READ, request_id, answering, bytes_max)

    async def _answer_read(
        self,
        peer: Peer,
        request_id: int,
        request: Read,
        was_pending: bool,
        fences: bool,
        arrived_at: float,
    ) -> int:
        engine, ledger_id = self._engine, request.ledger_id
        entry_ids = range(request.first, request.last + 1, request.stride)
        bytes_max = min(request.bytes_max, self._limits.read_bytes_max)
        if fences:
            # Rule 3: read when the fence and every add accepted before it are durable.
            await self._responder.barrier()
            if engine.term(ledger_id) < request.term:  # a term that found no room was taken back
                reason = f"there was no room for term {request.term} of ledger {ledger_id}"
                self._responder.refuse(peer, Op.READ, request_id, Status.READ_ONLY, reason)
                return 0
        found = await engine.read(ledger_id, request.content_term, entry_ids, bytes_max)
        if found.stop is Stop.NO_SUCH_ENTRY and was_pending and not fences:
            # Rule 3: the entry may have been accepted before this read, and not indexed yet.
            await self._responder.barrier()
            found = await engine.read(ledger_id, request.content_term, entry_ids, bytes_max)
        stop = found.stop
        if stop is Stop.NO_SUCH_ENTRY:
            # Trimmed: only older metadata have a recovery ask for it.
            is_trimmed = fences and found.stop_entry < engine.first_entry(ledger_id)
            # The marks that a set-back of the metadata asks for may not count yet.
            if is_trimmed or ledger_id < engine.marking.in_question_below:
                stop = Stop.UNKNOWN
        answer = ReadAnswer(int(stop), found.stop_entry, engine.statement(ledger_id))
        size = sum(map(len, found.buffers))
        self._metrics.bytes_read += size
        self._metrics.read.add(self._metrics.clock() - arrived_at)
        peer.send(encode_frame(encode_answer(Op.READ, request_id, answer), size), *found.buffers)
        return size
