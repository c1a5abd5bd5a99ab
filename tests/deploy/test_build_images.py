"""scripts/build_images without a daemon: what it would run, what it skips, what it says is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "build_images"


@cache
def script() -> ModuleType:
    loader = SourceFileLoader("build_images", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclass looks there
    loader.exec_module(module)
    return module


def run(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
    )


def planned(*flags: str) -> list[list[str]]:
    done = run("--dry-run", "--cache", "/tmp/never-made", *flags)
    assert done.returncode == 0, done.stderr
    assert not Path("/tmp/never-made").exists(), "a dry run does nothing"
    return [shlex.split(line) for line in done.stdout.splitlines()]


def after(argv: list[str], flag: str) -> list[str]:
    return [argv[index + 1] for index, word in enumerate(argv) if word == flag]


def test_plain_builds_by_default() -> None:
    commands = planned()
    assert [after(argv, "--target") for argv in commands] == [["control"], ["worker"], ["nats"]]
    for argv in commands:
        assert argv[:2] == ["docker", "build"]
        assert argv[-1] == "."
        assert (ROOT / after(argv, "--file")[0]).is_file()
        assert after(argv, "--tag") == [f"kvfleet-{after(argv, '--target')[0]}:dev"]
        assert "--network" not in argv
        assert after(argv, "--build-arg") == []


def test_every_target_is_in_the_dockerfile() -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    for target in script().TARGETS:
        assert re.search(rf"^FROM \S+ AS {target}$", text, re.MULTILINE)


def test_offline_builds_reach_nothing() -> None:
    commands = planned("--offline")
    assert [argv[0] for argv in commands[:3]] == ["mmdebstrap", "mv", "docker"]
    made = [argv[-1] for argv in commands if argv[:2] == ["docker", "import"]]
    base, wheels = made
    builds = [argv for argv in commands if argv[:2] == ["docker", "build"]]
    assert len(builds) == 3
    for argv in builds:
        assert after(argv, "--network") == ["none"]
        assert set(after(argv, "--build-arg")) == {f"BASE_IMAGE={base}", f"WHEELS={wheels}", "PIP_NO_INDEX=1"}
    downloads = [argv for argv in commands if "download" in argv]
    assert all({"--require-hashes", "--no-deps"} <= set(argv) for argv in downloads)
    read = {Path(after(argv, "-r")[0]).name for argv in downloads}
    assert read == {
        "torch.txt",
        *(f"requirements-{name}.txt" for name in ("build", "source", "control", "worker", "nats")),
    }
    for argv in downloads:
        assert ("--only-binary=:all:" in argv) == (not after(argv, "-r")[0].endswith("-source.txt"))


def test_offline_control_fetches_no_torch() -> None:
    text = "\n".join(" ".join(argv) for argv in planned("--offline", "--target", "control"))
    assert "torch" not in text
    assert "requirements-worker" not in text
    gpu = "\n".join(" ".join(argv) for argv in planned("--offline", "--target", "worker-gpu"))
    assert "torch.txt" not in gpu, "that is the CPU's"
    assert "requirements-worker-gpu.txt" in gpu


def test_what_is_kept_is_named_by_what_it_holds(tmp_path: Path) -> None:
    def wheels(text: str, torch: str | None = None) -> str:
        steps, image = script().wheel_steps("python", tmp_path, {"a.txt": text}, torch)
        assert steps[-1].makes == f"image:{image}"
        return str(image)

    assert wheels("a==1") == wheels("a==1")
    assert len({wheels("a==1"), wheels("a==2"), wheels("a==1", "torch==1")}) == 3


def test_pushing() -> None:
    commands = planned("--push", "registry.test/team/", "--tag", "1.2", "--target", "control", "--target", "worker-gpu")
    assert [argv[1] for argv in commands] == ["build", "build", "tag", "push", "tag", "push"]
    assert commands[0][-2:] == ["kvfleet-control:1.2", "."]
    assert commands[2][2:] == ["kvfleet-control:1.2", "registry.test/team/kvfleet-control:1.2"]
    assert commands[5][2:] == ["registry.test/team/kvfleet-worker-gpu:1.2"]


def test_arguments_and_another_base_are_handed_on() -> None:
    (argv,) = planned("--target", "nats", "--base-image", "mine:1", "--build-arg", "TORCH_CPU=2.13.0")
    assert set(after(argv, "--build-arg")) == {"BASE_IMAGE=mine:1", "TORCH_CPU=2.13.0"}
    assert "mmdebstrap" not in str(planned("--offline", "--base-image", "mine:1"))


def test_wrong_flags_are_refused() -> None:
    assert run("--target", "nothing").returncode == 2
    assert run("--dry", "--target", "nats").returncode == 2


def test_it_says_what_is_missing_and_installs_nothing(tmp_path: Path) -> None:
    done = run("--offline", "--cache", str(tmp_path / "cache"), env={"PATH": str(tmp_path), "DOCKER": "none"})
    if Path("/usr/bin/docker").exists():  # it looks there too
        assert "a Docker daemon: none answers" in done.stderr or "missing mmdebstrap" in done.stderr
    else:
        assert "apt-get install -y docker.io" in done.stderr
    assert "apt-get install -y mmdebstrap" in done.stderr
    assert done.returncode == 1
    assert done.stdout == ""
    assert not (tmp_path / "cache").exists()


def test_steps_that_are_done_are_skipped(tmp_path: Path) -> None:
    made, log = tmp_path / "made", tmp_path / "log"

    def shell(text: str, makes: str) -> object:
        return script().Step(("sh", "-c", text), makes)

    two = [shell(f"echo one >> {log}", str(made)), shell(f"echo two >> {log}; touch {made}", str(made))]
    assert script().carry_out(two, "docker", tmp_path) == 0
    assert script().carry_out(two, "docker", tmp_path) == 0
    assert log.read_text() == "one\ntwo\n", "not made again"
    broken = [shell("exit 3", "never"), shell(f"echo three >> {log}", "never"), shell(f"echo four >> {log}", "")]
    assert script().carry_out(broken, "docker", tmp_path) == 3
    assert log.read_text() == "one\ntwo\n", "nothing goes on after a failure"


def test_half_a_file_is_never_taken_for_the_whole() -> None:
    commands = planned("--offline")
    written = [argv for argv in commands if argv[0] == "mmdebstrap" or argv[0] == "tar"]
    moved = {argv[1]: argv[2] for argv in commands if argv[0] == "mv"}
    assert len(written) == len(moved) == 2
    for argv in written:
        assert any(half in " ".join(argv) for half in moved)
    imported = [argv[2] for argv in commands if argv[:2] == ["docker", "import"]]
    assert imported == list(moved.values())


def test_builds_may_run_at_once(tmp_path: Path) -> None:
    """Each waits for the other to have begun."""
    docker = tmp_path / "docker"
    wait = "for i in $(seq 100); do [ $(ls | grep -c begun) = 2 ] && exit 0; sleep 0.1; done; exit 9"
    docker.write_text(f'#!/bin/sh\ncd {tmp_path}; [ "$1" = push ] && exit 0; touch begun-$2; {wait}\n')
    docker.chmod(0o755)
    steps = [script().Step(("docker", "build", name)) for name in ("one", "two")]
    assert script().carry_out([*steps, script().Step(("docker", "push", "one"))], str(docker), tmp_path, jobs=2) == 0


@pytest.mark.parametrize(("said", "can"), [("version 20.10.24", True), ("version 28.2.2", False), ("nonsense", False)])
def test_a_docker_that_can_build_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, can: bool
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Docker {said}, build 1"\n[ "$1" != buildx ]\n')
    docker.chmod(0o755)
    monkeypatch.setenv("DOCKER", str(docker))
    found = script().find_docker()
    assert (found == str(docker)) == can


def test_vllms_image_is_a_registrys() -> None:
    (argv,) = planned("--target", "vllm", "--build-arg", "VLLM_IMAGE=mine/vllm:1")
    assert after(argv, "--target") == ["vllm"]
    assert run("--dry-run", "--offline", "--target", "vllm").returncode == 2
