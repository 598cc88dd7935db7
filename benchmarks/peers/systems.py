"""A system under measurement: the start of its servers, and the command that drives them.

Every driver takes the same arguments: address, entry bytes, adds in flight, ledgers, warm-up s, seconds,
entries to read. It prints `ready`, `warm` and the figures as one line of JSON.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from benchmarks.peers.workloads import Workload

SERVERS = 3
_RETRY_S = 0.1
_READY_TRIES = 900


@dataclass(frozen=True)
class Servers:
    """Servers that serve: their processes, and the command that drives them, without the load."""

    pids: list[int]
    driver: list[str]


class System(Protocol):
    """One system in one configuration."""

    name: str
    title: str
    is_durable: bool
    """Whether what is acknowledged has been fsynced by those who acknowledged it."""

    def can_run(self, workload: Workload) -> bool:
        """Return whether the workload makes sense for it."""

    async def start(self, directory: Path, workload: Workload, stack: AsyncExitStack) -> Servers:
        """Start its servers in a directory; the stack ends them."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


async def until_listening(port: int) -> None:
    """Wait until somebody listens on a port.

    Raises:
        RuntimeError: nobody did in time.
    """
    for _ in range(_READY_TRIES):
        if await _is_listening(port):
            return
        await asyncio.sleep(_RETRY_S)
    raise RuntimeError(f"nobody listens on port {port} after {_READY_TRIES * _RETRY_S:g} s")


async def _is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def write_properties(path: Path, settings: dict[str, object]) -> None:
    """Write a file of Java properties."""
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
