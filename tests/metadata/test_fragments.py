"""Fragment lists and names of unbounded ledgers, on each kind of store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from metadata.access.fragments import FragmentHead, FragmentList, LedgerNames
from metadata.access.ledgers import LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import LedgerExistsError, MetadataCorruptError, NoSuchLedgerError
from metadata.ids import ledger_key, unbounded_key
from metadata.model.ledger import Absent, Fragment, LedgerMetadata, UnboundedRecord
from metadata.store import VALUE_BYTES_MAX

if TYPE_CHECKING:
    from metadata.store import MetadataStore
    from tests.metadata.conftest import Backend

BOOKIES = ("b1", "b2", "b3")
STEP = 10
"""Entries to a fragment."""

_tokens = count()


def token() -> str:
    return f"t{next(_tokens)}"


def ledger(ledger_id: int = 7, name: str = "payments") -> LedgerMetadata:
    return LedgerMetadata.new(
        ledger_id,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        bookies=BOOKIES,
        unbounded=UnboundedRecord(name),
    )


def listed(store: MetadataStore) -> FragmentList:
    return FragmentList(LedgerStore(store), 7, token, 60.0)


async def grow(fragments: FragmentList, number: int) -> LedgerMetadata:
    """Create a ledger of so many fragments, many to a change."""
    metadata = ledger().take_over()
    metadata = metadata.open_term(0, BOOKIES, length=0, fragments=metadata.fragments)
    await fragments.create(FragmentHead(metadata))
    head, version = await fragments.read()
    while (size := len(head.rows)) < number:
        more = range(size, min(number, size + 200))

        async def apply(now: FragmentHead, more: range = more) -> FragmentHead:
            added = tuple(Fragment(n * STEP, BOOKIES, 1) for n in more)
            return FragmentHead(replace(now.metadata, fragments=(*now.metadata.fragments, *added)))

        head, version, _ = await fragments.change(head, version, apply)
    return head.metadata


async def firsts(fragments: FragmentList) -> list[int]:
    head, _ = await fragments.read(sync=True)
    return [row[0] async for row in fragments.walk(head)]


async def trim(fragments: FragmentList, before: int) -> LedgerMetadata:
    async def apply(now: FragmentHead) -> FragmentHead:
        return FragmentHead(await fragments.without_before(now.metadata, before))

    return (await fragments.change(*await fragments.read(), apply)).head.metadata


async def test_what_is_absent_of_trimmed_fragments_keeps_no_bookie(store: MetadataStore) -> None:
    """Nobody owes it, and no repair would ever take the record away."""
    fragments = listed(store)
    await grow(fragments, 5)
    kept, gone = Absent(3 * STEP, 0, "b8", 2), Absent(0, 1, "b9", 5)

    async def note(now: FragmentHead) -> FragmentHead:
        return FragmentHead(now.metadata.with_absent(gone).with_absent(kept))

    await fragments.change(*await fragments.read(), note)
    metadata = await trim(fragments, 2 * STEP)
    assert (metadata.first_entry, metadata.absent) == (2 * STEP, (kept,))
    assert metadata.with_absent(gone) == metadata  # of a repair that was under way


async def test_a_long_list_stands_in_pages_and_reads_as_it_was_written(store: MetadataStore) -> None:
    fragments = listed(store)
    metadata = await grow(fragments, 3000)
    assert metadata.unbounded is not None
    assert len(metadata.unbounded.pages) > 3
    assert len(metadata.fragments) < 1000
    assert await firsts(fragments) == [n * STEP for n in range(3000)]
    assert await LedgerStore(store).read(7) == (metadata, (await fragments.read())[1])
    page = metadata.unbounded.pages[1]
    assert (await fragments.page(page))[0].first_entry == page.first


@pytest.mark.parametrize(
    ("before", "first"),
    [(0, 0), (9, 0), (10, 10), (4_999, 4_990), (5_000, 5_000), (29_985, 29_980), (10**9, 29_990)],
)
async def test_trimming_drops_whole_fragments_and_never_the_last(before: int, first: int) -> None:
    fragments = listed(MemoryMetadataStore(MemoryTree()))
    await grow(fragments, 3000)
    metadata = await trim(fragments, before)
    assert metadata.first_entry == first
    assert await firsts(fragments) == list(range(first, 30_000, STEP))
    assert (await trim(fragments, before)) == metadata
    assert metadata.last_fragment.first_entry == 29_990


async def test_no_node_of_a_very_long_list_is_near_the_limit() -> None:
    store = MemoryMetadataStore(MemoryTree())
    fragments = listed(store)
    metadata = await grow(fragments, 20_000)
    assert metadata.unbounded is not None
    sizes = [len((await store.read(ledger_key(7))).value)]
    sizes += [
        len((await store.read(fragments._page_key(page.name))).value) for page in metadata.unbounded.pages
    ]
    assert max(sizes) < VALUE_BYTES_MAX / 8


async def test_a_page_of_a_writer_that_lost_is_not_seen(store: MetadataStore) -> None:
    fragments = listed(store)
    await grow(fragments, 350)
    head, version = await fragments.read()
    loser = replace(
        head.metadata,
        fragments=(*head.metadata.fragments, *(Fragment(n * STEP, BOOKIES, 1) for n in range(350, 900))),
    )

    async def lose(now: FragmentHead) -> FragmentHead | None:
        if now.metadata.state is not head.metadata.state:
            return None  # taken over meanwhile
        await fragments.change(now, version, take_over)
        return FragmentHead(loser)

    async def take_over(now: FragmentHead) -> FragmentHead:
        return FragmentHead(now.metadata.take_over())

    changed = await fragments.change(head, version, lose)
    assert not changed.is_done
    assert changed.head.metadata == head.metadata.take_over()
    assert await firsts(fragments) == [n * STEP for n in range(350)]
    assert await fragments.sweep() == []


# --- names ---


async def test_a_name_leads_to_its_ledger_and_is_given_once(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    ledgers, names = LedgerStore(store), LedgerNames(LedgerStore(store))
    with pytest.raises(NoSuchLedgerError, match="payments"):
        await names.find("payments")
    for ledger_id in (7, 8):
        await ledgers.create_ledger(ledger(ledger_id))
    await names.give("payments", 7, token="a")
    await names.give("payments", 7, token="b")
    assert await LedgerNames(LedgerStore(other)).find("payments") == 7
    with pytest.raises(LedgerExistsError) as exists:
        await names.give("payments", 8, token="c")
    assert exists.value.ledger_id == 7
    await names.give("orders", 8, token="d")
    assert [each async for each in names.all()] == [("orders", 8), ("payments", 7)]


async def test_of_many_who_give_a_name_at_once_one_succeeds(backend: Backend) -> None:
    stores = [LedgerStore(await backend.open()) for _ in range(4)]
    for ledger_id, ledgers in enumerate(stores):
        await ledgers.create_ledger(ledger(ledger_id))
    given = await asyncio.gather(
        *(LedgerNames(each).give("payments", number, token=token()) for number, each in enumerate(stores)),
        return_exceptions=True,
    )
    assert sorted(map(type, given), key=str) == sorted([type(None), *[LedgerExistsError] * 3], key=str)
    assert await LedgerNames(stores[0]).find("payments") == given.index(None)


async def test_a_name_that_a_deletion_left_over_can_be_had_again(store: MetadataStore) -> None:
    ledgers, names = LedgerStore(store), LedgerNames(LedgerStore(store))
    await ledgers.create_ledger(ledger(7))
    await names.give("payments", 7, token="a")
    await ledgers.delete(7)
    with pytest.raises(NoSuchLedgerError):
        await names.find("payments")
    assert [each async for each in names.all()] == []
    await ledgers.create_ledger(ledger(9))
    await names.give("payments", 9, token="b")
    assert await names.find("payments") == 9
    await names.take("payments", 7)  # late: it is another's by now
    assert await names.find("payments") == 9
    await ledgers.delete(9)
    await names.take("payments", 9)
    assert await store.names("unbounded") == []


async def test_a_damaged_name_says_so(store: MetadataStore) -> None:
    await store.create(unbounded_key("payments"), b'{"format": 1, "ledger": "7"}')
    with pytest.raises(MetadataCorruptError, match="payments"):
        await LedgerNames(LedgerStore(store)).find("payments")
