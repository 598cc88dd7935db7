"""Write sets, ack quorums and coverage: the arithmetic under the protocol.

Entry n of a fragment goes to the Qw bookies of its ensemble that start at index n mod E. So there are E
write sets, named here by their starting index. A set of bookies is written as a bit mask of indexes.

The central definition: an entry may have been acknowledged if some Qa bookies of its write set hold it. A set
of answers *covers* a write set when fewer than Qa of its bookies are without an answer. Then every possible
ack quorum has a member that has answered (rule 12b).
"""

from __future__ import annotations

from functools import lru_cache


def write_set(start: int, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the indexes of the bookies of the write set that starts at index `start`."""
    return tuple((start + offset) % ensemble_size for offset in range(write_quorum))


def write_set_mask(start: int, ensemble_size: int, write_quorum: int) -> int:
    """Return the write set that starts at index `start`, as a bit mask."""
    mask = 0
    for index in write_set(start, ensemble_size, write_quorum):
        mask |= 1 << index
    return mask


def write_set_masks(ensemble_size: int, write_quorum: int) -> list[int]:
    """Return the masks of all write sets, by starting index."""
    return [write_set_mask(start, ensemble_size, write_quorum) for start in range(ensemble_size)]


def covers_all_write_sets(answered: int, ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return whether in every write set fewer than Qa bookies are without an answer (rule 12b)."""
    return all(
        (mask & ~answered).bit_count() < ack_quorum for mask in write_set_masks(ensemble_size, write_quorum)
    )


def can_acknowledge(failed: int, ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return whether every write set still has Qa bookies that have not failed (rule 9)."""
    return all(
        (mask & ~failed).bit_count() >= ack_quorum for mask in write_set_masks(ensemble_size, write_quorum)
    )


def carries_on(answered: int, ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return whether the bookies that answered suffice for a writer (rule 9) and a recovery (rule 12b)."""
    sizes = (ensemble_size, write_quorum, ack_quorum)
    return can_acknowledge(~answered, *sizes) and covers_all_write_sets(answered, *sizes)


def proves_absent(negatives: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return whether so many answers "no such entry" leave no ack quorum for the entry (rule 12c)."""
    return negatives >= write_quorum - ack_quorum + 1


@lru_cache(maxsize=1024)
def indexes_of(mask: int) -> tuple[int, ...]:
    """Return the indexes in a mask, ascending."""
    return tuple(index for index in range(mask.bit_length()) if mask >> index & 1)
