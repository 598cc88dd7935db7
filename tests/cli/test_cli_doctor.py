"""`doctor`: each check by what it judges, and the command on a real cluster."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from client_aio.autorecovery.survey import AutoRecoveryState, BookieReport, ClusterSurvey
from client_aio.cli import doctor
from client_aio.cli.doctor import CHECKS, DirectoryLook, FailedLook, Observed, examine
from client_aio.core.audit import Condition, Problem
from metadata.access.bookies import available_bookies
from metadata.access.ledgers import LedgerStore
from metadata.access.repair_tasks import RepairTask, TaskRef
from metadata.backends.uri import open_store
from metadata.ids import LEDGER_ID_MAX
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 2**30
FIGURES: dict[str, Any] = {
    "connections": 10,
    "connections_max": 10_000,
    "metadata_set_back": None,
    "storage": {
        "fsync_us": {"p99": 2_000},
        "groups": {"count": 1_000},
        "disk": {
            "free_bytes": 50 * GIB, "total_bytes": 100 * GIB,
            "is_full": False, "is_low": False, "is_tight": False,
        },
        "unread_blocks": 0,
        "damaged_blocks": 0,
        "scrubbed": {"unread": 0, "damaged": 0},
    },
}  # fmt: skip


def healthy() -> Observed:
    """Return a cluster of three bookies on three racks in which nothing is wrong."""
    names = ("b1", "b2", "b3")
    bookies = [BookieReport(name, "writable", rack=f"r{name}") for name in names]
    return Observed(
        cluster=ClusterSurvey(bookies, {}, {}, 0, 0, 0, 0, AutoRecoveryState(), []),
        figures={name: copy.deepcopy(FIGURES) for name in names},
        versions=dict.fromkeys(names, "0.1.0"),
        hosts={name: f"10.0.0.{number}" for number, name in enumerate(names)},
        clocks=dict.fromkeys(names, 0.0),
        metadata_s=[0.001] * 9,
        ids_drawn=96,
        id_floor=64,
        directories=[DirectoryLook("/data", 5 * GIB, 9 * GIB, [0.001] * 20, True, True)],
        descriptors=65_536,
    )


def figures(path: str, value: Any) -> Callable[[Observed], None]:
    """Return what sets a figure of b2, by its keys."""

    def change(seen: Observed) -> None:
        *above, last = path.split(".")
        found = seen.figures["b2"]
        for key in above:
            found = found[key]
        found[last] = value

    return change


def racks(**names: str) -> Callable[[Observed], None]:
    def change(seen: Observed) -> None:
        assert seen.cluster is not None
        for one in seen.cluster.bookies:
            one.rack = names.get(one.bookie_id, "")

    return change


def directory(**changes: Any) -> Callable[[Observed], None]:
    def change(seen: Observed) -> None:
        seen.directories[0] = seen.directories[0]._replace(**changes)

    return change


def attribute(name: str, value: Any) -> Callable[[Observed], None]:
    return lambda seen: setattr(seen, name, value)


def problem(seen: Observed) -> None:
    assert seen.cluster is not None
    seen.cluster.problems.append(Problem(Condition.DEGRADED, "b3 is down"))


def failed_task(seen: Observed) -> None:
    assert seen.cluster is not None
    task = RepairTask({"down": ["b3"]}, 0, attempts=7, error="no bookie returned entry 3")
    seen.cluster.auto_recovery.tasks.append((TaskRef(1, 9, "t"), task))


WRONG: list[tuple[str, Callable[[Observed], None], str, str]] = [
    ("cluster", problem, "cluster", "b3 is down"),
    ("damage", figures("storage.unread_blocks", 2), "b2", "did not return 2 blocks"),
    ("damage", figures("storage.scrubbed.damaged", 1), "b2", "1 blocks had a wrong checksum"),
    ("disk space", figures("storage.disk.is_tight", True), "b2", "50.0 of 100.0 GiB free: it will be"),
    ("disk space", figures("storage.disk.is_low", True), "b2", "takes no entries"),
    ("fsync", figures("storage.fsync_us.p99", 250_000), "b2", "250 ms over 1,000 groups"),
    ("fsync", directory(fsync_s=[0.001, 0.3]), "/data", "slowest of 2 fsyncs took 300 ms"),
    ("descriptors", figures("connections", 9_000), "b2", "9,000 connections of 10,000"),
    ("descriptors", attribute("descriptors", 1024), "this machine", "1,024"),
    ("racks", racks(b1="r1", b2="r1", b3="r1"), "cluster", "all 3 bookies are on rack r1"),
    ("racks", racks(b1="r1", b2="r2"), "b3", "names no rack"),
    ("racks", racks(), "cluster", "no bookie on 3 machines"),
    (
        "metadata latency",
        attribute("metadata_s", [0.001, 0.4, 0.4]),
        "metadata store",
        "400 ms in the median of 3",
    ),
    ("metadata set back", figures("metadata_set_back", {"in_doubt_below": 9}), "b2", "older than the bookie"),
    ("metadata set back", figures("metadata_set_back", {"in_doubt_below": 0}), "b2", "nobody has accepted"),
    ("versions", attribute("versions", {"b1": "1", "b2": "2", "b3": "1"}), "cluster", "1: b1, b3; 2: b2"),
    ("clocks", attribute("clocks", {"b2": -90.4}), "b2", "90 s behind"),
    ("clocks", attribute("clocks", {"b2": 3.0}), "b2", "3 s ahead of"),
    ("recoveries", attribute("stuck", [3, 5]), "2 ledgers", "3, 5"),
    ("recoveries", failed_task, "ledger 9", "7 attempts to repair it failed: no bookie returned entry 3"),
    ("ledger ids", attribute("id_floor", 128), "metadata store", "ids below 128 are refused"),
    ("ledger ids", attribute("ids_drawn", LEDGER_ID_MAX - 5), "metadata store", "have been given out"),
    ("file systems", directory(tells_data=False), "/data", "SEEK_DATA"),
    ("file systems", directory(reserves=False), "/data", "fallocate"),
    (
        "file systems",
        attribute("failed_directories", [FailedLook("/full", "No space left on device", errno.ENOSPC)]),
        "/full",
        "4 MiB cannot be reserved, written and synced: No space left on device",
    ),
]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert examine(healthy()) == []
    assert examine(Observed()) == []


@pytest.mark.parametrize(("check", "change", "subject", "evidence"), WRONG)
def test_a_fault_is_found_with_its_evidence_and_what_to_do(
    check: str, change: Callable[[Observed], None], subject: str, evidence: str
) -> None:
    seen = healthy()
    change(seen)
    (found,) = examine(seen)
    assert (found.check, found.subject) == (check, subject)
    assert evidence in found.evidence
    assert found.action


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check for check, _, _, _ in WRONG} == set(CHECKS)


@pytest.mark.parametrize(
    ("most", "first"),
    [
        (10_000, "raise `bookie.limits.connections_max`"),
        (704, "raise the lower one of the hard limit"),
        (20_000, "raise the lower one of the hard limit"),
    ],
)
def test_the_limit_of_connections_that_binds_is_the_one_to_raise(most: int, first: str) -> None:
    seen = healthy()
    figures("connections", most)(seen)
    figures("connections_max", most)(seen)
    (found,) = examine(seen)
    assert first in found.action


@pytest.mark.parametrize(
    ("number", "action"),
    [
        (errno.ENOSPC, "free space"), (errno.EROFS, "mount it writable"), (errno.EIO, "replace the disk"),
        (errno.EACCES, "as the bookie's user"), (errno.EFBIG, "limits of processes"), (None, "limits of"),
    ],
)  # fmt: skip
def test_what_to_do_about_a_directory_depends_on_its_error(number: int | None, action: str) -> None:
    (found,) = examine(Observed(failed_directories=[FailedLook("/data", "it failed", number)]))
    assert action in found.action


def test_few_groups_say_nothing_of_a_disk() -> None:
    seen = healthy()
    figures("storage.fsync_us.p99", 900_000)(seen)
    figures("storage.groups.count", 10)(seen)
    assert examine(seen) == []


def test_racks_do_not_matter_on_one_machine() -> None:
    seen = healthy()
    racks()(seen)
    seen.hosts = dict.fromkeys(seen.hosts, "127.0.0.1")
    assert examine(seen) == []


async def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    look = await doctor.look_at_directory(tmp_path)
    assert look.total_bytes >= look.free_bytes > 0
    assert min(look.fsync_s) > 0
    assert os.listdir(tmp_path) == []


class _Clock(BaseHTTPRequestHandler):
    """Tells a time that is off."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + float(self.server.ahead_s))  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("ahead_s", [0.0, 40.0, -40.0])
def test_the_skew_of_a_clock_is_known_within_a_second(ahead_s: float) -> None:
    with HTTPServer(("127.0.0.1", 0), _Clock) as server:
        server.ahead_s = ahead_s  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found = doctor._clock_ahead_s("127.0.0.1", server.server_address[1])
        server.shutdown()
        thread.join()
    assert abs(found) <= abs(ahead_s)
    assert abs(found - ahead_s) <= 1.5


# --- a real cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    cluster = RunningCluster(tmp_path_factory.mktemp("doctor"), "-n", "2", "--racks", "2", "--http")
    yield cluster
    code, error = cluster.end()
    assert code == 0, error.decode()


def checks_of(document: Any) -> set[str]:
    return {one["check"] for one in document["findings"]}


async def test_a_cluster_is_looked_at_in_full(running: RunningCluster, tmp_path: Path) -> None:
    cli = running.cli
    arguments = ("doctor", "--dir", str(tmp_path), "--watch", "0.1")
    # The disk of a machine that tests run on may be slow or full at any moment; the rest is as it should be.
    first = cli.start(*arguments, "-o", "json")
    out, error = first.communicate()
    document = json.loads(out)
    assert document["unseen"] == []
    assert checks_of(document) <= {"fsync", "disk space", "metadata latency", "descriptors", "cluster"}, error
    assert first.returncode == int(bool(document["findings"]))

    ledger = int(cli.run("ledger", "create", "-e", "2", "-w", "2", "-a", "1"))
    async with await open_store(str(cli.metadata)) as store:
        ledgers = LedgerStore(store)
        metadata, read = await ledgers.read(ledger)
        await ledgers.compare_and_set(metadata.begin_recovery(), read)
    second = cli.start(*arguments, "-o", "json")
    out, _ = second.communicate()
    (found,) = [one for one in json.loads(out)["findings"] if one["check"] == "recoveries"]
    assert second.returncode == 1
    assert str(ledger) in found["evidence"]
    cli.run("ledger", "recover", str(ledger))

    text = cli.start(*arguments).communicate()[0].decode()
    assert "not seen" not in text
    assert "recoveries" not in text


def cannot_write_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


async def test_a_directory_that_cannot_be_tried_costs_no_other_finding(
    running: RunningCluster, tmp_path: Path
) -> None:
    cli = running.cli
    ledger = int(cli.run("ledger", "create", "-e", "2", "-w", "2", "-a", "1"))
    async with await open_store(str(cli.metadata)) as store:
        ledgers = LedgerStore(store)
        metadata, read = await ledgers.read(ledger)
        await ledgers.compare_and_set(metadata.begin_recovery(), read)
    arguments = ("doctor", "--watch", "0.1", "-o", "json")
    process = cli.start(*arguments, "--dir", str(tmp_path), preexec_fn=cannot_write_large_files)
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, error
    document = json.loads(out)
    (found,) = [one for one in document["findings"] if one["check"] == "file systems"]
    assert (found["subject"], os.listdir(tmp_path)) == (str(tmp_path), [])
    assert "File too large" in found["evidence"]
    assert "recoveries" in checks_of(document)
    cli.run("ledger", "recover", str(ledger))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that nobody can write to")
def test_the_directories_behind_one_that_cannot_be_tried_are_tried(tmp_path: Path) -> None:
    arguments = ("doctor", "-o", "json", "--dir", "/proc", "--dir")
    for last in ("/proc/self", str(tmp_path)):
        process = Cli().start(*arguments, last)
        out, error = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1, error
        failed = [one["subject"] for one in json.loads(out)["findings"] if one["check"] == "file systems"]
        assert failed == ["/proc", *([last] if last.startswith("/proc") else [])]


async def test_bookies_announce_their_release(running: RunningCluster) -> None:
    async with await open_store(str(running.cli.metadata)) as store:
        announced = await available_bookies(store)
    assert [one.properties["version"] for one in announced.values()] == [version("bookie-aio")] * 2


def test_a_directory_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    nowhere = Cli(f"sqlite://{tmp_path}/nowhere.db")
    for path in (tmp_path / "nosuch", tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        # Before the cluster is looked at: there is none.
        error = nowhere.run("doctor", "--dir", str(tmp_path), "--dir", str(path), code=2)
        assert str(path).encode() in error.replace(b"\n", b"")
    assert b"is a file" in nowhere.run("doctor", "--dir", str(tmp_path / "file"), code=2)
    assert b"no metadata store is named" in Cli().run("doctor", code=2)
