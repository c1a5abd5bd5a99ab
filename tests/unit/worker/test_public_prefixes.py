"""Blocks of a public prefix are shared between tenants; what a worker's record says of them is what it uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import Transcript, make_engine

from kvproto import codec
from kvproto.block_hash import ForkedRoot
from kvproto.errors import InvalidRequest
from kvproto.messages import PublicPrefix, Sampling, WorkerRecord
from kvproto.tenant_roots import TenantRoots, public_prefix
from services.worker.bundle import MAX_PUBLIC_PREFIXES, read_bundle, read_public_prefixes
from services.worker.main import worker_record
from services.worker.model_folder import DEMO_FOLDER
from services.worker.sequence import SequenceSpec
from services.worker.settings import WorkerSettings

SYSTEM = tuple(range(1, 9))  # two blocks of four
TEXT = "Thou art a gentle and a courteous knight, and all the court doth love thee well, my lord of Gloucester."


def test_the_engine_shares_the_public_blocks_between_tenants_and_no_more() -> None:
    engine = make_engine(block_size=4)
    ids = (*SYSTEM, 50, 51, 52, 53, 54)
    roots = TenantRoots("r", 4, [public_prefix(SYSTEM)], b"key")

    def run(request: str, tenant: str) -> int:
        sampling = Sampling(6, temperature=0.0)
        engine.add(SequenceSpec(request, 0, ids, sampling, roots.of(tenant, ids)))
        transcript = Transcript().run(engine)
        return transcript.started[request, 0].cached_tokens

    assert run("r1", "a") == 0
    assert run("r2", "b") == len(SYSTEM), "the system prompt, not what tenant a asked"
    assert run("r3", "a") == len(ids) - 1
    engine.check_integrity()


def test_a_record_says_what_its_bundle_has() -> None:
    bundle = read_bundle(
        DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16, public_prefixes=[TEXT, "short"]
    )
    record = worker_record(WorkerSettings(id="w", runner="fake"), "w", "demo", bundle)
    (ids,) = bundle.public_prefixes
    assert record.public_prefixes == (public_prefix(ids),)
    roots = TenantRoots(record.model_revision, record.block_size, record.public_prefixes, b"")
    root = roots.of("a", (*ids, 1, 2, 3))
    assert isinstance(root, ForkedRoot)
    assert root.blocks == len(ids) // 16


def test_no_more_of_them_than_a_record_carries(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.json"
    path.write_text(json.dumps([TEXT] * MAX_PUBLIC_PREFIXES))
    assert len(read_public_prefixes(path)) == MAX_PUBLIC_PREFIXES
    path.write_text(json.dumps([TEXT] * (MAX_PUBLIC_PREFIXES + 1)))
    with pytest.raises(InvalidRequest, match="256 texts at most") as caught:
        read_public_prefixes(path)
    assert caught.value.field == "public_prefixes_file"
    bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
    record = worker_record(WorkerSettings(id="w", runner="fake"), "w", "demo", bundle)
    full = replace(record, public_prefixes=(PublicPrefix(16, bytes(16)),) * MAX_PUBLIC_PREFIXES)
    assert codec.decode(WorkerRecord, codec.encode(full)) == full
