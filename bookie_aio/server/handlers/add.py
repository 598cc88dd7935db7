"""Adds: ADD in its four kinds, ADDS with many of them, and the FORCE that makes deferred adds durable.

    flags            term                      kind            what the bookie does
    0                any                       ordinary        appends the block; answers when it is durable
    DEFERRED_SYNC    any                       deferred        appends the block; answers at once
    RECOVERY         final, or the content     recovery add    appends the block, also from the reserve
                     term of the block
    RECOVERY         between these two         write-back      stores the block unless it is outdated
    REPAIR           any                       repair          stores the missing entries only (rule 14)

An ordinary, deferred or recovery add is one synchronous step, from the verdict on its term to the append
(rule 7). A write-back and a repair compare the block with the stored entries first, so they run in a task.

The ADDs of an ADDS are judged one after another, by the same code as an ADD that came alone (`_judge`).
Ordinary and deferred blocks that may be stored are *gathered*. `flush` appends them as one record, in the
same synchronous step as their verdicts. One answer acknowledges the ordinary blocks of a record, by name.

Invariant (rules 3 and 7): a gathered block is appended before anything that an ADD behind it leads to. That
may be a higher term, a block of another kind, the task of a repair, or a refusal that waits for the disk. So
blocks of one ledger keep their order, and each is appended under the term that it was judged by.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.core.authorisation import RepairRight
from bookie_aio.core.fencing import Verdict, check_block, judge
from bookie_aio.storage.repair_writes import OutdatedBlockError, store_missing, store_unless_outdated
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.many import encode_done
from bookie_aio.wire.messages import ADDED, VERSION_MAX, Add, AddFlag, Force, Op, Status
from metadata.access.bookies import READ_ONLY
from metadata.errors import (
    LedgerFencedError,
    MetadataError,
    ProtocolError,
    StorageError,
    UnauthorizedAccessError,
)
from metadata.ids import TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

    from bookie_aio.config import Limits
    from bookie_aio.metrics import RequestMetrics
    from bookie_aio.server.handlers.fence import Fence
    from bookie_aio.server.handlers.store_waits import StoreWaits
    from bookie_aio.server.registration import StandingOrder
    from bookie_aio.server.responder import Peer, Responder
    from bookie_aio.storage.engine import Engine
    from bookie_aio.wire.blocks import Buffer
    from bookie_aio.wire.many import ManyAdd

# As plain integers: an operation on an enumeration's flags costs a microsecond.
_RECOVERY = int(AddFlag.RECOVERY)
_REPAIR = int(AddFlag.REPAIR)
_DEFERRED = int(AddFlag.DEFERRED_SYNC)
_KEPT = _RECOVERY | _REPAIR
"""These are never gathered."""
_ADD_FLAGS = (0, _RECOVERY, _REPAIR, _DEFERRED)
_KEPT_TIMES_MAX = 8
"""A record, or a block that waits, may keep alive a receive buffer of so many times its own size."""


def _keeps_too_much(size: int, frame: memoryview) -> bool:
    """Return whether so few bytes of a frame must not keep the buffer alive that the frame lies in.

    A frame may itself be a small part of its buffer (`FrameParser`), so its own size tells too little.
    """
    return size * _KEPT_TIMES_MAX < len(frame.obj)  # type: ignore[arg-type]


class _Gathered:
    """The blocks of one ADDS that are to become one record."""

    __slots__ = (
        "_end", "_frame", "_is_gapless", "_start", "arrived_at", "blocks", "deferred_ids", "entries", "peer",
        "request_ids", "size",
    )  # fmt: skip

    def __init__(self, peer: Peer, frame: memoryview, start: int) -> None:
        self.peer = peer
        self.arrived_at = peer.arrived_at
        self.blocks: list[Block] = []
        self.request_ids: list[int] = []  # of the ordinary blocks
        self.deferred_ids: list[int] = []
        self.entries = self.size = 0
        self._frame = frame
        self._start = self._end = start
        self._is_gapless = True

    def take(self, request_id: int, block: Block, start: int, size: int, *, is_deferred: bool) -> None:
        """Add a block, which begins at `start` in the frame's body."""
        (self.deferred_ids if is_deferred else self.request_ids).append(request_id)
        self.blocks.append(block)
        self.entries += block.count
        self.size += size
        if start != self._end:  # a block before it was refused
            self._is_gapless = False
        self._end = start + size

    def bytes(self) -> Buffer:
        """Return the bytes of the blocks, one after another; a copy where there are gaps.

        The copy keeps the frame from staying in memory, of which only these bytes are counted. The blocks
        themselves become views of it.
        """
        if self._is_gapless and not _keeps_too_much(self.size, self._frame):
            return self._frame[self._start : self._end]
        joined = b"".join([block.view for block in self.blocks])
        at = 0
        for block in self.blocks:
            size = block.total_bytes
            block.view = memoryview(joined)[at : at + size]
            at += size
        return joined


class AddHandler:
    """Carries out ADD, the ADDs of an ADDS, and FORCE."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        responder: Responder,
        fence: Fence,
        metrics: RequestMetrics,
        may_repair: Callable[[Block, Callable[[], AbstractContextManager[None]]], Awaitable[RepairRight]],
        waits: StoreWaits,
        order: StandingOrder,
    ) -> None:
        """Prepare.

        Args:
            may_repair: whether a repair without a token may store a block (`PasswordLedgers`).
            waits: bounds such repairs while they wait for the metadata store.
            order: the operator's order, which may forbid adds.
        """
        self._may_repair = may_repair
        self._waits = waits
        self._order = order
        self._engine = engine
        self._storage_metrics = engine.counts
        self._limits = limits
        self._responder = responder
        self._fence = fence
        self._metrics = metrics
        self._gathered: _Gathered | None = None  # only within one synchronous step

    def add(
        self, peer: Peer, request_id: int, request: Add, body: memoryview, *, has_token: bool = False
    ) -> None:
        """Carry out an ADD of any kind. `has_token`: the request carries the token of its ledger.

        Raises:
            StorageError: the block was not accepted, for lack of space for instance.
        """
        block = self._judge(peer, request_id, request, body, has_token=has_token)
        if block is None:
            return
        # Rule 7: no await between the verdict above and the append.
        size = len(body)
        if request.flags == _DEFERRED:
            done = partial(self._deferred_added, peer, block.count, size, peer.arrived_at)
        else:
            done = partial(self._added, peer, request_id, block.count, size, peer.arrived_at)
        self._engine.append_block(block, done, from_reserve=request.flags == _RECOVERY)
        peer.hold(size)
        if request.flags == _DEFERRED:
            # This answer says only that the add was received. The FORCE behind it is answered when the add
            # is durable.
            peer.send(ADDED.pack(request_id))

    def gather(self, peer: Peer, frame: memoryview, add: ManyAdd, *, has_token: bool) -> None:
        """Carry out one ADD of an ADDS, whose block is appended by `flush` at the latest.

        `frame` is the body of the ADDS. Raises as `add`. `flush` must follow in the same synchronous step.
        """
        request_id, request, body, start = add.request_id, add.request, add.block, add.start
        if request.flags & _KEPT and _keeps_too_much(len(body), frame):
            body = memoryview(bytes(body))  # kept by itself, and counted with its own bytes
        block = self._judge(peer, request_id, request, body, has_token=has_token)
        if block is None:
            return
        if request.flags == _RECOVERY:  # from the reserve, whose room is counted block by block
            self.flush()
            done = partial(self._added, peer, request_id, block.count, len(body), peer.arrived_at)
            self._engine.append_block(block, done, from_reserve=True)
            peer.hold(len(body))
            return
        self._engine.size_of(block)
        gathered = self._gathered
        if gathered is not None and gathered.size + len(body) > self._engine.record_bytes_max:
            self.flush()
            gathered = None
        if gathered is None:
            gathered = self._gathered = _Gathered(peer, frame, start)
        gathered.take(request_id, block, start, len(body), is_deferred=request.flags == _DEFERRED)

    def flush(self) -> None:
        """Append the gathered blocks as one record."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        peer, size = gathered.peer, gathered.size
        peer.hold(size)
        try:
            done = partial(self._gathered_added, gathered)
            self._engine.append_blocks(gathered.blocks, gathered.bytes(), done)
        except StorageError as error:
            self._gathered_added(gathered, error)
            return
        if gathered.deferred_ids:
            # Received, and no more: see `add`.
            self._tell_added(peer, gathered.deferred_ids)

    def _judge(
        self, peer: Peer, request_id: int, request: Add, body: memoryview, *, has_token: bool
    ) -> Block | None:
        """Judge one ADD, alone or among many. Return its block where it is to be appended in this step.

        None: the ADD was refused, or a task carries it out. A higher term has been appended.

        Raises:
            StorageError: there is no room for the term.
        """
        try:
            block = Block.parse(body)
            check_block(request, block, body)
        except ProtocolError as error:
            # The frames are in step, but a peer that sends a wrong block cannot be trusted with the next one.
            self._responder.refuse(peer, Op.ADD, request_id, Status.BAD_REQUEST, str(error))
            peer.fail(str(error))
            return None
        if request.flags not in _ADD_FLAGS:
            reason = f"the add flags {request.flags} are not supported in version {VERSION_MAX}"
            self._responder.refuse(peer, Op.ADD, request_id, Status.BAD_REQUEST, reason)
            return None
        # No entry of a payload below the limit is above the limit, so the lengths are not read then.
        entry_bytes_max = self._limits.entry_bytes_max
        if block.payload_bytes > entry_bytes_max and max(block.lengths) > entry_bytes_max:
            reason = f"an entry of {max(block.lengths):,} bytes is above the limit of {entry_bytes_max:,}"
            self._responder.refuse(peer, Op.ADD, request_id, Status.BAD_REQUEST, reason)
            return None
        if self._order.mode and self._is_forbidden(peer, request_id, request):
            return None
        if request.flags == _REPAIR:
            self.flush()
            self._repair(peer, request_id, request, block, has_token=has_token)
            return None
        if request.flags == _RECOVERY and block.content_term < request.term != TERM_FINAL:
            self.flush()
            self._write_back(peer, request_id, request, block)
            return None
        engine, ledger_id = self._engine, request.ledger_id
        # Rule 7: no await from here to the append.
        held = engine.term(ledger_id)
        verdict = judge(held, request.term)
        if verdict is Verdict.REFUSE:
            self.flush()
            self._fence.refuse_term(peer, Op.ADD, request_id, held)
            return None
        if request.flags != _RECOVERY:
            if engine.is_in_doubt(ledger_id):
                reason = f"this bookie lost data of ledger {ledger_id} and takes no ordinary adds to it"
                self._responder.refuse(peer, Op.ADD, request_id, Status.DATA_LOST, reason)
                return None
            if not engine.is_writable:
                reason = "this bookie is read-only"
                self._responder.refuse(peer, Op.ADD, request_id, Status.READ_ONLY, reason)
                return None
        if verdict is Verdict.RAISE:
            self.flush()
            self._fence.raise_term(peer, ledger_id, request.term)
        return block

    def _is_forbidden(self, peer: Peer, request_id: int, request: Add) -> bool:
        """Refuse an add that the operator's order forbids.

        A bookie that is being drained refuses recoveries, too. They would place entries on it behind the back
        of the drain. A former writer hears of its fence all the same.
        """
        mode = self._order.mode
        if mode == READ_ONLY and request.flags & _RECOVERY:
            return False
        held = self._engine.term(request.ledger_id)
        if request.flags != _REPAIR and judge(held, request.term) is Verdict.REFUSE:
            self.flush()
            self._fence.refuse_term(peer, Op.ADD, request_id, held)
        else:
            reason = f"an operator has ordered this bookie to take no entries: it is {mode}"
            self._responder.refuse(peer, Op.ADD, request_id, Status.READ_ONLY, reason)
        return True

    def _added(
        self,
        peer: Peer,
        request_id: int,
        count: int,
        size: int,
        arrived_at: float,
        error: StorageError | None,
    ) -> None:
        # Rule 3: the answer names the one request whose copy is durable, never "everything up to".
        peer.release(size)
        if error is None:
            self._count(count, size, arrived_at)
            peer.added()
            peer.send(ADDED.pack(request_id))
        else:
            self._responder.answer_storage_error(peer, Op.ADD, request_id, error)

    def _gathered_added(self, gathered: _Gathered, error: StorageError | None) -> None:
        # Rule 3: the answer names the requests of this record, whose copies are durable, and no others.
        peer, request_ids = gathered.peer, gathered.request_ids
        peer.release(gathered.size)
        if error is None:
            self._count(gathered.entries, gathered.size, gathered.arrived_at)
            peer.added()
            self._tell_added(peer, request_ids)
            return
        for request_id in request_ids:
            self._responder.answer_storage_error(peer, Op.ADD, request_id, error)
        if gathered.deferred_ids:
            self._fail_received(peer, error)

    def _tell_added(self, peer: Peer, request_ids: list[int]) -> None:
        if len(request_ids) == 1:
            peer.send(ADDED.pack(request_ids[0]))
        elif request_ids:
            peer.send(encode_done(Op.ADDS, request_ids))

    def _fail_received(self, peer: Peer, error: StorageError) -> None:
        # The add was answered as received. A later FORCE over this connection would promise that it is
        # durable, so the connection is closed.
        peer.fail(f"an add that was answered as received is lost: {error}")

    def _count(self, count: int, size: int, arrived_at: float) -> None:
        metrics = self._metrics
        metrics.entries_added += count
        metrics.bytes_added += size
        # The time of the group stands for that of its adds: a call to the clock for each costs more.
        latency, taken_s = metrics.add, self._storage_metrics.durable_at - arrived_at
        latency.counts[bisect_left(latency.bounds, taken_s)] += count
        latency.total += taken_s * count

    def _deferred_added(
        self, peer: Peer, count: int, size: int, arrived_at: float, error: StorageError | None
    ) -> None:
        peer.release(size)
        if error is None:
            self._count(count, size, arrived_at)
            peer.added()
        else:
            self._fail_received(peer, error)

    def _repair(self, peer: Peer, request_id: int, request: Add, block: Block, *, has_token: bool) -> None:
        """Store the entries of a block that are missing here (rule 14).

        A repair leaves the term alone: a fence does not keep it out, and it does not fence a live writer.
        The exception is the final term, which states that the ledger is CLOSED.
        """
        if not self._engine.has_room:
            reason = "this bookie is read-only"
            self._responder.refuse(peer, Op.ADD, request_id, Status.READ_ONLY, reason)
            return
        engine, ledger_id = self._engine, request.ledger_id
        engine.eviction_candidates.discard(ledger_id)  # at once: see `Engine.eviction_candidates`

        async def store() -> int:
            right = RepairRight.NAMED
            if not has_token:
                right = await self._may_repair(block, partial(self._waits.of, peer, Op.ADD))
            if right is RepairRight.NONE:
                raise UnauthorizedAccessError(
                    f"ledger {ledger_id} has a password, and without it entry {block.last_entry} is not "
                    "repaired before the ledger is closed, or its last fragment begins behind the entry"
                )
            # Without this check anybody could fence a ledger with a password.
            may_fence = has_token or not engine.lock(ledger_id)
            if request.term == TERM_FINAL and may_fence and engine.term(ledger_id) < TERM_FINAL:
                self._fence.raise_term(peer, ledger_id, TERM_FINAL)
            # A content term that the metadata give these entries is not made up. Auto recovery has no
            # password, and the bookie may have missed the takeovers.
            is_trusted = may_fence or right is RepairRight.NAMED
            return await store_missing(engine, block, is_trusted=is_trusted)

        self._store(peer, request_id, block, store)

    def _write_back(self, peer: Peer, request_id: int, request: Add, block: Block) -> None:
        """Store a block that a takeover of an unbounded ledger found, under the content term it had."""
        if self._fence.admit(peer, Op.ADD, request_id, request.ledger_id, request.term):
            storing = partial(store_unless_outdated, self._engine, block, request.term)
            self._store(peer, request_id, block, storing)

    def _store(
        self, peer: Peer, request_id: int, block: Block, storing: Callable[[], Awaitable[int]]
    ) -> None:
        """Run `storing` in a task, and acknowledge the block once it is stored.

        `storing` looks at the stored entries first, and returns the number of entries that it stored.
        """

        async def store() -> int:
            responder = self._responder
            try:
                stored = await storing()
                self._metrics.entries_repaired += stored  # read behind the await: others count meanwhile
                responder.acknowledge(peer, Op.ADD, request_id, None)
            except OutdatedBlockError as error:
                status, held = Status.STALE_METADATA, error.content_term
                responder.refuse(peer, Op.ADD, request_id, status, str(error), held)
            except UnauthorizedAccessError as error:
                responder.refuse(peer, Op.ADD, request_id, Status.UNAUTHORIZED, str(error))
            except MetadataError as error:
                reason = f"the metadata store was asked for ledger {block.ledger_id}: {error}"
                responder.refuse(peer, Op.ADD, request_id, Status.INTERNAL_ERROR, reason)
            except LedgerFencedError:
                self._fence.refuse_term(peer, Op.ADD, request_id, self._engine.term(block.ledger_id))
            return 0

        size = block.total_bytes
        self._responder.run(peer, Op.ADD, request_id, store, size, request_bytes=size)

    def force(self, peer: Peer, request_id: int, request: Force, body: memoryview) -> None:
        """Answer once every add received before over this connection is durable.

        A lower term is refused. A higher one is not stored, since a FORCE writes nothing.
        """
        held = self._engine.term(request.ledger_id)
        if judge(held, request.term) is Verdict.REFUSE:
            self._fence.refuse_term(peer, Op.FORCE, request_id, held)
            return
        acknowledge = partial(self._responder.acknowledge, peer, Op.FORCE, request_id)
        self._responder.after_barrier(peer, acknowledge)
