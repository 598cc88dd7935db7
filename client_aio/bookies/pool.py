"""Connections to bookies: one per bookie, made when it is first needed, and again after it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from client_aio.bookies.connection import BookieConnection, connect
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    ClientClosedError,
    MetadataError,
    NotABookieError,
    ProtocolError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client_aio.bookies.directory import BookieDirectory
    from client_aio.config import ClientConfig

logger = logging.getLogger(__name__)


class BookiePool:
    """One connection per bookie."""

    def __init__(self, directory: BookieDirectory, config: ClientConfig, instance_id: str) -> None:
        self.directory = directory
        self._config = config
        self._instance_id = instance_id
        self._open: dict[str, BookieConnection] = {}
        self._opening: dict[str, asyncio.Task[BookieConnection]] = {}
        self._is_closed = False

    def peek(self, bookie_id: str) -> BookieConnection | None:
        """Return the live connection to the bookie; None if there is none."""
        return self._open.get(bookie_id)

    async def get(self, bookie_id: str) -> BookieConnection:
        """Return a live connection to the bookie; connect if there is none.

        Cancelling leaves the attempt to connect running, for other callers.

        Raises:
            BookieUnavailableError: unknown, unreachable, or too slow to answer.
            ProtocolError: the peer at its address is not that bookie.
        """
        under_way = self._opening.get(bookie_id)
        if under_way is not None:
            # It began before this call. If it fails, the bookie may be back by now: one more attempt is made.
            with contextlib.suppress(BookieUnavailableError, ProtocolError):
                return await self._wait_for(under_way)
        connection = self._open.get(bookie_id)
        if connection is not None:
            return connection
        self._check_open()
        task = self._opening.get(bookie_id)
        if task is None or task is under_way:
            task = asyncio.get_running_loop().create_task(self._connect(bookie_id), name=f"to {bookie_id}")
            self._opening[bookie_id] = task
            task.add_done_callback(lambda done: self._opened(bookie_id, done))
        return await self._wait_for(task)

    async def _wait_for(self, opening: asyncio.Task[BookieConnection]) -> BookieConnection:
        # Not by awaiting the task: closing the pool cancels it, which must not cancel the callers.
        await asyncio.wait([opening])
        if opening.cancelled():
            self._check_open()
        return opening.result()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosedError("the client is closed")

    async def get_all(self, bookie_ids: Iterable[str]) -> dict[str, BookieConnection | BookKeeperError]:
        """Return, for each bookie, its connection or the error of connecting."""
        names = list(bookie_ids)
        found = await asyncio.gather(*map(self.get, names), return_exceptions=True)
        result: dict[str, BookieConnection | BookKeeperError] = {}
        for name, outcome in zip(names, found, strict=True):
            if not isinstance(outcome, (BookieConnection, BookKeeperError)):
                raise outcome
            result[name] = outcome
        return result

    async def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._open.values()):
            connection.close()

    async def _connect(self, bookie_id: str) -> BookieConnection:
        addresses = self.directory.addresses(bookie_id)
        error: BookKeeperError = BookieUnavailableError(
            f"bookie {bookie_id} is not registered, so its address is not known", bookie_id=bookie_id
        )
        for _ in range(2):
            for address in addresses:
                try:
                    return await connect(
                        address,
                        bookie_id=bookie_id,
                        instance_id=self._instance_id,
                        timeout_s=self._config.connect_timeout_s,
                        on_lost=self._lost,
                    )
                except (BookieUnavailableError, NotABookieError) as failure:
                    error = failure
            tried = addresses
            with contextlib.suppress(MetadataError):
                await self.directory.refresh()
            addresses = self.directory.addresses(bookie_id)
            if addresses == tried:
                break  # The bookie has not moved: it is down.
        self.directory.note_failure(bookie_id)
        raise error

    def _opened(self, bookie_id: str, task: asyncio.Task[BookieConnection]) -> None:
        if self._opening.get(bookie_id) is task:
            del self._opening[bookie_id]
        if task.cancelled() or task.exception() is not None:
            return
        connection = task.result()
        if self._is_closed:
            connection.close()
        elif connection.is_open:
            self._open[bookie_id] = connection

    def _lost(self, connection: BookieConnection) -> None:
        if self._open.get(connection.bookie_id) is connection:
            del self._open[connection.bookie_id]
            if not self._is_closed:
                logger.info("bookie=%s connection lost: %s", connection.bookie_id, connection.error)
