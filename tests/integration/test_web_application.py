"""The web application of the examples: two workers, whose bookies die one after another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import client_aio
from benchmarks.processes import Child

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.support.cluster import Cluster

WAITS_S = 60
POSTING = 4


def post(address: str, key: str, record: bytes | None = None) -> str:
    """Append a record, by default the key; raises where the answer is not 200."""
    body = key.encode() if record is None else record
    request = urllib.request.Request(f"http://{address}/records", body, {"Idempotency-Key": key})
    with urllib.request.urlopen(request, timeout=WAITS_S) as answer:
        text: bytes = answer.read()
        return text.decode()


async def follow(address: str, wanted: set[str], duplicates: list[str]) -> None:
    """Follow until all wanted ids have come; once there are none to wait for."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET /records HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
        found: set[str] = set()
        while not wanted <= found:
            line = await reader.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                key = json.loads(line[6:])["id"]
                if key in found:
                    duplicates.append(key)
                found.add(key)
    finally:
        writer.close()


async def test_no_request_fails_while_bookies_die_one_after_another(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the web application needs fastapi and uvicorn")
    pytest.importorskip("uvicorn", reason="the web application needs fastapi and uvicorn")
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for number in range(2):
            child = await Child.start(
                sys.executable, "examples/web_log.py", cluster.uri, log=tmp_path / f"worker{number}.log"
            )
            await stack.enter_async_context(child)
            addresses.append((await child.line()).strip())
        is_over = asyncio.Event()
        posted: dict[str, str] = {}
        answers = asyncio.Semaphore(0)

        async def keep_posting(who: int) -> None:
            number = 0
            while not is_over.is_set():
                key = f"{who}.{number}"
                posted[key] = await asyncio.to_thread(post, addresses[who % 2], key)
                number += 1
                answers.release()

        async with asyncio.TaskGroup() as posting:
            for who in range(POSTING):
                posting.create_task(keep_posting(who))
            for name in ("b1", "b2", "b3"):
                await cluster[name].kill()
                await cluster[name].start()
                answers = asyncio.Semaphore(0)
                async with asyncio.timeout(WAITS_S):
                    for _ in range(2 * POSTING):
                        await answers.acquire()
            await asyncio.gather(cluster["b1"].kill(), cluster["b2"].kill())
            await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())
            is_over.set()
        for address in addresses:
            with pytest.raises(urllib.error.HTTPError, match="400"):
                await asyncio.to_thread(post, address, "no text", b"\xff")
        duplicates: list[str] = []
        async with asyncio.timeout(WAITS_S):
            await asyncio.gather(*(follow(address, set(posted), duplicates) for address in addresses))
        assert not duplicates
        assert len(posted) > POSTING * 4
        async with client_aio.connect(cluster.uri) as client:
            at = {str(record.position): record async for record in client.read_log("web")}
        assert b"no text" not in b"".join(bytes(record.data) for record in at.values())
        for key, position in posted.items():
            assert json.loads(bytes(at[position.strip()].data)) == {"id": key, "data": key}


async def test_a_follower_remembers_only_the_last_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="the web application needs fastapi and uvicorn")
    pytest.importorskip("uvicorn", reason="the web application needs fastapi and uvicorn")
    from examples import web_log

    class Client:
        """A client whose log has records of these ids."""

        async def read_log(self, *_: object, follow: bool) -> AsyncGenerator[SimpleNamespace, None]:
            for number, key in enumerate("abbacda"):
                yield SimpleNamespace(position=number, data=json.dumps({"id": key, "data": key}).encode())
            raise EOFError("all records were sent")

    monkeypatch.setattr(web_log, "REMEMBERED", 3)
    worker = web_log.Worker("unused", "unused")
    worker._client = cast("Any", Client())
    async with contextlib.aclosing(worker._events()) as events:
        sent = [json.loads((await anext(events)).partition("data: ")[2])["id"] for _ in range(5)]
        assert sent == ["a", "b", "c", "d", "a"], "three ids came since the first one"
        assert len(events.ag_frame.f_locals["seen"]) == 3
