"""Consumers that tail a log and save their positions: killed and started again, they resume there.

    python examples/log_consumer.py METADATA [--log NAME] [--records 2000]

    bookie-aio cluster up -n 3 --dir /tmp/cluster        # in another terminal; prints the metadata URI

A producer appends records and rolls its log often. Two consumers, processes of their own, follow the log.
Each keeps its result and its position in a file. One consumer is killed with SIGKILL on the way and started
again. At the end both have seen every record, in order.

A position is saved after its record was processed. So a crash in between has that record processed twice:
at least once. Where processing and saving are one step (here: one file replaced at once) it is exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import uuid
from contextlib import aclosing
from pathlib import Path

import client_aio

BATCHES_BETWEEN_SAVES = 3


class Checkpoint:
    """A consumer's result (how many records, and their sum) and the position it belongs to, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position: client_aio.Position | None = None
        self.count, self.sum = 0, 0
        if path.exists():
            saved = json.loads(path.read_text())
            self.position = client_aio.Position.parse(saved["position"])
            self.count, self.sum = saved["count"], saved["sum"]

    def save(self) -> None:
        """Replace the file at once: after a crash it is the old one or the new one."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"position": str(self.position), "count": self.count, "sum": self.sum}))
        os.replace(new, self.path)


async def consume(metadata: str, name: str, path: Path, until: int) -> None:
    """Follow the log from the saved position on, until so many records have been seen in all."""
    state, unsaved = Checkpoint(path), 0
    async with client_aio.connect(metadata) as client:
        batches = client.read_log_batches(name, state.position, follow=True)
        async with aclosing(batches):
            async for batch in batches:
                for position, data in batch:
                    if position == state.position:
                        continue  # the last one done before
                    assert int(data) == state.count, f"record {data!r} came as number {state.count}"
                    state.count, state.sum, state.position = state.count + 1, state.sum + int(data), position
                unsaved += 1
                if unsaved == BATCHES_BETWEEN_SAVES or state.count >= until:
                    state.save()
                    print(f"saved {state.position}", flush=True)
                    unsaved = 0
                if state.count >= until:
                    return


async def produce(metadata: str, name: str, records: int) -> None:
    async with client_aio.connect(metadata) as client, client.open_log(name, roll_entries=100) as log:
        for start in range(0, records, 20):
            await asyncio.gather(*(log.append(b"%d" % n) for n in range(start, min(start + 20, records))))
            await asyncio.sleep(0.005)


async def demo(metadata: str, name: str, records: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="log-consumer.") as home:
        paths = [Path(home) / f"consumer-{number}.json" for number in (1, 2)]

        async def start(path: Path) -> asyncio.subprocess.Process:
            command = (__file__, metadata, "--log", name, "--records", str(records), "--consume", str(path))
            pipe = asyncio.subprocess.PIPE
            return await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe)

        async with client_aio.connect(metadata) as client:
            await (await client.open_log(name)).close()  # so that there is a log to follow
        first, second = [await start(path) for path in paths]
        producing = asyncio.create_task(produce(metadata, name, records))
        assert second.stdout is not None
        await second.stdout.readline()  # it has saved a position
        second.kill()
        await second.wait()
        saved = Checkpoint(paths[1])
        print(f"killed consumer 2, whose saved position is {saved.position}, record {saved.count - 1:,}")
        second = await start(paths[1])
        await producing
        ended = [await first.wait(), await second.wait()]
        states = [Checkpoint(path) for path in paths]
    for number, state in enumerate(states, 1):
        print(f"consumer {number}: {state.count:,} records up to {state.position}, sum {state.sum:,}")
    good = ended == [0, 0] and all(
        (each.count, each.sum) == (records, sum(range(records))) for each in states
    )
    print("EQUAL: both have seen every record once" if good else "NOT EQUAL")
    return good


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("metadata")
    parser.add_argument("--log", help="the name of a log without records; by default a new one")
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--consume", type=Path, help="be a consumer that keeps its position in this file")
    arguments = parser.parse_args()
    if arguments.consume:
        await consume(arguments.metadata, arguments.log, arguments.consume, arguments.records)
        return 0
    log = arguments.log or f"events-{uuid.uuid4().hex[:8]}"
    return 0 if await demo(arguments.metadata, log, arguments.records) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
