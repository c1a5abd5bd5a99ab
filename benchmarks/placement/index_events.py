"""Block operations a second that placement's index applies: from the bytes of a message to the index, digest included.

    python -m benchmarks.index_events [--quick]

The 64 workers of `_index_load` store 16 blocks and evict 16 in each event, a million blocks are indexed, and the index
is full: it evicts too. An operation is one block stored or removed. Every round is other events. The value is how many
operations are applied in the time of one of a plain Python dict (`_yardstick_placement`: a change is two), measured
after each round, the median of the rounds; operations a second stand beside it with the design's floor for them.
"""

from __future__ import annotations

from statistics import median

from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.placement._index_load import Load
from benchmarks.placement._index_ours import Ours
from benchmarks.placement._yardstick_placement import Yardstick

FLOOR = 1.4  # operations in the time of one of a dict
PER_S_FLOOR = 1_000_000  # the design's, of its machine: printed
EVENTS = 5_000  # of a round


def main() -> None:
    rounds = 5 if parse_quick(__doc__) else 25
    ours, yardstick = Ours(Load()), Yardstick()
    rates, ratios = [], []
    for number in range(rounds):
        rates.append(ours.apply(EVENTS))
        ratios.append(rates[-1] * yardstick.change_s() / 2)
        progress(f"round {number + 1} of {rounds}: {rates[-1]:,.0f} operations/s")
    value = median(ratios)
    finish(
        "index_events",
        round(value, 2),
        "block operations in the time of one of a plain Python dict",
        floor=FLOOR,
        ok=value >= FLOOR,
        rounds=spread(ratios),
        per_s=spread(rates),
        per_s_floor=PER_S_FLOOR,
        evicted_by_the_index=ours.indexer.index.given_up_total,
    )


if __name__ == "__main__":
    main()
