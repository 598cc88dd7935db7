"""What the benchmarks keep of their runs, and how it gets into the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import (
    _ROWS,
    _STORAGE,
    PAGE,
    README,
    between,
    peers_targets,
    reclaiming_ratios,
    targets_text,
)
from benchmarks.load import Load
from benchmarks.machine import build_of
from benchmarks.peers.__main__ import SYSTEMS, taken_up
from benchmarks.peers.results import Results, medians, ratio
from benchmarks.peers.summary import summary
from benchmarks.peers.tables import tables
from benchmarks.peers.workloads import WORKLOADS, Workload

SETTINGS = {"measured_s": 1}


def run(system: str, round_: int, adds_per_s: float, **more: Any) -> dict[str, Any]:
    return {"workload": "1k-1", "system": system, "round": round_, "adds_per_s": adds_per_s, **more}


def test_runs_that_are_in_the_file_are_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "peers.json"
    Results(path, {}, SETTINGS).add(run("a", 0, 5))
    again = Results(path, {}, SETTINGS)
    assert again.has("1k-1", "a", 0)
    assert not again.has("1k-1", "a", 1)
    assert not again.has("1k-1", "b", 0)
    again.add(run("a", 1, 6))
    assert len(Results.read(path).document["runs"]) == 2


def test_runs_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    Results(path, {}, SETTINGS).add(run("a", 0, 5))
    with pytest.raises(ValueError, match="was measured with"):
        Results(path, {}, {"measured_s": 2})


def test_a_file_of_other_times_ends_the_program_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    taken_up(path, {"measured_s": 10.0}).add(run("a", 0, 5))
    assert taken_up(path, {"measured_s": 10.0}).has("1k-1", "a", 0)
    with pytest.raises(SystemExit, match=r"was measured with .* give the same times") as ended:
        taken_up(path, {"measured_s": 20.0})
    assert "\n" not in str(ended.value)


def test_the_command_that_the_page_prints_takes_up_the_file_beside_it() -> None:
    printed = re.search(r"bench-peers ARGS=\"--json (\S+) --seconds (\S+) --settle (\S+)\"", PAGE.read_text())
    assert printed is not None
    settings = json.loads(Path(printed[1]).read_text())["settings"]
    assert (settings["measured_s"], settings["settle_s"]) == (float(printed[2]), float(printed[3]))
    assert settings["warm_up_s"] == 15


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_driver_gets_the_load_that_was_meant(workload: Workload) -> None:
    load = workload.load(warm_up_s=2.0, seconds=3.0)
    assert Load.of_arguments(load.arguments()) == load
    assert (load.kind, load.rate, load.seconds) == (workload.kind, workload.rate, 3.0)
    assert any(system.can_run(workload) for system in SYSTEMS)


def test_a_table_of_kills_compares_pauses() -> None:
    def killed(system: str, pause_ms: float) -> dict[str, Any]:
        return {"workload": "1k-failover", "system": system, "round": 0, "pause_ms": pause_ms, "failed": 0}

    found = tables({"runs": [killed("product", 20), killed("bookkeeper", 80)]}, SYSTEMS)
    assert "| BookKeeper, defaults | yes | 80 | 0 | 0.25 × |" in found
    assert "| bookie-aio | yes | 20 | 0 |  |" in found


def test_the_pause_is_compared_with_the_quiet_before_it_and_after_it() -> None:
    def pause(during: str, p99_ms: float) -> dict[str, Any]:
        return {"what": "pauses", "during": during, "p99_ms": p99_ms}

    lines = [{"what": "cost", "p99_ms": 9}, pause("quiet", 3), pause("reclaiming", 6), pause("quiet", 2.5)]
    assert reclaiming_ratios(lines) == (2, 2.4)
    assert reclaiming_ratios(lines[:3]) == (2, None)
    assert reclaiming_ratios([]) == (None, None)


def test_ratios_are_taken_within_each_round() -> None:
    # The machine was four times as fast in the second round, and twice in the third.
    runs = [
        run("a", 0, 10),
        run("b", 0, 5),
        run("a", 1, 40),
        run("b", 1, 20),
        run("a", 2, 20),
        run("b", 2, 2),
    ]
    assert ratio(runs, "1k-1", "a", "b") == 2
    assert ratio(runs, "1k-1", "a", "c") is None


def test_a_run_that_failed_counts_nowhere() -> None:
    runs = [run("a", 0, 10), run("a", 1, 0, error="ended with 1"), run("b", 0, 5), run("b", 1, 5)]
    found = medians(runs, "1k-1", "a")
    assert found is not None
    assert found["adds_per_s"] == 10
    assert ratio(runs, "1k-1", "a", "b") == 2


def test_the_page_has_a_place_for_everything_that_is_measured() -> None:
    page = PAGE.read_text()
    for name in ("peers", "targets", "machine", *_ROWS, *_STORAGE):
        once = between(page, name, f"[[{name}]]")
        assert once != page
        assert f"[[{name}]]" in once
        # Filled again, nothing of the first time is left over.
        assert "[[" not in between(once, name, "others")
    assert between(README.read_text(), "peers", "[[peers]]") != README.read_text()
    with pytest.raises(ValueError, match="no place"):
        between(page, "something else", "")


def test_a_summary_has_the_systems_and_the_workloads_that_were_measured() -> None:
    at = {"at": "2026-11-22T12:00:00Z"}
    runs = [
        {**run("product-compiled", 0, 2000.0, p50_ms=0.5, p99_ms=0.8), **at},
        run("bookkeeper", 0, 300.0, p50_ms=2.74, p99_ms=6.2),
        run("bookkeeper-tuned", 1, 1900.0, p50_ms=0.46, p99_ms=1.8),
        {**run("kafka-flush", 0, 0.0, error="ended with 1"), **at},
    ]
    assert summary({"runs": runs, "settings": SETTINGS}) == (
        "| | bookie-aio, compiled | BookKeeper |\n"
        "|---|---:|---:|\n"
        "| 1 KiB, one in flight: p50, p99 ms | 0.50, 0.80 | 0.46, 1.80 |\n\n"
        "Measured 2026-11-22; medians of 2 rounds of 1 s."
    )


def test_the_aims_are_told_of_the_pure_form_and_of_the_compiled_one() -> None:
    runs = [
        run(system, 0, 1.0, p50_ms=p50_ms, p99_ms=1.0)
        for system, p50_ms in (("product", 0.6), ("product-compiled", 0.5), ("bookkeeper-tuned", 0.5))
    ]
    pure = [*peers_targets(runs, "product"), ("restart", "seconds", 1.0, 1.5, False)]
    text = targets_text(pure, peers_targets(runs, "product-compiled"))
    assert "| p50 ÷ that of BookKeeper, tuned | ≤ 1.15 | 1.20 | no | 1.00 | yes |" in text
    assert "| catch-up read | × the best | ≥ 4 | – |  | – |  |" in text
    assert text.endswith("| restart | seconds | ≤ 1.5 | 1.00 | yes | – |  |")


def test_every_workload_is_known_by_its_own_name() -> None:
    assert all(name == workload.name for name, workload in WORKLOADS.items())


@pytest.mark.parametrize(
    ("arguments", "build"),
    [
        ("'--prefix=/opt' '--enable-shared'", "built without PGO and LTO"),
        ("'--enable-optimizations'", "built with PGO"),
        ("'--enable-optimizations' '--with-lto=full'", "built with PGO and LTO"),
        (
            "'--prefix=/usr' '--with-wheel-pkg-dir=/usr/share/python-wheels/'",
            "Debian's build, with PGO and LTO",
        ),
        ("", "built without PGO and LTO"),
    ],
)
def test_the_build_of_the_interpreter_is_told_by_its_configuration(arguments: str, build: str) -> None:
    assert build_of(arguments) == build
