"""Three servers of deploy/nats/production-cluster.conf: TLS between them, and none but they may join."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproto.testing.nats_process import find_nats_server, free_ports
from tests.support.secrets_rig import Secrets, production
from tests.support.waiting import LIMIT_S

KVFLEET = str(Path(sys.executable).with_name("kvfleet"))
NAMES = ("nats-0", "nats-1", "nats-2")


class Server:
    """One nats-server, by name of its configuration, as in production; addresses and ports are this machine's."""

    def __init__(self, folder: Path, secrets: Secrets, name: str, ports: tuple[int, int], routes: list[int], cert: str):
        config = production(folder / name, secrets, server=cert).parent / "production-cluster.conf"
        config.write_text(config.read_text().replace("0.0.0.0:6222", f"127.0.0.1:{ports[1]}"))
        known = json.dumps([f"tls://localhost:{port}" for port in routes])
        environment = secrets.nats_env | {"KVF_SERVER_NAME": name, "KVF_CLUSTER_ROUTES": known}
        command = [str(find_nats_server()), "-c", str(config), "-a", "127.0.0.1", "-p", str(ports[0])]
        self.log_file = folder / f"{name}.log"
        command += ["-sd", str(folder / f"{name}-js"), "-l", str(self.log_file)]
        self.url = f"tls://127.0.0.1:{ports[0]}"
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)


@pytest.fixture
def cluster(own: Secrets, tmp_path: Path) -> Iterator[list[Server]]:
    """The fourth one has a worker's certificate, and the same configuration otherwise."""
    ports = free_ports(8)
    routes = ports[4:7]
    servers = [
        Server(tmp_path, own, name, (ports[at], ports[4 + at]), routes, cert)
        for at, (name, cert) in enumerate((*((name, "nats") for name in NAMES), ("intruder", "node")))
    ]
    yield servers
    for server in servers:
        server.stop()


async def test_three_servers_share_streams_and_a_node_is_none_of_them(cluster: list[Server], own: Secrets) -> None:
    environment = os.environ | {
        "KVFLEET_NATS_URL": ",".join(server.url for server in cluster[:3]),
        "KVFLEET_NATS_NKEY_SEED_FILE": own["nkeys/admin.seed"],
        **{f"KVFLEET_{name.upper()}": path for name, path in own.nats_tls().items()},
    }
    end = time.monotonic() + LIMIT_S
    while True:
        made = await asyncio.to_thread(
            subprocess.run,
            [KVFLEET, "init", "--replicas", "3"],
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if made.returncode == 0:
            break
        assert time.monotonic() < end, made.stderr + cluster[0].log
    *servers, intruder = cluster
    for server in servers:
        assert "Route connection created" in server.log
        assert "intruder" not in server.log, "it never got as far as to say its name"
    assert any("certificate not pinned" in server.log for server in servers)
    assert "JetStream cluster new metadata leader" not in intruder.log
