"""Roles around one log that call every method of its writers and readers, truncate it and delete it.

The setup `log_lives` has `tests.sim.checkers.log_lifecycle` check the log. The roles of
`tests.sim.workloads.log` can be used beside these.
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from client_aio import InvalidArgumentError, LogBatch
from client_aio.log.reader import LogReading
from metadata.errors import BookKeeperError, LogTruncatedError, NoSuchLedgerError, NoSuchLogError
from metadata.model.log import Position, Transaction
from tests.sim.checkers.log_handles import Hand, shortly, together
from tests.sim.checkers.log_lifecycle import LOG, LogLives, lives_of
from tests.sim.checkers.log_reads import Reading, check_absence, check_documented
from tests.sim.workloads.ledger import SETUPS, role

if TYPE_CHECKING:
    from client_aio import Client, LogWriter
    from client_aio.core.log_chain import LogCursor
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

_EPOCH_S = 1_800_000_000
_BATCHES_OF_QUERY = 3
_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)
"""What a role reads at the moment, for those parts of production code that know more of it."""


async def log_lives(simulation: Simulation) -> None:
    """Have the log checked in all its lives."""
    passwords = [actor.settings.get("quorums", {}).get("password", b"") for actor in simulation.plan.actors]
    lives = LogLives(simulation.history, lambda: simulation.loop.now, max(passwords, default=b""))
    simulation.shared["chains"] = simulation.shared["lives of the log"] = lives
    simulation.tree.watchers.append(lives.metadata_changed)


SETUPS["log_lives"] = log_lives


def _notice_beginnings() -> None:
    """Hear from each reading of a log when it has found where it starts, which nobody else can tell."""
    begun = LogReading._begun

    async def noted(self: LogReading) -> tuple[int | None, LogCursor]:
        found = await begun(self)
        reading = _READING.get()
        if reading is not None:
            reading.has_begun(asyncio.get_running_loop().time())
        return found

    vars_of: Any = LogReading
    vars_of._begun = noted


_notice_beginnings()


def _rng(simulation: Simulation, actor: Actor) -> random.Random:
    return random.Random(f"{simulation.plan.seed}/{actor.name}/{actor.role}")


# --- writers ---------------------------------------------------------------------------------------


@role
async def versatile_log_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Open the log, call all that its handle has, and all of it once more when it is over."""
    rng, number, former = _rng(simulation, actor), 0, list[Hand]()
    while not simulation.is_healed:
        number += 1
        await asyncio.sleep(actor.settings["pause"] * rng.random())
        log = await _open(simulation, actor, client, rng)
        if log is None:
            continue
        hand = Hand(simulation, log, f"{actor.name}.{number}", rng)
        simulation.history.note(hand.who, "opened the log with ledger", log.ledger_id)
        if rng.random() < 0.2:
            await _use_and_leave(hand, actor)
        else:
            await _use(hand, actor)
        if log.failure is not None or hand.is_over:
            await hand.call_everything()
        if rng.random() < 0.8 or len(former) > 1:
            await hand.abort()
            await hand.call_everything()
        else:
            former.append(hand)  # comes back to it, when it has been displaced
        if former and rng.random() < 0.5:
            await _use(former.pop(0), actor)


async def _open(simulation: Simulation, actor: Actor, client: Client, rng: random.Random) -> LogWriter | None:
    since, lives, settings = simulation.loop.now, lives_of(simulation), actor.settings
    creates = rng.random() < 0.8
    opening = client.open_log(
        LOG, create=creates, roll_entries=settings["roll_entries"],
        roll_bytes=settings["roll_bytes"], roll_age_s=settings["roll_age_s"],
        custom_metadata={actor.name: b"was here"}, **settings["quorums"],
    )  # fmt: skip
    try:
        log: LogWriter | bool = await shortly(rng.choice((0.05, 0.3, 8.0, 8.0)), opening)
    except BookKeeperError as error:
        simulation.history.note(actor.name, "could not open the log:", repr(error))
        check_documented(lives, actor.name, error)
        check_absence(lives, actor.name, since, error)
        return None
    return None if isinstance(log, bool) else log


async def _use_and_leave(hand: Hand, actor: Actor) -> None:
    """Use it as a context manager, left normally or by an exception."""
    try:
        async with hand.log:
            await _use(hand, actor)
            if hand.rng.random() < 0.3:
                raise asyncio.InvalidStateError("of the application's own")
    except (BookKeeperError, asyncio.InvalidStateError) as error:
        hand.simulation.history.note(hand.who, "left the log:", repr(error))
    hand.is_over = True


async def _use(hand: Hand, actor: Actor) -> None:
    """Call this and that, until the handle is over or all steps are done."""
    rng, settings = hand.rng, actor.settings
    try:
        for _ in range(rng.randint(1, settings["steps"])):
            await _step(hand, settings["burst"], settings["bytes"])
            hand.look()
            if hand.log.is_closed and rng.random() < 0.5:
                break
            await asyncio.sleep(settings["gap"] * rng.random())
    except BookKeeperError as error:
        hand.simulation.history.note(hand.who, "writing ended:", repr(error))
        check_documented(hand.lives, f"{hand.who}, {hand.doing}", error)
    hand.look()


async def _step(hand: Hand, burst: int, size: int) -> None:
    rng = hand.rng
    what = rng.choices(
        ("append", "flush", "drain", "roll", "rolls", "rolling", "cancel", "close", "closes", "cut", "abort"),
        (30, 6, 4, 4, 2, 4, 2, 1.5, 1, 5, 0.3),
    )[0]
    hand.doing = what
    match what:
        case "append":
            hand.append(rng.randint(1, burst), size)
        case "flush":
            await hand.flush()
        case "drain":
            await hand.drain()
        case "roll":
            await hand.roll()
        case "rolls":
            await together(hand.roll(), hand.roll())
        case "rolling":
            await together(hand.roll(), _appending(hand, burst, size), hand.flush())
        case "cancel":
            hand.append(2, size)
            hand.cancel_one()
        case "close":
            hand.append(rng.randint(0, burst), size)
            await hand.close()
        case "closes":
            hand.append(rng.randint(0, burst), size)
            await together(hand.close(), _appending(hand, burst, size), hand.close(), hand.roll())
        case "cut":
            calls = (hand.flush, hand.drain, hand.roll, hand.roll, hand.close)
            await shortly(rng.choice((0.0, 0.002, 0.01, 0.1)), rng.choice(calls)())
        case "abort":
            await hand.abort()


async def _appending(hand: Hand, burst: int, size: int) -> None:
    """Append one by one, letting others go on in between."""
    for _ in range(hand.rng.randint(1, burst)):
        hand.append(1, size)
        await asyncio.sleep(hand.rng.choice((0.0, 0.0, 0.002)))


# --- cutting ---------------------------------------------------------------------------------------


@role
async def log_truncator(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Truncate at positions of any kind; writes nothing."""
    rng, lives = _rng(simulation, actor), lives_of(simulation)
    while not simulation.is_healed:
        await asyncio.sleep(actor.settings["rest"] * rng.random() * 2)
        life, since = lives.life, simulation.loop.now
        before = _any_position(lives, rng)
        kept = lives.end_of(before)
        try:
            text: Any = rng.choice((before, tuple(before), str(before)))
            truncating = client.truncate_log(LOG, text, password=lives.password)
            rows = await shortly(rng.choice((0.02, 0.2, 6.0, 6.0, 6.0)), truncating)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"truncating before {before}:", repr(error))
            check_documented(lives, f"{actor.name} truncating before {before}", error)
            check_absence(lives, actor.name, since, error)
            continue
        simulation.history.note(actor.name, f"truncated before {before}:", str(rows))
        if rows is False:
            continue
        left = [row for row in rows if lives.exists(row.ledger_id)]
        if left:
            lives.fail("CallsDoWhatTheySay", f"{actor.name} truncated; {left} exist")
        # Where nothing is listed any more, the log begins behind all that was.
        is_ahead = all(before > each.begins_at for each in lives.lives)
        if is_ahead and before.ledger_id > max(lives.life_of, default=0):
            lives.fail("CallsDoWhatTheySay", f"{actor.name} truncated before {before}, behind all ledgers")
        if life is not None and lives.life is life and kept is not None and life.begins_at < kept:
            lives.fail("CallsDoWhatTheySay", f"{actor.name} truncated before {before}: {life.begins_at}")


def _any_position(lives: LogLives, rng: random.Random) -> Position:
    life = lives.life
    if life is None or not life.rows:
        return Position(rng.randrange(30), 0)
    row = rng.choice(life.rows)
    kinds = [
        Position(row.id, 0), Position(row.id, 0), Position(life.rows[-1].id, 0),
        Position(row.id, rng.randrange(6)), Position(row.id, 1 << 40),
        Position(life.rows[-1].id, rng.randrange(20)),
        Position(life.rows[-1].id + rng.randint(1, 9), 0), Position(0, 0),
        Position(max(0, life.begins_at.ledger_id - rng.randrange(3)), 0),
        rng.choice(life.in_order) if life.in_order else Position(row.id, 1),
    ]  # fmt: skip
    return rng.choice(kinds)


# --- replacing -------------------------------------------------------------------------------------


@role
async def log_replacer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Add ledgers, or put them in the place of all there is, mostly by transactions."""
    rng, lives = _rng(simulation, actor), lives_of(simulation)
    for batch in range(actor.settings["batches"]):
        await asyncio.sleep(actor.settings["rest"] * rng.random() * 2)
        made = await _make_ledgers(simulation, actor, client, rng, batch)
        if made is None:
            continue
        for payload in made.values():
            lives.tried[payload] = actor.name
            lives.issued_at[payload] = simulation.loop.now
        query, number = f"{actor.name}.{batch // _BATCHES_OF_QUERY}", batch
        # A random source of its own: the schedules of seeds that are kept stay as they are.
        if random.Random(f"{simulation.plan.seed}/{actor.name}/stale/{batch}").random() < 0.2:
            number = max(batch - 1, batch // _BATCHES_OF_QUERY * _BATCHES_OF_QUERY)  # a restored checkpoint
        adding = _Adding(
            simulation, actor.name, client, rng, made, replace=rng.random() < actor.settings["replaces"],
            transaction=Transaction(query, number, actor.name + f".{batch}") if rng.random() < 0.8 else None,
        )  # fmt: skip
        await adding.run()


async def _make_ledgers(
    simulation: Simulation, actor: Actor, client: Client, rng: random.Random, batch: int
) -> dict[int, bytes] | None:
    """Make CLOSED ledgers of a record each; sometimes none."""
    made: dict[int, bytes] = {}
    try:
        for number in range(rng.choice((0, 1, 2, 2, 3, 9))):
            payload = f"{actor.name}.{batch}.{number}".encode()
            async with client.create_ledger(**actor.settings["quorums"]) as ledger:
                simulation.history.ignore(ledger.ledger_id)  # checked by its records, as a log's
                await ledger.add_entry(payload)
            made[ledger.ledger_id] = payload
    except BookKeeperError as error:
        simulation.history.note(actor.name, "making ledgers to add:", repr(error))
        return None
    ids = list(made)
    rng.shuffle(ids)
    return {each: made[each] for each in ids}


class _Adding:
    """An addition, tried until it is known to be done if it has a transaction."""

    def __init__(
        self,
        simulation: Simulation,
        who: str,
        client: Client,
        rng: random.Random,
        made: dict[int, bytes],
        *,
        replace: bool,
        transaction: Transaction | None,
    ) -> None:
        self.simulation, self.who, self.client, self.rng, self.made = simulation, who, client, rng, made
        self.replace, self.transaction = replace, transaction
        self.lives = lives_of(simulation)

    async def run(self) -> None:
        """Try, and when it is done try again, now and then."""
        is_done = False
        for _ in range(12):
            life = self.lives.life
            was_recorded = self._is_recorded()
            call = self.client.add_to_log(
                LOG, list(self.made), replace=self.replace,
                transaction=None if self.transaction is None else self.transaction[:2],
                content="" if self.transaction is None else self.transaction.content,
                password=self.lives.password,
            )  # fmt: skip
            try:
                added = await shortly(self.rng.choice((0.02, 0.2, 8.0, 8.0, 8.0)), call)
            except BookKeeperError as error:
                # A log that is being deleted has forgotten its transactions; its ledgers go one by one.
                is_kept = life is not None and self.lives.life is life and life.condemned_at is None
                self._failed(error, was_recorded=was_recorded and is_kept)
                if isinstance(error, InvalidArgumentError | NoSuchLedgerError):
                    return
                added = False
            if added is not False:
                note = "was there already" if added.repeated else "is added"
                self.simulation.history.note(self.who, note, list(self.made), self.transaction, self.replace)
                if was_recorded and self.lives.life is life and not added.repeated:
                    self.lives.fail("TransactionsOnce", f"{self.who}: {self.transaction} is done again")
                if not added.repeated or life is self.lives.life:
                    self._check_listed(added.repeated)
                if is_done or self.rng.random() < 0.6:
                    return
                is_done = True
            if self.transaction is None:
                return
            await asyncio.sleep(0.3 * self.rng.random())

    def _is_recorded(self) -> bool:
        life = self.lives.life
        if self.transaction is None or life is None or life.head is None or life.condemned_at is not None:
            return False
        return life.head.last_transaction(self.transaction.query_id) == self.transaction

    def _failed(self, error: BookKeeperError, *, was_recorded: bool) -> None:
        self.simulation.history.note(self.who, f"adding {list(self.made)}:", repr(error))
        check_documented(self.lives, f"{self.who} adding", error, (NoSuchLedgerError,))
        if isinstance(error, InvalidArgumentError | NoSuchLedgerError) and was_recorded:
            text = f"{self.who}: {self.transaction} had been recorded, and is {error!r}"
            self.lives.fail("TransactionsOnce", text)

    def _check_listed(self, repeated: bool) -> None:
        lives = self.lives
        rows = {row.ledger_id: row for life in lives.lives for row in life.listed.values()}
        missing = [each for each in self.made if each not in rows]
        if missing:
            what = "repeated" if repeated else "added"
            lives.fail("CallsDoWhatTheySay", f"{self.who}: {missing} are {what}, and were never listed")
            return
        for ledger_id, payload in self.made.items():
            lives.acked(self.who, payload, Position(rows[ledger_id].id, 0))


# --- readers ---------------------------------------------------------------------------------------


@role
async def log_batch_follower(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Read and follow from anywhere, by records and by batches; stop in the middle, and go on from there."""
    rng, lives = _rng(simulation, actor), lives_of(simulation)
    at: Position | None = None
    while True:
        start, asked, since = _any_start(lives, rng, at, simulation.loop.now)
        follows = rng.random() < 0.6
        reading = Reading(
            lives, actor.name, start=start, since=since, now=simulation.loop.now, follows=follows
        )
        simulation.history.note(actor.name, "follows from" if follows else "reads from", str(asked))
        try:
            await _read_some(client, rng, reading, asked, follows=follows, patience_s=2.0)
        except BookKeeperError as error:
            simulation.history.note(actor.name, f"reading behind {reading.behind}:", repr(error))
            reading.broke_off(error)
            if isinstance(error, LogTruncatedError | NoSuchLogError):
                reading.behind = at = None
        if start is not None or since is None or reading.behind is not None:
            at = reading.behind or at
        await asyncio.sleep(0.3 * rng.random())


def _any_start(
    lives: LogLives, rng: random.Random, at: Position | None, now: float
) -> tuple[Position | None, Any, float | None]:
    """Choose a start: the position that it is, what to ask for, and from when on nothing is to be missed."""
    life, kind = lives.life, rng.random()
    if at is not None and kind < 0.6:
        return at, rng.choice((at, str(at), tuple(at))), None
    if life is not None and life.in_order and kind < 0.7:
        any_one = rng.choice(life.in_order)
        return any_one, any_one, None
    if kind < 0.78:
        return None, "end", math.inf
    if kind < 0.86:
        since = max(0.0, now - 4 * rng.random())
        return None, _EPOCH_S + since, since
    return None, None, None


async def _read_some(
    client: Client, rng: random.Random, reading: Reading, asked: Any, *, follows: bool, patience_s: float
) -> None:
    """Read on, for a number of times or a while; then stop in the middle."""
    method = rng.choice((client.read_log, client.read_log_batches))
    _READING.set(reading)
    async with aclosing(method(LOG, asked, follow=follows, password=reading.password)) as items:
        for _ in range(rng.choice((1, 3, 20, 1000))):
            item = await shortly(patience_s * rng.choice((0.05, 1.0, 1.0)), anext(items, None))
            if item is False:
                return
            if item is None:
                reading.ended()
                return
            if isinstance(item, LogBatch):
                _check_batch(reading, item)
            else:
                reading.read(item)


def _check_batch(reading: Reading, batch: LogBatch) -> None:
    records = list(batch)
    offsets = batch.offsets
    assert len(records) == len(batch) == batch.last_entry_id - batch.first_entry_id + 1
    assert (records[0].position, records[-1].position) == (batch.first_position, batch.last_position)
    for number, record in enumerate(records):
        assert bytes(batch.buffer[offsets[number] : offsets[number + 1]]) == record.data
        reading.read(record)
