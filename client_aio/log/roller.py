"""Rolling a log from one ledger to the next.

One task takes all steps, one after another, while records are written:

    wait until the next ledger is wanted ─▶ create it ─▶ list it ─▶ wait until the roll is due
      ─▶ hold records back, wait until those added are acknowledged, switch ─▶ close the old ledger ─▶ …

The theory is in `client_aio.core.log_chain`. Owns the next ledger until it is the current ledger, and the old
ledger until it is closed. `LogWriter` owns the current ledger and the records that are held back.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from client_aio.core.log_chain import Listing
from client_aio.ledger.create import create_ledger
from client_aio.log.takeover import discard, is_met
from metadata.errors import (
    BookKeeperError,
    MetadataUnavailableError,
    NoSuchLedgerError,
    NoSuchLogError,
    NotEnoughBookiesError,
)
from metadata.model.log import LogRow
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.core.log_chain import RollLimits
    from client_aio.ledger.create import LedgerSettings
    from client_aio.log.ledger import LogLedger
    from metadata.access.logs import LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead
    from metadata.store import Version

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 1.0


class RollTarget(Protocol):
    """The writer of a log, as the roller sees it."""

    @property
    def current(self) -> LogLedger:
        """Return the ledger that records go to."""
        ...

    @property
    def failure(self) -> BookKeeperError | None:
        """Return the first failure."""
        ...

    def on_failed(self, ledger: LogLedger, error: BookKeeperError) -> None:
        """Hear that a ledger of the log has failed."""

    def hold(self) -> None:
        """Hold back the records appended from now on."""

    def switch_to(self, ledger: LogLedger) -> None:
        """Write to this ledger from now on, first the records that were held back."""


class Roller:
    """Rolls one log.

    Args:
        head: the head of the log's list, at `version`, as this writer wrote it.
        make: builds the writer's handle of a new ledger.
    """

    def __init__(
        self,
        context: ClientContext,
        lists: LogStore,
        head: LogHead,
        version: Version,
        settings: LedgerSettings,
        limits: RollLimits,
        log: RollTarget,
        make: Callable[[ClientContext, LedgerMetadata, Version, Digest], LogLedger],
    ) -> None:
        self._context = context
        self._lists = lists
        self._head = head
        self._version = version
        self._settings = settings
        self._limits = limits
        self._log = log
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._at_ack_quorum = False
        self._is_asked = False
        self._next: LogLedger | None = None
        self._old: LogLedger | None = None
        self._unclosed: BookKeeperError | None = None  # why the old one could not be closed at the end
        self._age_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._task: OwnedTask | None = None
        self.rolls = 0

    def start(self) -> None:
        """Begin, with the log's first ledger."""
        self._note_age()
        self._task = OwnedTask(self._run, f"rolls of log {self._lists.name}")

    def moved(self) -> None:
        """Check whether a step is due; called as records are acknowledged."""
        ledger = self._log.current
        entries = ledger.last_add_pushed + 1
        is_listed = self._next is not None
        if (self._limits.is_due if is_listed else self._limits.is_next_due)(ledger.bytes_taken, entries):
            self._wake.set()

    def has(self, ledger: LogLedger) -> bool:
        """Return whether this is the next ledger, listed, or the old one that is being closed."""
        return ledger is self._next or ledger is self._old

    def wake(self) -> None:
        """Check again whether a step is due, or the log has failed."""
        self._wake.set()

    async def roll(self) -> bool:
        """Roll to the next ledger unless the current one is empty; return False where the log ends before."""
        if self._log.current.last_add_pushed < 0:
            return True
        rolled, self._is_asked = self.rolls, True
        self._wake.set()
        while self.rolls == rolled and self._log.failure is None and not self._is_stopping:
            await self._pause(None)
        return self.rolls != rolled

    async def stop(self, *, at_ack_quorum: bool = False) -> None:
        """Finish the step that is under way, close the old and the next ledger, and end.

        Args:
            at_ack_quorum: as of `LedgerWriter.close`.

        Cancelling leaves these ledgers to the next takeover of the log.

        Raises:
            BookKeeperError: a ledger could not be closed. Calling this again tries it again.
        """
        had_ended = self._task is None or self._task.done()
        self._is_stopping = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
        if at_ack_quorum:
            self._at_ack_quorum = True
            if self._old is not None and not had_ended:
                # The step under way may wait for copies. It handles the errors: it closes the ledger too.
                with suppress(BookKeeperError):
                    await self._old.close(at_ack_quorum=True)
        if self._task is not None:
            await self._task.wait()
            self._task.result()
        if self._old is not None and had_ended:
            await self._close_old(self._old)
        if self._old is not None and self._unclosed is not None and self._log.failure is None:
            raise self._unclosed.with_traceback(None)
        if self._next is not None and self._log.failure is None:
            await self._next.close()

    def end(self) -> None:
        """Take no further step: not even one whose condition has just come true."""
        self._is_stopping = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.is_current:
            self._task.cancel()

    async def abort(self) -> None:
        """End at once, in the middle of a step. The next ledger may be listed, now or later."""
        self.end()
        if self._task is not None and not self._task.is_current:
            await self._task.wait()
        for ledger in (self._next, self._old):
            if ledger is not None:
                await ledger.abort()

    # --- the steps ---

    async def _run(self) -> None:
        log = self._log
        try:
            # The next ledger is there already if the application has cancelled an earlier task of this kind.
            while self._next is not None or await self._is_wanted():
                if self._next is None:
                    self._next = await self._in_step(self._list_next())
                if self._next is not None and self._next.failure is not None:
                    log.on_failed(self._next, self._next.failure)  # It failed before it was listed.
                if self._next is None or not await self._is_due():
                    return
                await self._in_step(self._switch(self._next))
        except BookKeeperError as error:
            log.current.fail(error)

    async def _in_step(self, step: Coroutine[Any, Any, T]) -> T:
        """Take a step; if somebody else than the log's writer cancels it, the log is opened again.

        A row that was being listed may be there, now or later. A second one behind it would break the rule
        that only two ledgers are not CLOSED.
        """
        try:
            return await step
        except asyncio.CancelledError:
            if self._task is not None and not self._task.is_cancelled:
                why = f"a roll of log {self._lists.name!r} was cancelled half-way"
                self._log.current.fail(MetadataUnavailableError(why))
            raise

    async def _is_wanted(self) -> bool:
        """Wait until the next ledger should be listed; return False where the log ends before."""
        while not self._has_ended:
            ledger = self._log.current
            wanted = self._limits.is_next_due(ledger.bytes_taken, ledger.last_add_pushed + 1)
            if wanted or self._is_asked or self._is_aged:
                return True
            await self._pause(None)
        return False

    async def _is_due(self) -> bool:
        while not self._has_ended:
            ledger = self._log.current
            due = self._limits.is_due(ledger.bytes_taken, ledger.last_add_pushed + 1)
            if due or self._is_asked or self._is_aged:
                return True
            await self._pause(None)
        return False

    @property
    def _has_ended(self) -> bool:
        return self._is_stopping or self._log.failure is not None

    async def _list_next(self) -> LogLedger | None:
        """Create a ledger and list it; return None where the log ends before."""
        while not self._has_ended:
            try:
                ledger = await self._create()
            except BookKeeperError as error:
                # Records go on to the current ledger, which grows above its limit meanwhile.
                self._warn("log=%s has no next ledger: %s", self._lists.name, error)
                await self._rest()
                continue
            try:
                if await self._list(ledger):
                    return ledger
            except BaseException:
                await ledger.abort()
                raise
            await discard(self._context, ledger, self._settings.password)
        return None

    async def _create(self) -> LogLedger:
        return await create_ledger(self._context, self._settings, self._make, id_min=self._head.id_min)

    async def _list(self, ledger: LogLedger) -> bool:
        """List the ledger; return False where the list has changed, and this writer still has the log.

        Raises:
            LogFencedError: another writer has taken the log over.
        """
        current = self._log.current
        row = LogRow(ledger.ledger_id, ledger.ledger_id, self._context.now_ms())
        while True:
            listing = Listing(lambda head: head.append([row]), row.id)
            try:
                changed = await self._lists.change_now(self._head, self._version, listing.apply)
                is_listed = changed.is_done or await is_met(self._lists, listing, changed.head)
            except MetadataUnavailableError as error:
                # The outcome is unknown: the row may be listed, now or later. Retry from the same version.
                self._warn("log=%s its next ledger is not listed yet: %s", self._lists.name, error)
                if self._has_ended:
                    return True  # The row may be listed, so the ledger must not be discarded.
                continue
            except NoSuchLogError as error:
                raise current.lost(str(error)) from error
            break
        self._head, self._version = changed.head, changed.version
        if is_listed and changed.head.rows.last_key == row.id:
            return True
        if is_listed:  # A row behind it means a takeover: only a takeover lists behind another writer's row.
            raise current.lost(f"its last ledger is {changed.head.rows.last_key} now")
        if changed.head.rows.last_key == current.ledger_id:
            return False
        await discard(self._context, ledger, self._settings.password)
        raise current.lost(f"its last ledger is {changed.head.rows.last_key} now")

    async def _switch(self, following: LogLedger) -> None:
        """Switch ledgers once all records of the old one are acknowledged; then close the old one."""
        old = self._log.current
        self._log.hold()
        await old.flush()
        self._is_asked = False
        self._note_age()
        self._next, self._old = None, old
        self._log.switch_to(following)
        self.rolls += 1
        self._wake.set()
        await self._close_old(old)

    async def _close_old(self, old: LogLedger) -> None:
        """Close the old ledger; a roller that stops makes one attempt, and keeps its error."""
        while self._log.failure is None:
            try:
                await old.close(at_ack_quorum=self._at_ack_quorum)
                break
            except NoSuchLedgerError as error:
                # An earlier attempt closed the ledger, its answer was lost, and a truncation deleted the
                # ledger since. Where the whole log was deleted, the next ledger fails by itself.
                logger.warning("ledger=%d is gone: %s", old.ledger_id, error)
                break
            except (MetadataUnavailableError, NotEnoughBookiesError) as error:
                # The latter: an entry waits for its last copy (guaranteed write quorum), or as of `Standing`.
                if self._is_stopping:
                    # The current ledger is in order, and does not fail of that. `stop` raises the error.
                    self._unclosed = error
                    return
                self._warn("ledger=%d is not closed yet: %s", old.ledger_id, error)
                await self._rest()
        self._old = None

    def _warn(self, message: str, name: str | int, error: BookKeeperError) -> None:
        """Warn of what may happen again at each attempt."""
        self._context.reports.warn(logger, (message, name, type(error)), message, name, error)

    # --- time ---

    @property
    def _is_aged(self) -> bool:
        age_s = self._limits.age_s
        return (
            age_s is not None
            and self._log.current.last_add_pushed >= 0
            and self._loop.time() - self._age_since >= age_s
        )

    def _note_age(self) -> None:
        """Begin to count a ledger's age; a timer wakes the roller at the limit, and repeatedly after it."""
        self._age_since = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        if self._limits.age_s is not None and not self._is_stopping:  # A roll may be finished while it stops.
            self._timer = self._loop.call_later(self._limits.age_s, self._look_at_age)

    def _look_at_age(self) -> None:
        assert self._limits.age_s is not None
        self._wake.set()
        self._timer = self._loop.call_later(max(1.0, self._limits.age_s / 10), self._look_at_age)

    async def _rest(self) -> None:
        """Back off before a retry, however often records are acknowledged meanwhile."""
        until = self._loop.time() + RETRY_S
        while not self._has_ended and (left := until - self._loop.time()) > 0:
            await self._pause(left)

    async def _pause(self, seconds: float | None) -> None:
        """Wait until the roller is woken, or for so long."""
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
