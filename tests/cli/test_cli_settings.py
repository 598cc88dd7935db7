"""Settings: where a value comes from, what is refused, and docs/CONFIGURATION.md, which lists all keys.

`python -m tests.cli.test_cli_settings` writes the tables of the page again.
"""

from __future__ import annotations

import json
import re
import signal
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from client_aio.cli.config import all_keys
from client_aio.cli.settings import (
    _UNCHECKED,
    SECTIONS,
    Setting,
    Settings,
    _check_range,
    _fields_of,
    document,
)
from client_aio.config import AutoRecoveryConfig, ClientConfig
from metadata.errors import InvalidArgumentError
from tests.support.cli import TIMEOUT_S, Cli

if TYPE_CHECKING:
    from tests.support.cli import RunningCluster

PAGE = Path(__file__).parent.parent.parent / "docs" / "CONFIGURATION.md"
TABLES = re.compile(r"(?<=<!-- keys -->\n)(.*?)(?=<!-- /keys -->)", re.DOTALL)


class User(Cli):
    """A user with a folder of settings, and variables."""

    def __init__(self, home: Path, **variables: str) -> None:
        super().__init__()
        self.home = home
        self.variables = {"XDG_CONFIG_HOME": str(home), **variables}

    def environment(self) -> dict[str, str]:
        return super().environment() | self.variables

    def writes(self, text: str) -> Path:
        """Write the user's file of settings."""
        path = self.home / "bookie-aio" / "config.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def shown(self, *arguments: str) -> dict[str, tuple[Any, str]]:
        """Return the value and the source of each setting that is set."""
        rows = json.loads(self.run(*arguments, "config", "show", "--changed", "-o", "json"))
        return {row["key"]: (row["value"], row["from"]) for row in rows if row["key"] != "output"}

    def refused(self, *arguments: str) -> str:
        """Run a command that is refused for its settings, and return the one line that says why."""
        (line,) = self.run(*(arguments or ("config", "show")), code=2).decode().splitlines()
        return line


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


# --- the table of keys --------------------------------------------------------------------------------


def test_the_page_lists_every_key_as_the_code_has_it() -> None:
    found = TABLES.search(PAGE.read_text())
    assert found is not None
    assert found[0] == document(all_keys().values()), "write it again: python -m tests.cli.test_cli_settings"


def test_every_key_says_what_it_is_for_and_has_a_variable_of_its_own() -> None:
    keys = all_keys()
    assert len({key.variable for key in keys.values()}) == len(keys)
    for key in keys.values():
        assert key.help.endswith((".", ":")) or "." in key.help, key
        if isinstance(key.default, float) and not key.name.startswith("bookie.storage.compaction"):
            assert key.unit or key.name == "bookie.weight", key


def test_the_example_of_the_page_is_accepted(user: User) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = user.writes(example)
    shown = user.shown()
    assert shown["bookie.limits.polls_max"] == (50_000, str(path))
    assert set(tomllib.loads(example)["bookie"]) - {"limits"} <= {
        key.removeprefix("bookie.") for key in shown
    }


# --- precedence ---------------------------------------------------------------------------------------


def test_an_option_comes_before_the_environment_and_that_before_context_file_and_default(user: User) -> None:
    path = user.writes('metadata = "sqlite:///file"\noutput = "jsonl"\nloop = "asyncio"\n')
    assert user.shown()["metadata"] == ("sqlite:///file", str(path))
    user.run("context", "add", "one", "sqlite:///context", "-o", "json")
    assert user.shown()["metadata"] == ("sqlite:///context", "context one")
    user.variables["BOOKIE_AIO_METADATA"] = "sqlite:///variable"
    assert user.shown()["metadata"] == ("sqlite:///variable", "BOOKIE_AIO_METADATA")
    rows = json.loads(user.run("config", "show", "-o", "json", "--metadata", "sqlite:///option"))
    shown = {row["key"]: (row["value"], row["from"]) for row in rows}
    assert shown["metadata"] == ("sqlite:///option", "--metadata")
    assert shown["loop"] == ("asyncio", str(path))
    assert shown["output"] == ("json", "--output")
    assert shown["placement"] == ("weighted", "default")


def test_a_command_uses_what_is_set(user: User, cluster: RunningCluster, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.toml"
    path.write_text(f'metadata = "{cluster.cli.metadata}"\noutput = "jsonl"\n')
    rows = user.run("--config", str(path), "bookie", "list").decode().splitlines()
    assert [json.loads(row)["bookie_id"] for row in rows] == ["b1", "b2", "b3"]
    user.variables |= {"BOOKIE_AIO_CONFIG": str(path), "BOOKIE_AIO_OUTPUT": "json"}
    assert len(json.loads(user.run("bookie", "list"))) == 3
    assert user.run("bookie", "list", "-o", "table").split()[:2] == [b"bookie", b"id"]
    user.variables["BOOKIE_AIO_CONFIG"] = ""
    assert "no metadata store is named" in user.refused("bookie", "list")


@pytest.mark.parametrize(
    "command", [("bookie", "serve", "--dir", "d"), ("bookie", "format", "--dir", "d"), ("cluster", "up", "d")]
)
def test_what_makes_a_bookie_refuses_a_context_that_it_would_not_go_by(
    user: User, command: tuple[str, ...]
) -> None:
    user.run("context", "add", "prod", "sqlite:///context")
    for named in ("prod", "nosuch"):
        assert f"--context names '{named}'" in user.refused("--context", named, *command)


def test_a_client_has_the_settings_of_its_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        "[client]\nadd_timeout_s = 3\nledger_id_block = 7\n[autorecovery]\nworker_bytes_per_s = 2097152\n"
    )
    monkeypatch.setenv("BOOKIE_AIO_CLIENT_ADD_TIMEOUT_S", "4.5")
    settings = Settings(config=str(path))
    config = settings.made("client", ClientConfig)
    assert config == ClientConfig(add_timeout_s=4.5, ledger_id_block=7)
    assert settings.defaults_of("autorecovery run", ["worker_rate"]) == {"worker_rate": 2.0}
    made = settings.made("autorecovery", AutoRecoveryConfig, lost_bookie_delay_s=9.0)
    assert made == AutoRecoveryConfig(worker_bytes_per_s=2_097_152, lost_bookie_delay_s=9.0)


def test_a_bookie_serves_by_its_file(user: User, tmp_path: Path) -> None:
    user.writes(
        f'metadata = "sqlite://{tmp_path}/metadata.db"\noutput = "jsonl"\nlog_json = true\n'
        f'[bookie]\ndir = ["{tmp_path}/data"]\nid = "b7"\nlisten = "127.0.0.1:0"\nrack = "r9"\n'
        "[bookie.limits]\nconnections_max = 77\n[bookie.storage]\nsegment_bytes = 16777216\n"
        "[bookie.storage.scrub]\ninterval_s = 60.0\n"
    )
    user.variables["BOOKIE_AIO_BOOKIE_RACK"] = "r2"
    process = user.start("bookie", "serve")
    assert process.stdout is not None
    served = json.loads(process.stdout.readline())
    assert served["bookie_id"] == "b7"
    info = json.loads(user.run("bookie", "info", served["addresses"][0], "-o", "json"))
    assert info["connections_max"] == 77
    (row,) = json.loads(user.run("bookie", "list", "-o", "json"))
    assert row["rack"] == "r2"
    segments = list((tmp_path / "data").glob("*.segment"))
    assert {path.stat().st_size for path in segments} == {16_777_216}
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error.decode()


def test_a_cluster_on_this_machine_takes_nothing_that_is_set_for_a_bookie(user: User, tmp_path: Path) -> None:
    user.writes('metadata = "zk://nosuch:1/x"\n[bookie]\nlisten = "127.0.0.1:1"\nhttp = "127.0.0.1:1"\n')
    user.variables["BOOKIE_AIO_BOOKIE_ADVERTISE"] = "nosuch:1"
    process = user.start("cluster", "up", "-n", "2", "--dir", str(tmp_path / "c"), "-o", "jsonl")
    assert process.stdout is not None
    cluster = json.loads(process.stdout.readline() or b"{}")
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error.decode()
    assert cluster["metadata"].startswith("sqlite://")
    assert [row["http"] for row in cluster["bookies"]] == [None, None]
    assert all(row["addresses"][0].startswith("127.0.0.1:") for row in cluster["bookies"])


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[bookie]\nrak = 'r1'\n", "bookie.rak is no setting; the nearest one is bookie.rack"),
        ("[client]\nadd_timeout = 1\n", "the nearest one is client.add_timeout_s"),
        ("[bookie.limits]\npolls = 1\n", "the nearest one is bookie.limits.polls_max"),
        ("meta = 'x'\n", "the nearest one is metadata"),
        ("bookie = 5\n", "bookie is no setting"),
        ("[metadata]\nuri = 'x'\n", "metadata is one value"),
        ("output = ['json']\n", "output is one value"),
        ("output = \n", "line 1"),
        ("\x00", "config.toml"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_nearest_key(user: User, text: str, says: str) -> None:
    path = user.writes(text)
    line = user.refused()
    assert line.startswith(f"bookie-aio: {path}")
    assert says in line
    assert user.run("config", "show", "--help")


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "says"),
    [
        ("BOOKIE_AIO_METADTA", "x", ("ledger", "list"), "the nearest one is BOOKIE_AIO_METADATA"),
        ("BOOKIE_AIO_CLIENT_ADD_TIMOUT_S", "1", ("ledger", "list"), "BOOKIE_AIO_CLIENT_ADD_TIMEOUT_S"),
        ("BOOKIE_AIO_CONFIG", "/no/such/file", ("ledger", "list"), "/no/such/file: No such file"),
        ("BOOKIE_AIO_CONTEXT", "nosuch", ("ledger", "list"), "there is no context 'nosuch'"),
        ("BOOKIE_AIO_OUTPUT", "xml", ("ledger", "list"), "output of BOOKIE_AIO_OUTPUT"),
        ("BOOKIE_AIO_PLACEMENT", "x", ("ledger", "create"), "variable BOOKIE_AIO_PLACEMENT"),
        ("BOOKIE_AIO_BOOKIE_WEIGHT", "x", ("bookie", "serve", "--dir", "/x"), "bookie.weight of BOOKIE"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_one_line(
    user: User, variable: str, value: str, arguments: tuple[str, ...], says: str
) -> None:
    user.variables[variable] = value
    assert says in user.refused(*arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[client]\nadd_timeout_s = 'soon'\n", "client.add_timeout_s"),
        ("[client]\nledger_id_block = 1.5\n", "not a whole number"),
        ("[client]\nadd_timeout_s = true\n", "is True, which is not a number"),
        (
            "[client]\nadd_timeout_s = -1\n",
            "the settings of [client]: add_timeout_s -1 is not a positive number",
        ),
    ],
)
def test_a_wrong_value_of_the_client_is_one_line(user: User, text: str, says: str) -> None:
    user.writes(text)
    assert says in user.refused("ledger", "list", "--metadata", "sqlite:///x/y")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("bookie.storage.compaction.loop_share", "0.0", "not above zero"),
        ("bookie.storage.compaction.loop_share", "1.5", "above 1, and is a part of a whole"),
        ("bookie.storage.compaction.bytes_per_s", "0", "not above zero"),
        ("bookie.storage.segment_bytes", "1000", "below 65,536"),
        ("bookie.storage.space.retry_s", "nan", "not a finite number"),
        ("bookie.storage.space.floor_free_bytes", "-1", "below 0"),
        ("bookie.storage.scrub.bytes_per_s", "-1", "below 0"),
        ("bookie.limits.write_stall_timeout_s", "nan", "not a finite number"),
    ],
)
def test_a_value_that_would_stop_a_bookie_later_is_refused_at_its_start(
    user: User, tmp_path: Path, key: str, value: str, says: str
) -> None:
    user.writes(f"{key} = {value}\n")
    serve = ("bookie", "serve", "--dir", str(tmp_path / "data"), "--metadata", f"sqlite://{tmp_path}/m.db")
    line = user.refused(*serve)
    assert key in line
    assert says in line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("limits", "is_refused"),
    [
        ("", True),
        (
            "[bookie.limits]\nframe_bytes_max = 1048576\nentry_bytes_max = 65536\nread_bytes_max = 65536\n",
            True,
        ),
        (
            "[bookie.limits]\nframe_bytes_max = 1040384\nentry_bytes_max = 65536\nread_bytes_max = 65536\n",
            False,
        ),
    ],
)
def test_a_segment_has_room_for_the_largest_frame(
    user: User, tmp_path: Path, limits: str, is_refused: bool
) -> None:
    user.writes(f"{limits}[bookie.storage]\nsegment_bytes = 1048576\n")
    serve = ("bookie", "serve", "--dir", str(tmp_path / "data"), "--metadata", f"sqlite://{tmp_path}/m.db")
    if is_refused:
        line = user.refused(*serve)
        assert "bookie.storage.segment_bytes 1,048,576" in line
        assert "bookie.limits.frame_bytes_max" in line
        assert not (tmp_path / "data").exists()
        return
    process = user.start(*serve, "--listen", "127.0.0.1:0")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"bookie ")
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error.decode()


def test_every_key_of_the_storage_has_a_range() -> None:
    """The classes do not look at their values, so a key that is added needs a decision here."""
    for section in SECTIONS:
        for key, default in _fields_of(section):
            if not key.startswith(_UNCHECKED):
                continue
            setting = Setting(default, "a test")
            assert _check_range(default, key, setting) == default
            with pytest.raises(InvalidArgumentError, match="below"):
                _check_range(-1, key, setting)
            if key.endswith("_share") or "compact_below" in key:
                with pytest.raises(InvalidArgumentError, match="above 1"):
                    _check_range(1.01, key, setting)


def test_variables_of_the_build_are_no_settings(user: User) -> None:
    user.variables |= {"BOOKIE_AIO_COMPILE": "1", "BOOKIE_AIO_OPT_LEVEL": "3"}
    assert user.shown() == {}


def test_variables_that_kubernetes_sets_are_passed_over(user: User) -> None:
    user.variables |= {
        "BOOKIE_AIO_SERVICE_HOST": "10.0.0.1",
        "BOOKIE_AIO_SERVICE_PORT": "3181",
        "BOOKIE_AIO_SERVICE_PORT_HTTP": "9464",
        "BOOKIE_AIO_PORT": "tcp://10.0.0.1:3181",
        "BOOKIE_AIO_PORT_3181_TCP": "tcp://10.0.0.1:3181",
        "BOOKIE_AIO_PORT_3181_TCP_ADDR": "10.0.0.1",
    }
    assert user.shown() == {}


def test_a_user_without_a_home_has_defaults(user: User) -> None:
    user.variables |= {"XDG_CONFIG_HOME": "", "HOME": ""}
    assert user.shown() == {}
    assert "set HOME" in user.refused("context", "add", "one", "sqlite:///x")


# --- contexts -----------------------------------------------------------------------------------------


def test_contexts_are_added_used_listed_and_removed(user: User, cluster: RunningCluster) -> None:
    assert user.rows("context", "list") == []
    user.run("context", "add", "here", str(cluster.cli.metadata), "--form", "jsonl")
    user.run("context", "add", "zoo", "zk://z:2181/x")
    assert user.rows("context", "list") == [
        {"name": "here", "in_use": True, "metadata": cluster.cli.metadata, "output": "jsonl"},
        {"name": "zoo", "in_use": False, "metadata": "zk://z:2181/x", "output": None},
    ]
    assert len(user.run("bookie", "list").splitlines()) == 3
    user.run("context", "use", "zoo")
    assert user.shown()["metadata"][0] == "zk://z:2181/x"
    assert user.shown("--context", "here")["metadata"][0] == cluster.cli.metadata
    assert "the contexts are: here, zoo" in user.refused("context", "use", "nosuch")
    user.run("context", "use")
    assert user.shown() == {}
    user.run("context", "remove", "here")
    user.run("context", "remove", "zoo")
    assert "the contexts are: none" in user.refused("context", "remove", "zoo")
    path = user.home / "bookie-aio" / "contexts.toml"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_name_with_any_characters_is_kept(user: User) -> None:
    for name in ('a"b', "a.b", "naïve \\", "-", "🪵"):
        user.run("context", "add", "--use", "--", name, "zk://z:2181/x")
        assert user.shown()["metadata"] == ("zk://z:2181/x", f"context {name}")
    assert "cannot be shown" in user.refused("context", "add", "a\nb", "zk://z:2181/x")
    assert "sqlite:///absolute/path" in user.refused("context", "add", "x", "ftp://x")
    user.run("context", "add", "--use", "x", "sqlite:///a\x7f🪵")
    assert user.shown()["metadata"] == ("sqlite:///a\x7f🪵", "context x")
    assert "as %FF in its URI" in user.refused("context", "add", "x", "sqlite:///\udcff")
    assert "the name of the context is empty" in user.refused("context", "add", "", "zk://z:2181/x")


def test_json_has_no_number_that_json_does_not_have(user: User) -> None:
    user.writes("client.add_timeout_s = inf\nclient.read_timeout_s = nan\n")
    shown = user.shown()
    assert [shown[f"client.{name}_timeout_s"][0] for name in ("add", "read")] == ["inf", "nan"]


def test_what_makes_a_bookie_or_a_cluster_passes_over_the_context(user: User, tmp_path: Path) -> None:
    user.run("context", "add", "prod", f"sqlite://{tmp_path}/prod.db")
    for command in (("serve", "--listen", "127.0.0.1:0"), ("format", "--new-cluster")):
        line = user.refused("bookie", *command, "--dir", str(tmp_path / "data"))
        assert "no metadata store is named" in line
    assert not (tmp_path / "prod.db").exists()


def test_a_bookie_starts_though_the_contexts_are_damaged(user: User, tmp_path: Path) -> None:
    user.run("context", "add", "one", "zk://z:2181/x")
    (user.home / "bookie-aio" / "contexts.toml").write_text("contexts = 3\n")
    user.variables["BOOKIE_AIO_CONTEXT"] = "nosuch"
    serve = ("--dir", str(tmp_path / "data"), "--metadata", f"sqlite://{tmp_path}/m.db")
    process = user.start("bookie", "serve", "--listen", "127.0.0.1:0", *serve)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"bookie ")
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error.decode()


def test_damaged_contexts_are_told(user: User) -> None:
    user.run("context", "add", "one", "zk://z:2181/x")
    path = user.home / "bookie-aio" / "contexts.toml"
    path.write_text("contexts = 3\n")
    assert f"{path} is damaged" in user.refused("context", "list")


def main() -> None:
    """Write the tables of the page again."""
    tables = document(all_keys().values())
    PAGE.write_text(TABLES.sub(lambda _: tables, PAGE.read_text()))


if __name__ == "__main__":
    main()
