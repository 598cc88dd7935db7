"""Answers: how a request is acknowledged or refused, and what an answer waits for.

Owns the waiting behind the disk (rule 3), counted against the connection's limit, and the words of refusals.
Does not own what is answered (`requests`).

What requests need of a connection, and nothing more of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from bookie_aio.metrics import RequestMetrics
from bookie_aio.storage.journal import when_durable
from bookie_aio.structured_logging import fields
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import Done, Failure, Op, Status, encode_answer, encode_failure
from metadata.errors import DiskFullError, NoSuchLedgerError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bookie_aio.storage.engine import Engine
    from bookie_aio.wire.blocks import Buffer


WAITING_BYTES = 1024
"""About what a request without a block takes up in memory while it waits for the disk."""


class Peer(Protocol):
    """The other side of a connection."""

    peer: str
    client: str

    @property
    def is_open(self) -> bool:
        """Return whether answers can still reach the peer."""

    def send(self, *buffers: Buffer) -> None:
        """Queue a frame; all of a turn of the loop leave together."""

    def hold(self, count: int) -> None:
        """Count what waits for the disk, an add or another request, against the limits until `release`."""

    def release(self, count: int) -> None:
        """Take back what `hold` counted."""

    def run_read(self, read: Callable[[], Coroutine[object, object, int]], bytes_max: int) -> None:
        """Run what answers a request in a task, perhaps later; it gives the bytes that it has sent.

        Until then `bytes_max` is counted for it.
        """

    def fail(self, reason: str) -> None:
        """Close the connection because of what the peer did, once the answers queued so far have left."""


log = logging.getLogger(__name__)


class Responder:
    """What the handlers of requests answer with."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.counters = RequestMetrics()

    # --- waiting -------------------------------------------------------------------------------

    def _wait(self, peer: Peer, done: Callable[[StorageError | None], None]) -> None:
        """Call back as a barrier does; what waits meanwhile counts against the connection's limit."""
        peer.hold(WAITING_BYTES)

        def told(error: StorageError | None) -> None:
            peer.release(WAITING_BYTES)
            done(error)

        self._engine.barrier(told)

    async def _barrier(self) -> None:
        """Wait until everything accepted before this call is durable and indexed (rule 3)."""
        await when_durable(self._engine.barrier)

    def _run(
        self,
        peer: Peer,
        op: Op,
        request_id: int,
        answering: Callable[[], Coroutine[object, object, int]],
        bytes_max: int,
    ) -> None:
        """Run what answers a request in a task, turning a disk's error into an answer."""

        async def run() -> int:
            try:
                return await answering()
            except NoSuchLedgerError as error:
                self._refuse_deleted(peer, op, request_id, str(error))
            except StorageError as error:
                self._answer_storage_error(peer, op, request_id, error)
            return 0

        peer.run_read(run, bytes_max)

    # --- acknowledging and refusing ------------------------------------------------------------

    def _acknowledge(self, peer: Peer, op: Op, request_id: int, error: StorageError | None) -> None:
        if error is None:
            peer.send(encode_frame(encode_answer(op, request_id, Done())))
        else:
            self._answer_storage_error(peer, op, request_id, error)

    def _answer_storage_error(self, peer: Peer, op: Op, request_id: int, error: StorageError) -> None:
        if isinstance(error, DiskFullError):
            self._refuse(peer, op, request_id, Status.READ_ONLY, str(error))
        else:
            self._fail_internally(peer, op, request_id, error)

    def _fail_internally(self, peer: Peer, op: Op, request_id: int, error: StorageError) -> None:
        log.error("request failed", extra=fields(peer=peer.peer, op=op.name, request=request_id, error=error))
        self._refuse(peer, op, request_id, Status.INTERNAL_ERROR, str(error))

    def _refuse(
        self, peer: Peer, op: Op, request_id: int, status: Status, reason: str, value: int = 0
    ) -> None:
        self.counters.failures[status.name] = self.counters.failures.get(status.name, 0) + 1
        peer.send(encode_frame(encode_failure(op, request_id, Failure(status, reason, value))))

    def _refuse_term(self, peer: Peer, op: Op, request_id: int, held: int) -> None:
        # Rule 3: the term held may still be on its way to the disk; its durability is what the answer says.
        self.counters.refused_terms += 1

        def answer(error: StorageError | None) -> None:
            if error is None:
                reason = f"this bookie holds term {held} for the ledger"
                self._refuse(peer, op, request_id, Status.INVALID_TERM, reason, held)
            else:
                self._answer_storage_error(peer, op, request_id, error)

        self._wait(peer, answer)

    def _refuse_deleted(self, peer: Peer, op: Op, request_id: int, reason: str) -> None:
        # Rule 3: the tombstone may still be on its way to the disk.
        def answer(error: StorageError | None) -> None:
            if error is None:
                self._refuse(peer, op, request_id, Status.NO_SUCH_LEDGER, reason)
            else:
                self._answer_storage_error(peer, op, request_id, error)

        self._wait(peer, answer)
