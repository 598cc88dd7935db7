"""`bookie-aio metadata`: a cluster's metadata as a file of JSON lines, and back into any store."""

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

from client_aio.cli.input import ask, read_chunks
from client_aio.cli.options import Invocation, command
from client_aio.config import MIB
from metadata.access.dump import LINE_BYTES_MAX, Restore, check_dump, dump, foreign_names
from metadata.backends.uri import open_store
from metadata.errors import NoSuchClusterError

app = typer.Typer(no_args_is_help=True, help="Dump a cluster's metadata as JSON lines, and restore a dump.")

File = Annotated[str, typer.Argument(metavar="FILE|-", help="The dump; - for a pipe.", show_default=False)]


@command(app, "dump")
async def dump_(invocation: Invocation, file: File) -> None:
    """Write all that a cluster's metadata store holds to FILE, or with - to standard output.

    The cluster may run meanwhile. Ephemeral keys, such as the registrations of running bookies, are left
    out. The last line has the sums and a checksum, so that a dump that was cut off is refused. FILE is
    replaced when the dump is complete, and not before.
    """
    output, last, size, keys = invocation.output, b"", 0, 0
    async with (
        await open_store(invocation.metadata_uri) as store,
        output.tracking("dump") as show,
        _written(file) as target,
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


@asynccontextmanager
async def _written(file: str) -> AsyncIterator[IO[bytes]]:
    """Yield a file to write; it takes its name when it is complete, and durable."""
    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    draft = path.with_name(f"{path.name}.new")
    try:
        with _created(draft) as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _created(path: Path) -> IO[bytes]:
    """Create a file for no other user of the machine, as the embedded store is."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


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
    output = invocation.output
    with _source(file) as source:
        if file == "-":
            async with aclosing(read_chunks(file)) as chunks:
                async for data in chunks:
                    source.write(data)

        def lines() -> Iterator[bytes]:
            source.seek(0)
            while line := source.readline(LINE_BYTES_MAX + 1):
                yield line

        summary = check_dump(lines())
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
        async with (
            await open_store(invocation.metadata_uri, create=True) as store,
            output.tracking("restore") as show,
        ):
            counter = await restoring.run(
                store,
                clear=clear,
                least_id=least_id,
                on_progress=lambda done: show(done, summary.keys, "keys"),
            )
    figures = {
        "counter": counter,
        "written": restoring.keys_written,
        "present": restoring.keys_present,
        "removed": restoring.keys_removed,
    }
    text = f"restored: {summary.keys:,} keys, {summary.ledgers:,} ledgers; the next ledger id is {counter:,}"
    output.document({**summary._asdict(), "dry_run": False, **figures}, text=text)


async def _check_target(uri: str, restoring: Restore, *, clear: bool) -> None:
    """Raise where a restore into the store would be refused. A store without a cluster is not looked into."""
    try:
        store = await open_store(uri)
    except NoSuchClusterError:
        return
    async with store:
        await restoring.look(store, clear=clear)


def _source(file: str) -> IO[bytes]:
    """Open the dump; a pipe is kept in an unnamed file, since it is read twice."""
    if file == "-":
        return tempfile.TemporaryFile()
    return Path(file).open("rb")
