"""The examples run as their documentation says, each checking what it wrote by reading it back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import client_aio
from benchmarks.processes import Child
from examples.kv_store import KeyValueStore
from tests.support.zookeeper import find_java

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


async def run_example(tmp_path: Path, name: str, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run an example to its end, expect its exit code, and give what it printed."""
    log = tmp_path / f"{name}.log"
    child = await Child.start(
        sys.executable, f"examples/{name}.py", *arguments, log=log, environment=environment
    )
    async with child:
        assert child.process.stdout is not None
        printed = (await child.process.stdout.read()).decode()
        assert await child.wait() == code, printed + child.log_tail()
    return printed


async def test_quickstart_writes_and_reads(cluster: Cluster, tmp_path: Path) -> None:
    printed = await run_example(tmp_path, "quickstart", cluster.uri)
    assert "entries 0 to 999, then (1000, 1999)" in printed
    assert "2 b'entry 2'" in printed


async def run_spark_example(tmp_path: Path, name: str, *arguments: str) -> str:
    pytest.importorskip("pyspark", reason="the extra [spark] is not installed; `make test` installs it")
    return await run_example(
        tmp_path, name, *arguments,
        JAVA_HOME=find_java().removesuffix("/bin/java"), SPARK_LOCAL_IP="127.0.0.1",
    )  # fmt: skip


async def append(cluster: Cluster, log_name: str) -> None:
    async with client_aio.connect(cluster.uri) as client, client.open_log(log_name) as log:
        await log.append(b"some words, and some more")


@pytest.mark.long(25)
async def test_spark_partitions_write_ledgers_that_read_back_equal(cluster: Cluster, tmp_path: Path) -> None:
    printed = await run_spark_example(tmp_path, "spark_foreach_partition", cluster.uri, "--rows", "20000")
    assert "EQUAL: 20,000 of 20,000 rows read back" in printed
    assert printed.count("ledger ") == 4


@pytest.mark.long(25)
async def test_a_spark_batch_replaces_what_the_log_had_and_reads_it_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    await append(cluster, "orders")
    printed = await run_spark_example(tmp_path, "spark_batch", cluster.uri, "--rows", "20000")
    assert printed.splitlines()[-1] == "EQUAL"


@pytest.mark.long(25)
async def test_a_spark_stream_counts_the_words_of_a_log_that_has_some_already(
    cluster: Cluster, tmp_path: Path
) -> None:
    await append(cluster, "words")
    printed = await run_spark_example(
        tmp_path, "spark_word_count", cluster.uri, "--log", "words", "--times", "3"
    )
    assert printed.splitlines()[-1] == "EQUAL"


@pytest.mark.parametrize(
    ("data", "entries"),
    [(b"one\ntwo\nthree", 3), (bytes(range(256)) * 64, 65), (b"\0" * 3_000_000, 3)],
    ids=["three lines", "binary", "one long line"],
)
async def test_demo_gives_a_file_back_with_a_bookie_lost(tmp_path: Path, data: bytes, entries: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    printed = await run_example(tmp_path, "demo", "--file", str(file))
    assert f"EQUAL: {entries} entries" in printed
    assert "(2 fragments)" in printed
    assert "stopped    all bookies (exit code 0)" in printed


async def test_demo_without_a_spare_goes_on_at_the_ack_quorum(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a line\n" * 100_000)
    printed = await run_example(tmp_path, "demo", "--file", str(file), "--no-spare")
    assert "EQUAL: 100,000 entries" in printed


async def test_demo_says_when_a_file_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    await run_example(tmp_path, "demo", "--file", str(file), code=1)
    assert "too short" in (tmp_path / "demo.log").read_text()


@pytest.mark.parametrize("name", ["kv_store", "kv_store_unbounded"])
async def test_key_value_store_fails_over_and_loses_no_acknowledged_write(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    printed = await run_example(tmp_path, name, cluster.uri, "--rounds", "2")
    assert "EQUAL: all 702 keys have the last value acknowledged" in printed
    assert printed.count("ms detection") == 2


async def test_consumers_go_on_at_their_saved_positions(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(2):  # a second run has a log of its own
        printed = await run_example(tmp_path, "log_consumer", cluster.uri, "--records", "1000")
        assert "EQUAL: both have seen every record once" in printed
        assert printed.count("1,000 records") == 2
        assert "killed consumer 2" in printed


async def test_a_standby_that_started_before_the_first_snapshot_lacks_nothing(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        primary, standby = KeyValueStore(client), KeyValueStore(client)
        await standby.restore()  # there is none yet
        async with client.open_log("kv") as primary.log:
            await primary.put("key", "value")
            await primary.snapshot()
            await primary.put("other", "value")
        await standby.catch_up(follow=False)
        assert standby.data == primary.data
