"""Many ledgers of one client: their adds share frames, and each ends by itself. Real bookies, real deaths."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from bookie_aio.wire.many import parse_adds
from bookie_aio.wire.messages import Adds, HelloAnswer, Info, Op
from tests.support.cluster import Cluster
from tests.support.links import Frame, Links
from tests.support.rawclient import RawClient

if TYPE_CHECKING:
    from pathlib import Path

    from client_aio import Client, LedgerWriter
    from tests.support.cluster import BookieProcess

WAIT_S = 30
LEDGERS = 20
DEFERRED = (2, 5, 7)
PASSWORD = b"a secret"
BOOKIES = ("b1", "b2", "b3")


async def requests_of(bookie: BookieProcess) -> dict[str, int]:
    """Return how many requests of each kind a bookie has had."""
    async with await RawClient.connect(bookie.addresses[0]) as client:
        counters = json.loads((await client.call(Info())).body)["counters"]
    requests: dict[str, int] = counters["requests"]
    return requests


async def create(client: Client, count: int) -> list[LedgerWriter]:
    """Create ledgers of which one in four has a password, and some others are of deferred sync."""
    ledgers = []
    for number in range(count):
        options: dict[str, Any] = {"deferred_sync": number in DEFERRED}
        if number % 4 == 1:
            options |= {"digest": "hmac-sha256", "password": PASSWORD}
        ledgers.append(await client.create_ledger(**options))
    return ledgers


async def force(ledgers: list[LedgerWriter]) -> None:
    """Make durable what was added to the ledgers of deferred sync."""
    await asyncio.gather(*(ledgers[number].force() for number in DEFERRED))


def entry(ledger: LedgerWriter, number: int) -> bytes:
    return b"%d/%d" % (ledger.ledger_id, number)


async def add_rounds(ledgers: list[LedgerWriter], rounds: range) -> None:
    """Add an entry to each ledger in each round, all of a round at once, and wait for the last one."""
    futures: list[asyncio.Future[int]] = []
    for number in rounds:
        futures = [ledger.add_entry(entry(ledger, number)) for ledger in ledgers]
        await asyncio.sleep(0.001)
    await asyncio.wait_for(asyncio.gather(*futures), WAIT_S)


async def contents(client: Client, ledger_id: int, password: bytes) -> list[bytes]:
    async with client.open_ledger(ledger_id, recover=True, password=password) as reader:
        return [one.data async for one in reader.read(0, reader.last_add_confirmed)]


async def test_what_is_acknowledged_in_shared_frames_outlives_every_bookie(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        async with client_aio.connect(cluster.uri) as client:
            ledgers = await create(client, LEDGERS)
            await add_rounds(ledgers, range(10))
            assert (await requests_of(cluster["b1"]))["adds"] > 0
            await cluster["b2"].kill()
            await add_rounds(ledgers, range(10, 20))
            await force(ledgers)
            await cluster.kill()
            for ledger in ledgers:
                await ledger.abort()
        await cluster.start()
        async with client_aio.connect(cluster.uri) as client:
            for number, ledger in enumerate(ledgers):
                found = await contents(client, ledger.ledger_id, PASSWORD if number % 4 == 1 else b"")
                assert found == [entry(ledger, each) for each in range(20)]


async def test_a_ledger_that_is_taken_over_keeps_no_other_from_its_frames(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", explicit_lac_delay_s=WAIT_S) as client,  # or that would be refused first
        client_aio.connect(cluster.uri) as other,
    ):
        ledgers = [await client.create_ledger() for _ in range(LEDGERS)]
        await add_rounds(ledgers, range(2))
        fenced, deleted = ledgers[3], ledgers[7]
        await contents(other, fenced.ledger_id, b"")
        await other.delete_ledger(deleted.ledger_id)
        seen: list[set[int]] = []

        def note(frame: Frame) -> bool:
            assert isinstance(frame.message, Adds)
            many = parse_adds(frame.request_id, frame.message.count, frame.body)
            seen.append({one.request.ledger_id for one in many})
            return False

        for name in BOOKIES:
            links["writer", name].requests.see(Op.ADDS, note)
        futures = [ledger.add_entry(entry(ledger, 2)) for ledger in ledgers]
        ends = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT_S)
        assert any({fenced.ledger_id, deleted.ledger_id} < frame and len(frame) > 2 for frame in seen)
        for ledger, end in zip(ledgers, ends, strict=True):
            if ledger is fenced or ledger is deleted:
                assert isinstance(end, client_aio.BookKeeperError)
            else:
                assert end == 2
        assert isinstance(ends[3], client_aio.LedgerFencedError)


async def test_the_lacs_of_idle_writers_share_frames_and_reach_readers(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledgers = await create(client, LEDGERS)
        await add_rounds(ledgers, range(3))
        await force(ledgers)
        for number, ledger in enumerate(ledgers):
            password = PASSWORD if number % 4 == 1 else b""
            async with client.open_ledger(ledger.ledger_id, password=password) as reader:
                async with asyncio.timeout(WAIT_S):
                    tail = reader.tail()
                    assert [(await anext(tail)).entry_id for _ in range(3)] == [0, 1, 2]
                    await tail.aclose()
        assert sum([(await requests_of(cluster[name]))["write_lacs"] for name in BOOKIES]) > 0


@pytest.mark.parametrize("version", [4, 5])
async def test_a_bookie_of_the_version_before_is_sent_no_shared_frames(tmp_path: Path, version: int) -> None:
    def older(frame: Frame) -> Frame | None:
        if isinstance(frame.message, HelloAnswer):
            return frame._replace(message=replace(frame.message, version=version))
        return None

    async with Cluster(tmp_path) as cluster, Links(cluster.uri) as links:
        for name in BOOKIES:
            links["writer", name].answers.forge = older
        async with links.connect("writer") as client:
            ledgers = await create(client, 5)
            await add_rounds(ledgers, range(5))
            requests = await requests_of(cluster["b1"])
            assert (requests["adds"] > 0) is (version == 5)
            assert version == 5 or requests["add"] > 0
