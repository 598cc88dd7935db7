"""The metadata store on a ZooKeeper ensemble.

Owns versions in ZooKeeper, settling a write whose answer was lost, and keeping ephemeral keys alive. `layout`
has the data of a node, `registration` an ephemeral key, and `session` the session.

- A key is a node below the root.
- A version is the node's data version, the writers, and the incarnation. The incarnation is the node's czxid,
  together with the data version at which the key was created if the node existed before.
- `ROOT/.store/ids/NAME` are the sequences of ids; `sync` writes to `ROOT/.store/sync`.

A request is sent once per connection. After a lost answer the node is read again over the next connection,
and its content decides. An unchanged node decides nothing: the write is then sent again from the same
version, and at most one of the two can take effect. This is repeated until the outcome is certain or the
operation times out; then the outcome is *unknown*.

ZooKeeper compares data versions only, and a node created anew starts from 0 again. So a late request for a
deleted node could apply to a new node of the same path. Where a key may be created anew, as names are, its
node therefore stays when the key is deleted (`keeps_place`). It has no data, so that the key does not exist,
and its data version goes on. `vacate` removes the node once every earlier request has arrived, or never will.
Other keys have ids that are never used twice; their czxid is read before the write, and again from the
answer.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from metadata import write_outcome
from metadata.awake import awake_timeout
from metadata.backends.zookeeper.layout import (
    KEY_IDS,
    KEY_OWN,
    KEY_SYNC,
    OWN_KEYS,
    seal,
    seal_counter,
    unseal,
    unseal_counter,
)
from metadata.backends.zookeeper.registration import Attempt, RetryError, ZooKeeperRegistration
from metadata.backends.zookeeper.session import (
    BadVersionError,
    CheckFailedError,
    ConnectionLostError,
    EphemeralParentError,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RefusedError,
    Session,
)
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    InvalidArgumentError,
    KeyExistsError,
    MetadataCorruptError,
    MetadataUnavailableError,
    NoSuchKeyError,
    UnauthorizedAccessError,
    is_unforeseen,
    no_cluster,
)
from metadata.keys import (
    ancestors_of,
    check_count,
    check_key,
    check_sequence,
    check_value,
    token_of,
)
from metadata.owned_task import OwnedTask
from metadata.store import Guard, MetadataStore, Registration, Version, Versioned

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from metadata.backends.zookeeper.session import Stat


SESSION_TIMEOUT_S = 6.0
RETRY_PAUSE_S = 0.02
_LOOKS_AT_ONCE = 64
_ZXID_BITS = 64

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class ZooKeeperMetadataStore(MetadataStore):
    """A metadata store in ZooKeeper. Open it with `open`."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        root: str,
        *,
        session_timeout_s: float,
        operation_timeout_s: float,
    ) -> None:
        """Prepare without connecting; use `open`."""
        self._servers = ",".join(f"{host}:{port}" for host, port in servers)
        self.uri = f"zk://{self._servers}/{root}"
        self._root = f"/{root}" if root else ""
        self._operation_timeout_s = operation_timeout_s
        self._session = Session(servers, timeout_s=session_timeout_s, written=self._path(KEY_SYNC))
        self._synced = (0, (0, 0))  # the last sync: its session, and the czxid and version of `KEY_SYNC`
        self.registration_wait_s = session_timeout_s * 2
        self._look_now = asyncio.Event()  # at the registrations: a watch has fired, or a connection was made
        self._registrar: OwnedTask | None = None
        self._registrations: set[ZooKeeperRegistration] = set()
        self._watching: set[asyncio.Event] = set()
        self._closed = False

    @classmethod
    async def open(
        cls,
        servers: Sequence[tuple[str, int]],
        root: str = "",
        *,
        create: bool = True,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        operation_timeout_s: float = 10.0,
    ) -> Self:
        """Connect.

        Args:
            create: create the root, and the nodes that the store needs, where they are missing.
            servers: host and port of each server of the ensemble.
            root: the node, without the leading slash, below which all keys are; empty for the topmost.
            session_timeout_s: how long registrations outlive their process; the servers may change it.
            operation_timeout_s: how long each operation, this one too, is retried before it raises.

        Raises:
            NoSuchClusterError: without `create`: the root is missing, or no store has been made below it.
            MetadataUnavailableError: no server began a session in time; the message has each server's reason.
        """
        store = cls(
            servers, root, session_timeout_s=session_timeout_s, operation_timeout_s=operation_timeout_s
        )
        store._session.start()
        try:
            await store._settle("open", partial(store._prepare_own_nodes, create))
        except BaseException:
            store._abandon()
            raise
        store._registrar = OwnedTask(store._register_anew, "ZooKeeper registrations")
        return store

    @property
    def session(self) -> str:
        return f"{self._session.session_id:x}"

    @property
    def session_alive_until(self) -> float:
        return self._session.heard_at + self._session.timeout_s

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        check_key(key)
        value = check_value(value)
        given, token = token is not None, token_of(token)

        async def attempt(state: Attempt) -> Version:
            try:
                stat = await state.write(self._session.create(self._path(key), seal(value, (token,))))
                return _version(stat, (token,))
            except NoNodeError:
                if not ancestors_of(key):
                    raise  # the root is missing
                await self._create_missing(map(self._path, ancestors_of(key)))
                raise RetryError from None
            except NodeExistsError:
                found, stat = await self._session.get(self._path(key))
            if found:
                _, writers, born = unseal(key, found)
                current = _version(stat, writers, born)
                return write_outcome.settle_create(key, current, token, maybe_sent=state.maybe_sent)
            born = stat.version + 1
            data = seal(value, (token,), born)
            return _version(
                await state.write(self._session.set(self._path(key), data, stat.version)), (token,), born
            )

        return await self._settle(f"create {key!r}", attempt, maybe_sent=given)

    async def read(self, key: str) -> Versioned:
        check_key(key)

        async def attempt(_: Attempt) -> Versioned:
            return await self._get(key)

        return await self._settle(f"read {key!r}", attempt)

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
        check = None if guard is None else (self._path(guard.key), guard.version.number)

        async def attempt(state: Attempt) -> Version:
            try:
                current = (await self._get(key)).version
                if current == version:
                    writers = write_outcome.add_writer(current.writers, token)
                    born = version.incarnation >> _ZXID_BITS
                    data = seal(value, writers, born)
                    request = self._session.set(self._path(key), data, version.number, check)
                    stat = await state.write(request)
                    made = _version(stat, writers, born)
                    if made.incarnation != version.incarnation:
                        raise MetadataCorruptError(
                            f"key {key!r} was deleted and created anew while it was being written"
                        )
                    return made
            except NoSuchKeyError:
                if state.is_synced:
                    raise
                current = None
            except CheckFailedError:
                _judge_refusal(key, guard, state)
                raise
            # A conflict is decided only after a sync: a lagging server may show an old version.
            if not state.is_synced:
                await self._sync(state)
                raise RetryError
            assert current is not None
            return write_outcome.settle_compare_and_set(
                key, version, current, token, maybe_sent=state.maybe_sent
            )

        return await self._settle(f"compare and set {key!r}", attempt, maybe_sent=given)

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        check_key(key)
        assert version is not None or not keeps_place
        target: list[int] = [] if version is None else [version.incarnation]
        check = None if guard is None else (self._path(guard.key), guard.version.number)

        async def attempt(state: Attempt) -> None:
            try:
                current = (await self._get(key)).version
            except NoSuchKeyError:
                if state.maybe_sent:
                    return
                if state.is_synced:
                    raise
                await self._sync(state)
                raise RetryError from None
            if version is None and not state.maybe_sent:
                target[:] = [current.incarnation]  # an earlier read may have come from a lagging server
            if state.maybe_sent and current.incarnation != target[0]:
                return
            if version is not None and current != version:
                if state.is_synced:
                    raise write_outcome.conflict(key, version, current)
                await self._sync(state)
                raise RetryError
            try:
                if keeps_place:
                    await state.write(self._session.set(self._path(key), b"", current.number, check))
                else:
                    await state.write(self._session.delete(self._path(key), current.number, check))
            except NotEmptyError:
                raise InvalidArgumentError(f"key {key!r} has children and cannot be deleted") from None
            except CheckFailedError:
                _judge_refusal(key, guard, state)
                raise

        await self._settle(f"delete {key!r}", attempt)

    async def children(self, key: str) -> list[str]:
        check_key(key, root_allowed=True)

        async def attempt(_: Attempt) -> list[str]:
            try:
                names = await self._session.children(self._path(key) or "/")
            except NoNodeError:
                return []
            hidden = (KEY_OWN, "zookeeper") if key == "" else ()
            return sorted(name for name in names if name not in hidden)

        return await self._settle(f"list {key!r}", attempt)

    async def names(self, key: str) -> list[str]:
        names = await self.children(key)
        room = asyncio.Semaphore(_LOOKS_AT_ONCE)

        async def has_value(name: str) -> bool:
            async def attempt(_: Attempt) -> bool:
                stat = await self._session.exists(self._path(f"{key}/{name}"))
                return stat is not None and stat.data_bytes > 0

            async with room:
                return await self._settle(f"look at {key}/{name}", attempt)

        found = await asyncio.gather(*map(has_value, names))
        return [name for name, is_there in zip(names, found, strict=True) if is_there]

    async def vacate(self, key: str, *, older_than_s: float) -> bool:
        check_key(key)
        path = self._path(key)

        async def attempt(_: Attempt) -> bool:
            stat = await self._session.exists(path)
            if stat is None or stat.data_bytes:
                return False
            now_ms = (await self._session.set(self._path(KEY_SYNC), b"", -1)).modified_ms
            if now_ms - stat.modified_ms < older_than_s * 1000:
                return False
            try:
                await self._session.delete(path, stat.version)
            except (NoNodeError, BadVersionError, NotEmptyError):
                return False  # another client has vacated it, or has created the key anew, or keys below it
            return True

        return await self._settle(f"vacate {key!r}", attempt)

    async def watch(self, key: str) -> AsyncGenerator[None, None]:
        check_key(key, root_allowed=True)
        self._check_open()
        path = self._path(key) or "/"
        changed = asyncio.Event()
        self._session.add_watcher(path, changed)
        self._watching.add(changed)
        try:
            while True:
                # The watches are set before the caller reads, so that no change in between is missed.
                changed.clear()
                try:
                    if await self._session.exists(path, watch=True) is not None:
                        await self._session.children(path, watch=True)
                except (ConnectionLostError, NoNodeError):
                    self._check_open()
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                except (RefusedError, NoAuthError) as error:
                    await self._check_retryable(error, f"watch {key!r}", Attempt(maybe_sent=False))
                yield
                await changed.wait()
                self._check_open()
        finally:
            self._session.remove_watcher(path, changed)
            self._watching.discard(changed)

    async def register(self, key: str, value: bytes) -> Registration:
        check_key(key)
        registration = ZooKeeperRegistration(self, key, check_value(value))
        changes = self.watch(key)
        is_held = False
        try:
            # The holder may be this process from before a crash; its session then expires. Servers check for
            # expired sessions once per tick, which is at most half a session timeout.
            async with awake_timeout(self._session.timeout_s * 2) as patience:
                async for _ in changes:
                    is_held = not await registration.put()
                    if not is_held:
                        break
        except BaseException as error:
            # A put that was cut off may have taken effect, and no other code would undo it.
            with suppress(BookKeeperError):
                await registration.close()
            if not isinstance(error, TimeoutError) or not patience.expired():
                raise
            if not is_held:
                raise MetadataUnavailableError(f"key {key!r} could not be registered in time") from None
            raise KeyExistsError(f"key {key!r} is held by another live session") from None
        finally:
            await changes.aclose()
        self._registrations.add(registration)
        # The session may have changed since the key was written: the registrar looks.
        self._session.add_watcher(self._path(key), self._look_now)
        self._look_now.set()
        return registration

    async def allocate_ids(self, name: str, count: int) -> range:
        check_count(name, count)
        path = self._path(f"{KEY_IDS}/{name}")

        async def attempt(_: Attempt) -> range:
            # After a lost answer the next attempt draws another block, and the first one stays unused.
            try:
                data, stat = await self._session.get(path)
            except NoNodeError:
                await self._session.create(path, seal_counter(count))
                return range(count)
            start = unseal_counter(path, data)
            await self._session.set(path, seal_counter(start + count), stat.version)
            return range(start, start + count)

        return await self._settle(f"allocate ids of {name!r}", attempt)

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        check_sequence(name, least)
        path = self._path(f"{KEY_IDS}/{name}")

        async def attempt(state: Attempt) -> int:
            if not state.is_synced:
                await self._sync(state)  # a lagging server would not count the last draws
            try:
                data, stat = await self._session.get(path)
            except NoNodeError:
                if least:
                    await self._session.create(path, seal_counter(least))
                return least
            drawn = unseal_counter(path, data)
            if drawn < least:
                await self._session.set(path, seal_counter(least), stat.version)
            return max(drawn, least)

        return await self._settle(f"read the sequence of ids {name!r}", attempt)

    async def age_s(self, key: str) -> float:
        check_key(key)

        async def attempt(_: Attempt) -> float:
            # The write asks the leader for its time, and makes the next read see everything before it.
            now_ms = (await self._session.set(self._path(KEY_SYNC), b"", -1)).modified_ms
            stat = await self._session.exists(self._path(key))
            if stat is None or not stat.data_bytes:
                raise NoSuchKeyError(f"there is no key {key!r}")
            return max(0, now_ms - stat.created_ms) / 1000

        return await self._settle(f"ask for the age of {key!r}", attempt)

    async def sync(self, key: str) -> None:
        check_key(key, root_allowed=True)
        await self._settle(f"sync {key!r}", self._sync)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._registrations.clear()
        for changed in self._watching:
            changed.set()
        if self._registrar is not None:
            self._registrar.cancel()
            await self._registrar.wait()
        await self._session.close()

    def _abandon(self) -> None:
        """Close without ending the session, as the death of the process would."""
        self._closed = True
        for changed in self._watching:
            changed.set()
        if self._registrar is not None:
            self._registrar.cancel()
        self._session.abort()

    # Attempts

    async def _settle(
        self,
        what: str,
        attempt: Callable[[Attempt], Awaitable[Result]],
        *,
        maybe_sent: bool = False,
    ) -> Result:
        """Attempt the operation until its outcome is certain.

        Raises:
            MetadataUnavailableError: it is not certain within `operation_timeout_s`.
            ClientClosedError: the store is closed.
        """
        self._check_open()
        state = Attempt(maybe_sent=maybe_sent)
        try:
            async with awake_timeout(self._operation_timeout_s) as patience:
                while True:
                    try:
                        return await attempt(state)
                    except RetryError:
                        pass
                    except Exception as error:
                        await self._check_retryable(error, what, state)
                    self._check_open()
        except TimeoutError:
            if not patience.expired():
                raise
            problems = "; ".join(f"{server}: {why}" for server, why in self._session.problems.items())
            raise MetadataUnavailableError(
                f"ZooKeeper at {self._servers} gave no certain answer to {what} within "
                f"{self._operation_timeout_s:g} s ({problems or 'no error seen'})"
            ) from None

    async def _check_retryable(self, error: Exception, what: str, state: Attempt) -> None:
        """Return where another attempt can settle the operation; otherwise raise the final error."""
        match error:
            case ConnectionLostError():
                state.is_synced = False
            case NoNodeError() | NodeExistsError() | BadVersionError() | CheckFailedError():
                # Another client was faster. The next attempt must not read from a lagging server.
                try:
                    await self._sync(state)
                except ConnectionLostError:
                    pass
                except (RefusedError, NoAuthError) as refused:
                    await self._check_retryable(refused, what, state)
                except NoNodeError:
                    raise MetadataUnavailableError(
                        f"{what}: the root of the metadata, {self._root or '/'}, is gone from ZooKeeper"
                    ) from None
            case EphemeralParentError():
                raise InvalidArgumentError(f"{what}: an ephemeral key can have no children") from error
            case NoAuthError():
                raise UnauthorizedAccessError(f"{what}: ZooKeeper's access list forbids it") from error
            case RefusedError():
                raise MetadataUnavailableError(f"{what}: {error}") from error
            case _:
                raise error

    async def _sync(self, state: Attempt) -> None:
        # A write, since ZooKeeper's own sync asks no quorum. A leader cut off from the other servers may
        # still answer that sync, and a read after it may be stale.
        try:
            stat = await self._session.set(self._path(KEY_SYNC), b"", -1)
        except NoNodeError:
            await self._create_missing(map(self._path, OWN_KEYS))
            stat = await self._session.set(self._path(KEY_SYNC), b"", -1)
        (session_id, former), synced = self._synced, (stat.created_zxid, stat.version)
        self._synced = self._session.session_id, synced
        if session_id == self._session.session_id and synced <= former:
            # An older copy that has the session, on servers whose epoch is a later one. It may have keys of
            # the session's that were removed since: these go with the session.
            self._session.begin_anew("the servers were set back to an older copy of their data")
            raise ConnectionLostError("the session was given up")
        state.is_synced = True

    async def _get(self, key: str) -> Versioned:
        try:
            data, stat = await self._session.get(self._path(key))
        except NoNodeError:
            data, stat = b"", None
        if not data or stat is None:
            raise NoSuchKeyError(f"there is no key {key!r}")
        value, writers, born = unseal(key, data)
        return Versioned(value, _version(stat, writers, born))

    async def _prepare_own_nodes(self, create: bool, _: Attempt) -> None:
        if not create:
            try:
                # A write: a lagging server may not have heard of a store that has just been made.
                await self._session.set(self._path(KEY_SYNC), b"", -1)
            except NoNodeError:
                raise no_cluster(self.uri, f"ZooKeeper has no store below {self._root or '/'}") from None
            return
        if self._root and await self._session.exists(self._root) is None:
            root = self._root[1:]
            await self._create_missing([f"/{part}" for part in (*ancestors_of(root), root)])
        if await self._session.exists(self._path(KEY_SYNC)) is None:
            await self._create_missing(map(self._path, OWN_KEYS))

    async def _create_missing(self, paths: Iterable[str]) -> None:
        for path in paths:
            with suppress(NodeExistsError):
                await self._session.create(path, b"")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the metadata store is closed")

    # Registrations

    async def _register_anew(self) -> None:
        """Put every registration that is not there: after a watch has fired, and after each reconnect."""
        self._look_now.set()  # An earlier task may have been cancelled half-way.
        connections = 0
        while True:
            await self._look_now.wait()
            self._look_now.clear()
            if self._registrations and connections != self._session.connections:
                connections = self._session.connections
                await _try_again_later(self, "looking for an older copy", self.sync(""))
            for registration in sorted(self._registrations, key=lambda each: each.key):
                await _try_again_later(self, f"registering {registration.key!r}", registration.mend())

    def _forget(self, registration: ZooKeeperRegistration) -> None:
        self._registrations.discard(registration)
        if all(each.key != registration.key for each in self._registrations):
            self._session.remove_watcher(self._path(registration.key), self._look_now)

    def _schedule_retry(self) -> None:
        asyncio.get_running_loop().call_later(self._session.timeout_s / 4, self._look_now.set)


async def _try_again_later(store: ZooKeeperMetadataStore, what: str, work: Awaitable[None]) -> None:
    try:
        await work
    except Exception as error:  # any error: without the registrar's loop no key would be registered anew
        log.warning("%s failed, trying again: %s", what, error, exc_info=is_unforeseen(error))
        store._schedule_retry()


def _judge_refusal(key: str, guard: Guard | None, state: Attempt) -> None:
    """Raise GuardChangedError unless an earlier request may have taken effect before the guard changed."""
    if guard is not None and (state.is_synced or not state.maybe_sent):
        raise write_outcome.guard_changed(key, guard) from None


def _version(stat: Stat, writers: tuple[str, ...], born: int = 0) -> Version:
    return Version(stat.version, stat.created_zxid | born << _ZXID_BITS, writers)
