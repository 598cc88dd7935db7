"""The stage of the scenarios: a ledger, its bookies, the metadata store, and the clients' pure machines.

Everything that is sent stays in flight until the script says that it arrives, or is lost. The clients
(`tests.scenarios.clients`) are the machines of `client_aio.core` with just enough around them to carry out
what they decide; bookies and the metadata store are models that keep the rules of their side.

    ledger E=3 Qw=3 Qa=2 on b1 b2 b3    the first line; `guaranteed` and `deferred` may follow Qa
    w adds 0..2                         the writer takes entries, all of one turn
    w → b1 b2                           the oldest message in flight from w to b1, and to b2, arrives
    b1 → w: stored 1                    the oldest one that begins so
    w ✗ b3                              it is lost
    b2 fails at w | b2 b3 fail at w     w hears an error, or nothing for too long (of both at once)
    w finds b4 | w finds nobody         the answer to looking for bookies
    w hears nothing from m              the outcome of what it wrote to the metadata store is unknown
    w looks again                       some time is over
    w closes | w dies
    r1 takes over                       a recovery begins; r1, r2, … are recovering clients
    repair puts b5 in place of b1 in fragment 0
    b2 loses 0                          it has lost the entry, and knows
    b2 flips a bit of 0 | b2 flips a bit of its LAC | b2 gives 1 for 0 | b2 leaves out 0
                                        it answers wrongly from now on
    b2 restarts                         what it had received and was not forced is gone (deferred)
    t asks b1                           a tailing reader asks for the LAC, and may read up to it
    t reads 0..3                        it reads, asking the bookies of each write set one after another
    answers of b1 b2                    would these answers to a fence be enough?
    show w | show m | show b1

Two things are checked after each event, and told as a line that begins with !!: an entry acknowledged to the
application is on Qa bookies that the metadata name; nothing acknowledged, or shown to a reader, is beyond the
end of a closed ledger.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.core.fencing import Verdict, judge
from bookie_aio.wire.blocks import Block, LacStatement, encode_block
from bookie_aio.wire.messages import NO_TERM, Read, ReadLac, Stop
from client_aio.core.digest import Digest
from client_aio.core.quorum import write_set
from client_aio.core.recovery import Ask, FenceTally
from metadata.errors import VersionConflictError
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY, TERM_WRITER
from metadata.ledger import LedgerMetadata
from metadata.settle import settle_compare_and_set
from metadata.store import Version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client_aio.core.window import Send

LEDGER_ID = 1
LAC_BIT = 64
"""The bit of a LAC that a bookie with bad memory flips."""


def ids_text(ids: Iterable[int]) -> str:
    """Write entry ids, `0..4` for a run."""
    runs: list[list[int]] = []
    for entry_id in ids:
        if runs and entry_id == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], entry_id]
        else:
            runs.append([entry_id])
    return " ".join("..".join(map(id_text, run)) for run in runs) or "nothing"


def id_text(entry_id: int) -> str:
    """Write an entry id, or −1 for none."""
    return str(entry_id).replace("-", "−")


def metadata_text(metadata: LedgerMetadata) -> str:
    """Write state, end and fragments: `OPEN, 0 on b1 b2 b3, 5 on b1 b4 b3`."""
    end = f" at {id_text(metadata.last_entry)}" if metadata.last_entry is not None else ""
    fragments = [f"{each.first_entry} on {' '.join(each.bookies)}" for each in metadata.fragments]
    return ", ".join([metadata.state.value + end, *fragments])


# --- what is said ---


class Add(NamedTuple):
    """Store the entries of a block."""

    send: Send
    term: int


class Fence(NamedTuple):
    """A fencing LAC read."""

    request: ReadLac


class ReadFrom(NamedTuple):
    """A recovery read."""

    ask: Ask
    request: Read


class ForceUpTo(NamedTuple):
    """Make durable what was received."""

    last_entry: int
    epoch: int


class CompareAndSet(NamedTuple):
    """Replace the metadata, if they are at that version."""

    metadata: LedgerMetadata
    version: Version
    token: str


class Reread(NamedTuple):
    """Read the metadata."""


class Stored(NamedTuple):
    """The very copies of this add are stored."""

    send: Send


class Refused(NamedTuple):
    """The bookie holds a higher term."""


class FencedAt(NamedTuple):
    """The fence is durable; the highest LAC statement here, None for none."""

    statement: LacStatement | None


class Found(NamedTuple):
    """The answer to a recovery read."""

    ask: Ask
    blocks: list[Block]
    stop: Stop
    stop_entry: int


class Forced(NamedTuple):
    """What was received before the force is durable."""

    force: ForceUpTo


class Written(NamedTuple):
    """The compare-and-set has happened."""

    version: Version


class Conflict(NamedTuple):
    """The compare-and-set has definitely not happened."""


class Present(NamedTuple):
    """The metadata as they are."""

    metadata: LedgerMetadata
    version: Version


What = (
    Add | Fence | ReadFrom | ForceUpTo | CompareAndSet | Reread | Stored | Refused | FencedAt | Found | Forced
    | Written | Conflict | Present
)  # fmt: skip


class Message(NamedTuple):
    """Something in flight."""

    source: str
    target: str
    text: str
    what: What


class Actor:
    """Somebody who receives messages and says what comes of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    def send(self, target: str, text: str, what: What) -> None:
        """Send a message: it is in flight from now on."""
        self.world.send(Message(self.name, target, text, what))

    def say(self, text: str) -> None:
        """Add a line to what comes of the event."""
        self.world.say(f"{self.name} {text}")

    def receive(self, message: Message) -> None:
        """Take a message that arrived."""
        raise NotImplementedError

    def show(self) -> str:
        """Describe the state."""
        raise NotImplementedError


# --- bookies ---


@dataclass
class Kept:
    """An entry as a bookie keeps it."""

    payload: bytes
    lac: int
    lafr: int
    running: int
    is_durable: bool


@dataclass(eq=False)
class Bookie(Actor):
    """A model of a bookie and one ledger; each message is handled as one step (rule 7)."""

    world: World
    name: str
    term: int = 0
    kept: dict[int, Kept] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    flips: set[int] = field(default_factory=set)
    swaps: dict[int, int] = field(default_factory=dict)
    ends_before: set[int] = field(default_factory=set)
    flips_lac: bool = False
    stated: tuple[int, int] | None = None  # the highest LAC, and the LAFR with it

    def receive(self, message: Message) -> None:
        """Judge the term, where there is one, then do what is asked for."""
        source, what = message.source, message.what
        assert isinstance(what, (Add, Fence, ReadFrom, ForceUpTo))
        match what:
            case Fence(request) | ReadFrom(_, request):
                term = request.term
            case Add(_, term):
                pass
            case _:
                term = TERM_WRITER
        if term != NO_TERM:
            verdict = judge(self.term, term)
            if verdict is Verdict.REFUSE:
                self.send(source, "fenced", Refused())
                return
            if verdict is Verdict.RAISE:
                self.term = term
                self.say("is fenced")
        match what:
            case Add(send):
                self._store(source, send)
            case Fence():
                statement = self._statement()
                self.send(source, self._statement_text(statement), FencedAt(statement))
            case ReadFrom(ask):
                self._find(source, ask)
            case ForceUpTo(last_entry):
                for kept in self.kept.values():
                    kept.is_durable = True
                self.send(source, f"forced up to {id_text(last_entry)}", Forced(what))

    def _statement(self) -> LacStatement | None:
        if self.stated is None:
            return None
        statement = Digest(LEDGER_ID).statement(0, *self.stated)
        return statement._replace(lac=statement.lac ^ LAC_BIT) if self.flips_lac else statement

    def _statement_text(self, statement: LacStatement | None) -> str:
        if statement is None:
            return "no LAC"
        more = f", LAFR {id_text(statement.lafr)}" if self.world.metadata.guaranteed_write_quorum else ""
        return f"LAC {id_text(statement.lac)}{more}"

    def _store(self, source: str, send: Send) -> None:
        block = Block.parse(memoryview(send.batch.block))
        for entry_id, payload, running in zip(block.entry_ids, block.payloads(), block.running, strict=True):
            durable = not self.world.is_deferred
            self.kept[entry_id] = Kept(bytes(payload), block.lac, block.lafr, int(running), durable)
            self.lost.discard(entry_id)
        self.stated = max(self.stated or (NO_ENTRY, NO_ENTRY), (block.lac, block.lafr))
        verb = "received" if self.world.is_deferred else "stored"
        self.send(source, f"{verb} {ids_text(block.entry_ids)}", Stored(send))

    def _find(self, source: str, ask: Ask) -> None:
        encoded, stop, entry_id = self.read(ask.first, ENTRY_ID_MAX, ask.stride)
        blocks = [Block.parse(memoryview(each)) for each in encoded]
        found = [ids_text(block.first_entry for block in blocks)] if blocks else []
        end = f"{entry_id} unknown" if stop is Stop.UNKNOWN else f"no {entry_id}"
        self.send(source, ", ".join([*found, end]), Found(ask, blocks, stop, entry_id))

    def read(self, first: int, last: int, stride: int) -> tuple[list[bytes], Stop, int]:
        """Give the entries asked for as encoded blocks, why they end, and which entry was to follow."""
        entry_id, blocks = first, []
        while entry_id in self.kept and entry_id <= last:
            # A bookie that is wrong gives another entry in its place, or a byte that is not what it was.
            given = self.swaps.get(entry_id, entry_id)
            kept = self.kept[given]
            encoded = bytearray(
                encode_block(
                    ledger_id=LEDGER_ID, content_term=0, first_entry=given, stride=stride, lac=kept.lac,
                    lafr=kept.lafr, payloads=[kept.payload], running=[kept.running],
                )
            )  # fmt: skip
            if entry_id in self.flips:
                encoded[-1] ^= 1
            blocks.append(bytes(encoded))
            entry_id += stride
        if entry_id > last or entry_id in self.ends_before:
            return blocks, Stop.END, entry_id
        return blocks, Stop.UNKNOWN if entry_id in self.lost else Stop.NO_SUCH_ENTRY, entry_id

    def lose(self, entry_id: int) -> None:
        """Lose an entry to a bad disk, and know it (rule 4)."""
        self.kept.pop(entry_id, None)
        self.lost.add(entry_id)

    def restart(self) -> None:
        """Come up again with what was durable."""
        self.kept = {entry_id: kept for entry_id, kept in self.kept.items() if kept.is_durable}

    def show(self) -> str:
        """Describe what is kept."""
        return f"holds {ids_text(sorted(self.kept))}{', fenced' if self.term else ''}"


# --- the metadata store ---


class Store(Actor):
    """A model of the metadata store: one value, compare-and-set, tokens of writers."""

    def __init__(self, world: World, name: str, metadata: LedgerMetadata) -> None:
        super().__init__(world, name)
        self.metadata = metadata
        self.version = Version(1, writers=("creation",))

    def receive(self, message: Message) -> None:
        """Apply a compare-and-set or tell what is there."""
        match message.what:
            case CompareAndSet(metadata, version, token):
                if version == self.version:
                    self._write(metadata, token)
                try:
                    made = settle_compare_and_set("ledger", version, self.version, token, maybe_sent=True)
                except VersionConflictError:
                    self.send(message.source, "conflict", Conflict())
                else:
                    self.send(message.source, "written", Written(made))
            case Reread():
                text = metadata_text(self.metadata)
                self.send(message.source, text, Present(self.metadata, self.version))

    def _write(self, metadata: LedgerMetadata, token: str) -> None:
        self.metadata = metadata
        self.version = Version(self.version.number + 1, writers=(*self.version.writers, token))
        self.say(f"is now {metadata_text(metadata)}")

    def repair(self, fragment: int, lost: str, new: str) -> None:
        """Let a repair put one bookie in another's place (rule 14)."""
        self._write(self.metadata.replace_bookie(fragment, lost, new), "repair")

    def show(self) -> str:
        """Describe the value."""
        return metadata_text(self.metadata)


# --- the stage ---


class World:
    """Replays the events of one scenario."""

    def __init__(self) -> None:
        self.in_flight: list[Message] = []
        self.actors: dict[str, Actor] = {}
        self.is_deferred = False
        self.acknowledged: dict[int, bytes] = {}
        self.shown: set[int] = set()
        self._told: set[str] = set()
        self._effects: list[str | Message] = []

    @property
    def store(self) -> Store:
        """Give the metadata store."""
        store = self.actors["m"]
        assert isinstance(store, Store)
        return store

    @property
    def metadata(self) -> LedgerMetadata:
        """Give the metadata as they are stored."""
        return self.store.metadata

    def bookie(self, name: str) -> Bookie:
        """Give a bookie; there are as many as are named."""
        if not re.fullmatch(r"b\d+", name):
            raise ValueError(f"{name} is not a bookie")
        bookie = self.actors.setdefault(name, Bookie(self, name))
        assert isinstance(bookie, Bookie)
        return bookie

    def send(self, message: Message) -> None:
        """Put a message in flight."""
        self.in_flight.append(message)
        self._effects.append(message)

    def say(self, text: str) -> None:
        """Add a line to what comes of the event."""
        self._effects.append(text)

    def do(self, event: str) -> list[str]:
        """Let something happen."""
        self._effects = []
        self._happen(event)
        self._check()
        return self._lines()

    def _lines(self) -> list[str]:
        """Write the effects; one message to several recipients is one line."""
        lines: list[str] = []
        previous: Message | None = None
        for effect in self._effects:
            if isinstance(effect, str):
                lines.append(effect)
                previous = None
                continue
            if previous is not None and (previous.source, previous.text) == (effect.source, effect.text):
                head, _, text = lines[-1].partition(": ")
                lines[-1] = f"{head} {effect.target}: {text}"
            else:
                lines.append(f"{effect.source} → {effect.target}: {effect.text}")
            previous = effect
        return lines

    # --- events ---

    def _happen(self, event: str) -> None:
        if match := re.fullmatch(r"([^→✗]+) ([→✗]) ([^:]+)(?:: (.+))?", event):
            sources, arrow, targets, text = match.groups()
            for source in sources.split():
                for target in targets.split():
                    message = self._take(source, target, text or "")
                    if arrow == "→":
                        self._actor(target).receive(message)
        elif match := re.fullmatch(r"ledger E=(\d+) Qw=(\d+) Qa=(\d+)((?: \w+)*) on (.+)", event):
            sizes = [int(number) for number in match.groups()[:3]]
            self.create(sizes, match[4].split(), match[5].split())
        elif match := re.fullmatch(r"answers of (.+)", event):
            self._answers(match[1].split())
        elif match := re.fullmatch(r"(b\d+) loses (\d+)", event):
            self.bookie(match[1]).lose(int(match[2]))
        elif match := re.fullmatch(r"(b\d+) restarts", event):
            self.bookie(match[1]).restart()
        elif match := re.fullmatch(r"(b\d+) (flips|gives|leaves out) (.+)", event):
            self._go_wrong(self.bookie(match[1]), match[2], match[3])
        elif match := re.fullmatch(r"repair puts (\S+) in place of (\S+) in fragment (\d+)", event):
            self.store.repair(int(match[3]), match[2], match[1])
        elif match := re.fullmatch(r"show (\S+)", event):
            self.say(self._actor(match[1]).show())
        else:
            self.client_event(event)

    def client_event(self, event: str) -> None:
        """Let a client do something."""
        raise ValueError("not understood")

    def _go_wrong(self, bookie: Bookie, verb: str, what: str) -> None:
        """Make a bookie answer wrongly from now on."""
        if match := re.fullmatch(r"a bit of (\d+)", what):
            bookie.flips.add(int(match[1]))
        elif what == "a bit of its LAC":
            bookie.flips_lac = True
        elif match := re.fullmatch(r"(\d+) for (\d+)", what):
            bookie.swaps[int(match[2])] = int(match[1])
        elif verb == "leaves out" and what.isdigit():
            bookie.kept.pop(int(what))
            bookie.ends_before.add(int(what))
        else:
            raise ValueError("not understood")

    def _actor(self, name: str) -> Actor:
        if name in self.actors:
            return self.actors[name]
        return self.bookie(name)

    def _take(self, source: str, target: str, text: str) -> Message:
        for message in self.in_flight:
            if (message.source, message.target) == (source, target) and message.text.startswith(text):
                self.in_flight.remove(message)
                return message
        raise ValueError(
            f"nothing {f'that begins with {text!r} ' if text else ''}is in flight from {source} to {target}"
        )

    def create(self, sizes: list[int], options: list[str], bookies: list[str]) -> None:
        """Create the ledger and its metadata."""
        if unknown := set(options) - {"guaranteed", "deferred"}:
            raise ValueError(f"unknown options {unknown}")
        metadata = LedgerMetadata.new(
            LEDGER_ID, ensemble_size=sizes[0], write_quorum=sizes[1], ack_quorum=sizes[2], bookies=bookies,
            guaranteed_write_quorum="guaranteed" in options,
        )  # fmt: skip
        self.is_deferred = "deferred" in options
        self.actors["m"] = Store(self, "m", metadata)

    def _answers(self, names: list[str]) -> None:
        metadata = self.metadata
        tally = FenceTally(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum, 0)
        bookies = metadata.last_fragment.bookies
        for name in names:
            tally.answer(bookies.index(name), None)
        silent = " ".join(bookies[seat] for seat in tally.missing) or "nobody"
        self.say(f"{'enough' if tally.is_covered else 'not enough'}, without {silent}")

    # --- what must always hold ---

    def acknowledge(self, entry_id: int, payload: bytes) -> None:
        """Note that the application was told that an entry is safe, and check that it is (rule 1)."""
        self.acknowledged[entry_id] = payload
        metadata = self.metadata
        fragment = metadata.fragment_of(entry_id)
        size = metadata.ensemble_size
        seats = write_set(entry_id % size, size, metadata.write_quorum)
        names = [fragment.bookies[seat] for seat in seats]
        holders = [
            name
            for name in names
            if (kept := self.bookie(name).kept.get(entry_id)) and kept.payload == payload
        ]
        if len(holders) < metadata.ack_quorum:
            self._tell(f"!! {entry_id} is acknowledged on {' '.join(holders) or 'none'} of {' '.join(names)}")

    def _check(self) -> None:
        if "m" not in self.actors or self.metadata.last_entry is None:
            return
        end = self.metadata.last_entry
        for verb, entries in (("acknowledged", self.acknowledged), ("shown to a reader", self.shown)):
            for entry_id in entries:
                if entry_id > end:
                    self._tell(f"!! {entry_id} was {verb}, and the ledger ends at {id_text(end)}")

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.say(what)
