"""A cluster for each test that asks for it; for those of Spark one session, with one cluster for all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster import Cluster
from tests.support.sparksession import PASSWORD, PASSWORD_ENV, Bookies, start_spark

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three bookies in processes, on an embedded metadata store."""
    async with Cluster(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Four bookies on an embedded metadata store, for the tests of Spark; each test takes its own log."""
    with Bookies(tmp_path_factory.mktemp("spark bookies")) as running:
        yield running


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session in `local[2]`, whose tasks are tried three times."""
    pytest.importorskip("pyspark", reason="the extra [spark] is not installed; `make test` installs it")
    os.environ[PASSWORD_ENV] = PASSWORD  # what the JVM starts with, its Python workers have
    session = start_spark("local[2,3]", tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()
