"""The bookies of a cluster: their addresses, as the metadata store lists them, and their failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from metadata.access.bookies import BookieRecord, available_bookies
from metadata.errors import (
    BookKeeperError,
    MetadataError,
    NoSuchLedgerError,
)
from metadata.ids import KEY_AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from client_aio.config import ClientConfig
    from metadata.store import MetadataStore


logger = logging.getLogger(__name__)

_REFRESH_RETRY_S = 0.5


class Quarantine:
    """Which bookies failed within the last `duration_s` seconds of the caller's clock."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._failed_at_s: dict[str, float] = {}  # in ascending order of the times

    def note_failure(self, bookie_id: str, now_s: float) -> None:
        """Put a bookie into quarantine, or keep it there for longer."""
        self._failed_at_s.pop(bookie_id, None)
        self._failed_at_s[bookie_id] = now_s

    def members(self, now_s: float) -> list[str]:
        """Return the bookies in quarantine, the one that failed longest ago first."""
        for bookie_id, at_s in list(self._failed_at_s.items()):
            if at_s + self._duration_s > now_s:
                break
            del self._failed_at_s[bookie_id]
        return list(self._failed_at_s)


class BookieDirectory:
    """The running bookies, as last read from the metadata store, and which of them failed lately."""

    def __init__(self, store: MetadataStore, config: ClientConfig) -> None:
        self._store = store
        self._config = config
        self._available: dict[str, BookieRecord] = {}
        self._last_known: dict[str, BookieRecord] = {}
        self._quarantine = Quarantine(config.quarantine_s)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the registrations, and follow them from now on."""
        await self.refresh()
        self._task = self._loop.create_task(self._follow(), name="bookie directory")

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def available(self) -> Mapping[str, BookieRecord]:
        """Return the running bookies by id."""
        return self._available

    @property
    def last_known(self) -> Mapping[str, BookieRecord]:
        """Return what each bookie that was ever heard of last said of itself, by id."""
        return self._last_known

    def quarantined(self) -> list[str]:
        """Return the bookies that failed within `quarantine_s`, the one that failed longest ago first.

        A connection to it does not end a bookie's quarantine: one that comes and goes stays in it.
        """
        return self._quarantine.members(self._loop.time())

    def note_failure(self, bookie_id: str) -> None:
        """Put a bookie into quarantine."""
        self._quarantine.note_failure(bookie_id, self._loop.time())

    def note_refusal(self, bookie_id: str, error: BookKeeperError) -> None:
        """Put a bookie into quarantine, but not for a ledger that has been deleted, as it says."""
        if not isinstance(error, NoSuchLedgerError):
            self.note_failure(bookie_id)

    def addresses(self, bookie_id: str) -> list[str]:
        """Return where the bookie is, or was when last heard of; empty when nobody ever heard of it."""
        record = self._last_known.get(bookie_id)
        return list(record.addresses) if record else []

    async def refresh(self) -> None:
        """Read the registrations now."""
        self._available = await available_bookies(self._store)
        self._last_known.update(self._available)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until the registrations were read again, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _follow(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._store.watch(KEY_AVAILABLE)) as changes:
                    async for _ in changes:
                        await self.refresh()
            except MetadataError as error:
                logger.warning("the list of bookies cannot be read, the last one stays in use: %s", error)
            await asyncio.sleep(_REFRESH_RETRY_S)
