"""A vault as a process: what it keeps, what it tells, and what is left of it when it is killed at the worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from vault_rig import Fleet, Vault, get, payloads, put, soon

from kvproto.dataplane.client import PutStatus
from kvproto.dataplane.errors import DataPlaneError
from kvproto.messages import State, Tier
from kvproto.testing.nats_process import free_port
from tests.support.kv_blocks import OTHER_ROOT, ROOT, Block, block, chain, hashes
from tests.support.waiting import until

MIB = 2**20


async def test_it_registers_keeps_blocks_tells_of_them_and_leaves(fleet: Fleet, tmp_path: Path) -> None:
    port = free_port()
    vault = await fleet.start("v0", f"--max-bytes={8 * MIB}", f"--metrics-port={port}")
    assert vault.record.state is State.READY
    unix, tcp = vault.record.data_plane
    assert unix.startswith("unix:/")
    assert tcp.startswith("tcp:127.0.0.1:")
    blocks = chain(100)
    local, remote = vault.connect(), vault.connect(tcp=True)
    assert (local.address, remote.address) == (unix, tcp)
    assert put(local, blocks) == [PutStatus.STORED] * 100
    assert put(remote, blocks[:3]) == [PutStatus.PRESENT] * 3
    assert get(remote, hashes(blocks)) == payloads(blocks)
    assert remote.has(ROOT, hashes(blocks[:2]), True, soon()) == [True, True]
    assert local.erase(ROOT, hashes(blocks[60:]), soon()) == 40
    left = set(hashes(blocks[:60]))
    await until(lambda: fleet.held(vault.record.epoch) == left)
    assert await fleet.snapshot("v0") == left
    runs = [run for event in fleet.events for change in event.changes if not change.removed for run in change.runs]
    assert runs[0].parent == ROOT
    assert len(runs) < 20, "blocks that follow one another are one run"
    await until(lambda: fleet.beats and fleet.beats[-1].event_seq == fleet.events[-1].seq)
    beat = fleet.beats[-1]
    assert (beat.worker, beat.epoch, beat.held) == ("v0", vault.record.epoch, 60)
    assert beat.digest == fleet.parts[0].digest
    load = beat.load.tiers[Tier.VAULT.value]
    assert (load.blocks, load.offloaded_blocks_total, load.restores_total) == (60, 100, 100)
    assert 60 * 1024 < load.bytes_used <= load.bytes_total == 8 * MIB
    shown = (await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{port}/metrics")).text
    for line in (
        "kvfleet_vault_held_blocks 60.0",
        "kvfleet_vault_hit_blocks_total 100.0",
        "kvfleet_vault_erased_blocks_total 40.0",
        'kvfleet_vault_missed_blocks_total{reason="wrong_root"} 0.0',
        'kvfleet_vault_refused_blocks_total{reason="not_genuine"} 0.0',
        "kvfleet_vault_checksum_failures_total 0.0",
        "kvfleet_vault_open_connections 2.0",
    ):
        assert line in shown, line
    assert await asyncio.to_thread(vault.stop) == 0, vault.errors()
    assert fleet.beats[-1].state is State.DRAINING
    assert await fleet.record("v0") is None
    assert not Path(unix.removeprefix("unix:")).exists()
    assert not list(tmp_path.glob("kvf-*")), "its runtime folder is gone"
    with pytest.raises(DataPlaneError):
        put(local, blocks)
    assert vault.errors() == ""


async def test_tenants_never_meet_and_what_nobody_has_is_no_error(fleet: Fleet) -> None:
    vault = await fleet.start()
    client = vault.connect()
    ours, theirs = chain(20), chain(20, root=OTHER_ROOT)
    put(client, ours)
    put(client, theirs, OTHER_ROOT)
    assert get(client, hashes(ours), OTHER_ROOT) == [None] * 20
    assert get(client, hashes(theirs)) == [None] * 20
    assert get(client, hashes(ours), bytes(16)) == [None] * 20
    assert client.has(bytes(16), hashes(ours), False, soon()) == [False] * 20
    assert client.erase(OTHER_ROOT, hashes(ours), soon()) == 0
    assert get(client, hashes(ours)) == payloads(ours)
    assert get(client, hashes(theirs), OTHER_ROOT) == payloads(theirs)
    await until(lambda: fleet.beats and fleet.beats[-1].load.tiers["vault"].failures_total.get("wrong_root") == 60)


async def test_a_liar_is_refused_and_counted(fleet: Fleet) -> None:
    vault = await fleet.start()
    client = vault.connect()
    (one,) = chain(1)
    flipped = bytearray(one.payload)
    flipped[100] ^= 4
    assert put(client, [Block(one.header, bytes(flipped))]) == [PutStatus.CORRUPT]
    other = block(ROOT, 500)
    fake = replace(one.header, hash=other.hash).sealed(one.payload)
    assert put(client, [Block(fake, one.payload)]) == [PutStatus.REFUSED]
    assert put(client, [one]) == [PutStatus.STORED]
    assert get(client, [one.hash]) == [one.payload]
    expected = {"checksum": 1, "not_genuine": 1}
    await until(lambda: fleet.beats and fleet.beats[-1].load.tiers["vault"].failures_total == expected)


async def test_it_serves_as_many_connections_as_it_is_told_to(fleet: Fleet) -> None:
    vault = await fleet.start("v0", "--data-plane-connections=4")
    for _ in range(4):
        assert vault.connect().has(ROOT, hashes(chain(1)), False, soon()) == [False]
    with pytest.raises(DataPlaneError):
        vault.connect().has(ROOT, hashes(chain(1)), False, soon())


async def test_filled_it_stays_within_its_memory(fleet: Fleet) -> None:
    """Large blocks of two sizes, three times what it may hold; the process, too, is no larger than that allows."""
    limit = 48 * MIB
    vault = await fleet.start("v0", f"--max-bytes={limit}")
    client = vault.connect()
    get(client, [bytes(16)])
    before = vault.resident_bytes()

    def fill() -> None:
        for number in range(40):
            size = 2 * MIB if number % 2 else 3 * MIB // 2
            two = [block(ROOT, 4 * at, size=size) for at in (2 * number, 2 * number + 1)]
            assert put(client, two) == [PutStatus.STORED] * 2

    await asyncio.to_thread(fill)  # NATS gives up who does not answer
    assert vault.resident_bytes() - before < limit + 16 * MIB
    held = await fleet.snapshot("v0")
    assert 20 < len(held) < 30
    await until(lambda: fleet.held(vault.record.epoch) == held)
    newest = block(ROOT, 4 * 79, size=2 * MIB)
    assert get(client, [newest.hash]) == [newest.payload]
    load = fleet.beats[-1].load.tiers["vault"]
    assert load.bytes_used <= limit


async def test_killed_during_puts_and_gets_it_comes_back_with_what_was_on_disk(fleet: Fleet, tmp_path: Path) -> None:
    """kill -9 while four connections put and get; a second life serves only whole blocks, and says what it has."""
    flags = (f"--max-bytes={2 * MIB}", f"--disk-dir={tmp_path / 'disk'}", f"--disk-max-bytes={64 * MIB}")
    vault = await fleet.start("v0", *flags)
    chains = [chain(64, first_id=10_000 * number, size=16 * 1024) for number in range(12)]
    ended: list[str] = []

    def work(number: int) -> None:
        try:
            client = vault.connect(tcp=number % 2 == 0)
            while True:
                for blocks in chains[number::4]:
                    put(client, blocks)
                    for found, expected in zip(get(client, hashes(blocks)), payloads(blocks), strict=True):
                        assert found in (None, expected)
        except DataPlaneError as error:
            ended.append(type(error).__name__)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: sum(file.stat().st_size for file in (tmp_path / "disk").iterdir()) > 4 * MIB)
    vault.process.kill()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
    assert len(ended) == 4, "those connections ended, and nothing else happened"

    again = await fleet.start("v0", *flags)
    assert again.record.epoch > vault.record.epoch
    held = await fleet.snapshot("v0")
    assert len(held) > 100, "what was written to disk is there"
    await until(lambda: fleet.held(again.record.epoch) == held)
    client = again.connect()
    whole = 0
    for blocks in chains:
        for one, found in zip(blocks, get(client, hashes(blocks)), strict=True):
            assert found in (None, one.payload)
            assert (found is not None) == (one.hash in held)
            whole += found is not None
    assert whole == len(held)
    assert put(client, chains[0]).count(PutStatus.REFUSED) == 0
    assert again.stop() == 0, again.errors()


async def test_killed_without_a_disk_it_begins_with_nothing(fleet: Fleet, tmp_path: Path) -> None:
    vault = await fleet.start()
    put(vault.connect(), chain(10))
    await until(lambda: len(fleet.held(vault.record.epoch)) == 10)
    vault.kill()
    again = await fleet.start()
    assert len(list(tmp_path.glob("kvf-*"))) == 1, "the next life removes the runtime folder of the one before"
    assert await fleet.snapshot("v0") == set()
    assert fleet.parts[0].epoch == again.record.epoch
    with contextlib.closing(again.connect()) as client:
        assert get(client, hashes(chain(10))) == [None] * 10


async def test_stopped_it_writes_what_only_memory_had_and_flipped_bits_on_disk_are_misses(
    fleet: Fleet, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    vault = await fleet.start("v0", f"--disk-dir={disk}")
    blocks = chain(50, size=4096)
    put(vault.connect(), blocks)
    assert await asyncio.to_thread(vault.stop) == 0
    segment = max(disk.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    for one in blocks[7], blocks[30]:
        data[data.index(one.payload[:64]) + 9] ^= 1
    segment.write_bytes(data)
    again = await fleet.start("v0", f"--disk-dir={disk}")
    found = get(again.connect(), hashes(blocks))
    assert [at for at, one in enumerate(found) if one is None] == [7, 30]
    assert [one for one in found if one] == [one.payload for at, one in enumerate(blocks) if at not in (7, 30)]
    expected = set(hashes(blocks)) - {blocks[7].hash, blocks[30].hash}
    await until(lambda: fleet.held(again.record.epoch) == expected)


async def test_a_later_process_of_its_id_takes_over(fleet: Fleet) -> None:
    first = await fleet.start()
    second = await fleet.start()
    assert await asyncio.to_thread(first.process.wait, 60) == 1
    assert "held by a later process" in first.errors()
    record = await fleet.record("v0")
    assert record is not None
    assert record.epoch == second.record.epoch


async def test_what_cannot_work_is_one_clear_line(fleet: Fleet, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    await fleet.start("v0", f"--disk-dir={disk}")
    (tmp_path / "file").write_text("")
    cases = {
        "used by another vault": [f"--disk-dir={disk}"],
        "cannot use --disk-dir": [f"--disk-dir={tmp_path / 'file'}"],
        "TLS files": [f"--data-plane-cert={tmp_path / 'absent.pem'}"],
        "data_plane_key": [f"--data-plane-key={tmp_path / 'absent.pem'}"],
        "Cannot assign requested address": ["--data-plane-host=203.0.113.1"],
        "id: must be": ["--id=a.b"],
        "no NATS server answers at nats://127.0.0.1:1": ["--nats-url=nats://127.0.0.1:1"],
    }
    started = {told: Vault(fleet, "v9", flags, "warning") for told, flags in cases.items()}
    for number, (told, vault) in enumerate(started.items()):
        assert await asyncio.to_thread(vault.process.wait, 20) == 1, (number, told)
        (line,) = vault.errors().strip().splitlines()
        assert line.startswith("kvfleet vault: ")
        assert told in line
