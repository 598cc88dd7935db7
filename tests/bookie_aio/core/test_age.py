"""The age of a bookie, and its doubt in the metadata store: decisions, and histories of crashes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.core.identity import (
    MARKS_KEPT,
    PEERS_KEPT,
    SET_BACK_JUMP,
    AgeFile,
    Peer,
    Standing,
    compare_ages,
    is_told,
    judge_age,
    judge_ids,
    watched_by,
)
from metadata.access.bookies import AgeRecord, SetBack, not_free_below

PLACE = ["/data/b1"]


def file(number: int, token: str = "t", **values: object) -> AgeFile:
    return replace(AgeFile(number, token), **values)


def stored(number: int, token: str = "t", place: list[str] = PLACE) -> AgeRecord:
    return AgeRecord(number, token, place)


@pytest.mark.parametrize(
    ("held", "known", "standing"),
    [
        (None, None, Standing.SAME),  # formatted just now
        (AgeFile().intend(1, "t"), None, Standing.SAME),  # a crash before the first compare-and-set
        (file(3), stored(3), Standing.SAME),
        (file(3).intend(4, "u"), stored(3), Standing.SAME),
        (file(3).intend(4, "u"), stored(4, "u"), Standing.RAISED),
        (None, stored(3), Standing.OLDER),
        (file(2), stored(3), Standing.OLDER),
        (file(3, "u"), stored(3), Standing.OLDER),  # another copy has been running
        (file(2).intend(3, "u"), stored(3), Standing.OLDER),
        (file(4), stored(3), Standing.AHEAD),
        (file(4), stored(3, "u"), Standing.FORKED),
        (file(4, starts=(("u", 3),)), stored(3, "u"), Standing.AHEAD),
        (file(4, starts=(("u", 2),)), stored(3, "u"), Standing.FORKED),
        (file(4), None, Standing.AHEAD),
        (file(4).intend(5, "u"), stored(3), Standing.AHEAD),
    ],
)
def test_two_ages_are_compared(held: AgeFile | None, known: AgeRecord | None, standing: Standing) -> None:
    assert compare_ages(held, known) is standing


def test_a_file_reads_as_it_was_written_and_a_damaged_one_as_none() -> None:
    whole = file(
        7,
        intended=8,
        intended_token="u",
        ids_known=64,
        set_backs=("a", "b"),
        doubt="b",
        starts=(("a", 1),),
        peers=(Peer("b2", "t", 3, "i"),),
        owner=9,
        copy_age=5,
        marks=((3, 1 << 32, 0), (7, (1 << 32) + 2, 1 << 32)),
    )
    assert AgeFile.parse(whole.to_bytes()) == whole
    data = whole.to_bytes()
    for at in range(len(data) - 1):
        for bit in (0, 3, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            assert AgeFile.parse(bytes(damaged)) in (None, whole)
        assert AgeFile.parse(data[:at]) is None
    assert AgeFile.parse(b"") is None


def test_a_file_of_an_older_format_is_read() -> None:
    document = json.loads(file(7, peers=(Peer("b2", "t", 3, "i"),), owner=9).to_bytes()[9:])
    del document["owner"], document["marks"]
    document |= {"format": 2, "peers": [["b2", "t", 3]]}
    text = json.dumps(document).encode()
    older = AgeFile.parse(b"%08x %s\n" % (crc32c(text), text))
    assert older == file(7, peers=(Peer("b2", "t", 3),))


def test_one_of_two_directories_that_was_set_back_is_lost_data() -> None:
    verdict = judge_age([file(7), file(5)], stored(7), place=PLACE, token="u")
    assert verdict.file.has_lost
    assert verdict.file.intended == 8
    verdict = judge_age([file(7), None], stored(7), place=PLACE, token="u")
    assert verdict.file.has_lost
    # Also where the metadata store is older than both.
    verdict = judge_age([file(7), file(5)], stored(4), place=PLACE, token="u")
    assert verdict.file.has_lost
    assert verdict.file.is_ahead


def test_an_older_directory_elsewhere_is_taken_for_a_copy_of_a_living_one() -> None:
    assert judge_age([file(5)], stored(7, place=["/elsewhere"]), place=PLACE, token="u").is_moved
    assert not judge_age([file(5)], stored(7), place=PLACE, token="u").is_moved
    assert not judge_age([file(7)], stored(7, place=["/elsewhere"]), place=PLACE, token="u").is_moved
    both = judge_age([file(7), file(7)], stored(7, place=["/b", "/a"]), place=["/a", "/b"], token="u")
    assert not both.is_moved


class Bookie:
    """A model of one bookie's directories and of the store's record, driven through `judge_age`."""

    def __init__(self, directories: int) -> None:
        self.files: list[AgeFile | None] = [None] * directories
        self.stored: AgeRecord | None = None
        self.draws = 0
        self.late: list[tuple[AgeRecord | None, AgeRecord]] = []  # writes whose answers were lost

    def start(self, steps: int, *, loses_answer: bool) -> AgeFile:
        """Start, and crash after so many steps; return the verdict's file."""
        self.draws += 1
        token = f"t{self.draws}"
        verdict = AgeFile()
        while verdict.intended_token != token:
            verdict = judge_age(self.files, self.stored, place=PLACE, token=token).file
            for number in range(len(self.files)):
                if steps:
                    self.files[number] = verdict
                    steps -= 1
            if not steps:
                return verdict
            age = AgeRecord(verdict.intended, verdict.intended_token, PLACE)
            if loses_answer:
                self.late.append((self.stored, age))
                return verdict
            self.stored = age
            steps -= 1
        for number in range(len(self.files)):
            if steps:
                self.files[number] = replace(verdict, has_lost=False, is_ahead=False).confirm()
                steps -= 1
        return verdict

    def deliver(self) -> None:
        """Let the writes that were under way take effect, as far as nobody was faster."""
        for expected, age in self.late:
            if self.stored == expected:
                self.stored = age
        self.late.clear()


starts = st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), max_size=12)


@given(st.integers(1, 2), starts)
def test_no_history_of_crashes_makes_a_bookie_believe_that_anything_was_set_back(
    directories: int, history: list[tuple[int, bool, bool]]
) -> None:
    bookie = Bookie(directories)
    for steps, loses_answer, delivers in history:
        verdict = bookie.start(steps, loses_answer=loses_answer)
        assert not verdict.has_lost
        assert not verdict.is_ahead
        if delivers:
            bookie.deliver()
    bookie.deliver()
    assert not bookie.start(99, loses_answer=False).has_lost


@given(st.integers(1, 2), starts, st.integers(1, 5), st.integers(0, 5))
def test_a_directory_set_back_is_noticed_even_if_starts_crash(
    directories: int, history: list[tuple[int, bool, bool]], later: int, crash_after: int
) -> None:
    bookie = Bookie(directories)
    for steps, loses_answer, _ in history:
        bookie.start(steps, loses_answer=loses_answer)
        bookie.deliver()
    copy = list(bookie.files)
    for _ in range(later):
        bookie.start(99, loses_answer=False)
    bookie.files = copy
    verdict = bookie.start(crash_after, loses_answer=False)
    assert verdict.has_lost
    if crash_after <= directories + 1:  # the mark of lost data was not durable yet
        assert bookie.start(99, loses_answer=False).has_lost
    bookie.start(99, loses_answer=False)  # it may mark once more
    assert not bookie.start(99, loses_answer=False).has_lost


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_metadata_set_back_are_noticed_even_if_starts_crash(
    directories: int, before: int, later: int, crash_after: int
) -> None:
    bookie = Bookie(directories)
    for _ in range(before):
        bookie.start(99, loses_answer=False)
    copy = bookie.stored
    for _ in range(later):
        bookie.start(99, loses_answer=False)
    bookie.stored = copy
    verdict = bookie.start(crash_after, loses_answer=False)
    assert verdict.is_ahead
    assert not verdict.has_lost
    if crash_after <= directories + 1:
        assert bookie.start(99, loses_answer=False).is_ahead


@given(st.integers(1, 2), starts, st.lists(st.integers(0, 99), max_size=12))
def test_metadata_set_back_again_and_again_are_no_lost_data(
    directories: int, history: list[tuple[int, bool, bool]], set_backs: list[int]
) -> None:
    bookie = Bookie(directories)
    known: list[AgeRecord | None] = []
    for number, (steps, loses_answer, delivers) in enumerate(history):
        assert not bookie.start(steps, loses_answer=loses_answer).has_lost
        if delivers:
            bookie.deliver()
        known.append(bookie.stored)
        if number < len(set_backs):
            bookie.stored = known[set_backs[number] % len(known)]
            bookie.late.clear()
    assert not bookie.start(99, loses_answer=False).has_lost


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_a_store_that_knows_an_age_the_directory_never_had_is_lost_data(
    directories: int, before: int, later: int, again: int
) -> None:
    """Directory and metadata were set back together, and the newest metadata come back."""
    bookie = Bookie(directories)
    for _ in range(before):
        bookie.start(99, loses_answer=False)
    copy = list(bookie.files), bookie.stored
    for _ in range(later):
        bookie.start(99, loses_answer=False)
    newest = bookie.stored
    bookie.files, bookie.stored = copy
    for _ in range(again):
        bookie.start(99, loses_answer=False)
    bookie.stored = newest
    verdict = bookie.start(99, loses_answer=False)
    assert verdict.has_lost
    assert verdict.is_ahead or again <= later
    assert not bookie.start(99, loses_answer=False).has_lost


def test_a_directory_that_was_set_back_knows_its_own_ages_and_those_that_it_takes_over() -> None:
    after = judge_age([file(5, "a")], stored(7, "b"), place=PLACE, token="c").file
    assert [after.has_reached(*age) for age in (("a", 5), ("a", 6), ("b", 7), ("b", 8))] == [
        True, False, True, False,
    ]  # fmt: skip


# --- ids ---


class Cluster:
    """A model of the id counter, the events, and bookies that hold ledgers."""

    def __init__(self) -> None:
        self.counter = 0
        self.events: tuple[SetBack, ...] = ()
        self.files: dict[str, AgeFile] = {}
        self.held: dict[str, set[int]] = {}
        self.draws = 0

    def settle(self, bookie: str, *, crashes_after: int = 3) -> AgeFile:
        self.draws += 1
        is_new = bookie not in self.files
        before = self.files.setdefault(bookie, AgeFile(1, "t"))
        verdict = judge_ids(
            before,
            bookie_id=bookie,
            counter=self.counter,
            highest_held=max(self.held.setdefault(bookie, set()), default=-1),
            events=self.events,
            token=f"e{self.draws}",
            is_new=is_new,
        )
        if crashes_after > 0:
            self.events = verdict.events
        if crashes_after > 1:
            self.counter = max(self.counter, verdict.raise_to)
        if crashes_after > 2:
            self.files[bookie] = verdict.file
        return verdict.file

    def create(self, *bookies: str) -> int:
        ledger = self.counter
        self.counter += 1
        for bookie in bookies:
            self.held[bookie].add(ledger)
        return ledger


def test_where_nothing_was_set_back_nobody_is_in_doubt() -> None:
    cluster = Cluster()
    for bookie in ("b1", "b2"):
        cluster.settle(bookie)
    for _ in range(100):
        cluster.create("b1", "b2")
    for bookie in ("b1", "b2", "b3"):
        assert not cluster.settle(bookie).doubt
    assert not cluster.events
    assert cluster.counter == 100


@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.permutations(["b1", "b2", "b3"]),
    st.sets(st.sampled_from(["b1", "b2", "b3"]), min_size=1),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.integers(0, 60),
)
def test_metadata_set_back_leave_every_bookie_in_doubt_in_every_order(
    before: int,
    later: int,
    order: list[str],
    holders: set[str],
    crashes: list[int],
    drawn_first: int,
) -> None:
    cluster = Cluster()
    for bookie in ("b1", "b2", "b3"):
        cluster.settle(bookie)
    for _ in range(before):
        cluster.create("b1", "b2", "b3")
    copy = cluster.counter, cluster.events
    lost = [cluster.create(*holders) for _ in range(later)]
    cluster.counter, cluster.events = copy
    cluster.counter += min(drawn_first, later - 1)  # clients that came before the bookies
    first_new = None
    for bookie, crash in zip(order, crashes, strict=True):
        cluster.settle(bookie, crashes_after=crash)
        cluster.settle(bookie)
        if bookie in holders or first_new is not None:
            # From the first bookie on that could know, no id is given out twice.
            first_new = cluster.create()
            assert first_new > max(lost)
    for bookie in ("b1", "b2", "b3"):
        cluster.settle(bookie)  # one that held nothing, and came first, hears of it from the event
        assert cluster.files[bookie].doubt
        assert cluster.files[bookie].in_doubt_below > max(lost)
        assert cluster.files[bookie].in_doubt_below <= not_free_below(cluster.events)
    assert not cluster.settle("new").doubt


def test_an_answer_ends_the_doubt_of_the_bookies_that_it_names_only() -> None:
    cluster = Cluster()
    for bookie in ("b1", "b2"):
        cluster.settle(bookie)
    cluster.counter = 64
    cluster.create("b1", "b2")
    cluster.counter = 0
    for bookie in ("b1", "b2"):
        assert cluster.settle(bookie).in_doubt_below == 65 + SET_BACK_JUMP
    cluster.events = tuple(replace(event, answered=["b1"]) for event in cluster.events)
    assert not cluster.settle("b1").doubt
    assert cluster.settle("b2").doubt
    assert not_free_below(cluster.events) == 65 + SET_BACK_JUMP  # for ever: clients may hold such ids


def test_a_newer_copy_put_back_is_another_set_back() -> None:
    cluster = Cluster()
    cluster.settle("b1")
    cluster.counter = 64
    cluster.create("b1")
    newest = cluster.counter, cluster.events
    cluster.counter = 0
    cluster.settle("b1")
    cluster.counter, cluster.events = newest
    after = cluster.settle("b1")
    assert after.doubt
    assert cluster.create() > SET_BACK_JUMP  # ids that the older copy gave out are not given out again


def test_an_age_ahead_of_the_store_is_proof_without_any_new_ledger() -> None:
    cluster = Cluster()
    cluster.settle("b1")
    cluster.files["b1"] = replace(cluster.files["b1"], is_ahead=True)
    assert cluster.settle("b1").doubt
    assert len(cluster.events) == 1
    cluster.settle("b2")
    cluster.files["b2"] = replace(cluster.files["b2"], is_ahead=True, set_backs=())
    cluster.settle("b2")
    assert len(cluster.events) == 1  # an event that is new to it tells of the same set-back


# --- ages that other bookies have seen ---


def test_an_age_that_another_bookie_saw_tells_of_a_directory_and_metadata_set_back_together() -> None:
    cluster = Cluster()
    for bookie in ("b1", "b2"):
        cluster.settle(bookie)
    cluster.files["b1"] = replace(cluster.files["b1"], number=40, token="start 3")
    copy, metadata = cluster.files["b1"], (cluster.counter, cluster.events)
    cluster.create("b2")
    cluster.files["b2"] = replace(cluster.files["b2"], peers=(Peer("b1", "start 5", 57),))
    cluster.counter, cluster.events = metadata
    cluster.files["b1"] = copy
    assert not cluster.settle("b1").has_lost  # it starts first, and there is no evidence yet
    cluster.settle("b2")
    assert cluster.settle("b1").has_lost
    cluster.files["b1"] = replace(cluster.files["b1"], has_lost=False)  # the mark is durable
    assert not cluster.settle("b1").has_lost


@pytest.mark.parametrize("count", [1, 2, 9, 200])
def test_each_bookie_is_looked_at_by_as_many_others(count: int) -> None:
    names = [f"b{number}" for number in range(count)]
    looked_at = [peer for name in names for peer in watched_by(name, names)]
    assert {looked_at.count(name) for name in names} == {min(count - 1, PEERS_KEPT)}
    assert len(set(watched_by("another", names))) == min(count, PEERS_KEPT)


def test_an_age_in_the_store_below_the_one_seen_proves_a_set_back_until_an_event_tells_of_it() -> None:
    seen = Peer("b1", "t", 7, "i")
    ages = ((6, "t"), (7, "u"), (7, "t"), (8, "u"))
    assert [stored(*age).is_behind(seen.token, seen.number) for age in ages] == [True, True, False, False]
    assert [is_told(seen, [SetBack("e", "b2", 0, 8, [], {"b1": ["u", number]})]) for number in (6, 7, 8)] == [
        False, True, True,
    ]  # fmt: skip
    assert not is_told(seen, [SetBack("e", "b2", 0, 8, [], {"b3": ["u", 9]})])


def test_no_age_has_a_number_that_another_bookie_saw_of_a_lost_start() -> None:
    """A note of the marks at it would count for copies of the lost start, too."""
    event = SetBack("e", "b2", 0, 8, [], {"b1": ["lost", 12]})
    kept = file(6).intend(7, "t").note_marks(5, 5).confirm()
    after = judge_ids(kept, bookie_id="b1", counter=8, highest_held=3, events=[event], token="f").file
    assert after.has_lost
    assert after.marks_at(12) == (0, 0)
    assert after.next_number == 13
    assert judge_age([after], stored(7), place=PLACE, token="u").file.intended == 13
    assert AgeFile().next_number == 1


@pytest.mark.parametrize(
    ("seen", "is_reached"),
    [(("t1", 3), True), (("t1", 4), False), (("t2", 7), True), (("t2", 8), False), (("t9", 1), False)],
)
def test_an_age_is_reached_or_not(seen: tuple[str, int], is_reached: bool) -> None:
    assert AgeFile(7, "t2", starts=(("t1", 3),)).has_reached(*seen) is is_reached


def test_a_bookie_that_was_not_set_back_has_reached_every_age_that_was_seen_of_it() -> None:
    bookie = Bookie(1)
    seen: list[AgeRecord] = []
    for _ in range(100):
        bookie.start(99, loses_answer=False)
        assert bookie.stored is not None
        seen.append(bookie.stored)
        (held,) = bookie.files
        assert held is not None
        assert all(held.has_reached(age.token, age.number) for age in seen)
        assert not held.has_reached("another", held.number + 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=200))
def test_what_is_kept_of_the_marks_never_tells_of_more_than_had_ended_by_an_age(
    steps: list[tuple[int, bool]],
) -> None:
    kept, last, ended = AgeFile(), 0, 0
    were = [(0, 0)]  # of each age, before it was raised
    for drawn, is_ended in steps:
        last += drawn
        ended = last if is_ended else ended
        were.append((last, ended))
        kept = kept.intend(kept.number + 1, "t").note_marks(last, ended).confirm()
    for age, known in enumerate(were):
        found = kept.marks_at(age)
        assert found in were[: age + 1]
        assert found == known or len(set(were)) > MARKS_KEPT // 2
    assert len(kept.marks) <= MARKS_KEPT
    assert kept.marks_at(len(were)) == were[-1]


def test_numbers_of_marks_that_were_lost_with_the_storage_are_forgotten() -> None:
    kept = AgeFile().intend(1, "t").note_marks(5, 0).confirm().intend(2, "t").note_marks(9, 5).confirm()
    assert kept.marks_at(2) == (9, 5)
    assert kept.intend(3, "t").note_marks(7, 5).marks_at(2) == (5, 0)
    assert kept.intend(3, "t").note_marks(5, 0).marks_at(3) == (5, 0)


def test_the_oldest_copy_counts_until_its_marks_are_durable() -> None:
    known = file(7)
    assert judge_age([known], stored(5), place=["/a"], token="u").file.copy_age == 5
    assert judge_age([known.find_copy(3)], stored(7), place=["/a"], token="u").file.copy_age == 3
    assert judge_age([known.find_copy(6)], stored(5), place=["/a"], token="u").file.copy_age == 5
    assert judge_age([replace(known, is_ahead=True)], stored(7), place=["/a"], token="u").file.copy_age == 0
    assert judge_age([known], stored(7), place=["/a"], token="u").file.copy_age == -1
