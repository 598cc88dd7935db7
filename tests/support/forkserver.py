"""Start `bookie-aio` by a fork of a process that has imported it: an import takes 0.3 s of processor time.

A test process has a fork server. That has no threads, no event loop and no signal handlers. A child gets
its own arguments, environment, working directory and standard streams, and runs `python -m client_aio.cli`
as a fresh interpreter does. The server reports the child's wait status through a pipe. It ends with the
process that started it; its children live on, as children of an ended process do.

A fork hides what an import does, and what the interpreter takes from its environment. So a command is
executed where it has other options (`preexec_fn`, `pass_fds`) or a terminal. An environment that an import
may read has a server of its own. Strings hash alike in all children of one server.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from benchmarks.processes import LINE_BYTES_MAX, ROOT, Child

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMAND = [sys.executable, "-m", "client_aio.cli"]
REQUEST_BYTES_MAX = 64 << 10
NOT_READ_BY_IMPORTS = ("BOOKIE_AIO", "PYTEST_", "PYSPARK_", "SPARK_", "JAVA_", "JDK_", "TESTS_")
IMPORTED = (
    "client_aio.cli.main", "client_aio.cli.autorecovery", "client_aio.cli.bench", "client_aio.cli.bookie",
    "client_aio.cli.cluster", "client_aio.cli.ledger", "client_aio.cli.log", "client_aio.client",
    "client_aio.autorecovery.service", "client_aio.ledger.writer", "client_aio.ledger.reader",
    "client_aio.log.writer", "metadata.backends.sqlite.store",
    "uvloop", "rich.console", "rich.progress", "rich.table", "typer._adapters",
)  # fmt: skip
"""What commands import, also later. A module that an installation lacks is passed over."""


class ForkServer:
    """The process that forks, as seen from the process that started it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, request: bytes, streams: list[int]) -> tuple[int, int]:
        """Start a child with these standard streams; return its pid, and the pipe of its wait status."""
        status, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._connection, [request], [*streams, theirs])
                answer = self._connection.recv(16)
        finally:
            os.close(theirs)
        if not answer:
            os.close(status)
            raise RuntimeError(f"the fork server ended with {self._process.wait()}; see standard error")
        return int(answer), status

    def end(self) -> None:
        """End it, and wait until it is gone."""
        self._connection.close()
        self._process.wait()


SERVERS_MAX = 8
_servers: dict[tuple[tuple[str, str], ...], ForkServer | None] = {}
"""By what imports may read of the environment. None: seen once, so one more start is worth a server."""
_is_enabled = False


def enable() -> None:
    """Let this process start fork servers; without, every command is executed."""
    global _is_enabled
    _is_enabled = hasattr(os, "pidfd_open")


def disable() -> None:
    """End the fork servers of this process."""
    global _is_enabled
    _is_enabled = False
    for server in _servers.values():
        if server is not None and server.owner == os.getpid():
            server.end()
    _servers.clear()


def _server_for(environment: Mapping[str, str]) -> ForkServer | None:
    """Return the server whose imports saw the same environment; None where the command has to be executed."""
    read = {key: value for key, value in environment.items() if not key.startswith(NOT_READ_BY_IMPORTS)}
    key = tuple(sorted(read.items()))
    if key not in _servers:
        _servers[key] = None
        return None
    server = _servers[key]
    if server is None and sum(one is not None for one in _servers.values()) < SERVERS_MAX:
        server = _servers[key] = ForkServer(environment)
    return server if server is not None and server.owner == os.getpid() else None


def _request(
    command: list[str | bytes], environment: Mapping[str, str], cwd: Path
) -> tuple[ForkServer, bytes] | None:
    """Return the server and what to ask of it; None where the command has to be executed."""
    if not _is_enabled or command[: len(COMMAND)] != COMMAND:
        return None
    given = [[*command[len(COMMAND) :]], *map(list, environment.items()), [str(cwd)]]
    # As bytes: the child decodes them by the locale of its own environment.
    request = json.dumps([[os.fsencode(one).decode("latin-1") for one in part] for part in given]).encode()
    server = _server_for(environment) if len(request) <= REQUEST_BYTES_MAX else None
    return None if server is None else (server, request)


def start(
    command: list[str | bytes],
    *,
    env: Mapping[str, str],
    stdin: Any,
    stdout: Any,
    stderr: Any,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a command as `subprocess.Popen` does, by a fork where the command cannot tell."""
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    if not options and not any(map(_is_terminal, streams.values())):
        request = _request(command, env, Path.cwd())
        if request is not None:
            return ForkedProcess(command, *request, **streams)
    return subprocess.Popen(command, env=env, **streams, **options)


def _is_terminal(stream: Any) -> bool:
    if stream in (subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT):
        return False
    return os.isatty(stream if isinstance(stream, int) else stream.fileno())


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of the fork server."""

    status: int | None = None
    """The pipe that brings the wait status; None once it was read."""

    def __init__(
        self, command: list[str | bytes], server: ForkServer, request: bytes, **streams: Any
    ) -> None:
        self._server, self._request = server, request
        super().__init__(command, **streams)

    def _execute_child(self, *arguments: Any) -> None:
        to_child, ours_in, ours_out, from_child, ours_error, error_of_child = arguments[10:16]
        theirs, ours = (to_child, from_child, error_of_child), (ours_in, ours_out, ours_error)
        self.pid, self.status = self._server.fork(self._request, list(theirs))
        self._child_created = True
        devnull = getattr(self, "_devnull", None)
        for descriptor in {one for one, our in zip(theirs, ours, strict=True) if our != -1} | {devnull}:
            if descriptor is not None:
                os.close(descriptor)
        self._closed_child_pipe_fds = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        self._ends_within(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit status."""
        if not self._ends_within(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _ends_within(self, timeout_s: float | None) -> bool:
        if (status := self.status) is not None:
            poller = select.poll()
            poller.register(status, select.POLLIN)
            if not poller.poll(None if timeout_s is None else timeout_s * 1000):
                return False
        with self._waitpid_lock:
            if self.status is not None:
                said = os.read(self.status, 16)
                os.close(self.status)
                self.status = None
                # Without a status, the server ended before the child did.
                self.returncode = os.waitstatus_to_exitcode(int(said)) if said else 255
        return True


class AwaitedProcess:
    """A child of the fork server, with what `Child` uses of an `asyncio.subprocess.Process`."""

    def __init__(self, process: ForkedProcess, stdout: asyncio.StreamReader) -> None:
        self._process, self.stdout, self.pid = process, stdout, process.pid
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        assert process.status is not None
        self._status = process.status
        self._loop.add_reader(self._status, self._read_status)

    @classmethod
    async def of(cls, process: ForkedProcess) -> Self:
        """Read the standard output of a process, and wait for its end, on the running loop."""
        stdout = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdout), process.stdout
        )
        return cls(process, stdout)

    def _read_status(self) -> None:
        self._loop.remove_reader(self._status)
        self._process.poll()
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        """Return its exit status, once it ended."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        await self._ended.wait()
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; raises ProcessLookupError where it ended."""
        if self._process.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class CommandChild(Child):
    """A `Child` that is forked where it runs `bookie-aio` and cannot tell."""

    @classmethod
    async def start(cls, *command: str, log: Path, environment: dict[str, str] | None = None) -> Self:
        """Start a command in the project's root; what it writes to standard error is appended to the log."""
        request = _request(list(command), {**os.environ, **(environment or {})}, ROOT)
        if request is None:
            return await super().start(*command, log=log, environment=environment)
        with log.open("ab") as errors:
            process = ForkedProcess(
                list(command), *request, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            awaited = await AwaitedProcess.of(process)
        except BaseException:  # cancelled: nobody would end the process
            process.kill()
            process.wait()
            raise
        return cls(cast("asyncio.subprocess.Process", awaited), log)


# --- the server's side ---


def _serve(connection: socket.socket) -> list[list[str]] | None:
    """Fork a child for each request; return the request in the child, and None when the connection ends."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and the pipe for the wait status
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        for descriptor, _ in _events(poller):
            if descriptor != connection.fileno():
                poller.unregister(descriptor)
                pid, status = running.pop(descriptor)
                said = b"%d" % os.waitpid(pid, 0)[1]
                with suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(status, said)
                os.close(descriptor)
                os.close(status)
                continue
            request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 4)
            if not request:
                return None
            *streams, status = descriptors
            pid = os.fork()
            if pid == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for pidfd, (_, pipe) in running.items():
                    os.close(pidfd)
                    os.close(pipe)
                for one in descriptors:
                    os.close(one)
                connection.close()
                return json.loads(request)
            for stream in streams:
                os.close(stream)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, status)
            poller.register(pidfd, select.POLLIN)
            connection.send(b"%d" % pid)


def _events(poller: select.poll) -> list[tuple[int, int]]:
    """Wait for events. Ctrl-C reaches the whole process group; the owner of the server ends it."""
    try:
        return poller.poll()
    except KeyboardInterrupt:
        return []


def _become(request: list[list[str]]) -> None:
    """Run the command in this process, as an interpreter does that was just executed."""
    arguments, *environment, (cwd,) = [[one.encode("latin-1") for one in part] for part in request]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        old = getattr(sys, name)
        stream = open(  # noqa: SIM115
            number, mode, encoding=old.encoding, errors=old.errors, newline="\n", closefd=False,
            buffering=1 if name == "stderr" else -1,
        )  # fmt: skip
        stream.buffer.raw.name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environb.update((name, value) for name, value in environment)
    sys.argv = ["-m", *map(os.fsdecode, arguments)]
    runpy.run_module(COMMAND[-1], run_name="__main__", alter_sys=True)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.collect()
    gc.freeze()  # the collector touches nothing that children share
    request = _serve(connection)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    _main()
