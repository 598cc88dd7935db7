"""Healing: bounding the marks of lost data, and lifting them where the loss has been made good (rule 4).

A start finds damage before the metadata store is asked anything. So a mark of all ledgers begins without a
bound. It is bounded before the bookie listens, by an id that is drawn from the metadata store. Only lower ids
had been given out at the time of the loss. From then on the bookie takes new ledgers as every other bookie
does.

A client repairs a ledger in the bookie's own place, and reads there all entries that the bookie owes. Then it
asks the bookie to lift the ledger's mark. The bookie does not take the client's word. It reads the ledger's
metadata itself, and looks up each entry that it owes. An entry that it looks up is never denied, since it is
listed in an index. `bookie_aio.core.healing` has the decisions.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.core.healing import fence_of, owed, why_marked
from bookie_aio.storage.journal import when_durable
from bookie_aio.structured_logging import fields
from bookie_aio.wire.listing import Row, listed
from metadata.access.fragments import FragmentList
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.errors import (
    DiskFullError,
    InvalidTransitionError,
    MetadataSetBackError,
    MetadataUnavailableError,
    NoSuchKeyError,
    is_unforeseen,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from bookie_aio.core.healing import Owed
    from bookie_aio.server.age import BookieAge
    from bookie_aio.storage.engine import Engine
    from metadata.model.ledger import Fragment, LedgerMetadata
    from metadata.store import MetadataStore

log = logging.getLogger(__name__)

_ENTRIES_AT_ONCE = 65_536
_ROWS_AT_ONCE = 16_384
_RETRY_S = 1.0


class MarkStaysError(InvalidTransitionError):
    """The mark of a ledger cannot be lifted as things stand; the message says why."""


class Healing:
    """Bounds and lifts the marks of one bookie."""

    def __init__(
        self,
        engine: Engine,
        store: MetadataStore,
        bookie_id: str,
        check_store: Callable[[int], Awaitable[None]],
        age: BookieAge,
    ) -> None:
        """Share the storage and the store. The caller closes both after this object.

        Args:
            engine: the storage.
            store: the metadata store.
            bookie_id: this bookie.
            check_store: `LedgerGarbageCollector.check_store`.
            age: the bookie's age.
        """
        self._engine = engine
        self._store = store
        self._ledgers = LedgerStore(store)
        self._bookie_id = bookie_id
        self._check_store = check_store
        self._age = age
        self._bounding: asyncio.Task[None] | None = None
        self.lifted = 0

    # --- the bound -----------------------------------------------------------------------------

    async def bound(self) -> None:
        """Bound the marks of all ledgers, and return when that is durable.

        Without room for the record the marks stay unbounded.

        Raises:
            MetadataError: the metadata store cannot be asked.
            StorageError: the disk failed.
        """
        marking = self._engine.marking
        while marking.is_unbounded:
            # Before the id is drawn: a loss that is found meanwhile has to be bounded by a later id.
            number = marking.number
            (drawn,) = await self._store.allocate_ids(LEDGER_SEQUENCE, 1)
            try:
                await when_durable(partial(marking.bound_to, number, drawn))
            except DiskFullError as error:
                text = "marks of lost data stay without a bound"
                log.warning(text, extra=fields(bookie=self._bookie_id, error=error))
                return
            log.warning(
                "data was lost: ledgers that exist by now take no ordinary adds here",
                extra=fields(bookie=self._bookie_id, up_to=marking.bound),
            )

    def bound_soon(self, then: Callable[[], None]) -> None:
        """Bound the marks of all ledgers as soon as that is possible, and call `then`."""
        if self._bounding is None or self._bounding.done():
            self._bounding = asyncio.get_running_loop().create_task(self._bound_later(then))

    async def _bound_later(self, then: Callable[[], None]) -> None:
        while self._engine.marking.is_unbounded and not self._engine.is_closed:
            try:
                await self.bound()
            except Exception as error:
                log.warning(
                    "bounding the marks of lost data failed",
                    extra=fields(bookie=self._bookie_id, error=error),
                    exc_info=is_unforeseen(error),
                )
            if self._engine.marking.is_unbounded:
                await asyncio.sleep(_RETRY_S)
        then()

    async def close(self) -> None:
        """Stop what runs in the background."""
        if self._bounding is not None:
            self._bounding.cancel()
            await asyncio.gather(self._bounding, return_exceptions=True)

    # --- lifting -------------------------------------------------------------------------------

    async def lift(self, ledger_id: int, number: int) -> int:
        """Lift the marks of a ledger up to a number, if the bookie holds all that it owes.

        Cancelled, it leaves the marks as they were, or lifted.

        Args:
            ledger_id: the ledger.
            number: the highest mark that the client knew before it verified the ledger; 0 to ask for it.

        Returns:
            The highest number of the ledger's marks that count now; 0: it has none.

        Raises:
            MarkStaysError: the ledger may still take entries, or this bookie lacks some.
            NoSuchLedgerError: the ledger has been deleted.
            MetadataError: the metadata store cannot be asked, is not that of this cluster, or was set back.
            StorageError: the disk is full, or failed.
        """
        marking = self._engine.marking
        if not number:
            return marking.tell(ledger_id)
        held = marking.of(ledger_id)
        if not held or held > marking.told(number):
            return held  # none, or a mark for damage that was found since the client asked
        self._engine.eviction_candidates.discard(ledger_id)
        heard = self._age.events_heard
        found = metadata, _ = await self._ledgers.read(ledger_id, sync=True)
        await self._check_store(ledger_id)  # an older copy may have a term below a fence that was lost
        reason = why_marked(metadata, self._bookie_id)
        if reason:
            raise MarkStaysError(f"ledger {ledger_id} stays marked: {reason}", ledger_id=ledger_id)
        # Entries under way are not listed yet. They count when they are durable.
        await when_durable(self._engine.barrier)
        async for fragments, last_entry in self._fragments(metadata):
            for one in owed(metadata, fragments, last_entry, self._bookie_id):
                await self._check_held(ledger_id, one)
        await self._age.raise_if_written(is_forced=True)
        # The age may be in an older copy. Read again, each copy with the new age has these metadata.
        if await self._ledgers.read(ledger_id, sync=True) != found:
            raise MetadataUnavailableError(
                f"the metadata of ledger {ledger_id} have changed while this bookie looked at it: ask again"
            )
        # No await from here to the append: what the metadata said above would be of before an event.
        await self._check_store(ledger_id)
        if self._age.events_heard != heard:  # perhaps one that was answered at once
            raise MetadataSetBackError(
                f"the metadata store was set back to an older copy while this bookie looked at ledger "
                f"{ledger_id}: ask again"
            )
        await when_durable(partial(marking.lift, ledger_id, held, fence_of(metadata)))
        self.lifted += 1
        log.info(
            "mark of lost data lifted: the bookie holds all that it owes of the ledger",
            extra=fields(bookie=self._bookie_id, ledger=ledger_id),
        )
        return marking.of(ledger_id)

    async def _fragments(
        self, metadata: LedgerMetadata
    ) -> AsyncGenerator[tuple[Sequence[Fragment], int | None], None]:
        """Yield a ledger's fragments page after page, each with the end of the last one."""
        if metadata.unbounded is not None:
            pages = FragmentList(self._ledgers, metadata.ledger_id, str, 0.0)
            for ref in metadata.unbounded.pages:
                try:
                    page = await pages.page(ref)
                except NoSuchKeyError as error:
                    raise MetadataUnavailableError(
                        f"page {ref.name} of ledger {metadata.ledger_id} is gone: its fragments have just "
                        "changed; ask again"
                    ) from error
                yield page, metadata.rows.following(ref) - 1
        yield metadata.fragments, metadata.last_entry

    async def _check_held(self, ledger_id: int, wanted: Owed) -> None:
        """Raise MarkStaysError where the bookie does not list one of the entries."""
        rest = wanted.entry_ids
        while rest:
            ids, rest = rest[:_ENTRIES_AT_ONCE], rest[_ENTRIES_AT_ONCE:]
            held = bytearray(len(ids))
            first = ids[0]
            while 0 <= first <= ids[-1]:
                rows, first = await self._engine.list_entries(
                    ledger_id, first, _ROWS_AT_ONCE, to_entry=ids[-1]
                )
                found = listed(ids, [Row(*row) for row in rows], wanted.content_term)
                held = bytearray(map(max, held, found))
            lacking = held.find(0)
            if lacking >= 0:
                raise MarkStaysError(
                    f"ledger {ledger_id} stays marked: {self._bookie_id} lacks {held.count(0)} of the "
                    f"entries {ids[0]} to {ids[-1]} that it owes, such as {ids[lacking]}: "
                    "repair it in its place",
                    ledger_id=ledger_id,
                )
