"""The metrics of a client count its work, on real bookies."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import client_aio
from client_aio import InvalidArgumentError, metrics
from client_aio.autorecovery.service import AutoRecovery
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 30.0


def scrape(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return all samples, by name and the values of their labels, without the label of the client."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "client")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


async def test_adds_failures_ensemble_changes_and_tails_are_counted(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        metrics.register(client, registry=registry)
        async with client.create_ledger() as writer:
            await writer.add_entries(b"x" * 100 for _ in range(300))
            before = scrape(registry)
            assert before["bookie_aio_client_add_seconds_count",] == 300
            assert before["bookie_aio_client_added_bytes_total",] == 30_000
            assert before["bookie_aio_client_adds_in_flight",] == 0
            assert before["bookie_aio_client_in_flight_bytes",] == 0
            assert before["bookie_aio_client_writers", "ledger", "writing"] == 1
            assert before["bookie_aio_client_ensemble_changes_total",] == 0
            assert before["bookie_aio_client_bookies", "writable"] == 4
            assert before["bookie_aio_client_metadata_seconds_count", "create"] >= 1

            await cluster[writer.metadata.last_fragment.bookies[0]].kill()
            # One after another: each is a burst of its own.
            for _ in range(20):
                await writer.add_entry(b"y" * 50)
            while len(writer.metadata.fragments) == 1:
                await writer.add_entry(b"")
            after = scrape(registry)
            assert after["bookie_aio_client_add_seconds_count",] == writer.last_add_confirmed + 1
            assert after["bookie_aio_client_added_bytes_total",] == 31_000
            assert after["bookie_aio_client_seats_failed_total",] >= 1
            assert after["bookie_aio_client_ensemble_changes_total",] >= 1
            assert after["bookie_aio_client_metadata_seconds_count", "set"] >= 1

            async with client.open_ledger(writer.ledger_id) as reader, aclosing(reader.tail()) as tail:
                await anext(tail)
                following = scrape(registry)
                assert following["bookie_aio_client_tails",] == 1
                assert following["bookie_aio_client_tail_lag_entries",] <= reader.last_add_confirmed
            assert scrape(registry)["bookie_aio_client_tails",] == 0
    assert not {name for name, *_ in scrape(registry) if name.startswith("bookie_aio")}


async def test_several_clients_of_one_registry_are_told_apart_by_name(cluster: Cluster) -> None:
    registry = CollectorRegistry()
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        metrics.register(client, name="one", registry=registry)
        metrics.register(client, name="one", registry=registry)
        with pytest.raises(InvalidArgumentError, match="'one' is registered already"):
            metrics.register(other, name="one", registry=registry)
        metrics.register(other, name="two", registry=registry)

        writer = await client.create_ledger()
        await writer.add_entry(b"x")
        async with other.open_ledger(writer.ledger_id, recover=True) as reader:
            assert reader.last_add_confirmed == 0
        async with client.open_log("a", create=True) as log:
            await log.append(b"record")
            text = generate_latest(registry).decode()
        assert text.count("# TYPE bookie_aio_client_writers gauge") == 1
        for line in (
            'bookie_aio_client_writers{client="one",kind="log",state="writing"} 1.0',
            'bookie_aio_client_writers{client="two",kind="log",state="writing"} 0.0',
            'bookie_aio_client_add_seconds_count{client="one"} 2.0',
            'bookie_aio_client_recoveries_total{client="one",outcome="completed"} 0.0',
            'bookie_aio_client_recoveries_total{client="two",outcome="completed"} 1.0',
            'bookie_aio_client_recoveries_total{client="two",outcome="failed"} 0.0',
        ):
            assert line in text.splitlines()
    async with client_aio.connect(cluster.uri) as again:
        metrics.register(again, name="one", registry=registry)  # the other one is closed
        assert 'client="one"' in generate_latest(registry).decode()
        await _auto_recovery_tells_who_audits(again, registry)


async def _auto_recovery_tells_who_audits(client: client_aio.Client, registry: CollectorRegistry) -> None:
    assert ("bookie_aio_autorecovery_auditor",) not in scrape(registry)
    async with AutoRecovery(client) as recovery:
        async with asyncio.timeout(WAIT_S):
            while recovery.auditor is None or not recovery.auditor.record.passes:
                await client.ledger_metadata(0)  # there is no event of a pass
        found = scrape(registry)
    assert found["bookie_aio_autorecovery_auditor",] == 1
    assert found["bookie_aio_autorecovery_passes_total",] >= 1
    assert found["bookie_aio_autorecovery_tasks", "listed"] == 0
    assert found["bookie_aio_autorecovery_read_bytes_total",] == 0
