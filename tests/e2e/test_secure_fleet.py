"""A whole fleet as in production: deploy/nats/production.conf, nkeys and mutual TLS towards NATS, TLS on the data
plane, every secret in a file that `kvfleet secrets` wrote and none in the environment.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproto.client import Client, Generation
from kvproto.errors import KvfleetError
from kvproto.messages import Finished, Sampling, Tokens
from kvproto.testing.nats_process import NatsProcess, ServerSpec, free_port
from kvservice.membership import tls_context
from kvservice.settings import ServiceSettings
from tests.support import sse
from tests.support.processes import Deployment
from tests.support.secrets_rig import Secrets, production, tls_url
from tests.support.waiting import LIMIT_S, wait_until

PROMPT = " ".join(f"king {number}" for number in range(60))
USERS = ("admin", "ingress", "placement", "worker", "vault", "sys", "producer-public", "producer-acme")


class SecureDeployment(Deployment):
    """Paths are all that its processes are told."""

    def __init__(self, nats_url: str, folder: Path, secrets: Secrets) -> None:
        super().__init__(nats_url, folder)
        self.secrets = secrets
        self.headers = {"Authorization": f"Bearer {secrets.text('api-key.txt')}"}
        self.sockets = folder / "s"
        self.ports: dict[str, int] = {}

    def _env(self, role: str) -> dict[str, str]:
        files = {
            "NATS_NKEY_SEED_FILE": f"nkeys/{role}.seed",
            "NATS_CA": "ca.crt",
            "NATS_CERT": "node.crt",
            "NATS_KEY": "node.key",
        }
        if role in ("worker", "placement", "ingress"):
            files["FLEET_KEY_FILE"] = "fleet.key"
        if role in ("worker", "vault"):
            files |= {"DATA_PLANE_CA": "ca.crt", "DATA_PLANE_CERT": "node.crt", "DATA_PLANE_KEY": "node.key"}
        if role == "placement":
            files["SYSTEM_NKEY_SEED_FILE"] = "nkeys/sys.seed"
        if role == "ingress":
            files["API_KEYS_FILE"] = "api-keys.toml"
        env = {f"KVFLEET_{name}": self.secrets[file] for name, file in files.items()}
        return env | {"KVFLEET_NATS_URL": self.nats_url}

    def start_store(self, role: str, name: str, *flags: str) -> None:
        """A worker or a vault, whose Unix socket can be taken away."""
        port = self.ports.setdefault(name, free_port())
        folder = self.sockets / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.start(role, name, f"--runtime-dir={folder}", f"--data-plane-port={port}", *flags)

    def start_fake_worker(self, name: str) -> None:
        flags = [
            "--runner=fake",
            "--fake-tokens-per-s=600",
            "--fake-prefill-tokens-per-s=2000",
            "--drain-s=1",
            "--workers-on-host=2",
            "--preload-s=0",
        ]
        self.start_store("worker", name, *flags, "--blocks=64", "--host-bytes=8192")

    def leave_tcp_alone(self) -> None:
        for path in self.sockets.rglob("*.sock"):
            path.unlink()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets.make(tmp_path_factory.mktemp("secrets"), "acme")


@pytest.fixture(scope="module")
def nats_server(secrets: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    folder = tmp_path_factory.mktemp("nats")
    server = NatsProcess(folder / "run", ServerSpec(production(folder / "nats", secrets, "acme"), secrets.nats_env))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def fleet(
    nats_server: NatsProcess, secrets: Secrets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureDeployment]:
    fleet = SecureDeployment(tls_url(nats_server), tmp_path_factory.mktemp("f"), secrets)
    fleet.init()
    fleet.start("placement", "p0")
    fleet.start_store("vault", "v0", "--max-bytes=67108864")
    fleet.start_fake_worker("w0")
    fleet.start_fake_worker("w1")
    fleet.start("ingress", "i0", f"--port={fleet.port}")
    try:
        fleet.wait_ready(2, 180)
        yield fleet
    finally:
        fleet.stop()


def ask(fleet: SecureDeployment, prompt: str, count: int = 10) -> tuple[list[int], dict[str, Any]]:
    """The ids, and the start event."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    ids, start = [], {}
    with httpx.stream("POST", f"{fleet.base}/generate", json=body, headers=fleet.headers, timeout=LIMIT_S) as response:
        assert response.status_code == 200, response.read()
        for line in sse.lines(response):
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if event["type"] == "start":
                    start = event
                elif event["type"] == "token":
                    ids.append(event["token_id"])
                else:
                    assert event["type"] == "done", event
    return ids, start


def test_it_serves_with_a_key_and_not_without(fleet: SecureDeployment) -> None:
    assert httpx.post(f"{fleet.base}/generate", json={"prompt": "x"}).status_code == 401
    ids, _ = ask(fleet, "hello", 12)
    assert len(ids) == 12
    assert ask(fleet, "hello", 12)[0] == ids
    assert "ermissions" not in fleet.logs()


def test_placement_answers(fleet: SecureDeployment) -> None:
    def placed() -> int:
        ask(fleet, "hello", 1)
        total: int = httpx.get(f"{fleet.base}/stats", headers=fleet.headers).json()["ingress"]["placed_total"]
        return total

    wait_until(placed)


def test_no_secret_is_in_an_environment_or_a_log(fleet: SecureDeployment) -> None:
    secret = [fleet.secrets.seed(user) for user in USERS]
    secret += [fleet.secrets.text(name) for name in ("fleet.key", "api-key.txt")]
    logs = fleet.logs() + fleet.secrets.text("nats.env")
    for service in fleet.services.values():
        environment = (
            Path(f"/proc/{service.pid}/environ").read_text() + Path(f"/proc/{service.pid}/cmdline").read_text()
        )
        assert not [one for one in secret if one in environment]
    assert not [one for one in secret if one in logs]
    assert "PRIVATE KEY" not in logs


def test_the_data_plane_listens_by_tls_alone(fleet: SecureDeployment) -> None:
    for name in ("v0", "w0"):
        with socket.create_connection(("127.0.0.1", fleet.ports[name]), LIMIT_S) as plain:
            plain.settimeout(LIMIT_S)
            plain.sendall(b"KVDP" + bytes(200))
            rest = b""
            try:
                while piece := plain.recv(4096):
                    rest += piece
            except ConnectionResetError:
                pass
        assert b"KVDP" not in rest


async def test_a_tenants_producer(fleet: SecureDeployment) -> None:
    secrets = fleet.secrets
    options = {
        "tenant": "acme",
        "nkey_seed": secrets.seed("producer-acme"),
        "tls": tls_context(ServiceSettings(**secrets.nats_tls("producer-acme"))),  # type: ignore[arg-type]
    }
    sampling = Sampling(8, temperature=0, ignore_eos=True)
    async with await Client.open(fleet.nats_url, **options) as client:
        async with client.generate(Generation("demo", sampling, (1, 2, 3), tenant="acme")) as stream:
            events = [event async for event in stream]
        assert sum(len(event.ids) for event in events if isinstance(event, Tokens)) == 8
        assert isinstance(events[-1], Finished)
        assert client.connection.errors_total == 0
        with pytest.raises(KvfleetError):
            client.generate(Generation("demo", sampling, (1, 2, 3), tenant="public"))
        await client.connection.publish("kvf.generate.public.demo", b"{}", reply=f"{client.connection.inbox_prefix}.x")
        await client.connection.synced()
        assert client.connection.errors_total == 1, "NATS says no, too"


async def test_a_stream_outlives_a_restart_of_nats(fleet: SecureDeployment, nats_server: NatsProcess) -> None:
    whole, _ = await asyncio.to_thread(ask, fleet, "the storm", 400)
    running = asyncio.create_task(asyncio.to_thread(ask, fleet, "the storm", 400))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(nats_server.restart)
    ids, _ = await running
    assert ids == whole


def test_kv_comes_back_from_the_vault_over_tls(fleet: SecureDeployment) -> None:
    """Prompts that together are more than devices and host tiers hold, and slow enough to compute that a way back is
    worth it. The vault's Unix socket is gone: what comes back has been there by TCP, by TLS."""
    fleet.leave_tcp_alone()
    first: dict[int, list[int]] = {}
    restored, end = 0, time.monotonic() + LIMIT_S
    while restored < 64:
        for number in range(8):
            ids, start = ask(fleet, f"{number} {PROMPT}", 4)
            assert first.setdefault(number, ids) == ids
            placed = httpx.get(f"{fleet.base}/v1/placements/{start['request_id']}", headers=fleet.headers)
            if placed.status_code in (404, 503):  # a busy placement was not waited for, by ingress or by this question
                continue
            actual = placed.json()["attempts"][-1].get("actual") or {}
            restored = max(restored, (actual.get("cached_tokens") or {}).get("vault", 0))
        assert time.monotonic() < end, fleet.logs()
    assert not list((fleet.sockets / "v0").glob("*.sock"))


def test_zz_everything_stops_cleanly(fleet: SecureDeployment) -> None:
    for name in ("i0", "w0", "w1", "v0", "p0"):
        assert fleet.services[name].stop() == 0, (name, fleet.logs())
    assert "Traceback" not in fleet.logs(), fleet.logs()
