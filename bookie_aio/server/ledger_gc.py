"""Ledger garbage collection: a bookie drops ledgers that have been deleted, and no others (rule 15).

The client that deletes a ledger sends DELETE to its bookies. A bookie that no DELETE reached finds the ledger
in a *sweep*, which compares the ledgers held here with the metadata store at an interval. Neither is proof.
Rule 15 drops a ledger only after these steps, in this order:

1. the bookie lists the ledgers that it holds;
2. it syncs with the metadata store;
3. it reads the ledger's metadata, and the store answers "there is no such node";
4. it reads the cluster record, and the store is that of its own cluster;
5. it reads its own age there, and the store is no copy from the past (`age`).

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

The ids of deleted ledgers are kept for ever, as ranges. Most deleted ledgers were never held here, and each
leaves a gap between two ranges. The sweep *folds* such gaps. Ids below the id floor
(`metadata.access.ledgers`) that the metadata store does not list are gone for good. They get tombstones as
one range. An id is folded only when two sweeps in a row found it unlisted, and when nothing of it is held
here. So a listing that is short, against all rules, could cost this bookie the use of one ledger, and never
data. Ids at or above the floor may belong to a client's block, and be created later. They are left alone.

The marks of all ledgers end when no listed ledger up to their bound needs them any more. The floor has to be
above the bound then. The sweeps look twice, and raise the age between the two looks. So each copy of the
metadata with that age says the same. `bookie_aio.core.healing` has the decision. A client has a mark lifted
where a ledger names the bookie. The sweep lifts those of ledgers that name it nowhere.

After a set-back of the metadata, nothing below the ids of that time is dropped or folded, and no mark is
lifted, until an operator has answered for this bookie (`bookie_aio.server.age`). A store that lists all that
is held here is no answer: what others hold, and which bookies a newer copy names, is not known by that.
Nothing of that time is ever evicted: the bookies that an older copy names may have lost a ledger by then.

The storage frees the space (`bookie_aio.storage.maintenance.compactor`).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.core.healing import is_settled, is_unnamed
from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.ledgers.checkpoint import IdRanges
from bookie_aio.structured_logging import fields
from metadata.access.bookies import ClusterRecord
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.errors import (
    InvalidTransitionError,
    MetadataCorruptError,
    MetadataSetBackError,
    NoSuchKeyError,
    NoSuchLedgerError,
    is_unforeseen,
)
from metadata.ids import KEY_CLUSTER, ledger_key
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bookie_aio.server.age import BookieAge
    from bookie_aio.server.given_ids import GivenIds
    from bookie_aio.storage.engine import Engine
    from metadata.access.bookies import Cookie
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import MetadataStore

log = logging.getLogger(__name__)

_LISTED_AT_ONCE = 8192
_LOOKED_AT_ONCE = 256
_SETTLED_AT_ONCE = 2048
_FOLDED_AT_ONCE = 1024
_FLOOR_AFTER_S = 3600.0
"""The id floor is raised to the id counter of so long ago. Clients lose ids of blocks that they drew before.
No rule depends on the time."""


class LedgerGarbageCollector:
    """Drops ledgers that have been deleted, and no others."""

    def __init__(
        self,
        engine: Engine,
        store: MetadataStore,
        cookie: Cookie,
        age: BookieAge,
        given_ids: GivenIds,
        unnamed_grace_s: float,
    ) -> None:
        """`cookie` is this bookie's identity. The caller closes the store after this object."""
        self._age = age
        self._given_ids = given_ids
        self._unnamed_grace_s = unnamed_grace_s
        self._unnamed: dict[int, float] = {}  # the loop's time at which the grace period began
        self._looked_upto = -1  # each sweep checks a part of the ledgers for eviction
        self._engine = engine
        self._store = store
        self._ledgers = LedgerStore(store)
        self._cookie = cookie
        self._sweeping: OwnedTask | None = None
        self._drawn: tuple[float, int] | None = None  # the id counter, and the loop's time of that
        self._gone = IdRanges()  # ids below the floor that the last sweep found unlisted
        self._settled = IdRanges()  # ledgers that do not need the marks of a number, by the metadata
        self._settled_for = (0, 0)  # that number, and the events heard by then
        self._is_second_look = False  # all were settled, and the age was raised since: they are read again
        self._lifted_upto = -1  # each sweep lifts the marks of a part of the ledgers
        self.lift_mark: Callable[[int, int], Awaitable[int]] | None = None  # `Healing.lift`
        self.floor_after_s = _FLOOR_AFTER_S
        self.floor = 0
        self.folded = 0
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
        engine = self._engine
        while not engine.is_deleted(ledger_id):
            # Rule 15: before the store is asked. Behind its answer a ledger may be made, and entries taken.
            is_known = engine.known.is_known(ledger_id)
            await self._store.sync(ledger_key(ledger_id))
            if not await self._is_gone(ledger_id):
                return False
            await self.check_cluster()
            await self._check_droppable(ledger_id)
            if not engine.is_deleted(ledger_id) and engine.known.is_known(ledger_id) == is_known:
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
        await self._given_ids.read_again()
        # The raise covers all of `held`: a store that has it later is no copy from before their creation.
        await self._age.raise_if_written()
        dropped = 0
        began_at = self._engine.marking.number, self._age.events_heard
        self.floor = await self._ledgers.floor()  # before the listing: see the id floor
        # Behind the floor: it is raised above a lost id only after the event.
        await self._age.learn_events()
        unlisted, gone = await self._compare(held, self.floor)
        for ledger_id in unlisted:
            if ledger_id >= self._age.in_doubt_below:
                dropped += await self.drop_if_deleted(ledger_id)
        await self._forget_unnamed(held)
        below = self._age.unanswered_below  # there an id that is not listed need not be gone
        if self.floor > below:
            await self.check_cluster()
            await self._age.check()
            await self._end_marks(*began_at, gone)
            below = max(below, self._age.unanswered_below)
            await self._fold([(max(first, below), last) for first, last in gone if last >= below])
        else:
            self._gone = IdRanges()
        if not self._age.in_doubt_below:
            await self._raise_floor()
        await self._lift_marks()
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
        later, self._looked_upto = _next_turn(held, self._looked_upto)
        below = self._age.not_free_below  # an older copy does not know that a repair brought a ledger here
        candidates = sorted({*later, *self._unnamed})
        looked_at = [one for one in candidates if one >= below and self._has_entries(one)]
        if not looked_at:
            return
        await self._store.sync(KEY_CLUSTER)
        await self.check_cluster()
        await self._age.check()
        now = asyncio.get_running_loop().time()
        for ledger_id in looked_at:
            if ledger_id not in eviction_candidates:
                self._unnamed.pop(ledger_id, None)  # added to or listed: perhaps by a repair, which names us
            eviction_candidates.add(ledger_id)
            if not await self._is_kept_by_others(ledger_id):
                self._unnamed.pop(ledger_id, None)
                continue
            since = self._unnamed.setdefault(ledger_id, now)
            if now - since < self._unnamed_grace_s:
                continue
            await self._age.check()  # the metadata just read are no older copy's
            # Rule 15: no await from here to the append. A repair could list the entries in between.
            if ledger_id not in eviction_candidates or not self._has_entries(ledger_id):
                continue
            if ledger_id >= self._age.not_free_below:
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

    async def _compare(self, held: list[int], floor: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Compare ids with those that the metadata store lists.

        Args:
            held: the ids of the ledgers held here, ascending.
            floor: the id floor, read before this call.

        Returns:
            The ids of `held` that are not listed, and the ranges of ids below the floor that are not.
        """
        unlisted: list[int] = []
        gone: list[tuple[int, int]] = []
        at = following = 0
        if held or floor:
            async for listed in self._ledgers.ledger_ids(sync=True):
                while at < len(held) and held[at] < listed:
                    unlisted.append(held[at])
                    at += 1
                if at < len(held) and held[at] == listed:
                    at += 1
                if following < min(listed, floor):
                    gone.append((following, min(listed, floor) - 1))
                following = listed + 1
                if at == len(held) and following >= floor:
                    break
        if following < floor:
            gone.append((following, floor - 1))
        return unlisted + held[at:], gone

    # --- ids that are gone ---------------------------------------------------------------------

    async def _raise_floor(self) -> None:
        """Raise the id floor to what the id counter was an hour ago."""
        now = asyncio.get_running_loop().time()
        if self._drawn is not None and now - self._drawn[0] < self.floor_after_s:
            return
        before = self._drawn
        (counter,) = await self._store.allocate_ids(LEDGER_SEQUENCE, 1)
        self._drawn = (now, counter)
        # A counter that fell is that of an older copy. The former value says nothing about it.
        if before is not None and before[1] < counter:
            await self._ledgers.raise_floor(before[1])

    async def _fold(self, gone: list[tuple[int, int]]) -> None:
        """Append tombstones for ids that are gone, in ranges, a part of them in each sweep."""
        before, self._gone = self._gone, IdRanges(gone)
        waiting: list[asyncio.Future[None]] = []
        for first, last in gone:
            for other_first, other_last in before.ranges_from(first):
                if other_first > last or len(waiting) >= _FOLDED_AT_ONCE:
                    break
                waiting += self._fold_range(max(first, other_first), min(last, other_last))
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    def _fold_range(self, first: int, last: int) -> list[asyncio.Future[None]]:
        """Append tombstones for a range, without the ids that anything is held of."""
        waiting = []
        while first <= last:
            held, _ = self._engine.list_ledgers(first, 1)
            end = min(last, held[0] - 1) if held else last
            if first <= end and not self._engine.is_deleted(first, end):
                waiting.append(when_durable(partial(self._engine.append_tombstone, first, last=end)))
                self.folded += 1
            first = end + 2
        return waiting

    async def _end_marks(self, number: int, heard: int, gone: list[tuple[int, int]]) -> None:
        """End the marks of all ledgers up to a number, if no listed ledger needs them any more.

        Args:
            number: their number when this sweep began; 0 for none.
            heard: the events heard by then. What the metadata said before a set-back counts no more.
            gone: the ranges of ids below the floor that are not listed.
        """
        marking = self._engine.marking
        if not number or marking.is_unbounded or self.floor <= marking.bound or self._age.unanswered_below:
            return
        if self._settled_for != (number, heard):
            self._settled, self._settled_for, self._is_second_look = IdRanges(), (number, heard), False
        reads = 0
        for ledger_id in _outside(gone, marking.bound):
            if marking.has_lift(ledger_id, number) or ledger_id in self._settled:
                continue
            if reads == _SETTLED_AT_ONCE:
                return
            reads += 1
            if not await self._is_settled(ledger_id):
                if self._is_second_look:
                    self._settled_for = (0, 0)
                return
            self._settled.add(ledger_id)
        if not self._is_second_look:
            # Perhaps into an older copy, behind some of these reads. So all are read again.
            await self._age.raise_if_written(is_forced=True)
            self._settled, self._is_second_look = IdRanges(), True
            return
        await self._age.check()  # the store is no copy from before that age
        # No await from here to the append: a later loss has a bound of its own.
        is_of_now = (marking.number, self._age.events_heard) == (number, heard)
        if is_of_now and not self._age.unanswered_below:
            await when_durable(partial(marking.end_all, number))
            log.info("marks of lost data ended", extra=fields(bookie=self._cookie.bookie_id))

    async def _is_settled(self, ledger_id: int) -> bool:
        """Return whether this bookie owes nothing more of a ledger, or has all of it again."""
        try:
            metadata, _ = await self._ledgers.read(ledger_id)
            return is_settled(metadata, self._cookie.bookie_id) or await self._lift(metadata)
        except NoSuchLedgerError:  # deleted since: below the floor, it is gone
            return True
        except MetadataCorruptError as error:
            log.warning("marks of all ledgers stay: %s", error, extra=fields(ledger=ledger_id))
            return False

    async def _lift_marks(self) -> None:
        """Lift the marks of single ledgers of which this bookie has no seat, a part of them in each sweep."""
        later, self._lifted_upto = _next_turn(self._engine.marking.list_marked(), self._lifted_upto)
        for ledger_id in later:
            if ledger_id >= self._age.unanswered_below:
                with suppress(NoSuchLedgerError, MetadataCorruptError):
                    metadata, _ = await self._ledgers.read(ledger_id)
                    await self._lift(metadata)

    async def _lift(self, metadata: LedgerMetadata) -> bool:
        """Lift the marks of a ledger if this bookie has no seat in it; no client asks it for that."""
        ledger_id = metadata.ledger_id
        if self.lift_mark is None or not is_unnamed(metadata, self._cookie.bookie_id):
            return False
        try:
            return not await self.lift_mark(ledger_id, await self.lift_mark(ledger_id, 0))
        except InvalidTransitionError:  # it is open, or a page names this bookie, which lacks entries
            return False

    async def _is_gone(self, ledger_id: int) -> bool:
        try:
            await self._ledgers.read(ledger_id)
        except NoSuchLedgerError:
            return True
        except MetadataCorruptError:
            return False  # the metadata exists, though it cannot be read
        return False

    async def check_cluster(self) -> None:
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

    async def check_store(self, ledger_id: int) -> None:
        """Check that what the metadata store said of a ledger is of this cluster, and not of the past.

        Raises:
            MetadataSetBackError: the store was set back to an older copy.
            MetadataError: it is another cluster's, or cannot be reached.
        """
        await self.check_cluster()
        await self._age.check()
        if ledger_id < self._age.unanswered_below:
            raise MetadataSetBackError(
                f"the metadata store was set back to an older copy, which may know less of ledger "
                f"{ledger_id} than this bookie did: wait until `bookie-aio bookie accept-metadata` answers"
            )

    async def _check_droppable(self, ledger_id: int) -> None:
        """Check that "no such node" proves a deletion.

        Raises:
            MetadataSetBackError: the store was set back to an older copy, which may lack the ledger.
            MetadataError: the id has not been given out, or the store cannot be reached.
        """
        if not await self._given_ids.covers(ledger_id):
            raise InvalidTransitionError(f"no ledger has the id {ledger_id}: it has not been given out")
        await self._age.check()
        if ledger_id < self._age.in_doubt_below:
            raise MetadataSetBackError(
                f"the metadata store was set back to an older copy, which may lack ledger {ledger_id}: it is "
                "kept until `bookie-aio bookie accept-metadata` answers"
            )

    async def _bury(self, ledger_id: int) -> None:
        # No await since the caller checked that there is no tombstone yet.
        await when_durable(partial(self._engine.append_tombstone, ledger_id))
        self.dropped += 1
        log.info("ledger dropped", extra=fields(bookie=self._cookie.bookie_id, ledger=ledger_id))


def _next_turn(ids: list[int], upto: int) -> tuple[list[int], int]:
    """Return the next ledgers of an ascending list behind an id, and the id to go on behind; −1: anew."""
    later = ids[bisect_right(ids, upto) :][:_LOOKED_AT_ONCE]
    return later, later[-1] if len(later) == _LOOKED_AT_ONCE else -1


def _outside(ranges: list[tuple[int, int]], last: int) -> Iterator[int]:
    """Yield the ids up to `last` that are in none of the ascending ranges."""
    following = 0
    for first, end in ranges:
        yield from range(following, min(first, last + 1))
        following = end + 1
    yield from range(following, last + 1)
