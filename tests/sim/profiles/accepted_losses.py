"""Ledgers that are closed with a loss by clients that are cut off, and what may be lost by that.

Owns as well their record and its invariants. The names:

- LossesAreOfTheSilent: an acknowledged entry may lie behind the end of a ledger that was closed with a loss.
  It then had an ack quorum among the bookies that gave no answer. Where nothing was given up, none lies
  behind the end.
- AllAckedEntriesAreReadable: after healing, every acknowledged entry up to the end is read, with its bytes.
- ClosedNeverChanges: a ledger that was closed with a loss is closed at that end for ever.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING

from client_aio.core.quorum import write_set
from metadata.errors import BookKeeperError
from tests.sim.checkers.after_healing import CHECKERS, RECOVERY_BOUND_S
from tests.sim.plan import profile
from tests.sim.workloads.ledger import payload, role

if TYPE_CHECKING:
    from client_aio import Client, LedgerMetadata
    from tests.sim.plan import Actor, Draw, Plan
    from tests.sim.simulation import Simulation

BYTES = 40


class Losses:
    """The record of one run: what was acknowledged, and where ledgers were closed."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, set[int]] = {}
        self.open: dict[int, tuple[str, ...]] = {}  # ledgers being written, and their last ensemble
        self.closed: dict[int, LedgerMetadata] = {}

    @classmethod
    def of(cls, simulation: Simulation) -> Losses:
        """Return the run's record."""
        found = simulation.shared.setdefault("losses", cls())
        assert isinstance(found, cls)
        return found


def _rng(simulation: Simulation, actor: Actor) -> random.Random:
    return random.Random(f"{simulation.plan.seed}/{actor.name}/{actor.role}")


@role
async def loss_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Write one ledger after another, each until somebody closes it."""
    rng, losses = _rng(simulation, actor), Losses.of(simulation)
    while not simulation.is_healed:
        try:
            ledger = await client.create_ledger(**actor.settings["quorums"])
        except BookKeeperError as error:
            simulation.history.note(actor.name, "could not create a ledger:", repr(error))
            await asyncio.sleep(0.3)
            continue
        ledger_id, number = ledger.ledger_id, 0
        simulation.history.ignore(ledger_id)
        acknowledged = losses.acknowledged.setdefault(ledger_id, set())

        def done(future: asyncio.Future[int], into: set[int] = acknowledged) -> None:
            if not future.cancelled() and future.exception() is None:
                into.add(future.result())

        try:
            while not simulation.is_healed:
                losses.open[ledger_id] = ledger.metadata.last_fragment.bookies
                for _ in range(rng.randint(1, 4)):
                    ledger.add_entry(payload(ledger_id, number, BYTES)).add_done_callback(done)
                    number += 1
                await asyncio.sleep(actor.settings["gap"] * rng.random() * 2)
            await ledger.flush()
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"writing ledger {ledger_id} ended:", repr(error))
        losses.open.pop(ledger_id, None)
        await ledger.abort()


@role
async def loss_accepter(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Close ledgers that are being written, cut off from some of their bookies, at whatever price."""
    rng, losses = _rng(simulation, actor), Losses.of(simulation)
    while not simulation.is_healed:
        await asyncio.sleep(actor.settings["rest"] * rng.random() * 2)
        if not losses.open:
            continue
        ledger_id = rng.choice(sorted(losses.open))
        bookies = losses.open[ledger_id]
        lasts = rng.uniform(0.5, 6.0)
        for name in rng.sample(bookies, rng.randint(1, len(bookies) - 1)):
            for source, target in ((actor.name, name), (name, actor.name)):
                simulation.lasting.begin(
                    ("block", source, target),
                    lasts,
                    partial(simulation.network.block, source, target),
                    partial(simulation.network.open, source, target),
                )
        try:
            async with client.open_ledger(ledger_id, recover=True, accept_loss=True) as reader:
                _closed(simulation, losses, actor.name, reader.metadata)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"closing ledger {ledger_id}:", repr(error))


def _closed(simulation: Simulation, losses: Losses, who: str, metadata: LedgerMetadata) -> None:
    simulation.history.note(who, f"closed {metadata.ledger_id} at", metadata.last_entry, metadata.given_up)
    before = losses.closed.setdefault(metadata.ledger_id, metadata)
    simulation.history.require(
        (before.last_entry, before.given_up) == (metadata.last_entry, metadata.given_up),
        "ClosedNeverChanges",
        lambda: f"it was {before}, and is {metadata}",
    )


async def check_losses(simulation: Simulation, client: Client) -> None:
    """Close what is open, and look for every acknowledged entry."""
    if "losses" not in simulation.shared:
        return
    losses, history, loop = Losses.of(simulation), simulation.history, simulation.loop
    for ledger_id, acknowledged in losses.acknowledged.items():
        give_up_at = loop.now + RECOVERY_BOUND_S
        while True:
            try:
                await _check(simulation, client, losses, ledger_id, acknowledged)
                break
            except BookKeeperError as error:
                if loop.now > give_up_at:
                    history.fail("Liveness", f"ledger {ledger_id} cannot be closed and read: {error!r}")
                    return
                await asyncio.sleep(0.5)


async def _check(
    simulation: Simulation, client: Client, losses: Losses, ledger_id: int, acknowledged: set[int]
) -> None:
    history = simulation.history
    async with client.open_ledger(ledger_id, recover=True) as reader:
        metadata = reader.metadata
        _closed(simulation, losses, "judge", metadata)
        last_entry = reader.last_add_confirmed
        for entry_id in sorted(acknowledged):
            if entry_id > last_entry:
                _check_lost(simulation, metadata, entry_id)
                continue
            found = [bytes(entry.data) async for entry in reader.read(entry_id, entry_id)]
            history.require(
                found == [payload(ledger_id, entry_id, BYTES)],
                "AllAckedEntriesAreReadable",
                lambda entry_id=entry_id, found=found: f"entry {entry_id} of {metadata} is {found}",
            )


def _check_lost(simulation: Simulation, metadata: LedgerMetadata, entry_id: int) -> None:
    silent = metadata.given_up.bookies if metadata.given_up is not None else ()
    size, fragment = metadata.ensemble_size, metadata.last_fragment
    seats = write_set(entry_id % size, size, metadata.write_quorum)
    holders = [fragment.bookies[seat] for seat in seats if fragment.bookies[seat] in silent]
    simulation.history.require(
        len(holders) >= metadata.ack_quorum,
        "LossesAreOfTheSilent",
        lambda: f"entry {entry_id} was acknowledged, and {metadata} ends before it",
    )


CHECKERS.append(check_losses)


@profile
def accepted_losses(draw: Draw) -> Plan:
    """Clients that are cut off from some bookies close ledgers under their writers, at whatever price."""
    rng = draw.rng
    for _ in range(rng.choice((1, 1, 2))):
        sizes = rng.choice(((3, 3, 2), (3, 3, 2), (4, 2, 2), (3, 2, 1), (3, 3, 3)))
        quorums = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True))
        draw.actor("loss_writer", rng.uniform(0.0, 0.5), quorums=quorums, gap=rng.choice((0.01, 0.1)))
    writers = draw.clients
    for _ in range(rng.choice((1, 2))):
        draw.actor("loss_accepter", rng.uniform(0.3, 1.0), rest=rng.choice((0.2, 0.6)))
    # No disk loses anything here: what is missing at the end was given up.
    draw.some("kill_bookie", list(draw.bookies), 3)
    draw.some("pause", draw.clients, 3)
    for kind in ("block_both", "block_one_way", "cut_reset"):
        draw.some(kind, writers, 3)
    for kind in ("meta_slow", "meta_lossy", "meta_lag"):
        draw.some(kind, draw.clients, 3)
    return draw.plan(power_cut_at_end=False)
