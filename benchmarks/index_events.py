"""Block operations a second that placement's index applies: from the bytes of a message to the index, digest included.

    python -m benchmarks.index_events [--quick]

The 64 workers of `_index_load` store 16 blocks and evict 16 in each event, a million blocks are indexed, and the index
is full: it evicts too. An operation is one block stored or removed. Every round is other events; the figure is the
median of the rounds.
"""

from __future__ import annotations

from statistics import median

from benchmarks._index_load import Load
from benchmarks._index_ours import Ours
from benchmarks._report import finish, parse_quick, progress, spread

FLOOR = 1_000_000
EVENTS = 5_000  # of a round


def main() -> None:
    rounds = 5 if parse_quick(__doc__) else 25
    ours = Ours(Load())
    rates = []
    for number in range(rounds):
        rates.append(ours.apply(EVENTS))
        progress(f"round {number + 1} of {rounds}: {rates[-1]:,.0f} operations/s")
    rate = median(rates)
    finish(
        "index_events",
        round(rate),
        "block operations/s",
        floor=FLOOR,
        ok=rate >= FLOOR,
        rounds=spread(rates),
        evicted_by_the_index=ours.indexer.index.given_up_total,
    )


if __name__ == "__main__":
    main()
