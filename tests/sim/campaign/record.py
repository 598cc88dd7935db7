"""The record of a campaign: how many seeds one state of the code has run, and what they came to.

Owns the file of results. It has one record for each key of a run (`tests.sim.campaign.run_key`); a later
campaign of the same code goes on behind the last seed. Code with another key begins a record of its own, and
the records before it stay.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.sim.campaign.run_key import ENTRY, ROOT, modules, run_key
from tests.sim.campaign.runner import CampaignError, run

if TYPE_CHECKING:
    from pathlib import Path


def version(root: Path = ROOT, entry: str = ENTRY) -> tuple[str, str]:
    """Return the key of the code that a run executes, and the last commit that changed one of its files.

    The key stays the same when a commit is amended, when documents change, and when a file is renamed or its
    comments change. Both have a mark where files differ from what was committed; without a repository the
    commit is "unknown".
    """
    mark = "-dirty" if changed_files(root, entry) else ""
    commit = _git(root, entry, "log", "-1", "--format=%h", "--abbrev=12")
    return f"run-{run_key(root, entry)}{mark}", f"{commit}{mark}" if commit else "unknown"


def changed_files(root: Path = ROOT, entry: str = ENTRY) -> list[str]:
    """Return the files of a run that differ from what was committed."""
    status = _git(root, entry, "status", "--porcelain", "--untracked-files=all")
    return [line[2:].strip() for line in status.splitlines()]


def _git(root: Path, entry: str, *arguments: str) -> str:
    files = sorted(str(path.relative_to(root)) for path in modules(root, entry).values())
    command = ["git", *arguments, "--", *files]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip("\n")


def go_on(
    path: Path, names: list[str], count: int, *, start: int | None = None, processes: int = 2
) -> dict[str, Any]:
    """Run `count` more seeds of this code's campaign, and return its record so far.

    The campaign goes on behind its last seed; `start` is the first seed of a campaign that has not begun. The
    file is written after each 500 seeds, so an interruption loses at most 500.

    Raises:
        CampaignError: files differ from what was committed, or the campaign has begun at another seed, or a
            process was killed.
    """
    if changed := changed_files():
        raise CampaignError("a campaign is of files that are committed; these are not: " + ", ".join(changed))
    records = json.loads(path.read_text()) if path.exists() else {}
    key, commit = version()
    if commit == "unknown":
        raise CampaignError("a campaign is of committed files, and there is no repository here")
    begun = records.get(key)
    if begun and start not in (None, begun["first_seed"], begun["next_seed"]):
        raise CampaignError(
            f"the campaign of these files has begun at seed {begun['first_seed']} and is at "
            f"{begun['next_seed']}; it cannot begin at {start}"
        )
    record = records.setdefault(
        key,
        {"commits": [], "first_seed": start or 0, "next_seed": start or 0, "seeds": 0, "simulated_s": 0.0,
         "elapsed_s": 0.0, "processor_s": 0.0, "callbacks": 0,
         "faults": {}, "effects": {}, "profiles": {}, "failures": []},
    )  # fmt: skip
    if commit not in record["commits"]:
        record["commits"].append(commit)
    while count > 0:
        part = min(count, 500)
        count -= part
        tally = run(names, range(record["next_seed"], record["next_seed"] + part), processes=processes)
        record["next_seed"] += part
        for figure in ("seeds", "simulated_s", "elapsed_s", "processor_s", "callbacks"):
            record[figure] += getattr(tally, figure)
        for figure in ("faults", "effects", "profiles"):
            record[figure] = dict(sorted((Counter(record[figure]) + getattr(tally, figure)).items()))
        record["failures"] += [list(failure[:3]) for failure in tally.failures]
        written = path.with_name(f".{path.name}.new")  # an interruption leaves the one or the other
        written.write_text(json.dumps(records, indent=1) + "\n")
        written.replace(path)
        print(f"{record['seeds']:,} seeds, {len(record['failures'])} violations", flush=True)
        for failure in tally.failures:
            print(f"  {failure[0]} {failure[1]}: {failure[3][:300]}", flush=True)
    return dict(record)
