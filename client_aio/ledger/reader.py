"""The reader's handle of a ledger: reads, the LAC, tailing. Never fences.

Owns the highest LAC that this handle has verified, and the ledger's metadata as last read.

Invariants (rule 13): the LAC of a handle never decreases, and `read` returns nothing above it. A LAC
statement counts only when its checksum holds, and when the last fragment known here has at least the
statement's content term.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Self

from bookie_aio.wire.messages import NO_TERM, ReadLac, ReadLacAnswer
from client_aio.context import on_own_loop
from client_aio.core.quorum import covers_all_write_sets
from client_aio.core.read_plan import check_range
from client_aio.ledger.entry_reader import BatchStream, EntryReader, EntryStream, entries_of
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    DigestMismatchError,
    MetadataUnavailableError,
    StaleMetadataError,
)
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY
from metadata.owned_task import failure_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

    from bookie_aio.wire.blocks import LacStatement
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.ledger.entry_reader import EntryBatch, EntrySource
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)


@on_own_loop("close")
class LedgerReader:
    """Reads a ledger; made by `Client.open_ledger`. An async context manager that frees it on exit."""

    def __init__(
        self, context: ClientContext, metadata: LedgerMetadata, version: Version, digest: Digest
    ) -> None:
        self._context = context
        self._config = context.config
        self._metadata = metadata
        self._version = version
        self._lac = self._lac_of_metadata()
        self._length: int | None = metadata.length
        self._digest = digest
        self._false_statements = 0
        self._entries = self._make_entries()

    def _make_entries(self) -> EntrySource:
        return EntryReader(
            self._context,
            lambda: self._metadata,
            self._digest,
            on_statement=self._note,
            refresh=self._refresh_now,
        )

    # --- what is known ---

    def __repr__(self) -> str:
        state = self._metadata.state.value
        return f"<{type(self).__name__} of ledger {self.ledger_id}: {state}, LAC {self.last_add_confirmed}>"

    @property
    def ledger_id(self) -> int:
        """Return the ledger's id."""
        return self._metadata.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Return the metadata as last read."""
        return self._metadata

    @property
    def is_closed(self) -> bool:
        """Return whether the ledger is known to be closed: no entry will follow."""
        return self._metadata.is_closed

    @property
    def last_add_confirmed(self) -> int:
        """Return the highest LAC seen by this handle, −1 for none; the last entry of a closed ledger."""
        return self._lac

    @property
    def length(self) -> int | None:
        """Return the payload bytes of a closed ledger; None while the ledger is not known to be closed."""
        return self._metadata.length

    @property
    def digest_mismatches(self) -> int:
        """Return how many damaged or forged answers this handle has met and passed over."""
        return self._entries.digest_mismatches + self._false_statements

    # --- reading ---

    def read(self, first: int, last: int) -> EntryStream:
        """Read the entries first to last, inclusive, in order; `read(n, n − 1)` is empty.

        `aclose()` the iterator unless it is read to its end. Cancelling a read leaves nothing behind.

        Raises:
            InvalidArgumentError: first to last is no range of entries.
            NoSuchEntryError: `last` lies beyond `last_add_confirmed`.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: no bookie
                returned an entry intact.
        """
        return self._entries.stream(first, last, self._lac)

    def read_batches(self, first: int, last: int, *, known_lac: int = NO_ENTRY) -> BatchStream:
        """Read as `read` does, in batches: one buffer and a list of offsets for many entries.

        Args:
            known_lac: a LAC of this ledger that another reader has verified; `last` may reach up to it.
        """
        check_range(0, known_lac)
        return self._entries.batches(first, last, max(self._lac, known_lac))

    def read_unconfirmed(self, first: int, last: int) -> EntryStream:
        """Read the entries first to last whether they are acknowledged or not, in order.

        Ends before the first entry that no bookie of its write set has. **Entries above the LAC are not part
        of the ledger yet, and may never be.** A recovery may cut them off after they were read here.

        Raises:
            InvalidArgumentError: first to last is no range of entries.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: the bookies'
                answers do not decide whether an entry exists.
        """
        return self._entries.stream_unconfirmed(first, last)

    def read_rest(self, first: int) -> EntryStream:
        """Read from an entry on to the end of a bounded ledger that is complete, but not closed.

        For logs. The caller knows from elsewhere that every add has been acknowledged and that no add will
        follow, and has read the metadata since. Every entry then lies on an ack quorum of its write set. So
        Qw − Qa + 1 bookies of the write set that deny an entry prove it absent (as in recovery, rule 8).

        Raises:
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: the bookies'
                answers do not decide whether an entry exists.
        """
        entries = EntryReader(
            self._context,
            lambda: self._metadata,
            self._digest,
            on_statement=self._note,
            refresh=self._refresh_now,
            absent_at=self._metadata.write_quorum - self._metadata.ack_quorum + 1,
        )
        return entries.stream_unconfirmed(first, ENTRY_ID_MAX)

    def tail(self, from_entry: int = 0) -> EntryStream:
        """Read from an entry on, and follow the entries acknowledged later, until the ledger is closed.

        Survives ensemble changes, recovery, and bookies that come and go. `aclose()` the iterator unless
        it is read to its end.

        Raises:
            NoSuchLedgerError, MetadataCorruptError: while iterating: the ledger has been deleted, or its
                metadata are damaged.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: no bookie
                returned an entry intact.
        """
        return entries_of(self.tail_batches(from_entry))

    def tail_batches(self, from_entry: int = 0) -> BatchStream:
        """Read as `tail` does, in batches: one buffer and a list of offsets for many entries."""
        check_range(from_entry, from_entry)
        return self._tail(from_entry)

    async def read_last_add_confirmed(self) -> int:
        """Ask the bookies for the LAC until their answers cover every write set, and return it.

        Raises:
            BookieUnavailableError: too few bookies answered that have lost nothing of the ledger. The LACs
                of their answers count all the same.
            NoSuchLedgerError: the ledger has been deleted.
            MetadataUnavailableError, MetadataCorruptError: the metadata could not be read.
        """
        if not self.is_closed:
            # Bookies of a former ensemble do not know the LAC of the present fragment.
            await self.refresh(sync=True)
        if not self.is_closed:
            await self._ask_for_lac(needs_coverage=True)
        return self._lac

    async def try_read_last_add_confirmed(self) -> int:
        """Ask the bookies for the LAC, take the first answer, and return the highest LAC seen.

        Raises:
            BookieUnavailableError: no bookie answered. The metadata have been read again then.
            NoSuchLedgerError: the ledger has been deleted. MetadataCorruptError: its metadata are damaged.
        """
        if not self.is_closed:
            await self._ask_for_lac(needs_coverage=False)
        return self._lac

    async def refresh(self, *, sync: bool = False) -> None:
        """Read the metadata again. An older version never replaces a newer one, whichever read ends last.

        Args:
            sync: see everything that any client completed before this call.

        Raises:
            NoSuchLedgerError: the ledger has been deleted.
            MetadataUnavailableError: the metadata store did not answer in time.
        """
        self._learn(*await self._context.ledgers.read(self.ledger_id, sync=sync))

    def _learn(self, metadata: LedgerMetadata, version: Version) -> None:
        """Take metadata that were read, unless newer ones are known."""
        if version.is_before(self._version):
            return  # Else a tail that had seen the ledger closed would wait for its end for ever.
        self._metadata, self._version = metadata, version
        self._lac = max(self._lac, self._lac_of_metadata())

    async def _refresh_now(self) -> None:
        # Rule 13: a metadata server that lags must not decide that an acknowledged entry does not exist.
        await self.refresh(sync=True)

    async def close(self) -> None:
        """Free the handle. The ledger stays as it is."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the LAC ---

    def _lac_of_metadata(self) -> int:
        if self._metadata.last_entry is not None:
            return self._metadata.last_entry
        # Rule 9: fragments begin at LAC + 1, so every entry before the last fragment is acknowledged.
        return self._metadata.last_fragment.first_entry - 1

    def _note(self, statement: LacStatement) -> bool:
        """Raise the LAC by a bookie's statement where that can be used; return False for a forged one."""
        if statement.lac <= self._lac or self.is_closed:
            return True
        if not self._digest.is_genuine(statement):
            self._false_statements += 1
            logger.error(
                "ledger=%d a bookie stated a LAC that fails its %s", self.ledger_id, self._digest.name
            )
            return False
        if not self._is_behind(statement):
            self._lac = statement.lac
        return True

    def _is_behind(self, statement: LacStatement) -> bool:
        """Return whether a statement has a later content term than the fragments known here (rule 13)."""
        return statement.content_term > self._metadata.last_fragment.content_term

    async def _ask_for_lac(self, *, needs_coverage: bool) -> None:
        metadata = self._metadata
        ensemble = metadata.last_fragment.bookies
        tasks = {asyncio.create_task(self._poll(bookie)): seat for seat, bookie in enumerate(ensemble)}
        answered, errors = 0, []
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = failure_of(task, ensemble[tasks[task]])
                    if isinstance(error, BookKeeperError):
                        errors.append(str(error))
                    elif error is not None:
                        raise error
                    elif needs_coverage and task.result().is_damaged:
                        # Its LAC is true, but the entries that it lost may have stated a higher one.
                        errors.append(f"bookie {ensemble[tasks[task]]} has lost data of the ledger")
                    else:
                        answered |= 1 << tasks[task]
                is_enough = answered and (
                    not needs_coverage
                    or covers_all_write_sets(
                        answered, metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum
                    )
                )
                if is_enough:
                    return
        finally:
            for task in waiting:
                task.cancel()
        with contextlib.suppress(MetadataUnavailableError):
            await self.refresh(sync=True)  # Raises where the ledger has been deleted.
        if self.is_closed:
            return
        raise BookieUnavailableError(
            f"too few bookies of ledger {self.ledger_id} answered for its LAC: {'; '.join(errors)}",
            ledger_id=self.ledger_id,
        )

    async def _poll(self, bookie_id: str) -> ReadLacAnswer:
        """Ask one bookie for the LAC, and note the answer."""
        answer, _ = await self._context.pool.ask(
            bookie_id,
            ReadLac(self.ledger_id, NO_TERM, NO_ENTRY, 0),
            ReadLacAnswer,
            timeout_s=self._config.read_timeout_s,
            ledger_id=self.ledger_id,
        )
        statement = answer.statement
        if statement is not None and self._is_behind(statement) and self._digest.is_genuine(statement):
            await self._catch_up(statement, bookie_id)
        if statement is not None and not self._note(statement):
            raise DigestMismatchError(
                f"the LAC that bookie {bookie_id} states fails its {self._digest.name}",
                ledger_id=self.ledger_id,
                bookie_id=bookie_id,
            )
        return answer

    async def _catch_up(self, statement: LacStatement, bookie_id: str) -> None:
        """Read the metadata as they are now: the term's metadata were written before its first statement."""
        await self.refresh(sync=True)
        if self._is_behind(statement) and not self.is_closed:
            raise StaleMetadataError(
                f"bookie {bookie_id} states a LAC of content term {statement.content_term}, of which the "
                f"metadata of ledger {self.ledger_id} know nothing",
                ledger_id=self.ledger_id,
                bookie_id=bookie_id,
            )

    # --- tailing ---

    async def _tail(self, following: int) -> AsyncGenerator[EntryBatch, None]:
        self._context.check_loop()
        tail = self._context.tails.follow(self)
        try:
            while True:
                if following <= self._lac:
                    async with contextlib.aclosing(
                        self._entries.batches(following, self._lac, self._lac, is_tail=True)
                    ) as run:
                        async for batch in run:
                            tail.handed_out = batch.last_entry_id
                            following = batch.last_entry_id + 1
                            yield batch
                elif self.is_closed:
                    return
                else:
                    await tail.wait()
        finally:
            await tail.close()
