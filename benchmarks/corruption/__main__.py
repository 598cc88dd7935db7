"""A campaign of random corruptions of the files of one bookie of three.

    python -m benchmarks.corruption [--rounds 5000] [--seed 1] [--only SEED] [--processes 2] [--dir DIR]
                                    [--json FILE] [--keep DIR]

Each round copies the directory of a real bookie: after a clean stop, after a kill when idle, or after a kill
while small groups were being written. It damages one file or two, and starts the bookie on them. It asks the
bookie over the wire for all entries that it has acknowledged, and adds to ledgers that were fenced or
deleted. Then it stops the bookie and looks at its files. Half of the bookies are started and asked once more.

A round of a seed draws the same state, file and damage again. The bytes of a state differ from campaign to
campaign, since real processes make them. `--keep` copies the damaged directory of each round with a fault.
The exit code is 1 when there is a fault.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.corruption.damage import remove
from benchmarks.corruption.judging import FAULTS, Judgement, Round
from benchmarks.corruption.states import State, configure, make_line, states_of
from benchmarks.running import Workplace, run
from client_aio.cli.main import main as command_line

ROUNDS_A_LINE = 500
IDLE_S = 3.0
_OUTCOMES = ("right", "marked", "refused", "right, last group torn")


class Settings(NamedTuple):
    """What a worker has to know."""

    place: Path
    idle_s: float
    keep: Path | None


def _line_of(seed: int, place: Path) -> Path:
    return place / f"line-{seed // ROUNDS_A_LINE}"


def _make_lines(seeds: range, place: Path, idle_s: float, progress: Progress) -> None:
    """Make the states of all lines, in processes of their own: nothing that runs there is forked later."""
    numbers = sorted({seed // ROUNDS_A_LINE for seed in seeds})
    task = progress.add_task("states", total=len(numbers))
    for number in numbers:
        to = place / f"line-{number}"
        if not to.exists():
            subprocess.run(
                [sys.executable, "-m", "benchmarks.corruption", "--make-line", str(to), "--seed", str(number),
                 "--idle", str(idle_s)],
                check=True,
            )  # fmt: skip
        progress.advance(task)


def _play(seed: int, settings: Settings) -> Judgement:
    """Play one round in a worker."""
    states = states_of(_line_of(seed, settings.place))
    place = settings.place / f"round-{os.getpid()}"
    judgement = Round(states, seed, place).run()
    if judgement.faults and settings.keep is not None:
        _replay(seed, settings, states)
    remove(place)
    return judgement


def _replay(seed: int, settings: Settings, states: list[State]) -> None:
    """Keep the directory as it was after the damage, and before the start."""
    assert settings.keep is not None
    again = Round(states, seed, settings.keep / f"round-{seed}")
    again.prepare()


def _check_control(path: Path) -> str:
    """Play a state without damage in a worker; everything has to be right."""
    state = next(one for one in states_of(path.parent) if one.path == path)
    place = path.parent.parent / f"control-{os.getpid()}"
    judgement = Round([state], 0, place).run(is_control=True)
    remove(place)
    if judgement.faults or judgement.outcome != "right":
        return f"{path.name} of {path.parent.name}: {judgement.outcome} {judgement.text}"
    return ""


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure()
    gc.freeze()


def _tables(judgements: list[Judgement], console: Console) -> None:
    """Print the count of each outcome, by state, by kind of file and by kind of damage."""
    groups: dict[str, dict[str, Counter[str]]] = {
        "state": defaultdict(Counter), "file": defaultdict(Counter), "damage": defaultdict(Counter),
    }  # fmt: skip
    for one in judgements:
        words = list(one.faults) or [one.outcome]
        faults = "1 fault" if len(one.damaged) == 1 else "2 faults"
        directories = "1 directory" if one.directories == 1 else "2 directories"
        for key in (one.state, directories, faults):
            groups["state"][key].update(words)
        for key in {each.file for each in one.damaged}:
            groups["file"][key].update(words)
        for key in {each.kind for each in one.damaged}:
            groups["damage"][key].update(words)
    for title, rows in groups.items():
        table = Table(title=f"rounds by {title}")
        table.add_column(title)
        for word in (*_OUTCOMES, *FAULTS):
            table.add_column(word, justify="right")
        for key, counts in sorted(rows.items()):
            table.add_row(key, *(str(counts[word] or "·") for word in (*_OUTCOMES, *FAULTS)))
        console.print(table)


def _campaign(seeds: range, settings: Settings, processes: int, console: Console) -> list[Judgement]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    judgements: list[Judgement] = []
    # The workers are forked before there is a thread: the progress bar has one.
    with (
        multiprocessing.get_context("fork").Pool(processes, _begin_worker) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        _make_lines(seeds, settings.place, settings.idle_s, progress)
        states = [path for line in settings.place.glob("line-*") for path in sorted(line.glob("state-*"))]
        for text in filter(None, pool.imap(_check_control, progress.track(states, description="controls"))):
            console.print(f"NOT RIGHT WITHOUT DAMAGE: {text}")
        task = progress.add_task("rounds", total=len(seeds))
        for one in pool.imap_unordered(partial(_play, settings=settings), seeds):
            judgements.append(one)
            if not one.is_good:
                progress.console.print(f"{one.seed}: {one.faults} {one.state} {one.to_json()['damage']}")
            bad = sum(not each.is_good for each in judgements)
            progress.update(task, advance=1, description=f"rounds ({bad} with faults)")
    return sorted(judgements, key=lambda one: one.seed)


def _main(arguments: argparse.Namespace) -> int:
    console = Console(width=150 if not sys.stdout.isatty() else None)
    first = arguments.only if arguments.only is not None else arguments.seed * 1_000_000
    seeds = range(first, first + (1 if arguments.only is not None else arguments.rounds))
    configure()
    began = time.monotonic()
    with Workplace(Path(tempfile.mkdtemp(prefix="corruption.", dir=arguments.dir)), "corruption.") as place:
        settings = Settings(place.path, arguments.idle, arguments.keep)
        judgements = _campaign(seeds, settings, arguments.processes, console)
        remove(place.path)
    elapsed = time.monotonic() - began
    _tables(judgements, console)
    bad = [one for one in judgements if not one.is_good]
    for one in bad[:20] if arguments.only is None else judgements:
        console.print(json.dumps(one.to_json()), soft_wrap=True)
    total = Counter(word for one in judgements for word in (list(one.faults) or [one.outcome]))
    console.print(f"{len(judgements)} rounds in {elapsed:.0f} s: {dict(total)}; {len(bad)} with faults")
    if arguments.json:
        rows = [one.to_json() for one in judgements]
        arguments.json.write_text(json.dumps({"counts": dict(total), "rounds": rows}, indent=1))
    return 1 if bad else 0


def main() -> int:
    """Run the command line."""
    if sys.argv[1:2] == ["--serve"]:
        configure()
        sys.argv[1:2] = []
        command_line()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.corruption", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the campaign: rounds have seeds from SEED000000"
    )
    parser.add_argument("--only", type=int, metavar="SEED", help="only this round")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds before a kill when idle")
    parser.add_argument("--dir", help="where to work; a tmpfs is fastest")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--make-line", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make_line is not None:
        run(make_line(arguments.make_line, arguments.seed, arguments.idle))
        return 0
    return _main(arguments)


if __name__ == "__main__":
    sys.exit(main())
