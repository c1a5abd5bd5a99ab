"""Single services as processes, as a deployment runs them: `kvfleet worker|ingress|placement` with KVFLEET_* set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from kvproto.testing.nats_process import free_port
from tests.support.waiting import LIMIT_S

FLEET_KEY = "secret of the deployment"
KVFLEET = str(Path(sys.executable).with_name("kvfleet"))


class Service:
    """One process; its output goes to a file that a failing test prints."""

    def __init__(self, name: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [KVFLEET, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(LIMIT_S)


class Deployment:
    """Processes against one NATS server, each with its role's user where `users` gives passwords."""

    def __init__(self, nats_url: str, folder: Path, passwords: dict[str, str] | None = None) -> None:
        self.nats_url = nats_url
        self.folder = folder
        self.passwords = passwords
        self.services: dict[str, Service] = {}
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.headers: dict[str, str] = {}

    def _env(self, role: str) -> dict[str, str]:
        env = {"KVFLEET_NATS_URL": self.nats_url, "KVFLEET_FLEET_KEY": FLEET_KEY}
        if self.passwords is not None:
            env |= {"KVFLEET_NATS_USER": role, "KVFLEET_NATS_PASSWORD": self.passwords[role]}
            if role == "placement":
                env |= {"KVFLEET_SYSTEM_USER": "sys", "KVFLEET_SYSTEM_PASSWORD": self.passwords["sys"]}
        return env

    def init(self) -> None:
        subprocess.run(
            [KVFLEET, "init"], env={**os.environ, **self._env("admin")}, check=True, capture_output=True, timeout=30
        )

    def start(self, role: str, name: str, *flags: str, env: dict[str, str] | None = None) -> Service:
        arguments = [role, f"--id={name}", *flags]
        service = Service(name, arguments, self._env(role) | (env or {}), self.folder / f"{name}.log")
        self.services[name] = service
        return service

    def start_worker(self, name: str, tokens_per_s: int = 200) -> Service:
        flags = ["--runner=fake", f"--fake-tokens-per-s={tokens_per_s}", "--drain-s=0.5", "--workers-on-host=2"]
        return self.start("worker", name, *flags)

    def wait_ready(self, workers: int, timeout_s: float = LIMIT_S) -> None:
        end = time.monotonic() + timeout_s
        while True:
            try:
                listed = httpx.get(f"{self.base}/workers", headers=self.headers).json()
                states = [worker["state"] for worker in listed.values()]
                health = httpx.get(f"{self.base}/health").json()
                placements = sum(name.startswith("p") for name in self.services)
                if (
                    states.count("ready") >= workers
                    and health.get("status") == "ok"
                    and health.get("placements", 0) >= placements
                ):
                    return
            except (httpx.HTTPError, ValueError, AttributeError):
                pass
            dead = [name for name, service in self.services.items() if service.process.poll() is not None]
            if dead or time.monotonic() > end:
                raise AssertionError(f"not ready; ended: {dead}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        for service in self.services.values():
            service.stop()
