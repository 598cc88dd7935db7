"""Backends for the contract suite: one store kind each, with a factory of independent clients."""

from __future__ import annotations

import asyncio
import random
import secrets
import sqlite3
import struct
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.backends.sqlite.leases import boot_id
from metadata.backends.sqlite.store import SqliteMetadataStore
from metadata.backends.zookeeper.store import ZooKeeperMetadataStore
from tests.sim.cluster.metadata import SimMetadataStore, SimTree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from metadata.store import MetadataStore, Registration
    from tests.support.zookeeper import ZooKeeperServer


def new_root() -> str:
    """Return a root node that no other test uses."""
    return f"tests/root-{secrets.token_hex(8)}"


class Backend(ABC):
    """One metadata store kind, as its clients share it."""

    def __init__(self) -> None:
        self._opened: list[MetadataStore] = []

    async def open(self) -> MetadataStore:
        """Open one more independent client, closed at the end of the test."""
        store = await self._open()
        self._opened.append(store)
        return store

    async def close(self) -> None:
        """Close all clients."""
        for store in self._opened:
            await store.close()

    @abstractmethod
    async def _open(self) -> MetadataStore: ...

    @abstractmethod
    async def expire(self, store: MetadataStore) -> None:
        """Let the client's session end behind its back."""

    @abstractmethod
    def crash(self, store: MetadataStore) -> None:
        """End the client as a SIGKILL of its process would."""


class MemoryBackend(Backend):
    """Clients of one tree in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._tree = MemoryTree()

    async def _open(self) -> MetadataStore:
        return MemoryMetadataStore(self._tree)

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryMetadataStore)
        store.expire_session()

    def crash(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryMetadataStore)
        store.crash()


class SimulatedBackend(Backend):
    """Clients of the simulator's store, on this loop: with its delays, and without its faults."""

    def __init__(self) -> None:
        super().__init__()
        self._tree = SimTree()
        self._rng = random.Random(1)

    async def _open(self) -> MetadataStore:
        return SimMetadataStore(self._tree, self._rng, session_timeout_s=0.3)

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, SimMetadataStore)
        store.expire_session()

    def crash(self, store: MetadataStore) -> None:
        assert isinstance(store, SimMetadataStore)
        session = store.session_id
        store.crash()
        asyncio.get_running_loop().call_later(0.1, self._tree.expire, session)


class SqliteBackend(Backend):
    """Stores that have one file open, with leases short enough to wait for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    async def _open(self) -> MetadataStore:
        return await SqliteMetadataStore.open(self.path, lease_s=1.0)

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, SqliteMetadataStore)
        leases = f"{self.path}-leases-{boot_id()}"
        connection = sqlite3.connect(leases, timeout=5)
        with connection:
            connection.execute("DELETE FROM lease WHERE session = ?", (store._session,))
        connection.close()

    def crash(self, store: MetadataStore) -> None:
        assert isinstance(store, SqliteMetadataStore)
        store._abandon()


class ZooKeeperBackend(Backend):
    """Sessions with one real server."""

    def __init__(self, server: ZooKeeperServer) -> None:
        super().__init__()
        self._server = server
        self._root = new_root()

    async def _open(self) -> MetadataStore:
        return await ZooKeeperMetadataStore.open(
            [("127.0.0.1", self._server.port)], self._root, session_timeout_s=1.0
        )

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, ZooKeeperMetadataStore)
        await end_session(store, self._server.port)

    def crash(self, store: MetadataStore) -> None:
        assert isinstance(store, ZooKeeperMetadataStore)
        store._abandon()


def still(registration: Registration) -> AbstractAsyncContextManager[object]:
    """Keep a registration whose key is gone from making it anew meanwhile."""
    lock: AbstractAsyncContextManager[object] = getattr(registration, "_lock", nullcontext())
    return lock


async def end_session(store: ZooKeeperMetadataStore, port: int) -> None:
    """Have the server end the store's session: take it over from another connection and close it.

    The store takes its session back at once, and may be faster; then once more.
    """
    session = store._session
    take_over = struct.pack("!iqiqi16s?", 0, 0, 1000, session.session_id, 16, session._password, False)
    close = struct.pack("!ii", 1, -11)
    timeout_ms = 1000
    while timeout_ms > 0:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for frame in (take_over, close):
            writer.write(struct.pack("!i", len(frame)) + frame)
        # A session that has ended is answered with a timeout of zero.
        answer = await reader.read()
        if len(answer) >= 12:
            (timeout_ms,) = struct.unpack_from("!i", answer, 8)
        writer.close()
        await writer.wait_closed()


@pytest.fixture(params=["memory", "simulated", "sqlite", "zookeeper"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """One backend of each kind in turn."""
    made: Backend
    if request.param == "memory":
        made = MemoryBackend()
    elif request.param == "simulated":
        made = SimulatedBackend()
    elif request.param == "sqlite":
        made = SqliteBackend(tmp_path / "metadata.db")
    else:
        made = ZooKeeperBackend(request.getfixturevalue("zookeeper"))
    yield made
    await made.close()


@pytest.fixture
async def store(backend: Backend) -> MetadataStore:
    """One client of the backend."""
    return await backend.open()
