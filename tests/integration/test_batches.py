"""Batches with one future (`add_batch`, `append_batch`): order, throttling, rolls, losses, fences."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
import client_aio.sync
from client_aio import (
    BackpressureError,
    EntryTooLargeError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    LogFencedError,
    NotEnoughBookiesError,
    OperationTimeoutError,
    Outcome,
    Position,
    WriterAbortedError,
    WriterState,
)
from tests.support.healing import LASTS_S, bring_back, lose_two, state_is
from tests.support.unbounded import NAME, everything, numbered

if TYPE_CHECKING:
    from client_aio import Client
    from tests.support.cluster import Cluster

SMALL = {"max_in_flight_bytes": 600_000}
LARGE = 2000
"""Entries of 1,000 bytes, or records: nearly four times the room of `SMALL`, and four groups."""


def large(mark: bytes, count: int = LARGE) -> list[bytes]:
    return [b"%s %d" % (mark, number) + bytes(990) for number in range(count)]


async def contents(client: Client, ledger_id: int) -> list[bytes]:
    async with client.open_ledger(ledger_id, recover=True) as reader:
        return [entry.data async for entry in reader.read(0, reader.last_add_confirmed)]


async def records(client: Client) -> list[tuple[Position, bytes]]:
    return [(record.position, bytes(record.data)) async for record in client.read_log("a")]


async def test_batches_and_single_entries_keep_the_order_of_the_calls(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        done: list[object] = []
        async with client.create_ledger() as ledger:
            calls: list[asyncio.Future[Any]] = [
                ledger.add_entry(b"first"),
                ledger.add_batch([b"a", b"b", b"c"]),
                ledger.add_entry(b"then"),
                ledger.add_batch(large(b"x")),
                ledger.add_entry(b"behind the large one"),
                ledger.add_batch([b"", b"e"]),
            ]
            assert ledger.bytes_in_flight > LARGE * 1000
            for each in calls:
                each.add_done_callback(lambda future: done.append(future.result()))
            bulk = asyncio.create_task(ledger.add_entries([b"bulk 1", b"bulk 2"]))
            await ledger.flush()
            wanted = [0, (1, 3), 4, (5, 2004), 2005, (2006, 2007)]
            assert [each.result() for each in calls] == wanted == done
            assert await bulk == (2008, 2009)
        found = await contents(client, ledger.ledger_id)
        assert found == [
            b"first", b"a", b"b", b"c", b"then", *large(b"x"), b"behind the large one", b"", b"e",
            b"bulk 1", b"bulk 2",
        ]  # fmt: skip


async def test_a_bulk_keeps_its_entries_together_between_batches(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        async with client.create_ledger() as ledger:
            going_on = asyncio.Event()

            async def slowly() -> Any:
                yield b"one"
                await going_on.wait()
                yield b"two"

            before = ledger.add_batch(large(b"x"))
            bulk = asyncio.create_task(ledger.add_entries(slowly()))
            second = asyncio.create_task(ledger.add_entries([b"three"]))
            await before
            await asyncio.sleep(0)
            behind = ledger.add_batch([b"four", b"five"])
            closing = asyncio.create_task(ledger.close())
            going_on.set()
            assert await asyncio.gather(before, bulk) == [(0, 1999), (2000, 2001)]
            assert await second == (2002, 2002)
            assert await behind == (2003, 2004)
            assert (await closing).last_entry == 2004
        assert (await contents(client, ledger.ledger_id))[2000:] == [
            b"one",
            b"two",
            b"three",
            b"four",
            b"five",
        ]


async def test_the_caller_may_reuse_its_list_and_cancel_the_future(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        async with client.create_ledger() as ledger:
            given: list[Any] = [bytearray(b"1"), memoryview(b"2"), b"3"]
            adding = ledger.add_batch(given)
            given[0][:] = b"9"
            given.clear()
            adding.cancel()
            lost = ledger.add_batch(large(b"y"))
            lost.cancel()
            assert await ledger.add_entry(b"last") == 2003
        assert await contents(client, ledger.ledger_id) == [b"1", b"2", b"3", *large(b"y"), b"last"]


async def test_wrong_batches_are_refused_before_anything_is_sent(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, entry_bytes_max=10, **SMALL) as client:
        ledger = await client.create_ledger()
        log = await client.open_log("a")
        with client_aio.sync.connect(cluster.uri, entry_bytes_max=10) as blocking:
            adapter, appender = blocking.create_ledger(), blocking.open_log("b")
            for add in (
                ledger.add_batch, log.append_batch, adapter.add_batch_nowait, appender.append_batch_nowait
            ):  # fmt: skip
                wrong: list[tuple[Any, type[Exception], str]] = [
                    ([], InvalidArgumentError, "at least one"),
                    (b"bytes", InvalidArgumentError, "list of bytes, not bytes"),
                    (iter([b"1"]), InvalidArgumentError, "list of bytes, not list_iterator"),
                    ([b"1", "2"], InvalidArgumentError, "entry 1 .* not str"),
                    ([b"1", b"2", bytes(11)], EntryTooLargeError, "entry 2 .* 11 bytes, .* limit of 10"),
                ]
                for given, kind, text in wrong:
                    with pytest.raises(kind, match=text):
                        add(given)
            adapter.close()
            appender.close()
        assert ledger.last_add_pushed == -1
        assert ledger.bytes_in_flight == log.bytes_in_flight == 0
        await ledger.close()
        await log.close()
        with pytest.raises(LedgerClosedError, match="of the 2 entries of this batch, 0 were") as refused:
            await ledger.add_batch([b"1", b"2"])
        assert refused.value.outcome is Outcome.NOT_DONE
        with pytest.raises(LedgerClosedError) as refused:
            await log.append_batch([b"1"])
        assert refused.value.outcome is Outcome.NOT_DONE
        advanced = await client.create_ledger(advanced=True)
        with pytest.raises(InvalidArgumentError, match="takes ids from its writer"):
            advanced.add_batch([b"1"])
        await advanced.abort()


async def test_batches_are_refused_above_four_times_the_room(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri, **SMALL) as client,
        client.create_ledger() as ledger,
        asyncio.timeout(LASTS_S),
    ):
        first = ledger.add_batch(large(b"x", 3000))
        with pytest.raises(BackpressureError) as refused:
            ledger.add_batch([b"more"])
        assert refused.value.outcome is Outcome.NOT_DONE
        await ledger.drain()
        assert ledger.bytes_in_flight <= SMALL["max_in_flight_bytes"]
        assert await ledger.add_batch([b"more"]) == (3000, 3000)
        assert first.done()


@pytest.mark.parametrize("options", [{"deferred_sync": True}, {"guaranteed_write_quorum": True}])
async def test_a_batch_beyond_the_window_goes_on_with_every_way_to_write(
    cluster: Cluster, options: dict[str, bool]
) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        async with client.create_ledger(**options) as ledger:
            assert await ledger.add_batch(large(b"x")) == (0, 1999)
            assert await ledger.add_batch([b"1", b"2"]) == (2000, 2001)
        assert await contents(client, ledger.ledger_id) == [*large(b"x"), b"1", b"2"]


async def test_a_failed_batch_says_how_much_of_it_is_acknowledged(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        ledger = await client.create_ledger()
        assert await ledger.add_batch([b"0", b"1"]) == (0, 1)
        adding = ledger.add_batch(large(b"x", 10_000))
        while ledger.last_add_confirmed < 2:
            await asyncio.wait([adding], timeout=0.001)
        for bookie_id in ("b1", "b2"):
            cluster[bookie_id].stop()
        acknowledged = 0
        while acknowledged < (acknowledged := ledger.last_add_confirmed):  # What was on its way comes.
            await asyncio.wait([adding], timeout=0.05)
        await ledger.abort()
        with pytest.raises(WriterAbortedError) as failed:
            await adding
        number = acknowledged - 1
        assert failed.value.outcome is Outcome.UNKNOWN
        assert failed.value.acknowledged == number > 0
        assert f"of the 10000 entries of this batch, {number} were acknowledged" in str(failed.value)
        assert ledger.told_failures, "an application that a batch has told is not told again"
        for bookie_id in ("b1", "b2"):
            cluster[bookie_id].resume()
        found = await contents(client, ledger.ledger_id)
        assert len(found) > acknowledged
        assert found == [b"0", b"1", *large(b"x", 10_000)][: len(found)]


async def test_a_fence_fails_each_batch_and_what_is_not_done_is_not_there(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri, **SMALL) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(LASTS_S),
    ):
        ledger = await client.create_ledger()
        assert await ledger.add_batch([b"0", b"1"]) == (0, 1)
        async with other.open_ledger(ledger.ledger_id, recover=True) as reader:
            sent, behind = ledger.add_batch(large(b"x")), ledger.add_batch([b"behind"])
            with pytest.raises(LedgerFencedError):
                await sent
            with pytest.raises(LedgerFencedError) as failed:
                await behind
            assert failed.value.outcome is Outcome.NOT_DONE
            assert reader.last_add_confirmed == 1
        assert ledger.told_failures


async def test_a_log_rolls_within_a_batch(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        async with client.open_log("a", roll_entries=300) as log:
            written: list[bytes] = []
            has_spanned = False
            while not has_spanned:
                at, batch = len(written), large(b"x", 20_000)  # It lasts longer than a roll.
                first, last = await log.append_batch(batch)
                small, behind = log.append_batch([b"small 1", b"small 2"]), log.append(b"behind")
                has_spanned = first.ledger_id < last.ledger_id
                written += [*batch, b"small 1", b"small 2", b"behind"]
                places = [first, last, *await small, await behind]
                found = await records(client)
                assert [data for _, data in found] == written
                assert places == [found[n][0] for n in (at, -4, -3, -2, -1)]
            adding, rolled = log.append_batch(large(b"x")), asyncio.create_task(log.roll())
            await rolled
            assert adding.done()
            assert adding.result()[1].ledger_id < log.ledger_id
        assert log.rolls > 1


async def test_batches_of_a_log_take_effect_once_over_a_loss(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        log = await client.open_log("a")
        adding = [log.append_batch([b"%d" % n, b"%d!" % n]) for n in range(100)]
        await adding[10]
        adding.append(log.append_batch(large(b"x")))
        await lose_two(cluster)
        adding.append(log.append_batch([b"late"]))
        await state_is(log, WriterState.HEALING)
        adding.append(log.append_batch([b"held", b"back"]))
        await bring_back(cluster)
        places = await asyncio.gather(*adding)
        await log.close()
        found = await records(client)
        small = [data for n in range(100) for data in (b"%d" % n, b"%d!" % n)]
        assert [data for _, data in found] == [*small, *large(b"x"), b"late", b"held", b"back"]
        by_place = dict(found)
        assert [by_place[first] for first, _ in places[:100]] == [b"%d" % n for n in range(100)]
        assert [by_place[last] for _, last in places[100:]] == [large(b"x")[-1], b"late", b"back"]


async def test_batches_of_an_unbounded_ledger_keep_their_ids_over_a_loss(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        ledger = await client.open_unbounded_ledger(NAME)
        adding = [ledger.add_batch(numbered(0, 9)), ledger.add_batch(numbered(10, 99))]
        await lose_two(cluster)
        adding.append(ledger.add_batch(numbered(100, 9_999)))
        await state_is(ledger, WriterState.HEALING)
        single, rolled = ledger.add_entry(b"10000"), asyncio.create_task(ledger.roll())
        await bring_back(cluster)
        assert await asyncio.gather(*adding) == [(0, 9), (10, 99), (100, 9_999)]
        assert await single == 10_000
        assert await rolled == 10_001
        await ledger.close(seal=True)
        assert await everything(client) == [(n, b"%d" % n) for n in range(10_001)]


@pytest.mark.parametrize("kind", ["log", "unbounded"])
async def test_overdue_batches_fail_together_and_later_ones_go_on(cluster: Cluster, kind: str) -> None:
    async with client_aio.connect(cluster.uri, **SMALL) as client, asyncio.timeout(LASTS_S):
        add: Any
        writer: Any
        if kind == "log":
            writer = await client.open_log("a", append_timeout_s=1.5)
            add = writer.append_batch
        else:
            writer = await client.open_unbounded_ledger(NAME, append_timeout_s=1.5)
            add = writer.add_batch
        await add([b"first"])
        await lose_two(cluster)
        sent, waits, behind = add([b"1", b"2"]), add(large(b"x")), add([b"behind"])
        outcomes = await asyncio.gather(sent, waits, behind, return_exceptions=True)
        assert {type(each) for each in outcomes} == {OperationTimeoutError}
        # The writer may have learnt of its loss before anything was sent.
        assert outcomes[2].outcome is Outcome.NOT_DONE
        with pytest.raises(OperationTimeoutError):
            await writer.flush()
        await bring_back(cluster)
        first, last = await add([b"again 1", b"again 2"])
        assert (last - first if kind == "unbounded" else last.entry_id - first.entry_id) == 1
        await writer.close()
        if kind == "log":
            found = [data for _, data in await records(client)]
        else:
            found = [data for _, data in await everything(client)]
        assert found[0] == b"first"
        assert found[-2:] == [b"again 1", b"again 2"]
        # A run from the start of what failed may be there: nothing of the batch that is not done.
        failed = [b"1", b"2", *large(b"x")]
        assert found[1:-2] == failed[: len(found) - 3]
        assert len(found) == 3 or outcomes[0].outcome is Outcome.UNKNOWN


async def test_a_log_that_is_lost_fails_its_batches(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri, **SMALL) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(LASTS_S),
    ):
        log = await client.open_log("a")
        await log.append_batch([b"1", b"2"])
        async with other.open_log("a") as taken:
            sent, behind = log.append_batch(large(b"x")), log.append_batch([b"behind"])
            with pytest.raises(LogFencedError):
                await sent
            with pytest.raises(LogFencedError) as failed:
                await behind
            assert failed.value.outcome is Outcome.NOT_DONE
            assert log.told_failures
            await taken.append_batch([b"3"])
        assert [data for _, data in await records(client)] == [b"1", b"2", b"3"]


async def test_whoever_was_told_by_each_append_is_not_told_again_at_the_end(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(LASTS_S),
        client.open_log("a") as log,
    ):
        await log.append(b"1")
        await (await other.open_log("a")).close()
        await asyncio.wait([log.append(b"that nobody asks for")])
        for _ in range(3):
            with pytest.raises(LogFencedError):
                await log.append(b"2")
        assert log.told_failures


@pytest.mark.parametrize("kind", ["log", "ledger"])
async def test_adds_that_wait_for_a_copy_that_does_not_come_fail_and_others_go_on(
    cluster: Cluster, kind: str
) -> None:
    options = {"max_in_flight_bytes": 100_000, "add_quorum_timeout_s": 2.5}
    async with client_aio.connect(cluster.uri, **options) as client, asyncio.timeout(LASTS_S):
        writer: Any
        if kind == "log":
            writer = await client.open_log("a", guaranteed_write_quorum=True)
            add, add_batch = writer.append, writer.append_batch
        else:
            writer = await client.create_ledger(guaranteed_write_quorum=True)
            add, add_batch = writer.add_entry, writer.add_batch
        await add(b"first")
        await cluster["b3"].kill()
        await asyncio.gather(*[add(bytes(1000)) for _ in range(100)])  # acknowledged, and in flight
        with pytest.raises(NotEnoughBookiesError):
            await writer.drain()
        waits, behind = add_batch(large(b"x", 200)), add(b"behind")
        with pytest.raises(NotEnoughBookiesError) as failed:
            await waits
        assert failed.value.outcome is Outcome.NOT_DONE
        with pytest.raises(NotEnoughBookiesError):
            await behind
        with pytest.raises(NotEnoughBookiesError):
            await writer.flush()
        await writer.flush()
        await cluster["b3"].start()
        while writer.bytes_in_flight:  # until it has its copies
            with contextlib.suppress(NotEnoughBookiesError):
                await writer.drain()
            await asyncio.sleep(0.02)
        await add_batch(large(b"y", 200))
        await writer.close()
        if kind == "log":
            found = [data for _, data in await records(client)]
        else:
            found = await contents(client, writer.ledger_id)
        assert found == [b"first", *[bytes(1000)] * 100, *large(b"y", 200)]


async def test_batches_from_threads(cluster: Cluster) -> None:
    def use() -> None:
        with client_aio.sync.connect(cluster.uri, **SMALL) as client:
            with client.create_ledger() as ledger:
                futures = [ledger.add_batch_nowait(numbered(0, 9)), ledger.add_batch_nowait(large(b"x"))]
                single = ledger.add_entry_nowait(b"single")
                assert ledger.add_batch([b"1", b"2"]) == (2011, 2012)
                assert [each.result(0) for each in futures] == [(0, 9), (10, 2009)]
                assert single.result(0) == 2010
            with client.open_log("a", roll_entries=300) as log:
                first, last = log.append_batch(large(b"x"))
                assert first < last
                assert log.append_batch_nowait([b"1"]).result(LASTS_S)[0] > last
            assert [record.data for record in client.read_log("a")] == [*large(b"x"), b"1"]

    await asyncio.to_thread(use)
