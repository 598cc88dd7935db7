"""The links themselves: each fault does what it says, on one link, and the others are unharmed."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Done, ListEntries, ListEntriesAnswer, Op, Ping
from tests.support.cluster import Cluster
from tests.support.links import WAIT_S, Frame, Links

if TYPE_CHECKING:
    from pathlib import Path

    from client_aio.bookies.connection import BookieConnection


async def ping(client: client_aio.Client, bookie_id: str) -> None:
    connection: BookieConnection = await client._context.pool.get(bookie_id)
    await connection.call(Ping(), Done, timeout_s=WAIT_S)


async def test_a_held_request_is_not_at_the_bookie_before_its_release(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=1) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", explicit_lac_delay_s=60) as client,
        client_aio.connect(cluster.uri) as other,
        client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as ledger,
    ):
        link = links["writer", "b1"]
        await ledger.add_entry(b"zero")
        held = link.requests.hold(Op.ADD, lambda frame: frame.block.first_entry == 1)
        answered = link.answers.see(Op.ADD)
        future = ledger.add_entry(b"one")
        frame: Frame = await held.reached()
        assert bytes(frame.block.payload) == b"one"
        connection = await other._context.pool.get("b1")
        # A listing waits for whatever the bookie has accepted by now.
        _, rows = await connection.call(ListEntries(ledger.ledger_id, 0), ListEntriesAnswer, timeout_s=WAIT_S)
        assert struct.unpack("<QQII", rows) == (0, 0, 1, 1)
        assert not future.done()
        assert not answered.is_reached
        held.release()
        assert await future == 1
        assert (await answered.reached()).is_answer


async def test_one_direction_can_be_blocked_for_one_client_only(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=2) as cluster,
        Links(cluster.uri) as links,
        links.connect("x") as x,
        links.connect("y") as y,
    ):
        await asyncio.gather(ping(x, "b1"), ping(x, "b2"), ping(y, "b1"))
        link = links["x", "b1"]
        link.answers.block()
        arrived = link.requests.see(Op.PING)
        waiting = asyncio.create_task(ping(x, "b1"))
        await arrived.reached()
        await asyncio.gather(ping(x, "b2"), ping(y, "b1"))
        assert not waiting.done()
        link.answers.unblock()
        await waiting
        assert {bookie_id: one.connections for bookie_id, one in links.of("x").items()} == {"b1": 1, "b2": 1}


async def test_a_black_hole_swallows_until_the_link_is_restored(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=1) as cluster, Links(cluster.uri) as links, links.connect("x") as x:
        await ping(x, "b1")
        link = links["x", "b1"]
        link.black_hole()
        waiting = asyncio.create_task(ping(x, "b1"))
        assert x._context.pool.peek("b1") is not None  # the connection stands
        await link.restore()
        with pytest.raises(client_aio.BookieUnavailableError, match="lost"):
            await waiting
        await ping(x, "b1")
        assert link.connections == 2


async def test_a_lost_answer_leaves_the_add_stored(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=2) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
        client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as ledger,
    ):
        bookie_id = ledger.metadata.last_fragment.bookies[0]
        link = links["writer", bookie_id]
        held = link.answers.hold(Op.ADD)
        future = ledger.add_entry(b"zero")
        await held.reached()
        assert not future.done()
        link.reset()
        assert await asyncio.wait_for(future, WAIT_S) == 0
        assert sum(one.connections for one in links.of("writer").values()) > 1


async def test_a_cut_link_refuses_and_a_restarted_bookie_is_found_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=1) as cluster, Links(cluster.uri) as links, links.connect("x") as x:
        link = links["x", "b1"]
        held = link.answers.hold(Op.PING)
        waiting = asyncio.create_task(ping(x, "b1"))
        await held.reached()
        await link.cut()
        with pytest.raises(client_aio.BookieUnavailableError, match="lost"):
            await waiting
        with pytest.raises(client_aio.BookieUnavailableError, match="cannot be reached"):
            await ping(x, "b1")
        await cluster["b1"].kill()
        await cluster["b1"].start()
        await link.restore()
        await ping(x, "b1")


async def test_a_compare_and_set_can_be_met(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=1) as cluster, Links(cluster.uri) as links, links.connect("x") as x:
        ledger = await x.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1)
        met: list[bool] = []

        async def meet(key: str) -> None:
            metadata = await x.ledger_metadata(ledger.ledger_id)
            met.append(metadata.is_closed)

        links.store("x").before_compare_and_set = meet
        await ledger.close()
        assert met == [False]
