"""What a fake fleet of any size holds: prompts that many workers share to some depth, a chain of each worker's own.

Pure, and the same in the fleet's processes and in the one that asks: all from numbers, no state.

| chain | blocks | held by |
| --- | --- | --- |
| prompt p | 128 | 1 worker of so many as `share` says, to one of 8 depths |
| own chain of worker w | 128 | w alone, half of it at first and all of it once told to grow |
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from kvproto import block_hash

BLOCKS, BLOCK_SIZE, VOCABULARY = 128, 16, 128_256
PROMPTS, DEPTHS = 100, 8
MODEL, REVISION, TENANT, FLEET_KEY = "demo", "r1", "public", "benchmark"
ROOT = block_hash.root(REVISION, BLOCK_SIZE, block_hash.tenant_salt(FLEET_KEY.encode(), TENANT))
PROMPT_SHARE = 0.4  # of a worker's blocks, at most, are prompts'


def ids(name: str) -> tuple[int, ...]:
    return tuple(Random(name).choices(range(VOCABULARY), k=BLOCKS * BLOCK_SIZE))


def prompt_ids(prompt: int) -> tuple[int, ...]:
    return ids(f"prompt {prompt}")


def own_ids(worker: int) -> tuple[int, ...]:
    return ids(f"own {worker}")


@lru_cache(maxsize=PROMPTS)
def prompt_hashes(prompt: int) -> list[bytes]:
    return block_hash.chain(ROOT, prompt_ids(prompt), BLOCK_SIZE)


def own_hashes(worker: int) -> list[bytes]:
    return block_hash.chain(ROOT, own_ids(worker), BLOCK_SIZE)


def held_prompts(worker: int, blocks: int) -> list[tuple[int, int]]:
    """Prompt and depth of those that a worker with room for `blocks` has."""
    several = min(PROMPTS, int(blocks * PROMPT_SHARE / (BLOCKS / 2)))
    numbers = [(worker * 7 + nth) % PROMPTS for nth in range(several)]
    return [(number, _depths(number)[worker % DEPTHS]) for number in numbers]


@lru_cache(maxsize=PROMPTS)
def _depths(prompt: int) -> list[int]:
    return Random(prompt).sample(range(1, BLOCKS), DEPTHS)


def name_of(worker: int) -> str:
    return f"w-{worker:04}"
