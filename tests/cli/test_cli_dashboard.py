"""`bookie-aio dashboard` on real processes: what it shows of a death and a repair, and whom it answers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import client_aio.sync
from client_aio.dashboard.server import CONNECTIONS_MAX, LIVE_MAX
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def dashboard(*arguments: str, cli: Cli | None = None) -> Iterator[str]:
    """Run a status page on a free port; gives its address."""
    process = (cli or Cli()).start("dashboard", *arguments, "--http", "0", "-o", "jsonl")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=TIMEOUT_S)[1].decode()
        yield json.loads(line)["http"]
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, b"Traceback" in error) == (0, False), error.decode()


def get(address: str, path: str, **headers: str) -> tuple[int, str, Any]:
    """Ask for a path, and return the status, the body and the headers."""
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


class Live:
    """The live updates of one page."""

    def __init__(self, address: str, path: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        self._connection.request("GET", f"/live?at={path}")
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.regions: dict[str, str] = {}

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()

    def until(self, text: str) -> str:
        """Take updates until a region has a text, and return that region."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for markup in self.regions.values():
                if text in markup:
                    return markup
            assert self.status == 200
            line = self._answer.readline()
            assert line, "the updates ended"
            if line.startswith(b"data: "):
                self.regions.update(json.loads(line.removeprefix(b"data: "))["regions"])
        raise AssertionError(f"{text!r} did not come: {self.regions}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    directory = tmp_path_factory.mktemp("page")
    running = RunningCluster(directory, "-n", "4", "--http", "--lost-bookie-delay", "0.5")
    with client_aio.sync.connect(running.document["metadata"]) as client:
        for _ in range(4):
            with client.create_ledger() as ledger:
                ledger.add_entries([b"a", b"b", b"c"])
        with client.open_log("orders") as log:
            for record in (b"1", b"2", b"3"):
                log.append(record)
            log.flush()
    yield running
    code, error = running.end()
    assert code == 0, error.decode()


@pytest.fixture(scope="module")
def address(running: RunningCluster) -> Iterator[str]:
    """A status page that was started when the ledgers were there."""
    with dashboard(running.document["metadata"]) as found, Live(found, "/") as live:
        live.until("Every ledger has all its copies")
        yield found


def test_cluster_up_runs_a_status_page_and_names_it(running: RunningCluster) -> None:
    row = json.loads((running.directory / "cluster.json").read_text())["dashboard"]
    assert row == running.document["dashboard"]
    assert get(row["http"], "/")[0] == 200
    assert os.path.exists(f"/proc/{row['pid']}") or sys.platform != "linux"


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("/", ["4 of 4", "writable", "b4"]),
        ("/bookies", ["b1", "99th percentile", "<polyline"]),
        ("/bookies?bookie=b1", ["Connections", "127.0.0.1:"]),
        ("/ledgers", ["5 of 5 ledgers", "closed", "orders"]),
        ("/ledgers?q=ORD&state=CLOSED", ["1 of 5 ledgers"]),
        ("/ledgers?bookie=none", ["No ledger fits"]),
        ("/ledger?id=0", ["E=3 Qw=3 Qa=2", "<rect", "0 – 2"]),
        ("/ledger?id=5000000", ["there is no ledger 5000000"]),
        ("/logs", ["1 of 1 logs", "orders"]),
        ("/log?name=orders", ["Head", ":2</strong>", "Ledgers watched"]),
        ("/log?name=%3Cb%3E", ["is not legal", "&lt;b&gt;"]),
        ("/repair", ["Every ledger has all its copies", "Auditor"]),
        ("/events", ["bookie lost"]),
    ],
)
def test_pages_show_the_cluster(address: str, path: str, texts: list[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # the curves need a second answer of the bookies
        status, body, headers = get(address, path)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        missing = [text for text in texts if text not in body]
        if not missing:
            return
        assert time.monotonic() < deadline, (missing, body)
        time.sleep(0.2)


def test_the_page_knows_the_endpoints_that_bookies_announce(running: RunningCluster, address: str) -> None:
    for row in running.document["bookies"]:
        assert row["http"] in get(address, f"/bookies?bookie={row['bookie_id']}")[1]


def test_answers_may_be_framed_by_nobody_and_load_nothing_from_elsewhere(address: str) -> None:
    for path in ("/", "/static/page.js", "/static/page.css", "/static/icon.svg", "/healthz", "/nothing"):
        _, body, headers = get(address, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Set-Cookie" not in headers
        assert "Access-Control-Allow-Origin" not in headers
        assert "https://" not in body


def test_a_rebound_name_gets_nothing_and_nothing_can_be_written(address: str) -> None:
    status, body, _ = get(address, "/ledgers", Host="evil.example")
    assert (status, "ledger" in body) == (421, False)
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    connection.request("POST", "/", body=b"x")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    connection.close()


def test_only_so_many_pages_are_live_and_strangers_keep_no_page_away(address: str) -> None:
    with ExitStack() as stack:
        lives = [stack.enter_context(Live(address, "/bookies")) for _ in range(LIVE_MAX)]
        # The fixture's own page may still be live, too.
        assert [live.status for live in lives[:-1]] == [200] * (LIVE_MAX - 1)
        with Live(address, "/") as refused:
            assert refused.status == 503
        host, port = address.split(":")
        for _ in range(CONNECTIONS_MAX + 20):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert get(address, "/")[0] == 200
        lives[0].until("b1")


def test_a_death_and_the_repair_come_live(running: RunningCluster, address: str) -> None:
    """Last of this cluster's tests: b1 does not come back."""
    with Live(address, "/") as live, Live(address, "/events") as events:
        live.until("4 of 4")
        os.kill(running.pids()["b1"], signal.SIGKILL)
        live.until("3 of 4")
        assert "bookie b1 is down" in live.until("Degraded")  # the list of events has the text, too
        events.until("counts as lost")
        events.until("the repair of ")
        live.until("and no ledger names it")
        assert "in place of b1" in events.regions["events"]
    status, body, _ = get(address, "/ledgers?bookie=b1")
    assert (status, "No ledger fits" in body) == (200, True)


def test_a_metadata_store_that_is_not_there_is_a_page_that_says_so_and_goes_on(tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with dashboard(cli=Cli(uri)) as address, Live(address, "/") as live:
        assert "not known" in live.until("the metadata store:")
        Cli(uri).run("bookie", "format", "--new-cluster", "--dir", str(tmp_path / "b"), "--id", "b1")
        live.until("bookie b1 is down, and no ledger names it")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("sqlite:///x", "--http", "0.0.0.0:0"), "--allow-remote-without-auth"),
        (("sqlite:///x", "--http", "nothing"), "--http"),
        (("http://x",), "http://x"),
        ((), "no metadata store is named"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: tuple[str, ...], complaint: str) -> None:
    error = Cli().run("dashboard", *arguments, code=2).decode()
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = Cli().run("dashboard", "sqlite:///x", "--http", str(port), code=1).decode()
    assert error == (
        f"bookie-aio: the status page cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_without_aiohttp_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['aiohttp'] = None; from client_aio.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "dashboard", "sqlite:///x"],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "bookie-aio: dashboard needs aiohttp: pip install 'bookie-aio[http]'\n"
