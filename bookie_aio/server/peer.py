"""What requests need of a connection, and nothing more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bookie_aio.wire.blocks import Buffer


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
        """Count the bytes of an add against the limits, until `release`."""

    def release(self, count: int) -> None:
        """Take back what `hold` counted."""

    def run_read(self, read: Coroutine[object, object, int], bytes_max: int) -> None:
        """Run what answers a request in a task; it gives the bytes sent, `bytes_max` at most for now."""

    def fail(self, reason: str) -> None:
        """Close the connection because of what the peer did, once the answers queued so far have left."""
