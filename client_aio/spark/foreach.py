"""The simple way to write: a function for `foreachPartition`, of frames and of RDDs.

    frame.foreachPartition(ledger_sink(uri, log="events", value="payload"))
    spark.sparkContext.parallelize([b"a", b"b"]).foreachPartition(ledger_sink(uri, log="events"))

Each attempt of a partition writes a ledger of its own, and adds it to the log when the partition is complete.
So an attempt that fails leaves nothing visible. But two attempts may both complete: **at least once per
partition**. With speculation off that happens only when an executor, or the metadata store's answer, is lost
after a partition was added.
The data source's `df.write.format("ledger")` is exactly once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client_aio.config import ClientConfig
from client_aio.spark import provenance
from client_aio.spark.commits import add_bytes
from client_aio.spark.options import parse_write
from client_aio.spark.passwords import settled_place
from client_aio.spark.write_task import CHUNK_BYTES, Chunk, Job, connect, write_ledgers
from metadata.errors import EntryTooLargeError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from client_aio.spark.options import WriteOptions

_ROWS_PER_CHUNK = 4096


def ledger_sink(
    metadata: str,
    *,
    log: str,
    value: str | None = None,
    ensemble_size: int = 3,
    write_quorum: int = 3,
    ack_quorum: int = 2,
    ledger_bytes: int = 1024 * 1024 * 1024,
    password_file: str | None = None,
    password_env: str | None = None,
) -> LedgerSink:
    """Return a function that writes the rows of a partition to a log; hand it to `foreachPartition`.

    Only these arguments are sent to the executors; each task connects for itself.

    Args:
        metadata: the metadata store's URI.
        log: the log to add to; it is created where it does not exist.
        value: the column of bytes; None where rows are bytes (an RDD), or have one column.
        ledger_bytes: the size at which a partition goes on to another ledger.
        password_file: a file with the ledgers' password, by the path that it has on each executor.
        password_env: the environment variable that holds the password on each executor. By default
            BOOKIE_AIO_PASSWORD, where that is set here; otherwise there is no password. "": no password.

    Raises:
        InvalidArgumentError: at once: an argument is wrong.
    """
    given = {
        "metadata": metadata,
        "log": log,
        "ensembleSize": str(ensemble_size),
        "writeQuorum": str(write_quorum),
        "ackQuorum": str(ack_quorum),
        "ledgerBytes": str(ledger_bytes),
    }
    given |= settled_place(password_file, password_env).as_options()
    return LedgerSink(parse_write(given), value)


@dataclass(frozen=True, slots=True)
class LedgerSink:
    """Writes partitions to a log; made by `ledger_sink`. Can be pickled."""

    options: WriteOptions
    value: str | None

    def __call__(self, rows: Iterable[Any]) -> None:
        """Write a partition, and add it to the log.

        Raises:
            InvalidArgumentError: a row's value is null, or is not bytes; the error names the row by its
                place. Or the log holds rows of columns, and its readers would decode the bytes as such rows.
            BookKeeperError: the ledger could not be written, or could not be added. Unless the outcome of the
                addition is unknown, the partition's ledgers are deleted.
        """
        job = Job(self.options, provenance.Written(), _job_id(), None, self.value, ())
        with connect(self.options) as client:
            ledgers = write_ledgers(client, job, self._chunks(rows))
            if ledgers:
                added = [ledger.ledger_id for ledger in ledgers]
                client._run(add_bytes(client._client, self.options, added))

    def _chunks(self, rows: Iterable[Any]) -> Iterator[Chunk]:
        chunk: list[bytes] = []
        size = 0
        limit = ClientConfig().entry_bytes_max
        for number, row in enumerate(rows):
            data = row
            if not isinstance(row, bytes):
                data = self._bytes_of(row, number)
            if len(data) > limit:
                raise EntryTooLargeError(
                    f"row {number} of the partition has {len(data):,} bytes; the limit is {limit:,}"
                )
            chunk.append(data)
            size += len(data)
            if len(chunk) == _ROWS_PER_CHUNK or size >= CHUNK_BYTES:
                yield Chunk(chunk, len(chunk))
                chunk, size = [], 0
        if chunk:
            yield Chunk(chunk, len(chunk))

    def _bytes_of(self, row: Any, number: int) -> bytes:
        value = row
        if self.value is not None:
            with contextlib.suppress(TypeError, KeyError, ValueError, IndexError):
                value = row[self.value]
        elif isinstance(row, tuple) and len(row) == 1:
            value = row[0]
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
        column = "" if self.value is None else f" in column {self.value!r}"
        found = f"a row of {len(row)} columns" if value is row and isinstance(row, tuple) else repr(value)
        raise InvalidArgumentError(
            f"row {number} of the partition has {found:.120}{column}, where there must be bytes"
            + ("" if self.value is not None else ": name the column with ledger_sink(…, value=…)")
        )


def _job_id() -> str:
    """Name the job by the application and the stage, so that orphans of a dead job can be recognised."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return "foreach" if task is None else f"foreach-{task.stageId()}-{task.taskAttemptId()}"
