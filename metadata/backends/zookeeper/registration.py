"""Ephemeral keys of a ZooKeeper store, and what one attempt at an operation has done.

A registration has the session of its process as its owner. Its first writer token marks its node. ZooKeeper
cannot compare a node's session. So the data version of `ROOT/.store/registered` counts the ephemeral nodes
that were created, and a registration changes its node only while that count stays.

A node may go while its session lives: an operator deletes it, or the servers are set back to an older copy
that has the session and not the node. So the node is watched, and put again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from metadata.backends.zookeeper.layout import KEY_REGISTERED, OWN_KEYS, seal, unseal
from metadata.backends.zookeeper.session import ConnectionLostError, NodeExistsError, NoNodeError
from metadata.errors import KeyExistsError
from metadata.keys import ancestors_of, check_value, token_of
from metadata.store import Registration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from metadata.backends.zookeeper.session import Session, Stat

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Attempt:
    """The state of one operation, over as many connections as it takes."""

    def __init__(self, *, maybe_sent: bool) -> None:
        self.maybe_sent = maybe_sent
        """True where an earlier write of this operation may have taken effect."""

        self.is_synced = False
        """True where a read now is no older than the operation's first read."""

    async def write(self, request: Awaitable[Result]) -> Result:
        """Await a write; record that it may have taken effect where its answer is lost."""
        try:
            return await request
        except (ConnectionLostError, asyncio.CancelledError):
            self.maybe_sent = True
            raise


class RetryError(Exception):
    """The attempt cannot settle the operation, and the next one can."""


class _Store(Protocol):
    """What a registration asks of the `ZooKeeperMetadataStore` that it is of."""

    _closed: bool
    _session: Session
    _registrations: set[ZooKeeperRegistration]

    async def _settle(self, what: str, attempt: Callable[[Attempt], Awaitable[Result]]) -> Result: ...

    async def _create_missing(self, paths: Iterable[str]) -> None: ...

    def _path(self, key: str) -> str: ...

    def _forget(self, registration: ZooKeeperRegistration) -> None: ...

    def _schedule_retry(self) -> None: ...


class ZooKeeperRegistration(Registration):
    """An ephemeral key of one `ZooKeeperMetadataStore`. Its first writer token marks it as ours."""

    def __init__(self, store: _Store, key: str, value: bytes) -> None:
        self.key = key
        self._store = store
        self._value = value
        self._mark = token_of(None)
        self.is_closed = False
        self._lock = asyncio.Lock()

    async def mend(self) -> None:
        """Put the key where it is not there, and watch it from now on; remove it after `close`."""
        if await self._store._settle(f"look at {self.key!r}", self._is_there):
            return
        if not await self.put():
            log.warning("key %r is held by another session; trying again", self.key)
            self._store._schedule_retry()
        elif self.is_closed:
            self._store._forget(self)
        elif not await self._store._settle(f"watch {self.key!r}", self._is_there):
            self._store._schedule_retry()

    async def _is_there(self, _: Attempt) -> bool:
        if self.is_closed:
            return False
        session, path = self._store._session, self._store._path(self.key)
        if await session.exists(path, watch=True) is None:
            return False
        data, stat = await session.get(path)
        found = unseal(self.key, data)
        is_ours = found.writers[:1] == (self._mark,) and stat.session_id == session.session_id
        return is_ours and found.value == self._value

    async def put(self) -> bool:
        """Write the latest value under the present session; False where another registration holds the key.

        After `close` it removes the key instead.
        """
        async with self._lock:
            is_held = await self._store._settle(f"register {self.key!r}", self._put)
            if self.is_closed:  # perhaps since the key was made
                await self._store._settle(f"remove {self.key!r}", self._remove)
                is_held = True
            return is_held

    async def _put(self, state: Attempt) -> bool:
        # Idempotent, so that a lost answer needs no settling: the attempt is repeated.
        if self.is_closed:
            await self._remove(state)
            return True
        session = self._store._session
        path = self._store._path(self.key)
        value = self._value
        data = seal(value, (self._mark, token_of(None)))
        try:
            await session.create(path, data, counted_in=self._store._path(KEY_REGISTERED))
            return True
        except NoNodeError:
            needed = (*OWN_KEYS, *ancestors_of(self.key))
            await self._store._create_missing(map(self._store._path, needed))
            raise RetryError from None
        except NodeExistsError:
            found, stat, count = await self._look()
        if stat.session_id == 0:
            raise KeyExistsError(f"key {self.key!r} exists and is not ephemeral")
        found_value, writers, _ = unseal(self.key, found)
        if self._mark not in writers:
            return False
        if stat.session_id != session.session_id:
            # This registration's key, from an earlier session that has not expired yet.
            await session.delete(path, stat.version, count)
            raise RetryError
        if found_value != value:
            await session.set(path, data, stat.version, count)
        return True

    async def _look(self) -> tuple[bytes, Stat, tuple[str, int]]:
        """Return the node, and the count that stays while no other session can have created it anew."""
        count = self._store._path(KEY_REGISTERED)
        _, counted = await self._store._session.get(count)  # first: a node created afterwards is not counted
        return *await self._store._session.get(self._store._path(self.key)), (count, counted.version)

    async def update(self, value: bytes) -> None:
        self._value = check_value(value)
        if not await self.put():
            raise KeyExistsError(f"key {self.key!r} is held by another session for now")

    async def close(self) -> None:
        store = self._store
        if self.is_closed or store._closed:
            return
        self.is_closed = True  # a `put` under way removes the key that it makes
        store._forget(self)
        try:
            async with self._lock:
                await store._settle(f"remove {self.key!r}", self._remove)
        except BaseException:
            # The session may outlive this failure, and the key would with it: the registrar retries.
            store._registrations.add(self)
            store._schedule_retry()
            raise

    async def _remove(self, _: Attempt) -> None:
        with suppress(NoNodeError):
            found, stat, count = await self._look()
            if self._mark in unseal(self.key, found).writers:
                await self._store._session.delete(self._store._path(self.key), stat.version, count)
