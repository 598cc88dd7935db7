"""Readers: from whom they read, what they refuse, what they see of writers that come to an end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Done, Op
from metadata.backends.uri import open_store
from metadata.ids import ledger_key
from tests.support.cluster import Cluster
from tests.support.links import Frame, Links
from tests.support.unbounded import numbered

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator
    from pathlib import Path

WAIT_S = 30


async def data(entries: AsyncIterable[client_aio.Entry]) -> list[bytes]:
    return [entry.data async for entry in entries]


@pytest.mark.parametrize("shape", [(3, 3, 2), (4, 2, 2)])
async def test_what_is_not_acknowledged_is_read_only_when_asked_for(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    size, write, ack = shape
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger(ensemble_size=size, write_quorum=write, ack_quorum=ack)
        await ledger.add_entries(b"%d" % n for n in range(40))
        reader = await other.open_ledger(ledger.ledger_id)
        async with asyncio.timeout(WAIT_S):  # an idle writer states it before long
            while await reader.read_last_add_confirmed() < 39:
                pass
        # Stored by all, acknowledged to nobody: the answers do not arrive.
        names = ledger.metadata.last_fragment.bookies
        held = [links["writer", name].answers.hold(Op.ADD) for name in names]
        for n in range(40, 50):
            ledger.add_entry(b"%d" % n)
        for hold in held:
            await asyncio.wait_for(hold.reached(), WAIT_S)
        with pytest.raises(client_aio.NoSuchEntryError, match="beyond the last add confirmed"):
            reader.read(30, 49)
        assert await data(reader.read_unconfirmed(30, 1000)) == [b"%d" % n for n in range(30, 50)]
        assert await data(reader.read_unconfirmed(50, 1000)) == []
        assert reader.last_add_confirmed == 39
        with pytest.raises(client_aio.InvalidArgumentError):
            reader.read_unconfirmed(5, 3)
        await ledger.abort()


async def test_a_scan_spreads_over_the_write_set(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entries(bytes(1000) for _ in range(5000))
        async with Links(cluster.uri) as links, links.connect("reader") as other:
            seen = [links["reader", name].requests.see(Op.READ) for name in ("b1", "b2", "b3")]
            reader = await other.open_ledger(ledger.ledger_id)
            assert len(await data(reader.read(0, 4999))) == 5000
            for each in seen:
                await asyncio.wait_for(each.reached(), WAIT_S)


async def test_a_slow_answer_is_asked_for_elsewhere_too(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"x")
        async with Links(cluster.uri) as links, links.connect("reader", speculative_read_s=0.05) as other:
            reader = await other.open_ledger(ledger.ledger_id)
            for name in ("b1", "b2"):
                links["reader", name].answers.block()
            async with asyncio.timeout(WAIT_S):
                for _ in range(3):  # whichever is asked first
                    assert await data(reader.read(0, 0)) == [b"x"]


async def test_the_lac_needs_answers_that_cover_every_write_set(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri) as client,
        Links(cluster.uri) as links,
        links.connect("reader", read_timeout_s=2) as other,
    ):
        ledger = await client.create_ledger(ack_quorum=2)
        await ledger.add_entry(b"x")
        reader = await other.open_ledger(ledger.ledger_id)
        for name in ("b1", "b2"):
            await links["reader", name].cut()
        with pytest.raises(client_aio.BookieUnavailableError, match="too few bookies"):
            await reader.read_last_add_confirmed()
        # One answer is no more than a hint, and that is what this asks for.
        async with asyncio.timeout(WAIT_S):
            while await reader.try_read_last_add_confirmed() < 0:
                pass
        await links["reader", "b1"].restore()
        async with asyncio.timeout(WAIT_S):
            while await reader.read_last_add_confirmed() < 0:
                pass
        await ledger.close()


async def test_a_tail_survives_ensemble_changes_and_recovery_and_ends_with_the_ledger(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger()
        reader = await other.open_ledger(ledger.ledger_id)

        async def follow() -> list[bytes]:
            async with aclosing(reader.tail()) as entries:
                return await data(entries)

        following = asyncio.create_task(follow())
        count = 0
        async with asyncio.timeout(WAIT_S):
            for fragments in (2, 3):
                count = await ledger.add_entry(b"%d" % count) + 1
                victim = cluster[ledger.metadata.last_fragment.bookies[0]]
                await victim.kill()
                while len(ledger.metadata.fragments) < fragments:
                    count = await ledger.add_entry(b"%d" % count) + 1
                await victim.start()
            await ledger.abort()
            async with client_aio.connect(cluster.uri) as third:
                recovered = await third.open_ledger(ledger.ledger_id, recover=True)
            seen = await following
        assert recovered.last_add_confirmed == count - 1
        assert seen == [b"%d" % n for n in range(count)]


async def test_an_acknowledged_entry_is_found_by_a_reader_whose_metadata_server_lags(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=5) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
        links.connect("reader") as other,
    ):
        ledger = await client.create_ledger(ensemble_size=3, write_quorum=2, ack_quorum=2)
        await ledger.add_entries([b"0", b"1", b"2"])
        reader = await other.open_ledger(ledger.ledger_id)
        await links.store("reader").lag(ledger_key(ledger.ledger_id))
        for bookie_id in ledger.metadata.last_fragment.bookies[:2]:
            await links["writer", bookie_id].cut()
        for n in range(3, 12):
            await ledger.add_entry(b"%d" % n)
        last = await reader.try_read_last_add_confirmed()
        while last < 9:  # the third bookie keeps its seat, and tells
            last = await reader.try_read_last_add_confirmed()
        assert len(reader.metadata.fragments) == 1
        # Entries 3, 6 and 9 are kept by two bookies that the reader has not heard of.
        assert await data(reader.read(0, last)) == [b"%d" % n for n in range(last + 1)]
        await ledger.close()


async def test_who_comes_while_a_connection_fails_tries_once_more(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=1) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as ledger:
            await ledger.add_entry(b"x")
        async with Links(cluster.uri) as links, links.connect("reader") as other:
            reader = await other.open_ledger(ledger.ledger_id)
            held = links["reader", "b1"].requests.hold(Op.HELLO)
            first = asyncio.create_task(data(reader.read(0, 0)))
            await held.reached()
            second = asyncio.create_task(data(reader.read(0, 0)))
            await asyncio.sleep(0)  # it waits for the same connection
            links["reader", "b1"].reset()
            with pytest.raises(client_aio.BookieUnavailableError):
                await asyncio.wait_for(first, WAIT_S)
            assert await asyncio.wait_for(second, WAIT_S) == [b"x"]


def rot(frame: Frame) -> Frame | None:
    """Turn a bit of an entry on its way."""
    if frame.op is not Op.READ or not frame.body:
        return None
    body = bytearray(frame.body)
    body[-1] ^= 1
    return frame._replace(body=memoryview(bytes(body)))


async def test_damage_at_one_bookie_has_the_metadata_read_again_too(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=3) as cluster,
        Links(cluster.uri) as links,
        client_aio.connect(cluster.uri) as one,
        links.connect("reader", connect_timeout_s=1, read_timeout_s=1) as other,
    ):
        async with one.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=2) as ledger:
            await ledger.add_entries(numbered(0, 9))
        stays, lost = ledger.metadata.fragments[0].bookies
        spare = next(name for name in cluster.bookies if name not in (stays, lost))
        reader = await other.open_ledger(ledger.ledger_id)
        await one.repair_ledger(ledger.ledger_id, replace=lost, by=spare)
        await cluster[lost].kill()
        await links["reader", lost].cut()

        links["reader", stays].answers.forge = rot
        fresh = await other.open_ledger(ledger.ledger_id)
        assert [entry.data async for entry in fresh.read(0, 9)] == numbered(0, 9)
        assert [entry.data async for entry in reader.read(0, 9)] == numbered(0, 9)


async def test_an_answer_of_another_kind_is_a_bookie_that_breaks_the_protocol(tmp_path: Path) -> None:
    def lie(frame: Frame) -> Frame | None:
        return frame._replace(op=Op.FORCE, message=Done(), body=memoryview(b""))

    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        client_aio.connect(cluster.uri) as one,
        links.connect("reader", read_timeout_s=1) as other,
    ):
        ledger = await one.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=1)
        await ledger.add_entries(numbered(0, 9))
        await ledger.close()
        reader = await other.open_ledger(ledger.ledger_id)
        links["reader", ledger.metadata.last_fragment.bookies[0]].answers.forge = lambda frame: (
            lie(frame) if frame.op is Op.READ else None
        )
        for _ in range(2):
            assert [entry.data async for entry in reader.read(0, 9)] == numbered(0, 9)
        ledger = await one.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=1)
        await ledger.add_entries(numbered(0, 9))
        links["reader", ledger.metadata.last_fragment.bookies[0]].answers.forge = lambda frame: (
            lie(frame) if frame.op is Op.READ else None
        )
        with pytest.raises(client_aio.LedgerRecoveryError):
            await asyncio.wait_for(other.open_ledger(ledger.ledger_id, recover=True), WAIT_S)


async def test_damage_is_damage_where_the_metadata_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        client_aio.connect(cluster.uri) as one,
        links.connect("reader") as other,
    ):
        async with one.create_ledger() as ledger:
            await ledger.add_entry(b"0")
        reader = await other.open_ledger(ledger.ledger_id)
        for bookie_id in cluster.bookies:
            links["reader", bookie_id].answers.forge = rot

        async def away(ledger_id: int) -> None:
            raise client_aio.MetadataUnavailableError("away")

        monkeypatch.setattr(other._context.ledgers, "sync", away)
        with pytest.raises(client_aio.DigestMismatchError):
            [entry async for entry in reader.read(0, 0)]


async def test_closing_the_client_ends_those_who_follow_though_its_store_goes_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, await open_store(cluster.uri) as store:
        client = await client_aio.connect(store)
        async with client.open_log("a") as log:
            await log.append(b"1")
        ledger = await client.create_ledger()
        await ledger.add_entry(b"1")  # its writer states its LAC, and it can be read
        async with client.open_unbounded_ledger("u") as unbounded:
            await unbounded.add_entry(b"1")
        reader = await client.open_ledger(ledger.ledger_id)
        followers = [
            client.read_log("a", follow=True),
            reader.tail(0),
            client.read_unbounded_ledger("u", 0),
        ]
        for follower in followers:
            assert bytes((await anext(follower)).data) == b"1"
        following = [asyncio.create_task(next_of(follower)) for follower in followers]
        await asyncio.sleep(0.1)  # so that they wait for what comes, wherever they do
        await client.close()
        for waiting in following:
            with pytest.raises(client_aio.ClientClosedError):
                await asyncio.wait_for(waiting, WAIT_S)
        assert await store.children("logs") == ["a"]


async def next_of(entries: AsyncIterator[object]) -> object:
    return await anext(entries)
