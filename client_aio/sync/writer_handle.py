"""What the blocking writers have in common: an inbox before the writer, and how they are left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from client_aio.sync.loop_thread import Background, Handle
from client_aio.sync.submit_queue import Inbox, Writer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable
    from types import TracebackType

R = TypeVar("R")
T = TypeVar("T")


class AnyWriter(Writer, Protocol):
    """What a handle asks of its writer, on the loop."""

    async def flush(self) -> None:
        """Wait until everything is acknowledged."""

    async def close(self) -> object:
        """End well."""

    async def abort(self) -> None:
        """Give up."""


class WriterHandle(Handle, Generic[R]):
    """A blocking writer; a context manager: left normally it closes, by an exception it aborts.

    Args:
        add: as of `Inbox`.
    """

    def __init__(
        self,
        background: Background,
        writer: AnyWriter,
        add: Callable[[bytes, int | None], asyncio.Future[R]],
    ) -> None:
        super().__init__(background)
        self._any_writer = writer
        self._inbox: Inbox[R] = Inbox(background, writer, add)

    def _behind_inbox(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call on the loop, behind everything that was put in before."""

        async def run() -> T:
            await self._inbox.emptied()
            return await call()

        return self._run(run())

    def flush(self) -> None:
        """Wait until everything added so far is acknowledged; raises the first failure."""
        self._behind_inbox(self._any_writer.flush)

    def close(self) -> object:
        """Flush, and end well."""
        return self._behind_inbox(self._any_writer.close)

    def abort(self) -> None:
        """Give up; what is open is left to recovery, or to whoever opens it next."""
        self._run(self._any_writer.abort())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise
