"""Models of a bookie and of the metadata store: they keep the rules of their side, or break them as told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bookie_aio.core.fencing import Verdict, judge
from bookie_aio.wire.blocks import Block, LacStatement, encode_block
from bookie_aio.wire.messages import NO_TERM, Stop
from client_aio.core.digest import Digest
from metadata.errors import VersionConflictError
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY, TERM_WRITER
from metadata.store import Version
from metadata.write_outcome import settle_compare_and_set
from tests.scenarios.messages import (
    LEDGER_ID,
    Actor,
    Add,
    CompareAndSet,
    Conflict,
    Fence,
    FencedAt,
    Forced,
    ForceUpTo,
    Found,
    Message,
    Present,
    ReadFrom,
    Refused,
    Reread,
    Stored,
    Written,
    id_text,
    ids_text,
    metadata_text,
)

if TYPE_CHECKING:
    from client_aio.core.add_window import Send
    from client_aio.core.recovery import Ask
    from metadata.model.ledger import LedgerMetadata
    from tests.scenarios.world import World

LAC_BIT = 64
"""The bit of a LAC that a bookie with bad memory flips."""


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
        what = message.what
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
                self.answer(message, "fenced", Refused())
                return
            if verdict is Verdict.RAISE:
                self.term = term
                self.say("is fenced")
        match what:
            case Add(send):
                self._store(message, send)
            case Fence():
                statement = self._statement()
                self.answer(message, self._statement_text(statement), FencedAt(statement))
            case ReadFrom(ask):
                self._find(message, ask)
            case ForceUpTo(last_entry):
                for kept in self.kept.values():
                    kept.is_durable = True
                self.answer(message, f"forced up to {id_text(last_entry)}", Forced(what))

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

    def _store(self, message: Message, send: Send) -> None:
        block = Block.parse(memoryview(send.batch.block))
        for entry_id, payload, running in zip(block.entry_ids, block.payloads(), block.running, strict=True):
            durable = not self.world.is_deferred
            self.kept[entry_id] = Kept(bytes(payload), block.lac, block.lafr, int(running), durable)
            self.lost.discard(entry_id)
        self.stated = max(self.stated or (NO_ENTRY, NO_ENTRY), (block.lac, block.lafr))
        verb = "received" if self.world.is_deferred else "stored"
        self.answer(message, f"{verb} {ids_text(block.entry_ids)}", Stored(send))

    def _find(self, message: Message, ask: Ask) -> None:
        encoded, stop, entry_id = self.read(ask.first, ENTRY_ID_MAX, ask.stride)
        blocks = [Block.parse(memoryview(each)) for each in encoded]
        found = [ids_text(block.first_entry for block in blocks)] if blocks else []
        end = f"{entry_id} unknown" if stop is Stop.UNKNOWN else f"no {entry_id}"
        self.answer(message, ", ".join([*found, end]), Found(ask, blocks, stop, entry_id))

    def read(self, first: int, last: int, stride: int) -> tuple[list[bytes], Stop, int]:
        """Return the entries asked for as encoded blocks, why they end, and which entry was to follow."""
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

    def has_stored(self, entry_id: int, payload: bytes) -> bool:
        """Return whether this copy was stored here; one that was lost since counts."""
        kept = self.kept.get(entry_id)
        return entry_id in self.lost or (kept is not None and kept.payload == payload)

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
                    self.answer(message, "conflict", Conflict())
                else:
                    self.answer(message, "written", Written(made))
            case Reread():
                text = metadata_text(self.metadata)
                self.answer(message, text, Present(self.metadata, self.version))

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
