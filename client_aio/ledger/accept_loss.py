"""Closing a ledger whose end cannot be decided, because bookies are lost for good: a way on after a loss.

An ordinary recovery (rule 12) fails where the bookies that answer cannot prove the end: one that is lost may
hold the next entry. This one closes the ledger behind the last entry that can be read, and records in the
metadata what was given up. Readers of a log then meet a gap there, and not a silent end.

As much of rule 12 is kept as can be. The bookies that answer are fenced first. Entries are verified, and one
compare-and-set closes the ledger. Nothing is written back, since a lost ensemble has no room for it. A repair
makes the missing copies. A bookie that has a tombstone of the ledger answers that it holds nothing.

Where no bookie of the last fragment answers, the ledger stays as it is: they may come back with all entries.
Only if all of them are gone for good, it is closed in the fragment before: they do not run, and an operator
has ordered each to leave the cluster, or it has left.

One promise is not kept. A writer that still reaches bookies which this client does not reach may go on
acknowledging entries, until its next change of the metadata. These are lost as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.listing import index_from, listed
from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.core.read_plan import ClassRange, checked_blocks
from client_aio.core.recovery import LossyEnd, believed, entered, fencing_lac_read
from client_aio.ledger.futures import fenced_by_metadata
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from client_aio.ledger.recovery import recover_ledger
from client_aio.ledger.recovery_scope import (
    ask_lac,
    first_displaced,
    list_last_fragment,
    recovery_scope,
)
from metadata.access.bookies import are_gone
from metadata.errors import BookKeeperError, LedgerRecoveryError, NoSuchLedgerError
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY
from metadata.model.given_up import GivenUp

if TYPE_CHECKING:
    from collections.abc import Collection

    from bookie_aio.wire.listing import Row
    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)


async def recover_with_loss(
    context: ClientContext, ledger_id: int, digest: Digest, *, at_ack_quorum: bool = False
) -> tuple[LedgerMetadata, Version]:
    """Close a ledger as `recover_ledger` does; where that cannot decide the end, behind what can be read.

    A ledger with guaranteed write quorum is closed with Qa copies before anything is given up. Cancelling
    leaves the ledger as it was, fenced, or closed.

    Args:
        at_ack_quorum: as of `recover_ledger`; else its Qw copies are tried first.

    Raises:
        NoSuchLedgerError: there is no such ledger.
        InvalidArgumentError: the ledger is unbounded. Nothing was done.
        LedgerRecoveryError: no bookie of the last fragment answered, and not all of them are gone for good.
        MetadataUnavailableError: the metadata store did not answer in time.
    """
    try:
        return await recover_ledger(context, ledger_id, digest, at_ack_quorum=at_ack_quorum)
    except LedgerRecoveryError as error:
        held = VersionedLedgerMetadata(context, *await context.ledgers.read(ledger_id, sync=True))
        if held.current.guaranteed_write_quorum and not at_ack_quorum:
            return await recover_with_loss(context, ledger_id, digest, at_ack_quorum=True)
        logger.warning("ledger=%d is closed with a loss: %s", ledger_id, error)
    await held.update(entered)
    await close_with_loss(context, held, digest)
    return held.current, held.version


async def close_with_loss(context: ClientContext, held: VersionedLedgerMetadata, digest: Digest) -> None:
    """Close a ledger that is IN_RECOVERY behind what can be read; one that is CLOSED is left as it is.

    Raises:
        LedgerFencedError: another client has taken the unbounded ledger over. Otherwise as
            `recover_with_loss`.
    """
    ledger_id, term = held.current.ledger_id, held.current.term
    while not held.current.is_closed:
        if held.current.term != term:
            raise fenced_by_metadata(held.current)
        if await held.update((await _find_end_in_any(context, held.current, digest)).apply):
            logger.error("ledger=%d was closed with a loss: %s", ledger_id, held.current.given_up)


async def _find_end_in_any(context: ClientContext, metadata: LedgerMetadata, digest: Digest) -> LossyEnd:
    """Find the end in the last fragment; in one before it where all bookies from there on are gone for good.

    Of a ledger in pages, only fragments in the head are looked at.
    """
    fragments, lost_from, lost = metadata.fragments, ENTRY_ID_MAX, dict[str, None]()
    while True:
        part = replace(metadata, fragments=fragments)
        try:
            end = await _find_end(context, part, digest, lost_from)
            break
        except LedgerRecoveryError:
            last = fragments[-1]
            if len(fragments) == 1 or not await are_gone(context.ledgers.store, last.bookies):
                raise
        logger.warning("ledger=%d loses its entries from %d on", metadata.ledger_id, last.first_entry)
        fragments, lost_from = fragments[:-1], last.first_entry
        lost.update(dict.fromkeys(last.bookies))
    if not lost:
        return end
    if end.last_entry < fragments[-1].first_entry:
        raise LedgerRecoveryError(
            f"ledger {metadata.ledger_id} cannot be closed, even with a loss: no entry from "
            f"{fragments[-1].first_entry} on can be read",
            ledger_id=metadata.ledger_id,
        )
    names = dict.fromkeys((*lost, *end.given_up.bookies))
    # Every entry below the last fragment was acknowledged.
    lac = max(end.given_up.lac, metadata.last_fragment.first_entry - 1)
    given_up = GivenUp(lac, tuple(names), end.given_up.missing)
    return LossyEnd(metadata, end.last_entry, end.length, given_up, lost_from)


class _Holding(NamedTuple):
    """The state of one bookie of the last fragment, which is fenced there now."""

    connection: BookieConnection | None
    """None where it has a tombstone of the ledger: it has no entries, and never takes any."""
    lac: int
    rows: list[Row]


class _NoVerdict(Exception):
    """A bookie that has listed an entry says neither what it is nor that it is damaged."""

    def __init__(self, bookie_id: str) -> None:
        super().__init__(bookie_id)
        self.bookie_id = bookie_id


class _FellSilent(_NoVerdict):
    """The bookie gives no answer to a read, or cannot serve it."""


class _DoesNotKnow(_NoVerdict):
    """The bookie cannot read the entry: it may be there, and readable again later (rule 5)."""


async def _find_end(context: ClientContext, metadata: LedgerMetadata, digest: Digest, below: int) -> LossyEnd:
    """Ask the bookies for the end. Where one gives no verdict on an entry that it lists, all are asked anew.

    One that falls silent gets a moment before that, since it may restart. If it falls silent again, it is
    left out from then on. Its entries would else count as lost, though the record does not say that this
    bookie may have them. One that does not know again is asked on, since it may return other entries: a
    rotten entry would else keep the ledger from ever being closed. It is recorded.

    Args:
        below: the end is looked for below this entry.
    """
    fell_silent: Counter[str] = Counter()
    did_not_know: Counter[str] = Counter()
    while True:
        try:
            left_out = {name for name, times in fell_silent.items() if times > 1}
            doubted = {name for name, times in did_not_know.items() if times > 1}
            return await _find_end_without(context, metadata, digest, below, left_out, doubted)
        except _FellSilent as error:
            fell_silent[error.bookie_id] += 1
            if fell_silent[error.bookie_id] == 1:
                # Not until the registrations change: they first say that a bookie that restarts is gone.
                await asyncio.sleep(context.config.replacement_retry_s)
        except _DoesNotKnow as error:
            did_not_know[error.bookie_id] += 1


async def _find_end_without(
    context: ClientContext,
    metadata: LedgerMetadata,
    digest: Digest,
    below: int,
    left_out: Collection[str],
    doubted: Collection[str],
) -> LossyEnd:
    """Find the end by the bookies that are not left out.

    Args:
        doubted: bookies whose entries are passed over where they do not know them.
    """
    fragment = metadata.last_fragment
    everywhere = (await recovery_scope(context, metadata)).bookies
    asked = [name for name in everywhere if name not in left_out]
    answers = await asyncio.gather(*(_ask(context, metadata, digest, bookie_id) for bookie_id in asked))
    found = {name: each for name, each in zip(asked, answers, strict=True) if each is not None}
    holdings = {name: each for name, each in found.items() if name in fragment.bookies}
    if not holdings:
        advice = ""
        if len(metadata.fragments) > 1:
            advice = (
                ". If they are gone for good, order each to leave by `bookie-aio bookie decommission`: the "
                "ledger can then be closed in the fragment before"
            )
        raise LedgerRecoveryError(
            f"ledger {metadata.ledger_id} cannot be closed, even with a loss: none of "
            f"{', '.join(fragment.bookies)} answers{advice}",
            ledger_id=metadata.ledger_id,
        )
    reads = _Reads(context, metadata, digest, doubted)
    last_entry, length = await reads.last_readable(list(holdings.values()), below)
    may_have = [
        name
        for seat, name in enumerate(everywhere)
        if name not in found
        or name in reads.passed_over
        # Of a bookie that is not named nobody reads.
        or (name not in holdings and first_displaced(metadata, seat, found[name].rows) is not None)
    ]
    present = range(fragment.first_entry, last_entry + 1)
    marks = [listed(present, each.rows, fragment.content_term) for each in holdings.values()]
    missing = sum(not any(those) for those in zip(*marks, strict=True))
    lac = max(each.lac for each in found.values())
    return LossyEnd(metadata, last_entry, length, GivenUp(lac, tuple(may_have), missing))


async def _ask(
    context: ClientContext, metadata: LedgerMetadata, digest: Digest, bookie_id: str
) -> _Holding | None:
    """Fence the ledger at a bookie, then list its entries of the last fragment; None: it does not answer."""
    last = metadata.last_fragment
    try:
        answer = await ask_lac(context, digest, bookie_id, fencing_lac_read(metadata))
        statement = believed(answer.statement, metadata, digest)
        # After the fence: an entry that the bookie took before it is in the list.
        connection = await context.pool.get(bookie_id)
        rows, _ = await list_last_fragment(context, metadata, connection)
    except NoSuchLedgerError:
        return _Holding(None, last.first_entry - 1, [])
    except BookKeeperError as error:
        logger.warning("ledger=%d bookie=%s gives no answer: %s", metadata.ledger_id, bookie_id, error)
        return None
    lac = last.first_entry - 1 if statement is None else statement.lac
    # Entries that an earlier term left behind its end are other entries.
    return _Holding(connection, lac, [row for row in rows if row.content_term == last.content_term])


def _last_below(rows: list[Row], above: int) -> int:
    """Return the highest entry that rows list below an entry; −1 for none."""
    below = (row.entry_ids[: index_from(row.entry_ids, above)] for row in rows)
    return max((ids[-1] for ids in below if ids), default=NO_ENTRY)


class _Reads:
    """The reads of one search for the last entry that can be read.

    Attributes:
        passed_over: the doubted bookies that did not know an entry above the one that was found.
    """

    def __init__(
        self, context: ClientContext, metadata: LedgerMetadata, digest: Digest, doubted: Collection[str]
    ) -> None:
        self._context = context
        self._metadata = metadata
        self._digest = digest
        self._doubted = doubted
        self.passed_over: set[str] = set()

    async def last_readable(self, holdings: list[_Holding], above: int) -> tuple[int, int]:
        """Return the highest entry that some bookie returns intact, and the ledger's length up to it.

        Args:
            above: the entries from this one on are passed over.

        Raises:
            _NoVerdict: a bookie that lists an entry gave no verdict on it, and no other returned it.
        """
        fragment = self._metadata.last_fragment
        while True:
            last = max((_last_below(each.rows, above) for each in holdings), default=NO_ENTRY)
            if last < fragment.first_entry:
                return fragment.first_entry - 1, self._metadata.length_before
            open_question: _NoVerdict | None = None
            for each in holdings:
                if each.connection is not None and _last_below(each.rows, above) == last:
                    try:
                        length = await self._length_at(last, each.connection)
                    except _NoVerdict as error:
                        open_question = error
                        continue
                    if length is not None:
                        return last, length
            if open_question is not None:
                raise open_question
            above = last

    async def _length_at(self, entry_id: int, connection: BookieConnection) -> int | None:
        """Return the running length that an entry holds; None where this bookie does not have it intact.

        Raises:
            _NoVerdict: the bookie did not answer, or does not know whether it has the entry.
        """
        metadata, context, bookie_id = self._metadata, self._context, connection.bookie_id
        content_term = metadata.last_fragment.content_term
        wanted = ClassRange(metadata.ledger_id, content_term, entry_id, entry_id, 1, ())
        try:
            answer, body = await connection.call(
                wanted.request(context.config.read_ahead_bytes),
                ReadAnswer,
                timeout_s=context.config.read_timeout_s,
                ledger_id=metadata.ledger_id,
            )
        except BookKeeperError as error:
            # Whatever the bookie lacks for now, its files or its memory: its copy may be good.
            logger.warning("ledger=%d entry=%d: %s", metadata.ledger_id, entry_id, error)
            raise _FellSilent(bookie_id) from error
        try:
            blocks, answer = checked_blocks(wanted, answer, body, self._digest)
        except BookKeeperError as error:
            logger.warning("ledger=%d entry=%d: %s", metadata.ledger_id, entry_id, error)
            return None
        if blocks:
            return int(blocks[0].running[0])
        if answer.stop == Stop.UNKNOWN:
            what = "ledger=%d entry=%d is listed by bookie %s, which cannot read it"
            logger.warning(what, metadata.ledger_id, entry_id, bookie_id)
            if bookie_id not in self._doubted:
                raise _DoesNotKnow(bookie_id)
            self.passed_over.add(bookie_id)
        return None
