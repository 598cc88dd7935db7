"""Trimming at one bookie: below the first entry that an unbounded ledger has left, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Status, Stop
from metadata.access.ledgers import LedgerStore
from metadata.model.ledger import LedgerMetadata, UnboundedRecord
from metadata.model.paged_list import PagedRows, PageRef

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from bookie_aio.server.ledger_gc import LedgerGarbageCollector
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import RawClient

MIB = 1024 * 1024


def of(*firsts: int, pages: tuple[PageRef, ...] = ()) -> LedgerMetadata:
    """Return an unbounded ledger's metadata with fragments that begin at these entries."""
    metadata = LedgerMetadata.new(
        7, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"], unbounded=UnboundedRecord("x")
    )
    first, *others = firsts
    metadata = metadata.take_over().open_term(first, ["b1"], length=0, fragments=())
    for other in others:
        metadata = metadata.change_ensemble(other, ["b1"])
    return metadata.with_rows(PagedRows(pages, metadata.rows.rows))


async def fill(bookies: Bookies, client: RawClient, metadata: LedgerMetadata) -> LedgerStore:
    """Have the metadata stored, and ten entries added, each by itself."""
    ledgers = LedgerStore(bookies.store())
    await ledgers.create_ledger(metadata)
    for n in range(10):
        assert (await client.add(7, n, [b"%d" % n], term=1, content_term=1)).status is Status.OK
    return ledgers


async def change(ledgers: LedgerStore, metadata: LedgerMetadata) -> None:
    _, version = await ledgers.read(7)
    await ledgers.compare_and_set(metadata, version)


async def readable(client: RawClient) -> list[int]:
    """Return the entries that the bookie has."""
    found = []
    for n in range(12):
        answer = await client.call(Read(7, NO_TERM, 1, n, n, 1, MIB))
        assert isinstance(answer.message, ReadAnswer)
        if answer.message.stop == Stop.END:
            found.append(n)
        else:
            assert answer.message.stop == Stop.NO_SUCH_ENTRY
    return found


def sweeper_of(bookie: Bookie) -> LedgerGarbageCollector:
    assert bookie._ledger_gc is not None
    return bookie._ledger_gc


async def test_a_sweep_drops_what_the_metadata_have_no_fragment_for_any_more(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    ledgers = await fill(bookies, client, of(0, 4, 8))
    await sweeper_of(bookie).sweep()
    assert await readable(client) == list(range(10))
    await change(ledgers, of(4, 8))
    await sweeper_of(bookie).sweep()
    assert await readable(client) == [4, 5, 6, 7, 8, 9]
    assert sweeper_of(bookie).trimmed == 1
    await sweeper_of(bookie).sweep()
    assert sweeper_of(bookie).trimmed == 1
    # Its terms stay, and the ledger goes on.
    assert (await client.add(7, 10, [b"10"], term=0)).status is Status.INVALID_TERM
    assert (await client.add(7, 10, [b"10"], term=1, content_term=1)).status is Status.OK


async def test_a_trim_survives_a_restart(bookies: Bookies, bookie: Bookie, client: RawClient) -> None:
    ledgers = await fill(bookies, client, of(0, 4, 8))
    await change(ledgers, of(8))
    await sweeper_of(bookie).sweep()
    await bookie.close()
    again = await bookies.connect(await bookies.start())
    assert await readable(again) == [8, 9]


async def test_fragments_that_are_in_pages_are_kept(bookies: Bookies) -> None:
    bookie = await bookies.start(unnamed_grace_s=0.001)
    client = await bookies.connect(bookie)
    ledgers = await fill(bookies, client, of(0, 2, 4, 8))
    await change(ledgers, of(8, pages=(PageRef("p", 2, 2),)))
    await sweeper_of(bookie).sweep()
    assert await readable(client) == [2, 3, 4, 5, 6, 7, 8, 9]
    # Also when it is sealed: no head names all bookies that hold something.
    sealed = of(8, pages=(PageRef("p", 2, 2),)).close(9, 10)
    await change(ledgers, sealed.replace_bookie(0, "b1", "b2"))
    until = asyncio.get_running_loop().time() + 0.05
    while asyncio.get_running_loop().time() < until:  # longer than the grace period of what nobody names
        await sweeper_of(bookie).sweep()
    assert await readable(client) == [2, 3, 4, 5, 6, 7, 8, 9]


async def test_metadata_of_the_past_bring_nothing_back_and_drop_nothing(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    ledgers = await fill(bookies, client, of(4, 8))
    await sweeper_of(bookie).sweep()
    await change(ledgers, of(0, 4, 8))
    await sweeper_of(bookie).sweep()
    assert await readable(client) == [4, 5, 6, 7, 8, 9]
