"""The key that a campaign counts for, its record, and the ways in which a campaign ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.sim.campaign import record, runner
from tests.sim.campaign.record import version
from tests.sim.campaign.run_key import ROOT, modules, run_key
from tests.sim.campaign.runner import CampaignError
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
    path.write_text(f"# {name}\n")
    git(root, "add", name)
    git(root, "commit", "-m", name)
    return git(root, "rev-parse", "--short=12", "HEAD")


def written(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


RUN = {
    "sim/__init__.py": '"""Simulation."""\n',
    "sim/runner.py": "from sim.cluster import loop\nfrom sim.faults import KINDS\n\n\n"
    "def run():\n    return loop.LIMIT_S, KINDS\n",
    "sim/cluster/__init__.py": "",
    "sim/cluster/loop.py": "import time\n\nLIMIT_S = 1.5\n",
    "sim/faults.py": 'KINDS = ("pause", "power_cut")\n',
    "sim/report.py": "from sim.runner import run\n",
}
"""A tree in which `sim.runner` imports four other modules."""


def test_a_campaign_belongs_to_the_code_that_runs_and_the_commit_that_last_changed_a_file_of_it(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init")
    written(tmp_path, RUN)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a run")
    first = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    key, commit = version(tmp_path, "sim.runner")
    assert commit == first
    committed(tmp_path, "docs/simulation-campaign.json")
    (tmp_path / "docs" / "simulation-campaign.json").write_text("more")
    for name in ("sim/report.py", "sim/test_sim_runs.py", "spark/sink.py"):
        committed(tmp_path, name)
    assert version(tmp_path, "sim.runner") == (key, first)
    (tmp_path / "sim" / "faults.py").write_text("KINDS = ()\n")
    other, commit = version(tmp_path, "sim.runner")
    assert other.endswith("-dirty")
    assert other != f"{key}-dirty"
    assert commit == f"{first}-dirty"
    git(tmp_path, "commit", "-am", "no faults")
    second = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert version(tmp_path, "sim.runner") == (other.removesuffix("-dirty"), second)


def test_the_same_files_in_another_commit_go_on_with_the_campaign(tmp_path: Path) -> None:
    git(tmp_path, "init")
    first = committed(tmp_path, "runner.py")
    before = version(tmp_path, "runner")
    git(tmp_path, "commit", "--amend", "-m", "said otherwise")
    key, commit = version(tmp_path, "runner")
    assert before == (key, first)
    assert commit != first


# --- the key of a run ------------------------------------------------------------------------------


def keyed(root: Path, changes: dict[str, str | None]) -> str:
    """Write the tree with some of its files changed, or gone, and return its key."""
    shutil.rmtree(root, ignore_errors=True)
    written(root, {name: text for name, text in {**RUN, **changes}.items() if text is not None})
    return run_key(root, "sim.runner")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sim/faults.py": '"""Faults."""\n\n' + RUN["sim/faults.py"]}, id="module docstring"),
        pytest.param(
            {"sim/runner.py": RUN["sim/runner.py"].replace("():\n", '():\n    """Run."""\n')},
            id="docstring of a function",
        ),
        pytest.param({"sim/faults.py": RUN["sim/faults.py"] + '"""Of all."""\n'}, id="docstring of a name"),
        pytest.param({"sim/faults.py": "# Rule 3\n" + RUN["sim/faults.py"]}, id="comment"),
        pytest.param({"sim/faults.py": 'KINDS = (\n    "pause",\n    "power_cut",\n)\n'}, id="layout"),
        pytest.param(
            {"sim/faults.py": None, "sim/cluster/a_kind.py": RUN["sim/faults.py"],
             "sim/runner.py": RUN["sim/runner.py"].replace("sim.faults", "sim.cluster.a_kind")},
            id="a module that moves",
        ),
        pytest.param(
            {"sim/cluster/loop.py": None, "sim/cluster/event_loop.py": RUN["sim/cluster/loop.py"],
             "sim/runner.py": RUN["sim/runner.py"].replace("import loop", "import event_loop")
             .replace("loop.LIMIT_S", "event_loop.LIMIT_S")},
            id="a renamed module that is used by its name",
        ),
        pytest.param(
            {"sim/runner.py": "import sim.cluster.loop\nfrom sim.faults import KINDS\n\n\n"
             "def run():\n    return sim.cluster.loop.LIMIT_S, KINDS\n"},
            id="a module that is used by its dotted name",
        ),
        pytest.param({"sim/report.py": "FIGURES = 7\n"}, id="what no run imports"),
    ],
)  # fmt: skip
def test_prose_and_names_of_files_leave_the_key(changes: dict[str, str | None], tmp_path: Path) -> None:
    assert keyed(tmp_path / "run", changes) == keyed(tmp_path / "run", {})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sim/cluster/loop.py": "import time\n\nLIMIT_S = 2.5\n"}, id="constant"),
        pytest.param({"sim/faults.py": RUN["sim/faults.py"] + "del KINDS\n"}, id="statement"),
        pytest.param({"sim/cluster/__init__.py": "KINDS = ()\n"}, id="package"),
        pytest.param(
            {"sim/runner.py": RUN["sim/runner.py"].replace("sim.faults", "sim.other"),
             "sim/other.py": "KINDS = ()\n"},
            id="import from another module",
        ),
        pytest.param(
            {"sim/runner.py": RUN["sim/runner.py"].replace("():\n", "():\n    import sim.report\n")},
            id="import in a function",
        ),
        pytest.param(
            {"sim/runner.py": RUN["sim/runner.py"] + 'LATER = {"sim.report": ("run",)}\n'},
            id="import by a string",
        ),
    ],
)  # fmt: skip
def test_what_may_change_a_run_changes_the_key(changes: dict[str, str | None], tmp_path: Path) -> None:
    assert keyed(tmp_path / "run", changes) != keyed(tmp_path / "run", {})


def test_what_is_imported_by_a_string_counts(tmp_path: Path) -> None:
    runner = RUN["sim/runner.py"] + 'LATER = {"sim.report": ("run",)}\n'
    before = keyed(tmp_path / "run", {"sim/runner.py": runner})
    assert keyed(tmp_path / "run", {"sim/runner.py": runner, "sim/report.py": "FIGURES = 7\n"}) != before


def test_which_of_two_modules_a_name_comes_from_counts(tmp_path: Path) -> None:
    both = {"sim/other.py": "KINDS = ()\n", "sim/runner.py": "import sim.other\n" + RUN["sim/runner.py"]}
    swapped = RUN["sim/runner.py"].replace("sim.faults", "sim.other")
    before = keyed(tmp_path / "run", dict(both))
    assert keyed(tmp_path / "run", {**both, "sim/runner.py": "import sim.faults\n" + swapped}) != before


def test_every_module_that_a_run_loads_is_covered_by_its_key() -> None:
    program = (
        "import sys; from tests.sim.campaign import runner; runner.run_seed(('chaos', 1));"
        "runner.run_seed(('remade-logs', 1)); runner.run_seed(('mended-terms', 1));"
        "print(*(one.__file__ for one in sys.modules.values() if getattr(one, '__file__', None)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = tuple(str(ROOT / name) + "/" for name in ("client_aio", "bookie_aio", "metadata", "tests"))
    ours = {Path(one) for one in loaded if one.startswith(folders)}
    assert len(ours) > 150
    covered = set(modules().values())
    assert ours <= covered
    for left in (
        "client_aio/cli",
        "client_aio/spark",
        "client_aio/sync",
        "tests/sim/mutants",
        "tests/sim/crash",
    ):
        assert not [path for path in covered if path.is_relative_to(ROOT / left)]


def test_without_a_repository_nobody_knows_the_commit(tmp_path: Path) -> None:
    written(tmp_path, RUN)
    assert version(tmp_path, "sim.runner")[1] == "unknown"


# --- what goes wrong -------------------------------------------------------------------------------


def test_a_campaign_of_files_that_are_not_committed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "changed_files", lambda *_: ["client_aio/ledger/writer.py"])
    with pytest.raises(CampaignError, match=r"client_aio/ledger/writer\.py"):
        record.go_on(tmp_path / "campaign.json", ["chaos"], 1)
    assert list(tmp_path.iterdir()) == []


def test_a_campaign_that_has_begun_does_not_begin_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "changed_files", lambda *_: [])
    monkeypatch.setattr(record, "version", lambda: ("files", "commit"))  # which somebody may be changing
    path = tmp_path / "campaign.json"
    begun = record.go_on(path, ["chaos"], 2, start=40)
    assert (begun["first_seed"], begun["next_seed"], begun["seeds"]) == (40, 42, 2)
    assert begun["faults"]
    assert not set(begun["faults"]) & set(begun["effects"])
    with pytest.raises(CampaignError, match="begun at seed 40 and is at 42"):
        record.go_on(path, ["chaos"], 1, start=50)
    assert record.go_on(path, ["chaos"], 1)["next_seed"] == 43
    assert json.loads(path.read_text())["files"]["seeds"] == 3


def test_code_with_another_key_begins_a_record_of_its_own_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "changed_files", lambda *_: [])
    monkeypatch.setattr(record, "version", lambda: ("run-new", "commit"))
    path = tmp_path / "campaign.json"
    before = {"files-8115131495cc": {"seeds": 50_500, "next_seed": 650_500}}
    path.write_text(json.dumps(before))
    begun = record.go_on(path, ["chaos"], 1, start=7)
    assert (begun["first_seed"], begun["next_seed"], begun["seeds"]) == (7, 8, 1)
    assert json.loads(path.read_text()) == {**before, "run-new": begun}


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
