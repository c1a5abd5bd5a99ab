"""Programs that use one client each as its users do, run by Python of the client's own environment, once each.

Checks of a script are its functions `check_*`. Each is a test, judged by what the script printed of it.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_server import vllm_python

HERE = Path(__file__).parent
HOME = Path(os.environ.get("KVFLEET_TOOLS") or HERE.parents[1] / ".tools") / "clients"
ENVIRONMENTS = {  # of all others: applications
    "instructor": "instructor", "instructor_modes": "instructor", "lm_eval_run": "evaluations",
    "aiperf_profile": "evaluations", "guidellm_run": "guidellm", "vllm_bench": "vllm",
    "aiperf_figures": "evaluations", "vllm_bench_figures": "vllm",
}  # fmt: skip
LIMIT_S = 200.0  # a test is ended after 300
SILENT = {  # they look for no models, prices or news elsewhere
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false", "VLLM_NO_USAGE_STATS": "1", "WANDB_MODE": "offline",
}  # fmt: skip


def need_clients(config: pytest.Config) -> None:
    if not (HOME / "has").exists():
        (pytest.fail if config.getoption("--part") == "clients" else pytest.skip)("no clients: make client-install")


def checks(*scripts: str) -> list[Any]:
    """Parameters `script, check`."""
    return [
        pytest.param(script, node.name, id=f"{script}:{node.name}")
        for script in scripts
        for node in ast.parse(script_of(script).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("check_")
    ]


def script_of(name: str) -> Path:
    return HERE / "scripts" / f"{name}.py"


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str
    outside: list[str]  # whom it tried to reach beside this machine

    def result_of(self, check: str) -> dict[str, Any] | None:
        lines = [json.loads(line) for line in self.stdout.splitlines() if line.startswith('{"check": ')]
        return next((line for line in lines if line["check"] == check), None)


@dataclass
class Clients:
    """Of one fleet. `tokenizer`: the folder that has the model's."""

    base: str
    key: str = field(repr=False)
    model: str
    tokenizer: Path
    folder: Path
    told: dict[str, str] = field(default_factory=dict)  # further variables of a script's environment
    _done: dict[str, Done] = field(default_factory=dict, repr=False)

    def passes(self, script: str, check: str) -> None:
        done = self.run(script, script_of(script))
        result = done.result_of(check)
        told = f"exit {done.status}\n{done.stderr[-6000:]}"
        assert result is not None, f"{script}.py did not come to {check} in {LIMIT_S:.0f} s: {told}"
        assert "error" not in result, f"{result['error']}\n{told}"

    def run(self, name: str, program: Path) -> Done:
        if name in self._done:
            return self._done[name]
        environment = ENVIRONMENTS.get(name, "applications")
        python = vllm_python() if environment == "vllm" else str(HOME / environment / "bin" / "python")
        folder = self.folder / name
        folder.mkdir()
        stdout, stderr, outside = (folder / name for name in ("stdout", "stderr", "outside"))
        outside.touch()
        own = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE / "offline"), "KVFLEET_OUTSIDE": str(outside), "KVFLEET_BASE": self.base,
            "KVFLEET_API_KEY": self.key, "KVFLEET_MODEL": self.model, "KVFLEET_TOKENIZER": str(self.tokenizer),
        } | SILENT | self.told  # fmt: skip
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                [python, str(program)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=own, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
                process.wait()
        said, told = (path.read_text(errors="replace") for path in (stdout, stderr))
        self._done[name] = Done(process.returncode, said, told, outside.read_text().splitlines())
        return self._done[name]


def new_key(file: Path) -> str:
    """Written into `file`, as an operator does it."""
    command = [str(Path(sys.executable).with_name("kvfleet")), "key", "new", "--tenant", "clients"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    file.write_text(made.stdout)
    return made.stderr.rsplit(maxsplit=1)[-1]
