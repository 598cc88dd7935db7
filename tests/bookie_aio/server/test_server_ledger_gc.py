"""Deleted ledgers, at one bookie: gone for good, and only when it is certain (rule 15)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.config import Limits
from bookie_aio.wire.messages import (
    NO_TERM,
    Add,
    AddFlag,
    Delete,
    Failure,
    ListEntries,
    ListLedgers,
    Message,
    Ping,
    Read,
    ReadLac,
    Status,
    WriteLac,
)
from metadata.access.ledgers import LedgerStore
from metadata.backends.memory import MemoryMetadataStore
from metadata.errors import MetadataCorruptError, MetadataUnavailableError
from metadata.ids import KEY_CLUSTER, KEY_LEDGERS, TERM_FINAL, ledger_key
from metadata.model.ledger import LedgerMetadata
from tests.support.laggingstore import LaggingStore
from tests.support.rawclient import RawClient, block, lac_statement

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from bookie_aio.server.ledger_gc import LedgerGarbageCollector
    from metadata.store import Version
    from tests.bookie_aio.server.conftest import Bookies

WAIT_S = 10


async def create(bookies: Bookies, *ledger_ids: int) -> None:
    """Create ledgers' metadata, as a client does before it sends the first entry."""
    sizes: dict[str, Any] = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "bookies": ["b1"]}
    for ledger_id in ledger_ids:
        await LedgerStore(bookies.store()).create_ledger(LedgerMetadata.new(ledger_id, **sizes))


async def fill(bookies: Bookies, client: RawClient, *ledger_ids: int) -> None:
    """Create ledgers with one entry each."""
    await create(bookies, *ledger_ids)
    for ledger_id in ledger_ids:
        assert (await client.add(ledger_id, 0, [b"entry"])).status is Status.OK


async def delete(bookies: Bookies, ledger_id: int) -> None:
    await LedgerStore(bookies.store()).delete(ledger_id)


def deletions_of(bookie: Bookie) -> LedgerGarbageCollector:
    assert bookie._ledger_gc is not None
    return bookie._ledger_gc


async def held(client: RawClient) -> list[int]:
    body = (await client.call(ListLedgers(0))).body
    return [int.from_bytes(body[at : at + 8], "little") for at in range(0, len(body), 8)]


LATE: list[tuple[Message, bytes]] = [
    (Add(7, 0, 0), block(7, 1, [b"late"])),
    (Add(7, TERM_FINAL, int(AddFlag.RECOVERY)), block(7, 1, [b"late"])),
    (Add(7, 0, int(AddFlag.REPAIR)), block(7, 0, [b"entry"])),
    (WriteLac(7, 0, lac_statement(7, 0)), b""),
    (ReadLac(7, TERM_FINAL, -1, 0), b""),
    (ReadLac(7, NO_TERM, -1, 0), b""),
    (Read(7, NO_TERM, 0, 0, 0, 1, 1000), b""),
    (Read(7, TERM_FINAL, 0, 0, 0, 1, 1000), b""),
    (ListEntries(7, 0), b""),
]


async def test_add_after_delete(bookies: Bookies, bookie: Bookie, client: RawClient) -> None:
    await fill(bookies, client, 7, 8)
    await delete(bookies, 7)
    assert (await client.call(Delete(7))).status is Status.OK
    for run in range(2):
        for request, body in LATE:
            assert (await client.call(request, body)).status is Status.NO_SUCH_LEDGER, (run, request)
        assert await held(client) == [8]
        assert (await client.call(Delete(7))).status is Status.OK
        assert (await client.call(Read(8, NO_TERM, 0, 0, 0, 1, 1000))).entries == [(0, b"entry")]
        await bookie.close()
        bookie = await bookies.start()
        client = await bookies.connect(bookie)


async def test_a_deletion_said_again_with_a_token_is_answered_like_the_first(
    bookies: Bookies, client: RawClient
) -> None:
    await fill(bookies, client, 7)
    await delete(bookies, 7)
    for _ in range(2):  # there is no lock to put on what is gone
        assert (await client.call(Delete(7), auth=b"t" * 32)).status is Status.OK
    assert await held(client) == []


async def test_an_add_that_a_bookie_hears_of_only_after_the_deletion_is_refused_too(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    await create(bookies, 7)
    await delete(bookies, 7)
    assert (await client.call(Delete(7))).status is Status.OK
    assert (await client.add(7, 0, [b"late"])).status is Status.NO_SUCH_LEDGER
    assert await held(client) == []


async def test_a_ledger_that_is_made_while_a_deletion_of_its_id_is_looked_into_is_kept(
    bookies: Bookies, bookie: Bookie, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may ask for the deletion of an id that was given out. Its ledger is made a moment later."""
    gc, writer = deletions_of(bookie), await bookies.connect(bookie)
    check = gc._check_droppable

    async def made_meanwhile(ledger_id: int) -> None:
        await check(ledger_id)
        await fill(bookies, writer, ledger_id)

    monkeypatch.setattr(gc, "_check_droppable", made_meanwhile)
    assert (await client.call(Delete(7))).status is Status.BAD_REQUEST
    assert (await client.call(Read(7, NO_TERM, 0, 0, 0, 1, 1000))).entries == [(0, b"entry")]


async def test_an_add_behind_a_tombstone_is_answered_when_the_tombstone_is_durable(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 7)
    await delete(bookies, 7)
    disk.hold()
    deleting = client.send(Delete(7))
    await asyncio.wait_for(disk.arrived.wait(), WAIT_S)
    late = client.add(7, 1, [b"late"])
    again = client.send(Delete(7))
    await client.call(Read(8, NO_TERM, 0, 0, 0, 1, 1000))  # what came before has been taken by now
    assert not deleting.done()
    assert not late.done()
    assert not again.done()
    disk.release()
    answers = await asyncio.wait_for(asyncio.gather(deleting, late, again), WAIT_S)
    assert [answer.status for answer in answers] == [Status.OK, Status.NO_SUCH_LEDGER, Status.OK]


async def test_who_waits_for_the_lac_of_a_ledger_hears_of_its_deletion(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    await fill(bookies, client, 7)
    poll = client.send(ReadLac(7, NO_TERM, 5, 30_000))
    await delete(bookies, 7)
    assert (await client.call(Delete(7))).status is Status.OK
    assert (await asyncio.wait_for(poll, WAIT_S)).status is Status.NO_SUCH_LEDGER


async def test_a_ledger_that_is_in_the_metadata_store_is_not_dropped_whoever_says_so(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    await fill(bookies, client, 7)
    answer = await client.call(Delete(7))
    assert answer.status is Status.BAD_REQUEST
    assert isinstance(answer.message, Failure)
    assert "has not been deleted" in answer.message.message
    assert (await client.add(7, 1, [b"goes on"])).status is Status.OK


async def test_a_sweep_drops_what_was_deleted_unheard_and_nothing_else(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    await create(bookies, 1, 20_000)  # elsewhere
    await fill(bookies, client, *range(5, 12), 10_001, 10_002)
    for ledger_id in (5, 8, 9, 10_002):
        await delete(bookies, ledger_id)
    assert await deletions_of(bookie).sweep() == 4
    assert await held(client) == [6, 7, 10, 11, 10_001]
    assert (await client.add(8, 1, [b"late"])).status is Status.NO_SUCH_LEDGER
    assert await deletions_of(bookie).sweep() == 0
    assert bookie.info()["ledgers_dropped"] == 4


async def test_sweeps_go_on_by_themselves_through_outages(bookies: Bookies) -> None:
    class Outage(MemoryMetadataStore):
        failures = 2

        async def children(self, key: str) -> list[str]:
            if key == KEY_LEDGERS and self.failures:
                self.failures -= 1
                raise MetadataUnavailableError("away for now")
            return await super().children(key)

    bookie = await bookies.start(store=Outage(bookies.tree), sweep_interval_s=0.01)
    client = await bookies.connect(bookie)
    await create(bookies, 7)
    assert (await client.add(7, 0, [b"entry"])).status is Status.OK
    poll = client.send(ReadLac(7, NO_TERM, 5, 30_000))
    await delete(bookies, 7)
    assert (await asyncio.wait_for(poll, WAIT_S)).status is Status.NO_SUCH_LEDGER


async def test_a_new_ledger_not_yet_visible_at_a_lagging_server_is_not_dropped(bookies: Bookies) -> None:
    store = LaggingStore(bookies.tree)
    bookie = await bookies.start(store=store)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 3)
    store.lag()
    await fill(bookies, client, 7)
    assert 7 not in [one async for one in LedgerStore(store).ledger_ids()]
    assert await deletions_of(bookie).sweep() == 0
    store.lag()
    await fill(bookies, client, 8)
    assert (await client.call(Delete(8))).status is Status.BAD_REQUEST
    assert await held(client) == [3, 7, 8]


async def test_a_ledger_that_comes_while_a_sweep_is_under_way_is_not_dropped(bookies: Bookies) -> None:
    class LateSync(LaggingStore):
        """Creates a ledger, and adds to it, right behind each sync."""

        created = 100
        client: RawClient | None = None

        async def sync(self, key: str) -> None:
            await super().sync(key)
            if self.client is not None and self.created < 103:
                self.lag()
                self.created += 1
                await fill(bookies, self.client, self.created)

    store = LateSync(bookies.tree)
    bookie = await bookies.start(store=store)
    store.client = await bookies.connect(bookie)
    await fill(bookies, store.client, 3)
    for _ in range(4):
        assert await deletions_of(bookie).sweep() == 0
    assert await held(store.client) == [3, 101, 102, 103]


async def test_deletions_that_wait_for_the_metadata_store_leave_room_for_reads(bookies: Bookies) -> None:
    class AwayStore(MemoryMetadataStore):
        """Answers no sync until it is told to."""

        async def sync(self, key: str) -> None:
            await back.wait()
            await super().sync(key)

    back = asyncio.Event()
    back.set()
    bookie = await bookies.start(store=AwayStore(bookies.tree), limits=Limits(reads_max=4))
    back.clear()
    client, other = await bookies.connect(bookie), await bookies.connect(bookie)
    await fill(bookies, client, 7)
    deletes = [client.send(Delete(7)) for _ in range(10)]
    assert await asyncio.wait_for(has_entry(other, 7), WAIT_S)
    back.set()
    statuses = [(await one).status for one in deletes]
    assert set(statuses) == {Status.BAD_REQUEST, Status.TOO_MANY_REQUESTS}
    assert (await client.call(Delete(7))).status is Status.BAD_REQUEST


async def test_a_short_listing_drops_nothing(bookies: Bookies) -> None:
    class Short(MemoryMetadataStore):
        async def children(self, key: str) -> list[str]:
            return (await super().children(key))[1:]

    store = Short(bookies.tree)
    bookie = await bookies.start(store=store)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 7, 8)
    assert [one async for one in LedgerStore(store).ledger_ids()] == []
    assert await deletions_of(bookie).sweep() == 0
    assert await held(client) == [7, 8]


@pytest.mark.parametrize("is_empty", [False, True])
async def test_nothing_is_dropped_on_the_word_of_another_clusters_metadata_store(
    bookies: Bookies, bookie: Bookie, client: RawClient, is_empty: bool
) -> None:
    await fill(bookies, client, 7)
    store = bookies.store()
    record = (await store.read(KEY_CLUSTER)).value
    await store.delete(KEY_CLUSTER)
    await delete(bookies, 7)
    if not is_empty:
        mine = deletions_of(bookie)._cookie.instance_id.encode()
        await store.create(KEY_CLUSTER, record.replace(mine, b"another"))
    with pytest.raises(MetadataCorruptError, match="nothing is dropped"):
        await deletions_of(bookie).sweep()
    assert (await client.call(Delete(7))).status is Status.INTERNAL_ERROR
    assert await held(client) == [7]


async def test_a_ledger_whose_metadata_do_not_parse_is_not_dropped(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    await fill(bookies, client, 7)
    store = bookies.store()
    key = ledger_key(7)
    await store.compare_and_set(key, b'"damaged"', (await store.read(key)).version)
    assert (await client.call(Delete(7))).status is Status.BAD_REQUEST
    assert await deletions_of(bookie).sweep() == 0
    assert await held(client) == [7]


async def close_elsewhere(bookies: Bookies, ledger_id: int, last_entry: int) -> None:
    """Replace b1 by b9 in the metadata, and close the ledger: b1 is named no more."""
    store = LedgerStore(bookies.store())
    metadata, version = await store.read(ledger_id)
    metadata = metadata.replace_bookie(0, "b1", "b9").close(last_entry, last_entry + 1)
    await store.compare_and_set(metadata, version)


async def has_entry(client: RawClient, ledger_id: int) -> bool:
    return bool((await client.call(Read(ledger_id, NO_TERM, 0, 0, 0, 1, 1000))).entries)


async def test_what_others_keep_of_a_closed_ledger_is_forgotten_after_a_grace_period(
    bookies: Bookies,
) -> None:
    bookie = await bookies.start(unnamed_grace_s=0.2)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 1, 2, 3)
    await close_elsewhere(bookies, 2, 0)
    sweeper = deletions_of(bookie)
    started = asyncio.get_running_loop().time()
    await sweeper.sweep()
    assert sweeper.forgotten == 0
    while sweeper.forgotten == 0:
        await asyncio.sleep(0.01)
        await sweeper.sweep()
    assert asyncio.get_running_loop().time() - started >= 0.19  # a loop counts in milliseconds
    assert [await has_entry(client, one) for one in (1, 2, 3)] == [True, False, True]
    # A repair may bring it back, and that is no deletion.
    assert (await client.call(Add(2, 0, int(AddFlag.REPAIR)), block(2, 0, [b"entry"]))).status is Status.OK
    assert await has_entry(client, 2)
    assert sweeper.dropped == 0


async def test_a_repair_that_is_under_way_is_not_undone(bookies: Bookies) -> None:
    bookie = await bookies.start(unnamed_grace_s=0.01)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 2)
    await close_elsewhere(bookies, 2, 9)
    sweeper = deletions_of(bookie)
    for entry in range(1, 10):  # each sweep finds that something has been added since the one before
        await sweeper.sweep()
        await asyncio.sleep(0.02)
        repair = Add(2, 0, int(AddFlag.REPAIR))
        assert (await client.call(repair, block(2, entry, [b"entry"]))).status is Status.OK
    assert sweeper.forgotten == 0
    assert await has_entry(client, 2)


async def test_a_repair_that_finds_everything_there_is_not_undone(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await bookies.start(unnamed_grace_s=0.01)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 2)
    await close_elsewhere(bookies, 2, 0)
    sweeper = deletions_of(bookie)
    await sweeper.sweep()
    await asyncio.sleep(0.02)
    read = sweeper._ledgers.read
    store = LedgerStore(bookies.store())

    async def read_with_a_late_answer(ledger_id: int) -> tuple[LedgerMetadata, Version]:
        metadata, version = await read(ledger_id)
        # Before the answer arrives a repair names the bookie: it had nothing to copy there.
        await store.compare_and_set(metadata.replace_bookie(0, "b9", "b1"), version)
        assert await has_entry(client, 2)  # and nothing to complain of afterwards
        return metadata, version

    assert (await client.call(ListEntries(2, 0))).status is Status.OK
    monkeypatch.setattr(sweeper._ledgers, "read", read_with_a_late_answer)
    await sweeper.sweep()
    assert (sweeper.forgotten, await has_entry(client, 2)) == (0, True)


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (ListEntries(2, 0), b""),
        (Add(2, 0, int(AddFlag.REPAIR)), block(2, 0, [b"entry"])),
    ],
    ids=["it lists", "it adds"],
)
async def test_nothing_is_forgotten_while_a_repair_waits_to_hear_that_it_is_there(
    bookies: Bookies, request_: Message, body: bytes
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, unnamed_grace_s=0.01)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 2, 3)
    await close_elsewhere(bookies, 2, 0)
    sweeper = deletions_of(bookie)
    await sweeper.sweep()
    await asyncio.sleep(0.02)  # the grace period is over by now
    disk.gate.clear()
    disk.arrived.clear()
    writing = client.add(3, 1, [b"other"])
    await asyncio.wait_for(disk.arrived.wait(), WAIT_S)
    asking = client.send(request_, body)
    assert (await client.call(Ping())).status is Status.OK  # it has come, and waits for what is being written
    sweeping = asyncio.create_task(sweeper.sweep())
    await asyncio.wait([sweeping], timeout=0.2)
    disk.gate.set()
    answers = [await asyncio.wait_for(each, WAIT_S) for each in (writing, asking)]
    assert [answer.status for answer in answers] == [Status.OK, Status.OK]
    await asyncio.wait_for(sweeping, WAIT_S)
    assert (sweeper.forgotten, await has_entry(client, 2)) == (0, True)


@pytest.mark.parametrize("what", ["open", "named", "unreadable"])
async def test_a_ledger_that_others_may_not_keep_is_kept(bookies: Bookies, what: str) -> None:
    bookie = await bookies.start(unnamed_grace_s=0.01)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 2)
    store = bookies.store()
    metadata, version = await LedgerStore(store).read(2)
    if what == "open":
        await LedgerStore(store).compare_and_set(metadata.replace_bookie(0, "b1", "b9"), version)
    elif what == "named":
        await LedgerStore(store).compare_and_set(metadata.close(0, 5), version)
    else:
        await store.compare_and_set(ledger_key(2), b"{}", version)
    for _ in range(5):
        await deletions_of(bookie).sweep()
        await asyncio.sleep(0.01)
    assert deletions_of(bookie).forgotten == 0
    assert await has_entry(client, 2)


async def test_nothing_is_forgotten_on_the_word_of_another_cluster(bookies: Bookies) -> None:
    bookie = await bookies.start(unnamed_grace_s=0.001)
    client = await bookies.connect(bookie)
    await fill(bookies, client, 2)
    await close_elsewhere(bookies, 2, 0)
    await deletions_of(bookie).sweep()
    await asyncio.sleep(0.01)
    store = bookies.store()
    _, version = await store.read(KEY_CLUSTER)
    await store.delete(KEY_CLUSTER, version)
    with pytest.raises(MetadataCorruptError):
        await deletions_of(bookie).sweep()
    assert await has_entry(client, 2)
