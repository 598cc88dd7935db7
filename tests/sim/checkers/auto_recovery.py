"""The promises of auto recovery: it copies first, replaces nobody early, and keeps its tasks to the end.

- RepairsCopyFirst: a repair names a bookie in a fragment of a bounded ledger when it has shown every entry
  that it owes there: acknowledged it, or returned it to somebody. Entries recorded as absent are excepted,
  and entries that the replaced bookie never showed either: no copy is given up with its seat.
- NobodyIsReplacedEarly: a bookie loses a seat of a complete fragment only if it was away for the delay. This
  is checked in runs in which every client sees the metadata store in time, and nobody repairs by hand.
- TasksEndWhole: no complete fragment names a bookie whose disk is gone for good when the task that calls it
  lost ends. Tasks of deleted ledgers, and tasks that another one follows, are excepted. So are disks that
  went while the worker had the ledger's lock: it may have seen their entries before.
- NobodyNeedsWhoLeft: when the order ends a bookie's id, and ever after, no fragment names the bookie for
  entries that it has acknowledged. A bookie is removed only under an order.
- CopiesComeBack: once faults are over, every CLOSED ledger gets all its copies back, on bookies that serve.
  No task is left then, and no lock.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

from client_aio.admin.replicas import parts_of
from client_aio.autorecovery.service import AutoRecovery
from client_aio.config import AutoRecoveryConfig
from client_aio.core.repair_plan import owed
from metadata.access.bookies import REMOVED
from metadata.access.repair_tasks import REASON_ABANDONED, RepairTask, RepairTasks, TaskRef
from metadata.errors import BookKeeperError, MetadataCorruptError, NoSuchLedgerError
from metadata.ids import (
    KEY_AVAILABLE,
    KEY_COOKIES,
    KEY_LEDGERS,
    KEY_ORDERS,
    KEY_REPAIR_LOCKS,
    KEY_REPAIR_TASKS,
    ledger_id_of,
)
from metadata.model.ledger import LedgerMetadata
from tests.sim.checkers.after_healing import CHECKERS
from tests.sim.workloads.ledger import SETUPS

if TYPE_CHECKING:
    from client_aio import Client
    from client_aio.core.repair_plan import Part
    from metadata.store import Version
    from tests.sim.simulation import Simulation

DELAY_S = 0.8
_TOLERANCE_S = 0.3
_COME_BACK_S = 40.0
"""Without the end of any task."""
_COME_BACK_MAX_S = 200.0
_BLINDING = ("meta_", "pause", "isolate", "block_", "clock_")
"""Beginnings of the kinds of faults by which a client may see the metadata store late."""

QUICK = AutoRecoveryConfig(
    lost_bookie_delay_s=DELAY_S,
    look_interval_s=0.1,
    pass_interval_s=0.4,
    reread_interval_s=4.0,
    check_interval_s=2.0,
    info_interval_s=0.5,
    retry_s=0.3,
    retry_max_s=1.0,
    poll_interval_s=1.0,
    worker_bytes_per_s=200_000,
    cluster_bytes_per_s=400_000,
)


class Watched:
    """Auto recovery, as a run shows it in the metadata store."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._history = simulation.history
        self._metadata: dict[int, LedgerMetadata] = {}
        self._gone_at: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._tasks: dict[str, RepairTask] = {}
        self._locked_at: dict[int, float] = {}  # when each ledger was locked last
        self._leaving: dict[str, str] = {}  # the mode of the last order of each bookie that was to leave
        self._sees_in_time = not any(fault.kind.startswith(_BLINDING) for fault in simulation.plan.faults)
        self._sees_in_time &= not any(
            actor.role in ("repairer", "operator") for actor in simulation.plan.actors
        )
        simulation.tree.watchers.append(self.changed)

    def changed(self, key: str, value: bytes | None, _: Version | None) -> None:
        """Judge a change of the metadata store, when it takes effect."""
        if key.startswith(f"{KEY_AVAILABLE}/"):
            self._registration(key.rpartition("/")[2], is_there=value is not None)
        elif key == KEY_ORDERS and value is not None:
            for name, order in json.loads(value)["orders"].items():
                if order["mode"] == REMOVED and self._leaving.get(name) != REMOVED:
                    self._released(name)
                self._leaving[name] = order["mode"]
        elif key.startswith(f"{KEY_COOKIES}/") and value is None:
            self._removed(key.rpartition("/")[2])
        elif key.startswith(f"{KEY_REPAIR_TASKS}/"):
            self._task(key.rpartition("/")[2], value)
        elif key.startswith(f"{KEY_REPAIR_LOCKS}/") and value is not None:
            self._locked_at[int(key.rpartition("/")[2])] = self._history.now()
        elif key.startswith(f"{KEY_LEDGERS}/") and key.count("/") == 5:
            ledger_id = ledger_id_of(key)
            before = self._metadata.pop(ledger_id, None)
            if value is not None:
                after = self._metadata[ledger_id] = LedgerMetadata.from_json(value)
                for bookie in self._simulation.released:
                    self._check_released(bookie, after)
                if before is not None and not after.is_unbounded and before.state is after.state:
                    self._fragments(before, after)

    # --- bookies -------------------------------------------------------------------------------

    def _registration(self, bookie: str, *, is_there: bool) -> None:
        if not is_there:
            self._gone_at.setdefault(bookie, self._history.now())
            return
        self._longest[bookie] = self._longest_absence(bookie)
        self._gone_at.pop(bookie, None)

    def _longest_absence(self, bookie: str) -> float:
        now = self._history.now()
        return max(self._longest.get(bookie, 0.0), now - self._gone_at.get(bookie, now))

    def _released(self, bookie: str) -> None:
        """Judge the order that ends a bookie's id. It may refuse to start from then on."""
        self._simulation.released.add(bookie)
        self._simulation.stats["bookie_released"] += 1
        for metadata in self._metadata.values():
            self._check_released(bookie, metadata)

    def _removed(self, bookie: str) -> None:
        self._simulation.left.add(bookie)
        self._simulation.stats["bookie_left"] += 1
        self._history.require(
            bookie in self._simulation.released, "NobodyNeedsWhoLeft", lambda: f"{bookie} has no such order"
        )

    def _check_released(self, bookie: str, metadata: LedgerMetadata) -> None:
        """Judge a ledger after a bookie was told that nobody needs it."""
        fragments = metadata.fragments
        ends = [one.first_entry for one in fragments[1:]] + [(1 << 62) if metadata.last_entry is None
                                                             else metadata.last_entry + 1]  # fmt: skip
        for fragment, end in zip(fragments, ends, strict=True):
            if bookie not in fragment.bookies:
                continue
            words = self._history.words
            promised = words.promised_under(bookie, metadata.ledger_id, fragment.content_term)
            needed = [entry_id for entry_id in promised if fragment.first_entry <= entry_id < end]
            self._history.require(
                not needed,
                "NobodyNeedsWhoLeft",
                lambda needed=needed: f"{bookie} has left with entries {needed} of {metadata}",
            )

    # --- tasks ---------------------------------------------------------------------------------

    def _task(self, name: str, value: bytes | None) -> None:
        if value is not None:
            if name not in self._tasks:
                self._simulation.stats["repair_task"] += 1
            self._tasks[name] = task = RepairTask.from_json(value)
            self._simulation.stats["ledger_abandoned"] += REASON_ABANDONED in task.reasons
            return
        ended, ref = self._tasks.pop(name, None), TaskRef.of_name(name)
        metadata = self._metadata.get(ref.ledger_id)
        self._simulation.stats["repair_task_done"] += 1
        if ended is None or metadata is None:
            return
        if any(TaskRef.of_name(other).ledger_id == ref.ledger_id for other in self._tasks):
            return
        named = {bookie for part in parts_of(metadata) for bookie in part.bookies}
        locked_at = self._locked_at.get(ref.ledger_id, math.inf)
        wiped = {name for name, at in self._simulation.wiped.items() if at < locked_at}
        left = sorted(named.intersection(ended.lost, wiped))
        self._history.require(
            not left,
            "TasksEndWhole",
            lambda: f"task {name} is over, and ledger {ref.ledger_id} names {left}: {metadata}",
        )

    # --- fragments -----------------------------------------------------------------------------

    def _fragments(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """Judge a change that replaces bookies of complete fragments: it is a repair's."""
        present = {part.first_entry: part for part in parts_of(after)}
        for was in parts_of(before):
            now = present.get(was.first_entry)
            if now is None or now.bookies == was.bookies or now.last_entry != was.last_entry:
                continue
            for old, new in zip(was.bookies, now.bookies, strict=True):
                if old != new:
                    self._simulation.stats["seat_repaired"] += 1
                    self._check_copied(after, now, old, new)
                    self._check_away(after, old)

    def _check_copied(self, after: LedgerMetadata, part: Part, old: str, new: str) -> None:
        ledger_id = after.ledger_id
        shown = self._shown(new, ledger_id, part.content_term)
        lacking = {
            entry_id
            for wanted in owed(after, part, new, 1 << 40)
            for entry_id in range(wanted.first, wanted.last + 1, wanted.stride)
            if entry_id not in shown
        }
        seat = part.bookies.index(new)
        absent = sum(
            one.entries
            for one in after.absent
            if (one.first_entry, one.seat, one.bookie) == (part.first_entry, seat, old)
        )
        given_up = sorted(lacking & self._shown(old, ledger_id, part.content_term))
        self._history.require(
            not given_up or len(lacking) <= absent,
            "RepairsCopyFirst",
            lambda: f"{new} takes the place of {old} in ledger {ledger_id} and never showed {given_up}",
        )

    def _shown(self, bookie: str, ledger_id: int, content_term: int) -> set[int]:
        words = self._history.words
        return {*words.given(bookie, ledger_id), *words.promised_under(bookie, ledger_id, content_term)}

    def _check_away(self, after: LedgerMetadata, old: str) -> None:
        away_s = self._longest_absence(old)
        self._history.require(
            old in self._leaving or not self._sees_in_time or away_s >= DELAY_S - _TOLERANCE_S,
            "NobodyIsReplacedEarly",
            lambda: f"{old} lost its seat in ledger {after.ledger_id}, and was away for {away_s:.2f} s",
        )


async def setup(simulation: Simulation) -> None:
    """Watch a run from its beginning."""
    simulation.shared["auto-recovery"] = Watched(simulation)


SETUPS["auto_recovery"] = setup


async def check_copies_come_back(simulation: Simulation, client: Client) -> None:
    """Have auto recovery run beside no faults, until nothing is left to do."""
    if "auto-recovery" not in simulation.shared:
        return
    loop, history, stats = simulation.loop, simulation.history, simulation.stats
    lacking, done = "", -1
    stands_from = began = loop.now
    async with AutoRecovery(client, QUICK, name="judge"):
        while history.violation is None:
            await asyncio.sleep(0.3)
            # A worker rests between its requests, so many ledgers take long. Only standing still is wrong.
            if (now_done := stats["repair_task_done"]) != done:
                stands_from, done = loop.now, now_done
            if loop.now > min(stands_from + _COME_BACK_S, began + _COME_BACK_MAX_S):
                break
            try:
                lacking = await _what_lacks(simulation, client)
            except BookKeeperError as error:
                lacking = repr(error)
            if not lacking:
                return
    history.fail("CopiesComeBack", lacking)


async def _what_lacks(simulation: Simulation, client: Client) -> str:
    """Return what is still to be repaired; empty for nothing."""
    tasks = RepairTasks(client._context.ledgers.store)
    if refs := await tasks.refs():
        return f"tasks are left: {[(ref.name, (await tasks.read(ref))[0]) for ref in refs]}"
    for record in list(simulation.history.ledgers.values()):
        if record.metadata is None or record.is_gone or not record.metadata.is_closed:
            continue
        try:
            replicas = await client.ledger_replicas(record.ledger_id)
        except (NoSuchLedgerError, MetadataCorruptError):
            continue
        bad = [one for one in replicas if one.entries_missing != 0 or one.error]
        if bad:
            return f"ledger {record.ledger_id} lacks copies: {bad}"
    locks = await client._context.ledgers.store.children(KEY_REPAIR_LOCKS)
    return f"locks are left: {locks}" if locks else ""


CHECKERS.append(check_copies_come_back)
