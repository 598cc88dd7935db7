"""What trickles in while a batch is under way: it is gathered, not for ever, and nothing large waits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import client_aio
import client_aio.ledger.replication
from bookie_aio.wire.messages import Op
from tests.support.cluster import Cluster
from tests.support.links import WAIT_S, Frame, Link, Links, Sighting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

BOOKIES = ("b1", "b2", "b3")
LONG_S = 3600.0


@asynccontextmanager
async def a_writer(tmp_path: Path) -> AsyncIterator[tuple[client_aio.LedgerWriter, list[Link]]]:
    """A ledger's writer, and its links to the three bookies."""
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
        client.create_ledger() as ledger,
    ):
        yield ledger, [links["writer", name] for name in BOOKIES]


def counted(link: Link) -> list[range]:
    """A list that grows with each batch that the bookie is sent: its entries.

    A bookie that is still at work on an entry is sent two batches in one ADDS.
    """
    batches: list[range] = []

    def note(frame: Frame) -> bool:
        batches.extend(block.entry_ids for block in frame.blocks)
        return False

    link.requests.see(Op.ADD, note)
    return batches


def sent(link: Link, last: int) -> Sighting:
    """A batch that ends with this entry. The other two bookies may have acknowledged it long before."""
    return link.requests.see(Op.ADD, lambda frame: frame.blocks[-1].entry_ids[-1] == last)


async def test_what_is_added_turn_by_turn_goes_in_one_batch_behind_the_one_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_aio.ledger.replication, "_GATHERING_S", LONG_S)
    async with a_writer(tmp_path) as (ledger, links):
        batches, all_sent = counted(links[0]), sent(links[0], 20)
        held = [link.answers.hold(Op.ADD) for link in links]
        futures = [ledger.add_entry(b"first")]
        for each in held:
            await each.reached()
        for _ in range(20):
            futures.append(ledger.add_entry(b"little"))
            await asyncio.sleep(0)
        for each in held:
            each.release()
        assert await asyncio.wait_for(asyncio.gather(*futures), WAIT_S) == list(range(21))
        await all_sent.reached()
        assert batches == [range(1), range(1, 21)]


async def test_what_is_gathered_does_not_wait_for_an_answer_that_does_not_come(tmp_path: Path) -> None:
    async with a_writer(tmp_path) as (ledger, links):
        held = [link.answers.hold(Op.ADD) for link in links]
        first = ledger.add_entry(b"first")
        for each in held:
            await each.reached()
        sightings = [link.requests.see(Op.ADD) for link in links]
        second = ledger.add_entry(b"second")
        for seen in sightings:
            assert (await seen.reached()).block.entry_ids == range(1, 2)
        assert not first.done()
        for each in held:
            each.release()
        assert [await asyncio.wait_for(each, WAIT_S) for each in (first, second)] == [0, 1]


async def test_what_is_large_is_sent_at_once_and_takes_along_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_aio.ledger.replication, "_GATHERING_S", LONG_S)
    async with a_writer(tmp_path) as (ledger, links):
        held = [link.answers.hold(Op.ADD) for link in links]
        futures = [ledger.add_entry(b"first")]
        for each in held:
            await each.reached()
        sightings = [link.requests.see(Op.ADD) for link in links]
        futures += [ledger.add_entry(b"little"), ledger.add_entry(b"l" * 100_000)]
        for seen in sightings:
            assert (await seen.reached()).block.entry_ids == range(1, 3)
        for each in held:
            each.release()
        assert await asyncio.wait_for(asyncio.gather(*futures), WAIT_S) == [0, 1, 2]


async def test_entries_that_come_one_at_a_time_leave_at_once_and_bursts_in_one_batch(tmp_path: Path) -> None:
    async with a_writer(tmp_path) as (ledger, links), asyncio.timeout(WAIT_S):
        batches, all_sent = counted(links[0]), sent(links[0], 42)
        assert [await ledger.add_entry(b"1"), await ledger.add_entry(b"2")] == [0, 1]
        alone = ledger.add_entry(b"3")
        assert ledger._window.last_entry_sent == 2, "it waits for no end of the event-loop iteration"
        await alone
        for burst in (range(3, 23), range(23, 43)):
            assert await asyncio.gather(*[ledger.add_entry(b"many") for _ in burst]) == list(burst)
        await all_sent.reached()
        # The first one of a burst after single entries goes ahead: nothing says that more will come.
        assert batches == [range(1), range(1, 2), range(2, 3), range(3, 4), range(4, 23), range(23, 43)]
