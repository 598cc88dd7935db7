"""The records of auto recovery in the metadata store: tasks, locks, workers, the auditor, and the pause.

    autorecovery/tasks/CC-LEDGER-TOKEN   a ledger that lacks copies; CC is the number of good copies
    autorecovery/locks/LEDGER            (ephemeral) the worker that repairs the ledger now
    autorecovery/workers/NAME            (ephemeral) a worker, and what it has done
    autorecovery/auditor                 what the auditor knows: its last pass, and bookies that are gone
    autorecovery/paused                  whether an operator has paused all workers

A task is a hint, never a proof. Its worker looks at the ledger's metadata and at the bookies before it
changes anything. So a task too many costs some requests, and a lost task is made again by an auditor.

The key of a task is never used twice: a token ends it. A late deletion of an old task cannot meet a new one.
Sorted by name, the tasks with the fewest good copies come first.

A lock spares two workers the same work. Nothing depends on it: rule 14 holds for repairs at the same time.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from metadata.errors import (
    KeyExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.ids import (
    KEY_AUDITOR,
    KEY_REPAIR_LOCKS,
    KEY_REPAIR_PAUSED,
    KEY_REPAIR_TASKS,
    KEY_REPAIR_WORKERS,
    LEDGER_ID_MAX,
    MALFORMED,
    boolean,
    check_bookie_id,
    check_ledger_id,
    integer,
)
from metadata.model.record import FORMAT_VERSION, Record

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping

    from metadata.store import MetadataStore, Registration, Version

BY_HAND = "by-hand-"
"""Begins the names of workers that take no tasks: an operator repairs the cluster by them."""
COPIES_MAX = 99
"""Also the priority of tasks that lack no copy, and only spread write sets over racks: the last ones."""
_ERROR_CHARACTERS = 500

REASON_LOST = "lost"
"""A bookie that the ledger names is gone for longer than the delay."""
REASON_MISSING = "missing"
"""A bookie lists fewer entries than it owes."""
REASON_MARKED = "marked"
"""A bookie says that it lost data of the ledger (rule 4)."""
REASON_LEAVING = "leaving"
"""An operator has ordered a bookie to leave the cluster: others are to get its seats."""
REASON_RACKS = "racks"
"""A write set does not span the racks that it should."""
REASON_ABANDONED = "abandoned"
"""Its recovery does not end; or its last fragment names a lost bookie, and nothing moves. To be recovered."""
REASONS = (REASON_LOST, REASON_MISSING, REASON_MARKED, REASON_LEAVING, REASON_RACKS, REASON_ABANDONED)
_WITHOUT_NAMES = (REASON_RACKS, REASON_ABANDONED)
"""The reasons under which no bookies stand."""


class TaskRef(NamedTuple):
    """A task by its key."""

    copies: int
    """How many good copies the entry with the fewest has, as known when the task was made."""
    ledger_id: int
    token: str

    @property
    def name(self) -> str:
        """Return the last segment of the key."""
        return f"{self.copies:02d}-{self.ledger_id:019d}-{self.token}"

    @property
    def key(self) -> str:
        """Return the key."""
        return f"{KEY_REPAIR_TASKS}/{self.name}"

    @classmethod
    def of_name(cls, name: str) -> TaskRef:
        """Invert `name`; raises MetadataCorruptError."""
        copies, _, rest = name.partition("-")
        ledger, _, token = rest.partition("-")
        if not (copies.isdecimal() and ledger.isdecimal() and token):
            raise MetadataCorruptError(f"{KEY_REPAIR_TASKS}/{name} is not the key of a repair task")
        ref = cls(int(copies), int(ledger), token)
        if ref.ledger_id > LEDGER_ID_MAX or ref.name != name:
            raise MetadataCorruptError(f"{KEY_REPAIR_TASKS}/{name} is not the key of a repair task")
        return ref


def new_reasons(reasons: Mapping[str, list[str]], known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the reasons, and the bookies under reasons, that are not known."""
    return {
        reason: [name for name in names if name not in known.get(reason, ())]
        for reason, names in reasons.items()
        if reason not in known or not set(names).issubset(known[reason])
    }


@dataclass(frozen=True, slots=True)
class RepairTask(Record):
    """One ledger that lacks copies, and why."""

    reasons: dict[str, list[str]]
    """The bookies concerned, by reason."""
    since_ms: int
    """When the auditor that made the task found it, by that auditor's wall clock. For people only."""
    attempts: int = 0
    """How often a worker has tried and failed."""
    error: str = ""
    """Why the last attempt failed."""
    entries_lost: int = 0
    """How many entries no bookie returned in the last attempt."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Return the bookies that the auditor holds for lost: they may be replaced."""
        return tuple(self.reasons.get(REASON_LOST, ()))

    @property
    def concerned(self) -> frozenset[str]:
        """Return all bookies that the reasons name."""
        return frozenset().union(*self.reasons.values())

    @property
    def doubted(self) -> frozenset[str]:
        """Return the bookies whose copies are to be read, whatever they list."""
        return frozenset((*self.reasons.get(REASON_MISSING, ()), *self.reasons.get(REASON_MARKED, ())))

    def good_copies(self, known: int) -> int:
        """Return the good copies of the scarcest entry: as known, or 0 where no bookie returned some."""
        return 0 if self.entries_lost else known

    def merged(self, reasons: Mapping[str, list[str]]) -> RepairTask:
        """Return the task with further reasons; the same object if there are none."""
        both = {
            reason: sorted({*self.reasons.get(reason, ()), *reasons.get(reason, ())})
            for reason in sorted({*self.reasons, *reasons})
        }
        return self if both == self.reasons else replace(self, reasons=both)

    def failed(self, error: str, entries_lost: int, doubted: Collection[str]) -> RepairTask:
        """Return the task after an attempt that failed.

        Args:
            doubted: the bookies that lack entries by now, or whose copies were not all read.
        """
        marked = set(doubted).intersection(self.reasons.get(REASON_MARKED, ()))
        judged = {REASON_MISSING: sorted(set(doubted) - marked), REASON_MARKED: sorted(marked)}
        both = {**self.reasons, **judged}
        reasons = {reason: names for reason, names in both.items() if names or reason in _WITHOUT_NAMES}
        text = error[:_ERROR_CHARACTERS]
        return replace(
            self, reasons=reasons, attempts=self.attempts + 1, error=text, entries_lost=entries_lost
        )

    def _check(self) -> None:
        for reason, bookies in self.reasons.items():
            if reason not in REASONS or not isinstance(bookies, list):
                raise ValueError(f"{reason!r} is no reason, or has no list of bookies")
            for bookie in bookies:
                check_bookie_id(bookie)
        for count in (self.since_ms, self.attempts, self.entries_lost):
            integer(count, 0, 2**63 - 1)
        if not isinstance(self.error, str):
            raise ValueError("error is no text")


@dataclass(frozen=True, slots=True)
class WorkerRecord(Record):
    """A worker, and its work so far. No wall clock is in it."""

    name: str
    ledger_id: int | None = None
    """The ledger that it repairs now."""
    repaired: int = 0
    failed: int = 0
    bytes_read: int = 0
    busy_s: float = 0.0
    bytes_per_s: int = 0
    """How many bytes an operator lets it read in a second; 0: it shares in the bound of all workers."""

    @property
    def is_by_hand(self) -> bool:
        """Return whether it takes no tasks."""
        return self.name.startswith(BY_HAND)


@dataclass(frozen=True, slots=True)
class AuditorRecord(Record):
    """The knowledge of the auditor. The next auditor goes on from it."""

    name: str = ""
    gone_s: dict[str, float] = field(default_factory=dict)
    """For how long bookies were seen to be gone. An auditor counts time only while it watches."""
    lost: list[str] = field(default_factory=list)
    """Bookies that are gone for longer than the delay."""
    delay_s: float = 0.0
    ledgers: int = 0
    ledgers_open: int = 0
    ledgers_unreadable: int = 0
    passes: int = 0
    """How many passes over the metadata this auditor has completed."""
    pass_s: float = 0.0
    """The duration of the last one."""
    reads: int = 0
    """How many values this auditor has read from the metadata store."""
    waiting: int = 0
    """Ledgers that lack copies and have no task now: there are `tasks_max` tasks before them."""
    aside: dict[str, int] = field(default_factory=dict)
    """How many of these had a task that failed, and gave its place to others, by good copies."""
    checked: int = 0
    """How many ledgers' replicas this auditor has compared with what they owe."""
    checked_turn: int = -1
    """The ledger whose turn to be checked was the last one. The next auditor goes on behind it."""
    settled: dict[str, str] = field(default_factory=dict)
    """By bookie, what it drew at the start since when all its ledgers were checked."""

    def _check(self) -> None:
        for bookie, gone_s in self.gone_s.items():
            check_bookie_id(bookie)
            if not isinstance(gone_s, (int, float)) or not gone_s >= 0:
                raise ValueError(f"{bookie} is gone for {gone_s!r} s")
        for copies, count in self.aside.items():
            integer(int(copies), 0, COPIES_MAX)
            integer(count, 0, 2**63 - 1)
        for bookie, start in self.settled.items():
            check_bookie_id(bookie)
            if not isinstance(start, str):
                raise ValueError(f"{bookie} drew {start!r}")
        integer(self.checked_turn, -1, LEDGER_ID_MAX)


class RepairTasks:
    """The part of a metadata store that auto recovery keeps its records in."""

    def __init__(self, store: MetadataStore) -> None:
        """Wrap a store. Its owner still has to close it."""
        self.store = store

    # --- tasks ---------------------------------------------------------------------------------

    async def refs(self) -> list[TaskRef]:
        """List the tasks, those with the fewest good copies first. Foreign names are left out."""
        found = []
        for name in await self.store.children(KEY_REPAIR_TASKS):
            with suppress(MetadataCorruptError):
                found.append(TaskRef.of_name(name))
        return found

    async def read(self, ref: TaskRef) -> tuple[RepairTask, Version]:
        """Read a task.

        Raises:
            NoSuchKeyError: it is done.
            MetadataCorruptError: it does not parse.
        """
        value, version = await self.store.read(ref.key)
        return RepairTask.from_json(value), version

    async def create(self, ref: TaskRef, task: RepairTask) -> None:
        """Make a task; one that exists already is left as it is."""
        with suppress(KeyExistsError):
            await self.store.create(ref.key, task.to_json())

    async def update(self, ref: TaskRef, task: RepairTask, version: Version) -> None:
        """Replace a task at that version.

        Raises:
            VersionConflictError: another client changed it.
            NoSuchKeyError: it is done.
        """
        await self.store.compare_and_set(ref.key, task.to_json(), version)

    async def add(
        self, ref: TaskRef, copies: int, reasons: Mapping[str, list[str]], token: str
    ) -> tuple[TaskRef, RepairTask]:
        """Add reasons to a task. If the ledger has fewer good copies than its key says, it gets another key.

        A worker that does the task meanwhile ends it only at the version that it read. Its lock is of the
        ledger, and so holds for the other key, too.

        Returns:
            The task as it is now.

        Raises:
            NoSuchKeyError: it is done.
            MetadataCorruptError: it does not parse.
        """
        while True:
            task, version = await self.read(ref)
            both = task.merged(reasons)
            if copies < ref.copies:
                urgent = TaskRef(copies, ref.ledger_id, token)
                await self.create(urgent, both)
                # After the creation, and only as it was read: at worst there is a task too many, never none.
                await self.done(ref, version)
                return urgent, both
            try:
                if both is not task:
                    await self.update(ref, both, version)
            except VersionConflictError:
                continue
            return ref, both

    async def note_failure(
        self, ref: TaskRef, task: RepairTask, version: Version, failed: RepairTask
    ) -> None:
        """Put a task that failed in the place of the one that was read, with what was added meanwhile.

        The auditor may have given it another key. Does nothing if the ledger has no task any more.
        """
        while True:
            try:
                await self.update(ref, failed, version)
                return
            except VersionConflictError:
                pass
            except NoSuchKeyError:
                others = [one for one in await self.refs() if one.ledger_id == ref.ledger_id]
                if not others:
                    return
                ref = others[0]
            try:
                now, version = await self.read(ref)
            except (NoSuchKeyError, MetadataCorruptError):
                return
            failed = failed.merged(new_reasons(now.reasons, task.reasons))

    async def done(self, ref: TaskRef, version: Version | None) -> bool:
        """Delete a task at that version; return False where it was changed: it is to be looked at again."""
        try:
            await self.store.delete(ref.key, version)
        except VersionConflictError:
            return False
        except NoSuchKeyError:
            pass
        return True

    def watch_tasks(self) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever a task was made or deleted; see `MetadataStore.watch`."""
        return self.store.watch(KEY_REPAIR_TASKS)

    # --- locks ---------------------------------------------------------------------------------

    async def locked(self) -> set[int]:
        """Return the ledgers that some worker holds the lock of."""
        return {int(name) for name in await self.store.children(KEY_REPAIR_LOCKS) if name.isdecimal()}

    async def lock(self, ledger_id: int, worker: str) -> Registration:
        """Take the lock of a ledger; closing the registration, or the end of the session, releases it.

        Raises:
            KeyExistsError: another session holds it. The call may wait for that session first.
        """
        key = f"{KEY_REPAIR_LOCKS}/{check_ledger_id(ledger_id):019d}"
        value = json.dumps({"format": FORMAT_VERSION, "worker": worker}).encode()
        return await self.store.register(key, value)

    # --- workers, the auditor, the pause --------------------------------------------------------

    async def announce(self, worker: WorkerRecord) -> Registration:
        """Register a worker for as long as its session lasts."""
        return await self.store.register(f"{KEY_REPAIR_WORKERS}/{worker.name}", worker.to_json())

    async def worker_names(self) -> list[str]:
        """Return the names of the workers that are alive."""
        return await self.store.children(KEY_REPAIR_WORKERS)

    async def workers(self, beginning: str = "") -> list[WorkerRecord]:
        """Read the records of the workers that are alive, and whose names begin so.

        Damaged ones are left out.
        """
        found = []
        for name in await self.worker_names():
            if not name.startswith(beginning):
                continue
            with suppress(NoSuchKeyError, MetadataCorruptError):
                value, _ = await self.store.read(f"{KEY_REPAIR_WORKERS}/{name}")
                found.append(WorkerRecord.from_json(value))
        return found

    async def auditor(self) -> tuple[AuditorRecord, Version | None]:
        """Read the auditor's record; an empty one where there is none yet, or where it is damaged."""
        try:
            value, version = await self.store.read(KEY_AUDITOR)
        except NoSuchKeyError:
            return AuditorRecord(), None
        try:
            return AuditorRecord.from_json(value), version
        except MetadataCorruptError:
            return AuditorRecord(), version

    async def write_auditor(self, record: AuditorRecord) -> bool:
        """Replace the auditor's record; return whether it was. Where two write at once, either may win."""
        _, version = await self.auditor()
        with suppress(KeyExistsError, VersionConflictError, NoSuchKeyError):
            if version is None:
                await self.store.create(KEY_AUDITOR, record.to_json())
            else:
                await self.store.compare_and_set(KEY_AUDITOR, record.to_json(), version)
            return True
        return False

    async def is_paused(self) -> bool:
        """Return whether an operator has paused all workers."""
        return (await self._paused())[0]

    async def pause(self, is_paused: bool) -> None:
        """Pause all workers, or end the pause.

        A worker that sees the pause begins no other repair, and gives up the one under way.

        Raises:
            MetadataUnavailableError: the change may take effect, now or later.
        """
        value = json.dumps({"format": FORMAT_VERSION, "paused": is_paused}).encode()
        while True:
            await self.store.sync(KEY_REPAIR_PAUSED)
            now, version = await self._paused()
            if now is is_paused:
                return
            with suppress(KeyExistsError, VersionConflictError, NoSuchKeyError):
                if version is None:
                    await self.store.create(KEY_REPAIR_PAUSED, value)
                else:
                    await self.store.compare_and_set(KEY_REPAIR_PAUSED, value, version)
                return

    async def _paused(self) -> tuple[bool, Version | None]:
        try:
            value, version = await self.store.read(KEY_REPAIR_PAUSED)
        except NoSuchKeyError:
            return False, None
        try:
            return boolean(json.loads(value)["paused"]), version
        except MALFORMED as error:
            raise MetadataCorruptError(f"the key {KEY_REPAIR_PAUSED!r} is damaged: {error!r}") from error

    def watch_pause(self) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the pause may have begun or ended."""
        return self.store.watch(KEY_REPAIR_PAUSED)
