"""A worker: takes repair tasks one after another, and makes the copies (rule 14).

The shell around `client_aio.core.audit`. All writes to bookies and to ledgers' metadata are those of
`client_aio.admin.repair`. So the safety of a repair does not depend on tasks, locks or elections:

- A task says only where to look. The worker reads the ledger's metadata and asks its bookies first.
- A lost bookie loses its seats. It has to be lost by the auditor's record too, and not registered at this
  moment. A bookie that came back and restarts is not lost any more, whatever an old task says.
- A bookie that an operator has ordered to leave loses its seats, running or not. The order is read again.
- A bookie that answers is repaired in its own place, and its mark is lifted where that is right.
- Bookies that a task names for entries missing or lost are in doubt. They are read whatever they list.
- An abandoned ledger is recovered first (`client_aio.core.abandonment`), if it is abandoned still.
- A task is deleted when a second look at the bookies finds every copy, and at the version that was read. A
  task to which the auditor has added something meanwhile stays.
- A task stays if a repair failed, or an entry was found nowhere. It then names the bookies that lack entries
  by now, and those not verified. Those that were verified are not named for that any more.

A worker that is killed leaves copies that nobody names, or a fragment that is repaired. Its lock ends with
its session, and another worker takes the task. One task at a time: memory does not grow with the tasks.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from client_aio.admin.repair import Repair, RepairReport
from client_aio.admin.replicas import list_replicas
from client_aio.autorecovery.abandoned import end_abandoned
from client_aio.autorecovery.auditor import racks_of, replica_states
from client_aio.autorecovery.survey import workers_at_once
from client_aio.bookies.pool import RECENT_S
from client_aio.core.audit import (
    Seats,
    copies_by_replicas,
    marks_stay,
    retry_after_s,
    seats_to_repair,
)
from client_aio.core.courtesy import Courtesy, TokenBucket, is_urgent, share
from client_aio.core.placement import spread
from client_aio.core.repair_plan import EntryRun, Part, complete_parts, entries_of
from client_aio.unbounded.paged_fragments import spans
from metadata.access.bookies import SetBacks, unanswered_below
from metadata.access.repair_tasks import (
    BY_HAND,
    COPIES_MAX,
    REASON_ABANDONED,
    REASON_RACKS,
    RepairTask,
    RepairTasks,
    TaskRef,
    WorkerRecord,
)
from metadata.awake import awake_timeout
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    KeyExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
)
from metadata.owned_task import OwnedTask, unless

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection

    from client_aio.config import AutoRecoveryConfig
    from client_aio.context import ClientContext
    from client_aio.core.courtesy import Step
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Registration, Version

logger = logging.getLogger(__name__)

_BURST_S = 0.25
"""After a pause a worker may read at once what it may read in this time."""
_LIST_AGAIN_S = 5.0
"""A list of the tasks is used for this time, or until all of them were tried."""
_UNANSWERED = "its mark stays until `bookie-aio bookie accept-metadata` answers for it"
_RETRY_S = 1.0
_LOOK_S = 2.0
"""A worker looks so often how many others work, to share the bytes per second with them."""
_LOOK_TIMEOUT_S = 0.5
_TELL_S = 10.0
"""A worker announces so often how much of a large ledger it has read."""
_CROWDED_S = 2.0
"""A worker looks again after about this time where as many others work as may."""
_SCARCE_S = 0.05
_SCARCE_MAX_S = 2.0
"""So long a worker rests behind attempts in a row for which no bookie was left: the first, and at most."""
_RELEASE_S = 2.0
"""A process that ends does not wait longer for the metadata store."""


async def release(registration: Registration) -> None:
    """Remove an ephemeral key; where the store does not answer in time, its session's end removes it."""
    with suppress(BookKeeperError, TimeoutError):
        async with asyncio.timeout(_RELEASE_S):
            await registration.close()


class Outcome(NamedTuple):
    """The result of one attempt."""

    is_done: bool
    error: str = ""
    entries_lost: int = 0
    doubted: tuple[str, ...] = ()
    """The bookies that lack entries, or whose copies were not all read."""
    is_scarce: bool = False
    """Whether no bookie was left that could get the entries."""


class Worker:
    """Repairs the ledgers of tasks."""

    def __init__(self, context: ClientContext, config: AutoRecoveryConfig, name: str) -> None:
        self._context = context
        self._config = config
        self._tasks = RepairTasks(context.ledgers.store)
        self._loop = asyncio.get_running_loop()
        rate = float(config.worker_bytes_per_s)
        self._bucket = TokenBucket(rate, rate * _BURST_S)
        self._courtesy = Courtesy()
        self._queue: list[TaskRef] = []
        self._listed_at = -_LIST_AGAIN_S
        self._spares_failed = False
        self._rests: dict[str, tuple[int, float]] = {}  # attempts of a task, and when it may be tried again
        self._is_crowded = False  # as many workers work as may
        self._scarce_s = 0.0  # the rest behind the last attempt, for want of a bookie
        self._wake = asyncio.Event()
        self._paused = asyncio.Event()
        self._resumed = asyncio.Event()
        self._at_work: Registration | None = None  # while a task is under way
        self._looked_at = self._announced_at = 0.0
        self.record = self._announced = WorkerRecord(name)

    async def run(self) -> None:
        """Do tasks until cancelled. Errors of the metadata store are waited out."""
        followers = [
            OwnedTask(self._follow_tasks, "repair tasks"),
            OwnedTask(self._follow_pause, "repair pause"),
            OwnedTask(self._follow_bookies, "repair bookies"),
        ]
        registration: Registration | None = None
        try:
            while True:
                try:
                    if registration is None:
                        registration = await self._tasks.announce(self.record)
                        self._announced = self.record
                    if self._paused.is_set():
                        await self._announce(registration)
                    await self._resumed.wait()
                    ref = await self._next()
                    if ref is None:
                        await self._announce(registration)
                        await self._rest()
                        continue
                    await self._do(ref, registration)
                except ClientClosedError:
                    raise
                except KeyExistsError as error:  # `announce` has waited
                    logger.warning("worker=%s cannot register: %s", self.record.name, error)
                except BookKeeperError as error:
                    logger.warning("worker=%s goes on: %s", self.record.name, error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            for follower in followers:
                follower.cancel()
            if registration is not None:
                await release(registration)

    @property
    def tasks_resting(self) -> int:
        """Return how many tasks wait after an attempt that failed."""
        now = self._loop.time()
        return sum(at > now for _, at in self._rests.values())

    def _waits_for_others(self, ref: TaskRef, locked: set[int]) -> bool:
        """Return whether as many others work as may, and the task can wait: the next rest is theirs."""
        others = len(locked - {ref.ledger_id})
        self._is_crowded = others >= workers_at_once(self._context) and not is_urgent(ref)
        return self._is_crowded

    # --- choosing a task -----------------------------------------------------------------------

    async def _next(self) -> TaskRef | None:
        """Return a task that nobody works at, with as few good copies as any; None for none."""
        now = self._loop.time()
        if not self._queue or now - self._listed_at > _LIST_AGAIN_S:
            self._queue = await self._tasks.refs()
            self._listed_at = now
            present = {ref.name for ref in self._queue}
            self._rests = {name: rest for name, rest in self._rests.items() if name in present}
        if not self._queue:
            return None
        locked = await self._tasks.locked()
        free = [
            ref
            for ref in self._queue
            if ref.ledger_id not in locked
            and self._rests.get(ref.name, (0, 0.0))[1] <= now
            # Without a policy that spans racks there is nothing to do: it is left to workers that have one.
            and (ref.copies < COPIES_MAX or self._context.finder.spans_racks)
        ]
        if not free:
            return None
        fresh = [ref for ref in free if ref.name not in self._rests]
        if fresh and free[0].name in self._rests:
            # What has failed takes every second turn at most, and starves nothing that can be repaired.
            self._spares_failed = not self._spares_failed
            free = fresh if self._spares_failed else free
        if self._waits_for_others(free[0], locked):
            return None
        # At random among equals: two workers seldom reach for the same lock.
        equals = [ref for ref in free if ref.copies == free[0].copies]
        ref = self._context.tokens.choice(equals)
        self._queue.remove(ref)
        return ref

    async def _rest(self) -> None:
        """Wait for a new task, for the end of a task's pause, or for the poll interval."""
        if self._is_crowded:
            # Many may wait. They do not look at each task that is done, nor all at once.
            self._is_crowded = False
            await asyncio.sleep(_CROWDED_S * (0.5 + self._context.tokens.random()))
            return
        now = self._loop.time()
        ends = [at - now for _, at in self._rests.values() if at > now]
        self._wake.clear()
        self._queue = []
        with suppress(TimeoutError):
            async with asyncio.timeout(min([*ends, self._config.poll_interval_s])):
                await self._wake.wait()

    async def _follow(
        self, make: Callable[[], AsyncGenerator[None, None]], changed: Callable[[], Awaitable[object]]
    ) -> None:
        while True:
            try:
                async with aclosing(make()) as changes:
                    async for _ in changes:
                        await changed()
            except ClientClosedError:
                return
            except BookKeeperError as error:
                logger.info("worker=%s watches again: %s", self.record.name, error)
            await asyncio.sleep(_RETRY_S)

    async def _follow_tasks(self) -> None:
        async def wake() -> None:
            self._wake.set()

        await self._follow(self._tasks.watch_tasks, wake)

    async def _follow_pause(self) -> None:
        async def look() -> None:
            is_paused = await self._tasks.is_paused()
            (self._paused if is_paused else self._resumed).set()
            (self._resumed if is_paused else self._paused).clear()

        await self._follow(self._tasks.watch_pause, look)

    async def _follow_bookies(self) -> None:
        """Try every task again when bookies have come or gone: the reason of its failure may be over."""
        while True:
            await self._context.pool.directory.wait_for_membership_change()
            self._rests = {name: (attempts, 0.0) for name, (attempts, _) in self._rests.items()}
            self._wake.set()

    # --- doing a task --------------------------------------------------------------------------

    async def _do(self, ref: TaskRef, registration: Registration) -> None:
        try:
            lock = await self._tasks.lock(ref.ledger_id, self.record.name)
        except KeyExistsError:
            return  # Another worker was first.
        try:
            # Workers that began together see each other's locks only now.
            if not self._waits_for_others(ref, await self._tasks.locked()):
                await self._do_locked(ref, registration)
        finally:
            await release(lock)
        if self._is_crowded:
            await self._rest()
        elif self._scarce_s:
            # The next ledger lacks the same bookie: thousands of tasks would keep the metadata store busy.
            await self._context.pool.directory.wait_for_change(self._scarce_s)

    async def _do_locked(self, ref: TaskRef, registration: Registration) -> None:
        try:
            task, version = await self._tasks.read(ref)
        except NoSuchKeyError:
            return
        except MetadataCorruptError as error:
            logger.error("repair task %s is dropped: %s", ref.name, error)
            await self._tasks.done(ref, None)
            return
        if task.attempts and self._rests.get(ref.name, (0, 0.0))[0] != task.attempts:
            self._note_rest(ref, task.attempts)  # Another worker has failed at it.
            return
        await self._set_rate()
        self._courtesy.is_urgent = is_urgent(ref)
        self.record = replace(self.record, ledger_id=ref.ledger_id)
        await self._announce(registration)
        began = self._looked_at = self._announced_at = self._loop.time()
        self._at_work = registration
        try:
            # An attempt is given up when an operator pauses auto recovery.
            lost = await self._lost_still(task)
            outcome = await unless(self._paused.wait(), self.attempt(ref.ledger_id, lost, task))
            if outcome is not None:
                longer_s = min(max(2 * self._scarce_s, _SCARCE_S), _SCARCE_MAX_S)
                self._scarce_s = longer_s if outcome.is_scarce else 0.0
                await self._settle(ref, task, version, outcome)
        finally:
            self._at_work = None
            busy_s = round(self.record.busy_s + self._loop.time() - began, 3)
            self.record = replace(self.record, ledger_id=None, busy_s=busy_s)

    async def _set_rate(self) -> None:
        """Read at most this worker's share of what all workers together may read.

        The locks tell how many are at work. A ledger that is repaired by hand has one, too, so they may tell
        of too many.
        """
        names, locked = await self._tasks.worker_names(), await self._tasks.locked()
        hands = [name for name in names if name.startswith(BY_HAND)]
        by_hand = sum(one.bytes_per_s for one in await self._tasks.workers(BY_HAND)) if hands else 0
        working = min(len(locked), len(names) - len(hands))
        part = share(float(self._config.cluster_bytes_per_s), by_hand, working)
        self._bucket.rate = min(float(self._config.worker_bytes_per_s), part)

    async def _look_around(self, registration: Registration) -> None:
        """Read at another rate if others have begun or ended, and tell how far a large ledger is.

        While the metadata store does not answer, the rate stays as it was, and the copying goes on.
        """
        now = self._loop.time()
        if now < self._looked_at + _LOOK_S:
            return
        with suppress(BookKeeperError, TimeoutError):
            async with awake_timeout(_LOOK_TIMEOUT_S):
                await self._set_rate()
                if now >= self._announced_at + _TELL_S:
                    self._announced_at = now
                    await self._announce(registration)
        self._looked_at = self._loop.time()

    async def _lost_still(self, task: RepairTask) -> list[str]:
        """Return the bookies of a task that an auditor holds for lost now: others may be back since."""
        is_abandoned = REASON_ABANDONED in task.reasons  # Its last fragment is complete when it is recovered.
        if not task.lost and not is_abandoned:
            return []
        record, _ = await self._tasks.auditor()
        wanted = record.lost if is_abandoned else task.lost
        return [name for name in wanted if name in record.lost]

    async def _announce(self, registration: Registration) -> None:
        """Write the record, at the beginning of a task and of a rest: one write for two tasks' border."""
        if self.record != self._announced:
            with suppress(KeyExistsError):  # another session has the key for now: the record is for people
                await registration.update(self.record.to_json())
                self._announced = self.record

    async def _settle(self, ref: TaskRef, task: RepairTask, version: Version, outcome: Outcome) -> None:
        """Delete a task that is done; note the failure of another one, for people and for other workers."""
        if outcome.is_done:
            if await self._tasks.done(ref, version):
                self.record = replace(self.record, repaired=self.record.repaired + 1)
            return
        logger.warning(
            "worker=%s ledger=%d is not repaired: %s", self.record.name, ref.ledger_id, outcome.error
        )
        self.record = replace(self.record, failed=self.record.failed + 1)
        self._note_rest(ref, task.attempts + 1)
        failed = task.failed(outcome.error, outcome.entries_lost, outcome.doubted)
        await self._tasks.note_failure(ref, task, version, failed)

    def _note_rest(self, ref: TaskRef, attempts: int) -> None:
        pause_s = retry_after_s(attempts, self._config.retry_s, self._config.retry_max_s)
        self._rests[ref.name] = (attempts, self._loop.time() + pause_s)

    async def attempt(
        self, ledger_id: int, lost_bookies: Collection[str], task: RepairTask | None = None
    ) -> Outcome:
        """Repair a ledger as far as that is possible now. Its caller holds the ledger's lock.

        Args:
            lost_bookies: bookies that lose their seats if they are not registered now.
            task: names bookies that have to answer: what they hold is why there is a task.
        """
        self._courtesy.begin(self._loop.time())
        outcome = await self._attempt(ledger_id, lost_bookies, task or RepairTask({}, 0))
        await self._yield(0.0)
        return outcome

    async def _attempt(self, ledger_id: int, lost_bookies: Collection[str], task: RepairTask) -> Outcome:
        errors, doubted, is_scarce = [], set(task.doubted), False
        lost, found_nowhere = _Lost(), _Lost()
        try:
            await self._context.pool.directory.refresh_since(self._loop.time() - RECENT_S)
            if REASON_ABANDONED in task.reasons:
                errors += await self._end_abandoned(ledger_id, lost_bookies)
            seats, _ = await self.look(ledger_id, lost_bookies, doubted)
            waiting = await self._unanswered(ledger_id, seats.marked)
            for bookie_id in (*seats.in_place, *seats.replaced):
                if bookie_id in waiting:
                    continue
                in_place = bookie_id in seats.in_place
                try:
                    missing = await self._repair(ledger_id, bookie_id, in_place=in_place)
                except NoSuchLedgerError:
                    raise
                except BookKeeperError as error:
                    errors.append(f"{bookie_id}: {error}")
                    is_scarce |= isinstance(error, NotEnoughBookiesError)
                    # The bookie that got the copies may be named already, and not be verified.
                    names = (bookie_id, error.bookie_id)
                    doubted.update(name for name in names if name and name not in seats.replaced)
                else:
                    lost.note(missing)
                    doubted.discard(bookie_id)
                    doubted.update(missing)
            left = seats
            if seats.in_place or seats.replaced:
                left, _ = await self.look(ledger_id, lost_bookies, doubted)
                waiting = await self._unanswered(ledger_id, left.marked)
            else:
                found_nowhere = await self._clear_absent(ledger_id)
                if not seats.unknown:  # one that does not answer may hold the only copy of an entry
                    found_nowhere.note(await self._spread(ledger_id))
                elif REASON_RACKS in task.reasons:
                    errors.append(f"{', '.join(seats.unknown)} does not answer")
                lost.note(found_nowhere)
        except NoSuchLedgerError:
            return Outcome(is_done=True)  # It was deleted.
        except BookKeeperError as error:
            if error.bookie_id:
                doubted.add(error.bookie_id)
            return Outcome(False, str(error), lost.entries, tuple(task.doubted | doubted))
        lacking = (*left.in_place, *left.replaced)
        silent = [name for name in left.unknown if name in task.concerned | doubted]
        errors += [f"{name}: {_UNANSWERED}" for name in sorted(waiting)]
        if lost:
            errors.append(f"{lost.entries:,} entries can be had from no bookie")
        if silent:  # no answer is no proof that it has all of them by now
            errors.append(f"{', '.join(silent)} does not answer")
        if not lacking and not errors:
            return Outcome(is_done=True)
        lacking_now = [one for one in left.in_place if one not in waiting]
        silent_now = (task.doubted | doubted).intersection(left.unknown)
        unproven = (*lacking_now, *silent_now, *found_nowhere)
        why = "; ".join(errors) or f"{', '.join(lacking)} still lacks entries"
        return Outcome(False, why, lost.entries, unproven, is_scarce)

    async def _end_abandoned(self, ledger_id: int, lost_bookies: Collection[str]) -> list[str]:
        """Close an abandoned ledger, or take it over; return why that failed, and go on."""
        try:
            await end_abandoned(self._context, ledger_id, lost_bookies)
        except NoSuchLedgerError:
            raise
        except BookKeeperError as error:
            return [f"not recovered: {error}"]
        return []

    async def look(
        self, ledger_id: int, lost_bookies: Collection[str], doubted: Collection[str] = ()
    ) -> tuple[Seats, int]:
        """Ask the bookies of a ledger; return what there is to do, and the scarcest entry's good copies.

        The copies are as the bookies list them, of fragments in the head and in pages.

        Args:
            doubted: the bookies that are to be repaired in their places, whatever they list.

        Raises:
            NoSuchLedgerError: the ledger was deleted.
        """
        metadata: LedgerMetadata
        metadata, _ = await self._context.ledgers.read(ledger_id, sync=True)
        states = replica_states(await list_replicas(self._context, ledger_id))
        running = self._context.pool.directory.available
        leaving = self._context.pool.directory.orders.leaving
        stay = marks_stay(metadata)
        seats = seats_to_repair(states, lost_bookies, running, stay, leaving, doubted)
        return seats, copies_by_replicas(metadata.write_quorum, states, stay, doubted)

    async def _unanswered(self, ledger_id: int, marked: Collection[str]) -> set[str]:
        """Return the marked bookies that lift no mark of the ledger before an operator has answered."""
        if not marked:
            return set()
        events = (await SetBacks.read(self._context.ledgers.store)).events
        return {one for one in marked if ledger_id < unanswered_below(events, one)}

    async def _spread(self, ledger_id: int) -> _Lost:
        """Exchange bookies of complete fragments for some on other racks, if the policy spans racks.

        Returns:
            The entries that no bookie returned, by the bookie that owes them now.

        Raises:
            BookKeeperError: a copy could not be made, or the bookie cannot be had.
        """
        missing = _Lost()
        if not self._context.finder.spans_racks:
            return missing
        metadata, _ = await self._context.ledgers.read(ledger_id)
        parts: list[Part] = []
        async with aclosing(spans(self._context, metadata)) as found:
            async for span in found:
                parts += complete_parts(span.fragments, span.last_entry)
        racks, candidates = racks_of(self._context)
        for part in parts:
            bookies = list(part.bookies)
            while (exchange := spread(bookies, metadata.write_quorum, racks, candidates)) is not None:
                seat, new = exchange
                # By no other one: it may be on the same rack, and the next attempt would copy again.
                report = await self._run(ledger_id, bookies[seat], by=new, only=part.first_entry)
                if not report.fragments:
                    break  # Another client changed the fragment, or trimmed it.
                missing.note(_Lost.of(report))
                bookies[seat] = new
        return missing

    async def _clear_absent(self, ledger_id: int) -> _Lost:
        """Have the bookies verified in whose place others are recorded as holding what is absent.

        Such a record is left over where a repair was interrupted between its last copy and the record. All
        entries are listed, so a read-only bookie can be verified, too.

        Returns:
            As `_spread`.

        Raises:
            BookKeeperError: a bookie could not be verified.
        """
        metadata, _ = await self._context.ledgers.read(ledger_id)
        seats = {(each.first_entry, each.seat) for each in metadata.absent}
        missing = _Lost()
        if not seats:
            return missing
        async with aclosing(spans(self._context, metadata)) as found:
            async for span in found:
                for part in complete_parts(span.fragments, span.last_entry):
                    for first_entry, seat in seats:
                        bookie_id = part.bookies[seat]
                        if first_entry == part.first_entry:
                            report = await self._run(ledger_id, bookie_id, by=bookie_id, only=first_entry)
                            missing.note(_Lost.of(report))
        return missing

    async def _repair(self, ledger_id: int, bookie_id: str, *, in_place: bool) -> _Lost:
        """Repair one bookie's part of a ledger; return as `_spread`."""
        by = bookie_id if in_place and self._takes_copies(bookie_id) else None
        order = self._context.pool.directory.orders.by_bookie.get(bookie_id)
        preferred = order.successor if order is not None else ""
        report = await self._run(ledger_id, bookie_id, by=by, preferred=preferred)
        if report.mark_left:
            logger.warning("ledger=%d bookie=%s keeps its mark: %s", ledger_id, bookie_id, report.mark_left)
        return _Lost.of(report)

    def _takes_copies(self, bookie_id: str) -> bool:
        """Return whether a bookie that answers may be repaired in its place.

        A bookie that is read-only takes no copies, so that its seat goes to another one. One that answers and
        is not registered has just started, and keeps its seat.
        """
        record = self._context.pool.directory.available.get(bookie_id)
        return record is None or record.is_writable

    async def _run(
        self,
        ledger_id: int,
        bookie_id: str,
        *,
        by: str | None = None,
        preferred: str = "",
        only: int | None = None,
    ) -> RepairReport:
        return await Repair(
            self._context,
            ledger_id,
            bookie_id,
            by=by,
            recover_after_s=None,
            password=b"",
            on_progress=lambda _: None,
            throttle=self._throttle,
            preferred=preferred,
            only=only,
        ).run()

    async def _throttle(self, step: Step) -> None:
        self.record = replace(self.record, bytes_read=self.record.bytes_read + step.size)
        self._courtesy.note(step)
        if self._at_work is not None:
            await self._look_around(self._at_work)
        await self._yield(self._bucket.take(step.size, self._loop.time()))

    async def _yield(self, pause_s: float) -> None:
        """Rest, for as long as courtesy asks for and for at least `pause_s`."""
        pause_s = max(pause_s, self._courtesy.rest_s(self._loop.time()))
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._courtesy.begin(self._loop.time())


class _Lost(dict[str, list[EntryRun]]):
    """The entries of one ledger that no bookie returned, by the bookie that owes them now."""

    @classmethod
    def of(cls, report: RepairReport) -> _Lost:
        """Return what a repair did not find."""
        lost = cls()
        for fragment in report.fragments:
            if fragment.lost:
                lost.setdefault(fragment.replacement, []).extend(fragment.lost)
        return lost

    def note(self, others: _Lost) -> None:
        """Add what other repairs did not find."""
        for bookie_id, runs in others.items():
            self.setdefault(bookie_id, []).extend(runs)

    @property
    def entries(self) -> int:
        """Return how many entries there are: each counts once, however many bookies owe it."""
        return entries_of(run for runs in self.values() for run in runs)
