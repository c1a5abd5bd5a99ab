"""`scripts/browser_install`: it installs once, says what it did, and fails without harm where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "browser_install"
USED = ("bash", "cat", "chmod", "mktemp", "rm", "tail", "timeout", "true")
BRINGS = 'printf "#!/bin/sh\\necho Chromium 1.2" >"$BIN/chromium"; chmod +x "$BIN/chromium"'


class Machine:
    """A PATH with the few programs that the script uses, and those that a test makes."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "log"
        for name in USED:
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.makes("id", "echo 0")

    def makes(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{script}\n")
        (self.bin / name).chmod(0o755)

    def apt(self, install: str) -> None:
        self.makes("apt-get", f'echo "$*" >>"{self.log}"; case $1 in install) {install} ;; esac')

    def run(self, **env: str) -> tuple[int, str]:
        own = {"PATH": str(self.bin), "BIN": str(self.bin), "TMPDIR": str(self.bin.parent), **env}
        done = subprocess.run([SCRIPT], env=own, capture_output=True, text=True, timeout=60)
        assert done.stdout == ""
        return done.returncode, done.stderr

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_it_installs_once(machine: Machine) -> None:
    machine.apt(BRINGS)
    code, said = machine.run()
    assert (code, said.splitlines()[-1]) == (0, "browser_install: installed Chromium 1.2")
    assert machine.asked == ["update -q", "install -y -q chromium"]
    code, said = machine.run()
    assert (code, said) == (0, f"browser_install: {machine.bin}/chromium is here\n")
    assert len(machine.asked) == 2


def test_old_lists_may_do(machine: Machine) -> None:
    machine.apt(f"{BRINGS} ;; update) exit 100")
    assert machine.run()[0] == 0


@pytest.mark.parametrize(
    ("install", "told"),
    [
        ("echo E: no such package; exit 100", "apt-get could not install chromium"),
        ("true", "the package chromium brought no program of that name"),
    ],
)
def test_what_apt_cannot_do_is_said(machine: Machine, install: str, told: str) -> None:
    machine.apt(install)
    code, said = machine.run()
    assert (code, told in said.splitlines()[-1]) == (1, True)


def test_only_root_and_only_where_there_is_apt(machine: Machine) -> None:
    assert "no apt-get here" in machine.run()[1]
    machine.apt(BRINGS)
    machine.makes("id", "echo 1000")
    code, said = machine.run()
    assert (code, said) == (1, "browser_install: only root can install it: apt-get install chromium\n")
    assert machine.asked == []


def test_a_browser_that_is_named_is_taken_or_missed(machine: Machine) -> None:
    machine.apt(BRINGS)
    assert machine.run(KVFLEET_CHROMIUM="/nowhere/chrome")[0] == 1
    machine.makes("chrome", "echo")
    assert machine.run(KVFLEET_CHROMIUM="chrome") == (0, f"browser_install: {machine.bin}/chrome is here\n")
    assert machine.asked == []


def test_ci_installs_it_before_the_tests_and_goes_on_without() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert 'scripts/browser_install >"$work/browser.log" 2>&1 || say "no Chromium' in script
    assert script.index("scripts/browser_install") < script.index("make test ||")
    assert os.access(SCRIPT, os.X_OK)
