"""Requests about a bookie or a ledger as a whole: listings, INFO, PING, DELETE and LIFT_MARK.

The listings, INFO and PING change nothing. A listing says by omission which entries and ledgers are absent,
so it waits for a barrier (rule 3). INFO and PING are answered at once.

DELETE says that a ledger has been deleted (rule 15). The bookie does not believe the client: it asks the
metadata store first (`bookie_aio.server.ledger_gc`). LIFT_MARK says that the bookie holds what it owes of a
ledger, and is not believed either (`bookie_aio.server.healing`).

IS_FREE, DELETE and LIFT_MARK wait for the metadata store within the limits of `StoreWaits`.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.server.healing import MarkStaysError
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.listing import ROW
from bookie_aio.wire.messages import (
    Delete,
    Done,
    Info,
    IsFree,
    LiftMark,
    LiftMarkAnswer,
    ListEntries,
    ListEntriesAnswer,
    ListLedgers,
    ListLedgersAnswer,
    Op,
    Ping,
    Status,
    encode_answer,
)
from metadata.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.config import Limits
    from bookie_aio.server.given_ids import GivenIds
    from bookie_aio.server.handlers.store_waits import StoreWaits
    from bookie_aio.server.responder import Peer, Responder
    from bookie_aio.storage.engine import Engine


_READ_WITHIN_S = 1.0
"""The age of a reading of the id counter that is good enough for a question about an id below it."""


class InspectHandler:
    """Carries out LIST_ENTRIES, LIST_LEDGERS, INFO and PING."""

    def __init__(
        self, engine: Engine, limits: Limits, responder: Responder, info: Callable[[], dict[str, object]]
    ) -> None:
        """`info` returns the metrics that INFO answers with."""
        self._engine = engine
        self._limits = limits
        self._responder = responder
        self._info = info

    def ping(self, peer: Peer, request_id: int, request: Ping, body: memoryview) -> None:
        """Answer with OK."""
        peer.send(encode_frame(encode_answer(Op.PING, request_id, Done())))

    def info(self, peer: Peer, request_id: int, request: Info, body: memoryview) -> None:
        """Answer with the bookie's metrics as JSON."""
        document = json.dumps(self._info(), default=str).encode()
        peer.send(encode_frame(encode_answer(Op.INFO, request_id, Done()), len(document)), document)

    def list_entries(self, peer: Peer, request_id: int, request: ListEntries, body: memoryview) -> None:
        """Answer with the entries that are held of a ledger, at most `list_rows_max` rows of them."""
        # Rule 15: at once, not behind the barrier. The listing omits the entries of an eviction accepted so
        # far. An eviction accepted later would drop listed entries, and a repair relies on the listing.
        self._engine.eviction_candidates.discard(request.ledger_id)
        rows_max = self._limits.list_rows_max
        answering = partial(self._answer_entries, peer, request_id, request, rows_max)
        self._responder.run(peer, Op.LIST_ENTRIES, request_id, answering, rows_max * ROW.size)

    async def _answer_entries(self, peer: Peer, request_id: int, request: ListEntries, rows_max: int) -> int:
        await self._responder.barrier()
        rows, next_entry = await self._engine.list_entries(request.ledger_id, request.from_entry, rows_max)
        if request.ledger_id < self._engine.marking.in_question_below:
            # What is not listed counts as denied. A mark would be a promise: it takes an operator to lift it.
            reason = f"whether data of ledger {request.ledger_id} was lost is being found out: ask again"
            self._responder.refuse(peer, Op.LIST_ENTRIES, request_id, Status.TOO_MANY_REQUESTS, reason)
            return 0
        answer = ListEntriesAnswer(next_entry, self._engine.is_damaged(request.ledger_id))
        body = b"".join([ROW.pack(*row) for row in rows])
        peer.send(encode_frame(encode_answer(Op.LIST_ENTRIES, request_id, answer), len(body)), body)
        return len(body)

    def list_ledgers(self, peer: Peer, request_id: int, request: ListLedgers, body: memoryview) -> None:
        """Answer with the ids of the ledgers that are held, at most `list_ledgers_max` of them."""
        count_max = self._limits.list_ledgers_max

        async def answer() -> int:
            await self._responder.barrier()
            ids, next_ledger = self._engine.list_ledgers(request.from_ledger, count_max)
            packed = struct.pack(f"<{len(ids)}Q", *ids)
            header = encode_answer(Op.LIST_LEDGERS, request_id, ListLedgersAnswer(next_ledger))
            peer.send(encode_frame(header, len(packed)), packed)
            return len(packed)

        self._responder.run(peer, Op.LIST_LEDGERS, request_id, answer, 8 * count_max)


class ClaimHandler:
    """Carries out IS_FREE, by which a client that makes a ledger asks about its id."""

    def __init__(
        self,
        engine: Engine,
        responder: Responder,
        waits: StoreWaits,
        given_ids: GivenIds,
        not_free_below: Callable[[], int],
    ) -> None:
        """`not_free_below` returns the id below which no new ledger may be made."""
        self._engine = engine
        self._responder = responder
        self._waits = waits
        self._given_ids = given_ids
        self._not_free_below = not_free_below

    def is_free(self, peer: Peer, request_id: int, request: IsFree, body: memoryview) -> None:
        """Answer OK where the bookie knows nothing of the ledger, and its id has been given out.

        The counter is read again even for an id below its last value. A set-back of the metadata store, which
        gives ids out twice, shows there.
        """
        ledger_id, responder = request.ledger_id, self._responder

        async def answer() -> int:
            try:
                is_below = ledger_id < self._given_ids.below
                with self._waits.of(peer, Op.IS_FREE):
                    await self._given_ids.read_again(unless_read_within_s=_READ_WITHIN_S if is_below else 0.0)
            except MetadataError as error:
                responder.refuse(peer, Op.IS_FREE, request_id, Status.INTERNAL_ERROR, str(error))
                return 0
            await responder.barrier()
            if self._engine.known.is_known(ledger_id):
                reason = f"this bookie holds or dropped a ledger {ledger_id} of before"
            elif ledger_id < self._not_free_below():
                reason = f"the id {ledger_id} was given out before the metadata store was set back"
            elif ledger_id >= self._given_ids.below:
                reason = f"the id {ledger_id} has not been given out, by this bookie's metadata store"
            else:
                responder.acknowledge(peer, Op.IS_FREE, request_id, None)
                return 0
            responder.refuse(peer, Op.IS_FREE, request_id, Status.ID_TAKEN, reason)
            return 0

        responder.run(peer, Op.IS_FREE, request_id, answer, 1)


class ConfirmedHandler:
    """Carries out DELETE and LIFT_MARK, which the metadata store has to confirm."""

    def __init__(
        self,
        responder: Responder,
        waits: StoreWaits,
        drop_if_deleted: Callable[[int], Awaitable[bool]],
        lift_mark: Callable[[int, int], Awaitable[int]],
    ) -> None:
        """Take `LedgerGarbageCollector.drop_if_deleted` and `Healing.lift`."""
        self._responder = responder
        self._waits = waits
        self._drop_if_deleted = drop_if_deleted
        self._lift_mark = lift_mark

    def delete(self, peer: Peer, request_id: int, request: Delete, body: memoryview) -> None:
        """Answer once the ledger's tombstone is durable; refuse where the metadata store has the ledger."""
        ledger_id = request.ledger_id

        async def answer() -> None:
            if await self._drop_if_deleted(ledger_id):
                self._responder.acknowledge(peer, Op.DELETE, request_id, None)
            else:
                reason = f"ledger {ledger_id} is in the metadata store: it has not been deleted"
                self._responder.refuse(peer, Op.DELETE, request_id, Status.BAD_REQUEST, reason)

        self._run(peer, Op.DELETE, request_id, answer)

    def lift_mark(self, peer: Peer, request_id: int, request: LiftMark, body: memoryview) -> None:
        """Answer once the ledger's marks are lifted; refuse where they have to stay (rule 4)."""

        async def answer() -> None:
            try:
                mark = await self._lift_mark(request.ledger_id, request.mark)
            except MarkStaysError as error:
                self._responder.refuse(peer, Op.LIFT_MARK, request_id, Status.BAD_REQUEST, str(error))
            else:
                peer.send(encode_frame(encode_answer(Op.LIFT_MARK, request_id, LiftMarkAnswer(mark))))

        self._run(peer, Op.LIFT_MARK, request_id, answer)

    def _run(self, peer: Peer, op: Op, request_id: int, answering: Callable[[], Awaitable[None]]) -> None:
        """Run what answers a request, unless too many requests wait for the metadata store."""
        responder = self._responder

        async def answer() -> int:
            try:
                with self._waits.of(peer, op):
                    await answering()
            except MetadataError as error:
                responder.refuse(peer, op, request_id, Status.INTERNAL_ERROR, str(error))
            return 0

        responder.run(peer, op, request_id, answer, 1)
