"""What peers and users chose reaches no terminal and no log unescaped; odd names of directories work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import Hello, encode_request
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31m\x85\u202eevil\u2028line\ncustom forged"
SHOWN = r"\u001b]0;pwned\u0007\u001b[2J\u009b31m\u0085\u202eevil\u2028line\ncustom forged"
UNSAFE = "\x1b\x07\x9b\x85\u202e\u2028"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path, "-n", "1")
    yield running
    running.end()


async def _write(uri: str) -> int:
    one: dict[str, Any] = {
        "ensemble_size": 1,
        "write_quorum": 1,
        "ack_quorum": 1,
        "custom_metadata": {EVIL: b"v"},
    }
    async with client_aio.connect(uri) as client:
        async with client.create_ledger(**one) as ledger:
            await ledger.add_entry(b"x")
        async with client.open_log("orders", **one) as log:
            await log.append(b"x")
    return ledger.ledger_id


async def _greet_and_break_off(address: str) -> None:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = Hello(version_min=3, version_max=4, client=EVIL, instance_id="", bookie_id="")
    writer.write(encode_frame(encode_request(hello, 1)) + bytes(20))  # no frame follows
    await reader.read()  # to the end: the bookie has logged why, and has closed
    writer.close()


def test_text_of_others_is_escaped_in_tables_json_and_logs(small: RunningCluster) -> None:
    cli = small.cli
    ledger_id = asyncio.run(_write(cli.metadata or ""))
    for arguments in (("ledger", "show", str(ledger_id)), ("log", "show", "orders")):
        text = cli.run(*arguments).decode()
        assert f"custom {SHOWN} = b'v'" in text
        assert not set(UNSAFE) & set(text)
        raw = cli.run(*arguments, "-o", "json").decode()
        assert not set(UNSAFE) & set(raw)
        assert json.dumps(EVIL) in json.dumps(json.loads(raw))  # it comes through all the same
    asyncio.run(_greet_and_break_off(small.document["bookies"][0]["addresses"][0]))
    log = (small.directory / "b1.log").read_text()
    assert f'client="{SHOWN}"' in log
    assert not set(UNSAFE) & set(log)


def test_an_error_is_one_escaped_line(small: RunningCluster) -> None:
    error = small.cli.run("ledger", "show", EVIL, code=2).decode()
    assert error.count("\n") == 1
    assert not set(UNSAFE) & set(error)


STRICT_C = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        (b"blanks 100%25 #1?a=b&c", {}),
        (b"new\nline", {}),
        ("größe".encode(), STRICT_C),
        (b"latin-\xe9", {}),
        (b"latin-\xe9", STRICT_C),
    ],
    ids=["blanks", "newline", "letters in C", "no UTF-8", "no UTF-8 in C"],
)
def test_directories_with_odd_names_work(tmp_path: Path, name: bytes, environment: dict[str, str]) -> None:
    directory = os.fsencode(tmp_path) + b"/" + name
    environment = Cli().environment() | environment
    for _ in range(2):  # made, and found again
        cluster = Cli().start("cluster", "up", "-n", "1", "-o", "jsonl", "--dir", directory, env=environment)
        try:
            assert cluster.stdout is not None
            line = cluster.stdout.readline()
            assert line, cluster.communicate(timeout=TIMEOUT_S)
            written = Cli(json.loads(line)["metadata"]).run(
                "ledger", "write", "-", "-e", "1", "-w", "1", "-a", "1", stdin=b"a\n"
            )
            assert written.strip().isdigit()
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.communicate(timeout=TIMEOUT_S)
    assert b"metadata.db" in os.listdir(directory)
