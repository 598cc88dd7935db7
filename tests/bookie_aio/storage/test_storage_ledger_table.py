"""The table of ledgers: states that rest there are what they were, through rewriting, restarts and damage."""

from __future__ import annotations

import dataclasses
import operator
import struct
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.storage.disk.disk import RealDisk, RealFile
from bookie_aio.storage.ledgers.checkpoint import IdRanges, LedgerState, pack_state, unpack_state
from bookie_aio.storage.ledgers.ledger_table import LedgerTable, PackedTable
from bookie_aio.storage.segment import format as form
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFullError
from tests.support.storage import SMALL, Store, make_block

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.storage.config import StorageConfig

IDS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), IDS, st.integers(1, 2**63 - 1)),
        st.tuples(st.just("delete"), IDS, st.just(0)),
        st.tuples(st.just("table"), IDS, st.integers(0, 12)),
    ),
    max_size=40,
)


def look(states: LedgerTable, ids: range) -> dict[int, bytes]:
    found = ((one, states.get(one)) for one in ids)
    return {one: pack_state(one, state) for one, state in found if state is not None}


@given(STEPS)
def test_states_are_the_same_whether_they_live_or_rest(steps: list[tuple[str, int, int]]) -> None:
    deleted = IdRanges()
    states = LedgerTable(deleted)
    model: dict[int, int] = {}
    gone: set[int] = set()
    for number, (kind, one, value) in enumerate(steps, 1):
        if kind == "change" and one not in gone:
            state = states.make(one)
            state.term, state.marked, state.lock = value, value & 1, bytes(32 * (value & 2) // 2)
            model[one] = value
        elif kind == "delete" and model.pop(one, None) is not None:
            gone.add(one)
            deleted.add(one)
            states.remove(one)
        elif kind == "table":
            packed = {each: pack_state(each, state) for each, state in states.live.items()}
            if value in model and value % 2:  # changes between the packing and the going over
                states.make(value).term = model[value] = 7
            elif value in model:  # and is deleted
                states.make(value)
                del model[value]
                gone.add(value)
                deleted.add(value)
                states.remove(value)
            made = PackedTable(number)
            for part in states.new_rows(packed):
                made.extend(part)
            parsed = PackedTable.parse(number, 3, b"".join(made.encode(3)))
            assert (parsed.ids, parsed.damaged) == (made.ids, made.damaged)
            states.use_table(parsed)
            # One of them has something on its way to the disk.
            pending = states.live.get(one)
            states.evict_unchanged(list(states.live), partial(operator.is_, pending))
            assert states.live.get(one) is pending
        assert list(states.ids_from(0)) == sorted(model)
        assert list(states.ids_from(5)) == sorted(each for each in model if each >= 5)
        assert len(states) == len(model)
        anew = LedgerTable(deleted)
        anew.load(dict(states.live), states._table, 0)
        anew.count()
        assert len(anew) == len(model)
        found = {each: states.get(each) for each in range(13)}
        assert {each: state.term for each, state in found.items() if state is not None} == model
        assert states.damaged_count == sum(state.is_marked for state in found.values() if state is not None)


@pytest.mark.parametrize("last_entry", [-1, 5])
def test_a_ledger_that_was_evicted_before_rows_said_so_is_known_for_one(last_entry: int) -> None:
    state = LedgerState()
    state.since, state.last_entry = 3, last_entry
    assert unpack_state(pack_state(1, state)).was_evicted is (last_entry < 0)
    state.was_evicted = True
    assert unpack_state(pack_state(1, state)).was_evicted


def test_a_large_table_is_made_in_small_parts_and_holds_what_is_left() -> None:
    deleted = IdRanges()
    states = LedgerTable(deleted)
    empty = pack_state(0, LedgerTable(deleted).make(0))
    table = PackedTable(1)
    for one in range(0, 4000, 2):
        table.extend(struct.pack("<Q", one) + empty[8:])
    states.load({}, table, 1)
    for one in [*range(1000, 1100), 2024, *range(3990, 4000)]:
        deleted.add(one)
    states.count()
    for one in (7, 600, 3001, 5000):
        states.make(one).marked = 9
    packed = {one: pack_state(one, state) for one, state in states.live.items()}
    parts = list(states.new_rows(packed))
    assert max(map(len, parts)) < 166 * 512
    made = PackedTable(2)
    for part in parts:
        made.extend(part)
    wanted = [one for one in sorted({*range(0, 4000, 2), 7, 3001, 5000}) if one not in deleted]
    assert list(made.ids) == list(states.ids_from(0)) == wanted
    assert len(states) == len(wanted)
    assert made.damaged == {7, 600, 3001, 5000}
    states.use_table(made)
    states.evict_unchanged(list(states.live), lambda state: False)
    assert (len(states), states.damaged_count, len(states.live)) == (len(wanted), 4, 0)


def state_of(store: Store, ledger_id: int) -> tuple[object, ...]:
    engine = store.engine
    return (
        engine.term(ledger_id), engine.lock(ledger_id), engine.is_damaged(ledger_id),
        engine.last_entry(ledger_id), engine.statement(ledger_id), engine.first_entry(ledger_id),
    )  # fmt: skip


def tables(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.name.endswith(form.TABLE_SUFFIX))


async def leave_fences(path: Path, config: StorageConfig = SMALL) -> None:
    """Have a bookie hold term 9 of twenty ledgers, and end well."""
    store = await Store.open(path, config)
    for one in range(20):
        await store.fence(one, 9)
    await store.close()


async def test_what_rests_in_a_table_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "data"
    store = await Store.open(path)
    engine = store.engine
    for one in range(40):
        await store.add(make_block(one, 0, [b"%d" % one] * 3))
        await store.fence(one, 100 + one)
    await store.wait(lambda done: engine.append_lock(3, bytes(range(32)), done))
    await store.wait(lambda done: engine.append_mark(4, done))
    await store.wait(lambda done: engine.append_trim(5, 2, done))
    await store.wait(lambda done: engine.append_tombstone(6, done))
    before = {one: state_of(store, one) for one in range(40)}
    assert before[39][0] == 139
    for turn in range(4):
        await store.close()
        assert len(tables(path)) == 1
        store = await Store.open(path)
        assert len(store.engine._ledgers.states.live) <= 11 + turn  # the others rest
        assert {one: state_of(store, one) for one in range(40)} == before
        ids, following = store.engine.list_ledgers(0, 30)
        assert (ids, following) == ([one for one in range(31) if one != 6], 31)
        assert len(store.engine._ledgers.states) == 39
        assert store.engine._ledgers.states.damaged_count == 1
        # One is taken out of its rest, and goes back with what has changed.
        await store.add(make_block(10 + turn, 3, [b"more"]))
        await store.fence(10 + turn, 1000 + turn)
        before[10 + turn] = state_of(store, 10 + turn)
        assert before[10 + turn][:1] + before[10 + turn][3:4] == (1000 + turn, 3)
    await store.close()


@pytest.mark.parametrize("harm", ["missing", "flipped", "cut"])
async def test_a_lost_table_is_known_to_be_lost(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "data"
    await leave_fences(path)
    (name,) = tables(path)
    data = bytearray((path / name).read_bytes())
    if harm == "missing":
        (path / name).unlink()
    else:
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data if harm == "flipped" else data[:-1])
    store = await Store.open(path)
    assert store.engine.marking.concerns_all
    assert not store.engine.is_writable
    assert store.engine.is_damaged(1)
    await store.close()


@pytest.mark.parametrize("harm", ["missing", "flipped"])
async def test_the_entries_of_ledgers_in_a_lost_table_are_still_there(tmp_path: Path, harm: str) -> None:
    """The indexes name them; what nobody knew of was taken for deleted, and its segments given up."""
    path = tmp_path / "data"
    store = await Store.open(path)
    for first in range(0, 120, 10):
        for one in range(20):
            await store.add(make_block(one, first, [b"%d" % one * 30] * 10))
    await store.close()
    await (await Store.open(path)).close()  # most ledgers rest in the table by now
    segments = {one.name for one in path.iterdir() if one.name.endswith(form.SEGMENT_SUFFIX)}
    assert len(segments) > 3
    (name,) = tables(path)
    data = bytearray((path / name).read_bytes())
    if harm == "missing":
        (path / name).unlink()
    else:
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)
    store = await Store.open(path)
    assert store.engine.marking.concerns_all
    await store.settled()
    assert segments <= {one.name for one in path.iterdir()}
    assert [(await store.read(one, 0, 119))[1] for one in range(20)] == [Stop.END] * 20
    await store.close()


async def test_a_table_that_no_checkpoint_names_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    await leave_fences(path)
    assert len(tables(path)) == 1
    (path / form.table_name(77)).write_bytes(b"left over by a crash")
    store = await Store.open(path)
    await store.settled()
    assert form.table_name(77) not in tables(path)
    assert store.engine.term(19) == 9
    await store.close()
    assert len(tables(path)) == 1


async def test_a_table_never_gets_the_name_of_one_that_is_to_be_removed(tmp_path: Path) -> None:
    """The next start removed the new one, which had come under the name of what a crash had left over."""
    path = tmp_path / "data"
    await leave_fences(path, dataclasses.replace(SMALL, live_ledgers_max=1000))
    (path / form.table_name(1)).write_bytes(b"left over by a crash")
    for _ in range(2):
        store = await Store.open(path)
        assert not store.engine.notes
        assert [store.engine.term(one) for one in range(20)] == [9] * 20
        await store.settled()
        await store.close()
    assert tables(path) not in ([], [form.table_name(1)])


async def test_a_table_leaves_its_space_to_the_checkpoint(tmp_path: Path) -> None:
    class TightDisk(RealDisk):
        """Has room for a checkpoint, or for a new table, not for both."""

        is_tight = False

        async def create(self, path: str) -> RealFile:
            if self.is_tight and form.CHECKPOINT in path and len(tables(tmp_path / "data")) > 1:
                raise DiskFullError("no space left")
            return await super().create(path)

    disk = TightDisk()
    store = await Store.open(tmp_path / "data", disk=disk)
    for one in range(20):
        await store.fence(one, 9)
    await store.engine._checkpointer.write()
    (name,) = tables(tmp_path / "data")
    for one in range(20):
        await store.fence(one, 10)
    disk.is_tight = True
    await store.engine._checkpointer.write()
    assert tables(tmp_path / "data") == [name]
    disk.is_tight = False
    await store.close()
    store = await Store.open(tmp_path / "data")
    assert {store.engine.term(one) for one in range(20)} == {10}
    await store.close()


async def test_a_checkpoint_counts_although_the_table_before_is_not_surely_removed(tmp_path: Path) -> None:
    """The segment that it lists was given up as if it had not been listed: after a crash, as one lost."""

    class ShortDisk(RealDisk):
        """Has no descriptor left for the directory just when a table was removed."""

        is_short = False
        refusals = 0

        async def unlink(self, path: str) -> None:
            await super().unlink(path)
            self.is_short = path.endswith(form.TABLE_SUFFIX)

        async def sync_directory(self, path: str) -> None:
            if self.is_short:
                self.is_short = False
                self.refusals += 1
                raise DiskFullError("too many open files")
            await super().sync_directory(path)

    disk = ShortDisk()
    store = await Store.open(tmp_path / "data", disk=disk)
    await store.settled()
    for one in range(20):
        await store.fence(one, 9)
    await store.engine._checkpointer.write()
    for one in range(20):
        await store.fence(one, 10)
    taken = store.engine._allocator.take()  # another one is prepared, and listed with a new table
    assert taken is not None
    store.engine._segments.add(taken)
    await store.settled()
    assert (disk.refusals, store.writable) == (1, [])
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    assert (list(again.engine.notes), again.engine.marking.concerns_all) == ([], False)
    assert [again.engine.term(one) for one in range(20)] == [10] * 20
    await again.close()


async def test_few_ledgers_need_no_table(tmp_path: Path) -> None:
    path = tmp_path / "data"
    await leave_fences(path, dataclasses.replace(SMALL, live_ledgers_max=1000))
    assert tables(path) == []


async def test_what_states_no_lac_states_none_after_any_start_either(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.add(make_block(1, 5, [b"x"], lac=4))
    far = make_block(1, 10**6, [b"junk"], lac=10**6 - 1)
    await store.wait(lambda done: store.engine.append_block(far, done, states_lac=False))
    # Nor does a copy that compaction makes: what the original stated is known.
    await store.wait(lambda done: store.engine.append_copy(make_block(2, 7, [b"copy"], lac=6), done))
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    for path in (tmp_path / "b1", crashed, crashed):
        again = await Store.open(path)
        statement = again.engine.statement(1)
        assert statement is not None
        assert (statement.lac, again.engine.statement(2)) == (4, None)
        assert (await again.read(1, 10**6, 10**6))[0] == {10**6: b"junk"}
        await again.close()
