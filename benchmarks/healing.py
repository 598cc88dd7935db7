"""Rounds of a log's writer that loses two of its three bookies and heals; prints what became of each append.

    python -m benchmarks.healing --rounds 100 --seed 1

A round has 1,000 appends in flight when two of three bookies are killed or stopped. They are away for a drawn
time. In a third of the rounds the log rolls meanwhile, and in another third another client takes it over.
Most of a round is waiting: several processes, with a seed each, may run at once.
Afterwards the log is read: each acknowledged append is there once, in order, and none is there twice.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import client_aio
from client_aio import BookKeeperError, Client, LogFencedError, LogWriter, Outcome, Position
from tests.support.cluster import Cluster

APPENDS = 1000
LOG = "healing"
WAYS = ("alone", "with a roll", "with a takeover")


@dataclass
class Round:
    """One round, and the outcomes of its appends."""

    number: int
    way: str
    how: str
    away_s: float
    futures: list[asyncio.Future[Position]] = field(default_factory=list)
    longest_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    def payload(self, number: int) -> bytes:
        """Return the record of an append."""
        return b"%d/%d" % (self.number, number)

    def append(self, log: LogWriter, count: int) -> None:
        """Append so many records."""
        for _ in range(count):
            self.futures.append(log.append(self.payload(len(self.futures))))

    def counts(self) -> collections.Counter[str]:
        """Count the outcomes of the futures."""
        return collections.Counter(_outcome(future) for future in self.futures)


def _outcome(future: asyncio.Future[Position]) -> str:
    error = future.exception()
    if error is None:
        return "acknowledged"
    if isinstance(error, LogFencedError):
        return "fenced"
    is_unknown = isinstance(error, BookKeeperError) and error.outcome is Outcome.UNKNOWN
    return "unknown" if is_unknown else f"failed: {error!r}"


async def run_round(cluster: Cluster, client: Client, other: Client, this: Round) -> None:
    """Run one round on a cluster whose bookies all run, and leave it so."""
    victims = [
        cluster[name]
        for name in random.Random(f"{this.number}/{this.away_s}").sample(sorted(cluster.bookies), 2)
    ]
    log = await _opened(client, roll_entries=400 if this.way == "with a roll" else None)
    this.append(log, APPENDS // 2)
    await asyncio.sleep(0)
    began = time.monotonic()
    for bookie in victims:
        if this.how == "kill":
            await bookie.kill()
        else:
            bookie.stop()
    this.append(log, APPENDS - len(this.futures))
    taking = asyncio.create_task(_take_over(other, this)) if this.way == "with a takeover" else None
    await asyncio.sleep(this.away_s)
    for bookie in victims:
        if this.how == "kill":
            await bookie.start()
        else:
            bookie.resume()
    async with asyncio.timeout(120):
        while taking is not None and not log.is_closed:
            this.append(log, 5)  # until the other has the log
            await asyncio.sleep(0.01)
        await asyncio.wait(this.futures)
        this.longest_s = time.monotonic() - began
        if taking is not None:
            await taking
        with contextlib.suppress(BookKeeperError):
            await log.close()
    await log.abort()
    await _check(client, this)


async def _opened(client: Client, roll_entries: int | None = None) -> LogWriter:
    """Open the log as soon as that can be done: a bookie that was stopped registers again a moment later."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.open_log(LOG, roll_entries=roll_entries)
            except BookKeeperError:
                await asyncio.sleep(0.05)


async def _take_over(other: Client, this: Round) -> None:
    """Take the log over as soon as that can be done, and append a record."""
    async with await _opened(other) as log:
        await log.append(b"%d/other" % this.number)


async def _check(client: Client, this: Round) -> None:
    records = [record async for record in client.read_log(LOG)]
    mine = [record for record in records if record.data.startswith(b"%d/" % this.number)]
    numbers = {this.payload(number): number for number in range(len(this.futures))}
    found = [numbers[bytes(each.data)] for each in mine if bytes(each.data) in numbers]
    if found != sorted(set(found)):
        this.faults.append("records are there twice or out of order")
    at = {numbers[bytes(each.data)]: each.position for each in mine if bytes(each.data) in numbers}
    for number, future in enumerate(this.futures):
        if future.exception() is None and at.get(number) != future.result():
            this.faults.append(f"append {number} is acknowledged at {future.result()}: {at.get(number)}")
    last = {number for number, future in enumerate(this.futures) if future.exception() is None}
    if last and len([number for number in found if number <= max(last)]) != max(last) + 1:
        this.faults.append("a record before an acknowledged one is missing")
    this.faults += [text for text in this.counts() if text.startswith("failed")]
    if records:
        await client.truncate_log(LOG, records[-1].position)


async def run(rounds: int, seed: int, directory: Path) -> list[Round]:
    """Run all rounds, each with its line, and return them."""
    rng, done = random.Random(seed), list[Round]()
    async with Cluster(directory) as cluster:
        for number in range(rounds):
            how, away_s = rng.choice(("kill", "stop")), rng.choice((1, 1, 2, 3, 5, 8, 20))
            this = Round(number, WAYS[number % len(WAYS)], how, away_s)
            async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
                await run_round(cluster, client, other, this)
            done.append(this)
            said = f"{number}: {this.way}, {this.how} for {this.away_s} s: {dict(this.counts())}"
            print(f"{said}, all done after {this.longest_s:.1f} s {'; '.join(this.faults[:3])}", flush=True)
    return done


def main() -> int:
    """Run the rounds that the command line asks for; return 1 where a round found a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        done = asyncio.run(run(arguments.rounds, arguments.seed, Path(directory)))
    for way in WAYS:
        of_way = [this for this in done if this.way == way]
        counts = sum((this.counts() for this in of_way), collections.Counter[str]())
        late = sorted(this.longest_s - this.away_s for this in of_way)
        if late:
            median, most = late[len(late) // 2], late[-1]
            print(
                f"{way}: {len(of_way)} rounds: {dict(counts)}; all appends of a round were done, after the "
                f"bookies' return: median {median:.1f} s, most {most:.1f} s"
            )
    counts = sum((this.counts() for this in done), collections.Counter[str]())
    bad = [this.number for this in done if this.faults]
    print(f"{len(done)} rounds: {dict(counts)}; rounds with faults: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
