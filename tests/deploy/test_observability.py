"""Rules, dashboard and documents name what the processes export, and nothing else; promtool agrees with all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported_metrics import Exported, exported

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
RULES = OBSERVABILITY / "rules" / "kvfleet.yml"
DASHBOARD = OBSERVABILITY / "grafana" / "kvfleet.json"
OF_PROMETHEUS = {"up": ("job", "instance", "namespace")}
TARGET_LABELS = {"instance", "job", "namespace"}
NAME = re.compile(r"\b(?:kvfleet|process)_\w+|\bkvfleet:[\w:]+|\bup\b(?=[\s{])")
BY = re.compile(r"\b(?:by|without|on|group_left|ignoring)\s*\(([^)]*)\)")
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$model": ".*", "$instance": ".*", "$price": "2"}


@cache
def metrics() -> dict[str, Exported]:
    return exported()


@cache
def series() -> dict[str, tuple[str, ...]]:
    """Every name that a query may use, with its labels."""
    known: dict[str, tuple[str, ...]] = dict(OF_PROMETHEUS)
    for metric in metrics().values():
        for name in metric.series:
            known[name] = metric.labels + (("le",) if name.endswith("_bucket") else ())
    return known


@cache
def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return found


def rules(kind: str) -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"] if kind in rule]


@cache
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Where, and the expression."""
    for rule in (*rules("record"), *rules("alert")):
        yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], with_variables(target["expr"])


def with_variables(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def promtool(*arguments: str | Path) -> str:
    local = ROOT / ".tools" / "bin" / "promtool"
    tool = str(local) if local.exists() else shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool: run scripts/deploy_tools")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------------- names


def test_every_name_in_a_query_is_exported() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    for where, expr in queries():
        used = set(NAME.findall(expr))
        assert used, where
        assert used <= series().keys() | recorded, where


def test_every_label_in_a_query_is_one_of_its_series() -> None:
    """Labels of matchers belong to their metric, those of aggregations to some metric of the expression."""
    recorded = {rule["record"]: labels_of(rule["expr"]) for rule in rules("record")}
    for where, expr in queries():
        for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", expr):
            known = set(recorded.get(name) or series()[name]) | TARGET_LABELS
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= known, f"{where}: {name}"
        known = set(TARGET_LABELS)
        for name in NAME.findall(expr):
            known |= set(recorded[name] if name in recorded else series()[name])
        for said in BY.findall(expr):
            assert {label.strip() for label in said.split(",") if label.strip()} <= known, where


def labels_of(expr: str) -> set[str]:
    """At most these are left by an expression."""
    return {label for name in NAME.findall(expr) for label in series().get(name, ())} | TARGET_LABELS


def test_names_end_in_units_and_no_two_metrics_share_a_family() -> None:
    states = ("_waiting", "_running", "_used", "_cached", "_refused", "_malformed", "_dropped", "_lost", "_unsent")
    families: dict[str, str] = {}
    for name, metric in metrics().items():
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert not name.removesuffix("_total").endswith(states), f"{name}: what is counted comes last"
        family = name.removesuffix("_total")
        assert families.setdefault(family, name) == name, f"{name} and {families[family]}"


def test_the_documented_metrics_are_the_exported_ones() -> None:
    row = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\| ([^|]*)\| (.*) \|$", re.M)
    rows = row.findall((ROOT / "docs/metrics.md").read_text())
    documented = {name: (kind, labels.strip()) for name, kind, _, labels, _ in rows}
    assert len(documented) == len(rows), "one row each"
    assert documented.keys() == metrics().keys()
    for name, metric in metrics().items():
        assert documented[name] == (metric.kind, ", ".join(metric.labels)), name
    assert all(unit.strip() and meaning.strip() for *_, unit, _, meaning in rows)


def test_names_in_documents_exist() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    families = {name.removesuffix("_total") for name in metrics()}
    for path in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"\bkvfleet(?:_[a-z0-9]+){2,}\b(?!\*|_)", path.read_text()):
            assert name in series().keys() | metrics().keys() | recorded | families, f"{path.name}: {name}"


# ---------------------------------------------------------------------- alerts


def test_alerts_say_what_to_do() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    sections = re.findall(r"^## (\w+)$", runbook, re.M)
    alerts = [rule["alert"] for rule in rules("alert")]
    assert len(set(alerts)) == len(alerts)
    assert sorted(sections) == sorted(alerts)
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, rule["alert"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
    for section in re.split(r"^## ", runbook, flags=re.M)[1:]:
        assert all(word in section for word in ("Means:", "Look at", "o: ")) or "do: as for" in section, section[:40]


def test_every_alert_is_tested_both_ways() -> None:
    fires, silent = set(), set()
    for path in (OBSERVABILITY / "rules_test").glob("*.yml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for one in test["alert_rule_test"]:
                (fires if one["exp_alerts"] else silent).add(one["alertname"])
    alerts = {rule["alert"] for rule in rules("alert")}
    assert fires == alerts
    assert silent == alerts


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", RULES)


def test_promtool_runs_the_rules_tests() -> None:
    promtool("test", "rules", *sorted((OBSERVABILITY / "rules_test").glob("*.yml")))


def test_promtool_accepts_the_configuration() -> None:
    """That of Kubernetes is left out: Debian's Prometheus is built without its service discovery."""
    promtool("check", "config", OBSERVABILITY / "prometheus.yml")


def test_the_configurations_name_the_rules() -> None:
    for path in OBSERVABILITY.glob("prometheus*.yml"):
        config = yaml.safe_load(path.read_text())
        assert config["rule_files"] == ["rules/kvfleet.yml"]
        assert [job["job_name"] for job in config["scrape_configs"]] == ["kvfleet"]


def test_nothing_is_added_up_that_may_be_missing() -> None:
    """`a + b` is nothing where one of them is: a fleet may have no vaults, and one role's processes may all be away."""
    for where, expr in queries():
        roles = {match[1] for match in re.finditer(r"\bkvfleet_(ingress|placement|worker|vault)_\w+", expr)}
        assert len(roles) < 2 or " + " not in expr, where


def test_refusals_and_malformed_messages_are_seen_without_vaults(tmp_path: Path) -> None:
    said = {panel["title"]: panel["targets"][-1]["expr"] for panel in panels()}
    only_workers = [
        {"series": 'kvfleet_worker_refused_handshakes_total{instance="w0", reason="tls"}', "values": "0+1x20"},
        {"series": 'kvfleet_worker_malformed_messages_total{instance="w0"}', "values": "0+60x20"},
    ]
    vaults = [
        {"series": 'kvfleet_vault_refused_handshakes_total{instance="v0", reason="tls"}', "values": "0+2x20"},
        {"series": 'kvfleet_vault_malformed_messages_total{instance="v0"}', "values": "0+120x20"},
    ]
    tests = [
        {
            "interval": "1m",
            "input_series": series_,
            "promql_expr_test": [
                {
                    "expr": with_variables(said[title]),
                    "eval_time": "10m",
                    "exp_samples": [{"labels": labels, "value": value}],
                }
                for title, labels, value in (
                    ("Refused connections", '{reason="tls"}', refused),
                    ("Lost on the way", "{}", malformed),
                )
            ],
        }
        for series_, refused, malformed in ((only_workers, 5, 1), (only_workers + vaults, 15, 3))
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)


# ---------------------------------------------------------------------- dashboard

PANEL_KEYS = {"id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "options", "targets"}
DASHBOARD_KEYS = {
    "uid", "title", "description", "tags", "timezone", "editable", "graphTooltip", "schemaVersion", "version",
    "refresh", "time", "fiscalYearStartMonth", "liveNow", "weekStart", "annotations", "links", "panels", "templating",
}  # fmt: skip
UNITS = {"none", "s", "percentunit", "reqps", "ops", "Bps", "bytes", "dB"}
ROWS = [
    "Overview", "Latency", "Throughput and goodput", "Cache and tiers", "Placement quality", "Workers and devices",
    "Vaults", "Tenants and cost", "Autoscaling", "NATS",
]  # fmt: skip


def test_the_dashboard_has_its_form() -> None:
    board = dashboard()
    assert board.keys() == DASHBOARD_KEYS
    assert [variable["name"] for variable in board["templating"]["list"]] == [
        "datasource",
        "model",
        "instance",
        "price",
    ]
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == ROWS
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel.keys() == PANEL_KEYS, panel["title"]
        assert panel["type"] in ("timeseries", "stat"), panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_cover_one_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]


def test_legends_name_labels_that_are_there() -> None:
    recorded = {rule["record"]: labels_of(rule["expr"]) for rule in rules("record")}
    for panel in panels():
        for target in panel["targets"]:
            known = set(TARGET_LABELS)
            for name in NAME.findall(target["expr"]):
                known |= set(recorded[name] if name in recorded else series()[name])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    listed = [
        {"record": f"kvfleet:panel_{panel['id']}_{target['refId']}", "expr": with_variables(target["expr"])}
        for panel in panels()
        for target in panel["targets"]
    ]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": listed}]}))
    promtool("check", "rules", path)
