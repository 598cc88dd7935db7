"""Logs on real bookies: writing, rolling, taking over, reading, truncating, deleting."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio import (
    BackpressureError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerState,
    LogFencedError,
    LogTruncatedError,
    NoSuchLedgerError,
    NoSuchLogError,
    Position,
    StaleTransactionError,
    WriterAbortedError,
)
from client_aio.log.roller import RETRY_S
from metadata.access.logs import LogStore
from metadata.backends.uri import open_store
from tests.support.cluster import Cluster
from tests.support.following import appended_until_followed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client_aio import Client, LogRecord


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with client_aio.connect(cluster.uri) as made:
        yield made


async def contents(client: Client, name: str = "a", start: Position | None = None) -> list[bytes]:
    return [record.data async for record in client.read_log(name, start)]


async def until_read(client: Client, count: int, name: str = "a") -> list[LogRecord]:
    """Read so many records of a log, following it."""
    found: list[LogRecord] = []
    async with asyncio.timeout(30), contextlib.aclosing(client.read_log(name, follow=True)) as records:
        async for record in records:
            found.append(record)
            if len(found) == count:
                break
    return found


async def states(client: Client, name: str = "a") -> list[LedgerState]:
    rows = (await client.log_metadata(name)).rows
    return [(await client.ledger_metadata(row.ledger_id)).state for row in rows]


async def test_records_are_appended_and_read_in_order(client: Client) -> None:
    async with client.open_log("a") as log:
        futures = [log.append(b"%d" % number) for number in range(1000)]
        positions = await asyncio.gather(*futures)
        assert positions == sorted(set(positions))
        assert log.last_add_confirmed == positions[-1]
        assert [each async for each in client.list_logs()] == ["a"]
    records = [record async for record in client.read_log("a")]
    assert [record.position for record in records] == positions
    assert [record.data for record in records] == [b"%d" % number for number in range(1000)]
    assert await contents(client, start=positions[990]) == [b"%d" % number for number in range(990, 1000)]
    assert await states(client) == [LedgerState.CLOSED]
    batches = [batch async for batch in client.read_log_batches("a", str(positions[500]))]
    assert sum(map(len, batches)) == 500
    assert (batches[0].first_position, batches[-1].last_position) == (positions[500], positions[-1])


async def test_a_log_is_rolled_by_entries_under_load_and_read_without_gap(client: Client) -> None:
    async with client.open_log("a", roll_entries=100) as log:
        reading = asyncio.create_task(until_read(client, 3000))
        positions = []
        for start in range(0, 3000, 50):
            futures = [log.append(b"%d" % number) for number in range(start, start + 50)]
            positions += await asyncio.gather(*futures)
        assert positions == sorted(set(positions))
        assert log.rolls >= 10
        followed = await reading
        # What was acknowledged is there to be read, wherever the log is in its rolling.
        assert await contents(client) == [b"%d" % number for number in range(3000)]
    assert [record.data for record in followed] == [b"%d" % number for number in range(3000)]
    assert [record.position for record in followed] == positions
    assert set(await states(client)) == {LedgerState.CLOSED}
    metadata = await client.log_metadata("a")
    assert [row.id for row in metadata.rows] == sorted({row.ledger_id for row in metadata.rows})


async def test_at_most_the_last_two_ledgers_are_not_closed_at_any_time(client: Client) -> None:
    async with client.open_log("a", roll_entries=8) as log:
        for number in range(40):
            await asyncio.gather(*(log.append(b"x") for _ in range(4)))
            if number % 4 == 0:
                assert set((await states(client))[:-2]) <= {LedgerState.CLOSED}
    assert log.rolls > 3


async def test_a_log_is_rolled_by_call_and_by_age_but_not_when_it_is_empty(client: Client) -> None:
    async with client.open_log("a", roll_age_s=0.2) as log:
        await log.roll()
        assert log.rolls == 0
        first = await log.append(b"1")
        await log.roll()
        second = await log.append(b"2")
        assert second > first
        assert second.ledger_id != first.ledger_id
        third, count = await log.append(b"3"), 1
        while third.ledger_id == second.ledger_id:
            third, count = await log.append(b"3"), count + 1
        assert third > second
    assert await contents(client) == [b"1", b"2", *[b"3"] * count]


async def test_appends_during_a_roll_are_held_and_keep_their_order(client: Client) -> None:
    async with client.open_log("a") as log:
        futures = []
        for number in range(2000):
            futures.append(log.append(b"%d" % number))
            if number % 200 == 100:
                rolling = asyncio.create_task(log.roll())
                await asyncio.sleep(0)
        order: list[int] = []
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: order.append(number))
        await log.flush()
        await rolling
        await asyncio.sleep(0)
        assert order == list(range(2000))
    assert await contents(client) == [b"%d" % number for number in range(2000)]


async def test_who_opens_a_log_takes_it_over(client: Client) -> None:
    async with client_aio.connect(client._store) as other:
        first = await client.open_log("a")
        await first.append(b"1")
        async with other.open_log("a") as second:
            await second.append(b"2")
            future = first.append(b"lost")
            with pytest.raises(LogFencedError, match="taken over") as fenced:
                await future
            assert fenced.value.outcome is client_aio.Outcome.UNKNOWN
            for call in (first.flush, first.drain, first.close, first.roll):
                with contextlib.suppress(LogFencedError):
                    await call()
                    assert call == first.close, f"{call} said nothing"
            with pytest.raises(LogFencedError):
                await first.append(b"lost as well")
            await second.append(b"3")
    assert await contents(client) == [b"1", b"2", b"3"]


async def test_a_writer_that_rolls_learns_that_it_has_lost_the_log(client: Client) -> None:
    first = await client.open_log("a")
    await first.append(b"1")
    async with client_aio.connect(client._store) as other, other.open_log("a") as second:
        with pytest.raises(LogFencedError):
            await first.roll()
        await second.append(b"2")
    assert await contents(client) == [b"1", b"2"]


async def test_a_reader_follows_over_takeovers(client: Client) -> None:
    reading = None
    for number in range(5):
        log = await client.open_log("a", roll_entries=3)
        if reading is None:
            reading = asyncio.create_task(until_read(client, 50))
        for each in range(10):
            await log.append(b"%d-%d" % (number, each))
        if number % 2:
            await log.abort()
        # Otherwise it is still open, and shut out by the next one.
    assert reading is not None
    found = await reading
    assert [record.data for record in found] == [b"%d-%d" % (i, j) for i in range(5) for j in range(10)]
    assert [record.position for record in found] == sorted({record.position for record in found})


async def test_empty_ledgers_anywhere_in_a_log_are_read_over(client: Client) -> None:
    async with asyncio.timeout(20):
        for count in range(3):
            async with client.open_log("a"):
                assert await contents(client) == []  # the last one is empty, and open
            assert await contents(client) == [], count
        async with client.open_log("a") as log:
            await log.append(b"1")
        for _ in range(2):
            await (await client.open_log("a")).abort()
            assert await contents(client) == [b"1"]
        assert [record.data async for record in client.read_log("a", "end")] == []


async def test_a_log_may_be_read_from_its_end_and_from_a_time(cluster: Cluster, client: Client) -> None:
    async with client.open_log("a") as log:
        await log.append(b"1")
        await log.roll()
        between = datetime.now(UTC)
        await asyncio.sleep(0.01)
        await log.append(b"2")
        await log.roll()
        await cluster.heard(client, await log.append(b"3"))
        assert [r.data async for r in client.read_log("a", "end")] == []
        following = client.read_log("a", "end", follow=True)
        last = await appended_until_followed(log, following)
        await following.aclose()
        await cluster.heard(client, last.position)
        found = [r.data async for r in client.read_log("a", 0.0)]
        assert found[:3] == [b"1", b"2", b"3"]
        assert found[-1] == last.data
        assert [r.data async for r in client.read_log("a", between)][-len(found) + 1 :] == found[1:]
        later = [r async for r in client.read_log("a", between.timestamp() + 1000)]
        assert later[-1] == last


async def test_reading_from_a_time_misses_nothing_although_the_next_ledger_is_listed_ahead(
    cluster: Cluster, client: Client
) -> None:
    async with client.open_log("a", roll_entries=80) as log, await open_store(cluster.uri) as store:
        await asyncio.gather(*(log.append(b"early") for _ in range(20)))
        changes = LogStore(store, "a", draw_token=str).watch()
        async with asyncio.timeout(10), contextlib.aclosing(changes):
            async for _ in changes:
                if len(rows := (await client.log_metadata("a")).rows) == 2:
                    break
        written = await log.append(b"late")
    assert written.ledger_id == rows[0].id
    assert written in [record.position async for record in client.read_log("a", rows[1].created_ms / 1000)]


async def test_a_log_is_truncated_before_a_position(cluster: Cluster, client: Client) -> None:
    async with client.open_log("a") as log:
        positions = []
        for number in range(6):
            positions += [await log.append(b"%d.%d" % (number, each)) for each in range(3)]
            await log.roll()
        rows = (await client.log_metadata("a")).rows
        reader = client.read_log("a")
        assert (await anext(reader)).data == b"0.0"
        dropped = await client.truncate_log("a", positions[10])  # 3.1
        assert [row.id for row in dropped] == [row.id for row in rows[:3]]
        later = [b"%d.%d" % (i, j) for i in (4, 5) for j in range(3)]
        assert await contents(client) == [b"3.1", b"3.2", *later]
        for row in dropped:
            with pytest.raises(NoSuchLedgerError):
                await client.ledger_metadata(row.ledger_id)
        with pytest.raises(LogTruncatedError, match="begins at"):
            await contents(client, start=positions[0])
        with pytest.raises(LogTruncatedError):
            _ = [record async for record in reader]
        assert await client.truncate_log("a", positions[10]) == []
        assert await client.truncate_log("a", positions[0]) == []
        with pytest.raises(InvalidArgumentError, match="last ledger"):
            await client.truncate_log("a", Position(10**9, 0))
        await cluster.heard(client, await log.append(b"on"))
        # Never the last ledger, and never what is yet to be written.
        await client.truncate_log("a", Position(log.ledger_id, 10**6))
        position = await log.append(b"and on")
        await cluster.heard(client, position)
        assert await contents(client) == [b"and on"]
        assert (await client.log_metadata("a")).begins_at == position
    assert await contents(client) == [b"and on"]


@pytest.mark.parametrize("is_exact", [True, False])
async def test_a_reader_that_has_read_what_is_cut_off_goes_on(client: Client, is_exact: bool) -> None:
    """It stands at the end of a ledger, and the log is truncated where the next one begins, ids later."""
    for data in (b"1", b"2", b"", b"3"):
        async with client.create_ledger() as ledger:
            if data:
                await ledger.add_entry(data)
        await client.add_to_log("a", [ledger.ledger_id])
        await client._context.ledgers.allocate_id(at_least=ledger.ledger_id + 10)
    rows = (await client.log_metadata("a")).rows
    end = Position(rows[1].id, 1)  # behind "2"
    before = Position(rows[3].id, 0) if is_exact else Position(rows[3].id - 1, 7)
    dropped = await client.truncate_log("a", before)
    assert [row.id for row in dropped] == [row.id for row in rows[:3]]
    assert (await client.log_metadata("a")).begins_at == end
    assert await contents(client, start=end) == [b"3"]
    with pytest.raises(LogTruncatedError):
        await contents(client, start=Position(rows[1].id, 0))
    assert await client.truncate_log("a", before) == []
    assert (await client.log_metadata("a")).begins_at == end


@pytest.mark.parametrize("follow", [True, False])
async def test_a_reader_goes_on_though_what_it_knows_of_is_cut_off(client: Client, follow: bool) -> None:
    """It has read all of that, and stands before empty ledgers that are gone by now (one is open already)."""
    for data in (b"1", b"", b"", b"2"):
        async with client.create_ledger() as ledger:
            if data:
                await ledger.add_entry(data)
        await client.add_to_log("a", [ledger.ledger_id])
    rows = (await client.log_metadata("a")).rows
    async with asyncio.timeout(30), contextlib.aclosing(client.read_log("a", follow=follow)) as records:
        assert (await anext(records)).data == b"1"
        assert [row.id for row in await client.truncate_log("a", Position(rows[3].id, 0))] == [
            row.id for row in rows[:3]
        ]
        assert (await anext(records)).data == b"2"


async def test_a_log_is_deleted_with_its_ledgers_and_its_writer_shut_out(client: Client) -> None:
    log = await client.open_log("a", custom_metadata={"app": b"x"})
    await log.append(b"1")
    await log.roll()
    await log.append(b"2")
    assert (await client.log_metadata("a")).custom == {"app": b"x"}
    await client.delete_log("a")
    assert [each async for each in client.list_logs()] == []
    assert [each async for each in client.list_ledgers()] == []
    for call in (client.log_metadata("a"), client.delete_log("a"), client.truncate_log("a", Position(0, 0))):
        with pytest.raises(NoSuchLogError):
            await call
    with pytest.raises(NoSuchLogError):
        await contents(client)
    with pytest.raises(NoSuchLogError):
        await client.open_log("a", create=False)
    with pytest.raises(LogFencedError):
        await log.append(b"3")
    async with client.open_log("a") as again:
        await again.append(b"new")
    assert await contents(client) == [b"new"]


async def test_leaving_by_an_exception_aborts(client: Client) -> None:
    futures = []

    async def write() -> None:
        async with client.open_log("a") as log:
            await log.append(b"1")
            futures.append(log.append(b"2"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write()
    with pytest.raises(WriterAbortedError):
        await futures[0]
    assert await states(client) == [LedgerState.OPEN]
    async with client.open_log("a") as again:
        await again.append(b"3")
    assert (await contents(client)) in ([b"1", b"3"], [b"1", b"2", b"3"])


async def test_a_closed_log_takes_nothing_and_wrong_arguments_are_told_at_once(client: Client) -> None:
    async with client.open_log("a") as log:
        with pytest.raises(InvalidArgumentError):
            log.append("text")
        with pytest.raises(client_aio.EntryTooLargeError):
            log.append(b"x" * (5 << 20))
    with pytest.raises(LedgerClosedError):
        await log.append(b"late")
    await log.close()
    for wrong in ("", "a/b", "..", "x" * 300):
        with pytest.raises(InvalidArgumentError, match="name"):
            client.open_log(wrong)
    for start in ("7", "7:-1", datetime(2020, 1, 1), Position(-1, 0)):
        with pytest.raises(InvalidArgumentError):
            client.read_log("a", start)
    for limit in (0, -1, float("nan"), "many"):
        with pytest.raises(InvalidArgumentError, match="roll_age_s"):
            client.open_log("a", roll_age_s=limit)
    with pytest.raises(InvalidArgumentError, match="roll_bytes"):
        client.open_log("a", roll_bytes=0)


async def test_back_pressure_counts_what_is_held_back_for_a_roll(cluster: Cluster) -> None:
    connecting = client_aio.connect(cluster.uri, max_in_flight_bytes=100_000)
    async with connecting as client, client.open_log("a") as log:
        await log.append(b"first")
        for bookie in cluster.bookies.values():
            bookie.stop()
        try:
            waiting = log.append(b"second")
            log.hold()
            for _ in range(39):
                log.append(b"x" * 10_000)
            with pytest.raises(BackpressureError):
                _ = [log.append(b"x" * 10_000) for _ in range(3)]
            draining = asyncio.create_task(log.drain())
            await asyncio.sleep(0)
            assert not draining.done()
        finally:
            for bookie in cluster.bookies.values():
                bookie.resume()
        log.switch_to(log.current)
        await draining
        await waiting


async def test_closed_ledgers_are_added_in_one_step_once_per_transaction(client: Client) -> None:
    async def ledger(*entries: bytes) -> int:
        async with client.create_ledger() as writer:
            for entry in entries:
                await writer.add_entry(entry)
        return writer.ledger_id

    one, two, three = await ledger(b"1", b"2"), await ledger(), await ledger(b"3")
    added = await client.add_to_log("a", [three, one, two], transaction=("q", 4), custom_metadata={"k": b"v"})
    assert not added.repeated
    assert [row.ledger_id for row in added.rows] == [three, one, two]
    assert await contents(client) == [b"3", b"1", b"2"]
    again = await client.add_to_log("a", [three, one, two], transaction=("q", 4))
    assert again.repeated
    for batch, content, said in ((3, "", "has recorded batch 4"), (4, "x", "other records")):
        with pytest.raises(StaleTransactionError, match=said):
            await client.add_to_log("a", [], transaction=("q", batch), content=content)
    metadata = await client.log_metadata("a")
    assert metadata.rows == added.rows
    assert (metadata.transactions, metadata.custom) == ({"q": 4}, {"k": b"v"})

    log = await client.open_log("a")
    await log.append(b"w")
    four = await ledger(b"4")
    await client.add_to_log("a", [four], transaction=("q", 5))
    with pytest.raises(LogFencedError):
        await log.append(b"no more")
    assert await contents(client) == [b"3", b"1", b"2", b"w", b"4"]

    five = await ledger(b"5")
    await client.add_to_log("a", [five], replace=True)
    assert await contents(client) == [b"5"]
    assert [each async for each in client.list_ledgers()] == [five]
    async with client.create_ledger() as open_one:
        with pytest.raises(InvalidArgumentError, match="only CLOSED"):
            await client.add_to_log("a", [open_one.ledger_id])
    with pytest.raises(InvalidArgumentError, match="twice"):
        await client.add_to_log("a", [five, five])
    for replace in (True, False):
        with pytest.raises(InvalidArgumentError, match=f"has ledger {five} already"):
            await client.add_to_log("a", [five], replace=replace)
    assert await contents(client) == [b"5"]
    async with client.open_log("a") as log:
        await log.append(b"6")
    assert await contents(client) == [b"5", b"6"]


async def test_what_a_crash_left_over_is_swept_and_nothing_else(client: Client) -> None:
    log = await client.open_log("a")
    await log.append(b"1")
    plain = await client.create_ledger()
    # As a writer leaves them that dies after making a ledger, and before it is listed.
    roller = log._roller
    assert roller is not None
    orphan = await roller._create()
    await orphan.abort()
    assert (await client.sweep_log_orphans()).ledgers == ()  # too young
    report = await client.sweep_log_orphans(older_than_s=0)
    assert report.ledgers == (orphan.ledger_id,)
    with pytest.raises(NoSuchLedgerError):
        await client.ledger_metadata(orphan.ledger_id)
    assert await client.ledger_metadata(plain.ledger_id)
    # The sweep has changed the list's version: the writer copes.
    await log.roll()
    await log.append(b"2")
    await log.close()
    assert await contents(client) == [b"1", b"2"]
    assert (await client.sweep_log_orphans(older_than_s=0)).ledgers == ()


async def test_a_log_with_a_password_needs_it(client: Client) -> None:
    protect = {"digest": "hmac-sha256", "password": b"secret"}
    async with client.open_log("a", **protect) as log:
        await log.append(b"1")
        await log.roll()
        await log.append(b"2")
    with pytest.raises(client_aio.UnauthorizedAccessError):
        await contents(client)
    assert [r.data async for r in client.read_log("a", password=b"secret")] == [b"1", b"2"]
    async with client.open_log("a", **protect) as log:
        await log.append(b"3")
        with pytest.raises(client_aio.UnauthorizedAccessError):
            await client.open_log("a", digest="hmac-sha256", password=b"wrong")
        await log.append(b"4")
        truncate_at = log.last_add_confirmed
        assert truncate_at is not None
    other = await client.create_ledger()
    await other.close()
    # All of it is closed now: nothing needs the password but what it would do.
    for attempt in (
        client.truncate_log("a", truncate_at),
        client.truncate_log("a", truncate_at, password=b"wrong"),
        client.delete_log("a"),
        client.open_log("a"),
        client.add_to_log("a", [other.ledger_id], replace=True),
    ):
        with pytest.raises(client_aio.UnauthorizedAccessError):
            await attempt
    await client.delete_ledger(other.ledger_id)
    assert [r.data async for r in client.read_log("a", password=b"secret")] == [b"1", b"2", b"3", b"4"]
    async with client.open_log("a", **protect):
        await client.truncate_log("a", truncate_at, password=b"secret")
    assert [r.data async for r in client.read_log("a", password=b"secret")] == [b"4"]
    await client.delete_log("a", password=b"secret")
    assert [each async for each in client.list_ledgers()] == []


async def test_a_log_rolls_on_two_bookies_of_three(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.open_log("events", roll_entries=8) as log:
            await log.append(b"0")
            await cluster["b3"].end()
            while log.rolls < 3:
                await log.append(b"more")
        rows = (await client.log_metadata("events")).rows
        assert all([(await client.ledger_metadata(row.ledger_id)).is_closed for row in rows])


async def test_a_roll_that_finds_no_bookies_is_tried_again_in_a_while_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        # With guaranteed write quorum no ledger begins on two bookies of three, and writing goes on at Qa.
        log = await client.open_log("events", roll_entries=80, guaranteed_write_quorum=True)
        await log.append(b"0")
        await cluster["b3"].end()
        begun = asyncio.get_running_loop().time()
        for number in range(200):
            await log.append(b"%d" % number)
        taken = asyncio.get_running_loop().time() - begun
        await log.abort()
    tries = sum("has no next ledger" in record.message for record in caplog.records)
    assert 1 <= tries <= 2 + taken / RETRY_S
