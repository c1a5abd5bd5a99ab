"""Who is over a limit is refused before its body is read, and who sends a long body does not hold up the others."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from ingress_rig import Serve, Served, until
from scripted_worker import ScriptedWorker
from test_ingress_limits_http import COMPLETION, keys_of

from kvfleet.ingress import request_reader
from kvfleet.ingress.prompts import prompts
from tests.support.waiting import LIMIT_S

LONG_IDS = [7] * 2_000_000  # about 4 MB of JSON
SHORT: dict[str, Any] = {"model": "demo", "prompt": [5, 6], "max_tokens": 2}


class Slow:
    """A request of which only the head and one byte of the body are sent; `answer` is what comes meanwhile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, served: Served, key: str, body: dict[str, Any]) -> Slow:
        host, port = served.url.removeprefix("http://").split(":")
        slow = cls(*await asyncio.open_connection(host, int(port)))
        text = json.dumps(body).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {key}\r\nContent-Length: {len(text)}\r\n\r\n"
        slow._writer.write(head.encode() + text[:1])
        await slow._writer.drain()
        return slow

    async def answer(self) -> tuple[int, str]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.lower().splitlines() if line.startswith("content-length:"))
        body = await self._reader.readexactly(int(length.split(":")[1]))
        return int(head.split()[1]), json.loads(body)["error"]["message"]

    def leave(self) -> None:
        self._writer.close()


@pytest.mark.parametrize(
    ("limits", "why"),
    [({"requests_per_minute": 1}, "1 requests per minute"), ({"max_concurrent": 1}, "1 requests at once")],
)
async def test_nothing_is_read_of_who_is_over_a_limit(
    serving: Serve, worker: ScriptedWorker, limits: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    parse = request_reader.parse_body

    def noting(data: bytes) -> Any:
        parsed.append(data)
        return parse(data)

    monkeypatch.setattr(request_reader, "parse_body", noting)
    served = await serving(keys=keys_of(a=limits))
    worker.held.clear()
    first = asyncio.create_task(served.http.post(COMPLETION, json=SHORT, headers={"x-api-key": "a"}))
    await until(lambda: worker.requests)
    slow = await Slow.begin(served, "a", {**SHORT, "prompt": [7] * 1000})
    try:
        status, message = await asyncio.wait_for(slow.answer(), LIMIT_S)  # its body is never sent
    finally:
        slow.leave()
        worker.held.set()
    assert status == 429
    assert why in message
    assert len(parsed) == 1
    assert (await first).status_code == 200
    served.ingress.admission.check_integrity()


async def test_a_body_that_is_being_read_has_its_place(serving: Serve, worker: ScriptedWorker) -> None:
    """A key's bodies are read as many at once as it may have requests, and what is given up is free again."""
    served = await serving(keys=keys_of(a={"max_concurrent": 1, "requests_per_minute": 6}))
    slow = await Slow.begin(served, "a", SHORT)
    await until(lambda: served.ingress.admission.being_read == 1)
    other = await served.http.post(COMPLETION, json=SHORT, headers={"x-api-key": "a"})
    assert other.status_code == 429
    served.ingress.admission.check_integrity()
    slow.leave()
    await until(lambda: served.ingress.admission.being_read == 0)
    wrong = await served.http.post(COMPLETION, content=b"{", headers={"x-api-key": "a"})
    assert wrong.status_code == 400
    good = await served.http.post(COMPLETION, json=SHORT, headers={"x-api-key": "a"})
    assert good.status_code == 200, "neither the one that left nor the wrong one was taken of the rate"
    assert served.ingress.admission.running == 0
    assert not any(account.reading for account in served.ingress.admission.limiter.every())
    served.ingress.admission.check_integrity()


async def test_the_loop_goes_on_while_a_long_body_is_read(
    serving: Serve, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of it waits for another request to be answered, which the same event loop has to do."""
    served = await serving()
    loop = asyncio.get_running_loop()
    steps: list[str] = []

    def waits(what: str, work: Any) -> Any:
        def waiting(*arguments: Any) -> Any:
            if len(arguments[0]) > 1000 or len(arguments) > 1:
                assert threading.current_thread() is not threading.main_thread(), what
                done = asyncio.run_coroutine_threadsafe(served.http.get("/livez"), loop)
                assert done.result(LIMIT_S).status_code == 200
                steps.append(what)
            return work(*arguments)

        return waiting

    monkeypatch.setattr(request_reader, "parse_body", waits("parse", request_reader.parse_body))
    monkeypatch.setattr(request_reader, "digest_of", waits("digest", request_reader.digest_of))
    monkeypatch.setattr(prompts, "check_vocabulary", waits("vocabulary", prompts.check_vocabulary))
    body = {"model": "demo", "prompt": LONG_IDS, "max_tokens": 2}
    refused = await served.http.post(COMPLETION, json=body, timeout=LIMIT_S)
    assert refused.status_code == 400
    assert "context" in refused.json()["error"]["message"]
    assert steps == ["parse", "digest"], "what cannot fit is not looked through"
    wrong = {**body, "prompt": [*LONG_IDS, 5_000_000], "context_overflow": "sliding"}
    refused = await served.http.post(COMPLETION, json=wrong, timeout=LIMIT_S)
    assert refused.json()["error"]["param"] == f"prompt[{len(LONG_IDS)}]"
    assert steps[2:] == ["parse", "digest", "vocabulary"]
