"""How evenly the ring spreads: 4 workers, 5,000 sequences, largest share over mean, median of 100 sets of ids."""

from __future__ import annotations

import statistics
from collections import Counter

from benchmarks.harness.report import finish, parse_quick, progress
from kvproto.hash_ring import HashRing

WORKERS, SEQUENCES = 4, 5_000
FLOOR_PLAIN, FLOOR_BOUNDED = 1.15, 1.05


def spread(loads: Counter[str]) -> float:
    return max(loads.values()) * WORKERS / SEQUENCES


def plain(ring: HashRing) -> float:
    return spread(Counter(str(ring.owner(f"seq-{i}")) for i in range(SEQUENCES)))


def bounded(ring: HashRing) -> float:
    loads: Counter[str] = Counter()
    for i in range(SEQUENCES):
        loads[str(ring.bounded_owner(f"seq-{i}", loads, factor=1.05))] += 1
    return spread(loads)


def main() -> None:
    sets = 20 if parse_quick(__doc__) else 100
    rings = [HashRing(f"worker-{s}-{w}" for w in range(WORKERS)) for s in range(sets)]
    plains = statistics.median(map(plain, rings))
    progress(f"plain {plains:.3f}")
    boundeds = statistics.median(map(bounded, rings))
    progress(f"bounded {boundeds:.3f}")
    finish(
        "ring_balance",
        round(plains, 4),
        "largest share over mean",
        floor=FLOOR_PLAIN,
        ok=plains <= FLOOR_PLAIN and boundeds <= FLOOR_BOUNDED,
        bounded=round(boundeds, 4),
        bounded_floor=FLOOR_BOUNDED,
    )


if __name__ == "__main__":
    main()
