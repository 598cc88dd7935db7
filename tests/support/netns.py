"""Hosts on a network of their own, in which packets from one to another can be lost: one way, between two.

    async with Network("b1", "b2") as network:          # and HERE, which is this process
        cluster["b1"].prefix = network.prefix("b1")     # its process lives there
        cluster["b1"].listen = f"{network.address('b1')}:0"
        await network.drop("b1", HERE)                  # b1 hears this process, and is not heard by it
        await network.restore("b1", HERE)

Each host is a network namespace, joined by a bridge in one more. A packet is lost because its sender is told
a wrong link-layer address of the receiver, under which nobody takes it: connections stay as they are, nobody
is told anything, and TCP goes on sending. Needs root: `needs_networks` skips a test elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Self

import pytest

if TYPE_CHECKING:
    from types import TracebackType

HERE = "here"
_NOBODY = "02:00:00:00:ff:ff"
_NET = "198.18"  # set aside for tests of networks


@functools.cache
def _obstacle() -> str:
    """Tell why there can be no such network here; empty where there can."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    name = f"bookie-aio-{os.getpid()}-probe"
    made = _probe("netns", "add", name)
    if made:
        return f"there can be no network namespaces here: {made}"
    failed = _probe("-n", name, "link", "add", "switch", "type", "bridge")
    failed = failed or _probe("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
    _probe("netns", "delete", name)
    return f"there can be no bridges between network namespaces here: {failed}" if failed else ""


def _probe(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def needs_networks() -> None:
    """Skip the test where there can be no such network."""
    if reason := _obstacle():
        pytest.skip(reason)


async def _ip(line: str) -> None:
    """Run a command of `ip`."""
    process = await asyncio.create_subprocess_exec("ip", *line.split(), stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"ip {line}: {said.decode()}")


class Network:
    """Hosts that hear each other, until told otherwise."""

    def __init__(self, *hosts: str) -> None:
        self._hosts = [HERE, *hosts]
        self._tag = os.getpid() % 100_000
        self._switch = self._namespace("switch")

    def _namespace(self, host: str) -> str:
        return f"bookie-aio-{os.getpid()}-{host}"

    def _device(self, host: str) -> str:
        return f"ba{self._tag}h{self._hosts.index(host)}"

    def _in(self, host: str, command: str) -> str:
        return command if host == HERE else f"-n {self._namespace(host)} {command}"

    def _mac(self, host: str) -> str:
        return f"02:00:00:00:00:{self._hosts.index(host) + 1:02x}"

    def address(self, host: str) -> str:
        """Return its address, without a port."""
        return f"{_NET}.{self._tag % 250}.{self._hosts.index(host) + 1}"

    def prefix(self, host: str) -> list[str]:
        """Return the command to put before one that shall run on that host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    async def drop(self, sender: str, receiver: str) -> None:
        """Lose whatever goes from one to the other."""
        await self._neighbour(sender, receiver, _NOBODY)

    async def restore(self, sender: str, receiver: str) -> None:
        """Lose nothing of it any more."""
        await self._neighbour(sender, receiver, self._mac(receiver))

    async def _neighbour(self, host: str, other: str, mac: str) -> None:
        await _ip(self._in(host, self._entry(host, other, mac)))

    def _entry(self, host: str, other: str, mac: str) -> str:
        return f"neigh replace {self.address(other)} lladdr {mac} dev {self._device(host)} nud permanent"

    async def __aenter__(self) -> Self:
        try:
            await self._build()
        except BaseException:
            await self._remove()
            raise
        return self

    async def _build(self) -> None:
        await _ip(f"netns add {self._switch}")
        await _ip(f"-n {self._switch} link add switch up type bridge")
        for number, host in enumerate(self._hosts):
            device, port = self._device(host), f"port{number}"
            if host != HERE:
                await _ip(f"netns add {self._namespace(host)}")
            await _ip(
                f"link add {device} address {self._mac(host)} type veth peer name {port} netns {self._switch}"
            )
            await _ip(f"-n {self._switch} link set {port} master switch up")
            if host != HERE:
                await _ip(f"link set {device} netns {self._namespace(host)}")
                await _ip(self._in(host, "link set lo up"))
            await _ip(self._in(host, f"address add {self.address(host)}/24 dev {device}"))
            await _ip(self._in(host, f"link set {device} up"))
        for host in self._hosts:
            for other in self._hosts:
                if host != other:
                    await self.restore(host, other)

    async def _remove(self) -> None:
        """Delete the namespaces, and with the bridge's every pair of devices."""
        for host in ["switch", *self._hosts[1:]]:
            _probe("netns", "delete", self._namespace(host))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._remove()
