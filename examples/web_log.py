"""A web application over one log: POST appends a record, GET follows all records as server-sent events.

    pip install fastapi uvicorn
    python examples/web_log.py METADATA [--port 8000]       # several of them; each prints its address

    bookie-aio cluster up -n 3 --dir /tmp/cluster           # in another terminal; prints the metadata URI
    curl -d 'a record' http://127.0.0.1:8000/records        # prints the record's position
    curl -N http://127.0.0.1:8000/records                   # follows

Any number of workers may run. An election decides which of them writes; the others forward to it. A request
waits up to 30 s: for bookies that come back, since the log's writer heals itself, or for another writer.

A record is text in UTF-8; other bytes are refused (400). A worker that does not know whether an append
happened sends it again. So each record has an id: that of the header `Idempotency-Key`, or one that the
worker draws. A follower is sent an id once, unless 50,000 others came in between.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import socket
import urllib.request
import uuid
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

import client_aio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

LOG = "web"
WAITS_S = 30.0
RETRY_S = 0.1
FORWARDED = "X-Forwarded-By-Worker"
REMEMBERED = 50_000  # ids that a follower was sent


class Worker:
    """One process: it stands for election, and writes or forwards.

    Args:
        address: where the other workers reach this one.
    """

    def __init__(self, metadata: str, address: str) -> None:
        self._metadata = metadata
        self._address = address
        self._client: client_aio.Client
        self._election: client_aio.LeaderElection
        self._log: client_aio.LogWriter | None = None

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncGenerator[None, None]:
        """Connect, and stand for election while the application runs."""
        async with client_aio.connect(self._metadata) as self._client:
            election = client_aio.LeaderElection(self._client, LOG, self._address.encode())
            async with election as self._election:
                leading = asyncio.create_task(self._lead())
                try:
                    yield
                finally:
                    leading.cancel()
                    await asyncio.gather(leading, return_exceptions=True)

    async def _lead(self) -> None:
        while True:
            await self._election.gained()
            with contextlib.suppress(client_aio.BookKeeperError):
                async with await self._client.open_log(LOG) as log:
                    self._log = log
                    try:
                        await self._until_it_is_over(log)
                    finally:
                        self._log = None
            await asyncio.sleep(RETRY_S)

    async def _until_it_is_over(self, log: client_aio.LogWriter) -> None:
        """Return when this worker has lost the election, or its writer the log."""

        async def ended() -> None:
            async for _ in log.states():
                pass  # The states end behind a final one.

        waits = [asyncio.create_task(self._election.lost()), asyncio.create_task(ended())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def append(self, request: Request) -> PlainTextResponse:
        """Append a record, here or at the worker that leads."""
        body = await request.body()
        key = request.headers.get("Idempotency-Key") or uuid.uuid4().hex
        try:
            record = json.dumps({"id": key, "data": body.decode()}).encode()
        except UnicodeDecodeError:
            return PlainTextResponse("a record is text in UTF-8\n", status_code=400)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAITS_S):
                while True:
                    # A worker that is forwarded to, and does not lead, leaves the next try to the other one.
                    with contextlib.suppress(client_aio.BookKeeperError, OSError):
                        if self._log is not None:
                            return PlainTextResponse(f"{await self._log.append(record)}\n")
                        if FORWARDED in request.headers:
                            break
                        return PlainTextResponse(await self._forwarded(key, body))
                    await asyncio.sleep(RETRY_S)
        return PlainTextResponse("the log cannot be written to for now: try again\n", status_code=503)

    async def _forwarded(self, key: str, body: bytes) -> str:
        leader = await self._election.leader()
        if leader is None or leader.decode() == self._address:
            raise ConnectionError("nobody leads yet")
        headers = {"Idempotency-Key": key, FORWARDED: self._address}
        request = urllib.request.Request(f"http://{leader.decode()}/records", body, headers)

        def ask() -> str:
            with urllib.request.urlopen(request, timeout=WAITS_S) as answer:
                text: bytes = answer.read()
                return text.decode()

        return await asyncio.to_thread(ask)

    async def follow(self) -> StreamingResponse:
        """Send all records of the log, and those that come, without repetitions."""
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncGenerator[str, None]:
        seen: collections.OrderedDict[str, None] = collections.OrderedDict()
        at: client_aio.Position | None = None
        while True:
            with contextlib.suppress(client_aio.BookKeeperError):
                async with contextlib.aclosing(self._client.read_log(LOG, at, follow=True)) as records:
                    async for record in records:
                        at, found = record.position, json.loads(bytes(record.data))
                        if found["id"] not in seen:
                            seen[found["id"]] = None
                            if len(seen) > REMEMBERED:
                                seen.popitem(last=False)
                            yield f"id: {record.position}\ndata: {json.dumps(found)}\n\n"
            await asyncio.sleep(RETRY_S)  # There is no log yet, or too few bookies answer.


def application(worker: Worker) -> FastAPI:
    """Build the application of one worker."""
    app = FastAPI(lifespan=worker.running)
    app.add_api_route("/records", worker.append, methods=["POST"], response_model=None)
    app.add_api_route("/records", worker.follow, methods=["GET"], response_model=None)
    return app


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="A worker of a web application over one log.")
    parser.add_argument("metadata")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", arguments.port), backlog=512) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        print(address, flush=True)
        app = application(Worker(arguments.metadata, address))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))


if __name__ == "__main__":
    main()
