"""Unbounded ledgers in the metadata store: fragment lists in pages, and names.

An unbounded ledger's head is its ordinary node. So a walk over all ledgers, and a check for a deleted ledger,
need no special case. Beside the head are the pages of its fragment list, and its name:

    ledgers/000/0000/0000/0000/0007            the head: state, term, last fragments, references to pages
    fragments/000/0000/0000/0000/0007/PAGE     older fragments, written once (`metadata.model.paged_list`)
    unbounded/payments                         {"format": 1, "ledger": 7}

A name is written after the head and deleted after it. No ledger id is used twice, so a name that leads to no
ledger is left over from a deletion. The next ledger of that name takes it.

Owns the keys of all this. Does not own the content (`metadata.model.ledger`), nor how a paged list changes
(`metadata.access.paged_list`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.access.paged_list import PLACE_KEPT_S, PagedList
from metadata.errors import (
    KeyExistsError,
    LedgerExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
    VersionConflictError,
)
from metadata.ids import (
    KEY_UNBOUNDED,
    LEDGER_ID_MAX,
    MALFORMED,
    fragments_key,
    integer,
    ledger_key,
    unbounded_key,
)
from metadata.model.ledger import Fragment, LedgerMetadata

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from metadata.access.ledgers import LedgerStore
    from metadata.model.paged_list import PagedRows, PageRef
    from metadata.store import Version

NAME_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class FragmentHead:
    """An unbounded ledger's metadata as the head of its fragment list."""

    metadata: LedgerMetadata

    @property
    def rows(self) -> PagedRows:
        """Return the fragments as a paged list."""
        return self.metadata.rows

    def with_rows(self, rows: PagedRows) -> FragmentHead:
        """Return the same ledger with its fragments paged otherwise."""
        return FragmentHead(self.metadata.with_rows(rows))

    def to_json(self) -> bytes:
        """Return the stored form."""
        return self.metadata.to_json()

    def pages_in_use(self) -> list[str]:
        """Return the names of the pages that the head refers to."""
        return [page.name for page in self.rows.pages]

    @classmethod
    def from_json(cls, text: bytes) -> FragmentHead:
        """Parse the stored form; raises MetadataCorruptError."""
        return cls(LedgerMetadata.from_json(text))


class FragmentList(PagedList[FragmentHead]):
    """The fragments of one unbounded ledger."""

    def __init__(
        self, ledgers: LedgerStore, ledger_id: int, draw_token: Callable[[], str], patience_s: float
    ) -> None:
        super().__init__(
            ledgers.store,
            ledger_key(ledger_id),
            fragments_key(ledger_id),
            parse=FragmentHead.from_json,
            draw_token=draw_token,
            patience_s=patience_s,
        )

    async def page(self, ref: PageRef) -> tuple[Fragment, ...]:
        """Read a page's fragments.

        Raises:
            NoSuchKeyError: the page is gone: the head has changed since it was read.
            MetadataCorruptError: the page is damaged.
        """
        rows = await self.read_page(ref)
        try:
            return tuple(map(Fragment.of_row, rows))
        except MALFORMED as error:
            raise MetadataCorruptError(f"page {ref.name} of a fragment list is damaged: {error!r}") from error

    async def without_before(self, metadata: LedgerMetadata, entry_id: int) -> LedgerMetadata:
        """Return the ledger without the fragments whose entries all lie before `entry_id`.

        The last fragment stays.

        Raises:
            NoSuchKeyError: a page that must be read is gone: the head has changed.
        """
        rows = metadata.rows
        ref = rows.page_of(entry_id)
        listed = metadata.rows.rows if ref is None else await self.read_page(ref)
        key = max((row[0] for row in listed if row[0] <= entry_id), default=metadata.first_entry)
        if key <= metadata.first_entry:
            return metadata
        cut = rows.page_cut_at(key)
        return metadata.with_rows(rows.drop_before(key, await self.read_page(cut) if cut else ()))


class LedgerNames:
    """The names of unbounded ledgers."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._store = ledgers.store

    async def find(self, name: str) -> int:
        """Return the id of the ledger of that name.

        Raises:
            NoSuchLedgerError: no ledger has the name, or the one that had it was deleted.
        """
        # Without the sync a lagging server could return no ledger, or a former one that was deleted.
        await self._store.sync(unbounded_key(name))
        found = await self._read(name)
        if found is not None and await self._exists(found[0]):
            return found[0]
        raise NoSuchLedgerError(f"there is no unbounded ledger {name!r}")

    async def give(self, name: str, ledger_id: int, *, token: str) -> None:
        """Give a name to a ledger whose metadata are stored already.

        Raises:
            LedgerExistsError: another ledger has the name.
            MetadataUnavailableError: the ledger may get the name, now or later; the same token settles it.
        """
        value = json.dumps({"format": NAME_FORMAT_VERSION, "ledger": ledger_id}).encode()
        while True:
            try:
                await self._store.create(unbounded_key(name), value, token=token)
                return
            except KeyExistsError:
                found = await self._read(name)
            if found is None:
                continue
            if found[0] == ledger_id:
                return
            if await self._exists(found[0]):
                raise LedgerExistsError(
                    f"unbounded ledger {name!r} exists already: it is ledger {found[0]}", ledger_id=found[0]
                )
            try:
                await self._store.compare_and_set(unbounded_key(name), value, found[1], token=token)
                return
            except (VersionConflictError, NoSuchKeyError):
                continue

    async def take(self, name: str, ledger_id: int) -> None:
        """Delete the name of a deleted ledger, unless another ledger has the name by now."""
        found = await self._read(name)
        if found is not None and found[0] == ledger_id:
            try:
                await self._store.delete(unbounded_key(name), found[1], keeps_place=True)
            except (VersionConflictError, NoSuchKeyError):
                return

    async def all(self) -> AsyncGenerator[tuple[str, int], None]:
        """Yield names and ids, in the order of the names."""
        for name in await self._store.names(KEY_UNBOUNDED):
            found = await self._read(name)
            if found is not None and await self._exists(found[0]):
                yield name, found[0]

    async def vacate(self) -> None:
        """Delete the names of deleted ledgers, and remove the places that were kept for names long ago.

        A name outlives its ledger where the deletion was cut off in between.
        """
        for name in await self._store.children(KEY_UNBOUNDED):
            with suppress(MetadataCorruptError):
                found = await self._read(name)
                if found is not None and not await self._exists(found[0]):
                    await self.take(name, found[0])
            await self._store.vacate(unbounded_key(name), older_than_s=PLACE_KEPT_S)

    async def _read(self, name: str) -> tuple[int, Version] | None:
        try:
            value, version = await self._store.read(unbounded_key(name))
        except NoSuchKeyError:
            return None
        try:
            document = json.loads(value)
            if document["format"] != NAME_FORMAT_VERSION:
                raise ValueError(f"format version is not {NAME_FORMAT_VERSION}")
            return integer(document["ledger"], 0, LEDGER_ID_MAX), version
        except MALFORMED as error:
            raise MetadataCorruptError(f"the name {name!r} is damaged: {error!r}") from error

    async def _exists(self, ledger_id: int) -> bool:
        """Return whether a ledger exists; a lagging server's no is checked again after a sync."""
        try:
            await self._ledgers.read(ledger_id)
        except NoSuchLedgerError:
            await self._store.sync(ledger_key(ledger_id))
        else:
            return True
        try:
            await self._ledgers.read(ledger_id)
        except NoSuchLedgerError:
            return False
        return True
