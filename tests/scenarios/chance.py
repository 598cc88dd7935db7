"""Scenarios that nobody wrote: random events, with what must always hold checked after each.

Everything that is legal may happen: messages overtake one another on different ways and are lost, bookies
fail and come back, lose entries and know it, recoveries come and go and run side by side, answers of the
metadata store get lost. What came of a seed is a scenario's text, and can be kept as a file.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from client_aio.core.ensemble_change import Find, Wait
from client_aio.core.quorum import indexes_of
from tests.scenarios.clients import Client, Writer
from tests.scenarios.recovering import Recovery
from tests.scenarios.scene import Scene
from tests.scenarios.script import INDENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.scenarios.messages import Message

BOOKIES_SPARE = 3
EVENTS = 160
ENTRIES_MAX = 14


class Chance:
    """One random scenario."""

    def __init__(self, seed: int, shape: tuple[int, int, int], *, guaranteed: bool) -> None:
        self.rng = random.Random(seed)
        self.scene = Scene()
        self.lines: list[str] = []
        self.recoveries = 0
        self._kinds: list[tuple[Callable[[], None], float]] = [
            (self._deliver, 40),
            (self._answer, 12),
            (self._add, 8),
            (self._fail, 3),
            (self._drop, 2),
            (self._retry, 1),
            (self._ask, 1),
            (self._recover, 0.7),
            (self._close, 0.6),
            (self._lose, 0.3),
            (self._die, 0.3),
        ]
        self.bookies = [f"b{number}" for number in range(1, shape[0] + BOOKIES_SPARE + 1)]
        option = " guaranteed" if guaranteed else ""
        first = " ".join(self.bookies[: shape[0]])
        self.do(f"ledger E={shape[0]} Qw={shape[1]} Qa={shape[2]}{option} on {first}")

    @property
    def text(self) -> str:
        """Return what has happened, as a scenario."""
        return "\n".join(self.lines)

    def do(self, event: str) -> None:
        """Let something happen; raises AssertionError where an invariant breaks."""
        self.lines.append(event)
        effects = self.scene.do(event)
        self.lines += [INDENT + effect for effect in effects]
        assert not any(effect.startswith("!!") for effect in effects), self.text

    # --- the random part ---

    def run(self) -> None:
        """Let things happen, then let a last recovery come to its end, and look at what is there."""
        for _ in range(EVENTS):
            happen = self.rng.choices([each for each, _ in self._kinds], [often for _, often in self._kinds])
            happen[0]()
        self._settle()

    def _deliverable(self) -> list[Message]:
        """Return what may arrive next: what one client asks one bookie stays in order."""
        seen: set[tuple[str, str, int]] = set()
        found = []
        for message in self.scene.in_flight:
            way = (message.source, message.target, message.request)
            if message.source.startswith("b") or way not in seen:
                found.append(message)
            seen.add(way)
        return found

    def _deliver(self) -> None:
        messages = self._deliverable()
        if messages:
            message = self.rng.choice(messages)
            self.do(f"{message.source} → {message.target}: {message.text}")

    def _drop(self) -> None:
        messages = self.scene.in_flight
        if messages:
            message = self.rng.choice(messages)
            self.do(f"{message.source} ✗ {message.target}: {message.text}")

    def _add(self) -> None:
        writer = self._writer()
        first = writer.window.last_add_pushed + 1
        if not writer.is_over and not writer.is_closing and first < ENTRIES_MAX:
            last = first + self.rng.choice([0, 0, 0, 2])
            self.do(f"w adds {first}..{last}" if last > first else f"w adds {first}")

    def _fail(self) -> None:
        client = self._client()
        seats = [name for name in client.seats if not self._is_gone(client, name)]
        if seats and not (isinstance(client, Recovery) and not client.ensemble):
            self.do(f"{self.rng.choice(seats)} fails at {client.name}")

    def _is_gone(self, client: Client, name: str) -> bool:
        return isinstance(client, Recovery) and name in client.unreachable

    def _answer(self, *, may_fail: bool = True) -> None:
        for client in self._clients():
            if isinstance(client.step, Find):
                self._find(client, client.step, may_fail=may_fail)
            elif isinstance(client.step, Wait):
                self.do(f"{client.name} looks again")

    def _find(self, client: Client, step: Find, *, may_fail: bool) -> None:
        assert client.changer is not None
        seats = list(indexes_of(step.seats))
        kept = {name for seat, name in enumerate(client.changer.target) if seat not in seats}
        free = [name for name in self.bookies if name not in kept and not self._is_gone(client, name)]
        if len(free) < len(seats) or (may_fail and self.rng.random() < 0.2):
            self.do(f"{client.name} finds nobody")
            return
        found = self.rng.sample(free, len(seats))
        self.do(f"{client.name} finds {' '.join(found)}")

    def _retry(self) -> None:
        client = self._client()
        if client.update is not None:
            self.do(f"{client.name} hears nothing from m")

    def _recover(self) -> None:
        self.recoveries += 1
        self.do(f"r{self.recoveries} takes over")

    def _lose(self) -> None:
        bookie = self.scene.bookie(self.rng.choice(self.bookies))
        if bookie.kept:
            self.do(f"{bookie.name} loses {self.rng.choice(sorted(bookie.kept))}")

    def _ask(self) -> None:
        self.do(f"t asks {self.rng.choice(self.bookies)}")

    def _close(self) -> None:
        writer = self._writer()
        if writer.window.is_idle and writer.update is None and not writer.is_over and not writer.is_closing:
            self.do("w closes")

    def _die(self) -> None:
        self.do(f"{self._client().name} dies")

    # --- the end ---

    def _settle(self) -> None:
        """No faults any more: a recovery of its own comes to an end, unless too much has been lost."""
        for client in self._clients():
            self.do(f"{client.name} dies")
        while self.scene.in_flight:
            message = self.scene.in_flight[0]
            self.do(f"{message.source} ✗ {message.target}: {message.text}")
        self._recover()
        while self._clients():
            assert self._deliverable() or any(
                isinstance(each.step, (Find, Wait)) for each in self._clients()
            ), f"nothing is under way:\n{self.text}"
            self._deliver()
            self._answer(may_fail=False)
        metadata = self.scene.metadata
        if any(self.scene.bookie(name).lost for name in self.bookies):
            return
        assert metadata.last_entry is not None, f"the ledger cannot be closed:\n{self.text}"
        copies = metadata.write_quorum if metadata.guaranteed_write_quorum else metadata.ack_quorum
        for entry_id in range(metadata.last_entry + 1):
            names = self.scene.keepers_of(entry_id)
            payload = f"{entry_id} of w".encode()
            holders = [name for name in names if self.scene.bookie(name).has_stored(entry_id, payload)]
            assert len(holders) >= copies, f"entry {entry_id} is on {holders} of {names}:\n{self.text}"

    def _clients(self) -> list[Client]:
        """Return the clients that are not over."""
        return [each for each in self.scene.actors.values() if isinstance(each, Client) and not each.is_over]

    def _client(self) -> Client:
        return self.rng.choice(self._clients() or [self._writer()])

    def _writer(self) -> Writer:
        writer = self.scene.actors["w"]
        assert isinstance(writer, Writer)
        return writer
