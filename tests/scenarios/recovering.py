"""A recovering client of the scenarios, in the order of `client_aio.ledger.recovery`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_aio.core.add_window import AddGroup, AddWindow
from client_aio.core.digest import Digest
from client_aio.core.ensemble_change import EnsembleChange, EnsembleChangeMachine
from client_aio.core.recovery import (
    Ask,
    End,
    EntrySearch,
    FenceTally,
    Inconclusive,
    RecoveredEnd,
    believed,
    entered,
    fencing_lac_read,
    recovery_read,
)
from client_aio.core.recovery import Found as Recoverable
from metadata.ids import NO_ENTRY, TERM_FINAL
from metadata.model.ledger import with_ensemble
from tests.scenarios.clients import CHANGES_MAX, Client
from tests.scenarios.messages import (
    LEDGER_ID,
    Fence,
    FencedAt,
    Found,
    Message,
    ReadFrom,
    id_text,
    ids_text,
    metadata_text,
)

if TYPE_CHECKING:
    from tests.scenarios.world import World

READ_BYTES = 1_000_000


class Recovery(Client):
    """A recovering client: (a) to (e) of rule 12."""

    term = TERM_FINAL

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.ensemble: tuple[str, ...] = ()
        self.search: EntrySearch | None = None
        self.asked: list[Ask] = []
        self.unreachable: set[str] = set()
        self.end: int | None = None

    def takes_over(self) -> None:
        """(a) Make the ledger IN_RECOVERY, unless it is, or is closed."""
        self.begin_update(entered, lambda _: self._fence())

    def _fence(self) -> None:
        """(b) Send fencing LAC reads to the last fragment's ensemble."""
        if self.metadata.is_closed:
            self.is_over = True
            self.say(f"adopts {metadata_text(self.metadata)}")
            return
        metadata = self.metadata
        self.rounds += 1
        self.known = metadata
        self.fragments = metadata.fragments
        self.ensemble = metadata.last_fragment.bookies
        self.seats = list(self.ensemble)
        self.window, self.search, self.end, self.asked, self.step = None, None, None, [], None
        sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self.tally = FenceTally(*sizes, metadata.last_fragment.first_entry)
        for bookie_id in self.ensemble:
            self.send(bookie_id, "fence", Fence(fencing_lac_read(self.known)), self.rounds)

    def answered(self, message: Message) -> None:
        """Take an answer."""
        match message.what:
            case FencedAt(stated):
                if self.search is None:
                    statement = believed(stated, self.known, Digest(LEDGER_ID))
                    lac, lafr = (statement.lac, statement.lafr) if statement else (None, NO_ENTRY)
                    if stated is not None and statement is None:
                        self.say(f"does not believe LAC {id_text(stated.lac)} of {message.source}")
                    self.tally.answer(self.ensemble.index(message.source), lac, lafr)
                    if self.tally.is_covered:
                        self._begin_search()
            case Found(ask, blocks, stop, stop_entry):
                assert self.search is not None
                if self.end is None and ask in self.asked:
                    self.asked.remove(ask)
                    self.search.answer(ask, blocks, stop, stop_entry)
                    self._go_on()
            case _:
                super().answered(message)

    def failed(self, names: list[str]) -> None:
        """Count bookies as gone: no fence, no read, no copy of theirs will come."""
        for bookie_id in names:
            if bookie_id not in self.seats and bookie_id not in self.ensemble:
                raise ValueError(f"{bookie_id} has no seat at {self.name}")
        self.unreachable.update(names)
        if self.search is None:
            missing = [self.ensemble[seat] for seat in self.tally.missing]
            if set(missing) <= self.unreachable:
                self.withdraw(f"cannot fence without {' '.join(missing)}")
            return
        assert self.window is not None
        for bookie_id in names:
            if bookie_id in self.seats:
                seat = self.seats.index(bookie_id)
                self.window.fail(seat, self.window.epoch(seat))
            self._give_up_asking(bookie_id)
        self._go_on()

    def _give_up_asking(self, bookie_id: str) -> None:
        assert self.search is not None
        for ask in [ask for ask in self.asked if self.ensemble[ask.seat] == bookie_id]:
            self.asked.remove(ask)
            self.search.error(ask)

    def _begin_search(self) -> None:
        """(c) Find what is recoverable, behind the LAC (guaranteed: behind the LAFR), and write it back."""
        metadata, tally = self.known, self.tally
        is_guaranteed = metadata.guaranteed_write_quorum
        before = tally.lafr if is_guaranteed else tally.lac
        self.say(f"has fenced enough bookies: LAC {id_text(tally.lac)}")
        self.window = AddWindow(
            ledger_id=LEDGER_ID,
            content_term=0,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.write_quorum if is_guaranteed else metadata.ack_quorum,
            next_entry=before + 1,
            stated_lac=tally.lac,
            stated_lafr=tally.lafr if is_guaranteed else NO_ENTRY,
        )
        self.changer = EnsembleChangeMachine(self.window, metadata.last_fragment, CHANGES_MAX)
        sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self.search = EntrySearch(*sizes, before + 1, lac=tally.lac)
        for seat, bookie_id in enumerate(self.seats):
            if bookie_id in self.unreachable:
                self.window.fail(seat, self.window.epoch(seat))
        self._go_on()

    def _go_on(self) -> None:
        """Ask and write back what is to be, and close when all of it is done."""
        window, search = self.window, self.search
        assert window is not None
        assert search is not None
        while self.end is None and not self.is_over:
            match search.step():
                case Recoverable(_, payload):
                    window.add(payload, payload)
                case End(last_entry):
                    self.end = last_entry
                    self.say(f"finds the end at {id_text(last_entry)}")
                case Inconclusive(entry_id, seats):
                    names = " ".join(self.ensemble[seat] for seat in seats)
                    self.withdraw(f"whether there is an entry {entry_id} cannot be decided without {names}")
                    return
                case None:
                    break
                case asks:
                    self._ask(asks)
        self.transmit(window.flush())
        if window.failed:
            self.look_after_seats()
        self._close_when_done()

    def _ask(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.asked.append(ask)
            bookie_id = self.ensemble[ask.seat]
            if bookie_id in self.unreachable:
                self._give_up_asking(bookie_id)
                continue
            stride = f" by {ask.stride}" if ask.stride > 1 else ""
            self.send(
                bookie_id,
                f"read from {ask.first}{stride}",
                ReadFrom(ask, recovery_read(self.known, ask, READ_BYTES)),
                self.rounds,
            )

    def is_needed(self) -> bool:
        """Nothing is owed: a bookie that is down need not be replaced for a ledger's last rites."""
        return super().is_needed() and self.window is not None and not self.window.is_idle

    def report(self, turns: list[AddGroup[bytes]]) -> None:
        """Note what has been written back."""
        for turn in turns:
            self.say(f"has written back {ids_text(range(turn.first_entry, turn.last_entry + 1))}")
        self._close_when_done()

    def write(self, change: EnsembleChange) -> None:
        """(d) Keep the change in memory."""
        assert self.changer is not None
        self.fragments = with_ensemble(self.fragments, change.first_entry, change.bookies)
        self.carry_out(self.changer.written())

    def _close_when_done(self) -> None:
        """(e) Close by one compare-and-set; after a conflict adopt what others closed, or start over."""
        assert self.window is not None
        if self.end is None or not self.window.is_idle or self.update is not None or self.is_over:
            return
        closing = RecoveredEnd(self.known, self.fragments, self.end, self.window.length_confirmed)
        self.begin_update(closing.apply, self._closed)

    def _closed(self, happened: bool) -> None:
        if happened:
            self.is_over = True
            assert self.metadata.last_entry is not None
            self.say(f"has closed the ledger at {id_text(self.metadata.last_entry)}")
        else:
            self._fence()

    def show(self) -> str:
        """Describe how far it is."""
        return "is over" if self.is_over else f"recovers {metadata_text(self.metadata)}"
