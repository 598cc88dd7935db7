"""The HTTP endpoint: what it answers, how it is described, and what a stranger cannot do by it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bookie_aio.metrics import METRICS, DiskTimes
from bookie_aio.server import http
from bookie_aio.server.http import CONNECTIONS_MAX, HttpServer
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.segment.allocator import SpaceLimits
from bookie_aio.wire.messages import NO_TERM, Read, Status
from metadata.access.bookies import READ_ONLY, Order, await_obedience, change_order, split_address
from metadata.errors import DiskFailedError, MetadataUnavailableError, NoSuchLedgerError
from metadata.ids import available_key
from metadata.metrics import Histogram, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import RawClient

KIB = 1024
WAIT_S = 20.0
OPENAPI = json.loads(files("bookie_aio.server").joinpath("openapi.json").read_text())


class Got(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def exchange(endpoint: HttpServer, sent: bytes) -> bytes:
    """Send bytes over a new connection, and return all that comes until the other side closes it."""
    host, port = split_address(endpoint.address)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def get(endpoint: HttpServer, path: str, method: str = "GET") -> Got:
    """Ask for a path, and return the answer."""
    answer = await exchange(endpoint, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Got(int(first.split()[1]), headers, body)


async def survey() -> dict[str, Any]:
    raise NoSuchLedgerError("no survey in this test")


@pytest.fixture
async def endpoint() -> AsyncIterator[HttpServer]:
    async with await HttpServer.listen("127.0.0.1", 0, clock=time.perf_counter) as running:
        yield running


def described(path: str, got: Got) -> None:
    """Check an answer against openapi.json: its status, its type, its content, and that no key is missing."""
    responses = OPENAPI["paths"][path]["get"]["responses"]
    assert str(got.status) in responses, f"{path} answers {got.status}, which openapi.json does not name"
    ((content_type, content),) = responses[str(got.status)]["content"].items()
    assert got.headers["content-type"].startswith(content_type)
    if content_type != "application/json":
        return
    schema = {**content["schema"], "components": OPENAPI["components"]}
    jsonschema.Draft202012Validator(schema).validate(got.json)
    if path != "/api/v1/openapi.json":
        assert_every_key_is_described(got.json, schema)


def assert_every_key_is_described(value: Any, schema: dict[str, Any], where: str = "") -> None:
    """Check that an answer has no key that its schema leaves out."""
    if "$ref" in schema:
        schema = OPENAPI["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        for each in value:
            assert_every_key_is_described(each, schema["items"], where)
    elif isinstance(value, dict):
        for key, below in value.items():
            found = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            assert found, f"bookie_aio/server/openapi.json does not describe {where}.{key}"
            assert_every_key_is_described(below, found, f"{where}.{key}")


async def _written(bookies: Bookies, bookie: Bookie, entries: int = 10) -> RawClient:
    client = await bookies.connect(bookie)
    for entry in range(entries):
        await client.add(7, entry, [b"x" * 100])
    return client


async def test_answers_are_those_that_the_description_names(endpoint: HttpServer, bookies: Bookies) -> None:
    assert sorted(endpoint._kept) == sorted(OPENAPI["paths"])
    for path in OPENAPI["paths"]:  # the bookie is starting
        described(path, await get(endpoint, path))
    bookie = await bookies.start()
    await _written(bookies, bookie)
    endpoint.show(bookie, survey)
    for kept in endpoint._kept.values():
        kept._old_at = float("-inf")
    for path in OPENAPI["paths"]:
        described(path, await get(endpoint, path))
    assert (await get(endpoint, "/api/v1/bookie")).json["counters"]["entries_added"] == 10
    error = (await get(endpoint, "/api/v1/cluster")).json["error"]
    assert error == "NoSuchLedgerError: no survey in this test"


async def test_a_description_that_leaves_a_key_out_is_found() -> None:
    with pytest.raises(AssertionError, match=r"does not describe \.bookies\.age_s"):
        assert_every_key_is_described({"bookies": [{"age_s": 1}]}, {"$ref": "#/components/schemas/Cluster"})


async def test_a_scrape_has_every_metric_and_counts_what_was_done(
    endpoint: HttpServer, bookies: Bookies
) -> None:
    bookie = await bookies.start()
    endpoint._disk = DiskTimes(time.perf_counter)
    client = await _written(bookies, bookie)
    await client.call(Read(7, NO_TERM, 0, 0, 9, 1, 1 << 20))
    endpoint.show(bookie, survey)
    got = await get(endpoint, "/metrics")
    assert got.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {family.name: family for family in text_string_to_metric_families(got.body.decode())}
    for metric in METRICS:
        family = found[metric.name.removesuffix("_total")]
        assert family.documentation == metric.help
        assert family.type == (metric.kind if metric.kind is not Kind.INFO else "gauge")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in found.values()
        for sample in family.samples
    }
    assert samples["bookie_aio_entries_added_total",] == 10
    assert samples["bookie_aio_add_seconds_count",] == 10
    assert samples["bookie_aio_add_seconds_bucket", "+Inf"] == 10
    assert samples["bookie_aio_requests_total", "add"] == 10
    assert samples["bookie_aio_group_records_sum",] >= 10
    assert samples["bookie_aio_add_stage_seconds_count", "commit"] == samples["bookie_aio_group_bytes_count",]
    assert (
        samples["bookie_aio_add_stage_seconds_count", "acknowledge"]
        == samples["bookie_aio_group_bytes_count",]
    )
    assert samples["bookie_aio_read_seconds_count",] == 1
    assert samples["bookie_aio_connections",] == 1
    assert samples["process_open_fds",] > 0


async def test_the_stages_of_an_add_lie_within_its_whole_time(bookies: Bookies) -> None:
    bookie = await bookies.start()
    await _written(bookies, bookie, 50)
    figures = bookie.figures()

    def mean(histogram: Histogram) -> float:
        return histogram.total / max(1, histogram.count)

    # One entry is under way at a time, so each is a group of its own.
    whole = mean(figures.requests.add)
    assert figures.requests.add.count == 50
    assert 0 < mean(figures.storage.commit) <= whole


async def test_readiness_names_what_is_wrong(endpoint: HttpServer, bookies: Bookies) -> None:
    endpoint._kept["/readyz"]._kept_s = 0.0
    assert (await get(endpoint, "/readyz")).json == {"ready": False, "reasons": ["the bookie is starting"]}
    disk = bookies.disk()
    space = SpaceLimits(reserve_bytes=256 * KIB, retry_s=0.05)
    bookie = await bookies.start(disk=disk, storage=StorageConfig(segment_bytes=256 * KIB, space=space))
    endpoint.show(bookie, survey)
    got = await get(endpoint, "/readyz")
    assert (got.status, got.json) == (200, {"ready": True, "reasons": []})

    disk.is_full = True
    client, entry_id = await bookies.connect(bookie), 0
    while (await client.add(7, entry_id, [bytes(16 * KIB)])).status is Status.OK:
        entry_id += 1
    got = await get(endpoint, "/readyz")
    assert (got.status, got.json["reasons"]) == (503, ["the bookie is read-only: no space left"])
    assert (await get(endpoint, "/healthz")).status == 200
    disk.is_full = False
    while not (await get(endpoint, "/readyz")).json["ready"]:  # each asks the metadata store
        pass

    other = bookies.store()
    await change_order(other, "b1", lambda _: Order(READ_ONLY))
    assert await await_obedience(other, "b1", READ_ONLY, WAIT_S)
    assert (await get(endpoint, "/readyz")).json["reasons"] == [
        "an operator has ordered the bookie to take no entries: it is read-only"
    ]
    await change_order(other, "b1", lambda _: None)
    assert await await_obedience(other, "b1", "", WAIT_S)
    value = json.loads((await other.read(available_key("b1"))).value)
    version = (await other.read(available_key("b1"))).version
    changed = json.dumps(value | {"nonce": "another"}).encode()
    await other.compare_and_set(available_key("b1"), changed, version)
    assert (await get(endpoint, "/readyz")).json["reasons"] == [
        "another process is registered under the bookie's id"
    ]
    other.tree.owners.clear()  # nobody hears of it
    await other.delete(available_key("b1"))
    (reason,) = (await get(endpoint, "/readyz")).json["reasons"]
    assert "not registered in the metadata store" in reason
    await other.close()


async def test_a_metadata_store_that_is_away_makes_a_bookie_unready_and_not_unhealthy(
    endpoint: HttpServer, bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint._kept["/readyz"]._kept_s = 0.0
    store = bookies.store()
    bookie = await bookies.start(store=store)
    endpoint.show(bookie, survey)

    async def refuse(key: str) -> Any:
        raise MetadataUnavailableError("no connection")

    async def hang(key: str) -> Any:
        await asyncio.Event().wait()

    for reading, reason in (
        (refuse, "the metadata store does not answer: no connection"),
        (hang, "the metadata store does not answer within 1 s"),
    ):
        monkeypatch.setattr(store, "read", reading)
        got = await get(endpoint, "/readyz")
        assert (got.status, got.json["reasons"]) == (503, [reason])
    assert (await get(endpoint, "/healthz")).status == 200


async def test_a_bookie_whose_storage_failed_is_neither_healthy_nor_ready(
    endpoint: HttpServer, bookies: Bookies
) -> None:
    bookie = await bookies.start()
    endpoint.show(bookie, survey)
    bookie._on_failed(DiskFailedError("writing x: Input/output error"))
    got = await get(endpoint, "/healthz")
    assert (got.status, got.json) == (
        503, {"healthy": False, "reasons": ["writing x: Input/output error"]}
    )  # fmt: skip
    assert (await get(endpoint, "/readyz")).status == 503


async def test_only_reading_is_possible_and_each_connection_carries_one_request(endpoint: HttpServer) -> None:
    assert (await get(endpoint, "/healthz", "HEAD")).body == b""
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        got = await get(endpoint, "/healthz", method)
        assert (got.status, got.headers["allow"]) == (405, "GET, HEAD")
    got = await get(endpoint, "/nothing/here")
    assert (got.status, got.json["paths"]) == (404, list(endpoint._kept))
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await exchange(endpoint, one * 3)).count(b"HTTP/1.1 200") == 1
    assert set(endpoint.metrics.requests) == {
        ("/healthz", "200"), ("/healthz", "405"), ("other", "404")
    }  # fmt: skip


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 64 + b"\r\n",
        b"\x00\x00\x00\x10 this is no HTTP\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["line", "header", "headers", "noise", "address", "bytes"],
)
async def test_requests_beyond_the_bounds_are_refused(
    endpoint: HttpServer, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await exchange(endpoint, sent)
    assert answer.startswith(b"HTTP/1.") or not answer
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert (await get(endpoint, "/healthz")).status == 200
    assert endpoint.metrics.requests["other", "400"] == 1
    assert not caplog.records  # a stranger does not fill the log


async def test_64_header_fields_are_taken_and_65_are_not(endpoint: HttpServer) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    assert b" 200 " in (await exchange(endpoint, head + b"X: a\r\n" * 63 + b"\r\n")).partition(b"\r\n")[0]
    assert b" 400 " in (await exchange(endpoint, head + b"X: a\r\n" * 64 + b"\r\n")).partition(b"\r\n")[0]


async def test_requests_behind_one_that_waits_are_not_read(
    endpoint: HttpServer, bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, go_on, has_come = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow() -> dict[str, Any]:
        waiting.set()
        await go_on.wait()
        return {}

    first, others = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * count
        for path, count in (("/api/v1/cluster", 1), ("/healthz", 1000))
    )
    received = 0
    take = http._Connection.data_received

    def noting(connection: http._Connection, data: bytes) -> None:
        nonlocal received
        received += len(data)
        take(connection, data)
        if received == len(first + others) or not _is_reading(connection):
            has_come.set()

    monkeypatch.setattr(http._Connection, "data_received", noting)
    endpoint.show(await bookies.start(), slow)
    asking = asyncio.create_task(exchange(endpoint, first + others))
    await waiting.wait()
    await has_come.wait()
    (connection,) = endpoint._connections
    assert not _is_reading(connection)
    assert len(connection._messages) < 100
    go_on.set()
    assert (await asking).count(b"HTTP/1.1 ") <= 1  # what was not read may take the answer along


def _is_reading(connection: http._Connection) -> bool:
    assert connection.transport is not None
    return connection.transport.is_reading()


async def test_a_bug_of_ours_is_an_answer_and_one_line_in_the_log(
    endpoint: HttpServer, bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> dict[str, Any]:
        raise LookupError("a bug")

    endpoint.show(await bookies.start(), broken)
    endpoint._kept["/api/v1/cluster"]._kept_s = 0.0
    caplog.clear()
    for _ in range(3):
        got = await get(endpoint, "/api/v1/cluster")
        assert (got.status, got.json["error"]) == (
            500,
            "an internal error, LookupError: see the bookie's log",
        )
    assert [record.getMessage() for record in caplog.records] == ["an HTTP request failed"]


async def test_a_body_is_not_read(endpoint: HttpServer) -> None:
    head = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
    assert b" 405 " in await exchange(endpoint, head + b"x" * 100_000)


async def test_connections_that_hang_keep_nobody_away_and_are_ended(
    endpoint: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = split_address(endpoint.address)
    hanging = [await asyncio.open_connection(host, port) for _ in range(CONNECTIONS_MAX + 8)]
    for _, writer in hanging:
        writer.write(b"GET /metrics HT")
    assert (await get(endpoint, "/healthz")).status == 200
    assert endpoint.metrics.connections <= CONNECTIONS_MAX
    # The oldest ones were closed, to make room.
    with suppress(ConnectionResetError):
        assert await hanging[0][0].read() == b""
    assert endpoint.metrics.closed["crowded"] >= 9
    for _, writer in hanging:
        writer.close()

    monkeypatch.setattr(http, "_REQUEST_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\n")
    async with asyncio.timeout(WAIT_S):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert endpoint.metrics.closed["late"] >= 1
    writer.close()


async def test_callers_at_the_same_time_share_one_survey_and_later_ones_take_it_over(
    endpoint: HttpServer, bookies: Bookies
) -> None:
    made, begun, go_on = 0, asyncio.Event(), asyncio.Event()

    async def slow() -> dict[str, Any]:
        nonlocal made
        made += 1
        begun.set()
        await go_on.wait()
        return {"made": made}

    endpoint.show(await bookies.start(), slow)
    asking = [asyncio.create_task(get(endpoint, "/api/v1/cluster")) for _ in range(5)]
    await begun.wait()
    go_on.set()
    assert [(await one).json for one in asking] == [{"made": 1}] * 5
    assert (await get(endpoint, "/api/v1/cluster")).json == {"made": 1}


@pytest.mark.parametrize("ending", ["answer", "timeout", "bug"])
async def test_a_dear_survey_is_made_the_more_rarely_the_longer_it_takes(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    now, made = 1000.0, 0

    async def dear() -> dict[str, Any]:
        nonlocal now, made
        made += 1
        now += 12.0
        if ending == "timeout":
            await asyncio.Event().wait()
        if ending == "bug":
            raise LookupError("a bug")
        return {}

    monkeypatch.setattr(http, "_CLUSTER_TIMEOUT_S", 12.0 if ending == "answer" else 0.0)
    status = {"answer": 200, "timeout": 503, "bug": 500}[ending]
    async with await HttpServer.listen("127.0.0.1", 0, clock=lambda: now) as endpoint:
        endpoint.show(await bookies.start(), dear)
        # Each ends 12 s after its begin, and is kept for 120 s.
        for at, surveys in ((1000, 1), (1012, 1), (1018, 1), (1131, 1), (1132, 2), (1263, 2), (1264, 3)):
            now = float(at)
            assert (await get(endpoint, "/api/v1/cluster")).status == status
            assert made == surveys


async def test_a_quick_survey_is_made_again_after_5_s(bookies: Bookies) -> None:
    now, made = 1000.0, 0

    async def quick() -> dict[str, Any]:
        nonlocal now, made
        made += 1
        now += 0.1
        return {"made": made}

    async with await HttpServer.listen("127.0.0.1", 0, clock=lambda: now) as endpoint:
        assert (await get(endpoint, "/api/v1/cluster")).status == 503
        endpoint.show(await bookies.start(), quick)
        now += 5.0
        for pause_s, surveys in ((0.0, 1), (4.9, 1), (0.2, 2)):
            now += pause_s
            assert (await get(endpoint, "/api/v1/cluster")).json == {"made": surveys}


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/api/v1/bookie", "/nothing"])
async def test_a_rebound_name_gets_nothing_from_an_endpoint_on_loopback(path: str) -> None:
    sent = f"GET {path} HTTP/1.1\r\nHost: {{}}\r\n\r\n"

    async def status(endpoint: HttpServer, host: str) -> int:
        return int((await exchange(endpoint, sent.format(host).encode())).split()[1])

    async with await HttpServer.listen("localhost", 0, clock=time.perf_counter) as endpoint:
        for host in ("evil.example", "evil.example:9464", "localhost.evil.example", ""):
            assert await status(endpoint, host) == 421
        assert endpoint.metrics.requests == {("other", "421"): 4}
        for host in ("localhost", "LOCALHOST:9464", "127.0.0.1:9464", "[::1]:9464"):
            assert await status(endpoint, host) != 421
        probe = await exchange(endpoint, f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert int(probe.split()[1]) != 421


async def test_an_endpoint_beyond_loopback_may_have_any_name() -> None:
    async with await HttpServer.listen("0.0.0.0", 0, clock=time.perf_counter) as endpoint:
        answer = await exchange(endpoint, b"GET /healthz HTTP/1.1\r\nHost: b1.example\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_closing_ends_connections_and_frees_the_port(bookies: Bookies) -> None:
    endpoint = await HttpServer.listen("127.0.0.1", 0, clock=time.perf_counter)
    host, port = split_address(endpoint.address)
    reader, writer = await asyncio.open_connection(host, port)
    assert (await get(endpoint, "/healthz")).status == 200  # connections are accepted in order
    with pytest.raises(OSError, match="the bookie's HTTP endpoint cannot listen on"):
        await HttpServer.listen(host, port, clock=time.perf_counter)
    await endpoint.close()
    assert await reader.read() == b""
    writer.close()
    async with await HttpServer.listen(host, port, clock=time.perf_counter) as again:
        assert (await get(again, "/healthz")).status == 200


async def test_a_failure_to_make_an_answer_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FAILURE_KEPT_S", 0.0)
    failures = [OSError("no file descriptor")]

    async def make() -> http.Answer:
        if failures:
            raise failures.pop()
        return http.Answer.of({})

    kept = http.Kept(make, float("inf"), time.perf_counter)
    with pytest.raises(OSError, match="no file descriptor"):
        await kept.get()
    assert (await kept.get()).status == 200
