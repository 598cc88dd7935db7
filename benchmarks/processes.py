"""Child processes of the benchmarks: start them, wait until they serve, and end all of them at exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

ROOT = Path(__file__).parent.parent
LINE_BYTES_MAX = 1 << 20
END_TIMEOUT_S = 20.0


class Child:
    """A process with its standard output piped to us and its standard error in a file.

    Leaving the context ends it: SIGTERM, then SIGKILL where it does not follow.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log
        self._draining: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, *command: str, log: Path, environment: dict[str, str] | None = None, asks: bool = False
    ) -> Self:
        """Start a command in the project's root; what it writes to standard error is appended to the log.

        `asks`: it asks by lines of its standard output, and gets answers by `say`.
        """
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE if asks else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_BYTES_MAX,
                env={**os.environ, **(environment or {})},
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    async def line(self, wanted: Callable[[str], bool] = lambda _: True, timeout_s: float = 120.0) -> str:
        """Wait for a line of standard output.

        Raises:
            RuntimeError: the process ended, or gave no such line in time; with the end of its log.
        """
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while raw := await self.process.stdout.readline():
                    text = raw.decode(errors="replace").rstrip("\n")
                    if wanted(text):
                        return text
        except TimeoutError:
            raise RuntimeError(f"no answer within {timeout_s} s; its log: {self.log_tail()}") from None
        await self.process.wait()
        raise RuntimeError(f"ended with {self.process.returncode}; its log: {self.log_tail()}")

    async def say(self, line: str) -> None:
        """Write a line to the standard input of a process that asks."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    def ignore_output(self) -> None:
        """Read and forget what standard output still brings, so that the process never waits for us."""
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        assert self.process.stdout is not None
        while await self.process.stdout.read(1 << 16):
            pass

    def log_tail(self, size: int = 3000) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-size:]

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def wait(self) -> int:
        """Wait for its end and give its exit status."""
        if self._draining is not None:
            await self._draining
        return await self.process.wait()

    async def end(self) -> int:
        """Ask it to end, and make it end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        if self._draining is None:
            self.ignore_output()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.process.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()


async def start_module(module: str, *arguments: str, log: Path) -> Child:
    """Start one of our modules under the interpreter that runs us."""
    return await Child.start(sys.executable, "-m", module, *arguments, log=log)
