"""docs/OPERATING.md: each task has a block of commands that are there, and that do what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from benchmarks.operating import PRELUDE, TASKS, blocks, run
from client_aio.cli import main

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = re.compile(r"bookie-aio (.*?)(?: \|\| | \| | > | &$|; | \d?>> |#|$)", re.MULTILINE)


def test_each_task_has_a_block_and_each_block_a_task() -> None:
    assert blocks().keys() == {PRELUDE, *TASKS}


@pytest.mark.parametrize("name", [PRELUDE, *TASKS])
def test_the_commands_of_a_block_are_there_with_their_options(name: str, tmp_path: Path) -> None:
    text = blocks()[name]
    subprocess.run(["bash", "-n", "-c", text], check=True)
    main._add_groups(())
    found = 0
    for match in COMMAND.finditer(text):
        arguments = shlex.split(match[1].replace("$DATA/b3", str(tmp_path)).replace("$DATA", str(tmp_path)))
        command: Any = typer.main.get_command(main.app)
        context: Any = None
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        with command.make_context(command.name, arguments, parent=context):
            found += 1  # an option that is not there, or an argument too many, is an error
    assert found


SAID = {
    "Lose a bookie": ("would be repaired, nothing was changed", "bookie b3 is forgotten"),
    "Replace a disk": ("no damage found", "180 intact, 0 missing or not read, 0 damaged"),
    "Grow": ("bookie b5: writable, 0 ledgers",),
    "Shrink": ("bookie b3 has left the cluster",),
    "Upgrade one by one": ("0 ledgers repaired, 0 not",),
    "Back up": ("metadata.jsonl: ",),
    "Restore": ("nothing was written", "restored: "),
    "Find out why": ("healthy", "fsync us"),
}
"""What the commands of each task print, beside what `run` checks."""


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_is_done_as_it_is_written(name: str, tmp_path: Path) -> None:
    wrong, output = await run(name, tmp_path)
    assert not wrong, output
    for text in SAID[name]:
        assert text in output, output
