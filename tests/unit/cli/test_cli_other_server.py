"""Another server than an ingress is there, and answers 200: one line and exit code 1, from every command that asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app

COMMANDS = {
    "generate": ["generate", "x"],
    "chat": ["chat"],
    "chat with a model": ["chat", "--model=m"],
    "explain": ["explain", "r1"],
    "top": ["top", "--once", "--interval=0.1"],
    "plan": ["plan", "demo", "--requests-per-second=1", "--ttft=1"],
    "bench": ["bench", "--no-overhead"],
    "bench with a model": ["bench", "--model=m", "--no-overhead"],
}
ANSWERS = {
    "a page": b"<!doctype html><title>Welcome</title>",
    "nothing": b"",
    "half of it": b'{"attempts": [',
    "no text": b"\xff\xfe{}",
    "a list": b"[1, 2]",
    "a word": b'"welcome"',
    "an object": b'{"welcome": {"rates": 7}}',
    "an event": b"data: 7\n\n",
    "no event": b"data: {\n\n",
    "an event of another kind": b'data: {"welcome": 1}\n\n',
}


class Handler(BaseHTTPRequestHandler):
    body: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_one_line(url: str, name: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "body", ANSWERS[answer])
    where = {"plan": f"--from-fleet={url}"}.get(name, url if name.startswith("bench") else f"--url={url}")
    ran = CliRunner().invoke(app, [*COMMANDS[name], where], input="hello\n", catch_exceptions=False)
    assert url in ran.stderr
    if name == "chat with a model":  # the conversation could go on
        assert ran.exit_code == 0
        return
    assert ran.exit_code == 1
    assert ran.stderr.startswith("kvfleet: "), ran.stderr
    assert ran.stderr.count("\n") == 1
