"""Fewer live bookies than an ensemble has seats: takeovers, creation, trimming, closing."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from bookie_aio.wire.messages import Op
from client_aio import WriterState
from client_aio.autorecovery.worker import Outcome, Worker
from client_aio.bookies.pool import BookieDirectory
from client_aio.config import AutoRecoveryConfig
from metadata.access.bookies import READ_ONLY, Order, change_order
from metadata.access.repair_tasks import REASON_LOST, RepairTask, RepairTasks, TaskRef
from metadata.ids import KEY_AVAILABLE
from tests.support.cluster import Cluster
from tests.support.links import Links

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from client_aio import Choice, Client, LogRecord, Seating

WAIT_S = 60
QUICK = {"connect_timeout_s": 2, "add_timeout_s": 2, "read_timeout_s": 2}
GUARANTEED = {"add_quorum_timeout_s": 2, "add_timeout_s": 2, "max_in_flight_bytes": 10_000}


async def records(client: Client, name: str) -> list[bytes]:
    found: list[LogRecord] = [record async for record in client.read_log(name)]
    return [record.data for record in found]


async def entries(client: Client, ledger: int | str) -> list[bytes]:
    async with client.open_ledger(ledger) as reader:
        last = await reader.read_last_add_confirmed()
        return [entry.data async for entry in reader.read(reader.metadata.first_entry, last)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "client_aio.bookies.ensemble_finder" and record.levelno == logging.WARNING
    ]


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition that nothing announces holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("left", "reads_per_s"), [("ack quorum", 3), ("read-only", 3), ("one bookie", 12)])
async def test_writers_that_wait_for_a_bookie_do_not_wake_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, reads_per_s: int
) -> None:
    """Each looked for bookies whenever another one had, as fast as the metadata store answered."""
    reads, refresh = 0, BookieDirectory.refresh

    async def counted(self: BookieDirectory) -> None:
        nonlocal reads
        reads += 1
        await refresh(self)

    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri, **QUICK) as client:
        logs = [await client.open_log(f"log-{number}") for number in range(10)]
        await asyncio.gather(*(log.append(b"one") for log in logs))
        if left == "read-only":
            await change_order(client._context.ledgers.store, "b3", lambda _: Order(READ_ONLY))
            await until(lambda: not client.bookies["b3"].is_writable)
        else:
            await cluster["b3"].kill()
        if left == "one bookie":
            await cluster["b2"].kill()
        appends = [log.append(b"two") for log in logs]
        if left == "one bookie":
            await until(lambda: all(log.state is WriterState.HEALING for log in logs))
        else:
            await asyncio.gather(*appends)
        await asyncio.sleep(1)  # The first attempts follow one another closely.
        monkeypatch.setattr(BookieDirectory, "refresh", counted)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(2)
        seconds = asyncio.get_running_loop().time() - began
        assert reads < 2 + reads_per_s * seconds
        if left == "one bookie":
            await cluster["b2"].start()
        await asyncio.gather(*appends)


class NobodyFits:
    """A placement policy that accepts no bookie."""

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        raise client_aio.NotEnoughBookiesError("no bookie fits")


# --- takeovers ---


async def test_a_standby_takes_over_on_two_of_three_bookies(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri) as first,
        client_aio.connect(cluster.uri) as standby,
    ):
        log, unbounded = await first.open_log("orders"), await first.open_unbounded_ledger("u")
        await log.append(b"one")
        await unbounded.add_entry(b"one")
        await cluster["b1"].kill()
        await log.append(b"two")
        await unbounded.add_entry(b"two")
        async with asyncio.timeout(WAIT_S):
            taken = await standby.open_log("orders")
            ledger = await standby.open_unbounded_ledger("u")
            await taken.append(b"three")
            await ledger.add_entry(b"three")
        with pytest.raises(client_aio.LogFencedError):
            await log.append(b"never")
        await ledger.close()
        await taken.close()
        assert await records(standby, "orders") == [b"one", b"two", b"three"]
        assert await entries(standby, "u") == [b"one", b"two", b"three"]


async def test_a_takeover_that_finds_no_bookies_for_its_next_ledger_fences_nobody(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as first,
        client_aio.connect(cluster.uri, placement=NobodyFits()) as standby,
    ):
        log, unbounded = await first.open_log("orders"), await first.open_unbounded_ledger("u")
        await log.append(b"one")
        await unbounded.add_entry(b"one")
        with pytest.raises(client_aio.NotEnoughBookiesError):
            await standby.open_log("orders")
        with pytest.raises(client_aio.NotEnoughBookiesError):
            await standby.open_unbounded_ledger("u")
        await log.append(b"two")
        await unbounded.add_entry(b"two")
        await log.close()  # nor are the metadata anything but OPEN
        await unbounded.close()
        assert (await first.ledger_metadata("u")).term == 1


async def test_a_takeover_that_bookies_do_not_answer_leaves_the_writer_to_go_on(tmp_path: Path) -> None:
    """The standby reaches one bookie of three, and the writer all of them."""
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as first,
        links.connect("standby", **QUICK) as standby,
    ):
        log, unbounded = await first.open_log("orders"), await first.open_unbounded_ledger("u")
        await log.append(b"one")
        await unbounded.add_entry(b"one")
        for bookie_id in ("b1", "b2"):
            links["standby", bookie_id].black_hole()
        for opening in (
            standby.open_log("orders"),
            standby.open_unbounded_ledger("u"),
            standby.open_ledger(log.ledger_id, recover=True),
        ):
            with pytest.raises(client_aio.LedgerRecoveryError, match="Nothing was done"):
                await opening
        assert (await first.ledger_metadata(log.ledger_id)).state.name == "OPEN"
        assert (await first.ledger_metadata("u")).term == 1
        async with asyncio.timeout(WAIT_S):
            await log.append(b"two")
            await unbounded.add_entry(b"two")
            await log.close()
            await unbounded.close()


async def test_the_last_fragment_is_all_that_closing_needs(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=6) as cluster,
        client_aio.connect(cluster.uri, **QUICK) as client,
        client_aio.connect(cluster.uri, **QUICK) as standby,
    ):
        ledger = await client.create_ledger()
        await ledger.add_entry(b"zero")
        for bookie_id in ledger.metadata.last_fragment.bookies:
            await cluster[bookie_id].kill()
        async with asyncio.timeout(WAIT_S):
            await ledger.add_entry(b"first")
            await ledger.abort()  # Entry 1 is acknowledged, and states the LAC 0.
            reader = await standby.open_ledger(ledger.ledger_id, recover=True)
        assert (reader.last_add_confirmed, reader.length) == (1, len(b"zerofirst"))
        assert reader.metadata.length_before == len(b"zero")


async def test_an_idle_writer_that_publishes_its_lac_learns_that_it_was_displaced(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri, explicit_lac_delay_s=0.3) as one,
        client_aio.connect(cluster.uri) as other,
    ):
        former = await one.open_unbounded_ledger("payments")
        bounded = await one.create_ledger()
        await former.add_entry(b"A")
        await bounded.add_entry(b"A")
        await other.open_unbounded_ledger("payments")
        await other.open_ledger(bounded.ledger_id, recover=True)
        await until(lambda: former.is_closed and bounded.is_closed)
        for late in (former.add_entry(b"B"), bounded.add_entry(b"B")):
            with pytest.raises(client_aio.LedgerFencedError):
                await late


# --- creation ---


async def test_a_ledger_begins_without_a_bookie_that_is_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster["b2"].kill()
        async with (
            client_aio.connect(cluster.uri) as client,  # It has never seen b2.
            client_aio.connect(cluster.uri, **QUICK) as other,
        ):
            ledgers = [await client.create_ledger() for _ in range(3)]
            for ledger in ledgers:
                assert sorted(ledger.metadata.last_fragment.bookies) == ["b1", "b2", "b3"]
                assert ledger.failed_bookies == ["b2"]
                await ledger.add_entry(b"on two")
            assert len(warnings_of(caplog)) == 1  # once for the state, and not once a ledger
            assert "b2" in warnings_of(caplog)[0]
            await cluster["b2"].start()
            ledger = ledgers[0]
            async with asyncio.timeout(WAIT_S):
                while ledger.failed_bookies:  # It has never heard of the ledger, and takes adds.
                    await ledger.add_entry(b"more")
            assert len(ledger.metadata.fragments) == 1
            metadata = await ledger.close()
            lacks = {
                each.bookie_id: each.entries_missing
                for each in await client.ledger_replicas(ledger.ledger_id)
            }
            assert lacks["b1"] == lacks["b3"] == 0
            assert lacks["b2"]  # A repair finds it, and makes the copies.
            await client.repair_ledger(ledger.ledger_id, replace="b2", by="b2")
            assert not any(each.entries_missing for each in await client.ledger_replicas(ledger.ledger_id))
            # One of the two that hold everything of the second ledger dies. The newcomer is an honest third.
            await cluster["b1"].kill()
            reader = await other.open_ledger(ledgers[1].ledger_id, recover=True)
            assert reader.last_add_confirmed == 0
            assert await entries(other, ledger.ledger_id) == await entries(client, ledger.ledger_id)
            assert metadata.last_entry is not None


async def test_a_bookie_that_is_not_registered_is_asked_whether_the_id_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store that was set back its registration is gone for a moment, and it may have buried the id."""
    async with Cluster(tmp_path) as cluster, Links(cluster.uri) as links, links.connect("writer") as client:
        await (await client.create_ledger()).close()  # all three are connected
        store = links.store("writer")
        children, seen = store.children, links["writer", "b2"].requests.see(Op.IS_FREE)

        async def others(key: str) -> list[str]:
            return [name for name in await children(key) if (key, name) != (KEY_AVAILABLE, "b2")]

        monkeypatch.setattr(store, "children", others)
        await client._context.pool.directory.refresh()
        async with client.create_ledger() as ledger:
            assert ledger.failed_bookies == ["b2"]
            await seen.reached()


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 3, 2)])
async def test_no_write_set_begins_with_fewer_than_qa(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        await cluster["b1"].kill()
        if shape[2] == 2:
            await cluster["b2"].kill()
        with pytest.raises(client_aio.NotEnoughBookiesError, match="Each write set needs"):
            await client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=shape[2])


async def test_only_bookies_that_were_registered_get_seats(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        with pytest.raises(client_aio.NotEnoughBookiesError, match="E must be registered"):
            await client.create_ledger(ensemble_size=4, write_quorum=3, ack_quorum=2)


async def test_striped_ledgers_keep_qa_in_each_write_set(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=5) as cluster, client_aio.connect(cluster.uri) as client:
        await cluster["b4"].kill()
        async with client.create_ledger(ensemble_size=5, write_quorum=3, ack_quorum=2) as ledger:
            assert ledger.failed_bookies == ["b4"]
            await ledger.add_entries([b"%d" % number for number in range(20)])
        assert await entries(client, ledger.ledger_id) == [b"%d" % number for number in range(20)]
        await cluster["b5"].kill()
        with pytest.raises(client_aio.NotEnoughBookiesError):
            await client.create_ledger(ensemble_size=5, write_quorum=3, ack_quorum=2)


async def test_a_guaranteed_write_quorum_begins_with_every_bookie_or_not_at_all(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await cluster["b1"].kill()
        with pytest.raises(client_aio.NotEnoughBookiesError, match="guaranteed write quorum"):
            await client.create_ledger(guaranteed_write_quorum=True)


async def test_a_bookie_that_hangs_delays_no_new_ledger(cluster: Cluster) -> None:
    """Its port accepts, and nothing is answered. To wait for that would take ten minutes."""
    async with client_aio.connect(cluster.uri, connect_timeout_s=600) as client:
        cluster["b1"].stop()
        try:
            async with asyncio.timeout(WAIT_S):
                ledger = await client.create_ledger()
                await ledger.add_entry(b"on two")
        finally:
            cluster["b1"].resume()
        assert ledger.failed_bookies in (["b1"], [])


async def test_one_replacement_for_two_failed_seats_is_used(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri, **QUICK) as client,
    ):
        ledger = await client.create_ledger()
        await ledger.add_entry(b"zero")
        lost = ledger.metadata.last_fragment.bookies[:2]
        await asyncio.gather(*(cluster[bookie_id].kill() for bookie_id in lost))
        async with asyncio.timeout(WAIT_S):
            await ledger.add_entry(b"one")
            await until(lambda: len(ledger.failed_bookies) == 1)  # the loss of the other may be noticed later
        assert len(set(lost) & set(ledger.metadata.last_fragment.bookies)) == 1
        await ledger.close()
        assert await entries(client, ledger.ledger_id) == [b"zero", b"one"]


# --- trimming ---


async def test_trimming_needs_neither_a_writer_nor_a_bookie(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as operator:
        ledger = await client.open_unbounded_ledger("u")
        for _ in range(3):
            await ledger.add_entry(b"x")
            await ledger.roll()
        assert await operator.trim_unbounded_ledger("u", 2) == 2
        await ledger.add_entry(b"goes on")  # beside its writer
        await ledger.roll()
        await ledger.close()
        await cluster.kill()
        assert await operator.trim_unbounded_ledger("u", 3) == 3
        metadata = await operator.ledger_metadata("u")
        assert (metadata.state.name, metadata.term) == ("OPEN", 1)
        assert await operator.trim_unbounded_ledger("u", 1000) == 4  # The last fragment stays.
        assert await operator.trim_unbounded_ledger("u", 0) == 4


async def test_what_is_not_trimmed(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        with pytest.raises(client_aio.InvalidArgumentError, match="bounded"):
            await client.trim_unbounded_ledger(ledger.ledger_id, 1)
        await client.create_unbounded_ledger("locked", password=b"secret")
        with pytest.raises(client_aio.UnauthorizedAccessError):
            await client.trim_unbounded_ledger("locked", 1)
        async with client.open_unbounded_ledger("sealed") as unbounded:
            await unbounded.close(seal=True)
        with pytest.raises(client_aio.LedgerClosedError):
            await client.trim_unbounded_ledger("sealed", 1)


# --- guaranteed write quorum without a spare ---


async def test_waits_for_the_last_copies_end_at_a_deadline(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **GUARANTEED) as client:
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        await ledger.add_entry(b"zero")
        await until(lambda: ledger.last_add_fully_replicated == 0)
        async with asyncio.timeout(WAIT_S):
            await cluster["b3"].kill()
            for _ in range(30):
                await ledger.add_entry(b"x" * 1000)
            with pytest.raises(client_aio.NotEnoughBookiesError, match=r"entries 1 to 30 .* b3"):
                await ledger.drain()
            closing = asyncio.create_task(ledger.close())
            await asyncio.sleep(0)
            with pytest.raises(client_aio.LedgerClosedError):
                await ledger.add_entry(b"while it closes")
            with pytest.raises(client_aio.NotEnoughBookiesError, match="at_ack_quorum"):
                await closing
            await ledger.add_entry(b"the writer goes on")
            metadata = await ledger.close(at_ack_quorum=True)
        assert (metadata.state.name, metadata.last_entry) == ("CLOSED", 31)
        assert metadata.below_write_quorum_from == 1
        assert (await client.ledger_metadata(ledger.ledger_id)).below_write_quorum_from == 1
        assert len(await entries(client, ledger.ledger_id)) == 32


@pytest.mark.parametrize("has_failed", [False, True])
async def test_a_log_closes_at_the_ack_quorum_the_ledger_that_it_rolled_from_too(
    cluster: Cluster, has_failed: bool
) -> None:
    timeout_s = 0.5 if has_failed else 60  # of the call before
    async with client_aio.connect(cluster.uri, add_quorum_timeout_s=timeout_s) as client:
        log = await client.open_log("a", roll_entries=8, guaranteed_write_quorum=True)
        await log.append(b"0")
        listed = await client.log_metadata("a")
        async with asyncio.timeout(WAIT_S):
            while len(listed.rows) < 2:  # The next ledger is listed ahead, while all bookies are there.
                await client._context.pool.directory.wait_for_change(0.05)
                listed = await client.log_metadata("a")
            await cluster["b3"].kill()
            for number in range(1, 10):
                await log.append(b"%d" % number)
            assert log.rolls == 1
            waiting = asyncio.create_task(log.close())
            await asyncio.wait([waiting], timeout=0.1)
            if has_failed:
                with pytest.raises(client_aio.NotEnoughBookiesError):
                    await waiting
            await log.close(at_ack_quorum=True)
            if not has_failed:
                await waiting
        ledgers = [await client.ledger_metadata(row.ledger_id) for row in listed.rows]
        assert [each.state.name for each in ledgers] == ["CLOSED", "CLOSED"]
        assert all(each.below_write_quorum_from is not None for each in ledgers)
        assert [bytes(each.data) async for each in client.read_log("a")] == [b"%d" % n for n in range(10)]


async def test_nothing_is_recorded_where_every_copy_was_made(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        await ledger.add_entry(b"zero")
        await until(lambda: ledger.last_add_fully_replicated == 0)
        assert (await ledger.close(at_ack_quorum=True)).below_write_quorum_from is None


async def test_a_recovery_is_content_with_qa_where_it_is_told_to(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **GUARANTEED) as client:
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        await ledger.add_entry(b"zero")
        await cluster["b3"].kill()
        await ledger.add_entry(b"one")
        await ledger.abort()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(client_aio.LedgerRecoveryError, match="at_ack_quorum"):
                await client.open_ledger(ledger.ledger_id, recover=True)
            # Its writer was not fenced in vain.
            assert (await client.ledger_metadata(ledger.ledger_id)).state.name == "OPEN"
            reader = await client.open_ledger(ledger.ledger_id, recover=True, at_ack_quorum=True)
        assert reader.last_add_confirmed == 1
        assert reader.metadata.below_write_quorum_from in (0, 1)
        with pytest.raises(client_aio.InvalidArgumentError):
            client.open_ledger(ledger.ledger_id, at_ack_quorum=True)
        await cluster["b3"].start()
        await client.repair_ledger(ledger.ledger_id, replace="b3", by="b3")
        assert (await client.ledger_metadata(ledger.ledger_id)).below_write_quorum_from is None


@pytest.mark.parametrize("at_ack_quorum", [False, True])
async def test_a_close_with_qa_comes_before_a_loss(cluster: Cluster, at_ack_quorum: bool) -> None:
    async with client_aio.connect(cluster.uri, **GUARANTEED) as client, asyncio.timeout(WAIT_S):
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        await ledger.add_entry(b"zero")
        await cluster["b3"].kill()
        await ledger.add_entry(b"one")
        await ledger.abort()
        reader = await client.open_ledger(
            ledger.ledger_id, recover=True, at_ack_quorum=at_ack_quorum, accept_loss=True
        )
        assert reader.last_add_confirmed == 1
        assert reader.metadata.given_up is None
        assert reader.metadata.below_write_quorum_from in (0, 1)


async def test_tasks_without_a_bookie_for_the_copies_are_tried_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of ten thousand ledgers lacked the same bookie, and was tried as fast as the store answered."""
    async with (
        asyncio.timeout(WAIT_S),
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
    ):
        await cluster["b4"].end()
        await client._context.pool.directory.refresh()
        ledger_ids = []
        for _ in range(20):
            async with client.create_ledger(ack_quorum=3) as ledger:
                await ledger.add_entry(b"x")
            ledger_ids.append(ledger.ledger_id)
        await cluster["b3"].kill()
        while "b3" in client.bookies:
            await client._context.pool.directory.wait_for_change(WAIT_S)
        tasks = RepairTasks(client._context.ledgers.store)
        for ledger_id in ledger_ids:
            await tasks.create(
                TaskRef(2, ledger_id, client._context.draw_token()), RepairTask({REASON_LOST: ["b3"]}, 0)
            )
        worker = Worker(client._context, AutoRecoveryConfig(retry_s=0.05), "w")
        attempts, attempt = 0, worker.attempt

        async def counted(*arguments: Any) -> Outcome:
            nonlocal attempts
            attempts += 1
            return await attempt(*arguments)

        async def lost(_: RepairTask) -> list[str]:
            return ["b3"]  # as the auditor's record would say

        monkeypatch.setattr(worker, "attempt", counted)
        monkeypatch.setattr(worker, "_lost_still", lost)
        working = asyncio.create_task(worker.run())
        try:
            await asyncio.sleep(3)  # Rests of 0.05, 0.1, … 1.6 s: six attempts.
            assert 0 < attempts <= 7
            await cluster["b4"].start()  # ends the rest
            async with aclosing(tasks.watch_tasks()) as changes:
                async for _ in changes:
                    if not await tasks.refs():
                        break
            for ledger_id in ledger_ids:
                assert all(one.entries_missing == 0 for one in await client.ledger_replicas(ledger_id))
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
