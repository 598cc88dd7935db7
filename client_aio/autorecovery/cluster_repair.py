"""Repairing a whole cluster by hand: `cluster repair`. No auto recovery has to run, and one may.

One pass finds the ledgers that lack copies now. It reads the metadata of all ledgers, and compares what their
bookies list with what they owe. Then each of these ledgers is repaired, those with the fewest good copies
first. Both steps are those of the auditor and of the workers (`Worker.look` and `Worker.attempt`).

- A bookie that is not registered now counts as lost, after no delay. Its caller may name the lost bookies
  instead; all others that are down are then left as they are.
- Each ledger is repaired under its lock, which is ephemeral. A ledger that a worker has locked is waited for,
  and looked at again. So a service that runs meanwhile does no work twice. Its workers leave the command
  its bytes per second.
- The repair task of a ledger that is whole is deleted, as a worker does it. The bookies that it names have to
  answer, and are read.
- Nothing is recorded. Killed anywhere, the command leaves ledgers that are whole, or as they were; run again,
  it finds the rest.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from client_aio.autorecovery.survey import all_metadata, layout_in_full
from client_aio.autorecovery.worker import Outcome, Worker, release
from client_aio.config import AutoRecoveryConfig
from client_aio.core.audit import LedgerIndex, Seats
from metadata.access.repair_tasks import BY_HAND, REASON_ABANDONED, RepairTask, RepairTasks
from metadata.errors import (
    BookKeeperError,
    InvalidTransitionError,
    KeyExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
)
from metadata.owned_task import for_each

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from client_aio.context import ClientContext
    from metadata.access.repair_tasks import TaskRef

_LOOKS_AT_ONCE = 16
_LOCKED_S = 0.5
"""How often a ledger that a worker has locked is tried again. No watch tells of one lock's end."""


@dataclass(frozen=True, slots=True)
class LackingLedger:
    """A ledger that lacks copies."""

    ledger_id: int
    good_copies: int
    """Of the scarcest entry, by what the bookies list."""
    seats: Seats

    def row(self) -> dict[str, Any]:
        """Return the ledger's row of the report."""
        return {
            "ledger_id": self.ledger_id,
            "good_copies": self.good_copies,
            "in_place": list(self.seats.in_place),
            "replaced": list(self.seats.replaced),
        }


@dataclass(slots=True)
class Findings:
    """The result of one pass."""

    lost: list[str]
    """The bookies that lose their seats."""
    lacking: list[LackingLedger]
    """The ledgers to repair, those with the fewest good copies first."""
    unknown: dict[str, int]
    """For each bookie that could not be asked and is not lost, how many ledgers may lack copies there."""
    growing: int
    """Ledgers not CLOSED whose last fragment names a bookie that is down. Their writers replace it."""
    unreadable: int
    """Ledgers whose metadata do not parse."""

    def row(self) -> dict[str, Any]:
        """Return the sums of the report."""
        return {
            "lost": self.lost,
            "ledgers_lacking": len(self.lacking),
            "unknown": self.unknown,
            "left_to_writers": self.growing,
            "unreadable": self.unreadable,
        }


class ClusterRepair:
    """One repair of a cluster."""

    def __init__(self, context: ClientContext, *, bytes_per_s: int, lost: Collection[str] = ()) -> None:
        """Prepare.

        Args:
            bytes_per_s: how much is read in a second at most, to copy and to verify.
            lost: the bookies that lose their seats; empty for all that are not registered.
        """
        self._context = context
        self._named = sorted(set(lost))
        self._tasks = RepairTasks(context.ledgers.store)
        self.name = f"{BY_HAND}{context.draw_token()}"
        config = replace(AutoRecoveryConfig(), worker_bytes_per_s=bytes_per_s)
        self._worker = Worker(context, config, self.name)
        self._worker.record = replace(self._worker.record, bytes_per_s=bytes_per_s)

    @property
    def bytes_read(self) -> int:
        """Return how many bytes were read to copy and to verify."""
        return self._worker.record.bytes_read

    async def find(self, on_progress: Callable[[int, int], None]) -> Findings:
        """Find the ledgers that lack copies; changes nothing.

        Args:
            on_progress: called with the ledgers that were looked at, and how many there are.

        Raises:
            InvalidTransitionError: a bookie that was named as lost runs.
            NoSuchKeyError: a bookie that was named as lost is in no ledger.
        """
        index, unreadable = LedgerIndex(), 0
        async with aclosing(all_metadata(self._context)) as ledgers:
            async for ledger_id, metadata in ledgers:
                try:
                    if isinstance(metadata, MetadataCorruptError):
                        raise metadata
                    _, layout, _ = await layout_in_full(self._context, metadata)
                    index.note(ledger_id, layout)
                except MetadataCorruptError:
                    unreadable += 1
                except NoSuchLedgerError:
                    continue
        # After the metadata were read: a bookie that restarted meanwhile is back.
        await self._context.pool.directory.refresh()
        running = self._context.pool.directory.available
        down = [name for name in index.bookies() if name not in running]
        found = Findings(self._lost(index, down), [], {}, len(index.growing_on(down)), unreadable)
        wanted, done = index.ids(), 0

        async def look(ledger_id: int) -> None:
            nonlocal done
            done += 1
            on_progress(done, len(wanted))
            try:
                seats, copies = await self._worker.look(ledger_id, found.lost)
            except NoSuchLedgerError:
                return
            except MetadataCorruptError:
                found.unreadable += 1
                return
            if seats.in_place or seats.replaced:
                found.lacking.append(LackingLedger(ledger_id, copies, seats))
            for name in seats.unknown:
                found.unknown[name] = found.unknown.get(name, 0) + 1

        await for_each(wanted, look, _LOOKS_AT_ONCE)
        found.lacking.sort(key=lambda one: (one.good_copies, one.ledger_id))
        return found

    def _lost(self, index: LedgerIndex, down: list[str]) -> list[str]:
        running = self._context.pool.directory.available
        for name in self._named:
            if name in running:
                raise InvalidTransitionError(
                    f"bookie {name} runs, so it is not lost: it is repaired in its own place, without being "
                    "named"
                )
            if name not in down:
                raise NoSuchKeyError(f"no ledger names a bookie {name}")
        return self._named or down

    async def repair(
        self, findings: Findings, *, ledgers_at_once: int
    ) -> AsyncGenerator[tuple[LackingLedger, Outcome], None]:
        """Repair the ledgers that a pass found; yields each one when it is done, or has failed.

        Cancelling leaves each ledger as it was, partly repaired, or whole.
        """
        refs = {ref.ledger_id: ref for ref in await self._tasks.refs()}
        waiting = iter(findings.lacking)
        done: asyncio.Queue[tuple[LackingLedger, Outcome]] = asyncio.Queue()

        async def take_turns() -> None:
            for one in waiting:
                await done.put((one, await self._repair(one, findings.lost, refs.get(one.ledger_id))))

        registration = await self._tasks.announce(self._worker.record)
        workers = [asyncio.create_task(take_turns()) for _ in range(ledgers_at_once)]
        try:
            for _ in findings.lacking:
                ledger, outcome = await _next(done, workers)
                yield ledger, outcome
                record = self._worker.record
                repaired, failed = record.repaired + outcome.is_done, record.failed + (not outcome.is_done)
                self._worker.record = replace(record, repaired=repaired, failed=failed)
                with suppress(BookKeeperError):  # It is for people, and for drains that wait.
                    await registration.update(self._worker.record.to_json())
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await release(registration)

    async def _repair(self, one: LackingLedger, lost: list[str], ref: TaskRef | None) -> Outcome:
        ledger_id = one.ledger_id
        while True:
            # Before the attempt to register: that may wait for the holder's session.
            if ledger_id not in await self._tasks.locked():
                with suppress(KeyExistsError):
                    lock = await self._tasks.lock(ledger_id, self.name)
                    break
            await asyncio.sleep(_LOCKED_S)
        try:
            task, version = RepairTask({}, 0), None
            if ref is not None:
                with suppress(NoSuchKeyError, MetadataCorruptError):
                    task, version = await self._tasks.read(ref)
            is_abandoned = REASON_ABANDONED in task.reasons
            # Nobody is fenced here, where bookies count as lost at once: that is left to workers.
            others = {reason: names for reason, names in task.reasons.items() if reason != REASON_ABANDONED}
            task = replace(task, reasons=others)
            outcome = await self._worker.attempt(ledger_id, lost, task)
            if not outcome.is_done:
                # Damage that the first attempt read got a mark of its own, which only a second one may lift.
                task = task.failed(outcome.error, outcome.entries_lost, outcome.doubted)
                outcome = await self._worker.attempt(ledger_id, lost, task)
            if outcome.is_done and ref is not None and version is not None and not is_abandoned:
                await self._tasks.done(ref, version)
            return outcome
        except BookKeeperError as error:
            return Outcome(is_done=False, error=str(error))
        finally:
            await release(lock)


async def _next(
    done: asyncio.Queue[tuple[LackingLedger, Outcome]], workers: list[asyncio.Task[None]]
) -> tuple[LackingLedger, Outcome]:
    """Return the next ledger that was done; raises the error with which a worker ended."""
    getting = asyncio.create_task(done.get())
    try:
        while not getting.done():
            running = [one for one in workers if not one.done()]
            await asyncio.wait([getting, *running], return_when=asyncio.FIRST_COMPLETED)
            for one in workers:
                if one.done() and not one.cancelled():
                    one.result()
        return getting.result()
    finally:
        getting.cancel()
