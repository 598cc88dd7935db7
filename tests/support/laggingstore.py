"""A metadata store whose server lags: it answers reads from the past, until it is asked to sync."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from metadata.backends.memory import MemoryMetadataStore

if TYPE_CHECKING:
    from metadata.backends.memory import MemoryTree
    from metadata.store import Versioned


class LaggingStore(MemoryMetadataStore):
    """A client of a `MemoryTree` through a server that lags when told to."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self._past: MemoryMetadataStore | None = None
        self.syncs = 0

    def lag(self) -> None:
        """Answer reads and listings, from now on, with what there is now."""
        past = copy.copy(self.tree)
        past.__dict__["_nodes"] = copy.deepcopy(self.tree.__dict__["_nodes"])
        self._past = MemoryMetadataStore(past)

    async def read(self, key: str) -> Versioned:
        return await (super().read(key) if self._past is None else self._past.read(key))

    async def children(self, key: str) -> list[str]:
        return await (super().children(key) if self._past is None else self._past.children(key))

    async def sync(self, key: str) -> None:
        self.syncs += 1
        self._past = None
        await super().sync(key)
