"""Duels: processes fight for one thing that is written by one at a time, and a reader watches.

Owns the processes, their faults, and what is checked of every kind of duel: every acknowledged record is read
exactly once and at its position, the records of one life of one duellist in the order in which they were
made, a position has one value, and nobody's record twice. What is fought for is its callers' business
(`benchmarks.duel_unbounded`).

A duellist reports on standard output, a line each: `took LABEL` when it has taken over, `sent N` before it
adds its record number N, `done N POSITION` when that is acknowledged. It is killed (SIGKILL) and started
again, and stopped (SIGSTOP) for a while, at random.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import client_aio
from benchmarks.processes import Child, start_module
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

IN_FLIGHT = 32
BOOKIES = 4
REACH_S = 60.0
STOPPED_S = (0.1, 2.0)
BETWEEN_FAULTS_S = (0.2, 1.0)
BETWEEN_TAKEOVERS_S = (0.2, 2.0)


class Writer(Protocol):
    """What a duellist fights for."""

    async def close(self) -> object: ...

    async def abort(self) -> None: ...


@dataclass
class Kind:
    """What is fought for.

    Attributes:
        module: what to start a duellist with: `python -m MODULE duellist URI TAG`.
        read: gives positions, as text, and records from the beginning on, and goes on for ever.
        finish: takes over for the last time, adds a record, and gives its position.
    """

    module: str
    read: Callable[[client_aio.Client], AsyncGenerator[tuple[str, bytes], None]]
    finish: Callable[[client_aio.Client, bytes], Awaitable[str]]


# --- a duellist ---


async def fight(
    uri: str,
    tag: str,
    take_over: Callable[[client_aio.Client], Awaitable[Writer]],
    label: Callable[[Any], object],
    add: Callable[[Any, bytes], asyncio.Future[Any]],
) -> None:
    """Take over, write until somebody else does, wait a while, and again; until killed."""
    rng, number = random.Random(tag), 0

    def report(*words: object) -> None:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()

    async with client_aio.connect(uri, connect_timeout_s=1, read_timeout_s=2, add_timeout_s=2) as client:
        while True:
            await asyncio.sleep(rng.uniform(*BETWEEN_TAKEOVERS_S))
            try:
                writer = await take_over(client)
            except client_aio.BookKeeperError as error:
                report("failed", type(error).__name__)
                continue
            report("took", label(writer))
            window: set[asyncio.Future[Any]] = set()
            with contextlib.suppress(client_aio.BookKeeperError):
                while True:
                    report("sent", number)
                    future = add(writer, b"%s %d" % (tag.encode(), number))
                    future.add_done_callback(lambda done, number=number: _tell(report, done, number))
                    window.add(future)
                    number += 1
                    if len(window) >= IN_FLIGHT or rng.random() < 0.1:
                        done, window = await asyncio.wait(window, return_when=asyncio.FIRST_COMPLETED)
                        for each in done:
                            each.result()
            await writer.abort()


def _tell(report: Callable[..., None], done: asyncio.Future[Any], number: int) -> None:
    if not done.cancelled() and done.exception() is None:
        report("done", number, done.result())


# --- the parent ---


@dataclass
class Tally:
    """What was reported and seen."""

    takeovers: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    stops: int = 0
    sent: set[bytes] = field(default_factory=set)
    acknowledged: dict[bytes, str] = field(default_factory=dict)
    read: dict[str, bytes] = field(default_factory=dict)
    """By position, in the order in which they were read."""
    wrong: list[str] = field(default_factory=list)

    def note(self, tag: str, line: str) -> None:
        """Take a line of a duellist's."""
        verb, *words = line.split(" ")
        if verb == "took":
            self.takeovers += 1
        elif verb == "failed":
            self.failed[words[0]] += 1
        elif verb == "sent":
            self.sent.add(f"{tag} {words[0]}".encode())
        elif verb == "done":
            self.acknowledged[f"{tag} {words[0]}".encode()] = " ".join(words[1:])

    def see(self, position: str, data: bytes) -> None:
        """Take what the reader has read."""
        if position in self.read:
            self.wrong.append(f"{position} was read twice")
        self.read[position] = data

    def check(self) -> None:
        """Look for everything that must not be."""
        places: dict[bytes, str] = {}
        last: dict[bytes, int] = {}
        for position, data in self.read.items():
            if data in places:
                self.wrong.append(f"{data!r} is at {places[data]} and at {position}")
            places[data] = position
            tag, number = data.rsplit(b" ", 1)
            if int(number) <= last.get(tag, -1):
                self.wrong.append(f"{data!r} at {position} comes after {last[tag]} of the same duellist")
            last[tag] = int(number)
            if data not in self.sent:
                self.wrong.append(f"{data!r} at {position} was sent by nobody")
        for data, position in self.acknowledged.items():
            if self.read.get(position) != data:
                self.wrong.append(
                    f"{data!r} was acknowledged at {position}, where {self.read.get(position)!r} is"
                )

    def summary(self) -> dict[str, object]:
        """Give the figures."""
        unknown = self.sent - self.acknowledged.keys()
        return {
            "takeovers": self.takeovers,
            "takeovers that failed": dict(self.failed),
            "SIGKILL": self.kills,
            "SIGSTOP": self.stops,
            "records sent": len(self.sent),
            "acknowledged": len(self.acknowledged),
            "unknown": len(unknown),
            "of these in the end there": len(unknown & set(self.read.values())),
            "read": len(self.read),
            "violations": len(self.wrong),
        }


class Duellist:
    """One place in the fight: a process, and after it is killed another one."""

    def __init__(self, kind: Kind, uri: str, number: int, home: Path, tally: Tally) -> None:
        self._kind, self._uri, self._number, self._tally = kind, uri, number, tally
        self._log = home / f"duellist-{number}.log"
        self._life = 0
        self._child: Child
        self._listening: asyncio.Task[None]

    async def start(self) -> None:
        """Start a new life."""
        self._life += 1
        tag = f"{self._number}.{self._life}"
        self._child = await start_module(self._kind.module, "duellist", self._uri, tag, log=self._log)
        self._listening = asyncio.create_task(self._listen(tag))

    async def _listen(self, tag: str) -> None:
        assert self._child.process.stdout is not None
        while raw := await self._child.process.stdout.readline():
            if raw.endswith(b"\n"):  # else it was killed in the middle of it
                self._tally.note(tag, raw.decode().rstrip("\n"))

    async def kill(self) -> None:
        """SIGKILL, and hear what it had reported."""
        self._child.kill()
        await self._listening
        await self._child.wait()

    async def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(self._child.pid, signal.SIGCONT)


async def duel(kind: Kind, home: Path, *, seconds: float, duellists: int, seed: int) -> Tally:
    """Let them fight, and give what came of it, checked."""
    rng, tally = random.Random(seed), Tally()
    async with Cluster(home, bookies=BOOKIES) as cluster, client_aio.connect(cluster.uri) as client:
        places = [Duellist(kind, cluster.uri, number, home, tally) for number in range(duellists)]
        await asyncio.gather(*(place.start() for place in places))
        arrived: asyncio.Event = asyncio.Event()
        reading = asyncio.create_task(_watch(kind, client, tally, arrived))
        loop = asyncio.get_running_loop()
        until, stopping = loop.time() + seconds, set[asyncio.Task[None]]()
        while loop.time() < until and not reading.done():
            await asyncio.sleep(rng.uniform(*BETWEEN_FAULTS_S))
            place = rng.choice(places)
            if rng.random() < 0.5:
                tally.kills += 1
                await place.kill()
                await place.start()
            else:
                tally.stops += 1
                task = asyncio.create_task(place.stop_for(rng.uniform(*STOPPED_S)))
                stopping.add(task)
                task.add_done_callback(stopping.discard)
        await asyncio.gather(*stopping)
        await asyncio.gather(*(place.kill() for place in places))
        last = b"end 0"
        tally.sent.add(last)
        tally.acknowledged[last] = position = await kind.finish(client, last)
        async with asyncio.timeout(REACH_S):
            while position not in tally.read and not reading.done():
                arrived.clear()
                await asyncio.wait(
                    [reading, asyncio.create_task(arrived.wait())], return_when=asyncio.FIRST_COMPLETED
                )
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        tally.check()
        await _read_again(kind, cluster.uri, tally, position)
    return tally


async def _watch(kind: Kind, client: client_aio.Client, tally: Tally, arrived: asyncio.Event) -> None:
    while True:
        try:
            async with contextlib.aclosing(kind.read(client)) as records:
                async for position, data in records:
                    tally.see(position, data)
                    arrived.set()
            return
        except (client_aio.NoSuchLedgerError, client_aio.LedgerError) as error:
            if tally.read or not isinstance(error, _MISSING):
                raise
            await asyncio.sleep(0.05)  # nobody has made it yet


_MISSING = (client_aio.NoSuchLedgerError, client_aio.NoSuchLogError)


async def _read_again(kind: Kind, uri: str, tally: Tally, last: str) -> None:
    """Read all of it once more, through another client: a position has one value."""
    async with client_aio.connect(uri) as other, asyncio.timeout(REACH_S):
        found: dict[str, bytes] = {}
        async with contextlib.aclosing(kind.read(other)) as records:
            async for position, data in records:
                found[position] = data
                if position == last:
                    break
    if list(found.items()) != list(tally.read.items()):
        differing = [at for at in found.keys() | tally.read.keys() if found.get(at) != tally.read.get(at)]
        tally.wrong.append(f"read again, {sorted(differing)[:5]} are different")
