"""Ensemble changes of one window: the shell around `client_aio.core.ensemble_change.EnsembleChangeMachine`.

Shared by a ledger's writer and by recovery. A writer writes each change to the metadata store. A recovery
keeps its changes in memory until it closes the ledger (rule 12d). Owns the one task that carries out the
steps.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from client_aio.bookies.ensemble_finder import Sizes
from client_aio.core.ensemble_change import (
    Abandon,
    Copy,
    Drain,
    EnsembleChange,
    Find,
    FindAll,
    GiveUp,
    Reseat,
    Step,
    Wait,
    Write,
)
from client_aio.core.liveness import Patience
from client_aio.core.quorum import indexes_of
from metadata.awake import awake_timeout, until_read
from metadata.errors import (
    BookKeeperError,
    InvalidTransitionError,
    MetadataError,
    MetadataUnavailableError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    WriterAbortedError,
)
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.core.add_window import AddWindow
    from client_aio.core.ensemble_change import EnsembleChangeMachine
    from metadata.model.ledger import Fragment, LedgerMetadata

logger = logging.getLogger(__name__)

Token = TypeVar("Token")

_LOOK_S = 2.0
"""How long a fenced owner waits for the metadata store: the store only decides which error it is."""


class ChangesOwner(Protocol):
    """The writer, or the recovery, whose ensemble is changed."""

    @property
    def metadata(self) -> LedgerMetadata:
        """Return the ledger's metadata as now known."""

    def _needs_bookies(self) -> bool:
        """Return whether entries must still reach bookies; if not, no change is made."""

    async def _write_change(self, change: EnsembleChange) -> bool:
        """Write a change; returns False if it was refused, which has failed the owner."""

    def _fail(self, error: BookKeeperError) -> None:
        """Note that the ledger cannot be written to any more."""


class EnsembleSeats(Protocol[Token]):
    """The seats of an ensemble; `client_aio.ledger.replication.Replicator` says what each member does."""

    @property
    def window(self) -> AddWindow[Token]: ...

    @property
    def disowning(self) -> list[str]: ...

    def describe_failed(self) -> str: ...

    def seat_replacements(
        self,
        bookies: Sequence[str],
        replaced: int,
        connections: dict[str, BookieConnection | BookKeeperError],
    ) -> None: ...

    def abandon(self) -> None: ...

    def reseat(
        self,
        bookies: Sequence[str],
        replaced: int,
        connections: dict[str, BookieConnection | BookKeeperError],
    ) -> None: ...

    def flush(self) -> None: ...


class EnsembleChangeTask(Generic[Token]):
    """Replaces failed bookies, one change at a time."""

    def __init__(
        self,
        context: ClientContext,
        changer: EnsembleChangeMachine[Token],
        replicator: EnsembleSeats[Token],
        owner: ChangesOwner,
    ) -> None:
        self._context = context
        self._changer = changer
        self._replicator = replicator
        self._owner = owner
        self._connections: dict[str, BookieConnection | BookKeeperError] = {}
        self._disowning: set[str] = set()  # bookies that tombstoned the id of the ledger, though it exists
        self._seated_at: dict[str, float] = {}  # when each bookie took its seat, by the loop's clock
        self._progress = asyncio.Event()
        self._is_finishing = asyncio.Event()
        self._patience = Patience(context.config.ensemble_change_timeout_s, may_rest=True)
        self._rolls: list[asyncio.Future[None]] = []
        self._later_rolls: list[asyncio.Future[None]] = []  # requested when a roll had begun
        self._task: OwnedTask | None = None
        self._step: Step = None  # under way
        self._has_seated = False  # the replacements of a `Copy` under way
        self._look: OwnedTask | None = None  # at the metadata of an owner that is fenced

    @property
    def fragment(self) -> Fragment:
        """Return the last fragment as this window's owner last wrote it; others may have changed it since."""
        return self._changer.fragment

    def begin(self) -> None:
        """Replace the bookies of failed seats, now or after the change that is under way."""
        self._progress.set()
        if self._task is None or self._task.done():
            # Seats that fail before the task first runs, or while it waits, are replaced together.
            self._task = OwnedTask(
                self._run, f"ensemble change of ledger {self._replicator.window.ledger_id}"
            )

    def roll(self) -> asyncio.Future[None]:
        """Begin a new fragment, after the change that is under way.

        Returns:
            A future that is done when the fragment is written, or when the owner has failed. It fails if the
            roll is given up: the metadata store cannot be reached, or the metadata are full.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._later_rolls if self._changer.is_rolling else self._rolls).append(future)
        self._changer.roll()
        self.begin()
        return future

    def moved(self) -> None:
        """Check again whether the replacements hold their copies, and whether the window is drained."""
        self._progress.set()

    async def finish(self) -> None:
        """Begin no further change, and wait until none is under way. The owner needs no bookies any more."""
        self._is_finishing.set()
        self._progress.set()
        if self._task is not None:
            await self._task.wait()

    def fenced(self, error: BookKeeperError) -> None:
        """Fail the owner, whose term a bookie refuses, with the cause that the metadata show.

        A deletion fences at a bookie before it deletes there. The owner must not hear of another client that
        took over a ledger which is gone.
        """
        if self._look is None:
            name = f"look at ledger {self._replicator.window.ledger_id}"
            self._look = OwnedTask(lambda: self._fail_fenced(error), name)

    async def _fail_fenced(self, error: BookKeeperError) -> None:
        ledger_id = self._replicator.window.ledger_id
        try:
            async with awake_timeout(_LOOK_S):
                await self._context.ledgers.read(ledger_id, sync=True)
        except NoSuchLedgerError:
            error = NoSuchLedgerError(f"ledger {ledger_id} has been deleted", ledger_id=ledger_id)
        except (BookKeeperError, TimeoutError) as unknown:
            logger.warning("ledger=%d why it is fenced is not known: %s", ledger_id, unknown)
        except Exception:
            # A bug of ours must not leave callers waiting for a task that has ended.
            logger.exception("ledger=%d why it is fenced is not known", ledger_id)
        if self._owner._needs_bookies():  # Else the compare-and-set that closes the ledger decides.
            self._owner._fail(error)

    def stop(self) -> None:
        """Stop at once. The outcome of a change under way stays unknown."""
        if self._look is not None and not self._look.is_current:
            self._look.cancel()
        if self._task is not None and not self._task.is_current:
            self._task.cancel()
            self._end_all_rolls()  # A task that is cancelled before it first runs does not end them.

    async def cancel(self) -> None:
        """Stop, and wait until the task has ended."""
        self.stop()
        for task in (self._look, self._task):
            if task is not None:
                await task.wait()

    async def _run(self) -> None:
        has_ended = True
        try:
            step = self._changer.next() if self._step is None else self._step
            while step is not None and self._owner._needs_bookies():
                if step is not self._step:
                    self._step, self._has_seated = step, False
                if isinstance(step, (Find, Wait, Drain, GiveUp)) and self._replicator.disowning:
                    await self._check_that_it_exists()
                step = await self._carry_out(step)
        except asyncio.CancelledError:
            # By the owner, or by the application, which may have cancelled all tasks. The task is started
            # again then, and makes the step that was cut off once more. A compare-and-set that has happened
            # conflicts then, and the metadata show that it has (rule 10).
            has_ended = self._task is None or self._task.is_cancelled
            raise
        except BookKeeperError as error:
            self._owner._fail(error)
        except Exception as error:
            # A bug of ours must not leave callers waiting for a task that has ended.
            ledger_id, why = self._replicator.window.ledger_id, f"an ensemble change failed: {error!r}"
            logger.exception("ledger=%d %s", ledger_id, why)
            self._owner._fail(WriterAbortedError(why, ledger_id=ledger_id))
        finally:
            if has_ended:
                self._step = None
                self._end_all_rolls()

    def _end_all_rolls(self) -> None:
        self._rolls += self._later_rolls
        self._later_rolls = []
        self._end_rolls(None)

    def _end_rolls(self, error: MetadataError | None) -> None:
        rolls, self._rolls = self._rolls, []
        for future in rolls:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # retrieved: asyncio logs no error if nobody awaits it

    async def _carry_out(self, step: Step) -> Step:
        changer, replicator = self._changer, self._replicator
        match step:
            case Find(seats):
                return await self._find(seats)
            case Wait(is_frozen):
                await self._wait(is_frozen)
                return changer.next()
            case Copy(bookies, seats):
                if not self._has_seated:
                    replicator.seat_replacements(bookies, seats, self._connections)
                    self._has_seated = True
                await self._copy()
                if not self._owner._needs_bookies():
                    return None  # Closed at the ack quorum: nobody has been told of the replacements.
                if replicator.disowning:
                    await self._check_that_it_exists()
                self._note_seated(bookies, replicator.window.replacements)
                return changer.copied()
            case Abandon():
                replicator.abandon()
                return changer.abandoned()
            case FindAll():
                return await self._find_all()
            case Drain(failed):
                await self._drain(failed)
                return changer.drained()
            case Write(change):
                if not await self._owner._write_change(change):
                    return None
                self._context.counters.ensemble_changes += 1
                return changer.written()
            case Reseat(bookies, seats):
                replicator.reseat(bookies, seats, self._connections)
                self._note_seated(bookies, seats)
                is_rolling = changer.is_rolling
                following = changer.reseated()
                if not changer.is_roll_due:
                    self._connections = {}  # If a roll is due, it needs the connections found for it.
                if is_rolling and not changer.is_rolling:
                    self._end_rolls(None)
                    self._rolls, self._later_rolls = self._later_rolls, []
                replicator.flush()  # The entries that a roll held back lie before the next roll.
                # A seat that failed by the flush was not looked after: `begin` does nothing while this task
                # runs.
                return changer.next() if following is None else following
            case GiveUp(why):
                raise self._not_enough(why)
        raise AssertionError(step)

    async def _check_that_it_exists(self) -> None:
        """Ask the metadata store whether the ledger exists, after a bookie answered that it was deleted.

        A bookie that is wrong stays wrong, and gets no seat again. While the store cannot be reached, the
        bookie counts as any other bookie that refuses adds.

        Raises:
            NoSuchLedgerError: the ledger has been deleted.
            NotEnoughBookiesError: the store cannot be reached, and nothing has been acknowledged for too
                long.
        """
        ledger_id = self._owner.metadata.ledger_id
        try:
            await self._context.ledgers.read(ledger_id, sync=True)
        except MetadataUnavailableError as error:
            logger.warning("ledger=%d whether it exists: %s", ledger_id, error)
            # The read may take longer than a bookie counts as just seated. Then only this checks the timeout.
            if self._is_stuck:
                await self._check_patience(f"whether it exists cannot be asked: {error}")
            return
        self._disowning.update(self._replicator.disowning)

    async def _find(self, seats: int) -> Step:
        changer = self._changer
        try:
            found = await self._context.finder.replace(
                self._owner.metadata, changer.target, seats, excluded=self._disowning, may_leave=True
            )
        except NotEnoughBookiesError as error:
            step = changer.not_found()
            if isinstance(step, GiveUp):
                failed = [changer.target[index] for index in indexes_of(self._replicator.window.failed)]
                if await self._context.pool.await_suspects(failed):
                    return changer.next()  # Bookies that only stood still are back, or are known to be down.
            if isinstance(step, Wait):
                names = ", ".join(changer.target[index] for index in indexes_of(seats))
                ledger_id, doing = self._replicator.window.ledger_id, "waits" if step.is_frozen else "goes on"
                self._context.reports.warn(
                    logger, ("without", doing, names), "ledger=%d writing %s without %s: %s",
                    ledger_id, doing, names, error,
                )  # fmt: skip
            return step
        filled = indexes_of(found.filled)
        if any(self._has_just_been_seated(found.bookies[index]) for index in filled):
            # A bookie that accepts connections and refuses adds would be resent everything, without end.
            await self._wait(is_frozen=self._is_stuck)
            return changer.next()
        if not self._owner._needs_bookies():
            return None  # Everything is acknowledged by now: the window must not be frozen for no change.
        self._connections |= found.connections
        return changer.found(found.bookies, found.filled)

    async def _find_all(self) -> Step:
        changer, metadata = self._changer, self._owner.metadata
        try:
            # Without the store a roll can wait. Once its compare-and-set has begun, all adds wait too.
            await self._context.ledgers.read(metadata.ledger_id)
        except MetadataUnavailableError as error:
            what = "ledger=%d its next fragment waits: %s"
            self._context.reports.warn(logger, ("roll", metadata.ledger_id), what, metadata.ledger_id, error)
            self._end_rolls(error)
            return changer.roll_later()
        if metadata.is_crowded:
            crowded = InvalidTransitionError(
                f"ledger {metadata.ledger_id} has so many fragments that its metadata have no room for more: "
                "trim it",
                ledger_id=metadata.ledger_id,
            )
            self._context.reports.warn(logger, ("crowded", metadata.ledger_id), "%s", crowded)
            self._end_rolls(crowded)
            return changer.roll_later()
        try:
            found = await self._context.finder.find(
                metadata.ledger_id, Sizes.of(metadata), excluded=self._disowning
            )
        except NotEnoughBookiesError as error:
            what = "ledger=%d its next fragment has the same bookies: %s"
            self._context.reports.warn(logger, ("same", metadata.ledger_id), what, metadata.ledger_id, error)
            return changer.not_found_all()
        self._connections = found.connections
        return changer.found_all(found.bookies)

    async def _drain(self, failed: int) -> None:
        window = self._replicator.window
        while not window.is_drained and window.failed == failed and self._owner._needs_bookies():
            self._progress.clear()
            await self._progress.wait()

    def _note_seated(self, bookies: tuple[str, ...], seats: int) -> None:
        now = asyncio.get_running_loop().time()
        self._seated_at |= {bookies[index]: now for index in indexes_of(seats)}

    def _has_just_been_seated(self, bookie_id: str) -> bool:
        seated_at = self._seated_at.get(bookie_id)
        now = asyncio.get_running_loop().time()
        return seated_at is not None and now < seated_at + self._context.config.replacement_retry_s

    @property
    def _is_stuck(self) -> bool:
        """Return whether nothing can be acknowledged until bookies are found."""
        window = self._replicator.window
        return window.is_frozen or not window.can_acknowledge

    def _is_patience_over(self) -> bool:
        return self._patience.is_over(self._context.clock.time(), self._replicator.window.lac)

    async def _check_patience(self, why: str) -> None:
        """Raise NotEnoughBookiesError if the window has been stuck for too long."""
        if not self._is_patience_over():
            return
        await until_read()
        if self._is_patience_over():
            raise self._not_enough(why)

    async def _wait(self, is_frozen: bool) -> None:
        if is_frozen:
            await self._check_patience("no other bookie came up, and stayed, in time")
        retry_s = self._context.config.replacement_retry_s
        waits = [
            asyncio.ensure_future(self._context.pool.directory.wait_for_change(retry_s)),
            asyncio.ensure_future(self._is_finishing.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _copy(self) -> None:
        while self._replicator.window.awaits_copies and self._owner._needs_bookies():
            self._progress.clear()
            await self._progress.wait()

    def _not_enough(self, why: str) -> NotEnoughBookiesError:
        window = self._replicator.window
        return NotEnoughBookiesError(
            f"ledger {window.ledger_id} has lost {self._replicator.describe_failed()}: {why}",
            ledger_id=window.ledger_id,
        )
