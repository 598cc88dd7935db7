"""Unbounded ledgers of many fragments: the costs of opening, adding, reading and trimming.

    python -m benchmarks.fragments [--fragments 200 20000] [--rounds 20] [-o table|json]

For each length a ledger is made with so many fragments of five entries each, by the product's own rolls. It
is opened for writing, and its first entry is acknowledged. It is read from its middle, and trimmed to its
last tenth. The largest node of the metadata store is looked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import client_aio
from benchmarks.running import Workplace, run
from metadata.backends.uri import open_store
from metadata.ids import fragments_key, ledger_key
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from metadata.store import MetadataStore

ENTRIES = 5
READ_ENTRIES = 100


@dataclass
class Samples:
    """Times of one ledger's rounds, in milliseconds."""

    opened: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    middle: list[float] = field(default_factory=list)


async def grow(client: client_aio.Client, name: str, fragments: int) -> int:
    """Make a ledger of so many fragments; returns its id."""
    async with client.open_unbounded_ledger(name) as ledger:
        for number in range(fragments):
            if number:
                await ledger.roll()
            await ledger.add_entries(b"%d.%d" % (number, entry) for entry in range(ENTRIES))
        return ledger.ledger_id


async def measure(uri: str, lengths: list[int], rounds: int) -> list[dict[str, float]]:
    """Make ledgers of so many fragments, and measure them in turns; times in milliseconds."""
    ids: dict[int, int] = {}
    async with client_aio.connect(uri) as client:
        for fragments in lengths:
            ids[fragments] = await grow(client, f"of-{fragments}", fragments)
    samples = {fragments: Samples() for fragments in lengths}
    async with client_aio.connect(uri) as client, await open_store(uri) as store:
        for _ in range(rounds):
            for fragments in lengths:
                await one_round(client, fragments, samples[fragments])
        found = []
        for fragments in lengths:
            pages = fragments_key(ids[fragments])
            each = samples[fragments]
            figures: dict[str, float] = {
                "fragments": fragments,
                "open, ms": statistics.median(each.opened),
                "open and first add, ms": statistics.median(each.first),
                f"read {READ_ENTRIES} from the middle, ms": statistics.median(each.middle),
                "pages": len(await store.children(pages)),
                "largest node, bytes": await largest(store, ids[fragments]),
            }
            async with client.open_unbounded_ledger(f"of-{fragments}") as ledger:
                started = time.perf_counter()
                left = await ledger.trim(fragments * ENTRIES * 9 // 10)
                figures["trim nine tenths, ms"] = 1e3 * (time.perf_counter() - started)
                assert left == fragments * ENTRIES * 9 // 10
            figures["pages left"] = len(await store.children(pages))
            found.append(figures)
    return found


async def one_round(client: client_aio.Client, fragments: int, samples: Samples) -> None:
    """Open, add, leave; then read from the middle."""
    name, at = f"of-{fragments}", fragments * ENTRIES // 2
    started = time.perf_counter()
    ledger = await client.open_unbounded_ledger(name)
    samples.opened.append(1e3 * (time.perf_counter() - started))
    await ledger.add_entry(b"one more")
    samples.first.append(1e3 * (time.perf_counter() - started))
    await ledger.close()
    started = time.perf_counter()
    async with aclosing(client.read_unbounded_ledger(name, at)) as entries:
        seen = [(await anext(entries)).entry_id for _ in range(READ_ENTRIES)]
    samples.middle.append(1e3 * (time.perf_counter() - started))
    assert seen == list(range(at, at + READ_ENTRIES))


async def largest(store: MetadataStore, ledger_id: int) -> int:
    """Return the size of the largest value that the ledger has in the metadata store."""
    folder = fragments_key(ledger_id)
    keys = [ledger_key(ledger_id), *(f"{folder}/{name}" for name in await store.children(folder))]
    return max([len((await store.read(key)).value) for key in keys])


async def main(lengths: list[int], rounds: int, home: Path, show: Callable[[dict[str, float]], None]) -> None:
    """Measure each length."""
    async with Cluster(home, bookies=4) as cluster:
        for figures in await measure(cluster.uri, lengths, rounds):
            show(figures)


def _show(figures: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures), flush=True)
    else:
        print(*(f"{name}: {value:,.1f}" for name, value in figures.items()), sep="\n", end="\n\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fragments", type=int, nargs="+", default=[200, 20_000], help="each at least 50")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    chosen = parser.parse_args()
    with Workplace(None, "fragments-") as place:
        run(
            main(
                chosen.fragments, chosen.rounds, place.path,
                lambda figures: _show(figures, chosen.output == "json"),
            )
        )  # fmt: skip
    sys.exit(0)
