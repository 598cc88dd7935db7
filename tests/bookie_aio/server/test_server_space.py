"""Out of space is foreseen; a failing disk is the end (rule 2)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from bookie_aio.metrics import RequestMetrics
from bookie_aio.server.responder import Responder
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import Space
from bookie_aio.storage.segment.allocator import SpaceLimits
from bookie_aio.structured_logging import RepeatedWarnings
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser
from bookie_aio.wire.messages import (
    NO_TERM,
    AddFlag,
    Failure,
    Force,
    Op,
    Ping,
    Read,
    ReadLac,
    Status,
    decode_answer,
)
from metadata.access.bookies import (
    DRAINING,
    READ_ONLY,
    REMOVED,
    Order,
    available_bookies,
    change_order,
    retire,
)
from metadata.backends.memory import MemoryMetadataStore
from metadata.errors import CookieMismatchError, DiskFailedError, DiskFullError
from metadata.ids import KEY_ORDERS, TERM_FINAL, cookie_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from bookie_aio.server.responder import Peer
    from bookie_aio.storage.engine import Engine
    from metadata.store import Registration
    from tests.bookie_aio.server.conftest import Bookies

KIB = 1024
WAIT_S = 10


async def is_announced_writable(bookies: Bookies, expected: bool) -> None:
    """Wait until clients are told so."""
    store = bookies.store()
    watch = store.watch("bookies/available/b1")
    async for _ in watch:
        if (await available_bookies(store))["b1"].is_writable is expected:
            break
    await store.close()


async def test_a_full_disk_makes_the_bookie_read_only_but_for_fences_and_recovery(bookies: Bookies) -> None:
    disk = bookies.disk()
    storage = StorageConfig(segment_bytes=256 * KIB, space=SpaceLimits(reserve_bytes=256 * KIB, retry_s=0.05))
    bookie = await bookies.start(disk=disk, storage=storage)
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"before"])).status is Status.OK
    disk.is_full = True
    entry_id = 1
    while (await client.add(7, entry_id, [bytes(16 * KIB)])).status is Status.OK:
        entry_id += 1
        assert entry_id < 100
    assert (await client.add(7, entry_id, [b"x"])).status is Status.READ_ONLY
    # The reserve is for ledgers that would be lost without it; a repair finds another bookie.
    assert (await client.add(7, entry_id, [b"x"], flags=AddFlag.REPAIR)).status is Status.READ_ONLY
    await asyncio.wait_for(is_announced_writable(bookies, False), 5)
    assert (await client.call(Read(7, NO_TERM, 0, 0, 0, 1, KIB))).entries == [(0, b"before")]
    assert (await client.call(ReadLac(7, TERM_FINAL, -1, 0))).status is Status.OK
    rescued = client.add(7, entry_id, [b"rescued"], term=TERM_FINAL, flags=AddFlag.RECOVERY)
    assert (await rescued).status is Status.OK
    assert (await client.add(7, entry_id, [b"x"])).status is Status.INVALID_TERM
    disk.is_full = False
    await asyncio.wait_for(is_announced_writable(bookies, True), 5)
    assert (await client.add(8, 0, [b"again"])).status is Status.OK


@pytest.mark.parametrize("mode", [READ_ONLY, DRAINING])
async def test_an_order_makes_the_bookie_refuse_what_it_forbids(bookies: Bookies, mode: str) -> None:
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"before"])).status is Status.OK
    assert (await client.add(8, 0, [b"before"])).status is Status.OK
    store = bookies.store()
    await change_order(store, "b1", lambda _: Order(mode))
    await asyncio.wait_for(is_announced_writable(bookies, False), 5)
    assert (await available_bookies(store))["b1"].order == mode
    for flags in (AddFlag.NONE, AddFlag.REPAIR, AddFlag.DEFERRED_SYNC):
        assert (await client.add(7, 1, [b"x"], flags=flags)).status is Status.READ_ONLY
    assert (await client.call(ReadLac(7, TERM_FINAL, -1, 0))).status is Status.OK
    recovered = await client.add(7, 1, [b"x"], term=TERM_FINAL, flags=AddFlag.RECOVERY)
    assert recovered.status is (Status.OK if mode == READ_ONLY else Status.READ_ONLY)
    # A former writer hears of the fence, and not only of the order.
    assert (await client.add(7, 2, [b"x"])).status is Status.INVALID_TERM
    assert (await client.call(Read(7, NO_TERM, 0, 0, 0, 1, KIB))).entries == [(0, b"before")]
    await change_order(store, "b1", lambda _: None)
    await asyncio.wait_for(is_announced_writable(bookies, True), 5)
    assert (await client.add(8, 1, [b"again"])).status is Status.OK
    await store.close()


async def test_a_bookie_obeys_an_order_of_before_its_start_from_the_first_add(bookies: Bookies) -> None:
    store = bookies.store()
    await change_order(store, "b1", lambda _: Order(DRAINING))
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"x"])).status is Status.READ_ONLY
    await change_order(store, "b1", lambda _: Order(REMOVED))
    assert isinstance(await asyncio.wait_for(bookie.stopped, 5), CookieMismatchError)
    await store.close()


@pytest.mark.parametrize("order", [None, Order(DRAINING)])
async def test_a_bookie_hears_that_it_has_left_while_it_registered(
    bookies: Bookies, order: Order | None
) -> None:
    """A drain looked for its registration behind the order, and found none: the cookie is gone, too."""

    class Leaving(MemoryMetadataStore):
        async def register(self, key: str, value: bytes) -> Registration:
            others = bookies.store()
            await change_order(others, "b1", lambda _: Order(REMOVED))
            await retire(others, "b1")
            await others.delete(cookie_key("b1"))
            await change_order(others, "b1", lambda _: order)  # perhaps of a second drain
            await others.close()
            return await super().register(key, value)

        async def watch(self, key: str) -> AsyncGenerator[None, None]:
            if key == KEY_ORDERS:
                await asyncio.Event().wait()  # it has not heard of any change yet
            async with aclosing(super().watch(key)) as changes:
                async for _ in changes:
                    yield

    with pytest.raises(CookieMismatchError, match="b1 was decommissioned"):
        await bookies.start(store=Leaving(bookies.tree))
    store = bookies.store()
    assert await available_bookies(store) == {}
    await store.close()


async def test_a_bookie_whose_disk_is_nearly_full_says_so_while_it_takes_adds(bookies: Bookies) -> None:
    disk, store, gib = bookies.disk(), bookies.store(), 1 << 30
    free = [500 * gib]
    disk.space = lambda path: Space(free[0], 1000 * gib)
    bookie = await bookies.start(disk=disk)

    async def announced() -> tuple[int | None, int | None, bool, bool]:
        record = (await available_bookies(store))["b1"]
        return record.free_bytes, record.disk_bytes, record.is_tight, record.is_writable

    async with asyncio.timeout(WAIT_S):
        async with aclosing(store.watch("bookies/available/b1")) as changes:
            async for _ in changes:  # the registration comes first, and then what is free
                if (found := await announced())[0] is not None:
                    break
    assert found == (500 * gib, 1000 * gib, False, True)
    free[0] = 480 * gib  # too little a change for a write to the metadata store
    bookie._announce()
    free[0] = 5 * gib  # below the mark of the warning, and above the floor
    async with asyncio.timeout(WAIT_S):
        async with aclosing(store.watch("bookies/available/b1")) as changes:
            bookie._announce()
            async for _ in changes:
                if (found := await announced())[0] != 500 * gib:
                    break
    assert found == (5 * gib, 1000 * gib, True, True)
    await store.close()


NO_RESERVE = StorageConfig(segment_bytes=256 * KIB, space=SpaceLimits(reserve_bytes=0, retry_s=0.05))


async def test_no_force_covers_an_add_that_was_received_and_then_found_no_room(bookies: Bookies) -> None:
    disk = bookies.disk()
    client = await bookies.connect(await bookies.start(disk=disk, storage=NO_RESERVE))
    assert (await client.add(7, 0, [b"before"])).status is Status.OK
    disk.is_full = True
    disk.hold()
    adds = [client.add(7, entry, [bytes(16 * KIB)], flags=AddFlag.DEFERRED_SYNC) for entry in range(1, 60)]
    answers = await asyncio.wait_for(asyncio.gather(*adds), WAIT_S)
    assert {answer.status for answer in answers} == {Status.OK}  # received
    force = client.send(Force(7, 0))
    disk.release()
    (forced,) = await asyncio.wait_for(asyncio.gather(force, return_exceptions=True), WAIT_S)
    assert isinstance(forced, ConnectionError)


async def test_a_recovery_read_whose_fence_finds_no_room_gives_no_answer_that_counts(
    bookies: Bookies,
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, storage=NO_RESERVE)
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"before"])).status is Status.OK
    disk.is_full = True
    for ledger_id in range(100, 20_000):
        answer = await client.call(Read(ledger_id, TERM_FINAL, 0, 0, 0, 1, KIB))
        if answer.status is not Status.OK:
            break
    assert answer.status is Status.READ_ONLY
    disk.is_full = False
    await asyncio.wait_for(is_announced_writable(bookies, True), 5)
    assert (await client.add(ledger_id, 0, [b"not fenced"])).status is Status.OK


async def test_a_failed_write_is_the_end_and_acknowledges_nothing(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client, idle = await bookies.connect(bookie), await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"before"])).status is Status.OK
    disk.hold()
    lost = [client.add(7, 1, [b"a"]), client.add(7, 2, [b"b"])]
    await asyncio.wait_for(disk.arrived.wait(), 5)
    disk.is_failing = True
    disk.release()
    assert isinstance(await asyncio.wait_for(asyncio.shield(bookie.stopped), 5), DiskFailedError)
    await client.gone()
    await idle.gone()
    for add in lost:
        answer = await asyncio.gather(add, return_exceptions=True)
        assert isinstance(answer[0], ConnectionError) or answer[0].status is Status.INTERNAL_ERROR
    store = bookies.store()
    async for _ in store.watch("bookies/available"):
        if not await available_bookies(store):
            break
    await store.close()
    await bookie.close()
    disk.is_failing = False
    again = await bookies.connect(await bookies.start())
    assert (await again.call(Read(7, NO_TERM, 0, 0, 0, 1, KIB))).entries == [(0, b"before")]
    assert (await again.call(Ping())).status is Status.OK


@pytest.mark.pure
@pytest.mark.parametrize(
    ("is_of_space", "status"), [(True, Status.READ_ONLY), (False, Status.INTERNAL_ERROR)]
)
async def test_a_lack_of_descriptors_is_not_answered_as_a_lack_of_space(
    is_of_space: bool, status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[bytes] = []
    peer = SimpleNamespace(peer="p", client="c", send=lambda *frames: sent.extend(map(bytes, frames)))
    error = DiskFullError("opening x: Too many open files")
    error.is_of_space = is_of_space
    warnings = RepeatedWarnings(logging.getLogger("bookie_aio"), asyncio.get_running_loop())
    responder = Responder(cast("Engine", None), RequestMetrics(lambda: 0.0), warnings)
    for _ in range(100):
        responder.answer_storage_error(cast("Peer", peer), Op.READ, 7, error)
    assert len(caplog.records) == (0 if is_of_space else 1)  # a line for each reason and minute
    warnings.close()
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(b"".join(sent))
    header, _ = next(parser.frames())
    message = decode_answer(header)[2]
    assert isinstance(message, Failure)
    assert message.status is status
