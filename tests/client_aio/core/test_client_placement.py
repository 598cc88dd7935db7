"""Who is chosen for an ensemble: weights, racks against brute force, own seats."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_aio.core.placement import (
    PlacementPolicy,
    RackAware,
    Seating,
    WeightedRandom,
    eligible,
    seats_to_leave,
    shares,
    spread,
    weighted_order,
    write_sets_on_one_rack,
)
from client_aio.core.quorum import write_set
from metadata.access.bookies import BookieRecord

POLICIES: list[PlacementPolicy] = [WeightedRandom(), RackAware()]


def bookie(bookie_id: str, rack: str = "", weight: float = 1.0, is_writable: bool = True) -> BookieRecord:
    return BookieRecord(bookie_id, ["127.0.0.1:1"], "n", is_writable=is_writable, rack=rack, weight=weight)


def bookies(*racks: str) -> dict[str, BookieRecord]:
    """Bookies b0, b1, … on these racks."""
    return {f"b{number}": bookie(f"b{number}", rack) for number, rack in enumerate(racks)}


def racks_of(seating: Seating, chosen: tuple[str, ...] | list[str]) -> list[str]:
    return [seating.rack_of(bookie_id) for bookie_id in seating.filled(chosen)]


# --- weights ---


@pytest.mark.parametrize("policy", POLICIES)
def test_bookies_are_drawn_by_weight(policy: PlacementPolicy) -> None:
    """Of two bookies, one three times as heavy, the heavier gets three quarters of the single seats."""
    candidates = {"light": bookie("light", weight=1.0), "heavy": bookie("heavy", weight=3.0)}
    rng = random.Random(5)
    counts = Counter(policy.choose(Seating((None,), 1, candidates), rng).bookies[0] for _ in range(4000))
    assert 0.72 < counts["heavy"] / 4000 < 0.78


def test_bookies_of_no_weight_come_last() -> None:
    candidates = {"zero": bookie("zero", weight=0.0), **bookies("", "", "")}
    for seed in range(50):
        assert weighted_order(candidates, random.Random(seed))[-1] == "zero"


def with_free(free: dict[str, int | None], *tight: str) -> dict[str, BookieRecord]:
    """Return bookies with so many free bytes; None: they announce none."""
    return {
        name: replace(bookie(name), free_bytes=count, disk_bytes=1000, is_tight=name in tight)
        for name, count in free.items()
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("free", "share"),
    [((300, 100), 0.75), ((500, 500), 0.5), ((1000, 1), 1 / 1.05), ((None, 100), 0.5), ((0, 0), 0.5)],
)
def test_bookies_are_drawn_by_free_space(
    policy: PlacementPolicy, free: tuple[int | None, int], share: float
) -> None:
    """In proportion, down to a floor; a bookie that announces nothing counts as one with the most."""
    candidates = with_free({"first": free[0], "second": free[1]})
    rng = random.Random(5)
    counts = Counter(policy.choose(Seating((None,), 1, candidates), rng).bookies[0] for _ in range(4000))
    assert abs(counts["first"] / 4000 - share) < 0.03


def test_ledgers_of_several_seats_spread_by_free_space_and_weight() -> None:
    candidates = with_free({"a": 800, "b": 400, "c": 400, "d": 200, "e": 200})
    candidates["e"] = replace(candidates["e"], weight=2.0)
    assert shares(candidates) == {"a": 1.0, "b": 0.5, "c": 0.5, "d": 0.25, "e": 0.5}
    rng, counts = random.Random(9), Counter()
    for _ in range(4000):
        counts.update(WeightedRandom().choose(Seating((None,) * 2, 2, candidates), rng).bookies)
    assert counts["a"] > 1.3 * counts["b"] > 1.3 * 1.3 * counts["d"]
    assert abs(counts["b"] - counts["c"]) < 0.1 * counts["b"] > abs(counts["b"] - counts["e"])


@given(seed=st.integers(0, 1000), tight=st.sets(st.sampled_from("abcdef"), max_size=5))
def test_nearly_full_bookies_come_last_whatever_they_have(seed: int, tight: set[str]) -> None:
    free = {name: 10**6 if name in tight else 10 for name in "abcdef"}
    order = weighted_order(with_free(free, *tight), random.Random(seed))
    assert set(order[len(order) - len(tight) :]) == tight


@pytest.mark.parametrize("policy", POLICIES)
def test_the_random_source_alone_decides(policy: PlacementPolicy) -> None:
    seating = Seating((None,) * 5, 3, bookies(*"aabbccdd"))
    backwards = Seating((None,) * 5, 3, dict(reversed(seating.candidates.items())))
    assert policy.choose(seating, random.Random(1)) == policy.choose(backwards, random.Random(1))
    assert len({tuple(policy.choose(seating, random.Random(seed)).bookies) for seed in range(50)}) > 10


# --- racks ---


@pytest.mark.parametrize(
    ("racks", "write_quorum", "others", "expected"),
    [
        ("aab", 2, "", None),  # no candidate
        ("aab", 2, "a", None),  # none that helps
        ("aab", 2, "b", None),  # two racks cannot alternate around three seats
        ("aab", 2, "c", (0, "c0")),
        ("aaa", 3, "b", (0, "c0")),
        ("abab", 2, "c", None),  # it is spread already
        ("aabb", 2, "cc", (0, "c0")),
        ("aaaa", 2, "b", (0, "c0")),
        ("aaa", 1, "b", None),
    ],
)
def test_one_exchange_spreads_an_ensemble_better(
    racks: str, write_quorum: int, others: str, expected: tuple[int, str] | None
) -> None:
    ensemble = [f"e{seat}" for seat in range(len(racks))]
    known = dict(zip(ensemble, racks, strict=True)) | {f"c{at}": rack for at, rack in enumerate(others)}
    candidates = [name for name in known if name.startswith("c")]
    found = spread(ensemble, write_quorum, known, candidates)
    assert found == expected
    assert spread([*ensemble[1:], "down"], write_quorum, known, candidates) is None


@given(st.data())
def test_exchanges_that_spread_an_ensemble_come_to_an_end(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    write_quorum = data.draw(st.integers(1, size))
    known = {f"b{at}": data.draw(st.sampled_from("abc")) for at in range(size + data.draw(st.integers(0, 4)))}
    ensemble = list(known)[:size]

    def alone() -> int:
        return len(write_sets_on_one_rack([known[name] for name in ensemble], write_quorum))

    while (exchange := spread(ensemble, write_quorum, known, list(known))) is not None:
        before = alone()
        ensemble[exchange[0]] = exchange[1]
        assert len(set(ensemble)) == size
        assert alone() < before


@st.composite
def seatings(draw: st.DrawFn, seats_max: int = 6) -> Seating:
    """Any ensemble of up to six, any seats vacant, and up to three more bookies than needed, on few racks."""
    size = draw(st.integers(1, seats_max))
    write_quorum = draw(st.integers(1, size))
    vacant = draw(st.sets(st.integers(0, size - 1), min_size=1))
    racks = st.sampled_from(["", "r1", "r2", "r3"])
    former = tuple(f"old{seat}" for seat in range(size))
    records = {name: bookie(name, draw(racks)) for name in former}
    names = [f"new{number}" for number in range(len(vacant) + draw(st.integers(0, 3)))]
    candidates = {name: bookie(name, draw(racks)) for name in names}
    for seat in draw(st.sets(st.sampled_from(sorted(vacant)))):
        candidates[former[seat]] = records[former[seat]]
    seats = tuple(None if seat in vacant else former[seat] for seat in range(size))
    return Seating(seats, write_quorum, candidates, records, draw(st.sampled_from([(), former])))


def fewest_on_one_rack(seating: Seating) -> int:
    """The definition: of all ways to fill the seats, the fewest write sets on one rack."""
    racks = [seating.rack_of(bookie_id) for bookie_id in seating.candidates]
    fewest = len(seating.seats)
    for chosen in set(permutations(racks, len(seating.vacant))):
        following = iter(chosen)
        row = [next(following) if seat is None else seating.rack_of(seat) for seat in seating.seats]
        size = len(row)
        alone = [
            start
            for start in range(size)
            if len({row[(start + offset) % size] for offset in range(seating.write_quorum)}) < 2
        ]
        fewest = min(fewest, len(alone))
    return fewest


@settings(max_examples=400, deadline=None)
@given(seating=seatings(), seed=st.integers(0, 2**32))
def test_each_write_set_spans_two_racks_when_it_can_and_a_warning_says_when_not(
    seating: Seating, seed: int
) -> None:
    choice = RackAware().choose(seating, random.Random(seed))
    alone = write_sets_on_one_rack(racks_of(seating, choice.bookies), seating.write_quorum)
    assert len(alone) == fewest_on_one_rack(seating)
    assert bool(choice.warning) == bool(alone)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=200, deadline=None)
@given(seating=seatings(), seed=st.integers(0, 2**32))
def test_any_choice_is_distinct_candidates_one_for_each_vacant_seat(
    policy: PlacementPolicy, seating: Seating, seed: int
) -> None:
    chosen = policy.choose(seating, random.Random(seed)).bookies
    assert len(chosen) == len(set(chosen)) == len(seating.vacant)
    assert set(chosen) <= seating.candidates.keys()
    ensemble = seating.filled(chosen)
    assert len(set(ensemble)) == len(seating.seats)
    assert [kept for kept in seating.seats if kept] == [
        ensemble[s] for s, kept in enumerate(seating.seats) if kept
    ]


def test_a_new_ensemble_finds_the_only_rack_patterns_there_are() -> None:
    """Half of the bookies on one rack, and neighbours must differ: every second seat, and no other way."""
    for seed in range(20):
        seating = Seating((None,) * 12, 2, bookies(*"aaaaaabbbccc"))
        choice = RackAware().choose(seating, random.Random(seed))
        racks = racks_of(seating, choice.bookies)
        assert choice.warning == ""
        assert all(racks[seat] != racks[seat - 1] for seat in range(12))


@pytest.mark.parametrize("racks", ["a" * 64, "a" * 40 + "b" * 24, "ab" * 32, "abcd" * 20])
def test_the_largest_ensembles_are_placed_in_bounded_steps(racks: str) -> None:
    seating = Seating((None,) * 64, 2, bookies(*racks))
    choice = RackAware().choose(seating, random.Random(3))
    assert len(set(choice.bookies)) == 64
    impossible = Counter(racks).most_common(1)[0][1] > 32 and len(racks) == 64
    assert bool(choice.warning) == impossible


def test_a_warning_names_the_write_set_its_rack_and_what_there_was_to_choose_from() -> None:
    seating = Seating(
        (None, "k1", "k2"), 3, bookies("r1"), {"k1": bookie("k1", "r1"), "k2": bookie("k2", "r1")}
    )
    warning = RackAware().choose(seating, random.Random(1)).warning
    assert warning == (
        "3 of 3 write sets are on one rack only, b0, k1, k2 on rack r1; the bookies to choose from are on r1"
    )


def test_bookies_without_a_label_count_as_one_rack() -> None:
    choice = RackAware().choose(Seating((None,) * 2, 2, bookies("", "")), random.Random(1))
    assert "none that has a label" in choice.warning
    assert "(no label)" in choice.warning
    assert RackAware().choose(Seating((None,) * 2, 2, bookies("", "r1")), random.Random(1)).warning == ""


def test_a_replacement_keeps_two_racks_where_the_weights_would_not() -> None:
    """The one bookie on the other rack weighs next to nothing, and is taken all the same."""
    candidates = {"far": bookie("far", "r2", weight=0.001), **bookies("r1", "r1", "r1")}
    records = {"k1": bookie("k1", "r1"), "k2": bookie("k2", "r1")}
    for seed in range(20):
        choice = RackAware().choose(Seating((None, "k1", "k2"), 3, candidates, records), random.Random(seed))
        assert choice == (["far"], "")


# --- those that come back ---


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_comes_back_gets_its_own_seat(policy: PlacementPolicy) -> None:
    former = ("b0", "b1", "b2", "b3")
    records = bookies("r1", "r2", "r1", "r2")
    candidates = {name: records[name] for name in ("b1", "b2")}
    for seed in range(20):
        choice = policy.choose(
            Seating(("b0", None, None, "b3"), 2, candidates, records, former), random.Random(seed)
        )
        assert list(choice.bookies) == ["b1", "b2"]


def test_one_that_comes_back_goes_elsewhere_when_its_own_seat_would_cost_a_rack() -> None:
    """In its own seat, old would sit beside k3 on its rack, and new beside k2; the other way none does."""
    candidates = {"old": bookie("old", "r1"), "new": bookie("new", "r2")}
    records = {"k2": bookie("k2", "r2"), "k3": bookie("k3", "r1")}
    seating = Seating((None, None, "k2", "k3"), 2, candidates, records, ("old", "gone", "k2", "k3"))
    for seed in range(20):
        assert RackAware().choose(seating, random.Random(seed)) == (["new", "old"], "")


# --- who may be chosen ---


def test_only_writable_bookies_that_are_not_excluded_may_be_chosen() -> None:
    available = {**bookies("", "", ""), "full": bookie("full", is_writable=False)}
    assert set(eligible(available, excluded={"b0"}, doubtful=[], count=3)) == {"b1", "b2"}


def test_doubtful_bookies_may_be_chosen_only_as_far_as_others_are_too_few() -> None:
    available = bookies("", "", "", "")
    assert set(eligible(available, excluded=(), doubtful=["b3", "b0"], count=2)) == {"b1", "b2"}
    assert set(eligible(available, excluded=(), doubtful=["b3", "b0"], count=3)) == {"b1", "b2", "b3"}
    assert set(eligible(available, excluded=(), doubtful=["gone", "b0"], count=9)) == {"b0", "b1", "b2", "b3"}


@given(data=st.data())
def test_seats_left_to_bookies_that_are_down_leave_qa_in_each_write_set(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7))
    write_quorum = data.draw(st.integers(1, size))
    ack_quorum = data.draw(st.integers(1, write_quorum))
    vacant = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    count = data.draw(st.integers(0, len(vacant)))
    rng = random.Random(data.draw(st.integers(0, 99)))
    left = seats_to_leave(
        vacant, count, ensemble_size=size, write_quorum=write_quorum, ack_quorum=ack_quorum, rng=rng
    )
    ways = [
        sum(1 << seat for seat in chosen)
        for chosen in combinations(vacant, count)
        if all(
            sum(seat not in chosen for seat in write_set(start, size, write_quorum)) >= ack_quorum
            for start in range(size)
        )
    ]
    assert left in ways if ways else left is None


def test_seats_left_are_found_soon_in_the_largest_ensembles() -> None:
    for count, is_possible in ((21, True), (22, False)):
        left = seats_to_leave(
            range(64), count, ensemble_size=64, write_quorum=3, ack_quorum=2, rng=random.Random(count)
        )
        assert (left is not None) == is_possible
