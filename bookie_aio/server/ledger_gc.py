"""Deletions: how a bookie learns that a ledger has been deleted, and makes sure before it drops anything.

It learns of it from the client that deleted the ledger (DELETE), and where that did not reach it, from a
sweep: now and then it compares what it holds with the metadata store. Neither is believed. Rule 15: the
bookie lists its own ledgers, *then* syncs with the metadata store, *then* reads that ledger's metadata, and
only "there is no such node", from the store of this very cluster, drops it.

The order is the point. A ledger's metadata is created before its first entry is sent anywhere. So of a
ledger that the bookie holds when it looks, the metadata existed before the sync, and a read after it finds
them unless they were deleted. Without the sync, a server of the metadata store that lags would say "no such
node" of a ledger that has just been created. A listing only says which ledgers to look at: one that comes
out short costs reads, and drops nothing.

Dropping is a tombstone in the journal, and from its acceptance on nothing is accepted for the ledger.

A bookie that took part in a ledger for a while, or was repaired away from it, holds entries that nobody asks
for. Where the ledger is CLOSED and its metadata do not name the bookie, the sweep *forgets* them: after a
grace period in which nothing of the ledger was added or listed, since a repair names the bookie that it
copies to only in the end, and copies nothing of what it finds there. Forgetting is no tombstone, and leaves
the fence: a later repair may bring the ledger back.

Of an unbounded ledger the sweep drops what lies below the first entry that its metadata list.

Giving back the space is the storage's (`bookie_aio.storage.maintenance.compactor`).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.storage.journal import when_durable
from bookie_aio.structured_logging import fields
from metadata.access.bookies import ClusterRecord
from metadata.access.ledgers import LedgerStore
from metadata.errors import (
    MetadataCorruptError,
    NoSuchKeyError,
    NoSuchLedgerError,
    is_unforeseen,
)
from metadata.ids import KEY_CLUSTER, ledger_key

if TYPE_CHECKING:
    from bookie_aio.storage.engine import Engine
    from metadata.access.bookies import Cookie
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import MetadataStore

log = logging.getLogger(__name__)

_LISTED_AT_ONCE = 8192
_LOOKED_AT_ONCE = 256


class LedgerGarbageCollector:
    """Drops ledgers that have been deleted, and no others."""

    def __init__(self, engine: Engine, store: MetadataStore, cookie: Cookie, unnamed_grace_s: float) -> None:
        """Take a store that stays its owner's to close, and who we are in it."""
        self._unnamed_grace_s = unnamed_grace_s
        self._unnamed: dict[int, float] = {}  # since when
        self._looked_upto = -1  # the sweeps look at a part of the ledgers each
        self._engine = engine
        self._store = store
        self._ledgers = LedgerStore(store)
        self._cookie = cookie
        self._sweeping: asyncio.Task[None] | None = None
        self.dropped = 0
        self.forgotten = 0
        self.trimmed = 0
        self.sweeps = 0

    async def drop_if_deleted(self, ledger_id: int) -> bool:
        """Drop a ledger if the metadata store is sure that it is gone; tells whether it is dropped.

        True is returned once the tombstone is durable. Cancelled, it leaves the ledger as it was, or dropped.

        Raises:
            MetadataError: the metadata store cannot be asked, or is not that of this cluster.
            StorageError: the disk is full, or failed.
        """
        if not self._engine.is_deleted(ledger_id):
            await self._store.sync(ledger_key(ledger_id))
            if not await self._is_gone(ledger_id):
                return False
            await self._check_cluster()
        if not self._engine.is_deleted(ledger_id):
            await self._bury(ledger_id)
        await when_durable(self._engine.barrier)
        return True

    async def sweep(self) -> int:
        """Look at everything that is held here, and give how many ledgers were dropped.

        Raises:
            MetadataError: the metadata store cannot be asked, or is not that of this cluster.
            StorageError: the disk is full, or failed.
        """
        held = await self._held()  # before anything is asked
        dropped = 0
        for ledger_id in await self._unlisted(held):
            dropped += await self.drop_if_deleted(ledger_id)
        await self._forget_unnamed(held)
        self.sweeps += 1
        return dropped

    def start(self, interval_s: float) -> None:
        """Sweep at that interval from now on."""
        assert self._sweeping is None
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep_for_ever(interval_s))

    async def close(self) -> None:
        """Stop sweeping."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def _sweep_for_ever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.sweep()
            except Exception as error:
                # Whatever it was, nothing was dropped that should not have been; the next sweep looks again.
                log.warning(
                    "looking for deleted ledgers failed",
                    extra=fields(bookie=self._cookie.bookie_id, error=error),
                    exc_info=is_unforeseen(error),
                )

    async def _forget_unnamed(self, held: list[int]) -> None:
        """Look at some of the ledgers that are held, and forget those that others keep."""
        self._unnamed = {one: since for one, since in self._unnamed.items() if self._has_entries(one)}
        eviction_candidates = self._engine.eviction_candidates
        eviction_candidates.intersection_update(self._unnamed)
        later = held[bisect_right(held, self._looked_upto) :][:_LOOKED_AT_ONCE]
        self._looked_upto = later[-1] if len(later) == _LOOKED_AT_ONCE else -1
        looked_at = [one for one in sorted({*later, *self._unnamed}) if self._has_entries(one)]
        if not looked_at:
            return
        await self._store.sync(KEY_CLUSTER)
        await self._check_cluster()
        now = asyncio.get_running_loop().time()
        for ledger_id in looked_at:
            if ledger_id not in eviction_candidates:
                self._unnamed.pop(ledger_id, None)  # perhaps a repair was there, which will name us
            eviction_candidates.add(ledger_id)
            if not await self._is_kept_by_others(ledger_id):
                self._unnamed.pop(ledger_id, None)
                continue
            # No await from the read of the metadata to the append.
            if ledger_id not in eviction_candidates or not self._has_entries(ledger_id):
                continue
            since = self._unnamed.setdefault(ledger_id, now)
            if now - since >= self._unnamed_grace_s:
                await when_durable(partial(self._engine.append_forget, ledger_id))
                del self._unnamed[ledger_id]
                self.forgotten += 1
                log.info(
                    "ledger forgotten: it is closed, and others keep it",
                    extra=fields(bookie=self._cookie.bookie_id, ledger=ledger_id),
                )

    def _has_entries(self, ledger_id: int) -> bool:
        return self._engine.last_entry(ledger_id) >= 0 and not self._engine.is_deleted(ledger_id)

    async def _is_kept_by_others(self, ledger_id: int) -> bool:
        """Return whether the ledger is CLOSED, and none of its ensembles names this bookie."""
        try:
            metadata, _ = await self._ledgers.read(ledger_id)
        except (NoSuchLedgerError, MetadataCorruptError):
            return False  # not for certain
        if metadata.is_unbounded:
            await self._trim(metadata)
            return False  # its older fragments are in pages, which are not read here
        if not metadata.is_closed:
            return False
        mine = self._cookie.bookie_id
        return all(mine not in fragment.bookies for fragment in metadata.fragments)

    async def _trim(self, metadata: LedgerMetadata) -> None:
        """Drop what lies below the first entry that an unbounded ledger has left.

        That entry only grows: metadata of the past drop too little, and never too much.
        """
        ledger_id, first = metadata.ledger_id, metadata.first_entry
        if first > self._engine.first_entry(ledger_id):
            await when_durable(partial(self._engine.append_trim, ledger_id, first))
            self.trimmed += 1
            log.info(
                "ledger trimmed", extra=fields(bookie=self._cookie.bookie_id, ledger=ledger_id, first=first)
            )

    async def _held(self) -> list[int]:
        held, following = self._engine.list_ledgers(0, _LISTED_AT_ONCE)
        while following >= 0:
            await asyncio.sleep(0)
            more, following = self._engine.list_ledgers(following, _LISTED_AT_ONCE)
            held += more
        return held

    async def _unlisted(self, held: list[int]) -> list[int]:
        """Return those of the ascending ids that the metadata store does not list."""
        if not held:
            return []
        unlisted: list[int] = []
        at = 0
        async for listed in self._ledgers.ledger_ids(sync=True):
            while at < len(held) and held[at] < listed:
                unlisted.append(held[at])
                at += 1
            if at < len(held) and held[at] == listed:
                at += 1
            if at == len(held):
                break
        return unlisted + held[at:]

    async def _is_gone(self, ledger_id: int) -> bool:
        try:
            await self._ledgers.read(ledger_id)
        except NoSuchLedgerError:
            return True
        except MetadataCorruptError:
            return False  # it is there, whatever it says
        return False

    async def _check_cluster(self) -> None:
        """Raise unless the store that was asked is that of this bookie's cluster, and not an empty one."""
        try:
            found = ClusterRecord.from_json((await self._store.read(KEY_CLUSTER)).value).instance_id
        except NoSuchKeyError:
            found = "none"
        if found != self._cookie.instance_id:
            raise MetadataCorruptError(
                f"the metadata store is that of cluster {found}, not of {self._cookie.instance_id}: nothing "
                "is dropped on its word"
            )

    async def _bury(self, ledger_id: int) -> None:
        # No await since the last look at what is deleted.
        await when_durable(partial(self._engine.append_tombstone, ledger_id))
        self.dropped += 1
        log.info("ledger dropped", extra=fields(bookie=self._cookie.bookie_id, ledger=ledger_id))
