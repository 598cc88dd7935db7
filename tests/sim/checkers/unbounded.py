"""Unbounded ledgers: the record of the entries acknowledged and read, and the invariants.

Owns the record of runs with one unbounded ledger (`tests.sim.workloads.unbounded`). The names:

- NoLogDivergence: a position has one value, whoever acknowledges or reads it, and it is one that was added.
- AllCommittedIdsAreReadable: a term opens behind everything acknowledged before it. After healing, every
  entry that was acknowledged or read, and not trimmed, is read in order.
- AddsTakeEffectOnce: an entry is at one id, and the entries of one writer's life are in the order of its
  adds. No add overtakes one that fails.
- FencedWritersEnd: no writer has an entry acknowledged behind an entry of a writer that came after it.
- NotDoneIsNotThere: no entry of a batch that failed as *not done* is read (`tests.sim.checkers.batches`).
- TermsCount: the term grows by one at each takeover, and in no other way; no content term falls.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING

from metadata.errors import MetadataCorruptError
from metadata.ids import KEY_LEDGERS
from metadata.model.ledger import LedgerMetadata, LedgerState
from tests.sim.checkers.batches import NotDone, entries_of

if TYPE_CHECKING:
    import asyncio

    from metadata.store import Version
    from tests.sim.simulation import Simulation

NAME = "payments"
_KEY = "unbounded ledger"


class TermsRecord:
    """What happened to the unbounded ledger of a run; `of` gives it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._fail = simulation.history.fail
        self.not_done = NotDone(simulation.history)
        self.added: set[bytes] = set()
        self.acknowledged: dict[int, bytes] = {}
        self.read: dict[int, bytes] = {}
        self.metadata: LedgerMetadata | None = None
        """The head that was written last: of the ledger, or of one that its maker is about to take back."""
        self.heads: dict[int, LedgerMetadata] = {}
        self.first_entry = 0
        self._adds: dict[str, list[asyncio.Future[int]]] = {}  # of one writer's life, in order
        self._number: dict[bytes, tuple[str, int]] = {}
        self._id_of: dict[bytes, int] = {}
        self._settled: dict[str, int] = {}  # so many of the adds of a writer's life are done
        self._ids: dict[str, list[tuple[int, int]]] = {}  # number and id, of one writer's life, in order

    @classmethod
    def of(cls, simulation: Simulation) -> TermsRecord:
        """Return the run's record, which begins to watch the metadata store when it is first asked for."""
        record = simulation.shared.get(_KEY)
        if record is None:
            record = simulation.shared[_KEY] = cls(simulation)
            # Before the history's own, which then ignores this ledger.
            simulation.tree.watchers.insert(0, record.metadata_changed)
        return record

    @classmethod
    def find(cls, simulation: Simulation) -> TermsRecord | None:
        """Return the run's record, None where there is no unbounded ledger."""
        return simulation.shared.get(_KEY)

    def acknowledge(self, who: str, entry_id: int, value: bytes) -> None:
        """Note an acknowledged add."""
        self._simulation.history.note(who, "acknowledged", entry_id, value[:30])
        self._agree(f"{who} was acknowledged", entry_id, value)
        self._is_once(entry_id, value)
        if entry_id in self.acknowledged:
            self._fail("NoLogDivergence", f"entry {entry_id} was acknowledged twice, also to {who}")
        self.acknowledged[entry_id] = value

    def issued(self, who: str, value: bytes, future: asyncio.Future[int]) -> None:
        """Note an add of one life of a writer."""
        adds = self._adds.setdefault(who, [])
        settled = self._settled.get(who, 0)
        while settled < len(adds) and adds[settled].done():
            settled += 1
        self._settled[who] = settled
        self.added.add(value)
        self._number[value] = (who, len(adds))
        adds.append(future)
        future.add_done_callback(lambda future: self._done(who, value, settled, future))

    def issued_batch(self, who: str, values: list[bytes], batch: asyncio.Future[tuple[int, int]]) -> None:
        """Note a batch of one life of a writer, each entry of it as an add."""
        self.not_done.watch(who, batch, values, lambda: self._id_of)
        for value, each in zip(values, entries_of(batch, len(values)), strict=True):
            self.issued(who, value, each)

    def _done(self, who: str, value: bytes, settled: int, future: asyncio.Future[int]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        number = self._number[value][1]
        if number > settled:  # Else the adds before it had ended when it was made.
            before = self._adds[who][number - 1]
            if not before.done() or before.cancelled() or before.exception() is not None:
                self._fail("AddsTakeEffectOnce", f"{who}: {value!r} overtook the add before it: {before!r}")
        entry_id = future.result()
        self.acknowledge(who, entry_id, value)
        first = self._ids[who][0][1]
        for other, theirs in self._ids.items():
            index = bisect_right(theirs, first, key=itemgetter(1))
            if other != who and index < len(theirs) and theirs[index][1] < entry_id:
                self._fail(
                    "FencedWritersEnd", f"{who} has entry {entry_id}, behind {other}'s {theirs[index]}"
                )

    def _is_once(self, entry_id: int, value: bytes) -> None:
        """Check an entry that was acknowledged or read."""
        self.not_done.look(self._number.get(value, ("?", 0))[0], value)
        known = self._id_of.get(value)
        if known is not None:
            if known != entry_id:
                self._fail("AddsTakeEffectOnce", f"{value!r} is at {known} and at {entry_id}")
            return
        self._id_of[value] = entry_id
        if value not in self._number:
            return
        who, number = self._number[value]
        ids = self._ids.setdefault(who, [])
        index = bisect_right(ids, (number, entry_id))
        ids.insert(index, (number, entry_id))
        order = [each for _, each in ids[max(0, index - 1) : index + 2]]
        if order != sorted(order):
            self._fail("AddsTakeEffectOnce", f"{who}: add {number} is at {entry_id}, between {order}")

    def see(self, who: str, entry_id: int, value: bytes) -> None:
        """Note an entry that was read."""
        if value not in self.added:
            self._fail("NoLogDivergence", f"{who} read {value[:40]!r} as {entry_id}, which nobody added")
        self._agree(f"{who} read", entry_id, value)
        self._is_once(entry_id, value)
        self.read[entry_id] = value

    def _agree(self, what: str, entry_id: int, value: bytes) -> None:
        for other, values in (("acknowledged", self.acknowledged), ("read", self.read)):
            if values.get(entry_id, value) != value:
                text = f"{what} {value[:40]!r} as {entry_id}; {values[entry_id][:40]!r} was {other}"
                self._fail("NoLogDivergence", text)

    def metadata_changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Look at each change of the head."""
        if not key.startswith(KEY_LEDGERS + "/") or key.count("/") != 5 or value is None:
            return
        try:
            metadata = LedgerMetadata.from_json(value)
        except MetadataCorruptError as error:
            self._fail("TypeOK", str(error))
            return
        if not metadata.is_unbounded:
            return
        self._simulation.history.ignore(metadata.ledger_id)
        before, self.metadata = self.metadata, metadata
        self.heads[metadata.ledger_id] = metadata
        self._simulation.history.note("meta", "head", metadata.state.value, metadata.term, metadata.rows.rows)
        if before is None or before.ledger_id != metadata.ledger_id:
            return
        self.first_entry = max(self.first_entry, metadata.first_entry)
        has_taken_over = metadata.state is LedgerState.IN_RECOVERY and metadata.term == before.term + 1
        if metadata.term != before.term and not has_taken_over:
            self._fail("TermsCount", f"from {before.state} {before.term} to {metadata.state} {metadata.term}")
        terms = [fragment.content_term for fragment in metadata.fragments]
        if terms != sorted(terms):
            self._fail("TermsCount", f"content terms {terms}")
        if metadata.state is LedgerState.OPEN and before.state is LedgerState.IN_RECOVERY:
            first = metadata.last_fragment.first_entry
            beyond = [entry_id for entry_id in {**self.acknowledged, **self.read} if entry_id >= first]
            if beyond:
                self._fail(
                    "AllCommittedIdsAreReadable",
                    f"term {metadata.term} opens at {first}; acknowledged or read are {sorted(beyond)}",
                )

    def check_read(self, who: str, found: list[tuple[int, bytes]]) -> None:
        """Compare with all that a reader has found from the first entry on that is left."""
        for (entry_id, value), expected in zip(
            found, range(found[0][0] if found else 0, 1 << 62), strict=False
        ):
            if entry_id != expected:
                self._fail("AllCommittedIdsAreReadable", f"{who} read {entry_id}, not {expected}")
            self.see(who, entry_id, value)
        there = dict(found)
        for entry_id, value in {**self.read, **self.acknowledged}.items():
            if entry_id >= self.first_entry and there.get(entry_id) != value:
                text = f"{who} read {there.get(entry_id)!r:.60} as {entry_id}, not {value[:40]!r}"
                self._fail("AllCommittedIdsAreReadable", text)
