"""The product, its ceiling and the bare disk as systems under measurement."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

from benchmarks.peers.systems import SERVERS, Servers
from benchmarks.peers.workloads import LOGS, WRITE
from benchmarks.processes import ROOT, Child, start_module

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from benchmarks.peers.workloads import Workload


_FROM_WHEEL = (
    "import sys; import bookie_aio, client_aio, metadata; sys.path.insert(0, sys.argv[1]); del sys.argv[1]; "
    "import runpy; runpy.run_module('benchmarks.product_client', run_name='__main__', alter_sys=True)"
)
"""The product's packages come from the installed wheel, the driver from the sources."""


class Product:
    """Three bookies as `bookie-aio cluster up` starts them, and the client.

    In the *steady* state the writer rolls to a new ledger now and then and deletes the ledger before. Deletes
    therefore keep pace with writes. In the *growing* state nothing is ever deleted.

    Args:
        is_compiled: measure the compiled wheel, not the sources.
        python: the interpreter of an environment with that wheel; without it nothing can run.
    """

    is_durable = True

    def __init__(self, *, is_steady: bool, is_compiled: bool = False, python: str | None = None) -> None:
        self._is_steady = is_steady
        self._is_compiled = is_compiled
        self._python = python or ("" if is_compiled else sys.executable)
        self.name = "product" if is_steady else "product-growing"
        self.title = "bookie-aio" if is_steady else "bookie-aio, only growing"
        if is_compiled:
            self.name, self.title = f"{self.name}-compiled", f"{self.title}, compiled"

    def can_run(self, workload: Workload) -> bool:
        return bool(self._python) and (self._is_steady or workload.kind in (WRITE, LOGS))

    async def start(self, directory: Path, workload: Workload, stack: AsyncExitStack) -> Servers:
        cluster = await Child.start(
            self._python, "-m", "client_aio.cli", "cluster", "up", "-n", str(SERVERS),
            "--dir", str(directory / "cluster"), "-o", "jsonl",
            log=directory / "cluster.log",
            # Python would import the sources in this directory first.
            environment={"PYTHONSAFEPATH": "1"} if self._is_compiled else None,
        )  # fmt: skip
        await stack.enter_async_context(cluster)
        document = json.loads(await cluster.line())
        mode = "steady" if self._is_steady else "growing"
        driver = [self._python, "-m", "benchmarks.product_client"]
        if self._is_compiled:
            driver = [self._python, "-P", "-c", _FROM_WHEEL, str(ROOT)]
        return Servers(
            [bookie["pid"] for bookie in document["bookies"]], [*driver, f"{mode}+{document['metadata']}"]
        )


class Ceiling:
    """The bare hot path (`benchmarks.ceiling`), on blocks that are fresh or recycled."""

    is_durable = True

    def __init__(self, blocks: str) -> None:
        self._blocks = blocks
        self.name = f"ceiling-{blocks}"
        self.title = f"ceiling, {blocks} blocks"

    def can_run(self, workload: Workload) -> bool:
        return workload.ledgers == 1 and workload.kind == WRITE

    async def start(self, directory: Path, workload: Workload, stack: AsyncExitStack) -> Servers:
        log = directory / "ceiling.log"
        bookies = await asyncio.gather(
            *(
                start_module("benchmarks.ceiling.bookie", str(directory / f"{n}"), self._blocks, log=log)
                for n in range(SERVERS)
            )
        )
        for bookie in bookies:
            await stack.enter_async_context(bookie)
        ports = [(await bookie.line(lambda line: line.startswith("ready "))).split()[1] for bookie in bookies]
        return Servers(
            [bookie.pid for bookie in bookies],
            [sys.executable, "-m", "benchmarks.ceiling.client", ",".join(ports)],
        )
