"""What requests need of a connection, and nothing more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bookie_aio.wire.blocks import Buffer

WAITING_BYTES = 1024
"""About what a request without a block takes up in memory while it waits for the disk."""


class Peer(Protocol):
    """The other side of a connection."""

    peer: str
    client: str

    @property
    def is_open(self) -> bool:
        """Tell whether answers can still reach the peer."""

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
