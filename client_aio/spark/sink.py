"""Writing a frame to a log: batch jobs and micro-batches, each made visible as a whole.

Every task writes ledgers of its own (`write_task`), and its commit message names them. The driver's commit
adds all of them to the log, in the order of the partitions, by one compare-and-set of the log's list. Before
the compare-and-set nothing of the write is visible in the log, after it everything.

For a micro-batch the same compare-and-set records the query, the batch, and a fingerprint of the rows. So a
replay after a crash is recognised and dropped. The number alone would not do: from a checkpoint that was
copied before the batch, Spark plans the batch anew, with other rows.

A listed ledger must never be deleted. So a commit whose outcome is unknown deletes nothing: its
compare-and-set may still take effect. After a successful commit every other ledger with the job's tag is
garbage, and is deleted at once.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from client_aio.spark import commits, provenance, schemas
from client_aio.spark.fingerprint import Fingerprint
from client_aio.spark.options import NO_TABLES, WriteOptions, parse_write
from client_aio.spark.passwords import settled
from client_aio.spark.statements import application_of
from client_aio.spark.write_task import Job, WrittenLedger, write_partition
from client_aio.sync.loop_thread import get_loop_thread
from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.types import StructType

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_EXECUTION_ID, _OUTERMOST_ID = "spark.sql.execution.id", "spark.sql.execution.root.id"


@dataclass(frozen=True)
class Partition(WriterCommitMessage):
    """The commit message of a task: the ledgers that it wrote."""

    number: int
    ledgers: tuple[WrittenLedger, ...]
    query_id: str | None = None
    content: Fingerprint | None = None


def plan_write(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool, is_stream: bool = False
) -> tuple[Job, bool]:
    """Check a write in the driver, before any task starts; return the job, and whether to skip the write.

    Spark creates the writer of a stream anew for each commit. So a stream's plan neither counts bookies nor
    looks at `ifExists`. Missing bookies must not fail a batch that has been written, and earlier batches have
    filled the log.

    Raises:
        InvalidArgumentError: an option or a column is wrong; or the frame does not fit the log; or the log
            holds records and `ifExists` is error.
        UnauthorizedAccessError: the password is not that of the log's ledgers.
        NotEnoughBookiesError: fewer bookies run than the ensemble needs.
        MetadataUnavailableError: the metadata store cannot be reached.
    """
    options = settled(parse_write(given))
    if overwrite and options.if_exists != "append":
        raise InvalidArgumentError(
            f"mode overwrite and ifExists {options.if_exists!r} contradict each other: choose one"
        )
    if is_stream and options.if_exists != "append":
        raise InvalidArgumentError(
            f"a stream appends batch after batch: ifExists {options.if_exists!r} is for batch writes"
        )
    written, value = _encoding_of(options, schema)
    log = get_loop_thread().run(commits.inspect_log(options, needs_bookies=not is_stream))
    if log.is_used and options.if_exists == "error":
        raise InvalidArgumentError(
            f"log {options.log!r} holds records, and ifExists is error: choose another name, or append"
        )
    columns = tuple(schema.names) if written.schema is not None else ()
    if (log.is_used or log.written is not None) and not overwrite:
        written, columns = _fitted(written, log.written or provenance.Written(), options.log, columns)
    job = Job(options, written, uuid.uuid4().hex, None, value, columns)
    return job, log.is_used and options.if_exists == "ignore"


def _encoding_of(options: WriteOptions, schema: StructType) -> tuple[provenance.Written, str | None]:
    """Return the encoding, and the column of bytes for the encoding binary."""
    encoding = options.encoding
    if encoding == "auto":
        is_bytes = len(schema) == 1 and schemas.is_binary(schema, schema.names[0])
        encoding = "binary" if is_bytes or options.value is not None else "arrow"
    if len(set(schema.names)) != len(schema.names):
        raise InvalidArgumentError(f"the frame has two columns of one name: {', '.join(schema.names)}")
    if encoding != "binary":
        if not schema.names:
            raise InvalidArgumentError("the frame has no columns")
        for name in schema.names:
            if name.lower() == schemas.ERROR:
                raise InvalidArgumentError(
                    f"the frame has a column {name!r}, the name under which permissive reads say what is "
                    "wrong with a row: give it another one with withColumnRenamed"
                )
        written = provenance.Written(encoding, options.compression, schemas.nullable_json(schema))
        schemas.check_types(schema)
        written.to_custom()
        return written, None
    value = options.value
    if value is None:
        if len(schema.names) != 1 and schemas.VALUE not in schema.names:
            raise InvalidArgumentError(
                f"which column holds the bytes? The frame has {', '.join(schema.names)}: name one with the "
                "option value, or write all of them with the encoding arrow or json"
            )
        value = schema.names[0] if len(schema.names) == 1 else schemas.VALUE
    if value not in schema.names:
        raise InvalidArgumentError(
            f"the option value names {value!r}; the frame has {', '.join(schema.names)}"
        )
    if not schemas.is_binary(schema, value):
        kind = schema[value].dataType.simpleString()
        raise InvalidArgumentError(
            f"column {value!r} is {kind}, not binary: cast it, "
            f"select(col({value!r}).cast('binary')), or write with the encoding arrow or json"
        )
    return provenance.Written("binary", options.compression), value


def _fitted(
    written: provenance.Written, found: provenance.Written, log: str, columns: tuple[str, ...]
) -> tuple[provenance.Written, tuple[str, ...]]:
    """Reorder a frame's columns into the log's order, or raise InvalidArgumentError with the differences."""
    if found.encoding != written.encoding:
        raise InvalidArgumentError(
            f"the frame would be written with encoding {written.encoding}, and log {log!r} has "
            f"{found.encoding}: set the option encoding to that, or write to another log"
        )
    if found.schema is None or written.schema is None:
        return written, columns
    said = provenance.differences(written.schema, found.schema)
    if said:
        raise InvalidArgumentError(
            f"the frame does not fit log {log!r}: {'; '.join(said)}. Select and cast the columns, or write "
            "to another log"
        )
    fitted = replace(written, schema=found.schema)
    return fitted, tuple(schemas.arrow_schema(found.schema).names)


class BatchWriter(DataSourceArrowWriter):
    """Writes a frame to a log, all or nothing."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._job, self._is_skipped = plan_write(options, schema, overwrite=overwrite)
        self._overwrite = overwrite
        self._floor = 0 if self._is_skipped else get_loop_thread().run(commits.draw_floor(self._job.options))

    def write(self, iterator: Iterator[Any]) -> Partition:
        """Write a partition's record batches, in a task."""
        task = TaskContext.get()
        assert task is not None
        _refuse_new_table(task)
        job = replace(self._job, application=application_of(task))
        ledgers = () if self._is_skipped else write_partition(job, iterator)
        return Partition(task.partitionId(), ledgers)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the whole write visible at once."""
        if self._is_skipped:
            return
        get_loop_thread().run(
            commits.commit(self._job, _ledgers_of(messages), replace=self._overwrite, floor=self._floor)
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the ledgers that tasks wrote, unless they may have become visible."""
        if self._is_skipped:
            return
        if all(message is not None for message in messages):
            return  # the commit failed, perhaps after it took effect: a later sweep deletes any orphans
        get_loop_thread().run(commits.delete_garbage(self._job, self._floor))


def _refuse_new_table(task: TaskContext) -> None:
    """Raise InvalidArgumentError in a task whose rows would fill a new table of the catalog.

    No statement could read them: the table forgets the options. Spark asks a source in Python nothing when it
    creates the table, and calls the writer as `save()` does. Only the task can tell. Its execution is within
    that of the statement, as otherwise only in `foreachBatch`, where there is a query.
    """
    outermost = task.getLocalProperty(_OUTERMOST_ID)
    is_within = outermost not in (None, task.getLocalProperty(_EXECUTION_ID))
    if is_within and task.getLocalProperty(_QUERY_ID) is None:
        raise InvalidArgumentError(
            f"a new table of the catalog (saveAsTable, CREATE TABLE … AS SELECT) is refused: {NO_TABLES}. "
            "In Python, use save() and load()"
        )


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query to a log, each exactly once."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._job, _ = plan_write(options, schema, overwrite=overwrite, is_stream=True)
        self._overwrite = overwrite

    def write(self, iterator: Iterator[Any]) -> Partition:
        """Write a micro-batch's partition, of record batches, in a task."""
        task = TaskContext.get()
        assert task is not None
        query_id, batch_id = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if query_id is None or batch_id is None:
            raise InvalidArgumentError(
                f"Spark does not tell the task its query and batch ({_QUERY_ID}, {_BATCH_ID}): the batch "
                "could not be told from its replay"
            )
        job = replace(self._job, job_id=query_id, batch_id=int(batch_id))
        content = Fingerprint()
        ledgers = write_partition(job, iterator, content)
        return Partition(task.partitionId(), ledgers, query_id, content)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make the micro-batch visible at once, unless an earlier commit has."""
        job = self._job_of(messages, batchId)
        assert job is not None  # Spark runs one task even for a batch without partitions
        get_loop_thread().run(commits.commit(job, _ledgers_of(messages), replace=self._overwrite))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Delete the ledgers that tasks wrote, unless they may have become visible."""
        job = self._job_of(messages, batchId)
        if job is None or all(message is not None for message in messages):
            return
        get_loop_thread().run(commits.delete(job, _ledgers_of(messages)))

    def _job_of(self, messages: list[WriterCommitMessage | None], batch_id: int) -> Job | None:
        query_ids = {message.query_id for message in messages if isinstance(message, Partition)}
        assert len(query_ids) <= 1
        query_id = next(iter(query_ids), None)
        if query_id is None:
            return None
        content = Fingerprint()
        for message in messages:
            if isinstance(message, Partition) and message.content is not None:
                content.merge(message.content)
        return replace(self._job, job_id=query_id, batch_id=batch_id, content=content.text)


def _ledgers_of(messages: list[WriterCommitMessage | None]) -> list[int]:
    """Return the ledgers of all partitions, in the order of the partitions."""
    partitions = sorted(
        (message for message in messages if isinstance(message, Partition)),
        key=lambda partition: partition.number,
    )
    return [ledger.ledger_id for partition in partitions for ledger in partition.ledgers]
