"""One decision: who should do this? Pure.

Knows the fleet, the bookings, the index and the policies; leaves the load of what it decided booked, and the decision
in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvproto.affinity import ring_key
from kvproto.errors import InvalidRequest, ModelNotFound, NoWorkers
from kvproto.messages import Booked, Placement, PlaceRequest
from services.placement.bookings import Bookings
from services.placement.fleet import Fleet, Ready, Space, Worker
from services.placement.heat import Heat
from services.placement.index.changes import TIERS
from services.placement.index.kv_indexer import KvIndexer
from services.placement.index.prefix_index import Hashes
from services.placement.ledger import Entry, Ledger, by_tier, consider
from services.placement.policies import Choice, Policy, Question
from services.placement.price_kernel import FETCH, PREFILL, QUEUE, SLOT
from services.placement.promises import Promises
from services.placement.prompts import NO_HASHES, Prompts
from services.placement.workloads import Floats, View, Workloads

LONGEST_S = 1e9  # that an answer can say


@dataclass(slots=True)
class Matched:
    """Prompt tokens that each candidate has, `[tiers, candidates]`, in the tier or a faster one."""

    indexed: Floats  # by the index
    believed: Floats  # of them, what experience with the worker lets one expect
    hashes: Hashes  # of the first candidate's address space
    block_size: int
    depth: int  # blocks from the start that anybody has


class Decider:
    """Owned by the core."""

    def __init__(
        self,
        placement: str,
        fleet: Fleet,
        bookings: Bookings,
        indexer: KvIndexer,
        promises: Promises,
        prompts: Prompts,
        ledger: Ledger,
        unix_ms: Callable[[], int],
        policies: Mapping[str, Policy],
        default: str,
    ) -> None:
        self.default = default
        self.decisions_total = 0
        self.no_worker_total = 0
        self._placement = placement
        self._fleet = fleet
        self._bookings = bookings
        self._indexer = indexer
        self._promises = promises
        self._prompts = prompts
        self._ledger = ledger
        self._unix_ms = unix_ms
        self._policies = policies
        self._workloads: Workloads = fleet.workloads
        self._heat = Heat()
        self._booked: list[Booked] = []
        self._policy(default)

    def take_booked(self) -> tuple[Booked, ...]:
        """What was booked since this was last called."""
        booked, self._booked = tuple(self._booked), []
        return booked

    def decide(self, tenant: str, ask: PlaceRequest, now: float) -> Placement:
        """Choose and book. Raises InvalidRequest, NotFound, ModelNotFound, or NoWorkers (retryable)."""
        policy = self._policy(ask.policy or self.default)
        if not self._fleet.is_known(ask.model):
            raise ModelNotFound(f"no worker of this fleet has served {ask.model[:64]!r}", field="model")
        ready = self._fleet.ready(ask.model)
        excluded = _effective(ask.excluded, ready)
        among = Ready.of((w for w in ready.workers if w.id not in excluded), ready.ring) if excluded else ready
        tokens = self._prompts.tokens(ask)
        loads = self._workloads.view(among.columns, now)
        matched = self._match(tenant, ask, among, tokens, loads)
        last_block = matched.hashes[matched.depth - 1].tobytes() if matched.depth else None
        question = Question(
            key=ring_key(tenant, session=ask.session, prompt_ids=ask.prompt_ids, prompt=ask.prompt),
            ask=ask,
            ring=ready.ring,
            excluded=excluded,
            candidates=among.workers,
            alive=self._fleet.workers,
            loads=loads,
            prompt_tokens=tokens,
            matched=matched.believed,
            heat=self._heat.of(last_block, now) if last_block is not None else 0.0,
            hashes=matched.hashes,
            depth=matched.depth,
        )
        choice = policy.choose(question)
        if choice is None:
            self.no_worker_total += 1
            raise NoWorkers(f"no worker that serves {ask.model[:64]} is ready", field="model")
        if last_block is not None:
            self._heat.add(last_block, now)
        return self._settle(tenant, policy.name, choice, question, matched, now)

    def _settle(
        self, tenant: str, policy: str, choice: Choice, question: Question, matched: Matched, now: float
    ) -> Placement:
        """Book, note and answer."""
        ask = question.ask
        worker = self._fleet.workers[choice.worker]
        number = _number(question.candidates, worker)
        hit = {} if number is None else by_tier(matched.believed[:, number].tolist())
        placement = Placement(
            request=ask.request,
            worker=worker.id,
            attempt=ask.attempt,
            expected_hit=hit,
            expected_ttft_s=_expected_ttft_s(question, choice, worker, number),
            policy=policy,
            why=choice.why,
            placement=self._placement,
        )
        feed = question.prompt_tokens - sum(hit.values())
        hashes, block_size = matched.hashes, matched.block_size
        if not question.candidates or worker.space != question.candidates[0].space:
            hashes, block_size = self._prompts.hashes(worker.space, tenant, ask), worker.space.block_size
        self._bookings.book((tenant, ask.request), ask.attempt, worker.id, worker.column, feed, now)
        self._booked.append(Booked(tenant, ask.request, ask.attempt, worker.id, feed))
        self._promises.make((tenant, ask.request), worker.id, hashes, now)
        self._ledger.note(
            Entry(
                tenant=tenant,
                model=ask.model,
                unix_ms=self._unix_ms(),
                placement=placement,
                prompt_tokens=question.prompt_tokens,
                considered=consider(question.candidates, number, choice, matched.believed),
                candidates_total=len(question.candidates),
                indexed={} if number is None else by_tier(matched.indexed[:, number].tolist()),
                attainable=int(matched.indexed[-1].max(initial=0)),
                hashes=hashes.tobytes() if self._ledger.keeps_hashes else b"",
                block_size=block_size,
            )
        )
        self.decisions_total += 1
        return placement

    def _match(self, tenant: str, ask: PlaceRequest, among: Ready, tokens: int, loads: View) -> Matched:
        several = len(among.spaces) > 1
        indexed: Floats | None = None
        promised: Floats | None = None
        first, block_size = NO_HASHES, among.spaces[0].address.block_size if among.spaces else 1
        most = max(tokens - 1, 0)  # one token is always fed: its logits are what the first new one is drawn from
        for space in among.spaces:
            hashes = self._prompts.hashes(space.address, tenant, ask)
            if not len(hashes):
                continue
            if space is among.spaces[0]:
                first = hashes
            size = float(space.address.block_size)
            found = np.minimum(self._indexer.depths(hashes, space.names) * size, most)
            coming = self._promises.depths(hashes, space.names)
            soon = None if coming is None else np.minimum(coming * size, most)
            if several:
                indexed = _spread(indexed, len(TIERS), among, space, found)
                promised = promised if soon is None else _spread(promised, 1, among, space, soon)
            else:
                indexed, promised = found, soon
        if indexed is None:
            indexed = np.zeros((len(TIERS), len(among.workers)))
        believed = indexed * loads.credit
        if promised is not None:
            believed = np.maximum(believed, promised)
        depth = min(int(believed[-1].max(initial=0)) // block_size, len(first))
        return Matched(indexed, believed, first, block_size, depth)

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            raise InvalidRequest(f"{name[:64]!r} is none of {', '.join(self._policies)}", field="policy")
        return policy


def _spread(into: Floats | None, rows: int, among: Ready, space: Space, values: Floats) -> Floats:
    """What was found for the workers of one address space, among all of them."""
    into = np.zeros((rows, len(among.workers))) if into is None else into
    into[:, space.numbers] = values
    return into


def _expected_ttft_s(question: Question, choice: Choice, worker: Worker, number: int | None) -> float | None:
    """Seconds of queue, restoring and prefill; None if nothing was measured there, or nothing is known of it."""
    if number is None or not question.prompt_tokens or not worker.rates.prefill_tokens_per_s:
        return None
    priced = choice.prices
    if priced is None:
        priced = question.loads.price(question.matched, question.prompt_tokens)
    seconds = float(sum(priced[term, number] for term in (QUEUE, SLOT, FETCH, PREFILL)))
    return min(seconds, LONGEST_S)


def _number(candidates: Sequence[Worker], worker: Worker) -> int | None:
    """None for a worker that was named though it is no candidate."""
    return next((number for number, one in enumerate(candidates) if one is worker), None)


def _effective(excluded: tuple[str, ...], ready: Ready) -> frozenset[str]:
    """Whom to leave out: all of `excluded` if anybody remains; else its last one alone; else nobody."""
    for names in (frozenset(excluded), frozenset(excluded[-1:])):
        if any(worker.id not in names for worker in ready.workers):
            return names
    return frozenset()
