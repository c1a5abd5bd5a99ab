"""Records docs/killed-worker.svg: a text streams from a real fleet, its worker is killed, and the text goes on.

    .venv/bin/python scripts/record_terminal.py [FILE]

Starts `kvfleet up` with two workers of the demo model, has a text written twice with one seed, kills the worker of the
second one with SIGKILL while it streams, and compares. The picture shows what was run and the text that came, in the
colour of the worker that computed it: the pause after the kill parts them. Fails if anything of the text differs, or no
other worker went on.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
KVFLEET = Path(sys.executable).with_name("kvfleet")
SHOWN_URL = "http://127.0.0.1:8080"
ASK = {"prompt": "ROMEO:", "max_tokens": 160, "seed": 4, "ignore_eos": True}
KILL_AT = 60  # tokens
WIDTH = 92
BEFORE, AFTER = "bold bright_blue", "bold green"


@dataclass
class Answer:
    """A stream as it came: each token with its moment, and the ids and workers of its first and last event."""

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    request: str = ""
    worker: str = ""
    last_worker: str = ""

    def pause(self, after: int) -> tuple[int, float]:
        """Before which token the longest pause was, of those after so many tokens, and its seconds."""
        pauses = [later - earlier for earlier, later in itertools.pairwise(self.moments)]
        return max(((at + 1, pause) for at, pause in enumerate(pauses) if at + 1 >= after), key=lambda one: one[1])


@contextmanager
def fleet() -> Iterator[str]:
    """The URL of a fleet on any free port."""
    command = [str(KVFLEET), "up", "--port", "0", "--workers", "2", "--dtype", "float32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"the fleet did not start: {line}")
        yield line.split()[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def stream(base: str, answer: Answer) -> Iterator[None]:
    """What curl prints. Yields after each token."""
    with subprocess.Popen(["curl", "-sN", f"{base}/generate", "-d", json.dumps(ASK)], stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        for line in curl.stdout:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "start":
                answer.request, answer.worker = event["request_id"], event["worker_id"]
            elif event["type"] == "token":
                answer.pieces.append(event["token"])
                answer.ids.append(event["token_id"])
                answer.moments.append(time.monotonic())
                yield
            elif event["type"] == "done":
                answer.last_worker = event["worker_id"]
            else:
                raise RuntimeError(f"the stream ended with {event}")


def pid_of(base: str, worker: str) -> int:
    with urllib.request.urlopen(f"{base}/workers", timeout=10) as listed:
        return int(json.load(listed)[worker]["pid"])


def explained(base: str, request: str) -> str:
    done = subprocess.run(
        [str(KVFLEET), "explain", request, "--url", base], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout


def record(base: str) -> Console:
    whole, cut = Answer(), Answer()
    for _ in stream(base, whole):
        pass
    pid = 0
    for count, _ in enumerate(stream(base, cut), start=1):
        if count == KILL_AT:
            pid = pid_of(base, cut.worker)
            os.kill(pid, signal.SIGKILL)
    if cut.ids != whole.ids or cut.last_worker == cut.worker:
        raise RuntimeError(f"{cut.worker}, then {cut.last_worker}: {len(cut.ids)} of {len(whole.ids)} tokens")
    split, pause_s = cut.pause(KILL_AT)

    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    command = f"curl -sN {SHOWN_URL}/generate -d '{json.dumps(ASK)}'"
    console.print(Text.assemble(("$ ", "bold"), command, ("   # the text of its events", "dim")))
    console.print(Text("".join(cut.pieces[:split]).lstrip("\n"), BEFORE), end="")
    console.print(Text("▌", "bold red"), end="")
    console.print(Text("".join(cut.pieces[split:]), AFTER))
    console.print()
    console.print(
        Text.assemble(("$ ", "bold"), f"kill -9 {pid}", (f"   # {cut.worker}, in another terminal, at ▌", "dim"))
    )
    console.print()
    console.print(Text.assemble(("$ ", "bold"), f"kvfleet explain {cut.request}"))
    attempts = re.findall(rf"^{cut.request}: \w+ by .*$", explained(base, cut.request), re.MULTILINE)
    console.print("\n".join(attempts), markup=False, highlight=False)
    console.print()
    console.print(
        Text.assemble(
            (f"{split} tokens of {cut.worker}", BEFORE),
            f", {pause_s * 1e3:.0f} ms, ",
            (f"{len(cut.ids) - split} tokens of {cut.last_worker}", AFTER),
            ": the same text as without a fault",
        )
    )
    return console


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "killed-worker.svg"
    with fleet() as base:
        console = record(base)
    # Without the fonts that rich would have the reader's browser fetch.
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, monospace")
    target.write_text(console.export_svg(title="a worker is killed", code_format=form, unique_id="kvfleet"))
    sys.stderr.write(f"wrote {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
