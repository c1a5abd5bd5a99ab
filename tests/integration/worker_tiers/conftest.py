"""Vaults of a test, ended with it; and no thread may outlive it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfleet.worker.blocks.block_codec import warm_up
from kvfleet.worker.tiers.remote import RemoteTiers
from tests.integration.worker_tiers.rig import Vault, remote_tiers
from tests.support.waiting import wait_until

MakeVault = Callable[[str], Vault]
MakeRemote = Callable[..., RemoteTiers]


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    warm_up()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def make_vault(_no_thread_left: None) -> Iterator[MakeVault]:
    made: list[Vault] = []
    with tempfile.TemporaryDirectory(prefix="kvv-") as folder:

        def make(name: str) -> Vault:
            made.append(Vault(name, Path(folder)))
            return made[-1]

        yield make
        for vault in made:
            vault.server.close()


@pytest.fixture
def vault(make_vault: MakeVault) -> Vault:
    return make_vault("v1")


@pytest.fixture
def make_remote(make_vault: MakeVault) -> Iterator[MakeRemote]:
    """Ended before the vaults are."""
    made: list[RemoteTiers] = []

    def make(*vaults: Vault, **settings: object) -> RemoteTiers:
        remote = remote_tiers(**settings)  # type: ignore[arg-type]
        made.append(remote)
        remote.set_vaults([one.address for one in vaults])
        if vaults:
            for one in vaults:
                wait_until(lambda one=one: remote._vaults[one.id].speed() is not None)
        return remote

    yield make
    for remote in made:
        remote.close()
