"""A server, or a model behind it, says what would command a terminal or be markup: every command shows it as text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app

EVIL = "\x1b]0;taken\x07\r[/b][red]\x9b2J\x7f\ud800"
SHOWN = "[/b][red]"
ACTUAL = {"accepted": True, "cached_tokens": {EVIL: 1}, "queue_ms": 1.0, "ttft_ms": 1.0, "output_tokens": 1}
PLACEMENT = {
    "request_id": EVIL, "attempt": 1, "worker_id": EVIL, "policy": EVIL, "prompt_tokens": 4, "tenant": EVIL,
    "model": EVIL, "placement_id": EVIL, "decided_unix_ms": 1, "why": EVIL, "source_worker_id": EVIL,
    "source_tokens": 1, "candidates_total": 1, "expected_hit_tokens": {EVIL: 1}, "expected_ttft_ms": 1.0,
    "candidates": [
        {"worker_id": EVIL, "chosen": True, "cost_ms": 1.0, "terms_ms": {EVIL: 1.0}, "matched_tokens": {EVIL: 1}}
    ],
    "actual": {**ACTUAL, "ended": True, "error_code": EVIL},
}  # fmt: skip
FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{IDEOGRAPHIC SPACE}\N{NO-BREAK SPACE}."
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"content": f"{EVIL}\r\na\tb\n{FAMILY}"}}]},
    {"choices": [], "usage": {"prompt_tokens": EVIL, "completion_tokens": EVIL}},
]
TOKENS: list[dict[str, Any]] = [
    {"type": "start", "cached_tokens": EVIL, "seq_id": EVIL, "request_id": EVIL},
    {"type": "token", "token": f"{EVIL}\n{FAMILY}"},
    {"type": "end", "tokens_generated": EVIL, "finish_reason": EVIL},
]
HEALTH = {"workers_ready": 1, "placements": EVIL, "vaults": 1, "models": [EVIL]}
ERROR = {"error": {"message": EVIL}}


class Handler(BaseHTTPRequestHandler):
    """Path -> status and JSON, or events; what is not named is an error."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        status, body = self.answers.get(self.path.partition("?")[0], (400, ERROR))
        if isinstance(body, list):
            kind = "text/event-stream"
            data = "".join(f"data: {json.dumps(one)}\n\n" for one in body) + "data: [DONE]\n\n"
        else:
            kind, data = "application/json", json.dumps(body)
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "answers", {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*command: str, typed: str = "") -> Any:
    """What it said, none of it a command. Raises what it raises."""
    ran = CliRunner().invoke(app, command, input=typed, catch_exceptions=False)
    ran.output.encode()
    assert all(one >= " " or one == "\n" for one in ran.output), ran.output
    assert not {"\x7f", "\x9b"} & set(ran.output)
    return ran


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "x"],
        ["chat"],
        ["explain", "r1"],
        ["top", "--once"],
        ["top", "--json"],
        ["plan", "demo", "--requests-per-second=1", "--ttft=1"],
    ],
)
def test_an_error_is_one_line(url: str, command: list[str]) -> None:
    ran = run(*command, f"--{'from-fleet' if command[0] == 'plan' else 'url'}={url}")
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith("kvfleet: ")
    assert SHOWN in ran.stderr


def test_explain(url: str) -> None:
    Handler.answers = {"/v1/placements/r1": (200, {"request_id": EVIL, "attempts": [PLACEMENT]})}
    ran = run("explain", "r1", f"--url={url}")
    assert ran.exit_code == 0
    assert ran.stdout.count(SHOWN) == 13
    assert ran.stdout.count(f"{SHOWN}\N{REPLACEMENT CHARACTER}2J") == 13, "a table is as wide as what is shown"
    as_json = run("explain", "r1", f"--url={url}", "--json")
    assert json.loads(as_json.stdout)["attempts"] == [PLACEMENT], "as it was said"


@pytest.mark.parametrize("no_ledger", [429, 503])
def test_top(url: str, no_ledger: int) -> None:
    Handler.answers = {"/stats": (403, ERROR), "/health": (200, HEALTH), "/v1/placements": (no_ledger, ERROR)}
    command = ("top", f"--url={url}", "--interval=0.1", "--once")
    ran = run(*command)
    assert (ran.exit_code, ran.stdout.count(SHOWN)) == (0, 3)
    Handler.answers["/v1/placements"] = 200, {"placements": [PLACEMENT]}
    ran = run(*command)
    assert (ran.exit_code, ran.stdout.count(SHOWN)) == (0, 8)


def test_a_conversation(url: str) -> None:
    talk = "/v1/chat/completions"
    Handler.answers = {"/v1/models": (200, {"data": [{"id": EVIL[:-1]}]}), talk: (200, CHUNKS)}
    ran = run("chat", f"--url={url}", typed="hello\n\n")
    assert ran.exit_code == 0
    assert f"{SHOWN}\N{REPLACEMENT CHARACTER}2J" in ran.stdout
    assert f"\na       b\n{FAMILY}\n" in ran.stdout, "a model's text keeps what commands nothing"
    assert ran.stderr.count(SHOWN) == 3
    Handler.answers[talk] = 200, [ERROR]
    assert run("chat", f"--url={url}", typed="hello\n\n").stderr.count(SHOWN) == 2
    Handler.answers[talk] = 400, ERROR
    assert run("chat", f"--url={url}", typed="hello\n\n").stderr.count(SHOWN) == 2


def test_a_continued_text(url: str) -> None:
    Handler.answers = {"/generate": (200, TOKENS)}
    ran = run("generate", "x", f"--url={url}")
    assert ran.exit_code == 0
    assert SHOWN in ran.stdout
    assert ran.stdout.endswith(f"\n{FAMILY}\n")
    assert ran.stderr.count(SHOWN) == 5
    Handler.answers = {"/generate": (200, [{"type": "error", "code": EVIL, "error": EVIL}])}
    failed = run("generate", "x", f"--url={url}")
    assert (failed.exit_code, failed.stderr.count("\n"), failed.stderr.count(SHOWN)) == (1, 1, 2)
