"""What the engine asks of its vLLM server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from kvfleet.worker.vllm.foreign_blocks import ForeignHash
from kvfleet.worker.vllm.token_routes import NextTokens
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvproto.errors import KvfleetError
from kvproto.messages import TokenLogprobs


class VllmCalls(Protocol):
    """`sockets` are where vLLM finds the worker."""

    sockets: Sockets

    def generate(self, body: Mapping[str, Any], alternatives: int) -> AsyncGenerator[NextTokens, None]: ...

    async def score(self, body: Mapping[str, Any]) -> tuple[TokenLogprobs, ...]: ...

    async def abort(self, name: str) -> None:
        """Raises EngineFailure."""
        ...

    async def erase(self, hashes: Sequence[ForeignHash]) -> None:
        """Forget cached blocks. Raises EngineFailure."""
        ...

    def failure_of(self, name: str, index: int) -> KvfleetError | None:
        """Why the sampler could not draw the token of an index."""
        ...
