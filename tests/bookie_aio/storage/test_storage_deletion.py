"""Tombstones and locks: what is said once holds from then on, over any restart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bookie_aio.wire.messages import Stop
from metadata.errors import NoSuchLedgerError
from tests.support.storage import FaultyDisk, Store, make_block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from metadata.errors import StorageError

LOCK = bytes(range(32))


async def delete(store: Store, ledger_id: int) -> None:
    await store.wait(lambda done: store.engine.append_tombstone(ledger_id, done))


async def fill_segments(store: Store, ledger_id: int) -> None:
    """Write until the first segment is sealed."""
    for first in range(10):
        await store.add(make_block(ledger_id, first, [b"x" * 12_000]))
    await store.settled()
    assert store.engine._segments.sealed()


async def test_nothing_is_accepted_for_a_deleted_ledger_from_the_first_moment_on(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "a")
    await store.add(make_block(1, 0, [b"kept"]))
    await store.add(make_block(2, 0, [b"dropped"]))
    done: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
    store.engine.append_tombstone(2, done.set_result)
    assert store.engine.is_deleted(2)  # before it is durable
    appends: list[Callable[[], None]] = [
        lambda: store.engine.append_block(make_block(2, 1, [b"late"]), print),
        lambda: store.engine.append_term(2, 5, print),
        lambda: store.engine.append_lock(2, LOCK, print),
        lambda: store.engine.append_mark(2, print),
        lambda: store.engine.append_tombstone(2, print),
    ]
    for append in appends:
        with pytest.raises(NoSuchLedgerError, match="2 has been deleted"):
            append()
    assert await done is None
    assert (store.engine.list_ledgers(0, 10)[0], store.engine.last_entry(2)) == ([1], -1)
    assert (await store.read(1, 0, 0))[0] == {0: b"kept"}
    await store.close()


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
async def test_a_deleted_ledger_stays_deleted_over_restarts(
    tmp_path: Path, is_sealed: bool, is_clean: bool
) -> None:
    store = await Store.open(tmp_path / "a")
    await store.add(make_block(2, 0, [b"kept"]))
    await store.add(make_block(1, 100, [b"dropped"]))
    if is_sealed:
        await fill_segments(store, 1)
    await store.fence(1, 7)
    await delete(store, 1)
    if is_sealed:
        await fill_segments(store, 2)  # the tombstone itself gets into a segment that is not replayed
    path = tmp_path / "a"
    for number in range(3):
        if is_clean:
            await store.close()
        else:
            path = await store.crash_into(tmp_path / f"crash-{number}")
            await store.close()
        store = await Store.open(path)
        assert store.engine.is_deleted(1)
        assert store.engine.list_ledgers(0, 10) == ([2], -1)
        assert store.engine.term(1) == 0
        assert not store.engine.is_damaged(2)
        assert (await store.read(2, 0, 0))[0][0] in (b"kept", b"x" * 12_000)
        assert (await store.read(1, 100, 100))[1] is Stop.NO_SUCH_ENTRY
        with pytest.raises(NoSuchLedgerError):
            store.engine.append_block(make_block(1, 101, [b"late"]), print)
    await store.close()


async def test_a_checkpoint_that_knows_a_tombstone_before_its_group_is_durable_is_no_harm(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "a", disk=disk)
    await store.add(make_block(1, 0, [b"first"]))
    await store.add(make_block(2, 0, [b"kept"]))
    adds = asyncio.get_running_loop().create_future()
    store.engine.append_block(make_block(1, 1, [b"in the last group"]), adds.set_result)
    store.engine.append_tombstone(1, lambda error: None)
    await store.engine._checkpointer.write()
    await adds
    crashed = await store.crash_into(tmp_path / "b")
    await store.close()
    again = await Store.open(crashed)
    assert again.engine.is_deleted(1)
    assert again.engine.list_ledgers(0, 10)[0] == [2]
    await again.close()


async def test_sealing_goes_on_after_a_ledger_of_the_segment_was_deleted(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "a")
    await store.add(make_block(1, 0, [b"dropped"]))
    await delete(store, 1)
    await fill_segments(store, 2)
    assert not store.failures
    assert len((await store.read(2, 0, 9))[0]) == 10
    await store.close()


@pytest.mark.parametrize("is_clean", [False, True])
async def test_a_lock_holds_over_restarts(tmp_path: Path, is_clean: bool) -> None:
    store = await Store.open(tmp_path / "a")
    await store.wait(lambda done: store.engine.append_lock(1, LOCK, done))
    await store.add(make_block(1, 0, [b"behind the lock"]))
    await store.add(make_block(2, 0, [b"open"]))
    path = tmp_path / "a"
    for number in range(3):
        if is_clean:
            await store.close()
        else:
            path = await store.crash_into(tmp_path / f"crash-{number}")
            await store.close()
        store = await Store.open(path)
        assert (store.engine.lock(1), store.engine.lock(2), store.engine.lock(3)) == (LOCK, b"", b"")
        assert (await store.read(1, 0, 0))[0] == {0: b"behind the lock"}
        await store.fence(3, 1)
    await store.close()
