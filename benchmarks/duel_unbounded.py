"""Processes compete for one unbounded ledger: is an acknowledged record lost, read twice, or out of order?

    python -m benchmarks.duel_unbounded [--seconds 60] [--fighters 5] [--seed 1] [--dir DIR] [--json FILE]

Each takes the ledger over again and again, and writes until another process does. They are killed (SIGKILL)
and stopped (SIGSTOP) at random. A reader follows the ledger from its first entry. The summary counts
takeovers, acknowledged records and records of unknown outcome. The command ends with 1 if anything is wrong.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import client_aio
from benchmarks.duelling import Arena, Notes, Place, Verdict, judge, main
from tests.support.cluster import Cluster

IN_FLIGHT = 32
FRAGMENT_BYTES = 20_000
REACH_S = 60.0
LEDGER = "fought-for"


async def fight(uri: str, name: str, fighter: str, life: str, notes_path: str) -> None:
    """Take the ledger over again and again; never returns."""
    rng, number = random.Random(f"{fighter}.{life}"), 0
    notes = Notes(Path(notes_path), says_open=True)  # open for as long as the process lives
    async with client_aio.connect(uri) as client:
        while True:
            await asyncio.sleep(rng.uniform(0.1, 1.5))
            # Shut out, or no bookie to be had for the moment: it tries again. What was in flight is unknown.
            with suppress(client_aio.BookKeeperError):
                ledger = await client.open_unbounded_ledger(name, fragment_bytes=FRAGMENT_BYTES)
                notes.write("open")
                window: set[asyncio.Future[int]] = set()
                try:
                    while True:
                        payload = f"{fighter}.{life}.{number}"
                        number += 1
                        notes.write(f"try {payload}")
                        future = ledger.add_entry(payload.encode())
                        future.add_done_callback(partial(_note, notes, payload))
                        window.add(future)
                        if len(window) >= IN_FLIGHT or rng.random() < 0.1:
                            done, window = await asyncio.wait(window, return_when=asyncio.FIRST_COMPLETED)
                            for each in done:
                                each.result()
                finally:
                    await ledger.abort()


def _note(notes: Notes, payload: str, added: asyncio.Future[int]) -> None:
    if not added.cancelled() and added.exception() is None:
        notes.write(f"ack 0:{added.result()} {payload}")


async def follow(client: client_aio.Client, found: list[tuple[Place, str]], last: list[int]) -> None:
    """Read from the first entry on; ends behind the one that `last` is given."""
    while True:
        with suppress(client_aio.NoSuchLedgerError):
            async with aclosing(client.read_unbounded_ledger(LEDGER, len(found))) as entries:
                async for entry in entries:
                    found.append(((0, entry.entry_id), entry.data.decode()))
                    if last and entry.entry_id >= last[0]:
                        return
        await asyncio.sleep(0.05)  # nobody has made it yet


async def duel(home: Path, *, seconds: float, fighters: int, seed: int) -> Verdict:
    """Let them fight on a cluster of its own, and judge."""
    async with Cluster(home, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        arena = Arena("benchmarks.duel_unbounded", home, cluster.uri, LEDGER, random.Random(seed))
        followed, last = list[tuple[Place, str]](), list[int]()
        following = asyncio.create_task(follow(client, followed, last))
        try:
            await arena.fight(fighters, seconds)
            async with client.open_unbounded_ledger(LEDGER) as ledger:
                with Notes(home / "fighter-referee.notes") as notes:
                    notes.write("open", "try referee.1.0")
                last.append(await ledger.add_entry(b"referee.1.0"))
            async with asyncio.timeout(REACH_S):
                await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        again = list[tuple[Place, str]]()
        await follow(client, again, last)
        metadata = await client.ledger_metadata(LEDGER)
    verdict = judge(arena.notes(), followed, dict(again))
    verdict.counts |= {
        "terms": metadata.term, "fragments": len(metadata.rows), "kills": arena.kills, "stops": arena.stops,
    }  # fmt: skip
    return verdict


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", fight, duel))
