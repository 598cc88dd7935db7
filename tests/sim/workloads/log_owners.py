"""Roles around ledgers that two logs want: adders, sweepers with wrong clocks, deleters, readers of gaps.

Owns as well their record and its invariants. The names:

- OneLogPerLedger: no ledger is listed by two logs at once.
- ListedLedgersAreOwned: the metadata of a listed ledger name the log that lists it.
- ListedLedgersExist: no listed ledger is deleted, unless somebody has forced that.
- YoungLedgersAreKept: a sweep leaves alone what was made a moment ago, whatever any client's clock says.
- GapsAreLosses: a reader that skips gaps is told of one only where a ledger has been deleted.
- AllAckedRecordsAreReadable: after healing, each log's reader finds every record of the ledgers listed.
- NothingIsLost: no ledger that an application made is deleted but by a log that listed it, or by hand.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING

from client_aio import LogGap
from client_aio.core.log_chain import TAG, owner_of
from metadata.access.logs import KEY_LOGS
from metadata.errors import BookKeeperError, LedgerListedError, NoSuchLedgerError
from metadata.ids import KEY_LEDGERS, ledger_id_of
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogHead
from tests.sim.checkers.after_healing import CHECKERS, RECOVERY_BOUND_S
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_aio import Client
    from metadata.store import Version
    from tests.sim.checkers.invariants import History
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

LOGS = ("one", "two")
DAYS_S = 2 * 86400.0


class Owners:
    """The record of one run: which log lists which ledger, and what may be deleted."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.pool: dict[int, bytes] = {}  # closed ledgers that applications made: id → record
        self.young: set[int] = set()
        self.forced: set[int] = set()  # by hand, whether a log lists it or not
        self.by_hand: set[int] = set()  # unless a log lists it
        self.deleted: set[int] = set()
        self.rows: dict[str, list[int]] = {name: [] for name in LOGS}
        self.ever_listed: set[int] = set()
        self._owner: dict[int, str | None] = {}

    @classmethod
    def of(cls, simulation: Simulation) -> Owners:
        """Return the run's record."""
        if "owners" not in simulation.shared:
            owners = simulation.shared["owners"] = cls(simulation.history)
            simulation.tree.watchers.append(owners.changed)
        found = simulation.shared["owners"]
        assert isinstance(found, cls)
        return found

    def unlisted(self) -> list[int]:
        """Return the ledgers made to be added that are there and in no log."""
        gone = self.deleted.union(*self.rows.values())
        return sorted(each for each in self.pool if each not in gone)

    def changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Follow the metadata store."""
        if key.startswith(KEY_LEDGERS + "/") and key.count("/") == 5:
            self._ledger_changed(ledger_id_of(key), value)
        elif key.startswith(KEY_LOGS + "/") and value is not None:
            name = key.rpartition("/")[2]
            rows = [row.ledger_id for row in LogHead.from_json(value).newest]
            self._history.note("meta", f"log {name}:", rows)
            self.rows[name] = rows
            self.ever_listed.update(rows)
            for other in LOGS:
                both = set(rows) & set(self.rows[other]) if other != name else set()
                self._require(not both, "OneLogPerLedger", f"{name} and {other} list {both}")
            self._check_listed(name)

    def _ledger_changed(self, ledger_id: int, value: bytes | None) -> None:
        listed = [name for name in LOGS if ledger_id in self.rows[name]]
        if value is not None:
            metadata = LedgerMetadata.from_json(value)
            self._owner[ledger_id] = owner_of(metadata)
            if TAG in metadata.custom:
                self._history.ignore(ledger_id)
            for name in listed:
                self._check_listed(name)
            return
        self.deleted.add(ledger_id)
        is_forced = ledger_id in self.forced
        self._require(not listed or is_forced, "ListedLedgersExist", f"{ledger_id} is gone from {listed}")
        self._require(ledger_id not in self.young, "YoungLedgersAreKept", f"{ledger_id} is being written")
        may_go = is_forced or ledger_id in self.by_hand or ledger_id in self.ever_listed
        self._require(
            may_go or ledger_id not in self.pool,
            "NothingIsLost",
            f"{ledger_id} was in no log, and is deleted",
        )

    def _check_listed(self, name: str) -> None:
        for ledger_id in self.rows[name]:
            owner = self._owner.get(ledger_id)
            is_there = ledger_id not in self.deleted
            if is_there and ledger_id in self._owner:
                self._require(
                    owner == name, "ListedLedgersAreOwned", f"{name} lists {ledger_id}, which is {owner}'s"
                )

    def _require(self, condition: bool, name: str, text: str) -> None:
        if not condition:
            self._history.fail(name, text)


def _rng(simulation: Simulation, actor: Actor) -> random.Random:
    return random.Random(f"{simulation.plan.seed}/{actor.name}/{actor.role}")


def _set_clock(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Set the client's wall clock off by days."""
    before: Callable[[], int] = client._context.now_ms
    skew_ms = int(actor.settings.get("skew_s", 0.0) * 1000)
    client._context.now_ms = lambda: before() + skew_ms


@role
async def shared_adder(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Make closed ledgers, and add any of all clients' ledgers to any of the logs, sometimes cut short."""
    rng, owners = _rng(simulation, actor), Owners.of(simulation)
    _set_clock(simulation, actor, client)
    number = 0
    while not simulation.is_healed:
        await asyncio.sleep(actor.settings["rest"] * rng.random())
        # Few at a time, so that a sweeper is soon through with them, and clients want the same ones.
        if len(owners.unlisted()) < 3:
            number += 1
            record = f"{actor.name}.{number}".encode()
            try:
                async with client.create_ledger(**actor.settings["quorums"]) as ledger:
                    simulation.history.ignore(ledger.ledger_id)
                    await ledger.add_entry(record)
            except BookKeeperError as error:
                simulation.history.note(actor.name, "making a ledger:", repr(error))
                continue
            owners.pool[ledger.ledger_id] = record
        ledger_id = rng.choice(owners.unlisted() or sorted(owners.pool))
        if rng.random() < 0.2:
            ledger_id = rng.choice(sorted(owners.pool)[-6:])
        name = rng.choice(LOGS)
        adding = asyncio.ensure_future(client.add_to_log(name, [ledger_id]))
        await asyncio.wait([adding], timeout=rng.choice((0.02, 0.1, 5.0, 5.0)))
        adding.cancel()
        try:
            await adding
            simulation.history.note(actor.name, f"added {ledger_id} to {name}")
        except (BookKeeperError, asyncio.CancelledError) as error:
            simulation.history.note(actor.name, f"adding {ledger_id} to {name}:", repr(error))


@role
async def young_maker(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Make ledgers for a log as its writer does, write to them for a while, and never list them."""
    rng, owners = _rng(simulation, actor), Owners.of(simulation)
    _set_clock(simulation, actor, client)
    while not simulation.is_healed:
        try:
            ledger = await client.create_ledger(
                custom_metadata={TAG: rng.choice(LOGS).encode()}, **actor.settings["quorums"]
            )
        except BookKeeperError as error:
            simulation.history.note(actor.name, "making a ledger:", repr(error))
            await asyncio.sleep(0.2)
            continue
        if not simulation.is_healed:  # The judge's sweep has no regard to age.
            owners.young.add(ledger.ledger_id)
        try:
            for _ in range(rng.randint(1, 5)):
                await ledger.add_entry(b"x")
                await asyncio.sleep(actor.settings["rest"] * rng.random())
        except BookKeeperError as error:
            simulation.history.note(actor.name, "writing a ledger:", repr(error))
        finally:
            owners.young.discard(ledger.ledger_id)
            await ledger.abort()


@role
async def owner_sweeper(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Sweep what is an hour old, by a clock that is off by days."""
    rng = _rng(simulation, actor)
    Owners.of(simulation)
    _set_clock(simulation, actor, client)
    while not simulation.is_healed:
        await asyncio.sleep(actor.settings["rest"] * rng.random())
        try:
            report = await client.sweep_log_orphans()
            simulation.history.note(actor.name, "swept", report.ledgers, report.failures)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "sweeping:", repr(error))


@role
async def owner_deleter(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Truncate the logs, and delete ledgers by hand, sometimes by force."""
    rng, owners = _rng(simulation, actor), Owners.of(simulation)
    while not simulation.is_healed:
        await asyncio.sleep(actor.settings["rest"] * rng.random() * 2)
        name = rng.choice(LOGS)
        try:
            match rng.choice(("truncate", "delete", "force")):
                case "truncate":
                    rows = (await client.log_metadata(name)).rows
                    if rows:
                        await client.truncate_log(name, (rng.choice(rows).id, 0))
                case "delete" if owners.pool:
                    ledger_id = rng.choice(sorted(owners.pool)[-6:])
                    owners.by_hand.add(ledger_id)
                    await client.delete_ledger(ledger_id)
                case "force" if owners.rows[name]:
                    ledger_id = rng.choice(owners.rows[name])
                    owners.forced.add(ledger_id)
                    await client.delete_ledger(ledger_id, force=True)
        except LedgerListedError as error:
            simulation.history.note(actor.name, "refused:", repr(error))
        except BookKeeperError as error:
            simulation.history.note(actor.name, "deleting:", repr(error))


@role
async def gap_reader(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Read a log to its end again and again, and over its gaps."""
    rng, owners = _rng(simulation, actor), Owners.of(simulation)
    while True:
        await asyncio.sleep(actor.settings["rest"] * rng.random())
        try:
            await _read(owners, simulation, client, rng.choice(LOGS), actor.name)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "reading ended:", repr(error))


async def _read(owners: Owners, simulation: Simulation, client: Client, name: str, who: str) -> list[bytes]:
    found: list[bytes] = []
    async with aclosing(client.read_log(name, on_gap="skip")) as records:
        async for each in records:
            if not isinstance(each, LogGap):
                found.append(bytes(each.data))
                continue
            is_loss = isinstance(each.error, NoSuchLedgerError) and each.error.ledger_id in owners.deleted
            simulation.history.require(
                is_loss, "GapsAreLosses", lambda gap=each: f"{who} was told of {gap!r} in {name}"
            )
    return found


async def check_owners(simulation: Simulation, client: Client) -> None:
    """Sweep, read both logs, and look at every ledger that was made to be added."""
    if "owners" not in simulation.shared:
        return
    owners, history, loop = Owners.of(simulation), simulation.history, simulation.loop
    give_up_at = loop.now + RECOVERY_BOUND_S
    owners.young.clear()
    problem = "nothing was tried"
    while loop.now < give_up_at:
        try:
            problem = await _what_is_wrong(owners, simulation, client)
        except BookKeeperError as error:
            problem = f"Liveness: {error!r}"
        if not problem:
            return
        await asyncio.sleep(0.5)  # A dead client's request may still have come in between.
    name, _, text = problem.partition(": ")
    history.fail(name, text)


async def _what_is_wrong(owners: Owners, simulation: Simulation, client: Client) -> str:
    report = await client.sweep_log_orphans(older_than_s=0)
    if report.failures:
        return f"Liveness: the sweep failed: {report.failures}"
    for name in LOGS:
        if not owners.rows[name]:
            continue
        records = await _read(owners, simulation, client, name, "judge")
        rows = [each for each in owners.rows[name] if each not in owners.deleted]
        wanted = [owners.pool[each] for each in rows if each in owners.pool]
        if records != wanted:
            return f"AllAckedRecordsAreReadable: {name} holds {wanted}, and {records} was read"
    for ledger_id in [each for each in owners.pool if each not in owners.deleted]:
        log = (await client.ledger_metadata(ledger_id)).log
        if log and ledger_id not in owners.rows[log]:
            return f"NothingLeftOver: {ledger_id} belongs to log {log}, which does not list it"
    return ""


CHECKERS.append(check_owners)
