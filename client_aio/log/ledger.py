"""The writer's handle of one ledger of a log: its futures return positions; a fence ends the log's writer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from mypy_extensions import mypyc_attr

from client_aio.config import WriteOptions
from client_aio.ledger.futures import BatchAdd, complete_runs
from client_aio.ledger.writer import LedgerWriter
from metadata.errors import LedgerFencedError, LogFencedError, NoSuchLedgerError
from metadata.model.log import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from client_aio.context import ClientContext
    from client_aio.core.add_window import AddGroup, Outstanding
    from client_aio.core.digest import Digest
    from client_aio.ledger.writer import Token
    from metadata.errors import BookKeeperError
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version


RecordAdd = asyncio.Future[Position] | BatchAdd[Position]
"""A record's add, or that of the batch it is in."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LogLedger(LedgerWriter):
    """A ledger that is, or will be, listed in a log under its own id.

    Args:
        on_progress: called when records have been acknowledged.
        on_failed: called with the error with which this ledger has failed.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        version: Version,
        digest: Digest,
        *,
        log_name: str,
        on_progress: Callable[[LogLedger], None],
        on_failed: Callable[[LogLedger, BookKeeperError], None],
    ) -> None:
        super().__init__(context, metadata, version, digest, WriteOptions())
        self.cut_off: list[tuple[bytes, RecordAdd]] = []
        """The records that were outstanding when this ledger failed, in order: those behind the LAC."""
        self._log_name = log_name
        self._on_progress = on_progress
        self._on_failed = on_failed
        self._on_dropped = self._keep_dropped  # The log's writer decides about these records.

    @property
    def bytes_taken(self) -> int:
        """Return the payload bytes that have been sent."""
        return self._window.length_pushed

    @property
    def failure(self) -> BookKeeperError | None:
        """Return the first failure, None for none."""
        return self._failure

    def append(self, data: bytes | bytearray | memoryview) -> asyncio.Future[Position]:
        """Add a record; as `add_entry`, but the future returns the record's position."""
        return cast("asyncio.Future[Position]", self.add_entry(data))

    def take(self, records: Sequence[bytes], add: RecordAdd) -> None:
        """Add records of one add, however many bytes are in flight. The ledger has not failed."""
        assert self._failure is None
        self._window.add_run(records, add)
        self._replicator.schedule_flush()

    def send(self) -> None:
        """Send at once what `take` has taken."""
        self._replicator.flush()

    def lost(self, why: str) -> LogFencedError:
        """Build the error of a writer that has lost the log."""
        return LogFencedError(
            f"log {self._log_name!r} has been taken over by another writer: {why}", ledger_id=self.ledger_id
        )

    def fail(self, error: BookKeeperError) -> None:
        """Fail all outstanding records."""
        self._fail(error)

    def _complete(self, group: AddGroup[Token]) -> None:
        ledger_id, entry_id = self.ledger_id, group.first_entry
        if group.has_runs:
            complete_runs(group.tokens, entry_id, lambda each: Position(ledger_id, each))
            self._on_progress(self)
            return
        for future in cast("list[asyncio.Future[Position] | None]", group.tokens):
            if future is not None and not future.done():
                future.set_result(Position(ledger_id, entry_id))
            entry_id += 1
        self._on_progress(self)

    def _fail(self, error: BookKeeperError) -> None:
        if self._failure is None:
            if isinstance(error, (LedgerFencedError, NoSuchLedgerError)):  # taken over, or the log deleted
                error = self.lost(str(error))
            super()._fail(error)
            self._on_failed(self, error)

    def _keep_dropped(self, dropped: Outstanding[Token]) -> None:
        self.cut_off = cast("list[tuple[bytes, RecordAdd]]", dropped.entries())
