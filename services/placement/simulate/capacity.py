"""How fast a trace may come: the arrival rate at which the simulated fleet is just busy all the time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from kvfleet.placement.simulate.sim_worker import Speed
from kvfleet.placement.simulate.trace import Trace

PARTS = 4  # of a trace, each as long
FASTEST = 1e9  # times: nothing that is to be done takes any time


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


def busiest_speed(trace: Trace, workers: int, speed: Speed, attainable: Sequence[int]) -> float:
    """The same in the part of the trace where that is least: what is attainable, here by request, may be much while all
    contexts are short and nothing has been pushed out yet, and little later on. Of the mean of both a fleet could do
    nine tenths only by falling behind at the end."""
    part_s = max(trace.duration_s, 1e-9) / PARTS
    found = list(zip(trace.arrivals, attainable, strict=True))
    speeds = []
    for part, members in groupby(found, lambda one: min(int(one[0].at_s / part_s), PARTS - 1)):
        arrivals, hits = zip(*members, strict=True)
        alone = replace(trace, arrivals=tuple(replace(one, at_s=one.at_s - part * part_s) for one in arrivals))
        speeds.append(capacity_speed(alone, workers, speed, sum(hits)))
    return min(speeds)
