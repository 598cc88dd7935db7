"""Fixtures that tests of several packages share."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from metadata import build
from tests.support import forkserver
from tests.support.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of single folders."""
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write what happens into tests/scenarios/*.txt"
    )


JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live a minute on two cores, where the compiler's second stage costs more than it brings: the
job on a Spark cluster of its own takes half the processor time with them."""


_TESTS = Path(__file__).parent
OF_SHORT_TESTS = (
    _TESTS,
    _TESTS / "bookie_aio" / "core",
    _TESTS / "bookie_aio" / "wire",
    _TESTS / "client_aio" / "core",
)
"""Folders whose files are each handed out as a whole."""


# The machine may be busy with something else at any moment: how long an example takes says nothing.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Say what all processes inherit that tests start: signals that interrupt, and how Java runs.

    Begun behind a shell's `&`, they would ignore SIGINT. The settings of the person who runs the tests count
    for none of them.
    """
    os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
    os.environ.setdefault("JDK_JAVA_OPTIONS", JAVA_OPTIONS)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forkserver.enable()


def pytest_unconfigure() -> None:
    """End what this process started for its tests."""
    forkserver.disable()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests for the processes that they are spread over, and begin with those that take longest.

    On the compiled form, those marked `pure` are skipped (docs/WHEELS.md).
    """
    if build.form() == "compiled":
        for item in items:
            if item.get_closest_marker("pure") is not None:
                item.add_marker(pytest.mark.skip(reason="of pure Python only"))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = _group_of(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    # A long test that begins last keeps one process at work while the others have nothing left.
    items.sort(key=lambda item: -sum(mark.args[0] for mark in item.iter_markers("long")))


def _group_of(item: pytest.Item) -> str | None:
    """Return the name of a group that runs in one process, or None for a test that may run anywhere.

    A Spark session, ZooKeeper servers and what a module shares are started by each process that needs them.
    Many short tests in one file take longer to hand out one by one than to run.
    """
    callspec = getattr(item, "callspec", None)
    wanted = {*getattr(item, "fixturenames", ()), *map(str, callspec.params.values() if callspec else ())}
    found = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    scopes = {name: definitions[-1].scope for name, definitions in found.items()}
    if "spark" in wanted or scopes.get("bookies") == "session":
        return "spark"
    if wanted & {"zookeeper", "zookeeper_ensemble"}:
        return "zookeeper"
    is_together = "module" in scopes.values() or item.path.parent in OF_SHORT_TESTS
    return item.path.name if is_together else None


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what was imported and collected.

    It would look through these objects again and again. In a forked child each look copies their pages.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """One ZooKeeper server for the whole run; each test takes a root of its own."""
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperEnsemble]:
    """Three ZooKeeper servers; whoever kills one revives it."""
    with ZooKeeperEnsemble(tmp_path_factory.mktemp("ensemble")) as ensemble:
        yield ensemble
