"""Kafka: three brokers that are their own controllers (KRaft), acks=all, two replicas in sync at least."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.peers import artifacts
from benchmarks.peers.systems import SERVERS, Servers, free_ports, until_listening, write_properties
from benchmarks.peers.workloads import LOGS, TAKEOVER
from benchmarks.processes import Child

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from benchmarks.peers.workloads import Workload

_CLUSTER_ID = "Ym9va2llLWFpby1iZW5jaA"
_FLAGS = ("-XX:+UseG1GC", "-Xmx1g")


class Kafka:
    """With a flush for each batch (`log.flush.interval.messages=1`), or by its default without."""

    def __init__(self, *, is_durable: bool) -> None:
        self.is_durable = is_durable
        self.name = "kafka-flush" if is_durable else "kafka"
        self.title = "Kafka, flush per batch" if is_durable else "Kafka, no fsync"

    def can_run(self, workload: Workload) -> bool:
        return workload.kind != TAKEOVER and (workload.kind == LOGS or workload.ledgers == 1)

    async def start(self, directory: Path, workload: Workload, stack: AsyncExitStack) -> Servers:
        path = await asyncio.to_thread(artifacts.class_path, "kafka")
        log = directory / "kafka.log"
        numbers = range(1, SERVERS + 1)
        brokers, controllers = free_ports(SERVERS), free_ports(SERVERS)
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in zip(numbers, controllers, strict=True))

        async def java(*arguments: str) -> Child:
            child = await Child.start(artifacts.java(), *_FLAGS, "-cp", path, *arguments, log=log)
            return await stack.enter_async_context(child)

        pids = []
        for number, port, controller in zip(numbers, brokers, controllers, strict=True):
            file = directory / f"kafka{number}.properties"
            write_properties(
                file,
                {
                    "process.roles": "broker,controller",
                    "node.id": number,
                    "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
                    "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
                    "controller.listener.names": "CONTROLLER",
                    "controller.quorum.voters": voters,
                    "log.dirs": directory / f"kafka{number}",
                    "offsets.topic.replication.factor": SERVERS,
                    **({"log.flush.interval.messages": 1} if self.is_durable else {}),
                },
            )
            format_ = await java("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(file))
            format_.ignore_output()
            if await format_.wait():
                raise RuntimeError(f"kafka's format failed; its log: {format_.log_tail()}")
            broker = await java("kafka.Kafka", str(file))
            broker.ignore_output()
            pids.append(broker.pid)
        await asyncio.gather(*map(until_listening, brokers))
        servers = ",".join(f"127.0.0.1:{port}" for port in brokers)
        return Servers(pids, [artifacts.java(), *_FLAGS, "-Xmx2g", "-cp", path, "KafkaDrive", servers])
