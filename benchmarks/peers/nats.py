"""NATS JetStream: a cluster of three servers, one stream with three replicas."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from benchmarks.peers import artifacts
from benchmarks.peers.systems import SERVERS, Servers, free_ports, until_listening
from benchmarks.peers.workloads import LOGS, TAKEOVER
from benchmarks.processes import Child

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from benchmarks.peers.workloads import Workload

_SETTLE_S = 3.0
"""Until the cluster has elected its leader, which no port tells."""


class Nats:
    """With `sync_interval: always`, or by its default without (a sync every two minutes)."""

    def __init__(self, *, is_durable: bool) -> None:
        self.is_durable = is_durable
        self.name = "nats-sync" if is_durable else "nats"
        self.title = "NATS, sync always" if is_durable else "NATS, no sync"

    def can_run(self, workload: Workload) -> bool:
        return workload.kind != TAKEOVER and (workload.kind == LOGS or workload.ledgers == 1)

    async def start(self, directory: Path, workload: Workload, stack: AsyncExitStack) -> Servers:
        binary = await asyncio.to_thread(artifacts.nats_server)
        path = await asyncio.to_thread(artifacts.class_path, "nats")
        ports, routes = free_ports(SERVERS), free_ports(SERVERS)
        urls = [f"nats://127.0.0.1:{port}" for port in routes]
        pids = []
        for number, (port, route) in enumerate(zip(ports, routes, strict=True), 1):
            settings = {
                "server_name": f"n{number}",
                "listen": f"127.0.0.1:{port}",
                "jetstream": {
                    "store_dir": str(directory / f"n{number}"),
                    "max_file_store": 64 << 30,
                    **({"sync_interval": "always"} if self.is_durable else {}),
                },
                "cluster": {"name": "bench", "listen": f"127.0.0.1:{route}", "routes": urls},
            }
            file = directory / f"n{number}.conf"
            file.write_text(json.dumps(settings))
            server = await Child.start(str(binary), "-c", str(file), log=directory / "nats.log")
            server.ignore_output()
            await stack.enter_async_context(server)
            pids.append(server.pid)
        await asyncio.gather(*map(until_listening, ports))
        await asyncio.sleep(_SETTLE_S)
        servers = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        return Servers(pids, [artifacts.java(), "-XX:+UseG1GC", "-Xmx2g", "-cp", path, "NatsDrive", servers])
