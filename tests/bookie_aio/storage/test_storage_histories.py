"""Random histories of a store whose bits flip: what it acknowledged it never denies without a doubt (rule 4).

A history has adds, copies, statements, fences, locks, trims, forgets, deletions, marks, repairs with lifts,
scrubs, compaction, kills, closes and full disks. Bits flip anywhere in segments and indexes, also while the
store runs.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFullError
from tests.support.storage import FaultyDisk, Store, make_block

if TYPE_CHECKING:
    from pathlib import Path

SIZES = (5, 50, 750, 3000)


@dataclass
class Promised:
    """What the store has acknowledged of one ledger."""

    entries: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Content term and payload."""
    following: int = 0
    content_term: int = 0
    lac: int = -1
    term: int = 0
    lock: bytes = b""
    first: int = 0
    is_deleted: bool = False

    @property
    def kept(self) -> dict[int, tuple[int, bytes]]:
        """Return the entries that no trim has dropped."""
        return {one: held for one, held in self.entries.items() if one >= self.first}


class History:
    """One random history; `directory` has the store's directory of each life."""

    def __init__(self, directory: Path, rng: random.Random, store: Store, disk: FaultyDisk) -> None:
        self.directory = directory
        self.rng = rng
        self.store = store
        self.disk = disk
        self.lives = 0
        self.ledgers = {ledger_id: Promised() for ledger_id in range(1, rng.choice((3, 5, 8)))}

    async def run(self) -> None:
        """Take random steps, and look at everything behind most of them."""
        steps = {
            self.add: 45, self.add_copy: 10, self.state_lac: 5, self.fence: 4, self.lock: 2, self.trim: 3,
            self.forget: 3, self.delete: 1, self.mark: 1, self.heal: 3, self.keep_house: 6, self.flip: 4,
            self.fill_or_free_the_disk: 2, self.restart: 10,
        }  # fmt: skip
        for _ in range(self.rng.randint(20, 80)):
            living = [one for one, held in self.ledgers.items() if not held.is_deleted]
            if not living:
                break
            ledger_id = self.rng.choice(living)
            (step,) = self.rng.choices(list(steps), list(steps.values()))
            with suppress(DiskFullError):
                await step(ledger_id, self.ledgers[ledger_id])
            if self.rng.random() < 0.3:
                await self.check()
        await self.check()

    # --- what is promised ----------------------------------------------------------------------

    def draw_block(self, ledger_id: int, held: Promised) -> tuple[int, int, list[int], list[bytes]]:
        """Return the content term, the stride, the ids and the payloads of a block."""
        rng = self.rng
        first = held.following + rng.choice((0, 0, 0, 1))
        if held.entries and rng.random() < 0.15:
            first = rng.choice(list(held.entries))
        if rng.random() < 0.05:
            held.content_term += 1
        stride = rng.choice((1, 1, 1, 2, 3))
        ids = [first + number * stride for number in range(rng.randint(1, 5))]
        # An entry that is sent again is the same under the same content term.
        drawn = [random.Random(f"{ledger_id} {entry_id} {held.content_term}") for entry_id in ids]
        return held.content_term, stride, ids, [one.randbytes(2) * one.choice(SIZES) for one in drawn]

    async def add(self, ledger_id: int, held: Promised, *, is_copy: bool = False) -> None:
        content_term, stride, ids, payloads = self.draw_block(ledger_id, held)
        lac = self.rng.randint(-1, max(-1, ids[0] - 1))
        block = make_block(ledger_id, ids[0], payloads, stride=stride, content_term=content_term, lac=lac)
        engine = self.store.engine
        await when_durable(partial(engine.append_copy if is_copy else engine.append_block, block))
        held.entries |= {
            entry_id: (content_term, payload) for entry_id, payload in zip(ids, payloads, strict=True)
        }
        held.following = max(held.following, ids[-1] + 1)
        if not is_copy:
            held.lac = max(held.lac, lac)

    async def add_copy(self, ledger_id: int, held: Promised) -> None:
        await self.add(ledger_id, held, is_copy=True)

    async def state_lac(self, ledger_id: int, held: Promised) -> None:
        lac = self.rng.randint(-1, held.following)
        mac = self.rng.choice((b"", self.rng.randbytes(32)))
        statement = LacStatement(held.content_term, lac, -1, 0, mac)
        await when_durable(partial(self.store.engine.append_statement, ledger_id, statement))
        held.lac = max(held.lac, lac)

    async def fence(self, ledger_id: int, held: Promised) -> None:
        await self.store.fence(ledger_id, held.term + 1)
        held.term += 1

    async def lock(self, ledger_id: int, held: Promised) -> None:
        if not held.lock:
            lock = self.rng.randbytes(32)
            await when_durable(partial(self.store.engine.append_lock, ledger_id, lock))
            held.lock = lock

    async def trim(self, ledger_id: int, held: Promised) -> None:
        first = self.rng.randint(0, held.following)
        await when_durable(partial(self.store.engine.append_trim, ledger_id, first))
        held.first = max(held.first, first)

    async def forget(self, ledger_id: int, held: Promised) -> None:
        await when_durable(partial(self.store.engine.append_forget, ledger_id))
        held.entries = {}

    async def delete(self, ledger_id: int, held: Promised) -> None:
        await when_durable(partial(self.store.engine.append_tombstone, ledger_id))
        held.is_deleted = True

    # --- what happens --------------------------------------------------------------------------

    async def mark(self, ledger_id: int, _: Promised) -> None:
        await when_durable(partial(self.store.engine.append_mark, ledger_id))

    async def heal(self, ledger_id: int, held: Promised) -> None:
        """Repair a ledger that is marked, and have its marks lifted, as a client does."""
        engine = self.store.engine
        number = engine.marking.tell(ledger_id)
        if not number:
            return
        for entry_id, (content_term, payload) in held.kept.items():
            _, stop, _ = await self.store.read(ledger_id, entry_id, entry_id, content_term=content_term)
            if stop is not Stop.END:
                copy = make_block(ledger_id, entry_id, [payload], content_term=content_term, lac=-1)
                await when_durable(partial(engine.append_copy, copy))
        if held.lac >= 0:
            statement = LacStatement(held.content_term, held.lac, -1, 0, b"")
            await when_durable(partial(engine.append_statement, ledger_id, statement))
        if held.lock and not engine.lock(ledger_id):
            await when_durable(partial(engine.append_lock, ledger_id, held.lock))
        term = max(held.term, engine.term(ledger_id)) + 1
        await when_durable(partial(engine.marking.lift, ledger_id, number, term))
        held.term = term

    async def keep_house(self, _: int, __: Promised) -> None:
        await self.store.settled()
        await self.store.engine._scrubber.scrub()

    async def flip(self, _: int, __: Promised) -> None:
        self.flip_in(self.store.path)

    def flip_in(self, directory: Path) -> None:
        """Flip a bit, or one in each of forty bytes, in what was written of a segment or an index."""
        files = [one for one in sorted(directory.iterdir()) if one.suffix in (".segment", ".index")]
        if not files:
            return
        path = self.rng.choice(files)
        with suppress(FileNotFoundError), path.open("r+b") as file:
            written = len(file.read().rstrip(b"\0"))
            at = self.rng.randrange(max(1, written))
            file.seek(at)
            data = file.read(self.rng.choice((1, 1, 1, 40)))
            file.seek(at)
            file.write(bytes(one ^ 1 << self.rng.randrange(8) for one in data))

    async def fill_or_free_the_disk(self, _: int, __: Promised) -> None:
        self.disk.is_full = not self.disk.is_full

    async def restart(self, _: int, __: Promised) -> None:
        self.lives += 1
        to, is_killed = self.directory / str(self.lives), self.rng.random() < 0.6
        if is_killed:
            await self.store.crash_into(to)
        self.disk.is_full = False
        await self.store.close()
        if not is_killed:
            shutil.copytree(self.store.path, to)
        shutil.rmtree(self.store.path)
        if self.rng.random() < 0.6:
            for _ in range(self.rng.randint(1, 3)):
                self.flip_in(to)
        self.disk = FaultyDisk()
        self.store = await Store.open(to, disk=self.disk)

    # --- what holds ----------------------------------------------------------------------------

    async def check(self) -> None:
        """Check that the store has, or knows that it may have lost, what it acknowledged."""
        engine = self.store.engine
        for ledger_id, held in self.ledgers.items():
            if held.is_deleted:
                assert engine.is_deleted(ledger_id) or engine.is_in_doubt(ledger_id)
                continue
            for entry_id, (content_term, payload) in held.kept.items():
                found, stop, _ = await self.store.read(
                    ledger_id, entry_id, entry_id, content_term=content_term
                )
                if stop is Stop.END:
                    assert found == {entry_id: payload}
                else:
                    assert (stop, engine.is_damaged(ledger_id)) == (Stop.UNKNOWN, True)
            rows, _ = await engine.list_entries(ledger_id, 0, 10**6)
            listed = {
                one
                for first, _, count, stride in rows
                for one in range(first, first + count * stride, stride)
            }
            statement = engine.statement(ledger_id)
            assert engine.is_in_doubt(ledger_id) or (
                listed >= held.kept.keys()
                and engine.last_entry(ledger_id) >= max(held.kept, default=-1)
                and (-1 if statement is None else statement.lac) >= held.lac
                and engine.term(ledger_id) >= held.term
                and engine.lock(ledger_id) == held.lock
            )


@pytest.mark.parametrize("seed", range(24))
async def test_a_store_knows_what_it_may_have_lost(tmp_path: Path, seed: int) -> None:
    disk = FaultyDisk()
    history = History(tmp_path, random.Random(seed), await Store.open(tmp_path / "0", disk=disk), disk)
    try:
        async with asyncio.timeout(60):
            await history.run()
    finally:
        history.disk.is_full = False
        await history.store.close()
