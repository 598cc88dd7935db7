"""`ledger verify`: every copy is read, what is wrong is named, and the exit code tells how bad it is."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import client_aio
from client_aio.autorecovery.cluster_repair import ClusterRepair
from client_aio.autorecovery.survey import all_metadata
from client_aio.autorecovery.verification import Verification
from client_aio.autorecovery.worker import Outcome
from client_aio.config import MIB
from client_aio.core.audit import Condition
from tests.support.cli import TIMEOUT_S, Cli
from tests.support.cluster import Cluster
from tests.support.replicas import flip

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from pathlib import Path

    from client_aio.autorecovery.verification import VerifiedLedger
    from metadata.errors import MetadataCorruptError
    from metadata.model.ledger import LedgerMetadata

HEALTHY, FAILURE, AT_RISK = 0, 1, 2


async def command(cli: Cli, code: int, *arguments: str) -> Any:
    """Run a command, expect its exit code, and return its JSON."""
    process = cli.start(*arguments, "-o", "json")
    out, error = await asyncio.to_thread(process.communicate, b"", TIMEOUT_S)
    assert process.returncode == code, (process.returncode, out, error)
    return json.loads(out)


async def verified(
    client: client_aio.Client, ledgers: Iterable[tuple[int, LedgerMetadata]] | None = None
) -> list[VerifiedLedger]:
    """Verify all ledgers in this process, or some by metadata that were read before."""

    async def given() -> AsyncGenerator[tuple[int, LedgerMetadata | MetadataCorruptError], None]:
        for each in ledgers or ():
            yield each

    source = all_metadata(client._context) if ledgers is None else given()
    return [one async for one in Verification(client._context).run(source)]


async def written(client: client_aio.Client, text: str) -> int:
    """Write two entries, and close their ledger."""
    async with client.create_ledger() as writer:
        for entry_id in range(2):
            await writer.add_entry(f"{text} ledger, entry {entry_id}".encode())
    return writer.ledger_id


async def test_damage_and_loss_are_told_apart_and_counted_by_their_copies(tmp_path: Path) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ids = [await written(client, text) for text in ("first", "second")]
        async with client.create_ledger() as writer:
            await writer.add_entry(b"of an open ledger")
            good = await command(cli, HEALTHY, "ledger", "verify")
        assert (good["condition"], good["ledgers"], good["intact"], good["missing"]) == ("healthy", 3, 12, 0)
        assert (good["ends_left_out"], good["bad_ledgers"]) == (1, [])
        assert good["bytes_read"] > 0

        await cluster["b1"].end()
        flip(tmp_path / "b1", b"second ledger, entry 1")
        seen = await command(cli, FAILURE, "bookie", "inspect", str(tmp_path / "b1"))
        assert (seen["cookie"]["bookie_id"], seen["is_damaged"]) == ("b1", True)
        assert [one["ledger_id"] for one in seen["damage"]] == [ids[1]]
        await cluster["b1"].start()
        first, second, third = await verified(client)
        assert (first.condition, second.condition, third.condition) == (
            Condition.HEALTHY,
            Condition.DEGRADED,
            Condition.HEALTHY,
        )
        (replica,) = second.bad
        assert (replica.bookie_id, replica.status, replica.first_bad_entry) == ("b1", "damaged", 1)

        await cluster["b2"].kill()
        found = await command(cli, AT_RISK, "ledger", "verify")
        by_id = {one["ledger_id"]: one for one in found["bad_ledgers"]}
        assert [by_id[one]["good_copies"] for one in ids] == [2, 1]
        assert found["by_condition"] == {"degraded": 2, "at risk": 1}
        replicas = {one["bookie"]: one for one in by_id[ids[1]]["replicas"]}
        assert replicas["b1"]["bad_runs"] == [[1, 1, 1]]
        assert (replicas["b2"]["status"], replicas["b2"]["missing"]) == ("unreachable", 2)

        await cluster["b2"].start()
        # b1 has marked the ledger when its damaged entry was read. So the damage is mended with all the rest.
        repairing = ClusterRepair(client._context, bytes_per_s=MIB)
        lacking = await repairing.find(lambda _, __: None)
        assert [(one.ledger_id, one.seats.in_place) for one in lacking.lacking] == [(ids[1], ("b1",))]
        assert [outcome async for _, outcome in repairing.repair(lacking, ledgers_at_once=1)] == [
            Outcome(is_done=True)
        ]
        assert {one.condition for one in await verified(client)} == {Condition.HEALTHY}


async def test_a_ledger_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        repaired, deleted = [await written(client, text) for text in ("repaired", "deleted")]
        before = [(one, await client.ledger_metadata(one)) for one in (repaired, deleted)]
        lost = before[0][1].last_fragment.bookies[0]
        await cluster[lost].kill()
        await client.repair_ledger(repaired, replace=lost)
        await client.delete_ledger(deleted)
        (found,) = await verified(client, before)
        assert (found.ledger_id, found.condition, found.bad) == (repaired, Condition.HEALTHY, [])
        assert (found.owed, found.intact) == (6, 6)


def test_rows_come_as_they_are_found_and_the_summary_last(cli: Cli) -> None:
    ledger = cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip()
    lines = cli.run("ledger", "verify", ledger, "--rate", "50", "-o", "jsonl").splitlines()
    (last,) = map(json.loads, lines)
    assert (last["summary"]["ledgers"], last["summary"]["intact"]) == (1, 3)
    assert b"not both" in cli.run("ledger", "verify", ledger, "--bookie", "b1", code=2)
    assert b"no ledger" in cli.run("ledger", "verify", "987654321", code=3)
