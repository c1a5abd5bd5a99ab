"""The examples as their README tells to start them, against an embedded fleet.

Skipped, with the reason, where a program is missing that not everybody has: node, LangChain, Chromium.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import nats
import pytest

from tests.examples.conftest import EXAMPLES, Run
from tests.support.browser import Browser, find_chromium
from tests.support.up import Up
from tests.support.waiting import LIMIT_S, wait_until

PROMPT = "KING RICHARD:\nNow is the"


def test_the_readme_names_every_example() -> None:
    named = set(re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}


# ---------------------------------------------------------------------- a batch


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_is_answered_in_order_and_goes_on_where_it_stopped(fleet: Up, run: Run, tmp_path: Path) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    chat = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "Who goes there?"}]}
    lines = [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "seed": n}})
        for n in range(8)
    ]
    wrong = {"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"model": "demo"}}
    lines[2:2] = ["no JSON", json.dumps(wrong)]
    requests.write_text("\n".join(lines) + "\n")

    def answer() -> list[dict[str, Any]]:
        done = run("batch.py", str(requests), str(answers), "--url", fleet.base, "--concurrency", "3")
        assert done.returncode == 0, done.stderr
        return lines_of(answers)

    first = answer()
    assert [one["custom_id"] for one in first] == ["c0", "c1", None, "wrong", *(f"c{n}" for n in range(2, 8))]
    assert first[2]["error"]["code"] == "invalid_line"
    assert first[3]["response"]["status_code"] == 400
    assert "prompt" in json.dumps(first[3]["response"]["body"])
    said = [one["response"]["body"] for one in first if (one["custom_id"] or "").startswith("c")]
    assert all(body["choices"][0]["message"]["content"] for body in said)
    assert len({body["choices"][0]["message"]["content"] for body in said}) > 1, "seeds differ"
    assert answer() == first, "nothing is left to do"

    kept = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(kept[:5]) + kept[5][:20])
    assert answer() == first, "the rest, and what the fleet had answered under the same keys is not generated again"


# ---------------------------------------------------------------------- bare producers


def test_a_producer_in_python(fleet: Up, run: Run) -> None:
    done = run("nats_producer.py", PROMPT, "--nats", fleet.nats_url, "--max-tokens", "12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    refused = run("nats_producer.py", "x", "--nats", fleet.nats_url, "--model", "nobody")
    assert refused.returncode == 1
    assert "model_not_found" in refused.stderr


def test_a_producer_in_node(fleet: Up, run: Run, node_folder: Path) -> None:
    asked = ("nats_producer.mjs", "--nats", fleet.nats_url)
    done = run(*asked, PROMPT, "--max-tokens", "12", folder=node_folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    refused = run(*asked, "x", "--model", "nobody", folder=node_folder)
    assert refused.returncode == 1
    assert "model_not_found" in refused.stderr


def tokens(attempt: int, index: int, text: str) -> dict[str, Any]:
    ids = [ord(letter) for letter in text]
    return {"type": "tokens", "attempt": attempt, "choice": 0, "index": index, "ids": ids, "text": list(text)}


def failed(attempt: int, *, retryable: bool) -> dict[str, Any]:
    return {"type": "failed", "attempt": attempt, "code": "worker_lost", "message": "gone", "retryable": retryable}


def finished(attempt: int) -> dict[str, Any]:
    return {"type": "finished", "attempt": attempt, "reason": "length", "output_tokens": 7}


TROUBLE = (
    # a newer attempt goes on, late frames of the older one come, frames come twice, then some are lost
    [
        tokens(0, 0, "ab"),
        tokens(1, 2, "c"),
        tokens(0, 2, "XY"),
        failed(0, retryable=False),
        tokens(1, 1, "bcd"),
        tokens(1, 5, "f"),
    ],
    [tokens(2, 0, "abcde"), failed(2, retryable=True)],
    [tokens(3, 0, "abc"), finished(3)],  # some are lost before the end
    [tokens(4, 0, "abcdefg"), finished(4)],
)


@pytest.mark.parametrize("language", ["python", "node"])
async def test_a_producer_under_trouble(nats_url: str, run: Run, language: str, request: pytest.FixtureRequest) -> None:
    """A placement of the test's own answers each time it is asked with the next frames of TROUBLE, in kind."""
    where: dict[str, Any] = {} if language == "python" else {"folder": request.getfixturevalue("node_folder")}
    file = "nats_producer.py" if language == "python" else "nats_producer.mjs"
    nc = await nats.connect(nats_url)
    asked: list[Any] = []

    async def answer(message: Any) -> None:
        as_json = message.headers is not None
        asked.append(json.loads(message.data) if as_json else msgpack.unpackb(message.data))
        for frame in TROUBLE[len(asked) - 1]:
            whole = {"request": asked[-1]["request"], **frame}
            await nc.publish(message.reply, json.dumps(whole).encode() if as_json else msgpack.packb(whole))

    model = f"scripted-{language}"
    await nc.subscribe(f"kvf.generate.public.{model}", cb=answer)
    await nc.flush()
    done = await asyncio.to_thread(run, file, "x", "--nats", nats_url, "--model", model, **where)
    await nc.close()
    assert (done.returncode, done.stdout) == (0, "abcdefg\n"), done.stderr
    assert done.stderr.count("asking again") == len(TROUBLE) - 1
    assert asked == [asked[0]] * len(TROUBLE), "the very same request each time"
    assert asked[0]["prompt"] == "x"


async def test_a_producer_goes_on_with_the_same_text_when_its_worker_is_killed(fleet: Up) -> None:
    generate = module_of("nats_producer.py").generate
    nc = await nats.connect(fleet.nats_url)

    async def read(request: str, *, kill: bool) -> str:
        text = ""
        asked = {"request": request, "prompt": PROMPT, "max_tokens": 200, "temperature": 0.8, "seed": 42}
        async for piece in generate(nc, "kvf.generate.public.demo", asked):
            text += piece
            if kill and len(text) > 40:
                kill = False
                await asyncio.to_thread(kill_worker_of, fleet, request)
        return text

    whole = await read("undisturbed", kill=False)
    assert len(whole) > 100
    assert await read("disturbed", kill=True) == whole
    await nc.close()


def module_of(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kill_worker_of(fleet: Up, request: str) -> None:
    with httpx.Client(base_url=fleet.base, timeout=LIMIT_S, trust_env=False) as http:
        worker = http.get(f"/v1/placements/{request}").json()["attempts"][-1]["worker_id"]
        os.kill(http.get("/workers").json()[worker]["pid"], signal.SIGKILL)


# ---------------------------------------------------------------------- LangChain


def test_langchain(fleet: Up, run: Run) -> None:
    """KVFLEET_LANGCHAIN names a folder with the package (`pip install --target FOLDER langchain-openai`), if it is not
    installed: its own openai may be older than the one that other tests take."""
    folder = os.environ.get("KVFLEET_LANGCHAIN", "")
    if not folder and importlib.util.find_spec("langchain_openai") is None:
        pytest.skip("no langchain-openai here: KVFLEET_LANGCHAIN can name a folder that has it")
    done = run("langchain_chat.py", "--url", fleet.base, "--max-tokens", "20", path=folder)
    assert done.returncode == 0, done.stderr
    turns = re.findall(r"\[(\d+) of (\d+) prompt tokens cached, (\d+) generated\]", done.stdout)
    (_, first, generated), (cached, second, _) = [tuple(map(int, turn)) for turn in turns]
    assert second > first + generated
    assert cached >= first, "the second turn finds the first one"


# ---------------------------------------------------------------------- the page

# The first answer's connection ends after three events, as if the network had gone, however they are read.
BROKEN = r"""
const asked = window.fetch;
window.sent = [];
window.fetch = async (url, how) => {
  const response = await asked(url, how);
  if (!url.includes('/chat/')) return response;
  window.sent.push(how.headers['Last-Event-ID'] ?? '');
  if (window.sent.length > 1) return response;
  let left = 3;
  const cut = new TransformStream({
    transform(chunk, to) {
      if (left === 0) return;
      const bytes = new TextDecoder('latin1').decode(chunk);
      let at = 0;
      while (left > 0) {
        const end = bytes.indexOf('\n\n', at);
        if (end < 0) return to.enqueue(chunk);
        at = end + 2;
        left -= 1;
      }
      to.enqueue(chunk.slice(0, at));
      setTimeout(() => to.error(new TypeError('network error')), 50);  // once they are read
    },
    flush: () => new Promise(() => {}),
  });
  return new Response(response.body.pipeThrough(cut));
};
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("no chromium here: scripts/browser_install")
    browser = Browser(binary, tmp_path)
    yield browser
    browser.close()


def test_the_page(fleet: Up, pages: str, browser: Browser) -> None:
    browser.open(f"{pages}/chat.html?url={fleet.base}")
    browser.run(BROKEN)

    def say(text: str) -> tuple[str, str]:
        browser.type("#said", text)
        browser.press("Enter")
        browser.until_text("#about", "generated")
        return browser.text("#turns p:last-child"), browser.text("#about")

    first, about = say("Who goes there?")
    sent = browser.run("window.sent")
    assert len(sent) == 2, "one connection that broke, one that went on"
    assert sent[0] == ""
    assert sent[1]
    assert first
    wait_until(lambda: browser.run("!document.getElementById('said').disabled"))
    _, then = say("And then?")
    cached, prompt = (int(one) for one in re.findall(r"\d+", then)[:2])
    assert prompt > cached >= int(re.findall(r"\d+", about)[1]), "the second turn finds the first one"
    assert browser.run("document.querySelectorAll('#turns p').length") == 4
    assert browser.problems == []
