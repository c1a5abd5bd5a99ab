"""Blocks get to their vault some time later, and whoever offered them never waits for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvfleet.worker.blocks.block_codec import SNR_GATE_DB
from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.tiers import write_behind
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.transfers import Deadlines, RemoteCounts, RemoteSettings
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.errors import PeerTimeout
from kvproto.errors import Unavailable
from kvproto.messages import Tier
from tests.integration.worker_tiers.conftest import MakeRemote, MakeVault
from tests.integration.worker_tiers.rig import (
    FORMAT,
    HOST,
    ROOT,
    SHAPE,
    Fetched,
    Vault,
    look,
    names_of,
    payload_of,
    ready,
)
from tests.support.slow_proxy import SlowProxy
from tests.support.waiting import LIMIT_S, wait_until


class Offloads:
    """What an engine offers, and has back."""

    def __init__(self, remote: RemoteTiers) -> None:
        self._remote = remote
        self.accepted: list[int] = []
        self.back: Counter[int] = Counter()  # by number of the offer
        self.names: list[BlockName] = []

    def offer(self, names: Sequence[BlockName], *, lossy: bool = False) -> int:
        """How many were taken."""
        before = len(self.accepted)
        for name in names:
            number = len(self.names)
            self.names.append(name)
            done = partial(self.back.update, [number])
            if self._remote.offload(name, payload_of(name), lossy=lossy, on_done=done):
                self.accepted.append(number)
        return len(self.accepted) - before

    def wait(self) -> Offloads:
        wait_until(lambda: len(self.back) >= len(self.accepted))
        assert self.back == Counter(self.accepted), "each is given back once, and what was not taken never"
        return self


def failures(remote: RemoteTiers) -> dict[str, int]:
    return remote.loads()["vault"].failures_total


def test_what_is_offloaded_can_be_fetched_and_is_written_once(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(100)
    assert Offloads(remote).offer(names) == 100
    wait_until(lambda: len(vault.store.blocks) == 100)
    assert vault.store.order == [name.hash for name in names], "parents before children"
    assert Fetched(remote, names, exact=True).wait().check() == 100
    wait_until(lambda: remote.loads()["vault"].offloaded_blocks_total == 100)
    again = Offloads(remote)
    again.offer(names)
    again.wait()
    assert remote.loads()["vault"].offloaded_blocks_total == 100
    assert len(vault.store.order) == 100


def test_each_block_goes_to_the_vault_that_keeps_its_run(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(3)]
    remote, names = make_remote(*vaults), names_of(200)
    Offloads(remote).offer(names)
    wait_until(lambda: sum(len(vault.store.blocks) for vault in vaults) == 200)
    for vault in vaults:
        assert vault.store.order == [name.hash for name in names if remote._ring.owner(name) == vault.id]
    assert look(remote, names).vault == 200
    assert Fetched(remote, names).wait().check() == 200


def test_lossy_blocks_stay_marked(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(6)
    offloads = Offloads(remote)
    offloads.offer(names[:3])
    offloads.offer(names[3:], lossy=True)
    offloads.wait()
    assert [vault.store.blocks[ROOT, name.hash][0].lossy for name in names] == [False] * 3 + [True] * 3
    assert look(remote, names, exact=True).vault == 3


def test_int8_is_written_where_the_block_allows_it_and_says_what_it_cost(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault, codec=BlockCodec.INT8), names_of(4)
    spiky = np.full(SHAPE.numbers, 1e-3, dtype=np.float32).reshape(SHAPE.runs, SHAPE.head_dim)
    spiky[:, 0] = 1.0  # one large number in each group: int8 has nothing left for the others
    spiky[:, 1:] = 0.0039 * np.linspace(0.2, 0.45, SHAPE.head_dim - 1, dtype=np.float32)
    nan = np.full(SHAPE.numbers, np.nan, dtype=np.float32)
    done: list[int] = []
    payloads = [payload_of(names[0]), memoryview(nan).cast("B"), memoryview(spiky.reshape(-1)).cast("B")]
    for name, payload in zip(names, payloads, strict=False):
        assert remote.offload(name, payload, lossy=False, on_done=lambda: done.append(1))
    wait_until(lambda: len(done) == 3)
    headers = [vault.store.blocks[ROOT, name.hash][0] for name in names[:3]]
    assert (headers[0].codec, headers[0].lossy) == (BlockCodec.INT8, True)
    assert headers[0].snr_db >= SNR_GATE_DB
    assert headers[0].length < SHAPE.raw_bytes / 3
    assert (headers[1].codec, headers[1].lossy) == (BlockCodec.RAW, False)
    quantised = [header for header in headers if header.codec is BlockCodec.INT8]
    counts = remote.counts
    assert counts.snr_db.count == len(quantised)
    assert counts.snr_db.sum == pytest.approx(sum(header.snr_db for header in quantised))
    assert counts.quantised_raw_bytes == SHAPE.raw_bytes * len(quantised)
    assert counts.quantised_bytes == sum(header.length for header in quantised)
    assert counts.kept_raw == len(headers) - len(quantised) > 0
    sent = sum(header.length for header in headers)
    assert counts.transfers()[Tier.VAULT][1] >= sent
    fetched = Fetched(remote, names[:3]).wait()
    assert fetched.landed == 3
    assert counts.transfers()[Tier.VAULT][0] >= sent, "they came back"
    assert counts.transfers()[Tier.PEER] == (0, 0)
    numbers = np.frombuffer(fetched.memory[0], np.float32)
    wanted = np.frombuffer(payloads[0], np.float32)
    assert np.abs(numbers - wanted).max() < 0.02
    assert not np.array_equal(numbers, wanted)
    assert fetched.memory[1] == payloads[1], "raw: to the bit"
    gets = len(vault.store.asked)
    again = Offloads(remote)
    again.offer(names[:1])
    again.wait()
    assert [what for what, _ in vault.store.asked[gets:]] == ["has"], "it is not even encoded again"


def test_a_vault_that_is_full_refuses_and_is_no_trouble(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(20)
    vault.store.room = 5
    offloads = Offloads(remote)
    offloads.offer(names)
    offloads.wait()
    assert len(vault.store.blocks) == 5
    assert failures(remote) == {"put_refused": 15}


def test_without_a_vault_or_of_another_size_nothing_is_taken(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(), names_of(1)
    assert Offloads(remote).offer(names) == 0
    remote.set_vaults([vault.address])
    assert not remote.offload(names[0], payload_of(names[0])[:-4], lossy=False, on_done=lambda: None)


def test_a_stalled_vault_fills_the_queue_then_is_given_up_and_comes_back(
    vault: Vault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "OFFLOAD_LIMIT_S", 0.6)
    with SlowProxy(vault.tcp) as proxy:
        remote, names = make_remote(max_queued_bytes=10 * SHAPE.raw_bytes), names_of(400)
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.stall.set()
        offloads = Offloads(remote)
        began = time.monotonic()
        assert offloads.offer(names[:10]) == 10
        longest = 0.0
        for name in names[10:200]:
            one = time.monotonic()
            assert offloads.offer([name]) == 0, "the queue is full"
            longest = max(longest, time.monotonic() - one)
        assert longest < 0.25, "nobody waits"
        offloads.wait()
        assert time.monotonic() - began < 8
        assert failures(remote)["offload_expired"] == 10
        proxy.stall.clear()
        wait_until(lambda: offloads.offer([names[200]]) and vault.store.blocks)
        offloads.wait()
        remote.close()


def test_what_comes_back_from_a_put_expires_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a batch expires with its put; the second a moment later, while there is no connection."""
    monkeypatch.setattr(write_behind, "OFFLOAD_LIMIT_S", 0.6)
    offered, back = threading.Event(), Counter[str]()

    class Stalled:
        closed = True

        def put(self, root: bytes, blocks: object, deadline: float) -> None:
            time.sleep(deadline - time.monotonic() + 0.1)  # `_expire` has looked meanwhile
            raise PeerTimeout("no answer")

        def has_ended(self) -> bool:
            return False

        def close(self) -> None: ...

        abort = close

    clients = [Stalled()]

    def connect() -> Any:
        assert offered.wait(LIMIT_S)
        if not clients:
            raise Unavailable("away")
        return clients.pop()

    settings, deadlines = RemoteSettings("me", HOST, FORMAT, SHAPE), Deadlines()
    writer = write_behind.WriteBehind("v", connect, settings, deadlines, RemoteCounts())
    for pause_s, name in zip((0.3, 0.0), names_of(2), strict=True):
        assert writer.offer(name, payload_of(name), lossy=False, on_done=partial(back.update, [name.hash.hex()]))
        time.sleep(pause_s)
    offered.set()
    wait_until(lambda: len(back) == 2)
    assert set(back.values()) == {1}
    writer.close().join()
    deadlines.close()


def test_a_stalled_put_delays_no_look_and_no_fetch(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(30)
    vault.store.add(names)
    entered, go_on = threading.Event(), threading.Event()

    def stalled(header: object) -> None:
        entered.set()
        go_on.wait(2 * LIMIT_S)

    vault.store.reserve = stalled  # type: ignore[method-assign,assignment]
    offloads = Offloads(remote)
    offloads.offer(names_of(5, seed=1))
    assert entered.wait(LIMIT_S)
    for _ in range(20):
        assert look(remote, names).vault == 30
        assert Fetched(remote, names).wait().check() == 30
    assert not offloads.back
    go_on.set()
    offloads.wait()


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.03])
def test_a_vault_killed_during_a_put_gets_the_rest_when_it_is_back(
    pause_s: float, vault: Vault, make_remote: MakeRemote
) -> None:
    with SlowProxy(vault.tcp, bytes_per_s=30e6) as proxy:
        remote, names = make_remote(), names_of(150)
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        offloads = Offloads(remote)
        offloads.offer(names)
        time.sleep(pause_s)
        proxy.cut()
        proxy.bytes_per_s = None
        offloads.wait()
        assert {name.hash for name in names} == set(vault.store.order)
        assert not failures(remote)
        assert Fetched(remote, names).wait().check() == 150
        remote.close()


def test_bits_that_flip_on_their_way_are_refused_by_the_vault(vault: Vault, make_remote: MakeRemote) -> None:
    with SlowProxy(vault.tcp) as proxy:
        remote, names = make_remote(), names_of(64)
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.flip_every_sent = 20 * SHAPE.raw_bytes + 123
        offloads = Offloads(remote)
        offloads.offer(names)
        offloads.wait()
        assert proxy.flipped > 0
        for (_, block), (header, payload) in vault.store.blocks.items():
            assert header.matches(payload)
            assert payload == payload_of(next(name for name in names if name.hash == block))
        remote.close()


# ---------------------------------------------------------------------------------------------- erase


def test_erase_reaches_every_vault(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(3)]
    remote, names, others = make_remote(*vaults), names_of(100), names_of(5, seed=1)
    for vault in vaults:
        vault.store.add(names)
        vault.store.add(others)
    remote.erase(names)
    wait_until(lambda: all(len(vault.store.blocks) == 5 for vault in vaults))
    assert not failures(remote)


def test_what_waits_to_be_offloaded_is_dropped_and_what_is_under_way_does_not_survive(
    vault: Vault, make_remote: MakeRemote
) -> None:
    remote, names, others = make_remote(vault), names_of(200), names_of(3, seed=1)
    entered, go_on = threading.Event(), threading.Event()
    reserve = vault.store.reserve

    def slow(header: object) -> memoryview | None:
        entered.set()
        go_on.wait(2 * LIMIT_S)
        return reserve(header)  # type: ignore[arg-type]

    vault.store.reserve = slow  # type: ignore[method-assign]
    offloads = Offloads(remote)
    offloads.offer(names)
    offloads.offer(others)
    assert entered.wait(LIMIT_S)
    remote.erase(names)
    wait_until(lambda: len(offloads.back) > 100)  # those that waited: at once
    assert not {offloads.names[number].hash for number in offloads.back} & {name.hash for name in others}
    go_on.set()
    offloads.wait()
    wait_until(lambda: {hash_ for _, hash_ in vault.store.blocks} == {name.hash for name in others})
    assert any(what == "erase" for what, _ in vault.store.asked)


def test_a_put_that_breaks_does_not_bring_back_what_was_erased_meanwhile(vault: Vault, make_remote: MakeRemote) -> None:
    with SlowProxy(vault.tcp) as proxy:
        remote, names, others = make_remote(), names_of(20), names_of(3, seed=1)
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.stall.set()
        offloads = Offloads(remote)
        offloads.offer(names)
        offloads.offer(others)
        time.sleep(0.1)
        remote.erase(names)
        proxy.cut()
        proxy.stall.clear()
        offloads.wait()
        wait_until(lambda: len(vault.store.blocks) == 3)
        assert {hash_ for _, hash_ in vault.store.blocks} == {name.hash for name in others}
        remote.close()


def test_erase_is_tried_again(vault: Vault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "AGAIN_S", 0.5)
    names = names_of(10)
    vault.store.add(names)
    with SlowProxy(vault.tcp) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.stall.set()
        remote.erase(names)
        time.sleep(0.05)
        proxy.cut()
        proxy.stall.clear()
        wait_until(lambda: not vault.store.blocks)
        assert failures(remote) == {"erase": 1}
        remote.close()
    assert remote.speed(Tier.VAULT) is None


def test_a_vault_that_was_away_forgets_once_it_is_back(vault: Vault, make_remote: MakeRemote) -> None:
    """With its disk, in another life; also what it was asked before it went."""
    before, while_away, kept = names_of(6), names_of(4, seed=7), names_of(3, seed=9)
    for names in (before, while_away, kept):
        vault.store.add(names)
    with SlowProxy(vault.tcp) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.stall.set()
        remote.erase(before)
        remote.set_vaults([])
        remote.erase(while_away)
        assert len(vault.store.blocks) == 13
    remote.set_vaults([replace(vault.address, epoch="next")])
    wait_until(lambda: {hash_ for _, hash_ in vault.store.blocks} == {name.hash for name in kept})
    remote.close()


def test_a_vault_that_is_connected_at_once_forgets_too(
    vault: Vault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may be quicker than the one that starts it."""
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.2 if thread.name == "vault-v1-write" else 0.0)

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    test_a_vault_that_was_away_forgets_once_it_is_back(vault, make_remote)
