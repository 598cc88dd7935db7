"""The ZooKeeper store when answers are lost, servers die and sessions expire."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

import pytest

from client_aio.bookies.pool import BookieDirectory
from client_aio.config import ClientConfig
from metadata.access.bookies import BookieRecord
from metadata.backends.zookeeper.registration import Attempt, ZooKeeperRegistration
from metadata.backends.zookeeper.session import ConnectionLostError, NoAuthError, RefusedError
from metadata.backends.zookeeper.store import ZooKeeperMetadataStore
from metadata.errors import (
    GuardChangedError,
    KeyExistsError,
    MetadataUnavailableError,
    NoSuchKeyError,
    UnauthorizedAccessError,
    VersionConflictError,
)
from metadata.store import Guard
from tests.metadata.conftest import new_root
from tests.support.proxy import ZooKeeperProxy
from tests.support.zookeeper import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from metadata.store import Versioned
    from tests.support.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

PATIENCE_S = 30.0


class Pair:
    """Two stores over one tree: `store` behind a proxy, `other` straight at the server."""

    def __init__(
        self, proxy: ZooKeeperProxy, store: ZooKeeperMetadataStore, other: ZooKeeperMetadataStore
    ) -> None:
        self.proxy = proxy
        self.store = store
        self.other = other


async def open_behind(
    address: str, root: str, *, session_timeout_s: float = 6.0, operation_timeout_s: float = 10.0
) -> ZooKeeperMetadataStore:
    servers = [(host, int(port)) for host, port in (each.split(":") for each in address.split(","))]
    return await ZooKeeperMetadataStore.open(
        servers, root, session_timeout_s=session_timeout_s, operation_timeout_s=operation_timeout_s
    )


@asynccontextmanager
async def open_pair(server: ZooKeeperServer, *, session_timeout_s: float = 6.0) -> AsyncIterator[Pair]:
    """Open them. A connection is given up after a third of the session's timeout without an answer."""
    root = new_root()
    async with (
        ZooKeeperProxy("127.0.0.1", server.port) as proxy,
        await open_behind(server.address, root) as other,
        await open_behind(
            proxy.address, root, session_timeout_s=session_timeout_s, operation_timeout_s=5.0
        ) as store,
    ):
        yield Pair(proxy, store, other)


@pytest.fixture
async def pair(zookeeper: ZooKeeperServer) -> AsyncIterator[Pair]:
    async with open_pair(zookeeper) as made:
        yield made


@pytest.fixture
async def short_lived(zookeeper: ZooKeeperServer) -> AsyncIterator[Pair]:
    async with open_pair(zookeeper, session_timeout_s=1.0) as made:
        yield made


# Lost answers


async def test_a_lost_answer_to_a_create_is_success(pair: Pair) -> None:
    lost = pair.proxy.lose_answer("create")
    version = await pair.store.create("a", b"1")
    assert lost.is_set()
    assert await pair.other.read("a") == (b"1", version)
    assert pair.proxy.connections == 2


async def test_a_lost_answer_to_a_create_is_success_although_others_wrote_since(pair: Pair) -> None:
    async def overwrite() -> None:
        await pair.other.compare_and_set("a", b"2", (await pair.other.read("a")).version)

    lost = pair.proxy.lose_answer("create", before_answer=overwrite)
    version = await pair.store.create("a", b"1")
    assert lost.is_set()
    assert (await pair.other.read("a")).value == b"2"
    with pytest.raises(VersionConflictError):
        await pair.store.compare_and_set("a", b"3", version)


async def test_a_lost_refusal_of_a_create_is_still_a_refusal(pair: Pair) -> None:
    await pair.other.create("a", b'"theirs"')
    lost = pair.proxy.lose_answer("create")
    with pytest.raises(KeyExistsError):
        await pair.store.create("a", b'"mine"')
    assert lost.is_set()
    assert (await pair.other.read("a")).value == b'"theirs"'


async def test_a_close_that_is_cancelled_while_the_key_is_written_removes_it_later(pair: Pair) -> None:
    registration = await pair.store.register("leader", b"1")
    async with registration._lock:  # as while the key is written under another session
        closing = asyncio.create_task(registration.close())
        await asyncio.sleep(0)
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
    async with asyncio.timeout(20):
        async for _ in pair.other.watch("leader"):
            if "leader" not in await pair.other.children(""):
                break


async def test_a_lost_answer_to_a_compare_and_set_is_success(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")
    lost = pair.proxy.lose_answer("set")
    second = await pair.store.compare_and_set("a", b"2", first)
    assert lost.is_set()
    assert await pair.other.read("a") == (b"2", second)


async def test_a_lost_answer_to_a_guarded_write_is_success_although_the_guard_changed(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")
    guard = Guard("b", await pair.store.create("b", b"1"))

    async def change_the_guard() -> None:
        await pair.other.compare_and_set("b", b"2", guard.version)

    lost = pair.proxy.lose_answer("multi", before_answer=change_the_guard)
    second = await pair.store.compare_and_set("a", b"2", first, guard=guard)
    assert lost.is_set()
    assert await pair.other.read("a") == (b"2", second)


async def test_a_lost_refusal_of_a_guarded_write_is_still_a_refusal(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")
    guard = Guard("b", await pair.store.create("b", b"1"))
    await pair.other.compare_and_set("b", b"2", guard.version)
    lost = pair.proxy.lose_answer("multi")
    with pytest.raises(GuardChangedError):
        await pair.store.compare_and_set("a", b"2", first, guard=guard)
    assert lost.is_set()
    assert await pair.other.read("a") == (b"1", first)


async def test_a_lost_answer_to_a_guarded_delete_is_success_although_the_guard_changed(pair: Pair) -> None:
    await pair.store.create("a", b"1")
    guard = Guard("b", await pair.store.create("b", b"1"))

    async def change_the_guard() -> None:
        await pair.other.compare_and_set("b", b"2", guard.version)

    lost = pair.proxy.lose_answer("multi", before_answer=change_the_guard)
    await pair.store.delete("a", guard=guard)
    assert lost.is_set()
    assert await pair.other.children("") == ["b"]


async def test_a_lost_refusal_of_a_guarded_delete_is_still_a_refusal(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")
    guard = Guard("b", await pair.store.create("b", b"1"))
    await pair.other.compare_and_set("b", b"2", guard.version)
    lost = pair.proxy.lose_answer("multi")
    with pytest.raises(GuardChangedError):
        await pair.store.delete("a", guard=guard)
    assert lost.is_set()
    assert await pair.other.read("a") == (b"1", first)


async def test_a_lost_answer_to_a_compare_and_set_is_success_although_others_wrote_since(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")

    async def overwrite_twice() -> None:
        version = (await pair.other.read("a")).version
        version = await pair.other.compare_and_set("a", b"3", version)
        await pair.other.compare_and_set("a", b"4", version)

    lost = pair.proxy.lose_answer("set", before_answer=overwrite_twice)
    second = await pair.store.compare_and_set("a", b"2", first)
    assert lost.is_set()
    assert second.number == first.number + 1
    assert (await pair.other.read("a")).value == b"4"


async def test_a_lost_conflict_is_still_a_conflict(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")
    await pair.other.sync("a")

    async def overwrite() -> None:
        await pair.other.compare_and_set("a", b"2", first)

    # Between the store's look at the key and its write, somebody else is faster.
    pair.proxy.lose_answer("get", before_answer=overwrite)
    with pytest.raises(VersionConflictError):
        await pair.store.compare_and_set("a", b"3", first)
    assert (await pair.other.read("a")).value == b"2"


async def test_what_too_many_have_overwritten_is_unknown_and_not_guessed(pair: Pair) -> None:
    first = await pair.store.create("a", b"1")

    async def overwrite_often() -> None:
        version = (await pair.other.read("a")).version
        for number in range(20):
            version = await pair.other.compare_and_set("a", b"%d" % number, version)

    pair.proxy.lose_answer("set", before_answer=overwrite_often)
    with pytest.raises(MetadataUnavailableError):
        await pair.store.compare_and_set("a", b"2", first)


async def test_a_lost_answer_to_a_delete_is_success(pair: Pair) -> None:
    version = await pair.store.create("a", b"1")
    lost = pair.proxy.lose_answer("delete")
    await pair.store.delete("a", version)
    assert lost.is_set()
    with pytest.raises(NoSuchKeyError):
        await pair.other.read("a")
    with pytest.raises(NoSuchKeyError):
        await pair.store.delete("a")


async def test_a_lost_answer_to_a_delete_spares_a_key_created_anew(pair: Pair) -> None:
    async def create_anew() -> None:
        await pair.other.create("a", b"2")

    version = await pair.store.create("a", b"1")
    for expected in (version, None):
        lost = pair.proxy.lose_answer("delete", before_answer=create_anew)
        await pair.store.delete("a", expected)
        assert lost.is_set()
        assert (await pair.other.read("a")).value == b"2"


async def test_ids_are_given_once_although_an_answer_is_lost(pair: Pair) -> None:
    blocks = []
    for request in ("create", "set", "set"):
        pair.proxy.lose_answer(request)
        blocks.append(await pair.store.allocate_ids("ledger", 4))
        blocks.append(await pair.other.allocate_ids("ledger", 4))
    drawn = [each for block in blocks for each in block]
    assert len(set(drawn)) == len(drawn) == 24


async def test_a_lost_answer_to_a_registration_leaves_one(pair: Pair) -> None:
    lost = pair.proxy.lose_answer("multi")
    registration = await pair.store.register("b", b"1")
    assert lost.is_set()
    lost = pair.proxy.lose_answer("multi")
    await registration.update(b"2")
    assert lost.is_set()
    assert (await pair.other.read("b")).value == b"2"
    lost = pair.proxy.lose_answer("multi")
    await registration.close()
    assert lost.is_set()
    assert await pair.other.children("") == []


async def test_a_registration_that_could_not_be_removed_is_removed_later(
    zookeeper: ZooKeeperServer,
) -> None:
    root = new_root()
    async with (
        ZooKeeperProxy("127.0.0.1", zookeeper.port) as proxy,
        await open_behind(zookeeper.address, root) as other,
        await open_behind(
            proxy.address, root, session_timeout_s=PATIENCE_S, operation_timeout_s=2.0
        ) as store,
    ):
        registration = await store.register("b/1", b"1")
        session = store.session
        await proxy.refuse()
        with pytest.raises(MetadataUnavailableError):
            await registration.close()
        await proxy.restore()
        async with asyncio.timeout(PATIENCE_S):
            async for _ in other.watch("b"):
                if not await other.children("b"):
                    break
        async with asyncio.timeout(PATIENCE_S):
            while store._registrations:  # noqa: ASYNC110 (its own answer is on its way, and tells nobody else)
                await asyncio.sleep(0.01)
        assert store.session == session


async def test_a_watch_that_a_server_refuses_for_a_while_leaves_the_directory_of_bookies_following(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    async def refuse(*_: object, **__: object) -> None:
        refused.set()
        raise RefusedError("throttled")

    directory = BookieDirectory(pair.store, ClientConfig())
    with monkeypatch.context() as patched:
        patched.setattr(pair.store._session, "exists", refuse)
        await directory.start()
        await asyncio.wait_for(refused.wait(), PATIENCE_S)
    record = BookieRecord("b1", ["127.0.0.1:1"], "nonce")
    await pair.other.register("bookies/available/b1", record.to_json())
    async with asyncio.timeout(PATIENCE_S):
        while list(directory.available) != ["b1"]:
            await directory.wait_for_change(1)
    await directory.close()


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (RefusedError("throttled"), MetadataUnavailableError),
        (NoAuthError("not yours"), UnauthorizedAccessError),
    ],
    ids=["throttled", "forbidden"],
)
async def test_a_look_that_is_refused_after_a_conflict_is_an_error_of_the_store(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, refusal: Exception, expected: type[Exception]
) -> None:
    version = await pair.store.create("a", b"1")
    send = pair.store._session.set

    async def come_second(path: str, data: bytes, number: int, *check: None) -> object:
        if path.endswith("/sync"):
            raise refusal
        await pair.other.compare_and_set("a", b"2", version)
        return await send(path, data, number, *check)

    monkeypatch.setattr(pair.store._session, "set", come_second)
    with pytest.raises(expected):
        await pair.store.compare_and_set("a", b"3", version)


async def test_a_delete_that_began_with_an_old_look_and_was_lost_deletes_what_is_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await pair.other.create("a", b"1")
    await pair.other.compare_and_set("a", b"2", version)
    old = await pair.other.read("a")
    await pair.other.delete("a")
    await pair.other.create("a", b"3")
    get, delete = pair.store._get, pair.store._session.delete
    looks, deletes = [old], [True, False]

    async def look(key: str) -> Versioned:
        return looks.pop() if looks else await get(key)

    async def send(path: str, number: int, _: None) -> None:
        if not looks and number == 0 and deletes.pop():
            await delete(path, number)
            return
        if number == 0:
            raise ConnectionLostError("before the request had left")
        await delete(path, number)

    monkeypatch.setattr(pair.store, "_get", look)
    monkeypatch.setattr(pair.store._session, "delete", send)
    await pair.store.delete("a")
    assert await pair.other.children("") == []


@pytest.mark.parametrize("is_delete", [True, False], ids=["delete", "compare and set"])
async def test_a_request_that_is_late_does_not_meet_a_name_that_was_made_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_delete: bool
) -> None:
    """It would have deleted, or overwritten, the list of a new log with what was acknowledged in it."""
    version = await pair.store.create("logs/a", b"1")
    send = pair.store._session.set

    async def come_late(path: str, data: bytes, number: int, *check: None) -> object:
        if path.endswith("/logs/a"):
            monkeypatch.undo()
            await pair.other.delete("logs/a", version, keeps_place=True)
            await pair.other.create("logs/a", b"2")
        return await send(path, data, number, *check)

    monkeypatch.setattr(pair.store._session, "set", come_late)
    with pytest.raises(VersionConflictError):
        await (
            pair.store.delete("logs/a", version, keeps_place=True)
            if is_delete
            else pair.store.compare_and_set("logs/a", b"3", version)
        )
    assert (await pair.other.read("logs/a")).value == b"2"


# Outages


async def test_an_outage_ends_in_an_error_of_unknown_outcome_that_names_the_servers(
    zookeeper: ZooKeeperServer,
) -> None:
    async with ZooKeeperProxy("127.0.0.1", zookeeper.port) as proxy:
        store = await open_behind(proxy.address, new_root(), operation_timeout_s=2.0)
        version = await store.create("a", b"1")
        await proxy.refuse()
        with pytest.raises(MetadataUnavailableError, match=proxy.address):
            await store.compare_and_set("a", b"2", version)
        await proxy.restore()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await store.compare_and_set("a", b"2", version)
                    break
                except MetadataUnavailableError:
                    continue
        assert (await store.read("a")).value == b"2"
        await store.close()


async def test_nobody_at_the_address_is_an_error_in_bounded_time() -> None:
    (port,) = free_ports(1)
    with pytest.raises(MetadataUnavailableError, match=f"127.0.0.1:{port}"):
        await open_behind(f"127.0.0.1:{port}", "x", operation_timeout_s=0.5)


async def test_something_else_at_the_address_is_an_error_that_says_so() -> None:
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(MetadataUnavailableError, match="does not answer as a ZooKeeper server"):
        await open_behind(f"127.0.0.1:{port}", "x", operation_timeout_s=2.0)
    server.close()
    await server.wait_closed()
    await asyncio.gather(*serving, return_exceptions=True)  # or a transport would be left to the collector


async def test_a_session_that_expires_in_silence_registers_anew(short_lived: Pair) -> None:
    pair = short_lived
    registration = await pair.store.register("b/1", b"1")
    changes = pair.store.watch("c")
    await anext(changes)
    waiting = asyncio.ensure_future(anext(changes))
    before = (await pair.other.read("b/1")).version
    gone = pair.other.watch("b/1")
    pair.proxy.black_hole()
    async with asyncio.timeout(PATIENCE_S):
        async for _ in gone:
            if not await pair.other.children("b"):
                break
        loop = asyncio.get_running_loop()
        await pair.proxy.restore()
        start = loop.time()
        pair.proxy.reset_all()
        async for _ in gone:
            if await pair.other.children("b"):
                break
    print(f"registered anew {loop.time() - start:.2f} s after the store could be reached again")
    await gone.aclose()
    assert (await pair.other.read("b/1")).version != before
    # The session's watches died with it; this one fires all the same.
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    await changes.aclose()
    await registration.update(b"2")
    assert (await pair.other.read("b/1")).value == b"2"


async def test_a_reset_connection_keeps_the_session_and_its_registrations(pair: Pair) -> None:
    await pair.store.register("b/1", b"1")
    before = (await pair.other.read("b/1")).version
    for _ in range(5):
        pair.proxy.reset_all()
        await pair.store.sync("b/1")
    assert (await pair.store.read("b/1")).version == before


# Ensembles


def connected_to(store: ZooKeeperMetadataStore, ensemble: ZooKeeperEnsemble) -> ZooKeeperServer:
    connection = store._session._connection
    assert connection is not None
    (server,) = [each for each in ensemble.servers if each.address == connection.server]
    return server


@pytest.mark.parametrize("victim", ["leader", "follower", "connected"])
async def test_a_killed_server_costs_no_write(zookeeper_ensemble: ZooKeeperEnsemble, victim: str) -> None:
    root = new_root()
    loop = asyncio.get_running_loop()
    async with await open_behind(zookeeper_ensemble.addresses, root, session_timeout_s=6.0) as store:
        version = await store.create("count", b"0")
        registration = await store.register("b/1", b"1")
        registered = (await store.read("b/1")).version
        if victim == "connected":
            server = connected_to(store, zookeeper_ensemble)
        else:
            find = zookeeper_ensemble.leader if victim == "leader" else zookeeper_ensemble.follower
            server = await asyncio.to_thread(find)
        costs = []
        for number in range(1, 41):
            if number == 20:
                server.kill()
            start = loop.time()
            version = await store.compare_and_set("count", b"%d" % number, version)
            costs.append(loop.time() - start)
        print(f"{victim} killed: slowest write {max(costs):.2f} s, typical {sorted(costs)[20] * 1000:.1f} ms")
        assert await store.read("count") == (b"40", version)
        assert version.number == 40
        assert (await store.read("b/1")).version == registered
        await registration.close()
    await asyncio.to_thread(zookeeper_ensemble.revive)


async def test_a_silent_server_is_left(zookeeper_ensemble: ZooKeeperEnsemble) -> None:
    root = new_root()
    loop = asyncio.get_running_loop()
    async with await open_behind(zookeeper_ensemble.addresses, root, session_timeout_s=3.0) as store:
        version = await store.create("a", b"0")
        server = connected_to(store, zookeeper_ensemble)
        server.pause()
        start = loop.time()
        try:
            version = await store.compare_and_set("a", b"1", version)
        finally:
            server.resume()
        print(f"server stopped: the write took {loop.time() - start:.2f} s")
        assert await store.read("a") == (b"1", version)


async def test_a_registration_moves_from_a_session_that_the_servers_still_hold_open(pair: Pair) -> None:
    await pair.store.register("b/1", b"1")
    before = (await pair.other.read("b/1")).version
    changes = pair.other.watch("b/1")
    # A session given up here, and not yet expired there: as after an expiry that was seen by one side.
    pair.store._session.session_id = 0
    pair.store._session._password = b"\x00" * 16
    pair.proxy.reset_all()
    async with asyncio.timeout(PATIENCE_S):
        async for _ in changes:
            with suppress(NoSuchKeyError):  # the key is away while it moves
                if (await pair.other.read("b/1")).version != before:
                    break
    await changes.aclose()
    _, stat = await pair.store._session.get(pair.store._path("b/1"))
    assert stat.session_id == pair.store._session.session_id


@pytest.mark.parametrize("change", ["moves", "update", "close"])
async def test_a_registration_whose_session_expires_meanwhile_leaves_the_key_of_another_process(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Both nodes are at version 0, and ZooKeeper compares nothing else."""
    registration = await pair.store.register("b/1", b"1")
    session, path, is_theirs = pair.store._session, pair.store._path("b/1"), asyncio.Event()
    send_set, send_delete = session.set, session.delete

    async def be_late() -> None:
        if not is_theirs.is_set():
            await pair.other._session.delete(path, -1)  # as the expiry of the session does
            await pair.other.register("b/1", b"2")
            is_theirs.set()

    async def late_set(to: str, data: bytes, number: int, *check: tuple[str, int] | None) -> object:
        if to == path:
            await be_late()
        return await send_set(to, data, number, *check)

    async def late_delete(to: str, number: int, *check: tuple[str, int] | None) -> None:
        await be_late()
        await send_delete(to, number, *check)

    monkeypatch.setattr(session, "set", late_set)
    monkeypatch.setattr(session, "delete", late_delete)
    if change == "moves":
        has_failed, later = asyncio.Event(), pair.store._schedule_retry
        monkeypatch.setattr(pair.store, "_schedule_retry", lambda: (has_failed.set(), later()))
        session.session_id, session._password = 0, b"\x00" * 16
        pair.proxy.reset_all()
        await asyncio.wait_for(has_failed.wait(), PATIENCE_S)
    elif change == "update":
        with pytest.raises(KeyExistsError, match="held by another session"):
            await registration.update(b"3")
    else:
        await registration.close()
    assert is_theirs.is_set()
    assert (await pair.other.read("b/1")).value == b"2"


async def test_a_root_that_is_gone_is_said_and_what_was_registered_comes_back_with_it(
    zookeeper: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while an operator replaces the tree."""
    root = new_root()
    async with await open_behind(zookeeper.address, root) as store:
        await store.register("b/1", b"1")
        session, (registration,) = store._session, store._registrations
        has_failed, later = asyncio.Event(), store._schedule_retry
        monkeypatch.setattr(store, "_schedule_retry", lambda: (has_failed.set(), later()))
        async with registration._lock:  # nothing is put while the tree is taken down
            for path in ("b/1", "b", ".store/ids", ".store/registered", ".store/sync", ".store"):
                if await session.exists(f"/{root}/{path}") is not None:
                    await session.delete(f"/{root}/{path}", -1)
            await session.delete(f"/{root}", -1)
        with pytest.raises(MetadataUnavailableError, match="is gone"):
            await store.sync("b")
        with pytest.raises(MetadataUnavailableError, match="is gone"):
            await store.create("c", b"1")
        async with asyncio.timeout(PATIENCE_S):
            await has_failed.wait()
            await store._prepare_own_nodes(True, Attempt(maybe_sent=False))
            async for _ in store.watch("b"):
                if await store.children("b") == ["1"]:
                    break


async def test_a_late_removal_takes_no_watch_from_a_new_registration_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer to a removal that took effect is lost, and the key is registered anew before the retry."""
    store = ZooKeeperMetadataStore([("127.0.0.1", 1)], "", session_timeout_s=6.0, operation_timeout_s=1.0)
    path = store._path("leader")

    def register() -> ZooKeeperRegistration:
        registration = ZooKeeperRegistration(store, "leader", b"1")
        store._registrations.add(registration)
        store._session.add_watcher(path, store._look_now)
        return registration

    async def answer_is_lost(*_: object) -> None:
        raise MetadataUnavailableError("the answer was lost")

    async def answer(*_: object) -> None:
        return None

    former = register()
    monkeypatch.setattr(store, "_settle", answer_is_lost)
    with pytest.raises(MetadataUnavailableError):
        await former.close()
    new = register()
    monkeypatch.setattr(store, "_settle", answer)
    await former.mend()
    assert store._registrations == {new}
    store._look_now.clear()
    store._session.fire(path)
    assert store._look_now.is_set()
