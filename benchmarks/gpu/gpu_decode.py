"""A decode step of many streams, against the copy rate of the device's memory.

    python -m benchmarks.gpu_decode [--quick] [--dry]

64 streams at 2,000 tokens of a Qwen2.5-7B shape (random weights, bf16). The value is the bytes that such a step must
read, weights once and each stream's K and V, over its time, as a share of what a large copy within the device reads
and writes a second. The step is a worker's, from slices to drawn tokens.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu._gpu import BLOCK, begin, copy_rate, end, load
from benchmarks.harness.report import progress
from kvproto.messages import Sampling
from kvsampling.draw import Draw

NAME, UNIT, FLOOR, PEER = "gpu_decode", "of the copy rate", 0.6, "one large copy within the device"
STREAMS, CONTEXT, COPIED = 64, 2000, 8 * 2**30


def main() -> None:
    asked = begin(NAME, UNIT, floor=FLOOR, peer=PEER, doc=__doc__)
    streams, context = (3, 40) if asked.dry else (STREAMS, CONTEXT)
    rounds = 3 if asked.quick or asked.dry else 20
    bench = load(streams * (-(-(context + 1) // BLOCK)), dry=asked.dry, graphs=streams)
    greedy = Draw(Sampling(1, temperature=0.0), 0, 0)
    step_s = bench.seconds(partial(bench.runner.run, bench.slices(context, 1, [greedy] * streams)), rounds)
    read = (bench.linear + bench.head) * bench.number_bytes + streams * (context + 1) * bench.kv_token_bytes
    rate = copy_rate(bench, 2**20 if asked.dry else COPIED, rounds)
    progress(f"{step_s * 1e3:.2f} ms a step, {read / 1e9:.2f} GB read; a copy: {rate / 1e9:.0f} GB/s")
    value = read / step_s / rate
    end(
        asked, NAME, value, UNIT, floor=FLOOR, peer=PEER, ok=value >= FLOOR,
        step_ms=round(step_s * 1e3, 3), tokens_per_s=round(streams / step_s),
    )  # fmt: skip


if __name__ == "__main__":
    main()
