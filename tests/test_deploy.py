"""`deploy/` is held against the code: command lines, the unit, manifests, alert rules, the dashboard."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from bookie_aio import metrics as of_bookie
from client_aio import metrics as of_client
from client_aio.cli import main
from client_aio.cli.settings import Settings
from metadata.metrics import of_process
from tests.support.cli import Cli

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "bookie-aio.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "docker" / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes" / "bookies.yaml"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "bookie-aio.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package `prometheus` has it)"
)


def loaded(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert all(loaded(path))


# --- command lines ------------------------------------------------------------------------------------


@cache
def root_command() -> Any:
    main.add_all()
    return typer.main.get_command(main.app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that words name, and the words behind its name."""
    found, rest = root_command(), list(words)
    while hasattr(found, "commands"):
        assert rest, f"{words} names a group of commands, and no command"
        assert rest[0] in found.commands, f"there is no command {rest[0]!r} in {words}"
        found = found.commands[rest.pop(0)]
    return found, rest


def parsed(words: list[str]) -> dict[str, Any]:
    """Parse a command line as `bookie-aio` does, and return the values.

    A file of settings that it names is the one of that name in `deploy/`.
    """
    config = ""
    if words[0] == "--config":
        (path,) = DEPLOY.rglob(Path(words[1]).name)
        config, words = str(path), words[2:]
    command, arguments = command_of(words)
    parent = command.context_class(root_command(), obj=Settings(config=config))
    *groups, name = words[: len(words) - len(arguments)]
    for group in groups:
        parent = command.context_class(root_command(), parent=parent, info_name=group)
    values: dict[str, Any] = command.make_context(name, arguments, parent=parent).params
    return values


def compose_services() -> dict[str, Any]:
    (document,) = loaded(COMPOSE)
    return {name: one for name, one in document["services"].items() if one["image"] == "bookie-aio"}


def pod() -> dict[str, Any]:
    (one,) = [each for each in loaded(KUBERNETES) if each["kind"] == "StatefulSet"]
    found: dict[str, Any] = one["spec"]["template"]["spec"]
    return found


def unit_command() -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    return shlex.split(line)


def dockerfile_words(instruction: str) -> list[str]:
    (found,) = re.findall(rf"^{instruction} .*?(\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def serve_lines() -> dict[str, list[str]]:
    """Return each command line that runs a bookie, without the program."""
    args = [re.sub(r"\$\(\w+\)", "bookie-0", word) for word in pod()["containers"][0]["args"]]
    return {
        "unit": unit_command()[1:],
        "image": dockerfile_words("CMD"),
        "pod": args,
        **{name: shlex.split(one["command"]) for name, one in compose_services().items()},
    }


@pytest.mark.parametrize("name", ["unit", "image", "pod", "b1", "b2", "b3"])
def test_each_bookie_is_started_by_options_that_there_are(name: str) -> None:
    words = serve_lines()[name]
    assert " ".join(words).count("bookie serve") == 1
    values = parsed(words)
    assert values["http"].endswith(":9464")
    is_loopback = values["listen"].startswith("127.")
    assert is_loopback != values["allow_remote_without_auth"]
    assert is_loopback or values["autorecovery"]


@pytest.mark.parametrize("name", ["image", "pod", "b1", "b2", "b3"])
def test_a_container_without_its_data_is_a_new_bookie(name: str, tmp_path: Path) -> None:
    cli, volume = Cli(f"sqlite://{tmp_path / 'metadata.db'}"), tmp_path / "volume"
    bookie_id = parsed(serve_lines()[name])["bookie_id"]
    ids = () if bookie_id is None else ("--id", bookie_id)
    starts = ("bookie", "format", "--new-cluster", "--dir", str(volume / "bookie"), *ids)
    first = json.loads(cli.run(*starts, "-o", "json"))["bookie_id"]
    assert json.loads(cli.run(*starts, "-o", "json"))["bookie_id"] == first, "the id lives in the volume"
    shutil.rmtree(volume)  # it was lost
    second = json.loads(cli.run(*starts, "-o", "json"))["bookie_id"]
    cli.run("bookie", "forget", second)
    assert b"was decommissioned" in cli.run(*starts, code=1)
    shutil.rmtree(volume)
    third = json.loads(cli.run(*starts, "-o", "json"))["bookie_id"]
    assert len({first, second, third}) == 3


def test_a_machine_whose_disk_may_be_away_has_a_name() -> None:
    assert parsed(serve_lines()["unit"])["bookie_id"] == "b1"


def test_an_option_that_there_is_not_is_noticed() -> None:
    with pytest.raises(Exception, match="--nosuch"):
        parsed(["bookie", "serve", "--dir", "/x", "--nosuch"])


def test_the_unit_keeps_its_data_in_the_folder_that_systemd_makes() -> None:
    values = parsed(unit_command()[1:])
    (folder,) = re.findall(r"^StateDirectory=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert [str(one) for one in values["directories"]] == [f"/var/lib/{folder}"]
    assert values["metadata"].startswith("zk://")


def test_every_command_that_a_text_names_exists() -> None:
    paths = [path for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml", ".service", "")]
    texts = "\n".join(path.read_text() for path in paths if path.is_file())
    named = re.findall(r"`bookie-aio ([^`]+)`|exec b1 bookie-aio (.*)", texts)
    assert len(named) > 5
    for words in named:
        command, rest = command_of(shlex.split("".join(words)))
        known = {option for one in command.params for option in one.opts}
        assert {word for word in rest if word.startswith("-")} <= known


# --- systemd ------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    # The program and the settings are where an installation puts them; here they are elsewhere.
    text = UNIT.read_text().replace(unit_command()[0], sys.executable)
    path = tmp_path / UNIT.name
    path.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, [])


def test_the_unit_restarts_unless_the_exit_code_says_that_it_is_no_use() -> None:
    from client_aio.cli.exit_codes import Exit

    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert set(map(int, codes.split())) == {Exit.USAGE, Exit.DAMAGED}


def test_the_unit_tells_how_its_user_may_write_on_other_disks() -> None:
    text = UNIT.read_text()
    (folder,) = re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
    assert re.search(r"^DynamicUser=yes$", text, re.MULTILINE)
    assert f"/var/lib/private/{folder}." in text
    # A user that is drawn owns nothing elsewhere.
    assert re.search(r"DynamicUser=no, User=\S+, and\n# +ReadWritePaths=", text)
    assert f"systemctl disable --now {UNIT.stem}" in text


# --- containers ---------------------------------------------------------------------------------------


def test_the_image_copies_what_there_is_and_does_not_run_as_root() -> None:
    text = DOCKERFILE.read_text()
    copied = [
        words
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for words in line.split()[:-1]
    ]
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    last_stage = text[text.rindex("FROM ") :]
    assert re.search(r"^USER 10001:10001$", last_stage, re.MULTILINE)
    assert dockerfile_words("ENTRYPOINT") == ["bookie-aio"]


def test_health_is_asked_where_it_is_answered() -> None:
    from bookie_aio.server import http

    paths = set(re.findall(r'"(/\w[\w/.]*)": Kept', Path(http.__file__).read_text()))
    container = pod()["containers"][0]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert asked == {"path": path, "port": "http"}
        assert path in paths
    assert ports == {"bookie": 3181, "http": 9464}
    assert "http://127.0.0.1:9464/healthz" in dockerfile_words("HEALTHCHECK")[-1]


def test_selectors_of_kubernetes_fit_together() -> None:
    by_kind = {one["kind"]: one for one in loaded(KUBERNETES)}
    stateful = by_kind["StatefulSet"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert stateful["spec"]["serviceName"] == by_kind["Service"]["metadata"]["name"]
    (volume,) = stateful["spec"]["volumeClaimTemplates"]
    (mount,) = pod()["containers"][0]["volumeMounts"]
    assert volume["metadata"]["name"] == mount["name"]
    values = parsed(serve_lines()["pod"])
    assert str(values["directories"][0]).startswith(mount["mountPath"])
    assert pod()["securityContext"]["runAsNonRoot"] is True


def test_the_network_lets_in_clients_and_from_elsewhere_only_the_scrapes() -> None:
    (policy,) = [one for one in loaded(KUBERNETES) if one["kind"] == "NetworkPolicy"]
    inside, scrapes = policy["spec"]["ingress"]
    assert all(set(one) == {"podSelector"} for one in inside["from"])
    namespace = {"kubernetes.io/metadata.name": "monitoring"}
    assert scrapes["from"] == [{"namespaceSelector": {"matchLabels": namespace}}]
    ports = {one["name"]: one["containerPort"] for one in pod()["containers"][0]["ports"]}
    assert scrapes["ports"] == [{"protocol": "TCP", "port": ports["http"]}]


def test_containers_come_back_after_the_daemon_has_started_again() -> None:
    (document,) = loaded(COMPOSE)
    found = {name: one.get("restart") for name, one in document["services"].items()}
    assert found == dict.fromkeys(document["services"], "unless-stopped")


def test_prometheus_scrapes_the_pods_under_the_name_that_the_rules_read() -> None:
    (document,) = loaded(DEPLOY / "prometheus" / "kubernetes.yml")
    (job,) = document["scrape_configs"]
    assert f'job="{job["job_name"]}"' in ALERTS.read_text()
    assert document["rule_files"] == [ALERTS.name]
    label, port, instance = job["relabel_configs"]
    (stateful,) = [one for one in loaded(KUBERNETES) if one["kind"] == "StatefulSet"]
    assert label["regex"] == stateful["spec"]["template"]["metadata"]["labels"]["app"]
    assert port["regex"] in [one["name"] for one in pod()["containers"][0]["ports"]]
    assert label["action"] == port["action"] == "keep"
    assert instance["target_label"] == "instance"


def test_prometheus_scrapes_the_bookies_of_the_compose_file() -> None:
    (document,) = loaded(DEPLOY / "prometheus" / "prometheus.yml")
    (job,) = document["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{name}:9464" for name in compose_services()]}]
    assert f'job="{job["job_name"]}"' in ALERTS.read_text()
    assert document["rule_files"] == [ALERTS.name]


# --- metrics ------------------------------------------------------------------------------------------

METRICS = {one.name: one for one in (*of_bookie.METRICS, *of_client.METRICS)}
ADDED_LABELS = {"instance", "job", "le", "client"}


def alert_rules() -> list[dict[str, Any]]:
    ((group,),) = [document["groups"] for document in loaded(ALERTS)]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panel_expressions() -> dict[str, str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
    }


EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in alert_rules()},
    **panel_expressions(),
}


def unknown_in(expression: str) -> list[str]:
    """Return the metrics and labels of an expression that there are not."""
    of_a_process = {sample.name for family in of_process() for sample in family.samples}
    unknown, labels = [], set(ADDED_LABELS)
    for name in re.findall(r"\b(?:bookie_aio|process)_\w+", expression):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if base in METRICS and (base == name) != (METRICS[base].kind == "histogram"):
            labels |= set(METRICS[base].labels)
        elif name not in of_a_process:
            unknown.append(name)
    used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    for listed in re.findall(r"\bby \(([^)]*)\)", expression):
        used += listed.replace(",", " ").split()
    return unknown + [label for label in used if label not in labels]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_metrics_and_labels_of_an_expression_exist(name: str) -> None:
    assert unknown_in(EXPRESSIONS[name]) == []


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("rate(bookie_aio_entries_lost_total[1m])", "bookie_aio_entries_lost_total"),
        ("bookie_aio_add_seconds", "bookie_aio_add_seconds"),
        ("bookie_aio_writable_bucket", "bookie_aio_writable_bucket"),
        ('bookie_aio_segments{kind="sealed"}', "kind"),
        ("sum by (state) (bookie_aio_writable)", "state"),
        ("process_memory_bytes", "process_memory_bytes"),
    ],
)
def test_a_wrong_name_is_noticed(wrong: str, what: str) -> None:
    assert unknown_in(wrong) == [what]


def test_each_alert_says_what_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alert_rules()]
    assert len(set(names)) == len(names)
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert all(text.endswith(".") for text in rule["annotations"].values())


def test_each_alert_fires_in_a_case_of_the_tests_of_rules() -> None:
    (document,) = loaded(ALERTS.with_name("alerts-test.yaml"))
    checks = [check for case in document["tests"] for check in case["promql_expr_test"]]
    fired = re.findall(r'alertname="(\w+)"', str([check["exp_samples"] for check in checks]))
    assert set(fired) == {rule["alert"] for rule in alert_rules()}


def test_no_rule_is_silent_because_its_series_are_missing_or_tells_of_other_jobs() -> None:
    for rule in alert_rules():
        expression = rule["expr"]
        if re.search(r"\b(up|process_\w+)\b", expression):
            assert 'job="bookie-aio"' in expression
        # A sum over no series is no number, and equals nothing.
        for metric in re.findall(r"\b(?:sum|max|count)\(.*?(\bbookie_aio_\w+).*?\) == 0", expression):
            assert f"absent({metric})" in expression, rule["alert"]


async def test_a_bookie_that_starts_shows_the_metrics_that_the_rules_look_for() -> None:
    from bookie_aio.server.http import HttpServer

    # BookieRestarting counts its starts, and BookieNotServing wants the uptime to be missing.
    async with await HttpServer.listen("127.0.0.1", 0, clock=time.perf_counter) as endpoint:

        def scrape() -> str:
            with urllib.request.urlopen(f"http://{endpoint.address}/metrics") as answer:
                return str(answer.read(), "utf-8")

        shown = set(re.findall(r"^(\w+)", await asyncio.to_thread(scrape), re.MULTILINE))
    assert "process_start_time_seconds" in shown
    assert not [name for name in shown if name.startswith("bookie_aio_")]


def promtool(*arguments: str | Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_alert_rules_fire_when_they_should_and_else_are_silent() -> None:
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", ALERTS.with_name("alerts-test.yaml"))
    promtool("check", "config", ALERTS.with_name("prometheus.yml"))


@needs_promtool
def test_the_expressions_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    rules = [
        {
            "record": f"panel:{number}",
            "expr": expression.replace("$__rate_interval", "1m").replace("$instance", ".*"),
        }
        for number, expression in enumerate(panel_expressions().values())
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", path)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
