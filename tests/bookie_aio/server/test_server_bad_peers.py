"""Peers that break the protocol lose their own connection, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgpack
import pytest

from bookie_aio.config import Limits
from bookie_aio.wire.frames import FRAME_BYTES_MAX, encode_frame
from bookie_aio.wire.messages import Failure, Op, Ping, Status, encode_request
from tests.support.rawclient import RawClient, hello

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from bookie_aio.wire.messages import Hello
    from tests.bookie_aio.server.conftest import Bookies

HELLO = encode_frame(encode_request(hello(), 1))
HTTP = b"GET / HTTP/1.1\r\nHost: bookie\r\n\r\n"
TLS = bytes.fromhex("16030102000100")


@pytest.fixture(autouse=True)
def capture_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bookie_aio")


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged reasons for closing connections."""
    found = [vars(record).get("bookie_fields", {}) for record in caplog.records]
    return [str(values["reason"]) for values in found if "reason" in values]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (HTTP, "above the limit of 4,096"),
        (TLS, "above the limit of 4,096"),
        (encode_frame(encode_request(hello(), 1), 5000) + bytes(5000), "above the limit of 4,096"),
        (bytes(8), "no room for a header"),
        (b"\0\0\0\x08\0\0\0\x09" + bytes(8), "a header of 9 bytes"),
        (b"\0\0\0\x05\0\0\0\x01\xc1", "not msgpack"),
        (b"\0\0\0\x05\0\0\0\x01\xc0", "not an array"),
        (encode_frame([]), "at least 3 fields"),
        (encode_frame(encode_request(Ping(), 1)), "Ping before the handshake"),
        (encode_frame([1, 1, None, 1, 1, "x", "", 7]), "Hello.bookie_id"),
    ],
    ids=["http", "tls", "large", "empty", "header", "no msgpack", "nil", "no fields", "ping", "schema"],
)
async def test_who_does_not_speak_the_protocol_is_closed_with_a_reason(
    bookies: Bookies,
    bookie: Bookie,
    client: RawClient,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    says: str,
) -> None:
    stranger = await bookies.connect(bookie, greet=False)
    stranger.send_bytes(data)
    await stranger.gone()
    assert stranger.arrived == []
    (reason,) = reasons(caplog)
    assert says in reason
    assert "does not speak this protocol" in reason
    assert (await client.call(Ping())).status is Status.OK


@pytest.mark.parametrize(
    ("header", "body", "says"),
    [
        ([77, 2, None], b"", "77 is no operation"),
        ([Op.PING, -1, None], b"", "no request id"),
        ([Op.PING, 2, "auth"], b"", "neither nil nor bytes"),
        ([Op.PING, 2, None, 0], b"", "0 fields, not 1"),
        ([Op.READ_LAC, 2, None, 7, -1, -1, 30_001], b"", "ReadLac.wait_ms"),
        ([Op.ADD, 2, None, -7, 0, 0], b"", "Add.ledger_id"),
        ([Op.HELLO, 2, None, 1, 1, "x", "", ""], b"", "Hello after the handshake"),
    ],
)
async def test_a_frame_that_is_no_request_closes_the_connection(
    bookies: Bookies,
    bookie: Bookie,
    client: RawClient,
    caplog: pytest.LogCaptureFixture,
    header: list[object],
    body: bytes,
    says: str,
) -> None:
    peer = await bookies.connect(bookie)
    peer.send_bytes(encode_frame(header, len(body)) + body)
    await peer.gone()
    (reason,) = reasons(caplog)
    assert says in reason
    assert (await client.call(Ping())).status is Status.OK


async def test_a_length_above_the_limit_closes_the_connection_before_its_bytes_come(
    bookies: Bookies, bookie: Bookie, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await bookies.connect(bookie)
    peer.send_bytes((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    await peer.gone()
    (reason,) = reasons(caplog)
    assert "above the limit of 5,242,880" in reason


async def test_good_requests_before_a_bad_frame_are_answered(bookies: Bookies, bookie: Bookie) -> None:
    peer = await bookies.connect(bookie)
    pings = b"".join(encode_frame(encode_request(Ping(), number)) for number in range(50, 60))
    peer.send_bytes(pings + encode_frame([77, 1, None]))
    await peer.gone()
    assert [answer.request_id for answer in peer.arrived[1:]] == list(range(50, 60))


@pytest.mark.parametrize(
    ("greeting", "status", "says"),
    [
        (hello(version_min=6, version_max=9), Status.UNSUPPORTED_VERSION, "versions 3 to 5"),
        (hello(version_min=0, version_max=2), Status.UNSUPPORTED_VERSION, "versions 3 to 5"),
        (hello(instance_id="elsewhere"), Status.WRONG_BOOKIE, "not elsewhere"),
        (hello(bookie_id="b2"), Status.WRONG_BOOKIE, "this is bookie b1, not b2"),
    ],
)
async def test_a_handshake_that_does_not_fit_is_told_why_and_closed(
    bookies: Bookies, bookie: Bookie, greeting: Hello, status: Status, says: str
) -> None:
    peer = await bookies.connect(bookie, greet=False)
    answer = await peer.call(greeting)
    assert answer.status is status
    assert isinstance(answer.message, Failure)
    assert says in answer.message.message
    await peer.gone()


async def test_a_newer_client_that_still_speaks_version_2_is_served(bookies: Bookies, bookie: Bookie) -> None:
    peer = await bookies.connect(bookie, greet=False)
    assert (await peer.call(hello(version_min=1, version_max=99))).status is Status.OK


async def test_who_says_nothing_is_closed(bookies: Bookies, caplog: pytest.LogCaptureFixture) -> None:
    bookie = await bookies.start(limits=Limits(handshake_timeout_s=0.05))
    silent = await bookies.connect(bookie, greet=False)
    await silent.gone()
    assert reasons(caplog) == ["no handshake in time"]


async def test_who_drips_its_handshake_is_closed(bookies: Bookies, caplog: pytest.LogCaptureFixture) -> None:
    bookie = await bookies.start(limits=Limits(handshake_timeout_s=0.1))
    dripping = await bookies.connect(bookie, greet=False)
    for at in range(len(HELLO)):
        dripping.send_bytes(HELLO[at : at + 1])
        try:
            await asyncio.wait_for(dripping.closed.wait(), 0.02)
        except TimeoutError:
            continue
        break
    await dripping.gone()
    assert reasons(caplog) == ["no handshake in time"]


async def test_who_drips_a_frame_is_closed_and_who_is_idle_is_not(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    bookie = await bookies.start(limits=Limits(handshake_timeout_s=1, frame_progress_timeout_s=0.2))
    idle = await bookies.connect(bookie)
    dripping = await bookies.connect(bookie)
    await asyncio.sleep(1.1)  # the handshake's deadline is over: nothing else looks at the clock for them
    frame = encode_frame(encode_request(Ping(), 1), 1000) + bytes(1000)
    for at in range(len(frame)):
        dripping.send_bytes(frame[at : at + 1])
        try:
            await asyncio.wait_for(dripping.closed.wait(), 0.01)
        except TimeoutError:
            continue
        break
    await dripping.gone()
    assert reasons(caplog) == ["a frame was not complete within 0.2 s"]
    assert (await idle.call(Ping())).status is Status.OK


async def test_a_frame_cut_short_is_noted(
    bookies: Bookies, bookie: Bookie, client: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await bookies.connect(bookie)
    peer.send_bytes(encode_frame(encode_request(Ping(), 1), 1000) + bytes(10))
    peer.end()
    await peer.gone()
    assert reasons(caplog) == ["the peer closed the connection within a frame"]
    assert (await client.call(Ping())).status is Status.OK


async def test_connections_above_the_limit_are_turned_away(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    bookie = await bookies.start(limits=Limits(connections_max=2))
    first, second = await bookies.connect(bookie), await bookies.connect(bookie)
    third = await bookies.connect(bookie, greet=False)
    await third.gone()
    assert reasons(caplog) == ["too many connections"]
    for client in (first, second):
        assert (await client.call(Ping())).status is Status.OK
    await first.close()
    while bookie.info()["connections"] != 1:
        await second.call(Ping())
    again = await bookies.connect(bookie)
    assert (await again.call(Ping())).status is Status.OK


async def test_headers_that_would_blow_up_are_refused(bookies: Bookies, bookie: Bookie) -> None:
    peer = await bookies.connect(bookie)
    header = msgpack.packb([3, 1, None, [[]] * 60_000])
    peer.send_bytes((4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header)
    await peer.gone()


async def test_a_body_where_none_belongs_is_refused_and_the_connection_goes_on(client: RawClient) -> None:
    answer = await client.call(Ping(), b"body")
    assert answer.status is Status.BAD_REQUEST
    assert (await client.call(Ping())).status is Status.OK


async def test_many_bad_connections_are_one_line_and_a_count(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    bookie = await bookies.start()
    for _ in range(20):
        stranger = await bookies.connect(bookie, greet=False)
        stranger.send_bytes(bytes(8))
        await stranger.gone()
    assert len(reasons(caplog)) == 1
    await bookie.close()
    counts = [vars(record).get("bookie_fields", {}).get("count") for record in caplog.records]
    assert [count for count in counts if count is not None] == [19]
