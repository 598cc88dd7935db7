"""Healing: a writer that has lost its bookies, but not its log or ledger, opens that again by itself.

The shell that the writers of logs and of unbounded ledgers share. `client_aio.core.healing` has the theory.
`Healing` owns the task that opens again, and the writer's state as the application sees it. It also owns the
timer that looks for adds that are too old, and the watch of the metadata: an attempt may wait for bookies for
long, while another client takes the log or the ledger. It does not own the adds, nor how a log or a ledger is
opened.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from client_aio.core.healing import AppendAges
from metadata.awake import Reading, awake_timeout
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    LogFencedError,
    MetadataCorruptError,
    NoSuchLedgerError,
    OperationTimeoutError,
    UnauthorizedAccessError,
    WriterAbortedError,
)
from metadata.owned_task import OwnedTask, unless

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from client_aio.context import ClientContext

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

APPEND_TIMEOUT_S = 60.0
_REST_MIN_S = 0.05
_REST_MAX_S = 1.0
_REST_LONGEST_S = 10.0
_REST_SHARE = 0.1
"""A rest is longer than `_REST_MAX_S` where it is at most this share of the time since the loss."""
_WATCH_RETRY_S = 0.2
_LOOKS_PER_TIMEOUT = 8
"""An add that is too old is found late by at most this share of the timeout."""
_FINAL = (
    LogFencedError,
    LedgerFencedError,
    LedgerClosedError,
    NoSuchLedgerError,
    WriterAbortedError,
    ClientClosedError,
    UnauthorizedAccessError,
    InvalidArgumentError,
    MetadataCorruptError,
)


class WriterState(enum.StrEnum):
    """The state of the writer of a log or of an unbounded ledger."""

    WRITING = "writing"
    HEALING = "healing"
    """Its last ledger or term has failed. Adds are held until the log or the ledger is open again."""
    FENCED = "fenced"
    """Another writer has the log or the ledger. Final."""
    CLOSED = "closed"
    """It takes no more adds: closed, aborted, or failed for good. Final."""


def is_final(error: BookKeeperError) -> bool:
    """Return whether a writer that meets this error does not open its log or ledger again."""
    return isinstance(error, _FINAL)


def check_timeout(append_timeout_s: float | None) -> None:
    """Raise InvalidArgumentError unless the timeout is a positive number of seconds, or None."""
    is_number = isinstance(append_timeout_s, (int, float)) and not isinstance(append_timeout_s, bool)
    if append_timeout_s is not None and not (is_number and append_timeout_s > 0):
        raise InvalidArgumentError(
            f"append_timeout_s {append_timeout_s!r} is not a positive number of seconds; None: no timeout"
        )


async def _until_lost(
    changes: Callable[[], AsyncGenerator[None, None]], is_lost: Callable[[], Awaitable[bool]]
) -> None:
    """Wait until a look shows that another client has the log or the ledger: now, and after each change."""
    while True:
        with suppress(BookKeeperError):  # The attempts report a store that cannot be reached.
            async with aclosing(changes()) as watch:
                async for _ in watch:
                    if await is_lost():
                        return
        await asyncio.sleep(_WATCH_RETRY_S)


class HealingOwner(Protocol):
    """The writer that heals. The methods are private, since a writer is a public handle."""

    @property
    def _has_ended(self) -> bool:
        """Return whether the writer was closed or aborted."""
        ...

    @property
    def _first_failure(self) -> BookKeeperError | None:
        """Return the failure that ended the writer."""
        ...

    def _counts(self) -> tuple[int, int]:
        """Return how many adds there have been, and how many were acknowledged or have failed."""
        ...

    def _fail(self, error: BookKeeperError) -> None:
        """Fail for good, with all outstanding adds; does nothing after the first failure."""

    def _give_up(self, error: OperationTimeoutError) -> None:
        """Fail all outstanding adds, which are too old. The writer goes on."""


class Healing:
    """The healing of one writer.

    Args:
        what: the log or the ledger, for messages: "log 'orders'".
        timeout_s: how long an add may be outstanding; None for ever.
    """

    def __init__(
        self, context: ClientContext, what: str, owner: HealingOwner, timeout_s: float | None
    ) -> None:
        self._context = context
        self._what = what
        self._owner = owner
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task: OwnedTask | None = None
        self._healed = asyncio.Event()  # or failed
        self._state_changed = asyncio.Event()
        self._ages = AppendAges(timeout_s or 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._reading: Reading | None = None

    @property
    def is_healing(self) -> bool:
        """Return whether the log or the ledger is being opened again."""
        return self._task is not None and self._owner._first_failure is None

    @property
    def state(self) -> WriterState:
        """Return the state of the writer."""
        failure = self._owner._first_failure
        if isinstance(failure, (LogFencedError, LedgerFencedError)):
            return WriterState.FENCED
        if failure is not None or self._owner._has_ended:
            return WriterState.CLOSED
        return WriterState.HEALING if self.is_healing else WriterState.WRITING

    async def states(self) -> AsyncGenerator[WriterState, None]:
        """Yield the state now, and each later state; end behind a final one."""
        last: WriterState | None = None
        while True:
            changed = self._state_changed
            if (state := self.state) is not last:
                last = state
                yield state
            if state in (WriterState.FENCED, WriterState.CLOSED):
                return
            await changed.wait()

    def note_state(self) -> None:
        """Tell those who follow the states that the state may have changed."""
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()

    def begin(self, open_again: Callable[[], Awaitable[Opened]], opened: Callable[[Opened], None]) -> None:
        """Heal, in a task of its own.

        Args:
            open_again: opens the log or the ledger again. Its errors end the writer. It is called again after
                the application has cancelled all tasks.
            opened: goes on with the result, at once.
        """
        self._healed.clear()
        self._task = OwnedTask(lambda: self._heal(open_again, opened), f"healing of {self._what}")
        self.note_state()

    async def _heal(
        self, open_again: Callable[[], Awaitable[Opened]], opened: Callable[[Opened], None]
    ) -> None:
        try:
            result = await open_again()
            self._task = None
            self._healed.set()
            opened(result)  # May begin to heal again.
            self.note_state()
            return
        except BookKeeperError as error:
            self._owner._fail(error)
        except Exception as error:
            # A bug of ours must not leave adds waiting for a task that has ended.
            why = f"{self._what} cannot be opened again: {error!r}"
            logger.exception("%s", why)
            self._owner._fail(WriterAbortedError(why))
        self._healed.set()
        self.note_state()

    async def try_until_open(
        self,
        attempt: Callable[[], Awaitable[Opened | None]],
        changes: Callable[[], AsyncGenerator[None, None]],
        is_lost: Callable[[], Awaitable[bool]],
    ) -> Opened:
        """Make attempts until one returns a result.

        Args:
            changes: watches the metadata that say who has the log or the ledger.
            is_lost: reads them. Once another client has it, the attempt under way is ended. The next one
                finds the same, and raises why.

        Raises:
            BookKeeperError: an error for which `is_final` holds.
        """
        opened = await unless(_until_lost(changes, is_lost), self._try_until_open(attempt))
        return opened if opened is not None else await self._try_until_open(attempt)

    async def _try_until_open(self, attempt: Callable[[], Awaitable[Opened | None]]) -> Opened:
        rest_s, began = _REST_MIN_S, self._loop.time()
        while True:
            try:
                opened = await attempt()
                if opened is not None:
                    return opened
            except BookKeeperError as error:
                if is_final(error):
                    raise
                key = ("not open", self._what, type(error))
                self._context.reports.warn(logger, key, "%s is not open again yet: %s", self._what, error)
            await self._context.pool.directory.wait_for_change(rest_s)
            # Each attempt asks bookies and the store, and a thousand logs may have lost the same quorum.
            share_s = min(_REST_SHARE * (self._loop.time() - began), _REST_LONGEST_S)
            rest_s = min(2 * rest_s, max(share_s, _REST_MAX_S))

    async def until_healed(self) -> None:
        """Wait, for a writer that closes, until it does not heal; give up after the timeout of adds."""
        try:
            async with awake_timeout(self._timeout_s):
                await self.until_open()
        except TimeoutError:
            self._owner._fail(
                OperationTimeoutError(
                    f"{self._what} was closed while its bookies were away; the next takeover finds its end"
                )
            )

    async def until_open(self) -> None:
        """Wait until the writer does not heal: it is open again, or has ended."""
        while self.is_healing:
            await self._healed.wait()

    def cancel(self) -> None:
        """Stop healing: the writer has failed for good."""
        if self._task is not None and not self._task.is_current:
            self._task.cancel()
        self._healed.set()
        self.note_state()

    async def stop(self) -> None:
        """Release everything; the writer has been closed, or has failed."""
        self.stop_watching()
        if self._task is not None:
            await self._task.wait()
        self.note_state()

    # --- the timeout of adds ---

    def watch_ages(self) -> None:
        """Look from now on for outstanding adds that are too old."""
        owner = self._owner
        if self._timeout_s is None or owner._first_failure is not None or owner._has_ended:
            return
        self._timer = self._loop.call_later(self._timeout_s / _LOOKS_PER_TIMEOUT, self.watch_ages)
        if self._is_overdue():
            self._reading = Reading(self._judge_ages)

    def _is_overdue(self) -> bool:
        return self._ages.is_overdue(self._context.clock.time(), *self._owner._counts())

    def _judge_ages(self) -> None:
        """Give the adds up, if the answers that had come have not settled them."""
        is_watched = self._owner._first_failure is None and not self._owner._has_ended
        if is_watched and self._is_overdue():
            error = OperationTimeoutError(
                f"{self._what}: adds were not acknowledged within {self._timeout_s:g} s. They may be there "
                "or not; later adds come behind them"
            )
            logger.warning("%s", error)
            self._owner._give_up(error)

    def stop_watching(self) -> None:
        """Stop looking for adds that are too old."""
        for each in (self._timer, self._reading):
            if each is not None:
                each.cancel()
