"""Long polls for the LAC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie_aio.config import Limits
from bookie_aio.wire.messages import NO_TERM, Ping, ReadLac, ReadLacAnswer, Status, WriteLac
from metadata.ids import TERM_FINAL
from tests.support.rawclient import RawClient, lac_statement

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies

LONG_MS = 30_000


async def write_lac(client: RawClient, ledger_id: int, lac: int) -> None:
    assert (await client.call(WriteLac(ledger_id, 0, lac_statement(ledger_id, lac)))).status is Status.OK


async def test_a_poll_is_answered_when_the_lac_moves(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    writer = await bookies.connect(bookie)
    first = client.send(ReadLac(7, NO_TERM, -1, LONG_MS))
    ahead = client.send(ReadLac(7, NO_TERM, 3, LONG_MS))
    other = client.send(ReadLac(8, NO_TERM, -1, LONG_MS))
    await client.call(Ping())
    assert bookie.info()["polls_waiting"] == 3
    await writer.add(7, 0, [b"a"])  # states no LAC
    await client.call(Ping())
    assert not first.done()
    await writer.add(7, 1, [b"b"], lac=0)
    assert (await asyncio.wait_for(first, 5)).message == ReadLacAnswer(lac_statement(7, 0), 1, False)
    assert not ahead.done()
    await write_lac(writer, 7, 4)
    assert (await asyncio.wait_for(ahead, 5)).message == ReadLacAnswer(lac_statement(7, 4), 1, False)
    assert not other.done()
    assert bookie.info()["polls_waiting"] == 1


async def test_a_poll_for_less_than_is_known_is_answered_at_once(client: RawClient) -> None:
    await write_lac(client, 7, 4)
    assert (await client.call(ReadLac(7, NO_TERM, 3, LONG_MS))).message == ReadLacAnswer(
        lac_statement(7, 4), -1, False
    )


async def test_a_poll_that_times_out_is_answered_with_what_there_is(
    bookie: Bookie, client: RawClient
) -> None:
    await write_lac(client, 7, 4)
    started = asyncio.get_running_loop().time()
    answer = await client.call(ReadLac(7, NO_TERM, 4, 50))
    assert asyncio.get_running_loop().time() - started >= 0.04
    assert answer.message == ReadLacAnswer(lac_statement(7, 4), -1, False)
    assert bookie.info()["polls_waiting"] == 0


async def test_a_fencing_poll_fences_before_it_waits(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    poll = client.send(ReadLac(7, TERM_FINAL, -1, LONG_MS))
    await client.call(Ping())
    writer = await bookies.connect(bookie)
    assert (await writer.add(7, 0, [b"a"])).status is Status.INVALID_TERM
    statement = lac_statement(7, 2)
    assert (await writer.call(WriteLac(7, TERM_FINAL, statement))).status is Status.OK
    assert (await asyncio.wait_for(poll, 5)).message == ReadLacAnswer(statement, -1, False)


async def test_a_closed_connection_leaves_no_poll_behind(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    leaver = await bookies.connect(bookie)
    leaver.send(ReadLac(7, NO_TERM, -1, LONG_MS))
    leaver.send(ReadLac(8, NO_TERM, -1, LONG_MS))
    await leaver.call(Ping())
    assert bookie.info()["polls_waiting"] == 2
    await leaver.close()
    while bookie.info()["connections"] != 1:
        await client.call(Ping())
    assert bookie.info()["polls_waiting"] == 0
    await client.add(7, 1, [b"b"], lac=0)


async def test_too_many_polls_on_a_connection_are_refused(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(connection_polls_max=2))
    client = await bookies.connect(bookie)
    polls = [client.send(ReadLac(7, NO_TERM, -1, LONG_MS)) for _ in range(3)]
    assert (await polls[2]).status is Status.TOO_MANY_REQUESTS
    other = await bookies.connect(bookie)
    last = other.send(ReadLac(7, NO_TERM, -1, LONG_MS))
    await other.call(Ping())
    await write_lac(other, 7, 0)
    for poll in (*polls[:2], last):
        assert (await poll).status is Status.OK


async def test_polls_are_answered_when_the_bookie_closes(bookie: Bookie, client: RawClient) -> None:
    poll = client.send(ReadLac(7, NO_TERM, -1, LONG_MS))
    await client.call(Ping())
    await bookie.close()
    assert (await poll).status is Status.SHUTTING_DOWN
    await client.gone()


async def test_too_many_polls_on_all_connections_are_refused(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(polls_max=2))
    clients = [await bookies.connect(bookie) for _ in range(3)]
    polls = []
    for client in clients:
        polls.append(client.send(ReadLac(7, NO_TERM, -1, LONG_MS)))
        if client is not clients[2]:
            await client.call(Ping())
    refused = await polls[2]
    assert refused.status is Status.TOO_MANY_REQUESTS
    await write_lac(clients[2], 7, 0)
    for poll in polls[:2]:
        assert (await poll).status is Status.OK
    last = clients[2].send(ReadLac(7, NO_TERM, 0, LONG_MS))  # there is room again
    await clients[2].call(Ping())
    assert bookie.info()["polls_waiting"] == 1
    last.cancel()
