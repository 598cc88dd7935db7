"""Every command of `bookie-aio`, in every situation that a terminal or a script puts it in.

    python -m benchmarks.every_command [--only "ledger cat"] [--at-once 2]

Walks the tree of commands. A new command only has to stand in `REAL`, with arguments that it succeeds with.
Each is run as a process, forked with all modules loaded,

- with `--help`, also at 40 columns, with NO_COLOR, under LANG=C, and with closed streams;
- with bad input: an unknown option, no arguments, a wrong URI, a bad value for each option with a type;
- on a real cluster, in the same situations as its help, and as JSON.

A run is wrong if it prints a traceback, hangs, or ends with another exit code than it should. A failure is
one line on standard error. Under NO_COLOR there are no colours. Help fits its columns, and JSON parses. The
exit code is 1 if any run was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer.main

import client_aio.sync
from client_aio.cli import main as command_line
from client_aio.cli.exit_codes import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S = 120.0
NARROW = 40
CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
C_LOCALE = {"LANG": "C", "LC_ALL": "C"}
FORKS = multiprocessing.get_context("forkserver")
ONE_AT_A_TIME = threading.Lock()
"""Held while a process is started or asked for its exit code.

Each start asks the processes of all threads. Of two that ask for the same one, the second finds the answer
taken, and `multiprocessing` then makes it 255.
"""
SURROUNDINGS: dict[str, dict[str, str]] = {
    "usual": {},
    "40 columns": {"COLUMNS": str(NARROW)},
    "NO_COLOR": {"NO_COLOR": "1"},
    "LANG=C": C_LOCALE,
}
# Commands that run until they are stopped: by SIGINT, so many seconds after they have a handler for SIGTERM.
STOPPED_AFTER_S = {"cluster up": 3.0, "bookie serve": 1.0, "autorecovery run": 1.0}
WITHOUT_JSON = {"ledger cat", "ledger tail", "log cat", "log tail", "metadata dump"}
"""Their output is what was written, or has a form of its own."""


@dataclass
class Cluster:
    """A cluster with something in it, and new ledgers and logs for commands that change them."""

    uri: str
    directory: Path
    client: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def name(self) -> str:
        """Return a name that is new."""
        with self.lock:
            return f"n{next(self.numbers)}"

    def ledger(self) -> str:
        """Return a new closed ledger of three entries."""
        with self.lock, self.client.create_ledger() as ledger:
            ledger.add_entries(b"%d" % number for number in range(3))
            return str(ledger.ledger_id)

    def open_ledger(self) -> str:
        """Return a new ledger without a writer."""
        done = self.run("ledger", "create")
        return done.stdout.strip()

    def unbounded(self) -> str:
        """Return a new unbounded ledger."""
        name = self.name()
        self.run("ledger", "create", "--unbounded", name)
        return name

    def log(self) -> str:
        """Return a new log with one record."""
        name = self.name()
        self.run("log", "append", name, "-", stdin="a\n")
        return name

    def folder(self) -> str:
        """Return the path of a folder that there is not yet."""
        return str(self.directory / self.name())

    def formatted(self) -> str:
        """Return a directory that is a bookie's, of a cluster of its own."""
        path = self.folder()
        self.run("bookie", "format", "--new-cluster", "--dir", path, "--metadata", f"sqlite://{path}.db")
        return path

    def dumped(self) -> str:
        """Return a file with a dump of all metadata."""
        path = self.folder()
        self.run("metadata", "dump", path)
        return path

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command that has to succeed."""
        return subprocess.run(
            [sys.executable, "-m", "client_aio.cli", *arguments],
            env=environment(self.directory) | {"BOOKIE_AIO_METADATA": self.uri},
            input=stdin, capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
        )  # fmt: skip


def own(cluster: Cluster, path: str) -> list[str]:
    """Return the option for a metadata store beside a path."""
    return ["--metadata", f"sqlite://{path}.db"]


# Arguments with which each command succeeds, and the exit codes that are right for it.
REAL: dict[str, Callable[[Cluster], list[str]]] = {
    "cluster up": lambda of: ["-n", "1", "--no-autorecovery", "--dir", of.folder()],
    "cluster down": lambda of: ["--dir", of.folder()],
    "cluster restart": lambda of: ["b3", "--dir", str(of.directory / "cluster")],
    "cluster status": lambda of: [],
    "cluster repair": lambda of: ["--dry-run"],
    "bookie read-only": lambda of: ["off", "b2"],
    "bookie decommission": lambda of: ["b1", "--dry-run"],
    "bookie replace": lambda of: ["b1", "b4", "--dry-run"],
    "bookie forget": lambda of: ["b9"],
    "bookie serve": lambda of: ["--dir", (path := of.folder()), "--listen", "127.0.0.1:0", *own(of, path)],
    "bookie format": lambda of: ["--dir", (path := of.folder()), "--new-cluster", *own(of, path)],
    "bookie accept-metadata": lambda of: ["--dry-run"],
    "bookie list": lambda of: [],
    "bookie inspect": lambda of: [of.formatted()],
    "bookie info": lambda of: ["b1"],
    "ledger create": lambda of: [],
    "ledger takeover": lambda of: [of.unbounded(), "-"],
    "ledger trim": lambda of: [of.unbounded(), "0"],
    "ledger write": lambda of: ["-"],
    "ledger cat": lambda of: [of.ledger()],
    "ledger tail": lambda of: [of.ledger()],
    "ledger list": lambda of: [],
    "ledger verify": lambda of: [of.ledger()],
    "ledger show": lambda of: [of.ledger(), "--replicas"],
    "ledger recover": lambda of: [of.open_ledger()],
    "ledger repair": lambda of: [of.ledger(), "--replace", "b1", "--with", "b1"],
    "ledger delete": lambda of: [of.ledger()],
    "log append": lambda of: [of.name(), "-"],
    "log create": lambda of: [of.name()],
    "log cat": lambda of: [of.log()],
    "log tail": lambda of: [of.log()],
    "log list": lambda of: [],
    "log show": lambda of: [of.log()],
    "log truncate": lambda of: [of.log(), "--before", "0:0"],
    "log delete": lambda of: [of.log()],
    "log sweep": lambda of: [],
    "autorecovery run": lambda of: [],
    "autorecovery status": lambda of: [],
    "autorecovery pause": lambda of: [],
    "autorecovery resume": lambda of: [],
    "metadata dump": lambda of: [of.folder()],
    "metadata restore": lambda of: [of.dumped(), *own(of, of.folder())],
    "bench write": lambda of: ["--entries", "50", "--in-flight", "5"],
    "bench read": lambda of: [of.ledger(), "--entries", "3"],
    "context add": lambda of: [of.name(), "zk://z:2181/x"],
    "context use": lambda of: [],
    "context remove": lambda of: [_added(of)],
    "context list": lambda of: [],
    "config show": lambda of: [],
    "doctor": lambda of: ["--watch", "0.1"],
    "top": lambda of: ["--count", "1"],
}
# Beside 0, which codes are right on the cluster of this script.
ALSO_RIGHT = {
    "cluster status": {1},
    "doctor": {1},
    "bookie forget": {3},
    "bookie replace": {2, 4},
    "bookie decommission": {4},
}
NOT_RUN = {"spark verify", "spark export", "spark import", "spark stats", "spark sweep", "dashboard"}
"""Spark starts a JVM, and has tests of its own, as the status page has."""


def _added(cluster: Cluster) -> str:
    name = cluster.name()
    cluster.run("context", "add", name, "zk://z:2181/x")
    return name


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a user with no settings, and with a folder of his own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("BOOKIE_AIO", "LC_"))}
    home = directory / "home"
    return kept | {"XDG_CONFIG_HOME": str(home), "PYTHONPATH": str(Path(__file__).parent.parent)}


command_line.add_all()  # here, so that forked processes have all commands


def commands() -> dict[str, Any]:
    """Return every command by its name."""

    def walk(one: Any, path: str) -> Iterator[tuple[str, Any]]:
        for name, each in getattr(one, "commands", {}).items():
            yield from walk(each, f"{path} {name}".strip())
        if not hasattr(one, "commands"):
            yield path, one

    return dict(walk(typer.main.get_command(command_line.app), ""))


def _in_child(words: list[str], variables: dict[str, str], redirection: str, place: Path) -> None:
    """Become the command, in a process that was forked with all modules loaded."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(place)
    names = ("in", "out", "error")
    descriptors = [os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names]
    encoding = "ascii" if variables.get("LC_ALL") == "C" else "utf-8"
    streams = []
    for number, (descriptor, closed) in enumerate(zip(descriptors, ("<&-", " >&-", "2>&-"), strict=True)):
        os.dup2(descriptor, number)
        os.close(descriptor)
        mode = "w" if number else "r"
        stream = open(number, mode, encoding=encoding, errors="surrogateescape", closefd=False)  # noqa: SIM115
        if closed in f" {redirection}":
            os.close(number)
        streams.append(None if closed in f" {redirection}" else stream)
    sys.stdin, sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv[:] = ["bookie-aio", *words]
    command_line.main()


def _exit_code(process: Any) -> int | None:
    with ONE_AT_A_TIME:
        return cast("int | None", process.exitcode)


def _listens_to_sigterm(process: Any) -> bool:
    """Wait until a process has a handler for SIGTERM, and return whether it got one before it ended."""
    status = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + TIMEOUT_S
    while _exit_code(process) is None and time.monotonic() < deadline:
        facts = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if int(facts["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1:
            return True
        time.sleep(0.05)
    return False


@dataclass
class Trial:
    """One run: what is run, where, and what is right."""

    words: list[str]
    codes: set[int]
    variables: dict[str, str] = field(default_factory=dict)
    redirection: str = ""
    names: str = ""
    """What the line on standard error has to name."""
    is_help: bool = False
    is_json: bool = False
    stopped_after_s: float | None = None

    def run(self, directory: Path) -> list[str]:
        """Run it, and return what is wrong."""
        with tempfile.TemporaryDirectory(dir=directory, prefix="run-") as temporary:
            place = Path(temporary)
            (place / "in").write_bytes(b"a\n")
            variables = environment(directory) | self.variables
            process = FORKS.Process(target=_in_child, args=(self.words, variables, self.redirection, place))
            with ONE_AT_A_TIME:
                process.start()
            if self.stopped_after_s is not None and _listens_to_sigterm(process):
                time.sleep(self.stopped_after_s)
                with suppress(ProcessLookupError):  # it has failed meanwhile
                    os.kill(cast("int", process.pid), signal.SIGINT)
            wait([process.sentinel], TIMEOUT_S)
            code = _exit_code(process)
            if code is None:
                process.kill()
                wait([process.sentinel])
                return [f"no end within {TIMEOUT_S:.0f} s"]
            out, error = ((place / name).read_text(errors="replace") for name in ("out", "error"))
            return self.judge(code, out, error)

    def judge(self, code: int, out: str, error: str) -> list[str]:
        """Return what is wrong with a run that ended so."""
        wrong = [f"{one!r} in its output" for one in ("Traceback", "Exception ignored") if one in out + error]
        if code not in self.codes:
            wrong.append(f"exit code {code}, not {sorted(self.codes)}: {error[-300:].strip()}")
        lines = [line for line in error.splitlines() if line.startswith("bookie-aio: ")]
        if code in set(Exit) - {0, 130, 141, 143} and "2>&-" not in self.redirection:
            is_report = self.words[0] in ("doctor", "cluster", "bookie") and not self.names
            if len(lines) != 1 and not is_report:
                wrong.append(f"{len(lines)} lines say why: {error[-300:]!r}")
            if self.names and not any(self.names in line for line in lines):
                wrong.append(f"{self.names} is not named: {error[-300:]!r}")
        if "NO_COLOR" in self.variables and "\x1b" in out + error:
            wrong.append("colours in spite of NO_COLOR")
        if self.is_help and ">&-" not in self.redirection:
            # Under LANG=C an ellipsis takes three columns.
            lines = [line.replace("...", "…") for line in out.splitlines()]
            wide = [line for line in lines if len(line) > int(self.variables.get("COLUMNS", 80))]
            wrong += [f"a line of {len(line)} columns: {line!r}" for line in wide[:1]]
            wrong += ["no help"] if "Usage" not in out or error else []
        if self.is_json and code in (0, 1) and not self.redirection:
            try:
                json.loads(out)
            except ValueError:
                wrong.append(f"no JSON: {out[:200]!r}")
        return wrong


def trials_of_help(words: list[str]) -> Iterator[Trial]:
    """Yield the runs of a command's help."""
    asked = [*words, "--help"]
    for variables in SURROUNDINGS.values():
        yield Trial(asked, {0}, variables, is_help=True)
    for redirection in CLOSED:
        yield Trial(
            asked,
            {1} if " >&-" in f" {redirection}" else {0},
            {},
            redirection,
            is_help="2>" not in redirection,
        )


_ANY_TEXT = ("StringParamType", "TyperPath", "Path", "FuncParamType")
"""The types of options to which no text is wrong."""


def trials_of_bad_input(words: list[str], command: Any) -> Iterator[Trial]:
    """Yield the runs with input that is refused before anything is looked at."""
    yield Trial([*words, "--nosuch"], {2}, names="--nosuch")
    for redirection in CLOSED:
        yield Trial([*words, "--nosuch"], {2}, {}, redirection)
    yield Trial([*words, "--nosuch"], {2}, {"COLUMNS": str(NARROW), **C_LOCALE, "NO_COLOR": "1"})
    required = [one for one in command.params if one.required]
    if required:
        yield Trial(words, {2})
    known = {one.name for one in command.params}
    if "metadata" in known and not required and words[0] not in ("context", "config", "spark"):
        yield Trial([*words, "--metadata", "ftp://x/y"], {0, 2} if words == ["cluster", "down"] else {2})


def trials_on_a_cluster(name: str, cluster: Cluster) -> Iterator[Trial]:
    """Yield the runs that succeed, made when they are run: each has ledgers and logs of its own."""
    words = name.split()
    codes = {0, *ALSO_RIGHT.get(name, ())}
    seconds = STOPPED_AFTER_S.get(name)
    base = {"BOOKIE_AIO_METADATA": cluster.uri}
    for variables in SURROUNDINGS.values():
        yield Trial([*words, *REAL[name](cluster)], codes, base | variables, stopped_after_s=seconds)
    for redirection in CLOSED:
        is_needed = "<&-" in redirection and REAL[name](cluster)[-1:] == ["-"]
        may_fail = ">&-" in redirection.replace("2>&-", "") or is_needed
        more = {1} if may_fail else set()
        yield Trial([*words, *REAL[name](cluster)], codes | more, base, redirection, stopped_after_s=seconds)
    if name not in WITHOUT_JSON:
        yield Trial(
            [*words, *REAL[name](cluster), "-o", "json"], codes, base, is_json=True, stopped_after_s=seconds
        )


def bad_values(words: list[str], command: Any) -> Iterator[str]:
    """Yield the options of a command that take a value of the wrong type, as far as they have a type."""
    for option in command.params:
        is_typed = type(option.type).__name__ not in _ANY_TEXT
        if option.param_type_name == "option" and not option.is_flag and is_typed:
            try:
                command.make_context(words[-1], [option.opts[0], "nonsense"], resilient_parsing=False)
            except Exception as error:
                message = getattr(error, "format_message", lambda error=error: repr(error))()
                if option.opts[0] in message and "nonsense" in message:
                    continue
            yield f"{' '.join(words)} {option.opts[0]} nonsense: it is not refused by its name"


def check(trials: Iterator[Trial], directory: Path) -> list[str]:
    """Run trials one after another, and return what is wrong, a line each."""
    found = []
    for trial in trials:
        variables = " ".join(f"{key}={value}" for key, value in trial.variables.items() if "META" not in key)
        shown = " ".join([variables, "bookie-aio", *trial.words, trial.redirection]).strip()
        found += [f"{shown}: {wrong}" for wrong in trial.run(directory)]
    return found


def main() -> int:
    """Try every command, and return 1 if anything was wrong."""
    FORKS.set_forkserver_preload(["benchmarks.every_command"])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the commands whose names begin so")
    parser.add_argument("--at-once", type=int, default=2, help="how many commands are tried at once")
    arguments = parser.parse_args()
    every = commands()
    missing = sorted(every.keys() - REAL.keys() - NOT_RUN)
    if missing:
        print(f"no arguments are known for {', '.join(missing)}: see REAL")
    chosen = {name: one for name, one in every.items() if name.startswith(arguments.only)}
    with tempfile.TemporaryDirectory(prefix="every-command-") as temporary:
        directory = Path(temporary)
        up = subprocess.Popen(
            [
                sys.executable, "-m", "client_aio.cli", "cluster", "up", "-n", "4", "--dir",
                str(directory / "cluster"), "-o", "jsonl",
            ],
            env=environment(directory), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert up.stdout is not None
            uri = json.loads(up.stdout.readline())["metadata"]
            with client_aio.sync.connect(uri) as client, ThreadPoolExecutor(arguments.at_once) as pool:
                cluster = Cluster(uri, directory, client)

                def trials(name: str, command: Any) -> Iterator[Trial]:
                    yield from trials_of_help(name.split())
                    yield from trials_of_bad_input(name.split(), command)
                    if name in REAL:
                        yield from trials_on_a_cluster(name, cluster)

                name_of = {
                    pool.submit(check, trials(name, one), directory): name for name, one in chosen.items()
                }
                wrong = []
                for done in as_completed(name_of):
                    name = name_of[done]
                    found = done.result() + list(bad_values(name.split(), chosen[name]))
                    print(f"{name}: {'ok' if not found else f'{len(found)} wrong'}", flush=True)
                    for line in found:
                        print(f"  {line}", flush=True)
                    wrong += found
        finally:
            up.terminate()
            up.wait()
    print(f"{len(chosen)} commands, {len(wrong)} runs were wrong")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    from benchmarks import every_command  # the module that the forked processes have, too

    this = sys.modules["__main__"]
    this.__spec__ = this.__file__ = None  # else each forked process would run this file again
    sys.exit(every_command.main())
