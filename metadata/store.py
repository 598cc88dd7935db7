"""The metadata store: a small tree of versioned values under compare-and-set.

A store owns durability, versions, sessions, and settling a write whose answer was lost. It does not own the
meaning of any value (`metadata.model`).

Keys are relative paths of non-empty segments, `ledgers/000/0000/0000/0000/0007`; a key may have a value,
children, or both. A parent is created with its first child. Values are UTF-8 JSON texts of at most
`VALUE_BYTES_MAX` bytes.

Invariants that the contract suite (`tests/metadata/test_contract.py`) checks on every store:

1. A version is unique to one content of one incarnation of a key; equal versions mean equal contents.
2. `compare_and_set` from a version succeeds at most once, across all clients and across lost answers.
3. An operation that returned is durable. One that raised an error whose `outcome` is *unknown* may take
   effect later, or never. Only a definite success or conflict from the same version settles it (rule 10);
   `Version.written_by` helps with that.
4. Reads through one store object never go backwards. After `sync`, the next read sees every change that
   any client had completed before the call.
"""

from __future__ import annotations

import abc
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from metadata.errors import KeyExistsError, MetadataError
from metadata.metrics import Histogram

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
    from types import TracebackType

VALUE_BYTES_MAX = 512 * 1024
"""Upper bound of one value: half of what a ZooKeeper server accepts in its default configuration."""

WRITERS_KEPT = 16
"""The number of writer tokens that a stored value keeps, newest last."""


@dataclass(frozen=True, slots=True)
class Version:
    """A state of one key, as returned by the store that holds the key.

    Opaque to callers but for equality, `written_by` and `is_before`. `number` grows with every change of the
    key. Behind a store that was set back it comes to the same count again. So the last writer counts as well.
    """

    number: int
    incarnation: int = 0
    writers: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return (self.number, self.incarnation, self.writers[-1:]) == (
            other.number,
            other.incarnation,
            other.writers[-1:],
        )

    def __hash__(self) -> int:
        return hash((self.number, self.incarnation, self.writers[-1:]))

    def written_by(self, token: str) -> bool:
        """Return whether the write with that token made this state or one of its recent predecessors."""
        return token in self.writers

    def is_before(self, other: Version) -> bool:
        """Return whether this is an earlier state of the same key, without a deletion in between."""
        return self.incarnation == other.incarnation and self.number < other.number


class Versioned(NamedTuple):
    """A value and the version it was read at."""

    value: bytes
    version: Version


class Guard(NamedTuple):
    """A key that a write depends on: the write takes effect only while the key is at that version.

    The key must never be deleted, unless its place is kept. So its version never comes back, and a write that
    was refused by its guard cannot take effect later.
    """

    key: str
    version: Version


class Registration(abc.ABC):
    """An ephemeral key: it exists as long as the session of the process that registered it.

    After a lost session the store creates the key anew, with the latest value, within 2 s of reaching the
    store again. So it does where the key is gone and the session lives: the store was set back, or somebody
    has deleted the key. Closing removes the key.

    Another session may have held the key meanwhile. An owner whom that concerns watches the key's version.
    """

    key: str

    @abc.abstractmethod
    async def update(self, value: bytes) -> None:
        """Replace the value, for now and for every later re-registration."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Remove the key and stop keeping it alive. Cancellation leaves the removal to session expiry."""


class MetadataStore(abc.ABC):
    """Versioned values in a tree. Every coroutine may raise `MetadataUnavailableError`.

    Cancelling a write leaves its outcome unknown; cancelling a read leaves nothing.
    """

    uri: str
    registration_wait_s: float = 0.0
    """The time after which the registration of a process that died has ended."""

    @property
    def session(self) -> str:
        """Return the name of the session that registrations belong to; it changes after a lost session."""
        return ""

    @property
    def session_alive_until(self) -> float:
        """Return the time, by the loop's clock, up to which the session is taken to be alive.

        After that time the session may have expired unnoticed: this client was cut off, or stopped. It may
        expire earlier where the servers fall out. A ZooKeeper server cut off from its leader goes on
        answering for a while (`syncLimit`). The leader may let the session expire meanwhile.
        """
        return math.inf

    @abc.abstractmethod
    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        """Create the key, and its parents where they are missing.

        Args:
            key: the path, relative to the store's root.
            value: UTF-8 JSON, at most `VALUE_BYTES_MAX` bytes.
            token: identifies this write for ever; drawn by the store when not given. Another call with the
                same token, after an unknown outcome, succeeds if the first call took effect.

        Raises:
            KeyExistsError: the key exists, and this token did not create it.
            InvalidArgumentError: the key or the value is not legal.
        """

    async def create_missing(self, records: Sequence[tuple[str, bytes]]) -> list[str]:
        """Create the keys that do not exist; return the keys that do, which are left as they are.

        A store that can do so makes all of them durable at once. After an error some of them may be there,
        and the call may be repeated. A key that this call created may be among those returned, if the answer
        of its creation was lost.

        Raises:
            InvalidArgumentError: a key or a value is not legal.
        """
        found = []
        for key, value in records:
            try:
                await self.create(key, value)
            except KeyExistsError:
                found.append(key)
        return found

    @abc.abstractmethod
    async def read(self, key: str) -> Versioned:
        """Read value and version.

        Raises:
            NoSuchKeyError: no such key, or it has children but never had a value.
        """

    @abc.abstractmethod
    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        """Replace the value if the key is still at `version`, and the guard's key at the guard's.

        Both are compared in one step with the write.

        Success is reported even when the answer was lost and other clients have written since. The version
        returned is then the one that this write made, and the caller's next compare-and-set conflicts.

        Raises:
            VersionConflictError: another client changed the key; this write has not taken effect and never
                will.
            NoSuchKeyError: the key was deleted; the write never takes effect.
            GuardChangedError: the guard's key has changed; the write never takes effect.
        """

    @abc.abstractmethod
    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """Delete the key, at that version or (None) at any, if the guard's key is at the guard's.

        Args:
            keeps_place: needed where the key may be created anew, so that a late request for the old key
                cannot apply to the new one. A store that tells the two apart only by a count of writes keeps
                the key's place, and the count in it, until `vacate`. `children` may still list the key,
                `names` does not. Needs a version.
            guard: compared in one step with the deletion.

        Raises:
            NoSuchKeyError: the key did not exist when the call was made. After a lost answer, a key found
                missing counts as deleted by this call.
            VersionConflictError: the key is at another version.
            GuardChangedError: the guard's key has changed; the deletion never takes effect.
            InvalidArgumentError: the key has children.
        """

    @abc.abstractmethod
    async def children(self, key: str) -> list[str]:
        """List the names (last segments) right below the key, sorted; empty when the key is missing."""

    async def names(self, key: str) -> list[str]:
        """List the children as `children` does, without deleted keys whose place is kept."""
        return await self.children(key)

    async def vacate(self, key: str, *, older_than_s: float) -> bool:
        """Remove the kept place of a key that was deleted at least that long ago; return whether it did.

        `older_than_s` must exceed the time that any request may be under way.
        """
        return False

    @abc.abstractmethod
    def watch(self, key: str) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the key's value or its children may have changed.

        Changes coalesce, and a yield may be spurious (after a reconnect). No change is missed: a read after a
        yield sees at least the change that caused it. The key need not exist. `aclose()` the iterator.
        """

    @abc.abstractmethod
    async def register(self, key: str, value: bytes) -> Registration:
        """Create an ephemeral key and keep it alive across sessions.

        Raises:
            KeyExistsError: another live session holds the key. The call first waits for one session timeout,
                since the holder may be this process from before a crash.
        """

    @abc.abstractmethod
    async def allocate_ids(self, name: str, count: int) -> range:
        """Draw a block of `count` ids, from 0 up, never drawn by another call. Unused ids are lost."""

    @abc.abstractmethod
    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        """Return the lowest id of a sequence that no call has drawn.

        It counts every call that had returned, to any client, before this call. With `least`, the sequence is
        first raised so that it goes on at `least` or higher. It never falls.
        """

    @abc.abstractmethod
    async def age_s(self, key: str) -> float:
        """Return how long ago the key was created, in seconds, by the store's own clock.

        Sweeps go by this age. An age by two machines' clocks would have a sweeper whose clock is ahead delete
        what was made a moment ago.

        Raises:
            NoSuchKeyError: there is no such key.
        """

    @abc.abstractmethod
    async def sync(self, key: str) -> None:
        """Make this store's next read of the key see every change completed anywhere before this call."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release the session and every ephemeral key of it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


_MEASURED = ("create", "read", "set", "delete", "children", "allocate_ids", "ids_drawn", "age", "sync")


class MeasuredStore(MetadataStore):
    """A store whose operations are counted and timed. It does nothing else, and its owner closes the store.

    `times` has the times by operation, in seconds. `failures` counts those that the store did not answer, or
    answered with an error such as a conflict. Watches and registrations are not timed: they wait.
    """

    def __init__(self, store: MetadataStore, clock: Callable[[], float]) -> None:
        """`clock` returns the time in seconds."""
        self.measured: MetadataStore = store
        self._clock = clock
        self.uri = store.uri
        self.registration_wait_s = store.registration_wait_s
        self.times = {operation: Histogram() for operation in _MEASURED}
        self.failures = dict.fromkeys(_MEASURED, 0)

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        except MetadataError:
            self.failures[operation] += 1
            raise
        finally:
            self.times[operation].add(self._clock() - began)

    @property
    def session(self) -> str:
        """See `MetadataStore`."""
        return self.measured.session

    @property
    def session_alive_until(self) -> float:
        """See `MetadataStore`."""
        return self.measured.session_alive_until

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        """See `MetadataStore`."""
        with self._timed("create"):
            return await self.measured.create(key, value, token=token)

    async def create_missing(self, records: Sequence[tuple[str, bytes]]) -> list[str]:
        """See `MetadataStore`."""
        with self._timed("create"):
            return await self.measured.create_missing(records)

    async def read(self, key: str) -> Versioned:
        """See `MetadataStore`."""
        with self._timed("read"):
            return await self.measured.read(key)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        """See `MetadataStore`."""
        with self._timed("set"):
            return await self.measured.compare_and_set(key, value, version, token=token, guard=guard)

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """See `MetadataStore`."""
        with self._timed("delete"):
            await self.measured.delete(key, version, keeps_place=keeps_place, guard=guard)

    async def children(self, key: str) -> list[str]:
        """See `MetadataStore`."""
        with self._timed("children"):
            return await self.measured.children(key)

    async def names(self, key: str) -> list[str]:
        """See `MetadataStore`."""
        with self._timed("children"):
            return await self.measured.names(key)

    async def vacate(self, key: str, *, older_than_s: float) -> bool:
        """See `MetadataStore`."""
        with self._timed("delete"):
            return await self.measured.vacate(key, older_than_s=older_than_s)

    def watch(self, key: str) -> AsyncGenerator[None, None]:
        """See `MetadataStore`."""
        return self.measured.watch(key)

    async def register(self, key: str, value: bytes) -> Registration:
        """See `MetadataStore`."""
        return await self.measured.register(key, value)

    async def allocate_ids(self, name: str, count: int) -> range:
        """See `MetadataStore`."""
        with self._timed("allocate_ids"):
            return await self.measured.allocate_ids(name, count)

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        """See `MetadataStore`."""
        with self._timed("ids_drawn"):
            return await self.measured.ids_drawn(name, least=least)

    async def age_s(self, key: str) -> float:
        """See `MetadataStore`."""
        with self._timed("age"):
            return await self.measured.age_s(key)

    async def sync(self, key: str) -> None:
        """See `MetadataStore`."""
        with self._timed("sync"):
            await self.measured.sync(key)

    async def close(self) -> None:
        """Do nothing."""
