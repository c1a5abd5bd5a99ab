"""Workers for prompts and workers for what comes after: which requests are prefilled at one and go on at another."""

from __future__ import annotations

from placement_build import a_generate, an_ask
from placement_rig import BLOCK_BYTES, RATE, Rig, tokens

from kvfleet.placement.decide.pairing import PLANNED_S, Pairing
from kvfleet.placement.events import CapsuleHeard, Forward
from kvproto.messages import Accepted, Capsule, State, WorkerRole

LONG = tokens(1, 4000)  # half a second of prefill
PEER = {"peer": 64 * BLOCK_BYTES}  # bytes/s: a block of a prompt takes 16 ms; all of LONG four seconds
QUICK = {"peer": 6400 * BLOCK_BYTES}


def a_pair(*, running: int = 20, restore: dict[str, float] = QUICK, **fields: object) -> Rig:
    """`d` decodes `running` sequences, `p` is idle."""
    rig = Rig()
    rig.join_tiered("p", restore=restore, role=WorkerRole.PREFILL, **fields)
    rig.join_tiered("d", restore=restore, role=WorkerRole.DECODE)
    rig.beat("d", running=running, tokens_per_s=1000.0)
    return rig


def test_a_long_prompt_is_prefilled_beside_what_decodes_and_goes_on_there() -> None:
    placed = a_pair().place("r1", LONG, max_tokens=100)
    assert (placed.worker, placed.then) == ("p", "d")
    assert "then d" in placed.why


def test_a_short_prompt_stays_where_it_decodes() -> None:
    placed = a_pair().place("r1", LONG[:20], max_tokens=100)
    assert (placed.worker, placed.then) == ("d", "")


def test_a_prompt_that_is_cached_where_it_decodes_stays_there() -> None:
    rig = a_pair()
    rig.store("d", LONG)
    placed = rig.place("r1", (*LONG, 7), max_tokens=100)
    assert (placed.worker, placed.then) == ("d", "")


def test_nothing_is_moved_to_spare_a_worker_that_decodes_nothing() -> None:
    placed = a_pair(running=0).place("r1", LONG, max_tokens=100)
    assert (placed.worker, placed.then) == ("d", "")


def test_a_slow_link_is_not_worth_it() -> None:
    assert a_pair(running=2, restore=PEER).place("r1", LONG, max_tokens=100).then == ""
    assert a_pair(running=2).place("r1", LONG, max_tokens=100).then == "d"


def test_a_queue_of_prompts_spills_over_to_those_that_decode() -> None:
    rig = a_pair()
    rig.beat("p", queued=int(RATE * 60), waiting=9)
    assert rig.place("r1", LONG, max_tokens=100).worker == "d"


def test_without_the_other_half_each_serves_all() -> None:
    rig = Rig()
    rig.join_tiered("p", restore=QUICK, role=WorkerRole.PREFILL)
    placed = rig.place("r1", LONG, max_tokens=100)
    assert (placed.worker, placed.then) == ("p", "")
    rig = a_pair()
    rig.beat("p", state=State.DRAINING)
    placed = rig.place("r2", LONG, max_tokens=100)
    assert (placed.worker, placed.then) == ("d", "")


def test_blocks_that_cannot_move_keep_a_request_whole() -> None:
    another_engine = {"kv_format": b"g" * 16, "block_size": 32}  # as vLLM's on a CPU, beside one of our own
    for fields in ({"kv_format": b"g" * 16}, another_engine):
        placed = a_pair(**fields).place("r1", LONG, max_tokens=100)
        assert (placed.worker, placed.then) == ("d", "")


def test_a_prefill_worker_whose_blocks_nobody_can_read_serves_all() -> None:
    placed = a_pair(data_plane=()).place("r1", LONG, max_tokens=100)
    assert (placed.worker, placed.then) == ("p", "")


def test_no_pair_is_made_with_a_worker_of_an_older_version() -> None:
    rig = Rig()
    rig.join_tiered("p", restore=QUICK, role=WorkerRole.PREFILL)
    rig.join_tiered("d", restore=QUICK, role=None)
    rig.beat("d", running=20, tokens_per_s=1000.0)
    placed = rig.place("r1", LONG, max_tokens=100)
    assert (placed.worker, placed.then) == ("d", "")


def test_policies_that_price_nothing_know_no_roles() -> None:
    rig = Rig(policy="round_robin")
    rig.join_tiered("p", restore=QUICK, role=WorkerRole.PREFILL)
    rig.join_tiered("d", restore=QUICK, role=WorkerRole.DECODE)
    placed = [rig.place(f"r{number}", LONG, max_tokens=100) for number in range(2)]
    assert [(one.worker, one.then) for one in placed] == [("d", ""), ("p", "")]


def test_a_prefix_in_demand_is_that_of_the_worker_that_prefills() -> None:
    rig = a_pair()
    rig.store("d", LONG[:160])
    rig.store("p", LONG[:800])
    for number in range(6):
        placed = rig.place(f"r{number}", (*LONG[:800], *tokens(number, 3200)), max_tokens=100)
        assert (placed.worker, placed.then) == ("p", "d")
    rig.core.check_integrity()


def test_one_token_is_a_prompts_alone() -> None:
    rig = a_pair()
    rig.beat("d", running=20, queued=4000, tokens_per_s=1000.0)
    placed = rig.place("r1", LONG, max_tokens=1)
    assert (placed.worker, placed.then) == ("p", "")


def test_what_was_handed_over_goes_to_whom_it_was_planned_for() -> None:
    rig = a_pair()
    rig.join_tiered("e", restore=QUICK, role=WorkerRole.DECODE)
    assert rig.place("r1", LONG, max_tokens=100, attempt=1, excluded=("p",), successor="d").worker == "d"
    placed = rig.place("r2", LONG, max_tokens=100, attempt=1, excluded=("p", "d"), successor="d")
    assert (placed.worker, placed.then) == ("e", "")


def test_prompts_that_come_together_go_on_at_several_workers() -> None:
    rig = a_pair()
    rig.join_tiered("e", restore=QUICK, role=WorkerRole.DECODE)
    rig.beat("e", running=20, tokens_per_s=1000.0)
    placed = [rig.place(f"r{number}", tokens(number, 4000), max_tokens=100) for number in range(6)]
    pairs = [one.then for one in placed if one.then]
    assert {one.worker for one in placed if one.then} == {"p"}
    assert abs(pairs.count("d") - pairs.count("e")) <= 1


def test_another_region_gets_whole_workers() -> None:
    rig = a_pair()
    placed = rig.core.decider.decide("public", an_ask("r9", prompt_ids=LONG, max_tokens=100), rig.now, pairs=False)
    assert (placed.worker, placed.then) == ("d", "")


def test_a_bare_producers_request_goes_the_same_way() -> None:
    rig = a_pair()
    asked = a_generate("r1", prompt=None, prompt_ids=LONG, max_tokens=100)
    first, ahead = [one for one in rig.core.handle(asked, rig.now) if isinstance(one, Forward)]
    assert (first.worker, first.request.then, first.request.ahead) == ("p", "d", False)
    assert (ahead.worker, ahead.request.ahead, ahead.request.source, ahead.reply) == ("d", True, "p", "")
    rig.core.forwarding.on_frame("r1", Accepted("r1", 0, "p", "e1"), rig.now)
    carried = Capsule("public", "p", first.request)
    offered = [one for one in rig.core.handle(CapsuleHeard("_INBOX.w", carried), rig.now) if isinstance(one, Forward)]
    assert [(one.worker, one.request.then, one.request.source) for one in offered] == [("d", "", "p")]
    assert offered[0].request.handed_over


def test_what_is_promised_is_counted_until_it_is_placed_again_or_too_old() -> None:
    pairing = Pairing()
    for at in range(6):
        pairing.note(("public", f"r{at}"), f"d{at % 2}", float(at))
    pairing.note(("public", "r5"), "d0", 5.0)
    assert pairing.promised == {"d0": 4, "d1": 2}
    pairing.settled(("public", "r0"))
    pairing.settled(("public", "unknown"))
    assert pairing.promised == {"d0": 3, "d1": 2}
    pairing.forget(3.5 + PLANNED_S)
    assert pairing.promised == {"d0": 2}
