"""Random histories of window and ensemble changes, against bookies that lose what was not forced.

A model keeps what each bookie has received and what of it is durable, and the fragments that the metadata
name. Requests keep their order, over connections that break, and answers do not: a receipt overtakes a force
before it. A bookie may come back under its id, with or without the process that received something; time-outs
leave the connection as it is. What must hold is checked after each event. tests/scenarios has the same with
recoveries beside the writer.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bookie_aio.wire.blocks import Block
from client_aio.core.add_window import ENTRY_OVERHEAD_BYTES, AddGroup, AddWindow, Send
from client_aio.core.ensemble_change import (
    Abandon,
    Copy,
    EnsembleChangeMachine,
    Find,
    GiveUp,
    Reseat,
    Step,
    Wait,
    Write,
)
from client_aio.core.quorum import indexes_of, write_set
from metadata.model.ledger import Fragment

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTS = 150
SPARES = 3
SHAPES = [(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 3, 3), (3, 2, 2), (4, 3, 2), (5, 3, 3), (6, 3, 2)]


class Force(NamedTuple):
    seat: int
    epoch: int
    last_entry: int


@dataclass(eq=False)
class Connection:
    """To one process of a bookie; requests keep their order."""

    bookie: Bookie
    requests: deque[Send | Force] = field(default_factory=deque)
    answers: list[Send | Force] = field(default_factory=list)
    is_broken: bool = False


@dataclass(eq=False)
class Bookie:
    durable: set[int] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    connection: Connection | None = None

    def connect(self) -> Connection:
        if self.connection is None or self.connection.is_broken:
            self.connection = Connection(self)
        return self.connection

    def break_off(self, *, crash: bool) -> None:
        if self.connection is not None:
            self.connection.is_broken = True
            if not crash:
                for request in self.connection.requests:  # still on their way: they arrive, unanswered
                    self.take(request, is_deferred=True)
            self.connection.requests.clear()
            self.connection.answers.clear()
        if crash:
            self.received.clear()

    def take(self, request: Send | Force, *, is_deferred: bool) -> None:
        if isinstance(request, Force):
            self.durable |= self.received
            return
        self.received |= entries_of(request)
        if not is_deferred:
            self.durable |= entries_of(request)


def entries_of(send: Send) -> set[int]:
    return set(Block.parse(memoryview(send.batch.block)).entry_ids)


def pairs(sends: list[Send]) -> list[tuple[int, int]]:
    return sorted((send.seat, entry_id) for send in sends for entry_id in entries_of(send))


class Model:
    """One history."""

    def __init__(self, seed: int, shape: tuple[int, int, int], mode: str) -> None:
        self.rng = random.Random(seed)
        self.ensemble, self.write, self.ack = shape
        self.is_deferred, self.is_guaranteed = mode == "deferred", mode == "guaranteed"
        self.bookies = {f"b{number}": Bookie() for number in range(self.ensemble + SPARES)}
        first = tuple(self.bookies)[: self.ensemble]
        self.window: AddWindow[int] = AddWindow(
            ledger_id=1, content_term=0, ensemble_size=self.ensemble, write_quorum=self.write,
            ack_quorum=self.ack, guaranteed_write_quorum=self.is_guaranteed, deferred_sync=self.is_deferred,
        )  # fmt: skip
        self.changer = EnsembleChangeMachine(self.window, Fragment(0, first), changes_max=1000)
        self.fragments = [Fragment(0, first)]
        self.seats = [self.bookies[name].connect() for name in first]
        self.step: Step = None
        self.sizes: list[int] = []
        self.reported = 0
        self.before = (-1, -1)
        self.is_over = False

    # --- what happens ---

    def run(self) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.add, 8), (self.arrive, 30), (self.answer, 30), (self.fail, 4), (self.take_step, 8),
            (self.force, 4 if self.is_deferred else 0),
        ]  # fmt: skip
        for _ in range(EVENTS):
            self.rng.choices([each for each, _ in kinds], [often for _, often in kinds])[0]()
            self.check()
            if self.is_over:
                return
        self.settle()

    def add(self) -> None:
        for _ in range(self.rng.randrange(1, 5)):
            self.sizes.append(self.rng.randrange(4))
            self.window.add(bytes(self.sizes[-1]), len(self.sizes) - 1)
        first = self.window.last_entry_sent + 1
        sends = self.window.flush()
        closed_to = self.window.failed | self.window.replacements
        assert pairs(sends) == self.owed(~closed_to, first)
        self.send(sends)

    def arrive(self) -> None:
        if connection := self.pick(lambda each: bool(each.requests)):
            request = connection.requests.popleft()
            connection.bookie.take(request, is_deferred=self.is_deferred)
            connection.answers.append(request)

    def answer(self) -> None:
        if connection := self.pick(lambda each: bool(each.answers)):
            answer = connection.answers.pop(self.rng.randrange(len(connection.answers)))
            if isinstance(answer, Force):
                self.report(self.window.forced(*answer))
            else:
                self.report(self.window.acknowledged(answer))

    def fail(self) -> None:
        seat = self.rng.randrange(self.ensemble)
        connection = self.seats[seat]
        how = self.rng.randrange(3)  # time-out, lost connection, crash
        if how and not connection.is_broken:
            connection.bookie.break_off(crash=how == 2)
        if self.window.fail(seat, self.window.epoch(seat)) and self.step is None:
            self.step = self.changer.next()

    def force(self) -> None:
        for seat, connection in enumerate(self.seats):
            if not self.window.failed >> seat & 1 and not connection.is_broken:
                connection.requests.append(Force(seat, self.window.epoch(seat), self.window.last_entry_sent))

    def take_step(self, *, may_fail: bool = True) -> None:
        match self.step:
            case Find(seats):
                kept = {name for at, name in enumerate(self.changer.target) if not seats >> at & 1}
                free = [name for name in self.bookies if name not in kept]
                if may_fail and self.rng.random() < 0.1:
                    self.step = self.changer.not_found()
                    return
                found = list(self.changer.target)
                lost = list(indexes_of(seats))
                for at, name in zip(lost, self.rng.sample(free, len(lost)), strict=True):
                    found[at] = found[at] if self.rng.random() < 0.2 and found[at] in free else name
                if len(set(found)) == len(found):
                    self.step = self.changer.found(tuple(found))
                    if isinstance(self.step, Copy):
                        self.copy(self.step)
            case Copy():
                if not self.window.awaits_copies:
                    self.step = self.changer.copied()
            case Abandon():
                self.abandon()
                self.step = self.changer.abandoned()
            case Wait():
                self.step = self.changer.next()
            case Write(change):
                fragment = Fragment(change.first_entry, change.bookies)
                if self.fragments[-1].first_entry == change.first_entry:
                    self.fragments.pop()
                self.fragments.append(fragment)
                self.step = self.changer.written()
            case Reseat(bookies, seats):
                self.reseat(bookies, seats)
                self.step = self.changer.reseated()
            case GiveUp():
                waiting = self.window.abort().tokens()
                assert waiting == list(range(self.reported, len(self.sizes)))
                self.is_over = True

    def copy(self, step: Copy) -> None:
        for seat in indexes_of(step.seats):
            self.seats[seat] = self.bookies[step.bookies[seat]].connect()
        sends = self.window.seat_replacements(step.seats)
        assert pairs(sends) == self.owed(step.seats, self.window.lafr + 1, self.window.lac)
        self.send(sends)

    def abandon(self) -> None:
        named = self.changer.fragment.bookies
        for seat in indexes_of(self.window.replacements):
            self.seats[seat] = self.bookies[named[seat]].connect()
        self.window.abandon_change()
        assert self.changer.fragment == self.fragments[-1]
        self.report(self.window.advance())

    def reseat(self, bookies: tuple[str, ...], replaced: int) -> None:
        replacements = self.window.replacements
        for seat in indexes_of(replaced & ~replacements):
            self.seats[seat] = self.bookies[bookies[seat]].connect()
        sends = self.window.commit_change(replaced)
        assert pairs(sends) == self.owed(replaced & ~self.window.failed, self.window.lac + 1)
        self.send(sends)
        self.report(self.window.advance())

    def send(self, sends: list[Send]) -> None:
        for send in sends:
            connection = self.seats[send.seat]
            if not connection.is_broken:
                connection.requests.append(send)
            elif self.window.fail(send.seat, send.epoch) and self.step is None:
                self.step = self.changer.next()

    def settle(self) -> None:
        """No faults any more: all that was added is acknowledged."""
        for _ in range(20_000):
            if self.window.is_idle and self.step is None:
                return
            for happen in (self.arrive, self.answer, lambda: self.take_step(may_fail=False)):
                happen()
                self.check()
            if self.is_deferred and not any(each.requests or each.answers for each in self.connections()):
                self.force()
            for seat, connection in enumerate(self.seats):
                if connection.is_broken and self.window.fail(seat, self.window.epoch(seat)):
                    self.step = self.step or self.changer.next()
            if self.is_over:
                return
        raise AssertionError("what was added is never acknowledged")

    # --- what must hold ---

    def report(self, turns: list[AddGroup[int]]) -> None:
        for turn in turns:
            assert turn.tokens == list(range(self.reported, self.reported + len(turn.tokens)))
            self.reported += len(turn.tokens)

    def check(self) -> None:
        window = self.window
        if self.is_over:
            return
        lafr = window.lafr if self.is_guaranteed else -1
        assert lafr <= window.lac < self.reported
        if window.is_frozen:
            assert (window.lac, lafr) == self.before
        assert (window.lac, lafr) >= self.before
        assert lafr >= self.before[1]
        self.before = (window.lac, lafr)
        for entry_id in range(window.lac + 1):
            fragment = next(each for each in reversed(self.fragments) if each.first_entry <= entry_id)
            names = [fragment.bookies[seat] for seat in self.write_set(entry_id)]
            holders = [name for name in names if entry_id in self.bookies[name].durable]
            assert len(holders) >= (self.write if entry_id <= lafr else self.ack), (entry_id, names, holders)
        released = (lafr if self.is_guaranteed else window.lac) + 1
        held = sum(self.sizes[released:]) + ENTRY_OVERHEAD_BYTES * (len(self.sizes) - released)
        assert window.bytes_held == held
        assert window.length_confirmed == sum(self.sizes[: window.lac + 1])
        assert window.is_idle == (released == len(self.sizes))

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        return write_set(entry_id % self.ensemble, self.ensemble, self.write)

    def owed(self, seats: int, first: int, last: int | None = None) -> list[tuple[int, int]]:
        """Return which entries seats of a mask owe of first to last, by default the last one sent."""
        ids = range(first, (self.window.last_entry_sent if last is None else last) + 1)
        return sorted((seat, each) for each in ids for seat in self.write_set(each) if seats >> seat & 1)

    def connections(self) -> list[Connection]:
        return [each.connection for each in self.bookies.values() if each.connection is not None]

    def pick(self, is_fit: Callable[[Connection], bool]) -> Connection | None:
        fit = [each for each in self.connections() if is_fit(each)]
        return self.rng.choice(fit) if fit else None


@pytest.mark.parametrize("mode", ["plain", "guaranteed", "deferred"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(SHAPES))
def test_whatever_fails_what_is_acknowledged_is_where_the_metadata_say(
    mode: str, seed: int, shape: tuple[int, int, int]
) -> None:
    Model(seed, shape, mode).run()
