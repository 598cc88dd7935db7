"""Log writers that die between any two steps, on real bookies: nothing is lost, and nothing left over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import client_aio
from client_aio.core.log_chain import TAG
from client_aio.log.add_ledgers import JOBS_LOG
from client_aio.spark.commits import sweep_orphans
from metadata.backends.uri import open_store
from tests.support.cluster import Cluster
from tests.support.mortal import MortalStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from client_aio import Client, Position

Acknowledged = list[tuple["Position", bytes]]
WITHOUT_END = 10**6


async def write_and_truncate(client: Client, name: str, acknowledged: Acknowledged) -> None:
    for life in range(2):
        async with client.open_log(name, custom_metadata={"life": b"%d" % life}) as log:
            for number in range(3):
                data = b"%d.%d" % (life, number)
                acknowledged.append((await log.append(data), data))
                await log.roll()
            await log.flush()
            first, _ = acknowledged[-2]
            await client.truncate_log(name, first)


async def write_and_delete(client: Client, name: str, acknowledged: Acknowledged) -> None:
    async with client.open_log(name) as log:
        for _ in range(3):
            await log.append(b"old")
            await log.roll()
    await client.delete_log(name)
    async with client.open_log(name) as log:
        acknowledged.append((await log.append(b"new"), b"new"))


async def add_and_replace(client: Client, name: str, acknowledged: Acknowledged) -> None:
    for batch in range(3):
        ids = []
        for _ in range(2):
            async with client.create_ledger(custom_metadata={JOBS_LOG: name.encode()}) as ledger:
                await ledger.add_entry(b"%d" % batch)
            ids.append(ledger.ledger_id)
        added = await client.add_to_log(name, ids, transaction=("q", batch), replace=batch == 2)
        if batch == 2:
            acknowledged.clear()
        acknowledged.extend((client_aio.Position(row.id, 0), b"%d" % batch) for row in added.rows)


async def live_and_die(
    cluster: Cluster, lives: int, name: str, life: Callable[[Client, str, Acknowledged], Awaitable[None]]
) -> tuple[Acknowledged, int, bool]:
    """Let a client live for so many writes; gives what was acknowledged, and whether it came to its end."""
    acknowledged: Acknowledged = []
    async with await open_store(cluster.uri) as inner:
        store = MortalStore(inner, lives)
        try:
            async with client_aio.connect(store) as client:
                living = asyncio.ensure_future(life(client, name, acknowledged))
                dying = asyncio.create_task(store.dead.wait())
                await asyncio.wait([living, dying], return_when=asyncio.FIRST_COMPLETED, timeout=30)
                is_done = living.done() and not store.dead.is_set()
                if is_done:
                    living.result()
                for task in (living, dying):
                    task.cancel()
                await asyncio.gather(living, dying, return_exceptions=True)
        finally:
            store.dead.clear()
    return acknowledged, store.writes, is_done


async def check_after(uri: str, client: Client, name: str, acknowledged: Acknowledged) -> None:
    """Take the log over, and look whether it has everything, once and in order, and nothing is left over."""
    async with client.open_log(name) as log:
        last = await log.append(b"after")
    records = [(record.position, record.data) async for record in client.read_log(name)]
    assert [position for position, _ in records] == sorted({position for position, _ in records})
    assert records[-1] == (last, b"after")
    begins_at = (await client.log_metadata(name)).begins_at
    assert [each for each in acknowledged if each[0] >= begins_at and each not in records] == []
    await client.sweep_log_orphans(older_than_s=0)
    await sweep_orphans(uri, log=name, grace_s=0)  # of those that were made to be added
    listed = {row.ledger_id for row in (await client.log_metadata(name)).rows}
    made = set()
    async for ledger_id in client.list_ledgers():
        custom = (await client.ledger_metadata(ledger_id)).custom
        if name.encode() in (custom.get(TAG), custom.get(JOBS_LOG)):
            made.add(ledger_id)
    assert made <= listed
    assert records == [(record.position, record.data) async for record in client.read_log(name)]


async def check_every_step(
    tmp_path: Path, life: Callable[[Client, str, Acknowledged], Awaitable[None]], steps_min: int
) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        acknowledged, steps, is_done = await live_and_die(cluster, WITHOUT_END, "whole", life)
        assert is_done
        assert steps >= steps_min
        await check_after(cluster.uri, client, "whole", acknowledged)
        await client.delete_log("whole")
        for lives in range(1, steps + 1):
            name = f"log-{lives}"
            acknowledged, _, _ = await live_and_die(cluster, lives, name, life)
            await check_after(cluster.uri, client, name, acknowledged)
            await client.delete_log(name)
        assert [ledger_id async for ledger_id in client.list_ledgers()] == []


async def test_a_crash_between_any_two_steps_of_opening_rolling_and_truncating(tmp_path: Path) -> None:
    await check_every_step(tmp_path, write_and_truncate, 25)


async def test_a_crash_between_any_two_steps_of_deleting_and_making_anew(tmp_path: Path) -> None:
    await check_every_step(tmp_path, write_and_delete, 15)


async def test_a_crash_between_any_two_steps_of_adding_ledgers_and_replacing_them(tmp_path: Path) -> None:
    await check_every_step(tmp_path, add_and_replace, 15)
