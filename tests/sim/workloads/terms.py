"""Roles that make every call on unbounded ledgers, in every state of a handle.

Owns the order of the calls. The checks are in `unbounded_calls`, `unbounded_lifecycle` and `unbounded_heads`
of `tests.sim.checkers`, and those after healing in `unbounded_after_healing`. The roles share the ledger's
name, `unbounded_lifecycle.NAME`. The roles that read are in `tests.sim.workloads.terms_readers`.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    LedgerExistsError,
    MetadataUnavailableError,
)
from tests.sim.checkers.unbounded_calls import EVERYTHING, Calls
from tests.sim.checkers.unbounded_lifecycle import NAME, Lives
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client, RepairReport, Replica
    from tests.sim.checkers.unbounded_lifecycle import Handle, Life
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

_RELICS = 3
_UNHEARD = {"read": 0, "seal": 1}
_STEPS = (*("none", "bulk", "trim") * 2, "drain", "flush", "force", "roll", "rolls", "read")


class _Holder:
    """One client that takes the ledger over, and does not let go of the handles that it had."""

    def __init__(self, simulation: Simulation, actor: Actor, client: Client) -> None:
        self._loop = simulation.loop
        self._client = client
        self._settings = actor.settings
        self._rng = random.Random(f"{simulation.plan.seed}/{actor.name}/versatile")
        self._calls = Calls(simulation, actor.name, self._rng)
        self._relics: list[Handle] = []

    async def run(self) -> None:
        """Hold one term after another, until the time is over; then see that no call is without an end."""
        settings, rng = self._settings, self._rng
        while self._loop.now < settings["until"]:
            handle = await self._calls.take_over(
                self._client, NAME, create=rng.random() < settings["creates"],
                fragment_bytes=settings["fragment_bytes"], **settings["quorums"],
            )  # fmt: skip
            if handle is not None:
                await self._hold(handle)
                await self._end(handle)
                self._relics = [*self._relics, handle][-_RELICS:]
            if rng.random() < 0.1:
                await self._calls.make("intruding", self._calls.intrude(self._client))
            for relic in self._relics:
                if rng.random() < settings["pokes"]:
                    await self._poke(relic)
            await asyncio.sleep(settings["rest"] * rng.random())
        await self._calls.finish()
        if settings.get("closes", False):
            await self._calls.close_client(self._client, self._relics)

    async def _hold(self, handle: Handle) -> None:
        rng, settings = self._rng, self._settings
        for _ in range(rng.randint(0, settings["steps"])):
            sizes = [rng.randrange(300) for _ in range(rng.randint(0, settings["burst"]))]
            self._calls.add_some(handle, sizes)
            await self._step(handle)
            await asyncio.sleep(settings["gap"] * 2 * rng.random())
            if self._relics and rng.random() < settings["pokes"] / 4:
                await self._poke(rng.choice(self._relics))
            if handle.ledger.is_closed and rng.random() < 0.7:
                return

    async def _step(self, handle: Handle) -> None:
        """Make one call on a handle."""
        rng, calls = self._rng, self._calls
        lac = handle.ledger.last_add_confirmed
        chosen = rng.choice(_STEPS)
        match chosen:
            case "bulk":
                bulk = calls.bulk(handle, rng.choice((0, 1, 5, 20)), rng.choice((5, 100, 600)))
                await calls.make("add_entries", bulk)
            case "drain":
                await calls.make("drain", calls.drain(handle))
            case "flush":
                await calls.make("flush", calls.flush(handle))
            case "force":
                await calls.make("force", calls.force(handle))
            case "roll" | "rolls":
                # The one left to itself meets the other, and what is added in between.
                for _ in range(2 if chosen == "rolls" else 1):
                    await calls.make("roll", calls.roll(handle))
                    if rng.random() < 0.5:
                        calls.add(handle, rng.randrange(300))
            case "trim":
                before = rng.choice((rng.randint(0, max(0, lac + 3)), max(0, lac - 2), lac + 1000))
                if rng.random() < self._settings["trims"]:
                    await calls.make("trim", calls.trim(handle, before))
            case "read":
                await self._read(handle)

    async def _read(self, handle: Handle) -> None:
        rng, ledger = self._rng, handle.ledger
        lowest = max(0, ledger.first_entry - 3)
        first = rng.randint(lowest, max(lowest, ledger.last_add_confirmed + 1))
        last = rng.choice((first - 1, first, first + 5, ledger.last_add_confirmed))
        count = rng.choice((1, 5, EVERYTHING))
        await self._calls.make("read", self._calls.read(handle, first, max(last, first - 1), count))

    async def _end(self, handle: Handle) -> None:
        """Leave a term in one of the ways that there are, or not at all."""
        rng, calls, settings = self._rng, self._calls, self._settings
        is_late = self._loop.now > settings["seals_after"]
        if is_late and rng.random() < settings["seals"]:
            if rng.random() < 0.3:
                await calls.make("close", calls.close(handle, seal=False))
            await calls.make("seal", calls.close(handle, seal=True))
            return
        fate = rng.random()
        if fate < 0.35:
            await calls.make("close", calls.close(handle, seal=False))
        elif fate < 0.6:
            await calls.make("abort", calls.abort(handle))
        elif fate < 0.65:
            await calls.make("leave", calls.leave(handle))

    async def _poke(self, handle: Handle) -> None:
        """Call everything once on a handle of the past."""
        rng, calls = self._rng, self._calls
        metadata = self._calls.life(handle).metadata
        assert metadata is not None
        ends = rng.choice((metadata.last_fragment.first_entry, 1 << 40, 0))
        pokes: list[tuple[str, Any]] = [
            ("add_entries", lambda: calls.bulk(handle, 2, 10)),
            ("drain", lambda: calls.drain(handle)),
            ("flush", lambda: calls.flush(handle)),
            ("force", lambda: calls.force(handle)),
            ("roll", lambda: calls.roll(handle)),
            ("trim", lambda: calls.trim(handle, ends)),
            ("read", lambda: calls.read(handle, *_held(handle), EVERYTHING)),
            ("close", lambda: calls.close(handle, seal=False)),
        ]
        if calls.is_displaced(handle):
            pokes.append(("seal", lambda: calls.close(handle, seal=True)))
        rng.shuffle(pokes)
        adds = rng.random() < 0.5
        if not adds:
            # Who reads may learn of another's fragments, and yet hear of no bookie that it is fenced.
            pokes.sort(key=lambda poke: _UNHEARD.get(poke[0], len(_UNHEARD)))
        for what, call in [*pokes, ("abort", lambda: calls.abort(handle))]:
            if adds:
                calls.add_some(handle, [10])
            await calls.make(f"{what} of term {handle.term}", call(), cuts=0.1)


def _held(handle: Handle) -> tuple[int, int]:
    """Return the range of all that a handle has, as far as it knows."""
    lac = handle.ledger.last_add_confirmed
    return min(handle.ledger.first_entry, lac + 1), lac


@role
async def versatile_holder(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Hold the ledger, use all that its handle has, and go on with it when it is another's."""
    await _Holder(simulation, actor, client).run()


@role
async def remaker(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Delete the ledger by its name, whoever holds it, and sometimes make the next one."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/remaker")
    calls = Calls(simulation, actor.name, rng)
    while simulation.loop.now < actor.settings["until"]:
        await asyncio.sleep(actor.settings["rest"] * (0.3 + rng.random()))
        await calls.make("delete_ledger", _delete(calls.lives, client))
        if rng.random() < 0.4:
            await calls.make("create", _create(calls.lives, client, actor.settings["quorums"]))
    await calls.finish()


@role
async def finisher(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Bring every ledger to its end, sealed or deleted; who reads one then must come to an end too."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/finisher")
    calls = Calls(simulation, actor.name, rng)
    is_late = simulation.history.words.is_late  # Its creator is dead, and nobody uses it.
    while left := [
        life
        for life in calls.lives.alive()
        if (life.end is None or actor.settings["deletes"]) and not is_late(life.ledger_id)
    ]:
        for life in left:
            await calls.make("finishing", _finish(calls, client, life, **actor.settings), cuts=0.0)
        await asyncio.sleep(0.3)
    calls.lives.is_over.set()


async def _finish(calls: Calls, client: Client, life: Life, *, deletes: bool) -> None:
    if deletes:
        await client.delete_ledger(life.ledger_id, password=calls.lives.password)
    elif (handle := await calls.take_over(client, life.ledger_id, cuts=0.0, create=False)) is not None:
        calls.add(handle, 10)
        await calls.close(handle, seal=True)


async def _delete(lives: Lives, client: Client) -> None:
    there, known = {life.ledger_id for life in lives.alive()}, set(lives.all)
    await client.delete_ledger(NAME, password=lives.password)
    # One made since may have a lower id: clients draw them in blocks.
    gone = {life.ledger_id for life in lives.all.values() if life.is_deleted}
    is_gone = not there or bool(gone & there or gone - known)
    lives.require(is_gone, "NamesLeadToOne", f"of {there} none is deleted, and the delete has returned")


async def _create(lives: Lives, client: Client, quorums: dict[str, int]) -> None:
    try:
        ledger_id = await client.create_unbounded_ledger(NAME, password=lives.password, **quorums)
    except LedgerExistsError as error:
        is_there = error.ledger_id in lives.all
        lives.require(is_there, "NamesLeadToOne", f"there never was a ledger {error.ledger_id}: {error}")
    else:
        life = lives.life(ledger_id)
        is_there = life.metadata is not None and (life.is_deleted or lives.named == ledger_id)
        lives.require(is_there, "NamesLeadToOne", f"{ledger_id} was made; {NAME} leads to {lives.named}")


@role
async def mender(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Repair the ledger of any bookie, and ask what its bookies hold."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/mender")
    calls = Calls(simulation, actor.name, rng)
    while simulation.loop.now < actor.settings["until"]:
        await asyncio.sleep(actor.settings["rest"] * rng.random())
        await calls.make("mending", _mend(calls, client, simulation), cuts=0.1)
    await calls.finish()


async def _mend(calls: Calls, client: Client, simulation: Simulation) -> None:
    rng, lives, bookies = calls.rng, calls.lives, simulation.plan.bookies
    listed = [row async for row in client.list_unbounded_ledgers()]
    is_ours = all(name == NAME and lives.life(found).metadata is not None for name, found in listed)
    lives.require(is_ours and len(listed) <= 1, "NamesLeadToOne", f"listed are {listed}")
    metadata = await client.ledger_metadata(NAME)
    life = lives.life(metadata.ledger_id)
    fragment = rng.choice(metadata.fragments)
    lost = rng.choice(fragment.bookies)
    by = rng.choice((None, None, lost, rng.choice(bookies)))
    life.repairs.add(lost)
    life.repairs_begun += 1
    begun, is_alone = life.repairs_begun, life.repairs_ended == life.repairs_begun - 1
    # Who sees the store late, or meets another who repairs, does not know of all that there is to do.
    is_told = is_alone and by != lost and not simulation.metadata_faults(calls.who).lags
    owed = [each.first_entry for each in life.fragments[:-1]] if is_told else []
    try:
        report = await client.repair_ledger(
            life.ledger_id,
            replace=lost,
            by=by,
            recover_after_s=0.1 if rng.random() < 0.05 else None,
            password=rng.choice((b"", lives.password)),
        )
        calls.history.note(calls.who, "repaired", lost, "by", by, repr(report))
        if begun != life.repairs_begun or simulation.metadata_faults(calls.who).lags:
            owed = []
        _check_repaired(lives, life, report, owed)
        life.repairs_ended += 1  # one that is cut off, or whose store is away, may yet change the metadata
    except MetadataUnavailableError:
        raise
    except BookKeeperError as error:
        life.repairs_ended += 1
        if not isinstance(error, InvalidArgumentError):  # of a bookie that is there already, or of a recovery
            raise
        calls.history.note(calls.who, "repairing:", repr(error))
    check_replicas(lives, life, await client.ledger_replicas(life.ledger_id))


def _check_repaired(lives: Lives, life: Life, report: RepairReport, owed: list[int]) -> None:
    """Check that those are named whom a repair says, and that of fragments there were none is left out."""
    for each in report.fragments:
        is_named = (each.first_entry, each.replacement) in life.named
        lives.require(is_named, "RepairsAreWhole", f"{each} is not in the metadata: {report}")
    left = [each for each in life.fragments if each.first_entry in owed and report.replaced in each.bookies]
    lives.require(not left, "RepairsAreWhole", f"{report} leaves {left}")


def check_replicas(lives: Lives, life: Life, replicas: list[Replica]) -> None:
    """Check that a list of replicas is of fragments that there have been, each once, as many as it has."""
    rows = [(each.first_entry, each.bookie_id) for each in replicas]
    firsts = {first for first, _ in life.listed}
    is_right = len(rows) == len(set(rows)) and all(first in firsts for first, _ in rows)
    last = max((first for first, _ in rows), default=0)
    is_told = all(each.entries_owed is not None for each in replicas if each.first_entry != last)
    text = f"{life.ledger_id} has the replicas {replicas}"
    lives.require(is_right and is_told, "HeadsChangeAsWritten", text)
