"""The metadata of an unbounded ledger in a client, and reads whose fragments stand in pages.

Owns the changes to the head, one after another, and the *views*. A view is the ledger's metadata with only
the fragments of a range of entries, from pages or from the head. So memory and time do not grow with the
ledger.

Invariant: a view covers the whole range that it was made for. A view that is made again covers the entries of
the range that have been neither returned nor trimmed. No entry outside of that is looked up in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from client_aio.core.read_plan import check_limit, check_range, trimmed
from client_aio.core.repair_plan import replaced, replaced_in_page
from client_aio.ledger.entry_reader import BatchStream, EntryReader, EntryStream, entries_of
from client_aio.ledger.metadata_update import VersionedLedgerMetadata, bookies_of
from metadata.access.fragments import FragmentHead, FragmentList, LedgerNames
from metadata.errors import NoSuchKeyError, NoSuchLedgerError
from metadata.ids import ENTRY_ID_MAX, KEY_FRAGMENTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from bookie_aio.wire.blocks import LacStatement
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.core.ensemble_change import Apply
    from client_aio.core.repair_plan import Part
    from metadata.model.ledger import Absent, Fragment, LedgerMetadata
    from metadata.model.paged_list import Page, PageRef
    from metadata.store import Guard, Version

_PAGES_KEPT = 4

_Wanted = tuple[FragmentHead, "Sequence[Page]"]
"""A new head, and the new pages that it refers to."""


def fragment_list(
    context: ClientContext,
    ledger_id: int,
    *,
    patience_s: float | None = None,
    draw_token: Callable[[], str] | None = None,
) -> FragmentList:
    """Return a ledger's fragment list.

    Args:
        patience_s: how long a change is retried while its outcome is not definite; None for the usual time.
        draw_token: returns a new token for each write; None for the client's.
    """
    if patience_s is None:
        patience_s = context.config.ensemble_change_timeout_s
    return FragmentList(context.ledgers, ledger_id, draw_token or context.draw_token, patience_s)


class VersionedFragments(VersionedLedgerMetadata):
    """The metadata of one unbounded ledger; updates run one after another.

    Args:
        patience_s, draw_token: as of `fragment_list`.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        version: Version,
        *,
        patience_s: float | None = None,
        draw_token: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(context, metadata, version)
        self._list = fragment_list(context, metadata.ledger_id, patience_s=patience_s, draw_token=draw_token)
        self._turns = asyncio.Lock()

    async def update(self, apply: Apply, guard: Guard | None = None) -> bool:
        """Update as `VersionedLedgerMetadata.update`; fragments that the head has no room for go to pages."""

        async def change(head: FragmentHead) -> _Wanted | None:
            wanted = apply(head.metadata)
            return None if wanted is None else (FragmentHead(wanted), ())

        return await self._change(change, guard)

    async def update_with(
        self, first_entry: int, apply: Callable[[LedgerMetadata, Sequence[str]], LedgerMetadata | None]
    ) -> bool:
        """Update as `VersionedLedgerMetadata.update_with`, where the fragment may be in a page, too."""

        async def change(head: FragmentHead) -> _Wanted | None:
            ref = head.rows.page_of(first_entry)
            fragments = head.metadata.fragments if ref is None else await self._list.page(ref)
            bookies = bookies_of(fragments, first_entry)
            wanted = None if bookies is None else apply(head.metadata, bookies)
            return None if wanted is None else (FragmentHead(wanted), ())

        return await self._change(change)

    async def trim(self, before_entry: int, *, term: int | None = None) -> bool:
        """Drop the fragments that lie as a whole before an entry; return False where there are none.

        Args:
            term: of the writer that trims; nothing is dropped when the ledger is under another term.

        Raises:
            MetadataUnavailableError: no definite outcome in time.
            NoSuchLedgerError: the ledger has been deleted.
        """

        async def change(head: FragmentHead) -> _Wanted | None:
            if term is not None and head.metadata.term != term:
                return None
            trimmed = FragmentHead(await self._list.without_before(head.metadata, before_entry))
            return None if trimmed == head else (trimmed, ())

        is_trimmed = await self._change(change)
        if is_trimmed:
            await self._list.sweep()  # Deletes pages of clients that lost a compare-and-set, or died.
        return is_trimmed

    async def replace_bookie(
        self, part: Part, old: str, new: str, absent: Absent | None = None, guard: Guard | None = None
    ) -> bool:
        """Put a bookie in another's place in one fragment, in a page or in the head (repair, rule 14).

        Cancelling leaves the outcome open, and perhaps a page without a reference, which the next trim
        deletes.

        Args:
            absent: a record to add with it.
            guard: as of `update`.

        Returns:
            False where the fragment differs from the plan: it was trimmed, or repaired by another client.

        Raises:
            MetadataUnavailableError: no definite outcome in time.
            NoSuchLedgerError: the ledger has been deleted.
            MetadataCorruptError: the fragment's page is damaged, or missing for good.
            GuardChangedError: the guard's key has changed, and the change never happens.
        """

        async def change(head: FragmentHead) -> _Wanted | None:
            ref = head.rows.page_of(part.first_entry)
            if ref is None:
                wanted = replaced(head.metadata, part, old, new, absent)
                return None if wanted is None else (FragmentHead(wanted), ())
            last_entry = head.rows.following(ref) - 1
            fragments = replaced_in_page(await self._list.page(ref), last_entry, part, old, new)
            if fragments is None:
                return None
            given = [fragment.row for fragment in fragments]
            rows, page = head.rows.rewrite(ref, given, self._context.draw_token)
            changed = head.with_rows(rows)
            if absent is not None:
                changed = FragmentHead(changed.metadata.with_absent(absent))
            return changed, (page,)

        return await self._change(change, guard)

    async def refresh(self) -> None:
        """Read the metadata again, as they are in the store now."""
        async with self._turns:
            ledger_id = self.current.ledger_id
            self.current, self.version = await self._context.ledgers.read(ledger_id, sync=True)

    async def _change(
        self, change: Callable[[FragmentHead], Awaitable[_Wanted | None]], guard: Guard | None = None
    ) -> bool:
        before: list[str] = []

        async def noted(head: FragmentHead) -> _Wanted | None:
            before[:] = head.pages_in_use()
            return await change(head)

        async with self._turns:
            try:
                changed = await self._list.rewrite(FragmentHead(self.current), self.version, noted, guard)
            except NoSuchKeyError as error:
                ledger_id = self.current.ledger_id
                raise NoSuchLedgerError(f"there is no ledger {ledger_id}", ledger_id=ledger_id) from error
            self.current, self.version = changed.head.metadata, changed.version
        if changed.is_done:
            after = set(changed.head.pages_in_use())
            await self._list.delete_pages(name for name in before if name not in after)
        return changed.is_done


def hold(context: ClientContext, metadata: LedgerMetadata, version: Version) -> VersionedLedgerMetadata:
    """Return the metadata of a ledger of either kind, for changes."""
    kind = VersionedFragments if metadata.is_unbounded else VersionedLedgerMetadata
    return kind(context, metadata, version)


@dataclass(slots=True)
class _Run:
    """A range of entries that is read with one view."""

    reader: EntryReader
    following: int
    """The first entry that has not been returned yet."""
    end: int


class PagedEntries:
    """Reads entries of an unbounded ledger, page after page; an `EntrySource`.

    Args:
        metadata: returns the ledger's metadata as its owner knows them now.
        on_statement: called with every LAC statement that an answer carries; the statement is not verified.
        refresh: reads the metadata again, as they are in the store now.
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
        """Return how many answers were damaged or forged."""
        return self._mismatches + sum(reader.digest_mismatches for reader in self._readers)

    def stream(self, first: int, last: int, limit: int) -> EntryStream:
        """Return the entries first to last, one by one; see `EntryReader.batches`."""
        return entries_of(self.batches(first, last, limit))

    def batches(self, first: int, last: int, limit: int, *, is_tail: bool = False) -> BatchStream:
        """Return the entries first to last, in batches; see `EntryReader.batches`."""
        check_limit(self._metadata().ledger_id, first, last, limit)
        return self._batches(first, last, is_tail=is_tail)

    def stream_unconfirmed(self, first: int, last: int) -> EntryStream:
        """Return the entries first to last, up to the first entry that no bookie has."""
        check_range(first, last)
        return self._unconfirmed(first, last)

    async def _batches(self, first: int, last: int, *, is_tail: bool) -> BatchStream:
        while first <= last:
            async with (
                self._run(first, last) as run,
                contextlib.aclosing(run.reader.batches(first, run.end, run.end, is_tail=is_tail)) as batches,
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
                    if run.following < self._metadata().first_entry:
                        raise trimmed(self._metadata(), run.following)
                    return
                first = run.following

    @contextlib.asynccontextmanager
    async def _run(self, first: int, last: int) -> AsyncGenerator[_Run, None]:
        """Return a reader of the entries from `first` on, and the last entry that it may be used for."""
        view, end = await self._view(first, first)
        last = min(last, end)

        async def refresh() -> None:
            nonlocal view
            await self._refresh()
            # Entries that were returned, or read ahead, may have been trimmed: the view begins behind them.
            view, _ = await self._view(max(run.following, self._metadata().first_entry), last)

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
        """Return the metadata with the fragments of a range, and the last entry that they cover."""
        while True:
            metadata = self._metadata()
            if first < metadata.first_entry:
                raise trimmed(metadata, first)
            try:
                return await self._view_of(metadata, first, last)
            except NoSuchKeyError as error:
                # A page is gone: it was trimmed, or its fragments are in another page by now.
                await self._refresh()
                if self._metadata() == metadata:
                    raise self._list.damaged(error) from error

    async def _view_of(self, metadata: LedgerMetadata, first: int, last: int) -> tuple[LedgerMetadata, int]:
        assert metadata.unbounded is not None
        found: list[Fragment] = []
        pages, start = metadata.unbounded.pages, metadata.rows.page_of(first)
        for page in pages[pages.index(start) :] if start is not None else ():
            if found and page.first > last:
                # The next page's first fragment only marks the end of the last fragment found.
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


class Span(NamedTuple):
    """The fragments of one page or of the head, oldest first."""

    metadata: LedgerMetadata
    """The ledger's metadata as last read."""
    fragments: tuple[Fragment, ...]
    last_entry: int | None
    """The end of the last fragment; None where it may still grow."""


async def spans(
    context: ClientContext, metadata: LedgerMetadata, first: int = 0
) -> AsyncGenerator[Span, None]:
    """Yield a ledger's fragments that begin at `first` or behind it, page after page; the head comes last.

    The fragments are those of `metadata`, unless a page is gone: then the metadata are read again. So
    fragments trimmed meanwhile are left out, and fragments begun meanwhile are included.

    Args:
        metadata: of the ledger, as read before.

    Raises:
        NoSuchLedgerError: the ledger has been deleted.
        MetadataCorruptError: a page is damaged, or missing for good.
    """
    pages = fragment_list(context, metadata.ledger_id)
    while (ref := metadata.rows.page_of(max(first, metadata.first_entry))) is not None:
        following = metadata.rows.following(ref)
        try:
            page = await pages.page(ref)
        except NoSuchKeyError as error:
            before = metadata
            metadata, _ = await context.ledgers.read(before.ledger_id, sync=True)
            if metadata == before:
                raise pages.damaged(error) from error
            continue
        yield Span(metadata, tuple(each for each in page if each.first_entry >= first), following - 1)
        first = following
    fragments = tuple(each for each in metadata.fragments if each.first_entry >= first)
    yield Span(metadata, fragments, metadata.last_entry)


async def forget(context: ClientContext, metadata: LedgerMetadata) -> None:
    """Free the name of an unbounded ledger that has just been deleted, and delete its pages."""
    assert metadata.unbounded is not None
    if metadata.unbounded.name:
        await LedgerNames(context.ledgers).take(metadata.unbounded.name, metadata.ledger_id)
    await fragment_list(context, metadata.ledger_id).sweep()


async def forget_deleted(context: ClientContext) -> list[str]:
    """Delete the pages of deleted ledgers, which an interrupted deletion has left over.

    An id is never used for a second ledger, so a ledger whose head is gone stays deleted.

    Returns:
        The names of the pages.
    """
    pages: list[str] = []
    async for ledger_id in context.ledgers.ledger_ids(sync=True, below=KEY_FRAGMENTS):
        try:
            await context.ledgers.read(ledger_id, sync=True)
        except NoSuchLedgerError:
            pages += await fragment_list(context, ledger_id).sweep()
    return pages


def _with(metadata: LedgerMetadata, fragments: list[Fragment]) -> LedgerMetadata:
    assert metadata.unbounded is not None
    return replace(metadata, fragments=tuple(fragments), unbounded=replace(metadata.unbounded, pages=()))
