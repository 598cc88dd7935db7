"""The HTTP server of the status page: malformed requests, and failures of its own."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from client_aio.dashboard import server as server_module
from client_aio.dashboard.model import ClusterModel
from client_aio.dashboard.observer import Observer
from client_aio.dashboard.server import DashboardServer, Scraper
from metadata.access.bookies import split_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAIT_S = 20.0
TOO_MANY_FIELDS = "&".join(f"a{number}=1" for number in range(21))


def never(*_: object) -> Any:
    raise AssertionError("nobody observes in these tests")


@pytest.fixture
async def page() -> AsyncIterator[DashboardServer]:
    observer = Observer("sqlite:///x", never, ClusterModel(), wall_clock=time.time, scrape=never)
    async with await DashboardServer.listen(observer, "127.0.0.1", 0) as running:
        yield running


async def first_bytes(page: DashboardServer, sent: bytes) -> bytes:
    """Send a request, and return what comes first; b"" where the connection is closed at once."""
    reader, writer = await asyncio.open_connection(*split_address(page.address))
    try:
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            return await reader.read(1 << 16)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def status(page: DashboardServer, target: str) -> int:
    """Ask for a target, and return the status of the answer."""
    answer = await first_bytes(page, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "target",
    [
        f"/?{TOO_MANY_FIELDS}",
        f"/ledgers?{TOO_MANY_FIELDS}",
        "//[",
        "//[::1",
        "/live?at=//[",
        "/live?at=//%E2%84%80",
        f"/live?at=/?{TOO_MANY_FIELDS.replace('&', '%26')}",
        "/?q=\xff",
        "/live?at=/?q=\xff",
        "http://[/",
        "*",
    ],
)
async def test_a_malformed_request_is_a_400_and_no_line_in_the_log(
    page: DashboardServer, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await status(page, target) == 400
    assert not caplog.records


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/?" + TOO_MANY_FIELDS.removesuffix("&a20=1"), 200),
        ("/log?name=%FF%00%ED%A0%80", 200),
        ("/ledger?id=0", 200),
        ("/ledger", 404),
        ("/ledger?id=abc", 404),
        ("/ledger?id=-1", 404),
        ("/ledger?id=%D9%A1", 404),
        ("/ledger?id=9223372036854775808", 404),
        ("/live?at=/ledger%3Fid%3Dabc", 404),
        ("/ledgers?page=99999999999999999999&q=%C2%B2", 200),
        ("/live?at=/ledgers%3Fq%3D%25FF", 200),
        ("http://localhost/bookies", 200),
        ("/live?at=/nothing", 404),
        ("/live", 404),
        ("/%00", 404),
    ],
)
async def test_odd_requests_are_answered(page: DashboardServer, target: str, expected: int) -> None:
    assert await status(page, target) == expected


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nok", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz", None),
        (b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1; Max-Age=9e999; Expires=x\r\nContent-Length: 0\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + b"a" * 2_000_000, None),
        (b"HTTP/1.1 301 Moved\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 1000 + b"\r\n", None),
        (b"\x00\xff\r\n\r\n", None),
        (b"", None),
    ],
)
async def test_whatever_a_bookie_answers_to_a_scrape_is_text_or_one_of_two_errors(
    answer: bytes, text: str | None
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening, Scraper() as scraper:
        found: str | None = None
        with suppress(OSError, ValueError):
            found = await scraper.scrape("{}:{}".format(*listening.sockets[0].getsockname()))
    assert found == text


@pytest.mark.parametrize("address", ["", "x", "[:1", "127.0.0.1:0", "a b:1", "\ud800:1", "a" * 300 + ":1"])
async def test_an_address_that_cannot_be_scraped_is_one_of_two_errors(address: str) -> None:
    async with Scraper() as scraper:
        with pytest.raises((OSError, ValueError)):
            await scraper.scrape(address)


@pytest.mark.parametrize(("path", "has_answer"), [("/", True), ("/live?at=/", False)])
async def test_a_bug_of_ours_is_one_line_in_the_log_however_often_it_is_met(
    page: DashboardServer,
    path: str,
    has_answer: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Any:
        raise LookupError("a bug")

    monkeypatch.setattr(server_module, "overview", broken)
    for _ in range(3):
        answer = await first_bytes(page, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert (b" 500 " in answer.partition(b"\r\n")[0]) is has_answer
    (record,) = caplog.records
    assert record.getMessage() == "a page could not be made: LookupError('a bug')"
    assert record.exc_info is not None
    await page.close()
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "a page could not be made: LookupError('a bug') (2 times since the last report)"
    ]
