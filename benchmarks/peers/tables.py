"""The runs as tables: markdown that is readable in a terminal as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.results import medians, ratio
from benchmarks.peers.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.systems import System

OURS = "product"
_HEAD = (
    "| system | fsync before ack | per second | p50 ms | p99 ms | failed "
    "| bytes to disk ÷ payload stored: by process, by device "
    "| memory of a server, MiB | client + servers µs | bookie-aio is |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)
_KILL_HEAD = "| system | fsync before ack | pause, ms | failed | bookie-aio takes |\n|---|---|---:|---:|---:|"


def tables(document: dict[str, Any], systems: Sequence[System]) -> str:
    """Return a table for each workload that was measured."""
    runs = document["runs"]
    parts = []
    for workload in WORKLOADS.values():
        row_of = _kill_row if workload.needs_kill else _row
        rows = [row for system in systems if (row := row_of(runs, workload.name, system))]
        if rows:
            head = _KILL_HEAD if workload.needs_kill else _HEAD
            parts.append("\n".join([f"### {workload.title}\n", head, *rows]))
    failed = [run for run in runs if "error" in run]
    if failed:
        lines = [
            f"- {run['workload']} on {run['system']}: {run['error'].splitlines()[-1][:200]}" for run in failed
        ]
        parts.append("\n".join(["Runs that failed:\n", *lines]))
    return "\n\n".join(parts)


def _kill_row(runs: list[dict[str, Any]], workload: str, system: System) -> str | None:
    found = medians(runs, workload, system.name)
    if found is None:
        return None
    times = ratio(runs, workload, OURS, system.name, "pause_ms")
    cells = (
        system.title,
        "yes" if system.is_durable else "no",
        f"{found['pause_ms']:,.0f}",
        f"{found['failed']:,.0f}",
        "" if times is None or system.name == OURS else f"{times:.2f} ×",
    )
    return f"| {' | '.join(cells)} |"


def _row(runs: list[dict[str, Any]], workload: str, system: System) -> str | None:
    found = medians(runs, workload, system.name)
    if found is None:
        return None
    is_read = WORKLOADS[workload].is_read
    # At a fixed rate the latency is compared, since all have the same throughput.
    figure = "p50_ms" if WORKLOADS[workload].rate else "adds_per_s"
    written = [found.get(f"{by}_bytes_per_payload_byte") for by in ("process", "device")]
    times = ratio(runs, workload, OURS, system.name, figure)
    client, servers = found["client_us"], found["servers_us"]
    cells = (
        system.title,
        "–" if is_read else "yes" if system.is_durable else "no",
        f"{found['adds_per_s']:,.0f}",
        "–" if is_read else f"{found['p50_ms']:.2f}",
        "–" if is_read else f"{found['p99_ms']:.2f}",
        f"{found['failed']:,.0f}",
        ", ".join("–" if one is None else f"{one:.2f}" for one in written),
        f"{found['server_mib']:,.0f}",
        f"{client:.1f} + {servers:.1f} = {client + servers:.1f}",
        "" if times is None or system.name == OURS else f"{times:.2f} ×",
    )
    return f"| {' | '.join(cells)} |"
