"""Deletion, at a bookie whose ZooKeeper server lags behind the others (rule 15)."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.wire.messages import Delete, ListLedgers, Status
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.backends.uri import open_store
from metadata.errors import NoSuchLedgerError
from metadata.model.ledger import LedgerMetadata
from tests.support.laggingfollower import LaggingEnsemble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import RawClient

SIZES: dict[str, Any] = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "bookies": ["b1"]}
WAIT_S = 20


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaggingEnsemble]:
    with LaggingEnsemble(tmp_path_factory.mktemp("lagging")) as running:
        yield running


async def held(client: RawClient) -> list[int]:
    return [one for (one,) in struct.iter_unpack("<Q", (await client.call(ListLedgers(0))).body)]


async def test_a_new_ledger_not_yet_visible_at_a_lagging_zookeeper_server_is_not_dropped(
    bookies: Bookies, ensemble: LaggingEnsemble, request: pytest.FixtureRequest
) -> None:
    root = "/" + "".join(filter(str.isalnum, request.node.name))  # one for each event loop
    async with (
        await open_store(f"zk://{ensemble.others}{root}", create=True) as others,
        await open_store(f"zk://{ensemble.follower.address}{root}", create=True) as behind,
    ):
        ledgers = LedgerStore(others)
        await ledgers.create_ledger(LedgerMetadata.new(1, **SIZES))
        await others.ids_drawn(LEDGER_SEQUENCE, least=100)
        await behind.sync("ledgers")
        store = await open_store(behind.uri, create=True)  # closed with the bookie
        bookie = await bookies.start(store=store)
        client = await bookies.connect(bookie)
        assert (await client.add(1, 0, [b"entry"])).status is Status.OK
        assert bookie._ledger_gc is not None
        await store.sync("ledgers")  # behind a write that waits, the session's reads would wait as well
        ensemble.lag()
        try:
            await ledgers.create_ledger(LedgerMetadata.new(7, **SIZES))
            assert (await client.add(7, 0, [b"entry"])).status is Status.OK
            with pytest.raises(NoSuchLedgerError):  # that is what this bookie's server believes
                await LedgerStore(behind).read(7)
            sweeping = asyncio.create_task(bookie._ledger_gc.sweep())
            told = client.send(Delete(7))
            # Long enough for whoever believes this server; the follower gives its leader up after 5 s.
            believers, _ = await asyncio.wait({sweeping, told}, timeout=1)
            assert not believers
        finally:
            ensemble.catch_up()
        assert await asyncio.wait_for(sweeping, WAIT_S) == 0
        assert (await asyncio.wait_for(told, WAIT_S)).status is Status.BAD_REQUEST
        assert await held(client) == [1, 7]
        await ledgers.delete(7)  # and when it is really gone, it goes, at whichever server
        assert (await client.call(Delete(7))).status is Status.OK
        assert await held(client) == [1]
