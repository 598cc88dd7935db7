"""Faults for Spark tasks: functions for `mapInArrow`, in a module that the workers can import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None
    return task


def fail_first_attempts(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Fail half of the partitions at their first attempt, when their rows have been handed on."""
    yield from batches
    if _task().attemptNumber() == 0 and _task().partitionId() % 2 == 0:
        raise RuntimeError("this attempt was made to fail")


def die_at_the_first_attempt(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Kill the worker in one partition's first attempt, as a lost executor or a task kill does."""
    yield from batches
    if _task().attemptNumber() == 0 and _task().partitionId() == 1:
        os._exit(9)


def fail_always_after(flag: str) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """Fail every attempt of one partition, when there is a file of that name."""

    def fail(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        yield from batches
        if _task().partitionId() == 1:
            while not Path(flag).exists():
                time.sleep(0.01)
            raise RuntimeError("made to fail, always")

    return fail


def wait_for(
    flag: str, rows: int
) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """Hand on so many rows of each partition, and the others when there is a file of that name.

    Pipes between the processes hold some batches back: the rows before must be large enough to fill them.
    """

    def wait(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        given = 0
        for batch in batches:
            while given >= rows and not Path(flag).exists():
                time.sleep(0.01)
            yield batch
            given += batch.num_rows

    return wait
