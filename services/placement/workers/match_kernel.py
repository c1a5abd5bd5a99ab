"""What each candidate could have of a prompt, tier by tier: one loop, for Numba. Pure but for what it fills."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvfleet.placement.workers.price_kernel import HOST, PEER, VAULT


@njit
def fill(depths, groups, credit, pooled, size, most, indexed, believed):
    """Fills `indexed` and `believed` `[4, candidates]`, at most `most` tokens each.

    `depths` `[3, asked]` are blocks of `size` tokens: of the candidates, and after them of others who only give. Who
    are in one of the `groups` `[asked]` can pull from one another what they hold on their device and host; -1 is none.
    Of what a worker is said to hold the share `credit` `[asked]` is believed; of what vaults have, `pooled` blocks from
    the start, all of it, for all that fetch it.
    """
    asked = depths.shape[1]
    most_indexed, most_believed = np.zeros(asked), np.zeros(asked)  # of each group
    for worker in range(asked):
        group = groups[worker]
        if group >= 0:
            held = min(depths[HOST, worker] * size, most)
            most_indexed[group] = max(most_indexed[group], held)
            most_believed[group] = max(most_believed[group], held * credit[worker])
    shared = min(pooled * size, most)
    for worker in range(indexed.shape[1]):
        for tier in range(PEER):
            held = min(depths[tier, worker] * size, most)
            indexed[tier, worker], believed[tier, worker] = held, held * credit[worker]
        believed[VAULT, worker] = max(believed[VAULT, worker], shared)
        indexed[PEER, worker], believed[PEER, worker] = indexed[VAULT, worker], believed[VAULT, worker]
        group = groups[worker]
        if group >= 0:
            indexed[PEER, worker] = max(indexed[PEER, worker], most_indexed[group])
            believed[PEER, worker] = max(believed[PEER, worker], most_believed[group])
