"""Calls on the handle of an unbounded ledger's holder, each with a check of what its docstring promises.

Owns how calls are made: awaited, cut short, or left to run while others are made. A promise must hold in
every state of a handle: held, fenced, failed, left, sealed, or of a ledger deleted since.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from metadata.errors import (
    BackpressureError,
    BookKeeperError,
    InvalidArgumentError,
    InvalidTransitionError,
    LedgerClosedError,
    UnauthorizedAccessError,
)
from metadata.model.ledger import LedgerState
from tests.sim.checkers.batches import is_batch
from tests.sim.checkers.unbounded_lifecycle import NAME, Lives, is_acknowledged, ledger_of

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from client_aio import Client
    from tests.sim.checkers.unbounded_lifecycle import Handle, Life
    from tests.sim.simulation import Simulation

CALL_BOUND_S = 25.0
"""Above all that one call may wait for one after another: changes, adds without a quorum, the store."""


EVERYTHING = 1 << 30
"""More entries than there will be."""


class Seen(NamedTuple):
    """What somebody has read."""

    ledger_id: int | None
    following: int | None
    """Which entry would come next."""
    is_at_end: bool
    """Whether nothing came any more, rather than it was enough."""


class _GivenUpError(Exception):
    """What an iterable of entries raises of its own."""


class _Trickle:
    """An asynchronous iterable of entries that takes its time, and may raise in the end."""

    def __init__(self, values: list[bytes], rng: random.Random, *, breaks: bool) -> None:
        self._values = iter(values)
        self._rng = rng
        self._breaks = breaks

    def __aiter__(self) -> _Trickle:
        return self

    async def __anext__(self) -> bytes:
        if self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.random() * 0.05)
        for value in self._values:
            return value
        if self._breaks:
            raise _GivenUpError
        raise StopAsyncIteration


class Calls:
    """The calls of one client."""

    def __init__(self, simulation: Simulation, who: str, rng: random.Random) -> None:
        self.lives = Lives.of(simulation)
        self.history = simulation.history
        self.who = who
        self.rng = rng
        self._batches = random.Random(f"{simulation.plan.seed}/{who}/batches")
        self._under_way: dict[asyncio.Task[None], str] = {}
        self._cut: dict[asyncio.Task[None], None] = {}

    # --- how -----------------------------------------------------------------------------------

    async def make(self, what: str, call: Coroutine[Any, Any, None], *, cuts: float = 0.2) -> None:
        """Make a call: wait for it, or cut it short, or leave it to itself and go on."""
        task = asyncio.get_running_loop().create_task(self._noted(what, call), name=f"{self.who} {what}")
        self._under_way[task] = what
        task.add_done_callback(self._ended)
        fate = self.rng.random()
        if fate < cuts:
            self._cut[task] = None
            try:
                await asyncio.wait_for(task, self.rng.choice((0.0005, 0.005, 0.05, 0.5)) * self.rng.random())
            except (TimeoutError, asyncio.CancelledError):
                self.history.note(self.who, "cut short:", what)
        elif fate < 0.75:
            await asyncio.wait([task], timeout=3.0)

    async def _noted(self, what: str, call: Coroutine[Any, Any, None]) -> None:
        self.history.note(self.who, "calls", what)
        try:
            await call
        except (InvalidArgumentError, InvalidTransitionError) as error:
            self.lives.fail("Unexpected", f"{self.who} {what}: {error!r}")
        except BookKeeperError as error:
            self.history.note(self.who, f"{what}:", repr(error))
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-4:])
            self.lives.fail("Unexpected", f"{self.who} {what}: {error!r}\n{text}")
        else:
            self.history.note(self.who, "returned:", what)

    def _ended(self, task: asyncio.Task[None]) -> None:
        what = self._under_way.pop(task)
        if task.cancelled() and task not in self._cut:
            self.lives.fail("Unexpected", f"{self.who} {what} was cancelled by itself")
        self._cut.pop(task, None)

    async def finish(self, bound_s: float = CALL_BOUND_S) -> None:
        """Wait for all that is under way; only once faults have stopped."""
        if self._under_way:
            await asyncio.wait(list(self._under_way), timeout=bound_s)
        for what in [what for task, what in self._under_way.items() if not task.done()]:
            self.lives.fail("CallsEnd", f"{self.who} {what} has not ended in {bound_s} s")

    async def take_over(
        self, client: Client, name_or_id: str | int, *, cuts: float = 0.1, **settings: Any
    ) -> Handle | None:
        """Take the ledger over, or not."""
        patience = self.rng.random() * 0.2 if self.rng.random() < cuts else None
        try:
            opening = client.open_unbounded_ledger(name_or_id, password=self.lives.password, **settings)
            ledger = await asyncio.wait_for(opening, patience)
        except LedgerClosedError as error:
            self.history.note(self.who, "did not take over:", repr(error))
            if error.ledger_id is not None:
                is_sealed = self.lives.life(error.ledger_id).end is not None
                self.lives.require(is_sealed, "SealsAreKept", f"{self.who} is told {error}")
        except (BookKeeperError, TimeoutError) as error:
            self.history.note(self.who, "did not take over:", repr(error))
        else:
            return self.lives.opened(self.who, ledger)
        return None

    async def intrude(self, client: Client) -> None:
        """Open the ledger with another password than its own, where it has one."""
        if not self.lives.password:
            return
        holds = self.rng.random() < 0.5
        try:
            if holds:
                await client.open_unbounded_ledger(NAME, create=False, password=b"another")
            else:
                await client.open_ledger(NAME, password=b"another")
        except UnauthorizedAccessError:
            return
        self.lives.fail("PasswordsAreAsked", f"{self.who} opened {NAME} with another password, {holds}")

    async def close_client(self, client: Client, handles: list[Handle]) -> None:
        """Close the client, which ends all that its handles still had; only once faults have stopped."""
        closing = asyncio.get_running_loop().create_task(client.close())
        added = [future for handle in handles for future in handle.unfinished()]
        _, waiting = await asyncio.wait([closing], timeout=CALL_BOUND_S)
        self.lives.require(not waiting, "CallsEnd", f"{self.who} cannot close its client")
        left = [each for each in added if not each.done()]
        self.lives.require(
            not left, "CallsEnd", f"{self.who} closed its client; {len(left)} adds have no end"
        )
        is_open = [handle.term for handle in handles if not handle.ledger.is_closed]
        text = f"{self.who} closed its client, and writes terms {is_open}"
        self.lives.require(not is_open, "ClosedTakesNothing", text)

    # --- what ----------------------------------------------------------------------------------

    def life(self, handle: Handle) -> Life:
        """Return the record of a handle's ledger."""
        return self.lives.life(handle.ledger.ledger_id)

    def is_displaced(self, handle: Handle) -> bool:
        """Return whether somebody else has taken the ledger over, or it is gone."""
        return not handle.had(self.life(handle).term) or self.life(handle).is_deleted

    def add_some(self, handle: Handle, sizes: list[int]) -> None:
        """Add entries one by one, or as a batch."""
        if not is_batch(self._batches, len(sizes)):
            for size in sizes:
                self.add(handle, size)
            return
        was_closed = handle.ledger.is_closed
        values = [self.lives.value(handle, size) for size in sizes]
        try:
            batch = handle.ledger.add_batch(values)
        except BackpressureError as error:
            self.history.note(self.who, "adding:", repr(error))
            return
        self.lives.issued_batch(handle, batch, values)
        if was_closed:
            text = f"{self.who}: {values[0][:40]!r} was added to a closed handle, and acknowledged"
            batch.add_done_callback(
                lambda done: self.lives.require(not is_acknowledged(done), "ClosedTakesNothing", text)
            )
        elif self.rng.random() < 0.05:
            batch.cancel()

    def add(self, handle: Handle, size: int) -> None:
        """Add an entry, and perhaps look away."""
        was_closed = handle.ledger.is_closed
        value = self.lives.value(handle, size)
        try:
            future = handle.ledger.add_entry(value)
        except BackpressureError as error:
            self.history.note(self.who, "adding:", repr(error))
            return
        self.lives.issued(handle, future, value)
        if was_closed:
            text = f"{self.who}: {value[:40]!r} was added to a closed handle, and acknowledged"
            future.add_done_callback(
                lambda done: self.lives.require(not is_acknowledged(done), "ClosedTakesNothing", text)
            )
        elif self.rng.random() < 0.05:
            future.cancel()

    async def bulk(self, handle: Handle, count: int, size: int) -> None:
        """Add many entries."""
        was_closed = handle.ledger.is_closed
        values = [self.lives.value(handle, size) for _ in range(count)]
        breaks = self.rng.random() < 0.2
        try:
            if self.rng.random() < 0.5:
                first, last = await handle.ledger.add_entries(values)
            else:
                first, last = await handle.ledger.add_entries(_Trickle(values, self.rng, breaks=breaks))
        except _GivenUpError:
            self.history.note(self.who, "the iterable gave up")
            return
        text = f"{self.who} added {count} entries as {first} to {last}"
        self.lives.require(last - first + 1 == count, "FlushedIsAcknowledged", text)
        self.lives.require(not was_closed or not count, "ClosedTakesNothing", text)
        for entry_id, value in enumerate(values, first):
            self.lives.acknowledge(handle, entry_id, value)

    async def flush(self, handle: Handle) -> None:
        """Flush."""
        added = handle.unfinished()
        await handle.ledger.flush()
        self._all_acknowledged("flush", added)

    async def drain(self, handle: Handle) -> None:
        """Drain."""
        await handle.ledger.drain()
        held, limit = handle.ledger.bytes_in_flight, handle.ledger.max_in_flight_bytes
        self.lives.require(held <= limit, "FlushedIsAcknowledged", f"{held} of {limit} are in flight")

    async def force(self, handle: Handle) -> None:
        """Force, though each add is durable before it is acknowledged."""
        added = handle.unfinished()
        lac = await handle.ledger.force()
        self._all_acknowledged("force", added)
        beyond = [each.result() for each in added if is_acknowledged(each) and each.result() > lac]
        self.lives.require(not beyond, "FlushedIsAcknowledged", f"{beyond} are behind {lac}, as force says")

    def _all_acknowledged(self, what: str, added: list[asyncio.Future[int]]) -> None:
        left = [each for each in added if not each.cancelled() and not is_acknowledged(each)]
        text = f"{self.who}: {what} has returned, and {len(left)} added before are not acknowledged"
        self.lives.require(not left, "FlushedIsAcknowledged", text)

    async def roll(self, handle: Handle) -> None:
        """Begin a new fragment."""
        added, was_closed = handle.unfinished(), handle.ledger.is_closed
        first = await handle.ledger.roll()
        text = f"{self.who} has rolled to {first} in term {handle.term}"
        self.lives.require(not was_closed, "ClosedTakesNothing", text)
        is_listed = any(first == each and handle.had(term) for each, term in self.life(handle).listed)
        self.lives.require(is_listed, "RollsLieBehind", text)
        for each in added:
            is_before = each.cancelled() or (is_acknowledged(each) and each.result() < first)
            self.lives.require(is_before, "RollsLieBehind", f"{text}; added before it is {each}")

    async def trim(self, handle: Handle, before: int) -> None:
        """Drop fragments."""
        life, was_closed, expected = self.life(handle), handle.ledger.is_closed, None
        metadata = life.metadata
        assert metadata is not None
        if not was_closed:
            handle.trims = max(before, handle.trims)
        if metadata.state is LedgerState.OPEN and metadata.term == handle.term:
            firsts = [each.first_entry for each in metadata.fragments]
            expected = max((first for first in firsts if first <= before), default=None)
        left = await handle.ledger.trim(before)
        text = f"{self.who} has trimmed before {before}, and is told that {left} is left"
        self.lives.require(not was_closed, "ClosedTakesNothing", text)
        self.lives.require(left <= life.first_entry, "TrimsAreAskedFor", f"{text}, not {life.first_entry}")
        if expected is not None and not self.is_displaced(handle) and not handle.ledger.is_closed:
            is_gone = left >= expected
            self.lives.require(is_gone, "TrimsAreAskedFor", f"{text}; a fragment begins at {expected}")

    async def read(self, handle: Handle, first: int, last: int, count: int) -> None:
        """Read some of the entries that the handle has, and stop after so many."""
        await self.iterate(handle.ledger.read(first, last), handle.ledger.ledger_id, first, last, count)

    async def iterate(
        self, entries: Any, ledger_id: int | None, first: int | None, last: int, count: int
    ) -> Seen:
        """Look at entries that are read, as they come.

        Args:
            ledger_id: None where it was named: the first entry tells which it is.
            count: stop after so many.
        """
        async with aclosing(entries):
            async for entry_id, value in entries:
                if ledger_id is None:
                    ledger_id = ledger_of(bytes(value))
                text = f"{self.who} read {entry_id} of {ledger_id}, not {first}"
                self.lives.require(first is None or entry_id == first, "NoOutOfOrderEntries", text)
                self.lives.see(self.who, ledger_id, entry_id, bytes(value))
                first, count = entry_id + 1, count - 1
                if not count:
                    return Seen(ledger_id, first, is_at_end=False)
        text = f"{self.who} was to read up to {last} of {ledger_id}, and was given those before {first}"
        self.lives.require(first is None or first > last, "NoOutOfOrderEntries", text)
        return Seen(ledger_id, first, is_at_end=True)

    async def close(self, handle: Handle, *, seal: bool) -> None:
        """Leave the ledger, or seal it."""
        life, added, was_closed = self.life(handle), handle.unfinished(), handle.ledger.is_closed
        if seal and handle.had(life.term):
            handle.seals = True
        await handle.ledger.close(seal=seal)
        if not was_closed:
            self._all_acknowledged("close", added)
        text = f"{self.who} is told that ledger {life.ledger_id} is sealed"
        self.lives.require(not seal or life.end is not None, "SealsAreKept", text)

    async def leave(self, handle: Handle) -> None:
        """Leave a context by an exception."""
        added = handle.unfinished()
        try:
            async with handle.ledger:
                raise _GivenUpError
        except _GivenUpError:
            self._has_ended(handle, added)

    async def abort(self, handle: Handle) -> None:
        """Give up."""
        added = handle.unfinished()
        await handle.ledger.abort()
        self._has_ended(handle, added)

    def _has_ended(self, handle: Handle, added: list[asyncio.Future[int]]) -> None:
        left = [each for each in added if not each.done()]
        self.lives.require(not left, "CallsEnd", f"{self.who} has aborted, and {len(left)} adds have no end")
        self.lives.require(handle.ledger.is_closed, "ClosedTakesNothing", f"{self.who} has aborted in vain")
