"""ZooKeeper servers whose data directory is replaced by an older copy, under clients that run on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from metadata.backends.zookeeper.store import ZooKeeperMetadataStore
from metadata.errors import NoSuchKeyError, VersionConflictError
from tests.support.proxy import ZooKeeperProxy
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

WAIT_S = 60
SESSION_S = 5.0
"""As long as the server grants: a session outlives a restart of the server."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tmp_path / "zookeeper") as made:
        yield made


async def open_store(address: str) -> ZooKeeperMetadataStore:
    host, _, port = address.partition(":")
    return await ZooKeeperMetadataStore.open(
        [(host, int(port))], "root", session_timeout_s=SESSION_S, operation_timeout_s=WAIT_S
    )


async def until(store: ZooKeeperMetadataStore, key: str, is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S), aclosing(store.watch(key)) as changes:
        async for _ in changes:
            if await is_so():
                return


async def test_a_client_that_has_seen_more_than_the_servers_know_begins_anew(
    server: ZooKeeperServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with await open_store(server.address) as store:
        await store.register("b/1", b"1")
        first = await store.create("a", b'"open"')
        await asyncio.to_thread(server.copy_data)
        await store.register("b/2", b"2")
        version = await store.compare_and_set("a", b'"more"', first)
        await store.create("lost", b"1")
        for _ in range(5):
            await store.sync("a")  # each is a transaction
        session = store.session
        async with aclosing(store.watch("a")) as changes:
            await anext(changes)
            await asyncio.to_thread(server.set_back)
            await asyncio.wait_for(anext(changes), WAIT_S)
        assert (await store.read("a")).value == b'"open"'
        with pytest.raises(NoSuchKeyError):
            await store.read("lost")
        assert store.session != session
        assert [each for each in caplog.messages if f"session {session} is given up" in each]

        async with await open_store(server.address) as other:
            # The second change of the key again.
            await other.compare_and_set("a", b'"closed"', first)
            with pytest.raises(VersionConflictError):
                await store.compare_and_set("a", b'"still open"', version)

            async def is_back() -> bool:
                return await other.children("b") == ["1", "2"]

            await until(other, "b", is_back)
            for name in ("1", "2"):
                _, stat = await other._session.get(other._path(f"b/{name}"))
                assert stat.session_id == store._session.session_id


async def test_a_session_that_an_older_copy_has_holds_nothing_but_what_is_registered(
    server: ZooKeeperServer,
) -> None:
    """As where servers begin a new epoch on the copy: to them, no client has seen too much."""
    async with (
        ZooKeeperProxy("127.0.0.1", server.port) as proxy,
        await open_store(proxy.address) as store,
    ):
        lock = await store.register("locks/7", b"1")
        bookie = await store.register("b/1", b'"of before"')
        await asyncio.to_thread(server.copy_data)
        await store.sync("b")
        session, seen = store.session, store._session._last_zxid
        await bookie.update(b'"of now"')
        await store.register("b/2", b"1")
        await lock.close()
        await store.sync("b")
        await proxy.refuse()
        await asyncio.to_thread(server.set_back)
        async with await open_store(server.address) as other:
            count = await other.create("count", b"0")
            while other._session._last_zxid < seen + 100:
                count = await other.compare_and_set("count", b"0", count)
            await proxy.restore()

            async def is_free() -> bool:
                return not await other.children("locks")

            async def is_mended() -> bool:
                are_listed = await other.children("b") == ["1", "2"]
                return are_listed and (await other.read("b/1")).value == b'"of now"'

            await until(other, "locks", is_free)
            await until(other, "b", is_mended)
            assert store.session != session
