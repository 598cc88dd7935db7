"""The run of a benchmark: Ctrl-C or SIGTERM ends it, its processes end and its files are removed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

Result = TypeVar("Result")
INTERRUPTED = 130


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run it on uvloop. SIGINT and SIGTERM cancel it, and raise SystemExit once it has cleaned up."""

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await coroutine

    try:
        return uvloop.run(cancellable())
    except asyncio.CancelledError:
        raise SystemExit(INTERRUPTED) from None


class Workplace:
    """A directory to work in: one that the user named, or a temporary one, removed unless it is kept."""

    def __init__(self, named: Path | None, prefix: str) -> None:
        self._is_kept = named is not None
        self.path = named or Path(tempfile.mkdtemp(prefix=prefix))
        self.path.mkdir(parents=True, exist_ok=True)

    def keep(self) -> None:
        """Leave it for somebody to look at."""
        self._is_kept = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            shutil.rmtree(self.path, ignore_errors=True)
