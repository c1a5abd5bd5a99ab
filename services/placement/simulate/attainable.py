"""What a fleet could do at most: what one worker with all of its caches (LRU) would hit, and the arrival rate at which
it is just busy all the time. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvfleet.placement.simulate.fleet_shape import Speed
from kvfleet.placement.simulate.sim_cache import LruCache
from kvfleet.placement.simulate.trace import Trace

FASTEST = 1e9  # times: nothing that is to be done takes any time


def attainable_tokens(trace: Trace, cache_blocks: int) -> int:
    """Prompt tokens found in an LRU cache of so many blocks, requests one after the other."""
    return sum(attainable_by_request(trace, cache_blocks))


def attainable_by_request(trace: Trace, cache_blocks: int) -> Iterator[int]:
    cache = LruCache(cache_blocks)
    for arrival in trace.arrivals:
        depth = cache.match(arrival.ids)
        yield min(depth * trace.block_tokens, arrival.prompt_tokens - 1)
        cache.hold(arrival.ids)
        cache.let_go(arrival.ids)


def capacity_speed(trace: Trace, workers: int, speed: Speed, attainable: int) -> float:
    """How many times as fast as recorded the trace may come at most, if all that is attainable is hit.

    At capacity every step of a worker carries a chunk of some prompt beside the tokens of those that decode, so with n
    sequences decoding a step takes C/r + d(n) seconds, n is the arrival rate times output tokens times that, and
    prefill does C tokens a step. Solved by bisection.
    """
    duration = max(trace.duration_s, 1e-9)
    tokens = (sum(arrival.prompt_tokens for arrival in trace.arrivals) - attainable) / workers / duration
    outputs = sum(arrival.output_tokens for arrival in trace.arrivals) / workers / duration
    chunk_s = speed.chunk_tokens / speed.prefill_tokens_per_s

    def busy(times: float) -> float:
        if outputs * times * speed.decode_each_s >= 1:
            return float("inf")
        # n = o (c + b + e n), so n = o (c + b) / (1 - o e)
        rate = outputs * times
        decoding = rate * (chunk_s + speed.decode_base_s) / (1 - rate * speed.decode_each_s)
        if decoding > speed.slots:
            return float("inf")
        step_s = chunk_s + speed.decode_s(round(decoding))
        return tokens * times * step_s / speed.chunk_tokens

    low, high = 0.0, 1.0
    while busy(high) < 1 and high < FASTEST:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(middle) < 1 else (low, middle)
    return low
