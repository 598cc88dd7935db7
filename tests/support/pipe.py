"""One connection through a proxy: the client's, and the one to the server behind it.

Owns both connections and how they end. What passes between them is its subclasses'.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class Pipe(ABC):
    """Passes frames both ways, each with a task of its own. Run it in the task that accepted the client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.done = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._server_writer: asyncio.StreamWriter | None = None
        self._task = asyncio.current_task()

    async def run(self, address: tuple[str, int] | None) -> None:
        """Pass frames on until either side ends, or a reset; without a server, end at once."""
        try:
            if address is None:
                return
            server_reader, self._server_writer = await asyncio.open_connection(*address)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_requests(self._reader, self._server_writer))
                group.create_task(self._pass_answers(server_reader, self._writer))
        except* (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for writer in (self._writer, self._server_writer):
                if writer is not None:
                    writer.transport.abort()
            self.done.set()

    def reset(self) -> None:
        """Close both sides without a farewell."""
        if self._task is not None:
            self._task.cancel()

    @abstractmethod
    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what the client sends; ends by an error only."""

    @abstractmethod
    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what the server sends; ends by an error only."""
