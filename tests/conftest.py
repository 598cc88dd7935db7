"""Fixtures that tests of several packages share."""

from __future__ import annotations

import gc
import os
import signal
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests that share something dear in one of the processes that tests are spread over.

    On the compiled form, those marked `pure` are skipped (docs/WHEELS.md).
    """
    if build.form() == "compiled":
        for item in items:
            if item.get_closest_marker("pure") is not None:
                item.add_marker(pytest.mark.skip(reason="of pure Python only"))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        shared = {"spark", "zookeeper", "zookeeper_ensemble"} & set(getattr(item, "fixturenames", ()))
        if shared:
            item.add_marker(pytest.mark.xdist_group("spark" if "spark" in shared else "zookeeper"))


def pytest_collection_finish() -> None:
    """Keep the collector of garbage off what collecting has made, in all children too: they copy what it touches."""
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
