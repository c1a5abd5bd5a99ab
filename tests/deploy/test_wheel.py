"""The wheel: what it installs, a producer's library without extras, and a fleet that starts from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import kvfleet
from tests.support.up import Up
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvfleet", "kvproto", "kvservice", "kvcpu", "kvgpu", "kvsampling", "kvchat", "kvfleet_vllm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its two dependencies; `bin/` of it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for library in ("nats", "msgpack"):
        (packages / library).symlink_to(Path(sysconfig.get_path("purelib"), library))
    return folder / "bin"


def said(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_it_installs_our_packages_with_their_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        *PACKAGES, f"kvfleet-{kvfleet.__version__}.dist-info",
    }  # fmt: skip
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    shipped = {f"kvfleet/{path.relative_to(ROOT / 'services')}" for path in (ROOT / "services").rglob("*.py")}
    assert shipped <= set(names)


def test_without_extras_it_is_a_client_and_a_command_that_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    python, command = str(installed / "python"), str(installed / "kvfleet")
    assert said([python, "-c", "import kvproto.client"], tmp_path).returncode == 0
    assert said([python, "-c", "import services"], tmp_path).returncode == 1
    assert said([command, "--version"], tmp_path).stdout == f"{kvfleet.__version__}\n"
    up = said([command, "up"], tmp_path)
    assert (up.returncode, up.stderr.count("\n")) == (1, 1)
    assert up.stderr.endswith('pip install "kvfleet[all]"\n')


def test_with_all_a_fleet_starts_from_any_folder(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    libraries = sysconfig.get_path("purelib")  # no .pth file is read there: this checkout does not come along
    env = {"PYTHONPATH": libraries, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    where = said([str(installed / "python"), "-P", "-c", "import kvfleet; print(kvfleet.__file__)"], tmp_path, **env)
    assert str(installed.parent) in where.stdout, where.stderr
    fleet = Up("--runner=fake", "--port=0", env=env, kvfleet=str(installed / "kvfleet"))
    try:
        fleet.wait_ready(200.0)  # what placement computes with is compiled anew
    finally:
        code = fleet.stop()
    assert code == 0
