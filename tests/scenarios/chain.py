"""The stage of the scenarios about logs: a list, its ledgers, writers that decide as production code does.

What to recover, what to list and what to do after a conflict are `client_aio.core.log_chain`'s and
`metadata.model.log`'s; ledgers are models: one takes adds until it is fenced, and recovery closes it behind
what it holds. What is sent stays in flight until the script says that it arrives.

    log [without a rule]    the first line; the rules that can be left out are in `RULES`
    w1 opens                reads the list, recovers what is to be recovered, and makes a ledger
    w1 sets                 appends it by compare-and-set; after a conflict it starts over
    w1 sets and hears nothing     the request is on its way, and no answer comes
    it lands                that request takes effect, if it still can
    w1 adds x               sends a record to its ledger, or holds it back
    x arrives               at the ledger
    w1 makes the next       a ledger, to be listed ahead
    w1 lists it             by compare-and-set
    w1 switches             to it, when all that was sent is acknowledged
    w1 closes the old one
    w1 dies                 with what it has in flight
    s looks | s bumps | s deletes    a sweeper, in its three steps
    show list

After each event it is checked, and told as a line that begins with !!: acknowledged records lie in listed
ledgers (AllNonEmptyLedgersInLedgerList); a record is acknowledged behind all others, and none is in the log
whose predecessor is not (EntryOrderMaintained); no listed ledger is deleted; all but the last two are closed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from client_aio.core.log_chain import Listing, to_recover
from metadata.model.log import LogHead, LogRow, Position

RULES = (
    "recovering both",
    "starting over",
    "waiting for the list",
    "waiting for acknowledgements",
    "waiting for the close",
    "bumping the version",
    "settling what is unknown",
)


@dataclass
class Ledger:
    """A model of one."""

    ledger_id: int
    records: list[str] = field(default_factory=list)
    is_fenced: bool = False
    is_closed: bool = False
    is_deleted: bool = False


@dataclass
class Writer:
    """A writer of the log."""

    name: str
    head: LogHead
    version: int
    ledger: Ledger
    following: Ledger | None = None
    old: Ledger | None = None
    is_listed: bool = False
    is_next_listed: bool = False
    held: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)  # in order; what is acknowledged is taken off


class Chain:
    """Replays the events of one scenario."""

    def __init__(self, without: str | None = None) -> None:
        self._without = without
        self._head, self._version = LogHead("log"), 1
        self._ledgers: dict[int, Ledger] = {}
        self._writers: dict[str, Writer] = {}
        self._in_flight: dict[str, tuple[Writer, Ledger]] = {}
        self._late: tuple[LogHead, int] | None = None
        self._acknowledged: list[Position] = []
        self._predecessor: dict[str, str] = {}
        self._found: list[int] = []
        self._effects: list[str] = []
        self._told: set[str] = set()

    def do(self, event: str) -> list[str]:
        """Let something happen; returns what comes of it, a line each."""
        self._effects = []
        self._happen(event)
        self._check()
        return self._effects

    def _keeps(self, rule: str) -> bool:
        assert rule in RULES
        return rule != self._without

    def _say(self, text: str) -> None:
        self._effects.append(text)

    def _happen(self, event: str) -> None:
        if match := re.fullmatch(r"(w\d) (opens|sets|switches|dies)", event):
            getattr(self, f"_{match[2]}")(match[1])
        elif match := re.fullmatch(r"(w\d) sets and hears nothing", event):
            self._sets_unheard(self._writers[match[1]])
        elif match := re.fullmatch(r"(w\d) adds (\w)", event):
            self._adds(self._writers[match[1]], match[2])
        elif match := re.fullmatch(r"(\w) arrives", event):
            self._arrives(match[1])
        elif match := re.fullmatch(r"(w\d) makes the next", event):
            self._make_next(self._writers[match[1]])
        elif match := re.fullmatch(r"(w\d) lists it", event):
            self._list_next(self._writers[match[1]])
        elif match := re.fullmatch(r"(w\d) closes the old one", event):
            self._close_old(self._writers[match[1]])
        elif event in ("it lands", "s looks", "s bumps", "s deletes", "show list", "log"):
            getattr(self, "_" + event.replace(" ", "_"))()
        else:
            raise ValueError("not understood")

    # --- opening ---

    def _make(self, who: str) -> Ledger:
        ledger = self._ledgers[len(self._ledgers)] = Ledger(len(self._ledgers))
        self._say(f"{who} makes ledger {ledger.ledger_id}")
        return ledger

    def _opens(self, name: str) -> None:
        rows = to_recover(self._head)
        if not self._keeps("recovering both"):
            rows = rows[-1:]
        for row in rows:
            ledger = self._ledgers[row.ledger_id]
            if not ledger.is_closed:
                ledger.is_fenced = ledger.is_closed = True
                self._say(f"{name} fences ledger {row.ledger_id} and closes it with {_list(ledger.records)}")
        head, version = self._head, self._version
        self._writers[name] = Writer(name, head, version, self._make(name))

    def _set(self, writer: Writer, ledger: Ledger) -> bool:
        """Append a ledger by compare-and-set, from what the writer has read."""
        listing = Listing(
            lambda head: head.append([LogRow(ledger.ledger_id, ledger.ledger_id, 0)]), ledger.ledger_id
        )
        wanted = listing.apply(writer.head)
        assert wanted is not None
        if writer.version != self._version:
            writer.head, writer.version = self._head, self._version
            if listing.is_met_by(self._head):
                self._say(f"{writer.name} finds ledger {ledger.ledger_id} listed already")
                return True
            assert listing.apply(self._head) is None
            return False
        self._head, self._version = wanted, self._version + 1
        writer.head, writer.version = self._head, self._version
        self._show_list()
        return True

    def _sets(self, name: str) -> None:
        writer = self._writers[name]
        if writer.is_listed:
            self._say(f"{name} has the log")
            return
        if self._set(writer, writer.ledger):
            self._serve(writer)
        elif self._keeps("starting over"):
            self._say(f"{name} conflicts and starts over")
            writer.ledger.is_deleted = True
            self._opens(name)
        else:
            self._say(f"{name} conflicts and appends to what is there")
            assert self._set(writer, writer.ledger)
            self._serve(writer)

    def _serve(self, writer: Writer) -> None:
        writer.is_listed = True
        self._release(writer)

    def _sets_unheard(self, writer: Writer) -> None:
        row = LogRow(writer.ledger.ledger_id, writer.ledger.ledger_id, 0)
        self._late = (writer.head.append([row]), writer.version)
        if self._keeps("settling what is unknown"):
            self._say(f"{writer.name} will try the same again")
            return
        self._say(f"{writer.name} reads the list unchanged, and gives ledger {row.id} up")
        writer.ledger.is_deleted = True
        self._opens(writer.name)

    def _it_lands(self) -> None:
        if self._late is None:
            raise ValueError("nothing is on its way")
        (head, version), self._late = self._late, None
        if version == self._version:
            self._head, self._version = head, version + 1
            self._show_list()
        else:
            self._say("it conflicts")

    # --- writing ---

    def _adds(self, writer: Writer, record: str) -> None:
        previous = [*writer.sent, *writer.held]
        if previous:
            self._predecessor[record] = previous[-1]
        is_ready = writer.is_listed or not self._keeps("waiting for the list")
        if writer.held or not is_ready or (writer.following is not None and writer.old is writer.ledger):
            writer.held.append(record)
            self._say(f"{writer.name} holds {record} back")
        else:
            self._send(writer, record)

    def _send(self, writer: Writer, record: str) -> None:
        self._in_flight[record] = (writer, writer.ledger)
        writer.sent.append(record)
        self._say(f"{writer.name} → ledger {writer.ledger.ledger_id}: {record}")

    def _release(self, writer: Writer) -> None:
        held, writer.held = writer.held, []
        for record in held:
            self._send(writer, record)

    def _arrives(self, record: str) -> None:
        if record not in self._in_flight:
            self._say(f"{record} has not been sent")
            return
        writer, ledger = self._in_flight.pop(record)
        if ledger.is_fenced or ledger.is_deleted:
            self._say(f"ledger {ledger.ledger_id} refuses {record}: {writer.name} has lost the log")
            return
        ledger.records.append(record)
        if writer.name not in self._writers:
            self._say(f"ledger {ledger.ledger_id} takes {record}, and nobody hears of it")
        elif writer.sent[0] != record:
            self._say(
                f"ledger {ledger.ledger_id} takes {record}; {writer.sent[0]} is to be acknowledged first"
            )
        else:
            writer.sent.pop(0)
            position = Position(ledger.ledger_id, len(ledger.records) - 1)
            self._say(f"{record} is acknowledged at {position}")
            if self._acknowledged and position < max(self._acknowledged):
                self._say(
                    f"!! EntryOrderMaintained: {record} at {position} comes after {max(self._acknowledged)}"
                )
            self._acknowledged.append(position)

    # --- rolling ---

    def _make_next(self, writer: Writer) -> None:
        if writer.old is not None and self._keeps("waiting for the close"):
            self._say(f"{writer.name} waits until ledger {writer.old.ledger_id} is closed")
        else:
            writer.following, writer.is_next_listed = self._make(writer.name), False

    def _list_next(self, writer: Writer) -> None:
        if writer.following is None:
            self._say(f"{writer.name} has no next ledger")
        elif self._set(writer, writer.following):
            writer.is_next_listed = True
        elif self._head.rows.last_key == writer.ledger.ledger_id:
            self._say(f"{writer.name} conflicts; its ledger {writer.ledger.ledger_id} is still the last")
            writer.following.is_deleted = True
            writer.following = self._make(writer.name)
            assert self._set(writer, writer.following)
            writer.is_next_listed = True
        else:
            self._say(f"{writer.name} conflicts and has lost the log")

    def _switches(self, name: str) -> None:
        writer = self._writers[name]
        if writer.following is None or not writer.is_next_listed:
            self._say(f"{name} has nothing to switch to")
        elif writer.sent and self._keeps("waiting for acknowledgements"):
            self._say(f"{name} waits for {_list(writer.sent)}")
            writer.old = writer.ledger  # what is added meanwhile is held back
        else:
            writer.old, writer.ledger, writer.following = writer.ledger, writer.following, None
            self._say(f"{name} writes to ledger {writer.ledger.ledger_id}")
            self._release(writer)

    def _close_old(self, writer: Writer) -> None:
        if writer.old is None:
            self._say(f"{writer.name} has nothing to close")
            return
        writer.old.is_closed = writer.old.is_fenced = True
        self._say(f"ledger {writer.old.ledger_id} is closed with {_list(writer.old.records)}")
        writer.old = None

    def _dies(self, name: str) -> None:
        del self._writers[name]
        for record, (writer, _) in list(self._in_flight.items()):
            if writer.name == name:
                del self._in_flight[record]
                self._say(f"{record} is lost")

    # --- sweeping ---

    def _unlisted(self) -> list[int]:
        return [each for each in self._ledgers if not self._head.lists(each)]

    def _s_looks(self) -> None:
        self._found = [each for each in self._unlisted() if not self._ledgers[each].is_deleted]
        self._say(f"s finds {_list(self._found)} in no list")

    def _s_bumps(self) -> None:
        if self._keeps("bumping the version"):
            self._version += 1
            self._found = [each for each in self._found if each in self._unlisted()]
        self._say(f"s will delete {_list(self._found)}")

    def _s_deletes(self) -> None:
        for each in self._found:
            self._ledgers[each].is_deleted = True
        self._say(f"s deletes {_list(self._found)}")

    # --- looking ---

    def _log(self) -> None:
        pass

    def _show_list(self) -> None:
        self._say(f"the list is {_list([row.id for row in self._head.newest])}")

    def _check(self) -> None:
        listed = [row.id for row in self._head.newest]
        faults = [
            f"AllNonEmptyLedgersInLedgerList: {position} is acknowledged and not listed"
            for position in self._acknowledged
            if position.ledger_id not in listed
        ]
        faults += [f"listed ledger {each} is deleted" for each in listed if self._ledgers[each].is_deleted]
        faults += [
            f"ledger {each} is not closed" for each in listed[:-2] if not self._ledgers[each].is_closed
        ]
        if all(self._ledgers[each].is_closed for each in listed[:-1]):
            there = [record for each in listed for record in self._ledgers[each].records]
            faults += [
                f"EntryOrderMaintained: {record} is there for good, and {before} before it is not"
                for record, before in self._predecessor.items()
                if record in there and before not in there and self._is_final(before)
            ]
        for fault in faults:
            if fault not in self._told:
                self._told.add(fault)
                self._say(f"!! {fault}")

    def _is_final(self, record: str) -> bool:
        """Return whether a record can no longer come to be there."""
        return record not in self._in_flight and all(record not in w.held for w in self._writers.values())


def _list(items: list[str] | list[int]) -> str:
    return " ".join(map(str, items)) or "nothing"
