"""One ZooKeeper session, kept alive over all servers of the ensemble.

The only module that imports aiozk. It uses aiozk's messages of ZooKeeper's protocol and their encoding. It
does not use aiozk's client and session, for these reasons:

- They resend a write silently after a lost connection, so that a create that took effect answers "exists".
- They overlook end-of-file and a session's expiry.
- They wait 4 to 60 s before they reconnect.
- They forget the last transaction seen at every reconnect, so that reads may go backwards.
- They give up the session when a lagging server refuses it.

This session promises instead:

1. A request is sent at most once. Where its connection is lost before the answer, `ConnectionLostError` is
   raised, and the caller must find out the outcome.
2. A lost connection is noticed at end-of-file or reset, or after a third of the session timeout without
   data. All servers are then tried in turn, without a pause in the first round.
3. Every server connected to has seen every transaction that this session has seen. Reads never go
   backwards, not even across an expired session, unless the servers were set back.
4. After an expired session, `session_id` changes. Watches fire after every reconnect: a watch means "read
   again", and nothing more.
5. Where the servers were set back to older data, this session ends as an expired one does, and another one
   begins.

A server closes the connection of a client that has seen a later transaction (zxid) than the server. So a
lagging server is not used. But servers that were set back to an older copy refuse the client for ever. A
write tells the two apart. It is a new transaction of a majority of the servers, and its zxid is above all
that any client has seen. Where it is not, the servers have forgotten some.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import struct
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from aiozk import exc, protocol

from metadata.awake import AwakeClock, awake_timeout, until_read
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiozk.protocol.request import Request
    from aiozk.protocol.response import Response

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A list of 10,000 children is far below; a larger frame is no ZooKeeper server's answer."""

HANDSHAKE_BYTES_MAX = 1024
CONNECT_TIMEOUT_S = 1.0
PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 0.5
NO_PASSWORD = b"\x00" * 16
ANY_WATCH = 3

_LENGTH = struct.Struct("!i")
_REPLY = struct.Struct("!iqi")
_CODE_SESSION_LOST = frozenset((-4, -7, -112, -118))  # connection loss, timeout, expired, moved

Answer = TypeVar("Answer", bound="Response")

log = logging.getLogger(__name__)


class NoNodeError(Exception):
    """There is no such node (for a create: no parent)."""


class NodeExistsError(Exception):
    """The node exists."""


class BadVersionError(Exception):
    """The node is at another version."""


class CheckFailedError(Exception):
    """Another node is not at the version that the write depends on; nothing was written."""


class NotEmptyError(Exception):
    """The node has children."""


class EphemeralParentError(Exception):
    """An ephemeral node can have no children."""


class NoAuthError(Exception):
    """The node's access list forbids it."""


class RefusedError(Exception):
    """The server answered with another error; the message names it."""


class ConnectionLostError(Exception):
    """The connection was lost before the answer: the request may or may not have taken effect."""


class _RefusedHandshakeError(ConnectionLostError):
    """The server closed the connection in place of an answer to the handshake."""


_ERRORS: dict[int, type[Exception]] = {
    -101: NoNodeError,
    -102: NoAuthError,
    -103: BadVersionError,
    -108: EphemeralParentError,
    -110: NodeExistsError,
    -111: NotEmptyError,
}


class Stat(NamedTuple):
    """The facts about a node beside its data."""

    created_zxid: int
    version: int
    session_id: int  # of an ephemeral node's owner; 0 for others
    data_bytes: int
    modified_ms: int  # by the leader's clock
    created_ms: int  # likewise


class _Connection(asyncio.Protocol):
    """One connection: framing, requests in flight, and noticing that the connection is lost."""

    def __init__(self, session: Session, server: str) -> None:
        self.server = server
        self.lost = asyncio.get_running_loop().create_future()
        self.handshake: asyncio.Future[protocol.ConnectResponse] = asyncio.get_running_loop().create_future()
        self.active_at = 0.0
        """The time of the last byte sent or received."""

        self.waiting_since: float | None = None
        """The session's `clock` at the first send since the last receive; None where nothing was sent."""

        self._session = session
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pending: dict[int, tuple[int | None, float, asyncio.Future[Response]]] = {}
        self._unanswered: deque[float] = deque()  # when the handshake and the pings were sent
        self._xid = 0

    @property
    def waited_s(self) -> float:
        """Return for how long nothing has come, with a send unanswered."""
        return 0.0 if self.waiting_since is None else self._session.clock.time() - self.waiting_since

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports do not derive from asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self.active_at = self._loop.time()

    def connection_lost(self, error: Exception | None) -> None:
        why = f"connection closed ({error or 'end of file'})"
        if self._unanswered and not self.handshake.done():
            self.handshake.set_exception(_RefusedHandshakeError(f"{self.server}: {why}"))
            self.handshake.exception()  # as in `drop`
        self.drop(why)

    def data_received(self, data: bytes) -> None:
        self.active_at = self._loop.time()
        self.waiting_since = None
        self._buffer += data
        try:
            while len(self._buffer) >= _LENGTH.size and not self.lost.done():
                (length,) = _LENGTH.unpack_from(self._buffer)
                limit = FRAME_BYTES_MAX if self.handshake.done() else HANDSHAKE_BYTES_MAX
                if not 0 <= length <= limit:
                    raise ValueError(f"a frame of {length} bytes")
                if len(self._buffer) < _LENGTH.size + length:
                    return
                frame = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
                del self._buffer[: _LENGTH.size + length]
                self._take(frame)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            self.drop(f"it does not answer as a ZooKeeper server ({error!r})")

    def _take(self, frame: bytes) -> None:
        if not self.handshake.done():
            greeting, sent_at = protocol.ConnectResponse.deserialize(frame), self._unanswered.popleft()
            if _is_session(greeting):
                self._session.note_answered(sent_at)
            self.handshake.set_result(greeting)
            return
        xid, zxid, code = _REPLY.unpack_from(frame)
        if xid == protocol.WATCH_XID:
            self._session.fire(protocol.WatchEvent.deserialize(frame[_REPLY.size :]).path)
            return
        self._session.note_zxid(zxid)
        if xid == protocol.PING_XID:
            if self._unanswered:
                self._session.note_answered(self._unanswered.popleft())
            return
        opcode, sent_at, future = self._pending[xid]
        # Parsed before the request is removed: if the answer does not parse, `drop` must fail it too.
        answer = protocol.response_xref[opcode].deserialize(frame[_REPLY.size :]) if code == 0 else None
        del self._pending[xid]
        if code in _CODE_SESSION_LOST:
            self._session.note_expired()
        else:
            self._session.note_answered(sent_at)
        if future.done():
            return
        if answer is not None:
            future.set_result(answer)
        elif code in _CODE_SESSION_LOST:
            future.set_exception(ConnectionLostError(f"{self.server}: {_name_of(code)}"))
            self.drop(f"the server says {_name_of(code)}")
        elif code in _ERRORS:
            future.set_exception(_ERRORS[code]())
        else:
            future.set_exception(RefusedError(f"{self.server}: {_name_of(code)}"))

    def send_raw(self, payload: bytes) -> None:
        """Send a handshake or a ping, which has no future."""
        self._unanswered.append(self._loop.time())
        self._write(payload)

    def _write(self, payload: bytes) -> None:
        assert self._transport is not None
        self.active_at = self._loop.time()
        if self.waiting_since is None:
            self.waiting_since = self._session.clock.time()
        self._transport.write(_LENGTH.pack(len(payload)) + payload)

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send a request; the future's result is the answer."""
        assert not self.lost.done()
        self._xid = self._xid % 0x7FFFFFFF + 1
        future: asyncio.Future[Response] = self._loop.create_future()
        self._pending[self._xid] = (request.opcode, self._loop.time(), future)
        self._write(request.serialize(self._xid))
        return future

    def close(self) -> None:
        """End the session without waiting for the answer, and close."""
        if not self.lost.done() and self._transport is not None:
            self.send(protocol.CloseRequest())
            self._transport.close()  # once the request was sent

    def drop(self, why: str) -> None:
        """Close at once and fail all requests in flight with ConnectionLostError."""
        if self.lost.done():
            return
        self.lost.set_result(why)
        self._session.detach(self)
        if self._transport is not None:
            self._transport.abort()
        lost = ConnectionLostError(f"{self.server}: {why}")
        # `exception()` marks each exception as retrieved: a cancelled caller would not retrieve it, and
        # asyncio would log an error.
        if not self.handshake.done():
            self.handshake.set_exception(lost)
            self.handshake.exception()
        for *_, future in self._pending.values():
            if not future.done():
                future.set_exception(lost)
                future.exception()
        self._pending.clear()


class Session:
    """A session with an ensemble. `start` it, then send requests; `close` ends it."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        *,
        timeout_s: float,
        written: str = "/",
    ) -> None:
        """Prepare a session.

        Args:
            servers: host and port of each server.
            timeout_s: the session timeout to ask for; the servers decide the actual one (`timeout_s`).
            written: a node whose data may be made empty at any time; it need not exist.
        """
        self.session_id = 0
        self.timeout_s = timeout_s
        self.problems: dict[str, str] = {}
        """The reason why each server was last disconnected, for error messages."""

        self.heard_at = 0.0
        """The time of the latest send that a server has answered, by the loop's clock."""

        self.connections = 0
        """How often a connection was made."""

        self.clock = AwakeClock()
        self._servers = [(host, port, _join(host, port)) for host, port in servers]
        self._asked_timeout_s = timeout_s
        self._written = written
        self._refused_by: list[tuple[str, int, str]] = []  # in the present round of attempts
        self._password = NO_PASSWORD
        self._last_zxid = 0
        self._eras = 0  # how often the servers were found set back
        self._connection: _Connection | None = None
        self._connected = asyncio.Event()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._task: OwnedTask | None = None
        self._closing = False

    def start(self) -> None:
        """Connect, and keep connected until `close`."""
        self.clock.start()
        self._task = OwnedTask(self._keep_connected, "ZooKeeper session")

    async def close(self) -> None:
        """End the session at the servers, if they answer within 1 s, and disconnect."""
        self._closing = True
        if self._connection is not None:
            try:
                async with awake_timeout(1.0):
                    await self._connection.send(protocol.CloseRequest())
            except (TimeoutError, ConnectionLostError):
                log.info("session %x was not ended; it will expire", self.session_id)
        self.abort()
        if self._task is not None:
            await self._task.wait()

    def abort(self) -> None:
        """Disconnect for good without ending the session, as the death of the process would."""
        self.clock.stop()
        if self._task is not None:
            self._task.cancel()
        self._closing = True
        if self._connection is not None:
            self._connection.drop("closed by this client")
        # Wakes callers that wait for a connection, so that they raise ConnectionLostError.
        self._connected.set()

    # Requests

    async def create(self, path: str, data: bytes, *, counted_in: str | None = None) -> Stat:
        """Create a node.

        Args:
            path: the node.
            data: its data.
            counted_in: another node, whose version grows by one in the same step. The node is ephemeral then.
        """
        request = protocol.Create2Request(path=path, data=data, acl=[protocol.UNRESTRICTED_ACCESS])
        request.set_flags(ephemeral=counted_in is not None)
        count = None if counted_in is None else protocol.SetDataRequest(path=counted_in, data=b"", version=-1)
        return _stat((await self._behind(count, request, protocol.Create2Response)).stat)

    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Read a node."""
        answer = await self._call(protocol.GetDataRequest(path=path, watch=False), protocol.GetDataResponse)
        return answer.data or b"", _stat(answer.stat)

    async def exists(self, path: str, *, watch: bool = False) -> Stat | None:
        """Return a node's facts, or None; a watch then fires when it is created, changed or deleted."""
        try:
            answer = await self._call(protocol.ExistsRequest(path=path, watch=watch), protocol.ExistsResponse)
        except NoNodeError:
            return None
        return _stat(answer.stat)

    async def set(self, path: str, data: bytes, version: int, check: tuple[str, int] | None = None) -> Stat:
        """Replace a node's data at that version (−1: any).

        Args:
            check: another node, and the version that it has to be at; compared in one step with the write.
        """
        request = protocol.SetDataRequest(path=path, data=data, version=version)
        return _stat((await self._behind(_check(check), request, protocol.SetDataResponse)).stat)

    async def delete(self, path: str, version: int, check: tuple[str, int] | None = None) -> None:
        """Delete a node at that version (−1: any); `check` is that of `set`."""
        request = protocol.DeleteRequest(path=path, version=version)
        await self._behind(_check(check), request, protocol.DeleteResponse)

    async def children(self, path: str, *, watch: bool = False) -> list[str]:
        """List the names of a node's children."""
        request = protocol.GetChildrenRequest(path=path, watch=watch)
        return (await self._call(request, protocol.GetChildrenResponse)).children

    async def _behind(self, first: Request | None, request: Request, answer_type: type[Answer]) -> Answer:
        """Have a request take effect in one step with another one, if there is one; return its answer."""
        if first is None:
            return await self._call(request, answer_type)
        both = protocol.TransactionRequest()
        both.add(first)
        both.add(request)
        answers = (await self._call(both, protocol.TransactionResponse)).responses
        if isinstance(answers[1], answer_type):
            return answers[1]
        # The part that failed has an error. The one before it has code 0, and the one behind it another.
        codes = [each.error_code for each in answers if isinstance(each, exc.ResponseError)]
        code = next((code for code in codes if code), 0)
        if code == codes[0] and code in (-101, -103) and isinstance(first, protocol.CheckVersionRequest):
            raise CheckFailedError
        raise _ERRORS.get(code, RefusedError)(_name_of(code))

    async def _call(self, request: Request, answer_type: type[Answer]) -> Answer:
        era = self._eras
        while self._connection is None:
            await self._connected.wait()
            if self._closing:
                raise ConnectionLostError("closed by this client")
        if era != self._eras:
            raise ConnectionLostError("the caller may go by what the servers have forgotten")
        answer = await self._connection.send(request)
        assert isinstance(answer, answer_type)
        return answer

    # Watches

    def add_watcher(self, path: str, event: asyncio.Event) -> None:
        """Set the event whenever a watch on the path fires, and after every reconnect."""
        self._watchers.setdefault(path, set()).add(event)

    def remove_watcher(self, path: str, event: asyncio.Event) -> None:
        """Stop setting the event. Where it was the path's last, remove the watch at the server too."""
        events = self._watchers.get(path, set())
        events.discard(event)
        if not events:
            self._watchers.pop(path, None)
            if self._connection is not None:
                removal = self._connection.send(protocol.RemoveWatchesRequest(path=path, type=ANY_WATCH))
                # The error "no such watcher" is ignored: the watch has fired already.
                removal.add_done_callback(lambda done: done.cancelled() or done.exception())

    def fire(self, path: str) -> None:
        """Set the events of all watchers of the path."""
        for event in self._watchers.get(path, ()):
            event.set()

    def note_answered(self, sent_at: float) -> None:
        """Record that a message sent at that time has been answered."""
        self.heard_at = max(self.heard_at, sent_at)

    def note_expired(self) -> None:
        """Record that a server has reported the session's expiry."""
        self.heard_at = -math.inf

    def note_zxid(self, zxid: int) -> None:
        """Record the transaction that the server has reached."""
        self._last_zxid = max(self._last_zxid, zxid)

    def begin_anew(self, why: str) -> None:
        """Give up the session, as where it has expired, and begin another one."""
        log.warning("ZooKeeper session %x is given up: %s", self.session_id, why)
        self.session_id, self._password = 0, NO_PASSWORD
        self._eras += 1
        self.note_expired()
        if self._connection is not None:
            self._connection.drop(why)

    # Connecting

    def detach(self, connection: _Connection) -> None:
        """Send nothing more over that connection."""
        if self._connection is connection:
            self._connection = None
            self._connected.clear()

    async def _keep_connected(self) -> None:
        order = random.sample(self._servers, len(self._servers))
        if self._connection is not None and not self._connection.lost.done():
            await self._watch_over(self._connection)  # An earlier task has made it, and was cancelled.
        while True:
            connection = await self._connect_any(order)
            if not connection.lost.done():  # data after the handshake's answer may have ended the connection
                self._connection = connection
                self.connections += 1
                self._connected.set()
                for path in list(self._watchers):
                    self.fire(path)
            await self._watch_over(connection)
            if self._closing:
                return
            # The server that failed is tried last.
            order.sort(key=lambda each: each[2] == connection.server)

    async def _connect_any(self, order: Sequence[tuple[str, int, str]]) -> _Connection:
        pause_s, timeout_s = 0.0, CONNECT_TIMEOUT_S
        while True:
            self._refused_by.clear()
            for host, port, server in order:
                connection = await self._connect(host, port, server, timeout_s)
                if connection is not None:
                    return connection
            if 2 * len(self._refused_by) > len(order) and await self._are_set_back(timeout_s):
                continue
            pause_s = min(max(2 * pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
            timeout_s = min(2 * timeout_s, max(self._asked_timeout_s / 3, CONNECT_TIMEOUT_S))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _connect(self, host: str, port: int, server: str, timeout_s: float) -> _Connection | None:
        connection = _Connection(self, server)
        try:
            async with awake_timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
                if await self._establish(connection):
                    return connection
                # The session has expired; the same server can begin another.
                connection.drop("the session has expired")
                connection = _Connection(self, server)
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
                if await self._establish(connection):
                    return connection
                why = "it gave no session"
        except TimeoutError:
            why = f"no answer within {timeout_s:g} s"
        except _RefusedHandshakeError as error:
            self._refused_by.append((host, port, server))
            why = str(error)
        except (OSError, UnicodeError, ConnectionLostError) as error:
            why = str(error)
        except BaseException:
            connection.drop("closed by this client")
            raise
        connection.drop(why)
        self.problems[server] = why
        log.info("ZooKeeper server %s: %s", server, why)
        return None

    async def _are_set_back(self, timeout_s: float) -> bool:
        """Return whether the servers were set back; then the session is given up, with what it has seen.

        Most of them have refused it, and one is asked for a new transaction by a session of its own.
        """
        host, port, server = random.choice(self._refused_by)
        asking = Session([(host, port)], timeout_s=self._asked_timeout_s)
        connection = await asking._connect(host, port, server, timeout_s)
        if connection is None or connection.lost.done():
            return False
        try:
            async with awake_timeout(timeout_s):
                with suppress(NoNodeError):  # this, too, is a transaction
                    await connection.send(protocol.SetDataRequest(path=self._written, data=b"", version=-1))
        except (TimeoutError, ConnectionLostError, NoAuthError, RefusedError):
            return False
        finally:
            newest = asking._last_zxid
            connection.close()
        if newest >= self._last_zxid:
            return False  # it was behind the others, and is not any more
        self.begin_anew(
            f"the servers were set back to an older copy of their data: {server} is at transaction "
            f"{newest:x}, and this session has seen {self._last_zxid:x}"
        )
        self._last_zxid = 0
        return True

    async def _establish(self, connection: _Connection) -> bool:
        """Shake hands; where the session has expired, forget its id and return False."""
        connection.send_raw(
            protocol.ConnectRequest(
                protocol_version=0,
                last_seen_zxid=self._last_zxid,
                timeout=int(self._asked_timeout_s * 1000),
                session_id=self.session_id,
                password=self._password,
                read_only=False,
            ).serialize()
        )
        answer = await connection.handshake
        if not _is_session(answer):
            self.session_id, self._password = 0, NO_PASSWORD
            self.note_expired()
            return False
        self.session_id, self._password = answer.session_id, answer.password or NO_PASSWORD
        self.timeout_s = answer.timeout / 1000
        return True

    async def _watch_over(self, connection: _Connection) -> None:
        """Ping while idle; return when the connection is lost, or dropped as silent."""
        loop, patience_s = asyncio.get_running_loop(), self.timeout_s / 3
        while not connection.lost.done():
            since, waited_s = connection.waiting_since, connection.waited_s
            if waited_s >= patience_s:
                await until_read()
                if connection.waiting_since == since:
                    connection.drop(f"no answer within {waited_s:.1f} s")
                continue
            if loop.time() - connection.active_at >= patience_s / 2:
                connection.send_raw(protocol.PingRequest().serialize(protocol.PING_XID))
            await asyncio.wait((connection.lost,), timeout=patience_s / 4)
        self.problems[connection.server] = connection.lost.result()
        log.info("ZooKeeper server %s: %s", connection.server, connection.lost.result())


def _check(check: tuple[str, int] | None) -> Request | None:
    return None if check is None else protocol.CheckVersionRequest(path=check[0], version=check[1])


def _is_session(answer: protocol.ConnectResponse) -> bool:
    return bool(answer.session_id) and answer.timeout > 0


def _stat(stat: protocol.Stat) -> Stat:
    return Stat(
        stat.created_zxid,
        stat.version,
        stat.ephemeral_owner,
        stat.data_length,
        stat.modified,
        stat.created,
    )


def _name_of(code: int) -> str:
    known = exc.response_error_xref.get(code)
    return known.__name__ if known is not None else f"error {code}"


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
