"""What each worker could have of a prompt, tier by tier, and what a request would cost there, in seconds. Pure but for
what they fill. Loops for Numba: array operations take ten times as long. `policies/cost.py` explains the terms.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import math

import numpy as np
from numba import njit

from kvfleet.placement.index.entry_kernels import kernel
from kvfleet.placement.workers.prompts import COOLS_S

# The rows of `Workloads`, one number per worker each.
(
    RATE,  # prefill tokens/s, as reported; 0: not measured
    RATE_AT,  # when it was last another one
    BACKLOG,  # prompt tokens queued, as of AT
    AT,  # when the fluid rows (BACKLOG, RECENT) were last set
    REQUESTS,  # waiting, running and booked
    SLOTS,  # requests that can run at once
    STAY,  # seconds from start to end of a request
    RECENT,  # prompt tokens given lately, as of AT
    CREDIT,  # share of its indexed blocks that is believed
    TOKEN_BYTES,  # of K and V, as restored
    BLOCKS_USED,
    BLOCKS,
    BLOCK_TOKENS,
    TOKEN_S,  # seconds per decoded token, all its sequences together; 0: not measured
    STEP_S,  # seconds per decode step; 0: not measured
    OUTPUT,  # tokens that a request generates
    AHEAD,  # part of BACKLOG before a request of the view's priority; set in views
    AHEAD_REQUESTS,  # the same part of REQUESTS
    RESTORE,  # from here on: bytes/s from each tier, as measured; 0: not measured
) = range(19)
LOAD_ROWS = RESTORE + 4
NEVER_NEGATIVE = [RATE, BACKLOG, REQUESTS, SLOTS, STAY, RECENT, CREDIT, STEP_S, OUTPUT]

TERMS = ("queue", "slot", "step", "fetch", "prefill", "copy", "harm")
QUEUE, SLOT, STEP, FETCH, PREFILL, COPY, HARM = range(7)
TTFT_TERMS = QUEUE, SLOT, FETCH, PREFILL
COST = 7  # their sum
RESTORED = 8  # from this row on: tokens from each tier below the device
ROWS = 11

DEVICE, HOST, VAULT, PEER = range(4)  # rows of what is matched, and from RESTORE on

UNMEASURED_RATE = 1000.0  # prefill tokens/s of a fleet without measurements
RECENT_S = 60.0
ALIKE = 0.25  # share of the mean by which rates differ by chance
FORGIVEN_S = 120.0  # a low rate counts e times as much after so long without a measurement
COPY_S = 0.5  # that a request may wait so that others find a copy


@njit
def fill(depths, groups, credit, pooled, size, most, indexed, believed):
    """Fills `indexed` and `believed` `[4, candidates]`, at most `most` tokens each. `depths` `[3, asked]` are blocks of
    `size` tokens of the candidates, then of workers that only give. Those in one of the `groups` `[asked]`, -1 is none,
    can pull device and host blocks from one another. A share `credit` `[asked]` of a worker's blocks is believed, and
    all of the `pooled` blocks that vaults have from the start."""
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


@kernel
def _of_all(values):
    """Mean rate, how many measured one, mean stay, and what a sequence adds to a decode step: at most the least time of
    a decoded token anywhere, as with few sequences most of a step is not theirs. The mean rate is harmonic, so that one
    absurdly fast worker does not make the others look fast."""
    seconds, measured, stays, stayed, token_s = 0.0, 0, 0.0, 0, np.inf
    for worker in range(values.shape[1]):
        if values[RATE, worker] > 0:
            seconds += 1 / values[RATE, worker]
            measured += 1
        if values[STAY, worker] > 0:
            stays += values[STAY, worker]
            stayed += 1
        if 0 < values[TOKEN_S, worker] < token_s:
            token_s = values[TOKEN_S, worker]
    rate = measured / seconds if measured else UNMEASURED_RATE
    return rate, measured, stays / stayed if stayed else 0.0, token_s if token_s < np.inf else 0.0


@kernel
def _comparable(rate, measured_at, mean, now):
    """A missing rate, or one within a quarter of the mean, is taken for the mean: measurements of equal machines differ
    so, and the slower one must not stay idle for it. A lower one comes up to the mean with time: else one bad
    measurement would keep all work, and so any better one, away."""
    if rate <= 0 or abs(rate - mean) <= ALIKE * mean:
        return mean
    if rate < mean:
        return min(mean, rate * math.exp(min((now - measured_at) / FORGIVEN_S, 50.0)))
    return rate


@kernel
def _until_served(values, worker, rate, idle):
    """Seconds until the work ahead has been prefilled."""
    return max(values[AHEAD, worker] / rate - idle, 0.0)


@kernel
def _until_slot(values, worker, mean_stay):
    """Seconds until a slot is free: they become free one by one. A request stays at least as long as its output's steps
    take, where those have become slower."""
    slots = values[SLOTS, worker]
    ahead = values[AHEAD_REQUESTS, worker] - slots + 1
    if slots <= 0 or ahead <= 0:
        return 0.0
    stay = values[STAY, worker] if values[STAY, worker] > 0 else mean_stay
    return ahead * max(stay, values[OUTPUT, worker] * values[STEP_S, worker]) / slots


@kernel
def _recent(values, worker, now):
    """Tokens to prefill given in about the last minute."""
    return values[RECENT, worker] * math.exp(-(now - values[AT, worker]) / RECENT_S)


@kernel
def _uses(values, worker, heat, now):
    """How many of the `heat` requests that part ways at its end will find a copy there: all where the cache keeps
    everything, or its size is not known. Else the copy lasts until no request comes for as long as new work takes to
    fill the room that running sequences leave: e^(rate * time) - 1 of random requests come before such a gap."""
    if values[BLOCKS, worker] <= 0:
        return heat
    room = max(values[BLOCKS, worker] - values[BLOCKS_USED, worker], 0.0) * values[BLOCK_TOKENS, worker]
    filled = _recent(values, worker, now) * COOLS_S / RECENT_S  # in the time that heat counts
    if room >= filled:
        return heat
    return min(heat, math.expm1(min(heat * room / filled, 50.0)))


@kernel
def waits(values, now, out):
    """Fills `out` `[workers]`: seconds until a request would be begun there; without measured rates, until a slot."""
    mean, measured, stay, _ = _of_all(values)
    for worker in range(values.shape[1]):
        out[worker] = _until_slot(values, worker, stay)
        if measured:
            rate = _comparable(values[RATE, worker], values[RATE_AT, worker], mean, now)
            out[worker] += _until_served(values, worker, rate, now - values[AT, worker])


@kernel
def price(values, matched, tokens, heat, now, others, busy, out):
    """Fills `out` `[11, workers]`: the terms, their sum, and tokens restored from each tier. `values` are
    `[22, workers]`, `matched` `[4, workers]` tokens in the tier or a faster one. A peer's blocks begin with the chain's
    first, a vault's where the worker's own end."""
    mean, _, mean_stay, token_s = _of_all(values)
    least = np.inf
    for worker in range(values.shape[1]):
        rate = _comparable(values[RATE, worker], values[RATE_AT, worker], mean, now)
        idle = now - values[AT, worker]
        out[QUEUE, worker] = _until_served(values, worker, rate, idle)
        out[SLOT, worker] = _until_slot(values, worker, mean_stay)
        out[STEP, worker] = values[REQUESTS, worker] * token_s
        fetch = 0.0
        prefill = (tokens - matched[DEVICE, worker]) / rate
        fetched, end = 0.0, matched[DEVICE, worker]  # seconds, and where they end, in order
        fetched_here, end_here = fetched, end  # without vaults
        out[RESTORED:, worker] = 0.0
        from_host = from_vault = 0.0
        for tier in range(HOST, PEER + 1):  # costs are linear between the tiers' ends: an end is cheapest
            speed, reach = values[RESTORE + tier, worker], matched[tier, worker]
            if speed <= 0 or values[TOKEN_BYTES, worker] <= 0:
                continue  # never measured: no choice
            if tier == PEER and reach > matched[VAULT, worker] and speed > values[RESTORE + VAULT, worker]:
                fetched, end, from_vault = fetched_here, end_here, 0.0  # a peer that has more has that too
            more = reach - end
            if more > 0:
                fetched, end = fetched + more * values[TOKEN_BYTES, worker] / speed, reach
                if tier == HOST:
                    from_host = more
                elif tier == VAULT:
                    from_vault = more
                rest = (tokens - reach) / rate
                if fetched + rest < fetch + prefill:
                    fetch, prefill = fetched, rest
                    out[RESTORED, worker], out[RESTORED + 1, worker] = from_host, from_vault
                    out[RESTORED + 2, worker] = more if tier == PEER else 0.0
            if tier == HOST:
                fetched_here, end_here = fetched, end
        out[FETCH, worker], out[PREFILL, worker] = fetch, prefill
        out[HARM, worker] = others + busy * _recent(values, worker, now) / (rate * RECENT_S)
        least = min(least, prefill)
    for worker in range(values.shape[1]):
        copied = out[PREFILL, worker] - least
        uses = _uses(values, worker, heat, now)
        out[COPY, worker] = 0.0 - min(copied, COPY_S) * uses / (1 + uses)
        out[HARM, worker] *= least + copied / (1 + uses)
        cost = 0.0
        for term in range(COST):
            cost += out[term, worker]
        out[COST, worker] = cost


@kernel
def cheapest(prices, held, tokens, keeps, near_s, near_share, equals):
    """The cheapest worker of `prices` (as `price` fills them), and how many cost about as much, listed in `equals`
    `[workers]`: with `keeps`, only the one with most `held` tokens if those are half of the prompt."""
    count = prices.shape[1]
    number = 0
    for worker in range(count):
        if prices[COST, worker] < prices[COST, number]:
            number = worker
    limit = prices[COST, number] * (1 + near_share) + near_s
    most = 0.0
    for worker in range(count):
        if prices[COST, worker] <= limit:
            most = max(most, held[worker])
    least = most if keeps and 2 * most >= tokens > 0 else 0.0
    found = 0
    for worker in range(count):
        if prices[COST, worker] <= limit and held[worker] >= least:
            equals[found] = worker
            found += 1
    return (equals[0] if found == 1 else number), found
