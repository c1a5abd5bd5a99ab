"""The server that the other tests here run against: it starts, says why if it cannot, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.up import alive
from tests.support.vllm_server import ENGINE, SERVER, WORKER, VllmServer, session, vllm_python
from tests.support.waiting import wait_until

ORPHAN = """
import sys, time
from pathlib import Path
from tests.support.vllm_server import VllmServer
server = VllmServer(Path(sys.argv[1]), Path(sys.argv[2]))
print(server.guard_pid, flush=True)
time.sleep(600)
"""


def test_its_processes_have_names(vllm_server: VllmServer) -> None:
    assert set(vllm_server.pids) == {SERVER, ENGINE, WORKER}
    assert all(map(alive, vllm_server.pids.values()))


def test_one_that_cannot_start_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    server = VllmServer(tiny_llama, tmp_path, "--no-such-flag")
    with pytest.raises(AssertionError, match="unrecognized arguments: --no-such-flag"):
        server.wait_ready()
    assert session(server.guard_pid) == []


def test_killed_it_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    server = VllmServer(tiny_llama, tmp_path)
    wait_until(lambda: ENGINE in server.pids, told=lambda: server.log)
    server.kill()
    assert session(server.guard_pid) == []


def test_it_ends_with_the_tests(tiny_llama: Path, tmp_path: Path) -> None:
    """Also while it starts, when a half of it does not know of the other."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, tiny_llama, tmp_path], stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        leader = int(tests.stdout.readline())
        wait_until(lambda: len(session(leader)) >= 4)  # its own watcher, vLLM's server, resource tracker and engine
        tests.kill()
    wait_until(lambda: session(leader) == [])


def test_without_it_tests_skip_and_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLEET_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("KVFLEET_TOOLS", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="no vLLM: make vllm-install"):
        vllm_python()
