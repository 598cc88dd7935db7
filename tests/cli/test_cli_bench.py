"""The ledgers that `bench` makes for itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio.cli.bench import _own_ledgers
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_ledger_whose_creation_was_interrupted_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made, may_return, create = asyncio.Event(), asyncio.Event(), client_aio.Client.create_ledger

    async def create_slowly(self: client_aio.Client, **sizes: int) -> client_aio.LedgerWriter:
        writer = await create(self, **sizes)
        is_made.set()
        await may_return.wait()
        return writer

    monkeypatch.setattr(client_aio.Client, "create_ledger", create_slowly)
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:

        async def run() -> None:
            async with _own_ledgers(client, 1, {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}):
                raise AssertionError("it was interrupted before")

        running = asyncio.create_task(run())
        await is_made.wait()
        running.cancel()
        await asyncio.sleep(0)
        may_return.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [ledger_id async for ledger_id in client.list_ledgers()] == []
