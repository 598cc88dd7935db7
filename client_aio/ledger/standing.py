"""Whether a writer still has its ledger, where the metadata store was set back to an older copy.

Rule 10 lets the metadata decide between a writer and a recovery. An older copy has a ledger OPEN that a
recovery has closed since. Its writer, which knows nothing of that, may replace bookies that were fenced, and
have entries acknowledged behind the end. Or it closes the ledger at another end. The fenced bookies still
know. So while an event of a set-back covers a ledger (rule 15), its writer asks them before it changes its
metadata. It goes on when so many say "not fenced" that the others are too few for a fence (rule 12b).

The change is guarded by the version of the events: one that is retried behind a set-back is judged anew. Once
it has happened, the metadata decide again, and the writer asks no more because of these events.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import ReadLac
from client_aio.core.quorum import covers_all_write_sets
from client_aio.ledger.futures import fenced_by_term
from client_aio.ledger.recovery_scope import ask_lac, unjudged
from metadata.access.bookies import SetBack, SetBacks
from metadata.awake import Deadline
from metadata.errors import (
    BookKeeperError,
    GuardChangedError,
    LedgerFencedError,
    MetadataCorruptError,
    MetadataUnavailableError,
    NotEnoughBookiesError,
)
from metadata.ids import KEY_SET_BACKS, NO_ENTRY
from metadata.store import Guard

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.core.ensemble_change import Apply, Closing, EnsembleChange
    from client_aio.ledger.metadata_update import VersionedLedgerMetadata
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_RETRY_MAX_S = 2.0
_HEALS_S = 2.0


class Standing:
    """What one writer knows of its standing.

    Args:
        term: the writer's.
    """

    def __init__(self, context: ClientContext, digest: Digest, term: int) -> None:
        self._context = context
        self._digest = digest
        self._term = term
        self._proven: frozenset[str] = frozenset()  # events behind which this writer changed the metadata

    async def make(
        self, change: EnsembleChange | Closing, held: VersionedLedgerMetadata, *, heals: bool
    ) -> bool:
        """Make a change as `VersionedLedgerMetadata.update` does, once the standing is known.

        Cancelling leaves the outcome unknown.

        Args:
            heals: the writer recovers its ledger where it loses its bookies, as that of an unbounded ledger
                does. It does not wait for them.

        Returns:
            True if the change has happened, or the metadata agree with it (rule 10).

        Raises:
            LedgerFencedError: a bookie refuses the term, and nobody has closed the ledger by these metadata.
            NotEnoughBookiesError: too few bookies of the last fragment said that they are not fenced.
            Otherwise as `update` there.
        """
        config = self._context.config
        heals = heals or held.current.is_unbounded
        patience_s = _HEALS_S if heals else config.ensemble_change_timeout_s
        while True:
            with Deadline(patience_s) as deadline:
                events, guard = await self._judge(held.current.ledger_id, change.apply, deadline)
            try:
                is_done = await held.update(change.apply, guard)
            except GuardChangedError:
                continue  # there is one more event, or one was answered
            if is_done:
                self._proven |= {event.token for event in events}
            return is_done or change.is_met_by(held.current)

    async def _judge(
        self, ledger_id: int, apply: Apply, deadline: Deadline
    ) -> tuple[list[SetBack], Guard | None]:
        """Return the events that no change was made behind yet, and the guard of the change."""
        pause_s = _RETRY_S
        while True:
            try:
                events, guard = await self._events(ledger_id)
                doubts = await self._doubts(ledger_id, apply, events, deadline) if events else ""
                if not doubts:
                    return events, guard
            except (MetadataUnavailableError, MetadataCorruptError) as error:
                if deadline.is_over:
                    raise
                doubts = str(error)
            if deadline.is_over:
                raise NotEnoughBookiesError(
                    f"the metadata store was set back, so a recovery may have closed ledger {ledger_id}, and "
                    f"too few of its bookies say that none has: {doubts}. Bring them back, and recover the "
                    "ledger",
                    ledger_id=ledger_id,
                )
            key, what = ("standing", ledger_id), "ledger=%d waits, since a recovery may have fenced it: %s"
            self._context.reports.warn(logger, key, what, ledger_id, doubts)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    async def _events(self, ledger_id: int) -> tuple[list[SetBack], Guard | None]:
        store = self._context.ledgers.store
        await store.sync(KEY_SET_BACKS)
        found = await SetBacks.read(store)
        # An unbounded ledger that was taken over behind an event has a term of then.
        events = [
            one
            for one in found.events
            if max(ledger_id, self._term) < one.raised_to and one.token not in self._proven
        ]
        return events, None if found.version is None else Guard(KEY_SET_BACKS, found.version)

    async def _doubts(
        self, ledger_id: int, apply: Apply, events: Sequence[SetBack], deadline: Deadline
    ) -> str:
        """Ask the bookies of the last fragment once; return why too few count, and nothing where enough do.

        Metadata that refuse the change decide by themselves (rule 10), and no bookie is asked.
        """
        ledgers = self._context.ledgers
        metadata, _ = await ledgers.read(ledger_id, sync=True)
        if apply(metadata) is None:
            return ""
        bookies = metadata.last_fragment.bookies
        errors = await self._ask(metadata, await unjudged(ledgers.store, events, bookies), deadline)
        if _is_enough(metadata, errors):
            return ""
        return "; ".join(f"{name} ({error})" for name, error in errors.items())

    async def _ask(
        self, metadata: LedgerMetadata, unjudged: frozenset[str], deadline: Deadline
    ) -> dict[str, str]:
        """Return the bookies that do not say that they are not fenced, with the reasons."""
        bookies = metadata.last_fragment.bookies
        errors = dict.fromkeys(bookies, "it gives no answer")
        tasks = {
            asyncio.ensure_future(
                self._ask_one(metadata.ledger_id, name, is_judged=name not in unjudged)
            ): name
            for name in bookies
        }
        waiting = set(tasks)
        try:
            while waiting and not _is_enough(metadata, errors):
                done, waiting = await deadline.wait(waiting)
                if not done:
                    break
                for task in done:
                    error = "asking it was cancelled" if task.cancelled() else task.result()
                    if error is None:
                        del errors[tasks[task]]
                    else:
                        errors[tasks[task]] = error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return errors

    async def _ask_one(self, ledger_id: int, bookie_id: str, *, is_judged: bool) -> str | None:
        """Return why a bookie does not count; None where it says that it is not fenced."""
        try:
            request = ReadLac(ledger_id, self._term, NO_ENTRY, 0)
            answer = await ask_lac(self._context, self._digest, bookie_id, request)
        except LedgerFencedError as error:
            raise fenced_by_term(ledger_id, error) from None
        except BookKeeperError as error:
            return str(error)
        is_doubted = answer.is_damaged or not is_judged
        return "it lost data of the ledger, its fence perhaps" if is_doubted else None


def _is_enough(metadata: LedgerMetadata, others: Collection[str]) -> bool:
    """Return whether these bookies of the last fragment are too few for a fence (rule 12b)."""
    seats = sum(1 << seat for seat, name in enumerate(metadata.last_fragment.bookies) if name in others)
    sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    return not covers_all_write_sets(seats, *sizes)
