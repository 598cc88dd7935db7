"""Operators' orders to real bookies: read-only, decommissioned, replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from metadata.access.bookies import DRAINING, READ_ONLY, Order, available_bookies, change_order
from tests.integration.test_autorecovery import until
from tests.support.cli import Cli
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path


async def order(client: client_aio.Client, bookie: str, mode: str) -> None:
    """Give an order, or take it back with ""; wait until the bookie says that it obeys."""
    store = client._context.ledgers.store
    await change_order(store, bookie, lambda _: Order(mode) if mode else None)

    async def obeys() -> bool:
        return (await available_bookies(store))[bookie].order == mode

    await until(obeys)


@pytest.mark.parametrize("is_idle", [False, True])
async def test_writers_move_off_a_read_only_bookie_without_a_failed_add(
    tmp_path: Path, is_idle: bool
) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer,
    ):
        await writer.add_entry(b"before")
        bookie = writer.metadata.last_fragment.bookies[1]
        adds = []

        async def has_moved() -> bool:
            if not is_idle:
                adds.append(writer.add_entry(b"beside"))
            return bookie not in writer.metadata.last_fragment.bookies

        await order(client, bookie, READ_ONLY)
        await until(has_moved)
        await asyncio.gather(*adds)
        assert len(writer.metadata.fragments) == 2
        for _ in range(6):  # No new ledger is placed there.
            async with client.create_ledger() as other:
                assert bookie not in other.metadata.last_fragment.bookies


async def test_an_order_outlives_restarts_and_holds_for_a_bookie_that_was_down(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        cli = Cli(cluster.uri)
        await cluster["b2"].kill()

        async def is_gone() -> bool:
            return "b2" not in client.bookies

        await until(is_gone)
        out = await asyncio.to_thread(cli.rows, "bookie", "read-only", "on", "b2")
        assert out == {"bookie_id": "b2", "read_only": True, "running": False, "obeys": None}
        for _ in range(2):
            await cluster["b2"].start()
            (row,) = [
                each
                for each in await asyncio.to_thread(cli.rows, "bookie", "list")
                if each["bookie_id"] == "b2"
            ]
            assert (row["state"], row["order"]) == ("read-only", "read-only")
            await cluster["b2"].end()
        await cluster["b2"].start()
        out = await asyncio.to_thread(cli.rows, "bookie", "read-only", "off", "b2")
        assert out == {"bookie_id": "b2", "read_only": False, "running": True, "obeys": True}
        assert (await available_bookies(client._context.ledgers.store))["b2"].is_writable


async def test_a_bookie_that_drains_is_not_made_writable(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        await order(client, "b1", DRAINING)
        cli = Cli(cluster.uri)
        out = await asyncio.to_thread(cli.run, "bookie", "read-only", "off", "b1", code=1)
        assert b"is being decommissioned" in out
        assert b"there is no bookie b9" in await asyncio.to_thread(
            cli.run, "bookie", "read-only", "on", "b9", code=3
        )
