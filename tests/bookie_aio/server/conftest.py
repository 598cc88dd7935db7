"""Bookies in this process: production code on the test's loop, with real sockets and files."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from bookie_aio.config import BookieConfig
from bookie_aio.core.identity import AgeFile
from bookie_aio.server.bookie import Bookie
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.segment.allocator import SpaceLimits
from bookie_aio.storage.segment.format import AGE
from metadata.access.bookies import AgeRecord
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.ids import age_key
from metadata.model.ledger import DIGEST_HMAC, LedgerMetadata
from metadata.model.passwords import ROOT_BYTES, SALT_BYTES, PasswordRecord
from tests.support.helddisk import HeldDisk
from tests.support.rawclient import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from bookie_aio.server.dispatcher import Authoriser
    from bookie_aio.storage.engine import Engine
    from metadata.store import MetadataStore

STORAGE = StorageConfig(
    segment_bytes=16 * 1024 * 1024, space=SpaceLimits(reserve_bytes=1024 * 1024, retry_s=0.05)
)


LEDGERS_GIVEN_OUT = 2**61
"""The ids that a test may use without drawing them are below this one."""


def engine_of(bookie: Bookie) -> Engine:
    """Return the storage of a bookie that has started."""
    assert bookie._engine is not None
    return bookie._engine


class Bookies:
    """Starts bookies of one cluster, and stops what still runs at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = MemoryTree()
        self.tree.raise_to(LEDGER_SEQUENCE, LEDGERS_GIVEN_OUT)
        self.rng = random.Random(1)
        self._running: list[tuple[Bookie, MetadataStore]] = []
        self._disks: list[HeldDisk] = []
        self._clients: list[RawClient] = []

    def disk(self) -> HeldDisk:
        """Return a disk to start a bookie with, that the test can hold."""
        self._disks.append(HeldDisk())
        return self._disks[-1]

    def store(self) -> MemoryMetadataStore:
        """Return a metadata store of the cluster."""
        return MemoryMetadataStore(self.tree)

    def config(self, bookie_id: str = "b1", *, folder: str | None = None, **values: Any) -> BookieConfig:
        """Return a bookie's configuration."""
        values.setdefault("storage", STORAGE)
        values.setdefault("directories", (str(self.folder / (folder or bookie_id)),))
        return BookieConfig(bookie_id, **values)

    async def start(
        self,
        bookie_id: str = "b1",
        *,
        disk: HeldDisk | None = None,
        store: MetadataStore | None = None,
        authoriser: Authoriser | None = None,
        **values: Any,
    ) -> Bookie:
        """Start a bookie."""
        store = store or self.store()
        try:
            bookie = await Bookie.start(
                self.config(bookie_id, **values),
                store,
                disk or self.disk(),
                rng=self.rng,
                now_ms=lambda: 0,
                authoriser=authoriser,
            )
        except BaseException:
            await store.close()
            raise
        self._running.append((bookie, store))
        return bookie

    async def take_for_newest(self, folder: str, bookie_id: str = "b1") -> None:
        """Let a copy of a bookie's directory pass for the directory as it is now, by its age."""
        file = AgeFile.parse((self.folder / folder / AGE).read_bytes())
        assert file is not None
        store = self.store()
        stored = AgeRecord.from_json((await store.read(age_key(bookie_id))).value)
        age = AgeRecord(file.number, file.token, stored.place)
        await store.compare_and_set(
            age_key(bookie_id), age.to_json(), (await store.read(age_key(bookie_id))).version
        )

    async def protect(self, ledger_id: int) -> LedgerMetadata:
        """Create the metadata of a ledger with a password, on bookie b1 alone."""
        password = PasswordRecord(bytes(SALT_BYTES), bytes(ROOT_BYTES))
        metadata = LedgerMetadata.new(
            ledger_id, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"],
            digest=DIGEST_HMAC, password=password,
        )  # fmt: skip
        await LedgerStore(self.store()).create_ledger(metadata)
        return metadata

    async def connect(self, bookie: Bookie, *, greet: bool = True) -> RawClient:
        """Connect to a bookie."""
        client = await RawClient.connect(bookie.address, greet=greet)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Stop everything."""
        for client in self._clients:
            await client.close()
        for disk in self._disks:
            disk.release()
        for bookie, store in self._running:
            await bookie.close()
            await store.close()
        for disk in self._disks:
            disk.close()


OF_ONE_LOOP = {
    "test_server_age.py", "test_server_healing.py", "test_server_identity.py", "test_server_learned_ids.py",
    "test_server_ledger_auth.py", "test_server_ledger_gc.py", "test_server_peer_ages.py",
    "test_server_repair.py", "test_server_set_back.py", "test_server_space.py", "test_server_terms.py",
    "test_server_trims.py",
}  # fmt: skip
"""Tests of what a bookie decides and keeps. Loops differ in how they read, write, wait and close."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each test on the loop that commands use, and those of connections on the plain loop as well."""
    plain = {} if item.path.name in OF_ONE_LOOP else {"asyncio": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def bookies(tmp_path: Path) -> AsyncIterator[Bookies]:
    running = Bookies(tmp_path)
    yield running
    await running.close()


@pytest.fixture
async def bookie(bookies: Bookies) -> Bookie:
    return await bookies.start()


@pytest.fixture
async def client(bookies: Bookies, bookie: Bookie) -> RawClient:
    return await bookies.connect(bookie)
