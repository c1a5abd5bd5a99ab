"""What a replica tells of its decisions: tokens tier by tier, tenant by tenant, and the sums of hits in its stats."""

from __future__ import annotations

from placement_build import FLEET_KEY, a_beat, a_core, a_record, an_ask

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Answer, PlaceAsked
from kvfleet.placement.index.changes import read_changes
from kvproto import codec
from kvproto.block_hash import TenantRoots, chain
from kvproto.messages import BlockRun, Decision, KvEvents, Milestone, Milestones, Passed, Tier, TierEvents

PROMPT = tuple(range(100))


def hashes(tenant: str, blocks: int) -> tuple[bytes, ...]:
    record = a_record("w1")
    roots = TenantRoots(record.model_revision, record.block_size, record.public_prefixes, FLEET_KEY)
    return tuple(chain(roots.of(tenant, PROMPT), PROMPT, record.block_size)[:blocks])


def store(core: PlacementCore, worker: str, seq: int, tier: Tier, of: tuple[bytes, ...]) -> None:
    events = KvEvents("e1", seq, (TierEvents(tier, False, (BlockRun(b"\0" * 16, of),)),))
    core.indexer.on_changes(worker, read_changes(codec.encode_events(events)), 1.0)


def a_core_that_knows() -> PlacementCore:
    """w1 has 2 blocks of the tenant acme on its device and 2 more in host memory; w2 has one block."""
    core = a_core("w1", "w2", policy="cost")
    for worker in ("w1", "w2"):
        core.handle(a_beat(worker, rate=1000.0), 0.5)
    store(core, "w1", 1, Tier.DEVICE, hashes("acme", 2))
    store(core, "w1", 2, Tier.HOST, hashes("acme", 4))
    store(core, "w2", 1, Tier.DEVICE, hashes("acme", 1))
    return core


def place(core: PlacementCore, request: str = "r1", **fields: object) -> str:
    (answer,) = core.handle(PlaceAsked("_ing.x", "acme", an_ask(request, prompt_ids=PROMPT, **fields)), 2.0)
    assert isinstance(answer, Answer)
    return answer.placement.worker


def explained(core: PlacementCore, request: str = "r1", tenant: str | None = None) -> tuple[Decision, ...]:
    return core.ledger.explain(request, tenant)


def pass_(core: PlacementCore, worker: str, passed: Passed, attempt: int = 0, **fields: object) -> None:
    item = Milestone("acme", "r1", attempt, passed, **fields)  # type: ignore[arg-type]
    core.handle(Milestones(worker, "e1", (item,)), 3.0)
    core.check_integrity()


def test_a_candidates_tokens_are_counted_in_their_fastest_tier() -> None:
    core = a_core_that_knows()
    assert place(core) == "w1"
    (decision,) = explained(core)
    matched = {one.worker: one.matched for one in decision.candidates}
    assert matched == {"w1": {"device": 32, "host": 32}, "w2": {"device": 16}}
    assert decision.expected_hit == {"device": 32}, "what a restore from the host costs there nobody has measured"


def test_only_the_tenants_own_is_told_unless_anybodys_is_asked_for() -> None:
    core = a_core_that_knows()
    place(core)
    assert explained(core, tenant="other") == explained(core, request="r2") == ()
    assert [one.tenant for one in explained(core)] == ["acme"]


def test_hits_are_summed_as_attained_attainable_and_lost() -> None:
    core = a_core_that_knows()
    assert core.stats().attainable_tokens_total == 0
    place(core, policy="direct", worker="w2")
    pass_(core, "w2", Passed.STARTED, prompt_tokens=100, cached={"device": 16})
    stats = core.stats()
    assert (stats.prompt_tokens_total, stats.attained_tokens_total) == (100, 16)
    assert (stats.attainable_tokens_total, stats.lost_tokens_total) == (64, 48)
    assert (stats.index_blocks, stats.workers_exact) == (4, 2)
