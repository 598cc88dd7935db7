"""Files, directories and metadata of another time: seeds that failed before bookies noticed them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.segment.format import AGE, COOKIE, RESERVE
from tests.sim.faults.files import ONE_FILE, Files
from tests.sim.plan import Fault
from tests.sim.profiles import draw_plan
from tests.sim.simulation import run_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.faults.files import Place

SEEDS = [
    ("stale-files", 0),
    ("stale-files", 1),
    ("stale-files", 3),
    ("damaged-files", 11),
    ("damaged-files", 21),
    ("damaged-files", 22),
    ("damaged-files", 25),
    ("set-back-bookie", 0),
    ("set-back-bookie", 1),
    ("set-back-bookie", 3),
    ("set-back-metadata", 0),
    ("set-back-metadata", 1),
    ("set-back-metadata", 2),
    ("set-back-metadata", 4),
    ("set-back-metadata", 256),
    ("copied-bookie", 4),
    ("set-back-ensembles", 1),
    ("set-back-ensembles", 17),
    ("set-back-ensembles", 23),
    ("set-back-under-writers", 10),
    ("set-back-under-writers", 42),
    ("set-back-both", 1177968),
    ("set-back-under-writers", 1054068),
    ("set-back-under-writers", 1066468),
    ("set-back-under-writers", 1067908),
    ("set-back-under-writers", 1101348),
    ("set-back-under-writers", 2000096),
    ("set-back-under-writers", 2000243),
    ("set-back-metadata", 1069507),
    ("set-back-both", 0),
    ("set-back-both", 3),
    ("set-back-both", 18),
]


@pytest.mark.parametrize(("profile", "seed"), SEEDS)
def test_what_is_of_another_time_is_noticed(profile: str, seed: int) -> None:
    """Entries were denied, tombstones forgotten, and ids given out twice."""
    result = run_plan(draw_plan(profile, seed))
    assert result.is_good, result.text


def test_each_kind_of_damage_to_a_file_strikes_soon() -> None:
    counts: Counter[str] = Counter()
    for seed in range(338, 398):
        result = run_plan(draw_plan("damaged-files", seed))
        assert result.is_good, result.text
        assert result.stats is not None
        counts.update({kind: result.stats.get(kind, 0) for kind in ONE_FILE})
        if all(counts[kind] for kind in ONE_FILE):
            return
    raise AssertionError(f"some kinds never struck: {counts}")


@pytest.mark.parametrize("kind", ["file_emptied", "file_truncated", "file_of_another", "file_set_back"])
@pytest.mark.parametrize("name", [AGE, COOKIE, RESERVE])
def test_files_of_which_a_bookie_has_one_are_damaged(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookie without its cookie does not start, and one without its age marks all that it had."""
    struck, real = [], Files.draw

    def draw(files: Files, allows: Callable[[Place], bool] = lambda place: True) -> Place | None:
        struck.append(real(files, lambda place: place[1] == name and allows(place)))
        return struck[-1]

    monkeypatch.setattr(Files, "draw", draw)
    plan = draw_plan("damaged-files", 500)
    faults = [Fault(2.0 + number, kind, "", lasts=1.5) for number in range(2)]
    result = run_plan(replace(plan, faults=tuple(faults)))
    assert result.is_good, result.text
    assert any(struck) or (name, kind) in ((COOKIE, "file_set_back"), (RESERVE, "file_set_back"))
