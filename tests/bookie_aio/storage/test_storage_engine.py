"""What the engine promises to the server, on a real disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import pytest

from bookie_aio.storage.config import StorageConfig
from bookie_aio.wire.blocks import Block, LacStatement, statement_crc
from bookie_aio.wire.messages import Stop
from metadata.errors import DirectoryInUseError, EntryTooLargeError, NoSuchLedgerError, StorageError
from tests.support.storage import SMALL, Store, make_block

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "b1")
    yield store
    await store.close()


async def test_an_entry_is_readable_when_its_done_is_called_and_not_before(store: Store) -> None:
    seen: list[int] = []
    done = asyncio.get_running_loop().create_future()

    def note(error: StorageError | None) -> None:
        seen.append(store.engine.last_entry(7))
        done.set_result(error)

    store.engine.append_block(make_block(7, 0, [b"a", b"b"]), note)
    assert store.engine.last_entry(7) == -1
    assert store.engine.is_pending(7)
    assert await store.read(7, 0, 1) == ({}, Stop.NO_SUCH_ENTRY, 0)
    assert await done is None
    assert seen == [1]
    assert not store.engine.is_pending(7)
    assert await store.read(7, 0, 1) == ({0: b"a", 1: b"b"}, Stop.END, 2)


async def test_ledgers_that_moved_are_told_before_the_dones(store: Store) -> None:
    order: list[object] = []
    store.engine._on_indexed = lambda ledgers: order.append(set(ledgers))
    for ledger_id in (1, 2):
        store.engine.append_block(make_block(ledger_id, 0, [b"x"]), lambda _: order.append("done"))
    await store.barrier()
    assert order == [{1, 2}, "done", "done"]


async def test_what_arrives_during_a_sync_becomes_one_group(store: Store) -> None:
    store.engine.append_block(make_block(1, 0, [b"first"]), lambda _: None)
    await asyncio.sleep(0)  # the first group is in flight now
    for entry in range(1, 50):
        store.engine.append_block(make_block(1, entry, [b"x"]), lambda _: None)
    await store.barrier()
    groups = store.engine.metrics()["groups"]
    assert isinstance(groups, dict)
    assert groups["count"] == 2


async def test_a_barrier_with_nothing_pending_is_called_at_once(store: Store) -> None:
    called: list[StorageError | None] = []
    store.engine.barrier(called.append)
    assert called == [None]


async def test_a_barrier_waits_for_the_group_in_flight(store: Store) -> None:
    order: list[str] = []
    store.engine.append_block(make_block(1, 0, [b"x"]), lambda _: order.append("add"))
    await asyncio.sleep(0)
    store.engine.barrier(lambda _: order.append("barrier"))
    assert order == []
    await store.barrier()
    assert order == ["add", "barrier"]


async def test_a_barrier_behind_a_block_larger_than_a_group_waits_for_it(store: Store) -> None:
    await store.settled()
    seen: list[int] = []
    store.engine.append_block(make_block(1, 0, [b"first"]), lambda _: None)
    await asyncio.sleep(0)  # in flight; what follows is the next group
    store.engine.append_block(make_block(1, 1, [b"x" * (SMALL.group_bytes_max + 1)]), lambda _: None)
    store.engine.barrier(lambda _: seen.append(store.engine.last_entry(1)))
    await store.barrier()
    assert seen == [1]


async def test_a_callback_that_fails_keeps_nobody_else_from_hearing(store: Store) -> None:
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["exception"]))
    broken = ValueError("broken")

    def fail(_: StorageError | None) -> None:
        raise broken

    store.engine.append_block(make_block(1, 0, [b"x"]), fail)
    store.engine.append_block(make_block(1, 1, [b"x"]), heard.append)
    await store.barrier()
    assert heard == [broken, None]
    assert not store.failures


async def test_a_term_counts_when_it_is_accepted(store: Store) -> None:
    done = asyncio.get_running_loop().create_future()
    store.engine.append_term(9, 5, done.set_result)
    assert store.engine.term(9) == 5
    assert store.engine.is_pending(9)
    assert await done is None
    assert store.engine.term(8) == 0


async def test_the_highest_lac_statement_is_kept(store: Store) -> None:
    await store.add(make_block(3, 10, [b"x"], lac=8))
    await store.add(make_block(3, 11, [b"x"], lac=5))
    found = store.engine.statement(3)
    assert found is not None
    assert found.lac == 8
    mac = bytes(range(32))
    explicit = LacStatement(0, 11, 4, statement_crc(3, 0, 11, 4), mac)
    await store.wait(lambda done: store.engine.append_statement(3, explicit, done))
    assert store.engine.statement(3) == explicit
    await store.close()
    again = await Store.open(store.path)
    assert again.engine.statement(3) == explicit
    await again.close()


async def test_a_higher_content_term_wins_and_a_lower_one_is_no_such_entry(store: Store) -> None:
    await store.add(make_block(1, 0, [b"old"] * 4, content_term=1))
    await store.add(make_block(1, 2, [b"new"], content_term=2, lac=-1))
    await store.add(make_block(1, 2, [b"late"], content_term=1, lac=-1))
    assert await store.read(1, 0, 3, content_term=1) == ({0: b"old", 1: b"old"}, Stop.STALE_METADATA, 2)
    assert await store.read(1, 2, 2, content_term=2) == ({2: b"new"}, Stop.END, 3)
    assert await store.read(1, 3, 3, content_term=2) == ({}, Stop.NO_SUCH_ENTRY, 3)


async def test_the_newest_copy_wins_within_a_content_term(store: Store) -> None:
    await store.add(make_block(1, 0, [b"one"] * 5))
    await store.add(make_block(1, 2, [b"two"], lac=-1))
    found, stop, _ = await store.read(1, 0, 4)
    assert stop == Stop.END
    assert [found[n] for n in range(5)] == [b"one", b"one", b"two", b"one", b"one"]


async def test_whole_blocks_come_back_verbatim(store: Store) -> None:
    blocks = [make_block(1, first, [b"x" * 100] * 10) for first in (0, 10)]
    for block in blocks:
        await store.add(block)
    found = await store.engine.read(1, 0, range(20), 10**6)
    assert [bytes(buffer) for buffer in found.buffers] == [bytes(block.view) for block in blocks]


async def test_a_budget_cuts_a_block_and_gives_one_entry_at_least(store: Store) -> None:
    await store.add(make_block(1, 0, [bytes([n]) * 1000 for n in range(10)]))
    found, stop, at = await store.read(1, 0, 9, budget=3500)
    assert (sorted(found), stop, at) == ([0, 1, 2], Stop.BUDGET, 3)
    found, stop, at = await store.read(1, 4, 9, budget=1)
    assert (found, stop, at) == ({4: bytes([4]) * 1000}, Stop.BUDGET, 5)
    cut = await store.engine.read(1, 0, range(4, 10), 3500)
    assert sum(map(len, cut.buffers)) <= 3500
    assert Block.parse(memoryview(b"".join(cut.buffers))).is_partial


async def test_striped_blocks_are_read_by_their_stride(store: Store) -> None:
    for residue in (0, 1):
        await store.add(
            make_block(1, residue, [b"%d" % (residue + 3 * n) for n in range(4)], stride=3, lac=-1)
        )
    assert await store.read(1, 1, 10, stride=3) == ({n: b"%d" % n for n in (1, 4, 7, 10)}, Stop.END, 13)
    assert await store.read(1, 0, 10) == ({0: b"0", 1: b"1"}, Stop.NO_SUCH_ENTRY, 2)


async def test_empty_entries_and_an_empty_range(store: Store) -> None:
    await store.add(make_block(1, 0, [b"", b""]))
    assert await store.read(1, 0, 1) == ({0: b"", 1: b""}, Stop.END, 2)
    assert await store.read(1, 1, 1) == ({1: b""}, Stop.END, 2)
    assert await store.read(1, 0, -1) == ({}, Stop.END, 0)


async def test_many_copies_of_one_block_are_one_run(store: Store) -> None:
    for _ in range(200):
        store.engine.append_block(make_block(1, 5, [b"same"] * 3), lambda _: None)
    await store.barrier()
    assert await store.read(1, 5, 7) == ({5: b"same", 6: b"same", 7: b"same"}, Stop.END, 8)
    assert await store.engine.list_entries(1, 0, 10) == ([(5, 0, 3, 1)], -1)


async def test_runs_are_listed_page_by_page(store: Store) -> None:
    for first in range(0, 4000, 20):  # with holes, over several segments
        store.engine.append_block(make_block(1, first, [b"x" * 50] * 10), lambda _: None)
    await store.barrier()
    await store.settled()
    listed, at = [], 0
    while at >= 0:
        rows, at = await store.engine.list_entries(1, at, 7)
        assert len(rows) <= 7
        listed += rows
    assert listed == [(first, 0, 10, 1) for first in range(0, 4000, 20)]
    assert await store.engine.list_entries(1, 3985, 10) == ([(3985, 0, 5, 1)], -1)


async def test_ledgers_are_listed_page_by_page(store: Store) -> None:
    for ledger_id in (5, 1, 9, 7):
        await store.fence(ledger_id, 1)
    assert store.engine.list_ledgers(0, 2) == ([1, 5], 7)
    assert store.engine.list_ledgers(7, 2) == ([7, 9], -1)


async def test_a_directory_is_open_once(store: Store) -> None:
    with pytest.raises(DirectoryInUseError):
        await Store.open(store.path)


async def test_a_block_larger_than_a_segment_is_refused(store: Store) -> None:
    with pytest.raises(EntryTooLargeError):
        store.engine.append_block(make_block(1, 0, [b"x" * SMALL.segment_bytes]), lambda _: None)


async def test_a_block_larger_than_a_group_goes_alone(store: Store) -> None:
    await store.add(make_block(1, 0, [b"x" * 50_000]))
    assert await store.read(1, 0, 0) == ({0: b"x" * 50_000}, Stop.END, 1)


async def test_sealed_segments_serve_what_they_held(store: Store) -> None:
    for first in range(0, 2000, 10):
        for ledger_id in (1, 2):
            block = make_block(
                ledger_id, first, [b"%d/%d" % (ledger_id, n) * 8 for n in range(first, first + 10)]
            )
            store.engine.append_block(block, lambda _: None)
    await store.barrier()
    await store.settled()
    assert store.engine._segments.by_id[1].index is None
    for ledger_id in (1, 2):
        found, stop, _ = await store.read(ledger_id, 0, 1999)
        assert stop == Stop.END
        assert found == {n: b"%d/%d" % (ledger_id, n) * 8 for n in range(2000)}
    assert await store.read(3, 0, 0) == ({}, Stop.NO_SUCH_ENTRY, 0)


async def test_figures_can_be_shown(store: Store) -> None:
    await store.add(make_block(1, 0, [b"x"]))
    figures = store.engine.metrics()
    assert figures["is_writable"] is True
    groups, sync = figures["groups"], figures["fsync_us"]
    assert isinstance(groups, dict)
    assert isinstance(sync, dict)
    assert (groups["count"], groups["records"]) == (1, 1)
    assert 0 < sync["p50"] <= sync["max"]


async def test_closing_finishes_what_was_accepted(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    done: list[StorageError | None] = []
    for entry in range(100):
        store.engine.append_block(make_block(1, entry, [b"x"]), done.append)
    await store.close()
    assert done == [None] * 100
    again = await Store.open(tmp_path / "b1")
    assert len((await again.read(1, 0, 99))[0]) == 100
    await again.close()


def test_the_defaults_hold_the_largest_frame() -> None:
    config = StorageConfig()
    assert config.space.reserve_bytes // 8 * 7 > 5 * 1024 * 1024


def together(*blocks: Block) -> tuple[list[Block], bytes]:
    return list(blocks), b"".join([block.view for block in blocks])


async def test_the_blocks_of_a_record_are_durable_and_readable_together(store: Store) -> None:
    heard: list[tuple[int, int, StorageError | None]] = []
    engine = store.engine

    def note(error: StorageError | None) -> None:
        heard.append((engine.last_entry(1), engine.last_entry(2), error))

    engine.append_blocks(
        *together(make_block(1, 0, [b"a"]), make_block(2, 5, [b"b"]), make_block(1, 1, [b"c"])), note
    )
    assert engine.is_pending(1)
    assert engine.is_pending(2)
    assert await store.read(1, 0, 9) == ({}, Stop.NO_SUCH_ENTRY, 0)
    await store.barrier()
    assert heard == [(1, 5, None)]
    assert not engine.is_pending(1)
    assert not engine.is_pending(2)
    assert await store.read(1, 0, 9) == ({0: b"a", 1: b"c"}, Stop.NO_SUCH_ENTRY, 2)
    assert await store.read(2, 5, 5) == ({5: b"b"}, Stop.END, 6)
    statement = engine.statement(2)
    assert statement is not None
    assert statement.lac == 4
    groups = engine.metrics()["groups"]
    assert isinstance(groups, dict)
    assert (groups["count"], groups["records"]) == (1, 3)


async def test_a_record_with_a_block_of_a_deleted_ledger_is_accepted_not_at_all(store: Store) -> None:
    await store.wait(lambda done: store.engine.append_tombstone(2, done))
    blocks = together(make_block(1, 0, [b"a"]), make_block(2, 0, [b"b"]), make_block(3, 0, [b"c"]))
    with pytest.raises(NoSuchLedgerError):
        store.engine.append_blocks(*blocks, lambda _: None)
    assert not store.engine.is_pending(1)
    store.engine.append_block(make_block(1, 0, [b"x"]), lambda _: None)
    await store.barrier()
    assert not store.engine.is_pending(1)
    assert await store.read(1, 0, 0) == ({0: b"x"}, Stop.END, 1)
    assert await store.read(3, 0, 0) == ({}, Stop.NO_SUCH_ENTRY, 0)


async def test_adds_of_a_record_are_seen_by_those_who_watch_for_adds(store: Store) -> None:
    class Watch:
        seen: ClassVar[list[int]] = []

        def note(self, block: Block) -> None:
            self.seen.append(block.ledger_id)

        def note_forget(self, ledger_id: int) -> None:
            raise AssertionError(ledger_id)

    watch = Watch()
    store.engine.add_watches.add(watch)
    store.engine.eviction_candidates.update({1, 2, 3})
    store.engine.append_blocks(*together(make_block(1, 0, [b"a"]), make_block(2, 0, [b"b"])), lambda _: None)
    assert watch.seen == [1, 2]
    assert store.engine.eviction_candidates == {3}
    await store.barrier()
