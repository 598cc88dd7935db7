"""Registration: the bookie's cookie and its ephemeral record in the metadata store (rule 6).

Owns the reading and writing of cookies, in the order that `bookie_aio.core.identity` explains and decides on.
Owns the ephemeral record by which clients find the bookie, and follows the operator's order to it. Does not
own the store's session.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from bookie_aio.core.identity import Action, DirectoryState, decide, is_flipped
from bookie_aio.storage.data_directory import (
    parse_cookie,
    read_cookie_text,
    write_cookie,
    write_empty_storage,
)
from bookie_aio.storage.disk.disk import TEMPORARY_SUFFIX, sync_path
from bookie_aio.storage.segment.format import CHECKPOINT, COOKIE, LOCK, WITNESS
from bookie_aio.structured_logging import fields
from metadata.access.bookies import (
    REMOVED,
    BookieRecord,
    ClusterRecord,
    Cookie,
    Orders,
    ensure_cluster,
    find_cluster,
    is_retired,
)
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    CookieMismatchError,
    KeyExistsError,
    MetadataCorruptError,
    MetadataError,
    NoSuchKeyError,
)
from metadata.ids import KEY_ORDERS, age_key, available_key, cookie_key
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from bookie_aio.config import BookieConfig
    from bookie_aio.storage.disk.disk import DirectoryLock, Disk
    from metadata.store import MetadataStore, Registration

log = logging.getLogger(__name__)

_DRAFT = COOKIE + TEMPORARY_SUFFIX
_NOT_DATA = {COOKIE, _DRAFT, LOCK, "lost+found"}  # `AGE` is data: it is written after formatting
_OF_A_DRAFT = {name + suffix for name in (CHECKPOINT, WITNESS) for suffix in ("", TEMPORARY_SUFFIX)}
_COOKIE_BYTES_MAX = 64 * 1024
_RETRY_S = 0.5
_LOOK_TIMEOUT_S = 1.0


async def establish_identity(
    config: BookieConfig,
    store: MetadataStore,
    disk: Disk,
    *,
    rng: random.Random,
    now_ms: Callable[[], int],
) -> Cookie:
    """Check that the directories are this bookie's, and format them for a new bookie. Return the cookie.

    Raises:
        CookieMismatchError: they are not this bookie's (rule 6); the message names the remedy.
        NoSuchClusterError: they are a bookie's, and the store holds no cluster.
        DirectoryInUseError: another process has one of them open.
        CorruptRecordError: a cookie does not parse, and differs in more than one bit from the store's.
    """
    if await is_formatted(disk, config.directories):
        # A bookie of an existing cluster makes no other one: its metadata URI is mistyped, or they are lost.
        cluster = await find_cluster(store)
    else:
        cluster = await ensure_cluster(store, draw_id=lambda: f"{rng.getrandbits(128):032x}", now_ms=now_ms())
    stored = await _read_stored(store, config.bookie_id)
    if stored is None and await is_retired(store, config.bookie_id):
        raise decommissioned(config.bookie_id)
    if stored is not None:
        # Decided before anything is created: the mount point of an unmounted disk must stay empty.
        await _look(config, disk, stored, cluster)
    locks: list[DirectoryLock] = []
    try:
        for path in config.directories:
            await disk.make_directory(path)
            locks.append(disk.lock_directory(path))
        states, action = await _look(config, disk, stored, cluster)
        if action is Action.FORMAT:
            stored = await _format(config, store, disk, states, cluster, rng)
        if action is not Action.GO_ON:
            await _finish(config, disk)
        if stored is not None:
            await _mend_cookies(config, disk, stored)
    finally:
        for lock in locks:
            lock.release()
    assert stored is not None
    return stored


def decommissioned(bookie_id: str) -> CookieMismatchError:
    """Return the error of a bookie whose cookie an operator has had removed."""
    return CookieMismatchError(
        f"bookie {bookie_id} was decommissioned, and its id is never used again: empty its directory and "
        "start a bookie under another id",
        bookie_id=bookie_id,
    )


async def is_formatted(disk: Disk, directories: Sequence[str]) -> bool:
    """Return whether one of the directories has a cookie: it belongs to a bookie of some cluster."""
    for path in directories:
        try:
            names = await disk.list_directory(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if COOKIE in names:
            return True
    return False


async def _read_stored(store: MetadataStore, bookie_id: str) -> Cookie | None:
    try:
        return Cookie.from_json((await store.read(cookie_key(bookie_id))).value)
    except NoSuchKeyError:
        return None


async def _look(
    config: BookieConfig, disk: Disk, stored: Cookie | None, cluster: ClusterRecord
) -> tuple[list[DirectoryState], Action]:
    states = [await _state_of(disk, path, stored) for path in config.directories]
    return states, decide(states, stored, bookie_id=config.bookie_id, instance_id=cluster.instance_id)


async def _state_of(disk: Disk, path: str, stored: Cookie | None) -> DirectoryState:
    try:
        names = set(await disk.list_directory(path))
    except FileNotFoundError:
        return DirectoryState(path)
    draft = await _read_draft(disk, path) if _DRAFT in names else None
    text = await read_cookie_text(disk, path) if COOKIE in names else None
    cookie = None
    if text is not None:
        is_mendable = stored is not None and is_flipped(text, stored)
        cookie = stored if is_mendable else parse_cookie(text, path)
    return DirectoryState(
        path,
        cookie=cookie,
        draft=draft,
        has_data=bool(names - _NOT_DATA - (_OF_A_DRAFT if draft is not None else set())),
    )


async def _read_draft(disk: Disk, path: str) -> Cookie | None:
    """Read a draft. A torn draft counts as none, since the bookie had promised nothing before the crash."""
    file = await disk.open(os.path.join(path, _DRAFT))
    try:
        return Cookie.from_json(bytes(await file.read(0, min(file.size(), _COOKIE_BYTES_MAX))))
    except MetadataCorruptError:
        return None
    finally:
        file.close()


async def _format(
    config: BookieConfig,
    store: MetadataStore,
    disk: Disk,
    states: list[DirectoryState],
    cluster: ClusterRecord,
    rng: random.Random,
) -> Cookie:
    """Write drafts and empty storage, then the cookie in the metadata store: steps 1 and 2 of formatting."""
    fresh = Cookie(
        bookie_id=config.bookie_id,
        instance_id=cluster.instance_id,
        incarnation=f"{rng.getrandbits(64):016x}",
        directories=len(config.directories),
    )
    drafts = [state.draft for state in states]
    # A draft of this bookie is used again: the create that followed it may still reach the metadata store.
    for draft in drafts:
        if draft is not None and replace(fresh, incarnation=draft.incarnation) == draft:
            fresh = draft
            break
    for path, draft in zip(config.directories, drafts, strict=True):
        await _write_draft(disk, path, None if draft == fresh else fresh)
    await write_empty_storage(disk, config.directories, fresh)
    try:
        await store.create(cookie_key(config.bookie_id), fresh.to_json())
    except KeyExistsError:
        if await _read_stored(store, config.bookie_id) != fresh:
            raise CookieMismatchError(
                f"another bookie was formatted as {config.bookie_id} at the same time",
                bookie_id=config.bookie_id,
            ) from None
    # A bookie of that id that was there before, and was removed by hand, has an age that says nothing here.
    with suppress(NoSuchKeyError):
        await store.delete(age_key(config.bookie_id))
    log.info(
        "bookie formatted",
        extra=fields(bookie=config.bookie_id, cluster=fresh.instance_id, incarnation=fresh.incarnation),
    )
    return fresh


async def _write_draft(disk: Disk, path: str, cookie: Cookie | None) -> None:
    """Write a draft, durable on return.

    Args:
        cookie: None where the draft is there. Who wrote it may have been killed before it was synced.
    """
    draft = os.path.join(path, _DRAFT)
    file = await (disk.open(draft) if cookie is None else disk.create(draft))
    try:
        if cookie is not None:
            await file.write([cookie.to_json()], 0)
        await file.sync()
    finally:
        file.close()
    await sync_path(disk, path)


async def _finish(config: BookieConfig, disk: Disk) -> None:
    """Rename the drafts to cookies, step 3 of formatting."""
    for path in config.directories:
        names = await disk.list_directory(path)
        if COOKIE not in names:
            await disk.rename(os.path.join(path, _DRAFT), os.path.join(path, COOKIE))
            await disk.sync_directory(path)


async def _mend_cookies(config: BookieConfig, disk: Disk, stored: Cookie) -> None:
    for path in config.directories:
        text = await read_cookie_text(disk, path)
        if text is not None and is_flipped(text, stored):
            await write_cookie(disk, path, stored)
            log.error(
                "a cookie had a flipped bit, and was written again as the metadata store has it",
                extra=fields(bookie=config.bookie_id, directory=path),
            )


async def fault_of_registration(store: MetadataStore, bookie_id: str, nonce: str) -> str:
    """Return why clients do not find this process in the metadata store; "" where they do.

    The store is waited for at most `_LOOK_TIMEOUT_S`. Cancelling leaves nothing.
    """
    try:
        async with asyncio.timeout(_LOOK_TIMEOUT_S):
            record = BookieRecord.from_json((await store.read(available_key(bookie_id))).value)
    except TimeoutError:
        return f"the metadata store does not answer within {_LOOK_TIMEOUT_S:g} s"
    except NoSuchKeyError:
        return "the bookie is not registered in the metadata store: its session may have ended"
    except MetadataCorruptError as error:
        return f"the bookie's record in the metadata store does not parse: {error}"
    except MetadataError as error:
        return f"the metadata store does not answer: {error}"
    return "" if record.nonce == nonce else "another process is registered under the bookie's id"


class BookieRegistration:
    """The bookie's record in the metadata store, kept up to date until closed."""

    def __init__(self, registration: Registration, record: BookieRecord) -> None:
        self._registration = registration
        self._record = record
        self._announced: BookieRecord | None = record  # None: unknown
        self._updating: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    async def make(cls, store: MetadataStore, record: BookieRecord) -> BookieRegistration:
        """Register the bookie.

        Raises:
            KeyExistsError: a bookie of that id is running elsewhere.
        """
        try:
            return cls(await store.register(available_key(record.bookie_id), record.to_json()), record)
        except KeyExistsError as error:
            raise KeyExistsError(
                f"a bookie {record.bookie_id} is running already, by the metadata store",
                bookie_id=record.bookie_id,
            ) from error

    def announce(self, *, is_writable: bool, order: str, space: tuple[int, int, bool] | None = None) -> None:
        """Update the record, as soon as the metadata store can be reached. Without effect once closed.

        Args:
            space: free bytes, bytes in all, and whether the disks are nearly full; None for unknown. Small
                changes are not announced.
        """
        if self._is_closed:
            return
        self._record = replace(self._record, is_writable=is_writable, order=order)
        if space is not None and self._record.has_moved(*space):
            free_bytes, disk_bytes, is_tight = space
            self._record = replace(
                self._record, free_bytes=free_bytes, disk_bytes=disk_bytes, is_tight=is_tight
            )
        if self._announced == self._record:
            return
        if self._updating is None or self._updating.done():
            self._updating = asyncio.get_running_loop().create_task(self._update())

    async def _update(self) -> None:
        while self._announced != self._record:
            record = self._record
            # The outcome of an update that fails is unknown: it may have been made, or may yet be made.
            self._announced = None
            try:
                await self._registration.update(record.to_json())
            except MetadataError as error:
                log.warning("announcing failed", extra=fields(bookie=record.bookie_id, error=error))
                await asyncio.sleep(_RETRY_S)
            else:
                self._announced = record

    async def close(self) -> None:
        """Remove the record. Where the store cannot be reached, the record ends with the store's session."""
        self._is_closed = True
        if self._updating is not None:
            self._updating.cancel()
            await asyncio.gather(self._updating, return_exceptions=True)
        try:
            await self._registration.close()
        except MetadataError as error:
            log.warning("deregistering failed", extra=fields(bookie=self._record.bookie_id, error=error))


class StandingOrder:
    """The operator's order to this bookie, followed in the metadata store until closed.

    The bookie obeys the last order that it has read, with the store away, too.
    """

    def __init__(self, store: MetadataStore, bookie_id: str, on_changed: Callable[[], None]) -> None:
        self._store = store
        self._bookie_id = bookie_id
        self._on_changed = on_changed
        self._task: OwnedTask | None = None
        self._one_read = asyncio.Lock()  # An older order never overwrites a newer one.
        self.mode = ""
        """One of `metadata.access.bookies.ORDER_MODES`; "" for no order."""

    async def start(self) -> None:
        """Read the order before the bookie serves, and follow it from now on.

        Raises:
            MetadataError: it cannot be read.
        """
        await self.look()
        self._task = OwnedTask(self._follow, "order")

    async def look(self) -> None:
        """Read the order as it is now; raises MetadataError."""
        await self._store.sync(KEY_ORDERS)
        await self._read()

    async def _read(self) -> None:
        async with self._one_read:
            await self._read_now()

    async def _read_now(self) -> None:
        order = (await Orders.read(self._store)).by_bookie.get(self._bookie_id)
        mode = "" if order is None else order.mode
        if await self._has_left():
            # It stood still for so long that its cookie is gone, and the order with it. Another process that
            # has not heard of that may have given a new one.
            mode = REMOVED
        if mode != self.mode:
            log.warning("the bookie has another order", extra=fields(bookie=self._bookie_id, order=mode))
            self.mode = mode
            self._on_changed()

    async def _has_left(self) -> bool:
        is_gone = await is_retired(self._store, self._bookie_id)
        return is_gone and await _read_stored(self._store, self._bookie_id) is None

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(KEY_ORDERS)) as changes:
                    async for _ in changes:
                        await self._read()
            except ClientClosedError:
                return
            except BookKeeperError as error:
                log.warning("orders cannot be read", extra=fields(bookie=self._bookie_id, error=error))
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await self._task.wait()
