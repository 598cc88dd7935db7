"""Flipped bits in stored entries: each is unknown, and nothing else is in doubt without need (rule 4)."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.crash_recovery import RecoveredState
from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.ledgers.checkpoint import LedgerState, pack_state, unpack_state
from bookie_aio.storage.segment.format import GROUP_MAGIC
from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFailedError, DiskFullError
from tests.support.storage import FaultyDisk, Store, lose_claims, make_block

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
        self.macs: dict[bytes, int] = {}
        self.hurt: set[int] = set()  # ledgers
        self.hurt_codes: set[int] = set()
        self.is_claimed = True  # the last group, by a witness

    async def fill(self, store: Store) -> None:
        """Store blocks and statements of LACs, in groups of several."""
        following = dict.fromkeys(LEDGERS, 0)
        for _ in range(self.rng.randint(5, 40)):
            ledger_id = self.rng.choice(LEDGERS)
            if self.rng.random() < 0.2:
                lac = self.rng.randint(-1, following[ledger_id] - 1)
                mac = self.rng.randbytes(32)
                self.macs[mac] = ledger_id
                statement = LacStatement(0, lac, -1, 0, mac)
                store.engine.append_statement(ledger_id, statement, lambda _: None)
            else:
                first = following[ledger_id] + self.rng.choice((0, 0, 0, 2))
                count = self.rng.randint(1, 4)
                payloads = [b"<%d of %d>" % (first + n, ledger_id) * 9 for n in range(count)]
                is_copy = self.rng.random() < 0.2
                lac = first - 1 if is_copy else self.rng.randint(-1, max(-1, first - 3))
                append = store.engine.append_copy if is_copy else store.engine.append_block
                append(make_block(ledger_id, first, payloads, lac=lac), lambda _: None)
                lac = -1 if is_copy else lac  # a copy states nothing
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
        """Flip a bit in some entries, and in the codes of some statements; return the entries."""
        all_entries = [(one, entry_id) for one, held in self.entries.items() for entry_id in held]
        flipped = set(self.rng.sample(all_entries, min(len(all_entries), self.rng.randint(1, 6))))
        self.hurt = {ledger_id for ledger_id, _ in flipped}
        for mac, ledger_id in self.macs.items():
            found = [one for one in path.glob("*.segment") if mac in one.read_bytes()]
            if found and self.rng.random() < 0.3:
                found[0].write_bytes(found[0].read_bytes().replace(mac, bytes([mac[0] ^ 1]) + mac[1:]))
                self.hurt_codes.add(ledger_id)
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
            if ledger_id not in self.hurt_codes:  # nobody looks at those in sealed segments
                assert store.engine.is_damaged(ledger_id) is (ledger_id in self.hurt or is_doubted)
            statement = store.engine.statement(ledger_id)
            lac = -1 if statement is None else statement.lac
            # In doubt is who may have forgotten a LAC, or who had damage when nothing proved the last group.
            must_be = is_doubted or lac < self.lacs[ledger_id]
            may_be = must_be or (not self.is_claimed and ledger_id in self.hurt | self.hurt_codes)
            assert must_be <= store.engine.is_in_doubt(ledger_id) <= may_be
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
            stored.is_claimed = False
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


def test_what_two_looks_at_the_same_files_find_counts_together() -> None:
    first, second = RecoveredState(), RecoveredState()
    first.damage.harmed, second.damage.harmed = {1: 5, 2: 3, 4: 1}, {1: 2, 3: 8}
    second.deleted.add(4)
    second.add_losses(first)
    assert second.damage.harmed == {1: 5, 3: 8}
    assert second.damage.lost == {2}  # listed by the first look only


def test_what_is_deleted_is_marked_no_more() -> None:
    found = RecoveredState()
    found.damage.harmed, found.damage.lost = {1: 5, 2: 3}, {1, 3}
    found.deleted.add(1)
    found.drop_deleted()
    assert (found.damage.harmed, found.damage.lost) == ({2: 3}, {3})


def test_of_two_states_of_a_ledger_each_doubt_counts() -> None:
    for kind in ({}, {"is_of_listed": True}, {"is_of_listed": True, "is_proven": False}):
        one, other = LedgerState(), LedgerState()
        other.mark(5, **kind)
        other = unpack_state(pack_state(1, other))
        one.raise_to(other)
        assert one.is_marked
        assert one.is_in_doubt is (kind != {"is_of_listed": True})


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_mark_of_an_entry_that_a_start_drops_is_a_doubt(tmp_path: Path, has_room: bool) -> None:
    """The newest group rots, which nothing proves behind a power cut. But a checkpoint has its mark."""
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "first", disk=disk)
    await store.add(make_block(1, 0, [b"first" * 20], lac=-1))
    await store.settled()
    await store.add(make_block(1, 1, [b"PRECIOUS" * 20], lac=-1))
    (segment,) = (one for one in (tmp_path / "first").glob("*.segment") if b"PRECIOUS" in one.read_bytes())
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"PRECIOUS", b"XRECIOUS", 1))
    disk.journal_s = 0.5  # the mark's group is under way when the checkpoint is written
    if has_room:
        store.engine.append_mark(1, lambda _: None, is_of_listed=True)
    else:
        store.engine._ledgers.state(1).mark(
            store.engine._ledgers.marks.draw(), is_of_listed=True, is_proven=False
        )
    assert not store.engine.is_in_doubt(1)
    await store.engine._checkpointer.write()
    path = lose_claims(await store.crash_into(tmp_path / "second"))
    await store.close()
    for _ in range(2):
        store = await Store.open(path)
        assert await store.read(1, 1, 1) == ({}, Stop.UNKNOWN, 1)
        assert store.engine.is_in_doubt(1)
        # A later mark of listed entries proves nothing of the first one.
        await when_durable(partial(store.engine.append_mark, 1, is_of_listed=True))
        assert store.engine.is_in_doubt(1)
        path = await store.crash_into(tmp_path / f"{path.name} again")
        await store.close()


async def test_an_entry_that_only_a_tail_in_the_page_cache_proves_is_in_doubt(
    tmp_path: Path,
) -> None:
    """A start has marked the entry, and fails to write. A power cut takes the group behind the entry's."""
    store = await Store.open(tmp_path / "first")
    await store.add(make_block(1, 0, [b"first" * 20], lac=-1))
    await store.settled()
    await store.add(make_block(1, 1, [b"PRECIOUS" * 20], lac=-1))
    await store.add(make_block(2, 0, [b"TAIL" * 20]))
    path = lose_claims(await store.crash_into(tmp_path / "killed"))
    await store.close()
    (segment,) = (one for one in path.glob("*.segment") if b"PRECIOUS" in one.read_bytes())
    segment.write_bytes(segment.read_bytes().replace(b"PRECIOUS", b"XRECIOUS", 1))
    disk = FaultyDisk()
    disk.fail_journal_write = 1
    with pytest.raises(DiskFailedError):
        await Store.open(path, disk=disk)
    data = segment.read_bytes()
    tail = data.rfind(GROUP_MAGIC, 0, data.find(b"TAIL"))
    segment.write_bytes(data[:tail].ljust(len(data), b"\0"))
    store = await Store.open(lose_claims(path))
    assert await store.read(1, 1, 1) == ({}, Stop.UNKNOWN, 1)
    assert store.engine.is_in_doubt(1)
    await store.close()


async def test_a_mark_without_room_is_of_listed_entries_until_the_next_start(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "first")
    await store.add(make_block(1, 0, [b"kept"]))

    def full(*_: object) -> None:
        raise DiskFullError("no space left")

    store.engine._accept_change = full  # type: ignore[assignment, method-assign]
    with pytest.raises(DiskFullError):
        store.engine.append_mark(1, print, is_of_listed=True)
    assert (store.engine.is_damaged(1), store.engine.is_in_doubt(1)) == (True, False)
    with pytest.raises(DiskFullError):
        store.engine.append_mark(1, print)
    assert store.engine.is_in_doubt(1)
    del store.engine._accept_change
    await store.close()


async def test_an_index_that_is_rebuilt_marks_the_damage_in_its_segment(tmp_path: Path) -> None:
    path = tmp_path / "first"
    store = await Store.open(path)
    await store.add(make_block(1, 0, [b"PRECIOUS" * 20]))
    await store.add(make_block(2, 0, [b"another" * 20]))
    await store.close()
    (segment,) = (one for one in path.glob("*.segment") if b"PRECIOUS" in one.read_bytes())
    segment.write_bytes(segment.read_bytes().replace(b"PRECIOUS", b"XRECIOUS", 1))
    index = segment.with_suffix(".index")
    store = await Store.open(path)
    data = bytearray(index.read_bytes())
    data[4096 + 9] ^= 1
    index.write_bytes(data)
    assert (await store.read(2, 0, 0))[1] is Stop.END  # which rebuilds the index
    assert (store.engine.is_damaged(1), store.engine.is_in_doubt(1)) == (True, False)
    assert await store.read(1, 0, 0) == ({}, Stop.UNKNOWN, 0)
    assert not store.engine.is_damaged(2)
    await store.close()
