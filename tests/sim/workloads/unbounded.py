"""Roles around one unbounded ledger: holders that take it over and write, followers; and its final check."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from metadata.errors import BookKeeperError, NoSuchEntryError, NoSuchLedgerError
from tests.sim.checkers.after_healing import CHECKERS
from tests.sim.checkers.batches import is_batch
from tests.sim.checkers.replicas import Copies
from tests.sim.checkers.unbounded import NAME, TermsRecord
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client, UnboundedLedgerWriter
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

TAKEOVER_BOUND_S = 40.0
WAIT_BOUND_S = 9.0
"""An add waits for the bookies that are away, for the next ones that go, and for a cancelled task."""


@role
async def term_holder(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Take the ledger over, again and again; write, roll and trim until somebody else does."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/holder")
    record, history, settings, number = TermsRecord.of(simulation), simulation.history, actor.settings, 0
    while not simulation.is_healed:
        try:
            ledger = await client.open_unbounded_ledger(
                NAME, fragment_bytes=settings["fragment_bytes"], **settings["quorums"]
            )
        except BookKeeperError as error:
            history.note(actor.name, "did not take over:", repr(error))
            await asyncio.sleep(settings["rest"] * rng.random())
            continue
        history.note(actor.name, "took over, term", ledger.term, "behind", ledger.last_add_confirmed)
        try:
            for _ in range(rng.randint(0, settings["bursts"])):
                for _ in range(rng.randint(1, settings["burst"])):
                    _add(record, actor.name, ledger, b"%s/%d" % (actor.name.encode(), number), rng)
                    number += 1
                await asyncio.sleep(settings["gap"] * 2 * rng.random())
                if rng.random() < settings["trims"]:
                    await ledger.trim(rng.randint(0, max(0, ledger.last_add_confirmed)))
            if rng.random() < 0.5:
                await ledger.close()
            else:
                await ledger.abort()
        except BookKeeperError as error:
            history.note(actor.name, "lost the ledger:", repr(error))
            await ledger.abort()
        await asyncio.sleep(settings["rest"] * rng.random())


def _add(
    record: TermsRecord, who: str, ledger: UnboundedLedgerWriter, name: bytes, rng: random.Random
) -> None:
    value = name + b"." * rng.randrange(300)
    record.added.add(value)

    def done(future: asyncio.Future[int]) -> None:
        if not future.cancelled() and future.exception() is None:
            record.acknowledge(who, future.result(), value)

    ledger.add_entry(value).add_done_callback(done)


@role
async def term_streamer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Add all the time and wait for nothing, for as long as the writer lives; then take the ledger again."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/streamer")
    record, history, settings, life = TermsRecord.of(simulation), simulation.history, actor.settings, 0
    while not simulation.is_healed:
        life += 1
        await asyncio.sleep(rng.random())
        try:
            ledger = await client.open_unbounded_ledger(
                NAME, fragment_bytes=settings["fragment_bytes"],
                append_timeout_s=settings["append_timeout_s"], **settings["quorums"],
            )  # fmt: skip
        except BookKeeperError as error:
            history.note(actor.name, "did not take over:", repr(error))
            continue
        history.note(actor.name, "took over, term", ledger.term, "behind", ledger.last_add_confirmed)
        number, who, last = 0, f"{actor.name}.{life}", ""
        bulks: set[asyncio.Task[None]] = set()
        waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        batches = random.Random(f"{simulation.plan.seed}/{who}/batches")
        while not ledger.is_closed and not simulation.is_healed:
            burst = [b"%s.%d" % (who.encode(), number + n) for n in range(rng.randint(1, settings["burst"]))]
            number += len(burst)
            if is_batch(batches, len(burst)):
                waiting.append((simulation.loop.now, ledger.add_batch(burst)))
                record.issued_batch(who, burst, waiting[-1][1])
                burst = []
            for value in burst:
                waiting.append((simulation.loop.now, ledger.add_entry(value)))
                record.issued(who, value, waiting[-1][1])
            while waiting and waiting[0][1].done():
                waiting.popleft()
            if waiting and simulation.loop.now - waiting[0][0] > WAIT_BOUND_S:
                history.fail(
                    "NobodyWaitsForEver", f"{who} waits for an add of {waiting[0][0]:.3f} s: {ledger!r}"
                )
            if ledger.state != last:
                last = ledger.state
                history.note(actor.name, "its writer is", last, "under term", ledger.term)
            if rng.random() < settings["bulks"] and not bulks:
                values = [b"%s/%d.%d" % (who.encode(), number, each) for each in range(3)]
                bulk = asyncio.create_task(_add_bulk(record, who, ledger, values))
                bulks.add(bulk)
                bulk.add_done_callback(bulks.discard)
            await asyncio.sleep(settings["step_s"] * rng.random() * 2)
        await _leave(simulation, actor, ledger, bulks)


async def _leave(
    simulation: Simulation, actor: Actor, ledger: UnboundedLedgerWriter, bulks: set[asyncio.Task[None]]
) -> None:
    try:
        await ledger.close()
    except BookKeeperError as error:
        simulation.history.note(actor.name, "writing ended:", repr(error))
    finally:
        await ledger.abort()
        await asyncio.gather(*bulks)


async def _add_bulk(
    record: TermsRecord, who: str, ledger: UnboundedLedgerWriter, values: list[bytes]
) -> None:
    record.added.update(values)
    try:
        first, last = await ledger.add_entries(values)
    except BookKeeperError:
        return
    for entry_id, value in zip(range(first, last + 1), values, strict=True):
        record.acknowledge(who, entry_id, value)


@role
async def term_follower(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Follow the ledger from its beginning."""
    record, following = TermsRecord.of(simulation), 0
    while True:
        try:
            async with aclosing(client.read_unbounded_ledger(NAME, following)) as entries:
                async for entry in entries:
                    if entry.entry_id != following:
                        simulation.history.fail(
                            "NoOutOfOrderEntries", f"{actor.name} read {entry.entry_id}, not {following}"
                        )
                    record.see(actor.name, entry.entry_id, entry.data)
                    following = entry.entry_id + 1
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"following at {following}:", repr(error))
            if isinstance(error, NoSuchEntryError):
                following = max(following, record.first_entry)
            await asyncio.sleep(0.3)


async def _check_terms(simulation: Simulation, client: Client) -> None:
    """Take the ledger over for the last time, and read all that is left of it, twice."""
    record = TermsRecord.find(simulation)
    if record is None or record.metadata is None:
        return
    give_up_at = simulation.loop.now + TAKEOVER_BOUND_S
    while True:
        try:
            ledger = await client.open_unbounded_ledger(NAME, create=False)
            _add(record, "judge", ledger, b"judge", random.Random(0))
            await ledger.close()
        except NoSuchLedgerError as error:
            # Its maker died before it had a name; nobody deletes one here.
            if record.acknowledged:
                simulation.history.fail("AllCommittedIdsAreReadable", f"the ledger is gone: {error!r}")
            return
        except BookKeeperError as error:
            if simulation.loop.now > give_up_at:
                simulation.history.fail("Liveness", f"the ledger cannot be taken over: {error!r}")
                return
            simulation.history.note("judge", "did not take over:", repr(error))
            await asyncio.sleep(0.5)
        else:
            break
    for who in ("judge", "judge again"):
        for left in (4, 3, 2, 1):
            try:
                async with aclosing(client.read_unbounded_ledger(NAME, None, follow=False)) as entries:
                    found = [tuple(entry) async for entry in entries]
            except BookKeeperError as error:
                simulation.history.note(who, "reading:", repr(error))
                if left == 1:
                    simulation.history.fail("AllCommittedIdsAreReadable", f"{who}: {error!r}")
                await asyncio.sleep(0.5)
            else:
                record.check_read(who, found)
                break
    metadata = record.heads[ledger.ledger_id]
    last = max(record.acknowledged, default=-1)
    await Copies(simulation, client).count(metadata, metadata.fragments, metadata.first_entry, last)


CHECKERS.append(_check_terms)
