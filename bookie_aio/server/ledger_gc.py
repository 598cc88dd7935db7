"""Ledger garbage collection: a bookie drops ledgers that have been deleted, and no others (rule 15).

The client that deletes a ledger sends DELETE to its bookies. A bookie that no DELETE reached finds the ledger
in a *sweep*, which compares the ledgers held here with the metadata store at an interval. Neither is proof.
Rule 15 drops a ledger only after these steps, in this order:

1. the bookie lists the ledgers that it holds;
2. it syncs with the metadata store;
3. it reads the ledger's metadata, and the store answers "there is no such node";
4. it reads the cluster record, and the store is that of its own cluster.

The order matters because a ledger's metadata is created before its first entry is sent to any bookie. The
metadata of a ledger listed in step 1 therefore existed before the sync. A read after the sync finds the
metadata unless it was deleted. Without the sync, a lagging server of the metadata store would answer "no such
node" for a ledger that has just been created. The store's listing of all ledgers only selects the ledgers to
look at. A listing that is incomplete costs reads, and drops nothing.

To drop a ledger is to append a tombstone. From its acceptance on nothing is accepted for the ledger.

A bookie may hold entries of a ledger whose metadata does not name it, after an ensemble change or a repair.
Where such a ledger is CLOSED, the sweep *evicts* its entries after a grace period. During the grace period
nothing of the ledger was added or listed here. The reason: a repair lists a bookie first, copies only the
missing entries to it, and names it in the metadata last. An eviction appends no tombstone and leaves the
fence, so a later repair may bring the ledger back.

The sweep trims an unbounded ledger: it drops the entries below the first entry that its metadata lists.

The storage frees the space (`bookie_aio.storage.maintenance.compactor`).
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
from metadata.owned_task import OwnedTask

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
        """`cookie` is this bookie's identity. The caller closes the store after this object."""
        self._unnamed_grace_s = unnamed_grace_s
        self._unnamed: dict[int, float] = {}  # the loop's time at which the grace period began
        self._looked_upto = -1  # each sweep checks a part of the ledgers for eviction
        self._engine = engine
        self._store = store
        self._ledgers = LedgerStore(store)
        self._cookie = cookie
        self._sweeping: OwnedTask | None = None
        self.dropped = 0
        self.forgotten = 0
        self.trimmed = 0
        self.sweeps = 0

    async def drop_if_deleted(self, ledger_id: int) -> bool:
        """Drop a ledger if the metadata store has no metadata of it. Return whether it is dropped.

        It returns True once the tombstone is durable. Cancelled, it leaves the ledger as it was, or dropped.

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
        """Compare all ledgers held here with the metadata store. Return the number of dropped ledgers.

        Raises:
            MetadataError: the metadata store cannot be asked, or is not that of this cluster.
            StorageError: the disk is full, or failed.
        """
        held = await self._held()  # rule 15: before the metadata store is asked
        dropped = 0
        for ledger_id in await self._unlisted(held):
            dropped += await self.drop_if_deleted(ledger_id)
        await self._forget_unnamed(held)
        self.sweeps += 1
        return dropped

    def start(self, interval_s: float) -> None:
        """Start to sweep at that interval."""
        assert self._sweeping is None
        self._sweeping = OwnedTask(lambda: self._sweep_for_ever(interval_s), "sweeps of deleted ledgers")

    async def close(self) -> None:
        """Stop sweeping."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await self._sweeping.wait()

    async def _sweep_for_ever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.sweep()
            except Exception as error:
                # A ledger is dropped only after all checks have passed, so the next sweep can try again.
                log.warning(
                    "looking for deleted ledgers failed",
                    extra=fields(bookie=self._cookie.bookie_id, error=error),
                    exc_info=is_unforeseen(error),
                )

    async def _forget_unnamed(self, held: list[int]) -> None:
        """Evict the entries of ledgers that other bookies keep, among some of the ledgers held here."""
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
                self._unnamed.pop(ledger_id, None)  # added to or listed: perhaps by a repair, which names us
            eviction_candidates.add(ledger_id)
            if not await self._is_kept_by_others(ledger_id):
                self._unnamed.pop(ledger_id, None)
                continue
            # Rule 15: no await from here to the append. A repair could list the entries in between.
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
            return False  # no certainty that others keep it
        if metadata.is_unbounded:
            await self._trim(metadata)
            return False  # its older fragments are in pages, which the sweep does not read
        if not metadata.is_closed:
            return False
        mine = self._cookie.bookie_id
        if any(mine == each.bookie for each in metadata.absent):
            return False  # it may hold what a repair found nowhere else
        return all(mine not in fragment.bookies for fragment in metadata.fragments)

    async def _trim(self, metadata: LedgerMetadata) -> None:
        """Drop the entries below the first entry that the metadata of an unbounded ledger lists.

        The first entry only grows. Outdated metadata therefore drops too little, and never too much.
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
        """Return the ids of `held`, which ascends, that the metadata store does not list."""
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
            return False  # the metadata exists, though it cannot be read
        return False

    async def _check_cluster(self) -> None:
        """Check that the store is that of this bookie's cluster, and not an empty one.

        Raises:
            MetadataCorruptError: it is not; its "no such node" proves nothing.
        """
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
        # No await since the caller checked that there is no tombstone yet.
        await when_durable(partial(self._engine.append_tombstone, ledger_id))
        self.dropped += 1
        log.info("ledger dropped", extra=fields(bookie=self._cookie.bookie_id, ledger=ledger_id))
