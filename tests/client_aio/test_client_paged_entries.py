"""Views of an unbounded ledger: whatever stands in pages, an entry is looked for in its fragment."""

from __future__ import annotations

import random
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from client_aio.config import ClientConfig
from client_aio.core.digest import Digest
from client_aio.core.repair_plan import Part
from client_aio.unbounded.paged_fragments import PagedEntries, VersionedFragments, spans
from metadata.access.ledgers import LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import MetadataCorruptError, NoSuchEntryError
from metadata.ids import fragments_key
from metadata.model import paged_list
from metadata.model.ledger import Fragment, LedgerMetadata, UnboundedRecord

if TYPE_CHECKING:
    from client_aio.core.ensemble_change import Apply

FRAGMENTS, STEP = 60, 10
BOOKIES = tuple(f"b{number}" for number in range(9))


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_list, "HEAD_ROWS_BYTES_MAX", 300)
    monkeypatch.setattr(paged_list, "PAGE_ROWS_BYTES_MAX", 200)


def fragment(number: int) -> Fragment:
    return Fragment(
        number * STEP, tuple(BOOKIES[(number + k) % len(BOOKIES)] for k in range(3)), 1 + number // 7
    )


async def ledger() -> tuple[VersionedFragments, PagedEntries]:
    """Return the metadata as a client holds them, and what reads by them."""
    store = LedgerStore(MemoryMetadataStore(MemoryTree()))
    metadata = LedgerMetadata.new(
        7, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=fragment(0).bookies,
        unbounded=UnboundedRecord("x"),
    )  # fmt: skip
    version = await store.create_ledger(metadata)
    tokens = count()
    context: Any = SimpleNamespace(
        ledgers=store, config=ClientConfig(), draw_token=lambda: f"t{next(tokens)}"
    )
    held = VersionedFragments(context, metadata, version)
    for number in range(FRAGMENTS):
        assert await held.update(begun(number))
    return held, PagedEntries(context, lambda: held.current, Digest(7), refresh=held.refresh)


def begun(number: int) -> Apply:
    """Return the change that begins a fragment, under the next term where it is of one."""

    def apply(now: LedgerMetadata) -> LedgerMetadata:
        wanted = fragment(number)
        while now.term < wanted.content_term:
            taken = now.take_over()
            now = taken.open_term(wanted.first_entry, wanted.bookies, length=0, fragments=taken.fragments)
        return now.change_ensemble(wanted.first_entry, wanted.bookies)

    return apply


async def test_a_view_covers_its_range_and_says_how_far_it_goes() -> None:
    held, entries = await ledger()
    assert held.current.unbounded is not None
    assert len(held.current.unbounded.pages) > 5
    rng = random.Random(1)
    for _ in range(300):
        first = rng.randrange(FRAGMENTS * STEP)
        last = min(first + rng.choice((0, 3, 40, 500)), FRAGMENTS * STEP)
        view, end = await entries._view(first, last)
        assert end >= last
        for entry_id in range(first, min(end, FRAGMENTS * STEP - 1) + 1):
            assert view.fragment_of(entry_id) == fragment(entry_id // STEP)


async def test_a_view_in_the_middle_is_of_a_page_or_two() -> None:
    _, entries = await ledger()
    view, end = await entries._view(305, 305)
    assert len(view.fragments) < 15
    assert end < FRAGMENTS * STEP


async def test_a_view_made_again_covers_what_the_first_one_did() -> None:
    held, entries = await ledger()
    async with entries._run(FRAGMENTS * STEP - 25, FRAGMENTS * STEP - 1) as run:
        reader, last = run.reader, run.end
        assert last == FRAGMENTS * STEP - 1
        for number in range(FRAGMENTS, FRAGMENTS + 20):
            assert await held.update(begun(number))
        assert held.current.fragments[0].first_entry > last  # all of it has moved to pages
        assert reader._refresh is not None
        await reader._refresh()
        for entry_id in range(FRAGMENTS * STEP - 25, last + 1):
            assert reader._metadata().fragment_of(entry_id) == fragment(entry_id // STEP)


async def test_what_is_trimmed_is_said_to_be() -> None:
    held, entries = await ledger()
    assert await held.trim(255)
    assert held.current.first_entry == 250
    assert not await held.trim(200)
    with pytest.raises(NoSuchEntryError, match="begins at entry 250"):
        await entries._view(249, 300)
    view, _ = await entries._view(250, 250)
    assert view.fragment_of(250) == fragment(25)


async def test_who_has_not_heard_of_a_trim_is_told_when_a_page_is_gone() -> None:
    held, entries = await ledger()
    other = VersionedFragments(held._context, held.current, held.version)
    assert await other.trim(400)
    with pytest.raises(NoSuchEntryError, match="begins at entry 400"):
        await entries._view(5, 5)


def part_of(number: int) -> Part:
    """Return a fragment that is complete, as it is to be repaired."""
    planned = fragment(number)
    return Part(planned.first_entry, planned.first_entry + STEP - 1, planned.content_term, planned.bookies)


async def test_a_bookie_is_replaced_wherever_the_fragment_stands_by_now() -> None:
    held, entries = await ledger()
    other = VersionedFragments(held._context, held.current, held.version)
    changed: dict[int, Fragment] = {}
    for number in (0, 17, 18, FRAGMENTS - 2):  # in the first page, in others, and in the head
        part = part_of(number)
        new = next(name for name in BOOKIES if name not in part.bookies)
        assert await other.replace_bookie(part, part.bookies[1], new)
        assert not await other.replace_bookie(part, part.bookies[1], new)  # it is done already
        changed[number] = replace(fragment(number), bookies=(part.bookies[0], new, part.bookies[2]))
    await held.refresh()
    found = [each async for span in spans(held._context, held.current) for each in span.fragments]
    assert found == [changed.get(number, fragment(number)) for number in range(FRAGMENTS)]
    assert held.current.unbounded is not None
    left = await held._context.ledgers.store.children(fragments_key(7))
    assert sorted(left) == sorted(page.name for page in held.current.unbounded.pages)
    view, _ = await entries._view(170, 180)
    assert [view.fragment_of(entry_id) for entry_id in (170, 180)] == [changed[17], changed[18]]
    # From the head to a page: by the metadata as they were before.
    stale = VersionedFragments(held._context, held.current, held.version)
    for number in range(FRAGMENTS, FRAGMENTS + 20):
        assert await held.update(begun(number))
    assert held.current.fragments[0].first_entry > (FRAGMENTS - 3) * STEP
    assert await stale.replace_bookie(part_of(FRAGMENTS - 3), part_of(FRAGMENTS - 3).bookies[0], "x")
    view, _ = await PagedEntries(
        held._context, lambda: stale.current, Digest(7), refresh=stale.refresh
    )._view((FRAGMENTS - 3) * STEP, (FRAGMENTS - 3) * STEP)
    assert view.fragment_of((FRAGMENTS - 3) * STEP).bookies[0] == "x"


async def test_who_has_not_heard_of_a_repair_reads_the_page_that_took_the_place() -> None:
    held, entries = await ledger()
    other = VersionedFragments(held._context, held.current, held.version)
    assert await other.replace_bookie(part_of(5), fragment(5).bookies[0], "x")
    view, _ = await entries._view(55, 55)
    assert view.fragment_of(55).bookies[0] == "x"
    assert await held.update(begun(FRAGMENTS))  # nor does the writer stumble over it
    assert await held.trim(40)
    view, _ = await entries._view(55, 55)
    assert view.fragment_of(55).bookies[0] == "x"


@pytest.mark.parametrize("before", [0, 45, 255, 10**6])
async def test_spans_give_each_fragment_once_from_where_one_begins(before: int) -> None:
    """The ledger is trimmed and repaired after the first page was given."""
    held, _ = await ledger()
    other = VersionedFragments(held._context, held.current, held.version)
    found: list[int] = []
    ends: list[int | None] = []
    async with aclosing(spans(held._context, held.current, 13)) as given:
        async for span in given:
            if not found:
                await other.trim(before)
                for number in (6, 30):
                    await other.replace_bookie(part_of(number), fragment(number).bookies[0], "x")
            found += [each.first_entry for each in span.fragments]
            ends.append(span.last_entry)
    first_page = [start for start in found if start < found[0] + 10 * STEP and start <= (ends[0] or 0)]
    left = max(first_page[-1] + STEP, min(before // STEP, FRAGMENTS - 1) * STEP)
    assert found == [*range(20, first_page[-1] + 1, STEP), *range(left, FRAGMENTS * STEP, STEP)]
    assert ends[-1] is None


async def test_a_page_that_is_missing_for_good_is_told() -> None:
    held, _ = await ledger()
    assert held.current.unbounded is not None
    page = held.current.unbounded.pages[1]
    await held._context.ledgers.store.delete(f"{fragments_key(7)}/{page.name}")
    with pytest.raises(MetadataCorruptError, match=page.name):
        [span async for span in spans(held._context, held.current)]
    part = part_of(page.first // STEP)
    with pytest.raises(MetadataCorruptError, match="not there"):
        await held.replace_bookie(part, part.bookies[0], "x")
