"""Tiers below the device: what goes down, what comes up, and that nothing but time is different for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from engine_rig import ROOT, expected_tokens, spec
from memory_remote import Faults
from tier_rig import SIZE, TieredRig

from kvfleet.worker.blocks.chain_location import names_of
from kvfleet.worker.network.lending import PeerStore
from kvfleet.worker.tiers.host import CopyJob
from kvproto.block_hash import ForkedRoot, chain
from kvproto.messages import Sampling, Tier
from tests.support.waiting import LIMIT_S

PROMPT = list(range(100, 141))  # ten blocks and a token
GREEDY = Sampling(4, temperature=0.0)
MakeRig = Callable[..., TieredRig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[TieredRig] = []

    def make(**fields: object) -> TieredRig:
        rigs.append(TieredRig(**fields))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


class TestHost:
    def test_what_was_evicted_from_the_device_comes_back(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        assert rig.run("a", PROMPT) == expected_tokens(PROMPT, GREEDY)
        rig.settle()
        rig.flush_device()
        assert rig.run("b", PROMPT) == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {"host": 40}

    def test_restored_bytes_are_those_stored(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.run("a", PROMPT)
        hashes = chain(ROOT, PROMPT, SIZE)
        before = [bytes(rig.runner.memory.view(block)) for block in rig.pool.chain_to(hashes)]
        rig.settle()
        rig.flush_device()
        rig.run("b", PROMPT)
        assert [bytes(rig.runner.memory.view(block)) for block in rig.pool.chain_to(hashes)] == before

    @pytest.mark.parametrize("number", range(4))
    def test_a_start_that_waited_for_a_core_does_not_end_restores(
        self, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """One copy of those that are measured at the start takes longer than computing would."""
        run, numbers = CopyJob.run, itertools.count()
        monkeypatch.setattr(CopyJob, "run", lambda job: run(job) + (next(numbers) // 2 == number))
        self.test_what_was_evicted_from_the_device_comes_back(make_rig)

    def test_a_wrong_byte_below_is_not_without_effect(self, make_rig: MakeRig) -> None:
        """The control: the comparison of tokens above can fail."""
        rig = make_rig()
        rig.run("a", PROMPT)
        rig.settle()
        rig.flush_device()
        slot = rig.host.pool.chain_to(chain(ROOT, PROMPT, SIZE))[5]
        rig.host.view(slot)[-1] ^= 1
        assert rig.run("b", PROMPT) != expected_tokens(PROMPT, GREEDY)

    def test_generated_blocks_go_down_too(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        turn = [*PROMPT, *rig.run("a", PROMPT, 20)]
        rig.settle()
        rig.flush_device()
        assert rig.run("b", [*turn, 7, 7]) == expected_tokens([*turn, 7, 7], GREEDY)
        assert rig.cached("b") == {"host": 60}

    def test_a_part_on_the_device_and_the_rest_below(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.run("a", PROMPT)
        rig.settle()
        rig.pool.release(rig.pool.allocate(rig.pool.available - 6))  # leaves went first
        rig.run("b", PROMPT)
        cached = rig.cached("b")
        assert cached["device"] > 0
        assert cached["host"] > 0
        assert sum(cached.values()) == 40

    def test_a_host_too_small_keeps_beginnings(self, make_rig: MakeRig) -> None:
        rig = make_rig(host=6)
        rig.run("a", PROMPT)
        rig.settle()
        rig.flush_device()
        assert rig.run("b", PROMPT) == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {"host": 24}

    def test_those_who_come_meanwhile_wait_for_the_same_blocks(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True, host=0, faults=Faults(stall=1.0), prefill_tokens_per_s=200.0, clock=lambda: 0.0)
        assert rig.remote is not None
        other = make_rig(remote=True)
        other.run("a", PROMPT)
        other.settle()
        assert other.remote is not None
        rig.run("first", list(range(40)))  # so that the speed of computing is known
        rig.remote.kept = other.remote.kept
        for name in "bcd":
            rig.add(name, PROMPT)
        rig.until(lambda: len(rig.transcript.ends) == 4)
        assert rig.remote.fetched == 10
        assert {sum(rig.cached(name).values()) for name in "bcd"} == {40}
        assert all(rig.transcript.tokens[name, 0] == expected_tokens(PROMPT, GREEDY) for name in "bcd")


class TestReuse:
    def test_without_reuse_nothing_goes_down(self, make_rig: MakeRig) -> None:
        rig = make_rig(choosy=True, remote=True)
        for at in range(30):
            rig.run(f"r{at}", [at, *PROMPT])
        rig.settle()
        assert rig.remote is not None
        assert rig.host.pool.index.addressed == 0
        assert rig.remote.kept[Tier.VAULT] == {}

    def test_what_was_asked_for_again_goes_down_though_the_device_had_lost_it(self, make_rig: MakeRig) -> None:
        rig = make_rig(choosy=True)
        for turn in range(2):
            for session in range(8):
                rig.run(f"s{session}t{turn}", [session, *PROMPT])
                rig.flush_device()
        assert rig.tiers.reuse.share(ROOT) > 0.3
        assert rig.host.pool.index.addressed > 0


class TestVault:
    def stored(self, rig: TieredRig) -> None:
        rig.run("a", PROMPT)
        rig.settle()
        rig.flush_device()
        rig.flush_host()

    def test_blocks_come_from_the_vault(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.stored(rig)
        assert rig.run("b", PROMPT) == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {"vault": 40}

    def test_what_is_lost_there_is_computed(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.stored(rig)
        assert rig.remote is not None
        kept = rig.remote.kept[Tier.VAULT]
        names = names_of(ROOT, chain(ROOT, PROMPT, SIZE), PROMPT, SIZE)
        rig.add("b", PROMPT)
        time.sleep(0.05)  # it was found
        del kept[names[6].hash]
        rig.until(lambda: ("b", 0) in rig.transcript.ends)
        assert rig.transcript.tokens["b", 0] == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {"vault": 24}
        assert rig.tiers.loads()["vault"].failures_total["missing"] == 1

    def test_a_look_that_is_never_answered_is_not_waited_for(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True, faults=Faults(unready=1.0))
        began = time.monotonic()
        rig.run("a", PROMPT)
        assert time.monotonic() - began < 2
        assert rig.cached("a") == {}

    def test_a_restore_that_stands_still_is_given_up(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.stored(rig)
        assert rig.remote is not None
        gate = threading.Event()
        kept = rig.remote.kept[Tier.VAULT]

        class Stuck(dict):  # type: ignore[type-arg]
            def get(self, key: object, default: object = None) -> object:
                if threading.current_thread() is not threading.main_thread() and len(looked) > 12:
                    gate.wait(2 * LIMIT_S)
                looked.append(key)
                return super().get(key, default)

        looked: list[object] = []
        rig.remote.kept[Tier.VAULT] = Stuck(kept)
        try:
            assert rig.run("b", PROMPT) == expected_tokens(PROMPT, GREEDY)
            assert not gate.is_set()
            assert rig.tiers.loads()["vault"].failures_total["late"] == 1
        finally:
            gate.set()

    def test_others_run_while_one_is_restored(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True, faults=Faults(stall=1.0), prefill_tokens_per_s=20.0)
        self.stored(rig)
        rig.add("b", PROMPT)
        rig.add("c", [1, 2, 3], 8)
        rig.until(lambda: ("c", 0) in rig.transcript.ends)
        assert ("b", 0) not in rig.transcript.ends
        rig.until(lambda: ("b", 0) in rig.transcript.ends)
        assert rig.cached("b") == {"vault": 40}

    def test_a_slow_vault_is_not_asked(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.stored(rig)
        assert rig.remote is not None
        rig.remote.bytes_per_s = 100.0
        rig.run("b", PROMPT)
        assert rig.cached("b") == {}
        assert rig.remote.fetched == 0

    def test_a_cancelled_request_leaves_nothing_behind(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True, faults=Faults(stall=1.0), prefill_tokens_per_s=200.0)
        self.stored(rig)
        rig.add("b", PROMPT)
        rig.until(lambda: rig.tiers.restorer.held() != [])
        rig.engine.cancel("b", 0)
        rig.until(lambda: ("b", 0) in rig.transcript.ends and not rig.tiers.restorer.held())
        assert rig.pool.used == 0

    def test_a_paused_request_goes_on_with_what_came(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True, faults=Faults(stall=1.0), prefill_tokens_per_s=200.0)
        self.stored(rig)
        rig.add("b", PROMPT)
        rig.until(lambda: rig.tiers.restorer.held() != [])
        rig.engine.pause("b", 0)
        rig.until(lambda: not rig.tiers.restorer.held())
        rig.engine.resume("b", 0)
        rig.until(lambda: ("b", 0) in rig.transcript.ends)
        assert rig.transcript.tokens["b", 0] == expected_tokens(PROMPT, GREEDY)

    def test_peers_are_asked_where_placement_named_one(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.stored(rig)
        assert rig.remote is not None
        rig.remote.kept[Tier.PEER], rig.remote.kept[Tier.VAULT] = rig.remote.kept[Tier.VAULT], {}
        rig.run("b", PROMPT)
        assert rig.cached("b") == {}
        rig.settle()
        rig.flush_device()
        rig.flush_host()
        rig.remote.kept[Tier.VAULT].clear()
        rig.run("c", PROMPT, peer="w2")
        assert rig.cached("c") == {"peer": 40}


class TestExact:
    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> TieredRig:
        """The vault has all of the prompt, from the third block on quantised."""
        rig = make_rig(remote=True)
        rig.run("a", PROMPT)
        rig.settle()
        rig.flush_device()
        rig.flush_host()
        assert rig.remote is not None
        kept = rig.remote.kept[Tier.VAULT]
        for block_hash in chain(ROOT, PROMPT, SIZE)[2:]:
            name, payload, _ = kept[block_hash]
            kept[block_hash] = name, payload, True
        return rig

    def test_lossy_blocks_are_not_fetched(self, rig: TieredRig) -> None:
        rig.run("b", PROMPT, exact=True)
        assert rig.cached("b") == {"vault": 8}

    def test_nor_found_on_device_or_host(self, rig: TieredRig) -> None:
        rig.run("b", PROMPT)
        assert rig.cached("b") == {"vault": 40}
        rig.settle()
        rig.run("c", PROMPT, exact=True)
        assert rig.cached("c") == {"device": 8}
        rig.flush_device()
        rig.run("d", PROMPT, exact=True)
        assert sum(rig.cached("d").values()) == 8

    def test_what_is_computed_on_them_is_lossy(self, rig: TieredRig) -> None:
        turn = [*PROMPT, *rig.run("b", PROMPT, 20), 5]
        rig.run("c", turn, exact=True)
        assert sum(rig.cached("c").values()) == 8
        rig.run("d", turn)
        assert sum(rig.cached("d").values()) > 40

    def test_what_an_exact_request_computes_is_not_mixed_with_them(self, rig: TieredRig) -> None:
        rig.run("b", PROMPT)
        turn = [*PROMPT, *rig.run("c", PROMPT, 20, exact=True), 5]
        assert all(rig.pool.is_lossy(block_hash) for block_hash in chain(ROOT, PROMPT, SIZE)[2:])
        rig.run("d", turn, exact=True)
        assert sum(rig.cached("d").values()) == 8


class TestPreemption:
    def test_a_preempted_sequence_finds_its_blocks_on_the_host(self, make_rig: MakeRig) -> None:
        rig = make_rig(blocks=14, choosy=True)
        prompts = {name: [ord(name), *range(200, 220)] for name in "ab"}
        for name, prompt in prompts.items():
            rig.add(name, prompt, 20)
        rig.until(lambda: len(rig.transcript.ends) == 2)
        assert rig.engine.scheduler.preemptions > 0
        assert rig.tiers.restorer.tokens_total[Tier.HOST] > 0
        for name, prompt in prompts.items():
            assert rig.transcript.tokens[name, 0] == expected_tokens(prompt, Sampling(20, temperature=0.0))


class TestRaces:
    def test_a_restore_does_not_overwrite_what_a_step_still_has_to_copy(self, make_rig: MakeRig) -> None:
        """A sequence begins on a copy of another block's beginning; in the same step that block, the oldest one, is
        taken for a restore."""
        rig = make_rig(blocks=12)
        rig.run("old", [900, 901, 902, 903, 904, 905], 1)
        rig.run("a", PROMPT[:25], 1)
        rig.settle()
        rig.flush_device()
        rig.run("old2", [900, 901, 902, 903, 904, 905], 1)
        rig.settle()
        copy = rig.runner.copy_blocks

        def slowly(copies: object) -> None:
            time.sleep(0.02)
            copy(copies)  # type: ignore[arg-type]

        rig.runner.copy_blocks = slowly  # type: ignore[method-assign]
        prompts = {"x": [900, 901, 902, 903, 904, 905, 7], "y": PROMPT[:25]}
        for name, prompt in prompts.items():
            rig.add(name, prompt, 3)
        rig.until(lambda: all((name, 0) in rig.transcript.ends for name in prompts))
        for name, prompt in prompts.items():
            assert rig.transcript.tokens[name, 0] == expected_tokens(prompt, Sampling(3, temperature=0.0))

    def test_what_a_restore_reads_is_held_from_the_moment_it_is_decided(self, make_rig: MakeRig) -> None:
        """Between that and its start the host may need room, for a sequence that is preempted in the same step."""
        rig = make_rig()
        rig.run("a", PROMPT)
        rig.settle()
        rig.flush_device()
        start = rig.tiers.copied

        def crowded() -> None:
            rig.flush_host()
            start()

        rig.tiers.copied = crowded  # type: ignore[method-assign]
        assert rig.run("b", PROMPT) == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {"host": 40}

    def test_the_shared_beginning_of_a_fork_goes_before_what_continues_it(self, make_rig: MakeRig) -> None:
        """Its last block counts as an end: nothing in the index says that a tenant's own part continues it."""
        rig = make_rig(host=10)
        roots = [ForkedRoot(b"public root 16 b", bytes([at]) * 16, 3) for at in range(4)]
        for at in range(12):
            prompt = [*PROMPT[:12], *range(10 * at, 10 * at + 20)]
            assert rig.run(f"r{at}", prompt, root=roots[at % 4]) == expected_tokens(prompt, GREEDY)
            rig.settle()
            if at % 3 == 2:
                rig.flush_device()
            again = rig.run(f"again{at}", prompt, root=roots[at % 4])
            assert again == expected_tokens(prompt, GREEDY)

    def test_a_vault_that_lost_everything_is_given_it_again(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        rig.run("a", PROMPT)
        rig.settle()
        assert rig.remote is not None
        assert len(rig.remote.kept[Tier.VAULT]) >= 10
        rig.remote.kept[Tier.VAULT].clear()
        rig.run("b", [*PROMPT, *range(20)])  # long enough for the vault's answer to be there
        rig.settle()
        assert set(chain(ROOT, PROMPT, SIZE)) <= set(rig.remote.kept[Tier.VAULT])

    def test_leases_leave_nothing_behind(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.run("a", PROMPT)
        rig.settle()
        store = PeerStore(rig.tiers, lambda work: work(rig.engine))
        hashes = chain(ROOT, PROMPT, SIZE)
        for _ in range(5):
            store.has(ROOT, hashes, False)
            store.get(ROOT, [b"x" * 16], False).release()
            store.get(ROOT, hashes, False).release()
        assert not rig.tiers.lent
        assert rig.pool.used == 0

    def test_on_the_host_nothing_exact_follows_what_is_lossy(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        turn = [*PROMPT, *rig.run("a", PROMPT, 20)]
        rig.settle()
        rig.flush_device()
        rig.flush_host()
        assert rig.remote is not None
        kept = rig.remote.kept[Tier.VAULT]
        for block_hash in chain(ROOT, turn, SIZE)[:4]:
            name, payload, _ = kept[block_hash]
            kept[block_hash] = name, payload, True
        rig.run("b", PROMPT[:17])
        rig.settle()
        rig.flush_device()
        kept.clear()
        rig.run("c", turn, exact=True)
        rig.settle()
        pool = rig.host.pool
        flags = [pool.index[block].lossy for block in pool.chain_to(chain(ROOT, turn, SIZE))]
        assert flags == sorted(flags)
        assert rig.host.depth(chain(ROOT, turn, SIZE), 0, 10, exact=True) == flags.count(False)


class TestErase:
    def test_a_sequence_is_forgotten_in_every_tier(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        turn = [*PROMPT, *rig.run("a", PROMPT)]
        rig.settle()
        assert rig.remote is not None
        assert rig.engine.kv.erase(ROOT, turn) > 0
        assert rig.pool.index.addressed == rig.host.pool.index.addressed == len(rig.remote.kept[Tier.VAULT]) == 0
        rig.run("b", PROMPT)
        assert rig.cached("b") == {}

    def test_what_another_continues_stays(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        turn = [*PROMPT, *rig.run("a", PROMPT)]
        rig.run("b", [*PROMPT[:20], *range(300, 320)])
        rig.settle()
        rig.engine.kv.erase(ROOT, turn)
        rig.flush_device()
        rig.run("c", PROMPT)
        assert rig.cached("c") == {"host": 20}
        rig.engine.check_integrity()

    def test_what_runs_stays(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.add("a", PROMPT, 12)
        rig.turn()
        rig.engine.kv.erase(ROOT, PROMPT)
        rig.until(lambda: ("a", 0) in rig.transcript.ends)
        assert rig.transcript.tokens["a", 0] == expected_tokens(PROMPT, Sampling(12, temperature=0.0))


class TestEvents:
    def test_who_follows_them_knows_the_host_tier(self, make_rig: MakeRig) -> None:
        rig = make_rig(host=15)
        for at in range(6):
            rig.run(f"r{at}", [at, *PROMPT])
        rig.settle()
        held: set[bytes] = set()
        for result in rig.results:
            for change in (one for one in result.changes if one.tier is Tier.HOST):
                hashes = {block_hash for run in change.runs for block_hash in run.hashes}
                assert hashes <= held if change.removed else not hashes & held
                held = held - hashes if change.removed else held | hashes
        assert held == set(rig.host.pool.index.hashes()) == set(rig.engine.kv.holdings()[Tier.HOST])


class TestLending:
    def store(self, rig: TieredRig) -> PeerStore:
        return PeerStore(rig.tiers, lambda work: work(rig.engine))

    @pytest.mark.parametrize("on_host", [False, True])
    def test_blocks_are_lent_and_held(self, make_rig: MakeRig, on_host: bool) -> None:
        rig = make_rig()
        rig.run("a", PROMPT)
        rig.settle()
        if on_host:
            rig.flush_device()
        hashes = chain(ROOT, PROMPT, SIZE)
        store = self.store(rig)
        assert store.has(ROOT, [*hashes, b"x" * 16], False) == [True] * 10 + [False]
        lent = store.get(ROOT, hashes[3:7], False)
        names = names_of(ROOT, hashes, PROMPT, SIZE)
        assert [(one.root, one.hash, one.parent, one.ids) for one, _ in filter(None, lent.blocks)] == [
            name[:4] for name in names[3:7]
        ]
        rig.engine.check_integrity()
        rig.flush_device()
        rig.flush_host()
        assert store.has(ROOT, hashes[:7], False) == [True] * 7
        lent.release()
        rig.flush_device()
        rig.flush_host()
        assert not any(store.has(ROOT, hashes, False))
        rig.engine.check_integrity()

    def test_under_another_root_nothing_is_there(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.run("a", PROMPT)
        hashes = chain(ROOT, PROMPT, SIZE)
        assert not any(self.store(rig).has(b"another root 16b", hashes, False))

    def test_a_forked_chain_is_lent_under_its_two_roots(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        root = ForkedRoot(b"public root 16 b", ROOT, 3)
        asked = replace(spec("f", PROMPT, 4), root=root)
        rig.engine.add(asked)
        rig.until(lambda: ("f", 0) in rig.transcript.ends)
        hashes = chain(root, PROMPT, SIZE)
        store = self.store(rig)
        assert store.has(root.public, hashes, False) == [True] * 3 + [False] * 7
        assert store.has(root.own, hashes, False) == [False] * 3 + [True] * 7

    def test_an_engine_that_does_not_answer_has_nothing(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.run("a", PROMPT)
        rig.settle()
        late: list[Callable[[object], None]] = []
        store = PeerStore(rig.tiers, late.append)
        assert store.get(ROOT, chain(ROOT, PROMPT, SIZE), False).blocks == [None] * 10
        late[0](rig.engine)
        assert rig.pool.used == 0


class TestVerification:
    def restored(self, rig: TieredRig, *, spoilt: int | None) -> None:
        """The prompt's blocks come from the vault, one of them not as it was computed."""
        rig.tiers.restorer.sampled = 1
        rig.run("a", PROMPT)
        rig.settle()
        rig.flush_device()
        rig.flush_host()
        assert rig.remote is not None
        if spoilt is not None:
            kept = rig.remote.kept[Tier.VAULT]
            name, payload, lossy = kept[chain(ROOT, PROMPT, SIZE)[spoilt]]
            kept[name.hash] = name, payload[:-1] + bytes([payload[-1] ^ 1]), lossy
        rig.run("b", PROMPT)
        assert rig.cached("b") == {"vault": 40}

    def test_what_is_right_stays(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.restored(rig, spoilt=None)
        assert rig.engine.verify()
        assert not rig.engine.verify()
        rig.run("c", PROMPT)
        assert rig.cached("c") == {"device": 40}
        assert rig.remote is not None
        assert rig.remote.distrusted == []
        assert "wrong" not in rig.tiers.loads()["vault"].failures_total

    def test_what_is_wrong_goes_and_so_does_its_source(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.restored(rig, spoilt=9)
        assert rig.transcript.tokens["b", 0] != expected_tokens(PROMPT, GREEDY), "nothing else would find it out"
        rig.settle()
        assert rig.engine.verify()
        rig.engine.check_integrity()
        assert rig.remote is not None
        assert rig.remote.distrusted == ["vault1"]
        assert rig.tiers.loads()["vault"].failures_total["wrong"] == 1
        hashes = chain(ROOT, PROMPT, SIZE)
        rig.until(lambda: not any(pool.index.lists(hashes[0]) for pool, _ in rig.tiers.readable()))
        assert rig.run("c", PROMPT) == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("c") == {}

    def test_what_is_wrong_goes_also_while_it_is_lent(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        self.restored(rig, spoilt=9)
        hashes = chain(ROOT, PROMPT, SIZE)
        lent = PeerStore(rig.tiers, lambda work: work(rig.engine)).get(ROOT, hashes, False)
        assert rig.engine.verify()  # and while blocks are on their way down
        rig.engine.check_integrity()
        assert rig.run("c", PROMPT) == expected_tokens(PROMPT, GREEDY)
        lent.release()
        rig.settle()
        rig.engine.check_integrity()
        assert rig.remote is not None
        right = {block_hash: bytes(rig.runner.memory.view(block)) for block_hash, block in self.listed(rig, hashes)}
        kept = rig.remote.kept[Tier.VAULT]
        assert all(kept[block_hash][1] == right[block_hash] for block_hash in hashes if block_hash in kept)
        assert rig.pool.used == 0

    def listed(self, rig: TieredRig, hashes: list[bytes]) -> list[tuple[bytes, int]]:
        return list(zip(hashes, rig.pool.chain_to(hashes), strict=False))

    def test_what_other_tenants_computed_on_the_public_blocks_of_a_wrong_restore_goes_too(
        self, make_rig: MakeRig
    ) -> None:
        rig = make_rig(remote=True)
        rig.tiers.restorer.sampled = 1
        one, other = (ForkedRoot(b"public root 16 b", own, 3) for own in (ROOT, b"another root 16b"))
        rig.run("a", PROMPT, root=one)
        rig.settle()
        rig.flush_device()
        rig.flush_host()
        assert rig.remote is not None
        kept = rig.remote.kept[Tier.VAULT]
        name, payload, lossy = kept[chain(one, PROMPT, SIZE)[9]]
        kept[name.hash] = name, payload[:-1] + bytes([payload[-1] ^ 1]), lossy
        rig.run("b", PROMPT, root=one)
        turn = [*PROMPT[:12], *range(20)]
        rig.run("c", turn, root=other)
        assert rig.cached("c") == {"device": 12}
        rig.settle()
        computed = chain(other, turn, SIZE)[3:]
        assert all(block_hash in kept for block_hash in computed)
        assert rig.engine.verify()
        rig.engine.check_integrity()
        for pool, _ in rig.tiers.readable():
            assert not any(map(pool.index.lists, computed))
        assert not any(block_hash in kept for block_hash in computed)

    def test_what_continues_it_goes_too(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        rig.tiers.restorer.sampled = 1
        self.restored(rig, spoilt=9)
        turn = [*PROMPT, *rig.transcript.tokens["b", 0], *range(30)]
        rig.run("c", turn)
        rig.settle()
        assert rig.engine.verify()
        assert rig.remote is not None
        hashes = chain(ROOT, turn, SIZE)
        for pool, _ in rig.tiers.readable():
            assert pool.chain_to(hashes) == []
        assert not any(block_hash in rig.remote.kept[Tier.VAULT] for block_hash in hashes)

    def test_one_in_so_many_is_looked_at(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.tiers.restorer.sampled = 3
        rig.run("a", PROMPT)
        for turn in range(6):
            rig.settle()
            rig.flush_device()
            rig.run(f"r{turn}", PROMPT)
        assert len(rig.tiers.restorer.samples) == 2


class TestPreload:
    def test_a_chain_is_brought_before_anybody_asks(self, make_rig: MakeRig) -> None:
        other, rig = make_rig(remote=True), make_rig(remote=True)
        other.run("a", PROMPT)
        other.settle()
        assert other.remote is not None
        assert rig.remote is not None
        rig.remote.kept[Tier.VAULT] = other.remote.kept[Tier.VAULT]
        hashes = chain(ROOT, PROMPT, SIZE)
        assert rig.tiers.restorer.preload(ROOT, hashes, Tier.VAULT, "", 5.0) == 10
        rig.until(lambda: not rig.tiers.restorer.brings(hashes))
        assert rig.tiers.restorer.preload(ROOT, hashes, Tier.VAULT, "", 5.0) == 0
        rig.remote.kept[Tier.VAULT] = {}
        assert rig.run("b", PROMPT) == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {"device": 40}

    def test_what_does_not_come_is_given_up(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        assert rig.tiers.restorer.preload(ROOT, chain(ROOT, PROMPT, SIZE), Tier.VAULT, "", 5.0) == 10
        rig.until(lambda: not rig.tiers.restorer.brings(chain(ROOT, PROMPT, SIZE)))
        assert rig.pool.used == 0
        assert rig.pool.index.addressed == 0


class TestTenants:
    OWN = b"other tenant's r"

    def test_equal_prompts_of_two_tenants_share_nothing(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=True)
        rig.run("a", PROMPT)
        rig.settle()
        rig.run("b", PROMPT, root=self.OWN)
        assert rig.cached("b") == {}
        rig.settle()
        rig.flush_device()
        rig.run("c", PROMPT, root=self.OWN)
        assert rig.cached("c") == {"host": 40}
        rig.settle()
        rig.flush_device()
        rig.flush_host()
        rig.run("d", PROMPT, root=b"a third one 16 b")
        assert rig.cached("d") == {}

    @pytest.mark.parametrize("tier", ["device", "host", "vault"])
    def test_of_a_public_prefix_exactly_its_blocks(self, make_rig: MakeRig, tier: str) -> None:
        # However busy the machine is, no restore is late or slower than computing.
        rig = make_rig(remote=True, prefill_tokens_per_s=100.0, clock=lambda: 0.0)
        rig.run("a", PROMPT, root=ForkedRoot(b"public root 16 b", ROOT, 3))
        rig.settle()
        if tier != "device":
            rig.flush_device()
        if tier == "vault":
            rig.flush_host()
        tokens = rig.run("b", PROMPT, root=ForkedRoot(b"public root 16 b", self.OWN, 3))
        assert tokens == expected_tokens(PROMPT, GREEDY)
        assert rig.cached("b") == {tier: 12}
