"""`bookie-aio metadata`: a cluster's metadata as a file of JSON lines, and back into any store."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from client_aio.cli.files import replacing
from client_aio.cli.input import ask, read_chunks, size_of
from client_aio.cli.options import Invocation, command, usage_error
from client_aio.cli.output import Output
from client_aio.config import MIB
from metadata.access.dump import LINE_BYTES_MAX, DumpSummary, Restore, dump, foreign_names, read_dump
from metadata.backends.uri import SqliteLocation, open_store, parse_uri
from metadata.errors import InvalidArgumentError, NoSuchClusterError

app = typer.Typer(no_args_is_help=True, help="Dump a cluster's metadata as JSON lines, and restore a dump.")

File = Annotated[str, typer.Argument(metavar="FILE|-", help="The dump; - for a pipe.", show_default=False)]

_KEYS_AT_ONCE = 1000


@command(app, "dump")
async def dump_(invocation: Invocation, file: File) -> None:
    """Write all that a cluster's metadata store holds to FILE, or with - to standard output.

    The cluster may run meanwhile. Ephemeral keys, such as the registrations of running bookies, are left
    out. The last line has the sums and a checksum, so that a dump that was cut off is refused. FILE is
    replaced when the dump is complete, and not before.
    """
    output, last, size, keys = invocation.output, b"", 0, 0
    path = None if file == "-" else _target(file, invocation.metadata_uri)
    async with (
        await open_store(invocation.metadata_uri) as store,
        output.tracking("dump") as show,
        _written(path) as target,
        aclosing(dump(store, now_ms=time.time_ns() // 1_000_000)) as lines,
    ):
        for name in await foreign_names(store):
            output.note(f"the key {name!r} is none of a cluster's and is left out")
        async for last in lines:
            target.write(last)
            size += len(last)
            keys += 1
            show(keys, None, f"keys, {size / MIB:,.1f} MiB")
    end = json.loads(last)
    text = f"{end['keys']:,} keys, {end['ledgers']:,} ledgers, {size:,} bytes"
    if file == "-":
        output.note(text)
    else:
        row = {key: end[key] for key in ("keys", "ledgers", "ids", "sha256")}
        output.document({"file": file, "bytes": size, **row}, text=f"{file}: {text}")


def _target(file: str, uri: str) -> Path:
    """Return the path of the dump. It takes the place of what is there: only a dump, or nothing, may be."""
    if not file:
        usage_error("the name of the file is empty: name one, or - for a pipe")
    path = Path(os.path.realpath(file))
    if _is_of_store(path, uri):
        usage_error(f"{file} is a file of the metadata store itself: name another one, or - for a pipe")
    if not path.parent.is_dir():
        usage_error(f"{file} cannot be written: {path.parent} is no directory")
    if path.exists() and not path.is_file():
        usage_error(f"{file} is no regular file: name one, or - for a pipe")
    return path


def _is_of_store(path: Path, uri: str) -> bool:
    """Return whether a path, with all links followed, is an SQLite store's file or one of those beside it."""
    where = parse_uri(uri)
    if not isinstance(where, SqliteLocation):
        return False
    # Where the URI names a link, SQLite's own files are beside its target, and the leases beside the link.
    for store in (Path(os.path.realpath(where.path)), where.path.parent.resolve() / where.path.name):
        if path.parent == store.parent and path.name.startswith(store.name):
            ending = path.name.removeprefix(store.name)
            return ending in ("", "-wal", "-shm", "-journal") or ending.startswith("-leases-")
    return False


@asynccontextmanager
async def _written(path: Path | None) -> AsyncIterator[IO[bytes]]:
    """Yield a file to write; it takes its name when it is complete. None: standard output."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with replacing(path) as target:
        yield target


@command(app, "restore")
async def restore(
    invocation: Invocation,
    file: File,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all that the store holds first; refused without it.")
    ] = False,
    least_id: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**62,
            metavar="ID",
            help="No ledger gets an id below this one any more, beside what the dump says.",
        ),
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the dump, and the store.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
) -> None:
    """Write a dump into an empty metadata store, of any kind: SQLite to ZooKeeper, and back.

    All bookies and clients have to be stopped. The whole dump is checked before anything is written. A dump
    that is damaged, cut off, or of a later version is refused. The store can be used when all is there, and
    not before: if the command is interrupted, run it again with the same dump.

    After it start all bookies before any client. If the dump is older than what the bookies hold, they find
    that, give no id out twice, and drop nothing. `bookie accept-metadata` then has the last word.
    """
    output, size = invocation.output, size_of(file)
    if size is None and clear and not (yes or dry_run):
        # Where standard input is the dump, nobody can answer there.
        usage_error("--clear removes all that the store holds: with a dump from a pipe, say --yes as well")
    with _source(file, size) as source:
        if size is None:
            async with aclosing(read_chunks(file)) as chunks:
                async for data in chunks:
                    source.write(data)

        def lines() -> Iterator[bytes]:
            source.seek(0)
            while line := source.readline(LINE_BYTES_MAX + 1):
                yield line

        summary = await _check(output, lines())
        if dry_run:
            await _check_target(invocation.metadata_uri, Restore(lines, summary), clear=clear)
            text = (
                f"the dump is whole: {summary.keys:,} keys, {summary.ledgers:,} ledgers; nothing was written"
            )
            output.document({**summary._asdict(), "dry_run": True}, text=text)
            return
        question = f"Restore {summary.ledgers:,} ledgers to {invocation.metadata_uri}?"
        ask(question + (" It removes all that is there." if clear else ""), is_answered=yes)
        restoring = Restore(lines, summary)
        counter = await _run(invocation, restoring, summary.keys, clear=clear, least_id=least_id)
    figures = {
        "counter": counter,
        "written": restoring.keys_written,
        "present": restoring.keys_present,
        "removed": restoring.keys_removed,
    }
    text = f"restored: {summary.keys:,} keys, {summary.ledgers:,} ledgers; the next ledger id is {counter:,}"
    output.document({**summary._asdict(), "dry_run": False, **figures}, text=text)


async def _check(output: Output, lines: Iterator[bytes]) -> DumpSummary:
    """Read a dump to its end, and return its summary. Ctrl-C ends it meanwhile."""
    async with output.tracking("check") as show:
        items = enumerate(read_dump(lines))
        while True:
            number, item = next(items)
            if isinstance(item, DumpSummary):
                return item
            if number % _KEYS_AT_ONCE == 0:
                show(number, None, "keys checked")
                await asyncio.sleep(0)


async def _run(invocation: Invocation, restoring: Restore, keys: int, *, clear: bool, least_id: int) -> int:
    """Restore, and return the lowest ledger id that will be given out."""
    output = invocation.output
    async with (
        await open_store(invocation.metadata_uri, create=True) as store,
        output.tracking("restore") as show,
    ):
        try:
            return await restoring.run(
                store,
                clear=clear,
                least_id=least_id,
                on_progress=lambda done: show(done, keys, "keys"),
                on_clear=lambda removed: show(removed, None, "keys removed"),
            )
        except asyncio.CancelledError:
            if restoring.keys_written or restoring.keys_removed:
                output.note("interrupted: run this again with the same dump; nobody can use the store before")
            raise


async def _check_target(uri: str, restoring: Restore, *, clear: bool) -> None:
    """Raise where a restore into the store would be refused. Nothing is made where there is no store."""
    try:
        store = await open_store(uri, needs_cluster=False)
    except NoSuchClusterError:
        where = parse_uri(uri)
        if isinstance(where, SqliteLocation) and not where.path.parent.is_dir():
            raise InvalidArgumentError(f"the directory {where.path.parent} does not exist") from None
        return
    async with store:
        await restoring.look(store, clear=clear)


def _source(file: str, size: int | None) -> IO[bytes]:
    """Open the dump; a pipe, which has no size, is kept in an unnamed file, since it is read twice."""
    return tempfile.TemporaryFile() if size is None else Path(file).open("rb")
