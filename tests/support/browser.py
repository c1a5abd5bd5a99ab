"""A real headless Chromium, spoken to over its DevTools pipe: no driver and no package between.

Debian's `chromium`, or whatever KVFLEET_CHROMIUM names; tests skip where there is none.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.waiting import LIMIT_S, wait_until

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    return os.environ.get("KVFLEET_CHROMIUM") or shutil.which("chromium")


class Browser:
    """One process with one tab. `problems` are its console's errors and exceptions, in words."""

    def __init__(self, binary: str, profile: Path) -> None:
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        # Chromium reads file 3 and writes file 4: a shell puts the pipes there, from numbers that are neither.
        to_it, from_it = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (reads, writes))
        script = f'exec "$@" 3</proc/self/fd/{to_it} 4>/proc/self/fd/{from_it}'
        self.process = subprocess.Popen(
            ["sh", "-c", script, "sh", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (reads, writes, to_it, from_it):
            os.close(one)
        self.problems: list[str] = []
        self._unread = b""
        self._asked = 0
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, timeout_s: float = LIMIT_S, **params: Any) -> dict[str, Any]:
        """Raises AssertionError for what the browser refuses, TimeoutError."""
        self._asked += 1
        number = self._asked
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout_s
        while True:
            answer = self._next(end)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._read], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has gone"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.problems.append(str(params["args"]))

    # ------------------------------------------------------------------ the page

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(lambda: self.run("document.readyState") == "complete")

    def run(self, expression: str) -> Any:
        """What it gives, a promise's value included. Raises AssertionError where it throws."""
        given = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        assert "exceptionDetails" not in given, given["exceptionDetails"]
        return given["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def type(self, selector: str, text: str) -> None:
        """As from a keyboard, at the end of what is there."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def until(self, condition: Callable[[], Any]) -> Any:
        return wait_until(condition, told=lambda: f"on the page:\n{self.text('body')}\n{self.problems}", pause_s=0.05)

    def until_text(self, selector: str, part: str) -> None:
        self.until(lambda: part in self.text(selector))

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._write)
        os.close(self._read)
