"""Where the fleet is, and how a script's checks run: functions `check_*` that assert, and return what they saw.

    python openai_chat.py               each check, in order
    python openai_chat.py check_whole   one of them

Prints a line of JSON for each: {"check": ..., "saw": ...} or {"check": ..., "error": ...}. Exits 1 if one failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

BASE = os.environ.get("KVFLEET_BASE", "http://127.0.0.1:8080")
OPENAI = f"{BASE}/v1"
MODEL = os.environ.get("KVFLEET_MODEL", "demo")
KEY = os.environ.get("KVFLEET_API_KEY", "none")
TOKENIZER = os.environ.get("KVFLEET_TOKENIZER", "")  # a folder


Raised = TypeVar("Raised", bound=Exception)


def raised(kind: type[Raised], ask: Callable[..., Any], **fields: Any) -> Raised:
    """What the client makes of an answer that is an error: of this class, and of none below it."""
    try:
        answer = ask(**fields)
    except kind as error:
        if type(error) is kind:
            return error
        raise
    raise AssertionError(f"no {kind.__name__}, but {answer}")


def run_command(name: str, *arguments: str) -> str:
    """Of this environment. What it printed."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name} {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_checks(script: dict[str, Any]) -> None:
    """`script`: the globals of the one that calls."""
    named, failed = sys.argv[1:], False
    for name in [name for name in script if name.startswith("check_") and name in (named or script)]:
        try:
            saw = script[name]()
            result = {"saw": asyncio.run(saw) if inspect.iscoroutine(saw) else saw}
        except Exception:  # noqa: BLE001 - whatever a client raises is what the check found
            result, failed = {"error": traceback.format_exc()}, True
        print(json.dumps({"check": name, **result}, default=str), flush=True)
    sys.exit(failed)
