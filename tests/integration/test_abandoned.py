"""Ledgers whose writer or whose recovery is gone are recovered, on demand only, and no other ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio.autorecovery.auditor import Auditor
from client_aio.autorecovery.cluster_repair import ClusterRepair
from client_aio.autorecovery.service import AutoRecovery
from client_aio.autorecovery.worker import Worker
from client_aio.config import AutoRecoveryConfig
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from metadata.access.repair_tasks import REASON_ABANDONED, RepairTask, RepairTasks, TaskRef
from tests.integration.test_autorecovery import QUICK, until, until_whole
from tests.support.cluster import BookieProcess, Cluster
from tests.support.replicas import lose

if TYPE_CHECKING:
    from pathlib import Path

GRACE_S = 0.4
ABANDONED = RepairTask({REASON_ABANDONED: []}, 0)


async def state_of(client: client_aio.Client, ledger_id: int) -> client_aio.LedgerState:
    return (await client._context.ledgers.read(ledger_id, sync=True))[0].state


async def begin_recovery(client: client_aio.Client, ledger_id: int) -> None:
    held = VersionedLedgerMetadata(client._context, *await client._context.ledgers.read(ledger_id))
    await held.update(lambda now: now.begin_recovery())


async def test_ledgers_that_nobody_writes_or_recovers_are_ended_and_get_their_copies(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client_aio.connect(cluster.uri) as other:
            ledgers = [await other.create_ledger(ensemble_size=3) for _ in range(2)]
            unbounded = await other.open_unbounded_ledger("u", ensemble_size=3)
            for each in (*ledgers, unbounded):
                await each.add_entry(b"kept")
                await each.abort()
        left, recovering = (each.ledger_id for each in ledgers)
        lost = (await client.ledger_metadata(left)).last_fragment.bookies[0]
        await begin_recovery(client, recovering)
        await lose(cluster[lost])
        term = (await client._context.ledgers.read(unbounded.ledger_id))[0].term
        named = (await client.ledger_metadata(unbounded.ledger_id)).last_fragment.bookies

        async def are_ended() -> bool:
            states = [await state_of(client, each) for each in (left, recovering)]
            now, _ = await client._context.ledgers.read(unbounded.ledger_id)
            return set(states) == {client_aio.LedgerState.CLOSED} and (lost not in named or now.term > term)

        async with AutoRecovery(client, AutoRecoveryConfig(**QUICK, recover_after_s=GRACE_S)):
            await until(are_ended)
            await until_whole(client, [left, recovering, unbounded.ledger_id])
        for ledger_id in (left, recovering):
            reader = await client.open_ledger(ledger_id)
            assert [one.data async for one in reader.read(0, 0)] == [b"kept"]
            assert lost not in (await client.ledger_metadata(ledger_id)).last_fragment.bookies


async def test_ledgers_that_may_have_a_writer_are_not_abandoned(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        empty, busy, left = [await client.create_ledger(ensemble_size=4) for _ in range(3)]
        for each in (busy, left):
            await each.add_entry(b"x")
        cluster.bookies["b5"] = BookieProcess("b5", tmp_path, cluster.uri)
        await cluster["b5"].start()
        directory = client._context.pool.directory
        await directory.refresh()
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK, recover_after_s=0.001), "a")
        await auditor._pass(0.0)
        ids = [each.ledger_id for each in (empty, busy, left)]
        assert auditor._abandoned is not None
        assert (auditor.index.unsettled([]), auditor.index.unsettled(["b1"])) == ([], ids)

        async def look() -> set[int]:
            assert auditor._abandoned is not None
            found = await auditor._abandoned.look(ids, ["b1"], 100)
            await asyncio.sleep(0.002)
            return set(found)

        assert await look() == set(), "b1 runs"
        await cluster["b1"].kill()

        async def is_gone() -> bool:
            return "b1" not in directory.available

        await until(is_gone)
        assert await look() == set(), "seen once"
        spare = directory._available.pop("b5")
        assert await look() == set(), "no other bookie could take the seat"
        directory._available["b5"] = spare
        assert await look() == set(), "seen once"
        await busy.add_entry(b"y")
        assert await look() == {left.ledger_id}
        assert await state_of(client, left.ledger_id) is client_aio.LedgerState.OPEN
        for each in (empty, busy, left):
            await each.abort()


@pytest.mark.parametrize("password", [b"", b"secret"])
async def test_a_task_fences_no_writer_that_has_moved_and_reports_a_password(
    cluster: Cluster, password: bytes
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        digest = "hmac-sha256" if password else "crc32c"
        ledger = await client.create_ledger(digest=digest, password=password)
        await ledger.add_entry(b"x")
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        assert (await worker.attempt(ledger.ledger_id, ["b9"], ABANDONED)).is_done
        await ledger.add_entry(b"y")
        await ledger.abort()
        await begin_recovery(client, ledger.ledger_id)
        outcome = await worker.attempt(ledger.ledger_id, ["b9"], ABANDONED)
        state = await state_of(client, ledger.ledger_id)
        if password:
            assert "password" in outcome.error
            assert ABANDONED.failed(outcome.error, 0, outcome.doubted).reasons == ABANDONED.reasons
            assert state is client_aio.LedgerState.IN_RECOVERY
        else:
            assert outcome.is_done
            assert state is client_aio.LedgerState.CLOSED


async def test_a_repair_by_hand_leaves_abandoned_ledgers_to_workers(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(ensemble_size=2, write_quorum=2)
        await ledger.add_entry(b"x")
        held = VersionedLedgerMetadata(client._context, *await client._context.ledgers.read(ledger.ledger_id))
        first, second = held.current.last_fragment.bookies
        (empty,) = {"b1", "b2", "b3"} - {first, second}
        # The fragment before the last one lacks a copy.
        await held.update(lambda now: now.change_ensemble(1, now.last_fragment.bookies))
        await held.update(lambda now: now.replace_bookie(0, first, empty))
        tasks, ref = RepairTasks(client._context.ledgers.store), TaskRef(1, ledger.ledger_id, "t")
        await tasks.create(ref, ABANDONED)
        repairing = ClusterRepair(client._context, bytes_per_s=1 << 20)
        found = await repairing.find(lambda *_: None)
        done = [outcome async for _, outcome in repairing.repair(found, ledgers_at_once=1)]
        assert [outcome.is_done for outcome in done] == [True]
        assert await tasks.refs() == [ref]
        assert await state_of(client, ledger.ledger_id) is client_aio.LedgerState.OPEN
        await ledger.abort()
