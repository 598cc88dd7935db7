"""A cluster for the tests of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cli import RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cli import Cli


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Three bookies that no test stops or kills."""
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), "-n", "3")
    yield running
    code, error = running.end()
    assert code == 0, error.decode()


@pytest.fixture
def cli(cluster: RunningCluster) -> Cli:
    """The command, against the cluster."""
    return cluster.cli
