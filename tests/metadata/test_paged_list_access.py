"""Paged lists on each kind of store: conflicts, lost answers, crashes between two steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Self

import pytest

from metadata.access.paged_list import PagedList
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import MetadataUnavailableError, NoSuchKeyError
from metadata.model.paged_list import PagedRows, Row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from metadata.model.paged_list import Page
    from metadata.store import Guard, MetadataStore, Version
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


async def test_many_that_append_at_once_lose_nothing(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
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
    # Those who conflicted took their pages away again. Not so one that waited for its turn while the others
    # wrote more often than writers are remembered: nobody can tell then whether its page is in use.
    left_over = len(await stores[0].children("pages/a")) - len(head.rows.pages)
    assert left_over <= sum("is not reachable, trying again" in record.message for record in caplog.records)
    await lists.sweep()
    assert len(await stores[0].children("pages/a")) == len(head.rows.pages)


class Mean(MemoryMetadataStore):
    """A store that fails at a moment of a test's choosing."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.after: Callable[[str], Awaitable[None]] | None = None

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        if self.before is not None:
            await self.before(key)
        made = await super().compare_and_set(key, value, version, token=token, guard=guard)
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
    """Return a list of which the next row makes a page."""
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


def marking(
    lists: PagedList[Note], key: int
) -> Callable[[Note], Awaitable[tuple[Note, Sequence[Page]] | None]]:
    """Return the change that marks a row which stands in a page."""

    async def apply(head: Note) -> tuple[Note, Sequence[Page]] | None:
        ref = head.rows.page_of(key)
        if ref is None:
            return None  # it was dropped
        rows = await lists.read_page(ref)
        if (key, "marked") in rows:
            return None
        marked = [(key, "marked") if row[0] == key else row for row in rows]
        changed, page = head.rows.rewrite(ref, marked, lambda: f"t{next(_tokens)}")
        return head.with_rows(changed), (page,)

    return apply


async def paged_out(tree: MemoryTree) -> tuple[Mean, PagedList[Note]]:
    """Return a list of which the rows 0 to 2 are in its only page."""
    store, lists = await filled(tree)
    await append(lists, (6, WIDE))
    (ref,) = (await lists.read())[0].rows.pages
    assert (ref.first, ref.rows) == (0, 3)
    return store, lists


async def marks(lists: PagedList[Note]) -> list[int]:
    head, _ = await lists.read(sync=True)
    return [row[0] async for row in lists.walk(head) if row[1] == "marked"]


async def test_a_row_in_a_page_is_changed_by_another_page(backend: Backend) -> None:
    lists, others = paged(await backend.open()), paged(await backend.open())
    await lists.create(Note(PagedRows()))
    for number in range(20):
        await append(lists, (number, WIDE))
    stale = await others.read()
    for key in (2, 7, 8):
        assert (await lists.rewrite(*await lists.read(), marking(lists, key))).is_done
    assert not (await lists.rewrite(*await lists.read(), marking(lists, 7))).is_done
    assert (await others.rewrite(*stale, marking(others, 3))).is_done  # from a head that others have changed
    assert await marks(others) == [2, 3, 7, 8]
    assert await keys(others) == list(range(20))
    await lists.sweep()
    assert await marks(others) == [2, 3, 7, 8]


async def test_a_page_for_another_is_made_anew_after_each_conflict() -> None:
    """A sweep between the page and the head takes the page: it must not be referred to after that."""
    tree = MemoryTree()
    store, lists = await paged_out(tree)
    sweeper = paged(MemoryMetadataStore(tree))
    swept: list[str] = []

    async def sweep(_: str) -> None:
        store.before = None
        swept.extend(await sweeper.sweep())

    store.before = sweep
    changed = await lists.rewrite(*await lists.read(), marking(lists, 1))
    assert changed.is_done
    assert len(swept) == 1
    assert changed.head.rows.pages[0].name not in swept
    assert await marks(sweeper) == [1]
    assert await keys(sweeper) == list(range(7))


@pytest.mark.parametrize(("before", "marked"), [(1, [1]), (2, []), (5, [])])
async def test_a_page_that_is_trimmed_before_another_takes_its_place_stays_trimmed(
    before: int, marked: list[int]
) -> None:
    tree = MemoryTree()
    store, lists = await paged_out(tree)
    others = paged(MemoryMetadataStore(tree))

    async def trim(_: str) -> None:
        store.before = None
        await others.change(*await others.read(), drop(others, before))

    store.before = trim
    changed = await lists.rewrite(*await lists.read(), marking(lists, 1))
    assert changed.is_done == bool(marked)
    assert await keys(others) == list(range(before, 7))
    assert await marks(others) == marked
    await others.sweep()
    assert await store.children("pages/a") == [ref.name for ref in changed.head.rows.pages]


async def test_another_page_whose_answer_is_lost_takes_the_place_once() -> None:
    store, lists = await paged_out(MemoryTree())
    times = count()

    async def lose_twice(_: str) -> None:
        if next(times) < 2:
            raise MetadataUnavailableError("the answer was lost")

    store.after = lose_twice
    changed = await lists.rewrite(*await lists.read(), marking(lists, 1))
    assert changed.is_done
    assert await marks(lists) == [1]
    assert len(await lists.sweep()) == 1  # the former one


@pytest.mark.parametrize("is_append", [True, False])
async def test_pages_made_for_a_list_that_was_deleted_meanwhile_do_not_stay(is_append: bool) -> None:
    """Who deletes a list sweeps its pages then, and never again."""
    store, lists = await paged_out(MemoryTree())
    for number in range(7, 9):
        await append(lists, (number, WIDE))
    head, version = await lists.read()

    async def delete() -> None:
        await lists.delete(version)
        await lists.sweep()
        assert await store.children("pages/a") == []

    async def append_to_what_is_deleted(now: Note) -> tuple[Note, Sequence[Page]]:
        await delete()
        return now.with_rows(now.rows.append([(9, WIDE)])), ()

    async def mark_what_is_deleted(now: Note) -> tuple[Note, Sequence[Page]] | None:
        marked = await marking(lists, 1)(now)
        await delete()
        return marked

    with pytest.raises(NoSuchKeyError, match="lists/a"):
        await lists.rewrite(head, version, append_to_what_is_deleted if is_append else mark_what_is_deleted)
    assert await store.children("pages/a") == []


async def test_pages_of_a_list_that_is_gone_are_swept() -> None:
    store, lists = await filled(MemoryTree())
    await append(lists, (6, WIDE))
    _, version = await lists.read()
    await lists.delete(version)
    assert len(await lists.sweep()) == 1
    assert await store.children("pages/a") == []
