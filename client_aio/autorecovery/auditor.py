"""The auditor: finds the ledgers that lack copies, and makes a repair task for each.

One auditor of the cluster is elected. An election is no lock, so two may audit for a moment. Then a ledger
may get two tasks: the worker of the second one finds nothing to do.

The shell around `client_aio.core.audit`. Three tasks run while this process leads:

- *Passes* over the metadata keep the index of ledgers by bookie. The first reads all ledgers, later ones read
  new ledgers and those that are not CLOSED. A look at the registered bookies costs no read.
- *Checks* compare what bookies list with what they owe, at a bounded rate. A ledger is checked after it was
  closed or began another fragment, after a bookie of it came back or reported lost data, and once a day. So
  the seats that were never filled are found: those of fragments that began below E, or ended at the ack
  quorum. Where a bookie reported lost data, the checks of its ledgers come before all others.
  What a check finds is added to the task that there is, which may become more urgent by it. A ledger that
  is being repaired is checked behind that. A check in which a running bookie gave no answer is made again
  after it answers.
- *Looks* notice the bookies that are gone for longer than the delay, and make the tasks.

With `recover_after_s`, a fourth one finds the ledgers whose writer or whose recovery is gone.

With a placement policy that has write sets span racks, a pass also notes the ledgers that one exchange of a
bookie would spread better. Their tasks come last.

Tasks that fail again and again give their places to others where they fill the table of tasks
(`client_aio.core.failed_tasks`). The next auditor has their ledgers in its own index, or checks them again.

An election loses what is in memory. The record says which starts of bookies are settled, and whose turn to be
checked came last. The next auditor begins anew for every other start (`client_aio.core.audit`). A ledger that
was closed shortly before, or in between, has its turn within a day. Bookies may be settled although they lack
entries of it: checks that were made while it was open leave its last fragment out.

Nothing here changes a ledger or a bookie.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from client_aio.admin.replicas import list_replicas, parts_of, verify_replica
from client_aio.autorecovery.abandoned import AbandonedLedgers
from client_aio.autorecovery.survey import AUDITOR_ELECTION, figures_of, layout_in_full
from client_aio.core.audit import (
    BookieStates,
    Checks,
    LedgerIndex,
    ReplicaState,
    Rotation,
    copies_by_replicas,
    dealt,
    marks_stay,
    seats_to_repair,
)
from client_aio.core.failed_tasks import FailedTasks
from client_aio.core.repair_plan import Part
from client_aio.election import LeaderElection
from metadata.access.repair_tasks import (
    COPIES_MAX,
    REASON_ABANDONED,
    REASON_LOST,
    REASON_MARKED,
    REASON_MISSING,
    REASON_RACKS,
    AuditorRecord,
    RepairTask,
    RepairTasks,
    TaskRef,
    new_reasons,
)
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
)
from metadata.ids import MALFORMED
from metadata.owned_task import for_each

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping

    from client_aio.admin.replicas import Replica
    from client_aio.config import AutoRecoveryConfig
    from client_aio.context import ClientContext
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)

_CHECKS_AT_ONCE = 4
_CHECK_AGAIN_S = 10.0
_LOOKS_PUT_OFF = 10
"""So many looks later a ledger is checked that is being repaired: each attempt takes the place of a check."""
_REREAD_S = 5.0
_REREADS_MAX = 500
"""At most so many open ledgers on lost bookies are read again at a time."""
_READ_AHEAD = 1024
"""A pass reads metadata in bites of so many ledgers, so that the first one needs no list of all of them."""
_ROUND_S = 60.0
"""Tasks that failed change places with others so often, where they fill the table."""
_SAMPLE_ENTRIES = 64
"""So many entries of one replica are read in a check, at random, with their digests."""


def replica_states(replicas: Iterable[Replica]) -> list[ReplicaState]:
    """Return the states of the replicas of complete fragments."""
    return [
        ReplicaState(
            one.bookie_id, one.first_entry, one.entries_missing == 0, one.is_damaged, bool(one.error)
        )
        for one in replicas
        if one.entries_owed is not None
    ]


def racks_of(context: ClientContext) -> tuple[dict[str, str], list[str]]:
    """Return the rack of each bookie that runs, and the bookies that may be chosen for racks' sake."""
    running = context.pool.directory.available
    racks = {name: record.rack for name, record in running.items()}
    return racks, [name for name, one in running.items() if one.is_writable and not one.is_tight]


class Auditor:
    """A candidate for the cluster's auditor."""

    def __init__(self, context: ClientContext, config: AutoRecoveryConfig, name: str) -> None:
        self._context = context
        self._config = config
        self._name = name
        self._tasks = RepairTasks(context.ledgers.store)
        self._loop = asyncio.get_running_loop()
        self.is_elected = False
        self._begin(AuditorRecord())

    def _begin(self, record: AuditorRecord) -> None:
        """Begin with an empty index, and with what the auditor before this one saw of the bookies."""
        config = self._config
        self.index = LedgerIndex()
        self.states = BookieStates(
            config.lost_bookie_delay_s, 2 * config.look_interval_s, record.gone_s, record.settled
        )
        self.record = AuditorRecord(
            name=self._name,
            delay_s=config.lost_bookie_delay_s,
            checked_turn=record.checked_turn,
            settled=record.settled,
        )
        self._versions: dict[int, Version] = {}  # of unbounded ledgers, whose pages cost further reads
        self._unreadable: set[int] = set()
        self._last_fragments: dict[int, int] = {}  # where the last fragments of growing ledgers begin
        self._growing_turns = Rotation(1e-6)  # all of them in each pass, up to the limit
        self._closed_turns = Rotation(config.reread_interval_s)
        self._check_turns = Rotation(config.check_interval_s, record.checked_turn)
        self._listed: list[int] = []
        self._checks = Checks()
        self._back: dict[str, str] = {}  # bookies whose ledgers are to be checked, and what they drew
        self._settling: dict[str, tuple[float, str]] = {}  # when these checks began, and what they drew
        self._silent: dict[str, set[int]] = {}  # the ledgers in whose checks a bookie gave no answer
        self._found: dict[int, tuple[int, dict[str, list[str]]]] = {}  # by checks, and no task yet
        self._refs: dict[int, TaskRef] = {}
        self._reasons: dict[int, dict[str, list[str]]] = {}  # those of the tasks that this auditor made
        self._told: dict[str, tuple[Any, ...]] = {}  # what each bookie said last of lost data
        self._failed = FailedTasks(config.tasks_max)
        self._abandoned: AbandonedLedgers | None = None
        if config.recover_after_s is not None:
            context, grace_s = self._context, config.recover_after_s
            self._abandoned = AbandonedLedgers(context, grace_s, config.reads_at_once)
        self._round_at = 0.0
        self._waiting = 0  # ledgers that had no task yet
        self._reads = 0
        self._pass_now = asyncio.Event()
        self._reread_at = 0.0
        self._turns_of_growing = Rotation(_REREAD_S)
        self._is_dirty = True  # whether tasks may have to be made
        self._written: AuditorRecord | None = None

    async def run(self) -> None:
        """Stand for election, and audit while elected, until cancelled."""
        async with LeaderElection(self._tasks.store, AUDITOR_ELECTION, self._name.encode()) as election:
            while True:
                await election.gained()
                logger.info("auditor=%s audits the cluster", self._name)
                self.is_elected = True
                try:
                    async with asyncio.TaskGroup() as group:
                        lost = group.create_task(election.lost())
                        jobs = [group.create_task(job()) for job in await self._jobs()]
                        await asyncio.wait([lost, *jobs], return_when=asyncio.FIRST_COMPLETED)
                        for task in (lost, *jobs):
                            task.cancel()
                except* BookKeeperError as errors:
                    logger.warning("auditor=%s begins again: %s", self._name, errors.exceptions[0])
                    await asyncio.sleep(self._config.look_interval_s)
                finally:
                    self.is_elected = False

    @property
    def tasks_known(self) -> int:
        """Return how many tasks there are, as this auditor knows while it is elected."""
        return len(self._refs)

    async def _jobs(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        record, _ = await self._tasks.auditor()
        self._begin(record)
        return [
            self._again(self._pass, self._config.pass_interval_s, self._pass_now),
            self._again(self._look, self._config.look_interval_s),
            self._again(self._check_due, 1.0),
            self._again(self._ask_bookies, self._config.info_interval_s),
            *([self._again(self._look_for_abandoned, self._config.pass_interval_s)] * bool(self._abandoned)),
        ]

    def _again(
        self,
        step: Callable[[float], Awaitable[None]],
        interval_s: float,
        wake: asyncio.Event | None = None,
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return a job that runs a step for ever, with the time since it began the step before.

        Args:
            wake: ends the pause between two steps early, when it is set.
        """
        wake = wake or asyncio.Event()

        async def run() -> None:
            before = self._loop.time()
            while True:
                now = self._loop.time()
                elapsed_s, before = now - before, now
                try:
                    await step(elapsed_s)
                except ClientClosedError:
                    raise
                except BookKeeperError as error:
                    logger.warning("auditor=%s %s: %s", self._name, step.__name__.strip("_"), error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await wake.wait()
                wake.clear()

        return run

    # --- the index -----------------------------------------------------------------------------

    async def _pass(self, elapsed_s: float) -> None:
        """List all ledgers, and read those that may have changed."""
        began = self._loop.time()
        config, growing = self._config, self.index.growing
        wanted: list[int] = self._growing_turns.next(sorted(growing), elapsed_s, config.reads_per_pass)
        closed = [one for one in self._listed if one not in growing]
        wanted += self._closed_turns.next(closed, elapsed_s, config.reads_per_pass)
        listed: list[int] = []
        async for ledger_id in self._context.ledgers.ledger_ids(sync=True):
            listed.append(ledger_id)
            if ledger_id not in self.index or ledger_id in self._unreadable:
                wanted.append(ledger_id)
            if len(wanted) >= _READ_AHEAD:
                await self._read_all(wanted)
                wanted.clear()
        await self._read_all(wanted)
        present = set(listed)
        for ledger_id in [one for one in self.index.ids() if one not in present]:
            self._drop(ledger_id)
        self._unreadable &= present
        self._listed = listed
        self._note_racks()
        self.record = replace(
            self.record,
            ledgers=len(self.index),
            ledgers_open=len(self.index.growing),
            ledgers_unreadable=len(self._unreadable),
            passes=self.record.passes + 1,
            pass_s=round(self._loop.time() - began, 3),
            reads=self._reads,
        )

    def _note_racks(self) -> None:
        """Note the ledgers with write sets on one rack, where the placement policy has them span racks."""
        if not self._context.finder.spans_racks:
            return
        racks, candidates = racks_of(self._context)
        # Half of the places at most: no worker may have a policy for them.
        for ledger_id in self.index.on_one_rack(racks, candidates)[: (self._config.tasks_max + 1) // 2]:
            if not any(ledger_id in known for known in (self._refs, self._found, self._failed.aside)):
                self._found[ledger_id] = (COPIES_MAX, {REASON_RACKS: []})
                self._is_dirty = True

    async def _read_all(self, ledger_ids: Iterable[int]) -> None:
        """Read the metadata of some ledgers, a few at once."""
        await for_each(list(ledger_ids), self._read, self._config.reads_at_once)

    async def _read(self, ledger_id: int) -> None:
        self._reads += 1
        try:
            metadata, version = await self._context.ledgers.read(ledger_id)
            if metadata.is_unbounded and self._versions.get(ledger_id) == version:
                return  # Every change of the pages changes the head.
            metadata, layout, pages = await layout_in_full(self._context, metadata)
            self._reads += pages
        except NoSuchLedgerError:
            self._drop(ledger_id)
            return
        except MetadataCorruptError as error:
            self._note_unreadable(ledger_id, error)
            return
        if metadata.is_unbounded:
            self._versions[ledger_id] = version
        was_known, was_growing = ledger_id in self.index, ledger_id in self.index.growing
        was_unreadable = ledger_id in self._unreadable
        self._unreadable.discard(ledger_id)
        self._is_dirty |= self.index.note(ledger_id, layout)
        before, last = self._last_fragments.pop(ledger_id, None), metadata.last_fragment.first_entry
        if not metadata.is_closed:
            self._last_fragments[ledger_id] = last
        is_new = bool(self.record.passes) and not was_known
        has_ended = metadata.is_closed and (was_growing or was_unreadable or is_new)
        if has_ended or before not in (None, last) or (is_new and layout.complete):
            # What is complete now may have been written, or closed, below E or at its ack quorum. Or its
            # check had no metadata.
            self._checks.add(ledger_id, self._loop.time() + self._config.lost_bookie_delay_s)

    def _note_unreadable(self, ledger_id: int, error: MetadataCorruptError) -> None:
        if ledger_id not in self._unreadable:
            logger.error("ledger=%d cannot be audited: %s", ledger_id, error)
        self._unreadable.add(ledger_id)
        self._versions.pop(ledger_id, None)  # Its pages are read again.

    def _drop(self, ledger_id: int) -> None:
        self.index.drop(ledger_id)
        self._versions.pop(ledger_id, None)
        self._last_fragments.pop(ledger_id, None)
        self._unreadable.discard(ledger_id)
        self._found.pop(ledger_id, None)
        self._failed.brought_back(ledger_id)

    # --- looks, and tasks ----------------------------------------------------------------------

    async def _look(self, elapsed_s: float) -> None:
        """Notice the bookies that are gone for too long, and those that have come back."""
        running = {name: record.nonce for name, record in self._context.pool.directory.available.items()}
        # A bookie that no ledger in the index names may be named by a new one. Until there is an index, those
        # that the auditor before this one saw to be gone count as named.
        known = {*self.index.bookies(), *self._context.pool.directory.last_known}
        if not self.record.passes:
            known.update(self.states.gone_s)
        self._back.update((name, running[name]) for name in self.states.look(known, running, elapsed_s))
        if self.record.passes:
            self._check_those_back()
        settled = {name: start for name, start in self.record.settled.items() if running.get(name) == start}
        self.record = replace(self.record, settled=settled)
        # One that is away now is checked once more when it is back, maybe within the same start.
        self._settling = {name: one for name, one in self._settling.items() if name in running}
        self._silent = {name: one for name, one in self._silent.items() if name in running}
        lost = self.states.lost
        if lost != self.record.lost:
            self._is_dirty = True
            self._waiting = 0  # Look at all ledgers again.
            for ledger_id, one in self._failed.changed(self.index, lost):
                self._find(ledger_id, one.copies, one.reasons)
            self._pass_now.set()  # The newest ledgers are not in the index yet.
            logger.warning("auditor=%s lost bookies: %s", self._name, ", ".join(lost) or "none")
        await self._reread_growing(lost)
        quantum = max(1.0, min(10.0, self._config.lost_bookie_delay_s / 10))
        gone_s = {name: gone_s // quantum * quantum for name, gone_s in self.states.gone_s.items()}
        self.record = replace(self.record, lost=lost, gone_s=gone_s)
        if self._is_dirty or self._refs or self._failed.aside:
            await self._write()  # Workers ask the record whether the bookies of a task are still lost.
            await self._make_tasks(lost)
        await self._write()

    async def _write(self) -> bool:
        """Write the record where it has changed; return False where another auditor wrote at once."""
        record = self.record  # It may change meanwhile.
        if record != self._written and await self._tasks.write_auditor(record):
            self._written = record
        return record == self._written

    async def _reread_growing(self, lost: list[str]) -> None:
        """Read the open ledgers on lost bookies more often than others: their writers replace these bookies.

        The fragment before such a change is complete, and is repaired.
        """
        now = self._loop.time()
        if lost and now >= self._reread_at:
            self._reread_at = now + _REREAD_S
            growing = self.index.growing_on(lost)
            await self._read_all(self._turns_of_growing.next(growing, _REREAD_S, _REREADS_MAX))

    async def _make_tasks(self, lost: list[str]) -> None:
        """Make the tasks that there have to be and are not, those with the fewest good copies first."""
        # Reversed: where a ledger has two tasks, the one with fewer good copies counts.
        refs = {ref.ledger_id: ref for ref in reversed(await self._tasks.refs())}
        done = [ledger_id for ledger_id in self._refs if ledger_id not in refs]
        self._refs = refs
        if done:
            await self._read_all(done)
            for ledger_id in done:
                self._reasons.pop(ledger_id, None)
        await self._give_way()
        # Before anything else, since it takes no place: a task may be more urgent than its key says.
        here = {one: found for one, found in self._found.items() if one in refs}
        await for_each(list(here), lambda one: self._make_task(one, *here[one]), self._config.reads_at_once)
        room = max(self._config.tasks_max - len(refs), 0)
        has_room = room > self._config.tasks_max // 5 or not self._waiting
        if not (has_room and (self._is_dirty or self._waiting)):
            return
        self._is_dirty = False
        aside = self._failed.aside
        # Not all of them: 100,000 ledgers at once would hold the event loop for seconds.
        scarcest, total = self.index.lacking(lost, self._config.tasks_max, aside)
        lacking = {one.ledger_id: (one.copies, {REASON_LOST: list(one.bookies)}) for one in scarcest}
        for ledger_id, (copies, reasons) in self._found.items():
            before, others = lacking.get(ledger_id, (copies, {}))
            lacking[ledger_id] = (min(copies, before), {**others, **reasons})
        order = sorted(lacking, key=lambda one: (lacking[one][0], one))
        new = [one for one in order if one not in refs and one not in aside]
        changed = [
            one
            for one in order
            if one in refs
            and (
                lacking[one][0] < refs[one].copies or new_reasons(lacking[one][1], self._reasons.get(one, {}))
            )
        ]
        self._waiting = left = total - len(scarcest) + max(len(new) - room, 0)
        self._note_waiting()
        by_copies = [list(each) for _, each in itertools.groupby(new, key=lambda one: lacking[one][0])]
        counts = dealt([len(each) for each in by_copies], room, bool(aside))
        to_make = changed + [one for each, n in zip(by_copies, counts, strict=True) for one in each[:n]]
        try:
            await for_each(
                to_make,
                lambda ledger_id: self._make_task(ledger_id, *lacking[ledger_id]),
                self._config.reads_at_once,
            )
        except BaseException:
            self._is_dirty = True
            raise
        if changed or new:
            logger.info("auditor=%s made %d repair tasks, %d ledgers wait", self._name, len(to_make), left)

    def _note_waiting(self) -> None:
        """Note how many ledgers have no task now. Those that were set aside are told apart."""
        aside = {str(copies): count for copies, count in self._failed.by_copies.items()}
        self.record = replace(self.record, waiting=self._waiting + len(self._failed.aside), aside=aside)

    def _find(self, ledger_id: int, copies: int, reasons: dict[str, list[str]]) -> None:
        """Note what only a check knows of a ledger: its task is made, or gets these reasons, too."""
        if found := {reason: bookies for reason, bookies in reasons.items() if reason != REASON_LOST}:
            fewest, before = self._found.get(ledger_id, (copies, {}))
            self._found[ledger_id] = (min(copies, fewest), {**before, **found})
        self._is_dirty = True

    async def _give_way(self) -> None:
        """Have tasks that fail again and again give their places to others, and bring some of those back.

        The record is written before the first task is deleted. It says that the bookies which only checks
        know to lack entries are not settled. So no auditor that is killed here takes a ledger with it.
        """
        config, failed, now = self._config, self._failed, self._loop.time()
        for ledger_id, one in [(one, failed.aside[one]) for one in self._refs if one in failed.aside]:
            # Another auditor or a drain made its task, maybe without these reasons.
            self._find(ledger_id, one.copies, one.reasons)
            failed.brought_back(ledger_id)
        room, fifth = config.tasks_max - len(self._refs), config.tasks_max // 5
        is_due = now >= self._round_at or len(self._refs) < fifth  # They are repaired, so there is no turn.
        if not is_due or not (room <= fifth or failed.aside):
            return
        self._round_at = now + min(_ROUND_S, config.retry_max_s)
        tasks: dict[TaskRef, RepairTask] = {}
        versions: dict[TaskRef, Version] = {}

        async def read(ref: TaskRef) -> None:
            with suppress(NoSuchKeyError, MetadataCorruptError):
                tasks[ref], versions[ref] = await self._tasks.read(ref)

        async def take_away(ref: TaskRef) -> None:
            if await self._tasks.done(ref, versions[ref]):
                self._refs.pop(ref.ledger_id, None)
                self._reasons.pop(ref.ledger_id, None)
            else:  # Somebody has changed it.
                failed.brought_back(ref.ledger_id)

        await for_each(list(self._refs.values()), read, config.reads_at_once)
        going, back = failed.choose(tasks, room)
        coming = [(one, failed.aside[one]) for one in back]
        for ref in going:
            failed.set_aside(ref, tasks[ref])
        self._unsettle(failed.bookies_checked)
        self._note_waiting()
        if going and not await self._write():
            return
        await for_each(going, take_away, config.reads_at_once)
        for ledger_id, one in coming:
            ref = TaskRef(one.copies, ledger_id, self._context.draw_token())
            await self._tasks.create(ref, one.task)
            self._refs[ledger_id] = ref
            self._reasons[ledger_id] = one.reasons
            failed.brought_back(ledger_id)
        self._note_waiting()
        if going or coming:
            logger.info(
                "auditor=%s sets %d tasks aside, and %d are back", self._name, len(going), len(coming)
            )

    async def _make_task(self, ledger_id: int, copies: int, reasons: dict[str, list[str]]) -> None:
        """Make a ledger's task, or add the reasons to the one there is, under compare-and-set."""
        known, token = self._refs.get(ledger_id), self._context.draw_token()
        ref, task = TaskRef(max(copies, 0), ledger_id, token), RepairTask(reasons, self._context.now_ms())
        is_new = known is None
        if known is not None:
            try:
                ref, task = await self._tasks.add(known, ref.copies, reasons, token)
            except (NoSuchKeyError, MetadataCorruptError):
                is_new = True
        if is_new:
            await self._tasks.create(ref, task)
        self._refs[ledger_id] = ref
        self._reasons[ledger_id] = task.reasons
        fewest, found = self._found.get(ledger_id, (ref.copies, {}))
        # A check may have found more meanwhile.
        if fewest >= ref.copies and not new_reasons(found, task.reasons):
            self._found.pop(ledger_id, None)
        logger.debug("ledger=%d is to be repaired: copies=%d %s", ledger_id, ref.copies, task.reasons)

    # --- checks --------------------------------------------------------------------------------

    def _check_ledgers_of(self, bookie_id: str, *, is_urgent: bool = False) -> None:
        now = self._loop.time()
        for ledger_id in self.index.ledgers_of(bookie_id):
            self._checks.add(ledger_id, now, is_urgent=is_urgent)

    def _check_those_back(self) -> None:
        for bookie_id, start in self._back.items():
            logger.info("auditor=%s bookie=%s is back: its ledgers are checked", self._name, bookie_id)
            self._check_ledgers_of(bookie_id)
            self._settling[bookie_id] = self._loop.time(), start
        self._back.clear()

    def _check_those_missed(self, bookie_id: str) -> None:
        """Check the ledgers again in whose checks a bookie gave no answer: it answers now.

        Not at once: one that hangs again and again must not take the checks of others.
        """
        due = self._loop.time() + self._config.lost_bookie_delay_s
        for ledger_id in self._silent.pop(bookie_id, ()):
            self._checks.add(ledger_id, due)
            if bookie_id in self._settling:
                self._settling[bookie_id] = due, self._settling[bookie_id][1]

    def _settle(self) -> None:
        """Note the starts of bookies since when all ledgers were checked, and nothing waits for a task."""
        if not self._settling:
            return
        unsaid = {name for _, reasons in self._found.values() for names in reasons.values() for name in names}
        unsaid |= self._failed.bookies_checked | self._silent.keys()
        first_due = self._checks.first_due
        done = [name for name, (at, _) in self._settling.items() if at < first_due and name not in unsaid]
        new = {name: self._settling.pop(name)[1] for name in done}
        self.record = replace(self.record, settled={**self.record.settled, **new})

    def _unsettle(self, bookie_ids: Iterable[str]) -> None:
        settled = dict(self.record.settled)
        for name in bookie_ids:
            if name in settled:
                self._settling[name] = self._loop.time(), settled.pop(name)
        self.record = replace(self.record, settled=settled)

    async def _check_due(self, elapsed_s: float) -> None:
        """Check the ledgers that are due, and those whose turn has come."""
        count = max(int(self._config.checks_per_s), 1)
        left = self._checks.take(self._loop.time(), max(count - 1, 1))  # one is for the daily turns
        for ledger_id in self._check_turns.next(self._listed, elapsed_s, count - len(left)):
            left.setdefault(ledger_id, False)

        async def check(ledger_id: int) -> None:
            try:
                await self._check(ledger_id)
            except NoSuchLedgerError:
                self._drop(ledger_id)
            except MetadataCorruptError as error:
                self._note_unreadable(ledger_id, error)  # a pass reads it again
            del left[ledger_id]

        try:
            if left:
                # The task would get reasons that the repair under way is about to remove, and begin again.
                busy = left.keys() & await self._tasks.locked()
                for_s = _LOOKS_PUT_OFF * self._config.look_interval_s
                self._put_off({one: left.pop(one) for one in sorted(busy)}, for_s)
            await for_each(list(left), check, _CHECKS_AT_ONCE)
        except BookKeeperError:
            self._put_off(left, _CHECK_AGAIN_S)  # One error ends the others, too.
            raise
        self.record = replace(self.record, checked_turn=self._check_turns.behind)
        self._settle()

    def _put_off(self, ledger_ids: Mapping[int, bool], for_s: float) -> None:
        """Have ledgers checked later, each with whether it is urgent.

        The bookies that they name are not settled before.
        """
        again = self._loop.time() + for_s
        for ledger_id, is_urgent in ledger_ids.items():
            self._checks.add(ledger_id, again, is_urgent=is_urgent)
            for name in self.index.named(ledger_id, self._settling):
                self._settling[name] = max(self._settling[name][0], again), self._settling[name][1]

    async def _check(self, ledger_id: int) -> None:
        """Compare what the bookies of one ledger list with what they owe, and read a sample."""
        if ledger_id not in self.index:
            return
        metadata, _ = await self._context.ledgers.read(ledger_id)
        states = replica_states(await list_replicas(self._context, ledger_id))
        for one in states:
            if one.is_silent:
                self._silent.setdefault(one.bookie_id, set()).add(ledger_id)
        stay = marks_stay(metadata)
        seats = seats_to_repair(states, (), (), stay)
        bad = set(seats.in_place)
        if not bad:
            bad = await _sample(self._context, metadata, {one.bookie_id for one in states if one.is_silent})
        self.record = replace(self.record, checked=self.record.checked + 1)
        if not bad:
            return
        self._unsettle(bad)
        marked = {one.bookie_id for one in states if one.is_marked} & bad
        reasons = {REASON_MISSING: sorted(bad - marked), REASON_MARKED: sorted(marked)}
        found = {reason: bookies for reason, bookies in reasons.items() if bookies}
        copies = copies_by_replicas(metadata.write_quorum, states, stay, bad)
        aside = self._failed.aside.get(ledger_id)
        if aside is not None:
            if copies >= aside.copies and not new_reasons(found, aside.reasons):
                return
            self._find(ledger_id, aside.copies, aside.reasons)
            self._failed.brought_back(ledger_id)
        self._find(ledger_id, copies, found)

    async def _look_for_abandoned(self, elapsed_s: float) -> None:
        """Make tasks for ledgers whose writer or whose recovery is gone (`client_aio.core.abandonment`)."""
        if self._abandoned is None or not self.record.passes:
            return
        lost, config = self.states.lost, self._config
        count = max(int(config.checks_per_s * config.pass_interval_s), 1)
        found = await self._abandoned.look(self.index.unsettled(lost), lost, count)
        for ledger_id, copies in found.items():
            self._find(ledger_id, copies, {REASON_ABANDONED: []})

    async def _ask_bookies(self, elapsed_s: float) -> None:
        """Ask every bookie whether it lost data; where that has changed, check its ledgers."""
        if not self.record.passes:
            return
        for bookie_id, record in list(self._context.pool.directory.available.items()):
            try:
                figures = await figures_of(self._context, bookie_id, self._context.config.read_timeout_s)
                ledgers = figures["storage"]["ledgers"]
                # Not by counts: one mark may be lifted, and another one made, between two looks.
                told = (record.nonce, ledgers["all_damaged"], ledgers["last_mark"])
            except (BookKeeperError, *MALFORMED) as error:
                logger.info("auditor=%s bookie=%s says nothing: %s", self._name, bookie_id, error)
                continue
            self._check_those_missed(bookie_id)
            if told != self._told.get(bookie_id) and (ledgers["damaged"] or ledgers["all_damaged"]):
                logger.warning("auditor=%s bookie=%s lost data: %s", self._name, bookie_id, told)
                self._check_ledgers_of(bookie_id, is_urgent=True)
            self._told[bookie_id] = told


async def _sample(context: ClientContext, metadata: LedgerMetadata, silent: Collection[str]) -> set[str]:
    """Read a few entries of one replica; return its bookie if one is missing or damaged there.

    Bookies that have just given no answer are left out: each may cost a timeout.
    """
    parts, rng = parts_of(metadata), context.tokens
    if not parts:
        return set()
    part = rng.choice(parts)
    bookies = [name for name in part.bookies if name not in silent]
    if not bookies:
        return set()
    bookie_id = rng.choice(bookies)
    first = rng.randint(part.first_entry, part.last_entry)
    last = min(first + _SAMPLE_ENTRIES - 1, part.last_entry)
    sample = Part(first, last, part.content_term, part.bookies)
    found = await verify_replica(context, metadata, sample, bookie_id)
    # What was not read for an error counts as missing.
    return {bookie_id} if found.damaged or (found.missing and not found.error) else set()
