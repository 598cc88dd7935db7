"""The command as a user runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support import forkserver

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 60.0


@dataclass
class Cli:
    """Runs `bookie-aio` against one metadata store."""

    metadata: str | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment of its processes."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("BOOKIE_AIO")}
        for size in ("COLUMNS", "LINES"):  # readline sets them in pytest, and its workers inherit them
            kept.pop(size, None)
        return kept if self.metadata is None else kept | {"BOOKIE_AIO_METADATA": self.metadata}

    def start(self, *arguments: str | bytes, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command; whoever does ends it."""
        return forkserver.start(
            [sys.executable, "-m", "client_aio.cli", *arguments],
            **{
                "env": self.environment(),
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )

    def run(self, *arguments: str | bytes, stdin: bytes = b"", code: int = 0) -> bytes:
        """Run a command to its end, expect its exit code, and give its output (its errors, if it fails)."""
        process = self.start(*arguments)
        out, error = process.communicate(stdin, TIMEOUT_S)
        assert process.returncode == code, error.decode()
        return error if code else out

    def rows(self, *arguments: str) -> Any:
        """Run a command and parse its JSON."""
        return json.loads(self.run(*arguments, "-o", "json"))


class RunningCluster:
    """A `cluster up` that serves."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.process = Cli().start("cluster", "up", "--dir", str(directory), "-o", "jsonl", *arguments)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()[1].decode()
        self.document = json.loads(line)
        self.cli = Cli(self.document["metadata"])

    def pids(self) -> dict[str, int]:
        """Return the process of each bookie, as cluster.json has it now."""
        rows = json.loads((self.directory / "cluster.json").read_text())["bookies"]
        return {row["bookie_id"]: row["pid"] for row in rows}

    def end(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, bytes]:
        """Stop it, if it runs; gives exit code and standard error."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        _, error = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, error
