"""Paged lists on each kind of store: conflicts, lost answers, crashes between two steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Self

import pytest

from metadata.errors import MetadataUnavailableError, NoSuchKeyError
from metadata.memory import MemoryMetadataStore, MemoryTree
from metadata.paged import PagedList
from metadata.pages import PagedRows, Row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from metadata.store import MetadataStore, Version
    from tests.metadata.conftest import Backend

WIDE = "x" * 2000
_tokens = count()


@dataclass(frozen=True)
class Note:
    """A head with nothing but the list."""

    rows: PagedRows

    def with_rows(self, rows: PagedRows) -> Self:
        return replace(self, rows=rows)

    def to_json(self) -> bytes:
        return json.dumps(self.rows.to_document()).encode()

    def pages_in_use(self) -> list[str]:
        return [page.name for page in self.rows.pages]


def paged(store: MetadataStore, *, patience_s: float = 60) -> PagedList[Note]:
    return PagedList(
        store,
        "lists/a",
        "pages/a",
        parse=lambda value: Note(PagedRows.from_document(json.loads(value))),
        draw_token=lambda: f"t{next(_tokens)}",
        patience_s=patience_s,
    )


def appending(*rows: Row) -> Callable[[Note], Awaitable[Note | None]]:
    async def apply(head: Note) -> Note | None:
        if head.rows.last_key is not None and head.rows.last_key >= rows[-1][0]:
            return None
        return head.with_rows(head.rows.append(rows))

    return apply


async def append(lists: PagedList[Note], *rows: Row) -> bool:
    return (await lists.change(*await lists.read(), appending(*rows))).is_done


async def keys(lists: PagedList[Note]) -> list[int]:
    head, _ = await lists.read(sync=True)
    return [row[0] async for row in lists.walk(head)]


def drop(lists: PagedList[Note], key: int) -> Callable[[Note], Awaitable[Note | None]]:
    async def apply(head: Note) -> Note | None:
        cut = head.rows.page_cut_at(key)
        rows = await lists.read_page(cut) if cut is not None else ()
        return head.with_rows(head.rows.drop_before(key, rows))

    return apply


async def test_rows_are_appended_read_and_dropped(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    lists, others = paged(one), paged(two)
    await lists.create(Note(PagedRows()))
    for number in range(40):
        assert await append(lists, (number, WIDE))
    assert await keys(others) == list(range(40))
    assert len(await two.children("pages/a")) > 4
    head, version = await others.read()
    for key in (2, 13, 39):
        changed = await others.change(head, version, drop(others, key))
        head, version = changed.head, changed.version
        assert await keys(lists) == list(range(key, 40))
    left_over = await lists.sweep()
    assert left_over
    assert await two.children("pages/a") == []
    assert await lists.sweep() == []
    _, version = await lists.read()
    await lists.delete(version)
    with pytest.raises(NoSuchKeyError):
        await lists.read()


async def test_many_that_append_at_once_lose_nothing(backend: Backend) -> None:
    stores = [await backend.open() for _ in range(3)]
    await paged(stores[0]).create(Note(PagedRows()))

    async def work(store: MetadataStore, mark: int) -> None:
        lists = paged(store)
        for number in range(12):

            async def apply(head: Note, row: str = f"{mark}-{number}") -> Note | None:
                return head.with_rows(head.rows.append([(len(head.rows), row, WIDE)]))

            assert (await lists.change(*await lists.read(), apply)).is_done

    await asyncio.gather(*(work(store, mark) for mark, store in enumerate(stores)))
    lists = paged(stores[0])
    head, _ = await lists.read(sync=True)
    rows = [row async for row in lists.walk(head)]
    assert [row[0] for row in rows] == list(range(36))
    assert sorted(row[1] for row in rows) == sorted(
        f"{mark}-{number}" for mark in range(3) for number in range(12)
    )
    # Those who conflicted took their pages away again.
    assert len(await stores[0].children("pages/a")) == len(head.rows.pages)


class Mean(MemoryMetadataStore):
    """A store that fails at a moment of a test's choosing."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.after: Callable[[str], Awaitable[None]] | None = None

    async def compare_and_set(
        self, key: str, value: bytes, version: Version, *, token: str | None = None
    ) -> Version:
        if self.before is not None:
            await self.before(key)
        made = await super().compare_and_set(key, value, version, token=token)
        if self.after is not None:
            await self.after(key)
        return made


class Died(Exception):
    """The process that changed the list is no more."""


async def lose(_: str) -> None:
    raise MetadataUnavailableError("the answer was lost")


async def die(_: str) -> None:
    raise Died


async def filled(tree: MemoryTree) -> tuple[Mean, PagedList[Note]]:
    """Give a list of which the next row makes a page."""
    store = Mean(tree)
    lists = paged(store)
    await lists.create(Note(PagedRows()))
    for number in range(6):
        await append(lists, (number, WIDE))
    assert await store.children("pages/a") == []
    return store, lists


async def test_a_change_whose_answer_is_lost_is_made_once() -> None:
    tree = MemoryTree()
    store, lists = await filled(tree)
    times = count()

    async def lose_twice(_: str) -> None:
        if next(times) < 2:
            raise MetadataUnavailableError("the answer was lost")

    store.after = lose_twice
    changed = await lists.change(*await lists.read(), appending((6, WIDE)))
    assert changed.is_done
    assert changed.head.rows.pages
    assert await keys(lists) == list(range(7))


async def test_a_lost_answer_that_others_wrote_over_is_settled_by_what_is_there() -> None:
    tree = MemoryTree()
    store, lists = await filled(tree)
    others = paged(MemoryMetadataStore(tree))

    async def lose_and_be_overwritten(_: str) -> None:
        store.after = None
        for number in range(30):
            assert await append(others, (100 + number,))
        raise MetadataUnavailableError("the answer was lost")

    store.after = lose_and_be_overwritten
    changed = await lists.change(*await lists.read(), appending((6, WIDE)))
    assert not changed.is_done  # `apply` recognised its work
    assert await keys(lists) == [*range(7), *range(100, 130)]


async def test_no_answer_at_all_ends_in_unknown() -> None:
    store, _ = await filled(MemoryTree())
    lists = paged(store, patience_s=0)
    store.before = lose
    with pytest.raises(MetadataUnavailableError):
        await append(lists, (6, WIDE))


async def test_a_page_left_over_by_a_crash_is_swept_and_its_slow_maker_fails() -> None:
    tree = MemoryTree()
    store, lists = await filled(tree)
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_: str) -> None:
        store.before = None
        held.set()
        await go_on.wait()

    store.before = hold
    slow = asyncio.create_task(append(lists, (6, WIDE)))
    await held.wait()
    sweeper = paged(MemoryMetadataStore(tree))
    (name,) = await sweeper.sweep()
    assert await store.children("pages/a") == []
    go_on.set()
    assert await slow  # from what the sweeper made of the head, with another page
    assert await store.children("pages/a") not in ([], [name])
    assert await keys(lists) == list(range(7))
    assert await sweeper.sweep() == []


async def test_a_crash_before_and_after_the_head_is_written_loses_nothing() -> None:
    for when in ("before", "after"):
        tree = MemoryTree()
        store, lists = await filled(tree)
        setattr(store, when, die)
        with pytest.raises(Died):
            await append(lists, (6, WIDE))
        next_one = paged(MemoryMetadataStore(tree))
        assert await keys(next_one) == list(range(7 if when == "after" else 6))
        assert len(await next_one.sweep()) == (1 if when == "before" else 0)
        await append(next_one, (7, WIDE))
        assert len(await keys(next_one)) == (8 if when == "after" else 7)


async def test_pages_of_a_list_that_is_gone_are_swept() -> None:
    store, lists = await filled(MemoryTree())
    await append(lists, (6, WIDE))
    _, version = await lists.read()
    await lists.delete(version)
    assert len(await lists.sweep()) == 1
    assert await store.children("pages/a") == []
