"""Elections on each kind of store, and between processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

from benchmarks.processes import Child, start_module
from client_aio.election import LeaderElection
from metadata.errors import ClientClosedError, InvalidArgumentError, MetadataCorruptError
from tests.metadata.conftest import new_root, still
from tests.support import standstill

if TYPE_CHECKING:
    from pathlib import Path

    from metadata.store import MetadataStore
    from tests.metadata.conftest import Backend
    from tests.support.zookeeper import ZooKeeperServer

WAIT_S = 20


async def until_queued(store: MetadataStore, count: int) -> None:
    """Wait until so many candidates stand in the queue."""
    async with contextlib.aclosing(store.watch("elections/a/queue")) as changes:
        async for _ in changes:
            if len(await store.children("elections/a/queue")) == count:
                return


async def test_candidates_lead_one_after_another_in_the_order_of_their_coming(backend: Backend) -> None:
    elections = []
    for number in range(4):
        elections.append(LeaderElection(await backend.open(), "a", b"%d" % number))
        await elections[-1].__aenter__()
        if number == 0:
            await elections[0].gained()
        else:
            await until_queued(elections[0]._store, number + 1)
    for number, election in enumerate(elections):
        async with asyncio.timeout(WAIT_S):
            await election.gained()
        assert [each.is_leader for each in elections] == [each is election for each in elections]
        assert await elections[-1].leader() == b"%d" % number
        await election.__aexit__(None, None, None)
        assert not election.is_leader
    assert await elections[-1].leader() is None


async def test_a_leader_whose_session_ends_has_lost_and_stands_again(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    async with LeaderElection(one, "a") as first:
        await first.gained()
        async with LeaderElection(two, "a") as second, asyncio.timeout(WAIT_S):
            await until_queued(one, 2)
            await backend.expire(one)
            await first.lost()
            await second.gained()
            assert not first.is_leader
            await until_queued(two, 2)  # it stands again
            await backend.expire(two)
            await second.lost()
            await first.gained()
            assert (first.terms, second.terms) == (2, 1)


async def test_a_candidate_that_crashes_in_the_queue_holds_nobody_up(backend: Backend) -> None:
    one, two, three = await backend.open(), await backend.open(), await backend.open()
    async with asyncio.timeout(WAIT_S), LeaderElection(one, "a") as first:
        await first.gained()
        async with LeaderElection(two, "a"):
            await until_queued(one, 2)
            async with LeaderElection(three, "a") as third:
                await until_queued(one, 3)
                backend.crash(two)
                backend.crash(one)
                await third.gained()


async def test_a_leader_whose_key_is_removed_has_lost(store: MetadataStore) -> None:
    async with LeaderElection(store, "a") as election, asyncio.timeout(WAIT_S):
        changes = election.changes()
        while not await anext(changes):
            pass
        await store.delete("elections/a/leader")
        assert not await anext(changes)
        assert await anext(changes)  # it stands again
        assert election.terms == 2


async def test_what_is_left_over_of_oneself_stands_in_nobody_s_way(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    async with LeaderElection(store, "a") as election, asyncio.timeout(WAIT_S):
        await election.gained()
        await other.create("elections/a/leftover", b"{}")
        election._numbers.add(-1)
        registration = await other.register("elections/b/leader", b'{"candidate": -1, "value": ""}')
        election._key = "elections/b"
        async with still(registration):
            await store.delete("elections/a/leader")
            await election.lost()
            await election.gained()
        await registration.close()


async def test_wrong_use_is_told(store: MetadataStore) -> None:
    election = LeaderElection(store, "a")
    with pytest.raises(InvalidArgumentError, match="async with"):
        await election.gained()
    with pytest.raises(InvalidArgumentError, match="name"):
        LeaderElection(store, "a/b")
    with pytest.raises(InvalidArgumentError, match="at most"):
        LeaderElection(store, "a", b"x" * 5000)
    async with election:
        await election.gained()
    with pytest.raises(ClientClosedError):
        await election.gained()
    await store.create("elections/c/leader", b"[]")
    with pytest.raises(MetadataCorruptError):
        await LeaderElection(store, "c").leader()


@pytest.fixture(params=["sqlite", "zookeeper"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'metadata.db'}"
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return f"zk://127.0.0.1:{server.port}/{new_root()}"


async def test_the_next_leads_when_the_leader_is_killed_and_a_stopped_one_knows_it_has_lost(
    uri: str, tmp_path: Path
) -> None:
    children: list[Child] = []
    try:
        for number in range(3):
            child = await start_module(
                "tests.support.candidate", uri, "a", str(number), log=tmp_path / f"{number}.log"
            )
            children.append(child)
            assert (await child.line()).strip() == "stands"
            assert (await child.line()).strip() == "follows"
            if number == 0:
                assert (await child.line()).strip() == "leads"
            await asyncio.sleep(0.3)  # until it stands in the queue
        first, second, third = children
        first.kill()
        assert (await second.line(timeout_s=WAIT_S)).strip() == "leads"
        standstill.stop(second.pid, uri)
        assert (await third.line(timeout_s=WAIT_S)).strip() == "leads"
        os.kill(second.pid, signal.SIGCONT)
        # The first thing it says is that it has lost.
        assert (await second.line(timeout_s=WAIT_S)).strip() == "follows"
    finally:
        for child in children:
            await child.end()
