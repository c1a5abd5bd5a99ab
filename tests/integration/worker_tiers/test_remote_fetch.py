"""Blocks come back as they were stored, or not at all, whatever vaults and wires do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvfleet.worker.tiers.link_speed import LinkSpeed, seconds_of
from kvproto.dataplane import serving
from kvproto.dataplane.block import BlockCodec
from kvproto.messages import Tier
from tests.integration.worker_tiers.conftest import MakeRemote, MakeVault
from tests.integration.worker_tiers.rig import (
    SHAPE,
    Block,
    Fetched,
    Vault,
    block_of,
    look,
    names_of,
    payload_of,
    ready,
)
from tests.support.slow_proxy import SlowProxy
from tests.support.waiting import LIMIT_S, wait_until


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_what_was_stored_is_what_lands(scheme: str, vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(), names_of(70)
    vault.store.add(names)
    remote.set_vaults([vault.behind(next(one for one in vault.address.data_plane if one.startswith(scheme)))])
    ready(remote)
    fetched = Fetched(remote, names).wait()
    assert fetched.check() == 70
    assert (fetched.landing.failure, set(fetched.landing.sources.values()), fetched.calls) == ("", {"v1"}, 1)
    assert sum(count for what, count in vault.store.asked if what == "get") == 70
    assert not remote.loads()["vault"].failures_total


def test_from_several_vaults_at_once_in_one_round_trip_each(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(3)]
    remote, names = make_remote(*vaults), names_of(300)
    for vault in vaults:
        vault.store.add(names)
        vault.store.pause_s = 0.01
    assert Fetched(remote, names).wait().check() == 300
    asked = {vault.id: sum(count for what, count in vault.store.asked if what == "get") for vault in vaults}
    assert sum(asked.values()) == 300, "each block is asked for once"


def test_a_gap_ends_what_is_of_use(vault: Vault, make_remote: MakeRemote) -> None:
    names = names_of(1200)
    vault.store.add(names[:7] + names[8:])
    with SlowProxy(vault.tcp, bytes_per_s=30e6) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        fetched = Fetched(remote, names).wait()
        assert fetched.check() == 7
        assert fetched.landing.failure == "missing"
        assert proxy.passed < 900 * SHAPE.raw_bytes, "what lies behind a gap is not fetched to its end"
        assert Fetched(remote, names[:7]).wait().check() == 7
        remote.close()


def test_exact_takes_no_lossy_block_even_from_a_vault_that_does_not_care(
    vault: Vault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, names = make_remote(vault), names_of(3)
    vault.store.add(names, lossy=True)
    assert Fetched(remote, names).wait().check() == 3
    assert Fetched(remote, names, exact=True).wait().landed == 0
    monkeypatch.setattr(
        vault.store, "get", lambda root, hashes, exact: type(vault.store).get(vault.store, root, hashes, False)
    )
    monkeypatch.setattr(serving, "_answers", lambda block, request, asked: True)
    fetched = Fetched(remote, names, exact=True).wait()
    assert (fetched.landed, fetched.landing.failure) == (0, "lossy")


def resealed(**changes: object) -> Callable[[Block], Block]:
    """A vault that lies consistently: its checksums are right."""

    def change(block: Block) -> Block:
        return replace(block[0], **changes).sealed(block[1]), block[1]

    return change


LIES: dict[str, tuple[str, Callable[[Block], Block]]] = {
    "another size in the pool": ("format", resealed(raw_bytes=SHAPE.raw_bytes * 2)),
    "quantised, and not marked": ("format", resealed(codec=BlockCodec.INT8)),
    "quantised, of a wrong length": ("format", resealed(codec=BlockCodec.INT8, lossy=True)),
    "other tokens": ("other", resealed(ids=b"\1\0\0\0" * 16)),
    "another parent": ("other", resealed(parent=b"p" * 16)),
    "another hash": ("checksum", resealed(hash=b"h" * 16)),
    "another tenant's": ("checksum", resealed(root=b"o" * 16)),
    "damaged": ("checksum", lambda block: (block[0], memoryview(bytes(block[1][:-1]) + b"\x55"))),
    "shorter": ("format", lambda block: (replace(block[0], length=64).sealed(block[1][:64]), block[1][:64])),
}


def test_a_block_of_another_layout_is_no_use_and_no_fault(vault: Vault, make_remote: MakeRemote) -> None:
    """Workers of one model may differ in the dtype of their pools: the vault is honest."""
    remote, names = make_remote(vault), names_of(20)
    vault.store.add(names)
    change = resealed(format=b"f" * 16)
    told = block_of(names[5])[0].hash
    vault.store.change = lambda block: change(block) if block[0].hash == told else block
    for _ in range(5):
        fetched = Fetched(remote, names).wait()
        assert fetched.check() == 5
        assert fetched.landing.failure == "foreign"
    assert remote._quarantine._conducts == {}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_out_and_its_teller_is_left_alone(
    lie: str, vault: Vault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    label, change = LIES[lie]
    remote, names = make_remote(vault), names_of(20)
    vault.store.add(names)
    monkeypatch.setattr(serving, "_answers", lambda block, request, asked: True)  # the listener does not check it
    told = block_of(names[5])[0].hash
    vault.store.change = lambda block: change(block) if block[0].hash == told else block
    for _ in range(3):
        fetched = Fetched(remote, names).wait()
        assert fetched.check() == 5
        assert fetched.landing.failure == label
    assert remote.loads()["vault"].failures_total[label] == 3
    assert remote._quarantine._conducts.keys() == {"v1"}
    assert not remote._quarantine.allows("v1", time.monotonic())
    assert remote.speed(Tier.VAULT) is None
    assert look(remote, names).vault == 0
    fetched = Fetched(remote, names).wait()
    assert (fetched.landed, fetched.landing.failure) == (0, "quarantined")
    assert not remote.offload(names[0], payload_of(names[0]), lossy=False, on_done=lambda: None)


def test_scales_that_no_block_has_do_not_land(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(2)
    vault.store.add(names)
    size = SHAPE.numbers + SHAPE.runs * 4
    nonsense = memoryview(b"\x7f" * SHAPE.numbers + b"\xff\xff\xff\x7f" * SHAPE.runs)  # scales that are NaN
    vault.store.change = lambda block: (
        replace(block[0], codec=BlockCodec.INT8, lossy=True, length=size).sealed(nonsense),
        nonsense,
    )
    fetched = Fetched(remote, names).wait()
    assert (fetched.landed, fetched.landing.failure) == (0, "format")


def test_distrust_shuts_out_at_once_and_only_that_one(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(2)]
    remote, names = make_remote(*vaults), names_of(3)
    for vault in vaults:
        vault.store.add(names)
    owner = remote._ring.owner(names[0])
    assert owner is not None
    remote.distrust(owner)
    assert remote._quarantine._conducts.keys() == {owner}
    assert not remote._quarantine.allows(owner, time.monotonic())
    assert remote.loads()["vault"].failures_total == {"wrong": 1}
    assert look(remote, names).vault == 3, "the other one has them too"
    assert Fetched(remote, names).wait().check() == 3, "it is fetched from where it was seen"


def test_bits_that_flip_on_the_wire_never_land(vault: Vault, make_remote: MakeRemote) -> None:
    names = names_of(60)
    vault.store.add(names)
    with SlowProxy(vault.tcp) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.flip_every = 20 * SHAPE.raw_bytes + 12_345
        for _ in range(8):
            fetched = Fetched(remote, names).wait()
            fetched.check()
        assert proxy.flipped > 0
        assert "v1" in remote._quarantine._conducts or remote.loads()["vault"].failures_total
        remote.close()


# ---------------------------------------------------------------------------------------------- slow, stalled, dead


def test_an_engine_that_gives_up_is_free_at_once_though_the_vault_is_stalled(
    vault: Vault, make_remote: MakeRemote
) -> None:
    names = names_of(40)
    vault.store.add(names)
    with SlowProxy(vault.tcp) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        before = remote.speed(Tier.VAULT)
        proxy.stall.set()
        fetched = Fetched(remote, names)
        time.sleep(0.1)
        began = time.monotonic()
        landed = fetched.landing.close()
        kept = [bytes(one) for one in fetched.memory]
        fetched.wait()
        assert time.monotonic() - began < 1.0
        assert fetched.landing.failure == "given_up"
        wait_until(lambda: remote._vaults["v1"].own_speed() != before)
        after = remote._vaults["v1"].own_speed()
        assert before is not None
        assert after is not None
        assert seconds_of(after, 1) > 0.05, "the next fetch knows better"
        proxy.stall.clear()
        wait_until(lambda: look(remote, names).vault == 40)
        assert Fetched(remote, names).wait().check() == 40, "and comes back by itself"
        assert landed <= 40
        assert kept == [bytes(one) for one in fetched.memory], "nothing was written after it was closed"
        remote.close()


def test_a_fetch_that_nobody_gives_up_fails_by_itself(
    vault: Vault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfleet.worker.tiers.fetching.SLACK_S", 0.3)
    names = names_of(4)
    vault.store.add(names)
    with SlowProxy(vault.tcp) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        proxy.stall.set()
        fetched = Fetched(remote, names).wait()
        assert (fetched.landed, fetched.landing.failure) == (0, "timeout")
        remote.close()
        proxy.stall.clear()


@pytest.mark.parametrize("factor", [10, 100])
def test_a_vault_that_becomes_slow_is_known_to_be_after_one_fetch(
    factor: int, vault: Vault, make_remote: MakeRemote
) -> None:
    names = names_of(200)
    vault.store.add(names)
    with SlowProxy(vault.tcp, bytes_per_s=200e6) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        for _ in range(3):
            Fetched(remote, names).wait()
        fast = remote.speed(Tier.VAULT)
        assert fast is not None
        nbytes = 200 * SHAPE.raw_bytes
        proxy.bytes_per_s = 200e6 / factor
        fetched = Fetched(remote, names)
        fetched.done.wait(1.5 * seconds_of(fast, nbytes) + 0.05)  # as the engine does
        fetched.landing.close()
        fetched.wait()
        fetched.check()
        wait_until(lambda: seconds_of(_own(remote), nbytes) > 3 * seconds_of(fast, nbytes))
        proxy.bytes_per_s = None
        remote.close()


def _own(remote: object) -> LinkSpeed:
    speed = remote._vaults["v1"].own_speed()  # type: ignore[attr-defined]
    assert speed is not None
    return speed


def test_a_vault_far_slower_than_its_fellows_counts_as_empty_until_it_is_not(
    make_vault: MakeVault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    vaults = [make_vault(f"v{at}") for at in range(2)]
    with SlowProxy(vaults[1].tcp, bytes_per_s=20e6) as proxy:
        remote = make_remote(vaults[0])
        remote.set_vaults([vaults[0].address, vaults[1].behind(proxy.address)])
        wait_until(lambda: remote._vaults["v1"].speed() is not None)
        names = next(
            names for names in (names_of(20, seed=seed) for seed in range(100)) if remote._ring.owner(names[0]) == "v1"
        )
        vaults[1].store.add(names)
        assert look(remote, names).vault == 0
        fast = remote.speed(Tier.VAULT)
        assert fast is not None
        assert fast.bytes_per_s > 100e6, "what is not asked slows nothing down"
        proxy.bytes_per_s = None
        wait_until(lambda: look(remote, names).vault == 20)
        remote.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_vault_killed_while_it_sends(seed: int, vault: Vault, make_remote: MakeRemote) -> None:
    names = names_of(300)
    vault.store.add(names)
    with SlowProxy(vault.tcp, bytes_per_s=50e6) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        fetched = Fetched(remote, names)
        time.sleep(random.Random(seed).uniform(0.0, 0.08))
        proxy.cut()
        fetched.wait()
        assert fetched.check() < 300
        assert fetched.landing.failure == "gone"
        proxy.bytes_per_s = None
        wait_until(lambda: look(remote, names).vault == 300)
        assert Fetched(remote, names).wait().check() == 300
        remote.close()


def test_landings_closed_at_any_moment_are_never_written_to_again(vault: Vault, make_remote: MakeRemote) -> None:
    """What an engine does with memory it has got back is its own: a byte there that changes is somebody's wrong
    token."""
    chance = random.Random(7)
    remote, names = make_remote(vault), names_of(300)
    vault.store.add(names)
    closed: list[tuple[Fetched, list[bytes]]] = []
    for _ in range(25):
        fetched = Fetched(remote, names)
        last, end = chance.randrange(100), time.monotonic() + 5
        while fetched.landing.headers[last] is None and time.monotonic() < end:
            time.sleep(0)
        landed = fetched.landing.close()
        for memory in fetched.memory:
            memory[:8] = b"the next"
        closed.append((fetched, [bytes(one) for one in fetched.memory]))
        assert landed <= 300
    for fetched, _ in closed:
        fetched.wait()
        assert fetched.calls == 1
    time.sleep(0.05)
    for fetched, kept in closed:
        assert kept == [bytes(one) for one in fetched.memory]
    assert {fetched.landed for fetched, _ in closed} - {0, 300}, "some were closed in the middle"


def test_a_ring_that_changes_while_blocks_come(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(3)]
    remote, names = make_remote(*vaults), names_of(256)
    for vault in vaults:
        vault.store.add(names)
    chance = random.Random(3)
    for _ in range(10):
        fetches = [Fetched(remote, names) for _ in range(3)]
        remote.set_vaults([vault.address for vault in chance.sample(vaults, chance.randint(0, 3))])
        for fetched in fetches:
            fetched.wait()
            fetched.check()
            assert (fetched.landed == 256) == (fetched.landing.failure == "")
    remote.set_vaults([vault.address for vault in vaults])
    wait_until(lambda: look(remote, names).vault == 256)
    assert Fetched(remote, names).wait().check() == 256


def test_many_sequences_at_once(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(2)]
    remote = make_remote(*vaults)
    chains = [names_of(30, seed=seed) for seed in range(12)]
    for vault in vaults:
        for names in chains:
            vault.store.add(names)
    failures: list[BaseException] = []

    def sequence(at: int) -> None:
        try:
            for turn in range(5):
                names = chains[(at + turn) % len(chains)]
                finding = look(remote, names)
                assert finding.vault in (0, 30)
                assert Fetched(remote, names).wait().check() == 30
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=sequence, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not failures
    asked = sum(count for vault in vaults for what, count in vault.store.asked if what == "get")
    assert asked == 40 * 30, "each fetch was one of its own"
    assert all(source._waiting_bytes == 0 for source in remote._vaults.values())


def test_fetches_that_wait_make_the_next_one_later(vault: Vault, make_remote: MakeRemote) -> None:
    names = names_of(200)
    vault.store.add(names)
    with SlowProxy(vault.tcp, bytes_per_s=20e6) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        alone = remote.speed(Tier.VAULT)
        fetches = [Fetched(remote, names) for _ in range(4)]
        behind = remote.speed(Tier.VAULT)
        assert alone is not None
        assert behind is not None
        assert behind.latency_s > alone.latency_s + 3 * 200 * SHAPE.raw_bytes / 40e6
        for fetched in fetches:
            fetched.landing.close()
        proxy.bytes_per_s = None
        for fetched in fetches:
            fetched.wait()
        wait_until(lambda: remote._vaults["v1"]._waiting_bytes == 0)
        remote.close()


@pytest.mark.parametrize("state", ["idle", "at work", "stalled", "nobody there"])
def test_close_ends_everything_quickly(state: str, vault: Vault, make_remote: MakeRemote) -> None:
    names = names_of(300)
    vault.store.add(names)
    with SlowProxy(vault.tcp, bytes_per_s=20e6) as proxy:
        remote = make_remote()
        remote.set_vaults([vault.behind("tcp:127.0.0.1:9" if state == "nobody there" else proxy.address)])
        if state != "nobody there":
            ready(remote)
        if state == "stalled":
            proxy.stall.set()
        heard = threading.Event()
        given_back: list[int] = []
        fetches = [Fetched(remote, names) for _ in range(3)] if state != "idle" else []
        accepted = [
            remote.offload(name, payload_of(name), lossy=False, on_done=lambda: given_back.append(1))
            for name in (names_of(40, seed=9) if state != "idle" else [])
        ]
        remote.look(names, exact=False, peer="", on_ready=heard.set)
        time.sleep(0.05)
        began = time.monotonic()
        remote.close()
        assert time.monotonic() - began < 2.5
        assert heard.wait(1)
        for fetched in fetches:
            fetched.wait(1)
            fetched.check()
        assert len(given_back) == sum(accepted), "all memory is its owner's again"
        assert Fetched(remote, names).wait(1).landing.failure == "gone"
        assert look(remote, names).vault == 0
        assert not remote.offload(names[0], payload_of(names[0]), lossy=False, on_done=lambda: None)
        remote.close()
        proxy.bytes_per_s = None
        proxy.stall.clear()
