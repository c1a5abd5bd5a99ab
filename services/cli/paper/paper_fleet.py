"""A fleet for the tables: `kvfleet up` as users start it, which ends with this process, and what is asked of it.

The KVFLEET_* variables of this process change nothing there: figures are of what the table says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvfleet.cli.clients.answers import AnswerFailed, client, events, get, reading
from kvfleet.cli.embedded.processes import ends_with_parent
from kvfleet.cli.paper.paper_models import write_model
from kvfleet.cli.paper.paper_table import FleetSpec
from kvservice import launch

KVFLEET = (sys.executable, "-P", "-m", "kvfleet.cli.main")
LIMIT_S = 300.0  # of a request, a command, and of what must come
STOP_S = 20.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class PaperAnswer:
    """`error`: its code, of an answer that has no end."""

    ttft_s: float
    e2e_s: float
    token_ids: tuple[int, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    request: str = ""
    error: str = ""


@dataclass(eq=False, slots=True)
class RunningFleet:
    """Its requests raise AnswerFailed. Threads may share it."""

    base: str
    nats_url: str
    http: httpx.Client

    def generate(self, prompt: str, max_tokens: int, **asked: Any) -> PaperAnswer:
        """A turn, greedily, of the whole length."""
        answer = self.attempt(prompt, max_tokens, **asked)
        if answer.error:
            raise AnswerFailed(f"{self.base}: a request of {len(prompt):,} characters failed with {answer.error}")
        return answer

    def attempt(self, prompt: str, max_tokens: int, **asked: Any) -> PaperAnswer:
        """The same, where an error of the fleet's is an answer too."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **asked}
        began = time.perf_counter()
        first, ids, request = 0.0, [], ""
        with reading(self.base), self.http.stream("POST", f"{self.base}/generate", json=body) as response:
            if response.status_code != 200:
                response.read()
                failed = str(response.json()["error"]["code"])
                return PaperAnswer(0.0, time.perf_counter() - began, (), error=failed)
            for event in events(response):
                if event["type"] == "start":
                    request = event["request_id"]
                elif event["type"] == "token":
                    first = first or time.perf_counter() - began
                    ids.append(event["token_id"])
                elif event["type"] == "error":
                    took = time.perf_counter() - began
                    return PaperAnswer(first, took, tuple(ids), request=request, error=event["code"])
                else:
                    usage, took = event["usage"], time.perf_counter() - began
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    return PaperAnswer(first, took, tuple(ids), usage["prompt_tokens"], cached, request)
        raise AnswerFailed(f"{self.base}: an answer has no end")

    def get(self, path: str, *good: int) -> Any:
        with reading(self.base):
            return get(self.http, f"{self.base}{path}", *good)

    def read(self, path: str) -> bytes:
        with reading(self.base):
            answer = self.http.get(f"{self.base}{path}")
            answer.raise_for_status()
            return answer.content

    def until(self, what: str, found: Callable[[], Any]) -> Any:
        """What it finds, as soon as that is something."""
        end = time.monotonic() + LIMIT_S
        while not (value := found()):
            if time.monotonic() > end:
                raise AnswerFailed(f"{self.base}: {what} did not come within {LIMIT_S:g} s")
            time.sleep(LOOK_S)
        return value

    def restart(self, worker: str) -> None:
        """Kill the process; the fleet starts it again, with an empty device and an empty host."""
        before = self.get("/workers")[worker]
        os.kill(before["pid"], signal.SIGKILL)

        def again() -> bool:
            now = self.get("/workers").get(worker, {})
            return bool(now) and now["epoch"] != before["epoch"] and now["state"] == "ready"

        self.until(f"{worker} in a new life", again)

    def command(self, *words: str) -> None:
        """Another command of `kvfleet`, which reaches the fleet by NATS. Raises AnswerFailed with its last line."""
        done = run_kvfleet(*words, f"--nats-url={self.nats_url}")
        if done.returncode != 0:
            raise AnswerFailed(_last_line(done.stderr) or f"kvfleet {words[0]}: exit code {done.returncode}")


def run_kvfleet(*words: str) -> subprocess.CompletedProcess[str]:
    """Raises AnswerFailed if it takes too long."""
    return _run([*KVFLEET, *words])


def worker_report(module: str, *words: str, stdin: str = "") -> Any:
    """The JSON that a report of the worker's own code prints, in a process of its own. Raises AnswerFailed."""
    done = _run(launch.command(module, *words), stdin)
    if done.returncode != 0:
        raise AnswerFailed(_last_line(done.stderr) or f"{module}: exit code {done.returncode}")
    return json.loads(done.stdout)


def _run(command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=stdin, env=_variables(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise AnswerFailed(f"{command[-1]} did not end within {LIMIT_S:g} s") from None


@contextmanager
def running(spec: FleetSpec, folder: Path) -> Iterator[RunningFleet]:
    """A fleet of `spec`, whose models lie in `folder`. Raises AnswerFailed if it does not start."""
    models = [f"--model={write_model(model, folder)}" for model in spec.models]
    load = ["--load-format=dummy"] if models else []
    log = folder / "up.log"
    with log.open("w") as told:
        process = subprocess.Popen(
            [*KVFLEET, "up", "--port=0", *spec.flags, *models, *load],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env=_variables(),
            start_new_session=True,  # Ctrl-C reaches this process, which then stops it
            preexec_fn=ends_with_parent(),
        )
    try:
        assert process.stdout is not None
        base = process.stdout.readline().removeprefix("ready").strip()
        if not base:
            process.wait()
            raise AnswerFailed(_last_line(log.read_text()) or f"kvfleet up: exit code {process.returncode}")
        with client(None, timeout=LIMIT_S) as http:
            fleet = RunningFleet(base, "", http)
            fleet.nats_url = fleet.until("NATS's address", partial(_nats_url, log))
            yield fleet
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _nats_url(log: Path) -> str:
    found = re.search(r"nats://[\w.:]*\w", log.read_text())
    return found.group() if found else ""


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVFLEET_")}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("kvfleet: ")
