"""The lives of one name: unbounded ledgers that are created, taken over, sealed, deleted and remade.

Owns the record of them, by ledger id, and the invariants. An entry's payload begins with its ledger's id. The
promises are those of `client_aio.unbounded` and of `docs/UNBOUNDED.md`. The names:

- NoLogDivergence: a position has one value, whoever acknowledges or reads it, and it was added to this
  ledger.
- OneIterationOneLedger: a reader of a ledger gets entries of this ledger only, also when another has its
  name.
- NoDirtyReads: an ordinary read returns entries that are acknowledged, or that a takeover kept.
- AllCommittedIdsAreReadable: a fragment begins behind every entry acknowledged or read. After healing,
  everything that was not trimmed is read, in order, without gaps.
- AcknowledgedInItsTerm: an entry that a holder has acknowledged lies in a fragment of a term of its own.
- ClosedTakesNothing: nothing is added, rolled, trimmed or sealed by a handle that was closed or has failed.
- FlushedIsAcknowledged: on return of `flush`, `drain`, `force`, `add_entries` and `close` the entries they
  wait for are acknowledged.
- RollsLieBehind: all entries added before `roll` lie before the fragment that it returns, which is listed.
- TrimsAreAskedFor: fragments leave at the front, as a whole. They lie before an entry that the holder of this
  very term asked to trim to. When the holder is told so, they have left.
- SealsAreKept: only the term's holder seals, when it asks to, behind its last entry. End and length of a
  sealed ledger never change. Nothing is acknowledged or read behind the end; followers end there, and only
  there.
- HeadsChangeAsWritten: each change of a head is one of those in `metadata.model.ledger`, by a client that may
  make it.
- TermsCount: the term grows by one at each takeover, and in no other way; no content term falls.
- RepairsCopyFirst: a repair names a bookie when that bookie has acknowledged, or returned to somebody, all
  that it owes of the fragment. It never does in the last fragment of a ledger that is not sealed (rule 14).
- RepairsAreWhole: a repair names the bookie it reports, in every fragment that it knew of but the last one.
- PagesStay: no page ever changes, nor is it deleted while a head refers to it.
- DeletionsAreAskedFor: no ledger that somebody has held is deleted where nobody deletes.
- NamesLeadToOne: a name changes to another ledger, or to none, only when its ledger is deleted. A deleted
  ledger does not come back.
- HandlesGoForward: a reader's LAC never goes back; a second read returns the store's present state.
- PasswordsAreAsked: nobody opens a ledger, to hold or to read it, with another password than its own.
- LengthsAreRight: the length in a head is that of the entries below its last fragment, or of all.
- CallsEnd: a call on a handle ends within a bound once faults stop, adds included when it is aborted.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metadata.errors import MetadataCorruptError
from metadata.ids import KEY_FRAGMENTS, KEY_LEDGERS, ledger_id_of, unbounded_key
from metadata.model.ledger import Fragment, LedgerMetadata
from metadata.model.paged_list import rows_of_page
from tests.sim.checkers.batches import NotDone, entries_of
from tests.sim.checkers.unbounded_heads import check_change

if TYPE_CHECKING:
    from client_aio import UnboundedLedgerWriter
    from metadata.store import Version
    from tests.sim.simulation import Simulation

NAME = "orders"
_KEY = "lives"


@dataclass
class Handle:
    """A holder's handle, and what was added through it."""

    who: str
    ledger: UnboundedLedgerWriter
    pending: deque[tuple[asyncio.Future[int], bytes]] = field(default_factory=deque)
    """Adds in their order, without those at the front that are known to have ended."""
    number: int = 0
    highest: int = -1
    """The id of the last of these that was acknowledged."""
    trims: int = -1
    """The highest entry that the holder asked to trim before."""
    seals: bool = False
    """Whether the holder has asked to seal."""

    @property
    def term(self) -> int:
        """Return the holder's term."""
        return self.ledger.term

    def had(self, term: int) -> bool:
        """Return whether the holder has this term, or had it before its writer healed."""
        return self.ledger._own_terms.include(term)

    def unfinished(self) -> list[asyncio.Future[int]]:
        """Return the futures of adds that have not ended yet."""
        return [future for future, _ in self.pending if not future.done()]


@dataclass
class Life:
    """One ledger."""

    ledger_id: int
    added: set[bytes] = field(default_factory=set)
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    read: dict[int, bytes] = field(default_factory=dict)
    metadata: LedgerMetadata | None = None
    fragments: list[Fragment] = field(default_factory=list)
    """All there are, those in pages too."""
    is_deleted: bool = False
    handles: list[Handle] = field(default_factory=list)
    repairs: set[str] = field(default_factory=set)
    """The bookies that somebody has asked to replace."""
    repairs_begun: int = 0
    repairs_ended: int = 0
    listed: set[tuple[int, int]] = field(default_factory=set)
    """First entry and content term of all fragments that there have been."""
    named: set[tuple[int, str]] = field(default_factory=set)
    """First entry of a fragment and a bookie, for all that there have been."""

    def holder(self, term: int) -> Handle | None:
        """Return the handle that has this term, or had it."""
        return next((each for each in self.handles if each.had(term)), None)

    @property
    def first_entry(self) -> int:
        """Return the first entry that is left."""
        return self.metadata.first_entry if self.metadata is not None else 0

    @property
    def term(self) -> int:
        """Return the present term."""
        return self.metadata.term if self.metadata is not None else 0

    @property
    def end(self) -> int | None:
        """Return the last entry of a sealed ledger."""
        return self.metadata.last_entry if self.metadata is not None and self.metadata.is_closed else None

    def fragment_of(self, entry_id: int) -> Fragment:
        """Return the fragment of an entry that has not been trimmed."""
        return next(each for each in reversed(self.fragments) if each.first_entry <= entry_id)

    def known(self) -> dict[int, bytes]:
        """Return all that was acknowledged or read."""
        return {**self.read, **self.acknowledged}

    def length_below(self, end: int) -> int | None:
        """Return the payload bytes of all entries below one; None where not all of them are known."""
        values = [self.acknowledged.get(entry_id, self.read.get(entry_id)) for entry_id in range(end)]
        return None if None in values else sum(len(value) for value in values if value is not None)


class Lives:
    """All ledgers of that name; `of` gives a run's."""

    def __init__(self, simulation: Simulation) -> None:
        self._history = simulation.history
        self.words = simulation.history.words
        self.fail = simulation.history.fail
        self._pages: dict[str, bytes] = {}
        self.not_done = NotDone(simulation.history)
        self.all: dict[int, Life] = {}
        self.named: int | None = None
        self.is_over = asyncio.Event()
        """All ledgers have been brought to their end, by a role that does so."""
        passwords = [actor.settings.get("password", b"") for actor in simulation.plan.actors]
        self._may_delete = any(
            actor.role == "remaker" or actor.settings.get("deletes") for actor in simulation.plan.actors
        )
        self.password: bytes = max(passwords, default=b"")
        """That of all ledgers of the run."""

    @classmethod
    def of(cls, simulation: Simulation) -> Lives:
        """Return the run's record, which begins to watch the metadata store when it is first asked for."""
        record = simulation.shared.get(_KEY)
        if record is None:
            record = simulation.shared[_KEY] = cls(simulation)
            # Before the history's own, which then ignores these ledgers.
            simulation.tree.watchers.insert(0, record.metadata_changed)
        assert isinstance(record, cls)
        return record

    @classmethod
    def find(cls, simulation: Simulation) -> Lives | None:
        """Return the run's record, None where there is none."""
        return simulation.shared.get(_KEY)

    def life(self, ledger_id: int) -> Life:
        """Return the record of one ledger."""
        return self.all.setdefault(ledger_id, Life(ledger_id))

    def alive(self) -> list[Life]:
        """Return the ledgers that are not deleted, oldest first."""
        return [life for _, life in sorted(self.all.items()) if not life.is_deleted]

    @property
    def newest(self) -> Life | None:
        """Return the ledger that was made last, deleted or not."""
        return self.all[max(self.all)] if self.all else None

    def require(self, condition: bool, name: str, text: str) -> None:
        """Fail unless the condition holds."""
        if not condition:
            self.fail(name, text)

    # --- what holders do -----------------------------------------------------------------------

    def opened(self, who: str, ledger: UnboundedLedgerWriter) -> Handle:
        """Note that somebody holds a term now."""
        life, handle = self.life(ledger.ledger_id), Handle(who, ledger)
        self._history.note(
            who, "took over", ledger.ledger_id, "term", ledger.term, "behind", ledger.last_add_confirmed
        )
        is_new = life.holder(handle.term) is None
        self.require(is_new, "TermsCount", f"{who} too was given term {handle.term}")
        life.handles.append(handle)
        return handle

    def value(self, handle: Handle, size: int) -> bytes:
        """Return a new value for an entry, as one that is about to be added."""
        ledger_id = handle.ledger.ledger_id
        value = f"{ledger_id}/{handle.who}/{handle.term}/{handle.number}/".encode() + b"." * size
        handle.number += 1
        self.life(ledger_id).added.add(value)
        return value

    def issued(self, handle: Handle, future: asyncio.Future[int], value: bytes) -> None:
        """Note an add, and watch its future."""
        handle.pending.append((future, value))
        future.add_done_callback(lambda _: self.settle(handle))

    def issued_batch(
        self, handle: Handle, batch: asyncio.Future[tuple[int, int]], values: list[bytes]
    ) -> None:
        """Note a batch, each entry of it as an add."""
        life = self.life(handle.ledger.ledger_id)
        self.not_done.watch(
            handle.who, batch, values, lambda: [*life.acknowledged.values(), *life.read.values()]
        )
        for value, each in zip(values, entries_of(batch, len(values)), strict=True):
            self.issued(handle, each, value)

    def settle(self, handle: Handle) -> None:
        """Note what has been acknowledged, also of a holder who died before it could look."""
        pending = handle.pending
        while pending and pending[0][0].done():
            future, value = pending.popleft()
            if is_acknowledged(future):
                text = f"{handle.who}: {value[:40]!r} is {future.result()}, behind {handle.highest}"
                self.require(future.result() > handle.highest, "NoOutOfOrderEntries", text)
                handle.highest = future.result()
                self.acknowledge(handle, future.result(), value)
        for future, value in pending:
            if is_acknowledged(future):
                text = f"{handle.who}: {value[:40]!r} is acknowledged before what was added before it"
                self.fail("NoOutOfOrderEntries", text)

    def acknowledge(self, handle: Handle, entry_id: int, value: bytes) -> None:
        """Note an acknowledged add."""
        who, life = handle.who, self.life(handle.ledger.ledger_id)
        self._history.note(who, "acknowledged", life.ledger_id, entry_id, value[:40])
        self._agree(life, f"{who} was acknowledged", entry_id, value)
        if entry_id in life.acknowledged:
            self.fail("NoLogDivergence", f"entry {entry_id} was acknowledged twice, also to {who}")
        life.acknowledged[entry_id] = value
        end = life.end
        self.require(end is None or entry_id <= end, "SealsAreKept", f"{entry_id} is behind the end, {end}")
        if entry_id >= life.first_entry:
            term = life.fragment_of(entry_id).content_term
            text = f"{who} holds term {handle.term}, and was acknowledged {entry_id}, of content term {term}"
            self.require(handle.had(term), "AcknowledgedInItsTerm", text)

    # --- what readers see ----------------------------------------------------------------------

    def see(self, who: str, ledger_id: int, entry_id: int, value: bytes) -> None:
        """Note an entry that was read as one of the ledger."""
        self.see_unconfirmed(who, ledger_id, entry_id, value)
        life = self.life(ledger_id)
        self._agree(life, f"{who} read", entry_id, value)
        life.read[entry_id] = value
        end = life.end
        if entry_id > self.lac_of(life):
            self.fail("NoDirtyReads", f"{who} read {entry_id} of {ledger_id}")
        if end is not None and entry_id > end:
            self.fail("SealsAreKept", f"{who} read {entry_id} behind {end}")

    def see_unconfirmed(self, who: str, ledger_id: int, entry_id: int, value: bytes) -> None:
        """Note an entry that was read, which need not be part of the ledger."""
        if ledger_of(value) != ledger_id:
            text = f"{who} read {value[:40]!r} as entry {entry_id} of ledger {ledger_id}"
            self.fail("OneIterationOneLedger", text)
        elif value not in self.life(ledger_id).added:
            text = f"{who} read {value[:40]!r} as entry {entry_id}, which nobody added"
            self.fail("NoLogDivergence", text)

    def _agree(self, life: Life, what: str, entry_id: int, value: bytes) -> None:
        self.not_done.look(what, value)
        for other, values in (("acknowledged", life.acknowledged), ("read", life.read)):
            if values.get(entry_id, value) != value:
                text = f"{what} {value[:40]!r} as {entry_id}; {values[entry_id][:40]!r} was {other}"
                self.fail("NoLogDivergence", text)

    def lac_of(self, life: Life) -> int:
        """Return the highest entry that may be read: by the word of its holders, or of the metadata."""
        if life.end is not None:
            return life.end
        assert life.metadata is not None
        kept = life.metadata.last_fragment.first_entry - 1
        return max([kept, *[handle.ledger.last_add_confirmed for handle in life.handles]])

    # --- the metadata store --------------------------------------------------------------------

    def metadata_changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Follow heads, pages and the name."""
        if key.startswith(KEY_LEDGERS + "/") and key.count("/") == 5:
            self._head_changed(ledger_id_of(key), value)
        elif key.startswith(KEY_FRAGMENTS + "/"):
            self._page_changed(key.rpartition("/")[2], value)
        elif key == unbounded_key(NAME):
            self._name_changed(None if value is None else int(json.loads(value)["ledger"]))

    def _page_changed(self, page: str, value: bytes | None) -> None:
        if value is not None:
            # A request that was late may write one again that was given up since, as it was.
            is_same = self._pages.setdefault(page, value) == value
            self.require(is_same, "PagesStay", f"page {page} is written otherwise")
            return
        for life in self.alive():
            if life.metadata is not None and life.metadata.unbounded is not None:
                used = [ref.name for ref in life.metadata.unbounded.pages]
                self.require(page not in used, "PagesStay", f"page {page} is deleted, and in use")

    def _fragments_of(self, metadata: LedgerMetadata) -> list[Fragment]:
        assert metadata.unbounded is not None
        rows = [row for ref in metadata.unbounded.pages for row in rows_of_page(ref, self._pages[ref.name])]
        return [*map(Fragment.of_row, rows), *metadata.fragments]

    def _name_changed(self, ledger_id: int | None) -> None:
        before, self.named = self.named, ledger_id
        self._history.note("meta", "name leads to", ledger_id)
        if before is not None and before != ledger_id:
            is_gone = self.life(before).is_deleted
            text = f"{NAME} was {before}'s, which lives, and is {ledger_id}'s"
            self.require(is_gone, "NamesLeadToOne", text)

    def _head_changed(self, ledger_id: int, value: bytes | None) -> None:
        if value is None:
            if ledger_id in self.all:
                self._history.note("meta", "deleted", ledger_id)
                life = self.all[ledger_id]
                life.is_deleted = True
                is_asked_for = self._may_delete or not life.handles
                self.require(is_asked_for, "DeletionsAreAskedFor", f"ledger {ledger_id} is gone")
            return
        try:
            metadata = LedgerMetadata.from_json(value)
        except MetadataCorruptError as error:
            self.fail("TypeOK", str(error))
            return
        if not metadata.is_unbounded:
            return
        self._history.ignore(ledger_id)
        life = self.life(ledger_id)
        self.require(not life.is_deleted, "NamesLeadToOne", f"ledger {ledger_id} is back, which was deleted")
        before, life.metadata = life.metadata, metadata
        fragments, life.fragments = life.fragments, self._fragments_of(metadata)
        rows = metadata.rows
        self._history.note(
            "meta", "head", ledger_id, metadata.state.value, metadata.term, metadata.last_entry,
            len(rows.pages), rows.rows,
        )  # fmt: skip
        for each in metadata.fragments:
            life.listed.add((each.first_entry, each.content_term))
        for each in life.fragments:
            life.named.update((each.first_entry, bookie) for bookie in each.bookies)
        if before is not None:
            for handle in life.handles:
                self.settle(handle)
            check_change(self, life, before, fragments)

    # --- after healing -------------------------------------------------------------------------

    def check_read(self, who: str, life: Life, found: list[tuple[int, bytes]]) -> None:
        """Compare with all that a reader has found of a sealed ledger, from the first entry that is left."""
        first, last = life.first_entry, life.end
        assert last is not None
        ids = [entry_id for entry_id, _ in found]
        self.require(
            ids == list(range(first, last + 1)), "AllCommittedIdsAreReadable",
            f"{who} read {ids[:1]} to {ids[-1:]} of {life.ledger_id}, which is {first} to {last}",
        )  # fmt: skip
        for entry_id, value in found:
            self.see(who, life.ledger_id, entry_id, value)
        there = dict(found)
        for entry_id, value in life.known().items():
            if entry_id >= first and there.get(entry_id) != value:
                text = f"{who} read {there.get(entry_id)!r:.60} as {entry_id}, not {value[:40]!r}"
                self.fail("AllCommittedIdsAreReadable", text)


def is_acknowledged(future: asyncio.Future[int]) -> bool:
    """Return whether an add has been acknowledged, and was not cancelled."""
    return future.done() and not future.cancelled() and future.exception() is None


def ledger_of(value: bytes) -> int:
    """Return the ledger that an entry was added to."""
    return int(value.split(b"/", 1)[0])
