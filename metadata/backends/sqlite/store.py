"""The embedded metadata store: one SQLite file, shared by several processes of one machine.

Owns the asynchronous part. `metadata.backends.sqlite.tables` has the SQL statements,
`metadata.backends.sqlite.leases` the leases, `metadata.backends.sqlite.database` the connections of both:

- Threads: one worker for all calls into the database, and one for the leases. A call is retried while another
  process holds the write lock.
- Watches: every `POLL_INTERVAL_S` while there is a watch, the event loop looks at the times and sizes of the
  file and its WAL. `PRAGMA data_version` is asked when these have changed, or are recent, and every second.
- Sessions: begun with the first registration; its lease is renewed every quarter of `lease_s`. Every process
  with the store open removes the keys of dead sessions. A process that was stopped for longer than its lease
  finds the lease gone, begins another session and registers anew. As often it looks whether the keys of its
  registrations are there, and no others of its session: an older copy of the file may say otherwise.
- Files: where the path names another file than before, each call goes to that one, and all watches fire.
- Forks: no fork of this process happens during a call into SQLite (`ForkGate`).

A fork copies the mutexes of all threads, but only the thread that forks. A global mutex of SQLite that
another thread holds at that moment stays locked in the child for ever. The child's first call into SQLite
then never returns, even on a new connection. So calls into SQLite pass through the gate, and `os.fork` waits
until no call is inside. `subprocess` does not wait: it runs no Python of this process in its child. Python's
`logging` protects its own locks in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote

from metadata.awake import Deadline, awake_timeout
from metadata.backends.sqlite.database import BusyError
from metadata.backends.sqlite.leases import Leases
from metadata.backends.sqlite.tables import Tables
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    InvalidArgumentError,
    KeyExistsError,
    MetadataUnavailableError,
    is_unforeseen,
)
from metadata.keys import check_count, check_key, check_sequence, check_value, token_of
from metadata.owned_task import OwnedTask
from metadata.store import Guard, MetadataStore, Registration, Version, Versioned

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence

    from metadata.backends.sqlite.tables import Signature


class ForkGate:
    """Keeps forks and calls into SQLite apart: many threads may be inside, but none during a fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shutting = False

    @contextmanager
    def no_fork(self) -> Generator[None, None, None]:
        """Keep the process from forking inside this context.

        Code inside must be short, since a fork waits for it, and must not fork itself.
        """
        with self._changed:
            while self._shutting:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    def shut(self) -> None:
        """Wait until no thread is inside, and let none in."""
        self._changed.acquire()
        self._shutting = True
        while self._inside:
            self._changed.wait()

    def open(self) -> None:
        """Let threads in again, in the parent."""
        self._shutting = False
        self._changed.notify_all()
        self._changed.release()

    def renew(self) -> None:
        """Reset the gate in the child, which has none of the parent's other threads."""
        self._changed = threading.Condition()
        self._inside = 0
        self._shutting = False


gate = ForkGate()
"""The one gate of this process."""

os.register_at_fork(before=gate.shut, after_in_parent=gate.open, after_in_child=gate.renew)


Result = TypeVar("Result")
Stamp = tuple[tuple[int, int, int], ...]

POLL_INTERVAL_S = 0.05
_ASK_INTERVAL_S = 1.0
"""The database itself is asked so often, whatever the files look like."""
_RECENT_S = 2.5
"""A file may be changed again within the resolution of its time, which is 2 s on some file systems."""
LEASE_S = 2.0
REMOVAL_PATIENCE_S = 1.0
"""How long a dead session's keys may outlast its lease, on a slow disk."""

log = logging.getLogger(__name__)


def _stamp_of(database: Path) -> Stamp | None:
    """Return times and sizes of the files that a commit changes; None where they prove nothing."""
    found = []
    for path in (database, f"{database}-wal"):
        try:
            stat = os.stat(path)
        except OSError:
            return None
        if time.time_ns() - stat.st_mtime_ns <= _RECENT_S * 1e9:
            return None
        found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


class _Watch:
    """One running `watch`."""

    __slots__ = ("changed", "key", "signature")

    def __init__(self, key: str, signature: Signature) -> None:
        self.key = key
        self.signature: Signature | None = signature
        self.changed = asyncio.Event()


class SqliteMetadataStore(MetadataStore):
    """A metadata store in an SQLite file. Open it with `open`."""

    def __init__(self, path: Path, *, lease_s: float, operation_timeout_s: float) -> None:
        """Prepare without opening; use `open`."""
        self.uri = f"sqlite://{quote(os.fsencode(path))}"
        self._path = path
        self._lease_s = lease_s
        self.registration_wait_s = lease_s * 2 + REMOVAL_PATIENCE_S
        self._operation_timeout_s = operation_timeout_s
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metadata-sqlite")
        self._lease_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metadata-leases")
        self._opened: Tables | None = None
        self._opened_leases: Leases | None = None
        self._closed = False
        self._tasks: list[OwnedTask] = []
        self._watches: set[_Watch] = set()
        self._poll_now = asyncio.Event()
        self._session: str | None = None
        self._session_lock = asyncio.Lock()  # held while the first session is begun
        self._renewed_at = 0.0  # by the loop's clock; read before the renewal, so never too late
        self._registrations: set[_SqliteRegistration] = set()
        self._registering: set[_SqliteRegistration] = set()

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        create: bool = True,
        lease_s: float = LEASE_S,
        operation_timeout_s: float = 10.0,
    ) -> Self:
        """Open the store.

        Args:
            path: absolute path of the database file.
            create: create the file where it is missing; its directory must exist.
            lease_s: how long a registration outlives its process.
            operation_timeout_s: how long an operation waits for other processes' transactions.

        Raises:
            InvalidArgumentError: the path is not absolute, or cannot hold a database.
            NoSuchClusterError: without `create`: the file is missing, or empty. Nothing was made.
            MetadataCorruptError: the file is no metadata store, is damaged, or has an unknown schema.
            MetadataUnavailableError: the file is locked for too long, or the disk fails.
        """
        path = Path(path)
        if not path.is_absolute():
            raise InvalidArgumentError(f"the path of an SQLite metadata store is absolute, not {str(path)!r}")
        store = cls(path, lease_s=lease_s, operation_timeout_s=operation_timeout_s)
        try:
            store._opened = await store._retry_while_busy(store._worker, lambda: Tables(path, create=create))
            store._opened_leases = await store._retry_while_busy(
                store._lease_worker, lambda: Leases(path, lease_s=lease_s)
            )
            await store._remove_dead()
        except BaseException:
            store._abandon()
            raise
        loops = (store._poll, store._maintain, store._keep_session)
        store._tasks = [OwnedTask(each, f"SQLite {each.__name__}") for each in loops]
        return store

    @property
    def session(self) -> str:
        return self._session or ""

    @property
    def session_alive_until(self) -> float:
        return self._renewed_at + self._lease_s

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        check_key(key)
        value = check_value(value)
        given, token = token is not None, token_of(token)
        return await self._write(lambda: self._tables.create(key, value, token, given))

    async def create_missing(self, records: Sequence[tuple[str, bytes]]) -> list[str]:
        checked = [(check_key(key), check_value(value)) for key, value in records]
        token = token_of(None)
        return await self._write(lambda: self._tables.create_missing(checked, token))

    async def read(self, key: str) -> Versioned:
        check_key(key)
        return await self._submit(lambda: self._tables.read(key))

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        check_key(key)
        value = check_value(value)
        given, token = token is not None, token_of(token)
        return await self._write(
            lambda: self._tables.compare_and_set(key, value, version, token, given, guard)
        )

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        check_key(key)
        await self._write(lambda: self._tables.delete(key, version, guard))

    async def children(self, key: str) -> list[str]:
        check_key(key, root_allowed=True)
        return await self._submit(lambda: self._tables.children(key))

    async def watch(self, key: str) -> AsyncGenerator[None, None]:
        check_key(key, root_allowed=True)
        watch = _Watch(key, await self._submit(lambda: self._tables.signature(key)))
        self._watches.add(watch)
        self._poll_now.set()
        try:
            while True:
                watch.changed.clear()
                yield
                await watch.changed.wait()
                self._check_open()
        finally:
            self._watches.discard(watch)

    async def register(self, key: str, value: bytes) -> Registration:
        check_key(key)
        registration = _SqliteRegistration(self, key, check_value(value))
        async with self._session_lock:
            if self._session is None:
                await self._begin_session()
        # The holder may be this process from before a crash. Its lease then runs out, and the next round of
        # `_maintain`, here or in any other process, removes the key.
        changes = self.watch(key)
        self._registering.add(registration)
        try:
            async with awake_timeout(self.registration_wait_s):
                async for _ in changes:
                    if await registration.put():
                        break
        except BaseException as error:
            # A put that was cut off may take effect, now or later, and no other code would undo it.
            with suppress(BookKeeperError):
                await registration.close()
            if isinstance(error, TimeoutError):
                raise KeyExistsError(f"key {key!r} is held by another live session") from None
            raise
        else:
            self._registrations.add(registration)
        finally:
            self._registering.discard(registration)
            await changes.aclose()
        return registration

    async def allocate_ids(self, name: str, count: int) -> range:
        check_count(name, count)
        return await self._write(lambda: self._tables.allocate(name, count))

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        check_sequence(name, least)
        submit = self._write if least else self._submit
        return await submit(lambda: self._tables.ids_drawn(name, least))

    async def age_s(self, key: str) -> float:
        check_key(key)
        return await self._submit(lambda: self._tables.age_s(key))

    async def sync(self, key: str) -> None:
        """Do nothing: every read of this store sees the last transaction of any process."""
        check_key(key, root_allowed=True)
        self._check_open()

    async def close(self) -> None:
        if self._closed:
            return
        session = self._session
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            await task.wait()
        self._registrations.clear()
        try:
            if session is not None:
                await self._submit_lease(lambda: self._leases.end(session))
                await self._submit(lambda: self._tables.drop_sessions([session]))
        except BookKeeperError as error:
            log.warning("session not ended, its lease will run out: %s", error)
        finally:
            files_closed = self._abandon()
        await asyncio.wait(files_closed)

    def _abandon(self) -> list[asyncio.Future[None]]:
        """Close without ending the session, as the death of the process would.

        Returns:
            Futures that are done once the files are closed.
        """
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for watch in self._watches:
            watch.changed.set()
        loop = asyncio.get_running_loop()
        files_closed = [
            loop.run_in_executor(
                worker, _through_gate, opened.close if opened is not None else _close_nothing
            )
            for worker, opened in (
                (self._worker, self._opened),
                (self._lease_worker, self._opened_leases),
            )
        ]
        self._worker.shutdown(wait=False)
        self._lease_worker.shutdown(wait=False)
        return files_closed

    @property
    def _tables(self) -> Tables:
        assert self._opened is not None, "the store was opened by `open`"
        return self._opened

    @property
    def _leases(self) -> Leases:
        assert self._opened_leases is not None, "the store was opened by `open`"
        return self._opened_leases

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the metadata store is closed")

    async def _submit(self, call: Callable[[], Result]) -> Result:
        """Run a call on the database's worker; raises as `_retry_while_busy` does."""
        return await self._retry_while_busy(self._worker, partial(self._tables.run, call))

    async def _submit_lease(self, call: Callable[[], Result]) -> Result:
        """Run a call on the leases' worker; raises as `_retry_while_busy` does."""
        return await self._retry_while_busy(self._lease_worker, partial(self._leases.run, call))

    async def _retry_while_busy(self, worker: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
        """Run a call, and retry while another process holds the write lock.

        Raises:
            ClientClosedError: the store is closed.
            MetadataUnavailableError: the write lock stayed taken for `operation_timeout_s`.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        with Deadline(self._operation_timeout_s) as deadline:
            while True:
                try:
                    called = loop.run_in_executor(worker, _through_gate, call)
                except RuntimeError as error:
                    if "shutdown" not in str(error):
                        raise
                    # The interpreter is exiting, and has ended all workers before the store was closed.
                    raise ClientClosedError("the metadata store is closed: the interpreter ends") from error
                try:
                    return await called
                except BusyError as error:
                    self._check_open()
                    if deadline.is_over:
                        raise MetadataUnavailableError(
                            f"the metadata database {self._path} stayed locked by another process for "
                            f"{self._operation_timeout_s:g} s"
                        ) from error
                finally:
                    del called  # Its error holds this frame: with the future, a cycle for the collector.

    async def _write(self, call: Callable[[], Result]) -> Result:
        result = await self._submit(call)
        self._poll_now.set()
        return result

    async def _poll(self) -> None:
        """Wake the watches whose key has changed."""
        loop = asyncio.get_running_loop()
        timer = loop.call_soon(self._poll_now.set)
        seen: tuple[Stamp | None, tuple[str, ...]] = (None, ())
        asked_at = -math.inf
        while True:
            await self._poll_now.wait()
            self._poll_now.clear()
            watches = list(self._watches)
            if not watches:
                continue
            pause_s = POLL_INTERVAL_S
            keys = tuple(watch.key for watch in watches)
            stamp = _stamp_of(self._path)  # before the database is asked: of a later commit it is another
            if stamp is not None and seen == (stamp, keys) and loop.time() - asked_at < _ASK_INTERVAL_S:
                timer.cancel()
                timer = loop.call_later(pause_s, self._poll_now.set)
                continue
            seen, asked_at = (stamp, keys), loop.time()
            found: dict[str, Signature]
            try:
                found = await self._submit(partial(self._tables.signatures, keys))
            except ClientClosedError:
                for watch in self._watches:  # a watcher reads next, and its read raises ClientClosedError
                    watch.changed.set()
                return
            except Exception as error:
                # All watches are woken: a watcher's next read raises the error to its caller.
                log.warning("watches cannot be checked: %s", error, exc_info=is_unforeseen(error))
                found, pause_s, seen = {}, 1.0, (None, ())
            for watch in watches:
                if watch.signature != found.get(watch.key):
                    watch.signature = found.get(watch.key)
                    watch.changed.set()
            timer.cancel()
            timer = loop.call_later(pause_s, self._poll_now.set)

    async def _maintain(self) -> None:
        """Remove the keys of dead sessions, and see to it that every registration is there."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                await self._remove_dead()
                if self._session is not None:
                    await _mend_registrations(self, self._session)
            except ClientClosedError:
                return
            except Exception as error:  # any error: without this loop dead sessions would keep their keys
                log.warning("registrations not looked after: %s", error, exc_info=is_unforeseen(error))

    async def _keep_session(self) -> None:
        """Renew the lease; begin another session when it has run out."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            session, now = self._session, asyncio.get_running_loop().time()
            try:
                if session is None or await self._submit_lease(partial(self._leases.renew, session)):
                    self._renewed_at = now
                    continue
                log.warning("session %s expired; beginning another", session)
                await self._begin_session()
                await self._submit_lease(partial(self._leases.release_lock, session))
            except ClientClosedError:
                return
            except Exception as error:  # any error: without this loop the lease would run out
                log.warning("lease not renewed, trying again: %s", error, exc_info=is_unforeseen(error))

    async def _remove_dead(self) -> None:
        # Owners first, leases second: a session that begins in between is then not among the owners.
        owners = await self._submit(self._tables.owners)
        if owners:
            live = await self._submit_lease(self._leases.live)
            dead = [session for session in owners if session not in live]
            if dead:
                await self._write(lambda: self._tables.drop_sessions(dead))

    async def _begin_session(self) -> None:
        session, now = secrets.token_hex(8), asyncio.get_running_loop().time()
        await self._submit_lease(lambda: self._leases.begin(session))
        self._session, self._renewed_at = session, now


class _SqliteRegistration(Registration):
    """An ephemeral key of one `SqliteMetadataStore`."""

    def __init__(self, store: SqliteMetadataStore, key: str, value: bytes) -> None:
        self.key = key
        self._store = store
        self._value = value
        self.mark = token_of(None)
        self.is_closed = False
        self._lock = asyncio.Lock()

    @property
    def stored(self) -> tuple[str, bytes]:
        """Return what the store holds of it, once it is put: its mark and its value."""
        return self.mark, self._value

    async def put(self) -> bool:
        """Write the latest value under the store's session; False where another registration holds the key.

        After `close` it removes the key instead.
        """
        async with self._lock:
            done = self.is_closed or await self._put()
            if self.is_closed:  # perhaps since the key was written
                await self._remove()
                return True
            return done

    async def _put(self) -> bool:
        store, session, value = self._store, self._store._session, self._value
        assert session is not None
        writers = (self.mark, token_of(None))
        return await store._write(partial(store._tables.put_ephemeral, self.key, value, writers, session))

    async def update(self, value: bytes) -> None:
        self._value = check_value(value)
        if not await self.put():
            raise KeyExistsError(f"key {self.key!r} is held by another session for now")

    async def close(self) -> None:
        store = self._store
        if self.is_closed:
            return
        self.is_closed = True  # a `put` under way removes the key that it makes
        store._registrations.discard(self)
        try:
            async with self._lock:
                with suppress(ClientClosedError):
                    await self._remove()
        except BaseException:
            # The session may outlive this failure, and the key would with it: `_maintain` retries.
            store._registrations.add(self)
            raise

    async def _remove(self) -> None:
        # By the mark and not by the session: the store may have begun another session since.
        store = self._store
        await store._write(lambda: store._tables.drop_ephemeral(self.key, self.mark))


async def _mend_registrations(store: SqliteMetadataStore, session: str) -> None:
    """Put what the session lacks: it is another one now, or an older copy took the file's place.

    A copy may also have keys of the session's that were removed since. Nothing else would remove them.
    """
    found = await store._submit(lambda: store._tables.ephemerals(session))
    for registration in sorted(store._registrations, key=lambda each: each.key):
        is_there = found.get(registration.key) == registration.stored and not registration.is_closed
        if not is_there and not await registration.put():
            log.warning("key %r is held by another session; trying again", registration.key)
        elif registration.is_closed:
            store._registrations.discard(registration)
    # Read behind the keys: a registration is among these before its key is first written.
    marks = {registration.mark for registration in store._registrations | store._registering}
    for key, (mark, _) in found.items():
        if mark not in marks:
            await store._write(partial(store._tables.drop_ephemeral, key, mark))


def _through_gate(call: Callable[[], Result]) -> Result:
    with gate.no_fork():
        return call()


def _close_nothing() -> None:
    """Stand in for the close of a file that was never opened."""
