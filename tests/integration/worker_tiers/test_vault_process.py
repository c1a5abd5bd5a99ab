"""With the vault's own store, in a process that is killed, filled and erased from."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvproto.dataplane.block import BlockCodec
from kvproto.messages import Tier
from tests.integration.worker_tiers.conftest import MakeRemote
from tests.integration.worker_tiers.rig import HOST, SHAPE, Fetched, look, names_of, payload_of
from tests.support.waiting import wait_until

ROOM = Path(__file__).parents[3]


class VaultProcess:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lives = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self, megabytes: int = 64) -> SourceAddress:
        self._lives += 1
        path = self._folder / f"{self._lives}.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.worker_tiers.vault_process", str(path), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOM,
            env={"PYTHONPATH": f"{ROOM / 'libs'}:{ROOM}"},
        )
        assert self._process.stdout is not None
        return SourceAddress("v1", f"e{self._lives}", HOST, tuple(self._process.stdout.readline().split()))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def vault_process(_no_thread_left: None) -> Iterator[VaultProcess]:
    with tempfile.TemporaryDirectory(prefix="kvv-") as folder:
        process = VaultProcess(Path(folder))
        yield process
        process.kill()


def follow(remote: RemoteTiers, address: SourceAddress) -> None:
    remote.set_vaults([address])
    wait_until(lambda: remote.speed(Tier.VAULT) is not None)


def offload(remote: RemoteTiers, blocks: int, seed: int = 0) -> list[int]:
    done: list[int] = []
    for name in names_of(blocks, seed=seed):
        assert remote.offload(name, payload_of(name), lossy=False, on_done=lambda: done.append(1))
    return done


@pytest.mark.parametrize("codec", BlockCodec)
def test_there_and_back_and_erased(codec: BlockCodec, vault_process: VaultProcess, make_remote: MakeRemote) -> None:
    remote, names = make_remote(codec=codec), names_of(150)
    follow(remote, vault_process.start())
    done = offload(remote, 150)
    wait_until(lambda: len(done) == 150)
    assert look(remote, names).vault == 150
    assert look(remote, names, exact=True).vault == (150 if codec is BlockCodec.RAW else 0)
    fetched = Fetched(remote, names).wait()
    assert fetched.landed == 150
    assert {header.lossy for header in fetched.landing.headers if header} == {codec is not BlockCodec.RAW}
    if codec is BlockCodec.RAW:
        assert fetched.check() == 150
    remote.erase(names)
    wait_until(lambda: look(remote, names).vault == 0)
    assert remote.loads()["vault"].failures_total == {}


def test_killed_while_it_takes_and_while_it_gives(vault_process: VaultProcess, make_remote: MakeRemote) -> None:
    remote, names = make_remote(), names_of(1500)
    follow(remote, vault_process.start())
    done = offload(remote, 1500)
    wait_until(lambda: look(remote, names).vault > 100)
    vault_process.kill()
    follow(remote, vault_process.start())
    wait_until(lambda: len(done) == 1500)
    assert look(remote, names).vault == 0, "the old life's blocks are gone, and it is known at once"
    done = offload(remote, 1500)
    wait_until(lambda: len(done) == 1500)
    assert look(remote, names).vault == 1500
    fetches = [Fetched(remote, names) for _ in range(3)]
    wait_until(lambda: fetches[0].landed > 50)
    vault_process.kill()
    for fetched in fetches:
        fetched.wait()
        assert fetched.check() == 1500 or fetched.landing.failure in ("gone", "timeout")
    assert look(remote, names).vault == 0
    began = time.monotonic()
    assert Fetched(remote, names).wait().landing.failure == "gone"
    assert time.monotonic() - began < 3


def test_a_vault_that_is_full_evicts_and_a_fetch_brings_what_is_left(
    vault_process: VaultProcess, make_remote: MakeRemote
) -> None:
    remote = make_remote()
    follow(remote, vault_process.start(megabytes=4))
    blocks = 4 * 2**20 // SHAPE.raw_bytes
    for seed in range(4):
        done = offload(remote, blocks // 2, seed)
        wait_until(lambda done=done: len(done) == blocks // 2)  # type: ignore[misc]
    depths = []
    for seed in range(4):
        names = names_of(blocks // 2, seed=seed)
        depths.append(look(remote, names).vault)
        fetched = Fetched(remote, names[: depths[-1]]).wait() if depths[-1] else None
        assert fetched is None or fetched.check() == depths[-1]
    assert depths[3] == blocks // 2, "the newest is there"
    assert sum(depths) <= blocks
