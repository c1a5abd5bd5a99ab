"""What vLLM tells of its blocks, as it tells it (notes of 0.32), and what follows for ours."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks, root_of_salt, salt_of_root
from kvproto.block_hash import chain, root, tenant_salt
from kvproto.messages import BlockRun, Tier, TierEvents

ROOT = root("model", 16, tenant_salt(b"fleet", "acme"))
IDS = list(range(96))
OURS = chain(ROOT, IDS, 16)
NAMES = [b"a" * 32, b"b" * 32, b"c" * 32]  # of blocks of 32


def stored(names: list[Any], ids: list[int], parent: Any = None, salt: Any = None, **more: Any) -> dict[str, Any]:
    keys: list[Any] = [None] * len(names)
    if parent is None:
        keys[0] = [salt_of_root(ROOT) if salt is None else salt]
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": ids}
    usual = {"block_size": 32, "medium": "GPU", "extra_keys": keys, "group_idx": 0}
    return event | usual | {"kv_cache_spec_kind": "full_attention"} | more


def removed(*names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0} | more


def added(parent: bytes, *hashes: bytes) -> TierEvents:
    return TierEvents(Tier.DEVICE, False, (BlockRun(parent, hashes),))


def gone(*hashes: bytes) -> TierEvents:
    return TierEvents(Tier.DEVICE, True, (BlockRun(b"", hashes),))


def test_one_of_theirs_is_two_of_ours() -> None:
    blocks = ForeignBlocks(16)
    assert blocks.apply([stored(NAMES, IDS)]) == [added(ROOT, *OURS)]
    assert blocks.hashes() == OURS
    assert blocks.apply([removed(NAMES[2])]) == [gone(OURS[5], OURS[4])]
    assert blocks.hashes() == OURS[:4]


def test_a_block_that_fills_later_goes_on_from_its_parent() -> None:
    blocks = ForeignBlocks(16)
    blocks.apply([stored(NAMES[:2], IDS[:64])])
    assert blocks.apply([stored(NAMES[2:], IDS[64:], parent=NAMES[1])]) == [added(OURS[3], *OURS[4:])]


def test_what_continues_a_block() -> None:
    blocks = ForeignBlocks(16)
    blocks.apply([stored(NAMES, IDS), stored([b"d" * 32], IDS[:32], parent=NAMES[0]), stored([b"e" * 32], IDS[32:64])])
    assert sorted(blocks.continuations(OURS[1])) == [*NAMES, b"d" * 32]
    assert sorted(blocks.continuations(OURS[0])) == [*NAMES, b"d" * 32], "inside the first"
    assert blocks.continuations(OURS[4]) == [NAMES[2]]
    assert blocks.continuations(b"x" * 16) == []


def test_integers_name_blocks_as_well() -> None:
    blocks = ForeignBlocks(16)
    blocks.apply([stored([7], IDS[:32]), stored([2**63], IDS[32:64], parent=7)])
    assert blocks.hashes() == OURS[:4]


def test_a_second_copy_is_no_change_and_its_end_is_none() -> None:
    blocks = ForeignBlocks(16)
    blocks.apply([stored(NAMES, IDS)])
    assert blocks.apply([stored(NAMES[:1], IDS[:32])]) == []
    assert blocks.apply([removed(NAMES[0])]) == []
    assert blocks.apply([removed(NAMES[0])]) == [gone(OURS[1], OURS[0])]
    assert blocks.apply([removed(NAMES[0])]) == []


def test_tenants_do_not_meet() -> None:
    other = root("model", 16, tenant_salt(b"fleet", "other"))
    blocks = ForeignBlocks(16)
    blocks.apply([stored(NAMES, IDS), stored([b"d" * 32], IDS[:32], salt=salt_of_root(other))])
    assert blocks.hashes() == OURS + chain(other, IDS[:32], 16)


@pytest.mark.parametrize(
    "event",
    [
        stored(NAMES[2:], IDS[64:], parent=b"unknown"),
        stored(NAMES, IDS, salt="no root"),
        stored(NAMES, IDS, salt="z" * 32),
        stored(NAMES, IDS, extra_keys=None),
        stored(NAMES, IDS, extra_keys=[None, None, None]),
        stored(NAMES, IDS[:-1]),  # ids that skip a block of a hybrid model
        stored(NAMES[:2], IDS[:48], block_size=24),
    ],
)
def test_what_has_no_name_of_ours_is_left_out_and_counted(event: dict[str, Any]) -> None:
    blocks = ForeignBlocks(16)
    assert blocks.apply([event, removed(*event["block_hashes"])]) == []
    assert blocks.left_out_total == len(event["block_hashes"])
    assert blocks.hashes() == []


def test_of_a_hybrid_model_one_dense_group_is_followed() -> None:
    blocks = ForeignBlocks(16)
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    dense, second = {"group_idx": 1}, {"group_idx": 2}
    changes = blocks.apply([stored(NAMES, IDS, **window), stored(NAMES, IDS, **dense), stored(NAMES, IDS, **second)])
    assert changes == [added(ROOT, *OURS)]
    assert blocks.apply([removed(NAMES[2], group_idx=0), removed(NAMES[2], group_idx=2)]) == []
    assert blocks.apply([removed(NAMES[2], group_idx=1)]) == [gone(OURS[5], OURS[4])]


def test_other_media_are_not_the_device() -> None:
    blocks = ForeignBlocks(16)
    assert blocks.apply([stored(NAMES, IDS, medium="CPU")]) == []
    blocks.apply([stored(NAMES, IDS)])
    assert blocks.apply([removed(NAMES[0], medium="CPU")]) == []


def test_cleared_is_all_gone_and_a_parent_from_before_is_unknown() -> None:
    blocks = ForeignBlocks(16)
    blocks.apply([stored(NAMES[:2], IDS[:64])])
    assert blocks.apply([{"type": "AllBlocksCleared"}]) == [gone(*OURS[:4])]
    assert blocks.apply([{"type": "AllBlocksCleared"}]) == []
    assert blocks.apply([stored(NAMES[2:], IDS[64:], parent=NAMES[1])]) == []


@pytest.mark.parametrize("event", [{}, {"type": "BlockStored"}, {"type": "BlockStored", "block_hashes": 5}])
def test_an_event_of_another_form_is_an_error(event: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        ForeignBlocks(16).apply([event])


@pytest.mark.parametrize("salt", [None, 5, "", "ff", "zz" * 16, "ff" * 17])
def test_only_a_root_is_a_root(salt: object) -> None:
    assert root_of_salt(salt) is None


def test_changes_lead_to_what_is_held_whatever_is_told() -> None:
    """A listener that adds and removes has the same blocks as a snapshot."""
    chooser = random.Random(5)
    blocks, held, listening = ForeignBlocks(16), [], set()
    prompts = [[chooser.randrange(3) for _ in range(128)] for _ in range(8)]
    for _ in range(2000):
        if held and chooser.random() < 0.5:
            event = removed(held.pop(chooser.randrange(len(held))))
        else:
            ids = chooser.choice(prompts)
            count = chooser.randrange(1, 5)
            names = [bytes(str(ids[: 32 * (at + 1)]), "ascii") for at in range(count)]
            held += names
            event = stored(list(names), ids[: 32 * count])
        for change in blocks.apply([event]):
            for run in change.runs:
                for one in run.hashes:
                    assert (one in listening) == change.removed
                    (listening.remove if change.removed else listening.add)(one)
        assert listening == set(blocks.hashes())
