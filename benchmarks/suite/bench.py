"""The base of the suite's parts: clusters, clients in processes of their own, and the figures of both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import Child
from benchmarks.watching import cpu_seconds, device_bytes, disk_usage_bytes, resident_mib, written_bytes
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_MARGIN_S = 600.0
BOOKIES = 3


@dataclass(frozen=True)
class Bench:
    """Where and how long to measure. `scale` shrinks the stored data, to try all parts quickly."""

    directory: Path
    seconds: float
    warm_up_s: float
    scale: float

    @contextlib.asynccontextmanager
    async def cluster(self, bookies: int = BOOKIES) -> AsyncIterator[Running]:
        """Return a fresh cluster; its files are removed afterwards."""
        home = Path(tempfile.mkdtemp(dir=self.directory, prefix="cluster."))
        try:
            async with Cluster(home, bookies=bookies) as cluster:
                yield Running(self, cluster, home)
        finally:
            await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)

    def spec(self, mode: str, **values: Any) -> dict[str, Any]:
        """Return the description of a load."""
        return {"mode": mode, "seconds": self.seconds, "warm_up_s": self.warm_up_s, **values}

    def scaled(self, count: int) -> int:
        """Return a number of entries or bytes, scaled."""
        return max(1, int(count * self.scale))


class Running:
    """A cluster that runs."""

    def __init__(self, bench: Bench, cluster: Cluster, home: Path) -> None:
        self.bench = bench
        self.cluster = cluster
        self.home = home

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the bookies."""
        return [bookie.pid for bookie in self.cluster.bookies.values()]

    @contextlib.asynccontextmanager
    async def client(self, spec: dict[str, Any]) -> AsyncIterator[Child]:
        """Start a client with a load."""
        command = (sys.executable, "-m", "benchmarks.suite.client", self.cluster.uri, json.dumps(spec))
        async with await Child.start(*command, log=self.home / "client.log") as child:
            yield child

    async def run(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Run a client to its end; returns its output, and the bookies' use of resources meanwhile."""
        before = self._servers()
        async with self.client(spec) as child:
            found = await next_line(child, spec)
        after = self._servers()
        payload = spec.get("entry_bytes", 1024) * BOOKIES * max(1, found.get("adds_with_warm_up", 0))
        if found.get("adds"):
            # Over the warm-up as well, where there is one.
            adds = max(found["adds"], found.get("adds_with_warm_up", 0))
            found["bookies_us"] = 1e6 * (after["cpu_s"] - before["cpu_s"]) / adds
            found["process_bytes_per_payload_byte"] = (after["written"] - before["written"]) / payload
            found["device_bytes_per_payload_byte"] = (after["device"] - before["device"]) / payload
        found["bookie_mib"] = self.bookie_mib()
        return found

    def bookie_mib(self) -> float:
        """Return the resident memory of the largest bookie."""
        return max(map(resident_mib, self.pids))

    def disk_bytes(self) -> int:
        """Return the bytes that the cluster's files take up."""
        return disk_usage_bytes(self.home)

    def _servers(self) -> dict[str, float]:
        return {
            "cpu_s": sum(map(cpu_seconds, self.pids)),
            "written": sum(map(written_bytes, self.pids)),
            "device": device_bytes(self.home),
        }


async def next_line(child: Child, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the next object that a client prints."""
    timeout_s = spec.get("warm_up_s", 0) + spec.get("seconds", 0) + _MARGIN_S
    found: dict[str, Any] = json.loads(await child.line(lambda line: line.startswith("{"), timeout_s))
    return found
