"""A disk that is full in earnest: a bookie on a tmpfs that is too small for what it is sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from benchmarks.crash_recovery import Run, check, recover
from benchmarks.crash_writer import Writer
from bookie_aio.wire.messages import Stop
from tests.support.cluster import Cluster
from tests.support.mounts import needs_mounts, small_disk
from tests.support.realfaults import WAIT_S, registered, replaced
from tests.support.replicas import stop_of

if TYPE_CHECKING:
    from pathlib import Path

IN_FLIGHT = 200
VICTIM = "b1"


async def ledger_on_victim(client: client_aio.Client) -> client_aio.LedgerWriter:
    """Create a ledger whose ensemble has the bookie with the small disk."""
    while True:
        ledger = await client.create_ledger()
        if VICTIM in ledger.metadata.last_fragment.bookies:
            return ledger
        await ledger.close()


async def test_a_bookie_on_a_full_disk_serves_and_fences_and_comes_back(tmp_path: Path) -> None:
    needs_mounts()
    cluster = Cluster(tmp_path, bookies=4)
    victim = cluster[VICTIM]
    victim.module = "tests.support.smallstorage"
    async with (
        small_disk(victim.directory, megabytes=14) as victim.prefix,
        cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri, explicit_lac_delay_s=60) as reticent,
    ):
        abandoned = await ledger_on_victim(reticent)  # the LAC is behind: there is something to recover
        lost_writer = Writer(abandoned, 1, IN_FLIGHT)
        await asyncio.wait_for(lost_writer.run(300), WAIT_S)

        filler = await ledger_on_victim(client)
        writer = Writer(filler, 2, IN_FLIGHT)
        writing = asyncio.create_task(writer.run(20_000))
        await registered(client, VICTIM, writable=False)
        assert "bookie is read-only: no space left" in victim.log.read_text()
        await replaced(filler, writer, VICTIM)
        assert await stop_of(client, VICTIM, filler.ledger_id, 0) is Stop.END

        # With one other bookie left, a recovery needs a fence of the full one, and recovery adds on it.
        await asyncio.wait_for(writing, WAIT_S)
        await filler.close()
        other = next(one for one in abandoned.metadata.last_fragment.bookies if one != VICTIM)
        for bookie_id in {"b2", "b3", "b4"} - {other}:
            await cluster[bookie_id].kill()
        run = Run(1, abandoned.ledger_id, 300, 300)
        await recover(cluster.uri, run, 1)
        with pytest.raises(client_aio.BookKeeperError):
            await asyncio.wait_for(abandoned.add_entry(b"late"), WAIT_S)
        await victim.kill()
        await victim.start()  # on the full disk
        await check(cluster.uri, run)

        await cluster.end()
        await cluster.start()
        filled = Run(2, filler.ledger_id, 20_000, 20_000, kept=20_000)
        await check(cluster.uri, filled)
        await registered(client, VICTIM, writable=False)
        await client.delete_ledger(filler.ledger_id)
        await registered(client, VICTIM, writable=True)
        async with client.create_ledger(ensemble_size=4, write_quorum=4, ack_quorum=4) as another:
            await another.add_entry(b"there is room again")
        await check(cluster.uri, run)
