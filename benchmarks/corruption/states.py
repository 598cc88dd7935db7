"""States of a cluster before the damage: directories of real bookies, and what one of them owes.

A *line* is the history of one cluster of three bookies over four lives. Clients write ledgers all along. A
*state* is a copy of the directories at one moment of a line:

- `clean`: after a clean stop.
- `idle`: killed after no request had come for a while.
- `busy`: killed while small groups were being written.

A state is made once and is then damaged many times. With it goes a table of the entries that the first bookie
has acknowledged, of its fences, and of its tombstones. The bookie runs in segments of 96 KiB, so that a few
hundred entries fill several segments, indexes, spare files and tables of ledgers. In one line of three the
bookies have two data directories each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks.processes import Child
from metadata.ids import TERM_FINAL
from tests.support.smallstorage import variables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from client_aio import Client

VICTIM = "b1"
BOOKIES = (VICTIM, "b2", "b3")
OTHER = "b2"
"""The bookie whose files may take the place of the victim's."""
_SECOND = "-second"
_TWO_DIRECTORIES_IN = 3
SEGMENT_BYTES = 96 * 1024
STORE = "metadata.db"
LIVES = 4
BUSY_STATES = 4
"""Of each life."""
SMALL = {
    "segment_bytes": SEGMENT_BYTES,
    "group_bytes_max": 24 * 1024,
    "space.reserve_bytes": SEGMENT_BYTES // 2,
    "space.spare_bytes_max": 3 * SEGMENT_BYTES,
    "space.retry_s": 0.2,
    "compaction.pause_s": 0.2,
    "live_ledgers_max": 6,
}
"""Keys of [bookie.storage]."""
ALL_THREE = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 3}
STRIPED = {"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 2}
_SERVES_WITHIN_S = 60.0


def configure() -> None:
    """Have `bookie serve` in this process, and in those that it starts, use small segments."""
    os.environ.update(variables(SMALL))


def directories_of(place: Path, name: str) -> list[Path]:
    """Return the data directories that a bookie has in a place: one, or two."""
    return [each for each in (place / name, place / f"{name}{_SECOND}") if each.is_dir()]


def arguments_of(directories: Sequence[Path], name: str, store: Path) -> list[str]:
    """Return the command line of a bookie.

    A copy of its directories is elsewhere. It is started on that also where its age is damaged.
    """
    return [
        "bookie", "serve", "-o", "jsonl", "--id", name, "--listen", "127.0.0.1:0", "--accept-older-copy",
        "--metadata", f"sqlite://{store}", "--sweep-interval", "3600",
        *(word for each in directories for word in ("--dir", str(each))),
    ]  # fmt: skip


def payload(ledger_id: int, entry_id: int, size: int) -> bytes:
    """Return an entry's bytes, which name the entry."""
    head = b"%d:%d " % (ledger_id, entry_id)
    return (head * (size // len(head) + 1))[: max(size, len(head))]


def small(ledger_id: int, entry_id: int) -> int:
    """Return the size of an entry of an open ledger, which is the same for everybody who adds it."""
    return random.Random(f"{ledger_id}/{entry_id}").choice((10, 60, 300, 900))


@dataclass
class Ledger:
    """What the victim has acknowledged of one ledger."""

    kind: str
    sizes: list[int] = field(default_factory=list)
    """Of the acknowledged entries, from entry 0 on."""
    first: int = 0
    """The first entry that is kept."""
    content_terms: list[int] = field(default_factory=list)
    step: int = 1
    owed: list[int] = field(default_factory=lambda: [0])
    """The victim has the entries whose ids have one of these remainders modulo `step`."""
    fence: int = 0
    """Adds of a lower term are to be refused."""

    def entries(self) -> list[int]:
        """Return the ids of the entries that the victim owes."""
        return [one for one in range(self.first, len(self.sizes)) if one % self.step in self.owed]

    def runs(self) -> list[tuple[int, int, int]]:
        """Return runs of one content term that the victim owes: content term, first, last."""
        runs: list[tuple[int, int, int]] = []
        for entry in self.entries():
            term = self.content_terms[entry]
            if runs and runs[-1][0] == term and runs[-1][2] == entry - 1:
                runs[-1] = (term, runs[-1][1], entry)
            else:
                runs.append((term, entry, entry))
        return runs


@dataclass
class Owed:
    """What the victim owes in one state."""

    ledgers: dict[int, Ledger] = field(default_factory=dict)
    deleted: list[int] = field(default_factory=list)

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"ledgers": {str(k): asdict(v) for k, v in self.ledgers.items()},
                           "deleted": self.deleted})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Owed:
        """Read it back."""
        found = json.loads(text)
        ledgers = {int(key): Ledger(**value) for key, value in found["ledgers"].items()}
        return cls(ledgers, found["deleted"])


@dataclass(frozen=True)
class State:
    """A copy of the cluster's directories at one moment."""

    number: int
    kind: str
    life: int
    path: Path

    @property
    def name(self) -> str:
        """Return a name for the table."""
        return self.kind

    def owed(self) -> Owed:
        """Return what the victim owes."""
        return Owed.from_json((self.path / "owed.json").read_text())


def states_of(line: Path) -> list[State]:
    """Return the states of a line, in the order of time."""
    found = [path.name.split("-") for path in line.glob("state-*")]
    return sorted(
        (State(int(number), kind, int(life), line / f"state-{number}-{life}-{kind}")
         for _, number, life, kind in found),
        key=lambda state: state.number,
    )  # fmt: skip


def copy_sparse(source: Path, to: Path) -> None:
    """Copy a directory without its subdirectories, holes as holes, since a start asks where data lies."""
    to.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "lock":
            copy_file(file, to / file.name)


def copy_file(source: Path, to: Path) -> None:
    """Copy one file, holes as holes."""
    with source.open("rb") as old, to.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        at = 0
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole
                break
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), end - at, at), at)
            at = end
        new.truncate(size)


def copy_store(source: Path, to: Path) -> None:
    """Copy the embedded metadata store as docs/OPERATING.md says."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as store,
        contextlib.closing(sqlite3.connect(to)) as copy,
    ):
        store.backup(copy)


class Line:
    """Makes the states of one line."""

    def __init__(self, path: Path, seed: int, idle_s: float) -> None:
        self._path = path
        self._rng = random.Random(f"line {seed}")
        self._idle_s = idle_s
        self._store = path / STORE
        self._names: tuple[str, ...] = BOOKIES
        if seed % _TWO_DIRECTORIES_IN == 1:
            self._names += tuple(f"{name}{_SECOND}" for name in BOOKIES)
        self._owed = Owed()
        self._children: dict[str, Child] = {}
        self._states = 0

    async def make(self) -> None:
        """Play the four lives."""
        for name in self._names:
            (self._path / name).mkdir(mode=0o700, parents=True)
        try:
            for life in range(LIVES):
                await self._start()
                async with client_aio.connect(f"sqlite://{self._store}") as client:
                    await self._write_much(client)
                    await self._write_small_groups(client, life)
                await asyncio.sleep(self._idle_s)
                with self._stopped():
                    self._take("idle", life)
                is_clean = life % 2 == 0
                for child in self._children.values():
                    await child.end() if is_clean else child.kill()
                    await child.wait()
                if is_clean:
                    self._take("clean", life)
        finally:
            for child in self._children.values():
                child.kill()
                await child.wait()

    async def _start(self) -> None:
        for name in BOOKIES:
            child = self._children[name] = await Child.start(
                sys.executable, "-m", "benchmarks.corruption", "--serve",
                *arguments_of(directories_of(self._path, name), name, self._store),
                log=self._path / f"{name}.log",
            )  # fmt: skip
            await child.line(timeout_s=_SERVES_WITHIN_S)
            child.ignore_output()

    @contextlib.contextmanager
    def _stopped(self) -> Any:
        """Stop all bookies with SIGSTOP: their files are as a kill at this moment leaves them."""
        running = [child for child in self._children.values() if child.process.returncode is None]
        for child in running:
            os.kill(child.pid, 19)
        for child in running:  # until the last system call has ended
            while f") {'T'} " not in _stat(child.pid):
                os.sched_yield()
        try:
            yield
        finally:
            for child in running:
                os.kill(child.pid, 18)

    def _take(self, kind: str, life: int) -> None:
        """Copy the directories."""
        to = self._path / f"state-{self._states:02}-{life}-{kind}"
        self._states += 1
        for name in (VICTIM, OTHER):
            for directory in directories_of(self._path, name):
                copy_sparse(directory, to / directory.name)
        copy_store(self._store, to / STORE)
        (to / "owed.json").write_text(self._owed.to_json())

    # --- what clients do -----------------------------------------------------------------------

    async def _write_much(self, client: Client) -> None:
        rng = self._rng
        for _ in range(4):
            await (await self._written(client, "closed", rng.randrange(8, 30), ALL_THREE)).close()
        await (await self._written(client, "striped", rng.randrange(8, 30), STRIPED)).close()
        secret = {"digest": "hmac-sha256", "password": b"secret"}
        await (await self._written(client, "password", 8, {**ALL_THREE, **secret})).close()
        writer = await self._written(client, "fenced", rng.randrange(3, 20), ALL_THREE)
        await client.open_ledger(writer.ledger_id, recover=True)
        self._owed.ledgers[writer.ledger_id].fence = TERM_FINAL
        await writer.abort()
        for _ in range(2):
            writer = await self._written(client, "deleted", rng.randrange(3, 20), ALL_THREE)
            await writer.close()
            await self._delete(client, writer.ledger_id)
        await self._write_unbounded(client)
        if rng.random() < 0.7:  # so that segments die, and files are recycled
            old = [one for one, ledger in self._owed.ledgers.items() if ledger.kind == "closed"]
            for ledger_id in rng.sample(old, min(len(old), rng.randrange(1, 5))):
                await self._delete(client, ledger_id)

    async def _delete(self, client: Client, ledger_id: int) -> None:
        del self._owed.ledgers[ledger_id]
        await client.delete_ledger(ledger_id)
        self._owed.deleted.append(ledger_id)

    async def _written(self, client: Client, kind: str, count: int, options: dict[str, Any]) -> Any:
        writer = await client.create_ledger(**options)
        ledger = self._owed.ledgers[writer.ledger_id] = Ledger(kind)
        bookies = (await client.ledger_metadata(writer.ledger_id)).last_fragment.bookies
        seat = bookies.index(VICTIM)
        ledger.step = options["ensemble_size"]
        ledger.owed = [(seat - back) % ledger.step for back in range(options["write_quorum"])]
        await self._add(writer, ledger, count)
        return writer

    async def _add(self, writer: Any, ledger: Ledger, count: int, term: int = 0) -> None:
        first = len(ledger.sizes)
        sizes = [self._rng.choice((10, 200, 1500, 4000)) for _ in range(count)]
        data = [payload(writer.ledger_id, first + number, size) for number, size in enumerate(sizes)]
        await writer.add_entries(data)
        ledger.sizes += map(len, data)
        ledger.content_terms += [term] * count

    async def _write_unbounded(self, client: Client) -> None:
        """Write an unbounded ledger over two terms, and trim its first fragment."""
        name = f"u{self._rng.getrandbits(40)}"
        async with client.open_unbounded_ledger(name, **ALL_THREE) as writer:
            ledger = self._owed.ledgers[writer.ledger_id] = Ledger("unbounded")
            await self._add(writer, ledger, 6, writer.term)
            await writer.roll()
            await self._add(writer, ledger, 5, writer.term)
        async with client.open_unbounded_ledger(name) as writer:
            ledger.fence = writer.term
            await self._add(writer, ledger, 4, writer.term)
            ledger.first = await writer.trim(6)

    async def _write_small_groups(self, client: Client, life: int) -> None:
        """Write one small entry after another to a few ledgers, and take states on the way."""
        rng = self._rng
        writers = [await self._written(client, "open", 1, ALL_THREE) for _ in range(3)]
        tasks = [asyncio.create_task(self._trickle(writer, rng.getrandbits(32))) for writer in writers]
        for _ in range(BUSY_STATES):
            await asyncio.sleep(rng.uniform(0.02, 0.25))
            with self._stopped():
                self._take("busy", life)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for writer in writers:
            await writer.flush()
            self._catch_up(writer)
            await writer.abort()

    async def _trickle(self, writer: Any, seed: int) -> None:
        rng = random.Random(seed)
        async for count in _bursts(rng):
            for _ in range(count):
                entry = writer.last_add_pushed + 1
                writer.add_entry(payload(writer.ledger_id, entry, small(writer.ledger_id, entry)))
            await writer.flush()
            self._catch_up(writer)

    def _catch_up(self, writer: Any) -> None:
        ledger = self._owed.ledgers[writer.ledger_id]
        while len(ledger.sizes) <= writer.last_add_confirmed:
            entry = len(ledger.sizes)
            size = small(writer.ledger_id, entry)
            ledger.sizes.append(len(payload(writer.ledger_id, entry, size)))
            ledger.content_terms.append(0)


async def _bursts(rng: random.Random) -> AsyncIterator[int]:
    while True:
        yield rng.choice((1, 1, 1, 2))
        await asyncio.sleep(rng.random() * 0.004)


def _stat(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read()


async def make_line(path: Path, seed: int, idle_s: float) -> None:
    """Make a line's states; `path` is renamed to its name when they are complete."""
    unfinished = path.with_name(path.name + ".new")
    await Line(unfinished, seed, idle_s).make()
    unfinished.rename(path)
