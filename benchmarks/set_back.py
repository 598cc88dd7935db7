"""Set back a bookie's directory, the metadata, or both, under writers: `python -m benchmarks.set_back`.

Each round runs three bookies in processes on an embedded metadata store. Writers append to a log and make
ledgers all the time. On the way one bookie's directory and the metadata are copied. Later all bookies are
killed, and the copy of one or of both takes the place of what is there. Where a directory is set back,
another bookie is down when the last entries are written, and the third one is started only after a first try
to recover.

Rounds of the kind `ensembles` run five bookies. Two of them go away behind the copy of the metadata, so
others take their seats. They are back when the ledgers are recovered by the older metadata; another one is
late. Then it is checked:

- `denied`: an acknowledged entry that a recovered ledger does not have, or has otherwise;
- `repeated`: an id of a ledger that was given out twice;
- `stuck`: a log that does not open again, or takes no record;
- `dropped`: a ledger that a bookie dropped.

Where the metadata were set back, the newest are put back at the end of the round, and all is read once more.
The last line is a JSON object with the counts. The exit status is 1 if one of the four is not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import client_aio
from benchmarks.processes import Child, start_module

KINDS = ("directory", "metadata", "both", "ensembles")
BOOKIES = ("b1", "b2", "b3")
FIVE = (*BOOKIES, "b4", "b5")
COVERED_S = 5.0
"""Twice the interval at which bookies raise their ages, and some more: a copy that old is noticed."""
MANY = 1_000_000
"""So many entries that the ledger is open throughout the round."""
TRIED_FOR_S = 4.0
"""For how long each ledger is tried to be recovered while a bookie is down."""


@dataclass
class Acknowledged:
    """Entries, records and ids that the writers were told of as stored."""

    ledgers: dict[int, list[bytes]] = field(default_factory=dict)
    records: list[bytes] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)


class Cluster:
    """Bookies in processes, and the store in a folder."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = folder
        self.names = names
        self.uri = f"sqlite://{folder / 'metadata.db'}"
        self.running: dict[str, Child] = {}

    async def start(self, bookie: str) -> None:
        """Start a bookie, and wait until it serves."""
        child = await start_module(
            "client_aio.cli", "bookie", "serve", "-o", "jsonl", "--id", bookie,
            "--dir", str(self.folder / bookie), "--listen", "127.0.0.1:0", "--metadata", self.uri,
            "--sweep-interval", "0.5", log=self.folder / f"{bookie}.log",
        )  # fmt: skip
        await child.line()
        child.ignore_output()
        self.running[bookie] = child

    async def kill(self, *bookies: str) -> None:
        """SIGKILL bookies."""
        for bookie in bookies:
            child = self.running.pop(bookie, None)
            if child is not None:
                child.kill()
                await child.wait()

    def said(self, text: str) -> int:
        """Return how often the bookies have logged a text."""
        return sum(path.read_text(errors="replace").count(text) for path in self.folder.glob("b?.log"))

    def copy_metadata(self, name: str) -> None:
        """Copy the store by SQLite's own backup, as docs/OPERATING.md has it."""
        with (
            contextlib.closing(sqlite3.connect(self.folder / "metadata.db")) as store,
            contextlib.closing(sqlite3.connect(self.folder / name)) as copy,
        ):
            store.backup(copy)

    def restore_metadata(self, name: str) -> None:
        """Put a copy in the place of the store; nothing may have it open."""
        for path in self.folder.glob("metadata.db*"):
            path.unlink()
        shutil.copy2(self.folder / name, self.folder / "metadata.db")


async def write_log(uri: str, noted: Acknowledged) -> None:
    """Append to the log until cancelled, opening it again after failures."""
    number = 0
    while True:
        with contextlib.suppress(client_aio.BookKeeperError):
            async with client_aio.connect(uri, ensemble_change_timeout_s=2) as client:
                log = await client.open_log("log")
                try:
                    while True:
                        number += 1
                        data = b"%d" % number
                        await log.append(data)
                        noted.records.append(data)
                        await asyncio.sleep(0.01)
                finally:
                    await log.abort()
        await asyncio.sleep(0.1)


async def write_ledgers(uri: str, noted: Acknowledged, rng: random.Random, entries_max: int) -> None:
    """Make ledgers until cancelled, some of them open for a while."""
    while True:
        with contextlib.suppress(client_aio.BookKeeperError):
            async with client_aio.connect(uri, ensemble_change_timeout_s=2) as client:
                while True:
                    ledger = await client.create_ledger()
                    entries = noted.ledgers.setdefault(ledger.ledger_id, [])
                    noted.ids.add(ledger.ledger_id)
                    try:
                        for number in range(rng.randint(1, entries_max)):
                            data = b"%d of %d" % (number, ledger.ledger_id)
                            await ledger.add_entry(data)
                            entries.append(data)
                            await asyncio.sleep(rng.random() * 0.05)
                        await ledger.close()
                    finally:
                        await ledger.abort()
        await asyncio.sleep(0.1)


async def write(
    uri: str, noted: Acknowledged, rng: random.Random, seconds: float, *, then: asyncio.Event | None = None
) -> None:
    """Write for so long, or until the event is set."""
    writers = [
        asyncio.create_task(write_log(uri, noted)),
        *(asyncio.create_task(write_ledgers(uri, noted, rng, most)) for most in (60, 60, MANY)),
    ]
    try:
        if then is None:
            await asyncio.sleep(seconds)
        else:
            await then.wait()
    finally:
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)


async def read_all(uri: str, noted: Acknowledged, *, all_listed: bool) -> Counter[str]:
    """Recover and read all ledgers, and the log; count what is denied."""
    found: Counter[str] = Counter()
    async with client_aio.connect(uri) as client:
        listed = {one async for one in client.list_ledgers()}
        for ledger_id, entries in noted.ledgers.items():
            if ledger_id not in listed:
                found["denied"] += all_listed and len(entries)
                continue
            reader = await client.open_ledger(ledger_id, recover=True)
            last = reader.last_add_confirmed
            read = [bytes(entry.data) async for entry in reader.read(0, last)] if last >= 0 else []
            found["denied"] += read[: len(entries)] != entries
            found["read"] += len(read)
        if all_listed:
            # A takeover finds the end of the last ledger; a reader knows only the LAC that was stated.
            await (await client.open_log("log")).close()
            records = [bytes(record.data) async for record in client.read_log("log")]
            left = iter(records)
            lost = [record for record in noted.records if record not in left]
            if lost:
                print(f"the log lacks {lost[:3]!r} of {len(noted.records)} records", flush=True)
            found["denied"] += bool(lost)
    return found


async def longest_ensemble(uri: str, noted: Acknowledged) -> tuple[str, ...]:
    """Return the bookies of the ledger that has the most entries so far."""
    async with client_aio.connect(uri) as client:
        longest = max(noted.ledgers, key=lambda one: len(noted.ledgers[one]))
        return (await client.ledger_metadata(longest)).last_fragment.bookies


async def recover_early(uri: str, noted: Acknowledged) -> Counter[str]:
    """Try to recover the ledgers that are listed while a bookie is down; count those that come to an end."""
    ended: Counter[str] = Counter()

    async def recover(client: client_aio.Client, ledger_id: int) -> None:
        with contextlib.suppress(client_aio.BookKeeperError, TimeoutError):
            async with asyncio.timeout(TRIED_FOR_S):
                await (await client.open_ledger(ledger_id, recover=True)).close()
            ended["recovered early"] += 1

    async with client_aio.connect(uri, connect_timeout_s=1, read_timeout_s=2) as client:
        listed = [one async for one in client.list_ledgers() if one in noted.ledgers]
        open_ones = [one for one in listed if not (await client.ledger_metadata(one)).is_closed]
        await asyncio.gather(*(recover(client, one) for one in open_ones))
    return ended


async def run_round(kind: str, folder: Path, rng: random.Random) -> Counter[str]:
    """Run one round, and return its counts."""
    cluster, noted = Cluster(folder, FIVE if kind == "ensembles" else BOOKIES), Acknowledged()
    try:
        return await _run(kind, cluster, noted, rng)
    finally:
        await cluster.kill(*cluster.names)


async def _write_behind_copies(
    kind: str, cluster: Cluster, noted: Acknowledged, rng: random.Random
) -> tuple[str, str]:
    """Write, take the copies on the way, and kill all bookies.

    Returns:
        The bookie whose directory was copied, and one that was up when the last entries were written.
    """
    folder = cluster.folder
    for bookie in cluster.names:
        await cluster.start(bookie)
    stop = asyncio.Event()
    writing = asyncio.create_task(write(cluster.uri, noted, rng, 0, then=stop))
    await asyncio.sleep((4 if kind == "both" else 1) + rng.random())  # behind the first look at others' ages
    names = await longest_ensemble(cluster.uri, noted)
    victim, away, holder = rng.sample(names, 3)
    if kind == "ensembles":
        cluster.copy_metadata("older")
        for bookie in (victim, away):
            await asyncio.sleep(0.5 * rng.random())
            await cluster.kill(bookie)
        await asyncio.sleep(COVERED_S)
    else:
        await cluster.kill(victim)
        cluster.copy_metadata("older")
        shutil.copytree(folder / victim, folder / "backup")
        await cluster.start(victim)
        await asyncio.sleep(COVERED_S + rng.random())
        await asyncio.sleep(COVERED_S if kind == "both" else 0)
        if kind != "metadata":
            await cluster.kill(away)  # entries that only the victim and the third bookie have
            await asyncio.sleep(1)
    await cluster.kill(*cluster.names)
    stop.set()
    await writing
    return victim, holder


async def _run(kind: str, cluster: Cluster, noted: Acknowledged, rng: random.Random) -> Counter[str]:
    folder = cluster.folder
    victim, holder = await _write_behind_copies(kind, cluster, noted, rng)
    cluster.copy_metadata("newest")
    if kind in ("directory", "both"):
        shutil.rmtree(folder / victim)
        shutil.copytree(folder / "backup", folder / victim)
    if kind != "directory":
        cluster.restore_metadata("older")
    late = "" if kind == "metadata" else holder
    for bookie in rng.sample(cluster.names, len(cluster.names)):
        if bookie != late:
            await cluster.start(bookie)
    early: Counter[str] = Counter()
    if late:
        early = await recover_early(cluster.uri, noted)
        await cluster.start(late)
    again = Acknowledged()
    await write(cluster.uri, again, rng, 4)
    counts: Counter[str] = Counter(stuck=not again.records, repeated=len(noted.ids & again.ids)) + early
    counts += await read_all(cluster.uri, noted, all_listed=kind == "directory")
    counts += await read_all(cluster.uri, again, all_listed=kind != "directory")
    if kind != "directory":
        await cluster.kill(*cluster.names)
        cluster.restore_metadata("newest")
        for bookie in cluster.names:
            await cluster.start(bookie)
        counts += await read_all(cluster.uri, noted, all_listed=True)
    counts["dropped"] = cluster.said("ledger dropped")
    counts["marked"] = cluster.said("set back, as another") + cluster.said("the directory was set back:")
    counts["in doubt"] = cluster.said("the metadata store was set back to an older copy: no ledger")
    return counts


async def main() -> int:
    """Run the rounds, and print the counts of each and of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="of each kind")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # the clients' warnings about bookies that are killed
    total: Counter[str] = Counter()
    begun = time.monotonic()
    for number in range(arguments.rounds):
        for kind in [arguments.kind] if arguments.kind else KINDS:
            rng = random.Random(f"{arguments.seed}/{kind}/{number}")
            with tempfile.TemporaryDirectory() as folder:
                try:
                    counts = await run_round(kind, Path(folder), rng)
                except (client_aio.BookKeeperError, RuntimeError) as error:
                    counts = Counter(stuck=1)
                    print(f"{kind} {number}: {error!r}", flush=True)
            print(f"{kind} {number}: {dict(counts)}", flush=True)
            total += counts + Counter({f"rounds of {kind}": 1})
    print(json.dumps({**total, "seconds": round(time.monotonic() - begun)}))
    return 1 if any(total[each] for each in ("denied", "repeated", "stuck", "dropped")) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
