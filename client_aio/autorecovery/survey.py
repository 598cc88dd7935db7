"""A survey of the whole cluster: its bookies, its ledgers, the copies that are lacking, and who repairs.

Reads the metadata of every ledger and asks every running bookie for its figures. It needs no auditor, and
changes nothing. `client_aio.core.audit` judges what is found.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bookie_aio.wire.messages import Done, Info
from client_aio.core.audit import Condition, LedgerIndex, Problem, judge, layout_of
from client_aio.core.courtesy import is_urgent
from client_aio.core.log_chain import owner_of
from client_aio.election import LeaderElection
from client_aio.unbounded.paged_fragments import spans
from metadata.access.bookies import registered_bookies, split_address
from metadata.access.repair_tasks import (
    REASON_ABANDONED,
    REASON_LEAVING,
    REASON_LOST,
    REASON_MARKED,
    REASON_MISSING,
    REASON_RACKS,
    REASONS,
    AuditorRecord,
    RepairTask,
    RepairTasks,
    TaskRef,
    WorkerRecord,
)
from metadata.awake import awake_timeout
from metadata.errors import (
    BookKeeperError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
)
from metadata.ids import MALFORMED
from metadata.owned_task import for_each, in_order

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from client_aio.context import ClientContext
    from client_aio.core.audit import Layout
    from metadata.access.bookies import BookieRecord
    from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState

AUDITOR_ELECTION = "bookie-aio.auditor"
_READS_AT_ONCE = 32
_INFO_TIMEOUT_S = 5.0
_LACKING = (REASON_LOST, REASON_MISSING, REASON_MARKED)
"""The reasons of tasks whose ledgers lack copies."""
_REASON_TEXTS = {
    REASON_LOST: "{} is lost",
    REASON_MISSING: "{} lacks entries",
    REASON_MARKED: "{} lost data of it",
    REASON_LEAVING: "{} is to leave the cluster",
    REASON_RACKS: "a write set is on one rack",
    REASON_ABANDONED: "its writer or its recovery is gone",
}


def workers_at_once(context: ClientContext) -> int:
    """Return how many workers may work at a time: one for each host that has bookies.

    Some bookies share a host. Their workers at once would take all of its processors from those who add.
    """
    available = context.pool.directory.available.values()
    return max(len({split_address(one.addresses[0])[0] for one in available}), 1)


async def layout_in_full(
    context: ClientContext, metadata: LedgerMetadata
) -> tuple[LedgerMetadata, Layout, int]:
    """Return a ledger's layout, with the fragments that stand in pages.

    Returns:
        The metadata as last read, the layout, and the number of pages that were read.

    Raises:
        NoSuchLedgerError: the ledger has been deleted.
        MetadataCorruptError: a page is damaged.
    """
    by_ensemble: dict[tuple[str, ...], Fragment] = {}
    pages = 0
    if metadata.is_unbounded:
        async with aclosing(spans(context, metadata)) as found:
            async for span in found:
                metadata = span.metadata
                if span.fragments != metadata.fragments:
                    pages += 1
                    by_ensemble.update((one.bookies, one) for one in span.fragments)
    return metadata, layout_of(metadata, by_ensemble.values()), pages


async def figures_of(context: ClientContext, bookie_id: str, timeout_s: float) -> dict[str, Any]:
    """Ask a bookie for its figures (INFO). Raises BookKeeperError, or one of `MALFORMED`."""
    connection = await context.pool.get(bookie_id)
    _, body = await connection.call(Info(), Done, timeout_s=timeout_s)
    figures: dict[str, Any] = json.loads(bytes(body))
    return figures


async def all_metadata(
    context: ClientContext, first: int = 0, on_progress: Callable[[int], None] = lambda _: None
) -> AsyncGenerator[tuple[int, LedgerMetadata | MetadataCorruptError], None]:
    """Yield every ledger with its metadata, ascending; a few reads are under way at once.

    A ledger that is deleted meanwhile is left out. Damaged metadata come as the error.

    Args:
        first: leave out the ledgers below this one.
        on_progress: called now and then with the number of ledgers that were read.

    Raises:
        MetadataUnavailableError: the store does not answer.
    """

    async def read(ledger_id: int) -> LedgerMetadata | MetadataCorruptError | None:
        try:
            return (await context.ledgers.read(ledger_id))[0]
        except NoSuchLedgerError:
            return None
        except MetadataCorruptError as error:
            return error

    async with (
        aclosing(context.ledgers.ledger_ids(first=first)) as ledger_ids,
        aclosing(in_order(ledger_ids, read, _READS_AT_ONCE)) as found,
    ):
        count = 0
        async for ledger_id, metadata in found:
            count += 1
            if count % _READS_AT_ONCE == 0:
                on_progress(count)
            if metadata is not None:
                yield ledger_id, metadata


class LedgerFilter(NamedTuple):
    """The ledgers that a command is about."""

    bookie: str | None = None
    """Only those that name this bookie in a fragment."""
    state: LedgerState | None = None
    log: str | None = None
    """Only those that this log owns."""
    under_replicated: bool = False
    """Only those of which copies are lacking: a bookie is down, or a repair task says so."""

    @property
    def lets_all_through(self) -> bool:
        """Return whether it filters nothing."""
        return self == LedgerFilter()


class SelectedLedger(NamedTuple):
    """A ledger that a filter let through."""

    ledger_id: int
    metadata: LedgerMetadata | MetadataCorruptError
    """As read; damaged metadata come as the error, through every filter: what they say is not known."""
    good_copies: int | None
    """Of the scarcest entry; None if the filter did not ask for it."""
    reasons: list[str]
    """Why copies are lacking, or why it has a repair task otherwise."""


async def read_tasks(tasks: RepairTasks, refs: Iterable[TaskRef]) -> list[tuple[TaskRef, RepairTask]]:
    """Read tasks, a few at once. Those that end meanwhile or do not parse are left out."""
    found: dict[TaskRef, RepairTask] = {}
    order = list(refs)

    async def read(ref: TaskRef) -> None:
        with suppress(NoSuchKeyError, MetadataCorruptError):
            found[ref], _ = await tasks.read(ref)

    await for_each(order, read, _READS_AT_ONCE)
    return [(ref, found[ref]) for ref in order if ref in found]


def _reasons_of(down: list[str], task: RepairTask | None) -> list[str]:
    reasons = {} if task is None else task.reasons
    texts = [f"{name} is down" for name in down]
    for reason, names in sorted(reasons.items(), key=lambda one: REASONS.index(one[0])):
        # A reason without names has a text, too.
        others = [name for name in names if reason != REASON_LOST or name not in down]
        texts += [_REASON_TEXTS[reason].format(name) for name in others or [""] * (not names)]
    return texts


async def select_ledgers(
    context: ClientContext, wanted: LedgerFilter, on_progress: Callable[[int], None] = lambda _: None
) -> AsyncGenerator[SelectedLedger, None]:
    """Yield the ledgers that a filter lets through, ascending; see `all_metadata` for `on_progress`.

    Raises:
        MetadataUnavailableError: the store does not answer.
    """
    tasks: dict[int, tuple[TaskRef, RepairTask]] = {}
    if wanted.under_replicated or wanted.bookie is not None:
        stored = RepairTasks(context.ledgers.store)
        # Of two the more urgent one.
        tasks = {one[0].ledger_id: one for one in reversed(await read_tasks(stored, await stored.refs()))}
    async with aclosing(all_metadata(context, on_progress=on_progress)) as found:
        async for ledger_id, metadata in found:
            if isinstance(metadata, MetadataCorruptError):
                yield SelectedLedger(ledger_id, metadata, None, [])
                continue
            if wanted.state not in (None, metadata.state) or wanted.log not in (None, owner_of(metadata)):
                continue
            if wanted.bookie is None and not wanted.under_replicated:
                yield SelectedLedger(ledger_id, metadata, None, [])
                continue
            try:
                metadata, layout, _ = await layout_in_full(context, metadata)
            except NoSuchLedgerError:
                continue
            except MetadataCorruptError as error:
                yield SelectedLedger(ledger_id, error, None, [])
                continue
            if wanted.bookie is not None and wanted.bookie not in layout.bookies:
                continue
            down = {name for name in layout.bookies if name not in context.pool.directory.available}
            lost, (ref, task) = layout.concerned(down), tasks.get(ledger_id, (None, None))
            copies = layout.copies(down)
            if ref is not None and task is not None:
                copies = min(copies, task.good_copies(ref.copies))
            lacks = task is not None and any(task.reasons.get(reason) for reason in _LACKING)
            if wanted.under_replicated and not (lost or lacks or copies < metadata.write_quorum):
                continue
            yield SelectedLedger(ledger_id, metadata, copies, _reasons_of(lost, task))


async def ledgers_naming(
    context: ClientContext, bookie_id: str, on_progress: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Return the ledgers that name a bookie in a fragment, or as one that may hold what a repair lacked.

    Raises:
        MetadataCorruptError: a ledger's metadata do not parse: it may name the bookie.
        MetadataUnavailableError: the store does not answer.
    """
    naming: list[int] = []
    async with aclosing(all_metadata(context, on_progress=on_progress)) as found:
        async for ledger_id, metadata in found:
            if isinstance(metadata, MetadataCorruptError):
                raise metadata
            try:
                metadata, layout, _ = await layout_in_full(context, metadata)
            except NoSuchLedgerError:
                continue
            if bookie_id in layout.bookies or any(one.bookie == bookie_id for one in metadata.absent):
                naming.append(ledger_id)
    return naming


@dataclass(slots=True)
class BookieReport:
    """One bookie of the cluster."""

    bookie_id: str
    state: str
    """"writable", "read-only", "silent" (registered, and gave no answer) or "down"."""
    rack: str = ""
    weight: float | None = None
    addresses: list[str] = field(default_factory=list)
    ledgers: int = 0
    """How many ledgers name it."""
    gone_s: float | None = None
    """For how long the auditor has seen it to be gone."""
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None
    """The size of its disks."""
    is_tight: bool = False
    """Its disks are nearly full, so it gets new ledgers only where there are too few others."""
    ledgers_damaged: int | None = None
    """How many ledgers it has marks of lost data for (rule 4)."""
    uptime_s: float | None = None
    order: str | None = None
    """The mode of the operator's order that it has; None for none."""
    version: str | None = None
    """The release that it runs, as it announces it."""
    last_seen_s: float | None = None
    """How long ago it was registered, by the auditor's count: 0 while it is; None for unknown."""
    disk_used_bytes: int | None = None
    """What its disks hold, of whatever kind."""
    segment_bytes: int | None = None
    """What its segments hold of ledgers, dead entries included."""


@dataclass(slots=True)
class AutoRecoveryState:
    """The auditor, the workers, and the tasks."""

    auditor: str | None = None
    """The name of the auditor that is elected; None for none."""
    record: AuditorRecord = field(default_factory=AuditorRecord)
    """What the auditor wrote last."""
    workers: list[WorkerRecord] = field(default_factory=list)
    is_paused: bool = False
    refs: list[TaskRef] = field(default_factory=list)
    tasks: list[tuple[TaskRef, RepairTask]] = field(default_factory=list)
    """The contents of these tasks."""
    at_once: int = 1
    """How many workers may work at a time, but for urgent tasks."""

    @property
    def by_copies(self) -> dict[int, int]:
        """Return how many tasks there are, by the number of good copies."""
        copies = {ref: ref.copies for ref in self.refs}
        copies |= {ref: task.good_copies(ref.copies) for ref, task in self.tasks}
        return dict(sorted(Counter(copies.values()).items()))

    @property
    def lacking(self) -> dict[int, int]:
        """Return the same with the ledgers that were set aside: they lack copies, and have no task now."""
        aside = Counter({int(copies): count for copies, count in self.record.aside.items()})
        return dict(sorted((aside + Counter(self.by_copies)).items()))

    @property
    def estimate_s(self) -> float | None:
        """Return how long the tasks will take, by what the workers have done so far; None for unknown."""
        if not self.refs:
            return 0.0
        workers = [worker for worker in self.workers if not worker.is_by_hand]
        repaired = sum(worker.repaired for worker in workers)
        if not repaired or self.is_paused:
            return None
        urgent = sum(map(is_urgent, self.refs))
        others = len(self.refs) - urgent + self.record.waiting
        turns = urgent / len(workers) + others / min(len(workers), self.at_once)
        return turns * sum(worker.busy_s for worker in workers) / repaired

    def to_document(self) -> dict[str, Any]:
        """Return what `autorecovery status -o json` prints."""
        return {
            "paused": self.is_paused,
            "auditor": self.auditor,
            "tasks": len(self.refs),
            "waiting": self.record.waiting,
            "aside": sum(self.record.aside.values()),
            "tasks_by_copies": {str(copies): count for copies, count in self.by_copies.items()},
            "estimate_s": self.estimate_s,
            "workers": [asdict(worker) for worker in self.workers],
            "last_audit": asdict(self.record),
            "failed": [
                {"ledger_id": ref.ledger_id, "copies": task.good_copies(ref.copies), **asdict(task)}
                for ref, task in self.tasks
                if task.attempts
            ],
        }


async def auto_recovery_state(context: ClientContext) -> AutoRecoveryState:
    """Read who audits, who repairs, and which tasks there are."""
    store = context.ledgers.store
    tasks = RepairTasks(store)
    state = AutoRecoveryState()
    leader = await LeaderElection(store, AUDITOR_ELECTION).leader()
    state.auditor = None if leader is None else leader.decode(errors="replace")
    state.record, _ = await tasks.auditor()
    state.workers = await tasks.workers()
    state.is_paused = await tasks.is_paused()
    state.at_once = workers_at_once(context)
    state.refs = await tasks.refs()
    state.tasks = await read_tasks(tasks, state.refs)
    return state


@dataclass(slots=True)
class ClusterSurvey:
    """The state of a cluster."""

    bookies: list[BookieReport]
    ledgers: dict[str, int]
    """How many ledgers there are, by state."""
    under_replicated: dict[int, int]
    """Ledgers of which a complete fragment names a bookie that is down, by the number of good copies."""
    growing_on_down: int
    """Ledgers not CLOSED whose last fragment names a bookie that is down."""
    absent: int
    """Ledgers with entries that a repair found nowhere."""
    given_up: int
    """Ledgers that were closed with a loss."""
    unreadable: int
    """Ledgers whose metadata do not parse."""
    auto_recovery: AutoRecoveryState
    problems: list[Problem]

    @property
    def condition(self) -> Condition:
        """Return the worst condition of all problems."""
        return max((problem.condition for problem in self.problems), default=Condition.HEALTHY)

    def to_document(self) -> dict[str, Any]:
        """Return what `cluster status -o json` prints."""
        return {
            "condition": self.condition.label,
            "problems": [{"condition": each.condition.label, "text": each.text} for each in self.problems],
            "bookies": [asdict(each) for each in self.bookies],
            "ledgers": self.ledgers,
            "under_replicated": {str(copies): count for copies, count in self.under_replicated.items()},
            "open_on_bookies_down": self.growing_on_down,
            "absent": self.absent,
            "given_up": self.given_up,
            "unreadable": self.unreadable,
            "autorecovery": self.auto_recovery.to_document(),
        }


async def survey(
    context: ClientContext, on_progress: Callable[[int], None] = lambda _: None
) -> ClusterSurvey:
    """Survey the cluster; see `all_metadata` for `on_progress`.

    Raises:
        MetadataUnavailableError: the store does not answer.
    """
    await context.pool.directory.refresh()
    index = LedgerIndex()
    states: Counter[str] = Counter()
    absent = given_up = unreadable = 0
    async with aclosing(all_metadata(context, on_progress=on_progress)) as found:
        async for ledger_id, metadata in found:
            try:
                if isinstance(metadata, MetadataCorruptError):
                    raise metadata
                metadata, layout, _ = await layout_in_full(context, metadata)
            except MetadataCorruptError:
                unreadable += 1
                continue
            except NoSuchLedgerError:
                continue
            index.note(ledger_id, layout)
            states[metadata.state.value] += 1
            absent += bool(metadata.absent)
            given_up += metadata.given_up is not None
    recovery = await auto_recovery_state(context)
    bookies = await _report_bookies(context, index, recovery.record)
    down = {one.bookie_id for one in bookies if one.state == "down"}
    lacking = Counter(one.copies for one in index.lacking(down)[0])
    growing = len(index.growing_on(down))
    problems = judge(
        down={one.bookie_id: one.ledgers for one in bookies if one.state == "down"},
        impaired=[
            one.bookie_id
            for one in bookies
            if one.state == "silent" or (one.state == "read-only" and one.order is None)
        ],
        ordered={one.bookie_id: one.order for one in bookies if one.order is not None},
        damaged=[one.bookie_id for one in bookies if one.ledgers_damaged],
        lacking=lacking,
        tasks=recovery.lacking,
        growing_on_down=growing,
        absent=absent,
        unreadable=unreadable,
        is_paused=recovery.is_paused,
        has_auditor=recovery.auditor is not None and any(not one.is_by_hand for one in recovery.workers),
    )
    return ClusterSurvey(
        bookies, dict(sorted(states.items())), dict(sorted(lacking.items())), growing, absent, given_up,
        unreadable, recovery, problems,
    )  # fmt: skip


async def _report_bookies(
    context: ClientContext, index: LedgerIndex, record: AuditorRecord
) -> list[BookieReport]:
    directory = context.pool.directory
    running, orders = directory.available, directory.orders.by_bookie
    known = {*await registered_bookies(context.ledgers.store), *running, *index.bookies(), *orders}

    async def report(bookie_id: str) -> BookieReport:
        ledgers = len(index.ledgers_of(bookie_id))
        registration = running.get(bookie_id)
        if registration is None:
            gone_s = record.gone_s.get(bookie_id)
            found = BookieReport(bookie_id, "down", ledgers=ledgers, gone_s=gone_s, last_seen_s=gone_s)
        else:
            found = await _ask(context, registration, ledgers)
        if bookie_id in orders:
            found.order = orders[bookie_id].mode
        return found

    return list(await asyncio.gather(*map(report, sorted(known))))


async def _ask(context: ClientContext, record: BookieRecord, ledgers: int) -> BookieReport:
    state = "writable" if record.is_writable else "read-only"
    found = BookieReport(record.bookie_id, state, record.rack, record.weight, list(record.addresses), ledgers)
    found.disk_bytes, found.is_tight = record.disk_bytes, record.is_tight
    found.disk_free_bytes = record.free_bytes
    found.version, found.last_seen_s = record.properties.get("version"), 0.0
    try:
        # The connection, too: a bookie that hangs holds nobody up for longer.
        async with awake_timeout(_INFO_TIMEOUT_S):
            figures = await figures_of(context, record.bookie_id, _INFO_TIMEOUT_S)
        disk = figures["storage"]["disk"]
        found.disk_free_bytes, found.disk_bytes = disk["free_bytes"], disk["total_bytes"]
        found.segment_bytes = figures["storage"]["segments"]["bytes"]
        ledgers_here = figures["storage"]["ledgers"]
        found.ledgers_damaged = ledgers_here["damaged"] or int(bool(ledgers_here["all_damaged"]))
        found.uptime_s = figures["uptime_s"]
    except (BookKeeperError, TimeoutError, *MALFORMED):
        found.state = "silent"
    if found.disk_bytes is not None and found.disk_free_bytes is not None:
        found.disk_used_bytes = found.disk_bytes - found.disk_free_bytes
    return found
