"""Which bookies a recovery asks: those of the last fragment, or after a set-back of the metadata, any bookie.

In a store that was set back to an older copy, the last fragment may name bookies that the writer has replaced
since. They deny what the others acknowledged, and they tell the truth. So while an event of a set-back covers
a ledger (rule 15), its recovery counts every bookie of the cluster as one of the write set of every entry:
N bookies, Qw = N. The arithmetic of rule 12 then holds for any ensemble that the writer may have had. Fewer
than Qa bookies without an answer leave no ack quorum unfenced, and fewer than Qa that do not deny an entry
leave no ack quorum for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

from bookie_aio.wire.listing import index_from
from bookie_aio.wire.messages import ReadLacAnswer, Stop
from client_aio.bookies.connection import list_entries
from client_aio.core.quorum import write_set
from client_aio.core.recovery import FenceTally
from metadata.access.bookies import AgeRecord, SetBacks, registered_bookies, unanswered_below
from metadata.errors import MetadataCorruptError, NoSuchKeyError
from metadata.ids import ENTRY_ID_MAX, KEY_AVAILABLE, KEY_RETIRED, KEY_SET_BACKS, age_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from bookie_aio.wire.listing import Row
    from bookie_aio.wire.messages import ReadLac
    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.access.bookies import SetBack
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import MetadataStore


@dataclass(frozen=True, slots=True)
class RecoveryScope:
    """The bookies that a recovery asks, those of the last fragment first, and the sizes to count with.

    `is_wide`: the metadata may be older than the ledger's last ensemble change.
    `unjudged`: these may not know yet that they were set back themselves. What they lack counts as lost.
    """

    bookies: tuple[str, ...]
    sizes: tuple[int, int, int]
    is_wide: bool = False
    unjudged: frozenset[str] = frozenset()

    def believed(self, bookie_id: str, stop: Stop) -> Stop:
        """Return why a bookie's answer to a read ends, as far as that is believed."""
        is_doubted = stop is Stop.NO_SUCH_ENTRY and bookie_id in self.unjudged
        return Stop.UNKNOWN if is_doubted else stop

    @classmethod
    def of(cls, metadata: LedgerMetadata, others: Iterable[str] = ()) -> RecoveryScope:
        """Return the scope of metadata that are up to date, or with others that may hold entries as well."""
        named = metadata.last_fragment.bookies
        bookies = (*named, *sorted(set(others) - set(named)))
        if len(bookies) == len(named):
            return cls(named, (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum))
        return cls(bookies, (len(bookies), len(bookies), metadata.ack_quorum), is_wide=True)


async def recovery_scope(context: ClientContext, metadata: LedgerMetadata) -> RecoveryScope:
    """Return which bookies to ask.

    A bookie that an operator answered for is asked while it runs. One that does not run is left out: what it
    holds was accepted as lost. So is one that has left the cluster: it does not start any more.

    Raises:
        MetadataUnavailableError: the metadata store did not answer in time.
    """
    store = context.ledgers.store
    await store.sync(KEY_SET_BACKS)
    events = [one for one in (await SetBacks.read(store)).events if metadata.ledger_id < one.raised_to]
    if not events:
        return RecoveryScope.of(metadata)
    # The copy may lack the cookies of bookies that came later: registrations and events name those.
    running = set(await store.children(KEY_AVAILABLE))
    names = {*await registered_bookies(store), *(name for event in events for name in event.ages)}
    names -= set(await store.children(KEY_RETIRED))
    doubted = {name for name in names if unanswered_below(events, name) > metadata.ledger_id}
    scope = RecoveryScope.of(metadata, running | doubted)
    return replace(scope, unjudged=await unjudged(store, events, scope.bookies))


async def unjudged(store: MetadataStore, events: Sequence[SetBack], bookies: Sequence[str]) -> frozenset[str]:
    """Return the bookies that may not know yet that they were set back themselves."""
    doubts = await asyncio.gather(*(_is_unjudged(store, events, one) for one in bookies))
    return frozenset(compress(bookies, doubts))


async def _is_unjudged(store: MetadataStore, events: Sequence[SetBack], bookie: str) -> bool:
    """Return whether the bookie's age in the store is below one that an event tells of.

    Its directories were set back with the store, or it has not noticed yet that the store was. A bookie that
    judges the event raises its age above all of these, and what it may have lost has a mark then.
    """
    ages = [event.ages[bookie] for event in events if bookie in event.ages]
    if not ages:
        return False
    try:
        stored = AgeRecord.from_json((await store.read(age_key(bookie))).value)
    except (NoSuchKeyError, MetadataCorruptError):
        return True
    return any(stored.is_behind(token, number) for token, number in ages)


async def ask_lac(context: ClientContext, digest: Digest, bookie_id: str, request: ReadLac) -> ReadLacAnswer:
    """Send a LAC read to a bookie, connecting where that is needed; it may fence.

    Raises:
        BookKeeperError: the bookie's failure.
    """
    answer, _ = await context.pool.ask(
        bookie_id,
        request,
        ReadLacAnswer,
        timeout_s=context.config.read_timeout_s,
        ledger_id=request.ledger_id,
        auth=digest.token(bookie_id),
    )
    return answer


async def list_last_fragment(
    context: ClientContext, metadata: LedgerMetadata, connection: BookieConnection
) -> tuple[list[Row], bool]:
    """Ask a bookie what it has from the last fragment on, and whether it lost data of the ledger.

    Raises:
        BookKeeperError: the bookie's failure.
    """
    first_entry, timeout_s = metadata.last_fragment.first_entry, context.config.read_timeout_s
    return await list_entries(connection, metadata.ledger_id, first_entry, ENTRY_ID_MAX, timeout_s)


def first_displaced(metadata: LedgerMetadata, seat: int, rows: Iterable[Row]) -> int | None:
    """Return the first entry of the last fragment that a bookie lists and should not have; None for none.

    From such an entry on the metadata may name the wrong bookies.

    Args:
        metadata: the ledger's.
        seat: the bookie's index in the last fragment; any higher number if it is not named there.
        rows: what the bookie lists.
    """
    fragment, size = metadata.last_fragment, metadata.ensemble_size
    found: list[int] = []
    for row in rows:
        if row.content_term >= fragment.content_term:
            skipped = index_from(row.entry_ids, fragment.first_entry)
            # So many entries of a row meet every write set that it has entries of.
            found += row.entry_ids[skipped : skipped + size]
    displaced = (each for each in found if seat not in write_set(each % size, size, metadata.write_quorum))
    return min(displaced, default=None)


def open_classes(metadata: LedgerMetadata, bookies: int, listed: Collection[int]) -> list[int]:
    """Return the first entry of each class of which a bookie outside its write set may hold entries.

    An acknowledged entry of any other class has its quorum in its write set, or is listed outside of that.

    Args:
        metadata: the ledger's.
        bookies: how many there are in the wide scope.
        listed: the indexes of those that listed all that they have.
    """
    first_entry, size = metadata.last_fragment.first_entry, metadata.ensemble_size
    silent = set(range(bookies)).difference(listed)
    return [
        first
        for first in range(first_entry, first_entry + size)
        if silent.difference(write_set(first % size, size, metadata.write_quorum))
    ]


def first_missing(wanted: range, rows: Iterable[Row], content_term: int) -> int:
    """Return the first of these entries that is not listed, or the one behind the last of them.

    At the cost of the rows, and not of the entries. Where two rows have the entries in turn, it may return an
    earlier one.

    Args:
        wanted: ascends.
        rows: ascend by first entry.
    """
    entry_id, step = wanted.start, wanted.step
    for row in rows:
        ids = row.entry_ids
        if row.content_term < content_term or entry_id not in ids:
            continue
        if step % row.stride:
            entry_id += step
        else:
            entry_id += ((ids[-1] - entry_id) // step + 1) * step
    return min(entry_id, wanted.start + len(wanted) * step)


class FragmentLists:
    """What the bookies of a wide scope list of the last fragment, and where the search for the end begins.

    In a store that was set back, acknowledged entries may be on bookies that it does not name. So they are
    written back:

    - from the first entry on that a bookie lists outside of its write set;
    - from the first one on that fewer than the quorum list in its write set, where a bookie that has listed
      nothing yet may have the others. The quorum is Qa, and Qw with guaranteed write quorum.

    Trimmed entries are not written back. Nobody lists these.
    """

    def __init__(self, metadata: LedgerMetadata, scope: RecoveryScope, quorum: int) -> None:
        self._metadata = metadata
        self._bookies = scope.bookies
        self._quorum = quorum
        self._tally = FenceTally(*scope.sizes, metadata.last_fragment.first_entry)
        self._rows: dict[int, list[Row]] = {}  # of bookies that lost nothing
        self._displaced: int | None = None
        self._first_kept: int | None = None

    def note(self, seat: int, rows: list[Row], *, is_damaged: bool) -> None:
        """Note what a bookie lists. One that lost data may have had more."""
        fragment = self._metadata.last_fragment
        if not is_damaged:
            self._tally.answer(seat, None)
            self._rows[seat] = rows
        entry_id = first_displaced(self._metadata, seat, rows)
        if entry_id is not None and (self._displaced is None or entry_id < self._displaced):
            self._displaced = entry_id
        for row in rows:
            skipped = index_from(row.entry_ids, fragment.first_entry)
            if row.content_term >= fragment.content_term and skipped < row.entries:
                kept = row.entry_ids[skipped]
                self._first_kept = kept if self._first_kept is None else min(kept, self._first_kept)

    def before(self, acknowledged: int) -> int:
        """Return the entry behind which the search begins.

        Args:
            acknowledged: the last entry that is known to be acknowledged. The search begins there or before.
        """
        if not self._tally.is_covered:
            return self._metadata.last_fragment.first_entry - 1
        short = self._first_short(acknowledged)
        return min([acknowledged, *(one - 1 for one in (self._displaced, short) if one is not None)])

    def may_rise(self, acknowledged: int) -> bool:
        """Return whether the search may begin later, once further bookies have listed what they have."""
        if self._tally.is_covered and self._displaced is not None:
            acknowledged = min(acknowledged, self._displaced - 1)  # further lists cannot raise it above that
        return self.before(acknowledged) < acknowledged

    def holders_behind(self, before: int) -> tuple[str, ...]:
        """Return who lists the entry behind `before`, if this one is trimmed; nobody if it is not."""
        first_kept = before + 1
        if self._first_kept != first_kept or self._metadata.last_fragment.first_entry == first_kept:
            return ()
        return tuple(
            self._bookies[seat]
            for seat, rows in self._rows.items()
            if any(first_kept in row.entry_ids for row in rows)
        )

    def _first_short(self, last_entry: int) -> int | None:
        metadata, size, short = self._metadata, self._metadata.ensemble_size, list[int]()
        if self._first_kept is None:
            return None  # Whatever was acknowledged is trimmed.
        for first in open_classes(metadata, len(self._bookies), self._rows):
            owed = range(first, last_entry + 1, size)
            wanted = owed[index_from(owed, self._first_kept) :]
            if wanted:
                # How far each bookie has these entries without a gap.
                ends = [
                    first_missing(wanted, self._rows.get(seat, ()), metadata.last_fragment.content_term)
                    for seat in write_set(first % size, size, metadata.write_quorum)
                ]
                end = sorted(ends, reverse=True)[self._quorum - 1]
                short += [end] if end in wanted else []
        return min(short, default=None)
