"""Which blocks of vLLM's are saved, in the step that completes them, and into which slots. Pure; imports nothing of
vLLM.

A request's saved blocks are a chain without a gap: where the granted slots do not suffice it ends for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfleet_vllm.block_moves import SaveBlocks


@dataclass(slots=True)
class _Chain:
    name: str
    request: Any  # vLLM's, whose tokens grow in number
    next: int  # block


class SavePlan:
    """A block has `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._chains: dict[str, _Chain] = {}
        self._granted: deque[int] = deque()

    def grant(self, slots: Iterable[int]) -> None:
        self._granted.extend(slots)

    def want(self, request: Any, name: str, save_from: int) -> None:
        """The worker's `name` for a request of vLLM's, whose blocks from `save_from` on are wanted."""
        self._chains[request.request_id] = _Chain(name, request, save_from)

    def stop(self, request: str) -> None:
        self._chains.pop(request, None)

    def forget(self) -> None:
        """The worker that granted the slots is gone."""
        self._chains.clear()
        self._granted.clear()

    def step(self, computed: Iterable[tuple[str, int]], blocks_of: Callable[[str], Sequence[int]]) -> list[SaveBlocks]:
        """`computed` tells how many tokens of a request are computed when the step ends, or its drafts of tokens.
        After a preemption they are fewer than before, and what was saved is not saved again."""
        saves: list[SaveBlocks] = []
        for request, tokens in computed:
            chain = self._chains.get(request)
            if chain is None:
                continue
            whole = min(tokens, chain.request.num_tokens) // self._tokens
            if whole > chain.next:
                end = min(whole, chain.next + len(self._granted))
                if end > chain.next:
                    saves.append(self._save(chain, tuple(blocks_of(request)[chain.next : end])))
                if end < whole:
                    del self._chains[request]
        return saves

    def follow(self, request: str, blocks: Mapping[int, int]) -> SaveBlocks | None:
        """Where vLLM's tiers save: those of a request's `blocks`, by number, that continue what is saved of it."""
        found: list[int] = []
        if (chain := self._chains.get(request)) is None:
            return None
        while len(found) < len(self._granted) and chain.next + len(found) in blocks:
            found.append(blocks[chain.next + len(found)])
        return self._save(chain, tuple(found)) if found else None

    def wants(self, request: str) -> bool:
        return request in self._chains

    def _save(self, chain: _Chain, blocks: tuple[int, ...]) -> SaveBlocks:
        slots = tuple(self._granted.popleft() for _ in blocks)
        at, chain.next = chain.next, chain.next + len(blocks)
        return SaveBlocks(chain.name, at, blocks, slots)
