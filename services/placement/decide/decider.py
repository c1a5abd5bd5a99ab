"""One decision: who should do this? Pure.

Knows the fleet, the bookings, the index and the policies; leaves the load of what it decided booked, and the decision
in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvfleet.placement.decide.admission import RecentRefusals, TurnedAway, limit_of
from kvfleet.placement.decide.state import PlacementState
from kvfleet.placement.index.prefix_index import Depths, Hashes
from kvfleet.placement.policies import DIRECT, Choice, Policy, Question
from kvfleet.placement.record.ledger import LedgerEntry, consider
from kvfleet.placement.workers.bookings import BOOKING_LIMIT_S, WORD_S
from kvfleet.placement.workers.fleet import Ready, Space, Worker
from kvfleet.placement.workers.heat import Heat, SharedPrefix
from kvfleet.placement.workers.price_kernel import (
    DEVICE,
    FETCH,
    HOST,
    PEER,
    PREFILL,
    QUEUE,
    RESTORED,
    SLOT,
    VAULT,
    fill,
)
from kvfleet.placement.workers.prompts import NO_HASHES, PromptHasher
from kvfleet.placement.workers.workloads import PRICED_TIERS, Floats
from kvproto.errors import InvalidRequest, ModelNotFound, NoWorkers
from kvproto.hash_ring import ring_key
from kvproto.messages import Booked, Placement, PlaceRequest, Refused, Tier

LONGEST_S = 1e9  # that an answer can say
SHARED_BLOCKS = 512  # of a prompt, of which other replicas hear that they are being computed


@dataclass(slots=True)
class Matched:
    """Prompt tokens that each candidate could have, `[4, candidates]`, in the tier or a faster one."""

    indexed: Floats  # by the index
    believed: Floats  # of them, what experience with the worker lets one expect
    hashes: Hashes  # of the first candidate's address space
    block_size: int
    depth: int  # blocks from the start that anybody has
    spaces: list[tuple[Space, Depths]]  # who was asked, and their blocks `[3, asked]`


class Decider:
    """Owned by the core. `default` names the policy of requests that name none; raises InvalidRequest if it is unknown.
    `unix_ms` tells the time that people read."""

    def __init__(
        self,
        state: PlacementState,
        prompts: PromptHasher,
        unix_ms: Callable[[], int],
        policies: Mapping[str, Policy],
        default: str,
    ) -> None:
        self.default = default
        self.decisions_total = 0
        self.no_worker_total = 0
        self.sourced_total = 0  # decisions that name a worker to pull from
        self._placement = state.placement
        self._fleet = state.fleet
        self._workloads = state.fleet.workloads
        self._bookings = state.bookings
        self._indexer = state.indexer
        self._inflight = state.inflight
        self._ledger = state.ledger
        self._region_summaries = state.region_summaries
        self._prompts = prompts
        self._unix_ms = unix_ms
        self._policies = policies
        self.heat = Heat()
        self.turned_away = TurnedAway()
        self.next_to_go: Callable[[str], str | None] = lambda model: None  # who of a model gets nothing new
        self._booked: list[Booked] = []
        self._refused = RecentRefusals()
        self._policy(default)

    def take_booked(self) -> tuple[Booked, ...]:
        """What was booked since this was last called."""
        booked, self._booked = tuple(self._booked), []
        return booked

    def take_refused(self) -> tuple[Refused, ...]:
        """What was refused since this was last called, though somebody with time could serve it."""
        return self._refused.take()

    def decide(self, tenant: str, ask: PlaceRequest, now: float) -> Placement:
        """Choose and book. Raises InvalidRequest, NotFound, ModelNotFound, or NoWorkers or Overloaded (retryable)."""
        policy = self._policy(ask.policy or self.default)
        if not self._fleet.is_known(ask.model):
            raise ModelNotFound(f"no worker of this fleet has served {ask.model[:64]!r}", field="model")
        ready = self._fleet.ready(ask.model)
        excluded = _effective(ask.excluded, ready)
        tokens = self._prompts.tokens(ask)
        if not ready.workers:
            self._refused.note(tenant, ask, tokens, now)
        if ask.max_wait_s is not None and not ask.attempt and policy.name != DIRECT:
            excluded |= self._too_busy(tenant, ask, ask.max_wait_s, ready.without(excluded), tokens, now)
        among = ready.without(excluded)
        matched = self._match(tenant, ask, among, tokens)
        next_to_go = self.next_to_go(ask.model)
        if next_to_go is not None and policy.name != DIRECT and _is_new_to(next_to_go, among, matched):
            excluded |= {next_to_go}
            among = ready.without(excluded)
            matched = self._match(tenant, ask, among, tokens)
        loads = self._workloads.view(among.columns, now, priority=ask.priority)
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
            heat=self.heat.of(last_block, now) if last_block is not None else 0.0,
            hashes=matched.hashes,
            depth=matched.depth,
        )
        choice = policy.choose(question)
        if choice is None:
            self.no_worker_total += 1
            raise NoWorkers(f"no worker that serves {ask.model[:64]} is ready", field="model")
        if last_block is not None and self.heat.add(last_block, now):
            space = among.spaces[0].address
            chain = matched.hashes[: matched.depth].copy()
            prefix = SharedPrefix(ask.model, space, self._prompts.root(space, tenant, ask), chain)
            self.heat.keep(last_block, prefix, now)
        return self._settle(tenant, policy.name, choice, question, matched, now)

    def least_wait_s(self, ask: PlaceRequest, now: float) -> float | None:
        """How long the request would wait for a start in this region, at best; None: nobody is ready."""
        among = self._fleet.ready(ask.model)
        among = among.without(_effective(ask.excluded, among))
        if not among.workers:
            return None
        return float(self._workloads.view(among.columns, now, priority=ask.priority).waits().min())

    def note_referred(self, tenant: str, ask: PlaceRequest, now: float) -> None:
        """Another region has it: at home it is demand that nobody could serve soon."""
        self._refused.note(tenant, ask, self._prompts.tokens(ask), now)

    def holder(self, tenant: str, ask: PlaceRequest) -> tuple[str, int, Hashes]:
        """Who holds most of the prompt on device and host, and how many tokens: "" for nobody; and its hashes."""
        best, tokens, hashes = "", 0, NO_HASHES
        for space in self._fleet.ready(ask.model).spaces:
            chain = self._prompts.hashes(space.address, tenant, ask)
            if not len(chain):
                continue
            hashes = chain if not len(hashes) else hashes
            held = self._indexer.depths(chain, space.names)[HOST] * self._workloads.credits_of(space.columns)
            held[space.groups < 0] = 0.0
            number = int(held.argmax())
            if (found := int(held[number]) * space.address.block_size) > tokens:
                best, tokens = space.names[number], found
        if not len(hashes) and (last := self._fleet.last_space(ask.model)) is not None:
            hashes = self._prompts.hashes(last, tenant, ask)  # nobody is ready: what continues it may find it there
        return best, tokens, hashes

    def _too_busy(
        self, tenant: str, ask: PlaceRequest, max_wait_s: float, among: Ready, tokens: int, now: float
    ) -> frozenset[str]:
        """Where it would wait for too long. Raises Overloaded if that is everywhere; what goes on elsewhere was let in
        before, and is not refused now."""
        limit_s = limit_of(max_wait_s, ask.priority)
        loads = self._workloads.view(among.columns, now, priority=ask.priority)
        waits = loads.waits()
        late = waits > limit_s
        if len(waits) and late.all():
            turn_s = loads.turn_s(tokens)
            self._refused.note(tenant, ask, tokens, now)
            raise self.turned_away.refuse(ask.model, ask.priority, float(waits.min()), limit_s, turn_s, now)
        return frozenset(among.workers[number].id for number in late.nonzero()[0].tolist())

    def _settle(
        self, tenant: str, policy: str, choice: Choice, question: Question, matched: Matched, now: float
    ) -> Placement:
        """Book, note and answer."""
        ask = question.ask
        worker = self._fleet.workers[choice.worker]
        number = _number(question.candidates, worker)
        hit: dict[str, int] = {}
        ttft_s, source, source_tokens = None, "", 0
        if number is not None:
            priced = choice.prices
            if priced is None:
                priced = question.loads.price(question.matched, question.prompt_tokens)
            prices = priced[:, number].tolist()
            hit = _hit(question.matched[DEVICE, number], prices[RESTORED:])
            if question.prompt_tokens and worker.rates.prefill_tokens_per_s:  # else nothing was measured there
                ttft_s = min(prices[QUEUE] + prices[SLOT] + prices[FETCH] + prices[PREFILL], LONGEST_S)
            if Tier.PEER.value in hit or self._could_try_a_peer(worker, question.matched[:, number].tolist()):
                source, source_tokens = self._source(worker, matched)
                self.sourced_total += 1
        placement = Placement(
            request=ask.request,
            worker=worker.id,
            attempt=ask.attempt,
            expected_hit=hit,
            expected_ttft_s=ttft_s,
            policy=policy,
            why=choice.why,
            placement=self._placement,
            source=source,
            source_tokens=source_tokens,
            elsewhere=self._region_summaries.elsewhere(
                matched.hashes, matched.block_size, sum(hit.values()), worker.rates.prefill_tokens_per_s
            ),
        )
        feed = question.prompt_tokens - sum(hit.values())
        hashes, block_size = matched.hashes, matched.block_size
        if not question.candidates or worker.space != question.candidates[0].space:
            hashes, block_size = self._prompts.hashes(worker.space, tenant, ask), worker.space.block_size
        key = tenant, ask.request
        silent_s = BOOKING_LIMIT_S if ask.deadline_ms is None else min(ask.deadline_ms / 1000 + WORD_S, BOOKING_LIMIT_S)
        for over in self._bookings.book(
            key, ask.attempt, worker.id, worker.column, feed, now, priority=ask.priority, silent_s=silent_s
        ):
            self._inflight.break_off(over)
        silent_ms = None if ask.deadline_ms is None else round(silent_s * 1000)
        first = hashes[:SHARED_BLOCKS].tobytes()
        self._booked.append(Booked(tenant, ask.request, ask.attempt, worker.id, feed, ask.priority, silent_ms, first))
        self._inflight.make(key, worker.id, hashes, now)
        self._ledger.note(
            LedgerEntry(
                tenant=tenant,
                model=ask.model,
                unix_ms=self._unix_ms(),
                placement=placement,
                prompt_tokens=question.prompt_tokens,
                considered=consider(question.candidates, number, choice, matched.believed),
                candidates_total=len(question.candidates),
                promised=0 if number is None else _own(matched.indexed[:, number].tolist(), hit),
                attainable=int(matched.indexed[-1].max(initial=0)),
                hashes=hashes.tobytes() if self._ledger.keeps_hashes else b"",
                block_size=block_size,
            )
        )
        self.decisions_total += 1
        return placement

    def _match(self, tenant: str, ask: PlaceRequest, among: Ready, tokens: int) -> Matched:
        count = len(among.workers)
        indexed, believed = np.zeros((len(PRICED_TIERS), count)), np.zeros((len(PRICED_TIERS), count))
        first, block_size = NO_HASHES, among.spaces[0].address.block_size if among.spaces else 1
        most = float(max(tokens - 1, 0))  # one token is always fed: what the first new one is drawn from
        asked = []
        for space in among.spaces:
            hashes = self._prompts.hashes(space.address, tenant, ask)
            if not len(hashes):
                continue
            if space is among.spaces[0]:
                first = hashes
            size = float(space.address.block_size)
            depths = self._indexer.depths(hashes, space.names)
            asked.append((space, depths))
            credit, pooled = self._workloads.credits_of(space.columns), self._indexer.index.pooled
            alone = len(among.spaces) == 1
            here = (
                (indexed, believed) if alone else (np.zeros((len(PRICED_TIERS), len(space.numbers))) for _ in range(2))
            )
            found, expected = here
            fill(depths, space.groups, credit, pooled, size, most, found, expected)
            coming = self._inflight.depths(hashes, space.names)
            if coming is not None:
                np.maximum(expected, np.minimum(coming[: len(space.numbers)] * size, most), out=expected)
            if not alone:
                indexed[:, space.numbers], believed[:, space.numbers] = found, expected
        depth = min(int(believed[-1].max(initial=0)) // block_size, len(first))
        return Matched(indexed, believed, first, block_size, depth, asked)

    @staticmethod
    def _could_try_a_peer(worker: Worker, matched: Sequence[float]) -> bool:
        """It has never pulled anything, so that nobody can say what that would cost: it may find out."""
        return matched[PEER] > matched[VAULT] and not worker.rates.restore_bytes_per_s.get(Tier.PEER.value)

    def _source(self, worker: Worker, matched: Matched) -> tuple[str, int]:
        """Whom to pull from: who holds most, as far as believed; of equals who has least to do. And what it has."""
        space, depths = next((space, depths) for space, depths in matched.spaces if worker.id in space.names)
        asker = space.names.index(worker.id)
        held = depths[HOST] * self._workloads.credits_of(space.columns)
        held[(space.groups != space.groups[asker]) | (space.columns == worker.column)] = -1.0
        requests = self._workloads.requests_of(space.columns)
        requests[held < held.max()] = np.inf
        giver = int(requests.argmin())
        return space.names[giver], int(depths[HOST, giver]) * space.address.block_size

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            raise InvalidRequest(f"{name[:64]!r} is none of {', '.join(self._policies)}", field="policy")
        return policy


def _hit(on_device: float, restored: Sequence[float]) -> dict[str, int]:
    """Tokens that will be had from each tier, as the price was reckoned."""
    found = zip(PRICED_TIERS, (on_device, *restored), strict=True)
    return {tier.value: int(tokens) for tier, tokens in found if tokens >= 1}


def _own(indexed: Sequence[float], hit: Mapping[str, int]) -> int:
    """Tokens that the worker's own tiers should bring: of the host if it was to restore any."""
    return int(indexed[HOST if Tier.HOST.value in hit else DEVICE])


def _number(candidates: Sequence[Worker], worker: Worker) -> int | None:
    """None for a worker that was named though it is no candidate."""
    return next((number for number, one in enumerate(candidates) if one is worker), None)


def _is_new_to(next_to_go: str, among: Ready, matched: Matched) -> bool:
    """Whether somebody else may as well have it: the worker that is about to go holds no more of it than others do."""
    number = next((number for number, worker in enumerate(among.workers) if worker.id == next_to_go), None)
    if number is None or len(among.workers) < 2:
        return False
    own = matched.believed[HOST]
    return bool(own[number] <= np.delete(own, number).max())


def _effective(excluded: tuple[str, ...], ready: Ready) -> frozenset[str]:
    """Whom to leave out: all of `excluded` if anybody remains; else its last one alone; else nobody."""
    for names in (frozenset(excluded), frozenset(excluded[-1:])):
        if any(worker.id not in names for worker in ready.workers):
            return names
    return frozenset()
