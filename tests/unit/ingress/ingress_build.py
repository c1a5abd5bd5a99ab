"""What the ingress's unit tests build: the demo model's tokenizer, and a KV bucket in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import orjson

import kvfleet.worker
from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.prompts.tokenizer import ModelTokenizer
from kvproto.buckets import Entry, StaleRevision
from kvproto.errors import Unavailable
from kvproto.messages import Bundle

DEMO = Path(kvfleet.worker.__path__[0]) / "model" / "demo_model"


def sent(answer: object) -> Any:
    """As the caller reads it."""
    return orjson.loads(orjson.dumps(answer))


@cache
def demo_bundle(**changes: Any) -> Bundle:
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    return Bundle(
        model="demo",
        tokenizer_json=(DEMO / "tokenizer.json").read_text(),
        chat_template=(DEMO / "chat_template.jinja").read_text(),
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        stop_ids=(2, 1),
        context_length=4096,
        vocab_size=1024,
    )


@cache
def demo_tokenizer() -> ModelTokenizer:
    return ModelTokenizer(demo_bundle())


def demo_model() -> ServedModel:
    return ServedModel("demo", "hash", demo_bundle(), demo_tokenizer())


class MemoryBucket:
    """`kvproto.buckets.Bucket` in memory: revisions as JetStream counts them, absent keys keep theirs."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes | None, int]] = {}
        self.sequence = 0
        self.away = False
        self.watchers: list[asyncio.Queue[Entry | None]] = []

    async def get(self, key: str) -> Entry:
        await self._there()
        value, revision = self.values.get(key, (None, 0))
        return Entry(key, value, revision)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        await self._there()
        return self._write(key, value, revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        await self._there()
        self._write(key, None, revision)

    def keys(self) -> set[str]:
        return {key for key, (value, _) in self.values.items() if value is not None}

    async def watch(self, pattern: str = ">") -> MemoryWatch:
        await self._there()
        assert pattern == "*.*"
        queue: asyncio.Queue[Entry | None] = asyncio.Queue()
        for key, (value, revision) in self.values.items():
            if value is not None and key.count(".") == 1:
                queue.put_nowait(Entry(key, value, revision))
        queue.put_nowait(None)
        self.watchers.append(queue)
        return MemoryWatch(queue)

    async def _there(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("JetStream is away")

    def _write(self, key: str, value: bytes | None, revision: int | None) -> int:
        if revision is not None and self.values.get(key, (None, 0))[1] != revision:
            raise StaleRevision(f"{key} is no longer at revision {revision}")
        self.sequence += 1
        self.values[key] = (value, self.sequence)
        if key.count(".") == 1:
            for queue in self.watchers:
                queue.put_nowait(Entry(key, value, self.sequence))
        return self.sequence


class MemoryWatch:
    def __init__(self, queue: asyncio.Queue[Entry | None]) -> None:
        self._queue = queue

    async def entries(self) -> AsyncIterator[Entry | None]:
        while True:
            yield await self._queue.get()

    async def stop(self) -> None:
        pass
