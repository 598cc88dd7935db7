"""Paged lists in a metadata store: reading, changing, and sweeping pages that a crash left over.

The shell around `metadata.model.paged_list`, which has the theory and the invariants. Owns the keys of pages
and the compare-and-set of the head. Does not own the form of the head, which is its user's (`Head`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

from metadata.awake import Deadline
from metadata.errors import (
    GuardChangedError,
    KeyExistsError,
    MetadataCorruptError,
    MetadataError,
    MetadataUnavailableError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.model.paged_list import rows_of_page
from metadata.store import WRITERS_KEPT
from metadata.write_outcome import is_overwritten

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from metadata.model.paged_list import Page, PagedRows, PageRef, Row
    from metadata.store import Guard, MetadataStore, Version

logger = logging.getLogger(__name__)

RETRY_S = 0.2
PLACE_KEPT_S = 3600.0
"""Lower bound of how long a deleted list's place is kept: longer than any request may be under way."""


class Head(Protocol):
    """A value that holds a paged list's head. Frozen."""

    @property
    def rows(self) -> PagedRows:
        """Return the list."""
        ...

    def with_rows(self, rows: PagedRows) -> Self:
        """Return the same value with another list."""
        ...

    def to_json(self) -> bytes:
        """Return the stored form."""
        ...

    def pages_in_use(self) -> Iterable[str]:
        """Return the names of the pages that must stay: the list's, and others that the user still reads."""
        ...


SomeHead = TypeVar("SomeHead", bound=Head)


class Changed(NamedTuple, Generic[SomeHead]):
    """The outcome of a change, and the head after it."""

    head: SomeHead
    version: Version
    is_done: bool
    """False where `apply` returned None for the present head."""


class PagedList(Generic[SomeHead]):
    """One list.

    Args:
        key: the key of the head.
        pages_key: the parent key of the pages; not below `key`, which must be deletable before them.
        parse: parses a stored head.
        draw_token: returns a new token, for writes and for names of pages.
        patience_s: how long a change is retried while its outcome is not definite.
    """

    def __init__(
        self,
        store: MetadataStore,
        key: str,
        pages_key: str,
        *,
        parse: Callable[[bytes], SomeHead],
        draw_token: Callable[[], str],
        patience_s: float = 60.0,
    ) -> None:
        self._store = store
        self._key = key
        self._pages_key = pages_key
        self._parse = parse
        self._draw_token = draw_token
        self._patience_s = patience_s
        self._is_reported = False

    async def create(self, head: SomeHead, *, token: str | None = None) -> Version:
        """Write the head of a new list, which has no pages.

        Raises:
            KeyExistsError: the list exists, not created under this token.
        """
        assert not head.rows.pages
        return await self._store.create(self._key, head.to_json(), token=token)

    async def read(self, *, sync: bool = False) -> tuple[SomeHead, Version]:
        """Read the head.

        Args:
            sync: see every change that any client completed before the call.

        Raises:
            NoSuchKeyError: there is no such list.
        """
        if sync:
            await self._store.sync(self._key)
        value, version = await self._store.read(self._key)
        return self._parse(value), version

    async def read_page(self, ref: PageRef) -> tuple[Row, ...]:
        """Read the rows of a page that count.

        Raises:
            NoSuchKeyError: the page is gone: the head has changed since it was read.
        """
        value, _ = await self._store.read(self._page_key(ref.name))
        return rows_of_page(ref, value)

    def damaged(self, missing: NoSuchKeyError) -> MetadataCorruptError:
        """Return the error of a list that refers to a page that is missing for good."""
        return MetadataCorruptError(f"the list at {self._key} refers to what is not there: {missing}")

    async def walk(self, head: SomeHead) -> AsyncGenerator[Row, None]:
        """Yield all rows of this head, oldest first; raises NoSuchKeyError as `read_page` does."""
        for ref in head.rows.pages:
            for row in await self.read_page(ref):
                yield row
        for row in head.rows.rows:
            yield row

    async def change(
        self, head: SomeHead, version: Version, apply: Callable[[SomeHead], Awaitable[SomeHead | None]]
    ) -> Changed[SomeHead]:
        """Change the list as `rewrite` does, where `apply` returns only the head and no page changes."""

        async def without_pages(now: SomeHead) -> tuple[SomeHead, Sequence[Page]] | None:
            wanted = await apply(now)
            return None if wanted is None else (wanted, ())

        return await self.rewrite(head, version, without_pages)

    async def rewrite(
        self,
        head: SomeHead,
        version: Version,
        apply: Callable[[SomeHead], Awaitable[tuple[SomeHead, Sequence[Page]] | None]],
        guard: Guard | None = None,
    ) -> Changed[SomeHead]:
        """Change the list by compare-and-set of its head, until the outcome is definite (rule 10).

        Cancelling leaves the outcome unknown.

        Args:
            head: the head as last read, at `version`.
            apply: returns the wanted head, and the pages written only for it (see `PagedRows.rewrite`); None
                for no change. It is called again after each conflict, and after an outcome that too many
                later writes have hidden. So it must recognise its own work. Its errors end the attempt,
                except NoSuchKeyError (of a page), after which the head is read again.
            guard: another key of the store; the list changes only while it is at that version.

        Raises:
            MetadataUnavailableError: no definite outcome in time.
            NoSuchKeyError: the list is gone.
            MetadataCorruptError: a page that the head refers to is missing for good.
            GuardChangedError: the guard's key has changed, and the list never changes by this call.
        """
        with Deadline(self._patience_s) as deadline:
            return await self._rewrite(head, version, apply, guard, deadline)

    async def _rewrite(
        self,
        head: SomeHead,
        version: Version,
        apply: Callable[[SomeHead], Awaitable[tuple[SomeHead, Sequence[Page]] | None]],
        guard: Guard | None,
        deadline: Deadline,
    ) -> Changed[SomeHead]:
        while True:
            try:
                found = await apply(head)
            except NoSuchKeyError as error:
                before = version
                head, version = await self._read_with_retries(deadline)
                if version == before:
                    # Not NoSuchKeyError: the caller would conclude that the list was deleted, and a sweep
                    # would delete everything in it.
                    raise self.damaged(error) from error
                continue
            if found is None:
                return Changed(head, version, False)
            wanted, made = found
            rows, spilled = wanted.rows.spill(self._draw_token)
            if spilled:
                wanted = wanted.with_rows(rows)
            pages = [*made, *spilled]
            try:
                for page in pages:
                    await self._write_page(page, deadline)
                return Changed(wanted, await self._set(wanted, version, guard, deadline), True)
            except _OverwrittenError:
                pass  # the outcome is unknown, and the head may refer to the pages: they stay
            except VersionConflictError:
                await self.delete_pages(page.name for page in pages)
            except (NoSuchKeyError, GuardChangedError):
                # The list was deleted, and perhaps swept already: no later sweep would find these pages.
                # Or the write takes no effect, and the caller gives it up.
                await self.delete_pages(page.name for page in pages)
                raise
            head, version = await self._read_with_retries(deadline)

    async def delete(self, version: Version) -> None:
        """Delete the head at that version, so that another list may follow under its key.

        `delete_pages` deletes the pages.

        Raises:
            VersionConflictError: the head is at another version.
            NoSuchKeyError: the list is gone.
        """
        await self._store.delete(self._key, version, keeps_place=True)

    async def vacate(self) -> None:
        """Remove the place that an old deletion has kept."""
        await self._store.vacate(self._key, older_than_s=PLACE_KEPT_S)

    async def delete_pages(self, names: Iterable[str]) -> None:
        """Delete pages that no head refers to. A failure is logged, and the page is left to `sweep`."""
        for name in names:
            try:
                await self._store.delete(self._page_key(name))
            except NoSuchKeyError:
                pass
            except MetadataError as error:
                logger.warning("page %s is left over: %s", self._page_key(name), error)

    async def sweep(self) -> list[str]:
        """Delete the pages that crashes have left over; return their names.

        Safe beside any other client: see the invariants of `metadata.model.paged_list`.
        """
        await self._store.sync(self._pages_key)
        found = await self._store.children(self._pages_key)
        if not found:
            return []
        left_over: list[str] = []

        async def bump(head: SomeHead) -> SomeHead | None:
            in_use = set(head.pages_in_use())
            left_over[:] = [name for name in found if name not in in_use]
            return head if left_over else None

        try:
            await self.change(*await self.read(sync=True), bump)
        except NoSuchKeyError:
            left_over[:] = found  # no list: one created later refers to later pages only
        await self.delete_pages(left_over)
        return left_over

    def watch(self) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the head may have changed; see `MetadataStore.watch`."""
        return self._store.watch(self._key)

    def _page_key(self, name: str) -> str:
        return f"{self._pages_key}/{name}"

    async def _read_with_retries(self, deadline: Deadline) -> tuple[SomeHead, Version]:
        while True:
            try:
                return await self.read(sync=True)
            except MetadataUnavailableError as error:
                await self._pause(deadline, error)

    async def _write_page(self, page: Page, deadline: Deadline) -> None:
        token = self._draw_token()
        while True:
            try:
                await self._store.create(self._page_key(page.name), page.to_json(), token=token)
                return
            except KeyExistsError as error:  # no name is drawn twice
                raise AssertionError(f"page {page.name} exists") from error
            except MetadataUnavailableError as error:
                await self._pause(deadline, error)

    async def _set(
        self, head: SomeHead, version: Version, guard: Guard | None, deadline: Deadline
    ) -> Version:
        """Write the head: retry the same request, under the same token, until its outcome is definite."""
        token, value = self._draw_token(), head.to_json()
        while True:
            try:
                written = await self._store.compare_and_set(
                    self._key, value, version, token=token, guard=guard
                )
                self._is_reported = False
                return written
            except MetadataUnavailableError as error:
                # Unknown: the request may still take effect.
                await self._pause(deadline, error)
            _, now = await self._read_stored(deadline)
            if is_overwritten(version, now):
                raise _OverwrittenError(f"{self._key!r} was written {WRITERS_KEPT} times since")

    async def _read_stored(self, deadline: Deadline) -> tuple[bytes, Version]:
        while True:
            try:
                return await self._store.read(self._key)
            except MetadataUnavailableError as error:
                await self._pause(deadline, error)

    async def _pause(self, deadline: Deadline, error: MetadataUnavailableError) -> None:
        if deadline.is_over:
            raise error
        if not self._is_reported:  # Once for each outage.
            logger.warning("the list at %s is not reachable, trying again: %s", self._key, error)
        self._is_reported = True
        await asyncio.sleep(RETRY_S)


class _OverwrittenError(Exception):
    """Later writes have hidden whether a write took effect; it takes no effect from now on."""
