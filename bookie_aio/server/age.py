"""A bookie's age, and its doubt in the metadata store: the witnesses against copies from the past.

Owns the file `age` in each data directory, the bookie's record `bookies/ages/ID`, and the events `set_backs`.
`bookie_aio.core.identity` decides; this module reads, raises and writes in the order that the decisions need.
`bookie_aio.server.stored_ages` has the records of all bookies in the metadata store.

A start goes through these steps. A crash between two of them loses no conclusion:

1. `begin`, with the directories locked and before the storage is replayed: the ages are compared. What they
   prove is written to the directories, and then the age is raised in the metadata store. A directory that was
   set back gets a mark for all ledger ids given out so far, in the first group that the storage writes.
   The file also says what the storage held when it was written. The storage compares that with its files.
2. `settle`, before the bookie serves: the id counter is compared with the ledgers held. A set-back of the
   metadata becomes an event there, then the counter is raised above all ids that may have been given out,
   then the directories hold the doubt.

While it serves, the bookie raises its age every few seconds in which something was written. So the metadata
store cannot be set back unnoticed behind the last such moment, nor the directory. `check` proves that the
store is no copy from before the last raise. Rule 15: without that proof "no such node" drops nothing.
Whenever it has raised its age, it looks at those of other bookies: a directory and the metadata that are set
back together agree, and only other bookies have seen that there was more.

Only an operator ends a doubt (`bookie-aio bookie accept-metadata`). A bookie that is formatted after an event
is in no doubt, since it holds nothing of before. Others may: `unanswered_below` counts for it all the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from bookie_aio.core.identity import AgeFile, Standing, compare_ages, is_told, judge_age, judge_ids
from bookie_aio.server.stored_ages import StoredAges
from bookie_aio.storage.crash_recovery import EarlierRun
from bookie_aio.storage.disk.disk import write_file
from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.segment.format import AGE
from bookie_aio.structured_logging import fields
from metadata.access.bookies import (
    AgeRecord,
    BookieRecord,
    SetBack,
    SetBacks,
    not_free_below,
    unanswered_below,
)
from metadata.access.ledgers import LEDGER_SEQUENCE
from metadata.errors import (
    CookieMismatchError,
    DiskFailedError,
    DiskFullError,
    KeyExistsError,
    MetadataError,
    MetadataSetBackError,
    MetadataUnavailableError,
    NoSuchKeyError,
    StorageError,
    VersionConflictError,
    is_unforeseen,
)
from metadata.ids import KEY_SET_BACKS, available_key
from metadata.owned_task import OwnedTask, OwningLock

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Sequence

    from bookie_aio.config import BookieConfig
    from bookie_aio.core.identity import Peer
    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.engine import Engine
    from bookie_aio.storage.journal import Done
    from bookie_aio.storage.marking import Marking
    from metadata.access.bookies import SetBack
    from metadata.store import MetadataStore

log = logging.getLogger(__name__)

_AGE_BYTES_MAX = 64 * 1024
_CONFLICTS_MAX = 16
_LOOK_AGAIN_S = 0.05
_LISTED_AT_ONCE = 1024
_TICKS_PER_IDLE_LOOK = 8


class BookieAge:
    """The age of one running bookie.

    `has_lost` says that the directories were found to be older than the store's record.
    """

    def __init__(
        self,
        config: BookieConfig,
        store: MetadataStore,
        disk: Disk,
        rng: random.Random,
        *,
        token: str,
        owner: int,
    ) -> None:
        """Take what the bookie was started with; `begin` reads the directories.

        `token` was drawn for this start. `owner` is the number by which the bookie's files name it.
        """
        self._config = config
        self._bookie_id = config.bookie_id
        self._store = store
        self._disk = disk
        self._token = token
        self._owner = owner
        self._rng = rng
        self._stored = StoredAges(store, config.bookie_id)
        self._file = AgeFile()
        self._is_new = False
        self._events: tuple[SetBack, ...] = ()
        self._engine: Engine | None = None
        self._covered = -1, -1  # the groups, and the ids known, that the last raise covers
        self._looked_at = -1  # the own age at the last look at those of others
        self._lock = OwningLock()  # one change of the files and of the store's record at a time
        self._is_judging = False  # from the beginning of a judgement of the events until its end is kept
        self._in_question = _InQuestion()
        # A copy, and the event that tells of it, while the disk is too full to raise the age above it.
        self._told_of: _Copy | None = None
        self._tasks: list[OwnedTask] = []
        self._on_replaced: Callable[[StorageError], None] = _ignore
        self._is_told = False  # of a full disk
        self._is_written = False  # each directory has `_file`
        self._is_raised = False  # the start has raised the age in the metadata store
        self.has_lost = False
        self.events_heard = 0  # grows when an event is found that is new to the bookie

    # --- figures -------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Return the age, as the metadata store has it."""
        return self._file.number

    @property
    def ids_known(self) -> int:
        """Return the id below which every ledger id has been given out, as the store last said."""
        return self._file.ids_known

    @property
    def in_doubt_below(self) -> int:
        """Return the id below which no ledger is dropped, because the store was set back; 0 for no doubt."""
        return self._file.in_doubt_below

    @property
    def not_free_below(self) -> int:
        """Return the id below which no new ledger may be made, by the events known of."""
        return not_free_below(self._events)

    @property
    def unanswered_below(self) -> int:
        """Return the id below which the metadata may be older than what this bookie holds.

        There no id is folded, and no mark is lifted. See `metadata.access.bookies`.
        """
        return max(self.in_doubt_below, unanswered_below(self._events, self._bookie_id))

    def doubt_as_json(self) -> dict[str, object] | None:
        """Return what `bookie info` shows after a set-back of the metadata; None: all is answered."""
        if not self.unanswered_below:
            return None
        return {"in_doubt_below": self.in_doubt_below, "unanswered_below": self.unanswered_below}

    # --- the start -----------------------------------------------------------------------------

    async def begin(self) -> EarlierRun:
        """Compare the directories' age with the store's, and raise both; the directories must be locked.

        Returns:
            The highest ledger id that data may have been lost of; None where the ages of the directories are
            as they were left. What the storage held by the files found.

        Raises:
            CookieMismatchError: the directory is older than the record, and the bookie last ran elsewhere.
            KeyExistsError: a bookie of that id is running elsewhere.
            MetadataError: the metadata store cannot be reached.
        """
        files = [await read_age(self._disk, path, self._owner) for path in self._config.directories]
        present = [file for file in files if file is not None]
        held = tuple(sorted({file.durable for file in present}))
        await self._wait_until_unregistered(present)
        place = list(self._config.directories)
        for _ in range(_CONFLICTS_MAX):
            stored, version = await self._stored.read()
            self._is_new = stored is None and not any(files)
            verdict = judge_age(files, stored, place=place, token=self._token)
            if verdict.is_moved and not self._config.accept_older_copy:
                raise _is_copy(self._bookie_id, self._config.directories, stored)
            self.has_lost = verdict.file.has_lost
            try:
                await self._write(verdict.file)
            except DiskFullError as error:
                # The age stays as it is. The next start, or the next raise, compares again. An age that an
                # earlier start intended is not forgotten: its compare-and-set may yet take effect.
                is_earlier = verdict.file.intended_token != self._token
                self._file = verdict.file if is_earlier else verdict.file.intend(0, "")
                self._tell_once("the age of this bookie cannot be written", error)
                break
            files = [verdict.file for _ in files]
            with suppress(VersionConflictError):
                await self._stored.put(
                    AgeRecord(self._file.intended, self._file.intended_token, place), version
                )
                if self._file.intended_token == self._token:
                    self._is_raised = True
                    break
        else:
            raise MetadataUnavailableError(f"the age of bookie {self._bookie_id} is raised by others as well")
        if not self.has_lost:
            return EarlierRun(None, held)
        return EarlierRun(max(0, await self._store.ids_drawn(LEDGER_SEQUENCE) - 1), held)

    async def _wait_until_unregistered(self, files: Sequence[AgeFile]) -> None:
        """Wait until no other bookie of this id is registered: its age must not be raised.

        A registration that carries a token of these directories is that of the process before this one. It is
        dead, since the directories are locked. Another one may be that of an earlier process as well, and
        then ends with its session.
        """
        own = {token for file in files for token in (file.token, file.intended_token) if token}
        deadline = asyncio.get_running_loop().time() + self._store.registration_wait_s
        while True:
            try:
                await self._store.sync(available_key(self._bookie_id))
                record = BookieRecord.from_json(
                    (await self._store.read(available_key(self._bookie_id))).value
                )
            except NoSuchKeyError:
                return
            if record.nonce in own:
                return
            if asyncio.get_running_loop().time() >= deadline:
                raise KeyExistsError(
                    f"a bookie {self._bookie_id} is running already, by the metadata store",
                    bookie_id=self._bookie_id,
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def settle(self, engine: Engine) -> None:
        """Compare the id counter with the ledgers held, and confirm the age; called before the bookie serves.

        The storage must have made the mark of lost data durable.

        Raises:
            MetadataError: the metadata store cannot be reached.
        """
        self._engine = engine
        groups = engine.counts.groups
        async with self._lock:
            self._file = replace(self._file, has_lost=False)
            if self.has_lost or engine.marking.is_unbounded:
                self._file = replace(self._file, marks=())  # perhaps of storage that was lost
            self._is_written = False
            if await self._is_untold(await self._stored.find_older(self._file.peers)):
                self._file = self._file.find_copy(self._file.number)
            await self._judge_ids(is_raised=self._is_raised)
            self._covered = groups, self._file.ids_known

    async def _judge_ids(self, *, is_raised: bool = False) -> None:
        """Record a set-back of the metadata where one is proven, and adopt the events of others.

        Args:
            is_raised: the intended age is in the metadata store. Otherwise it stays intended: confirmed
                before it is there, it would look like a store that was set back.
        """
        assert self._engine is not None
        self._is_judging = True
        for _ in range(_CONFLICTS_MAX):
            await self._store.sync(KEY_SET_BACKS)
            found = await SetBacks.read(self._store)
            counter = await self._store.ids_drawn(LEDGER_SEQUENCE)
            verdict = judge_ids(
                self._file,
                bookie_id=self._bookie_id,
                counter=counter,
                highest_held=self._engine.known.highest(),
                events=found.events,
                token=f"{self._rng.getrandbits(64):016x}",
                is_new=self._is_new,
            )
            self._in_question.hear(verdict.events, self._file.set_backs, self._engine.marking)
            if verdict.events != found.events or found.version is None:
                # Before the counter is raised: a raised counter proves nothing to the next bookie any more.
                # Without an event the key is there all the same: writers guard their changes by its version.
                try:
                    await found.replace(self._store, verdict.events)
                except VersionConflictError:
                    continue
            if verdict.raise_to > counter:
                await self._store.ids_drawn(LEDGER_SEQUENCE, least=verdict.raise_to)
            break
        else:
            raise MetadataUnavailableError(f"{KEY_SET_BACKS} is changed by others again and again")
        self._is_new = False
        self._events = verdict.events
        before = self._file
        unknown = [event for event in self._events if event.token not in before.set_backs]
        self.events_heard += bool(unknown)
        at = before.copy_age
        if unknown:
            stored, _ = await self._stored.read()
            at = before.find_copy(min(before.number, _number_of(stored))).copy_age
        after = verdict.file.confirm() if is_raised else verdict.file
        try:
            if after.has_lost:
                await self._mark(verdict.raise_to)
                after = replace(after, has_lost=False)
            # Answered or not: the command answers for this bookie before it has read the event.
            if unknown:
                below = not_free_below(unknown)
                await _mark_excused(self._engine, self._bookie_id, below, before.marks_at(at))
        except DiskFullError as error:
            # The doubt counts. The marks count in memory, and are made again at the next look or start.
            after = replace(after, set_backs=before.set_backs, copy_age=at)
            self._warn("the marks of a set-back cannot be written", error)
        await self._write_or_keep(after)  # kept only: the next start finds the events new once more
        self._is_judging = False
        self._in_question.settle((event.token for event in self._events), self._engine.marking)
        if after.doubt and after.doubt != before.doubt:
            _tell_of_doubt(self._bookie_id, self.in_doubt_below, counter)
        elif before.doubt and not after.doubt:
            log.warning("an operator accepted the metadata", extra=fields(bookie=self._bookie_id))

    async def _mark(self, raised_to: int) -> None:
        """Mark all ledgers: another bookie saw this one at a later age than its directories know of.

        All ids below `raised_to` may have been given out, also behind the copy that the counter is of.
        """
        assert self._engine is not None
        self.has_lost = True
        bound = raised_to - 1
        log.error(
            "the directory was set back, as another bookie knows: all ledgers may have lost data",
            extra=fields(bookie=self._bookie_id, up_to=bound),
        )
        await when_durable(partial(self._engine.marking.mark_all, bound))

    async def learn_peers(self) -> None:
        """Look at the ages of other bookies, as evidence for them after a set-back of the metadata.

        The own age was compared just now. An older copy could else replace what was seen before it.

        Raises:
            MetadataError: the metadata store cannot be reached.
        """
        number, seen = self.number, await self._stored.look(self._file.peers)
        async with self._lock:
            if await self._is_untold(seen.older):
                stored, _ = await self._stored.read()
                await self._write_or_keep(self._file.find_copy(_number_of(stored)))
                await self._judge_copy(stored)
            elif seen.peers != self._file.peers:
                await self._write_or_keep(replace(self._file, peers=seen.peers))
        self._looked_at = number

    async def _is_untold(self, older: Sequence[Peer]) -> bool:
        """Return whether no event tells of ages that were seen and that the store does not have any more."""
        if not older:
            return False
        await self._store.sync(KEY_SET_BACKS)
        events = (await SetBacks.read(self._store)).events
        return not all(is_told(peer, events) for peer in older)

    async def learn_events(self) -> None:
        """Read the events of the metadata store, and adopt those that are new.

        Raises:
            MetadataError: the metadata store cannot be reached.
        """
        assert self._engine is not None
        heard = (await SetBacks.read(self._store)).events
        # Without the lock, which a write to a slow disk may hold.
        self._in_question.hear(heard, self._file.set_backs, self._engine.marking)
        async with self._lock:
            # Only here: a read from before a judgement lacks the event that it makes.
            noted = self._in_question.tokens
            events = (await SetBacks.read(self._store)).events
            gone = noted - {event.token for event in events}  # the store keeps a few events only
            self._in_question.settle(gone, self._engine.marking)
            is_unfinished = self._is_judging or self._file.has_lost
            is_new = any(event.token not in self._file.set_backs for event in events)
            if events != self._events or is_new or is_unfinished:
                stored, _ = await self._stored.read()
                is_ahead = compare_ages(self._file, stored) is Standing.AHEAD
                if is_ahead and not await _is_told_of(self._told_of, stored, self._store):
                    await self._judge_copy(stored)  # or the next look would find one more event
                else:
                    await self._judge_ids()

    # --- while it serves -----------------------------------------------------------------------

    def start(self, on_replaced: Callable[[StorageError], None]) -> None:
        """Begin to raise the age and to watch for events.

        `on_replaced` is called when another bookie has raised the age: this one must not serve any more.
        """
        self._on_replaced = on_replaced
        self._tasks = [
            OwnedTask(self._raise_for_ever, "age of the bookie"),
            OwnedTask(self._watch_events, "events of set-backs"),
        ]

    async def close(self) -> None:
        """Raise the age for what was written last, and stop. Does nothing where the store is away."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            await task.wait()
        if self._tasks and self._engine is not None and self._engine.has_room:
            with suppress(MetadataError, StorageError, TimeoutError):
                async with asyncio.timeout(self._config.age_interval_s):
                    await self.raise_if_written()
                    if self.number != self._looked_at:
                        await self.learn_peers()
        await self._lock.end()

    async def raise_if_written(self, *, is_forced: bool = False) -> None:
        """Raise the age if anything was written since it was last raised.

        Args:
            is_forced: raise it in any case, from the call on. Each copy of the store with that age has what
                was read from the store before the call. A request that is cancelled does not interrupt it.

        Raises:
            MetadataError: the metadata store cannot be reached; the next call tries again.
            MetadataSetBackError: the store was set back; the events say so by now.
            DiskFailedError: a directory cannot be written.
            DiskFullError: so is a raise that is forced. Otherwise the age stays, without an error.
        """
        assert self._engine is not None
        before = self._file.intended or self._file.number  # perhaps in the store before the call

        async def raise_anew() -> None:
            assert self._engine is not None
            for _ in range(2):  # the first may end a raise of before the call
                if self._file.number <= before:
                    await self._raise(self._engine.counts.groups)
            if self._file.number <= before or not self._is_written:
                raise DiskFullError("the age of this bookie cannot be written")

        if is_forced:
            await self._lock.run(raise_anew)
            return
        async with self._lock:
            groups = self._engine.counts.groups
            if self._covered != (groups, self._file.ids_known) or self._file.intended:
                await self._raise(groups)

    async def _raise(self, groups: int) -> None:
        """Raise the age for the groups written so far; the lock must be held. See `raise_if_written`."""
        assert self._engine is not None
        ids = self._file.ids_known
        if not self._file.intended or not self._is_written:
            intended = self._file
            if not intended.intended:
                intended = intended.intend(intended.next_number, self._token)
                intended = intended.note_marks(*self._engine.marking.numbers)
            try:
                await self._write(intended)
            except DiskFullError as error:
                self._tell_once("the age of this bookie cannot be written", error)
                return
            self._is_told = False
        is_behind = self._file.is_ahead  # an earlier call raised the age, and could not tell of it
        for _ in range(_CONFLICTS_MAX):
            stored, version = await self._stored.read()
            standing = compare_ages(self._file, stored)
            if standing is Standing.RAISED:
                break
            if standing in (Standing.OLDER, Standing.FORKED):
                raise self._replaced()
            if standing is Standing.AHEAD and not await _is_told_of(self._told_of, stored, self._store):
                is_behind = True
                try:
                    await self._write(self._file.find_copy(_number_of(stored)))
                except DiskFullError as error:  # nothing else tells of it once the age is raised
                    self._tell_once("the age of this bookie cannot be written", error)
                    return
            self._told_of = None
            age = AgeRecord(self._file.intended, self._file.intended_token, list(self._config.directories))
            with suppress(VersionConflictError):
                await self._stored.put(age, version)
                break
        else:
            raise MetadataUnavailableError(f"the age of bookie {self._bookie_id} could not be raised")
        is_own = self._file.intended_token == self._token
        if is_behind:
            await self._judge_ids(is_raised=True)
            raise MetadataSetBackError("the metadata store was set back to an older copy")
        await self._write_or_keep(self._file.confirm())
        # An age that an earlier start intended does not cover this one: a copy from before it has it too.
        self._covered = (groups, ids) if is_own else (-1, -1)

    async def check(self) -> None:
        """Prove that the store is no copy from before the age was last raised.

        A request that is cancelled in here does not interrupt it. What an error interrupted is finished.

        On a full disk the age may be that of a copy which the operator has accepted.

        Raises:
            MetadataSetBackError: it is one; the events say so by now.
            MetadataError: the metadata store cannot be reached.
        """

        async def compare() -> None:
            stored, _ = await self._stored.read()
            standing = compare_ages(self._file, stored)
            if standing in (Standing.OLDER, Standing.FORKED):
                raise self._replaced()
            is_told = await _is_told_of(self._told_of, stored, self._store)
            if is_told and not self._file.is_ahead:
                if self.unanswered_below:
                    raise MetadataSetBackError("the metadata store was set back to an older copy")
            elif standing is Standing.AHEAD or self._file.is_ahead:
                await self._judge_copy(stored)
                raise MetadataSetBackError("the metadata store was set back to an older copy")
            if self._is_judging:
                await self._judge_ids()

        await self._lock.run(compare)

    async def _judge_copy(self, stored: AgeRecord | None) -> None:
        """Judge a store that was set back, and raise the age; the lock must be held.

        Otherwise each further look would find the same set-back. On a full disk it goes by `_told_of`.
        """
        assert self._engine is not None
        with suppress(MetadataSetBackError):
            await self._raise(self._engine.counts.groups)
            await self._write_or_keep(self._file.find_copy(_number_of(stored)))  # on a full disk
            await self._judge_ids()
            self._told_of = stored, self._events[-1].token

    def _replaced(self) -> CookieMismatchError:
        error = CookieMismatchError(
            f"another bookie {self._bookie_id} has been started on a copy of this one's directory: this one "
            "serves no more. Keep one of the two directories, and start the other as a new bookie under "
            "another id, with an empty directory",
            bookie_id=self._bookie_id,
        )
        self._on_replaced(error)
        return error

    async def learn_ids(self) -> int:
        """Read the id counter, and return the id below which every ledger id has been given out.

        An age or a counter below its last known value proves a set-back of the store, which becomes an event.
        The counter alone proves none once a client has drawn ids from the copy. For each new value the age is
        raised at the next tick: a client may have ids, and write nothing yet.

        Raises:
            MetadataError: the metadata store cannot be reached.
        """
        with suppress(MetadataSetBackError):
            await self.check()
        counter = await self._store.ids_drawn(LEDGER_SEQUENCE)
        if counter < self._file.ids_known:
            await self._lock.run(self._judge_ids)
        elif counter > self._file.ids_known:
            self._file = replace(self._file, ids_known=counter)
        return self._file.ids_known

    async def _raise_for_ever(self) -> None:
        has_failed = False
        for tick in itertools.count():
            await asyncio.sleep(self._config.age_interval_s)
            try:
                before = self.number
                await self.raise_if_written()
                if self.number != self._looked_at or tick % _TICKS_PER_IDLE_LOOK == 0:
                    if self.number == before:
                        await self.check()
                    await self.learn_peers()
                has_failed = False
            except Exception as error:
                if not has_failed:  # once for each outage of the store
                    self._warn("the age of this bookie could not be raised", error)
                has_failed = True

    async def _watch_events(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(KEY_SET_BACKS)) as changes:
                    async for _ in changes:
                        await self.learn_events()
            except Exception as error:
                self._warn("the events of the metadata store could not be read", error)
            await asyncio.sleep(self._config.age_interval_s)

    def _tell_once(self, what: str, error: Exception) -> None:
        if not self._is_told:
            self._is_told = True
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        unforeseen = is_unforeseen(error)
        log.warning(what, extra=fields(bookie=self._bookie_id, error=error), exc_info=unforeseen)

    # --- the files -----------------------------------------------------------------------------

    async def _write(self, file: AgeFile) -> None:
        """Replace the file in each directory; durable on return.

        Rule 2: a disk that fails under an open storage ends that, like a failed write of the storage's own.
        """
        file = replace(file, owner=self._owner)
        if file != self._file or not self._is_written:
            disk = self._disk
            if self._engine is not None:
                disk = self._engine.disk
                file = replace(file, durable=self._engine.held())
            self._is_written = False
            try:
                for path in self._config.directories:
                    await write_file(disk, path, AGE, [file.to_bytes()])
            except DiskFailedError as error:
                if self._engine is not None:
                    self._engine.health.fail(error, "writing the age")
                raise
            self._keep(file)
            self._is_written = True

    async def _write_or_keep(self, file: AgeFile) -> None:
        """Replace the files as `_write` does; on a full disk keep the content in memory only."""
        try:
            await self._write(file)
        except DiskFullError as error:
            self._keep(file)
            self._tell_once("the age of this bookie cannot be written", error)

    def _keep(self, file: AgeFile) -> None:
        """Keep the file in memory, with the ids that were learned while it was being written."""
        self._file = replace(file, ids_known=max(file.ids_known, self._file.ids_known))


class _InQuestion:
    """The events that a bookie has heard of, and whose marks may not count yet.

    It denies no entry that these may concern. A client may know an event before the bookie judged it. That
    may take as long as a write to a slow disk.
    """

    def __init__(self) -> None:
        self._raised_to: dict[str, int] = {}  # by token

    def hear(self, events: Iterable[SetBack], known: Collection[str], marking: Marking) -> None:
        """Note events that are not among the known ones."""
        self._raised_to |= {event.token: event.raised_to for event in events if event.token not in known}
        self._tell(marking)

    @property
    def tokens(self) -> frozenset[str]:
        """Return the tokens of the events that are noted."""
        return frozenset(self._raised_to)

    def settle(self, tokens: Iterable[str], marking: Marking) -> None:
        """Note that the marks of these events count, or that nobody tells of these events any more."""
        for token in tokens:
            self._raised_to.pop(token, None)
        self._tell(marking)

    def _tell(self, marking: Marking) -> None:
        marking.in_question_below = max(self._raised_to.values(), default=0)


_Copy: TypeAlias = "tuple[AgeRecord | None, str]"
"""The record of a store that was set back, and the token of the event that tells of it."""


async def _is_told_of(copy: _Copy | None, stored: AgeRecord | None, store: MetadataStore) -> bool:
    """Return whether the store is still the copy, with its event."""
    if copy is None or copy[0] != stored:
        return False
    return any(event.token == copy[1] for event in (await SetBacks.read(store)).events)


def _number_of(stored: AgeRecord | None) -> int:
    return 0 if stored is None else stored.number


def _is_copy(bookie_id: str, directories: tuple[str, ...], stored: AgeRecord | None) -> CookieMismatchError:
    elsewhere = "" if stored is None else ", ".join(stored.place)
    return CookieMismatchError(
        f"{', '.join(directories)} is an older copy of the directory of bookie {bookie_id}, which ran last "
        f"on {elsewhere}. Start the bookie there. If that directory is lost, start the copy with "
        "--accept-older-copy: it answers for no entry written so far, and can be repaired in its place",
        bookie_id=bookie_id,
    )


async def read_age(disk: Disk, directory: str, owner: int) -> AgeFile | None:
    """Read the age of a directory; None where the file is missing, damaged, or of another owner."""
    try:
        file = await disk.open(os.path.join(directory, AGE))
    except FileNotFoundError:
        return None
    try:
        age = AgeFile.parse(bytes(await file.read(0, min(file.size(), _AGE_BYTES_MAX))))
    finally:
        file.close()
    return age if age is None or age.owner in (0, owner) else None


async def _mark_excused(engine: Engine, bookie_id: str, below: int, known: tuple[int, int]) -> None:
    """Mark the ledgers below an id that newer metadata excused this bookie of: older ones may name it again.

    These were evicted here, or had marks that ended. It would deny their entries, which others had then, and
    a recovery would close a ledger before them.

    Args:
        engine: the storage.
        bookie_id: this bookie.
        below: the id.
        known: `AgeFile.marks_at` for the age that the older copy has. What ended by then was ended by
            metadata that the copy has, too.

    Raises:
        DiskFullError: not all marks are durable. Each of them counts.
    """
    marking = engine.marking
    errors: list[BaseException] = []

    async def write(accepts: list[Callable[[Done], None]]) -> None:
        writing = []
        for accept in accepts:  # all of them: the marks count without room, too
            try:
                writing.append(when_durable(accept))
            except DiskFullError as error:
                errors.append(error)
        outcomes = await asyncio.gather(*writing, return_exceptions=True)
        errors.extend(each for each in outcomes if isinstance(each, BaseException))
        del errors[1:]

    try:
        await when_durable(engine.barrier)  # a lift or an eviction under way counts first
    except DiskFullError as error:  # what was dropped never counts, and the rest comes before these marks
        errors.append(error)
    following = marked = 0
    lifted, ended = known
    if has_ended := marking.has_ended_since(ended):
        await write([marking.mark_again])
    while 0 <= following < below:
        ids, following = marking.list_excused(following, _LISTED_AT_ONCE, lifted)
        wanted = [one for one in ids if one < below and not engine.is_deleted(one)]
        await write([partial(engine.append_mark, one) for one in wanted])
        marked += len(wanted)
        await asyncio.sleep(0)  # lifts wait for the lock, and evictions keep away from these ids
    if marked or has_ended:
        log.warning(
            "ledgers are marked as lost once more: older metadata may name this bookie",
            extra=fields(bookie=bookie_id, ledgers=marked, all_up_to=marking.bound if has_ended else None),
        )
    if errors:
        raise errors[0]


def _tell_of_doubt(bookie_id: str, below: int, counter: int) -> None:
    log.error(
        "the metadata store was set back to an older copy: no ledger in doubt is dropped until "
        "`bookie-aio bookie accept-metadata` answers",
        extra=fields(bookie=bookie_id, in_doubt_below=below, ids_given_out_by_the_copy=counter),
    )


def _ignore(error: StorageError) -> None:
    """Stand for the callback until the bookie serves."""
