"""What `--help` promises is so: no option and no variable that nothing looks at."""

from __future__ import annotations

import re

import pytest

from benchmarks import every_command
from client_aio.cli import options
from tests.support.cli import Cli


def help_of(*command: str) -> str:
    """Return a command's help as words in a row, without the frame that is drawn around it."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", Cli().run(*command, "--help").decode()).split())


def test_cluster_up_names_no_variable_for_its_metadata() -> None:
    assert "BOOKIE_AIO_METADATA" in help_of("ledger", "list")
    text = help_of("cluster", "up")
    assert "--metadata" in text
    assert "BOOKIE_AIO_METADATA" not in text


@pytest.mark.parametrize("name", ["verify", "export", "import", "stats", "sweep"])
def test_spark_has_no_loop_to_choose(name: str) -> None:
    assert "--loop" in help_of("ledger", "list")
    assert "--loop" not in help_of("spark", name)


def test_spark_names_its_extra() -> None:
    assert "needs the extra [spark]" in help_of("spark")


def test_spark_stats_names_each_column_once(cli: Cli) -> None:
    pytest.importorskip("pyspark", reason="the extra [spark] is not installed; `make test` installs it")
    cli.run("log", "append", "summed-up", "-", stdin=b"a\n")
    text = cli.run("spark", "stats", "--log", "summed-up").decode()
    assert text.count("summed-up") == 1
    # The heading is folded where the terminal is narrow, a word a line: "last day" and "per day".
    assert text.count("per") == 1, text


def test_bench_says_what_bounds_each_measurement() -> None:
    assert "unless --entries is given" in help_of("bench", "write")
    assert "unless --entries is given" not in help_of("bench", "read")


@pytest.mark.parametrize(
    "command", [(), ("ledger",), ("ledger", "list"), ("ledger", "cat"), ("bookie", "serve")]
)
def test_flags_are_shown_without_a_type(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    assert "--help" in text
    assert "bool" not in text.lower()


def test_every_command_stands_in_the_script_that_tries_them_all() -> None:
    every = every_command.commands()
    assert len(every) > 50
    assert every.keys() - every_command.REAL.keys() - every_command.NOT_RUN == set()
    assert every_command.REAL.keys() - every.keys() == set()


class Tuned(BaseException):
    """The collector is tuned; raised to end a command before it does anything."""


@pytest.mark.parametrize("name", every_command.commands())
def test_every_command_tunes_the_collector_before_it_begins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune() -> None:
        raise Tuned

    monkeypatch.setattr(options, "tune_gc", tune)
    command = every_command.commands()[name]
    context = command.make_context(name, [], resilient_parsing=True)
    with pytest.raises(Tuned):
        command.invoke(context)


def test_a_value_of_the_wrong_type_is_refused_with_the_option_s_name() -> None:
    wrong = [
        text
        for name, command in every_command.commands().items()
        for text in every_command.bad_values(name.split(), command)
    ]
    assert wrong == []
