"""The last decisions: who was considered at what cost, who was chosen, and what really happened. Pure.

attained    prompt tokens that were really found in a cache
attainable  what the best candidate had of the prompt when it was placed
lost        attainable but not attained, request by request
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvproto.messages import Actual, Candidate, Decision, Milestone, Passed, Placement, PlaceRequest
from services.placement.fleet import Worker
from services.placement.index.prefix_index import Hashes
from services.placement.policies import Choice
from services.placement.workloads import TIERS, Floats

KEPT = 4096
CANDIDATES_KEPT = 8

Key = tuple[str, str]  # tenant, request

NOTHING_YET, ACCEPTED = Actual(), Actual(accepted=True)


@dataclass(slots=True)
class Considered:
    """The best candidates in numbers, cheapest first; one array each, for no object more is made than must be."""

    workers: tuple[str, ...]
    names: tuple[str, ...]  # of the terms
    terms: Floats  # `[terms, workers]` seconds
    matched: Floats  # `[tiers, workers]` tokens

    def listed(self) -> tuple[Candidate, ...]:
        rows = (self.terms * 1000).round(3).T.tolist()
        sums = (self.terms.sum(axis=0) * 1000).round(3).tolist()
        return tuple(
            Candidate(
                worker,
                cost,
                dict(zip(self.names, row, strict=True)),
                {tier.value: int(depth) for tier, depth in zip(TIERS, held, strict=True) if depth},
            )
            for worker, cost, row, held in zip(self.workers, sums, rows, self.matched.T.tolist(), strict=True)
        )


@dataclass(slots=True)
class Entry:
    """One decision as it is kept: written out only when somebody asks. Thousands of them stay, so they are few objects:
    each one more is one more for every full garbage collection to visit, and decisions wait meanwhile."""

    tenant: str
    model: str
    unix_ms: int
    answer: Placement
    prompt_tokens: int
    indexed: dict[str, int]  # by tier, what the index said, believed or not
    attainable: int
    considered: Considered
    candidates_total: int
    hashes: bytes  # of the prompt's blocks, back to back; only where the ledger keeps them
    block_size: int
    actual: Actual = NOTHING_YET

    @property
    def decision(self) -> Decision:
        answer = self.answer
        return Decision(
            request=answer.request,
            attempt=answer.attempt,
            tenant=self.tenant,
            model=self.model,
            unix_ms=self.unix_ms,
            policy=answer.policy,
            worker=answer.worker,
            why=answer.why,
            prompt_tokens=self.prompt_tokens,
            expected_hit=answer.expected_hit,
            expected_ttft_s=answer.expected_ttft_s,
            candidates=self.considered.listed(),
            candidates_total=self.candidates_total,
            placement=answer.placement,
            actual=self.actual,
        )


@dataclass(slots=True)
class HitTokens:
    """Counters, in prompt tokens, of requests that started."""

    prompt_total: int = 0
    attained_total: int = 0
    attainable_total: int = 0
    lost_total: int = 0


class Ledger:
    """Owned by the core. `unix_ms` tells the time that people read; hashes are kept only for a ledger's file."""

    def __init__(self, unix_ms: Callable[[], int], *, kept: int = KEPT, keeps_hashes: bool = False) -> None:
        self.keeps_hashes = keeps_hashes
        self.hits = HitTokens()
        self._unix_ms = unix_ms
        self._kept = kept
        self._entries: OrderedDict[tuple[str, str, int], Entry] = OrderedDict()
        self._attempts: dict[Key, list[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def note(
        self,
        tenant: str,
        ask: PlaceRequest,
        placement: Placement,
        *,
        prompt_tokens: int,
        indexed: dict[str, int],
        attainable: int,
        candidates: Considered,
        candidates_total: int,
        hashes: Hashes,
        block_size: int,
    ) -> None:
        key = tenant, ask.request, ask.attempt
        if key not in self._entries:
            self._attempts.setdefault(key[:2], []).append(ask.attempt)
        self._entries.pop(key, None)
        self._entries[key] = Entry(
            tenant=tenant,
            model=ask.model,
            unix_ms=self._unix_ms(),
            answer=placement,
            prompt_tokens=prompt_tokens,
            indexed=indexed,
            attainable=attainable,
            considered=candidates,
            candidates_total=candidates_total,
            hashes=hashes.tobytes() if self.keeps_hashes else b"",
            block_size=block_size,
        )
        while len(self._entries) > self._kept:
            self._forget_oldest()

    def on_milestone(self, worker: str, milestone: Milestone) -> Entry | None:
        """What happened to a decision of this replica: its entry, else None."""
        entry = self._entries.get((milestone.tenant, milestone.request, milestone.attempt))
        if entry is None or entry.answer.worker != worker:
            return None
        before = entry.actual
        match milestone.passed:
            case Passed.ACCEPTED:
                entry.actual = ACCEPTED if before is NOTHING_YET else replace(before, accepted=True)
            case Passed.STARTED:
                entry.actual = replace(before, accepted=True, cached=milestone.cached, queue_s=milestone.seconds)
                if before.cached is None:
                    self._count(entry, milestone)
            case Passed.FIRST_TOKEN:
                entry.actual = replace(before, ttft_s=milestone.seconds)
            case Passed.ENDED:
                entry.actual = replace(before, ended=True, output_tokens=milestone.output_tokens, code=milestone.code)
        return entry

    def explain(self, request: str, tenant: str | None = None) -> tuple[Decision, ...]:
        """Decisions about a request, one per attempt, oldest first."""
        keys = [(tenant, request)] if tenant is not None else [key for key in self._attempts if key[1] == request]
        return tuple(self._entries[*key, attempt].decision for key in keys for attempt in self._attempts.get(key, ()))

    def _count(self, entry: Entry, started: Milestone) -> None:
        attained = sum(started.cached.values())
        hits = self.hits
        hits.prompt_total += started.prompt_tokens
        hits.attained_total += attained
        hits.attainable_total += max(entry.attainable, attained)
        hits.lost_total += max(entry.attainable - attained, 0)

    def _forget_oldest(self) -> None:
        (tenant, request, attempt), _ = self._entries.popitem(last=False)
        attempts = self._attempts[tenant, request]
        attempts.remove(attempt)
        if not attempts:
            del self._attempts[tenant, request]

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        listed = {(*key, attempt) for key, attempts in self._attempts.items() for attempt in attempts}
        assert listed == set(self._entries)
        assert len(self._entries) <= self._kept


def best_candidates(workers: Sequence[Worker], choice: Choice, matched: Floats) -> Considered:
    """The cheapest few, cheapest first, the chosen one among them."""
    names = tuple(choice.terms)
    terms = np.array([choice.terms[name] for name in names]) if names else np.zeros((0, len(workers)))
    order = terms.sum(axis=0).argsort(kind="stable")[:CANDIDATES_KEPT]
    listed = tuple([workers[number].id for number in order.tolist()])
    if listed and choice.worker not in listed:
        chosen = next((number for number, worker in enumerate(workers) if worker.id == choice.worker), None)
        if chosen is not None:
            order[-1] = chosen
            listed = *listed[:-1], choice.worker
    return Considered(listed, names, terms.take(order, axis=1), matched.take(order, axis=1))
