"""Identity: whether a bookie may start on these directories (rule 6).

A bookie has a cookie in each of its data directories and in the metadata store. The cookie holds the bookie's
id, the cluster's instance id, and an incarnation drawn when the bookie was formatted. A bookie that starts
without its data has lost its fences, and a fenced ledger would grow again. A bookie therefore starts only
where all cookies agree.

Formatting survives a crash at each point, since it writes in this order:

1. a *draft* of the cookie into each directory, and then the marks of empty storage. The names of the
   directory and of its parents become durable as well, also where a killed process made them;
2. the cookie into the metadata store;
3. each draft is renamed to its final name.

    directories         metadata store   what it means                        what is done
    empty               nothing          a new bookie                         FORMAT (1, 2, 3)
    empty or drafts     nothing          crashed before the end of 2          FORMAT again: none relied on it
    drafts or final     the same         crashed in 2 or 3                    FINISH (3)
    all final           the same         an ordinary start                    GO_ON
    all final           nothing          decommissioned, or the metadata      refused
                                         store was wiped
    empty               a cookie         the disk was lost or exchanged       refused
    anything else                        foreign                              refused

With the store first, a crash would leave an empty directory under a known id. A lost disk looks the same, and
must be refused.

A cookie file that differs from the metadata store's record in one bit is that record, damaged. The bookie
writes it again (`is_flipped`). Two bookies never differ in one bit only: their incarnations are random.

A cookie does not change, so a copy of the directory from the past has the right one. The bookie's *age* tells
such a copy from the directory itself. It is a number that the bookie raises at each start, and every few
seconds while entries come in. It stands in each directory (`AgeFile`) and in the metadata store. Where the
directory's is the lower one, the directory was set back, and the bookie has lost data (rule 4). Where the
store's is the lower one, the metadata store was set back. A ledger that it does not list may be newer than
the copy, so nothing is dropped on its word (rule 15).
"""

from __future__ import annotations

import enum
import json
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from metadata.access.bookies import SetBack
from metadata.errors import CookieMismatchError
from metadata.ids import LEDGER_ID_MAX, MALFORMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from metadata.access.bookies import AgeRecord, Cookie


def is_flipped(found: bytes, stored: Cookie) -> bool:
    """Return whether the bytes of a cookie file are those of this cookie, but for one flipped bit."""
    right = stored.to_json()
    if len(found) != len(right):
        return False
    return sum((one ^ other).bit_count() for one, other in zip(found, right, strict=True)) == 1


class Action(enum.Enum):
    """The action of a bookie's start on its cookies."""

    FORMAT = "format"
    FINISH = "finish"
    GO_ON = "go on"


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The cookie and the draft found in one data directory."""

    path: str
    cookie: Cookie | None = None
    draft: Cookie | None = None
    has_data: bool = False
    """Whether the directory holds files that formatting does not leave: segments, another program's files."""


def decide(
    directories: Sequence[DirectoryState], stored: Cookie | None, *, bookie_id: str, instance_id: str
) -> Action:
    """Return the action that the cookies found ask for. `stored` is the metadata store's cookie.

    Raises:
        CookieMismatchError: the bookie must not start; the message names the reason and the remedy.
    """
    for directory in directories:
        _check_owner(directory, bookie_id, instance_id)
    if stored is None:
        return _decide_unregistered(directories, bookie_id)
    if stored.directories != len(directories):
        raise CookieMismatchError(
            f"bookie {bookie_id} was formatted with {stored.directories} data directories and is started "
            f"with {len(directories)}",
            bookie_id=bookie_id,
        )
    for directory in directories:
        found = directory.cookie or directory.draft
        if found is None:
            raise CookieMismatchError(
                f"the metadata store knows bookie {bookie_id}, but {directory.path} holds no cookie: it has "
                "been emptied or is not mounted. Start it with the directory it had; if that is lost, start "
                "a new bookie under another id",
                bookie_id=bookie_id,
            )
        if found != stored:
            raise CookieMismatchError(
                f"{directory.path} is of incarnation {found.incarnation} of bookie {bookie_id}, and the "
                f"metadata store knows incarnation {stored.incarnation}: this directory is an older one, "
                "or another bookie was formatted under the same id",
                bookie_id=bookie_id,
            )
    return Action.GO_ON if all(directory.cookie for directory in directories) else Action.FINISH


def _check_owner(directory: DirectoryState, bookie_id: str, instance_id: str) -> None:
    cookie = directory.cookie
    if cookie is None:
        return
    if cookie.instance_id != instance_id:
        raise CookieMismatchError(
            f"{directory.path} belongs to a bookie of cluster {cookie.instance_id}, and this metadata store "
            f"is that of cluster {instance_id}",
            bookie_id=bookie_id,
        )
    if cookie.bookie_id != bookie_id:
        raise CookieMismatchError(
            f"{directory.path} belongs to bookie {cookie.bookie_id}, not to {bookie_id}", bookie_id=bookie_id
        )


def _decide_unregistered(directories: Sequence[DirectoryState], bookie_id: str) -> Action:
    for directory in directories:
        if directory.cookie is not None:
            raise CookieMismatchError(
                f"{directory.path} is that of bookie {bookie_id}, which the metadata store does not know: it "
                "has been decommissioned, or the metadata store has lost its data. Empty the directory to "
                "start anew",
                bookie_id=bookie_id,
            )
        if directory.has_data:
            raise CookieMismatchError(
                f"{directory.path} holds data but no cookie: it is not the directory of a bookie, or its "
                "cookie has been deleted",
                bookie_id=bookie_id,
            )
    return Action.FORMAT


# --- the age of a bookie -----------------------------------------------------------------------

AGE_FORMAT = 3
_FORMATS_READ = (2, AGE_FORMAT)
"""Format 2 names no owner, and no incarnations of other bookies."""
SET_BACK_JUMP = 2**20
"""After a set-back of the metadata the id counter goes on this far above all ids that are known of.

Clients may have drawn more ids, before the set-back, than any running bookie has heard of.
"""


STARTS_KEPT = 64
MARKS_KEPT = 64

Ages = tuple[tuple[str, int], ...]
"""Tokens and numbers."""


class Peer(NamedTuple):
    """The age of another bookie, as the metadata store had it."""

    bookie_id: str
    token: str
    number: int
    incarnation: str = ""
    """That of its cookie when it was first looked at; empty: not known."""


@dataclass(frozen=True, slots=True)
class AgeFile:
    """The content of the file `age` in each data directory, which the bookie replaces atomically.

    A file that names another owner does not count, like a damaged one.

    `number` and `token` are the bookie's age, as the metadata store had it last. `intended` and
    `intended_token` are those that the bookie was about to write there; 0 for none.
    """

    number: int = 0
    token: str = ""
    intended: int = 0
    intended_token: str = ""
    has_lost: bool = False
    """The directory was found to be older than the store's record, and the mark may not be durable yet."""
    is_ahead: bool = False
    """The store's record was found to be older than the directory, and no event may tell of it yet."""
    copy_age: int = -1
    """The lowest age that a copy of the store had whose event is new, or its marks not durable; −1: none."""
    marks: tuple[tuple[int, int, int], ...] = ()
    """The marks before an age was raised: the age, the highest number of a mark or a lift, and the number up
    to which the marks of all ledgers had ended."""
    ids_known: int = 0
    """All ledger ids below it have been given out, as the store last said."""
    set_backs: tuple[str, ...] = ()
    """The tokens of the events that the bookie knows of."""
    doubt: str = ""
    """The token of the newest event that no operator has answered for this bookie; empty: there is none."""
    in_doubt_below: int = 0
    """While there is a doubt: no ledger below this id is dropped on the word of the metadata store."""
    starts: Ages = ()
    """The ages at which the last starts ended: the token of each, and the last number that it reached."""
    peers: tuple[Peer, ...] = ()
    """The highest ages of other bookies that the metadata store had."""
    durable: tuple[int, int, int, int] = (0, 0, 0, 0)
    """What the storage held at least when the file was written: the number of a checkpoint, a segment, its
    generation, and where its durable groups ended. Storage that holds less was set back without this file."""
    owner: int = 0
    """The number by which all files of the bookie name it; 0 in a file of an older format."""

    def to_bytes(self) -> bytes:
        """Return the file's bytes: one line of JSON, behind its checksum in hexadecimal."""
        text = json.dumps({"format": AGE_FORMAT, **asdict(self)}).encode()
        return b"%08x %s\n" % (crc32c(text), text)

    @classmethod
    def parse(cls, data: bytes) -> AgeFile | None:
        """Parse the file's bytes; None where they are damaged. A missing file counts as damaged, too."""
        crc, _, text = data.rstrip(b"\n").partition(b" ")
        try:
            if int(crc, 16) != crc32c(text):
                return None
            document = json.loads(text)
            if document.pop("format") not in _FORMATS_READ:
                return None
            document.setdefault("marks", ())  # files of before have none
            lists = {name: tuple(map(tuple, document[name])) for name in ("starts", "marks")}
            checkpoint, segment_id, generation, end = map(int, document["durable"])
            return cls(
                **{
                    **document,
                    **lists,
                    "peers": tuple(Peer(*each) for each in document["peers"]),
                    "set_backs": tuple(document["set_backs"]),
                    "durable": (checkpoint, segment_id, generation, end),
                }
            )
        except MALFORMED:
            return None

    def end_start(self) -> AgeFile:
        """Return the file with its age among those that starts have ended at."""
        if not self.number:
            return self
        earlier = [each for each in self.starts if each[0] != self.token]
        return replace(self, starts=(*earlier, (self.token, self.number))[-STARTS_KEPT:])

    def has_reached(self, token: str, number: int) -> bool:
        """Return whether the directories have seen the age that another bookie saw of this one."""
        reached = dict(self.end_start().starts)
        if token in reached:
            return number <= reached[token]
        # Its start is not among those kept. It may be older than all of them.
        return len(reached) == STARTS_KEPT and number < min(reached.values())

    def find_copy(self, number: int) -> AgeFile:
        """Return the file to write where the store is found to be a copy, which has that age."""
        known = number if self.copy_age < 0 else self.copy_age
        return replace(self, is_ahead=True, copy_age=min(number, known))

    def note_marks(self, last: int, ended: int) -> AgeFile:
        """Return the file with the numbers that the marks have before the intended age is in the store.

        Some of the older ones are left out where there are many.
        """
        kept = [each for each in self.marks if each[1] <= last]  # higher ones are of storage that was lost
        if not kept or kept[-1][1:] != (last, ended):
            kept.append((self.intended, last, ended))
        if len(kept) > MARKS_KEPT:
            half = MARKS_KEPT // 2
            kept = kept[:-half:2] + kept[-half:]
        return replace(self, marks=tuple(kept))

    def marks_at(self, number: int) -> tuple[int, int]:
        """Return the numbers of the marks, as `note_marks` took them, for the latest age up to that one.

        Each copy with that age has the metadata by which marks were lifted or ended until then.
        """
        return max((each[1:] for each in self.marks if each[0] <= number), default=(0, 0))

    @property
    def next_number(self) -> int:
        """Return a number above all that the directory knows of, also those of starts that others saw.

        A note of the marks at a number that two starts had would tell of copies of both.
        """
        return max([self.number, self.intended, *(number for _, number in self.starts)]) + 1

    def intend(self, number: int, token: str) -> AgeFile:
        """Return the file to write before the age is raised in the metadata store."""
        return replace(self, intended=number, intended_token=token)

    def confirm(self) -> AgeFile:
        """Return the file to write after the age was raised in the metadata store."""
        return replace(self, number=self.intended, token=self.intended_token, intended=0, intended_token="")


class Standing(enum.Enum):
    """A directory's age, compared with the metadata store's record."""

    SAME = "same"
    RAISED = "raised"  # the intended age is there: only the file has to be told
    OLDER = "older"  # the directory was set back, lost its file, or another copy of it has been running
    AHEAD = "ahead"  # the metadata store was set back
    FORKED = "forked"  # the store is of another life of the directory: both were set back


def compare_ages(file: AgeFile | None, stored: AgeRecord | None) -> Standing:
    """Compare one directory's age with the metadata store's record.

    A bookie raises its age in three durable steps. The intended age goes into each directory, then into the
    store by compare-and-set, and then into each directory as confirmed. So a crash between two steps leaves
    SAME or RAISED. Any other difference proves that one of the two is a copy from the past.
    """
    if stored is None:
        return Standing.AHEAD if file is not None and file.number else Standing.SAME
    if file is None:
        return Standing.OLDER
    if (stored.number, stored.token) == (file.number, file.token):
        return Standing.SAME
    if (stored.number, stored.token) == (file.intended, file.intended_token):
        return Standing.RAISED
    if file.number > stored.number and not file.has_reached(stored.token, stored.number):
        return Standing.FORKED
    return Standing.AHEAD if file.number > stored.number else Standing.OLDER


@dataclass(frozen=True, slots=True)
class AgeVerdict:
    """The conclusion of a start from the ages of all its directories."""

    file: AgeFile
    """The file that each directory is to have before the age is raised in the metadata store.

    Where it intends the age of an earlier start, the age has to be raised once more after that. Otherwise a
    copy from before this start would pass for the directory itself.
    """
    is_moved: bool
    """A directory is older, and the bookie last ran somewhere else: this may be a copy of a living bookie."""


def judge_age(
    files: Sequence[AgeFile | None], stored: AgeRecord | None, *, place: Sequence[str], token: str
) -> AgeVerdict:
    """Conclude from the ages found at a start.

    Args:
        files: those of all directories; None for one that is missing or damaged.
        stored: the metadata store's record.
        place: the paths of the directories.
        token: a token drawn for this start.
    """
    present = [file for file in files if file is not None] or [AgeFile()]
    standings = [compare_ages(file, stored) for file in files]
    newest = max(present, key=lambda file: (max(file.number, file.intended), file.number))
    least = newest.number  # an intended age that was not confirmed is no promise
    has_lost = (
        not {Standing.OLDER, Standing.FORKED}.isdisjoint(standings)
        or any(file.has_lost for file in present)
        or (least > 0 and any(file is None or max(file.number, file.intended) < least for file in files))
    )
    at = 0 if stored is None else stored.number
    number = max([at + 1, *(file.next_number for file in present)])
    pending = [file for file in present if file.intended > max(at, least)]
    if pending:
        # The compare-and-set of an earlier start may yet take effect. This start must then find itself in it.
        latest = max(pending, key=lambda file: file.intended)
        number, token = latest.intended, latest.intended_token
    copies = [max(file.copy_age, 0) for file in present if file.is_ahead or file.copy_age >= 0]
    if not {Standing.AHEAD, Standing.FORKED}.isdisjoint(standings):
        copies.append(at)
    file = replace(
        newest.end_start(),
        has_lost=has_lost,
        is_ahead=not {Standing.AHEAD, Standing.FORKED}.isdisjoint(standings)
        or any(file.is_ahead for file in present),
        copy_age=min(copies, default=-1),
        ids_known=max(file.ids_known for file in present),
    )
    if stored is not None and at >= file.number:
        # A raised age is confirmed here: the next intended age takes the place of the one that proves it.
        file = replace(file, number=at, token=stored.token)
    is_moved = has_lost and stored is not None and sorted(stored.place) != sorted(place)
    return AgeVerdict(file.end_start().intend(number, token), is_moved)


# --- the ids of ledgers ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IdVerdict:
    """The conclusion of a bookie from the id counter, the ledgers that it holds, and the events."""

    events: tuple[SetBack, ...]
    """The events to write, where they differ from those that were read."""
    raise_to: int
    """The id that the counter goes on at, at the earliest."""
    file: AgeFile
    """The file that each directory is to have afterwards."""


def judge_ids(
    file: AgeFile,
    *,
    bookie_id: str,
    counter: int,
    highest_held: int,
    events: Sequence[SetBack],
    token: str,
    is_new: bool = False,
) -> IdVerdict:
    """Conclude whether the metadata store was set back to an older copy.

    There are four proofs. The bookie holds a ledger at or above the counter. The counter is below its last
    known value. The age in the store is below that of the directory. The age of another bookie is below the
    one that was seen (`AgeRecord.is_behind`). An event in the store then tells the other bookies. It is
    needed since the first bookie that starts raises the counter above all that the others could compare it
    with. A bookie to which an event is new is in doubt about every ledger that the store does not list.

    Args:
        file: the bookie's file.
        bookie_id: the bookie's id.
        counter: the lowest ledger id that was not given out.
        highest_held: the highest ledger id that the bookie holds, has fenced or has tombstoned; −1 for none.
        events: those in the metadata store, oldest first.
        token: a token drawn for an event.
        is_new: the bookie was formatted just now. What it holds is of after all events.
    """
    floor = max(highest_held + 1, file.ids_known)
    at = max([counter, *(event.raised_to for event in events)])
    known = {event.token for event in events} if is_new else set(file.set_backs)
    is_told = any(event.token not in known for event in events)
    found = tuple(events)
    if floor > at or (file.is_ahead and not is_told):
        at = min(max(floor, at) + SET_BACK_JUMP, LEDGER_ID_MAX)
        found = (*events, SetBack(token, bookie_id, counter, at, []))
    # The ages that this bookie saw of others are evidence from before. What it saw since counts for nothing.
    found = tuple(event if event.token in known else _with_ages(event, file.peers) for event in found)
    if is_new:  # an operator has answered for the bookies of that time, and this one has nothing of it
        found = tuple(event.answer_for([bookie_id]) if event.answered else event for event in found)
    ended = file.end_start()
    seen = [tuple(event.ages[bookie_id]) for event in found if bookie_id in event.ages]
    beyond = tuple((token, number) for token, number in seen if not file.has_reached(token, number))
    doubt, below = file.doubt, file.in_doubt_below
    for event in found:
        if event.token not in known and bookie_id not in event.answered:
            doubt, below = event.token, max(below, event.raised_to)
    if any(event.token == doubt and bookie_id in event.answered for event in found):
        doubt, below = "", 0
    after = replace(
        file,
        is_ahead=False,
        copy_age=-1,
        ids_known=max(at, floor),
        set_backs=tuple(event.token for event in found),
        doubt=doubt,
        in_doubt_below=below,
        has_lost=file.has_lost or bool(beyond),
        starts=(*ended.starts, *beyond)[-STARTS_KEPT:] if beyond else file.starts,
        marks=() if beyond else file.marks,  # they tell of no copy that has one of these ages
    )
    return IdVerdict(found, at, after)


def _with_ages(event: SetBack, peers: Iterable[Peer]) -> SetBack:
    """Return the event with the ages seen of other bookies, of each the highest one."""
    ages = dict(event.ages)
    for peer in peers:
        if peer.bookie_id not in ages or ages[peer.bookie_id][1] < peer.number:
            ages[peer.bookie_id] = [peer.token, peer.number]
    return replace(event, ages=ages)


# --- the ages of other bookies -----------------------------------------------------------------

PEERS_KEPT = 64
"""The number of other bookies whose ages a bookie looks at and keeps."""


def watched_by(bookie_id: str, names: Iterable[str]) -> list[str]:
    """Return the bookies whose ages a bookie looks at: those that follow it in the ring of all ids.

    So each bookie is looked at by as many others.
    """
    ordered = sorted(set(names) - {bookie_id})
    at = bisect_left(ordered, bookie_id)
    return [*ordered[at:], *ordered[:at]][:PEERS_KEPT]


def is_told(seen: Peer, events: Iterable[SetBack]) -> bool:
    """Return whether an event tells that the store had this age of a bookie, or a later one."""
    ages = [event.ages[seen.bookie_id] for event in events if seen.bookie_id in event.ages]
    return any(number >= seen.number for _, number in ages)
