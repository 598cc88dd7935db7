"""Requests that wait for the metadata store, or for their turn among the reads of a bookie, are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from bookie_aio.config import Limits
from bookie_aio.server.backpressure import Budget
from bookie_aio.wire.messages import NO_TERM, Add, AddFlag, IsFree, Read, Status
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.model.ledger import LedgerMetadata
from tests.support.rawclient import WAIT_S, Answer, RawClient, block

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies

KIB = 1024


class AwayStore(MemoryMetadataStore):
    """Answers no sync, and no reading of the id counter, while the test holds it."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.back = asyncio.Event()
        self.back.set()

    async def sync(self, key: str) -> None:
        await self.back.wait()
        await super().sync(key)

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        await self.back.wait()
        return await super().ids_drawn(name, least=least)


async def poll(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # there is no event for it


def repairs(
    client: RawClient, count: int, size: int = 100, *, ledgers: tuple[int, ...] = (9,)
) -> list[asyncio.Future[Answer]]:
    """Send repairs without a token, each of an entry, in one frame: one of each ledger, then of the last."""
    adds = []
    for entry_id in range(count):
        ledger_id = ledgers[min(entry_id, len(ledgers) - 1)]
        body = block(ledger_id, entry_id, [bytes(size)])
        adds.append((Add(ledger_id, 0, AddFlag.REPAIR), None, body))
    return client.send_adds(adds)


async def statuses(answers: list[asyncio.Future[Answer]]) -> Counter[Status]:
    done = await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
    return Counter(answer.status for answer in done)


async def know_ledger(bookies: Bookies, client: RawClient) -> None:
    """Make ledger 9 known to the bookie, which asks the metadata store for no further repair of it."""
    sizes = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "bookies": ["b1"]}
    await LedgerStore(bookies.store()).create_ledger(LedgerMetadata.new(9, **sizes))
    assert await statuses(repairs(client, 1)) == {Status.OK: 1}


def pending(bookie: Bookie) -> int:
    return bookie._backpressure.adds.used


@pytest.mark.parametrize("kind", ["IS_FREE", "repair"])
async def test_what_waits_for_the_metadata_store_leaves_room_for_reads(bookies: Bookies, kind: str) -> None:
    store = AwayStore(bookies.tree)
    bookie = await bookies.start(store=store, limits=Limits(reads_max=4))
    client, other = await bookies.connect(bookie), await bookies.connect(bookie)
    assert (await other.add(7, 0, [b"a"])).status is Status.OK
    store.back.clear()
    if kind == "IS_FREE":
        waiting = [client.send(IsFree(2**61 + number)) for number in range(10)]
    else:
        waiting = repairs(client, 10)
    read = await other.call(Read(7, NO_TERM, 0, 0, 0, 1, KIB))
    assert read.entries == [(0, b"a")]
    assert not waiting[0].done()
    store.back.set()
    done = Status.ID_TAKEN if kind == "IS_FREE" else Status.OK
    found = await statuses(waiting)
    assert set(found) == {done, Status.TOO_MANY_REQUESTS}
    assert found[done] >= 2
    assert (await statuses([client.send(IsFree(2**61))] if kind == "IS_FREE" else repairs(client, 1)))[
        done
    ] == 1


@pytest.mark.pure
async def test_the_repairs_of_one_frame_run_as_many_at_once_as_reads_of_a_connection_may(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await bookies.start(limits=Limits(connection_reads_max=8))
    client = await bookies.connect(bookie)
    await know_ledger(bookies, client)
    running, most, count = bookie._backpressure.running, 0, Budget.count

    def watched(budget: Budget, change: int) -> None:
        nonlocal most
        count(budget, change)
        if budget is running:
            most = max(most, budget.used)

    monkeypatch.setattr(Budget, "count", watched)
    assert await statuses(repairs(client, 256)) == {Status.OK: 256}
    assert most == 8
    assert pending(bookie) == 0


@pytest.mark.parametrize("ending", ["done", "lost"])
async def test_requests_that_wait_for_their_turn_count_with_their_bytes(
    bookies: Bookies, ending: str
) -> None:
    store = AwayStore(bookies.tree)
    # The first repair waits for the metadata store, the others for their turn. The bytes that wait are above
    # the connection's limit: it goes on all the same.
    limits = Limits(connection_reads_max=1, connection_bytes_pending_max=16 * KIB)
    bookie = await bookies.start(store=store, limits=limits)
    client, other = await bookies.connect(bookie), await bookies.connect(bookie)
    await know_ledger(bookies, client)
    store.back.clear()
    waiting = repairs(client, 101, KIB, ledgers=(10, 9))
    await poll(lambda: pending(bookie) > 100 * KIB)
    assert (await other.add(7, 0, [b"a"])).status is Status.OK
    if ending == "done":
        store.back.set()
        assert await statuses(waiting) == {Status.OK: 101}
    else:
        await client.close()
    await poll(lambda: pending(bookie) == 0)


async def test_repairs_that_waited_for_the_id_counter_run_in_turn_without_another_frame(
    bookies: Bookies,
) -> None:
    bookies.tree = MemoryTree()
    store = AwayStore(bookies.tree)
    bookie = await bookies.start(store=store, limits=Limits(connection_reads_max=2))
    client = await bookies.connect(bookie)
    (known,) = await store.allocate_ids(LEDGER_SEQUENCE, 1)
    assert (await client.add(known, 0, [b"a"])).status is Status.OK  # it is a writer, so its adds wait aside
    (fresh,) = await bookies.store().allocate_ids(LEDGER_SEQUENCE, 1)
    store.back.clear()
    waiting = repairs(client, 20, ledgers=(fresh,))
    await poll(lambda: pending(bookie) > 0)
    store.back.set()
    found = await statuses(waiting)
    assert set(found) <= {Status.OK, Status.TOO_MANY_REQUESTS}
    assert found[Status.OK] > 0
    assert pending(bookie) == 0
