"""A standalone cluster of Spark: a master and two workers, as processes, with bookies and ZooKeeper.

The driver is a process, too: one process has one session, and that of the other tests is in this one.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from benchmarks.processes import ROOT

TIMEOUT_S = 300


def run(*arguments: str) -> tuple[int, str]:
    """Run a program of ours; gives its exit code and what it wrote. Interrupted, it ends what it started."""
    command = [sys.executable, "-m", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    return process.returncode, output


@pytest.mark.long(60)
def test_rows_are_in_the_log_once_though_attempts_fail_or_are_doubled_and_a_bookie_dies() -> None:
    pytest.importorskip("pyspark", reason="the extra [spark] is not installed; `make test` installs it")
    code, output = run(
        *("benchmarks.spark_exactly_once", "--rows", "24000", "--partitions", "8"),
        *("--fail", "0.4", "--crawl", "60", "--seed", "2"),
    )
    assert code == 0, output
    assert "EQUAL, and no ledger is left over" in output
    assert "bookie b2 killed" in output
    said = re.search(r"(\d+) attempts failed, (\d+) were speculative", output)
    assert said is not None, output
    failed, speculative = map(int, said.groups())
    assert failed >= 2
    assert speculative >= 1
