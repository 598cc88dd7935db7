"""The observer of the status page on a real cluster: what it says of ledgers that it has not read."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import client_aio
from client_aio.dashboard import observer as observer_module
from client_aio.dashboard.layout import verdict
from client_aio.dashboard.model import ClusterModel
from client_aio.dashboard.observer import Observer
from tests.integration.test_autorecovery import written

if TYPE_CHECKING:
    import pytest

    from client_aio.client import Client
    from tests.support.cluster import Cluster

WAIT_S = 20.0


def observer_of(cluster: Cluster) -> Observer:
    async def scrape(address: str) -> str:
        raise OSError("nobody scrapes in these tests")

    connect = partial(client_aio.connect, cluster.uri)
    return Observer(cluster.uri, connect, ClusterModel(), wall_clock=time.time, scrape=scrape)


async def listed(observer: Observer, client: Client) -> tuple[str, list[str]]:
    """Have all ledgers listed, and the new ones read; return the verdict and the notes on metadata."""
    await observer._list(client._context)
    observer.model.note_metadata("", time.time())
    texts = [problem.text for problem in observer.model.problems]
    return verdict(observer.model)[1], [text for text in texts if text.startswith("the metadata")]


async def test_ledgers_that_one_listing_leaves_unread_are_not_called_healthy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_module, "NEW_PER_LISTING", 3)
    observer = observer_of(cluster)
    async with client_aio.connect(cluster.uri) as client:
        for _ in range(2):
            await written(client, count=1)
        assert await listed(observer, client) == ("healthy", [])
        await written(client, count=1)
        assert await listed(observer, client) == ("healthy", [])
        for _ in range(7):
            await written(client, count=1)
        for read in (6, 9):
            text = f"the metadata of {read} of 10 ledgers have been read so far"
            assert await listed(observer, client) == ("reading", [text])
        assert await listed(observer, client) == ("healthy", [])


async def test_a_ledger_whose_reading_takes_long_is_not_called_healthy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = observer_of(cluster)
    async with client_aio.connect(cluster.uri) as client:
        await written(client, count=1)
        assert await listed(observer, client) == ("healthy", [])
        await written(client, count=1)
        is_late, go_on = asyncio.Event(), asyncio.Event()
        read, note = observer.read, observer.model.note_pass

        async def slow(*arguments: Any) -> None:
            await go_on.wait()
            await read(*arguments)

        def noting(*, is_over: bool) -> None:
            note(is_over=is_over)
            is_late.set()

        monkeypatch.setattr(observer_module, "LATE_S", 0.0)
        monkeypatch.setattr(observer, "read", slow)
        monkeypatch.setattr(observer.model, "note_pass", noting)
        listing = asyncio.create_task(listed(observer, client))
        async with asyncio.timeout(WAIT_S):
            await is_late.wait()
        assert verdict(observer.model)[1] == "reading"
        go_on.set()
        assert await listing == ("healthy", [])
