"""StoreWaits: the limits on requests that wait for the metadata store in a read slot.

While the store is away, such requests wait for seconds. They must take no more than half of the reads of a
connection and of the bookie. Other reads would wait for them otherwise.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from metadata.errors import TooManyRequestsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bookie_aio.config import Limits
    from bookie_aio.server.responder import Peer
    from bookie_aio.wire.messages import Op


class StoreWaits:
    """Counts the requests of all connections that wait. The handlers share one."""

    def __init__(self, limits: Limits) -> None:
        self._own_max = max(1, limits.connection_reads_max // 2)
        self._all_max = max(1, limits.reads_max // 2)
        self._waiting: Counter[Peer] = Counter()

    @contextmanager
    def of(self, peer: Peer, op: Op) -> Iterator[None]:
        """Count a request while it waits.

        Raises:
            TooManyRequestsError: too many wait already.
        """
        if self._waiting[peer] >= self._own_max or self._waiting.total() >= self._all_max:
            raise TooManyRequestsError(
                f"too many requests such as {op.name} wait for the metadata store; send it again later"
            )
        self._waiting[peer] += 1
        try:
            yield
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]
