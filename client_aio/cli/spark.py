"""`bookie-aio spark`: jobs over whole logs and clusters, in Spark.

Only verify, export and import need pyspark; all other commands run without it. `--master` names a Spark
cluster. By default the job runs in this process's own, on all its cores.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from client_aio.cli.exit_codes import Exit
from client_aio.cli.options import Invocation, PasswordFile, command, password_of, usage_error

app = typer.Typer(
    no_args_is_help=True, help=r"Verify, export, import and sum up, in Spark (needs the extra \[spark])."
)

Master = Annotated[str, typer.Option(help="Spark's master, such as spark://host:7077.")]
Log = Annotated[str | None, typer.Option("--log", metavar="NAME", help="The ledgers of this log.")]
Ledgers = Annotated[list[int] | None, typer.Option("--ledger", metavar="ID", help="These ledgers.")]
_LOCAL = "local[*]"


@contextmanager
def _session(invocation: Invocation, master: str, what: str) -> Iterator[Any]:
    """Start Spark, and report on standard error how far the job is.

    Raises:
        InvalidArgumentError: the extra is not installed, or Spark does not start.
    """
    import client_aio.spark

    try:
        client_aio.spark.check_extra("spark")
    except ImportError as error:
        usage_error(str(error))
    from client_aio.spark.jobs import reporting
    from client_aio.spark.source import session

    with session(master) as started, reporting(started, what, invocation.output.note):
        yield started


@command(app, "verify", without_loop=True)
def verify(
    invocation: Invocation,
    log: Log = None,
    ledger: Ledgers = None,
    password_file: PasswordFile = None,
    master: Master = _LOCAL,
) -> int:
    """Read every replica of every entry, and report those that are missing or damaged.

    Looks at all ledgers, or those of --log, or those named by --ledger. Never fences. Ends with 5 where
    anything is damaged, with 1 where something is missing or cannot be reached. With a password the
    authentication codes of ledgers that have one are checked, else only checksums; executors on other
    machines need the file, or the variable, as well.
    """
    if log is not None and ledger:
        ids = ", ".join(map(str, ledger))
        usage_error(
            f"--log and --ledger both say which ledgers to verify, {log!r} and {ids}: give one of them"
        )
    with _session(invocation, master, "verify") as session:
        from client_aio.spark.jobs import verify as verify_ledgers

        frame = verify_ledgers(
            session,
            invocation.metadata_uri,
            log=log,
            ledger_ids=ledger,
            password_file=_path_of(password_file),
        )
        rows = [row.asDict() for row in frame.collect()]
    bad = sorted(
        (row for row in rows if row["status"] != "ok"),
        key=lambda row: (row["ledger_id"], row["first_entry"], row["bookie"]),
    )
    columns = ["ledger_id", "first_entry", "last_entry", "bookie", "status", "owed", "missing", "damaged"]
    invocation.output.rows(bad, [*columns, "first_bad_entry", "error"])
    entries = sum(row["intact"] for row in rows)
    invocation.output.note(f"{entries:,} copies of entries intact, {len(bad)} of {len(rows)} replicas not ok")
    if any(row["status"] == "damaged" for row in bad):
        return Exit.DAMAGED
    return Exit.FAILURE if bad else Exit.OK


@command(app, "export", without_loop=True)
def export(
    invocation: Invocation,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to; any that Spark can write to.")],
    log: Log = None,
    ledger: Ledgers = None,
    password_file: PasswordFile = None,
    master: Master = _LOCAL,
) -> None:
    """Write closed ledgers to a new folder: Parquet, and a manifest."""
    with _session(invocation, master, "export") as session:
        from client_aio.spark.archive import export as export_ledgers

        done = export_ledgers(
            session, invocation.metadata_uri, folder,
            log=log, ledger_ids=ledger, password_file=_path_of(password_file),
        )  # fmt: skip
    _print(invocation, done)


@command(app, "import", without_loop=True)
def import_(
    invocation: Invocation,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="What `export` has written.")],
    log: Annotated[str, typer.Option("--log", metavar="NAME", help="The log to add to.")],
    again: Annotated[bool, typer.Option("--again", help="Also where the log has it already.")] = False,
    password_file: PasswordFile = None,
    master: Master = _LOCAL,
) -> None:
    """Make the ledgers of an export anew, compare them with its manifest, and add them to a log at once."""
    with _session(invocation, master, "import") as session:
        from client_aio.spark.archive import import_ as import_ledgers

        done = import_ledgers(
            session, invocation.metadata_uri, folder,
            log=log, again=again, password_file=_path_of(password_file),
        )  # fmt: skip
    _print(invocation, done)


@command(app, "stats", without_loop=True)
def stats(invocation: Invocation, log: Log = None) -> None:
    """Show of each log how large it is, how old, and how fast it grows. Needs neither Spark nor the extra."""
    from client_aio.spark.jobs import stats as stats_of_logs

    rows = asyncio.run(stats_of_logs(invocation.metadata_uri, log=log))
    columns = [
        "log",
        "encoding",
        "ledgers",
        "open_ledgers",
        "entries",
        "rows",
        "bytes",
        "bytes_last_day",
        "bytes_per_day",
    ]
    invocation.output.rows(rows, columns)


@command(app, "sweep", without_loop=True)
def sweep(
    invocation: Invocation,
    log: Annotated[str, typer.Option("--log", metavar="NAME", help="The log that the jobs wrote to.")],
    older_than_h: Annotated[
        float, typer.Option(min=0, help="Leave younger ledgers alone: a job that still runs would fail.")
    ] = 24.0,
    password_file: PasswordFile = None,
) -> None:
    """Delete the ledgers of Spark jobs that died before they could commit."""
    from client_aio.spark.commits import sweep_orphans

    deleted = asyncio.run(
        sweep_orphans(
            invocation.metadata_uri, log=log, grace_s=older_than_h * 3600, password=password_of(password_file)
        )
    )
    if not deleted:
        invocation.output.note(
            f"nothing to delete: no job has left ledgers of {older_than_h:g} h and more for log {log!r}"
        )
        if invocation.output.is_table:
            return
    invocation.output.rows([{"ledger_id": ledger_id} for ledger_id in deleted], ["ledger_id"])


def _path_of(file: Path | None) -> str | None:
    """Return the absolute path of the file, under which executors on this machine find it too."""
    return None if file is None else str(file.absolute())


def _print(invocation: Invocation, done: Any) -> None:
    document = {"ledgers": len(done.ledger_ids), "entries": done.entries, "bytes": done.size}
    text = f"{document['ledgers']} ledgers, {document['entries']:,} entries, {document['bytes']:,} bytes"
    invocation.output.document(document, text=text)
