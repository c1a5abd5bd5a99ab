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
from tiny_models import ROOT, TOLERANCE, Rig, Turn

from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.store.store import VaultStore
from kvfleet.worker.blocks.block_codec import BlockShape, warm_up
from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model import runner as runner_module
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.network.lending import PeerStore
from kvfleet.worker.port.outputs import SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.tiers import Tiers
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.block_hash import chain
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

    def __init__(self, model: Any, remote: RemoteTiers, backend: AttentionBackend, *, host: int = 64) -> None:
        super().__init__(model, backend=backend, blocks=64)
        memory = self.runner.memory
        self.host = HostTier(memory.host_memory(host * memory.block_bytes), memory.block_bytes, SIZE)
        self.remote, self.peer = remote, ""
        self.tiers = Tiers(self.pool, memory, self.host, remote)
        self.tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
        self.engine = Engine(self.runner, self.pool, self.scheduler, IdDetokenizer(), tiers=self.tiers)
        self.started: dict[str, SequenceStarted] = {}

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
        while self.engine.has_work or self.tiers.restorer.waiting:
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
        offloader = self.tiers.offloader
        while offloader.has_work or offloader.held_on_host():
            self.engine.maintain()
            time.sleep(0.0005)

    def until_known(self, tier: Tier) -> None:
        """How fast blocks come from there."""
        wait_until(lambda: self.remote.speed(tier) is not None)

    def flush(self, *, host: bool = True) -> None:
        self.settle()
        for pool in [self.pool, *([self.host.pool] if self.host and host else [])]:
            pool.release(pool.allocate(pool.available))

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

    def make(model: Any, *, codec: BlockCodec = BlockCodec.RAW) -> TieredRig:
        plain = Rig(model, backend=backend, blocks=4)
        shape = BlockShape(*plain.runner.memory.rows)
        kv_format = plain.runner.memory.kv_format
        settings = RemoteSettings(f"w{len(closing)}", "here", kv_format, shape, codec, look_limit_s=LIMIT_S)
        remote = RemoteTiers(settings, ring)
        closing.append(remote.close)
        remote.set_vaults([serve(VaultStore(MEMORY), f"v{len(closing)}", ring, folder, closing)])
        rig = TieredRig(model, remote, backend)
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
