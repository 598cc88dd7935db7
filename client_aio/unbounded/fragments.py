"""The metadata of an unbounded ledger as a client holds them, and entries read by fragments out of pages.

Owns the changes to the head, one after another, and the *views*: a view is the ledger's metadata with just
the fragments that a range of entries lies in, wherever those stand. So memory and time do not grow with the
ledger.

Invariant: a view covers the whole range that it was made for; made again, what of that has not been given
yet, for the rest may have been trimmed. Nothing is looked up in it beyond that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from client_aio.reading import BatchStream, EntryReader, EntryStream, check_limit, check_range, entries_of
from client_aio.updating import HeldMetadata
from metadata.errors import NoSuchEntryError, NoSuchKeyError, NoSuchLedgerError
from metadata.fragments import FragmentHead, FragmentList, LedgerNames
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from bookie_aio.wire.blocks import LacStatement
    from client_aio.context import ClientContext
    from client_aio.core.changes import Apply
    from client_aio.core.digest import Digest
    from metadata.ledger import Fragment, LedgerMetadata
    from metadata.pages import PageRef
    from metadata.store import Version

_PAGES_KEPT = 4


def fragment_list(context: ClientContext, ledger_id: int) -> FragmentList:
    """Give a ledger's fragment list."""
    patience_s = context.config.ensemble_change_timeout_s
    return FragmentList(context.ledgers, ledger_id, context.draw_token, patience_s)


class HeldFragments(HeldMetadata):
    """The metadata of one unbounded ledger; updates take turns."""

    def __init__(self, context: ClientContext, metadata: LedgerMetadata, version: Version) -> None:
        super().__init__(context, metadata, version)
        self._list = fragment_list(context, metadata.ledger_id)
        self._turns = asyncio.Lock()

    async def update(self, apply: Apply) -> bool:
        """Do as `HeldMetadata.update`; fragments that the head has no room for go to pages."""

        async def change(head: FragmentHead) -> FragmentHead | None:
            wanted = apply(head.metadata)
            return None if wanted is None else FragmentHead(wanted)

        return await self._change(change)

    async def trim(self, before_entry: int, *, term: int | None = None) -> bool:
        """Drop the fragments that lie as a whole before an entry; gives False where there are none.

        Args:
            term: that of the writer that trims: nothing is dropped from a ledger that is under another one.

        Raises:
            MetadataUnavailableError: no definite outcome in time. NoSuchLedgerError: it has been deleted.
        """
        pages: set[str] = set()

        async def change(head: FragmentHead) -> FragmentHead | None:
            if term is not None and head.metadata.term != term:
                return None
            trimmed = FragmentHead(await self._list.without_before(head.metadata, before_entry))
            pages.clear()
            pages.update({*head.pages_in_use()} - {*trimmed.pages_in_use()})
            return None if trimmed == head else trimmed

        is_trimmed = await self._change(change)
        if is_trimmed:
            await self._list.delete_pages(sorted(pages))
            await self._list.sweep()  # and what writers that lost have left
        return is_trimmed

    async def refresh(self) -> None:
        """Read the metadata again, as they are in the store now."""
        async with self._turns:
            await self._context.ledgers.sync(self.current.ledger_id)
            self.current, self.version = await self._context.ledgers.read(self.current.ledger_id)

    async def _change(self, change: Callable[[FragmentHead], Awaitable[FragmentHead | None]]) -> bool:
        async with self._turns:
            try:
                changed = await self._list.change(FragmentHead(self.current), self.version, change)
            except NoSuchKeyError as error:
                ledger_id = self.current.ledger_id
                raise NoSuchLedgerError(f"there is no ledger {ledger_id}", ledger_id=ledger_id) from error
            self.current, self.version = changed.head.metadata, changed.version
            return changed.is_done


@dataclass(slots=True)
class _Run:
    """Entries that are read with one view."""

    reader: EntryReader
    following: int
    """The first one that has not been given yet."""
    end: int


class PagedEntries:
    """Reads entries of an unbounded ledger, page after page; an `EntrySource`.

    Args:
        metadata: gives the ledger's metadata as its owner knows them now.
        refresh: reads them again, as they are in the store now.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: Callable[[], LedgerMetadata],
        digest: Digest,
        *,
        on_statement: Callable[[LacStatement], object] = lambda _: None,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._context = context
        self._metadata = metadata
        self._digest = digest
        self._on_statement = on_statement
        self._refresh = refresh
        self._list = fragment_list(context, metadata().ledger_id)
        self._pages: OrderedDict[PageRef, tuple[Fragment, ...]] = OrderedDict()
        self._readers: list[EntryReader] = []
        self._turn = 0
        self._mismatches = 0

    @property
    def digest_mismatches(self) -> int:
        """Give how many answers were damaged or forged."""
        return self._mismatches + sum(reader.digest_mismatches for reader in self._readers)

    def stream(self, first: int, last: int, limit: int) -> EntryStream:
        """Give the entries first to last, one by one; the arguments are checked now."""
        return entries_of(self.batches(first, last, limit))

    def batches(self, first: int, last: int, limit: int) -> BatchStream:
        """Give the entries first to last, in batches; the arguments are checked now."""
        check_limit(self._metadata().ledger_id, first, last, limit)
        return self._batches(first, last)

    def stream_unconfirmed(self, first: int, last: int) -> EntryStream:
        """Give the entries first to last, up to the first that no bookie has."""
        check_range(first, last)
        return self._unconfirmed(first, last)

    async def _batches(self, first: int, last: int) -> BatchStream:
        while first <= last:
            async with (
                self._run(first, last) as run,
                contextlib.aclosing(run.reader.batches(first, run.end, run.end)) as batches,
            ):
                async for batch in batches:
                    first = run.following = batch.last_entry_id + 1
                    yield batch

    async def _unconfirmed(self, first: int, last: int) -> EntryStream:
        while first <= last:
            async with self._run(first, last) as run:
                async with contextlib.aclosing(run.reader.stream_unconfirmed(first, run.end)) as entries:
                    async for entry in entries:
                        run.following = entry.entry_id + 1
                        yield entry
                if run.following <= run.end:
                    return
                first = run.following

    @contextlib.asynccontextmanager
    async def _run(self, first: int, last: int) -> AsyncGenerator[_Run, None]:
        """Give a reader of entries from `first` on, and up to which one it may be used."""
        view, end = await self._view(first, first)
        last = min(last, end)

        async def refresh() -> None:
            nonlocal view
            await self._refresh()
            view, _ = await self._view(run.following, last)  # what was read may have been trimmed

        self._turn += 1
        reader = EntryReader(
            self._context,
            lambda: view,
            self._digest,
            on_statement=self._on_statement,
            refresh=refresh,
            turn=self._turn,
        )
        run = _Run(reader, first, last)
        self._readers.append(reader)
        try:
            yield run
        finally:
            self._readers.remove(reader)
            self._mismatches += reader.digest_mismatches

    async def _view(self, first: int, last: int) -> tuple[LedgerMetadata, int]:
        """Give the metadata with the fragments of that range, and up to which entry they are all."""
        while True:
            metadata = self._metadata()
            if first < metadata.first_entry:
                raise trimmed(metadata, first)
            try:
                return await self._view_of(metadata, first, last)
            except NoSuchKeyError:
                # A page is gone: it was trimmed, or its fragments are in another one by now.
                await self._refresh()
                if self._metadata() == metadata:
                    raise

    async def _view_of(self, metadata: LedgerMetadata, first: int, last: int) -> tuple[LedgerMetadata, int]:
        assert metadata.unbounded is not None
        found: list[Fragment] = []
        pages, start = metadata.unbounded.pages, metadata.rows.page_of(first)
        for page in pages[pages.index(start) :] if start is not None else ():
            if found and page.first > last:
                # What follows says where the last one ends, and no more.
                return _with(metadata, [*found, replace(found[-1], first_entry=page.first)]), page.first - 1
            found += await self._page(page)
        following = metadata.fragments[0].first_entry
        if found and following > last:
            return _with(metadata, [*found, metadata.fragments[0]]), following - 1
        return _with(metadata, [*found, *metadata.fragments]), ENTRY_ID_MAX

    async def _page(self, ref: PageRef) -> tuple[Fragment, ...]:
        page = self._pages.get(ref)
        if page is None:
            page = self._pages[ref] = await self._list.page(ref)
            while len(self._pages) > _PAGES_KEPT:
                self._pages.popitem(last=False)
        self._pages.move_to_end(ref)
        return page


async def all_fragments(context: ClientContext, metadata: LedgerMetadata) -> AsyncGenerator[Fragment, None]:
    """Yield the fragments of a ledger, oldest first, also those that are in pages."""
    if metadata.unbounded is not None:
        pages = fragment_list(context, metadata.ledger_id)
        for ref in metadata.unbounded.pages:
            for fragment in await pages.page(ref):
                yield fragment
    for fragment in metadata.fragments:
        yield fragment


async def forget(context: ClientContext, metadata: LedgerMetadata) -> None:
    """Free the name of an unbounded ledger that has just been deleted, and delete its pages."""
    assert metadata.unbounded is not None
    if metadata.unbounded.name:
        await LedgerNames(context.ledgers).take(metadata.unbounded.name, metadata.ledger_id)
    await fragment_list(context, metadata.ledger_id).sweep()


def trimmed(metadata: LedgerMetadata, entry_id: int) -> NoSuchEntryError:
    """Build the error of an entry that has been trimmed."""
    return NoSuchEntryError(
        f"entry {entry_id} of ledger {metadata.ledger_id} has been trimmed: the ledger begins at entry "
        f"{metadata.first_entry}",
        ledger_id=metadata.ledger_id,
        entry_id=entry_id,
    )


def _with(metadata: LedgerMetadata, fragments: list[Fragment]) -> LedgerMetadata:
    assert metadata.unbounded is not None
    return replace(metadata, fragments=tuple(fragments), unbounded=replace(metadata.unbounded, pages=()))
