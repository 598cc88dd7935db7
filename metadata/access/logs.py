"""Logs in the metadata store: a typed layer over any `MetadataStore`.

Owns the keys of a log's list, and the translation of a store's errors about keys into errors about logs. Does
not own the content (`metadata.model.log`), nor when it changes (the client's logs).

    logs/NAME               the head
    log-pages/NAME/PAGE     the pages; not below the head, which must be deletable before them
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from metadata.access.paged_list import Changed, PagedList
from metadata.errors import KeyExistsError, MetadataCorruptError, NoSuchKeyError, NoSuchLogError
from metadata.model.log import LogHead, LogRow, check_log_name

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping

    from metadata.model.paged_list import PageRef
    from metadata.store import MetadataStore, Version

KEY_LOGS = "logs"
KEY_LOG_PAGES = "log-pages"

LogChanged = Changed[LogHead]


async def log_names(store: MetadataStore, *, sync: bool = False) -> list[str]:
    """List the names of all logs, sorted; a log that is being deleted may still be listed."""
    if sync:
        await store.sync(KEY_LOGS)
    return await store.names(KEY_LOGS)


async def names_ever(store: MetadataStore) -> set[str]:
    """Return the names of logs, and of deleted logs whose kept place or directory of pages remains."""
    await store.sync(KEY_LOGS)
    return {*await store.children(KEY_LOGS), *await store.children(KEY_LOG_PAGES)}


class LogStore:
    """The list of one log."""

    def __init__(
        self,
        store: MetadataStore,
        name: str,
        *,
        draw_token: Callable[[], str],
        patience_s: float = 60.0,
    ) -> None:
        """Name a log, which need not exist.

        Args:
            draw_token: returns a new token, for writes and for names of pages.
            patience_s: how long a change is retried while its outcome is not definite.
        """
        self.name = check_log_name(name)
        self._draw_token = draw_token
        self._list: PagedList[LogHead] = PagedList(
            store,
            f"{KEY_LOGS}/{name}",
            f"{KEY_LOG_PAGES}/{name}",
            parse=LogHead.from_json,
            draw_token=draw_token,
            patience_s=patience_s,
        )

    async def create(self, *, custom: Mapping[str, bytes], created_ms: int) -> bool:
        """Create the log, empty; return False, and do nothing, where it exists."""
        head = LogHead(self.name, created_ms).with_custom(custom)
        try:
            await self._list.create(head, token=self._draw_token())
        except KeyExistsError:
            return False
        return True

    async def read(self, *, sync: bool = False, deleted_too: bool = False) -> tuple[LogHead, Version]:
        """Read the head.

        Args:
            sync: see every change that any client completed before the call.
            deleted_too: also return the head of a log that is being deleted.

        Raises:
            NoSuchLogError: there is no such log, or it is being deleted.
        """
        with self._translated():
            head, version = await self._list.read(sync=sync)
        if head.is_deleted and not deleted_too:
            raise self._missing()
        return head, version

    async def change(
        self, head: LogHead, version: Version, apply: Callable[[LogHead], Awaitable[LogHead | None]]
    ) -> LogChanged:
        """Change the list; see `PagedList.change`. A log that is being deleted cannot be changed this way.

        Raises:
            NoSuchLogError: the log was deleted, or is being deleted.
            MetadataUnavailableError: no definite outcome in time.
        """

        async def apply_unless_deleted(found: LogHead) -> LogHead | None:
            if found.is_deleted:
                raise self._missing()
            return await apply(found)

        with self._translated():
            return await self._list.change(head, version, apply_unless_deleted)

    async def change_now(
        self, head: LogHead, version: Version, apply: Callable[[LogHead], LogHead | None]
    ) -> LogChanged:
        """Change the list as `change` does, by a function that reads nothing."""

        async def apply_now(found: LogHead) -> LogHead | None:
            return apply(found)

        return await self.change(head, version, apply_now)

    async def finish_dropping(self, head: LogHead, version: Version) -> LogChanged:
        """Remove this head's record of dropped rows, and delete their pages.

        The ledgers of those rows must be deleted already.
        """
        dropped = head.dropped

        async def apply(found: LogHead) -> LogHead | None:
            return found.finish_dropping(dropped)

        with self._translated():
            changed = await self._list.change(head, version, apply)
        in_use = set(changed.head.pages_in_use())
        await self._list.delete_pages(page.name for page in dropped.pages if page.name not in in_use)
        return changed

    async def delete(self, version: Version) -> None:
        """Delete the head, at that version.

        Raises:
            NoSuchLogError: the log is gone.
            VersionConflictError: the head is at another version.
        """
        with self._translated():
            await self._list.delete(version)

    async def cut_at(self, head: LogHead, row_id: int) -> tuple[tuple[int, int, int], ...]:
        """Read the rows of the page that dropping all rows before an id would cut in two; () for none."""
        ref = head.rows.page_cut_at(row_id)
        return () if ref is None else await self._page(ref)

    async def rows_up_to(self, head: LogHead, row_id: int) -> list[LogRow]:
        """Read a run of rows that ends with the last row whose id is at most `row_id`; [] for none.

        Raises NoSuchKeyError as `rows` does.
        """
        ref = head.rows.page_of(row_id)
        rows = head.rows.rows if ref is None else await self._page(ref)
        return [LogRow(*row) for row in rows if row[0] <= row_id]

    async def rows(self, head: LogHead) -> list[LogRow]:
        """Read all rows; raises NoSuchKeyError where the head has changed since and a page is gone."""
        return [LogRow(*row) async for row in self._list.walk(head)]

    async def dropped_rows(self, head: LogHead) -> list[LogRow]:
        """Read the rows whose ledgers have yet to be deleted."""
        found: list[LogRow] = []
        for ref in head.dropped.pages:
            try:
                found += [LogRow(*row) for row in await self._page(ref)]
            except NoSuchKeyError:
                continue  # another client has finished this part of the drop
        return found + [LogRow(*row) for row in head.dropped.rows]

    async def rows_around(self, head: LogHead, row_id: int) -> list[LogRow]:
        """Read a run of rows that holds the first row whose id is at least `row_id`, if there is such a row.

        Reads two pages at most. Raises NoSuchKeyError as `rows` does.
        """
        pages, found = head.rows.pages, list[LogRow]()
        ref = head.rows.page_of(row_id)
        start = 0 if ref is None else pages.index(ref)
        if ref is None and head.rows.rows and row_id >= head.rows.rows[0][0]:
            start = len(pages)
        for each in pages[start : start + 2]:
            found += [LogRow(*row) for row in await self._page(each)]
            if found[-1].id >= row_id:
                return found
        return found + head.newest

    async def lists_row(self, head: LogHead, row_id: int) -> bool:
        """Return whether the head or a page has a row of this id; raises NoSuchKeyError as `rows` does."""
        return any(row.id == row_id for row in await self.rows_around(head, row_id))

    async def rows_at_page(self, head: LogHead, number: int) -> list[LogRow]:
        """Read the rows of the page of that index; behind the last page, the rows in the head."""
        if number >= len(head.rows.pages):
            return head.newest
        return [LogRow(*row) for row in await self._page(head.rows.pages[number])]

    async def sweep_pages(self) -> list[str]:
        """Delete the pages that crashes have left over; return their names."""
        return await self._list.sweep()

    async def vacate(self) -> None:
        """Remove the place that an old deletion has kept for the log's name."""
        await self._list.vacate()

    def watch(self) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the list may have changed; see `MetadataStore.watch`."""
        return self._list.watch()

    async def _page(self, ref: PageRef) -> tuple[tuple[int, int, int], ...]:
        return tuple((int(row[0]), int(row[1]), int(row[2])) for row in await self._list.read_page(ref))

    def damaged(self, missing: NoSuchKeyError) -> MetadataCorruptError:
        """Return the error of a list that lacks a page though its head has not changed since."""
        return self._list.damaged(missing)

    async def check_changed(self, version: Version, missing: NoSuchKeyError) -> None:
        """Check that the list has changed since that version, after one of its pages was found missing.

        Raises:
            MetadataCorruptError: the list has not changed: the page is missing for good.
            NoSuchLogError: the log is gone.
        """
        if (await self.read(sync=True))[1] == version:
            raise self.damaged(missing) from missing

    def check_same(self, version: Version, incarnation: int | None) -> None:
        """Raise NoSuchLogError where the list is of another incarnation: another log under the same name."""
        if version.incarnation != incarnation:
            raise NoSuchLogError(f"log {self.name!r} has been deleted, and another one made of that name")

    def _missing(self) -> NoSuchLogError:
        return NoSuchLogError(f"there is no log {self.name!r}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except NoSuchKeyError as error:
            raise self._missing() from error
