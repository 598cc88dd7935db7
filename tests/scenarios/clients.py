"""The writer of the scenarios: machines of `client_aio.core`, and what carries out their decisions.

Nothing is decided here that the real shells do not decide in the same way: `client_aio.ledger.replication`
(who is sent what), `client_aio.ledger.ensemble_change` (the steps of an ensemble change),
`client_aio.ledger.metadata_update` (attempts at the metadata), `client_aio.ledger.writer` (the close).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bookie_aio.wire.blocks import Block
from client_aio.core.add_window import AddGroup, AddWindow, Send
from client_aio.core.ensemble_change import (
    Abandon,
    Closing,
    Copy,
    EnsembleChange,
    EnsembleChangeMachine,
    Find,
    GiveUp,
    MetadataUpdate,
    Reseat,
    Step,
    Wait,
    Write,
)
from client_aio.core.quorum import indexes_of
from metadata.ids import TERM_WRITER
from tests.scenarios.messages import (
    LEDGER_ID,
    Actor,
    Add,
    CompareAndSet,
    Conflict,
    Forced,
    ForceUpTo,
    Message,
    Present,
    Refused,
    Reread,
    Stored,
    Written,
    id_text,
    ids_text,
    metadata_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version
    from tests.scenarios.world import World

CHANGES_MAX = 100


class Client(Actor):
    """What a writer and a recovery have in common: seats, ensemble changes, the metadata."""

    term: int

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.metadata: LedgerMetadata = world.metadata
        self.version: Version = world.store.version
        self.seats: list[str] = list(self.metadata.last_fragment.bookies)
        self.window: AddWindow[bytes] | None = None
        self.changer: EnsembleChangeMachine[bytes] | None = None
        self.update: MetadataUpdate | None = None
        self.after_update: Callable[[bool], None] = lambda _: None
        self.updates = Counter[str]()
        self.is_over = False
        self.tries = 0  # requests to the metadata store, one after another
        self.rounds = 0  # of requests to bookies
        self.step: Step = None  # the one that waits for an answer

    # --- sending and counting, as the replicator does ---

    def transmit(self, sends: list[Send]) -> None:
        """Send batches to the bookies of their seats."""
        for send in sends:
            block = Block.parse(memoryview(send.batch.block))
            lafr = f", LAFR {id_text(block.lafr)}" if self.metadata.guaranteed_write_quorum else ""
            text = f"add {ids_text(block.entry_ids)}, LAC {id_text(block.lac)}{lafr}"
            self.send(self.seats[send.seat], text, Add(send, self.term), self.rounds)

    def report(self, turns: list[AddGroup[bytes]]) -> None:
        """Tell what has been acknowledged."""
        raise NotImplementedError

    def failed(self, names: list[str]) -> None:
        """Note that bookies failed: an error, no answer in time, a lost connection."""
        assert self.window is not None
        for bookie_id in names:
            if bookie_id not in self.seats:
                raise ValueError(f"{bookie_id} has no seat at {self.name}")
            seat = self.seats.index(bookie_id)
            self.window.fail(seat, self.window.epoch(seat))
        self.look_after_seats()

    def look_after_seats(self) -> None:
        """Begin a change, unless one is under way: then what failed is the next one's."""
        assert self.changer is not None
        if self.step is None and self.is_needed():
            self.carry_out(self.changer.next())
        elif isinstance(self.step, Copy):
            self.go_on_copying()

    def is_needed(self) -> bool:
        """Return whether anything is still owed to anybody."""
        return not self.is_over

    # --- ensemble changes ---

    def carry_out(self, step: Step) -> None:
        """Do what the changer says, until it has to wait for something."""
        window, changer = self.window, self.changer
        assert window is not None
        assert changer is not None
        self.step = step
        match step:
            case Find(seats):
                self.say(f"looks for bookies in place of {self._names(seats)}")
            case Wait(is_frozen):
                self.say(
                    "waits for a bookie" if is_frozen else f"goes on without {self._names(window.failed)}"
                )
            case Copy(bookies, seats):
                self._occupy(bookies, seats)
                self.transmit(window.seat_replacements(seats))
                self.go_on_copying()
            case Abandon():
                self._occupy(changer.fragment.bookies, window.replacements)
                window.abandon_change()
                self.report(window.advance())
                self.step = None
                self.carry_out(changer.abandoned())
            case Write(change):
                self.write(change)
            case Reseat(bookies, seats):
                self._occupy(bookies, seats & ~window.replacements)
                self.transmit(window.commit_change(seats))
                self.report(window.advance())
                self.step = None
                self.carry_out(changer.reseated())
            case GiveUp(why):
                self.withdraw(f"not enough bookies: {why}")

    def go_on_copying(self) -> None:
        """Go on once the replacements hold their copies (rule 11)."""
        assert self.window is not None
        assert self.changer is not None
        assert isinstance(self.step, Copy)
        if not self.window.awaits_copies:
            self.carry_out(self.changer.copied())

    def finds(self, names: list[str]) -> None:
        """Answer the search for bookies: those that there are, in seat order, or nobody."""
        assert self.changer is not None
        if not isinstance(self.step, Find):
            raise ValueError(f"{self.name} is not looking for bookies")
        if names == ["nobody"]:
            self.carry_out(self.changer.not_found())
            return
        bookies = list(self.changer.target)
        for seat, name in zip(indexes_of(self.step.seats), names, strict=True):
            bookies[seat] = name
        self.carry_out(self.changer.found(tuple(bookies)))

    def looks_again(self) -> None:
        """Let the time between two searches pass."""
        assert self.changer is not None
        if not isinstance(self.step, Wait):
            raise ValueError(f"{self.name} does not wait for bookies")
        self.carry_out(self.changer.next())

    def write(self, change: EnsembleChange) -> None:
        """Write a change of the ensemble."""
        raise NotImplementedError

    def withdraw(self, why: str) -> None:
        """Give up everything outstanding."""
        self.is_over = True
        self.say(f"withdraws: {why}")

    def _occupy(self, bookies: tuple[str, ...], seats: int) -> None:
        for seat in indexes_of(seats):
            self.seats[seat] = bookies[seat]

    def _names(self, seats: int) -> str:
        return " ".join(self.seats[seat] for seat in indexes_of(seats))

    # --- the metadata, as HeldMetadata does ---

    def begin_update(
        self,
        apply: Callable[[LedgerMetadata], LedgerMetadata | None],
        after: Callable[[bool], None],
    ) -> None:
        """Change the metadata by compare-and-set; `after` is told whether it happened or was refused."""
        self.update = MetadataUpdate(self.metadata, self.version, apply)
        self.after_update = after
        self.updates["begun"] += 1
        self.attempt()

    def attempt(self) -> None:
        """Make the attempt that is due, or end the update."""
        update = self.update
        assert update is not None
        if update.is_refused:
            self._end_update(happened=False)
            return
        metadata, version, number = update.attempt()
        token = f"{self.name}.{self.updates['begun']}.{number}"
        self.tries += 1
        self.send("m", metadata_text(metadata), CompareAndSet(metadata, version, token), self.tries)

    def _end_update(self, *, happened: bool) -> None:
        update, self.update = self.update, None
        assert update is not None
        self.metadata, self.version = update.metadata, update.version
        self.after_update(happened)

    def receive(self, message: Message) -> None:
        """Take an answer; one to an earlier request, or to a client that has withdrawn, means nothing."""
        current = self.tries if message.source == "m" else self.rounds
        if not self.is_over and message.request == current:
            self.answered(message)

    def answered(self, message: Message) -> None:
        """Take an answer of the metadata store, or of a bookie."""
        match message.what:
            case Written(version):
                if self.update is not None:
                    self.update.written(version)
                    self._end_update(happened=True)
            case Conflict():
                self.tries += 1
                self.send("m", "read", Reread(), self.tries)
            case Present(metadata, version):
                if self.update is not None:
                    self.update.conflicted(metadata, version)
                    self.attempt()
            case Stored(send):
                assert self.window is not None
                self.report(self.window.acknowledged(send))
                if isinstance(self.step, Copy):
                    self.go_on_copying()
            case Refused():
                self.withdraw("fenced")
            case _:
                raise ValueError(f"{self.name} does not expect {message.text!r}")


class Writer(Client):
    """The writer of the ledger: window, ensemble changes, close."""

    term = TERM_WRITER

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        metadata = self.metadata
        self.window: AddWindow[bytes] = AddWindow(
            ledger_id=LEDGER_ID,
            content_term=0,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
            guaranteed_write_quorum=metadata.guaranteed_write_quorum,
            deferred_sync=world.is_deferred,
        )
        self.changer = EnsembleChangeMachine(self.window, metadata.last_fragment, CHANGES_MAX)
        self.is_closing = False

    def adds(self, first: int, last: int) -> None:
        """Take entries, all in one turn of the loop."""
        if self.is_over or self.is_closing:
            raise ValueError("w takes no more entries")
        if first != self.window.last_add_pushed + 1:
            raise ValueError(f"the next entry is {self.window.last_add_pushed + 1}")
        for entry_id in range(first, last + 1):
            payload = f"{entry_id} of {self.name}".encode()
            self.window.add(payload, payload)
        self.transmit(self.window.flush())

    def report(self, turns: list[AddGroup[bytes]]) -> None:
        """Acknowledge entries to the application."""
        for turn in turns:
            verb = "reports as received" if self.world.is_deferred else "acknowledges"
            self.say(f"{verb} {ids_text(range(turn.first_entry, turn.last_entry + 1))}")
            if not self.world.is_deferred:
                for offset, payload in enumerate(turn.tokens):
                    self.world.acknowledge(turn.first_entry + offset, payload)

    def force(self) -> None:
        """Ask all bookies to make durable what they received."""
        last_entry = self.window.last_entry_sent
        for seat, name in enumerate(self.seats):
            if not self.window.failed >> seat & 1:
                force = ForceUpTo(last_entry, self.window.epoch(seat))
                self.send(name, f"force up to {id_text(last_entry)}", force, self.rounds)

    def answered(self, message: Message) -> None:
        """Take an answer; a force's moves the LAC."""
        if isinstance(message.what, Forced):
            force, before = message.what.force, self.window.lac
            seat = self.seats.index(message.source)
            self.report(self.window.forced(seat, force.epoch, force.last_entry))
            if self.window.lac > before:
                self.say(f"acknowledges {ids_text(range(before + 1, self.window.lac + 1))} as forced")
        else:
            super().answered(message)

    def write(self, change: EnsembleChange) -> None:
        """Write the change to the metadata store; refused, the writer is displaced."""
        self.begin_update(change.apply, self._ensemble_written)

    def _ensemble_written(self, happened: bool) -> None:
        assert self.changer is not None
        if happened:
            self.carry_out(self.changer.written())
        else:
            self.withdraw(f"the ledger is {metadata_text(self.metadata)}")

    def is_needed(self) -> bool:
        """Everything is acknowledged when the close begins."""
        return super().is_needed() and not self.is_closing

    def closes(self) -> None:
        """Close the ledger behind the LAC; the shell has waited until nothing is under way."""
        if not self.window.is_idle or self.update is not None:
            raise ValueError("something is under way")
        self.is_closing = True
        closing = Closing(self.window.lac, self.window.length_confirmed, self.metadata.last_fragment)

        def closed(happened: bool) -> None:
            if happened or closing.is_met_by(self.metadata):
                self.is_over = True
                self.say(f"has closed the ledger at {id_text(closing.last_entry)}")
            else:
                self.withdraw(f"the ledger is {metadata_text(self.metadata)}")

        self.begin_update(closing.apply, closed)

    def withdraw(self, why: str) -> None:
        """Fail everything outstanding, once and in order."""
        super().withdraw(why)
        tokens = self.window.abort().tokens()
        if tokens:
            self.say(f"fails {ids_text(int(token.split()[0]) for token in tokens)}: outcome unknown")

    def show(self) -> str:
        """Describe the window."""
        window = self.window
        parts = [f"LAC {id_text(window.lac)}", f"LAP {id_text(window.last_add_pushed)}"]
        if self.metadata.guaranteed_write_quorum:
            parts.insert(1, f"LAFR {id_text(window.lafr)}")
        parts.append(f"writes to {' '.join(self.seats)}")
        if window.failed:
            parts.append(f"{self._names(window.failed)} failed")
        if window.is_frozen:
            parts.append("frozen")
        return ", ".join(parts)
