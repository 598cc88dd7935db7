"""Ledgers in the metadata store: a typed layer over any `MetadataStore`.

Owns the keys of ledgers' metadata, the walk over all ledgers, drawing ledger ids, and the *id floor*. Does
not own the content (`metadata.model.ledger`), nor when it changes (the client's recovery and ensemble
changes).

The id floor. An id below the counter that no ledger has may be a deleted ledger's. Or a client drew it in a
block, and has not used it yet. Below the floor the second is ruled out, by this order:

1. The floor is raised to F. It never falls.
2. All ledgers are listed, from a state of the store behind the raise.
3. An id below F that is not listed is gone for good. If a ledger is created under it later, its creator reads
   the floor after the creation, and so behind the raise. It finds F, deletes what it has just created, and
   draws another id. So nobody ever uses that ledger.

A read after the creation sees the raise without a sync: a client's reads never go back behind its own writes.
An older copy of the store has an older floor. Ids below that one were gone at that time already. Those that
have gone or were given out since are below the `raised_to` of the set-back's event, which counts as a floor.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from metadata.access.bookies import SetBacks, not_free_below
from metadata.errors import (
    BookKeeperError,
    KeyExistsError,
    LedgerExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
    VersionConflictError,
)
from metadata.ids import (
    KEY_ID_FLOOR,
    KEY_LEDGERS,
    LEDGER_ID_MAX,
    MALFORMED,
    integer,
    ledger_id_of,
    ledger_key,
)
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from metadata.store import Guard, MetadataStore, Version

LEDGER_IDS_DRAWN = 32
"""The number of ids that a client draws at once. Unused ids are lost when the client ends."""

LEDGER_SEQUENCE = "ledger"

_LEVELS = 5


class LedgerStore:
    """The ledgers' part of a metadata store."""

    def __init__(self, store: MetadataStore, *, ids_drawn: int = LEDGER_IDS_DRAWN) -> None:
        """Wrap a store. Its owner still has to close it."""
        self.store = store
        self._ids_drawn = ids_drawn
        self._ids: Iterator[int] = iter(())
        self._drawing = asyncio.Lock()
        self._draws = 0  # how many draws have ended, in success or failure
        self._draw_failure: BookKeeperError | None = None  # of the last draw

    async def allocate_id(self, *, at_least: int = 0) -> int:
        """Draw a ledger id that is never drawn again, from a block drawn ahead.

        Args:
            at_least: lower ids are skipped, and lost.

        Raises:
            MetadataUnavailableError: a block was needed and could not be drawn.
        """
        while True:
            ledger_id = next(self._ids, None)
            if ledger_id is not None and ledger_id >= at_least:
                return ledger_id
            if ledger_id is None:
                await self._draw_ids()

    async def _draw_ids(self) -> None:
        """Draw a block of ids, or wait for the draw that is under way and share its outcome.

        One draw at a time. Otherwise each of many concurrent creations would draw a block of its own, and
        throw the earlier blocks away. A cancelled draw is left to the next caller that waits.
        """
        draws = self._draws
        async with self._drawing:
            if self._draws != draws:
                if self._draw_failure is not None:
                    # A draw of one's own would take another timeout, one caller after the other.
                    raise self._draw_failure.with_traceback(None)
                return
            try:
                block = await self.store.allocate_ids(LEDGER_SEQUENCE, self._ids_drawn)
                if block.stop - 1 > LEDGER_ID_MAX:
                    raise MetadataCorruptError(f"ledger ids are used up: the store gave out {block}")
            except BookKeeperError as error:
                self._draws, self._draw_failure = draws + 1, error
                raise
            self._ids = iter(block)
            self._draws, self._draw_failure = draws + 1, None

    def discard_ids(self) -> None:
        """Drop the rest of the block that was drawn ahead: its ids may have been given out before."""
        self._ids = iter(())

    async def create_ledger(self, metadata: LedgerMetadata, *, token: str | None = None) -> Version:
        """Write a new ledger's metadata.

        Raises:
            LedgerExistsError: a ledger of that id exists, not created under this token; or no ledger is
                created under that id any more, and the ids that this object drew with it are lost.
        """
        ledger_id = metadata.ledger_id
        with _of_ledger(ledger_id):
            version = await self.store.create(ledger_key(ledger_id), metadata.to_json(), token=token)
        # After the creation: see the id floor.
        floor, _ = await self._read_floor()
        if ledger_id < max(floor, not_free_below((await SetBacks.read(self.store)).events)):
            self._ids = iter(())
            with suppress(NoSuchLedgerError, VersionConflictError):
                await self.delete(ledger_id, version)
            raise LedgerExistsError(
                f"no ledger is created under the id {ledger_id} any more, which was drawn long ago: draw "
                "another one",
                ledger_id=ledger_id,
            )
        return version

    async def floor(self) -> int:
        """Return the id floor, as of this call or later."""
        await self.store.sync(KEY_ID_FLOOR)
        return (await self._read_floor())[0]

    async def raise_floor(self, floor: int) -> None:
        """Raise the id floor, unless it is higher already. Ids at or above the id counter must not be below.

        Raises:
            MetadataUnavailableError: it may be raised, now or later.
        """
        value = json.dumps({"format": 1, "floor": floor}).encode()
        while True:
            await self.store.sync(KEY_ID_FLOOR)
            present, version = await self._read_floor()
            if present >= floor:
                return
            with suppress(KeyExistsError, VersionConflictError, NoSuchKeyError):
                if version is None:
                    await self.store.create(KEY_ID_FLOOR, value)
                else:
                    await self.store.compare_and_set(KEY_ID_FLOOR, value, version)
                return

    async def _read_floor(self) -> tuple[int, Version | None]:
        try:
            value, version = await self.store.read(KEY_ID_FLOOR)
        except NoSuchKeyError:
            return 0, None
        try:
            return integer(json.loads(value)["floor"], 0, LEDGER_ID_MAX), version
        except MALFORMED as error:
            raise MetadataCorruptError(f"the key {KEY_ID_FLOOR!r} is damaged: {error!r}") from error

    async def read(self, ledger_id: int, *, sync: bool = False) -> tuple[LedgerMetadata, Version]:
        """Read a ledger's metadata and its version.

        Args:
            sync: see every change that any client completed before this call.

        Raises:
            NoSuchLedgerError: there is no such ledger.
            MetadataCorruptError: the metadata do not parse, or are another ledger's.
        """
        if sync:
            await self.sync(ledger_id)
        with _of_ledger(ledger_id):
            value, version = await self.store.read(ledger_key(ledger_id))
        metadata = LedgerMetadata.from_json(value)
        if metadata.ledger_id != ledger_id:
            raise MetadataCorruptError(
                f"the metadata of ledger {ledger_id} says that it is ledger {metadata.ledger_id}'s",
                ledger_id=ledger_id,
            )
        return metadata, version

    async def tag(self, ledger_id: int, key: str, value: bytes, *, draw_token: Callable[[], str]) -> None:
        """Set one key of a ledger's custom metadata, whoever else changes the ledger meanwhile.

        Raises:
            NoSuchLedgerError: there is no such ledger.
            MetadataUnavailableError: the key may be set, now or later.
        """
        while True:
            metadata, version = await self.read(ledger_id)
            if metadata.custom.get(key) == value:
                return
            tagged = replace(metadata, custom={**metadata.custom, key: value})
            with suppress(VersionConflictError):
                await self.compare_and_set(tagged, version, token=draw_token())
                return

    async def compare_and_set(
        self,
        metadata: LedgerMetadata,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        """Replace a ledger's metadata if it is still at that version, and the guard's key at the guard's.

        Raises:
            VersionConflictError: another client changed it; this write never takes effect.
            NoSuchLedgerError: the ledger was deleted.
            MetadataUnavailableError: the write may take effect, now or later (rule 10).
            GuardChangedError: the guard's key has changed; this write never takes effect.
        """
        with _of_ledger(metadata.ledger_id):
            return await self.store.compare_and_set(
                ledger_key(metadata.ledger_id), metadata.to_json(), version, token=token, guard=guard
            )

    async def delete(self, ledger_id: int, version: Version | None = None) -> None:
        """Delete a ledger's metadata, at that version or at any.

        Raises:
            NoSuchLedgerError: there is no such ledger.
            VersionConflictError: the metadata are at another version.
        """
        with _of_ledger(ledger_id):
            await self.store.delete(ledger_key(ledger_id), version)

    async def ledger_ids(
        self, *, sync: bool = False, first: int = 0, below: str = KEY_LEDGERS
    ) -> AsyncGenerator[int, None]:
        """Yield the ids of all ledgers in ascending order.

        Ledgers created or deleted during the walk may be missing or listed. A foreign name in the hierarchy
        raises MetadataCorruptError: a walk that skipped it could miss ledgers.

        Args:
            sync: see every change that any client completed before the call.
            first: leave out the ids below this one, without reading their nodes.
            below: the root of the walk. With `KEY_FRAGMENTS` the ids are those of ledgers that have, or had,
                a list of pages.
        """
        if sync:
            await self.store.sync(below)
        lowest = below + ledger_key(first).removeprefix(KEY_LEDGERS)
        # Depth first, with a stack of keys to visit. Names have a fixed width, so that their order as text is
        # the order of the ids.
        waiting = [below]
        while waiting:
            key = waiting.pop()
            if key.count("/") == _LEVELS:
                yield ledger_id_of(key)
            else:
                names = await self.store.children(key)
                paths = [f"{key}/{name}" for name in reversed(names)]
                waiting.extend(path for path in paths if path >= lowest[: len(path)])

    async def age_s(self, ledger_id: int) -> float:
        """Return how long ago a ledger was created, in seconds, by the store's own clock.

        Raises:
            NoSuchLedgerError: there is no such ledger.
        """
        with _of_ledger(ledger_id):
            return await self.store.age_s(ledger_key(ledger_id))

    async def sync(self, ledger_id: int) -> None:
        """Make the next `read` of the ledger see everything that any client completed before this call."""
        await self.store.sync(ledger_key(ledger_id))

    def watch(self, ledger_id: int) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever the ledger's metadata may have changed; see `MetadataStore.watch`."""
        return self.store.watch(ledger_key(ledger_id))


@contextmanager
def _of_ledger(ledger_id: int) -> Iterator[None]:
    """Translate a store's errors about keys into errors about a ledger."""
    try:
        yield
    except NoSuchKeyError as error:
        raise NoSuchLedgerError(f"there is no ledger {ledger_id}", ledger_id=ledger_id) from error
    except KeyExistsError as error:
        raise LedgerExistsError(f"ledger {ledger_id} exists already", ledger_id=ledger_id) from error
