"""Paged lists in a metadata store: reading them, changing them, and finding pages that a crash left over.

The shell around `metadata.model.paged_list`, which has the theory and the invariants. Owns where pages live
and the compare-and-set of the head; the head's own form is its user's (`Head`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

from metadata.errors import (
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
    from metadata.store import MetadataStore, Version

logger = logging.getLogger(__name__)

RETRY_S = 0.2
PLACE_KEPT_S = 3600.0
"""How long the place of a deleted list is kept at least: longer than a request may be on its way."""


class Head(Protocol):
    """A value that holds a paged list's head. Frozen."""

    @property
    def rows(self) -> PagedRows:
        """Return what it says of the list."""
        ...

    def with_rows(self, rows: PagedRows) -> Self:
        """Return the same value with another list."""
        ...

    def to_json(self) -> bytes:
        """Return the stored form."""
        ...

    def pages_in_use(self) -> Iterable[str]:
        """Return the names of the pages that must stay: those of the list, and what its user still reads."""
        ...


SomeHead = TypeVar("SomeHead", bound=Head)


class Changed(NamedTuple, Generic[SomeHead]):
    """What became of a change, and the head as it is then."""

    head: SomeHead
    version: Version
    is_done: bool
    """False where `apply` gave None for the head as it is."""


class PagedList(Generic[SomeHead]):
    """One list.

    Args:
        key: of the head.
        pages_key: below which its pages are; not below `key`, which must be deletable before them.
        parse: reads a stored head.
        draw_token: gives a new token, for writes and for names of pages.
        patience_s: how long a change goes on while its outcome is not definite.
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

    async def create(self, head: SomeHead, *, token: str | None = None) -> Version:
        """Write the head of a new list, which has no pages.

        Raises:
            KeyExistsError: there is one, not created under this token.
        """
        assert not head.rows.pages
        return await self._store.create(self._key, head.to_json(), token=token)

    async def read(self, *, sync: bool = False) -> tuple[SomeHead, Version]:
        """Read the head.

        Args:
            sync: see everything that was completed before the call, by any client.

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
            NoSuchKeyError: it is gone: the head has changed since it was read.
        """
        value, _ = await self._store.read(self._page_key(ref.name))
        return rows_of_page(ref, value)

    def damaged(self, missing: NoSuchKeyError) -> MetadataCorruptError:
        """Return the error of a list that refers to a page that is missing for good."""
        return MetadataCorruptError(f"the list at {self._key} refers to what is not there: {missing}")

    async def walk(self, head: SomeHead) -> AsyncGenerator[Row, None]:
        """Yield all rows, oldest first, as the head has them; raises NoSuchKeyError as `read_page`."""
        for ref in head.rows.pages:
            for row in await self.read_page(ref):
                yield row
        for row in head.rows.rows:
            yield row

    async def change(
        self, head: SomeHead, version: Version, apply: Callable[[SomeHead], Awaitable[SomeHead | None]]
    ) -> Changed[SomeHead]:
        """Do as `rewrite`, where no page's rows change: `apply` gives the head alone."""

        async def without_pages(now: SomeHead) -> tuple[SomeHead, Sequence[Page]] | None:
            wanted = await apply(now)
            return None if wanted is None else (wanted, ())

        return await self.rewrite(head, version, without_pages)

    async def rewrite(
        self,
        head: SomeHead,
        version: Version,
        apply: Callable[[SomeHead], Awaitable[tuple[SomeHead, Sequence[Page]] | None]],
    ) -> Changed[SomeHead]:
        """Change the list by compare-and-set of its head, until the outcome is definite (rule 10).

        Cancelling leaves the outcome open.

        Args:
            head: as last read, at `version`.
            apply: gives what the head is to become, and the pages made for it alone that it refers to (see
                `PagedRows.rewrite`); None for no change. Asked again after each conflict, and after an
                outcome that too many others have written over to tell: it must recognise its work. Raises
                what ends the attempt; a NoSuchKeyError (of a page) has the head read again.

        Raises:
            MetadataUnavailableError: no definite outcome in time. NoSuchKeyError: the list is gone.
            MetadataCorruptError: a page that the head refers to is missing for good.
        """
        give_up_at = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                found = await apply(head)
            except NoSuchKeyError as error:
                before = version
                head, version = await self._read_patiently(give_up_at)
                if version == before:
                    # Not to be taken for a list that is gone: what it lists would look left over.
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
                    await self._write_page(page, give_up_at)
                return Changed(wanted, await self._set(wanted, version, give_up_at), True)
            except _OverwrittenError:
                pass  # Its pages may be in use.
            except VersionConflictError:
                await self.delete_pages(page.name for page in pages)
            except NoSuchKeyError:
                # The list is gone, and perhaps swept already: nobody else would look for them.
                await self.delete_pages(page.name for page in pages)
                raise
            head, version = await self._read_patiently(give_up_at)

    async def delete(self, version: Version) -> None:
        """Delete the head at that version, of a list that may be made anew; its pages go by `delete_pages`.

        Raises:
            VersionConflictError: it is at another one. NoSuchKeyError: it is gone.
        """
        await self._store.delete(self._key, version, keeps_place=True)

    async def vacate(self) -> None:
        """Give up the place that a deletion long ago has kept."""
        await self._store.vacate(self._key, older_than_s=PLACE_KEPT_S)

    async def delete_pages(self, names: Iterable[str]) -> None:
        """Delete pages that no head refers to. What fails is logged, and left to `sweep`."""
        for name in names:
            try:
                await self._store.delete(self._page_key(name))
            except NoSuchKeyError:
                pass
            except MetadataError as error:
                logger.warning("page %s is left over: %s", self._page_key(name), error)

    async def sweep(self) -> list[str]:
        """Delete the pages that crashes have left over; returns their names.

        Nothing that lives is harmed at any time: see the invariants of `metadata.model.paged_list`.
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
            left_over[:] = found  # No head, no list: a later one refers to later pages only.
        await self.delete_pages(left_over)
        return left_over

    def watch(self) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the head may have changed; see `MetadataStore.watch`."""
        return self._store.watch(self._key)

    def _page_key(self, name: str) -> str:
        return f"{self._pages_key}/{name}"

    async def _read_patiently(self, give_up_at: float) -> tuple[SomeHead, Version]:
        while True:
            try:
                return await self.read(sync=True)
            except MetadataUnavailableError as error:
                await self._pause(give_up_at, error)

    async def _write_page(self, page: Page, give_up_at: float) -> None:
        token = self._draw_token()
        while True:
            try:
                await self._store.create(self._page_key(page.name), page.to_json(), token=token)
                return
            except KeyExistsError as error:  # nobody draws a name twice
                raise AssertionError(f"page {page.name} exists") from error
            except MetadataUnavailableError as error:
                await self._pause(give_up_at, error)

    async def _set(self, head: SomeHead, version: Version, give_up_at: float) -> Version:
        """Write the head; the same request, under the same token, until its outcome is definite."""
        token, value = self._draw_token(), head.to_json()
        while True:
            try:
                return await self._store.compare_and_set(self._key, value, version, token=token)
            except MetadataUnavailableError as error:
                # Unknown: the request may still land.
                await self._pause(give_up_at, error)
            _, now = await self._store_version(give_up_at)
            if is_overwritten(version, now):
                raise _OverwrittenError(f"{self._key!r} was written {WRITERS_KEPT} times since")

    async def _store_version(self, give_up_at: float) -> tuple[bytes, Version]:
        while True:
            try:
                return await self._store.read(self._key)
            except MetadataUnavailableError as error:
                await self._pause(give_up_at, error)

    async def _pause(self, give_up_at: float, error: MetadataUnavailableError) -> None:
        if asyncio.get_running_loop().time() > give_up_at:
            raise error
        logger.warning("the list at %s is not reachable, trying again: %s", self._key, error)
        await asyncio.sleep(RETRY_S)


class _OverwrittenError(Exception):
    """Whether a write took effect, nobody can tell any more; it will not from now on."""
