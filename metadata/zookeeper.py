"""The metadata store on ZooKeeper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from metadata.store import MetadataStore

SESSION_TIMEOUT_S = 6.0


class ZooKeeperMetadataStore:
    """Not there yet."""

    @classmethod
    async def open(
        cls,
        servers: Sequence[tuple[str, int]],
        root: str,
        *,
        session_timeout_s: float,
        operation_timeout_s: float,
    ) -> MetadataStore:
        """Open the store."""
        raise InvalidArgumentError("zk:// is not there yet")
