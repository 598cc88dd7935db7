"""The limits of a bookie."""

from __future__ import annotations

import pytest

from bookie_aio.config import share_descriptors
from metadata.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("descriptors", "wanted", "shares"),
    [
        (1 << 20, {}, (10_000, 512)),
        (1 << 20, {"connections_max": 50_000, "files_max": 4_096}, (50_000, 4_096)),
        (1 << 20, {"connections_max": 77}, (77, 512)),
        (4_096, {}, (4_096 - 512 - 64, 512)),
        (4_096, {"connections_max": 50_000, "files_max": 4_096}, (4_096 - 1_024 - 64, 1_024)),
    ],
)
def test_what_is_wanted_is_had_where_the_descriptors_suffice(
    descriptors: int, wanted: dict[str, int], shares: tuple[int, int]
) -> None:
    assert share_descriptors(descriptors, **wanted) == shares


def test_a_process_with_few_descriptors_is_no_bookie() -> None:
    with pytest.raises(InvalidArgumentError, match="80 file descriptors are too few"):
        share_descriptors(80)
