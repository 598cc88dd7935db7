"""From the moment at which a bookie hears of a set-back until its marks count, it denies no entry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from bookie_aio.wire.messages import NO_TERM, ListEntries, Status, Stop
from metadata.access.bookies import SetBacks
from tests.bookie_aio.server.test_server_age import WAIT_S, copy_of, draw, fresh, make
from tests.bookie_aio.server.test_server_set_back import (
    are_marked,
    engine_of,
    evict,
    read,
    start,
    tell_of_set_back,
)

if TYPE_CHECKING:
    import pytest

    from bookie_aio.server.bookie import Bookie
    from metadata.backends.memory import MemoryMetadataStore
    from metadata.store import Versioned
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.helddisk import HeldDisk
    from tests.support.rawclient import RawClient

__all__ = ["fresh"]


class SetBack(NamedTuple):
    """A bookie whose store was set back, and whose disk holds what comes: the marks come behind an add."""

    bookie: Bookie
    store: MemoryMetadataStore
    disk: HeldDisk
    client: RawClient
    ledger: int  # evicted since the copy
    other: int
    adding: asyncio.Future[Any]

    @classmethod
    async def make(cls, fresh: Bookies) -> SetBack:
        disk, store = fresh.disk(), fresh.store()
        times = {"sweep_interval_s": 3600.0, "age_interval_s": 3600.0, "unnamed_grace_s": 0.01}
        bookie = await fresh.start(store=store, disk=disk, **times)
        client, writer = await fresh.connect(bookie), await fresh.connect(bookie)
        ledger, other = await draw(fresh, 2)
        await make(fresh, client, ledger, other)
        older = copy_of(fresh.tree)
        await evict(fresh, bookie, ledger)
        await draw(fresh, 1)
        await bookie.age.learn_ids()
        store.tree = fresh.tree = older
        disk.hold()
        adding = writer.add(other, 1, [b"1"])
        await asyncio.wait_for(disk.arrived.wait(), WAIT_S)
        return cls(bookie, store, disk, client, ledger, other, asyncio.ensure_future(adding))


async def test_nothing_is_denied_that_an_event_may_concern_while_the_age_is_being_written(
    fresh: Bookies,
) -> None:
    """The write of the age to a slow disk holds the lock. A recovery may know the event by then."""
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    ledger, later = await draw(fresh, 2)
    await make(fresh, client, ledger, later)
    assert await read(client, ledger, 1, NO_TERM) is Stop.NO_SUCH_ENTRY
    async with bookie.age._lock, asyncio.timeout(WAIT_S):
        await tell_of_set_back(fresh, "an event", ledger + 1)
        learning = asyncio.create_task(bookie.age.learn_events())
        while not engine_of(bookie).marking.in_question_below:
            assert await read(client, ledger, 0, NO_TERM) is Stop.END
        assert await read(client, ledger, 1, NO_TERM) is Stop.UNKNOWN
        assert await read(client, ledger, 1, 1) is Stop.UNKNOWN
        assert await read(client, ledger, 0, NO_TERM) is Stop.END, "what is there is served"
        assert await read(client, later, 1, NO_TERM) is Stop.NO_SUCH_ENTRY, "of after the event"
        assert (await client.call(ListEntries(ledger, 0))).status is Status.TOO_MANY_REQUESTS
        assert (await client.call(ListEntries(later, 0))).status is Status.OK
        assert await are_marked(client, ledger) == [False], "a mark would be a promise"
    await learning
    assert await read(client, ledger, 1, NO_TERM) is Stop.NO_SUCH_ENTRY
    assert (await client.call(ListEntries(ledger, 0))).status is Status.OK


async def test_nothing_is_denied_while_the_marks_of_a_set_back_wait_for_the_disk(fresh: Bookies) -> None:
    bookie, store, disk, client, ledger, other, adding = await SetBack.make(fresh)
    judging = asyncio.create_task(bookie.age.learn_ids())
    async with asyncio.timeout(WAIT_S):
        while not (await SetBacks.read(store)).events:  # From now on clients know it.
            assert await read(client, other, 0, NO_TERM) is Stop.END
        assert await read(client, ledger, 0, NO_TERM) is Stop.UNKNOWN
    assert await are_marked(client, ledger) == [False]
    disk.release()
    await asyncio.gather(adding, judging)
    assert await are_marked(client, ledger) == [True]
    assert not engine_of(bookie).marking.in_question_below


async def test_nothing_is_denied_though_a_read_from_before_the_event_is_answered_behind_it(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch makes the bookie read the events while it makes one itself. The answer does not have it."""
    bookie, store, disk, client, ledger, other, adding = await SetBack.make(fresh)
    marking, questions, real = engine_of(bookie).marking, bookie.age._in_question, store.read
    hear, is_noted, has_read = questions.hear, asyncio.Event(), asyncio.Event()

    def note(*arguments: Any) -> None:
        hear(*arguments)
        if marking.in_question_below:
            is_noted.set()

    async def read_late(key: str) -> Versioned:
        found = await real(key)
        if asyncio.current_task() is learning and not has_read.is_set():
            await is_noted.wait()
            has_read.set()
        return found

    monkeypatch.setattr(questions, "hear", note)
    monkeypatch.setattr(store, "read", read_late)
    learning = asyncio.create_task(bookie.age.learn_events())
    await asyncio.sleep(0)
    judging = asyncio.create_task(bookie.age.learn_ids())
    async with asyncio.timeout(WAIT_S):
        await has_read.wait()
        while not (await SetBacks.read(fresh.store())).events:  # From now on clients know it.
            assert await read(client, other, 0, NO_TERM) is Stop.END
    assert await read(client, ledger, 0, NO_TERM) is Stop.UNKNOWN
    disk.release()
    await asyncio.gather(adding, judging, learning)
    assert await are_marked(client, ledger) == [True]
    assert not marking.in_question_below
