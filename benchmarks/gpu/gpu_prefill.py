"""A prompt's prefill, against one large matrix product on the same device.

    python -m benchmarks.gpu_prefill [--quick] [--dry]

8,000 tokens of a Qwen2.5-7B shape (random weights, bf16) in one step. The value is the FLOPs that they need over the
step's time, as a share of those of an 8192^3 product a second.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu._gpu import BLOCK, begin, end, load, product_rate
from benchmarks.harness.report import progress
from kvproto.messages import Sampling
from kvsampling.draw import Draw

NAME, UNIT, FLOOR, PEER = "gpu_prefill", "of the product's rate", 0.5, "an 8192^3 product"
TOKENS, SIZE = 8000, 8192


def main() -> None:
    asked = begin(NAME, UNIT, floor=FLOOR, peer=PEER, doc=__doc__)
    tokens, size = (70, 64) if asked.dry else (TOKENS, SIZE)
    rounds = 3 if asked.quick or asked.dry else 9
    bench = load(-(-tokens // BLOCK), dry=asked.dry)
    greedy = Draw(Sampling(1, temperature=0.0), 0, 0)
    step_s = bench.seconds(partial(bench.runner.run, bench.slices(0, tokens, [greedy])), rounds)
    config = bench.config
    head_dim = config.hidden_size // config.num_attention_heads
    seen = tokens * (tokens + 1) // 2  # pairs of tokens
    attention = 4 * seen * config.num_attention_heads * head_dim * config.num_hidden_layers
    flops = 2 * bench.linear * tokens + 2 * bench.head + attention
    rate = product_rate(bench, size, rounds)
    progress(f"{step_s * 1e3:.1f} ms, {flops / step_s / 1e12:.1f} TFLOP/s; a product: {rate / 1e12:.0f} TFLOP/s")
    value = flops / step_s / rate
    end(
        asked, NAME, value, UNIT, floor=FLOOR, peer=PEER, ok=value >= FLOOR,
        step_ms=round(step_s * 1e3, 2), tokens_per_s=round(tokens / step_s),
    )  # fmt: skip


if __name__ == "__main__":
    main()
