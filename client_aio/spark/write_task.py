"""Writing one partition, in a task: rows in, closed ledgers out.

Owns the ledgers of one task attempt until it returns their ids. No log lists them yet: the driver's commit
adds them. A failed attempt deletes its ledgers. A killed attempt leaves them, and so does an attempt whose
answer is lost. The tags in their custom metadata let `commits.sweep_orphans` find them.

Invariant: every ledger that `write_partition` returns is CLOSED, so that committed records never change.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import client_aio
import client_aio.sync
from client_aio.config import ClientConfig
from client_aio.spark import provenance
from client_aio.spark.encoding import Format, check_readable, make_encoder
from client_aio.spark.options import AWAY, ENTRY_BYTES_MAX, Outage
from client_aio.spark.passwords import password_of
from client_aio.spark.schemas import arrow_schema
from client_aio.sync.add_future import result_of
from metadata.errors import BookKeeperError, NoSuchLedgerError
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow

    from client_aio.spark.fingerprint import Fingerprint
    from client_aio.spark.options import WriteOptions
    from client_aio.sync.add_future import AddFuture

logger = logging.getLogger(__name__)

assert ClientConfig().entry_bytes_max == ENTRY_BYTES_MAX
CHUNK_BYTES = 4 * 1024 * 1024
"""The bytes of a batch that are encoded at a time: a task holds a few of these chunks beside its window."""


_MIB = 1024 * 1024
SETTINGS = {"max_in_flight_bytes": 16 * _MIB, "lag_bytes_max": 96 * _MIB}
"""Settings of a task's client. A bulk load is limited by the bookies, so the window is short. A slow bookie
is tolerated for long: replacing it would cost copies, though nothing is wrong but the load."""


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a write that every task is sent."""

    options: WriteOptions
    written: provenance.Written
    job_id: str
    batch_id: int | None
    """The number of a streaming query's micro-batch; None for a batch job."""
    value: str | None
    """The column of bytes, with encoding binary."""
    columns: tuple[str, ...]
    """The frame's columns in the log's order."""
    content: str = ""
    """The fingerprint of a micro-batch's rows; the driver puts it together from those of the tasks."""
    application: str | None = None
    """The application of a batch job, where a task knows it."""

    def custom(self) -> dict[str, bytes]:
        """Return the custom metadata of the job's ledgers."""
        custom = self.written.to_custom()
        custom[provenance.LOG] = self.options.log.encode()
        custom[provenance.JOB] = self.job_id.encode()
        if self.batch_id is not None:
            custom[provenance.BATCH] = str(self.batch_id).encode()
        if self.application is not None:
            custom[provenance.APPLICATION] = self.application.encode()
        return custom


class Chunk(NamedTuple):
    """Some entries, and the number of rows in them."""

    entries: list[bytes]
    rows: int


@dataclass(frozen=True, slots=True)
class WrittenLedger:
    """A ledger that a task has written and closed."""

    ledger_id: int
    entries: int
    size: int


def write_partition(
    job: Job, batches: Iterator[pyarrow.RecordBatch], content: Fingerprint | None = None
) -> tuple[WrittenLedger, ...]:
    """Write the rows of a partition to new ledgers; without rows, to none.

    Args:
        content: is told of all rows.

    Raises:
        InvalidArgumentError: a null, or a row above the limit.
        Exception: any other error of adding, or of the rows. After any error the written ledgers are deleted,
            as far as the bookies and the metadata store can be reached.
    """
    entries = encode_chunks(job, batches, content)
    with connect(job.options) as client:
        return write_ledgers(client, job, entries)


def write_ledgers(
    client: client_aio.sync.Client, job: Job, chunks: Iterator[Chunk]
) -> tuple[WrittenLedger, ...]:
    """Write chunks of entries to as many ledgers as `ledger_bytes` asks for; raises as `write_partition`."""
    options, password = job.options, password_of(job.options)
    made: list[int] = []
    rows: list[int] = []
    done: list[WrittenLedger] = []
    try:
        for first in chunks:
            with _create(client, job, password) as ledger:
                made.append(ledger.ledger_id)
                rows.clear()
                _add_batches(ledger, _entries_up_to(options.ledger_bytes, first, chunks, rows))
            metadata = ledger.metadata
            assert metadata.last_entry is not None
            assert metadata.length is not None
            if job.written.encoding == "arrow":
                client._run(_note_rows(client._client, ledger.ledger_id, sum(rows)))
            done.append(WrittenLedger(ledger.ledger_id, metadata.last_entry + 1, metadata.length))
    except BaseException:
        # While servers are away each deletion would wait for them: the sweep deletes what is left.
        with contextlib.suppress(BookKeeperError):
            for ledger_id in made:
                with contextlib.suppress(NoSuchLedgerError):
                    client.delete_ledger(ledger_id, password=password)
        raise
    return tuple(done)


def _add_batches(ledger: client_aio.sync.LedgerWriter, batches: Iterator[list[bytes]]) -> None:
    """Add batches one after another, and wait until all are acknowledged; raise the first failure soon."""
    adding: deque[AddFuture[tuple[int, int]]] = deque()
    for batch in batches:
        adding.append(ledger.add_batch_nowait(batch))  # Blocks while `max_in_flight_bytes` are in flight.
        while adding and adding[0].done():
            adding.popleft().result()
    for added in adding:
        result_of(added)


def connect(options: WriteOptions) -> client_aio.sync.Client:
    """Connect as a task that writes."""
    return client_aio.sync.connect(
        options.metadata,
        metadata_timeout_s=options.outage_timeout,
        add_quorum_timeout_s=options.outage_timeout,
        **SETTINGS,
    )


def _create(client: client_aio.sync.Client, job: Job, password: bytes) -> client_aio.sync.LedgerWriter:
    """Create a ledger; wait while too few bookies are there, up to the option outageTimeout."""
    options, outage = job.options, Outage(job.options.outage_timeout, logger.warning)
    while True:
        asked = time.monotonic()
        try:
            return client.create_ledger(
                ensemble_size=options.ensemble_size,
                write_quorum=options.write_quorum,
                ack_quorum=options.ack_quorum,
                digest=DIGEST_HMAC if password else DIGEST_CRC,
                password=password,
                custom_metadata=job.custom(),
            )
        except AWAY as error:
            time.sleep(outage.pause_s(error, time.monotonic(), asked))


async def _note_rows(client: client_aio.Client, ledger_id: int, rows: int) -> None:
    """Note the number of rows with a CLOSED ledger that no log lists yet."""
    context = client._context
    value = str(rows).encode()
    await context.ledgers.tag(ledger_id, provenance.ROWS, value, draw_token=context.draw_token)


def _entries_up_to(
    size_max: int, first: Chunk, chunks: Iterator[Chunk], rows: list[int]
) -> Iterator[list[bytes]]:
    """Yield the entries of chunks up to a size, and append the chunks' numbers of rows to a list."""
    chunk: Chunk | None = first
    size = 0
    while chunk is not None:
        size += sum(map(len, chunk.entries))
        rows.append(chunk.rows)
        yield chunk.entries
        chunk = next(chunks, None) if size < size_max else None


def encode_chunks(
    job: Job, batches: Iterator[pyarrow.RecordBatch], content: Fingerprint | None = None
) -> Iterator[Chunk]:
    """Yield the entries of the rows, in non-empty chunks of bounded size."""
    written = job.written
    schema = None if written.schema is None else arrow_schema(written.schema)
    encode = make_encoder(
        Format(written.encoding, written.compression, schema),
        entry_bytes=job.options.entry_bytes,
        entry_bytes_max=ENTRY_BYTES_MAX,
        value=job.value,
    )
    for batch in batches:
        if not batch.num_rows:
            continue
        if job.columns and tuple(batch.schema.names) != job.columns:
            batch = batch.select(job.columns)
        if content is not None and job.value is not None:
            content.add(batch.select([job.value]))
        elif content is not None:
            check_readable(batch)  # The encoder checks it too, but what cannot be read cannot be hashed.
            content.add(batch)
        size = min(CHUNK_BYTES, job.options.ledger_bytes)
        rows = max(1, batch.num_rows // (batch.nbytes // size + 1))
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            yield Chunk(encode(part), part.num_rows)
