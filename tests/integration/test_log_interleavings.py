"""Logs at awkward moments: between the steps of a roll, with bookies gone, with answers that come late."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Op
from client_aio import (
    BookieUnavailableError,
    InvalidArgumentError,
    LogFencedError,
    NoSuchLogError,
)
from client_aio.log.reader import LogReading, records_of
from metadata.access.logs import LogStore
from metadata.errors import MetadataUnavailableError
from metadata.ids import ledger_key
from metadata.model.log import LogHead, LogRow
from tests.support.following import appended_until_followed
from tests.support.links import Gate, Links, roll_behind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from client_aio import Client
    from tests.support.cluster import Cluster


async def contents(client: Client) -> list[bytes]:
    return [record.data async for record in client.read_log("a")]


async def test_a_ledger_that_is_not_closed_yet_is_read_past_when_the_next_one_has_a_record(
    cluster: Cluster,
) -> None:
    async with Links(cluster.uri) as links, links.connect("writer") as writing:
        async with client_aio.connect(cluster.uri) as client, writing.open_log("a") as log:
            futures = [log.append(b"%d" % n) for n in range(100)]
            gate = Gate(ledger_key(log.ledger_id))
            links.store("writer").before_compare_and_set = gate.meet
            rolling = asyncio.create_task(log.roll())
            await gate.reached.wait()  # switched; the old ledger is about to be closed
            await rolling
            futures += [log.append(b"%d" % n) for n in range(100, 110)]
            await log.flush()
            await cluster.heard(client, futures[-1].result())
            first, second = (row.ledger_id for row in (await client.log_metadata("a")).rows)
            assert not (await client.ledger_metadata(first)).is_closed
            expected = [b"%d" % n for n in range(110)]
            assert await contents(client) == expected
            async with aclosing(client.read_log("a", follow=True)) as records:
                assert [(await anext(records)).data for _ in range(110)] == expected
            assert [future.result().ledger_id for future in futures] == [first] * 100 + [second] * 10
            gate.opened.set()
        assert await contents(writing) == expected


async def test_a_ledger_that_is_not_closed_yet_is_read_to_its_end_by_a_reader_whose_server_lags(
    cluster: Cluster,
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("writer") as writing,
        links.connect("reader") as reading,
        aclosing(reading.read_log("a", follow=True)) as records,
        writing.open_log("a", ensemble_size=1, write_quorum=1, ack_quorum=1) as log,
    ):
        await log.append(b"1")
        assert (await anext(records)).data == b"1"
        await log.roll()
        await log.append(b"2")
        gate = await roll_behind(links, log, b"3")
        await cluster.heard(writing, await log.append(b"4"))
        async with asyncio.timeout(20):
            assert [(await anext(records)).data for _ in range(3)] == [b"2", b"3", b"4"]
        gate.opened.set()


async def test_a_start_is_looked_for_again_when_the_log_is_truncated_meanwhile(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        lists = client._lists("a")
        await lists.create(custom={}, created_ms=1)
        ids = [await client._context.ledgers.allocate_id() for _ in range(900)]
        for start in range(0, 900, 450):
            more = [LogRow(each, each, 10**12) for each in ids[start : start + 450]]
            await lists.change_now(*await lists.read(), lambda head, more=more: head.append(more))
        for data in (b"1", b"2", b"3"):
            async with client.open_log("a") as log:
                position = await log.append(data)

        class Cut(LogStore):
            """The list of a log that is truncated before the first of its pages is read."""

            is_cut = False

            async def rows_at_page(self, head: LogHead, number: int) -> list[LogRow]:
                if not self.is_cut:
                    self.is_cut = True
                    await client.truncate_log("a", position)
                return await super().rows_at_page(head, number)

        cut = Cut(client._store, "a", draw_token=client._context.draw_token)
        reading = LogReading(client._context, cut, 10**9, follow=False, password=b"")
        found = [record.data async for record in records_of(reading.batches())]
        assert (cut.is_cut, found) == (True, [b"3"])


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_a_log_whose_end_nobody_can_tell_does_not_end_early(cluster: Cluster, is_ahead: bool) -> None:
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        await log.append(b"1")
        if is_ahead:
            await log.roll()
            await log.append(b"2")
        await log.abort()
        for bookie_id in ("b1", "b2", "b3"):
            await cluster[bookie_id].kill()
        with pytest.raises(BookieUnavailableError):
            await contents(client)
        with pytest.raises(BookieUnavailableError):
            await anext(client.read_log("a", "end"))


async def test_a_reader_does_not_go_past_a_ledger_that_may_still_grow(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client.open_log("a", roll_entries=16) as log:
        for n in range(4):  # a fourth of the limit: the next ledger is listed ahead
            position = await log.append(b"%d" % n)
        async with aclosing(log._lists.watch()) as changes:
            async for _ in changes:
                if len((await client.log_metadata("a")).rows) == 2:
                    break
        await cluster.heard(client, position)
        assert await contents(client) == [b"0", b"1", b"2", b"3"]
        ends = client.read_log("a", "end", follow=True)
        await appended_until_followed(log, ends)
        await ends.aclose()


async def test_a_log_that_is_closed_during_a_roll_leaves_no_timer(cluster: Cluster) -> None:
    async with Links(cluster.uri) as links, links.connect("writer") as client:
        log = await client.open_log("a", roll_age_s=3600)
        await log.append(b"1")
        held = [links["writer", name].answers.hold(Op.ADD) for name in cluster.bookies]
        last = log.append(b"2")
        await asyncio.gather(*(answer.reached() for answer in held))
        closing = asyncio.create_task(log.close())
        rolling = asyncio.create_task(log.roll())
        for _ in range(500_000):
            if log._healer.is_holding:
                break
            await asyncio.sleep(0)
        assert log._healer.is_holding
        for answer in held:
            answer.release()
        await closing
        await rolling
        assert (await last).entry_id == 1
        assert log._roller is not None
        assert log._roller._timer is None or log._roller._timer.cancelled()
        assert await contents(client) == [b"1", b"2"]


async def test_what_waits_for_a_roll_whose_ledger_fails_goes_to_another(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        await log.append(b"1")
        await log.roll()
        await log.append(b"2")
        # Nothing is heard of their deaths before the hold, so that records are held back for a roll.
        cluster["b1"].stop()
        cluster["b2"].stop()
        sent = log.append(b"3")
        rolling = asyncio.create_task(log.roll())
        log.hold()
        held = log.append(b"4")
        await asyncio.gather(cluster["b1"].kill(), cluster["b2"].kill())
        await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())
        async with asyncio.timeout(60):
            assert await sent < await held
            for call in (log.flush(), log.drain(), rolling, log.close()):
                await call
        assert await contents(client) == [b"1", b"2", b"3", b"4"]


async def test_an_append_to_the_list_whose_answer_is_lost_is_settled(cluster: Cluster) -> None:
    async with Links(cluster.uri) as links, links.connect("writer") as client:
        lost = 0

        async def lose(key: str) -> None:
            nonlocal lost
            if key == "logs/a" and lost < 2:
                lost += 1
                raise MetadataUnavailableError("the answer was lost")

        links.store("writer").before_compare_and_set = lose
        async with client.open_log("a") as log:
            await log.append(b"1")
            lost = 0
            await log.roll()
            await log.append(b"2")
        assert lost == 2
        assert len((await client.log_metadata("a")).rows) == 2
        assert await contents(client) == [b"1", b"2"]


async def test_a_ledger_that_was_listed_after_all_is_not_deleted_though_its_row_is_in_a_page_by_now(
    cluster: Cluster,
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("writer") as writing,
        client_aio.connect(cluster.uri) as client,
    ):
        log = await writing.open_log("a")
        await log.append(b"1")
        listed: list[int] = []

        async def land_and_lose(key: str) -> None:
            if key != "logs/a" or listed:
                return
            listed.append(max([each async for each in client.list_ledgers()]))
            ids = [listed[0], *[await client._context.ledgers.allocate_id() for _ in range(900)]]
            rows = [LogRow(each, each, 10**12) for each in sorted(ids)]
            lists = client._lists("a")
            await lists.change_now(*await lists.read(), lambda head: head.append(rows))
            raise MetadataUnavailableError("the answer was lost")

        links.store("writer").before_compare_and_set = land_and_lose
        with pytest.raises(LogFencedError):  # Others have listed theirs behind it, and own the log.
            await log.roll()
        assert (await client.log_metadata("a")).rows[1].ledger_id == listed[0]
        assert await client.ledger_metadata(listed[0])
        await log.abort()


async def test_a_roll_that_meets_another_writer_ends_the_writer_and_leaves_nothing_over(
    cluster: Cluster,
) -> None:
    async with Links(cluster.uri) as links, links.connect("writer") as writing:
        log = await writing.open_log("a")
        await log.append(b"1")
        gate = Gate("logs/a")
        links.store("writer").before_compare_and_set = gate.meet
        rolling = asyncio.create_task(log.roll())
        await gate.reached.wait()  # the next ledger is made, and about to be listed
        async with client_aio.connect(cluster.uri) as client, client.open_log("a") as other:
            await other.append(b"2")
            gate.opened.set()
            with pytest.raises(LogFencedError):
                await rolling
            rows = [row.ledger_id for row in (await client.log_metadata("a")).rows]
            assert [ledger_id async for ledger_id in client.list_ledgers()] == rows
        await log.abort()
        assert await contents(writing) == [b"1", b"2"]


async def test_a_log_that_is_deleted_while_it_is_opened_is_made_anew(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        # It is there, and about to list its first ledger.
        async with deleted_meanwhile(cluster, client, "logs/a") as writing:
            await _open_and_append(writing, create=True)
        assert await contents(client) == [b"1"]
        async with deleted_meanwhile(cluster, client, "logs/a") as writing:
            with pytest.raises(NoSuchLogError):
                await _open_and_append(writing, create=False)


async def test_a_log_that_is_deleted_while_ledgers_are_added_to_it_is_made_anew(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"1")
        async with deleted_meanwhile(cluster, client, "logs/a") as writing:
            assert not (await writing.add_to_log("a", [ledger.ledger_id])).repeated
        assert await contents(client) == [b"1"]


async def test_a_log_that_is_deleted_while_its_last_ledger_is_recovered_is_made_anew(
    cluster: Cluster,
) -> None:
    """The bookies of that ledger then say that there is none, and not what it holds."""
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        await log.append(b"0")
        ledger_id = log.ledger_id
        await log.abort()
        async with deleted_meanwhile(cluster, client, ledger_key(ledger_id)) as writing:
            await _open_and_append(writing, create=True)
        assert await contents(client) == [b"1"]


@asynccontextmanager
async def deleted_meanwhile(cluster: Cluster, client: Client, key: str) -> AsyncIterator[Client]:
    """Return a client; another one deletes the log "a" right before its first compare-and-set of a key."""
    async with Links(cluster.uri) as links, links.connect("writer") as writing:
        deleted: list[str] = []

        async def delete(at: str) -> None:
            if at == key and not deleted:
                deleted.append(at)
                await client.delete_log("a")

        links.store("writer").before_compare_and_set = delete
        yield writing
        assert deleted == [key]


async def _open_and_append(client: Client, *, create: bool) -> None:
    async with client.open_log("a", create=create) as log:
        await log.append(b"1")


async def test_an_unbounded_ledger_is_no_part_of_a_log(cluster: Cluster) -> None:
    """A log's readers know nothing of its pages, nor of what has been trimmed."""
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.open_unbounded_ledger("u")
        await ledger.add_entry(b"1")
        await ledger.close(seal=True)
        with pytest.raises(InvalidArgumentError, match="unbounded ledger 'u'"):
            await client.add_to_log("a", [ledger.ledger_id])
        assert [name async for name in client.list_logs()] == []
