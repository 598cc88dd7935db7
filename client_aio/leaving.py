"""How a writer's handle is left: closed, or aborted when something went wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class ClosedOnLeaving(ABC):
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
