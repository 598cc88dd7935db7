"""What a campaign is counted under."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.sim.campaign import NO_PART, ROOT, version


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


def test_a_campaign_belongs_to_the_files_that_run_and_the_commit_that_last_changed_one(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init")
    first = committed(tmp_path, "client_aio/one.py")
    files, commit = version(tmp_path)
    assert commit == first
    committed(tmp_path, "docs/simulation-campaign.json")
    (tmp_path / "docs" / "simulation-campaign.json").write_text("more")
    assert version(tmp_path) == (files, first)
    (tmp_path / "client_aio" / "two.py").write_text("")
    assert version(tmp_path) == (f"{files}-dirty", f"{first}-dirty")
    second = committed(tmp_path, "client_aio/two.py")
    both = version(tmp_path)
    assert both[0] != files
    assert both[1] == second != first
    for name in ("client_aio/spark/sink.py", "client_aio/cli/main.py", "tests/sim/test_sim_runs.py"):
        committed(tmp_path, name)
    assert version(tmp_path) == both


def test_the_same_files_in_another_commit_go_on_with_the_campaign(tmp_path: Path) -> None:
    git(tmp_path, "init")
    first = committed(tmp_path, "client_aio/one.py")
    before = version(tmp_path)
    git(tmp_path, "commit", "--amend", "-m", "said otherwise")
    files, commit = version(tmp_path)
    assert before == (files, first)
    assert commit != first


def test_what_is_left_out_of_a_campaigns_files_is_no_part_of_a_run() -> None:
    program = (
        "import sys; from tests.sim import campaign; campaign.run_seed(('chaos', 1));"
        "print(*(one.__file__ for one in sys.modules.values() if getattr(one, '__file__', None)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    ours = [Path(one).relative_to(ROOT) for one in loaded if one.startswith(str(ROOT / "client_aio"))]
    ours += [Path(one).relative_to(ROOT) for one in loaded if one.startswith(str(ROOT / "tests"))]
    assert len(ours) > 60
    assert [one for one in ours if any(one.match(f"{left}/*") or one.match(left) for left in NO_PART)] == []


def test_without_a_repository_nobody_knows_the_commit(tmp_path: Path) -> None:
    assert version(tmp_path)[1] == "unknown"
