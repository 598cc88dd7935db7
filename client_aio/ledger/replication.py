"""Replication of one ledger's entries, shared by its writer and by recovery.

`Replicator` is the shell around `client_aio.core.add_window`. It sends the batches of a window to the bookies
of an ensemble, and reports their answers. Owns the seats: the bookie of each seat, its connection, and the
bytes for which it owes acknowledgements. Does not own ensemble changes: those call `reseat`.

`Replication` connects a window, its replicator and its ensemble changes (`client_aio.ledger.ensemble_change`)
with their owner. `StallWatch` is the timeout of a window in which nothing is acknowledged.

The way of an add:

    add_entry        the window takes the entry, and gives it the next id
    flush            once an event-loop iteration: the window cuts a batch per write set, and the batch leaves
                     as one block per bookie of the write set. Entries that come one at a time leave at once
    Done, Failure    a bookie's answer names one batch; the window counts it for that bookie's seat alone
    complete         the owner completes the futures of every entry up to the new LAC, in order (rule 1)
    failed seat      the ensemble change freezes the window, writes the new fragment, reseats, and the window
                     sends again what the replacements lack (rule 9)
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeGuard, TypeVar

from bookie_aio.wire.messages import (
    Add,
    AddFlag,
    Done,
    Failure,
    Force,
    Message,
    Status,
    WriteLac,
)
from bookie_aio.wire.prepared import PreparedRequest
from client_aio.bookies.connection import BookieConnection, Outcome, error_of
from client_aio.core.add_window import AddWindow
from client_aio.core.ensemble_change import EnsembleChangeMachine
from client_aio.core.liveness import Patience
from client_aio.core.quorum import can_acknowledge, carries_on, indexes_of
from client_aio.ledger.ensemble_change import ChangesOwner, EnsembleChangeTask
from client_aio.ledger.futures import fenced_by_term
from metadata.awake import Reading, until_read
from metadata.errors import (
    BookieReadOnlyError,
    BookieUnavailableError,
    BookKeeperError,
    LedgerFencedError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    OperationTimeoutError,
)
from metadata.errors import Outcome as ErrorOutcome
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from client_aio.config import ClientConfig
    from client_aio.context import ClientContext, ClientCounters
    from client_aio.core.add_window import AddGroup, Send
    from client_aio.core.digest import Digest
    from metadata.awake import AwakeClock
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)

Token = TypeVar("Token")

_BURSTS_KEPT = 256
"""So many bursts of adds that are reported stay in their list until it is cut."""
_GATHERING_S = 0.001
"""How long few bytes wait at most for the group in flight. Beyond the loopback, a group takes longer."""

# Refusals that another client's action causes, and not a fault of the bookie. The refusal of a deleted ledger
# is not among them: a bookie may have tombstoned the id by mistake. Only the metadata store decides.
_WITHDRAWALS = (Status.INVALID_TERM, Status.STALE_METADATA)


class AddTimes:
    """The times of the adds of one window, from their event-loop iteration to their acknowledgement.

    All adds of an iteration share a time stamp, and so do those of one report. So measuring costs a call to
    the clock for each, and none for an add. Adds that join a block later, while it gathers, are given the
    middle of that time: the error is half a millisecond at most.

    `began` is the time of the entries that `added` notes next. Small on purpose: with thousands of ledgers,
    each is out of the processor's cache when its turn comes.
    """

    __slots__ = ("_bursts", "_counters", "_length", "_noted", "_passed", "_reported", "_window", "began")

    def __init__(self, counters: ClientCounters, window: AddWindow[Any]) -> None:
        self._counters = counters
        self._window = window
        self._bursts: list[tuple[int, float]] = []  # the last entry, and when it was added
        self._passed = 0  # so many of these are reported
        self._noted = self._reported = window.last_add_pushed
        self._length = window.length_confirmed
        self.began = 0.0

    def added(self, last: int) -> None:
        """Note the entries up to the last one that was added."""
        if last > self._noted:
            self._bursts.append((last, self.began))
            self._noted = last

    def reported(self, last: int) -> None:
        """Count the entries up to the last one that the window has reported as acknowledged."""
        counters, bursts, reported, passed = self._counters, self._bursts, self._reported, self._passed
        histogram, now = counters.add, counters.clock()
        while reported < last and passed < len(bursts):
            end, began = bursts[passed]
            if end <= last:
                passed += 1
            else:
                end = last
            taken_s, count = now - began, end - reported
            histogram.counts[bisect_left(histogram.bounds, taken_s)] += count
            histogram.total += taken_s * count
            reported = end
        if passed == len(bursts) or passed > _BURSTS_KEPT:
            del bursts[:passed]
            passed = 0
        self._reported, self._passed = reported, passed
        length = self._window.length_confirmed
        counters.bytes_added += length - self._length
        self._length = length


def _is_pending(future: asyncio.Future[None] | None) -> TypeGuard[asyncio.Future[None]]:
    return future is not None and not future.done()


class _Seat:
    __slots__ = ("add", "bookie_id", "bytes_owed", "connection", "failure", "forcing", "token")

    def __init__(
        self, bookie_id: str, connection: BookieConnection | None, token: bytes | None, add: PreparedRequest
    ) -> None:
        self.bookie_id = bookie_id
        self.connection = connection
        self.token = token
        self.add = add
        self.bytes_owed = 0
        self.failure: BookKeeperError | None = None
        self.forcing: asyncio.Future[None] | None = None  # the last force, done when it is answered


class Replicator(Generic[Token]):
    """Replicates the entries of one window to one ensemble.

    Args:
        term: the term that every add carries (rule 7).
        digest: returns the token that authorises requests at each bookie.
        on_reported: called with the groups that the window has just reported, in order. The list may be
            empty: the groups that the window retains may have changed.
        on_seat_failed: called once for each seat whose bookie has newly failed.
        on_fenced: called once, when a bookie refuses the term, or holds an entry under a later content term.
            From then on nothing is sent, and no answer counts.
        on_reseated: called when new occupants of seats, or the same bookies again, have been sent the batches
            that they owe.
        times: measures the adds.
        clock: the time in seconds, for that.
        flush_later: calls a function at the end of this event-loop iteration.
    """

    def __init__(
        self,
        window: AddWindow[Token],
        *,
        term: int,
        flags: AddFlag,
        digest: Digest,
        config: ClientConfig,
        on_reported: Callable[[list[AddGroup[Token]]], None],
        on_seat_failed: Callable[[str, BookKeeperError], None],
        on_fenced: Callable[[BookKeeperError], None],
        on_reseated: Callable[[], None],
        times: AddTimes,
        clock: Callable[[], float],
        flush_later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.window = window
        self._flush_later = flush_later
        self._clock = clock
        self.times = times
        self._config = config
        self._lag_bytes_max = config.lag_bytes_max
        self._add = Add(window.ledger_id, term, int(flags))
        self._digest = digest
        self._force = Force(window.ledger_id, term)
        self._on_reported = on_reported
        self._on_seat_failed = on_seat_failed
        self._on_fenced = on_fenced
        self._on_reseated = on_reseated
        self._loop = asyncio.get_running_loop()
        self._seats: list[_Seat] = []
        self._former: dict[int, _Seat] = {}  # former occupants, while replacements get copies
        self.flush_is_due = False
        self._gathering: asyncio.TimerHandle | None = None
        self._comes_alone = False  # the last flush had one entry, with nothing in flight
        self._is_stopped = False
        self._is_fenced = False

    @property
    def bookies(self) -> tuple[str, ...]:
        """Return the ensemble, in seat order."""
        return tuple(seat.bookie_id for seat in self._seats)

    @property
    def failed_bookies(self) -> list[str]:
        """Return the bookies of the failed seats."""
        return [self._seats[index].bookie_id for index in indexes_of(self.window.failed)]

    @property
    def disowning(self) -> list[str]:
        """Return the bookies of the failed seats that answered that the ledger has been deleted."""
        failed = [self._seats[index] for index in indexes_of(self.window.failed)]
        return [seat.bookie_id for seat in failed if isinstance(seat.failure, NoSuchLedgerError)]

    def describe_failed(self) -> str:
        """Return the bookies of the failed seats with their errors, as text."""
        failed = [self._seats[index] for index in indexes_of(self.window.failed)]
        return ", ".join(f"{seat.bookie_id} ({seat.failure})" for seat in failed)

    def describe_owing(self) -> str:
        """Return the bookies that lack acknowledged entries, with their errors, as text."""
        owing = [self._seats[index] for index in indexes_of(self.window.seats_owing)]
        return ", ".join(f"{seat.bookie_id} ({seat.failure or 'it has not answered'})" for seat in owing)

    def seat(
        self, bookies: Sequence[str], connections: dict[str, BookieConnection | BookKeeperError]
    ) -> None:
        """Seat the first ensemble. A bookie that could not be reached counts as failed."""
        for bookie_id in bookies:
            found = connections[bookie_id]
            self._seats.append(self._occupant(bookie_id, found))
        self._fail_unreachable(bookies, (1 << len(bookies)) - 1, connections)

    def seat_replacements(
        self,
        bookies: Sequence[str],
        replaced: int,
        connections: dict[str, BookieConnection | BookKeeperError],
    ) -> None:
        """Seat replacements before the compare-and-set, and send them their copies (rule 11)."""
        for index in indexes_of(replaced & ~self.window.replacements):
            self._former[index] = self._seats[index]
        self._occupy(bookies, replaced, connections)
        self._transmit(self.window.seat_replacements(replaced))

    def abandon(self) -> None:
        """Take the replacements out of their seats. The seats are again those of the failed bookies."""
        for index, seat in self._former.items():
            self._seats[index] = seat
        self._former = {}
        self.window.abandon_change()
        self.advance()

    def reseat(
        self,
        bookies: Sequence[str],
        replaced: int,
        connections: dict[str, BookieConnection | BookKeeperError],
    ) -> None:
        """Put new bookies into the seats of the mask `replaced`, and send them the batches that they owe.

        A bookie that is down, as a new fragment may name it (rule 9), has failed from the start.
        """
        self._occupy(bookies, replaced & ~self.window.replacements, connections)
        self._former = {}
        self._transmit(self.window.commit_change(replaced))
        self._fail_unreachable(bookies, replaced, connections)
        self.advance()
        self._on_reseated()

    def _occupy(
        self,
        bookies: Sequence[str],
        replaced: int,
        connections: dict[str, BookieConnection | BookKeeperError],
    ) -> None:
        for index in indexes_of(replaced):
            self._seats[index] = self._occupant(bookies[index], connections[bookies[index]])

    def _fail_unreachable(
        self,
        bookies: Sequence[str],
        seats: int,
        connections: dict[str, BookieConnection | BookKeeperError],
    ) -> None:
        for index in indexes_of(seats):
            found = connections[bookies[index]]
            if isinstance(found, BookKeeperError):
                self._fail(index, self.window.epoch(index), found)

    def _occupant(self, bookie_id: str, found: BookieConnection | BookKeeperError) -> _Seat:
        token = self._digest.token(bookie_id)
        connection = found if isinstance(found, BookieConnection) else None
        return _Seat(bookie_id, connection, token, PreparedRequest(self._add, token))

    async def lock(self, context: ClientContext) -> None:
        """Lock a ledger with a password at its bookies, before any other client knows of it.

        A bookie locks it when this request arrives, or an add. No answer makes that sooner. This returns when
        the durable locks suffice. A bookie that the requests do not reach is locked by the first add that
        does.
        """
        if any(seat.token is not None for seat in self._seats):
            await self.ask_enough(context, self._force)

    async def ask_enough(self, context: ClientContext, request: Message) -> None:
        """Send a request whose answer is empty to every seat; return when enough bookies have answered.

        They suffice for a writer (rule 9) and for a recovery (rule 12b): Qa bookies of each write set have
        answered, and fewer than Qa have not. The other requests go on, also if this is cancelled.
        """
        seats = [(index, seat) for index, seat in enumerate(self._seats) if seat.connection is not None]
        asking = {asyncio.create_task(self._ask(seat, request)): index for index, seat in seats}
        names = {task: self._seats[index].bookie_id for task, index in asking.items()}
        sizes = (self.window.ensemble_size, self.window.write_quorum, self.window.ack_quorum)

        def is_enough(done: set[asyncio.Task[bool]]) -> bool:
            answered = sum(1 << asking[task] for task in done if not task.cancelled() and task.result())
            return carries_on(answered, *sizes)

        try:
            await context.pool.until_enough(names, is_enough)
        finally:
            for task in asking:
                if not task.done():
                    context.finish_later(task)

    async def _ask(self, seat: _Seat, request: Message) -> bool:
        """Return whether the bookie has done what it was asked for."""
        assert seat.connection is not None
        with suppress(BookKeeperError):
            await seat.connection.call(request, Done, timeout_s=self._config.add_timeout_s, auth=seat.token)
            return True
        return False

    async def force(self, last_entry: int) -> None:
        """Make durable what the bookies have received, up to an entry (deferred sync).

        Returns once the LAC is at the entry, or every seat has answered or failed. The window has then been
        told what became durable. A bookie that has not answered an earlier force is not sent another before.
        The answers still to come count for the window. Cancelling leaves the forces running.
        """
        forced: list[_Seat] = []
        while self.window.lac < last_entry:
            waiting = []
            for index, seat in enumerate(self._seats):
                if seat.connection is None:
                    continue
                if seat not in forced and not _is_pending(seat.forcing):
                    forced.append(seat)
                    seat.forcing = self._force_one(index, self.window.epoch(index), seat)
                if _is_pending(seat.forcing):
                    waiting.append(seat.forcing)
            if not waiting:
                return
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def _force_one(self, index: int, epoch: int, seat: _Seat) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        last_entry = self.window.last_entry_sent

        def answered(outcome: Outcome, body: memoryview) -> None:
            if isinstance(outcome, Done):
                if not self._is_fenced:
                    self._on_reported(self.window.forced(index, epoch, last_entry))
            else:
                self._refused(index, epoch, seat, outcome)
            done.set_result(None)

        assert seat.connection is not None
        seat.connection.request(self._force, answered, timeout_s=self._config.add_timeout_s, auth=seat.token)
        return done

    def advance(self) -> None:
        """Report the groups that have become acknowledged."""
        groups = self.window.advance()
        if groups or self.window.retains:  # Without groups, retained ones may just have been released.
            self._on_reported(groups)

    def tell_lac(self, message: WriteLac) -> None:
        """Send the LAC to every seat that has not failed. A bookie that does not answer fails, as by an add.

        Readers learn of an idle writer's last entries from this alone. It is sent again after the ensemble
        change that follows a failure.
        """
        for index, seat in enumerate(self._seats):
            if seat.connection is None or self._is_fenced:
                continue
            epoch, error = self.window.epoch(index), seat.connection.error
            if error is not None:
                self._fail(index, epoch, error)
                continue
            told = partial(self._told, index, epoch)
            seat.connection.tell_lac(message, told, self._config.add_timeout_s, seat.token)

    def _told(self, index: int, epoch: int, outcome: Outcome, body: memoryview) -> None:
        if isinstance(outcome, BookKeeperError):  # No answer.
            self._fail(index, epoch, outcome)
        elif isinstance(outcome, Failure) and outcome.status in _WITHDRAWALS:
            # An idle writer sends nothing else. It would not learn that it has been displaced.
            self._refused(index, epoch, self._seats[index], outcome)
        # Any other refusal is found by the next add.

    def leave(self, seats: Iterable[int]) -> None:
        """Count the bookies of these seats as failed: an operator has ordered them to take no entries."""
        for index in seats:
            bookie_id = self._seats[index].bookie_id
            why = f"an operator has ordered bookie {bookie_id} to take no entries"
            self._fail(index, self.window.epoch(index), BookieReadOnlyError(why, bookie_id=bookie_id))

    def stop(self) -> None:
        """Ignore refusals and failures of bookies from now on: nothing more will be sent."""
        self._is_stopped = True

    def schedule_flush(self) -> None:
        """Send the added entries at the end of this event-loop iteration: a batch is the unit.

        Few bytes wait until the group in flight is acknowledged, for a millisecond at most. Otherwise many
        tasks that add one entry each make batches of one entry, and the processors are saturated long before
        the disk.

        An entry is sent at once where nothing is in flight, and the last one came alone, too. Whether more
        come in this iteration is not known; the first one of a burst after single entries goes ahead alone.
        """
        if self._comes_alone and not self.flush_is_due and self.window.is_drained:
            self.flush()
        elif not self.flush_is_due:
            self.flush_is_due = True
            self.times.began = self._clock()
            self._flush_later(self._flush_or_gather)

    def _flush_or_gather(self) -> None:
        if not self.flush_is_due or self._gathering is not None:
            return  # Another call has flushed in between.
        if self.window.should_gather:
            self.times.added(self.window.last_add_pushed)
            self._gathering = self._loop.call_later(_GATHERING_S, self.flush)
        else:
            self.flush()

    def flush(self) -> None:
        """Send the added entries now."""
        times = self.times
        if not self.flush_is_due:
            times.began = self._clock()
        self.flush_is_due = False
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
            times.began = (times.began + self._clock()) / 2
        window = self.window
        last = window.last_add_pushed
        self._comes_alone = last == window.last_entry_sent + 1 and window.is_drained
        times.added(last)
        self._transmit(window.flush())

    def _transmit(self, sends: list[Send]) -> None:
        if self._is_fenced:
            return
        seats, answered, timeout_s = self._seats, self._answered, self._config.add_timeout_s
        for send in sends:
            index, epoch, batch = send
            seat = seats[index]
            connection = seat.connection
            if connection is None:
                continue
            if connection.error is not None:
                self._fail(index, epoch, connection.error)
                continue
            block = batch.block
            size = len(block)
            seat.bytes_owed += size
            connection.send_prepared(seat.add, answered, send, block, size, timeout_s)
            # Beyond the bytes that the window holds: a full window alone is no lag.
            if seat.bytes_owed > self._lag_bytes_max + self.window.bytes_held:
                error = BookieUnavailableError(
                    f"bookie {seat.bookie_id} owes acknowledgements for {seat.bytes_owed:,} bytes",
                    bookie_id=seat.bookie_id,
                )
                self._fail(index, epoch, error)
                # This drops the buffered bytes, behind which the requests of all ledgers would wait.
                connection.close(error)

    def _answered(self, send: Send, outcome: Outcome, body: memoryview) -> None:
        # Runs for every batch and bookie.
        index, epoch, batch = send
        window = self.window
        if epoch != window.epoch(index):
            return  # The seat has another occupant, whose bytes are counted anew.
        seat = self._seats[index]
        seat.bytes_owed -= len(batch.block)
        if self._is_fenced:
            return
        if isinstance(outcome, Done):
            groups = window.acknowledged(send)
            if groups or window.retains:
                self._on_reported(groups)
            if self._gathering is not None and not window.should_gather:
                self.flush()
            return
        self._refused(index, epoch, seat, outcome)

    def _refused(self, index: int, epoch: int, seat: _Seat, outcome: Outcome) -> None:
        if self._is_stopped or self._is_fenced:
            return
        if isinstance(outcome, Failure):
            error = error_of(outcome, bookie_id=seat.bookie_id, ledger_id=self.window.ledger_id)
            if outcome.status in _WITHDRAWALS:
                if epoch == self.window.epoch(index):
                    self._is_fenced = True
                    is_by_term = isinstance(error, LedgerFencedError)
                    self._on_fenced(fenced_by_term(self.window.ledger_id, error) if is_by_term else error)
                return
        else:
            assert isinstance(outcome, BookKeeperError)
            error = outcome
        self._fail(index, epoch, error)

    def _fail(self, index: int, epoch: int, error: BookKeeperError) -> None:
        if self._is_stopped or not self.window.fail(index, epoch):
            return
        seat = self._seats[index]
        # A bookie that answered with an error keeps its connection: other ledgers may use it.
        seat.connection, seat.failure = None, error
        self._on_seat_failed(seat.bookie_id, error)


class ReplicationOwner(ChangesOwner, Protocol[Token]):
    """The writer, or the recovery, that adds entries through a `Replication`.

    No method is called before the first ensemble is seated. The methods are private, since a `LedgerWriter`
    is a public handle.
    """

    def _on_reported(self, groups: list[AddGroup[Token]]) -> None:
        """Note the groups that the window has just reported, in order; the list may be empty."""

    def _on_reseated(self) -> None:
        """Note that bookies have been seated, and sent the batches that they owe."""


class Replication(Generic[Token]):
    """The add window of one ledger, its replicator and its ensemble changes, connected.

    Args:
        metadata: the ledger's metadata when the owner begins.
        owner: is told of acknowledgements and failures, and writes ensemble changes.
        term: the term that every add carries (rule 7).
        flags: the flags that every add carries.
        ack_quorum: how many bookies must have an entry. A recovery may need more than the ledger's ack
            quorum.

    The other arguments are those of `AddWindow`.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        digest: Digest,
        owner: ReplicationOwner[Token],
        *,
        term: int,
        flags: AddFlag,
        ack_quorum: int,
        next_entry: int,
        length: int,
        stated_lac: int | None = None,
        stated_lafr: int | None = None,
        guaranteed_write_quorum: bool = False,
        deferred_sync: bool = False,
    ) -> None:
        self._context = context
        self._owner = owner
        content_term = metadata.last_fragment.content_term
        self.window: AddWindow[Token] = AddWindow(
            ledger_id=metadata.ledger_id,
            content_term=content_term,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=ack_quorum,
            next_entry=next_entry,
            length=length,
            stated_lac=stated_lac,
            stated_lafr=stated_lafr,
            codes=digest.codes(content_term),
            guaranteed_write_quorum=guaranteed_write_quorum,
            deferred_sync=deferred_sync,
        )
        self.replicator: Replicator[Token] = Replicator(
            self.window,
            term=term,
            flags=flags,
            digest=digest,
            config=context.config,
            on_reported=owner._on_reported,
            on_seat_failed=self._on_seat_failed,
            on_fenced=lambda error: self.changes.fenced(error),
            on_reseated=owner._on_reseated,
            times=AddTimes(context.counters, self.window),
            clock=context.counters.clock,
            flush_later=context.flushes.add,
        )
        machine = EnsembleChangeMachine.of(self.window, metadata, context.config.ensemble_changes_max)
        self.changes: EnsembleChangeTask[Token] = EnsembleChangeTask(context, machine, self.replicator, owner)

    def replace_failed(self) -> None:
        """Begin an ensemble change if a seat has failed and the owner still needs bookies."""
        if self.window.failed and self._owner._needs_bookies():
            self.changes.begin()

    def leave_ordered(self) -> None:
        """Move off bookies that an operator has ordered to take no entries, before an add meets a refusal.

        Called at each order, and when bookies have taken seats: an order may come after a bookie was chosen.
        An idle writer learns of the order by this alone. Where Qa does not hold without these bookies, and no
        other takes entries, only a refusal fails the seat. The order may be taken back before the next add.
        """
        directory = self._context.pool.directory
        ordered = directory.orders.by_bookie
        if not ordered or not self._owner._needs_bookies():
            return
        window, bookies = self.window, self.replicator.bookies
        seats = [
            index for index, name in enumerate(bookies) if name in ordered and not window.failed >> index & 1
        ]
        failed = window.failed | sum(1 << index for index in seats)
        holds = can_acknowledge(
            failed, window.ensemble_size, window.write_quorum, self._owner.metadata.ack_quorum
        )
        others = sum(one.is_writable and name not in bookies for name, one in directory.available.items())
        if seats and (holds or others >= len(seats)):
            self.replicator.leave(seats)

    def _on_seat_failed(self, bookie_id: str, error: BookKeeperError) -> None:
        self._context.counters.seats_failed += 1
        # By bookie: each attempt to heal, and each ledger of this client, meets the same failure.
        key, what = ("failed", bookie_id, type(error)), "ledger=%d bookie=%s failed: %s"
        self._context.reports.warn(logger, key, what, self.window.ledger_id, bookie_id, error)
        self._context.pool.directory.note_refusal(bookie_id, error)
        self.replace_failed()


class CopiesWatch:
    """The timeout of acknowledged entries that wait for their last copies (guaranteed write quorum, rule 11).

    It is about the entries that were outstanding when a wait began, up to `_target`. Other tasks may go on
    adding: what becomes of their entries is no progress of these. A later wait is about the same entries
    until they have all copies, since they are outstanding for it too.

    Every copy that comes is progress: the LAFR itself does not move during an ensemble change. A bookie that
    comes and goes makes progress only when fewer copies are missing than ever before. The count begins anew
    with each LAC: newly acknowledged entries are owed copies of their own. Where no copy is missing, an
    ensemble change waits for the metadata store, which has timeouts of its own.

    Without guaranteed write quorum the window releases what is acknowledged. `StallWatch` ends a wait for
    that, and the wait for acknowledgements.
    """

    def __init__(self, replicator: Replicator[Any], timeout_s: float, clock: AwakeClock) -> None:
        self._replicator = replicator
        self._timeout_s = timeout_s
        self._clock = clock
        self._patience = Patience(timeout_s)
        self._target = NO_ENTRY
        self._ends, self._fewest_owed = (NO_ENTRY, NO_ENTRY), 0  # LAFR and LAC at the last look

    async def wait(self, room: asyncio.Event) -> None:
        """Wait until the window may hold fewer bytes; may return early.

        Args:
            room: set when the window holds so few bytes that more may be added.

        Raises:
            NotEnoughBookiesError: no missing copy has come for the timeout. Nothing has failed by that.
        """
        window = self._replicator.window
        room.clear()
        if not window.is_guaranteed:
            await room.wait()
            return
        if self._is_over():
            await until_read()
            if self._is_over():
                raise self._lacking()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s / 4):
                await room.wait()

    def _is_over(self) -> bool:
        window = self._replicator.window
        if window.lafr >= self._target:
            self._target = window.last_add_pushed
        owed, ends = window.copies_owed(self._target), (window.lafr, min(window.lac, self._target))
        if ends != self._ends or owed < self._fewest_owed:
            self._ends, self._fewest_owed = ends, owed
        is_waiting = owed and window.lac >= self._target
        return bool(
            is_waiting and self._patience.is_over(self._clock.time(), (self._ends, self._fewest_owed))
        )

    def _lacking(self) -> NotEnoughBookiesError:
        window = self._replicator.window
        error = NotEnoughBookiesError(
            f"entries {window.lafr + 1} to {self._target} of ledger {window.ledger_id} are acknowledged, "
            f"but for {self._timeout_s:g} s no copy has come of those that "
            f"{self._replicator.describe_owing()} should have. "
            "Bring it back, add a bookie in its place, or close(at_ack_quorum=True)",
            ledger_id=window.ledger_id,
            entry_id=window.lafr + 1,
        )
        error.outcome = ErrorOutcome.NOT_DONE  # The entries are acknowledged: only the call has failed.
        return error


class StallWatch:
    """The timeout of a window in which adds wait and none is acknowledged.

    Args:
        on_stalled: called once, with the error for the adds that wait.
    """

    def __init__(
        self,
        window: AddWindow[Any],
        on_stalled: Callable[[OperationTimeoutError], None],
        timeout_s: float,
        clock: AwakeClock,
    ) -> None:
        self._window = window
        self._clock = clock
        self._on_stalled = on_stalled
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(timeout_s)
        self._timer: asyncio.TimerHandle | Reading
        self._look()

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _is_over(self) -> bool:
        reported = self._window.last_entry_reported
        is_idle = reported == self._window.last_add_pushed
        is_over = self._patience.is_over(self._clock.time(), None if is_idle else reported)
        return is_over and not is_idle

    def _look(self) -> None:
        if self._is_over():
            self._timer = Reading(self._judge)
        else:
            self._timer = self._loop.call_later(self._timeout_s / 4, self._look)

    def _judge(self) -> None:
        if not self._is_over():
            self._look()
            return
        window = self._window
        reported = window.last_entry_reported
        self._on_stalled(
            OperationTimeoutError(
                f"entry {reported + 1} of ledger {window.ledger_id} was not acknowledged by "
                f"{window.ack_quorum} bookies within {self._timeout_s:g} s",
                ledger_id=window.ledger_id,
                entry_id=reported + 1,
            )
        )
