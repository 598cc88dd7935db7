"""`cluster repair`: all that lacks copies now is made whole by one command, beside others that repair."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from client_aio.autorecovery.cluster_repair import ClusterRepair, Findings, LackingLedger
from client_aio.autorecovery.survey import all_metadata, survey
from client_aio.autorecovery.verification import Verification
from client_aio.autorecovery.worker import Worker
from client_aio.cli.exit_codes import Exit
from client_aio.config import MIB, AutoRecoveryConfig
from client_aio.core.audit import Condition, Seats
from metadata.access.repair_tasks import REASON_LOST, REASON_MISSING, RepairTask, RepairTasks, TaskRef
from metadata.errors import InvalidTransitionError
from tests.support.cli import TIMEOUT_S, Cli
from tests.support.cluster import Cluster
from tests.support.replicas import every_copy, flip, lose

if TYPE_CHECKING:
    from pathlib import Path


async def command(cli: Cli, code: int, *arguments: str) -> Any:
    """Run `cluster repair`, expect its exit code, and return its JSON."""
    process = cli.start("cluster", "repair", "-o", "json", *arguments)
    out, error = await asyncio.to_thread(process.communicate, b"", TIMEOUT_S)
    assert process.returncode == code, (process.returncode, out, error)
    return json.loads(out)


async def written(client: client_aio.Client, entries: int, size: int = 10) -> int:
    """Write entries to three of the bookies, close their ledger, and wait for all copies that can be made."""
    async with client.create_ledger() as writer:
        await writer.add_entries([b"%d " % entry_id + bytes(size) for entry_id in range(entries)])
    await every_copy(client, writer.ledger_id)
    return writer.ledger_id


async def conditions(client: client_aio.Client) -> set[Condition]:
    """Read every copy of every ledger."""
    verified = Verification(client._context).run(all_metadata(client._context))
    return {one.condition async for one in verified}


async def gone(client: client_aio.Client, bookie_id: str) -> None:
    """Wait until the session of a bookie that was killed has ended."""
    directory = client._context.pool.directory
    async with asyncio.timeout(TIMEOUT_S):
        while bookie_id in directory.available:
            await directory.wait_for_change(0.1)
            await directory.refresh()


async def test_a_command_that_was_killed_is_run_again_and_finds_the_rest(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        cli = Cli(cluster.uri)
        ids = [await written(client, 200, 10_000) for _ in range(3)]
        lost = (await client.ledger_metadata(ids[0])).last_fragment.bookies[0]
        naming = [one for one in ids if lost in (await client.ledger_metadata(one)).last_fragment.bookies]
        tasks = RepairTasks(client._context.ledgers.store)
        await tasks.create(TaskRef(2, ids[0], "t"), RepairTask({REASON_LOST: [lost]}, since_ms=0))
        await lose(cluster[lost])
        await gone(client, lost)
        planned = await command(cli, 0, "--dry-run")
        assert [one["ledger_id"] for one in planned["ledgers"]] == naming
        assert {(one["good_copies"], *one["replaced"]) for one in planned["ledgers"]} == {(2, lost)}
        assert (planned["lost"], planned["repaired"]) == ([lost], 0)

        # So slow that it is killed in the middle of its first ledger.
        slow = cli.start("cluster", "repair", "--rate", "0.5", "--at-once", "1")
        async with asyncio.timeout(TIMEOUT_S):
            while not await tasks.locked():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        slow.send_signal(signal.SIGKILL)
        await asyncio.to_thread(slow.communicate, b"", TIMEOUT_S)
        done = await command(cli, 0)
        assert (done["repaired"], done["failed"]) == (len(done["ledgers"]), 0)
        assert done["bytes_read"] > 0
        assert await tasks.refs() == []
        assert await conditions(client) == {Condition.HEALTHY}
        for ledger_id in ids:
            assert lost not in (await client.ledger_metadata(ledger_id)).last_fragment.bookies


async def test_a_ledger_that_another_worker_has_locked_is_waited_for(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client, 3)
        lost, *others = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
        await lose(cluster[lost])
        await gone(client, lost)
        repairing = ClusterRepair(client._context, bytes_per_s=MIB)
        found = await repairing.find(lambda _, __: None)
        assert [one.ledger_id for one in found.lacking] == [ledger_id]
        lock = await RepairTasks(client._context.ledgers.store).lock(ledger_id, "another worker")
        rows = repairing.repair(found, ledgers_at_once=2)
        first = asyncio.create_task(anext(rows))
        done, _ = await asyncio.wait([first], timeout=1.0)  # twice as long as a locked ledger rests
        assert not done
        # The other worker repairs it, and is done.
        await client.repair_ledger(ledger_id, replace=lost)
        await lock.close()
        one, outcome = await first
        assert (one.ledger_id, outcome.is_done, repairing.bytes_read) == (ledger_id, True, 0)
        await rows.aclose()
        assert (await survey(client._context)).under_replicated == {}
        assert set(others) < set((await client.ledger_metadata(ledger_id)).last_fragment.bookies)


async def test_too_few_bookies_fail_and_only_named_bookies_are_lost(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        cli = Cli(cluster.uri)
        ledger_id = await written(client, 3)
        await cluster["b3"].kill()
        await gone(client, "b3")
        failed = await command(cli, 1)
        (row,) = failed["ledgers"]
        assert (row["ledger_id"], row["is_done"], failed["failed"]) == (ledger_id, False, 1)
        assert "b3" in row["error"]
        await cluster["b3"].start()
        again = ClusterRepair(client._context, bytes_per_s=MIB)
        assert (await again.find(lambda _, __: None)).lacking == []
        with pytest.raises(InvalidTransitionError, match="bookie b1 runs, so it is not lost"):
            await ClusterRepair(client._context, bytes_per_s=MIB, lost=["b1"]).find(lambda _, __: None)


async def test_an_entry_that_no_bookie_returns_counts_once_and_has_no_good_copy(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client, 5)
        await cluster.end()
        for bookie in cluster.bookies.values():
            flip(bookie.directory, b"2 " + bytes(10), behind=4)
        await asyncio.gather(*(bookie.start() for bookie in cluster.bookies.values()))
        context = client._context
        assert await conditions(client) == {Condition.AT_RISK}
        cli = Cli(cluster.uri)
        failed = await command(cli, Exit.DAMAGED, "--yes")
        (row,) = failed["ledgers"]
        assert (row["ledger_id"], row["entries_lost"], row["good_copies"]) == (ledger_id, 1, 0)

        tasks = RepairTasks(context.ledgers.store)
        ref = TaskRef(3, ledger_id, "t")
        await tasks.create(ref, RepairTask({REASON_MISSING: ["b1"]}, 0))
        working = asyncio.create_task(Worker(context, AutoRecoveryConfig(), "w").run())
        async with asyncio.timeout(TIMEOUT_S):
            while not (await tasks.read(ref))[0].attempts:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        working.cancel()
        await asyncio.wait([working])
        found = await survey(context)
        assert (found.auto_recovery.by_copies, found.condition) == ({0: 1}, Condition.AT_RISK)
        process = cli.start("cluster", "status")
        out, _ = await asyncio.to_thread(process.communicate, b"", TIMEOUT_S)
        assert (process.returncode, b"at risk" in out) == (2, True), out


async def test_a_task_stays_where_the_bookie_that_it_names_does_not_answer(tmp_path: Path) -> None:
    impatient = client_aio.ClientConfig(connect_timeout_s=0.5, read_timeout_s=0.5)
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, config=impatient) as client,
    ):
        await cluster["b2"].kill()
        ledger_id = await written(client, 3)
        await cluster["b2"].start()
        tasks, ref = RepairTasks(client._context.ledgers.store), TaskRef(2, ledger_id, "t")
        await tasks.create(ref, RepairTask({REASON_MISSING: ["b3"]}, since_ms=0))
        lacking = LackingLedger(ledger_id, 1, Seats(("b2",), (), ("b3",)))
        cluster["b3"].stop()
        try:
            repairing = ClusterRepair(client._context, bytes_per_s=MIB)
            rows = repairing.repair(Findings([], [lacking], {}, 0, 0), ledgers_at_once=1)
            outcomes = [outcome async for _, outcome in rows]
        finally:
            cluster["b3"].resume()
        assert [(one.is_done, one.error) for one in outcomes] == [(False, "b3 does not answer")]
        assert await tasks.refs() == [ref]
        assert (await client.ledger_replicas(ledger_id))[1].entries_missing == 0
