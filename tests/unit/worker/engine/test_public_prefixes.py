"""Blocks of a public prefix are shared between tenants; what a worker's record says of them is what it uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import Transcript, make_engine
from tokenizers import Tokenizer

from kvfleet.worker.backend import worker_record
from kvfleet.worker.engine.bundle import MAX_PUBLIC_PREFIXES, _whole_blocks, read_bundle, read_public_prefixes
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.settings import WorkerSettings
from kvproto import codec
from kvproto.block_hash import ForkedRoot, TenantRoots, chain, public_prefix
from kvproto.errors import InvalidRequest
from kvproto.messages import PublicPrefix, Sampling, WorkerRecord

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


def run_behind_a_public_prefix(blocks: int) -> tuple[Engine, ForkedRoot, tuple[int, ...]]:
    """Two public blocks and three of a tenant's own, idle."""
    engine = make_engine(blocks=blocks, block_size=4)
    ids, root = tuple(range(1, 21)), ForkedRoot(b"public root 16 b", b"tenant root 16 b", 2)
    engine.add(SequenceSpec("r", 0, ids, Sampling(1, temperature=0.0), root))
    Transcript().run(engine)
    assert engine.pool.index.addressed == 5
    return engine, root, ids


def test_a_tenants_own_blocks_go_before_the_public_ones_that_they_continue() -> None:
    engine, root, ids = run_behind_a_public_prefix(blocks=6)
    engine.pool.release(engine.pool.allocate(3))
    engine.check_integrity()
    assert engine.pool.index.depth(chain(root, ids, 4)) == 3, "the last two, both own ones, were evicted"
    assert engine.kv.erase(root, ids) == 1
    assert engine.pool.index.addressed == 2, "the public ones"
    engine.check_integrity()


def test_what_continues_a_wrong_public_block_goes_with_it() -> None:
    engine, root, ids = run_behind_a_public_prefix(blocks=8)
    hashes = chain(root, ids, 4)
    assert engine.pool.continuations(hashes[1]) == dict.fromkeys(hashes[2:], root.own)
    assert engine.pool.ancestry(hashes[4]) == engine.pool.chain_to(hashes)
    assert engine.pool.drop(hashes[1]) == 4
    assert engine.pool.index.hashes() == hashes[:1]
    engine.check_integrity()


def test_a_record_says_what_its_bundle_has() -> None:
    bundle = read_bundle(
        DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16, public_prefixes=[TEXT, "short"]
    )
    record = worker_record(WorkerSettings(id="w", runner="fake"), "w", bundle, 4)
    (ids,) = bundle.public_prefixes
    assert record.public_prefixes == (public_prefix(ids),)
    roots = TenantRoots(record.model_revision, record.block_size, record.public_prefixes, b"")
    root = roots.of("a", (*ids, 1, 2, 3))
    assert isinstance(root, ForkedRoot)
    assert root.blocks == len(ids) // 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT, "does not begin with '<|bos|>'"),
        ("<|bos|>" + TEXT, None),
        ("<|bos|>short", "is not shared: its "),
    ],
)
def test_a_text_that_no_prompt_will_share_is_said_at_registration(
    text: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """By the ids that an ingress makes of a prompt of /generate."""
    bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16, public_prefixes=[text])
    prompt = Tokenizer.from_str(bundle.tokenizer_json).encode(TEXT + " What next?", add_special_tokens=True).ids
    roots = TenantRoots(bundle.model_revision, 16, [public_prefix(ids) for ids in bundle.public_prefixes], b"")
    assert isinstance(roots.of("a", prompt), ForkedRoot) == (said is None)
    if said is None:
        assert not caplog.records
    else:
        assert f"public prefix 1 {said}" in caplog.text


@pytest.mark.parametrize("head", [None, "front", "both-ends", "end"])
def test_what_a_tokenizer_puts_around_prompts(head: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Some put nothing there, some a token at the end, as encoders do."""
    made = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    bos, own = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    around = {"front": [bos, own], "both-ends": [bos, own, bos], "end": [own, bos]}
    made["post_processor"] = None if head is None else made["post_processor"] | {"single": around[head]}
    assert _whole_blocks(json.dumps(made), [TEXT, "<|bos|>" + TEXT], 16)
    assert len(caplog.records) == (head in ("front", "both-ends"))


def test_no_more_of_them_than_a_record_carries(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.json"
    path.write_text(json.dumps([TEXT] * MAX_PUBLIC_PREFIXES))
    assert len(read_public_prefixes(path)) == MAX_PUBLIC_PREFIXES
    path.write_text(json.dumps([TEXT] * (MAX_PUBLIC_PREFIXES + 1)))
    with pytest.raises(InvalidRequest, match="256 texts at most") as caught:
        read_public_prefixes(path)
    assert caught.value.field == "public_prefixes_file"
    bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
    record = worker_record(WorkerSettings(id="w", runner="fake"), "w", bundle, 4)
    full = replace(record, public_prefixes=(PublicPrefix(16, bytes(16)),) * MAX_PUBLIC_PREFIXES)
    assert codec.decode(WorkerRecord, codec.encode(full)) == full
