"""Apache BookKeeper: ZooKeeper and three bookies, journal sync on, on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.peers import artifacts
from benchmarks.peers.systems import SERVERS, Servers, free_ports, until_listening, write_properties
from benchmarks.processes import Child

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from benchmarks.peers.workloads import Workload

_MANY_IN_FLIGHT = 10_000
_FLAGS = ("--add-opens", "java.base/java.io=ALL-UNNAMED", "-XX:+UseG1GC")
_REGISTERED_TIMEOUT_S = 60.0


class BookKeeper:
    """With its default settings, or the best that were found by its documentation.

    *Tuned*: DbLedgerStorage with a write cache of 512 MB. Groups wait for up to 1 ms; with one add in flight
    they are flushed as soon as the queue is empty. With 10,000 adds in flight both are allowed more
    pending adds: by default it refuses them.

    Where a server is killed there is a fourth bookie: by default a writer fails without a full ensemble.
    """

    is_durable = True

    def __init__(self, *, is_tuned: bool) -> None:
        self._is_tuned = is_tuned
        self.name = "bookkeeper-tuned" if is_tuned else "bookkeeper"
        self.title = f"BookKeeper, {'tuned' if is_tuned else 'defaults'}"

    def can_run(self, workload: Workload) -> bool:
        return True

    async def start(self, directory: Path, workload: Workload, stack: AsyncExitStack) -> Servers:
        path = await asyncio.to_thread(artifacts.class_path, "bookkeeper")
        log = directory / "bookkeeper.log"
        zookeeper_port, *ports = free_ports(1 + SERVERS + workload.needs_kill)
        uri = f"zk+null://127.0.0.1:{zookeeper_port}/ledgers"

        async def java(*arguments: str) -> Child:
            child = await Child.start(artifacts.java(), *_FLAGS, *arguments, log=log)
            return await stack.enter_async_context(child)

        zookeeper = await java(
            "-Xmx512m", "-Dzookeeper.admin.enableServer=false", "-cp", path,
            "org.apache.zookeeper.server.ZooKeeperServerMain",
            str(zookeeper_port), str(directory / "zookeeper"),
        )  # fmt: skip
        zookeeper.ignore_output()
        await until_listening(zookeeper_port)
        files = []
        for number, port in enumerate(ports, 1):
            home = directory / f"bk{number}"
            home.mkdir()
            files.append(directory / f"bk{number}.conf")
            write_properties(files[-1], self._settings(f"bk{number}", port, home, uri, workload))
        shell = ("-cp", path, "org.apache.bookkeeper.bookie.BookieShell", "-conf", str(files[0]))
        format_ = await java(*shell, "metaformat", "-nonInteractive", "-force")
        format_.ignore_output()
        if await format_.wait():
            raise RuntimeError(f"metaformat failed; its log: {format_.log_tail()}")
        bookies = [
            await java(
                "-Xmx1g", "-XX:MaxDirectMemorySize=2g", "-cp", path,
                "org.apache.bookkeeper.server.Main", "--conf", str(file),
            )
            for file in files
        ]  # fmt: skip
        for bookie in bookies:
            bookie.ignore_output()
        await asyncio.gather(*map(until_listening, ports))
        async with asyncio.timeout(_REGISTERED_TIMEOUT_S):
            while not await self._are_registered(len(ports), await java(*shell, "listbookies", "-rw")):
                pass
        return Servers(
            [bookie.pid for bookie in bookies],
            [artifacts.java(), *_FLAGS, "-Xmx2g", "-cp", path, "BookKeeperDrive", uri],
        )

    async def _are_registered(self, count: int, listing: Child) -> bool:
        found = set()
        assert listing.process.stdout is not None
        while raw := await listing.process.stdout.readline():
            found |= {name for name in (f"bk{n}" for n in range(1, count + 1)) if name in raw.decode()}
        await listing.wait()
        return len(found) == count

    def _settings(
        self, bookie_id: str, port: int, home: Path, uri: str, workload: Workload
    ) -> dict[str, object]:
        settings: dict[str, object] = {
            "bookieId": bookie_id,
            "bookiePort": port,
            "allowLoopback": "true",
            "journalDirectories": home / "journal",
            "ledgerDirectories": home / "ledgers",
            "metadataServiceUri": uri,
        }
        if workload.in_flight >= _MANY_IN_FLIGHT:
            settings["maxPendingAddRequestsPerThread"] = 200_000
        if self._is_tuned:
            settings |= {
                "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
                "dbStorage_writeCacheMaxSizeMb": 512,
                "journalMaxGroupWaitMSec": 1,
            }
            if workload.in_flight == 1:
                settings |= {"journalFlushWhenQueueEmpty": "true", "journalMaxGroupWaitMSec": 0}
        return settings
