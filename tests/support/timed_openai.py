"""A server of OpenAI's form whose every time is known: what is asked for is chosen by the model's name.

| model | its answers |
| --- | --- |
| timed | `max_tokens` tokens; the n-th request's first after `FIRST_S[n % 5]`, then one every `STEP_S` |
| bundled | the same, four tokens in an event |
| silent-usage | the same without usage |
| strict | the same; a request with `ignore_eos` is refused with 400 |
| busy | 429 |
| cut | the connection ends after two tokens |
| failing | an error event after two tokens |
| hanging | nothing |
| garbled | an event that is no JSON |
| empty | an end without text |
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

FIRST_S = (0.2, 0.3, 0.4, 0.5, 0.6)  # an odd number of them: their median is one of them
STEP_S = 0.02
BUNDLE = 4
CACHED, PROMPT = 30, 120
MODELS = (
    "timed", "bundled", "silent-usage", "strict", "busy", "cut", "failing", "hanging", "garbled", "empty",
)  # fmt: skip


class TimedOpenAI:
    """Serves from a thread. `asked`: the bodies of all requests, in order; `most_at_once`: of streams."""

    def __init__(self, first_s: tuple[float, ...] = FIRST_S) -> None:
        self.asked: list[dict[str, Any]] = []
        self.streams = self.most_at_once = 0
        self._first_s = first_s
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> TimedOpenAI:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def bodies(self, model: str) -> list[dict[str, Any]]:
        """Without those of a probe, which ask for one token."""
        return [body for body in self.asked if body["model"] == model and body["max_tokens"] > 1]

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    told = json.dumps({"data": [{"id": name} for name in MODELS]}).encode()
                    writer.write(_whole("200 OK", told))
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                body = json.loads(await reader.readexactly(length))
                body.setdefault("max_tokens", body.get("max_completion_tokens", 16))
                number = len(self.bodies(body["model"]))
                self.asked.append(body)
                self.streams += 1
                self.most_at_once = max(self.most_at_once, self.streams)
                try:
                    await self._answer(body, b"chat" in head.split(b"\r\n", 1)[0], number, writer)
                finally:
                    self.streams -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], chat: bool, number: int, writer: asyncio.StreamWriter) -> None:
        model, tokens = body["model"], body["max_tokens"]
        is_probe = tokens == 1
        if model == "busy" and not is_probe:
            writer.write(_whole("429 Too Many Requests", b'{"error": {"message": "slow down"}}'))
            return
        if model == "strict" and "ignore_eos" in body:
            writer.write(_whole("400 Bad Request", b'{"error": {"message": "unknown field ignore_eos"}}'))
            return
        if model == "hanging" and not is_probe:
            await asyncio.sleep(3600)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        began = self._loop.time()
        first_s = 0.0 if is_probe else self._first_s[number % len(self._first_s)]
        step = BUNDLE if model == "bundled" else 1
        if model == "empty" and not is_probe:
            tokens = 0
        for at in range(0, tokens, step):
            await asyncio.sleep(began + first_s + (at + step - 1 if at else 0) * STEP_S - self._loop.time())
            if writer.is_closing() or (at == 2 and model == "cut"):  # the client's doing, or ours
                raise ConnectionError
            if at == 2 and model == "failing":
                writer.write(_chunk({"error": {"message": "out of memory"}}))
                break
            if at == 2 and model == "garbled":
                writer.write(_frame(b"data: {half\n\n"))
            if chat and at == 0:
                writer.write(_chunk(_choice({"role": "assistant", "content": ""}, chat)))
            writer.write(_chunk(_choice({"content": " word" * min(step, tokens - at)}, chat)))
        else:
            writer.write(_chunk(_choice({}, chat, "length")))
        if model != "silent-usage":
            prompt = len(json.dumps(body.get("messages") or body["prompt"]).split()) if is_probe else PROMPT
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            cached = {"prompt_tokens_details": {"cached_tokens": CACHED}}
            writer.write(_chunk({**_choice({}, chat), "choices": [], "usage": usage | cached}))
        writer.write(_frame(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _choice(delta: dict[str, Any], chat: bool, finish: str | None = None) -> dict[str, Any]:
    said = {"delta": delta} if chat else {"text": delta.get("content", "")}
    kind = "chat.completion.chunk" if chat else "text_completion"
    choice = {"index": 0, **said, "finish_reason": finish}
    return {"id": "x", "object": kind, "created": 0, "model": "timed", "choices": [choice]}


def _chunk(event: dict[str, Any]) -> bytes:
    return _frame(b"data: " + json.dumps(event).encode() + b"\n\n")


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _whole(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
