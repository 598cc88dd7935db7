"""Which bookies a recovery asks: those of the last fragment, or after a set-back of the metadata, any bookie.

In a store that was set back to an older copy, the last fragment may name bookies that the writer has replaced
since. They deny what the others acknowledged, and they tell the truth. So while an event of a set-back covers
a ledger (rule 15), its recovery counts every bookie of the cluster as one of the write set of every entry:
N bookies, Qw = N. The arithmetic of rule 12 then holds for any ensemble that the writer may have had. Fewer
than Qa bookies without an answer leave no ack quorum unfenced, and fewer than Qa that do not deny an entry
leave no ack quorum for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie_aio.wire.listing import listed
from bookie_aio.wire.messages import ReadLacAnswer
from client_aio.bookies.connection import list_entries
from client_aio.core.quorum import write_set
from metadata.access.bookies import SetBacks, registered_bookies, unanswered_below
from metadata.ids import ENTRY_ID_MAX, KEY_AVAILABLE, KEY_SET_BACKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bookie_aio.wire.listing import Row
    from bookie_aio.wire.messages import ReadLac
    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata


@dataclass(frozen=True, slots=True)
class RecoveryScope:
    """The bookies that a recovery asks, those of the last fragment first, and the sizes to count with.

    `is_wide`: the metadata may be older than the ledger's last ensemble change.
    """

    bookies: tuple[str, ...]
    sizes: tuple[int, int, int]
    is_wide: bool = False

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
    holds was accepted as lost.

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
    doubted = {name for name in names if unanswered_below(events, name) > metadata.ledger_id}
    return RecoveryScope.of(metadata, running | doubted)


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
            skipped = max(0, -(-(fragment.first_entry - row.first) // row.stride))
            # So many entries of a row meet every write set that it has entries of.
            found += row.entry_ids[skipped : skipped + size]
    displaced = (each for each in found if seat not in write_set(each % size, size, metadata.write_quorum))
    return min(displaced, default=None)


def first_short(metadata: LedgerMetadata, rows: Mapping[int, Iterable[Row]], last_entry: int) -> int | None:
    """Return an entry of the last fragment before which all have their quorum at the bookies named; or None.

    The quorum is Qa, and Qw with guaranteed write quorum. In a store that was set back, entries may have been
    acknowledged by bookies that it does not name. None: all entries up to `last_entry` have it.

    Args:
        metadata: the ledger's.
        rows: what bookies of the last fragment list, by their indexes in it. Others count as holding nothing.
        last_entry: only entries up to this one are looked at.
    """
    fragment, size = metadata.last_fragment, metadata.ensemble_size
    quorum = metadata.write_quorum if metadata.guaranteed_write_quorum else metadata.ack_quorum
    first_entry, short = fragment.first_entry, list[int]()
    for first in range(first_entry, min(first_entry + size, last_entry + 1)):
        wanted = range(first, last_entry + 1, size)
        # How many of these entries each bookie has without a gap.
        whole = [0] * metadata.write_quorum
        for n, seat in enumerate(write_set(first % size, size, metadata.write_quorum)):
            if seat in rows:
                gap = listed(wanted, rows[seat], fragment.content_term).find(0)
                whole[n] = len(wanted) if gap < 0 else gap
        proven = sorted(whole, reverse=True)[quorum - 1]
        short += wanted[proven : proven + 1]
    return min(short, default=None)
