"""Flipped bits in stored entries: each is unknown, and nothing else is in doubt without need (rule 4)."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.messages import Stop
from tests.support.storage import Store, lose_claims, make_block

if TYPE_CHECKING:
    from pathlib import Path

LEDGERS = (1, 2, 3)


class Stored:
    """What a random bookie has acknowledged."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.entries: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.lacs: dict[int, int] = defaultdict(lambda: -1)
        self.doubted: set[int] = set()

    async def fill(self, store: Store) -> None:
        """Store blocks and statements of LACs, in groups of several."""
        following = dict.fromkeys(LEDGERS, 0)
        for _ in range(self.rng.randint(5, 40)):
            ledger_id = self.rng.choice(LEDGERS)
            if self.rng.random() < 0.2:
                lac = self.rng.randint(-1, following[ledger_id] - 1)
                statement = LacStatement(0, lac, -1, 0, b"")
                store.engine.append_statement(ledger_id, statement, lambda _: None)
            else:
                first = following[ledger_id] + self.rng.choice((0, 0, 0, 2))
                count = self.rng.randint(1, 4)
                payloads = [b"<%d of %d>" % (first + n, ledger_id) * 9 for n in range(count)]
                lac = self.rng.randint(-1, first - 1)
                store.engine.append_block(make_block(ledger_id, first, payloads, lac=lac), lambda _: None)
                self.entries[ledger_id] |= {first + n: payload for n, payload in enumerate(payloads)}
                following[ledger_id] = first + count
            self.lacs[ledger_id] = max(lac, self.lacs[ledger_id])
            if self.rng.random() < 0.5:
                await store.barrier()
        await store.barrier()
        await store.fence(9, 1)  # the groups before it are proven
        if self.rng.random() < 0.3:
            # In the last group, which a start may have to write again.
            self.doubted = {self.rng.choice(LEDGERS)}
            await when_durable(partial(store.engine.append_mark, *self.doubted))

    def flip(self, path: Path) -> set[tuple[int, int]]:
        """Flip a bit in some entries; return them."""
        all_entries = [(one, entry_id) for one, held in self.entries.items() for entry_id in held]
        flipped = set(self.rng.sample(all_entries, min(len(all_entries), self.rng.randint(1, 3))))
        for ledger_id, entry_id in flipped:
            payload = self.entries[ledger_id][entry_id]
            (file,) = (one for one in path.glob("*.segment") if payload in one.read_bytes())
            data = bytearray(file.read_bytes())
            data[data.find(payload) + self.rng.randrange(len(payload))] ^= 1 << self.rng.randrange(8)
            file.write_bytes(data)
        return flipped

    async def check(self, store: Store, flipped: set[tuple[int, int]], *, may_doubt: bool) -> None:
        for ledger_id, held in self.entries.items():
            for entry_id in range(max(held) + 3):
                found, stop, _ = await store.read(ledger_id, entry_id, entry_id)
                if (ledger_id, entry_id) in flipped:
                    assert stop is Stop.UNKNOWN
                elif entry_id in held:
                    assert (found, stop) == ({entry_id: held[entry_id]}, Stop.END)
                else:
                    is_in_doubt = store.engine.is_in_doubt(ledger_id)
                    assert stop is (Stop.UNKNOWN if is_in_doubt else Stop.NO_SUCH_ENTRY)
            is_doubted = ledger_id in self.doubted
            is_hurt = ledger_id in {one for one, _ in flipped}
            assert store.engine.is_damaged(ledger_id) is (is_hurt or is_doubted)
            statement = store.engine.statement(ledger_id)
            lac = -1 if statement is None else statement.lac
            # In doubt is who may have forgotten a LAC, and nobody else.
            assert store.engine.is_in_doubt(ledger_id) is (is_doubted or lac < self.lacs[ledger_id])
            assert may_doubt or lac == self.lacs[ledger_id]


@pytest.mark.parametrize("seed", range(60))
async def test_flipped_bits_in_entries_put_nothing_else_in_doubt(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    is_killed = rng.random() < 0.5
    stored = Stored(rng)
    store = await Store.open(tmp_path / "first")
    await stored.fill(store)
    path = tmp_path / "first"
    if is_killed:
        path = await store.crash_into(tmp_path / "killed")
        if rng.random() < 0.5:
            lose_claims(path)
    await store.close()
    flipped = stored.flip(path)
    for number in range(3):
        store = await Store.open(path)
        await stored.check(store, flipped, may_doubt=is_killed)
        following = path
        if rng.random() < 0.5:
            following = await store.crash_into(tmp_path / f"killed again {number}")
        await store.close()
        path = following
