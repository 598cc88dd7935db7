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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import client_aio
from client_aio.admin.replicas import parts_of, verify_replica
from client_aio.core.repair_plan import Part
from client_aio.spark import provenance
from client_aio.spark.passwords import PasswordPlace, password_of, settled_place, unlock
from client_aio.sync.loop_thread import get_loop_thread
from metadata.errors import InvalidArgumentError, NoSuchLedgerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata

VERIFIED = (
    "ledger_id long, first_entry long, last_entry long, bookie string, owed long, intact long, "
    "missing long, damaged long, first_bad_entry long, status string, error string"
)
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
        InvalidArgumentError: both a log and ledgers are named.
        UnauthorizedAccessError: a password is given, and it is not that of the ledgers that have one.
    """
    if log is not None and ledger_ids is not None:
        raise InvalidArgumentError("name a log, or ledgers, and not both")
    place = settled_place(password_file, password_env)
    wanted = get_loop_thread().run(_replicas(uri, log, ledger_ids, place))
    frame = spark.createDataFrame(wanted, "ledger_id long, first_entry long, last_entry long, bookie string")
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
) -> list[tuple[int, int, int, str]]:
    """List the runs of entries to be read: ledger, first and last entry, bookie."""
    async with client_aio.connect(uri) as client:
        found: list[tuple[int, int, int, str]] = []
        is_right = not password_of(place)
        for metadata in await metadata_of(client, log, ledger_ids):
            if not is_right and metadata.password is not None:
                await unlock(client, metadata, place)
                is_right = True
            for part in parts_of(metadata):
                for first in range(part.first_entry, part.last_entry + 1, _PART_ENTRIES):
                    last = min(part.last_entry, first + _PART_ENTRIES - 1)
                    found += [(metadata.ledger_id, first, last, name) for name in part.bookies]
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
    known: dict[int, LedgerMetadata] = {}
    digests: dict[int, Digest] = {}

    async with client_aio.connect(uri) as client:

        async def one(ledger_id: int, first: int, last: int, bookie_id: str) -> dict[str, Any] | None:
            async with room:
                try:
                    if ledger_id not in known:
                        known[ledger_id] = await client.ledger_metadata(ledger_id)
                except NoSuchLedgerError:
                    return None  # deleted meanwhile
                metadata = known[ledger_id]
                fragment = metadata.fragment_of(first)
                part = Part(first, last, fragment.content_term, fragment.bookies)
                if bookie_id not in part.bookies:
                    return None  # repaired meanwhile
                if password and metadata.password is not None and ledger_id not in digests:
                    digests[ledger_id] = await client._context.unlock(metadata, password)
                digest = digests.get(ledger_id)
                found = await verify_replica(client._context, metadata, part, bookie_id, digest)
                return {"ledger_id": ledger_id, **found.row()}

        return [row for row in await asyncio.gather(*(one(*row) for row in rows)) if row is not None]


async def metadata_of(
    client: client_aio.Client, log: str | None, ledger_ids: Iterable[int] | None
) -> list[LedgerMetadata]:
    """Read the metadata of a log's ledgers, of the ledgers named, or of all ledgers."""
    is_all = log is None and ledger_ids is None
    if log is not None:
        ids = [row.ledger_id for row in (await client.log_metadata(log)).rows]
    elif ledger_ids is not None:
        ids = list(ledger_ids)
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
        names = [log] if log is not None else [name async for name in client.list_logs()]
        return [await _stats_of(client, name, now_ms) for name in names]


def _total(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


async def _stats_of(client: client_aio.Client, name: str, now_ms: int) -> dict[str, Any]:
    metadata = await client.log_metadata(name)
    ledgers = [(row, await client.ledger_metadata(row.ledger_id)) for row in metadata.rows]
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
