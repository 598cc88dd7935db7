"""Logs whose metadata are damaged: what is whole stays whole, and others' logs are looked after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio import NoSuchLedgerError, Position
from metadata.errors import MetadataCorruptError
from metadata.model.log import LogRow
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client_aio import Client


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as made:
        yield made


async def left_over_of(client: Client, name: str) -> int:
    """Leave a ledger as a writer does that dies after making it, and before it is listed."""
    log = await client.open_log(name)
    assert log._roller is not None
    orphan = await log._roller._create()
    await orphan.abort()
    await log.close()
    return orphan.ledger_id


async def written(client: Client, name: str) -> Position:
    async with client.open_log(name) as log:
        return await log.append(b"1")


async def test_a_page_that_is_missing_does_not_have_the_rest_of_the_log_swept(client: Client) -> None:
    lists = client._lists("a")
    await lists.create(custom={}, created_ms=1)
    ids = [await client._context.ledgers.allocate_id() for _ in range(600)]
    changed = await lists.change_now(
        *await lists.read(), lambda head: head.append(LogRow(each, each, 10**12) for each in ids)
    )
    position = await written(client, "a")
    (page, *_) = changed.head.rows.pages
    await client._store.delete(f"log-pages/a/{page.name}")
    left_over = await left_over_of(client, "b")
    report = await client.sweep_log_orphans(older_than_s=0)
    assert report.ledgers == (left_over,)  # of the log that can be read
    (failure,) = report.failures
    assert failure.startswith("log=a could not be swept: ")
    assert page.name in failure
    assert [record.data async for record in client.read_log("a", position)] == [b"1"]
    with pytest.raises(MetadataCorruptError, match=page.name):
        await client.truncate_log("a", (ids[1], 0))
    with pytest.raises(MetadataCorruptError, match=page.name):
        await client.log_metadata("a")
    with pytest.raises(MetadataCorruptError, match=page.name):
        [record async for record in client.read_log("a", Position(ids[1], 0))]


async def test_what_one_log_is_damaged_with_does_not_stop_the_sweep_of_another(client: Client) -> None:
    kept = []
    for tag in (b"no log's name!", b"\xff"):
        async with client.create_ledger(custom_metadata={"bookie-aio.log": tag}) as ledger:
            kept.append(ledger.ledger_id)
    await client._store.create("logs/a", b"{}")
    left_over = await left_over_of(client, "b")
    report = await client.sweep_log_orphans(older_than_s=0)
    assert report.ledgers == (left_over,)
    with pytest.raises(NoSuchLedgerError):
        await client.ledger_metadata(left_over)
    for ledger_id in kept:
        assert await client.ledger_metadata(ledger_id)
