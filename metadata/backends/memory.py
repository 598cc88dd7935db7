"""A metadata store in memory, for tests and simulations.

Several `MemoryMetadataStore`s ("clients") share one `MemoryTree`. Everything is deterministic: tokens are
counted. The only clock is the loop's: `age_s` counts by it, and `register` waits by it for another session's
key to be deleted.

A session ends by `close`, by `expire_session` (the client lives on and registers anew) or by `crash` (the
client does not). Nothing here is durable, and no operation is ever lost or late.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metadata import write_outcome
from metadata.awake import awake_timeout
from metadata.errors import (
    ClientClosedError,
    InvalidArgumentError,
    KeyExistsError,
    NoSuchKeyError,
)
from metadata.keys import (
    ancestors_of,
    check_count,
    check_key,
    check_sequence,
    check_token,
    check_value,
    name_of,
    parent_of,
)
from metadata.store import Guard, MetadataStore, Registration, Version, Versioned

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@dataclass(slots=True)
class _Node:
    incarnation: int
    value: bytes | None = None
    number: int = 0
    writers: tuple[str, ...] = ()
    children: set[str] = field(default_factory=set)
    session: int | None = None
    made_at: float = 0.0

    @property
    def version(self) -> Version:
        return Version(self.number, self.incarnation, self.writers)


class MemoryTree:
    """The tree that all stores of one simulated cluster share."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {"": _Node(0)}
        self._watches: dict[str, set[asyncio.Event]] = {}
        self._counters: dict[str, int] = {}
        self._drawn: dict[str, int] = {}
        self.owners: dict[int, MemoryMetadataStore] = {}
        """The clients by their sessions; told when a key of the session is deleted."""

    def draw(self, what: str) -> int:
        """Increment the named counter, from 1, and return it."""
        self._drawn[what] = self._drawn.get(what, 0) + 1
        return self._drawn[what]

    def allocate(self, name: str, count: int) -> range:
        """Draw a block of ids."""
        start = self._counters.get(name, 0)
        self._counters[name] = start + count
        return range(start, start + count)

    def drawn(self, name: str) -> int:
        """Return the lowest id that was not drawn."""
        return self._counters.get(name, 0)

    def raise_to(self, name: str, least: int) -> None:
        """Let a sequence go on at `least` or higher."""
        self._counters[name] = max(self.drawn(name), least)

    def find(self, key: str) -> _Node | None:
        """Return the node, with or without a value; None where there is no node."""
        return self._nodes.get(key)

    def find_value(self, key: str) -> _Node:
        """Return the node; raises NoSuchKeyError where it has no value."""
        node = self._nodes.get(key)
        if node is None or node.value is None:
            raise NoSuchKeyError(f"there is no key {key!r}")
        return node

    def put(self, key: str, value: bytes, token: str, session: int | None = None) -> Version:
        """Create a key that has no value yet, with its parents."""
        for ancestor in ancestors_of(key):
            node = self._nodes.get(ancestor)
            if node is not None and node.session is not None:
                raise InvalidArgumentError(f"{ancestor!r} is ephemeral and can have no child such as {key!r}")
        for missing in [*ancestors_of(key), key]:
            if missing not in self._nodes:
                self._nodes[missing] = _Node(self.draw("incarnation"))
                self._nodes[parent_of(missing)].children.add(name_of(missing))
                self.touch(parent_of(missing))
        node = self._nodes[key]
        assert node.value is None
        node.session, node.made_at = session, asyncio.get_running_loop().time()
        return self.change(key, value, token)

    def change(self, key: str, value: bytes, token: str) -> Version:
        """Replace a key's value."""
        node = self._nodes[key]
        node.value = value
        node.number += 1
        node.writers = write_outcome.add_writer(node.writers, token)
        self.touch(key)
        return node.version

    def drop(self, key: str) -> None:
        """Delete a key."""
        if self._nodes[key].children:
            raise InvalidArgumentError(f"key {key!r} has children and cannot be deleted")
        session = self._nodes[key].session
        if session in self.owners:
            asyncio.get_running_loop().call_soon(self.owners[session].register_anew)
        del self._nodes[key]
        self._nodes[parent_of(key)].children.discard(name_of(key))
        self.touch(key)
        self.touch(parent_of(key))

    def drop_session(self, session: int) -> None:
        """Delete all ephemeral keys of that session."""
        self.owners.pop(session, None)
        for key in [key for key, node in self._nodes.items() if node.session == session]:
            self.drop(key)

    def touch(self, key: str) -> None:
        """Wake all watches of the key."""
        for event in self._watches.get(key, ()):
            event.set()

    def add_watch(self, key: str, event: asyncio.Event) -> None:
        """Set the event whenever the key or its children change."""
        self._watches.setdefault(key, set()).add(event)

    def remove_watch(self, key: str, event: asyncio.Event) -> None:
        """Stop setting the event."""
        events = self._watches.get(key, set())
        events.discard(event)
        if not events:
            self._watches.pop(key, None)


class MemoryMetadataStore(MetadataStore):
    """One client of a `MemoryTree`."""

    def __init__(self, tree: MemoryTree | None = None, *, session_timeout_s: float = 0.2) -> None:
        """Open a client.

        Args:
            tree: the tree that it shares with other clients; a new tree when not given.
            session_timeout_s: how long `register` waits for another session's key to be deleted.
        """
        self.tree = tree if tree is not None else MemoryTree()
        self.uri = "memory://"
        self._session = self._begin_session()
        self._session_timeout_s = session_timeout_s
        self._registrations: set[_MemoryRegistration] = set()
        self._watches: set[asyncio.Event] = set()
        self._closed = False

    @property
    def session(self) -> str:
        return str(self._session)

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        check_key(key)
        value = check_value(value)
        given = token is not None
        token = self._token(token)
        node = self._live().find(key)
        if node is not None and node.value is not None:
            return write_outcome.settle_create(key, node.version, token, maybe_sent=given)
        return self.tree.put(key, value, token)

    async def read(self, key: str) -> Versioned:
        node = self._live().find_value(check_key(key))
        assert node.value is not None
        return Versioned(node.value, node.version)

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
        given = token is not None
        token = self._token(token)
        node = self._live().find_value(key)
        if node.version != version:
            return write_outcome.settle_compare_and_set(key, version, node.version, token, maybe_sent=given)
        write_outcome.check_guard(key, guard, self.tree.find_value)
        return self.tree.change(key, value, token)

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        node = self._live().find_value(check_key(key))
        if version is not None and node.version != version:
            raise write_outcome.conflict(key, version, node.version)
        write_outcome.check_guard(key, guard, self.tree.find_value)
        self.tree.drop(key)

    async def children(self, key: str) -> list[str]:
        node = self._live().find(check_key(key, root_allowed=True))
        return sorted(node.children) if node is not None else []

    async def watch(self, key: str) -> AsyncGenerator[None, None]:
        check_key(key, root_allowed=True)
        event = asyncio.Event()
        self._live().add_watch(key, event)
        self._watches.add(event)
        try:
            while True:
                event.clear()
                yield
                await event.wait()
                self._live()
        finally:
            self.tree.remove_watch(key, event)
            self._watches.discard(event)

    async def register(self, key: str, value: bytes) -> Registration:
        check_key(key)
        value = check_value(value)
        registration = _MemoryRegistration(self, key, value)
        changed = asyncio.Event()
        self._live().add_watch(key, changed)
        try:
            async with awake_timeout(self._session_timeout_s):
                while not registration.put(self._live()):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise KeyExistsError(f"key {key!r} is held by another live session") from None
        finally:
            self.tree.remove_watch(key, changed)
        self._registrations.add(registration)
        return registration

    async def allocate_ids(self, name: str, count: int) -> range:
        check_count(name, count)
        return self._live().allocate(name, count)

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        check_sequence(name, least)
        tree = self._live()
        if least:
            tree.raise_to(name, least)
        return tree.drawn(name)

    async def age_s(self, key: str) -> float:
        node = self._live().find_value(check_key(key))
        return asyncio.get_running_loop().time() - node.made_at

    async def sync(self, key: str) -> None:
        check_key(key, root_allowed=True)
        self._live()

    async def close(self) -> None:
        if not self._closed:
            self.crash()

    def crash(self) -> None:
        """End the session as the death of its process would: nothing is registered anew."""
        self._closed = True
        self._registrations.clear()
        self.tree.drop_session(self._session)
        for event in self._watches:
            event.set()

    def expire_session(self) -> None:
        """End the session.

        The client opens another session at once, and registers anew in the next event-loop iteration.
        """
        self._live().drop_session(self._session)
        self._session = self._begin_session()
        asyncio.get_running_loop().call_soon(self.register_anew)

    def _begin_session(self) -> int:
        session = self.tree.draw("session")
        self.tree.owners[session] = self
        return session

    def register_anew(self) -> None:
        """Create the keys of all registrations that are not there."""
        for registration in sorted(self._registrations, key=lambda each: each.key):
            registration.put(self.tree)

    def _live(self) -> MemoryTree:
        if self._closed:
            raise ClientClosedError("the metadata store is closed")
        return self.tree

    def _token(self, token: str | None) -> str:
        return f"m{self.tree.draw('token')}" if token is None else check_token(token)


class _MemoryRegistration(Registration):
    """An ephemeral key of one `MemoryMetadataStore`."""

    def __init__(self, store: MemoryMetadataStore, key: str, value: bytes) -> None:
        self.key = key
        self._store = store
        self._value = value
        self._incarnation = 0
        """Of the key that this registration created: tells it from a later one of the same session."""

    def put(self, tree: MemoryTree) -> bool:
        """Create the key for the store's present session; False where another session has it."""
        node = tree.find(self.key)
        if node is not None and node.session is None:
            raise KeyExistsError(f"key {self.key!r} exists and is not ephemeral")
        if node is not None:
            return False
        made = tree.put(self.key, self._value, self._store._token(None), self._store._session)
        self._incarnation = made.incarnation
        return True

    def _holds(self, tree: MemoryTree) -> bool:
        node = tree.find(self.key)
        return node is not None and node.incarnation == self._incarnation

    async def update(self, value: bytes) -> None:
        self._value = check_value(value)
        tree = self._store._live()
        if self._holds(tree):
            tree.change(self.key, self._value, self._store._token(None))

    async def close(self) -> None:
        if self not in self._store._registrations:
            return
        self._store._registrations.discard(self)
        if self._holds(self._store.tree):
            self._store.tree.drop(self.key)
