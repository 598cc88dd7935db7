"""Duels: processes compete for one log or ledger, are killed and stopped at random, and are judged.

Each fighter is a process of its own. It notes its issued and acknowledged entries in a file that outlives it.
The referee kills and stops the fighters. Afterwards it compares these notes with the entries of a reader that
followed from the start. The caller chooses the target: `benchmarks.duel_log` has a log.

Notes are lines: `open`, `try PAYLOAD`, `ack PLACE PAYLOAD`. A payload is `FIGHTER.LIFE.NUMBER`; it is written
once at most. A place orders the entries: two integers with a colon.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.processes import Child, start_module
from benchmarks.running import Workplace, run

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Sequence

Place = tuple[int, int]


class Notes:
    """A fighter's notes. Unbuffered: written lines survive SIGKILL."""

    def __init__(self, path: Path, *, says_open: bool = False) -> None:
        """Open the file; with `says_open` an `open` is said on standard output as well."""
        self._file = path.open("ab", buffering=0)
        self._says_open = says_open

    def write(self, *lines: str) -> None:
        """Append lines."""
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        if self._says_open and "open" in lines:
            print("open", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


@dataclass
class Verdict:
    """The result of a duel. `faults` are violations; all other members are counts."""

    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return the summary, a line for each count and fault."""
        width = max(map(len, self.counts))
        lines = [f"{name:<{width}}  {count:>9,}" for name, count in self.counts.items()]
        return "\n".join([*lines, *(f"FAULT: {fault}" for fault in self.faults)])


def judge(notes: Sequence[str], followed: Sequence[tuple[Place, str]], again: dict[Place, str]) -> Verdict:
    """Compare the fighters' notes with the entries read.

    Args:
        notes: all lines of all fighters; those of one fighter in their order.
        followed: place and payload of each entry, as a reader that followed from the start had them.
        again: the same as read once more at the end.
    """
    verdict = Verdict()
    tried, acknowledged, opened = set[str](), dict[str, Place](), 0
    for line in notes:
        kind, *rest = line.split()
        if kind == "open":
            opened += 1
        elif kind == "try" and len(rest) == 1:
            tried.add(rest[0])
        elif kind == "ack" and len(rest) == 2:
            first, second = rest[0].split(":")
            acknowledged[rest[1]] = (int(first), int(second))
    fault = verdict.faults.append
    read = Counter(payload for _, payload in followed)
    where = {payload: place for place, payload in followed}
    for (earlier, _), (later, payload) in pairwise(followed):
        if later <= earlier:
            fault(f"{payload} at {later} was read after {earlier}")
    for payload, place in acknowledged.items():
        if read[payload] != 1:
            fault(f"{payload} was acknowledged at {place} and read {read[payload]} times")
        elif where[payload] != place:
            fault(f"{payload} was acknowledged at {place} and read at {where[payload]}")
    for payload, times in read.items():
        if times > 1:
            fault(f"{payload} was read {times} times")
        if payload not in tried:
            fault(f"{payload} was read, and nobody wrote it")
    last: dict[str, int] = {}
    for _, payload in followed:
        life, _, number = payload.rpartition(".")
        if int(number) <= last.get(life, -1):
            fault(f"{payload} was read after {life}.{last[life]}")
        last[life] = int(number)
    if again != dict(followed):
        fault(f"a second reading differs: {sorted(set(again.items()) ^ set(followed))[:5]}")
    unknown = tried - acknowledged.keys()
    verdict.counts = {
        "takeovers": opened,
        "acknowledged records": len(acknowledged),
        "unknown records": len(unknown),
        "  of these in the end there": len(unknown & read.keys()),
        "records read": len(followed),
    }
    return verdict


class Arena:
    """The fighters' processes, and their kills and stops.

    Args:
        module: runs as `python -m MODULE fight URI NAME FIGHTER LIFE NOTES`.
    """

    def __init__(self, module: str, home: Path, uri: str, name: str, rng: random.Random) -> None:
        self._module = module
        self._home = home
        self._uri = uri
        self._name = name
        self._rng = rng
        self._fighters: dict[int, Child] = {}
        self._lives = Counter[int]()
        self._stopped: set[int] = set()
        self.kills = 0
        self.stops = 0

    async def fight(self, fighters: int, seconds: float, *, kill_every_s: float = 1.5) -> None:
        """Let them fight for so long from when one has begun, and end them all, by SIGKILL."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*(self._start(number) for number in range(fighters)))
            await self._until_one_has_opened()
            end = loop.time() + seconds
            while (left_s := end - loop.time()) > 0:
                await asyncio.sleep(min(left_s, self._rng.uniform(0, kill_every_s)))
                number = self._rng.randrange(fighters)
                if self._rng.random() < 0.5:
                    await self._kill(number)
                    self.kills += 1
                    await self._start(number)
                    self._fighters[number].ignore_output()
                elif number not in self._stopped:
                    os.kill(self._fighters[number].pid, signal.SIGSTOP)
                    self.stops += 1
                    self._stopped.add(number)
                    loop.call_later(self._rng.uniform(0.1, 4.0), self._resume, number)
        finally:
            await asyncio.gather(*map(self._kill, list(self._fighters)))

    async def _start(self, number: int) -> None:
        self._lives[number] += 1
        self._fighters[number] = await start_module(
            self._module,
            "fight", self._uri, self._name, str(number), str(self._lives[number]), str(self._notes(number)),
            log=self._home / f"fighter-{number}.log",
        )  # fmt: skip

    async def _until_one_has_opened(self) -> None:
        saying = [asyncio.create_task(child.line()) for child in self._fighters.values()]
        await asyncio.wait(saying, return_when=asyncio.FIRST_COMPLETED)
        for task in saying:
            task.cancel()
        await asyncio.gather(*saying, return_exceptions=True)
        for child in self._fighters.values():
            child.ignore_output()

    async def _kill(self, number: int) -> None:
        child = self._fighters.pop(number)
        self._resume(number)
        child.kill()
        await child.wait()

    def _resume(self, number: int) -> None:
        self._stopped.discard(number)
        child = self._fighters.get(number)
        if child is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)

    def _notes(self, number: int) -> Path:
        return self._home / f"fighter-{number}.notes"

    def notes(self) -> list[str]:
        """Return the fighters' notes. A line that a kill cut short is left out."""
        lines: list[str] = []
        for path in sorted(self._home.glob("fighter-*.notes")):
            *whole, _ = path.read_text().split("\n")
            lines += whole
        return lines


def main(
    description: str,
    fight: Callable[[str, str, str, str, str], Coroutine[Any, Any, None]],
    duel: Callable[..., Coroutine[Any, Any, Verdict]],
) -> int:
    """Run as a referee, or as one of the fighters; returns the exit code.

    Args:
        fight: takes the arguments that an `Arena` starts a fighter with.
        duel: takes the directory, and `seconds`, `fighters` and `seed`.
    """
    if sys.argv[1:2] == ["fight"]:
        uri, name, fighter, life, notes = sys.argv[2:]
        run(fight(uri, name, fighter, life, notes))
        return 0
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fighters", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.dir is not None and any(arguments.dir.glob("*.notes")):
        parser.error(f"--dir {arguments.dir}: it holds the notes of another duel, which would be judged too")
    with Workplace(arguments.dir, "duel.") as place:
        verdict = run(
            duel(place.path, seconds=arguments.seconds, fighters=arguments.fighters, seed=arguments.seed)
        )
        if verdict.faults:
            place.keep()
            print(f"see {place.path}")
    print(f"{arguments.fighters} fighters, {arguments.seconds:g} s, seed {arguments.seed}")
    print(verdict.text())
    if arguments.json:
        arguments.json.write_text(json.dumps({**verdict.counts, "faults": verdict.faults}, indent=2))
    return 1 if verdict.faults else 0
