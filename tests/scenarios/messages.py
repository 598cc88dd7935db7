"""What the actors of a scenario say to one another, and how it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bookie_aio.wire.blocks import Block, LacStatement
    from bookie_aio.wire.messages import Read, ReadLac, Stop
    from client_aio.core.add_window import Send
    from client_aio.core.recovery import Ask
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version
    from tests.scenarios.world import World

LEDGER_ID = 1


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
    request: int = 0
    """Of a client: what it is part of. An answer bears the same, so that nobody takes an old one for new."""


class Actor:
    """Somebody who receives messages and says what comes of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    def send(self, target: str, text: str, what: What, request: int = 0) -> None:
        """Send a message: it is in flight from now on."""
        self.world.send(Message(self.name, target, text, what, request))

    def answer(self, message: Message, text: str, what: What) -> None:
        """Answer a message."""
        self.send(message.source, text, what, message.request)

    def say(self, text: str) -> None:
        """Add a line to what comes of the event."""
        self.world.say(f"{self.name} {text}")

    def receive(self, message: Message) -> None:
        """Take a message that arrived."""
        raise NotImplementedError

    def show(self) -> str:
        """Describe the state."""
        raise NotImplementedError
