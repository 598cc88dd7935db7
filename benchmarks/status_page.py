"""The status page in a browser: a death, a repair, accessibility, screenshots, and a large cluster.

    pip install playwright; apt-get install chromium; npm pack axe-core
    python -m benchmarks.status_page --axe axe-core-*.tgz --out /tmp/shots
    python -m benchmarks.status_page --large --out /tmp/shots

Without `--large`: five bookies are processes of `cluster up --http`. A writer goes on while one of them is
killed. The time is measured until the page says so, and the page has to show the progress of the repair and
its end. Every page is checked by axe-core in both colour schemes, and photographed at three widths.

With `--large`: 50 bookies in one process, and the metadata of 10,000 ledgers. Measured are the time of every
page's answer, and the metadata operations in a minute. In the browser these are the longest task and the
frames in a second, while the page is live.

The exit code is 1 if something that must hold does not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tarfile
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks.autorecovery import make
from benchmarks.processes import Child, start_module
from bookie_aio.config import BookieConfig
from bookie_aio.server.bookie import Bookie
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.segment.allocator import SpaceLimits
from metadata.backends.uri import open_store

if TYPE_CHECKING:
    from collections.abc import Collection

    from playwright.async_api import Browser, Page

SEEN_WITHIN_S = 3.0
ANSWER_WITHIN_S = 0.2
LONGEST_TASK_MS = 200
DELAY_S = 30
"""Before a bookie counts as lost. Meanwhile the pages of a cluster without it are photographed."""
WIDTHS = {"phone": 390, "tablet": 900, "wide": 1600}
SCHEMES = ("light", "dark")
SERIOUS = ("serious", "critical")


def check(holds: bool, text: str, failures: list[str]) -> None:
    """Report one thing that must hold."""
    print(f"{'ok  ' if holds else 'FAIL'} {text}", flush=True)
    if not holds:
        failures.append(text)


# --- a small cluster: a death and a repair ------------------------------------------------------------


async def write_ledgers(client: client_aio.Client, closed: int) -> None:
    """Write ledgers that are closed, a log, and an unbounded ledger."""
    for number in range(closed):
        async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer:
            for entry in range(40):
                writer.add_entry(b"%d" % entry * 2000)
            await writer.flush()
        if number % 4 == 0:
            async with client.open_log("orders", ensemble_size=3) as log:
                for entry in range(50):
                    log.append(b"%d" % entry)
                await log.flush()


async def go_on_writing(client: client_aio.Client) -> None:
    """Append to a log and to a ledger until cancelled."""
    async with (
        client.open_log("payments", ensemble_size=3) as log,
        client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as writer,
    ):
        while True:
            for number in range(20):
                log.append(b"payment %d" % number * 20)
                writer.add_entry(b"entry %d" % number * 50)
            await asyncio.gather(log.flush(), writer.flush())
            await asyncio.sleep(0.05)


async def death_and_repair(
    page: Page,
    browser: Browser,
    document: dict[str, Any],
    victim: dict[str, Any],
    arguments: argparse.Namespace,
    failures: list[str],
) -> None:
    """Kill a bookie, and watch the page: the death, the progress, the end of the repair."""
    address, out = f"http://{document['dashboard']['http']}", arguments.out
    await page.goto(f"{address}/")
    await page.wait_for_selector(".pill.ok", timeout=60_000)
    name = victim["bookie_id"]
    tile = page.locator(f'.bookies li[data-key="{name}"] a.bad')
    os.kill(victim["pid"], signal.SIGKILL)
    began = time.monotonic()
    await tile.wait_for(timeout=30_000)
    took = time.monotonic() - began
    check(took <= SEEN_WITHIN_S, f"the death of {name} was on the page after {took:.2f} s", failures)
    await page.screenshot(path=out / "death.png", full_page=True)
    check(await page.locator(".pill.ok").count() == 0, "the page is not green any more", failures)
    watching = asyncio.create_task(watch_repair(page, out))
    await photograph(
        browser, address, arguments, failures,
        names=("overview", "bookies", "repair"), sizes=("phone", "wide"), suffix="-death",
    )  # fmt: skip
    values = await watching
    check(len(values) >= 3, f"the repair's progress was seen in {len(values)} steps: {values[:8]}", failures)
    took = time.monotonic() - began
    print(f"     {took:.1f} s from the death to the end of the repair, {DELAY_S} s of them the delay")
    await page.goto(f"{address}/events")
    found = await page.locator("#events").inner_text()
    for wanted in ("ensemble changed", "bookie lost", "repaired", "repair over"):
        check(wanted in found, f"the events tell of: {wanted}", failures)


async def by_keyboard(page: Page, address: str, failures: list[str]) -> None:
    """Use the page by keyboard while it is live: what has the focus, and what is typed, stays."""
    await page.goto(f"{address}/")
    await page.keyboard.press("Tab")
    focused = "document.activeElement.textContent.trim()"
    check(await page.evaluate(focused) == "Skip to content", "the first stop is the skip link", failures)
    await page.keyboard.press("Enter")
    check(await page.evaluate("document.activeElement.id") == "main", "it leads to the content", failures)
    await page.keyboard.press("Tab")
    first = await page.evaluate("document.activeElement.href")
    body = "document.getElementById('tiles').innerHTML"
    before = await page.evaluate(body)
    await page.wait_for_function(f"(before) => {body} !== before", arg=before, timeout=20_000)
    check(await page.evaluate("document.activeElement.href") == first, "the focus stays in updates", failures)
    await page.goto(f"{address}/ledgers")
    await page.keyboard.press("Tab")
    await page.locator("input[name=q]").focus()
    await page.keyboard.type("ord")
    await page.wait_for_timeout(3000)
    typed = await page.evaluate("document.activeElement.value")
    check(typed == "ord", f"what is typed stays in updates: {typed!r}", failures)
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/ledgers?q=ord*")
    rows = await page.locator("tbody tr").count()
    text = await page.locator("caption").inner_text()
    check(rows > 0, f"the search by keyboard found: {text}", failures)


async def watch_repair(page: Page, out: Path) -> list[list[int]]:
    """Wait for a repair, and for its end; return the steps of its bar, each with the ledgers done and all."""
    bar = page.locator("#repair-bar")
    await bar.wait_for(timeout=300_000)
    values: list[list[int]] = []
    over = page.locator("#events-now", has_text="is over")
    while not await over.count():
        found = await bar.evaluate_all("all => all.map((one) => [one.value, one.max])")
        if found and found[0] not in values:
            values.append(found[0])
            if len(values) == 3:
                await page.screenshot(path=out / "repair.png", full_page=True)
        await asyncio.sleep(0.1)
    return values


async def small_cluster(arguments: argparse.Namespace, browser: Browser, directory: Path) -> list[str]:
    """Watch a cluster of five bookies lose one."""
    failures: list[str] = []
    cluster = await start_module(
        "client_aio.cli", "cluster", "up", "-n", "5", "--http", "--lost-bookie-delay", str(DELAY_S),
        "--racks", "2", "--dir", str(directory / "c"), "-o", "jsonl", log=directory / "up.log",
    )  # fmt: skip
    async with cluster:
        document = json.loads(await cluster.line())
        cluster.ignore_output()
        async with client_aio.connect(document["metadata"]) as client:
            await write_ledgers(client, arguments.ledgers)
            writing = asyncio.create_task(go_on_writing(client))
            await asyncio.sleep(25)  # the page lists ledgers every 10 s, and its curves get some points
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            errors: list[str] = []
            page.on("console", lambda one: errors.append(one.text) if one.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            address = f"http://{document['dashboard']['http']}"
            if not arguments.quick:
                await photograph(browser, address, arguments, failures)
            await by_keyboard(page, address, failures)
            rows = (await client.log_metadata("payments")).rows
            writes_to = (await client.ledger_metadata(rows[-1].ledger_id)).last_fragment.bookies
            victim = next(one for one in document["bookies"] if one["bookie_id"] in writes_to)
            await death_and_repair(page, browser, document, victim, arguments, failures)
            check(not errors, f"the browser's console has no error {errors[:3]}", failures)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    return failures


PATHS = {
    "overview": "/",
    "bookies": "/bookies",
    "bookie": "/bookies?bookie=b1",
    "ledgers": "/ledgers",
    "ledger": "/ledger?id=0",
    "logs": "/logs",
    "log": "/log?name=payments",
    "repair": "/repair",
    "events": "/events",
}


def axe_source(path: Path) -> str:
    """Return the script of axe-core: from its npm package, packed or unpacked, or as it is."""
    if path.suffix == ".tgz":
        with tarfile.open(path) as package:
            member = package.extractfile("package/axe.min.js")
            assert member is not None
            return member.read().decode()
    return (path / "axe.min.js" if path.is_dir() else path).read_text()


async def photograph(
    browser: Browser,
    address: str,
    arguments: argparse.Namespace,
    failures: list[str],
    *,
    names: Collection[str] = tuple(PATHS),
    sizes: Collection[str] = tuple(WIDTHS),
    suffix: str = "",
) -> None:
    """Photograph pages at some widths in both schemes, and have axe-core look at each."""
    source = axe_source(arguments.axe) if arguments.axe is not None else None
    for scheme, size in itertools.product(SCHEMES, sizes):
        context = await browser.new_context(
            color_scheme=scheme,  # type: ignore[arg-type]
            viewport={"width": WIDTHS[size], "height": 900},
            bypass_csp=source is not None,  # axe-core is a script from elsewhere
        )
        page = await context.new_page()
        for name in names:
            await page.goto(f"{address}{PATHS[name]}")
            await page.wait_for_timeout(300)
            file = f"{name}{suffix}-{size}-{scheme}.png"
            await page.screenshot(path=arguments.out / file, full_page=True)
            if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                check(False, f"{file} is wider than the screen", failures)
            if source is not None:
                await page.evaluate(source)
                result = await page.evaluate("axe.run()")
                found = [
                    f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:120]}"
                    for one in result["violations"]
                ]
                is_serious = any(one["impact"] in SERIOUS for one in result["violations"])
                check(not is_serious, f"axe-core, {file}: {found or 'no finding'}", failures)
        await context.close()


# --- a large cluster: speed ---------------------------------------------------------------------------


async def serve_bookies(uri: str, directory: Path, count: int) -> None:
    """Run many bookies in this process until it is ended."""
    small_storage = StorageConfig(
        segment_bytes=2 * 1024**2,
        group_bytes_max=512 * 1024,
        space=SpaceLimits(reserve_bytes=512 * 1024, spare_bytes_max=4 * 1024**2),
    )
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await open_store(uri, create=True))
        for number in range(count):
            name = f"b{number + 1}"
            config = BookieConfig(
                bookie_id=name,
                directories=(str(directory / name),),
                listen=("127.0.0.1", 0),
                rack=f"r{number % 5 + 1}",
                storage=small_storage,
            )
            await stack.enter_async_context(
                await Bookie.start(
                    config, store, RealDisk(), rng=random.SystemRandom(),
                    now_ms=lambda: time.time_ns() // 1_000_000, clock=time.perf_counter,
                    effort=time.thread_time,
                )
            )  # fmt: skip
        print("serving", flush=True)
        await asyncio.Event().wait()


def answer_times(address: str, path: str, times: int) -> list[float]:
    """Ask for a page again and again; return the seconds of each answer."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://{address}{path}") as answer:
            answer.read()
        found.append(time.perf_counter() - began)
        time.sleep(0.05)
    return found


def operations(address: str) -> int:
    """Return how many operations the page has had the metadata store do."""
    with urllib.request.urlopen(f"http://{address}/healthz") as answer:
        return int(json.load(answer)["metadata_operations"])


def cpu_of(pid: int) -> float:
    """Return the seconds of a processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_of(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_SMOOTH = """async (seconds) => {
  const tasks = [];
  new PerformanceObserver((list) => tasks.push(...list.getEntries().map((one) => one.duration)))
    .observe({ type: "longtask", buffered: false });
  let frames = 0, running = true, longest = 0, before = performance.now();
  const count = (now) => { frames++; longest = Math.max(longest, now - before); before = now;
                           if (running) requestAnimationFrame(count); };
  requestAnimationFrame(count);
  await new Promise((done) => setTimeout(done, seconds * 1000));
  running = false;
  return { frames: frames / seconds, longest_task: Math.max(0, ...tasks), longest_frame: longest };
}"""


async def large_cluster(arguments: argparse.Namespace, browser: Browser, directory: Path) -> list[str]:
    """Measure the page with many bookies and ledgers."""
    failures: list[str] = []
    uri = f"sqlite://{directory / 'metadata.db'}"
    bookies = await Child.start(
        sys.executable, "-m", "benchmarks.status_page", "--serve", str(arguments.bookies), "--metadata", uri,
        "--dir", str(directory), log=directory / "bookies.log",
    )  # fmt: skip
    async with bookies:
        await bookies.line(lambda text: text == "serving", timeout_s=300)
        async with await open_store(uri) as store:
            await make(arguments, store)
        began = time.monotonic()
        dashboard = await start_module(
            "client_aio.cli", "dashboard", uri, "--http", "0", "-o", "jsonl", log=directory / "page.log"
        )
        async with dashboard:
            address = json.loads(await dashboard.line())["http"]
            dashboard.ignore_output()
            page = await browser.new_page(viewport={"width": 1600, "height": 1000})
            await page.goto(f"http://{address}/")
            await page.wait_for_selector(".pill.ok", timeout=120_000)
            print(f"     {time.monotonic() - began:.1f} s from the start to a page that knows all ledgers")
            await asyncio.sleep(20)
            for path in (*PATHS.values(), "/ledgers?q=9", "/ledgers?bookie=b7", "/ledgers?state=OPEN"):
                times = await asyncio.to_thread(answer_times, address, path, 20)
                text = (
                    f"{path}: {statistics.median(times) * 1e3:.0f} ms median, {max(times) * 1e3:.0f} ms worst"
                )
                check(max(times) <= ANSWER_WITHIN_S, text, failures)
            for path in ("/", "/bookies", "/ledgers"):
                await page.goto(f"http://{address}{path}")
                await page.wait_for_timeout(2000)
                result = await page.evaluate(_SMOOTH, 10)
                text = (
                    f"{path} in the browser: {result['frames']:.0f} frames/s, longest task "
                    f"{result['longest_task']:.0f} ms, longest frame {result['longest_frame']:.0f} ms"
                )
                check(result["longest_task"] < LONGEST_TASK_MS and result["frames"] > 50, text, failures)
                await page.screenshot(path=arguments.out / f"large-{path.strip('/') or 'overview'}.png")
            await page.goto(f"http://{address}/bookies")
            before, reads = cpu_of(dashboard.pid), await asyncio.to_thread(operations, address)
            await asyncio.sleep(30)
            reads = await asyncio.to_thread(operations, address) - reads
            print(f"     {reads * 2:,} metadata operations a minute")
            print(
                f"     the process, with one live page: {(cpu_of(dashboard.pid) - before) / 30:.1%} of a "
                f"processor, {rss_of(dashboard.pid) >> 20} MiB"
            )
    return failures


async def run(arguments: argparse.Namespace) -> int:
    """Run one of the two proofs; return the exit code."""
    from playwright.async_api import async_playwright

    arguments.out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory(prefix="status-page-") as name:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            proof = large_cluster if arguments.large else small_cluster
            failures = await proof(arguments, browser, Path(name))
            await browser.close()
    print(f"{len(failures)} failures", flush=True)
    return 1 if failures else 0


def main() -> int:
    """Run the proof that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("status-page"))
    parser.add_argument("--axe", type=Path, help="axe-core: its package, its folder, or axe.min.js")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--quick", action="store_true", help="no screenshots of the healthy cluster")
    parser.add_argument("--ledgers", type=int, help="default: 60, or 10,000 with --large")
    parser.add_argument("--bookies", type=int, default=50)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--metadata", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ledgers is None:
        arguments.ledgers = 10_000 if arguments.large else 60
    if arguments.serve:
        asyncio.run(serve_bookies(arguments.metadata, arguments.dir, arguments.serve))
        return 0
    return asyncio.run(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
