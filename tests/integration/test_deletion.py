"""Deleted ledgers, with real processes: nobody brings one back, and whoever uses it hears of it (rule 15)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import ListEntries, ReadLac, Status
from metadata.backends.uri import open_store
from metadata.ids import TERM_FINAL, ledger_key
from tests.support.cluster import Cluster
from tests.support.rawclient import RawClient

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import BookieProcess

WAIT_S = 30


async def is_there(cluster: Cluster, ledger_id: int) -> bool:
    async with client_aio.connect(cluster.uri) as client:
        return ledger_id in [one async for one in client.list_ledgers()]


async def until_dropped(bookie: BookieProcess, ledger_id: int) -> None:
    """Wait until a bookie has dropped a ledger, for less time than passes between two of its sweeps."""
    async with asyncio.timeout(WAIT_S), await RawClient.connect(bookie.addresses[0]) as raw:
        # Not by `call`: on Python 3.11 its `wait_for` loses a cancellation that comes with the answer.
        while (await raw.send(ListEntries(ledger_id, 0))).status is not Status.NO_SUCH_LEDGER:
            pass


async def add_for_ever(ledger: client_aio.LedgerWriter) -> None:
    while True:
        await ledger.add_entry(b"late")


async def test_readers_and_tails_of_a_deleted_ledger_hear_of_it(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(WAIT_S),
    ):
        ledger = await client.create_ledger()
        await ledger.add_entries([b"zero", b"one"])
        reader = await other.open_ledger(ledger.ledger_id)
        async with aclosing(reader.tail()) as entries:
            assert (await anext(entries)).data == b"zero"
            assert (await anext(entries)).data == b"one"
            following = asyncio.ensure_future(anext(entries))
            await client.delete_ledger(ledger.ledger_id)
            with pytest.raises(client_aio.NoSuchLedgerError):
                await following
        with pytest.raises(client_aio.NoSuchLedgerError):
            await anext(reader.read(0, 1))
        with pytest.raises(client_aio.NoSuchLedgerError):
            await ledger.add_entry(b"late")
        with pytest.raises(client_aio.NoSuchLedgerError):
            await client.delete_ledger(ledger.ledger_id)


@pytest.mark.parametrize("what", ["an ensemble change", "a close"])
async def test_a_writer_does_not_bring_back_what_is_deleted_behind_its_back(
    tmp_path: Path, what: str
) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        await ledger.add_entry(b"zero")
        async with await open_store(cluster.uri) as store:  # no bookie hears of it
            await store.delete(ledger_key(ledger.ledger_id))
        if what == "a close":
            with pytest.raises(client_aio.NoSuchLedgerError):
                await asyncio.wait_for(ledger.close(), WAIT_S)
        else:
            await cluster[ledger.metadata.last_fragment.bookies[1]].kill()
            with pytest.raises(client_aio.NoSuchLedgerError):
                await asyncio.wait_for(add_for_ever(ledger), WAIT_S)
        assert not await is_there(cluster, ledger.ledger_id)


async def test_every_bookie_of_every_fragment_is_told(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"zero")
            gone = ledger.metadata.last_fragment.bookies[0]
            await cluster[gone].kill()
            await asyncio.wait_for(ledger.add_entry(b"one"), WAIT_S)
            async with asyncio.timeout(WAIT_S):
                while len(ledger.metadata.fragments) < 2:
                    await ledger.add_entry(b"more")
            await cluster[gone].start()
        await asyncio.wait_for(client.delete_ledger(ledger.ledger_id), WAIT_S)
        # The call waits for coverage only: a bookie that has just come back is told a little later.
        for bookie in cluster.bookies.values():
            await until_dropped(bookie, ledger.ledger_id)


async def test_a_bookie_that_answers_after_the_deletion_returned_is_told(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        async with client_aio.connect(cluster.uri) as client, client.create_ledger() as ledger:
            await ledger.add_entry(b"zero")
        # A client that is not connected to the bookie yet: without a connection nothing is sent to it.
        patient = client_aio.ClientConfig(connect_timeout_s=WAIT_S)
        async with client_aio.connect(cluster.uri, config=patient) as client:
            slow = cluster[ledger.metadata.last_fragment.bookies[0]]
            slow.stop()
            await asyncio.wait_for(client.delete_ledger(ledger.ledger_id), WAIT_S)
            slow.resume()
            await until_dropped(slow, ledger.ledger_id)


async def test_an_intruder_that_comes_to_a_bookie_first_stops_no_creation(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            first = ledger.ledger_id + 1  # of the block that the client has drawn
        answers = []
        async with await RawClient.connect(cluster["b1"].addresses[0]) as intruder:
            for ledger_id in range(first, first + 40):
                fence = ReadLac(ledger_id, TERM_FINAL - 1, -1, 0)
                assert (await intruder.call(fence, auth=b"i" * 32)).status in (
                    Status.UNAUTHORIZED,
                    Status.ID_TAKEN,
                )
                answers.append((await intruder.call(fence)).status)
        # An id that was not given out is refused. Of the others, the client draws new ones in their place.
        assert set(answers) == {Status.OK, Status.ID_TAKEN}
        assert answers == sorted(answers)
        for _ in range(4):  # some of them begin with b1
            password = b"an open secret"
            async with client.create_ledger(digest="hmac-sha256", password=password) as ledger:
                async with asyncio.timeout(WAIT_S):
                    assert await ledger.add_entry(b"zero") == 0
                is_known = ledger.ledger_id < first + answers.count(Status.OK)
                assert not (is_known and "b1" in ledger.metadata.last_fragment.bookies)
            reader = await client.open_ledger(ledger.ledger_id, password=password)
            assert [entry.data async for entry in reader.read(0, 0)] == [b"zero"]
