"""Interrupts of the blocking adapter, each in its own process: nothing hangs, nothing goes on beneath."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

import client_aio
from benchmarks.processes import Child
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# Each script defines `prepare(client)`, which gives a function that blocks until it is interrupted.
FRAME = """
import asyncio, itertools, os, signal, sys, threading
import client_aio.sync
from client_aio.sync import loop_thread

def tasks():
    loop = loop_thread.get_loop_thread().loop
    async def count():
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {{asyncio.current_task()}}
        return sorted(task.get_coro().__qualname__ for task in others)
    return asyncio.run_coroutine_threadsafe(count(), loop).result()

{body}

client = client_aio.sync.connect(sys.argv[1])
blocks = prepare(client)
before = tasks()
timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    blocks()
    print("was not interrupted")
except KeyboardInterrupt:
    timer.cancel()
    after = tasks()
    print("same tasks" if after == before else f"tasks left: {{after}}, before: {{before}}")
with client.create_ledger() as ledger:
    print("goes on" if ledger.add_entry(b"x") == 0 else "wrong id")
{end}
"""
TAIL = """
def prepare(client):
    ledger = client.create_ledger()
    ledger.add_entry(b"first")
    reader = client.open_ledger(ledger.ledger_id)
    return lambda: [0 for _ in reader.tail(0)]
"""
BULK = """
def prepare(client):
    ledger = client.create_ledger()
    return lambda: ledger.add_entries(itertools.repeat(bytes(1000)))
"""
# As when Spark's worker is told to give up: the exception comes out of what feeds the writer.
FEED = """
def prepare(client):
    ledger = client.create_ledger()
    def feed():
        for n in range(10_000):
            yield bytes(1000)
        timer.cancel()  # this one is enough
        signal.raise_signal(signal.SIGINT)
    return lambda: ledger.add_entries(feed())
"""
NOWAIT = """
def prepare(client):
    ledger = client.create_ledger(deferred_sync=True)
    def add():
        while True:
            ledger.add_entry_nowait(bytes(1000))
    def interrupted():
        try:
            add()
        except KeyboardInterrupt:
            ledger.abort()
            raise
    return interrupted
"""

# Each runs `add(ledger)` until it is interrupted, at another instruction each time. The garbage collector may
# end a task of asyncio's in any thread. asyncio has a weak reference to it, whose callback is Python, and an
# interrupt that meets the callback is dropped ("Exception ignored in"). So the interrupt comes again then.
OFTEN = """
import asyncio, concurrent.futures, os, random, signal, sys, threading
import client_aio.sync
from client_aio.sync import loop_thread

def add(ledger):
    {adding}

async def others():
    return len(asyncio.all_tasks()) - 1

def interrupt(caught):
    pause_s = random.uniform(0.005, 0.02)
    while not caught.wait(pause_s):
        os.kill(os.getpid(), signal.SIGINT)
        pause_s = 5.0

# What a dropped interrupt says of itself on standard error is not the client's.
report = sys.unraisablehook
sys.unraisablehook = lambda told: told.exc_type is KeyboardInterrupt or report(told)

client = client_aio.sync.connect(sys.argv[1])
for number in range(80):
    ledger = client.create_ledger(deferred_sync=True)
    caught = threading.Event()
    interrupter = threading.Thread(target=interrupt, args=(caught,))
    try:
        interrupter.start()
        while True:
            add(ledger)
    except KeyboardInterrupt:
        caught.set()
        ledger.abort()
    interrupter.join()
left = asyncio.run_coroutine_threadsafe(others(), loop_thread.get_loop_thread().loop).result()
print("tasks do not pile up" if left < 20 else f"{{left}} tasks are left")
with client.create_ledger() as ledger:
    print("goes on" if ledger.add_entry(b"x") == 0 else "wrong id")
"""
ADDING = {
    "add": "ledger.add_entry(bytes(100))",
    "nowait": "ledger.add_entry_nowait(bytes(100))",
    "callback": "ledger.add_entry_nowait(bytes(100)).add_done_callback(lambda _: None)",
    "bulk": "ledger.add_entries(bytes(100) for _ in range(100))",
    "wait": "adds = [ledger.add_entry_nowait(bytes(100)) for _ in range(500)]; "
    "[concurrent.futures.wait(adds, timeout=0) for _ in range(30)]",
    "as_completed": "[*concurrent.futures.as_completed({ledger.add_entry_nowait(b'') for _ in range(100)})]",
}


@pytest.fixture
async def uri(tmp_path: Path) -> AsyncIterator[str]:
    async with Cluster(tmp_path) as cluster:
        yield cluster.uri


async def output_of(tmp_path: Path, uri: str, body: str, end: str = "") -> str:
    return await printed_by(tmp_path, uri, FRAME.format(body=body, end=end))


async def printed_by(tmp_path: Path, uri: str, script: str) -> str:
    child = await Child.start(sys.executable, "-c", script, uri, log=tmp_path / "script.log")
    async with asyncio.timeout(60), child:
        assert child.process.stdout is not None
        printed = (await child.process.stdout.read()).decode()
        assert await child.wait() == 0, printed + child.log_tail()
    complaints = [line for line in child.log_tail().splitlines() if not line.startswith("ledger=")]
    assert not complaints, "nothing is said on standard error but of bookies that are slow"
    return printed


@pytest.mark.parametrize("body", [TAIL, BULK, FEED, NOWAIT], ids=["tail", "bulk", "feed", "nowait"])
async def test_an_interrupted_call_leaves_no_task_and_a_client_that_goes_on(
    tmp_path: Path, uri: str, body: str
) -> None:
    assert await output_of(tmp_path, uri, body) == "same tasks\ngoes on\n"


async def test_a_script_that_closes_nothing_ends_with_its_registrations_released(
    tmp_path: Path, uri: str
) -> None:
    printed = await output_of(tmp_path, uri, BULK, "print(client.create_ledger().ledger_id)")
    async with client_aio.connect(uri) as client:
        left_open = await client.ledger_metadata(int(printed.split()[-1]))
    assert left_open.state is client_aio.LedgerState.OPEN


@pytest.mark.parametrize("how", ADDING)
async def test_an_interrupt_at_any_instruction_stops_neither_loop_nor_client(
    tmp_path: Path, uri: str, how: str
) -> None:
    printed = await printed_by(tmp_path, uri, OFTEN.format(adding=ADDING[how]))
    assert printed == "tasks do not pile up\ngoes on\n"


# A callback of a weak reference that is Python has "Exception ignored in" for an interrupt.
CALLBACKS = """
import sys
import client_aio.sync

client = client_aio.sync.connect(sys.argv[1])
ledger = client.create_ledger()
called = []

def note(frame, event, argument):
    if event == "call" and "weakref" in frame.f_code.co_filename:
        called.append(frame.f_code.co_name)

def work():
    for _ in range(10):
        ledger.add_entries(bytes(100) for _ in range(100))
        ledger.add_entry(b"x")
        ledger.add_entry_nowait(b"x").result()
    reader = client.open_ledger(ledger.ledger_id)
    assert len(list(reader.read(0, 500))) == 501
    try:
        ledger.add_entries([b"x", 5])
    except client_aio.InvalidArgumentError:
        pass
    for _ in reader.read(0, 500):
        break

sys.setprofile(note)
work()
sys.setprofile(None)
print(called)
"""


async def test_no_callback_that_would_swallow_an_interrupt_runs_on_the_calling_thread(
    tmp_path: Path, uri: str
) -> None:
    assert await printed_by(tmp_path, uri, CALLBACKS) == "[]\n"


NOT_CLOSED = """
import sys, threading, time

threading._register_atexit(time.sleep, 0.3)  # called behind what ends all executors, which registers later
import client_aio.sync

client = client_aio.sync.connect(sys.argv[1])
ledger = client.create_ledger()
ledger.add_entry(b"x")
reader = client.open_ledger(ledger.ledger_id, recover=False)
"""


async def test_a_client_that_nobody_closed_ends_in_silence(tmp_path: Path, uri: str) -> None:
    assert await printed_by(tmp_path, uri, NOT_CLOSED) == ""


AT_EXIT = """
import atexit, sys

def last_words():
    try:
        ledger.add_entry(b"too late")
    except client_aio.ClientClosedError:
        print("too late")

atexit.register(last_words)
import client_aio.sync

ledger = client_aio.sync.connect(sys.argv[1]).create_ledger()
ledger.add_entry(b"in time")
"""


async def test_an_add_at_the_end_of_the_process_is_refused(tmp_path: Path, uri: str) -> None:
    assert await printed_by(tmp_path, uri, AT_EXIT) == "too late\n"
