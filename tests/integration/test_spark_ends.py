"""Where a reading from Spark ends: at what there is, or in an error; never short of it without a word."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import client_aio
from client_aio.spark.batch import LedgerReader
from client_aio.spark.catalog import Catalog
from client_aio.spark.options import parse_read
from client_aio.spark.source import LedgerDataSource
from client_aio.spark.stream import LedgerStreamReader
from metadata.errors import BookieUnavailableError, MetadataUnavailableError
from tests.support.cluster import Cluster
from tests.support.links import Links, roll_behind
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow


async def test_a_complete_ledger_that_is_not_closed_is_planned_to_its_end_though_the_server_lags(
    cluster: Cluster,
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("writer") as writing,
        links.connect("reader") as reading,
        writing.open_log("a", ensemble_size=1, write_quorum=1, ack_quorum=1) as log,
    ):
        await log.append(b"1")
        await reading.ledger_metadata(log.ledger_id)
        gate = await roll_behind(links, log, b"2")
        await cluster.heard(writing, await log.append(b"3"))
        catalog = Catalog(reading, parse_read({"metadata": cluster.uri, "log": "a"}))
        found = await catalog.stretches()
        assert [(one.stretch.last, one.stretch.is_complete) for one in found] == [(1, True), (0, False)]
        gate.opened.set()


async def test_a_batch_read_fails_where_nobody_can_tell_the_end_and_a_stream_waits(cluster: Cluster) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("writer") as writing,
        links.connect("reader", connect_timeout_s=1.0) as reading,
        writing.open_log("a") as log,
    ):
        await cluster.heard(writing, await log.append(b"1"))
        options = parse_read({"metadata": cluster.uri, "log": "a", "outageTimeout": "1"})
        for name in list(cluster.bookies)[:2]:
            links["reader", name].black_hole()
        with pytest.raises(BookieUnavailableError):
            await Catalog(reading, options).stretches()
        (found,) = await Catalog(reading, options, is_stream=True).stretches()
        assert not found.stretch.is_complete


async def test_a_stream_of_what_there_is_now_fails_where_nobody_can_tell_it(cluster: Cluster) -> None:
    """There is no later batch, which would read the rest: the query ended well, short of what there was."""
    async with client_aio.connect(cluster.uri) as client, client.open_log("a") as log:
        await cluster.heard(client, await log.append(b"1"))
        for name in list(cluster.bookies)[:2]:
            await cluster[name].kill()
        options = parse_read({"metadata": cluster.uri, "log": "a", "outageTimeout": "1"})
        stream = await asyncio.to_thread(LedgerStreamReader, options, StructType())
        start = await asyncio.to_thread(stream.initialOffset)
        assert await asyncio.to_thread(stream.latestOffset, start, ReadAllAvailable())
        with pytest.raises(BookieUnavailableError):
            await asyncio.to_thread(stream.prepareForTriggerAvailableNow)
        with pytest.raises(BookieUnavailableError):
            await asyncio.to_thread(stream.latestOffset, start, ReadAllAvailable())
        await asyncio.to_thread(stream.stop)
        for name in list(cluster.bookies)[:2]:
            await cluster[name].start()


async def test_readers_wait_for_bookies_that_are_away(cluster: Cluster) -> None:
    """Plans, offsets and tasks alike: an outage that ends in time ends no query."""
    async with client_aio.connect(cluster.uri) as client, client.open_log("a") as log:
        await cluster.heard(client, await log.append(b"1"))
        stream = await asyncio.to_thread(
            LedgerStreamReader,
            parse_read({"metadata": cluster.uri, "log": "a", "columns": "value"}),
            StructType().add("value", "binary"),
        )

        def rows() -> list[bytes]:
            start = stream.initialOffset()
            stream.prepareForTriggerAvailableNow()
            end = stream.latestOffset(start, ReadAllAvailable())
            (part,) = stream.partitions(start, end)
            killed = asyncio.run_coroutine_threadsafe(kill_all_again(), loop)
            killed.result(30)
            starting = asyncio.run_coroutine_threadsafe(start_later(), loop)
            found = [value for batch in stream.read(part) for value in batch.column("value").to_pylist()]
            starting.result(30)
            return found

        async def kill_all() -> None:
            await asyncio.gather(*(bookie.kill() for bookie in cluster.bookies.values()))

        async def kill_all_again() -> None:
            await are_started.wait()  # the plan needs two of them, and the third may be starting yet
            await kill_all()

        async def start_later() -> None:
            is_waiting.clear()
            await asyncio.wait_for(is_waiting.wait(), 30)
            await asyncio.gather(*(bookie.start() for bookie in cluster.bookies.values()))
            are_started.set()

        loop, is_waiting, are_started = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        class Heard(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "waiting for servers" in record.getMessage():
                    loop.call_soon_threadsafe(is_waiting.set)

        handler = Heard()
        logging.getLogger("client_aio.spark").addHandler(handler)
        try:
            await kill_all()
            planning = asyncio.create_task(asyncio.to_thread(rows))
            await start_later()
            assert await asyncio.wait_for(planning, 60) == [b"1"]
        finally:
            logging.getLogger("client_aio.spark").removeHandler(handler)
            await asyncio.to_thread(stream.stop)


async def test_readers_wait_for_metadata_that_are_away(tmp_path: Path) -> None:
    """Schemas, plans, offsets and tasks alike, each for as long as `outageTimeout` says."""
    schema = StructType().add("value", "binary")
    with ZooKeeperServer(tmp_path / "zookeeper") as server:
        given = {"metadata": f"zk://{server.address}/ledgers", "log": "a", "columns": "value"}
        hurried = given | {"outageTimeout": "1"}
        async with Cluster(tmp_path, uri=given["metadata"]) as cluster:
            async with client_aio.connect(cluster.uri) as client, client.open_log("a") as log:
                await log.append(b"1")
            stream = await asyncio.to_thread(LedgerStreamReader, parse_read(given), schema)
            start = await asyncio.to_thread(stream.initialOffset)
            end = await asyncio.to_thread(stream.latestOffset, start, ReadAllAvailable())
            (part,) = await asyncio.to_thread(stream.partitions, start, end)
            await asyncio.to_thread(server.kill)
            for ask in (LedgerDataSource(hurried).schema, lambda: LedgerReader(parse_read(hurried), schema)):
                with pytest.raises(MetadataUnavailableError):
                    await asyncio.to_thread(ask)

            def values(batches: Iterable[pyarrow.RecordBatch]) -> list[bytes]:
                return [value for batch in batches for value in batch.column("value").to_pylist()]

            waiting = [
                asyncio.create_task(asyncio.to_thread(ask))
                for ask in (
                    lambda: values(stream.read(part)),
                    lambda: stream.latestOffset(start, ReadAllAvailable()),
                    lambda: LedgerDataSource(given).schema(),
                    lambda: len(LedgerReader(parse_read(given), schema).partitions()),
                )
            ]
            await asyncio.to_thread(server.start)
            assert await asyncio.wait_for(asyncio.gather(*waiting), 100) == [[b"1"], end, schema, 1]
            await asyncio.to_thread(stream.stop)
