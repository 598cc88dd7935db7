"""How fast a worker may read, and how long it rests for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.courtesy import Courtesy, Step, TokenBucket, share


def test_workers_share_what_repairs_by_hand_leave() -> None:
    assert share(64.0, 0.0, 4) == 16.0
    assert share(64.0, 0.0, 0) == 64.0
    assert share(64.0, 32.0, 4) == 8.0
    assert share(64.0, 200.0, 2) == 2.0


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0.0, 2.0)), max_size=60))
def test_a_token_bucket_bounds_the_bytes_of_any_time(steps: list[tuple[int, float]]) -> None:
    bucket, now, taken = TokenBucket(1000.0, 250.0), 0.0, 0
    for amount, idle_s in steps:
        now += idle_s
        began = now
        now += bucket.take(amount, now)
        taken += amount
        assert now >= began
        assert taken <= 1000.0 * now + 250.0 + 0.001


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0001, 2.0), st.booleans()), max_size=60))
def test_a_worker_rests_at_least_as_long_as_it_works_and_never_for_ever(
    steps: list[tuple[float, float, bool]],
) -> None:
    courtesy, now = Courtesy(), 0.0
    courtesy.begin(now)
    for other_s, took_s, is_write in steps:
        now += other_s + took_s
        courtesy.note(Step(100, took_s, is_write))
        rest_s = courtesy.rest_s(now)
        assert rest_s <= Courtesy.REST_MAX_S
        least_s = min(other_s + took_s, Courtesy.REST_MAX_S)
        assert least_s * 0.999 <= rest_s <= (other_s + took_s) * Courtesy.RATIO_MAX * 1.001
        now += rest_s
        courtesy.begin(now)


def test_a_worker_rests_for_longer_when_its_steps_take_longer_than_usual() -> None:
    courtesy, rests = Courtesy(), []
    for took_s in (0.002, 0.002, 0.006, 0.050, 0.002):
        courtesy.begin(0.0)
        courtesy.note(Step(100, took_s, is_write=False))
        rests.append(courtesy.rest_s(took_s))
    assert rests == pytest.approx([0.002, 0.002, 0.018, 0.200, 0.002])


def test_nobody_rests_for_a_ledger_that_has_no_copy_to_lose() -> None:
    courtesy = Courtesy()
    courtesy.is_urgent = True
    courtesy.begin(0.0)
    courtesy.note(Step(100, 0.002, is_write=True))
    assert courtesy.rest_s(0.002) == 0.0


def test_reads_and_writes_have_a_usual_time_of_their_own() -> None:
    courtesy = Courtesy()
    for is_write, took_s in ((False, 0.001), (True, 0.010), (True, 0.010)):
        courtesy.begin(0.0)
        courtesy.note(Step(100, took_s, is_write))
        assert courtesy.rest_s(took_s) == pytest.approx(took_s)


def test_a_disk_that_is_slower_for_good_is_usual_after_two_windows() -> None:
    courtesy = Courtesy()
    courtesy.note(Step(100, 0.001, is_write=True))
    for _ in range(2 * Courtesy.WINDOW):
        courtesy.note(Step(100, 0.020, is_write=True))
    courtesy.begin(0.0)
    assert courtesy.rest_s(0.020) == pytest.approx(0.020)
