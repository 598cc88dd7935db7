"""The writer's handle of an unbounded ledger, which rolls, trims and seals, and the takeover that opens it.

`take_ledger_over` is the shell around `client_aio.core.takeover`. Takeovers may run at the same time. Each
has a term of its own, and a later term fences an earlier one at every bookie. The last takeover whose
compare-and-set to OPEN succeeds gets the ledger. A takeover that fails half-way leaves the ledger
IN_RECOVERY; any client may take it over then.

`UnboundedLedgerWriter` adds to a ledger's writer: when the next fragment is due, trimming, and the two ways
to close. `client_aio.core.ensemble_change` begins the fragments.

Invariant: at each change, `length_before` in the metadata is the length below the last fragment's first
entry.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from bookie_aio.wire.messages import WriteLac
from client_aio.bookies.connection import BookieConnection
from client_aio.bookies.ensemble_finder import Sizes
from client_aio.config import WriteOptions
from client_aio.context import on_own_loop
from client_aio.core.takeover import TermOpening, take_over
from client_aio.ledger.create import start_writer
from client_aio.ledger.futures import fenced_by_metadata
from client_aio.ledger.recovery import Recovery, check_reach
from client_aio.ledger.writer import LedgerWriter, Token
from client_aio.unbounded.paged_fragments import PagedEntries, VersionedFragments
from metadata.errors import InvalidArgumentError, LedgerClosedError, LedgerRecoveryError

if TYPE_CHECKING:
    from client_aio.bookies.ensemble_finder import Found
    from client_aio.context import ClientContext
    from client_aio.core.add_window import AddGroup
    from client_aio.core.digest import Digest
    from client_aio.core.ensemble_change import EnsembleChange
    from client_aio.ledger.entry_reader import EntrySource
    from metadata.errors import BookKeeperError
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

    Connections = dict[str, BookieConnection | BookKeeperError]

FRAGMENT_BYTES = 256 * 1024 * 1024

_ROLL_RETRY_SHARE = 8
"""A roll that failed is due again after this share of a fragment's bytes: one eighth."""


@on_own_loop()
class UnboundedLedgerWriter(LedgerWriter):
    """Adds entries to an unbounded ledger, under a term; made by `Client.open_unbounded_ledger`.

    Adds, flushes and reads are those of `LedgerWriter`. An async context manager. A normal exit flushes and
    leaves the ledger to the next takeover; an exception or a cancellation aborts. When another client takes
    the ledger over, all outstanding adds fail with LedgerFencedError (*unknown*).
    """

    def __init__(self, *args: Any, fragment_bytes: int = FRAGMENT_BYTES, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fragment_bytes = fragment_bytes
        self._roll_at = self._window.length_confirmed + fragment_bytes
        self._is_left = False

    def _hold(self, metadata: LedgerMetadata, version: Version) -> VersionedFragments:
        return VersionedFragments(self._context, metadata, version)

    def _make_reader(self) -> EntrySource:
        held = self._held
        assert isinstance(held, VersionedFragments)
        return PagedEntries(self._context, lambda: held.current, self._digest, refresh=held.refresh)

    @property
    def term(self) -> int:
        """Return the term that this writer holds."""
        return self._term

    @property
    def first_entry(self) -> int:
        """Return the first entry that has not been trimmed."""
        return self._held.current.first_entry

    async def roll(self) -> int:
        """Begin a new fragment, and return its first entry; all entries added so far lie before it.

        `trim` drops whole fragments. The writer begins fragments by size too. Cancelling does not stop the
        roll. It may not have begun yet, though: entries that wait behind an `add_entries` delay it until that
        ends.

        Raises:
            BookKeeperError: the writer's first failure. LedgerClosedError: the writer is closed.
            MetadataUnavailableError: the store cannot be reached. No fragment was begun, and adding goes on.
            InvalidTransitionError: the metadata have no room for another fragment until some are trimmed.
                Adding goes on in the last fragment.
        """
        if self._bulk_lock.locked() and self._queued:
            async with self._bulk_lock:  # Entries added before this call wait behind the bulk.
                pass
        if not self.is_closed:
            self._replicator.flush()  # Entries that are not sent yet lie before the new fragment too.
            await asyncio.shield(self._changes.roll())
        self._check_writes()
        return self._changes.fragment.first_entry

    def _check_writes(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._is_closing:
            raise LedgerClosedError(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)

    async def trim(self, before_entry: int) -> int:
        """Drop the fragments that lie as a whole before an entry, and return the first entry that is left.

        The last fragment is never dropped. Bookies free the space later. Cancelling leaves the ledger
        trimmed, or as it was.

        Raises:
            LedgerFencedError, LedgerClosedError: this writer no longer has the ledger.
            MetadataUnavailableError: no definite outcome in time.
        """
        self._check_writes()
        if not isinstance(before_entry, int) or isinstance(before_entry, bool) or before_entry < 0:
            raise InvalidArgumentError(f"{before_entry!r} is no entry id", ledger_id=self.ledger_id)
        assert isinstance(self._held, VersionedFragments)
        await self._held.trim(before_entry, term=self._term)
        if (found := self._held.current).term != self._term:
            error = fenced_by_metadata(found)
            self._fail(error)
            raise error
        return self.first_entry

    async def close(self, *, at_ack_quorum: bool = False, seal: bool = False) -> LedgerMetadata:
        """Flush, and leave the ledger to the next takeover; calling it again does nothing.

        Args:
            at_ack_quorum: no effect, since an unbounded ledger has no guaranteed write quorum.
            seal: close the ledger for good instead, behind its last entry. Readers that follow it end there,
                and it cannot be taken over any more.

        Raises:
            BookKeeperError: the first failure of an add.
            LedgerFencedError: another client took the ledger over.
            LedgerClosedError: `seal` is set, and this writer has left the ledger before.
        """
        if self._is_left and seal:
            raise LedgerClosedError(
                f"ledger {self.ledger_id} has been left: open it again to seal it", ledger_id=self.ledger_id
            )
        return await self._close(self._close_metadata if seal else self._leave)

    @property
    def _is_closed_here(self) -> bool:
        return self._is_left or super()._is_closed_here

    async def _leave(self) -> None:
        if self._has_closed:
            return  # Another call has sealed the ledger meanwhile.
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        # Else readers would hear nothing of the last entries' LAC until the next takeover.
        window = self._window
        statement = self._digest.statement(window.content_term, window.lac, window.lafr_to_state)
        await self._replicator.ask_all(WriteLac(self.ledger_id, self._term, statement))
        self._is_left = True

    async def _write_change(self, change: EnsembleChange) -> bool:
        is_written = await super()._write_change(change)
        if is_written:
            self._roll_at = change.length + self._fragment_bytes
        return is_written

    def _on_reported(self, groups: list[AddGroup[Token]]) -> None:
        super()._on_reported(groups)
        length = self._window.length_confirmed
        if length >= self._roll_at and not self.is_closed and not self._window.is_holding:
            self._roll_at = length + self._fragment_bytes // _ROLL_RETRY_SHARE
            self._changes.roll()


logger = logging.getLogger(__name__)


async def take_ledger_over(
    context: ClientContext, ledger_id: int, password: bytes, fragment_bytes: int
) -> UnboundedLedgerWriter:
    """Take a ledger over, and open it for writing; see `UnboundedLedgerOperations.open_unbounded_ledger`."""
    metadata, version = await context.ledgers.read(ledger_id)
    if not metadata.is_unbounded:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is a bounded one: it has one writer, and is not taken over",
            ledger_id=ledger_id,
        )
    digest = await context.unlock(metadata, password)
    held = VersionedFragments(context, metadata, version)
    if metadata.is_closed:
        raise sealed(metadata)
    # Before anything is fenced: a takeover that cannot be completed must not end a healthy writer.
    await check_reach(context, metadata, digest)
    found = await context.finder.find(ledger_id, Sizes.of(metadata))
    if not await held.update(take_over):
        raise sealed(held.current)
    known = held.current
    logger.info("ledger=%d taken over under term %d", ledger_id, known.term)
    opening, connections = await _find_end(context, held, digest, found)
    if not (await held.update(opening.apply) or opening.is_met_by(held.current)):
        raise fenced_by_metadata(held.current)
    writer = UnboundedLedgerWriter(
        context,
        held.current,
        held.version,
        digest,
        WriteOptions(),
        term=known.term,
        last_entry=opening.last_entry,
        length=opening.length,
        fragment_bytes=fragment_bytes,
    )
    return await start_writer(context, writer, connections)


async def _find_end(
    context: ClientContext, held: VersionedFragments, digest: Digest, found: Found
) -> tuple[TermOpening, Connections]:
    """Fence the last fragment, and write its recoverable entries back.

    Args:
        found: the bookies of the next fragment. Others are chosen if one has been lost meanwhile.
    """
    known = held.current
    recovery = Recovery(context, known, digest)
    try:
        last_entry, length = await recovery.run()
    except LedgerRecoveryError as error:
        await held.refresh()
        if held.current.term != known.term:
            # Another takeover has decided by now where the ledger ends.
            raise fenced_by_metadata(held.current) from error
        raise
    if any(isinstance(each, BookieConnection) and not each.is_open for each in found.connections.values()):
        found = await context.finder.find(known.ledger_id, Sizes.of(known))
    opening = TermOpening(known, recovery.fragments, last_entry, length, found.bookies)
    return opening, found.connections


def sealed(metadata: LedgerMetadata) -> LedgerClosedError:
    """Build the error of a ledger that takes no more entries."""
    return LedgerClosedError(
        f"ledger {metadata.ledger_id} has been sealed at entry {metadata.last_entry}",
        ledger_id=metadata.ledger_id,
    )
