"""A cluster of real bookie processes, for tests that kill, stop and restart them one by one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from bookie_aio.wire.messages import NO_TERM, WAIT_MS_MAX, ReadLac, ReadLacAnswer
from tests.support import standstill
from tests.support.forkserver import CommandChild
from tests.support.rawclient import RawClient

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from benchmarks.processes import Child
    from client_aio import Client, Position


class BookieProcess:
    """One bookie: its process, data directory and log."""

    def __init__(self, bookie_id: str, directory: Path, uri: str) -> None:
        self.bookie_id = bookie_id
        self.directory = directory / bookie_id
        self.log = directory / f"{bookie_id}.log"
        self.uri = uri
        self.arguments: list[str] = []  # of every start
        self.module = "client_aio.cli"
        self.prefix: list[str] = []  # a command that becomes the process: strace -D, nsenter
        self.listen = "127.0.0.1:0"
        self.child: Child | None = None
        self.addresses: list[str] = []

    @property
    def pid(self) -> int:
        """Return the id of the running process."""
        assert self.child is not None
        return self.child.pid

    async def start(self, *arguments: str) -> None:
        """Start it, and wait until it serves."""
        self.child = await CommandChild.start(
            *self.prefix, sys.executable, "-m", self.module,
            "bookie", "serve", "-o", "jsonl", "--id", self.bookie_id,
            "--dir", str(self.directory), "--listen", self.listen, "--metadata", self.uri,
            *self.arguments, *arguments,
            log=self.log,
        )  # fmt: skip
        self.addresses = json.loads(await self.child.line())["addresses"]
        self.child.ignore_output()

    async def kill(self) -> None:
        """SIGKILL it, stopped or not, and wait until it is gone. A stopped one answers nothing more."""
        assert self.child is not None
        self.child.kill()
        await self.child.wait()

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing from the return on."""
        standstill.stop(self.pid, self.uri)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    async def end(self) -> None:
        """End it cleanly, if it runs."""
        if self.child is not None and self.child.process.returncode is None:
            with suppress(ProcessLookupError):
                self.resume()
            await self.child.end()


class Cluster:
    """Bookies b1, b2, … on one metadata store, by default an embedded one in the directory."""

    def __init__(self, directory: Path, *, bookies: int = 3, uri: str | None = None) -> None:
        self.uri = uri or f"sqlite://{directory / 'metadata.db'}"
        self.bookies = {
            f"b{number}": BookieProcess(f"b{number}", directory, self.uri) for number in range(1, bookies + 1)
        }

    def __getitem__(self, bookie_id: str) -> BookieProcess:
        return self.bookies[bookie_id]

    async def start(self) -> None:
        """Start all bookies that do not run."""
        await asyncio.gather(*(bookie.start() for bookie in self.bookies.values()))

    async def kill(self) -> None:
        """SIGKILL all bookies."""
        await asyncio.gather(*(bookie.kill() for bookie in self.bookies.values()))

    async def end(self) -> None:
        """End all bookies that run."""
        await asyncio.gather(*(bookie.end() for bookie in self.bookies.values()))

    async def heard(self, client: Client, position: Position) -> None:
        """Return when every bookie of an open ledger's last fragment knows that an entry is acknowledged.

        With guaranteed write quorum they know then, too, that all of its write set has it.
        """
        ledger_id, entry_id = position
        question = ReadLac(ledger_id, NO_TERM, entry_id - 1, WAIT_MS_MAX)
        metadata = await client.ledger_metadata(ledger_id)
        for name in metadata.last_fragment.bookies:
            async with (
                await RawClient.connect(self[name].addresses[0]) as asking,
                asyncio.timeout(WAIT_MS_MAX / 1000),
            ):
                while True:
                    answer = (await asking.call(question)).message
                    assert isinstance(answer, ReadLacAnswer)
                    assert answer.statement is not None
                    assert answer.statement.lac >= entry_id
                    if not metadata.guaranteed_write_quorum or answer.statement.lafr >= entry_id:
                        break
                    await asyncio.sleep(0.01)  # no poll waits for the LAFR

    async def __aenter__(self) -> Self:
        starts = [asyncio.create_task(bookie.start()) for bookie in self.bookies.values()]
        await asyncio.wait(starts)
        if any(start.exception() for start in starts):
            await self.end()  # of those that did start, nothing is left running
        await asyncio.gather(*starts)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
