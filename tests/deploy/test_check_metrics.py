"""What scripts/check_metrics asks, without a fleet and without Prometheus."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_metrics"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("check_metrics", str(SCRIPT))
    spec = importlib.util.spec_from_loader("check_metrics", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_metrics"] = module
    loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


def test_it_explains_itself_and_lists_what_it_asks() -> None:
    assert "--fleet" in run("--help").stdout
    listed = run("--list")
    assert listed.returncode == 0
    assert "kvfleet_ingress_ttft_seconds_bucket" in listed.stdout
    assert "$" not in listed.stdout, "variables have values"


def test_without_prometheus_it_says_how_to_get_it(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(script, "ROOT", Path("/nowhere"))
    with pytest.raises(SystemExit, match="scripts/deploy_tools"):
        script.find_tool("prometheus", None)


def test_the_series_that_an_alert_looks_at(script: ModuleType) -> None:
    expr = (
        'sum by (instance) (increase(kvfleet_vault_things_total{reason!~"gone|timeout"}[10m])) > 5\n'
        'and kvfleet:hits:ratio > 0.7 or up{job=~"kvfleet.*"} == 0'
    )
    assert [name for name, _ in script.SELECTOR.findall(expr)] == [
        "kvfleet_vault_things_total",
        "kvfleet:hits:ratio",
        "up",
    ]
    assert script.SELECTOR.findall(expr)[0][1] == '{reason!~"gone|timeout"}'


def test_only_what_is_declared_may_have_no_data(script: ModuleType) -> None:
    def query(expr: str) -> object:
        return script.Query("kvfleet", "panel", expr)

    assert script.excuse(query("kvfleet_worker_device_utilisation_ratio"), []) == "there is no GPU with NVML"
    assert script.excuse(query("sum(kvfleet_worker_steps_total)"), []) is None
    assert script.excuse(query("kvfleet_model_ready_replicas"), ["kvfleet_model_"]) == "--except kvfleet_model_"


def test_a_query_without_a_number_has_no_data(script: ModuleType) -> None:
    class Answers(script.Prometheus):  # type: ignore[name-defined,misc]
        def __init__(self, *values: str) -> None:
            self.values = values

        def get(self, path: str, **params: str) -> object:
            return {"result": [{"value": [0, value]} for value in self.values]}

    assert Answers().value("x") == (0, None)
    assert Answers("NaN", "+Inf").value("x") == (2, None)
    assert Answers("NaN", "0").value("x") == (2, 0.0)
