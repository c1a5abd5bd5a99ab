"""One embedded fleet for all examples, and how they are started: each file as it stands, as a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.up import Up

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="session")
def pages() -> Iterator[str]:
    """The folder of examples as `python -m http.server` serves it; its origin."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(EXAMPLES)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def fleet(pages: str) -> Iterator[Up]:
    up = Up("--port", "0", "--dtype", "float32", env={"KVFLEET_CORS_ORIGINS": pages})
    try:
        yield up.wait_ready()
    finally:
        up.stop()


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the Node example stands beside the package that it needs."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node or no npm here: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "nats@2"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"npm cannot install the package nats here: {installed.stderr[-200:]}")
    shutil.copy(EXAMPLES / "nats_producer.mjs", folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(file, *arguments)` starts a Python example, `run(file, ..., folder=F)` a Node one that stands in F; its
    result when it has ended."""

    def start(
        file: str, *arguments: str, folder: Path | None = None, path: str = ""
    ) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, str(EXAMPLES / file)] if folder is None else ["node", file]
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [*program, *arguments], cwd=folder or tmp_path, env=env, capture_output=True, text=True, timeout=120
        )

    return start
