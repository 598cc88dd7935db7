"""`bookie-aio log`: write, read and look after logs. Standard input and output are pipes."""

import enum
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Annotated, Any

import typer

import client_aio
from client_aio.cli.completion import complete_logs
from client_aio.cli.exit_codes import Exit
from client_aio.cli.input import ask, delete_each, read_batches
from client_aio.cli.ledger import (
    CUT_INTO_LINES,
    AckQuorum,
    Custom,
    Digest,
    Ensemble,
    Newline,
    NewlineAsWritten,
    WriteQuorum,
    check_input,
    is_cut_into_lines,
    protection,
    put_bytes,
    quorums,
    slices,
)
from client_aio.cli.options import Invocation, PasswordFile, Placement, PlacementOption, command, password_of
from client_aio.cli.text import custom_of, draw_log, gap_row, link_of, log_row, text_of
from client_aio.core.log_chain import ROLL_BYTES
from client_aio.log.truncation import sweep as sweep_logs
from metadata.model.log import Position, check_log_name

app = typer.Typer(no_args_is_help=True, help="Write, read and look after logs, which are chains of ledgers.")

LogName = Annotated[
    str,
    typer.Argument(metavar="LOG", help="The log's name.", show_default=False, autocompletion=complete_logs),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="POSITION", help="LEDGER:ENTRY, or end; default: the beginning."),
]


class Gaps(enum.StrEnum):
    """What reading does where records are lost."""

    RAISE = "raise"
    SKIP = "skip"

    @property
    def choice(self) -> Any:
        """Return the argument of `read_log`."""
        return self.value


OnGapOption = Annotated[
    Gaps,
    typer.Option(
        "--on-gap",
        help="Where records are lost: fail, or say so on standard error and go on; then the exit code is 5.",
    ),
]


@command(app, "append")
async def append(
    invocation: Invocation,
    name: LogName,
    source: Annotated[str, typer.Argument(metavar="FILE", help="A file; - is standard input.")] = "-",
    chunk_bytes: Annotated[
        int | None, typer.Option(min=1, help="Cut into records of this size instead of into lines.")
    ] = None,
    keep_newline: Annotated[
        bool, typer.Option("--keep-newline", help="Leave the newline on each line.")
    ] = False,
    roll_bytes: Annotated[
        int, typer.Option(min=1, help="Go on to another ledger at about so many bytes.")
    ] = ROLL_BYTES,
    ensemble: Ensemble = 3,
    write_quorum: WriteQuorum = None,
    ack_quorum: AckQuorum = None,
    digest: Digest = None,
    password_file: PasswordFile = None,
    custom: Custom = None,
    placement: PlacementOption = Placement.WEIGHTED,
) -> None:
    """Append FILE to a log line by line, and print the last position. TAKES THE LOG OVER.

    Whoever writes to the log now is shut out, and gets an error. The log is created where there is none.
    `log cat` ends records that were lines with a newline again. If this is interrupted, what was written
    stays in the log.
    """
    size, output, count = check_input(invocation, source, chunk_bytes), invocation.output, 0
    async with (
        invocation.connect(placement=placement.policy) as client,
        client.open_log(
            name,
            roll_bytes=roll_bytes,
            **quorums(ensemble, write_quorum, ack_quorum),
            **protection(digest, password_file),
            custom_metadata=custom_of(custom),
            ledger_metadata=CUT_INTO_LINES if chunk_bytes is None and not keep_newline else {},
        ) as log,
    ):
        with output.progress() as progress:
            task = progress.add_task(f"log {name}", total=size, figures="")
            taken = 0
            async with aclosing(read_batches(source, chunk_bytes, keep_newline)) as batches:
                async for records in batches:
                    for record in records:
                        log.append(record)
                        taken += len(record) + 1
                    count += len(records)
                    await log.drain()
                    progress.update(task, completed=taken, figures=f"{count:,} records")
            await log.flush()
        last = log.last_add_confirmed
    position = None if last is None else str(last)
    output.document({"log": name, "records": count, "last_position": position}, text=position or "–")
    output.note(f"{count:,} records")


@command(app, "create")
async def create(
    invocation: Invocation, name: LogName, custom: Custom = None, password_file: PasswordFile = None
) -> None:
    """Create a log without a record. Disturbs nobody; a log that exists is refused."""
    async with invocation.connect() as client:
        await client.create_log(name, custom_metadata=custom_of(custom), password=password_of(password_file))
    invocation.output.document({"log": name}, text=name)


@command(app, "cat")
async def cat(
    invocation: Invocation,
    name: LogName,
    start: From = None,
    newline: NewlineAsWritten = None,
    on_gap: OnGapOption = Gaps.RAISE,
    password_file: PasswordFile = None,
) -> int:
    """Write a log's records to standard output.

    Prints what `log append` read: records that were lines end with a newline again. Prints other records
    exactly as they are, one after another.

    Reads up to the last record confirmed, also of a log that is being written. Never fences.
    """
    async with invocation.connect() as client:
        source = client.read_log_batches(
            name, start, on_gap=on_gap.choice, password=password_of(password_file)
        )
        ends_lines: dict[int, bool] = {}

        async def is_line(batch: client_aio.LogBatch) -> bool:
            if newline is not None:
                return newline
            if batch.ledger_id not in ends_lines:
                ends_lines.clear()  # The records of a ledger come together.
                metadata = await client.ledger_metadata(batch.ledger_id)
                ends_lines[batch.ledger_id] = is_cut_into_lines(metadata)
            return ends_lines[batch.ledger_id]

        return await _print_batches(invocation, source, is_line)


@command(app, "tail")
async def tail(
    invocation: Invocation,
    name: LogName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is appended, until interrupted.")
    ] = False,
    count: Annotated[int, typer.Option("--records", "-n", min=0, help="How many of the last records.")] = 10,
    start: From = None,
    newline: Newline = True,
    wait: Annotated[
        bool, typer.Option("--wait", help="With -f: wait for a log that does not exist yet.")
    ] = False,
    on_gap: OnGapOption = Gaps.RAISE,
    password_file: PasswordFile = None,
) -> int:
    """Write a log's last records to standard output, and with -f what is appended from then on.

    Follows the log from ledger to ledger, whoever writes to it. Never fences.
    """
    async with invocation.connect() as client:
        password = password_of(password_file)
        where: Position | str | None = start
        if start is None:
            with suppress(*([client_aio.NoSuchLogError] if wait else [])):
                where = await _last_records(client, name, count, password)
        source = client.read_log_batches(
            name, where, follow=follow, wait=wait, on_gap=on_gap.choice, password=password
        )

        async def is_line(_: client_aio.LogBatch) -> bool:
            return newline

        return await _print_batches(invocation, source, is_line)


async def _last_records(
    client: client_aio.Client, name: str, count: int, password: bytes
) -> Position | str | None:
    """Return the position to read from for the last `count` records; None for the log's begin."""
    metadata = await client.log_metadata(name)
    if not count:
        return "end"
    for row in reversed(metadata.rows):
        try:
            async with client.open_ledger(row.ledger_id, password=password) as reader:
                entries = await reader.read_last_add_confirmed() + 1
        except client_aio.NoSuchLedgerError:
            continue  # Reading says so, or shows the gap.
        if entries >= count:
            return max(metadata.begins_at, Position(row.id, entries - count))
        count -= entries
    return None


async def _print_batches(
    invocation: Invocation, source: Any, is_line: Callable[[client_aio.LogBatch], Awaitable[bool]]
) -> int:
    """Print records, and note gaps on standard error; return DAMAGED where there was a gap.

    Args:
        is_line: tells whether the records of a batch are to end with a newline.
    """
    ended = Exit.OK
    async with aclosing(source) as batches:
        if not invocation.output.is_table:
            with invocation.output.stream() as put:
                async for batch in batches:
                    if isinstance(batch, client_aio.LogGap):
                        put({"gap": gap_row(batch)}, "")
                        ended = Exit.DAMAGED
                        continue
                    for record in batch:
                        put({"position": str(record.position), **text_of(record.data)}, "")
            return ended
        async for batch in batches:
            if isinstance(batch, client_aio.LogGap):
                sys.stdout.buffer.flush()
                row = gap_row(batch)
                invocation.output.note(
                    f"bookie-aio: gap from {row['first']} to {row['last'] or 'the end of that ledger'}: "
                    f"{row['reason']}"
                )
                ended = Exit.DAMAGED
                continue
            if await is_line(batch):
                put_bytes(b"".join(piece for record in slices(batch) for piece in (record, b"\n")))
            else:
                put_bytes(batch.buffer)
            sys.stdout.buffer.flush()
    return ended


@command(app, "list")
async def list_(
    invocation: Invocation,
    names_only: Annotated[bool, typer.Option("--names", help="Only the names, one a line.")] = False,
) -> int:
    """List the logs in the metadata store. With damaged metadata among them the exit code is 5."""
    rows, ended = [], Exit.OK
    async with (
        invocation.connect() as client,
        aclosing(client.list_logs()) as names,
    ):
        if names_only:
            with invocation.output.stream() as put:
                async for name in names:
                    put({"log": name}, name)
            return ended
        async for name in names:
            try:
                rows.append(log_row(name, await client.log_metadata(name)))
            except client_aio.NoSuchLogError:
                continue  # deleted meanwhile
            except client_aio.MetadataCorruptError as error:
                invocation.output.note(f"bookie-aio: {error}")
                ended = Exit.DAMAGED
    invocation.output.rows(rows, ("log", "ledgers", "begins_at", "last_ledger", "created"))
    return ended


@command(app, "show")
async def show(
    invocation: Invocation,
    name: LogName,
    ledgers: Annotated[int, typer.Option(min=1, help="How many of its last ledgers to show.")] = 50,
) -> None:
    """Show a log's chain of ledgers: their states, entries, bytes and ensembles. Never fences."""
    links = []
    async with invocation.connect() as client:
        metadata = await client.log_metadata(name)
        for row in metadata.rows[-ledgers:]:
            try:
                links.append(link_of(row, await client.ledger_metadata(row.ledger_id)))
            except client_aio.NoSuchLedgerError:
                links.append(link_of(row, None))
    invocation.output.document(
        {
            **log_row(name, metadata),
            "custom": {key: text_of(value).get("text", value) for key, value in metadata.custom.items()},
            "transactions": metadata.transactions,
            "chain": links,
        },
        text=draw_log(metadata, links),
    )


@command(app, "truncate")
async def truncate(
    invocation: Invocation,
    name: LogName,
    before: Annotated[str, typer.Option(metavar="POSITION", help="The first record to keep: LEDGER:ENTRY.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
    password_file: PasswordFile = None,
) -> None:
    """Drop a log's records before a position, for good. On a terminal it asks first.

    Ledgers that hold nothing else are deleted. A writer and readers further on are not disturbed.
    """
    Position.parse(before)
    ask(f"Delete every record of {name} before {before}?", is_answered=yes)
    async with invocation.connect() as client:
        rows = await client.truncate_log(name, before, password=password_of(password_file))
        metadata = await client.log_metadata(name)
    invocation.output.document(
        {"log": name, "begins_at": str(metadata.begins_at), "deleted": [row.ledger_id for row in rows]},
        text=f"log {name} begins at {metadata.begins_at}; {len(rows):,} ledgers deleted",
    )


@command(app, "delete")
async def delete(
    invocation: Invocation,
    names: Annotated[
        list[str], typer.Argument(metavar="LOG...", show_default=False, autocompletion=complete_logs)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
    password_file: PasswordFile = None,
) -> int:
    """Delete logs with all their ledgers, for good. On a terminal it asks first."""
    for name in names:
        check_log_name(name)  # before the first one is deleted
    ask(f"Delete {', '.join(names)} and every record in it?", is_answered=yes)
    password = password_of(password_file)
    async with invocation.connect() as client:

        async def delete_one(name: str) -> str:
            await client.delete_log(name, password=password)
            return name

        return await delete_each(invocation.output, names, delete_one, client_aio.NoSuchLogError)


@command(app, "sweep")
async def sweep(
    invocation: Invocation,
    older_than_s: Annotated[
        float, typer.Option("--older-than", min=0, metavar="SECONDS", help="Leave younger ledgers alone.")
    ] = 3600.0,
    password_file: PasswordFile = None,
) -> int:
    """Delete what crashes of log writers have left over: ledgers in no log, and pages of lists.

    Safe beside writers and readers of any log. Looks at the metadata of every ledger.
    """
    async with (
        invocation.connect() as client,
        invocation.output.tracking("sweep", every_s=None) as show,
    ):
        report = await sweep_logs(
            client._context,
            client._lists,
            older_than_s=older_than_s,
            password=password_of(password_file),
            on_progress=show,
        )
    invocation.output.document(
        {
            "ledgers": list(report.ledgers),
            "pages": list(report.pages),
            "failures": list(report.failures),
        },
        text=f"{len(report.ledgers):,} ledgers and {len(report.pages):,} pages deleted",
    )
    return Exit.FAILURE if report.failures else Exit.OK
