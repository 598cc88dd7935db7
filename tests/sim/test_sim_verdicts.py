"""Comparing verdicts between interpreters: seeds that agree do, and one that does not is named."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.sim.campaign import verdicts
from tests.sim.profiles import all_profiles
from tests.support.pythons import interpreters

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_verdict_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\n"{sys.executable}" "$@" | sed "1s/all invariants hold/FencesHold/"\n')
    other.chmod(0o755)
    assert verdicts.compare({"one": sys.executable, "two": sys.executable}, range(2)) == 0
    assert verdicts.compare({"one": sys.executable, "two": str(other)}, range(2)) == 1
    first_profile = all_profiles()[0]
    assert f"two: {first_profile} 0 FencesHold" in capsys.readouterr().out


def test_the_running_version_is_among_those_found() -> None:
    found = interpreters()
    running = "{}.{}".format(*sys.version_info)
    assert found[running] == sys.executable
