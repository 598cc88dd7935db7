"""Responder: how a handler acknowledges or refuses a request, and how it waits for the disk.

Owns the waits behind a barrier (rule 3), which count against the limits of the connection, and the form of
refusals. Owns `Peer`, the part of a connection that handlers use. Does not decide on any request
(`handlers`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import Done, Failure, Op, Status, encode_answer, encode_failure
from metadata.errors import DiskFullError, NoSuchLedgerError, StorageError, TooManyRequestsError

if TYPE_CHECKING:
    import asyncio
    from collections import deque
    from collections.abc import Callable, Coroutine

    from bookie_aio.metrics import RequestMetrics
    from bookie_aio.storage.engine import Engine
    from bookie_aio.structured_logging import RepeatedWarnings
    from bookie_aio.wire.blocks import Buffer

_REFUSED_FRAMES = 64
"""Requests of a peer that wait for those of others after one that was refused."""
WAITING_BYTES = 1024
"""About the memory that a request without a block takes up while it waits for the disk."""


class Peer(Protocol):
    """The other side of a connection, as handlers see it. Implemented by `connection.Connection`."""

    peer: str
    client: str
    version: int
    slow_frames: int
    """The number of next requests that wait for those of other peers, even if they are adds."""
    is_writer: bool
    """Whether an add of the peer has become durable."""
    received_at: float
    """The loop's time when bytes arrived last. No request that has arrived is younger."""
    arrived_at: float
    """The same by the bookie's clock, for the metrics."""
    again: deque[Callable[[], None]]
    """Called in turn before the next frame: to go on with a request that waits, then with those behind it."""

    def __hash__(self) -> int: ...

    @property
    def is_open(self) -> bool:
        """Return whether answers can still reach the peer."""

    def send(self, *buffers: Buffer) -> None:
        """Queue a frame. All frames of an event-loop iteration leave as one write."""

    def hold(self, count: int) -> None:
        """Count the bytes of a request that waits for the disk against the limits, until `release`."""

    def release(self, count: int) -> None:
        """Take back the bytes that `hold` counted."""

    def added(self) -> None:
        """Note that an add is durable: the peer is a writer."""

    def run_read(
        self, read: Callable[[], Coroutine[object, object, int]], bytes_max: int, request_bytes: int
    ) -> None:
        """Run the coroutine that answers a request in a task, perhaps later.

        The coroutine returns the number of bytes that it sent. Until then `bytes_max` is counted for it.
        `request_bytes`: the bytes of the request's body that are kept until it runs.
        """

    def go_on_after(self, future: asyncio.Future[Any], go_on: Callable[[], None]) -> None:
        """Go on with the present request once the future is done, and handle no other before that."""

    def fail(self, reason: str) -> None:
        """Close the connection because of the peer's fault, once the answers queued so far have left."""


class Responder:
    """Answers requests; held by the dispatcher and by every handler."""

    def __init__(self, engine: Engine, metrics: RequestMetrics, warnings: RepeatedWarnings) -> None:
        self._engine = engine
        self._metrics = metrics
        self._warnings = warnings

    # --- waiting -------------------------------------------------------------------------------

    def after_barrier(self, peer: Peer, done: Callable[[StorageError | None], None]) -> None:
        """Call `done` once everything accepted before this call is durable, or with the error of the disk.

        The wait counts against the limits of the connection.
        """
        peer.hold(WAITING_BYTES)

        def told(error: StorageError | None) -> None:
            peer.release(WAITING_BYTES)
            done(error)

        self._engine.barrier(told)

    async def barrier(self) -> None:
        """Wait until everything accepted before this call is durable and indexed (rule 3).

        Raises:
            StorageError: the disk failed.
        """
        await when_durable(self._engine.barrier)

    def run(
        self,
        peer: Peer,
        op: Op,
        request_id: int,
        answering: Callable[[], Coroutine[object, object, int]],
        bytes_max: int,
        *,
        request_bytes: int = 0,
    ) -> None:
        """Run the coroutine that answers a request in a task (`Peer.run_read`).

        An error of the storage becomes an answer, and so does TooManyRequestsError. Cancelled, with its
        connection, it answers nothing.
        """

        async def run() -> int:
            try:
                return await answering()
            except NoSuchLedgerError as error:
                self.refuse_deleted(peer, op, request_id, str(error))
            except TooManyRequestsError as error:
                self.refuse(peer, op, request_id, Status.TOO_MANY_REQUESTS, str(error))
            except StorageError as error:
                self.answer_storage_error(peer, op, request_id, error)
            return 0

        peer.run_read(run, bytes_max, request_bytes)

    # --- acknowledging and refusing ------------------------------------------------------------

    def acknowledge(self, peer: Peer, op: Op, request_id: int, error: StorageError | None) -> None:
        """Answer OK without fields, or with the error where there is one."""
        if error is None:
            peer.send(encode_frame(encode_answer(op, request_id, Done())))
        else:
            self.answer_storage_error(peer, op, request_id, error)

    def refuse(
        self, peer: Peer, op: Op, request_id: int, status: Status, reason: str, value: int = 0
    ) -> None:
        """Answer with a status other than OK, at once."""
        self._metrics.failures[status.name] = self._metrics.failures.get(status.name, 0) + 1
        peer.slow_frames = _REFUSED_FRAMES
        peer.send(encode_frame(encode_failure(op, request_id, Failure(status, reason, value))))

    def refuse_deleted(self, peer: Peer, op: Op, request_id: int, reason: str) -> None:
        """Answer NO_SUCH_LEDGER once the ledger's tombstone, and all accepted before, is durable (rule 3)."""

        def answer(error: StorageError | None) -> None:
            if error is None:
                self.refuse(peer, op, request_id, Status.NO_SUCH_LEDGER, reason)
            else:
                self.answer_storage_error(peer, op, request_id, error)

        self.after_barrier(peer, answer)

    def answer_storage_error(self, peer: Peer, op: Op, request_id: int, error: StorageError) -> None:
        """Answer READ_ONLY where the disk is full, else INTERNAL_ERROR, which is logged once a minute.

        A lack of descriptors or memory is INTERNAL_ERROR: it is no lack of space.
        """
        if isinstance(error, DiskFullError) and error.is_of_space:
            self.refuse(peer, op, request_id, Status.READ_ONLY, str(error))
            return
        self._warnings.log(
            logging.ERROR, "request failed", peer=peer.peer, op=op.name, request=request_id, reason=str(error)
        )
        self.refuse(peer, op, request_id, Status.INTERNAL_ERROR, str(error))
