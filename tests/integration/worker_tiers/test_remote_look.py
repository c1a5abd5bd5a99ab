"""What vaults and a peer have of a chain, in any case within some milliseconds."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from kvproto.block_hash import ForkedRoot
from kvproto.messages import Tier
from tests.integration.worker_tiers.conftest import MakeRemote, MakeVault
from tests.integration.worker_tiers.rig import (
    ROOT,
    Fetched,
    Vault,
    look,
    names_of,
    ready,
)
from tests.support.slow_proxy import SlowProxy
from tests.support.waiting import LIMIT_S, wait_until

LOOK_LIMIT_S = 0.1


def test_how_deep_a_chain_is_held_without_a_gap(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(10)
    vault.store.add(names[:4] + names[5:])
    assert look(remote, names).vault == 4
    assert look(remote, names[5:]).vault == 5, "the rest of a chain is asked for as well"
    assert look(remote, names_of(3, seed=1)).vault == 0
    assert look(remote, names).peer == 0


def test_over_the_union_of_all_vaults(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(4)]
    remote, names = make_remote(*vaults), names_of(300)
    owners = [remote._ring.owner(name) for name in names]
    assert len(set(owners)) > 1
    for vault in vaults:
        vault.store.add([name for name, owner in zip(names[:290], owners, strict=False) if owner == vault.id])
    assert look(remote, names).vault == 290


def test_an_exact_request_finds_no_lossy_block(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(4)
    vault.store.add(names[:2])
    vault.store.add(names[2:], lossy=True)
    assert look(remote, names).vault == 4
    assert look(remote, names, exact=True).vault == 2


def test_a_forked_chain_lies_under_two_roots(vault: Vault, make_remote: MakeRemote) -> None:
    remote = make_remote(vault)
    names = names_of(6, root=ForkedRoot(b"p" * 16, ROOT, 3))
    assert [name.root for name in names] == [b"p" * 16] * 3 + [ROOT] * 3
    vault.store.add(names)
    assert look(remote, names).vault == 6
    assert Fetched(remote, names).wait().check() == 6


def test_a_peer_is_asked_too(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vault, peer = make_vault("v1"), make_vault("w2")
    remote, names = make_remote(vault), names_of(8)
    remote.set_peers([peer.address])
    ready(remote, Tier.PEER)
    vault.store.add(names[:3])
    peer.store.add(names[:7])
    finding = look(remote, names, peer="w2")
    assert (finding.vault, finding.peer) == (3, 7)
    assert look(remote, names, peer="nobody").peer == 0
    fetched = Fetched(remote, names[:7], Tier.PEER, peer="w2").wait()
    assert fetched.check() == 7
    assert set(fetched.landing.sources.values()) == {"w2"}
    assert sum(count for what, count in peer.store.asked if what == "get") == 7
    assert "get" not in dict(vault.store.asked)


def test_a_peer_that_nobody_asks_costs_no_connection_and_is_asked_again_when_needed(
    make_vault: MakeVault, make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_vault("w2")
    remote, names = make_remote(), names_of(8)
    remote.set_peers([peer.address])
    ready(remote, Tier.PEER)
    peer.store.add(names)
    monkeypatch.setattr("kvfleet.worker.tiers.remote.IDLE_S", 0.05)
    time.sleep(0.1)  # longer than that
    wait_until(lambda: remote._peers["w2"]._fetches is None or remote._rest_idle())  # type: ignore[func-returns-value]
    wait_until(lambda: peer.server.counters.open_connections == 0)
    assert remote.speed(Tier.PEER) is not None, "how fast it is, is known still"
    monkeypatch.undo()
    assert Fetched(remote, names, Tier.PEER, peer="w2").wait().check() == 8
    remote.set_peers([])
    assert remote.speed(Tier.PEER) is None
    assert Fetched(remote, names, Tier.PEER, peer="w2").wait().landing.failure == "gone"


def test_with_nobody_to_ask_it_is_ready_at_once_and_said_from_another_thread(make_remote: MakeRemote) -> None:
    remote, heard = make_remote(), []
    done = threading.Event()
    finding = remote.look(
        names_of(3), exact=False, peer="", on_ready=lambda: (heard.append(threading.current_thread()), done.set())
    )  # type: ignore[func-returns-value]
    assert done.wait(LIMIT_S)
    assert finding.ready
    assert (finding.vault, finding.peer) == (0, 0)
    assert heard != [threading.current_thread()]
    assert remote.speed(Tier.VAULT) is None
    fetched = Fetched(remote, names_of(3)).wait()
    assert (fetched.landed, fetched.landing.failure, fetched.calls) == (0, "gone", 1)


def test_a_slow_vault_counts_as_empty_and_is_left_alone_for_a_while(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault, look_limit_s=LOOK_LIMIT_S), names_of(5)
    vault.store.add(names)
    assert look(remote, names).vault == 5
    vault.store.pause_s = 1.5 * LOOK_LIMIT_S
    times = []
    for _ in range(8):
        began = time.monotonic()
        assert look(remote, names).vault == 0
        times.append(time.monotonic() - began)
        wait_until(lambda: remote._vaults["v1"]._looks.busy_since is None)
    assert times[-1] < LOOK_LIMIT_S / 2, "it is not waited for any more"
    assert look(remote, names, limit_s=20 * LOOK_LIMIT_S).vault == 5, "but by who has time: blocks were handed over"
    vault.store.pause_s = 0.0
    wait_until(lambda: look(remote, names).vault == 5)


def test_one_slow_vault_hides_only_what_it_has(make_vault: MakeVault, make_remote: MakeRemote) -> None:
    vaults = [make_vault(f"v{at}") for at in range(2)]
    remote = make_remote(*vaults, look_limit_s=LOOK_LIMIT_S)
    names = next(
        names
        for seed in range(100)
        if remote._ring.owner((names := names_of(80, seed=seed))[0]) == "v0" and remote._ring.owner(names[64]) == "v1"
    )
    vaults[0].store.add(names[:64])
    vaults[1].store.add(names[64:])
    assert look(remote, names).vault == 80
    vaults[1].store.pause_s = 2 * LOOK_LIMIT_S
    assert look(remote, names).vault == 64


@pytest.mark.parametrize("kind", ["stalled", "killed"])
def test_a_vault_that_is_away_delays_no_look(kind: str, vault: Vault, make_remote: MakeRemote) -> None:
    names = names_of(5)
    vault.store.add(names)
    with SlowProxy(vault.tcp) as proxy:
        remote = make_remote(look_limit_s=LOOK_LIMIT_S)
        remote.set_vaults([vault.behind(proxy.address)])
        ready(remote)
        assert look(remote, names).vault == 5
        if kind == "stalled":
            proxy.stall.set()
        else:
            proxy.close()
        assert look(remote, names).vault == 0
        began = time.monotonic()
        for _ in range(20):
            assert look(remote, names).vault == 0
        assert time.monotonic() - began < 10 * LOOK_LIMIT_S, "each waited in vain"
        remote.close()
        proxy.stall.clear()


def test_blocks_that_a_new_vault_should_have_are_found_where_they_are(
    make_vault: MakeVault, make_remote: MakeRemote
) -> None:
    vaults = [make_vault(f"v{at}") for at in range(4)]
    remote = make_remote(*vaults[:3])
    chains = [names_of(3, seed=seed) for seed in range(40)]
    for names in chains:
        next(one for one in vaults if one.id == remote._ring.owner(names[0])).store.add(names)
    remote.set_vaults([one.address for one in vaults])
    wait_until(lambda: remote._vaults["v3"].speed() is not None)
    moved = [names for names in chains if remote._ring.owner(names[0]) == "v3"]
    assert moved
    for names in moved:
        assert look(remote, names).vault == 3
        assert Fetched(remote, names).wait().check() == 3
    for one in vaults:
        one.store.blocks.clear()
    fetched = Fetched(remote, moved[0]).wait()
    assert (fetched.landed, fetched.landing.failure) == (0, "missing")
    assert moved[0][0].hash not in remote._strays, "it is not believed to be there any more"


def test_a_vault_that_begins_a_new_life_is_connected_to_anew(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(vault), names_of(5)
    vault.store.add(names)
    vault.server.close()
    vault.start("e2")
    remote.set_vaults([vault.address])
    ready(remote)
    assert look(remote, names).vault == 5
    remote.set_vaults([])
    assert look(remote, names).vault == 0
    assert remote.speed(Tier.VAULT) is None


def test_who_is_not_who_it_should_be_is_not_asked(vault: Vault, make_remote: MakeRemote) -> None:
    remote, names = make_remote(), names_of(2)
    vault.store.add(names)
    remote.set_vaults([replace(vault.address, id="v2")])
    time.sleep(0.1)  # in which it could have been connected to
    assert look(remote, names).vault == 0
    assert remote.speed(Tier.VAULT) is None
