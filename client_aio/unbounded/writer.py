"""The writer's handle of an unbounded ledger, which rolls, trims and seals, and the takeover that opens it.

`take_ledger_over` is the shell around `client_aio.core.takeover`. Takeovers may run at the same time. Each
has a term of its own, and a later term fences an earlier one at every bookie. The last takeover whose
compare-and-set to OPEN succeeds gets the ledger. A takeover that fails half-way leaves the ledger
IN_RECOVERY; any client may take it over then.

`UnboundedLedgerWriter` adds to a ledger's writer: when the next fragment is due, trimming, the two ways to
close, and healing (`client_aio.healing`, `client_aio.core.healing`). A writer that heals takes its own ledger
over, and goes on under the next term. `client_aio.core.ensemble_change` begins the fragments.

Invariants: at each change, `length_before` in the metadata is the length below the last fragment's first
entry. While the writer heals, no entry is in a window: all that are outstanding are in the backlog.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from mypy_extensions import mypyc_attr

from bookie_aio.wire.messages import WriteLac
from client_aio.bookies.connection import BookieConnection
from client_aio.bookies.ensemble_finder import Sizes
from client_aio.config import WriteOptions
from client_aio.core.healing import OwnTerms
from client_aio.core.takeover import TermOpening, take_over
from client_aio.healing import APPEND_TIMEOUT_S, Healing, WriterState, is_final
from client_aio.ledger.create import start_writer
from client_aio.ledger.futures import Failure, as_unknown, complete, fenced_by_metadata, note_sent
from client_aio.ledger.recovery import Recovery, check_reach
from client_aio.ledger.writer import LedgerWriter, Token
from client_aio.unbounded.paged_fragments import PagedEntries, VersionedFragments
from metadata.access.bookies import SetBacks, not_free_below
from metadata.errors import (
    InvalidArgumentError,
    LedgerClosedError,
    LedgerRecoveryError,
    NoSuchLedgerError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from client_aio.bookies.ensemble_finder import Found
    from client_aio.context import ClientContext
    from client_aio.core.add_window import AddGroup
    from client_aio.core.digest import Digest
    from client_aio.core.ensemble_change import EnsembleChange
    from client_aio.ledger.ensemble_change import EnsembleChangeTask
    from client_aio.ledger.entry_reader import EntrySource
    from metadata.errors import BookKeeperError, OperationTimeoutError
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

    Connections = dict[str, BookieConnection | BookKeeperError]

FRAGMENT_BYTES = 256 * 1024 * 1024

_ROLL_RETRY_SHARE = 8
"""A roll that failed is due again after this share of a fragment's bytes: one eighth."""


@mypyc_attr(allow_interpreted_subclasses=True)
class UnboundedLedgerWriter(LedgerWriter):
    """Adds entries to an unbounded ledger, under a term; made by `Client.open_unbounded_ledger`.

    Adds, flushes and reads are those of `LedgerWriter`. An async context manager. A normal exit flushes and
    leaves the ledger to the next takeover; an exception or a cancellation aborts. When another client takes
    the ledger over, all outstanding adds fail with LedgerFencedError (*unknown*).
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        version: Version,
        digest: Digest,
        options: WriteOptions,
        *,
        term: int,
        last_entry: int,
        length: int,
        fragment_bytes: int = FRAGMENT_BYTES,
        append_timeout_s: float | None = APPEND_TIMEOUT_S,
    ) -> None:
        self._fragment_bytes = fragment_bytes
        self._loss: Failure | None = None  # of adds that were given up; not raised by `flush` yet
        self._is_left = False
        super().__init__(
            context, metadata, version, digest, options, term=term, last_entry=last_entry, length=length
        )
        self._own_terms = OwnTerms(self._term)
        what = f"unbounded ledger {self.ledger_id}"
        self._healing = Healing(self._context, what, self, append_timeout_s)

    def _attach(
        self, metadata: LedgerMetadata, version: Version, *, term: int, last_entry: int, length: int
    ) -> None:
        super()._attach(metadata, version, term=term, last_entry=last_entry, length=length)
        self._roll_at = self._window.length_confirmed + self._fragment_bytes

    async def start(self, connections: Connections) -> None:
        """Seat the bookies of the ensemble; called once, before the first add."""
        self._context.check_loop()
        await super().start(connections)
        self._healing.watch_ages()

    def _hold(self, metadata: LedgerMetadata, version: Version) -> VersionedFragments:
        return VersionedFragments(self._context, metadata, version)

    def _make_reader(self) -> EntrySource:
        def refresh() -> Awaitable[None]:
            assert isinstance(self._held, VersionedFragments)
            return self._held.refresh()

        return PagedEntries(self._context, lambda: self._held.current, self._digest, refresh=refresh)

    @property
    def term(self) -> int:
        """Return the term that this writer holds. It grows when the writer heals."""
        return self._term

    @property
    def state(self) -> WriterState:
        """Return whether this writer is writing, healing, fenced or closed."""
        return self._healing.state

    def states(self) -> AsyncGenerator[WriterState, None]:
        """Yield the state now, and each later state; ends behind a final one.

        A state that lasts only until the consumer comes back is passed over.
        """
        self._context.check_running_loop()
        return self._healing.states()

    @property
    def told_failures(self) -> tuple[BookKeeperError, ...]:
        """Return the failures, of the writer or of adds given up, that a call or a future has raised."""
        loss = self._loss
        return (*super().told_failures, *([loss.error] if loss is not None and loss.is_known else []))

    @property
    def first_entry(self) -> int:
        """Return the first entry that has not been trimmed."""
        return self._held.current.first_entry

    async def roll(self) -> int:
        """Begin a new fragment, and return its first entry; all entries added so far lie before it.

        `trim` drops whole fragments. The writer begins fragments by size too. Cancelling does not stop the
        roll. It may not have begun yet, though: entries that wait, for room or behind an `add_entries`, delay
        it.

        Raises:
            BookKeeperError: the writer's first failure. LedgerClosedError: the writer is closed.
            MetadataUnavailableError: the store cannot be reached. No fragment was begun, and adding goes on.
            InvalidTransitionError: the metadata have no room for another fragment until some are trimmed.
                Adding goes on in the last fragment.
        """
        self._context.check_loop()
        await self._waiting.passed()  # Entries added before this call may wait, for room or behind a bulk.
        while True:
            await self._healing.until_open()
            changes = self._changes
            if not self.is_closed:
                self._replicator.flush()  # Entries that are not sent yet lie before the new fragment too.
                await asyncio.shield(changes.roll())
            self._check_writes()
            if changes is self._changes and not self._healing.is_healing:
                return changes.fragment.first_entry

    def _check_writes(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self.is_closed:
            raise LedgerClosedError(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)

    async def trim(self, before_entry: SupportsIndex) -> int:
        """Drop the fragments that lie as a whole before an entry, and return the first entry that is left.

        The last fragment is never dropped. Bookies free the space later. Cancelling leaves the ledger
        trimmed, or as it was.

        Raises:
            LedgerFencedError, LedgerClosedError: this writer no longer has the ledger.
            MetadataUnavailableError: no definite outcome in time.
        """
        self._context.check_loop()
        self._check_writes()
        if not isinstance(before_entry, int) or isinstance(before_entry, bool) or before_entry < 0:
            raise InvalidArgumentError(f"{before_entry!r} is no entry id", ledger_id=self.ledger_id)
        while True:
            await self._healing.until_open()
            self._check_writes()
            held, term = self._held, self._term
            assert isinstance(held, VersionedFragments)
            await held.trim(before_entry, term=term)
            if held.current.term == term:
                return held.current.first_entry
            if held is self._held and not self._healing.is_healing:
                error = fenced_by_metadata(held.current)
                self._fail(error)
                raise error

    async def close(self, *, at_ack_quorum: bool = False, seal: bool = False) -> LedgerMetadata:
        """Flush, and leave the ledger to the next takeover; calling it again does nothing.

        A writer that heals has `append_timeout_s` to close.

        Args:
            at_ack_quorum: no effect, since an unbounded ledger has no guaranteed write quorum.
            seal: close the ledger for good instead, behind its last entry. Readers that follow it end there,
                and it cannot be taken over any more.

        Raises:
            BookKeeperError: the first failure of an add.
            LedgerFencedError: another client took the ledger over.
            LedgerClosedError: `seal` is set, and this writer has left the ledger before.
            OperationTimeoutError: adds have failed, as for `flush`; or bookies were away for too long.
        """
        self._context.check_loop()
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
        await self._replicator.ask_enough(self._context, WriteLac(self.ledger_id, self._term, statement))
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

    async def flush(self) -> None:
        """Wait until every entry added so far is acknowledged.

        Raises:
            BookKeeperError: the failure that ended the writer.
            OperationTimeoutError: adds have failed after `append_timeout_s` since the last call that raised
                this. Later adds go on.
        """
        self._context.check_loop()
        await super().flush()
        loss, self._loss = self._loss, None
        if loss is not None:
            raise loss.to_raise()

    async def abort(self) -> None:
        """End at once: outstanding futures fail as *unknown*, and the ledger is left to the next takeover."""
        self._context.check_loop()
        await super().abort()
        await self._healing.stop()

    async def _settle(self, at_ack_quorum: bool) -> None:
        while True:
            await self._healing.until_healed()
            await super()._settle(at_ack_quorum)
            if not self._healing.is_healing:
                return

    def _release(self) -> None:
        super()._release()
        self._healing.stop_watching()
        self._healing.cancel()

    # --- healing ---

    def _fail(self, error: BookKeeperError) -> None:
        if self._failure is not None:
            return
        if self._is_closing or self._intake.is_holding or is_final(error):
            super()._fail(error)
        else:
            what, key = "ledger=%d term %d has failed, healing: %s", ("healing", self.ledger_id)
            self._context.reports.warn(logger, key, what, self.ledger_id, self._term, error)
            self._hold_back()

    def _hold_back(self) -> None:
        changes, self._is_direct = self._changes, False
        note_sent(self._intake.hold_back().groups)
        for part in self._parts:
            part.stop()
        self._healing.begin(lambda: self._open_again(changes), self._go_on)

    async def _open_again(self, changes: EnsembleChangeTask[Token]) -> OpenedTerm:
        """Take the ledger over from this writer itself, as often as it takes."""
        await changes.cancel()
        return await self._healing.try_until_open(
            lambda: take_over_again(self._context, self.ledger_id, self._digest, self._own_terms),
            lambda: self._context.ledgers.watch(self.ledger_id),
            lambda: _is_lost(self._context, self.ledger_id, self._own_terms),
        )

    def _go_on(self, opened: OpenedTerm) -> None:
        """Complete the entries that the former term holds, and send the others under the new one."""
        metadata, opening = opened.held.current, opened.opening
        self._attach(
            metadata,
            opened.held.version,
            term=metadata.term,
            last_entry=opening.last_entry,
            length=opening.length,
        )
        known = self._intake.go_on(self._window, opening.last_entry)
        logger.info(
            "ledger=%d goes on under term %d behind entry %d: %d of the outstanding entries are there",
            self.ledger_id, metadata.term, opening.last_entry, len(known),
        )  # fmt: skip
        for entry_id, add in known:
            complete(add, entry_id)
        self._replicator.seat(metadata.last_fragment.bookies, opened.connections)
        self._context.finish_later(asyncio.create_task(self._replicator.lock(self._context)))
        self._replicator.schedule_flush()
        self._all_taken()
        self._waiters.reached(self._intake.last_settled)
        self._room.set()

    # --- the owner of the healing (`HealingOwner`) ---

    @property
    def _has_ended(self) -> bool:
        return self._is_closing

    @property
    def _first_failure(self) -> BookKeeperError | None:
        return self._failure

    def _counts(self) -> tuple[int, int]:
        return self._intake.last_taken, self._intake.last_settled

    def _give_up(self, error: OperationTimeoutError) -> None:
        if not self._intake.is_holding:
            # Only the end of their term keeps entries that are on their way from coming later.
            self._hold_back()
        self._loss = Failure(as_unknown(error))
        self._loss.fail([*self._intake.give_up(self._loss.error), *self._waiting.give_up()])
        self._waiters.reached(self._intake.last_settled)
        self._room.set()


class OpenedTerm(NamedTuple):
    """A term that has been opened, with the metadata as written."""

    held: VersionedFragments
    opening: TermOpening
    connections: Connections


logger = logging.getLogger(__name__)


async def take_ledger_over(
    context: ClientContext,
    ledger_id: int,
    password: bytes,
    fragment_bytes: int,
    append_timeout_s: float | None = APPEND_TIMEOUT_S,
) -> UnboundedLedgerWriter:
    """Take a ledger over, and open it for writing; see `UnboundedLedgerOperations.open_unbounded_ledger`."""
    metadata, version = await context.ledgers.read(ledger_id)
    if not metadata.is_unbounded:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is a bounded one: it has one writer, and is not taken over",
            ledger_id=ledger_id,
        )
    digest = await context.unlock(metadata, password)
    if metadata.is_closed:
        raise sealed(metadata)
    held, opening, connections = await open_term(
        context, VersionedFragments(context, metadata, version), digest, None
    )
    writer = UnboundedLedgerWriter(
        context,
        held.current,
        held.version,
        digest,
        WriteOptions(),
        term=held.current.term,
        last_entry=opening.last_entry,
        length=opening.length,
        fragment_bytes=fragment_bytes,
        append_timeout_s=append_timeout_s,
    )
    return await start_writer(context, writer, connections)


async def open_term(
    context: ClientContext, held: VersionedFragments, digest: Digest, own: OwnTerms | None
) -> OpenedTerm:
    """Take a ledger over: fence, find its end, and open the next term behind it.

    Args:
        own: the terms of a writer that takes its own ledger over; only from one of these, and the new one is
            noted there.

    Raises:
        LedgerFencedError: another client has taken the ledger over. Otherwise as `open_unbounded_ledger`.
    """
    # Before anything is fenced: a takeover that cannot be completed must not end a healthy writer.
    await check_reach(context, held.current, digest)
    # Bookies have answered, so an event tells if the metadata are an older copy. Terms that were counted
    # behind the copy are used up: nothing could tell apart what two writers stored under one term.
    least = not_free_below((await SetBacks.read(context.ledgers.store)).events)
    begin = partial(take_over if own is None else own.take_over, least=least)
    found = await context.finder.find(held.current.ledger_id, Sizes.of(held.current))
    while not await held.update(begin):
        # A compare-and-set of this writer's, in an attempt that was cancelled, may have come in between.
        if own is None or not own.hold(held.current, held.version):
            raise sealed(held.current) if held.current.is_closed else fenced_by_metadata(held.current)
    known = held.current
    if own is not None:
        own.took(known.term)
    logger.info("ledger=%d taken over under term %d", known.ledger_id, known.term)
    opening, connections = await _find_end(context, held, digest, found)
    if not (await held.update(opening.apply) or opening.is_met_by(held.current)):
        raise fenced_by_metadata(held.current)
    return OpenedTerm(held, opening, connections)


async def take_over_again(
    context: ClientContext, ledger_id: int, digest: Digest, own: OwnTerms
) -> OpenedTerm:
    """Take a ledger over for the writer that has it.

    Raises:
        LedgerFencedError: another client has taken the ledger over. LedgerClosedError: it has been sealed.
        NoSuchLedgerError: it has been deleted. Otherwise as `open_unbounded_ledger`.
    """
    metadata, version = await context.ledgers.read(ledger_id, sync=True)
    if not own.hold(metadata, version):
        raise sealed(metadata) if metadata.is_closed else fenced_by_metadata(metadata)
    # An outcome that stays unknown would leave open whether the ledger's term is this writer's.
    draw = partial(own.draw, context.draw_token)
    held = VersionedFragments(context, metadata, version, patience_s=math.inf, draw_token=draw)
    return await open_term(context, held, digest, own)


async def _is_lost(context: ClientContext, ledger_id: int, own: OwnTerms) -> bool:
    """Return whether another client has a writer's ledger, or it was sealed or deleted."""
    try:
        return not own.hold(*await context.ledgers.read(ledger_id))
    except NoSuchLedgerError:
        return True


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
        raise error  # by name: see docs/WHEELS.md
    if any(isinstance(each, BookieConnection) and not each.is_open for each in found.connections.values()):
        found = await context.finder.find(known.ledger_id, Sizes.of(known))
    opening = TermOpening(known, recovery.fragments, last_entry, length, found.bookies)
    return opening, found.connections


def sealed(metadata: LedgerMetadata) -> LedgerClosedError:
    """Build the error of a ledger that takes no more entries."""
    how = "" if metadata.given_up is None else ", with a loss"
    return LedgerClosedError(
        f"ledger {metadata.ledger_id} has been sealed at entry {metadata.last_entry}{how}",
        ledger_id=metadata.ledger_id,
    )
