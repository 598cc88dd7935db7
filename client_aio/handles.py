"""What openers return: it can be awaited, and used with `async with`.

How a writer's handle is left: closed, or aborted when something went wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import TracebackType


class _Managed(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Handle(Protocol):
    """An open handle that the client must end when it is closed."""

    async def abort(self) -> None:
        """End at once, leaving outstanding operations as *unknown*."""


Opened = TypeVar("Opened", bound=_Managed)


class AwaitableContext(Generic[Opened]):
    """An operation that gives a context manager.

    `handle = await opening` gives it as it is; `async with opening as handle` enters and leaves it too.
    Nothing happens before one of the two. Either works once.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Opened]]) -> None:
        self._start = start
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, Any, Opened]:
        return self._start().__await__()

    async def __aenter__(self) -> Opened:
        opened = await self._start()
        self._opened = opened
        return await opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, trace)


class ClosesOnExit(ABC):
    """An async context manager: left normally it closes; by an exception or a cancellation it aborts."""

    @abstractmethod
    async def close(self) -> object:
        """End well."""

    @abstractmethod
    async def abort(self) -> None:
        """Give up; does nothing to what has been closed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                await self.close()
            except BaseException:
                await self.abort()
                raise
        else:
            await self.abort()
