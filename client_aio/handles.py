"""The common parts of handles: how they are opened, and how they are closed or aborted.

Operations that open a handle return an `AwaitableContext`. Writers are `ClosesOnExit`. A client aborts every
open `Handle` when it is closed.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from mypy_extensions import mypyc_attr

from metadata.errors import BookKeeperError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from types import TracebackType


class _Managed(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Handle(Protocol):
    """An open handle that the client must abort when it is closed."""

    async def abort(self) -> None:
        """End at once; outstanding operations fail as *unknown*."""


Opened = TypeVar("Opened", bound=_Managed)


class AwaitableContext(Generic[Opened]):
    """An operation that opens a handle, which is a context manager.

    `handle = await opening` returns the handle without entering it. `async with opening as handle` also
    enters and leaves it. Nothing happens before one of the two. Either may be used once.
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


@mypyc_attr(allow_interpreted_subclasses=True)
class ClosesOnExit(metaclass=ABCMeta):
    """An async context manager: leaving it normally closes; an exception or a cancellation aborts.

    A failure that the application has been told of before, by a call or a future, is not raised again.
    """

    _failure: BookKeeperError | None = None
    _was_told = False
    _of_batches: Sequence[BookKeeperError] = ()  # the errors of batches that the failure has led to

    @abstractmethod
    async def close(self) -> object:
        """Complete everything outstanding, and end."""

    @abstractmethod
    async def abort(self) -> None:
        """End at once; does nothing to a handle that has been closed."""

    @property
    def told_failures(self) -> tuple[BookKeeperError, ...]:
        """Return the failures that a call or a future has raised: leaving does not raise them again.

        Each raise gives the error a traceback. A handle that fails removes the traceback of our own raises.
        """
        failure = self._failure
        if failure is None:
            return ()
        is_told = self._was_told or any(
            each.__traceback__ is not None for each in (failure, *self._of_batches)
        )
        return (failure,) if is_told else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            told = self.told_failures  # before `close`, which tells them too
            try:
                await self.close()
            except BookKeeperError as failure:
                await self.abort()
                if not any(failure is each for each in told):
                    raise failure  # by name: see docs/WHEELS.md
            except BaseException as other:
                await self.abort()
                raise other
        else:
            await self.abort()
