"""Connections to bookies: one per bookie, made when it is first needed, and again after it was lost.

`BookieDirectory` knows the bookies: their registrations in the metadata store, and which failed lately. It
owns a view of the registrations, which follows them by a watch. The view outlives outages of the store: a
bookie whose registration is gone keeps its last address.

Nobody waits for all bookies where some are enough (`BookiePool.until_enough`). A bookie that answers nothing
for now is asked after the others (`BookiePool.asked_last`). It is asked all the same where it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from client_aio.bookies.connection import NO_ANSWER, BookieConnection, connect
from metadata.access.bookies import (
    BookieRecord,
    Orders,
    available_bookies,
    registered_bookies,
    retired_bookies,
)
from metadata.awake import Deadline, awake_timeout
from metadata.errors import (
    BookieReadOnlyError,
    BookieUnavailableError,
    BookKeeperError,
    ClientClosedError,
    MetadataError,
    NoSuchLedgerError,
    NotABookieError,
    ProtocolError,
)
from metadata.ids import KEY_AVAILABLE, KEY_ORDERS
from metadata.owned_task import OwnedTask, unless
from metadata.repeated_reports import RepeatedReports

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from bookie_aio.wire.messages import Message
    from client_aio.config import ClientConfig
    from metadata.store import MetadataStore

Answer = TypeVar("Answer", bound="Message")
Result = TypeVar("Result")

_REFRESH_RETRY_S = 0.5
_RECORDS_AGE_S = 30.0
"""Records of bookies that are older are read again before the next ensemble but one is chosen."""
RECENT_S = 0.1
"""Who looks for a bookie again and again is served by a read of the registrations no older than this."""
_REPORTS_LONGEST_S = 3600.0
_REPORTS_MAX = 256
GRACE_S = 0.1
"""How much longer the last answers are waited for once there are enough."""
_FINISH_ADDS_S = 0.5
"""How long a client that is closed waits for a bookie that answers none of its adds."""
_CONNECT_GRACE_S = 0.3
"""A bookie that is not connected so much later than another one counts as unreachable, for now."""


class Quarantine:
    """Which bookies failed within the last `duration_s` seconds of the caller's clock."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._failed_at_s: dict[str, float] = {}  # in ascending order of the times

    def note_failure(self, bookie_id: str, now_s: float) -> None:
        """Put a bookie into quarantine, or keep it there for longer."""
        self._failed_at_s.pop(bookie_id, None)
        self._failed_at_s[bookie_id] = now_s

    def members(self, now_s: float) -> list[str]:
        """Return the bookies in quarantine, the one that failed longest ago first."""
        for bookie_id, at_s in list(self._failed_at_s.items()):
            if at_s + self._duration_s > now_s:
                break
            del self._failed_at_s[bookie_id]
        return list(self._failed_at_s)


class BookieDirectory:
    """The running bookies, as last read from the metadata store, and the bookies that failed lately.

    A bookie with an operator's order is not writable here, whatever its own record says. The order comes by a
    watch, and the record does not: it is read again when bookies come or go.
    """

    def __init__(self, store: MetadataStore, config: ClientConfig) -> None:
        self._store = store
        self._config = config
        self._available: dict[str, BookieRecord] = {}
        self._last_known: dict[str, BookieRecord] = {}
        self._quarantine = Quarantine(config.quarantine_s)
        self._loop = asyncio.get_running_loop()
        self._as_read: object = None
        self._changed = asyncio.Event()
        self._runs: frozenset[tuple[str, str]] = frozenset()  # of the bookies that are registered
        self._came_or_went = asyncio.Event()
        self.reports = RepeatedReports(self._loop, longest_s=_REPORTS_LONGEST_S, keys_max=_REPORTS_MAX)
        """Of the whole client: warnings that come again and again."""
        self._tasks: list[OwnedTask] = []
        self._refreshing: asyncio.Task[None] | None = None
        self._recent: asyncio.Task[None] | None = None
        self._recent_from = 0.0
        self._read_at = self._loop.time()
        self._reads = 0
        self._read_last = 0  # the newest read whose result is in use
        self.orders = Orders()
        """The orders as last read."""
        self._told: dict[object, Callable[[], None]] = {}

    async def start(self) -> None:
        """Read the registrations, and follow them from now on.

        Raises:
            MetadataError: they cannot be read.
        """
        await self.refresh()
        self._tasks = [
            OwnedTask(partial(self._follow, KEY_AVAILABLE), "bookie directory"),
            OwnedTask(partial(self._follow, KEY_ORDERS), "orders to bookies"),
        ]

    async def close(self) -> None:
        """Stop following."""
        for reading in (self._refreshing, self._recent):
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        self.reports.close(writes_counts=False)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            await task.wait()

    def tell_of_orders(self, owner: object, told: Callable[[], None]) -> None:
        """Call `told` whenever the orders have changed, until `tell_no_more`."""
        self._told[owner] = told

    def tell_no_more(self, owner: object) -> None:
        """End the calls of `tell_of_orders`."""
        self._told.pop(owner, None)

    @property
    def available(self) -> Mapping[str, BookieRecord]:
        """Return the running bookies by id."""
        return self._available

    @property
    def last_known(self) -> Mapping[str, BookieRecord]:
        """Return the last registration of each bookie that was ever registered and has not left, by id."""
        return self._last_known

    def quarantined(self) -> list[str]:
        """Return the bookies that failed within `quarantine_s`, the one that failed longest ago first.

        A connection to a bookie does not end its quarantine: a bookie that flaps stays in quarantine.
        """
        return self._quarantine.members(self._loop.time())

    def note_failure(self, bookie_id: str) -> None:
        """Put a bookie into quarantine."""
        self._quarantine.note_failure(bookie_id, self._loop.time())

    def note_refusal(self, bookie_id: str, error: BookKeeperError) -> None:
        """Put a bookie into quarantine, unless it answered that the ledger has been deleted.

        A bookie that answered that it is read-only counts as that until its record is read again.
        """
        if not isinstance(error, NoSuchLedgerError):
            self.note_failure(bookie_id)
        if isinstance(error, BookieReadOnlyError) and bookie_id in self._available:
            self._available[bookie_id] = replace(self._available[bookie_id], is_writable=False)
            self._recent = None  # A read that began before says nothing of it.

    def refresh_soon(self) -> None:
        """Begin to read the registrations where they are old: free space changes without a word."""
        is_old = self._loop.time() > self._read_at + _RECORDS_AGE_S
        if self._tasks and is_old and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._loop.create_task(self._refresh_quietly(), name="refresh of bookies")

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh()
        except MetadataError as error:
            self._read_at = self._loop.time()  # The next attempt comes as much later.
            logger.info("the records of bookies stay as they are: %s", error)

    def addresses(self, bookie_id: str) -> list[str]:
        """Return the bookie's last known addresses; none if it was never registered."""
        record = self._last_known.get(bookie_id)
        return list(record.addresses) if record else []

    async def refresh(self) -> None:
        """Read the registrations now.

        Raises:
            MetadataError: they cannot be read; the last ones stay in use.
        """
        self._reads += 1
        number = self._reads
        available = await available_bookies(self._store)
        orders = await Orders.read(self._store)
        # Last: one that was cut off meanwhile may register once more, before it learns that it has left.
        left = await retired_bookies(self._store)
        available = {name: record for name, record in available.items() if name not in left}
        if number < self._read_last:
            return  # A read that began later has ended earlier.
        self._read_last, self._read_at = number, self._loop.time()
        self._last_known.update(available)
        for name in left:
            self._last_known.pop(name, None)
        self._available = {
            name: replace(record, is_writable=False) if name in orders.by_bookie else record
            for name, record in available.items()
        }
        before, self.orders = self.orders, orders
        # As they were read: `_available` is also changed by refusals.
        if (available, orders.by_bookie) != self._as_read:
            self._as_read = available, orders.by_bookie
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        runs = frozenset((name, record.nonce) for name, record in available.items())
        if runs != self._runs:
            self._runs = runs
            came_or_went, self._came_or_went = self._came_or_went, asyncio.Event()
            came_or_went.set()
        if before.by_bookie != orders.by_bookie:
            for told in list(self._told.values()):
                told()

    async def refresh_since(self, since: float) -> None:
        """Do as `refresh`, or share a read that began at that time of the loop's clock, or later.

        So the load of the metadata store does not grow with those who look for a bookie at once. What began
        before `since` says nothing of a bookie that has registered meanwhile.
        """
        if self._recent is None or self._recent.cancelled() or self._recent_from < since:
            self._recent_from = math.inf  # It has not begun yet, so it is as new as anybody may want.
            self._recent = self._loop.create_task(self._refresh_shared(), name="refresh of bookies")
            self._recent.add_done_callback(lambda done: done.cancelled() or done.exception())  # is retrieved
        reading = self._recent
        await asyncio.wait([reading])
        if reading.cancelled():
            raise MetadataError("reading the registrations was cancelled, or the client is closed: try again")
        reading.result()

    async def _refresh_shared(self) -> None:
        self._recent_from = self._loop.time()
        await self.refresh()

    async def registered(self) -> list[str]:
        """Return the bookies that have a cookie, running or not; none if the store cannot be reached."""
        try:
            return await registered_bookies(self._store)
        except MetadataError as error:
            what = "which bookies are registered cannot be read: %s"
            self.reports.warn(logger, "registered bookies", what, error)
            return []

    async def wait_for_change(self, timeout_s: float | None) -> None:
        """Wait until registrations or orders were read that differ from the last ones, or for the timeout.

        Whoever waits reads them again behind that. If each read ended the wait, two that wait would wake each
        other without end.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_for_membership_change(self) -> None:
        """Wait until a bookie has registered, or was started again, or has gone."""
        await self._came_or_went.wait()

    async def _follow(self, key: str) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._store.watch(key)) as changes:
                    async for _ in changes:
                        await self.refresh()
            except MetadataError as error:
                what = "the list of bookies cannot be read, the last one stays in use: %s"
                self.reports.warn(logger, "list of bookies", what, error)
            await asyncio.sleep(_REFRESH_RETRY_S)


logger = logging.getLogger(__name__)


class BookiePool:
    """One connection per bookie."""

    def __init__(self, directory: BookieDirectory, config: ClientConfig, instance_id: str) -> None:
        self.directory = directory
        self._config = config
        self._instance_id = instance_id
        self._open: dict[str, BookieConnection] = {}
        self._opening: dict[str, asyncio.Task[BookieConnection]] = {}
        self._returning: dict[str, Deadline] = {}  # suspects that were reached, until these ends
        self._hangs_until: dict[str, float] = {}  # of bookies whose last attempt took its whole time
        self._suspects: set[str] = set()  # whose connection ended in silence, and that were not reached since
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def peek(self, bookie_id: str) -> BookieConnection | None:
        """Return the live connection to the bookie; None if there is none."""
        return self._open.get(bookie_id)

    def asked_last(self) -> list[str]:
        """Return the bookies to ask after all others: those not connected yet, silent, or in quarantine.

        A bookie is silent long before it counts as failed, which begins its quarantine.
        """
        return [*self._opening, *self.doubtful()]

    def doubtful(self) -> list[str]:
        """Return the bookies that nobody waits for once the others are enough: silent, or in quarantine.

        The one that failed longest ago stands first among those in quarantine.
        """
        quarantined = self.directory.quarantined()
        silent = [name for name, connection in self._open.items() if connection.is_silent]
        silent += sorted(self._suspects.difference(silent))
        return [*(name for name in silent if name not in quarantined), *quarantined]

    async def await_suspects(self, bookie_ids: Collection[str]) -> bool:
        """Wait until one of these bookies whose connection ended in silence is reached, or is down.

        A bookie that stood still for long has lost its registration, and is chosen for no seat without it. So
        one that was reached is waited for until it is registered, at most for `connect_timeout_s`.

        Returns:
            Whether there was one to wait for.
        """
        for name in bookie_ids:
            is_back = name in self._returning and name in self._open
            if is_back and name not in self.directory.available:
                await self.directory.wait_for_change(_REFRESH_RETRY_S)
                return True
        opening = [
            self._opening[name] for name in bookie_ids if name in self._suspects & self._opening.keys()
        ]
        if opening:
            reached = asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            await unless(self.directory.wait_for_membership_change(), reached)
        return bool(opening)

    async def get_all_unless_changed(
        self, bookie_ids: Collection[str]
    ) -> dict[str, BookieConnection | BookKeeperError] | None:
        """Return a connection or an error for each bookie; None once the registrations have changed before.

        A bookie that hangs takes the whole connect timeout, and another one may be back meanwhile.
        """
        return await unless(self.directory.wait_for_membership_change(), self.get_all(bookie_ids))

    async def until_enough(
        self,
        tasks: Mapping[asyncio.Task[Result], str],
        is_enough: Callable[[set[asyncio.Task[Result]]], bool],
        *,
        grace_s: float = GRACE_S,
        doubtful_grace_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> set[asyncio.Task[Result]]:
        """Wait until enough tasks are done, and then only a little longer for the others.

        The others get `grace_s`, or as long as it took until enough were done. Where all of them ask bookies
        that are silent or in quarantine, they get `doubtful_grace_s`. No task is cancelled.

        Args:
            tasks: the tasks, with the bookie that each of them asks.
            is_enough: whether these tasks, which are done, are enough.
            timeout_s: of the whole; None for none.

        Returns:
            The tasks that are not done.
        """
        done: set[asyncio.Task[Result]] = set()
        waiting = set(tasks)
        has_enough = False
        with Deadline(timeout_s) as deadline:
            begun = deadline.time()
            while waiting:
                if not has_enough and is_enough(done):
                    has_enough = True
                    is_hopeless = {tasks[task] for task in waiting} <= set(self.doubtful())
                    took_s = deadline.time() - begun
                    deadline.shorten(doubtful_grace_s if is_hopeless else max(grace_s, took_s))
                ended, waiting = await deadline.wait(waiting)
                done |= ended
                if not ended:
                    break
        return waiting

    async def ask(
        self,
        bookie_id: str,
        request: Message,
        expected: type[Answer],
        *,
        timeout_s: float,
        ledger_id: int,
        auth: bytes | None = None,
    ) -> tuple[Answer, memoryview]:
        """Send a request that may be sent twice, and wait for its answer; connect where that is needed.

        A connection that is older than this call may have been forgotten on the way. If it ends without the
        answer, the request is sent again over a new one.

        Raises:
            BookKeeperError: as `get`, and as `BookieConnection.call`.
        """
        former = self._open.get(bookie_id)
        for connection in (former, None):
            if connection is None:
                connection = await self.get(bookie_id)
            try:
                return await connection.call(
                    request, expected, timeout_s=timeout_s, ledger_id=ledger_id, auth=auth
                )
            except NO_ANSWER:
                if connection is not former or connection.is_open:
                    raise
        raise AssertionError(former)

    async def get(self, bookie_id: str) -> BookieConnection:
        """Return a live connection to the bookie; connect if there is none.

        Cancelling leaves the attempt to connect running, for other callers.

        Raises:
            BookieUnavailableError: unknown, unreachable, or too slow to answer.
            ProtocolError: the peer at its address is not that bookie.
        """
        under_way = self._opening.get(bookie_id)
        if under_way is not None:
            # It began before this call. If it fails, the bookie may be back by now: one more attempt is made.
            with contextlib.suppress(BookieUnavailableError, ProtocolError):
                return await self._wait_for(under_way)
        connection = self._open.get(bookie_id)
        if connection is not None:
            return connection
        self._check_open()
        task = self._opening.get(bookie_id)
        if task is None or task is under_way:
            task = self._open_new(bookie_id)
        return await self._wait_for(task)

    async def get_briefly(self, bookie_id: str) -> BookieConnection:
        """Do as `get`, for one ledger after another: a bookie that hangs is waited for in full only once.

        Where an attempt has just ended by its timeout, the next one is waited for `_CONNECT_GRACE_S`, and
        goes on. So a bookie that serves again is not passed over: it answers in that time. One that takes
        longer is reached by the attempt that goes on, and the next call finds the connection.

        Raises: as `get`.
        """
        if self._loop.time() >= self._hangs_until.get(bookie_id, 0.0):
            return await self.get(bookie_id)
        try:
            async with awake_timeout(_CONNECT_GRACE_S):
                return await self.get(bookie_id)
        except TimeoutError:
            raise BookieUnavailableError(
                f"bookie {bookie_id} let an attempt to connect time out, and does not answer the next one",
                bookie_id=bookie_id,
            ) from None

    def _open_new(self, bookie_id: str) -> asyncio.Task[BookieConnection]:
        task = self._loop.create_task(self._connect(bookie_id), name=f"to {bookie_id}")
        self._opening[bookie_id] = task
        task.add_done_callback(lambda done: self._opened(bookie_id, done))
        return task

    async def _wait_for(self, opening: asyncio.Task[BookieConnection]) -> BookieConnection:
        # Not by awaiting the task: closing the pool cancels it, which must not cancel the callers.
        await asyncio.wait([opening])
        if opening.cancelled():
            self._check_open()
            raise BookieUnavailableError("connecting was cancelled by the application: try again")
        return opening.result()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosedError("the client is closed")

    async def get_all(
        self, bookie_ids: Iterable[str], *, grace_s: float = _CONNECT_GRACE_S
    ) -> dict[str, BookieConnection | BookKeeperError]:
        """Return, for each bookie, its connection or the error of connecting.

        Once one of them is connected, the others are waited for `grace_s` longer, or as long as the first
        one took. Then they count as unreachable, and their attempts go on.
        """
        tasks = {asyncio.ensure_future(self.get(name)): name for name in bookie_ids}
        try:
            waiting = await self.until_enough(
                tasks,
                lambda done: any(not task.cancelled() and task.exception() is None for task in done),
                grace_s=grace_s,
                doubtful_grace_s=GRACE_S,
            )
        finally:
            for task in tasks:
                if not task.cancel() and not task.cancelled():
                    task.exception()  # retrieved: asyncio logs no error if this call was cancelled
        result: dict[str, BookieConnection | BookKeeperError] = {}
        for task, name in tasks.items():
            if task in waiting or task.cancelled():
                result[name] = too_slow(name)
                continue
            error = task.exception()
            if error is None:
                result[name] = task.result()
            elif isinstance(error, BookKeeperError):
                result[name] = error
            else:
                raise error
        return result

    async def close(self) -> None:
        """Close all connections. Adds that wait for their bookie's answer are given a moment to get it.

        Their ledger may be closed already: its acknowledgements came from an ack quorum. A bookie that got
        the add a little later than the others would otherwise lack it, until somebody repairs the ledger.
        """
        self._is_closed = True
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        waiting = [one.finish_adds(_FINISH_ADDS_S) for one in list(self._open.values())]
        try:
            await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            for connection in list(self._open.values()):
                connection.close()

    def abandon(self) -> None:
        """Close all sockets from outside the event loop, which does not run any more."""
        self._is_closed = True
        for connection in list(self._open.values()):
            connection.abandon()

    async def _connect(self, bookie_id: str) -> BookieConnection:
        began, timeout_s = self._loop.time(), self._config.connect_timeout_s
        addresses = self.directory.addresses(bookie_id)
        error: BookKeeperError = BookieUnavailableError(
            f"bookie {bookie_id} is not registered, so its address is not known", bookie_id=bookie_id
        )
        for _ in range(2):
            for address in addresses:
                try:
                    return await connect(
                        address,
                        bookie_id=bookie_id,
                        instance_id=self._instance_id,
                        timeout_s=timeout_s,
                        ping_timeout_s=self._config.ping_timeout_s,
                        on_lost=self._lost,
                    )
                except (BookieUnavailableError, NotABookieError) as failure:
                    error = failure
            tried = addresses
            with contextlib.suppress(MetadataError):
                await self.directory.refresh_since(began)
            addresses = self.directory.addresses(bookie_id)
            if addresses == tried:
                break  # The bookie has not moved: it is down.
        self.directory.note_failure(bookie_id)
        if self._loop.time() > began + timeout_s / 2:
            # Long enough for the next attempt to end, and to say the same.
            self._hangs_until[bookie_id] = self._loop.time() + 2 * timeout_s
        raise error

    def _opened(self, bookie_id: str, task: asyncio.Task[BookieConnection]) -> None:
        if self._opening.get(bookie_id) is task:
            del self._opening[bookie_id]
        if bookie_id in self._suspects:
            self._returns(bookie_id)
        self._suspects.discard(bookie_id)  # It is reached, or in quarantine.
        if task.cancelled() or task.exception() is not None:
            return
        self._hangs_until.pop(bookie_id, None)
        connection = task.result()
        if self._is_closed:
            connection.close()
        elif connection.is_open:
            self._open[bookie_id] = connection

    def _returns(self, bookie_id: str) -> None:
        """Note that a suspect was reached: for a while, its registration may still be on its way."""
        if (former := self._returning.pop(bookie_id, None)) is not None:
            former.stop()
        end = Deadline(self._config.connect_timeout_s, lambda: self._returning.pop(bookie_id))
        self._returning[bookie_id] = end.__enter__()

    def _lost(self, connection: BookieConnection) -> None:
        if self._open.get(connection.bookie_id) is connection:
            del self._open[connection.bookie_id]
            if self._is_closed:
                return
            logger.info("bookie=%s connection lost: %s", connection.bookie_id, connection.error)
            if connection.was_silent and connection.bookie_id not in self._opening:
                # The bookie is gone, or the connection was forgotten on the way: connecting tells them apart.
                self._suspects.add(connection.bookie_id)
                self._open_new(connection.bookie_id)


def too_slow(bookie_id: str) -> BookieUnavailableError:
    """Build the error of a bookie that others were faster to connect to."""
    return BookieUnavailableError(
        f"bookie {bookie_id} was not connected when others were", bookie_id=bookie_id
    )
