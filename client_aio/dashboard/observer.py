"""The observer: reads a cluster's metadata, asks its bookies, and keeps the model. It changes nothing.

It goes on whatever fails. A metadata store that does not answer is a problem that the page shows, beside what
was known before. A bookie that does not answer is asked again a second later.

Its reads, at most:

- the list of all ledgers every `LIST_S`: one read for each 10,000 ids in use, and some more;
- each ledger once when it is new, `NEW_PER_LISTING` in one listing after the first one. Those that are left
  over, or not read after `LATE_S`, are told: nothing is called healthy before they are read;
- ledgers of which a repair has ended: `URGENT_PER_S`;
- ledgers that are not CLOSED, in turns, each within `OPEN_S`: `OPEN_PER_S`;
- ledgers that lack copies, the same way: `LACKING_S`, `LACKING_PER_S`;
- CLOSED ledgers, the same way: `CLOSED_S`, `CLOSED_PER_S`;
- auto recovery: its list of tasks every second and at each change of it, and a few records;
- the ledger or the log that somebody looks at: its own records, once a second, four of them at once.

Each bookie gets one INFO a second, on one connection. Every `SAMPLE_S` the observer reads the `/metrics` of
bookies that announce an endpoint (the property "http" of their registration).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from client_aio.autorecovery.survey import AUDITOR_ELECTION, figures_of, layout_in_full
from client_aio.core.audit import Rotation
from client_aio.dashboard.model import RecoveryView
from client_aio.dashboard.vitals import Scrape, Series, parsed
from client_aio.election import LeaderElection
from metadata.access.bookies import registered_bookies
from metadata.access.logs import LogStore, log_names
from metadata.access.repair_tasks import RepairTask, RepairTasks
from metadata.errors import (
    BookKeeperError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
    OperationTimeoutError,
    UnauthorizedAccessError,
)
from metadata.ids import MALFORMED
from metadata.owned_task import for_each

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio.client import Client
    from client_aio.context import ClientContext
    from client_aio.dashboard.model import ClusterModel
    from client_aio.dashboard.vitals import Figures
    from client_aio.handles import AwaitableContext
    from metadata.access.repair_tasks import AuditorRecord, TaskRef, WorkerRecord
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead, LogRow

ASK_S = 1.0
TASKS_S = 0.25
"""The pause between two reads of the list of tasks, while it changes. Without a change it is a second."""
SAMPLE_S = 2.0
LIST_S = 10.0
NEW_PER_LISTING = 1000
LATE_S = 5.0
URGENT_PER_S = 100
OPEN_S, OPEN_PER_S = 10.0, 20
LACKING_S, LACKING_PER_S = 2.0, 20
CLOSED_S, CLOSED_PER_S = 1800.0, 10
_READS_AT_ONCE = 32
_URGENT_MAX = 10_000
_ANSWER_TIMEOUT_S = 1.5
_RETRY_S = 1.0
_AWAY_S = 5.0
"""A metadata store without an answer for so long is away. Its own timeouts, made for writes, are longer."""
_IDLE_S = 10.0
_REGISTERED_S = 30.0
_TASKS_SHOWN = 50
_VIEWS_KEPT = 64
_VIEW_S = 0.9
_VIEW_TIMEOUT_S = 3.0
_LOOKS_AT_ONCE = 4

Key = tuple[str, str | int, int]


class LedgerView(NamedTuple):
    """A ledger that somebody looks at."""

    ledger_id: int
    metadata: LedgerMetadata | None
    """None where they could not be read; `error` says why."""
    error: str = ""
    lac: int | None = None
    lac_error: str = ""


class LogView(NamedTuple):
    """A log that somebody looks at."""

    name: str
    head: LogHead | None
    """None where it could not be read; `error` says why."""
    error: str = ""
    page: int = 1
    """1 for the newest ledgers, which stand in the head; then the pages, newest first."""
    rows: tuple[LogRow, ...] = ()
    last: LedgerView | None = None
    """The ledger that is written now: the last one with an entry, or the last but one."""
    entries_per_s: Series | None = None


class _Growth:
    """The curve of a log's growth, from one look to the next."""

    def __init__(self) -> None:
        self.series = Series()
        self._before: tuple[float, int, int] | None = None

    def note(self, now: float, ledger_id: int, lac: int) -> Series:
        before, self._before = self._before, (now, ledger_id, lac)
        if before is not None and before[1] == ledger_id and now > before[0]:
            self.series.add((lac - before[2]) / (now - before[0]))
        elif before is not None:
            self.series.add(None)
        return self.series


class Observer:
    """Keeps a model of one cluster."""

    def __init__(
        self,
        uri: str,
        connect: Callable[[], AwaitableContext[Client]],
        model: ClusterModel,
        *,
        wall_clock: Callable[[], float],
        scrape: Callable[[str], Awaitable[str]],
    ) -> None:
        """Prepare; `run` does the work.

        Args:
            uri: of the metadata store, for people.
            connect: opens a client of the cluster, again after each failure of the metadata store.
            wall_clock: the time in seconds since the epoch, for people.
            scrape: reads `/metrics` of an address, and returns the text. Raises OSError or ValueError.
        """
        self.uri = uri
        self._connect = connect
        self.model = model
        self.wall_clock = wall_clock
        self._scrape = scrape
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._errors: dict[str, str] = {}
        self._urgent: dict[int, None] = {}
        self._changed = asyncio.Event()
        self._looks = asyncio.Semaphore(_LOOKS_AT_ONCE)
        self._views: OrderedDict[Key, tuple[float, LedgerView | LogView]] = OrderedDict()
        self._growth: OrderedDict[str, _Growth] = OrderedDict()

    async def wait_for_change(self, revision: int, timeout_s: float) -> None:
        """Wait until the model is of a later revision, or the timeout has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.model.revision == revision:
                    await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def metadata_operations(self) -> int | None:
        """Return how many operations this observer has had the metadata store do; None without a client."""
        times = getattr(self._client and self._client._context.ledgers.store, "times", None)
        return None if times is None else sum(histogram.count for histogram in times.values())

    async def run(self) -> None:
        """Observe until cancelled. Connects again whenever the store could not be opened."""
        while True:
            try:
                async with self._connect() as client:
                    self._client = client
                    await self._observe(client._context)
            except* BookKeeperError as errors:
                self._failed("connect", errors.exceptions[0])
            finally:
                self._client = None
            await asyncio.sleep(_RETRY_S)

    async def _observe(self, context: ClientContext) -> None:
        self._errors.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_bookies(context))
            group.create_task(self._ask_bookies(context))
            group.create_task(self._again("ledgers", partial(self._list, context), LIST_S))
            group.create_task(self._again("turns", _Turns(self, context).take, 1.0))
            reader = _RecoveryReader(self, context)
            group.create_task(self._again("auto recovery", reader.read, TASKS_S, timeout_s=_AWAY_S))
            group.create_task(self._again("tasks", reader.follow, _RETRY_S))

    def _failed(self, what: str, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._errors[what] = str(error) or type(error).__name__
        self.model.note_metadata(next(iter(self._errors.values())), self.wall_clock())
        self._tell()

    def _worked(self, what: str) -> None:
        self._errors.pop(what, None)
        self.model.note_metadata(next(iter(self._errors.values()), ""), self.wall_clock())
        self._tell()

    async def _again(
        self,
        what: str,
        work: Callable[[], Awaitable[None]],
        pause_s: float,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Do some work again and again. A failure is noted, and ends nothing."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await work()
            except BookKeeperError as error:
                self._failed(what, error)
                await asyncio.sleep(_RETRY_S)
                continue
            except TimeoutError:
                self._failed(what, OperationTimeoutError(f"no answer within {timeout_s:g} s"))
                await asyncio.sleep(_RETRY_S)
                continue
            self._worked(what)
            await asyncio.sleep(pause_s)

    # --- bookies ---------------------------------------------------------------------------------

    async def _follow_bookies(self, context: ClientContext) -> None:
        directory, registered, read_at = context.pool.directory, list[str](), -_REGISTERED_S
        while True:
            running = dict(directory.available)
            is_new = not {*running} <= {*registered}
            if is_new or self._loop.time() >= read_at + _REGISTERED_S:
                try:
                    registered = await registered_bookies(context.ledgers.store)
                    read_at = self._loop.time()
                    self._worked("bookies")
                except BookKeeperError as error:
                    self._failed("bookies", error)
            self.model.note_bookies(
                running,
                directory.orders.by_bookie,
                registered,
                now=self._loop.time(),
                at=self.wall_clock(),
            )
            self._tell()
            await directory.wait_for_change(_RETRY_S)

    async def _ask_bookies(self, context: ClientContext) -> None:
        scrapes: dict[str, Scrape | None] = {}
        number = 0
        while True:
            began = self._loop.time()
            names = list(context.pool.directory.available)
            is_sample = number % round(SAMPLE_S / ASK_S) == 0
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(self._ask(context, name, scrapes, is_sample=is_sample))
            if is_sample:
                self.model.note_sample()
                for name in [one for one in scrapes if one not in names]:
                    del scrapes[name]
            self._tell()
            number += 1
            await asyncio.sleep(max(began + ASK_S - self._loop.time(), 0.05))

    async def _ask(
        self, context: ClientContext, name: str, scrapes: dict[str, Scrape | None], *, is_sample: bool
    ) -> None:
        figures: Figures | None = None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                figures = parsed(await figures_of(context, name, _ANSWER_TIMEOUT_S))
        except (BookKeeperError, TimeoutError, *MALFORMED):
            pass
        now, record = self._loop.time(), context.pool.directory.available.get(name)
        if figures is not None and is_sample and record is not None:
            scrapes[name] = await self._metrics_of(record.properties.get("http", ""))
        self.model.note_figures(name, figures, scrapes.get(name), now=now, at=self.wall_clock())
        if figures is None:
            self._tell()

    async def _metrics_of(self, address: str) -> Scrape | None:
        if not address:
            return None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return Scrape.of(await self._scrape(address))
        except (OSError, *MALFORMED):
            return None

    # --- ledgers and logs ------------------------------------------------------------------------

    async def _list(self, context: ClientContext) -> None:
        async with aclosing(context.ledgers.ledger_ids()) as found:
            ledger_ids = [ledger_id async for ledger_id in found]
        unread = self.model.note_listing(ledger_ids)
        if self.model.is_complete:
            unread = unread[:NEW_PER_LISTING]
        late = self._loop.call_later(LATE_S, partial(self.model.note_pass, is_over=False))
        try:
            await for_each(unread, partial(self.read, context), _READS_AT_ONCE)
        finally:
            late.cancel()
        self.model.note_pass(is_over=True)
        self.model.note_logs(await log_names(context.ledgers.store))

    async def read(self, context: ClientContext, ledger_id: int) -> None:
        """Read one ledger's metadata into the model."""
        at = self.wall_clock()
        try:
            metadata, _ = await context.ledgers.read(ledger_id)
            metadata, layout, _ = await layout_in_full(context, metadata)
        except NoSuchLedgerError:
            self.model.drop(ledger_id)
        except MetadataCorruptError as error:
            self.model.note_ledger(ledger_id, error, None, at)
        else:
            self.model.note_ledger(ledger_id, metadata, layout, at)

    def read_soon(self, ledger_ids: list[int]) -> None:
        """Have these ledgers read before others."""
        for ledger_id in ledger_ids:
            if len(self._urgent) < _URGENT_MAX:
                self._urgent[ledger_id] = None

    def take_urgent(self) -> list[int]:
        """Remove and return the ledgers that are to be read first."""
        taken = list(self._urgent)[:URGENT_PER_S]
        for ledger_id in taken:
            del self._urgent[ledger_id]
        return taken

    async def ledger(self, ledger_id: int) -> LedgerView:
        """Look at one ledger. The answer is a second old at most."""
        view = await self._view(
            ("ledger", ledger_id, 0),
            partial(self._look_at_ledger, ledger_id),
            partial(_failed_ledger, ledger_id),
        )
        assert isinstance(view, LedgerView)
        return view

    async def log(self, name: str, page: int) -> LogView:
        """Look at one log, and at one page of its ledgers. The answer is a second old at most."""
        view = await self._view(
            ("log", name, page), partial(self._look_at_log, name, page), partial(_failed_log, name)
        )
        assert isinstance(view, LogView)
        return view

    async def _view(
        self,
        key: Key,
        look: Callable[[Client], Awaitable[LedgerView | LogView]],
        failed: Callable[[str], LedgerView | LogView],
    ) -> LedgerView | LogView:
        found = self._views.get(key)
        if found is not None and self._loop.time() < found[0] + _VIEW_S:
            return found[1]
        client = self._client
        if client is None:
            return failed("the metadata store does not answer")
        try:
            async with asyncio.timeout(_VIEW_TIMEOUT_S), self._looks:
                view = await look(client)
        except BookKeeperError as error:
            view = failed(str(error))
        except TimeoutError:
            view = failed(f"no answer within {_VIEW_TIMEOUT_S:g} s")
        self._views[key] = self._loop.time(), view
        self._views.move_to_end(key)
        while len(self._views) > _VIEWS_KEPT:
            self._views.popitem(last=False)
        return view

    async def _look_at_ledger(self, ledger_id: int, client: Client) -> LedgerView:
        context = client._context
        await self.read(context, ledger_id)
        metadata, _ = await context.ledgers.read(ledger_id)
        if metadata.is_closed:
            return LedgerView(ledger_id, metadata, lac=metadata.last_entry)
        try:
            async with client.open_ledger(ledger_id) as reader:
                lac = await reader.try_read_last_add_confirmed()
        except UnauthorizedAccessError:
            return LedgerView(ledger_id, metadata, lac_error="the ledger has a password")
        except BookKeeperError as error:
            return LedgerView(ledger_id, metadata, lac_error=str(error))
        return LedgerView(ledger_id, metadata, lac=lac)

    async def _look_at_log(self, name: str, page: int, client: Client) -> LogView:
        context = client._context
        lists = LogStore(context.ledgers.store, name, draw_token=context.draw_token)
        head, _ = await lists.read()
        pages = len(head.rows.pages)
        page = min(max(page, 1), pages + 1)
        rows = head.newest
        if page > 1:
            with suppress(NoSuchKeyError):  # It was truncated meanwhile: the newest rows are shown.
                rows = await lists.rows_at_page(head, pages + 1 - page)
        last = None
        for row in reversed(head.newest[-2:]):
            last = await self._look_at_ledger(row.ledger_id, client)
            if last.lac is not None and last.lac >= 0:
                break
        series = None
        if last is not None and last.lac is not None:
            growth = self._growth.setdefault(name, _Growth())
            self._growth.move_to_end(name)
            while len(self._growth) > _VIEWS_KEPT:
                self._growth.popitem(last=False)
            series = growth.note(self._loop.time(), last.ledger_id, last.lac)
        return LogView(name, head, "", page, tuple(reversed(rows)), last, series)


def _failed_ledger(ledger_id: int, error: str) -> LedgerView:
    return LedgerView(ledger_id, None, error)


def _failed_log(name: str, error: str) -> LogView:
    return LogView(name, None, error)


class _Turns:
    """Has ledgers read again, in turns, at a bounded rate."""

    def __init__(self, observer: Observer, context: ClientContext) -> None:
        self._observer = observer
        self._context = context
        self._open, self._lacking, self._closed = Rotation(OPEN_S), Rotation(LACKING_S), Rotation(CLOSED_S)
        self._at = asyncio.get_running_loop().time()

    async def take(self) -> None:
        """Read the ledgers whose turn has come."""
        now = asyncio.get_running_loop().time()
        elapsed, self._at = now - self._at, now
        model = self._observer.model
        if not model.is_complete:
            return
        growing = sorted(model.index.growing)
        chosen = dict.fromkeys(self._observer.take_urgent())
        chosen |= dict.fromkeys(self._open.next(growing, elapsed, OPEN_PER_S))
        chosen |= dict.fromkeys(self._closed.next(model.newest_first()[::-1], elapsed, CLOSED_PER_S))
        lacking = sorted(row.ledger_id for row in model.lacking())
        chosen |= dict.fromkeys(self._lacking.next(lacking, elapsed, LACKING_PER_S))
        await for_each(list(chosen), partial(self._observer.read, self._context), _READS_AT_ONCE)


class _RecoveryReader:
    """Reads the records of auto recovery: the list of tasks each time, the others when they are due."""

    def __init__(self, observer: Observer, context: ClientContext) -> None:
        self._observer = observer
        self._context = context
        self._store = context.ledgers.store
        self._tasks = RepairTasks(self._store)
        self._view = RecoveryView()
        self._due: dict[str, float] = {}
        self._known: dict[TaskRef, tuple[float, RepairTask]] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def _is_due(self, what: str, interval_s: float) -> bool:
        now = self._loop.time()
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + interval_s
        return True

    async def follow(self) -> None:
        """Have the list of tasks read when it has changed."""
        async with aclosing(self._tasks.watch_tasks()) as changes:
            async for _ in changes:
                self._changed.set()

    async def read(self) -> None:
        """Wait until the tasks have changed, a second at most; read what is due, and tell the model."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                await self._changed.wait()
        self._changed.clear()
        before, tasks = self._view, self._tasks
        refs = await tasks.refs()
        is_busy = bool(refs) or bool(self._observer.model.down)
        pause_s = SAMPLE_S if is_busy else _IDLE_S
        if len(before.refs) != len(refs):
            self._due.clear()
        record: AuditorRecord = before.record
        workers: list[WorkerRecord] = before.workers
        auditor, is_paused = before.auditor, before.is_paused
        if self._is_due("record", pause_s):
            record, _ = await tasks.auditor()
            is_paused = await tasks.is_paused()
        if self._is_due("leader", pause_s):
            leader = await LeaderElection(self._store, AUDITOR_ELECTION).leader()
            auditor = None if leader is None else leader.decode(errors="replace")
        if self._is_due("workers", pause_s):
            workers = await tasks.workers()
        await self._read_tasks(refs[:_TASKS_SHOWN])
        contents = {ref.ledger_id: task for ref, (_, task) in self._known.items()}
        self._view = RecoveryView(auditor, record, workers, is_paused, refs, contents)
        model = self._observer.model
        done = model.note_recovery(self._view, now=self._loop.time(), at=self._observer.wall_clock())
        # At once, so that no page shows a ledger without a task and without the copies that the task made.
        await for_each(done[:URGENT_PER_S], partial(self._observer.read, self._context), _READS_AT_ONCE)
        self._observer.read_soon(done[URGENT_PER_S:])

    async def _read_tasks(self, refs: list[TaskRef]) -> None:
        now = self._loop.time()
        for ref in [one for one in self._known if one not in refs]:
            del self._known[ref]
        for ref in refs:
            if ref in self._known and now < self._known[ref][0] + _IDLE_S:
                continue
            with suppress(NoSuchKeyError, MetadataCorruptError):
                self._known[ref] = now, (await self._tasks.read(ref))[0]
