"""Adapters in records, and in the roots of blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgpack

from kvproto import codec
from kvproto.block_hash import ForkedRoot, TenantRoots, chain, public_prefix
from kvproto.fleet_view import FleetView
from kvproto.messages import Adapter, State, WorkerRecord

RED, BLUE = Adapter("red", "r1"), Adapter("blue", "b1")
PLAIN = WorkerRecord("w1", "e", "l", State.READY, "m", "", "h", 1, (1, 1))
IDS = tuple(range(64))


def view_of(*records: WorkerRecord) -> FleetView:
    view = FleetView()
    for one in records:
        view.on_worker_record(one, 1, 0.0)
    return view


def ready(view: FleetView, model: str) -> list[str]:
    return [one.record.id for one in view.ready(model)]


def test_older_readers_ignore_them_and_older_writers_have_none() -> None:
    record = replace(PLAIN, adapters=(RED, BLUE))
    data = codec.encode(record)
    assert codec.decode(WorkerRecord, data) == record
    fields = msgpack.unpackb(data[1:])
    del fields["adapters"]
    assert codec.decode(WorkerRecord, data[:1] + msgpack.packb(fields)) == PLAIN


def test_a_name_is_served_where_it_is_loaded() -> None:
    view = view_of(PLAIN, replace(PLAIN, id="w2", adapters=(RED,)), replace(PLAIN, id="w3", adapters=(RED, BLUE)))
    assert {name: ready(view, name) for name in ("m", "red", "blue", "r1", "")} == {
        "m": ["w1", "w2", "w3"], "red": ["w2", "w3"], "blue": ["w3"], "r1": [], "": [],
    }  # fmt: skip
    assert {name: record.id for name, record in view.models().items()} == {"m": "w1", "red": "w2", "blue": "w3"}
    assert [view.knows(name) for name in ("m", "blue", "green")] == [True, True, False]


def test_a_load_and_an_unload_are_new_versions_of_the_view() -> None:
    """Rings are kept until there is one."""
    view = view_of(PLAIN)
    versions = [view.version]
    for adapters in ((RED,), (RED,), (replace(RED, revision="r2"),), ()):
        view.on_worker_record(replace(PLAIN, adapters=adapters), 2, 1.0)
        versions.append(view.version)
    assert [after - before for before, after in itertools.pairwise(versions)] == [1, 0, 1, 1]
    assert not view.knows("red")


def test_chains_of_adapters_never_meet() -> None:
    """By name and by what is in the files, the fork at a public prefix included."""
    public = [public_prefix(IDS[:32])]
    loras = ["", RED.lora, BLUE.lora, replace(RED, revision="r2").lora]
    for prefixes in ([], public):
        roots = [TenantRoots("r", 16, prefixes, b"key", lora) for lora in loras]
        assert isinstance(roots[1].of("a", IDS), ForkedRoot) == bool(prefixes)
        hashes = [block for one in roots for block in chain(one.of("a", IDS), IDS, 16)]
        assert len(set(hashes)) == len(loras) * 4
    again = TenantRoots("r", 16, [], b"key", RED.lora)
    assert again.of("a", IDS) == TenantRoots("r", 16, [], b"key", Adapter("red", "r1").lora).of("a", IDS)
    assert again.of("a", IDS) != again.of("b", IDS)


def test_the_roots_of_a_model_itself_are_as_they_were() -> None:
    assert TenantRoots("r", 16, [], b"key").of("a", IDS) == TenantRoots("r", 16, [], b"key", "").of("a", IDS)
