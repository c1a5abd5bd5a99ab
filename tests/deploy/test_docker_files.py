"""deploy/docker without a daemon: the Dockerfile's rules, and that the compose file fits images, settings and code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfleet.ingress.settings import IngressSettings
from kvfleet.placement.settings import PlacementSettings
from kvfleet.vault.settings import VaultSettings
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.vllm.server_facts import NEWEST
from kvservice.settings import ServiceSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
IMAGES = ("control", "worker", "worker-gpu", "vllm", "nats")
ENTRIES = {"nats": ["nats-server"], "vllm": ["vllm", "serve"]}
SETTINGS: dict[str, type[ServiceSettings]] = {
    "ingress": IngressSettings,
    "placement": PlacementSettings,
    "vault": VaultSettings,
    "worker": WorkerSettings,
    "init": ServiceSettings,
}
NO_SETTING = {"KVFLEET_KERNELS"}  # read by kvservice.kernel_cache


def stages() -> dict[str, list[str]]:
    """Each stage's instructions, those that it is built FROM first; `ONE \\ TWO` is one line."""
    found: dict[str, list[str]] = {}
    lines = re.sub(r"\\\n(?:\s*#.*\n)*\s*", " ", DOCKERFILE).splitlines()
    for line in (line.strip() for line in lines):
        if made := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[made[2]] = list(found.get(made[1], []))
            current = made[2]
        elif line and not line.startswith(("#", "ARG BASE_IMAGE", "ARG WHEELS", "ARG VLLM_IMAGE")):
            found[current].append(line)
    return found


def last(stage: str, instruction: str) -> str:
    found = [line for line in stages()[stage] if line.startswith(f"{instruction} ")]
    return found[-1].removeprefix(instruction).strip()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", (DOCKER / "compose.yaml").read_text())
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


# ---------------------------------------------------------------- the Dockerfile


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_is_an_argument_with_a_pinned_release() -> None:
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim-bookworm$", DOCKERFILE, re.MULTILINE)
    bases = {line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("FROM ")}
    assert bases <= {"${BASE_IMAGE}", "${WHEELS}", "${VLLM_IMAGE}", *stages()}
    (newest,) = re.findall(r"^ARG VLLM_IMAGE=vllm/vllm-openai:v(\d+\.\d+)\.\d+$", DOCKERFILE, re.MULTILINE)
    assert tuple(map(int, newest.split("."))) == NEWEST
    assert not DOCKERFILE.startswith("# syntax="), "that would be pulled from a registry"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_numeric_user(image: str) -> None:
    assert last(image, "USER") == "10001:10001"
    assert "--uid 10001" in " ".join(stages()[image])


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_whether_it_is_healthy_without_curl(image: str) -> None:
    check = json.loads(last(image, "HEALTHCHECK").split("CMD", 1)[1])
    assert check[:3] == ["python3" if image == "vllm" else "python", "-m", "kvservice.health"]
    assert not re.search(r"\b(curl|wget|sudo|apt-get)\b", DOCKERFILE.split("# ----", 1)[1].replace("without curl", ""))


@pytest.mark.parametrize("image", IMAGES)
def test_python_imports_nothing_from_the_current_folder(image: str) -> None:
    assert any(" PYTHONSAFEPATH=1 " in line for line in stages()[image] if line.startswith("ENV "))


@pytest.mark.parametrize("image", IMAGES)
def test_a_process_is_started_without_a_shell(image: str) -> None:
    entry = json.loads(last(image, "ENTRYPOINT"))
    assert entry == ENTRIES.get(image, ["kvfleet"])
    assert isinstance(json.loads(last(image, "CMD")), list)


@pytest.mark.parametrize("image", IMAGES)
def test_writable_places_are_the_users_alone(image: str) -> None:
    text = " ".join(stages()[image])
    assert "HOME=/var/lib/kvfleet" in text
    assert "--owner=10001 --group=10001 --mode=0750 /var/lib/kvfleet" in text
    assert "PYTHONDONTWRITEBYTECODE=1" in text
    assert "chmod" not in text
    assert "--chown" not in text, "what is copied in belongs to root: a process cannot change its own code"


@pytest.mark.parametrize("image", ["control", "worker", "worker-gpu"])
def test_the_environment_is_settings(image: str) -> None:
    names = set(re.findall(r"\b(KVFLEET_\w+)=", " ".join(stages()[image]))) - NO_SETTING
    known = {f"KVFLEET_{name.upper()}" for kind in SETTINGS.values() for name in kind.model_fields}
    assert names
    assert names <= known


def test_nothing_is_installed_without_its_hash() -> None:
    script = (DOCKER / "install_environment").read_text()
    installs = re.findall(r"\bpip(?:\"| )[^\n&]*?\b(?:install|wheel|download)\b[^\n&]*", DOCKERFILE + script)
    installs += [line for line in script.splitlines() if "$into install" in line]
    assert len(installs) >= 6
    for line in installs:
        assert "--require-hashes" in line or "--no-index" in line, line
    assert "--trusted-host" not in DOCKERFILE + script


def test_no_index_and_no_host_is_written_down() -> None:
    for path in (*DOCKER.glob("*"), ROOT / "scripts" / "build_images", ROOT / "scripts" / "compile_requirements"):
        if path.is_file():
            hosts = set(re.findall(r"https?://([^/\s\"'}:]+)", path.read_text()))
            assert hosts <= {"127.0.0.1"}, path


def test_the_context_is_what_the_images_need() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = [line[1:] for line in lines if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied += re.findall(r"type=bind,source=(\S+?),", DOCKERFILE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(kept) or source.startswith(f"{kept}/") for kept in let_in), source
    assert not any(kept in ("deploy", "deploy/docker", ".") for kept in let_in), "secrets would come along"


# ---------------------------------------------------------------- the compose file


def test_every_container_is_hardened(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"nats", *SETTINGS}
    for name, service in compose["services"].items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "devices", "build"} & set(service), name
        assert [mount.split(":")[0] for mount in service["tmpfs"]] == ["/tmp"], name
        for volume in service.get("volumes", []):
            source, target = volume.split(":")
            assert source in compose["volumes"], "no folder of the host"
            assert target == "/var/lib/kvfleet"


def test_only_the_ingress_can_be_reached_and_on_loopback(compose: dict[str, Any]) -> None:
    assert "version" not in compose
    for name, service in compose["services"].items():
        if name == "ingress":
            assert service["ports"] == ["127.0.0.1:8080:8080"]
            assert service["networks"] == ["fleet", "outside"]
        else:
            assert "ports" not in service, name
            assert service["networks"] == ["fleet"], name
    assert compose["networks"]["fleet"] == {"internal": True}


def test_every_service_has_a_true_health_check_and_waits_for_what_it_needs(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        if name == "init":
            assert service["healthcheck"] == {"disable": True}
            assert service["restart"] == "on-failure"
            continue
        assert service["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "kvservice.health"], name
        assert service["restart"] == "unless-stopped", name
        if name != "nats":
            assert service["depends_on"]["init"] == {"condition": "service_completed_successfully"}, name
    assert services["init"]["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert services["ingress"]["depends_on"]["placement"] == {"condition": "service_healthy"}
    assert services["placement"]["deploy"]["replicas"] == services["worker"]["deploy"]["replicas"] == 2
    port = services["ingress"]["environment"]["KVFLEET_PORT"]
    assert services["ingress"]["healthcheck"]["test"][4:] == ["--port", str(port)]


def test_grace_is_longer_than_draining(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if name in SETTINGS and name != "init":
            field = SETTINGS[name].model_fields.get("drain_s")
            default = field.default if field is not None else 0
            drain = float(service["environment"].get("KVFLEET_DRAIN_S", default))
            assert float(service["stop_grace_period"].rstrip("s")) >= drain + 10, name


@pytest.mark.parametrize("name", SETTINGS)
def test_a_services_environment_is_its_settings(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["command"] == [name]
    known = {f"KVFLEET_{field.upper()}" for field in SETTINGS[name].model_fields}
    assert set(service["environment"]) <= known
    values = {key: str(value) for key, value in service["environment"].items()}
    parsed = SETTINGS[name](
        **{key.removeprefix("KVFLEET_").lower(): value for key, value in values.items()}  # type: ignore[arg-type]
    )
    assert parsed.nats_url == "tls://nats:4222"


def test_a_container_has_the_secrets_that_it_reads_and_no_others(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        given = {secret if isinstance(secret, str) else secret["source"] for secret in service["secrets"]}
        assert given <= set(compose["secrets"]), name
        if name == "nats":
            configuration = (ROOT / "deploy" / "nats" / "production.conf").read_text()
            for secret in service["secrets"]:
                assert f'"{secret["target"]}"' in configuration
            continue
        read = {
            Path(value).name for value in map(str, service["environment"].values()) if value.startswith("/run/secrets/")
        }
        assert read == given, name
    for name, told in compose["secrets"].items():
        folder = "secrets/nkeys" if name.endswith(".seed") else "secrets"
        assert told["file"] == f"./{folder}/{name}"
    assert "secrets/" in (DOCKER / ".gitignore").read_text().split()


def compose_command() -> list[str] | None:
    fetched = ROOT / ".tools" / "bin" / "docker-compose"
    if fetched.exists():
        return [str(fetched)]
    if (found := shutil.which("docker-compose")) is not None:
        return [found]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]
    return None


def test_docker_compose_accepts_the_file(tmp_path: Path) -> None:
    command = compose_command()
    if command is None:
        pytest.skip("no docker compose: scripts/deploy_tools brings one")
    said = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False).stdout
    if said.startswith("1."):
        pytest.skip(f"docker-compose {said.strip()} is older than the file: scripts/deploy_tools brings one")
    (tmp_path / "nats.env").write_text("KVF_ADMIN_NKEY=U\n")
    for name, value in (("good", "8081"), ("bad", "no port")):
        done = subprocess.run(
            [*command, "--file", DOCKER / "compose.yaml", "config", "--quiet"],
            env={**os.environ, "KVFLEET_SECRETS": str(tmp_path), "KVFLEET_PUBLISH": value},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == (name == "good"), done.stderr
