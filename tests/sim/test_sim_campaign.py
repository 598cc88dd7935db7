"""What a campaign is counted under."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.sim.campaign import commit

if TYPE_CHECKING:
    from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def committed(root: Path, name: str) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
    git(root, "add", name)
    git(root, "commit", "-m", name)
    return git(root, "rev-parse", "--short=12", "HEAD")


def test_a_campaign_belongs_to_the_commit_that_last_changed_what_it_runs(tmp_path: Path) -> None:
    git(tmp_path, "init")
    first = committed(tmp_path, "client_aio/one.py")
    assert commit(tmp_path) == first
    committed(tmp_path, "docs/simulation-campaign.json")
    (tmp_path / "docs" / "simulation-campaign.json").write_text("more")
    assert commit(tmp_path) == first
    (tmp_path / "client_aio" / "two.py").write_text("")
    assert commit(tmp_path) == f"{first}-dirty"
    second = committed(tmp_path, "client_aio/two.py")
    assert second != first
    assert commit(tmp_path) == second


def test_without_a_repository_nobody_knows_the_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"
