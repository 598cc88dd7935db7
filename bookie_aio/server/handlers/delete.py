"""Deletion: DELETE, by which a client says that a ledger has been deleted (rule 15).

The bookie does not believe the client: it asks the metadata store first (`bookie_aio.server.ledger_gc`).
Owns the limits on the DELETEs that wait for the metadata store. While the store is away they wait, and must
take no more than half of the reads of a connection and of the bookie. Other reads would wait for them
otherwise.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import Delete, Op, Status
from metadata.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.config import Limits
    from bookie_aio.server.responder import Peer, Responder


class DeleteHandler:
    """Carries out DELETE."""

    def __init__(
        self, limits: Limits, responder: Responder, drop_if_deleted: Callable[[int], Awaitable[bool]]
    ) -> None:
        """`drop_if_deleted` is `LedgerGarbageCollector.drop_if_deleted`."""
        self._limits = limits
        self._responder = responder
        self._drop_if_deleted = drop_if_deleted
        self._deleting: Counter[Peer] = Counter()

    def delete(self, peer: Peer, request_id: int, request: Delete, body: memoryview) -> None:
        """Answer once the ledger's tombstone is durable; refuse where the metadata store has the ledger."""
        ledger_id = request.ledger_id
        responder = self._responder

        async def answer() -> int:
            own_max = max(1, self._limits.connection_reads_max // 2)
            all_max = max(1, self._limits.reads_max // 2)
            if self._deleting[peer] >= own_max or self._deleting.total() >= all_max:
                reason = "too many deletions wait for the metadata store; a sweep will look for this one"
                responder.refuse(peer, Op.DELETE, request_id, Status.TOO_MANY_REQUESTS, reason)
                return 0
            self._deleting[peer] += 1
            try:
                is_dropped = await self._drop_if_deleted(ledger_id)
            except MetadataError as error:
                responder.refuse(peer, Op.DELETE, request_id, Status.INTERNAL_ERROR, str(error))
                return 0
            finally:
                self._deleting[peer] -= 1
                if not self._deleting[peer]:
                    del self._deleting[peer]
            if is_dropped:
                responder.acknowledge(peer, Op.DELETE, request_id, None)
            else:
                reason = f"ledger {ledger_id} is in the metadata store: it has not been deleted"
                responder.refuse(peer, Op.DELETE, request_id, Status.BAD_REQUEST, reason)
            return 0

        responder.run(peer, Op.DELETE, request_id, answer, 1)
