"""`bookie-aio ledger`: write, read and look after ledgers. Standard input and output are pipes."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

import client_aio
from client_aio.autorecovery.survey import LedgerFilter, select_ledgers
from client_aio.autorecovery.verification import Verification
from client_aio.cli.completion import (
    complete_bookies,
    complete_ledgers_and_names,
    complete_logs,
)
from client_aio.cli.exit_codes import Exit
from client_aio.cli.input import ask, delete_each, read_batches, size_of
from client_aio.cli.known import check_bookie, check_filter
from client_aio.cli.options import (
    RATE_MIB_MAX,
    Invocation,
    PasswordFile,
    Placement,
    PlacementOption,
    command,
    password_of,
    usage_error,
)
from client_aio.cli.output import Format, Output
from client_aio.cli.text import (
    custom_of,
    draw_ledger,
    draw_replicas,
    entries_text,
    given_up_text,
    ledger_row,
    text_of,
    text_of_repair,
    verification_text,
)
from client_aio.config import MIB, ClientConfig
from client_aio.core.log_chain import owner_of
from client_aio.unbounded.operations import check_name_or_id
from metadata.backends.uri import open_store
from metadata.errors import MetadataCorruptError
from metadata.ids import LEDGER_ID_MAX
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC, LedgerMetadata

app = typer.Typer(no_args_is_help=True, help="Write, read and look after ledgers.")

NameOrId = Annotated[
    str,
    typer.Argument(
        metavar="LEDGER",
        help="The ledger's id; an unbounded one's name or id.",
        show_default=False,
        autocompletion=complete_ledgers_and_names,
    ),
]
Ensemble = Annotated[int, typer.Option("--ensemble", "-e", min=1, help="Bookies per fragment (E).")]
WriteQuorum = Annotated[
    int | None, typer.Option("--write-quorum", "-w", min=1, help="Copies of each entry (Qw); default: E.")
]
AckQuorum = Annotated[
    int | None,
    typer.Option("--ack-quorum", "-a", min=1, help="Copies to wait for (Qa); default: the majority of Qw."),
]
Digest = Annotated[
    str | None,
    typer.Option(
        help="crc32c, or hmac-sha256, which needs a password; default: the latter where there is a password."
    ),
]
Custom = Annotated[list[str] | None, typer.Option("--custom", metavar="KEY=VALUE", help="Custom metadata.")]
OfBookie = Annotated[
    str | None,
    typer.Option(
        "--bookie",
        metavar="BOOKIE",
        help="Only ledgers that name this bookie.",
        autocompletion=complete_bookies,
    ),
]
InState = Annotated[
    client_aio.LedgerState | None,
    typer.Option("--state", case_sensitive=False, help="Only ledgers in this state."),
]
OfLog = Annotated[
    str | None,
    typer.Option("--log", metavar="NAME", help="Only ledgers of this log.", autocompletion=complete_logs),
]
UnderReplicated = Annotated[
    bool,
    typer.Option(
        "--under-replicated",
        help="Only ledgers of which copies are lacking: a bookie is down, or auto recovery found it.",
    ),
]
Newline = Annotated[
    bool,
    typer.Option("--newline/--no-newline", help="End each entry with a newline."),
]
NewlineAsWritten = Annotated[
    bool | None,
    typer.Option(
        "--newline/--no-newline",
        help="End each entry with a newline; default: if the input was cut into lines when it was written.",
        show_default=False,
    ),
]

_ID_DIGITS_MAX = len(str(LEDGER_ID_MAX))

CUT_INTO_LINES = {"bookie-aio.cut": b"lines"}
"""Custom metadata of a ledger whose entries are lines without their newlines: `cat` adds the newlines."""


class Protection(TypedDict):
    """The digest and the password of a ledger, as arguments of `create_ledger`."""

    digest: str
    password: bytes


class Quorums(TypedDict):
    """The ensemble size and the two quorums of a ledger, as arguments of `create_ledger`."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int


def name_or_id(text: str) -> str | int:
    """Return the id in a text, or the name: no name begins with a digit."""
    if not (text.isascii() and text.isdecimal()):
        return text
    if len(text) > _ID_DIGITS_MAX:
        usage_error(f"ledger id {text[:40]} is above the highest one, {LEDGER_ID_MAX}")
    return int(text)


def check_input(invocation: Invocation, source: str, chunk_bytes: int | None = None) -> int | None:
    """Return the size of an input, as `size_of` does; refuse chunks that no entry has room for."""
    limit = invocation.settings.made("client", ClientConfig).entry_bytes_max
    if chunk_bytes is not None and chunk_bytes > limit:
        usage_error(f"--chunk-bytes {chunk_bytes:,} is above the limit of an entry, {limit:,} bytes")
    return size_of(source)


def is_cut_into_lines(metadata: LedgerMetadata) -> bool:
    """Return whether `ledger write` or `log append` cut the ledger's input into lines."""
    return metadata.custom.items() >= CUT_INTO_LINES.items()


def protection(digest: str | None, password_file: Path | None) -> Protection:
    """Return the digest and the password; the default digest is HMAC with a password, a CRC without."""
    password = password_of(password_file)
    return {"digest": digest or (DIGEST_HMAC if password else DIGEST_CRC), "password": password}


def quorums(ensemble: int, write_quorum: int | None, ack_quorum: int | None) -> Quorums:
    """Return the quorums with defaults for those left out."""
    write_quorum = ensemble if write_quorum is None else write_quorum
    ack_quorum = write_quorum // 2 + 1 if ack_quorum is None else ack_quorum
    return {"ensemble_size": ensemble, "write_quorum": write_quorum, "ack_quorum": ack_quorum}


@command(app, "create")
async def create(
    invocation: Invocation,
    ensemble: Ensemble = 3,
    write_quorum: WriteQuorum = None,
    ack_quorum: AckQuorum = None,
    digest: Digest = None,
    password_file: PasswordFile = None,
    custom: Custom = None,
    placement: PlacementOption = Placement.WEIGHTED,
    unbounded: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Make an unbounded ledger of that name: many may write to it, one after another.",
        ),
    ] = None,
) -> None:
    """Create an empty ledger and print its id.

    The ledger stays OPEN and empty: only the client that creates a bounded ledger can write to it. For data
    from a file or a pipe use `ledger write`. An unbounded ledger is written by each client that takes it
    over.
    """
    async with invocation.connect(placement=placement.policy) as client:
        sizes, guard = quorums(ensemble, write_quorum, ack_quorum), protection(digest, password_file)
        if unbounded is not None:
            ledger_id = await client.create_unbounded_ledger(
                unbounded, **sizes, **guard, custom_metadata=custom_of(custom)
            )
        else:
            ledger = await client.create_ledger(**sizes, **guard, custom_metadata=custom_of(custom))
            ledger_id = ledger.ledger_id
        invocation.output.value("ledger_id", ledger_id)


@command(app, "takeover")
async def takeover(
    invocation: Invocation,
    ledger_id: NameOrId,
    source: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="What to write to it, line by line; - is standard input."),
    ] = None,
    seal: Annotated[bool, typer.Option("--seal", help="Close the ledger for good behind that.")] = False,
    trim_before: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="ENTRY",
            help="Drop the fragments that lie as a whole before an entry. Alone, this takes nothing over.",
        ),
    ] = None,
    password_file: PasswordFile = None,
    placement: PlacementOption = Placement.WEIGHTED,
) -> None:
    """TAKE OVER an unbounded ledger, write FILE to it, if one is named, and leave it to whoever comes next.

    Whoever writes to it now is shut out, and gets an error. What was acknowledged is kept. Without FILE this
    ends the work of a writer that nobody can reach, and says where the ledger ends.

    With --trim-before and neither FILE nor --seal this is `ledger trim`: the writer goes on.
    """
    output, which, password = invocation.output, name_or_id(ledger_id), password_of(password_file)
    if source is not None:
        check_input(invocation, source)  # before the writer is shut out
    async with invocation.connect(placement=placement.policy) as client:
        if trim_before is not None:  # first: this may free the space that the takeover needs
            first_entry = await client.trim_unbounded_ledger(which, trim_before, password=password)
            if source is None and not seal:
                _say_trimmed(output, ledger_id, first_entry)
                return
        async with client.open_unbounded_ledger(which, create=False, password=password) as ledger:
            if source is not None:
                await _add_input(output, ledger, source, None, False)
            if trim_before is not None:
                await ledger.trim(trim_before)
            if seal:
                await ledger.close(seal=True)
            document = {
                "ledger_id": ledger.ledger_id,
                "term": ledger.term,
                "first_entry": ledger.first_entry,
                "last_entry": ledger.last_add_confirmed,
                "length": ledger.length,
                "sealed": seal,
            }
    text = f"ledger {ledger.ledger_id}, term {ledger.term}: "
    text += entries_text(ledger.first_entry, ledger.last_add_confirmed)
    output.document(document, text=f"{text}{', sealed' if seal else ''}")


@command(app, "trim")
async def trim(
    invocation: Invocation,
    ledger_id: NameOrId,
    before: Annotated[
        int, typer.Argument(min=0, metavar="ENTRY", help="The first entry to keep.", show_default=False)
    ],
    password_file: PasswordFile = None,
) -> None:
    """Drop the fragments of an unbounded ledger that lie as a whole before an entry. Never fences.

    Only the metadata are changed, so this frees space on full disks too. The last fragment is kept.
    """
    async with invocation.connect() as client:
        first_entry = await client.trim_unbounded_ledger(
            name_or_id(ledger_id), before, password=password_of(password_file)
        )
    _say_trimmed(invocation.output, ledger_id, first_entry)


def _say_trimmed(output: Output, ledger_id: str, first_entry: int) -> None:
    output.document(
        {"ledger": ledger_id, "first_entry": first_entry},
        text=f"ledger {ledger_id} begins at entry {first_entry}",
    )


@command(app, "write")
async def write(
    invocation: Invocation,
    source: Annotated[str, typer.Argument(metavar="FILE", help="A file; - is standard input.")] = "-",
    chunk_bytes: Annotated[
        int | None, typer.Option(min=1, help="Cut into entries of this size instead of into lines.")
    ] = None,
    keep_newline: Annotated[
        bool, typer.Option("--keep-newline", help="Leave the newline on each line.")
    ] = False,
    ensemble: Ensemble = 3,
    write_quorum: WriteQuorum = None,
    ack_quorum: AckQuorum = None,
    digest: Digest = None,
    password_file: PasswordFile = None,
    custom: Custom = None,
    placement: PlacementOption = Placement.WEIGHTED,
) -> None:
    """Create a ledger, write FILE to it line by line, close it, and print its id.

    `ledger cat` prints the same bytes again, with a newline at the end of the last line.

    If it is interrupted, or reading or writing fails, the ledger stays OPEN with what was written.
    """
    check_input(invocation, source, chunk_bytes)  # before a ledger is created
    output = invocation.output
    custom_metadata = custom_of(custom)
    if chunk_bytes is None and not keep_newline:
        custom_metadata |= CUT_INTO_LINES
    async with (
        invocation.connect(placement=placement.policy) as client,
        client.create_ledger(
            **quorums(ensemble, write_quorum, ack_quorum),
            **protection(digest, password_file),
            custom_metadata=custom_metadata,
        ) as ledger,
    ):
        output.note(f"writing ledger {ledger.ledger_id}")  # so that the id is known after an interruption
        try:
            await _add_input(output, ledger, source, chunk_bytes, keep_newline)
        except asyncio.CancelledError:
            output.note(
                f"interrupted: ledger {ledger.ledger_id} stays OPEN with what was acknowledged; "
                f"`bookie-aio ledger recover {ledger.ledger_id}` closes it"
            )
            raise
        document = {
            "ledger_id": ledger.ledger_id,
            "entries": ledger.last_add_confirmed + 1,
            "bytes": ledger.length,
        }
    output.document(document, text=str(ledger.ledger_id))
    output.note(f"{document['entries']:,} entries, {document['bytes']:,} bytes")


async def _add_input(
    output: Output, ledger: client_aio.LedgerWriter, source: str, chunk_bytes: int | None, keep_newline: bool
) -> None:
    """Add the entries of a file or a pipe, and wait until they are acknowledged."""
    length = ledger.length
    with output.progress() as progress:
        task = progress.add_task(f"ledger {ledger.ledger_id}", total=size_of(source), figures="")
        async with aclosing(read_batches(source, chunk_bytes, keep_newline)) as batches:
            async for entries in batches:
                for entry in entries:
                    ledger.add_entry(entry)
                await ledger.drain()
                figures = f"{ledger.last_add_confirmed + 1:,} entries"
                progress.update(task, completed=ledger.length - length, figures=figures)
        await ledger.flush()


@command(app, "cat")
async def cat(
    invocation: Invocation,
    ledger_id: NameOrId,
    first: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, help="The first entry; default: the first there is.", show_default=False
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", min=-1, help="The last entry; default: the LAC.")
    ] = None,
    newline: NewlineAsWritten = None,
    password_file: PasswordFile = None,
) -> None:
    """Write a ledger's entries to standard output.

    Prints what `ledger write` read: entries that were lines end with a newline again. Prints other entries
    exactly as they are, one after another.

    Reads up to the last entry confirmed, also of a ledger that is being written. Never fences.
    """
    async with (
        invocation.connect() as client,
        client.open_ledger(name_or_id(ledger_id), password=password_of(password_file)) as reader,
    ):
        if newline is None:
            newline = is_cut_into_lines(reader.metadata)
        first = reader.metadata.first_entry if first is None else first
        # Raises where too few bookies answer: a lower LAC would make the output silently short.
        stop = max(await reader.read_last_add_confirmed(), first - 1) if last is None else last
        if not invocation.output.is_table:
            async with aclosing(reader.read(first, stop)) as entries:
                await _print_entries(invocation, entries)
            return
        async with aclosing(reader.read_batches(first, stop)) as batches:
            async for batch in batches:
                if newline:
                    put_bytes(b"".join(piece for entry in slices(batch) for piece in (entry, b"\n")))
                else:
                    put_bytes(batch.buffer)
        sys.stdout.buffer.flush()


def slices(batch: Any) -> Iterator[bytes]:
    """Yield the entries of a batch."""
    for start, end in pairwise(batch.offsets):
        yield bytes(batch.buffer[start:end])


@command(app, "tail")
async def tail(
    invocation: Invocation,
    ledger_id: NameOrId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the ledger is closed, or sealed.")
    ] = False,
    count: Annotated[int, typer.Option("--entries", "-n", min=0, help="How many of the last entries.")] = 10,
    newline: Newline = True,
    password_file: PasswordFile = None,
) -> None:
    """Write a ledger's last entries to standard output, and with -f what is added from then on.

    Ends when the ledger is closed. Never fences.
    """
    async with (
        invocation.connect() as client,
        client.open_ledger(name_or_id(ledger_id), password=password_of(password_file)) as reader,
    ):
        last = reader.last_add_confirmed if follow else await reader.read_last_add_confirmed()
        first = max(last + 1 - count, reader.metadata.first_entry)
        source = reader.tail(from_entry=first) if follow else reader.read(first, last)
        async with aclosing(source) as entries:
            await _print_entries(invocation, entries, ending=b"\n" if newline else b"")


async def _print_entries(invocation: Invocation, entries: Any, ending: bytes = b"") -> None:
    if invocation.output.is_table:
        async for entry in entries:
            put_bytes(entry.data + ending)
            sys.stdout.buffer.flush()
        return
    with invocation.output.stream() as put:
        async for entry in entries:
            put({"entry_id": entry.entry_id, **text_of(entry.data)}, "")


def put_bytes(data: bytes | memoryview) -> None:
    """Write to standard output, which is flushed when the command ends."""
    sys.stdout.buffer.write(data)


@command(app, "list")
async def list_(
    invocation: Invocation,
    ids_only: Annotated[
        bool, typer.Option("--ids", help="Only the ids, one a line; without a filter, reads no metadata.")
    ] = False,
    bookie: OfBookie = None,
    state: InState = None,
    log: OfLog = None,
    under_replicated: UnderReplicated = False,
) -> int:
    """List the ledgers in the metadata store. With damaged metadata among them the exit code is 5."""
    wanted, ended = LedgerFilter(bookie, state, log, under_replicated), Exit.OK
    async with invocation.connect() as client:
        if ids_only and wanted.lets_all_through:
            async with aclosing(client.list_ledgers()) as ledgers:
                with invocation.output.stream() as put:
                    async for ledger_id in ledgers:
                        put({"ledger_id": ledger_id}, str(ledger_id))
            return ended
        rows: list[dict[str, Any]] = []
        async with (
            invocation.output.tracking("list", every_s=None) as show,
            aclosing(
                select_ledgers(client._context, wanted, lambda count: show(count, None, "ledgers"))
            ) as found,
        ):
            async for one in found:
                if isinstance(one.metadata, MetadataCorruptError):
                    invocation.output.note(f"bookie-aio: {one.metadata}")
                    ended = Exit.DAMAGED
                    continue
                copies = {} if one.good_copies is None else {"good_copies": one.good_copies}
                reasons = {"reasons": one.reasons} if copies else {}
                rows.append({**ledger_row(one.metadata), **copies, **reasons})
        if not rows:
            await check_filter(client, wanted)
    if ids_only:
        with invocation.output.stream() as put:
            for row in rows:
                put({"ledger_id": row["ledger_id"]}, str(row["ledger_id"]))
        return ended
    columns = ["ledger_id", "state", "quorums", "fragments", "last_entry", "length", "created", "name"]
    if under_replicated:
        columns[2:2] = ["good_copies", "reasons"]
    invocation.output.rows(rows, columns)
    return ended


@command(app, "verify")
async def verify(
    invocation: Invocation,
    ledgers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LEDGER]...",
            help="Ids, or names of unbounded ones; default: all, or those that the filters let through.",
            show_default=False,
            autocompletion=complete_ledgers_and_names,
        ),
    ] = None,
    bookie: OfBookie = None,
    state: InState = None,
    log: OfLog = None,
    under_replicated: UnderReplicated = False,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=RATE_MIB_MAX, metavar="MIB", help="MiB per second that are read at most."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="How many ledgers are read at once.")] = 4,
    password_file: PasswordFile = None,
) -> int:
    """Read every copy of every entry from its own bookie, check it, and report what is missing or damaged.

    Never fences, changes nothing, and reads a ledger that changes meanwhile again. The last fragment of a
    ledger that is not closed is left out. With a password the authentication codes of ledgers that have it
    are checked, else only checksums.

    The exit code is 0 if every copy is good, and 1 if copies are missing, damaged or cannot be read. It is 2
    if data is at risk: some entry has one good copy at most, or none. As JSON lines, the summary comes last.
    """
    wanted, output = LedgerFilter(bookie, state, log, under_replicated), invocation.output
    if ledgers and not wanted.lets_all_through:
        usage_error("name ledgers, or give filters, and not both")
    async with invocation.connect() as client:
        named = [await client.ledger_metadata(name_or_id(text)) for text in ledgers or ()]

        async def chosen() -> AsyncGenerator[tuple[int, LedgerMetadata | MetadataCorruptError], None]:
            for metadata in named:
                yield metadata.ledger_id, metadata
            if not named:
                async with aclosing(select_ledgers(client._context, wanted)) as selected:
                    async for one in selected:
                        yield one.ledger_id, one.metadata

        total = len(named) or (await _count(client) if wanted.lets_all_through else None)
        verification = Verification(
            client._context,
            password=password_of(password_file),
            bytes_per_s=None if rate is None else rate * MIB,
            ledgers_at_once=at_once,
        )
        totals, began, bad = verification.totals, time.monotonic(), []
        async with output.tracking("verify") as show, aclosing(verification.run(chosen())) as found:
            async for one in found:
                figures = f"ledgers, {totals.intact:,} copies intact, {totals.missing + totals.damaged:,} not"
                show(totals.ledgers, total, f"{figures}, {totals.bytes_read / MIB:,.0f} MiB")
                if one.condition:
                    bad.append(one)
                    if output.form is Format.JSONL:
                        output.document(one.row())
        if not totals.ledgers:
            await check_filter(client, wanted)
    summary = {**asdict(totals), "condition": totals.condition.label, "seconds": time.monotonic() - began}
    if output.form is Format.JSONL:
        output.document({"summary": summary})
    else:
        rows = [one.row() for one in bad]
        output.document({**summary, "bad_ledgers": rows}, text=verification_text(bad, totals))
    return int(totals.condition)


async def _count(client: client_aio.Client) -> int:
    async with aclosing(client.list_ledgers()) as ledgers:
        return sum([1 async for _ in ledgers])


@command(app, "show")
async def show(
    invocation: Invocation,
    ledger_id: NameOrId,
    with_replicas: Annotated[
        bool, typer.Option("--replicas", help="Ask the bookies, too: entries missing, and data they lost.")
    ] = False,
) -> None:
    """Show a ledger's metadata, with a drawing of its fragments. Never fences.

    Of an unbounded ledger with many fragments the last ones are shown, and how many are in pages before
    those; --replicas is about all of them.
    """
    async with invocation.connect() as client:
        metadata = await client.ledger_metadata(name_or_id(ledger_id))
        replicas = await client.ledger_replicas(metadata.ledger_id) if with_replicas else []
    text = draw_ledger(metadata)
    if with_replicas:
        text += "\n\n" + draw_replicas(replicas)
    invocation.output.document(
        {
            **ledger_row(metadata),
            "digest": metadata.digest,
            "term": metadata.term,
            "first_entry": metadata.first_entry,
            "below_write_quorum_from": metadata.below_write_quorum_from,
            "log": owner_of(metadata),
            "given_up": None if metadata.given_up is None else asdict(metadata.given_up),
            "absent": [each._asdict() for each in metadata.absent],
            "custom": {key: text_of(value).get("text", value) for key, value in metadata.custom.items()},
            "fragments_in_pages": len(metadata.rows) - len(metadata.fragments),
            "fragments": [
                {
                    "first_entry": fragment.first_entry,
                    "content_term": fragment.content_term,
                    "bookies": list(fragment.bookies),
                }
                for fragment in metadata.fragments
            ],
            **({"replicas": list(map(asdict, replicas))} if with_replicas else {}),
        },
        text=text,
    )


@command(app, "recover")
async def recover(
    invocation: Invocation,
    ledger_id: NameOrId,
    at_ack_quorum: Annotated[
        bool,
        typer.Option(
            "--at-ack-quorum", help="With guaranteed write quorum: close it with Qa copies of some entries."
        ),
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Close it behind what can be read, where bookies are lost for good. GIVES UP acknowledged "
            "entries that no other bookie has.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
    password_file: PasswordFile = None,
) -> None:
    """Take over a bounded ledger: fence its writer, find its end, and close it.

    A writer that is still alive gets an error. A ledger that is CLOSED is left as it is. Where too few
    bookies answer to find the end, nobody is fenced. With --accept-loss, the ledger's metadata say what was
    given up, and readers of a log meet a gap there. Add --at-ack-quorum if the ledger has guaranteed write
    quorum: nothing is given up where Qa copies are enough, and the missing ones are not waited for.

    An unbounded ledger is taken over by `ledger takeover`. Where lost bookies keep its end from being found,
    --accept-loss seals it.
    """
    if accept_loss:
        ask(f"Close ledger {ledger_id} even if acknowledged entries are lost by that?", is_answered=yes)
    async with (
        invocation.connect() as client,
        client.open_ledger(
            name_or_id(ledger_id),
            recover=True,
            at_ack_quorum=at_ack_quorum,
            accept_loss=accept_loss,
            password=password_of(password_file),
        ) as ledger,
    ):
        last, length, lost = ledger.last_add_confirmed, ledger.length, ledger.metadata.given_up
        short_from, first = ledger.metadata.below_write_quorum_from, ledger.metadata.first_entry
    text = f"ledger {ledger_id} is closed, with {entries_text(first, last)}, {length:,} bytes"
    if short_from is not None:
        text += f"; from entry {short_from} on some have fewer copies than guaranteed: repair it"
    if lost is not None:
        text += f"; given up: {given_up_text(lost, last)}"
    invocation.output.document(
        {
            "ledger_id": ledger.ledger_id,
            "last_entry": last,
            "length": length,
            "below_write_quorum_from": short_from,
            "given_up": None if lost is None else asdict(lost),
        },
        text=text,
    )


@command(app, "repair")
async def repair(
    invocation: Invocation,
    ledger_id: NameOrId,
    replace: Annotated[
        str,
        typer.Option(
            metavar="BOOKIE",
            help="The bookie that is lost, or that lost data.",
            show_default=False,
            autocompletion=complete_bookies,
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="BOOKIE",
            help="The bookie to copy to; default: one that is chosen. The same again: repair it in place.",
            autocompletion=complete_bookies,
        ),
    ] = None,
    recover_after_s: Annotated[
        float | None,
        typer.Option(
            "--recover-after",
            min=0,
            metavar="SECONDS",
            help="Take over a ledger that is not closed: wait so long, then fence its writer and close it.",
        ),
    ] = None,
    placement: PlacementOption = Placement.WEIGHTED,
    password_file: PasswordFile = None,
) -> int:
    """Copy the entries that a bookie owes to another bookie, and name that bookie in the ledger's metadata.

    Safe beside a live writer, which is neither fenced nor disturbed. Of a ledger that is not closed, the last
    fragment is left alone, unless --recover-after is given. May be interrupted, and run again. Copying needs
    no password, unless the new bookie has entries of former terms in their place. Taking over a ledger that
    has a password needs it. A bookie that is in no fragment needs no repair; an unknown one is an error.

    Entries that no bookie returns are named, and the others are copied; the exit code is then 5.
    """
    output = invocation.output
    async with invocation.connect(placement=placement.policy) as client:
        metadata = await client.ledger_metadata(name_or_id(ledger_id))
        which = metadata.ledger_id
        async with output.tracking(f"ledger {ledger_id}") as show:

            def show_progress(now: client_aio.RepairProgress) -> None:
                verb = "verifying" if now.is_verifying else "copying"
                figures = f"entries, {verb} from entry {now.first_entry:,}, {now.bytes_copied:,} bytes"
                show(now.entries_done, now.entries_total, figures)

            report = await client.repair_ledger(
                which,
                replace=replace,
                by=by,
                recover_after_s=recover_after_s,
                password=password_of(password_file),
                on_progress=show_progress,
            )
    if not (report.fragments or report.is_last_fragment_left or report.was_recovered):
        async with await open_store(invocation.metadata_uri) as store:
            await check_bookie(store, replace)
    output.document(asdict(report), text=text_of_repair(report, is_unbounded=metadata.is_unbounded))
    return Exit.DAMAGED if any(fragment.lost for fragment in report.fragments) else Exit.OK


@command(app, "delete")
async def delete(
    invocation: Invocation,
    ledger_ids: Annotated[
        list[str],
        typer.Argument(
            metavar="LEDGER...",
            help="Ids, or names of unbounded ones.",
            show_default=False,
            autocompletion=complete_ledgers_and_names,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete even what a log lists; its readers then meet a gap.")
    ] = False,
    password_file: PasswordFile = None,
) -> int:
    """Delete ledgers, for good. On a terminal it asks first. A ledger that a log lists is refused."""
    for text in ledger_ids:
        check_name_or_id(name_or_id(text))  # before the first one is deleted
    ask(f"Delete {', '.join(ledger_ids)} and every entry in it?", is_answered=yes)
    password = password_of(password_file)
    async with invocation.connect() as client:

        async def delete_one(text: str) -> int | str:
            which = name_or_id(text)
            await client.delete_ledger(which, force=force, password=password)
            return which

        return await delete_each(invocation.output, ledger_ids, delete_one, client_aio.NoSuchLedgerError)
