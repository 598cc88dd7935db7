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

from client_aio.core.quorum import write_set
from client_aio.core.recovery import FenceTally
from metadata.model.ledger import LedgerMetadata
from tests.scenarios.messages import (
    LEDGER_ID,
    Actor,
    Message,
    id_text,
)
from tests.scenarios.models import Bookie, Store


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
        """Return the metadata store."""
        store = self.actors["m"]
        assert isinstance(store, Store)
        return store

    @property
    def metadata(self) -> LedgerMetadata:
        """Return the metadata as they are stored."""
        return self.store.metadata

    def bookie(self, name: str) -> Bookie:
        """Return a bookie; there are as many as are named."""
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

    def keepers_of(self, entry_id: int) -> list[str]:
        """Return the bookies that the metadata name for an entry."""
        metadata = self.metadata
        seats = write_set(entry_id % metadata.ensemble_size, metadata.ensemble_size, metadata.write_quorum)
        return [metadata.fragment_of(entry_id).bookies[seat] for seat in seats]

    def acknowledge(self, entry_id: int, payload: bytes) -> None:
        """Note that the application was told that an entry is safe, and check that it is (rule 1)."""
        self.acknowledged[entry_id] = payload
        metadata, names = self.metadata, self.keepers_of(entry_id)
        holders = [name for name in names if self.bookie(name).has_stored(entry_id, payload)]
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
