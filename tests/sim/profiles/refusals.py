"""Ledgers with guaranteed write quorum and nobody to spare, whose bookies refuse adds for a while."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from bookie_aio.wire.messages import Add, Failure
from metadata.errors import BookKeeperError, NotEnoughBookiesError, Outcome
from tests.sim.plan import profile
from tests.sim.workloads.ledger import add, role

if TYPE_CHECKING:
    from client_aio import Client
    from client_aio.ledger.writer import LedgerWriter
    from tests.sim.plan import Actor, Draw, Plan
    from tests.sim.simulation import Simulation

GOES_ON_WITHIN_S = 3.0
"""A bookie is silent for a second before it counts as failed, as a replacement does once more."""
_UNDER_WAY_S = 0.5
"""An acknowledgement takes less."""


@role
async def undeterred_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Write ledgers, none of whose entries may wait: an ack quorum of bookies is well all the time."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/undeterred")
    settings = actor.settings
    while not simulation.is_healed:
        try:
            ledger = await client.create_ledger(**settings["quorums"])
        except NotEnoughBookiesError as error:
            simulation.history.note(actor.name, "could not create a ledger:", repr(error))
            await asyncio.sleep(0.3)
            continue
        simulation.created(actor.name, ledger.ledger_id)
        for _ in range(settings["entries"]):
            if simulation.is_healed or not await _goes_on(simulation, actor, ledger, rng):
                break
            await asyncio.sleep(settings["gap"] * rng.random() * 2)
        if settings["closes"]:
            await _close(simulation, actor, ledger)
        await ledger.abort()
        await asyncio.sleep(settings["rest"] * rng.random())


async def _goes_on(simulation: Simulation, actor: Actor, ledger: LedgerWriter, rng: random.Random) -> bool:
    for _ in range(actor.settings["burst"]):
        future = await add(simulation, actor.name, ledger, rng, actor.settings["bytes"])
    await asyncio.wait([future], timeout=GOES_ON_WITHIN_S)
    if future.done() and future.exception() is None:
        return True
    why = f"failed: {future.exception()!r}" if future.done() else f"waits for {GOES_ON_WITHIN_S} s"
    simulation.history.fail("AddsGoOn", f"{actor.name}, ledger {ledger.ledger_id}: an add {why}")
    return False


async def _close(simulation: Simulation, actor: Actor, ledger: LedgerWriter) -> None:
    """Close, which waits until the bookies take what they lack; the caller's patience is not endless.

    The client's own patience ends when no copy has come for `add_quorum_timeout_s`. Then the ledger can be
    closed at its ack quorum, which is well.
    """
    history, begun = simulation.history, simulation.loop.now
    try:
        async with asyncio.timeout(actor.settings["patience"]):
            await ledger.close()
    except TimeoutError:
        history.note(actor.name, "gives up closing", ledger.ledger_id)
    except BookKeeperError as error:
        history.note(actor.name, f"closing ledger {ledger.ledger_id} ended:", repr(error))
        if fault := _fault_in(simulation, ledger, error, begun):
            text = f"{actor.name}, ledger {ledger.ledger_id}: a close failed, and {fault}: {error!r}"
            history.fail("AddsGoOn", text)
        try:
            async with asyncio.timeout(GOES_ON_WITHIN_S):
                await ledger.close(at_ack_quorum=True)
        except (TimeoutError, BookKeeperError) as failure:
            text = f"{actor.name}, ledger {ledger.ledger_id}: not closed at its ack quorum: {failure!r}"
            history.fail("AddsGoOn", text)


def _fault_in(simulation: Simulation, ledger: LedgerWriter, error: BookKeeperError, begun: float) -> str:
    """Return what is wrong with the end of a close that has waited for copies; empty if nothing is."""
    now, timeout_s = simulation.loop.now, ledger._config.add_quorum_timeout_s
    if not isinstance(error, NotEnoughBookiesError) or error.outcome is not Outcome.NOT_DONE:
        return "not for want of copies"
    if now < begun + timeout_s:
        return f"after {now - begun:.2f} s only"
    plan = simulation.plan
    unwell = {name for fault in plan.faults for name in (fault.target, fault.other) if name in plan.bookies}
    named = [name for name in plan.bookies if f"{name} (" in str(error)]
    if not named or not unwell.issuperset(named):
        return f"names {named}, where only {sorted(unwell)} are unwell"
    owed = range(error.entry_id or 0, ledger.last_add_confirmed + 1)
    heard: dict[str, list[float]] = {}  # bookie → when it acknowledged what is owed
    for name in named:
        promised = simulation.history.words.promised_under(name, ledger.ledger_id, 0)
        events = simulation.history.events
        answers = [promised[entry_id] - 1 for entry_id in owed if entry_id in promised]
        heard[name] = [events[index][0] for index in answers if not _has_refused(events, index)]
    if all(len(times) == len(owed) and max(times) < now - _UNDER_WAY_S for times in heard.values()):
        return f"{named} have every copy"
    # With two of them, what one has acknowledged may be no progress, since the other has lost its seat.
    last = max(heard[named[0]], default=0.0) if len(unwell) == 1 else 0.0
    if now - timeout_s + _UNDER_WAY_S < last < now - _UNDER_WAY_S:
        return f"{named} had acknowledged a copy at {last:.2f} s"
    return ""


def _has_refused(events: list[tuple[Any, ...]], answered: int) -> bool:
    """Return whether the bookie refused another request between this one and its acknowledgement.

    Then it had lost its seat before it acknowledged, and nothing was waiting for the copy.
    """
    _, bookie, to, request_id, *_ = events[answered]
    for event in reversed(events[:answered]):
        if event[1:3] == (bookie, to) and isinstance(event[4], Failure):
            return True
        if (
            len(event) > 4
            and event[3] == request_id
            and event[2].endswith(bookie)
            and isinstance(event[4], Add)
        ):
            return False
    return False


@profile
def refusing_newcomers(draw: Draw) -> Plan:
    """Bookies that refuse adds are all there is in place of themselves; the ack quorum is always well.

    They are shut down in an orderly way while adds come, are full for long, lose what they hold of a ledger,
    or die while they are copied to.
    """
    rng = draw.rng
    ack_quorum, victims, bookies = rng.choice(((2, 1, 3), (2, 1, 3), (1, 2, 3), (1, 2, 4)))
    draw.bookies = draw.bookies[:bookies]
    unwell = rng.sample(draw.bookies, victims)
    draw.dishonest = unwell[0]
    quorums = {
        "ensemble_size": 3, "write_quorum": 3, "ack_quorum": ack_quorum, "guaranteed_write_quorum": True,
    }  # fmt: skip
    for _ in range(rng.choice((1, 2))):
        draw.actor(
            "undeterred_writer", rng.uniform(0.0, 0.5), quorums=quorums, entries=rng.choice((10, 30, 60)),
            burst=rng.choice((1, 1, 3)), gap=rng.choice((0.02, 0.05, 0.1)), rest=0.3,
            bytes=rng.choice((20, 200, 1200)), closes=rng.random() < 0.7,
            patience=rng.choice((0.5, 2.0, 20.0)),
        )  # fmt: skip
    draw.actor("tailer", 0.5)
    draw.actor("reader", rng.uniform(0.5, 2.0))
    for bookie in unwell:
        at = 0.6
        while at < draw.duration:
            lasts = rng.uniform(0.3, 4.0)
            kind = rng.choice(
                ("shut_down", "shut_down", "shut_down", "disk_full", "disk_read_errors", "kill_bookie")
            )
            if kind == "shut_down":  # and what it has accepted takes a while
                draw.fault("disk_slow", bookie, at=at - 0.1, lasts=1.0, amount=rng.random())
            draw.fault(kind, bookie, at=at, lasts=lasts, amount=rng.random())
            at += lasts + rng.uniform(0.3, 1.5)
        if ack_quorum > 1 and rng.random() < 0.3:
            at = rng.uniform(1.0, draw.duration)
            draw.fault("disk_bit_flip", bookie, at=at, amount=0.99)
            draw.fault("kill_bookie", bookie, at=at + 0.01, lasts=0.1)
        for kind in ("pause", "power_cut", "disk_slow"):
            draw.some(kind, [bookie], 2)
        for kind in ("block_both", "block_one_way", "cut_reset"):
            if draw.allows(kind):
                draw.fault(
                    kind,
                    rng.choice(draw.clients),
                    other=bookie,
                    lasts=rng.uniform(0.2, 3.0),
                    amount=rng.random(),
                )
        draw.some("meta_cut", [bookie], 1)
    segment_bytes = rng.choice((24, 32)) * 1024
    timeout_s = rng.choice((8.0, 4.0, 8.0))  # more than `GOES_ON_WITHIN_S`
    if timeout_s < 8.0:  # and a close meets it
        draw.fault("disk_full", unwell[0], at=rng.uniform(1.0, 3.0), lasts=7.0, amount=1.0)
    return draw.plan(segment_bytes=segment_bytes, client_settings={"add_quorum_timeout_s": timeout_s})
