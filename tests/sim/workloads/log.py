"""Roles that write, read, truncate and sweep one log, and its check after healing."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from metadata.errors import BookKeeperError, LogTruncatedError, OperationTimeoutError
from metadata.model.log import Position
from tests.sim.checkers.after_healing import CHECKERS, RECOVERY_BOUND_S
from tests.sim.checkers.batches import is_batch
from tests.sim.checkers.log import Chains
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client, LogWriter
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

LOG = "log"


@role
async def log_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Open the log, append in bursts, roll, truncate, close or abort, and open it again."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/log_writer")
    chains, settings, life = Chains.of(simulation), actor.settings, 0
    while not simulation.is_healed:
        life += 1
        await asyncio.sleep(settings["pause"] * rng.random())
        try:
            log = await client.open_log(
                LOG, roll_entries=settings["roll_entries"],
                append_timeout_s=settings.get("append_timeout_s", 60.0), **settings["quorums"],
            )  # fmt: skip
        except BookKeeperError as error:
            simulation.history.note(actor.name, "could not open the log:", repr(error))
            continue
        chains.holds(log)
        simulation.history.note(actor.name, "opened the log with ledger", log.ledger_id)
        try:
            await _write(simulation, chains, client, log, rng, actor, life)
            if rng.random() < 0.5:
                await log.close()
        except BookKeeperError as error:
            simulation.history.note(actor.name, "writing ended:", repr(error))
        finally:
            await log.abort()


async def _write(
    simulation: Simulation,
    chains: Chains,
    client: Client,
    log: LogWriter,
    rng: random.Random,
    actor: Actor,
    life: int,
) -> None:
    settings, who = actor.settings, f"{actor.name}.{life}"
    batches = random.Random(f"{simulation.plan.seed}/{who}/batches")
    for number in range(settings["bursts"]):
        payloads = [f"{who}.{number}.{each}".encode() for each in range(rng.randint(1, settings["burst"]))]
        _append(chains, who, log, payloads, batches)
        if rng.random() < 0.7:
            with suppress(OperationTimeoutError):  # Records were overdue; the writer goes on with others.
                await log.flush()
        if rng.random() < settings["rolls"]:
            await log.roll()
        if rng.random() < settings["truncates"] and log.last_add_confirmed is not None:
            before = rng.choice([log.last_add_confirmed, Position(log.ledger_id, 0)])
            await client.truncate_log(LOG, before)
        await asyncio.sleep(settings["gap"] * rng.random() * 2)
    await log.flush()


def _append(chains: Chains, who: str, log: LogWriter, payloads: list[bytes], batches: random.Random) -> None:
    """Append records one by one, or as a batch."""
    if is_batch(batches, len(payloads)):
        chains.issued_batch(who, payloads, log.append_batch(payloads))
        return
    for payload in payloads:
        chains.issued(who, payload, log.append(payload))


@role
async def log_streamer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Append all the time and wait for nothing, for as long as the writer lives; then open the log again."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/log_streamer")
    chains, settings, life = Chains.of(simulation), actor.settings, 0
    while not simulation.is_healed:
        life += 1
        await asyncio.sleep(rng.random())
        try:
            log = await client.open_log(
                LOG, roll_entries=settings["roll_entries"], append_timeout_s=settings["append_timeout_s"],
                **settings["quorums"],
            )  # fmt: skip
        except BookKeeperError as error:
            simulation.history.note(actor.name, "could not open the log:", repr(error))
            continue
        chains.holds(log)
        simulation.history.note(actor.name, "opened the log with ledger", log.ledger_id)
        number, who, last = 0, f"{actor.name}.{life}", ""
        batches = random.Random(f"{simulation.plan.seed}/{who}/batches")
        while not log.is_closed and not simulation.is_healed:
            payloads = [f"{who}.{number + n}".encode() for n in range(rng.randint(1, settings["burst"]))]
            _append(chains, who, log, payloads, batches)
            number += len(payloads)
            if log.state != last:
                last = log.state
                simulation.history.note(actor.name, "its writer is", last)
            await asyncio.sleep(settings["step_s"] * rng.random() * 2)
        await _leave(simulation, actor, log)


async def _leave(simulation: Simulation, actor: Actor, log: LogWriter) -> None:
    try:
        await log.close()
    except BookKeeperError as error:
        simulation.history.note(actor.name, "writing ended:", repr(error))
    finally:
        await log.abort()


@role
async def log_follower(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Follow the log from its beginning, for ever."""
    chains, at = Chains.of(simulation), None
    while True:
        try:
            async with aclosing(client.read_log(LOG, at, follow=True)) as records:
                async for record in records:
                    if record.position != at or actor.name not in chains.passed:
                        chains.read(actor.name, record)
                    at = record.position
        except LogTruncatedError as error:
            simulation.history.note(actor.name, "behind the log's beginning:", repr(error))
            at = await _beginning(chains, actor.name, client)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "following ended:", repr(error))
        await asyncio.sleep(0.2)


async def _beginning(chains: Chains, who: str, client: Client) -> Position | None:
    """Go on where the log begins now, unless it cannot be told; then from where it was."""
    try:
        begins_at = (await client.log_metadata(LOG)).begins_at
    except BookKeeperError:
        return Position(0, 0)
    chains.starts_at(who, begins_at)
    return begins_at


@role
async def log_sweeper(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Sweep, with no regard to age."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/log_sweeper")
    while not simulation.is_healed:
        await asyncio.sleep(rng.random())
        try:
            report = await client.sweep_log_orphans(older_than_s=0)
            simulation.history.note(actor.name, "swept", report.ledgers)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "sweeping:", repr(error))


@role
async def log_adder(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Add closed ledgers by transactions, each tried until it is known to be done."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/log_adder")
    chains = Chains.of(simulation)
    for batch in range(actor.settings["batches"]):
        await asyncio.sleep(rng.random() * 2)
        payloads, ids = list[bytes](), list[int]()
        try:
            for number in range(2):
                payloads.append(f"{actor.name}.{batch}.{number}".encode())
                async with client.create_ledger(**actor.settings["quorums"]) as ledger:
                    simulation.history.ignore(ledger.ledger_id)  # checked by its records, as a log's
                    await ledger.add_entry(payloads[-1])
                ids.append(ledger.ledger_id)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "making ledgers to add:", repr(error))
            continue
        for payload in payloads:
            chains.tried[payload] = actor.name
        while True:
            try:
                added = await client.add_to_log(LOG, ids, transaction=(actor.name, batch))
                break
            except BookKeeperError as error:
                simulation.history.note(actor.name, f"adding {ids}:", repr(error))
                await asyncio.sleep(0.3)
        for row, payload in zip(added.rows, payloads, strict=False):
            chains.acked(actor.name, payload, Position(row.id, 0))


async def check_log(simulation: Simulation, client: Client) -> None:
    """Take the log over, read it twice, and sweep."""
    if "chains" not in simulation.shared or "lives of the log" in simulation.shared:
        return  # there is no log, or `tests.sim.workloads.log_lifecycle` checks it
    chains, history, loop = Chains.of(simulation), simulation.history, simulation.loop
    give_up_at = loop.now + RECOVERY_BOUND_S
    while True:
        try:
            async with client.open_log(LOG) as log:
                chains.holds(log)
                payload = b"judge.0.0"
                chains.issued("judge", payload, log.append(payload))
            swept_at = loop.now
            await client.sweep_log_orphans(older_than_s=0)
            found = [record async for record in client.read_log(LOG)]
            again = [record async for record in client.read_log(LOG)]
            metadata = await client.log_metadata(LOG)
            break
        except BookKeeperError as error:
            if loop.now > give_up_at:
                history.fail(
                    "Liveness", f"the log cannot be taken over though all faults are over: {error!r}"
                )
                return
            history.note("judge", "taking the log over:", repr(error))
            await asyncio.sleep(0.5)
    history.require(found == again, "EntryOrderMaintained", lambda: "two readings differ")
    chains.starts_at("judge's reader", metadata.begins_at)
    for record in found:
        chains.read("judge's reader", record)
    read = {record.position for record in found}
    lost = [each for each in chains.values if each >= metadata.begins_at and each not in read]
    history.require(
        not lost, "AllAckedRecordsAreReadable", lambda: f"{lost} are gone; it begins at {metadata.begins_at}"
    )
    payloads = {bytes(record.data) for record in found}
    missing = [name for name, behind in chains.owed if behind >= metadata.begins_at and name not in payloads]
    history.require(not missing, "AllAckedRecordsAreReadable", lambda: f"{missing} of batches are gone")
    left_over = chains.left_over([row.ledger_id for row in metadata.rows], swept_at)
    history.require(not left_over, "NothingLeftOver", lambda: f"{left_over} are in no log")


CHECKERS.append(check_log)
