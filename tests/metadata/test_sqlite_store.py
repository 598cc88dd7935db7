"""What is particular to the SQLite store: the file, other processes, and the disk."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metadata.backends.sqlite import store as sqlite_store
from metadata.backends.sqlite.leases import Leases, boot_id
from metadata.backends.sqlite.store import SqliteMetadataStore
from metadata.errors import (
    InvalidArgumentError,
    MetadataCorruptError,
    MetadataUnavailableError,
    NoSuchKeyError,
)
from metadata.owned_task import OwnedTask
from tests.support import standstill

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 30
CHILD = """
import asyncio, sys
from metadata.backends.sqlite.store import SqliteMetadataStore

async def main():
    store = await SqliteMetadataStore.open(sys.argv[1], lease_s=float(sys.argv[2]))
    await store.register("b/child", b"1")
    version = await store.create("count", b"0")
    for number in range(1, int(sys.argv[3]) + 1):
        version = await store.compare_and_set("count", b"%d" % number, version)
        print(number, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_close_that_is_cancelled_while_the_key_is_written_removes_it_later(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db", lease_s=0.4) as store:
        registration = await store.register("leader", b"1")
        async with registration._lock:  # as while the key is written under another session
            closing = asyncio.create_task(registration.close())
            await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
        async with asyncio.timeout(20):
            async for _ in store.watch("leader"):
                if "leader" not in await store.children(""):
                    break


async def test_what_a_killed_process_was_told_is_durable_and_its_registration_goes(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(path), "1000", "1000000", stdout=asyncio.subprocess.PIPE
    )  # a lease so long that only the end of the process can be what is noticed
    assert process.stdout is not None
    told = [int(await process.stdout.readline()) for _ in range(50)][-1]
    process.kill()
    rest = (await process.stdout.read()).splitlines(keepends=True)
    told = max([told, *(int(line) for line in rest if line.endswith(b"\n"))])
    await process.wait()
    async with await SqliteMetadataStore.open(path, lease_s=1.0) as store:
        assert int((await store.read("count")).value) in (told, told + 1)
        async with asyncio.timeout(20):
            async for _ in store.watch("b"):
                if not await store.children("b"):
                    break


async def test_the_registration_of_a_stopped_process_goes_with_its_lease(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(path), "1", "1", stdout=asyncio.subprocess.PIPE
    )  # it holds no lock on the database when it is stopped: that would stop everybody
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        async with await SqliteMetadataStore.open(path, lease_s=1.0) as store, asyncio.timeout(20):
            async for _ in store.watch("b"):
                if not await store.children("b"):
                    break
    finally:
        process.kill()
        await process.communicate()


async def test_a_process_that_tests_stop_is_in_no_transaction(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(path), "1000", "1000000", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with await SqliteMetadataStore.open(path) as store:
            for number in range(10):
                await process.stdout.readline()
                standstill.stop(process.pid, f"sqlite://{path}")
                await store.create(f"while it stands still/{number}", b"1")
                process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        await process.communicate()


async def test_the_schema_survives_many_processes_opening_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    stores = await asyncio.gather(*(SqliteMetadataStore.open(path) for _ in range(8)))
    blocks = await asyncio.gather(*(store.allocate_ids("x", 1) for store in stores))
    assert sorted(block.start for block in blocks) == list(range(8))
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_path_that_can_hold_no_database_is_refused(tmp_path: Path) -> None:
    for path in ("relative.db", tmp_path, tmp_path / "missing" / "m.db"):
        with pytest.raises(InvalidArgumentError, match=r"absolute|directory"):
            await SqliteMetadataStore.open(path)
    assert os.listdir(tmp_path) == []


async def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    text, database = tmp_path / "text.db", tmp_path / "other.db"
    text.write_bytes(b"no database at all, but long enough for one" * 100)
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    before = text.read_bytes(), database.read_bytes()
    for path in (text, database):
        with pytest.raises(MetadataCorruptError, match=str(path)):
            await SqliteMetadataStore.open(path)
    assert (text.read_bytes(), database.read_bytes()) == before


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    await (await SqliteMetadataStore.open(path)).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(MetadataCorruptError, match="schema version 99"):
        await SqliteMetadataStore.open(path)


async def test_damage_in_the_file_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        for number in range(50):
            await store.create(f"a/{number}", b'"%b"' % (b"x" * 500))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(MetadataCorruptError):
        async with await SqliteMetadataStore.open(path) as store:
            await store.read("a/7")


async def test_damaged_leases_say_what_they_hold_and_may_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        await store.create("kept", b"1")
        await store.register("leader", b"1")
    leases = tmp_path / f"m.db-leases-{boot_id()}"
    leases.write_bytes(b"no database at all. " * 500)
    with pytest.raises(MetadataCorruptError, match=r"leases-.* is damaged.* while none does, it may be remo"):
        await SqliteMetadataStore.open(path)
    leases.unlink()
    async with await SqliteMetadataStore.open(path) as store:
        assert (await store.read("kept"))[0] == b"1"
        await store.register("leader", b"2")


async def test_a_full_disk_is_a_typed_error_and_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        version = await store.create("a", b"1")
        pages = "PRAGMA max_page_count = 1"
        await store._submit(lambda: store._tables._database.execute(pages).fetchall())
        with pytest.raises(MetadataUnavailableError, match="no space left"):
            await store.create("b", b'"%b"' % (b"x" * 100000))
        assert await store.read("a") == (b"1", version)


async def test_a_lock_held_for_too_long_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path, operation_timeout_s=0.3) as store:
        version = await store.create("a", b"1")
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(MetadataUnavailableError, match="locked"):
            await store.compare_and_set("a", b"2", version)
        assert await store.read("a") == (b"1", version)
        holder.execute("ROLLBACK")
        holder.close()
        await store.compare_and_set("a", b"2", version)


async def test_a_short_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        version = await store.create("a", b"1")
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        write = asyncio.create_task(store.compare_and_set("a", b"2", version))
        done, _ = await asyncio.wait([write], timeout=0.3)
        assert not done
        holder.execute("ROLLBACK")
        holder.close()
        await write


async def test_the_leases_of_an_earlier_boot_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    stale = tmp_path / "m.db-leases-00000000-0000-0000-0000-000000000000"
    stale.write_bytes(b"torn by a power cut")
    async with await SqliteMetadataStore.open(path) as store:
        await store.register("b/1", b"1")
        assert not stale.exists()
        assert (tmp_path / f"m.db-leases-{boot_id()}").exists()


async def test_the_registrations_of_an_earlier_boot_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    store = await SqliteMetadataStore.open(path)
    await store.register("b/1", b"1")
    await asyncio.wait(store._abandon())
    await asyncio.to_thread(Path(f"{path}-leases-{boot_id()}").unlink)
    async with await SqliteMetadataStore.open(path) as later:
        with pytest.raises(NoSuchKeyError):
            await later.read("b/1")


async def test_a_process_that_stood_still_registers_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with (
        await SqliteMetadataStore.open(path, lease_s=1.0) as one,
        await SqliteMetadataStore.open(path, lease_s=1.0) as two,
    ):
        await one.register("b/1", b"1")
        before = (await two.read("b/1")).version
        for task in one._tasks:
            task.cancel()
        changes = two.watch("b/1")
        async with asyncio.timeout(20):
            async for _ in changes:
                if not await two.children("b"):
                    break
            one._tasks = [OwnedTask(one._maintain, "keys"), OwnedTask(one._keep_session, "session")]
            async for _ in changes:
                if await two.children("b"):
                    break
        await changes.aclose()
        assert (await two.read("b/1")).version != before


def at_each_put(store: SqliteMetadataStore, then: Callable[[], object]) -> None:
    """Do something on the loop right after the store's next put of an ephemeral key, before its answer."""
    loop, tables = asyncio.get_running_loop(), store._tables
    put = tables.put_ephemeral

    def putting(key: str, value: bytes, writers: tuple[str, str], session: str) -> bool:
        done = put(key, value, writers, session)
        loop.call_soon_threadsafe(then)
        return done

    tables.__dict__["put_ephemeral"] = putting


async def test_a_registration_that_was_cancelled_leaves_no_key(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        registering = asyncio.create_task(store.register("b/1", b"1"))
        at_each_put(store, registering.cancel)
        with pytest.raises(asyncio.CancelledError):
            await registering
        assert await store.children("b") == []


async def test_a_registration_closed_while_it_comes_to_another_session_leaves_no_key(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        registration = await store.register("b/1", b"1")
        former = store.session
        await store._begin_session()  # the lease has run out
        await store._write(lambda: store._tables.drop_sessions([former]))
        closing: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()
        at_each_put(store, lambda: closing.set_result(asyncio.create_task(registration.close())))
        async with asyncio.timeout(20):
            await (await closing)  # `_maintain` puts it
        assert await store.children("b") == []
        assert await registration.put()  # by a round of `_maintain` that had begun
        assert await store.children("b") == []


def test_a_lease_renewed_while_somebody_looks_is_not_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as undo:
        owner = Leases(tmp_path / "m.db", lease_s=0.05)
        undo.callback(owner.close)
        other = Leases(tmp_path / "m.db", lease_s=10.0)
        undo.callback(other.close)
        began_ns = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: began_ns)
        owner.begin("renewed")
        owner.begin("late")
        other.begin("other")
        withdraw = Leases._withdraw

        def beside_a_renewal(leases: Leases, session: str, deadline_ns: int) -> bool:
            if session == "renewed":
                with monkeypatch.context() as patched:  # it began in time, and then waited for the database
                    patched.setattr(time, "monotonic_ns", lambda: began_ns + 40_000_000)
                    assert owner.renew(session)
            return withdraw(leases, session, deadline_ns)

        monkeypatch.setattr(Leases, "_withdraw", beside_a_renewal)
        now_ns = began_ns + 60_000_000
        monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
        assert other.live() == {"renewed", "other"}
        monkeypatch.setattr(Leases, "_withdraw", withdraw)
        assert owner.renew("renewed")
        assert not owner.renew("late")


async def test_a_session_begins_though_the_leases_are_locked_for_a_while(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "m.db")
    other = sqlite3.connect(tmp_path / f"m.db-leases-{boot_id()}", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    registering = asyncio.create_task(store.register("b/1", b"1"))
    await asyncio.sleep(0.3)  # longer than one try waits
    other.execute("COMMIT")
    other.close()
    done, _ = await asyncio.wait([registering], timeout=10)
    for lock in [] if done else list(store._leases._locks.values()):
        lock.close()  # else the worker, and this process, would wait for it for ever
    await store.close()
    assert done
    await registering


async def test_registrations_that_begin_together_share_one_session(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        one, other = await asyncio.gather(store.register("b/1", b"1"), store.register("b/2", b"2"))
        assert await store._submit(store._tables.owners) == [store.session]
        await other.close()
        await one.close()


async def test_locks_that_cannot_be_opened_for_a_while_end_no_looking_after_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        await SqliteMetadataStore.open(tmp_path / "m.db", lease_s=0.4) as store,
        await SqliteMetadataStore.open(tmp_path / "m.db", lease_s=0.4) as other,
    ):
        await other.register("b/other", b"1")
        await store.register("b/1", b"1")
        session = store.session
        await store._submit_lease(lambda: store._leases.end(session))  # as after its lease has run out
        with monkeypatch.context() as patched:
            # As without file descriptors: below a file nothing can be opened.
            patched.setattr(Leases, "_lock_path", lambda leases, session: leases._path / session)
            await asyncio.sleep(0.5)
        async with asyncio.timeout(20):
            async for _ in store.watch("b"):
                if store.session != session and await store.children("b") == ["1", "other"]:
                    break
        assert not any(task.done() for task in store._tasks)


async def test_a_registration_that_could_not_be_removed_is_removed_later(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path, lease_s=0.8, operation_timeout_s=0.2) as store:
        registration = await store.register("b/1", b"1")
        locker = sqlite3.connect(path, isolation_level=None)
        locker.execute("BEGIN IMMEDIATE")
        with pytest.raises(MetadataUnavailableError):
            await registration.close()
        locker.execute("COMMIT")
        locker.close()
        async with asyncio.timeout(10):
            async for _ in store.watch("b"):
                if not await store.children("b"):
                    break
        await asyncio.sleep(0.4)
        assert not store._registrations


async def test_a_lock_file_that_cannot_be_removed_ends_no_looking_after_registrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's, in a directory with the sticky bit."""
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if "-leases-" in path.name:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    async with await SqliteMetadataStore.open(tmp_path / "m.db", lease_s=0.4) as store:
        other = await SqliteMetadataStore.open(tmp_path / "m.db", lease_s=0.4)
        await other.register("b/other", b"1")
        await asyncio.wait(other._abandon())  # as by kill -9: its lock is free, and its key is left
        async with asyncio.timeout(20):
            async for _ in store.watch("b"):
                if not await store.children("b"):
                    break
        assert not any(task.done() for task in store._tasks)
        await store.register("b/1", b"1")


async def test_sessions_that_ended_or_never_began_keep_no_lock(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db", lease_s=0.4) as store:
        await store.register("b/1", b"1")
        leases, session = store._leases, store.session
        await store._submit_lease(lambda: leases._database.execute("DELETE FROM lease"))  # it has run out
        async with asyncio.timeout(20):
            async for _ in store.watch("b"):
                if store.session != session and await store.children("b") == ["1"]:
                    break
        await store._submit_lease(lambda: None)  # behind what gives up the former lock
        assert set(leases._locks) == {store.session}
        await store._submit_lease(lambda: leases._database.execute("ALTER TABLE lease RENAME TO gone"))
        with pytest.raises(MetadataUnavailableError):  # as on a disk that fails
            await store._submit_lease(lambda: leases.begin("another"))
        assert "another" not in leases._locks
        assert not leases._lock_path("another").exists()
        await store._submit_lease(lambda: leases._database.execute("ALTER TABLE gone RENAME TO lease"))


async def test_damaged_writers_of_a_key_are_a_typed_error(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        await store.create("a", b"1")
        await store._submit(lambda: store._tables._database.execute("UPDATE node SET writers = '{' "))
        with pytest.raises(MetadataCorruptError, match="'a' names no writers"):
            await store.read("a")


WATCHED_TO_THE_END = """
import asyncio, sys, threading
from metadata.errors import ClientClosedError
from metadata.backends.sqlite.store import SqliteMetadataStore

is_watching = threading.Event()

async def follow():
    store = await SqliteMetadataStore.open(sys.argv[1])
    await store.create("a", b"1")
    try:
        async for _ in store.watch("a"):
            await store.read("a")
            is_watching.set()
    except ClientClosedError:
        print("told")

threading.Thread(target=lambda: asyncio.run(follow())).start()
is_watching.wait()
"""


def test_a_watch_ends_when_the_interpreter_does(tmp_path: Path) -> None:
    """The interpreter ends the store's workers, and then waits for the thread that follows."""
    command = [sys.executable, "-c", WATCHED_TO_THE_END, tmp_path / "m.db"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "told\n"


def _modes(directory: Path, pattern: str) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.glob(pattern)}


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
async def test_files_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
            await store.register("a", b"1")
            modes = _modes(tmp_path, "*")
    finally:
        os.umask(before)
    assert len(modes) >= 6  # the store, the leases, for each its -wal and -shm, and the session's lock
    assert set(modes.values()) == {0o600}, modes


async def test_leases_of_a_shared_store_are_shared(tmp_path: Path) -> None:
    async with await SqliteMetadataStore.open(tmp_path / "m.db"):
        pass
    (tmp_path / "m.db").chmod(0o660)
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        await store.register("a", b"1")
        modes = _modes(tmp_path, "m.db-leases-*")
    assert set(modes.values()) == {0o660}, modes


async def test_an_error_that_was_caught_leaves_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """The collector would end what the error's frames hold, tasks among it, in any thread."""
    async with await SqliteMetadataStore.open(tmp_path / "m.db") as store:
        gc.disable()
        try:
            try:
                await store.read("missing")
            except NoSuchKeyError as raised:
                error = weakref.ref(raised)
            await store.children("missing")  # The worker has let go of the call before.
            assert error() is None
        finally:
            gc.enable()


async def test_watches_do_not_ask_a_database_whose_files_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a change of another process is seen all the same."""
    monkeypatch.setattr(sqlite_store, "_RECENT_S", 0.05)
    async with (
        await SqliteMetadataStore.open(tmp_path / "m.db") as store,
        await SqliteMetadataStore.open(tmp_path / "m.db") as other,
    ):
        version = await other.create("count", b"0")
        looks, asked = 0, 0
        stamp, changed = sqlite_store._stamp_of, store._tables.signatures

        def look(path: Path) -> sqlite_store.Stamp | None:
            nonlocal looks
            looks += 1
            return stamp(path)

        def ask(keys: tuple[str, ...]) -> Any:
            nonlocal asked
            asked += 1
            return changed(keys)

        monkeypatch.setattr(sqlite_store, "_stamp_of", look)
        monkeypatch.setattr(store._tables, "signatures", ask)
        async with aclosing(store.watch("count")) as changes:
            await anext(changes)
            for number in range(1, 4):
                following = asyncio.ensure_future(anext(changes))
                async with asyncio.timeout(WAIT_S):
                    until = looks + 20
                    while looks < until:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert not following.done()
                version = await other.compare_and_set("count", b"%d" % number, version)
                await asyncio.wait_for(following, WAIT_S)
                assert (await store.read("count")).value == b"%d" % number
        assert asked < looks / 2


@pytest.mark.parametrize("key", ["k", "a/b/c"])
async def test_a_watcher_that_read_what_is_made_and_removed_between_two_polls_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Both polls find the key missing."""
    monkeypatch.setattr(sqlite_store, "POLL_INTERVAL_S", 3600.0)  # the test says when
    async with (
        asyncio.timeout(WAIT_S),
        await SqliteMetadataStore.open(tmp_path / "m.db") as store,
        await SqliteMetadataStore.open(tmp_path / "m.db") as other,
    ):
        await other.create(key, b"1")
        async with aclosing(store.watch(key)) as changes:
            await anext(changes)
            await other.delete(key)
            store._poll_now.set()
            await anext(changes)
            await other.create(key, b"2")
            assert (await store.read(key)).value == b"2"
            await other.delete(key)
            store._poll_now.set()
            await anext(changes)
            with pytest.raises(NoSuchKeyError):
                await store.read(key)
