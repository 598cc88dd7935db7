"""The history of a run, and the invariants of bounded ledgers that must hold of it.

Owns the record of one run and the checks of it. A check that fails becomes a `ViolationError` with the name
of its invariant; the run ends there. The names are those of the published TLA+ models of this protocol where
the models have one.

- TypeOK: every value of a ledger's metadata parses, at each change; frames and lengths are right.
- NoOutOfOrderEntries: futures of adds complete in entry order, without gaps; reads return entries in order.
- AllCommittedEntriesReachAckQuorum: when an entry is acknowledged, Qa bookies of its write set have said OK;
  after healing Qa of them hold it.
- NoDivergenceBetweenClientAndMetaData: nothing acknowledged or read lies beyond a closed ledger's last entry,
  neither when it is closed nor later.
- AllAckedEntriesAreReadable: after healing, every entry that was acknowledged, read, or lies in a closed
  ledger is read, byte for byte. A power cut of the whole cluster makes no difference.
- AllEntriesOfClosedLedgerReachedWriteQuorum, with guaranteed write quorum: a writer closes a ledger when all
  entries have, a recovery when those of the last fragment have.
- EndsAreProven: a recovery closes a ledger when the entry behind the last one is proven absent. Qw − Qa + 1
  bookies of that entry's write set have answered "no such entry" to a recovery read (rule 12c).
- RecoveredEntriesReachAckQuorum: when a recovery closes a ledger, Qa bookies have said that they have each
  entry of the last fragment. The ensembles are those that the ledger is closed with (rule 12c).
- EarlierFragmentsStay: a change of state leaves all fragments but the last as they are, also where a repair
  has changed them (rule 12e).
- NoDirtyReads: an ordinary read returns entries that are acknowledged or lie within a closed ledger.
- NoLogDivergence: all readers of an entry read the bytes that its writer added.
- ClosedNeverChanges: state, last entry and length of a closed ledger stay; states only go forward.
- VersionsIncrease: each change of a key has a higher version.
- FragmentsBeginAtLac: no fragment of an open ledger begins beyond the first entry not acknowledged.
- DeletionsAreAskedFor: no ledger with entries is deleted that nobody has asked to delete.
- OpenLedgersAreNotFenced: no writer is told that somebody took its ledger over while the ledger's metadata
  say OPEN.
- ReplacementsHoldWhatTheyOwe, with guaranteed write quorum: when the metadata come to name a replacement, it
  has acknowledged every entry that it owes and that is acknowledged (rule 11).
- AddsGoOn, with guaranteed write quorum: adds are acknowledged within a bound while Qa bookies of the
  ensemble are well, whatever the others do (rule 9; `tests.sim.profiles.refusals`).
- WipedBookiesDoNotServe: a bookie whose disk was replaced by an empty one does not start (rule 6).
- WhoLostItsCookieDoesNotServe: nor does one with a directory whose cookie is gone, cut, or another one's.
- IdsAreGivenOnce: no client gets the id of a ledger that another one got, whatever became of the metadata.
- Liveness: once faults stop, every ledger can be recovered and closed within a bound.
- Unexpected: no call raises an error that is not in the tree of errors.

`tests.sim.checkers.bookie_promises` checks the answers of bookies, for all ledgers. `older_metadata` has what
holds while the metadata store is an older copy.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metadata.errors import MetadataCorruptError
from metadata.ids import KEY_LEDGERS, KEY_SET_BACKS, ledger_id_of
from metadata.model.ledger import LedgerMetadata, LedgerState
from tests.sim.checkers import older_metadata
from tests.sim.checkers.bookie_promises import Words

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from metadata.model.ledger import Absent, Fragment
    from metadata.store import Version

_STATES = (LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED)


class ViolationError(AssertionError):
    """An invariant does not hold; `name` is one of those in this module's table."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


@dataclass
class LedgerRecord:
    """What is known of one ledger."""

    ledger_id: int
    issued: list[bytes] = field(default_factory=list)
    futures: list[asyncio.Future[int]] = field(default_factory=list)
    not_done: int = 1 << 62
    """The first entry of which a writer has said that it was not done (`tests.sim.checkers.handles`)."""
    sent_at: dict[int, float] = field(default_factory=dict)  # by the writers of `workloads.prompt`
    acked: int = -1
    read_up_to: int = -1
    metadata: LedgerMetadata | None = None
    open_metadata: LedgerMetadata | None = None  # the last version that was OPEN
    version: int = 0
    is_gone: bool = False
    """Its metadata were deleted."""
    may_be_deleted: bool = False
    """Somebody has asked for it, or is about to."""
    is_of_before: bool = False
    """The store was set back to a copy that does not have its present metadata, which `metadata` are. Its
    bookies have to keep it. See `tests.sim.checkers.older_metadata`."""
    older: LedgerMetadata | None = None
    """While it is of before: the metadata that the store has of it. None: it has none."""
    is_fenced_by_older: bool = False
    """A recovery that older metadata led has begun."""
    is_excused: bool = False
    """What older metadata made of it is not checked; `older_metadata` has the reasons."""

    @property
    def is_deleted(self) -> bool:
        """Return whether it is gone, or may be by now."""
        return self.is_gone or self.may_be_deleted

    @property
    def closed_last(self) -> int | None:
        """Return the last entry of a ledger that is closed; of one of before, by its newest metadata."""
        return self.metadata.last_entry if self.metadata is not None and self.metadata.is_closed else None

    @property
    def present(self) -> LedgerMetadata | None:
        """Return the metadata that the store has."""
        return self.older if self.is_of_before else self.metadata

    @property
    def ends(self) -> list[int]:
        """Return the last entry by all metadata that have it closed: the newest, and the older ones."""
        found = (each.last_entry for each in (self.metadata, self.older) if each is not None)
        return [last for last in found if last is not None]

    @property
    def needed(self) -> int:
        """Return the entry up to which all have to be readable once it is closed."""
        return max([self.acked, self.read_up_to, *self.ends])


class History:
    """The record of a run. `now` gives the simulation's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.events: list[tuple[Any, ...]] = []
        self.ledgers: dict[int, LedgerRecord] = {}
        self.ignored: set[int] = set()
        self.counts: Counter[str] = Counter()
        """How often something happened that profiles are made for."""
        self.violation: ViolationError | None = None
        self.on_violation: Callable[[], None] = lambda: None
        self.words = Words(self)
        self.promised = self.words.promised
        self.is_set_back_told = True
        """Some event in the metadata store tells of the last time at which the store was set back."""
        self.confirmers: list[Callable[[], None]] = []
        """Called before a check: they tell `confirmed` what handles know (`tests.sim.checkers.handles`)."""

    # --- recording -----------------------------------------------------------------------------

    def note(self, who: str, what: str, *details: Any) -> None:
        """Record an event; formatted only when somebody looks."""
        self.events.append((self.now(), who, what, *details))

    def digest(self) -> int:
        """Return a checksum of all that happened."""
        return zlib.crc32("\n".join(map(repr, self.events)).encode())

    def fail(self, name: str, text: str) -> None:
        """Record that an invariant does not hold. The first one ends the run."""
        if self.violation is None:
            self.violation = ViolationError(name, text)
            self.note("checker", f"!!! {name}", text)
            self.on_violation()

    def require(self, condition: bool, name: str, text: Callable[[], str]) -> None:
        """Fail unless the condition holds."""
        if not condition:
            self.fail(name, text())

    def ledger(self, ledger_id: int) -> LedgerRecord:
        """Return a ledger's record."""
        record = self.ledgers.get(ledger_id)
        if record is None:
            record = self.ledgers[ledger_id] = LedgerRecord(ledger_id)
        return record

    # --- what writers do -----------------------------------------------------------------------

    def issued(self, who: str, ledger_id: int, payload: bytes, future: asyncio.Future[int]) -> None:
        """Note an add, and watch its future."""
        record = self.ledger(ledger_id)
        entry_id = len(record.issued)
        record.issued.append(payload)
        record.futures.append(future)
        future.add_done_callback(lambda done: self._completed(who, record, entry_id, done))

    def _completed(self, who: str, record: LedgerRecord, entry_id: int, future: asyncio.Future[int]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        got = future.result()
        self.require(
            got == entry_id,
            "NoOutOfOrderEntries",
            lambda: f"{who} added entry {entry_id} of ledger {record.ledger_id} and was told {got}",
        )
        for below in range(record.acked + 1, entry_id):
            future = record.futures[below]
            if not future.done() or future.cancelled() or future.exception() is not None:
                self.fail(
                    "NoOutOfOrderEntries",
                    f"entry {entry_id} of ledger {record.ledger_id} is acknowledged and {below} is not",
                )
        for acked in range(record.acked + 1, entry_id + 1):
            self._acknowledged(who, record, acked)

    def confirmed(self, who: str, ledger_id: int, last: int) -> None:
        """Note that a writer's handle says that everything up to an entry is acknowledged."""
        record = self.ledger(ledger_id)
        for entry_id in range(record.acked + 1, last + 1):
            self._acknowledged(who, record, entry_id)

    def _acknowledged(self, who: str, record: LedgerRecord, entry_id: int) -> None:
        record.acked = entry_id
        ledger_id = record.ledger_id
        self.note(who, "acknowledged", ledger_id, entry_id)
        self.require(
            record.is_excused or all(entry_id <= closed for closed in record.ends),
            "NoDivergenceBetweenClientAndMetaData",
            lambda: f"entry {entry_id} of ledger {ledger_id} was acknowledged; it is closed at {record.ends}",
        )
        metadata = record.open_metadata
        if metadata is not None:
            holders = self.holders(metadata, entry_id)
            self.require(
                len(holders) >= metadata.ack_quorum,
                "AllCommittedEntriesReachAckQuorum",
                lambda: f"entry {entry_id} of ledger {ledger_id} is acknowledged and only {holders} said OK",
            )

    def holders(self, metadata: LedgerMetadata, entry_id: int) -> list[str]:
        """Return the bookies of an entry's write set that have said that they have it."""
        return [
            bookie
            for bookie in write_set(metadata, entry_id)
            if entry_id in self.promised.get((bookie, metadata.ledger_id), ())
        ]

    def settle(self, who: str) -> None:
        """Note what had been acknowledged when a client died, though it may not have looked yet."""
        for look in self.confirmers:
            look()
        for record in self.ledgers.values():
            for entry_id in range(record.acked + 1, len(record.futures)):
                future = record.futures[entry_id]
                if not future.done() or future.cancelled() or future.exception() is not None:
                    break
                self._acknowledged(who, record, entry_id)

    # --- what readers see ----------------------------------------------------------------------

    def read(self, who: str, ledger_id: int, entry_id: int, payload: bytes) -> None:
        """Note an ordinary read."""
        record = self.ledger(ledger_id)
        self.require(
            entry_id < len(record.issued) and record.issued[entry_id] == payload,
            "NoLogDivergence",
            lambda: (
                f"{who} read {payload[:40]!r} as entry {entry_id} of ledger {ledger_id}, which nobody wrote"
            ),
        )
        if entry_id > record.acked:
            self.settle(who)  # its future may be done, and nobody have looked yet
        self.require(
            entry_id <= max([record.acked, *record.ends]),
            "NoDirtyReads",
            lambda: (
                f"{who} read entry {entry_id} of ledger {ledger_id}: acknowledged up to {record.acked}, "
                f"closed at {record.closed_last}"
            ),
        )
        if entry_id > record.read_up_to:
            record.read_up_to = entry_id

    # --- what the metadata say -----------------------------------------------------------------

    def ignore(self, ledger_id: int) -> None:
        """Leave a ledger that other checkers check out of the checks of bounded ledgers."""
        self.ignored.add(ledger_id)

    def metadata_changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Note a change in the metadata store, when it takes effect."""
        if key == KEY_SET_BACKS and value is not None:
            self.is_set_back_told |= bool(json.loads(value)["events"])
        if not key.startswith(KEY_LEDGERS + "/") or key.count("/") != 5:
            return
        record = self.ledger(ledger_id_of(key))
        if record.is_of_before:
            older_metadata.changed(self, record, value)
            return
        if value is None or version is None:
            self._gone(record)
            return
        try:
            metadata = LedgerMetadata.from_json(value)
        except MetadataCorruptError as error:
            self.fail("TypeOK", str(error))
            return
        before, record.metadata = record.metadata, metadata
        if record.ledger_id not in self.ignored:
            self.note("meta", "ledger", record.ledger_id, version.number, metadata)
        self.require(
            version.number > record.version,
            "VersionsIncrease",
            lambda: f"ledger {record.ledger_id} went from version {record.version} to {version.number}",
        )
        record.version = version.number
        if before is not None and not metadata.is_unbounded:
            self._check_state(record, before, metadata)
            if record.ledger_id not in self.ignored:
                self._check_transition(record, before, metadata)
        if metadata.state is LedgerState.OPEN:
            record.open_metadata = metadata

    def _gone(self, record: LedgerRecord) -> None:
        if record.ledger_id not in self.ignored:
            self.note("meta", "deleted", record.ledger_id)
            self.settle("writer")
            self.require(
                record.may_be_deleted or max(record.acked, record.read_up_to) < 0,
                "DeletionsAreAskedFor",
                lambda: f"ledger {record.ledger_id} is deleted, with entries up to {record.acked}",
            )
        record.is_gone = True

    def _check_state(self, record: LedgerRecord, before: LedgerMetadata, after: LedgerMetadata) -> None:
        earlier = len(before.fragments) - 1
        self.require(
            after.state is before.state or after.fragments[:earlier] == before.fragments[:earlier],
            "EarlierFragmentsStay",
            lambda: f"ledger {record.ledger_id} was {_shown(before)}, is {_shown(after)}",
        )
        self.require(
            _STATES.index(after.state) >= _STATES.index(before.state)
            and (
                not before.is_closed or (after.last_entry, after.length) == (before.last_entry, before.length)
            ),
            "ClosedNeverChanges",
            lambda: f"ledger {record.ledger_id} was {_shown(before)}, is {_shown(after)}",
        )

    def _check_transition(self, record: LedgerRecord, before: LedgerMetadata, after: LedgerMetadata) -> None:
        ledger_id = record.ledger_id
        if after.state is LedgerState.OPEN:
            first = after.last_fragment.first_entry
            if first > record.acked + 1:
                self.settle("writer")
            self.require(
                first <= record.acked + 1,
                "FragmentsBeginAtLac",
                lambda: (
                    f"ledger {ledger_id}: a fragment begins at {first}, acknowledged up to {record.acked}"
                ),
            )
            if after.guaranteed_write_quorum and after.last_fragment != before.last_fragment:
                self._check_newcomers(record, before, after)
        if after.is_closed and not before.is_closed:
            self._check_close(record, before, after)

    def _check_newcomers(self, record: LedgerRecord, before: LedgerMetadata, after: LedgerMetadata) -> None:
        fragment = after.last_fragment
        replacements = set(fragment.bookies) - set(before.last_fragment.bookies)
        for entry_id in range(fragment.first_entry, record.acked + 1):
            for bookie in replacements.intersection(write_set(after, entry_id)):
                self.require(
                    entry_id in self.promised.get((bookie, record.ledger_id), ()),
                    "ReplacementsHoldWhatTheyOwe",
                    lambda bookie=bookie, entry_id=entry_id: (
                        f"{bookie} was put into ledger {record.ledger_id} "
                        f"without entry {entry_id}, which is acknowledged"
                    ),
                )

    def _check_close(self, record: LedgerRecord, before: LedgerMetadata, after: LedgerMetadata) -> None:
        ledger_id = record.ledger_id
        last = after.last_entry
        assert last is not None
        self.settle("writer")
        needed = max(record.acked, record.read_up_to)
        self.require(
            last >= needed,
            "NoDivergenceBetweenClientAndMetaData",
            lambda: (
                f"ledger {ledger_id} was closed at {last}; acknowledged up to {record.acked}, "
                f"read up to {record.read_up_to}"
            ),
        )
        self.require(
            last < len(record.issued),
            "NoLogDivergence",
            lambda: (
                f"ledger {ledger_id} was closed at {last}; its writer issued {len(record.issued)} entries"
            ),
        )
        self.require(
            last < record.not_done,
            "SentAddsEndUnknown",
            lambda: f"ledger {ledger_id} was closed at {last}; {record.not_done} was said to be not done",
        )
        length = sum(map(len, record.issued[: last + 1]))
        self.require(
            after.length == length,
            "TypeOK",
            lambda: f"ledger {ledger_id} was closed with length {after.length}; it is {length}",
        )
        is_recovered = before.state is LedgerState.IN_RECOVERY
        if after.guaranteed_write_quorum:
            name, quorum = "AllEntriesOfClosedLedgerReachedWriteQuorum", after.write_quorum
        else:
            name, quorum = "RecoveredEntriesReachAckQuorum", after.ack_quorum
        # The metadata say from where on a ledger has been closed at its ack quorum, on request.
        short_from = last + 1 if after.below_write_quorum_from is None else after.below_write_quorum_from
        if is_recovered:
            self._check_end(record, before, last)
            self._check_copies(after, range(before.last_fragment.first_entry, short_from), quorum, name)
        elif after.guaranteed_write_quorum:
            self._check_copies(after, range(short_from), quorum, name)
        self._check_copies(
            after, range(short_from, last + 1), after.ack_quorum, "RecoveredEntriesReachAckQuorum"
        )

    def _check_end(self, record: LedgerRecord, before: LedgerMetadata, last: int) -> None:
        said_no = self.words.denied.get((record.ledger_id, last + 1), ())
        proof = [one for one in write_set_of(before, before.last_fragment, last + 1) if one in said_no]
        self.require(
            len(proof) >= before.write_quorum - before.ack_quorum + 1,
            "EndsAreProven",
            lambda: (
                f"ledger {record.ledger_id} was closed at {last}; that there is nothing behind it, only "
                f"{proof} said, of {_shown(before)}"
            ),
        )

    def _check_copies(self, metadata: LedgerMetadata, entries: range, quorum: int, name: str) -> None:
        absent = {one: one.entries for one in metadata.absent}  # how many of each the former bookie may hold
        for entry_id in entries:
            # A repair relies on what it reads: no answer may have come to the add of that.
            has = self.words.has_shown
            holders = [one for one in write_set(metadata, entry_id) if has(one, metadata.ledger_id, entry_id)]
            for one in absent if len(holders) < quorum else ():
                if absent[one] and self._holds_for(metadata, entry_id, one):
                    absent[one] -= 1
                    holders.append(one.bookie)
            self.require(
                len(holders) >= quorum,
                name,
                lambda entry_id=entry_id, holders=holders: (
                    f"ledger {metadata.ledger_id} was closed; that they have entry {entry_id} only "
                    f"{holders} have shown"
                ),
            )

    def _holds_for(self, metadata: LedgerMetadata, entry_id: int, absent: Absent) -> bool:
        """Return whether the former bookie of a seat has shown an entry that the new one lacks."""
        fragment = metadata.fragment_of(entry_id)
        if absent.first_entry != fragment.first_entry:
            return False
        bookie, owing = fragment.bookies[absent.seat], write_set_of(metadata, fragment, entry_id)
        has, ledger_id = self.words.has_shown, metadata.ledger_id
        return (
            bookie in owing
            and absent.bookie not in owing
            and not has(bookie, ledger_id, entry_id)
            and has(absent.bookie, ledger_id, entry_id)
        )

    def told_fenced(self, who: str, ledger_id: int, error: Exception) -> None:
        """Note that a writer was told that its ledger has been taken over."""
        record = self.ledger(ledger_id)
        metadata = record.metadata
        self.require(
            metadata is None
            or record.is_deleted
            or record.is_of_before  # to its writer, the older metadata look like a change by somebody else
            or metadata.state is not LedgerState.OPEN,
            "OpenLedgersAreNotFenced",
            lambda: f"{who} is told that ledger {ledger_id} is not its own any more; it is OPEN: {error}",
        )


def write_set(metadata: LedgerMetadata, entry_id: int) -> list[str]:
    """Return the bookies that are to hold an entry."""
    return write_set_of(metadata, metadata.fragment_of(entry_id), entry_id)


def write_set_of(metadata: LedgerMetadata, fragment: Fragment, entry_id: int) -> list[str]:
    """Return the bookies of a fragment that are to hold an entry; it may be one that the head does not
    have."""
    bookies = fragment.bookies
    start = entry_id % metadata.ensemble_size
    return [bookies[(start + step) % metadata.ensemble_size] for step in range(metadata.write_quorum)]


def _shown(metadata: LedgerMetadata) -> str:
    fragments = " ".join(f"{each.first_entry}:{','.join(each.bookies)}" for each in metadata.fragments)
    return f"{metadata.state.value} last={metadata.last_entry} length={metadata.length} [{fragments}]"


def timeline(history: History, *, last: int = 20_000) -> str:
    """Tell the run's story, one line for each event, the last ones."""
    lines = []
    for at, who, what, *details in history.events[-last:]:
        shown = " ".join(_shown(each) if isinstance(each, LedgerMetadata) else str(each) for each in details)
        lines.append(f"{at:10.4f}  {who:<8} {what} {shown}")
    return "\n".join(lines)
