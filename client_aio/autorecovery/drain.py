"""Draining a bookie: other bookies get all its seats, and then its cookie is removed.

The order to the bookie stands in the metadata store (`metadata.access.bookies.Order`), so an interrupted
drain goes on when it is run again. The steps:

1. *Draining.* The bookie refuses adds of every kind. Clients choose it for nothing, and writers move off it.
   A running bookie announces that it obeys, and this is waited for.
2. *Moving.* Each ledger that names the bookie in a complete fragment gets a repair task. The workers of the
   cluster do the tasks; where there is none, this process works. A ledger is read again when its task has
   gone. A ledger that stays OPEN on it has no living writer, or one without another bookie: it is recovered
   only on demand.
3. *The last look* at all ledgers begins when the bookie has obeyed for a while. No ledger may name it, or be
   in a recovery that may have stored entries on it.
4. *Removed.* The bookie stops. Its id is retired, so that nobody uses it again; then its cookie is removed.

The safety argument is in ARCHITECTURE.md, "Leaving the cluster". Everything that changes a ledger here is a
repair (rule 14) or a recovery (rule 12).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from client_aio.autorecovery.abandoned import close_or_take_over
from client_aio.autorecovery.survey import all_metadata, layout_in_full
from client_aio.autorecovery.worker import Worker
from client_aio.bookies.connection import list_ledgers
from client_aio.config import AutoRecoveryConfig
from client_aio.core.audit import (
    Pace,
    Rotation,
    Ties,
    has_room,
    has_substitute,
    least_bytes_owed,
    ties_of,
)
from metadata.access.bookies import (
    DRAINING,
    REMOVED,
    Order,
    Orders,
    SetBacks,
    await_obedience,
    change_order,
    is_retired,
    registered_bookies,
    retire,
    unanswered_below,
)
from metadata.access.repair_tasks import BY_HAND, REASON_LEAVING, RepairTask, RepairTasks, TaskRef
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    InvalidArgumentError,
    InvalidTransitionError,
    MetadataCorruptError,
    MetadataError,
    NoSuchKeyError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
)
from metadata.ids import KEY_LEDGERS, LEDGER_ID_MAX, available_key, check_bookie_id, cookie_key
from metadata.owned_task import OwnedTask, for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from client_aio.context import ClientContext
    from metadata.model.ledger import Fragment, LedgerMetadata

logger = logging.getLogger(__name__)

_OBEYED_WITHIN_S = 15.0
_STOPPED_WITHIN_S = 60.0
_RECOVERY_GRACE_S = 10.0
"""A recovery that another client has begun gets this time, before this process recovers the ledger, too."""
_STEP_S = 0.3
_REREAD_S = 30.0
"""Within this time a drain reads each of its ledgers once again, if they are not too many."""
_REREADS_MAX = 100
"""At most so many ledgers are read in a step for no other reason."""
_NAMED_MAX = 10
_LOOKS = 12
"""Within the time after which a drain gives up it looks so often what workers do."""
_TASKS_SHARE = 4
"""All drains together fill one in so many places of the table of tasks."""
_CALL_TIMEOUT_S = 5.0
_BY_TASKS = Ties.COPIES | Ties.ABSENT
"""Ties that end by repair tasks."""
_CONFIG = AutoRecoveryConfig()


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain is."""

    bookie_id: str
    ledgers_moved: int
    ledgers_left: int
    copies_left: int
    """Ledgers that wait for copies of complete fragments."""
    writers_left: int
    """Ledgers that are OPEN on the bookie."""
    recoveries_left: int
    tasks: int
    """Repair tasks of the whole cluster."""
    estimate_s: float | None
    is_paused: bool
    """Whether an operator has paused auto recovery, and so this."""
    is_behind: bool = False
    """Whether nothing has moved for `stall_s`, while workers repair other ledgers."""


@dataclass(slots=True)
class DrainPlan:
    """The work of a drain, and the ledgers that stand against it."""

    bookie_id: str
    successor: str
    is_running: bool
    ties: dict[int, Ties] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
    """Ledgers with a fragment that no usable bookie is outside of."""
    least_bytes: int = 0
    """Payload bytes that others have to take for certain. Often there are more."""
    free_bytes: int = 0
    """Of all bookies that take entries, as they announced it last."""
    has_room: bool = True
    """False where the disks of all others are too small for certain."""

    @property
    def is_refused(self) -> bool:
        """Return whether the drain could not end."""
        return bool(self.stuck) or not self.has_room

    def count(self, tie: Ties) -> int:
        """Return how many ledgers tie the bookie in this way."""
        return sum(1 for each in self.ties.values() if tie & each)


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The result of a drain."""

    bookie_id: str
    successor: str
    ledgers_moved: int
    ledgers_recovered: int
    took_s: float


class Drain:
    """One drain of one bookie."""

    def __init__(
        self,
        context: ClientContext,
        bookie_id: str,
        *,
        successor: str = "",
        recover_after_s: float | None = None,
        settle_s: float = 2.0,
        stall_s: float = 60.0,
        config: AutoRecoveryConfig = _CONFIG,
        on_progress: Callable[[DrainProgress], None] = lambda _: None,
    ) -> None:
        """Prepare; nothing happens before `run`.

        Args:
            context: of the client that copies and recovers, where no worker of the cluster does.
            bookie_id: the bookie that is to leave; it need not run.
            successor: the bookie that is to get its entries, where its place in the ensemble allows it.
            recover_after_s: recover a ledger that stays OPEN on the bookie for so long, or take it over if it
                is unbounded. Its writer, if it lives, is fenced. None: such ledgers are left, and the drain
                does not end before they move.
            settle_s: the time between the bookie's obedience and the last look. Changes that were under way,
                and had chosen the bookie before, end within it.
            stall_s: the drain gives up when nothing has moved for so long, and no worker has got on with
                another ledger either. It may be run again.
            config: of the worker in this process.
            on_progress: called at each step.
        """
        self._context = context
        self._store = context.ledgers.store
        self._bookie_id = check_bookie_id(bookie_id)
        self._successor = check_bookie_id(successor) if successor else ""
        self._recover_after_s = recover_after_s
        self._settle_s = settle_s
        self._stall_s = stall_s
        self._config = config
        self._on_progress = on_progress
        self._tasks = RepairTasks(self._store)
        self._loop = asyncio.get_running_loop()
        self._obeyed_at = self._loop.time()
        self._looked_at = 0.0
        self._given = Order(DRAINING)
        self._held: Collection[int] | None = None
        self._least_bytes = 0
        self._open_since: dict[int, tuple[Fragment, float]] = {}
        self._with_task: set[int] = set()  # in the step before
        self._turns = Rotation(_REREAD_S)
        self._why: dict[int, str] = {}  # why a ledger was not recovered
        self._recovered = 0
        self.stage = ""
        """The order that stands, or may stand: it outlives the drain. "" for none."""
        self._name = f"drain.{context.draw_token()}"
        self._worker: OwnedTask | None = None

    # --- the whole -----------------------------------------------------------------------------

    async def plan(self) -> DrainPlan:
        """Look at every ledger, and change nothing.

        Raises:
            NoSuchKeyError: there is no such bookie, or no such successor.
            InvalidArgumentError: the bookie is its own successor.
            InvalidTransitionError: the bookie has left already; or the successor takes no entries; or the
                bookie runs, and the metadata may be older than what it holds.
            MetadataCorruptError: the metadata of a ledger do not parse: it may name the bookie.
        """
        await self._context.pool.directory.refresh()
        await self._check_names()
        running = self._context.pool.directory.available
        await self._check_answered()
        plan = DrainPlan(self._bookie_id, self._successor, self._bookie_id in running)
        usable = {name: one for name, one in running.items() if one.is_writable and name != self._bookie_id}
        plan.ties, plan.stuck = await self._scan(usable)
        plan.least_bytes = self._least_bytes
        plan.free_bytes = sum(one.free_bytes or 0 for one in usable.values())
        plan.has_room = has_room(plan.least_bytes, usable.values())
        return plan

    async def run(self) -> DrainReport:
        """Drain the bookie, and remove its cookie. Cancelling leaves the order in place: run it again.

        Raises:
            BookieUnavailableError: the bookie runs, and does not obey in time.
            NotEnoughBookiesError: some ledger has no bookie to move to, or the others' disks are too small
                for certain. Nothing was changed.
            InvalidTransitionError: nothing has moved for `stall_s`; the message names the ledgers and why.
                Or the order was taken back meanwhile. Or see `plan`.
            MetadataUnavailableError: the store does not answer.
        """
        began, moved = self._loop.time(), 0
        order = (await Orders.read(self._store)).by_bookie.get(self._bookie_id)
        if order is None or order.mode != REMOVED:
            plan = await self.plan()
            if plan.is_refused:
                raise _too_few(plan)
            self.stage = DRAINING
            order = await change_order(self._store, self._bookie_id, self._begin)
            assert order is not None
            self._given = order
            obeys = await await_obedience(self._store, self._bookie_id, DRAINING, _OBEYED_WITHIN_S)
            if obeys is False:
                raise BookieUnavailableError(
                    f"bookie {self._bookie_id} runs, and has not obeyed the order within "
                    f"{_OBEYED_WITHIN_S:.0f} s: see its log, and run this again",
                    bookie_id=self._bookie_id,
                )
            self._obeyed_at = self._loop.time()
            try:
                moved = await self._move(plan)
            finally:
                await self._dismiss()
            await self._context.pool.directory.refresh()
            await self._check_answered()  # it may have been down when this began
            self.stage = REMOVED
            await change_order(self._store, self._bookie_id, self._end)
        self.stage = REMOVED
        await self._remove()
        took_s = round(self._loop.time() - began, 3)
        return DrainReport(self._bookie_id, self._successor, moved, self._recovered, took_s)

    async def _check_names(self) -> None:
        known = await registered_bookies(self._store)
        directory = self._context.pool.directory
        if self._bookie_id not in {*known, *directory.available, *directory.orders.by_bookie}:
            if await is_retired(self._store, self._bookie_id):
                raise InvalidTransitionError(f"bookie {self._bookie_id} has left the cluster already")
            raise NoSuchKeyError(
                f"there is no bookie {self._bookie_id}; the cluster's are {', '.join(known) or 'none'}"
            )
        if not self._successor:
            return
        if self._successor == self._bookie_id:
            raise InvalidArgumentError(f"bookie {self._bookie_id} cannot take its own place")
        if self._successor not in {*known, *directory.available}:
            raise NoSuchKeyError(
                f"there is no bookie {self._successor} to take the place of {self._bookie_id}; the cluster's "
                f"are {', '.join(known)}"
            )
        record = directory.available.get(self._successor)
        if record is None or not record.is_writable:
            raise InvalidTransitionError(
                f"bookie {self._successor} is {'down' if record is None else 'read-only'}, so it cannot take "
                f"the place of {self._bookie_id}"
            )

    async def _check_answered(self) -> None:
        """Check that the metadata are not older than what the bookie holds, where it runs."""
        if self._bookie_id not in self._context.pool.directory.available:
            return
        if unanswered_below((await SetBacks.read(self._store)).events, self._bookie_id):
            raise InvalidTransitionError(
                "the metadata store was set back to an older copy, which may know less of what bookie "
                f"{self._bookie_id} holds: first answer with `bookie-aio bookie accept-metadata`"
            )

    def _begin(self, order: Order | None) -> Order:
        if order is not None and order.mode == REMOVED:
            raise InvalidTransitionError(
                f"bookie {self._bookie_id} is being removed by another process: run this again"
            )
        is_same = order is not None and order.is_leaving
        since_ms = order.since_ms if order is not None and is_same else self._context.now_ms()
        return Order(DRAINING, self._successor, since_ms)

    def _end(self, order: Order | None) -> Order:
        """Only under the order that held all the time is the bookie as empty as it was found to be."""
        if order is None or order not in (self._given, replace(self._given, mode=REMOVED)):
            raise self._cancelled()
        return replace(self._given, mode=REMOVED)

    def _cancelled(self) -> InvalidTransitionError:
        return InvalidTransitionError(
            f"the order to bookie {self._bookie_id} was taken back, or given anew: it is not removed"
        )

    # --- looking -------------------------------------------------------------------------------

    async def _scan(self, usable: Collection[str] = ()) -> tuple[dict[int, Ties], list[int]]:
        """Look at every ledger; return those that tie the bookie, and those of them that have no substitute.

        Raises:
            MetadataCorruptError: a ledger's metadata do not parse.
        """
        self._held = await self._list_held()
        await self._store.sync(KEY_LEDGERS)
        found: dict[int, Ties] = {}
        stuck: list[int] = []
        self._least_bytes = 0
        async with aclosing(all_metadata(self._context)) as ledgers:
            async for ledger_id, metadata in ledgers:
                if isinstance(metadata, MetadataCorruptError):
                    raise metadata
                with suppress(NoSuchLedgerError):
                    ties, has_place = await self._look(metadata, usable)
                    if ties:
                        found[ledger_id] = ties
                        self._least_bytes += least_bytes_owed(metadata, self._bookie_id)
                    if not has_place:
                        stuck.append(ledger_id)
        return found, stuck

    async def _look(self, metadata: LedgerMetadata, usable: Collection[str] = ()) -> tuple[Ties, bool]:
        metadata, layout, _ = await layout_in_full(self._context, metadata)
        # One that does not say may hold entries that a recovery has just stored there.
        is_held = self._held is None or metadata.ledger_id in self._held
        ties = ties_of(metadata, layout, self._bookie_id, is_held=is_held)
        if Ties.WRITER not in ties:
            self._open_since.pop(metadata.ledger_id, None)
        return ties, has_substitute(layout, self._bookie_id, usable)

    def _due(self, ties: dict[int, Ties], refs: Iterable[TaskRef], elapsed_s: float) -> set[int]:
        """Return the ledgers to look at in this step. The last look asks about all.

        They are those that need no task to move, those whose task has gone, and a few whose turn has come.
        """
        gone = self._with_task.difference(ref.ledger_id for ref in refs)
        moving = {one for one, each in ties.items() if each & (Ties.WRITER | Ties.RECOVERY)}
        turns = self._turns.next(sorted(ties), elapsed_s, _REREADS_MAX)
        return moving | (gone & ties.keys()) | set(turns)

    async def _look_again(self, ledger_ids: Iterable[int]) -> dict[int, Ties]:
        """Look at some ledgers; return those that still tie the bookie."""
        found: dict[int, Ties] = {}

        async def look(ledger_id: int) -> None:
            with suppress(NoSuchLedgerError):
                metadata, _ = await self._context.ledgers.read(ledger_id)
                ties, _ = await self._look(metadata)
                if ties:
                    found[ledger_id] = ties
                if Ties.WRITER in ties or Ties.RECOVERY in ties:
                    self._note_open(metadata)

        await for_each(list(ledger_ids), look, self._config.reads_at_once)
        return found

    def _note_open(self, metadata: LedgerMetadata) -> None:
        known = self._open_since.get(metadata.ledger_id)
        if known is None or known[0] != metadata.last_fragment:
            self._open_since[metadata.ledger_id] = (metadata.last_fragment, self._loop.time())

    async def _list_held(self) -> set[int] | None:
        """Return the ledgers that the bookie holds anything of, as it says; None where it does not say."""
        if self._bookie_id not in self._context.pool.directory.available:
            return None
        try:
            connection = await self._context.pool.get(self._bookie_id)
            return await list_ledgers(connection, LEDGER_ID_MAX + 1, _CALL_TIMEOUT_S)
        except BookKeeperError as error:
            logger.warning("bookie=%s does not say what it holds: %s", self._bookie_id, error)
            return None

    # --- moving --------------------------------------------------------------------------------

    async def _move(self, plan: DrainPlan) -> int:
        """Return when no ledger ties the bookie, with the number of ledgers that did."""
        ties = plan.ties
        now = self._loop.time()
        pace = Pace(now, len(ties))
        while True:
            orders = await Orders.read(self._store)
            if orders.by_bookie.get(self._bookie_id) != self._given:
                raise self._cancelled()
            refs = await self._tasks.refs()
            before, now = now, self._loop.time()
            due = self._due(ties, refs, now - before)
            ties = {one: each for one, each in ties.items() if one not in due} | await self._look_again(due)
            if not ties and now >= self._obeyed_at + self._settle_s:
                await self._context.pool.directory.refresh()
                ties, _ = await self._scan()
                if not ties:
                    return pace.done + pace.left
            pace.note(now, len(ties))
            if any(each & _BY_TASKS for each in ties.values()):
                await self._look_at_workers(pace)
            refs = await self._make_tasks(ties, refs, orders)
            await self._recover(ties)
            await self._hire()
            is_paused = await self._tasks.is_paused()
            if is_paused:
                pace.note_pause(now)
            self._report(ties, pace, len(refs), is_paused=is_paused)
            if ties and pace.idle_s(now) > self._stall_s:
                await self._check_stalled(ties, refs)
            await asyncio.sleep(_STEP_S)

    def _report(self, ties: dict[int, Ties], pace: Pace, tasks: int, *, is_paused: bool) -> None:
        def count(tie: Ties) -> int:
            return sum(1 for each in ties.values() if tie & each)

        self._on_progress(
            DrainProgress(
                bookie_id=self._bookie_id,
                ledgers_moved=pace.done,
                ledgers_left=len(ties),
                copies_left=count(_BY_TASKS),
                writers_left=count(Ties.WRITER),
                recoveries_left=count(Ties.RECOVERY),
                tasks=tasks,
                estimate_s=pace.estimate_s(self._loop.time()),
                is_paused=is_paused,
                is_behind=self._is_behind(pace),
            )
        )

    def _is_behind(self, pace: Pace) -> bool:
        now = self._loop.time()
        return pace.still_s(now) > self._stall_s > pace.idle_s(now)

    async def _look_at_workers(self, pace: Pace) -> None:
        """Note what workers do, once nothing has moved for a while: they may have more urgent ledgers."""
        now = self._loop.time()
        is_due = now >= self._looked_at + self._stall_s / _LOOKS
        if is_due and pace.still_s(now) > self._stall_s / _LOOKS:
            self._looked_at = now
            pace.note_workers(now, await self._tasks.workers())

    async def _make_tasks(self, ties: dict[int, Ties], refs: list[TaskRef], orders: Orders) -> list[TaskRef]:
        """Make the tasks that are not there, and return all tasks; forget the ledgers that are deleted."""
        with_task = {ref.ledger_id for ref in refs}
        wanted = [one for one, each in sorted(ties.items()) if _BY_TASKS & each and one not in with_task]
        # All drains share a quarter of the places, and the tasks that failed keep half of them
        # (`client_aio.core.failed_tasks`). So there is always room for ledgers that lack copies.
        share = max(self._config.tasks_max // _TASKS_SHARE // max(len(orders.leaving), 1), 1)
        room = max(min(self._config.tasks_max - len(refs), share - len(ties.keys() & with_task)), 0)

        async def make(ledger_id: int) -> None:
            try:
                metadata, _ = await self._context.ledgers.read(ledger_id)
                # The bookie's own copies are good ones: ledgers that lack copies go first.
                ref = TaskRef(metadata.write_quorum, ledger_id, self._context.draw_token())
                task = RepairTask({REASON_LEAVING: [self._bookie_id]}, self._context.now_ms())
                await self._tasks.create(ref, task)
                refs.append(ref)
            except NoSuchLedgerError:
                ties.pop(ledger_id, None)

        await for_each(wanted[:room], make, self._config.reads_at_once)
        self._with_task = {ref.ledger_id for ref in refs}
        return refs

    async def _hire(self) -> None:
        """Work in this process, where no worker of the cluster is alive that takes tasks."""
        names = [] if self._worker is not None else await self._tasks.worker_names()
        if self._worker is None and all(name.startswith(BY_HAND) for name in names):
            worker = Worker(self._context, self._config, self._name)
            self._worker = OwnedTask(worker.run, "repair worker of a drain")

    async def _dismiss(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.cancel()
            await worker.wait()

    async def _recover(self, ties: dict[int, Ties]) -> None:
        """Recover ledgers that stay on the bookie: an abandoned recovery's always, others on demand."""
        now = self._loop.time()
        for ledger_id, each in ties.items():
            fragment, since = self._open_since.get(ledger_id, (None, now))
            after_s = _RECOVERY_GRACE_S if Ties.RECOVERY in each else self._recover_after_s
            if fragment is None or after_s is None or now < since + after_s:
                continue
            self._open_since[ledger_id] = (fragment, now)  # The next attempt comes as much later.
            try:
                await self._recover_one(ledger_id, fragment)
            except NoSuchLedgerError:
                continue
            except MetadataError:
                raise
            except BookKeeperError as error:
                logger.warning("ledger=%d is not recovered: %s", ledger_id, error)
                self._why[ledger_id] = str(error)

    async def _recover_one(self, ledger_id: int, fragment: Fragment) -> None:
        """Close a ledger, or take it over if it is unbounded, while its last fragment is this one."""
        metadata, version = await self._context.ledgers.read(ledger_id, sync=True)
        if metadata.password is not None:
            self._why[ledger_id] = "it has a password: close it by `ledger recover`"
        elif metadata.is_unbounded and self._recover_after_s is None:
            self._why[ledger_id] = (
                "it is unbounded, and its writer has not moved; --recover-after takes it over"
            )
        else:
            self._recovered += await close_or_take_over(self._context, metadata, version, fragment)

    async def _check_stalled(self, ties: dict[int, Ties], refs: Iterable[TaskRef]) -> None:
        """Raise InvalidTransitionError where nobody works at any of the ledgers."""
        if await self._tasks.locked() & ties.keys():
            return
        by_ledger = {ref.ledger_id: ref for ref in refs}
        reasons = []
        for ledger_id in sorted(ties)[:_NAMED_MAX]:
            why = self._why.get(ledger_id, "")
            if not why and ledger_id in by_ledger:
                with suppress(NoSuchKeyError, MetadataCorruptError):
                    why = (await self._tasks.read(by_ledger[ledger_id]))[0].error
            reasons.append(f"ledger {ledger_id}: {why or _reason(ties[ledger_id])}")
        raise InvalidTransitionError(
            f"bookie {self._bookie_id} goes on draining, but for {self._stall_s:g} s none of {len(ties):,} "
            f"ledgers has moved, and no worker has got on with others; {'; '.join(reasons)}. Run this again "
            "after that"
        )

    # --- the end -------------------------------------------------------------------------------

    async def _remove(self) -> None:
        """Have the bookie stop, retire its id, and remove its cookie. Each step may be repeated."""
        try:
            async with (
                asyncio.timeout(_STOPPED_WITHIN_S),
                aclosing(self._store.watch(available_key(self._bookie_id))) as changes,
            ):
                async for _ in changes:
                    if not await self._is_registered():
                        break
        except TimeoutError:
            raise BookieUnavailableError(
                f"bookie {self._bookie_id} holds nothing any more, and has not stopped within "
                f"{_STOPPED_WITHIN_S:.0f} s: stop it, and run this again",
                bookie_id=self._bookie_id,
            ) from None
        # Before the cookie goes: a new bookie under the id would have lost the fences of this one (rule 6).
        await retire(self._store, self._bookie_id)
        # Its age stays: a bookie that stood still and misses it would report that the store was set back.
        with suppress(NoSuchKeyError):
            await self._store.delete(cookie_key(self._bookie_id))
        await change_order(self._store, self._bookie_id, lambda _: None)

    async def _is_registered(self) -> bool:
        await self._store.sync(available_key(self._bookie_id))  # it may just be starting
        try:
            await self._store.read(available_key(self._bookie_id))
        except NoSuchKeyError:
            return False
        return True


def _reason(ties: Ties) -> str:
    if Ties.WRITER in ties:
        return "it is open, and its writer has not moved; --recover-after closes it, or takes it over"
    if Ties.RECOVERY in ties:
        return "its recovery does not end"
    if Ties.ABSENT in ties:
        return "a repair found some of its entries nowhere, and this bookie may hold them"
    return "its copies are not made"


def _too_few(plan: DrainPlan) -> NotEnoughBookiesError:
    if not plan.stuck:
        return NotEnoughBookiesError(
            f"bookie {plan.bookie_id} cannot leave: others have to take {plan.least_bytes:,} bytes at least, "
            f"and {plan.free_bytes:,} bytes are free on those that take entries. Start another bookie first"
        )
    named = ", ".join(map(str, plan.stuck[:_NAMED_MAX]))
    more = "" if len(plan.stuck) <= _NAMED_MAX else ", …"
    return NotEnoughBookiesError(
        f"bookie {plan.bookie_id} cannot leave: {len(plan.stuck):,} ledgers have no other bookie to move to, "
        f"since all that take entries are in their ensembles already ({named}{more}). Start another bookie "
        "first"
    )


async def cancel_drain(store_context: ClientContext, bookie_id: str) -> bool:
    """Take the order to leave back; return whether there was one.

    Raises:
        InvalidTransitionError: the bookie has lost its last seat, and is being removed.
    """

    def decide(order: Order | None) -> Order | None:
        if order is not None and order.mode == REMOVED:
            raise InvalidTransitionError(
                f"bookie {bookie_id} holds nothing any more and is being removed: run the command again"
            )
        return None if order is not None and order.mode == DRAINING else order

    store = store_context.ledgers.store
    before = (await Orders.read(store)).by_bookie.get(check_bookie_id(bookie_id))
    await change_order(store, bookie_id, decide)
    return before is not None and before.mode == DRAINING
