"""Fill docs/BENCHMARKS.md and the README with the measured figures: `python -m benchmarks.document`.

    python -m benchmarks.document [--peers docs/benchmarks/peers.json] [--suite docs/benchmarks/suite.json]
        [--storage docs/benchmarks/storage_growth.jsonl]

Replaces the text between the pages' markers by tables of the files, and draws the plots beside them. A part
without figures is shown as not measured. The text around the tables is written by hand. The page's
table of dates, machines and commits is, too: update it after a measurement.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import SYSTEMS
from benchmarks.peers.results import medians, ratio
from benchmarks.peers.summary import summary
from benchmarks.peers.tables import OURS, tables

PAGE = Path("docs/BENCHMARKS.md")
README = Path("README.md")
FIGURES = Path("docs/benchmarks")
_NOT_MEASURED = "*Not measured yet.*"

Document = dict[str, Any]


def between(page: str, name: str, text: str) -> str:
    """Put text between the markers of a name.

    Raises:
        ValueError: the page has no such markers.
    """
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no place for {name!r}")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table; all but the first column are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine_text(document: Document) -> str:
    """Return the machine of the measurement as text."""
    one = document["machine"]
    build = f", {one['python_build']}" if "python_build" in one else ""
    packages = ", ".join(f"{name} {version}" for name, version in one["packages"].items())
    return (
        f"{one['processor']}, {one['cores']} cores, {one.get('memory_gib', '?')} GiB of memory; "
        f"{one['system']}; Python {one['python']}{build}; {packages}."
    )


def peers_text(document: Document) -> str:
    """Return machine, settings and all tables of the comparison."""
    settings, runs = document["settings"], document["runs"]
    rounds = 1 + max((run["round"] for run in runs), default=-1)
    loads = [run["load_before"] for run in runs if "load_before" in run]
    head = (
        f"{machine_text(document)} {rounds} rounds; {settings['warm_up_s']:g} s of warm-up, "
        f"{settings['measured_s']:g} s measured; load average before a run "
        f"{min(loads, default=0):.1f} to {max(loads, default=0):.1f}."
    )
    return f"{head}\n\n{tables(document, SYSTEMS)}"


Wanted = tuple[str, str, float | None, float, bool]
"""Workload, figure, the measured value, the aim, whether more is better."""


def peers_targets(runs: list[Document], ours: str) -> list[Wanted]:
    """Return the aims for ratios of one form of the product to peers, beside the measured ratios."""

    def times(workload: str, others: Sequence[str], figure: str = "adds_per_s") -> float | None:
        found = [ratio(runs, workload, ours, other, figure) for other in others]
        known = [one for one in found if one is not None]
        if not known:
            return None
        return min(known) if figure == "adds_per_s" else max(known)

    def follower(figure: str) -> float | None:
        return times("1k-follow", (*best, "kafka-flush"), figure)

    growing = "product-growing" if ours == OURS else ""
    best = ("bookkeeper", "bookkeeper-tuned")
    readers = (*best, "kafka", "kafka-flush", "nats")
    return [
        ("1 KiB, 1,000 in flight", "× BookKeeper, tuned", times("1k-1000", best[1:]), 5.5, True),
        ("", "× Kafka without fsync", times("1k-1000", ("kafka",)), 1, True),
        ("", "× NATS without sync", times("1k-1000", ("nats",)), 1, True),
        ("", "× ceiling, recycled", times("1k-1000", ("ceiling-recycled",)), 0.85, True),
        ("", "p99 ÷ that of BookKeeper, tuned", times("1k-1000", best[1:], "p99_ms"), 0.2, False),
        (
            "1 KiB, 1,000 in flight, only growing",
            "× ceiling, fresh",
            _growing(runs, growing, "ceiling-fresh"),
            0.6,
            True,
        ),
        ("", "× BookKeeper's best", _growing(runs, growing, *best), 2, True),
        ("100 B, 10,000 in flight", "× BookKeeper's best", times("100b-10000", best), 4, True),
        ("", "× Kafka with flush", times("100b-10000", ("kafka-flush",)), 1.5, True),
        ("", "× Kafka without fsync", times("100b-10000", ("kafka",)), 1, True),
        ("64 KiB, 64 in flight", "× BookKeeper's best", times("64k-64", best), 3, True),
        (
            "1 KiB, one in flight",
            "p50 ÷ that of BookKeeper, tuned",
            times("1k-1", best[1:], "p50_ms"),
            1.15,
            False,
        ),
        ("", "p99 ÷ that of BookKeeper, tuned", times("1k-1", best[1:], "p99_ms"), 0.5, False),
        ("1 KiB, 1,000 ledgers", "× BookKeeper, tuned", times("1k-ledgers", best[1:]), 1.5, True),
        ("", "p99 ÷ that of BookKeeper, tuned", times("1k-ledgers", best[1:], "p99_ms"), 1, False),
        ("1 KiB, 1,000 logs", "× Kafka with flush", times("1k-logs", ("kafka-flush",)), 1, True),
        ("append to follower", "p50 ÷ the best of BookKeeper and Kafka", follower("p50_ms"), 1, False),
        ("", "p99 ÷ the best of BookKeeper and Kafka", follower("p99_ms"), 1, False),
        ("catch-up read", "× the best", times("1k-read", readers), 4, True),
        ("catch-up read from disk", "× the best", times("1k-cold", readers), 1, True),
        (
            "bytes written by the bookies, 1 KiB, 1,000 in flight",
            "÷ payload",
            _written(runs, "1k-1000", ours),
            1.10,
            False,
        ),
        ("bytes written by the bookies, 64 KiB", "÷ payload", _written(runs, "64k-64", ours), 1.10, False),
        ("bytes written by the bookies, 100 B", "÷ payload", _written(runs, "100b-10000", ours), 1.5, False),
        ("bytes written by the bookies, one in flight", "÷ payload", _written(runs, "1k-1", ours), 5, False),
    ]


def own_targets(suite: Document, storage: list[Document]) -> list[Wanted]:
    """Return the aims without a peer: memory, restart, adds during compaction."""
    cases = {name: part["cases"] for name, part in suite["parts"].items()}
    memory = [case["bookie_mib"] for case in cases.get("memory", {}).values()]
    restart = [case["seconds"] for case in cases.get("restart", {}).values()]
    before, after = reclaiming_ratios(storage)
    return [
        (
            "memory of a bookie, 10,000,000 entries in 10,000 ledgers", "MiB",
            memory[-1] if memory else None, 300, False,
        ),
        (
            "restart after `kill -9`, 10 GiB stored", "seconds to serve",
            restart[-1] if restart else None, 1.5, False,
        ),
        ("", "÷ that with 1 GiB", restart[-1] / restart[-2] if restart else None, 1.5, False),
        ("adds while half of the data is reclaimed", "p99 ÷ that before", before, 2, False),
        ("", "p99 ÷ that after", after, 2, False),
    ]  # fmt: skip


def reclaiming_ratios(storage: list[Document]) -> tuple[float | None, float | None]:
    """Return an add's p99 while data is reclaimed ÷ that before it, and ÷ that after it."""
    pauses = [line for line in storage if line["what"] == "pauses"]
    middle = next((n for n, line in enumerate(pauses) if line["during"] == "reclaiming"), None)
    if middle is None:
        return None, None

    def times(quiet: list[Document]) -> float | None:
        found = [line["p99_ms"] for line in quiet if line["during"] == "quiet"]
        return pauses[middle]["p99_ms"] / found[0] if found else None

    return times(pauses[:middle][::-1]), times(pauses[middle + 1 :])


def targets_text(pure: list[Wanted], compiled: list[Wanted]) -> str:
    """Lay out the aims beside the measured figures of the pure form and of the compiled one.

    Args:
        compiled: the aims to which the first ones of `pure` are equal.
    """
    rows = []
    for n, (workload, what, found, aim, is_more) in enumerate(pure):
        other = compiled[n][2] if n < len(compiled) else None
        sign = "≥" if is_more else "≤"
        cells = [cell for one in (found, other) for cell in _met(one, aim, is_more=is_more)]
        rows.append((workload, what, f"{sign} {aim:.3g}", *cells))
    return table(("workload", "figure", "aim", "pure", "met", "compiled", "met"), rows)


def _met(found: float | None, aim: float, *, is_more: bool) -> tuple[str, str]:
    if found is None:
        return "–", ""
    is_met = found >= aim if is_more else found <= aim
    return f"{found:.2f}", "yes" if is_met else "no"


def _growing(runs: list[Document], ours: str, *others: str) -> float | None:
    found = [ratio(runs, "1k-1000", ours, other) for other in others]
    known = [one for one in found if one is not None]
    return min(known) if known else None


def _written(runs: list[Document], workload: str, ours: str) -> float | None:
    found = medians(runs, workload, ours)
    if found is None:
        return None
    # The aims are set in the processes' own count. The device's count includes the writes of other processes.
    return found.get("process_bytes_per_payload_byte")


def _latencies(case: Document) -> tuple[str, ...]:
    return tuple(f"{case['latency_ms'][name]:.2f}" for name in ("p50", "p99", "p99.9"))


def _adds(name: str, case: Document) -> tuple[str, ...]:
    return (
        name,
        f"{case['adds_per_s']:,.0f}",
        *_latencies(case),
        f"{case['client_us']:.1f}",
        f"{case['bookies_us']:.1f}",
        f"{case['device_bytes_per_payload_byte']:.2f}",
        f"{case['bookie_mib']:,.0f}",
    )


_ADDS = (
    "", "adds/s", "p50 ms", "p99 ms", "p99.9 ms", "client µs/add", "bookies µs/add", "device bytes ÷ payload",
    "bookie MiB",
)  # fmt: skip
_Layout = tuple[Sequence[str], Callable[[str, Document], Sequence[str]]]
_OF_ADDS = ("closed", "open", "ensembles", "ledgers", "growth", "fairness")
_ROWS: dict[str, _Layout] = dict.fromkeys(_OF_ADDS, (_ADDS, _adds))
_ROWS |= {
    "tail": (
        ("", "p50 ms", "p99 ms", "p99.9 ms"),
        lambda name, case: (name, *_latencies(case)),
    ),
    "reads": (
        ("", "entries/s", "MB/s", "client µs/entry"),
        lambda name, case: (
            name, f"{case['entries_per_s']:,.0f}", f"{case['mb_per_s']:,.0f}", f"{case['client_us']:.2f}",
        ),
    ),
    "processor": (
        ("ledgers × adds × bytes", "client µs/add", "one bookie µs/add"),
        lambda name, case: (name, f"{case['client_us']:.2f}", f"{case['bookie_us']:.2f}"),
    ),
    "connections": (
        ("", "memory of all, MiB", "ping p50 ms", "ping p99 ms", "writer p50 ms", "writer p99 ms"),
        lambda name, case: (
            name, f"{case['grown_mib']:.1f}", f"{case['pings']['latency_ms']['p50']:.2f}",
            f"{case['pings']['latency_ms']['p99']:.2f}", *_latencies(case)[:2],
        ),
    ),
    "restart": (
        ("stored", "seconds to serve", "each"),
        lambda name, case: (name, f"{case['seconds']:.2f}", ", ".join(f"{one:.2f}" for one in case["all"])),
    ),
    "memory": (
        ("stored", "bookie MiB", "files of three bookies, MiB"),
        lambda name, case: (
            name, f"{case['bookie_mib']:.0f}", f"{case.get('disk_bytes', 0) / (1 << 20):,.0f}",
        ),
    ),
    "soak": (
        ("", "adds", "failed", "ledgers deleted"),
        lambda name, case: (name, f"{case['adds']:,}", f"{case['failed']:,}", f"{case['deleted']:,}"),
    ),
}  # fmt: skip


def part_text(name: str, document: Document) -> str:
    """Return the table of a part of the suite, and its plot if there is one."""
    part = document["parts"].get(name)
    if not part or not part["cases"]:
        return _NOT_MEASURED
    head, row = _ROWS[name]
    text = table(head, [row(case, figures) for case, figures in part["cases"].items()])
    settings = part["settings"]
    text += (
        f"\n\n{part['at'][:10]}; {settings['seconds']:g} s each after {settings['warm_up_s']:g} s of warm-up"
    )
    text += f"; scaled by {settings['scale']:g}" if settings["scale"] != 1 else ""
    loads = [case["load_before"] for case in part["cases"].values()]
    text += f"; load average before {min(loads):.1f} to {max(loads):.1f}."
    if (FIGURES / f"{name}.svg").exists():
        text += f"\n\n![{name}](benchmarks/{name}.svg)"
    return text


_STORAGE: dict[str, _Layout] = {
    "storage-restart": (
        ("stored, entries to a block, ledgers", "seconds to open", "processor s", "segments"),
        lambda name, case: (
            f"{case['stored_gib']:g} GiB, {case['entries_per_block']}, {case['ledgers']:,}",
            f"{case['seconds']:.2f}", f"{case['cpu_s']:.2f}", f"{case['segments']['count']:,}",
        ),
    ),
    "storage-cost": (
        ("entries stored, ledgers", "processor µs/add", "p50 ms", "p99 ms"),
        lambda name, case: (
            f"{case['stored']:,}, {case['ledgers']:,}",
            f"{case['cpu_us']:.2f}", f"{case['p50_ms']:.2f}", f"{case['p99_ms']:.2f}",
        ),
    ),
    "storage-pauses": (
        ("", "p50 ms", "p99 ms", "p99.9 ms", "longest ms"),
        lambda name, case: (
            case["during"], f"{case['p50_ms']:.2f}", f"{case['p99_ms']:.2f}", f"{case['p999_ms']:.2f}",
            f"{case['max_ms']:.1f}",
        ),
    ),
    "storage-bytes": (
        ("", "bytes written ÷ payload", "MiB/s"),
        lambda name, case: (case["load"], f"{case['device_per_payload']:.2f}", f"{case['mib_per_s']:,}"),
    ),
}  # fmt: skip


def storage_text(name: str, lines: list[Document]) -> str:
    """Return the table of one kind of lines that `benchmarks.storage_growth` printed."""
    head, row = _STORAGE[name]
    cases = [line for line in lines if f"storage-{line['what']}" == name]
    return table(head, [row("", case) for case in cases]) if cases else _NOT_MEASURED


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fill docs/BENCHMARKS.md and the README with what was measured."
    )
    parser.add_argument("--peers", type=Path, default=FIGURES / "peers.json")
    parser.add_argument("--suite", type=Path, default=FIGURES / "suite.json")
    parser.add_argument("--storage", type=Path, default=FIGURES / "storage_growth.jsonl")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    peers: Document = {"runs": []}
    suite: Document = {"parts": {}}
    storage: list[Document] = []
    if arguments.storage.exists():
        storage = [json.loads(line) for line in arguments.storage.read_text().splitlines()]
        for name in _STORAGE:
            page = between(page, name, storage_text(name, storage))
    if arguments.peers.exists():
        peers = json.loads(arguments.peers.read_text())
        page = between(page, "peers", peers_text(peers))
        text = f"{summary(peers)} {machine_text(peers)}"
        README.write_text(between(README.read_text(), "peers", text))
    if arguments.suite.exists():
        from benchmarks.suite import plots

        suite = json.loads(arguments.suite.read_text())
        plots.draw(suite, FIGURES)
        for name in _ROWS:
            page = between(page, name, part_text(name, suite))
        page = between(page, "machine", machine_text(suite))
    runs = peers["runs"]
    pure = peers_targets(runs, OURS) + own_targets(suite, storage)
    page = between(page, "targets", targets_text(pure, peers_targets(runs, "product-compiled")))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
