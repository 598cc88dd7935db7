"""What the operations of the ZooKeeper store have in common: attempts, and ephemeral keys kept alive.

Owns the state of one operation over as many connections as it takes, and one registration. Does not own the
session, nor what an operation asks of it (`metadata.backends.zookeeper.store`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from metadata.backends.zookeeper.envelope import seal, unseal
from metadata.backends.zookeeper.session import ConnectionLostError, NodeExistsError, NoNodeError
from metadata.errors import KeyExistsError
from metadata.keys import check_value, token_of
from metadata.store import Registration

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from metadata.backends.zookeeper.store import ZooKeeperMetadataStore

Result = TypeVar("Result")


class Attempt:
    """One operation, over as many connections as it takes."""

    def __init__(self, *, maybe_sent: bool) -> None:
        self.maybe_sent = maybe_sent
        """An earlier write of this operation may have taken effect."""

        self.is_synced = False
        """What is read now is no older than the operation's first look."""

    async def write(self, request: Awaitable[Result]) -> Result:
        """Await a write, remembering when its answer is lost."""
        try:
            return await request
        except (ConnectionLostError, asyncio.CancelledError):
            self.maybe_sent = True
            raise


class AgainError(Exception):
    """The attempt has learnt what the next one needs to know."""


class ZooKeeperRegistration(Registration):
    """An ephemeral key of one `ZooKeeperMetadataStore`. Its first writer token marks it as ours."""

    def __init__(self, store: ZooKeeperMetadataStore, key: str, value: bytes) -> None:
        self.key = key
        self._store = store
        self._value = value
        self._mark = token_of(None)
        self.is_closed = False
        self._session_id = 0  # of the session under which the key was last put; 0: it may not be up to date
        self._lock = asyncio.Lock()

    @property
    def is_current(self) -> bool:
        """Tell whether nothing is left to do: the key was put under the present session."""
        return not self.is_closed and self._session_id == self._store._session.session_id != 0

    async def put(self) -> bool:
        """Bring the key to the latest value under the present session; False if another holds it.

        Once this is closed: see that the key is removed.
        """
        async with self._lock:
            self._session_id = 0
            # Before it is put: where another session begins meanwhile, it is put once more.
            session_id = self._store._session.session_id
            is_held = await self._store._settled(f"register {self.key!r}", self._put)
            self._session_id = session_id if is_held else 0
            return is_held

    async def _put(self, state: Attempt) -> bool:
        # Any number of attempts lead to the same end, so a lost answer needs no settling here.
        if self.is_closed:
            await self._remove(state)
            return True
        session = self._store._session
        path = self._store._path(self.key)
        value = self._value
        data = seal(value, (self._mark, token_of(None)))
        try:
            await session.create(path, data, ephemeral=True)
            return True
        except NoNodeError:
            await self._store._create_parents(self.key)
            raise AgainError from None
        except NodeExistsError:
            found, stat = await session.get(path)
        if stat.session_id == 0:
            raise KeyExistsError(f"key {self.key!r} exists and is not ephemeral")
        found_value, writers, _ = unseal(self.key, found)
        if self._mark not in writers:
            return False
        if stat.session_id != session.session_id:
            # Ours, from a session that the servers have not yet seen the end of.
            await session.delete(path, stat.version)
            raise AgainError
        if found_value != value:
            await session.set(path, data, stat.version)
        return True

    async def update(self, value: bytes) -> None:
        self._value = check_value(value)
        if not await self.put():
            raise KeyExistsError(f"key {self.key!r} is held by another session for now")

    async def close(self) -> None:
        store = self._store
        if self.is_closed or store._closed:
            return
        store._registrations.discard(self)
        async with self._lock:
            self.is_closed = True
            try:
                await store._settled(f"remove {self.key!r}", self._remove)
            except BaseException:
                # The session may outlive whatever is wrong, and with it the key: the registrar removes it.
                store._registrations.add(self)
                store._later()
                raise

    async def _remove(self, _: Attempt) -> None:
        path = self._store._path(self.key)
        with suppress(NoNodeError):
            found, stat = await self._store._session.get(path)
            if self._mark in unseal(self.key, found).writers:
                await self._store._session.delete(path, stat.version)
