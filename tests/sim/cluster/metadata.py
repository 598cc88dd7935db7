"""SimMetadata: the metadata store of a simulated cluster, with late and lost answers and stale reads.

Owns `SimTree`, which is `metadata.backends.memory.MemoryTree` with a history, and `SimMetadataStore`, the
`MetadataStore` of one client. The rules of versions and tokens are those of the in-memory store and of
`metadata.write_outcome`. Only time and faults are added here:

- Each operation takes a time to reach the server and a time to come back. An operation without an answer ends
  after `timeout_s` with `MetadataUnavailableError`. Its request was lost, or its answer was, or the request
  arrives later and takes effect then.
- Reads may be stale: a client that lags sees the tree as it was. It never goes back behind a state that it
  has seen or written; a sync ends the lag.
- A session ends when its client has not been heard of for `session_timeout_s` (it died, is paused, or is cut
  off), or when a fault says so. Its registrations go, and come back within 2 s if the client lives. So does a
  registration whose key is gone while the session lives.

It also runs on an ordinary loop, for the contract suite in `tests/metadata`.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from metadata import write_outcome
from metadata.backends.memory import MemoryTree, _Node
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    KeyExistsError,
    MetadataUnavailableError,
    NoSuchKeyError,
)
from metadata.keys import check_count, check_sequence, check_token, check_value, name_of, parent_of
from metadata.keys import check_key as _check_key
from metadata.store import Guard, MetadataStore, Registration, Version, Versioned
from tests.sim.cluster.loop import SimLoop

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Callable

    from tests.sim.cluster.loop import Process

T = TypeVar("T")
HOST = "meta"
_REGISTER_AGAIN_S = 0.5

check_key = lru_cache(65_536)(_check_key)
"""One key is asked for again and again, and is always as legal as it was."""


@dataclass
class MetadataFaults:
    """What one client's link to the store does now: probabilities for each operation, times in seconds."""

    delay: tuple[float, float] = (0.0005, 0.004)
    lose_request: float = 0.0
    lose_answer: float = 0.0
    late_request: float = 0.0
    is_cut: bool = False
    cut_since: float = 0.0
    lags: bool = False

    @property
    def keeps_waiting(self) -> bool:
        """Return whether an operation may get no answer, or a slow one."""
        is_lossy = self.lose_request or self.lose_answer or self.late_request
        return bool(self.is_cut or is_lossy or self.delay != MetadataFaults.delay)


@dataclass(frozen=True)
class TreeCopy:
    """A copy of a store: the nodes that outlive sessions, and the sequences of ids."""

    nodes: dict[str, tuple[int, bytes | None, int, tuple[str, ...]]]
    """Incarnation, value, number of changes and writers, by key."""
    counters: dict[str, int]

    def value(self, key: str) -> bytes | None:
        """Return a key's value; None where it has none."""
        return self.nodes[key][1] if key in self.nodes else None

    def has_same(self, key: str, other: TreeCopy) -> bool:
        """Return whether a key has the same value in both."""
        return self.nodes.get(key) == other.nodes.get(key)


class SimTree(MemoryTree):
    """The store's state, with its history: each change has a number, and the past can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.change_number = 0
        self.copies_put_back = 0
        self.stores: list[SimMetadataStore] = []
        self.watchers: list[Callable[[str, bytes | None, Version | None], None]] = []
        self._values: dict[str, list[tuple[int, bytes | None, Version | None]]] = {}
        self._children: dict[str, list[tuple[int, list[str]]]] = {}
        self._ended: set[int] = set()

    def change(self, key: str, value: bytes, token: str) -> Version:
        version = super().change(key, value, token)
        self._note(key, value, version)
        return version

    def drop(self, key: str) -> None:
        session = self._nodes[key].session
        super().drop(key)
        self._note(key, None, None)
        if session is not None and session not in self._ended:
            for store in self.stores:
                store.miss(key)

    def _note(self, key: str, value: bytes | None, version: Version | None) -> None:
        self.change_number += 1
        self._values.setdefault(key, []).append((self.change_number, value, version))
        child = key
        while child:
            parent = parent_of(child)
            if not self._note_child(parent, name_of(child)):
                break  # it was there, or was not, and so was what is above it
            child = parent
        for watcher in self.watchers:
            watcher(key, value, version)
        for watched in (key, parent_of(key)):
            self._tell(watched)

    def _note_child(self, parent: str, name: str) -> bool:
        """Note what is below a key, if that has changed by this name; tells whether it has."""
        node = self.find(parent)
        history = self._children.setdefault(parent, [])
        names = history[-1][1] if history else []
        at = bisect_left(names, name)
        was_there = at < len(names) and names[at] == name
        if was_there is (node is not None and name in node.children):
            return False
        history.append((self.change_number, sorted(node.children) if node is not None else []))
        return True

    def _tell(self, key: str) -> None:
        for store in self.stores:
            store.notice(key, self.change_number)

    def value_at(self, key: str, number: int) -> Versioned:
        """Return a value as it was after that change."""
        history = self._values.get(key, [])
        index = bisect_right(history, number, key=lambda row: row[0])
        _, value, version = history[index - 1] if index else (0, None, None)
        if value is None or version is None:
            raise NoSuchKeyError(f"there is no key {key!r}")
        return Versioned(value, version)

    def children_at(self, key: str, number: int) -> list[str]:
        """Return the names below a key as they were after that change."""
        history = self._children.get(key, [])
        index = bisect_right(history, number, key=lambda row: row[0])
        return list(history[index - 1][1]) if index else []

    def copied(self) -> TreeCopy:
        """Copy all that outlives sessions, as an operator's backup has it."""
        nodes = {
            key: (node.incarnation, node.value, node.number, node.writers)
            for key, node in self._nodes.items()
            if node.session is None
        }
        return TreeCopy(nodes, dict(self._counters))

    def set_back(self, copy: TreeCopy, *, keeps_sessions: bool = False) -> None:
        """Put a copy in the place of the present state; all sessions end, and are opened anew.

        Watches fire. `watchers` are told nothing: no client has changed anything.

        Args:
            keeps_sessions: the sessions live on, and what they registered is gone.
        """
        if not keeps_sessions:
            for store in list(self.stores):
                store.expire_session()
        registered = [key for key, node in self._nodes.items() if node.session is not None]
        before = {key: (node.value, node.number) for key, node in self._nodes.items()}
        parents = set(self._children)
        self._nodes = {
            key: _Node(incarnation, value, number, writers)
            for key, (incarnation, value, number, writers) in copy.nodes.items()
        }
        for key in self._nodes:
            if key:
                self._nodes[parent_of(key)].children.add(name_of(key))
        self._counters = dict(copy.counters)
        self.copies_put_back += 1
        self.change_number += 1
        for key in sorted({*before, *self._nodes}):
            node = self._nodes.get(key)
            value, version = (
                (None, None) if node is None or node.value is None else (node.value, node.version)
            )
            if before.get(key) != (value, node.number if node is not None else None):
                self._values.setdefault(key, []).append((self.change_number, value, version))
                self._tell(key)
        for parent in sorted({*parents, *self._nodes}):
            found = self._nodes.get(parent)
            names = sorted(found.children) if found is not None else []
            history = self._children.setdefault(parent, [])
            if names != (history[-1][1] if history else []):
                history.append((self.change_number, names))
                self._tell(parent)
        for key in registered:
            for store in self.stores:
                store.miss(key)

    def expire(self, session: int) -> None:
        """End a session: what it made goes, and what comes of it late makes nothing."""
        self._ended.add(session)
        self.drop_session(session)

    def check_session(self, session: int) -> None:
        """Raise MetadataUnavailableError for a session that has ended, as a server does."""
        if session in self._ended:
            raise MetadataUnavailableError(f"session {session} has ended")


class SimMetadataStore(MetadataStore):
    """One client of a `SimTree`."""

    def __init__(
        self,
        tree: SimTree,
        rng: random.Random,
        *,
        process: Process | None = None,
        stats: dict[str, int] | None = None,
        faults: MetadataFaults | None = None,
        timeout_s: float = 2.0,
        session_timeout_s: float = 3.0,
    ) -> None:
        self.tree = tree
        self.uri = "sim://"
        self.process = process
        self.faults = faults if faults is not None else MetadataFaults()
        self.session_id = self._session_known = tree.draw("session")
        self._rng = rng
        self._stats = stats if stats is not None else {}
        self._timeout_s = timeout_s
        self._session_timeout_s = session_timeout_s
        self.registration_wait_s = session_timeout_s * 1.5
        self._loop: Any = asyncio.get_running_loop()
        self._is_simulated = isinstance(self._loop, SimLoop)
        self._seen = 0
        self._watches: dict[str, dict[SimWatch, None]] = {}
        self._registrations: dict[SimRegistration, None] = {}
        self._closed = False
        tree.stores.append(self)

    @property
    def session(self) -> str:
        return str(self._session_known)

    @property
    def session_alive_until(self) -> float:
        if self._session_known != self.session_id:
            return 0.0  # it has ended, and the client has not heard of it
        since = self.faults.cut_since if self.faults.is_cut else self._loop.time()
        return since + self._session_timeout_s

    # --- time and faults -----------------------------------------------------------------------

    def _post(self, delay: float, callback: Callable[..., None], *args: Any, is_server: bool = False) -> None:
        if self._is_simulated:
            process = self._loop.kernel if is_server or self.process is None else self.process
            self._loop.post(process, delay, callback, *args)
        else:
            self._loop.call_later(delay, callback, *args)

    def _count(self, what: str) -> None:
        self._stats[what] = self._stats.get(what, 0) + 1

    def _delay(self) -> float:
        low, high = self.faults.delay
        return low + self._rng.random() * (high - low)

    async def _call(self, effect: Callable[[], T]) -> T:
        """Have the server carry out something; its answer, or MetadataUnavailableError."""
        self._live()
        effect = partial(self._of_this_server, effect, self.tree.copies_put_back)
        faults, rng = self.faults, self._rng
        future: asyncio.Future[T] = self._loop.create_future()
        fate = rng.random()
        delay = self._delay()
        loses_answer = False
        if faults.is_cut:
            # It waits in the sender's buffer: lost, or sent when the link is back.
            self._count("meta_request_cut")
            if fate < 0.5:
                self._post(self._timeout_s * (0.5 + 2 * rng.random()), self._late, effect, is_server=True)
            loses_answer = True
        elif fate < faults.lose_request:
            self._count("meta_request_lost")
            loses_answer = True
        elif fate < faults.lose_request + faults.lose_answer:
            self._count("meta_answer_lost")
            self._post(delay, self._late, effect, is_server=True)
            loses_answer = True
        elif fate < faults.lose_request + faults.lose_answer + faults.late_request:
            self._count("meta_request_late")
            self._post(self._timeout_s * (1 + rng.random()), self._late, effect, is_server=True)
            loses_answer = True
        else:
            self._post(delay, self._serve, effect, future, is_server=True)
        if loses_answer:
            error = MetadataUnavailableError("the metadata store did not answer in time")
            self._post(self._timeout_s, _settle, future, None, error)
        return await future

    def _of_this_server(self, effect: Callable[[], T], copies_put_back: int) -> T:
        """Carry out a request, unless the server that it was sent to is gone with its data."""
        if self.tree.copies_put_back != copies_put_back:
            raise MetadataUnavailableError("the connection was lost")
        return effect()

    def _late(self, effect: Callable[[], object]) -> None:
        if self.faults.is_cut and self._rng.random() < 0.5:
            return  # it never gets through
        try:
            effect()
        except Exception:
            return  # the answer is lost, whatever it says

    def _serve(self, effect: Callable[[], T], future: asyncio.Future[T]) -> None:
        result: T | None = None
        error: Exception | None = None
        self._learn_session()
        try:
            result = effect()
        except Exception as raised:
            error = raised
        self._post(self._delay(), self._answered, future, result, error, self.tree.change_number)

    def _answered(self, future: asyncio.Future[Any], result: Any, error: Exception | None, seen: int) -> None:
        if self._closed and error is None:
            error = ClientClosedError("the metadata store is closed")
        _settle(future, result, error)

    def _view(self) -> int:
        """Choose at which change a read sees the tree."""
        newest = self.tree.change_number
        if self.faults.lags and newest > self._seen:
            self._count("meta_stale_read")
            self._seen += int(self._rng.random() * (newest - self._seen + 1))
        else:
            self._seen = newest
        return self._seen

    def _wrote(self, result: T) -> T:
        self._seen = self.tree.change_number
        return result

    # --- operations ----------------------------------------------------------------------------

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        check_key(key)
        value = check_value(value)
        given = token is not None
        token = self._token(token)

        def effect() -> Version:
            node = self.tree.find(key)
            if node is not None and node.value is not None:
                return write_outcome.settle_create(key, node.version, token, maybe_sent=given)
            return self._wrote(self.tree.put(key, value, token))

        return await self._call(effect)

    async def read(self, key: str) -> Versioned:
        check_key(key)
        return await self._call(lambda: self.tree.value_at(key, self._view()))

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

        def effect() -> Version:
            node = self.tree.find_value(key)
            if node.version != version:
                self._wrote(None)  # a conflict shows the newest state: a reader of it goes on from there
                return write_outcome.settle_compare_and_set(
                    key, version, node.version, token, maybe_sent=given
                )
            write_outcome.check_guard(key, guard, self.tree.find_value)
            return self._wrote(self.tree.change(key, value, token))

        return await self._call(effect)

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        check_key(key)

        def effect() -> None:
            node = self.tree.find_value(key)
            if version is not None and node.version != version:
                raise write_outcome.conflict(key, version, node.version)
            write_outcome.check_guard(key, guard, self.tree.find_value)
            self.tree.drop(key)
            self._wrote(None)

        await self._call(effect)

    async def children(self, key: str) -> list[str]:
        check_key(key, root_allowed=True)
        return await self._call(lambda: self.tree.children_at(key, self._view()))

    async def watch(self, key: str) -> AsyncGenerator[None, None]:
        check_key(key, root_allowed=True)
        self._live()
        watch = SimWatch()
        self._watches.setdefault(key, {})[watch] = None
        try:
            while True:
                watch.event.clear()
                yield
                await watch.event.wait()
                self._live()
        finally:
            self._watches.get(key, {}).pop(watch, None)

    def notice(self, key: str, number: int) -> None:
        """Tell those who watch the key, a little later."""
        for watch in self._watches.get(key, ()):
            self._post(self._delay(), self._fire, watch, number)

    def _fire(self, watch: SimWatch, number: int) -> None:
        if self.faults.is_cut:
            self._post(_REGISTER_AGAIN_S, self._fire, watch, number)
            return
        self._learn_session()
        self._seen = max(self._seen, number)
        watch.event.set()

    async def register(self, key: str, value: bytes) -> Registration:
        check_key(key)
        registration = SimRegistration(self, key, check_value(value))
        watch = SimWatch()
        self._live()
        self._watches.setdefault(key, {})[watch] = None
        try:
            async with asyncio.timeout(self.registration_wait_s):
                while not await self._call(registration.create):
                    await watch.event.wait()
                    watch.event.clear()
        except BaseException as error:
            with contextlib.suppress(BookKeeperError):
                await registration.give_up()
            if isinstance(error, TimeoutError):
                raise KeyExistsError(f"key {key!r} is held by another live session") from None
            raise
        finally:
            self._watches.get(key, {}).pop(watch, None)
        self._registrations[registration] = None
        if not registration.is_held():  # it went before the answer came: the real stores look again
            self._post(_REGISTER_AGAIN_S, self._register_anew)
        return registration

    async def allocate_ids(self, name: str, count: int) -> range:
        check_count(name, count)
        return await self._call(lambda: self.tree.allocate(name, count))

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        check_sequence(name, least)

        def effect() -> int:
            if least:
                self.tree.raise_to(name, least)
            return self._wrote(self.tree.drawn(name))

        return await self._call(effect)

    async def age_s(self, key: str) -> float:
        check_key(key)
        return await self._call(lambda: self._loop.time() - self.tree.find_value(key).made_at)

    async def sync(self, key: str) -> None:
        check_key(key, root_allowed=True)
        await self._call(lambda: self._wrote(None))

    async def close(self) -> None:
        if not self._closed:
            self.crash()
            self.tree.expire(self.session_id)

    def _live(self) -> None:
        if self._closed:
            raise ClientClosedError("the metadata store is closed")

    def _token(self, token: str | None) -> str:
        return f"s{self.tree.draw('token')}" if token is None else check_token(token)

    # --- sessions ------------------------------------------------------------------------------

    def crash(self) -> None:
        """End the client as the death of its process does; its session ends later, when it times out."""
        self._closed = True
        self._registrations.clear()
        if self in self.tree.stores:
            self.tree.stores.remove(self)
        for watches in self._watches.values():
            for watch in watches:
                watch.event.set()

    def expire_session(self) -> None:
        """End the session behind the client's back; it opens another one once it reaches the store."""
        self._count("meta_session_expired")
        self.tree.expire(self.session_id)
        self.session_id = self.tree.draw("session")
        self._post(_REGISTER_AGAIN_S * self._rng.random(), self._register_anew)

    def miss(self, key: str) -> None:
        """Put a registration again, whose key is gone: the real stores look twice a second, or are told."""
        if any(registration.key == key for registration in self._registrations):
            self._post(_REGISTER_AGAIN_S * self._rng.random(), self._register_anew)

    def _learn_session(self) -> None:
        """Open another session before anything else is heard of the store."""
        if self._session_known != self.session_id:
            self._register_anew()

    def _register_anew(self) -> None:
        if self._closed:
            return
        if self.faults.is_cut:
            self._post(_REGISTER_AGAIN_S, self._register_anew)
            return
        self._session_known = self.session_id
        missing = False
        for registration in self._registrations:
            missing |= not registration.put()
        if missing:
            self._post(_REGISTER_AGAIN_S, self._register_anew)


class SimWatch:
    """One iterator of `watch`."""

    def __init__(self) -> None:
        self.event = asyncio.Event()


class SimRegistration(Registration):
    """An ephemeral key of one `SimMetadataStore`."""

    def __init__(self, store: SimMetadataStore, key: str, value: bytes) -> None:
        self.key = key
        self._store = store
        self._value = value
        self._incarnation = 0
        """Marks the key that it has made: another registration's of the same session is another's."""
        self._is_made = False
        self._is_given_up = False

    def create(self) -> bool:
        """Create the key; False when any session holds it, be it this client's by another registration."""
        if self._is_given_up:
            return True
        node = self._store.tree.find(self.key)
        self._is_made = (node is None or node.value is None or node.session is None) and self.put()
        return self._store._wrote(self._is_made)

    async def give_up(self) -> None:
        """Take the key back that a create made which was cut off; one that has not come yet makes none."""
        self._is_given_up = True
        if self._is_made:
            await self._store._call(self._drop)

    def put(self) -> bool:
        """Create the key for the store's present session; False when another session holds it."""
        store = self._store
        node = store.tree.find(self.key)
        if node is not None and node.value is not None:
            if node.session is None:
                raise KeyExistsError(f"key {self.key!r} exists and is not ephemeral")
            return self.is_held()
        store.tree.check_session(store.session_id)
        made = store.tree.put(self.key, self._value, store._token(None), store.session_id)
        self._incarnation = made.incarnation
        return True

    def is_held(self) -> bool:
        """Return whether the key is there, under the store's present session."""
        node = self._store.tree.find(self.key)
        return node is not None and node.session == self._store.session_id and self._holds()

    def _holds(self) -> bool:
        node = self._store.tree.find(self.key)
        return node is not None and node.incarnation == self._incarnation

    async def update(self, value: bytes) -> None:
        self._value = check_value(value)
        store = self._store

        def effect() -> None:
            if self._holds():
                store.tree.change(self.key, self._value, store._token(None))

        await store._call(effect)

    async def close(self) -> None:
        store = self._store
        if store._registrations.pop(self, self) is self:
            return
        await store._call(self._drop)

    def _drop(self) -> None:
        if self._holds():
            self._store.tree.drop(self.key)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
