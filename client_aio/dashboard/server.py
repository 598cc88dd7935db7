"""The HTTP server of the status page: pages, live updates, and the two files that pages load.

    GET /, /bookies, /ledgers, /ledger, /logs, /log, /repair, /events    the pages
    GET /live?at=PATH                                                    server-sent events for one page
    GET /static/page.css, /static/page.js, /static/icon.svg
    GET /healthz                                   200 while the process lives, and counts of its work (JSON)

A live update is a JSON object: the title of the window, and the regions of the page whose markup has changed.

Nobody is authenticated, and nothing can be changed. The measures against strangers:

- Names of hosts. A web site may resolve its own name to this machine (DNS rebinding). So the Host header must
  be an address, "localhost", or a name that was given at the start.
- Scripts. The Content-Security-Policy allows the page's own script and style sheet, and nothing else.
- Other sites. No cookie, no CORS header, and no page may be framed.
- Load. `CONNECTIONS_MAX` connections, one request each, which must have come after 5 s. The oldest connection
  that is not live makes room for a new one. `LIVE_MAX` live pages; each gets two updates a second at most.
  A reader that takes nothing for 10 s is cut off. No update is queued: a slow reader gets the newest state.
- The log. A malformed request is a 400, and no line. Failures of one kind are a line in a minute.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from aiohttp import web

from client_aio.dashboard.cluster_pages import bookies_page, events_page, overview, repair_page
from client_aio.dashboard.layout import Now, Page, document, frame, title
from client_aio.dashboard.ledger_pages import ledger_page, ledgers_page, log_page, logs_page
from client_aio.dashboard.markup import html, url
from client_aio.dashboard.model import LedgerQuery
from metadata.access.bookies import join_address, split_address
from metadata.host_header import is_host_allowed
from metadata.ids import LEDGER_ID_MAX
from metadata.repeated_reports import PERIOD_S, RepeatedReports

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from client_aio.dashboard.model import ClusterModel
    from client_aio.dashboard.observer import Observer

log = logging.getLogger(__name__)
_silent = logging.getLogger(f"{__name__}.aiohttp")
"""Of aiohttp, which logs each request, and a traceback for each request that is malformed."""
_silent.disabled = True

CONNECTIONS_MAX = 96
LIVE_MAX = 16
_REQUEST_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 10.0
_UPDATE_S = 0.5
_AGE_S = 2.0
"""A page without news is made again after this time: the ages on it grow."""
_HEARTBEAT_S = 15.0
_CLOSE_TIMEOUT_S = 1.0
_METRICS_BYTES_MAX = 1 << 20
_TEXT_MAX = 200
_FIELDS_MAX = 20
_PAGE_MAX = 1_000_000
_FRAMES_KEPT = 32

_STATIC = {
    "/static/page.css": "text/css",
    "/static/page.js": "text/javascript",
    "/static/icon.svg": "image/svg+xml",
}
_PATHS = ("/", "/bookies", "/ledgers", "/ledger", "/logs", "/log", "/repair", "/events")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class _Target(NamedTuple):
    """The page that a request asks for."""

    text: str
    path: str
    query: dict[str, str]

    @classmethod
    def of(cls, text: str) -> _Target:
        """Parse what follows the method, which a stranger may choose; raises ValueError."""
        text.encode()  # bytes that are no UTF-8 are surrogates here, and go into no page
        parts = urlsplit(text)
        query = parse_qsl(parts.query, max_num_fields=_FIELDS_MAX)
        return cls(text, parts.path, {key: value[:_TEXT_MAX] for key, value in query})


class Scraper:
    """Reads `/metrics` of bookies. An async context manager."""

    def __init__(self) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        self._session = aiohttp.ClientSession(
            timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def scrape(self, address: str) -> str:
        """Return the text. Raises OSError, or ValueError for an answer that is no text of ours."""
        host, port = split_address(address)
        try:
            async with self._session.get(
                f"http://{join_address(host, port)}/metrics", allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise ValueError(f"the bookie's HTTP endpoint {address} answers {answer.status}")
                body = bytearray()
                async for chunk in answer.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > _METRICS_BYTES_MAX:
                        raise ValueError(
                            f"the metrics of {address} are larger than {_METRICS_BYTES_MAX:,} bytes"
                        )
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        return body.decode()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()


class _Connection(web.RequestHandler):
    """One HTTP connection."""

    def __init__(self, server: DashboardServer, manager: web.Server) -> None:
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
        self.is_live = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the time in which the request has to come."""
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(_REQUEST_TIMEOUT_S, self.end)
        self._server.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self.has_request()
        self._server.lost(self)
        super().connection_lost(exc)

    def has_request(self) -> None:
        """End the time in which the request has to come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class DashboardServer:
    """The status page of one observer; made by `listen`. An async context manager that closes it."""

    def __init__(self, observer: Observer, names: Collection[str]) -> None:
        self._observer = observer
        self._model: ClusterModel = observer.model
        self._names = frozenset(name.casefold() for name in names)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._manager = web.Server(self._handle, handler_cancellation=True)
        self._listening: asyncio.Server | None = None
        self._live = 0
        self._frames: dict[str, tuple[float, int, Page]] = {}
        self._reports = RepeatedReports(self._loop, longest_s=PERIOD_S)
        static = files("client_aio.dashboard").joinpath("static")
        self._static = {path: static.joinpath(path.rpartition("/")[2]).read_bytes() for path in _STATIC}
        self.address = ""

    @classmethod
    async def listen(cls, observer: Observer, host: str, port: int, names: Collection[str] = ()) -> Self:
        """Listen on all addresses of a host.

        Args:
            names: names of this machine that a Host header may have, beside addresses and "localhost".

        Raises:
            OSError: the address cannot be listened on.
        """
        server = cls(observer, (*names, host))
        try:
            server._listening = await server._loop.create_server(
                lambda: _Connection(server, server._manager), host, port, backlog=64
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(f"the status page cannot listen on {join_address(host, port)}: {reason}") from error
        server.address = join_address(*server._listening.sockets[0].getsockname()[:2])
        return server

    # --- connections -----------------------------------------------------------------------------

    def opened(self, connection: _Connection) -> None:
        """Note a connection; the oldest one that is not live makes room for it."""
        if len(self._connections) >= CONNECTIONS_MAX:
            others = (one for one in self._connections if not one.is_live)
            next(others, next(iter(self._connections))).end()
        self._connections[connection] = None

    def lost(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast("_Connection", request.protocol)
        connection.has_request()
        if not is_host_allowed(request.headers.get("Host", ""), self._names):
            return _text(421, "this Host header does not name the status page: see --allow-host\n")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "only GET and HEAD are possible\n", Allow="GET, HEAD")
        if request.path == "/healthz":
            return _answer(200, "application/json", json.dumps(self._health()).encode() + b"\n")
        if request.path in _STATIC:
            return _answer(
                200, _STATIC[request.path], self._static[request.path], **{"Cache-Control": "no-cache"}
            )
        is_live = request.path == "/live" and request.method == "GET"
        try:
            target = _Target.of(request.query.get("at", "") if is_live else request.raw_path)
        except ValueError:
            return _text(400, "the request is malformed\n")
        if target.path not in _PATHS:
            return _text(404, "there is no such page\n")
        if target.path == "/ledger" and _ledger_id(target.query) is None:
            return _text(404, "there is no such ledger\n")
        if is_live:
            return await self._serve_live(request, connection, target)
        try:
            return await self._serve_page(target)
        except Exception as error:
            self._report(error)
            return _text(500, "an internal error: see the log of the status page\n")

    def _report(self, error: Exception) -> None:
        """Log that a page could not be made: a line for each kind of error and minute."""

        def write(count: int) -> None:
            times = f" ({count:,} times since the last report)" if count else ""
            log.error("a page could not be made: %r%s", error, times, exc_info=None if count else error)

        kind = type(error).__name__
        self._reports.report("other errors" if self._reports.is_crowded_for(kind) else kind, write)

    # --- pages -----------------------------------------------------------------------------------

    async def _serve_page(self, target: _Target) -> web.StreamResponse:
        page = await self._page(target)
        body = document(page, self._model, self._moment(), self._observer.uri, url("/live", at=target.text))
        return _answer(200, "text/html", body.encode())

    def _health(self) -> dict[str, object]:
        return {
            "healthy": True,
            "connections": len(self._connections),
            "live": self._live,
            "metadata_operations": self._observer.metadata_operations,
            "metadata_error": self._model.metadata_error or None,
        }

    def _moment(self) -> Now:
        return Now(self._loop.time(), self._observer.wall_clock())

    async def _page(self, target: _Target) -> Page:
        """Make a page, or take the one that was made for the same state."""
        found = self._frames.get(target.text)
        now, revision = self._loop.time(), self._model.revision
        if found is not None and now < found[0] + _AGE_S and (found[1] == revision or now < found[0] + 0.2):
            return found[2]
        page = await self._make(target.path, target.query)
        self._frames[target.text] = now, revision, page
        while len(self._frames) > _FRAMES_KEPT:
            del self._frames[next(iter(self._frames))]
        return page

    async def _make(self, path: str, query: Mapping[str, str]) -> Page:
        model, moment, number = self._model, self._moment(), _count(query.get("page", ""), 1, _PAGE_MAX)
        text = query.get("q", "").strip()
        if path == "/bookies":
            return bookies_page(model, moment, query.get("bookie", ""))
        if path == "/ledgers":
            state, bookie = query.get("state", ""), query.get("bookie", "")
            return ledgers_page(
                model, moment, LedgerQuery(text, state, bookie, bool(query.get("lacking")), number)
            )
        if path == "/ledger":
            ledger_id = _ledger_id(query)
            assert ledger_id is not None, "`_handle` has refused it"
            return ledger_page(model, moment, await self._observer.ledger(ledger_id))
        if path == "/logs":
            return logs_page(model, text, number)
        if path == "/log":
            return log_page(model, moment, await self._observer.log(query.get("name", ""), number))
        if path == "/repair":
            return repair_page(model, moment, number)
        if path == "/events":
            return events_page(model, query.get("kind", ""))
        return overview(model, moment)

    # --- live updates ----------------------------------------------------------------------------

    async def _serve_live(
        self, request: web.BaseRequest, connection: _Connection, target: _Target
    ) -> web.StreamResponse:
        if self._live >= LIVE_MAX:
            return _text(503, f"{LIVE_MAX} pages are live already\n", **{"Retry-After": "10"})
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        response.force_close()
        self._live += 1
        connection.is_live = True
        try:
            await response.prepare(request)
            await self._follow(request, response, target)
        except (ConnectionError, TimeoutError):
            connection.end()
        except Exception as error:  # the head of the answer has left
            self._report(error)
            connection.end()
        finally:
            self._live -= 1
        return response

    async def _follow(self, request: web.BaseRequest, response: web.StreamResponse, target: _Target) -> None:
        """Send what has changed, until the reader goes away."""
        sent: dict[str, str] = {}
        written_at = -_HEARTBEAT_S
        while request.transport is not None and not request.transport.is_closing():
            page = await self._page(target)
            # Of the state that the page shows: it may have been made for another reader a moment ago.
            revision = self._frames[target.text][1] if target.text in self._frames else -1
            regions: dict[str, Any] = frame(page, self._model, self._moment())
            changed = {name: markup for name, markup in regions.items() if sent.get(name) != markup}
            sent.update(changed)
            data = b""
            if changed:
                update = {"title": title(page, self._model), "regions": changed}
                data = b"data: %s\n\n" % json.dumps(update).encode()
            elif self._loop.time() >= written_at + _HEARTBEAT_S:
                data = b": alive\n\n"
            if data:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await response.write(data)
                written_at = self._loop.time()
            await asyncio.sleep(_UPDATE_S)
            await self._observer.wait_for_change(revision, _AGE_S - _UPDATE_S)

    # --- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Accept nothing more, and close all connections."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._connections):
            if connection.is_live:
                connection.end()
        await self._manager.shutdown(_CLOSE_TIMEOUT_S)
        self._reports.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _count(text: str, least: int, most: int) -> int:
    """Return a number in a query; the least one where there is none."""
    number = _number(text)
    return least if number is None else min(max(number, least), most)


def _ledger_id(query: Mapping[str, str]) -> int | None:
    """Return the ledger that a query names; None where no ledger has such an id."""
    number = _number(query.get("id", ""))
    return number if number is not None and number <= LEDGER_ID_MAX else None


def _number(text: str) -> int | None:
    """Return a number from 0 on in a query; None where there is none, or a longer one than any id."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else None


def _text(status: int, text: str, **headers: str) -> web.Response:
    return _answer(status, "text/plain", str(html("{}", text)).encode(), **headers)


def _answer(status: int, content_type: str, body: bytes, **headers: str) -> web.Response:
    response = web.Response(
        status=status,
        body=body,
        headers={**HEADERS, **headers, "Content-Type": f"{content_type}; charset=utf-8"},
    )
    response.force_close()
    return response
