"""One run: starts the servers, drives them, and observes them from outside meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.systems import SERVERS
from benchmarks.peers.workloads import COLD
from benchmarks.processes import Child
from benchmarks.watching import cpu_seconds, device_bytes, evict, peak_mib, read_bytes, written_bytes

if TYPE_CHECKING:
    from benchmarks.peers.systems import Servers, System
    from benchmarks.peers.workloads import Workload

_MARGIN_S = 300.0
"""What a driver may take beside its warm-up and the measured part: connecting, writing what is to be read."""


@dataclass(frozen=True)
class Times:
    """How long a run takes, in seconds.

    After the measured part the servers get `settle_s` to write what they put off, so that the bytes that they
    wrote can be compared.
    """

    warm_up_s: float
    measured_s: float
    settle_s: float


async def measure(system: System, workload: Workload, times: Times, directory: Path) -> dict[str, Any]:
    """Measure a system once, from a fresh start in a directory that is removed afterwards."""
    home = Path(tempfile.mkdtemp(dir=directory, prefix=f"{system.name}."))
    try:
        async with contextlib.AsyncExitStack() as stack:
            servers = await system.start(home, workload, stack)
            return await _drive(servers, workload, times, home)
    finally:
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)


async def _drive(servers: Servers, workload: Workload, times: Times, home: Path) -> dict[str, Any]:
    pids = list(servers.pids)
    load = workload.load(times.warm_up_s, times.measured_s).arguments()
    timeout_s = times.warm_up_s + times.measured_s + _MARGIN_S
    before = await asyncio.to_thread(_seen, pids, home)
    async with await Child.start(*servers.driver, *load, log=home / "driver.log", asks=True) as child:
        while not (line := await child.line(timeout_s=timeout_s)).startswith("{"):
            if line == "ready" or line == "warm":
                before |= _seen(pids, home) if line == "ready" else {"cpu_s": sum(map(cpu_seconds, pids))}
            elif line == "evict":
                await asyncio.to_thread(evict, home)
                before |= {"read": sum(map(read_bytes, pids))}
                await child.say("done")
            elif line.startswith("kill "):
                # Not counted any more: a process that is gone has no figures.
                os.kill(pids.pop(int(line.split()[1]) - 1), signal.SIGKILL)
                await child.say("done")
        after = _seen(pids, home)
    figures = json.loads(line)
    if workload.needs_kill:
        return dict(figures)
    cpu_s = after["cpu_s"] - before["cpu_s"]
    found: dict[str, Any] = {**figures, "servers_us": 1e6 * cpu_s / max(1, figures["adds"])}
    found["server_mib"] = max(map(peak_mib, pids))
    if workload.kind == COLD:
        # How much of the payload came from the device: the pass was cold where this is one.
        found["read_share"] = (after["read"] - before["read"]) / (
            workload.read_entries * workload.entry_bytes
        )
    elif not workload.is_read:
        await asyncio.sleep(times.settle_s)
        payload = max(1, figures["adds_with_warm_up"] * workload.entry_bytes * SERVERS)
        settled = _seen(pids, home)
        for name in ("process", "device"):
            found[f"{name}_bytes_per_payload_byte"] = (settled[name] - before[name]) / payload
    return found


def _seen(pids: list[int], home: Path) -> dict[str, float]:
    """Return what servers have used and written so far, as the kernel counts it."""
    return {
        "cpu_s": sum(map(cpu_seconds, pids)),
        "read": sum(map(read_bytes, pids)),
        "process": sum(map(written_bytes, pids)),
        "device": device_bytes(home),
    }
