"""The stage of the scenarios about terms: an unbounded ledger, coarser than `tests.scenarios.world`.

What is done to a bookie or to the metadata store happens at once, at those that are named: whom an event does
not name is not reached. The changes to the metadata, the tallies of answers and the judgement of terms are
the product's own.

    ledger E=3 Qw=3 Qa=2 on b1 b2 b3    the first line; an unbounded ledger that nobody writes yet
    w1 takes over                       the compare-and-set to IN_RECOVERY
    w1 fences b1 b2                     LAC reads with its term
    w1 asks b1 b2                       recovery reads; what is found is written back to them
    w1 opens on b1 b2 b3                the compare-and-set to OPEN
    w1 adds C to b2 b3                  the next entry, value C
    w1 states its LAC to b2
    w1 replaces b2 by b4, unanswered    an ensemble change whose request is on its way for ever so long
    the request of w1 arrives
    t reads the metadata
    t asks b1                           for the LAC
    t reads 1 from b1
    misread: NAME                       all of it again, with a rule read the other way (`MISREADINGS`)

A line that begins with !! is a violation: a position with two values, or an acknowledged entry that the
ledger does not have. After `misread` only these are told, each with what led to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from bookie_aio.core.fencing import Verdict, judge
from bookie_aio.wire.blocks import Block, LacStatement, encode_block
from bookie_aio.wire.messages import Stop
from client_aio.core.digest import Digest
from client_aio.core.ensemble_change import EnsembleChange, MetadataUpdate
from client_aio.core.recovery import End, EntrySearch, FenceTally, Found, Inconclusive, believed
from client_aio.core.takeover import TermOpening, take_over
from metadata.ids import NO_ENTRY
from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState, UnboundedRecord
from metadata.store import Version
from tests.scenarios.messages import LEDGER_ID, id_text

METADATA_TERM = "the term of the metadata for the content term of the last fragment"
ENTRY_READ = "the content term of the entry read for that of the statement"
UNKNOWN_IS_NO = "an unknown outcome for none, when the metadata are unchanged"
SHARED_TERM = "the term of a takeover under way for one's own"
FOLLOWED = "a second fragment behind an empty one for one in its place"
MISREADINGS = (METADATA_TERM, ENTRY_READ, UNKNOWN_IS_NO, SHARED_TERM, FOLLOWED)


@dataclass
class Bookie:
    """What a bookie holds of the ledger."""

    term: int = 0
    kept: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Content term and value, by id."""
    stated: tuple[int, int] | None = None
    """The highest LAC, and the content term of who stated it, in this order."""

    def accepts(self, term: int) -> bool:
        """Judge a term, and take a higher one (rule 7)."""
        verdict = judge(self.term, term)
        self.term = max(self.term, term)
        return verdict is not Verdict.REFUSE

    def store(self, entry_id: int, content_term: int, value: str, lac: int) -> None:
        """Keep a copy; one of a higher content term is not replaced."""
        if self.kept.get(entry_id, (NO_ENTRY, ""))[0] <= content_term:
            self.kept[entry_id] = content_term, value
        self.state(lac, content_term)

    def state(self, lac: int, content_term: int) -> None:
        """Keep the highest LAC."""
        if self.stated is None or lac > self.stated[0]:
            self.stated = lac, content_term

    def read(self, entry_id: int, content_term: int) -> str | Stop:
        """Answer a read."""
        found, value = self.kept.get(entry_id, (NO_ENTRY, ""))
        if found == content_term:
            return value
        return Stop.STALE_METADATA if found > content_term else Stop.NO_SUCH_ENTRY


@dataclass
class Holder:
    """Somebody who takes the ledger over, and then writes."""

    name: str
    metadata: LedgerMetadata
    version: Version
    term: int = 0
    tally: FenceTally | None = None
    end: int = NO_ENTRY
    lac: int = NO_ENTRY
    following: int = 0
    is_waiting: bool = False
    is_over: bool = False
    late: EnsembleChange | None = None


class TermStage:
    """Replays the events of one scenario."""

    def __init__(self, misreading: str = "") -> None:
        self.misreading = misreading
        self.bookies: dict[str, Bookie] = {}
        self.holders: dict[str, Holder] = {}
        self.metadata: LedgerMetadata
        self.version = Version(1)
        self.known: LedgerMetadata | None = None  # to the reader
        self.lac = NO_ENTRY  # of the reader
        self.acknowledged: dict[int, str] = {}
        self.shown: dict[int, str] = {}
        self._events: list[str] = []
        self._lines: list[str] = []

    def do(self, event: str) -> list[str]:
        """Let something happen."""
        self._lines = []
        if match := re.fullmatch(r"misread: (.+)", event):
            return self._again(match[1])
        self._events.append(event)
        for pattern, act in (
            (r"ledger E=(\d) Qw=(\d) Qa=(\d) on (.+)", self._create),
            (r"(w\d) takes over", self._take_over),
            (r"(w\d) fences (.+)", self._fence),
            (r"(w\d) asks (.+)", self._ask),
            (r"(w\d) opens on (.+)", self._open),
            (r"(w\d) adds (\w+) to (.+)", self._add),
            (r"(w\d) states its LAC to (b\d)", self._state),
            (r"(w\d) replaces (b\d) by (b\d), unanswered", self._replace),
            (r"the request of (w\d) arrives", self._arrive),
            (r"t reads the metadata", self._reader_refreshes),
            (r"t asks (b\d)", self._reader_asks),
            (r"t reads (\d+) from (b\d)", self._reader_reads),
        ):
            if match := re.fullmatch(pattern, event):
                act(*match.groups())
                return self._lines
        raise ValueError("not understood")

    def _again(self, misreading: str) -> list[str]:
        if misreading not in MISREADINGS:
            raise ValueError(f"the misreadings are: {'; '.join(MISREADINGS)}")
        other = TermStage(misreading)
        told = [(event, line) for event in self._events for line in other.do(event)]
        return [f"{event}: {line}" for event, line in told if line.startswith("!!")] or ["no violation"]

    def _say(self, text: str) -> None:
        self._lines.append(text)

    def _bookie(self, name: str) -> Bookie:
        return self.bookies.setdefault(name, Bookie())

    # --- the metadata store ---

    def _create(self, ensemble: str, write: str, ack: str, bookies: str) -> None:
        self.metadata = LedgerMetadata.new(
            LEDGER_ID, ensemble_size=int(ensemble), write_quorum=int(write), ack_quorum=int(ack),
            bookies=bookies.split(), unbounded=UnboundedRecord(),
        )  # fmt: skip

    def _write(self, metadata: LedgerMetadata) -> None:
        self.metadata, self.version = metadata, Version(self.version.number + 1)
        fragments = ", ".join(
            f"{each.first_entry} on {' '.join(each.bookies)} in term {each.content_term}"
            for each in metadata.fragments
        )
        self._say(f"m is now {metadata.state.value}, term {metadata.term}: {fragments}")

    def _update(self, update: MetadataUpdate) -> bool:
        """Make a change, on top of what others made meanwhile."""
        while not update.is_refused:
            wanted, version, _ = update.attempt()
            if version == self.version:
                self._write(wanted)
                update.written(self.version)
                return True
            update.conflicted(self.metadata, self.version)
        return False

    # --- holders of terms ---

    def _take_over(self, name: str) -> None:
        holder = self.holders[name] = Holder(name, self.metadata, self.version)
        if self.misreading == SHARED_TERM and self.metadata.state is LedgerState.IN_RECOVERY:
            self._say(f"{name} goes on with term {self.metadata.term}")
        else:
            self._update(MetadataUpdate(self.metadata, self.version, take_over))
        holder.metadata, holder.version, holder.term = self.metadata, self.version, self.metadata.term
        sizes = (self.metadata.ensemble_size, self.metadata.write_quorum, self.metadata.ack_quorum)
        holder.tally = FenceTally(*sizes, self.metadata.last_fragment.first_entry)

    def _is_refused(self, holder: Holder, name: str) -> bool:
        if self._bookie(name).accepts(holder.term):
            return False
        self._say(f"{name} holds term {self._bookie(name).term}: {holder.name} withdraws")
        holder.is_over = True
        return True

    def _fence(self, name: str, bookies: str) -> None:
        holder = self.holders[name]
        tally = holder.tally
        assert tally is not None
        fragment = holder.metadata.last_fragment
        for bookie_id in bookies.split():
            if self._is_refused(holder, bookie_id):
                return
            stated = self._bookie(bookie_id).stated
            statement: LacStatement | None = None
            if stated is not None:
                statement = Digest(LEDGER_ID).statement(stated[1], stated[0], NO_ENTRY)
            statement = believed(statement, holder.metadata, Digest(LEDGER_ID))
            tally.answer(fragment.bookies.index(bookie_id), statement.lac if statement else None)
        enough = "enough" if tally.is_covered else "not enough"
        self._say(f"{name} has fenced {enough}, LAC {id_text(tally.lac)}")

    def _ask(self, name: str, bookies: str) -> None:
        holder, reached = self.holders[name], bookies.split()
        metadata, tally = holder.metadata, holder.tally
        assert tally is not None
        sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        search = EntrySearch(*sizes, tally.lac + 1, lac=tally.lac)
        fragment = metadata.last_fragment
        while True:
            match search.step():
                case Found(entry_id, payload):
                    self._say(f"{name} writes back {entry_id}, {payload.decode()}")
                    for bookie_id in reached:
                        self._bookie(bookie_id).store(
                            entry_id, fragment.content_term, payload.decode(), tally.lac
                        )
                case End(last_entry):
                    holder.end = last_entry
                    self._say(f"{name} finds the end at {id_text(last_entry)}")
                    return
                case Inconclusive(entry_id, _):
                    self._say(f"{name} cannot decide about {entry_id}")
                    return
                case None:
                    return
                case asks:
                    for ask in asks:
                        bookie_id = fragment.bookies[ask.seat]
                        if bookie_id not in reached:
                            search.error(ask)
                        elif self._is_refused(holder, bookie_id):
                            return
                        else:
                            blocks, stop, at = self._run(bookie_id, ask.first, fragment.content_term)
                            search.answer(ask, blocks, stop, at)

    def _run(self, bookie_id: str, entry_id: int, content_term: int) -> tuple[list[Block], Stop, int]:
        blocks: list[Block] = []
        while isinstance(value := self._bookie(bookie_id).read(entry_id, content_term), str):
            encoded = encode_block(
                ledger_id=LEDGER_ID, content_term=content_term, first_entry=entry_id, stride=1, lac=NO_ENTRY,
                lafr=NO_ENTRY, payloads=[value.encode()], running=[0],
            )  # fmt: skip
            blocks.append(Block.parse(memoryview(encoded)))
            entry_id += 1
        return blocks, value, entry_id

    def _open(self, name: str, bookies: str) -> None:
        holder = self.holders[name]
        known = holder.metadata
        opening = TermOpening(known, known.fragments, holder.end, 0, tuple(bookies.split()))
        if self.misreading == FOLLOWED:
            self._write(self._followed(opening))
        elif not self._update(MetadataUpdate(known, holder.version, opening.apply)):
            is_own = self.metadata.state is LedgerState.OPEN and self.metadata.term == holder.term
            if self.misreading != SHARED_TERM or not is_own:
                holder.is_over = True
                self._say(f"{name} withdraws: m is {self.metadata.state.value}, term {self.metadata.term}")
                return
            self._say(f"{name} finds m OPEN under its own term")  # as after an answer that was lost
        holder.metadata, holder.version = self.metadata, self.version
        holder.lac, holder.following = holder.end, holder.end + 1
        for entry_id, value in self.acknowledged.items():
            if entry_id > holder.end:
                self._say(f"!! {entry_id} was acknowledged as {value}, and term {holder.term} begins there")

    def _followed(self, opening: TermOpening) -> LedgerMetadata:
        """Return what the compare-and-set to OPEN would write, were an empty fragment not replaced."""
        known = opening.known
        following = Fragment(opening.last_entry + 1, opening.bookies, known.term)
        return replace(known, state=LedgerState.OPEN, fragments=(*known.fragments, following))

    def _add(self, name: str, value: str, bookies: str) -> None:
        holder = self.holders[name]
        if holder.is_over:
            self._say(f"{name} has withdrawn")
            return
        entry_id, content_term = holder.following, holder.metadata.last_fragment.content_term
        for bookie_id in bookies.split():
            if self._is_refused(holder, bookie_id):
                return
            self._bookie(bookie_id).store(entry_id, content_term, value, holder.lac)
        holder.following += 1
        if holder.is_waiting:
            self._say(f"{name} acknowledges nothing: the outcome of its change is unknown")
        elif len(bookies.split()) >= holder.metadata.ack_quorum and holder.lac == entry_id - 1:
            holder.lac = entry_id
            self._say(f"{name} acknowledges {entry_id}, {value}")
            self._note(self.acknowledged, entry_id, value)

    def _state(self, name: str, bookie_id: str) -> None:
        holder = self.holders[name]
        if not self._is_refused(holder, bookie_id):
            self._bookie(bookie_id).state(holder.lac, holder.metadata.last_fragment.content_term)

    def _replace(self, name: str, old: str, new: str) -> None:
        holder = self.holders[name]
        known = holder.metadata.last_fragment
        bookies = tuple(new if each == old else each for each in known.bookies)
        holder.late = EnsembleChange(holder.lac + 1, bookies, known)
        if self.misreading != UNKNOWN_IS_NO:
            holder.is_waiting = True

    def _arrive(self, name: str) -> None:
        holder = self.holders[name]
        assert holder.late is not None
        wanted = holder.late.apply(holder.metadata)
        assert wanted is not None
        if holder.version == self.version:
            self._write(wanted)
        else:
            self._say("conflict")

    # --- the reader ---

    def _reader_refreshes(self) -> None:
        self.known = self.metadata
        self.lac = max(self.lac, self.known.last_fragment.first_entry - 1)
        known = self.known
        self._say(
            f"t knows {known.state.value}, term {known.term}, "
            f"last fragment {known.last_fragment.first_entry} in term {known.last_fragment.content_term}"
        )

    def _reader_hears(self, stated: tuple[int, int] | None, entry_term: int | None) -> None:
        if stated is None or stated[0] <= self.lac:
            return
        assert self.known is not None
        lac, content_term = stated
        if self.misreading == ENTRY_READ and entry_term is not None:
            content_term = entry_term
        known_term = self.known.last_fragment.content_term
        if self.misreading == METADATA_TERM:
            known_term = self.known.term
        if content_term > known_term:
            self._say(f"t hears LAC {id_text(lac)} of term {stated[1]}, and reads the metadata again")
            self._reader_refreshes()
        self.lac = max(self.lac, lac)
        self._say(f"t may read up to {id_text(self.lac)}")

    def _reader_asks(self, bookie_id: str) -> None:
        self._reader_hears(self._bookie(bookie_id).stated, None)

    def _reader_reads(self, entry: str, bookie_id: str) -> None:
        entry_id = int(entry)
        if entry_id > self.lac:
            self._say(f"t may not read {entry_id}")
            return
        assert self.known is not None
        fragment = self._fragment_of(entry_id)
        found = self._bookie(bookie_id).read(entry_id, fragment.content_term)
        if bookie_id not in fragment.bookies:
            self._say(f"t does not ask {bookie_id}, which is not in the fragment")
        elif found is Stop.STALE_METADATA:
            self._say(f"{bookie_id} says: stale metadata")
            self._reader_refreshes()
        elif isinstance(found, Stop):
            self._say(f"{bookie_id} says: no such entry")
        else:
            self._say(f"t reads {entry_id}, {found}")
            self._note(self.shown, entry_id, found)
            self._reader_hears(self._bookie(bookie_id).stated, fragment.content_term)

    def _fragment_of(self, entry_id: int) -> Fragment:
        assert self.known is not None
        if self.misreading != FOLLOWED:
            return self.known.fragment_of(entry_id)
        # Two begin there, and nothing says which of them counts.
        return next(
            fragment
            for fragment, following in zip(
                self.known.fragments, [*self.known.fragments[1:], None], strict=True
            )
            if following is None or max(following.first_entry, fragment.first_entry + 1) > entry_id
        )

    # --- what must always hold ---

    def _note(self, values: dict[int, str], entry_id: int, value: str) -> None:
        values.setdefault(entry_id, value)
        all_values = {
            value,
            *(each[entry_id] for each in (self.acknowledged, self.shown) if entry_id in each),
        }
        if len(all_values) > 1:
            self._say(f"!! {entry_id} is {' and '.join(sorted(all_values))}")
