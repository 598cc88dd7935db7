"""Writing one partition, in a task: rows in, closed ledgers out.

Owns the ledgers of one task attempt until it hands their ids over. They belong to no log yet: whoever commits
adds them. An attempt that fails deletes what it made; one that is killed leaves it, and so does one whose
answer is lost: the tags in the ledgers' custom metadata let `sweep` find those.

Invariant: what `write_partition` returns is CLOSED, so what is committed can change no more.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import client_aio.sync
from client_aio.config import ClientConfig
from client_aio.spark import provenance
from client_aio.spark.encoding import Format, make_encoder
from client_aio.spark.passwords import password_of
from client_aio.spark.schemas import arrow_schema
from metadata.errors import BookKeeperError
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow

    from client_aio.spark.options import WriteOptions

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
"""How much of a batch is turned into entries at a time: a task holds a few of these beside its window."""


_MIB = 1024 * 1024
SETTINGS = {"max_in_flight_bytes": 16 * _MIB, "lag_bytes_max": 96 * _MIB}
"""Of a task's client. A bulk load takes what the bookies take: a short window, and patience with one of them
that is slow, since to replace it costs copies where nothing is wrong but the load."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every task of a job is told."""

    options: WriteOptions
    written: provenance.Written
    job_id: str
    batch_id: int | None
    """Of a streaming query."""
    value: str | None
    """The column of bytes, with encoding binary."""
    columns: tuple[str, ...]
    """The frame's columns in the order in which the log has them."""

    def custom(self) -> dict[str, bytes]:
        """Return the custom metadata of the ledgers."""
        custom = self.written.to_custom()
        custom[provenance.LOG] = self.options.log.encode()
        custom[provenance.JOB] = self.job_id.encode()
        if self.batch_id is not None:
            custom[provenance.BATCH] = str(self.batch_id).encode()
        return custom


@dataclass(frozen=True, slots=True)
class WrittenLedger:
    """A ledger that a task has written and closed."""

    ledger_id: int
    entries: int
    size: int


def write_partition(job: Job, batches: Iterator[pyarrow.RecordBatch]) -> tuple[WrittenLedger, ...]:
    """Write the rows of a partition to ledgers of its own; none for no rows.

    Raises:
        InvalidArgumentError: a null, or a row above the limit. Whatever else stops the adding or the rows.
            What was written is deleted again, as far as the bookies and the metadata store can be reached.
    """
    entries = encoded(job, batches)
    with client_aio.sync.connect(job.options.metadata, **SETTINGS) as client:
        return write_ledgers(client, job, entries)


def write_ledgers(
    client: client_aio.sync.Client, job: Job, chunks: Iterator[list[bytes]]
) -> tuple[WrittenLedger, ...]:
    """Write chunks of entries to as many ledgers as `ledger_bytes` asks for; see `write_partition`."""
    options, password = job.options, password_of(job.options)
    made: list[int] = []
    done: list[WrittenLedger] = []
    try:
        for first in chunks:
            with client.create_ledger(
                ensemble_size=options.ensemble_size,
                write_quorum=options.write_quorum,
                ack_quorum=options.ack_quorum,
                digest=DIGEST_HMAC if password else DIGEST_CRC,
                password=password,
                custom_metadata=job.custom(),
            ) as ledger:
                made.append(ledger.ledger_id)
                ledger.add_chunks(_up_to(options.ledger_bytes, first, chunks))
            metadata = ledger.metadata
            assert metadata.last_entry is not None
            assert metadata.length is not None
            done.append(WrittenLedger(ledger.ledger_id, metadata.last_entry + 1, metadata.length))
    except BaseException:
        for ledger_id in made:
            with contextlib.suppress(BookKeeperError):
                client.delete_ledger(ledger_id, password=password)
        raise
    return tuple(done)


def _up_to(size_max: int, first: list[bytes], chunks: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    yield first
    size = sum(map(len, first))
    while size < size_max and (chunk := next(chunks, None)) is not None:
        size += sum(map(len, chunk))
        yield chunk


def encoded(job: Job, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[list[bytes]]:
    """Yield the entries of the rows, in chunks of bounded size; no empty chunk."""
    written = job.written
    schema = None if written.schema is None else arrow_schema(written.schema)
    encode = make_encoder(
        Format(written.encoding, written.compression, schema),
        entry_bytes=job.options.entry_bytes,
        entry_bytes_max=ClientConfig().entry_bytes_max,
        value=job.value,
    )
    for batch in batches:
        if not batch.num_rows:
            continue
        if job.columns and tuple(batch.schema.names) != job.columns:
            batch = batch.select(job.columns)
        size = min(CHUNK_BYTES, job.options.ledger_bytes)
        rows = max(1, batch.num_rows // (batch.nbytes // size + 1))
        for start in range(0, batch.num_rows, rows):
            yield encode(batch.slice(start, rows))
