"""`.ci/environment` takes the interpreter that was built optimised, and says which one it took and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.pythons import VERSIONS

ENVIRONMENT = Path(__file__).parents[2] / ".ci" / "environment"

# Asked about itself, an interpreter says what the test wants. The environment that it makes is a stub.
INTERPRETER = """#!/usr/bin/env bash
case "$*" in
--version) echo "Python of the test" ;;
"-m venv --clear "*) at=$4/bin && mkdir -p $at && printf '#!/bin/sh\\n' >$at/python && chmod +x $at/python ;;
-) {{ cat <<'BEFORE'; cat; }} | exec {python} -S - ;;
import importlib.util, sys, sysconfig
sys.prefix = "/of/the/test"
sys.version_info = {version}
for name in ("PY_CFLAGS", "PY_CORE_CFLAGS", "PY_CFLAGS_NODIST"):
    sysconfig.get_config_vars()[name] = ""
sysconfig.get_config_vars()["CONFIG_ARGS"] = "{arguments}"
if {without_pip}:
    importlib.util.find_spec = lambda name: None
BEFORE
esac
"""


class Machine:
    """A project, and a PATH with a few interpreters and nothing else but what the script needs."""

    def __init__(self, home: Path) -> None:
        self.home, self.path = home, home / "path"
        (home / ".ci").mkdir()
        shutil.copy(ENVIRONMENT, home / ".ci" / "environment")
        self.path.mkdir()
        for tool in ("bash", "cat", "chmod", "dirname", "env", "mkdir"):
            found = shutil.which(tool)
            assert found is not None
            (self.path / tool).symlink_to(found)

    def add(
        self,
        name: str,
        *,
        arguments: str = "",
        version: tuple[int, int] = (3, 12),
        without_pip: bool = False,
    ) -> str:
        """Put an interpreter on the PATH."""
        file = self.path / name
        file.write_text(
            INTERPRETER.format(
                python=sys.executable, arguments=arguments, version=version, without_pip=without_pip
            )
        )
        file.chmod(0o755)
        return str(file)

    def taken(self, *, code: int = 0, keep: bool = False, **environment: str) -> str:
        """Make the environment, anew unless it is to be kept, and return what was said first."""
        if not keep:
            shutil.rmtree(self.home / "made", ignore_errors=True)
        kept = {key: value for key, value in os.environ.items() if key != "PYTHON"}
        done = subprocess.run(
            [self.home / ".ci" / "environment", "made"],
            env=kept | {"PATH": str(self.path)} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return (done.stderr if code else done.stdout).splitlines()[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Its first interpreter is a plain one."""
    machine = Machine(tmp_path)
    machine.add("python3")
    return machine


def test_one_that_was_built_optimised_is_preferred(machine: Machine) -> None:
    machine.add("python3.13", arguments="--enable-optimizations", version=(3, 10))
    machine.add("python3.12", arguments="--enable-optimizations", without_pip=True)
    best = machine.add("python3.11", arguments="--enable-optimizations")
    assert machine.taken() == f"environment: made, Python of the test of {best} (built optimised)"
    assert (machine.home / "made" / "bin" / "python").exists()


def test_an_interpreter_that_is_named_is_taken(machine: Machine) -> None:
    machine.add("python3.12", arguments="--enable-optimizations")
    plain = machine.add("plain")
    said = machine.taken(PYTHON=plain)
    assert said == f"environment: made, Python of the test of {plain} (PYTHON= names it)"
    old = machine.add("old", version=(3, 10))
    assert machine.taken(PYTHON=old, code=1) == f"PYTHON={old} does not run, or is older than Python 3.11."


def test_else_it_is_the_first_that_is_new_enough(machine: Machine) -> None:
    machine.add("python3", version=(3, 10))
    first = machine.add("python3.13", version=(3, 13))
    machine.add("python3.12")
    why = "the first that is new enough; none was built optimised"
    assert machine.taken() == f"environment: made, Python of the test of {first} ({why})"


def test_one_without_pip_is_made_again(machine: Machine) -> None:
    """Where the module venv is not whole, or is interrupted, the interpreter is there, and pip is not."""
    machine.taken()
    assert machine.taken(keep=True) == "environment: installing bookie-aio and what it needs"
    (machine.home / "made" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    assert machine.taken(keep=True).startswith("environment: made, Python of the test of ")
    assert machine.taken(keep=True) == "environment: installing bookie-aio and what it needs"


def test_each_python_that_the_package_claims_is_one_that_the_suite_is_run_on() -> None:
    package = tomllib.loads((ENVIRONMENT.parents[1] / "pyproject.toml").read_text())
    versions = [f"{major}.{minor}" for major, minor in VERSIONS]
    named = "Programming Language :: Python :: "
    claimed = [text.removeprefix(named) for text in package["project"]["classifiers"] if named in text]
    assert claimed == [version for version in versions if version in claimed]
    assert package["project"]["requires-python"] == f">={claimed[0]}"
    assert package["tool"]["mypy"]["python_version"] == claimed[0] == versions[0]
    assert package["tool"]["ruff"]["target-version"] == f"py{claimed[0].replace('.', '')}"
    checked = (ENVIRONMENT.parents[1] / "Makefile").read_text()
    assert f"mypy --python-version {versions[-1]}" in checked
    assert all(f"python{version}" in ENVIRONMENT.read_text() for version in versions)
