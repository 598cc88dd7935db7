"""Handles of bounded ledgers: what a writer or a reader reports, and what must hold of it.

Owns a record of each handle beside the history's record of its ledger, and the checks of it. The writer's
`last_add_confirmed` decides what is acknowledged, whenever it is read. So the history also checks adds
without a future of their own: those of bulks and those under deferred sync. The names:

- WritersTellTheTruth: `last_add_confirmed` and `last_add_fully_replicated` of a writer never go back. The
  second never lies above the first, nor the first above the last entry added. The whole write set has said OK
  to an entry that is fully replicated. `length` is that of the acknowledged entries. An entry under an id of
  the caller's waits for the entries before it, and no longer.
- NoOutOfOrderEntries: futures of adds complete in the order of the entries, with their ids. The ids of a bulk
  are contiguous. Readers return entries in order, without gaps, as far as they were asked to.
- WaitsCover: `flush` returns when everything added before is acknowledged (with deferred sync: received).
  `force` returns when it is durable and acknowledged, `close` when it is in the closed ledger, `drain` when
  there is room.
- EndedWritersAcknowledgeNothing: a writer that was fenced, aborted or closed acknowledges nothing more. Each
  of its methods raises, or returns what its docstring says.
- SentAddsEndUnknown: an add that may have been sent does not fail as one that was not done (rule 8). Of a
  batch nothing is at a bookie that failed as *not done*, nor in the ledger when it is closed.
- BatchesCount: a batch has contiguous ids, in the order of the calls. One that fails says how many of its
  entries are acknowledged.
- CallsEnd: a call on an ended handle, or one that is cancelled, comes to an end. So does each call made
  before or during the faults, once they are over for long.
- CalmIsCalm: once faults are over for a while, no call fails on handles made from then on, unless others
  changed the ledger. It holds for clients that lived through the faults, too.
- WrongArgumentsAreRefused: with the error that the docstring names, and nothing is added.
- ReadersNeverGoBack: the LAC of one reader never goes back, nor beyond the entries acknowledged or closed.
- AcknowledgedIsFound: no reader with the right password is told that an acknowledged entry is absent.
- RefreshesAreFresh: `refresh(sync=True)` sees every change completed before the call. LAC and length of a
  closed ledger are those in the metadata store.
- NothingIsForged: no reader meets a damaged answer where no medium lies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from metadata.errors import BookKeeperError, NoSuchEntryError, Outcome
from tests.sim.workloads.ledger import SETUPS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterator

    from client_aio import LedgerReader, LedgerWriter
    from client_aio.ledger.entry_reader import Entry
    from metadata.model.ledger import LedgerMetadata
    from tests.sim.cluster.loop import Process
    from tests.sim.simulation import Simulation

T = TypeVar("T")
CALM_S, SETTLED_S = 27.0, 12.0
# An operation of the metadata store that was lost before its link was well again, and then twice over a
# connection under way, one of its own, and a request over it.
_TICKS, _TICK_S = 12, 0.5
MEDIA = ("disk_bit_flip", "disk_lost_write", "disk_misdirected_write", "disk_wiped")


async def within_bounds(simulation: Simulation, what: str, call: asyncio.Task[T]) -> None:
    """Wait for a call that waits for nobody else; it fails the run when it goes on and on.

    The bound is in turns of the calling process: neither a pause nor a jump of its clock makes it shorter.
    Turns in which the metadata store may leave the process without an answer do not count: a call may make
    several operations, one after the other, and each may take until its timeout.
    """
    loop = simulation.loop
    metadata = simulation.metadata_faults(loop.current.name)
    ticks = _TICKS
    while ticks:
        tick = loop.create_future()
        loop.post(loop.current, _TICK_S, tick.set_result, None)
        await asyncio.wait((call, tick), return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return
        ticks -= not metadata.keeps_waiting
    simulation.history.fail("CallsEnd", f"{what} does not come to an end: {call!r}")


async def watched(simulation: Simulation, what: str, call: Coroutine[Any, Any, T]) -> T:
    """Make a call that is to have ended when the run has been calm for long (`calm`)."""
    under_way: dict[int, tuple[float, Process, str]] = simulation.shared.setdefault("calls under way", {})
    number = simulation.shared["calls made"] = simulation.shared.get("calls made", 0) + 1
    under_way[number] = simulation.loop.now, simulation.loop.current, what
    try:
        return await call
    finally:
        del under_way[number]


async def calm(simulation: Simulation) -> None:
    """End all faults `CALM_S` before the chaos is over: from then on everything has to work again.

    Nobody fails any more soon after that, and what was called before has ended when the calm has.
    """
    quiet_at = simulation.plan.duration - CALM_S
    simulation.shared["calm at"] = quiet_at + SETTLED_S

    def look() -> None:
        for since, process, what in simulation.shared.get("calls under way", {}).values():
            if process.is_alive and since < quiet_at + SETTLED_S:
                simulation.history.fail("CallsEnd", f"{what} was called at {since:.4f} s, and has not ended")

    simulation.after(quiet_at, simulation._heal)
    simulation.after(simulation.plan.duration - 0.01, look)


def is_calm(simulation: Simulation) -> bool:
    """Return whether all faults are over, and what they led to is too."""
    return bool(simulation.loop.now >= simulation.shared.get("calm at", float("inf")))


SETUPS[calm.__name__] = calm


async def ends(simulation: Simulation, what: str, call: Coroutine[Any, Any, T]) -> T:
    """Make a call that must end soon, whatever the faults."""
    task = asyncio.create_task(watched(simulation, what, call))
    await within_bounds(simulation, what, task)
    return task.result()


async def interrupted(
    simulation: Simulation, what: str, call: Coroutine[Any, Any, T], seconds: float
) -> T | None:
    """Make a call and cancel it after a while; gives None if that came first."""
    task = asyncio.create_task(watched(simulation, what, call))
    await asyncio.wait((task,), timeout=seconds)
    if not task.done():
        task.cancel()
        await within_bounds(simulation, f"{what}, cancelled,", task)
    return None if task.cancelled() else task.result()


class BrokenError(Exception):
    """What an iterable of the application raises in its middle."""


class _Add:
    """One entry given to a writer."""

    __slots__ = ("bulk", "data", "entry_id", "future", "whole")

    def __init__(
        self,
        data: bytes,
        future: asyncio.Future[Any] | None = None,
        bulk: Bulk | Batch | None = None,
        whole: asyncio.Future[Any] | None = None,
    ) -> None:
        self.data = data
        self.future = future  # its own, or of the batch of which it is the last entry
        self.bulk = bulk
        self.whole = future if whole is None else whole  # that of its batch, or its own
        self.entry_id: int | None = None  # once it has one

    @property
    def was_dropped(self) -> bool:
        """Return whether it has failed while it waited, so that it gets no id."""
        whole = self.whole
        return whole is not None and whole.done() and not whole.cancelled() and bool(whole.exception())


class Batch:
    """One `add_batch`, and the ids of its entries as far as they have some."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ids: list[int] = []


class Bulk:
    """The iterable of one `add_entries`, which notes what of it was taken, and under which ids.

    Args:
        pause_s: between entries, in an async one.
        breaks_at: the number of the entry in whose place it raises `BrokenError`; none if too high.
    """

    def __init__(self, use: WriterUse, entries: list[bytes], pause_s: float, breaks_at: int) -> None:
        self._use = use
        self._entries = entries
        self._pause_s = pause_s
        self._breaks_at = breaks_at
        self.ids: list[int] = []

    def __iter__(self) -> Iterator[bytes]:
        self._use.look()  # what waited for the end of the bulk before this one has its ids by now
        for number, data in enumerate(self._entries):
            if number == self._breaks_at:
                raise BrokenError
            self._use.bulk.append(_Add(data, bulk=self))
            yield data
            self._use.look()

    async def slowly(self) -> AsyncGenerator[bytes, None]:
        """Return the entries one after another, with pauses."""
        for data in self:
            yield data
            await asyncio.sleep(self._pause_s)


class WriterUse:
    """A writer's handle and what it was given; its ledger is known to the history."""

    def __init__(
        self, simulation: Simulation, who: str, handle: LedgerWriter, *, advanced: bool, deferred: bool
    ) -> None:
        self.handle = handle
        self.advanced = advanced
        self.deferred = deferred
        self.record = simulation.history.ledger(handle.ledger_id)
        self.bulk: deque[_Add] = deque()  # given by a bulk that is under way, and not known to be taken
        self.waiting: dict[int, _Add] = {}  # of ids that were assigned, and not known to be taken
        self.is_over = False
        self._simulation = simulation
        self._history = simulation.history
        self._who = who
        self._queue: deque[_Add] = deque()  # single adds, not known to be taken
        self._singles: list[_Add] = []  # taken, by id
        self._completed = 0  # how many of those are known to have been acknowledged
        self._lengths = [0]  # of the ledger before each entry
        self._lac = self._lafr = -1
        self._ended_at: int | None = None  # the LAC, once the writer cannot acknowledge any more
        simulation.history.confirmers.append(self.look)

    def __str__(self) -> str:
        return f"{self._who}, writing ledger {self.handle.ledger_id},"

    # --- what is added ---

    def add(
        self, given: bytes | bytearray | memoryview, data: bytes, entry_id: int | None
    ) -> asyncio.Future[int]:
        """Add an entry, `data` in whatever type; raises what `add_entry` raises."""
        future = self.handle.add_entry(given, entry_id)
        if future.done() and not future.cancelled() and future.exception() is not None:
            self.require(
                self.handle.is_closed, "WritersTellTheTruth", f"refused an add, and is not closed: {future!r}"
            )
            return future
        add = _Add(data, future)
        if entry_id is None:
            self._queue.append(add)
        else:
            self.waiting[entry_id] = add
        self.look()
        self.require(
            len(self.record.issued) not in self.waiting,
            "WritersTellTheTruth",
            f"lets entry {len(self.record.issued)} wait, though all before it have come",
        )
        future.add_done_callback(lambda _: self._done(add))
        return future

    def add_batch(self, given: list[Any], entries: list[bytes]) -> asyncio.Future[tuple[int, int]]:
        """Add a batch, `entries` in whatever types; raises what `add_batch` raises."""
        future = self.handle.add_batch(given)
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            is_told = isinstance(error, BookKeeperError) and error.outcome is Outcome.NOT_DONE
            text = f"refused a batch, and is not closed: {future!r}"
            self.require(self.handle.is_closed and is_told, "WritersTellTheTruth", text)
            return future
        batch = Batch(len(entries))
        adds = [_Add(data, bulk=batch, whole=future) for data in entries]
        adds[-1].future = future
        self._queue.extend(adds)
        self.look()
        future.add_done_callback(lambda _: self._batch_done(batch, adds[-1]))
        return future

    def look(self) -> None:
        """Note what was taken and acknowledged since anybody looked, and check what the handle says."""
        handle, record = self.handle, self.record
        if self.is_over:
            return
        while len(record.issued) <= handle.last_add_pushed:
            add = self._next_taken(len(record.issued))
            if add is None:
                text = f"took {handle.last_add_pushed + 1} entries, and was given {len(record.issued)}"
                self.require(False, "WritersTellTheTruth", text)
                return
            add.entry_id = len(record.issued)
            record.issued.append(add.data)
            self._lengths.append(self._lengths[-1] + len(add.data))
            if add.future is not None:
                self._singles.append(add)
            if add.bulk is not None:
                add.bulk.ids.append(add.entry_id)
        lac, lafr = handle.last_add_confirmed, handle.last_add_fully_replicated
        if (lac, lafr) != (self._lac, self._lafr):
            self._moved(lac, lafr)

    def _next_taken(self, entry_id: int) -> _Add | None:
        if self.advanced:
            return self.waiting.pop(entry_id, None)
        if self.bulk:
            return self.bulk.popleft()
        while self._queue and self._queue[0].was_dropped and not self.handle.is_closed:
            self._queue.popleft()
        return self._queue.popleft() if self._queue else None

    def _moved(self, lac: int, lafr: int) -> None:
        before = self._lafr
        self.require(
            self._lac <= lac < len(self.record.issued) and before <= lafr <= lac,
            "WritersTellTheTruth",
            f"went from LAC {self._lac}, LAFR {before} to {lac}, {lafr} of {len(self.record.issued)} entries",
        )
        self.require(
            self._ended_at is None or lac == self._ended_at,
            "EndedWritersAcknowledgeNothing",
            f"had ended at LAC {self._ended_at}, and is at {lac}",
        )
        self._lac, self._lafr = lac, lafr
        length = self.handle.length
        self.require(
            length == self._lengths[lac + 1],
            "WritersTellTheTruth",
            f"says that {lac + 1} entries have {length} bytes; they have {self._lengths[lac + 1]}",
        )
        self._history.confirmed(self._who, self.handle.ledger_id, lac)
        metadata = self.record.open_metadata
        if metadata is None:
            return
        for entry_id in range(before + 1, lafr + 1):
            holders = self._history.holders(metadata, entry_id)
            self.require(
                len(holders) == metadata.write_quorum,
                "WritersTellTheTruth",
                f"says that entry {entry_id} is fully replicated: only {holders} said OK",
            )

    def require(self, condition: bool, name: str, text: str) -> None:
        """Fail unless the condition holds."""
        if not condition:
            self._history.fail(name, f"{self} {text}")

    def _done(self, add: _Add) -> None:
        future = add.future
        assert future is not None
        if self.is_over or future.cancelled():
            return
        self.look()
        error = future.exception()
        if error is not None:
            if not isinstance(error, BookKeeperError):
                self.require(False, "Unexpected", f"failed an add with {error!r}")
            elif add.entry_id is not None:
                self.require(
                    error.outcome is Outcome.UNKNOWN,
                    "SentAddsEndUnknown",
                    f"failed entry {add.entry_id}, which may have been sent, as {error.outcome}: {error!r}",
                )
            return
        self._completes(add, future.result())

    def _batch_done(self, batch: Batch, last: _Add) -> None:
        future = last.future
        assert future is not None
        if self.is_over or future.cancelled():
            return
        self.look()
        lac, ids = self.handle.last_add_confirmed, batch.ids
        error = future.exception()
        if error is None:
            is_whole = len(ids) == batch.count and ids == list(range(ids[0], ids[-1] + 1))
            self.require(
                is_whole and future.result() == (ids[0], ids[-1]),
                "BatchesCount",
                f"gave {future.result()} to a batch of {batch.count}, whose entries got {ids}",
            )
            self._completes(last, future.result()[1])
            return
        acknowledged = sum(entry_id <= lac for entry_id in ids)
        is_right = isinstance(error, BookKeeperError) and error.acknowledged is not None
        self.require(is_right, "Unexpected", f"failed a batch with {error!r}")
        assert isinstance(error, BookKeeperError)
        self.require(
            error.acknowledged == acknowledged
            or (self.deferred and (error.acknowledged or 0) > acknowledged),
            "BatchesCount",
            f"says that {error.acknowledged} of {ids} are acknowledged; the LAC is {lac}: {error!r}",
        )
        if error.outcome is Outcome.NOT_DONE and ids:
            self.record.not_done = min(ids[0], self.record.not_done)
            promised = [
                bookie
                for (bookie, ledger_id), entries in self._history.promised.items()
                if ledger_id == self.handle.ledger_id and ids[0] in entries
            ]
            closed = self.record.closed_last
            self.require(
                not promised and (closed is None or closed < ids[0]),
                "SentAddsEndUnknown",
                f"failed a batch at {ids} as not done: {promised} have it, closed at {closed}: {error!r}",
            )

    def _completes(self, add: _Add, entry_id: int) -> None:
        """Check the order in which futures complete, and the LAC."""
        self.require(
            entry_id == add.entry_id and (self.deferred or entry_id <= self.handle.last_add_confirmed),
            "NoOutOfOrderEntries",
            f"completed entry {add.entry_id} with {entry_id} at LAC {self.handle.last_add_confirmed}",
        )
        while self._completed < len(self._singles) and self._singles[self._completed] is not add:
            below = self._singles[self._completed]
            if below.entry_id is None or below.entry_id > entry_id:
                return
            self.require(
                _succeeded(below), "NoOutOfOrderEntries", f"completed {entry_id} before {below.future}"
            )
            self._completed += 1

    # --- what is waited for ---

    def outstanding(self) -> list[asyncio.Future[int]]:
        """Return the adds so far that `flush` and `close` are to wait for."""
        self.look()
        adds = [*self._singles[self._completed :], *self._queue]
        return [add.future for add in adds if add.future is not None]

    def has_covered(self, what: str, last: int, adds: list[asyncio.Future[int]], *, durable: bool) -> None:
        """Check what holds when a call returns that waits for what was added before it."""
        self.look()
        late = [each for each in adds if not each.done() or (not each.cancelled() and each.exception())]
        self.require(not late, "WaitsCover", f"returned from {what} before {late}")
        lac = self.handle.last_add_confirmed
        self.require(
            lac >= last or (self.deferred and not durable),
            "WaitsCover",
            f"returned from {what} at LAC {lac}; entry {last} had been added",
        )

    def has_closed(self, metadata: LedgerMetadata, adds: list[asyncio.Future[int]], last: int) -> None:
        """Check what holds when `close` has returned."""
        self.has_covered("close", last, adds, durable=True)
        lac = self.handle.last_add_confirmed
        self.require(
            metadata.is_closed and metadata.last_entry == lac and metadata.length == self.handle.length,
            "WaitsCover",
            f"was closed at LAC {lac}, with {self.handle.length} bytes, as {metadata}",
        )
        is_known = self.record.is_deleted or self.record.closed_last == lac
        self.require(is_known, "WaitsCover", f"was closed at {lac}: the store has {self.record.metadata}")

    # --- its end ---

    def has_ended(self) -> None:
        """Note that the writer acknowledges nothing more: it was fenced, aborted or closed."""
        self.look()
        self._ended_at = self.handle.last_add_confirmed
        left = [add.future for add in (*self._singles, *self._queue, *self.waiting.values())]
        left = [future for future in left if future is not None and not future.done()]
        self.require(not left, "CallsEnd", f"has ended, and left {left}")

    def leave(self) -> None:
        """Look at it no more; all that it will ever acknowledge is known."""
        self.look()
        self.is_over = True
        self._history.confirmers.remove(self.look)


def _succeeded(add: _Add) -> bool:
    future = add.future
    return future is not None and future.done() and (future.cancelled() or future.exception() is None)


class ReaderUse:
    """A reader's handle, and what it has said."""

    def __init__(self, simulation: Simulation, who: str, handle: LedgerReader) -> None:
        self.handle = handle
        self.record = simulation.history.ledger(handle.ledger_id)
        self.following = 0  # behind the entry that was read last
        self._simulation = simulation
        self._history = simulation.history
        self._who = who
        self._lac = -1
        self._media_lie = any(fault.kind in MEDIA for fault in simulation.plan.faults)
        self.look()

    def require(self, condition: bool, name: str, text: str) -> None:
        """Fail unless the condition holds."""
        if not condition:
            self._history.fail(name, f"{self._who}, reading ledger {self.handle.ledger_id}, {text}")

    @property
    def acknowledged(self) -> int:
        """Return the last entry that is in the ledger for sure."""
        self._history.settle(self._who)
        closed = self.record.closed_last
        return max(self.record.acked, -1 if closed is None else closed)

    def look(self) -> None:
        """Check what the handle says of itself."""
        handle, record = self.handle, self.record
        lac, last = handle.last_add_confirmed, handle.metadata.last_entry
        self.require(lac >= self._lac, "ReadersNeverGoBack", f"went from LAC {self._lac} to {lac}")
        self._lac = lac
        if lac > record.acked:
            self.require(
                lac <= self.acknowledged,
                "ReadersNeverGoBack",
                f"says LAC {lac}: acknowledged up to {record.acked}, closed at {record.closed_last}",
            )
        length = None if last is None else sum(map(len, record.issued[: last + 1]))
        self.require(
            handle.is_closed == (last is not None) and handle.length == length and last in (None, lac),
            "RefreshesAreFresh",
            f"says closed: {handle.is_closed}, LAC {lac}, {handle.length} bytes; it ends at {last}, {length}",
        )
        self.require(
            self._media_lie or not handle.digest_mismatches, "NothingIsForged", "met a damaged answer"
        )

    async def refresh(self) -> None:
        """Read the metadata again, with everything that is completed by now."""
        closed = self.record.closed_last
        await self.handle.refresh(sync=True)
        self.require(
            closed is None or (self.handle.is_closed and self.handle.last_add_confirmed == closed),
            "RefreshesAreFresh",
            f"says LAC {self.handle.last_add_confirmed} after a sync; it was closed at {closed}",
        )

    def got(self, entry: Entry, *, is_confirmed: bool = True) -> None:
        """Note an entry, which must be the one that follows the last."""
        entry_id, data = entry
        self.require(
            entry_id == self.following, "NoOutOfOrderEntries", f"got {entry_id}, not {self.following}"
        )
        self.following = entry_id + 1
        if is_confirmed:
            self._history.read(self._who, self.handle.ledger_id, entry_id, data)
            return
        if entry_id >= len(self.record.issued):
            self._history.settle(self._who)
        self.require(
            entry_id < len(self.record.issued) and self.record.issued[entry_id] == data,
            "NoLogDivergence",
            f"got {data[:40]!r} as entry {entry_id}, unconfirmed, which nobody wrote",
        )

    async def must_be_found(self, reading: Awaitable[None]) -> None:
        """Read what is acknowledged: that there is no such entry is no answer."""
        try:
            await reading
        except NoSuchEntryError as error:
            self.require(self.record.is_deleted, "AcknowledgedIsFound", f"was told: {error}")
            raise
