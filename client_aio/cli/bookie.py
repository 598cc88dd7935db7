"""`bookie-aio bookie`: run bookies, and look after them."""

import asyncio
import json
import logging
import os
import random
import resource
import socket
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bookie_aio import structured_logging
from bookie_aio.config import BookieConfig, Limits, is_loopback, is_wildcard, share_descriptors
from bookie_aio.metrics import DiskTimes
from bookie_aio.server.age import read_age
from bookie_aio.server.bookie import Bookie
from bookie_aio.server.registration import establish_identity, is_formatted
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.data_directory import owner_of, read_cookie
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.disk.read_only import ReadOnlyDisk
from bookie_aio.storage.inspection import Inspector
from bookie_aio.storage.segment import format as form
from bookie_aio.wire.messages import Done, Info
from client_aio.bookies.connection import connect, list_ledgers
from client_aio.cli import lifecycle
from client_aio.cli.completion import complete_bookies
from client_aio.cli.exit_codes import Exit
from client_aio.cli.input import ask
from client_aio.cli.options import (
    LOST_BOOKIE_DELAY_S,
    Invocation,
    LogJson,
    LogLevel,
    LostBookieDelay,
    Placement,
    PlacementOption,
    RecoverAbandoned,
    address_of,
    command,
    configure_logging,
    http_address,
    stop_event,
    usage_error,
)
from client_aio.cli.service_manager import ServiceManager
from client_aio.cli.settings import Settings
from client_aio.config import MIB, AutoRecoveryConfig, tune_gc
from metadata.access.bookies import (
    BookieRecord,
    Orders,
    SetBacks,
    available_bookies,
    join_address,
    registered_bookies,
    split_address,
)
from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    MalformedFrameError,
    is_unforeseen,
)
from metadata.ids import MALFORMED, check_bookie_id
from metadata.store import MetadataStore

if TYPE_CHECKING:
    import client_aio

log = logging.getLogger(__name__)
app = typer.Typer(no_args_is_help=True, help="Run bookies, and look after them.")
app.registered_commands += lifecycle.app.registered_commands

DIRECTORIES = typer.Option(
    "--dir",
    file_okay=False,
    help="The data directory; repeat it to spread the data over several disks.",
    show_default=False,
)
BookieId = Annotated[
    str | None,
    typer.Option("--id", help="The bookie's id; default: the one in the data directory, else one is drawn."),
]
AcceptOlderCopy = Annotated[
    bool,
    typer.Option(
        "--accept-older-copy",
        help="Start on an older copy of a directory that is lost; the entries written since are owed.",
    ),
]
AutoRecoveryFlag = Annotated[
    bool, typer.Option("--autorecovery", help="Run auto recovery in this process: an auditor and a worker.")
]
HttpOption = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="[HOST:]PORT",
        help="Serve metrics, health and figures by HTTP; a port alone: for this machine only.",
        show_default=False,
    ),
]

_CALL_TIMEOUT_S = 5.0
_HTTP_DESCRIPTORS = 48
"""Of the HTTP endpoint: its connections, and some more."""
_RECOVERY_RETRY_S = 1.0


@command(app, "serve")
async def serve(
    invocation: Invocation,
    directories: Annotated[list[Path], DIRECTORIES],
    bookie_id: BookieId = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: any free one.")
    ] = "127.0.0.1:3181",
    advertise: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="What clients connect to, best first; default: --listen."),
    ] = None,
    rack: Annotated[str, typer.Option(help="Where the machine stands, for placement.")] = "",
    weight: Annotated[float, typer.Option(min=0, help="Its share of new ensembles.")] = 1.0,
    sweep_interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often to look for ledgers that were deleted.")
    ] = 60.0,
    allow_remote_without_auth: Annotated[
        bool, typer.Option("--allow-remote-without-auth", help="Listen beyond this machine, open to anybody.")
    ] = False,
    accept_older_copy: AcceptOlderCopy = False,
    autorecovery: AutoRecoveryFlag = False,
    lost_bookie_delay: LostBookieDelay = LOST_BOOKIE_DELAY_S,
    recover_after: RecoverAbandoned = None,
    placement: PlacementOption = Placement.WEIGHTED,
    http: HttpOption = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    stop_with_parent: Annotated[
        bool, typer.Option("--stop-with-parent", help="Stop when standard input ends.")
    ] = False,
) -> None:
    """Run a bookie until Ctrl-C or SIGTERM; logs go to standard error.

    A data directory that is empty, under an id that the cluster does not know yet, is formatted. An empty
    or foreign one under a known id is refused: such a bookie would have forgotten what it promised.

    With an empty directory and a metadata store that holds no cluster, a new cluster is made. With a bookie's
    directory such a store is refused: its URI is mistyped, or the metadata are lost.
    """
    configure_logging(log_level, as_json=log_json)
    uri = invocation.metadata_uri
    limits, storage = _limits_of(invocation.settings, http)
    disk = RealDisk(times := DiskTimes(time.perf_counter))
    paths = _absolute(directories)
    config = BookieConfig(
        bookie_id=check_bookie_id(bookie_id) if bookie_id else await _id_for(disk, paths),
        directories=paths,
        listen=address_of("--listen", listen),
        advertise=advertise,
        rack=rack,
        weight=weight,
        allow_remote_without_auth=allow_remote_without_auth,
        sweep_interval_s=sweep_interval,
        accept_older_copy=accept_older_copy,
        http=None if http is None else http_address(http),
        properties={"version": _release()},
        limits=limits,
        storage=storage,
        **invocation.settings.plain("bookie"),
    )
    is_new = not await is_formatted(disk, paths)
    recovery = _recovery_of(invocation.settings, lost_bookie_delay, recover_after)
    stop = stop_event(watch_standard_input=stop_with_parent)
    async with ServiceManager() as manager:
        running = _serve(
            invocation, manager, config, uri, disk, times, create=is_new,
            recovery=recovery if autorecovery else None, placement=placement,
        )  # fmt: skip
        await _until_stopped(running, stop, manager)


def _recovery_of(
    settings: Settings, lost_bookie_delay_s: float, recover_after_s: float | None
) -> AutoRecoveryConfig:
    given = {"lost_bookie_delay_s": lost_bookie_delay_s, "recover_after_s": recover_after_s}
    return settings.made("autorecovery", AutoRecoveryConfig, **given)


async def _until_stopped(
    running: Coroutine[Any, Any, None], stop: asyncio.Event, manager: ServiceManager
) -> None:
    serving = asyncio.create_task(running)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    manager.stopping()
    stopping.cancel()
    serving.cancel()  # closes the bookie, even while it is still starting
    with suppress(asyncio.CancelledError):
        await serving


async def _serve(
    invocation: Invocation,
    manager: ServiceManager,
    config: BookieConfig,
    uri: str,
    disk: RealDisk,
    times: DiskTimes,
    *,
    create: bool,
    recovery: AutoRecoveryConfig | None,
    placement: Placement,
) -> None:
    """Run a bookie until it fails, or until cancelled.

    Args:
        manager: is told when the bookie serves.
        times: the times of the disk's system calls.
        create: make the metadata store and the cluster where they are missing: the directories are new.
        recovery: the settings of auto recovery in this process; None for none.
        placement: chooses the bookies that auto recovery copies to.
    """
    rng = random.SystemRandom()
    clients: dict[str, client_aio.Client] = {}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(_http_server(config, times))
        await _check_port_is_free(*config.listen)
        store = await stack.enter_async_context(await open_store(uri, create=create))
        surveyor = await stack.enter_async_context(Surveyor(invocation, store))
        if http is not None and (announced := _announced(config, http.address)):
            config = replace(config, properties={**config.properties, "http": announced})
        bookie = await stack.enter_async_context(
            await Bookie.start(
                config, store, disk, rng=rng, now_ms=_now_ms, clock=time.perf_counter, effort=time.thread_time
            )
        )
        address = None
        if http is not None:
            from client_aio.metrics import AUTO_RECOVERY_METRICS, families_of

            http.show(bookie, surveyor.survey, lambda: families_of(clients, AUTO_RECOVERY_METRICS))
            address = http.address
        row = {
            "bookie_id": bookie.bookie_id,
            "addresses": bookie.addresses,
            "http": address,
            "pid": os.getpid(),
        }
        tune_gc()  # again: what the start has read lives as long as the process
        where = ", ".join(bookie.addresses) + (f", http://{address}" if address else "")
        invocation.output.document(row, text=f"bookie {bookie.bookie_id} serves on {where}")
        manager.ready(f"bookie {bookie.bookie_id} serves on {where}")
        recovering = asyncio.create_task(
            _recover(invocation, store, recovery, placement, bookie.bookie_id, clients)
        )
        try:
            failure = await asyncio.shield(bookie.stopped)
        finally:
            recovering.cancel()
            await asyncio.gather(recovering, return_exceptions=True)
    if failure is not None:
        raise failure


@asynccontextmanager
async def _http_server(config: BookieConfig, times: DiskTimes) -> AsyncGenerator[Any, None]:
    """Listen for HTTP while the block runs, and return the server; None where none is asked for.

    This comes before the bookie's identity is recorded: a taken port leaves nothing behind.
    """
    if config.http is None:
        yield None
        return
    try:
        from bookie_aio.server.http import HttpServer
    except ImportError:
        usage_error("--http needs aiohttp: pip install 'bookie-aio[http]'")
    try:
        server = await HttpServer.listen(*config.http, clock=time.perf_counter, disk=times)
    except socket.gaierror as error:
        # Not wrong usage: a service manager starts the bookie again, and names can be resolved then.
        raise OSError(f"--http {join_address(*config.http)}: {error.strerror}") from error
    except OSError as error:
        raise OSError(error.strerror or str(error)) from error  # without the number of the error
    async with server:
        yield server


class Surveyor:
    """Surveys the cluster on a bookie's session, by a client that the first survey opens."""

    def __init__(self, invocation: Invocation, store: MetadataStore) -> None:
        self._invocation = invocation
        self._store = store
        self._client: client_aio.Client | None = None

    async def survey(self) -> dict[str, Any]:
        """Return what `cluster status -o json` prints. Raises BookKeeperError."""
        from client_aio.autorecovery.survey import survey  # the client, which few bookies need

        if self._client is None:
            self._client = await self._invocation.connect(self._store)
        return (await survey(self._client._context)).to_document()

    async def __aenter__(self) -> "Surveyor":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()


async def _recover(
    invocation: Invocation,
    store: MetadataStore,
    config: AutoRecoveryConfig | None,
    placement: Placement,
    name: str,
    clients: "dict[str, client_aio.Client]",
) -> None:
    """Run auto recovery beside a bookie, on the bookie's session, until cancelled.

    Its client is put into `clients` while it runs, for the metrics.
    """
    if config is None:
        return
    from client_aio.autorecovery.service import AutoRecovery  # the client, which few bookies need

    while True:
        try:
            async with (
                invocation.connect(store, placement=placement.policy) as client,
                AutoRecovery(client, config, name=name),
            ):
                clients["autorecovery"] = client
                await asyncio.Event().wait()
        except Exception as error:
            log.warning(
                "auto recovery cannot begin",
                extra=structured_logging.fields(bookie=name, error=error),
                exc_info=is_unforeseen(error),
            )
            await asyncio.sleep(_RECOVERY_RETRY_S)
        finally:
            clients.clear()


async def _check_port_is_free(host: str, port: int) -> None:
    """Refuse a port that is taken, before the bookie's identity is recorded in the metadata store.

    A bookie that is formatted and never serves would be listed as down from then on.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"the bookie cannot listen on {join_address(host, port)}: {error.strerror}") from error
    for family, _, _, _, address in found:
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # the system lacks this family of addresses, and the server skips it too
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the bookie's own socket has it
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise OSError(f"the bookie cannot listen on {join_address(host, port)}: {reason}") from error


def _allow_many_files() -> int:
    """Raise the soft limit of file descriptors to the hard limit, and return it: each connection takes one.

    The usual soft limit is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _limits_of(settings: Settings, http: str | None) -> tuple[Limits, StorageConfig]:
    """Return the limits that are set, and those of the descriptors where they are lower.

    Raises:
        InvalidArgumentError: a value is wrong, or a segment has no room for a block as large as a frame.
    """
    others = 0 if http is None else _HTTP_DESCRIPTORS
    limits = settings.made("bookie.limits", Limits)
    storage = settings.made("bookie.storage", StorageConfig)
    least = limits.frame_bytes_max + form.DATA_OFFSET + form.GROUP_HEADER_BYTES + form.ROW_BYTES
    if storage.segment_bytes < least:
        usage_error(
            f"bookie.storage.segment_bytes {storage.segment_bytes:,} has no room for a frame of "
            f"bookie.limits.frame_bytes_max {limits.frame_bytes_max:,}: it is {least:,} at least"
        )
    connections_max, files_max = share_descriptors(
        _allow_many_files() - others, connections_max=limits.connections_max, files_max=storage.files_max
    )
    return replace(limits, connections_max=connections_max), replace(storage, files_max=files_max)


def _absolute(directories: list[Path]) -> tuple[str, ...]:
    return tuple(str(directory.resolve()) for directory in directories)


async def _id_for(disk: RealDisk, directories: tuple[str, ...]) -> str:
    for directory in directories:
        if cookie := await read_cookie(disk, directory):
            return cookie.bookie_id
    return f"bookie-{random.SystemRandom().getrandbits(48):012x}"


def _release() -> str:
    """Return the release that runs, which is announced: `doctor` tells whether releases are mixed."""
    try:
        return version("bookie-aio")
    except PackageNotFoundError:  # run from its sources, and not installed
        return "unknown"


def _announced(config: BookieConfig, address: str) -> str:
    """Return the address of the HTTP endpoint as others reach it; "" where they do not.

    A wildcard is no address. A loopback address of this machine is another endpoint's on theirs.
    """
    host, port = split_address(address)
    advertised = config.advertise[0] if config.advertise else join_address(*config.listen)
    reached, _ = split_address(advertised)
    if is_loopback(host) and not is_loopback(reached):
        return ""
    return join_address(reached, port) if is_wildcard(host) else address


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@command(app, "format")
async def format_(
    invocation: Invocation,
    directories: Annotated[list[Path], DIRECTORIES],
    bookie_id: BookieId = None,
    new_cluster: Annotated[
        bool, typer.Option("--new-cluster", help="Make a cluster where the metadata store holds none.")
    ] = False,
) -> None:
    """Make an empty directory a bookie's, without running it, and print the bookie's id.

    `serve` does the same for a new bookie. A directory that is a bookie's already is left as it is; one
    that holds anything else is refused, and so is an empty one under an id that the cluster knows.
    """
    disk = RealDisk()
    paths = _absolute(directories)
    config = BookieConfig(
        bookie_id=check_bookie_id(bookie_id) if bookie_id else await _id_for(disk, paths), directories=paths
    )
    async with await open_store(invocation.metadata_uri, create=new_cluster) as store:
        cookie = await establish_identity(config, store, disk, rng=random.SystemRandom(), now_ms=_now_ms)
    invocation.output.document(
        {
            "bookie_id": cookie.bookie_id,
            "directory": paths[0],
            "directories": paths,
            "instance_id": cookie.instance_id,
            "incarnation": cookie.incarnation,
        },
        text=cookie.bookie_id,
    )


@command(app, "accept-metadata")
async def accept_metadata(
    invocation: Invocation,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show which ledgers bookies would drop.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
) -> None:
    """Accept a metadata store that was set back to an older copy: bookies drop what it does not list.

    Bookies that found the store older than themselves drop no ledger given out before. This shows the
    ledgers in doubt: held by a bookie that runs, and not listed. Then it answers for these bookies. A bookie
    that is down stays in doubt; start it and run the command again.
    """
    output = invocation.output
    async with await open_store(invocation.metadata_uri) as store:
        found = await SetBacks.read(store)
        running = await available_bookies(store)
        waiting = sorted({one for one in running for event in found.events if one not in event.answered})
        below = max((event.raised_to for event in found.events), default=0)
        held = {one: await _ledgers_of(running[one], below) for one in waiting}
        listed = {one async for one in LedgerStore(store).ledger_ids(sync=True)}
        in_doubt = sorted({one for ids in held.values() for one in ids} - listed)
        rows = [
            {"ledger_id": one, "bookies": [bookie for bookie in waiting if one in held[bookie]]}
            for one in in_doubt
        ]
        is_done = bool(waiting) and not dry_run
        if is_done:
            question = f"Let {', '.join(waiting)} drop {len(in_doubt)} ledgers, for good?"
            ask(question, is_answered=yes, about=_lines_of_doubt(rows))
            await found.replace(store, [event.answer_for(waiting) for event in found.events])
        down = sorted(set(await registered_bookies(store)) - set(running))
    output.document(
        {
            "set_backs": len(found.events),
            "answered_for": waiting if is_done else [],
            "ledgers_in_doubt": rows,
            "bookies_down": down,
        },
        text=_text_of_doubt(rows, waiting, down, is_done=is_done),
    )


def _lines_of_doubt(rows: list[dict[str, Any]]) -> list[str]:
    return [f"ledger {row['ledger_id']}, on {', '.join(row['bookies'])}" for row in rows]


def _text_of_doubt(rows: list[dict[str, Any]], waiting: list[str], down: list[str], *, is_done: bool) -> str:
    lines = _lines_of_doubt(rows)
    if not waiting:
        lines.append("no running bookie is in doubt of the metadata store")
    elif is_done:
        lines.append(f"accepted for {', '.join(waiting)}: the next sweep drops {len(rows)} ledgers")
    else:
        lines.append(f"{len(rows)} ledgers are in doubt, nothing was changed")
    if down:
        lines.append(f"down, and not looked at: {', '.join(down)}")
    return "\n".join(lines)


async def _ledgers_of(record: BookieRecord, below: int) -> set[int]:
    """Return the ids below a limit of the ledgers that a running bookie holds."""
    error: BookKeeperError | None = None
    for address in record.addresses:
        try:
            connection = await connect(
                address, bookie_id=record.bookie_id, instance_id="", timeout_s=_CALL_TIMEOUT_S
            )
        except BookieUnavailableError as raised:
            error = raised
            continue
        try:
            return await list_ledgers(connection, below, _CALL_TIMEOUT_S)
        finally:
            connection.close()
    raise error or BookieUnavailableError(f"bookie {record.bookie_id} has no address")


@command(app, "list")
async def list_(invocation: Invocation) -> None:
    """List the cluster's bookies: those that run, and those known to it that do not."""
    async with await open_store(invocation.metadata_uri) as store:
        running = await available_bookies(store)
        orders = (await Orders.read(store)).by_bookie
        known = {*await registered_bookies(store), *running, *orders}
    rows = []
    for bookie_id in sorted(known):
        record = running.get(bookie_id)
        order = orders[bookie_id].mode if bookie_id in orders else None
        state = "down" if record is None else "writable" if record.is_writable else "read-only"
        rows.append(
            {
                "bookie_id": bookie_id,
                "state": state,
                "order": order,
                "addresses": record.addresses if record else None,
                "rack": record.rack or None if record else None,
            }
        )
    invocation.output.rows(rows, ("bookie_id", "state", "order", "addresses", "rack"))


@command(app, "inspect")
async def inspect_(
    invocation: Invocation,
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            exists=True,
            file_okay=False,
            help="All directories of the bookie.",
            show_default=False,
        ),
    ],
) -> int:
    """Look at a bookie's directories while it does not run: segments, ledgers, and damage. Changes nothing.

    Draws the conclusions that a start would draw, and checks every record of every segment. No file is
    opened for writing. A directory that a bookie runs on is refused. No metadata store is needed.

    The exit code is 0 if nothing is damaged. It is 1 if something is damaged, missing or in contradiction, or
    the bookie has a mark of lost data.
    """
    disk, paths = ReadOnlyDisk(), _absolute(directories)
    cookies = [await read_cookie(disk, path) for path in paths]
    ages = [
        None if cookie is None else await read_age(disk, path, owner_of(cookie))
        for path, cookie in zip(paths, cookies, strict=True)
    ]
    held = [one.durable for one in ages if one is not None]
    async with invocation.output.tracking("inspect") as show:
        inspector = Inspector(
            disk, paths, lambda done, total: show(done // MIB, total // MIB, "MiB of segments"), earlier=held
        )
        found = await inspector.run()
    age = None if ages[0] is None else asdict(ages[0])
    document = {**asdict(found), "cookie": asdict(found.cookie), "age": age, "is_damaged": found.is_damaged}
    from client_aio.cli.text import inspection_text  # it needs the client, which few bookies need

    invocation.output.document(document, text=inspection_text(found, age))
    return Exit.FAILURE if found.is_damaged else Exit.OK


@command(app, "info")
async def info(
    invocation: Invocation,
    bookie: Annotated[
        str,
        typer.Argument(
            metavar="BOOKIE",
            help="A bookie's id, or HOST:PORT.",
            show_default=False,
            autocompletion=complete_bookies,
        ),
    ],
) -> None:
    """Show a running bookie's figures: queue, group sizes, fsync latency, segments, disk."""
    bookie_id, addresses = "", [bookie]
    if invocation.metadata:
        async with await open_store(invocation.metadata_uri) as store:
            record = (await available_bookies(store)).get(bookie)
            if record is not None:
                bookie_id, addresses = record.bookie_id, record.addresses
            elif ":" not in bookie:
                known = ", ".join(await registered_bookies(store)) or "none"
                raise BookieUnavailableError(
                    f"bookie {check_bookie_id(bookie)} is not running; the cluster's bookies: {known}"
                )
    for address in addresses[:-1]:
        with suppress(BookieUnavailableError):
            return await _show_info(invocation, bookie_id, address)
    address_of("BOOKIE", addresses[-1])
    return await _show_info(invocation, bookie_id, addresses[-1])


async def _show_info(invocation: Invocation, bookie_id: str, address: str) -> None:
    connection = await connect(address, bookie_id=bookie_id, instance_id="", timeout_s=_CALL_TIMEOUT_S)
    try:
        _, body = await connection.call(Info(), Done, timeout_s=_CALL_TIMEOUT_S)
    finally:
        connection.close()
    try:
        document = dict(json.loads(bytes(body)))
    except MALFORMED as error:
        raise MalformedFrameError(f"{address} tells of itself what is no JSON object: {error}") from error
    invocation.output.document(document)
