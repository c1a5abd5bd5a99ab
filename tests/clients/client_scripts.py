"""Scripts that use one client each as its users do, run by Python of the client's own environment, once each.

A script's checks are its functions `check_*`. Each is a test, judged by what the script printed of it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_server import vllm_python

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
HOME = Path(os.environ.get("KVFLEET_TOOLS") or ROOT / ".tools") / "clients"
ENVIRONMENTS = {
    "instructor_modes": "instructor", "lm_eval_run": "evaluations", "aiperf_profile": "evaluations",
    "guidellm_run": "guidellm", "vllm_bench": "vllm",
}  # fmt: skip
LIMIT_S = 200.0  # a test is ended after 300
SILENT = {  # nothing looks for models, prices or news elsewhere
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false", "VLLM_NO_USAGE_STATS": "1", "WANDB_MODE": "offline",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


def need_clients(config: pytest.Config) -> None:
    if not (HOME / "has").exists():
        (pytest.fail if config.getoption("--part") == "clients" else pytest.skip)("no clients: make client-install")


def checks(*scripts: str, pending: Mapping[str, str] | None = None) -> list[Any]:
    """Parameters `script, check`. `pending` says of a script, or of `script:check`, which fault of ours fails it."""
    found = []
    for script in scripts:
        for node in ast.parse((HERE / "scripts" / f"{script}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("check_"):
                name = f"{script}:{node.name}"
                why = (pending or {}).get(name) or (pending or {}).get(script)
                marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
                found.append(pytest.param(script, node.name, marks=marks, id=name))
    return found


@dataclass
class Clients:
    """Of one fleet. `tokenizer`: the folder that has the model's."""

    base: str
    key: str
    model: str
    tokenizer: Path
    folder: Path
    _results: dict[str, dict[str, Any]] = field(default_factory=dict)
    _output: dict[str, str] = field(default_factory=dict)

    def passes(self, script: str, check: str) -> None:
        found = self._run(script).get(check)
        told = f"{check} of {script}.py was not reached within {LIMIT_S:.0f} s, or ended it\n{self._output[script]}"
        assert found is not None, told
        assert "error" not in found, f"{found['error']}\n{self._output[script]}"

    def went_outside(self, script: str) -> list[str]:
        self._run(script)
        return self._outside(script).read_text().splitlines()

    def _outside(self, script: str) -> Path:
        return self.folder / script / "outside"

    def _run(self, script: str) -> dict[str, Any]:
        if script in self._results:
            return self._results[script]
        environment = ENVIRONMENTS.get(script, "applications")
        python = vllm_python() if environment == "vllm" else str(HOME / environment / "bin" / "python")
        folder = self.folder / script
        folder.mkdir()
        self._outside(script).touch()
        own = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "HF_HOME": str(folder / "hub"),
            "PYTHONPATH": str(HERE / "offline"), "KVFLEET_OUTSIDE": str(self._outside(script)),
            "KVFLEET_BASE": self.base, "KVFLEET_API_KEY": self.key, "KVFLEET_MODEL": self.model,
            "KVFLEET_TOKENIZER": str(self.tokenizer),
        }  # fmt: skip
        command = [python, str(HERE / "scripts" / f"{script}.py")]
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=SILENT | own, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # what it started, too
                process.wait()
        said = (folder / "stdout").read_text(errors="replace")
        found = [json.loads(line) for line in said.splitlines() if line.startswith('{"check": ')]
        self._output[script] = f"exit {process.returncode}\n{(folder / 'stderr').read_text(errors='replace')[-6000:]}"
        return self._results.setdefault(script, {one.pop("check"): one for one in found})


def new_key(file: Path) -> str:
    """Written into `file`, as an operator does it."""
    command = [str(Path(sys.executable).with_name("kvfleet")), "key", "new", "--tenant", "clients"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    file.write_text(made.stdout)
    return made.stderr.rsplit(maxsplit=1)[-1]
