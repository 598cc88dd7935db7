"""The metadata store: a small tree of versioned values under compare-and-set.

What a store owns: durability, versions, sessions, and turning a lost answer into a certain one.
What it does not own: the meaning of any value (`metadata.model.ledger` and others do).

Keys are relative paths of non-empty segments, `ledgers/000/0000/0000/0000/0007`; a key may have a value,
children, or both. Parents come into being with their first child. Values are UTF-8 JSON texts of at most
`VALUE_BYTES_MAX` bytes.

Invariants that the contract suite (`tests/metadata/test_contract.py`) checks on every store:

1. A version is unique to one content of one incarnation of a key; equal versions mean equal contents.
2. `compare_and_set` from a version succeeds at most once, whoever tries, and across lost answers.
3. An operation that returned is durable. One that raised an error whose `outcome` is *unknown* may take
   effect later, or never; nothing but a definite success or conflict from the same version settles it
   (rule 10), which `Version.written_by` helps with.
4. Reads through one store object never go backwards; `sync` makes the next read see everything that any
   client had completed before the call.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

VALUE_BYTES_MAX = 512 * 1024
"""Upper bound of one value: half of what a ZooKeeper server accepts in its default configuration."""

WRITERS_KEPT = 16
"""How many writer tokens a stored value remembers, newest last."""


@dataclass(frozen=True, slots=True)
class Version:
    """A state of one key, as given out by the store that holds it.

    Opaque to callers but for equality and `written_by`. `number` grows with every change of the key.
    """

    number: int
    incarnation: int = 0
    writers: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return (self.number, self.incarnation) == (other.number, other.incarnation)

    def __hash__(self) -> int:
        return hash((self.number, self.incarnation))

    def written_by(self, token: str) -> bool:
        """Return whether the write with that token led to this state, itself or as a predecessor."""
        return token in self.writers

    def is_before(self, other: Version) -> bool:
        """Return whether it is an earlier state of the same key, which has not been deleted in between."""
        return self.incarnation == other.incarnation and self.number < other.number


class Versioned(NamedTuple):
    """A value and the version it was read at."""

    value: bytes
    version: Version


class Registration(abc.ABC):
    """An ephemeral key: it exists as long as the session of the process that registered it.

    The store creates it anew, with the latest value, whenever its session was lost, within 2 s of
    reaching the store again. Closing removes it.
    """

    key: str

    @abc.abstractmethod
    async def update(self, value: bytes) -> None:
        """Replace the value, now and for every re-registration to come."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Remove the key and stop keeping it alive. Cancellation leaves the removal to session expiry."""


class MetadataStore(abc.ABC):
    """Versioned values in a tree. Every coroutine may raise `MetadataUnavailableError`.

    Cancelling a write leaves its outcome unknown; cancelling a read leaves nothing.
    """

    uri: str

    @property
    def session(self) -> str:
        """Name the session that registrations belong to now: another one once it has been lost."""
        return ""

    @property
    def session_alive_until(self) -> float:
        """Return until when, by the loop's clock, the session lives as far as this client's silence goes.

        Beyond it the session may be gone though this client has not heard of it: it was cut off, or stopped.
        Before it, too, where the servers fall out: a ZooKeeper server that is cut off from its leader goes
        on answering for a while (`syncLimit`), in which the leader lets the session expire.
        """
        return math.inf

    @abc.abstractmethod
    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        """Create the key, and its parents where they are missing.

        Args:
            key: the path, relative to the store's root.
            value: UTF-8 JSON, at most `VALUE_BYTES_MAX` bytes.
            token: identifies this write for ever; drawn by the store when not given. Calling again with
                the same token after an unknown outcome succeeds if the first call took effect.

        Raises:
            KeyExistsError: the key exists, and this token did not create it.
            InvalidArgumentError: the key or the value is not legal.
        """

    @abc.abstractmethod
    async def read(self, key: str) -> Versioned:
        """Read value and version.

        Raises:
            NoSuchKeyError: no such key, or it has children but never had a value.
        """

    @abc.abstractmethod
    async def compare_and_set(
        self, key: str, value: bytes, version: Version, *, token: str | None = None
    ) -> Version:
        """Replace the value if the key is still at `version`.

        Success is reported even when the answer was lost and others have written since (then the version
        returned is the one this write made, and the caller's next compare-and-set conflicts).

        Raises:
            VersionConflictError: somebody else changed the key; this write has not taken effect and
                never will.
            NoSuchKeyError: the key is gone; the write never takes effect.
        """

    @abc.abstractmethod
    async def delete(self, key: str, version: Version | None = None, *, keeps_place: bool = False) -> None:
        """Delete the key, at that version or (None) at any.

        Args:
            keeps_place: somebody may create the key anew, and a request of before that is late must not take
                that one for this. Where nothing but a count of writes would tell them apart, the key's place
                is kept, and the count with it, until `vacate`; `children` may still list it, `names` does
                not. Needs a version.

        Raises:
            NoSuchKeyError: it did not exist when the call was made. After a lost answer, a key found
                missing counts as deleted by this call.
            VersionConflictError: it is at another version.
            InvalidArgumentError: it has children.
        """

    @abc.abstractmethod
    async def children(self, key: str) -> list[str]:
        """List the names (last segments) right below the key, sorted; empty when the key is missing."""

    async def names(self, key: str) -> list[str]:
        """List the children as `children` does, without those that are deleted and whose place is kept."""
        return await self.children(key)

    async def vacate(self, key: str, *, older_than_s: float) -> bool:
        """Give up the place of a key that was deleted longer ago than any request takes; tells if it did."""
        return False

    @abc.abstractmethod
    def watch(self, key: str) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the key's value or its children may have changed.

        Changes coalesce; a yield may be spurious (after a reconnect); none is missed: a read made after a
        yield sees at least the change that led to it. The key need not exist. `aclose()` the iterator.
        """

    @abc.abstractmethod
    async def register(self, key: str, value: bytes) -> Registration:
        """Create an ephemeral key and keep it alive across sessions.

        Raises:
            KeyExistsError: another live session holds the key (waited out for one session timeout, since
                it may be our own from before a crash).
        """

    @abc.abstractmethod
    async def allocate_ids(self, name: str, count: int) -> range:
        """Draw a block of `count` ids, from 0 up, never given to anybody else. Unused ones are lost."""

    @abc.abstractmethod
    async def sync(self, key: str) -> None:
        """Make this store's next read of the key see everything completed anywhere before this call."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release the session and everything ephemeral with it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
