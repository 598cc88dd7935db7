"""After healing: every ledger is recovered and read twice, and its copies are counted.

Owns the checks of a run's last phase, and the table of checkers that run in it. The history owns the checks
that hold at every moment. A ledger that somebody has asked to delete is checked as well if it is there.

- MetricsAddUp: all metrics of a bookie can be read, and count what the bookie did.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bookie_aio.metrics import METRICS
from metadata.errors import BookKeeperError, NoSuchLedgerError
from tests.sim.checkers import older_metadata
from tests.sim.checkers.replicas import Copies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from client_aio import Client
    from tests.sim.checkers.invariants import LedgerRecord
    from tests.sim.simulation import Simulation

RECOVERY_BOUND_S = 40.0
_TRIED_S = 6.0
"""The time after which a ledger counts as one that its marks keep from being closed."""
CHECKERS: list[Callable[[Simulation, Client], Awaitable[None]]] = []
"""Checks of logs and of unbounded ledgers; the checking client runs them after those of bounded ledgers."""
CHECKER = "judge"
"""The checking client's name. It seeds the client's randomness: another one changes what every seed does."""


async def check_after_healing(simulation: Simulation) -> None:
    """Recover, read and count, with a new client."""
    await simulation.spawn_client(CHECKER, _check)
    check_metrics(simulation)


async def _check(simulation: Simulation, client: Client) -> None:
    for record in _there(simulation):
        if not await _recover(simulation, client, record):
            return
        if not record.is_excused:
            await _read_all(simulation, client, record.ledger_id, "judge")
    second: Any = simulation.spawn_client("second", _second)
    await second
    await _count_copies(simulation, client)
    for further in CHECKERS:
        await further(simulation, client)


def check_metrics(simulation: Simulation) -> None:
    """Check that the metrics of each bookie can be read, and agree with each other (MetricsAddUp).

    Also called when chaos ends: the bookies are started again then, and count anew.
    """
    for name, bookie in sorted(simulation.bookies.items()):
        if bookie.stopped.done():
            continue
        figures = bookie.figures()
        for metric in METRICS:
            metric.read(figures)
        requests, storage = figures.requests, figures.storage
        pairs = (
            ("entries", requests.add.count, requests.entries_added),
            ("groups", storage.commit.count, storage.groups),
            ("groups answered", storage.acknowledge.count, storage.groups),
        )
        for what, counted, there in pairs:
            simulation.history.require(
                counted == there, "MetricsAddUp", f"{name} timed {counted} of {there} {what}".__str__
            )


async def _second(simulation: Simulation, client: Client) -> None:
    for record in _there(simulation):
        await _read_all(simulation, client, record.ledger_id, "second")


def _there(simulation: Simulation) -> Iterator[LedgerRecord]:
    """Yield the ledgers that are there when it is their turn, but for those that other checkers check."""
    history = simulation.history
    for record in list(history.ledgers.values()):
        is_there = record.metadata is not None and record.present is not None and not record.is_gone
        if is_there and not record.is_excused and record.ledger_id not in history.ignored:
            yield record


async def _recover(simulation: Simulation, client: Client, record: LedgerRecord) -> bool:
    """Have a ledger closed in time. Gives False when it cannot be, which ends the run."""
    loop, ledger_id = simulation.loop, record.ledger_id
    give_up_at = loop.now + RECOVERY_BOUND_S
    while not record.is_gone:
        try:
            opened = await client.open_ledger(
                ledger_id, recover=True, password=simulation.password(ledger_id)
            )
        except BookKeeperError as error:
            is_late = loop.now > give_up_at - RECOVERY_BOUND_S + _TRIED_S
            if is_late and older_metadata.cannot_be_closed(simulation.history, record, simulation.dishonest):
                return True
            if loop.now > give_up_at:
                simulation.history.fail(
                    "Liveness", f"ledger {ledger_id} cannot be closed though all faults are over: {error!r}"
                )
                return False
            simulation.history.note("judge", f"recovering ledger {ledger_id}:", repr(error))
            await asyncio.sleep(0.5)
        else:
            present = None if record.is_gone else record.present
            if present is not None and present.last_entry != opened.last_add_confirmed:
                text = f"ledger {ledger_id} was recovered, and is closed at {present.last_entry}"
                simulation.history.fail("Liveness", f"{text}: {opened.last_add_confirmed}")
            break
    return True


async def _read_all(simulation: Simulation, client: Client, ledger_id: int, who: str) -> None:
    history = simulation.history
    record = history.ledger(ledger_id)
    error: Exception | None = None
    for attempt in range(4):
        following = 0
        try:
            async with client.open_ledger(ledger_id, password=simulation.password(ledger_id)) as reader:
                last = reader.last_add_confirmed
                async for entry in reader.read(0, last):
                    history.require(
                        entry.entry_id == following,
                        "NoOutOfOrderEntries",
                        lambda entry=entry, following=following: (
                            f"{entry.entry_id} was read, not {following}"
                        ),
                    )
                    history.read(who, ledger_id, entry.entry_id, entry.data)
                    following += 1
        except NoSuchLedgerError:
            history.require(
                record.is_gone or record.present is None,
                "AllAckedEntriesAreReadable",
                lambda: f"ledger {ledger_id} is gone",
            )
            return
        except BookKeeperError as failure:
            history.note(who, f"reading ledger {ledger_id} at {following}:", repr(failure))
            error = failure
            if not attempt:  # A closed ledger needs no recovery: its bookies may still be starting.
                await Copies(simulation, client).all_serve()
            await asyncio.sleep(0.5)
        else:
            break
    history.require(
        following > record.needed,
        "AllAckedEntriesAreReadable",
        lambda: (
            f"{who} could read ledger {ledger_id} up to {following - 1} only, of {record.needed}: {error!r}"
        ),
    )


async def _count_copies(simulation: Simulation, client: Client) -> None:
    """Check that every bookie is there, and holds what it owes of every CLOSED ledger, those of logs too."""
    copies = Copies(simulation, client)
    await copies.all_serve()
    for record in list(simulation.history.ledgers.values()):
        metadata, last = record.metadata, record.closed_last
        if metadata is None or metadata.is_unbounded or last is None or record.is_gone:
            continue
        if metadata.given_up is not None:
            continue  # Nothing was written back. A repair makes the missing copies.
        if record.is_of_before:
            continue
        await copies.count(metadata, metadata.fragments, 0, last)
