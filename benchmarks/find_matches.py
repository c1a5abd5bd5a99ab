"""How long it takes to know who has how much of a prompt: the longest match of all of 64 workers, 1 M blocks indexed.

    python -m benchmarks.find_matches [--quick]

The index hears the load of `_index_load`, events between look-ups included: it is full, and memory is as cold as in a
running placement. Each number is a median over prompts that somebody holds something of, each answer compared with what
the load knows; that with the fifth of misses, which take less, is reported beside it.

| form | from, to |
| --- | --- |
| arrays | `depths`, which placement calls: hashes as an array, blocks in every tier by worker |
| bytes | `find_matches`: hashes as a list of bytes, for each worker that has some its blocks |

Both with all blocks in one tier, and with each worker's share of a prompt on device and host and some of it in vaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks._index_load import DISTINCT, LENGTHS, Load, p50
from benchmarks._index_ours import NAMES, Ours
from benchmarks._report import finish, parse_quick, progress
from services.placement.index.prefix_index import Depths, Hashes, pack

FLOORS_US = {(128, 8): 40.0, (1_904, 8): 100.0, (128, 64): 60.0, (1_904, 64): 400.0}  # blocks, distinct depths


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    floor: float
    hits_us: float
    all_us: float

    def report(self) -> dict[str, Any]:
        return {"hits_us": self.hits_us, "all_us": self.all_us, "floor": self.floor, "ok": self.hits_us <= self.floor}


def measure(tiers: int, prompts: int) -> list[Part]:
    load = Load(tiers=tiers)
    ours = Ours(load)
    names = tuple(NAMES)

    def by_tier(hashes: Hashes) -> Depths:
        return ours.indexer.depths(hashes, names)

    def deepest(depths: Depths) -> dict[str, int]:
        return {name: depth for name, depth in zip(names, depths[-1].tolist(), strict=True) if depth}

    find = ours.indexer.find_matches
    parts = []
    for length in LENGTHS:
        for distinct in DISTINCT:
            arrays = ours.find(load.prompts(length, distinct, prompts), by_tier, pack, deepest)
            plain = ours.find(load.prompts(length, distinct, prompts), find, list, dict)
            for form, (hits, every) in (("arrays", arrays), ("bytes", plain)):
                name = f"{length} blocks, {distinct} depths, {tiers} tier{'s' * (tiers > 1)}, {form}"
                part = Part(name, FLOORS_US[length, distinct], round(p50(hits) * 1e6, 1), round(p50(every) * 1e6, 1))
                progress(f"{name}: {part.hits_us} us")
                parts.append(part)
    return parts


def main() -> None:
    prompts = 200 if parse_quick(__doc__) else 1_000
    parts = [part for tiers in (1, 3) for part in measure(tiers, prompts)]
    nearest = max(parts, key=lambda part: part.hits_us / part.floor)
    finish(
        "find_matches",
        nearest.hits_us,
        "us p50",
        floor=nearest.floor,
        ok=all(part.hits_us <= part.floor for part in parts),
        nearest=nearest.name,
        parts={part.name: part.report() for part in parts},
    )


if __name__ == "__main__":
    main()
