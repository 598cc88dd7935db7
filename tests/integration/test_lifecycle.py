"""Operators' orders to real bookies: read-only, decommissioned, replaced."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from client_aio.autorecovery import drain
from client_aio.autorecovery.drain import Drain, DrainProgress, cancel_drain
from client_aio.autorecovery.survey import survey
from client_aio.config import AutoRecoveryConfig
from client_aio.core.audit import Condition, Ties
from client_aio.core.recovery import entered
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from metadata.access.bookies import (
    DRAINING,
    READ_ONLY,
    Order,
    Orders,
    SetBack,
    SetBacks,
    available_bookies,
    change_order,
)
from metadata.access.repair_tasks import BY_HAND, RepairTasks, WorkerRecord
from metadata.errors import (
    InvalidTransitionError,
    LedgerRepairError,
    NoSuchKeyError,
    NotEnoughBookiesError,
)
from metadata.ids import KEY_COOKIES, KEY_ORDERS, KEY_REPAIR_LOCKS, available_key, ledger_key
from metadata.model.ledger import Absent, LedgerMetadata
from tests.integration.test_autorecovery import faults_of, until, written
from tests.support.cli import Cli
from tests.support.cluster import BookieProcess, Cluster
from tests.support.replicas import WAIT_S, lose

if TYPE_CHECKING:
    from pathlib import Path

    from metadata.store import Version, Versioned


async def written_unbounded(client: client_aio.Client) -> int:
    """Write an unbounded ledger of two fragments; gives its id."""
    async with client.open_unbounded_ledger("changes") as ledger:
        await ledger.add_entries(b"entry %d" % entry_id for entry_id in range(50))
        await ledger.roll()
        await ledger.add_entry(b"in the last fragment")
    return ledger.ledger_id


async def order(client: client_aio.Client, bookie: str, mode: str) -> None:
    """Order a bookie, or take the order back with ""; wait until the bookie says that it obeys."""
    store = client._context.ledgers.store
    await change_order(store, bookie, lambda _: Order(mode) if mode else None)

    async def obeys() -> bool:
        return (await available_bookies(store))[bookie].order == mode

    await until(obeys)


@pytest.mark.parametrize(("is_idle", "ack_quorum"), [(False, 2), (True, 2), (True, 3)])
async def test_writers_move_off_a_read_only_bookie_without_a_failed_add(
    tmp_path: Path, is_idle: bool, ack_quorum: int
) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=ack_quorum) as writer,
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
        assert out == {
            "bookie_id": "b2",
            "read_only": True,
            "running": False,
            "obeys": None,
            "dry_run": False,
        }
        for _ in range(2):
            await cluster["b2"].start()
            (row,) = [
                each
                for each in await asyncio.to_thread(cli.rows, "bookie", "list")
                if each["bookie_id"] == "b2"
            ]
            assert (row["state"], row["order"]) == ("read-only", "read-only")
            found = await survey(client._context)
            assert found.condition is Condition.HEALTHY, found.problems
            assert "bookie b2 is read-only, by an operator's order" in [each.text for each in found.problems]
            await cluster["b2"].end()
        await cluster["b2"].start()
        out = await asyncio.to_thread(cli.rows, "bookie", "read-only", "off", "b2")
        assert out == {
            "bookie_id": "b2",
            "read_only": False,
            "running": True,
            "obeys": True,
            "dry_run": False,
        }
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


async def test_a_bookie_is_not_drained_by_metadata_that_may_be_older_than_what_it_holds(
    tmp_path: Path,
) -> None:
    """They may name the bookies of before a repair, and the drained one has the only copy."""
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        store, cli = client._context.ledgers.store, Cli(cluster.uri)
        found = await SetBacks.read(store)
        await found.replace(store, [SetBack("an event", "b2", 0, 1000, ["b1", "b2"])])
        with pytest.raises(InvalidTransitionError, match="was set back to an older copy"):
            await Drain(client._context, "b3").run()
        assert "b3" in await cookies(client)
        await asyncio.to_thread(cli.rows, "bookie", "accept-metadata", "--yes")
        await asyncio.to_thread(cli.run, "bookie", "decommission", "b3")
        assert (await available_bookies(store)).keys() == {"b1", "b2", "b4"}


async def test_a_bookie_that_does_not_say_what_it_holds_is_tied_by_every_recovery(tmp_path: Path) -> None:
    """A recovery may have stored entries on it, and names it only when it closes the ledger."""
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        writer = await client.create_ledger()
        await writer.add_entry(b"0")
        (other,) = {"b1", "b2", "b3", "b4"} - set(writer.metadata.last_fragment.bookies)
        await VersionedLedgerMetadata(
            client._context, *await client._context.ledgers.read(writer.ledger_id)
        ).update(entered)
        assert (await Drain(client._context, other).plan()).ties == {}
        await cluster[other].kill()

        async def is_gone() -> bool:
            return other not in client.bookies

        await until(is_gone)
        assert (await Drain(client._context, other).plan()).ties == {writer.ledger_id: Ties.RECOVERY}
        await writer.abort()


async def cookies(client: client_aio.Client) -> list[str]:
    """Return the bookies that have a cookie, retired or not."""
    return await client._context.ledgers.store.children(KEY_COOKIES)


async def named(client: client_aio.Client) -> set[str]:
    """Return the bookies that some fragment of some ledger names."""
    found = set()
    async for ledger_id in client.list_ledgers():
        metadata = await client.ledger_metadata(ledger_id)
        found.update(name for fragment in metadata.fragments for name in fragment.bookies)
    return found


@pytest.mark.parametrize("is_alive", [True, False])
async def test_a_decommissioned_bookie_ends_empty_and_is_refused_afterwards(
    tmp_path: Path, is_alive: bool
) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client.create_ledger() as idle,
        client.create_ledger() as writer,
    ):
        ledger_ids = [await written(client) for _ in range(4)]
        ledger_ids.append(await written(client, count=0))
        for each in (idle, writer):
            await each.add_entry(b"before")
        bookie = writer.metadata.last_fragment.bookies[0]
        if not is_alive:
            await lose(cluster[bookie])
        writing = asyncio.create_task(_write(writer))
        report = await Drain(client._context, bookie, settle_s=0.5).run()
        writing.cancel()
        assert await writing > 0
        assert report.ledgers_moved >= 1
        assert bookie not in await named(client) | set(await cookies(client))
        assert await faults_of(client, ledger_ids) == []
        if is_alive:
            assert await cluster[bookie].child.process.wait() == 1
            with pytest.raises(RuntimeError, match="was decommissioned"):
                await cluster[bookie].start()
        with pytest.raises(InvalidTransitionError, match="has left the cluster already"):
            await Drain(client._context, bookie).run()


async def _write(writer: client_aio.LedgerWriter) -> int:
    """Add entries until cancelled; an add that fails fails this."""
    count = 0
    try:
        while True:
            await writer.add_entry(b"beside")
            count += 1
    except asyncio.CancelledError:
        return count


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_a_drain_that_is_interrupted_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_ids = [await written(client, count=500) for _ in range(4)]
        bookie = (await client.ledger_metadata(ledger_ids[0])).last_fragment.bookies[0]
        cli, store = Cli(cluster.uri), client._context.ledgers.store
        process = cli.start("bookie", "decommission", bookie, "--rate", "0.05")
        async with asyncio.timeout(WAIT_S), aclosing(store.watch(KEY_REPAIR_LOCKS)) as changes:
            async for _ in changes:
                if await store.children(KEY_REPAIR_LOCKS):
                    break
        process.send_signal(how)
        _, said = await asyncio.to_thread(process.communicate)
        if how is signal.SIGINT:
            assert f"bookie {bookie} stays draining".encode() in said
            assert f"bookie decommission --cancel {bookie}".encode() in said
            assert process.returncode == 130
        assert bookie in await named(client)
        out = await asyncio.to_thread(cli.rows, "bookie", "decommission", bookie)
        assert out["bookie_id"] == bookie
        assert bookie not in await named(client) | set(await cookies(client))
        assert await faults_of(client, ledger_ids) == []


async def test_a_drain_overlooks_no_bookie_that_has_just_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata server lags: before a sync it does not know of the registration."""
    async with Cluster(tmp_path, bookies=1) as cluster, client_aio.connect(cluster.uri) as client:
        store, key, synced = client._context.ledgers.store, available_key("b1"), set[str]()
        real = store.read

        async def read(wanted: str) -> Versioned:
            if wanted == key and key not in synced:
                raise NoSuchKeyError(f"there is no {key}")
            return await real(wanted)

        async def sync(wanted: str) -> None:
            synced.add(wanted)

        monkeypatch.setattr(store, "read", read)
        monkeypatch.setattr(store, "sync", sync)
        assert await Drain(client._context, "b1")._is_registered()


async def test_a_drain_whose_order_is_taken_back_removes_nothing(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as writer:
            await writer.add_entry(b"x")
        bookie = writer.metadata.last_fragment.bookies[0]
        draining = asyncio.create_task(Drain(client._context, bookie, settle_s=30.0).run())

        async def is_empty() -> bool:
            return bookie not in await named(client)

        await until(is_empty)
        assert await cancel_drain(client._context, bookie)
        with pytest.raises(InvalidTransitionError, match="taken back"):
            await draining
        assert bookie in await cookies(client)
        await order(client, bookie, "")


async def test_a_bookie_without_substitutes_does_not_leave(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id, cli = await written(client), Cli(cluster.uri)
        out = await asyncio.to_thread(cli.run, "bookie", "decommission", "b2", code=4)
        assert b"1 ledgers have no other bookie to move to" in out
        assert f"({ledger_id})".encode() in out
        process = cli.start("bookie", "decommission", "b2", "--dry-run", "-o", "json")
        plan, _ = await asyncio.to_thread(process.communicate)
        assert (process.returncode, json.loads(plan)["stuck"]) == (4, [ledger_id])
        assert client.bookies["b2"].is_writable, "a refusal changes nothing"


async def test_a_bookie_does_not_leave_where_the_others_are_too_small_for_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_ids = [await written(client) for _ in range(3)]
        found = [await client.ledger_metadata(one) for one in ledger_ids]
        bookie = found[0].last_fragment.bookies[0]
        plan = await Drain(client._context, bookie).plan()
        lengths = [one.length or 0 for one in found if bookie in one.last_fragment.bookies]
        assert plan.least_bytes == sum(lengths) > 0
        assert plan.free_bytes > plan.least_bytes
        assert not plan.is_refused
        monkeypatch.setattr(drain, "has_room", lambda *_: False)
        with pytest.raises(NotEnoughBookiesError, match=f"take {plan.least_bytes:,} bytes at least"):
            await Drain(client._context, bookie).run()
        assert client.bookies[bookie].is_writable, "a refusal changes nothing"
        assert not (await Orders.read(client._context.ledgers.store)).by_bookie


@pytest.mark.parametrize("is_alive", [True, False])
async def test_a_bookie_is_replaced_by_the_one_that_was_named(tmp_path: Path, is_alive: bool) -> None:
    async with Cluster(tmp_path, bookies=5) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_ids = [await written(client) for _ in range(5)]
        old, new, *_ = sorted(await named(client))
        before = {one: (await client.ledger_metadata(one)).last_fragment.bookies for one in ledger_ids}
        if not is_alive:
            await lose(cluster[old])
        report = await Drain(client._context, old, successor=new, settle_s=0.5).run()
        assert report.successor == new
        for ledger_id, bookies in before.items():
            after = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            if old in bookies and new not in bookies:
                assert after == tuple(new if name == old else name for name in bookies)
            assert old not in after
        assert await faults_of(client, ledger_ids) == []


async def test_ledgers_of_dead_writers_are_closed_or_taken_over_on_demand_only(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client_aio.connect(cluster.uri) as other:
            writer = await other.create_ledger()
            await writer.add_entry(b"acknowledged")
            unbounded = await other.open_unbounded_ledger("changes")
            await unbounded.add_entry(b"acknowledged")
        cluster.bookies["b4"] = BookieProcess("b4", tmp_path, cluster.uri)
        await cluster["b4"].start()
        with pytest.raises(InvalidTransitionError, match=f"ledger {writer.ledger_id}: it is open"):
            await Drain(client._context, "b2", settle_s=0.1, stall_s=0.5).run()
        report = await Drain(client._context, "b2", settle_s=0.1, recover_after_s=0.2).run()
        assert report.ledgers_recovered == 2
        for ledger_id in (writer.ledger_id, unbounded.ledger_id):
            metadata = await client.ledger_metadata(ledger_id)
            assert metadata.is_closed is (ledger_id == writer.ledger_id)
            async with client.open_ledger(ledger_id) as reader:
                assert [entry.data async for entry in reader.read(0, 0)] == [b"acknowledged"]
        assert "b2" not in await named(client)


async def test_a_repair_names_no_bookie_that_was_ordered_to_leave_before_it_looked(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=5) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client)
        lost, *others = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
        target, _ = sorted(set(cluster.bookies) - {lost, *others})
        store = client._context.ledgers.store
        sync = store.sync

        async def sync_after_the_order(key: str) -> None:
            if key == KEY_ORDERS:
                await change_order(other, target, lambda _: Order(DRAINING))
            await sync(key)

        async with client_aio.connect(cluster.uri) as operator:
            other = operator._context.ledgers.store
            store.sync = sync_after_the_order
            with pytest.raises(LedgerRepairError, match=f"bookie {target} was ordered to leave"):
                await client.repair_ledger(ledger_id, replace=lost, by=target)
        assert target not in await named(client)
        assert await faults_of(client, [ledger_id]) == []


@pytest.mark.parametrize("is_unbounded", [False, True])
async def test_a_compare_and_set_that_comes_late_names_no_bookie_that_has_left(
    tmp_path: Path, is_unbounded: bool
) -> None:
    """The repair's target leaves, from order to removal, while the compare-and-set is under way."""
    async with Cluster(tmp_path, bookies=5) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await (written_unbounded if is_unbounded else written)(client)
        before = (await client.ledger_metadata(ledger_id)).fragments[0].bookies
        removed: list[str] = []
        async with client_aio.connect(cluster.uri) as repairer:
            store = repairer._context.ledgers.store
            compare_and_set = store.compare_and_set

            async def set_after_the_removal(key: str, value: bytes, *args: Any, **given: Any) -> Version:
                if key == ledger_key(ledger_id) and not removed:
                    wanted = LedgerMetadata.from_json(value).fragments[0].bookies
                    removed.extend(set(wanted) - set(before))
                    await Drain(client._context, removed[0], settle_s=0.1, recover_after_s=0.1).run()
                return await compare_and_set(key, value, *args, **given)

            store.compare_and_set = set_after_the_removal
            report = await repairer.repair_ledger(ledger_id, replace=before[0])
        (target,) = removed
        assert report.fragments[0].replacement not in {target, *before}
        named_now = [each.bookies for each in (await client.ledger_metadata(ledger_id)).fragments]
        assert not any(target in bookies for bookies in named_now)
        assert await faults_of(client, [ledger_id]) == []


async def test_a_bookie_leaves_once_what_it_was_kept_for_is_verified_elsewhere(tmp_path: Path) -> None:
    """A repair was interrupted between its last copy and the record of what it had found nowhere."""
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client)
        bookies = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
        (kept,) = cluster.bookies.keys() - set(bookies)
        held = VersionedLedgerMetadata(client._context, *await client._context.ledgers.read(ledger_id))
        await held.update(lambda now: now.with_absent(Absent(0, 1, kept, 7)))
        cluster.bookies["b5"] = BookieProcess("b5", tmp_path, cluster.uri)
        await cluster["b5"].start()
        await Drain(client._context, kept, settle_s=0.1).run()
        assert (await client.ledger_metadata(ledger_id)).absent == ()
        assert kept not in await cookies(client)


async def test_a_seat_is_left_to_a_bookie_that_is_down_and_not_to_one_that_leaves(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        await order(client, "b1", DRAINING)
        await cluster["b4"].kill()

        async def is_seen() -> bool:
            return "b4" not in client.bookies and not client.bookies["b1"].is_writable

        await until(is_seen)
        for _ in range(3):
            async with client.create_ledger() as ledger:
                await ledger.add_entry(b"x")
                assert set(ledger.metadata.last_fragment.bookies) == {"b2", "b3", "b4"}


async def test_a_drain_goes_on_while_workers_get_on_with_other_ledgers(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        tasks, record = RepairTasks(client._context.ledgers.store), WorkerRecord("busy")
        ledger_id = await written(client)
        leaver = (await client.ledger_metadata(ledger_id)).last_fragment.bookies[0]
        registration = await tasks.announce(record)
        behind = 0

        def on_progress(now: DrainProgress) -> None:
            nonlocal behind
            behind += now.is_behind

        drain = asyncio.create_task(
            Drain(client._context, leaver, settle_s=0.1, stall_s=0.6, on_progress=on_progress).run()
        )
        while behind < 3 and not drain.done():
            record = replace(record, repaired=record.repaired + 1)
            await registration.update(record.to_json())
            await asyncio.sleep(0.05)
        assert not drain.done()
        with pytest.raises(client_aio.InvalidTransitionError, match=r"no worker has got on.*are not made"):
            await drain
        await registration.close()


async def test_a_drain_works_itself_beside_a_repair_by_hand(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        ledger_id = await written(client)
        leaver = (await client.ledger_metadata(ledger_id)).last_fragment.bookies[0]
        registration = await tasks.announce(WorkerRecord(f"{BY_HAND}x"))
        report = await Drain(client._context, leaver, settle_s=0.1, stall_s=1.0).run()
        assert report.ledgers_moved == 1
        await registration.close()


async def test_a_drain_looks_again_where_something_may_have_moved(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        ledger_ids = [await written(client, count=1) for _ in range(4)]
        drain = Drain(client._context, "b1", config=AutoRecoveryConfig(tasks_max=8))
        ties = dict.fromkeys(ledger_ids, Ties.COPIES) | {100: Ties.WRITER}
        assert drain._due(ties, await tasks.refs(), 0.0) == {100}
        refs = await drain._make_tasks(ties, [], Orders())
        assert [ref.ledger_id for ref in refs] == ledger_ids[:2]
        await tasks.done(refs[1], None)
        assert drain._due(ties, await tasks.refs(), 0.0) == {100, ledger_ids[1]}
        assert drain._due(ties, refs, 30.0) == ties.keys()
        deleted = {101: Ties.COPIES}
        assert await drain._make_tasks(deleted, [], Orders()) == []
        assert deleted == {}
