"""Five processes compete for one log, with SIGKILL and SIGSTOP at random; a reader follows from the start.

    python -m benchmarks.duel_log [--seconds 60] [--fighters 5] [--seed 1] [--json FILE]

Each fighter opens the log, which shuts the others out. It appends records with many in flight, and rolls
every few hundred of them. Soon after it was shut out itself, it opens the log again. At the end, every
acknowledged record was read exactly once, at its position and in order. Each position has one value. No
record was read that no fighter wrote. The program ends with 1 if any of this does not hold.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import client_aio
from benchmarks.duelling import Arena, Notes, Place, Verdict, judge, main
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

IN_FLIGHT = 50
ROLL_ENTRIES = 300
LOG = "duel"


async def fight(uri: str, name: str, fighter: str, life: str, notes_path: str) -> None:
    """Write to the log again and again; never returns."""
    rng, number = random.Random(f"{fighter}.{life}"), 0
    notes = Notes(Path(notes_path), says_open=True)  # open for as long as the process lives
    async with client_aio.connect(uri) as client:
        while True:
            await asyncio.sleep(rng.uniform(0, 1.0))
            # Shut out, or no bookie to be had for the moment: it tries again. What was in flight is unknown.
            with suppress(client_aio.BookKeeperError):
                log = await client.open_log(name, roll_entries=ROLL_ENTRIES)
                notes.write("open")
                try:
                    number = await write(log, notes, f"{fighter}.{life}", number)
                finally:
                    await log.abort()


async def write(log: client_aio.LogWriter, notes: Notes, who: str, number: int) -> int:
    """Append until the log is lost, and return the next record's number."""
    room = asyncio.Semaphore(IN_FLIGHT)

    def noting(payload: str) -> Callable[[asyncio.Future[client_aio.Position]], None]:
        def done(future: asyncio.Future[client_aio.Position]) -> None:
            room.release()
            if not future.cancelled() and future.exception() is None:
                notes.write(f"ack {future.result()} {payload}")

        return done

    with suppress(client_aio.BookKeeperError):
        while not log.is_closed:
            await room.acquire()
            payload = f"{who}.{number}"
            number += 1
            notes.write(f"try {payload}")
            log.append(payload.encode()).add_done_callback(noting(payload))
    return number


async def follow(client: client_aio.Client, found: list[tuple[Place, str]], last: list[Place]) -> None:
    """Read from the start; ends behind the position that `last` is given."""
    while True:
        try:
            async for record in client.read_log(LOG, found[-1][0] if found else None, follow=True):
                if found and record.position == found[-1][0]:
                    continue  # where reading is taken up again
                found.append((record.position, record.data.decode()))
                if last and record.position >= last[0]:
                    return
        except client_aio.NoSuchLogError:
            await asyncio.sleep(0.05)  # nobody has opened it yet


async def duel(home: Path, *, seconds: float, fighters: int, seed: int) -> Verdict:
    """Let them fight on a cluster of its own, and judge."""
    async with Cluster(home) as cluster, client_aio.connect(cluster.uri) as client:
        arena = Arena("benchmarks.duel_log", home, cluster.uri, LOG, random.Random(seed))
        followed, last = list[tuple[Place, str]](), list[Place]()
        following = asyncio.create_task(follow(client, followed, last))
        try:
            await arena.fight(fighters, seconds)
            async with client.open_log(LOG) as log:
                with Notes(home / "fighter-referee.notes") as notes:
                    notes.write("open", "try referee.1.0")
                last.append(await log.append(b"referee.1.0"))
            async with asyncio.timeout(60):
                await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        again = {record.position: record.data.decode() async for record in client.read_log(LOG)}
        metadata = await client.log_metadata(LOG)
    verdict = judge(arena.notes(), followed, {tuple(place): data for place, data in again.items()})
    verdict.counts |= {"ledgers": len(metadata.rows), "kills": arena.kills, "stops": arena.stops}
    return verdict


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", fight, duel))
