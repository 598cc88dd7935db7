"""`--http` of `bookie serve` and `cluster up`, on real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bookie_aio.config import BookieConfig
from client_aio.cli.bookie import _announced
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def get(address: str, path: str) -> tuple[int, bytes]:
    """Ask for a path, and return the status and the body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    cluster = RunningCluster(tmp_path_factory.mktemp("http"), "-n", "3", "--http")
    yield cluster
    code, error = cluster.end()
    assert code == 0, error.decode()


def _addresses(running: RunningCluster) -> dict[str, str]:
    rows = json.loads((running.directory / "cluster.json").read_text())["bookies"]
    return {row["bookie_id"]: row["http"] for row in rows}


def test_cluster_json_names_an_endpoint_of_each_bookie(running: RunningCluster) -> None:
    addresses = _addresses(running)
    assert sorted(addresses) == ["b1", "b2", "b3"]
    for bookie_id, address in addresses.items():
        assert address.startswith("127.0.0.1:")
        assert get(address, "/healthz")[0] == get(address, "/readyz")[0] == 200
        assert json.loads(get(address, "/api/v1/bookie")[1])["bookie_id"] == bookie_id


def test_a_bookie_announces_its_endpoint_as_others_reach_it() -> None:
    config = BookieConfig(
        "b1", ("/x",), ("0.0.0.0", 3181), ["b1.example:3181"], allow_remote_without_auth=True
    )
    assert _announced(config, "127.0.0.1:9464") == "", "that of another bookie, on the other's machine"
    here = replace(config, listen=("127.0.0.1", 3181), advertise=None)
    assert _announced(here, "127.0.0.1:9464") == "127.0.0.1:9464"
    assert _announced(config, "0.0.0.0:9464") == "b1.example:9464"
    assert _announced(replace(config, listen=("10.0.0.1", 1), advertise=None), "[::]:80") == "10.0.0.1:80"


def _shape(value: Any) -> Any:
    """Return a JSON value with its keys and types only."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(each) for each in value]
    return (
        "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
    )


def test_documents_are_those_of_the_command_line(running: RunningCluster) -> None:
    address = _addresses(running)["b1"]
    info = running.cli.rows("bookie", "info", "b1")
    assert _shape(json.loads(get(address, "/api/v1/bookie")[1])) == _shape(info)
    status = running.cli.rows("cluster", "status")
    found = json.loads(get(address, "/api/v1/cluster")[1])
    assert (found["condition"], _shape(found["bookies"])) == (status["condition"], _shape(status["bookies"]))
    assert list(found) == list(status)


def test_what_is_written_is_counted_by_the_bookies_that_have_it(running: RunningCluster) -> None:
    def added() -> list[float]:
        texts = [get(address, "/metrics")[1].decode() for address in _addresses(running).values()]
        return [
            sample.value
            for text in texts
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "bookie_aio_entries_added_total"
        ]

    before = added()
    lines = b"".join(b"%d\n" % number for number in range(100))
    running.cli.run("ledger", "write", "-", stdin=lines)
    # A scrape may be a quarter of a second old.
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        counted = [now - first for now, first in zip(added(), before, strict=True)]
        if min(counted) >= 100.0:
            break
        time.sleep(0.05)
    assert counted == [100.0] * 3


def test_one_bookie_audits_and_each_shows_its_worker(running: RunningCluster) -> None:
    def figures(name: str) -> list[float]:
        return [
            sample.value
            for address in _addresses(running).values()
            for family in text_string_to_metric_families(get(address, "/metrics")[1].decode())
            for sample in family.samples
            if sample.name == name
        ]

    deadline = time.monotonic() + TIMEOUT_S
    while sum(found := figures("bookie_aio_autorecovery_auditor")) != 1:
        assert time.monotonic() < deadline, found
    assert len(found) == 3
    assert figures("bookie_aio_autorecovery_ledgers_repaired_total") == [0.0] * 3


def test_a_taken_port_is_one_sentence_and_leaves_no_bookie_behind(tmp_path: Path) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    cli.run("bookie", "format", "--new-cluster", "--dir", str(tmp_path / "other"), "--id", "other")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for where in (port, f":{port}"):
            error = cli.run(
                "bookie", "serve", "--id", "ghost", "--dir", str(tmp_path / "data"), "--http", where,
                "--listen", "127.0.0.1:0", code=1,
            )  # fmt: skip
            assert error.decode() == (
                f"bookie-aio: the bookie's HTTP endpoint cannot listen on 127.0.0.1:{port}: "
                "Address already in use\n"
            )
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = str(one.getsockname()[1])
    same = ("--http", port, "--listen", f"127.0.0.1:{port}")
    cli.run("bookie", "serve", "--id", "ghost", "--dir", str(tmp_path / "data"), *same, code=1)
    assert [row["bookie_id"] for row in cli.rows("bookie", "list")] == ["other"]
    assert not (tmp_path / "data").exists()


def test_without_aiohttp_the_command_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['aiohttp'] = None; from client_aio.cli.main import main; main()"
    arguments = (
        "bookie",
        "serve",
        "--dir",
        str(tmp_path / "data"),
        "--http",
        "0",
        "--metadata",
        "sqlite:///x",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "bookie-aio: --http needs aiohttp: pip install 'bookie-aio[http]'\n"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("0.0.0.0:0", "--allow-remote-without-auth"),
        ("127.0.0.1:http", "--http"),
        ("70000", "--http"),
    ],
)
def test_other_addresses_are_refused(tmp_path: Path, where: str, complaint: str) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    error = cli.run("bookie", "serve", "--dir", str(tmp_path / "data"), "--http", where, code=2).decode()
    assert complaint in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "data").exists()


def test_strangers_that_take_all_http_connections_take_nothing_from_the_bookie(
    running: RunningCluster,
) -> None:
    address = _addresses(running)["b2"]
    host, port = address.split(":")
    with ExitStack() as strangers:
        for _ in range(60):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert get(address, "/readyz")[0] == 200
        ledger = running.cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip()
        assert running.cli.run("ledger", "cat", ledger, "--newline") == b"kept\n"
    connections = json.loads(get(address, "/api/v1/bookie")[1])["connections"]
    assert connections <= 2
