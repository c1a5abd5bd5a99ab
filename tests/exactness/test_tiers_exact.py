"""What comes from host, vault, disk or peer is what was stored, to the bit, and so are the logits computed after it.

The whole way is real: the engine's tiers, its links, the data plane over a Unix socket, the vault's store and disk.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ROOT, TOLERANCE, Rig, Turn, make_model

from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.store.pools import VaultPools
from kvfleet.vault.store.store import VaultStore
from kvfleet.worker.blocks.block_codec import BlockShape, warm_up
from kvfleet.worker.blocks.chain_location import ChainLocation, StateForm, names_of
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model import runner as runner_module
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.network.lending import PeerStore
from kvfleet.worker.port.outputs import SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.host_states import HostStates
from kvfleet.worker.tiers.offloader import Chain
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.tiers import Tiers
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.block_hash import chain, state_after
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer
from kvproto.messages import Sampling, Tier
from tests.support.id_detokenizer import IdDetokenizer
from tests.support.late_stream import LateStream
from tests.support.waiting import LIMIT_S, wait_until

SIZE = 16
CACHED = 5 * SIZE
MEMORY = 64 << 20
HISTORY = [(at * 37) % 211 for at in range(CACHED + 3)]
TURN = [*HISTORY[:CACHED], 5, 6, 7, 8, 9]  # another end: no partial block helps
Close = Callable[[], None]


class TieredRig(Rig):
    """Keeps everything that goes down, and finds out by itself what vaults and its peer have."""

    pools: VaultPools  # of its own vault

    def __init__(
        self, model: Any, remote: RemoteTiers, backend: AttentionBackend, *, host: int = 64, host_states: int = 12
    ) -> None:
        super().__init__(model, backend=backend, blocks=64)
        memory = self.runner.memory
        self.host = HostTier(memory.host_memory(host * memory.block_bytes), memory.block_bytes, SIZE)
        self.remote, self.peer = remote, ""
        states = self.host_states(host_states)
        self.tiers = Tiers(self.pool, memory, self.host, remote, states=states)
        self.tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
        self.engine = Engine(self.runner, self.pool, self.scheduler, IdDetokenizer(), tiers=self.tiers)
        self.started: dict[str, SequenceStarted] = {}

    def host_states(self, places: int) -> HostStates | None:
        if self.slots is None or (states := self.runner.state_memory) is None:
            return None
        return HostStates(self.slots, states, self.runner.memory.host_memory(places * states.block_bytes))

    def add(self, name: str, prompt: Any, max_tokens: int = 4, **sampling: Any) -> Turn:
        exact = bool(sampling.pop("exact", False))
        turn = self.turns[name] = Turn(list(prompt), Sampling(max_tokens, temperature=0.0, **sampling))
        self.logits[name] = {}
        names = names_of(ROOT, chain(ROOT, prompt, SIZE), prompt, SIZE)
        finding = self.remote.look(names, exact=exact, peer=self.peer, on_ready=lambda: None)
        location = ChainLocation(names, finding, self.peer)
        self.engine.add(SequenceSpec(name, 0, tuple(prompt), turn.sampling, ROOT, exact=exact, location=location))
        return turn

    def step(self) -> StepResult:
        result = super().step()
        self.started |= {output.request: output for output in result.outputs if isinstance(output, SequenceStarted)}
        return result

    def run(self) -> None:
        while self.engine.has_work or self.tiers.waiting:
            self.engine.maintain()
            if self.engine.has_work:
                self.step()
            time.sleep(0.0005)

    def turn(self, name: str, prompt: list[int], **how: Any) -> dict[str, int]:
        """One request; returns what was restored for it, by tier."""
        self.add(name, prompt, **how)
        self.run()
        return {tier.value: tokens for tier, tokens in self.started[name].restored.items()}

    def settle(self) -> None:
        while not self.tiers.is_settled:
            self.engine.maintain()
            time.sleep(0.0005)

    def until_known(self, tier: Tier) -> None:
        """How fast blocks come from there."""
        wait_until(lambda: self.remote.speed(tier) is not None)

    def flush(self, *, host: bool = True) -> None:
        self.settle()
        for pool in [self.pool, *([self.host.pool] if self.host and host else [])]:
            pool.release(pool.allocate(pool.available))
        if host and self.tiers.states is not None:
            self.tiers.states.forget([block_hash for block_hash, _ in self.tiers.states.items()])

    def blocks(self) -> list[bytes]:
        found = self.pool.chain_to(chain(ROOT, HISTORY, SIZE))
        read = [bytearray(self.runner.memory.block_bytes) for _ in found]
        for block, target in zip(found, read, strict=True):
            self.runner.memory.read(block, memoryview(target))
        return [bytes(one) for one in read]


@pytest.fixture
def closing() -> Iterator[list[Close]]:
    """Newest last."""
    closers: list[Close] = []
    yield closers
    for close in reversed(closers):
        close()


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing({"k": secrets.token_bytes(32)})


def serve(store: Any, name: str, ring: KeyRing, folder: Path, closing: list[Close]) -> SourceAddress:
    server = DataPlaneServer(store, ring, name, unix_path=folder / f"{name}.sock")
    server.start()
    closing.append(server.close)
    return SourceAddress(name, "e1", "here", server.addresses)


@pytest.fixture
def make_tiered(
    backend: AttentionBackend, ring: KeyRing, tmp_path: Path, closing: list[Close], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TieredRig]:
    warm_up()
    monkeypatch.setattr(break_even, "ANSWER_LIMIT_S", LIMIT_S)  # a busy machine may take longer than waiting is worth
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)

    def make(model: Any, *, codec: BlockCodec = BlockCodec.RAW, vaults: list[SourceAddress] | None = None) -> TieredRig:
        plain = Rig(model, backend=backend, blocks=4)
        kept = plain.runner.state_memory
        states = None if kept is None else StateForm(kept.kv_format, kept.block_bytes, 2)
        shape = BlockShape(*plain.runner.memory.rows)
        kv_format = plain.runner.memory.kv_format
        settings = RemoteSettings(
            f"w{len(closing)}", "here", kv_format, shape, codec, look_limit_s=LIMIT_S, states=states
        )
        remote = RemoteTiers(settings, ring)
        closing.append(remote.close)
        pools = VaultPools(VaultStore(MEMORY), VaultStore(MEMORY))
        closing.append(pools.check_integrity)
        remote.set_vaults([serve(pools, f"v{len(closing)}", ring, folder, closing)] if vaults is None else vaults)
        rig = TieredRig(model, remote, backend)
        rig.pools = pools
        closing.append(rig.tiers.close)
        rig.until_known(Tier.VAULT)
        return rig

    return make


def vault_with_disk(folder: Path, ring: KeyRing, name: str, closing: list[Close]) -> SourceAddress:
    """What the folder holds is there again; what memory holds is written when it closes."""
    disk = DiskStore(folder / "disk", MEMORY)
    headers = disk.open()
    thread = DiskThread(disk)
    store = VaultStore(MEMORY, thread, on_disk=headers)
    thread.start(store)
    closing.append(lambda: thread.close(5.0))
    return serve(store, name, ring, folder, closing)


def slow_to_compute(rig: TieredRig) -> None:
    """Tiny models compute faster than anything can be fetched: have them believe otherwise."""
    rig.scheduler.pacer.times.prompt_seconds = lambda position, tokens: tokens * 0.1  # type: ignore[method-assign]


@pytest.fixture(params=["a host's", "a GPU's"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory of models that are made from now on does; a GPU's with a stand-in for its stream."""
    if request.param == "a GPU's":
        monkeypatch.setattr(runner_module, "stream_of", lambda device: LateStream())


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("way", ["host", "vault", "disk"])
def test_bytes_and_logits_after_a_restore_are_those_of_a_device_hit(
    representative: Any, make_tiered: Callable[..., TieredRig], ring: KeyRing, tmp_path: Path, way: str
) -> None:
    rig = make_tiered(representative)
    slow_to_compute(rig)
    vault: list[Close] = []
    if way == "disk":
        rig.remote.set_vaults([vault_with_disk(tmp_path / "run", ring, "d1", vault)])
        rig.until_known(Tier.VAULT)
    rig.turn("first", HISTORY)
    rig.settle()
    if way == "disk":
        for close in (*reversed(vault), vault.clear):
            close()
        rig.remote.set_vaults([vault_with_disk(tmp_path / "run", ring, "d2", vault)])
        rig.until_known(Tier.VAULT)
    stored = rig.blocks()
    assert len(stored) == 5
    assert rig.turn("hit", TURN) == {}
    assert rig.started["hit"].cached_tokens == CACHED
    rig.flush(host=way != "host")
    assert rig.turn("restored", TURN) == {"host" if way == "host" else "vault": CACHED}
    assert rig.blocks() == stored
    hit, restored = rig.logits["hit"], rig.logits["restored"]
    assert set(hit) == set(restored) == set(range(CACHED, len(TURN) + 3))
    assert all(torch.equal(hit[at], restored[at]) for at in hit)
    assert max(rig.differences().values()) < TOLERANCE
    rig.check_greedy()
    for close in reversed(vault):
        close()


@pytest.mark.usefixtures("copies")
def test_a_peer_lends_what_it_computed(
    representative: Any,
    make_tiered: Callable[..., TieredRig],
    ring: KeyRing,
    tmp_path: Path,
    closing: list[Close],
) -> None:
    owner, other = make_tiered(representative), make_tiered(representative)
    slow_to_compute(other)
    owner.turn("first", HISTORY)
    owner.settle()
    store = PeerStore(owner.tiers, lambda work: work(owner.engine))  # its engine is at rest
    address = serve(store, "w-owner", ring, tmp_path / "run", closing)
    other.remote.set_peers([address])
    other.peer = "w-owner"
    other.until_known(Tier.PEER)
    assert other.turn("pulled", TURN) == {"peer": CACHED}
    assert other.blocks() == owner.blocks()
    assert max(other.differences().values()) < TOLERANCE
    other.check_greedy()


def test_int8_is_close_and_exact_requests_do_without(
    representative: Any, make_tiered: Callable[..., TieredRig]
) -> None:
    rig = make_tiered(representative, codec=BlockCodec.INT8)
    slow_to_compute(rig)
    rig.turn("first", HISTORY)
    rig.flush()
    assert rig.turn("restored", TURN) == {"vault": CACHED}
    assert rig.pool.is_lossy(chain(ROOT, HISTORY, SIZE)[0])
    assert rig.turn("exact", TURN, exact=True) == {}
    assert rig.started["exact"].cached_tokens == 0
    differences = rig.differences()
    assert differences["exact"] < TOLERANCE
    assert TOLERANCE < differences["restored"] < 1.0, "quantised, and still about the same"


def test_a_damaged_block_on_the_host_is_seen_in_the_logits(
    representative: Any, make_tiered: Callable[..., TieredRig]
) -> None:
    """The control: the comparison can fail."""
    rig = make_tiered(representative)
    slow_to_compute(rig)
    rig.turn("first", HISTORY)
    rig.flush(host=False)
    slot = rig.host.pool.chain_to(chain(ROOT, HISTORY, SIZE))[-1]
    view = rig.host.view(slot)
    view[: len(view) // 2] = bytes(len(view) // 2)
    assert rig.turn("restored", TURN) == {"host": CACHED}
    assert rig.differences()["restored"] > TOLERANCE


# ------------------------------------------------------------------ hybrid models: blocks, and the state behind them

STATES_AT = 4 * SIZE  # of TURN's prompt the deepest point where one is kept
HYBRID_TOLERANCE = 3e-3  # as in test_hybrid


@pytest.fixture(params=["granite_hybrid", "qwen3_next"])
def hybrid(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def check_hybrid(rig: TieredRig) -> None:
    assert max(rig.differences().values()) < HYBRID_TOLERANCE
    rig.check_greedy()
    rig.engine.check_integrity()


def test_a_hybrid_models_blocks_and_state_come_from_a_vault_to_another_worker(
    hybrid: Any, make_tiered: Callable[..., TieredRig]
) -> None:
    first = make_tiered(hybrid)
    first.turn("first", HISTORY)
    first.settle()
    assert len(first.pools.states.table.resident) == 2
    assert len(first.pools.blocks.table.resident) == 5
    other = make_tiered(hybrid, vaults=[one.address for one in first.remote._vaults.values()])
    slow_to_compute(other)
    assert other.turn("there", TURN) == {"vault": STATES_AT}
    assert other.started["there"].cached_tokens == STATES_AT
    assert other.blocks()[:4] == first.blocks()[:4]
    first.turn("here", TURN)
    here, there = first.logits["here"], other.logits["there"]
    assert all(torch.equal(here[at], there[at]) for at in range(STATES_AT, len(TURN)))
    check_hybrid(other)


def test_a_hybrid_models_state_of_a_vault_that_is_wrong_is_a_miss_and_counted(
    hybrid: Any, make_tiered: Callable[..., TieredRig]
) -> None:
    rig = make_tiered(hybrid)
    slow_to_compute(rig)
    rig.turn("first", HISTORY)
    rig.flush()
    deepest = state_after(chain(ROOT, HISTORY, SIZE)[3])
    entry = rig.pools.states.table.resident[deepest]
    entry.view[7] ^= 1
    assert rig.turn("again", TURN) == {"vault": STATES_AT // 2}
    assert rig.engine.load().tiers["state"].failures_total == {"checksum": 1}
    assert rig.engine.load().tiers["vault"].failures_total["checksum"] == 1
    check_hybrid(rig)


def test_a_hybrid_models_vault_forgets_states_with_their_blocks(
    hybrid: Any, make_tiered: Callable[..., TieredRig]
) -> None:
    rig = make_tiered(hybrid)
    rig.turn("first", HISTORY)
    rig.settle()
    rig.engine.kv.erase(ROOT, rig.turns["first"].ids)
    wait_until(lambda: not (rig.pools.blocks.table.resident or rig.pools.states.table.resident))
    assert rig.turn("again", HISTORY) == {}
    assert rig.started["again"].cached_tokens == 0


def test_a_hybrid_models_peer_lends_blocks_and_state(
    hybrid: Any, make_tiered: Callable[..., TieredRig], ring: KeyRing, tmp_path: Path, closing: list[Close]
) -> None:
    owner, other = make_tiered(hybrid), make_tiered(hybrid)
    slow_to_compute(other)
    owner.turn("first", HISTORY)
    owner.settle()
    store = PeerStore(owner.tiers, lambda work: work(owner.engine))  # its engine is at rest
    other.remote.set_peers([serve(store, "w-owner", ring, tmp_path / "run", closing)])
    other.peer = "w-owner"
    other.until_known(Tier.PEER)
    assert other.turn("pulled", TURN) == {"peer": STATES_AT}
    check_hybrid(other)


def test_a_hybrid_models_answer_goes_on_from_the_vault_after_its_workers_death(
    hybrid: Any, make_tiered: Callable[..., TieredRig]
) -> None:
    """What a running sequence's protection gave the vault is all that is left of it."""
    first = make_tiered(hybrid)
    first.add("dies", HISTORY, 30)
    while len(first.turns["dies"].outputs) < 14:
        first.engine.maintain()
        first.step()
    (sequence,) = first.scheduler.running
    first.tiers.offloader.offer_chain(Chain(ROOT, sequence.hashes, sequence.filled))
    first.settle()
    done = list(first.turns["dies"].outputs)
    other = make_tiered(hybrid, vaults=[one.address for one in first.remote._vaults.values()])
    slow_to_compute(other)
    restored = other.turn("goes on", HISTORY + done, max_tokens=30 - len(done))
    assert restored == {"vault": 6 * SIZE}
    plain = Rig(hybrid)
    plain.add("whole", HISTORY, 30)
    plain.run()
    assert done + other.turns["goes on"].outputs == plain.turns["whole"].outputs
    check_hybrid(other)
