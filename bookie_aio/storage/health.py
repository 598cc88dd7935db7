"""The health of a bookie's storage: whether it failed, and whether it has room.

Owns these two facts, and tells one listener when one of them changes. Every part of the storage that can fail
gets the same `StorageHealth` and reports to it. Does not own what follows from a fact: the engine drops
the accepted records, and the server deregisters or becomes read-only.

| fact | set by | ends |
|---|---|---|
| `error` | the first write, sync or background step that fails (rule 2, fail-stop) | never |
| `has_room` | the segment allocator, as free space falls and rises | as often as it does |
"""

from __future__ import annotations

from typing import Protocol

from metadata.errors import DiskFailedError, StorageError


class HealthListener(Protocol):
    """The engine, as `StorageHealth` sees it. Both methods are called on the event loop's thread."""

    def storage_failed(self, error: StorageError) -> None:
        """Drop the accepted records: none is written or acknowledged any more. Called at most once."""

    def writable_changed(self, is_writable: bool) -> None:
        """Tell the server whether ordinary adds are accepted from now on."""


class StorageHealth:
    """The health of one engine's storage."""

    def __init__(self, listener: HealthListener) -> None:
        """Start healthy; `listener` is told of each change."""
        self._listener = listener
        self.error: StorageError | None = None
        self.has_room = True

    def fail(self, error: BaseException | None, what: str) -> None:
        """Stop for good (rule 2). Only the first failure counts, and only that one is told.

        Args:
            error: anything that was raised. An error that is no `StorageError` stops the bookie as well:
                going on without the step that raised it would hide the failure.
            what: the step that failed, for the text of an error that is no `StorageError`.
        """
        if self.error is not None:
            return
        if not isinstance(error, StorageError):
            error = DiskFailedError(f"{what} failed: {error!r}")
        elif not isinstance(error, DiskFailedError):
            error = DiskFailedError(str(error))
        self.error = error
        self._listener.storage_failed(error)

    def lose_data_of_any_ledger(self) -> None:
        """Tell that data was lost that may concern any ledger, fences included (rule 4).

        `bookie_aio.storage.ledgers.marks` has the mark.
        """
        self._listener.writable_changed(False)

    def set_room(self, has_room: bool) -> None:
        """Note whether there is room for ordinary adds."""
        if self.has_room != has_room:
            self.has_room = has_room
            self._listener.writable_changed(has_room)
