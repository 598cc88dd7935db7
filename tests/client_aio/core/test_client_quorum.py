"""The arithmetic of quorums equals its definition, for every ensemble of up to seven bookies."""

from itertools import combinations

import pytest

from client_aio.core.quorum import (
    can_acknowledge,
    covers_all_write_sets,
    indexes_of,
    proves_absent,
    write_set,
    write_set_masks,
)

SHAPES = [
    (ensemble, write, ack)
    for ensemble in range(1, 8)
    for write in range(1, ensemble + 1)
    for ack in range(1, write + 1)
]


def ack_quorums(ensemble: int, write: int, ack: int) -> list[set[int]]:
    """All sets of bookies that can acknowledge some entry, by definition."""
    return [
        set(quorum)
        for entry in range(ensemble)
        for quorum in combinations({(entry + offset) % ensemble for offset in range(write)}, ack)
    ]


def test_a_write_set_starts_at_its_index_and_wraps_around() -> None:
    assert write_set(0, 5, 3) == (0, 1, 2)
    assert write_set(4, 5, 3) == (4, 0, 1)


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_coverage_means_that_no_ack_quorum_is_left_without_an_answer(
    ensemble: int, write: int, ack: int
) -> None:
    quorums = ack_quorums(ensemble, write, ack)
    for answered in range(1 << ensemble):
        silent = {index for index in range(ensemble) if not answered >> index & 1}
        expected = not any(quorum <= silent for quorum in quorums)
        assert covers_all_write_sets(answered, ensemble, write, ack) == expected


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_every_entry_can_be_acknowledged_while_each_write_set_has_an_ack_quorum(
    ensemble: int, write: int, ack: int
) -> None:
    for failed in range(1 << ensemble):
        alive = {index for index in range(ensemble) if not failed >> index & 1}
        expected = all(
            len(alive & {(entry + offset) % ensemble for offset in range(write)}) >= ack
            for entry in range(ensemble)
        )
        assert can_acknowledge(failed, ensemble, write, ack) == expected


@pytest.mark.parametrize(("ensemble", "write", "ack"), SHAPES)
def test_negatives_prove_absence_when_every_ack_quorum_has_one_of_them(
    ensemble: int, write: int, ack: int
) -> None:
    members = range(write)
    for count in range(write + 1):
        expected = all(
            set(quorum) & set(negatives)
            for negatives in combinations(members, count)
            for quorum in combinations(members, ack)
        )
        assert proves_absent(count, write, ack) == expected


def test_masks_name_the_members_of_each_write_set() -> None:
    assert [list(indexes_of(mask)) for mask in write_set_masks(4, 2)] == [[0, 1], [1, 2], [2, 3], [0, 3]]
