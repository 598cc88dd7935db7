"""WATCH: one request that waits for many ledgers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.config import Limits
from bookie_aio.wire.messages import ALIVE_ID, Delete, Op, Ping, Status, Watch, WriteLac
from bookie_aio.wire.watching import UNWATCH, Moved, encode_asked, parse_moved
from tests.bookie_aio.server.test_server_long_polls import LONG_MS, write_lac
from tests.support.rawclient import RawClient, hello, lac_statement

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import Answer

WAIT_S = 10.0


def watch(client: RawClient, *rows: tuple[int, int], wait_ms: int = LONG_MS) -> asyncio.Future[Answer]:
    return client.send(Watch(wait_ms), encode_asked(rows))


async def moved(waiting: asyncio.Future[Answer]) -> list[Moved]:
    answer = await asyncio.wait_for(waiting, WAIT_S)
    assert answer.status is Status.OK, answer
    return parse_moved(memoryview(answer.body))


async def test_one_watch_tells_all_that_has_moved_and_each_once(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    writer = await bookies.connect(bookie)
    waiting = watch(client, (7, -1), (8, -1), (9, 3))
    await client.call(Ping())
    assert bookie.info()["ledgers_watched"] == 3
    await write_lac(writer, 7, 2)
    assert await moved(waiting) == [Moved(7, lac_statement(7, 2))]
    await write_lac(writer, 7, 3)  # is watched no more
    await write_lac(writer, 8, 0)  # no WATCH waits
    await write_lac(writer, 9, 3)  # is known
    assert await moved(watch(client)) == [Moved(8, lac_statement(8, 0))]
    await write_lac(writer, 9, 4)
    assert await moved(watch(client)) == [Moved(9, lac_statement(9, 4))]
    assert bookie.info()["ledgers_watched"] == 0


async def test_what_has_moved_before_it_is_watched_is_told_at_once(client: RawClient) -> None:
    await write_lac(client, 7, 4)
    assert await moved(watch(client, (7, 3), (8, -1))) == [Moved(7, lac_statement(7, 4))]
    assert await moved(watch(client, (7, 4), wait_ms=20)) == []


async def test_the_next_watch_ends_the_one_before(client: RawClient) -> None:
    first = watch(client, (7, -1))
    second = watch(client, (8, -1))
    assert await moved(first) == []
    await write_lac(client, 7, 0)
    assert await moved(second) == [Moved(7, lac_statement(7, 0))]


async def test_what_a_watch_finds_moved_is_in_its_own_answer(client: RawClient) -> None:
    """The client may have given up the one before, and drops what is in its answer."""
    await write_lac(client, 8, 4)
    first = watch(client, (7, -1))
    second = watch(client, (8, -1))
    assert await moved(first) == []
    assert await moved(second) == [Moved(8, lac_statement(8, 4))]


async def test_a_ledger_that_is_unwatched_is_not_told(client: RawClient) -> None:
    watch(client, (7, -1), (8, -1))
    waiting = watch(client, (7, UNWATCH))
    await write_lac(client, 7, 0)
    await client.call(Ping())
    assert not waiting.done()
    await write_lac(client, 8, 0)
    assert await moved(waiting) == [Moved(8, lac_statement(8, 0))]


async def test_a_watch_above_the_limit_is_refused_and_changes_nothing(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(connection_watches_max=2))
    client = await bookies.connect(bookie)
    waiting = watch(client, (1, -1), (2, -1))
    refused = await asyncio.wait_for(watch(client, (1, UNWATCH), (3, -1), (4, -1)), WAIT_S)
    assert refused.status is Status.TOO_MANY_REQUESTS
    await write_lac(client, 3, 0)
    await client.call(Ping())
    assert not waiting.done()
    assert await moved(watch(client, (2, -1), (1, -1), wait_ms=0)) == []  # no more than before
    await write_lac(client, 1, 0)
    assert await moved(watch(client)) == [Moved(1, lac_statement(1, 0))]


async def test_deleted_is_told_when_the_tombstone_and_all_before_it_are_durable(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client, writer = await bookies.connect(bookie), await bookies.connect(bookie)
    waiting = watch(client, (7, -1))
    await client.call(Ping())
    disk.gate.clear()
    adding, deleting = writer.add(7, 0, [b"accepted before"]), writer.send(Delete(7))
    assert bookie._engine is not None
    while not bookie._engine.is_deleted(7):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await client.call(Ping())
    again = watch(client, (7, -1))
    await client.call(Ping())
    assert not (waiting.done() and parse_moved(memoryview(waiting.result().body)))
    assert not again.done()
    disk.gate.set()
    assert (await adding).status is Status.OK
    told = await moved(waiting)
    assert (told or await moved(again)) == [Moved(7, None)]
    assert (await deleting).status is Status.OK


async def test_rows_that_are_none_close_the_connection(client: RawClient) -> None:
    client.send(Watch(0), b"no rows")
    await client.gone()


async def test_a_closed_connection_watches_nothing(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    leaver = await bookies.connect(bookie)
    watch(leaver, (7, -1), (8, -1))
    await leaver.call(Ping())
    assert bookie.info()["ledgers_watched"] == 2
    await leaver.close()
    while bookie.info()["connections"] != 1:
        await client.call(Ping())
    assert bookie.info()["ledgers_watched"] == 0
    await write_lac(client, 7, 0)


async def test_a_watch_is_answered_when_the_bookie_closes(bookie: Bookie, client: RawClient) -> None:
    waiting = watch(client, (7, -1))
    await client.call(Ping())
    await bookie.close()
    assert (await waiting).status is Status.SHUTTING_DOWN
    await client.gone()


@pytest.mark.pure
async def test_a_bookie_that_reads_no_requests_says_that_it_lives(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk hangs, and the PING waits behind adds that there is no room for."""
    bookie = await bookies.start(limits=Limits(connection_bytes_pending_max=1))
    client, old = await bookies.connect(bookie), await bookies.connect(bookie, greet=False)
    assert (await old.call(hello(version_max=3))).status is Status.OK
    held: list[tuple[Any, ...]] = []
    append = bookie._engine.append_statement
    monkeypatch.setattr(bookie._engine, "append_statement", lambda *call: held.append(call))
    for each in (client, old):
        each.send(WriteLac(7, 0, lac_statement(7, 0)))
    pings = [each.send(Ping()) for each in (client, old)]
    other = await bookies.connect(bookie)
    async with asyncio.timeout(WAIT_S):
        while not any(answer.request_id == ALIVE_ID for answer in client.arrived):
            await other.call(Ping())
    assert not any(ping.done() for ping in pings)
    assert {answer.op for answer in client.arrived if answer.request_id == ALIVE_ID} == {Op.PING}
    assert not any(answer.request_id == ALIVE_ID for answer in old.arrived)
    for call in held:
        append(*call)
    await asyncio.wait_for(asyncio.gather(*pings), WAIT_S)
