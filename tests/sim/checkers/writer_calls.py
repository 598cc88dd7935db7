"""One writer's handle in use: the steps of the role `versatile_writer`, and the ends of its ledgers.

Owns which calls are made in which states. A call is awaited, left to run beside the next ones, or cancelled
in its middle. Every call is made once more when the writer has ended. Does not own the checks
(`tests.sim.checkers.handles`).
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from metadata.errors import (
    BackpressureError,
    BookKeeperError,
    EntryTooLargeError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchEntryError,
    Outcome,
)
from tests.sim.checkers.batches import is_batch
from tests.sim.checkers.handles import (
    BrokenError,
    Bulk,
    WriterUse,
    ends,
    interrupted,
    is_calm,
    watched,
    within_bounds,
)
from tests.sim.workloads.ledger import payload

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from client_aio import Client, LedgerWriter
    from metadata.model.ledger import LedgerMetadata
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

    Call = Callable[[], Coroutine[Any, Any, Any]]


class Writing:
    """One ledger, from its first entry to whatever end."""

    def __init__(
        self,
        simulation: Simulation,
        actor: Actor,
        client: Client,
        handle: LedgerWriter,
        rng: random.Random,
        *,
        advanced: bool,
        deferred_sync: bool,
    ) -> None:
        self.handle = handle
        self.use = WriterUse(simulation, actor.name, handle, advanced=advanced, deferred=deferred_sync)
        self._simulation = simulation
        self._history = simulation.history
        self._who = actor.name
        self._settings = actor.settings
        self._client = client
        self._rng = rng
        self._advanced = advanced
        self._batches = random.Random(f"{simulation.plan.seed}/{actor.name}/{handle.ledger_id}/batches")
        self._background: list[asyncio.Task[Any]] = []
        self._given = 0  # entries, which their payloads are numbered by
        self._next_id = 0  # of those that are assigned here
        self._open_ids: list[int] = []  # drawn, and not given yet
        self._has_closed = False
        self._is_left = False
        self._is_calm = is_calm(simulation)

    async def run(self) -> bool:
        """Write, and end; gives False when the client has been closed with it."""
        ends_by: dict[str, Call] = {
            "close": self._close,
            "close twice": self._close_twice,
            "close at once": self._close_at_once,
            "close behind adds": self._close_behind_adds,
            "close beside adds": self._close_beside_adds,
            "close, interrupted": self._close_interrupted,
            "with": self._with,
            "with, broken": self._with_broken,
            "abort": self._abort,
            "abort behind adds": self._abort_behind_adds,
            "leave": self._leave,
        }
        end = self._rng.choice([*ends_by, *self._settings["ends"]])
        closes_client = self._rng.random() < self._settings["closes_client"]
        self._note(f"writes ledger {self.handle.ledger_id} until:", "client" if closes_client else end)
        try:
            for _ in range(self._rng.randint(0, self._settings["steps"])):
                if self._simulation.is_healed or self.handle.is_closed:
                    break
                await self._step()
            ending = self._close_client if closes_client else ends_by[end]
            await watched(self._simulation, f"{self._who} {end}", ending())
        except BookKeeperError as error:
            if isinstance(error, LedgerFencedError):
                self._history.told_fenced(self._who, self.handle.ledger_id, error)
            else:
                self._must_be_excused(error)
            self._note(f"writing ledger {self.handle.ledger_id} ended:", repr(error))
        if self._is_left:
            return True
        await self._afterwards()
        return not closes_client

    def _must_be_excused(self, error: BookKeeperError) -> None:
        self.use.require(
            not self._is_calm or self.use.record.is_deleted, "CalmIsCalm", f"was created in calm: {error!r}"
        )

    def _note(self, what: str, *details: Any) -> None:
        self._history.note(self._who, what, *details)

    # --- steps -----------------------------------------------------------------------------------

    async def _step(self) -> None:
        rng = self._rng
        steps: dict[Call, int] = {
            self._adds: 6,
            self._bulk: 0 if self._advanced else 3,
            self._drain: 2,
            self._flush: 3,
            self._force: 4 if self.use.deferred else 1,
            self._read: self._settings["reads"],
            self._wrong: 1,
            self._cancel_one: 1,
        }
        (step,) = rng.choices(list(steps), list(steps.values()))
        how = rng.random()
        if how < self._settings["interrupts"]:
            patience = rng.choice((0.0, 0.003, 0.03, 0.3)) * rng.random()
            await interrupted(self._simulation, f"{self._who} {step.__name__}", step(), patience)
        elif how < self._settings["interrupts"] + 0.25:
            what = f"{self._who} {step.__name__}"
            self._background.append(asyncio.create_task(watched(self._simulation, what, step()), name=what))
        else:
            await watched(self._simulation, f"{self._who} {step.__name__}", step())
        self.use.look()
        await asyncio.sleep(rng.choice((0.0, 0.01, self._settings["gap"])) * rng.random())

    def _data(self) -> bytes:
        """Return the next payload: no other is like it."""
        self._given += 1
        size = int(self._settings["bytes"] * self._rng.random() * 2)
        return payload(self.handle.ledger_id, self._given, size)

    async def _adds(self) -> None:
        """Add some entries, without awaiting them, in any type of bytes."""
        rng = self._rng
        count = rng.randint(1, self._settings["burst"])
        if not self._advanced and is_batch(self._batches, count):
            self._add_batch(count)
            return
        for _ in range(count):
            if self._advanced:
                self._open_ids.append(self._next_id)
                self._next_id += 1
            else:
                self._add(None)
        if self._advanced:
            rng.shuffle(self._open_ids)
            holds_back = rng.choice((0.0, 0.0, 0.2))
            for entry_id in list(self._open_ids):
                if rng.random() >= holds_back and self._add(entry_id):
                    self._open_ids.remove(entry_id)

    def _add(self, entry_id: int | None) -> bool:
        data = self._data()
        given = self._rng.choice((bytes, bytes, bytearray, memoryview))(data)
        try:
            self.use.add(given, data, entry_id)
        except BackpressureError as error:
            self._note("backs off:", repr(error))
            return False
        if isinstance(given, bytearray):
            given[:] = bytes(len(given))  # the caller's buffer is the caller's own again
        return True

    def _add_batch(self, count: int) -> None:
        """Add a batch: of so many entries, or of more than the room in flight."""
        count = self._batches.choice((count, count, 10 * count))
        entries = [self._data() for _ in range(count)]
        given = [self._rng.choice((bytes, bytes, bytearray, memoryview))(data) for data in entries]
        try:
            self.use.add_batch(given, entries)
        except BackpressureError as error:
            self._note("backs off:", repr(error))
        for each in given:
            if isinstance(each, bytearray):
                each[:] = bytes(len(each))

    async def _bulk(self) -> None:
        """Add many entries by an iterable: at once, slowly, or one that raises in its middle."""
        rng = self._rng
        entries = [self._data() for _ in range(rng.choice((0, 1, 5, 30)))]
        breaks_at = rng.randrange(len(entries) + 1) if rng.random() < 0.2 else len(entries)
        bulk = Bulk(self.use, entries, rng.choice((0.0, 0.001, 0.05)), breaks_at)
        slowly = bulk.slowly() if rng.random() < 0.6 else None
        try:
            first, last = await self.handle.add_entries(iter(bulk) if slowly is None else slowly)
        except BrokenError:
            self._note("an iterable broke")
            return
        except BookKeeperError as error:
            self.use.look()
            self.use.require(
                error.entry_id in (None, self.handle.last_add_confirmed),
                "WritersTellTheTruth",
                f"names {error.entry_id} as the last acknowledged entry: {error!r}",
            )
            raise
        finally:
            if slowly is not None:
                await slowly.aclose()
        self.use.has_covered("add_entries", last, [], durable=False)
        self.use.require(
            bulk.ids == list(range(first, last + 1)) and len(bulk.ids) == len(entries),
            "NoOutOfOrderEntries",
            f"gave {first} to {last} to a bulk of {len(entries)} that took {bulk.ids}",
        )

    async def _drain(self) -> None:
        handle = self.handle
        pushed, is_alone = handle.last_add_pushed, not self._background
        await handle.drain()
        has_room = handle.bytes_in_flight <= handle.max_in_flight_bytes or bool(self.use.waiting)
        self.use.require(
            has_room or not is_alone or handle.last_add_pushed != pushed,
            "WaitsCover",
            f"returned from drain with {handle.bytes_in_flight} bytes in flight",
        )

    async def _flush(self) -> None:
        handle, use = self.handle, self.use
        adds, last = use.outstanding(), handle.last_add_pushed
        await handle.flush()
        use.has_covered("flush", last, adds, durable=False)
        if handle.last_add_pushed == last and not handle.is_closed:
            use.require(
                handle.is_held_up == bool(use.waiting),
                "WritersTellTheTruth",
                f"says held up: {handle.is_held_up}; {sorted(use.waiting)} wait behind {last}",
            )

    async def _force(self) -> None:
        handle, use = self.handle, self.use
        adds, last = use.outstanding(), handle.last_add_pushed
        lac = await handle.force()
        use.has_covered("force", last, adds, durable=True)
        use.require(
            last <= lac <= handle.last_add_confirmed,
            "WaitsCover",
            f"forced to {lac}, with {last} added before",
        )

    async def _read(self) -> None:
        """Read some of what is acknowledged, perhaps not to the end."""
        handle, rng, lac = self.handle, self._rng, self.handle.last_add_confirmed
        self.use.look()
        if lac < 0:
            return
        first = following = rng.randint(0, lac)
        last, left = rng.randint(first, lac), rng.choice((1, 1000, 1000))
        try:
            async with aclosing(handle.read(first, last)) as entries:
                async for entry_id, data in entries:
                    self.use.require(
                        entry_id == following, "NoOutOfOrderEntries", f"read {entry_id}, not {following}"
                    )
                    self._history.read(self._who, handle.ledger_id, entry_id, data)
                    following, left = entry_id + 1, left - 1
                    if not left:
                        return
        except BookKeeperError as error:
            self._note(f"reading ledger {handle.ledger_id} at {following}:", repr(error))
            self._must_be_excused(error)
            self.use.require(
                not isinstance(error, NoSuchEntryError) or self.use.record.is_deleted,
                "AcknowledgedIsFound",
                f"was told, reading {first} to {last}: {error}",
            )
            return
        self.use.require(
            following == last + 1, "NoOutOfOrderEntries", f"read before {following} only, up to {last}"
        )

    async def _wrong(self) -> None:
        """Call with what is not allowed: nothing comes of it."""
        handle, lac = self.handle, self.handle.last_add_confirmed
        spare = max(self._next_id, handle.last_add_pushed + 1) + 1000
        text: Any = "text"
        wrong: list[tuple[Callable[[], Any], type[BookKeeperError]]] = [
            (lambda: handle.read(lac + 1, lac + 1), NoSuchEntryError),
            (lambda: handle.read(2, 0), InvalidArgumentError),
            (lambda: handle.add_entry(text, spare if self._advanced else None), InvalidArgumentError),
            (lambda: handle.add_batch([b"", text]), InvalidArgumentError),
            (lambda: handle.add_batch([]), InvalidArgumentError),
            (lambda: handle.add_entry(b"", None if self._advanced else spare), InvalidArgumentError),
            (
                lambda: handle.add_entry(bytes(handle._config.entry_bytes_max + 1), spare),
                EntryTooLargeError,
            ),
        ]
        if self._advanced:
            wrong.append((lambda: handle.add_entry(b"", -1), InvalidArgumentError))
            if handle.last_add_pushed >= 0:
                wrong.append((lambda: handle.add_entry(b"", 0), InvalidArgumentError))
        if handle.is_closed:
            return
        pushed = handle.last_add_pushed
        for call, kind in wrong:
            try:
                outcome = repr(call())
            except kind:
                continue
            except BackpressureError as error:
                outcome = repr(error)
                if self._advanced:
                    continue
            self.use.require(False, "WrongArgumentsAreRefused", f"was not given a {kind}: {outcome}")
        self.use.require(handle.last_add_pushed == pushed, "WrongArgumentsAreRefused", "added something")

    async def _cancel_one(self) -> None:
        """Cancel the future of an add: it stays as it is."""
        adds = self.use.outstanding()
        if adds:
            self._rng.choice(adds).cancel()

    # --- ends ------------------------------------------------------------------------------------

    async def _close(self) -> LedgerMetadata:
        adds, last = self.use.outstanding(), self.handle.last_add_pushed
        metadata = await self.handle.close()
        self._has_closed = True
        self.use.has_closed(metadata, adds, last)
        return metadata

    async def _close_twice(self) -> None:
        metadata = await self._close()
        again = await ends(self._simulation, f"{self._who} close, again,", self._close())
        self.use.require(metadata == again, "WaitsCover", f"was closed as {metadata}, then as {again}")

    async def _close_at_once(self) -> None:
        tasks = [asyncio.create_task(self._close()) for _ in range(self._rng.choice((2, 2, 3)))]
        await asyncio.wait(tasks)
        for task in tasks:
            task.result()

    async def _close_behind_adds(self) -> None:
        await self._adds()
        await self._close()

    async def _close_beside_adds(self) -> None:
        """Close while entries are added: each is in the ledger, or refused."""
        task = asyncio.create_task(self._close())
        while not task.done():
            await self._adds()
            await asyncio.sleep(self._rng.choice((0.0, 0.005)))
            if self.handle.is_closed or self._rng.random() < 0.3:
                break
        await asyncio.wait((task,))
        task.result()

    async def _close_interrupted(self) -> None:
        await self._adds()
        patience = self._rng.choice((0.0, 0.003, 0.03, 0.3)) * self._rng.random()
        await interrupted(self._simulation, f"{self._who} close", self._close(), patience)
        await self._adds()
        await self._rng.choice((self._close, self._close_at_once, self._abort))()

    async def _with(self) -> None:
        async with self.handle:
            await self._adds()
            is_known = bool(self.handle.told_failures)
        if is_known:  # Leaving does not raise again what a call has told, and has closed nothing.
            self._has_aborted()
            return
        self._has_closed = True
        self.use.has_closed(self.handle.metadata, [], self.handle.last_add_pushed)

    async def _with_broken(self) -> None:
        try:
            async with self.handle:
                await self._adds()
                raise BrokenError
        except BrokenError:
            self._has_aborted()

    async def _abort(self) -> None:
        await ends(self._simulation, f"{self._who} abort", self.handle.abort())
        if not self._has_closed:
            self._has_aborted()

    def _has_aborted(self) -> None:
        self.use.require(self.handle.is_closed, "EndedWritersAcknowledgeNothing", "was aborted, and is open")
        self.use.has_ended()

    async def _abort_behind_adds(self) -> None:
        await self._adds()
        if self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.choice((0.0, 0.002)))
        await self._abort()

    async def _leave(self) -> None:
        """Leave it as it is, to whoever recovers it."""
        self._is_left = True

    async def _close_client(self) -> None:
        await self._adds()
        if self._rng.random() < 0.5:
            await interrupted(
                self._simulation, "Client.close", self._client.close(), 0.01 * self._rng.random()
            )
        await ends(self._simulation, "Client.close", self._client.close())

    # --- and afterwards --------------------------------------------------------------------------

    async def _afterwards(self) -> None:
        """End it if it has not, see all that was under way end, and make every call once more."""
        if not self._has_closed:
            await self._abort()
        for task in self._background:
            await within_bounds(self._simulation, f"{self._who} {task.get_name()}, after the end,", task)
            error = None if task.cancelled() or not task.done() else task.exception()
            if error is not None and not isinstance(error, BookKeeperError):
                raise error
        self.use.has_ended()
        calls: list[tuple[str, Call, bool]] = [
            ("drain", self.handle.drain, self._has_closed),
            ("flush", self._flush, self._has_closed),
            ("force", self._force, self._has_closed),
            ("close", self._close, self._has_closed),
            ("abort", self.handle.abort, True),
            ("add_entries", lambda: self.handle.add_entries([b"late"]), False),
            ("read", self._read, True),
        ]
        self._rng.shuffle(calls)
        for what, call, succeeds in calls:
            self._add_late()
            try:
                outcome = repr(await ends(self._simulation, f"{self._who} {what}, after the end,", call()))
            except BookKeeperError as error:
                outcome, has_succeeded = repr(error), False
            else:
                has_succeeded = True
            self.use.require(
                has_succeeded is succeeds,
                "EndedWritersAcknowledgeNothing",
                f"was closed: {self._has_closed}; {what} gave {outcome}",
            )
        self.use.leave()

    def _add_late(self) -> None:
        entry_id = self._next_id + 1_000 if self._advanced else None
        future = self.handle.add_entry(b"late", entry_id)
        error = future.exception() if future.done() and not future.cancelled() else None
        self.use.require(
            isinstance(error, LedgerClosedError if self._has_closed else BookKeeperError),
            "EndedWritersAcknowledgeNothing",
            f"was closed: {self._has_closed}; another add gave {future!r}",
        )
        if self._advanced:
            return
        batch = self.handle.add_batch([b"late", b"too"])
        error = batch.exception() if batch.done() and not batch.cancelled() else None
        self.use.require(
            isinstance(error, BookKeeperError)
            and (error.outcome, error.acknowledged) == (Outcome.NOT_DONE, 0),
            "EndedWritersAcknowledgeNothing",
            f"was closed: {self._has_closed}; another batch gave {batch!r}",
        )
