"""Which repair tasks give their places to others (rule 14). Pure.

The table of tasks has a fixed number of places. Some ledgers cannot be repaired: no bookie returns their
entries, or there are too few bookies. Their tasks never end, and would fill the table.

So tasks that failed `FAILURES` times keep half of the places at most. The auditor deletes the others and
remembers their ledgers, which are *set aside*. A ledger that is set aside comes behind all others. It gets a
task again where there is room in that half. Beside that, a few of both kinds change places in each round. So
every ledger has its turn, and the writes of a round are bounded.

Ledgers with the fewest good copies get tasks first. Where some are set aside, there may be thousands of them
that cannot be repaired. Then half of the places are dealt out to all numbers of copies alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from metadata.access.repair_tasks import REASON_LOST, RepairTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from client_aio.core.audit import LedgerIndex
    from metadata.access.repair_tasks import TaskRef

FAILURES = 3
"""A task that failed so often may have to give its place to another one."""
_TURNS_SHARE = 50
"""One in so many places of the table changes hands in a round, if nothing asks for more."""


_WHY = "it failed before, and gave its place to others for a while"


class Aside(NamedTuple):
    """A ledger that was set aside, with what there is to know of its task."""

    copies: int
    reasons: dict[str, list[str]]
    since_ms: int
    entries_lost: int

    @property
    def task(self) -> RepairTask:
        """Return the task that it gets again. One more failure is enough to set it aside once more."""
        return RepairTask(self.reasons, self.since_ms, FAILURES - 1, _WHY, self.entries_lost)


class FailedTasks:
    """The ledgers that are set aside; the one that has waited longest stands first."""

    def __init__(self, tasks_max: int) -> None:
        self._share = max(tasks_max // 2, 1)
        self._turns = max(tasks_max // _TURNS_SHARE, 1)
        self.aside: dict[int, Aside] = {}
        self._shared: dict[str, dict[str, list[str]]] = {}  # thousands of ledgers have the same reasons

    def choose(self, tasks: Mapping[TaskRef, RepairTask], room: int) -> tuple[list[TaskRef], list[int]]:
        """Choose what changes places in this round; `set_aside` and `brought_back` tell of what was done.

        Args:
            tasks: all tasks there are.
            room: the places that are free.

        Returns:
            The tasks that go, and the ledgers that get a task again.
        """
        failed = [ref for ref, task in tasks.items() if task.attempts >= FAILURES]
        failed.sort(key=lambda ref: (-tasks[ref].attempts, -ref.copies, ref.ledger_id))
        surplus = max(len(failed) - self._share, 0)
        # One that came back a moment ago has one failure less, and has a place of this half, too.
        those_here = sum(task.attempts >= FAILURES - 1 for task in tasks.values()) - surplus
        space = max(min(self._share - those_here, room + surplus), 0)
        turns = min(self._turns, len(failed) - surplus)
        back = list(itertools.islice(self.aside, space + turns))
        going = failed[: surplus + max(len(back) - space, 0)]
        return sorted(going), back

    def set_aside(self, ref: TaskRef, task: RepairTask) -> None:
        """Note that a task is about to give its place."""
        reasons = self._shared.setdefault(repr(sorted(task.reasons.items())), task.reasons)
        self.aside[ref.ledger_id] = Aside(ref.copies, reasons, task.since_ms, task.entries_lost)

    def brought_back(self, ledger_id: int) -> None:
        """Forget a ledger that has a task again, or needs none."""
        self.aside.pop(ledger_id, None)

    def changed(self, index: LedgerIndex, lost: list[str]) -> Iterator[tuple[int, Aside]]:
        """Yield the ledgers whose lost bookies are others by now: they are judged anew, and are forgotten."""
        for ledger_id, one in list(self.aside.items()):
            if index.concerned(ledger_id, lost) != sorted(one.reasons.get(REASON_LOST, ())):
                del self.aside[ledger_id]
                yield ledger_id, one

    @property
    def by_copies(self) -> dict[int, int]:
        """Return how many ledgers are set aside, by the number of good copies."""
        return dict(sorted(Counter(one.task.good_copies(one.copies) for one in self.aside.values()).items()))

    @property
    def bookies_checked(self) -> set[str]:
        """Return the bookies of which only a check knows what they lack: no metadata tell of it."""
        all_reasons = {id(one.reasons): one.reasons for one in self.aside.values()}
        return {
            name
            for reasons in all_reasons.values()
            for reason, bookies in reasons.items()
            if reason != REASON_LOST
            for name in bookies
        }
