"""The outcome of a write, decided from the state that is stored now. Pure.

Every write leaves its writer's token with the value, and the last `WRITERS_KEPT` tokens stay there. So a
write whose answer was lost is settled by content and never by guess (rule 10). Each store calls these
functions with the state it has read.

They need one invariant: each write of a key adds exactly one to its number and one token to its list.
Ephemeral keys are exempt: they have one writer, and carry its mark and its last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from metadata.errors import (
    GuardChangedError,
    KeyExistsError,
    MetadataUnavailableError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.store import WRITERS_KEPT, Guard, Version

if TYPE_CHECKING:
    from collections.abc import Callable


def add_writer(writers: tuple[str, ...], token: str) -> tuple[str, ...]:
    """Append a token, dropping the oldest beyond `WRITERS_KEPT`."""
    return (*writers, token)[-WRITERS_KEPT:]


def version_made(current: Version, token: str) -> Version | None:
    """Return the version that the token's write made, if it is the present state or a recent predecessor."""
    if token not in current.writers:
        return None
    later = current.writers[::-1].index(token)
    return Version(
        current.number - later, current.incarnation, current.writers[: len(current.writers) - later]
    )


def settle_create(key: str, current: Version, token: str, *, maybe_sent: bool) -> Version:
    """Decide the outcome of a create that found the key in place.

    Args:
        key: for the error's message.
        current: the version found.
        token: the create's own token.
        maybe_sent: an earlier attempt under this token may have taken effect.

    Raises:
        KeyExistsError: another client created the key.
        MetadataUnavailableError: so many writes have followed that the outcome cannot be told.
    """
    made = version_made(current, token)
    if made is not None:
        return made
    if maybe_sent and len(current.writers) >= WRITERS_KEPT:
        raise _forgotten(key)
    raise KeyExistsError(f"key {key!r} exists already")


def settle_compare_and_set(
    key: str, expected: Version, current: Version, token: str, *, maybe_sent: bool
) -> Version:
    """Decide the outcome of a compare-and-set that found the key at another version than expected.

    A key that was deleted and created anew counts as a conflict: an effect of this write ended with the
    former incarnation.

    Raises:
        VersionConflictError: another client changed the key, and this write took no effect.
        MetadataUnavailableError: so many writes have followed that the outcome cannot be told.
    """
    assert current != expected, "only a changed key needs settling"
    made = version_made(current, token)
    is_same_key = current.incarnation == expected.incarnation
    if made is not None and is_same_key and made.number == expected.number + 1:
        return made
    writes_since = current.number - expected.number
    if maybe_sent and is_same_key and writes_since > len(current.writers):
        raise _forgotten(key)
    raise conflict(key, expected, current)


def is_overwritten(expected: Version, current: Version) -> bool:
    """Return whether so many writes have followed `expected` that a write from it cannot be settled.

    Such a write takes no effect from now on: the version it expects is gone.
    """
    is_same_key = current.incarnation == expected.incarnation
    return is_same_key and current.number - expected.number > WRITERS_KEPT


def conflict(key: str, expected: Version, current: Version) -> VersionConflictError:
    """Build the error for a key that is not at the version expected."""
    is_same = (current.number, current.incarnation) == (expected.number, expected.incarnation)
    but = "but by another writer: the store was set back" if is_same else ""
    return VersionConflictError(
        f"key {key!r} is at version {current.number} of incarnation {current.incarnation}, "
        f"{but or f'not at {expected.number} of {expected.incarnation}'}"
    )


class HasVersion(Protocol):
    """A key's state in a store."""

    @property
    def version(self) -> Version:
        """Return the version of the state."""


def check_guard(key: str, guard: Guard | None, find_value: Callable[[str], HasVersion]) -> None:
    """Raise GuardChangedError where the guard of a write of the key does not hold.

    Args:
        key: for the error's message.
        guard: the key that the write depends on.
        find_value: returns a key's state, or raises NoSuchKeyError.
    """
    if guard is None:
        return
    try:
        found = find_value(guard.key).version
    except NoSuchKeyError:
        found = None
    if found != guard.version:
        raise guard_changed(key, guard)


def guard_changed(key: str, guard: Guard) -> GuardChangedError:
    """Build the error for a write whose guard is at another version."""
    return GuardChangedError(
        f"key {key!r} is not changed: key {guard.key!r}, which that depends on, is no longer at version "
        f"{guard.version.number}"
    )


def _forgotten(key: str) -> MetadataUnavailableError:
    return MetadataUnavailableError(
        f"the answer to a write of key {key!r} was lost, and more than {WRITERS_KEPT} others have written "
        "since: whether it took effect cannot be told any more"
    )
