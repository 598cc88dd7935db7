"""Bookies that answer what the test says, on real sockets, and a client of them over a memory store."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import client_aio
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser, encode_frame
from bookie_aio.wire.listing import ROW
from bookie_aio.wire.many import parse_adds, parse_write_lacs
from bookie_aio.wire.messages import (
    VERSION_MAX,
    Adds,
    Done,
    Failure,
    Hello,
    HelloAnswer,
    ListEntries,
    ListEntriesAnswer,
    Message,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Stop,
    Watch,
    WriteLacs,
    decode_request,
    encode_answer,
    encode_failure,
)
from bookie_aio.wire.watching import UNWATCH, Moved, encode_moved, parse_asked
from metadata.access.bookies import BookieRecord, ensure_cluster
from metadata.access.ledgers import LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.ids import KEY_AVAILABLE, NO_ENTRY
from metadata.model.ledger import LedgerMetadata, UnboundedRecord
from tests.support.laggingstore import LaggingStore
from tests.support.rawclient import block, lac_statement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from metadata.store import Registration

LEDGER = 7


class ScriptedBookie:
    """Holds what the test gives it; what `script` answers goes before its own answer."""

    def __init__(self, bookie_id: str) -> None:
        self.bookie_id = bookie_id
        self.entries: dict[int, tuple[int, bytes]] = {}  # content term and payload
        self.lac: tuple[int, int] | None = None  # content term and LAC of its statement
        self.has_mark = False  # of lost data, by its list of entries
        self.script: Callable[[Message], Awaitable[Message | Failure | None]] | None = None
        self.registration: Registration
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(self, entry_ids: Iterable[int], *, term: int = 0) -> None:
        """Hold these entries, whose payloads are their ids, and no others."""
        self.entries = {entry_id: (term, b"%d" % entry_id) for entry_id in entry_ids}

    @asynccontextmanager
    async def serve(self, store: MemoryMetadataStore) -> AsyncIterator[None]:
        """Serve, and be registered."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        record = BookieRecord(self.bookie_id, [f"127.0.0.1:{server.sockets[0].getsockname()[1]}"], "nonce")
        self.registration = await store.register(f"{KEY_AVAILABLE}/{self.bookie_id}", record.to_json())
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser, watching = FrameParser(FRAME_BYTES_MAX), dict[int, int]()
        try:
            while data := await reader.read(64 * 1024):
                parser.feed(data)
                for header, body in parser.frames():
                    request_id, _, request = decode_request(header)
                    if isinstance(request, Watch):
                        watching.update(parse_asked(body))
                    asked: list[tuple[int, Message]] = [(request_id, request)]
                    if isinstance(request, Adds):
                        many = parse_adds(request_id, request.count, body)
                        asked = [(one.request_id, one.request) for one in many]
                    elif isinstance(request, WriteLacs):
                        lacs = parse_write_lacs(request_id, request.count, body)
                        asked = [(one.request_id, one.request) for one in lacs]
                    for one_id, one in asked:
                        task = asyncio.create_task(self._answer(writer, one_id, one, watching))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, request_id: int, request: Message, watching: dict[int, int]
    ) -> None:
        answer, body = None if self.script is None else await self.script(request), b""
        if answer is None and isinstance(request, Watch):
            answer, body = Done(), await self._moved(request, watching)
        if answer is None:
            answer, body = await self._own_answer(request)
        if isinstance(answer, Failure):
            header = encode_failure(request.op, request_id, answer)
        else:
            header = encode_answer(request.op, request_id, answer)
        writer.write(encode_frame(header, len(body)) + body)

    async def _moved(self, request: Watch, watching: dict[int, int]) -> bytes:
        term, lac = self.lac or (0, -1)
        if watching.get(LEDGER, UNWATCH) == UNWATCH or lac <= watching[LEDGER]:
            await asyncio.sleep(request.wait_ms / 1000)
            return b""
        del watching[LEDGER]
        return encode_moved([Moved(LEDGER, lac_statement(LEDGER, lac, content_term=term))])

    async def _own_answer(self, request: Message) -> tuple[Message, bytes]:
        if isinstance(request, Hello):
            limits = (FRAME_BYTES_MAX, 1 << 20)
            return HelloAnswer(VERSION_MAX, self.bookie_id, request.instance_id, "nonce", *limits), b""
        if isinstance(request, Ping):
            return Done(), b""
        if isinstance(request, ListEntries):
            ids = sorted(entry_id for entry_id in self.entries if entry_id >= request.from_entry)
            rows = [ROW.pack(entry_id, self.entries[entry_id][0], 1, 1) for entry_id in ids]
            return ListEntriesAnswer(NO_ENTRY, self.has_mark), b"".join(rows)
        assert isinstance(request, (Read, ReadLac))
        term, lac = self.lac or (0, -1)
        statement = None if self.lac is None else lac_statement(request.ledger_id, lac, content_term=term)
        if isinstance(request, ReadLac):
            if lac <= request.known_lac:
                await asyncio.sleep(request.wait_ms / 1000)
            return ReadLacAnswer(statement, max(self.entries, default=-1), False), b""
        body = b""
        for entry_id in range(request.first, request.last + 1, request.stride):
            held, payload = self.entries.get(entry_id, (-1, b""))
            if held != request.content_term:
                stop = Stop.STALE_METADATA if held > request.content_term else Stop.NO_SUCH_ENTRY
                return ReadAnswer(stop, entry_id, statement), body
            body += block(request.ledger_id, entry_id, [payload], content_term=held)
        return ReadAnswer(Stop.END, request.last + 1, statement), body


@dataclass
class Scene:
    """Scripted bookies b0, b1, … and a client whose metadata server lags when told to."""

    bookies: list[ScriptedBookie]
    server: LaggingStore
    client: client_aio.Client
    ledgers: LedgerStore
    """What others do to the metadata."""

    async def create(
        self,
        *,
        copies: int = 3,
        name: str | None = None,
        ledger_id: int = LEDGER,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        """Make a ledger on the first bookies, by its metadata; an unbounded one where it has a name.

        Args:
            sizes: Qw and Qa; by default every bookie, and a majority.
        """
        write_quorum, ack_quorum = sizes or (copies, copies // 2 + 1)
        metadata = LedgerMetadata.new(
            ledger_id,
            ensemble_size=copies,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            bookies=[bookie.bookie_id for bookie in self.bookies[:copies]],
            unbounded=None if name is None else UnboundedRecord(name),
        )
        await self.ledgers.create_ledger(metadata)

    async def change(self, apply: Callable[[LedgerMetadata], LedgerMetadata]) -> None:
        """Change the ledger's metadata."""
        metadata, version = await self.ledgers.read(LEDGER)
        await self.ledgers.compare_and_set(apply(metadata), version)


@asynccontextmanager
async def scene(bookies: int = 3, **settings: Any) -> AsyncIterator[Scene]:
    """Return bookies and a client of them, over a memory metadata store."""
    async with AsyncExitStack() as stack:
        tree = MemoryTree()
        store, server = MemoryMetadataStore(tree), LaggingStore(tree)
        await ensure_cluster(store, draw_id=lambda: "scripted", now_ms=1)
        scripted = [ScriptedBookie(f"b{number}") for number in range(bookies)]
        for bookie in scripted:
            await stack.enter_async_context(bookie.serve(store))
        client = await stack.enter_async_context(client_aio.connect(server, **settings))
        yield Scene(scripted, server, client, LedgerStore(store))
