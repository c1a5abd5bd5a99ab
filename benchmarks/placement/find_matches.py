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

The value is the look-up that is nearest to its floor, in the time of one `probe` of `_yardstick_placement`: 64 look-ups
in a plain dict of a million, done between any two. Microseconds are of this machine, and stand beside the design's
floors for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.placement._index_load import DISTINCT, LENGTHS, Load, p50
from benchmarks.placement._index_ours import NAMES, Ours
from benchmarks.placement._yardstick_placement import Yardstick
from kvfleet.placement.index.prefix_index import Depths, Hashes, pack

FLOORS_US = {(128, 8): 40.0, (1_904, 8): 100.0, (128, 64): 60.0, (1_904, 64): 400.0}  # the design's, of its machine
FLOORS = {(128, 8): 0.8, (1_904, 8): 2.0, (128, 64): 1.0, (1_904, 64): 3.5}  # blocks, distinct depths: in probes


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    floor: float
    floor_us: float
    hits_us: float
    all_us: float
    probe_us: float

    @property
    def probes(self) -> float:
        return round(self.hits_us / self.probe_us, 3)

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"probes": self.probes, "ok": self.probes <= self.floor}


def measure(tiers: int, prompts: int) -> list[Part]:
    load = Load(tiers=tiers)
    ours = Ours(load)
    names, yardstick = tuple(NAMES), Yardstick()
    probes: list[float] = []

    def beside(form: Callable[[list[bytes]], Any]) -> Callable[[list[bytes]], Any]:
        """Before each look-up, outside of its time."""

        def formed(hashes: list[bytes]) -> Any:
            probes.append(yardstick.probe_s())
            return form(hashes)

        return formed

    def by_tier(hashes: Hashes) -> Depths:
        return ours.indexer.depths(hashes, names)

    def deepest(depths: Depths) -> dict[str, int]:
        return {name: depth for name, depth in zip(names, depths[-1].tolist(), strict=True) if depth}

    find = ours.indexer.find_matches
    parts = []
    for length in LENGTHS:
        for distinct in DISTINCT:
            probes.clear()
            arrays = ours.find(load.prompts(length, distinct, prompts), by_tier, beside(pack), deepest)
            plain = ours.find(load.prompts(length, distinct, prompts), find, beside(list), dict)
            probe_us = round(p50(probes) * 1e6, 1)
            for form, (hits, every) in (("arrays", arrays), ("bytes", plain)):
                name = f"{length} blocks, {distinct} depths, {tiers} tier{'s' * (tiers > 1)}, {form}"
                floor, floor_us = FLOORS[length, distinct], FLOORS_US[length, distinct]
                hits_us, all_us = round(p50(hits) * 1e6, 1), round(p50(every) * 1e6, 1)
                part = Part(name, floor, floor_us, hits_us, all_us, probe_us)
                progress(f"{name}: {hits_us} us, {part.probes} probes")
                parts.append(part)
    return parts


def main() -> None:
    prompts = 200 if parse_quick(__doc__) else 1_000
    parts = [part for tiers in (1, 3) for part in measure(tiers, prompts)]
    nearest = max(parts, key=lambda part: part.probes / part.floor)
    finish(
        "find_matches",
        nearest.probes,
        "time of 64 look-ups in a plain dict, p50",
        floor=nearest.floor,
        ok=all(part.probes <= part.floor for part in parts),
        nearest=nearest.name,
        parts={part.name: part.report() for part in parts},
    )


if __name__ == "__main__":
    main()
