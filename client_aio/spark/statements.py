"""Statements of one Spark application: what a task is told of its own, and what it reads of earlier ones.

Spark keeps the partitions of a view with the view, and asks the source for them no more. So the last
partition has a `Horizon`, the end of the plan. A task of a later statement reads on from there, up to the
last ledger that a statement before it has added to the log.

All tasks of a statement must find the same rows, however often they are tried. So that end follows from two
times that do not change: when the statement began, of which Spark tells every task, and when the log listed
the ledger. Only ledgers of the same application count, since both times are by its driver's clock then. An
addition closes all ledgers before it, so nothing before that end changes.

Owns the names of Spark's local properties that this needs.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from client_aio.spark.scan_plan import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark import TaskContext

    from client_aio.spark.catalog import Catalog, Found
    from client_aio.spark.scan_plan import Stretch

_APPLICATION_ID, _APPLICATION_STARTED = "spark.app.id", "spark.app.startTime"
_STATEMENT = "spark.sql.execution.query.id"
_UUID_OF_TIME = 7
"""The version of UUID whose first 48 bits are a time in milliseconds (RFC 9562, section 5.7)."""


def application_of(task: TaskContext) -> str | None:
    """Return what distinguishes this application from all others; None where Spark does not tell."""
    application_id = task.getLocalProperty(_APPLICATION_ID)
    started = task.getLocalProperty(_APPLICATION_STARTED)
    return None if application_id is None or started is None else f"{application_id}@{started}"


class Statement(NamedTuple):
    """The statement that a task works for."""

    application: str
    began_ms: int
    """When it began, by the driver's clock."""

    @classmethod
    def of(cls, task: TaskContext | None) -> Statement | None:
        """Return the statement of a task; None where Spark does not tell, as in the tasks of an RDD."""
        application = None if task is None else application_of(task)
        if task is None or application is None:
            return None
        try:
            statement = uuid.UUID(task.getLocalProperty(_STATEMENT) or "")
        except ValueError:
            return None
        return cls(application, statement.int >> 80) if statement.version == _UUID_OF_TIME else None


@dataclass(frozen=True, slots=True)
class Horizon:
    """Where a plan ended in each of its logs."""

    planned_ms: int
    """When planning began, by the driver's clock."""
    ends: tuple[tuple[str, Place], ...]
    """The name of each log, and the place of the first record that is not in the plan."""

    @classmethod
    def of(cls, logs: Iterable[str], stretches: Iterable[Stretch], planned_ms: int) -> Horizon:
        """Return the end of a plan of these stretches."""
        ends = dict.fromkeys(logs, Place(0, 0))
        for stretch in stretches:
            if stretch.log is not None:
                ends[stretch.log] = stretch.end
        return cls(planned_ms, tuple(ends.items()))

    async def added_before(self, statement: Statement, catalog: Catalog) -> list[Found]:
        """Return the records behind the plan, up to the last that an earlier statement has added.

        Raises as `Catalog.stretches`.
        """
        found: list[Found] = []
        for log, end in self.ends:
            found += await catalog.added_by(statement.application, log, end, statement.began_ms)
        return found
