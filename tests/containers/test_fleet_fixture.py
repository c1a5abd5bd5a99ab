"""`kvfleet_containers`: the fixture's own fleet, and a health check that tells the truth."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from kvproto.testing.fixtures import FleetFactory
from kvproto.testing.fleet_containers import FleetContainer, FleetContainers
from tests.containers.compose_fleet import greedy
from tests.containers.confinement import check_found, check_told
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def fleet(kvfleet_containers: FleetFactory) -> Iterator[FleetContainers]:
    with kvfleet_containers(workers=1, vaults=1) as fleet:
        yield fleet


def wait_for(container: FleetContainer, health: str) -> None:
    told = lambda: f"{container.name} is {container.health}\n{container.log()}"  # noqa: E731
    wait_until(lambda: container.health == health, told=told, pause_s=0.2)


def test_it_serves(fleet: FleetContainers) -> None:
    ids, end = greedy(fleet.base, "All the world's a stage", 20)
    assert end["type"] == "done"
    assert len(ids) == 20
    listed = httpx.get(f"{fleet.base}/workers").json()
    assert set(listed) == {one.name for one in fleet.workers} == {"worker-0"}


def test_all_of_it_is_confined(fleet: FleetContainers) -> None:
    assert {one.role for one in fleet.containers} == {"nats", "init", "placement", "vault", "worker", "ingress"}
    for one in fleet.containers:
        check_told(one.attributes)
        if one.role != "init":
            check_found(lambda program, one=one: one.run("python", "-c", program)[1])  # type: ignore[misc]


def test_a_process_that_hangs_is_unhealthy_until_it_wakes(fleet: FleetContainers) -> None:
    (vault,) = fleet.of("vault")
    pid = vault.attributes["State"]["Pid"]
    if not os.path.exists(f"/proc/{pid}"):
        pytest.skip("the daemon's processes are not this machine's")
    assert vault.health == "healthy"
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(vault, "unhealthy")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(vault, "healthy")


def test_a_process_that_cannot_become_ready_is_never_healthy(fleet: FleetContainers) -> None:
    lost = fleet.add("placement", "lost", {"KVFLEET_NATS_URL": "nats://nobody:4222"})
    code, said = lost.run("python", "-m", "kvservice.health")
    assert code == 1
    assert "no answer" in said or "503" in said
    assert lost.health != "healthy"
    lost.kill()


def test_processes_end_in_their_grace(fleet: FleetContainers) -> None:
    for role in ("ingress", "worker", "vault", "placement"):
        for one in fleet.of(role):
            if one.name != "lost":
                assert one.stop(30) == 0, one.log()[-2000:]


def test_an_image_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, kvfleet_containers: FleetFactory) -> None:
    with pytest.raises(Exception, match="no image kvfleet-control:absent: run scripts/build_images"):
        kvfleet_containers(tag="absent")
    monkeypatch.delenv("KVFLEET_TEST_CONTAINERS")
    with pytest.raises(pytest.skip.Exception, match="no fleet in containers: no image"):
        kvfleet_containers(tag="absent")
