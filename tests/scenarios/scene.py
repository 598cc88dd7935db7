"""The stage with its clients: a writer, recoveries, a reader."""

from __future__ import annotations

import re

from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.core.digest import Digest
from client_aio.core.read_plan import ClassRange, checked_blocks, class_ranges, fragment_end
from metadata.errors import DigestMismatchError, ProtocolError
from metadata.ids import NO_ENTRY
from tests.scenarios.clients import Client, Writer
from tests.scenarios.messages import LEDGER_ID, Actor, id_text, ids_text
from tests.scenarios.recovering import Recovery
from tests.scenarios.world import World


class Reader(Actor):
    """A tailing reader, which shows the application what the LAC allows."""

    seen = NO_ENTRY

    def asks(self, bookie_id: str) -> None:
        """Ask a bookie for the LAC and read up to it."""
        stated = self.world.bookie(bookie_id).stated
        lac = stated[0] if stated else NO_ENTRY
        self.seen = max(self.seen, lac)
        self.say(f"hears LAC {id_text(lac)}, and has read up to {id_text(self.seen)}")
        for entry_id in range(lac + 1):
            self.world.shown.add(entry_id)

    def reads(self, first: int, last: int) -> None:
        """Read a range: each class of entries from the first bookie of its write set that has it right."""
        metadata = self.world.metadata
        while first <= last:
            end = fragment_end(metadata, metadata.fragment_of(first))
            until = last if end is None else min(last, end)
            for asked in class_ranges(metadata, first, until):
                self._read(asked)
            first = until + 1

    def _read(self, asked: ClassRange) -> None:
        wanted: ClassRange | None = asked
        for name in asked.bookies:
            assert wanted is not None
            encoded, stop, stop_entry = self.world.bookie(name).read(wanted.first, wanted.last, wanted.stride)
            answer = ReadAnswer(stop, stop_entry, None)
            try:
                body = memoryview(b"".join(encoded))
                blocks, judged = checked_blocks(wanted, answer, body, Digest(LEDGER_ID))
            except (DigestMismatchError, ProtocolError) as error:
                self.say(f"passes {name} over: {error}")
                continue
            if blocks:
                read = ids_text(entry_id for block in blocks for entry_id in block.entry_ids)
                self.say(f"reads {read} from {name}")
                wanted = wanted.after(blocks[-1].last_entry)
            if wanted is None:
                return
            stopped = "unknown" if judged.stop == Stop.UNKNOWN else "no"
            self.say(f"hears of {name}: {stopped} {judged.stop_entry}")
        assert wanted is not None
        self.say(f"cannot read {wanted.first}: asked all of {' '.join(asked.bookies)}")

    def show(self) -> str:
        """Describe how far it is."""
        return f"has read up to {id_text(self.seen)}"


class Scene(World):
    """The stage with its clients; the writer is there from the start."""

    def create(self, sizes: list[int], options: list[str], bookies: list[str]) -> None:
        """Create the ledger."""
        super().create(sizes, options, bookies)
        self.actors["w"] = Writer(self, "w")

    def client_event(self, event: str) -> None:
        """Let a client do something."""
        name, _, rest = event.partition(" ")
        if match := re.fullmatch(r"(b\d+(?: b\d+)*) fails? at (\S+)", event):
            self._client(match[2]).failed(match[1].split())
        elif rest == "takes over":
            recovery = Recovery(self, name)
            self.actors[name] = recovery
            recovery.takes_over()
        elif match := re.fullmatch(r"finds (.+)", rest):
            self._client(name).finds(match[1].split())
        elif rest == "looks again":
            self._client(name).looks_again()
        elif rest == "hears nothing from m":
            self._client(name).attempt()
        elif rest == "dies":
            self._client(name).is_over = True
        elif name == "t":
            self._reader_event(rest)
        elif name == "w":
            self._writer_event(rest)
        else:
            super().client_event(event)

    def _writer_event(self, event: str) -> None:
        writer = self._client("w")
        assert isinstance(writer, Writer)
        if match := re.fullmatch(r"adds (\d+)(?:\.\.(\d+))?", event):
            writer.adds(int(match[1]), int(match[2] or match[1]))
        elif event == "forces":
            writer.force()
        elif event == "closes":
            writer.closes()
        else:
            super().client_event(event)

    def _reader_event(self, event: str) -> None:
        reader = self.actors.setdefault("t", Reader(self, "t"))
        assert isinstance(reader, Reader)
        if match := re.fullmatch(r"asks (b\d+)", event):
            reader.asks(match[1])
        elif match := re.fullmatch(r"reads (\d+)(?:\.\.(\d+))?", event):
            reader.reads(int(match[1]), int(match[2] or match[1]))
        else:
            super().client_event(event)

    def _client(self, name: str) -> Client:
        client = self.actors.get(name)
        if not isinstance(client, Client):
            raise ValueError(f"there is no client {name}")
        return client
