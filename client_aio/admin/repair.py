"""Repairing a ledger: copy a lost bookie's entries to a target, and name the target in its place (rule 14).

The shell around `client_aio.core.repair_plan`. It works beside live writers, recoveries and other repairs.
Copying needs no password: blocks are copied as stored, after a check of their checksums. With the password,
a repair may also store entries on a bookie that holds entries of former terms under the same ids.

Invariants (rule 14):

- A bookie is named in a fragment only after all entries that it owes there are durable on it. Entries that
  no bookie returned are excepted. They are recorded before, with the bookie whose place it takes. That bookie
  keeps its copies as long as the record is there. A repair of the new bookie in its place copies from it.
- They are read there again after that: before, nothing kept the bookie from dropping them.
- A fragment that may still change is not repaired.
- A mark of lost data is lifted only for what was verified after the bookie had named the mark (rule 4).

So a repair that is interrupted anywhere leaves the ledger as good as it was, or better. It may be run again,
and finds the entries that were copied.

Fragments are repaired one after another, oldest first. Passes over the ledger, page after page, look for them
until a pass finds no more. So memory does not grow with the ledger, except for the report.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from bookie_aio.wire.messages import (
    Add,
    AddFlag,
    Done,
    LiftMark,
    LiftMarkAnswer,
    ReadAnswer,
    Stop,
)
from client_aio.admin.replicas import list_replicas
from client_aio.bookies.connection import NO_ANSWER, list_entries
from client_aio.core.courtesy import Step
from client_aio.core.digest import Digest
from client_aio.core.read_plan import ClassRange, checked_blocks
from client_aio.core.repair_plan import (
    EntryRun,
    LostRuns,
    Part,
    complete_parts,
    first_held,
    lists_first,
    owed,
    plan,
    split,
)
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from client_aio.ledger.recovery import recover_ledger
from client_aio.unbounded.paged_fragments import hold, spans
from metadata.access.bookies import guard_of_staying
from metadata.errors import (
    BookieError,
    BookieUnavailableError,
    BookKeeperError,
    GuardChangedError,
    InvalidArgumentError,
    LedgerRepairError,
    NoSuchLedgerError,
    OperationTimeoutError,
    TooManyRequestsError,
    UnauthorizedAccessError,
)
from metadata.ids import TERM_FINAL, TERM_WRITER
from metadata.model.ledger import DIGEST_CRC, Absent, LedgerMetadata
from metadata.owned_task import for_each

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie_aio.wire.blocks import Block
    from bookie_aio.wire.listing import Row
    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from metadata.store import Guard

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PIECE_ENTRIES = 4096
_PIECES_AT_ONCE = 4
"""With a throttle it is one piece at a time: who yields to others has one request under way."""
_SLOW_S = 1.0
"""A source that fails after this time is asked in the end only: each piece would wait for it anew."""
_AWAY_S = 1.0
"""A source that cannot be reached is asked again after so long, and in the end.

Entries that no bookie gives are looked for one by one. For each of them, an attempt to connect would read the
registrations again.
"""
_THROTTLED_BYTES = 128 << 10
"""With a throttle an answer has so many bytes, so that no bookie and no disk is busy with one for long."""
_ASK_AGAIN_S = 0.05
"""The pause before a target is sent a copy again that has too many such requests."""
_LIFT_TIMEOUT_S = 120.0
"""The bookie looks up all entries that it owes of the ledger."""


@dataclass(frozen=True, slots=True)
class RepairProgress:
    """The progress of one fragment's repair; entries count once for copying and once for verifying."""

    first_entry: int
    last_entry: int
    is_verifying: bool
    entries_done: int
    entries_total: int
    bytes_copied: int


@dataclass(frozen=True, slots=True)
class RepairedFragment:
    """A fragment that was repaired: the replacement of the bookie, and how much was copied to it."""

    first_entry: int
    last_entry: int
    replacement: str
    entries_copied: int
    bytes_copied: int
    lost: tuple[EntryRun, ...] = ()
    """The entries owed that no bookie returned. They are not on the replacement."""
    unanswered: tuple[str, ...] = ()
    """The bookies that were asked for those entries and did not answer. They may hold them."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair."""

    ledger_id: int
    replaced: str
    fragments: tuple[RepairedFragment, ...]
    was_recovered: bool
    """Whether the repair recovered the ledger, and so closed it."""
    is_last_fragment_left: bool
    """Whether the last fragment still names the bookie, since the ledger is not CLOSED (rule 14)."""
    is_mark_lifted: bool = False
    """Whether the bookie was marked as having lost data of the ledger, and has all of it again (rule 4)."""
    mark_left: str = ""
    """Why the bookie, repaired in its own place, keeps such a mark; empty where it has none."""


class _Away(NamedTuple):
    """Why a source is not asked until a time of the loop."""

    until: float
    reason: str


class _TargetFailed(Exception):
    """The target of the copies failed or refused them."""

    def __init__(self, error: BookKeeperError) -> None:
        super().__init__(str(error))
        self.error = error


class Repair:
    """One repair of one ledger."""

    def __init__(
        self,
        context: ClientContext,
        ledger_id: int,
        lost: str,
        *,
        by: str | None,
        recover_after_s: float | None,
        password: bytes,
        on_progress: Callable[[RepairProgress], None],
        throttle: Callable[[Step], Awaitable[None]] | None = None,
        preferred: str = "",
        only: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            only: the first entry of the one fragment to repair; None for all.
            preferred: the bookie to copy to where it is in none of the seats, and can be had; "" for any.
            throttle: awaited after each step, before the next one. With it, steps are taken one by one. It
                bounds the bytes per second that are read from the sources and from the target.
        """
        self._context = context
        self._throttle = throttle
        self._preferred = preferred
        self._only = only
        self._ledger_id = ledger_id
        self._lost = lost
        self._by = by
        self._recover_after_s = recover_after_s
        self._password = password
        self._digest: Digest | None = None
        self._on_progress = on_progress
        self._unfit: set[str] = set()
        self._fragments: dict[int, RepairedFragment] = {}
        self._failed: dict[int, LedgerRepairError] = {}  # fragments that cannot be repaired
        self._following = 0  # Fragments that begin below it need no repair in this pass.
        self._was_recovered = False
        self._mark: int | None = None  # of the bookie that is repaired in its own place; 0: it has none

    async def run(self) -> RepairReport:
        """Repair all fragments that can be repaired; see `Client.repair_ledger`.

        Raises:
            LedgerRepairError: a fragment cannot be repaired. It is raised when the others have been.
        """
        if self._password:
            await self._unlock()
        while True:
            metadata, _ = await self._context.ledgers.read(self._ledger_id)
            if metadata.is_unbounded and self._recover_after_s is not None:
                raise InvalidArgumentError(
                    f"ledger {self._ledger_id} is unbounded: nobody recovers it. A takeover by "
                    "open_unbounded_ledger leaves its last fragment to be repaired like any other",
                    ledger_id=self._ledger_id,
                )
            metadata, part = await self._next(metadata)
            is_last_left = plan(metadata, self._lost).is_last_left
            if part is not None:
                try:
                    await self._repair_part(metadata, part)
                except LedgerRepairError as error:
                    # The others may be repaired all the same: nothing may ever be had of this one.
                    if not await self._is_trimmed(part):
                        self._failed[part.first_entry] = error
            elif is_last_left and self._recover_after_s is not None:
                await self._recover(metadata, self._recover_after_s)
            elif self._following:
                self._following = 0  # Others may have named the bookie in further fragments meanwhile.
            else:
                break
        if self._failed:
            raise next(iter(self._failed.values()))
        await self._note_whole(metadata)
        is_mark_lifted, mark_left = await self._lift_mark()
        return RepairReport(
            self._ledger_id,
            self._lost,
            tuple(self._fragments[first_entry] for first_entry in sorted(self._fragments)),
            self._was_recovered,
            is_last_left,
            is_mark_lifted,
            mark_left,
        )

    async def _note_whole(self, metadata: LedgerMetadata) -> None:
        """Take the record of missing copies out of the metadata if every bookie lists all that it owes.

        A ledger with guaranteed write quorum has that record if it was closed at its ack quorum (rule 11).
        """
        if metadata.below_write_quorum_from is None:
            return
        replicas = await list_replicas(self._context, self._ledger_id)
        if any(replica.entries_missing != 0 for replica in replicas):
            return
        held = VersionedLedgerMetadata(
            self._context, *await self._context.ledgers.read(self._ledger_id, sync=True)
        )
        await held.update(lambda now: None if now.fragments != metadata.fragments else now.fully_replicated())

    async def _lift_mark(self) -> tuple[bool, str]:
        """Have the bookie lift the mark that it had before; return whether it did, and why not."""
        if not self._mark or self._only is not None:
            return False, ""  # The damage may lie in another fragment.
        lost = sum(run.entries for fragment in self._fragments.values() for run in fragment.lost)
        if lost:
            # Rule 4: without the mark the bookie would deny entries that it may have held.
            return False, f"{lost:,} of the entries that it owes can be had from no bookie"
        try:
            left = await self._call_for_mark(await self._context.pool.get(self._lost), self._mark)
        except BookKeeperError as error:
            return False, str(error)
        return not left, "the bookie has found more damage meanwhile: run the repair again" if left else ""

    async def _call_for_mark(self, connection: BookieConnection, mark: int) -> int:
        answer, _ = await connection.call(
            LiftMark(self._ledger_id, mark),
            LiftMarkAnswer,
            timeout_s=_LIFT_TIMEOUT_S,
            ledger_id=self._ledger_id,
        )
        return answer.mark

    async def _unlock(self) -> None:
        metadata, _ = await self._context.ledgers.read(self._ledger_id)
        if metadata.password is not None:
            try:
                self._digest = await self._context.unlock(metadata, self._password)
            except UnauthorizedAccessError as error:  # Most copying needs no password; recovery raises this.
                logger.warning("ledger=%d is repaired without its password: %s", self._ledger_id, error)

    async def _next(self, metadata: LedgerMetadata) -> tuple[LedgerMetadata, Part | None]:
        """Return the metadata as last read, and the next fragment to repair; None for no more."""
        async with aclosing(spans(self._context, metadata, self._following)) as found:
            async for span in found:
                metadata = span.metadata
                for part in complete_parts(span.fragments, span.last_entry):
                    if self._only is not None and part.first_entry != self._only:
                        continue
                    # A bookie that is repaired in its own place stays named.
                    is_done = part.first_entry in self._fragments or part.first_entry in self._failed
                    if self._lost in part.bookies and not is_done:
                        return metadata, part
        return metadata, None

    async def _repair_part(self, metadata: LedgerMetadata, part: Part) -> None:
        """Repair one fragment; return early where it needs another plan or another target."""
        connection = await self._target(metadata, part)
        target = connection.bookie_id
        token = self._digest.token(target) if self._digest is not None else None
        if target == self._lost and self._mark is None:
            # Before the first entry is verified: damage found after it gets a mark of its own.
            self._mark = await self._call_for_mark(connection, 0)
        copier = _Copier(
            self._context, metadata, part, self._lost, connection, token, self._on_progress, self._throttle
        )
        try:
            await copier.copy()
        except _TargetFailed as failure:
            if self._by is not None:
                raise failure.error from failure
            logger.warning("ledger=%d repair looks for another bookie: %s", self._ledger_id, failure.error)
            self._unfit.add(target)
            return
        if copier.lost and await self._is_trimmed(part):
            return  # No bookie owes these entries any more.
        if target != self._lost:
            guard = await guard_of_staying(self._context.ledgers.store, target)
            if guard is None:
                if self._by is not None:
                    raise self._left(target)
                self._unfit.add(target)
                return
            absent = self._absent(part, copier)
            try:
                if not await self._name(part, target, absent, guard):
                    return  # Another client changed the fragment: it needs another plan.
            except GuardChangedError:
                return  # An operator has given an order, perhaps to the target.
        lost_before = copier.lost.entries
        try:
            await copier.verify()
        except _TargetFailed as failure:
            raise failure.error from failure
        if copier.lost.entries > lost_before:
            if await self._is_trimmed(part):
                return
            if target != self._lost and (absent := self._absent(part, copier)) is not None:
                noted = absent
                held = hold(self._context, *await self._context.ledgers.read(self._ledger_id))
                await held.update(lambda now: now.with_absent(noted))
        await self._forget_absent(part, target, copier)
        self._fragments[part.first_entry] = copier.result()
        self._following = part.first_entry + 1
        logger.info(
            "ledger=%d fragment=%d bookie=%s repaired by=%s entries=%d bytes=%d",
            self._ledger_id, part.first_entry, self._lost, target,
            copier.entries_copied, copier.bytes_copied,
        )  # fmt: skip

    def _absent(self, part: Part, copier: _Copier) -> Absent | None:
        """Return the record that the lost bookie may hold what was found nowhere; None for no record."""
        if not copier.lost:
            return None
        absent = Absent(part.first_entry, part.bookies.index(self._lost), self._lost, copier.lost.entries)
        logger.error(
            "ledger=%d fragment=%d bookie=%s: no bookie returned %d of the entries that it owes, such as %d",
            self._ledger_id, part.first_entry, self._lost, absent.entries, copier.lost.runs()[0].first,
        )  # fmt: skip
        # One that has denied them does not hold them, and need not stay for them.
        return absent if self._lost in copier.withholding else None

    async def _forget_absent(self, part: Part, target: str, copier: _Copier) -> None:
        """Remove the records of a seat: all where nothing is lost, else those of bookies that deny it."""
        kept = copier.withholding if copier.lost else ()
        seat = part.bookies.index(self._lost)

        def without(now: LedgerMetadata, bookies: Sequence[str]) -> LedgerMetadata | None:
            # Another repair may have given the seat away since. Its records are of the seat's next bookie.
            return now.without_absent(part.first_entry, seat, kept) if bookies[seat] == target else None

        held = hold(self._context, *await self._context.ledgers.read(self._ledger_id))
        await held.update_with(part.first_entry, without)

    async def _name(self, part: Part, target: str, absent: Absent | None, guard: Guard) -> bool:
        """Put the target in the lost bookie's place; return False where the fragment has changed.

        The record of what the lost bookie may hold is written with it: until then that bookie has a seat.
        """
        held = hold(self._context, *await self._context.ledgers.read(self._ledger_id))
        return await held.replace_bookie(part, self._lost, target, absent, guard)

    async def _is_trimmed(self, part: Part) -> bool:
        """Return whether the fragment has been trimmed, so that no bookie owes its entries."""
        metadata, _ = await self._context.ledgers.read(self._ledger_id, sync=True)
        return part.first_entry < metadata.first_entry

    def _left(self, target: str) -> LedgerRepairError:
        return LedgerRepairError(
            f"bookie {target} was ordered to leave the cluster while it got entries of ledger "
            f"{self._ledger_id}: run the repair again, also for {target}",
            ledger_id=self._ledger_id,
            bookie_id=target,
        )

    async def _target(self, metadata: LedgerMetadata, part: Part) -> BookieConnection:
        if self._by is None:
            preferred = self._context.pool.directory.available.get(self._preferred)
            is_fit = self._preferred not in {*part.bookies, *self._unfit}
            if preferred is not None and preferred.is_writable and is_fit:
                try:
                    return await self._context.pool.get(self._preferred)
                except BookKeeperError as error:
                    logger.warning("ledger=%d %s: %s", self._ledger_id, self._preferred, error)
            seat = part.bookies.index(self._lost)
            found = await self._context.finder.replace(
                metadata, part.bookies, 1 << seat, excluded={self._lost, *self._unfit}
            )
            connection = found.connections[found.bookies[seat]]
            assert not isinstance(connection, BookKeeperError)
            return connection
        if self._by != self._lost and self._by in part.bookies:
            raise InvalidArgumentError(
                f"bookie {self._by} is in the fragment of ledger {self._ledger_id} at entry "
                f"{part.first_entry} already, so it cannot replace {self._lost} there",
                ledger_id=self._ledger_id,
                bookie_id=self._by,
            )
        return await self._context.pool.get(self._by)

    async def _recover(self, metadata: LedgerMetadata, after_s: float) -> None:
        """Close the ledger, unless its writer has replaced the bookie by itself in the meantime."""
        # Fencing a ledger that has a password needs the password.
        digest = self._digest or await self._context.unlock(metadata, self._password)
        await asyncio.sleep(after_s)
        now, _ = await self._context.ledgers.read(self._ledger_id)
        if now.last_fragment == metadata.last_fragment and not now.is_closed:
            only = metadata.last_fragment
            found, _ = await recover_ledger(self._context, self._ledger_id, digest, only=only)
            self._was_recovered = found.is_closed


class _Copier:
    """Copies a bookie's entries of one fragment to the target, and reads them there again."""

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        part: Part,
        lost: str,
        target: BookieConnection,
        token: bytes | None,
        on_progress: Callable[[RepairProgress], None],
        throttle: Callable[[Step], Awaitable[None]] | None,
    ) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._throttle = throttle
        self._token = token
        self._config = context.config
        self._ledger_id = metadata.ledger_id
        self._part = part
        self._lost = lost
        self._target = target
        self._on_progress = on_progress
        self._pieces = list(owed(metadata, part, lost, _PIECE_ENTRIES))
        self._entries_total = sum(piece.entries for piece in self._pieces)
        self._entries_done = 0
        self.entries_copied = 0
        self.bytes_copied = 0
        self.lost = LostRuns()
        self._former = metadata.former_bookies(part.first_entry)
        self.withholding: set[str] = set()
        """The bookies that may hold entries found nowhere: asked for them, they did not deny them."""

        self._unanswered: set[str] = set()
        self._has_heard = False  # from a bookie that was asked for entries
        self._has_stored = False  # the target knows what it has to know of the ledger
        self._away: dict[str, _Away] = {}  # sources that did not answer
        # The final term fences former writers at a target that never heard of the ledger's end. Fencing a
        # ledger that has a password needs its token.
        can_fence = metadata.is_closed and (metadata.digest == DIGEST_CRC or token is not None)
        self._add = Add(metadata.ledger_id, TERM_FINAL if can_fence else TERM_WRITER, int(AddFlag.REPAIR))

    def result(self) -> RepairedFragment:
        """Return the fragment's part of the report."""
        part = self._part
        return RepairedFragment(
            part.first_entry, part.last_entry, self._target.bookie_id, self.entries_copied, self.bytes_copied,
            tuple(self.lost.runs()), tuple(sorted(self._unanswered)) if self.lost else (),
        )  # fmt: skip

    async def copy(self) -> None:
        """Copy the entries that the target lacks.

        On return all entries owed are durable and readable there, but for those in `lost`.

        Raises:
            _TargetFailed: the target failed or refused.
            LedgerRepairError: no bookie returned any entry, and one of the fragment, or every one that was
                asked, did not answer. Then the fault may lie with this client's network.
        """
        await self._for_each_piece(self._copy_piece, is_verifying=False)
        if self.lost and await self._is_one_back():
            await self._copy_lost()
        unanswered = self._unanswered.intersection(self._part.bookies) - {self._lost}
        is_alone = bool(self._unanswered) and not self._has_heard
        if self.lost.entries == self._entries_total and (unanswered or is_alone):
            raise LedgerRepairError(
                f"none of the {self._entries_total:,} entries that {self._lost} owes of ledger "
                f"{self._ledger_id} can be had; {', '.join(sorted(self._unanswered))} did not answer. Run "
                "the repair again when they are back",
                ledger_id=self._ledger_id,
            )

    async def _is_one_back(self) -> bool:
        """Return whether a bookie answers now that did not answer before."""

        async def answers(bookie_id: str) -> bool:
            part, timeout_s = self._part, self._config.read_timeout_s
            try:
                connection = await self._context.pool.get(bookie_id)
                await list_entries(connection, self._ledger_id, part.first_entry, part.first_entry, timeout_s)
            except BookKeeperError:
                return False
            return True

        return any(await asyncio.gather(*map(answers, self._away)))

    async def _copy_lost(self) -> None:
        """Look once more for the entries that were found nowhere."""
        lost, self.lost = self.lost, LostRuns()
        self._away.clear()
        self._unanswered.clear()
        self.withholding.clear()
        again = [run for piece in self._pieces for run in lost.within(piece)]
        await for_each(again, self._copy_run, _PIECES_AT_ONCE if self._throttle is None else 1)

    async def verify(self) -> None:
        """Read all entries at the target, and copy those that cannot be read once more."""
        # A list has the bookie look at the metadata anew before it evicts the ledger (rule 15).
        part = self._part
        await self._ask_target(
            list_entries(
                self._target, self._ledger_id, part.first_entry, part.first_entry, self._config.read_timeout_s
            )
        )
        await self._for_each_piece(self._read_again, is_verifying=True)

    async def _for_each_piece(
        self, work: Callable[[ClassRange], Awaitable[None]], *, is_verifying: bool
    ) -> None:
        self._entries_done = 0

        async def work_and_report(piece: ClassRange) -> None:
            await work(piece)
            self._entries_done += piece.entries
            self._on_progress(
                RepairProgress(
                    self._part.first_entry, self._part.last_entry, is_verifying,
                    self._entries_done, self._entries_total, self.bytes_copied,
                )
            )  # fmt: skip

        await for_each(self._pieces, work_and_report, _PIECES_AT_ONCE if self._throttle is None else 1)

    async def _copy_piece(self, piece: ClassRange) -> None:
        rows, _ = await self._ask_target(
            list_entries(self._target, self._ledger_id, piece.first, piece.last, self._config.read_timeout_s)
        )
        lacking, there = split(piece, rows)
        for run in lacking:
            await self._copy_run(run)
        for run in there:
            await self._read_again(run)

    async def _copy_run(self, run: ClassRange) -> None:
        rest: ClassRange | None = run
        again_at = -1
        while rest is not None:
            blocks, failures = await self._from_source(rest)
            if not blocks:
                listings = await self._list_sources(rest)
                if rest.first != again_at and lists_first(rest, listings):
                    again_at = rest.first  # Its bookie did not answer for a moment, and does so now.
                else:
                    rest = self._pass_over(rest, listings, failures)
                continue
            began = self._loop.time()
            # Without a token the target asks the metadata store, for few requests at once.
            first = 0 if self._has_stored or self._token is not None else 1
            for block in blocks[:first]:
                await self._ask_target(self._store_when_it_may(block))
            await self._ask_target(asyncio.gather(*map(self._store_when_it_may, blocks[first:])))
            if self._throttle is not None:
                await self._throttle(Step(0, self._loop.time() - began, is_write=True))
            rest = rest.after(blocks[-1].last_entry)

    async def _list_sources(self, rest: ClassRange) -> list[list[Row]]:
        """Return what the bookies list that may hold a range. Those that do not answer are withholding."""
        listings: list[list[Row]] = []
        for bookie_id in self._sources(rest):
            try:
                rows, _ = await list_entries(
                    await self._source(bookie_id),
                    self._ledger_id,
                    rest.first,
                    rest.last,
                    self._config.read_timeout_s,
                )
                listings.append(rows)
            except BookKeeperError:
                self.withholding.add(bookie_id)
        return listings

    def _pass_over(
        self, rest: ClassRange, listings: list[list[Row]], failures: list[str]
    ) -> ClassRange | None:
        """Note as lost the first entry of a range, and those behind it that no bookie lists."""
        following = first_held(rest, listings)
        if self.lost.add(rest, following):
            logger.warning(
                "ledger=%d entry=%d can be had from no bookie: %s",
                self._ledger_id, rest.first, "; ".join(failures),
            )  # fmt: skip
        return None if following is None else rest._replace(first=following)

    async def _store_when_it_may(self, block: Block) -> None:
        """Store a block, again and again while too many requests wait at the target, for `add_timeout_s`."""
        until = self._loop.time() + self._config.add_timeout_s
        while True:
            try:
                await self._store(block)
            except TooManyRequestsError:
                if self._loop.time() >= until:
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                self._has_stored = True
                return

    async def _store(self, block: Block) -> None:
        data = block.whole(0, block.count)
        await self._target.call(
            self._add,
            Done,
            body=data,
            timeout_s=self._config.add_timeout_s,
            ledger_id=self._ledger_id,
            auth=self._token,
        )
        self.entries_copied += block.count
        self.bytes_copied += block.payload_bytes

    async def _read_again(self, run: ClassRange) -> None:
        """Read the target's entries; copy those that it does not return, once."""
        rest: ClassRange | None = run
        is_mended = False
        while rest is not None:
            blocks, answer = await self._ask_target(self._read(self._target, rest))
            if blocks:
                rest = rest.after(blocks[-1].last_entry)
            if rest is None or answer.stop in (Stop.END, Stop.BUDGET):
                continue
            lost_upto = self.lost.upto(rest)
            if lost_upto is not None:
                rest = rest.after(lost_upto)
                continue
            if is_mended:
                raise LedgerRepairError(
                    f"bookie {self._target.bookie_id} does not give entry {rest.first} of ledger "
                    f"{self._ledger_id} although it took it: {Stop(answer.stop).name}",
                    ledger_id=self._ledger_id,
                    entry_id=rest.first,
                    bookie_id=self._target.bookie_id,
                )
            # All that is left: more of it may be damaged.
            await self._copy_run(rest)
            is_mended = True

    def _sources(self, wanted: ClassRange) -> list[str]:
        """Return the bookies that may hold a range; the lost bookie and former ones are asked last."""
        quarantined = self._context.pool.directory.quarantined()
        order = [*sorted(wanted.bookies, key=quarantined.__contains__), self._lost, *self._former]
        return [name for name in dict.fromkeys(order) if name != self._target.bookie_id]

    async def _source(self, bookie_id: str) -> BookieConnection:
        away = self._away.get(bookie_id)
        if away is not None and self._loop.time() < away.until:
            raise BookieUnavailableError(away.reason, bookie_id=bookie_id)
        try:
            return await self._context.pool.get(bookie_id)
        except BookieUnavailableError as error:
            self._away[bookie_id] = _Away(self._loop.time() + _AWAY_S, str(error))
            raise

    async def _from_source(self, wanted: ClassRange) -> tuple[list[Block], list[str]]:
        """Read the beginning of a range from any bookie; [] where none returns its first entry.

        Returns also why each bookie asked before did not return it.
        """
        failures: list[str] = []
        withholding: set[str] = set()
        for bookie_id in self._sources(wanted):
            asked = self._loop.time()
            try:
                blocks, answer = await self._read(await self._source(bookie_id), wanted)
            except BookKeeperError as error:
                if isinstance(error, OperationTimeoutError):
                    self._context.pool.directory.note_failure(bookie_id)
                if isinstance(error, NO_ANSWER):
                    self._unanswered.add(bookie_id)
                    if self._loop.time() - asked > _SLOW_S:
                        self._away[bookie_id] = _Away(math.inf, f"bookie {bookie_id} did not answer")
                else:
                    self._has_heard = True
                failures.append(f"{bookie_id}: {error}")
                if not isinstance(error, NoSuchLedgerError):
                    withholding.add(bookie_id)
                continue
            self._has_heard = True
            if blocks:
                return blocks, failures
            failures.append(f"{bookie_id}: {Stop(answer.stop).name}")
            if answer.stop != Stop.NO_SUCH_ENTRY:
                withholding.add(bookie_id)
        self.withholding |= withholding
        return [], failures

    async def _read(self, connection: BookieConnection, wanted: ClassRange) -> tuple[list[Block], ReadAnswer]:
        began = self._loop.time()
        budget = self._config.read_ahead_bytes
        if self._throttle is not None:
            budget = min(budget, _THROTTLED_BYTES)
        answer, body = await connection.call(
            wanted.request(budget),
            ReadAnswer,
            timeout_s=self._config.read_timeout_s,
            ledger_id=wanted.ledger_id,
        )
        # Without a password only the checksums can be checked.
        blocks, answer = checked_blocks(wanted, answer, body, Digest(wanted.ledger_id))
        if self._throttle is not None:
            await self._throttle(Step(len(body), self._loop.time() - began, is_write=False))
        return blocks, answer

    async def _ask_target(self, asking: Awaitable[Answer]) -> Answer:
        try:
            return await asking
        except (BookieError, OperationTimeoutError) as error:
            self._context.pool.directory.note_failure(self._target.bookie_id)
            raise _TargetFailed(error) from error
        except NoSuchLedgerError as error:
            # Only the metadata store knows whether the ledger exists; it is asked next.
            refused = LedgerRepairError(
                f"bookie {self._target.bookie_id} refuses copies: {error}",
                ledger_id=self._ledger_id,
                bookie_id=self._target.bookie_id,
            )
            raise _TargetFailed(refused) from error
