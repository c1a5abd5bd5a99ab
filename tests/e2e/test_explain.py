"""`kvfleet explain` and policies by name, as users type them."""

from __future__ import annotations

import json
import re
import subprocess
import time

from tests.support.processes import KVFLEET
from tests.support.up import Up
from tests.support.waiting import LIMIT_S


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


def test_why_a_request_went_where_it_went(up: Up) -> None:
    request = generate(up, "--policy=kv_load")
    end = time.monotonic() + LIMIT_S
    while True:
        told = kvfleet(up, "explain", request, "--json")
        assert told.returncode == 0, told.stderr
        (attempt,) = json.loads(told.stdout)["attempts"]
        if attempt["actual"]["ended"] or time.monotonic() > end:
            break
    assert (attempt["policy"], attempt["tenant"], attempt["candidates_total"]) == ("kv_load", "public", 2)
    assert (attempt["actual"]["accepted"], attempt["actual"]["output_tokens"]) == (True, 3)
    shown = kvfleet(up, "explain", f"chatcmpl-{request}")
    assert shown.returncode == 0, shown.stderr
    assert f"{request}: {attempt['worker_id']} by kv_load" in shown.stdout
    assert re.search(r"^ *\* +" + attempt["worker_id"], shown.stdout, re.MULTILINE)
    assert re.search(r"^ *output tokens +3 *$", shown.stdout, re.MULTILINE)


def test_a_worker_by_name(up: Up) -> None:
    for worker in ("w0", "w1"):
        request = generate(up, f"--worker={worker}")
        (attempt,) = json.loads(kvfleet(up, "explain", request, "--json").stdout)["attempts"]
        assert (attempt["policy"], attempt["worker_id"]) == ("direct", worker)


def test_what_is_wrong_is_one_line_and_exit_code_1(up: Up) -> None:
    for words, text in (
        (("explain", "a" * 26), "id: no decision about 'aaaaaaaaaaaaaaaaaaaaaaaaaa' is known"),
        (("explain", "not an id"), "id: must be 1 to 64 of"),
        (("generate", "x", "--policy=best"), "policy: 'best' is none of cost"),
    ):
        refused = kvfleet(up, *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("kvfleet: ")
        assert text in refused.stderr
    gone = subprocess.run(
        [KVFLEET, "explain", "a", "--url=http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert gone.returncode == 1
    assert "http://127.0.0.1:1" in gone.stderr
