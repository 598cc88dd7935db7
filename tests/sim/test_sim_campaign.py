"""What a campaign is counted under, and what ends one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.sim.campaign import runner
from tests.sim.campaign.runner import NO_PART, ROOT, CampaignError, version
from tests.sim.campaign.shrinking import shrink
from tests.sim.profiles import draw_plan
from tests.sim.simulation import Result
from tests.sim.workloads import ledger


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
        "import sys; from tests.sim import campaign; runner.run_seed(('chaos', 1));"
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


# --- what goes wrong -------------------------------------------------------------------------------


def test_a_campaign_of_files_that_are_not_committed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "changed_files", lambda *_: ["client_aio/ledger/writer.py"])
    with pytest.raises(CampaignError, match=r"client_aio/ledger/writer\.py"):
        runner.go_on(tmp_path / "campaign.json", ["chaos"], 1)
    assert list(tmp_path.iterdir()) == []


def test_a_campaign_that_has_begun_does_not_begin_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "changed_files", lambda *_: [])
    monkeypatch.setattr(runner, "version", lambda: ("files", "commit"))  # which somebody may be changing
    path = tmp_path / "campaign.json"
    record = runner.go_on(path, ["chaos"], 2, start=40)
    assert (record["first_seed"], record["next_seed"], record["seeds"]) == (40, 42, 2)
    assert record["faults"]
    assert not set(record["faults"]) & set(record["effects"])
    with pytest.raises(CampaignError, match="begun at seed 40 and is at 42"):
        runner.go_on(path, ["chaos"], 1, start=50)
    assert runner.go_on(path, ["chaos"], 1)["next_seed"] == 43
    assert json.loads(path.read_text())["files"]["seeds"] == 3


def _killed(job: tuple[str, int]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_ends_the_campaign_with_the_seeds_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "run_seed", _killed)
    with pytest.raises(CampaignError, match="chaos 3"):
        runner.run(["chaos"], range(3, 8), processes=1)


def test_a_seed_that_runs_in_circles_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def circle(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(runner, "SEED_LIMIT_S", 0.5)
    monkeypatch.setitem(ledger.ROLES, "tailer", circle)
    # In a process of its own, as a campaign does: what is cut off there would be collected in whatever test.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        result, _, _ = pool.apply(runner.run_seed, (("power-cuts", 1),))
    assert result.name == "Liveness"
    assert "not over after 0.5 s of processor time" in result.text
    assert "in circle" in result.text  # where it is


def test_an_interrupted_campaign_ends_quietly_and_leaves_nobody() -> None:
    command = [sys.executable, "-m", "tests.sim", "--profile", "chaos", "--seeds", "100000"]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while len(children.read_text().split()) < 2:
            assert running.poll() is None
        os.killpg(running.pid, signal.SIGINT)
        _, told = running.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130
    assert told.strip() == "interrupted"


@pytest.mark.parametrize("further", [["--profile", "chaos"], ["--seed", "1"]])
def test_a_campaign_is_of_all_profiles(further: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sim", "--campaign", tmp_path / "campaign.json", *further]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "a campaign is of all profiles" in ended.stderr


def test_a_smaller_plan_that_meets_another_error_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = draw_plan("chaos", 1)
    failed = Result(plan, "Unexpected", "c1: KeyError('x')")

    def run_plan(smaller: Any, **_: object) -> Result:
        return Result(smaller, "Unexpected", "c1: ValueError('y')")

    monkeypatch.setattr("tests.sim.campaign.shrinking.run_plan", run_plan)
    assert shrink(plan, failed, runs_max=20).plan == plan
