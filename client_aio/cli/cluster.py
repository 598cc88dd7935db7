"""`bookie-aio cluster`: a cluster on this machine. Each bookie is a process, watched by its starter.

Owns the cluster's directory:

    DIR/cluster.json        what runs: metadata URI; id, pid, addresses, HTTP address, directory and log of
                            each bookie; HTTP address, pid and log of the status page
    DIR/supervisor.lock     held by the process that runs `cluster up`, whose id it has
    DIR/control.sock        where that process takes `cluster restart`, a JSON object a line
    DIR/processes.lock      held by it and by all its bookies, for as long as any of them lives
    DIR/metadata.db         the embedded metadata store, unless another one is named
    DIR/b1, DIR/b1.log …    each bookie's data and its log
    DIR/dashboard.log       the log of the status page

Invariants:

- A directory has at most one cluster running.
- Bookies keep their ids from start to start; their ports may change. One that has left is not started.
- Bookies stop when the process that started them ends, even by `kill -9`: their standard input then ends.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from client_aio.autorecovery.cluster_repair import ClusterRepair
from client_aio.autorecovery.survey import survey
from client_aio.cli import local_control
from client_aio.cli.completion import complete_bookies
from client_aio.cli.exit_codes import BookieStartError, Exit, exit_code_of
from client_aio.cli.files import replacing
from client_aio.cli.input import ask
from client_aio.cli.local_control import (
    DIRECTORY,
    STOP_TIMEOUT_S,
    control_socket,
    read_record,
    record_of,
    running_in,
)
from client_aio.cli.options import (
    LOST_BOOKIE_DELAY_S,
    RATE_MIB_MAX,
    Invocation,
    LostBookieDelay,
    Placement,
    PlacementOption,
    RecoverAbandoned,
    command,
    stop_event,
)
from client_aio.cli.output import Format, Output
from client_aio.cli.service_manager import SERVICE_VARIABLES
from client_aio.cli.settings import CONFIG_VARIABLE, PREFIX
from client_aio.cli.text import cluster_repair_text, survey_text
from client_aio.config import MIB, AutoRecoveryConfig
from metadata.backends.uri import open_store, parse_uri
from metadata.errors import (
    BookKeeperError,
    DirectoryInUseError,
    InvalidArgumentError,
    NoSuchClusterError,
    OperationTimeoutError,
)
from metadata.ids import KEY_RETIRED, check_bookie_id

BOOKIES = 3  # unless another number is asked for
START_TIMEOUT_S = 120.0  # long, since a bookie replays its journal after a crash before it serves
RELEASE_TIMEOUT_S = 20.0
RESTART_DELAY_S = 1.0


@dataclass
class BookieProcess:
    """One bookie of the cluster."""

    bookie_id: str
    directory: Path
    log: Path
    port: int
    rack: str
    pid: int | None = None
    addresses: list[str] = field(default_factory=list)
    http: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the bookie's row of cluster.json."""
        return {
            "bookie_id": self.bookie_id,
            "pid": self.pid,
            "addresses": self.addresses,
            "http": self.http,
            "directory": str(self.directory),
            "log": str(self.log),
        }


@dataclass
class PageProcess:
    """The status page of the cluster."""

    log: Path
    process: asyncio.subprocess.Process
    http: str

    def row(self) -> dict[str, Any]:
        """Return what cluster.json has of it."""
        return {"http": self.http, "pid": self.process.pid, "log": str(self.log)}


class LocalCluster:
    """Starts, watches and stops the bookies of one directory, and their status page."""

    def __init__(
        self,
        directory: Path,
        *,
        metadata: str | None,
        bookies: int | None,
        spares: int,
        base_port: int,
        racks: int,
        restart: bool,
        arguments: list[str],
        has_page: bool,
        report: Callable[[str], None],
    ) -> None:
        """Prepare; nothing happens before `prepare` and `start`.

        Args:
            metadata: URI of the metadata store; None: the embedded one in the directory.
            bookies: how many bookies to run, without spares; None: those of the directory, 3 at least.
            spares: how many bookies to run on top of these.
            base_port: the first bookie's port, counted up from there; 0: any free ports.
            racks: the number of racks that the bookies are labelled with, r1, r2, … in turn; 0: none.
            restart: start again a bookie that died.
            arguments: passed to every `bookie serve`.
            has_page: run the status page beside the bookies.
            report: called with each message for the user.
        """
        self._directory = directory.resolve()
        self._metadata = metadata
        self._asked_for = bookies
        self._spares = spares
        self._base_port = base_port
        self._racks = racks
        self._restart = restart
        self._arguments = arguments
        self._has_page = has_page
        self._report = report
        self._locks: list[int] = []  # descriptors
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._has_started = False  # all bookies serve
        self._restarting: set[str] = set()
        self._start_again = asyncio.Lock()  # one bookie at a time, by its watcher or by `restart`
        self._control: asyncio.Server | None = None
        self.bookies: list[BookieProcess] = []
        self.page: PageProcess | None = None

    @property
    def metadata_uri(self) -> str:
        """Return the metadata store's URI."""
        return self._metadata or _embedded_in(self._directory)

    def document(self) -> dict[str, Any]:
        """Return the content of cluster.json."""
        return {
            "format": 1,
            "metadata": self.metadata_uri,
            "pid": os.getpid() if self._has_started else None,
            "spares": self._spares,
            "bookies": [bookie.row() for bookie in self.bookies],
            "dashboard": None if self.page is None else self.page.row(),
        }

    async def prepare(self) -> None:
        """Lock the directory and read its cluster.json.

        Raises:
            DirectoryInUseError: a cluster runs in the directory.
            InvalidArgumentError: the directory's cluster has another metadata store, or more bookies.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._lock("supervisor.lock"):
            raise DirectoryInUseError(f"a cluster is running in {self._directory} already")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RELEASE_TIMEOUT_S
        while not self._lock("processes.lock"):
            # Bookies whose starter was killed notice that, and stop. No event tells when: the lock is polled.
            if loop.time() > deadline:
                raise DirectoryInUseError(f"bookies of an earlier start still run in {self._directory}")
            await asyncio.sleep(0.1)
        recorded = self._recorded()
        names = [row["bookie_id"] for row in recorded.get("bookies", ())]
        if recorded and self._metadata is None:
            self._metadata = _own_store(recorded)
        if recorded and recorded["metadata"] != self.metadata_uri and self._metadata is not None:
            raise InvalidArgumentError(
                f"the cluster in {self._directory} keeps its metadata in {recorded['metadata']}, "
                f"not in {self._metadata}"
            )
        spares = recorded.get("spares", 0)
        retired = await self._retired(names) if names else set()
        names = [name for name in names if name not in retired]
        self._check_count(len(names), spares)
        wanted = (self._asked_for or max(BOOKIES, len(names) - spares)) + self._spares
        numbers = itertools.count(1)
        while len(names) < wanted:
            name = f"b{next(numbers)}"
            if name not in {*names, *retired}:
                names.append(name)
        self.bookies = [
            BookieProcess(
                bookie_id=name,
                directory=self._directory / name,
                log=self._directory / f"{name}.log",
                port=self._base_port + number if self._base_port else 0,
                rack=f"r{number % self._racks + 1}" if self._racks else "",
            )
            for number, name in enumerate(names)
        ]

    async def _retired(self, names: Iterable[str]) -> set[str]:
        """Return the bookies that have left the cluster: no bookie starts under their ids.

        Raises:
            NoSuchClusterError: the store holds none, and one of these bookies has been formatted.
        """
        try:
            store = await open_store(self.metadata_uri)
        except NoSuchClusterError:
            if any((self._directory / name).exists() for name in names):
                raise
            return set()  # the first start ended before a bookie had made the cluster
        async with store:
            return set(await store.children(KEY_RETIRED))

    def _check_count(self, present: int, spares: int) -> None:
        """Refuse to start fewer bookies than the directory has: ledgers are on all of them."""
        self._spares = max(self._spares, spares)
        if self._asked_for is not None and self._asked_for < present - self._spares:
            raise InvalidArgumentError(
                f"the cluster in {self._directory} has {present} bookies, all of which are started, "
                f"so -n {self._asked_for} is refused: leave -n out, or name another --dir"
            )

    async def start(self) -> None:
        """Start all bookies, and return when all serve.

        Raises:
            BookieStartError: a bookie did not start; the others have been stopped.
        """
        # Before the first one takes entries: whatever ends this, the next start is of the same bookies.
        self._record()
        try:
            async with asyncio.TaskGroup() as group:
                for bookie in self.bookies:
                    group.create_task(self._start(bookie))
        except BaseExceptionGroup as failures:
            await self.stop()
            raise failures.exceptions[0] from None
        if self._has_page:
            await self._start_page()
        self._has_started = True
        self._record()
        self._control = await asyncio.start_unix_server(self._obey, sock=control_socket(self._directory))

    async def restart(self, bookie_id: str) -> BookieProcess:
        """Stop a bookie cleanly, if it runs, and start it again; return it when it serves.

        Raises:
            InvalidArgumentError: the cluster has no bookie of that id.
            BookieStartError: it did not start. It stays down.
        """
        bookie = next((one for one in self.bookies if one.bookie_id == bookie_id), None)
        if bookie is None:
            known = ", ".join(one.bookie_id for one in self.bookies)
            raise InvalidArgumentError(f"there is no bookie {bookie_id} here; the bookies are: {known}")
        async with self._start_again:
            self._restarting.add(bookie_id)
            try:
                process = self._running.pop(bookie_id, None)
                if process is not None:
                    await self._stop([(bookie_id, process)])
                bookie.pid = None
                self._record_again()
                if self._stopping:
                    raise InvalidArgumentError("the cluster is stopping")
                await self._start(bookie)
            finally:
                self._restarting.discard(bookie_id)
        self._record_again()
        self._report(f"bookie {bookie_id} was restarted (pid {bookie.pid})")
        return bookie

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what a line of the control socket asks for, and answer with a line."""
        task = asyncio.current_task()
        assert task is not None
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        try:
            asked = json.loads(await reader.readline())
            answer = (await self.restart(asked["restart"])).row()
        except (BookKeeperError, OSError) as error:
            answer = {"error": str(error), "exit_code": int(exit_code_of(error))}
        except (ValueError, KeyError, TypeError):
            answer = {"error": "the request is not understood", "exit_code": int(Exit.USAGE)}
        except BaseException:
            writer.close()  # else the other side waits for ever
            raise
        with contextlib.suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def stop(self) -> None:
        """Stop all cleanly; a bookie that does not stop in time is killed, and that is reported.

        The locks stay until the process ends: `cluster down` waits for that.
        """
        self._stopping = True
        if self.page is not None:
            with contextlib.suppress(ProcessLookupError):
                self.page.process.kill()  # it holds nothing
            await self.page.process.wait()
            self.page = None
        if self._control is not None:
            self._control.close()
            (self._directory / "control.sock").unlink(missing_ok=True)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._stop(list(self._running.items()))
        for bookie in self.bookies:
            bookie.pid = None
        if self.bookies:
            self._record_again()

    async def _stop(self, processes: list[tuple[str, asyncio.subprocess.Process]]) -> None:
        for _, process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for _, process in processes]
        if waiting:
            await asyncio.wait(waiting, timeout=STOP_TIMEOUT_S)
        for bookie_id, process in processes:
            if process.returncode is None:
                self._report(f"bookie {bookie_id} did not stop within {STOP_TIMEOUT_S:.0f} s and was killed")
                process.kill()
                await process.wait()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _start(self, bookie: BookieProcess) -> None:
        command = [
            sys.executable, "-m", "client_aio.cli", "bookie", "serve",
            "--id", bookie.bookie_id, "--dir", str(bookie.directory), "--listen", f"127.0.0.1:{bookie.port}",
            "--rack", bookie.rack, "--metadata", self.metadata_uri, "--output", "jsonl", "--stop-with-parent",
            *self._arguments,
        ]  # fmt: skip
        with bookie.log.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                pass_fds=self._locks[1:],
                start_new_session=True,  # Ctrl-C reaches the starter only, which stops the bookies
                env=_environment_of_bookies(),
            )
        self._running[bookie.bookie_id] = process
        bookie.pid = process.pid
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise OperationTimeoutError(
                f"bookie {bookie.bookie_id} does not serve after {START_TIMEOUT_S:.0f} s; see {bookie.log}",
                bookie_id=bookie.bookie_id,
            ) from None
        if not line:
            error = BookieStartError(_start_failure(bookie, log_start), bookie_id=bookie.bookie_id)
            error.exit_code = await process.wait()
            del self._running[bookie.bookie_id]  # its watcher tries again only while none runs
            bookie.pid = None
            raise error
        row = json.loads(line)
        bookie.addresses, bookie.http = row["addresses"], row["http"]
        watcher = asyncio.create_task(self._watch(bookie, process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, bookie: BookieProcess, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._stopping or bookie.bookie_id in self._restarting:
            return
        self._running.pop(bookie.bookie_id, None)
        self._report(
            f"bookie {bookie.bookie_id} (pid {bookie.pid}) {_exit_text(code)}; its log: {bookie.log}"
        )
        bookie.pid = None
        self._record_again()
        told = ""
        while self._restart and not self._stopping:
            await asyncio.sleep(RESTART_DELAY_S)
            with contextlib.suppress(BookKeeperError):
                if bookie.bookie_id in await self._retired([bookie.bookie_id]):
                    self._report(f"bookie {bookie.bookie_id} has left the cluster, and is not started again")
                    return
            try:
                async with self._start_again:
                    if self._stopping or bookie.bookie_id in self._running:  # restarted by hand meanwhile
                        return
                    await self._start(bookie)
            except (BookKeeperError, OSError) as error:
                if str(error) != told:
                    self._report(f"bookie {bookie.bookie_id} could not be started again: {error}")
                told = str(error)
            else:
                self._record_again()
                self._report(f"bookie {bookie.bookie_id} serves again (pid {bookie.pid})")
                return

    async def _start_page(self) -> None:
        """Start the status page. The cluster goes on without it if it fails, or ends later."""
        path = self._directory / "dashboard.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "client_aio.cli", "dashboard", self.metadata_uri,
                "--http", "127.0.0.1:0", "--output", "jsonl", "--stop-with-parent",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        self.page = PageProcess(path, process, "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                if line := await process.stdout.readline():
                    self.page.http = json.loads(line)["http"]
                    self._watchers.add(asyncio.create_task(self._watch_page(self.page)))
                    return
        self._report(f"the status page did not start; see {path}")
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self.page = None

    async def _watch_page(self, page: PageProcess) -> None:
        code = await page.process.wait()
        if not self._stopping:
            self._report(f"the status page (pid {page.process.pid}) {_exit_text(code)}; its log: {page.log}")
            self.page = None
            self._record_again()

    def _lock(self, name: str) -> bool:
        """Lock a file until the process ends: a descriptor of its own is closed by no destructor."""
        file = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        os.ftruncate(file, 0)
        os.write(file, b"%d\n" % os.getpid())
        self._locks.append(file)
        return True

    def _recorded(self) -> dict[str, Any]:
        try:
            return read_record(self._directory)
        except FileNotFoundError:
            return {}

    def _record_again(self) -> None:
        """Record what runs now. A full disk ends no watch of a bookie by that."""
        try:
            self._record()
        except OSError as error:
            self._report(f"cluster.json could not be written: {error.strerror}")

    def _record(self) -> None:
        with replacing(self._directory / "cluster.json") as file:
            file.write(json.dumps(self.document(), indent=2).encode() + b"\n")


def _embedded_in(directory: Path) -> str:
    """Return the URI of the metadata store that a cluster's directory has itself."""
    return f"sqlite://{quote(os.fsencode(directory / 'metadata.db'))}"


def _own_store(recorded: Mapping[str, Any]) -> str | None:
    """Return the metadata store that a cluster.json names; None for the one in the directory.

    That one moves with the directory.
    """
    rows, uri = recorded["bookies"], str(recorded["metadata"])
    was_in = Path(rows[0].get("directory", "")).parent if rows else Path()
    return None if uri == _embedded_in(was_in) else uri


def _environment_of_bookies() -> dict[str, str]:
    """Return the environment of the bookies: no settings of [bookie], which would be the same for all.

    With one port for `--http`, for instance, only the first bookie could start.
    """
    kept = {key: value for key, value in os.environ.items() if key not in SERVICE_VARIABLES}
    of_one = [key for key in kept if key.startswith(f"{PREFIX}BOOKIE_")]
    return {key: value for key, value in kept.items() if key not in of_one} | {CONFIG_VARIABLE: ""}


def _exit_text(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _start_failure(bookie: BookieProcess, log_start: int) -> str:
    with bookie.log.open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("bookie-aio: ") if lines else "it left nothing in its log"
    return f"bookie {bookie.bookie_id} did not start: {last}"


app = typer.Typer(no_args_is_help=True, help="Run a cluster on this machine, and look at any cluster.")
app.registered_commands += local_control.app.registered_commands


@command(app, "up", without_variable=True)
async def up(
    invocation: Invocation,
    bookies: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--bookies",
            min=1,
            max=100,
            help="How many bookies; default: those that DIR has, 3 at least. Fewer than DIR has are refused.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", file_okay=False, help="Where everything of the cluster is kept.")
    ] = DIRECTORY,
    spares: Annotated[int, typer.Option(min=0, max=100, help="Bookies on top of -n.")] = 0,
    base_port: Annotated[
        int, typer.Option(min=0, max=65_000, help="The first bookie's port; 0: any free ones.")
    ] = 0,
    racks: Annotated[
        int, typer.Option(min=0, max=100, help="Label the bookies with so many racks, in turn; 0: none.")
    ] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Start a bookie that died again.")] = False,
    autorecovery: Annotated[
        bool,
        typer.Option(
            "--autorecovery/--no-autorecovery", help="Whether lost copies are made again automatically."
        ),
    ] = True,
    lost_bookie_delay: LostBookieDelay = LOST_BOOKIE_DELAY_S,
    recover_after: RecoverAbandoned = None,
    http: Annotated[
        bool,
        typer.Option(
            "--http",
            help="Serve metrics and health by HTTP, each bookie on a free port, and the status page.",
        ),
    ] = False,
) -> None:
    """Start a cluster in DIR and run it until Ctrl-C or SIGTERM.

    Prints the metadata URI once all bookies serve. Starting again on the same directory brings the same
    cluster back, whatever stopped it. DIR/cluster.json names the processes. Metadata is kept in DIR unless
    --metadata is given here (the environment variable is not looked at).
    """
    output = invocation.output
    metadata = invocation.metadata
    if metadata is not None:
        parse_uri(metadata)  # a wrong URI is refused before any file is created
    os.umask(0o077)  # logs and cluster.json, as the data, are for no other user of the machine
    cluster = LocalCluster(
        directory,
        metadata=metadata,
        bookies=bookies,
        spares=spares,
        base_port=base_port,
        racks=racks,
        restart=restart,
        arguments=[
            *("--loop", invocation.loop.value),
            *("--lost-bookie-delay", str(lost_bookie_delay)),
            *(["--recover-after", str(recover_after)] if recover_after is not None else []),
            *(["--autorecovery"] if autorecovery else []),
            *(["--http", "127.0.0.1:0"] if http else []),
        ],
        has_page=http,
        report=output.note,
    )
    await _run_until_stopped(cluster, output)


async def _run_until_stopped(cluster: LocalCluster, output: Output) -> None:
    stop = stop_event()

    async def start() -> None:
        await cluster.prepare()  # it may wait for bookies of an earlier start, and for the metadata store
        await cluster.start()

    starting = asyncio.create_task(start())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            output.document(cluster.document(), text=cluster.metadata_uri)
            for bookie in cluster.bookies:
                where = ", ".join(bookie.addresses) + (f", http://{bookie.http}" if bookie.http else "")
                output.note(f"bookie {bookie.bookie_id} serves on {where} (pid {bookie.pid})")
            if cluster.page is not None:
                output.note(f"the status page is at http://{cluster.page.http}/")
            output.note("Stop with Ctrl-C.")
            await stopped
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        await cluster.stop()


@command(app, "status")
async def status(
    invocation: Invocation,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", file_okay=False, help="A cluster that `cluster up` runs here: its processes, too."
        ),
    ] = None,
) -> int:
    """Show the state of a cluster: bookies, ledgers, copies that are lacking, and who repairs.

    Reads the metadata of every ledger, and asks every bookie. The exit code is 0 for a healthy cluster. It is
    1 if copies are lacking, or soon will be. It is 2 if data is at risk: some entry has one good copy at
    most. With --dir it is 4 if no cluster runs there.
    """
    here: dict[str, Any] = {}
    lines = []
    if directory is not None:
        pid = running_in(directory)
        recorded = record_of(pid, directory)
        here = {"pid": pid, "processes": recorded["bookies"]}
        lines = [f"`cluster up` runs in {directory} (pid {pid}) with {recorded['metadata']}"]
        lines += [f"  {row['bookie_id']}: {_process_text(row)}" for row in recorded["bookies"]]
        invocation = replace(invocation, metadata=recorded["metadata"])
    async with (
        invocation.connect() as client,
        invocation.output.tracking("status", every_s=None) as show,
    ):
        found = await survey(client._context, lambda count: show(count, None, "ledgers"))
    invocation.output.document({**here, **found.to_document()}, text="\n".join([*lines, survey_text(found)]))
    return int(found.condition)


def _process_text(row: dict[str, Any]) -> str:
    if row["pid"] is None:
        return f"not running; its log: {row['log']}"
    http = f", http://{row['http']}" if row.get("http") else ""
    return f"pid {row['pid']}, {', '.join(row['addresses'])}{http}"


@command(app, "repair")
async def repair(
    invocation: Invocation,
    lost: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BOOKIE",
            help="Only this bookie loses its seats (repeat it for more); default: all that are down.",
            show_default=False,
            autocompletion=complete_bookies,
        ),
    ] = None,
    rate: Annotated[
        float,
        typer.Option(min=0.01, max=RATE_MIB_MAX, metavar="MIB", help="MiB per second that are read at most."),
    ] = AutoRecoveryConfig().cluster_bytes_per_s / MIB,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="How many ledgers are repaired at once.")] = 4,
    placement: PlacementOption = Placement.WEIGHTED,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show which ledgers would be repaired.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
) -> int:
    """Make every ledger whole that lacks copies now. Needs no auto recovery, and may run beside it.

    A bookie that is down loses its seats at once, to others that get copies; start one again first if it is
    to keep them. A bookie that runs, and lacks entries or lost data, gets them in its place. The last
    fragment of a ledger that is not closed is left to its writer. May be interrupted and run again.

    The exit code is 0 if all that it may repair is whole; `left_to_writers` counts the ledgers that are not
    closed and name a bookie that is down. It is 1 if a ledger could not be repaired, or a bookie could not be
    asked. It is 5 if no bookie returned some entries. As JSON lines, the summary comes last.
    """
    output, lost = invocation.output, [check_bookie_id(name) for name in lost or ()]
    async with invocation.connect(placement=placement.policy) as client:
        repairing = ClusterRepair(client._context, bytes_per_s=int(rate * MIB), lost=lost)
        async with output.tracking("look at ledgers") as show:
            found = await repairing.find(lambda done, total: show(done, total, "ledgers"))
        rows = []
        if found.lacking and not dry_run:
            names = ", ".join(found.lost)
            seats = f", and give the seats of {names} to others" if names else ""
            ask(f"Repair {len(found.lacking):,} ledgers{seats}?", is_answered=yes)
            async with (
                output.tracking("repair ledgers") as show,
                aclosing(repairing.repair(found, ledgers_at_once=at_once)) as repaired,
            ):
                async for ledger, outcome in repaired:
                    rows.append({**ledger.row(), **outcome._asdict()})
                    if outcome.entries_lost:
                        rows[-1]["good_copies"] = 0
                    show(
                        len(rows), len(found.lacking), f"ledgers, {repairing.bytes_read / MIB:,.0f} MiB read"
                    )
                    if output.form is Format.JSONL:
                        output.document(rows[-1])
    failed = [row for row in rows if not row["is_done"]]
    if dry_run:
        rows = [ledger.row() for ledger in found.lacking]
    done = {"repaired": 0 if dry_run else len(rows) - len(failed), "failed": len(failed)}
    summary = {"dry_run": dry_run, **done, "bytes_read": repairing.bytes_read, **found.row()}
    if output.form is Format.JSONL:
        for row in rows if dry_run else ():
            output.document(row)
        output.document({"summary": summary})
    else:
        output.document({**summary, "ledgers": rows}, text=cluster_repair_text(rows, summary))
    if any(row["entries_lost"] for row in failed):
        return Exit.DAMAGED
    return Exit.FAILURE if failed or found.unknown or found.unreadable else Exit.OK
