"""The HTTP endpoint of a bookie: metrics for Prometheus, health, readiness, and figures as JSON.

    GET /metrics               the metrics of `bookie_aio.metrics`, in the text format of Prometheus
    GET /healthz               200 while the process lives and its storage has not failed
    GET /readyz                200 while the bookie takes adds; else 503 and the reasons
    GET /api/v1/bookie         the figures of `bookie info`
    GET /api/v1/cluster        the survey of `cluster status`
    GET /api/v1/openapi.json   the description of all these

It listens before the bookie starts, so a long replay shows as "starting". Nothing here changes anything, and
there is no authentication. So it listens beyond loopback only where the bookie itself may. On loopback the
Host header must be an address, "localhost", or the name that it listens on (`metadata.host_header`).

Bounds. A stranger must not take the bookie's time, memory or descriptors by HTTP:

- 32 connections at most. One more closes the oldest one, preferably one without a request. So connections
  that only hang keep no scrape away.
- 50 connections are accepted in a second, and each carries one request. The answer closes it.
- A connection ends 5 s after its begin if its request has not come, and 15 s after its begin in any case.
- 8 KiB for a line of a request, 64 header fields. A body is never read.
- The log has one line for each reason and minute, and none for a malformed request.
- Documents are made again only when they are some time old, and callers at the same time share one making.
  So the work does not grow with the requests.
- `/metrics` counts as work of the slow lane, whose other requests wait for it. It is made family by family,
  one in an event-loop iteration.
- The survey of the cluster reads the metadata of all ledgers, and is no work of the slow lane. It is made
  again after ten times as long as it took, however it ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from aiohttp import web

from bookie_aio.config import is_loopback
from bookie_aio.metrics import METRICS, HttpMetrics
from bookie_aio.server.bookie import listening_sockets
from bookie_aio.structured_logging import RepeatedWarnings
from metadata.access.bookies import join_address
from metadata.errors import BookKeeperError, OperationTimeoutError
from metadata.host_header import is_host_allowed
from metadata.metrics import CONTENT_TYPE, families, of_process, render

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable

    from prometheus_client.metrics_core import Metric as Family

    from bookie_aio.metrics import DiskTimes
    from bookie_aio.server.bookie import Bookie

log = logging.getLogger(__name__)
_silent = logging.getLogger(f"{__name__}.aiohttp")
"""Of aiohttp, which logs each request, and a traceback for each request that is malformed."""
_silent.disabled = True

CONNECTIONS_MAX = 32
_ACCEPTED_PER_S = 50
_BACKLOG = 64
_REQUEST_TIMEOUT_S = 5.0
_CONNECTION_TIMEOUT_S = 15.0
_ACCEPT_AGAIN_S = 0.5
_METRICS_KEPT_S = 0.25
_READINESS_KEPT_S = 1.0
_CLUSTER_KEPT_S = 5.0
_CLUSTER_REST = 10.0
"""How many times as long as the survey took it is kept at least: it takes an eleventh of the time at most."""
_FAILURE_KEPT_S = 1.0
_CLUSTER_TIMEOUT_S = 12.0
_LAG_INTERVAL_S = 0.25
_CLOSE_TIMEOUT_S = 1.0
_JSON = "application/json"

Document = dict[str, Any]


class Answer(NamedTuple):
    """An answer to a GET."""

    status: int
    content_type: str
    body: bytes

    @classmethod
    def of(cls, document: Document, status: int = 200) -> Answer:
        """Return an answer with a JSON object."""
        return cls(status, _JSON, json.dumps(document, default=str).encode() + b"\n")


class Kept:
    """An answer that is made again when it is older than so many seconds. Callers at once share a making.

    A making that failed is kept for a second at most, unless it has to rest for longer.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Answer]],
        kept_s: float,
        clock: Callable[[], float],
        *,
        rest: float = 0.0,
    ) -> None:
        """Prepare; `get` makes the answer.

        Args:
            rest: how many times as long as the making took its end is kept at least, a failure too.
        """
        self._make = make
        self._kept_s = kept_s
        self._clock = clock
        self._rest = rest
        self._loop = asyncio.get_running_loop()
        self._making: asyncio.Task[Answer] | None = None
        self._old_at = 0.0

    async def get(self) -> Answer:
        """Return the answer. Cancelled, it leaves the making to the other callers, and to later ones."""
        if self._making is None or (self._making.done() and self._clock() >= self._old_at):
            self._making = self._loop.create_task(self._run())
        return await asyncio.shield(self._making)

    async def _run(self) -> Answer:
        begun_at, kept_s = self._clock(), min(self._kept_s, _FAILURE_KEPT_S)
        try:
            answer = await self._make()
            kept_s = self._kept_s
            return answer
        finally:
            now = self._clock()
            self._old_at = now + max(kept_s, self._rest * (now - begun_at))

    async def close(self) -> None:
        """End a making that is under way."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)


class _Connection(web.RequestHandler):
    """One HTTP connection, within its deadlines."""

    def __init__(self, server: HttpServer, manager: web.Server) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=_silent,
            keepalive_timeout=0.0,
            lingering_time=0.0,
            max_line_size=8 * 1024,
            max_field_size=8 * 1024,
            max_headers=64,
            logger=_silent,
        )
        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        self.has_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the deadlines."""
        super().connection_made(transport)
        self._server.opened(self)
        self._arm(_REQUEST_TIMEOUT_S)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the deadlines."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.lost(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a malformed request with 400, and count it."""
        self._server.metrics.count("other", status)
        return super().handle_error(request, status, exc, message)

    def _arm(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _late(self) -> None:
        if self.has_request:
            self.has_request = False
            self._arm(_CONNECTION_TIMEOUT_S - _REQUEST_TIMEOUT_S)
        else:
            self.end("late")

    def end(self, reason: str) -> None:
        """Close the connection at once, and count that."""
        self._server.metrics.closed[reason] += 1
        if self.transport is not None:
            self.transport.abort()


class HttpServer:
    """The HTTP endpoint of one bookie; made by `listen`. An async context manager that closes it."""

    def __init__(
        self, sockets: list[socket.socket], name: str, clock: Callable[[], float], disk: DiskTimes | None
    ) -> None:
        self._sockets = sockets
        self._names = frozenset({name.casefold()})
        self._clock = clock
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._bookie: Bookie | None = None
        self._is_closed = False
        self._cluster: Callable[[], Awaitable[Document]] | None = None
        self._more: Callable[[], Iterable[Family]] = tuple
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._manager = web.Server(self._handle)
        self._warnings = RepeatedWarnings(log, self._loop)
        self._lag_timer: asyncio.TimerHandle | None = None
        self._lag_due = 0.0
        self._kept = {
            "/metrics": Kept(self._metrics, _METRICS_KEPT_S, clock),
            "/healthz": Kept(self._healthz, 0.0, clock),
            "/readyz": Kept(self._readyz, _READINESS_KEPT_S, clock),
            "/api/v1/bookie": Kept(self._info, _METRICS_KEPT_S, clock),
            "/api/v1/cluster": Kept(self._survey, _CLUSTER_KEPT_S, clock, rest=_CLUSTER_REST),
            "/api/v1/openapi.json": Kept(self._openapi, float("inf"), clock),
        }
        self.metrics = HttpMetrics()
        host, port = sockets[0].getsockname()[:2]
        self.address = join_address(host, port)
        self._is_on_loopback = all(is_loopback(one.getsockname()[0]) for one in sockets)
        self._accepting = [self._loop.create_task(self._accept(one)) for one in sockets]
        self._look_at_lag()

    @classmethod
    async def listen(
        cls, host: str, port: int, *, clock: Callable[[], float], disk: DiskTimes | None = None
    ) -> HttpServer:
        """Listen on all addresses of a host.

        Args:
            clock: the time in seconds, for the lag of the event loop and the age of documents.
            disk: the times of the journal's system calls.

        Raises:
            OSError: the address cannot be listened on.
        """
        sockets = await listening_sockets(host, port, what="the bookie's HTTP endpoint", backlog=_BACKLOG)
        return cls(sockets, host, clock, disk)

    def show(
        self,
        bookie: Bookie,
        cluster: Callable[[], Awaitable[Document]],
        more: Callable[[], Iterable[Family]] = tuple,
    ) -> None:
        """Tell of a bookie from now on.

        Args:
            cluster: makes the survey of the whole cluster. May raise BookKeeperError.
            more: further metrics of this process.
        """
        self._bookie, self._cluster, self._more = bookie, cluster, more

    # --- connections ---------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(listening)
            except OSError as error:
                self._warnings.warning("no HTTP connection can be accepted", reason=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._connections) >= CONNECTIONS_MAX:
                idle = (one for one in self._connections if not one.has_request)
                next(idle, next(iter(self._connections))).end("crowded")
            try:
                await self._loop.connect_accepted_socket(partial(_Connection, self, self._manager), accepted)
            except OSError:  # it was closed meanwhile
                accepted.close()
            await asyncio.sleep(1 / _ACCEPTED_PER_S)

    def opened(self, connection: _Connection) -> None:
        """Note a connection."""
        self._connections[connection] = None
        self.metrics.connections = len(self._connections)

    def lost(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)
        self.metrics.connections = len(self._connections)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        cast("_Connection", request.protocol).has_request = True
        host = request.headers.get("Host")  # None: of a probe by HTTP/1.0; every browser sends one
        if self._is_on_loopback and host is not None and not is_host_allowed(host, self._names):
            path, answer = "other", Answer.of({"error": "the Host header does not name this machine"}, 421)
        else:
            path, answer = await self._answer(request)
        self.metrics.count(path, answer.status)
        headers = {"Content-Type": answer.content_type, "X-Content-Type-Options": "nosniff"}
        if answer.status == 405:
            headers["Allow"] = "GET, HEAD"
        response = web.Response(status=answer.status, body=answer.body, headers=headers)
        response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> tuple[str, Answer]:
        """Return the answer, and the path that it is counted for."""
        path, kept = request.path, self._kept.get(request.path)
        if kept is None:
            return "other", Answer.of({"error": "no such path", "paths": list(self._kept)}, 404)
        if request.method not in ("GET", "HEAD"):
            return path, Answer.of({"error": f"{request.method} is not possible: only GET and HEAD are"}, 405)
        try:
            return path, await kept.get()
        except Exception as error:
            reason = type(error).__name__
            self._warnings.log(
                logging.ERROR, "an HTTP request failed", exc_info=error, path=path, reason=reason
            )
            return path, Answer.of({"error": f"an internal error, {reason}: see the bookie's log"}, 500)

    # --- documents -----------------------------------------------------------------------------

    async def _metrics(self) -> Answer:
        bookie = self._bookie
        making = self._make_metrics()
        return await (making if bookie is None else bookie.in_slow_lane(making))

    async def _make_metrics(self) -> Answer:
        parts: list[bytes] = []
        for family in self._families():
            parts.append(render(family))
            await asyncio.sleep(0)
        return Answer(200, CONTENT_TYPE, b"".join(parts))

    def _families(self) -> Iterable[Family]:
        if self._bookie is not None:
            figures = self._bookie.figures()._replace(disk=self._disk, http=self.metrics)
            yield from families(METRICS, {"": figures})
        yield from self._more()
        yield from of_process()

    async def _healthz(self) -> Answer:
        bookie = self._bookie
        if bookie is None or not bookie.stopped.done():
            return Answer.of({"healthy": True, "reasons": []})
        failure = bookie.stopped.result()
        return Answer.of({"healthy": False, "reasons": [str(failure or "the bookie is closed")]}, 503)

    async def _readyz(self) -> Answer:
        reasons = ["the bookie is starting"] if self._bookie is None else await self._bookie.unreadiness()
        return Answer.of({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def _info(self) -> Answer:
        if self._bookie is None:
            return Answer.of({"error": "the bookie is starting"}, 503)
        return Answer.of(dict(self._bookie.info()))

    async def _survey(self) -> Answer:
        if self._cluster is None:
            return Answer.of({"error": "the bookie is starting"}, 503)
        try:
            async with asyncio.timeout(_CLUSTER_TIMEOUT_S):
                return Answer.of(await self._cluster())
        except TimeoutError:
            error: BookKeeperError = OperationTimeoutError(
                f"the survey of the cluster took longer than {_CLUSTER_TIMEOUT_S:g} s: use `cluster status`"
            )
        except BookKeeperError as raised:
            error = raised
        return Answer.of({"error": f"{type(error).__name__}: {error}"}, 503)

    async def _openapi(self) -> Answer:
        return Answer(200, _JSON, files("bookie_aio.server").joinpath("openapi.json").read_bytes())

    # --- the event loop's lag ------------------------------------------------------------------

    def _look_at_lag(self) -> None:
        now = self._clock()
        if self._lag_timer is not None:
            self.metrics.loop_lag.add(max(0.0, now - self._lag_due))
        self._lag_due = now + _LAG_INTERVAL_S
        self._lag_timer = self._loop.call_later(_LAG_INTERVAL_S, self._look_at_lag)

    # --- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """Accept nothing more, and close all connections. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._lag_timer is not None:
            self._lag_timer.cancel()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        for kept in self._kept.values():
            await kept.close()
        await self._manager.shutdown(_CLOSE_TIMEOUT_S)
        self._warnings.close()

    async def __aenter__(self) -> HttpServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
