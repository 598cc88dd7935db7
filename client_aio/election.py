"""Electing a leader among processes, over the metadata store. **A suggestion, not a lock.**

A leader whose process was stopped, or cut off from the store, may learn too late that it no longer leads. The
next candidate then leads already. So election only keeps two processes from fighting over a log all the time.
Fencing keeps the log correct when they do. An action that must not happen twice must go through a log or a
ledger, which the leader takes over once elected.

A candidate stands in a queue of ephemeral keys, and watches only the key before its own. The first in the
queue waits for the key `leader`, which one session can hold:

    elections/NAME/queue/0000000000000000007      in the order of numbers drawn from the store
    elections/NAME/leader                         held by the leader, with the value that it publishes

Leadership ends with the session. It ends as soon as the store reports that the session was lost. It also ends
by this process's own clock, once the store has been silent for the session timeout. Neither helps if a server
of ZooKeeper is cut off from the others and has not noticed: election is no lock.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from client_aio.context import check_running
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    InvalidArgumentError,
    KeyExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.ids import KEY_ELECTIONS, MALFORMED
from metadata.model.log import check_log_name
from metadata.owned_task import OwnedTask
from metadata.store import MetadataStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from types import TracebackType

    from client_aio.client import Client
    from metadata.store import Registration, Version

logger = logging.getLogger(__name__)

SEQUENCE = "election"
RETRY_S = 0.2
VALUE_BYTES_MAX = 4096


class _Record(NamedTuple):
    candidate: int
    value: bytes
    version: Version


class LeaderElection:
    """One candidate of an election. An async context manager: leaving it steps down.

    async with LeaderElection(client, "orders", b"10.0.0.7:8080") as election:
        while True:
            await election.gained()
            async with client.open_log("orders") as log:      # This makes it safe.
                ...
                await election.lost()
    """

    def __init__(self, client: Client | MetadataStore, name: str, value: bytes = b"") -> None:
        """Name an election. Nothing happens before the election is entered.

        Args:
            client: the election is held in its metadata store.
            name: as the name of a log.
            value: published while this candidate leads, at most 4 KiB.

        Raises:
            InvalidArgumentError: the name or the value is not legal.
        """
        if not isinstance(client, MetadataStore) and not hasattr(client, "_context"):
            raise InvalidArgumentError(f"{client!r} is neither a client nor a metadata store")
        self._store = client if isinstance(client, MetadataStore) else client._context.ledgers.store
        self._loop = None if isinstance(client, MetadataStore) else client._context.loop
        self._key = f"{KEY_ELECTIONS}/{check_log_name(name)}"
        if not isinstance(value, bytes) or len(value) > VALUE_BYTES_MAX:
            raise InvalidArgumentError(f"the value of a candidate is at most {VALUE_BYTES_MAX} bytes")
        self._value = base64.b64encode(value).decode()
        self._numbers: set[int] = set()  # drawn by this candidate: a key with one of them is its own
        self._session: str | None = None  # the session in which this candidate leads
        self._changed = asyncio.Condition()
        self._task: OwnedTask | None = None
        self.terms = 0
        """How often this candidate has been elected."""

    @property
    def is_leader(self) -> bool:
        """Return whether this candidate leads, as far as this process can know."""
        return (
            self._session is not None
            and self._session == self._store.session
            and asyncio.get_running_loop().time() < self._store.session_alive_until
        )

    async def gained(self) -> None:
        """Wait until this candidate leads.

        Raises:
            ClientClosedError: the election was left, or its store closed.
        """
        await self._wait_for(lambda: self.is_leader)

    async def lost(self) -> None:
        """Wait until this candidate does not lead, or has lost the leadership and gained it again.

        Raises:
            ClientClosedError: as `gained`.
        """
        await self._wait_for(partial(self._has_lost, self.terms))

    async def changes(self) -> AsyncGenerator[bool, None]:
        """Yield whether this candidate leads, at once and at each change."""
        self._check_loop()
        is_leader, term = self.is_leader, self.terms
        while True:
            yield is_leader
            if is_leader:
                await self._wait_for(partial(self._has_lost, term))
            else:
                await self.gained()
            is_leader, term = not is_leader, self.terms

    async def leader(self) -> bytes | None:
        """Read the value of the present leader; None if nobody leads.

        Raises:
            MetadataUnavailableError: the store does not answer.
        """
        self._check_loop()
        found = await self._read(f"{self._key}/leader")
        return None if found is None else found.value

    async def __aenter__(self) -> Self:
        self._check_loop()
        self._loop = asyncio.get_running_loop()
        self._task = OwnedTask(self._run, f"candidate for {self._key}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await self._task.wait()

    # --- being a candidate ---

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._stand()
                except ClientClosedError:
                    raise
                except BookKeeperError as error:
                    logger.warning("election=%s standing again: %s", self._key, error)
                    await asyncio.sleep(RETRY_S)
        finally:
            self._session = None
            async with self._changed:
                self._changed.notify_all()

    async def _stand(self) -> None:
        """Join the queue, lead once, and return when the leadership has ended."""
        (number,) = await self._store.allocate_ids(SEQUENCE, 1)
        self._numbers.add(number)
        record = json.dumps({"format": 1, "candidate": number, "value": self._value}).encode()
        place = f"{self._key}/queue/{number:019d}"
        async with _registered(self._store, place, record):
            session = self._store.session
            await self._come_first(place)
            while True:
                await self._until_gone(f"{self._key}/leader")
                with contextlib.suppress(KeyExistsError):
                    async with _registered(self._store, f"{self._key}/leader", record):
                        made = await self._read(f"{self._key}/leader")
                        if made is not None and made.candidate == number and self._store.session == session:
                            await self._lead(session, made.version)
                    return

    async def _come_first(self, place: str) -> None:
        """Wait until no key is before this one in the queue."""
        queue, _, own = place.rpartition("/")
        while True:
            before = [name for name in await self._store.children(queue) if name < own]
            if not before:
                return
            await self._until_gone(f"{queue}/{before[-1]}")

    async def _read(self, key: str) -> _Record | None:
        try:
            stored = await self._store.read(key)
            document = json.loads(stored.value)
            value = base64.b64decode(document["value"], validate=True)
            return _Record(int(document["candidate"]), value, stored.version)
        except NoSuchKeyError:
            return None
        except MALFORMED as error:
            raise MetadataCorruptError(f"{key} holds no candidate: {error!r}") from error

    async def _until_gone(self, key: str) -> None:
        """Return when there is no such key; delete it if it is a leftover of this candidate."""
        async with contextlib.aclosing(self._store.watch(key)) as changes:
            async for _ in changes:
                found = await self._read(key)
                if found is None:
                    return
                if found.candidate in self._numbers:
                    # At this version only: the key may expire, and be made anew by another candidate.
                    with contextlib.suppress(NoSuchKeyError, VersionConflictError):
                        await self._store.delete(key, found.version)

    async def _lead(self, session: str, made: Version) -> None:
        self._session = session
        self.terms += 1
        logger.info("election=%s this candidate leads", self._key)
        async with self._changed:
            self._changed.notify_all()
        watching = asyncio.create_task(self._until_key_changes(session, made))
        loop = asyncio.get_running_loop()
        try:
            while self.is_leader and not watching.done():
                # Checked when the session may end by the clock, and every RETRY_S at the latest.
                pause_s = min(max(self._store.session_alive_until - loop.time(), 0.01), RETRY_S)
                await asyncio.wait([watching], timeout=pause_s)
        finally:
            self._session = None
            logger.info("election=%s this candidate does not lead any more", self._key)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            async with self._changed:
                self._changed.notify_all()

    async def _until_key_changes(self, session: str, made: Version) -> None:
        """Return when the session has changed, or the key was removed.

        The store makes it anew where it is gone. Somebody else may have led meanwhile.
        """
        key = f"{self._key}/leader"
        async with contextlib.aclosing(self._store.watch(key)) as changes:
            async for _ in changes:
                found = await self._read(key)
                if found is None or found.version != made or self._store.session != session:
                    return

    def _has_lost(self, term: int) -> bool:
        return not self.is_leader or self.terms != term

    def _check_loop(self) -> None:
        if self._loop is not None:
            check_running(self._loop)

    async def _wait_for(self, is_met: Callable[[], bool]) -> None:
        self._check_loop()
        if self._task is None:
            raise InvalidArgumentError("an election is entered before it is waited for: async with")
        async with self._changed:
            while not is_met():
                if self._task.done():
                    raise ClientClosedError("the election has been left, or its metadata store closed")
                await self._changed.wait()


@contextlib.asynccontextmanager
async def _registered(store: MetadataStore, key: str, value: bytes) -> AsyncGenerator[Registration, None]:
    registration = await store.register(key, value)
    try:
        yield registration
    finally:
        # An unavailable store keeps the key until the session ends; `_until_gone` then finds it.
        with contextlib.suppress(BookKeeperError):
            await registration.close()
