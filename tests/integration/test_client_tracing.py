"""Spans of a client's calls on real bookies: names, attributes, errors; other clients are untouched."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import client_aio
from client_aio import (
    Client,
    InvalidArgumentError,
    LedgerFencedError,
    LedgerReader,
    LedgerWriter,
    LogWriter,
    tracing,
)
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path


class Kept:
    """A tracer whose spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    def taken(self) -> dict[str, Any]:
        """Return the spans since the last call by their names, in the order of their ends."""
        spans = self._exporter.get_finished_spans()
        self._exporter.clear()
        found = {span.name.removeprefix("bookie."): span for span in spans}
        assert len(found) == len(spans)
        return found


async def test_each_call_is_a_span_with_its_ledger_or_log_and_its_outcome(tmp_path: Path) -> None:
    kept = Kept()
    async with Cluster(tmp_path, bookies=3) as cluster, client_aio.connect(cluster.uri) as client:
        tracing.trace(client, tracer=kept.tracer)
        with kept.tracer.start_as_current_span("bookie.request") as request:
            writer = await client.create_ledger()
            future = writer.add_entry(b"one")
            await writer.flush()
        assert await future == 0
        spans = kept.taken()
        ledger_id = writer.ledger_id
        assert list(spans) == ["create_ledger", "ledger.flush", "request"]
        for name in ("create_ledger", "ledger.flush"):
            assert spans[name].attributes == {"bookie.ledger_id": ledger_id}
            assert spans[name].parent.span_id == request.get_span_context().span_id
            assert spans[name].status.status_code is StatusCode.UNSET

        async with client.open_ledger(ledger_id, recover=True) as reader:
            entries = [bytes(entry.data) async for entry in reader.read(0, 0)]
        assert entries == [b"one"]
        spans = kept.taken()
        assert list(spans) == ["open_ledger", "ledger.read", "ledger.close"]
        assert spans["ledger.read"].attributes == {"bookie.ledger_id": ledger_id, "bookie.items": 1}

        writer.add_entry(b"late").add_done_callback(lambda future: future.exception())
        with pytest.raises(LedgerFencedError):
            await writer.flush()
        failed = kept.taken()["ledger.flush"]
        assert failed.status.status_code is StatusCode.ERROR
        assert failed.attributes["bookie.outcome"] == "unknown"
        assert failed.events[0].attributes["exception.type"].endswith("LedgerFencedError")
        await writer.abort()

        async with client.open_log("orders") as log:
            await log.append(b"a record")
        async for _ in client.read_log("orders", follow=False):
            pass
        await client.delete_log("orders")
        spans = kept.taken()
        assert list(spans) == ["open_log", "log.flush", "log.close", "read_log", "delete_log"]
        assert all(span.attributes["bookie.log"] == "orders" for span in spans.values())
        with pytest.raises(InvalidArgumentError, match="traced already"):
            tracing.trace(client)


async def test_adds_have_spans_where_asked_for_and_others_are_untouched(tmp_path: Path) -> None:
    kept = Kept()
    async with (
        Cluster(tmp_path, bookies=3) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        tracing.trace(client, tracer=kept.tracer, adds=True)
        async with client.create_ledger() as writer:
            kept.taken()
            await writer.add_entry(b"one")
            assert list(kept.taken()) == ["ledger.add_entry"]
            with pytest.raises(InvalidArgumentError):
                writer.add_entry("no bytes")  # type: ignore[arg-type]
            assert kept.taken()["ledger.add_entry"].status.status_code is StatusCode.ERROR
        kept.taken()
        async with other.create_ledger() as writer:
            await writer.add_entry(b"one")
            assert "add_entry" not in vars(writer)
            assert "flush" not in vars(writer)
        assert "create_ledger" not in vars(other)
        assert kept.taken() == {}


def test_every_name_that_is_traced_is_that_of_a_method() -> None:
    for name in (*tracing.CALLS, *tracing.OPENINGS, *tracing.STREAMS):
        assert callable(getattr(Client, name)), name
    for name in (*tracing.HANDLE_CALLS, *tracing.HANDLE_STREAMS, *tracing.HANDLE_ADDS):
        assert any(
            hasattr(kind, name)
            for kind in (LedgerWriter, LedgerReader, LogWriter, client_aio.UnboundedLedgerWriter)
        ), name


def test_a_client_without_spans_loads_nothing_of_them() -> None:
    program = "import sys; from client_aio import *; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {
        name for name in done.stdout.split() if name.startswith(("opentelemetry", "client_aio.tracing"))
    }
