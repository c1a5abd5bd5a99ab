"""Processes of a fork server, for real: what they are given, how they end, and what becomes of them without it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfleet.cli.embedded.forks import Forked, Forks, of_services, of_workers
from kvfleet.cli.embedded.processes import popen
from kvservice import launch
from tests.support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
SERVER = """
import json, os, socket, sys, time
from kvservice.fork_server import serve

def become(module, flags):
    say = {"pid": os.getpid(), "flags": flags, "session": os.getsid(0), "told": os.environ.get("TOLD")}
    if len(flags) > 3:
        say["heard"] = socket.socket(fileno=int(flags[2])).recv(100).decode()
    with open(flags[0] + ".part", "w") as file:
        json.dump(say | {"module": module}, file)
    os.rename(flags[0] + ".part", flags[0])
    if flags[1] == "wait":
        time.sleep(600)
    sys.exit(int(flags[1]))

serve(socket.socket(fileno=int(sys.argv[1])), become)
"""


def server(code: str) -> Forks:
    return Forks(lambda fd: popen([sys.executable, "-c", code, str(fd)], {}, [fd]))


@pytest.fixture
def forks() -> Iterator[Forks]:
    forks = server(SERVER)
    yield forks
    forks.close()


def said(path: Path) -> dict[str, object]:
    wait_until(path.exists)
    return dict(json.loads(path.read_text()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_is_a_process_of_its_own_with_its_flags_and_variables(forks: Forks, tmp_path: Path) -> None:
    first = forks.start("m", [str(tmp_path / "a"), "3"], {"TOLD": "a"})
    second = forks.start("m", [str(tmp_path / "b"), "0"], {"TOLD": "b"})
    assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (3, 0)
    a, b = said(tmp_path / "a"), said(tmp_path / "b")
    assert (a["told"], b["told"], a["module"]) == ("a", "b", "m")
    assert (a["pid"], b["pid"]) == (first.pid, second.pid)
    assert a["session"] == a["pid"], "what the terminal sends to its owner does not reach it"
    assert isinstance(a["flags"], list)
    assert a["flags"][-1].startswith("--parent-pid=")


def test_one_that_is_killed_ends_alone(forks: Forks, tmp_path: Path) -> None:
    killed, other = (forks.start("m", [str(tmp_path / name), "wait"], {}) for name in "ab")
    said(tmp_path / "a"), said(tmp_path / "b")
    wait_until(lambda: killed.poll() is None and killed.pid and other.pid)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(LIMIT_S) == -signal.SIGKILL
    assert other.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)


def test_with_the_server_all_end_and_the_next_has_a_new_one(forks: Forks, tmp_path: Path) -> None:
    one = forks.start("m", [str(tmp_path / "a"), "wait"], {})
    flags = said(tmp_path / "a")["flags"]
    assert isinstance(flags, list)
    os.kill(int(flags[-1].partition("=")[2]), signal.SIGKILL)
    assert one.wait(LIMIT_S) != 0
    wait_until(lambda: not alive(one.pid))
    assert forks.start("m", [str(tmp_path / "b"), "0"], {}).wait(LIMIT_S) == 0


def test_what_is_not_there_yet_is_ended_with_the_server(forks: Forks, tmp_path: Path) -> None:
    slow = server("import time; time.sleep(600)")
    unborn = slow.start("m", [str(tmp_path / "a"), "wait"], {})
    assert unborn.poll() is None
    unborn.send_signal(signal.SIGTERM)
    assert unborn.wait(LIMIT_S) == -signal.SIGTERM
    slow.close()


def test_a_server_that_cannot_start_says_so_by_its_code(tmp_path: Path) -> None:
    broken = server("import sys; sys.exit(7)")
    assert broken.start("m", [], {}).wait(LIMIT_S) == 7


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    forks = server(SERVER)
    one: Forked = forks.start("m", [str(tmp_path / "a"), "wait"], {})
    pid = said(tmp_path / "a")["pid"]
    assert isinstance(pid, int)
    forks.close()
    assert one.poll() is not None
    wait_until(lambda: not alive(pid))


def test_a_socket_has_the_number_that_it_has_here(forks: Forks, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = forks.start("m", [str(tmp_path / "a"), "0", str(theirs.fileno())], {}, theirs.fileno())
        ours.send(b"heard")
        assert child.wait(LIMIT_S) == 0
    assert said(tmp_path / "a")["heard"] == "heard"


@pytest.mark.parametrize("forks_of", [of_services, of_workers])
def test_a_service_is_shown_as_what_would_be_started(forks_of: Callable[[], Forks]) -> None:
    """And the server of workers is a process of the other one, which ends with it."""
    services, workers = of_services(), of_workers()
    try:
        child = forks_of().start("kvfleet.vault.main", ["--id=v0", "--nats-url=nats://127.0.0.1:1"], {})
        shown = " ".join(launch.command("kvfleet.vault.main", "--id=v0", "--nats-url=nats://127.0.0.1:1"))
        wait_until(lambda: child.poll() is None and child.pid)
        wait_until(lambda: Path(f"/proc/{child.pid}/cmdline").read_text().startswith(shown))
        child.send_signal(signal.SIGTERM)
        child.wait(LIMIT_S)
    finally:
        workers.close()
        services.close()
        of_services.cache_clear()
        of_workers.cache_clear()
