"""Roles around bounded ledgers, and the table of all roles.

A role is a coroutine that takes the simulation, its actor and a connected client. It runs until it is done,
or for ever; the run ends it. It reports each add and each read to the history. Errors of the client's tree
are recorded, since faults lead to them. Any other error is a bug.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from metadata.errors import BookKeeperError, LedgerFencedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio import Client
    from client_aio.ledger.writer import LedgerWriter
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

Role = "Callable[[Simulation, Actor, Client], Awaitable[None]]"
ROLES: dict[str, Callable[[Simulation, Actor, Client], Awaitable[None]]] = {}
SETUPS: dict[str, Callable[[Simulation], Awaitable[None]]] = {}


def role(function: Callable[[Simulation, Actor, Client], Awaitable[None]]) -> Any:
    """Enter a function into the table of roles, under its name."""
    ROLES[function.__name__] = function
    return function


def payload(ledger_id: int, entry_id: int, size: int) -> bytes:
    """Return an entry's bytes, which name the entry."""
    head = f"{ledger_id}:{entry_id}:".encode()
    return head if size <= len(head) else (head * (size // len(head) + 1))[:size]


async def add(simulation: Simulation, who: str, ledger: LedgerWriter, rng: random.Random, size: int) -> Any:
    """Add the next entry, and have the history watch it."""
    record = simulation.history.ledger(ledger.ledger_id)
    data = payload(ledger.ledger_id, len(record.issued), int(size * rng.random() * 2))
    future = ledger.add_entry(data)
    simulation.history.issued(who, ledger.ledger_id, data, future)
    return future


@role
async def writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Write ledgers, one after another: bursts of entries, then a close or none."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/writer")
    settings = actor.settings
    while not simulation.is_healed:
        try:
            ledger = await client.create_ledger(**settings["quorums"])
        except BookKeeperError as error:
            simulation.history.note(actor.name, "could not create a ledger:", repr(error))
            await asyncio.sleep(0.3)
            continue
        simulation.created(actor.name, ledger.ledger_id)
        try:
            added = 0
            while added < settings["entries"] and not simulation.is_healed:
                for _ in range(min(settings["burst"], settings["entries"] - added)):
                    await add(simulation, actor.name, ledger, rng, settings["bytes"])
                    added += 1
                await asyncio.sleep(settings["gap"] * rng.random() * 2)
            await ledger.flush()
            if settings["closes"]:
                await ledger.close(at_ack_quorum=rng.random() < settings.get("at_ack_quorum", 0.0))
            else:
                await asyncio.sleep(rng.random() * 2)
                await ledger.abort()
        except BookKeeperError as error:
            if isinstance(error, LedgerFencedError):
                simulation.history.told_fenced(actor.name, ledger.ledger_id, error)
            simulation.history.note(actor.name, f"writing ledger {ledger.ledger_id} ended:", repr(error))
            await ledger.abort()
        await asyncio.sleep(settings["rest"] * rng.random())


@role
async def tailer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Follow the newest ledger until it is closed, then the next."""
    followed = -1
    while True:
        ledger_id = await simulation.newest_ledger(after=followed)
        followed = ledger_id
        at = 0
        for _ in range(20):
            try:
                async with client.open_ledger(ledger_id, password=simulation.password(ledger_id)) as reader:
                    async for entry in reader.tail(from_entry=at):
                        if entry.entry_id != at:
                            text = f"{actor.name} was given entry {entry.entry_id}, not {at}"
                            simulation.history.fail("NoOutOfOrderEntries", text)
                        simulation.history.read(actor.name, ledger_id, entry.entry_id, entry.data)
                        at = entry.entry_id + 1
            except BookKeeperError as error:
                simulation.history.note(actor.name, f"tailing ledger {ledger_id} at {at}:", repr(error))
                await asyncio.sleep(0.3)
            else:
                record = simulation.history.ledger(ledger_id)
                if at - 1 not in record.ends and not record.is_deleted:
                    text = f"{actor.name} has come to an end of ledger {ledger_id} at {at - 1}"
                    simulation.history.fail("AllAckedEntriesAreReadable", f"{text}, not {record.closed_last}")
                break


@role
async def reader(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Read all of any ledger up to its LAC, again and again."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/reader")
    while True:
        await simulation.newest_ledger(after=-1)
        ledger_id = rng.choice(simulation.ledger_ids)
        try:
            async with client.open_ledger(ledger_id, password=simulation.password(ledger_id)) as opened:
                last = opened.last_add_confirmed
                expected = 0
                async for entry in opened.read(0, last):
                    if entry.entry_id != expected:
                        simulation.history.fail(
                            "NoOutOfOrderEntries", f"{actor.name} read entry {entry.entry_id}, not {expected}"
                        )
                    expected += 1
                    simulation.history.read(actor.name, ledger_id, entry.entry_id, entry.data)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"reading ledger {ledger_id}:", repr(error))
        await asyncio.sleep(0.5 + rng.random())


@role
async def recoverer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Take over the newest ledger (of the client `of`), whatever its writer does, some times over."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/recoverer")
    for _ in range(actor.settings.get("times", 2)):
        ledger_id = await simulation.newest_ledger(after=-1, by=actor.settings.get("of", ""))
        for _ in range(actor.settings.get("tries", 6)):
            try:
                at_ack_quorum = rng.random() < actor.settings.get("at_ack_quorum", 0.0)
                opened = await client.open_ledger(
                    ledger_id,
                    recover=True,
                    at_ack_quorum=at_ack_quorum,
                    password=simulation.password(ledger_id),
                )
            except BookKeeperError as error:
                simulation.history.note(actor.name, f"recovering ledger {ledger_id}:", repr(error))
                await asyncio.sleep(rng.random())
            else:
                simulation.history.note(actor.name, "recovered", ledger_id, opened.last_add_confirmed)
                break
        await asyncio.sleep(actor.settings.get("gap", 2.0) * rng.random())


@role
async def repairer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Repair ledgers: replace any bookie of theirs, or repair it in its place."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/repairer")
    while not simulation.is_healed:
        await simulation.newest_ledger(after=-1)
        ledger_id = rng.choice((rng.choice(simulation.ledger_ids), simulation.ledger_ids[-1]))
        metadata = simulation.history.ledger(ledger_id).metadata
        assert metadata is not None
        bookie = rng.choice(rng.choice(metadata.fragments).bookies)
        # By itself, by one that may serve the fragment that is written to now, or by whom placement chooses.
        by = rng.choice((bookie, rng.choice(metadata.last_fragment.bookies), None, None))
        try:
            report = await client.repair_ledger(
                ledger_id, replace=bookie, by=by,
                recover_after_s=0.5 if rng.random() < 0.2 else None,
            )  # fmt: skip
            simulation.history.note(actor.name, f"repaired ledger {ledger_id} of {bookie}:", repr(report))
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"repairing ledger {ledger_id} of {bookie}:", repr(error))
        await asyncio.sleep(0.2 + rng.random())


@role
async def healer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Repair the bookie whose disk lies in its own place, so that its marks of lost data are lifted."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/healer")
    bookie = simulation.plan.dishonest
    while not simulation.is_healed:
        await simulation.newest_ledger(after=-1)
        ledger_id = rng.choice((rng.choice(simulation.ledger_ids), simulation.ledger_ids[-1]))
        try:
            report = await client.repair_ledger(
                ledger_id, replace=bookie, by=bookie,
                recover_after_s=0.2 if rng.random() < 0.5 else None,
            )  # fmt: skip
            simulation.history.note(actor.name, f"healed ledger {ledger_id} of {bookie}:", repr(report))
            simulation.stats["mark_lifted"] += report.is_mark_lifted
            simulation.stats["mark_left"] += bool(report.mark_left)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"healing ledger {ledger_id} of {bookie}:", repr(error))
        await asyncio.sleep(0.1 + 0.4 * rng.random())


@role
async def deleter(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Delete ledgers, whoever writes them."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/deleter")
    while not simulation.is_healed:
        await simulation.newest_ledger(after=-1)
        ledger_id = rng.choice(simulation.ledger_ids)
        simulation.deleting(ledger_id)
        try:
            await client.delete_ledger(ledger_id, password=simulation.password(ledger_id))
            simulation.history.note(actor.name, "deleted", ledger_id)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"deleting ledger {ledger_id}:", repr(error))
        await asyncio.sleep(0.5 + 2 * rng.random())
