"""The process around a vLLM server: what it ends, and which line of a log says why the server ended. No vLLM."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvfleet.cli.embedded.vllm_guard import RECENT_S, TERM_S, LastError
from kvservice import launch
from tests.support.up import alive
from tests.support.waiting import LIMIT_S, wait_until

CORE = "(EngineCore pid=1) ERROR 11-24 16:10:53 [core.py:1510] "
WORKER = "(Worker pid=7) ERROR 11-24 16:10:53 [multiproc_executor.py:1063] "
FLAG = "x.py: error: unrecognized arguments: --a"
PYDANTIC = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"


def guard(folder: Path, script: str) -> subprocess.Popen[bytes]:
    command = launch.command("kvfleet.cli.embedded.vllm_guard", "w0", str(folder / "log"), "sh", "-c", script)
    with (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen(command, start_new_session=True, stderr=stderr)


def last_error(*lines: str, ended_s: float = 1.0) -> str:
    error = LastError()
    for line in lines:
        error.read(line + "\n", 0.0)
    return error.reason(ended_s)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["usage: api_server.py [-h]", FLAG], FLAG),
        (
            [
                f"{WORKER}ValueError: No common block size for 16",
                f"{CORE}RuntimeError: Worker failed with error 'No common block size for 16', please check the trace",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            ],
            "ValueError: No common block size for 16",
        ),
        (
            [PYDANTIC.strip(), "  Value error, max_model_len (9) is greater than 8 [type=value_error]", "    For more"],
            f"{PYDANTIC.strip()}: Value error, max_model_len (9) is greater than 8 [type=value_error]",
        ),
        (["(APIServer pid=1) ERROR 11-24 16:21:41 [serving.py:712] ValueError: a request was refused"], ""),
        (["(APIServer pid=1) INFO 11-24 16:21:41 [launcher.py:1] all is well", "raise ValueError("], ""),
    ],
)  # fmt: skip
def test_the_line_that_says_why_is_found(lines: list[str], why: str) -> None:
    assert last_error(*lines) == why


def test_an_old_error_is_no_reason() -> None:
    assert last_error("ValueError: x", ended_s=RECENT_S + 1.0) == ""


def test_a_server_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    assert guard(tmp_path, "echo 'x.py: error: no --foo'; exit 2").wait(LIMIT_S) == 2
    assert (tmp_path / "stderr").read_text() == "w0: vLLM ended: x.py: error: no --foo\n"
    assert (tmp_path / "log").read_text() == "x.py: error: no --foo\n"


def test_what_a_server_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    assert guard(tmp_path, f"sleep 600 & echo $! >{tmp_path}/pid; exit 0").wait(LIMIT_S) == 0
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = guard(tmp_path, f"trap '' TERM; sleep 600 & echo $! >{tmp_path}/pid; wait")
    child = wait_until(lambda: (tmp_path / "pid").exists() and int((tmp_path / "pid").read_text() or 0))
    began = time.monotonic()
    process.terminate()
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert time.monotonic() - began > TERM_S
    wait_until(lambda: not alive(child))


def test_a_server_ends_when_its_guard_is_killed(tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/told; exit 0' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    process = guard(tmp_path, script)
    wait_until((tmp_path / "up").exists)
    process.kill()
    process.wait(LIMIT_S)
    wait_until((tmp_path / "told").exists)
