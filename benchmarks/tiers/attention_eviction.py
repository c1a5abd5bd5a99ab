"""Which cached block goes first: seconds of prompts that are computed again, by `--eviction reuse` and by attention.

    python -m benchmarks.attention_eviction [--quick]

One worker's block pool is given six shapes of requests, one after the other, with room for a 20th, an eighth and a
quarter of their blocks. Of each policy the seconds count that prompts take, at the demo model's arithmetic: its
products, and attention that grows with the position. `value` is the worst ratio to least recently used first, of all
seconds; of each cell `recomputed` is that of what was computed before, which a pool without an end would have had.

Attention is measured on text that the demo model wrote (`_attended`), where documents are read once beside chats: once
as a policy by itself (`attention`; `reads` counts each read as one), once as a further mark of the kinds that `reuse`
learns of (`reuse_and_attention`; `reuse_and_shuffled` gives a turn's attention to its blocks at random). `overhead` is
what the policy's own work takes, beyond LRU's, as a share of the model's seconds on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

import kvfleet.worker
from benchmarks.engine._engine import NO_HURRY, Ours, fresh_prompts
from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.tiers._attended import AttendedReuse, AttentionAlone, AttentionMeter, Masses
from benchmarks.tiers._eviction_turns import BLOCK, ROOT, CacheTurn, turns_of
from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.eviction.base import EvictionPolicy
from kvfleet.worker.eviction.lru import LruEviction
from kvfleet.worker.eviction.reuse import ReuseEviction

NAME = "attention_eviction"
FOLDER = Path(kvfleet.worker.__file__).parent / "model" / "demo_model"
SHARES = (20, 8, 4)
SHAPES = ("read_once", "documents", "chats", "tree", "agents", "shift")
ATTENDED, QUICK_ATTENDED = 400, 200  # requests of `read_once` whose attention is measured
REQUESTS, QUICK_REQUESTS = 700, 300
FLOOR, READ_ONCE_FLOOR = 1.02, 0.9
PASSAGES, PASSAGE = 32, 256  # tokens that the model writes
WEIGHTS, PER_POSITION = 4_689_152 * 2, 4 * 6 * 4 * 64  # floating-point operations of a token


def seconds_at(rate: float) -> Callable[[int, int], float]:
    return lambda position, tokens: tokens * (WEIGHTS + PER_POSITION * (position + tokens / 2)) / rate


def serve(
    turns: Sequence[CacheTurn], policy: EvictionPolicy, blocks: int, seconds: Callable[[int, int], float],
    masses: Sequence[Masses] = (),
) -> tuple[float, float]:  # fmt: skip
    """Seconds of prompts, and those that the books took."""
    pool, took, began = BlockPool(blocks, BLOCK, policy), 0.0, time.process_time()
    for number, turn in enumerate(turns):
        ids, hashes = turn.ids, turn.hashes
        match = pool.match(ROOT, hashes, ids, turn.prompt - 1)
        cached = len(match.blocks)
        pool.asked(hashes, (turn.prompt - 1) // BLOCK, cached)
        pool.acquire(match.blocks)
        held = match.blocks + pool.allocate(pool.blocks_for(len(ids)) - cached)
        for at in range(cached, len(hashes)):
            held[at] = pool.fill(held[at], ROOT, hashes, at, ids[at * BLOCK : (at + 1) * BLOCK])
        if len(ids) % BLOCK:
            pool.keep_tail(held[-1], ROOT, hashes, len(hashes), ids[len(hashes) * BLOCK :])
        if isinstance(policy, AttendedReuse):
            policy.attended(held, masses[number])
        pool.release(held)
        took += seconds(match.tokens, turn.prompt - match.tokens)
    return took, time.process_time() - began


def written(ours: Ours) -> tuple[list[int], float]:
    """What the model writes after random words, and how many operations a second its prompts run at."""
    ours.sampling = replace(ours.sampling, temperature=1.0)
    prompts = fresh_prompts(Random(5), PASSAGES, 32, ours.vocab_size)
    text = [token for passage in ours.generate(prompts, PASSAGE).tokens for token in passage]
    began = time.process_time()
    ours.generate(fresh_prompts(Random(6), 4, 1000, ours.vocab_size), 1)
    return text, 4 * seconds_at(1.0)(0, 1000) / (time.process_time() - began)


def compare(
    name: str, turns: Sequence[CacheTurn], share: int, seconds: Callable[[int, int], float],
    cells: dict[str, dict[str, float]], spent: list[float], masses: Sequence[Masses] = (),
) -> None:  # fmt: skip
    """Into `cells`. `spent`: seconds of the policy's books beyond LRU's, and of the model."""
    unique = len({block_hash for turn in turns for block_hash in turn.hashes})
    first, _ = serve(turns, LruEviction(), 2 * unique, seconds)
    blocks = max(unique // share, max(len(turn.ids) for turn in turns) // BLOCK + 8)
    lru, plain = serve(turns, LruEviction(), blocks, seconds)
    policies: dict[str, tuple[EvictionPolicy, Sequence[Masses]]] = {
        "reuse": (ReuseEviction(blocks, BLOCK, seconds), ())
    }
    if masses:
        chance = np.random.default_rng(0)
        shuffled, alike = [chance.permutation(one) for one in masses], [np.ones_like(one) for one in masses]
        policies["reuse_and_attention"] = AttendedReuse(blocks, BLOCK, seconds), masses
        policies["reuse_and_shuffled"] = AttendedReuse(blocks, BLOCK, seconds), shuffled
        policies["attention"] = AttentionAlone(blocks, BLOCK, seconds), masses
        policies["reads"] = AttentionAlone(blocks, BLOCK, seconds), alike
    cell = {"lru_s": round(lru, 2), "first_s": round(first, 2)}
    for policy_name, (policy, paid) in policies.items():
        took, books = serve(turns, policy, blocks, seconds, paid)
        if policy_name == "reuse":
            spent[0] += books - plain
            spent[1] += took
        cell[policy_name] = round(took / lru, 4)
        cell[f"{policy_name}_recomputed"] = round((took - first) / max(lru - first, 1e-9), 4)
    cells[name] = cell
    progress(f"{name}, {blocks} blocks: {cell}")


def main() -> None:
    quick = parse_quick(__doc__)
    requests, attended = (QUICK_REQUESTS, QUICK_ATTENDED) if quick else (REQUESTS, ATTENDED)
    corpus, rate = written(Ours(FOLDER, "float32", sequences=PASSAGES, context=PASSAGE + 64, itl_target_s=NO_HURRY))
    progress(f"{len(corpus)} tokens of text; {rate / 1e9:.1f} Gop/s")
    seconds, meter = seconds_at(rate), AttentionMeter(FOLDER)
    cells: dict[str, dict[str, float]] = {}
    spent = [0.0, 0.0]
    for shape in SHAPES:
        turns = turns_of(shape, requests, corpus)
        for share in SHARES:
            compare(f"{shape}, 1/{share}", turns, share, seconds, cells, spent)
    turns = turns_of("read_once", attended, corpus)
    masses = [meter.masses(turn) for turn in turns]
    progress(f"attention of {len(turns)} turns")
    for share in SHARES:
        compare(f"read_once with attention, 1/{share}", turns, share, seconds, cells, spent, masses)
    worst = max(cell["reuse"] for cell in cells.values())
    read_once = min(cell["reuse_recomputed"] for name, cell in cells.items() if name.startswith("read_once,"))
    finish(
        NAME,
        worst,
        "times the prompt seconds of LRU, at worst",
        floor=FLOOR,
        ok=worst <= FLOOR and read_once <= READ_ONCE_FLOOR,
        peer="the same pool, least recently used first",
        read_once_recomputed=read_once,
        read_once_floor=READ_ONCE_FLOOR,
        overhead=round(spent[0] / spent[1], 5),
        requests=requests,
        cells=cells,
    )


if __name__ == "__main__":
    main()
