"""Answers a file of requests: each line of REQUESTS is one, each line of ANSWERS its answer, in the same order.

    python examples/batch.py requests.jsonl answers.jsonl --url http://127.0.0.1:8080 --concurrency 16

Lines are as in OpenAI's Batch API: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
Started again, it goes on after the last whole line of ANSWERS. Each request has an Idempotency-Key, so that what the
fleet has answered in the last ten minutes, but was not written yet, is not generated again. Needs the package openai.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import openai

AHEAD = 4  # times the concurrency: so many later lines may be answered while an earlier one is not


def whole_lines(path: Path) -> int:
    """How many answers are there. A last line that was cut off is removed."""
    count = size = 0
    with path.open("ab+") as file:
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                count, size = count + 1, size + len(line)
        file.truncate(size)
    return count


async def answer(client: openai.AsyncOpenAI, line: str, key: str) -> dict[str, Any]:
    """A request that is itself at fault gets an answer that says so. Raises openai.APIError for the fleet's faults."""
    try:
        asked = json.loads(line)
        options: Any = {"headers": {"Idempotency-Key": key}}
        body = await client.post(asked["url"], cast_to=object, body=asked["body"], options=options)
        status = 200
    except (ValueError, KeyError, TypeError) as error:
        return {"custom_id": None, "response": None, "error": {"code": "invalid_line", "message": repr(error)}}
    except openai.APIStatusError as error:
        if error.status_code == 429 or error.status_code >= 500:
            raise
        status, body = error.status_code, {"error": error.body}
    return {"custom_id": asked.get("custom_id"), "response": {"status_code": status, "body": body}, "error": None}


async def run(client: openai.AsyncOpenAI, requests: Path, answers: Path, concurrency: int) -> None:
    """Raises openai.APIError when the fleet still refuses or is away after all retries."""
    slots = asyncio.Semaphore(concurrency)

    async def in_turn(line: str, number: int) -> dict[str, Any]:
        key = hashlib.sha256(f"{answers} {number} {line}".encode()).hexdigest()
        async with slots:
            return await answer(client, line, key)

    done = whole_lines(answers)
    pending: deque[asyncio.Task[dict[str, Any]]] = deque()
    with requests.open(encoding="utf-8") as lines, answers.open("a", encoding="utf-8") as file:

        async def write_first() -> None:
            file.write(json.dumps(await pending.popleft(), ensure_ascii=False) + "\n")
            file.flush()

        for number, line in enumerate(lines):
            if number >= done:
                pending.append(asyncio.create_task(in_turn(line, number)))
            while len(pending) >= AHEAD * concurrency or (pending and pending[0].done()):
                await write_first()
        while pending:
            await write_first()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Answers each line of a JSONL file.")
    parser.add_argument("requests", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--concurrency", type=int, default=16)
    said = parser.parse_args()
    key = os.environ.get("KVFLEET_API_KEY", "none")
    async with openai.AsyncOpenAI(base_url=said.url, api_key=key, max_retries=8, timeout=600) as client:
        try:
            await run(client, said.requests, said.answers, said.concurrency)
        except openai.APIError as error:
            raise SystemExit(f"stopped, start again to go on: {error}") from None


if __name__ == "__main__":
    asyncio.run(main())
