"""`kvfleet up --autoscale` for real: it grows under load, and shrinks by draining, under streams that go on; the list
of its processes follows, though a stranger has the port that the new one should get."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import sse
from tests.support.up import Up
from tests.support.waiting import LIMIT_S, wait_until

SLOTS = 4  # of a worker
LONG = 1200  # tokens: longer than all of this takes
WINDOWS = {"KVFLEET_SCALE_UP_S": "2", "KVFLEET_SCALE_DOWN_S": "3", "KVFLEET_SLOTS": str(SLOTS)}


class Stream:
    """One request, read by a thread of its own. `worker` is where it began."""

    def __init__(self, base: str, prompt: str, tokens: int) -> None:
        self.events: list[dict[str, object]] = []
        self._left = threading.Event()
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self._thread = threading.Thread(target=self._read, args=(base, body), daemon=True)
        self._thread.start()

    def _read(self, base: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", f"{base}/generate", json=body, timeout=LIMIT_S) as response:
            for line in sse.lines(response):
                if self._left.is_set():
                    return
                if line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))

    @property
    def worker(self) -> object:
        return self.events[0]["worker_id"] if self.events else None

    def leave(self) -> None:
        self._left.set()

    def whole(self) -> list[object]:
        """Its token ids; it must have ended well."""
        self._thread.join(LIMIT_S)
        assert self.events[-1]["type"] == "done", self.events[-1]
        return [event["token_id"] for event in self.events if event["type"] == "token"]


def until(condition: Callable[[], object], fleet: Up) -> None:
    wait_until(condition, told=lambda: fleet.stderr, pause_s=0.1)


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Listens where the fourth process would; the three ports before are free."""
    for _ in range(100):
        port = random.randrange(15_000, 30_000)
        try:
            for free in range(port - 3, port):
                socket.create_server(("127.0.0.1", free)).close()
            listening = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with listening:
            yield listening
        return
    pytest.fail("no four free ports")


@pytest.fixture
def fleet(tmp_path: Path, stranger: socket.socket) -> Iterator[Up]:
    up = Up(
        "--port", "0", "--autoscale", "1:2", "--runner", "fake", "--fake-tokens-per-s", "120", "--vaults", "0",
        "--state-dir", str(tmp_path), "--metrics-port-base", str(stranger.getsockname()[1] - 3),
        env=WINDOWS,
    )  # fmt: skip
    try:
        yield up.wait_ready()
    finally:
        up.stop()


def listed(state: Path) -> dict[str, str]:
    """Where Prometheus finds each process."""
    targets = json.loads((state / "targets" / "kvfleet.json").read_text())
    return {one["labels"]["member"]: one["targets"][0] for one in targets}


def ready(fleet: Up) -> set[str]:
    workers = httpx.get(f"{fleet.base}/workers", timeout=5).json()
    return {name for name, one in workers.items() if one["state"] == "ready"}


def test_it_grows_under_load_and_drains_the_cheapest_without_breaking_a_stream(
    fleet: Up, tmp_path: Path, stranger: socket.socket
) -> None:
    taken = f"127.0.0.1:{stranger.getsockname()[1]}"
    assert ready(fleet) == {"w0"}
    first = Stream(fleet.base, "the long way round", LONG)
    others = [Stream(fleet.base, f"and number {number}", LONG) for number in range(SLOTS - 1)]
    until(lambda: ready(fleet) == {"w0", "w1"}, fleet)
    assert set(listed(tmp_path)) == {"p0", "w0", "i0", "w1"}
    assert listed(tmp_path)["w1"] != taken
    second = Stream(fleet.base, "another long way", LONG)
    until(lambda: second.worker, fleet)
    assert {first.worker, second.worker} == {"w0", "w1"}
    for one in others:
        one.leave()
    until(lambda: "was drained" in fleet.stderr, fleet)
    until(lambda: len(ready(fleet)) == 1, fleet)
    gone = re.search(r"draining (w\d)", fleet.stderr)
    assert gone
    assert ready(fleet) == {"w0", "w1"} - {gone[1]}
    until(lambda: set(listed(tmp_path)) == {"p0", "w0", "i0", "w1"} - {gone[1]}, fleet)
    assert [len(one.whole()) for one in (first, second)] == [LONG, LONG]  # wherever they went on
    assert "Traceback" not in fleet.stderr, fleet.stderr
