"""`kvfleet explain` and policies by name, as users type them."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from tests.support.processes import KVFLEET
from tests.support.up import Up
from tests.support.waiting import LIMIT_S, wait_until


def kvfleet(up: Up, *words: str) -> subprocess.CompletedProcess[str]:
    command = [KVFLEET, *words, f"--url={up.base}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def generate(up: Up, *flags: str) -> str:
    """The request's id, as the command says it."""
    done = kvfleet(
        up, "generate", "ROMEO:\nBut soft, what light through yonder window breaks?", "--max-tokens=3", *flags
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"request ([a-z2-7]{26})", done.stderr)
    assert found, done.stderr
    return found[1]


def explain(up: Up, *words: str) -> str:
    """What it says; "" when a busy placement was not waited for."""
    return kvfleet(up, "explain", *words).stdout


def test_why_a_request_went_where_it_went(up: Up) -> None:
    request = generate(up, "--policy=kv_load")
    attempt: dict[str, Any] = {"actual": {"ended": False}}
    while not attempt["actual"]["ended"]:
        (attempt,) = json.loads(wait_until(lambda: explain(up, request, "--json")))["attempts"]
    assert (attempt["policy"], attempt["tenant"], attempt["candidates_total"]) == ("kv_load", "public", 2)
    assert (attempt["actual"]["accepted"], attempt["actual"]["output_tokens"]) == (True, 3)
    shown = wait_until(lambda: explain(up, f"chatcmpl-{request}"))
    assert f"{request}: {attempt['worker_id']} by kv_load" in shown
    assert re.search(r"^ *\* +" + attempt["worker_id"], shown, re.MULTILINE)
    assert re.search(r"^ *output tokens +3 *$", shown, re.MULTILINE)


@pytest.mark.parametrize("worker", ["w0", "w1"])
def test_a_worker_by_name(up: Up, worker: str) -> None:
    told = wait_until(lambda: explain(up, generate(up, f"--worker={worker}"), "--json"))
    (attempt,) = json.loads(told)["attempts"]
    assert (attempt["policy"], attempt["worker_id"]) == ("direct", worker)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("explain", "a" * 26), "id: no decision about 'aaaaaaaaaaaaaaaaaaaaaaaaaa' is known"),
        (("explain", "not an id"), "id: must be 1 to 64 of"),
        (("generate", "x", "--policy=best"), "policy: 'best' is none of cost"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_1(up: Up, words: tuple[str, ...], text: str) -> None:
    def refused() -> bool:
        done = kvfleet(up, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("kvfleet: ")
        return text in done.stderr

    wait_until(refused)


def test_where_nobody_answers_the_address_is_named() -> None:
    gone = subprocess.run(
        [KVFLEET, "explain", "a", "--url=http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert gone.returncode == 1
    assert "http://127.0.0.1:1" in gone.stderr
