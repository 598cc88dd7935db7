"""Links: what stands between one client and one bookie, for a test to hold, lose, block and cut.

Real sockets: each pair of a client and a bookie has a proxy with a port of its own, and each client sees the
bookies under the addresses of its own links. No production code knows of it: a client of `Links` reads the
registrations through a store that puts the links' addresses in place of the bookies'.

    async with Cluster(tmp_path) as cluster, Links(cluster.uri) as links, links.connect("writer") as client:
        link = links["writer", "b2"]                    # may be told what to do before there is a connection

        held = link.requests.hold(Op.ADD)               # delay: the next add, and all behind it, wait here
        future = ledger.add_entry(b"x")
        frame = await held.reached()                    # it is here: frame.message, frame.block
        held.release()                                  # and now it goes on

        link.answers.block()                            # one direction: adds arrive, nothing comes back
        link.answers.unblock()

        held = link.answers.hold(Op.ADD)                # a lost answer: the add took effect,
        await held.reached()
        link.reset()                                    # and the connection is reset with its answer in it

        link.black_hole()                               # everything is swallowed, the connections stay
        await link.restore()                            # they are reset, and new ones work again

        link.forget()                                   # as a firewall does: the connections that there are
                                                        # go silent for ever, and new ones work at once

        await link.cut()                                # reset, and refused, until `restore`

        seen = link.requests.see(Op.READ)               # an event to wait for, holding nothing back
        await seen.reached()

        link.answers.forge = lie                        # a bookie that lies: lie(frame) gives the frame that
                                                        # goes on instead, or None for the one that came

Frames of one connection keep their order, so whatever is behind a held frame waits as well, as it does
with TCP. Nothing here sleeps: what a test waits for are frames. A bookie may be killed and restarted behind
its links: each new connection looks up where it is now. (While it is down, a link accepts a connection and
resets it; `cut` the link as well where the client shall see that it is refused.)

`links.store("writer")` is that client's view of the metadata store, where a test may come in between:

    links.store("repair").before_compare_and_set = meet     # awaited before each one, with its key
    await links.store("reader").lag(key)                    # reads of it give what is there now, until a sync
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import client_aio
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.frames import decode_header, encode_frame
from bookie_aio.wire.many import parse_adds
from bookie_aio.wire.messages import (
    ANSWER,
    NO_TERM,
    Adds,
    Failure,
    Message,
    Op,
    Read,
    ReadLac,
    decode_answer,
    decode_request,
    encode_answer,
)
from metadata.access.bookies import BookieRecord, split_address
from metadata.backends.uri import open_store
from metadata.errors import NoSuchKeyError
from metadata.ids import KEY_AVAILABLE, available_key, ledger_key
from metadata.store import Guard, MetadataStore, Registration, Version, Versioned
from tests.support.pipe import Pipe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from types import TracebackType

    from client_aio import LogWriter

WAIT_S = 30
"""How long a test waits for a frame before it fails."""


class Frame(NamedTuple):
    """One frame on its way."""

    op: Op
    request_id: int
    message: Message | Failure
    body: memoryview
    is_answer: bool

    @property
    def block(self) -> Block:
        """Return the (first) block in the body."""
        return self.blocks[0]

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks in the body: several in an ADDS."""
        if isinstance(self.message, Adds):
            adds = parse_adds(self.request_id, self.message.count, self.body)
            return [Block.parse(add.block) for add in adds]
        return [Block.parse(self.body)]

    @classmethod
    def parse(cls, data: bytes) -> Frame:
        """Parse a frame without the four bytes of its length."""
        header_bytes = int.from_bytes(data[:4], "big")
        header = decode_header(memoryview(data)[4 : 4 + header_bytes])
        body = memoryview(data)[4 + header_bytes :]
        if isinstance(header[0], int) and header[0] & ANSWER:
            op, request_id, answer = decode_answer(header)
            return cls(Op(op), request_id, answer, body, is_answer=True)
        request_id, _, request = decode_request(header)
        return cls(request.op, request_id, request, body, is_answer=False)

    def encode_answer(self) -> bytes:
        """Return the bytes of an answer that is not a failure, length and all."""
        assert self.is_answer
        assert isinstance(self.message, Message)
        header = encode_answer(self.op, self.request_id, self.message)
        return encode_frame(header, len(self.body)) + bytes(self.body)


def is_fence(frame: Frame) -> bool:
    """Match a read that fences; before it, a takeover asks without a fence whether enough bookies answer."""
    return isinstance(frame.message, (Read, ReadLac)) and frame.message.term != NO_TERM


class Sighting:
    """The next frame of a kind: to wait for, and to hold back where `hold` made it."""

    def __init__(self, matches: Callable[[Frame], bool]) -> None:
        self._matches = matches
        self._frame: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._released = asyncio.Event()

    async def reached(self) -> Frame:
        """Wait until such a frame has come, and give it."""
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self._frame)

    @property
    def is_reached(self) -> bool:
        """Return whether it has come."""
        return self._frame.done()

    def release(self) -> None:
        """Let it go on, and hold nothing back that comes later."""
        self._released.set()

    def _concerns(self, frame: Frame) -> bool:
        return not self._frame.done() and self._matches(frame)

    async def _meet(self, frame: Frame) -> None:
        self._frame.set_result(frame)
        await self._released.wait()


class Way:
    """One direction of a link."""

    def __init__(self) -> None:
        self._sightings: list[Sighting] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.forge: Callable[[Frame], Frame | None] = lambda _: None
        """Gives what goes on in the place of an answer, or None."""

    def hold(self, op: Op | None = None, where: Callable[[Frame], bool] = lambda _: True) -> Sighting:
        """Hold back the next frame of this operation for which `where` holds, and all behind it.

        ADD stands for an ADDS, too: adds that share a frame.
        """
        ops = (Op.ADD, Op.ADDS) if op is Op.ADD else (op,)
        sighting = Sighting(lambda frame: (op is None or frame.op in ops) and where(frame))
        self._sightings.append(sighting)
        return sighting

    def see(self, op: Op | None = None, where: Callable[[Frame], bool] = lambda _: True) -> Sighting:
        """Wait for such a frame without holding it back."""
        sighting = self.hold(op, where)
        sighting.release()
        return sighting

    def block(self) -> None:
        """Let nothing through; what comes waits."""
        self._flowing.clear()

    def unblock(self) -> None:
        """Let everything through, in order, beginning with what waited."""
        self._flowing.set()

    async def _pass(self, frame: Frame) -> None:
        await self._flowing.wait()
        for sighting in [one for one in self._sightings if one._concerns(frame)]:
            self._sightings.remove(sighting)
            await sighting._meet(frame)
        await self._flowing.wait()


class Link:
    """The link of one client to one bookie, whatever connections they make."""

    def __init__(self, client: str, bookie_id: str, locate: Callable[[str], Awaitable[str | None]]) -> None:
        self.client = client
        self.bookie_id = bookie_id
        self.requests = Way()
        self.answers = Way()
        self.connections = 0
        """How many connections were made so far."""
        self._locate = locate
        self._server: asyncio.Server | None = None
        self._port = 0
        self._pipes: set[_Pipe] = set()

    @property
    def address(self) -> str:
        """Return `host:port` for the client."""
        return f"127.0.0.1:{self._port}"

    def reset(self) -> None:
        """Reset the connections there are; what was held on them is lost."""
        for pipe in list(self._pipes):
            pipe.reset()

    def black_hole(self) -> None:
        """Let nothing through in either direction, and keep the connections, until `restore`."""
        self.requests.block()
        self.answers.block()

    def forget(self) -> None:
        """Let nothing more through on the connections there are, and say so to nobody; new ones work."""
        for pipe in self._pipes:
            pipe.is_forgotten = True

    async def cut(self) -> None:
        """Reset the connections and refuse new ones, until `restore`."""
        await self._open()
        assert self._server is not None
        self._server.close()
        self._server = None
        await self._reset_and_wait()

    async def restore(self) -> None:
        """Let new connections through as if nothing had been; the present ones are reset."""
        await self._reset_and_wait()
        self.requests.unblock()
        self.answers.unblock()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def _open(self) -> None:
        if not self._port:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._reset_and_wait()

    async def _reset_and_wait(self) -> None:
        pipes = list(self._pipes)
        self.reset()
        await asyncio.gather(*(pipe.done.wait() for pipe in pipes))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        pipe = _Pipe(self, reader, writer)
        self._pipes.add(pipe)
        try:
            address = await self._locate(self.bookie_id)
            await pipe.run(None if address is None else split_address(address))
        finally:
            self._pipes.discard(pipe)


class _Pipe(Pipe):
    """One connection of the client's, and the one to the bookie behind it."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._link = link
        self.is_forgotten = False

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forward(reader, writer, self._link.requests)

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forward(reader, writer, self._link.answers)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        while True:
            head = await reader.readexactly(4)
            data = await reader.readexactly(int.from_bytes(head, "big"))
            frame = Frame.parse(data)
            await way._pass(frame)
            if self.is_forgotten:
                await asyncio.Event().wait()
            forged = way.forge(frame)
            writer.write(head + data if forged is None else forged.encode_answer())
            await writer.drain()


class Gate:
    """Holds back compare-and-sets of one key: its `meet` is a store's `before_compare_and_set`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def meet(self, key: str) -> None:
        """Wait, if it is that key's."""
        if key == self._key:
            self.reached.set()
            await self.opened.wait()


async def roll_behind(links: Links, log: LogWriter, data: bytes) -> Gate:
    """Add a record on a bookie that the metadata server of client "reader" has not heard of, and roll.

    The log is client "writer"'s, with one copy of each record. Its old ledger is complete then, and not
    closed until the gate given back is opened.
    """
    key = ledger_key(log.ledger_id)
    await links.store("reader").lag(key)
    (bookie_id,) = log.current.metadata.last_fragment.bookies
    await links["writer", bookie_id].cut()
    await log.append(data)
    gate = Gate(key)
    links.store("writer").before_compare_and_set = gate.meet
    await log.roll()
    return gate


class ClientStore(MetadataStore):
    """The metadata store as one client sees it: with the addresses of its links."""

    def __init__(self, inner: MetadataStore, link: Callable[[str], Link]) -> None:
        self.uri = inner.uri
        self.inner = inner
        self.before_compare_and_set: Callable[[str], Awaitable[None]] | None = None
        """Awaited before each compare-and-set, with its key. What it raises, the compare-and-set raises."""
        self.before_create: Callable[[str], Awaitable[None]] | None = None
        """The same of creations."""
        self._link = link
        self._past: dict[str, Versioned] = {}
        self.syncs = 0

    async def lag(self, key: str) -> None:
        """Answer reads of a key with what is there now, until a sync of it."""
        self._past[key] = await self.inner.read(key)

    async def read(self, key: str) -> Versioned:
        if key in self._past:
            return self._past[key]
        value, version = await self.inner.read(key)
        if key.startswith(f"{KEY_AVAILABLE}/"):
            record = BookieRecord.from_json(value)
            link = self._link(record.bookie_id)
            await link._open()
            value = replace(record, addresses=[link.address]).to_json()
        return Versioned(value, version)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        if self.before_compare_and_set is not None:
            await self.before_compare_and_set(key)
        return await self.inner.compare_and_set(key, value, version, token=token, guard=guard)

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        if self.before_create is not None:
            await self.before_create(key)
        return await self.inner.create(key, value, token=token)

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        await self.inner.delete(key, version, keeps_place=keeps_place, guard=guard)

    async def children(self, key: str) -> list[str]:
        return await self.inner.children(key)

    async def names(self, key: str) -> list[str]:
        return await self.inner.names(key)

    async def vacate(self, key: str, *, older_than_s: float) -> bool:
        return await self.inner.vacate(key, older_than_s=older_than_s)

    async def watch(self, key: str) -> AsyncGenerator[None, None]:
        async with aclosing(self.inner.watch(key)) as changes:
            async for _ in changes:
                if key not in self._past:  # a server that lags does not know of the change
                    yield

    async def register(self, key: str, value: bytes) -> Registration:
        return await self.inner.register(key, value)

    async def allocate_ids(self, name: str, count: int) -> range:
        return await self.inner.allocate_ids(name, count)

    async def ids_drawn(self, name: str, *, least: int = 0) -> int:
        return await self.inner.ids_drawn(name, least=least)

    async def age_s(self, key: str) -> float:
        return await self.inner.age_s(key)

    async def sync(self, key: str) -> None:
        self.syncs += 1
        self._past.pop(key, None)
        await self.inner.sync(key)

    async def close(self) -> None:
        await self.inner.close()


class Links:
    """All links of a cluster, by client and bookie; an async context manager."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._links: dict[tuple[str, str], Link] = {}
        self._stores: dict[str, ClientStore] = {}
        self._stack = AsyncExitStack()
        self._own: MetadataStore

    def __getitem__(self, pair: tuple[str, str]) -> Link:
        """Return the link between a client and a bookie."""
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = Link(*pair, self._locate)
        return link

    def of(self, client: str) -> dict[str, Link]:
        """Return a client's links by bookie, as far as it has heard of the bookies."""
        return {bookie_id: link for (name, bookie_id), link in self._links.items() if name == client}

    def store(self, client: str) -> ClientStore:
        """Return the metadata store as a connected client sees it."""
        return self._stores[client]

    @asynccontextmanager
    async def connect(self, client: str, **settings: Any) -> AsyncIterator[client_aio.Client]:
        """Connect a client, under a name of its own, by `client_aio.connect` with these settings.

        A bookie whose frames a test holds back answers no PING. By default it is not gone for that.
        """
        if not {"config", "ping_timeout_s"} & settings.keys():
            settings["ping_timeout_s"] = 2.0 * WAIT_S
        store = ClientStore(await open_store(self._uri), lambda bookie_id: self[client, bookie_id])
        self._stores[client] = store
        async with store, client_aio.connect(store, **settings) as connected:
            yield connected

    async def _locate(self, bookie_id: str) -> str | None:
        try:
            value, _ = await self._own.read(available_key(bookie_id))
        except NoSuchKeyError:
            return None
        return BookieRecord.from_json(value).addresses[0]

    async def __aenter__(self) -> Self:
        self._own = await self._stack.enter_async_context(await open_store(self._uri))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(link._close() for link in self._links.values()))
        await self._stack.aclose()
