"""Whatever checkov is told to skip has its reason beside it. What it finds otherwise, scripts/deploy_check says."""

from __future__ import annotations

import re

import yaml

from tests.deploy.k8s_render import ROOT

CONFIGURATION = ROOT / "deploy" / ".checkov.yaml"


def test_each_skip_has_a_reason() -> None:
    text = CONFIGURATION.read_text()
    reasons = dict(re.findall(r"^  - (CKV\w+) # (.{30,})$", text, re.MULTILINE))
    assert list(reasons) == yaml.safe_load(text)["skip-check"]
