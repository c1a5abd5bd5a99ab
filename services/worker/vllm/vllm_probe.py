"""Loop: requests of a worker's own, by which it sees what a vLLM server is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvfleet.worker.vllm.foreign_blocks import salt_of_root
from kvfleet.worker.vllm.server_facts import Unsuitable
from kvfleet.worker.vllm.token_routes import Answered, TokenRoutes
from kvfleet_vllm import wire
from kvproto.block_hash import HASH_BYTES
from kvproto.errors import EngineFailure, InvalidRequest, ModelNotFound

PROBE_S = 60.0  # the first request of a server may compile
FIRST = -1000  # before all requests
STARTING = (502, 503, 504)  # what a proxy answers for a server that is not there yet


@dataclass(eq=False, slots=True)
class VllmProbe:
    """`socket` is where vLLM's connector finds the worker, `model` vLLM's name of it, once `served`."""

    routes: TokenRoutes
    socket: str
    model: str = ""

    async def served(self) -> dict[str, str]:
        """Finds the model's name. Returns the paths of adapters by theirs. Raises Unsuitable for a server that is no
        vLLM, EngineFailure where nothing listens."""
        try:
            orjson.loads(await self.routes.get("/version"))["version"]
            listed = orjson.loads(await self.routes.get("/v1/models"))["data"]
            served = [str(one["id"]) for one in listed if not one.get("parent")]
            adapters = {str(one["id"]): str(one["root"]) for one in listed if one.get("parent")}
        except Answered as error:
            if error.status in STARTING:
                raise
            raise Unsuitable(f"the server at {self.routes.url} is no vLLM: {error}") from None
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise Unsuitable(f"the server at {self.routes.url} is no vLLM, or a broken one: {told}") from None
        if not served:
            raise Unsuitable(f"vLLM at {self.routes.url} serves no model")
        self.model = served[0]
        return adapters

    async def ask(self, ids: Sequence[int], root: bytes) -> None:
        """Raises EngineFailure; Unsuitable for a server that cannot be asked so."""
        try:
            await self._put(self._body(ids, root))
        except (InvalidRequest, ModelNotFound) as error:
            raise Unsuitable(f"vLLM at {self.routes.url} does not take a request: {error}") from None

    async def draws_as_ours(self) -> bool:
        """Whether the sampler refuses what no sampler of ours takes."""
        body = self._body([1], os.urandom(HASH_BYTES))
        body["sampling_params"]["extra_args"] = {wire.KEY: {"version": -wire.VERSION}}
        try:
            await self._put(body)
        except InvalidRequest as error:
            return f"this is {wire.VERSION}" in str(error)
        return False

    def _body(self, ids: Sequence[int], root: bytes) -> dict[str, Any]:
        return {
            "model": self.model,
            "token_ids": list(ids),
            "stream": True,
            # vLLM compiles for the first log probability, in one step of up to 20 s: before the worker takes requests.
            "sampling_params": {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 0},
            "cache_salt": salt_of_root(root),
            "priority": FIRST,
            "kv_transfer_params": {wire.KEY: {"version": wire.VERSION, "socket": self.socket}},
        }

    async def _put(self, body: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                async for _ in self.routes.generate(body):
                    pass
        except TimeoutError:
            raise EngineFailure(f"a request of one token took longer than {PROBE_S:.0f} s") from None
        except (Answered, ModelNotFound) as error:  # before 0.32 there is no such route: 404
            if isinstance(error, ModelNotFound) or error.status == 403:
                raise Unsuitable(f"vLLM at {self.routes.url} was started without: --enable-scale-out") from None
            raise
