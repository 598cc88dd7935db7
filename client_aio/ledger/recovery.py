"""Recovering the ledger of a dead or fenced writer: fence, find the end, write back, close (rule 12).

A takeover of an unbounded ledger (`client_aio.unbounded.writer`) does the same, except for the close.

The shell around `client_aio.core.recovery`. Several clients may recover one ledger at once. All use the final
term, and all find an end that holds everything acknowledged. One compare-and-set to CLOSED succeeds, and the
other clients adopt its result. A recovery that dies has changed nothing but fences, copies and the state
IN_RECOVERY. Any client may run it again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import NO_TERM, AddFlag, ReadAnswer, ReadLac, ReadLacAnswer, Stop
from client_aio.bookies.pool import GRACE_S
from client_aio.core.quorum import can_acknowledge, indexes_of, proves_absent
from client_aio.core.read_plan import ClassRange, checked_blocks, class_ranges
from client_aio.core.recovery import (
    Ask,
    End,
    EntrySearch,
    FenceTally,
    Found,
    Inconclusive,
    RecoveredEnd,
    believed,
    entered,
    fencing_lac_read,
    recovery_read,
    recovery_term,
)
from client_aio.ledger.entry_reader import EntryReader
from client_aio.ledger.futures import fenced_by_term
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from client_aio.ledger.recovery_scope import (
    FragmentLists,
    RecoveryScope,
    ask_lac,
    list_last_fragment,
    open_classes,
    recovery_scope,
)
from client_aio.ledger.replication import Replication
from metadata.awake import awake_wait
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    InvalidArgumentError,
    LedgerFencedError,
    LedgerRecoveryError,
    MetadataUnavailableError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
)
from metadata.ids import NO_ENTRY
from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState, with_ensemble
from metadata.owned_task import cut_off, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bookie_aio.wire.blocks import Block, LacStatement
    from client_aio.context import ClientContext
    from client_aio.core.add_window import AddGroup
    from client_aio.core.digest import Digest
    from client_aio.core.ensemble_change import EnsembleChange
    from metadata.store import Version

logger = logging.getLogger(__name__)


async def recover_ledger(
    context: ClientContext,
    ledger_id: int,
    digest: Digest,
    *,
    only: Fragment | None = None,
    at_ack_quorum: bool = False,
    is_checked: bool = False,
) -> tuple[LedgerMetadata, Version]:
    """Close a ledger behind its last recoverable entry.

    A writer that is alive is fenced: it acknowledges nothing more. Where too few bookies answer to find the
    end, it is not: that is checked before. Cancellation leaves the ledger IN_RECOVERY, to be recovered again.
    Where the bookies of the last fragment have buried the ledger, it is closed behind the earlier fragments.

    Args:
        only: if the ledger is OPEN with another last fragment than this one, leave it unchanged.
        at_ack_quorum: with guaranteed write quorum, be content with Qa copies of each entry. The metadata
            then say from which entry on there may be fewer than Qw.
        is_checked: the caller has just run `check_reach`.

    Returns:
        The metadata and their version: CLOSED, or OPEN if `only` left the ledger unchanged.

    Raises:
        NoSuchLedgerError: there is no such ledger.
        InvalidArgumentError: the ledger is unbounded. Nothing was done.
        LedgerRecoveryError: too few bookies answered to decide; the message names the missing ones.
        MetadataUnavailableError: the metadata store did not answer in time.
    """
    held = VersionedLedgerMetadata(context, *await context.ledgers.read(ledger_id))
    if held.current.is_unbounded:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is unbounded: it is not recovered, but taken over by open_unbounded_ledger. "
            "Where lost bookies keep it from being taken over, accept_loss seals it",
            ledger_id=ledger_id,
        )

    is_open = held.current.state is LedgerState.OPEN and only in (None, held.current.last_fragment)
    if is_open and not is_checked:
        await check_reach(context, held.current, digest, at_ack_quorum=at_ack_quorum)

    def enter(now: LedgerMetadata) -> LedgerMetadata | None:
        return entered(now) if only in (None, now.last_fragment) else None

    await held.update(enter)  # Rule 12a; refused if the ledger is IN_RECOVERY already, or CLOSED.
    if only is not None and held.current.state is LedgerState.OPEN:
        return held.current, held.version
    while not held.current.is_closed:
        recovery = Recovery(context, held.current, digest, at_ack_quorum=at_ack_quorum)
        try:
            last_entry, length = await recovery.run()
        except LedgerRecoveryError:
            is_over = False
            with suppress(MetadataUnavailableError):
                # The ledger may have been deleted meanwhile: then its bookies do not answer either.
                await context.ledgers.read(ledger_id, sync=True)
                is_over = await is_buried(context, held.current, digest, recovery_term(held.current))
            if not is_over:
                raise
            last_entry, length = held.current.last_fragment.first_entry - 1, held.current.length_before
            logger.error("ledger=%d is closed behind entry %d: its bookies buried it", ledger_id, last_entry)
        short_from = recovery.below_write_quorum_from
        if await held.update(
            RecoveredEnd(held.current, recovery.fragments, last_entry, length, short_from).apply
        ):
            break
        # Another recovery was first: it closed the ledger, or changed the metadata that this one began with.
    return held.current, held.version


async def check_reach(
    context: ClientContext, metadata: LedgerMetadata, digest: Digest, *, at_ack_quorum: bool = False
) -> None:
    """Check that enough bookies answer to find a ledger's end, by LAC reads that do not fence.

    A takeover that cannot be completed must not end a healthy writer. Returns as soon as the answers cover
    all write sets (rule 12b), and could prove an end: a bookie that lost data denies no entry. Entries may
    have to be written back. Then each write set needs Qa bookies that answer, or replacements. With
    guaranteed write quorum each seat needs one.

    Args:
        at_ack_quorum: as of `recover_ledger`.

    Raises:
        LedgerRecoveryError: too few bookies answer. Nothing has been done.
        NoSuchLedgerError: the ledger has been deleted.
    """
    while (error := await _out_of_reach(context, metadata, digest, at_ack_quorum)) is not None:
        # The metadata may be older than the ledger's last change, or its bookies may refuse a deleted ledger.
        known = metadata
        try:
            metadata, _ = await context.ledgers.read(known.ledger_id, sync=True)
            if metadata.is_closed or await is_buried(context, metadata, digest):
                return
        except MetadataUnavailableError:
            raise error from None
        if metadata.last_fragment == known.last_fragment:
            raise error


async def is_buried(
    context: ClientContext, metadata: LedgerMetadata, digest: Digest, term: int = NO_TERM
) -> bool:
    """Return whether every bookie of the last fragment has a tombstone of the ledger.

    Each tombstone refuses adds for ever (rule 15). So nobody can acknowledge an entry of the fragment any
    more, nor read one. A bookie drops what it has only when the metadata store has no such ledger. So the
    ledger was deleted before the metadata were set back, or the id was buried before the ledger was made.
    The other bookies of a wide scope must hold nothing of the fragment.

    Args:
        term: fences these other bookies.
    """
    scope = await recovery_scope(context, metadata)
    request = ReadLac(metadata.ledger_id, term, NO_ENTRY, 0)
    asking = [ask_lac(context, digest, bookie_id, request) for bookie_id in scope.bookies]
    answers = await asyncio.gather(*asking, return_exceptions=True)
    named, first_entry = len(metadata.last_fragment.bookies), metadata.last_fragment.first_entry

    def has_nothing(seat: int, answer: ReadLacAnswer | BaseException) -> bool:
        if isinstance(answer, BaseException) or answer.is_damaged or scope.bookies[seat] in scope.unjudged:
            return False
        lac = NO_ENTRY if answer.statement is None else answer.statement.lac
        return max(lac, answer.last_entry) < first_entry

    return all(
        isinstance(each, NoSuchLedgerError) or (seat >= named and has_nothing(seat, each))
        for seat, each in enumerate(answers)
    )


async def _out_of_reach(
    context: ClientContext, metadata: LedgerMetadata, digest: Digest, at_ack_quorum: bool
) -> LedgerRecoveryError | None:
    scope = await recovery_scope(context, metadata)
    reach = _Reach(context, metadata, digest, scope, at_ack_quorum=at_ack_quorum)
    await reach.ask()
    return await reach.error()


class _Reach:
    """What the bookies of a recovery's scope answer to LAC reads that do not fence."""

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        digest: Digest,
        scope: RecoveryScope,
        *,
        at_ack_quorum: bool,
    ) -> None:
        self._context = context
        self._metadata = metadata
        self._digest = digest
        self._scope = scope
        self._ensemble = metadata.last_fragment.bookies
        self._sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self._is_whole = metadata.guaranteed_write_quorum and not at_ack_quorum
        self._tally = FenceTally(*scope.sizes, metadata.last_fragment.first_entry)
        self._highest = NO_ENTRY
        self._is_displaced = False  # a bookie that is not named may hold entries of the last fragment
        self._listing: set[int] = set()  # seats that would list all that they have
        self._silent = 0
        self._errors: dict[str, BookKeeperError] = {}
        self._lossy: dict[str, str] = {}
        self._refusing: set[str] = set()  # answered with an error, or not in time: reached, and of no use
        self._has_others = False  # in place of the bookies that have not answered
        self._lacking: NotEnoughBookiesError | None = None

    @property
    def _first(self) -> int:
        """Return the first entry that a recovery would look for, or one before it."""
        if self._may_be_short:
            return self._metadata.last_fragment.first_entry
        return _acknowledged(self._metadata, self._tally) + 1

    @property
    def _may_be_short(self) -> bool:
        """Return whether acknowledged entries may have to be written back, as `FragmentLists` says."""
        scope = self._scope
        return self._is_displaced or (
            scope.is_wide and bool(open_classes(self._metadata, len(scope.bookies), self._listing))
        )

    @property
    def _missing(self) -> int:
        """Return the seats of the last fragment that have not answered, as a bit mask."""
        return sum(1 << seat for seat in self._tally.missing if seat < len(self._ensemble))

    @property
    def _has_seats(self) -> bool:
        """Return whether there are enough bookies to write back to."""
        if self._has_others or not self._missing:
            return True
        return not self._is_whole and can_acknowledge(self._missing, *self._sizes)

    @property
    def _is_enough(self) -> bool:
        return self._tally.can_end and (self._highest < self._first or self._has_seats)

    async def ask(self) -> None:
        """Ask all bookies, until the answers are enough or there are no more."""
        asked, directory = self._scope.bookies, self._context.pool.directory
        tasks = {asyncio.create_task(self._ask(name)): seat for seat, name in enumerate(asked)}
        waiting, may_look = set(tasks), not self._is_whole
        changing = asyncio.create_task(directory.wait_for_membership_change())
        try:
            while waiting and not self._is_enough:
                grace_s = GRACE_S if may_look and self._tally.can_end else None
                done, _ = await awake_wait([*waiting, changing], grace_s)
                if not done:
                    # Only bookies to write back to are missing yet: others may do instead.
                    may_look = False
                    await self._look_for_others()
                    continue
                if changing.done():
                    # A bookie that did not answer may be back, while another one hangs for its whole timeout.
                    changing = asyncio.create_task(directory.wait_for_membership_change())
                    silent = indexes_of(self._silent)
                    again = {asyncio.create_task(self._ask(asked[seat])): seat for seat in silent}
                    tasks |= again
                    waiting |= again.keys()
                    self._errors, self._silent = {}, 0
                    self._refusing.clear()
                for task in [task for task in waiting if task.done()]:
                    waiting.remove(task)
                    self._note(tasks[task], task)
        finally:
            for each in (*waiting, changing):
                each.cancel()
            await asyncio.gather(*waiting, changing, return_exceptions=True)

    async def _ask(self, bookie_id: str) -> ReadLacAnswer:
        request = ReadLac(self._metadata.ledger_id, NO_TERM, NO_ENTRY, 0)
        return await ask_lac(self._context, self._digest, bookie_id, request)

    def _note(self, seat: int, task: asyncio.Task[ReadLacAnswer]) -> None:
        bookie_id = self._scope.bookies[seat]
        error = failure_of(task, bookie_id)
        if error is None:
            answer = task.result()
            statement = believed(answer.statement, self._metadata, self._digest)
            lac, lafr = (None, NO_ENTRY) if statement is None else (statement.lac, statement.lafr)
            is_damaged = answer.is_damaged or bookie_id in self._scope.unjudged
            self._tally.answer(seat, lac, lafr, is_damaged=is_damaged)
            if is_damaged:
                self._lossy[bookie_id] = "it lost data of the ledger, or may have"
            else:
                self._listing.add(seat)
            self._highest = max(self._highest, answer.last_entry, self._tally.lac)
            if seat >= len(self._ensemble) and answer.last_entry >= self._metadata.last_fragment.first_entry:
                self._is_displaced = True
        elif isinstance(error, BookKeeperError):
            self._errors[bookie_id] = error
            self._silent |= 1 << seat
            if not isinstance(error, BookieUnavailableError):
                self._refusing.add(bookie_id)
        else:
            raise error

    async def _look_for_others(self) -> None:
        """Look for bookies in place of those without an answer, as an ensemble change would (rule 12d)."""
        try:
            await self._context.finder.replace(
                self._metadata,
                self._ensemble,
                self._missing,
                excluded=() if self._is_whole else self._refusing,
                may_leave=not self._is_whole,
            )
            self._has_others = True
        except NotEnoughBookiesError as error:
            self._lacking = error

    async def error(self) -> LedgerRecoveryError | None:
        """Return why a recovery could not end; None if it can."""
        metadata, first = self._metadata, self._first
        if not self._tally.is_covered:
            return _uncovered(metadata, self._scope, self._errors, _NOTHING_DONE)
        if not self._tally.can_end:
            what = "has an end that cannot be found"
            return _uncovered(metadata, self._scope, {**self._errors, **self._lossy}, _NOTHING_DONE, what)
        if not self._is_enough:
            await self._look_for_others()
        if self._is_enough or not (self._is_whole or await self._must_write_back(first)):
            return None
        advice = "Run it again when they are back"
        if self._is_whole:
            advice += ", or with at_ack_quorum to close the ledger with Qa copies of some entries"
        return LedgerRecoveryError(
            f"entries {first} to {self._highest} of ledger {metadata.ledger_id} may have to be "
            f"written back, and bookies are missing: {self._lacking}; {_why(self._scope, self._errors)}. "
            f"{_NOTHING_DONE}. {advice}",
            ledger_id=metadata.ledger_id,
        )

    async def _must_write_back(self, entry_id: int) -> bool:
        """Return whether a recovery would find the first entry that it looks for.

        Without it there is nothing to write back. Where enough bookies deny it, the ledger may end before it.
        """
        if self._may_be_short:
            return True
        config, wanted = self._context.config, class_ranges(self._metadata, entry_id, entry_id)[0]
        missing = {self._ensemble[seat] for seat in indexes_of(self._missing)}
        is_held, denials = False, 0
        for bookie_id in wanted.bookies:
            if bookie_id in missing:
                continue
            with suppress(BookKeeperError):
                answer, body = await self._context.pool.ask(
                    bookie_id,
                    wanted.request(config.read_ahead_bytes),
                    ReadAnswer,
                    timeout_s=config.read_timeout_s,
                    ledger_id=wanted.ledger_id,
                )
                blocks, answer = checked_blocks(wanted, answer, body, self._digest)
                is_held = is_held or bool(blocks)
                stop = self._scope.believed(bookie_id, Stop(answer.stop))
                denials += not blocks and stop is Stop.NO_SUCH_ENTRY
        _, write_quorum, ack_quorum = self._sizes
        may_end = entry_id > self._tally.lac and proves_absent(denials, write_quorum, ack_quorum)
        return is_held and not may_end


_NOTHING_DONE = "Nothing was done: its writer, if it has one, goes on"


def _uncovered(
    metadata: LedgerMetadata,
    scope: RecoveryScope,
    errors: Mapping[str, object],
    advice: str,
    what: str = "cannot be fenced",
) -> LedgerRecoveryError:
    if any(isinstance(each, NoSuchLedgerError) for each in errors.values()):
        advice += ". Those that have deleted the ledger stay missing: only accept_loss closes it without them"
    if scope.is_wide:
        what += ". The metadata store was set back, so any bookie may hold entries"
        advice += ". `bookie-aio bookie forget` leaves out one that is gone for good"
    return LedgerRecoveryError(
        f"ledger {metadata.ledger_id} {what}: too few of its bookies answered; "
        f"missing: {_why(scope, errors)}. {advice}",
        ledger_id=metadata.ledger_id,
    )


def _acknowledged(metadata: LedgerMetadata, tally: FenceTally) -> int:
    """Return the last entry that is acknowledged, with guaranteed write quorum on all of its write set."""
    return tally.lafr if metadata.guaranteed_write_quorum else tally.lac


def _why(scope: RecoveryScope, errors: Mapping[str, object]) -> str:
    return "; ".join(f"{name} ({errors[name]})" for name in scope.bookies if name in errors)


class Recovery:
    """One attempt, with the metadata of its beginning, which are IN_RECOVERY.

    `fragments` are the fragments of `metadata`, with the ensemble changes made in memory (rule 12d).

    Args:
        at_ack_quorum: with guaranteed write quorum, write each entry back to Qa bookies at least, and not to
            Qw. `below_write_quorum_from` is then the first entry that may have fewer than Qw copies.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        digest: Digest,
        *,
        at_ack_quorum: bool = False,
    ) -> None:
        self._context = context
        self._digest = digest
        self._config = context.config
        self.metadata = metadata
        self._sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self._ensemble = metadata.last_fragment.bookies
        self._scope = RecoveryScope.of(metadata)
        self._unfenced: set[str] = set(self._ensemble)  # have not answered to a fence
        self._lists: FragmentLists  # in a wide scope
        self._has_seats = False
        self.fragments = metadata.fragments
        self._is_whole = metadata.guaranteed_write_quorum and not at_ack_quorum
        self.below_write_quorum_from: int | None = None
        self._events: asyncio.Queue[tuple[Ask, tuple[list[Block], ReadAnswer] | BookKeeperError]] = (
            asyncio.Queue()
        )
        self._written = asyncio.Event()
        self._failure: BookKeeperError | None = None
        self._reads: set[asyncio.Task[None]] = set()
        self._replication: Replication[None] | None = None

    async def run(self) -> tuple[int, int]:
        """Fence, find the end and write back; returns the last entry and the ledger's length up to it.

        Cancellation leaves fences and copies behind, as a failure does.

        Raises:
            LedgerRecoveryError: too few bookies answered to decide, or to write back to.
            LedgerFencedError: a later takeover of the unbounded ledger has begun.
        """
        recoveries, outcome = self._context.counters.recoveries, "failed"
        try:
            self._scope = await recovery_scope(self._context, self.metadata)
            _, write_quorum, ack_quorum = self._sizes
            self._lists = FragmentLists(
                self.metadata, self._scope, write_quorum if self._is_whole else ack_quorum
            )
            tally = await self._fence()
            logger.info("ledger=%d fenced, last add confirmed is %d", self.metadata.ledger_id, tally.lac)
            # Rule 11: with guaranteed write quorum, entries that only a part of the write set has are written
            # back.
            before = self._before(tally)
            replication = self._start_writing(before, tally, await self._length_at(before))
            last_entry = await self._search(replication, before + 1, tally.lac)
            await self._written_until(replication, lambda: replication.window.is_idle)
            outcome = "completed"
        finally:
            recoveries[outcome] += 1
            if self._replication is not None:
                self._replication.replicator.stop()
                await self._replication.changes.cancel()
            for task in self._reads:
                task.cancel()
            await asyncio.gather(*self._reads, return_exceptions=True)
        assert replication.window.lac == last_entry
        if self.metadata.guaranteed_write_quorum and not self._is_whole and last_entry > before:
            self.below_write_quorum_from = before + 1
        return last_entry, replication.window.length_confirmed

    # --- (b) fencing ---

    async def _fence(self) -> FenceTally:
        """Fence every write set (rule 12b). Each bookie is asked as soon as it is connected."""
        last, asked = self.metadata.last_fragment, self._scope.bookies
        tally = FenceTally(*self._scope.sizes, last.first_entry)
        tasks = {
            asyncio.create_task(self._fence_one(seat, bookie_id)): seat
            for seat, bookie_id in enumerate(asked)
        }
        waiting, errors = set(tasks), dict[str, BookKeeperError]()
        try:
            while waiting and (patience_s := self._patience_s(tally, map(tasks.__getitem__, waiting))) != 0.0:
                done, waiting = await awake_wait(waiting, patience_s)
                if not done:
                    break
                for task in done:
                    seat = tasks[task]
                    error = failure_of(task, asked[seat])
                    if error is None:
                        self._unfenced.discard(asked[seat])
                        statement = task.result()
                        if statement is None:
                            tally.answer(seat, None)
                        else:
                            tally.answer(seat, statement.lac, statement.lafr)
                    elif isinstance(error, LedgerFencedError):
                        raise fenced_by_term(self.metadata.ledger_id, error)
                    elif isinstance(error, BookKeeperError):
                        errors[asked[seat]] = error
                    else:
                        raise error
        finally:
            for task in waiting:
                task.cancel()
        if not tally.is_covered:
            raise _uncovered(self.metadata, self._scope, errors, "Run recovery again when they are back")
        return tally

    async def _fence_one(self, seat: int, bookie_id: str) -> LacStatement | None:
        request = fencing_lac_read(self.metadata)
        answer = await ask_lac(self._context, self._digest, bookie_id, request)
        if self._scope.is_wide:
            await self._list_one(seat, bookie_id)
        return believed(answer.statement, self.metadata, self._digest)

    async def _list_one(self, seat: int, bookie_id: str) -> None:
        """List what a bookie has of the last fragment. It is fenced: only recoveries add entries by now."""
        connection = await self._context.pool.get(bookie_id)
        rows, is_damaged = await list_last_fragment(self._context, self.metadata, connection)
        if is_damaged:
            # Where only bytes of listed entries are damaged, the list has all that the bookie had. A doubt
            # that has ended since the list would let the bookie deny entries, too.
            request = ReadLac(self.metadata.ledger_id, NO_TERM, NO_ENTRY, 0)
            is_damaged = (await ask_lac(self._context, self._digest, bookie_id, request)).is_damaged
        self._lists.note(seat, rows, is_damaged=is_damaged or bookie_id in self._scope.unjudged)

    def _patience_s(self, tally: FenceTally, waiting: Iterable[int]) -> float | None:
        """Return how long the fence waits for the answers of further seats; None for as long as they take.

        In a wide scope it waits for lists that may show that fewer entries are to be written back.
        """
        if not tally.is_covered:
            return None
        if not self._scope.is_wide or not self._lists.may_rise(_acknowledged(self.metadata, tally)):
            return 0.0
        return None if any(seat < len(self._ensemble) for seat in waiting) else GRACE_S

    def _before(self, tally: FenceTally) -> int:
        """Return the entry behind which the search begins, and what it finds is written back."""
        acknowledged = _acknowledged(self.metadata, tally)
        return self._lists.before(acknowledged) if self._scope.is_wide else acknowledged

    async def _length_at(self, lac: int) -> int:
        """Return the ledger's payload bytes up to an entry, which contains that length.

        The metadata have the length below the last fragment. The bookies of earlier fragments may be lost.
        """
        if lac < self.metadata.last_fragment.first_entry:
            return self.metadata.length_before
        wanted = class_ranges(self.metadata, lac, lac)[0]
        holders = self._lists.holders_behind(lac) if self._scope.is_wide else ()
        if holders:
            wanted = class_ranges(self.metadata, lac + 1, lac + 1)[0]._replace(bookies=holders, former=())
        reader = EntryReader(
            self._context,
            lambda: self.metadata,
            self._digest,
            on_statement=lambda _: None,
            refresh=None,
            asked_last=self._unfenced,
        )
        try:
            blocks = await reader.blocks(wanted)
        except BookKeeperError as error:
            raise LedgerRecoveryError(
                f"ledger {self.metadata.ledger_id}: its entry {wanted.first} cannot be read: {error}",
                ledger_id=self.metadata.ledger_id,
                entry_id=wanted.first,
            ) from error
        return int(blocks[0].running[0]) - (int(blocks[0].lengths[0]) if holders else 0)

    # --- (c) recovery reads ---

    async def _search(self, replication: Replication[None], first_entry: int, lac: int) -> int:
        search = EntrySearch(*self._scope.sizes, first_entry, lac=lac)

        def has_room() -> bool:
            return replication.window.bytes_held <= self._config.max_in_flight_bytes

        while True:
            if self._failure is not None:
                raise self._failure
            match search.step():
                case Found(_, payload):
                    await self._seat(replication)
                    await self._written_until(replication, has_room)
                    self._write_back(replication, payload)
                case End(last_entry):
                    return last_entry
                case Inconclusive(entry_id, seats):
                    raise self._inconclusive(entry_id, seats)
                case None:
                    ask, outcome = await self._events.get()
                    if isinstance(outcome, LedgerFencedError):
                        raise fenced_by_term(self.metadata.ledger_id, outcome)
                    if isinstance(outcome, BookKeeperError):
                        key = ("recovery read", outcome.bookie_id, type(outcome))
                        what = "ledger=%d recovery read: %s"
                        self._context.reports.warn(logger, key, what, self.metadata.ledger_id, outcome)
                        search.error(ask)
                    else:
                        blocks, answer = outcome
                        stop = self._scope.believed(self._scope.bookies[ask.seat], Stop(answer.stop))
                        search.answer(ask, blocks, stop, answer.stop_entry)
                case asks:
                    for ask in asks:
                        task = asyncio.create_task(self._read(ask))
                        self._reads.add(task)
                        task.add_done_callback(partial(self._has_read, ask))

    async def _read(self, ask: Ask) -> None:
        bookie_id = self._scope.bookies[ask.seat]
        read = recovery_read(self.metadata, ask, self._config.read_ahead_bytes)
        wanted = ClassRange(
            read.ledger_id, read.content_term, read.first, read.last, read.stride, (bookie_id,)
        )
        try:
            answer, body = await self._context.pool.ask(
                bookie_id,
                read,
                ReadAnswer,
                timeout_s=self._config.read_timeout_s,
                ledger_id=wanted.ledger_id,
                auth=self._digest.token(bookie_id),
            )
            # An entry with a wrong digest counts neither for the entry nor against it.
            self._events.put_nowait((ask, checked_blocks(wanted, answer, body, self._digest)))
        except BookKeeperError as error:
            self._events.put_nowait((ask, error))

    def _has_read(self, ask: Ask, task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        if task.cancelled():
            # Maybe before it began. `_search` must not wait for this one.
            self._events.put_nowait((ask, cut_off(self._scope.bookies[ask.seat])))

    def _inconclusive(self, entry_id: int, seats: list[int]) -> LedgerRecoveryError:
        names = ", ".join(self._scope.bookies[seat] for seat in seats)
        return LedgerRecoveryError(
            f"whether ledger {self.metadata.ledger_id} has an entry {entry_id} cannot be decided without "
            f"{names}. Run recovery again when they are back",
            ledger_id=self.metadata.ledger_id,
            entry_id=entry_id,
        )

    # --- (c, d) writing back ---

    def _start_writing(self, before: int, tally: FenceTally, length: int) -> Replication[None]:
        metadata = self.metadata
        _, write_quorum, ack_quorum = self._sizes
        self._replication = replication = Replication(
            self._context,
            metadata,
            self._digest,
            self,
            term=recovery_term(metadata),
            flags=AddFlag.RECOVERY,
            # Each write-back reaches all of its write set before the close (rules 11 and 12c).
            ack_quorum=write_quorum if self._is_whole else ack_quorum,
            next_entry=before + 1,
            length=length,
            # Rule 12c: frozen. An advancing LAC would let a tailing reader see an entry that a concurrent
            # recovery then cuts off.
            stated_lac=tally.lac,
            stated_lafr=tally.lafr if metadata.guaranteed_write_quorum else NO_ENTRY,
        )
        return replication

    async def _seat(self, replication: Replication[None]) -> None:
        """Seat the ensemble before the first write-back. A bookie that was fenced is connected.

        A bookie that is not connected soon after the others counts as failed. The change that replaces it
        stays in memory (rule 12d). Without another bookie it is connected again.
        """
        if not self._has_seats:
            self._has_seats = True
            # Every write set is fenced, so enough bookies to write back to are connected.
            connections = await self._context.pool.get_all(self._ensemble, grace_s=GRACE_S)
            replication.replicator.seat(self._ensemble, connections)

    def _write_back(self, replication: Replication[None], payload: bytes) -> None:
        replication.window.add(payload, None)
        replication.replicator.schedule_flush()
        replication.replace_failed()

    async def _written_until(self, replication: Replication[None], is_enough: Callable[[], bool]) -> None:
        while not is_enough() and self._failure is None:
            replication.replace_failed()
            self._written.clear()
            await self._written.wait()
        if self._failure is not None:
            raise self._failure

    # --- the owner of the replication ---

    async def _write_change(self, change: EnsembleChange) -> bool:
        """Note an ensemble change; the closing compare-and-set writes it (rule 12d)."""
        self.fragments = with_ensemble(self.fragments, change.first_entry, change.bookies)
        return True

    def _needs_bookies(self) -> bool:
        # Not when the window is idle: a dead bookie need not be replaced just to close the ledger.
        return self._replication is not None and not self._replication.window.is_idle

    def _on_reported(self, groups: list[AddGroup[None]]) -> None:
        self._written.set()

    def _on_reseated(self) -> None:
        """Do nothing: a recovery publishes no LAC."""

    def _fail(self, error: BookKeeperError) -> None:
        if self._failure is None:
            if isinstance(error, NotEnoughBookiesError):
                advice = "Run it again when they are back"
                if self._is_whole:
                    advice += ", or with at_ack_quorum to close the ledger with Qa copies of some entries"
                error = LedgerRecoveryError(
                    f"recovery cannot write back: {error}. {advice}", ledger_id=self.metadata.ledger_id
                )
            self._failure = error
            self._written.set()
