"""Which blocks vLLM's scheduler brings back, and into which of its own. Pure; imports nothing of vLLM.

    offered ──▶ loading ──▶ (loaded or failed)        a request loads once, or never
        └─────▶ given up                              its slots are free for others afterwards, so not again

Loads are asynchronous: the request waits outside vLLM's steps until each of its workers has read its part. One that
fails is computed instead, from its first bad block on, or as a whole. Of a model with states all that is offered is
loaded or nothing, as its state stands at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvfleet_vllm.block_moves import LoadBlocks
from kvfleet_vllm.cache_groups import NONE, CacheGroups


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    at: int
    slots: tuple[int, ...]
    state: tuple[int, ...]


class RestorePlan:
    """`own` tells of requests that restore how many tokens vLLM had itself."""

    def __init__(self, groups: CacheGroups) -> None:
        self.own: dict[str, int] = {}
        self._groups = groups
        self._tokens = groups.tokens
        self._offers: dict[str, _Offer] = {}
        self._loading: dict[str, frozenset[int]] = {}  # until vLLM says that it has ended
        self._loads: list[LoadBlocks] = []  # not told to the workers yet
        self._given_up: list[str] = []

    def offer(self, request: str, name: str, at: int, slots: tuple[int, ...], state: tuple[int, ...] = ()) -> None:
        """The request's blocks from number `at` on lie in `slots`, and the state behind them in `state`. `name` is the
        worker's."""
        self._offers[request] = _Offer(name, at, slots, state)

    def restorable(self, request: str, cached: int, tokens: int) -> int:
        """How many tokens can be brought, beyond the `cached` ones that vLLM has, of a request of `tokens` tokens. One
        at least is left to compute. vLLM may ask again until it has the blocks."""
        self.own.pop(request, None)
        offer = self._offers.get(request)
        if offer is None:
            return 0
        end = min(offer.at + len(offer.slots), (tokens - 1) // self._tokens)
        if not offer.at <= cached // self._tokens < end or cached % self._tokens:
            return 0
        if self._groups.states and (end < offer.at + len(offer.slots) or len(offer.state) != self._groups.state_slots):
            return 0
        self.own[request] = cached
        return end * self._tokens - cached

    def allocated(self, request: str, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM gave the request its blocks, the first of its tokens included, one table a group, and waits for `tokens`
        of them if that is not 0. Otherwise it does not need what was offered."""
        offer = self._offers.pop(request, None)
        if offer is None:
            return
        if not tokens:
            self.own.pop(request, None)
            self._given_up.append(offer.name)
            return
        had = self.own[request] // self._tokens
        end = had + tokens // self._tokens
        into, slots = self._groups.blocks(tables, had, end), offer.slots[had - offer.at : end - offer.at]
        if self._groups.states:
            into, slots = into + self._groups.state(tables, end), slots + offer.state
        self._loads.append(LoadBlocks(request, offer.name, into, slots))
        self._loading[request] = frozenset(into) - {NONE}

    def offers(self, request: str, block: int) -> bool:
        """Whether the request's block of this number can be had."""
        offer = self._offers.get(request)
        return offer is not None and 0 <= block - offer.at < len(offer.slots)

    def take(self, request: str, into: Mapping[int, int]) -> LoadBlocks | None:
        """Where vLLM's tiers load: the request's blocks of these numbers, each into the block that `into` names. None
        if they are not to be had."""
        if not into or not all(self.offers(request, number) for number in into):
            return None
        offer = self._offers.pop(request)
        slots = tuple(offer.slots[number - offer.at] for number in into)
        return LoadBlocks(request, offer.name, tuple(into.values()), slots)

    def ended(
        self, requests: Iterable[str], bad_blocks: Collection[int], bad_requests: Collection[str] = ()
    ) -> list[str]:
        """The loads of these ended in all workers; `bad_blocks` could not be loaded. Returns whose these are, and the
        `bad_requests`."""
        failed = [
            request
            for request, blocks in self._loading.items()
            if request in bad_requests or not blocks.isdisjoint(bad_blocks)
        ]
        for request in requests:
            self._loading.pop(request, None)
        return failed

    def finished(self, request: str) -> None:
        """vLLM finished it, or aborted it. What loads already ends nevertheless."""
        self.own.pop(request, None)
        self.give_up(request)

    def give_up(self, request: str) -> None:
        """It does not need what was offered, unless it loads that already."""
        offer = self._offers.pop(request, None)
        if offer is not None:
            self._given_up.append(offer.name)

    def forget(self) -> None:
        """The worker that offered is gone. Loads that are planned are still told, for vLLM waits for their end."""
        self._offers.clear()
        self._given_up.clear()

    def step(self) -> tuple[tuple[LoadBlocks, ...], tuple[str, ...]]:
        """What to load, and the worker's names of what was given up, since the last step."""
        planned = tuple(self._loads), tuple(self._given_up)
        self._loads.clear()
        self._given_up.clear()
        return planned
