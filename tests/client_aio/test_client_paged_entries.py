"""Views of an unbounded ledger: whatever stands in pages, an entry is looked for in its fragment."""

from __future__ import annotations

import random
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from client_aio.config import ClientConfig
from client_aio.core.digest import Digest
from client_aio.unbounded.fragments import HeldFragments, PagedEntries
from metadata import pages
from metadata.errors import NoSuchEntryError
from metadata.ledger import Fragment, LedgerMetadata
from metadata.ledgers import LedgerStore
from metadata.memory import MemoryMetadataStore, MemoryTree
from metadata.unbounded import UnboundedRecord

if TYPE_CHECKING:
    from client_aio.core.changes import Apply

FRAGMENTS, STEP = 60, 10
BOOKIES = tuple(f"b{number}" for number in range(9))


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "HEAD_ROWS_BYTES_MAX", 300)
    monkeypatch.setattr(pages, "PAGE_ROWS_BYTES_MAX", 200)


def fragment(number: int) -> Fragment:
    return Fragment(
        number * STEP, tuple(BOOKIES[(number + k) % len(BOOKIES)] for k in range(3)), 1 + number // 7
    )


async def ledger() -> tuple[HeldFragments, PagedEntries]:
    """Give the metadata as a client holds them, and what reads by them."""
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
    held = HeldFragments(context, metadata, version)
    for number in range(FRAGMENTS):
        assert await held.update(begun(number))
    return held, PagedEntries(context, lambda: held.current, Digest(7), refresh=held.refresh)


def begun(number: int) -> Apply:
    """Give the change that begins a fragment, under the next term where it is of one."""

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
    other = HeldFragments(held._context, held.current, held.version)
    assert await other.trim(400)
    with pytest.raises(NoSuchEntryError, match="begins at entry 400"):
        await entries._view(5, 5)
