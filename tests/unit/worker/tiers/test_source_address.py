"""Whom the members view names as a vault, and whose blocks a worker can use."""

from __future__ import annotations

from dataclasses import replace

from kvfleet.worker.tiers.source import SourceAddress, peers_of, vaults_of
from kvproto.messages import MemberRecord, Role, State, WorkerRecord

AT = ("unix:/run/kvf/x.sock", "tcp:10.0.0.1:7000")
ME = WorkerRecord(
    "w1", "e1", "l1", State.READY, "m", "", "h1", 1, (1, 1), model_revision="r1", data_plane=AT, kv_format=b"f" * 16
)
VAULT = MemberRecord("v1", "e1", "l1", State.READY, Role.VAULT, "h1", 2, (1, 1), data_plane=AT)


def test_vaults_that_can_be_reached() -> None:
    members = [
        VAULT,
        replace(VAULT, id="v2", state=State.DRAINING),
        replace(VAULT, id="v3", state=State.STARTING),
        replace(VAULT, id="v4", data_plane=()),
        replace(VAULT, id="i1", role=Role.INGRESS),
    ]
    assert [one.id for one in vaults_of(members)] == ["v1", "v2"]
    assert vaults_of([VAULT]) == [SourceAddress("v1", "e1", "h1", AT)]


def test_peers_have_the_same_weights_and_the_same_layout() -> None:
    workers = [
        ME,
        replace(ME, id="w2", host="h2"),
        replace(ME, id="w3", model_revision="r2"),
        replace(ME, id="w4", kv_format=b"g" * 16),
        replace(ME, id="w5", data_plane=()),
        replace(ME, id="w6", state=State.STARTING),
        replace(ME, id="w7", state=State.DRAINING),
        replace(ME, id="w8", model="another name of the same model"),
    ]
    assert [one.id for one in peers_of(workers, ME)] == ["w2", "w7", "w8"]
    assert peers_of(workers, ME)[0].host == "h2"
