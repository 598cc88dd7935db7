"""The pool of connections, when it is closed while some are being made, and the quarantine of bookies."""

from __future__ import annotations

import asyncio

import pytest

from bookie_aio.wire.frames import HANDSHAKE_FRAME_BYTES_MAX
from client_aio.bookies.pool import BookieDirectory, BookiePool, Quarantine
from client_aio.config import ClientConfig
from metadata.access.bookies import DRAINING, BookieRecord, Order, change_order, retire
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import BookieReadOnlyError, ClientClosedError, MetadataError
from metadata.ids import KEY_AVAILABLE

WAIT_S = 5.0


async def test_closing_ends_connections_whose_handshake_is_under_way_and_says_so() -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say nothing, as a bookie that is stopped."""
        await reader.read(HANDSHAKE_FRAME_BYTES_MAX)
        arrived.set()
        try:
            await reader.read()
        except ConnectionResetError:
            pass
        finally:
            ended.set()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    store = MemoryMetadataStore(MemoryTree())
    try:
        port = server.sockets[0].getsockname()[1]
        record = BookieRecord("b1", [f"127.0.0.1:{port}"], "nonce")
        await store.create(f"{KEY_AVAILABLE}/b1", record.to_json())
        config = ClientConfig(connect_timeout_s=60.0)
        directory = BookieDirectory(store, config)
        await directory.refresh()
        pool = BookiePool(directory, config, "instance")
        getting = [asyncio.create_task(pool.get("b1")) for _ in range(2)]
        await asyncio.wait_for(arrived.wait(), WAIT_S)
        await pool.close()
        for task in getting:
            with pytest.raises(ClientClosedError):
                await asyncio.wait_for(task, WAIT_S)
        await asyncio.wait_for(ended.wait(), WAIT_S)
    finally:
        server.close()
        await store.close()


async def test_a_bookie_that_refuses_adds_and_one_with_an_order_are_no_candidates() -> None:
    store = MemoryMetadataStore(MemoryTree())
    for name in ("b1", "b2"):
        await store.create(f"{KEY_AVAILABLE}/{name}", BookieRecord(name, ["h:1"], "nonce").to_json())
    directory = BookieDirectory(store, ClientConfig())
    told = []
    try:
        await directory.start()
        directory.tell_of_orders("test", lambda: told.append(directory.orders.by_bookie))
        directory.note_refusal("b1", BookieReadOnlyError("read-only"))
        assert [directory.available[name].is_writable for name in ("b1", "b2")] == [False, True]
        await change_order(store, "b2", lambda _: Order(DRAINING))
        async with asyncio.timeout(WAIT_S):
            while not told:
                await directory.wait_for_change(WAIT_S)
        # The record is read again, and does not say so any more.
        assert [directory.available[name].is_writable for name in ("b1", "b2")] == [True, False]
        assert (told, directory.orders.leaving) == ([{"b2": Order(DRAINING)}], ["b2"])
        directory._read_at -= 1000.0
        before = directory.available
        directory.refresh_soon()
        await directory.wait_for_change(WAIT_S)
        assert directory.available is not before
    finally:
        await directory.close()
        await store.close()


def test_quarantine_ends_with_its_time_and_is_prolonged_by_another_failure() -> None:
    quarantine = Quarantine(10.0)
    quarantine.note_failure("a", 100.0)
    quarantine.note_failure("b", 101.0)
    assert quarantine.members(109.9) == ["a", "b"]
    assert quarantine.members(110.0) == ["b"]
    quarantine.note_failure("a", 110.5)
    quarantine.note_failure("c", 110.6)
    quarantine.note_failure("a", 110.7)
    assert quarantine.members(111.0) == ["c", "a"]
    assert quarantine.members(120.65) == ["a"]
    assert quarantine.members(120.7) == []


async def test_a_bookie_that_is_down_is_known_until_it_has_left() -> None:
    store = MemoryMetadataStore(MemoryTree())
    registration = await store.register(f"{KEY_AVAILABLE}/b1", BookieRecord("b1", ["h:1"], "n").to_json())
    directory = BookieDirectory(store, ClientConfig())
    await directory.refresh()
    await registration.close()
    await directory.refresh()
    assert (list(directory.available), list(directory.last_known)) == ([], ["b1"])
    await retire(store, "b1")
    await directory.refresh()
    assert directory.last_known == {}
    await store.close()


async def test_a_bookie_that_has_left_and_registers_once_more_is_not_available() -> None:
    """It was cut off from the metadata store while it was drained, and does not know yet that it has left."""
    store = MemoryMetadataStore(MemoryTree())
    await retire(store, "b1")
    for name in ("b1", "b2"):
        await store.register(f"{KEY_AVAILABLE}/{name}", BookieRecord(name, [f"{name}:1"], "n").to_json())
    directory = BookieDirectory(store, ClientConfig())
    await directory.refresh()
    assert (list(directory.available), list(directory.last_known)) == (["b2"], ["b2"])
    await store.close()


async def test_those_who_read_the_registrations_at_once_share_a_read() -> None:
    store = MemoryMetadataStore(MemoryTree())
    directory = BookieDirectory(store, ClientConfig())
    reads = []
    children = store.children

    async def counted(key: str) -> list[str]:
        reads.append(key)
        return await children(key)

    store.children = counted  # type: ignore[method-assign]
    now = asyncio.get_running_loop().time
    await asyncio.gather(*(directory.refresh_since(now()) for _ in range(10)))
    assert reads.count(KEY_AVAILABLE) == 1
    await directory.refresh_since(now() - WAIT_S)
    assert reads.count(KEY_AVAILABLE) == 1
    await directory.refresh()
    assert reads.count(KEY_AVAILABLE) == 2
    await directory.close()
    await store.close()


async def test_a_shared_read_begins_no_earlier_than_those_who_share_it_ask_for() -> None:
    """A bookie that registers while a read is under way, or just behind one, is found by the next call."""
    store = MemoryMetadataStore(MemoryTree())
    directory = BookieDirectory(store, ClientConfig())
    now, children = asyncio.get_running_loop().time, store.children
    is_read, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(key: str) -> list[str]:
        found = await children(key)
        is_read.set()
        await goes_on.wait()
        return found

    async def register(name: str) -> None:
        await store.register(f"{KEY_AVAILABLE}/{name}", BookieRecord(name, [f"{name}:1"], "n").to_json())

    store.children = slow  # type: ignore[method-assign]
    earlier = asyncio.create_task(directory.refresh_since(now()))
    await is_read.wait()
    await register("b1")
    store.children = children  # type: ignore[method-assign]
    async with asyncio.timeout(WAIT_S):
        await directory.refresh_since(now())
    assert list(directory.available) == ["b1"]
    goes_on.set()
    await earlier
    assert list(directory.available) == ["b1"]
    await register("b2")
    await directory.refresh_since(now())
    assert list(directory.available) == ["b1", "b2"]
    await directory.close()
    await store.close()


async def test_a_shared_read_that_was_cancelled_before_it_began_is_not_shared_any_more() -> None:
    """An application may cancel all tasks of its loop, those of its client too."""
    store = MemoryMetadataStore(MemoryTree())
    directory = BookieDirectory(store, ClientConfig())
    asking = asyncio.create_task(directory.refresh_since(0.0))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asking, asyncio.current_task()}:
        task.cancel()
    with pytest.raises(MetadataError, match="try again"):
        await asking
    await store.register(f"{KEY_AVAILABLE}/b1", BookieRecord("b1", ["b1:1"], "n").to_json())
    await directory.refresh_since(0.0)
    assert list(directory.available) == ["b1"]
    await directory.close()
    await store.close()


async def test_a_wait_ends_only_where_something_has_changed() -> None:
    store = MemoryMetadataStore(MemoryTree())
    directory = BookieDirectory(store, ClientConfig())
    await directory.refresh()
    waiting = asyncio.create_task(directory.wait_for_change(WAIT_S))
    for _ in range(3):
        await directory.refresh()
        await asyncio.sleep(0)
    assert not waiting.done()
    await store.register(f"{KEY_AVAILABLE}/b1", BookieRecord("b1", ["h:1"], "n").to_json())
    await directory.refresh()
    await waiting
    await store.close()
