"""Requests: what each operation does, and when its answer may leave.

Owns the order of things: the term check and the append that follows it are one step (rule 7), an answer
about state waits for everything accepted before it (rule 3), an add is acknowledged when that very copy is
durable. Does not own bytes and limits of a connection (`connection`), the words of answers and the waiting
for the disk (`answers`), nor files (`storage`).

Invariant: between a verdict on a request's term and the append it allows, nothing else runs. So all of that
is synchronous here, in the order in which the frames came; only what follows a barrier is a task.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.core.fencing import Verdict, check_block, judge
from bookie_aio.server.long_polls import LongPolls
from bookie_aio.server.responder import WAITING_BYTES, Responder
from bookie_aio.storage.repair_writes import OutdatedBlockError, store_missing, store_unless_outdated
from bookie_aio.wire.blocks import Block, statement_is_intact
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.listing import ROW
from bookie_aio.wire.messages import (
    ADDED,
    NO_TERM,
    VERSION_MAX,
    VERSION_MIN,
    Add,
    AddFlag,
    Delete,
    Done,
    Force,
    Hello,
    HelloAnswer,
    Info,
    ListEntries,
    ListEntriesAnswer,
    ListLedgers,
    ListLedgersAnswer,
    Message,
    Op,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    RequestDecoder,
    Status,
    Stop,
    WriteLac,
    encode_answer,
)
from metadata.errors import (
    DiskFullError,
    EntryTooLargeError,
    LedgerFencedError,
    MalformedFrameError,
    MetadataError,
    ProtocolError,
    StorageError,
    UnauthorizedAccessError,
)
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Collection

    from bookie_aio.config import Limits
    from bookie_aio.server.ledger_auth import Authoriser
    from bookie_aio.server.responder import Peer
    from bookie_aio.storage.engine import Engine

log = logging.getLogger(__name__)

# As plain integers: an operation on an enumeration's flags costs a microsecond.
_RECOVERY = int(AddFlag.RECOVERY)
_REPAIR = int(AddFlag.REPAIR)
_DEFERRED = int(AddFlag.DEFERRED_SYNC)
_ADD_FLAGS = (0, _RECOVERY, _REPAIR, _DEFERRED)


class Dispatcher(Responder):
    """Carries out the requests of all connections."""

    def __init__(
        self,
        *,
        engine: Engine,
        limits: Limits,
        hello: HelloAnswer,
        loop: asyncio.AbstractEventLoop,
        info: Callable[[], dict[str, object]],
        authoriser: Authoriser,
        drop_if_deleted: Callable[[int], Awaitable[bool]],
    ) -> None:
        super().__init__(engine)
        self._limits = limits
        self._hello = hello
        self._info = info
        self._authoriser = authoriser
        self._drop_if_deleted = drop_if_deleted
        self._deleting: Counter[Peer] = Counter()
        self._polls = LongPolls(loop, limits.connection_polls_max, limits.polls_max, self._answer_lac)
        self._decoder = RequestDecoder()
        self.is_draining = False
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Ping: self._ping,
            Add: self._add,
            Read: self._read,
            ReadLac: self._read_lac,
            WriteLac: self._write_lac,
            Force: self._force,
            ListEntries: self._list_entries,
            ListLedgers: self._list_ledgers,
            Info: self._answer_info,
            Delete: self._delete,
        }

    @property
    def polls_waiting(self) -> int:
        """Return the number of long polls that wait."""
        return len(self._polls)

    # --- entry points --------------------------------------------------------------------------

    def greet(self, peer: Peer, packed: memoryview) -> bool:
        """Answer the handshake; tells whether the connection may go on.

        Raises:
            ProtocolError: the frame is no HELLO.
        """
        request_id, _, hello = self._decoder.decode(packed)
        if not isinstance(hello, Hello):
            raise MalformedFrameError(f"{type(hello).__name__} before the handshake")
        self.counters.requests[Op.HELLO] += 1
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
            peer.send(encode_frame(encode_answer(Op.HELLO, request_id, mine)))
            return True
        self._refuse(peer, Op.HELLO, request_id, status, reason, VERSION_MAX)
        peer.fail(reason)
        return False

    def handle(self, peer: Peer, packed: memoryview, body: memoryview) -> None:
        """Carry out one request of a connection that has been greeted.

        Raises:
            ProtocolError: the header is not that of a request; the connection cannot go on.
        """
        request_id, auth, request = self._decoder.decode(packed)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise MalformedFrameError(f"{type(request).__name__} after the handshake")
        self.counters.requests[request.op] += 1
        if body and request.op != Op.ADD:
            reason = f"a {request.op.name} has no body, and came with one of {len(body):,} bytes"
            self._refuse(peer, request.op, request_id, Status.BAD_REQUEST, reason)
            return
        if self.is_draining:
            self._refuse(peer, request.op, request_id, Status.SHUTTING_DOWN, "this bookie is shutting down")
            return
        try:
            ledger_id = getattr(request, "ledger_id", None)
            if ledger_id is not None and self._engine.is_deleted(ledger_id) and request.op != Op.DELETE:
                self._refuse_deleted(peer, request.op, request_id, f"ledger {ledger_id} has been deleted")
                return
            refusal = self._authoriser.authorise(peer, request, auth)
            if refusal is not None:
                self._refuse(peer, request.op, request_id, Status.UNAUTHORIZED, refusal)
                return
            if auth is not None and type(request) is Add:
                self._add(peer, request_id, request, body, has_token=True)
            else:
                handler(peer, request_id, request, body)
        except DiskFullError as error:
            self._refuse(peer, request.op, request_id, Status.READ_ONLY, str(error))
        except EntryTooLargeError as error:  # a block that no segment has room for
            self._refuse(peer, request.op, request_id, Status.BAD_REQUEST, str(error))
        except StorageError as error:
            self._fail_internally(peer, request.op, request_id, error)

    def connection_lost(self, peer: Peer) -> None:
        """Forget what a closed connection waited for."""
        self._polls.forget(peer)

    def ledgers_moved(self, ledger_ids: Collection[int]) -> None:
        """Wake those who wait for the LAC of these ledgers; the engine calls it after each group."""
        if not len(self._polls):
            return
        for ledger_id in self._polls.ledgers & set(ledger_ids):
            is_deleted = self._engine.is_deleted(ledger_id)
            self._polls.moved(ledger_id, ENTRY_ID_MAX if is_deleted else self._lac(ledger_id))

    def drain(self) -> None:
        """Accept nothing more, and answer everybody who merely waits."""
        self.is_draining = True
        for peer, request_id in self._polls.drain():
            reason = "this bookie is shutting down"
            self._refuse(peer, Op.READ_LAC, request_id, Status.SHUTTING_DOWN, reason)

    # --- writing -------------------------------------------------------------------------------

    def _add(
        self, peer: Peer, request_id: int, request: Add, body: memoryview, *, has_token: bool = False
    ) -> None:
        try:
            block = Block.parse(body)
            check_block(request, block, body)
        except ProtocolError as error:
            # The stream is in step, but what it carries cannot be trusted.
            self._refuse(peer, Op.ADD, request_id, Status.BAD_REQUEST, str(error))
            peer.fail(str(error))
            return
        if request.flags not in _ADD_FLAGS:
            reason = f"the add flags {request.flags} are not supported in version {VERSION_MAX}"
            self._refuse(peer, Op.ADD, request_id, Status.BAD_REQUEST, reason)
            return
        # A payload below the limit has no entry above it: the arrays need no look.
        entry_bytes_max = self._limits.entry_bytes_max
        if block.payload_bytes > entry_bytes_max and max(block.lengths) > entry_bytes_max:
            reason = f"an entry of {max(block.lengths):,} bytes is above the limit of {entry_bytes_max:,}"
            self._refuse(peer, Op.ADD, request_id, Status.BAD_REQUEST, reason)
            return
        if request.flags == _REPAIR:
            self._repair(peer, request_id, request, block, has_token=has_token)
            return
        if request.flags == _RECOVERY and block.content_term < request.term != TERM_FINAL:
            self._write_back(peer, request_id, request, block)
            return
        engine, ledger_id = self._engine, request.ledger_id
        # From here to the append is the one step of rule 7.
        held = engine.term(ledger_id)
        verdict = judge(held, request.term)
        if verdict is Verdict.REFUSE:
            self._refuse_term(peer, Op.ADD, request_id, held)
            return
        is_recovery = bool(request.flags & _RECOVERY)
        if not is_recovery:
            if engine.is_damaged(ledger_id):
                reason = f"this bookie lost data of ledger {ledger_id} and takes no ordinary adds to it"
                self._refuse(peer, Op.ADD, request_id, Status.DATA_LOST, reason)
                return
            if not engine.is_writable:
                self._refuse(peer, Op.ADD, request_id, Status.READ_ONLY, "this bookie is read-only")
                return
        if verdict is Verdict.RAISE:
            self._raise_term(peer, ledger_id, request.term)
        size = len(body)
        if request.flags == _DEFERRED:
            done = partial(self._deferred_added, peer, block.count, size)
        else:
            done = partial(self._added, peer, request_id, block.count, size)
        engine.append_block(block, done, from_reserve=is_recovery)
        peer.hold(size)
        if request.flags == _DEFERRED:
            # Received, and no more than that: the FORCE that follows over this connection says the rest.
            peer.send(ADDED.pack(request_id))

    def _repair(self, peer: Peer, request_id: int, request: Add, block: Block, *, has_token: bool) -> None:
        """Store what of a block is missing here (rule 14).

        The term is left alone, so that a repair neither is kept out by a fence nor fences a live writer;
        but for the final one, which says that the ledger is CLOSED.
        """
        if not self._engine.has_room:
            self._refuse(peer, Op.ADD, request_id, Status.READ_ONLY, "this bookie is read-only")
            return
        # Nor where the ledger has a lock and the repair no token: it must not be a way to fence.
        is_trusted = has_token or not self._engine.lock(request.ledger_id)
        is_final = request.term == TERM_FINAL and is_trusted
        if is_final and not self._fence(peer, Op.ADD, request_id, request.ledger_id, TERM_FINAL):
            return

        self._store(
            peer, request_id, block, partial(store_missing, self._engine, block, is_trusted=is_trusted)
        )

    def _write_back(self, peer: Peer, request_id: int, request: Add, block: Block) -> None:
        """Store what a takeover of an unbounded ledger found, under the content term that it had."""
        if self._fence(peer, Op.ADD, request_id, request.ledger_id, request.term):
            storing = partial(store_unless_outdated, self._engine, block, request.term)
            self._store(peer, request_id, block, storing)

    def _store(
        self, peer: Peer, request_id: int, block: Block, storing: Callable[[], Awaitable[int]]
    ) -> None:
        """Acknowledge a block once it is stored, which looks first at what is here."""

        async def store() -> int:
            try:
                self.counters.entries_repaired += await storing()
                self._acknowledge(peer, Op.ADD, request_id, None)
            except OutdatedBlockError as error:
                status, held = Status.STALE_METADATA, error.content_term
                self._refuse(peer, Op.ADD, request_id, status, str(error), held)
            except UnauthorizedAccessError as error:
                self._refuse(peer, Op.ADD, request_id, Status.UNAUTHORIZED, str(error))
            except LedgerFencedError:
                self._refuse_term(peer, Op.ADD, request_id, self._engine.term(block.ledger_id))
            return 0

        self._run(peer, Op.ADD, request_id, store, block.total_bytes)

    def _added(self, peer: Peer, request_id: int, count: int, size: int, error: StorageError | None) -> None:
        # Rule 3: this names the one request whose copy is durable now, never "everything up to".
        peer.release(size)
        if error is None:
            self.counters.entries_added += count
            self.counters.bytes_added += size
            peer.send(ADDED.pack(request_id))
        else:
            self._answer_storage_error(peer, Op.ADD, request_id, error)

    def _deferred_added(self, peer: Peer, count: int, size: int, error: StorageError | None) -> None:
        peer.release(size)
        if error is None:
            self.counters.entries_added += count
            self.counters.bytes_added += size
        else:
            # It was answered as received. No later force may cover it, so there must be none.
            peer.fail(f"an add that was answered as received is lost: {error}")

    def _force(self, peer: Peer, request_id: int, request: Force, body: memoryview) -> None:
        # A lower term is told that it is displaced; a force writes nothing, so it raises no term either.
        held = self._engine.term(request.ledger_id)
        if judge(held, request.term) is Verdict.REFUSE:
            self._refuse_term(peer, Op.FORCE, request_id, held)
            return
        self._wait(peer, partial(self._acknowledge, peer, Op.FORCE, request_id))

    def _write_lac(self, peer: Peer, request_id: int, request: WriteLac, body: memoryview) -> None:
        statement, ledger_id = request.statement, request.ledger_id
        if statement is None or not statement_is_intact(ledger_id, statement):
            reason = "the checksum over a LAC statement does not hold"
            self._refuse(peer, Op.WRITE_LAC, request_id, Status.BAD_REQUEST, reason)
            peer.fail(reason)
            return
        if statement.content_term > request.term:
            reason = f"a LAC of content term {statement.content_term} under term {request.term}"
            self._refuse(peer, Op.WRITE_LAC, request_id, Status.BAD_REQUEST, reason)
            return
        held = self._engine.term(ledger_id)
        verdict = judge(held, request.term)
        if verdict is Verdict.REFUSE:
            self._refuse_term(peer, Op.WRITE_LAC, request_id, held)
            return
        if verdict is Verdict.RAISE:
            self._raise_term(peer, ledger_id, request.term)
        size = WAITING_BYTES + len(statement.mac)

        def done(error: StorageError | None) -> None:
            peer.release(size)
            self._acknowledge(peer, Op.WRITE_LAC, request_id, error)

        self._engine.append_statement(ledger_id, statement, done)
        peer.hold(size)

    # --- fencing -------------------------------------------------------------------------------

    def _raise_term(self, peer: Peer, ledger_id: int, term: int) -> None:
        self.counters.fences += 1
        # Nobody waits for this alone: what depends on it waits for itself, or for a barrier, behind it.
        self._engine.append_term(ledger_id, term, lambda error: peer.release(WAITING_BYTES))
        peer.hold(WAITING_BYTES)

    def _fence(self, peer: Peer, op: Op, request_id: int, ledger_id: int, term: int) -> bool:
        """Judge and store the term of a fencing request; answers and gives False where it is refused."""
        held = self._engine.term(ledger_id)
        verdict = judge(held, term)
        if verdict is Verdict.REFUSE:
            self._refuse_term(peer, op, request_id, held)
            return False
        if verdict is Verdict.RAISE:
            self._raise_term(peer, ledger_id, term)
        return True

    # --- reading -------------------------------------------------------------------------------

    def _read(self, peer: Peer, request_id: int, request: Read, body: memoryview) -> None:
        if request.last < request.first:
            reason = f"a read from {request.first} to {request.last}"
            self._refuse(peer, Op.READ, request_id, Status.BAD_REQUEST, reason)
            return
        fences = request.term != NO_TERM
        if fences and not self._fence(peer, Op.READ, request_id, request.ledger_id, request.term):
            return
        was_pending = self._engine.is_pending(request.ledger_id)
        answering = partial(self._answer_read, peer, request_id, request, was_pending, fences)
        bytes_max = min(request.bytes_max, self._limits.read_bytes_max)
        self._run(peer, Op.READ, request_id, answering, bytes_max)

    async def _answer_read(
        self, peer: Peer, request_id: int, request: Read, was_pending: bool, fences: bool
    ) -> int:
        engine, ledger_id = self._engine, request.ledger_id
        entry_ids = range(request.first, request.last + 1, request.stride)
        bytes_max = min(request.bytes_max, self._limits.read_bytes_max)
        if fences:
            # Computed when the fence itself and every add accepted before it are durable (rule 3).
            await self._barrier()
            if engine.term(ledger_id) < request.term:  # a term that found no room is taken back
                reason = f"there was no room for term {request.term} of ledger {ledger_id}"
                self._refuse(peer, Op.READ, request_id, Status.READ_ONLY, reason)
                return 0
        found = await engine.read(ledger_id, request.content_term, entry_ids, bytes_max)
        if found.stop is Stop.NO_SUCH_ENTRY and was_pending and not fences:
            # The entry may be among what was accepted before this read and was not indexed yet (rule 3).
            await self._barrier()
            found = await engine.read(ledger_id, request.content_term, entry_ids, bytes_max)
        answer = ReadAnswer(int(found.stop), found.stop_entry, engine.statement(ledger_id))
        size = sum(map(len, found.buffers))
        self.counters.bytes_read += size
        peer.send(encode_frame(encode_answer(Op.READ, request_id, answer), size), *found.buffers)
        return size

    def _read_lac(self, peer: Peer, request_id: int, request: ReadLac, body: memoryview) -> None:
        if request.term == NO_TERM:
            self._answer_or_wait(peer, request_id, request)
            return
        if not self._fence(peer, Op.READ_LAC, request_id, request.ledger_id, request.term):
            return

        def durable(error: StorageError | None) -> None:
            if error is None:
                self._answer_or_wait(peer, request_id, request)
            else:
                self._answer_storage_error(peer, Op.READ_LAC, request_id, error)

        self._wait(peer, durable)

    def _answer_or_wait(self, peer: Peer, request_id: int, request: ReadLac) -> None:
        if not peer.is_open:  # it went while its fence was on the way to the disk
            return
        ledger_id, known_lac = request.ledger_id, request.known_lac
        if request.wait_ms == 0 or self._lac(ledger_id) > known_lac or self.is_draining:
            self._answer_lac(peer, request_id, ledger_id)
        elif not self._polls.add(peer, request_id, ledger_id, known_lac, request.wait_ms / 1000):
            reason = "too many long polls wait, on this connection or on all of them"
            self._refuse(peer, Op.READ_LAC, request_id, Status.TOO_MANY_REQUESTS, reason)

    def _lac(self, ledger_id: int) -> int:
        statement = self._engine.statement(ledger_id)
        return NO_ENTRY if statement is None else statement.lac

    def _answer_lac(self, peer: Peer, request_id: int, ledger_id: int) -> None:
        if self._engine.is_deleted(ledger_id):
            self._refuse_deleted(peer, Op.READ_LAC, request_id, f"ledger {ledger_id} has been deleted")
            return
        engine = self._engine
        answer = ReadLacAnswer(
            engine.statement(ledger_id), engine.last_entry(ledger_id), engine.is_damaged(ledger_id)
        )
        peer.send(encode_frame(encode_answer(Op.READ_LAC, request_id, answer)))

    # --- deleting ------------------------------------------------------------------------------

    def _delete(self, peer: Peer, request_id: int, request: Delete, body: memoryview) -> None:
        ledger_id = request.ledger_id

        async def answer() -> int:
            # While the metadata store is away deletions wait for it, and nothing else is to wait for them:
            # not the reads of all connections, nor this one, which takes no frame beyond its own limit.
            own_max = max(1, self._limits.connection_reads_max // 2)
            all_max = max(1, self._limits.reads_max // 2)
            if self._deleting[peer] >= own_max or self._deleting.total() >= all_max:
                reason = "too many deletions wait for the metadata store; a sweep will look for this one"
                self._refuse(peer, Op.DELETE, request_id, Status.TOO_MANY_REQUESTS, reason)
                return 0
            self._deleting[peer] += 1
            try:
                is_dropped = await self._drop_if_deleted(ledger_id)
            except MetadataError as error:
                self._refuse(peer, Op.DELETE, request_id, Status.INTERNAL_ERROR, str(error))
                return 0
            finally:
                self._deleting[peer] -= 1
                if not self._deleting[peer]:
                    del self._deleting[peer]
            if is_dropped:
                self._acknowledge(peer, Op.DELETE, request_id, None)
            else:
                reason = f"ledger {ledger_id} is in the metadata store: it has not been deleted"
                self._refuse(peer, Op.DELETE, request_id, Status.BAD_REQUEST, reason)
            return 0

        self._run(peer, Op.DELETE, request_id, answer, 1)

    # --- looking around ------------------------------------------------------------------------

    def _ping(self, peer: Peer, request_id: int, request: Ping, body: memoryview) -> None:
        peer.send(encode_frame(encode_answer(Op.PING, request_id, Done())))

    def _list_entries(self, peer: Peer, request_id: int, request: ListEntries, body: memoryview) -> None:
        # At once, and not behind the barrier: what is forgotten by then lies before it, and nothing that is
        # listed is forgotten behind the asker's back (rule 15).
        self._engine.eviction_candidates.discard(request.ledger_id)
        rows_max = self._limits.list_rows_max
        answering = partial(self._answer_entries, peer, request_id, request, rows_max)
        self._run(peer, Op.LIST_ENTRIES, request_id, answering, rows_max * ROW.size)

    async def _answer_entries(self, peer: Peer, request_id: int, request: ListEntries, rows_max: int) -> int:
        # A listing says by omission what is not there: rule 3 as for a negative read.
        await self._barrier()
        rows, next_entry = await self._engine.list_entries(request.ledger_id, request.from_entry, rows_max)
        answer = ListEntriesAnswer(next_entry, self._engine.is_damaged(request.ledger_id))
        body = b"".join([ROW.pack(*row) for row in rows])
        peer.send(encode_frame(encode_answer(Op.LIST_ENTRIES, request_id, answer), len(body)), body)
        return len(body)

    def _list_ledgers(self, peer: Peer, request_id: int, request: ListLedgers, body: memoryview) -> None:
        count_max = self._limits.list_ledgers_max

        async def answer() -> int:
            await self._barrier()
            ids, next_ledger = self._engine.list_ledgers(request.from_ledger, count_max)
            packed = struct.pack(f"<{len(ids)}Q", *ids)
            header = encode_answer(Op.LIST_LEDGERS, request_id, ListLedgersAnswer(next_ledger))
            peer.send(encode_frame(header, len(packed)), packed)
            return len(packed)

        self._run(peer, Op.LIST_LEDGERS, request_id, answer, 8 * count_max)

    def _answer_info(self, peer: Peer, request_id: int, request: Info, body: memoryview) -> None:
        document = json.dumps(self._info(), default=str).encode()
        peer.send(encode_frame(encode_answer(Op.INFO, request_id, Done()), len(document)), document)
