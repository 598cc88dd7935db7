"""`.ci/run` says why it failed, also where `make test` did not come to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project where `make test` is what TEST says, and `make test-wheel` what WHEEL says."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text("check:\ntest:\n\t@$(TEST)\ntest-wheel:\n\t@$(WHEEL)\n")
    return tmp_path


def run(
    checkout: Path, test: str, *, code: int, limit_s: int = 60, wheel: str = "true", all_s: int = 600
) -> list[str]:
    environment = {**os.environ, "TEST": test, "CI_TEST_LIMIT_S": str(limit_s)}
    environment |= {"WHEEL": wheel, "CI_ALL_S": str(all_s), "CI_WHEEL_S": "2"}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    done = subprocess.run([checkout / ".ci" / "run"], env=environment, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_tests_that_hang_are_ended_which_is_said(checkout: Path) -> None:
    printed = run(checkout, "sleep 30", code=1, limit_s=2)
    assert printed[-3:] == [
        "`make test` was ended after 2 s: it hung, or the machine is too slow for it",
        "FAILED (see above)",
        "pytest printed no closing line",
    ]


def test_tests_that_fail_are_not_said_to_hang(checkout: Path) -> None:
    assert run(checkout, "echo '== 1 failed in 0.1s =='; false", code=1)[-2:] == [
        "FAILED (see above)",
        "== 1 failed in 0.1s ==",
    ]
    assert run(checkout, "echo '== 1 passed in 0.1s =='", code=0)[-1] == "== 1 passed in 0.1s =="


def test_a_wheel_that_fails_fails_the_run_and_one_without_time_does_not(checkout: Path) -> None:
    passed = "echo '== 1 passed in 0.1s =='"
    assert run(checkout, passed, code=1, wheel="echo tried; false")[-3:] == [
        "tried",
        "FAILED (see above)",
        "== 1 passed in 0.1s ==",
    ]
    assert run(checkout, passed, code=0, all_s=0, wheel="false")[-2].startswith(
        "the compiled wheel is not tried"
    )
    ended = run(checkout, passed, code=0, all_s=4, wheel="sleep 60")
    assert "there was no time for the rest" in ended[-2]
