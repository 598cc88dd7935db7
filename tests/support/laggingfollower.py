"""A ZooKeeper ensemble with one follower that can be made to lag: it serves, and hears nothing new.

What its leader sends it passes through a gate. While that is shut the follower answers reads from what it
has, for as long as it believes in its leader (`syncLimit`, 5 s here); writes sent to it reach the leader, and
are answered when the gate is open again.

    with LaggingEnsemble(directory) as ensemble:
        ensemble.follower.address, ensemble.others      # for clients
        ensemble.lag()
        ...
        ensemble.catch_up()
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from tests.support.zookeeper import ZooKeeperServer, free_ports

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class Gate:
    """A TCP proxy whose direction from the server can be shut."""

    def __init__(self, port: int) -> None:
        """Stand before a server on this machine."""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        self.is_open = threading.Event()
        self.is_open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, self.is_open), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, gate: threading.Event | None) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if gate is not None:
                    gate.wait()
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut everything."""
        self.is_open.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class LaggingEnsemble:
    """Three servers; `follower` follows one of the `others` through gates."""

    def __init__(self, directory: Path) -> None:
        """Prepare; `with` starts it."""
        ports = free_ports(9)
        quorum, election, client = ports[:3], ports[3:6], ports[6:]
        self._gates = [Gate(port) for port in quorum[1:]]

        def server(number: int, seen: list[int]) -> ZooKeeperServer:
            members = "".join(
                f"server.{at}=127.0.0.1:{seen[at - 1]}:{election[at - 1]}\n" for at in (1, 2, 3)
            )
            folder = directory / f"server-{number}"
            return ZooKeeperServer(folder, port=client[number - 1], extra_config=members, my_id=number)

        self.follower = server(1, [quorum[0], *(gate.port for gate in self._gates)])
        self._others = [server(number, quorum) for number in (2, 3)]

    @property
    def others(self) -> str:
        """Return the two that do not lag, as a `zk:` URI wants them."""
        return ",".join(one.address for one in self._others)

    def lag(self) -> None:
        """Let the follower hear nothing new."""
        for gate in self._gates:
            gate.is_open.clear()

    def catch_up(self) -> None:
        """Let it hear everything again."""
        for gate in self._gates:
            gate.is_open.set()

    def __enter__(self) -> Self:
        # The two elect a leader between them before the third one comes.
        for one in self._others:
            one.launch()
        for one in self._others:
            one.wait_until_ready()
        self.follower.start()
        assert self.follower.mode() == "follower"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self.follower, *self._others):
            server.kill()
        for gate in self._gates:
            gate.close()
