"""One run: starts the servers, drives them, and observes them from outside meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.systems import SERVERS
from benchmarks.processes import Child
from benchmarks.watching import cpu_seconds, device_bytes, peak_mib, written_bytes

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
    pids = servers.pids
    load = (
        workload.entry_bytes, workload.in_flight, workload.ledgers, times.warm_up_s, times.measured_s,
        workload.read_entries,
    )  # fmt: skip
    timeout_s = times.warm_up_s + times.measured_s + _MARGIN_S
    async with await Child.start(*servers.driver, *map(str, load), log=home / "driver.log") as child:
        await child.line(lambda line: line == "ready", timeout_s)
        written_before, device_before = sum(map(written_bytes, pids)), device_bytes(home)
        await child.line(lambda line: line == "warm", timeout_s)
        cpu_before = sum(map(cpu_seconds, pids))
        figures = json.loads(await child.line(lambda line: line.startswith("{"), timeout_s))
        cpu = sum(map(cpu_seconds, pids)) - cpu_before
    found: dict[str, Any] = {**figures, "servers_us": 1e6 * cpu / max(1, figures["adds"])}
    found["server_mib"] = max(map(peak_mib, pids))
    if not workload.read_entries:
        await asyncio.sleep(times.settle_s)
        payload = max(1, figures["adds_with_warm_up"] * workload.entry_bytes * SERVERS)
        found["process_bytes_per_payload_byte"] = (sum(map(written_bytes, pids)) - written_before) / payload
        found["device_bytes_per_payload_byte"] = (device_bytes(home) - device_before) / payload
    return found
