"""Which blocks of vLLM's are saved, in the step that completes them, and into which slots. Pure; imports nothing of
vLLM.

A request's saved blocks are a chain without a gap: where the granted slots do not suffice, or vLLM has let go of one
before, it ends for good. Of a model with states, that at the end of the last block is saved with each step that ends
there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfleet_vllm.block_moves import SaveBlocks, SaveState
from kvfleet_vllm.cache_groups import NONE, CacheGroups


@dataclass(slots=True)
class _Chain:
    name: str
    request: Any  # vLLM's, whose tokens grow in number
    next: int  # block


class SavePlan:
    def __init__(self, groups: CacheGroups) -> None:
        self._groups = groups
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

    def step(
        self, computed: Iterable[tuple[str, int]], tables_of: Callable[[str], Sequence[Sequence[int]]]
    ) -> list[SaveBlocks]:
        """`computed` tells how many tokens of a request are computed when the step ends, or its drafts of tokens.
        After a preemption they are fewer than before, and what was saved is not saved again."""
        saves: list[SaveBlocks] = []
        for request, tokens in computed:
            chain = self._chains.get(request)
            if chain is None:
                continue
            whole = min(tokens, chain.request.num_tokens) // self._groups.tokens
            if whole > chain.next:
                end = min(whole, chain.next + len(self._granted))
                blocks = self._groups.blocks(tables_of(request), chain.next, end)
                if blocks and NONE not in blocks:
                    saves.append(self._save(chain, blocks))
                if whole > chain.next:
                    del self._chains[request]
                    continue
            if self._groups.states and tokens == whole * self._groups.tokens:
                saves += self._state(chain, whole, self._groups.state(tables_of(request), whole))
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
        slots = self._take(len(blocks) // len(self._groups.attention))
        at, chain.next = chain.next, chain.next + len(slots)
        return SaveBlocks(chain.name, at, blocks, slots)

    def _state(self, chain: _Chain, end: int, blocks: tuple[int, ...]) -> list[SaveBlocks]:
        count = self._groups.state_slots
        if count > len(self._granted) or NONE in blocks[: len(self._groups.states)]:
            return []
        return [SaveState(chain.name, end, blocks, self._take(count))]

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(self._granted.popleft() for _ in range(count))
