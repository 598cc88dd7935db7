"""A standalone Spark cluster on this machine: a master and workers, each a process, as real ones are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.processes import ROOT
from tests.support.zookeeper import find_java, free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from benchmarks.cpu_groups import CpuGroup

_START_TIMEOUT_S = 60.0
_PRIVATE = {"spark.executor.memory": "768m", "spark.executor.cores": "1", "spark.python.worker.reuse": "true"}


class SparkCluster:
    """One master and some workers of one core each; leaving the context ends them."""

    def __init__(self, directory: Path, *, workers: int = 2, groups: Sequence[CpuGroup] = ()) -> None:
        self._directory = directory
        self._workers = workers
        self._groups = groups  # of each worker, with its executor and that one's Python
        self._port = free_ports(1)[0]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        """Return the URL for `SparkSession.builder.master`."""
        return f"spark://127.0.0.1:{self._port}"

    @property
    def settings(self) -> dict[str, str]:
        """Return what a session needs: executors of one core, which import what we import."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return {**_PRIVATE, "spark.executorEnv.PYTHONPATH": path, "spark.driver.host": "127.0.0.1"}

    def __enter__(self) -> Self:
        try:
            self._launch(
                "master.Master", "--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"
            )
            self._await("master.Master", "New state: ALIVE")
            for number in range(self._workers):
                self._launch(
                    # Spark starts no second attempt on the host of the first: each worker has its own.
                    "worker.Worker", "--host", f"127.0.0.{number + 1}", "--webui-port", "0",
                    "--cores", "1", "--memory", "1g",
                    "--work-dir", str(self._directory / f"work-{number}"), self.master,
                    name=f"worker-{number}",
                )  # fmt: skip
                if self._groups:
                    self._groups[number].take(self._processes[-1].pid)
            for number in range(self._workers):
                self._await(f"worker-{number}", "Successfully registered with master")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _launch(self, main: str, *arguments: str, name: str | None = None) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "JAVA_HOME": find_java().removesuffix("/bin/java"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        with self._log(name or main).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a worker's executors end with it
                )
            )

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _await(self, name: str, text: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while text not in self._log(name).read_text(errors="replace"):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{name} does not start: {self._log(name).read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.1)

    def _end(self) -> None:
        for process in reversed(self._processes):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes:
            process.wait()
