"""A log's handle, used by a client that makes every call, in any state, and checks what each promised.

Owns the checks of the docstrings of `LogWriter`. The names:

- CallsDoWhatTheySay. On return of `flush` and `close`, all records appended before are acknowledged. After
  `close` the last ledger is CLOSED; after `drain` there is room; after `roll` the log has been rolled. After
  `truncate_log` and `delete_log` the ledgers are gone; after `add_to_log` they are listed. `list_logs` and
  `log_metadata` return a state that is there, or was during the call.
- HandlesGoForward: `last_add_confirmed` names the last record acknowledged. Neither it nor `rolls` goes back.
- HandlesEndForGood: a handle that was closed or aborted, or has failed, acknowledges nothing any more. Every
  call on it ends at once as its docstring says.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from client_aio import LedgerClosedError
from metadata.errors import BackpressureError, BookKeeperError
from tests.sim.checkers.batches import is_batch, records_of
from tests.sim.checkers.log_lifecycle import lives_of
from tests.sim.checkers.log_reads import check_documented

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from client_aio import LogWriter
    from metadata.model.log import Position
    from tests.sim.simulation import Simulation

_LOOKS, _LOOK_S = 4, 1.0
"""A call that is to end at once has not when it is looked for so often in vain: a pause of the process makes
one look vain."""


async def shortly(seconds: float, call: Awaitable[Any]) -> Any:
    """Await a call, and cancel it if it lasts; gives False then."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except BookKeeperError:
        raise
    except TimeoutError:
        return False


async def together(*calls: Coroutine[Any, Any, Any]) -> None:
    """Await calls side by side, all of them to their ends; raises the first error."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for kind in (Exception, BookKeeperError):
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and (
                kind is BookKeeperError or not isinstance(outcome, BookKeeperError)
            ):
                raise outcome


def _has_succeeded(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


class Hand:
    """One handle, and what was done with it."""

    def __init__(self, simulation: Simulation, log: LogWriter, who: str, rng: random.Random) -> None:
        self.simulation, self.log, self.who, self.rng = simulation, log, who, rng
        self.lives = lives_of(simulation)
        self.lives.holds(log)
        self.life = self.lives.opened(who, log.ledger_id)
        self.is_over = False  # closed or aborted, and that has ended
        self.doing = ""
        self._records: list[tuple[bytes, asyncio.Future[Position]]] = []
        self._batch_of: dict[bytes, tuple[list[bytes], asyncio.Future[Any]]] = {}  # or the append by itself
        self._batches = random.Random(f"{simulation.plan.seed}/{who}/batches")
        self._has_cancelled = False
        self._lac: Position | None = None
        self._rolls = 0

    # --- writing ---

    def append(self, count: int, size: int = 0) -> None:
        """Append some records."""
        as_batch = is_batch(self._batches, count)
        given = []
        for index in range(count):
            number = self.life.number if self.life is not None else 0
            payload = f"{self.who}/{number}.{len(self._records) + index * as_batch}".encode()
            payload += b"." * self.rng.randrange(size + 1)
            kind = self.rng.choice((bytes, bytes, bytearray, memoryview))
            given.append((payload, kind(payload)))
            if not as_batch and not self._add(payload, kind(payload)):
                return
        if as_batch:
            self._add_batch(given)

    def _add(self, payload: bytes, given: Any) -> bool:
        try:
            future = self.log.append(given)
        except BackpressureError as error:
            self.simulation.history.note(self.who, "no room:", repr(error))
            return False
        self._records.append((payload, future))
        self._batch_of[payload] = [payload], future
        self.lives.issued(self.who, payload, future, self.life)
        return True

    def _add_batch(self, given: list[tuple[bytes, Any]]) -> None:
        payloads = [payload for payload, _ in given]
        try:
            batch = self.log.append_batch([each for _, each in given])
        except BackpressureError as error:
            self.simulation.history.note(self.who, "no room:", repr(error))
            return
        lives = self.lives
        lives.issued_batch(self.who, payloads, batch, self.life)
        records = records_of(batch, len(payloads), lambda: lives._row_ids)
        self._records += zip(payloads, records, strict=True)
        for payload in payloads:
            self._batch_of[payload] = payloads, batch

    def cancel_one(self) -> None:
        """Cancel a future that is not done, if there is one."""
        waiting = [each for each in self._records if not each[1].done()]
        if waiting:
            self._has_cancelled = True
            payload, _ = self.rng.choice(waiting)
            self.lives.cancel(*self._batch_of[payload])

    async def flush(self) -> None:
        """Flush."""
        owed = self._owed()
        await self.log.flush()
        self._check_acked("flush", owed)

    async def drain(self) -> None:
        """Drain."""
        await self.log.drain()
        if self.log.bytes_in_flight > self.log.max_in_flight_bytes:
            self._fail("CallsDoWhatTheySay", f"{self.log.bytes_in_flight} are in flight, drained")

    async def roll(self) -> None:
        """Roll."""
        log, last = self.log, self.log.last_add_confirmed
        ledger_id, rolls = log.ledger_id, log.rolls
        await log.roll()
        if last is not None and last.ledger_id == ledger_id and log.rolls == rolls:
            self._fail("CallsDoWhatTheySay", f"it rolled, and {ledger_id} with {last} is still written to")

    async def close(self) -> None:
        """Close."""
        owed = self._owed()
        await self.log.close()
        self.is_over = True
        self._check_acked("close", owed)
        if not self.lives.is_closed(self.log.ledger_id):
            self._fail("CallsDoWhatTheySay", f"closed, and ledger {self.log.ledger_id} is not")

    async def abort(self) -> None:
        """Abort."""
        await self.log.abort()
        self.is_over = True

    def look(self) -> None:
        """Look at the properties."""
        log, lac, rolls = self.log, self.log.last_add_confirmed, self.log.rolls
        assert log.name
        assert not log.is_held_up
        if rolls < self._rolls or (self._lac is not None and (lac is None or lac < self._lac)):
            self._fail("HandlesGoForward", f"from {self._lac}, {self._rolls} rolls, to {lac}, {rolls}")
        done = [
            each.result() for _, each in self._records if _has_succeeded(each) and each.result() is not None
        ]
        # The LAC may lie within a batch that is not acknowledged as a whole.
        following = next((name for name, each in self._records if not _has_succeeded(each)), b"")
        is_within_batch = len(self._batch_of.get(following, ((), None))[0]) > 1
        may_be_behind = self._has_cancelled or is_within_batch
        if done and (lac is None or lac < done[-1] or (lac != done[-1] and not may_be_behind)):
            self._fail("HandlesGoForward", f"it is said to be at {lac}; {done[-1]} is the last acknowledged")
        self._lac, self._rolls = lac, rolls

    def _owed(self) -> list[tuple[bytes, asyncio.Future[Position]]]:
        return [each for each in self._records if not each[1].done()]

    def _check_acked(self, what: str, owed: list[tuple[bytes, asyncio.Future[Position]]]) -> None:
        for payload, future in owed:
            if future.cancelled():
                continue
            error = future.exception() if future.done() else None
            if not future.done() or (error is not None and not isinstance(error, LedgerClosedError)):
                self._fail("CallsDoWhatTheySay", f"{what} returned; {payload!r} is {future}")

    # --- when it is over ---

    async def call_everything(self) -> None:
        """Call each method of a handle that takes nothing any more."""
        lac, calls = self.log.last_add_confirmed, ["append", "drain", "flush", "roll", "close", "abort"]
        self.rng.shuffle(calls)
        for name in [*calls, "append", "roll"]:
            if name == "append":
                await self._append_in_vain()
            else:
                await self._call(name)
        if self.log.last_add_confirmed != lac or not self.log.is_closed:
            now = self.log.last_add_confirmed
            self._fail("HandlesEndForGood", f"from {lac} to {now}, is_closed {self.log.is_closed}")

    async def _append_in_vain(self) -> None:
        try:
            future: asyncio.Future[Any] = self.log.append(f"{self.who} in vain".encode())
            batch = self.log.append_batch([f"{self.who} in vain, too".encode()])
        except BookKeeperError:
            return
        for each in (future, batch):
            error = await self._outcome("append", asyncio.wait_for(each, None))
            if error is None:
                self._fail("HandlesEndForGood", f"it acknowledged {each.result()}")

    async def _call(self, name: str) -> None:
        has_failed = self.log.failure is not None
        method: Callable[[], Coroutine[Any, Any, None]] = getattr(self.log, name)
        error = await self._outcome(name, method())
        wrong = False
        if name == "abort":
            wrong = error is not None
        elif has_failed:
            wrong = error is None
        elif name == "roll":
            wrong = not isinstance(error, LedgerClosedError)
        if wrong:
            self._fail("HandlesEndForGood", f"{name} gave {error!r}; failure {self.log.failure!r}")

    async def _outcome(self, name: str, call: Coroutine[Any, Any, Any]) -> BaseException | None:
        task = asyncio.create_task(call)
        for _ in range(_LOOKS):
            if (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                break
        else:
            task.cancel()
            self._fail("HandlesEndForGood", f"{name} does not end; failure {self.log.failure!r}")
            return None
        error = task.exception()
        if error is not None and not isinstance(error, BookKeeperError):
            raise error
        if error is not None:
            check_documented(self.lives, f"{self.who}, {name}", error)
        return error

    def _fail(self, name: str, text: str) -> None:
        self.lives.fail(name, f"{self.who}: {text}")
