"""Questions of a traced request to vaults and peers: what is recorded at both ends, and who is not told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.store.store import VaultStore
from kvfleet.worker.tiers.host import Landing
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.dataplane import handshake_bytes, link, wire
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import DataPlaneError, ProtocolError
from kvproto.dataplane.server import DataPlaneServer
from kvproto.dataplane.serving import TracedRequest
from kvproto.messages import Tier
from kvservice.data_plane import recorder_of
from kvservice.tracing import NULL
from kvservice.tracing_otel import OtelTracer
from tests.integration.vault.vault_rig import get, put, soon
from tests.integration.worker_tiers import rig
from tests.integration.worker_tiers.rig import KEYS, Vault, names_of, ready
from tests.support.kept_spans import Kept
from tests.support.kv_blocks import ROOT, chain, hashes
from tests.support.waiting import LIMIT_S

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traced:
    """A tracer of a worker, and one of a vault."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.tracers = {
            role: OtelTracer(service=f"kvfleet-{role}", instance=role, exporter=self.kept)
            for role in ("worker", "vault")
        }

    def spans(self) -> dict[str, list[ReadableSpan]]:
        for tracer in self.tracers.values():
            tracer.close(2.0)
        found: dict[str, list[ReadableSpan]] = {}
        for span in sorted(self.kept.spans, key=lambda span: span.start_time or 0):
            found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
def vault(tmp_path: Path, traced: Traced) -> Iterator[Vault]:
    vault = Vault("v0", tmp_path)
    vault.server.on_traced = recorder_of(traced.tracers["vault"], Tier.VAULT)
    yield vault
    vault.server.close()


@pytest.fixture
def remote(vault: Vault, traced: Traced) -> Iterator[RemoteTiers]:
    settings = RemoteSettings("me", rig.HOST, rig.FORMAT, rig.SHAPE, look_limit_s=LIMIT_S)
    remote = RemoteTiers(settings, KEYS, tracer=traced.tracers["worker"])
    remote.set_vaults([vault.address])
    ready(remote)
    yield remote
    remote.close()


def look(remote: RemoteTiers, names: list[Any], traceparent: str) -> None:
    done = threading.Event()
    remote.look(names, exact=False, peer="", on_ready=done.set, traceparent=traceparent)
    assert done.wait(LIMIT_S)


def fetch(remote: RemoteTiers, names: list[Any], traceparent: str) -> int:
    done = threading.Event()
    landing = Landing([None] * len(names), traceparent=traceparent)
    targets = [memoryview(bytearray(rig.SHAPE.raw_bytes)) for _ in names]
    remote.fetch(Tier.VAULT, names, targets, landing, exact=False, peer="", on_progress=done.set)
    assert done.wait(LIMIT_S)
    return landing.close()


def test_both_ends_record_a_look_and_a_fetch(remote: RemoteTiers, vault: Vault, traced: Traced) -> None:
    names = names_of(5)
    vault.store.add(names[:3])
    look(remote, names, CONTEXT)
    assert fetch(remote, names, CONTEXT) == 3
    remote.close()
    vault.server.close()  # the threads of both have ended their spans
    spans = traced.spans()
    (look_span,), (fetch_span,) = spans["look"], spans["fetch"]
    (has,), (got,) = spans["vault has"], spans["vault get"]
    for asked, answered in ((look_span, has), (fetch_span, got)):
        assert asked.context.trace_id == answered.context.trace_id == int(CONTEXT[3:35], 16)
        assert asked.parent is not None
        assert answered.parent is not None
        assert (asked.parent.span_id, answered.parent.span_id) == (int(CONTEXT[36:52], 16), asked.context.span_id)
        assert (asked.kind.name, answered.kind.name) == ("CLIENT", "SERVER")
    nbytes = 3 * rig.SHAPE.raw_bytes
    common = {"kvfleet.tier": "vault", "kvfleet.client.id": "me", "kvfleet.blocks.from_disk": 0}
    assert has.attributes == common | {"kvfleet.blocks": 5, "kvfleet.blocks.hit": 3, "kvfleet.bytes": 0}
    assert got.attributes == common | {"kvfleet.blocks": 5, "kvfleet.blocks.hit": 3, "kvfleet.bytes": nbytes}
    assert fetch_span.attributes == {
        "kvfleet.tier": "vault", "kvfleet.source.id": "v0", "kvfleet.blocks.hit": 3, "kvfleet.bytes": nbytes,
    }  # fmt: skip


def test_a_request_that_is_not_traced_leaves_nothing(remote: RemoteTiers, vault: Vault, traced: Traced) -> None:
    names = names_of(2)
    vault.store.add(names)
    for nothing in ("", "garbage", CONTEXT[:-1] + "0"):
        look(remote, names, nothing)
        assert fetch(remote, names, nothing) == 2
    assert traced.spans() == {}


def test_an_older_server_is_never_sent_a_context(
    tmp_path: Path, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that refuses a field that it does not know: version 1 reads exactly four."""

    def unpack(head: wire.Head, meta: bytes) -> wire.Message:
        if issubclass(head.kind, wire.Lookup) and len(msgpack.unpackb(meta)) != 4:
            raise ProtocolError("four fields")
        return wire.unpack(head, meta)

    monkeypatch.setattr(link, "unpack", unpack)
    monkeypatch.setattr(handshake_bytes, "NEWEST", 1)
    vault = Vault("v0", tmp_path)
    settings = RemoteSettings("me", rig.HOST, rig.FORMAT, rig.SHAPE, look_limit_s=LIMIT_S)
    remote = RemoteTiers(settings, KEYS, tracer=traced.tracers["worker"])
    try:
        remote.set_vaults([vault.address])
        ready(remote)
        names = names_of(3)
        vault.store.add(names)
        look(remote, names, CONTEXT)
        assert fetch(remote, names, CONTEXT) == 3
        monkeypatch.setattr(handshake_bytes, "NEWEST", 2)
        with connected(vault.server) as client, pytest.raises(DataPlaneError):
            client.has(rig.ROOT, [names[0].hash], False, soon(), CONTEXT)  # what it would have come to
    finally:
        remote.close()
        vault.server.close()
    assert [len(traced.spans()[name]) for name in ("look", "fetch")] == [1, 1]


def connected(server: DataPlaneServer) -> Any:
    client = DataPlaneClient.connect(server.addresses, KEYS, identity="me", expect="v0", same_host=True, timeout_s=5.0)
    return contextlib.closing(client)


def test_what_a_vaults_disk_brought_is_counted(tmp_path: Path) -> None:
    """In a life of the vault that has it on disk alone."""
    blocks, seen = chain(12), list[TracedRequest]()
    for life in ("writes", "reads"):
        disk = DiskStore(tmp_path / "disk", 4 * 2**20)
        found = disk.open()
        thread = DiskThread(disk)
        store = VaultStore(2**20, thread, on_disk=found)
        thread.start(store)
        server = DataPlaneServer(store, KEYS, "v0", unix_path=tmp_path / "v0.sock", on_traced=seen.append)
        server.start()
        with connected(server) as client:
            if life == "writes":
                put(client, blocks)
            else:
                statuses = client.get(
                    ROOT, hashes(blocks), False, lambda at, header: None, lambda *_: True, soon(), CONTEXT
                )
                assert len(statuses) == 12
                client.get(ROOT, hashes(blocks), False, lambda at, header: None, lambda *_: True, soon(), CONTEXT)
                assert get(client, hashes(blocks)) == [one.payload for one in blocks], "untraced: not told"
        server.close()
        thread.close(5.0)
        disk.close()
    assert [(one.kind, one.blocks, one.hits, one.from_disk) for one in seen] == [
        ("get", 12, 12, 12),
        ("get", 12, 12, 0),
    ]
    assert all(one.began_ns <= one.ended_ns and one.traceparent == CONTEXT and one.client == "me" for one in seen)


def test_without_a_tracer_listeners_are_told_nothing() -> None:
    assert recorder_of(NULL, Tier.VAULT) is None
