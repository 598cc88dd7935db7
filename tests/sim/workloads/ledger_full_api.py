"""Roles that use everything a bounded ledger's handles offer, and what clients offer besides.

The roles of `tests.sim.workloads.ledger` do what most applications do. These roles call each public method:
at once, again, cancelled in its middle, and after the handle has ended. `tests.sim.checkers.handles` checks
them.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    InvalidArgumentError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from metadata.ids import KEY_LEDGERS
from tests.sim.checkers.handles import ReaderUse, ends, interrupted, is_calm, within_bounds
from tests.sim.checkers.invariants import write_set
from tests.sim.checkers.writer_calls import Writing
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from client_aio import Client, LedgerReader
    from client_aio.admin.repair import RepairProgress
    from client_aio.admin.replicas import Replica
    from client_aio.handles import AwaitableContext, Opened
    from client_aio.ledger.entry_reader import Entry, EntryBatch
    from metadata.model.ledger import LedgerMetadata
    from tests.sim.checkers.invariants import History
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation


async def _opened(opening: AwaitableContext[Opened]) -> Opened:
    return await opening


async def _made(make: Callable[[], Awaitable[object]]) -> object:
    return await make()


async def _first(stream: AsyncGenerator[int, None]) -> int:
    async with aclosing(stream):
        return await anext(stream)


@role
async def versatile_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Write ledgers, one after another, by every method of a writer (`tests.sim.checkers.writer_calls`)."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/versatile_writer")
    settings = actor.settings
    while not simulation.is_healed:
        was_calm = is_calm(simulation)
        options = {
            "advanced": rng.random() < settings["advanced"],
            "deferred_sync": rng.random() < settings["deferred"],
        }
        quorums = dict(settings["quorums"])
        quorums["guaranteed_write_quorum"] = (
            quorums["guaranteed_write_quorum"] and not options["deferred_sync"]
        )
        try:
            patience = rng.uniform(0.0, 0.05) if rng.random() < 0.05 else 10.0
            ledger = await interrupted(
                simulation, "create_ledger", _opened(client.create_ledger(**quorums, **options)), patience
            )
        except BookKeeperError as error:
            simulation.history.note(actor.name, "could not create a ledger:", repr(error))
            if was_calm:
                simulation.history.fail("CalmIsCalm", f"{actor.name} could not create a ledger: {error!r}")
            await asyncio.sleep(0.3)
            continue
        if ledger is None:
            continue
        simulation.created(actor.name, ledger.ledger_id)
        writing = Writing(simulation, actor, client, ledger, rng, **options)
        if not await writing.run():
            return
        await asyncio.sleep(settings["rest"] * rng.random())


@role
async def versatile_reader(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Open any ledger and read it by everything that a reader offers; stop and cancel, and go on."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/versatile_reader")
    while True:
        was_calm = is_calm(simulation)
        newest = await simulation.newest_ledger(after=-1)
        ledger_id = rng.choice((newest, rng.choice(simulation.ledger_ids)))
        try:
            patience = rng.uniform(0.0, 0.05) if rng.random() < 0.1 else 10.0
            recovers = rng.random() < actor.settings["recovers"]
            opening = client.open_ledger(ledger_id, recover=recovers)
            reader = await interrupted(simulation, "open_ledger", _opened(opening), patience)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"opening ledger {ledger_id}:", repr(error))
            if was_calm and not simulation.history.ledger(ledger_id).is_deleted:
                simulation.history.fail("CalmIsCalm", f"{actor.name} could not open {ledger_id}: {error!r}")
            await asyncio.sleep(0.3)
            continue
        if reader is not None:
            async with reader:
                reading = _Reading(simulation, actor, reader, rng, was_recovered=recovers)
                await reading.run()
                if rng.random() < actor.settings["closes_client"]:
                    await reading.close_client(client)
                    return
        await asyncio.sleep(0.3 * rng.random())


class _Reading:
    """One reader's handle in use."""

    def __init__(
        self,
        simulation: Simulation,
        actor: Actor,
        handle: LedgerReader,
        rng: random.Random,
        *,
        was_recovered: bool,
    ) -> None:
        self.handle = handle
        self._simulation = simulation
        self._who = actor.name
        self._rng = rng
        self._use = ReaderUse(simulation, actor.name, handle)
        self._verified: dict[int, int] = simulation.shared.setdefault("verified LACs", {})
        self._interrupts: float = actor.settings["interrupts"]
        self._is_calm = is_calm(simulation)
        self._calls: dict[Callable[[], Coroutine[Any, Any, None]], int] = {
            self._read: 3,
            self._read_batches: 3,
            self._tail: 3,
            self._tail_batches: 2,
            self._read_unconfirmed: 3,
            self._ask_for_lac: 3,
            self._refresh: 2,
            self._read_beyond: 1,
        }
        closed = self._use.record.closed_last
        self._use.require(
            not was_recovered or (handle.is_closed and handle.last_add_confirmed == closed),
            "RefreshesAreFresh",
            f"was recovered to LAC {handle.last_add_confirmed}; it was closed at {closed}",
        )

    async def run(self) -> None:
        """Make some calls."""
        rng, use = self._rng, self._use
        for _ in range(rng.randint(1, 10)):
            (step,) = rng.choices(list(self._calls), list(self._calls.values()))
            patience = rng.choice((0.0, 0.002, 0.02, 0.3, 1.0)) * rng.random()
            if rng.random() >= self._interrupts:
                patience = 3.0
            try:
                await interrupted(self._simulation, f"{self._who} {step.__name__}", step(), patience)
            except BookKeeperError as error:
                self._simulation.history.note(
                    self._who, f"{step.__name__} of ledger {self.handle.ledger_id}:", repr(error)
                )
                use.require(
                    not self._is_calm or use.record.is_deleted, "CalmIsCalm", f"{step.__name__}: {error!r}"
                )
                await asyncio.sleep(0.1 * rng.random())
            use.look()
            lac = self.handle.last_add_confirmed
            self._verified[self.handle.ledger_id] = max(lac, self._verified.get(self.handle.ledger_id, -1))
            await asyncio.sleep(rng.choice((0.0, 0.05, 0.3)) * rng.random())

    async def close_client(self, client: Client) -> None:
        """Close the client beneath a tailing reader: every call ends, and those of the client are refused."""
        simulation, who = self._simulation, f"{self._who}, whose client is closed,"
        tailing = asyncio.create_task(self._tail())
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.5)) * self._rng.random())
        await ends(simulation, f"{self._who} Client.close", client.close())
        await within_bounds(simulation, f"{who} tail", tailing)
        error = tailing.exception() if tailing.done() else None
        if error is not None and not isinstance(error, BookKeeperError):
            raise error
        for step in self._calls:
            try:
                await ends(simulation, f"{who} {step.__name__}", step())
            except BookKeeperError as refusal:
                simulation.history.note(self._who, f"{step.__name__}, client closed:", repr(refusal))
            self._use.look()
        refused: list[Coroutine[Any, Any, object]] = [
            _made(client.create_ledger),
            _made(lambda: client.open_ledger(self.handle.ledger_id)),
            client.ledger_metadata(self.handle.ledger_id),
            client.ledger_replicas(self.handle.ledger_id),
            client.delete_ledger(self.handle.ledger_id),
            client.repair_ledger(self.handle.ledger_id, replace="b1"),
            _made(lambda: _first(client.list_ledgers())),
        ]
        for call in refused:
            try:
                outcome = repr(await ends(simulation, f"{who} {call!r}", call))
            except ClientClosedError:
                continue
            except BookKeeperError as refusal:
                outcome = repr(refusal)
            self._use.require(False, "CallsEnd", f"was not told that its client is closed: {outcome}")

    def _range(self, end: int) -> tuple[int, int]:
        """Draw a range of entries; the empty one where there are none."""
        first = self._rng.randint(0, max(0, end))
        return first, self._rng.randint(first, end) if first <= end else first - 1

    async def _take(
        self, stream: AsyncGenerator[Entry, None], first: int, *, is_confirmed: bool = True
    ) -> bool:
        """Take entries from a stream, perhaps not all; tells whether it came to its end."""
        self._use.following = first
        left = self._rng.choice((1, 3, 1000, 1000))
        async with aclosing(stream):
            async for entry in stream:
                self._use.got(entry, is_confirmed=is_confirmed)
                left -= 1
                if not left:
                    return False
        return True

    async def _take_batches(self, stream: AsyncGenerator[EntryBatch, None], first: int) -> bool:
        self._use.following = first
        left = self._rng.choice((1, 2, 1000))
        async with aclosing(stream):
            async for batch in stream:
                self._use.require(
                    len(batch) > 0 and batch.first_entry_id + len(batch) - 1 == batch.last_entry_id,
                    "NoOutOfOrderEntries",
                    f"got {batch!r}",
                )
                for entry in batch:
                    self._use.got(entry)
                left -= 1
                if not left:
                    return False
        return True

    def _is_complete(self, last: int) -> None:
        self._use.require(
            self._use.following == last + 1,
            "NoOutOfOrderEntries",
            f"was given the entries before {self._use.following} only, of those up to {last}",
        )

    async def _read(self) -> None:
        first, last = self._range(self.handle.last_add_confirmed)

        async def read() -> None:
            if await self._take(self.handle.read(first, last), first):
                self._is_complete(last)

        await self._use.must_be_found(read())

    async def _read_batches(self) -> None:
        known = self._verified.get(self.handle.ledger_id, -1)
        first, last = self._range(max(known, self.handle.last_add_confirmed))

        async def read() -> None:
            if await self._take_batches(self.handle.read_batches(first, last, known_lac=known), first):
                self._is_complete(last)

        await self._use.must_be_found(read())

    async def _read_unconfirmed(self) -> None:
        use = self._use
        first = self._rng.randint(0, max(0, self.handle.last_add_confirmed) + 2)
        last = first + self._rng.choice((-1, 0, 5, 50))
        acknowledged = use.acknowledged
        stream = self.handle.read_unconfirmed(first, last)
        if await self._take(stream, first, is_confirmed=False):
            use.require(
                use.following > min(last, acknowledged) or use.record.is_deleted,
                "AcknowledgedIsFound",
                f"was told that there is no entry {use.following}: acknowledged up to {acknowledged}",
            )

    def _tail_is_over(self, first: int) -> None:
        self._use.require(
            self.handle.is_closed and self._use.following == max(first, self.handle.last_add_confirmed + 1),
            "AcknowledgedIsFound",
            f"stopped tailing before {self._use.following}; closed: {self.handle.is_closed}",
        )

    async def _tail(self) -> None:
        first = self._rng.randint(0, max(0, self.handle.last_add_confirmed) + 1)

        async def tail() -> None:
            if await self._take(self.handle.tail(first), first):
                self._tail_is_over(first)

        await self._use.must_be_found(tail())

    async def _tail_batches(self) -> None:
        first = self._rng.randint(0, max(0, self.handle.last_add_confirmed) + 1)

        async def tail() -> None:
            if await self._take_batches(self.handle.tail_batches(first), first):
                self._tail_is_over(first)

        await self._use.must_be_found(tail())

    async def _ask_for_lac(self) -> None:
        handle = self.handle
        ask = self._rng.choice((handle.read_last_add_confirmed, handle.try_read_last_add_confirmed))
        lac = await ask()
        self._use.require(
            lac == handle.last_add_confirmed,
            "ReadersNeverGoBack",
            f"was told {lac}; it is {handle.last_add_confirmed}",
        )

    async def _refresh(self) -> None:
        if self._rng.random() < 0.6:
            await self._use.refresh()
        else:
            await self.handle.refresh()

    async def _read_beyond(self) -> None:
        handle, lac = self.handle, self.handle.last_add_confirmed
        for read in (handle.read, handle.read_batches):
            for first, last, kind in ((0, lac + 1, NoSuchEntryError), (3, 1, InvalidArgumentError)):
                try:
                    read(first, last)
                except kind:
                    continue
                self._use.require(False, "WrongArgumentsAreRefused", f"may read {first} to {last} at {lac}")


@role
async def caretaker(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Repair and delete ledgers in a hurry: most calls are cancelled somewhere, and made again."""
    rng, history = random.Random(f"{simulation.plan.seed}/{actor.name}/caretaker"), simulation.history
    while not simulation.is_healed:
        await simulation.newest_ledger(after=-1)
        ledger_id = rng.choice(simulation.ledger_ids)
        record = history.ledger(ledger_id)
        assert record.metadata is not None
        bookie = rng.choice(rng.choice(record.metadata.fragments).bookies)
        patience = rng.choice((0.0, 0.01, 0.1, 5.0)) * rng.random()
        try:
            if rng.random() < actor.settings["deletes"]:
                simulation.deleting(ledger_id)
                await interrupted(simulation, "delete_ledger", _deleted(client, ledger_id, history), patience)
            else:
                repair = client.repair_ledger(
                    ledger_id,
                    replace=bookie,
                    by=rng.choice((bookie, None, None)),
                    recover_after_s=rng.random() if rng.random() < 0.2 else None,
                    on_progress=partial(_has_progressed, history),
                )
                await interrupted(simulation, "repair_ledger", repair, patience)
        except BookKeeperError as error:
            history.note(actor.name, f"taking care of ledger {ledger_id}:", repr(error))
        await asyncio.sleep(0.3 * rng.random())


async def _deleted(client: Client, ledger_id: int, history: History) -> None:
    await client.delete_ledger(ledger_id)
    try:
        metadata = await client.ledger_metadata(ledger_id)
    except NoSuchLedgerError:
        return
    history.fail("InspectionsAreTrue", f"ledger {ledger_id} was deleted, and is {metadata}")


def _has_progressed(history: History, progress: RepairProgress) -> None:
    history.require(
        0 <= progress.entries_done <= progress.entries_total
        and progress.entries_total <= progress.last_entry - progress.first_entry + 1,
        "InspectionsAreTrue",
        lambda: f"a repair says {progress}",
    )


@role
async def inspector(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Look at the cluster as tools do: its ledgers, their metadata and replicas, its bookies."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/inspector")
    inspecting = _Inspecting(simulation, actor, client, rng)
    while True:
        await simulation.newest_ledger(after=-1)
        look = rng.choice((inspecting.list_ledgers, inspecting.look_at_one, inspecting.count_replicas))
        try:
            await interrupted(simulation, look.__name__, look(), 5.0 if rng.random() < 0.8 else 0.05)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"{look.__name__}:", repr(error))
        inspecting.look_at_bookies()
        await asyncio.sleep(0.3 * rng.random())


class _Inspecting:
    """What an inspector asks for, and what must hold of the answers.

    - ListsAreComplete: `list_ledgers` gives ids in ascending order, all ledgers that were there all the
      while, and none that never were.
    - InspectionsAreTrue: `ledger_metadata` gives what was in the store at some moment of the call, and
      `ledger_replicas` one row for each bookie of each fragment of it, with no more entries missing than the
      bookie has not acknowledged; no ledger that is there is said not to be; bookies are known ones.

    What a client sees whose reads lag is as old as its server; that is not compared.
    """

    def __init__(self, simulation: Simulation, actor: Actor, client: Client, rng: random.Random) -> None:
        self._simulation = simulation
        self._history = simulation.history
        self._who = actor.name
        self._client = client
        self._rng = rng
        self._lags = any(
            fault.kind == "meta_lag" and fault.target == actor.name for fault in simulation.plan.faults
        )
        self._seen: list[LedgerMetadata] = []
        self._watched = -1
        simulation.tree.watchers.append(self._changed)

    def _changed(self, key: str, value: bytes | None, version: object) -> None:
        """Note each version of the ledger that is being looked at; the history has heard of it already."""
        if self._watched >= 0 and key.startswith(KEY_LEDGERS):
            self._note()

    def _note(self) -> None:
        metadata = self._history.ledger(self._watched).metadata
        if metadata is not None and (not self._seen or self._seen[-1] != metadata):
            self._seen.append(metadata)

    def _begin(self) -> int:
        self._seen, self._watched = [], self._rng.choice(self._simulation.ledger_ids)
        self._note()
        return self._watched

    def _require(self, condition: bool, name: str, text: str) -> None:
        if not condition:
            self._history.fail(name, f"{self._who} {text}")

    def _there(self, first: int) -> set[int]:
        known = self._history.ledgers.items()
        return {
            number
            for number, record in known
            if record.metadata is not None and not record.is_deleted and number >= first
        }

    async def list_ledgers(self) -> None:
        """Walk over the ledgers, from one of them on or from the first."""
        first = self._rng.choice((0, 0, self._rng.choice(self._simulation.ledger_ids)))
        before, found = self._there(first), list[int]()
        async with aclosing(self._client.list_ledgers(first=first)) as ledgers:
            async for ledger_id in ledgers:
                self._require(
                    ledger_id >= first and (not found or ledger_id > found[-1]),
                    "ListsAreComplete",
                    f"was given {ledger_id} behind {found}, from {first} on",
                )
                self._require(
                    self._history.ledger(ledger_id).metadata is not None,
                    "ListsAreComplete",
                    f"was given ledger {ledger_id}, which never was",
                )
                found.append(ledger_id)
        missing = before.intersection(self._there(first)).difference(found)
        self._require(self._lags or not missing, "ListsAreComplete", f"missed {sorted(missing)} in {found}")

    async def look_at_one(self) -> None:
        """Read one ledger's metadata."""
        ledger_id = self._begin()
        try:
            metadata = await self._client.ledger_metadata(ledger_id)
        except NoSuchLedgerError as error:
            self._is_gone(ledger_id, error)
            return
        self._require(
            self._lags or metadata in self._seen,
            "InspectionsAreTrue",
            f"read {metadata} of ledger {ledger_id}; there were {self._seen}",
        )

    def _is_gone(self, ledger_id: int, error: NoSuchLedgerError) -> None:
        self._require(
            self._lags or self._history.ledger(ledger_id).is_deleted,
            "InspectionsAreTrue",
            f"was told: {error}",
        )

    async def count_replicas(self) -> None:
        """Ask the bookies of a ledger what they hold."""
        ledger_id = self._begin()
        promised = {
            bookie: set(entries)
            for (bookie, of), entries in self._history.promised.items()
            if of == ledger_id
        }
        try:
            replicas = await self._client.ledger_replicas(ledger_id)
        except NoSuchLedgerError as error:
            self._is_gone(ledger_id, error)
            return
        if self._lags or self._history.ledger(ledger_id).is_deleted:
            return
        rows = [(each.first_entry, each.bookie_id) for each in replicas]
        fitting = [metadata for metadata in self._seen if _rows(metadata) == rows]
        self._require(
            bool(fitting),
            "InspectionsAreTrue",
            f"was told of {rows} in ledger {ledger_id}; there were {[_rows(each) for each in self._seen]}",
        )
        forgotten = self._history.words.forgotten
        for replica in replicas:
            if fitting and (replica.bookie_id, ledger_id) not in forgotten:
                self._look_at_replica(replica, fitting, promised.get(replica.bookie_id, set()))

    def _look_at_replica(self, replica: Replica, versions: list[LedgerMetadata], promised: set[int]) -> None:
        """Compare a row with the versions of the metadata that it may have been made by."""
        allowed: list[tuple[int | None, int]] = []
        for metadata in versions:
            owed = _owed(metadata, replica)
            count = None if owed is None else len(owed)
            allowed.append((count, len(owed - promised) if owed is not None else 0))
        self._require(
            any(
                replica.entries_owed == count and (replica.entries_missing or 0) <= missing
                for count, missing in allowed
            )
            or (replica.is_damaged and replica.entries_owed in [count for count, _ in allowed]),
            "InspectionsAreTrue",
            f"was told {replica}; owed and not acknowledged are {allowed}",
        )

    def look_at_bookies(self) -> None:
        """Look at the bookies that are known."""
        known, quarantined = list(self._client.bookies), self._client.quarantined_bookies
        self._require(
            set(known).union(quarantined) <= set(self._simulation.plan.bookies)
            and len(quarantined) == len(set(quarantined)),
            "InspectionsAreTrue",
            f"knows of {known}, quarantined {quarantined}",
        )


def _rows(metadata: LedgerMetadata) -> list[tuple[int, str]]:
    return [(each.first_entry, bookie) for each in metadata.fragments for bookie in each.bookies]


def _owed(metadata: LedgerMetadata, replica: Replica) -> set[int] | None:
    """Return what a bookie owes of a fragment; None where the fragment has no end yet."""
    starts = [each.first_entry for each in metadata.fragments]
    ends_at = [*(start - 1 for start in starts[1:]), metadata.last_entry]
    for start, end in zip(starts, ends_at, strict=True):
        if start == replica.first_entry:
            if end is None:
                return None
            return {
                entry_id
                for entry_id in range(start, end + 1)
                if replica.bookie_id in write_set(metadata, entry_id)
            }
    return None
