"""Unbounded ledgers whose fragments are mostly in pages: reading over them, trimming them, losing them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import client_aio
from metadata.backends.uri import open_store
from metadata.ids import fragments_key, ledger_key
from metadata.model import paged_list
from metadata.model.paged_list import PageRef
from tests.support.links import Links
from tests.support.unbounded import FRAGMENT_ENTRIES, NAME, WAIT_S, everything, grow, numbered, pages_of

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

FRAGMENTS = 40


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages of some five fragments, and heads of as many."""
    monkeypatch.setattr(paged_list, "HEAD_ROWS_BYTES_MAX", 200)
    monkeypatch.setattr(paged_list, "PAGE_ROWS_BYTES_MAX", 150)


ALL = list(enumerate(numbered(0, FRAGMENTS * FRAGMENT_ENTRIES - 1)))


async def test_entries_are_read_over_pages_from_wherever_one_begins(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as one, client_aio.connect(cluster.uri) as other:
        async with one.open_unbounded_ledger(NAME) as ledger:
            await grow(ledger, FRAGMENTS)
            assert len(await pages_of(cluster, ledger.ledger_id)) > 5
            assert [tuple(entry) async for entry in ledger.read(0, len(ALL) - 1)] == ALL
        for start in (0, 1, 14, 15, 16, 50, len(ALL) - 1):
            assert await everything(other, start) == ALL[start:]
        async with one.open_unbounded_ledger(NAME) as ledger:
            assert ledger.last_add_confirmed == len(ALL) - 1
        metadata = await other.ledger_metadata(NAME)
        assert (metadata.first_entry, len(metadata.rows)) == (0, FRAGMENTS + 1)


async def test_a_reader_is_not_confused_by_fragments_that_move_to_pages_under_its_hands(
    cluster: Cluster,
) -> None:
    async with client_aio.connect(cluster.uri) as one, client_aio.connect(cluster.uri) as other:
        ledger = await one.open_unbounded_ledger(NAME)
        await grow(ledger, 5)
        reader = await other.open_ledger(NAME)
        async with aclosing(reader.tail(0)) as entries:
            found = [tuple(await anext(entries)) for _ in range(4)]
            growing = asyncio.create_task(grow(ledger, FRAGMENTS - 5))
            found += [tuple(await asyncio.wait_for(anext(entries), WAIT_S)) for _ in ALL[4:]]
            await growing
        assert found == ALL
        # And one that has not looked since reads with what it knows, from bookies that have it all.
        stale = await other.open_ledger(NAME)
        await grow(ledger, 5)
        assert [tuple(entry) async for entry in stale.read(0, len(ALL) - 1)] == ALL


async def test_trimming_drops_pages_and_parts_of_pages(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as one, client_aio.connect(cluster.uri) as other:
        ledger = await one.open_unbounded_ledger(NAME)
        await grow(ledger, FRAGMENTS)
        before = await pages_of(cluster, ledger.ledger_id)
        reader = await other.open_ledger(NAME)
        assert await ledger.trim(62) == 60
        assert len(await pages_of(cluster, ledger.ledger_id)) < len(before)
        with pytest.raises(client_aio.NoSuchEntryError, match="begins at entry 60"):
            [entry async for entry in reader.read(0, 5)]
        await ledger.close()
        assert await reader.read_last_add_confirmed() == len(ALL) - 1
        assert [tuple(entry) async for entry in reader.read(60, len(ALL) - 1)] == ALL[60:]
        assert await everything(other, None) == ALL[60:]


async def test_a_deletion_leaves_no_pages(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        async with client.open_unbounded_ledger(NAME) as ledger:
            await grow(ledger, FRAGMENTS)
        await client.delete_ledger(NAME)
        assert await pages_of(cluster, ledger.ledger_id) == []


async def test_pages_that_a_deletion_cut_off_has_left_are_swept_and_no_others(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, await open_store(cluster.uri) as store:
        ids = []
        for name in (NAME, "kept"):
            async with client.open_unbounded_ledger(name) as ledger:
                await grow(ledger, FRAGMENTS)
            ids.append(ledger.ledger_id)
        left, kept = [await pages_of(cluster, ledger_id) for ledger_id in ids]
        assert left
        assert kept
        await store.delete(ledger_key(ids[0]))  # and no more than that: here it was cut off
        report = await client.sweep_log_orphans()
        assert (sorted(report.pages), report.failures) == (sorted(left), ())
        assert await pages_of(cluster, ids[0]) == []
        assert await pages_of(cluster, ids[1]) == kept


async def test_a_ledger_that_lacks_a_page_can_be_deleted(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, await open_store(cluster.uri) as store:
        async with client.open_unbounded_ledger(NAME) as ledger:
            await grow(ledger, FRAGMENTS)
        lost, *_ = await pages_of(cluster, ledger.ledger_id)
        key = f"{fragments_key(ledger.ledger_id)}/{lost}"
        _, version = await store.read(key)
        await store.delete(key, version)
        with pytest.raises(client_aio.MetadataCorruptError, match=lost):
            await everything(client)
        await client.delete_ledger(NAME)
        assert await pages_of(cluster, ledger.ledger_id) == []
        assert [one async for one in client.list_ledgers()] == []


async def test_a_page_of_a_displaced_writer_is_not_part_of_the_ledger_and_is_swept(cluster: Cluster) -> None:
    async with Links(cluster.uri) as links, links.connect("w1") as one, links.connect("w2") as other:
        former = await one.open_unbounded_ledger(NAME)
        key = ledger_key(former.ledger_id)
        await grow(former, 4)
        rolling: asyncio.Task[int] | None = None
        reached, released = asyncio.Event(), asyncio.Event()

        async def meet(at: str) -> None:
            if at == key and len(await pages_of(cluster, former.ledger_id)) > 0:
                reached.set()  # its page is written, and its head is not
                await released.wait()

        links.store("w1").before_compare_and_set = meet
        while not reached.is_set():
            await former.add_entry(b"%d" % (former.last_add_confirmed + 1))
            rolling = asyncio.create_task(former.roll())
            await asyncio.wait(
                [rolling, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED
            )
        ledger = await other.open_unbounded_ledger(NAME)
        released.set()
        assert rolling is not None
        with pytest.raises(client_aio.LedgerFencedError):
            await asyncio.wait_for(rolling, WAIT_S)
        entries = ledger.last_add_confirmed + 1
        await ledger.close()
        assert await everything(other) == list(enumerate(numbered(0, entries - 1)))
        metadata = await other.ledger_metadata(NAME)
        assert metadata.unbounded is not None
        assert set(await pages_of(cluster, ledger.ledger_id)) <= {
            page.name for page in metadata.unbounded.pages
        }


async def test_a_page_that_is_left_over_is_swept_by_the_next_trim(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, await open_store(cluster.uri) as store:
        ledger = await client.open_unbounded_ledger(NAME)
        await grow(ledger, 10)
        left_over = f"{fragments_key(ledger.ledger_id)}/0000000000000000000-left-over"
        await store.create(left_over, b'{"format": 1, "rows": [[0, 1, ["b1"]]]}')
        await ledger.trim(9)
        assert "0000000000000000000-left-over" not in await pages_of(cluster, ledger.ledger_id)
        await grow(ledger, 3)  # it goes on from a head that the sweep has changed
        await ledger.close()
        assert [entry_id for entry_id, _ in await everything(client, None)] == list(range(9, 39))


async def test_a_ledger_whose_metadata_are_crowded_is_written_opened_and_trimmed_but_not_rolled(
    cluster: Cluster,
) -> None:
    """Full ones could not be opened any more, by anybody."""
    references = 5000
    async with client_aio.connect(cluster.uri) as client:
        async with client.open_unbounded_ledger(NAME) as ledger:
            await ledger.add_entries(numbered(0, references - 1))
            await ledger.roll()
            await ledger.add_entry(b"behind")
        ledgers = client._context.ledgers
        metadata, version = await ledgers.read(ledger.ledger_id)
        rows = metadata.rows
        some = tuple(PageRef(f"{n:019d}-{n:020d}", n, 1) for n in range(references))
        crowded = metadata.with_rows(replace(rows, pages=some, rows=rows.rows[-1:]))
        await ledgers.compare_and_set(crowded, version, token="crowding")

        async with client.open_unbounded_ledger(NAME) as ledger:
            assert ledger.metadata.is_crowded
            await ledger.add_entry(b"on")
            with pytest.raises(client_aio.InvalidTransitionError, match="trim it"):
                await asyncio.wait_for(ledger.roll(), WAIT_S)
            await ledger.add_entry(b"and on")
            assert await ledger.trim(references) == references
            assert not ledger.metadata.is_crowded
            last = await ledger.add_entry(b"and on again")
            assert await asyncio.wait_for(ledger.roll(), WAIT_S) == last + 1
        found = [data for _, data in await everything(client, references)]
        assert found == [b"behind", b"on", b"and on", b"and on again"]
