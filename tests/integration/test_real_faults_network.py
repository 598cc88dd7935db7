"""Packets lost one way, on a real network: a bookie that hears and is not heard, and the other way round."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

import client_aio
from benchmarks.crash_recovery import Run, check
from benchmarks.crash_writer import Writer
from benchmarks.processes import Child
from client_aio import LedgerState
from tests.support.cluster import Cluster
from tests.support.netns import HERE, Network, needs_networks
from tests.support.realfaults import WAIT_S, acknowledged, replaced

if TYPE_CHECKING:
    from pathlib import Path

IN_FLIGHT = 200
BOOKIES = ("b1", "b2", "b3", "b4")
RECOVERER = "recoverer"


async def recover_from(network: Network, cluster: Cluster, ledger_id: int, log: Path) -> None:
    """Recover a ledger by a process on a host of its own."""
    async with await Child.start(
        *network.prefix(RECOVERER), sys.executable, "-m", "client_aio.cli",
        "ledger", "recover", str(ledger_id), "--metadata", cluster.uri,
        log=log,
    ) as child:  # fmt: skip
        child.ignore_output()
        assert await asyncio.wait_for(child.wait(), WAIT_S) == 0, child.log_tail()


@pytest.mark.parametrize("hears", [True, False], ids=["hears and is not heard", "is heard and does not hear"])
async def test_a_bookie_behind_half_a_link(hears: bool, tmp_path: Path) -> None:
    """The writer replaces it and goes on; a recoverer that hears all of them ends the writer's ledger."""
    needs_networks()
    cluster = Cluster(tmp_path, bookies=len(BOOKIES))
    async with Network(*BOOKIES, RECOVERER) as network:
        for bookie_id, bookie in cluster.bookies.items():
            bookie.prefix = network.prefix(bookie_id)
            bookie.listen = f"{network.address(bookie_id)}:0"
            bookie.arguments = ["--allow-remote-without-auth"]
        async with cluster, client_aio.connect(cluster.uri, add_timeout_s=1.0) as client:
            ledger = await client.create_ledger()
            victim = ledger.metadata.last_fragment.bookies[0]
            writer = Writer(ledger, 1, IN_FLIGHT)
            writing = asyncio.create_task(writer.run())
            await acknowledged(writer, 1000)

            lost = (victim, HERE) if hears else (HERE, victim)
            await network.drop(*lost)
            await replaced(ledger, writer, victim)

            await recover_from(network, cluster, ledger.ledger_id, tmp_path / "recoverer.log")
            await asyncio.wait_for(writing, WAIT_S)
            assert isinstance(writer.failure, client_aio.LedgerFencedError)
            metadata = await client.ledger_metadata(ledger.ledger_id)
            assert metadata.state is LedgerState.CLOSED
            assert metadata.last_entry is not None
            run = Run(1, ledger.ledger_id, writer.issued, writer.acknowledged + 1, metadata.last_entry + 1)

            await check(cluster.uri, run)  # while the link is what it is
