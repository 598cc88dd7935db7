"""Roles around a log that comes and goes: they delete and remake it, inspect it, or stand for election.

Owns as well the checks, after healing, of a log in all its lives and of its election. The names, beside those
of `tests.sim.checkers.log_lifecycle`:

- LeadersHoldTheKey: a candidate that believes it leads holds the key `leader`, in its present session. Its
  terms are counted, and `changes` reports alternately that it leads and that it does not.
- Liveness: after healing a new candidate is elected within a bound.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from client_aio import LeaderElection
from metadata.errors import BookKeeperError
from tests.sim.checkers.after_healing import CHECKERS, RECOVERY_BOUND_S
from tests.sim.checkers.log_handles import Hand, shortly
from tests.sim.checkers.log_lifecycle import LOG, LogLives, lives_of
from tests.sim.checkers.log_reads import Reading, check_absence, check_documented
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client, LogMetadata, LogRecord
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

ELECTED_WITHIN_S = 20.0


def _rng(simulation: Simulation, actor: Actor) -> random.Random:
    return random.Random(f"{simulation.plan.seed}/{actor.name}/{actor.role}")


@role
async def log_remaker(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Delete the log, and make it anew under its name, or leave that to others."""
    rng, lives, number = _rng(simulation, actor), lives_of(simulation), 0
    while not simulation.is_healed:
        await asyncio.sleep(actor.settings["rest"] * rng.random() * 2)
        life, since = lives.life, simulation.loop.now
        deleting = client.delete_log(LOG, password=lives.password)
        try:
            done = await shortly(rng.choice((0.02, 0.2, 8.0, 8.0, 8.0)), deleting)
            simulation.history.note(actor.name, "deleting was cancelled" if done is False else "deleted it")
            if done is None:
                _check_deleted(simulation, actor.name, lives, life)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "deleting the log:", repr(error))
            check_documented(lives, f"{actor.name} deleting", error)
            check_absence(lives, actor.name, since, error)
        if rng.random() < 0.3:
            continue
        number += 1
        try:
            log = await client.open_log(LOG, roll_entries=2, **actor.settings["quorums"])
        except BookKeeperError as error:
            simulation.history.note(actor.name, "making it anew:", repr(error))
            check_documented(lives, f"{actor.name} opening", error)
            continue
        hand = Hand(simulation, log, f"{actor.name}.{number}", rng)
        try:
            for _ in range(rng.randint(0, 4)):
                hand.append(rng.randint(1, 5))
                await hand.flush()
            await hand.close()
        except BookKeeperError as error:
            simulation.history.note(hand.who, "writing ended:", repr(error))
        await hand.abort()


def _check_deleted(simulation: Simulation, who: str, lives: LogLives, life: Any) -> None:
    if life is None:
        return
    left = [row.ledger_id for row in life.listed.values() if lives.exists(row.ledger_id)]
    if life.ended_at is None or left:
        lives.fail("CallsDoWhatTheySay", f"{who} deleted life {life.number}; {left} exist, {life.ended_at}")


@role
async def log_intruder(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Try to read, cut, empty and delete the log, with another password than its own."""
    rng, lives, wrong = _rng(simulation, actor), lives_of(simulation), b"of another"

    async def try_to(what: str, last: int) -> Any:
        match what:
            case "read":
                async with aclosing(client.read_log(LOG, password=wrong)) as records:
                    return await anext(records, None)
            case "cut":
                return await client.truncate_log(LOG, (last, 0), password=wrong)
            case "emptied":
                return await client.add_to_log(LOG, [], replace=True, password=wrong)
            case _:
                return await client.delete_log(LOG, password=wrong)

    while not simulation.is_healed:
        await asyncio.sleep(0.3 * rng.random())
        life, since, what = lives.life, simulation.loop.now, rng.choice(("read", "cut", "emptied", "deleted"))
        if life is None or not life.rows:
            continue
        try:
            found = await try_to(what, life.rows[-1].id)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "tried in vain:", what, repr(error))
            check_documented(lives, f"{actor.name}, {what}", error)
            continue
        had_rows = all(shape.rows for shape in life.shapes if shape.since >= since)
        if lives.life is life and had_rows and (what != "read" or found):
            lives.fail("PasswordsAreAsked", f"{actor.name} {what} it: {found}")


def secret(lives: LogLives) -> dict[str, Any]:
    """Return the settings of a ledger that has the log's password."""
    return {"digest": "hmac-sha256", "password": lives.password} if lives.password else {}


@role
async def log_inspector(simulation: Simulation, actor: Actor, client: Client) -> None:
    """List logs and read their metadata; make a log of its own now and then, and delete it."""
    rng, lives, own = _rng(simulation, actor), lives_of(simulation), f"aside-{actor.name}"
    is_there: bool | None = False  # None: not known
    while not simulation.is_healed:
        await asyncio.sleep(rng.random())
        since = simulation.loop.now
        try:
            if rng.random() < 0.3:
                was_there, is_there = is_there, None
                if was_there is False:
                    async with client.open_log(own) as log:
                        await log.append(b"aside")
                    is_there = True
                else:
                    await client.delete_log(own)
                    is_there = False
            names = [name async for name in client.list_logs()]
            _check_names(lives, names, own, is_there)
            _check_metadata(lives, await client.log_metadata(LOG), since)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "looking:", repr(error))
            check_documented(lives, f"{actor.name} looking", error)
            if is_there is not None:
                check_absence(lives, actor.name, since, error)


def _check_names(lives: LogLives, names: list[str], own: str, is_there: bool | None) -> None:
    strange = [name for name in names if name != LOG and not name.startswith("aside-")]
    if names != sorted(set(names)) or strange:
        lives.fail("CallsDoWhatTheySay", f"list_logs gave {names}")
    if is_there is not None and is_there is not (own in names):
        lives.fail("CallsDoWhatTheySay", f"list_logs gave {names}; {own} is there: {is_there}")


def _check_metadata(lives: LogLives, found: LogMetadata, since: float) -> None:
    """Check that the list was like this at some time since the call began."""
    for life in lives.lives:
        shapes = life.shapes
        for number, shape in enumerate(shapes):
            until = shapes[number + 1].since if number + 1 < len(shapes) else life.ended_at
            if (until is None or until >= since) and (found.rows, found.begins_at) == shape[1:]:
                return
    lives.fail("CallsDoWhatTheySay", f"log_metadata gave {found}, which it was not since {since:.4f} s")


# --- election --------------------------------------------------------------------------------------


@role
async def elector(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Stand for election, write the log while leading, step down, and stand again."""
    rng, number = _rng(simulation, actor), 0
    simulation.shared["election"] = True
    while not simulation.is_healed:
        await asyncio.sleep(rng.random())
        number += 1
        async with LeaderElection(client, LOG, actor.name.encode()) as election:
            try:
                for _ in range(rng.randint(1, 4)):
                    await _lead_once(simulation, actor, client, election, rng, number)
            except BookKeeperError as error:
                simulation.history.note(actor.name, "standing ended:", repr(error))
        if election.is_leader:
            simulation.history.fail("LeadersHoldTheKey", f"{actor.name} has left, and leads")


async def _lead_once(
    simulation: Simulation,
    actor: Actor,
    client: Client,
    election: LeaderElection,
    rng: random.Random,
    number: int,
) -> None:
    terms = election.terms
    if rng.random() < 0.3:
        await _heed_changes(simulation, actor, election, rng)
        return
    if await shortly(4 * rng.random(), election.gained()) is False:
        return
    if election.terms < max(1, terms):
        simulation.history.fail("LeadersHoldTheKey", f"{actor.name} leads for the {election.terms}th time")
    simulation.history.note(actor.name, "leads, term", election.terms)
    _check_leader(simulation, actor, election)
    who = f"{actor.name}.{number}.{election.terms}.{simulation.loop.now:.4f}"
    try:
        log = await client.open_log(LOG, roll_entries=5, **actor.settings["quorums"])
    except BookKeeperError as error:
        simulation.history.note(who, "could not open the log:", repr(error))
        return
    hand = Hand(simulation, log, who, rng)
    try:
        for _ in range(rng.randint(1, 10)):
            hand.append(rng.randint(1, 4))
            _check_leader(simulation, actor, election)
            if await shortly(0.5 * rng.random(), election.lost()) is None:
                simulation.history.note(actor.name, "has lost, terms", election.terms)
                break
        if rng.random() < 0.5:
            await hand.close()
    except BookKeeperError as error:
        simulation.history.note(who, "writing ended:", repr(error))
    await hand.abort()
    _check_leader(simulation, actor, election)
    value = await election.leader()
    if value is not None and not (value.startswith(b"c") or value == b"judge"):
        simulation.history.fail("LeadersHoldTheKey", f"the leader is {value!r}")


async def _heed_changes(
    simulation: Simulation, actor: Actor, election: LeaderElection, rng: random.Random
) -> None:
    """Follow whether this candidate leads, for a while."""
    before: bool | None = None
    async with aclosing(election.changes()) as changes:

        async def change() -> tuple[bool]:
            return (await anext(changes),)

        for _ in range(rng.randint(1, 5)):
            found = await shortly(3 * rng.random(), change())
            if found is False:
                return
            simulation.history.note(actor.name, "leads:", found[0])
            if found[0] is before:
                simulation.history.fail("LeadersHoldTheKey", f"{actor.name} is told twice: {before}")
            before = found[0]
            _check_leader(simulation, actor, election)


def _check_leader(simulation: Simulation, actor: Actor, election: LeaderElection) -> None:
    """Leadership ends with the session: whoever believes that it leads has the key, in its session."""
    if not election.is_leader:
        return
    node = simulation.tree.find(f"elections/{LOG}/leader")
    session = simulation.stores[actor.name].session_id
    if node is None or node.value is None or node.session != session:
        text = f"{actor.name} believes that it leads; the key is {node and node.value!r} of {session}"
        simulation.history.fail("LeadersHoldTheKey", text)


# --- checkers --------------------------------------------------------------------------------------


async def check_lives(simulation: Simulation, client: Client) -> None:
    """Take the log over, read it in all ways, and sweep."""
    if "lives of the log" not in simulation.shared:
        return
    lives, history, loop = lives_of(simulation), simulation.history, simulation.loop
    give_up_at = loop.now + RECOVERY_BOUND_S
    while True:
        try:
            async with client.open_log(LOG, **secret(lives)) as log:
                hand = Hand(simulation, log, f"judge.{loop.now:.4f}", random.Random(0))
                hand.append(1)
            swept_at = loop.now
            await client.sweep_log_orphans(older_than_s=0, password=lives.password)
            found = await _read_all(simulation, lives, client)
            _check_metadata(lives, metadata := await client.log_metadata(LOG), swept_at)
            break
        except BookKeeperError as error:
            if loop.now > give_up_at:
                history.fail(
                    "Liveness", f"the log cannot be taken over though all faults are over: {error!r}"
                )
                return
            history.note("judge", "taking the log over:", repr(error))
            await asyncio.sleep(0.5)
    life = lives.life
    assert life is not None
    read = {record.position for record in found}
    known = [each for each in lives.values if lives.life_of[each.ledger_id] is life]
    lost = [each for each in known if each >= life.begins_at and each not in read]
    history.require(
        not lost, "AllAckedRecordsAreReadable", lambda: f"{lost} are gone; it begins at {life.begins_at}"
    )
    left_over = lives.left_over([row.ledger_id for row in metadata.rows], swept_at)
    pages = lives.pages_left_over(swept_at)
    history.require(not left_over and not pages, "NothingLeftOver", lambda: f"{left_over}, pages {pages}")


async def _read_all(simulation: Simulation, lives: LogLives, client: Client) -> list[LogRecord]:
    """Read it twice, by records and by batches."""
    found = []
    for who, method in (("by records", client.read_log), ("by batches", client.read_log_batches)):
        reading = Reading(lives, who, follows=False, now=simulation.loop.now)
        records: list[Any] = []
        async for item in method(LOG, password=lives.password):
            records += [item] if isinstance(item, tuple) else list(item)
        for record in records:
            reading.read(record)
        reading.ended()
        found.append(records)
    simulation.history.require(found[0] == found[1], "EntryOrderMaintained", lambda: "two readings differ")
    return found[0]


async def check_election(simulation: Simulation, client: Client) -> None:
    """Check that a leader is elected, whatever those who died have left behind."""
    if "election" not in simulation.shared:
        return
    async with LeaderElection(client, LOG, b"judge") as election:
        if await shortly(ELECTED_WITHIN_S, election.gained()) is False:
            left = simulation.tree.children_at(f"elections/{LOG}/queue", simulation.tree.change_number)
            simulation.history.fail("Liveness", f"nobody is elected within {ELECTED_WITHIN_S} s: {left}")
        elif await election.leader() != b"judge":
            simulation.history.fail("LeadersHoldTheKey", f"the leader is {await election.leader()!r}")


CHECKERS.extend((check_lives, check_election))
