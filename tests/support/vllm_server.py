"""A real vLLM server, as a kvfleet worker wants it: `make vllm-install` brings vLLM; without it, tests skip."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from kvproto.testing.nats_process import free_ports
from tests.support.up import command_of

ROOT = Path(__file__).parents[2]
GUARD = Path(__file__).with_name("session_guard.py")
READY_S = 270.0  # importing torch in three processes has taken 257 s on a crowded machine
STOP_S = 30.0
NICENESS = 15  # in fleets: it would leave none of two cores to those whose silence is a fault
SERVER, ENGINE, WORKER = "server", "VLLM::EngineCore", "VLLM::Worker"
TOPIC = "kvfleet-tests"
CONNECTOR = {
    "kv_connector": "KvfleetConnector", "kv_connector_module_path": "kvfleet_vllm.connector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}  # fmt: skip
NEEDED = {  # by a kvfleet worker, beside --kv-events-config
    "--no-async-scheduling": "",
    "--enable-scale-out": "",
    "--scheduling-policy": "priority",
    "--max-logprobs": "129",
    "--logits-processors": "kvfleet_vllm.sampler:Sampler",
    "--kv-transfer-config": json.dumps(CONNECTOR),
}
PACED = ("--logits-processors", NEEDED["--logits-processors"], "tests.support.vllm_pace:Pace")  # a step lasts

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound to a core that other tests have, it would starve
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "5",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_python() -> str:
    """The interpreter that has vLLM. Skips the test if there is none."""
    if named := os.environ.get("KVFLEET_VLLM_PYTHON"):
        return named
    home = Path(os.environ.get("KVFLEET_TOOLS") or ROOT / ".tools") / "vllm"
    if not (home / "complete").exists():
        pytest.skip("no vLLM: make vllm-install")
    return str(home / "bin" / "python")


class VllmServer:
    """One server of the model in a folder. All its processes end with `stop` or `kill`, or when this process does.

    `flags` follow the usual ones, of which `without` are left out. Its KV events go to `kv_events`, where the test
    binds; the other end that it replays at is `kv_replay`.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        without: Collection[str] = (),
        name: str = "tiny",
        env: dict[str, str] | None = None,
        niceness: int = 0,
    ):
        port, events, replay = free_ports(3)
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.kv_events, self.kv_replay = (f"tcp://127.0.0.1:{one}" for one in (events, replay))
        self._log = folder / f"vllm-{port}.log"
        told = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.kv_events,
            "replay_endpoint": self.kv_replay, "topic": TOPIC,
        }  # fmt: skip
        usual = NEEDED | {"--kv-events-config": json.dumps(told)}
        self._command = [
            vllm_python(), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
            "--max-model-len", "2048", "--block-size", "32", "--enforce-eager",
            *(word for flag, value in usual.items() if flag not in without for word in (flag, value) if word), *flags,
        ]  # fmt: skip
        self._niceness = niceness
        self._env = {**os.environ, **ENV, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}", **(env or {})}
        self.start()

    def start(self) -> None:
        """Again, after it has ended."""
        with self._log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, str(GUARD), str(self._niceness), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pids(self) -> dict[str, int]:
        """Of SERVER, ENGINE and WORKER, those that live."""
        others = (pid for pid in session(self._guard.pid) if pid != self._guard.pid)
        return {name: pid for pid in others if (name := _name(pid))}

    @property
    def status(self) -> int | None:
        """With which it ended."""
        return self._guard.poll()

    @property
    def guard_pid(self) -> int:
        """The session's id, too."""
        return self._guard.pid

    def wait_ready(self, limit_s: float = READY_S) -> VllmServer:
        end = time.monotonic() + limit_s
        with httpx.Client(trust_env=False) as client:
            while not self._answers(client):
                if self._guard.poll() is not None or time.monotonic() > end:
                    self.kill()
                    raise AssertionError(f"vLLM is not ready (exit {self._guard.returncode}):\n{self.log[-4000:]}")
                time.sleep(0.2)
        return self

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> int:
        """In good order. Its exit status."""
        self._guard.terminate()
        return self._guard.wait(STOP_S)

    def kill(self) -> None:
        """As a machine that fails does. Returns when all is gone."""
        self.kill_processes()
        self.stop()

    def kill_processes(self) -> None:
        """All at once. What frees their shared memory then is spared."""
        for pid in session(self._guard.pid):
            if pid != self._guard.pid and "resource_tracker" not in command_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """Pids of its living processes, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid, *_ = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(sid) == leader and state != "Z":
                found.append(int(entry.name))
    return sorted(found)


def _name(pid: int) -> str:
    """Processes of vLLM's carry titles, except the first. "" for all others."""
    title = command_of(pid)
    return SERVER if "api_server" in title else next((one for one in (ENGINE, WORKER) if title.startswith(one)), "")
