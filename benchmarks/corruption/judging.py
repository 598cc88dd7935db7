"""Judging: a bookie is started on damaged files, asked for all that it owes, and its answers are compared.

Owns one round: copy a state, damage it, start the bookie, ask, stop it, and compare the files. Faults:

- DENIED: an acknowledged entry is answered with "no such entry", or its ledger with "deleted".
- WRONG: an entry is given with other bytes.
- FENCE: an ordinary add is accepted though its writer was fenced, or though it has not the ledger's token.
- TOMBSTONE: an add to a deleted ledger is accepted.
- REMOVED: a file with live entries that the damage did not touch is gone, and some of these entries with it.
- CRASHED: the process ended with a traceback, or did not end, or did not answer.

What is allowed: every entry right (`right`), some unknown (`marked`), or a start that is refused in one line
(`refused`).

The witness file names every acknowledged group of a kill. Where one of two faults touches the last group and
the other one the witness, the group may count as torn. Its entries may be denied (`right, last group torn`).
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from benchmarks.corruption.damage import damage, kind_of, label_of, remove, restore
from benchmarks.corruption.states import (
    STORE,
    VICTIM,
    State,
    arguments_of,
    copy_file,
    copy_sparse,
    directories_of,
    payload,
    small,
)
from bookie_aio.storage.segment import format as form
from bookie_aio.wire.blocks import encode_block, parse_blocks
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser, encode_frame
from bookie_aio.wire.messages import (
    NO_TERM,
    VERSION_MAX,
    VERSION_MIN,
    Add,
    Failure,
    Hello,
    Message,
    Read,
    ReadAnswer,
    Status,
    Stop,
    decode_answer,
    encode_request,
)
from client_aio.cli.main import main as command_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.corruption.damage import Damaged
    from benchmarks.corruption.states import Ledger, Owed

_SERVES_WITHIN_S = 60.0
_ANSWERS_WITHIN_S = 30.0
_ENDS_WITHIN_S = 60.0
_LIVE_SHARE = 0.3
_RESTORE_SHARE = 0.15
"""Of the states that were busy: damaged under the running bookie, which is killed a little later."""
_RIGHT, _UNKNOWN, _DENIED, _WRONG = "right", "unknown", "denied", "wrong"
FAULTS = ("DENIED", "WRONG", "FENCE", "TOMBSTONE", "REMOVED", "CRASHED")


class RefusedError(Exception):
    """The bookie did not start; the text is what it said."""


class CrashedError(Exception):
    """The bookie ended, or did not end, in a way that no rule allows."""


# --- the bookie's process ------------------------------------------------------------------------


class ForkedBookie:
    """`bookie serve` in a process that is forked here, since the imports would take most of a round."""

    def __init__(self, directories: Sequence[Path], store: Path, log: Path) -> None:
        self._log = log
        answer, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(answer)
            _be_bookie(arguments_of(directories, VICTIM, store), said, log)
        os.close(said)
        self._answer = answer
        self._is_over = False

    def wait_until_it_serves(self) -> tuple[str, int]:
        """Return its address.

        Raises:
            RefusedError: it ended, with one line that says why.
            CrashedError: it ended otherwise, or does not come to serve.
        """
        deadline, text = time.monotonic() + _SERVES_WITHIN_S, b""
        while b"\n" not in text:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                raise CrashedError(f"it does not come to serve within {_SERVES_WITHIN_S} s")
            data = os.read(self._answer, 1 << 16)
            if not data:
                self._wait()
                raise self._refusal()
            text += data
        host, port = json.loads(text)["addresses"][0].rsplit(":", 1)
        return host, int(port)

    def _refusal(self) -> Exception:
        lines = self.said().splitlines()
        if any("Traceback" in line for line in lines):
            return CrashedError(lines[-1])
        last = [line for line in lines if not _is_log(line)]
        if len(last) != 1:
            return CrashedError(f"it did not start, and said {last[-3:] or lines[-2:]}")
        return RefusedError(last[0])

    def said(self) -> str:
        """Return its standard error so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """SIGKILL."""
        if not self._is_over:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def end(self) -> None:
        """SIGTERM: a clean stop.

        Raises:
            CrashedError: it does not end, or not well.
        """
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._over()
                code = os.waitstatus_to_exitcode(status)
                if code != 0 or "Traceback" in self.said():
                    raise CrashedError(f"a clean stop ended with {code}: {self.said()[-300:]}")
                return
            time.sleep(0.002)
        self.kill()
        raise CrashedError(f"a clean stop did not end within {_ENDS_WITHIN_S} s")

    def _wait(self) -> None:
        os.waitpid(self.pid, 0)
        self._over()

    def _over(self) -> None:
        if not self._is_over:
            self._is_over = True
            os.close(self._answer)


def _is_log(line: str) -> bool:
    return line[:2] == "20" and line[4:5] == "-"


def _be_bookie(arguments: list[str], said: int, log: Path) -> NoReturn:
    """Become the command line's process; never returns."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(errors, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = ["bookie-aio", *arguments]
        command_line()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --- the wire ------------------------------------------------------------------------------------


class Wire:
    """A blocking connection that sends one request after another."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=_ANSWERS_WITHIN_S)
        self._parser = FrameParser(FRAME_BYTES_MAX)
        self._number = 0
        self.call(Hello(VERSION_MIN, VERSION_MAX, "corruption", "", ""))

    def call(self, request: Message, body: bytes = b"") -> tuple[Message | Failure, bytes]:
        """Send a request and return the answer.

        Raises:
            CrashedError: there is no answer.
        """
        self._number += 1
        try:
            self._socket.sendall(encode_frame(encode_request(request, self._number), len(body)) + body)
            while True:
                for header, data in self._parser.frames():
                    return decode_answer(header)[2], bytes(data)
                data = self._socket.recv(1 << 18)
                if not data:
                    raise CrashedError(f"the connection ended at {request!r:.80}")
                self._parser.feed(data)
        except OSError as error:
            raise CrashedError(f"no answer to {request!r:.80}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def read(self, ledger_id: int, ledger: Ledger) -> dict[int, str]:
        """Ask for all entries of a ledger that are owed; returns what became of each."""
        found: dict[int, str] = {}
        for content_term, first, last in ledger.runs():
            at = first
            while at <= last:
                message, body = self.call(Read(ledger_id, NO_TERM, content_term, at, last, 1, 1 << 20))
                if isinstance(message, Failure):
                    word = _DENIED if message.status is Status.NO_SUCH_LEDGER else message.status.name
                    found |= dict.fromkeys(range(at, last + 1), word)
                    break
                assert isinstance(message, ReadAnswer)
                given = dict[int, str]()
                for block in parse_blocks(memoryview(body)):
                    damaged = (
                        set(block.damaged_entries()) if block.payload_is_intact() else set(block.entry_ids)
                    )
                    for entry, data in zip(block.entry_ids, block.payloads(), strict=True):
                        expected = payload(ledger_id, entry, ledger.sizes[entry])
                        is_right = entry not in damaged and bytes(data[: len(expected)]) == expected
                        given[entry] = _RIGHT if is_right else _WRONG
                found |= given
                at = max([at, *(entry + 1 for entry in given)])
                if message.stop not in (Stop.END, Stop.BUDGET):
                    found[message.stop_entry] = {
                        Stop.NO_SUCH_ENTRY: _DENIED, Stop.UNKNOWN: _UNKNOWN,
                    }.get(Stop(message.stop), "stale")  # fmt: skip
                    at = message.stop_entry + 1
                elif not given:
                    found |= dict.fromkeys(range(at, last + 1), _DENIED)
                    break
        return found

    def takes_ordinary_add(
        self, ledger_id: int, entry: int, term: int = 0, content_term: int = 0, data: bytes = b"late"
    ) -> bool:
        """Return whether the bookie accepts an ordinary add, without a token, of a term."""
        body = encode_block(
            ledger_id=ledger_id, content_term=content_term, first_entry=entry, stride=1, lac=-1, lafr=-1,
            payloads=[data], running=[len(data)],
        )  # fmt: skip
        message, _ = self.call(Add(ledger_id, term, 0), body)
        return not isinstance(message, Failure)


# --- a round -------------------------------------------------------------------------------------


@dataclass
class Judgement:
    """The end of a round."""

    seed: int
    state: str
    directories: int = 1
    damaged: list[Damaged] = field(default_factory=list)
    outcome: str = "right"
    faults: dict[str, int] = field(default_factory=dict)
    text: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether all rules held."""
        return not self.faults

    def add(self, fault: str, count: int, text: str) -> None:
        """Note a fault."""
        if count:
            self.faults[fault] = self.faults.get(fault, 0) + count
            self.text += ("; " if self.text else "") + text

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "seed": self.seed, "state": self.state, "directories": self.directories,
            "damage": [one.text for one in self.damaged],
            "outcome": self.outcome, "faults": self.faults, "text": self.text,
        }  # fmt: skip


class Round:
    """One corruption: a directory, the faults, one or two starts, and what was answered."""

    def __init__(self, states: Sequence[State], seed: int, place: Path) -> None:
        rng = self._rng = random.Random(f"round {seed}")
        self.state = rng.choice(states)
        self._older = [state for state in states if state.number < self.state.number]
        self.place = place
        self._directories = [place / each.name for each in directories_of(self.state.path, VICTIM)]
        self._owed: Owed = self.state.owed()
        self._live = _live_files(directories_of(self.state.path, VICTIM), self._owed)
        self._may_be_torn: set[tuple[int, int]] = set()
        self._is_marked = False
        self._starts = 0
        self._is_live = self.state.kind == "busy" and rng.random() < _LIVE_SHARE
        self.judgement = Judgement(seed, "live" if self._is_live else self.state.kind, len(self._directories))

    def prepare(self, *, is_control: bool = False) -> None:
        """Copy the state and damage it."""
        remove(self.place)
        for directory in self._directories:
            copy_sparse(self.state.path / directory.name, directory)
        copy_file(self.state.path / STORE, self.place / STORE)
        if is_control:
            return
        if self._is_live:
            self._damage_under_it()
        else:
            count = 1 if self._rng.random() < 0.6 else 2
            if self._rng.random() >= _RESTORE_SHARE or not self._restore():
                self._damage(count)

    def run(self, *, is_control: bool = False) -> Judgement:
        """Play it. A control has no damage."""
        rng, judgement = self._rng, self.judgement
        try:
            self.prepare(is_control=is_control)
            ends = [rng.random() < 0.6, rng.random() < 0.6]
            starts = 2 if rng.random() < 0.5 else 1
            for is_clean in ends[:starts]:
                self._live_through(is_clean)
        except RefusedError as error:
            judgement.outcome = "refused"
            judgement.text += str(error)
        except CrashedError as error:
            judgement.add("CRASHED", 1, f"start {self._starts}: {error}")
        else:
            judgement.outcome = "marked" if self._is_marked else judgement.outcome
        return judgement

    def _damage(self, count: int) -> None:
        tails = _last_groups(self._directories)
        while len(self.judgement.damaged) < count:
            done = damage(self._directories, self.state, self._older, self._rng)
            if done is not None:
                self.judgement.damaged.append(done)
        touched = frozenset[str]().union(*(one.names for one in self.judgement.damaged))
        for name, (start, end, entries) in tails.items():
            before, path = self.state.path / name, self.place / name
            if name in touched and any("/witness" in one for one in touched):
                now = path.read_bytes() if path.exists() else b""
                if now[start:end] != before.read_bytes()[start:end]:
                    self._may_be_torn |= entries
        self._live = {name: held for name, held in self._live.items() if name not in touched}

    def _restore(self) -> bool:
        """Put files of an earlier life back; return whether anything changed."""
        earlier = [state for state in self._older if state.life < self.state.life]
        done = restore(self._directories, self._rng.choice(earlier), self._rng) if earlier else None
        if done is None:
            return False
        self.judgement.damaged.append(done)
        self._live = {name: held for name, held in self._live.items() if name not in done.names}
        return True

    def _damage_under_it(self) -> None:
        """Start the bookie, write small groups, damage the segment under it, write more, and kill it."""
        rng = self._rng
        bookie = ForkedBookie(self._directories, self.place / STORE, self.place / "start0.log")
        try:
            wire = Wire(bookie.wait_until_it_serves())
            is_open = [one for one, ledger in self._owed.ledgers.items() if ledger.kind == "open"]
            self._write(wire, is_open, rng.randrange(3, 40))
            while not self.judgement.damaged:
                done = damage(self._directories, self.state, self._older, rng, active_only=True)
                if done is not None:
                    self.judgement.damaged.append(done)
            self._write(wire, is_open, rng.randrange(1, 30))
            wire.close()
        finally:
            bookie.kill()
        # What the start has sealed, compacted and removed was judged without damage.
        self._live = {}

    def _write(self, wire: Wire, ledger_ids: list[int], count: int) -> None:
        """Add entries to open ledgers, one group after another."""
        for _ in range(count):
            ledger_id = self._rng.choice(ledger_ids)
            ledger = self._owed.ledgers[ledger_id]
            entry = len(ledger.sizes)
            size = small(ledger_id, entry)
            if not wire.takes_ordinary_add(ledger_id, entry, data=payload(ledger_id, entry, size)):
                raise CrashedError(f"an add to ledger {ledger_id}, which is open, was refused")
            ledger.sizes.append(len(payload(ledger_id, entry, size)))
            ledger.content_terms.append(0)

    def _live_through(self, is_clean: bool) -> None:
        self._starts += 1
        log = self.place / f"start{self._starts}.log"
        bookie = ForkedBookie(self._directories, self.place / STORE, log)
        try:
            wire = Wire(bookie.wait_until_it_serves())
            found = self._ask(wire)
            wire.close()
            if is_clean:
                bookie.end()
        finally:
            bookie.kill()
        if "Traceback" in bookie.said():
            raise CrashedError(f"a traceback is in its log: {bookie.said()[-300:]}")
        self._compare_files(found)

    def _ask(self, wire: Wire) -> dict[tuple[int, int], str]:
        found: dict[tuple[int, int], str] = {}
        for ledger_id, ledger in self._owed.ledgers.items():
            found |= {(ledger_id, entry): word for entry, word in wire.read(ledger_id, ledger).items()}
        judgement, number = self.judgement, self._starts
        denied = [one for one, word in found.items() if word == _DENIED]
        if torn := [one for one in denied if one in self._may_be_torn]:
            judgement.outcome = "right, last group torn"
        denied = [one for one in denied if one not in torn]
        wrong = [one for one, word in found.items() if word not in (_RIGHT, _UNKNOWN, _DENIED)]
        self._is_marked |= _UNKNOWN in found.values()
        judgement.add(
            "DENIED", len(denied), f"start {number}: {len(denied)} of {len(found)} denied: {denied[:3]}"
        )
        judgement.add(
            "WRONG", len(wrong), f"start {number}: wrong {[(one, found[one]) for one in wrong[:3]]}"
        )
        forgotten = []
        for ledger_id, ledger in self._owed.ledgers.items():
            entry, is_torn = len(ledger.sizes) + 1000 + self._starts, bool(self._may_be_torn)
            if (ledger.fence or ledger.kind == "password") and not is_torn:
                term = max(ledger.fence - 1, 0) if ledger.kind == "unbounded" else 0
                if wire.takes_ordinary_add(ledger_id, entry, term, term):
                    forgotten.append((ledger_id, ledger.kind))
        judgement.add("FENCE", len(forgotten), f"start {number}: adds are taken by {forgotten[:3]}")
        if not self._may_be_torn:
            buried = [one for one in self._owed.deleted if wire.takes_ordinary_add(one, 1000)]
            judgement.add("TOMBSTONE", len(buried), f"start {number}: adds are taken by deleted {buried[:3]}")
        return found

    def _compare_files(self, found: dict[tuple[int, int], str]) -> None:
        there = {label_of(path) for directory in self._directories for path in directory.iterdir()}
        gone = []
        for name, held in self._live.items():
            is_there = name in there or f"{name}.damaged" in there
            if not is_there and any(found.get(one, _RIGHT) != _RIGHT for one in held):
                gone.append(name)
        self.judgement.add("REMOVED", len(gone), f"start {self._starts}: {gone[:3]} were good, and are gone")
        for name in gone:
            del self._live[name]


def _groups(path: Path) -> list[tuple[int, int, set[tuple[int, int]]]]:
    """Return start, end and entries of a segment's groups, found by their magic."""
    data = memoryview(path.read_bytes())
    if len(data) < form.DATA_OFFSET:
        return []
    found = []
    try:
        segment = form.parse_segment_header(data[: form.DATA_OFFSET])
    except Exception:
        return []
    at = bytes(data).find(form.GROUP_MAGIC, form.DATA_OFFSET)
    while at >= 0:
        header = form.peek_group_header(data[at : at + form.GROUP_HEADER_BYTES], segment, at, len(data))
        rows = (
            form.parse_group_rows(header, data[at : at + header.head_bytes]) if header is not None else None
        )
        if header is not None and rows is not None:
            entries = {
                (row.ledger_id, row.first + row.stride * number)
                for row in rows if row.kind == form.KIND_BLOCK for number in range(row.entries)
            }  # fmt: skip
            found.append((at, header.end, entries))
            at = bytes(data).find(form.GROUP_MAGIC, header.end)
        else:
            at = bytes(data).find(form.GROUP_MAGIC, at + 1)
    return found


def _segments(directories: Sequence[Path]) -> list[Path]:
    """Return all segments, the newest first: their ids are unique over the directories."""
    paths = (path for each in directories for path in each.glob(f"*{form.SEGMENT_SUFFIX}"))
    return sorted(paths, key=lambda path: path.name, reverse=True)


def _last_groups(directories: Sequence[Path]) -> dict[str, tuple[int, int, set[tuple[int, int]]]]:
    """Return the last group of the newest segment that has one and is not sealed, by its file's label."""
    for path in _segments(directories):
        if kind_of(path) == "segment, sealed":
            return {}
        if groups := _groups(path):
            return {label_of(path): groups[-1]}
    return {}


def _live_files(directories: Sequence[Path], owed: Owed) -> dict[str, set[tuple[int, int]]]:
    """Return the segments that hold entries that are owed, with these entries; their indexes likewise."""
    live: dict[str, set[tuple[int, int]]] = {}
    wanted = {(ledger_id, entry) for ledger_id, one in owed.ledgers.items() for entry in one.entries()}
    for path in _segments(directories):
        held = set[tuple[int, int]]().union(*(entries for _, _, entries in _groups(path))) & wanted
        if held:
            live[label_of(path)] = held
    return live
