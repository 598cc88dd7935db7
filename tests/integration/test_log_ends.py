"""Where a log begins and ends for those who read it, with bookies down, empty ledgers and half takeovers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio import BookieUnavailableError, Client, NoSuchLogError, Position
from client_aio.log.reader import LogReading
from metadata.ids import ledger_key
from tests.support.links import Gate, Links

if TYPE_CHECKING:
    from metadata.model.log import LogHead
    from tests.support.cluster import Cluster

WAIT_S = 30


async def until_listed(client: Client, count: int) -> list[int]:
    """Wait until the log has so many ledgers, and give them."""
    store = client._context.ledgers.store
    async with asyncio.timeout(WAIT_S), aclosing(store.watch("logs/a")) as changes:
        async for _ in changes:
            rows = (await client.log_metadata("a")).rows
            if len(rows) >= count:
                return [row.ledger_id for row in rows]
    raise AssertionError("the watch has ended")


async def add_ledgers(client: Client, *contents: bytes) -> None:
    """Add a ledger with one record, or an empty one, for each; their ids have gaps."""
    for data in contents:
        async with client.create_ledger() as ledger:
            if data:
                await ledger.add_entry(data)
        await client.add_to_log("a", [ledger.ledger_id])
        await client._context.ledgers.allocate_id(at_least=ledger.ledger_id + 10)


async def test_the_end_is_not_behind_a_ledger_that_still_grows(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a takeover has closed the one listed ahead, and the writer goes on in the one before it."""
    end, standing = LogReading._end, asyncio.Event()

    async def noted(self: LogReading, head: LogHead) -> Position:
        found = await end(self, head)
        standing.set()
        return found

    monkeypatch.setattr(LogReading, "_end", noted)
    async with (
        client_aio.connect(cluster.uri) as writing,
        client_aio.connect(cluster.uri) as client,
        aclosing(client.read_log("a", "end", follow=True)) as records,
    ):
        log = await writing.open_log("a", roll_entries=16)
        for number in range(4):
            last = await log.append(b"%d" % number)
        await log.flush()
        ledgers = await until_listed(client, 2)
        async with client.open_ledger(ledgers[1], recover=True):
            pass
        coming = asyncio.create_task(anext(records))
        await standing.wait()
        await log.append(b"after")
        await log.flush()
        found = await asyncio.wait_for(coming, WAIT_S)
        if found.position == last:  # of which no bookie knew yet that it was acknowledged
            found = await asyncio.wait_for(anext(records), WAIT_S)
        assert found.data == b"after"
        assert found.position == Position(last.ledger_id, last.entry_id + 1)
        await log.abort()


async def test_truncations_before_empty_ledgers_cut_off_nobody_who_has_read_all(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        aclosing(client.read_log("a", follow=True)) as records,
    ):
        await add_ledgers(client, b"1", b"", b"", b"", b"2")
        rows = (await client.log_metadata("a")).rows
        assert (await anext(records)).data == b"1"
        for row in rows[1:]:
            await client.truncate_log("a", Position(row.id, 0))
            assert (await client.log_metadata("a")).begins_at == Position(rows[0].id, 1)
        assert [one.data async for one in client.read_log("a", Position(rows[0].id, 1))] == [b"2"]
        assert (await asyncio.wait_for(anext(records), WAIT_S)).data == b"2"


@pytest.mark.parametrize("follow", [True, False])
async def test_a_complete_ledger_that_nobody_has_closed_is_read_with_one_bookie_down(
    cluster: Cluster, follow: bool
) -> None:
    """Its end is where an ack quorum's complement says so, as for a recovery."""
    async with (
        Links(cluster.uri) as links,
        links.connect("writer") as writing,
        client_aio.connect(cluster.uri) as client,
    ):
        log = await writing.open_log("a", ack_quorum=2)
        for number in range(10):
            await log.append(b"%d" % number)
        gate = Gate(ledger_key(log.ledger_id))
        links.store("writer").before_compare_and_set = gate.meet
        await log.roll()
        await log.append(b"10")
        await log.append(b"11")  # which says that the one before it is acknowledged
        await log.abort()
        await cluster["b1"].kill()
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S), aclosing(client.read_log("a", follow=follow)) as records:
            async for record in records:
                found.append(record.data)
                if len(found) == 11 and follow:
                    break
        assert found[:11] == [b"%d" % number for number in range(11)]


async def test_what_can_be_read_is_given_before_the_doubt_about_the_end(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as writing, client_aio.connect(cluster.uri) as client:
        log = await writing.open_log("a")
        for number in range(10):
            last = await log.append(b"%d" % number)
        await cluster.heard(client, Position(last.ledger_id, last.entry_id - 1))  # b3, too
        await log.abort()
        for name in ("b1", "b2"):
            await cluster[name].kill()
        found: list[bytes] = []

        async def read() -> None:
            async for record in client.read_log("a"):
                found.append(record.data)  # noqa: PERF401 (what came before the error counts)

        with pytest.raises(BookieUnavailableError, match="its LAC"):
            await read()
        assert found[:9] == [b"%d" % number for number in range(9)]


async def test_a_truncation_ends_where_its_log_was_deleted_and_another_one_made(cluster: Cluster) -> None:
    """The new one's first ledger has a lower id than the position."""
    async with (
        Links(cluster.uri) as links,
        links.connect("truncator") as truncating,
        client_aio.connect(cluster.uri) as early,
        client_aio.connect(cluster.uri) as client,
    ):
        async with early.create_ledger():  # whose ids are lower than the others' from now on
            pass
        for data in (b"1", b"2"):
            async with client.open_log("a") as log:
                at = await log.append(data)
        gate = Gate("logs/a")
        links.store("truncator").before_compare_and_set = gate.meet
        truncation = asyncio.create_task(truncating.truncate_log("a", at))
        await gate.reached.wait()
        await client.delete_log("a")
        async with early.open_log("a") as log:
            assert await log.append(b"new 1") < at
        async with client.open_log("a") as log:
            assert await log.append(b"new 2") > at
        gate.opened.set()
        with pytest.raises(NoSuchLogError, match="another one"):
            await truncation
        assert [record.data async for record in client.read_log("a")] == [b"new 1", b"new 2"]


async def test_a_closed_ledger_is_added_though_the_metadata_server_lags(cluster: Cluster) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("driver") as driving,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger = await client.create_ledger()
        await ledger.add_entry(b"1")
        await links.store("driver").lag(ledger_key(ledger.ledger_id))
        await ledger.close()
        added = await driving.add_to_log("a", [ledger.ledger_id], transaction=("query", 1))
        assert [row.ledger_id for row in added.rows] == [ledger.ledger_id]


@pytest.mark.parametrize("start", [None, 1.0])
async def test_a_beginning_that_is_truncated_while_it_is_looked_for_is_looked_for_again(
    cluster: Cluster, start: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await add_ledgers(client, b"1", b"2")
        rows = (await client.log_metadata("a")).rows
        begin, times = LogReading._begin, 0

        async def cut_behind(self: LogReading, head: LogHead) -> Position:
            nonlocal times
            found = await begin(self, head)
            times += 1
            if times == 1:
                await client.truncate_log("a", Position(rows[1].id, 0))
            return found

        monkeypatch.setattr(LogReading, "_begin", cut_behind)
        assert [record.data async for record in client.read_log("a", start)] == [b"2"]
        assert times == 2


async def test_leaving_raises_a_failure_that_nobody_was_told_of_and_no_other(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:

        async def append_and_leave() -> None:
            async with client.open_log("left") as log:
                async with other.open_log("left"):
                    pass
                log.append(b"behind the end of the ledger")

        with pytest.raises(client_aio.LogFencedError):
            await append_and_leave()
        async with client.open_log("left") as log:
            async with other.open_log("left"):
                pass
            with pytest.raises(client_aio.LogFencedError):
                await log.append(b"behind the end of the ledger")
        assert [record async for record in client.read_log("left")] == []


async def test_a_close_takes_no_records_while_it_waits(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(WAIT_S):
        log = await client.open_log("a")
        first, batch = log.append(b"before"), log.append_batch([b"these", b"too"])
        closing = asyncio.create_task(log.close())
        await asyncio.sleep(0)
        assert not first.done()
        with pytest.raises(client_aio.LedgerClosedError):
            await log.append(b"late")
        with pytest.raises(client_aio.LedgerClosedError):
            await log.append_batch([b"later"])
        await asyncio.gather(first, batch, closing)
        assert [record.data async for record in client.read_log("a")] == [b"before", b"these", b"too"]
