"""What a bookie knows of ledgers with a password: whether they have one, and what a repair may store.

Owns what is kept of their metadata, and the reads of these. Does not own the verdicts on tokens
(`bookie_aio.core.authorisation`, `LedgerAuthoriser`), nor the storing (`handlers.add`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from bookie_aio.core.authorisation import (
    Repairable,
    RepairRight,
    content_terms,
    has_password,
    have_term,
    repairable,
)
from metadata.access.fragments import FragmentList
from metadata.errors import MetadataUnavailableError, NoSuchKeyError, NoSuchLedgerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from bookie_aio.storage.engine import Engine
    from bookie_aio.wire.blocks import Block
    from metadata.access.ledgers import LedgerStore
    from metadata.model.paged_list import PageRef

_KNOWN_MAX = 1 << 18
"""The ledgers that are known, their fragments and pages, all counted: some 20 MB."""
_PAGES_MAX = 256
"""Pages of lists of fragments that are kept: some 5 MB where each holds 200 fragments."""


class PasswordLedgers:
    """What the metadata store says about ledgers with a password, for requests that no lock decides on.

    An answer that cannot change is kept: whether a ledger has a password, and up to where its entries are
    settled. The number of kept answers is bounded. A ledger that is not in the metadata store is asked for
    again at the next request. So is one of which a page is gone: its list of fragments has changed.
    """

    def __init__(self, engine: Engine, ledgers: LedgerStore) -> None:
        self._engine = engine
        self._ledgers = ledgers
        self._known: OrderedDict[int, Repairable | None] = OrderedDict()  # None: no password
        self._weight = 0  # of all that is known
        self._asking: dict[int, asyncio.Task[bool]] = {}
        # The content terms in a page of a list of fragments, by ledger and page. A page is written once.
        self._pages: OrderedDict[tuple[int, str], tuple[tuple[int, int], ...]] = OrderedDict()
        self._one_page = asyncio.Lock()  # Requests for the same page wait for one read of it.

    def has_password(self, ledger_id: int) -> bool | asyncio.Future[bool]:
        """Return whether a ledger is there and has a password, or a future of this answer.

        The future serves the requests that wait for it, and none that comes after it is done. By then the
        ledger may exist, or the store be back. It ends with MetadataError where the store did not answer.
        """
        if ledger_id in self._known:
            return self._known[ledger_id] is not None
        asking = self._asking.get(ledger_id)
        if asking is None or asking.done():  # it was cancelled before it began
            asking = self._asking[ledger_id] = asyncio.get_running_loop().create_task(self._ask(ledger_id))
        return asking

    async def may_repair(
        self, block: Block, waiting: Callable[[], AbstractContextManager[None]]
    ) -> RepairRight:
        """Return whether a repair without a token may store a block.

        Of a ledger that is not in the metadata store it may, unless a token has locked the ledger here.
        Whenever the store is asked, what `waiting` gives is entered.

        Raises:
            MetadataError: the metadata store cannot be asked.
            TooManyRequestsError: too many requests wait for the metadata store (`StoreWaits`).
        """
        ledger_id = block.ledger_id
        for must_ask in (False, True):
            if must_ask:
                with waiting():
                    await self._read(ledger_id)
            if ledger_id in self._known:
                known = self._known[ledger_id]
                if known is None:
                    return RepairRight.MISSING
                if block.last_entry < known.end:
                    with suppress(NoSuchKeyError):
                        is_named = await self._names(known, block, waiting)
                        return RepairRight.NAMED if is_named else RepairRight.MISSING
                    if must_ask:
                        raise MetadataUnavailableError(
                            f"the fragments of ledger {ledger_id} have just changed; ask again"
                        )
            elif must_ask:
                return RepairRight.NONE if self._engine.lock(ledger_id) else RepairRight.MISSING
        return RepairRight.NONE

    async def _names(
        self, known: Repairable, block: Block, waiting: Callable[[], AbstractContextManager[None]]
    ) -> bool:
        """Return whether the metadata give all entries of a block its content term.

        Raises:
            NoSuchKeyError: a page is gone: the head has changed since it was read.
        """
        for ref, entries in known.parts(block.first_entry, block.last_entry):
            fragments = known.fragments
            if ref is not None:
                fragments = await self._page(block.ledger_id, ref, waiting)
            if not have_term(fragments, entries, block.content_term):
                return False
        return True

    async def _page(
        self, ledger_id: int, ref: PageRef, waiting: Callable[[], AbstractContextManager[None]]
    ) -> tuple[tuple[int, int], ...]:
        key = ledger_id, ref.name
        if key not in self._pages:
            with waiting():
                async with self._one_page:
                    if key not in self._pages:
                        page = await FragmentList(self._ledgers, ledger_id, str, 0.0).page(ref)
                        self._pages[key] = content_terms(page)
                        if len(self._pages) > _PAGES_MAX:
                            self._pages.popitem(last=False)
        self._pages.move_to_end(key)
        return self._pages[key]

    async def _read(self, ledger_id: int) -> None:
        try:
            metadata, _ = await self._ledgers.read(ledger_id, sync=True)
        except NoSuchLedgerError:
            self._forget(ledger_id)
            return
        self._forget(ledger_id)
        self._known[ledger_id] = known = repairable(metadata) if has_password(metadata) else None
        self._weight += _weight(known)
        while self._weight > _KNOWN_MAX:
            self._forget(next(iter(self._known)))

    def _forget(self, ledger_id: int) -> None:
        if ledger_id in self._known:
            self._weight -= _weight(self._known.pop(ledger_id))

    async def _ask(self, ledger_id: int) -> bool:
        try:
            await self._read(ledger_id)
        finally:
            del self._asking[ledger_id]
        return self._known.get(ledger_id) is not None

    async def close(self) -> None:
        """Stop asking. Requests that wait are refused or lost with their connections."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def _weight(known: Repairable | None) -> int:
    return 1 if known is None else 2 + len(known.fragments) + len(known.pages)
