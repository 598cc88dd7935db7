"""Jobs over whole clusters: verify every replica, and sum up logs. `archive` has export and import.

    rows = client_aio.spark.verify(spark, uri)
    rows.where("status <> 'ok'").show()

Tasks read each replica of each fragment from its own bookie, and check each entry against its checksum.
Nothing is fenced, and writers are not disturbed.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import client_aio
from client_aio.admin.replicas import verify_replica
from client_aio.core.repair_plan import Part, complete_parts
from client_aio.spark import provenance
from client_aio.spark.options import check_distinct
from client_aio.spark.passwords import PasswordPlace, password_of, settled_place, unlock
from client_aio.sync.loop_thread import get_loop_thread
from client_aio.unbounded.paged_fragments import spans
from metadata.errors import InvalidArgumentError, NoSuchLedgerError, NoSuchLogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from client_aio.core.digest import Digest
    from client_aio.log.takeover import LogMetadata
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogRow

VERIFIED = (
    "ledger_id long, first_entry long, last_entry long, bookie string, owed long, intact long, "
    "missing long, damaged long, first_bad_entry long, status string, error string"
)
_REPLICAS = "ledger_id long, fragment long, first_entry long, last_entry long, bookie string"
"""What a task is told of a replica to be read; `fragment` is the first entry of its fragment."""
_PART_ENTRIES = 200_000
_AT_ONCE = 4
_PROCESSORS_ASSUMED = 8
_DAY_MS = 24 * 3600 * 1000


def verify(
    spark: SparkSession,
    uri: str,
    *,
    log: str | None = None,
    ledger_ids: Iterable[int] | None = None,
    password_file: str | None = None,
    password_env: str | None = None,
) -> DataFrame:
    """Check every replica of every entry of the ledgers named; by default of all ledgers.

    Args:
        log: the ledgers of this log.
        ledger_ids: these ledgers.
        password_file: a file with the password of the ledgers that have one, by its path on each executor; or
            `password_env`, a variable there, by default BOOKIE_AIO_PASSWORD. With a password the
            authentication codes of those ledgers are checked, otherwise only the checksums.

    Returns:
        One row for each bookie of each fragment (of large ones: for each 200,000 entries). `status` is `ok`,
        `missing`, `damaged`, or `unreachable`. The last fragment of a ledger that is not CLOSED is left out:
        the entries owed there are not settled.

    Raises:
        NoSuchLogError, NoSuchLedgerError, MetadataUnavailableError.
        InvalidArgumentError: both a log and ledgers are named, or a ledger twice.
        UnauthorizedAccessError: a password is given, and it is not that of the ledgers that have one.
    """
    if log is not None and ledger_ids is not None:
        raise InvalidArgumentError("name a log, or ledgers, and not both")
    place = settled_place(password_file, password_env)
    wanted = get_loop_thread().run(_replicas(uri, log, ledger_ids, place))
    frame = spark.createDataFrame(wanted, _REPLICAS)
    # On Spark Connect there is no context here, and nothing says how many executors there are.
    context = getattr(spark, "sparkContext", None)
    processors = _PROCESSORS_ASSUMED if context is None else context.defaultParallelism
    tasks = max(1, min(len(wanted), 4 * processors))
    return frame.repartition(tasks).mapInArrow(_verifier(uri, place), VERIFIED)


@contextmanager
def reporting(
    spark: SparkSession, what: str, say: Callable[[str], None], *, every_s: float = 10.0
) -> Iterator[None]:
    """Say now and then how far Spark is with a job, also where nobody sits at a terminal."""
    context = getattr(spark, "sparkContext", None)  # None on Spark Connect
    is_done = threading.Event()

    def report() -> None:
        began = time.monotonic()
        while not is_done.wait(every_s):
            elapsed = time.monotonic() - began
            say(f"{what}: {elapsed:.0f} s, {_tasks_done(context) or 'under way'}")

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _tasks_done(context: SparkContext | None) -> str:
    if context is None:
        return ""
    tracker = context.statusTracker()
    found = [tracker.getStageInfo(each) for each in tracker.getActiveStageIds()]
    stages = [info for info in found if info is not None]
    done, all_ = sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)
    return f"{done} of {all_} tasks of the present stage are done" if all_ else ""


async def _replicas(
    uri: str, log: str | None, ledger_ids: Iterable[int] | None, place: PasswordPlace
) -> list[tuple[int, int, int, int, str]]:
    """List the replicas to be read, as `_REPLICAS` says."""
    async with client_aio.connect(uri) as client:
        found: list[tuple[int, int, int, int, str]] = []
        is_right = not password_of(place)
        for metadata in await metadata_of(client, log, ledger_ids):
            if not is_right and metadata.password is not None:
                await unlock(client, metadata, place)
                is_right = True
            try:
                found += await _replicas_of(client, metadata)
            except NoSuchLedgerError:
                if log is not None or ledger_ids is not None:
                    raise
        return found


async def _replicas_of(
    client: client_aio.Client, metadata: LedgerMetadata
) -> list[tuple[int, int, int, int, str]]:
    """List the replicas of a ledger's complete fragments, of those in pages too."""
    found: list[tuple[int, int, int, int, str]] = []
    async with aclosing(spans(client._context, metadata)) as all_spans:
        async for span in all_spans:
            for part in complete_parts(span.fragments, span.last_entry):
                for first in range(part.first_entry, part.last_entry + 1, _PART_ENTRIES):
                    last = min(part.last_entry, first + _PART_ENTRIES - 1)
                    found += [
                        (metadata.ledger_id, part.first_entry, first, last, name) for name in part.bookies
                    ]
    return found


def _verifier(
    uri: str, place: PasswordPlace
) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    def run(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        from client_aio.spark.schemas import arrow_schema_of_ddl

        schema = arrow_schema_of_ddl(VERIFIED)
        for batch in batches:
            rows = [tuple(row) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
            verified = get_loop_thread().run(_verify_rows(uri, rows, password_of(place)))
            yield pyarrow.RecordBatch.from_pylist(verified, schema=schema)

    return run


async def _verify_rows(uri: str, rows: list[tuple[Any, ...]], password: bytes) -> list[dict[str, Any]]:
    room = asyncio.Semaphore(_AT_ONCE)
    known: dict[tuple[int, int], tuple[LedgerMetadata, Part] | None] = {}
    digests: dict[int, Digest] = {}

    async with client_aio.connect(uri) as client:

        async def one(
            ledger_id: int, fragment: int, first: int, last: int, bookie_id: str
        ) -> dict[str, Any] | None:
            async with room:
                if (ledger_id, fragment) not in known:
                    known[ledger_id, fragment] = await _present(client, ledger_id, fragment)
                present = known[ledger_id, fragment]
                if present is None or bookie_id not in present[1].bookies:
                    return None  # deleted, trimmed or repaired meanwhile
                metadata, part = present
                if password and metadata.password is not None and ledger_id not in digests:
                    digests[ledger_id] = await client._context.unlock(metadata, password)
                digest = digests.get(ledger_id)
                part = part._replace(first_entry=first, last_entry=last)
                found = await verify_replica(client._context, metadata, part, bookie_id, digest)
                if found.status != "ok":  # as it is also where the bookie owes the entries no more
                    present = await _present(client, ledger_id, fragment)
                    if present is None or bookie_id not in present[1].bookies:
                        return None
                return {"ledger_id": ledger_id, **found.row()}

        return [row for row in await asyncio.gather(*(one(*row) for row in rows)) if row is not None]


async def _present(
    client: client_aio.Client, ledger_id: int, fragment: int
) -> tuple[LedgerMetadata, Part] | None:
    """Return a complete fragment, by its first entry, and its ledger's metadata; None where it is gone."""
    try:
        metadata, _ = await client._context.ledgers.read(ledger_id, sync=True)
        async with aclosing(spans(client._context, metadata, fragment)) as found:
            async for span in found:
                for part in complete_parts(span.fragments, span.last_entry):
                    if part.first_entry == fragment:
                        return span.metadata, part
                break  # Only the first span may have it.
    except NoSuchLedgerError:
        pass
    return None


async def metadata_of(
    client: client_aio.Client, log: str | None, ledger_ids: Iterable[int] | None
) -> list[LedgerMetadata]:
    """Read the metadata of a log's ledgers, of the ledgers named, or of all ledgers.

    Raises:
        InvalidArgumentError: a ledger is named twice.
    """
    if log is not None:
        return [one for _, one in (await _log_of(client, log))[1]]
    is_all = ledger_ids is None
    if ledger_ids is not None:
        ids = list(check_distinct(list(ledger_ids), "the list of ledgers"))
    else:
        ids = [ledger_id async for ledger_id in client.list_ledgers()]
    found = []
    for ledger_id in ids:
        try:
            found.append(await client.ledger_metadata(ledger_id))
        except NoSuchLedgerError:
            if not is_all:
                raise
    return found


async def _log_of(
    client: client_aio.Client, name: str
) -> tuple[LogMetadata, list[tuple[LogRow, LedgerMetadata]]]:
    """Read a log's list and the metadata of its ledgers, again where it is truncated meanwhile.

    Raises:
        NoSuchLogError: there is no such log. NoSuchLedgerError: a ledger is listed, and does not exist.
    """
    missing: NoSuchLedgerError | None = None
    while True:
        log = await client.log_metadata(name)
        if missing is not None and missing.ledger_id in {row.ledger_id for row in log.rows}:
            raise missing
        try:
            return log, [(row, await client.ledger_metadata(row.ledger_id)) for row in log.rows]
        except NoSuchLedgerError as error:
            missing = error


async def stats(uri: str, *, log: str | None = None) -> list[dict[str, Any]]:
    """Sum up logs: ledgers, entries and bytes of their closed ledgers, ages, and rates of growth.

    Returns:
        For each log: `log`, `encoding`, `ledgers`, `open_ledgers`, `entries`, `rows`, `bytes`, `oldest_ms`
            and `newest_ms` (when ledgers were listed, since 1970), `bytes_last_day`, `bytes_per_day` (since
            the oldest ledger), `columns`. `rows` is None where a ledger of encoding arrow does not name them.

    Raises:
        NoSuchLogError, MetadataUnavailableError.
    """
    async with client_aio.connect(uri) as client:
        now_ms = client._context.now_ms()
        if log is not None:
            return [await _stats_of(client, log, now_ms)]
        found = []
        for name in [each async for each in client.list_logs()]:
            with suppress(NoSuchLogError):  # It was deleted meanwhile.
                found.append(await _stats_of(client, name, now_ms))
        return found


def _total(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


async def _stats_of(client: client_aio.Client, name: str, now_ms: int) -> dict[str, Any]:
    metadata, ledgers = await _log_of(client, name)
    closed = [(row, one, one.length or 0) for row, one in ledgers if one.is_closed]
    size = sum(length for *_, length in closed)
    listed = [row.created_ms for row in metadata.rows]
    days = max(1.0, (now_ms - min(listed, default=now_ms)) / _DAY_MS)
    written = provenance.Written.of_custom(metadata.custom)
    schema = None if written is None or written.schema is None else json.loads(written.schema)
    return {
        "log": name,
        "encoding": None if written is None else written.encoding,
        "ledgers": len(ledgers),
        "open_ledgers": len(ledgers) - len(closed),
        "entries": sum((one.last_entry if one.last_entry is not None else -1) + 1 for _, one, _ in closed),
        "rows": _total(provenance.rows_of(one) for _, one, _ in closed),
        "bytes": size,
        "oldest_ms": min(listed, default=None),
        "newest_ms": max(listed, default=None),
        "bytes_last_day": sum(length for row, _, length in closed if row.created_ms >= now_ms - _DAY_MS),
        "bytes_per_day": int(size / days),
        "columns": None if schema is None else [field["name"] for field in schema["fields"]],
    }
