"""The product's client, under the same load as the ceiling's and the peers' clients.

    python -m benchmarks.product_client MODE+URI ENTRY_BYTES IN_FLIGHT LEDGERS WARM_UP SECONDS READ

Ledgers have E = Qw = 3 and Qa = 2, and are deleted in the end. In mode `growing` each ledger is written for
the whole run. In mode `steady` a ledger is followed by another after every 256 MiB, and then deleted. The
bookies therefore reclaim as much space as they take. The measurement begins on used bookies: they have files
to recycle, and write into one. Prints `ready`, `warm`, and the figures as one line of JSON.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING

import uvloop

import client_aio
from benchmarks.load import Add, Figures, Load, cpu_seconds, drive
from bookie_aio.wire.messages import Done, Info
from client_aio.bookies.connection import connect

if TYPE_CHECKING:
    from metadata.access.bookies import BookieRecord

ROLL_BYTES = 256 << 20
_LEDGERS_STEADY = 4
_LEDGERS_MAX = 60
_SEGMENTS_BYTES = 512 << 20  # more than the segment that is written to and the next one
_CALL_TIMEOUT_S = 10.0
_CHUNK = bytes(64 << 10)


class Writers:
    """The ledgers that are written, one add to each in turn."""

    def __init__(self, client: client_aio.Client, load: Load, *, is_steady: bool) -> None:
        self._client = client
        self._entry_bytes = load.entry_bytes
        self._roll_entries = max(1, ROLL_BYTES // load.entry_bytes) if is_steady else sys.maxsize
        self._count = load.ledgers
        self._adds: list[Add] = []
        self._writers: list[client_aio.LedgerWriter] = []
        self._left: list[int] = []
        self._next = 0
        self._rolling: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Writers:
        self._writers = [await self._create() for _ in range(self._count)]
        self._adds = [writer.add_entry for writer in self._writers]
        # Not all at once: each has a different share of its first round behind it.
        self._left = [self._roll_entries * (n + 1) // self._count for n in range(self._count)]
        client_aio.tune_gc()
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self._rolling:
            await asyncio.wait(self._rolling)
        for writer in self._writers:
            await self._end(writer)

    def add_for(self, count: int) -> Add:
        """Return what adds the next entries: the ledger itself where there is but one."""
        if self._count > 1:
            return self._add
        self._left[0] -= count
        if self._left[0] <= 0:
            self._roll(0)
        return self._adds[0]

    def _add(self, payload: bytes) -> asyncio.Future[int]:
        number = self._next
        self._next = number + 1 if number + 1 < self._count else 0
        self._left[number] -= 1
        if not self._left[number]:
            self._roll(number)
        return self._adds[number](payload)

    def _roll(self, number: int) -> None:
        self._left[number] = self._roll_entries

        async def roll() -> None:
            new = await self._create()
            old, self._writers[number] = self._writers[number], new
            self._adds[number] = new.add_entry
            await self._end(old)

        task = asyncio.create_task(roll())
        self._rolling.add(task)
        task.add_done_callback(self._rolling.discard)

    async def _create(self) -> client_aio.LedgerWriter:
        return await self._client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2)

    async def _end(self, writer: client_aio.LedgerWriter) -> None:
        await writer.close()
        await self._client.delete_ledger(writer.ledger_id)


async def write(client: client_aio.Client, load: Load, *, is_steady: bool) -> None:
    """Measure adds."""
    if is_steady:
        await use(client)
    async with Writers(client, load, is_steady=is_steady) as writers:
        print("ready", flush=True)
        figures = await drive(writers.add_for, load)
        # Before the ledgers are deleted, so that the deletion is not measured.
        print(json.dumps(figures.to_dict()), flush=True)


async def use(client: client_aio.Client) -> None:
    """Write ledgers and delete them until no bookie makes new files for it: all are recycled ones.

    How many files lie spare at one moment says little: the next segments take them.
    """
    most: dict[str, int] = {}
    steady = 0
    for _ in range(_LEDGERS_MAX):
        await _write_and_delete(client, ROLL_BYTES)
        files = {name: await _files(record) for name, record in client.bookies.items()}
        is_steady = all(count <= most.get(name, 0) for name, count in files.items())
        steady = steady + 1 if is_steady else 0
        if steady == _LEDGERS_STEADY:
            break
        most = {name: max(count, most.get(name, 0)) for name, count in files.items()}
    else:
        raise RuntimeError(
            f"{_LEDGERS_MAX} ledgers were written and deleted, and bookies still take new files"
        )
    await _write_and_delete(client, _SEGMENTS_BYTES)


async def _write_and_delete(client: client_aio.Client, size: int) -> None:
    async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer:
        await writer.add_entries(_CHUNK for _ in range(size // len(_CHUNK)))
    await client.delete_ledger(writer.ledger_id)


async def _files(bookie: BookieRecord) -> int:
    """Return how many files of segments a bookie has, in use or spare."""
    address = bookie.addresses[0]
    connection = await connect(address, bookie_id="", instance_id="", timeout_s=_CALL_TIMEOUT_S)
    _, body = await connection.call(Info(), Done, timeout_s=_CALL_TIMEOUT_S)
    connection.close()
    storage = json.loads(bytes(body))["storage"]
    return int(storage["segments"]["count"]) + int(storage["disk"]["spare_files"])


async def read(client: client_aio.Client, load: Load) -> None:
    """Measure reading a ledger from end to end, one reader, every entry an object of bytes.

    By batches, as in BookKeeper's client: its futures are of the entries of a range.
    """
    payload = bytes(load.entry_bytes)
    async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer:
        print("ready", flush=True)
        await writer.add_entries(payload for _ in range(load.read_entries))
    reader = await client.open_ledger(writer.ledger_id)

    async def whole() -> None:
        size = 0
        async with contextlib.aclosing(reader.read_batches(0, load.read_entries - 1)) as batches:
            async for batch in batches:
                for entry in batch:
                    size += len(entry.data)
        if size != load.read_entries * load.entry_bytes:
            raise RuntimeError(f"read {size} bytes of {load.read_entries * load.entry_bytes}")

    until = time.perf_counter() + load.warm_up_s
    while time.perf_counter() < until:
        await whole()
    print("warm", flush=True)
    passes = array.array("d")
    cpu_before, started = cpu_seconds(), time.perf_counter()
    while (now := time.perf_counter()) < started + load.seconds:
        await whole()
        passes.append(time.perf_counter() - now)
    elapsed, cpu, count = time.perf_counter() - started, cpu_seconds() - cpu_before, len(passes)
    await client.delete_ledger(writer.ledger_id)
    # The latencies are those of whole passes, the rest is for an entry.
    figures = Figures.of_latencies(passes, elapsed, cpu, 0, 0).to_dict()
    entries = count * load.read_entries
    figures |= {"adds": entries, "adds_per_s": entries / elapsed, "client_us": 1e6 * cpu / entries}
    print(json.dumps(figures), flush=True)


async def main() -> None:
    mode, uri = sys.argv[1].split("+", 1)
    load = Load.of_arguments(sys.argv[2:])
    async with client_aio.connect(uri) as client:
        if load.read_entries:
            await read(client, load)
        else:
            await write(client, load, is_steady=mode == "steady")


if __name__ == "__main__":
    uvloop.run(main())
